"""report.py and audit.py recomputed another way: an HTML parser, a browser where there is one, brute force, numpy."""

import json
import random
import re
import shutil
import subprocess
from collections import Counter
from html.parser import HTMLParser

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import annotate
import report
from measures.audit import audit, audit_text, gold_labels, quartiles, span_accuracy, span_length, written_replies
from report import feedback_page, html_table, labelled, page, problems, words

often = settings(max_examples=150, deadline=None, derandomize=True)
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
HOSTILE = ["</script><img src=x onerror=\"document.title='owned'\">", "<!-- <script>", "a\"b'c&amp;<b>", "nul \0 here",
           "line\u2028para\u2029graph", "half \ud83d of a pair", "نص عربي", "👨‍👩‍👧 🏠 é\u0301", "]]> -->", "\\u003c \\"]


def row(response="The cat sat on the mat.", good=("cat",), poor=("mat",), **fields):
    """An annotated row whose quotes each occur once."""
    spans = [{"start": response.index(quote), "end": response.index(quote) + len(quote), "label": label}
             for label, quotes in ((1, good), (-1, poor)) for quote in quotes]
    return {"id": "r", "prompt": "p", "response": response, "critique": "c", "good_spans": list(good),
            "poor_spans": list(poor), "spans": spans, "unmatched": [], "ambiguous": 0, **fields}


FAILED = {"id": "f", "prompt": "p", "response": "y", "reason": "it was cut off", "reply": '{"good_spans": ["'}
texts = st.one_of(st.sampled_from(HOSTILE), st.text(max_size=30), st.text("<>/!-script\"'\ud800\udfff🏠 ", max_size=30))


class Page(HTMLParser):
    """What a browser sees: tags with their attributes and text, scripts as data."""

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


def written(tmp_path, rows, title="t", more=None):
    path = tmp_path / "page.html"
    feedback_page(path, title, rows, more)
    return Page(path.read_text("utf-8"))


# ── The page ────────────────────────────────────────────────────────────────────────────────────────────

@pytest.mark.parametrize("text", HOSTILE)
def test_no_text_of_a_row_leaves_its_json_element(tmp_path, text):
    rows = [row(text + "cat mat", prompt=text, critique=text, id=text, annotator=text, unmatched=[text]),
            {**FAILED, "reason": text, "reply": text}]
    page = written(tmp_path, rows, title=text, more=[(text, [text], [[text]])])
    (_, data), = page.all("script", type="application/json")
    assert json.loads(data)["rows"] == rows and data.isascii()
    tags = Counter(tag for tag, *_ in page.tags)
    assert tags["script"] == 2 and not tags["img"] and tags["b"] == 6                 # a count in each filter
    title = text.encode("utf-8", "replace").decode() if "\ud83d" in text else text
    assert page.all("title")[0][1] in (title, text.replace("\ud83d", "\ufffd"))


@often
@given(st.lists(st.builds(lambda a, b, c: row(a + "cat mat", prompt=b, critique=c), texts, texts, texts), max_size=4))
def test_every_row_comes_back_from_the_page(tmp_path_factory, rows):
    (_, data), = written(tmp_path_factory.mktemp("p"), rows).all("script", type="application/json")
    assert json.loads(data)["rows"] == json.loads(json.dumps(rows))                   # which joins surrogate pairs


