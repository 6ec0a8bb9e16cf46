"""Two more annotator modes: labels for every word (Table 11) and for steps (Appendix N).

    python annotate.py --task slf5k --data rows.jsonl --mode experiments.modes:DENSE
    python annotate.py --task kodcode --data rows.jsonl --mode experiments.modes:STEPS

A `Mode` of annotate.py holds the instruction, the form of the reply, and a function that reads
the reply. Both modes produce spans, so the later phases do not change.
"""

import re
from dataclasses import replace

from annotate import (EXACT, Feedback, FeedbackError, Grounding, Mode, Span, find_object,
                      find_quote, find_critique)

LABELS = {"good": 1, "neutral": 0, "poor": -1}


def quoted(response: str, critique: str, spans: list[Span]) -> Feedback:
    """Feedback that quotes the text of each span."""
    good = [response[span.start : span.end] for span in spans if span.label > 0]
    poor = [response[span.start : span.end] for span in spans if span.label < 0]
    return Feedback(critique, good, poor)


def _read_items(value: dict, key: str, read) -> list[tuple]:
    """Apply read(item) to each item of the list value[key].

    Raises FeedbackError if value[key] is not a list, or if read(item) fails for an item.
    """
    try:
        return [read(item) for item in value[key]]
    except (AttributeError, LookupError, TypeError) as error:
        raise FeedbackError(f"{key!r} must be a list of objects with the fields that the "
                            f"instruction names ({type(error).__name__}: {error})") from error


# ── Dense labels (Table 11)

def read_labels(example: dict, reply: str) -> tuple[Feedback, Grounding]:
    """Read spans from a reply with one label per word of the response, in order (Table 11).

    Neighbouring words with the same label form one span; "neutral" words are in no span. Raises
    FeedbackError if the labelled words differ from the words of the response.
    """
    response = example["response"]
    value, prose = find_object(reply, ("labels",))
    words = _read_items(value, "labels", lambda item: item["word"].strip())
    labels = _read_items(value, "labels", lambda item: LABELS[item["label"]])
    matches = list(re.finditer(r"\S+", response))
    if words != [match[0] for match in matches]:
        raise FeedbackError("the labelled words differ from the words of the response")
    spans = []
    previous_label = 0
    for label, match in zip(labels, matches):
        if label and label == previous_label:
            spans[-1] = replace(spans[-1], end=match.end())
        elif label:
            spans.append(Span(match.start(), match.end(), label))
        previous_label = label
    return quoted(response, find_critique(value, prose), spans), Grounding(spans)


DENSE = Mode(
    "Write a critique of a few sentences, then label every word of the response, in order and "
    "leaving none out: good, poor, or neutral where the critique says nothing of it. A word is "
    "what stands between white space.",
    {"textual_feedback": "…", "labels": [{"word": "…", "label": "|".join(LABELS)}]},
    read_labels, max_tokens=4096)


# ── Steps (Appendix N)

def read_steps(example: dict, reply: str) -> tuple[Feedback, Grounding]:
    """Read spans from a reply that quotes and judges every step, in order (Appendix N).

    The search for a step begins at the end of the step before, and the first match is used.
    Raises FeedbackError if there are no steps, or if a step is not in the response.
    """
    response = example["response"]
    value, _ = find_object(reply, ("steps",))
    verdicts = {True: "Correct", False: "Incorrect"}
    steps = _read_items(value, "steps", lambda item: (
        verdicts[item["correct"]], item["step"].strip(), item["reason"].strip()))
    critique = "\n".join(f"{verdict}: {step} ({reason})"
                         for verdict, step, reason in steps)
    if not steps:
        raise FeedbackError("the list of steps is empty")
    spans = []
    position = 0                                 # end of the step before
    for verdict, step, _ in steps:
        places = [place for place in find_quote(response, step) if place[0] >= position]
        if not places:
            raise FeedbackError(f"the step {step!r} does not follow in the response")
        start, position = places[0]
        spans.append(Span(start, position, 1 if verdict == "Correct" else -1))
    return quoted(response, critique, spans), Grounding(spans)


STEPS = Mode(
    "Divide the whole response into its steps, in order: sentences or clauses of a text, "
    "statements or blocks of a program. Quote each step, say in a few words what speaks for or "
    f"against it, then whether it is correct.\n{EXACT}.",
    {"steps": [{"step": "…", "reason": "…", "correct": True}]},
    read_steps, shows=("reference",), max_tokens=4096)
