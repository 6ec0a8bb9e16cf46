"""PAPER.md agrees with the code and the tests, paper.html is current, and paper.js computes the
numbers of Python.

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
import policy
import reward_model
import toy
from notebooks.paper import WORDS, anchor, build, math, tags
from annotate import ground, parse_feedback, read_critique, token_offsets, token_rewards
from data import critique_prompt, get_task
from helpers import ROOT, randomise, toy_config
from model import add_lora, encode_prompt, eos_ids, use_lora
from reward_model import write_critiques
from sampling import generate
from settings import Config, parse_flags, preset
from policy import gae, sample_rollouts, whiten

ROOMS = (".", "toy", "measures", "experiments", "bench")
FILES = [path for room in ROOMS for path in sorted((ROOT / room).glob("*.py"))
         if path.name != "tiny.py"]                 # its titles name the algorithms
# The lines of Algorithms 1 to 4 that do something, and the number of lines of each algorithm
ACTING = {1: {*range(5, 11), 14, 17, 18, 19}, 3: {*range(4, 9)},
          2: {*range(5, 12), *range(15, 21), 22, 23, 24, 28},
          4: {*range(5, 18), *range(19, 26), *range(27, 31), 33}}
LAST = {1: 19, 2: 29, 3: 9, 4: 34}
SECTION = r"Eq\. (Appendix \S+|\S+)"              # "Eq. Appendix A α" → "Appendix A"
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
    lines = path.read_text("utf-8").splitlines()
    pieces_by_name = {}
    for node in ast.parse("\n".join(lines)).body:
        source = "\n".join(lines[node.lineno - 1 : node.end_lineno])
        docs = "\n".join(re.findall('(?s)""".*?"""', source))
        names = [getattr(node, "name", None), *(getattr(target, "id", None)
                                                for target in getattr(node, "targets", []))]
        pieces_by_name |= {name: (docs, source) for name in names if name}
    return pieces_by_name


def named(text: str) -> dict[str, tuple[str, str] | None]:
    """`file.name` in a text → (docstring, source), or None if it does not exist."""
    pieces_by_name = {}
    for module, name in re.findall(r"`([a-z]\w+)\.(?!py`)(\w+)`", text):
        path, = [path for path in FILES if path.stem == module]
        pieces_by_name[f"{module}.{name}"] = pieces(path).get(name)
    return pieces_by_name


# ── The map and the errata

def test_every_row_of_the_map_has_its_code_which_names_it_and_its_test():
    text = (ROOT / "PAPER.md").read_text("utf-8")
    assert None not in named(text).values(), named(text)
    missing = [name for name in re.findall(r"`(test_\w+)`", text)
               if f"def {name}(" not in ALL_TESTS]
    for place, _, code, test in mapped():
        pairs = named(code).items()
        assert pairs and "`test_" in test, f"{place}: lacks code or a test"
        for name, (doc, source) in pairs:
            if place.startswith("Alg."):
                is_named = tags("", place) <= tags(doc, source)
            else:
                is_named = re.match(SECTION, place)[1] in source.replace("App. ", "Appendix ")
            missing += [] if is_named else [f"{place}: not named in {name}"]
    assert all("`test_" in row[-1] for row in paper("Errata of the paper")[1:])
    assert not missing, "\n".join(missing)


def test_the_code_names_no_line_that_the_map_lacks():
    """Nor a line beyond the end of an algorithm, nor "# l.3" where no algorithm is named."""
    known = {tag for place, *_ in mapped() for tag in tags("", place)}
    wrong = []
    for path in FILES:
        whole_file = path.read_text("utf-8").replace("# l.", "")
        for doc, source in [*pieces(path).values(), ("", whole_file)]:
            for comment in re.findall(r".*(?:# |Alg\. \d )l\.\d.*", source):
                lines = tags(doc, comment)
                if not lines & known or any(line > LAST[n] for n, line in lines):
                    wrong.append(f"{path.name}: {comment}")
    assert not wrong, "\n".join(wrong)


def test_the_map_is_whole():
    """The map has all acting lines, equations of §3 and Appendices A and I, tables, figures;
    the file that a table's row names mentions that table."""
    known = [row[0] for row in mapped()]
    assert len(known) == len(set(known)), "PAPER.md has a row twice"
    lines = {tag for place in known for tag in tags("", place)}
    assert {(n, i) for n, acting in ACTING.items() for i in acting} <= lines
    sections = Counter(re.match(SECTION, place)[1] for place in known if place[0] == "E")
    assert sections == {"§3.1": 1, "§3.3": 1, "§3.4": 1, "§3.5": 5, "§3.6": 3, "Appendix A": 2,
                        "Appendix I.1": 1}
    numbers = {"Table": set(), "Figure": set()}
    for place, _, code in (row for row in paper("Map") if re.match("(Tab|Fig)", row[0])):
        kind = re.match("Table|Figure", place)[0]
        source = (ROOT / re.search(r"`([\w/]+\.py)`", code)[1]).read_text("utf-8")
        listed = " ".join(re.findall(rf"{kind}s? ((?:\d+(?:, | and | to )?)+)", source))
        assert {*re.findall(r"\d+", place)} <= {*re.findall(r"\d+", listed)}, place
        numbers[kind] |= {*map(int, re.findall(r"\d+", place))}
    assert numbers == {"Table": {*range(1, 17)}, "Figure": {*range(1, 7)}}


