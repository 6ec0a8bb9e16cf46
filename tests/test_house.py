"""The house: nothing that nobody uses, imports that run one way, files of a size that can be read.

    python -m pytest tests/test_house.py

ruff looks inside each file: imports, variables, parameters. What it does not do is done here: definitions and flags are
followed by name from the file that has them to the files that read them. Each check is shown a house with the fault.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

from conftest import ROOT

PACKAGES = {"torch", "transformers", "safetensors", "numpy", "openai", "tqdm"}
MAY_IMPORT = {"toy.build": {"tokenizers"}}      # comes with transformers; only who makes the toy base again needs it
# Each script imports only what stands before it.
ORDER = ["report", "measures", "measures.sandbox", "parts", "offsets", "endpoint", "logprobs", "checkpoints",
         "sampling", "model", "measures.people", "ranks", "tasks", "measures.audit", "annotate", "measures.spans", "toy",
         "toy.build", "measures.metrics", "measures.benchmarks", "measures.judge", "reward_model", "experiments",
         "experiments.designs", "eval", "runs", "text2grad", "experiments.baselines", "experiments.trials",
         "experiments.studies"]
PASS_ON = {"annotate", "model"}                 # readers import a phase's names from here, wherever they are defined
FOR_READERS = {                                 # no script needs these; each is there to be called by a reader
    "measures.metrics.bleu": "corpus BLEU of texts, as sacrebleu has it; eval.py resamples its counts",
    "text2grad.nl_gradient_loss": "Definition 1, which PPO takes the place of in Algorithm 4",
    "measures.spans.confidences": "how sure R_φ is of each sentence and quote, for notebook 4",
    "measures.metrics.calibration": "whether it is right as often, for notebook 4",
}
FOR_LIBRARIES = {                               # no script calls these
    "sampling.StaticCache.get_seq_length": "some of transformers' models, such as OPT and Bloom, ask every cache",
}
FUNCTIONS = ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda
LINES, LINES_OF_THE_METHOD = 800, 2400


# ── Reading the sources ─────────────────────────────────────────────────────────────────────────────────

def rooms(root: Path) -> list[Path]:
    """The files of the rooms."""
    return [path for room in ("toy", "measures", "experiments") for path in root.glob(f"{room}/*.py")]


def scripts(root: Path) -> dict[str, ast.Module]:
    """Module name → its tree, of the top-level scripts and the rooms."""
    places = {".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): path
              for path in [*root.glob("*.py"), *rooms(root)]}
    return {name: ast.parse(path.read_text("utf-8")) for name, path in places.items()}


def readers(root: Path) -> dict[str, ast.Module]:
    """The tests and the notebooks."""
    code = {path.name: path.read_text("utf-8") for path in [*root.glob("tests/*.py"), *root.glob("notebooks/*.py")]}
    for path in root.glob("notebooks/*.ipynb"):
        cells = [cell for cell in json.loads(path.read_text("utf-8"))["cells"] if cell["cell_type"] == "code"]
        code[path.name] = "\n".join("".join(cell["source"]) for cell in cells)
    return {name: ast.parse(text) for name, text in code.items()}


@cache
def imported(tree: ast.AST) -> dict[str, tuple[str, str]]:
    """Local name → (module, name in it, or "" for the module itself), at any level of indentation."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.asname or alias.name.split(".")[0]: (alias.name, "") for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {alias.asname or alias.name: (node.module, alias.name) for alias in node.names}
    return found


@cache
def defined(tree: ast.Module) -> dict[str, ast.AST]:
    """Function, class or constant of a module → the statement that makes it."""
    found = {}
    for node in tree.body:
        if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            found[node.name] = node
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                found |= {leaf.id: node for leaf in ast.walk(target) if isinstance(leaf, ast.Name)}
    return found


def attributes(trees) -> set[str]:
    """Every name that is read as something.name."""
    return {node.attr for tree in trees for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)}


