"""Attacks on the sandbox and fake test verdicts: none may pass or leave anything behind.

Each attack runs as the current user. If that is root, attacks whose result depends on the user
also run as a user without privileges.
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
from pathlib import Path

import pytest
from helpers import ROOT, alive, copy_sandbox
from measures import sandbox
from measures.cell import FOLDER_MB
from measures.sandbox import SandboxError, run_python

KEY = "sk-a-key-that-nobody-may-see"
# Runs the sandbox with KEY in the session keyring, and prints the result and whether the
# keyring still holds only KEY.
CALL = """
import ctypes, json, os, sys
sys.path.insert(0, sys.argv[1])
from measures import sandbox
from measures.cell import SYSTEM_CALLS
_, _, _, add_key, _, keyctl, *_ = SYSTEM_CALLS[os.uname().machine]
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
        return "" if run_python("", "assert True").passed else "a trivial test does not pass"
    except SandboxError as error:
        return str(error)


LACKS = sandbox_lacks()
needs_sandbox = pytest.mark.skipif(bool(LACKS), reason=f"no sandbox on this machine: {LACKS}")
ADD_KEY, KEYCTL, PTRACE, MEMFD_SECRET, SEMGET, MSGGET, IO_URING = (
    (217, 219, 117, 447, 190, 186, 425) if os.uname().machine == "aarch64" else
    (248, 250, 101, 447, 64, 68, 425))
LIBC = "import ctypes, os, resource, signal, time\ncall = ctypes.CDLL(None).syscall\n"
# Tries to stop the process that measures memory; then five processes hold 2 GiB in total.
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

# name: (expected status, code); str.format fills in {outside} and {port}
ATTACKS = {
    "fork bomb": ("timeout", "import os\nwhile True:\n    try: os.fork()\n"
                  "    except OSError: pass"),
    "memory bomb": ("memory", "x = []\nwhile True: x.append(bytearray(16 << 20))"),
    "endless loop": ("timeout", "while True: pass"),
    "kill parent": ("error", "import os, time\nos.kill(os.getppid(), 9)\ntime.sleep(0.5)\n"
                    "assert False, 'it does nothing'"),
    "write to the home directory": (
        "error", "from pathlib import Path\nwritten = 0\nfor place in {outside}:\n    try:\n"
        "        Path(place, 'written').write_text('x')\n        written += 1\n"
        "    except OSError as error: print(error)\nassert written"),
    "read an API key": (
        "error", "import glob, os\nfound = repr(os.environ)\n"
        "for place in glob.glob('/proc/*/environ') + glob.glob('{outside[0]}/*'):\n"
        "    try: found += open(place).read()\n    except OSError: pass\n"
        "print(found)\nassert 'sk-' in found"),
    "connect to a loopback listener": (
        "error", "import socket\nsocket.create_connection(('127.0.0.1', {port}), timeout=1)"),
    "fill the disk": (
        "error", "import itertools, os\ntry:\n    for i in itertools.count():\n"
        "        with open(str(i), 'wb', 0) as file:\n"
        "            for _ in range(8): file.write(bytes(1 << 20))\nfinally:\n"
        "    print('MiB', sum(os.stat(name).st_blocks for name in os.listdir()) >> 11)"),
    "ignore the end of the time": (
        "timeout", "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\n"
        "while True: pass"),
    "unkillable signal handler": (
        "timeout", "import signal, time\n"
        "for number in set(signal.Signals) - {{signal.SIGKILL, signal.SIGSTOP}}:\n"
        "    signal.signal(number, lambda *_: None)\nwhile True: time.sleep(1)"),
    "background child": (
        "error", "import os, signal, time\nif os.fork() == 0:\n    os.setsid()\n"
        "    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "    if os.fork() == 0:\n        os.closerange(0, 100)\n        time.sleep(600)\n"
        "    os._exit(0)\ntime.sleep(0.3)\nassert False"),
    # tries to read the key, to delete it, and to add another one
    "take the caller's keys": (
        "error", LIBC + f"key = call({KEYCTL}, 10, -3, b'user', b'secret', 0)\n"
        f"text = ctypes.create_string_buffer(80)\ncall({KEYCTL}, 11, key, text, 80)\n"
        f"print(text.value)\nplanted = [call({ADD_KEY}, b'user', b'planted', b'x', 1, ring) "
        f"for ring in (-2, -3, -4, -5)]\ndeleted = call({KEYCTL}, 7, -3) == 0\n"
        f"assert max(key, *planted) > 0 or deleted"),
    "blind the watcher": ("memory", BLIND),
    "semaphores": ("error", LIBC + f"for _ in range(300):\n"
                   f"    assert call({SEMGET}, 0, 32000, 0o600) >= 0, 'refused'"),
    **{name: ("error", LIBC + f"assert call({call}) >= 0, 'refused'") for name, call in {
        "message queue": f"{MSGGET}, 0, 0o600", "secret memory": f"{MEMFD_SECRET}, 0",
        "io_uring": f"{IO_URING}, 8, bytes(200)"}.items()},
    **{name: ("error", f"from socket import *\nsocket({family})") for name, family in {
        "virtual machine sockets": "AF_VSOCK", "kernel cryptography": "AF_ALG",
        "netlink": "AF_NETLINK, SOCK_RAW"}.items()},
    "memory of sockets": (
        "memory", "import os, socket, time\nfor _ in range(30):\n    if os.fork() == 0:\n"
        "        pairs = [socket.socketpair() for _ in range(100)]\n"
        "        for end in sum(pairs, ()):\n            end.setblocking(False)\n"
        "            try:\n                while end.send(bytes(1 << 16)): pass\n"
        "            except BlockingIOError: pass\n        time.sleep(60)\ntime.sleep(60)"),
    "memory that no process maps": (
        "error", "import os\nfile = os.memfd_create('x')\nos.write(file, bytes(1 << 20))")}
