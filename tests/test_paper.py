"""PAPER.md agrees with the code and the tests; paper.html is current, and paper.js computes what
Python computes.

A function names its place in the paper: "Alg. 4 l.22" or "§3.5" in its docstring or a comment,
or "# l.22" if its docstring names the algorithm. Ranges and lists are allowed.
"""

import ast
import json
import random
import re
import shutil
import subprocess
import xml.etree.ElementTree as ET
from collections import Counter
from functools import cache
from html import unescape
from pathlib import Path
from statistics import mean

import pytest
import torch
import toy
from notebooks.paper import anchor, build, math, tags
from annotate import ground, parse_feedback, token_offsets, token_rewards
from data import get_task, read_rows, reward_prompt
from helpers import toy_config, ROOT
from model import add_lora, encode_prompt, eos_ids, use_lora
from reward_model import read_judgement, write_critiques
from sampling import generate
from settings import Config, parse_flags
from policy import gae, sample_rollouts, whiten
from text2grad import write_responses

ROOMS = (".", "toy", "measures", "experiments", "bench")
FILES = [path for room in ROOMS for path in sorted((ROOT / room).glob("*.py"))
         if path.name != "tiny.py"]                 # its titles name the algorithms
# The lines of Algorithms 1 to 4 that do something (no inputs, outputs, headings, "else" or
# "end"), and the number of lines of each algorithm.
ACTING = {1: {5, 6, 7, 8, 9, 10, 14, 17, 18, 19},
          2: {*range(5, 12), *range(15, 21), 22, 23, 24, 28},
          3: {4, 5, 6, 7, 8},
          4: {*range(5, 18), *range(19, 26), 27, 28, 29, 30, 33}}
LAST = {1: 19, 2: 29, 3: 9, 4: 34}
DOCUMENTED = ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef
ALL_TESTS = "".join(path.read_text("utf-8") for path in (ROOT / "tests").glob("test_*.py"))


@cache
def paper(heading: str) -> list[list[str]]:
    """The cells of the table rows in a section of PAPER.md."""
    text = (ROOT / "PAPER.md").read_text("utf-8").split(f"\n## {heading}\n")[1]
    rows = re.findall(r"(?m)^\| (?!-)(.*)\|$", text.split("\n## ")[0])
    return [[cell.strip() for cell in row.split("|")] for row in rows]


def mapped() -> list[list[str]]:
    """Place, description, code and test of each equation and line."""
    return [row for row in paper("Map") if re.match(r"(Eq|Alg)\. ", row[0])]


@cache
def pieces(path: Path) -> dict[str, tuple[str, str]]:
    """Name → (docstrings, source) of each top-level function, class and constant of a file."""
    text = path.read_text("utf-8")
    lines, pieces_by_name = text.splitlines(), {}
    for node in ast.parse(text).body:
        source = "\n".join(lines[node.lineno - 1:node.end_lineno])
        docs = [ast.get_docstring(n) or "" for n in ast.walk(node) if isinstance(n, DOCUMENTED)]
        names = [node.name] if docs else [x.id for x in getattr(node, "targets", [])
                                          if isinstance(x, ast.Name)]
        pieces_by_name |= {name: ("\n".join(docs), source) for name in names}
    return pieces_by_name


def section_of(place: str) -> str:
    """The section of an equation: "Eq. Appendix A α" → "Appendix A"."""
    return re.match(r"Eq\. (Appendix \S+|\S+)", place)[1]


def names_place(place: str, doc: str, source: str) -> bool:
    """Whether a piece of code names the place of a row of the map."""
    if place.startswith("Alg."):
        return tags("", place) <= tags(doc, source)
    return section_of(place) in source.replace("App. A", "Appendix A")


def named(text: str) -> dict[str, tuple[str, str] | None]:
    """`file.name` in a text → (docstring, source), or None if it does not exist."""
    pieces_by_name = {}
    for module, name in re.findall(r"`(\w+)\.(?!py`)(\w+)`", text):
        paths = [path for path in FILES if path.stem == module]
        pieces_by_name[f"{module}.{name}"] = pieces(paths[0]).get(name) if paths else None
    return pieces_by_name


# ── The map and the errata

