"""The benchmarks: verdicts on programs, evalplus' tolerance checked with numpy.

Tests run code with unsafe=True: the programs are known to be harmless, and some machines have
no namespaces.
"""

import json
import math
from dataclasses import replace
from itertools import cycle
from textwrap import indent

import pytest
from data import InputError, read_rows
from helpers import SLOW
from measures import benchmarks
from measures.benchmarks import (Problem, code_prompt, code_scores, execute, extract_code,
                                 read_problems)

HEAD = ("import math\nfrom typing import List\n\n\ndef half(x):\n    return x // 2\n\n\n"
        'def grow(x: int) -> int:\n    """One more."""\n')
HUMANEVAL = {"task_id": "HumanEval/0", "prompt": HEAD, "entry_point": "grow",
             "canonical_solution": "    return x + 1\n",
             "test": "def check(candidate):\n    assert candidate(1) == 2\n"
                     "    assert half(4) == 2\n"}
PLUS = {key: value for key, value in HUMANEVAL.items() if key != "test"} | {
    "base_input": [[1], [2]], "plus_input": [[-1], [10**30]], "atol": 0, "contract": ""}
MBPP = {"task_id": 2, "text": "Add one.",
        "code": "import math\r\ndef grow(x):\r\n  return x + 1",
        "test_setup_code": "y = 1",
        "test_list": ["assert set([grow(y)]) == {2}", "assert grow(2) == 3"]}
SANITIZED = {"task_id": 3, "prompt": "Add one.", "code": "def grow(x):\n  return x + 1",
             "test_imports": ["import math"], "test_list": ["assert math.isclose(grow(1), 2)"]}
HUB = SANITIZED | {"task_id": 4, "test": "import numpy as np\ninputs = [[-1], [5]]\n"
                   "for args, result in zip(inputs, [0, 6]):\n"
                   "    assert np.allclose(grow(*args), result)\n"}
ANGLE = {"task_id": "Mbpp/124", "entry_point": "grow", "prompt": '"""\nOne.\n"""\n',
         "canonical_solution": "\ndef grow(x, y):\n  return (x + y).imag + 1\n",
         "base_input": [["1", "2j"]], "plus_input": [["(3-1j)", "0"]], "atol": 1e-4}
MBPP_PLUS = {"task_id": "Mbpp/720", "entry_point": "grow", "prompt": '"""\nOne.\n"""\n',
             "canonical_solution": "\ndef grow(x, y):\n  return x + (y + 1,)\n",
             "base_input": [[[3, 4], 5]], "plus_input": [[[[1]], 2]], "atol": 0}


def write(path, *rows):
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def problem(tmp_path, row=HUMANEVAL, **changes):
    return read_problems(write(tmp_path / "one.jsonl", row | changes))[0]


def run(problems, *programs, **options):
    """Result rows of one program per problem, or of several programs for a single problem."""
    if len(problems) == 1:
        problems = problems * len(programs)
    return execute(problems, programs, unsafe=True, **options)


# ── Files

@pytest.mark.parametrize("row", [HUMANEVAL, PLUS, MBPP, SANITIZED, HUB, MBPP_PLUS, ANGLE])
def test_every_schema_is_recognised_and_its_solution_passes(row, tmp_path):
    task = problem(tmp_path, row)
    assert task.task_id == str(row["task_id"]) or task.task_id == f"Mbpp/{row['task_id']}"
    assert (task.plus is None) == (row not in (PLUS, HUB, MBPP_PLUS, ANGLE))
    prompt = code_prompt(task)
    assert task.head in prompt and all(text in prompt for text in row.get("test_list", []))
    right, *failures = run([task], task.solution, "", task.solution.replace("+ 1", "+ 2"))
    assert right["base"] and right["plus"] in (True, None) and right["status"] == "passed"
    assert not any(result["base"] or result["plus"] for result in failures)
    assert [result["status"] for result in failures] == ["error", "failed"]


@pytest.mark.parametrize("rows, message", [
    *(([{key: value for key, value in row.items() if key != name}], f"row 1: .*{name}")
      for row, name in ((HUMANEVAL, "test"), (PLUS, "atol"), (PLUS, "base_input"),
                        (MBPP, "test_list"), (SANITIZED, "prompt"))),
    ([MBPP, PLUS | {"base_input": 1}], "row 2: .*TypeError.*; use a published file")])
def test_the_error_of_an_invalid_row_names_the_field(rows, message, tmp_path):
    with pytest.raises(InputError, match=f"bad.jsonl, {message}"):
        read_problems(write(tmp_path / "bad.jsonl", *rows))


# ── Answers and outputs

