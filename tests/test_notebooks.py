"""Each notebook gives its stored outputs in a new kernel and defines no algorithm.

An exercise has four cells: a question, a cell with a blank, its check, and a folded solution.
"""

import ast
import contextlib
import importlib
import io
import re
import sys
import tokenize
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from xml.etree import ElementTree

import pytest
from helpers import ROOT

for package in ("nbformat", "nbclient", "ipykernel", "IPython"):
    pytest.importorskip(package, reason=f"{package} is not installed: no notebook is tested")
import nbformat

from notebooks.build import execute_notebook, remove_run_details

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
ROOMS = {"toy", "measures", "experiments"}
OURS = {path.stem for path in ROOT.glob("*.py")} | ROOMS
MAY_IMPORT = OURS | {"IPython", "dataclasses", "inspect", "itertools", "json", "math",
                     "notebooks", "os", "random", "re", "sys", "tokenizers", "torch",
                     "transformers", "unittest"}
# These notebooks may define algorithms: one shows wrong versions of functions, and in the other
# the students write them.
WRONG, STUDENTS = "5_ten_ways_to_get_it_wrong", "6_build_it_yourself"
# These notebooks train a model, so their numbers depend on the processor. The longest first.
LIVE = [WRONG, "4_what_the_critic_learned", STUDENTS]
NUMBER = re.compile(r"(?<![\w.])[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?")
BLANK = "...  # yours"
SOLUTION = re.compile(r"(?s)<details><summary>Solution</summary>\n\n```python\n(.*?)```.*\n\n"
                      r"</details>$")
TRAINS = re.compile(r"\b(fit_adapter|learn)\(")          # a cell that trains, for many seconds
WITH_EXERCISES = [path for path in NOTEBOOKS if BLANK in path.read_text("utf-8")]

each = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def code(path: Path) -> list:
    """The stored code cells of a notebook."""
    cells = nbformat.read(path, as_version=4).cells
    return [cell for cell in cells if cell.cell_type == "code"]


def nodes(cell) -> list:
    return list(ast.walk(ast.parse(cell.source)))


def imported(cells) -> set[str]:
    """The names that these cells import from the project."""
    return {alias.asname or alias.name for cell in cells for node in nodes(cell)
            if isinstance(node, (ast.Import, ast.ImportFrom)) for alias in node.names
            if getattr(node, "module", alias.name).split(".")[0] in OURS}


def ours() -> set[str]:
    """The names of all functions and classes of the scripts and packages."""
    files = [path for room in ROOMS for path in (ROOT / room).glob("[a-z]*.py")]
    rooms = [f"{path.parent.name}.{path.stem}" for path in files]
    modules = [importlib.import_module(name) for name in sorted(OURS) + rooms]
    return {name for module in modules for name, value in vars(module).items()
            if callable(value)
            and getattr(value, "__module__", "").split(".")[0] in OURS}


def pictures(cell) -> list:
    """The SVG pictures of a cell's outputs, parsed."""
    return [ElementTree.fromstring(output.data["image/svg+xml"]) for output in cell.outputs
            if "image/svg+xml" in output.get("data", {})]


def words(cell) -> list[str]:
    """The words in a cell's outputs: printed text, HTML, and the text of SVG pictures."""
    texts = [output.text for output in cell.outputs if output.output_type == "stream"]
    texts += [" ".join(picture.itertext()) for picture in pictures(cell)]
    for data in (output.data for output in cell.outputs if "data" in output):
        if "text/html" in data:
            texts.append(re.sub(r"<[^>]+>", " ", data["text/html"]))
        elif "image/svg+xml" not in data:
            texts.append(data["text/plain"])
    return " ".join(texts).split()


@pytest.fixture(scope="module", autouse=True)
def runs(request):
    """Path → the future of a notebook's run in a new kernel; two run at a time, the longest
    first, while the other tests of this file continue."""
    tested = {item.callspec.params["path"] for item in request.session.items
              if item.originalname == "test_runs_in_a_clean_kernel_and_says_what_is_stored"}
    pool = ThreadPoolExecutor(2)
    yield {path: pool.submit(execute_notebook, path)
           for path in sorted(tested, key=lambda path: [*LIVE, path.stem].index(path.stem))}
    pool.shutdown(cancel_futures=True)


# ── The contents of the cells