def test_every_row_of_the_map_has_its_code_which_names_it_and_its_test():
    text = (ROOT / "PAPER.md").read_text("utf-8")
    missing = [name for name, piece in named(text).items() if not piece and name[0].islower()]
    missing += [name for name in re.findall(r"`(test_\w+)`", text)
                if f"def {name}(" not in ALL_TESTS]
    for place, _, code, test in mapped():
        pairs = named(code).items()
        missing += [f"{place}: not named in {name}" for name, piece in pairs
                    if piece and not names_place(place, *piece)]
        missing += [] if pairs and "`test_" in test else [f"{place}: lacks code or a test"]
    *_, errata = [paper("Errata of the paper")]
    assert len(errata) >= 15 and all("`test_" in row[-1] for row in errata[1:])
    assert not missing, "\n".join(missing)


def wrong_lines(path: Path) -> list[str]:
    """Comments that name no line of the map, a line beyond the end, or no algorithm."""
    known = {tag for place, *_ in mapped() for tag in tags("", place)}
    wrong = []
    # The docstring of the function says to which algorithm "# l.3" refers.
    whole_file = path.read_text("utf-8").replace("# l.", "")
    for doc, source in [*pieces(path).values(), ("", whole_file)]:
        for comment in re.findall(r".*(?:# |Alg\. \d )l\.\d.*", source):
            line_tags = tags(doc, comment)
            if not line_tags & known or any(i > LAST[n] for n, i in line_tags):
                wrong.append(f"{path.name}: {comment}")
    return wrong


def test_the_code_names_no_line_that_the_map_lacks():
    wrong = [line for path in FILES for line in wrong_lines(path)]
    assert not wrong, "\n".join(wrong)


def test_the_map_is_whole():
    """The map has all acting lines, equations of §3 and Appendices A and I, tables, figures;
    the file that a table's row names mentions that table."""
    known = [row[0] for row in mapped()]
    assert len(known) == len(set(known)), "PAPER.md has a row twice"
    lines = {tag for place in known for tag in tags("", place)}
    assert {(n, i) for n, acting in ACTING.items() for i in acting} <= lines
    sections = Counter(section_of(place) for place in known if place.startswith("Eq."))
    assert sections == {"§3.1": 1, "§3.3": 1, "§3.4": 1, "§3.5": 5, "§3.6": 3, "Appendix A": 2,
                        "Appendix I.1": 1}
    numbers = {"Table": set(), "Figure": set()}
    for place, _, code in (row for row in paper("Map") if re.match("(Tab|Fig)", row[0])):
        kind = re.match("Table|Figure", place)[0]
        source = (ROOT / re.search(r"`([\w/]+\.py)`", code)[1]).read_text("utf-8")
        listed = " ".join(re.findall(rf"{kind}s? ((?:\d+(?:, | and | to )?)+)", source))
        assert {*re.findall(r"\d+", place)} & {*re.findall(r"\d+", listed)}, place
        numbers[kind] |= {*map(int, re.findall(r"\d+", place))}
    assert numbers == {"Table": {*range(1, 20)}, "Figure": {*range(1, 7)}}


def test_what_is_missing_is_seen(tmp_path):
    doc, source = "Algorithm 4.", "x = 1  # l.12–13\ny = 2  # l.25, 27\n# Alg. 2 l.15"
    assert tags(doc, source) == {(2, 15), (4, 12), (4, 13), (4, 25), (4, 27)}
    assert names_place("Alg. 4 l.12", doc, source) and names_place("Alg. 2 l.15", doc, source)
    assert not names_place("Alg. 4 l.13–14", doc, source)
    assert named("`text2grad.gone`, `eval.py`") == {"text2grad.gone": None}
    path = tmp_path / "f.py"
    path.write_text('def f():\n    """Algorithm 4."""\n    f()  # l.12\n    f()  # l.18\n')
    assert wrong_lines(path) == ["f.py:     f()  # l.18"]