@pytest.mark.parametrize("response", [
    "Sure!\n```python\ndef grow(x):\n    return x + 1\n```\nThis adds one.",
    "```python\nONE = 1\ndef more(x):\n    return x + ONE\n```\nand\n"
    "```python\ndef grow(x):\n    return more(x)\n```", "grow = lambda x: x + 1",
    "```python\ndef grow(x: List[int]):\n    return half(2 * x) + 1\n```",  # names of the head
    "<think>\n```python\ndef grow(x):\n    return 0\n```\n</think>\n```python\n"
    "def grow(x):\n    return x + 1\n```"])
def test_the_program_is_in_fenced_blocks_and_may_use_names_of_the_prompt(response, tmp_path):
    names = {}
    exec(extract_code(response, problem(tmp_path)), names)
    assert [names["grow"](x) for x in (1, 5)] == [2, 6]


SQUARE = "def f(n):\n    return n * n\n"
TESTS = "assert f(3) == 9\nassert set([f(2)]) == {4}"
HIDDEN = Problem("t", 'def f(n):\n    """n²"""\n', 'def f(n):\n    """n²"""\n', "", "")
OPEN = Problem("t", "Square it.", "", "", TESTS)


@pytest.mark.parametrize("answer", [
    f"{SQUARE}~~~", f"1. So:\n{indent(f'```py{chr(10)}{SQUARE.rstrip()}```', '   ')}",
    f"Sure (I'll square:\n\nimport math\nand\n{SQUARE}It's O(1).", f"<code>\n{SQUARE}</code>",
    f"[PYTHON]\n{SQUARE}[/PYTHON]\n[TESTS]\nassert f(3) == 6\n[/TESTS]", f"\ufeff{SQUARE}",
    f"```python\ndef f(n):\n    retrun 0\n```\nMended:\n```python\n{SQUARE}```",
    f"```\n{SQUARE}```\nprints\n```\nthree (3)\n```",
    f"{SQUARE}\nfor n in (1, 2): assert f(n) == 0",
    f"```python\nn = int(input())\n{SQUARE}print(f(n))\n```", f"{SQUARE}\nassert f(",
    f"def check(n): raise ValueError(f(n))\n{SQUARE}check(2)\nNote: this\nreturn",
    f"import unittest\n{SQUARE}class T(unittest.TestCase):\n    x = f(1)\nunittest.main()",
    f"```python\nimport sys\n{SQUARE}if __name__ == '__main__':\n    sys.exit(f(2))\n```",
    "def f(n):\n    return TWICE * g(n)\ndef g(n):\n    return n * n / 2\nTWICE = 2",
    "memo = [0] * 99\nfor i in range(99): memo[i] += i * i\ndef f(n): return memo[n]\nmemo[0]",
    "try: from math import prod\nexcept ImportError: prod = 1\nf = lambda n: prod([n, n])",
    "from __future__ import annotations\nfrom math import *\ndef f(n): return floor(n * n)",
    f"{SQUARE}\nUse it:\n```python\nprint(f(int(input())))\n```",
    "def f(n): return g(n)\ndef g(n): return n * n\nassert g(2) == 5",
    "m = {}\ndef f(n): return m.get(n, n * n)\nm[3] = input()\nif __name__[0]: m[3] = 0",
    "import sys\nsys.setrecursionlimit(5000)\ndef f(n): return n * n + deep(2000)\n"
    "def deep(n): return n and deep(n - 1)",
    f"{SQUARE}```\nUse it:\n```python\nprint(f(input()))\n```"])
@pytest.mark.parametrize("task", [HIDDEN, OPEN])
def test_of_an_answer_only_what_the_function_needs_is_run(answer, task):
    names = {"__name__": "solution"}
    exec(extract_code(answer, task), names)
    assert names["f"](3) == 9 and names["f"](7) == 49


@pytest.mark.parametrize("body", [
    "    return n * n", "return n * n", "x = n\n    return x * n", "  x = n\n  return x * n",
    "```python\n    return n * n\n```\nIt squares.", "    return n * n\n\nIt squares."])
@pytest.mark.parametrize("helper", ["", "def g(n):\n    return n\n\n"])    # HumanEval/32
def test_an_answer_may_be_the_body_of_the_function(body, helper):
    names = {}
    exec(extract_code(body, replace(HIDDEN, head=helper + HIDDEN.head)), names)
    assert names["f"](3) == 9


@pytest.mark.parametrize("answer", [
    "I cannot.", "def g(n):\n    return n * n", f"{SQUARE}def f(n):\n    return 0",
    "def f(n):\n    print 'x'\n    return n * n", "x" + "(" * 999, "f\0"])
def test_no_answer_is_mended(answer):
    """An error inside of the function stays, and the last definition counts."""
    names = {}
    with pytest.raises((AssertionError, NameError, SyntaxError, TypeError, ValueError)):
        exec(extract_code(answer, HIDDEN), names)
        assert names["f"](3) == 9


