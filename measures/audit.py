"""The paper's tables on any file of annotated rows: is this feedback worth training on, and what did it cost?

    python -m measures.audit feedback.jsonl                       # prints them
    python -m measures.audit feedback.jsonl --gold people.jsonl --html page.html
    print(audit_text(audit(rows, gold=rows_of_people)))           # from Python
    feedback_page("page.html", "Summaries", rows)                 # spans in colour

Paper: §3.3, Figure 2 and Tables 12, 14, 15, 18 and 19.

Table 15 counts quotes that are not in the response, §3.3 gives the share of labelled tokens, Tables 18 and 19 the
length of spans and their accuracy by length, Tables 12 and 14 what the replies cost; one line per task and annotator.
A figure whose fields no row holds is a dash, never 0. Departure from the paper: lengths are in words unless a
tokenizer's offsets are given, since a file of feedback names no tokenizer.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from statistics import fmean, quantiles
from typing import Callable

from annotate import Span, conflicting_tokens, token_offsets, token_rewards
from data import InputError, read_rows, run_script
from report import card, html_table, page, table, text_block, write_page

Offsets = list[tuple[int, int]]
Tables = list[tuple[str, list[str], list[list]]]


# ── What is wrong with a row

def words(text: str) -> list[tuple[int, int]]:
    """Characters [start, end) of every run without white space."""
    return [match.span() for match in re.finditer(r"\S+", text)]


def trimmed(text: str, start: int, end: int) -> tuple[int, int]:
    """The characters [start, end) without the white space at both ends; start ≥ end if no other is."""
    piece = text[start:end]
    return start + len(piece) - len(piece.lstrip()), end - len(piece) + len(piece.rstrip())


def labels_of(response: str, tokens: Offsets, spans: list[dict]) -> tuple[list[int], int]:
    """δ_t without weighting of each token (§3.3), and how many are 0 as spans of both signs hold them."""
    found = [Span(span["start"], span["end"], span["label"]) for span in spans]
    delta = token_rewards(response, tokens, found)
    return [int(value) for value in delta], conflicting_tokens(response, tokens, found)


def problems(row: dict) -> dict[str, int]:
    """What is wrong with an annotated row: {"failed": 1}, or how often it is something else.

    "unmatched" and "ambiguous" count quotes, as the row's fields do; "conflicting" counts words
    in a good and in a poor span. Raises InputError where the row is no annotated row.
    """
    where, response, spans = f"row {row.get('id')!r}", row.get("response"), row.get("spans")
    if not isinstance(response, str) or not (isinstance(spans, list) or row.get("reason")):
        raise InputError(f"{where} is not annotated: it needs a text 'response' and a list "
                         f"'spans' or a 'reason'")
    for span in spans or ():
        match span:
            case {"start": int(start), "end": int(end), "label": 1 | -1} if (
                    0 <= start <= end <= len(response)):
                continue
        raise InputError(f"{where}: {span} is no span (0 ≤ start ≤ end ≤ {len(response)}, "
                         f"label 1 or -1)")
    if row.get("reason"):
        return {"failed": 1}
    counts = {"unmatched": len(row.get("unmatched") or ()), "ambiguous": row.get("ambiguous") or 0,
              "conflicting": labels_of(response, words(response), spans)[1]}
    return {kind: number for kind, number in counts.items() if number}


# ── What is measured on a row

@dataclass(frozen=True)
class Measured:
    """A row, what `problems` says of it, and what its tokens are (words where no tokenizer is given).

    labels: δ_t without weighting, one of −1, 0, +1 per token. both: how many tokens are 0 because they are in spans of
    both signs. spans: (label, length in tokens, accuracy against the gold labels or None) of each.
    """
    row: dict
    problems: dict[str, int]
    labels: list[int]
    both: int
    spans: list[tuple[int, int, float | None]]


def quartiles(lengths: list[int]) -> list[float]:
    """Q1, Q2 and Q3 (Tables 18 and 19), linear between the two nearest values (the default of numpy.quantile)."""
    return quantiles(lengths, n=4, method="inclusive") if len(lengths) > 1 else [float(lengths[0])] * 3


def span_length(response: str, tokens: Offsets, span: dict) -> int:
    """How many tokens overlap the span, without the white space at its ends."""
    start, end = trimmed(response, span["start"], span["end"])
    before_end = bisect_left(tokens, end, key=lambda token: token[0])
    return before_end - bisect_right(tokens, start, key=lambda token: token[1]) if start < end else 0


def gold_labels(response: str, spans: list[dict]) -> list[int]:
    """One label per character: +1 in good spans only, −1 in poor spans only, else 0."""
    found: list[set[int]] = [set() for _ in response]
    for span in spans:
        for labels in found[span["start"]:span["end"]]:
            labels.add(span["label"])
    return [sum(labels) for labels in found]


def span_accuracy(response: str, span: dict, gold: list[int]) -> float | None:
    """Share of the span's non-space characters whose gold label is its own (Table 19); None if it has none of these."""
    at = [i for i in range(span["start"], span["end"]) if not response[i].isspace()]
    return sum(gold[i] == span["label"] for i in at) / len(at) if at else None


