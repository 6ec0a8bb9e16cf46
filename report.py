"""What people look at: tokens coloured by δ in the terminal, and small aligned tables.

    print(colour_tokens(["The ", "cat ", "flew"], [1, 0, -1]))        # good green, poor red, the rest plain

Colours are used where standard output is a terminal and NO_COLOR is not set (or FORCE_COLOR is); elsewhere good tokens
stand in [+ +] and poor ones in [- -], so that logs stay readable.
"""

from __future__ import annotations

import os
import sys
from itertools import groupby

_ANSI = {1: ("\033[32m", "\033[0m"), -1: ("\033[31m", "\033[0m")}
_PLAIN = {1: ("[+", "+]"), -1: ("[-", "-]")}


def use_colour() -> bool:
    """Whether the terminal shows ANSI colours."""
    return "FORCE_COLOR" in os.environ or ("NO_COLOR" not in os.environ and sys.stdout.isatty())


def split_text(text: str, offsets) -> list[str]:
    """The text that each token wrote; a character shared by several tokens stands with the first of them."""
    pieces, at = [], 0
    for start, end in offsets:
        pieces.append(text[max(at, start):end])
        at = max(at, end)
    return pieces


def colour_tokens(tokens: list[str], delta: list[float], colour: bool | None = None) -> str:
    """The response with its good tokens green and its poor tokens red; runs of one sign are marked once."""
    marks = _ANSI if (use_colour() if colour is None else colour) else _PLAIN
    out = []
    for sign, run in groupby(zip(tokens, delta), key=lambda pair: (pair[1] > 0) - (pair[1] < 0)):
        piece = "".join(token for token, _ in run)
        space = piece[: len(piece) - len(piece.lstrip())]
        before, after = marks.get(sign, ("", ""))
        out.append(f"{space}{before}{piece[len(space):]}{after}" if piece.strip() else piece)
    return "".join(out)


def table(header: list[str], rows: list[list], digits: int = 3) -> str:
    """An aligned table: numbers to the right with `digits` decimals, None as a dash."""
    def cell(value):
        return "–" if value is None else f"{value:.{digits}f}" if isinstance(value, float) else str(value)

    cells = [header] + [[cell(value) for value in row] for row in rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = ["  ".join(text.ljust(w) if i == 0 else text.rjust(w) for i, (text, w) in enumerate(zip(row, widths))).rstrip()
             for row in cells]
    return "\n".join([lines[0], "─" * (sum(widths) + 2 * (len(widths) - 1)), *lines[1:]])
