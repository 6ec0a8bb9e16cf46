"""people.py recomputed another way: votes character by character, α and κ from their definitions, real rows."""

import copy
import json
import random
import sys
from collections import Counter
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import annotate
from data import read_rows
from measures import people
from measures.people import (FORMS, InputError, agreement, krippendorff_alpha, merge,
                             people_row, read_argilla, read_finegrained, read_label_studio,
                             read_offsets, read_people)

often = settings(max_examples=150, deadline=None, derandomize=True)
RESPONSE = "The plot is right, but Bob is called Rob."


def span(start, end, label):
    return {"start": start, "end": end, "label": label}


def offsets_row(spans=(), critique="", **fields):
    return {"id": "7", "prompt": "Sum up.", "response": RESPONSE, "critique": critique, "annotator": "anna",
            "spans": spans or [], **fields}


def task(*results, **fields):
    """A Label Studio task; each result is (who, was_cancelled, critique, [(start, end, text, label)])."""
    regions = lambda marks: [{"id": "r", "from_name": "l", "to_name": "t", "type": "labels", "value":
                              {"start": s, "end": e, "text": text, "labels": [label]}} for s, e, text, label in marks]
    comment = lambda text: [{"from_name": "c", "to_name": "t", "type": "textarea", "value": {"text": [text]}}]
    return {"id": 7, "data": {"prompt": "Sum up.", "response": RESPONSE}, "annotations": [
        {"completed_by": who, "was_cancelled": cancelled, "result": [
            *regions(marks), *comment(critique), {"type": "choices", "value": {"choices": ["clear"]}},
            {"type": "relation", "from_id": "r", "to_id": "r"}]}
        for who, cancelled, critique, marks in results], **fields}


def record(responses, **fields):
    return {"id": "7", "fields": {"prompt": "Sum up.", "response": RESPONSE, **fields}, "responses": responses}


def finegrained_row(**fields):
    return {"question": "Who is it?", "prediction 1": RESPONSE, "passages": [
        ["Rob", "Rob\n\nRob is a bird.", "He sings."], ["Song", "Song is loud."]], "feedback": {"errors": [
            {"start": 23, "end": 26, "error type": "Wrong-Grounding",
             "explanation": '{"passage_id":1,"sentence_id":[2]}'},
            {"start": 0, "end": 17, "error type": "Irrelevant", "explanation": ""},
            {"start": 37, "end": 40, "error type": "Dull", "explanation": "no news"}],
            "missing-info": [{"error type": "Missing-Answer", "passage_id": 2, "sentence_id": [0, 1]}]}, **fields}


QUOTES_ROW = {"prompt": "p", "response": RESPONSE, "feedback": "c", "good_spans": ["plot"], "poor_spans": ["Bob"]}


# ── Readers

def test_the_same_feedback_is_the_same_annotation_in_every_form():
    spans = [{"start": 4, "end": 8, "label": "good"}, {"start": 23, "end": 26, "label": "Poor"}]
    marks = [(4, 8, "plot", "Positive"), (23, 26, "Bob", "negative")]
    expected = [people_row("7", "Sum up.", RESPONSE, "It is Rob.", "anna", [span(4, 8, 1), span(23, 26, -1)])]
    values = {"marks": spans, "why": "It is Rob.", "stars": 4, "order": [{"value": "a", "rank": 1}]}
    v2 = {question: [{"value": value, "user_id": "anna"}] for question, value in values.items()}
    v1 = [{"user_id": "anna", "status": "submitted", "values": {k: {"value": value} for k, value in values.items()}},
          {"user_id": "bert", "status": "discarded", "values": {"marks": {"value": spans}}}]
    assert read_people([offsets_row(spans, "It is Rob.")]) == expected
    assert read_people([offsets_row([span(4, 8, 1), span(23, 26, "-1")], "It is Rob.")]) == expected
    assert read_people([task(("anna", False, "It is Rob.", marks), ("bert", True, "Skipped.", marks[:1]))]) == expected
    assert read_people([task(({"id": 3, "email": "anna"}, False, "It is Rob.", marks))]) == expected
    assert read_people([record(v2)]) == read_people([record(v1)]) == expected
    with_draft = {k: [answer, {**answer, "status": "draft", "user_id": "bert"}] for k, [answer] in v2.items()}
    assert read_people([record(with_draft)]) == expected


