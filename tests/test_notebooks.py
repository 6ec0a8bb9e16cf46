"""The notebooks: each runs in a clean kernel and says what is stored, and defines no algorithm.

An exercise is four cells: a question, a cell with a blank, its check, the folded solution.
"""

import ast
import contextlib
import importlib
import io
import re
import sys
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
MAY_IMPORT = OURS | {"IPython", "dataclasses", "itertools", "json", "math", "os", "random",
                     "re", "sys", "tokenizers", "torch", "transformers", "unittest"}
# They train a model, which is chaotic: each processor gives other numbers. The longest first.
LIVE = ["5_ten_ways_to_get_it_wrong", "4_what_the_critic_learned"]
# It changes functions on purpose, so it may hold algorithms: wrong ones.
WRONG = "5_ten_ways_to_get_it_wrong"
NUMBER = re.compile(r"(?<![\w.])[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?")
BLANK = "...  # yours"
SOLUTION = re.compile(r"(?s)<details><summary>Solution</summary>\n\n```python\n(.*?)```.*\n\n"
                      r"</details>$")
WITH_EXERCISES = [path for path in NOTEBOOKS if BLANK in path.read_text("utf-8")]

each = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def code(path: Path) -> list:
    """The cells of code, as they are stored."""
    cells = nbformat.read(path, as_version=4).cells
    return [cell for cell in cells if cell.cell_type == "code"]


def nodes(cell) -> list:
    return list(ast.walk(ast.parse(cell.source)))


def imported(cells) -> set[str]:
    """Names that these cells take from our scripts."""
    return {alias.asname or alias.name for cell in cells for node in nodes(cell)
            if isinstance(node, (ast.Import, ast.ImportFrom)) for alias in node.names
            if getattr(node, "module", alias.name).split(".")[0] in OURS}


def ours() -> set[str]:
    """Every function and class of the scripts and the rooms."""
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
    """What a reader sees of a cell's outputs: what is printed, and the words of pictures."""
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
    """Path → the future of a notebook's run in a clean kernel.

    Two run at a time, the longest first, while the other tests of this file go on.
    """
    tested = {item.callspec.params["path"] for item in request.session.items
              if item.originalname == "test_runs_in_a_clean_kernel_and_says_what_is_stored"}
    pool = ThreadPoolExecutor(2)
    yield {path: pool.submit(execute_notebook, path)
           for path in sorted(tested, key=lambda path: [*LIVE, path.stem].index(path.stem))}
    pool.shutdown(cancel_futures=True)


# ── What stands in them

def test_the_notebooks_and_exercises_are_there():
    """So that a folder or a mark that changed does not pass every other test here."""
    assert len(NOTEBOOKS) == 5 and {*LIVE, WRONG} <= {path.stem for path in NOTEBOOKS}
    blanks = [path.read_text("utf-8").count(BLANK) for path in WITH_EXERCISES]
    assert len(blanks) >= 4 and sum(blanks) >= 15


@each
def test_holds_nothing_that_changes_from_run_to_run(path):
    """A second build gives the same bytes: no times, no version, no path, no warnings."""
    text, notebook = path.read_text(), nbformat.read(path, as_version=4)
    assert not re.search(r"/(home|root|tmp|Users)/|iopub|stderr|Warning|0x[0-9a-f]{6,}", text)
    assert all(not cell.metadata for cell in notebook.cells)
    assert text == nbformat.writes(remove_run_details(notebook)) + "\n"


@each
def test_needs_no_network_and_defines_no_algorithm_of_its_own(path):
    """It imports harmless modules, torch, tokenizers and ours, and has no address or shell.

    A class, a function over three lines or of one of our names would be a second truth.
    """
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
                assert is_short or path.stem == WRONG, f"{node.name} belongs in a script"
                assert node.name not in known, f"it defines {node.name} again"
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                assert node.id not in taken, f"it assigns to {node.id}, which it imports"