# The defence against these attacks does not depend on the user.
SAME_FOR_ALL_USERS = {
    "memory bomb", "endless loop", "ignore the end of the time", "message queue",
    "secret memory", "io_uring", "netlink", "kernel cryptography",
    "memory that no process maps"}
IS_ROOT = sys.platform == "linux" and os.geteuid() == 0
AS_ITSELF = [pytest.param(name, None, id=f"{name}-itself") for name in ATTACKS]
AS_NOBODY = [pytest.param(name, 65534, id=f"{name}-unprivileged")
             for name in ATTACKS if IS_ROOT and name not in SAME_FOR_ALL_USERS]


@pytest.fixture()
def outside():
    """A folder with a key file that every user may write to; tmp_path is closed to them."""
    folder = Path("/var/tmp", f"outside-{os.getpid()}-{time.monotonic_ns()}")
    folder.mkdir()
    folder.chmod(0o777)
    (folder / "key").write_text(KEY)
    yield folder
    shutil.rmtree(folder)


def attack(order: dict, start: float, user: int | None, folder: Path) -> tuple:
    """Call run_python(**order) in a new process, with sandbox.START = start.

    Returns (passed, status, stderr, whether the keyring of the process is intact).
    """
    copy_sandbox(folder / "code")
    (folder / "code" / "tqdm.py").write_text("tqdm = list")      # /usr/bin/python3 may lack it
    pythons = [path for path in (sys.executable, "/usr/bin/python3") if can_start(path, user)]
    if not pythons:
        pytest.skip("no Python >= 3.11 that a user without privileges can start")
    (folder / "temporary").mkdir()
    (folder / "temporary").chmod(0o777)
    identity = {} if user is None else {"user": user, "group": user, "extra_groups": []}
    process = subprocess.run(
        [pythons[0], "-B", "-c", CALL, str(folder / "code")], cwd="/", text=True, timeout=120,
        env={"OPENAI_API_KEY": KEY, "TMPDIR": str(folder / "temporary")},
        input=json.dumps([start, order]), capture_output=True, **identity)
    assert process.returncode == 0, process.stderr
    return tuple(json.loads(process.stdout))


def can_start(python: str, user: int | None) -> bool:
    try:
        test = [python, "-c", "import sys; sys.exit(sys.version_info < (3, 11))"]
        return subprocess.run(test, user=user, cwd="/", capture_output=True).returncode == 0
    except OSError:                                    # the user may not enter its folder
        return False


