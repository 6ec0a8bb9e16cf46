"""Write paper.html, which shows the paper beside the code:

    python notebooks/paper.py

Each row of PAPER.md's map becomes a row of the page: the equation or step on the left, and its
code, tests and study figure on the right. Above are a table of contents, and one response and
its critique, which the reader can edit.
"""

import ast
import json
import random
import re
import sys
from html import escape
from pathlib import Path

from transformers import AutoTokenizer

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import toy  # noqa: E402
from annotate import token_offsets  # noqa: E402
from report import LEGEND, page, split_text, write_page  # noqa: E402

PLACES = r"(?m)^\| ((?:Eq|Alg)\. .*) \|$"          # rows of the map in PAPER.md
LINES = r"l\.(\d+(?:–\d+)?(?:, \d+(?:–\d+)?)*)"
# Formulas for the rows whose text in PAPER.md is too short for this page.
WORDS = dict(line.split(" | ") for line in """\
Eq. §3.1 Definition 1 | ∇_NL(c → y) = Σ_t δ_t ∇_θ log π_θ(y_t ∣ x, y_<t)
Eq. §3.4 L_R | p_φ(z ∣ x, y) = Π_j p_φ(z_j ∣ z_<j, x, y); L_R(φ) = −E log p_φ(z ∣ x, y)
Eq. §3.5 GAE | A_t = Σ_l (γλ)^l δ^TD_{t+l}; δ^TD_t = r_t + γ V(x, y_{<t+1}) − V(x, y_<t)
Eq. §3.5 PPO | E_t min(ρ_t A_t, clip(ρ_t, 1 − ε, 1 + ε) A_t); its entropy is Alg. 4 l.25, 27
Alg. 4 l.14 | r_t = δ′_t + r_t^KL, with r_t^KL = −β (log π_θold(y_t) − log π_ref(y_t))
Alg. 4 l.15–16 | from T to 1: A_t by GAE; with λ = 1 it is Σ_{k≥t} γ^{k−t} r_k − V(x, y_<t)
Alg. 4 l.21–22 | ρ_t = π_θ(y_t ∣ x, y_<t) / π_θold(y_t ∣ x, y_<t)
Alg. 4 l.23 | L^CLIP_t = min(ρ_t A_t, clip(ρ_t, 1 − ε, 1 + ε) A_t)
Alg. 4 l.24 | L^VF_t = (V(x, y_<t) − R_t)^2; R_t = Σ_{k≥t} γ^{k−t} r_k or, by default, A_t + V
Alg. 4 l.25 | L^ENT_t = H(π_θ(· ∣ x, y_<t))
Alg. 4 l.27 | E_t[L^CLIP_t + β_H L^ENT_t], maximised; printed −β (errata)""".splitlines())
# Equations that are implemented by a tagged line of an algorithm.
SAME = {"Eq. §3.5 total reward": "Alg. 4 l.14", "Eq. §3.5 r_t^KL": "Alg. 4 l.14"}
# The number of the study whose figure is shown in a row.
STUDIES = {"Eq. §3.3 δ": 2, "Eq. §3.6 A^A": 8, "Eq. §3.6 A^B": 9, "Alg. 1 l.18": 1,
           "Alg. 2 l.5–9": 3, "Alg. 2 l.10–11": 6, "Alg. 2 l.18–25": 4, "Alg. 4 l.12": 7}
