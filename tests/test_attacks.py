"""Attacks on the sandbox, and more ways to fake a verdict:
none passes, none leaves anything behind.

Each runs as the user of the tests and, where that is root,
once more as a user without privileges."""

import json
import os
import pwd
import random
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from measures import sandbox
from measures.cell import FAR, FOLDER_MB, REFUSED
from measures.sandbox import SandboxError, run_python
from test_sandbox import alive, copy_sandbox

KEY = "sk-a-key-that-nobody-may-see"
# The caller has KEY in a keyring of its session,
# and says whether it still holds that and no more.
CALL = """
import ctypes, json, os, sys, time
sys.path.insert(0, sys.argv[1])
from measures.sandbox import run_python
from measures.cell import REFUSED
_, add_key, _, keyctl, *_ = REFUSED[os.uname().machine]
call, held = ctypes.CDLL(None).syscall, ctypes.create_string_buffer(80)
call(keyctl, 1, None)
key = call(add_key, b"user", b"secret", KEY, len(KEY), -3)
begun = time.monotonic()
result = run_python(**json.load(sys.stdin))
seconds = time.monotonic() - begun
size = call(keyctl, 11, -3, held, 80)
kept = held.raw[:size] == key.to_bytes(4, "little") and \
call(keyctl, 11, key, held, 80) == len(KEY)
print(json.dumps([result.passed, result.status, result.stderr, seconds, kept]))
""".replace("KEY", repr(KEY.encode()))


def sandbox_lacks() -> str:
    try:
        return "" if run_python("", "assert True").passed else "it does not work"
    except SandboxError as error:
        return str(error)


here = pytest.mark.skipif(bool(LACKS := sandbox_lacks()), reason=f"no sandbox: {LACKS}")
_, ADD_KEY, _, KEYCTL, PTRACE, *_ = REFUSED.get(os.uname().machine, range(9))
LIBC = "import ctypes, os, resource, signal, time\ncall = ctypes.CDLL(None).syscall\n"
# What {act} does to every other process that it sees; then five children hold 2 GiB together.
HOLD = LIBC + """
for process in sorted(int(name) for name in os.listdir('/proc') if name.isdigit()):
    if process != os.getpid():
        try:
            print(process, {act})
        except OSError as error:
            print(process, error)
for _ in range(5):
    if os.fork() == 0:
        x = b'x' * (400 << 20)
        time.sleep(60)
time.sleep(60)
"""

