"""The sandbox: verdicts on right and wrong code, test outcomes of responses, and attacks.

Verdicts are tested with `unsafe`, because some machines do not support the isolation.
"""

import json
import os
import pwd
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from data import get_task, read_rows, write_rows
from helpers import ROOT, SLOW, error_message, run_main
from measures import sandbox
from measures.sandbox import REASON, SandboxError, add_outcomes, code_of

run_python = partial(sandbox.run_python, unsafe=True)

INCREMENT = "def f(x):\n    return x + 1\n"
RAISES = "import pytest\ndef test_f():\n    with pytest.raises({}): int({!r})"


def status(code, tests="assert True", **limits):
    return run_python(code, tests, **limits).status


# ── Processes of the sandbox

def command_line(path: Path) -> str:
    """The text of /proc/PID/cmdline; empty if the process has ended."""
    try:
        return path.read_bytes().decode("utf-8", "replace")
    except OSError:
        return ""


def alive(mark: str, seconds: float = 5.0) -> list[str]:
    """IDs of the processes with `mark` in their command line that outlive `seconds`."""
    end = time.monotonic() + seconds
    while (pids := [path.parent.name for path in Path("/proc").glob("[0-9]*/cmdline")
                    if mark in command_line(path)]):
        if time.monotonic() > end:
            break
        time.sleep(0.01)
    return pids


def copy_sandbox(folder: Path):
    """Copy the sandbox to a folder, whose name identifies its processes."""
    (folder / "measures").mkdir(parents=True)
    shutil.copy(ROOT / "data.py", folder)
    for path in (ROOT / "measures").glob("*.*"):
        shutil.copy(path, folder / "measures")
    with open(folder / "measures" / "cell.py", "a") as cell:
        cell.write(f"\n# {folder}\n")


# ── Right and wrong

# The last item is a part of the output.
@pytest.mark.parametrize("code, tests, expected, output", [
    *[(INCREMENT, tests, "passed", "") for tests in (
        "assert f(1) == 2", "def check(g):\n    assert g(1) == 2\ncheck(f)",
        "from solution import f\nimport solution\nassert solution.f is f and f(1) == 2",
        "def test_f(): assert f(1) == 2")],
    *[(INCREMENT, tests, "not run", "test nothing") for tests in (
        "def check(g):\n    assert g(1) == 2", "x = f(1)", "")],
    (INCREMENT, "assert f(1) == 3", "failed", "AssertionError"),
    (INCREMENT, "def test_f(): assert f(1) == 2\ndef test_g(): assert f(1) == 3", "failed", ""),
    (INCREMENT, "assert f('1')", "error", "TypeError"),
    (INCREMENT, "assert f(1", "not run", "SyntaxError"),
    (INCREMENT, "import no_such_module\nassert f(1) == 2", "not run", "ModuleNotFoundError"),
    # code that cannot be loaded
    *[(code, "assert True", "error", "Error") for code in (
        "def f(:", "import no_such_module", "1 / 0", "assert False", "x = '\ud800'", "\0")],
    # The tests and the code have separate namespaces.
    ("def help(): return 1\ndef f(): return help()",
     "def help(): return 2\ndef test_f(): assert f() == 1 and help() == 2", "passed", ""),
    ("def f(): return math.pi", "import math\nassert f() > 3", "error", "NameError"),
    ("import math; math.floor = lambda _: 2", "from math import floor\nassert floor(1.5) == 1",
     "passed", ""),
    # Any text is code and any bytes are output.
    ("s = 'é😀'\r\n", "assert s == 'é😀' and len(s) == 2", "passed", ""),
    ("import os; os.write(1, b'a\\xff\\xc3z'); os.write(2, 'é'.encode())", "assert True",
     "passed", "a\ufffd\ufffdzé"),
    # Some functions of pytest and of unittest.mock work without a test runner.
    ("", RAISES.format("ValueError, match='invalid'", "x"), "passed", ""),
    ("", "import pytest\nassert 1 + 1e-9 == pytest.approx(1)", "passed", ""),
    ("", "from unittest.mock import patch\n@patch('os.getcwd')\ndef test_f(getcwd):\n"
     "    import os\n    os.getcwd()\n    getcwd.assert_called_once()", "passed", ""),
    ("", "import functools\n@functools.cache\ndef test_f(x): assert x", "not run", "missing 1"),
    *[("", f"def test_f(): {body}", "not run", "does not return None")
      for body in ("return 1 == 2", "yield")],
    # Code does not pass by an early exit, or by writing to files or closing them.
    *[(f"import os; {call}", "assert True", "error", "") for call in (
        "quit()", "print('passed'); os._exit(0)", "os.closerange(3, 99)")],
    ("import os\ndef f(): os._exit(0)", "assert f() == 1", "error", "exited before"),
    ("import os\nfor fd in range(3, 30):\n    try: os.write(fd, b'readypassed\\n')\n"
     "    except OSError: pass\nos._exit(0)", "assert True", "error", "exited before"),
    ("import atexit, os; atexit.register(os._exit, 0)", "assert False", "failed", ""),
    ("import os; os.abort()", "assert True", "killed", "-6"),
    ("import builtins, os; builtins.exec = os.getpid = os.write = lambda *_: 1", "assert False",
     "failed", ""),
    # A fork of the program has no verdict, and an endless thread does not delay the end.
    ("import os\nif os.fork(): os.wait()\nelse: f = 2", "assert f == 2", "error", "NameError"),
    ("import threading, time\nthreading.Thread(target=time.sleep, args=(600,)).start()",
     "assert True", "passed", "")])
