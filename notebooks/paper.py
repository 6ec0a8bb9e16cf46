"""Write paper.html, which shows the paper beside the code:

    python notebooks/paper.py

Each row of PAPER.md's map becomes a row of the page: the equation or step on the left, its code
and its test on the right. Above the rows are a table of contents, and a response with its
critique, both of which the reader can edit.
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
# place | formulas as the paper prints them | how this repository reads or changes them, if it
# does. "; " separates formulas, _ and ^ begin a subscript and a superscript, and ‹ › enclose a
# slip, which is a small error of the paper (PAPER.md).
WORDS = """\
Eq. §3.1 Definition 1 | ∇_NL(c → y) = ∑_{t=1}^T δ_t ∇_θ log π_θ(y_t ∣ x, y_<t)
Eq. §3.3 δ | δ_t = +1 if t ∈ s_k and 𝒜(y)[s_k] = positive;
  −1 if t ∈ s_k and 𝒜(y)[s_k] = negative; 0 otherwise | δ_t = 0 if both
Eq. §3.4 L_R | p_φ(z ∣ x, y) = ∏_{t=1}^{|z|} p_φ(z_t ∣ z_<t, x, y);
  ℒ_R(φ) = −𝔼_{(x,y,z)∈𝒟_R}[log p_φ(z ∣ x, y)]
  | ℒ_R(φ) = −𝔼_{(x,y,z)∈𝒟_R, t}[log p_φ(z_t ∣ z_<t, x, y)]
Eq. §3.5 GAE | A_t = ∑_{l=0}^{‹T−t−1›} (γλ)^l δ_{t+l}^TD;
  δ_t^TD = r_t^{total,A} + γ V_ψ(x, y_{<t+1}) − V_ψ(x, y_<t)
  | A_t = ∑_{l=0}^{T−t} (γλ)^l δ_{t+l}^TD; V_ψ(x, y_{<T+1}) = 0
Eq. §3.5 total reward | r_t^{total,A} = δ_t + r_t^KL
Eq. §3.5 r_t^KL | r_t^KL ‹undefined› | r_t^KL = −β (log π_{θ_old}(y_t) − log π_ref(y_t))
Eq. §3.5 g_NL | g_NL = ∑_{t=1}^T δ_t · ∇_θ log π_θ(y_t ∣ x, y_<t)
Eq. §3.5 PPO | L^PPO(θ) = 𝔼_t[min(ρ_t A_t, clip(ρ_t, 1 − ε, 1 + ε) A_t)];
  ‹−› β ℋ(π_θ(· ∣ x, y_<t)); ρ_t = π_θ(y_t ∣ x, y_<t) / π_{θ_old}(y_t ∣ x, y_<t)
  | maximise 𝔼_t[min(ρ_t A_t, clip(ρ_t, 1 − ε, 1 + ε) A_t)]; + β_H 𝔼_t ℋ(π_θ(· ∣ x, y_<t))
Eq. §3.6 A^A | A_t^A = ∑_{k=t}^T (γλ)^{k−t} ‹δ_k›
  | A_t^A = ∑_{k=t}^T (γλ)^{k−t} δ_k^TD; δ_k^TD = δ_k if β = 0 and V_ψ = 0
Eq. §3.6 A^B | A_t^B = (γλ)^{T−t} ∑_{‹k=t›}^T δ_k
  | A_t^B = (γλ)^{T−t} ∑_{k=1}^T δ_k if β = 0 and V_ψ = 0
Eq. §3.6 ΔA^A − ΔA^B | ΔA_t^A − ΔA_t^B = ∑_{k=t}^{T−1} ‹(γλ)^{k−t}› Δδ_k
  | ΔA_t^A − ΔA_t^B = ∑_{k=t}^{T−1} [(γλ)^{k−t} − (γλ)^{T−t}] Δδ_k; − (γλ)^{T−t} ∑_{k<t} Δδ_k
Eq. Appendix A ΔA | ΔA_t^A = ∑_{k=t}^T (γλ)^{k−t} Δr_k; ΔA_t^B = (γλ)^{T−t} ∑_{‹k=t›}^T Δr_k;
  ΔA_t^A > ΔA_t^B if ‹any Δr_k > 0, k < T›
  | ΔA_1^A > ΔA_1^B if all Δr_k ≥ 0 and any Δr_k > 0, k < T
