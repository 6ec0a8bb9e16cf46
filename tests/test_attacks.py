"""Attacks on the sandbox, and more ways to fake a verdict: none passes or leaves anything.

Each runs as the user of the tests. Where that is root, those to which it matters run once more
as a user without privileges.
"""

import json
import os
import pwd
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from helpers import alive, copy_sandbox

from measures import sandbox
from measures.cell import FOLDER_MB, REFUSED
from measures.sandbox import START, SandboxError, run_python

KEY = "sk-a-key-that-nobody-may-see"
# The caller has KEY in a keyring of its session, and says whether that still holds KEY alone.
CALL = """
import ctypes, json, os, sys
sys.path.insert(0, sys.argv[1])
from measures import sandbox
from measures.cell import REFUSED
_, add_key, _, keyctl, *_ = REFUSED[os.uname().machine]
call, held = ctypes.CDLL(None).syscall, ctypes.create_string_buffer(80)
call(keyctl, 1, None)
key = call(add_key, b"user", b"secret", KEY, len(KEY), -3)
sandbox.START, order = json.load(sys.stdin)
result = sandbox.run_python(**order)
size = call(keyctl, 11, -3, held, 80)
kept = held.raw[:size] == key.to_bytes(4, "little") and \
call(keyctl, 11, key, held, 80) == len(KEY)
print(json.dumps([result.passed, result.status, result.stderr, kept]))
""".replace("KEY", repr(KEY.encode()))


def sandbox_lacks() -> str:
    try:
        return "" if run_python("", "assert True").passed else "it does not work"
    except SandboxError as error:
        return str(error)


here = pytest.mark.skipif(bool(LACKS := sandbox_lacks()), reason=f"no sandbox: {LACKS}")
_, ADD_KEY, _, KEYCTL, PTRACE, *_ = REFUSED.get(os.uname().machine, range(9))
LIBC = "import ctypes, os, resource, signal, time\ncall = ctypes.CDLL(None).syscall\n"
# Does to every other process what would keep it from weighing; then five hold 2 GiB together.
BLIND = LIBC + f"""
for process in sorted(int(name) for name in os.listdir('/proc') if name.isdigit()):
    for act in (lambda: call({PTRACE}, 16, process, 0, 0),
                lambda: resource.prlimit(process, resource.RLIMIT_NOFILE, (0, 0)),
                lambda: os.sched_setscheduler(process, os.SCHED_IDLE, os.sched_param(0)),
                lambda: os.kill(process, signal.SIGSTOP)):
        try:
            if process != os.getpid():
                print(process, act())
        except OSError as error:
            print(process, error)
for _ in range(5):
    if os.fork() == 0:
        x = b'x' * (400 << 20)
        time.sleep(60)
time.sleep(60)
""".replace("{", "{{").replace("}", "}}")