def test_prose_against_tables():
    """PAPER.md's errata of the gains in §4.3 and §4.4, from the cells of Tables 2 and 3 (in %):
    over PPO, DPO and reflection; of one benchmark, and of the four on average."""
    rows = {row[0]: re.findall(r"\d*\.?\d+", row[2]) for row in paper("Errata of the paper")}
    ours, ppo, dpo, reflection = 29.1, 26.2, 22.4, 22.5                               # ROUGE-L
    averages = mean((67.7, 61.6, 73.3, 61.6)), mean((64.6, 61.0, 68.5, 55.8))
    gains = ours - ppo, ours - dpo, ours - reflection, 61.6 - 61.0, averages[0] - averages[1]
    found = [float(number) for number in rows["§4.3, §4.4"] if "." in number]
    assert found == [round(gain, 1) for gain in gains]
    savings = [f"{100 - 100 / times:.0f}" for times in (7, 9)]              # "6–8 × more"
    assert rows["§4.3, §4.5, App. I.1, N"] == ["7", "9", *savings]


def test_presets_are_the_release_s_hyperparameters():
    """Tables 9 and 10 are not available; these values are from the release's scripts."""
    names = (
        "learning_rate schedule batch_size minibatch_size kl_coef kl_target max_new_tokens "
        "annotated_rows reward_learning_rate reward_weight_decay reward_lora_targets "
        "reward_lora_dropout reward_max_tokens max_critique_tokens max_prompt_tokens").split()
    equal = dict(
        ppo_epochs=4, value_coef=0.1, clip=0.2, value_clip=0.2, gamma=1.0, lam=0.95, lora_r=16,
        lora_alpha=32, temperature=0.6, kl_horizon=10000, value_rate_factor=1, epochs=4,
        reward_lora_r=16, reward_lora_alpha=32, reward_epochs=3, reward_batch_size=8,
        lora_targets="q_proj,v_proj", model="meta-llama/Llama-3.1-8B-Instruct")    # §4.5
    qv, qkvo = "q_proj,v_proj", "q_proj,k_proj,v_proj,o_proj"
    for task, *values, temperature, tokens in (
            ("slf5k", 1e-6, "linear", 12, 12, .2, 6.0, 89, 5000, 1e-5, 3e-7, qv, .05, 1400,
             500, 811, 0.3, 1200),
            ("kodcode", 5e-7, "cosine", 64, 64, .07, 1.0, 256, 10000, 2e-5, .01, qkvo, .1, 1250,
             768, 644, 0.1, 968),                                        # §4.1 says 9K rows
            ("ultrafeedback", 1e-6, "cosine", 64, 64, .05, 3.0, 512, 10000, 1e-5, 3e-7, qv, .1,
             1250, 768, 438, 0.6, 1200)):
        expected = dict(zip(names, values, strict=True)) | equal
        assert preset(task).keys() <= expected.keys(), "a setting that nothing compares"
        config = vars(parse_flags(Config, argv=["--task", task]))
        assert {name: config[name] for name in expected} == expected
        assert (get_task(task).temperature, get_task(task).max_tokens) == (temperature, tokens)
    assert policy.MAX_GRAD_NORM == reward_model.MAX_GRAD_NORM == 1


def test_our_reading_of_algorithm_2_differs_from_the_literal_one(toy_model):
    """Literally, each quote labels the tokens of every occurrence, and the later label wins."""
    rng, different = random.Random(0), 0
    for row in toy.rows("eval", 400):
        ids = toy_model[1](toy.write_draft(row["facts"], rng)).input_ids
        text, offsets = token_offsets(toy_model[1], ids)
        feedback = parse_feedback(toy.critique(row, text))
        literal = [0.0] * len(ids)
        for quote in feedback.good_spans + feedback.poor_spans:
            for match in re.finditer(re.escape(quote), text):
                for t, (start, end) in enumerate(offsets):
                    start += text[start:end].startswith(" ")
                    if match.start() <= start < end <= match.end():
                        literal[t] = -1.0 if quote in feedback.poor_spans else 1.0
        different += literal != token_rewards(text, offsets, ground(text, feedback).spans)
    assert different == 57


