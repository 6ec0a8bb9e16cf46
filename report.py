"""What people look at: coloured tokens, tables, curves, the page of a run.

    print(colour_tokens(["The ", "cat ", "flew"], [1, 0, -1]))       # good green, poor red
    python report.py runs/toy                # report.html; of a run that goes on as well

A page is one file without script or network, for light and dark screens and for paper. In logs,
and where NO_COLOR is set, good tokens stand in [+ +] and poor ones in [- -].

Paper: examples as in Figure 4, curves as in Figures 3, 5 and 6.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
from html import escape
from itertools import groupby
from pathlib import Path

from data import InputError, public, read_rows, run_script

# ── The terminal

_ANSI = {1: ("\033[32m", "\033[0m"), -1: ("\033[31m", "\033[0m")}
_PLAIN = {1: ("[+", "+]"), -1: ("[-", "-]")}


def split_text(text: str, offsets) -> list[str]:
    """The text of each token, by its characters [start, end); a shared one is the first's."""
    pieces, at = [], 0
    for start, end in offsets:
        pieces.append(text[max(at, start) : end])
        at = max(at, end)
    return pieces


def colour_tokens(tokens: list[str], delta: list[float], colour: bool | None = None) -> str:
    """The response, good tokens green and poor ones red, runs marked once (Figure 1)."""
    if colour is None:
        colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    signs, out = [(value > 0) - (value < 0) for value in delta], ""
    for sign, run in groupby(zip(signs, tokens), key=lambda pair: pair[0]):
        piece = "".join(token for _, token in run)
        word = piece.lstrip()
        before, after = (_ANSI if colour else _PLAIN).get(sign if word else 0, ("", ""))
        out += piece[: len(piece) - len(word)] + before + word + after
    return out


def _cell(value, digits: int) -> str:
    if value is None:
        return "–"
    return f"{value:z.{digits}f}" if isinstance(value, float) else str(value)


def table(header: list[str], rows: list[list], digits: int = 3) -> str:
    """An aligned table: numbers to the right with `digits` decimals, None as a dash."""
    cells = [header] + [[_cell(value, digits) for value in row] for row in rows]
    first, *others = [max(map(len, column)) for column in zip(*cells)]
    line = "  ".join([f"{{:<{first}}}", *(f"{{:>{width}}}" for width in others)])
    head, *body = [line.format(*row).rstrip() for row in cells]
    return "\n".join([head, "─" * len(line.format(*[""] * len(header))), *body])


# ── Pages: the browser's own colours, light or dark, and greys that suit both

_STYLE = """
:root { color-scheme: light dark; font: 16px/1.6 system-ui; } p { margin: .3rem 0; }
body { max-width: 1240px; margin: auto; padding: 1.6rem; } h2 { margin: 2em 0 .4em; }
h3, figcaption { font-size: .8rem; margin: .4rem 0; } table { border-collapse: collapse; }
.muted, h3, th, figcaption, .prompt { opacity: .75; } .badge { color: #d55e00; }
.scroll { overflow-x: auto; } .prompt { max-height: 9rem; overflow-y: auto; }
th, td { padding: .25rem .8rem; text-align: right; border-bottom: 1px solid #8885; }
th:first-child, td:first-child, .wide td { text-align: left; } .code { font-family: monospace; }
.text, .wide td { white-space: pre-wrap; overflow-wrap: anywhere; vertical-align: top; }
.card, figure { border: 1px solid #8885; padding: .6rem 1rem; margin: .5rem 0;
  break-inside: avoid; } .columns, .curves { display: grid; gap: .2rem 1rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 17rem), 1fr)); }
@media print { :root { font-size: 12px; } .prompt { max-height: none; opacity: 1; } }
"""


def page(title: str, body: str) -> str:
    """An HTML page of a plain title and a body of HTML; the browser is to load nothing."""
    return f"""<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="
default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'">
<title>{escape(title)}</title><style>{_STYLE}</style></head>
<body><h1>{escape(title)}</h1>{body}</body></html>
"""


def write_page(path, text: str):
    """Write a page; half of a surrogate pair, which no file can hold, becomes a mark."""
    Path(path).write_bytes(text.encode("utf-8", "xmlcharrefreplace"))


def html_table(header: list[str], rows: list[list], digits: int = 2, kind: str = "") -> str:
    """`table` for a page; of kind "wide", where the cells are texts."""
    lines = []
    for tag, row in [("th", header), *(("td", row) for row in rows)]:
        cells = [f"<{tag}>{escape(_cell(value, digits))}</{tag}>" for value in row]
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return f'<div class="scroll {kind}"><table>{"".join(lines)}</table></div>'


