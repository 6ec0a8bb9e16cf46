"""Spans: how well a critique finds them, the paper's tables on a file of them, people's own.

    python -m measures.spans --audit feedback.jsonl --output page.html   # tables; in colour
    python -m measures.spans --people marked.jsonl --output feedback.jsonl
    figures(total(compare(y, offsets, spans, readable(z, y)) for …))     # R_φ, over many y

Paper: §3.3, §4.2, Appendix C, Figure 2; Tables 1, 6, 7, 11, 12, 14, 15, 16, 18 and 19.

Every figure of R_φ is made of counts summed over responses, so that an interval needs no more
than those of resampled ones. A critique that cannot be read has found nothing: it costs
recall, and is counted.

What the paper does not define, as read here. Predicted and marked spans of one sign are paired
one to one, those first that share most. Exact: the same characters, white space at the ends
aside. Partial: any shared character. Overlap index (Table 6): shared characters over those of
either, averaged over pairs. ≥ 90 % overlap (Table 7): of the longer of the two. A quote that
is not in the response is a prediction without a pair. Agreement (Table 16): more than half of
a predicted span has the label that people gave.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from collections import Counter
from dataclasses import asdict, replace
from functools import partial
from itertools import groupby, pairwise, product
from statistics import fmean, median
from textwrap import shorten
from typing import Callable

import numpy as np
from transformers import AutoTokenizer

from annotate import (Feedback, FeedbackError, Grounding, Span, check_characters, feedback_row,
                      ground, parse_feedback, quoted, token_offsets, token_rewards)
from data import InputError, read_rows, run_script, write_rows
from report import card, heatmap, page, split_text, table, text_block, write_page
from reward_model import count_tokens

SIGNS = {"good": 1, "poor": -1}
LABELS = {"1": 1, "good": 1, "-1": -1, "poor": -1}
MOST_ROWS = 300                                                                    # of a page


# ── The spans of a row

def read_spans(row: dict, key: str = "spans") -> list[Span]:
    """The spans [{start, end, label}] that a row brings.

    Raises InputError for what its response cannot have; a `text` beside them must stand there.
    """
    response, spans, found = row.get("response"), row.get(key), []
    if not (isinstance(response, str) and isinstance(spans, list)):
        raise InputError(f"row {row.get('id')} needs a text 'response' and a list {key!r}")
    for span in spans:
        match span:
            case {"start": int(start), "end": int(end), "label": label} if (
                    0 <= start < end <= len(response) and str(label).lower() in LABELS
                    and span.get("text", response[start:end]) == response[start:end]):
                found.append(Span(start, end, LABELS[str(label).lower()]))
            case _:
                raise InputError(
                    f"row {row.get('id')}: {span} is no span; it needs 0 ≤ start < end ≤ "
                    f"{len(response)}, a label of {', '.join(LABELS)}, and its own `text`")
    return found


def words(text: str) -> list[tuple[int, int]]:
    """Characters [start, end) of every run without white space."""
    return [match.span() for match in re.finditer(r"\S+", text)]


def response_tokens(tokenizer, text: str) -> list[tuple[int, int]]:
    """Offsets of the tokens of a text; of its words where these do not spell it."""
    spelt, offsets = token_offsets(tokenizer, tokenizer.encode(
        text, add_special_tokens=False, verbose=False))
    return offsets if spelt == text else words(text)


def trimmed(text: str, span: Span) -> Span:
    """The span without the white space at its ends; empty where it has nothing else."""
    piece = text[span.start : span.end]
    start = span.start + piece.index(piece.strip())
    return replace(span, start=start, end=start + len(piece.strip()))


def character_labels(response: str, spans: list[Span]) -> list[float]:
    """Of each character: +1 in good spans only, −1 in poor spans only, else 0."""
    return token_rewards(response, [(i, i + 1) for i in range(len(response))], spans)


def span_accuracy(response: str, span: Span, labels: list[float]) -> float:
    """Share of the span's characters, spaces aside, that have its own label (Table 19)."""
    at = [i for i in range(span.start, span.end) if not response[i].isspace()]
    return sum(labels[i] == span.label for i in at) / max(1, len(at))


def span_length(response: str, offsets, span: Span) -> int:
    """How many tokens the span overlaps, without the white space at its ends (Table 18)."""
    span = trimmed(response, span)
    return sum(max(start, span.start) < min(end, span.end) for start, end in offsets)


# ── A critique against what somebody marked (§4.2)