def test_several_annotators_of_a_task_or_record_are_several_annotations():
    both = read_label_studio([task((1, False, "a", [(4, 8, "plot", "good")]), (2, False, "b", []))])
    assert [(a["annotator"], a["critique"], len(a["spans"])) for a in both] == [("1", "a", 1), ("2", "b", 0)]
    spans = {"marks": [{"value": [span(4, 8, 1)], "user_id": "x"}, {"value": [], "user_id": "y"}]}
    assert [(a["annotator"], len(a["spans"])) for a in read_argilla([record(spans)])] == [("x", 1), ("y", 0)]
    rows = [{"prompt": p, "response": RESPONSE, "spans": [span(4, 8, 1)]} for p in ("a", "b", "a")]
    read = read_offsets(rows)                          # without an id, without a name: of different people
    assert [a["id"] for a in read] == ["1", "2", "1"] and len({a["annotator"] for a in read}) == 3
    assert agreement(read)["shared"] == 1


def test_argilla_offsets_are_a_browsers_and_those_of_other_forms_are_characters():
    """argilla-io/argilla #5729: "🚀" has length 2 in a browser."""
    response = "A 🚀 rocket"
    in_browser = len("A 🚀 ".encode("utf-16-le")) // 2
    marks = lambda start, end: {"marks": [{"value": [span(start, end, "good")], "user_id": "x"}]}
    read = read_argilla([record(marks(in_browser, in_browser + 6), response=response)])
    assert read[0]["good_spans"] == ["rocket"]
    assert read_offsets([offsets_row([span(4, 10, 1)], response=response)])[0]["good_spans"] == ["rocket"]
    for start, end, named in [(3, 11, "start '3 "), (0, 3, "end '3 "), (0, 12, "end '12 ")]:   # 3: in the middle of it
        with pytest.raises(InputError, match=f"row 1 .*{named}"):
            read_argilla([record(marks(start, end), response=response)])


def test_label_studios_text_must_stand_at_its_offsets_up_to_white_space():
    """HumanSignal/label-studio #3078: two spaces come out as one, the offsets count both."""
    data = {"prompt": "p", "text": "Text: Berlin,  Germany."}
    good = task((1, False, "c", [(6, 22, "Berlin, Germany", "good")]), data=data)
    assert read_people([good])[0]["good_spans"] == ["Berlin,  Germany"]
    message = r"row 1 \(id 7, annotator 1\), span 1: text 'Berlin', but start 7, end 13 .*'erlin,'"
    with pytest.raises(InputError, match=message):
        read_label_studio([task((1, False, "c", [(7, 13, "Berlin", "good")]), data=data)])


def test_a_finegrained_error_is_a_poor_span_that_the_critique_explains():
    read, = read_people([finegrained_row()])
    assert read["good_spans"] == [] and sorted(read["poor_spans"]) == ["Bob", "Rob", "The plot is right"]
    assert read["critique"].splitlines() == [
        '"The plot is right" does not help to answer the question.', '"Bob" contradicts the passages: "He sings."',
        '"Rob" is marked as Dull: "no news"', 'The answer leaves out what was asked for: "Song Song is loud."']
    assert read["prompt"] == ("Answer the question from the passages.\n\nRob\nRob is a bird. He sings.\n\nSong\n"
                              "Song is loud.\n\nQuestion: Who is it?")
    read, = read_finegrained([finegrained_row(feedback={"errors": [], "missing-info": []})])
    assert read["spans"] == [] and read["critique"] == "No part of the answer is marked as wrong."


