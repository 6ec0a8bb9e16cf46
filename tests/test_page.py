"""paper.html: made anew it is the file, every row of the map stands on both sides, and paper.js
counts as Python does, on 50 cases and in a browser, where node and chromium are there."""

import ast
import json
import random
import re
import shutil
import subprocess
import unicodedata
from collections import Counter
from functools import cache
from html import unescape
from html.parser import HTMLParser

import pytest
import torch
from conftest import ROOT
from test_paper import mapped

import toy
from annotate import parse_feedback, token_offsets
from notebooks.paper import build, extent, tags
from reward_model import judge
from text2grad import gae, whiten

PAPER = "https://arxiv.org/abs/2505.22338"


class Page(HTMLParser):
    """ids; links: [the ids around, where it leads, its words];
    marked lines by the id around."""

    def __init__(self, text: str):
        super().__init__()
        self.ids, self.links, self.marked, self.open = [], [], Counter(), []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        assert not {"src", "srcset", "action"} & given.keys(), given
        self.open.append((tag, given.get("id")))
        self.ids += [given["id"]] if "id" in given else []
        if tag == "a":
            self.links.append([{name for _, name in self.open}, given["href"], ""])
        if tag in ("link", "img", "iframe", "meta", "input", "br"):
            self.open.pop()

    def handle_endtag(self, tag):
        while self.open and self.open.pop()[0] != tag:         # th, tr and the like stay open
            pass

    def handle_data(self, data):
        if self.open and self.open[-1][0] == "a":
            self.links[-1][2] += data
        if self.open and self.open[-1][0] == "mark":
            self.marked[[name for _, name in self.open if name][-1]] += 1


@cache
def page() -> tuple[str, Page]:
    text = (ROOT / "paper.html").read_text("utf-8")
    return text, Page(text)


def test_the_page_is_made_of_the_sources_as_they_are():
    assert build() == page()[0], "run python notebooks/paper.py"


def test_every_row_of_the_map_stands_on_both_sides_and_no_link_is_dead():
    _, found = page()
    assert len(found.ids) == len(set(found.ids))
    places = [row[0] for row in mapped() if row[0].startswith(("Eq.", "Alg."))]
    assert len(places) >= 50
    there = {words: (around, to) for around, to, words in found.links}
    for place in places:
        _, to = there[place]
        back = there[f"↩ {place}"]
        assert to[1:] in back[0] and to == back[1] + "-code", place
    targets = {to for _, to, _ in found.links}
    assert targets - {f"#{name}" for name in found.ids} == {PAPER}


def test_the_page_loads_nothing_and_is_small():
    """Names of SVG's language are no addresses; a policy in the page forbids all else."""
    text, _ = page()
    assert {*re.findall(r"\w+://[^\s\"'<]*", text)} <= {PAPER, "http://www.w3.org/2000/svg"}
    assert not re.search(r"@import|url\(|\bfetch\b|XMLHttp|import\(", text)
    assert "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'" in text
    assert len(text.encode()) < 1e6 and not re.search(r"/(home|root|work|tmp|Users)/", text)
    for name in ("paper.py", "paper.js"):
        lines = (ROOT / "notebooks" / name).read_text("utf-8").splitlines()
        assert len(lines) <= 150 and max(map(len, lines)) <= 96


@pytest.mark.parametrize("slug, code", [
    ("alg-4-l-14", "rollouts.rewards = (rollouts.delta - beta * kl) * mask"),
    ("eq-3-5-total-reward", "rollouts.rewards = (rollouts.delta - beta * kl) * mask"),
    ("alg-4-l-11", "ids += generate(model, x, config.max_new_tokens"),    # its tag is below
    ("alg-4-l-23", "gain = torch.minimum("),                                        # above
    ("alg-2-l-10-11", "Add no opinion of your own."),                # an entry of a dictionary
    ("alg-4-l-19", "for _ in range(config.ppo_epochs):"),                 # the head of a block
    ("eq-3-6-a-b", "return changed(critic, lambda _, offsets, found:")])
def test_the_line_that_is_tagged_is_marked(slug, code):
    part = page()[0].split(f'id="{slug}-code"')[1].split('class="row"')[0]
    marked = "".join(re.findall(r"(?s)<mark>(.*?)</mark>", part))
    assert code in marked and marked.count("\n") < 10


