"""The sandbox: verdicts on right and wrong code, test outcomes of responses, and attacks.

Verdicts are tested with `unsafe`, because some machines do not support the isolation.
"""

import json
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
from data import get_task, read_rows, write_rows
from helpers import ROOT, SLOW, error_message, run_main
from measures import sandbox
from measures.sandbox import REASON, SandboxError, add_outcomes, code_of

if os.name == "nt":
    pytest.skip("the sandbox needs Linux", allow_module_level=True)
run_python = partial(sandbox.run_python, unsafe=True)

INCREMENT = "def f(x):\n    return x + 1\n"
RAISES = "import pytest\ndef test_f():\n    with pytest.raises(ValueError): int('x')"


def status(code, tests="assert True", **limits):
    return run_python(code, tests, **limits).status


# ── Processes of the sandbox

def alive(mark: str, seconds: float = 5.0) -> list[str]:
    """IDs of the processes with `mark` in their command line that outlive `seconds`."""
    end = time.monotonic() + seconds
    while True:
        pids = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with suppress(OSError):                               # the process has ended
                pids += [path.parent.name] * (mark.encode() in path.read_bytes())
        if not pids or time.monotonic() > end:
            return pids
        time.sleep(0.01)


def copy_sandbox(folder: Path):
    """Copy the sandbox to a folder, whose name identifies its processes."""
    (folder / "measures").mkdir(parents=True)
    shutil.copy(ROOT / "data.py", folder)
    for path in (ROOT / "measures").glob("*.*"):
        shutil.copy(path, folder / "measures")
    with open(folder / "measures" / "cell.py", "a") as cell:
        cell.write(f"\n# {folder}\n")


def break_sandbox(folder: Path, monkeypatch, old: str, new: str, file="sandbox.sh"):
    """Let run_python use a copy of the sandbox with another text."""
    copy_sandbox(folder / "code")
    monkeypatch.setattr(sandbox, "FOLDER", folder / "code" / "measures")
    script = sandbox.FOLDER / file
    assert old in script.read_text()
    script.write_text(script.read_text().replace(old, new))


# ── Right and wrong

