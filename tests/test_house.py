"""The house: eight scripts and three rooms, imports that run one way, nothing that nobody uses.

ruff looks inside each file: imports, variables, arguments. What it does not do is done here, by
name: a definition or a flag must be read in some file. Each check is shown a house of faults.
"""

import ast
import json
import re
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
from conftest import ROOT

PACKAGES = {"torch", "transformers", "safetensors", "numpy", "openai", "tqdm"}
# Who may import whom, among our own; a room may import its own files too.
BASE = {"data", "sampling", "annotate", "model"}
MAY = {"data": set(), "sampling": {"data"}, "report": {"data"}, "annotate": {"data", "report"},
       "model": {"sampling", "data"}, "toy": BASE, "reward_model": BASE,
       "text2grad": BASE | {"reward_model", "report", "toy"},
       "measures": BASE | {"reward_model", "report", "toy"},
       "eval": BASE | {"reward_model", "report", "toy", "measures", "text2grad"}}
MAY["experiments"] = set(MAY)
TOP = {"annotate", "reward_model", "text2grad", "eval", "model", "sampling", "data", "report"}
# file → what else it imports, and only inside the function that needs it
EXCEPT = {"text2grad.py": "measures", "toy/build.py": "tokenizers"}
NO_TORCH = {"data.py", "report.py", "annotate.py"}            # phase 1 needs none
WIDE = 96
# What libraries call, and no line of ours; bleu of texts is for readers, as sacrebleu has it.
CALLED_FOR_US = {"forward", "backward", "update", "get_seq_length", "bleu"}
# A critic takes (rollouts, model, tokenizer, config), an annotator (row, response).
SIGNATURES = {"experiments/designs.py": "ARG001"}
FUNCTIONS = ast.FunctionDef, ast.AsyncFunctionDef


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


def room(file: str) -> str:
    """toy/build.py → toy, data.py → data"""
    return file.split("/")[0].removesuffix(".py")


def imports(tree: ast.Module):
    """(module, whether inside a function) of every import."""
    inside = {id(n) for f in ast.walk(tree) if isinstance(f, FUNCTIONS) for n in ast.walk(f)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name.split(".")[0], id(node) in inside) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module.split(".")[0], id(node) in inside


def words(node: ast.AST) -> list[str]:
    """Every name that is read: x, a.x, and x in a text such as "toy:x" or in ("x", "y")."""
    found = []
    for one in ast.walk(node):
        if isinstance(one, (ast.Name, ast.Attribute)) and isinstance(one.ctx, ast.Load):
            found.append(one.id if isinstance(one, ast.Name) else one.attr)
        elif isinstance(one, ast.Constant) and isinstance(one.value, str):
            found += re.findall(r"^(?:[\w.]+:)?(\w+)$", one.value)
    return found


# ── The checks: each returns what is wrong

def wrong_imports(root: Path) -> list[str]:
    found = []
    for file, tree in sources(root).items():
        here = room(file)
        for name, inside in imports(tree):
            ours = name in MAY
            fits = name in {here, *MAY[here]} if ours else name in PACKAGES
            fits = fits and not (name == "torch" and file in NO_TORCH)
            lazy = EXCEPT.get(file) == name and (inside or not ours)
            if not (fits or lazy or name in sys.stdlib_module_names):
                found.append(f"{file} imports {name}")
    return found


def loose_ends(root: Path) -> list[str]:
    """Unused imports, variables and arguments, and unknown names, as ruff sees them."""
    ignored = ", ".join(f'"{file}" = ["{rule}"]' for file, rule in SIGNATURES.items())
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--no-cache",
               "--output-format", "json", "--select", "F,ARG001,ARG002,RUF100",
               "--config", "lint.per-file-ignores = {" + ignored + "}", *sources(root)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root)
    assert done.returncode in (0, 1), done.stderr
    return [f"{Path(one['filename']).name}:{one['location']['row']} {one['message']}"
            for one in json.loads(done.stdout)]


def without_caller(root: Path) -> list[str]:
    """Public functions and methods that only they themselves, or tests, read."""
    trees = [*sources(root).values(), *map(ast.parse, cells(root))]
    read = Counter(word for tree in trees for word in words(tree))
    return [f"{file}: {node.name}" for file, tree in sources(root).items()
            for node in ast.walk(tree) if isinstance(node, FUNCTIONS) and node.name[0] != "_"
            and read[node.name] <= words(node).count(node.name)
            and node.name not in CALLED_FOR_US]


def unread_flags(root: Path) -> list[str]:
    """Fields made by flag(…) whose name is read in no file that has their class."""
    found, texts = [], {file: (root / file).read_text("utf-8") for file in sources(root)}
    read = {file: {*words(tree)} for file, tree in sources(root).items()}
    for file, tree in sources(root).items():
        for node in (n for n in tree.body if isinstance(n, ast.ClassDef)):
            flags = [line.target.id for line in node.body if isinstance(line, ast.AnnAssign)
                     and isinstance(line.value, ast.Call)
                     and ast.unparse(line.value.func) == "flag"]
            known = set().union(*(read[other] for other in texts if node.name in texts[other]))
            found += [f"{file}: --{name}" for name in flags if name not in known]
    return found


def wide_lines(root: Path) -> list[str]:
    """Of the scripts, the tests and the notebooks' code."""
    files = [root / file for file in sources(root)]
    files += [path for place in ("tests", "notebooks") for path in (root / place).glob("*.py")]
    texts = {str(path.relative_to(root)): path.read_text("utf-8") for path in files}
    texts |= {f"notebooks, cell {n} of code": text for n, text in enumerate(cells(root), 1)}
    return [f"{file}:{number}" for file, text in sorted(texts.items())
            for number, line in enumerate(text.splitlines(), 1) if len(line) > WIDE]


# ── The house as it is

def test_the_top_level_is_the_eight_scripts():
    assert {path.stem for path in ROOT.glob("*.py")} == TOP


@pytest.mark.parametrize("check", [wrong_imports, loose_ends, without_caller, unread_flags,
                                   wide_lines])
def test_nothing_is_wrong(check):
    found = check(ROOT)
    assert not found, "\n".join(found)


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
    "model.py": "import tokenizers\nprint(tokenizers, 'annotate:lazy')" + 90 * "#" + "\n",
    "tests/test_it.py": "from annotate import run\nprint(run)\n",
}


def test_every_fault_is_found(tmp_path):
    for name, text in FAULTY.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert sorted(wrong_imports(tmp_path)) == [
        "annotate.py imports measures", "annotate.py imports model",
        "annotate.py imports requests", "data.py imports torch", "model.py imports tokenizers"]
    found = "\n".join(loose_ends(tmp_path))
    assert all(fault in found for fault in ("json", "never", "unused"))
    assert found.count("\n") == 2
    assert without_caller(tmp_path) == ["annotate.py: run", "annotate.py: recursive"]
    assert unread_flags(tmp_path) == ["annotate.py: --lost"]
    (tmp_path / "notebooks").mkdir()
    page = {"cells": [{"cell_type": "code", "source": ["x = 1\n", "#" * 97]}]}
    (tmp_path / "notebooks" / "1.ipynb").write_text(json.dumps(page))
    assert wide_lines(tmp_path) == ["model.py:2", "notebooks, cell 1 of code:2"]