def measure(row: dict, gold_spans: list[dict] | None = None, count=None) -> Measured:
    """Measure one row; see `audit` for the arguments. Raises ValueError where row or gold cannot be used."""
    wrong, response = problems(row), row["response"]
    gold = None
    if gold_spans is not None:
        problems({**row, "spans": gold_spans})                    # refuses gold that does not fit the response
        gold = gold_labels(response, gold_spans)
    tokens = [tuple(offsets) for offsets in (count or words)(response)]
    labels, both = labels_of(response, tokens, row["spans"])
    spans = [(span["label"], span_length(response, tokens, span),
              None if gold is None else span_accuracy(response, span, gold)) for span in row["spans"]]
    return Measured(row, wrong, labels, both, spans)


def written_replies(row: dict) -> tuple[str, str]:
    """What a span-level reply for this row holds, and what a dense one does (Table 11).

    The first is the critique and the span JSON as R_φ writes it; the second the critique and a
    label for every word, where the word keeps the place.
    """
    critique, response, places = row["critique"].strip(), row["response"], words(row["response"])
    signs, _ = labels_of(response, places, row["spans"])
    labels = [{"word": response[start:end], "label": ("neutral", "good", "poor")[sign]}
              for (start, end), sign in zip(places, signs)]
    spans = {"good_spans": row["good_spans"], "poor_spans": row["poor_spans"]}
    return (f"{critique}\n{json.dumps(spans, ensure_ascii=False)}",
            f"{critique}\n{json.dumps({'labels': labels}, ensure_ascii=False)}")


# ── The tables, each from the rows of one annotator

def _known(values) -> list:
    return [value for value in values if value is not None]


def _mean_and_sum(values) -> list:
    return [fmean(values), sum(values)] if values else [None, None]


def _percent(part, whole) -> float | None:
    return 100 * part / whole if whole else None


def _quotes(row: dict) -> int:
    """How many quotes the annotator gave; one that was not found counts also where it was dropped from the lists."""
    return (Counter(row["good_spans"] + row["poor_spans"]) | Counter(row["unmatched"])).total()


def _fidelity(rows: list[Measured]) -> list[list]:  # Table 15
    """Table 15, with the other problems of `problems`."""
    checked = [r.row for r in rows if None not in map(r.row.get, ("good_spans", "poor_spans", "unmatched"))]
    quotes, unmatched = sum(map(_quotes, checked)), sum(len(row["unmatched"]) for row in checked)
    ambiguous = _known(r.row.get("ambiguous") for r in rows)
    return [[len(rows), quotes if checked else None, unmatched if checked else None, _percent(unmatched, quotes),
             sum(ambiguous) if ambiguous else None, sum(r.both for r in rows), sum(bool(r.problems) for r in rows)]]


