"""The benchmarks: verdicts on programs, evalplus' rules checked with numpy, and ARC scores.

Tests run code with unsafe=True: the programs are known to be harmless, and some machines have
no namespaces.
"""

import gzip
import json
import math
from itertools import combinations, cycle, product

import numpy as np
import pytest
import torch
from data import InputError
from helpers import SLOW
from measures import benchmarks
from measures.benchmarks import (arc_scores, choice_logprobs, code_prompt, code_scores, execute,
                                 extract_code, read_arc, read_problems)
from model import add_lora, use_lora

HEAD = ("import math\nfrom typing import List\n\n\ndef half(x):\n    return x // 2\n\n\n"
        'def grow(x: int) -> int:\n    """One more."""\n')
HUMANEVAL = {"task_id": "HumanEval/0", "prompt": HEAD, "entry_point": "grow",
             "canonical_solution": "    return x + 1\n",
             "test": "def check(candidate):\n    assert candidate(1) == 2\n"
                     "    assert half(4) == 2\n"}
PLUS = {key: value for key, value in HUMANEVAL.items() if key != "test"} | {
    "base_input": [[1], [2]], "plus_input": [[-1], [10**30]], "atol": 0, "contract": ""}
FULL = HUMANEVAL | PLUS  # HumanEvalPlus has a `test` and inputs
MBPP = {"task_id": 2, "text": "Add one.",
        "code": "import math\r\ndef grow(x):\r\n  return x + 1",
        "test_setup_code": "y = 1",
        "test_list": ["assert set([grow(y)]) == {2}", "assert grow(2) == 3"]}
SANITIZED = {"task_id": 3, "prompt": "Add one.", "code": "def grow(x):\n  return x + 1",
             "test_imports": ["import math"], "test_list": ["assert math.isclose(grow(1), 2)"]}
SHARED = {"task_id": "Mbpp/2", "entry_point": "similar_elements",
          "prompt": '"""\nShared elements.\nassert similar_elements("a", "ab") == "a"\n"""\n',
          "canonical_solution": "\ndef similar_elements(a, b):\n"
                                "  return tuple(set(a) & set(b))\n",
          "base_input": [[[3, 4], [4, 5]]], "plus_input": [[[], []], [[1, "a"], ["a", 1, 2]]],
          "atol": 0}


def write(path, *rows, array=False, zipped=False):
    text = json.dumps(rows) if array else "\n\n".join(map(json.dumps, rows)) + "\n"
    path.write_bytes(gzip.compress(text.encode()) if zipped else text.encode())
    return path


def problem(tmp_path, row=HUMANEVAL, **changes):
    return read_problems(write(tmp_path / "one.jsonl", row | changes))[0]


def run(problems, *programs, **options):
    """Result rows of one program per problem, or of several programs for a single problem."""
    if len(problems) == 1:
        problems = problems * len(programs)
    return execute(problems, programs, unsafe=True, **options)


# ── Files

EMPTY = SHARED | {"plus_input": {}}                      # MBPP+ v0.2.0 has such a row


@pytest.mark.parametrize("row", [HUMANEVAL, PLUS, FULL, MBPP, SANITIZED, SHARED, EMPTY])
@pytest.mark.parametrize("zipped", [False, True])
def test_every_schema_is_recognised_and_its_solution_passes(row, zipped, tmp_path):
    path_of_rows = tmp_path / ("rows.jsonl.gz" if zipped else "rows.jsonl")
    [task] = read_problems(write(path_of_rows, row, array=row is SANITIZED, zipped=zipped))
    assert task.task_id == str(row["task_id"]) or task.task_id == f"Mbpp/{row['task_id']}"
    assert task.entry_point == row.get("entry_point", "grow")
    assert (task.inputs is None) == (row not in (PLUS, FULL, SHARED, EMPTY))
    wrong = task.solution.replace("x + 1", "x + 2").replace("&", "|")
    right, *failures = run([task], task.solution, "", wrong)
    assert right["base"] and right["plus"] in (True, None) and right["status"] == "passed"
    assert not any(result["base"] or result["plus"] for result in failures)
    assert [result["status"] for result in failures] == ["error", "failed"]


