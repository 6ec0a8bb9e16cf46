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
TRAINS = re.compile(r"\b(fit_adapter|learn)\(")          # a cell that trains, for many seconds

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

def run(source: str, names: dict) -> str:
    """Run a cell with the notebook's variables `names`; returns what it prints."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(compile(source, "cell", "exec"), names)
    return output.getvalue()


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


@each
def test_a_blank_is_blank_the_solution_right_and_the_rest_wrong(path, monkeypatch):
    """The check rejects every answer that differs from the solution in one part. The notebook
    runs in this process up to the last exercise, without the cells after a training."""
    monkeypatch.chdir(path.parent)
    monkeypatch.setenv("TQDM_DISABLE", "1")                # undoes what the first cells set
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert wrong_answers({"a": (1, [True])})[2] == {"a": [1, [False]]}
    cells, names, has_trained = nbformat.read(path, as_version=4).cells, {}, False
    places = [i for i, cell in enumerate(cells)
              if cell.cell_type == "code" and BLANK in cell.source]
    for i, cell in enumerate(cells[: places[-1] + 1]):
        has_trained = has_trained or bool(TRAINS.search(cell.source))
        if i not in places:
            if cell.cell_type == "code" and not has_trained:
                run(cell.source, names)
            continue
        title = f"### Exercise {places.index(i) + 1} · "
        assert any(title in before.source for before in cells[i - 3 : i])
        check, solution = cells[i + 1].source, SOLUTION.match(cells[i + 2].source)
        assert check.startswith("# Check\n") and cell.source.count(BLANK) == 1
        run(cell.source, names)
        assert run(check, names) == "not done yet\n", title
        run(solution[1] or run(f"{solution[2]}True)", names), names)
        assert run(check, names) == "right\n", title
        node = ast.parse(cell.source).body[-1]
        name = node.name if isinstance(node, ast.FunctionDef) else node.targets[0].id
        for other in wrong_answers(names[name]):
            with pytest.raises(AssertionError):
                print(f"{title} takes {other} for right: {run(check, names | {name: other})}")
        run(cell.source, names)


# ── The outputs

def words(cell) -> list[str]:
    """The words in a cell's outputs: printed text, HTML, and SVG pictures."""
    texts = [output.text for output in cell.outputs if output.output_type == "stream"]
    for data in (output.data for output in cell.outputs if "data" in output):
        markup = data.get("text/html") or data.get("image/svg+xml")
        texts.append(re.sub(r"</?\w+|>", " ", markup) if markup else data["text/plain"])
    return " ".join(texts).split()


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


@each
def test_runs_in_a_clean_kernel_and_says_what_is_stored(path):
    """The new outputs equal the stored ones; the file is not written.

    For notebooks that train, only the presence of words is compared. Their claims are in
    asserts, so several cells that print figures must also bound them.
    """
    # This raises an exception if a cell, or its assert, fails.
    fresh, stored = remove_run_details(execute_notebook(path)), code(path)
    again = [cell for cell in fresh.cells if cell.cell_type == "code"]
    for number, (now, then) in enumerate(zip(again, stored, strict=True), 1):
        place = f"code cell {number}"
        assert then.execution_count == number, "the outputs come from one run, from the top"
        if path.stem in LIVE:
            assert bool(words(now)) == bool(words(then)), place
            continue
        different = [pair for pair in zip(words(now), words(then)) if not same(*pair)]
        assert not different, f"{place}: {different[:5]}"
        assert len(words(now)) == len(words(then)), place
    assert sum(bool(cell.outputs) for cell in stored) >= 10
    bounds = [cell for cell in stored
              if cell.outputs and re.search(r"(?m)^\s*assert .*[<>]", cell.source)]
    assert path.stem not in LIVE or len(bounds) >= (2 if path.stem == STUDENTS else 5)


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
    training, held_out = ({row["id"] for row in task.rows(split, 999, 0)}
                          for split in ("train", "eval"))
    assert (len(training), len(held_out), training & held_out) == (180, 60, set())
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