def test_the_notebooks_and_exercises_are_there():
    """Without notebooks or blanks, the other tests of this file would pass vacuously."""
    assert len(NOTEBOOKS) == 6 and {*LIVE} <= {path.stem for path in NOTEBOOKS}
    blanks = [path.read_text("utf-8").count(BLANK) for path in WITH_EXERCISES]
    assert len(blanks) == len(NOTEBOOKS) and sum(blanks) >= 20


@each
def test_holds_nothing_that_changes_from_run_to_run(path):
    """The files contain no times, versions, paths or warnings, so builds are reproducible."""
    text, notebook = path.read_text(), nbformat.read(path, as_version=4)
    assert not re.search(r"/(home|root|tmp|Users)/|iopub|stderr|Warning|0x[0-9a-f]{6,}", text)
    assert all(not cell.metadata for cell in notebook.cells)
    assert text == nbformat.writes(remove_run_details(notebook)) + "\n"


@each
def test_needs_no_network_and_defines_no_algorithm_of_its_own(path):
    """Only listed modules are imported, and no cell has a URL or a shell command. Classes, long
    functions, and functions with names of the project are forbidden."""
    known, taken = ours(), imported(code(path))
    assert len(taken & known) >= 5, "the scripts' own functions are called"
    for cell in code(path):
        assert not re.search(r"(?m)https?://|^\s*[!%]", cell.source), cell.source[:80]
        for node in nodes(cell):
            assert not isinstance(node, ast.ClassDef), f"it defines the class {node.name}"
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                modules = [getattr(node, "module", alias.name) for alias in node.names]
                assert {module.split(".")[0] for module in modules} <= MAY_IMPORT, modules
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                is_short = node.end_lineno - node.lineno < 3
                if path.stem != STUDENTS:
                    assert is_short or path.stem == WRONG, f"{node.name} belongs in a script"
                    assert node.name not in known, f"it defines {node.name} again"
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                assert node.id not in taken, f"it assigns to {node.id}, which it imports"


@each
def test_calculations_by_hand_call_nothing_of_ours(path):
    """A cell "# By hand" has an assert and calls no function of the project but `use_lora`."""
    cells = code(path)
    for cell in cells:
        if not cell.source.startswith("# By hand"):
            continue
        names = {node.id for node in nodes(cell) if isinstance(node, ast.Name)}
        assert names & imported(cells) <= {"use_lora"}, cell.source[:80]
        checks = any(isinstance(node, ast.Assert) for node in nodes(cell))
        assert checks or "close" in names, cell.source[:80]


def test_the_first_notebook_is_short():
    """It is the first thing that a student reads. Lines of code are counted without comments,
    and their length in tokens, as the tokenizer of Python counts them."""
    cells = code(NOTEBOOKS[0])
    ignored = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT,
               tokenize.DEDENT, tokenize.ENDMARKER}
    tokens = [(number, token.start[0]) for number, cell in enumerate(cells)
              for token in tokenize.generate_tokens(io.StringIO(cell.source).readline)
              if token.type not in ignored]
    lines = len(set(tokens))
    assert len(cells) <= 26 and lines <= 250
    assert len(tokens) / lines <= 10.5


# ── Exercises