@needs_sandbox
@pytest.mark.parametrize("name, user", AS_ITSELF + AS_NOBODY)
def test_an_attack_ends_in_time_does_not_pass_and_leaves_nothing(name, user, outside):
    expected, code = ATTACKS[name]
    # The clock would stop a program only after 5 * 10 + 60 s, so other limits act first.
    limit, start = (1 if expected == "timeout" else 10), 60
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        home = pwd.getpwuid(os.getuid() if user is None else user).pw_dir
        code = code.format(outside=[str(outside), home, "/tmp", "/etc", "/"],
                           port=listener.getsockname()[1])
        order = {"code": code, "tests": "assert True", "timeout": limit, "memory_mb": 512}
        passed, status, stderr, has_intact_keys = attack(order, start, user, outside)
        with pytest.raises(BlockingIOError):
            listener.accept()
    assert (passed, status, has_intact_keys) == (False, expected, True), stderr
    assert not alive(str(outside)) and not list((outside / "temporary").iterdir())
    assert not list(outside.glob("**/written")) and not Path(home, "written").exists()
    assert KEY not in stderr
    if name == "fill the disk":
        assert ("No space left" in stderr
                and int(stderr.split("MiB ")[1].split()[0]) <= FOLDER_MB)


# ── Verdicts

@needs_sandbox
@pytest.mark.parametrize("code", [
    "import os; os._exit(0)", "def f(): raise SystemExit(0)",
    "import os\nif os.fork(): os.wait()", "import os\nif not os.fork(): f = lambda: 2",
    "import os\nprocess = os.getpid()\nos.getpid = lambda: process\n"
    "if not os.fork(): f = lambda: 2",
    "import atexit, os; atexit.register(os._exit, 0)",
    "import os, signal; os.kill(-1, signal.SIGKILL)", "import ctypes; ctypes.string_at(0)",
    "import os, signal\nsignal.signal(signal.SIGALRM, lambda *_: os._exit(0))\n"
    "signal.setitimer(signal.ITIMER_REAL, .001)\ndef f():\n    while True: pass",
    *[f"import builtins; builtins.{name} = lambda *_: 0" for name in (
        "abs", "exec", "isinstance")], "import builtins; builtins.all = lambda x: 1",
    "__builtins__['abs'] = lambda x: 0; __builtins__['AssertionError'] = Warning",
    "import math; math.isclose = math.fabs = lambda *_, **__: 0.0",
    "def f():\n    import math\n    math.isclose = lambda *_: True\n    return 1",
    "import unittest; unittest.TestCase.assertEqual = lambda *_: None",
    "import os\nwrite = os.write\n"
    "os.write = lambda to, what: write(to, what.replace(b'failed', b'passed'))",
    "import __main__, sys\nfor module in (*sys.modules.values(),):\n"
    "    vars(module).update(_judge=lambda *_: b'passed\\n')",
    "import marshal, os; marshal.loads = marshal.load = os.waitstatus_to_exitcode = abs",
    *[f"import os\nfor fd in range(3, 30):\n    try: os.{call}\n    except OSError: pass"
      for call in ("write(fd, b'passed\\n\\0000')", "dup2(2, fd)")],
    "import os; os.closerange(3, 99)", "def check(*_): pass\nassertion = close = check",
    "def f(): globals()['close'] = lambda *_: True",
    "import pytest, contextlib; pytest.raises = lambda *_: contextlib.nullcontext()",
    "import unittest\nunittest.TestCase.assertEqual.__code__ = (lambda *_: None).__code__"])
def test_a_wrong_answer_passes_in_no_disguise(code):
    code += "" if "f()" in code or "f =" in code else "\ndef f(): return 1"
    for tests in (
            "import math, unittest\ndef close(a, b): return abs(a - b) < 1e-6\n"
            "def check(candidate):\n    x = candidate()\n    assert close(x, 2)\n"
            "    assert math.isclose(x, 2) and math.fabs(x - 2) < 1\n"
            "    unittest.TestCase().assertEqual(x, 2)\n    assert all([x == 2])\ncheck(f)",
            "def test_f(): assert f() == 2\ndef test_g(): assert 2 in [f()]",
            "import math, unittest\nx = f()\nassert math.isclose(x, 2)",
            "import unittest\nassert f()\nunittest.TestCase().assertEqual(f(), 2)",
            "import pytest\nwith pytest.raises(KeyError): assert f()"):
        assert not run_python(code, tests, timeout=1).passed


