"""Span metrics: scores of R_φ's critiques on annotated rows.

    figures(total([compare(y, offsets, spans, readable(z, y)) for …]))   # scores of R_φ

Paper: §3.3, §4.2, Appendix C; Tables 1, 6, 7, 11, 15 and 16.

Every metric of R_φ is a ratio, hits / cases. Both are counted for each response and summed over
the responses, so resampling the responses gives a bootstrap interval. A critique that cannot be
parsed predicts no spans. It lowers the recall and is counted as `unparseable`.

The paper leaves some definitions open. In this file, gold spans (those of the annotated rows)
and predicted spans of the same sign are paired one to one, starting with the pair that overlaps
most. A pair matches exactly if both spans hold the same characters, without white space at the
ends; otherwise it is partial. The overlap index (Table 6) is intersection over union in
characters, averaged over pairs. The ≥ 90 % overlap of Table 7 is relative to the longer span. A
quote that is not in the response, or that is ambiguous, is a prediction without a pair. People
agree with a predicted span (Table 16) if they gave its label to more than half of its visible
characters.
"""

import re
from collections import Counter
from contextlib import suppress
from dataclasses import asdict
from itertools import chain, product
from typing import Callable

import numpy as np

from annotate import (Feedback, FeedbackError, Span, ground, parse_feedback, token_offsets,
                      token_rewards)
from data import InputError
from model import encode_text
from report import count_tokens, table

SIGNS = {"good": 1, "poor": -1}


# ── The spans of a row

def read_spans(row: dict) -> list[Span]:
    """The spans of a row, stored as [{start, end, label}].

    If a span has a `text`, the response must contain this text at its offsets. Raises
    InputError if a span does not fit the response.
    """
    response = row["response"]
    spans = []
    for value in row["spans"]:
        match value:
            case {"start": int(start), "end": int(end),
                  "label": 1 | -1 | "good" | "poor" as label} if (
                    0 <= start < end <= len(response)
                    and value.get("text", response[start:end]) == response[start:end]):
                spans.append(Span(start, end, SIGNS.get(label, label)))
            case _:
                raise InputError(
                    f"row {row.get('id')}: {value} is not a valid span; it needs 0 ≤ start < "
                    f"end ≤ {len(response)}, label 1, -1, good or poor, and, if it has a "
                    f"'text', the response's text there")
    return spans


def words(text: str) -> list[tuple]:
    """Offsets [start, end) of every word, which is a run of characters without white space."""
    return [match.span() for match in re.finditer(r"\S+", text)]


def response_tokens(tokenizer, text: str) -> list[tuple]:
    """Offsets of the tokens, or of the words if decoding the tokens does not give the text."""
    decoded, offsets = token_offsets(tokenizer, encode_text(tokenizer, text))
    return offsets if decoded == text else words(text)


def characters(text: str, span: Span) -> set[int]:
    """The indices of the span's characters, without white space at its ends."""
    piece = text[span.start : span.end]
    start = span.start + piece.index(piece.strip())
    return {*range(start, start + len(piece.strip()))}


def character_labels(response: str, spans: list[Span]) -> list[float]:
    """Label of each character: +1 if only good spans contain it, −1 if only poor, else 0."""
    return token_rewards(response, [(i, i + 1) for i in range(len(response))], spans)


def span_accuracy(response: str, span: Span, labels: list[float]) -> float:
    """Share of the span's visible characters whose label is that of the span (Table 16)."""
    right = [labels[i] == span.label for i in range(span.start, span.end)
             if not response[i].isspace()]
    return sum(right) / max(1, len(right))


def overlaps(response: str, gold: list[Span], predicted: list[Span]) -> list[tuple]:
    """(shared / union, shared / longer) of each pair of spans, in characters (Appendix C).

    Spans are paired one to one, starting with the largest shared / union. White space at the
    ends of a span is ignored.
    """
    candidates = []
    for (i, marked_span), (j, span) in product(enumerate(gold), enumerate(predicted)):
        marked = characters(response, marked_span)
        found = characters(response, span)
        shared = len(marked & found)
        if shared:
            candidates.append((shared / len(marked | found),
                               shared / max(len(marked), len(found)), i, j))
    pairs = []
    while candidates:
        index, longer_share, i, j = max(candidates, key=lambda candidate: candidate[0])
        pairs.append((index, longer_share))
        candidates = [pair for pair in candidates if pair[2] != i and pair[3] != j]
    return pairs