# name: code, status, limit in seconds; {outside} and {port} are filled in
ATTACKS = {
    "fork bomb": (
        "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError: pass",
        "timeout", .5),
    "memory bomb": ("x = []\nwhile True:\n    x.append(bytearray(16 << 20))", "memory", 10),
    "endless loop": ("while True:\n    pass", "timeout", 1),
    "endless output": ("while True:\n    print('x' * 100_000)", "error", 10),
    "os._exit(0)": ("import os\nos._exit(0)", "error", 10),
    "sys.exit(0)": ("import sys\nsys.exit(0)", "error", 10),
    "kill parent": ("import os, time\nos.kill(os.getppid(), 9)\ntime.sleep(0.5)\n"
                    "assert False, 'it does nothing'", "error", 10),
    "write to the home directory": (
        "from pathlib import Path\nwritten = 0\nfor place in {outside}:\n    try:\n"
        "        Path(place, 'written').write_text('x')\n        written += 1\n"
        "    except OSError as error:\n        print(error)\nassert written", "error", 10),
    "read an API key": (
        "import glob, os\nfound = repr(os.environ)\n"
        "for place in glob.glob('/proc/*/environ') + glob.glob('{outside[0]}/*'):\n    try:\n"
        "        found += open(place).read()\n    except OSError:\n        pass\nprint(found)\n"
        "assert 'sk-' in found", "error", 10),
    "connect to a loopback listener": (
        "import socket\nsocket.create_connection(('127.0.0.1', {port}), timeout=1)",
        "error", 10),
    "fill the disk": (
        "import itertools, os\ntry:\n    for i in itertools.count():\n"
        "        with open(str(i), 'wb', 0) as file:\n"
        "            for _ in range(8):\n                file.write(bytes(1 << 20))\nfinally:\n"
        "    print('MiB', sum(os.stat(name).st_blocks for name in os.listdir()) >> 11)",
        "error", 10),
    "ignore the end of the time": (
        "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True:\n    pass",
        "timeout", 1),
    "unkillable signal handler": (
        "import signal, time\n"
        "for number in set(signal.Signals) - {{signal.SIGKILL, signal.SIGSTOP}}:\n"
        "    signal.signal(number, lambda *_: None)\nwhile True:\n    time.sleep(1)",
        "timeout", .4),
    "background child": (
        "import os, signal, time\nif os.fork() == 0:\n    os.setsid()\n"
        "    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "    if os.fork() == 0:\n        os.closerange(0, 100)\n        time.sleep(600)\n"
        "    os._exit(0)\ntime.sleep(0.3)\nassert False", "error", 10),
    "fake verdict": (
        "import os, sys\n"
        "for word in (b'passed', b'0' * 32 + b' passed', b'\\n0\\n', b'\\npassed\\n0\\n'):\n"
        "    for fd in range(1, 30):\n        try:\n            os.write(fd, word)\n"
        "        except OSError: pass\nos._exit(0)", "error", 10),
    "read the caller's keys": (
        LIBC + f"key = call({KEYCTL}, 10, -3, b'user', b'secret', 0)\n"
        f"text = ctypes.create_string_buffer(80)\ncall({KEYCTL}, 11, key, text, 80)\n"
        f"print(text.value)\nassert key > 0", "error", 10),
    "delete the caller's keys": (LIBC + f"assert call({KEYCTL}, 7, -3) == 0", "error", 10),
    "plant a key": (LIBC + f"assert max(call({ADD_KEY}, b'user', b'planted', b'x', 1, ring) "
                    f"for ring in (-2, -3, -4, -5)) > 0", "error", 10),
    "trace the watcher": (HOLD.format(act=f"call({PTRACE}, 16, process, 0, 0)"), "memory", 10),
    "stop the watcher": (HOLD.format(act="os.kill(process, signal.SIGSTOP)"), "memory", 10),
    "prlimit on the watcher": (
        HOLD.format(act="resource.prlimit(process, resource.RLIMIT_NOFILE, (0, 0))"),
        "memory", 10),
    "SCHED_IDLE for the watcher": (
        HOLD.format(act="os.sched_setscheduler(process, os.SCHED_IDLE, os.sched_param(0))"),
        "memory", 10),
    "change its root": ("import os\nos.mkdir('x')\nos.chroot('x')", "error", 10),
    "memory that no process maps": (
        "import os\nfile = os.memfd_create('x')\nos.write(file, bytes(1 << 20))", "error", 10)}


def users() -> list:
    return [None, 65534] if sys.platform == "linux" and os.geteuid() == 0 else [None]


@pytest.fixture()
def outside():
    """A folder that holds a key and that every user may write to;
    nobody can read the tests' own."""
    folder = Path("/var/tmp", f"outside-{os.getpid()}-{time.monotonic_ns()}")
    folder.mkdir()
    folder.chmod(0o777)
    (folder / "key").write_text(KEY)
    yield folder
    shutil.rmtree(folder)


def attack(order: dict, user: int | None, folder: Path) -> tuple:
    """(passed, status, stderr, seconds, keys kept) of run_python in a fresh interpreter."""
    copy_sandbox(folder / "code")
    (folder / "code" / "tqdm.py").write_text("tqdm = list")        # another Python may lack it
    python = next((path for path in (sys.executable, "/usr/bin/python3") if starts(path, user)),
                  None)
    if python is None:
        pytest.skip("no Python >= 3.11 that a user without privileges can start")
    (folder / "temporary").mkdir()
    (folder / "temporary").chmod(0o777)
    others = {} if user is None else {"user": user, "group": user, "extra_groups": []}
    done = subprocess.run([python, "-B", "-c", CALL, str(folder / "code")], cwd="/", text=True,
                          env={"OPENAI_API_KEY": KEY, "TMPDIR": str(folder / "temporary")},
                          input=json.dumps(order), capture_output=True, **others)
    assert done.returncode == 0, done.stderr
    return tuple(json.loads(done.stdout))


def starts(python: str, user: int | None) -> bool:
    try:
        test = [python, "-c", "import sys; sys.exit(sys.version_info < (3, 11))"]
        return subprocess.run(test, user=user, cwd="/", capture_output=True).returncode == 0
    except OSError:                                    # a folder above it is closed
        return False


@here
@pytest.mark.parametrize("user", users(),
                         ids=lambda user: "itself" if user is None else "unprivileged")