def _coverage(rows: list[Measured]) -> list[list]:
    """§3.3."""
    labels = Counter(label for r in rows for label in r.labels)
    shares = (_percent(number, labels.total()) for number in (
        labels[1], labels[-1], labels[1] + labels[-1], sum(r.both for r in rows)))
    return [[labels.total(), *shares]]


def _by_label(rows: list[Measured]):
    for label, sign in (("good", 1), ("poor", -1)):
        spans = [(length, right) for r in rows for found, length, right in r.spans if found == sign]
        yield label, spans, (quartiles([length for length, _ in spans]) if spans else [None] * 3)


def _lengths(rows: list[Measured]) -> list[list]:  # Table 18
    """Table 18."""
    return [[label, len(spans), *cuts, max((length for length, _ in spans), default=None)]
            for label, spans, cuts in _by_label(rows)]


def _accuracy(rows: list[Measured]) -> list[list]:  # Table 19
    """Table 19. A span of length n is in the first bucket where n ≤ Q1, else in the second where n ≤ Q2, and so on."""
    out = []
    for label, spans, cuts in _by_label(rows):
        buckets: list[list[float]] = [[], [], [], []]
        for length, right in spans:
            if right is not None:
                buckets[bisect_left(cuts, length)].append(right)
        every = [right for bucket in buckets for right in bucket]
        out.append([label, len(every), *(100 * fmean(bucket) if bucket else None for bucket in (*buckets, every))])
    return out


def _usage(rows: list[Measured], name: str) -> list[int]:
    return _known((r.row.get("usage") or {}).get(name) for r in rows)


def _replies(rows: list[Measured], count) -> list[list]:  # Table 12
    """Table 12. Both texts are counted in one unit; the server's own count of the whole reply stands beside them."""
    size = (lambda text: len(count(text))) if count else (lambda text: len(re.findall(r"\w+|[^\w\s]", text)))
    written = [r for r in rows if None not in map(r.row.get, ("critique", "good_spans", "poor_spans"))]
    sizes = [[size(text) for text in written_replies(r.row)] for r in written]
    spans, dense = [pair[0] for pair in sizes], [pair[1] for pair in sizes]
    billed = _usage(rows, "completion_tokens")
    return [["spans, as written", len(spans), *_mean_and_sum(spans), None],
            ["dense, a label a word", len(dense), *_mean_and_sum(dense), sum(dense) / sum(spans) if spans else None],
            ["spans, server's tokens", len(billed), *_mean_and_sum(billed), None]]


def _bill(rows: list[Measured]) -> list[list]:  # Table 14
    """Table 14."""
    dollars = _known(r.row.get("usd") for r in rows)
    return [*([name.replace("_", " "), len(found), *_mean_and_sum(found)]
              for name in ("prompt_tokens", "completion_tokens") for found in [_usage(rows, name)]),
            ["USD", len(dollars), *(value if value is None else f"{value:.6f}" for value in _mean_and_sum(dollars))]]


# ── The audit

def _gold_by_id(rows: list[dict], gold: list[dict]) -> dict:
    responses, found = {row.get("id"): row.get("response") for row in rows}, {}
    for row in gold:
        name = row.get("id")
        if name in found or name is None:
            raise ValueError(f"audit: a gold row needs an id of its own, found {name!r}{' twice' * (name in found)}")
        if row.get("response", responses.get(name)) != responses.get(name, row.get("response")):
            raise ValueError(f"audit: the gold row {name!r} labels another response than the row of that id")
        if not isinstance(row.get("spans"), list):
            raise ValueError(f"audit: the gold row {name!r} has no list 'spans'")
        found[name] = row["spans"]
    if gold and not found.keys() & responses.keys():
        raise ValueError(f"audit: no gold row has the id of a row; {next(iter(found))!r} is the first gold id")
    return found