@each
def test_calculations_by_hand_call_nothing_of_ours(path):
    """A cell "# By hand" asserts, and of our functions it calls the switch `use_lora` alone.

    In the first notebook one stands after each cell that prints a number.
    """
    cells = code(path)
    by_hand = [cell for cell in cells if cell.source.startswith("# By hand")]
    for cell in by_hand:
        names = {node.id for node in nodes(cell) if isinstance(node, ast.Name)}
        assert names & imported(cells) <= {"use_lora"}, cell.source[:80]
        checks = any(isinstance(node, ast.Assert) for node in nodes(cell))
        assert checks or "close" in names, cell.source[:80]
    if path == NOTEBOOKS[0]:
        numbers = [re.search(r"\d", " ".join(words(cell))) for cell in cells]
        followers = [after for number, after in zip(numbers, cells[1:]) if number]
        assert len(followers) >= 11 and not numbers[-1]
        assert [cell.source[:80] for cell in followers if cell not in by_hand] == []


# ── Exercises

def run(source: str, names: dict) -> str:
    """What a cell prints; `names` are the notebook's variables."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(compile(source, "cell", "exec"), names)
    return output.getvalue()


def answer_name(source: str) -> str:
    """The name that the blank is to give a value: x = ..., or a function that returns it."""
    node = ast.parse(source).body[-1]
    return node.name if isinstance(node, ast.FunctionDef) else node.targets[0].id


def wrong_answers(value) -> list:
    """The answer with one of its parts changed, for each part; of a function, its results."""
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
    """An answer that differs from the solution anywhere fails its check.

    The notebook runs in this process, without what trains, to the last exercise.
    """
    monkeypatch.chdir(path.parent)
    monkeypatch.setenv("TQDM_DISABLE", "1")                # as the first cells do, for ever
    monkeypatch.setattr(sys, "path", [*sys.path])
    cells, names, has_trained = nbformat.read(path, as_version=4).cells, {}, False
    places = [i for i, cell in enumerate(cells)
              if cell.cell_type == "code" and BLANK in cell.source]
    for i, cell in enumerate(cells[: places[-1] + 1]):
        has_trained = has_trained or "fit_adapter(" in cell.source
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


# ── They run, and say what is stored: last here, as the runs go on meanwhile

def tolerance(now: str, stored: str) -> float:
    """How far apart two printed numbers may be.

    Integers are exact, as no cell rounds a number to one: they are counts, ids, places, sums of
    ±1 and constants. Decimals are rounded, and processors add in different orders: two units
    of the last place, or 1 %. "1" beside "0.9999" is one too: legends drop zeros at the end.
    """
    decimals = max(len(number.partition(".")[2]) for number in (now, stored))
    return max(2.01 * 10.0**-decimals, abs(float(stored)) / 100) if decimals else 0


def same(now: str, stored: str) -> bool:
    """Equal words, whose numbers are equal up to rounding."""
    pairs = zip(NUMBER.findall(now), NUMBER.findall(stored))
    return (NUMBER.sub("#", now) == NUMBER.sub("#", stored)
            and all(abs(float(a) - float(b)) <= tolerance(a, b) for a, b in pairs))


def test_rounding_is_forgiven_and_nothing_else():
    """The comparison itself; integers, words and signs of large numbers are exact."""
    for now, stored in (("0.262", "0.261"), ("[+the+]", "[+the+]"), ("a,-0.02", "a,0.00"),
                        ("0.9999", "1"), ("-1", "-0.9999")):
        assert same(now, stored)
    for now, stored in (("0.271", "0.261"), ("54", "53"), ("54%", "53%"), ("-0.261", "0.261"),
                        ("a1", "b1"), ("-2", "-1"), ("0.5", "1")):
        assert not same(now, stored)


def kinds(cell) -> list:
    """What kind of outputs a cell has: streams by name, and the forms of its results."""
    return [(output.output_type, output.get("name"), sorted(output.get("data", {})))
            for output in cell.outputs]


def coordinates(cell) -> list[float]:
    """Where the lines of a cell's pictures go, in pixels."""
    paths = [path for picture in pictures(cell) for path in picture.iter("{*}path")]
    return [float(number) for path in paths
            for number in re.findall(r"-?\d+(?:\.\d+)?", path.get("d"))]


@each
def test_runs_in_a_clean_kernel_and_says_what_is_stored(path, runs):
    """No error, every output stored, words equal and numbers too. The file is not written.

    Of a notebook that trains live the kinds of outputs are compared; what it claims is in its
    own asserts, so cells that show figures also bound them.
    """
    # Raises where a cell, or its assert, fails.
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
    assert path.stem not in LIVE or len(bounds) >= 5