# name: (status, code); {outside} and {port} are filled in
ATTACKS = {
    "fork bomb": ("timeout", "import os\nwhile True:\n    try:\n        os.fork()\n"
                  "    except OSError:\n        pass"),
    "memory bomb": ("memory", "x = []\nwhile True:\n    x.append(bytearray(16 << 20))"),
    "endless loop": ("timeout", "while True:\n    pass"),
    "kill parent": ("error", "import os, time\nos.kill(os.getppid(), 9)\ntime.sleep(0.5)\n"
                    "assert False, 'it does nothing'"),
    "write to the home directory": (
        "error", "from pathlib import Path\nwritten = 0\nfor place in {outside}:\n    try:\n"
        "        Path(place, 'written').write_text('x')\n        written += 1\n"
        "    except OSError as error:\n        print(error)\nassert written"),
    "read an API key": (
        "error", "import glob, os\nfound = repr(os.environ)\n"
        "for place in glob.glob('/proc/*/environ') + glob.glob('{outside[0]}/*'):\n    try:\n"
        "        found += open(place).read()\n    except OSError:\n        pass\nprint(found)\n"
        "assert 'sk-' in found"),
    "connect to a loopback listener": (
        "error", "import socket\nsocket.create_connection(('127.0.0.1', {port}), timeout=1)"),
    "fill the disk": (
        "error", "import itertools, os\ntry:\n    for i in itertools.count():\n"
        "        with open(str(i), 'wb', 0) as file:\n"
        "            for _ in range(8):\n                file.write(bytes(1 << 20))\nfinally:\n"
        "    print('MiB', sum(os.stat(name).st_blocks for name in os.listdir()) >> 11)"),
    "ignore the end of the time": (
        "timeout", "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\n"
        "while True:\n    pass"),
    "unkillable signal handler": (
        "timeout", "import signal, time\n"
        "for number in set(signal.Signals) - {{signal.SIGKILL, signal.SIGSTOP}}:\n"
        "    signal.signal(number, lambda *_: None)\nwhile True:\n    time.sleep(1)"),
    "background child": (
        "error", "import os, signal, time\nif os.fork() == 0:\n    os.setsid()\n"
        "    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "    if os.fork() == 0:\n        os.closerange(0, 100)\n        time.sleep(600)\n"
        "    os._exit(0)\ntime.sleep(0.3)\nassert False"),
    "fake verdict": (
        "error", "import os, sys\n"
        "for word in (b'passed', b'0' * 32 + b' passed', b'\\n0\\n', b'\\npassed\\n0\\n'):\n"
        "    for fd in range(1, 30):\n        try:\n            os.write(fd, word)\n"
        "        except OSError:\n            pass\nos._exit(0)"),
    "guess the token": (
        "error", "import os\nfor fd in range(3, 30):\n    try:\n"
        "        os.write(fd, b'it passed')\n    except OSError:\n        pass\nos._exit(0)"),
    # Reads, deletes or plants one.
    "take the caller's keys": (
        "error", LIBC + f"key = call({KEYCTL}, 10, -3, b'user', b'secret', 0)\n"
        f"text = ctypes.create_string_buffer(80)\ncall({KEYCTL}, 11, key, text, 80)\n"
        f"print(text.value)\nplanted = [call({ADD_KEY}, b'user', b'planted', b'x', 1, ring) "
        f"for ring in (-2, -3, -4, -5)]\ndeleted = call({KEYCTL}, 7, -3) == 0\n"
        f"assert max(key, *planted) > 0 or deleted"),
    "blind the watcher": ("memory", BLIND),
    "change its root": ("error", "import os\nos.mkdir('x')\nos.chroot('x')"),
    "memory that no process maps": (
        "error", "import os\nfile = os.memfd_create('x')\nos.write(file, bytes(1 << 20))")}
# Which user runs these makes no difference to what stops them.
ALIKE = {"memory bomb", "endless loop", "ignore the end of the time", "fake verdict",
         "guess the token", "unkillable signal handler"}
IS_ROOT = sys.platform == "linux" and os.geteuid() == 0
AS_ITSELF = [pytest.param(name, None, id=f"{name}-itself") for name in ATTACKS]
AS_NOBODY = [pytest.param(name, 65534, id=f"{name}-unprivileged")
             for name in ATTACKS if IS_ROOT and name not in ALIKE]


@pytest.fixture()
def outside():
    """A folder with a key in which every user may write: nobody can read the tests' own."""
    folder = Path("/var/tmp", f"outside-{os.getpid()}-{time.monotonic_ns()}")
    folder.mkdir()
    folder.chmod(0o777)
    (folder / "key").write_text(KEY)
    yield folder
    shutil.rmtree(folder)


def attack(order: dict, start: float, user: int | None, folder: Path) -> tuple:
    """(passed, status, stderr, keys kept) of run_python in a fresh interpreter.

    start: the seconds on the clock that a run has to begin in.
    """
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
                          input=json.dumps([start, order]), capture_output=True,
                          timeout=120, **others)            # no attack delays its end so long
    assert done.returncode == 0, done.stderr
    return tuple(json.loads(done.stdout))


def starts(python: str, user: int | None) -> bool:
    try:
        test = [python, "-c", "import sys; sys.exit(sys.version_info < (3, 11))"]
        return subprocess.run(test, user=user, cwd="/", capture_output=True).returncode == 0
    except OSError:                                    # a folder above it is closed
        return False


