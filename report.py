"""What a run measures and shows: metrics, coloured tokens, tables, curves, an HTML report.

    print(colour_tokens(["The ", "cat ", "flew"], [1, 0, -1]))       # good green, poor red
    python report.py runs/toy                # writes report.html, even during training

A page is a single HTML file without scripts or network access. It supports light mode, dark
mode and printing. In log files, or if NO_COLOR is set, good tokens are enclosed in [+ +] and
poor tokens in [- -].

Paper: examples as in Figure 4, curves as in Figures 3, 5 and 6.
"""

import argparse
import importlib
import math
import os
import re
import sys
from collections import Counter, defaultdict
from dataclasses import asdict
from html import escape
from itertools import groupby
from pathlib import Path
from statistics import fmean, stdev

from data import (InputError, append_row, atomic_file, next_command, read_log, read_rows,
                  run_script)

# ── The terminal

_ANSI = {1: "\033[32m{}\033[0m", -1: "\033[31m{}\033[0m"}             # green and red
_PLAIN = {1: "[+{}+]", -1: "[-{}-]"}


def split_text(text: str, offsets) -> list[str]:
    """Split a text into its tokens by their character offsets.

    A character that belongs to several tokens goes to the first of them.
    """
    pieces = []
    last_end = 0
    for start, end in offsets:
        pieces.append(text[max(last_end, start) : end])
        last_end = max(last_end, end)
    return pieces


def printable(text: str) -> str:
    """The text without control characters, except tab and newline.

    Others could move the cursor of a terminal.
    """
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", "", text)


def colour_tokens(tokens: list[str], delta: list[float], colour: bool | None = None) -> str:
    """The response with good tokens in green and poor tokens in red, or in brackets (Figure 1).

    Adjacent tokens of the same sign are marked together. colour: True for ANSI colours, False
    for brackets; None chooses colours on a terminal if NO_COLOR is not set.
    """
    if colour is None:
        colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    text = ""
    for sign, run in groupby(zip(delta, tokens), lambda pair: (pair[0] > 0) - (pair[0] < 0)):
        piece = printable("".join(token for _, token in run))
        word = piece.lstrip()
        mark = (_ANSI if colour else _PLAIN).get(sign if word else 0, "{}")
        text += piece.removesuffix(word) + mark.format(word)
    return text


def _cell(value, digits: int) -> str:
    if value is None:
        return "–"
    return f"{value:z.{digits}f}" if isinstance(value, float) else str(value)


def table(header: list[str], rows: list[list], digits: int = 3) -> str:
    """A text table. Only the first column is left-aligned. Floats get `digits` decimals.

    None becomes a dash.
    """
    cells = [[_cell(value, digits) for value in row] for row in [header, *rows]]
    first, *widths = [max(map(len, column)) for column in zip(*cells)]
    lines = ["  ".join([row[0].ljust(first), *map(str.rjust, row[1:], widths)])
             for row in cells]
    lines.insert(1, "─" * len(lines[0]))
    return "\n".join(map(str.rstrip, lines))


# ── HTML pages, light or dark as the browser is set

_STYLE = """
:root { color-scheme: light dark; font: 16px/1.6 system-ui; }
body { max-width: 1240px; margin: auto; padding: 1rem; } h1 { margin: .4em 0; }
h2 { margin: 2em 0 .4em; } h3, figcaption { font-size: .8rem; margin: .4rem 0; }
section { min-width: 0; } h3, th, figcaption, .prompt { opacity: .75; }
table { font-size: .9rem; border-collapse: collapse; } figure svg { min-width: 320px; }
th, td { padding: .25rem .5rem; text-align: right; border-bottom: 1px solid #8885; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
td { white-space: nowrap; }
.text { white-space: pre-wrap; overflow-wrap: anywhere; text-underline-offset: .22em;
  print-color-adjust: exact; }
.card, figure { border: 1px solid #8885; padding: .6rem 1rem; margin: .5rem 0;
  break-inside: avoid; } .columns, .curves { display: grid; gap: .2rem 1rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 15rem), 1fr)); }
.curves { grid-template-columns: repeat(auto-fit, minmax(min(100%, 22.2rem), 1fr)); }
figure { padding: .4rem; } .scroll, figure { overflow-x: auto; }
.prompt { max-height: 9rem; overflow-y: auto; }
@media (max-width: 30rem) { table { font-size: .75rem; } th, td { padding: .25rem .15rem; } }
@media print { :root { font-size: 12px; } .prompt { opacity: 1; max-height: none; } }
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


def write_page(path, text: str):
    """Write a page atomically, in UTF-8. Half a surrogate pair becomes, e.g., &#55296;."""
    with atomic_file(path) as temporary:
        temporary.write_text(text, "utf-8", "xmlcharrefreplace")