HEAD = """<style>.row { display: grid; gap: 0 1.5rem; border-top: 1px solid #8885; }
@media (min-width: 60rem) { .row { grid-template-columns: 2fr 3.6fr; } }
.row > * { margin: .6rem 0; min-width: 0; } pre { overflow-x: auto; font-size: .75rem; }
mark { background: #f0b42940; color: inherit; } :target { outline: 2px solid #2f7fd1; }
a { color: inherit; } label { display: block; } .scroll > svg { min-width: 66rem; }
textarea { width: 100%; box-sizing: border-box; font: inherit; } sub, sup { line-height: 0; }
.small { font-size: .8rem; overflow-wrap: anywhere; } h3 + div { white-space: pre-wrap }</style>
<p><a href="https://arxiv.org/abs/2505.22338">The paper</a> is left, the code right.</p>
<nav><p class="small"><a href="#touch">One response, token by token</a>"""
TOUCH = """<section id="touch"><h2>One response, token by token</h2><p>The quotes of the
critique give each token of the response its reward δ, and GAE turns the rewards into the
advantages A that PPO trains with; edit the response, the critique or a slider to see both
change. (The page has no tokenizer: an edited response is split into words.)</p>{legend}
<div class="columns"><div><p class="small">Post: {post}</p>
<label>Response <textarea id="response" rows="3">{text}</textarea></label>
<label>Critique <textarea id="critique" rows="7">{reply}</textarea></label>
<p class="small" id="result"></p>
<label>γ <input type="range" id="gamma" max="1" step=".01" value="1"> <output></output></label>
<label>λ <input type="range" id="lam" max="1" step=".01" value=".95"> <output></output></label>
<label>β <input type="range" id="beta" max="1" step=".01" value=".2"> <output></output></label>
<label>V <input type="range" id="value" max="1" step=".01" value="0"> <output></output></label>
</div><div><h3>δ</h3><div id="delta"></div><h3>A, deepest from ±2</h3><div id="raw"></div>
<h3>A, whitened</h3>
<div id="white"></div></div></div><details><summary>All numbers, with a made-up
log π − log π_ref and one V for all tokens</summary><div class="scroll"><table>
<thead><tr><th>y<th>δ<th>log π − log π_ref<th>r<th>A<th>A, whitened<tbody id="numbers">
</table></div></details></section><script>const PAGE = {data};\n{script}</script>"""


def tags(doc: str, source: str) -> set[tuple[int, int]]:
    """The (algorithm, line) pairs that the comments and the docstring of some code name."""
    matches = re.findall(rf"Alg\. (\d) {LINES}", source)
    for text in re.findall(rf"# {LINES}", source):
        matches += [(n, text) for n in re.findall(r"(?:Alg\.|Algorithm) (\d)", doc)]
    ranges = [(int(n), part.split("–")) for n, text in matches for part in text.split(", ")]
    return {(n, i) for n, part in ranges for i in range(int(part[0]), int(part[-1]) + 1)}


def extent(tree: ast.AST, line: int, is_alone: bool) -> range:
    """The lines that a comment tags: its statement (or, if the comment `is_alone` on its line,
    the next statement), without the body of a long block."""
    nodes = [node for node in ast.walk(tree) if hasattr(node, "end_lineno")]
    first_lines = [node.lineno for node in nodes if isinstance(node, ast.stmt)]
    start = line + 1 if is_alone else max(first for first in first_lines if first <= line)
    node = max((n for n in nodes if n.lineno == start), key=lambda n: n.end_lineno)
    is_block = isinstance(getattr(node, "body", None), list) and len(node.body) > 1
    return range(start, node.body[0].lineno if is_block else node.end_lineno + 1)


def excerpt(place: str, name: str) -> str:
    """The HTML of `module.name`: lines tagged with this place are marked, long code is cut."""
    module, name = name.split(".")
    path = [*ROOT.glob(f"{module}.py"), *ROOT.glob(f"*/{module}.py")][0]
    text, marked, html = path.read_text("utf-8"), set(), ""
    piece = re.search(rf"(?ms)^(def |class )?{name}\b.*?(?=\n+[^\s}})\]]|\n*\Z)", text)
    first, lines = text.count("\n", 0, piece.start()), piece[0].splitlines()
    for i, line in enumerate(lines, 1):
        code, _, comment = line.partition("#")
        place_tags = tags("", SAME.get(place, place))
        if place_tags & tags(piece[0], "#" + comment) or place in comment:
            marked |= {*extent(ast.parse(piece[0]), i, not code.strip())}
    near = {i for m in marked for i in range(m - 2, m + 3)} or range(40)
    for i, line in enumerate(lines, 1):
        shown = f"{first + i:4} {escape(line)}\n"
        is_hidden = len(lines) > 24 and i > 1 and i not in near
        html += "   ⋯\n" if is_hidden else f"<mark>{shown}</mark>" if i in marked else shown
    position = f"{path.relative_to(ROOT)}:{first + min(marked, default=1)}"
    html = re.sub("(   ⋯\n)+", "   ⋯\n", html)
    return f"<b>{position}</b> {name}</p><pre>{html}</pre>"


