"""Span metrics: scores of R_φ's critiques, and statistics of annotated rows.

    python -m measures.spans --audit feedback.jsonl --output page.html   # tables and a page
    figures(total(compare(y, offsets, spans, readable(z, y)) for …))     # scores of R_φ

Paper: §3.3, §4.2, Appendix C, Figure 2; Tables 1, 6, 7, 11, 12, 14, 15, 16, 18 and 19.

Every metric of R_φ is a ratio of counts. The counts are summed over responses, so resampling
the responses gives a bootstrap interval. A critique that cannot be parsed predicts no spans. It
lowers the recall and is counted as `unparseable`.

The paper leaves some definitions open. In this file, gold and predicted spans of the same sign
are paired one to one, starting with the pair that overlaps most. A pair matches exactly if both
spans hold the same characters, without white space at the ends; otherwise it is partial. The
overlap index (Table 6) is intersection over union in characters, averaged over pairs. The
≥ 90 % overlap of Table 7 is relative to the longer span. A quote that is not in the response is
a prediction without a pair. People agree with a predicted span (Table 16) if they gave its
label to more than half of its characters.
"""

import argparse
import json
import os
import re
from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import chain, pairwise, product
from statistics import fmean
from typing import Callable

import numpy as np
from transformers import AutoTokenizer

from annotate import (Feedback, FeedbackError, Span, feedback_row, ground, parse_feedback,
                      token_offsets, token_rewards)
from data import InputError, read_rows, run_script
from model import encode_text
from policy import score_response
from report import LEGEND, card, heatmap, page, table, text_block, write_page
from reward_model import Judgement, count_tokens, read_judgement

SIGNS = {"good": 1, "poor": -1}
LABELS = {"1": 1, "good": 1, "-1": -1, "poor": -1}
MOST_ROWS = 300                                              # maximum number of rows on a page


# ── The spans of a row

def read_spans(row: dict, key: str = "spans") -> list[Span]:
    """The spans of a row, stored as [{start, end, label}].

    If a span has a `text`, the response must contain this text at its offsets. Raises
    InputError if a span does not fit the response.
    """
    response = row.get("response")
    values = row.get(key)
    if not (isinstance(response, str) and isinstance(values, list)):
        raise InputError(f"row {row.get('id')}: 'response' must be a text and {key!r} a list; "
                         f"annotate the row or remove it")
    spans = []
    for value in values:
        match value:
            case {"start": int(start), "end": int(end), "label": label} if (
                    0 <= start < end <= len(response) and str(label).lower() in LABELS
                    and value.get("text", response[start:end]) == response[start:end]):
                spans.append(Span(start, end, LABELS[str(label).lower()]))
            case _:
                raise InputError(
                    f"row {row.get('id')}: {value} is not a valid span; it needs 0 ≤ start < "
                    f"end ≤ {len(response)}, a label out of {', '.join(LABELS)}, and, if it "
                    f"has a 'text', the text of the response from start to end")
    return spans


def words(text: str) -> list[tuple[int, int]]:
    """Offsets [start, end) of every word, which is a run of characters without white space."""
    return [match.span() for match in re.finditer(r"\S+", text)]


def response_tokens(tokenizer, text: str) -> list[tuple[int, int]]:
    """Offsets of the tokens, or of the words if decoding the tokens does not give the text."""
    decoded, offsets = token_offsets(tokenizer, encode_text(tokenizer, text))
    return offsets if decoded == text else words(text)


def trimmed(text: str, span: Span) -> Span:
    """The span without white space at its ends. A span of only white space becomes empty."""
    piece = text[span.start : span.end]
    start = span.start + piece.index(piece.strip())
    return replace(span, start=start, end=start + len(piece.strip()))


def character_labels(response: str, spans: list[Span]) -> list[float]:
    """Label of each character: +1 if only good spans contain it, −1 if only poor, else 0."""
    return token_rewards(response, [(i, i + 1) for i in range(len(response))], spans)


def span_accuracy(response: str, span: Span, labels: list[float]) -> float:
    """Share of the span's visible characters that have the same label as it (Table 19)."""
    visible = [i for i in range(span.start, span.end) if not response[i].isspace()]
    return sum(labels[i] == span.label for i in visible) / max(1, len(visible))