def text_block(text: str, html: str = "") -> str:
    """Text (or its HTML) with its white space; monospaced where it is indented as code is."""
    kind = "text code" if re.search(r"\n(  |\t|──)", text) else "text"
    return f'<div class="{kind}" dir="auto">{html or escape(text)}</div>'


def card(heading: str, prompt: str, columns: dict[str, str], badges=()) -> str:
    """A prompt above columns {title: HTML}; the badges say what is wrong."""
    said = [f'<span class="badge">{escape(badge)}</span>' for badge in badges]
    sides = [f"<section><h3>{escape(k)}</h3>{html}</section>" for k, html in columns.items()]
    return (f'<article class="card"><b>{escape(heading)}</b> {" ".join(said)}'
            f'<div class="prompt">{text_block(prompt)}</div>'
            f'<div class="columns">{"".join(sides)}</div></article>')


# ── Token heatmaps and curves

# Told apart by every kind of eye, on white and on near-black; the first two are good and poor.
_COLOURS = ("#009e73", "#d55e00", "#2f7fd1", "#8a63d2")


def heatmap(tokens: list[str], values: list[float], limit: float | None = None) -> str:
    """Tokens as HTML, green above 0 and vermillion below, deepest from ±limit on: δ_t, A_t.

    limit: else the largest value. ↵ and ⇥ are white space, ▯ is a token without text.
    """
    limit = limit or max((abs(v) for v in values if math.isfinite(v)), default=0) or 1
    out = ""
    for token, value in zip(tokens, values, strict=True):
        colour, line = _COLOURS[value < 0], "underline wavy" if value < 0 else "underline"
        level = min(1, abs(value) / limit) if math.isfinite(value) else 0
        shown = escape(token).replace("\n", "↵\n").replace("\t", "⇥\t") or "▯"
        ground, ink = (f"{colour}{round(most * level):02x}" for most in (128, 255))
        style = f"background:{ground};text-decoration:{line} {ink}"
        out += f'<span title="{value:+.4g}" style="{style}">{shown}</span>'
    return ('<div dir="auto" style="white-space:pre-wrap;overflow-wrap:anywhere;'
            f'text-underline-offset:.22em;print-color-adjust:exact">{out}</div>')


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """At most `most` + 1 numbers around [low, high], a step of 1, 2 or 5 · 10^k apart.

    1.0000001 counts as 1: some processors round so, and the axis is to be the same on all.
    """
    if high - low <= 1e-6 * max(abs(low), abs(high)):                 # one value alone
        low, high = low - (abs(low) or 1) / 2, high + (abs(high) or 1) / 2
    rough = (high - low) / (most - 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = power * next(m for m in (1, 2, 5, 10) if m * power >= rough * (1 - 1e-6))
    first, last = math.floor(low / step + 1e-6), math.ceil(high / step - 1e-6)
    return [float(f"{i * step:.12g}") for i in range(first, last + 1)]


def svg_line(title: str, x: list[int], series: dict[str, list], unit: str = "iteration") -> str:
    """Up to four named series over `unit`s as SVG; None or not finite breaks a line. The legend
    has their last values, where there is room for them: of up to three."""
    series = {name: [v if v is not None and math.isfinite(v) else None for v in values]
              for name, values in series.items()}
    known = [v for values in series.values() for v in values if v is not None] or [0.0]
    marks = ticks(min(known), max(known))
    left, right, out = 16 + 6.4 * max(len(f"{v:g}") for v in marks), 326, ""

    def up(value):
        return 156 - 110 * (value - marks[0]) / (marks[-1] - marks[0])

    def text(x, y, said, more=""):
        return f'<text x="{x:.2f}" y="{y:.2f}" {more}>{escape(said)}</text>'

    for mark in marks:
        out += f'<path d="M{left:.2f} {up(mark):.2f}H{right}" stroke="#8885"/>'
        out += text(left - 6, up(mark) + 4, f"{mark:g}", 'class="y" text-anchor="end"')
    out += text(left, 172, f"{x[0]:g}", 'class="x"')
    out += text((left + right) / 2, 172, unit, 'text-anchor="middle"')
    out += text(right, 172, f"{x[-1]:g}", 'class="x" text-anchor="end"')
    for i, (name, values) in enumerate(series.items()):
        pen = f'fill="none" stroke="{_COLOURS[i]}" stroke-width="1.8" stroke-linecap="round"'
        at = 4 + 336 * i / len(series)                                          # the legend
        last = next((f" {v:.4g}" for v in reversed(values) if v is not None), " –")
        said = name + last * (len(series) < 4)
        out += f'<path d="M{at:.1f} 28h13" {pen}/>' + text(at + 17, 32, said)
        line, step = "", "M"
        for place, value in zip(x, values):
            if value is not None:                       # h0: so that a point alone is seen
                across = left + (right - left) * (place - x[0]) / (x[-1] - x[0] or 1)
                line += f"{step}{across:.2f} {up(value):.2f}h0"
            step = "M" if value is None else "L"
        out += f'<path class="curve" d="{line}" {pen}/>'
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 340 180" width="100%" '
            f'role="img" style="max-width:460px;font:11px system-ui" fill="currentColor">'
            f"<title>{escape(title)}</title>{text(4, 13, title)}{out}</svg>")