def test_every_line_with_a_tag_of_its_own_is_marked():
    """Only rows whose code says its line in the docstring alone are shown whole."""
    _, found = page()
    rows = [name for name in found.ids if re.fullmatch(r"alg-4-.*-code", name)]
    bare = {name for name in rows if not found.marked[name]}
    assert bare <= {"alg-4-l-12-code", "alg-4-l-13-code"}


def test_tags_and_what_they_name():
    doc, source = "Algorithm 4.", "x = 1  # l.12–13\ny = 2  # l.25, 27\n# Alg. 2 l.15"
    assert tags(doc, source) == {(2, 15), (4, 12), (4, 13), (4, 25), (4, 27)}
    tree = ast.parse("def f():\n    # l.2\n    x = (1,\n         2)  # l.4\n    for y in x:\n"
                     "        y\n        y\n    for y in x:\n        y\n")
    lines = [[*extent(tree, *at)] for at in ((2, True), (4, False), (5, False), (8, False))]
    assert lines == [[3, 4], [3, 4], [5], [8, 9]]


# ── paper.js against Python

RUN = """
const page = require(process.argv[1]);
const answer = ({ reply, text, offsets, log_ratio, values, set }) => {
  let quotes = { good: [], poor: [] }, reason = "";
  try { quotes = page.parse(reply); } catch (error) { reason = error.message; }
  const grounding = page.ground(text, quotes);
  const found = page.rewards(text, offsets, grounding.spans);
  return { ...found, ...page.advantages(found.delta, log_ratio, values, set), reason,
    spans: grounding.spans.map((s) => [...text.slice(0, s.start)].length),
    unmatched: grounding.unmatched.length, ambiguous: grounding.ambiguous.length };
};
const cases = JSON.parse(require("fs").readFileSync(0, "utf8"));
console.log(JSON.stringify(cases.map(answer)));
"""
STRANGE = (" It is 5 \u201cs\u201d\t of  cafe\u0301, a 👩\u200d💻, 2 m² and a na\u00efve one, "
           "one by one.")
# In another form of Unicode than there, before a mark or a joiner, and what is not there.
OTHER = "caf\u00e9", "na\u0069\u0308ve", "cafe", "5 's'", "👩", "m2", "zebra"


def quote_of(rng, text: str) -> list[str]:
    """A phrase of the text, sometimes changed, cut or repeated."""
    words = [found.span() for found in re.finditer(r"\S+", text)]
    first = rng.randrange(len(words))
    last = min(len(words), first + rng.choice((1, 1, 1, 2, 3, 4))) - 1
    phrase = text[words[first][0] : words[last][1]]
    change = rng.choice(("", "", "form", "space", "cut", "strip", "half", "all"))
    if change == "form":
        form = rng.choice(("NFC", "NFD"))
        phrase = unicodedata.normalize(form, phrase).replace('"', "\u201d").replace("'", "’")
    before_mark = re.search(r'\w+[.?]?(?="|$)', text)[0]                # half of the token ."
    phrase = {"space": f" {phrase}  ".replace(" ", "  "), "cut": phrase[1:],
              "strip": phrase.strip('"'), "half": before_mark}.get(change, phrase)
    return [phrase] * (text.count(phrase) + rng.randrange(2) if change == "all" else 1)


def one_case(rng, tokenizer) -> dict:
    row, = toy.rows("eval", 1, rng.randrange(10**6), rng.choice((1, 1, 2)))
    strange = rng.randrange(2)
    draft = toy.write_draft(row["facts"], rng) + STRANGE * strange
    ids = [*tokenizer(draft).input_ids, tokenizer.eos_token_id]
    text, offsets = token_offsets(tokenizer, ids)
    quotes = [sum((quote_of(rng, text) for _ in range(rng.randrange(6))), []) for _ in "+-"]
    quotes[0] += rng.sample(OTHER, 2 * strange)
    both = quotes[0][:1] * (rng.random() < 0.3)
    spans = {"good_spans": quotes[0], "poor_spans": quotes[1] + both}
    said = json.dumps(spans, ensure_ascii=rng.random() < 0.5)
    reply = rng.choice(["Some {prose}.\n" + said] * 8 + [
        json.dumps({"textual_feedback": "Good.", "Good spans": quotes[0], "Poor spans": both}),
        f"Fenced:\n```json\n{said}\n```", said, "Cut off. " + said[:-2],
        'No list. {"good_spans": "a", "poor_spans": []}'])
    n = len(offsets)
    return {"reply": reply, "text": text, "offsets": offsets,
            "log_ratio": [rng.gauss(0, 0.5) for _ in range(n)],
            "values": [rng.gauss(0, 1) for _ in range(n)],
            "set": {"gamma": rng.random(), "lam": rng.random(), "beta": rng.random()}}


