"""The notebooks: each runs in a clean kernel and says what is stored; none defines an algorithm of its own."""

import ast
import importlib
import re
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest

from conftest import ROOT

nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed: the notebooks are not tested")
pytest.importorskip("nbclient", reason="nbclient is not installed: the notebooks are not tested")
pytest.importorskip("ipykernel", reason="ipykernel is not installed: the notebooks are not tested")
from notebooks.build import executed, without_chance  # noqa: E402

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
OURS = {path.stem for path in ROOT.glob("*.py")} | {"toy", "measures", "experiments"}
MAY_IMPORT = OURS | {"IPython", "dataclasses", "itertools", "json", "math", "os", "random", "sys", "tokenizers",
                     "torch", "transformers"}
LIVE = {"4_what_the_critic_learned"}      # they train a model, which is chaotic: each processor gives other numbers
NUMBER = re.compile(r"(?<![\w.])[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?")

each = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def code(path: Path) -> list:
    """The cells of code, as they are stored."""
    return [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]


def shown(cell) -> list[str]:
    """What a reader sees of a cell's outputs: printed lines, and the words and numbers of its pictures."""
    printed = "".join(output.text for output in cell.outputs if output.output_type == "stream")
    data = [output.data for output in cell.outputs if output.output_type in ("execute_result", "display_data")]
    html = [re.sub(r"<[^>]+>", " ", "".join(one.get("text/html", ""))) for one in data]
    svg = [" ".join(ElementTree.fromstring(one["image/svg+xml"]).itertext()) for one in data if "image/svg+xml" in one]
    plain = ["".join(one["text/plain"]) for one in data if not {"text/html", "image/svg+xml"} & one.keys()]
    return " ".join([printed, *html, *svg, *plain]).split()


def same(now: str, stored: str) -> bool:
    """Equal words, whose numbers differ by at most two units in the last place that is shown, or 1 %."""
    if NUMBER.sub("#", now) != NUMBER.sub("#", stored):
        return False
    pairs = zip(NUMBER.findall(now), NUMBER.findall(stored))
    room = lambda b: max(2.01 * 10.0 ** -len(b.partition(".")[2]), abs(float(b)) / 100) if "." in b else 0
    return all(abs(float(a) - float(b)) <= room(b) for a, b in pairs)


def test_rounding_is_forgiven_and_nothing_else():
    """The comparison itself: two units in the last place; integers, words and signs of large numbers are exact."""
    assert same("0.262", "0.261") and same("[+the+]", "[+the+]") and same("cosine,-0.02", "cosine,0.00")
    assert not same("0.271", "0.261") and not same("54", "53") and not same("-0.261", "0.261") and not same("a1", "b1")


def test_the_notebooks_are_there():
    """So that a folder that moved does not pass every other test here."""
    assert len(NOTEBOOKS) == 4


def kinds(cell) -> list:
    """What kind of outputs a cell has: streams by name, and the forms in which its results can be shown."""
    return [(output.output_type, output.get("name"), sorted(output.get("data", {}))) for output in cell.outputs]


@each
def test_runs_in_a_clean_kernel_and_says_what_is_stored(path):
    """No error, every output stored, words equal and numbers equal up to rounding. The file itself is not written.

    Of a notebook that trains live only the kinds of outputs are compared; what it claims is in its own asserts.
    """
    before, fresh = path.read_bytes(), without_chance(executed(path))     # raises where a cell, or its assert, fails
    stored = code(path)
    again = [cell for cell in fresh.cells if cell.cell_type == "code"]
    for number, (now, then) in enumerate(zip(again, stored, strict=True), 1):
        said, expected = shown(now), shown(then)
        assert kinds(now) == kinds(then), f"code cell {number}"
        assert then.execution_count == number, "the stored outputs come from one run, from the top"
        if path.stem in LIVE:
            assert bool(said) == bool(expected), f"code cell {number}"
            continue
        wrong = [pair for pair in zip(said, expected) if not same(*pair)]
        assert len(said) == len(expected) and not wrong, f"code cell {number}: now and stored differ: {wrong[:5]}"
    assert sum(bool(cell.outputs) for cell in stored) > len(stored) / 3
    assert path.read_bytes() == before