def audit(rows: list[dict], gold: list[dict] | None = None,
          count: Callable[[str], Offsets] | None = None) -> Tables:
    """The paper's tables, (title, header, lines) each, for `audit_text` or `feedback_page`.

    rows: of any origin with `response` and `spans`; failed ones (with a `reason`) are left out, and the first title
    says how many. gold: rows of the same ids whose `spans` are right; a row's own `gold_spans` come first. count: text
    → tokens [start, end); without it lengths are in words. Raises ValueError where no row has feedback, or a row or its
    gold cannot be used.
    """
    kept = [row for row in rows if not row.get("reason")]
    if not kept:
        raise ValueError(f"audit: there is no row with feedback among {len(rows)} rows")
    known, groups = _gold_by_id(kept, gold or []), defaultdict(list)
    for row in kept:
        name = ", ".join(str(row[key]) for key in ("task", "annotator") if row.get(key)) or "not named"
        groups[name].append(measure(row, row.get("gold_spans", known.get(row.get("id"))), count))

    def lines(make) -> list[list]:
        return [[name, *line] for name, found in groups.items() for line in make(found)]

    unit, who = "tokens" if count else "words", "task, annotator"
    failed = f"; {len(rows) - len(kept)} failed replies are left out" if len(kept) < len(rows) else ""
    return [
        (f"Table 15: quotes that are not in the response (paper: 0.93–2.47 %){failed}",
         [who, "rows", "quotes", "unmatched", "unmatched %", "ambiguous", f"conflicting {unit}", "rows with any"],
         lines(_fidelity)),
        (f"§3.3: labelled {unit} (paper: about 30 % of tokens)",
         [who, unit, "good %", "poor %", "labelled %", "both, so 0, %"], lines(_coverage)),
        (f"Table 18: {unit} per span", [who, "label", "spans", "Q1", "Q2", "Q3", "max"], lines(_lengths)),
        ("Table 19: accuracy in % by length: the share of a span's non-space characters whose gold label is its own, "
         "averaged over spans", [who, "label", "spans with gold", "0–Q1", "Q1–Q2", "Q2–Q3", "Q3–max", "all"],
         lines(_accuracy)),
        (f"Table 12: replies in {'tokens' if count else 'words and punctuation marks'} (paper: dense 6–8 × spans)",
         [who, "reply", "rows", "mean", "total", "× spans"], lines(lambda found: _replies(found, count))),
        ("Table 14: what the server counted for each row (equal rows are asked, and paid for, once)",
         [who, "what", "rows", "mean per row", "total"], lines(_bill))]


def audit_text(tables: Tables) -> str:
    """The tables for a terminal."""
    return "\n\n".join(f"{title}\n{table(header, lines, digits=2)}" for title, header, lines in tables)


# ── The page of annotated responses

MOST_ROWS = 300                                         # of a page


def _marked(response: str, spans: list[dict]) -> str:
    """The response as HTML with its spans coloured; where they conflict, the third colour."""
    out, cuts = "", {0, len(response)}
    for span in spans:
        cuts |= {span["start"], span["end"]}
    for start, end in pairwise(sorted(cuts)):
        labels = {s["label"] for s in spans if s["start"] <= start and end <= s["end"]}
        kind = "both" if len(labels) == 2 else "good" if 1 in labels else "poor"
        piece = escape(response[start:end])
        out += f'<mark class="{kind}">{piece}</mark>' if labels else piece
    return text_block(response, out)