def listed(node: ast.AST) -> set:
    """What stands in tuples and lists, such as the names that a loop hands to getattr."""
    return {one.value for group in ast.walk(node) if isinstance(group, (ast.Tuple, ast.List))
            for one in group.elts if isinstance(one, ast.Constant)}


# ── The checks: each returns what is wrong ──────────────────────────────────────────────────────────────

def loose_ends(root: Path) -> list[str]:
    """Unused imports, variables and parameters, and names that are not there, as ruff finds them; statements that
    nothing reaches. A module of PASS_ON may import what somebody imports from it."""
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--no-cache", "--output-format", "json",
               "--select", "F,ARG,RUF100", *map(str, [*root.glob("*.py"), *rooms(root)])]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stderr
    wanted = {place for tree in (scripts(root) | readers(root)).values() for place in imported(tree).values()}
    found = []
    for one in json.loads(done.stdout):
        module, quoted = Path(one["filename"]).stem, one["message"].split("`")      # `tasks.TASKS` imported but …
        passed_on = one["code"] == "F401" and (module, quoted[1].split(".")[-1]) in wanted
        if not (passed_on and module in PASS_ON):
            found.append(f"{module}, line {one['location']['row']}: {one['message']}")
    for module, tree in scripts(root).items():
        blocks = [block for node in ast.walk(tree) for _, block in ast.iter_fields(node) if isinstance(block, list)]
        found += [f"{module}, line {after.lineno}: nothing reaches it" for block in blocks
                  for before, after in zip(block, block[1:])
                  if isinstance(before, (ast.Return, ast.Raise, ast.Continue, ast.Break))]
    return found


def origin(module: str, name: str, house: dict) -> str:
    """"module.name" where a name that is imported from a module is defined, through those that pass it on."""
    while module in house and name not in defined(house[module]) and name in imported(house[module]):
        module, name = imported(house[module])[name]
    return f"{module}.{name}"


def used(module: str, tree: ast.Module, house: dict) -> set[str]:
    """"module.name" of everything of ours that a file uses; a definition's use of itself does not count."""
    known, own = imported(tree), defined(tree) if module in house else {}
    texts = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    found = {text.replace(":", ".") for text in texts if text.count(":") == 1}                    # toy:critique
    for top in tree.body:
        itself = {f"{module}.{name}" for name, node in own.items() if node is top}
        for node in ast.walk(top):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                place = f"{module}.{node.id}" if node.id in own else origin(*known.get(node.id, ("", "")), house)
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                place = origin(".".join(filter(None, known.get(node.value.id, ("", "")))), node.attr, house)
            else:
                continue
            found |= {place} - itself
    return found


def without_caller(root: Path) -> tuple[set[str], set[str]]:
    """Module-level names that nothing uses, and those that only tests and notebooks use."""
    house = scripts(root)
    ours = set().union(*(used(module, tree, house) for module, tree in house.items()))
    theirs = set().union(*(used(module, tree, house) for module, tree in readers(root).items()))
    names = {f"{module}.{name}" for module, tree in house.items() for name in defined(tree)}
    return names - ours - theirs, (names & theirs) - ours


