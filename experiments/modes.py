"""Other ways to ask the annotator: a label for every word (Table 11), and steps (Appendix N).

    python annotate.py --task slf5k --data rows.jsonl --mode experiments.modes:DENSE
    python annotate.py --task kodcode --data rows.jsonl --mode experiments.modes:STEPS

A `Mode` of annotate.py is an instruction, the form of the reply, and how it is read. Both end
in spans, so that every phase behind goes on as with the paper's method.
"""

from __future__ import annotations

import re
from itertools import groupby

from annotate import (EXACT, Feedback, FeedbackError, Grounding, Mode, Span, check_characters,
                      find_object, normal_places, quoted, read_critique)

LABELS = {"good": 1, "neutral": 0, "poor": -1}


def _read(value: dict, key: str, read) -> list[tuple]:
    """read(item) of each object in a list; FeedbackError where one is of another form."""
    try:
        return [read(item) for item in value[key]]
    except (AttributeError, LookupError, TypeError) as error:
        raise FeedbackError(f"{key!r} must be a list of objects of the form that is asked for "
                            f"({type(error).__name__}: {error})") from error


# ── Dense labels (Table 11)

def read_labels(example: dict, reply: str) -> tuple[Feedback, Grounding]:
    """One label for every word of the response, in order; neighbours of one label are one span.

    Raises FeedbackError where the words are not the response's.
    """
    response = example["response"]
    value, prose = find_object(reply, ("labels",))
    labels = _read(value, "labels", lambda item: (LABELS[item["label"]], item["word"].strip()))
    words = list(re.finditer(r"\S+", response))
    if [word for _, word in labels] != [word.group() for word in words]:
        raise FeedbackError("the labelled words are not those of the response, in order")
    spans = []
    for label, run in groupby(zip(labels, words), key=lambda pair: pair[0][0]):
        piece = [word for _, word in run]
        if label:
            spans.append(Span(piece[0].start(), piece[-1].end(), label))
    critique = read_critique(value, prose)
    check_characters("the reply", critique)
    return quoted(response, critique, spans), Grounding(spans)


DENSE = Mode(
    "Write a critique of a few sentences, then label every word of the response, in order and "
    "leaving none out: good, poor, or neutral where the critique says nothing of it. A word is "
    "what stands between white space.",
    {"textual_feedback": "…", "labels": [{"word": "…", "label": "|".join(LABELS)}]},
    read_labels, usual_tokens=1500, max_tokens=4096)


# ── Steps (Appendix N)

def read_steps(example: dict, reply: str) -> tuple[Feedback, Grounding]:
    """Quotes of the steps in order, each correct or not, with a reason.

    A step stands where it is found after the one before. One that is not found there is
    unmatched; the next must then have only one place left, or it is ambiguous. Neither gives a
    span. Raises FeedbackError where there are no steps.
    """
    response = example["response"]
    value, _ = find_object(reply, ("steps",))
    steps = _read(value, "steps", lambda item: (
        {True: "Correct", False: "Incorrect"}[item["correct"]], item["step"].strip(),
        item["reason"].strip()))
    critique = "\n".join(f"{said}: {step} ({reason})" for said, step, reason in steps)
    if not steps:
        raise FeedbackError("the list of steps is empty")
    check_characters("the reply", critique)
    spans, unmatched, ambiguous, at, lost = [], [], 0, 0, False
    for said, step, _ in steps:
        places = [place for place in normal_places(response, step) if place[0] >= at]
        if places and not (lost and places[1:]):
            start, at = places[0]
            spans.append(Span(start, at, 1 if said == "Correct" else -1))
            lost = False
        elif places:
            ambiguous += 1
        else:
            unmatched.append(step)
            lost = True                          # the next step may stand anywhere from here on
    return quoted(response, critique, spans), Grounding(spans, unmatched, ambiguous)


STEPS = Mode(
    "Divide the whole response into its steps, in order: sentences or clauses of a text, "
    "statements or blocks of a program. Quote each step, say in a few words what speaks for or "
    f"against it, then whether it is correct.\n{EXACT}.",
    {"steps": [{"step": "…", "reason": "…", "correct": True}]},
    read_steps, shows=("reference",), usual_tokens=500, max_tokens=4096)