Eq. Appendix A α | α(k, T) = (γλ)^{k−t} / (γλ)^{T−t} = (γλ)^{−(T−k)}; 0.95^{−20} ≈ 2.8
Eq. Appendix I.1 decay | r_i = 1.0 − (i − 1) · 0.9 / ‹(n − 1)› | r_1 = 1 if n = 1
Alg. 1 l.5 | 𝒟_R ← ∅
Alg. 1 l.7–8 | (c_i, 𝒜(y_i), δ_i) ←; GenerateDualFeedback(x_i, y_i)
Alg. 1 l.9 | z_i ← [c_i;𝒜(y_i)]
Alg. 1 l.14 | R_φ ← TrainRewardModel(𝒟_R)
Alg. 1 l.18–19 | π_θ ←; OptimizePolicyWithNLGradient(π_θ, R_φ, V_ψ)
Alg. 2 l.5–9 | c, 𝒜(y); s_k ⊂ y; ℓ_k ∈ {positive, ‹neutral›, negative}
  | ℓ_k ∈ {positive, negative}
Alg. 2 l.10–11 | ‹c›, 𝒜(y) | 𝒜(y)
Alg. 2 l.13 | R_LLM(x, y) = (c, 𝒜(y)); 𝒜(y) : s_k ↦ ℓ_k
Alg. 2 l.16–17 | ℓ_k = 𝒜(y)[s_k]
Alg. 2 l.18–25 | δ_t ← +1 if ℓ_k = positive and y_t ∈ s_k;
  δ_t ← −1 if ℓ_k = negative and y_t ∈ s_k | δ_t = 0 if both
Alg. 3 l.5–6 | p_φ(z ∣ x, y) = ∏_{j=1}^{|z|} p_φ(z_j ∣ z_<j, x, y);
  ℒ_R(φ) = −𝔼_{(x,y,z)∈𝒟_R}[log p_φ(z ∣ x, y)]
  | ℒ_R(φ) = −𝔼_{(x,y,z)∈𝒟_R, j}[log p_φ(z_j ∣ z_<j, x, y)]
Alg. 4 l.5 | π_θ ← π_{θ_init}; V_ψ ← V_{ψ_init}
Alg. 4 l.7 | π_{θ_old} ← π_θ
Alg. 4 l.8 | ℬ ← ∅
Alg. 4 l.11 | y = (y_1, …, y_T) ∼ π_{θ_old}(· ∣ x)
Alg. 4 l.12 | z^′ = [c^′;𝒜^′(y)] ∼ R_φ(z^′ ∣ x, y) | z_j^′ = argmax_z p_φ(z ∣ z_{<j}^′, x, y)
Alg. 4 l.13 | δ^′ = (δ_1^′, …, δ_T^′); lines ‹11–20› of Algorithm 2
  | lines 15–27 of Algorithm 2
Alg. 4 l.14 | r_t^{total,A} ← δ_t^′ + ‹r_t^KL›
  | r_t^KL = −β (log π_{θ_old}(y_t) − log π_ref(y_t))
Alg. 4 l.15–16 | A_t = ∑_{k=t}^T γ^{k−t} r_k^{total,A} − V_ψ(x, y_<t);
  or A_t = ∑_{l=0}^{‹T−t−1›} (γλ)^l (r_{t+l}^{total,A};
  + γ V_ψ(x, y_{<t+l+1}) − V_ψ(x, y_{<t+l}))
  | A_t = ∑_{l=0}^{T−t} (γλ)^l δ_{t+l}^TD; V_ψ(x, y_{<T+1}) = 0
Alg. 4 l.21–22 | ρ_t(θ) = π_θ(y_t ∣ x, y_<t) / π_{θ_old}(y_t ∣ x, y_<t)
Alg. 4 l.23 | L_t^CLIP(θ) = min(ρ_t(θ) A_t, clip(ρ_t(θ), 1 − ε, 1 + ε) A_t)
Alg. 4 l.24 | L_t^VF(ψ) = (V_ψ(x, y_<t) − (∑_{k=t}^T γ^{k−t} r_k^{total,A}))^2
  | L_t^VF(ψ) = ½ max((V_t − R_t)^2, (clip(V_t) − R_t)^2); R_t = A_t + V_t^old
Alg. 4 l.25 | L_t^ENT(θ) = ℋ(π_θ(· ∣ x, y_<t))
Alg. 4 l.27 | L^PPO(θ) = 𝔼_{ℬ,t}[L_t^CLIP(θ) ‹−› β L_t^ENT(θ)]
  | maximise 𝔼_{ℬ,t}[L_t^CLIP(θ) + β_H L_t^ENT(θ)]