def test_rollouts_hold_the_ids_that_were_sampled_and_their_critiques(toy_model):
    """Alg. 4 l.8, 11, 12: rollouts keep the sampled ids of y; z′ is R_φ's greedy text, with one
    forward pass per token, whereas App. K speaks of a single pass."""
    model, tokenizer = toy_model
    for name in ("policy", "reward"):
        randomise(add_lora(model, name))
    config, rows = toy_config(temperature=0.7), toy.rows("train", 3)
    tokenizer.add_special_tokens({"pad_token": "<new>"})   # an id that the embeddings lack
    generator = torch.Generator().manual_seed(0)
    rollouts = sample_rollouts(model, tokenizer, rows, config, "policy", generator)
    prompts = [encode_prompt(tokenizer, prompt) for prompt in rollouts.prompts]
    uniforms = torch.rand(3, config.max_new_tokens, generator=torch.Generator().manual_seed(0))
    ends = eos_ids(tokenizer, model)
    with use_lora(model, "policy"):
        ids = generate(model, prompts, config.max_new_tokens, 0.7, ends, uniforms=uniforms)
    assert [row[mask.bool()].tolist()
            for row, mask in zip(rollouts.response_ids, rollouts.mask)] == ids
    passes, new = [], 12
    hook = model.base_model.register_forward_hook(lambda *_: passes.append(1))
    critiques = write_critiques(model, tokenizer, rollouts.prompts, rollouts.texts, new)
    hook.remove()
    assert any(critiques)                    # an empty response has none
    for x, y, critique in zip(rollouts.prompts, rollouts.texts, critiques):
        if not y.strip():
            continue
        input_ids = torch.tensor([encode_prompt(tokenizer, critique_prompt(x, y))])
        with use_lora(model, "reward"):
            z = model.generate(input_ids, attention_mask=torch.ones_like(input_ids),
                               max_new_tokens=new, do_sample=False, eos_token_id=ends,
                               pad_token_id=0)
        assert critique == tokenizer.decode(z[0, input_ids.shape[1]:], skip_special_tokens=True)
    assert len(passes) == new                           # the batch shares each of them


def test_the_printed_inequality_needs_the_printed_end_of_sequence_advantage():
    """Appendix A, t = 3 of 6, Δr_k ≥ 0: true if A_t^B sums from t, false from 1 (as in GAE)."""
    weight, change, t, T = 0.95, [1.0, 0.0, 0.0, 1.0, 0.0, 0.0], 3, 6
    ones = torch.ones(1, T)
    tokens, end = (gae(torch.tensor([row]), 0 * ones, ones, 1.0, weight)[0][0, t - 1].item()
                   for row in (change, [0.0] * (T - 1) + [sum(change)]))
    printed, full_sum = (weight ** (T - t) * sum(change[first - 1:]) for first in (t, 1))
    assert end == pytest.approx(full_sum) and printed < tokens < full_sum


# ── paper.html

PAGE = (ROOT / "paper.html").read_text("utf-8")
# The id of each row of paper.html → its HTML
ROWS = {part.split('"')[0]: part for part in PAGE.split('<div class="row" id="')[1:]}


def test_the_page_is_made_of_the_sources_and_loads_nothing():
    assert build() == PAGE, "run python notebooks/paper.py"
    assert {anchor(row[0]) for row in mapped()} == {*ROWS} and len(ROWS) > 50
    ids = Counter(f"#{name}" for name in re.findall(r'\bid="([^"]+)"', PAGE))
    links = {*re.findall(r'\bhref="([^"]+)"', PAGE)} - {*ids}
    assert {*ids.values()} == {1} and links == {"https://arxiv.org/abs/2505.22338"}
    assert links == {*re.findall(r"https?://[^\s\"'<]*", PAGE)}
    assert "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'" in PAGE


def test_a_formula_has_its_scripts_and_the_text_of_its_source():
    for formula in "; ".join(sum(WORDS.values(), [])).split("; "):
        html = math(formula)
        shown = "".join(ET.fromstring(f"<p>{html}</p>").itertext())
        # The brackets of scripts are not shown, those of a set are.
        source = re.sub("[_^‹›]", "", formula)
        assert shown == (source if "∈ {" in source else re.sub("[{}]", "", source)), html
    assert math("π_{θ_old}^A(y_<t) ∈ {1, ‹2›}") == (
        "π<sub>θ<sub>old</sub></sub><sup>A</sup>(y<sub>&lt;t</sub>) ∈ "
        '{1, <span class="slip">2</span>}')


def test_the_slips_of_the_paper_are_marked():
    """The printed forms are in arXiv 2505.22338; ‹ › is what is wrong there."""
    _, left, right = re.split("<small>(?:printed|here)</small>", ROWS["eq-3-6-a-b"])
    assert '∑<sub><span class="slip">k=t</span></sub>' in left and "∑<sub>k=1</sub>" in right