def test_the_page_asks_nothing_of_the_network_and_makes_no_html_of_rows(tmp_path):
    parsed = written(tmp_path, [row()])
    assert not [a for _, attributes, _ in parsed.tags for a in ("src", "action", "data") if a in attributes]
    assert all(attributes["href"].startswith("#") for attributes, _ in parsed.all("a"))
    assert "default-src 'none'" in parsed.all("meta", **{"http-equiv": "Content-Security-Policy"})[0][0]["content"]
    text = (tmp_path / "page.html").read_text()
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|https?:|@import|url\(", text)
    assert parsed.all("noscript")


def test_filters_show_how_many_rows_they_keep(tmp_path):
    written(tmp_path, [row(), row(unmatched=["x", "y"]), row(unmatched=["x"], ambiguous=2),
                       row(good=["cat"], poor=["The cat"]), FAILED])
    assert dict(re.findall(r'<a href="#(\w+)">[\w ]+<b>(\d+)</b>', (tmp_path / "page.html").read_text())) == {
        "all": "5", "problems": "4", "unmatched": "2", "ambiguous": "1", "conflicting": "1", "failed": "1"}


def test_a_page_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    written(tmp_path, [row()])
    before = (tmp_path / "page.html").read_bytes()
    with pytest.raises(ValueError, match="'bad'"):
        written(tmp_path, [row(), {"id": "bad", "response": "no spans"}])
    monkeypatch.setattr(report.os, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk")))
    with pytest.raises(OSError, match="disk"):
        written(tmp_path, [row(), row()])
    assert [p.name for p in tmp_path.iterdir()] == ["page.html"] and (tmp_path / "page.html").read_bytes() == before


def test_tables_above_the_cards_are_escaped_and_absent_figures_are_dashes(tmp_path):
    parsed = written(tmp_path, [row()], more=[("T <1>", ["a", "<b>"], [["x&y", None], ["z", 0.5]])])
    assert parsed.all("h2")[0][1] == "T <1>" and [text for _, text in parsed.all("th")] == ["a", "<b>"]
    assert [text for _, text in parsed.all("td")] == ["x&y", "–", "z", "0.50"]
    assert "0.500" in html_table(["a"], [[0.5]], digits=3)


def test_a_script_that_would_end_early_is_refused():
    with pytest.raises(AssertionError):
        page("t", "", "'</Script>'")


# ── A browser, where one is installed ───────────────────────────────────────────────────────────────────

def browsed(path, address=""):
    """The document after its script has run."""
    if BROWSER is None:
        pytest.skip("no Chromium is installed: the page's script cannot be run")
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={path.parent / 'profile'}",
               "--virtual-time-budget=3000", "--dump-dom", f"file://{path}{address}"]
    return Page(subprocess.run(command, capture_output=True, check=True, timeout=60).stdout.decode())


def test_a_browser_marks_the_very_characters_of_each_span(tmp_path):  # Figure 2
    """Offsets count code points, JavaScript counts UTF-16 units."""
    hostile = row("a 🏠 cat 👨‍👩‍👧 </b><script>document.title='owned'</script> mat", good=["🏠 cat", "👧"],
                  poor=["</b><script>", "mat"])
    both = row("The cat sat", good=["The cat"], poor=["cat sat"])
    written(tmp_path, [hostile, both, row("نص عربي", good=["عربي"], poor=[])], title="mine")
    parsed = browsed(tmp_path / "page.html")
    assert parsed.all("title")[0][1] == "mine"
    marks = [(attributes["class"], text, attributes.get("title", "")) for attributes, text in parsed.all("mark")][3:]
    assert [mark[:2] for mark in marks] == [
        ("good", "🏠 cat"), ("good", "👧"), ("poor", "</b><script>"), ("poor", "mat"),
        ("good", "The "), ("both", "cat"), ("poor", " sat"), ("good", "عربي")]
    assert marks[0][2] == "+ good: “🏠 cat” (characters 2–7)"
    assert marks[5][2] == "+ good: “The cat” (characters 0–7)\n− poor: “cat sat” (characters 4–11)"


@pytest.mark.parametrize("address, shown", [
    ("", "abcde"), ("#problems", "bcde"), ("#unmatched", "bc"), ("#ambiguous", "c"), ("#conflicting", "d"),
    ("#failed", "e"), ("#nonsense", "abcde")])
def test_an_address_opens_the_page_filtered(tmp_path, address, shown):
    rows = [row(id="a"), row(id="b", unmatched=["<i>gone</i>"]), row(id="c", unmatched=["x"], ambiguous=1),
            row(id="d", good=["cat"], poor=["The cat"]), {**FAILED, "id": "e"}]
    written(tmp_path, rows)
    parsed = browsed(tmp_path / "page.html", address)
    assert [text for _, text in parsed.all("b", **{"class": ""})] == list(shown)
    texts = [text for tag in ("li", "div") for _, text in parsed.all(tag)]
    assert ("<i>gone</i>" in texts) == ("b" in shown) and (FAILED["reply"] in texts) == ("e" in shown)


def test_a_page_shows_fifty_rows_at_a_time(tmp_path):
    written(tmp_path, [row(id=str(i)) for i in range(120)])
    parsed = browsed(tmp_path / "page.html")
    assert len(parsed.all("article")) == 50 and "1–50 of 120" in [text for _, text in parsed.all("span")]


# ── Labelled tokens and problems ────────────────────────────────────────────────────────────────────────

def spans_of(text):
    place = st.integers(0, len(text))
    return st.lists(st.builds(lambda a, b, label: (min(a, b), max(a, b), label), place, place,
                              st.sampled_from((1, -1))), max_size=6)


annotated = st.text("ab .\n🏠", max_size=25).flatmap(lambda text: st.tuples(st.just(text), spans_of(text)))


def cut(text, rng):
    """Random tokens that cover the text, with the white space that tokenizers leave at their ends."""
    cuts = sorted({0, len(text), *(rng.randrange(len(text) + 1) for _ in range(6))})
    return list(zip(cuts, cuts[1:]))


@often
@given(annotated, st.randoms(use_true_random=False))
def test_labelled_tokens_are_those_that_token_rewards_rewards(given_, rng):
    """annotate.py finds them span by span in another way."""
    text, found = given_
    spans = [annotate.Span(*span) for span in found]
    dicts = [{"start": start, "end": end, "label": label} for start, end, label in found]
    for tokens in (words(text), cut(text, rng)):
        good, poor = labelled(text, tokens, dicts)
        delta = annotate.token_rewards(text, tokens, spans)
        assert [(i in good) - (i in poor) for i in range(len(tokens))] == delta
        assert len(good & poor) == annotate.conflicting_tokens(text, tokens, spans)
    conflicting = annotate.conflicting_tokens(text, words(text), spans)
    assert problems({"response": text, "spans": dicts}) == ({"conflicting": conflicting} if conflicting else {})


def test_problems_are_counted_and_absent_fields_are_none():
    assert problems(row(unmatched=["a", "b"], ambiguous=3)) == {"unmatched": 2, "ambiguous": 3}
    assert problems({"response": "y", "spans": []}) == {} and problems(FAILED) == {"failed": 1}


@pytest.mark.parametrize("bad", [
    {"response": "y"}, {"spans": []}, {"response": 1, "spans": []}, {"response": "y", "spans": None},
    *({"response": "yes", "spans": [span]} for span in (
        [0, 1, 1], {"start": 0, "end": 1}, {"start": 0, "end": 4, "label": 1}, {"start": 2, "end": 1, "label": 1},
        {"start": -1, "end": 1, "label": 1}, {"start": 0, "end": 1, "label": 0},
        {"start": 0, "end": "1", "label": 1}))])
def test_a_row_that_is_not_annotated_is_refused_by_its_name(bad):
    with pytest.raises(ValueError, match="row 'r7'"):
        problems({"id": "r7", **bad})


# ── The audit ───────────────────────────────────────────────────────────────────────────────────────────

def cells(rows, table, **arguments):
    """{first cells: the others} of one table, by the start of its title."""
    (_, header, lines), = [found for found in audit(rows, **arguments) if found[0].startswith(table)]
    return [dict(zip(header, line)) for line in lines]


@given(st.lists(st.integers(0, 50), min_size=1, max_size=30))
def test_quartiles_are_numpys(lengths):
    assert np.allclose(quartiles(lengths), np.quantile(lengths, [.25, .5, .75]))


@often
@given(annotated, st.randoms(use_true_random=False))
def test_the_length_of_a_span_is_its_words_or_the_tokens_it_shares_characters_with(given_, rng):
    text, found = given_
    tokens = cut(text, rng)
    for start, end, _ in found:
        span = {"start": start, "end": end}
        assert span_length(text, words(text), span) == len(text[start:end].split())
        inside = [i for i in range(start, end) if text[start:i + 1].strip() and text[i:end].strip()]
        assert span_length(text, tokens, span) == sum(any(a <= i < b for i in inside) for a, b in tokens)


@often
@given(annotated, annotated)
def test_accuracy_of_a_span_is_counted_character_by_character(given_, other):
    text, found = given_
    gold = [(a, b, label) for a, b, label in other[1] if b <= len(text)]
    labels = gold_labels(text, [{"start": a, "end": b, "label": label} for a, b, label in gold])
    for start, end, label in found:
        marks = [{sign for a, b, sign in gold if a <= i < b} for i in range(start, end) if not text[i].isspace()]
        expected = sum(mark == {label} for mark in marks) / len(marks) if marks else None
        assert span_accuracy(text, {"start": start, "end": end, "label": label}, labels) == expected


def test_table_15_counts_quotes_that_are_not_in_the_response_for_each_task_and_annotator():  # Table 15
    rows = [row(task="t", annotator="a", unmatched=["dog"], good_spans=["cat", "dog"]),       # kept in the lists
            row(task="t", annotator="a", unmatched=["dog", "dog"], ambiguous=2),              # dropped from them
            row(task="t", annotator="b", good=["The cat"], poor=["cat", "mat"]), FAILED]
    first, second = cells(rows, "Table 15")
    assert list(first.values()) == ["t, a", 2, 3 + 4, 3, pytest.approx(100 * 3 / 7), 2, 0, 2]
    assert list(second.values()) == ["t, b", 1, 3, 0, 0.0, 0, 1, 1]
    assert audit(rows)[0][0].endswith("1 failed replies are left out")


def test_labelled_shares_leave_out_words_of_both_signs():
    rows = [row("a b c d e f g h", good=["a b", "c"], poor=["c", "h"]), row("x y", good=[], poor=["y"])]
    found, = cells(rows, "§3.3")
    assert list(found.values())[1:] == [10, 20.0, 20.0, 40.0, 10.0]


def test_table_18_has_the_quartiles_of_good_and_of_poor_spans():  # Table 18
    rng, text = random.Random(0), " ".join(f"w{i}" for i in range(100, 200))
    lengths = {1: [], -1: []}
    spans = []
    for _ in range(30):
        a, n, label = rng.randrange(60), rng.randrange(1, 30), rng.choice((1, -1))
        spans.append({"start": 5 * a, "end": 5 * (a + n) - 1, "label": label})
        lengths[label].append(n)
    good, poor = cells([row(text, (), ()) | {"spans": spans}], "Table 18")
    for found, label in ((good, 1), (poor, -1)):
        values = lengths[label]
        assert list(found.values())[2:] == [len(values), *np.quantile(values, [.25, .5, .75]), max(values)]


def test_table_19_is_the_mean_accuracy_of_the_spans_of_each_length():  # Table 19
    text = "a b c d e f g h i j k l m n o p"
    quotes = ["a", "b c", "d e f", "g h i j", "k l m n o"]      # with "else": Q1, Q2, Q3 = 1.25, 2.5, 3.75 words
    gold = [{"start": 0, "end": len("a b c d e f g h"), "label": 1}, {"start": text.index("b"), "end": 3, "label": -1}]
    rows = [row(text, quotes, ["p"]), row("elsewhere", ["else"], [], id="no gold")]
    good, poor = cells(rows, "Table 19", gold=[{"id": "r", "spans": gold}])
    assert list(good.values())[2:] == [5, 100.0, 50.0, 100.0, 25.0, pytest.approx(60.0)]
    assert list(poor.values())[2:] == [1, 0.0, None, None, None, 0.0]
    assert cells([rows[0] | {"gold_spans": gold}], "Table 19")[1] == poor
    assert list(cells(rows, "Table 19")[0].values())[2:] == [0] + [None] * 5


def test_table_12_counts_both_replies_in_one_unit():  # Table 12
    rows = [row("cat mat", usage={"prompt_tokens": 9, "completion_tokens": 40}), row("cat mat", critique="It is it.")]
    spans, dense, server = cells(rows, "Table 12")
    marks = lambda text: re.findall(r"\w+|[^\w\s]", text)
    as_written = [len(marks(c + '{"good_spans": ["cat"], "poor_spans": ["mat"]}')) for c in ("c ", "It is it. ")]
    labels = '{"labels": [{"word": "cat", "label": "good"}, {"word": "mat", "label": "poor"}]}'
    would_be = [len(marks(c + labels)) for c in ("c ", "It is it. ")]
    assert list(spans.values())[2:] == [2, sum(as_written) / 2, sum(as_written), None]
    assert list(dense.values())[2:] == [2, sum(would_be) / 2, sum(would_be), sum(would_be) / sum(as_written)]
    assert list(server.values())[2:] == [1, 40.0, 40, None]


def test_the_compared_replies_are_such_as_annotate_reads():
    given_ = row("The cat sat on a mat", good=["The cat"], poor=["a mat"], critique="It is so.")
    spans, dense = written_replies(given_)
    assert annotate.parse_feedback(spans) == annotate.Feedback("It is so.", ["The cat"], ["a mat"])
    critique, found = annotate.parse_labels(dense, given_["response"])
    assert critique == "It is so." and [vars(span) for span in found] == given_["spans"]


def test_table_14_adds_up_what_the_server_counted():  # Table 14
    rows = [row(usage={"prompt_tokens": 100, "completion_tokens": 20}, usd=.001), row(usage=None, usd=None), row(),
            row(usage={"prompt_tokens": 300, "completion_tokens": 40}, usd=.004)]
    assert [list(line.values())[2:] for line in cells(rows, "Table 14")] == [
        [2, 200.0, 400], [2, 30.0, 60], [2, "0.002500", "0.005000"]]


def test_a_tokenizer_makes_every_table_count_tokens():
    characters = lambda text: [(i, i + 1) for i in range(len(text))]
    found, = cells([row("cat mat")], "§3.3", count=characters)
    assert list(found.values())[1:4] == [7, pytest.approx(300 / 7), pytest.approx(300 / 7)] and "tokens" in found
    assert cells([row("cat mat")], "Table 18", count=characters)[0]["Q2"] == 3.0
    assert cells([row("cat mat")], "Table 12", count=characters)[0]["total"] == len(
        'c\n{"good_spans": ["cat"], "poor_spans": ["mat"]}')


def test_what_the_rows_do_not_hold_is_a_dash_and_not_zero():
    bare = {"response": "a b", "spans": [{"start": 0, "end": 1, "label": 1}]}
    found, = cells([bare], "Table 15")
    assert list(found.values()) == ["not named", 1, None, None, None, None, 0, 0]
    assert all(line[key] is None for table in ("Table 12", "Table 14") for line in cells([bare], table) for key in
               ("total", "× spans") if key in line)
    assert audit_text(audit([bare])).splitlines()[3].split() == ["not", "named", "1", "–", "–", "–", "–", "0", "0"]


@pytest.mark.parametrize("rows, gold, message", [
    ([], None, "no row with feedback among 0"), ([FAILED], None, "no row with feedback among 1"),
    ([{"id": "r", "prompt": "p", "response": "y"}], None, "row 'r' is not annotated"),
    ([row()], [{"id": "other", "spans": []}], "no gold row has the id"), ([row()], [{"spans": []}], "an id of its own"),
    ([row()], [{"id": "r", "spans": []}] * 2, "'r' twice"),
    ([row()], [row("Another text: cat, mat")], "another response"),
    ([row()], [{"id": "r", "spans": [{"start": 0, "end": 99, "label": 1}]}], "row 'r'"),
    ([row()], [{"id": "r"}], "'r' has no list 'spans'")])
def test_an_audit_of_nothing_or_against_other_gold_says_so(rows, gold, message):
    with pytest.raises(ValueError, match=message):
        audit(rows, gold=gold)