@pytest.mark.parametrize("rows, message", [
    *(([{key: value for key, value in row.items() if key != name}], f"row 1: .*{name}")
      for row, name in ((HUMANEVAL, "test"), (PLUS, "atol"), (FULL, "base_input"),
                        (MBPP, "test_list"), (SANITIZED, "prompt"))),
    ([HUMANEVAL, FULL], "row 2: .*'plus_input'"), ([FULL, HUMANEVAL], "row 2: .*'plus_input'"),
    ([MBPP, MBPP | {"plus_input": [[1]]}], r"row 2: .*\+ tests"),
    ([SANITIZED, SANITIZED | {"test": "assertion(grow(1), 2)"}], r"row 2: .*\+ tests"),
    ([MBPP | {"test_list": ["assert other(1)"]}], "row 1: .*IndexError"),
    ([MBPP | {"test_list": ["assert grow(1"]}], "row 1: .*SyntaxError"),
    ([SHARED | {"base_input": [[1, 2]]}], "row 1: .*TypeError"),
    ([SHARED | {"base_input": []}], "row 1: .*which every program would pass")])
def test_the_error_of_an_invalid_row_names_the_field(rows, message, tmp_path):
    with pytest.raises(InputError, match=f"bad.jsonl, {message}"):
        read_problems(write(tmp_path / "bad.jsonl", *rows))


@pytest.mark.parametrize("task, args, expected", [
    (2, [[1, 2], [3]], [(1, 2), (3,)]), (63, [[[1, 2], [3, 4]]], [[(1, 2), (3, 4)]]),
    (75, [[[1, 2]], 3], [[(1, 2)], 3]), (106, [[1], [2, 3]], [[1], (2, 3)]),
    (250, [[1, 2], 3], [(1, 2), 3]), (307, [[1, []], 2, 3], [(1, []), 2, 3]),
    (259, [[[1, 2]], [[3, 4]]], [((1, 2),), ((3, 4),)]),
    (278, [[1, [2, 3], 4]], [(1, (2, 3), 4)]),
    (115, [[[1, 2], []]], [[{1, 2}, {}]]), (124, ["1", "2j"], [1.0, 2j]),
    (252, ["3+4j"], [3 + 4j]), (722, [{"a": [1, 2]}, 3], [{"a": (1, 2)}, 3]),
    (580, [[1, [2, [3]]]], [(1, (2, (3,)))]), (3, [[1]], [[1]])])
def test_arguments_without_a_json_type_are_restored(task, args, expected):
    assert repr(benchmarks._restored(f"Mbpp/{task}", args)) == repr(expected)
    assert benchmarks._restored(f"HumanEval/{task}", args) == args


# ── Prompts and answers

@pytest.mark.parametrize("row, included, excluded", [
    (HUMANEVAL, [HEAD, "Complete"], "return x + 1"),
    (MBPP, ["Add one.", *MBPP["test_list"]], MBPP["code"]),
    (SANITIZED, ["Add one.", *SANITIZED["test_list"]], SANITIZED["code"]),
    (SHARED, ['Shared elements.\nassert similar_elements("a", "ab") == "a"\n'], '"""')])
def test_prompts_show_the_signature_or_the_asserts(row, included, excluded, tmp_path):
    prompt = code_prompt(problem(tmp_path, row))
    assert all(text in prompt for text in included) and excluded not in prompt


RIGHT = "def grow(x):\n    y = 1\n    return x + y\n"


@pytest.mark.parametrize("response, included, excluded", [
    (f"Sure!\n```python\n{RIGHT}```\nThis adds one.", "", "Sure"),
    (f"```python\n{RIGHT}\n\ndef other(x):\n    '''never", "", "other"),      # cut off
    (f"```python\ngrow(1)\n```\nno:\n```python\n{RIGHT}```\n"
     "```python\ndef grow(x):\n    return 0\n```", "", "return 0"),
    ("1. Do it:\n   ```python\n   def grow(x):\n       return x + 1\n   ```", "", "1."),
    ("```python\nONE = 1\ndef more(x):\n    return x + ONE\n```\nand\n"
     "```python\ndef grow(x):\n    return more(x)\n```", "ONE = 1", "and"),
    (f"```python\nimport os, sys\nfrom __future__ import annotations\n{RIGHT}"
     "assert grow(1) == 7\nprint(grow(1))\n"
     "n = int(input())\nif __name__ == '__main__':\n    grow(n)\n```", "annotations", "input"),
    (RIGHT, "", "#"), (f"Here it is:\n\n{RIGHT}\nIt adds one, you see.", "", "see"),
    (f"import math\nONE = 1\n\n{RIGHT.replace('+ y', '+ ONE')}", "ONE = 1", "y)"),
    ("```python\nimport os\nprint(1)\ndef grow(x: List[int]):\n    return half(2 * x) + 1\n```",
     "import List", "print"),                          # the prompt imports List
    ("grow = lambda x: x + 1", "lambda", "def grow"),
    ("```python\nimport functools as f\n@f.lru_cache\ndef grow(x):\n    return x + 1\n```",
     "lru_cache", "#"),
    ("```python\nt = [0] * 9\nfor i in range(8):\n    t[i] = i + 1\n"
     "def grow(x):\n    return t[x]\n```", "range", "#"),
    ("```python\ntry:\n    from lost import more\nexcept ImportError:\n"
     "    more = lambda x: x + 1\ngrow = more\n```", "lost", "#"),
    (f"<think>\n```python\ndef grow(x):\n    return 0\n```\n</think>\n```python\n{RIGHT}```",
     "", "return 0"),
    ("```\nclass A:\n    def f(self, x):\n        return x + 1\n"
     "def grow(x):\n    return A().f(x)\n```", "A", "#"),
])
def test_the_function_and_only_what_it_needs_are_extracted(response, included, excluded,
                                                           tmp_path):
    code = extract_code(response, problem(tmp_path))
    names = {}
    exec(code, names)
    assert ([names["grow"](x) for x in (1, 5)] == [2, 6]
            and included in code and excluded not in code), code


