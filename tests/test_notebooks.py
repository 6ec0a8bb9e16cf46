"""Each notebook gives its stored outputs in a new kernel and defines no algorithm.

An exercise has four cells: a question, a cell with a blank, its check, and a solution.
"""

import ast
import contextlib
import io
import re
import sys
from pathlib import Path

import pytest
import torch
from helpers import ROOT, refused

for package in ("nbformat", "nbclient", "ipykernel", "IPython"):
    pytest.importorskip(package, reason=f"{package} is not installed: no notebook is tested")
import nbformat

from annotate import Feedback, ground
from ask import Function
from data import get_task
from measures.sandbox import run_python
from notebooks.build import execute_notebook, remove_run_details

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
OURS = {path.stem for path in ROOT.glob("*.py")} | {"toy", "measures", "experiments"}
MAY_IMPORT = OURS | {"IPython", "dataclasses", "inspect", "itertools", "json", "math",
                     "notebooks", "os", "random", "re", "sys", "tempfile", "tokenizers",
                     "torch", "transformers", "unittest"}
# These notebooks may define algorithms: one shows wrong versions of functions, and in the other
# the students write them.
WRONG, STUDENTS = "5_ten_ways_to_get_it_wrong", "6_build_it_yourself"
# These notebooks train a model, so their numbers depend on the processor.
LIVE = [WRONG, "4_what_the_critic_learned", STUDENTS]
NUMBER = re.compile(r"(?<![\w.])[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?")
BLANK = "...  # yours"
SOLUTION = re.compile(r"(?s)<details><summary>Solution</summary>\n\n```python\n(.*?)```.*\n\n"
                      r"</details>$|(solution\(\"\w+\", show=)False\)")

assert len(NOTEBOOKS) == 6                               # or the tests would pass vacuously
each = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def code(path: Path) -> list:
    """The stored code cells of a notebook."""
    cells = nbformat.read(path, as_version=4).cells
    return [cell for cell in cells if cell.cell_type == "code"]


# ── The contents of the cells

@each
def test_holds_nothing_that_changes_from_run_to_run(path):
    """The files contain no times, versions, paths or warnings, so builds are reproducible."""
    text, notebook = path.read_text(), nbformat.read(path, as_version=4)
    assert not re.search(r"/(home|root|tmp|Users)/|iopub|stderr|Warning|0x[0-9a-f]{6,}", text)
    assert all(not cell.metadata for cell in notebook.cells)
    assert text == nbformat.writes(remove_run_details(notebook)) + "\n"


@each
def test_needs_no_network_and_defines_no_algorithm_of_its_own(path):
    """Only listed modules are imported, and no cell has a URL or a shell command. Classes and
    long functions are forbidden. A cell "# By hand" has an assert."""
    for cell in code(path):
        assert not re.search(r"(?m)https?://|^\s*[!%]", cell.source), cell.source[:80]
        nodes = list(ast.walk(ast.parse(cell.source)))
        for node in nodes:
            assert not isinstance(node, ast.ClassDef), f"it defines the class {node.name}"
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                modules = [getattr(node, "module", alias.name) for alias in node.names]
                assert {module.split(".")[0] for module in modules} <= MAY_IMPORT, modules
            if isinstance(node, ast.FunctionDef) and path.stem not in (STUDENTS, WRONG):
                assert node.end_lineno - node.lineno < 3, f"{node.name} belongs in a script"
        if cell.source.startswith("# By hand"):
            assert re.search(r"(?m)^\s*(assert|close\()", cell.source), cell.source[:80]


# ── Exercises

def run(source: str, names: dict) -> tuple[str, str]:
    """Run a cell with the notebook's variables `names`; (what it prints, its HTML or SVG)."""
    *statements, last = ast.parse(source).body
    printed, value = io.StringIO(), None
    with contextlib.redirect_stdout(printed):
        if isinstance(last, ast.Expr):
            exec(compile(ast.Module(statements, []), "cell", "exec"), names)
            value = eval(compile(ast.Expression(last.value), "cell", "eval"), names)
        else:
            exec(compile(source, "cell", "exec"), names)
    markup = [getattr(value, name)() for name in ("_repr_html_", "_repr_svg_")
              if hasattr(value, name)]
    return printed.getvalue(), "".join(markup)


