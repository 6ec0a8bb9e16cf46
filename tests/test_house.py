"""The house: fourteen scripts, three rooms, imports that run one way, nothing that nobody uses,
and docstrings that say what a reader of the paper asks.

ruff looks inside each file: imports, variables, arguments. What it does not do is done here, by
name: a definition or a flag must be read in some file. Each check is shown a house of faults.
"""

import ast
import io
import json
import re
import shutil
import subprocess
import sys
import tokenize
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
from helpers import ROOT

PACKAGES = {"torch", "transformers", "safetensors", "numpy", "openai", "tqdm"}
# A room (a script or a folder) may import itself and the rooms before it.
ORDER = ("data", "settings", "ask", "report", "annotate", "sampling", "runtime", "model", "toy",
         "reward_model", "policy", "sample", "text2grad", "measures", "eval", "experiments")
TOP = {*ORDER, "tiny"} - {"toy", "measures", "experiments"}
NO_TORCH = ORDER[:5]                                                     # phase 1
# file → what else it imports, and only inside the function that needs it
EXCEPT = {"policy.py": "measures",
          "toy/build.py": "tokenizers", "measures/cell.py": "pytest"}
# What libraries call, and no line of ours.
CALLED_FOR_US = {"forward", "backward", "update", "get_seq_length"}
# A critic takes (rollouts, model, tokenizer, config), an annotator (row, response).
IGNORED = ("lint.per-file-ignores = {'experiments/designs.py' = ['ARG001'],"
           " '{tests,bench,notebooks}/*' = ['ARG', 'D', 'RUF100']}")
RULES = "F,ARG001,ARG002,RUF100,E501,D100,D101,D102,D103"
FUNCTIONS = ast.FunctionDef, ast.AsyncFunctionDef
# Where a docstring needs a place in the paper and the shape of each Tensor.
CORE = {"annotate.py", "ask.py", "reward_model.py", "policy.py", "text2grad.py", "model.py",
        "sampling.py", "runtime.py", "data.py", "settings.py"}
PLACE = re.compile(r"§\d|Alg\. \d|Algorithms? \d|Tables? \d|Figures? \d|Appendi|Definition 1")
SHAPE = re.compile(r"\[(\.\.\.|…|\w)(, ?\w[\w ]*)*\]|\bscalars?\b|\bany shape\b", re.I)


@cache
def sources(root: Path) -> dict[str, ast.Module]:
    """"room/file.py" → its tree, of the scripts and the rooms."""
    places = [*root.glob("*.py"), *(root / "toy").glob("*.py"),
              *(root / "measures").glob("*.py"), *(root / "experiments").glob("*.py")]
    return {str(path.relative_to(root)): ast.parse(path.read_text("utf-8")) for path in places}


def cells(root: Path) -> list[str]:
    """The notebooks' cells of code."""
    pages = [json.loads(path.read_text("utf-8")) for path in root.glob("notebooks/*.ipynb")]
    return ["".join(cell["source"]) for page in pages for cell in page["cells"]
            if cell["cell_type"] == "code"]


def imports(tree: ast.Module):
    """(module, whether inside a function) of every import."""
    inside = {id(n) for f in ast.walk(tree) if isinstance(f, FUNCTIONS) for n in ast.walk(f)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name.split(".")[0], id(node) in inside) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module.split(".")[0], id(node) in inside


def words(node: ast.AST) -> list[str]:
    """All names that are read: x, a.x, and x in strings such as "toy:x" or in ("x", "y")."""
    names = []
    for child in ast.walk(node):
        if isinstance(child, (ast.Name, ast.Attribute)) and isinstance(child.ctx, ast.Load):
            names.append(child.id if isinstance(child, ast.Name) else child.attr)
        elif isinstance(child, ast.Constant) and isinstance(child.value, str):
            names += re.findall(r"(?:^|[\w.]:)(\w+)(?:$| )", child.value)
    return names


# ── The size of the house: what was reached, and 2 % more

TOKENS = {"annotate": 3_600, "ask": 2_500, "bench": 2_850, "data": 3_095, "eval": 3_350,
          "experiments": 7_400, "measures": 8_750, "model": 3_320, "notebooks": 11_300,
          "policy": 3_540, "report": 4_020, "reward_model": 1_920, "runtime": 2_050,
          "sample": 445, "sampling": 3_000, "settings": 2_000, "text2grad": 1_190,
          "tiny": 2_300, "toy": 3_740}
