"""Readable output: coloured tokens, tables, curves, and the HTML report of a run.

    print(colour_tokens(["The ", "cat ", "flew"], [1, 0, -1]))       # good green, poor red
    python report.py runs/toy                # writes report.html, even during training
    python report.py runs/a runs/b           # writes runs/comparison.html

A page is a single HTML file without scripts or network access. It supports light mode, dark
mode and printing. In log files, or if NO_COLOR is set, good tokens are enclosed in [+ +] and
poor tokens in [- -].

Paper: examples as in Figure 4, curves as in Figures 3, 5 and 6.
"""

import argparse
import math
import os
import re
import sys
from html import escape
from itertools import chain, groupby
from pathlib import Path
from statistics import fmean

from data import InputError, next_command, read_rows, run_script, whole_rows

# ── The terminal

_ANSI = {1: "\033[32m{}\033[0m", -1: "\033[31m{}\033[0m"}             # green and red
_PLAIN = {1: "[+{}+]", -1: "[-{}-]"}


def split_text(text: str, offsets) -> list[str]:
    """Split a text into its tokens by their character offsets.

    A character that belongs to two tokens goes to the first of them.
    """
    pieces = []
    last_end = 0
    for start, end in offsets:
        pieces.append(text[max(last_end, start) : end])
        last_end = max(last_end, end)
    return pieces


def colour_tokens(tokens: list[str], delta: list[float], colour: bool | None = None) -> str:
    """The response with good tokens in green and poor tokens in red (Figure 1).

    Adjacent tokens of the same sign are marked together. colour: whether to use ANSI colours;
    None uses them only on a terminal.
    """
    if colour is None:
        colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    text = ""
    for sign, run in groupby(zip(delta, tokens), lambda pair: (pair[0] > 0) - (pair[0] < 0)):
        piece = "".join(token for _, token in run)
        word = piece.lstrip()
        mark = (_ANSI if colour else _PLAIN).get(sign if word else 0, "{}")
        text += piece.removesuffix(word) + mark.format(word)
    return text


def _cell(value, digits: int) -> str:
    if value is None:
        return "–"
    return f"{value:z.{digits}f}" if isinstance(value, float) else str(value)


def table(header: list[str], rows: list[list], digits: int = 3) -> str:
    """A text table with right-aligned numbers of `digits` decimals. None becomes a dash."""
    cells = [[_cell(value, digits) for value in row] for row in [header, *rows]]
    first, *widths = [max(map(len, column)) for column in zip(*cells)]
    lines = ["  ".join([row[0].ljust(first), *map(str.rjust, row[1:], widths)])
             for row in cells]
    lines.insert(1, "─" * len(lines[0]))
    return "\n".join(map(str.rstrip, lines))


# ── Pages, which take the browser's light or dark colours

_STYLE = """
:root { color-scheme: light dark; font: 16px/1.6 system-ui; } p { margin: .3rem 0; }
body { max-width: 1240px; margin: auto; padding: 1rem; } h1 { margin: .4em 0; }
h2 { margin: 2em 0 .4em; } .columns h2 { margin-top: .4em; font-size: 1.2rem; }
h3, figcaption { font-size: .8rem; margin: .4rem 0; } section { min-width: 0; }
h3, th, figcaption, .prompt { opacity: .75; }
.healthy, .unhealthy, table { font-size: .9rem; border-collapse: collapse; }
.healthy, .unhealthy { border-left: .5rem solid #009e73; padding-left: .6rem; }
.unhealthy { border-color: #d55e00; font-weight: bold; } .code { font-family: monospace; }
th, td { padding: .25rem .5rem; text-align: right; border-bottom: 1px solid #8885; }
th:first-child, td:first-child, .wide td { text-align: left; padding-left: 0; }
.text, .wide td { white-space: pre-wrap; overflow-wrap: anywhere; vertical-align: top; }
.card, figure { border: 1px solid #8885; padding: .6rem 1rem; margin: .5rem 0;
  break-inside: avoid; } .columns, .curves { display: grid; gap: .2rem 1rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 17rem), 1fr)); }
.curves { grid-template-columns: repeat(auto-fit, minmax(min(100%, 22.2rem), 1fr)); }
figure { padding: .4rem; } figure svg { min-width: 340px; }
.scroll, figure { overflow-x: auto; }
@media print { :root { font-size: 12px; } .prompt { opacity: 1; } }
"""


