"""What people look at: tokens coloured by δ in the terminal, and small aligned tables.

    print(colour_tokens(["The ", "cat ", "flew"], [1, 0, -1]))        # good green, poor red, the rest plain

Colours are used where standard output is a terminal and NO_COLOR is not set (or FORCE_COLOR is); elsewhere good tokens
stand in [+ +] and poor ones in [- -], so that logs stay readable.

    feedback_page("feedback.html", "Toy summaries", rows)              # annotated responses, to look at in a browser
    python report.py runs/toy                                          # report.html, as text2grad.py writes it itself

Paper: curves as in Figures 3, 5 and 6, spans coloured as in Figure 2; it says nothing of pages and trackers.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import platform
import re
import shlex
import sys
import time
from bisect import bisect_left, bisect_right
from collections import Counter
from html import escape
from importlib import import_module
from importlib.metadata import version
from itertools import groupby
from pathlib import Path

# ── The terminal ────────────────────────────────────────────────────────────────────────────────────────

_ANSI = {1: ("\033[32m", "\033[0m"), -1: ("\033[31m", "\033[0m")}
_PLAIN = {1: ("[+", "+]"), -1: ("[-", "-]")}


def use_colour() -> bool:
    """Whether the terminal shows ANSI colours."""
    return "FORCE_COLOR" in os.environ or ("NO_COLOR" not in os.environ and sys.stdout.isatty())


def split_text(text: str, offsets) -> list[str]:
    """The text that each token wrote, by its characters [start, end); one shared by several stands with the first."""
    pieces, at = [], 0
    for start, end in offsets:
        pieces.append(text[max(at, start):end])
        at = max(at, end)
    return pieces


def colour_tokens(tokens: list[str], delta: list[float], colour: bool | None = None) -> str:  # Figure 1
    """The response with its good tokens green and its poor tokens red; runs of one sign are marked once."""
    marks = _ANSI if (use_colour() if colour is None else colour) else _PLAIN
    out = []
    for sign, run in groupby(zip(tokens, delta), key=lambda pair: (pair[1] > 0) - (pair[1] < 0)):
        piece = "".join(token for token, _ in run)
        space = piece[: len(piece) - len(piece.lstrip())]
        before, after = marks.get(sign, ("", ""))
        out.append(f"{space}{before}{piece[len(space):]}{after}" if piece.strip() else piece)
    return "".join(out)


def _cell(value, digits: int) -> str:
    return "–" if value is None else f"{value:z.{digits}f}" if isinstance(value, float) else str(value)


def table(header: list[str], rows: list[list], digits: int = 3) -> str:
    """An aligned table: numbers to the right with `digits` decimals, None as a dash."""
    cells = [header] + [[_cell(value, digits) for value in row] for row in rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = ["  ".join(text.rjust(w) if i else text.ljust(w) for i, (text, w) in enumerate(zip(row, widths))).rstrip()
             for row in cells]
    return "\n".join([lines[0], "─" * (sum(widths) + 2 * (len(widths) - 1)), *lines[1:]])


# ── Pages ───────────────────────────────────────────────────────────────────────────────────────────────

_STYLE = """
:root { color-scheme: light dark; --ground: #f5f6f8; --card: #fff; --ink: #1b2027; --muted: #59636e; --line: #dce0e5;
  --accent: #1f56c0; --good: #d2f0e0; --good-line: #0e7a4e; --poor: #fcdad4; --poor-line: #bb2a1d; --shade: #f0f2f5;
  --both: repeating-linear-gradient(135deg, #ffe6ad 0 5px, #ffd27a 5px 10px); --both-line: #8a5a00; }
@media (prefers-color-scheme: dark) { :root { --ground: #121519; --card: #1b2026; --ink: #e4e8ec; --muted: #9aa5b1;
  --line: #2e363f; --accent: #8db6ff; --good: #12402d; --good-line: #58d69b; --poor: #54211c; --poor-line: #ff9a8c;
  --both: repeating-linear-gradient(135deg, #4b3913 0 5px, #63491a 5px 9px); --both-line: #f4c453; --shade: #242b32 } }
* { box-sizing: border-box; } a { color: var(--accent); }
body { margin: 0; background: var(--ground); color: var(--ink); font: 16px/1.55 system-ui, sans-serif; }
main { max-width: 1240px; margin: 0 auto; padding: 1.6rem clamp(.7rem, 3vw, 2rem) 3rem; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0 0 .2rem; overflow-wrap: anywhere; }
h2 { font-size: 1rem; margin: 1.4rem 0 .4rem; } p { margin: .3rem 0; } .muted { color: var(--muted); }
h3 { font-size: .75rem; letter-spacing: .04em; color: var(--muted); margin: 0 0 .25rem; font-weight: 600; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font: .875rem/1.5 system-ui; }
th, td { padding: .25rem .8rem; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; padding-left: 0; } th { color: var(--muted); font-weight: 600; }
@media print { :root { --ground: #fff; } body { font-size: 10pt; } main { max-width: none; padding: 0; } }
"""


def page(title: str, body: str, script: str = "", style: str = "") -> str:
    """A self-contained HTML page in the shared style; the browser is told to load nothing from anywhere.

    title: plain text. body: HTML. script: our JavaScript, run when the body stands; what rows say belongs in `embed`.
    """
    assert "</script" not in script.lower(), "the script would end early"
    policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
    return f"""<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>{escape(title)}</title><style>{_STYLE}{style}</style></head>
<body><main><h1>{escape(title)}</h1>
{body}
</main>{f"<script>{script}</script>" if script else ""}</body></html>
"""


def write_page(path, text: str):
    """Write a page, whole or not at all; one that stands there already is left alone.

    Half of a surrogate pair is shown as the replacement mark.
    """
    path, data = Path(path), text.encode("utf-8", "xmlcharrefreplace")
    if path.exists() and path.read_bytes() == data:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(data)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def embed(name: str, value) -> str:
    """Data for a page's script as a JSON element: pure ASCII without "<", so that no text can end the element."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return f'<script type="application/json" id="{name}">{text}</script>'


def html_table(header: list[str], rows: list[list], digits: int = 2) -> str:
    """`table` for a page."""
    lines = [("th", header)] + [("td", [_cell(value, digits) for value in row]) for row in rows]
    body = "\n".join(f"<tr>{''.join(f'<{tag}>{escape(cell)}</{tag}>' for cell in cells)}</tr>" for tag, cells in lines)
    return f'<div class="scroll"><table>{body}</table></div>'


# ── The page of annotated responses ─────────────────────────────────────────────────────────────────────

def words(text: str) -> list[tuple[int, int]]:
    """Characters [start, end) of every run without white space."""
    return [match.span() for match in re.finditer(r"\S+", text)]


def labelled(text: str, offsets, spans: list[dict]) -> tuple[set[int], set[int]]:
    """Which tokens are in good spans and which in poor ones: all their non-space characters lie in one span (§3.3).

    offsets: the characters [start, end) of each token, in reading order. A token in both sets gets δ_t = 0.
    """
    starts, ends = [], []
    for start, end in offsets:
        core = text[start:end].strip() or text[start:end]           # of a token that is all space, the space itself
        starts.append(text.index(core, start))
        ends.append(starts[-1] + len(core))
    found: dict[int, set[int]] = {1: set(), -1: set()}
    for span in spans:
        inside = range(bisect_left(starts, span["start"]), bisect_right(ends, span["end"]))
        found[span["label"]] |= {i for i in inside if starts[i] < ends[i]}
    return found[1], found[-1]


def problems(row: dict) -> dict[str, int]:
    """What is wrong with an annotated row: how many "unmatched", "ambiguous", "conflicting", or {"failed": 1}.

    Unmatched and ambiguous count quotes, as the row's fields of that name do; conflicting counts words in a good and
    a poor span at once, found anew from the spans. Raises ValueError where the row is no annotated row.
    """
    name, response, spans = row.get("id"), row.get("response"), row.get("spans")
    if not isinstance(response, str) or not (isinstance(spans, list) or row.get("reason")):
        raise ValueError(f"row {name!r} is not annotated: it needs a text 'response' and a list 'spans' or a 'reason'")
    for span in spans or ():
        numbers = [span.get(key) for key in ("start", "end", "label")] if isinstance(span, dict) else [None]
        if set(map(type, numbers)) != {int} or not 0 <= numbers[0] <= numbers[1] <= len(response) or numbers[2]**2 != 1:
            raise ValueError(f"row {name!r}: {span} is no span (0 ≤ start ≤ end ≤ {len(response)}, label 1 or -1)")
    if row.get("reason"):
        return {"failed": 1}
    good, poor = labelled(response, words(response), spans)
    counts = {"unmatched": len(row.get("unmatched") or ()), "ambiguous": row.get("ambiguous") or 0,
              "conflicting": len(good & poor)}
    return {kind: number for kind, number in counts.items() if number}


_FEEDBACK_STYLE = """
mark { color: inherit; border-radius: 3px; padding: .06em 0; text-underline-offset: .22em;
  text-decoration-skip-ink: none; box-decoration-break: clone; print-color-adjust: exact; }
mark.good { background: var(--good); text-decoration: underline 2px var(--good-line); }
mark.poor { background: var(--poor); text-decoration: underline wavy 1.5px var(--poor-line); }
mark.both { background: var(--both); text-decoration: underline double 2px var(--both-line); }
.bar { position: sticky; top: 0; z-index: 1; background: var(--ground); padding: .6rem 0; margin-top: .6rem;
  display: flex; flex-wrap: wrap; gap: .45rem; align-items: center; border-bottom: 1px solid var(--line); }
.bar a, button, input, select { font: inherit; font-size: .875rem; line-height: 1.4; color: inherit; cursor: pointer;
  background: var(--card); border: 1px solid var(--line); border-radius: 7px; padding: .3rem .7rem; }
.bar a { text-decoration: none; } .bar a b { font-weight: 600; color: var(--muted); margin-left: .35rem; }
.bar a.on, .bar a.on b { background: var(--accent); border-color: var(--accent); color: var(--card); }
.bar :focus-visible { outline: 2px solid var(--accent); } .bar hr { flex-basis: 100%; border: 0; margin: 0; }
.bar input { flex: 1 1 10rem; min-width: 8rem; cursor: text; } button:disabled { opacity: .4; cursor: default; }
.pager { display: flex; gap: .6rem; align-items: center; font-size: .875rem; font-variant-numeric: tabular-nums; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 10px; margin: .9rem 0;
  padding: .8rem 1.1rem 1rem; break-inside: avoid; }
.card header { display: flex; flex-wrap: wrap; gap: .15rem .7rem; align-items: baseline; font-size: .8125rem; }
.card header b { font-family: ui-monospace, monospace; overflow-wrap: anywhere; } .card header .muted { flex: auto; }
.badge { border: 1px solid; color: var(--both-line); border-radius: 99px; padding: 0 .6rem; font-weight: 600; }
.badge.failed { color: var(--poor-line); } .legend mark { margin-right: .5rem; } summary { cursor: pointer; }
.text { white-space: pre-wrap; overflow-wrap: anywhere; max-height: 65vh; overflow-y: auto; padding-bottom: .25em; }
.prompt { margin: .55rem 0 .8rem; font-size: .9rem; color: var(--muted); } .prompt[open] .peek { display: none; }
.prompt summary { white-space: nowrap; overflow: hidden; text-overflow: ellipsis; }
.sides { display: grid; grid-template-columns: minmax(0, 3fr) minmax(0, 2fr); gap: .9rem 2rem; }
.response { font-size: 1.0625rem; line-height: 1.75; } .code { font: .875rem/1.75 ui-monospace, monospace; }
.critique { border-left: 1px solid var(--line); padding-left: 2rem; font-size: .9375rem; }
.problems { margin-top: .9rem; background: var(--shade); border-radius: 7px; padding: .6rem .9rem; font-size: .9rem; }
.problems ul { margin: .1rem 0 .5rem; padding-left: 1.2rem; overflow-wrap: anywhere; white-space: pre-wrap; }
@media (max-width: 780px) { .sides { grid-template-columns: 1fr; } .card { padding: .7rem .85rem .9rem; }
  .bar { position: static; } .critique { border: 0; padding: 0; } }
@media print { .bar, .pager { display: none; } .text { max-height: none; } }
"""

# What rows say enters the page as text nodes only, never as HTML.
_FEEDBACK_SCRIPT = r"""
const byId = id => document.getElementById(id), perPage = 50, searchable = [];
const data = JSON.parse(byId("rows").textContent), bar = byId("bar"), links = [...bar.querySelectorAll("a")];
const view = {filter: "all", query: "", sort: "file", page: 0};
const total = i => Object.values(data.problems[i]).reduce((a, b) => a + b, 0), by = size => (a, b) => size(b) - size(a);
const order = {file: () => 0, problems: by(total), long: by(i => data.rows[i].response.length),
               poor: by(i => (data.rows[i].spans || []).filter(span => span.label < 0).length)};

function el(name, className, ...children) {
  const node = Object.assign(document.createElement(name), {className});
  if (className.startsWith("text")) node.dir = "auto";
  node.append(...children);
  return node;
}

function marked(response, spans) {           // offsets count code points, which Array.from splits into
  const chars = Array.from(response), node = el("div", "text response" + (/\n(  |\t)/.test(response) ? " code" : ""));
  const slice = (start, end) => chars.slice(start, end).join("");
  const cuts = [...new Set([0, chars.length, ...spans.flatMap(span => [span.start, span.end])])].sort((a, b) => a - b);
  for (let i = 0; i + 1 < cuts.length; i++) {
    const over = spans.filter(span => span.start <= cuts[i] && cuts[i + 1] <= span.end);
    const kinds = [...new Set(over.map(span => span.label > 0 ? "good" : "poor"))], piece = slice(cuts[i], cuts[i + 1]);
    const mark = el("mark", kinds.length > 1 ? "both" : kinds.join(""), piece);
    mark.title = over.map(({start, end, label}) =>
      `${label > 0 ? "+ good" : "− poor"}: “${slice(start, end)}” (characters ${start}–${end})`).join("\n");
    node.append(over.length ? mark : piece);
  }
  return node;
}

function prompt(text) {                      // a long one is folded
  const head = el("summary", "", el("b", "", "Prompt "), el("span", "peek", text.slice(0, 300)));
  return text.length <= 200 && text.split("\n").length <= 3 ? el("div", "text prompt", text)
    : el("details", "prompt", head, el("div", "text", text));
}

function repeated(response, quotes = []) {
  return [...new Set(quotes)].filter(quote =>
    quote.trim() && response.split(quote).length - 1 > quotes.filter(other => other === quote).length);
}

function problems(row, counts) {
  const node = el("div", "problems"), list = quotes => el("ul", "", ...quotes.map(quote => el("li", "", quote)));
  if (counts.failed) node.append(el("h3", "", "The whole reply"), el("div", "text code", row.reply || "(empty)"));
  if (counts.unmatched) node.append(el("h3", "", "Quotes not in the response: no span"), list(row.unmatched));
  if (counts.ambiguous) node.append(el("h3", "", "Quotes that occur more often than quoted, so no place is guessed: "
    + counts.ambiguous), list([row.good_spans, row.poor_spans].flatMap(quotes => repeated(row.response, quotes))));
  if (counts.conflicting) node.append(el("h3", "", `Words in spans of both signs, so 0: ${counts.conflicting}`));
  return node;
}

function card(i) {
  const row = data.rows[i], counts = data.problems[i];
  const badge = ([kind, n]) => el("span", `badge ${kind}`, kind === "failed" ? kind : `${n} ${kind}`);
  const [heading, said] = counts.failed ? ["No feedback, because", row.reason] : ["Critique", row.critique || "(none)"];
  const origin = [row.task, row.annotator].filter(Boolean).join(" · ");
  return el("article", "card",
    el("header", "", el("b", "", String(row.id ?? `row ${i + 1}`)), el("span", "muted", origin),
      ...Object.entries(counts).map(badge)),
    row.prompt ? prompt(String(row.prompt)) : "",
    el("div", "sides", el("section", "", el("h3", "", "Response"), marked(row.response, row.spans || [])),
      el("section", "critique", el("h3", "", heading), el("div", "text", said))),
    total(i) ? problems(row, counts) : "");
}

function fits(i) {
  const row = data.rows[i], wanted = {all: true, problems: total(i), ...data.problems[i]}[view.filter];
  searchable[i] ??= [row.id, row.prompt, row.response, row.critique, row.reason, row.reply].join("\n").toLowerCase();
  return wanted && searchable[i].includes(view.query);
}

function show() {
  const found = [...data.rows.keys()].filter(fits).sort(order[view.sort]);
  const first = view.page * perPage, last = Math.min(first + perPage, found.length);
  byId("cards").replaceChildren(...found.slice(first, last).map(card));
  for (const {children: [back, where, next]} of document.querySelectorAll(".pager")) {
    where.textContent = found.length ? `${first + 1}–${last} of ${found.length}` : "no response fits";
    [back.disabled, next.disabled] = [!view.page, last === found.length];
    [back.onclick, next.onclick] = [() => turn(-1), () => turn(1)];
  }
  for (const link of links) link.classList.toggle("on", link.hash === "#" + view.filter);
}

function change(name, value) { view.page = 0; view[name] = value; show(); }
function turn(by) { change("page", view.page + by); bar.scrollIntoView(); }
function filter() { change("filter", links.find(link => link.hash === location.hash)?.hash.slice(1) ?? "all"); }
byId("search").oninput = event => change("query", event.target.value.toLowerCase());
byId("sort").onchange = event => change("sort", event.target.value);
(window.onhashchange = filter)();
"""


def feedback_page(path, title: str, rows: list[dict], more=None):  # Figure 2
    """Write one self-contained HTML page of annotated responses: spans coloured, the critique beside, problems below.

    rows: as annotate.py writes them, and failed ones {id, prompt, response, reason, reply}. The page searches, sorts,
    filters (page.html#problems opens so, as do #unmatched, #ambiguous, #conflicting, #failed) and shows 50 at a time.
    more: tables (title, header, rows), as audit.py makes them, to fold in above. Raises ValueError as `problems` does.
    """
    found = [problems(row) for row in rows]
    labels = Counter(span["label"] for row in rows for span in row.get("spans") or ())
    numbers = {"all": len(rows), "problems": sum(map(bool, found))}
    numbers |= {kind: sum(kind in row for row in found) for kind in ("unmatched", "ambiguous", "conflicting", "failed")}
    filters = "".join(f'<a href="#{kind}">{kind.replace("problems", "with problems")}<b>{number:,}</b></a>'
                      for kind, number in numbers.items())
    tables = "".join(f"<h2>{escape(name)}</h2>{html_table(header, lines)}" for name, header, lines in more or ())
    pager = '<div class="pager"><button>← previous</button><span></span><button>next →</button></div>'
    body = f"""\
<p class="muted">{len(rows):,} responses, {labels[1]:,} good spans, {labels[-1]:,} poor spans.</p>
<p class="legend"><mark class="good">good +1</mark><mark class="poor">poor −1</mark><mark class="both">both 0</mark></p>
{f'<details><summary class="muted">Tables</summary>{tables}</details>' if tables else ''}
<noscript><p>The responses are shown by JavaScript, which is switched off here.</p></noscript>
<nav class="bar" id="bar">{filters}<hr><input id="search" type="search" placeholder="search" aria-label="search">
<select id="sort" aria-label="sort"><option value="file">file order</option><option value="problems">most problems
</option><option value="poor">most poor spans</option><option value="long">longest</option></select>{pager}</nav>
<div id="cards"></div>{pager}
{embed("rows", {"rows": rows, "problems": found})}"""
    write_page(path, page(title, body, _FEEDBACK_SCRIPT, _FEEDBACK_STYLE))


# ── Token heatmaps ──────────────────────────────────────────────────────────────────────────────────────

_GOOD, _POOR = "#009e73", "#d55e00"                     # bluish green and vermillion, told apart by every kind of eye


class ReportError(ValueError):
    """A run directory that cannot be shown, or a tracker that cannot be reached; the message says what to do."""


def finite(value) -> bool:
    """Whether a value can be drawn: a number, neither NaN nor infinite."""
    return type(value) in (int, float) and math.isfinite(value)


def heatmap(tokens: list[str], values: list[float], limit: float | None = None) -> str:
    """Tokens on a ground as deep as their value is far from 0: δ_t, A_t or anything else with a sign. HTML on its own.

    Above 0 green and underlined, below vermillion with a wavy line, deepest at ±limit (else the largest value) and
    beyond; the value is the token's title. ↵ and ⇥ stand for white space, ▯ for a token without text. For light and
    dark grounds. Raises ReportError where there is not one number for every token.
    """
    if len(tokens) != len(values) or not all(type(v) in (int, float) for v in values):
        raise ReportError(f"{len(tokens)} tokens and {len(values)} values: there must be one number for every token")
    limit = limit or max((abs(v) for v in values if finite(v)), default=0) or 1
    out = ['<div dir="auto" style="white-space:pre-wrap;overflow-wrap:anywhere;text-underline-offset:.22em;'
           'text-decoration-skip-ink:none;print-color-adjust:exact">']
    for token, value in zip(tokens, values):
        colour, line = (_GOOD, "") if value > 0 else (_POOR, " wavy")
        level = min(1, abs(value) / limit) if finite(value) else 0
        style = [f"background:{colour}{round(255 * (.05 + .45 * level)):02x}"] * (level > .02)
        style += [f"text-decoration:underline{line} {colour}"] * (level > .2)
        style += ["outline:1px dotted"] * (not finite(value))
        shown = escape(token).replace("\n", "↵\n").replace("\t", "⇥\t") or "▯"
        attribute = f' style="{";".join(style)}"' if style else ""
        out.append(f'<span title="{value:+.4g}"{attribute}>{shown}</span>')
    return "".join(out) + "</div>"


# ── Curves ──────────────────────────────────────────────────────────────────────────────────────────────

MOST_POINTS = 300                                       # of a curve; a longer one is drawn by means
_COLOURS = ("#2f7fd1", "#c9700a", "#8a63d2", "#1a9a7a")                # each readable on white and on near-black
_DASHES = ("none", "6 3", "2 3.5", "9 3 2 3")
_CHARTS = {
    "mean δ per token": ("delta",), "tokens in spans, share": ("good", "poor", "labelled"),
    "KL to the reference, nats per response": ("kl",), "β of the KL penalty": ("kl_coef",),
    "entropy of the policy, nats per token": ("entropy",), "length, tokens": ("response_tokens", "critique_tokens"),
    "critiques and quotes without effect, share": ("unparseable", "unmatched", "ambiguous"),
    "tokens in spans of both signs": ("conflicting_tokens",),
    "policy loss": ("policy_loss",), "value loss": ("value_loss",), "explained variance": ("explained_variance",),
    "KL of the update, nats per token": ("policy_kl",), "mean ratio ρ": ("ratio",),
    "tokens clipped, share": ("clip_fraction", "value_clip_fraction"), "gradient norm": ("grad_norm",),
    "optimizer steps skipped": ("skipped_steps",), "learning rate": ("learning_rate",),
    "seconds per phase": ("seconds_rollout", "seconds_critique", "seconds_score", "seconds_update"),
    "tokens per second, written": ("tokens_per_second",), "tokens of all responses": ("tokens",)}


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round numbers, a step of 1, 2 or 5 · 10^k apart, from at most `low` to at least `high`; at most `most` + 1."""
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        low, high = (low - abs(low) / 2, high + abs(high) / 2) if low else (0.0, 1.0)
    rough = (high - low) / (most - 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = power * next(m for m in (1, 2, 5, 10) if m * power >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [float(f"{i * step:.12g}") for i in range(first, last + 1)]


def thin(values: list, size: int) -> list[tuple[float, float, float] | None]:
    """(mean, least, largest) of the finite ones of every `size` values in turn; None where there is none."""
    parts = ([v for v in values[i: i + size] if finite(v)] for i in range(0, len(values), size))
    return [(math.fsum(part) / len(part), min(part), max(part)) if part else None for part in parts]


def _paths(places: list[float], points: list, up) -> tuple[str, str]:
    """SVG paths of the line through the means and of the band around it, both broken where a point is None."""
    line, band = "", ""
    for present, pairs in groupby(zip(places, points), key=lambda pair: pair[1] is not None):
        if present:
            run = list(pairs)
            mean, least, most = ([f"{x:.2f} {up(point[i]):.2f}" for x, point in run] for i in range(3))
            line += f"M{'L'.join(mean)}{'h2' if len(run) == 1 else ''}"          # alone it must be seen, too
            band += f"M{'L'.join(most + least[::-1])}Z"
    return line, band


def svg_line(title: str, x: list[int], series: dict[str, list], unit: str = "iteration") -> str:
    """One chart as SVG on its own, in the colour of the text around it: named series over `unit`s, broken where a
    value is not `finite`, with upright strips that have the numbers as their titles. Of more than MOST_POINTS values a
    point is the mean of several, and a band reaches from the least to the largest of these.
    """
    size = -(-len(x) // MOST_POINTS)
    spans = [x[i: i + size] for i in range(0, len(x), size)]
    drawn = {name: thin(values, size) for name, values in series.items()}
    extremes = [v for points in drawn.values() for point in points if point for v in point] or [0.0]
    low, high = min(extremes), max(extremes)
    marks = ticks(0.0 if 0 < low <= high / 2 else low, 0.0 if low / 2 <= high < 0 else high)
    left, right, at, top = 16 + 6.4 * max(len(f"{mark:g}") for mark in marks), 326, 4.0, 32
    text = lambda x, y, said, more="": f'<text x="{x:.2f}" y="{y:.2f}" {more}>{escape(said)}</text>'
    out, pens = [f"<title>{escape(title)}</title>", text(4, 13, title, 'font-size="12.5" font-weight="600"')], []
    for i, (name, points) in enumerate(drawn.items()):                           # the legend, with the last values
        label = f"{name} {next((f'{point[0]:.4g}' for point in reversed(points) if point), '–')}"
        colour = {"good": _GOOD, "poor": _POOR}.get(name, _COLOURS[i % 4])
        pens.append((f'fill="none" stroke="{colour}" stroke-width="1.8" stroke-linecap="round" stroke-linejoin="round" '
                     f'stroke-dasharray="{_DASHES[i % 4]}"', f'fill="{colour}" opacity=".22"'))
        at, top = (4.0, top + 15) if at + 22 + 6.2 * len(label) > 340 else (at, top)
        out += [f'<path d="M{at:.1f} {top - 4}h15" {pens[-1][0]}/>', text(at + 20, top, label)]
        at += 30 + 6.2 * len(label)
    top, bottom = top + 14, top + 138
    across = lambda v: left + (right - left) * ((v - x[0]) / (x[-1] - x[0]) if x[-1] > x[0] else .5)
    up = lambda v: bottom - (bottom - top) * (v - marks[0]) / (marks[-1] - marks[0])
    for mark in marks:
        out += [f'<path d="M{left:.2f} {up(mark):.2f}H{right}" stroke="currentColor" opacity=".16"/>',
                text(left - 6, up(mark) + 4, f"{mark:g}", 'class="y" text-anchor="end" opacity=".75"')]
    out += [text(across(mark), bottom + 17, f"{mark:g}", 'class="x" text-anchor="middle" opacity=".75"')
            for mark in ticks(x[0], x[-1], 7) if x[0] <= mark <= x[-1] and mark % 1 == 0]
    out.append(text((left + right) / 2, bottom + 31, unit, 'text-anchor="middle" opacity=".75"'))
    places, width = [across((span[0] + span[-1]) / 2) for span in spans], (right - left) / len(spans)
    for points, (stroke, fill) in zip(drawn.values(), pens):
        line, band = _paths(places, points, up)
        out += [f'<path d="{band}" {fill}/>'] * (size > 1) + [f'<path class="curve" d="{line}" {stroke}/>']
    for i, (place, span) in enumerate(zip(places, spans)):
        said = [f"mean of {unit}s {span[0]}–{span[-1]}" if size > 1 else f"{unit} {span[0]}"]
        for name, points in drawn.items():
            mean, least, most = points[i] or (math.nan,) * 3
            said.append(f"{name} {mean:.5g}" + (f" ({least:.5g} to {most:.5g})" if size > 1 else ""))
        out.append(f'<rect x="{place - width / 2:.2f}" y="{top}" width="{width:.2f}" height="{bottom - top}" '
                   f'opacity="0"><title>{escape(chr(10).join(said))}</title></rect>')
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 340 {bottom + 36}" width="100%" role="img" '
            f'style="max-width:460px" fill="currentColor" font-family="system-ui,sans-serif" font-size="11">'
            f'{"".join(out)}</svg>')


def curves(rows: list[dict]) -> str:  # Figure 3
    """Every metric in metrics.jsonl's rows as small charts; below a chart, which values it lacks. HTML on its own."""
    keys = dict.fromkeys(key for row in rows for key in row if key != "iteration")
    known = {key for wanted in _CHARTS.values() for key in wanted}
    charts = _CHARTS | {key.replace("_", " "): (key,) for key in keys if key not in known}
    x, figures = [row["iteration"] for row in rows], []
    for title, wanted in charts.items():
        names = {key: key.removeprefix("seconds_").replace("_", " ") for key in wanted if key in keys}
        absent = {name: [row["iteration"] for row in rows if not finite(row.get(key))] for key, name in names.items()}
        notes = [f"{name}: {len(at)} of {len(x)} values {'is' if len(at) == 1 else 'are'} not finite, iterations "
                 f"{', '.join(map(str, at[:20]))}{', …' if len(at) > 20 else ''}" for name, at in absent.items() if at]
        if names:
            chart = svg_line(title, x, {name: [row.get(key) for row in rows] for key, name in names.items()})
            note = f'<figcaption style="font-size:.8rem">{escape("; ".join(notes))}</figcaption>' if notes else ""
            figures.append(f'<figure style="margin:0">{chart}{note}</figure>')
    return ('<div class="curves" style="display:grid;gap:1.2rem;grid-template-columns:repeat(auto-fill,minmax(min(100%,'
            f'280px),1fr))">{"".join(figures)}</div>')


# ── The report of a run ─────────────────────────────────────────────────────────────────────────────────

_REPORT_STYLE = _FEEDBACK_STYLE + """
nav { display: flex; flex-wrap: wrap; gap: .2rem 1.1rem; margin-top: 1em; } h2 { font-size: 1.15rem; margin-top: 2em; }
figure { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: .7rem .6rem .3rem; }
figure svg { display: block; margin: auto; } rect:hover { opacity: .13; } figcaption { color: var(--muted); }
.columns { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 17rem), 1fr)); gap: .9rem 2rem; }
.columns .text { line-height: 1.8; } .columns h3 ~ h3 { margin-top: .7rem; } h3 ~ h3 ~ .text { font-size: .9375rem; }
td { font-variant-numeric: tabular-nums; } .wide th:last-child { text-align: left; }
@media (max-width: 480px) { th, td { padding: .25rem .35rem; } td:first-child { white-space: normal; } }
.wide td:last-child { text-align: left; white-space: pre-wrap; overflow-wrap: anywhere; min-width: 12rem; }
"""
_EXAMPLE = {"prompt": str, "response": str, "critique": str, "tokens": list, "delta": list}
_SAMPLE = {"iteration": int, **_EXAMPLE, "advantage": list}


def public(value):
    """The value without the user, password and query of any address in it, however deep."""
    if isinstance(value, dict):
        return {key: public(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [public(inner) for inner in value]
    if isinstance(value, str):
        return re.sub(r"(://[^\s?#]*)[?#]\S+", r"\1?…", re.sub(r"://\S*@", "://…@", value))
    return value


def environment(ranks: int, device: str) -> dict:
    """A row of environment.jsonl: when, how, with what and where a run is started. No environment variable is in it."""
    local = os.environ.get("LOCAL_WORLD_SIZE", str(ranks))                       # as torchrun sets it
    launcher = ["python"] if ranks == 1 else ["torchrun", "--nproc_per_node", local]
    packages = ("torch", "transformers", "safetensors", "numpy", "openai", "tqdm")
    return {"started": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
            "command": shlex.join([*launcher, *public(sys.argv)]), "ranks": ranks, "device": device,
            "cores": os.cpu_count(), "system": platform.platform(),
            "memory": f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.1f} GiB",
            "python": platform.python_version(), **{name: version(name) for name in packages}}


def _row(path: Path, number: int, line: bytes, needs: dict) -> dict:
    """A JSON line with the fields that it needs. Raises ReportError with file, line and field."""
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ReportError(f"{path}, line {number}: not JSON ({error})") from error
    if not isinstance(row, dict):
        raise ReportError(f"{path}, line {number}: no JSON object")
    for key, kind in needs.items():
        if type(row.get(key)) is not kind:
            raise ReportError(f"{path}, line {number}: {key!r} is missing or no {kind.__name__}")
        if kind is list and len(row[key]) != len(row["tokens"]):
            raise ReportError(f"{path}, line {number}: {len(row[key])} values in {key!r}, {len(row['tokens'])} tokens")
        if kind is list and not set(map(type, row[key])) <= ({str} if key == "tokens" else {int, float}):
            raise ReportError(f"{path}, line {number}: {key!r} must hold {'texts' if key == 'tokens' else 'numbers'}")
    return row


def _rows(path: Path, needs: dict) -> list[dict]:
    """All rows of a file; none where there is no file."""
    lines = path.read_bytes().splitlines() if path.exists() else []
    return [_row(path, number, line, needs) for number, line in enumerate(lines, 1)]


def evenly(sizes: list[int], most: int, room: int) -> list[int]:
    """Places of at most `most` items, even, and of at most `room` in all; the first and the last in any case."""
    for n in range(min(most, len(sizes)), 0, -1):
        places = sorted({round(i * (len(sizes) - 1) / max(1, n - 1)) for i in range(n)})
        if n <= 2 or sum(sizes[place] for place in places) <= room:
            return places
    return []


def _chosen(paths: list[Path], needs: dict, most: int, room: int) -> tuple[list[list[dict]], int]:
    """Rows at the same even places of files, and how many rows each has. Every line is read and checked."""
    files = [path.read_bytes().splitlines() for path in paths]
    for path, lines in zip(paths, files):
        for number, line in enumerate(lines, 1):
            _row(path, number, line, needs)
        if len(lines) != len(files[0]):
            raise ReportError(f"{path} has {len(lines)} rows, {paths[0].name} {len(files[0])}: not the same prompts")
    places = evenly([sum(map(len, lines)) for lines in zip(*files)], most, room)
    return [[_row(path, i + 1, lines[i], needs) for path, lines in zip(paths, files)] for i in places], len(files[0])


def text_block(text: str, html: str = "") -> str:
    """Text, or its HTML, with its white space; monospaced where it is indented as code is, or a table."""
    kind = "text code" if re.search(r"\n(  |\t|──)", text) else "text"
    return f'<div class="{kind}" dir="auto">{html or escape(text)}</div>'


def sections_page(title: str, said: str, sections: dict[str, str]) -> str:
    """A page of sections {heading: HTML}, with links to each under a line that says what it is."""
    links = "".join(f'<a href="#{name.split()[0]}">{name}</a>' for name in sections)
    parts = "".join(f'<section id="{name.split()[0]}"><h2>{name}</h2>{html}</section>' for name, html in sections.items())
    return page(title, f'<p class="muted">{escape(said)}</p><nav>{links}</nav>{parts}', style=_REPORT_STYLE)


def card(heading: str, prompt: str, columns: dict[str, str]) -> str:  # Figure 4
    """A prompt, folded where it is long, above columns {title: HTML}."""
    shown = text_block(prompt)
    if len(prompt) > 200 or prompt.count("\n") > 2:
        shown = f"<details><summary><b>Prompt</b> {escape(prompt[:150])} …</summary>{shown}</details>"
    sides = "".join(f"<section><h3>{escape(title)}</h3>{html}</section>" for title, html in columns.items())
    return (f'<article class="card"><header><b>{escape(heading)}</b></header><div class="prompt">{shown}</div>'
            f'<div class="columns">{sides}</div></article>')


def _critique(row: dict) -> str:
    failed = f"<p class='badge failed'>no reward: {escape(str(row['unreadable']))}</p>" if row.get("unreadable") else ""
    return failed + text_block(row["critique"] or "(none)")


def _samples(out: Path) -> str:
    """Rows of samples.jsonl: δ_t and A_t beside the critique."""
    if not (out / "samples.jsonl").exists():
        return '<p class="muted">samples.jsonl is not there.</p>'
    chosen, total = _chosen([out / "samples.jsonl"], _SAMPLE, most=24, room=300_000)
    limit = min(3.0, max((abs(a) for [row] in chosen for a in row["advantage"] if finite(a)), default=0)) or 1.0
    cards = [card(f"iteration {row['iteration']}", row["prompt"], {
        "δ_t": text_block(row["response"], heatmap(row["tokens"], row["delta"], 1)),
        "A_t, whitened": text_block(row["response"], heatmap(row["tokens"], row["advantage"], limit)),
        "Critique by R_φ": _critique(row)}) for [row] in chosen]
    scale = heatmap([f" {limit * v:+.2f} " for v in (-1, -.5, 0, .5, 1)], [-1, -.5, 0, .5, 1])
    return (f'<p class="muted">{len(chosen)} of the {total:,} rows of samples.jsonl, evenly over the run. ▯ is a token '
            f"without text, such as the end. A_t has this scale:</p>{scale}{''.join(cards)}")


def _examples(out: Path) -> str:
    """Held-out prompts with the response of the reference policy before and of the trained one after, and their δ_t."""
    paths = [out / "before_samples.jsonl", out / "after_samples.jsonl"]
    if missing := [path.name for path in paths if not path.exists()]:
        return (f'<p class="muted">{" and ".join(missing)}: not there; they are written before and after phase 3, '
                f"and older runs have neither.</p>")
    chosen, total = _chosen(paths, _EXAMPLE, most=12, room=200_000)
    cards = []
    for pair in chosen:
        if pair[0]["prompt"] != pair[1]["prompt"]:
            raise ReportError(f"{paths[1]}: the prompt of {pair[1].get('id')!r} is another one in {paths[0].name}")
        columns = {}
        for when, row in zip(("Before: reference policy", "After: trained policy"), pair):
            mean = sum(row["delta"]) / max(1, len(row["delta"]))
            columns[f"{when}, mean δ {mean:+.3f}"] = (text_block(row["response"], heatmap(row["tokens"], row["delta"], 1))
                                                      + "<h3>Critique by R_φ</h3>" + _critique(row))
        cards.append(card(f"held-out {pair[0].get('id', '')}", pair[0]["prompt"], columns))
    return (f'<p class="muted">{len(chosen)} of {total:,} held-out prompts, evenly and not by their scores, with one '
            f"sampled response each.</p>{''.join(cards)}")


def _compared(result: dict) -> str:
    rows = [[key, old, new, new - old if finite(old) and finite(new) else None]
            for key, old in result["before"].items() for new in [result["after"].get(key)]]
    return html_table(["held-out mean", "before", "after", "change"], rows, 3)


def run_report(directory) -> Path:
    """Write report.html of a run directory of text2grad.py, finished or not, from the files in it alone.

    Only metrics.jsonl must be there; where another is not, the page says so. Raises ReportError with file, line, field.
    """
    out, absent = Path(directory), lambda name: f'<p class="muted">{name} is not there.</p>'
    if not (out / "metrics.jsonl").exists():
        raise ReportError(f"{out}: no metrics.jsonl; give a directory in which text2grad.py has begun phase 3")
    metrics, sessions = _rows(out / "metrics.jsonl", {"iteration": int}), _rows(out / "environment.jsonl", {})
    for number, (row, after) in enumerate(zip(metrics, metrics[1:]), 2):
        if after["iteration"] <= row["iteration"]:
            raise ReportError(f"{out / 'metrics.jsonl'}, line {number}: iteration {after['iteration']} comes after "
                              f"{row['iteration']}")
    config, result, reward, phases = (_rows(out / name, needs) for name, needs in (
        ("config.json", {}), ("result.json", {"before": dict, "after": dict}), ("reward/metrics.json", {}),
        ("phases.jsonl", {"phase": str})))
    settings = public(config[0]) if config else {}
    pairs = lambda row: f'<div class="wide">{html_table(["", ""], [[key, str(row[key])] for key in row])}</div>'
    sections = {
        "Before and after": _compared(result[0]) if result else absent("result.json: the run is not finished, so it"),
        "Curves": curves(metrics) if metrics else '<p class="muted">No iteration is done.</p>',
        "Examples": _examples(out), "Samples": _samples(out),
        "Reward model": html_table(["R_φ on held-out rows", ""], [list(pair) for pair in reward[0].items()], 4)
        if reward else absent("reward/metrics.json"),
        "Phases": '<div class="wide">' + html_table(["phase", "seconds", "what came out"], [
            [row["phase"], row.get("seconds"), row.get("summary")] for row in phases], 0) + "</div>",
        "Machine": "".join(map(pairs, sessions)) or absent("environment.jsonl"),
        "Settings": pairs(settings) if config else absent("config.json")}
    said = f"{metrics[-1]['iteration'] if metrics else 0} of {settings.get('iterations', '?')} iterations" + "".join(
        f", started {row.get('started')}" for row in sessions[:1])
    title = f"Text2Grad · {settings.get('task', '')} · {out.resolve().name}"
    write_page(out / "report.html", sections_page(title, said, sections))
    return out / "report.html"


# ── Trackers ────────────────────────────────────────────────────────────────────────────────────────────

TRACKERS = ("none", "wandb", "trackio", "tensorboard")


def tracker_module(name: str):
    """The tracker's module. Raises ReportError with the package to install where it is missing."""
    try:
        module = import_module({"tensorboard": "torch.utils.tensorboard"}.get(name, name))
        if not (hasattr(module, "SummaryWriter") or hasattr(module, "init")):
            raise ImportError(f"{module} is a directory of that name")
    except ImportError as error:
        raise ReportError(f"--report_to {name}: the package is not installed; pip install {name} ({error})") from error
    return module


class Tracker:
    """Sends the metrics of each iteration to wandb, trackio or tensorboard, in a run of its own for each run directory.

    Raises ReportError where the tracker cannot be opened.

    A tracker that fails must not cost a run that takes days, and metrics.jsonl holds every number: so the first failure
    is told, nothing more is sent, and training goes on. A resumed run goes on in the tracker; what it did again since
    its checkpoint wandb keeps as it was, tensorboard replaces and trackio holds twice, with equal numbers.
    """

    def __init__(self, name: str, out: Path, config: dict, first: int, warn=print):
        """first: the iteration that is logged first. Raises ReportError where the tracker cannot be opened."""
        self.name, self.warn, self.run = name, warn, None
        if name == "none":
            return
        module = tracker_module(name)
        key = hashlib.sha256((out / "environment.jsonl").read_bytes().split(b"\n")[0]).hexdigest()[:8]
        options = {"project": "text2grad", "name": f"{out.name}-{key}", "config": config, "resume": "allow"}
        try:
            self.run = module.SummaryWriter(str(out / "tensorboard"), purge_step=first) if name == "tensorboard" else \
                module.init(**options, **({"id": key, "dir": str(out)} if name == "wandb" else {}))
        except Exception as error:
            raise ReportError(f"--report_to {name} cannot be opened ({type(error).__name__}: {error}); log in, or "
                              f"leave the flag out") from error

    def log(self, metrics: dict):
        """Send the numbers of an iteration; None, the mean of no optimizer step, cannot be sent."""
        step = metrics["iteration"]
        numbers = {key: value for key, value in metrics.items() if key != "iteration" and value is not None}
        if self.name == "tensorboard":
            self._try(lambda: [self.run.add_scalar(key, value, step) for key, value in numbers.items()])
            self._try(lambda: self.run.flush())
        else:
            self._try(lambda: self.run.log(numbers, step=step))

    def finish(self):
        """Let the tracker send what it still holds."""
        self._try(lambda: self.run.close() if self.name == "tensorboard" else self.run.finish())

    def _try(self, send):
        try:
            if self.run is not None:
                send()
        except Exception as error:                          # whatever a tracker may raise; it is told, not swallowed
            self.run = None
            self.warn(f"--report_to {self.name} failed and is sent nothing more ({type(error).__name__}: {error}); "
                      f"training goes on, and every number is in metrics.jsonl")


def main():
    """Write the reports of run directories named on the command line."""
    parser = argparse.ArgumentParser(description="Write RUN/report.html for run directories of text2grad.py.")
    parser.add_argument("run", metavar="RUN", nargs="+", help="a directory that text2grad.py wrote, finished or not")
    for directory in parser.parse_args().run:
        try:
            print(run_report(directory))
        except (ReportError, OSError) as error:
            sys.exit(f"report: {error}")


if __name__ == "__main__":
    main()