@pytest.mark.parametrize("response", [
    "", "I cannot do that.", "```\n```", "def grow(x", "\0", "(" * 5000, "grow " * 5000,
    "```python\ndef other(x):\n    return x + 1\n```", "```python\nprint('grow')\n```",
    "```python\nreturn\n```"])
def test_an_answer_without_the_function_is_an_empty_program(response, tmp_path):
    assert extract_code(response, problem(tmp_path)) == ""


def test_names_in_the_asserts_of_mbpp_are_kept(tmp_path):
    task = problem(tmp_path, MBPP, test_list=["assert grow(Box(1)) == 2"])
    code = extract_code("```python\nclass Box(int): pass\nclass Bag: pass\ndef grow(x):\n"
                        "    return x + 1\n```", task)
    assert "Box" in code and "Bag" not in code and run([task], code)[0]["base"]


# ── evalplus' comparison of outputs

def agrees(out, expected, atol=0.0, task="f", args=()):
    try:
        benchmarks._compare(task, lambda *_: out, lambda *_: expected, [args], [args], atol)
        return True
    except (AssertionError, TypeError):
        return False


def by_numpy(out, expected, atol):
    """Equality, or numpy.allclose of outputs with the same type and length."""
    if out == expected:
        return True
    items = expected if isinstance(expected, (list, tuple)) else [expected]
    if items and all(isinstance(item, float) for item in items):
        atol = atol or 1e-6
    try:
        return bool(atol and type(out) is type(expected) and np.shape(out) == np.shape(expected)
                    and np.allclose(out, expected, rtol=1e-7, atol=atol))
    except TypeError:
        return False


def test_outputs_agree_where_numpy_says_so():
    """Compares all pairs of the values, some of which are close to each other."""
    numbers = [0, 1, True, 2.0, 2.0 + 5e-7, 2.0 + 3e-6, 1e9, 1e9 + 50, 1e9 + 200, -1e9,
               -1e9 - 50, math.inf, -math.inf, math.nan]
    lists = [[], *([x, *tail] for x in numbers for tail in ([], [2.0], [2.0 + 5e-7]))]
    values = [*numbers, None, "a", "b", *lists, *map(tuple, lists)]
    for out, expected, atol in product(values, values, (0, 1e-6, 1e-4)):
        assert agrees(out, expected, atol) == by_numpy(out, expected, atol), (out, expected)


@pytest.mark.parametrize("task, args, expected, right, wrong", [
    ("find_zero", ([-6, 1, 1],), None, [2.0, -3.0, 2.00001], [1.0, 0.0]),
    ("are_equivalent", (1, 2), True, [True, False], []), ("sum_div", (6,), 6, [6, 0], [5]),
    ("surface_Area", (3, 4), 33, [33, 35], [34]),
    ("digit_distance_nums", (1, 234), 3, [3, 8], [4]),
    ("Diff", ([1], [2]), [1, 2], [[2, 1], (1, 2)], [[1]]),
    ("f", ([1], [2]), [1, 2], [[1, 2]], [[2, 1], (1, 2)]),
    ("check_str", ("a",), "match", [object(), True, "x"], [None, False]),
    ("check_str", ("a",), None, [None, False], [1, True]),
])
def test_tasks_with_more_than_one_right_output(task, args, expected, right, wrong):
    atol = 1e-4 if task == "find_zero" else 0
    assert all(agrees(output, expected, atol, task, args) for output in right)
    assert not any(agrees(output, expected, atol, task, args) for output in wrong)