@here
@pytest.mark.parametrize("name, user", AS_ITSELF + AS_NOBODY)
def test_an_attack_ends_in_time_does_not_pass_and_leaves_nothing(name, user, outside):
    expected, code = ATTACKS[name]
    # What only the clock stops is stopped soon: after 5 * 0.2 + 1 s.
    limit, start = (0.2, 1) if expected == "timeout" else (10, START)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        home = pwd.getpwuid(os.getuid() if user is None else user).pw_dir
        code = code.format(outside=[str(outside), home, "/tmp", "/etc", "/"],
                           port=listener.getsockname()[1])
        order = {"code": code, "tests": "assert True", "timeout": limit, "memory_mb": 512}
        passed, status, stderr, kept = attack(order, start, user, outside)
        with pytest.raises(BlockingIOError):
            listener.accept()
    assert (passed, status, kept) == (False, expected, True), stderr
    assert not alive(str(outside)) and not list((outside / "temporary").iterdir())
    assert not list(outside.glob("**/written")) and not Path(home, "written").exists()
    assert KEY not in stderr
    if name == "fill the disk":
        assert ("No space left" in stderr
                and int(stderr.split("MiB ")[1].split()[0]) <= FOLDER_MB)


# ── Verdicts

EQUAL = ("class Equal({}):\n    def __eq__(self, other):\n        return True\n"
         "    __hash__ = object.__hash__\n"
         "    __lt__ = __le__ = __gt__ = __contains__ = __eq__\n")
# Clears the tests' statements wherever a frame holds them, and says that one was reached.
WALK = ("import sys\nframe = sys._getframe()\nwhile frame:\n"
        "    for held in [*frame.f_locals.values()]:\n"
        "        if type(held) is set: held.add('assertion')\n"
        "        if type(held) is list: held.clear()\n"
        "        if type(held) is dict and 'statements' in held: held['statements'] = ()\n"
        "    frame = frame.f_back\n")


@here
@pytest.mark.parametrize("code", [
    "import builtins\nbuiltins.abs = lambda x: 0\nbuiltins.exec = lambda *_: None",
    "__builtins__['abs'] = lambda x: 0\n__builtins__['AssertionError'] = Warning",
    ("import __main__, os\nwrite = os.write\n"
     "os.write = lambda to, what: write(to, what.replace(b'failed', b'passed'))"),
    "def check(*_):\n    pass\nassertion = close = check",
    "def f():\n    globals()['close'] = lambda *_: True",
    EQUAL.format("") + "def f():\n    return Equal()",
    EQUAL.format("int") + "def f():\n    return Equal(1)",
    EQUAL.format("str") + "def f():\n    return Equal('a')",
    EQUAL.format("list") + "def f():\n    return Equal()",
    EQUAL.format("") + "def f():\n    return [(1, {'a': Equal()})]",
    "def f():\n    " + WALK.replace("\n", "\n    ") + "return 1",
    "import os\nif os.fork():\n    os.wait()",
    "import os\nif not os.fork():\n    f = lambda: 2",
    "import os, signal\nos.kill(-1, signal.SIGKILL)",
    "import ctypes\nctypes.string_at(0)"])
def test_a_wrong_answer_passes_in_no_disguise(code):
    code += "" if "f()" in code or "f =" in code else "\ndef f():\n    return 1"
    close = ("def close(a, b):\n    return a == b or abs(a - b) < 1e-6\ndef check(candidate):\n"
             "    x = candidate()\n    assert close(x, 2)\ncheck(f)")
    pytests = "def test_f():\n    assert f() == 2\ndef test_g():\n    assert 2 in [f()]"
    for tests in (close, pytests, "assert 2 in f()", "assert f() == [(1, {'a': 2})]"):
        assert not run_python(code, tests, timeout=1).passed


@here
def test_no_name_frame_or_container_holds_the_token(monkeypatch):
    """A search of all that Python can reach finds a planted token, and not the true one."""
    code = """
import gc, re, sys
def f():
    seen, tokens, frame, todo = set(), set(), sys._getframe(), gc.get_objects()
    while frame := frame.f_back:
        todo += [frame, frame.f_locals, frame.f_globals]
    while todo:
        thing = todo.pop()
        if id(thing) not in seen:
            seen.add(id(thing))
            if isinstance(thing, (str, bytes)):
                tokens.update(re.findall('[0-9a-f]{64}', str(thing)))
            todo += gc.get_referents(thing)
    return tokens"""
    start, replies = sandbox._start, []
    monkeypatch.setattr(sandbox, "_start",
                        lambda *order: replies.append(start(*order)) or replies[-1])
    result = run_python(code, "planted = ['ab' * 32]\nprint(f())\nassert planted[0] in f()")
    token, again, verdict, end = replies[-1][0]
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
    "resource.setrlimit(resource.RLIMIT_NPROC, (999, 999))",
    "os.setuid(0)", "os.chroot('.')",
    "subprocess.run(['mount', '-t', 'tmpfs', 'x', '.'], check=True)",
    "subprocess.run(['unshare', '-Ur', 'true'], check=True)"])