def test_prose_against_tables():
    """Gains in the text of §4.3 and §4.4, and those of Tables 2 and 3 (in %)."""
    assert round(29.1 - 26.2, 1) == 2.9                       # ROUGE-L over PPO; prose: 6.7
    assert round(29.1 - 22.4, 1) == 6.7                       # over DPO
    assert round(29.1 - 22.5, 1) == 6.6                       # over reflection; prose: 3.3
    assert round(61.6 - 61.0, 1) == 0.6                       # HumanEval+ over PPO; prose: 3.6
    averages = mean((67.7, 61.6, 73.3, 61.6)), mean((64.6, 61.0, 68.5, 55.8))
    assert round(averages[0] - averages[1], 1) == 3.6         # of all four over PPO
    assert [round(100 - 100 / times) for times in (7, 9)] == [86, 89]       # "6–8 × more"


def test_presets_are_the_release_s_hyperparameters():
    """Tables 9 and 10 are not available; these values are from the release's scripts."""
    paper = {"slf5k": (1e-6, "linear", 12, 0.2, 6.0, 89, 500, 5000),
             "kodcode": (5e-7, "cosine", 64, 0.07, 1.0, 256, 768, 10000),     # §4.1 says 9K
             "ultrafeedback": (1e-6, "cosine", 64, 0.05, 3.0, 512, 768, 10000)}
    rewards = {"slf5k": (1e-5, 3e-7, "q_proj,v_proj", 0.05, 1400, 500),
               "ultrafeedback": (1e-5, 3e-7, "q_proj,v_proj", 0.1, 1250, 768),
               "kodcode": (2e-5, 0.01, "q_proj,k_proj,v_proj,o_proj", 0.1, 1250, 768)}
    annotators = {"slf5k": (0.3, 1200), "kodcode": (0.1, 968), "ultrafeedback": (0.6, 1200)}
    for task, values in paper.items():
        c = parse_flags(Config, argv=["--task", task])
        assert values == (c.learning_rate, c.schedule, c.batch_size, c.kl_coef, c.kl_target,
                          c.max_new_tokens, c.max_critique_tokens, c.annotated_rows)
        assert (c.ppo_epochs, c.value_coef, c.clip, c.value_clip, c.gamma, c.lam, c.lora_r,
                c.lora_alpha, c.temperature) == (4, 0.1, 0.2, 0.2, 1.0, 0.95, 16, 32, 0.6)
        assert c.minibatch_size == c.batch_size and c.kl_horizon == 10000
        assert c.value_rate_factor == 1 and c.passes == 4
        assert rewards[task] == (
            c.reward_learning_rate, c.reward_weight_decay, c.reward_lora_targets,
            c.reward_lora_dropout, c.reward_max_tokens, c.max_critique_tokens)
        assert (c.reward_lora_r, c.reward_lora_alpha, c.reward_epochs) == (16, 32, 3)
        assert annotators[task] == (get_task(task).temperature, get_task(task).max_tokens)


def test_our_reading_of_algorithm_2_differs_from_the_literal_one(toy_model):
    """Literally, each quote labels the tokens of every occurrence, and the later label wins."""
    rng, different = random.Random(0), 0
    for row in toy.rows("eval", 400):
        ids = toy_model[1](toy.write_draft(row["facts"], rng)).input_ids
        text, offsets = token_offsets(toy_model[1], ids)
        feedback = parse_feedback(toy.critique(row, text))
        literal = [0.0] * len(ids)
        labelled = [(quote, 1) for quote in feedback.good_spans]
        for quote, label in labelled + [(quote, -1) for quote in feedback.poor_spans]:
            for match in re.finditer(f"(?=({re.escape(quote)}))", text):
                start, end = match.span(1)
                for t, (first, last) in enumerate(offsets):
                    first += text[first:last].startswith(" ")
                    if start <= first < last <= end:
                        literal[t] = float(label)
        different += literal != token_rewards(text, offsets, ground(text, feedback).spans)
    assert different == 57


