"""One more annotator mode: a label for every word (Table 11).

    python annotate.py --task slf5k --data rows.jsonl --mode experiments.modes:DENSE

A `Mode` of annotate.py holds the instruction, the form of the reply, and a function that reads
the reply. This mode produces spans, so the later phases do not change.
"""

import re
from dataclasses import replace

from annotate import (Feedback, FeedbackError, Grounding, Mode, Span, find_critique,
                      find_object)

LABELS = {"good": 1, "neutral": 0, "poor": -1}


def quoted(response: str, critique: str, spans: list[Span]) -> Feedback:
    """Feedback that quotes the text of each span."""
    good = [response[span.start : span.end] for span in spans if span.label > 0]
    poor = [response[span.start : span.end] for span in spans if span.label < 0]
    return Feedback(critique, good, poor)


def read_labels(example: dict, reply: str) -> tuple[Feedback, Grounding]:
    """Read spans from a reply with one label per word of the response, in order (Table 11).

    Neighbouring words with the same label form one span; "neutral" words are in no span. Raises
    FeedbackError if "labels" is not a list of words with labels, or if these words differ from
    the words of the response.
    """
    response = example["response"]
    value, prose = find_object(reply, ("labels",))
    try:
        words = [item["word"].strip() for item in value["labels"]]
        labels = [LABELS[item["label"]] for item in value["labels"]]
    except (AttributeError, LookupError, TypeError) as error:
        raise FeedbackError(f"'labels' must be a list of objects with the fields that the "
                            f"instruction names ({type(error).__name__}: {error})") from error
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