def span_length(response: str, offsets, span: Span) -> int:
    """Number of tokens that overlap the span, ignoring white space at its ends (Table 18)."""
    span = trimmed(response, span)
    return sum(max(start, span.start) < min(end, span.end) for start, end in offsets)


# ── Scoring a critique against gold spans (§4.2)

def readable(critique: str, response: str = "") -> Feedback | None:
    """The feedback parsed from a critique of the response; None if it cannot be parsed."""
    try:
        return parse_feedback(critique, response=response)
    except FeedbackError:
        return None


def overlaps(response: str, gold: list[Span],
             predicted: list[Span]) -> list[tuple[float, float]]:
    """(shared / union, shared / longer) of each pair of spans, in characters (Appendix C).

    Spans are paired one to one, starting with the largest shared / union. White space at the
    ends of a span is ignored.
    """
    gold = [trimmed(response, span) for span in gold]
    predicted = [trimmed(response, span) for span in predicted]
    candidates = []
    for (i, marked_span), (j, span) in product(enumerate(gold), enumerate(predicted)):
        shared = min(marked_span.end, span.end) - max(marked_span.start, span.start)
        if shared > 0:
            lengths = [marked_span.end - marked_span.start, span.end - span.start]
            union = sum(lengths) - shared
            candidates.append((shared / union, shared / max(lengths), i, j))
    pairs = []
    while candidates:
        index, longer_share, i, j = max(candidates, key=lambda candidate: candidate[0])
        pairs.append((index, longer_share))
        candidates = [pair for pair in candidates if pair[2] != i and pair[3] != j]
    return pairs


def compare(response: str, offsets, gold: list[Span], feedback: Feedback | None) -> Counter:
    """The counts for one response, which can be added (Tables 1, 6, 7 and 16).

    feedback: None if the critique cannot be parsed. For each sign, there are tokens and spans
    that are marked in gold, predicted in the critique, or both ("hit"). "pairs" are those of
    `overlaps`, "near" has at least 90 % overlap, and "overlap" is the sum of the overlap
    indices. In an "agreed" span, people gave its label to more than half of the characters.
    """
    parsed = feedback or Feedback("", [], [])
    grounding = ground(response, parsed)
    labels = character_labels(response, gold)
    tokens = count_tokens(token_rewards(response, offsets, gold),
                          token_rewards(response, offsets, grounding.spans))
    counts = Counter(rows=1, unparseable=int(feedback is None),
                     quotes=len(parsed.good_spans + parsed.poor_spans),
                     unmatched=len(grounding.unmatched), ambiguous=grounding.ambiguous)
    for sign, quotes in (("good", parsed.good_spans), ("poor", parsed.poor_spans)):
        marked_spans = [span for span in gold if span.label == SIGNS[sign]]
        spans = [span for span in grounding.spans if span.label == SIGNS[sign]]
        pairs = overlaps(response, marked_spans, spans)
        marked_tokens = tokens[f"{sign} marked"]
        predicted_tokens = tokens[f"{sign} predicted"]
        counts.update({
            f"{sign} tokens marked": marked_tokens,
            f"{sign} tokens predicted": predicted_tokens,
            f"{sign} tokens mean": (marked_tokens + predicted_tokens) / 2,
            f"{sign} tokens hit": tokens[f"{sign} hit"],
            f"{sign} spans marked": len(marked_spans), f"{sign} spans predicted": len(quotes),
            f"{sign} pairs": len(pairs),
            f"{sign} exact": sum(index == 1 for index, _ in pairs),
            f"{sign} near": sum(longer_share >= 0.9 for _, longer_share in pairs),
            f"{sign} overlap": sum(index for index, _ in pairs),
            f"{sign} agreed": sum(span_accuracy(response, span, labels) > 0.5
                                  for span in spans)})
    return counts


def total(counts) -> Counter:
    """The sum of the counts of all responses."""
    return sum(counts, Counter())