def page(title: str, body: str) -> str:
    """An HTML page with a plain title and an HTML body. The page loads no other files."""
    return f"""<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="
default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'">
<title>{escape(title)}</title><style>{_STYLE}</style></head>
<body><h1>{escape(title)}</h1>{body}</body></html>
"""


def write_page(path, text: str) -> Path:
    """Write a page in UTF-8 and return its path.

    A lone surrogate becomes a reference such as &#55296;.
    """
    path = Path(path)
    path.write_text(text, "utf-8", "xmlcharrefreplace")
    return path


def html_table(header: list[str], rows: list[list], digits: int = 2, kind: str = "") -> str:
    """The same as `table`, but in HTML. kind: "wide" if the cells hold long texts."""
    html = ""
    for number, row in enumerate([header, *rows]):
        tag = "td" if number else "th"
        cells = [f"<{tag}>{escape(_cell(value, digits))}</{tag}>" for value in row]
        html += f"<tr>{''.join(cells)}</tr>"
    return f'<div class="scroll {kind}"><table>{html}</table></div>'


def text_block(text: str, html: str = "") -> str:
    """A block of text that keeps its white space, in monospace if it is indented like code.

    html: the same text as HTML; the default escapes the text.
    """
    css_class = "text code" if re.search(r"\n(  |\t|──)", text) else "text"
    return f'<div class="{css_class}" dir="auto">{html or escape(text)}</div>'


_CUT = 400                                # characters of a prompt that are always shown


def card(heading: str, prompt: str, columns: dict[str, str]) -> str:
    """A box with a heading, a prompt, and columns {title: HTML} below it.

    A long prompt is cut, and a click shows the rest.
    """
    cut_prompt = text_block(prompt[:_CUT])
    if rest := prompt[_CUT:]:
        cut_prompt += (f"<details><summary>… the prompt is cut here; show the other "
                       f"{len(rest):,} characters</summary>{text_block(rest)}</details>")
    sections = [f"<section><h3>{escape(title)}</h3>{html}</section>"
                for title, html in columns.items()]
    return (f'<article class="card"><b>{escape(heading)}</b>'
            f'<div class="prompt">{cut_prompt}</div>'
            f'<div class="columns">{"".join(sections)}</div></article>')


# ── Token heatmaps and curves

# Colours for good, poor and other series. Colour-blind readers can tell them apart, both on
# white and on black.
_COLOURS = ("#009e73", "#d55e00", "#2f7fd1", "#8a63d2")


def heatmap(tokens: list[str], values: list[float], limit: float = 1) -> str:
    """Tokens as HTML, coloured by δ_t or A_t: green above 0, vermillion below 0.

    limit: magnitude that gets the full colour. ↵ shows a newline, ⇥ a tab, and ▯ a token
    without text.
    """
    html = ""
    for token, value in zip(tokens, values, strict=True):
        colour = _COLOURS[value < 0]
        line = "underline wavy" if value < 0 else "underline"
        level = min(1, abs(value) / limit) if math.isfinite(value) else 0
        text = escape(token).replace("\n", "↵\n").replace("\t", "⇥\t") or "▯"
        style = (f"background:{colour}{round(128 * level):02x};"
                 f"text-decoration:{line} {colour}{round(255 * level):02x}")
        html += f'<span title="{value:+.4g}" style="{style}">{text}</span>'
    return ('<div dir="auto" style="white-space:pre-wrap;overflow-wrap:anywhere;'
            f'text-underline-offset:.22em;print-color-adjust:exact">{html}</div>')


LEGEND = heatmap(["good", " poor", " no colour: 0; ▯: a token without text"], [1, -1, 0])


def ticks(low: float, high: float) -> list[float]:
    """At most six axis ticks that cover [low, high], in steps of 1, 2 or 5 · 10^k.

    Processors round differently. Therefore 1.0000001 counts as 1, so that the axis is the same
    on every machine.
    """
    if high - low <= 1e-6 * max(abs(low), abs(high)):              # the range is a single value
        margin = (abs(low) or 1) / 2
        low -= margin
        high += margin
    rough_step = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(rough_step))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough_step * (1 - 1e-6))
    first = math.floor(low / step + 1e-6)
    last = math.ceil(high / step - 1e-6)
    return [float(f"{i * step:.12g}") for i in range(first, last + 1)]


