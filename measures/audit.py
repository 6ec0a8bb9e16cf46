"""The paper's tables on any file of annotated rows: is this feedback worth training on, and what did it cost?

    python annotate.py --audit feedback.jsonl                          # prints them
    print(audit_text(audit(rows, gold=rows_of_people)))                # from Python

Paper: §3.3 and Tables 12, 14, 15, 18 and 19.

Table 15 counts quotes that are not in the response, §3.3 gives the share of labelled tokens, Tables 18 and 19 the
length of spans and their accuracy by length, Tables 12 and 14 what the replies cost; one line per task and annotator.
A figure whose fields no row holds is a dash, never 0. Departure from the paper: lengths are in words unless a
tokenizer's offsets are given, since a file of feedback names no tokenizer.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from dataclasses import dataclass
from statistics import fmean, quantiles
from typing import Callable

from endpoint import InputError
from offsets import token_offsets
from parts import trimmed
from report import feedback_page, labelled, problems, table, words
from tasks import read_rows

Offsets = list[tuple[int, int]]
Tables = list[tuple[str, list[str], list[list]]]


# ── What is measured on a row ───────────────────────────────────────────────────────────────────────────

@dataclass(frozen=True)
class Measured:
    """A row, what `report.problems` says of it, and what its tokens are (words where no tokenizer is given).

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
    good, poor = labelled(response, tokens, row["spans"])
    spans = [(span["label"], span_length(response, tokens, span),
              None if gold is None else span_accuracy(response, span, gold)) for span in row["spans"]]
    labels = [(i in good) - (i in poor) for i in range(len(tokens))]
    return Measured(row, wrong, labels, len(good & poor), spans)


def written_replies(row: dict) -> tuple[str, str]:
    """What a span-level reply for this row holds, and what a dense one does (Table 11): the critique, and the span JSON
    as R_φ writes it or a label for every word as `annotate.py --mode dense` asks for; the word keeps the place."""
    critique, response, places = row["critique"].strip(), row["response"], words(row["response"])
    good, poor = labelled(response, places, row["spans"])
    labels = [{"word": response[start:end], "label": ("neutral", "good", "poor")[(i in good) - (i in poor)]}
              for i, (start, end) in enumerate(places)]
    spans = {"good_spans": row["good_spans"], "poor_spans": row["poor_spans"]}
    return (f"{critique}\n{json.dumps(spans, ensure_ascii=False)}",
            f"{critique}\n{json.dumps({'labels': labels}, ensure_ascii=False)}")


# ── The tables, each from the rows of one annotator ─────────────────────────────────────────────────────

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
    """Table 15, with the other problems of `report.problems`."""
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


# ── The audit ───────────────────────────────────────────────────────────────────────────────────────────

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
    """The paper's tables, (title, header, lines) each, for `audit_text` or `report.feedback_page`.

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
        ("Table 14: what the server counted for each row (equal rows are asked, and paid for, once)", [who, "what", "rows", "mean per row", "total"], lines(_bill))]


def audit_text(tables: Tables) -> str:
    """The tables for a terminal."""
    return "\n\n".join(f"{title}\n{table(header, lines, digits=2)}" for title, header, lines in tables)


# ── A file of feedback ──────────────────────────────────────────────────────────────────────────────────

def audit_file(path: str, gold: str | None = None, tokenizer: str | None = None, html: str | None = None) -> str:
    """`annotate.py --audit`: the tables of one annotated file, and with html a page of it as well.

    gold: a file of rows with the same ids and the true spans (Table 19). Raises InputError where a file cannot be used.
    """
    rows = read_rows(path, (("response",),))
    gold_rows = read_rows(gold, (("id",), ("spans",))) if gold else None
    try:
        found = audit(rows, gold_rows, token_places(tokenizer))
    except ValueError as error:
        raise InputError(f"{path}: {error}") from error
    if html:
        feedback_page(html, path, rows, more=found)
    return audit_text(found)


def token_places(tokenizer: str | None) -> Callable[[str], Offsets] | None:
    """Text → the characters of its tokens, to measure people's texts in tokens; nothing is trained on these.

    What is returned raises InputError for a text that the tokenizer does not give back as it was."""
    if tokenizer is None:
        return None
    from transformers import AutoTokenizer
    loaded = AutoTokenizer.from_pretrained(tokenizer, model_max_length=1 << 30)

    def places(text):
        decoded, offsets = token_offsets(loaded, loaded.encode(text, add_special_tokens=False))
        if decoded != text:
            raise InputError(f"{tokenizer} does not give back {text[:60]!r} as it was; leave out --tokenizer to count words")
        return offsets
    return places
