"""The sandbox: verdicts on right and wrong code, and the test outcomes of responses.

test_attacks.py tests its isolation.
"""

import ast
import json
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import pytest
from data import get_task, read_rows, write_rows
from helpers import SLOW, error_message, run_main
from measures import sandbox
from measures.benchmarks import read_problems
from measures.sandbox import REASON, SandboxError, add_outcomes, code_of

# Some machines do not support the isolation, which test_attacks.py tests.
run_python = partial(sandbox.run_python, unsafe=True)

INCREMENT = "def f(x):\n    return x + 1\n"
RAISES = "import pytest\ndef test_f():\n    with pytest.raises({}): int({!r})"


def status(code, tests="assert True", **limits):
    return run_python(code, tests, **limits).status


# ── Right and wrong

# The last item is a part of the output.
@pytest.mark.parametrize("code, tests, expected, output", [
    *[(INCREMENT, tests, "passed", "") for tests in (
        "assert f(1) == 2", "def check(g):\n    assert g(1) == 2\ncheck(f)",
        "from solution import f\nimport solution\nassert solution.f is f and f(1) == 2",
        "def test_f(): assert f(1) == 2")],
    *[(INCREMENT, tests, "not run", "no test and no assertion") for tests in (
        "def check(g):\n    assert g(1) == 2", "for x in []: assert f(x)", "f(1)", "")],
    (INCREMENT, "assert f(1) == 3", "failed", "AssertionError"),
    (INCREMENT, "def test_f(): assert f(1) == 2\ndef test_g(): assert f(1) == 3", "failed", ""),
    (INCREMENT, "assert f('1')", "error", "TypeError"),
    (INCREMENT, "def test_f(): f('1')", "error", "TypeError"),
    (INCREMENT, "assert f(1", "not run", "SyntaxError"),
    (INCREMENT, "import no_such_module\nassert f(1) == 2", "not run", "ModuleNotFoundError"),
    (INCREMENT, "assert f(1) == 2\nraise SystemExit(0)", "error", "SystemExit"),
    (INCREMENT, "from solution import nothing\ndef test_f(): pass", "error", "ImportError"),
    # code that cannot be loaded
    *[(code, "assert True", "error", output) for code, output in (
        ("def f(:", "SyntaxError"), ("import no_such_module", "ModuleNotFoundError"),
        ("1 / 0", "ZeroDivisionError"), ("assert False", "AssertionError"),
        ("x = '\ud800'", "Error"), ("\0", "Error"))],
    # The tests and the code have separate namespaces.
    ("def help(): return 1\ndef f(): return help()",
     "def help(): return 2\ndef test_f(): assert f() == 1 and help() == 2", "passed", ""),
    ("def f(): return math.pi", "import math\nassert f() > 3", "error", "NameError"),
    ("import math; math.floor = lambda _: 2", "from math import floor\nassert floor(1.5) == 1",
     "failed", "replaced a function"),
    # Any text is code and any bytes are output.
    ("s = 'é😀'\r\n", "assert s == 'é😀' and len(s) == 2", "passed", ""),
    ("x = 1", "assert '\ud800'", "not run", ""),
    ("import os; os.write(1, b'a\\xff\\xc3z'); os.write(2, 'é'.encode())", "assert True",
     "passed", "a\ufffd\ufffdzé"),
    # A plain runner can call some functions of pytest and of unittest.mock.
    ("", RAISES.format("ValueError, match='invalid'", "x"), "passed", ""),
    ("", RAISES.format("KeyError", "x"), "error", "ValueError"),
    ("", RAISES.format("ValueError", "1"), "failed", "DID NOT RAISE"),
    ("", "import pytest\nassert 1 + 1e-9 == pytest.approx(1)", "passed", ""),
    ("", "from unittest.mock import patch\n@patch('os.getcwd')\ndef test_f(getcwd):\n"
     "    import os\n    os.getcwd()\n    getcwd.assert_called_once()", "passed", ""),
    *[("", tests, "not run", output) for tests, output in (
        ("import functools\n@functools.cache\ndef test_f(x): assert x", "missing 1"),
        ("def test_f(): return 1 == 2", "does not return None"),
        ("def test_f():\n    yield\n    assert False", "does not return None"))],
    # An exception cannot hide where it was raised.
    ("class E(Exception): __traceback__ = None\ndef f(): raise E", "assert f()", "error", "E"),
    # Code does not pass by an early exit or by closing files.
    *[(code, "assert True", "error", output) for code, output in (
        ("quit()", ""), ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("import os; print('passed'); os._exit(0)", "exited before"),
        ("import os; os.closerange(3, 100)", ""))],
    ("import os\ndef f(): os._exit(0)", "assert f() == 1", "error", "exited before"),
    ("def f(): raise SystemExit(0)", "assert f() == 1", "error", "SystemExit"),
    ("import os; os.abort()", "assert True", "killed", "-6"),
    # An endless thread does not delay the end.
    ("import threading, time\nthreading.Thread(target=time.sleep, args=(600,)).start()",
     "assert True", "passed", "")])