def svg_line(title: str, x: list[int], series: dict[str, list], unit: str = "iteration") -> str:
    """A line chart of named series as SVG. unit: label of the x axis.

    A line goes on over values that are None, NaN or infinite. From the fifth series on, lines
    are dashed. With up to three series, the legend also shows their last values.
    """
    lines = {name: [(i, v) for i, v in zip(x, values) if v is not None and math.isfinite(v)]
             for name, values in series.items()}
    values = [v for points in lines.values() for _, v in points] or [0.0]
    marks = ticks(min(values), max(values))
    left = 16 + 6.4 * max(len(f"{v:g}") for v in marks)

    def across(position):
        return left + (326 - left) * (position - x[0]) / (x[-1] - x[0] or 1)

    def height(value):
        return 156 - 110 * (value - marks[0]) / (marks[-1] - marks[0])

    svg = (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 340 180" width="100%" '
           f'role="img" style="max-width:460px;font:11px system-ui" fill="currentColor">'
           f'<title>{escape(title)}</title><text x="4.00" y="13.00" >{escape(title)}</text>')
    for mark in marks:
        y = height(mark)
        svg += (f'<path d="M{left:.2f} {y:.2f}H326" stroke="#8885"/><text x="{left - 6:.2f}" '
                f'y="{y + 4:.2f}" class="y" text-anchor="end">{mark:g}</text>')
    svg += (f'<text x="{left:.2f}" y="172.00" class="x">{x[0]:g}</text>'
            f'<text x="{(left + 326) / 2:.2f}" y="172.00" text-anchor="middle">{escape(unit)}'
            f'</text><text x="326.00" y="172.00" class="x" text-anchor="end">{x[-1]:g}</text>')
    for i, (name, points) in enumerate(lines.items()):
        dash = 'stroke-dasharray="6 4" ' * (i > 3)
        pen = (f'fill="none" stroke="{_COLOURS[i % 4]}" {dash}stroke-width="1.8" '
               f'stroke-linecap="round"')
        legend_x = 4 + 336 * i / len(lines)
        label = f"{name} {points[-1][1]:.4g}" if points and len(lines) < 4 else name
        # h0 makes a single point visible.
        path = "L".join(f"{across(i):.2f} {height(v):.2f}h0" for i, v in points)
        svg += (f'<path d="M{legend_x:.1f} 28h13" {pen}/>'
                f'<text x="{legend_x + 17:.2f}" y="32.00" >{escape(label)}</text>'
                f'<path class="curve" d="M{path}" {pen}/>')
    return svg + "</svg>"


_AGREEMENT = "agreement with the annotator's tokens; falls if π leaves R_φ's training data"
# Metric of an iteration → its unit, and how it should develop during training.
NOTES = {
    "delta": "mean δ_t per token by the critic, −1 to 1; rises together with the truth",
    "true_delta": "mean δ_t per token by the annotator; rises together with the critic's",
    "poor_recall": _AGREEMENT, "poor_precision": _AGREEMENT,
    "good_recall": _AGREEMENT, "good_precision": _AGREEMENT,
    "poor_tokens": "tokens that the annotator marks as poor; poor_recall is a share of them",
    "good": "share of tokens in good spans; rises",
    "poor": "share of tokens in poor spans; falls",
    "entropy": "nats per token; falls slowly; near 0, all rollouts are the same",
    "kl": "nats per response from the reference; at the end near the target",
    "kl_coef": "β; rises while kl is above the target, falls while it is below",
    "response_tokens": "tokens per response; steady",
    "truncated": "share of responses cut off at --max_new_tokens; V is 0 after them, as it is "
                 "after an EOS (Algorithm 4)",
    "explained_variance": "approaches 1; below 0 the value head is worse than a constant",
    "unparseable": "share of critiques that cannot be parsed; under .05",
    "unmatched": "share of quotes that are not in the response; under .05",
    "ambiguous": "share of quotes that occur more often than they are quoted; under .05",
    "conflicting": "tokens in spans of both signs, where δ_t = 0; near 0",
    "half_inside": "tokens partly in a span: δ_t = 0; few",
    "policy_loss": "about 0, as A_t is whitened; no trend",
    "value_loss": "squared units of the return; falls at first, then noise",
    "ratio": "mean ρ_t; about 1",
    "policy_kl": "nats per token from π_old to π; under .05, otherwise the steps are too long",
    "clip_fraction": "share of clipped tokens; under .2",
    "grad_norm": "norm before clipping; steady; look at the batches of its peaks",
    "skipped_steps": "skipped optimizer steps (gradient or ρ_t out of bounds); 0",
    "seconds_rollout": "steady", "seconds_critique": "steady",
    "seconds_score": "steady", "seconds_update": "steady",
}


