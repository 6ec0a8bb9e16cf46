"""Fourteen attacks on the sandbox, and more ways to fake a verdict: none passes, none leaves anything behind.

Each runs as the user of the tests and, where that is root, once more as a user without privileges."""

import json
import os
import pwd
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from measures import sandbox
from measures.sandbox import FOLDER_MB, SandboxError, run_python, sandbox_layers
from test_sandbox import alive

KEY = "sk-a-key-that-nobody-may-see"
CALL = ("import json, sys, time; sys.path.insert(0, sys.argv[1]); from sandbox import run_python; "
        "begun = time.monotonic(); result = run_python(**json.load(sys.stdin)); "
        "print(json.dumps([result.passed, result.status, result.stderr, time.monotonic() - begun]))")
here = pytest.mark.skipif(sys.platform != "linux" or any(sandbox_layers()[name] for name in ("namespaces", "files")),
                          reason=f"no sandbox on this machine: {sandbox_layers() if sys.platform == 'linux' else ''}")

ATTACKS = {                            # name: code, status, limit in seconds; {outside} and {port} are filled in
    "fork bomb": ("import os\nwhile True:\n    try:\n        os.fork()\n    except OSError: pass", "timeout", 2),
    "memory bomb": ("x = []\nwhile True:\n    x.append(bytearray(16 << 20))", "memory", 10),
    "endless loop": ("while True:\n    pass", "timeout", 1),
    "endless output": ("while True:\n    print('x' * 100_000)", "error", 10),
    "os._exit(0)": ("import os\nos._exit(0)", "error", 10),
    "sys.exit(0)": ("import sys\nsys.exit(0)", "error", 10),
    "kill parent": ("import os, time\nos.kill(os.getppid(), 9)\ntime.sleep(0.5)", "killed", 10),
    "write to the home directory": (
        "from pathlib import Path\nwritten = 0\nfor place in {outside}:\n    try:\n"
        "        Path(place, 'written').write_text('x')\n        written += 1\n    except OSError as error:\n"
        "        print(error)\nassert written", "error", 10),
    "read an API key": (
        "import glob, os\nfound = repr(os.environ)\n"
        "for place in glob.glob('/proc/*/environ') + glob.glob('{outside[0]}/*'):\n    try:\n"
        "        found += open(place).read()\n    except OSError:\n        pass\nprint(found)\n"
        "assert 'sk-' in found", "error", 10),
    "connect to a loopback listener": (
        "import socket\nsocket.create_connection(('127.0.0.1', {port}), timeout=1)", "error", 10),
    "fill the disk": (
        "import itertools, os\ntry:\n    for i in itertools.count():\n        with open(str(i), 'wb', 0) as file:\n"
        "            for _ in range(8):\n                file.write(bytes(1 << 20))\n"
        "finally:\n    print('MiB', sum(os.stat(name).st_blocks for name in os.listdir()) >> 11)", "error", 10),
    "unkillable signal handler": (
        "import signal, time\nfor number in set(signal.Signals) - {{signal.SIGKILL, signal.SIGSTOP}}:\n"
        "    signal.signal(number, lambda *_: None)\nwhile True:\n    time.sleep(1)", "timeout", 1),
    "background child": (
        "import os, signal, time\nif os.fork() == 0:\n    os.setsid()\n"
        "    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "    if os.fork() == 0:\n        os.closerange(0, 100)\n        time.sleep(600)\n    os._exit(0)\n"
        "time.sleep(0.3)\nassert False", "error", 10),
    "fake verdict": (
        "import os, sys\nfor word in (b'passed', b'0' * 32 + b' passed', b'\\n0\\n', b'\\npassed\\n0\\n'):\n"
        "    for fd in range(1, 30):\n        try:\n            os.write(fd, word)\n        except OSError: pass\n"
        "os._exit(0)", "error", 10)}


def users() -> list:
    return [None, 65534] if sys.platform == "linux" and os.geteuid() == 0 else [None]


