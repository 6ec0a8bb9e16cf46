"""The sandbox: right code passes, wrong code does not, and nothing that code does passes it or outlives it."""

import functools
import json
import os
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from measures import sandbox
from measures.sandbox import KEPT

run_python = functools.partial(sandbox.run_python, unsafe=True)    # with the layers that this machine has

INCREMENT = "def f(x):\n    return x + 1\n"


def status(code, tests="assert True", **limits):
    result = run_python(code, tests, **limits)
    assert result.passed == (result.status == "passed")
    return result.status


def alive(folder: str, seconds: float = 5.0) -> list[str]:
    """The processes of runs whose directories lie in `folder` that have not ended after `seconds` (zombies have)."""
    end = time.monotonic() + seconds
    while (found := [path.parent.name for path in Path("/proc").glob("[0-9]*/environ") if folder in environment(path)]):
        if time.monotonic() > end:
            break
        time.sleep(0.01)
    return found


def environment(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8", "replace")
    except OSError:                                    # ended, or another user's
        return ""


# ── Right and wrong ────────────────────────────────────────────────────────────────────────────────────

@pytest.mark.parametrize("tests, expected", [
    ("assert f(1) == 2", "passed"),
    ("assert f(1) == 3", "failed"),
    ("from solution import f\nimport solution\nassert solution.f is f and f(1) == 2", "passed"),
    ("def check(candidate):\n    assert candidate(1) == 2\ncheck(f)", "passed"),
    ("def check(candidate):\n    assert candidate(1) == 2", "error"),                        # never called
    ("f(1)", "error"), ("", "error"), ("for x in []:\n    assert f(x)", "error"),
    ("assert f('1')", "error"), ("assert g(1)", "error"), ("assert f(1", "error"),
    ("assert f(1) == 2\nraise SystemExit(0)", "error"),
    ("def test_f():\n    assert f(1) == 2", "passed"),
    ("def test_f():\n    assert f(1) == 2\ndef test_g():\n    assert f(1) == 3", "failed"),
    ("def test_f():\n    f('1')", "error"),
    ("from solution import nothing\ndef test_f():\n    pass", "error"),
])
def test_the_status_says_what_the_tests_found(tests, expected):
    assert status(INCREMENT, tests) == expected


@pytest.mark.parametrize("code", ["def f(:", "import no_such_module", "1 / 0", "assert False", "x = '\ud800'", "\0"])
def test_code_that_cannot_be_loaded_is_an_error_with_its_reason(code):
    result = run_python(code, "assert True")
    assert (result.passed, result.status) == (False, "error") and "Error" in result.stderr


def test_the_traceback_names_the_line_of_the_tests_and_no_place_of_this_machine():
    code = "def f(x):\n    print('here')\n    return g(x)\ndef g(x):\n    return 1 / x"
    told = run_python(code, "assert f(0) == 2").stderr
    assert told.startswith("here\nTraceback (most recent call last):\n  File \"tests.py\", line 1, in <module>\n")
    assert "    assert f(0) == 2\n" in told and "    return 1 / x\n" in told and told.endswith("division by zero\n")
    assert "sandbox" not in told and tempfile.gettempdir() not in told


def test_tests_of_pytest_overwrite_no_name_of_the_code_and_plain_ones_share_its_namespace():
    code = "def help():\n    return 1\ndef f():\n    return help()"
    assert status(code, "def help():\n    return 2\ndef test_f():\n    assert f() == 1 and help() == 2") == "passed"
    assert status("def f():\n    return math.pi", "import math\nassert f() > 3") == "passed"


def test_any_text_is_code_and_any_bytes_are_output():
    assert status("s = 'é😀'\r\n", "assert s == 'é😀' and len(s) == 2") == "passed"
    assert status("x = 1", "assert '\ud800'") == "error"
    said = run_python("import os\nos.write(1, b'a\\xff\\xc3z')\nos.write(2, 'é'.encode())", "assert True")
    assert said.passed and said.stderr == "a\ufffd\ufffdzé"


# ── The part of pytest that there is, beside pytest itself ─────────────────────────────────────────────

@pytest.mark.parametrize("expected, rel, abs_, actual", [
    (1.0, None, None, 1 + 9e-7), (1.0, None, None, 1 + 2e-6), (10.0, 0.1, None, 11.05), (10.0, 0.1, None, 9.0),
    (0.0, None, None, 1e-13), (0.0, None, None, 1e-11), (100.0, None, 1e-3, 100.0005), (100.0, None, 1e-9, 100.00005),
    (1.0, 0.1, 0.5, 1.4), (float("inf"), None, None, 1.0), (float("inf"), None, None, float("inf")),
    (float("nan"), None, None, float("nan")), ([1.0, 2.0], None, None, [1.0, 2.0 + 1e-9]), ([1.0], None, None, [1.1]),
    ([1.0, 2.0], None, None, [1.0]), ((1.0, 2), None, None, (1.0, 2)), (3, None, None, 3)])
def test_approx_is_equal_where_pytest_says_so(expected, rel, abs_, actual):
    said = pytest.approx(expected, rel=rel, abs=abs_) == actual
    numbers = "from math import inf, nan\nimport pytest\n"
    tests = f"{numbers}ours = pytest.approx({expected!r}, rel={rel}, abs={abs_})\nassert ({actual!r} == ours) is {said}"
    assert run_python("", tests).passed


def test_raises_takes_the_named_exception_with_the_matching_words():
    body = ("import pytest\ndef test_f():\n    with pytest.raises({}) as caught:\n        int('x')\n"
            "    assert '{}' in str(caught.value)")
    assert status("", body.format("ValueError, match='invalid'", "literal")) == "passed"
    assert status("", body.format("(KeyError, ValueError)", "something else")) == "failed"
    assert status("", body.format("ValueError, match='valid$'", "literal")) == "failed"
    assert status("", body.format("KeyError", "literal")) == "error"
    nothing = "from pytest import raises\ndef test_f():\n    with raises(ValueError):\n        int('1')"
    result = run_python("", nothing)
    assert result.status == "failed" and "did not raise" in result.stderr and "contextlib" not in result.stderr


def test_parametrize_runs_every_case_of_every_decorator():
    tests = """import pytest
@pytest.mark.parametrize("x", [1, (2, 3)])
@pytest.mark.parametrize("y, z", [(4, 5), (6, 7)], ids=["a", "b"])
def test_f(x, y, z):
    print(x, y, z)
@pytest.mark.parametrize(["w"], [(1,), ("last",)])
def test_g(w):
    assert w != "last"
"""
    result = run_python("", tests)
    assert result.status == "failed"
    assert sorted(result.stderr.splitlines()[:4]) == ["(2, 3) 4 5", "(2, 3) 6 7", "1 4 5", "1 6 7"]


@pytest.mark.parametrize("tests, word", [
    ("import pytest\n@pytest.fixture\ndef x():\n    return 1\ndef test_f(x):\n    assert x", "'fixture'"),
    ("def test_f(capsys):\n    assert True", "'capsys'"),
    ("import pytest\n@pytest.mark.skip\ndef test_f():\n    pass", "'skip'"),
    ("from pytest import importorskip\ndef test_f():\n    pass", "'importorskip'"),
    ("import pytest\ndef test_f():\n    with pytest.raises(Exception):\n        pytest.warns(UserWarning)", "'warns'"),
    ("import pytest\ndef test_f():\n    pytest.raises(ValueError, int, 'x')", "positional"),
    ("class TestF:\n    def test_f(self):\n        assert True", "TestF"),
    ("import unittest as u\nclass Case(u.TestCase):\n    def test_f(self): pass\ndef test_g(): pass", "Case"),
    ("async def test_f():\n    assert False", "test_f"), ("def test_f():\n    yield\n    assert False", "test_f"),
    ("x = 1", "no test ran"), ("def f():\n    assert False", "no test ran")])
def test_what_cannot_be_run_here_is_an_error_that_says_so(tests, word):
    result = run_python("", tests)
    assert (result.passed, result.status) == (False, "error") and word in result.stderr


# ── What code does to get away ─────────────────────────────────────────────────────────────────────────

@pytest.mark.parametrize("code", [
    "quit()", "raise KeyboardInterrupt", "import os\nprint('passed')\nos._exit(0)",
    "import os\nos.closerange(3, 100)",
    "def f():\n    import os\n    os._exit(0)", "def f():\n    raise SystemExit(0)"])
def test_leaving_early_and_writing_everywhere_is_no_pass(code):
    assert status(code + "\n", "assert f() == 1" if "def f" in code else "assert True") in ("error", "killed")


def test_a_loop_ends_at_the_timeout_and_a_signal_is_told():
    result = run_python("print('begun')\nwhile True:\n    pass", "assert True", timeout=1)
    assert result.status == "timeout" and result.stderr == "begun\nstopped after 1 s\n"
    assert status("import time\ntime.sleep(60)", timeout=0.5) == "timeout"
    result = run_python("import os\nos.abort()", "assert True")
    assert result.status == "killed" and "-6" in result.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="memory is limited on Linux only")