def test_the_status_is_the_verdict_of_the_tests(code, tests, expected, output):
    result = run_python(code, tests)
    assert (result.status, result.passed) == (expected, expected == "passed")
    assert output in result.stderr


def test_the_traceback_names_lines_but_no_paths_of_this_machine():
    code = "def f(x):\n    print('here')\n    return g(x)\ndef g(x):\n    return 1 / x"
    stderr = run_python(code, "assert f(0) == 2").stderr
    assert stderr.startswith("here\nTraceback (most recent call last):\n"
                             "  File \"tests.py\", line 1, in <module>\n")
    assert re.search(r"(?s)    assert f\(0\) == 2\n.*    return 1 / x\n.*by zero\n$", stderr)
    assert "sandbox" not in stderr and tempfile.gettempdir() not in stderr


SWAPS = {"+": "-", "-": "+", "*": "+", "%": "*", "//": "*", "==": "!=", "!=": "==", "<": ">=",
         ">": "<=", "<=": ">", ">=": "<", "and": "or", "or": "and"}


def test_verdicts_on_solutions_with_another_operator_are_those_of_plain_python(shared):
    pairs = []
    for problem in read_problems(shared / "data" / "mbpp_first50.jsonl")[:: 1 if SLOW else 4]:
        code = ast.unparse(ast.parse(problem.solution))
        operators = [m for m in re.finditer(r"(?<= )\S+(?= )", code) if m[0] in SWAPS]
        pairs += [(code[: m.start()] + SWAPS[m[0]] + code[m.end() :], problem.tests)
                  for m in operators[:6]]

    def judge(pair):
        try:
            status = subprocess.run([sys.executable, "-I", "-c", "\n".join(pair)], timeout=5,
                                    capture_output=True).returncode
        except subprocess.TimeoutExpired:
            status = 1
        return status == 0, run_python(*pair, timeout=2).passed

    with ThreadPoolExecutor(2) as pool:
        verdicts = list(pool.map(judge, pairs))
    assert all(passes == verdict for passes, verdict in verdicts)
    assert sum(not passes for passes, _ in verdicts) >= (100 if SLOW else 20)


# ── Test files that need pytest

WRONG = INCREMENT.replace("+ 1", "- 1")
WITH_PYTEST = "import pytest\nfrom solution import f\n"