# The last item is a part of the output.
@pytest.mark.parametrize("code, tests, expected, output", [
    (INCREMENT, "def check(g):\n    assert g(1) == 2\ncheck(f)", "passed", ""),
    (INCREMENT, "import solution\nfrom solution import f\nassert f is solution.f", "passed",
     ""),
    (INCREMENT, "def check(g):\n    assert g(1) == 2", "not run", "test nothing"),
    (INCREMENT, "def test_f(): assert f(1) == 2\ndef test_g(): assert f(1) == 3", "failed",
     "AssertionError"),
    (INCREMENT, "assert f(1", "not run", "SyntaxError"),
    (INCREMENT, "import no_such_module\nassert f(1) == 2", "not run", "ModuleNotFoundError"),
    # code that cannot be loaded
    ("assert False", "assert True", "error", "AssertionError"),
    ("x = '\ud800'", "assert True", "error", "UnicodeEncodeError"),
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
    # Some functions of pytest work without a test runner.
    ("", f"{RAISES}\nassert 1 + 1e-9 == pytest.approx(1)", "passed", ""),
    ("", "def test_f(): return 1 == 2", "not run", "does not return None"),
    ("", "def test_f(): yield", "not run", "does not return None"),
    # Code does not pass by an early exit, or by writing to files or closing them.
    *[(f"import os; {call}", "assert True", "error", "") for call in (
        "quit()", "os.closerange(3, 99)")],
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


def test_files_that_need_pytest_could_not_be_run(shared):
    """Public files with classes, fixtures and marks, and further forms."""
    rows = read_rows(shared / "data" / "public_cases" / "test_files.jsonl")
    rows += [{"program": INCREMENT, "tests": tests} for tests in (
        "from pytest import fixture, mark\ndef test_f(): assert f(1) == 2",
        "class Test:\n    def test_f(self): pass\nassert f(1) == 2",
        "import unittest\nclass Check(unittest.TestCase): pass\nassert f(1) == 2",
        "def setup_module(): global x; x = 1\ndef test_f(): assert f(x) == 2",
        "import unittest\ndef test_f(): raise unittest.SkipTest('x')")]
    for row in rows:
        assert status(row["program"], row["tests"]) == "not run", row


def test_files_that_import_pytest_without_a_use_run_without_it(tmp_path, monkeypatch):
    break_sandbox(tmp_path, monkeypatch, "import ast\n",
                  "import ast, sys; sys.modules['pytest'] = None\n", "cell.py")
    unused = "import pytest\ndef test_f(): assert f(1) == 2\nif f(1) == 3: pytest.main()"
    assert status(INCREMENT, unused) == "passed"
    assert status(INCREMENT, RAISES) == "not run"


# ── Limits

def test_a_loop_ends_at_the_timeout_and_its_output_is_kept(monkeypatch):
    result = run_python("print('begun')\nwhile True:\n    pass", "assert True", timeout=0.5)
    assert result.status == "timeout"
    assert re.match("begun\n(.*\n)?stopped after 0.5 s\n", result.stderr)
    # The time is CPU time: it does not count the start of Python or a short sleep.
    assert status("import time; time.sleep(1.2)", timeout=0.5) == "passed"
    monkeypatch.setattr(sandbox, "START", 0)
    assert status("import time\ntime.sleep(60)", timeout=0.1) == "timeout"


@pytest.mark.skipif(sys.platform != "linux", reason="memory is limited on Linux only")
def test_memory_is_limited():
    code = "def f(): return bytes(400 << 20)"
    assert status(code, "assert f()", memory_mb=300) == "memory"
    assert status(code, "assert f()", memory_mb=600) == "passed"


def test_a_crash_calls_no_handler_of_the_host():
    """For Linux, a core limit of 1 byte means this. A limit of 0 cannot be raised."""
    code = "import resource\nprint(resource.getrlimit(resource.RLIMIT_CORE))"
    hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
    assert run_python(code, "assert True").stderr == ("(1, 1)\n" if hard else "(0, 0)\n")


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


@pytest.mark.parametrize("program, text", [
    (SHOWN, SHOWN), ("Say `f` or ```f```.", "Say `f` or ```f```."),
    (INCREMENT, f"~~~ Python 3\n{INCREMENT}~~~"), (INCREMENT, f"```python\n{INCREMENT}"),
    (INCREMENT, f"So:\n\n```py\n{INCREMENT}  ```\nIt adds."),
    (INCREMENT, "1. So:\r\n   ```python\r\n   def f(x):\r\n\r\n       return x + 1\r\n   ```"),
    (INCREMENT, f"```bash\npip install f\n```\n```Python\n{INCREMENT}```\n```\n2 is out\n```"),
    (INCREMENT, f"```\n{INCREMENT}```\nprints\n```text\n2 is out\n```"),
    (INCREMENT, f"```code\n{INCREMENT}```"),
    (INCREMENT, f"```python\n{INCREMENT}```\n```python\n>>> f(1)\n2\n```"),
    *[(INCREMENT, text) for text in (              # no clean fence
        f"{INCREMENT}```", f"\ufeff{INCREMENT}", f"```\n{INCREMENT.rstrip()}```",
        f"So (see 1.:\n\n{INCREMENT}\nIt's done.", f"<code>\n{INCREMENT}</code>",
        f"if needed:\n{INCREMENT}", f"{INCREMENT}\ndef g(x):\n    return (x")],
    *[(text, text) for text in ("def f(:\n    pass", "f\0", "(" * 999, "Say \ud800 so")],
    (SHOWN, f"````python3\n{SHOWN}````"),
    (PART + INCREMENT, f"First\n```python\n{PART}```\nthen\n```python\n{INCREMENT}```")])
def test_the_program_is_the_text_in_code_fences_or_else_the_python_of_the_text(program, text):
    """A fence inside a string of the program does not count. A broken program stays."""
    lines = [line for line in code_of(text).split("\n") if line]
    assert lines == [line for line in program.split("\n") if line]


def kodcode(response: str, **more) -> dict:
    return {"question": "Add one.", "response": response, "test": "assert f(1) == 2"} | more


def test_rows_keep_their_order_and_get_the_outcomes_of_their_tests(tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    rows = [kodcode(f"```python\nimport time\ntime.sleep(0.5)\n{INCREMENT}```"),
            kodcode("```\nprint('y' * 2000)\ndef f(x):\n    return x\n```"),
            kodcode("x", outcome="Mine."), {"question": "q", "test": "assert f"},
            kodcode("def f(:", test_code="assert f"), kodcode(PART, test="def test_f(y): y")]
    write_rows(path, rows)
    run_main(path, "--unsafe_sandbox", module=sandbox)
    terminal = capsys.readouterr().out
    assert "'All tests passed': 1" in terminal and "'Mine': 1" in terminal
    assert f"annotate.py --task kodcode --data {path}" in terminal
    results = read_rows(path)
    assert results[0] == rows[0] | {"outcome": "All tests passed."}
    head, output = results[1]["outcome"].split("\n", 1)
    assert head == "The tests did not pass (failed). The end of their output:"
    assert len(output) == 1500 and re.match("(?s)yyy.*AssertionError\n$", output)
    assert results[2:4] == rows[2:4]
    assert re.search("(?s)\\(error\\).*SyntaxError", results[4]["outcome"])
    assert results[5]["outcome"].startswith("The tests could not be run. The end of")


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
    rows = read_rows(shared / "data" / "kodcode_leetcode.jsonl")[:: 1 if SLOW else 6]
    fenced = [row | {"response": f"Here:\n\n```python\n{row['solution']}\n```\n"}
              for row in rows]
    outcomes = add_outcomes(fenced, get_task("kodcode"), unsafe=bool(LACKS))
    assert {row["outcome"] for row in outcomes} == {"All tests passed."}
    trials = [trial for row in rows for trial in row["trials"].values()]
    assert len(trials) == 3 * len(rows) >= 15
    for trial in trials:
        assert (run_python(trial["solution_code"], trial["test_code"]).passed
                == (trial["test_result"] == "Pass"))


def test_honest_programs_pass(shared):
    """Programs of a few lines share one process; each has names of its own."""
    rows = [*map(json.loads, (shared / "data" / "honest_programs.jsonl").open())]
    together = [f"{row['code']}\n{row['tests']}" for row in rows if "Pool" not in row["code"]]
    for line in (ROOT / "tests" / "honest_programs.txt").read_text().splitlines()[1:]:
        module, value, check = line.split(" | ", 2)
        together.append(f"from {module} import *\nx = {value}\nassert {check}")
    assert len(together) >= 150
    programs = [
        (f"def run():\n    for program in {together!r}:\n        print(program)\n"
         "        exec(program, {'__name__': 'solution'})", "run()"),
        ("import sys\nsys.setrecursionlimit(20_000)\ndef g(n): return n and 1 + g(n - 1)",
         "assert g(15_000) == 15_000"),
        ("count = 0\ndef add(): global count; count += 1", "add()\nassert count == 1"),
        ("import multiprocessing as mp\ndef f(x):\n    with mp.Pool(2) as pool:\n"
         "        return pool.map(abs, x)", "assert f([-1, 2]) == [1, 2]")]
    for code, tests in programs:
        result = sandbox.run_python(code, tests, unsafe=bool(LACKS))
        assert result.passed, result.stderr


# ── Attacks: none may pass or leave anything behind

def sandbox_lacks() -> str:
    try:
        sandbox.run_python("", "assert True")
    except SandboxError as error:
        return str(error)
    return ""


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
sandbox.FAR, sandbox.START = 2, int(sys.argv[2])
print(json.dumps(vars(sandbox.run_python(sys.stdin.read(), "assert True",
                                         float(sys.argv[3])))))
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
        "subprocess.run(['unshare', '-Ur', 'true'], check=True)", "open('/etc/shadow')",
        "resource.setrlimit(resource.RLIMIT_NPROC, (999, 999))")},
    "many threads": ("error", "import threading, time\nfor _ in range(200):\n"
                     "    threading.Thread(target=time.sleep, args=(60,)).start()")}