# Of each metric of an iteration: its unit, and what is healthy.
NOTES = {
    "delta": "δ_t per token, −1 to 1, as R_φ sees it; rises, and the truth beside it too",
    "true_delta": "δ_t per token, as the annotator sees it; rises with R_φ's",
    **{f"{sign}_{figure}": f"{sign} tokens by R_φ, beside the annotator's; falls where the "
                           "policy leaves what R_φ was trained on"
       for sign in ("poor", "good") for figure in ("recall", "precision")},
    "good": "share of tokens in good spans; rises",
    "poor": "share of tokens in poor spans; falls",
    "entropy": "nats per token; falls slowly; near 0 every rollout is the same",
    "kl": "nats per response from the reference; rises to kl_target and stays",
    "kl_coef": "β; rises while kl is over kl_target, falls while it is under",
    "response_tokens": "steady",
    "truncated": "share of responses cut off at --max_new_tokens; V after them is 0, as after "
                 "an EOS (Algorithm 4)",
    "explained_variance": "towards 1; below 0 the value head misleads",
    "unparseable": "share of critiques by R_φ that cannot be read; under .05",
    "unmatched": "share of quotes that are not in the response; under .05",
    "ambiguous": "share of quotes that stand there more than once; under .05",
    "conflicting": "tokens in spans of both signs, so δ_t = 0; near 0",
    "half_inside": "tokens half in a span, so δ_t = 0; few",
    "policy_loss": "about 0, as A_t is whitened; shows no trend",
    "value_loss": "squared units of the return; falls at first, then noise",
    "ratio": "mean ρ_t; about 1",
    "policy_kl": "nats per token from π_old to π; under .05, or else the steps are too long",
    "clip_fraction": "share of tokens; under .2",
    "grad_norm": "before clipping; steady; a peak is a batch to look at",
    "skipped_steps": "optimizer steps not taken: a gradient or ρ_t was beyond bounds; 0",
    **{f"seconds_{part}": "steady" for part in ("rollout", "critique", "score", "update")},
}


def batch_metrics(rollouts, task) -> dict[str, float]:
    """Of a batch of text2grad.Rollouts: what NOTES tells of it, and the truths of the task."""
    at, judged = rollouts.mask.bool(), rollouts.feedback
    names = ("delta", "returns", "values", "entropy", "logprobs_old", "logprobs_ref")
    delta, returns, values, entropy, old, reference = (
        getattr(rollouts, name)[at].double() for name in names)
    variance, left = returns.var(correction=0), (returns - values).var(correction=0)
    quotes = max(1, sum(found.quotes for found in judged))
    metrics = {
        "delta": delta.mean(), "good": (delta > 0).double().mean(),
        "poor": (delta < 0).double().mean(), "entropy": entropy.mean(),
        "kl": (old - reference).sum() / len(judged),             # nats of a response
        "response_tokens": len(delta) / len(judged),
        "explained_variance": 1 - left / variance.clamp(min=1e-12),
        "truncated": sum(rollouts.truncated) / len(judged),
        "unparseable": sum(bool(found.reason) for found in judged) / len(judged),
        "unmatched": sum(found.unmatched for found in judged) / quotes,
        "ambiguous": sum(found.ambiguous for found in judged) / quotes,
        "conflicting": sum(found.conflicts for found in judged),
        "half_inside": sum(found.half_inside for found in judged),
    }
    for name, truth in task.truth.items():
        metrics[name] = sum(map(truth, rollouts.rows, rollouts.texts)) / len(judged)
    return {name: float(value) for name, value in metrics.items()}


def sample_row(rollouts, row: int) -> dict:
    """One rollout to look at: every token with its δ_t and, once it is known, its A_t."""
    found, offsets = rollouts.feedback[row], rollouts.offsets[row]
    sample = {"prompt": rollouts.prompts[row], "response": rollouts.texts[row],
              "critique": found.critique, "unreadable": found.reason,
              "tokens": split_text(rollouts.texts[row], offsets), "delta": found.delta}
    if rollouts.advantages is not None:
        sample["advantage"] = rollouts.advantages[row, : len(offsets)].tolist()
    return sample


