"""What people look at: tokens coloured by δ in the terminal, and small aligned tables.

    print(colour_tokens(["The ", "cat ", "flew"], [1, 0, -1]))        # good green, poor red, the rest plain

Colours are used where standard output is a terminal and NO_COLOR is not set (or FORCE_COLOR is); elsewhere good tokens
stand in [+ +] and poor ones in [- -], so that logs stay readable.

    feedback_page("feedback.html", "Toy summaries", rows)              # annotated responses, to look at in a browser
"""

from __future__ import annotations

import json
import os
import re
import sys
from bisect import bisect_left, bisect_right
from collections import Counter
from html import escape
from itertools import groupby
from pathlib import Path

# ── The terminal ────────────────────────────────────────────────────────────────────────────────────────

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


def _cell(value, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}" if isinstance(value, float) else str(value)


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
    """Write a page, whole or not at all. Half of a surrogate pair is shown as the replacement mark."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(text.encode("utf-8", "xmlcharrefreplace"))
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

    offsets: [start, end) of each token in the text, in reading order. A token in both sets gets δ_t = 0.
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
mark { color: inherit; border-radius: 3px; padding: .06em .1em; text-underline-offset: .22em;
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


def feedback_page(path, title: str, rows: list[dict], more=None):
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