# Tests, which INCREMENT passes and WRONG fails under pytest.
@pytest.mark.parametrize("tests", [
    "@pytest.mark.parametrize('x, y', [(1, 2), pytest.param(2, 3, id='two')])\n"
    "@pytest.mark.parametrize('z', [0])\ndef test_f(x, y, z): assert f(x) == y",
    "one = pytest.mark.parametrize('x', [1])\n@one\ndef test_f(x): assert f(x) == 2",
    "@pytest.fixture(params=[1, 2], scope='module')\ndef x(request): yield request.param\n"
    "def test_f(x): assert f(x) == x + 1",
    "calls = []\n@pytest.fixture(autouse=True)\ndef call(): calls.append(f(1))\n"
    "def test_f(): assert calls == [2]",
    "@pytest.fixture\ndef two():\n    assert f(1) == 2\n    return 2\n"
    "def test_f(two): assert two == 2",
    "@pytest.fixture\ndef x():\n    yield 1\n    assert f(1) == 2\ndef test_f(x): assert x",
    "from pytest import fixture, mark\n@fixture\ndef x(): return 1\n@mark.slow\n"
    "def test_f(x: int): assert f(x) == 2",
    "@pytest.fixture\ndef touched(): calls.append(1)\ncalls = []\n"
    "@pytest.mark.usefixtures('touched')\ndef test_f(): assert calls and f(1) == 2",
    "def test_f(tmp_path, monkeypatch, capfd, caplog):\n    (tmp_path / 'x').write_text('1')\n"
    "    monkeypatch.setenv('X', '1')\n    print(f(int((tmp_path / 'x').read_text())))\n"
    "    assert capfd.readouterr().out == '2\\n'",
    "from unittest.mock import patch\n@patch('os.getcwd')\ndef test_f(getcwd, capsys):\n"
    "    print(f(1))\n    assert capsys.readouterr().out == '2\\n'",
    "class TestF:\n    one = 1\n    class TestInner:\n"
    "        def setup_method(self): self.x = TestF.one\n"
    "        def test_f(self): assert f(self.x) == 2",
    "def setup_module(): global x; x = 1\ndef test_f(): assert f(x) == 2",
    "import unittest\nclass Check(unittest.TestCase):\n    def setUp(self): self.x = 1\n"
    "    def test_f(self):\n        with self.subTest(): self.assertEqual(f(self.x), 2)\n"
    "        with self.assertRaises(TypeError): f('')\n"
    "if __name__ == '__main__':\n    unittest.main()",
    "import sys\n@pytest.mark.skipif(sys.platform > '', reason='x')\ndef test_x(): assert 0\n"
    "@pytest.mark.skipif(sys.platform == '', reason='x')\ndef test_f(): assert f(1) == 2",
    "@pytest.mark.xfail\ndef test_x(): assert f(1) == 3\ndef test_f(): assert f(1) == 2",
    "@pytest.mark.xfail(strict=True)\ndef test_x(): assert f(1) != 2\ndef test_f(): f(1)",
    "@pytest.mark.xfail(False, reason='x')\ndef test_f(): assert f(1) == 2",
    "@pytest.mark.xfail(run=False)\ndef test_x(): assert 0\ndef test_f(): assert f(1) == 2",
    "json = pytest.importorskip('json')\ndef test_f(): assert json.dumps(f(1)) == '2'",
    # f(1) == 2 is evaluated first, so WRONG does not reach the unknown name.
    "from solution import *\n@pytest.mark.skip\ndef test_x(): assert 0\n"
    "def test_f(): assert f(1) == 2 and undefined(1)"])
def test_files_that_need_pytest_run_under_pytest_if_that_is_allowed(tests):
    right = "error" if "undefined" in tests else "passed"
    for code, expected in ((INCREMENT, right), (WRONG, "failed")):
        result = run_python(code, WITH_PYTEST + tests, use_pytest=True)
        assert (result.status, result.passed) == (expected, expected == "passed"), result.stderr
        assert not {"cell.py", "runner.py"} & {*re.findall(r"\w+\.py", result.stderr)}
    assert status(INCREMENT, WITH_PYTEST + tests) == "not run"


@pytest.mark.parametrize("tests", [
    "def test_f(mocker): assert f(1) == 2", "def test_f(anyio_backend): assert f(1) == 2",
    "@pytest.mark.parametrize('y', [1])\ndef test_f(x): assert f(x) == 2",
    "@pytest.mark.parametrize('x', [1])\ndef test_f(x): yield",
    "@pytest.fixture\nasync def x(): return 1\ndef test_f(x): assert f(x) == 2",
    "@pytest.mark.asyncio\nasync def test_f(): assert f(1) == 2",
    "import unittest\nclass TestF(unittest.IsolatedAsyncioTestCase):\n"
    "    async def test_f(self): assert f(1) == 2",
    "x = pytest.importorskip('no_such_module')\ndef test_f(): assert f(1) == 2",
    "def test_f():\n    pytest.importorskip('no_such_module')\n    assert f(1) == 2",
    "@pytest.mark.skip\ndef test_f(): assert f(1) == 2",
    "@pytest.mark.xfail\ndef test_f(): assert f(1) == 3",
    "def test_f():\n    pytest.skip('x')\n    assert f(1) == 2",
    "import unittest\nclass TestF(unittest.TestCase):\n    @unittest.skip('x')\n"
    "    def test_f(self): assert f(1) == 2",
    "import unittest\nclass TestF(unittest.TestCase):\n"
    "    def test_f(self): assert f(1) == 2\nunittest.main()",
    "pytestmark = pytest.mark.skip\ndef test_f(): assert f(1) == 2"])