def test_all_finegrained_rows_are_read_and_each_error_is_one_span(shared):
    lines = (shared / "data" / "finegrained_qa_human_spans.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    for row, read in zip(rows, merge(read_people(rows)), strict=True):
        errors = sorted((e["start"], e["end"]) for e in row["feedback"]["errors"])
        assert [(s["start"], s["end"], s["label"]) for s in read["spans"]] == [(*e, -1) for e in errors]
        assert len(read["critique"].splitlines()) == max(len(errors), 1) + len(row["feedback"]["missing-info"])
        assert read["response"] == row["prediction 1"] and row["question"] in read["prompt"]
        assert all(sentence.split("\n\n")[-1] in read["prompt"] for p in row["passages"] for sentence in p)
    assert sum(len(row["feedback"]["errors"]) for row in rows) == 265


# ── Bad input

@pytest.mark.parametrize("bad", [{"start": -1}, {"start": 8}, {"end": len(RESPONSE) + 1}, {"end": 8.0},
                                 {"start": True}, {"label": 0}, {"label": "great"}, {"label": ["good"]}])
def test_a_span_that_cannot_be_is_named_with_row_place_value_and_remedy(bad):
    rows = [offsets_row([span(0, 3, 1)]), offsets_row([span(0, 3, 1), {**span(4, 8, 1), **bad}], id="r2")]
    (name, value), = bad.items()
    with pytest.raises(InputError) as caught:
        read_people(rows)
    assert str(caught.value).startswith("row 2 (id r2, annotator anna), span 2: ")
    assert f"{name} {value!r}" in str(caught.value) and "drop the row" in str(caught.value)


@pytest.mark.parametrize("change, said", [
    ({"response": "  "}, "'response' is '  '"), ({"prompt": None}, "'prompt' is None"),
    ({"critique": 3}, "'critique' is 3"), ({"response": RESPONSE + "\ud800"}, "'response' is"),
    *(({"spans": spans}, "row 2 is not what read_offsets reads") for spans in (None, "", {}, {"start": 1}, ["plot"]))])
def test_a_field_that_cannot_be_is_named_with_its_row(change, said):
    with pytest.raises(InputError, match="^row 2 ") as caught:
        read_offsets([offsets_row(), {**offsets_row(), **change}])
    assert said in str(caught.value)


@pytest.mark.parametrize("rows", [[], [{}], [{"text": "a"}], ["a"], [{"data": {}}]])
def test_where_no_form_fits_all_of_them_are_listed(rows):
    with pytest.raises(InputError) as caught:
        read_people(rows)
    assert all(name in str(caught.value) for fields in FORMS.values() for name in fields)


def nodes(value, path=()):
    yield path
    for key, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from nodes(item, (*path, key))


@pytest.mark.parametrize("row", [
    offsets_row([span(4, 8, 1)], "c"), QUOTES_ROW, finegrained_row(), task((1, False, "c", [(4, 8, "plot", "good")])),
    record({"m": [{"value": [span(4, 8, 1)], "user_id": "x"}]}),
    record([{"user_id": "x", "values": {"m": {"value": [span(4, 8, 1)]}}}])], ids=lambda row: ",".join(row)[:30])
def test_a_row_with_any_part_replaced_or_lost_is_read_or_refused_never_a_crash(row):
    for path in list(nodes(row))[1:]:
        for junk in (None, "", "x", "\ud800", 0, -1, 10**30, 1.5, True, [], [[]], ["x"], [{}], {}, {"x": {}}, "lost"):
            bad = copy.deepcopy(row)
            at = bad
            for key in path[:-1]:
                at = at[key]
            if junk == "lost":
                del at[path[-1]]
            else:
                at[path[-1]] = junk
            try:
                annotations = read_people([bad])
            except InputError as error:
                assert str(error).startswith("row 1")
                continue
            for row_ in merge(annotations, lambda response, good, poor: []):
                json.dumps(row_, ensure_ascii=False).encode()
                assert all(0 <= s["start"] < s["end"] <= len(row_["response"]) for s in row_["spans"])


# ── Merging

@st.composite
def annotated(draw, people=5):
    """Annotations of one response, of different people, some with several."""
    response = draw(st.text("ab \n", min_size=1, max_size=30).filter(str.strip))
    spans = st.lists(st.tuples(st.integers(0, len(response) - 1), st.integers(1, 9), st.sampled_from([1, -1])).map(
        lambda s: span(s[0], min(s[0] + s[1], len(response)), s[2])), max_size=5)
    return [people_row("1", "p", response, draw(st.sampled_from(["", "good", "it\nis poor"])), name, draw(spans))
            for name in draw(st.lists(st.sampled_from("vwxyz"[:people]), min_size=1, max_size=people))]


def votes(annotations) -> dict[str, list[int]]:
    """Each annotator's label of each character, by definition."""
    out = {}
    for who in {a["annotator"] for a in annotations}:
        spans = [s for a in annotations if a["annotator"] == who for s in a["spans"]]
        out[who] = [sum({s["label"] for s in spans if s["start"] <= i < s["end"]})
                    for i in range(len(annotations[0]["response"]))]
    return out


def labelled(row) -> list[int]:
    """The label of each character; spans must not overlap."""
    labels = [0] * len(row["response"])
    for s in row["spans"]:
        assert not any(labels[s["start"]:s["end"]])
        labels[s["start"]:s["end"]] = [s["label"]] * (s["end"] - s["start"])
    return labels


@often
@given(annotated())
def test_a_character_has_the_label_that_more_than_half_gave_and_spans_are_whole_and_trimmed(annotations):
    row, = merge(annotations)
    count = [Counter(column) for column in zip(*votes(annotations).values())]
    expected = [next((c for c in (1, -1) if 2 * column[c] > column.total()), 0) for column in count]
    text, got = row["response"], labelled(row)
    assert [g for g, c in zip(got, text) if not c.isspace()] == [e for e, c in zip(expected, text) if not c.isspace()]
    for s in row["spans"]:
        assert text[s["start"]:s["end"]].strip() == text[s["start"]:s["end"]] != ""
        assert set(expected[s["start"]:s["end"]]) == {s["label"]}
    for a, b in zip(row["spans"], row["spans"][1:]):         # neighbours are one span: between two stands another label
        assert a["end"] < b["start"] and set(expected[a["end"]:b["start"]]) != {a["label"]} or a["label"] != b["label"]
    for sign, name in ((1, "good_spans"), (-1, "poor_spans")):
        assert row[name] == [text[s["start"]:s["end"]] for s in row["spans"] if s["label"] == sign]


@often
@given(annotated(people=4))
def test_the_order_of_annotators_never_matters(annotations):
    rows = [merge(list(order)) for order in permutations(annotations)]
    assert all(row == rows[0] for row in rows)


def test_the_merged_row_names_each_annotator_and_one_alone_is_kept_as_it_is():
    rows = [offsets_row([], "It is\nRob.", annotator="bert"), offsets_row([], "Fine."), offsets_row(annotator="cy")]
    merged, = merge(read_offsets(rows))
    assert merged["critique"] == "anna: Fine.\nbert: It is Rob." and merged["annotator"] == "anna, bert, cy"
    assert merge(read_offsets(rows[:1]))[0]["critique"] == "It is\nRob."
    rows = [offsets_row(id=i, prompt=p, annotator=who) for i, p, who in
            [("2", "a", "x"), ("1", "a", "x"), ("2", "a", "y"), ("2", "b", "y")]]
    assert [(r["id"], r["prompt"], r["annotator"]) for r in merge(read_offsets(rows))] == [
        ("2", "a", "x, y"), ("1", "a", "x"), ("2", "b", "y")]      # in order of first appearance


def test_quotes_are_found_by_the_function_that_is_passed_and_vote_like_spans():
    quoted = read_people([{**QUOTES_ROW, "id": "1", "annotator": "x", "poor_spans": ["Bob", "Rob"]}])
    marked = read_people([offsets_row([span(23, 26, -1), span(0, 3, 1)], id="1", prompt="p")])

    def find(response, good, poor):
        return [vars(s) for s in annotate.ground(response, annotate.Feedback("", good, poor)).spans]

    assert merge(quoted, find)[0]["spans"] == [span(4, 8, 1), span(23, 26, -1), span(37, 40, -1)]
    assert merge(quoted + marked, find)[0]["poor_spans"] == ["Bob"]
    with pytest.raises(InputError, match="x gave quotes"):
        merge(quoted)


# ── Agreement

def close(value):
    return None if value is None else pytest.approx(value, abs=1e-12)


def alpha_by_pairs(units) -> float | None:
    """α = 1 − D_o/D_e from pairs of labels: within units, each unit weighted by its labels, and among all labels."""
    units = [[v for v in unit if v is not None] for unit in units]
    units = [unit for unit in units if len(unit) > 1]
    everything = [v for unit in units for v in unit]
    differ = lambda values: sum(a != b for a, b in permutations(values, 2)) / (len(values) * (len(values) - 1))
    if not everything or not differ(everything):
        return None
    return 1 - sum(len(unit) * differ(unit) for unit in units) / len(everything) / differ(everything)


def kappa_by_matrix(a, b) -> float | None:
    values = sorted({*a, *b})
    matrix = np.array([[sum(x == u and y == v for x, y in zip(a, b)) for v in values] for u in values]) / len(a)
    chance = float((matrix.sum(0) * matrix.sum(1)).sum())
    return (matrix.trace() - chance) / (1 - chance) if chance < 1 - 1e-12 else None


@pytest.mark.parametrize("coders, alpha", [
    (["0100000010", "1110010000"], 0.095), (["aabbdcccedda", "babbbccceddd"], 0.692),
    (["123321412...", "1233224125.3", ".3332342251.", "12332441251."], 0.743),
    ([".....34121133.3", "1.213343.......", "..21344.21133.4"], 0.691)])
def test_alpha_of_published_examples(coders, alpha):
    """Krippendorff, Computing Krippendorff's Alpha-Reliability (2011), A to C; and the example of three coders."""
    units = [[None if v == "." else int(v, 16) for v in unit] for unit in zip(*coders, strict=True)]
    assert krippendorff_alpha(units) == pytest.approx(alpha, abs=5e-4)


@often
@given(st.lists(annotated(people=3), min_size=1, max_size=4))
def test_agreement_pools_the_visible_characters_of_responses_with_two_annotators_or_more(responses):
    groups = [[{**a, "id": str(n)} for a in annotations] for n, annotations in enumerate(responses)]
    columns, teams = [], set()
    for group in groups:
        who = votes(group)
        if len(who) > 1:
            teams.add(tuple(sorted(who)))
            visible = [i for i, char in enumerate(group[0]["response"]) if not char.isspace()]
            columns += [[who[name][i] for name in sorted(who)] for i in visible]
    random.Random(0).shuffle(annotations := [a for group in groups for a in group])
    alpha = alpha_by_pairs(columns)
    two = len(teams) == 1 and len(*teams) == 2
    kappa = kappa_by_matrix(*zip(*columns)) if two else None
    assert agreement(annotations) == {
        "annotators": len({a["annotator"] for a in annotations}), "responses": len(groups), "characters": len(columns),
        "shared": sum(len(votes(group)) > 1 for group in groups), "alpha": close(alpha), "kappa": close(kappa)}


# ── The script

def run(monkeypatch, capsys, *flags) -> str:
    monkeypatch.setattr(sys, "argv", ["people", *map(str, flags)])
    people.main()
    return capsys.readouterr().out


def test_an_export_becomes_rows_of_feedback_that_training_reads(tmp_path, monkeypatch, capsys):
    """A Label Studio export, a JSON array, of two who agree on one of two spans."""
    one, two = [(4, 8, "plot", "good"), (23, 26, "Bob", "poor")], [(4, 8, "plot", "good")]
    export, output, html = (tmp_path / name for name in ("e.json", "f.jsonl", "p.html"))
    export.write_text(json.dumps([task((1, False, "It is Rob.", one), (2, False, "", two))], indent=1))
    said = run(monkeypatch, capsys, export, "--output", output, "--html", html)
    row, = read_rows(output)
    assert row["spans"] == [span(4, 8, 1)] and row["good_spans"] == ["plot"]
    assert (row["id"], row["prompt"], row["response"]) == ("7", "Sum up.", RESPONSE)
    assert (row["critique"], row["annotator"]) == ("1: It is Rob.", "2 people")
    assert (row["task"], row["unmatched"], row["ambiguous"]) == ("slf5k", [], 0)
    labels = [[0] * 33 for _ in "ab"]                       # of the 33 characters of the response
    for who in labels:
        who[3:7] = [1] * 4
    labels[0][18:21] = [-1] * 3
    kappa = kappa_by_matrix(*labels)
    assert "1 annotated by several, over whose 33 characters" in said
    assert f"alpha is {alpha_by_pairs(zip(*labels)):.3f}, Cohen's kappa {kappa:.3f}" in said
    assert '<mark class="good">plot</mark>' in html.read_text()


def test_quotes_of_people_are_found_and_those_lost_are_counted(tmp_path, monkeypatch, capsys):
    export, output = tmp_path / "e.jsonl", tmp_path / "f.jsonl"
    rows = [{**QUOTES_ROW, "poor_spans": ["Bob", "gone"], "good_spans": ["plot", "i"]},
            {**QUOTES_ROW, "prompt": "q", "feedback": ""}]
    export.write_text("".join(json.dumps(row) + "\n" for row in rows))
    said = run(monkeypatch, capsys, export, "--output", output, "--task", "ultrafeedback")
    first, _ = read_rows(output)
    assert first["spans"] == [span(4, 8, 1), span(23, 26, -1)] and first["unmatched"] == ["gone"]
    assert first["annotator"] == "a person" and first["task"] == "ultrafeedback"
    assert "2 responses; " in said and "1 have no critique" in said


@pytest.mark.parametrize("text, output, message", [
    ('[{"text": "a"}]', "f.jsonl", "e.json: row 1 has the fields text"),
    (json.dumps([task()]), "f.jsonl", "e.json: nobody has finished"),
    ("{", "f.jsonl", "e.json, line 1: not JSON"), ("[]", "e.json", "would be overwritten")])
def test_what_cannot_be_read_is_named_and_nothing_is_written(
        tmp_path, monkeypatch, capsys, text, output, message):
    (tmp_path / "e.json").write_text(text)
    with pytest.raises(InputError, match=message):
        run(monkeypatch, capsys, tmp_path / "e.json", "--output", tmp_path / output)
    assert [path.name for path in tmp_path.iterdir()] == ["e.json"]
    assert (tmp_path / "e.json").read_text() == text