def html_table(header: list[str], rows: list[list], digits: int = 2) -> str:
    """The same as `table`, but in HTML."""
    html = ""
    for number, row in enumerate([header, *rows]):
        tag = "td" if number else "th"
        cells = [f"<{tag}>{escape(_cell(value, digits))}</{tag}>" for value in row]
        html += f"<tr>{''.join(cells)}</tr>"
    return f'<div class="scroll"><table>{html}</table></div>'


def text_block(text: str) -> str:
    """A block of text that keeps its white space."""
    return f'<div class="text" dir="auto">{escape(text)}</div>'


def card(heading: str, prompt: str, columns: dict[str, str]) -> str:
    """A box with a heading, a prompt, and columns {title: HTML} below it."""
    sections = [f"<section><h3>{escape(title)}</h3>{html}</section>"
                for title, html in columns.items()]
    return (f'<article class="card"><b>{escape(heading)}</b>'
            f'<div class="prompt">{text_block(prompt)}</div>'
            f'<div class="columns">{"".join(sections)}</div></article>')


# ── Tokens and quotes in colour

# Colours of good tokens, poor tokens and the curves. They are chosen so that colour-blind
# readers can tell them apart, both on white and on black.
_COLOURS = ("#009e73", "#d55e00", "#2f7fd1", "#8a63d2", "#b0902a", "#c2549d")


def heatmap(tokens: list[str], values: list[float], limit: float = 1) -> str:
    """Tokens as HTML, coloured by δ_t or A_t: green above 0, orange-red below 0.

    limit: values of this magnitude or more get the full colour. ↵ shows a newline, ▯ a token
    without text.
    """
    html = ""
    for token, value in zip(tokens, values, strict=True):
        colour = _COLOURS[value < 0]
        wave = "wavy " if value < 0 else ""
        level = min(1, abs(value) / limit) if math.isfinite(value) else 0
        html += (f'<span title="{value:+.4g}" '
                 f'style="background:{colour}{round(128 * level):02x};'
                 f'text-decoration:underline {wave}{colour}{round(255 * level):02x}">'
                 f'{escape(token).replace(chr(10), "↵" + chr(10)) or "▯"}</span>')
    return ('<div dir="auto" style="white-space:pre-wrap;overflow-wrap:anywhere;'
            f'text-underline-offset:.22em;print-color-adjust:exact">{html}</div>')


LEGEND = heatmap(["good", " poor", " no colour: 0; ▯: a token without text"], [1, -1, 0])


# ── Curves