def test_the_status_is_the_verdict_of_the_tests(code, tests, expected, output):
    result = run_python(code, tests)
    assert (result.status, result.passed) == (expected, expected == "passed"), result.stderr
    assert output in result.stderr


def test_the_traceback_names_lines_but_no_paths_of_this_machine():
    code = "def f(x):\n    print('here')\n    return g(x)\ndef g(x):\n    return 1 / x"
    stderr = run_python(code, "assert f(0) == 2").stderr
    assert stderr.startswith("here\nTraceback (most recent call last):\n"
                             "  File \"tests.py\", line 1, in <module>\n")
    assert re.search(r"(?s)    assert f\(0\) == 2\n.*    return 1 / x\n.*by zero\n$", stderr)
    assert "sandbox" not in stderr and tempfile.gettempdir() not in stderr


@pytest.mark.parametrize("tests", [
    "@pytest.mark.parametrize('x', [1, 2])\ndef test_f(x): assert f(x) == x + 1",
    "@pytest.fixture(autouse=True)\ndef call(): assert f(1) == 3\ndef test_f(): pass",
    "from pytest import fixture, mark\ndef test_f(): assert f(1) == 2",
    "def test_f(tmp_path): assert f(1) == 2",
    "class TestF:\n    def test_f(self): assert f(1) == 2",
    "import unittest\nclass Check(unittest.TestCase):\n    def test_f(self): pass",
    "def setup_module(): global x; x = 1\ndef test_f(): assert f(x) == 2",
    "x = pytest.importorskip('no_such_module')\ndef test_f(): assert f(1) == 2",
    "@pytest.mark.asyncio\nasync def test_f(): assert f(1) == 3",
    "@pytest.mark.skip\ndef test_x(): assert False",
    "import unittest\ndef test_f(): raise unittest.SkipTest('x')"])
def test_files_that_need_pytest_could_not_be_run(tests):
    assert status(INCREMENT, f"import pytest\nfrom solution import f\n{tests}") == "not run"


def test_public_test_files_need_pytest(shared):
    rows = read_rows(shared / "data" / "public_cases" / "test_files.jsonl")
    assert {status(row["program"], row["tests"]) for row in rows} == {"not run"}


def test_files_that_import_pytest_without_a_use_run_without_it(tmp_path, monkeypatch):
    copy_sandbox(tmp_path / "code")
    monkeypatch.setattr(sandbox, "FOLDER", tmp_path / "code" / "measures")
    cell = sandbox.FOLDER / "cell.py"
    cell.write_text("import sys; sys.modules['pytest'] = None\n" + cell.read_text())
    unused = "import pytest\ndef test_f(): assert f(1) == 2\nif f(1) == 3: pytest.main()"
    assert status(INCREMENT, unused) == "passed"
    assert status(INCREMENT, RAISES.format("ValueError", "x")) == "not run"


# ── Limits