def run(source: str, names: dict) -> str:
    """Run a cell with the notebook's variables `names`; returns what it prints."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(compile(source, "cell", "exec"), names)
    return output.getvalue()


def answer_name(source: str) -> str:
    """The name that the cell with the blank defines: a variable or a function."""
    node = ast.parse(source).body[-1]
    return node.name if isinstance(node, ast.FunctionDef) else node.targets[0].id


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


def test_every_part_of_an_answer_is_changed():
    assert wrong_answers((1, [True])) == [[2, [True]], [0, [True]], [1, [False]]]
    assert wrong_answers({"a": "bc"}) == [{"a": "bcx"}, {"a": "b"}]
    assert wrong_answers(lambda x: x)[0](3) == 4


@pytest.mark.parametrize("path", WITH_EXERCISES, ids=lambda path: path.stem)
def test_a_blank_is_blank_the_solution_right_and_the_rest_wrong(path, monkeypatch):
    """The check rejects every answer that differs from the solution in one part. The notebook
    runs in this process up to the last exercise, without the cells after a training."""
    monkeypatch.chdir(path.parent)
    monkeypatch.setenv("TQDM_DISABLE", "1")                # undoes what the first cells set
    monkeypatch.setattr(sys, "path", [*sys.path])
    cells, names, has_trained = nbformat.read(path, as_version=4).cells, {}, False
    places = [i for i, cell in enumerate(cells)
              if cell.cell_type == "code" and BLANK in cell.source]
    for i, cell in enumerate(cells[: places[-1] + 1]):
        has_trained = has_trained or bool(TRAINS.search(cell.source))
        if i not in places:
            if cell.cell_type == "code" and not has_trained:
                run(cell.source, names)
            continue
        title = cells[i - 1].source.splitlines()[0]
        assert title.startswith(f"### Exercise {places.index(i) + 1} · ")
        check, solution = cells[i + 1].source, SOLUTION.match(cells[i + 2].source)[1]
        assert check.startswith("# Check\n") and cell.source.count(BLANK) == 1
        run(cell.source, names)
        assert run(check, names) == "not done yet\n", title
        run(solution, names)
        assert run(check, names) == "right\n", title
        name = answer_name(cell.source)
        for other in wrong_answers(names[name]):
            with pytest.raises(AssertionError):
                print(f"{title} takes {other} for right: {run(check, names | {name: other})}")
        run(cell.source, names)


# ── The outputs: last in this file, because the notebooks run in the background

def tolerance(new: str, stored: str) -> float:
    """The largest allowed difference between two printed numbers.

    Integers must be equal, because cells print only exact ones (counts, ids, positions).
    Decimals may differ by two units of the last digit or 1 %, as rounding depends on the
    processor. "1" counts as a decimal beside "0.9999", as legends drop trailing zeros.
    """
    decimals = max(len(number.partition(".")[2]) for number in (new, stored))
    return max(2.01 * 10.0**-decimals, abs(float(stored)) / 100) if decimals else 0


def same(new: str, stored: str) -> bool:
    """Whether two words are equal and their numbers are equal up to rounding."""
    pairs = zip(NUMBER.findall(new), NUMBER.findall(stored))
    return (NUMBER.sub("#", new) == NUMBER.sub("#", stored)
            and all(abs(float(a) - float(b)) <= tolerance(a, b) for a, b in pairs))


def test_rounding_is_forgiven_and_nothing_else():
    """`same` tolerates rounding; integers, words and signs of large numbers must be equal."""
    for now, stored in (("0.262", "0.261"), ("[+the+]", "[+the+]"), ("a,-0.02", "a,0.00"),
                        ("0.9999", "1"), ("-1", "-0.9999")):
        assert same(now, stored)
    for now, stored in (("0.271", "0.261"), ("54", "53"), ("54%", "53%"), ("-0.261", "0.261"),
                        ("a1", "b1"), ("-2", "-1"), ("0.5", "1")):
        assert not same(now, stored)


def kinds(cell) -> list:
    """The types of a cell's outputs, with the names of streams and the formats of results."""
    return [(output.output_type, output.get("name"), sorted(output.get("data", {})))
            for output in cell.outputs]


def coordinates(cell) -> list[float]:
    """The coordinates of the curves in a cell's pictures, in pixels."""
    paths = [path for picture in pictures(cell) for path in picture.iter("{*}path")]
    return [float(number) for path in paths
            for number in re.findall(r"-?\d+(?:\.\d+)?", path.get("d"))]


@each
def test_runs_in_a_clean_kernel_and_says_what_is_stored(path, runs):
    """The new outputs equal the stored ones; the file is not written.

    For notebooks that train, only the types of the outputs are compared. Their claims are in
    asserts, so several cells that print figures must also bound them.
    """
    # This raises an exception if a cell, or its assert, fails.
    fresh, stored = remove_run_details(runs[path].result()), code(path)
    again = [cell for cell in fresh.cells if cell.cell_type == "code"]
    for number, (now, then) in enumerate(zip(again, stored, strict=True), 1):
        place = f"code cell {number}"
        assert kinds(now) == kinds(then), place
        assert then.execution_count == number, "the outputs come from one run, from the top"
        if path.stem in LIVE:
            assert bool(words(now)) == bool(words(then)), place
            continue
        different = [pair for pair in zip(words(now), words(then)) if not same(*pair)]
        assert not different, f"{place}: {different[:5]}"
        assert len(words(now)) == len(words(then)), place
        # A pixel is less than the eye sees, and more than rounding moves a curve.
        assert coordinates(now) == pytest.approx(coordinates(then), abs=1), place
    assert sum(bool(cell.outputs) for cell in stored) > len(stored) / 3
    bounds = [cell for cell in stored
              if cell.outputs and re.search(r"(?m)^\s*assert .*[<>]", cell.source)]
    assert path.stem not in LIVE or len(bounds) >= (2 if path.stem == STUDENTS else 5)