def anchor(text: str) -> str:
    """The id of a heading or a place on the page."""
    return re.sub(r"\W+", "-", text).lower()


def row(place: str, description: str, code: str, tests: str) -> str:
    """A row of the page: the paper's side has the anchor #slug, the code's #slug-code."""
    slug, words = anchor(place), escape(WORDS.get(place, description))
    for mark, tag in (("_", "sub"), (r"\^", "sup")):                   # as in y_<t, γ^{k−t}
        pattern = rf"{mark}(?:{{(.+?)}}|((?:&lt;)?[^\W_]+))"
        words = re.sub(pattern, rf"<{tag}>\1\2</{tag}>", words)
    right = "".join(f'<p class="small"><a href="#{slug}">↩ {place}</a> {excerpt(place, name)}'
                    for name in re.findall(r"`(\w+\.\w+)`", code))
    right += '<p class="small">Fails without it: '
    right += re.sub(r"`(\w+)\.(\w+)`", r"tests/\1.py::\2", tests) + "</p>"
    if place in STUDIES:
        svg = next(ROOT.glob(f"notebooks/studies/{STUDIES[place]}_*.svg"))
        right += (f"<details><summary>Figure: study {svg.stem.replace('_', ' ')}</summary>"
                  f'<div class="scroll">{svg.read_text("utf-8")}</div></details>')
    return (f'<div class="row" id="{slug}"><div><a href="#{slug}-code">{place}</a><br>{words}'
            f'</div><div id="{slug}-code">{right}</div></div>')


def touch() -> str:
    """The HTML of the response and its editable critique; paper.js computes the numbers."""
    example, tokenizer = toy.rows("eval", 13)[12], AutoTokenizer.from_pretrained(toy.BASE)
    draft = toy.write_draft(example["facts"], random.Random(12))
    ids = [*tokenizer(draft).input_ids, tokenizer.eos_token_id]
    text, offsets = token_offsets(tokenizer, ids)
    data = {"text": text, "offsets": offsets, "tokens": split_text(text, offsets)}
    script = Path(__file__).with_suffix(".js").read_text("utf-8")
    return TOUCH.format(post=escape(example["post"]), data=json.dumps(data), script=script,
                        text=escape(text), reply=escape(toy.critique(example, draft)),
                        legend=LEGEND)


def build() -> str:
    """The whole page. Equal sources give equal bytes."""
    text = (ROOT / "PAPER.md").read_text("utf-8").split("\n## Errata")[0]
    contents, body, section = HEAD, touch(), ""
    for place, *cells in (line.split(" | ") for line in re.findall(PLACES, text)):
        title = "Equations" if place[0] == "E" else f"Algorithm {place[5]}"
        if title != section:
            section, slug = title, anchor(title)
            contents += f'<p class="small"><a href="#{slug}">{title}</a>'
            body += f'<h2 id="{slug}">{title}</h2>'
        short = re.sub(r"^(Eq\.|Alg\. \d) ", "", place)
        contents += f' · <a href="#{anchor(place)}">{short}</a>'
        body += row(place, *cells)
    html = page("Text2Grad: the paper beside the code", contents + "</nav>" + body)
    return html.replace("style-src", "script-src 'unsafe-inline'; style-src")


if __name__ == "__main__":
    write_page(ROOT / "paper.html", build())