def test_a_loop_ends_at_the_timeout_and_its_output_is_kept(monkeypatch):
    result = run_python("print('begun')\nwhile True:\n    pass", "assert True", timeout=0.5)
    assert result.status == "timeout"
    assert re.match("begun\n(.*\n)?stopped after 0.5 s\n", result.stderr)
    # The time is CPU time: it does not count the start of Python or a short sleep.
    assert status("import time; time.sleep(1.5)", timeout=0.5) == "passed"
    monkeypatch.setattr(sandbox, "START", 1)
    assert status("import time\ntime.sleep(60)", timeout=0.1) == "timeout"


@pytest.mark.skipif(sys.platform != "linux", reason="memory is limited on Linux only")
@pytest.mark.parametrize("code, tests", [
    ("x = [0] * 10**10", "assert x"), ("def f(): return bytes(400 << 20)", "assert f()")])
def test_memory_is_limited(code, tests):
    assert status(code, tests, memory_mb=300) == "memory"
    assert status("x = bytes(400 << 20)", memory_mb=600) == "passed"


def test_endless_output_is_stopped_and_its_end_kept():
    result = run_python("print('x' * 100_000 + 'end')", "assert True")
    assert result.passed and result.stderr == "x" * (REASON - 4) + "end\n"
    result = run_python("while True:\n    print('x' * 100_000)", "assert True")
    assert result.status == "error" and "File too large" in result.stderr


