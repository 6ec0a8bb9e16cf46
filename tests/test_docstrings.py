"""What is public says what a reader of the paper asks of it: shapes, units, the errors that it raises, its place there.

The scripts are read, not run. A docstring is held to five rules, and the failures come all at once:

    1. it is there
    2. a Tensor, in or out, has its shape: [B, T], [..., H], "scalar" or "any shape", its letters explained in the file
    3. each error that the function raises is named, also where a private helper or a nested function raises it
    4. a quantity (a timeout, a price, KL, …) has its unit, in the docstring, the flag's help or the field's comment
    5. the place in the paper: in the function's own docstring where it is the method, else in a line of the file's
       docstring, "Paper: …"
"""

import ast
import builtins
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FILES = sorted([*ROOT.glob("*.py"), *(path for room in ("toy", "measures", "experiments") for path in (ROOT / room).glob("*.py"))])

# What has a unit, by name: parameters, fields of dataclasses, and functions that return it.
UNITS = {
    r"(\w+_)?timeout|batch_poll|poll|seconds|minutes|retry_after|timed": "seconds or minutes",
    r"\w+_mb": "MB or MiB",
    r"\w+_per_minute": "minute",
    r"(max_)?usd|cost|worst|Prices\.of": "USD",
    r"price_(in|out)|Prices": "USD per million",
    r"(\w+_)?tokens|reply_limit|context_length|token_counter|span_length": "tokens",
    r"characters|offsets|token_offsets": "characters",
    r"kl|kl_target|token_kl|logprobs|logprobs_old|entropy|token_logprobs|sequence_logprobs|choice_logprobs": "nats",
    r"z_loss|held_out_loss|train_reward_model|fit_adapter|perplexity": "nats",
    r"copy_bandwidth|(\w+_)?bytes(_\w+)?|bandwidth": "bytes",
    r"(kl_)?horizon": "rollouts",
}
TENSORS = {"hidden", "ref_hidden", "uniforms", "prompt_mask", "logprobs", "logprobs_old"}   # also where not annotated

# The method itself, to the line: what each of these docstrings must hold.
PLACES = {
    "annotate.py": {
        "Feedback": "(c, A(y))", "Feedback.text": "§3.4", "parse_feedback": "Alg. 2 l.13", "parse_labels": "Table 11",
        "parse_steps": "Appendix N", "Span": "Alg. 2 l.16–17", "ground": "Appendix L", "token_rewards": "Alg. 2 l.15–27",
        "conflicting_tokens": "Alg. 2 l.16–25", "annotate": "Alg. 1 l.7–11", "ask_missing": "Alg. 1 l.7–8",
        "feedback_row": "Alg. 1 l.9–10"},
    "offsets.py": {"token_offsets": "Appendix L"},
    "tasks.py": {"annotation_messages": "Appendix B", "reward_prompt": "§3.4"},
    "reward_model.py": {
        "encode_rows": "§3.4", "z_loss": "Alg. 3 l.5–6", "train_reward_model": "Alg. 3 l.7", "fit": "Alg. 3",
        "judge": "Alg. 4 l.13", "write_critiques": "Alg. 4 l.12", "held_out_loss": "Alg. 3 l.6", "judge_rows": "Table 1"},
    "model.py": {"response_hidden": "Alg. 4 l.22", "ValueHead": "Alg. 4 l.5"},
    "logprobs.py": {"token_logprobs": "Alg. 4 l.22, 25", "token_kl": "Alg. 4 l.14"},
    "sampling.py": {"generate": "Alg. 4 l.11"},
    "designs.py": {
        "verdicts": "Alg. 4 l.12–13", "at_end": "Appendix A", "score_rewards": "Appendix N"},
    "parts.py": {"span_weights": "Table 11", "step_spans": "Appendix N", "statement_spans": "Appendix N"},
    "text2grad.py": {
        "nl_gradient_loss": "Definition 1", "gae": "Alg. 4 l.16", "discounted_returns": "Alg. 4 l.24",
        "ppo_loss": "Alg. 4 l.22–23, 27", "value_loss": "Alg. 4 l.24, 28", "Rollouts": "Alg. 4 l.8",
        "sample": "Alg. 4 l.11", "sample_rollouts": "Alg. 4 l.9–11", "add_feedback": "Alg. 4 l.12–13",
        "add_scores": "Alg. 4 l.14, 16, 22", "add_advantages": "Alg. 4 l.14–16", "ppo_update": "Alg. 4 l.19–32",
        "minibatch_loss": "Alg. 4 l.21–28", "one_iteration": "Alg. 4 l.7–32", "policy_phase": "Alg. 4 l.6–33",
        "respond": "Alg. 1 l.6", "annotate_phase": "Alg. 1 l.4–11", "reward_phase": "Alg. 1 l.13–14",
        "optimise": "Alg. 1 l.16–19", "main": "Algorithm 1"},
    "metrics.py": {"pass_at_k": "Table 3", "rouge": "Table 2", "bleu": "Table 2", "bert_score": "Table 2",
                   "perplexity": "Table 8"},
    "spans.py": {"overlaps": "Appendix C", "compare": "Tables 1, 6, 7 and 16", "figures": "Tables 1, 6, 7 and 16"},
    "audit.py": {"span_accuracy": "Table 19", "quartiles": "Tables 18 and 19"},
    "baselines.py": {"dpo_loss": "Appendix N", "bradley_terry_loss": "Appendix N", "step_loss": "Appendix N"},
}