@pytest.mark.parametrize("slug, code", [
    ("alg-4-l-14", "rewards = (rollouts.delta - beta * kl) * mask"),
    ("alg-4-l-23", "gain = torch.minimum("),                          # the tag stands above it
    ("alg-2-l-10-11", "Add no opinion of your own.")])               # an entry of a dictionary
def test_the_line_that_is_tagged_is_marked(slug, code):
    marked = "".join(re.findall(r"(?s)<mark>(.*?)</mark>", ROWS[slug]))
    assert code in unescape(marked) and marked.count("\n") < 10


def test_code_stands_on_the_page_whole_once_and_is_linked_where_it_recurs():
    assert "⋯" not in ROWS["alg-2-l-16-17"] + ROWS["alg-2-l-18-25"]          # they have no tag
    assert sum("next_advantage = " in html for html in ROWS.values()) == 1
    assert 'href="#eq-3-5-gae-code">whole' in ROWS["alg-4-l-15-16"]


# ── paper.js against Python, and in a browser

RUN = """
const page = require(process.argv[1]);
const answer = ({ reply, text, offsets, values, set }) => {
  let quotes = { good: [], poor: [] }, reason = "";
  try { quotes = page.parse(reply); } catch (error) { reason = error.message; }
  const grounding = page.ground(text, quotes);
  const found = page.rewards(text, offsets, grounding.spans);
  return { ...found, ...page.advantages(found.delta, values, set), reason,
    counts: [grounding.unmatched, grounding.ambiguous, found.conflicts].map((x) => x.length) };
};
console.log(JSON.stringify(JSON.parse(require("fs").readFileSync(0, "utf8")).map(answer)));
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
    return {"reply": reply, "text": text, "offsets": offsets, "set": {"gamma": .9, "lam": .7},
            "values": [rng.gauss(0, 1) for _ in offsets]}


def test_fifty_cases_are_what_python_makes_of_them(toy_model):
    """Spans, δ, A, A whitened, and what is counted, to 1e-5."""
    if not (node := shutil.which("node")):
        pytest.skip("node is not installed, so paper.js is not compared with Python")
    rng, seen = random.Random(0), []
    cases = [one_case(rng, toy_model[1]) for _ in range(50)]
    process = subprocess.run([node, "-e", RUN, str(ROOT / "notebooks" / "paper.js")], text=True,
                             check=True, input=json.dumps(cases), capture_output=True)
    for case, ours in zip(cases, json.loads(process.stdout), strict=True):
        review = read_critique(case["reply"], case["text"], case["offsets"])
        counts = [review.unmatched, review.ambiguous, review.conflicts]
        assert bool(ours["reason"]) == bool(review.reason), (case["reply"], review.reason)
        assert ours["delta"] == review.delta and ours["counts"] == counts, case
        delta, values = (torch.tensor([row], dtype=torch.float64)
                         for row in (review.delta, case["values"]))
        ones = torch.ones_like(delta)
        A, _ = gae(delta, values, ones, 0.9, 0.7)
        for name, row in (("A", A), ("white", whiten(A, ones))):
            close = torch.tensor([ours[name]], dtype=torch.float64)
            torch.testing.assert_close(close, row, atol=1e-5, rtol=0)
        seen.append([bool(ours["reason"]), *map(bool, counts)])
    assert min(map(sum, zip(*seen))) >= 4, seen


def test_a_browser_shows_what_python_makes_of_the_critique_on_the_page(tmp_path):
    """At 390 px, too: no part of the page is wider than the window."""
    if not (browser := shutil.which("chromium")):
        pytest.skip("chromium is not installed, so the page is not opened")
    path = tmp_path / "page.html"
    script = "document.title = document.documentElement.scrollWidth - innerWidth"
    path.write_text(PAGE.replace("</body>", f"<script>{script}</script></body>"))
    command = [browser, "--headless", "--no-sandbox", f"--user-data-dir={tmp_path}",
               "--dump-dom", "--window-size=390,900", path.as_uri()]
    html = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert int(re.search("<title>(-?[0-9]+)<", html)[1]) <= 0
    reply, = re.findall(r'(?s)<textarea id="critique"[^>]*>(.*?)</textarea>', PAGE)
    data = json.loads(re.search(r"const PAGE = (.*);\n", PAGE)[1])
    review = read_critique(unescape(reply), data["text"], data["offsets"])
    block = re.search('<div id="delta">(.*?)</div>', html)[1]
    shown = re.findall('<span title="(.*?)" .*?>(.*?)</span>', block)
    assert [float(value) for value, _ in shown] == review.delta
    assert "".join(unescape(text) for _, text in shown) == data["text"] + "▯"
