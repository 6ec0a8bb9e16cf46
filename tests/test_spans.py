"""spans.py against values computed by hand, by brute force and with an HTML parser."""

import json
import random
import re
from itertools import pairwise, product

import numpy as np
import pytest
import annotate
from annotate import Feedback, Span, ground
from data import InputError, write_rows
from helpers import HOSTILE, Page, assert_closed, error_message, run_main
from measures import spans as script
from measures.spans import (SIGNS, audit, audit_text, character_labels, colour_spans, compare,
                            feedback_page, figures, overlaps, read_spans, readable,
                            score_critiques, span_accuracy, span_length, span_table, total,
                            trimmed, words, written_replies)

TEXT = "The cat sat on the mat and slept all day long"


def marked(*quotes, label=1):
    return [Span(TEXT.index(q), TEXT.index(q) + len(q), label) for q in quotes]


def counted(gold, good=(), poor=()):
    return compare(TEXT, words(TEXT), gold, Feedback("c", list(good), list(poor)))


def random_spans(text, rng):
    """Up to six random spans of a text."""
    ends = [sorted(rng.sample(range(len(text) + 1), 2)) for _ in range(rng.randint(0, 6))]
    return [Span(start, end, rng.choice((1, -1))) for start, end in ends]


def test_a_hand_counted_response():  # Table 1; Table 6
    gold = marked("The cat", "the mat") + marked("all day", label=-1)
    counts = counted(gold, good=["The cat", "mat and", "a dog"], poor=["sat"])
    rates = figures(counts)
    # Good words: marked are "The cat the mat", predicted "The cat mat and"; they share three.
    assert [rates[f"good_{name}"] for name in ("precision", "recall", "f1")] == [0.75] * 3
    assert [rates[f"poor_{name}"] for name in ("precision", "recall", "f1")] == [0] * 3
    assert span_table(counts) == [["good", 2, 3, 1, 1], ["poor", 1, 1, 0, 0]]
    # "the mat" and "mat and" share 3 of the 11 characters of "the mat and".
    assert rates["good_overlap_index"] == pytest.approx((1 + 3 / 11) / 2)
    # The unmatched "a dog" counts as a prediction; 3 of the 6 letters of "mat and" are a tie.
    assert rates["good_exact"] == rates["good_near"] == pytest.approx(1 / 3)
    assert rates["good_agreement"] == pytest.approx(1 / 3)
    assert rates["unmatched"] == 0.25 and rates["unparseable"] == 0


def test_an_unreadable_critique_is_wrong_and_not_left_out():
    echo = '{"textual_feedback": "so", "good_spans": ["cat"], "poor_spans": []}'
    assert readable(echo)
    assert readable(f"You say {echo}", echo) is None         # it only repeats the response
    gold = marked("The cat")
    unreadable = compare(TEXT, words(TEXT), gold, readable("I like it."))
    rates = figures(total([counted(gold, good=["The cat"]), unreadable]))
    assert (rates["good_recall"], rates["unparseable"]) == (0.5, 0.5)
    assert figures(unreadable)["good_precision"] is None


def test_a_sign_that_no_row_has_gets_no_metrics():
    rows = [row(good=()) for _ in range(2)]
    reply = json.dumps({"textual_feedback": "so", "good_spans": ["cat"], "poor_spans": ["mat"]})
    scored, metrics, tables = score_critiques(rows, [reply, "no idea"], None, "R_φ")
    assert [(row["reason"] is None, row["reply"]) for row in scored] == [
        (True, reply), (False, "no idea")]
    assert metrics["poor_exact"] == [(1, 1), (0, 0)]
    assert not any(name.startswith("good") for name in metrics)
    assert [line[0] for line in tables[-1][2]] == [f"poor, quarter {k}" for k in (1, 2, 3, 4)]


def test_near_means_ninety_percent_of_the_longer():  # Table 6; Table 7; Table 16
    """A prediction of 18 of 20 characters is near the span; one of 17 only agrees with it."""
    text = "!#$%&()*+,-./:;<=>?@"                     # a quote may start or end anywhere
    for n, near in ((20, 1), (18, 1), (17, 0)):
        counts = compare(text, [(0, 20)], [Span(0, 20, 1)], Feedback("c", [text[:n]], []))
        rates = figures(counts)
        assert (rates["good_exact"], rates["good_near"]) == (n == 20, near)
        assert (rates["good_overlap_index"], rates["good_agreement"]) == (n / 20, 1)
        assert span_table(counts)[0] == ["good", 1, 1, n == 20, n < 20]
    gold = [Span(0, 8, 1), Span(8, 20, -1)]
    counts = compare(text, [(0, 20)], gold, Feedback("c", [text], []))
    assert figures(counts)["good_agreement"] == 0           # 8 of 20 characters: no majority
    # White space at the ends of a span changes nothing.
    assert overlaps(TEXT, [Span(3, 8, 1)], marked("cat")) == [(1.0, 1.0)]           # " cat "
    assert overlaps(TEXT, [Span(3, 4, 1)], [Span(3, 4, 1)]) == []                     # " "