def batch_metrics(rollouts, task) -> dict[str, float]:
    """The metrics of a policy.Rollouts batch that NOTES lists, and those of task.truth."""
    is_token = rollouts.mask.bool()
    judgements = rollouts.feedback
    names = ("delta", "returns", "values", "entropy", "logprobs_old", "logprobs_ref")
    delta, returns, values, entropy, old, reference = (
        getattr(rollouts, name)[is_token].double() for name in names)
    variance = returns.var(correction=0)
    unexplained = (returns - values).var(correction=0)
    count = len(judgements)                                                       # B
    quotes = max(1, sum(judgement.quotes for judgement in judgements))
    metrics = {
        "delta": delta.mean(), "good": (delta > 0).double().mean(),
        "poor": (delta < 0).double().mean(), "entropy": entropy.mean(),
        "kl": (old - reference).sum() / count,                    # nats per response
        "response_tokens": len(delta) / count,
        "explained_variance": 1 - unexplained / variance.clamp(min=1e-12),
        "truncated": sum(rollouts.truncated) / count,
        "unparseable": sum(bool(judgement.reason) for judgement in judgements) / count,
        "unmatched": sum(judgement.unmatched for judgement in judgements) / quotes,
        "ambiguous": sum(judgement.ambiguous for judgement in judgements) / quotes,
        "conflicting": sum(judgement.conflicts for judgement in judgements),
        "half_inside": sum(judgement.half_inside for judgement in judgements),
    }
    for name, truth in task.truth.items():
        metrics[name] = sum(map(truth, rollouts.rows, rollouts.texts)) / count
    return {name: float(value) for name, value in metrics.items()}


def score_response(judgement, is_truncated: bool) -> dict[str, float]:
    """The metrics of one response in the table "Before and after"."""
    delta = judgement.delta
    n = max(1, len(delta))
    return {"mean δ per token": sum(delta) / n,
            "tokens in good spans": sum(d > 0 for d in delta) / n,
            "tokens in poor spans": sum(d < 0 for d in delta) / n,
            "unparseable critiques": float(bool(judgement.reason)),
            "truncated responses": float(is_truncated), "response tokens": float(len(delta))}


def sample_row(rollouts, row: int) -> dict:
    """One rollout for the report: each token with its δ_t and, if computed, its A_t."""
    judgement = rollouts.feedback[row]
    offsets = rollouts.offsets[row]
    sample = {"prompt": rollouts.prompts[row], "response": rollouts.texts[row],
              "critique": judgement.critique, "unreadable": judgement.reason,
              "tokens": split_text(rollouts.texts[row], offsets), "delta": judgement.delta}
    if rollouts.advantages is not None:
        sample["advantage"] = rollouts.advantages[row, : len(offsets)].tolist()
    return sample


# ── What is healthy in a run