def wrong_answers(value) -> list:
    """Copies of the answer with one part changed each; of a function, its result is changed."""
    if callable(value):
        return [lambda *args: wrong_answers(value(*args))[0]]
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, str):
        return [value + "x", value[:-1]]
    if not isinstance(value, (dict, list, tuple)):
        return [value + 1, value - 1]
    answers = []
    for key, part in value.items() if isinstance(value, dict) else enumerate(value):
        for other in wrong_answers(part):
            changed = dict(value) if isinstance(value, dict) else list(value)
            changed[key] = other
            answers.append(changed)
    return answers


def check_exercise(title, cell, check, solution, names):
    """The check rejects every answer that differs from the solution in one part."""
    assert check.startswith("# Check\n") and cell.count(BLANK) == 1
    run(cell, names)
    assert run(check, names)[0] == "not done yet\n", title
    run(solution[1] or run(f"{solution[2]}True)", names)[0], names)
    assert run(check, names)[0] == "right\n", title
    node = ast.parse(cell).body[-1]
    name = node.name if isinstance(node, ast.FunctionDef) else node.targets[0].id
    for other in wrong_answers(names[name]):
        with pytest.raises(AssertionError):
            print(f"{title} takes {other} for right: {run(check, names | {name: other})}")


# ── The outputs

def words(printed: str, markup: str) -> list[str]:
    """The words in the output of a cell: printed text, HTML, and SVG pictures."""
    return f"{printed} {re.sub(r'</?[a-zA-Z]+|>', ' ', markup)}".split()


def stored(cell) -> tuple[str, str]:
    """What a stored cell printed, and its HTML or SVG."""
    printed = [output.text for output in cell.outputs if output.output_type == "stream"]
    data = [output.data for output in cell.outputs if "data" in output]
    markup = [part.get("text/html") or part["image/svg+xml"] for part in data]
    return "".join(printed), "".join(markup)


def same(new: str, stored: str) -> bool:
    """Whether two words are equal up to the rounding of a processor.

    Integers must be equal, because cells print only exact ones (counts, ids, positions).
    Decimals may differ by two units of the last digit or 1 %. "1" counts as a decimal beside
    "0.9999", as legends drop trailing zeros.
    """
    for a, b in zip(NUMBER.findall(new), NUMBER.findall(stored)):
        decimals = max(len(number.partition(".")[2]) for number in (a, b))
        tolerance = max(2.01 * 10.0**-decimals, abs(float(b)) / 100) if decimals else 0
        if abs(float(a) - float(b)) > tolerance:
            return False
    return NUMBER.sub("#", new) == NUMBER.sub("#", stored)


def test_rounding_is_forgiven_and_nothing_else():
    for now, stored in (("0.262", "0.261"), ("[+the+]", "[+the+]"), ("0.9999", "1")):
        assert same(now, stored)
    for now, stored in (("0.271", "0.261"), ("54%", "53%"), ("-0.261", "0.261"), ("a1", "b1")):
        assert not same(now, stored)
    assert wrong_answers({"a": (1, [True])})[2] == {"a": [1, [False]]}


@each
def test_says_what_is_stored_and_each_exercise_has_one_answer(path, monkeypatch):
    """Each cell runs once, with the exercises blank, in a namespace of its own.

    For notebooks that train, only the presence of words is compared. Their claims are in
    asserts, so several cells that print figures must also bound them.
    """
    monkeypatch.chdir(path.parent)
    monkeypatch.setenv("TQDM_DISABLE", "1")                # undoes what the first cells set
    monkeypatch.setattr(sys, "path", [*sys.path])
    cells, names = nbformat.read(path, as_version=4).cells, {"__name__": "notebook"}
    exercises = 0
    for i, cell in enumerate(cells):
        if cell.cell_type != "code":
            continue
        if BLANK in cell.source:
            exercises += 1
            title = f"### Exercise {exercises} · "
            assert any(title in before.source for before in cells[i - 3 : i])
            with torch.random.fork_rng():
                check_exercise(title, cell.source, cells[i + 1].source,
                               SOLUTION.match(cells[i + 2].source), names)
        now, then = words(*run(cell.source, names)), words(*stored(cell))
        different = [pair for pair in zip(now, then) if not same(*pair)]
        assert path.stem in LIVE or not different, f"cell {i}: {different[:5]}"
        assert path.stem in LIVE or len(now) == len(then), f"cell {i}"
        assert bool(now) == bool(then), f"cell {i}"
    outputs = [cell for cell in code(path) if cell.outputs]
    bounds = [cell for cell in outputs if re.search(r"(?m)^\s*assert .*[<>]", cell.source)]
    assert exercises and len(outputs) >= 10
    assert path.stem not in LIVE or len(bounds) >= (2 if path.stem == STUDENTS else 5)
    counts = [cell.execution_count for cell in code(path)]
    assert counts == [*range(1, len(counts) + 1)], "the outputs come from one run, from the top"