ALL_TOKENS = 70_000                                       # of all Python outside tests
TEST_LINES = 9_400
WORDS = {"README.md": 800, "all": 20_500}


def count_tokens(path: Path) -> int:
    """Code tokens of a file, without comments and docstrings. A string counts one more for
    every 40 characters, so that a page in a string is not free."""
    text = path.read_text("utf-8")
    docs = {node.body[0].lineno for node in ast.walk(ast.parse(text))
            if isinstance(node, (ast.Module, ast.ClassDef, *FUNCTIONS))
            and ast.get_docstring(node, clean=False) is not None}
    free = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
            tokenize.ENDMARKER}
    return sum(1 + len(token.string) // 40 * (token.type == tokenize.STRING)
               for token in tokenize.generate_tokens(io.StringIO(text).readline)
               if token.type not in free
               and not (token.type == tokenize.STRING and token.start[0] in docs))


PAGES = [path for path in (*ROOT.rglob("*.md"), *ROOT.glob("notebooks/*.ipynb"))
         if not any(part[0] == "." or part == "runs" for part in path.relative_to(ROOT).parts)]


def page_text(path: Path) -> str:
    """The text of a page, or of the text cells of a notebook."""
    text = path.read_text("utf-8")
    if path.suffix == ".ipynb":
        return "\n\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"]
                           if cell["cell_type"] == "markdown")
    return text


def sizes() -> dict[str, int]:
    """Room → code tokens; a room is a script, or a folder such as "toy" or "bench"."""
    rooms = Counter()
    for path in (*map(ROOT.joinpath, sources(ROOT)), *ROOT.glob("[bn]*/**/*.py")):
        rooms[path.relative_to(ROOT).parts[0].removesuffix(".py")] += count_tokens(path)
    return rooms


def test_the_house_does_not_grow_without_a_decision():
    assert {path.stem for path in ROOT.glob("*.py")} == TOP
    assert sizes().keys() == TOKENS.keys()
    assert {room: n for room, n in sizes().items() if n > TOKENS[room]} == {}
    assert sum(sizes().values()) <= ALL_TOKENS
    lines = sum(path.read_text("utf-8").count("\n") for path in ROOT.glob("tests/*.py"))
    assert lines <= TEST_LINES
    words_of = {path: len(page_text(path).split()) for path in PAGES}
    assert words_of[ROOT / "README.md"] <= WORDS["README.md"]
    assert sum(words_of.values()) <= WORDS["all"]


# ── The checks: each returns what is wrong

def wrong_imports(root: Path) -> list[str]:
    problems = []
    for file, tree in sources(root).items():
        room = file.split("/")[0].removesuffix(".py")     # toy/build.py → toy, data.py → data
        own = {"toy"} if room == "tiny" else ORDER[: ORDER.index(room) + 1]
        libraries = PACKAGES - {"torch"} if room in NO_TORCH else PACKAGES
        for name, inside in imports(tree):
            lazy = EXCEPT.get(file) == name and (inside or name not in ORDER)
            if not (lazy or name in {*own, *libraries, *sys.stdlib_module_names}):
                problems.append(f"{file} imports {name}")
    return problems


def loose_ends(root: Path) -> list[str]:
    """Ruff's findings: unused or unknown names, wide lines, and (outside tests, benchmarks and
    notebooks) public code without a docstring."""
    places = [place for place in ("tests", "bench", "notebooks") if (root / place).exists()]
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--no-cache",
               "--output-format", "json", "--select", RULES, "--config", "line-length = 96",
               "--config", IGNORED, *sources(root), *places]
    process = subprocess.run(command, capture_output=True, text=True, cwd=root)
    assert process.returncode in (0, 1), process.stderr
    return [f"{fault['code']} {Path(fault['filename']).name}:{fault['location']['row']} "
            f"{fault['message']}" for fault in json.loads(process.stdout)]


def without_caller(root: Path) -> list[str]:
    """Public functions and methods that only they themselves or tests refer to."""
    trees = [*sources(root).values(), *map(ast.parse, cells(root))]
    read = Counter(word for tree in trees for word in words(tree))
    return [f"{file}: {node.name}" for file, tree in sources(root).items()
            for node in ast.walk(tree) if isinstance(node, FUNCTIONS) and node.name[0] != "_"
            and read[node.name] <= words(node).count(node.name)
            and node.name not in CALLED_FOR_US]