@pytest.fixture()
def outside():
    """A folder that holds a key and that every user may write to; nobody can read the tests' own."""
    folder = Path("/var/tmp", f"outside-{os.getpid()}-{time.monotonic_ns()}")
    folder.mkdir()
    folder.chmod(0o777)
    (folder / "key").write_text(KEY)
    yield folder
    shutil.rmtree(folder)


def attack(order: dict, user: int | None, folder: Path) -> tuple:
    """(passed, status, stderr, seconds) of run_python in a fresh interpreter, run by `user`."""
    python, place = sys.executable, Path(sandbox.__file__).parent
    if user is not None:
        place = folder / "code"
        place.mkdir()
        shutil.copy(sandbox.__file__, place)
        python = next((path for path in (python, "/usr/bin/python3") if starts(path, user)), None)
        if python is None:
            pytest.skip("no Python >= 3.11 that a user without privileges can start")
    (folder / "temporary").mkdir()
    (folder / "temporary").chmod(0o777)
    others = {} if user is None else {"user": user, "group": user, "extra_groups": []}
    done = subprocess.run([python, "-B", "-c", CALL, str(place)], input=json.dumps(order), text=True,
                          env={"OPENAI_API_KEY": KEY, "TMPDIR": str(folder / "temporary")}, cwd="/",
                          capture_output=True, **others)
    assert done.returncode == 0, done.stderr
    return tuple(json.loads(done.stdout))


def starts(python: str, user: int) -> bool:
    try:
        test = [python, "-c", "import sys; sys.exit(sys.version_info < (3, 11))"]
        return subprocess.run(test, user=user, cwd="/", capture_output=True).returncode == 0
    except OSError:                                    # a folder above it is closed
        return False


@here
@pytest.mark.parametrize("user", users(), ids=lambda user: "itself" if user is None else "unprivileged")
@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_ends_in_time_does_not_pass_and_leaves_nothing(name, user, outside):
    code, expected, timeout = ATTACKS[name]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        home = pwd.getpwuid(os.getuid() if user is None else user).pw_dir
        code = code.format(outside=[str(outside), home, "/tmp", "/etc", "/"], port=listener.getsockname()[1])
        order = {"code": code, "tests": "assert True", "timeout": timeout, "memory_mb": 512}
        passed, status, stderr, seconds = attack(order, user, outside)
        with pytest.raises(BlockingIOError):
            listener.accept()
    print(f"{name} | {status} | {seconds:.2f} | {(stderr.strip().splitlines() or [''])[-1]}")
    assert (passed, status) == (False, expected), stderr
    assert seconds < timeout + 2
    assert not alive(str(outside)) and not list((outside / "temporary").iterdir())
    assert not list(outside.glob("**/written")) and not Path(home, "written").exists() and KEY not in stderr
    if name == "fill the disk":
        assert "No space left" in stderr and int(stderr.split("MiB ")[1].split()[0]) <= FOLDER_MB


# ── Verdicts ───────────────────────────────────────────────────────────────────────────────────────────

EQUAL = "class Equal({}):\n    def __eq__(self, other):\n        return True\n    __hash__ = object.__hash__\n"


@here
@pytest.mark.parametrize("code", [
    "import builtins\nbuiltins.abs = lambda x: 0", "import builtins\nbuiltins.exec = lambda *_: None",
    "__builtins__['abs'] = lambda x: 0\n__builtins__['AssertionError'] = Warning",
    "import __main__\n__main__._run = lambda statements, names, ran: ran.add(1)",
    "import __main__, os\nwrite = os.write\nos.write = lambda to, what: write(to, what.replace(b'failed', b'passed'))",
    "import ast\nast.parse = lambda *_: ast.Module([], [])\nast.walk = lambda *_: []",
    "import traceback, sys\ntraceback.TracebackException = sys.excepthook = None",
    "import atexit, os\natexit.register(lambda: os.write(1, b'passed'))",
    "def check(*_):\n    pass\nassertion = close = check",
    "def f():\n    globals()['close'] = lambda *_: True", "def f():\n    globals()['__reached__'] = lambda *_: True",
    EQUAL.format("") + "def f():\n    return Equal()", EQUAL.format("int") + "def f():\n    return Equal(1)",
    EQUAL.format("str") + "def f():\n    return Equal('a')", EQUAL.format("list") + "def f():\n    return Equal()",
    EQUAL.format("") + "    def __sub__(self, other):\n        return 0\ndef f():\n    return [(1, {'a': Equal()})]",
    "import os\nif os.fork():\n    os.wait()", "import os\nif not os.fork():\n    f = lambda: 2",
    "import os, signal\nos.kill(-1, signal.SIGKILL)", "import os, signal\nos.kill(1, signal.SIGKILL)",
    "import ctypes\nctypes.string_at(0)"])