_WRITING = "raise --reward_learning_rate or --reward_epochs"
_STEPS = "the steps are too large, so lower --learning_rate"
# Metric → its healthy range, the figure in words, and what to do outside the range.
RANGES = {
    "unparseable": (0, 0.05, "{:.0%} of critiques unreadable (range: up to 5%)", _WRITING),
    "unmatched": (0, 0.05, "{:.0%} of quotes not in the response (range: up to 5%)", _WRITING),
    "ambiguous": (0, 0.05, "{:.0%} of quotes ambiguous (range: up to 5%)",
                  "critiques must quote more words, so that only one place fits"),
    "clip_fraction": (0, 0.2, "{:.0%} of tokens clipped (range: up to 20%)", _STEPS),
    "policy_kl": (0, 0.05, "{:.2g} nats per token and update (range: up to 0.05)", _STEPS),
    "skipped_steps": (0, 0, "{:.2g} per iteration (range: 0)", _STEPS),
    "repeated facts": (0, 0.03, "{:.2f} per response (range: up to 0.03)",
                       "set repeats_are_poor in the task"),
    "explained_variance": (0, 1, "{:.2g} of the returns' variance (range: 0 to 1)", _STEPS),
    "highest kl / kl_target": (-math.inf, 5, "{:.2g} (range: up to 5)",
                               "lower --learning_rate or raise --kl_coef"),
    "kl / kl_target": (0.5, 3, "{:.2g} at the end (range: 0.5 to 3)",
                       "lower --learning_rate or --kl_horizon, or if it is too small, "
                       "raise --iterations"),
}
# These are judged in the fifth of the run in which they are highest, because a policy that has
# collapsed may look calm at the end, where the steps are short.
_WORST = {"clip_fraction", "policy_kl", "highest kl / kl_target"}
_GAIN = (-0.1, math.inf, "{:+.0%} by training (range: −10% or more)",
         "check kl and entropy, and lower --learning_rate or raise --kl_coef")


