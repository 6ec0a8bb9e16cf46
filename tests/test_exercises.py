"""The exercises of the notebooks: a blank says that it is one, the folded solution passes, and
an answer that differs from it anywhere fails.

An exercise is four cells: a question, a cell with a blank, its check, the solution. Each
notebook runs once, in this process and without what trains, and no further than it must.
"""

import ast
import contextlib
import io
import re
import sys

import pytest
from conftest import ROOT

pytest.importorskip("nbformat", reason="nbformat is not installed: no exercise is tested")
pytest.importorskip("IPython", reason="IPython is not installed: no notebook can be run")
import nbformat

BLANK = "...  # yours"
SOLUTION = re.compile(r"<details><summary>Solution</summary>\n\n```python\n(.*?)```", re.S)
CELLS = {path: nbformat.read(path, as_version=4).cells
         for path in sorted((ROOT / "notebooks").glob("*.ipynb"))}
CELLS = {path: cells for path, cells in CELLS.items()
         if any(BLANK in cell.source for cell in cells)}

each = pytest.mark.parametrize("path", CELLS, ids=lambda path: path.stem)


def blanks(cells) -> list[int]:
    """Where the cells with a blank stand."""
    return [i for i, cell in enumerate(cells)
            if cell.cell_type == "code" and BLANK in cell.source]


def run(source: str, names: dict) -> str:
    """What a cell prints; `names` are the notebook's variables."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(compile(source, "cell", "exec"), names)
    return said.getvalue()


def answer(source: str) -> str:
    """The name that the blank is to give a value: x = ..., or a function that returns it."""
    node = ast.parse(source).body[-1]
    return node.name if isinstance(node, ast.FunctionDef) else node.targets[0].id


def wrong(value) -> list:
    """The answer with one of its parts changed, for each part; of a function, its results."""
    if callable(value):
        return [lambda *args: wrong(value(*args))[0]]
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, str):
        return [value + "x", value[:-1]]
    if not isinstance(value, (dict, list, tuple)):
        return [value + 1, value - 1]
    found = []
    for key, part in value.items() if isinstance(value, dict) else enumerate(value):
        for other in wrong(part):
            spoilt = dict(value) if isinstance(value, dict) else list(value)
            spoilt[key] = other
            found.append(spoilt)
    return found


def test_every_part_of_an_answer_is_changed():
    assert wrong((1, [True])) == [[2, [True]], [0, [True]], [1, [False]]]
    assert wrong({"a": "bc"}) == [{"a": "bcx"}, {"a": "b"}]
    assert wrong(lambda x: x)[0](3) == 4


def test_there_are_enough_of_them():
    """So that a mark that changed does not pass every other test here."""
    assert len(CELLS) >= 4 and sum(len(blanks(cells)) for cells in CELLS.values()) >= 15


@each
def test_has_a_question_a_check_and_a_folded_solution(path):
    cells = CELLS[path]
    for number, i in enumerate(blanks(cells), 1):
        question, blank, check, solution = cells[i - 1 : i + 3]
        assert question.source.startswith(f"### Exercise {number} · "), question.source[:80]
        assert blank.source.count(BLANK) == 1
        assert check.source.startswith("# Check\n") and "assert " in check.source
        assert SOLUTION.match(solution.source) and solution.source.endswith("\n\n</details>")


@each
def test_a_blank_is_blank_the_solution_right_and_the_rest_wrong(path, monkeypatch):
    monkeypatch.chdir(path.parent)
    monkeypatch.setenv("TQDM_DISABLE", "1")                # as the first cells do, for ever
    monkeypatch.setattr(sys, "path", [*sys.path])
    cells, names, trained = CELLS[path], {}, False
    places = blanks(cells)
    for i, cell in enumerate(cells[: places[-1] + 1]):
        trained = trained or "fit_adapter(" in cell.source
        if i not in places:
            if cell.cell_type == "code" and not trained:
                run(cell.source, names)
            continue
        check, solution = cells[i + 1].source, SOLUTION.match(cells[i + 2].source)[1]
        title = cells[i - 1].source.splitlines()[0]
        run(cell.source, names)
        assert run(check, names) == "not done yet\n", title
        run(solution, names)
        assert run(check, names) == "right\n", title
        name = answer(cell.source)
        for other in wrong(names[name]):
            with pytest.raises(AssertionError):
                print(f"{title} takes {other} for right: {run(check, names | {name: other})}")
        run(cell.source, names)