# Metric → its numerator and its denominator in the counts.
FIGURES = {"unparseable": ("unparseable", "rows"), "unmatched": ("unmatched", "quotes"),
           "ambiguous": ("ambiguous", "quotes")}
_SIGN_FIGURES = {"precision": ("tokens hit", "tokens predicted"),                    # Table 1
                 "recall": ("tokens hit", "tokens marked"),
                 "f1": ("tokens hit", "tokens mean"),
                 "overlap_index": ("overlap", "pairs"),                              # Table 6
                 "exact": ("exact", "spans predicted"),                              # Table 7
                 "near": ("near", "spans predicted"),             # at least 90 % overlap
                 "agreement": ("agreed", "spans predicted")}                         # Table 16
FIGURES |= {f"{sign}_{key}": (f"{sign} {numerator}", f"{sign} {denominator}")
            for sign in SIGNS for key, (numerator, denominator) in _SIGN_FIGURES.items()}


def parts(counts: Counter) -> dict[str, tuple[float, float]]:
    """(numerator, denominator) of each metric in FIGURES (Tables 1, 6, 7 and 16)."""
    return {key: (counts[numerator], counts[denominator])
            for key, (numerator, denominator) in FIGURES.items()}


def figures(counts: Counter) -> dict[str, float | None]:
    """The value of each metric in FIGURES for summed counts (Tables 1, 6, 7 and 16).

    It is None if the denominator is 0, or if no response has a gold span of its sign, because
    some annotators mark only errors.
    """
    values = {key: numerator / denominator if denominator else None
              for key, (numerator, denominator) in parts(counts).items()}
    for sign in SIGNS:
        if not counts[f"{sign} spans marked"]:
            values |= {f"{sign}_{key}": None for key in _SIGN_FIGURES}
    return values


def span_table(counts: Counter) -> list[list]:  # Table 6
    """A line [sign, marked, predicted, exact, partial] for each sign."""
    return [[sign, counts[f"{sign} spans marked"], counts[f"{sign} spans predicted"],
             counts[f"{sign} exact"], counts[f"{sign} pairs"] - counts[f"{sign} exact"]]
            for sign in SIGNS]


def score_critiques(rows: list[dict], critiques: list[str], places: Callable | None,
                    critic: str) -> tuple[list[dict], dict[str, list], list[tuple]]:
    """Score critiques of the rows' responses against the spans of the rows.

    Returns the scored rows, metric → its counts for each row (Tables 1, 6, 7 and 16), and the
    tables 6, 15, 18 and 19 as from `audit`. A sign that no row has gets no metrics. critic:
    name of the model that wrote the critiques. places: as in `audit`.
    """
    gold_spans = [read_spans(row) for row in rows]
    labels = {span.label for span in chain(*gold_spans)}
    scored = []
    counts = []
    for row, gold, critique in zip(rows, gold_spans, critiques, strict=True):
        response = row["response"]
        parsed = readable(critique, response)
        counts.append(compare(response, (places or words)(response), gold, parsed))
        feedback = parsed or Feedback(critique, [], [])
        grounding = ground(response, feedback)
        spans = [span for span in grounding.spans if span.label in labels]
        scored.append({
            **feedback_row("", row, feedback, replace(grounding, spans=spans), critic),
            "reply": critique, "gold_spans": row["spans"],
            "reason": None if parsed else "this critique cannot be read"})
    summed = total(counts)
    defined = [key for key, value in figures(summed).items() if value is not None]
    metrics = {key: [parts(row)[key] for row in counts] for key in defined}
    tables = [("Table 6", ["spans", "marked", "predicted", "exact", "partial"],
               span_table(summed)),
              *audit([row for row in scored if not row["reason"]], places)[:2]]
    return scored, metrics, tables


# ── Token rewards of responses

def judge_texts(tokenizer, texts: list[str], critiques: list[str]) -> list[Judgement]:
    """The token rewards δ of each response by a critique of it (Alg. 4 l.13).

    As in training, EOS is the last token, and the critique of an empty response is not read.
    """
    judgements = []
    for text, critique in zip(texts, critiques, strict=True):
        offsets = [*response_tokens(tokenizer, text), (len(text), len(text))]
        judgements.append(read_judgement(critique if text.strip() else "", text, offsets))
    return judgements