# A place in the paper; a shape.
PLACE = re.compile(r"§\d|Alg\. \d|Algorithms? \d|Tables? \d|Figures? \d|Appendi(x|ces) [A-O]|Definition 1")
SHAPE = re.compile(r"(?<![\w\])])\[((?:\.\.\.|…|[A-Za-z](?:[\w ]*\w)?|\d+)(?:, (?:[A-Za-z](?:[\w ]*\w)?|\d+))*)\]")
# The paper as it is: what a place may name.
ALGORITHM_LINES = {1: 19, 2: 29, 3: 9, 4: 34}
SECTIONS = {"1", "2", "3", "4", "5", *(f"3.{i}" for i in range(1, 7)), *(f"4.{i}" for i in range(1, 8))}
MOST = {"Table": 19, "Figure": 6}
PARTS = {"B": 3, "D": 2, "E": 3, "F": 2, "I": 1, "M": 1}        # of the appendices


# ── Reading a file ──────────────────────────────────────────────────────────────────────────────────────

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def public(tree: ast.Module):
    """(name, node, the class around it or None) of every public function, class and method."""
    for node in tree.body:
        if isinstance(node, (*FUNCTIONS, ast.ClassDef)) and not node.name.startswith("_"):
            yield node.name, node, None
            if isinstance(node, ast.ClassDef):
                for inner in node.body:
                    if isinstance(inner, FUNCTIONS) and not inner.name.startswith("_"):
                        yield f"{node.name}.{inner.name}", inner, node


def parameters(function) -> list[ast.arg]:
    a = function.args
    return [p for p in (*a.posonlyargs, *a.args, a.vararg, *a.kwonlyargs, a.kwarg) if p and p.arg not in ("self", "cls")]


def holds_tensor(annotation) -> bool:
    return annotation is not None and re.search(r"\b(Tensor|Parameter)\b", ast.unparse(annotation)) is not None


def doc_of(node) -> str:
    return " ".join((node and ast.get_docstring(node) or "").split())


def fields(node: ast.ClassDef, lines: list[str]):
    """(field, its own words: the help of a flag and the comment on its line) of a class."""
    for field in node.body:
        if isinstance(field, ast.AnnAssign):
            helps = [c.value for c in ast.walk(field) if isinstance(c, ast.Constant) and isinstance(c.value, str)]
            yield field, " ".join([*helps, *re.findall(r"#.*", lines[field.end_lineno - 1])])


# ── The rules: each yields what is missing ──────────────────────────────────────────────────────────────