def test_the_environment_and_the_input_are_empty_and_home_is_temporary(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    code = ("import json, os, sys\nprint(json.dumps([dict(os.environ), os.getcwd(), sys.path, "
            "os.listdir(), sys.stdin.read()]))")
    result = run_python(code, "assert True").stderr
    environment, directory, path, files, stdin = json.loads(result)
    assert set(environment) - {"LC_CTYPE"} == {"HOME", "TMPDIR", "OMP_NUM_THREADS"}
    assert directory == environment["HOME"] and "/somewhere" not in path
    assert files == ["solution.py"] and stdin == "" and not Path(directory).exists()


# ── Responses: their code and its test outcomes

SHOWN = 'def f(x):\n    """Adds one.\n\n    ```\n    f(1)\n    ```\n    """\n    return x + 1\n'
PART = "def g(x):\n    return x\n"


@pytest.mark.parametrize("text, program", [
    *[(text, text) for text in (
        SHOWN, '"""\n```\nf(0)\n```\n"""\n' + INCREMENT, "No code.", "Say `f` or ```f```.")],
    *[(text, INCREMENT) for text in (
        f"Sure:\n\n```py\n{INCREMENT}```\nIt adds.", f"~~~ Python 3\n{INCREMENT}~~~",
        f"```python\n{INCREMENT}", f"So:\n```python\n{INCREMENT}  ```\nIt adds.",
        "1. So:\r\n   ```python\r\n   def f(x):\r\n\r\n       return x + 1\r\n   ```\r\n",
        f"```bash\npip install f\n```\n```Python\n{INCREMENT}```\n```\n2 is out\n```",
        f"```\n{INCREMENT}```\nprints\n```text\n2 is out\n```", f"```code\n{INCREMENT}```",
        f"```python\n{INCREMENT}```\n```python\n>>> f(1)\n2\n```")],
    (f"````python3\n{SHOWN}````", SHOWN), (f"```python\n{SHOWN}```", SHOWN),
    (f"So:\n```python\n{SHOWN}```\n".replace("\n", "\r\n"), SHOWN),
    (f"First\n```python\n{PART}```\nthen\n```python\n{INCREMENT}```", PART + INCREMENT)])
def test_the_program_is_the_text_in_code_fences_or_else_the_whole_text(text, program):
    """A fence inside a string of the program does not count."""
    lines = [line for line in code_of(text).split("\n") if line]
    assert lines == [line for line in program.split("\n") if line]


def kodcode(response: str, **more) -> dict:
    tests = {"test": "from solution import f\n\ndef test_f():\n    assert f(1) == 2\n"}
    return {"question": "Add one.", "response": response} | tests | more


def test_rows_keep_their_order_and_get_the_outcomes_of_their_tests():
    rows = [kodcode(f"```python\nimport time\ntime.sleep(0.5)\n{INCREMENT}```"),
            kodcode("```\nprint('y' * 2000)\ndef f(x):\n    return x\n```"),
            kodcode("x", outcome="Mine."), {"question": "q", "test": "assert f"},
            kodcode("def f(:", test_code="assert f"), kodcode(PART, test="def test_f(y): y")]
    task = replace(get_task("kodcode"),
                   responses=lambda row: [{"response": "a"}, {"response": "b"}])
    outcomes = add_outcomes(rows, task, unsafe=True)
    assert outcomes[0] == rows[0] | {"outcome": "All tests passed."}
    head, output = outcomes[1]["outcome"].split("\n", 1)
    assert head == "The tests did not pass (failed). The end of their output:"
    assert len(output) == 1500 and re.match("(?s)yyy.*AssertionError\n$", output)
    assert outcomes[2:4] == rows[2:4]
    assert re.search("(?s)\\(error\\).*SyntaxError", outcomes[4]["outcome"])
    assert outcomes[5]["outcome"].startswith("The tests could not be run. The end of")


def test_a_file_of_rows_gets_its_outcomes(tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    write_rows(path, [kodcode(f"```\n{INCREMENT}```"), kodcode("f = abs"),
                      kodcode("x", outcome="Mine."), {"question": "q", "test": "assert f"}])
    run_main(path, "--unsafe_sandbox", module=sandbox)
    output = capsys.readouterr().out
    assert "'All tests passed': 1" in output and "'Mine': 1" in output
    assert f"annotate.py --task kodcode --data {path}" in output
    assert [row.get("outcome", "")[:17] for row in read_rows(path)] == [
        "All tests passed.", "The tests did not", "Mine.", ""]


@pytest.mark.parametrize("row, flags, message", [
    (kodcode("x", test=""), "", "rows.jsonl, line 1: field 'test' or 'test_code'"),
    (kodcode(7), "", "line 1: the row does not fit the task"),
    (kodcode("x", prompt="p"), "--task ultrafeedback", "ultrafeedback: this task has no tests"),
    (kodcode("f = abs"), "", "no sandbox is available here .*no_such_tool: not found.*; use")])
def test_rows_that_cannot_get_outcomes_are_an_error_and_stay_unchanged(
        row, flags, message, tmp_path, monkeypatch):
    break_sandbox(tmp_path, monkeypatch, "exec setpriv", "exec no_such_tool")
    write_rows(tmp_path / "rows.jsonl", [row])
    error = error_message("measures/sandbox.py", tmp_path / "rows.jsonl", *flags.split())
    assert re.search(message, error) and read_rows(tmp_path / "rows.jsonl") == [row]


# ── Honest programs

def test_kodcode_solutions_pass_and_trials_end_as_recorded(shared):
    rows = read_rows(shared / "data" / "kodcode_leetcode.jsonl")[:: 1 if SLOW else 4]
    fenced = [row | {"response": f"Here:\n\n```python\n{row['solution']}\n```\n"}
              for row in rows]
    outcomes = add_outcomes(fenced, get_task("kodcode"), unsafe=bool(LACKS))
    assert {row["outcome"] for row in outcomes} == {"All tests passed."}
    trials = [trial for row in rows for trial in row["trials"].values()]
    assert len(trials) == 3 * len(rows) >= 24
    for trial in trials:
        assert (run_python(trial["solution_code"], trial["test_code"]).passed
                == (trial["test_result"] == "Pass"))


def test_honest_programs_pass(shared):
    """Values are compared with Python's ==, even if a class calls everything equal."""
    programs = [
        ("import sys\nsys.setrecursionlimit(20_000)\ndef g(n): return n and 1 + g(n - 1)",
         "assert g(15_000) == 15_000"),
        ("count = 0\ndef add(): global count; count += 1", "add()\nassert count == 1"),
        ("class A:\n    def __eq__(self, other): return True", "assert A() == 2"),
        ("import numpy\ndef f(): return numpy.ones((3, 3))", "assert f().sum() == 9"),
        ("import multiprocessing as mp\ndef f(x):\n    with mp.Pool(2) as pool:\n"
         "        return pool.map(abs, x)", "assert f([-1, 2]) == [1, 2]")]
    for line in (ROOT / "tests" / "honest_programs.txt").read_text().splitlines()[1:]:
        module, value, check = line.split(" | ", 2)
        head = f"from {module} import *\n"
        programs.append((f"{head}def f(): return {value}", f"{head}x = f()\nassert {check}"))
    rows = map(json.loads, (shared / "data" / "honest_programs.jsonl").open())
    programs += [(row["code"], row["tests"]) for row in rows]
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(lambda pair: sandbox.run_python(*pair, unsafe=bool(LACKS)),
                                programs))
    assert len(programs) >= 150 and not [
        (code, result.stderr) for (code, _), result in zip(programs, results)
        if not result.passed]


# ── Attacks: none may pass or leave anything behind

def sandbox_lacks() -> str:
    try:
        result = sandbox.run_python("", "assert True")
        return "" if result.passed else "a trivial test does not pass"
    except SandboxError as error:
        return str(error)


LACKS = sandbox_lacks()
needs_sandbox = pytest.mark.skipif(bool(LACKS), reason=f"no sandbox on this machine: {LACKS}")
KEYS = ("import ctypes, os\ncall = ctypes.CDLL(None).syscall\n"
        "add, keyctl = (248, 250) if os.uname().machine == 'x86_64' else (217, 219)\n")
# Runs the sandbox with a key in the environment and one in the session keyring.
CALL = KEYS + """
import json, sys
sys.path.insert(0, sys.argv[1])
from measures import sandbox
call(keyctl, 1, None)
call(add, b"user", b"secret", b"sk-secret", 9, -3)
sandbox.FAR, sandbox.START = 2, 4
print(json.dumps(vars(sandbox.run_python(sys.stdin.read(), "assert True", 1))))
"""

# name: (expected statuses, code); str.format fills in {outside} and {port}
ATTACKS = {
    "fork bomb": ("timeout", "import os\nwhile True:\n    try: os.fork()\n"
                  "    except OSError: pass"),
    "memory bomb": ("memory", "x = []\nwhile True: x.append(bytearray(16 << 20))"),
    "ignore the end of the time": (
        "killed timeout", "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\n"
        "while True: pass"),
    "unkillable signal handler": (
        "timeout", "import signal, time\n"
        "for number in set(signal.Signals) - {{signal.SIGKILL, signal.SIGSTOP}}:\n"
        "    signal.signal(number, lambda *_: None)\nwhile True: time.sleep(1)"),
    **{f"kill {process}": ("error", f"import os, time\nos.kill({process}, 9)\n"
                           "time.sleep(0.5)\nassert False, 'it does nothing'")
       for process in (-1, "os.getppid()")},
    "write outside": (
        "error", "from pathlib import Path\nwritten = 0\nfor place in {outside}:\n    try:\n"
        "        Path(place, 'written').write_text('x')\n        written += 1\n"
        "    except OSError as error: print(error)\nassert written"),
    "write to the system": (
        "error", "try: open('/usr/written', 'w')\n"
        "except OSError as error: assert 'Read-only' not in str(error)"),
    "read files and the environment": (
        "error", "import glob, os\nfound = repr(os.environ)\n"
        "for place in glob.glob('/proc/*/environ') + glob.glob('{outside[0]}/*'):\n"
        "    try: found += open(place).read()\n    except OSError: pass\n"
        "assert 'sk-' in found"),
    "take the caller's keys": ("error", KEYS + "key = call(keyctl, 10, -3, b'user', b'secret', "
                               "0)\nassert key > 0, 'no key'"),
    "connect to a loopback listener": (
        "error", "import socket\nsocket.create_connection(('127.0.0.1', {port}), timeout=1)"),
    "fill the disk": ("error", "for i in range(9):\n    for _ in range(8):\n"
                      "        open(str(i), 'ab').write(bytes(1 << 20))"),
    "background child": (
        "error", "import os, time\nif os.fork() == 0:\n    os.setsid()\n"
        "    if os.fork() == 0:\n        os.closerange(0, 100)\n        time.sleep(600)\n"
        "    os._exit(0)\ntime.sleep(0.3)\nassert False"),
    **{call: ("error", f"import os, resource, subprocess\n{call}") for call in (
        "subprocess.run(['mount', '-t', 'tmpfs', 'x', '.'], check=True)",
        "subprocess.run(['unshare', '-Ur', 'true'], check=True)", "os.chroot('.')",
        "resource.setrlimit(resource.RLIMIT_NPROC, (999, 999))", "open('/etc/shadow')")},
    "many threads": ("error", "import threading, time\nfor _ in range(200):\n"
                     "    threading.Thread(target=time.sleep, args=(60,)).start()")}
CAN_CHANGE_USER = (sys.platform == "linux" and os.geteuid() == 0
                   and Path("/usr/bin/python3.11").exists())


@pytest.fixture()
def outside():
    """A folder that every user may write to; tmp_path is closed to them."""
    folder = Path("/var/tmp", f"outside-{os.getpid()}-{time.monotonic_ns()}")
    folder.mkdir()
    folder.chmod(0o777)
    (folder / "key").write_text("sk-secret")
    yield folder
    shutil.rmtree(folder)


@needs_sandbox
@pytest.mark.parametrize("user", [None, pytest.param(65534, marks=pytest.mark.skipif(
    not CAN_CHANGE_USER, reason="needs root, and a Python that every user can start"))])
@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_ends_in_time_does_not_pass_and_leaves_nothing(name, user, outside):
    expected, code = ATTACKS[name]
    copy_sandbox(outside / "code")
    (outside / "code" / "tqdm.py").write_text("tqdm = list")      # /usr/bin/python3 may lack it
    (outside / "temporary").mkdir()
    (outside / "temporary").chmod(0o777)
    python = sys.executable if user is None else "/usr/bin/python3"
    identity = {} if user is None else {"user": user, "group": user, "extra_groups": []}
    home = pwd.getpwuid(os.getuid() if user is None else user).pw_dir
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        code = code.format(outside=[str(outside), home, "/tmp", "/etc", "/"],
                           port=listener.getsockname()[1])
        process = subprocess.run(
            [python, "-B", "-c", CALL, str(outside / "code")], cwd="/", input=code,
            env={"OPENAI_API_KEY": "sk-secret", "TMPDIR": str(outside / "temporary")},
            text=True, timeout=120, capture_output=True, **identity)
        with pytest.raises(BlockingIOError):
            listener.accept()
    assert process.returncode == 0, process.stderr
    result = json.loads(process.stdout)
    assert result["status"] in expected.split() and not result["passed"], result["stderr"]
    assert not alive(str(outside)) and not list((outside / "temporary").iterdir())
    assert not list(outside.glob("**/written")) and not Path(home, "written").exists()
    assert name != "fill the disk" or "No space left" in result["stderr"]


def break_sandbox(folder, monkeypatch, old: str, new: str):
    """Let run_python use a copy of the sandbox with another text."""
    copy_sandbox(folder / "code")
    monkeypatch.setattr(sandbox, "FOLDER", folder / "code" / "measures")
    script = sandbox.FOLDER / "sandbox.sh"
    assert old in script.read_text()
    script.write_text(script.read_text().replace(old, new))


@needs_sandbox
@pytest.mark.parametrize("old, new", [
    ("unshare --net", "unshare --no_such_option"), ("tmpfs tmpfs /sys", "tmpfs tmpfs /none"),
    ("mount --rbind", "mount --no_such_option"), ("mount -o remount", "mount --no_such_option"),
    ("chroot $root", "chroot /none"), ("--no-new-privs", "--no_such_option")])
def test_without_a_layer_nothing_runs_but_with_unsafe(old, new, tmp_path, monkeypatch):
    break_sandbox(tmp_path, monkeypatch, old, new)
    with pytest.raises(SandboxError, match="^no sandbox is available here .*--unsafe_sandbox"):
        sandbox.run_python("x = 1", "assert x == 1")
    assert run_python("x = 1", "assert x == 1").passed


@needs_sandbox
def test_a_run_ends_with_its_caller_and_memory_is_freed_here_first(outside):
    call = ("import sys; sys.path[:0] = sys.argv[1:2]; "
            "from measures.sandbox import run_python; run_python(*sys.argv[2:])")
    copy_sandbox(outside / "code")
    caller = subprocess.Popen([sys.executable, "-c", call, str(outside / "code"),
                               "import time\ntime.sleep(600)", "assert 1"])
    while len(pids := alive(str(outside), 0)) < 4:           # caller, unshare, shell, program
        assert caller.poll() is None
    scores = [int(Path(f"/proc/{pid}/oom_score_adj").read_text()) for pid in pids]
    assert scores.count(1000) >= 3
    time.sleep(1)                                            # now the program sleeps
    caller.kill()
    caller.wait()
    assert not alive(str(outside))