def test_pairs_are_one_to_one_and_the_best_come_first():
    rng = random.Random(1)
    for _ in range(300):
        gold, predicted = random_spans(TEXT, rng), random_spans(TEXT, rng)
        shares = []                              # shared / union of the visible characters
        for g, p in product(gold, predicted):
            a, b = ({*range(s.start, s.end)} for s in (trimmed(TEXT, g), trimmed(TEXT, p)))
            shares.append(len(a & b) / len(a | b) if a & b else 0)
        indices = [index for index, _ in overlaps(TEXT, gold, predicted)]
        assert len(indices) <= min(len(gold), len(predicted))
        assert indices == sorted(indices, reverse=True)
        assert max(shares, default=0) == max(indices, default=0)


def test_token_counts_against_brute_force_over_characters():  # Table 1
    rng, places = random.Random(2), words(TEXT)

    def tokens_of(sign, spans):
        """The indices of the tokens that have only this label."""
        return {(start, end) for start, end in places
                if {s.label for s in spans if s.start <= start and end <= s.end} == {sign}}

    for _ in range(200):
        gold = random_spans(TEXT, rng)
        quotes = [TEXT[s:e] for s, e in rng.sample(places, rng.randint(0, 5))]
        good, poor = quotes[::2], quotes[1::2]
        counts = counted(gold, good, poor)
        predicted_spans = ground(TEXT, Feedback("c", good, poor)).spans
        for name, sign in SIGNS.items():
            gold_tokens, predicted = tokens_of(sign, gold), tokens_of(sign, predicted_spans)
            assert counts[f"{name} tokens marked"] == len(gold_tokens)
            assert counts[f"{name} tokens predicted"] == len(predicted)
            assert counts[f"{name} tokens hit"] == len(gold_tokens & predicted)


# ── The spans of a row

def span(start, end, label):
    return {"start": start, "end": end, "label": label}


def row(response="The cat sat on the mat.", good=("cat",), poor=("mat",), **fields):
    """An annotated row in which each quote occurs once."""
    spans = [span(response.index(q), response.index(q) + len(q), label)
             for label, quotes in ((1, good), (-1, poor)) for q in quotes]
    return {"id": "r", "prompt": "p", "response": response, "critique": "c",
            "good_spans": list(good), "poor_spans": list(poor), "spans": spans, "unmatched": [],
            "ambiguous": 0, **fields}


def test_labels_are_names_or_numbers_and_the_text_of_a_span_must_match_its_offsets():
    spans = [span(4, 8, "good"), span(9, 11, "Poor"), span(0, 3, 1), span(0, 3, "-1")]
    assert [s.label for s in read_spans(row() | {"spans": spans})] == [1, -1, 1, -1]
    # JavaScript counts the emoji as two characters, so its offsets are off by one.
    spans = [span(4, 10, 1) | {"text": "rocket"}]
    rocket = {"id": "r7", "response": "A 🚀 rocket", "spans": spans}
    assert read_spans(rocket) == [Span(4, 10, 1)]
    with pytest.raises(InputError, match="row r7: .*'text': 'rocke"):
        read_spans(rocket | {"spans": [span(5, 10, 1) | {"text": "rocket"}]})


@pytest.mark.parametrize("bad", [
    {"response": "y"}, {"spans": []}, {"response": 1, "spans": []},
    {"response": "y", "spans": 0},
    *({"response": "yes", "spans": [bad_span]} for bad_span in (
        [0, 1, 1], {"start": 0, "end": 1}, span(0, 4, 1), span(2, 1, 1), span(1, 1, 1),
        span(-1, 1, 1), span(0, 1, 0), span(0, "1", 1), span(0, 1.0, 1),
        span(0, 1, ["good"])))])
def test_the_error_of_an_invalid_row_names_it(bad):
    with pytest.raises(InputError, match="row r7"):
        audit([row(), {"id": "r7", **bad}])