def feedback_page(path, title: str, rows: list[dict], more: Tables = ()):  # Figure 2
    """Write a page of annotated responses: spans coloured, beside the critique and problems.

    rows: as annotate.py writes them, and failed ones {id, prompt, response, reason, reply};
    those with problems come first, and MOST_ROWS are shown. more: tables (title, header, rows)
    to stand above.
    """
    found = [problems(row) for row in rows]
    shown = sorted(range(len(rows)), key=lambda i: not found[i])[:MOST_ROWS]
    wrong = Counter(kind for row in found for kind in row)
    said = [f"{len(rows):,} responses", *(f"{n:,} {kind}" for kind, n in wrong.items())]
    if len(shown) < len(rows):
        said.append(f"{len(rows) - len(shown):,} left out here; those with problems come first")
    body = (f'<p class="muted">{"; ".join(said)}.</p><p><mark class="good">good, +1</mark> '
            f'<mark class="poor">poor, −1</mark> <mark class="both">both, 0</mark></p>')
    for name, header, lines in more:
        body += f"<h3>{escape(name)}</h3>{html_table(header, lines)}"
    for i in shown:
        row, kinds = rows[i], found[i]
        texts = {"Critique": row.get("critique"), "No feedback, because": row.get("reason"),
                 "The whole reply": row.get("reply"),
                 "Quotes that are not in the response": "\n".join(row.get("unmatched") or ())}
        columns = {"Response": _marked(row["response"], row.get("spans") or [])}
        columns |= {name: text_block(str(text)) for name, text in texts.items() if text}
        origin = [row.get("id") or f"row {i + 1}", row.get("task"), row.get("annotator")]
        body += card(" · ".join(str(part) for part in origin if part),
                     str(row.get("prompt") or ""), columns,
                     [f"{number} {kind}" for kind, number in kinds.items()])
    write_page(path, page(title, body))


# ── A file of feedback

def check_paths(read: list, written: list):
    """Raise InputError where a file would be written over one that is read, or over another."""
    seen = {os.path.realpath(path) for path in read if path}
    for path in filter(None, written):
        if os.path.realpath(path) in seen:
            raise InputError(f"{path} would be overwritten; name another file to write")
        seen.add(os.path.realpath(path))


def audit_file(path: str, gold: str | None = None, tokenizer: str | None = None,
               html: str | None = None) -> str:
    """The tables of one annotated file; with html also a page of it.

    gold: a file of rows with the same ids and the true spans (Table 19). Raises InputError with
    the file where it, or the gold, cannot be used.
    """
    rows = read_rows(path, (("response",),))
    gold_rows = read_rows(gold, (("id",),)) if gold else None
    try:
        found = audit(rows, gold_rows, token_places(tokenizer))
    except ValueError as error:
        raise InputError(f"{path}: {error}") from error
    if html:
        feedback_page(html, path, rows, more=found)
    return audit_text(found)


def token_places(tokenizer: str | None) -> Callable[[str], Offsets] | None:
    """Text → the characters of its tokens, to measure people's texts in tokens, not to train.

    What is returned raises InputError for a text that the tokenizer does not give back.
    """
    if tokenizer is None:
        return None
    from transformers import AutoTokenizer
    loaded = AutoTokenizer.from_pretrained(tokenizer, model_max_length=1 << 30)

    def places(text):
        ids = loaded.encode(text, add_special_tokens=False)
        decoded, offsets = token_offsets(loaded, ids)
        if decoded != text:
            raise InputError(f"{tokenizer} does not give back {text[:60]!r} as it was; leave out "
                             f"--tokenizer to count words")
        return offsets
    return places


def main():
    """Print the tables of an annotated file."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("feedback", help="annotated rows, as annotate.py writes them")
    parser.add_argument("--gold", help="rows of the same ids with the true spans (Table 19)")
    parser.add_argument("--tokenizer", help="directory of one; without it words are counted")
    parser.add_argument("--html", help="write a page of the rows and the tables there")
    args = parser.parse_args()
    check_paths([args.feedback, args.gold], [args.html])
    print(audit_file(args.feedback, args.gold, args.tokenizer, args.html))
    if args.html:
        print(f"look at {args.html}")


if __name__ == "__main__":
    run_script(main, "audit")