def test_fifty_cases_are_what_python_makes_of_them(toy_model):
    """Spans, δ, r, A, A whitened, and what is counted, to 1e-5."""
    if not (node := shutil.which("node")):
        pytest.skip("node is not installed: paper.js is not held against Python")
    rng, tokenizer, seen = random.Random(0), toy_model[1], Counter()
    cases = [one_case(rng, tokenizer) for _ in range(50)]
    done = subprocess.run([node, "-e", RUN, str(ROOT / "notebooks" / "paper.js")], check=True,
                          input=json.dumps(cases), capture_output=True, text=True)
    for case, ours in zip(cases, json.loads(done.stdout), strict=True):
        found = judge(case["reply"], case["text"], case["offsets"])
        assert bool(ours["reason"]) == bool(found.reason), (case["reply"], found.reason)
        assert ours["delta"] == found.delta, case
        counts = [found.unmatched, found.ambiguous, found.conflicts, found.half_inside]
        assert counts == [ours["unmatched"], ours["ambiguous"], len(ours["conflicts"]),
                          len(ours["half"])], case
        assert sorted(ours["spans"]) == [span.start for span in found.spans]
        beta, gamma, lam = (case["set"][name] for name in ("beta", "gamma", "lam"))
        delta, ratio, values = (torch.tensor([row], dtype=torch.float64) for row in
                                (found.delta, case["log_ratio"], case["values"]))
        r, ones = delta - beta * ratio, torch.ones_like(delta)
        A, _ = gae(r, values, ones, gamma, lam)
        for name, row in (("r", r), ("A", A), ("white", whiten(A, ones))):
            close = torch.tensor([ours[name]], dtype=torch.float64)
            torch.testing.assert_close(close, row, atol=1e-5, rtol=0)
        seen.update(dict(zip(("unmatched", "ambiguous", "in both", "half inside"), counts)))
        seen.update({"unreadable": bool(found.reason), "good": found.delta.count(1),
                     "poor": found.delta.count(-1)})
        quotes = [] if found.reason else parse_feedback(case["reply"]).good_spans
        seen["in normal form"] += any(case["text"][s.start : s.end] not in quotes
                                      for s in found.spans if s.label == 1)
        seen["k-th repeat"] += any(n > 1 for n in Counter(quotes).values())
    assert len(seen) == 9 and min(seen.values()) >= 4, seen


def test_a_browser_shows_what_python_makes_of_the_critique_on_the_page(tmp_path):
    """paper.html from disk, with no network: tokens, their δ and what gave nothing."""
    if not (browser := shutil.which("chromium")):
        pytest.skip("chromium is not installed: the page is not opened")
    flags = ("--headless", "--no-sandbox", f"--user-data-dir={tmp_path}", "--dump-dom")
    done = subprocess.run([browser, *flags, (ROOT / "paper.html").as_uri()], check=True,
                          capture_output=True, text=True, timeout=300)
    reply, data = (re.search(pattern, page()[0])[1] for pattern in
                   (r'(?s)<textarea[^>]*>(.*?)</textarea>', r"const PAGE = (.*);\n"))
    data = json.loads(data)
    found = judge(unescape(reply), data["text"], data["offsets"])
    shown = re.search(r'<div id="delta">(.*?)</div>', done.stdout)[1]
    shown = re.findall(r'<span title="(.*?)"[^>]*>(.*?)</span>', shown)
    assert [float(value) for value, _ in shown] == found.delta
    assert "".join(unescape(text) for _, text in shown) == data["text"] + "▯"
    said = re.search(r'id="said">(.*?)<', done.stdout)[1]
    assert said.startswith(f"{len(found.spans)} spans") and found.ambiguous == 1
    assert "ambiguous" in said and "half inside" in said and "unmatched" not in said
