"""report.py and measures/audit.py recomputed another way: an HTML parser, brute force, numpy."""

import random
import re
import sys
from collections import Counter
from html.parser import HTMLParser

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import annotate
from data import InputError, write_rows
from measures import audit as audit_script
from measures.audit import (audit, audit_text, feedback_page, gold_labels, problems,
                            span_accuracy, span_length, words, written_replies)
from report import colour_tokens, heatmap, html_table, split_text, table

often = settings(max_examples=100, deadline=None, derandomize=True)
HOSTILE = ["</script><img src=x onerror=\"document.title='owned'\">", "<!-- <script>",
           "a\"b'c&amp;<b>", "nul \0 here", "line\u2028para\u2029graph", "half \ud83d of a pair",
           "نص عربي", "👨‍👩‍👧 🏠 é\u0301", "</style></title><b>"]
texts = st.one_of(st.sampled_from(HOSTILE), st.text("<>/!-'\"\ud800🏠é\u0301\n\t x", max_size=20))


def row(response="The cat sat on the mat.", good=("cat",), poor=("mat",), **fields):
    """An annotated row whose quotes each occur once."""
    spans = [{"start": response.index(q), "end": response.index(q) + len(q), "label": label}
             for label, quotes in ((1, good), (-1, poor)) for q in quotes]
    return {"id": "r", "prompt": "p", "response": response, "critique": "c",
            "good_spans": list(good), "poor_spans": list(poor), "spans": spans, "unmatched": [],
            "ambiguous": 0, **fields}


FAILED = {"id": "f", "prompt": "p", "response": "y", "reason": "it was cut off", "reply": '{"go'}