def test_a_wrong_answer_passes_in_no_disguise(code):
    code += "" if "f()" in code or "f =" in code else "\ndef f():\n    return 1"
    close = ("def close(a, b):\n    return a == b or abs(a - b) < 1e-6\ndef check(candidate):\n"
             "    x = candidate()\n    assert close(x, 2)\ncheck(f)")
    for tests in (close, "assert f() == 2", "assert f() == [(1, {'a': 2})]"):
        assert not run_python(code, tests, timeout=2).passed


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
            text = thing.decode('latin') if isinstance(thing, bytes) else thing if isinstance(thing, str) else ''
            found.update(re.findall('[0-9a-f]{64}', text))
            todo += gc.get_referents(thing)
    return found"""
    start, said = sandbox._start, []
    monkeypatch.setattr(sandbox, "_start", lambda **order: said.append(start(**order)) or said[-1])
    tests = ("def test_it():\n    planted = ['ab' * 32]\n    found = f()\n    print(found)\n"
             "    assert planted[0] in found")
    result = run_python(code, tests)
    token, verdict = said[-1][0].splitlines()[:2]
    assert result.passed and len(token) == 64 and verdict == f"{token} passed" and token not in result.stderr


@here
def test_memory_is_counted_over_all_processes_and_processes_are_counted():
    code = ("import os, time\nfor _ in range(8):\n    if os.fork() == 0:\n        x = b'x' * (100 << 20)\n"
            "        time.sleep(60)\ntime.sleep(60)")
    result = run_python(code, "assert True", timeout=30, memory_mb=300)
    assert result.status == "memory" and "300 MiB" in result.stderr
    many = "import threading, time\nfor _ in range(200):\n    threading.Thread(target=time.sleep, args=(60,)).start()"
    assert "can't start new thread" in run_python(many, "assert True", memory_mb=4000).stderr


@here
@pytest.mark.parametrize("code", [
    "import os\nassert os.geteuid() != 0", "import resource\nresource.setrlimit(resource.RLIMIT_NPROC, (999, 999))",
    "import os\nos.setuid(0)", "import os\nos.chroot('.')",
    "import subprocess\nsubprocess.run(['mount', '-t', 'tmpfs', 'x', '.'], check=True)",
    "import subprocess\nsubprocess.run(['unshare', '-Ur', 'true'], check=True)"])
def test_no_privilege_is_held_or_won(code):
    expected = "passed" if code.endswith("!= 0") else "error"
    assert run_python(code, "assert True").status == expected


# ── Layers ─────────────────────────────────────────────────────────────────────────────────────────────

@pytest.mark.parametrize("lacking, refused", [
    ({"namespaces"}, "namespaces"), ({"privileges"}, "privileges"), ({"limits"}, "limits"),
    ({"files", "landlock"}, "files"), ({"landlock"}, None)])
def test_a_missing_layer_is_named_and_refused_if_needed(monkeypatch, lacking, refused):
    layers = {name: "not here" if name in lacking else "" for name in sandbox.LAYERS}
    monkeypatch.setattr(sandbox, "sandbox_layers", lambda: layers)
    monkeypatch.setattr(sandbox, "_start", lambda **order: (f"t\nt passed\n0\n{order['layers']}", True, ""))
    if refused:
        with pytest.raises(SandboxError, match=rf"lacks {refused} \(not here\).*--unsafe_sandbox$"):
            run_python("x = 1", "assert x")
    assert run_python("x = 1", "assert x", unsafe=bool(refused)).passed


@pytest.mark.parametrize("lacking", [{"namespaces", "files"}, {"files"}, {"landlock"}, set(sandbox.LAYERS)],
                         ids=lambda lacking: "+".join(sorted(lacking)))
def test_told_unsafe_it_works_with_the_layers_there_are(monkeypatch, lacking):
    there = sandbox_layers()
    monkeypatch.setattr(sandbox, "sandbox_layers", lambda: there | dict.fromkeys(lacking, "not here"))
    assert run_python("x = 1", "assert x == 1", unsafe=True).passed
    assert run_python("import os\nos.kill(os.getppid(), 9)", "assert True", unsafe=True).status in ("killed", "error")
    assert run_python("while True:\n    pass", "assert True", timeout=0.7, unsafe=True).status == "timeout"


def test_landlock_alone_keeps_writes_inside(monkeypatch, outside):
    there = sandbox_layers()
    if there["landlock"]:
        pytest.skip(f"no Landlock in this kernel: {there['landlock']}")
    monkeypatch.setattr(sandbox, "sandbox_layers", lambda: there | {"namespaces": "no", "files": "no"})
    assert run_python("open('inside', 'w').write('x')", "assert True", unsafe=True).passed
    result = run_python(f"open({str(outside / 'written')!r}, 'w')", "assert True", unsafe=True)
    assert result.status == "error" and "Permission denied" in result.stderr and not (outside / "written").exists()


def test_a_sandbox_that_breaks_says_so_and_judges_nothing(monkeypatch):
    monkeypatch.setattr(sandbox, "sandbox_layers", lambda: dict.fromkeys(["no such layer"] + list(sandbox.LAYERS), ""))
    with pytest.raises(SandboxError, match="broke before it ran the code.*no such layer"):
        run_python("x = 1", "assert x")


# ── What honest code does ──────────────────────────────────────────────────────────────────────────────

@pytest.mark.parametrize("code", [
    "import numpy\nassert numpy.ones((3, 3)).sum() == 9 and abs(numpy.linalg.det(numpy.eye(3)) - 1) < 1e-9",
    "import subprocess, sys\nassert subprocess.check_output([sys.executable, '-c', 'print(1)']) == b'1\\n'",
    "import tempfile\nwith tempfile.TemporaryDirectory() as place:\n    open(place + '/file', 'w').write('x')",
    "import sqlite3\nassert sqlite3.connect('data').execute('select 1').fetchone() == (1,)",
    "from concurrent.futures import ThreadPoolExecutor\nassert list(ThreadPoolExecutor(8).map(abs, [-1, 2])) == [1, 2]",
    "import asyncio\nassert asyncio.run(asyncio.sleep(0, 1)) == 1",
    "import sys\nsys.setrecursionlimit(20_000)\ndef g(n):\n    return n and 1 + g(n - 1)\nassert g(15_000) == 15_000",
    "from dataclasses import dataclass\n@dataclass\nclass P:\n    x: int\nassert P(1) == P(1) != P(2)",
    "import builtins\nassert builtins.len([1]) == 1 and isinstance(__builtins__, dict)",
    "import math, random, datetime, decimal, fractions, typing, enum, hashlib, ssl, multiprocessing, unittest.mock",
    "count = 0\ndef add():\n    global count\n    count += 1"])
def test_honest_code_passes(code):
    if "numpy" in code:
        pytest.importorskip("numpy")
    tests = "add()\nassert count == 1\nadd()\nassert count == 2" if "add" in code else "assert True"
    result = run_python(code, tests)
    assert result.passed, result.stderr


@here
def test_a_run_ends_with_its_caller(outside):
    """Which is killed while the run sleeps."""
    call = "import sys; sys.path[:0] = sys.argv[1:2]; from sandbox import run_python; run_python(sys.argv[2], '', 60)"
    caller = subprocess.Popen([sys.executable, "-c", call, str(Path(sandbox.__file__).parent),
                               "import time\ntime.sleep(60)"], env={"TMPDIR": str(outside)})
    while len(alive(str(outside), 0)) < 5:             # the caller, and four of the run
        assert caller.poll() is None
    caller.kill()
    caller.wait()
    assert not alive(str(outside))
