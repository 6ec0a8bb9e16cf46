"""Two more annotator modes: a label for every word (Table 11), and steps (Appendix N).

    python annotate.py --task slf5k --data rows.jsonl --mode experiments.modes:DENSE
    python annotate.py --task kodcode --data rows.jsonl --mode experiments.modes:STEPS

A `Mode` of annotate.py holds the instruction, the form of the reply, and a function that reads
the reply. Both modes produce spans, so the later phases do not change.
"""

from __future__ import annotations

import re
from itertools import groupby

from annotate import (EXACT, Feedback, FeedbackError, Grounding, Mode, Span, check_characters,
                      find_object, normal_places, quoted, read_critique)

LABELS = {"good": 1, "neutral": 0, "poor": -1}


def _read_items(value: dict, key: str, read) -> list[tuple]:
    """read(item) for each item of value[key].

    Raises FeedbackError where value[key] is not a list of objects in the form of the mode.
    """
    try:
        return [read(item) for item in value[key]]
    except (AttributeError, LookupError, TypeError) as error:
        raise FeedbackError(f"{key!r} is not a list of objects in the form of the instruction "
                            f"({type(error).__name__}: {error})") from error


# ── Dense labels (Table 11)

def read_labels(example: dict, reply: str) -> tuple[Feedback, Grounding]:
    """Spans from one label per word of the response, in order (Table 11).

    Neighbouring words with the same label form one span; "neutral" gives none. Raises
    FeedbackError where the labelled words differ from the words of the response.
    """
    response = example["response"]
    value, prose = find_object(reply, ("labels",))
    labels = _read_items(value, "labels", lambda item: (
        LABELS[item["label"]], item["word"].strip()))
    words = list(re.finditer(r"\S+", response))
    if [word for _, word in labels] != [word.group() for word in words]:
        raise FeedbackError("the labelled words must be the words of the response, in order")
    spans = []
    for label, group in groupby(zip(labels, words), key=lambda pair: pair[0][0]):
        matches = [match for _, match in group]
        if label:
            spans.append(Span(matches[0].start(), matches[-1].end(), label))
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
    """Spans from quoted steps in order, each correct or not, with a reason (Appendix N).

    Each step is searched after the end of the previous step, and the first match is used. A
    step without a match is unmatched. The next step must then match only once, or else it is
    ambiguous. Unmatched and ambiguous steps give no span. Raises FeedbackError where the list
    of steps is empty.
    """
    response = example["response"]
    value, _ = find_object(reply, ("steps",))
    steps = _read_items(value, "steps", lambda item: (
        {True: "Correct", False: "Incorrect"}[item["correct"]], item["step"].strip(),
        item["reason"].strip()))
    critique = "\n".join(f"{verdict}: {step} ({reason})" for verdict, step, reason in steps)
    if not steps:
        raise FeedbackError("the list of steps is empty")
    check_characters("the reply", critique)
    spans = []
    unmatched = []
    ambiguous = 0
    position = 0                                 # end of the last step that was matched
    is_lost = False                              # the previous step was not matched
    for verdict, step, _ in steps:
        places = [place for place in normal_places(response, step) if place[0] >= position]
        if not places:
            unmatched.append(step)
            is_lost = True
        elif is_lost and len(places) > 1:
            ambiguous += 1
        else:
            start, position = places[0]
            spans.append(Span(start, position, 1 if verdict == "Correct" else -1))
            is_lost = False
    return quoted(response, critique, spans), Grounding(spans, unmatched, ambiguous)


STEPS = Mode(
    "Divide the whole response into its steps, in order: sentences or clauses of a text, "
    "statements or blocks of a program. Quote each step, say in a few words what speaks for or "
    f"against it, then whether it is correct.\n{EXACT}.",
    {"steps": [{"step": "…", "reason": "…", "correct": True}]},
    read_steps, shows=("reference",), usual_tokens=500, max_tokens=4096)