def compare(response: str, offsets, gold: list[Span], feedback: Feedback | None) -> dict:
    """Metric → (hits, cases) of one response (Tables 1, 6, 7 and 16).

    feedback: None if the critique cannot be parsed. The metrics of each sign count tokens or
    spans that are marked in gold, predicted in the critique, or both.
    """
    parsed = feedback or Feedback("", [], [])
    grounding = ground(response, parsed)
    labels = character_labels(response, gold)
    tokens = count_tokens(token_rewards(response, offsets, gold),
                          token_rewards(response, offsets, grounding.spans))
    quotes = len(parsed.good_spans + parsed.poor_spans)
    hits = {"unparseable": (feedback is None, 1),
            "unmatched": (len(grounding.unmatched), quotes),
            "ambiguous": (grounding.ambiguous, quotes)}
    for sign, quoted in (("good", parsed.good_spans), ("poor", parsed.poor_spans)):
        marked_spans = [span for span in gold if span.label == SIGNS[sign]]
        spans = [span for span in grounding.spans if span.label == SIGNS[sign]]
        pairs = overlaps(response, marked_spans, spans)
        agreed = [span_accuracy(response, span, labels) > 0.5 for span in spans]
        sign_hits = {
            "precision": (tokens[f"{sign} hit"], tokens[f"{sign} predicted"]),        # Table 1
            "recall": (tokens[f"{sign} hit"], tokens[f"{sign} marked"]),
            "overlap_index": (sum(index for index, _ in pairs), len(pairs)),          # Table 6
            "found": (len(pairs), len(marked_spans)),               # exactly or partially
            "exact": (sum(index == 1 for index, _ in pairs), len(quoted)),            # Table 7
            "near": (sum(longer_share >= 0.9 for _, longer_share in pairs), len(quoted)),
            "agreement": (sum(agreed), len(quoted))}                                  # Table 16
        hits |= {f"{sign}_{metric}": pair for metric, pair in sign_hits.items()}
    return hits


def span_table(counts: dict) -> list[list]:  # Table 6
    """A line [sign, marked, predicted, exact, partial] for each sign."""
    lines = []
    for sign in SIGNS:
        found, marked = counts[f"{sign}_found"]
        exact, predicted = counts[f"{sign}_exact"]
        lines.append([sign, marked, predicted, exact, found - exact])
    return lines


def score_critiques(rows: list[dict], critiques: list[str], places: Callable | None,
                    critic: str) -> tuple:
    """Score critiques of the rows' responses against the spans of the rows.

    Returns the scored rows, metric → its (hits, cases) for each row (Tables 1, 6, 7 and 16),
    and the tables 6 and 15. Some annotators mark only errors. So if no row has a span of one
    sign, the quotes of this sign are left out. critic: name of the model that wrote the
    critiques. places: as in `label_table`.
    """
    gold_spans = [read_spans(row) for row in rows]
    labels = {span.label for span in chain(*gold_spans)}
    scored = []
    counts = []
    for row, gold, critique in zip(rows, gold_spans, critiques, strict=True):
        response = row["response"]
        parsed = None                                    # if the critique cannot be parsed
        with suppress(FeedbackError):
            parsed = parse_feedback(critique, response=response)
        feedback = parsed or Feedback(critique, [], [])
        feedback = Feedback(feedback.critique, feedback.good_spans if 1 in labels else [],
                            feedback.poor_spans if -1 in labels else [])
        counts.append(compare(response, (places or words)(response), gold, parsed and feedback))
        scored.append(row | asdict(feedback) | asdict(ground(response, feedback)) | {
            "annotator": critic, "reply": critique, "gold_spans": row["spans"],
            "reason": None if parsed else "this critique cannot be read"})
    # The sum over all responses: metric → [hits, cases]
    summed = {metric: np.sum([row[metric] for row in counts], 0) for metric in counts[0]}
    metrics = {metric: [row[metric] for row in counts]
               for metric, (_, cases) in summed.items() if cases}
    tables = [("Table 6", ["spans", "marked", "predicted", "exact", "partial"],
               span_table(summed)),
              label_table([row for row in scored if not row["reason"]], places)]
    return scored, metrics, tables


# ── The paper's tables of annotated rows, each as (title, header, lines)

def label_table(rows: list[dict], places: Callable | None = None) -> tuple:
    """Table 15 and the shares of §3.3, as (title, header, lines).

    rows: annotated rows with `spans`. places: function from a text to the offsets of its
    tokens. None counts words instead.
    """
    unit = "tokens" if places else "words"
    labels = Counter()
    quotes = unmatched = ambiguous = 0
    for row in rows:
        offsets = (places or words)(row["response"])
        labels.update(token_rewards(row["response"], offsets, read_spans(row)))
        if "unmatched" in row:
            quotes += len(row["good_spans"] + row["poor_spans"])
            unmatched += len(row["unmatched"])
            ambiguous += row["ambiguous"]
    units = labels.total()
    shares = (("unmatched quotes", unmatched, quotes), ("ambiguous quotes", ambiguous, quotes),
              (f"good {unit}", labels[1], units), (f"poor {unit}", labels[-1], units),
              (f"labelled {unit}", labels[1] + labels[-1], units))
    return ("Table 15, §3.3: quotes without a place, and labels",
            ["", "number", "of", "%"],
            [[name, hits, cases, 100 * hits / cases if cases else None]
             for name, hits, cases in shares])


def tables_text(tables: list[tuple]) -> str:
    """The tables as text for a terminal."""
    return "\n\n".join(f"{title}\n{table(header, lines, digits=2)}"
                       for title, header, lines in tables)