def test_a_build_runs_a_notebook_in_a_new_kernel_and_stores_what_is_stored():
    notebook = remove_run_details(execute_notebook(NOTEBOOKS[0]))
    again = [cell for cell in notebook.cells if cell.cell_type == "code"]
    for now, then in zip(again, code(NOTEBOOKS[0]), strict=True):
        assert all(map(same, words(*stored(now)), words(*stored(then))))
        assert len(words(*stored(now))) == len(words(*stored(then)))


# ── The critics of own_task.md

ANSWER = "```python\ndef solve(xs: list[int]) -> int:\n    xs.sort()\n    return {}\n```"
CLEAN = ANSWER.format("xs[0]")
FIRST, SECOND, THIRD, LAST, FENCE = re.split("(?=\n)", CLEAN)


def own_critic(task, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "notebooks" / "own_task")
    return Function(get_task(task).settings["annotator_function"]).function


def test_the_linter_quotes_lines_of_any_answer(monkeypatch):
    critic = own_critic("lint:LINT", monkeypatch)
    found = critic({}, CLEAN)
    assert found == {"critique": "Clean.", "good_spans": [FIRST, SECOND, FENCE],
                     "poor_spans": []}
    assert len(ground(CLEAN, Feedback(*found.values())).spans) == 3     # each is found once
    for answer, poor in (
            (ANSWER.format("ys[0]  # noqa"), ["\n    return ys[0]  # noqa"]),
            (ANSWER.format("(xs[0]"), [SECOND, THIRD, "\n    return (xs[0]"]),
            (CLEAN + "\n\nDone.", ["\nDone."]), (CLEAN[:-4], [FIRST, SECOND, THIRD, LAST]),
            (CLEAN + "\n```\nx = 1\n```", ["\n```", "\nx = 1", "\n```"]),
            (CLEAN.replace("    ", "\t"), ["\n\txs.sort()", "\n\treturn xs[0]"]),
            (ANSWER.format("xs[0]" + " + 9" * 60), ["\n    return xs[0]" + " + 9" * 60]),
            ("", []), ("No code.", ["No code."]), ("\0", ["\0"]), ("```python", ["```python"])):
        found = critic({}, answer)
        assert found["critique"] != "Clean." and found["poor_spans"] == poor
        is_form = FENCE in answer and "(xs" not in answer
        assert not is_form or found["good_spans"] == [FIRST, SECOND, FENCE]


def test_the_task_of_the_linter_needs_ruff_and_tests_answers(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "notebooks" / "own_task")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "ruff", None)
        patch.delitem(sys.modules, "lint", raising=False)
        refused("ruff", get_task, "lint:LINT")
    task = get_task("lint:LINT")
    training, many, held_out = ({row["id"] for row in task.rows(split, n, 0)} for split, n in (
        ("train", 180), ("train", 800), ("eval", 64)))
    assert [*map(len, (training, many, held_out))] == [180, 800, 60]
    assert not held_out & (training | many) and not any("_" in row for row in training)
    tests = task.tests({"id": "the mean of ages"})
    for program, is_right in (("sum(xs) / len(xs)", True), ("sum(xs)", False)):
        result = run_python(f"def solve(xs):\n    return {program}", tests, unsafe=True)
        assert result.passed == is_right


def test_the_critic_of_events_quotes_phrases(monkeypatch):
    row = {"event": "quiz night", "day": "Monday", "time": "9:30", "place": "Rome",
           "price": "free"}
    assert own_critic("events:EVENT", monkeypatch)(
        row, "The quiz night in Bonn is on Monday, day: Monday. Come! It is great.") == {
        "critique": "The time is missing. The place is missing. The price is missing. 'Bonn' "
                    "is not in the row. 'day: Monday' is not in the row. ' Come! It is great.' "
                    "is not in the row.", "good_spans": ["The quiz night", "on Monday"],
        "poor_spans": ["Bonn", "day: Monday", " Come! It is great."]}