def readable(critique: str, response: str = "") -> Feedback | None:
    """The feedback in a critique of the response, or None where it cannot be read."""
    try:
        return parse_feedback(critique, response=response)
    except FeedbackError:
        return None


def overlaps(response: str, gold: list[Span], said: list[Span]) -> list[tuple[float, float]]:
    """(shared / either, shared / longer) in characters of every pair (Appendix C), one to one,
    the greatest first; white space at the ends of a span counts for nothing."""
    gold, said = ([trimmed(response, span) for span in spans] for spans in (gold, said))
    shares, pairs = [], []
    for (i, one), (j, other) in product(enumerate(gold), enumerate(said)):
        shared = min(one.end, other.end) - max(one.start, other.start)
        if shared > 0:
            lengths = one.end - one.start, other.end - other.start
            shares.append((shared / (sum(lengths) - shared), shared / max(lengths), i, j))
    while shares:
        either, longer, i, j = max(shares, key=lambda share: share[0])
        pairs.append((either, longer))
        shares = [share for share in shares if share[2] != i and share[3] != j]
    return pairs


def compare(response: str, offsets, gold: list[Span], feedback: Feedback | None) -> Counter:
    """The counts of one response; feedback: None for a critique that nobody can read."""
    said = feedback or Feedback("", [], [])
    found, by_character = ground(response, said), character_labels(response, gold)
    counts = count_tokens(*(token_rewards(response, offsets, s) for s in (gold, found.spans)))
    counts.update(rows=1, unparseable=int(feedback is None), unmatched=len(found.unmatched),
                  ambiguous=found.ambiguous, quotes=len(said.good_spans + said.poor_spans))
    for name, sign in SIGNS.items():
        marked = [span for span in gold if span.label == sign]
        placed = [span for span in found.spans if span.label == sign]
        pairs = overlaps(response, marked, placed)
        right = [span_accuracy(response, span, by_character) for span in placed]
        exact = sum(either == 1 for either, _ in pairs)
        counts.update({
            f"{name} either": (counts[f"{name} marked"] + counts[f"{name} predicted"]) / 2,
            f"{name} spans marked": len(marked),
            f"{name} spans predicted": len(getattr(said, f"{name}_spans")),
            f"{name} pairs": len(pairs),
            f"{name} exact": exact,
            f"{name} near": sum(longer >= 0.9 for _, longer in pairs),
            f"{name} overlap": sum(either for either, _ in pairs),
            f"{name} agreed": sum(share > 0.5 for share in right)})
    return counts


def total(counts) -> Counter:
    """The sum over responses."""
    return sum(counts, Counter())


# Figure → (as people say it, the count above the line, the one below).
FIGURES = {
    "unparseable": ("critiques that cannot be read", "unparseable", "rows"),
    "unmatched": ("quotes that are not in the response", "unmatched", "quotes"),
    "ambiguous": ("quotes that stand there more than once", "ambiguous", "quotes")}
for _sign, (_key, *_texts) in product(SIGNS, (
        ("precision", "tokens, precision", "hit", "predicted"),                      # Table 1
        ("recall", "tokens, recall", "hit", "marked"),
        ("f1", "tokens, F1", "hit", "either"),
        ("overlap_index", "spans, overlap index", "overlap", "pairs"),               # Table 6
        ("exact", "spans, exact", "exact", "spans predicted"),                       # Table 7
        ("near", "spans, ≥ 90 % overlap", "near", "spans predicted"),
        ("agreement", "spans, people agree", "agreed", "spans predicted"))):         # Table 16
    FIGURES[f"{_sign}_{_key}"] = [f"{_sign} {text}" for text in _texts]


def parts(counts: Counter) -> dict[str, tuple[float, float]]:
    """Numerator and denominator of each of FIGURES (Tables 1, 6, 7 and 16)."""
    return {key: (counts[above], counts[below]) for key, (_, above, below) in FIGURES.items()}


def figures(counts: Counter) -> dict[str, float | None]:
    """FIGURES of summed counts (Tables 1, 6, 7 and 16); None where there is nothing to divide
    by, and of a sign that nobody marked in any response (people who only marked errors)."""
    unknown = tuple(f"{name}_" for name in SIGNS if not counts[f"{name} spans marked"])
    return {key: above / below if below and not key.startswith(unknown) else None
            for key, (above, below) in parts(counts).items()}