@pytest.mark.parametrize("code, tests", [
    ("x = [0] * 10**10", ""), ("x = []\nwhile True:\n    x.append(bytearray(1000))", ""),
    ("def f():\n    return bytes(400 << 20)", "assert f()"), ("", "x = []\nwhile True: x.append(bytearray(1000))")])
def test_memory_has_a_bound(code, tests):
    assert status(code, tests, memory_mb=300) == "memory"
    assert status("x = bytes(400 << 20)", memory_mb=600) == "passed"


def test_endless_output_is_stopped_and_its_end_kept():
    result = run_python("print('x' * 100_000 + 'end')", "assert True")
    assert result.passed and result.stderr == f"[cut: the last {KEPT} characters]\n" + "x" * (KEPT - 4) + "end\n"
    result = run_python("while True:\n    print('x' * 100_000)", "assert True")
    assert result.status == "error" and "File too large" in result.stderr and len(result.stderr) < KEPT + 50
    assert status("open('large', 'wb').write(bytes(40 << 20))") == "error"


@pytest.mark.skipif(bool(sandbox.sandbox_layers()["namespaces"]), reason="without namespaces a session of its own can")
@pytest.mark.parametrize("end, expected", [("", "passed"), ("while True: pass", "timeout"), ("os._exit(0)", "error")])
def test_children_do_not_outlive_the_run(end, expected, tmp_path, monkeypatch):
    """One is forked, one is a program of its own; both hold the output open."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    code = ("import os, subprocess, time\nif os.fork() == 0:\n    time.sleep(600)\n    os._exit(0)\n"
            "subprocess.Popen(['sleep', '600'])\n" + end)
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(run_python, code, "assert True", timeout=2)
        found = 0
        while not run.done():
            found = max(found, len(alive(str(tmp_path), 0)))
    assert run.result().status == expected and not alive(str(tmp_path))
    assert found > 2 or expected != "timeout"          # so that the search finds what there is


def test_a_thread_that_never_ends_does_not_hold_up_a_pass():
    assert status("import threading, time\nthreading.Thread(target=time.sleep, args=(600,)).start()") == "passed"


def test_the_environment_is_empty_and_home_is_the_temporary_directory(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    code = "import json, os, sys\nprint(json.dumps([dict(os.environ), os.getcwd(), sys.path, sorted(os.listdir())]))"
    environment, directory, path, files = json.loads(run_python(code, "assert True").stderr)
    assert {"HOME", "TMPDIR"} <= set(environment) <= {"HOME", "TMPDIR", "OMP_NUM_THREADS", "LC_CTYPE"}
    assert directory == os.path.realpath(directory) and "/somewhere" not in path
    assert {"solution.py"} <= set(files) <= {"solution.py", "__pycache__"}


def test_standard_input_is_empty():
    result = run_python("import sys\nprint(repr(sys.stdin.read()))\nx = input()", "assert True")
    assert result.status == "error" and result.stderr.startswith("''\n") and "EOFError" in result.stderr


@pytest.mark.parametrize("end", ["", "1 / 0", "os._exit(0)", "while True:\n    open(str(time.time()), 'w').close()",
                                 "os.mkdir('closed')\nopen('closed/file', 'w').close()\nos.chmod('closed', 0)"])
def test_the_directory_is_removed_whatever_happens(end, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    result = run_python("import os, time\nprint(os.listdir())\n" + end, "assert True", timeout=1)
    assert "solution.py" in result.stderr and not list(tmp_path.iterdir())


def test_the_directory_is_removed_under_children_that_still_write(tmp_path, monkeypatch):
    """A killed process ends a moment later, and its last file may come after the first look into the directory."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    code = ("import os, time\nfor _ in range(3):\n    if os.fork() == 0:\n        for i in range(10**6):\n"
            "            open(f'{os.getpid()}-{i}', 'w').close()\ntime.sleep(0.05)")
    for _ in range(10):
        assert run_python(code, "assert True").passed and not list(tmp_path.iterdir())


# ── Real rows ──────────────────────────────────────────────────────────────────────────────────────────

def statuses(pairs: list) -> list[str]:
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda pair: run_python(*pair).status, pairs))


def test_kodcode_solutions_pass_and_trials_end_as_recorded(shared):
    rows = [json.loads(line) for line in (shared / "data" / "kodcode_leetcode.jsonl").open()]
    assert statuses([(row["solution"], row["test_code"]) for row in rows]) == ["passed"] * 29
    trials = [trial for row in rows for trial in row["trials"].values()]
    found = statuses([(trial["solution_code"], trial["test_code"]) for trial in trials])
    assert len(trials) == 87
    assert [status == "passed" for status in found] == [trial["test_result"] == "Pass" for trial in trials]