def test_programs_cannot_pass_by_changing_inputs_or_reading_frames(tmp_path):
    """Only a program whose output overrides == passes without being right."""
    task = problem(tmp_path, PLUS, base_input=[[[3, 1]], [[2, 2]]], plus_input=[],
                   canonical_solution="    return sorted(x)\n")
    programs = {
        "def grow(x):\n    x.sort()\n    y = list(x)\n    x.clear()\n    return y": True,
        "def grow(x):\n    x.clear()\n    return []": False,
        "import sys\ndef grow(x):\n    return sys._getframe(1).f_locals.get('expected')": False,
        "def grow(x, calls=[]):\n    calls.append(1)\n"
        "    return sorted(x) if len(calls) < 3 else 1 / 0": True,
        "class Liar(list):\n    def __eq__(self, other): return True\n"
        "def grow(x): return Liar()": True,
        "import marshal\nmarshal.loads = lambda data: []\ndef grow(x): return 0": False}
    assert [row["base"] for row in run([task], *programs)] == [*programs.values()]
    root = problem(tmp_path, PLUS, entry_point="find_zero", base_input=[[[-6, 1, 1]]],
                   prompt='def find_zero(xs):\n    """A root."""\n', plus_input=[], atol=1e-4,
                   canonical_solution="    return 2.0\n")
    power = ("class Liar(float):\n    def __pow__(self, power): return 0.0\n"
             "def find_zero(xs): return Liar(1)")
    assert [row["base"] for row in run([root], root.solution, power)] == [True, False]


# ── Execution and pass@k

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
    for k, (key, name) in product((1, 2, 3), (("base", "pass"), ("plus", "plus pass"))):
        chance = np.mean([*map(any, combinations([row[key] for row in rows[:4]], k))])
        scores = [row[f"{name}@{k}"] for row in code_scores(rows, ks=(1, k))]
        assert scores == pytest.approx([chance, chance], abs=1e-12)
    with pytest.raises(InputError, match="pass@5"):
        code_scores(rows, ks=(5,))


@pytest.mark.parametrize("name, count, step", [
    ("HumanEval.jsonl.gz", 164, 3), ("HumanEvalPlus-Mini-v0.1.10.jsonl.gz", 164, 4),
    ("mbpp_first50.jsonl", 50, 1)])
# Table 3
def test_published_solutions_pass_and_empty_bodies_do_not(name, count, step, shared):
    problems = read_problems(shared / "data" / name)
    assert len(problems) == count
    sample = problems[:: step if SLOW else 4 * step]
    forms = ["So:\n```python\n{}\n```\n", "```python\n{}", "Here:\n\n{}\nThis is why it works."]
    answers = [form.replace("{}", p.solution) for form, p in zip(cycle(forms), sample)]
    rows = run(sample, *map(extract_code, answers, sample))
    assert [row for row in rows if not row["base"] or row["plus"] is False] == []
    assert {row["plus"] for row in rows} == {True if "Plus" in name else None}
    sample = problems[:: 8 if SLOW else 32]
    rows = run(sample, *(p.head + "    pass\n" if p.head else f"def {p.entry_point}(*_): pass"
                         for p in sample))
    assert len(rows) == len(sample) and not any(row["base"] or row["plus"] for row in rows)


def test_plus_finds_the_mistakes_in_humanevals_own_solutions(shared):
    """evalplus reports mistakes in five solutions that pass HumanEval's tests."""
    data = shared / "data"
    solutions = {p.task_id: p.solution for p in read_problems(data / "HumanEval.jsonl.gz")}
    wrong = [f"HumanEval/{number}" for number in (111, 122, 124, 132, 150)]
    path = data / "HumanEvalPlus-Mini-v0.1.10.jsonl.gz"
    problems = [problem for problem in read_problems(path) if problem.task_id in wrong]
    rows = run(problems, *(solutions[task] for task in wrong))
    assert [(row["id"], row["base"], row["plus"], row["status"]) for row in rows] == [
        (task, True, False, "failed") for task in wrong]


# ── ARC