def test_notebooks_that_train_live_assert_what_they_claim():
    """Their numbers are not compared with the stored ones, so cells that show figures also bound them."""
    assert LIVE <= {path.stem for path in NOTEBOOKS}
    for path in (path for path in NOTEBOOKS if path.stem in LIVE):
        claims = [cell for cell in code(path) if cell.outputs and re.search(r"(?m)^\s*assert .*[<>]", cell.source)]
        assert len(claims) >= 5, f"{path.name}: {len(claims)} cells bound what they show"


def imported(cells) -> set[str]:
    """Names that these cells take from our scripts."""
    imports = [node for cell in cells for node in ast.walk(ast.parse(cell.source))
               if isinstance(node, (ast.Import, ast.ImportFrom))]
    return {alias.asname or alias.name for node in imports for alias in node.names
            if getattr(node, "module", alias.name).split(".")[0] in OURS}


@each
def test_defines_no_algorithm_of_its_own(path):
    """A class, a function over three lines or of one of our names would be a second truth beside the scripts."""
    ours = {name for module in OURS for name, value in vars(importlib.import_module(module)).items()
            if callable(value) and getattr(value, "__module__", "").split(".")[0] in OURS}
    taken = imported(code(path))
    assert len(taken & ours) >= 5, "the scripts' own functions are called"
    for node in (node for cell in code(path) for node in ast.walk(ast.parse(cell.source))):
        assert not isinstance(node, ast.ClassDef), f"{path.name} defines the class {node.name}"
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            assert node.end_lineno - node.lineno < 3, f"{path.name}: {node.name} belongs in a script"
            assert node.name not in ours, f"{path.name} defines {node.name} again"
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            assert node.id not in taken, f"{path.name} assigns to {node.id}, which it imports"


@each
def test_needs_no_network(path):
    """Only the standard library's harmless parts, torch, transformers' tokenizers and our own modules; no address."""
    for cell in code(path):
        for node in ast.walk(ast.parse(cell.source)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else \
                [node.module] if isinstance(node, ast.ImportFrom) else []
            assert {name.split(".")[0] for name in names} <= MAY_IMPORT, f"{path.name} imports {names}"
        assert not re.search(r"https?://|^\s*[!%]", cell.source, re.MULTILINE), f"{path.name}: {cell.source[:80]}"


@each
def test_calculations_by_hand_call_nothing_of_ours(path):
    """A cell that begins with "# By hand" asserts, and of our functions it calls the switch `use_lora` alone."""
    for cell in code(path):
        if cell.source.startswith("# By hand"):
            nodes = list(ast.walk(ast.parse(cell.source)))
            names = {node.id for node in nodes if isinstance(node, ast.Name)}
            assert names & imported(code(path)) <= {"use_lora"}, f"{path.name}: {cell.source[:80]}"
            assert "close" in names or any(isinstance(node, ast.Assert) for node in nodes), f"{cell.source[:80]}"


def test_every_number_of_the_first_notebook_is_computed_by_hand():
    """The cell after one that prints a number is its calculation by hand."""
    cells = code(next(path for path in NOTEBOOKS if path.name.startswith("1_")))
    numbers = [(cell, after) for cell, after in pairwise(cells) if re.search(r"\d", " ".join(shown(cell)))]
    assert len(numbers) >= 10 and not re.search(r"\d", " ".join(shown(cells[-1])))
    for cell, after in numbers:
        assert after.source.startswith("# By hand"), f"no calculation by hand after: {cell.source[:80]}"


@each
def test_holds_nothing_that_changes_from_run_to_run(path):
    """A second build gives the same bytes: no times, no kernel version, no path of a machine, no warnings."""
    text, notebook = path.read_text(), nbformat.read(path, as_version=4)
    assert not re.search(r"/(home|root|tmp|Users)/|iopub|stderr|Warning|0x[0-9a-f]{6,}", text)
    assert all(not cell.metadata for cell in notebook.cells)
    assert text == nbformat.writes(without_chance(notebook)) + "\n"