def _highest_fifth(numbers: list[float]) -> list[float]:
    """The numbers of the fifth of a run with the highest mean. NaN counts as the highest."""
    length = max(1, len(numbers) // 5)
    fifths = [numbers[i : i + length] for i in range(len(numbers) - length + 1)]

    def height(fifth):
        mean = fmean(fifth)
        return math.isnan(mean), mean

    return max(fifths, key=height, default=[])


def health(out: Path) -> list[tuple[str, str]]:
    """("healthy" or "unhealthy", sentence) of each figure of a run that has a healthy range.

    A metric is its mean over the last fifth of the iterations, but see _WORST. Before the first
    iteration, the critiques of the held-out responses count. The KL at the end and the gain are
    judged when a run has ended.
    """
    rows = whole_rows(out / "metrics.jsonl")
    results = whole_rows(out / "result.json")                # empty before the run has ended
    for row in rows:
        if "kl_target" in row:
            row["highest kl / kl_target"] = row["kl"] / row["kl_target"]
            if results:
                row["kl / kl_target"] = row["highest kl / kl_target"]
    late_rows = rows[4 * len(rows) // 5 :] or [
        {"unparseable": bool(sample["unreadable"])}
        for sample in whole_rows(out / "before_samples.jsonl")]
    values = {}
    for name in RANGES:
        judged_rows = rows if name in _WORST else late_rows
        values[name] = [row[name] for row in judged_rows if name in row]
    for name in _WORST:
        values[name] = _highest_fifth(values[name])
    for result in results:
        # δ, and the task's own metrics
        goals = {"mean δ per token"}.union(*late_rows) - RANGES.keys()
        for name in goals & result["before"].keys():
            before = result["before"][name]
            values[name] = [(result["after"][name] - before) / (abs(before) or 1)]
    checks = []
    for name, numbers in values.items():
        if numbers:
            mean = fmean(numbers)
            low, high, words, remedy = RANGES.get(name, _GAIN)
            state = "healthy" if low <= mean <= high else "unhealthy"
            advice = f"; {remedy}" if state == "unhealthy" else ""
            checks.append((state, f"{name} is {state}: {words.format(mean)}{advice}"))
    return sorted(checks, reverse=True)                                     # unhealthy first


# ── The page of a run

def _columns(row: dict) -> dict[str, str]:
    """Columns for `card`: tokens coloured by δ_t and, if present, by A_t; the critique."""
    delta = row["delta"]
    mean = sum(delta) / max(1, len(delta))
    columns = {f"δ_t, mean {mean:+.3f}": heatmap(row["tokens"], delta, 1)}
    if "advantage" in row:
        columns["A_t, whitened; deepest from ±2"] = heatmap(row["tokens"], row["advantage"], 2)
    note = f"no reward: {row['unreadable']}\n" if row["unreadable"] else ""
    return columns | {"critique": text_block(note + row["critique"])}


def _examples(before: list[dict], after: list[dict]) -> str:  # Figure 4
    """At most 8 held-out prompts with responses before and, if present, after training."""
    html = LEGEND
    step = math.ceil(len(before) / 8)                             # evenly spaced, not the best
    for pair in zip(*(rows[::step] for rows in (before, after) if rows)):
        columns = {}
        for side, row in zip(("Before", "After"), pair):
            columns[side] = "".join(f"<h3>{title}</h3>{part}"
                                    for title, part in _columns(row).items())
        html += card(f"held-out {row['id'] or ''}", row["prompt"], columns)
    return html


def _samples(rows: list[dict]) -> str:
    """At most 12 training samples, evenly spaced and ending with the last one."""
    return "".join(card(f"iteration {row['iteration']}", row["prompt"], _columns(row))
                   for row in rows[:: -math.ceil(len(rows) / 12)][::-1])


_NAMES = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_BESIDE = {"true_delta": "delta", "kl": "kl_target"}     # metric → the second line in its chart


def curves(*runs: list[dict]) -> str:  # Figure 3
    """A chart and a note for each metric, the task's own metrics first.

    runs: rows of metrics.jsonl. Several runs are the lines A, B, …. The charts of a single run
    also show the target KL and, beside δ by the annotator, δ by the critic.
    """
    tables = [{row["iteration"]: row for row in rows} for rows in runs]
    x = sorted(set().union(*tables))
    keys = set().union(*chain(*runs))                               # some rows lack some keys
    task_keys = sorted(keys - {"iteration", "kl_target", *NOTES})
    names = _NAMES if len(runs) > 1 else ["last"]
    html = ""
    for key in task_keys + [key for key in NOTES if key in keys]:
        lines = {name: [table.get(i, {}).get(key) for i in x]
                 for name, table in zip(names, tables)}
        partner = _BESIDE.get(key)
        if len(runs) == 1 and partner in keys:
            lines[partner.replace("_", " ")] = [row.get(partner) for row in runs[0]]
        chart = svg_line(key.replace("_", " "), x, lines)
        html += f"<figure>{chart}<figcaption>{NOTES.get(key, '')}</figcaption></figure>"
    return f'<div class="curves">{html}</div>'


def _before_after(result: dict) -> list[list]:
    """A line [name, before, after] for each mean in result.json."""
    return [[name, mean, result["after"][name]] for name, mean in result["before"].items()]


def _compared(rows: list[dict]) -> str:
    return html_table(["held-out mean", "before", "after"], _before_after(rows[0]), 3)


def _pairs(rows: list[dict]) -> str:
    lines = [[key, f"{value:.6g}" if isinstance(value, float) else str(value)]
             for row in rows for key, value in row.items() if not isinstance(value, dict)]
    return html_table(["", ""], lines, kind="wide")


# (title, function from the rows of each file to HTML, names of the files)
_SECTIONS = [
    ("Curves", curves, "metrics.jsonl"),
    ("Held-out examples", _examples, "before_samples.jsonl", "after_samples.jsonl"),
    ("Training samples", _samples, "samples.jsonl"),
    ("Loss of R_φ", curves, "reward/losses.jsonl"),
    ("Reward model", _pairs, "reward/metrics.json"),
    ("Phases", _pairs, "phases.jsonl"), ("Settings", _pairs, "config.json")]


def _section(out: Path, title: str, html_of, *files: str) -> str:
    """A section with the rows of some files of a run; it says if the first has no rows."""
    rows = [whole_rows(out / file) for file in files]
    html = html_of(*rows) if rows[0] else f"{files[0]} does not exist yet."
    return f"<section><h2>{title}</h2>{html}</section>"


def _overview(out: Path) -> str:
    """Model, task, critic, date and seconds of a run; before and after; what is unhealthy.

    Raises InputError if the directory holds no run.
    """
    settings = whole_rows(out / "config.json")
    if not settings:
        raise InputError(f"{out}: there is no config.json; name the --output_dir of a run of "
                         f"text2grad.py")
    facts = [f"{name}: {settings[0][name]}" for name in ("model", "task", "critic of phase 3")
             if settings[0].get(name)]
    phases = whole_rows(out / "phases.jsonl")
    if phases:
        seconds = sum(row["seconds"] for row in phases)
        facts.append(f"{phases[-1]['phase']}: ended {phases[-1].get('ended')} after "
                     f"{seconds:.0f} s in all")
    checks = health(out)
    unhealthy = sum(state == "unhealthy" for state, _ in checks)
    lines = [f'<p class="{state}">{escape(text)}</p>' for state, text in checks]
    return (f'<p>{escape(" · ".join(facts))}</p><div class="columns">'
            + _section(out, "Before and after", _compared, "result.json")
            + f"<section><h2>{unhealthy} of {len(checks)} figures are unhealthy</h2>"
              f"{''.join(lines)}</section></div>")


def run_report(directory) -> Path:
    """Write report.html for a text2grad.py run from its files. The run may be unfinished."""
    out = Path(directory)
    body = _overview(out) + "".join(_section(out, *section) for section in _SECTIONS)
    return write_page(out / "report.html", page(f"Text2Grad: {out.resolve().name}", body))


def evaluation_command(config, out: Path, **flags) -> str:
    """The command that evaluates the policy in `out` with the settings of its training.

    config: text2grad.Config. flags: other flags of eval.py. A function that returned numbers,
    not critiques, is left out.
    """
    samples = whole_rows(out / "samples.jsonl")
    is_numeric = samples and not any(row["critique"] for row in samples)
    reward_model = Path(config.reward_model or out / "reward/adapter")
    settings = {
        "task": config.task, "data": config.data, "model": config.model,
        "adapter": out / "policy",
        "reward_model": reward_model if reward_model.exists() else None,
        "annotator_function": None if is_numeric else config.annotator_function,
        "dtype": config.dtype,
        "max_new_tokens": config.max_new_tokens,
        "max_critique_tokens": config.max_critique_tokens}
    return next_command("eval.py", **settings | flags)


def compare_runs(directories) -> Path:
    """Write comparison.html beside the first run: results, overviews, curves and settings."""
    runs = dict(zip(_NAMES, map(Path, directories)))
    after = [result["after"] for out in runs.values()
             for result in whole_rows(out / "result.json")]
    body = ""
    if len(after) == len(runs):
        names = [name for name in after[0] if all(name in means for means in after)]
        lines = [[name, *(means[name] for means in after), after[-1][name] - after[0][name]]
                 for name in names]
        body = html_table(["after training", *runs, f"{[*runs][-1]} − A"], lines, 3)
    body += "".join(f"<h2>{name}: {escape(str(out))}</h2>{_overview(out)}"
                   for name, out in runs.items())
    body += curves(*(whole_rows(out / "metrics.jsonl") for out in runs.values()))
    settings = [whole_rows(out / "config.json")[0] for out in runs.values()]
    lines = [[key, *(str(row.get(key)) for row in settings)]
             for key in sorted(set().union(*settings))]
    body += html_table(["settings that differ", *runs],
                       [line for line in lines if len(set(line[1:])) > 1], kind="wide")
    return write_page(runs["A"].parent / "comparison.html",
                      page(f"Text2Grad: {len(runs)} runs", body))


def print_result(config, out: Path, prompts: int, hint: str):
    """Print metrics before and after training, warnings, the output files and next commands.

    config: text2grad.Config. prompts: number of held-out prompts. hint: flag that a run with
    other settings needs, or "".
    """
    result, = read_rows(out / "result.json")
    print(table([f"{prompts} held-out prompts", "before", "after"], _before_after(result)))
    for state, text in health(out):
        if state == "unhealthy":
            print(f"warning: {text}")
    print(f"\nReport: {run_report(out)}. {out}/ also contains "
          f"policy/ (PEFT format), metrics.jsonl and samples.jsonl.\n"
          f"{evaluation_command(config, out)}\nor repeat phase 3 with other settings and "
          f"another --output_dir{hint}")


def main():
    """Write the report of a run, or one page that compares several runs."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("run", nargs="+", help="directory of a text2grad.py run")
    runs = parser.parse_args().run
    print(compare_runs(runs) if len(runs) > 1 else run_report(*runs))


if __name__ == "__main__":
    run_script(main, "report")