def test_length_and_accuracy_of_a_span_are_counted_character_by_character():
    rng = random.Random(4)
    for _ in range(300):
        text = "".join(rng.choices("ab .\n🏠", k=rng.randint(1, 25)))
        # As from a tokenizer, the tokens cover the text and include white space at their ends.
        tokens = list(pairwise(sorted({0, len(text), *rng.choices(range(len(text)), k=6)})))
        gold = random_spans(text, rng)
        labels = character_labels(text, gold)
        for part in random_spans(text, rng):
            start, end = part.start, part.end
            assert span_length(text, words(text), part) == len(text[start:end].split())
            inside = [i for i in range(start, end)
                      if text[start : i + 1].strip() and text[i:end].strip()]
            touched = [(a, b) for a, b in tokens if any(a <= i < b for i in inside)]
            assert span_length(text, tokens, part) == len(touched)
            gold_labels = [{s.label for s in gold if s.start <= i < s.end}
                           for i in range(start, end) if not text[i].isspace()]
            right = sum(signs == {part.label} for signs in gold_labels)
            share = right / max(len(gold_labels), 1)
            assert span_accuracy(text, part, labels) == share


# ── The paper's tables

def lines(rows, name, places=None):
    """{first cell: the other cells} of the table with this name in its title."""
    (_, _, cells), = [table for table in audit(rows, places) if name in table[0]]
    return {first: values for first, *values in cells}


def test_table_15_counts_quotes_that_are_not_in_the_response():  # Table 15
    rows = [row(unmatched=["dog"], good_spans=["cat", "dog"]),
            row(unmatched=["dog", "dog"], poor_spans=["dog", "mat", "dog"], ambiguous=2),
            {"response": "a b", "spans": []}]                    # a row without quotes
    table = lines(rows, "Table 15")
    assert table["ambiguous quotes"] == [2, 3 + 4, pytest.approx(200 / 7)]
    assert table["unmatched quotes"] == [3, 3 + 4, pytest.approx(300 / 7)]
    rows = [row("a b c d e f g h", ["a b", "c"], ["c", "h"]), row("x y", [], ["y"])]
    table = lines(rows, "§3.3")                        # "c" is good and poor, so it counts as 0
    names = "good words", "poor words", "labelled words"
    assert [table[name] for name in names] == [[n, 10, 10.0 * n] for n in (2, 2, 4)]


def test_tables_18_and_19_by_the_quartiles_of_good_and_of_poor_spans():  # Tables 18 and 19
    rng, text = random.Random(0), " ".join(f"w{i}" for i in range(100, 200))
    gold = [span(0, 249, 1), span(250, 400, -1)]
    spans = []
    lengths = {"good": [], "poor": []}
    shares = {"good": [], "poor": []}                  # share of words with the right label
    for _ in range(30):
        start, n = rng.randrange(60), rng.randrange(1, 30)
        name = rng.choice(("good", "poor"))
        spans.append(span(5 * start, 5 * (start + n) - 1, name))
        lengths[name].append(n)
        gold_names = ["good" if i < 50 else "poor" if i < 80 else ""
                      for i in range(start, start + n)]
        shares[name].append(gold_names.count(name) / n)
    table = lines([row(text, (), ()) | {"spans": spans, "gold_spans": gold}], "Table 18")
    without_gold = lines([row(text, (), ()) | {"spans": spans}], "Table 18")
    for name, sizes in lengths.items():
        cuts = [*np.quantile(sizes, [.25, .5, .75]), max(sizes)]
        for k, (low, high) in enumerate(zip([0, *cuts], cuts), 1):
            inside = [share for share, n in zip(shares[name], sizes) if low < n <= high]
            expected = [high, len(inside), len(inside), pytest.approx(100 * np.mean(inside))]
            assert table[f"{name}, quarter {k}"] == expected
            assert without_gold[f"{name}, quarter {k}"] == [high, len(inside), 0, None]
    assert lines([row("a", [], [])], "Table 18") == {}


def test_tables_12_and_14_count_both_replies_in_one_unit_and_the_bill():  # Tables 12 and 14
    rows = [
        row("cat mat", usage={"prompt_tokens": 100, "completion_tokens": 20}, usd=0.001),
        row("cat mat", critique="It is it.", usage=None, usd=None),
        {"response": "a", "spans": []},
        row("cat mat", usage={"prompt_tokens": 300, "completion_tokens": 40}, usd=0.004),
    ]
    table = lines(rows, "Table 12")
    reply, _ = written_replies(rows[1])
    assert annotate.parse_feedback(reply) == Feedback("It is it.", ["cat"], ["mat"])
    replies = {"reply with spans": '{"good_spans": ["cat"], "poor_spans": ["mat"]}',
               "reply with a label a word": '{"labels": [{"word": "cat", "label": "good"}, '
                                            '{"word": "mat", "label": "poor"}]}'}
    for name, labels in replies.items():
        n = len(re.findall(r"\w+|[^\w\s]", f"c It is it. c {3 * labels}"))
        assert table[name] == [3, n / 3, n]
    assert table["tokens asked, billed"] == [2, 200, 400]
    assert table["tokens replied, billed"] == [2, 30, 60]
    assert table["thousandths of a USD"] == [2, 2.5, 5.0]
    assert lines([row()], "Table 14")["thousandths of a USD"] == [0, None, None]