def unread_flags(root: Path) -> list[str]:
    """Flags (fields set by flag(…)) that no file reads as an attribute or by name."""
    known = {word for tree in sources(root).values() for word in words(tree)}
    return [f"{file}: --{line.target.id}" for file, tree in sources(root).items()
            for line in ast.walk(tree) if isinstance(line, ast.AnnAssign)
            and isinstance(line.value, ast.Call) and ast.unparse(line.value.func) == "flag"
            and line.target.id not in known]


def docstring(node: ast.AST) -> str:
    return " ".join((ast.get_docstring(node) or "").split())


def public(tree: ast.Module):
    """(definition, docstring of its class) for each public definition of a file."""
    for node in tree.body:
        if isinstance(node, (*FUNCTIONS, ast.ClassDef)) and node.name[0] != "_":
            yield node, ""
            for inner in node.body if isinstance(node, ast.ClassDef) else []:
                if isinstance(inner, FUNCTIONS) and inner.name[0] != "_":
                    yield inner, docstring(node)


def has_tensor(node: ast.AST) -> bool:
    """Whether a Tensor is in a function's signature."""
    if not isinstance(node, FUNCTIONS):
        return False
    signature = f"{ast.unparse(node.args)} -> {node.returns and ast.unparse(node.returns)}"
    return bool(re.search(r"\bTensor\b", signature))


def poor_docstrings(root: Path) -> list[str]:
    """Public docstrings of the core that lack a shape or a place in the paper.

    A function with a Tensor in its signature needs a shape ([B, T], "scalar" or "any shape").
    The file's docstring may name the place.
    """
    problems = []
    for file in CORE & sources(root).keys():
        tree = sources(root)[file]
        for node, class_doc in public(tree):
            if has_tensor(node) and not SHAPE.search(docstring(node) + class_doc):
                problems.append(f"{file}: {node.name} lacks a shape")
            if not PLACE.search(docstring(node) + docstring(tree)):
                problems.append(f"{file}: {node.name} lacks a place in the paper")
    return sorted(problems)


# ── The house as it is

@pytest.mark.parametrize("check", [wrong_imports, loose_ends, without_caller, unread_flags,
                                   poor_docstrings])
def test_nothing_is_wrong(check):
    found = check(ROOT)
    assert not found, "\n".join(found)


def test_the_method_runs_without_all_that_measures_it(tmp_path):
    """The deletion test: a copy without these files runs all phases of Algorithm 1."""
    left_out = ("eval.py", "tiny.py", "measures", "experiments", "bench", "notebooks", "tests",
                "runs", "*.html", ".*", "__pycache__")
    copy = shutil.copytree(ROOT, tmp_path / "copy", ignore=shutil.ignore_patterns(*left_out))
    flags = ["--annotated_rows=120", "--iterations=1", "--batch_size=4", "--minibatch_size=4",
             "--ppo_epochs=1", "--eval_rows=4", "--output_dir=out"]
    process = subprocess.run([sys.executable, "text2grad.py", *flags], cwd=copy, text=True,
                             capture_output=True)
    assert process.returncode == 0, process.stderr[-2000:]
    assert (copy / "out" / "result.json").exists()


# ── The pages: links, commands, and the records of SmolLM2

FLAGS_OF_TORCHRUN = {"nproc_per_node", "nnodes", "rdzv_backend", "rdzv_endpoint"}


def anchors(path: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"(?m)^#+ (.*)$", page_text(path))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def dead_links(path: Path) -> list[str]:
    dead = []
    for link in re.findall(r"\]\(([^)\s]+)\)", page_text(path)):
        file, _, heading = link.partition("#")
        target = path.parent / file if file else path
        if not link.startswith("http") and not (
                target.exists() and (not heading or heading in anchors(target))):
            dead.append(f"{path.name}: {link}")
    return dead


def dead_commands(path: Path) -> list[str]:
    """Scripts, modules, names of experiments and flags in a page that do not exist."""
    files = [*sources(ROOT), *(str(p.relative_to(ROOT)) for p in ROOT.glob("[bn]*/**/*.py"))]
    code = "\n".join((ROOT / file).read_text("utf-8") for file in files)
    flags = {*re.findall(r"(?m)^    (\w+): .*= flag\(", code), *FLAGS_OF_TORCHRUN,
             *re.findall(r'add_argument\(\s*"--(\w+)"', code), "help"}
    text = page_text(path)
    dead = [f"--{flag}" for flag in re.findall(r"(?<![\w-])--(\w+)\b(?!-)", text)
            if flag not in flags]
    for script in re.findall(r"\bpython3? ([\w/]+\.py)", text):
        is_here = any(file == script or file.endswith(f"/{script}") for file in files)
        dead += [] if is_here else [script]
    for module, word in re.findall(r"\bpython3? -m ([\w.]+)(?: ([a-z]\w*))?", text):
        file = module.replace(".", "/")
        if not {f"{file}.py", f"{file}/__init__.py"} & {*files, "pytest.py", "venv.py"}:
            dead.append(module)
        arms = "".join((ROOT / name).read_text("utf-8") for name in files if "experim" in name)
        if word and module.startswith("experim") and not re.search(rf"\b{word}\b", arms):
            dead.append(f"{module} {word}")
    return [f"{path.name}: {name}" for name in dead]


