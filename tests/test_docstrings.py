"""What is public says what a reader of the paper asks: what it is, its shapes, its place there.

The scripts are read, not run. Every public function, class and method has a docstring; where a
Tensor goes in or comes out of the core, a shape stands in it ([B, T], "scalar" or "any shape"),
its letters explained in the file's docstring; a place in the paper stands in the function's
docstring, or for helpers in the file's, in a line "Paper: …" or beside the algorithm it is.
"""

import ast
import re

import pytest
from conftest import ROOT

CORE = ("annotate", "reward_model", "text2grad", "model", "sampling", "data")
FILES = [*ROOT.glob("*.py"), *(path for room in ("toy", "measures", "experiments")
                               for path in (ROOT / room).glob("*.py"))]
FUNCTIONS = ast.FunctionDef, ast.AsyncFunctionDef
PLACE = re.compile(r"§\d|Alg\. \d|Algorithms? \d|Tables? \d|Figures? \d|Appendi|Definition 1")
SHAPE = re.compile(r"\[((?:\.\.\.|…|\w)(?:, ?\w[\w ]*)*)\]|\bscalars?\b|\bany shape\b", re.I)


def doc_of(node) -> str:
    return " ".join((ast.get_docstring(node) or "").split())


def public(tree):
    """(name, node, docstring of the class around it) of public functions, classes, methods."""
    for node in tree.body:
        if isinstance(node, (*FUNCTIONS, ast.ClassDef)) and node.name[0] != "_":
            yield node.name, node, ""
            for inner in node.body if isinstance(node, ast.ClassDef) else []:
                if isinstance(inner, FUNCTIONS) and inner.name[0] != "_":
                    yield f"{node.name}.{inner.name}", inner, doc_of(node)


def has_tensor(node) -> bool:
    """Whether a Tensor is in a function's signature."""
    if not isinstance(node, FUNCTIONS):
        return False
    arguments = [*node.args.args, *node.args.kwonlyargs]
    notes = [node.returns, *(argument.annotation for argument in arguments)]
    return any(note and re.search(r"\bTensor\b", ast.unparse(note)) for note in notes)


def failures(source: str, core: bool) -> list[str]:
    """What the docstrings of a file lack, as "line name: what"."""
    tree, found, letters = ast.parse(source), [], set()
    module = ast.get_docstring(tree) or ""
    found += ["1 file: no docstring"] * (not module)
    for name, node, around in public(tree):
        own, lacks = doc_of(node), []
        shapes = [match for match in SHAPE.finditer(f"{own} {around}")]
        if not own:
            lacks.append("a docstring")
        elif core:
            letters |= {x for m in shapes for x in re.findall(r"\b[A-Z]\b", m[1] or "")}
            lacks += ["a shape"] * (has_tensor(node) and not shapes)
        lacks += ["a place in the paper"] * (core and not PLACE.search(own + module))
        found += [f"{node.lineno} {name} lacks {what}" for what in lacks]
    found += [f"1 file: the letter {x} of a shape is not explained" for x in sorted(letters)
              if not re.search(rf"\b{x} [a-z]", module)]
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_every_public_docstring_is_there_with_shapes_and_the_place_in_the_paper(path):
    core = path.parent == ROOT and path.stem in CORE
    found = failures(path.read_text("utf-8"), core)
    assert not found, "\n".join(f"{path.name}:{line}" for line in found)


GOOD = '"""A file (§3.5). B rows."""\ndef f(x: Tensor):\n    """[B] → scalar"""\n'


@pytest.mark.parametrize("before, after, lack", [
    ('    """[B] → scalar"""', "    return x", "2 f lacks a docstring"),
    ("[B] → scalar", "A tensor.", "2 f lacks a shape"),
    ("[B] → scalar", "[B, Q] → scalar", "1 file: the letter Q of a shape is not explained"),
    ("§3.5", "nowhere", "2 f lacks a place in the paper"),
    ("def f(", "class C:\n  def f(", "2 C lacks a docstring")])
def test_a_docstring_that_lacks_something_is_found(before, after, lack):
    assert failures(GOOD, core=True) == [] and before in GOOD
    source = GOOD.replace(before, after)
    assert lack in failures(source.replace('    """[B]', '      """[B]') if "class" in after
                            else source, core=True)