def delta_scores(judgements: list[Judgement], critic: str) -> dict[str, list[float]]:
    """"METRIC, CRITIC" → its value for each judgement, as in the table of text2grad.py."""
    rows = [score_response(judgement, is_truncated=False) for judgement in judgements]
    return {f"{name}, {critic}": [row[name] for row in rows]
            for name in ("delta", "good", "poor", "unparseable")}


# ── The paper's tables of annotated rows, each as (title, header, lines)

def _shares(annotated: list[tuple], unit: str) -> tuple:
    """Table 15 and the shares of §3.3.

    annotated: (row, spans, offsets of the response's tokens or words) for each row.
    """
    labels = Counter()
    quotes = unmatched = ambiguous = 0
    for row, spans, offsets in annotated:
        labels.update(token_rewards(row["response"], offsets, spans))
        if "unmatched" in row:
            quotes += len(row["good_spans"] + row["poor_spans"])
            unmatched += len(row["unmatched"])
            ambiguous += row["ambiguous"]
    units = labels.total()
    lines = [["unmatched quotes", unmatched, quotes],
             ["ambiguous quotes", ambiguous, quotes],
             [f"good {unit}", labels[1], units],
             [f"poor {unit}", labels[-1], units],
             [f"labelled {unit}", labels[1] + labels[-1], units]]
    return ("Table 15 (paper: 0.93–2.47 % unmatched), §3.3 (about 30 % labelled)",
            ["", "number", "of", "%"],
            [[*line, 100 * line[1] / line[2] if line[2] else None] for line in lines])


def _by_length(annotated: list[tuple], unit: str) -> tuple:
    """Tables 18 and 19: the spans of each sign, grouped by the quartiles of their length."""
    measured = {sign: [] for sign in SIGNS.values()}     # [(length, accuracy in % or None)]
    for row, spans, offsets in annotated:
        response = row["response"]
        has_gold = "gold_spans" in row
        gold = character_labels(response, read_spans(row, "gold_spans")) if has_gold else []
        for span in spans:
            accuracy = 100 * span_accuracy(response, span, gold) if has_gold else None
            measured[span.label].append((span_length(response, offsets, span), accuracy))
    lines = []
    for name, sign in SIGNS.items():
        lengths = [length for length, _ in measured[sign]]
        cuts = [-1, *np.quantile(lengths, (0.25, 0.5, 0.75, 1))] if lengths else []
        for k, (low, high) in enumerate(pairwise(cuts), 1):
            quarter = [accuracy for length, accuracy in measured[sign] if low < length <= high]
            accuracies = [accuracy for accuracy in quarter if accuracy is not None]
            lines.append([f"{name}, quarter {k}", high, len(quarter), len(accuracies),
                          _mean(accuracies)])
    return (f"Table 18, Table 19: {unit} of a span, and its share with the true label",
            ["spans", f"{unit}, at most", "number", "with true labels", "right %"], lines)


def _mean(values: list[float]) -> float | None:
    return fmean(values) if values else None


def written_replies(row: dict) -> tuple[str, str]:
    """The feedback of a row in two forms, to compare their length (Tables 11 and 12).

    The first is a reply with span quotes, as R_φ writes it. The second has a label for every
    word, beside a copy of the word.
    """
    response = row["response"]
    places = words(response)
    signs = token_rewards(response, places, read_spans(row))
    labels = [{"word": response[start:end], "label": ("neutral", "good", "poor")[int(sign)]}
              for (start, end), sign in zip(places, signs)]
    quotes = Feedback(row["critique"], row["good_spans"], row["poor_spans"])
    return (quotes.text(),
            f"{row['critique']}\n{json.dumps({'labels': labels}, ensure_ascii=False)}")


