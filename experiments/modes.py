"""Other ways to ask the annotator: a label for every word (Table 11), and steps (Appendix N).

    python annotate.py --task slf5k --data rows.jsonl --mode experiments.modes:DENSE
    python annotate.py --task kodcode --data rows.jsonl --mode experiments.modes:STEPS

A `Mode` of annotate.py is an instruction, the form of the reply, and how it is read. Both end
in spans, so that every phase behind goes on as with the paper's method.
"""

from __future__ import annotations

import re
from itertools import groupby, islice

from annotate import (EXACT, Feedback, FeedbackError, Grounding, Mode, Span, check_characters,
                      find_object, normal_places, quoted, read_critique)

LABELS = {"good": 1, "neutral": 0, "poor": -1}


def _items(value: dict, key: str, types: dict[str, type]) -> list[dict]:
    """A list of objects with fields of these types; FeedbackError names the first other one."""
    items = value[key]
    if not isinstance(items, list):
        raise FeedbackError(f"{key!r} must be a list of objects, not a {type(items).__name__}")
    for number, item in enumerate(items, 1):
        fits = isinstance(item, dict) and all(isinstance(item.get(name), kind)
                                              for name, kind in types.items())
        if not fits:
            names = ", ".join(f"{name} ({kind.__name__})" for name, kind in types.items())
            raise FeedbackError(f"entry {number} of {key!r} must have {names}")
    return items


# ── Dense labels (Table 11)

def read_labels(example: dict, reply: str) -> tuple[Feedback, Grounding]:
    """One label for every word of the response, in order; neighbours of one label are one span.

    Raises FeedbackError where the words are not the response's.
    """
    response = example["response"]
    value, prose = find_object(reply, ("labels",))
    labels = _items(value, "labels", {"word": str, "label": str})
    words = list(re.finditer(r"\S+", response))
    if len(labels) != len(words):
        raise FeedbackError(f"{len(labels)} labels for the {len(words)} words of the response")
    for number, (item, word) in enumerate(zip(labels, words), 1):
        if item["word"].strip() != word.group() or item["label"] not in LABELS:
            raise FeedbackError(f"label {number} says {item['label']!r} of {item['word']!r}; "
                                f"the word is {word.group()!r}")
    spans = []
    labelled = zip((LABELS[item["label"]] for item in labels), words)
    for label, run in groupby(labelled, key=lambda pair: pair[0]):
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
    steps = _items(value, "steps", {"step": str, "reason": str, "correct": bool})
    if not steps:
        raise FeedbackError("the list of steps is empty")
    texts = [item[name] for item in steps for name in ("step", "reason")]
    check_characters("the reply", *texts)
    spans, unmatched, ambiguous, at, lost = [], [], 0, 0, False
    for item in steps:
        found = (place for place in normal_places(response, item["step"]) if place[0] >= at)
        places = list(islice(found, 2))
        if not places:
            unmatched.append(item["step"])
            lost = True                          # the next step may stand anywhere from here on
        elif lost and len(places) > 1:
            ambiguous += 1
        else:
            start, at = places[0]
            spans.append(Span(start, at, 1 if item["correct"] else -1))
            lost = False
    says = ("Correct" if item["correct"] else "Incorrect" for item in steps)
    critique = "\n".join(f"{said}: {item['step']} ({item['reason']})"
                         for said, item in zip(says, steps))
    return quoted(response, critique, spans), Grounding(spans, unmatched, ambiguous)


STEPS = Mode(
    "Divide the whole response into its steps, in order: sentences or clauses of a text, "
    "statements or blocks of a program. Quote each step, say in a few words what speaks for or "
    f"against it, then whether it is correct.\n{EXACT}.",
    {"steps": [{"step": "…", "reason": "…", "correct": True}]},
    read_steps, shows=("reference",), usual_tokens=500, max_tokens=4096)