def span_table(counts: Counter) -> list[list]:  # Table 6
    """Sign, marked, predicted, exact, partial."""
    lines = []
    for name in SIGNS:
        columns = "spans marked", "spans predicted", "exact", "pairs"
        *most, exact, pairs = (counts[f"{name} {what}"] for what in columns)
        lines.append([name, *most, exact, pairs - exact])
    return lines


# ── The paper's tables on annotated rows: (title, header, lines) each

def _shares(found: list[tuple], unit: str) -> tuple:
    labels, counts = Counter(), Counter()
    for row, spans, offsets in found:
        labels.update(token_rewards(row["response"], offsets, spans))
        if "unmatched" in row:            # of people, quotes that are lost stand there alone
            given = Counter(row["good_spans"] + row["poor_spans"]) | Counter(row["unmatched"])
            counts.update(quotes=given.total(), unmatched=len(row["unmatched"]),
                          ambiguous=row["ambiguous"])
    every, quotes = labels.total(), counts["quotes"]
    lines = [["unmatched quotes", counts["unmatched"], quotes],
             ["ambiguous quotes", counts["ambiguous"], quotes],
             [f"good {unit}", labels[1], every], [f"poor {unit}", labels[-1], every],
             [f"labelled {unit}", labels[1] + labels[-1], every]]
    return ("Table 15 (paper: 0.93–2.47 % unmatched), §3.3 (about 30 % labelled)",
            ["", "number", "of", "%"],
            [[*line, 100 * line[1] / line[2] if line[2] else None] for line in lines])


def _by_length(found: list[tuple], unit: str) -> tuple:
    measured = {sign: [] for sign in SIGNS.values()}        # [(tokens, right % or None)]
    for row, spans, offsets in found:
        response, known = row["response"], "gold_spans" in row
        gold = character_labels(response, read_spans(row, "gold_spans")) if known else []
        for span in spans:
            right = 100 * span_accuracy(response, span, gold) if known else None
            measured[span.label].append((span_length(response, offsets, span), right))
    lines = []
    for name, sign in SIGNS.items():
        lengths = [length for length, _ in measured[sign]]
        cuts = [-1, *np.quantile(lengths, (0.25, 0.5, 0.75, 1))] if lengths else []
        for k, (low, high) in enumerate(pairwise(cuts), 1):
            inside = [right for length, right in measured[sign] if low < length <= high]
            known = [right for right in inside if right is not None]
            lines.append([f"{name}, quarter {k}", high, len(inside), len(known), _mean(known)])
    return (f"Table 18, Table 19: {unit} of a span, and how much of it is truly of its label",
            ["spans", f"{unit}, at most", "number", "of known truth", "right %"], lines)


def _mean(values: list[float]) -> float | None:
    return fmean(values) if values else None


def written_replies(row: dict) -> tuple[str, str]:
    """A row's reply with spans, as R_φ writes it, and one with a label for every word, where
    the word keeps the place (Tables 11 and 12)."""
    response, places = row["response"], words(row["response"])
    signs = token_rewards(response, places, read_spans(row))
    labels = [{"word": response[start:end], "label": ("neutral", "good", "poor")[int(sign)]}
              for (start, end), sign in zip(places, signs)]
    quotes = Feedback(row["critique"], row["good_spans"], row["poor_spans"])
    return (quotes.text(),
            f"{row['critique']}\n{json.dumps({'labels': labels}, ensure_ascii=False)}")


def _costs(found: list[tuple], places: Callable | None) -> tuple:
    rows = [row for row, _, _ in found]
    size = places or (lambda text: re.findall(r"\w+|[^\w\s]", text))
    replies = [written_replies(row) for row in rows if "unmatched" in row]
    billed = [row["usage"] for row in rows if row.get("usage")]
    values = {"reply with spans": [len(size(spans)) for spans, _ in replies],
              "reply with a label a word": [len(size(dense)) for _, dense in replies],
              "tokens asked, billed": [usage["prompt_tokens"] for usage in billed],
              "tokens replied, billed": [usage["completion_tokens"] for usage in billed],
              "thousandths of a USD": [1000 * row["usd"] for row in rows
                                       if row.get("usd") is not None]}
    return (f"Table 12, Table 14: {'tokens' if places else 'words and marks'} of replies "
            "(paper: 6–8 × with a label a word), and the bill", ["", "rows", "mean", "total"],
            [[name, len(known), _mean(known), sum(known) if known else None]
             for name, known in values.items()])