def _costs(rows: list[dict], places: Callable | None) -> tuple:
    """Tables 12 and 14: length of the replies in both forms, and the cost of annotation."""
    split = places or re.compile(r"\w+|[^\w\s]").findall
    replies = [written_replies(row) for row in rows if "unmatched" in row]
    usages = [row["usage"] for row in rows if row.get("usage")]
    prices = [1000 * row["usd"] for row in rows if row.get("usd") is not None]
    columns = {"reply with spans": [len(split(spans)) for spans, _ in replies],
               "reply with a label a word": [len(split(dense)) for _, dense in replies],
               "tokens asked, billed": [usage["prompt_tokens"] for usage in usages],
               "tokens replied, billed": [usage["completion_tokens"] for usage in usages],
               "thousandths of a USD": prices}
    unit = "tokens" if places else "words and punctuation marks"
    return (f"Table 12, Table 14: {unit} of replies "
            "(paper: 6–8 × more with a label per word), and the bill",
            ["", "rows", "mean", "total"],
            [[name, len(values), _mean(values), sum(values) if values else None]
             for name, values in columns.items()])


def audit(rows: list[dict], places: Callable | None = None) -> list[tuple]:
    """Tables 12, 14, 15, 18 and 19 and the shares of §3.3, as (title, header, lines) each.

    rows: annotated rows with `spans`. Table 19 also needs the true spans, `gold_spans`. places:
    function from a text to the offsets of its tokens. None counts words instead, because an
    annotated row does not name a tokenizer.
    """
    annotated = [(row, read_spans(row), (places or words)(row["response"])) for row in rows]
    unit = "tokens" if places else "words"
    return [_shares(annotated, unit), _by_length(annotated, unit), _costs(rows, places)]


def audit_text(tables: list[tuple]) -> str:
    """The tables as text for a terminal."""
    return "\n\n".join(f"{title}\n{table(header, lines, digits=2)}"
                       for title, header, lines in tables)


# ── A page of annotated responses

def colour_spans(response: str, spans: list[Span]) -> str:
    """The response as HTML with coloured spans. Characters in spans of both signs are plain."""
    labels = character_labels(response, spans)
    cuts = {0, len(response), *(x for span in spans for x in (span.start, span.end))}
    places = [*pairwise(sorted(cuts))]
    pieces = [response[start:end] for start, end in places]
    return heatmap(pieces, [labels[start] for start, _ in places], 1)


def feedback_page(path, title: str, rows: list[dict]):  # Figure 2
    """Write a page with at most MOST_ROWS annotated responses and their critiques.

    Responses with unmatched quotes come first.
    """
    page_rows = sorted(rows, key=lambda row: not row.get("unmatched"))[:MOST_ROWS]
    body = (f"<p>{len(page_rows):,} of {len(rows):,} responses, those with unmatched quotes "
            f"first</p>")
    body += LEGEND
    for row in page_rows:
        columns = {"Response": colour_spans(row["response"], read_spans(row)),
                   "Critique": text_block(row.get("critique", ""))}
        if row.get("unmatched"):
            columns["Quotes that are not in the response"] = text_block(
                "\n".join(row["unmatched"]))
        body += card(f"{row.get('id', '')} · {row.get('annotator', '')}",
                     row.get("prompt", ""), columns)
    write_page(path, page(title, body))


# ── The script

def main():
    """Print tables of annotated rows, and write the rows as an HTML page."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--audit", metavar="FILE", required=True, help="annotated rows")
    parser.add_argument("--output", help="HTML page to write; None writes no page")
    parser.add_argument("--tokenizer", help="directory or hub id; None counts words")
    args = parser.parse_args()
    if os.path.realpath(args.output or "") == os.path.realpath(args.audit):
        raise InputError(f"--output must name another file than the rows {args.audit}")
    rows = read_rows(args.audit)
    places = None
    if args.tokenizer:
        tokenizer = AutoTokenizer.from_pretrained(args.tokenizer, trust_remote_code=False)
        places = partial(response_tokens, tokenizer)
    # eval.py sets `reason` if a critique cannot be parsed.
    readable_rows = [row for row in rows if not row.get("reason")]
    print(f"{audit_text(audit(readable_rows, places))}\n\n"
          f"{len(rows) - len(readable_rows)} rows without feedback were left out")
    if args.output:
        feedback_page(args.output, args.audit, readable_rows)


if __name__ == "__main__":
    run_script(main, "spans")