def test_rollouts_hold_the_ids_that_were_sampled_and_their_critiques(toy_model):
    """Alg. 4 l.8, 11, 12: rollouts keep the sampled ids of y; z′ is R_φ's greedy text, with one
    forward pass per token, whereas App. K speaks of a single pass."""
    model, tokenizer = toy_model
    for name in ("policy", "reward"):
        for p in add_lora(model, name):
            torch.nn.init.normal_(p, std=0.1)
    config, rows = toy_config(temperature=0.7), toy.rows("train", 3)
    tokenizer.add_special_tokens({"pad_token": "<new>"})   # an id that the embeddings lack
    generator = torch.Generator().manual_seed(0)
    rollouts = sample_rollouts(model, tokenizer, rows, config, "policy", generator)
    prompts = [encode_prompt(tokenizer, prompt) for prompt in rollouts.prompts]
    uniforms = torch.rand(3, config.max_new_tokens, generator=torch.Generator().manual_seed(0))
    ends = eos_ids(tokenizer, model)
    with use_lora(model, "policy"):
        ids = generate(model, prompts, config.max_new_tokens, 0.7, ends, uniforms=uniforms)
    kept = zip(rollouts.response_ids, rollouts.mask)
    assert [row[mask.bool()].tolist() for row, mask in kept] == ids
    passes, new = [], 12
    hook = model.base_model.register_forward_hook(lambda *_: passes.append(1))
    critiques = write_critiques(model, tokenizer, rollouts.prompts, rollouts.texts, new)
    hook.remove()
    for x, y, critique in zip(rollouts.prompts, rollouts.texts, critiques):
        input_ids = torch.tensor([encode_prompt(tokenizer, reward_prompt(x, y))])
        with use_lora(model, "reward"):
            z = model.generate(input_ids, attention_mask=torch.ones_like(input_ids),
                               max_new_tokens=new, do_sample=False, eos_token_id=ends,
                               pad_token_id=0)
        assert critique == tokenizer.decode(z[0, input_ids.shape[1]:], skip_special_tokens=True)
    assert len(passes) == new                           # the batch shares each of them


def test_rows_without_a_response_are_answered_by_the_base(toy_model, tmp_path):
    """Alg. 1 l.6: y ~ π_ref(·|x) at the policy's temperature; a row's own response stays."""
    model, tokenizer = toy_model
    for p in add_lora(model, "policy"):
        torch.nn.init.normal_(p, std=0.1)
    config, rows = toy_config(temperature=0.7, seed=3), toy.rows("train", 2)
    own = rows[1] | {"response": "My own."}
    write_responses(model, tokenizer, [own, rows[0]], config, tmp_path)
    x = encode_prompt(tokenizer, get_task("toy").policy_prompt(rows[0]))
    uniforms = torch.rand(1, config.max_new_tokens, generator=torch.Generator().manual_seed(3))
    y, = generate(model, [x], config.max_new_tokens, 0.7, eos_ids(tokenizer, model), uniforms)
    assert read_rows(tmp_path / "responses.jsonl") == [
        own, rows[0] | {"response": token_offsets(tokenizer, y)[0]}]


def test_the_printed_inequality_needs_the_printed_end_of_sequence_advantage():
    """Appendix A, t = 3 of 6, Δr_k ≥ 0: true if A_t^B sums from t, false from 1 (as in GAE)."""
    weight, change, t, T = 0.95, [1.0, 0.0, 0.0, 1.0, 0.0, 0.0], 3, 6
    ones = torch.ones(1, T)
    tokens, end = (gae(torch.tensor([row]), 0 * ones, ones, 1.0, weight)[0][0, t - 1].item()
                   for row in (change, [0.0] * (T - 1) + [sum(change)]))
    printed, full_sum = (weight ** (T - t) * sum(change[first - 1:]) for first in (t, 1))
    assert end == pytest.approx(full_sum) and printed < tokens < full_sum


# ── paper.html

@cache
def page() -> str:
    return (ROOT / "paper.html").read_text("utf-8")


@cache
def page_rows() -> dict[str, str]:
    """The id of each row of paper.html → its HTML."""
    parts = page().split('<div class="row" id="')[1:]
    return {part.split('"')[0]: part for part in parts}


def test_the_page_is_made_of_the_sources_and_loads_nothing():
    text = page()
    assert build() == text, "run python notebooks/paper.py"
    assert {anchor(row[0]) for row in mapped()} == {*page_rows()} and len(page_rows()) > 50
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids))
    links = {*re.findall(r'\bhref="([^"]+)"', text)} - {f"#{name}" for name in ids}
    assert links == {"https://arxiv.org/abs/2505.22338"} == {
        *re.findall(r"https?://[^\s\"'<]*", text)}
    assert "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'" in text