def test_files_that_even_pytest_cannot_run_say_so(tests):
    for options in ({}, {"use_pytest": True}):
        assert status(INCREMENT, WITH_PYTEST + tests, **options) == "not run"


def test_public_test_files_pass_or_could_not_be_run(shared):
    for row in read_rows(shared / "data" / "public_cases" / "test_files.jsonl"):
        assert status(row["program"], row["tests"]) == "not run"
        is_async = row["case"] == "pytest_asyncio"
        result = run_python(row["program"], row["tests"], use_pytest=True)
        assert result.status == ("not run" if is_async else row["right"])
        wrong = re.sub(r"(return|print)\b.*", "return None", row["program"])
        assert run_python(wrong, row["tests"], use_pytest=True).status != "passed"


def test_files_that_need_no_pytest_run_without_it(monkeypatch):
    monkeypatch.setattr(sandbox, "CHILD", "import sys; sys.modules['pytest'] = None\n"
                        + sandbox.CHILD)
    unused = WITH_PYTEST + ("def test_f(): assert f(1) == 2\n"
                            "if __name__ == '__main__': pytest.main([__file__])")
    for tests, runner, verdict in ((unused, "plain", "passed"),
                                   (RAISES.format("ValueError", "x"), "plain", "not run"),
                                   (WITH_PYTEST + "class TestF:\n    def test_f(self): pass",
                                    "pytest", "not run")):
        result = run_python(INCREMENT, tests, use_pytest=True)
        assert (result.status, result.runner) == (verdict, runner)
        assert result.passed or "ModuleNotFoundError" in result.stderr


# ── Limits

def test_a_loop_ends_at_the_timeout_and_its_output_is_kept(monkeypatch):
    result = run_python("print('begun')\nwhile True:\n    pass", "assert True", timeout=0.5)
    assert result.status == "timeout" and result.stderr == "begun\nstopped after 0.5 s\n"
    monkeypatch.setattr(sandbox, "START", 1)
    assert status("import time\ntime.sleep(60)", timeout=0.1) == "timeout"


@pytest.mark.skipif(sys.platform != "linux", reason="memory is limited on Linux only")
@pytest.mark.parametrize("code, tests", [
    ("x = [0] * 10**10", ""), ("x = []\nwhile True:\n    x.append(bytearray(1000))", ""),
    ("def f():\n    return bytes(400 << 20)", "assert f()"),
    ("", "x = []\nwhile True: x.append(bytearray(1000))")])
def test_memory_is_limited(code, tests):
    assert status(code, tests, memory_mb=300) == "memory"
    assert status("x = bytes(400 << 20)", memory_mb=600) == "passed"


def test_endless_output_is_stopped_and_its_end_kept():
    result = run_python("print('x' * 100_000 + 'end')", "assert True")
    assert result.passed and result.stderr == "x" * (REASON - 4) + "end\n"
    result = run_python("while True:\n    print('x' * 100_000)", "assert True")
    assert (result.status == "error" and "File too large" in result.stderr
            and len(result.stderr) < REASON + 50)
    assert status("open('large', 'wb').write(bytes(40 << 20))") == "error"