def test_a_tokenizer_makes_every_table_count_tokens():
    characters = lambda text: [(i, i + 1) for i in range(len(text))]
    table = lines([row("cat mat")], "§3.3", characters)
    assert table["good tokens"] == [3, 7, pytest.approx(300 / 7)]
    assert lines([row("cat mat")], "Table 18", characters)["good, quarter 4"][0] == 3
    assert lines([row("cat mat")], "Table 12", characters)["reply with spans"][1] == len(
        'c\n{"good_spans": ["cat"], "poor_spans": ["mat"]}')


# ── The page

def test_the_very_characters_of_each_span_are_coloured():  # Figure 2
    """Offsets count code points: an emoji is one, a letter with a combining accent is two."""
    cases = [
        (row("a 🏠 cat 👨‍👩‍👧 </b><script> e\u0301 mat", ["🏠 cat", "👧", "\u0301"],
             ["</b><script>"]),
         [("+1", "🏠 cat"), ("+1", "👧"), ("-1", "</b><script>"), ("+1", "\u0301")]),
        (row("The cat sat", ["The cat"], ["cat sat"]), [("+1", "The "), ("-1", " sat")]),
        (row("نص عربي", ["عربي"], []), [("+1", "عربي")])]
    for example, expected in cases:
        tags = Page(colour_spans(example["response"], read_spans(example))).all("span")
        assert [(a["title"], text) for a, text in tags if a["title"] != "+0"] == expected
        assert "".join(text for _, text in tags) == example["response"]


def test_the_page_shows_a_few_rows_and_those_with_unmatched_quotes_first(tmp_path, monkeypatch):
    """All texts of a row are escaped."""
    monkeypatch.setattr(script, "MOST_ROWS", 4)
    evil = " ".join(HOSTILE)
    rows = [row(id=f"fine {i}") for i in range(4)] + [
        row(f"{evil} cat mat", prompt=evil, critique=evil, id=f"b {evil}", annotator=evil,
            unmatched=["<i>gone</i>", evil])]
    feedback_page(tmp_path / "page.html", evil, rows)
    text = (tmp_path / "page.html").read_text("utf-8")
    page = Page(text)
    assert_closed(text)
    assert [text.split()[0] for _, text in page.all("b")] == ["b", "fine", "fine", "fine"]
    divs = [text for _, text in page.all("div")]
    assert sum(text.startswith("<i>gone</i>\n</script>") for text in divs) == 1   # a column
    assert page.all("p")[0][1] == "4 of 5 responses, those with unmatched quotes first"
    assert not {tag for tag, *_ in page.tags} & {"i", "script", "img"}


# ── The script

def test_the_audit_prints_the_tables_and_writes_the_page(tmp_path, capsys, shared):
    file, html = tmp_path / "f.jsonl", tmp_path / "p.html"
    write_rows(file, [row(gold_spans=row()["spans"]), {"response": "y", "reason": "cut off"}])
    run_main("--audit", file, "--tokenizer", shared / "models" / "stories260K",
             "--output", html, module=script)
    printed = capsys.readouterr().out
    assert "Table 19: tokens of a span" in printed and "100.00" in printed
    assert "1 rows without feedback were left out" in printed
    assert audit_text(audit([row()])[:1]) not in printed                # that table has words
    assert len(Page(html.read_text()).all("article")) == 1
    run_main("--audit", file, module=script)
    assert "Table 18, Table 19: words" in capsys.readouterr().out


@pytest.mark.parametrize("output, message", [
    ("x/../e.json", "--output must name another file than the rows .*e.json"),
    ("page.html", "row None: 'response' must be a text and 'spans' a list")])
def test_invalid_input_is_an_error_and_nothing_is_written(tmp_path, output, message):
    file = tmp_path / "e.json"
    file.write_text("[{}]")
    flags = "--audit", file, "--output", tmp_path / output
    assert re.search(message, error_message("measures/spans.py", *flags))
    assert [*tmp_path.iterdir()] == [file] and file.read_text() == "[{}]"