@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_ends_in_time_does_not_pass_and_leaves_nothing(name, user, outside):
    code, expected, timeout = ATTACKS[name]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        home = pwd.getpwuid(os.getuid() if user is None else user).pw_dir
        code = code.format(outside=[str(outside), home, "/tmp", "/etc", "/"],
                           port=listener.getsockname()[1])
        order = {"code": code, "tests": "assert True", "timeout": timeout, "memory_mb": 512}
        passed, status, stderr, seconds, kept = attack(order, user, outside)
        with pytest.raises(BlockingIOError):
            listener.accept()
    print(f"{name} | {status} | {seconds:.2f} | {(stderr.strip().splitlines() or [''])[-1]}")
    assert (passed, status) == (False, expected), stderr
    assert seconds < FAR * timeout + 10 and kept
    assert not alive(str(outside)) and not list((outside / "temporary").iterdir())
    assert (not list(outside.glob("**/written")) and not Path(home, "written").exists()
            and KEY not in stderr)
    if name == "fill the disk":
        assert ("No space left" in stderr
                and int(stderr.split("MiB ")[1].split()[0]) <= FOLDER_MB)


# ── Verdicts

EQUAL = ("class Equal({}):\n    def __eq__(self, other):\n        return True\n"
         "    __hash__ = object.__hash__\n")


# Clears the tests' statements wherever a frame holds them,
# and says that an assertion was reached.
WALK = ("import sys\nframe = sys._getframe()\nwhile frame:\n"
        "    for held in [*frame.f_locals.values()]:\n"
        "        if type(held) is set: held.add('assertion')\n"
        "        if type(held) is list: held.clear()\n"
        "        if type(held) is dict and 'statements' in held: held['statements'] = ()\n"
        "    frame = frame.f_back\n")


@here
@pytest.mark.parametrize("code", [
    "import builtins\nbuiltins.abs = lambda x: 0",
    "import builtins\nbuiltins.exec = lambda *_: None",
    "__builtins__['abs'] = lambda x: 0\n__builtins__['AssertionError'] = Warning",
    "import __main__\n__main__.cell._run = lambda *_: 1",
    (EQUAL.format("") + "import sys\nsys.modules['cell']._Sealed = lambda value: value\n"
     "def f():\n    return Equal()"),
    "import marshal, math\nmarshal.loads = lambda *_: None\nmath.isclose = lambda *_: True",
    ("import __main__, os\nwrite = os.write\n"
     "os.write = lambda to, what: write(to, what.replace(b'failed', b'passed'))"),
    "import ast\nast.parse = lambda *_: ast.Module([], [])\nast.walk = lambda *_: []",
    "import traceback, sys\ntraceback.TracebackException = sys.excepthook = None",
    "import atexit, os\natexit.register(lambda: os.write(1, b'passed'))",
    "def check(*_):\n    pass\nassertion = close = check",
    "def f():\n    globals()['close'] = lambda *_: True",
    "def f():\n    globals()['__reached__'] = lambda *_: True",
    EQUAL.format("") + "def f():\n    return Equal()",
    EQUAL.format("int") + "def f():\n    return Equal(1)",
    EQUAL.format("str") + "def f():\n    return Equal('a')",
    EQUAL.format("") + "def f():\n    return {'a': [Equal()]}",
    EQUAL.format("").replace("Equal", "f"),
    (EQUAL.format("") + "    __lt__ = __le__ = __gt__ = __contains__ = __eq__\n"
     "def f():\n    return Equal()"),
    WALK + "def f():\n    return 1",
    "def f():\n    " + WALK.replace("\n", "\n    ") + "return 1",
    EQUAL.format("list") + "def f():\n    return Equal()",
    EQUAL.format("") + "def f():\n    return [(1, {'a': Equal()})]",
    "import os\nif os.fork():\n    os.wait()",
    "import os\nif not os.fork():\n    f = lambda: 2",
    "import os, signal\nos.kill(-1, signal.SIGKILL)",
    "import os, signal\nos.kill(1, signal.SIGKILL)",
    "import ctypes\nctypes.string_at(0)"])