def svg_line(title: str, x: list[int], series: dict[str, list], unit: str = "iteration") -> str:
    """A line chart of named series as SVG. unit: label of the x axis.

    The y axis goes from the lowest value to the highest, or a little further. Labels must not
    be longer than −0.00012, because the margin has no more room. Values that are None, NaN or
    infinite are left out; the line connects their neighbours.
    """
    lines = {name: [(i, v) for i, v in zip(x, values) if v is not None and math.isfinite(v)]
             for name, values in series.items()}
    values = [v for points in lines.values() for _, v in points] or [0.0]
    low = min(values)
    # The axis covers at least 1 % of the lowest value. Otherwise the curve of a constant would
    # show magnified rounding errors.
    height = max(max(values) - low, abs(low) / 100) or 1.0
    width = x[-1] - x[0] or 1
    columns = len(lines) if len(lines) < 4 else 2                # of the legend
    top = 12 * ((len(lines) - 1) // columns)                     # height of its further rows

    def place(i, value):
        return f"{56 + 270 * (i - x[0]) / width:.2f} {156 - 110 * (value - low) / height:.2f}"

    svg = (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 {-top} 340 {180 + top}" '
           f'width="100%" role="img" style="max-width:460px;font:11px system-ui" '
           f'fill="currentColor">'
           f'<title>{escape(title)}</title><text x="4" y="{13 - top}">{escape(title)}</text>'
           f'<path d="M56 46H326M56 156H326" stroke="#8885"/>'
           f'<text x="50" y="50" text-anchor="end">{low + height:.3g}</text>'
           f'<text x="50" y="160" text-anchor="end">{low:.{3 - (-1e-3 < low < 0)}g}</text>'
           f'<text x="56" y="172">{x[0]:g}</text>'
           f'<text x="191" y="172" text-anchor="middle">{escape(unit)}</text>'
           f'<text x="326" y="172" text-anchor="end">{x[-1]:g}</text>')
    for number, (name, points) in enumerate(lines.items()):
        pen = (f'fill="none" stroke="{_COLOURS[number % 6]}" stroke-width="1.8" '
               f'stroke-linecap="round"')
        row, column = divmod(number, columns)
        y = 28 - top + 12 * row
        path = "L".join(f"{place(*point)}h0" for point in points)     # h0 shows a single point
        svg += (f'<g transform="translate({336 * column / columns:.1f})"><path d="M4 {y}h13" '
                f'{pen}/><text x="21" y="{y + 4}">{escape(name)}</text></g>'
                f'<path class="curve" d="M{path}" {pen}/>')
    return svg + "</svg>"


# Metric → what it is, its unit, and how it should develop during training.
NOTES = {
    "delta": "mean δ_t per token by the critic, −1 to 1; rises",
    "good": "share of tokens in good spans; rises",
    "poor": "share of tokens in poor spans; falls",
    "entropy": "nats per token; falls slowly; near 0, all rollouts are the same",
    "kl": "nats per response from the reference; healthy under 3 kl_target, otherwise lower "
          "--learning_rate or raise --kl_coef",
    "kl_coef": "β; rises while kl is above kl_target, falls while it is below",
    "response_tokens": "tokens per response; steady",
    "truncated": "share of responses cut off at --max_new_tokens; healthy under .5, otherwise "
                 "raise --max_new_tokens",
    "explained_variance": "approaches 1; below 0 the value head is worse than a constant",
    "unparseable": "share of critiques that cannot be parsed; healthy under .05",
    "unmatched": "share of quotes not in the response, or inside a word; healthy under .05",
    "ambiguous": "share of quotes that occur more often than quoted; healthy under .05, "
                 "otherwise the annotator must quote more words",
    "conflicting": "share of tokens in good and poor spans; healthy under .05, otherwise the "
                   "annotator must not quote words as both",
    "policy_loss": "about 0, as A_t is whitened; no trend",
    "value_loss": "squared units of the return; falls at first, then noise",
    "ratio": "mean ρ_t; about 1",
    "policy_kl": "nats per token from π_old to π; healthy under .05, otherwise lower "
                 "--learning_rate",
    "clip_fraction": "share of clipped tokens; healthy under .2, otherwise lower "
                     "--learning_rate",
    "grad_norm": "norm before clipping; steady; look at the batches of its peaks",
    "skipped_steps": "optimizer steps with a gradient or ρ_t out of bounds; healthy at 0, "
                     "otherwise lower --learning_rate",
    "seconds_rollout": "steady", "seconds_critique": "steady",
    "seconds_score": "steady", "seconds_update": "steady",
}
# The limits that NOTES names as "healthy". That of kl, 3 kl_target, depends on the run.
LIMITS = {"truncated": 0.5, "unparseable": 0.05, "unmatched": 0.05, "ambiguous": 0.05,
          "conflicting": 0.05, "policy_kl": 0.05, "clip_fraction": 0.2, "skipped_steps": 0}
# --critic → what to do about many unparseable critiques or unmatched quotes
CRITIC_REMEDIES = {"reward_model": "raise --reward_learning_rate or --reward_epochs",
                   "annotator": "the annotator must quote whole words exactly"}


def above_limits(rows: list[dict], critic: str) -> list[str]:
    """A sentence for each metric whose mean over the iterations is above its limit.

    rows: of metrics.jsonl, or the means before training. critic: the flag --critic.
    """
    sentences = []
    target = rows[-1].get("kl_target") if rows else 0               # 0 where β is fixed
    for metric, limit in {**LIMITS, "kl": 3 * (target or math.inf)}.items():
        values = [row[metric] for row in rows if metric in row]
        if values and not fmean(values) <= limit:                   # NaN is above, too
            note = NOTES[metric]
            if metric in ("unparseable", "unmatched"):
                note += f", otherwise {CRITIC_REMEDIES[critic]}"
            sentences.append(f"{metric} is {fmean(values):.3g}: {note}")
    return sentences


# ── What is measured: R_φ on held-out rows (§4.2, Table 1)

def count_tokens(truth: list[float], predicted: list[float]) -> Counter:
    """Count good and poor tokens of a response, for precision and recall (Table 1).

    truth: δ of the annotator, [T]; a token with δ ≠ 0 is "marked". predicted: δ' of R_φ, [T];
    a "hit" is a marked token for which R_φ predicts the same sign. Only signs are compared, so
    that graded values such as .75 count as well.
    """
    counts = Counter(tokens=len(truth))
    for true_delta, predicted_delta in zip(truth, predicted):
        for name, sign in (("good", 1), ("poor", -1)):
            is_marked = true_delta * sign > 0
            is_predicted = predicted_delta * sign > 0
            counts[f"{name} marked"] += is_marked
            counts[f"{name} predicted"] += is_predicted
            counts[f"{name} hit"] += is_marked and is_predicted
    return counts


def token_figures(counts: Counter) -> dict[str, float | None]:
    """Precision and recall from the sums of `count_tokens`; None if a denominator is 0."""
    figures = {}
    for name in ("good", "poor"):
        for figure, denominator in (("precision", "predicted"), ("recall", "marked")):
            total = counts[f"{name} {denominator}"]
            figures[f"{name}_{figure}"] = counts[f"{name} hit"] / total if total else None
    return figures


def reward_model_summary(metrics: dict) -> str:
    """One line with the precision and recall of R_φ, and a warning if R_φ is weak.

    R_φ is weak if it finds less than a fifth of the poor tokens, or if its poor tokens are not
    more precise than random ones.
    """
    if not metrics["held_out_rows"]:
        return "trained, but not evaluated: too few rows to hold any out"
    figures = ", ".join(f"{name} {metrics[name] or 0.0:.3f}" for name in (
        "poor_precision", "poor_recall", "good_precision", "good_recall", "unparseable"))
    share = metrics["poor_tokens"] / max(1, metrics["tokens"])
    text = f"{figures}; {share:.3f} of {metrics['tokens']} held-out tokens are poor"
    if (metrics["poor_recall"] or 0.0) < 0.2 or (metrics["poor_precision"] or 0.0) <= share:
        text += ("\nwarning: R_φ is weak; annotate more rows, raise --reward_epochs, or use "
                 "--critic annotator")
    return text


# ── What is measured: the responses of a batch, a policy.Rollouts

def review_metrics(review, is_truncated: bool) -> dict[str, float]:
    """The metrics of one response that follow from its annotate.Review.

    "good", "poor" and "conflicting" are shares of the tokens of the response.
    """
    delta = review.delta
    tokens = max(1, len(delta))
    return {"delta": sum(delta) / tokens, "good": sum(d > 0 for d in delta) / tokens,
            "poor": sum(d < 0 for d in delta) / tokens, "response_tokens": len(delta),
            "truncated": float(is_truncated), "unparseable": float(bool(review.reason)),
            "conflicting": review.conflicts / tokens}


def response_metrics(rollouts) -> list[dict[str, float]]:
    """The metrics of each response, task.truth first; curves and tables show their means."""
    metrics = []
    for row, text, review, is_truncated in zip(
            rollouts.rows, rollouts.texts, rollouts.reviews, rollouts.truncated):
        truth = {name: float(measure(row, text))
                 for name, measure in rollouts.task.truth.items()}
        metrics.append(truth | review_metrics(review, is_truncated))
    return metrics


def mean_metrics(metrics: list[dict], reviews: list) -> dict[str, float]:
    """The means of `response_metrics`, and the shares of unmatched and ambiguous quotes."""
    means = {name: fmean(row[name] for row in metrics) for name in metrics[0]}
    quotes = max(1, sum(review.quotes for review in reviews))
    return means | {"unmatched": sum(review.unmatched for review in reviews) / quotes,
                    "ambiguous": sum(review.ambiguous for review in reviews) / quotes}


def batch_metrics(rollouts) -> dict[str, float]:
    """The means over a batch, and metrics of the policy; NOTES explains them."""
    sampled = rollouts.mask.bool()
    kl = (rollouts.logprobs_old.double() - rollouts.logprobs_ref.double())[sampled]
    returns = rollouts.returns[sampled].double()
    errors = returns - rollouts.values[sampled].double()
    unexplained = errors.var(correction=0) / returns.var(correction=0).clamp(min=1e-12)
    return mean_metrics(response_metrics(rollouts), rollouts.reviews) | {
        "kl": kl.sum().item() / len(rollouts.rows),               # nats per response
        "entropy": rollouts.entropy[sampled].double().mean().item(),
        "explained_variance": 1 - unexplained.item()}


def review_sample(prompt: str, text: str, offsets, review) -> dict:
    """A response and its annotate.Review for people to read: each token with its δ_t."""
    return {"prompt": prompt, "response": text, "critique": review.critique,
            "unreadable": review.reason, "tokens": split_text(text, offsets),
            "delta": review.delta, "fates": review.fates}


def sample_row(rollouts, row: int) -> dict:
    """One rollout for the report: its `review_sample` and, if computed, A_t of each token."""
    offsets = rollouts.offsets[row]
    sample = review_sample(rollouts.prompts[row], rollouts.texts[row], offsets,
                           rollouts.reviews[row])
    if rollouts.advantages is not None:
        sample["advantage"] = rollouts.advantages[row, : len(offsets)].tolist()
    return sample


def measure_held_out(rollouts, truth=()) -> tuple[dict, list[dict]]:
    """(the means of all metrics, the samples with their metrics) of held-out responses.

    truth: the annotator's reviews, if they are known; then the means hold R_φ's `token_figures`
    and the number of tokens that the annotator marks as poor.
    """
    metrics = response_metrics(rollouts)
    samples = [{"id": row.get("id"), **sample_row(rollouts, i), "scores": metrics[i]}
               for i, row in enumerate(rollouts.rows)]
    means = mean_metrics(metrics, rollouts.reviews)
    counts = Counter()
    for annotation, review in zip(truth, rollouts.reviews):
        counts += count_tokens(annotation.delta, review.delta)
    if truth:
        means |= token_figures(counts) | {"poor_tokens": counts["poor marked"]}
    return means, samples


def load_tracker():
    """The package wandb. Raises InputError where it is not installed."""
    try:
        return importlib.import_module("wandb")
    except ImportError as error:
        raise InputError(f"--wandb needs the package wandb ({error}); pip install wandb"
                         ) from error


def log_iteration(metrics: dict, rollouts, config, out: Path) -> str:
    """Write an iteration's metrics and one sample; with --wandb, log the metrics there, too.

    Returns a line for the terminal: in every tenth iteration the sample in colour, else "".
    """
    iteration = metrics["iteration"]
    sample = sample_row(rollouts, (iteration - 1) % len(rollouts.rows))
    append_row(out / "metrics.jsonl", metrics)
    append_row(out / "samples.jsonl", {"iteration": iteration, **sample})
    if config.wandb:
        wandb = load_tracker()
        if wandb.run is None:
            wandb.init(project=config.wandb, name=out.name, config=asdict(config))
        wandb.log(metrics, step=iteration)
    if iteration % 10 != 1:
        return ""
    return f"{iteration:4d}  {colour_tokens(sample['tokens'], sample['delta'])}"


# ── What phase 3 can learn from

MOST_UNREADABLE = 0.5                     # share of critiques; phase 3 does not start above it
MOST_EQUAL = 0.98                         # share of tokens with the same δ; a warning above it
# What is wrong with quotes, called their fate → what to do
REMEDIES = {
    "unmatched": "copy each quote from the response, character by character",
    "inside a word": "begin and end each quote with whole words",
    "ambiguous": "quote more words, so that each quote occurs once",
    "conflicting": "put each quote in one list only",
    "around all words": "leave out the words that are neither good nor poor",
    "around no whole word": "return passages of the response as good_spans and poor_spans",
}


def describe_critiques(samples: list[dict], critic: str, shown: int, means=None) -> str:
    """Some responses in colour (Figure 2), and the lines of `check_critiques`.

    samples: see `review_sample`. critic: the flag --critic, which says who wrote the critiques.
    shown: number of responses in colour. means: {metric: mean}; a metric above its limit gives
    a warning. Raises InputError, as `check_critiques` does.
    """
    text = ""
    for sample in samples[:shown]:
        dots = "…" * (len(sample["prompt"]) > 300)
        text += (f"\n{dots}{printable(sample['prompt'][-300:])}\n"
                 f"  response: {colour_tokens(sample['tokens'], sample['delta'])}\n"
                 f"  critique: {printable(sample['critique'])}\n")
    text += f"\n{check_critiques(samples, critic)}"
    for sentence in above_limits([means] if means else [], critic):
        text += f"\nwarning: {sentence}"
    return text


def check_critiques(samples: list[dict], critic: str) -> str:
    """Lines with the shares of good and poor tokens, and the number of quotes for each fate.

    The fate of a quote is "found", or what is wrong with it. samples: see `review_sample`.
    critic: the flag --critic, which says who wrote the critiques. Raises InputError if nothing
    can be learned: most critiques are unreadable, or δ is the same for every token.
    """
    has_reward_model = critic == "reward_model"
    unreadable = [sample["unreadable"] for sample in samples if sample["unreadable"]]
    if len(unreadable) > MOST_UNREADABLE * len(samples):
        remedy = "read the replies in the journal"
        if has_reward_model:
            remedy = ("train R_φ again with more rows or --reward_epochs, or a higher "
                      "--reward_learning_rate or --max_critique_tokens")
        raise InputError(f"{len(unreadable) / len(samples):.0%} of the critiques cannot be "
                         f"read (as for: {unreadable[0]}); {remedy}")
    quotes_by_fate = defaultdict(list)
    deltas = []                         # of tokens with text, and of others that have a reward
    for sample in samples:
        for fate, quotes in sample["fates"].items():
            quotes_by_fate[fate] += quotes
        deltas += [delta for token, delta in zip(sample["tokens"], sample["delta"])
                   if token.strip() or delta]
    good, poor = (fmean([sign * delta > 0 for delta in deltas] or [0]) for sign in (1, -1))
    lines = [f"critiques of {len(samples)} responses, {len(unreadable)} unreadable: "
             f"{good:.0%} of the tokens are good and {poor:.0%} poor"]
    lines += [f"{len(quotes)} quotes {fate}, for example {quotes[0][:60]!r}"
              for fate, quotes in quotes_by_fate.items()]
    (value, count), = Counter(deltas or [0.0]).most_common(1)
    share = count / max(1, len(deltas))
    if MOST_EQUAL < share < 1:
        lines.append(f"warning: δ is {value:g} for {share:.1%} of the tokens; this may teach, "
                     f"but slowly")
    if share < 1:
        return "\n".join(lines)
    # All tokens have the same δ. If it is 0, the most frequent fate except "found" says why.
    found = quotes_by_fate.pop("found", [])
    fate = "around all words" if value else "around no whole word"
    if quotes_by_fate and not value:
        fate, found = max(quotes_by_fate.items(), key=lambda item: len(item[1]))
    examples = " and ".join(repr(quote[:60]) for quote in [*dict.fromkeys(found)][:2])
    cause = "nothing is quoted"
    if found:
        cause = f"{len(found)} quotes are {fate} (such as {examples})"
    remedy = REMEDIES[fate]
    if has_reward_model:
        remedy = "train R_φ again with more rows or --reward_epochs, or use --critic annotator"
    raise InputError(f"nothing can be learned, because δ is {value:g} for every token: "
                     f"{cause}; {remedy}")


# ── The page of a run

def _cards(*files: list[dict]) -> str:  # Figure 4
    """At most ten samples, each with its δ_t, its A_t if it is known, and its critique.

    files: the rows of samples.jsonl, or of the same prompts before and after training.
    """
    html = LEGEND
    samples = [*zip(*filter(None, files))]
    for rows in samples[:: math.ceil(len(samples) / 10)]:       # evenly spaced, not the best
        columns = {}
        for side, row in zip(("", "after training, "), rows):
            columns[f"{side}δ_t"] = heatmap(row["tokens"], row["delta"])
            if "advantage" in row:
                columns["A_t, deepest from ±2"] = heatmap(row["tokens"], row["advantage"], 2)
            title = f"no reward, {row['unreadable']}" if row["unreadable"] else "critique"
            columns[side + title] = text_block(row["critique"])
        html += card(f"{row.get('id') or row.get('iteration', '')}", row["prompt"], columns)
    return html


def curves(rows: list[dict]) -> str:  # Figure 3
    """A chart and a note for each metric, the task's own metrics first."""
    keys = set().union(*rows) - {"iteration", "kl_target"}          # some rows lack some keys
    html = ""
    for key in sorted(keys - NOTES.keys()) + [key for key in NOTES if key in keys]:
        values = [row.get(key) for row in rows]
        chart = svg_line(key, [row["iteration"] for row in rows],
                         {f"last {_cell(values[-1], 4)}": values})
        html += f"<figure>{chart}<figcaption>{NOTES.get(key, '')}</figcaption></figure>"
    return f'<div class="curves">{html}</div>'


def before_and_after(after: list[dict], before: list[dict], settings: list[dict]):
    """Header and lines of the table of held-out means, for `table` and `html_table`.

    The arguments are the rows of the files in _RESULT. The change of a prompt is the score of
    the response after training minus the score of the response before. ± is 1.96 standard
    errors of the mean change, which gives its 95 % interval.
    """
    lines = []
    for name in before[0]["scores"]:
        old, new = ([row["scores"][name] for row in rows] for rows in (before, after))
        changes = [y - x for x, y in zip(old, new)]
        change = f"{fmean(changes):+.3f}"
        if len(changes) > 1:
            change += f" ± {1.96 * stdev(changes) / math.sqrt(len(changes)):.3f}"
        lines.append([name, fmean(old), fmean(new), change])
    return [f"{len(before)} held-out responses, temperature {settings[0]['temperature']}",
            "before", "after", "change, 95 % interval"], lines


FEW_TOKENS = 100                # poor tokens; of fewer tokens, the recall says little


def compare_with_annotator(result: dict) -> str:
    """Lines on how well R_φ finds what the annotator marks, before and after training.

    result: the row of result.json. "" if they were not compared: R_φ is not the critic, or the
    annotator is a server, where each request has a price.
    """
    if "poor_tokens" not in result["before"]:
        return ""
    lines = ["R_φ beside the annotator, on the same held-out responses:"]
    for when in ("before", "after"):
        means = result[when]
        lines.append(f"  {when} training: poor tokens {means['poor_tokens']}, "
                     f"recall {_cell(means['poor_recall'], 3)}, "
                     f"precision {_cell(means['poor_precision'], 3)}")
    if means["poor_tokens"] >= FEW_TOKENS and means["poor_recall"] < 0.8:
        lines.append("R_φ does not see some of the errors that are left; --critic annotator "
                     "asks the annotator itself")
    return "\n".join(lines)


def _pairs(rows: list[dict]) -> str:
    lines = [f"{key}: {value}" for row in rows for key, value in row.items()]
    return text_block("\n".join(lines))


# The function raises an error if a row lacks one of these numbers, so `read_log` skips it.
_CHECKS = {"metrics.jsonl": lambda row: fmean(map(row.get, ("iteration", *LIMITS, "kl")))}
_RESULT = "after_samples.jsonl", "before_samples.jsonl", "config.json"
# (title, function, names of files). The function maps the rows of each file to HTML.
_SECTIONS = [
    ("Before and after", lambda *rows: html_table(*before_and_after(*rows), 3), *_RESULT),
    ("Metrics above their limits", lambda rows, settings: text_block(
        "\n".join(above_limits(rows, settings[0]["critic"])) or "none"),
     "metrics.jsonl", "config.json"),
    ("R_φ and the annotator", lambda rows: text_block(
        compare_with_annotator(rows[0]) or "R_φ was not compared."), "result.json"),
    ("Curves", curves, "metrics.jsonl"),
    ("Held-out examples, before and after training", _cards, "before_samples.jsonl",
     "after_samples.jsonl"),
    ("Samples, by iteration", _cards, "samples.jsonl"),
    ("Loss of R_φ", curves, "reward/losses.jsonl"),
    ("Reward model", _pairs, "reward/metrics.json"),
    ("Phases", _pairs, "phases.jsonl"), ("Settings", _pairs, "config.json")]


def run_report(directory) -> Path:
    """Write report.html for a text2grad.py run from its files. The run may be unfinished.

    Raises InputError if the directory holds no run.
    """
    out = Path(directory)
    facts = "model {model} · task {task} · critic: {critic}"
    settings = read_log(out / "config.json", facts.format_map)
    if not settings:
        raise InputError(f"{out} has no config.json; name the --output_dir of a run")
    body = text_block(facts.format(**settings[0]))
    for title, html_of, *names in _SECTIONS:
        files = [read_log(out / name, _CHECKS.get(name, bool)) for name in names]
        html = html_of(*files) if files[0] else f"{names[0]} does not exist yet."
        body += f"<section><h2>{title}</h2>{html}</section>"
    path = out / "report.html"
    write_page(path, page(f"Text2Grad: {out.resolve().name}", body))
    return path


def print_result(out: Path, hint: str):
    """Print the means before and after training, warnings, and what to do next.

    hint: the flag with which a run with other settings reuses this R_φ, or "".
    """
    results = [read_rows(out / name) for name in _RESULT]
    print(table(*before_and_after(*results)))
    print("± is 1.96 standard errors; equal rows count as often as they occur\n"
          + compare_with_annotator(read_rows(out / "result.json")[0]))
    metrics = read_log(out / "metrics.jsonl", _CHECKS["metrics.jsonl"])
    for text in above_limits(metrics, results[-1][0]["critic"]):
        print(f"warning: {text}")
    print(f"\nReport: {run_report(out)}; beside it: policy/, metrics.jsonl, samples.jsonl\n"
          f"{next_command('eval.py', adapter=out / 'policy')}\n"
          f"or repeat phase 3 with other settings and another --output_dir{hint}")


def main():
    """Write the report of a run."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("run", help="directory of a text2grad.py run")
    print(run_report(parser.parse_args().run))


if __name__ == "__main__":
    run_script(main, "report")