def test_no_privilege_is_held_or_won(code):
    needed = "import os, resource, subprocess\nassert os.geteuid() != 0\n"
    assert run_python(needed, "assert True").passed
    assert run_python(needed + code, "assert True").status == "error"


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
    ("import builtins, math, random, datetime, decimal, fractions, typing, enum, hashlib, ssl, "
     "multiprocessing, unittest.mock\nassert builtins.len([1]) == 1"),
    "count = 0\ndef add():\n    global count\n    count += 1"])
def test_honest_code_passes(code):
    if "numpy" in code:
        pytest.importorskip("numpy")
    tests = ("add()\nassert count == 1\nadd()\nassert count == 2" if "add" in code
             else "assert True")
    result = run_python(code, tests, unsafe=bool(LACKS))
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

SPIN = """
import time
def f():
    end = time.process_time() + {}
    while time.process_time() < end:
        pass
"""


def test_time_is_of_the_program_and_on_the_cpu(monkeypatch):
    """Not what it waits for. The clock alone would let all three end."""
    monkeypatch.setattr(sandbox, "START", 120)
    run = partial(run_python, timeout=0.3, unsafe=bool(LACKS))        # one second of CPU time
    assert run("import time\ntime.sleep(1.3)", "assert True").passed
    assert run(SPIN.format(0.2), "assert f() is None").passed
    assert run(SPIN.format(4), "assert f() is None").status == "timeout"


# ── What is left of a run: nothing, also where there is no sandbox

def test_children_do_not_outlive_the_run(tmp_path, monkeypatch):
    """One is forked, one is a program of its own; both hold the output open."""
    monkeypatch.setattr(sandbox, "__file__", copy_sandbox(tmp_path / "code"))
    code = ("import os, subprocess, time\n"
            "if os.fork() == 0:\n    time.sleep(600)\n    os._exit(0)\n"
            f"subprocess.Popen(['sh', '-c', 'sleep 600; : {tmp_path}'])\n")
    for end, expected in (("", "passed"), ("while True: pass", "timeout"),
                          ("os._exit(0)", "error")):
        with ThreadPoolExecutor(1) as pool:
            run = pool.submit(run_python, code + end, "assert True", timeout=0.5, unsafe=True)
            most = 0
            while not run.done():
                most = max(most, len(alive(str(tmp_path), 0)))
                time.sleep(0.01)
        assert run.result().status == expected and not alive(str(tmp_path))
        assert most > 3 or expected != "timeout"       # so that the search finds what there is


@pytest.mark.parametrize("end", [
    "", "os._exit(0)",
    "while True:\n    open(str(time.time()), 'w').close()\n    time.sleep(0.001)",
    "os.mkdir('closed')\nopen('closed/file', 'w').close()\nos.chmod('closed', 0)"])
def test_no_directory_is_left(end, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(sandbox, "START", 2)
    code = "import os, time\nprint(os.listdir())\n" + end
    result = run_python(code, "assert True", timeout=0.1, unsafe=True)
    assert "solution.py" in result.stderr and not list(tmp_path.iterdir())


@here
def test_a_run_ends_with_its_caller_and_leaves_nothing(outside):
    """Which is killed when it has one, two or three processes, which sleep in the end."""
    call = ("import sys; sys.path[:0] = sys.argv[1:2]; "
            "from measures.sandbox import run_python; run_python(*sys.argv[2:])")
    copy_sandbox(outside / "code")
    (outside / "temporary").mkdir()
    for started in (1, 2, 3, 3):
        caller = subprocess.Popen([sys.executable, "-c", call, str(outside / "code"),
                                   "import time\ntime.sleep(600)", "assert 1"],
                                  env={"TMPDIR": str(outside / "temporary")})
        while len(alive(str(outside), 0)) < 1 + started:
            assert caller.poll() is None
        time.sleep(random.random() / 10)
        caller.kill()
        caller.wait()
        assert not alive(str(outside)) and not list((outside / "temporary").iterdir())