def test_public_answers(shared):
    for row in read_rows(shared / "data" / "public_cases" / "code_answers.jsonl"):
        names = {}
        exec(extract_code(row["answer"], Problem("", "", row["head"], "", "")), names)
        assert eval(row["right"], names), row["case"]


def agrees(out, expected, atol=0.0, name="f", args=()):
    try:
        benchmarks._check_outputs(name, lambda *_: out, lambda *_: expected, [args], [args],
                                  atol)
        return True
    except (AssertionError, TypeError):
        return False


@pytest.mark.parametrize("out, expected, atol, agree", [
    (2.0 + 5e-7, 2.0, 0, True), (2.0 + 3e-6, 2.0, 0, False), (2.0 + 3e-6, 2.0, 1e-4, True),
    (1e9 + 50, 1e9, 0, True), (1e9 + 200, 1e9, 0, False), (2, 2.0, 0, True),
    (1, 1 + 1e-9, 0, False), ([1.0, 2.0 + 5e-7], [1.0, 2.0], 0, True),
    ([1.0, 2.0 + 5e-7], (1.0, 2.0), 0, False), ([1.0], [1.0 + 1e-9] * 2, 0, False),
    ([1, 2.0 + 5e-7], [1, 2.0], 0, False), ("a", "b", 1e-4, False),
    (math.nan, math.nan, 0, False), (math.inf, math.inf, 0, True)])
def test_outputs_are_equal_or_floats_within_the_tolerance(out, expected, atol, agree):
    assert agrees(out, expected, atol) == agree


@pytest.mark.parametrize("name, args, expected, right, wrong", [
    ("find_zero", ([-6, 1, 1],), None, [2.0, -3.0, 2.00001], [1.0, 0.0]),
    ("check_str", ("a",), "match", [object(), True, "x"], [None, False]),
    ("check_str", ("a",), None, [None, False], [1, True])])
def test_tasks_with_more_than_one_right_output(name, args, expected, right, wrong):
    assert all(agrees(output, expected, 1e-4, name, args) for output in right)
    assert not any(agrees(output, expected, 1e-4, name, args) for output in wrong)


def test_programs_cannot_pass_by_changing_inputs(tmp_path):
    task = problem(tmp_path, PLUS, base_input=[[[3, 1]], [[2, 2]]], plus_input=[],
                   canonical_solution="    return sorted(x)\n")
    rows = run([task], "def grow(x):\n    x.sort()\n    return [x.pop(0), x.pop()]",
               "def grow(x):\n    x.clear()\n    return []")
    assert [row["base"] for row in rows] == [True, False]


# ── Execution and pass@1

def test_samples_keep_their_order_and_plus_counts_only_with_base(tmp_path):  # Table 3
    problems = read_problems(write(tmp_path / "p", PLUS, PLUS | {"task_id": "HumanEval/1"}))
    bodies = ("return x + 1", "return abs(x) + 1", "return x + (x < 0 or x > 9)",
              "while True: pass")          # right, passes base only, plus only, neither
    programs = [f"def grow(x):\n    {body}" for body in bodies]
    rows = run([task for task in problems for _ in programs], *2 * programs, workers=4,
               timeout=1.0)
    assert [(row["id"], row["base"], row["plus"], row["status"]) for row in rows] == [
        (f"HumanEval/{i}", *result) for i in (0, 1) for result in (
            (True, True, "passed"), (True, False, "failed"), (False, False, "failed"),
            (False, False, "timeout"))]
    assert "input 0: 2 instead of 0" in rows[1]["stderr"]
    assert code_scores(rows[:2]) == {"pass@1": [1, 1], "plus pass@1": [1, 0]}
    assert code_scores([rows[2] | {"plus": None}]) == {"pass@1": [0]}


@pytest.mark.parametrize("name, count, step", [
    ("HumanEval.jsonl.gz", 164, 3), ("HumanEvalPlus-Mini-v0.1.10.jsonl.gz", 164, 4),
    ("mbpp_first50.jsonl", 50, 1)])
# Table 3
def test_published_solutions_pass_and_empty_bodies_do_not(name, count, step, shared):
    problems = read_problems(shared / "data" / name)
    assert len(problems) == count
    sample = problems[:: step if SLOW else 4 * step]
    forms = ["So:\n```python\n{}\n```\n", "```python\n{}", "{}"]
    answers = [form.replace("{}", p.solution) for form, p in zip(cycle(forms), sample)]
    rows = run(sample, *map(extract_code, answers, sample))
    assert [row for row in rows if not row["base"] or row["plus"] is False] == []
    assert {row["plus"] for row in rows} == {True if "Plus" in name else None}
    sample = problems[:: 8 if SLOW else 32]
    rows = run(sample, *(p.head + "    pass\n" for p in sample))
    assert len(rows) == len(sample) and not any(row["base"] or row["plus"] for row in rows)