# Tests that need pytest. Their marks and the tests that pass do not excuse the test of f.
FUNCTIONS = """
import pytest
from solution import f
@pytest.fixture
def two(): return 2
@pytest.mark.skipif(False, reason="x")
@pytest.mark.parametrize("x", [2, 2])
def test_f(x, two): assert f() == x == two
@pytest.mark.skip
def test_skipped(): assert False
def test_passes(): f
"""
METHODS = """
import unittest
class TestF(unittest.TestCase):
    def test_f(self): self.assertEqual(f(), 2)
    def test_passes(self): f
"""


@needs_sandbox
@pytest.mark.parametrize("code", [
    "def f(): return 1", "import sys; sys.exit(0)", "import sys\ndef f(): sys.exit(0)",
    "import os; os._exit(0)", "import os\ndef f(): os._exit(0)",
    "import atexit, os; atexit.register(os._exit, 0)", "def f(): raise KeyboardInterrupt",
    "import os\ndef f():\n    if os.fork(): os.wait(); return 1\n    return 2",
    "print('4 passed in 0.01s')", "import pytest\ndef f(): pytest.skip('x')",
    "import pytest\nclass E(pytest.skip.Exception): pass\n"
    "def f(): raise E('x', _use_item_location=True)",
    "import unittest\ndef f(): raise unittest.SkipTest",
    "import pytest\ndef f(): pytest.xfail()", "import pytest\ndef f(): pytest.exit('x', 0)",
    "import bdb\ndef f(): raise bdb.BdbQuit",
    "import pytest\npytest.exit('x', 0)", "import pytest\npytest.skip(allow_module_level=True)",
    "open('conftest.py', 'w').write('import pytest\\n@pytest.hookimpl(tryfirst=True)\\n'\n"
    "    'def pytest_pyfunc_call(): return True')",
    "open('pytest.ini', 'w').write('[pytest]\\naddopts = --collect-only')\n"
    "import os; os.environ['PYTEST_ADDOPTS'] = '--collect-only'",
    "import sys, types\nsys.modules['tests'] = types.ModuleType('tests')",
    "import os; os.remove('tests.py')", "import os; os.chdir('/')",
    "import importlib; importlib.import_module = lambda *_: None",
    "import _pytest.runner\n_pytest.runner.check_interactive_exception = lambda *_: False",
    "import pytest; pytest.Function.runtest = lambda self: None",
    "import pytest; pytest.TestReport.from_item_and_call = lambda *_: None",
    "from _pytest.python import pytest_pyfunc_call as call\n"
    "call.__code__ = (lambda pyfuncitem: 1).__code__",
    "import unittest\nunittest.TestCase.run.__code__ = (lambda self, result: None).__code__",
    "import pytest\nf = pytest.fixture(autouse=True)(\n"
    "    lambda request: setattr(request.node, 'obj', lambda **_: None))",
    "def f():\n    import tests\n    return tests.test_f.__code__.co_consts and 2",
    "def f(): return 2 if '== x' in open('tests.py').read() else 1"])
def test_a_wrong_answer_passes_in_no_disguise_under_pytest(code):
    code += "" if "f()" in code or "f =" in code else "\ndef f(): return 1"
    for tests in (FUNCTIONS, METHODS):
        if tests == FUNCTIONS or "unittest" in code:
            result = run_python(code, tests, use_pytest=True)
            assert result.status in ("failed", "error", "killed"), result
            assert run_python("def f(): return 2", tests, use_pytest=True).passed


@needs_sandbox
def test_no_name_frame_or_container_holds_the_secret():
    """A search of all objects that Python can reach finds only a planted secret."""
    code = """
import gc, re, sys
def f():
    seen, secrets, frame, todo = set(), set(), sys._getframe(), gc.get_objects()
    while frame := frame.f_back:
        todo += [frame, frame.f_locals, frame.f_globals]
    while todo:
        thing = todo.pop()
        if id(thing) not in seen:
            seen.add(id(thing))
            if isinstance(thing, (str, bytes)):
                secrets.update(re.findall('[0-9a-f]{64}', str(thing)))
            todo += gc.get_referents(thing)
    return secrets"""
    tests = ("planted = '0123456789abcdef' * 4\n"
             "assert [secret for secret in f() if len(set(secret)) > 8] == [planted]")
    result = run_python(code, tests)
    assert result.passed, result.stderr