# ── The page of a run


def _columns(row: dict, when: str = "") -> dict[str, str]:
    """A sample's tokens coloured by δ_t and, where it is known, by A_t; what R_φ wrote."""
    mean = sum(row["delta"]) / max(1, len(row["delta"]))
    columns = {f"{when}δ_t, mean {mean:+.3f}": heatmap(row["tokens"], row["delta"], 1)}
    if "advantage" in row:
        columns["A_t, whitened; deepest from ±2"] = heatmap(row["tokens"], row["advantage"], 2)
    why = f"no reward: {row['unreadable']}\n" if row["unreadable"] else ""
    return columns | {f"{when}critique by R_φ": text_block(why + row["critique"])}


def _examples(before: list[dict], after: list[dict]) -> str:  # Figure 4
    """At most 8 held-out prompts, with the response before and, once there is one, after."""
    html = ""
    for i in range(0, len(before), math.ceil(len(before) / 8)):       # not by their scores
        columns = _columns(before[i], "Before: ")
        columns |= _columns(after[i], "After: ") if after else {}
        html += card(f"held-out {before[i]['id'] or ''}", before[i]["prompt"], columns)
    return html


def _samples(rows: list[dict]) -> str:
    """At most 12 training samples, evenly up to the last."""
    return "".join(card(f"iteration {row['iteration']}", row["prompt"], _columns(row))
                   for row in rows[:: -math.ceil(len(rows) / 12)][::-1])


def curves(rows: list[dict]) -> str:  # Figure 3
    """Every metric of metrics.jsonl's rows, a small chart above its note; the task's first."""
    html = ""
    keys = set().union(*rows)                         # some are measured now and then
    own = sorted(keys - {"iteration", *NOTES})
    for key in own + [key for key in NOTES if key in keys]:
        known = [row for row in rows if key in row]
        lines = {"last": [row[key] for row in known]}
        if key == "true_delta":
            lines = {"annotator": lines["last"], "R_φ": [row["delta"] for row in known]}
        x = [row["iteration"] for row in known]
        chart = svg_line(key.replace("_", " "), x, lines)
        html += f"<figure>{chart}<figcaption>{NOTES.get(key, '')}</figcaption></figure>"
    return f'<div class="curves">{html}</div>'


def _compared(rows: list[dict]) -> str:
    before, after = rows[0]["before"], rows[0]["after"]
    lines = [[key, old, after[key], after[key] - old] for key, old in before.items()]
    return html_table(["held-out mean", "before", "after", "change"], lines, 3)


def _pairs(rows: list[dict]) -> str:
    lines = [[key, f"{value:.6g}" if isinstance(value, float) else public(str(value))]
             for row in rows for key, value in row.items()]
    return html_table(["", ""], lines, kind="wide")


def run_report(directory) -> Path:
    """Write report.html of a run of text2grad.py, finished or not, from its files alone."""
    out, body = Path(directory), ""
    if not (out / "metrics.jsonl").exists():
        raise InputError(f"{out}: no metrics.jsonl; text2grad.py has not begun phase 3 there")
    for name, show, *files in (
            ("Held-out examples", _examples, "before_samples.jsonl", "after_samples.jsonl"),
            ("Training samples", _samples, "samples.jsonl"),
            ("Before and after", _compared, "result.json"),
            ("Curves", curves, "metrics.jsonl"),
            ("Reward model", _pairs, "reward/metrics.json"),
            ("Phases", _pairs, "phases.jsonl"), ("Settings", _pairs, "config.json")):
        rows, body = [], f"{body}<h2>{name}</h2>"
        for path in (out / file for file in files):
            written = path.exists() and path.stat().st_size
            rows.append(read_rows(path) if written else [])
            body += "" if written else f'<p class="muted">{path.name} is not there (yet).</p>'
        body += show(*rows) if rows[0] else ""
    write_page(out / "report.html", page(f"Text2Grad: {out.resolve().name}", body))
    return out / "report.html"


def main():
    """Write the pages of the runs that are named on the command line."""
    parser = argparse.ArgumentParser(description="Write RUN/report.html, the page of a run.")
    parser.add_argument("run", nargs="+", help="a directory of text2grad.py, finished or not")
    for directory in parser.parse_args().run:
        print(run_report(directory))


if __name__ == "__main__":
    run_script(main, "report")