def audit(rows: list[dict], places: Callable | None = None) -> list[tuple]:
    """Tables 12, 14, 15, 18 and 19 and the shares of §3.3, for `audit_text` or a page.

    rows: with `spans`, and for Table 19 the true `gold_spans`. places: text → its tokens'
    offsets; without it words are counted, since a file of feedback names no tokenizer.
    """
    found = [(row, read_spans(row), (places or words)(row["response"])) for row in rows]
    unit = "tokens" if places else "words"
    return [_shares(found, unit), _by_length(found, unit), _costs(found, places)]


def audit_text(tables: list[tuple]) -> str:
    """The tables for a terminal."""
    return "\n\n".join(f"{title}\n{table(header, lines, digits=2)}"
                       for title, header, lines in tables)


# ── Annotated responses on a page

def colour_spans(response: str, spans: list[Span]) -> str:
    """The response as HTML with its good and poor spans in colour; what is in both is 0."""
    labels, cuts = character_labels(response, spans), {0, len(response)}
    for span in spans:
        cuts |= {span.start, span.end}
    places = [*pairwise(sorted(cuts))]
    values = [labels[start] for start, _ in places]
    return text_block(response, heatmap(split_text(response, places), values, 1))


def feedback_page(path, title: str, rows: list[dict]):  # Figure 2
    """Write a page of annotated responses, spans in colour beside the critique; MOST_ROWS of
    them, those with lost quotes first."""
    shown = sorted(rows, key=lambda row: not row.get("unmatched"))[:MOST_ROWS]
    body = f"<p>{len(shown):,} of {len(rows):,} responses, those with lost quotes first</p>"
    body += heatmap(["good, +1", " ", "poor, −1"], [1, 0, -1])
    for row in shown:
        columns = {"Response": colour_spans(row["response"], read_spans(row)),
                   "Critique": text_block(row.get("critique", ""))}
        lost = [f"unmatched: {quote}" for quote in row.get("unmatched", ())]
        body += card(f"{row.get('id', '')} · {row.get('annotator', '')}",
                     row.get("prompt", ""), columns, lost)
    write_page(path, page(title, body))


# ── What people marked