def test_a_wrong_answer_passes_in_no_disguise(code):
    code += "" if "f()" in code or "f =" in code else "\ndef f():\n    return 1"
    close = ("def close(a, b):\n    return a == b or abs(a - b) < 1e-6\ndef check(candidate):\n"
             "    x = candidate()\n    assert close(x, 2)\ncheck(f)")
    pytests = "def test_f():\n    assert f() == 2\ndef test_g():\n    assert 2 in [f()]"
    for tests in (close, pytests, "assert f() == [(1, {'a': 2})]"):
        assert not run_python(code, tests, timeout=1).passed


@here
def test_no_lie_is_told_of_members():
    code = ("class Lie:\n    def __contains__(self, _):\n        return True\n"
            "def f():\n    return Lie()")
    assert not run_python(code, "assert 2 in f()").passed


def test_what_tests_import_by_name_is_their_own():
    code, tests = "import math\nmath.floor = lambda _: 2", "from math import floor\n"
    for right, expected in ((1, "passed"), (2, "failed")):
        asserted = f"{tests}assert floor(1.5) == {right}"
        assert run_python(code, asserted, unsafe=bool(LACKS)).status == expected


@here
def test_no_name_frame_or_container_holds_the_token(monkeypatch):
    """A search of all that Python can reach finds a planted token, and not the true one."""
    code = """import gc, re, sys
def f():
    seen, found, frame, todo = set(), set(), sys._getframe(), gc.get_objects()
    while frame := frame.f_back:
        todo += [frame, frame.f_locals, frame.f_globals]
    while todo:
        thing = todo.pop()
        if id(thing) not in seen:
            seen.add(id(thing))
            text = thing.decode('latin') if isinstance(thing, bytes) else \
thing if isinstance(thing, str) else ''
            found.update(re.findall('[0-9a-f]{64}', text))
            todo += gc.get_referents(thing)
    return found"""
    start, said = sandbox._start, []
    monkeypatch.setattr(sandbox, "_start",
                        lambda *order: said.append(start(*order)) or said[-1])
    tests = ("def test_it():\n    planted = ['ab' * 32]\n    found = f()\n    print(found)\n"
             "    assert planted[0] in found")
    result = run_python(code, tests)
    token, again, verdict, end = said[-1][0]
    assert result.passed and len(token) == 64 and token not in result.stderr
    assert (again, verdict, end) == (token, "passed", "0")


@here
def test_memory_is_counted_over_all_processes_and_processes_are_counted():
    code = ("import os, time\nfor _ in range(8):\n    if os.fork() == 0:\n"
            "        x = b'x' * (100 << 20)\n        time.sleep(60)\ntime.sleep(60)")
    result = run_python(code, "assert True", timeout=30, memory_mb=300)
    assert result.status == "memory" and "300 MiB" in result.stderr
    many = ("import threading, time\nfor _ in range(200):\n"
            "    threading.Thread(target=time.sleep, args=(60,)).start()")
    assert "can't start new thread" in run_python(many, "assert True", memory_mb=4000).stderr


@here
@pytest.mark.parametrize("code", [
    "import os\nassert os.geteuid() != 0",
    "import resource\nresource.setrlimit(resource.RLIMIT_NPROC, (999, 999))",
    "import os\nos.setuid(0)", "import os\nos.chroot('.')",
    "import subprocess\nsubprocess.run(['mount', '-t', 'tmpfs', 'x', '.'], check=True)",
    "import subprocess\nsubprocess.run(['unshare', '-Ur', 'true'], check=True)"])
def test_no_privilege_is_held_or_won(code):
    expected = "passed" if code.endswith("!= 0") else "error"
    assert run_python(code, "assert True").status == expected


# ── Without a sandbox

def test_where_no_sandbox_can_be_put_up_code_is_refused_and_run_only_when_told(monkeypatch,
                                                                               tmp_path):
    place = Path(copy_sandbox(tmp_path / "code")).parent / "cell.py"
    place.write_text(place.read_text().replace('_libc("unshare", ', '_libc("setns", '))
    monkeypatch.setattr(sandbox, "__file__", str(place))
    with pytest.raises(SandboxError,
                       match="no sandbox can be put up here.*setns.*--unsafe_sandbox$"):
        run_python("x = 1", "assert x == 1")
    assert run_python("x = 1", "assert x == 1", unsafe=True).passed
    code = "import os\nos.kill(os.getppid(), 9)"
    assert run_python(code, "assert True", unsafe=True).status in ("killed", "error")
    assert (run_python("while True:\n    pass", "assert True", 0.7, unsafe=True).status
            == "timeout")