@pytest.mark.parametrize("check", [dead_links, dead_commands])
def test_what_a_page_names_is_there(check, tmp_path):
    dead = [place for path in PAGES for place in check(path)]
    assert not dead, "\n".join(dead)
    (tmp_path / "page.md").write_text(
        "# A\n[b](#a) [c](#b) [d](gone.md) `python gone.py`, `python -m experiments.baselines "
        "nobody --gone 1`, `python eval.py --task toy`")
    assert check(tmp_path / "page.md") == [f"page.md: {name}" for name in (
        ("#b", "gone.md") if check is dead_links else
        ("--gone", "gone.py", "experiments.baselines nobody"))]


def test_the_page_of_smollm2_has_the_figures_and_texts_of_its_records():
    page = ROOT / "notebooks" / "smollm2.md"
    records = [json.loads(line) for line in
               page.with_suffix(".jsonl").read_text("utf-8").splitlines()]
    for record in records[:3]:                                            # those with R_φ
        cells = [record["run"], str(record["seed"])]
        for key, digits in (("fact accuracy", 3), ("repeated facts", 2)):
            before, after = record["before"][key], record["after"][key]
            change = f"{before:.{digits}f} → {after:.{digits}f}"
            cells.append(re.sub(r"\b0\.", ".", change))
        assert f"| {' | '.join(cells)} |" in page_text(page)
    quote, = re.findall(r'(?s)seed 0 is "(.*?)" The', page_text(page))
    assert len(records) == 6
    assert " ".join(quote.split()) in records[0]["responses"]["after"][:10]


# ── A house with faults, so that no check passes because it sees nothing

FAULTY = {
    "data.py": "import torch\nprint(torch)\n",
    "annotate.py": """
import json
import requests
import model
from data import flag

class Config:
    kept: int = flag(1, "")
    handed: int = flag(1, "")
    lost: int = flag(1, "")

def run(config: Config, never):
    unused = requests, model
    return [config.kept, *(getattr(config, name) for name in ("handed",))]

def recursive():
    return recursive()

def lazy():
    from measures import sandbox
    return sandbox
""",
    "model.py": "import bench\nimport tokenizers\nprint(tokenizers, bench, 'annotate:lazy')\n",
    "sampling.py": '''"""B rows (§3.5)."""
from torch import Tensor
def f(x: Tensor):
    """A tensor."""
def g() -> Tensor:
    """[B, T]"""
class Rows:
    """[B]"""
    def h(self, x: Tensor):
        """The shape stands above."""
print(f, g, Rows().h)
''',
    "tests/test_it.py": "from annotate import run\nprint(run)\n",
    "notebooks/1.ipynb": json.dumps({
        "cells": [{"cell_type": "code", "source": ["x = 1\n", "x + " * 24 + "1"],
                   "metadata": {}, "outputs": []}],
        "metadata": {}, "nbformat": 4, "nbformat_minor": 4}),
    "bench/bench.py": "x = 1  # " + 90 * "#" + "\n",
}


def test_every_fault_is_found(tmp_path):
    for name, text in FAULTY.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert sorted(wrong_imports(tmp_path)) == [
        "annotate.py imports measures", "annotate.py imports model",
        "annotate.py imports requests", "data.py imports torch", "model.py imports bench",
        "model.py imports tokenizers"]
    faults = Counter(fault.split()[0] for fault in loose_ends(tmp_path))
    assert faults == {"F401": 1, "F841": 1, "ARG001": 1, "E501": 2, "D100": 3, "D101": 1,
                      "D103": 3}
    assert without_caller(tmp_path) == ["annotate.py: run", "annotate.py: recursive"]
    assert unread_flags(tmp_path) == ["annotate.py: --lost"]
    assert poor_docstrings(tmp_path) == [
        *(f"annotate.py: {name} lacks a place in the paper"
          for name in ("Config", "lazy", "recursive", "run")),
        "sampling.py: f lacks a shape"]
