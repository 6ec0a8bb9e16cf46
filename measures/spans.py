"""Spans: how well a critique finds them, the paper's tables on a file of them, people's own.

    python -m measures.spans --audit feedback.jsonl --html page.html     # tables; in colour
    python -m measures.spans --people marked.jsonl --output feedback.jsonl
    figures(total(compare(y, offsets, spans, readable(z, y)) for …))     # R_φ, over many y

Paper: §3.3, §4.2, Appendix C, Figure 2; Tables 1, 6, 7, 11, 12, 14, 15, 16, 18 and 19.

Every figure of R_φ is made of counts summed over responses, so that an interval needs no more
than those of resampled ones. A critique that cannot be read has found nothing: it costs
recall, scores 0 in the F1 by response, and is counted.

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
from html import escape
from itertools import groupby, pairwise, product
from statistics import fmean
from textwrap import shorten
from typing import Callable

import numpy as np

from annotate import (Feedback, FeedbackError, Grounding, Span, check_characters,
                      conflicting_tokens, feedback_row, ground, parse_feedback, quoted,
                      token_offsets, token_rewards)
from data import InputError, read_rows, run_script, write_rows
from report import card, heatmap, html_table, page, split_text, table, text_block, write_page
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
                    f"{len(response)}, where its `text` stands if it has one, and a label of "
                    f"{', '.join(LABELS)}")
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


def character_labels(response: str, spans: list[Span]) -> list[int]:
    """Of each character: +1 in good spans only, −1 in poor spans only, else 0."""
    found: list[set[int]] = [set() for _ in response]
    for span in spans:
        for labels in found[span.start : span.end]:
            labels.add(span.label)
    return [sum(labels) for labels in found]


def span_accuracy(response: str, span: Span, labels: list[int]) -> float:
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


def compare(response: str, offsets, gold: list[Span], feedback: Feedback | None,
            signs=frozenset(SIGNS)) -> Counter:
    """The counts of one response; feedback: None for a critique that nobody can read.

    signs: those that somebody marked in the corpus; whether others are right nobody knows, so
    they do not enter the F1 by response.
    """
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
            f"{name} spans marked": len(marked),
            f"{name} spans predicted": len(getattr(said, f"{name}_spans")),
            f"{name} exact": exact,
            f"{name} partial": len(pairs) - exact,
            f"{name} near": sum(longer >= 0.9 for _, longer in pairs),
            f"{name} overlap": sum(either for either, _ in pairs),
            f"{name} agreed": sum(share > 0.5 for share in right)})
    hit = sum(counts[f"{name} hit"] for name in signs)
    either = sum(counts[f"{name} marked"] + counts[f"{name} predicted"] for name in signs)
    # Where nothing was to be found, silence is right.
    counts["f1 of rows"] = 2 * hit / either if either else float(feedback is not None)
    return counts


def total(counts) -> Counter:
    """The sum over responses; counts of nothing stay."""
    out = Counter()
    for one in counts:
        out.update(one)
    return out


# Figure → (as people say it, the counts above the line, those below); {} is good or poor.
_TEMPLATES = {
    "row_f1": ("F1 of a response, mean", "f1 of rows", "rows"),
    "unparseable": ("critiques that cannot be read", "unparseable", "rows"),
    "unmatched": ("quotes that are not in the response", "unmatched", "quotes"),
    "ambiguous": ("quotes that stand there more than once", "ambiguous", "quotes"),
    "{}_precision": ("{} tokens, precision", "{} hit", "{} predicted"),              # Table 1
    "{}_recall": ("{} tokens, recall", "{} hit", "{} marked"),
    "{}_f1": ("{} tokens, F1", "{} hit + {} hit", "{} marked + {} predicted"),
    "{}_overlap_index": (                                                            # Table 6
        "{} spans, overlap index", "{} overlap", "{} exact + {} partial"),
    "{}_exact": ("{} spans, exact", "{} exact", "{} spans predicted"),               # Table 7
    "{}_near": ("{} spans, ≥ 90 % overlap", "{} near", "{} spans predicted"),
    "{}_agreement": (                                                                # Table 16
        "{} spans, people agree", "{} agreed", "{} spans predicted"),
}
FIGURES = {}
for _sign, (_key, _texts) in product(SIGNS, _TEMPLATES.items()):
    FIGURES[_key.replace("{}", _sign)] = [text.replace("{}", _sign) for text in _texts]


def parts(counts: Counter) -> dict[str, tuple[float, float]]:
    """Numerator and denominator of each of FIGURES (Tables 1, 6, 7 and 16)."""
    def summed(names: str) -> float:
        return sum(counts[name] for name in names.split(" + "))

    return {key: (summed(above), summed(below)) for key, (_, above, below) in FIGURES.items()}


def figures(counts: Counter) -> dict[str, float | None]:
    """FIGURES of summed counts (Tables 1, 6, 7 and 16); None where there is nothing to divide
    by, and of a sign that nobody marked in any response (people who only marked errors)."""
    unknown = tuple(f"{name}_" for name in SIGNS if not counts[f"{name} spans marked"])
    return {key: above / below if below and not key.startswith(unknown) else None
            for key, (above, below) in parts(counts).items()}


def span_table(counts: Counter) -> list[list]:  # Table 6
    """Sign, marked, predicted, exact, partial."""
    columns = "spans marked", "spans predicted", "exact", "partial"
    return [[name, *(counts[f"{name} {what}"] for what in columns)] for name in SIGNS]


# ── The paper's tables on annotated rows: (title, header, lines) each

def _shares(found: list[tuple], unit: str) -> tuple:
    labels, counts, quotes = Counter(), Counter(), 0
    for row, spans, tokens in found:
        labels.update(token_rewards(row["response"], tokens, spans))
        counts["both"] += conflicting_tokens(row["response"], tokens, spans)
        if "unmatched" in row:            # of people, quotes that are lost stand there alone
            given = Counter(row["good_spans"] + row["poor_spans"]) | Counter(row["unmatched"])
            quotes += given.total()
            counts.update(unmatched=len(row["unmatched"]), ambiguous=row["ambiguous"])
    every = labels.total()
    lines = [["responses", len(found), None], ["quotes", quotes, None],
             *([name, counts[name], quotes] for name in ("unmatched", "ambiguous")),
             [unit, every, None], [f"good {unit}", labels[1], every],
             [f"poor {unit}", labels[-1], every],
             [f"labelled {unit}", labels[1] + labels[-1], every],
             [f"{unit} of both, so 0", counts["both"], every]]
    return ("Table 15 (paper: 0.93–2.47 % unmatched), §3.3 (about 30 % labelled)",
            ["", "number", "%"],
            [[name, n, 100 * n / whole if whole else None] for name, n, whole in lines])


def _by_length(found: list[tuple], unit: str) -> tuple:
    measured, lines = [], []
    for row, spans, tokens in found:
        response, known = row["response"], "gold_spans" in row
        gold = character_labels(response, read_spans(row, "gold_spans")) if known else []
        for span in spans:
            right = 100 * span_accuracy(response, span, gold) if known else None
            measured.append((span.label, span_length(response, tokens, span), right))
    for name, sign in SIGNS.items():
        own = [(length, right) for label, length, right in measured if label == sign]
        lengths = [length for length, _ in own]
        cuts = [-1, *np.quantile(lengths, (0.25, 0.5, 0.75, 1))] if own else []
        for k, (low, high) in enumerate(pairwise(cuts), 1):
            inside = [right for length, right in own if low < length <= high]
            known = [right for right in inside if right is not None]
            lines.append([f"{name}, quarter {k}", high, len(inside), len(known),
                          fmean(known) if known else None])
    return (f"Table 18, Table 19: {unit} of a span, and how much of it is truly of its label",
            ["spans", f"{unit}, at most", "number", "of known truth", "right %"], lines)


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
            [[name, len(known), *((fmean(known), sum(known)) if known else (None, None))]
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


def _problems(row: dict) -> list[str]:
    """What gave no reward."""
    lost = [f"unmatched: {quote}" for quote in row.get("unmatched", ())]
    kinds = "ambiguous", "conflicting"
    return lost + [f"{row[kind]} {kind}" for kind in kinds if row.get(kind)]


def feedback_page(path, title: str, rows: list[dict], tables: list[tuple] = ()):  # Figure 2
    """Write a page of annotated responses, spans in colour beside the critique; MOST_ROWS of
    them, those with problems first. tables: of `audit`, to stand above."""
    shown = sorted(rows, key=lambda row: not _problems(row))[:MOST_ROWS]
    body = "".join(f"<h3>{escape(name)}</h3>{html_table(header, lines)}"
                   for name, header, lines in tables)
    body += f"<p>{len(shown):,} of {len(rows):,} responses, those with problems first</p>"
    body += heatmap(["good, +1", " ", "poor, −1"], [1, 0, -1])
    for row in shown:
        columns = {"Response": colour_spans(row["response"], read_spans(row)),
                   "Critique": text_block(row.get("critique", ""))}
        body += card(f"{row.get('id', '')} · {row.get('annotator', '')}",
                     row.get("prompt", ""), columns, _problems(row))
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
    passages, said, texts, gap = dict(enumerate(row["passages"], 1)), [], [], "\n\n"
    errors = sorted(row["feedback"]["errors"], key=lambda error: error["start"])

    def cite(text: str) -> str:
        return f'"{shorten(text, 120, placeholder=" …")}"'

    def sentences(place: dict) -> str:
        passage = dict(enumerate(passages[place["passage_id"]]))              # 0 is the title
        return cite(" ".join(passage[number] for number in place["sentence_id"]))

    for error in errors:
        kind, why = error["error type"], error["explanation"]
        grounded = why and kind == "Wrong-Grounding"
        why = sentences(json.loads(why)) if grounded else cite(why)
        quote = cite(row["prediction 1"][error["start"] : error["end"]])
        said.append(f"{quote} is marked as {kind}: {why}".removesuffix(': ""'))
    said = said or ["No part of the answer is marked as wrong."]
    for lack in row["feedback"]["missing-info"]:
        said.append(f"The answer has a {lack['error type']}: {sentences(lack)}")
    for title, *rest in row["passages"]:
        texts.append(f"{title}\n{' '.join(rest).removeprefix(title + gap)}{gap}")
    return {**row, "response": row["prediction 1"],
            "prompt": f"Answer the question from the passages.\n\n{''.join(texts)}"
                      f"Question: {row['question']}",
            "critique": "\n".join(said),
            "spans": [{**error, "label": -1} for error in errors]}


def merge(annotations: list[dict]) -> tuple[list[dict], float | None]:
    """A row of feedback for each response (Alg. 1 l.9–10), and how far its annotators agree:
    Krippendorff's α over all characters but spaces.

    The paper has one annotator, a model. People disagree, and what they disagree on must get 0,
    not the sign of whoever came last: a character has a sign where more than half gave it that.
    """
    groups, rows, units = {}, [], []
    for said in annotations:
        groups.setdefault((said["prompt"], said["response"]), []).append(said)
    for (_, response), group in groups.items():
        people = {said["annotator"]: [] for said in group}
        for said in group:
            people[said["annotator"]] += read_spans(said)
        votes = [character_labels(response, spans) for spans in people.values()]
        units += [Counter(column) for char, *column in zip(response, *votes) if char.strip()]
        labels = [sum(sign for sign in (1, -1) if 2 * column.count(sign) > len(votes))
                  for column in zip(*votes)]
        spans, end = [], 0
        for label, run in groupby(labels):
            start, end = end, end + len([*run])
            span = trimmed(response, Span(start, end, label))
            spans += [span] if label and span.start < span.end else []
        critique = "\n".join(sorted({said["critique"] for said in group} - {""}))
        found = Grounding(spans, sum((said["unmatched"] for said in group), []),
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

def main():
    """Print the tables of annotated rows, or read what people marked."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--audit", metavar="FILE", help="annotated rows: the paper's tables")
    what.add_argument("--people", metavar="FILE", help="rows that people marked: merge them")
    parser.add_argument("--tokenizer", help="directory of one; without it words are counted")
    parser.add_argument("--html", help="write the audit's page there")
    parser.add_argument("--output", help="write people's rows there")
    args = parser.parse_args()
    source, written = args.audit or args.people, args.html if args.audit else args.output
    if args.people and not written:
        parser.error("--people needs --output FILE")
    if written and os.path.realpath(written) == os.path.realpath(source):
        raise InputError(f"{written} would be overwritten; name another file to write")
    rows = read_rows(source)
    if args.people:
        rows, alpha = merge(read_people(rows))
        write_rows(written, rows)
        lost = sum(len(row["unmatched"]) + row["ambiguous"] for row in rows)
        mute = sum(not row["critique"] for row in rows)
        print(f"{written}: {len(rows)} responses; {lost} quotes not found or found more than "
              f"once; {mute} without a critique, which reward_model.py needs; agreement "
              f"(Krippendorff's alpha): {'–' if alpha is None else f'{alpha:.3f}'}")
        return
    places = None
    if args.tokenizer:
        from transformers import AutoTokenizer
        places = partial(response_tokens, AutoTokenizer.from_pretrained(args.tokenizer))
    read = [row for row in rows if not row.get("reason")]     # of others eval.py read nothing
    tables = audit(read, places)
    print(f"{audit_text(tables)}\n\n{len(rows) - len(read)} rows without feedback left out")
    if written:
        feedback_page(written, source, read, tables)
        print(f"look at {written}")


if __name__ == "__main__":
    run_script(main, "spans")