def test_every_formula_is_mathml_with_the_text_of_its_source():
    formulas = re.findall(r"<math.*?</math>", page())
    assert len(formulas) > 100
    for html in formulas:
        tree = ET.fromstring(html)
        source = re.sub(r"[\s_^‹›]|(?<=})/(?={)", "", tree.get("alttext"))
        # The brackets of scripts and fractions are not shown, those of a set are.
        if "∈{" not in source:
            source = re.sub("[{}]", "", source)
        assert "".join(tree.itertext()) == source, html
    assert math("π_{θ_old}/{n}").endswith(
        "<mfrac><msub><mi>π</mi><mrow><msub><mi>θ</mi><mrow><mi>old</mi></mrow></msub></mrow>"
        "</msub><mrow><mi>n</mi></mrow></mfrac></math>")


@pytest.mark.parametrize("slug, printed, here", [
    ("eq-3-5-ppo", "‹−› β ℋ(", "+ β_H 𝔼_t ℋ("),
    ("alg-4-l-15-16", "∑_{l=0}^{‹T−t−1›}", "∑_{l=0}^{T−t}"),
    ("alg-4-l-14", "δ_t^′ + ‹r_t^KL›", "−β (log π_{θ_old}(y_t) − log π_ref(y_t))"),
    ("eq-3-6-a-b", "∑_{‹k=t›}^T δ_k", "∑_{k=1}^T δ_k")])
def test_the_slips_of_the_paper_by_hand(slug, printed, here):
    """The left forms are in arXiv 2505.22338; the marked part is what is wrong or missing."""
    found = re.findall('<small>(\\w+)</small> (.*?)</p>', page_rows()[slug])
    forms = {label: "; ".join(re.findall('alttext="(.*?)"', html)) for label, html in found}
    assert printed in forms["printed"] and here in forms["here"]


@pytest.mark.parametrize("slug, code, most", [
    ("alg-4-l-14", "rewards = (rollouts.delta - beta * kl) * mask", 2),
    ("alg-4-l-11", "ids = generate(model, prompt_ids[RANK::WORLD_SIZE]", 4),  # of 3 lines
    ("alg-4-l-23", "gain = torch.minimum(", 2),                       # the tag stands above it
    ("alg-2-l-10-11", "Add no opinion of your own.", 9),             # an entry of a dictionary
    ("alg-1-l-14", "lambda: summary(fit(", 4)])
def test_the_line_that_is_tagged_is_marked(slug, code, most):
    marked = "".join(re.findall(r"(?s)<mark>(.*?)</mark>", page_rows()[slug]))
    assert code in unescape(marked) and marked.count("\n") <= most


# ── paper.js against Python, and in a browser

RUN = """
const page = require(process.argv[1]);
const answer = ({ reply, text, offsets, values, set }) => {
  let quotes = { good: [], poor: [] }, reason = "";
  try { quotes = page.parse(reply); } catch (error) { reason = error.message; }
  const grounding = page.ground(text, quotes);
  const found = page.rewards(text, offsets, grounding.spans);
  return { ...found, ...page.advantages(found.delta, values, set), reason,
    words: page.split(text).tokens,
    unmatched: grounding.unmatched.length, ambiguous: grounding.ambiguous.length };
};
const cases = JSON.parse(require("fs").readFileSync(0, "utf8"));
console.log(JSON.stringify(cases.map(answer)));
"""
STRANGE = " It is 5 \u201cs\u201d\t of  cafe\u0301, a 👩\u200d💻, 2 m² and one, \"one by one.\""
OTHER = "caf\u00e9", "cafe", "5 's'", "5  \"s\" of", "👩", "m2", "zebra", "one"