class Page(HTMLParser):
    """What a browser sees: tags with their attributes and text, in reading order."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.open = [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.append([tag, dict(attributes), ""])
        self.open.append(self.tags[-1])

    def handle_endtag(self, tag):
        while self.open and self.open.pop()[0] != tag:
            pass

    def handle_data(self, data):
        for tag in self.open[-1:]:
            tag[2] += data

    def all(self, name, **wanted):
        return [(attributes, text) for tag, attributes, text in self.tags
                if tag == name and wanted.items() <= attributes.items()]


def written(tmp_path, rows, title="t", more=()):
    feedback_page(tmp_path / "page.html", title, rows, more)
    return Page((tmp_path / "page.html").read_text("utf-8"))


def assert_closed(text):
    """No script, nothing that asks a network, and a policy that forbids both."""
    page = Page(text)
    names = {tag for tag, *_ in page.tags}
    assert not names & {"script", "img", "link", "iframe", "object", "form", "base"}
    for _, attributes, _ in page.tags:
        assert not {"src", "action", "srcset", "data"} & attributes.keys()
        assert not [name for name in attributes if name.startswith("on")]
        assert attributes.get("href", "#").startswith("#")
    (meta, _), = page.all("meta", **{"http-equiv": "Content-Security-Policy"})
    assert meta["content"].startswith("\ndefault-src 'none'; style-src 'unsafe-inline'")
    assert "script-src" not in meta["content"]
    style = "".join(text for _, text in page.all("style"))
    assert "color-scheme: light dark" in style and "@media print" in style
    assert not re.search(r"@import|url\(", text)


# ── The terminal

def test_a_text_is_split_and_tokens_are_marked_by_their_sign_in_runs_and_without_leading_space(monkeypatch):
    assert split_text("a🏠b", [(0, 1), (1, 2), (1, 2), (2, 3), (3, 3)]) == ["a", "🏠", "", "b", ""]
    tokens, delta = ["The", " big", " cat", " ", "flew", " \n"], [0, 1, .5, -1, -1, 1]
    assert colour_tokens(tokens, delta, False) == "The [+big cat+] [-flew-] \n"
    coloured = "The \033[32mbig cat\033[0m \033[31mflew\033[0m \n"
    assert colour_tokens(tokens, delta, True) == coloured
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert colour_tokens(tokens, delta) == coloured
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\033" not in colour_tokens(tokens, delta)


def test_tables_are_aligned_and_absent_figures_are_dashes():
    lines = table(["name", "x"], [["a", 1.0], ["long one", None], ["b", -0.0001]], 2).split("\n")
    assert lines == ["name         x", "──────────────", "a         1.00", "long one     –",
                     "b         0.00"]
    cells = Page(html_table(["a", "<b>"], [["x&y", None], ["z", 0.5]]))
    assert [text for _, text in cells.all("td")] == ["x&y", "–", "z", "0.50"]
    assert [text for _, text in cells.all("th")] == ["a", "<b>"]


# ── Heatmaps

@often
@given(st.lists(st.tuples(texts, st.floats(-3, 3)), max_size=8))
def test_a_heatmap_shows_every_token_with_its_value_and_no_other_markup(pairs):
    tokens, values = [token for token, _ in pairs], [value for _, value in pairs]
    found = Page(heatmap(tokens, values))
    assert len(found.tags) == 1 + len(tokens)
    for token, value, (attributes, text) in zip(tokens, values, found.all("span"), strict=True):
        shown = text.replace("↵\n", "\n").replace("⇥\t", "\t").replace("\ufffd", "\0")
        assert shown == (token or "▯")
        assert float(attributes["title"]) == pytest.approx(value, rel=1e-3)


def test_colours_are_symmetric_deepest_at_the_limit_and_told_apart_by_lines():
    found = Page(heatmap([*"abcdef", "", "g"], [-4, -2, -1, 0, 1, 2, 1, float("nan")], limit=2))
    style = r"background:(#\w{6})(\w\w);text-decoration:(.*) #\w{6}(\w\w)"
    colours, depth, lines, ink = zip(*(re.match(style, attributes["style"]).groups()
                                       for attributes, _ in found.all("span")))
    depth, ink = [int(value, 16) for value in depth], [int(value, 16) for value in ink]
    assert depth[0] == depth[1] > depth[2] > depth[3] == depth[7] == ink[3] == 0
    assert depth[1:4] == depth[5:2:-1] and ink[1] > ink[2] > 0
    assert set(zip(colours[:3], lines[:3])).isdisjoint(zip(colours[4:7], lines[4:7]))
    with pytest.raises(ValueError):
        heatmap(["a"], [])


# ── The page of annotated responses

@pytest.mark.parametrize("text", HOSTILE)
def test_no_text_of_a_row_becomes_markup(tmp_path, text):
    rows = [row(text + "cat mat", prompt=text * 30, critique=text, id=text, annotator=text,
                unmatched=[text]), {**FAILED, "reason": text, "reply": text}]
    plain = written(tmp_path, [row(prompt="x" * 900, unmatched=["x"]), FAILED],
                    more=[("t", ["h"], [["c"]])])
    found = written(tmp_path, rows, title=text, more=[(text, [text], [[text]])])
    assert Counter(tag for tag, *_ in found.tags) == Counter(tag for tag, *_ in plain.tags)
    assert_closed((tmp_path / "page.html").read_text("utf-8"))
    shown = text.replace("\ud83d", "\ufffd").replace("\0", "\ufffd")
    assert found.all("title")[0][1].replace("\0", "\ufffd") == shown


def test_the_very_characters_of_each_span_are_marked(tmp_path):  # Figure 2
    """Offsets count code points: an emoji is one, a letter and its accent are two."""
    hostile = row("a 🏠 cat 👨‍👩‍👧 </b><script> e\u0301 mat", good=["🏠 cat", "👧", "\u0301"],
                  poor=["</b><script>", "mat"])
    rows = [hostile, row("The cat sat", good=["The cat"], poor=["cat sat"]),
            row("نص عربي", good=["عربي"], poor=[])]
    marks = [(attributes["class"], text) for attributes, text in
             written(tmp_path, rows).all("mark")][3:]
    assert marks == [                                    # the row with a problem is the first
        ("good", "The "), ("both", "cat"), ("poor", " sat"),
        ("good", "🏠 cat"), ("good", "👧"), ("poor", "</b><script>"), ("good", "\u0301"),
        ("poor", "mat"), ("good", "عربي")]


def test_rows_with_problems_come_first_with_what_is_wrong_and_the_page_has_an_end(
        tmp_path, monkeypatch):
    monkeypatch.setattr(audit_script, "MOST_ROWS", 5)
    rows = [row(id=f"fine {i}") for i in range(4)] + [
        row(id="b", unmatched=["<i>gone</i>", "x"]), row(id="c", unmatched=["y"], ambiguous=2),
        row(id="d", good=["cat"], poor=["The cat"]), {**FAILED, "id": "e"}]
    found = written(tmp_path, rows)
    assert [text for _, text in found.all("b")] == ["b", "c", "d", "e", "fine 0"]
    assert [text for _, text in found.all("span", **{"class": "badge"})] == [
        "2 unmatched", "1 unmatched", "2 ambiguous", "1 conflicting", "1 failed"]
    blocks = [text for _, text in found.all("div")]
    assert {"<i>gone</i>\nx", FAILED["reason"], FAILED["reply"]} <= set(blocks)
    said = found.all("p")[0][1]
    assert said == ("8 responses; 2 unmatched; 1 ambiguous; 1 conflicting; 1 failed; "
                    "3 left out here; those with problems come first.")


# ── Labelled tokens and problems

def spans_of(text):
    place = st.integers(0, len(text))
    span = st.builds(lambda a, b, label: (min(a, b), max(a, b), label), place, place,
                     st.sampled_from((1, -1)))
    return st.tuples(st.just(text), st.lists(span, max_size=6))


annotated = st.text("ab .\n🏠", max_size=25).flatmap(spans_of)


def cut(text, rng):
    """Random tokens that cover the text, with the white space that tokenizers leave at ends."""
    cuts = sorted({0, len(text), *(rng.randrange(len(text) + 1) for _ in range(6))})
    return list(zip(cuts, cuts[1:]))


@often
@given(annotated)
def test_conflicting_words_are_those_with_every_character_in_spans_of_both_signs(given_):
    """Counted word by word; a span that the white space around a word reaches into counts not."""
    text, found = given_
    spans = [{"start": start, "end": end, "label": label} for start, end, label in found]
    signs = [{label for a, b, label in found if a <= start and end <= b}
             for start, end in words(text)]
    assert problems({"response": text, "spans": spans}).get("conflicting", 0) == sum(
        len(labels) == 2 for labels in signs)


@pytest.mark.parametrize("bad", [
    {"response": "y"}, {"spans": []}, {"response": 1, "spans": []}, {"response": "y", "spans": 0},
    *({"response": "yes", "spans": [span]} for span in (
        [0, 1, 1], {"start": 0, "end": 1}, {"start": 0, "end": 4, "label": 1},
        {"start": 2, "end": 1, "label": 1}, {"start": -1, "end": 1, "label": 1},
        {"start": 0, "end": 1, "label": 0}, {"start": 0, "end": "1", "label": 1}))])
def test_a_row_that_is_not_annotated_is_refused_by_its_name(bad, tmp_path):
    with pytest.raises(InputError, match="row 'r7'"):
        written(tmp_path, [row(), {"id": "r7", **bad}])


# ── The audit

def cells(rows, name, **arguments):
    """{header: value} of each line of one table, by the start of its title."""
    (_, header, lines), = [one for one in audit(rows, **arguments) if one[0].startswith(name)]
    return [dict(zip(header, line)) for line in lines]


def values(line, skip=2):
    return list(line.values())[skip:]


@often
@given(annotated, annotated, st.randoms(use_true_random=False))
def test_length_and_accuracy_of_a_span_are_counted_character_by_character(given_, other, rng):
    text, found = given_
    tokens = cut(text, rng)
    gold = [(a, b, label) for a, b, label in other[1] if b <= len(text)]
    labels = gold_labels(text, [{"start": a, "end": b, "label": sign} for a, b, sign in gold])
    for start, end, label in found:
        span = {"start": start, "end": end, "label": label}
        assert span_length(text, words(text), span) == len(text[start:end].split())
        inside = [i for i in range(start, end) if text[start:i + 1].strip() and text[i:end].strip()]
        touched = [(a, b) for a, b in tokens if any(a <= i < b for i in inside)]
        assert span_length(text, tokens, span) == len(touched)
        marks = [{sign for a, b, sign in gold if a <= i < b}
                 for i in range(start, end) if not text[i].isspace()]
        share = sum(mark == {label} for mark in marks) / len(marks) if marks else None
        assert span_accuracy(text, span, labels) == share


def test_table_15_counts_quotes_that_are_not_in_the_response():  # Table 15
    rows = [row(task="t", annotator="a", unmatched=["dog"], good_spans=["cat", "dog"]),   # kept
            row(task="t", annotator="a", unmatched=["dog", "dog"], ambiguous=2),       # dropped
            row(task="t", annotator="b", good=["The cat"], poor=["cat", "mat"]), FAILED]
    first, second = cells(rows, "Table 15")
    assert values(first, 0) == ["t, a", 2, 3 + 4, 3, pytest.approx(100 * 3 / 7), 2, 0, 2]
    assert values(second, 0) == ["t, b", 1, 3, 0, 0.0, 0, 1, 1]
    assert audit(rows)[0][0].endswith("1 failed replies are left out")


def test_labelled_shares_leave_out_words_of_both_signs():
    rows = [row("a b c d e f g h", ["a b", "c"], ["c", "h"]), row("x y", [], ["y"])]
    found, = cells(rows, "§3.3")
    assert values(found, 1) == [10, 20.0, 20.0, 40.0, 10.0]


def test_table_18_has_the_quartiles_of_good_and_of_poor_spans():  # Table 18
    rng, text = random.Random(0), " ".join(f"w{i}" for i in range(100, 200))
    lengths, spans = {1: [], -1: []}, []
    for _ in range(30):
        a, n, label = rng.randrange(60), rng.randrange(1, 30), rng.choice((1, -1))
        spans.append({"start": 5 * a, "end": 5 * (a + n) - 1, "label": label})
        lengths[label].append(n)
    found = cells([row(text, (), ()) | {"spans": spans}], "Table 18")
    for line, label in zip(found, (1, -1)):
        cuts = np.quantile(lengths[label], [.25, .5, .75])
        assert values(line) == [len(lengths[label]), *cuts, max(lengths[label])]


def test_table_19_is_the_mean_accuracy_of_the_spans_of_each_length():  # Table 19
    text = "a b c d e f g h i j k l m n o p"
    quotes = ["a", "b c", "d e f", "g h i j", "k l m n o"]     # with "else": Q = 1.25, 2.5, 3.75
    gold = [{"start": 0, "end": len("a b c d e f g h"), "label": 1},
            {"start": text.index("b"), "end": 3, "label": -1}]
    rows = [row(text, quotes, ["p"]), row("elsewhere", ["else"], [], id="no gold")]
    good, poor = cells(rows, "Table 19", gold=[{"id": "r", "spans": gold}])
    assert values(good) == [5, 100.0, 50.0, 100.0, 25.0, pytest.approx(60.0)]
    assert values(poor) == [1, 0.0, None, None, None, 0.0]
    assert cells([rows[0] | {"gold_spans": gold}], "Table 19")[1] == poor
    assert values(cells(rows, "Table 19")[0]) == [0] + [None] * 5


def test_table_12_counts_both_replies_in_one_unit():  # Table 12
    rows = [row("cat mat", usage={"prompt_tokens": 9, "completion_tokens": 40}),
            row("cat mat", critique="It is it.")]
    found = cells(rows, "Table 12")
    spans, _ = written_replies(rows[1])
    assert annotate.parse_feedback(spans) == annotate.Feedback("It is it.", ["cat"], ["mat"])
    replies = ['{"good_spans": ["cat"], "poor_spans": ["mat"]}',
               '{"labels": [{"word": "cat", "label": "good"}, {"word": "mat", "label": "poor"}]}']
    n, dense = ([len(re.findall(r"\w+|[^\w\s]", f"{critique} {reply}"))
                 for critique in ("c", "It is it.")] for reply in replies)
    assert values(found[0]) == [2, sum(n) / 2, sum(n), None]
    assert values(found[1]) == [2, sum(dense) / 2, sum(dense), sum(dense) / sum(n)]
    assert values(found[2]) == [1, 40.0, 40, None]


def test_table_14_adds_up_what_the_server_counted():  # Table 14
    rows = [row(usage={"prompt_tokens": 100, "completion_tokens": 20}, usd=.001),
            row(usage=None, usd=None), row(),
            row(usage={"prompt_tokens": 300, "completion_tokens": 40}, usd=.004)]
    assert [values(line) for line in cells(rows, "Table 14")] == [
        [2, 200.0, 400], [2, 30.0, 60], [2, "0.002500", "0.005000"]]


def test_a_tokenizer_makes_every_table_count_tokens():
    characters = lambda text: [(i, i + 1) for i in range(len(text))]
    found, = cells([row("cat mat")], "§3.3", count=characters)
    assert values(found, 1)[:3] == [7, pytest.approx(300 / 7), pytest.approx(300 / 7)]
    assert cells([row("cat mat")], "Table 18", count=characters)[0]["Q2"] == 3.0
    assert cells([row("cat mat")], "Table 12", count=characters)[0]["total"] == len(
        'c\n{"good_spans": ["cat"], "poor_spans": ["mat"]}')


def test_what_the_rows_do_not_hold_is_a_dash_and_not_zero():
    bare = {"response": "a b", "spans": [{"start": 0, "end": 1, "label": 1}]}
    found, = cells([bare], "Table 15")
    assert values(found, 0) == ["not named", 1, None, None, None, None, 0, 0]
    for name in ("Table 12", "Table 14"):
        assert all(line["total"] is None for line in cells([bare], name))
    assert audit_text(audit([bare])).splitlines()[3].split() == "not named 1 – – – – 0 0".split()


@pytest.mark.parametrize("rows, gold, message", [
    ([FAILED], None, "no row with feedback among 1"),
    ([row()], [{"id": "other", "spans": []}], "no gold row has the id"),
    ([row()], [{"spans": []}], "an id of its own"),
    ([row()], [{"id": "r", "spans": []}] * 2, "'r' twice"),
    ([row()], [row("Another text: cat, mat")], "another response"),
    ([row()], [{"id": "r", "spans": [{"start": 0, "end": 99, "label": 1}]}], "row 'r'"),
    ([row()], [{"id": "r"}], "'r' has no list 'spans'")])
def test_an_audit_of_nothing_or_against_other_gold_says_so(rows, gold, message):
    with pytest.raises(ValueError, match=message):
        audit(rows, gold=gold)


def test_the_script_prints_the_tables_and_writes_the_page(tmp_path, monkeypatch, capsys, shared):
    file, gold, html = tmp_path / "f.jsonl", tmp_path / "g.jsonl", tmp_path / "p.html"
    write_rows(file, [row(), FAILED])
    write_rows(gold, [{"id": "r", "spans": row()["spans"]}])
    tokenizer = shared / "models" / "stories260K"
    monkeypatch.setattr(sys, "argv", ["audit", *map(str, (
        file, "--gold", gold, "--tokenizer", tokenizer, "--html", html))])
    audit_script.main()
    printed = capsys.readouterr().out
    assert "Table 18: tokens per span" in printed and f"look at {html}" in printed
    assert len(Page(html.read_text()).all("table")) == 6 and "100.00" in printed
    monkeypatch.setattr(sys, "argv", ["audit", str(file), "--html", str(file)])
    with pytest.raises(audit_script.InputError, match="would be overwritten"):
        audit_script.main()