# Another user than root gets a user namespace; these defences depend on the user.
NOBODY = ("fork bomb", "kill -1", "write outside", "read files and the environment",
          "take the caller's keys", *[name for name in ATTACKS if name.endswith(")")])
CAN_CHANGE_USER = os.geteuid() == 0 and Path("/usr/bin/python3.11").exists()


@pytest.fixture()
def outside():
    """A folder that every user may write to; tmp_path is closed to them."""
    folder = Path("/var/tmp", f"outside-{os.getpid()}-{time.monotonic_ns()}")
    folder.mkdir()
    folder.chmod(0o777)
    umask = os.umask(0o022)
    (folder / "key").write_text("sk-secret")
    yield folder
    os.umask(umask)
    shutil.rmtree(folder)


@needs_sandbox
@pytest.mark.parametrize("name, user", [
    *[(name, None) for name in ATTACKS], *[(name, 65534) for name in NOBODY]])
def test_an_attack_ends_in_time_does_not_pass_and_leaves_nothing(name, user, outside):
    if user and not CAN_CHANGE_USER:
        pytest.skip("needs root, and a Python that every user can start")
    expected, code = ATTACKS[name]
    limits = ("2", "0.1") if "timeout" in expected else ("4", "1")         # START and timeout
    copy_sandbox(outside / "code")
    (outside / "code" / "tqdm.py").write_text("tqdm = list")      # /usr/bin/python3 may lack it
    (outside / "temporary").mkdir()
    (outside / "temporary").chmod(0o777)
    python = sys.executable if user is None else "/usr/bin/python3"
    identity = {} if user is None else {"user": user, "group": user, "extra_groups": []}
    home = os.path.expanduser("~" if user is None else "~nobody")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        code = code.format(outside=[str(outside), home, "/tmp", "/etc", "/"],
                           port=listener.getsockname()[1])
        process = subprocess.run(
            [python, "-B", "-c", CALL, str(outside / "code"), *limits], cwd="/", input=code,
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


@needs_sandbox
@pytest.mark.parametrize("old, new", [
    ("unshare --net", "unshare --no_such_option"), ("tmpfs tmpfs /sys", "tmpfs tmpfs /none"),
    ("mount --rbind", "mount --no_such_option"), ("mount -o remount", "mount --no_such_option"),
    ("findmnt --list", "no_such_tool --list"), ("findmnt --list", "true --list"),   # no output
    ("chroot $root", "chroot /none"), ("--no-new-privs", "--no_such_option")])
def test_without_a_layer_nothing_runs_but_with_unsafe(old, new, tmp_path, monkeypatch):
    break_sandbox(tmp_path, monkeypatch, old, new)
    with pytest.raises(SandboxError, match="^no sandbox is available here .*--unsafe_sandbox"):
        sandbox.run_python("x = 1", "assert x == 1")
    assert run_python("x = 1", "assert x == 1").passed


@needs_sandbox
def test_accents_spaces_and_a_narrow_umask_are_no_obstacle(outside):
    """The command sees the directory, and cannot write to it."""
    folder = outside / "Zoë s é\\ü"
    folder.mkdir(0o755)
    (folder / "file").write_text("seen")
    previous = os.umask(0o077)
    try:
        output = subprocess.run(
            ["sh", sandbox.FOLDER / "sandbox.sh", "/usr", folder, "sh", "-c",
             'cat "$0/file"; touch "$0/written"', folder], capture_output=True, text=True,
            env={"HOME": str(outside)})                        # no locale, as in run_python
        assert sandbox.run_python("x = 1", "assert x == 1").passed
    finally:
        os.umask(previous)
    assert output.stdout == "seen" and "Read-only" in output.stderr, output.stderr


def test_windows_is_told_that_programs_need_linux(monkeypatch):
    monkeypatch.setattr(os, "name", "nt")
    with pytest.raises(SandboxError, match="^programs cannot be run on Windows; use Linux$"):
        run_python("x = 1", "assert x == 1")
    monkeypatch.undo()


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