def test_the_environment_and_the_input_are_empty_and_home_is_temporary(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    code = ("import json, os, sys\nprint(json.dumps([dict(os.environ), os.getcwd(), sys.path, "
            "sorted(os.listdir()), sys.stdin.read()]))")
    output = run_python(code, "assert True").stderr
    environment, directory, path, files, stdin = json.loads(output)
    assert ({"HOME", "TMPDIR"} <= set(environment)
            <= {"HOME", "TMPDIR", "OMP_NUM_THREADS", "LC_CTYPE", "PY_IGNORE_IMPORTMISMATCH",
                "PYTEST_DISABLE_PLUGIN_AUTOLOAD"})
    assert directory == os.path.realpath(directory) and "/somewhere" not in path
    assert {"solution.py"} <= set(files) <= {"solution.py", "__pycache__"}
    assert stdin == ""


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
    code = code_of(text)
    assert ([line for line in code.split("\n") if line]
            == [line for line in program.split("\n") if line])
    if "def f" in program:
        assert status(code, "assert f(1) == 2") == "passed"


def kodcode(response: str, **more) -> dict:
    tests = {"test": "from solution import f\n\ndef test_f():\n    assert f(1) == 2\n"}
    return {"question": "Add one.", "response": response} | tests | more


def test_rows_keep_their_order_and_get_the_outcomes_of_their_tests():
    rows = [kodcode(f"```python\nimport time\ntime.sleep(0.5)\n{INCREMENT}```"),
            kodcode("```\nprint('y' * 2000)\ndef f(x):\n    return x\n```"),
            kodcode("x", outcome="Mine."), {"question": "q", "test": "assert f"},
            kodcode("def f(:", test_code="assert f")]
    task = replace(get_task("kodcode"),
                   responses=lambda row: [{"response": "a"}, {"response": "b"}])
    outcomes = add_outcomes(rows, task, unsafe=True)
    assert outcomes[0] == rows[0] | {"outcome": "All tests passed.", "test_runner": "plain"}
    head, output = outcomes[1]["outcome"].split("\n", 1)
    assert head == "The tests did not pass (failed). The end of their output:"
    assert len(output) == 1500 and re.match("(?s)yyy.*AssertionError\n$", output)
    assert outcomes[2:4] == rows[2:4]
    assert "(error)" in outcomes[4]["outcome"] and "SyntaxError" in outcomes[4]["outcome"]


def test_a_file_of_rows_gets_its_outcomes(tmp_path, capsys):
    """Only the tests that could not be run are run again, with --pytest."""
    path = tmp_path / "rows.jsonl"
    write_rows(path, [kodcode(f"```\n{INCREMENT}```"), kodcode("f = abs"),
                      kodcode("x", outcome="Mine."), {"question": "q", "test": "assert f"},
                      kodcode(INCREMENT, test="def test_f(capsys): assert f(1) == 2")])
    before = None
    for flags, last in (([], "The tests could not be run"), (["--pytest"], "All tests passed")):
        run_main(path, "--unsafe_sandbox", *flags, module=sandbox)
        output = capsys.readouterr().out
        assert f"'{last}': {1 + len(flags)}" in output and "'Mine': 1" in output
        assert f"annotate.py --task kodcode --data {path}" in output
        *rows, row = read_rows(path)
        assert row["outcome"].startswith(f"{last}.") and before in (None, rows)
        assert row["test_runner"] == ("pytest" if flags else "plain")
        before = rows
    assert [row.get("outcome", "")[:17] for row in rows] == [
        "All tests passed.", "The tests did not", "Mine.", ""]


@pytest.mark.parametrize("row, flags, message", [
    (kodcode("x", test=""), "", "rows.jsonl, line 1: field 'test' or 'test_code'"),
    (kodcode(7), "", "line 1: the row does not fit the task"),
    ({"question": "q", "test": "assert f"}, "", "no row has a response"),
    (kodcode("x", prompt="p"), "--task ultrafeedback", "ultrafeedback: this task has no tests"),
    (kodcode("f = abs"), "", "the sandbox lacks files")])
def test_rows_that_cannot_get_outcomes_are_an_error_and_stay_unchanged(
        row, flags, message, tmp_path, monkeypatch):
    def run_without_sandbox(*_, **__):
        raise SandboxError("the sandbox lacks files")

    monkeypatch.setattr(sandbox, "run_python", run_without_sandbox)
    write_rows(tmp_path / "rows.jsonl", [row])
    error = error_message("measures/sandbox.py", tmp_path / "rows.jsonl", *flags.split())
    assert message in error and read_rows(tmp_path / "rows.jsonl") == [row]


# ── Real rows

def test_kodcode_solutions_pass_and_trials_end_as_recorded(shared):
    rows = read_rows(shared / "data" / "kodcode_leetcode.jsonl")[:: 1 if SLOW else 4]
    fenced = [row | {"response": f"Here:\n\n```python\n{row['solution']}\n```\n"}
              for row in rows]
    outcomes = add_outcomes(fenced, get_task("kodcode"), unsafe=True)
    assert {row["outcome"] for row in outcomes} == {"All tests passed."}
    trials = [trial for row in rows for trial in row["trials"].values()]
    assert len(trials) == 3 * len(rows) >= 24
    for trial in trials:
        code = trial["solution_code"]
        assert code_of(code) == code and code_of(f"~~~py\n{code}\n~~~") == code + "\n"
        assert (run_python(code, trial["test_code"]).passed
                == (trial["test_result"] == "Pass"))