def arc_row(key="2", choices=("red", "blue", "a dark green"), labels="12345", **fields):
    return {"id": "q", "answerKey": key, "question": {
        "stem": "Which colour is it?", "choices": [
            {"text": text, "label": label} for text, label in zip(choices, labels)]}} | fields


@pytest.mark.parametrize("row, message", [
    (arc_row("4"), "row 2: .*'4' is not in list"),
    (arc_row(question={"stem": "s"}), "row 2: .*KeyError.'choices'"),
    (arc_row("A", ["", "b"], "AB"), "row 2: .*a choice without a text"),
    (arc_row(question="s"), "row 2: .*TypeError"),
    (HUMANEVAL, "line 3: field 'id' is missing")])    # `write` puts a blank line between rows
def test_the_error_of_an_invalid_arc_row_names_it(row, message, tmp_path):
    with pytest.raises(InputError, match=f"bad, {message}"):
        read_arc(write(tmp_path / "bad", arc_row(), row))


def plain_logprob(model, tokenizer, question, choice):
    """Σ log p of the choice's tokens, from an unbatched forward pass.

    A text longer than the context is cut at the start, like in lm-evaluation-harness.
    """
    encode = lambda text: tokenizer(text, add_special_tokens=False).input_ids
    bos = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    start = len(bos + encode(f"Question: {question}\nAnswer:"))
    ids = bos + encode(f"Question: {question}\nAnswer: {choice}")
    size = len(ids) - start
    ids = torch.tensor([ids[-model.config.max_position_embeddings:]])
    with torch.no_grad():
        logprobs = model(ids).logits[0, :-1].double().log_softmax(-1)
    return logprobs.gather(1, ids[0, 1:, None])[-size:].sum().item()


def assert_plain(model, tokenizer, rows, adapter=None):
    """Check the log-likelihoods and scores of a batch against unbatched forward passes."""
    with use_lora(model, adapter):
        plain = [[plain_logprob(model, tokenizer, row["question"], choice)
                  for choice in row["choices"]] for row in rows]
    logprobs = choice_logprobs(model, tokenizer, rows, adapter, batch_size=3)
    for row_logprobs, expected in zip(logprobs, plain, strict=True):
        assert row_logprobs == pytest.approx(expected, abs=1e-4)
    for row, score, values in zip(rows, arc_scores(rows, logprobs), plain):
        normed = np.array(values) / [len(choice) for choice in row["choices"]]
        assert score == {"id": row["id"], "accuracy": float(np.argmax(values) == row["answer"]),
                         "accuracy_norm": float(np.argmax(normed) == row["answer"])}
    return np.concatenate(plain)


def test_log_likelihoods_with_and_without_an_adapter(toy_model, tmp_path):
    """The rows have three or five choices; one question is longer than the context."""
    five = arc_row("E", ["x", "yes", "no it is", "blue", "green"], "ABCDE")
    long = arc_row(question=arc_row()["question"] | {"stem": "why? " * 600})
    rows = read_arc(write(tmp_path / "a.gz", arc_row(), five, long, zipped=True))
    question = {"id": "q", "question": "Which colour is it?"}
    assert rows[:2] == [
        question | {"choices": ["red", "blue", "a dark green"], "answer": 1},
        question | {"choices": ["x", "yes", "no it is", "blue", "green"], "answer": 4}]
    for tensor in add_lora(toy_model[0], "trained", r=4):
        torch.nn.init.normal_(tensor, std=0.3)
    base, trained = (assert_plain(*toy_model, rows, adapter) for adapter in (None, "trained"))
    assert np.abs(base - trained).max() > 0.1


def test_log_likelihoods_of_real_rows_on_a_real_model(stories, shared):  # Table 4
    rows = read_arc(shared / "data" / "arc_challenge_dev.jsonl")
    assert len(rows) == 294 and {len(row["choices"]) for row in rows} == {3, 4}
    assert_plain(*stories, [row for row in rows if len(row["choices"]) == 3][:3] + rows[:7])


def test_the_norm_is_per_character_and_ties_go_to_the_first_choice():
    rows = [{"id": "q", "choices": ["four", "a", "b"], "answer": answer} for answer in range(3)]
    scores = arc_scores(rows, 3 * [[-4.0, -2.0, -2.0]])
    assert [(row["accuracy"], row["accuracy_norm"]) for row in scores] == [
        (0, 1), (1, 0), (0, 0)]
    with pytest.raises(InputError, match="ARC row q: .* not finite"):
        arc_scores(rows, 3 * [[-1.0, math.nan, -1.0]])