def shape_failures(node, own: str, around: str, lines: list[str]):
    has_shape = lambda text: (any(re.search(r"\b[A-Za-z]\b|\.\.\.|…", shape) for shape in SHAPE.findall(text))
                              or re.search(r"\bscalars?\b|\bany shape\b", text, re.I))
    if isinstance(node, ast.ClassDef):
        for field, words in fields(node, lines):
            if holds_tensor(field.annotation) and not has_shape(own + words):
                yield f"the shape of {field.target.id} is missing"
        return
    into = [p.arg for p in parameters(node) if holds_tensor(p.annotation) or p.arg in TENSORS]
    if (into or holds_tensor(node.returns)) and not has_shape(own + around):
        yield f"the shape of {', '.join(into) or 'what it returns'} is missing"
    elif into and holds_tensor(node.returns) and not re.search("→|any shape", own + around, re.I):
        yield "the shape of what it returns, after an arrow →, is missing"


def unexplained_letters(tree: ast.Module, lines: list[str]) -> list[str]:
    """Letters of shapes that the docstring of the file does not explain ("N tokens", "H hidden size")."""
    said = [ast.get_docstring(node) or "" for _, node, _ in public(tree)]
    said += [words for _, node, _ in public(tree) if isinstance(node, ast.ClassDef) for _, words in fields(node, lines)]
    letters = {letter for text in said for shape in SHAPE.findall(" ".join(text.split()))
               for letter in re.findall(r"\b[A-Za-z]\b", shape)}
    return sorted(letter for letter in letters if not re.search(rf"(?<![\w.]){letter} [a-z]", doc_of(tree)))


def ancestors(name: str, bases: dict[str, list[str]]) -> set[str]:
    """An exception's name and those of its bases, ours by `bases` and Python's own."""
    own = getattr(builtins, name, None)
    known = {c.__name__ for c in own.__mro__} if isinstance(own, type) else {name, "Exception"}
    return known.union(*(ancestors(base, bases) for base in bases.get(name, [])))


def raised(nodes, helpers: dict, bases: dict, caught=frozenset(), seen=()) -> set[str]:
    """Names of the exceptions that leave these statements, private helpers of the module followed."""
    found = set()
    for node in nodes:
        if isinstance(node, ast.Try):
            handled = {n.id if isinstance(n, ast.Name) else n.attr for h in node.handlers if h.type is not None
                       and not any(isinstance(x, ast.Raise) and x.exc is None for x in ast.walk(h))
                       for n in ast.walk(h.type) if isinstance(n, (ast.Name, ast.Attribute))}
            found |= raised(node.body, helpers, bases, caught | handled, seen)
            found |= raised([*node.handlers, *node.orelse, *node.finalbody], helpers, bases, caught, seen)
            continue
        if isinstance(node, ast.Raise) and node.exc is not None:
            what = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
            names = {n.id if isinstance(n, ast.Name) else n.attr for n in ast.walk(what)
                     if isinstance(n, (ast.Name, ast.Attribute))}
            found |= {n for n in names if n[0].isupper() and not ancestors(n, bases) & caught}
        name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else None
        if name in helpers and name not in seen:
            found |= raised([helpers[name]], helpers, bases, caught, (*seen, name))
        found |= raised(ast.iter_child_nodes(node), helpers, bases, caught, seen)
    return found


def error_failures(node, own: str, tree: ast.Module, around, bases):
    helpers = {n.name: n for scope in (tree, around) if scope for n in scope.body
               if isinstance(n, FUNCTIONS) and n.name.startswith("_") and not n.name.startswith("__")}
    body = [node]
    if isinstance(node, ast.ClassDef):            # of a class, what making one raises
        helpers |= {n.name: n for n in node.body if isinstance(n, FUNCTIONS) and re.match("_[^_]", n.name)}
        body = [n for n in node.body if isinstance(n, FUNCTIONS) and n.name in ("__init__", "__post_init__", "__enter__")]
    for name in sorted(raised(body, helpers, bases)):
        if not re.search(rf"\b{name}\b", own):
            yield f"the error {name} is missing"