Alg. 4 l.28 | L^VF(ψ) = 𝔼_{ℬ,t}[L_t^VF(ψ)]
Alg. 4 l.29–30 | θ ← optimizer step(θ, ∇_θ L^PPO(θ)); ψ ← optimizer step(ψ, ∇_ψ L^VF(ψ))"""
WORDS = {place: formulas for place, *formulas in
         (line.split(" | ") for line in re.sub(r"\n +", " ", WORDS).split("\n"))}
# Equations whose lines of code have the tag of another place.
SAME = {"Eq. §3.5 total reward": "Alg. 4 l.14", "Eq. §3.5 r_t^KL": "Alg. 4 l.14",
        "Eq. §3.5 GAE": "Alg. 4 l.15–16", "Eq. §3.4 L_R": "Alg. 3 l.5–6",
        "Eq. §3.5 PPO": "Alg. 4 l.23"}
HEAD = """<style>.row { display: grid; gap: 0 1.5rem; border-top: 1px solid #8885; }
@media (min-width: 60rem) { .row { grid-template-columns: 2.1fr 3.5fr; } }
.row > * { margin: .6rem 0; min-width: 0; } pre { overflow-x: auto; font-size: .75rem; }
mark { background: #f0b42940; color: inherit; } :target { outline: 2px solid #2f7fd1; }
a { color: inherit; } label { display: block; }
textarea { width: 100%; box-sizing: border-box; font: inherit; }
sub, sup { line-height: 0; font-size: .75em; }
.small { font-size: .8rem; overflow-wrap: anywhere; } h3 + div { white-space: pre-wrap }
.formula { font-family: "STIX Two Text", Cambria, "DejaVu Serif", serif; line-height: 1.8;
  padding-left: 4rem; }
.formula small { display: inline-block; width: 4rem; margin-left: -4rem; }
pre { overflow-x: auto; padding: .2rem 0; --shade: #8887, transparent;
  background: linear-gradient(90deg, Canvas 1rem, #0000) 0 / 2rem 100% local no-repeat,
    linear-gradient(270deg, Canvas 1rem, #0000) 100% / 2rem 100% local no-repeat,
    linear-gradient(90deg, var(--shade)) 0 / 1rem 100% scroll no-repeat,
    linear-gradient(270deg, var(--shade)) 100% / 1rem 100% scroll no-repeat; }
#worked { white-space: pre-line; } small { opacity: .75; }
.slip { background: #d55e0033; border-bottom: 2px solid #d55e00;
  padding: 0 .15em; } textarea { field-sizing: content; }
@media print { pre { white-space: pre-wrap; background: none; }
  pre, .scroll { overflow: hidden; } }</style>
<p><a href="https://arxiv.org/abs/2505.22338">The paper</a> is left, the code right. “printed”:
the formula as the paper has it, with <span class="slip">slips</span> marked. “here”: what this
repository does instead, for the reasons in PAPER.md. A shaded edge means: scroll sideways.</p>
<nav><p class="small"><a href="#touch">One response, token by token</a>"""
TOUCH = """<section id="touch"><h2>One response, token by token</h2><p>The quotes of the
critique give each token of the response its reward δ. Without a model there is no KL term, so
r = δ here. GAE turns r into the advantages A, and PPO trains with the whitened A. Edit the
response, the critique or a slider to see them change. V is the same for all tokens. An
edited response is split into words, because the page has no tokenizer.</p>{legend}
<div class="columns"><div><p class="small">Post: {post}</p>
<label>Response <textarea id="response" rows="3">{text}</textarea></label>
<label>Critique <textarea id="critique" rows="7">{reply}</textarea></label>
<p class="small" id="result"></p>
<label>γ <input type="range" id="gamma" max="1" step=".01" value="1"> <output></output></label>
<label>λ <input type="range" id="lam" max="1" step=".01" value=".95"> <output></output></label>
<label>V <input type="range" id="value" max="1" step=".01" value="0"> <output></output></label>
<p class="small" id="worked"></p></div><div><h3>δ</h3><div id="delta"></div>
<h3>A, full colour at ±2</h3><div id="raw"></div><h3>A, whitened</h3>
<div id="white"></div></div></div><details><summary>All numbers</summary><div class="scroll">
<table><thead><tr><th>t, y<th>δ<th>A<th>A, whitened<tbody id="numbers">
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


def excerpt(place: str, name: str, shown: dict) -> str:
    """The HTML of the code of `module.name`; long code with marked lines is cut.

    place: an equation or algorithm line of the paper; lines whose comment names it are marked.

    shown: {name: place} of the code that the page already has as a whole. A later excerpt of
    this code has only the marked lines, and a link to that place.
    """
    module, name = name.split(".")
    path = [*ROOT.glob(f"{module}.py"), *ROOT.glob(f"*/{module}.py")][0]
    text, marked, html = path.read_text("utf-8"), set(), ""
    start = rf"(?:(?:def|class) {name}\b|{name} = )"
    piece = re.search(rf"(?ms)^{start}.*?(?=\n+[^\s}})\]]|\n*\Z)", text)
    first, lines = text.count("\n", 0, piece.start()), piece[0].splitlines()
    for i, line in enumerate(lines, 1):
        code, _, comment = line.partition("#")
        place_tags = tags("", SAME.get(place, place))
        if place_tags & tags(piece[0], "#" + comment) or SAME.get(place, place) in comment:
            marked |= {*extent(ast.parse(piece[0]), i, not code.strip())}
    # Code without a marked line is shown whole, too, as all of it belongs to the place.
    is_whole = name not in shown and (len(lines) <= 24 or not marked)
    margin = 0 if name in shown else 2
    near = {i for m in marked for i in range(m - margin, m + margin + 1)}
    for i, line in enumerate(lines, 1):
        code = f"{first + i:4} {escape(line)}\n"
        is_hidden = not is_whole and i > 1 and i not in near
        html += "   ⋯\n" if is_hidden else f"<mark>{code}</mark>" if i in marked else code
    position = f"{path.relative_to(ROOT)}:{first + min(marked, default=1)}"
    html = re.sub("(   ⋯\n)+", "   ⋯\n", html)
    link = ""
    if name in shown:
        link = f' · <a href="#{anchor(shown[name])}-code">whole at {shown[name]}</a>'
    elif is_whole:
        shown[name] = place
    return f"<b>{position}</b> {name}{link}</p><pre>{html}</pre>"


def anchor(text: str) -> str:
    """The id of a heading or a place on the page."""
    return re.sub(r"\W+", "-", text).lower()


def math(text: str) -> str:
    """A formula as HTML, with its subscripts and superscripts. WORDS has examples."""
    html = escape(re.sub(r"([_^])(<?[^\W_]+|′)", r"\1{\2}", text))            # y_<t → y_{<t}
    for _ in range(2):                                   # a subscript may hold another
        html = re.sub(r"_\{([^{}]*)\}", r"<sub>\1</sub>", html)
        html = re.sub(r"\^\{([^{}]*)\}", r"<sup>\1</sup>", html)
    return html.replace("‹", '<span class="slip">').replace("›", "</span>")


def row(shown: dict, place: str, description: str, code: str, tests: str) -> str:
    """A row of the page: the paper's side has the anchor #slug, the code's #slug-code."""
    slug, left = anchor(place), ""
    for label, cell in zip(("printed", "here"), WORDS.get(place, [])):
        formulas = "<br>".join(map(math, cell.split("; ")))
        left += f'<p class="formula"><small>{label}</small>{formulas}</p>'
    if not left or len(re.findall(r"\b[a-z]{3,}\b", description)) > 2:      # not only symbols
        left += f"<p>{math(description)}</p>"
    right = ""
    for name in re.findall(r"`(\w+\.\w+)`", code):
        right += (f'<p class="small"><a href="#{slug}">↩ {place}</a> '
                  f'{excerpt(place, name, shown)}')
    right += f'<p class="small">Fails without it: {tests.strip("`")}</p>'
    return (f'<div class="row" id="{slug}"><div><a href="#{slug}-code">{place}</a>{left}</div>'
            f'<div id="{slug}-code">{right}</div></div>')


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
    shown = {}                                          # see `excerpt`
    for place, *cells in (line.split(" | ") for line in re.findall(PLACES, text)):
        title = "Equations" if place[0] == "E" else f"Algorithm {place[5]}"
        if title != section:
            section, slug = title, anchor(title)
            contents += f'<p class="small"><a href="#{slug}">{title}</a>'
            body += f'<h2 id="{slug}">{title}</h2>'
        short = re.sub(r"^(Eq\.|Alg\. \d) ", "", place)
        contents += f' · <a href="#{anchor(place)}">{short}</a>'
        body += row(shown, place, *cells)
    html = page("Text2Grad: the paper beside the code", contents + "</nav>" + body)
    return html.replace("style-src", "script-src 'unsafe-inline'; style-src")


if __name__ == "__main__":
    write_page(ROOT / "paper.html", build())
