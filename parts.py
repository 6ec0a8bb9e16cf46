"""How a response is divided by rules, without a model or a tagger: content words, sentences and clauses, statements.

    span_weights("took the piano", [(0, 4), (4, 8), (8, 14)], "importance")         # [1.0, 0.2, 1.0]
    step_spans("It is good, but long. I left.")          # "It is good,", "but long." and "I left.", as [start, end)

Paper: Table 11 and Appendix I.1 weigh the tokens of a span; Appendix N divides a response into steps for PRM-PPO.
It weighs nouns and verbs, as a tagger saw them. Here a word of English text is a content word unless it stands in a
closed list (pronouns, determiners, prepositions, conjunctions, …); a number is content. In code every name,
number and word of a string is content; Python's keywords and all marks are not. Nothing here needs torch.
"""

from __future__ import annotations

import ast
import keyword
import re

WEIGHTINGS = ("uniform", "linear_decay", "importance", "importance_code")
OTHERS = 0.2                            # what a token that is no content word gets (Appendix I.1)

FUNCTION_WORDS = frozenset("""
    i me my mine myself we us our ours ourselves you your yours yourself yourselves he him his himself she her hers
    herself it its itself they them their theirs themselves one oneself who whom whose which what that this these those
    someone somebody something anyone anybody anything everyone everybody everything nobody nothing none
    a an the some any no each every either neither both all half many much more most few fewer less least several such
    another other others own same enough
    about above across after against along amid among around as at before behind below beneath beside besides between
    beyond by despite down during except for from in inside into like near of off on onto opposite out outside over past
    per since through throughout till to toward towards under underneath unlike until up upon via with within without
    and but or nor so yet if unless because although though while whereas when whenever where wherever whether than once
    am is are was were be been being have has had having do does did doing will would shall should can could may might
    must ought cannot not there here then thus hence also too very just only even still already how why however
    therefore
""".split())


# ── Weights within a span (Appendix I.1) ────────────────────────────────────────────────────────────────

def word_of(text: str, start: int, end: int) -> str:
    """The whole word that the first letter or digit of text[start:end] belongs to; "" where there is none."""
    first = re.compile(r"\w").search(text, start, end)
    if not first:
        return ""
    before = re.search(r"[\w'’]*$", text[: first.start()])
    after = re.compile(r"[\w'’]*").match(text, first.start())
    return (before.group() + after.group()).strip("'’")


def is_content(word: str, code: bool = False) -> bool:
    """Whether a word carries meaning by itself, by the rules above. In "it's" and "they'll" the first part decides."""
    if code:
        return bool(word) and not keyword.iskeyword(word)
    word = word.lower().replace("’", "'")
    return bool(word) and not word.endswith("n't") and word.split("'")[0] not in FUNCTION_WORDS


def span_weights(text: str, places, weighting: str) -> list[float]:  # Table 11
    """The weight in (0, 1] of each of a span's n tokens, by their characters [start, end) (Table 11, Appendix I.1).

    "uniform": 1. "linear_decay": 1 − (i−1)·0.9/(n−1). "importance": 1 on content words, 0.2 on others, and
    "importance_code" reads the text as Python; a token weighs as the word that it is a part of. Raises ValueError for
    any other weighting.
    """
    if weighting == "uniform":
        return [1.0] * len(places)
    if weighting == "linear_decay":
        return [1.0 - 0.9 * i / max(1, len(places) - 1) for i in range(len(places))]
    if weighting in ("importance", "importance_code"):
        code = weighting == "importance_code"
        return [1.0 if is_content(word_of(text, *place), code) else OTHERS for place in places]
    raise ValueError(f"weighting must be one of {', '.join(WEIGHTINGS)}, not {weighting!r}")


# ── Steps (Appendix N) ──────────────────────────────────────────────────────────────────────────────────

_CLAUSE = r"(?<=[.!?;:,])\s+|\s*\n\s*|\s+(?=(?:and|but|because|so|who|which|while|although|though|if|when|unless)\b)"


def step_spans(text: str, code: bool = False) -> list[tuple[int, int]]:
    """The characters [start, end) of each step (Appendix N): clauses of a text, or statements of code."""
    if code:
        return statement_spans(text)
    cuts = [(0, 0), *(match.span() for match in re.finditer(_CLAUSE, text)), (len(text), len(text))]
    return [trimmed(text, a, b) for (_, a), (b, _) in zip(cuts, cuts[1:]) if text[a:b].strip()]


def trimmed(text: str, start: int, end: int) -> tuple[int, int]:
    """The characters [start, end) without the white space at both ends; start ≥ end where there is nothing else."""
    piece = text[start:end]
    return start + len(piece) - len(piece.lstrip()), end - len(piece) + len(piece.rstrip())


def statement_spans(text: str) -> list[tuple[int, int]]:
    """Every statement of a Python program, in order; of a compound one (def, if, …) its head, up to the first within.

    Of code, the steps of Appendix N. A program between ``` is taken out. Where it does not parse, every line that is
    not blank is a statement.
    """
    fenced = re.search(r"```\w*\n(.*?)(?:```|\Z)", text, re.DOTALL)
    start, code = (fenced.start(1), fenced.group(1)) if fenced else (0, text)
    lines = code.splitlines(keepends=True)
    begins = [start + sum(map(len, lines[:i])) for i in range(len(lines))]
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):      # as the parser's documentation lists them
        return [trimmed(text, at, at + len(line)) for at, line in zip(begins, lines) if line.strip()]

    def place(line: int, column: int) -> int:                           # ast counts bytes of UTF-8
        return begins[line - 1] + len(lines[line - 1].encode()[:column].decode())

    def first(node) -> int:
        head = min([node, *getattr(node, "decorator_list", [])], key=lambda n: (n.lineno, n.col_offset))
        return place(head.lineno, head.col_offset) - (head is not node)                    # the @ before a decorator

    found = []
    for node in (n for n in ast.walk(tree) if isinstance(n, ast.stmt)):
        within = [child for child in ast.walk(node) if isinstance(child, ast.stmt) and child is not node]
        end = min(map(first, within)) if within else place(node.end_lineno, node.end_col_offset)
        found.append(trimmed(text, first(node), end))
    return sorted(found)