def unit_failures(name: str, node, own: str, around: str, lines: list[str]):
    if isinstance(node, ast.ClassDef):
        quantities = [(field.target.id, f"{own} {words}") for field, words in fields(node, lines)] + [(name, own)]
    else:
        quantities = [(p.arg, f"{own} {around}") for p in parameters(node)] + [(name, own), (name.split(".")[-1], own)]
    for quantity, words in dict(quantities).items():
        for pattern, units in UNITS.items():
            if re.fullmatch(pattern, quantity) and not any(
                    re.search(rf"\b{unit.rstrip('s')}s?\b", words, re.I) for unit in units.split(" or ")):
                yield f"the unit of {quantity}, {units}, is missing"


def wrong_places(text: str):
    """Places that the paper does not have, as it has §1–5, Algorithms 1–4 with so many lines, 19 tables and 6 figures."""
    text = re.sub(r"et al\.[^)]*", "", text)
    for section in re.findall(r"§(\d(?:\.\d)*)", text):
        if section not in SECTIONS:
            yield f"§{section} is not in the paper"
    for number, lines in re.findall(r"Alg\. (\d)(?:,? l\.([\d–, ]*\d))?", text):
        for line in re.findall(r"\d+", lines):
            if not 1 <= int(line) <= ALGORITHM_LINES.get(int(number), 0):
                yield f"Alg. {number} has no line {line}"
    for letter, part in re.findall(r"Appendix ([A-Z])(?:\.(\d))?\b", text):
        if letter > "O" or int(part or 0) > PARTS.get(letter, 0):
            yield f"Appendix {letter}.{part} is not in the paper"
    for kind, numbers in re.findall(r"(Table|Figure)s? ((?:\d+(?:, | and | to )?)+)", text):
        for number in re.findall(r"\d+", numbers):
            if not 1 <= int(number) <= MOST[kind]:
                yield f"{kind} {number} is not in the paper"


def place_failures(name: str, own: str, module: str, wanted: dict[str, str]):
    yield from wrong_places(own)
    if name in wanted and wanted[name] not in own:
        yield f"the paper's place, {wanted[name]}, is missing"
    elif not PLACE.search(own) and not re.search(r"^Paper: \S", module, re.MULTILINE):
        yield "the paper's place is missing, here or in a line \"Paper: …\" of the file's docstring"


def failures(file: str, source: str, wanted: dict[str, str], bases: dict[str, list[str]]) -> list[str]:
    """Everything that is missing in a file, as "file.py:line function: what"."""
    tree, lines = ast.parse(source), source.splitlines()
    module, out, names = ast.get_docstring(tree) or "", [], set()
    for name, node, around in public(tree):
        own, outer = doc_of(node), doc_of(around)
        names.add(name)
        found = ["a docstring is missing"] if not own else [
            *shape_failures(node, own, outer, lines), *error_failures(node, own, tree, around, bases),
            *unit_failures(name, node, own, outer, lines), *place_failures(name, own, module, wanted)]
        out += [f"{file}:{node.lineno} {name}: {what}" for what in found]
    found = [f"the letter {x} of a shape is not explained" for x in unexplained_letters(tree, lines)]
    found += [*wrong_places(module), *(f"no public {name}, which PLACES lists" for name in sorted(wanted.keys() - names))]
    return out + [f"{file}:1 the file's docstring: {what}" for what in found]


def bases_of(sources) -> dict[str, list[str]]:
    return {node.name: [ast.unparse(b).rpartition(".")[2] for b in node.bases] for source in sources
            for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)}


# ── The tests ───────────────────────────────────────────────────────────────────────────────────────────

