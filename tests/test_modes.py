"""The annotator's modes of experiments/modes.py: labels for every word, and for steps."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from annotate import FeedbackError, Grounding, Span, read_reply
from experiments.modes import LABELS
from helpers import often

DENSE, STEPS = "experiments.modes:DENSE", "experiments.modes:STEPS"
RESPONSE = "The cat sat. A dog ran."


def read(mode: str, value: dict, response=RESPONSE):
    return read_reply({"id": "row-1", "response": response}, json.dumps(value), mode)


# ── Dense labels: Table 11, 12; steps: Appendix N

def dense(words, labels) -> dict:
    return {"textual_feedback": "Said.",
            "labels": [{"word": w, "label": l} for w, l in zip(words, labels)]}


def steps(*triples) -> dict:
    return {"steps": [{"step": step, "correct": correct, "reason": reason}
                      for step, correct, reason in triples]}


@often
@given(st.lists(st.tuples(st.text("abé🎉“.,\u0301", min_size=1, max_size=4),
                          st.sampled_from([" ", "\n", " \t ", "\u00a0"]),
                          st.sampled_from(list(LABELS))), min_size=1, max_size=12))
def test_dense_labels_give_each_character_of_a_word_its_label(parts):
    response = "".join(word + space for word, space, _ in parts)
    feedback, grounding = read(DENSE, dense(response.split(), [label for _, _, label in parts]),
                               response)
    expected = [LABELS[label] for word, _, label in parts for _ in word]
    delta = [0] * len(response)
    for span in grounding.spans:
        delta[span.start : span.end] = [span.label] * (span.end - span.start)
    assert [d for d, char in zip(delta, response) if not char.isspace()] == expected
    assert grounding.spans == sorted(grounding.spans, key=lambda span: span.start)
    for a, b in zip(grounding.spans, grounding.spans[1:]):
        assert a.label != b.label or response[a.end : b.start].strip(), (
            "adjacent words with the same label must be one span")
    assert feedback.good_spans == [response[s.start : s.end]
                                   for s in grounding.spans if s.label == 1]


@pytest.mark.parametrize("response, quotes, spans, unmatched, ambiguous", [
    ("x = 1\nx += 1\nprint(x)\nx += 1\n", ["x = 1", "x += 1", "-print(x)", "-x += 1"],
     [Span(0, 5, 1), Span(6, 12, 1), Span(13, 21, -1), Span(22, 28, -1)], [], 0),
    # white space does not matter, but the order of the steps does
    (RESPONSE, ["A  dog ran.", "The cat sat.", "A bird", "  "],
     [Span(13, 23, 1)], ["The cat sat.", "A bird", ""], 0),
    # The first step is not in the response, so the second one has two possible places.
    ("x = 1 + 2\ny = f(x)\nx = 1\n", ["x := 1 + 2", "x = 1", "y = f(x)"],
     [Span(10, 18, 1)], ["x := 1 + 2"], 1)])
def test_steps_are_labelled_in_order(response, quotes, spans, unmatched, ambiguous):
    """A step without a unique place gives no span. "-" marks incorrect steps here."""
    judged = [(quote.removeprefix("-"), quote[0] != "-") for quote in quotes]
    feedback, grounding = read(STEPS, steps(*[(*step, "why") for step in judged]), response)
    assert grounding == Grounding(spans, unmatched, ambiguous)
    assert feedback.good_spans == [response[s.start : s.end] for s in spans if s.label > 0]
    assert feedback.critique.splitlines() == [
        f"{'Correct' if correct else 'Incorrect'}: {step.strip()} (why)"
        for step, correct in judged]


GOOD = dense(RESPONSE.split(), ["good"] * 6)


@pytest.mark.parametrize("mode, value, reason", [
    *[(DENSE, dense(words, ["good"] * len(words)), "words differ") for words in (
        RESPONSE.split()[1:], [*RESPONSE.split(), "ran."], RESPONSE.upper().split())],
    (DENSE, dense(RESPONSE.split(), ["great"] * 6), "'great'"),
    (DENSE, dense(RESPONSE.split(), [["good"]] * 6), "list of objects"),
    (DENSE, GOOD | {"labels": [{"label": "good"}]}, "list of objects.*'word'"),
    (DENSE, GOOD | {"labels": 3}, "list of objects"),
    (DENSE, {"textual_feedback": "Said."}, "no JSON object.* labels"),
    (DENSE, {"labels": GOOD["labels"]}, "no critique"),
    (STEPS, {"steps": []}, "empty"), (STEPS, steps(("\ud83d", True, "")), "no JSON object"),
    (STEPS, steps(("The cat", "yes", "")), "list of objects.*'yes'"),
    (STEPS, steps((["The cat"], True, "")), "list of objects"),
    (STEPS, {"steps": [{"step": "The cat", "correct": True}]}, "list of objects.*'reason'")])
def test_labels_and_steps_that_do_not_fit_are_refused(mode, value, reason):
    with pytest.raises(FeedbackError, match=reason):
        read(mode, value)