def read_people(rows: list[dict]) -> list[dict]:
    """What each person said of a response: {id, prompt, response, critique, annotator, spans,
    unmatched, ambiguous}.

    A row has these, with `spans` [{start, end, label}] or quotes, `good_spans` and
    `poor_spans`; or it is FineGrainedRLHF's, whose errors are poor spans. Rows that name no
    annotator are different people's. Raises InputError for another form.
    """
    said = []
    for number, row in enumerate(rows, 1):
        try:
            row = _finegrained(row) if "prediction 1" in row else row
            texts = {"id": str(row.get("id", number)), "prompt": row["prompt"],
                     "response": row["response"],
                     "critique": row.get("critique") or row.get("feedback") or "",
                     "annotator": str(row.get("annotator") or f"unnamed {number}")}
            check_characters("it", *texts.values())
            if not (texts["prompt"].strip() and texts["response"].strip()):
                raise InputError("its prompt or its response is empty")
            quotes = {kind: row.get(kind) for kind in ("good_spans", "poor_spans")}
            found = Grounding(read_spans(row)) if "spans" in row else ground(
                row["response"], parse_feedback(json.dumps(quotes), "of a person"))
        except (AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
            raise InputError(f"row {number} cannot be read: {error} ({type(error).__name__}); "
                             f"mend it or drop it") from error
        said.append(texts | asdict(found))
    return said


def _finegrained(row: dict) -> dict:
    """Each error as a poor span; the critique says what is wrong with it, what is missing."""
    response, passages = row["prediction 1"], row["passages"]
    errors = sorted(row["feedback"]["errors"], key=lambda error: error["start"])
    said = [] if errors else ["No part of the answer is marked as wrong."]

    def cite(text: str) -> str:                    # the beginning: the spans are quoted whole
        return f'"{shorten(text, 40, placeholder=" …")}"'

    def sentences(place: dict) -> str:
        passage = passages[place["passage_id"] - 1]
        return cite(" ".join(passage[number] for number in place["sentence_id"]))  # 0: a title

    for error in errors:
        kind, why = error["error type"], error["explanation"]
        grounded = why and kind == "Wrong-Grounding"
        why = sentences(json.loads(why)) if grounded else cite(why)
        quote = cite(response[error["start"] : error["end"]])
        said.append(f"{quote} is marked as {kind}: {why}".removesuffix(': ""'))
    for lack in row["feedback"]["missing-info"]:
        said.append(f"The answer has a {lack['error type']}: {sentences(lack)}")
    texts = []
    for title, *rest in passages:                      # the first sentence begins with it again
        text = " ".join(rest).removeprefix(f"{title}\n\n")
        texts.append(f"{title}\n{text}\n\n")
    return {**row, "response": response, "critique": "\n".join(said),
            "prompt": f"Answer the question from the passages.\n\n{''.join(texts)}"
                      f"Question: {row['question']}",
            "spans": [{**error, "label": -1} for error in errors]}


def merge(annotations: list[dict]) -> tuple[list[dict], float | None]:
    """A row of feedback for each response (Alg. 1 l.9–10), and how far its annotators agree:
    Krippendorff's α over all characters but spaces.

    The paper has one annotator, a model. People disagree, and what they disagree on must get 0,
    not the sign of whoever came last: a character has the sign that more than half gave it,
    which is what the median says.
    """
    groups, rows, units = {}, [], []
    for said in annotations:
        groups.setdefault((said["prompt"], said["response"]), []).append(said)
    for (_, response), group in groups.items():
        people = {said["annotator"]: [] for said in group}
        for said in group:
            people[said["annotator"]] += read_spans(said)
        votes = [*zip(*(character_labels(response, spans) for spans in people.values()))]
        units += [Counter(vote) for char, vote in zip(response, votes) if char.strip()]
        spans, end = [], 0
        for label, run in groupby(int(median(vote)) for vote in votes):
            start, end = end, end + len([*run])
            span = trimmed(response, Span(start, end, label))
            spans += [span] if label and span.start < span.end else []
        critique = "\n".join(sorted({said["critique"] for said in group} - {""}))
        found = Grounding(spans, [quote for said in group for quote in said["unmatched"]],
                          sum(said["ambiguous"] for said in group))
        rows.append(feedback_row("", group[0], quoted(response, critique, spans), found,
                                 "a person" if len(people) == 1 else f"{len(people)} people"))
    return rows, krippendorff_alpha(units)


def krippendorff_alpha(units: list[Counter]) -> float | None:
    """1 − observed / expected disagreement (nominal α, Krippendorff 2011); a unit holds how
    often each label was given. None where nothing can disagree."""
    def unlike(counts: Counter) -> float:
        """Ordered pairs of unlike labels, for each label."""
        pairs = counts.total() ** 2 - sum(number**2 for number in counts.values())
        return pairs / (counts.total() - 1)

    units = [unit for unit in units if unit.total() > 1]
    expected = unlike(total(units)) if units else 0
    return 1 - sum(map(unlike, units)) / expected if expected else None


# ── The script

def print_audit(path: str, output: str | None, tokenizer: str | None):
    """Print the tables of a file of annotated rows; write its rows as a page."""
    places, rows = None, read_rows(path)
    if tokenizer:
        places = partial(response_tokens, AutoTokenizer.from_pretrained(tokenizer))
    read = [row for row in rows if not row.get("reason")]     # of others eval.py read nothing
    print(f"{audit_text(audit(read, places))}\n\n"
          f"{len(rows) - len(read)} rows without feedback left out")
    if output:
        feedback_page(output, path, read)


def merge_people(path: str, output: str):
    """Write what people marked as rows of feedback, and say how far they agree."""
    rows, alpha = merge(read_people(read_rows(path)))
    write_rows(output, rows)
    mute = sum(not row["critique"] for row in rows)
    print(f"{output}: {len(rows)} responses, {mute} of them without a critique, which "
          f"reward_model.py needs; Krippendorff's alpha {'–' if alpha is None else alpha:.3}")


def main():
    """Print the tables of annotated rows, or read what people marked."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--audit", metavar="FILE", help="annotated rows: the paper's tables")
    what.add_argument("--people", metavar="FILE", help="rows that people marked: merge them")
    parser.add_argument("--output", help="of the audit a page, of people's rows the merged")
    parser.add_argument("--tokenizer", help="directory of one; without it words are counted")
    args = parser.parse_args()
    source, output = args.audit or args.people, args.output
    if os.path.realpath(output or "") == os.path.realpath(source) or args.people and not output:
        raise InputError(f"name a file to write with --output, and not {source} itself")
    if args.people:
        merge_people(source, output)
    else:
        print_audit(source, output, args.tokenizer)


if __name__ == "__main__":
    run_script(main, "spans")