def unread_members(root: Path) -> set[str]:
    """Methods, fields and attributes of self that no script reads; a field may be read by its name in a list."""
    house, found = scripts(root), set()
    read = attributes(house.values())
    for module, tree in house.items():
        said = listed(tree)
        for one in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
            methods = {node.name for node in one.body if isinstance(node, FUNCTIONS) and node.name[:2] != "__"}
            fields = {node.target.id for node in one.body if isinstance(node, ast.AnnAssign)}
            fields |= {node.attr for node in ast.walk(one) if isinstance(node, ast.Attribute)
                       and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"}
            found |= {f"{module}.{one.name}.{name}" for name in (methods | fields - said) - read}
    return found


def unread_flags(root: Path) -> list[str]:
    """Flags, made by `flag(…)` or add_argument, that nothing reads.

    Read means config.name where config is annotated with the flag's class or a relative of it, or has no annotation; or
    the name in a list, in a function that hands flags on with getattr; one that raises is a check of them and no use.
    """
    house = scripts(root)
    parents, flags, found = {}, {}, []
    read: dict[str | None, set[str]] = defaultdict(set)        # class of the variable, None if it has none → names

    def visit(node, types):
        if isinstance(node, FUNCTIONS):
            types = types | {arg.arg: arg.annotation and ast.unparse(arg.annotation).split(".")[-1] for arg in
                             [*node.args.args, *node.args.kwonlyargs] if arg.arg != "self"}
            inside = [*ast.walk(node)]
            if any(isinstance(call, ast.Call) and ast.unparse(call.func) == "getattr" and
                   not isinstance(call.args[1], ast.Constant) for call in inside) and \
                    not any(isinstance(other, ast.Raise) for other in inside):
                for kind in {*filter(None, types.values())} or {None}:
                    read[kind] |= listed(node)
        elif isinstance(node, ast.ClassDef):
            parents[node.name] = [ast.unparse(base).split(".")[-1] for base in node.bases]
            types = types | {"self": node.name}
            flags[node.name] = [line.target.id for line in node.body if isinstance(line, ast.AnnAssign)
                                and isinstance(line.value, ast.Call) and ast.unparse(line.value.func) == "flag"]
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            read[types.get(node.value.id) if isinstance(node.value, ast.Name) else None].add(node.attr)
        for child in ast.iter_child_nodes(node):
            visit(child, types)

    family = lambda name: {name}.union(*map(family, parents.get(name, [])))
    for module, tree in house.items():
        visit(tree, {})
        found += [f"{module}: {call.args[0].value}" for call in ast.walk(tree)
                  if isinstance(call, ast.Call) and ast.unparse(call.func).endswith(".add_argument")
                  and call.args[0].value.lstrip("-") not in attributes([tree])]
    for name, fields in flags.items():
        relatives = {None, *(other for other in parents if name in family(other) or other in family(name))}
        found += [f"{name}.{field}" for field in fields if not any(field in read[kind] for kind in relatives)]
    return found


def wrong_imports(root: Path) -> list[str]:
    """Imports, at any level of indentation, of what is neither ours and earlier in ORDER, nor of the six packages."""
    house, found = scripts(root), []
    for module, tree in house.items():
        if module not in ORDER:
            found.append(f"{module}: it has no place in ORDER")
            continue
        before = {*ORDER[: ORDER.index(module)]}
        may = PACKAGES | MAY_IMPORT.get(module, set()) | sys.stdlib_module_names
        found += [f"{module} imports {other}" for other in sorted({other for other, _ in imported(tree).values()})
                  if other not in before and (other in ORDER or other.split(".")[0] not in may)]
    return found


def reaches(module: str, house: dict) -> set[str]:
    """Everything that a script imports, itself or through others of ours."""
    found, ahead = set(), [module]
    while ahead:
        new = {other for other, _ in imported(house[ahead.pop()]).values()} - found
        found, ahead = found | new, ahead + [other for other in new if other in house]
    return found


# ── The house as it is ──────────────────────────────────────────────────────────────────────────────────

def test_no_loose_ends():
    found = loose_ends(ROOT)
    assert not found, "\n".join(found)


def test_every_function_class_and_constant_has_a_use():
    """What only tests and notebooks use is in FOR_READERS, and nothing else is."""
    unused, by_readers = without_caller(ROOT)
    assert not unused, f"nothing uses {unused}"
    assert by_readers == FOR_READERS.keys(), f"only tests and notebooks use {by_readers - FOR_READERS.keys()}"


def test_every_member_of_a_class_is_read():
    """What only a library calls is in FOR_LIBRARIES, and nothing else is."""
    assert (found := unread_members(ROOT)) == FOR_LIBRARIES.keys(), f"nothing reads {found - FOR_LIBRARIES.keys()}"


def test_every_flag_is_read():
    found = unread_flags(ROOT)
    assert not found, "\n".join(found)


def test_imports_run_one_way():
    found = wrong_imports(ROOT)
    assert not found, "\n".join(found)


def test_annotate_and_model_know_nothing_of_each_other():
    house = scripts(ROOT)
    assert "model" not in reaches("annotate", house) and "annotate" not in reaches("model", house)
    assert not any(name.split(".")[0] == "torch" for name in reaches("annotate", house)), "phase 1 needs no torch"


def test_a_reader_gets_through():
    lines = {path.stem: path.read_text("utf-8").count("\n") for path in [*ROOT.glob("*.py"), *rooms(ROOT)]}
    assert {name: n for name, n in lines.items() if n > LINES} == {}
    assert sum(lines[name] for name in ("annotate", "model", "reward_model", "text2grad")) <= LINES_OF_THE_METHOD


# ── A house with faults, so that no check passes because it sees nothing ────────────────────────────────

FAULTY = {
    "model.py": "from parts import help_out, nobody_wants\nimport torch\n\ndef load():\n    return torch\n",
    "parts.py": "def help_out():\n    return help_out\n\ndef nobody_wants():\n    return 1\n\nLEFT = 3\n",
    "tasks.py": "def flag(default, text):\n    return default, text\n",
    "annotate.py": """
import json
import requests
import model
from tasks import flag

class Config:
    kept: int = flag(1, "")
    handed: int = flag(1, "")
    other: int = flag(1, "")
    lost: int = flag(1, "")
    PRESETS = {"lost": 1}

class Pair:
    lost: int = 0
    first: int = 0

    def method(self):
        self.extra = self.lost

def run(config: Config, pair: Pair, never):
    unused = requests, f"x"
    return config.kept + pair.lost + model.load()
    print(unseen)

def hand_on(config: Config):
    return [getattr(config, name) for name in ("handed",)]

def check(config: Config):
    for name in ("lost",):
        if getattr(config, name) < 0:
            raise ValueError(name)

def typed(pair: Pair):
    return pair.other
""",
    "tests/test_parts.py": "from model import help_out\nfrom annotate import Config, check, hand_on, run, typed\n"
                           "print(help_out(), run(Config()), hand_on, check, typed)\n",
}


@pytest.fixture()
def faulty(tmp_path):
    """A root with a fault for every check."""
    for name, text in FAULTY.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_loose_ends_are_found(faulty):
    """help_out may pass through model, since a test takes it from there; nobody_wants may not."""
    found = "\n".join(loose_ends(faulty))
    for fault in ("nobody_wants", "json", "never", "unused", "unseen", "f-string", "nothing reaches it"):
        assert fault in found, fault
    assert "help_out" not in found and found.count("\n") == 6


def test_what_has_no_caller_is_found(faulty):
    """A function that only calls itself has none; one that is passed on by a module has its caller's."""
    unused, by_readers = without_caller(faulty)
    assert unused == {"parts.nobody_wants", "parts.LEFT"}
    assert by_readers == {"parts.help_out", "annotate.run", "annotate.hand_on", "annotate.check", "annotate.typed"}


def test_unread_members_and_flags_are_found(faulty):
    """`lost` and `other` are read of a Pair and not of the Config whose flags they are; a check is no use."""
    assert unread_members(faulty) == {"annotate.Pair.extra", "annotate.Pair.first", "annotate.Pair.method"}
    assert unread_flags(faulty) == ["Config.other", "Config.lost"]
    (faulty / "tasks.py").write_text("p.add_argument('--depth')\np.add_argument('--width')\nprint(p.width)\n")
    assert unread_flags(faulty)[0] == "tasks: --depth"


def test_wrong_imports_are_found(faulty):
    (faulty / "newcomer.py").write_text("")
    assert sorted(wrong_imports(faulty)) == ["annotate imports requests", "newcomer: it has no place in ORDER"]
    (faulty / "parts.py").write_text("def f():\n    import tasks\n    import tokenizers")
    assert {"parts imports tasks", "parts imports tokenizers"} <= {*wrong_imports(faulty)}
    assert {"model", "torch"} <= reaches("annotate", scripts(faulty))