def test_every_public_docstring_says_shapes_errors_units_and_the_place_in_the_paper():
    sources = {str(path.relative_to(ROOT)): path.read_text("utf-8") for path in FILES}
    bases = bases_of(sources.values())
    found = [line for file, source in sources.items() for line in failures(file, source, PLACES.get(file, {}), bases)]
    assert not found, f"{len(found)} docstrings to mend:\n" + "\n".join(found)
    assert sum(len(list(public(ast.parse(source)))) for source in sources.values()) > 400    # it has looked


GOOD = '''"""A file. B rows, T tokens.

Paper: says nothing of this.
"""
def _refuse(x):
    raise InputError("no")

def plain(timeout, x: Tensor) -> Tensor:
    """[B, T] → [B]; timeout in seconds. Raises InputError where x is bad (Alg. 4 l.16)."""
    _refuse(x)
'''
PLANTED = {
    "no docstring": ('    """[B, T]', '    x = """[B, T]', "a docstring is missing"),
    "no shape": ("[B, T] → [B]", "A tensor", "the shape of x is missing"),
    "no shape out": (" → [B]", "", "the shape of what it returns"),
    "a letter of its own": ("[B, T] →", "[B, Q] →", "the letter Q of a shape is not explained"),
    "no error": ("Raises InputError", "An error", "the error InputError is missing"),
    "no unit": ("timeout in seconds", "timeout as given", "the unit of timeout"),
    "no place at all": ("Paper: says nothing of this.", "", "the paper's place"),
    "another line than listed": ("l.16", "l.17", "the paper's place, Alg. 4 l.16, is missing"),
    "a line the paper lacks": ("l.16", "l.16, 35", "Alg. 4 has no line 35"),
}


def complaints(source: str, wanted: dict[str, str]) -> list[str]:
    return failures("planted.py", source, wanted, bases_of([source]))


@pytest.mark.parametrize("what", PLANTED)
def test_a_planted_docstring_that_lacks_something_is_found(what):
    before, after, complaint = PLANTED[what]
    wanted = {} if what == "no place at all" else {"plain": "Alg. 4 l.16"}
    source = GOOD.replace(" (Alg. 4 l.16)", "") if what == "no place at all" else GOOD
    assert before in source and complaints(source, wanted) == []
    found = complaints(source.replace(before, after), wanted)
    assert [line for line in found if complaint.split(",")[0] in line and line.startswith("planted.py:")], found


@pytest.mark.parametrize("body, named", [
    ("raise ValueError('x')", True),
    ("def inner(): raise ValueError('x')\n    return inner", True),
    ("return _helper()", True),
    ("return sorted([], key=_helper)", True),
    ("try:\n        _helper()\n    except ValueError:\n        pass", False),
    ("try:\n        _helper()\n    except KeyError:\n        pass", True),
    ("try:\n        _helper()\n    except ValueError:\n        raise", True),
    ("try:\n        pass\n    except KeyError:\n        raise ValueError('x')", True),
    ("try:\n        raise Ours('x')\n    except ValueError:\n        pass", False),
])
def test_the_errors_of_a_function_are_those_that_leave_it(body, named):
    source = ('"""Paper: nothing."""\nclass Ours(ValueError):\n    """One."""\ndef _helper():\n    raise ValueError("x")\n'
              f'def public():\n    """It."""\n    {body}\n')
    assert [line for line in complaints(source, {}) if "the error ValueError" in line] == (
        ["planted.py:6 public: the error ValueError is missing"] if named else [])


def test_fields_of_a_dataclass_have_their_units_and_shapes_in_help_comment_or_docstring():
    source = ('"""N tokens.\n\nPaper: nothing.\n"""\nclass Config:\n    """What is set."""\n'
              '    timeout: float = flag(60.0, "seconds per request")\n    max_usd: float = 1.0    # USD\n'
              '    delta: Tensor = None    # [N]\n    rank_timeout: float = flag(30.0, "how long")\n    kl: Tensor = None\n')
    assert complaints(source, {}) == [
        "planted.py:5 Config: the shape of kl is missing",
        "planted.py:5 Config: the unit of rank_timeout, seconds or minutes, is missing",
        "planted.py:5 Config: the unit of kl, nats, is missing"]