@needs_sandbox
def test_memory_and_number_of_processes_are_limited():
    """Importing torch maps more memory than the limit of a process."""
    children = ("import os, time\nfor _ in range(8):\n    if os.fork() == 0:\n"
                "        x = b'x' * (100 << 20)\n        time.sleep(60)\ntime.sleep(60)")
    for code, limit in (("import torch", 512), (children, 300)):
        result = run_python(code, "assert True", timeout=30, memory_mb=limit)
        assert result.status == "memory"
        assert f"the memory limit of a process is {limit} MiB" in result.stderr
    many = ("import threading, time\nfor _ in range(200):\n"
            "    threading.Thread(target=time.sleep, args=(60,)).start()")
    assert "can't start new thread" in run_python(many, "assert True", memory_mb=4000).stderr


@needs_sandbox
@pytest.mark.parametrize("code, expected", [
    ("", "passed"), ("resource.setrlimit(resource.RLIMIT_NPROC, (999, 999))", "error"),
    ("os.setuid(0)", "error"), ("os.chroot('.')", "error"),
    ("subprocess.run(['mount', '-t', 'tmpfs', 'x', '.'], check=True)", "error"),
    ("subprocess.run(['unshare', '-Ur', 'true'], check=True)", "error")])
def test_no_privilege_is_held_or_won(code, expected):
    needed = "import os, resource, subprocess\nassert os.geteuid() != 0\n"
    assert run_python(needed + code, "assert True").status == expected


# ── Without a sandbox

def test_without_a_sandbox_code_runs_only_with_unsafe(monkeypatch, tmp_path):
    cell = Path(copy_sandbox(tmp_path / "code")).parent / "cell.py"
    cell.write_text(cell.read_text().replace('_call("unshare", ', '_call("setns", '))
    monkeypatch.setattr(sandbox, "__file__", str(cell))
    with pytest.raises(SandboxError,
                       match="no sandbox is available here.*setns.*--unsafe_sandbox$"):
        run_python("x = 1", "assert x == 1")
    assert run_python("x = 1", "assert x == 1", unsafe=True).passed
    code = "import os\nos.kill(os.getppid(), 9)"
    assert not run_python(code, "assert False", unsafe=True).passed


CHILD = "import sys, time; sys.path.insert(0, {{!r}}); import cell; {}; cell.main()"


@needs_sandbox
@pytest.mark.parametrize("change, reason", [
    ("cell.os.uname = lambda: type('', (), {{'machine': 'i686'}})", "KeyError: 'i686'"),
    ("cell.os.pidfd_open = lambda _: 1 / 0", ""), ("cell.SYSTEM_CALLS = 0", ""),
    ("call = cell._call; cell._call = lambda name, *rest: "
     "call('setns' if name == 'capset' else name, *rest)", ""),
    ("cell.struct.pack = lambda *_: b''", ""),
    ("build = cell._build_root; "
     "cell._build_root = lambda *_: (time.sleep(0.3), build(*_))", None)])
def test_a_failing_layer_is_an_error_of_the_sandbox_and_a_slow_one_is_none(change, reason,
                                                                           monkeypatch):
    """The faults hit early and late layers and the process that measures memory. It looks into
    the root directory every 10 ms; under load it may not exist yet."""
    monkeypatch.setattr(sandbox, "CHILD", CHILD.format(change))
    if reason is None:
        assert run_python("x = 1", "assert x == 1").passed
        return
    with pytest.raises(SandboxError, match=f"^no sandbox is available here .*{reason}"):
        run_python("import time\ntime.sleep(1)", "assert True")


# ── Honest programs