def one_case(rng, tokenizer) -> dict:
    """A toy response and a reply that quotes it, sometimes wrongly."""
    row, = toy.rows("eval", 1, rng.randrange(10**6))
    is_strange = rng.randrange(2)
    draft = toy.write_draft(row["facts"], rng) + STRANGE * is_strange
    text, offsets = token_offsets(tokenizer, tokenizer(draft).input_ids)
    feedback = parse_feedback(toy.critique(row, text))
    good = feedback.good_spans + rng.sample(OTHER, 3 * is_strange)
    poor = feedback.poor_spans + good[: rng.randrange(2)]
    spans = json.dumps({"good_spans": good, "poor_spans": poor})
    reply = rng.choice([f"Some prose.\n{spans}"] * 8 + [
        f'{{"critique": "Good.", {spans[1:]}', spans, "Cut off. " + spans[:-2],
        'No list. {"good_spans": 7, "poor_spans": []}'])
    return {"reply": reply, "text": text, "offsets": offsets,
            "values": [rng.gauss(0, 1) for _ in offsets],
            "set": {"gamma": rng.random(), "lam": rng.random()}}


def test_fifty_cases_are_what_python_makes_of_them(toy_model):
    """Spans, δ, A, A whitened, and what is counted, to 1e-5."""
    if not (node := shutil.which("node")):
        pytest.skip("node is not installed, so paper.js is not compared with Python")
    rng, counts_seen = random.Random(0), Counter()
    cases = [one_case(rng, toy_model[1]) for _ in range(50)]
    process = subprocess.run([node, "-e", RUN, str(ROOT / "notebooks" / "paper.js")], text=True,
                             check=True, input=json.dumps(cases), capture_output=True)
    for case, ours in zip(cases, json.loads(process.stdout), strict=True):
        judgement = read_judgement(case["reply"], case["text"], case["offsets"])
        assert bool(ours["reason"]) == bool(judgement.reason), (case["reply"], judgement.reason)
        assert ours["delta"] == judgement.delta, case
        counts = [judgement.unmatched, judgement.ambiguous, judgement.conflicts]
        assert counts == [ours["unmatched"], ours["ambiguous"], len(ours["conflicts"])], case
        delta, values = (torch.tensor([row], dtype=torch.float64)
                         for row in (judgement.delta, case["values"]))
        ones = torch.ones_like(delta)
        A, _ = gae(delta, values, ones, case["set"]["gamma"], case["set"]["lam"])
        for name, row in (("A", A), ("white", whiten(A, ones))):
            close = torch.tensor([ours[name]], dtype=torch.float64)
            torch.testing.assert_close(close, row, atol=1e-5, rtol=0)
        assert "".join(ours["words"]) == case["text"] and ours["words"][-1] == ""
        counts_seen.update(dict(zip(("unmatched", "ambiguous", "in both"), counts)))
        counts_seen.update({"unreadable": bool(judgement.reason),
                            "good": judgement.delta.count(1),
                            "poor": judgement.delta.count(-1)})
    assert len(counts_seen) == 6 and min(counts_seen.values()) >= 4, counts_seen


def test_a_browser_shows_what_python_makes_of_the_critique_on_the_page(tmp_path):
    """At 390 px, too: no part of the page is wider than the window."""
    if not (browser := shutil.which("chromium")):
        pytest.skip("chromium is not installed, so the page is not opened")
    path = tmp_path / "page.html"
    script = "document.title = document.documentElement.scrollWidth - innerWidth"
    path.write_text(page().replace("</body>", f"<script>{script}</script></body>"))
    flags = ("--headless", "--no-sandbox", f"--user-data-dir={tmp_path}", "--dump-dom",
             "--window-size=390,900")
    process = subprocess.run([browser, *flags, path.as_uri()], check=True, capture_output=True,
                             text=True, timeout=300)
    html = process.stdout
    assert int(re.search("<title>(-?[0-9]+)<", html)[1]) <= 0
    reply, = re.findall(r'(?s)<textarea id="critique"[^>]*>(.*?)</textarea>', page())
    data = json.loads(re.search(r"const PAGE = (.*);\n", page())[1])
    judgement = read_judgement(unescape(reply), data["text"], data["offsets"])
    block = re.search('<div id="delta">(.*?)</div>', html)[1]
    shown = re.findall('<span title="(.*?)" .*?>(.*?)</span>', block)
    assert [float(value) for value, _ in shown] == judgement.delta
    assert "".join(unescape(text) for _, text in shown) == data["text"] + "▯"