@here
def test_a_root_that_is_built_slowly_is_waited_for(monkeypatch):
    """The process that weighs looks into it every 50 ms; under load it may not be there yet."""
    monkeypatch.setattr(sandbox, "CHILD", """
import sys, time; sys.path.insert(0, {!r}); import cell
build = cell._build_root
cell._build_root = lambda user: (time.sleep(0.3), build(user))
cell.main()""")
    assert run_python("x = 1", "assert x == 1").passed


# ── What honest code does

@pytest.mark.parametrize("code", [
    ("import numpy\nassert numpy.ones((3, 3)).sum() == 9 and "
     "abs(numpy.linalg.det(numpy.eye(3)) - 1) < 1e-9"),
    ("import subprocess, sys\n"
     "assert subprocess.check_output([sys.executable, '-c', 'print(1)']) == b'1\\n'"),
    ("import tempfile\nwith tempfile.TemporaryDirectory() as place:\n"
     "    open(place + '/file', 'w').write('x')"),
    "import sqlite3\nassert sqlite3.connect('data').execute('select 1').fetchone() == (1,)",
    ("from concurrent.futures import ThreadPoolExecutor\n"
     "assert list(ThreadPoolExecutor(8).map(abs, [-1, 2])) == [1, 2]"),
    "import asyncio\nassert asyncio.run(asyncio.sleep(0, 1)) == 1",
    ("import sys\nsys.setrecursionlimit(20_000)\ndef g(n):\n    return n and 1 + g(n - 1)\n"
     "assert g(15_000) == 15_000"),
    ("from dataclasses import dataclass\n@dataclass\nclass P:\n    x: int\n"
     "assert P(1) == P(1) != P(2)"),
    "import builtins\nassert builtins.len([1]) == 1 and isinstance(__builtins__, dict)",
    ("import math, random, datetime, decimal, fractions, typing, enum, hashlib, ssl, "
     "multiprocessing, unittest.mock"),
    "count = 0\ndef add():\n    global count\n    count += 1"])
def test_honest_code_passes(code):
    if "numpy" in code:
        pytest.importorskip("numpy")
    tests = ("add()\nassert count == 1\nadd()\nassert count == 2" if "add" in code
             else "assert True")
    result = run_python(code, tests)
    assert result.passed, result.stderr


@here
def test_what_a_run_met_is_said():
    """torch maps more than the limit; multiprocessing has its semaphores."""
    result = run_python("import torch", "assert True")
    assert (result.status == "memory"
            and "the limit is 512 MiB of memory in a process" in result.stderr)
    code = ("import multiprocessing as mp\ndef f(x):\n    with mp.Pool(2) as pool:\n"
            "        return pool.map(abs, x)")
    assert run_python(code, "assert f([-1, 2]) == [1, 2]").passed


# ── Time

SPIN = ("import time\ndef f():\n    end = time.process_time() + {}\n"
        "    while time.process_time() < end:\n        pass\n")


def test_time_is_of_the_program_and_on_the_cpu():
    """Not what it waits for."""
    assert run_python("import time\ntime.sleep(2.5)", "assert True", timeout=1,
                      unsafe=bool(LACKS)).passed
    for seconds, expected in ((0.5, "passed"), (20, "timeout")):
        found = run_python(SPIN.format(seconds), "assert f() is None", timeout=1,
                           unsafe=bool(LACKS))
        assert found.status == expected


@here
def test_a_run_ends_with_its_caller_and_leaves_nothing(outside):
    """Which is killed at some moment of the run, three times while it sleeps."""
    call = ("import sys; sys.path[:0] = sys.argv[1:2]; "
            "from measures.sandbox import run_python; run_python(*sys.argv[2:])")
    copy_sandbox(outside / "code")
    (outside / "temporary").mkdir()
    for seconds in (0.0, 0.02, 0.05, *(3 * [60])):
        caller = subprocess.Popen([sys.executable, "-c", call, str(outside / "code"),
                                   "import time\ntime.sleep(600)", "assert 1"],
                                  env={"TMPDIR": str(outside / "temporary")})
        # the caller, and three of the run
        while len(alive(str(outside), 0)) < (4 if seconds else 2):
            assert caller.poll() is None
        time.sleep(random.random() * min(seconds, 0.1))
        caller.kill()
        caller.wait()
        assert not alive(str(outside)) and not list((outside / "temporary").iterdir())