def honest_programs(shared) -> list[tuple]:
    """(code, tests) pairs with standard library types, numpy, deep recursion and a global."""
    programs = [
        ("import sys\nsys.setrecursionlimit(20_000)\ndef g(n): return n and 1 + g(n - 1)",
         "assert g(15_000) == 15_000"),
        ("count = 0\ndef add():\n    global count\n    count += 1",
         "add()\nassert count == 1\nadd()\nassert count == 2"),
        ("class A:\n    def __eq__(self, other): return True", "assert A() == 2"),
        ("import numpy\ndef f(): return numpy.ones((3, 3))", "assert f().sum() == 9"),
        ("import ctypes, time\nctypes.CDLL(None).prctl(15, b'\\xff', 0, 0, 0)\ntime.sleep(.1)",
         "assert True"),                               # the name of a process may be no text
        ("import multiprocessing as mp\ndef f(x):\n    with mp.Pool(2) as pool:\n"
         "        return pool.map(abs, x)", "assert f([-1, 2]) == [1, 2]")]
    for line in (ROOT / "tests" / "honest_programs.txt").read_text().splitlines()[1:]:
        module, value, check = line.split(" | ", 2)
        head = f"from {module} import *\n"
        programs.append((f"{head}def f(): return {value}", f"{head}x = f()\nassert {check}"))
    rows = map(json.loads, (shared / "data" / "honest_programs.jsonl").open())
    return programs + [(row["code"], row["tests"]) for row in rows]


def test_honest_programs_pass(shared):
    """Values are compared with Python's ==, even if a class calls everything equal."""
    programs = honest_programs(shared)
    assert len(programs) >= 150
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(lambda pair: run_python(*pair, unsafe=bool(LACKS)), programs))
    assert not [(code, result.stderr) for (code, _), result in zip(programs, results)
                if not result.passed]


# ── Time

SPIN = ("import time\ndef f():\n    end = time.process_time() + {}\n"
        "    while time.process_time() < end: pass\n")


@pytest.mark.parametrize("code, timeout, expected", [
    # The time is CPU time: it does not count the start of Python or a short sleep.
    ("import time; time.sleep(1.3)", 0.3, "passed"), (SPIN.format(0.2) + "f()", 0.3, "passed"),
    (SPIN.format(9) + "f()", 0.3, "timeout"),
    # Four computing processes share the limit; a sleeping process has a limit, too.
    *[pytest.param(*case, marks=needs_sandbox) for case in (
        ("import os\nos.fork(), os.fork()\n" + SPIN.format(1.5) + "f()\nos.wait()", 1,
         "timeout"),
        ("import time; time.sleep(60)", 1, "timeout"),
        ("import time; time.sleep(1)", 1, "passed"))]])
def test_the_time_limit_counts_all_processes_of_the_program_only(code, timeout, expected,
                                                                 monkeypatch):
    monkeypatch.setattr(sandbox, "START", 120)
    result = run_python(code, "assert True", timeout=timeout, unsafe=bool(LACKS))
    assert result.status == expected


# ── Runs leave nothing behind, even without a sandbox

def test_children_do_not_outlive_the_run(tmp_path, monkeypatch):
    """One child is forked, the other runs another program; both keep the output open."""
    monkeypatch.setattr(sandbox, "__file__", copy_sandbox(tmp_path / "code"))
    code = ("import os, subprocess, time\n"
            "if os.fork() == 0:\n    time.sleep(600)\n    os._exit(0)\n"
            f"subprocess.Popen(['sh', '-c', 'sleep 600; : {tmp_path}'])\n")
    for end, expected in (("", "passed"), ("while True: pass", "timeout"),
                          ("os._exit(0)", "error")):
        with ThreadPoolExecutor(1) as pool:
            run = pool.submit(run_python, code + end, "assert True", timeout=0.5, unsafe=True)
            peak = 0
            while not run.done():
                peak = max(peak, len(alive(str(tmp_path), 0)))
                time.sleep(0.01)
        assert run.result().status == expected and not alive(str(tmp_path))
        assert peak > 3 or expected != "timeout", "`alive` misses running processes"


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


@needs_sandbox
def test_a_run_ends_with_its_caller_and_leaves_nothing(outside):
    """The caller is killed when one, two or three processes of the run have started."""
    call = ("import sys; sys.path[:0] = sys.argv[1:2]; "
            "from measures.sandbox import run_python; run_python(*sys.argv[2:])")
    copy_sandbox(outside / "code")
    (outside / "temporary").mkdir()
    for processes in (1, 2, 3, 3):
        caller = subprocess.Popen([sys.executable, "-c", call, str(outside / "code"),
                                   "import time\ntime.sleep(600)", "assert 1"],
                                  env={"TMPDIR": str(outside / "temporary")})
        while len(alive(str(outside), 0)) < 1 + processes:
            assert caller.poll() is None
        time.sleep(random.random() / 10)
        caller.kill()
        caller.wait()
        assert not alive(str(outside)) and not list((outside / "temporary").iterdir())
