"""What people said about responses, in one form, merged over annotators (§3.3, Table 11).

    python -m measures.people export.json --output feedback.jsonl    # and how far they agree
    annotations = read_people(rows)                                  # from Python
    feedback, agreed = merge(annotations), agreement(annotations)

Paper: the human feedback of §3.3 and Table 11; it says nothing of how people are merged.

Read are spans with character offsets, quote lists, FineGrainedRLHF rows and the exports of Label Studio and Argilla.
An annotation, what one person said of one response, has the fields of a feedback row (`people_row`). The paper has one
annotator, a model. People disagree, and what they disagree on must get 0, not the sign of whoever came last.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from dataclasses import asdict
from functools import wraps
from itertools import accumulate, pairwise
from reprlib import repr as shown
from textwrap import shorten
from typing import Callable, Iterator

import numpy as np

from annotate import Feedback, Grounding, Span, feedback_row, ground, quoted
from data import InputError, get_task, read_rows, run_script, write_rows
from measures.audit import check_paths, feedback_page, trimmed

LABELS = {"1": 1, "+1": 1, "good": 1, "positive": 1, "-1": -1, "poor": -1, "negative": -1}


# ── From a plain row to an annotation: every value is checked here

def people_row(id: str, prompt: str, response: str, critique: str, annotator: str, spans: list[dict]) -> dict:
    """A feedback row; good_spans and poor_spans are what its spans [{start, end, label}] cut out of the response."""
    good, poor = ([response[s["start"]:s["end"]] for s in spans if s["label"] == sign] for sign in (1, -1))
    return {"id": id, "prompt": prompt, "response": response, "critique": critique, "good_spans": good,
            "poor_spans": poor, "spans": spans, "annotator": annotator}


def _span(where: str, response: str, item: dict) -> dict:
    """A checked span {start, end, label}: 0 ≤ start < end ≤ characters of the response, and a known label. A `text`
    beside them must stand there, up to white space, which Label Studio loses (its issues 1863 and 3078)."""
    start, end, label, text = (item.get(name) for name in ("start", "end", "label", "text"))
    whole = type(start) is int and type(end) is int and 0 <= start < end <= len(response)
    if not whole or str(label).lower() not in LABELS:
        raise InputError(f"{where}: start {shown(start)}, end {shown(end)}, label {shown(label)}; needed are whole "
                         f"numbers, 0 ≤ start < end ≤ {len(response)} (the characters of the response), and a label of "
                         f"{', '.join(LABELS)}: mend it, or drop the row")
    if isinstance(text, str) and "".join(response[start:end].split()) != "".join(text.split()):
        raise InputError(f"{where}: text {shown(text)}, but start {start}, end {end} of the response is "
                         f"{shown(response[start:end])}; export it with the text that was annotated, or drop the row")
    return {"start": start, "end": end, "label": LABELS[str(label).lower()]}


def _checked(number: int, k: int, row: dict, seen: dict) -> dict:
    """The k-th annotation of a row, with spans None where there are quotes. Rows without ids belong together if prompt
    and response are equal; annotations without names are taken for different people's."""
    who = f"unnamed {number}/{k}" if row.get("annotator") in (None, "", "None") else str(row["annotator"])
    where, critique = f"row {number} (id {row.get('id')}, annotator {who})", row.get("critique")
    quotes = {name: row[name] for name in ("good_spans", "poor_spans") if row["spans"] is None}
    texts = {"prompt": row.get("prompt"), "response": row.get("response"), "annotator": who, "id": str(row.get("id")),
             "critique": "" if critique is None else critique}
    for name, value in [*texts.items(), *((name, quote) for name, given in quotes.items() for quote in given)]:
        empty = not isinstance(value, str) or not value.strip() and name != "critique"
        if empty or re.search("[\ud800-\udfff]", value):
            raise InputError(f"{where}: field {name!r} is {shown(value)}; it must be a text that is not empty and has "
                             f"no half of a surrogate pair: mend it, or drop the row")
    if row.get("id") in (None, ""):
        texts["id"] = seen.setdefault((texts["prompt"], texts["response"]), str(number))
    spans = [_span(f"{where}, span {n}", texts["response"], span) for n, span in enumerate(row["spans"] or [], 1)]
    return people_row(**texts, spans=spans) | (quotes and {**quotes, "spans": None})


def _reader(plain: Callable[[dict], Iterator[dict]]) -> Callable[[list[dict]], list[dict]]:
    """A reader of rows, from a generator of plain {prompt, response, critique, annotator, spans or quotes} of one."""
    @wraps(plain)
    def read(rows):
        out, seen = [], {}
        for number, row in enumerate(rows, 1):
            try:
                found = list(plain(row))
            except (AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
                raise InputError(f"row {number} is not what {plain.__name__} reads, {plain.__doc__.partition('.')[0]} "
                                 f"({type(error).__name__}: {error}); mend it, or drop it") from error
            out += [_checked(number, k, said, seen) for k, said in enumerate(found, 1)]
        return out
    return read


# ── Readers, one for each form: rows → annotations; all raise InputError

@_reader
def read_offsets(row):
    """{prompt, response, spans: [{start, end, label}], critique?, annotator?, id?}, a row for each annotator. A label
    is +1, good, positive, −1, poor or negative. Offsets count characters (code points), the end is not included. Raises
    InputError for another form."""
    yield {**row, "spans": [{**span} for span in list.copy(row["spans"])]}


@_reader
def read_quotes(row):
    """{prompt, response, critique or feedback, good_spans, poor_spans, annotator?, id?}; `merge` finds the quotes.

    Raises InputError for another form."""
    yield {**row, "critique": row["critique"] if "critique" in row else row["feedback"], "spans": None,
           "good_spans": list.copy(row["good_spans"]), "poor_spans": list.copy(row["poor_spans"])}


_FAULTS = {"Irrelevant": "does not help to answer the question", "Redundant": "repeats what was said before",
           "Unverifiable": "has no support in the passages", "Wrong-Grounding": "contradicts the passages",
           "Incoherent": "makes no sense", "Missing-Answer": "what was asked for",
           "Missing-Major-Auxiliary": "something that matters to the answer", "Missing-Minor-Auxiliary": "a detail"}


@_reader
def read_finegrained(row):
    """FineGrainedRLHF rows {question, passages, "prediction 1", feedback}. Each error is a poor span, nothing is good;
    the critique says in our words what is wrong with each and what is missing, and quotes the passages for it.
    Raises InputError for another form."""
    response, feedback, passages, said = row["prediction 1"], row["feedback"], [*map(list.copy, row["passages"])], []
    sentences = {(p, s): text for p, passage in enumerate(passages, 1) for s, text in enumerate(passage)}
    quoted = lambda text: f'"{shorten(text, 120, placeholder=" …")}"'
    meant = lambda at: quoted(" ".join(sentences[at["passage_id"], s] for s in at["sentence_id"]))     # 0 is the title
    spans = [_span(f"error {n}", response, {**error, "label": -1}) for n, error in enumerate(feedback["errors"], 1)]
    for span, error in sorted(zip(spans, feedback["errors"]), key=lambda pair: pair[0]["start"]):
        kind, why = error["error type"], error["explanation"]
        why = f": {meant(json.loads(why)) if kind == 'Wrong-Grounding' else quoted(why)}" if why else "."
        quote = quoted(response[span["start"]:span["end"]])
        said.append(f"{quote} {_FAULTS.get(kind, f'is marked as {kind}')}{why}")
    said = said or ["No part of the answer is marked as wrong."]
    said += [f"The answer leaves out {_FAULTS.get(lack['error type'], lack['error type'])}: {meant(lack)}"
             for lack in feedback["missing-info"]]
    texts = ["\n".join([title, " ".join(rest).removeprefix(f"{title}\n\n"), "", ""]) for title, *rest in passages]
    prompt = f"Answer the question from the passages.\n\n{''.join(texts)}Question: {row['question']}"
    yield {**row, "prompt": prompt, "response": response, "critique": "\n".join(said), "spans": spans}


@_reader
def read_label_studio(row):
    """A Label Studio task {id, data: {prompt, response or text}, annotations}, with <Labels> on the response's <Text>.
    Every <TextArea> is critique; other controls are not read. Cancelled annotations are left out. Raises InputError for
    another form."""
    data = row["data"]
    for answer in row["annotations"]:
        if not answer.get("was_cancelled"):
            who, items = answer.get("completed_by"), answer["result"]
            said = [text for item in items if item["type"] == "textarea" for text in list.copy(item["value"]["text"])]
            yield {"id": row.get("id"), "prompt": data.get("prompt"),
                   "response": data.get("response", data.get("text")),
                   "annotator": who.get("email") or who.get("id") if isinstance(who, dict) else who,
                   "critique": "\n".join(said), "spans": [
                       {**item["value"], "label": label} for item in items if item["type"].endswith("labels")
                       for label in item["value"]["labels"] or [None]]}


@_reader
def read_argilla(row):
    """An Argilla record {fields: {prompt, response or text}, responses}, with spans, and with texts for critique.
    responses: {question: [{value, user_id}]} (2.x) or [{user_id, status, values: {question: {value}}}] (1.x), less
    drafts and discarded ones. Offsets count characters beyond U+FFFF twice, as browsers do (Argilla's issue 5729).
    Raises InputError for another form."""
    fields, given, people = row["fields"], row["responses"], {}
    response = fields.get("response", fields.get("text"))
    places = {at: i for i, at in enumerate(accumulate((1 + (char > "\uffff") for char in response), initial=0))}
    counted = lambda at: places.get(at, f"{at} (as a browser counts)")
    if isinstance(given, dict):
        given = [{**answer, "values": {name: answer}} for name, answers in given.items() for answer in answers]
    for answer in given:
        if answer.get("status", "submitted") == "submitted":
            values = [value["value"] for value in answer["values"].values()]
            critique, spans = people.setdefault(answer.get("user_id"), ([], []))
            critique += [value for value in values if isinstance(value, str)]
            spans += [{**item, "start": counted(item["start"]), "end": counted(item["end"])} for value in values
                      if isinstance(value, list) for item in value if isinstance(item, dict) and "start" in item]
    for who, (critique, spans) in people.items():
        yield {"id": row.get("id") or row.get("external_id"), "prompt": fields.get("prompt"), "response": response,
               "annotator": who, "critique": "\n".join(critique), "spans": spans}


FORMS = {read_label_studio: ("data", "annotations"), read_argilla: ("fields", "responses"),
         read_finegrained: ("question", "prediction 1", "feedback"), read_offsets: ("prompt", "response", "spans"),
         read_quotes: ("prompt", "response", "good_spans", "poor_spans")}


def read_people(rows: list[dict]) -> list[dict]:
    """Annotations in the form that the fields of the first row say; none in an export without a finished one.

    Raises InputError where these fields are of no form that is read."""
    first = rows[0] if rows and isinstance(rows[0], dict) else {}
    for reader, fields in FORMS.items():
        if set(fields) <= first.keys():
            return reader(rows)
    raise InputError(f"row 1 has the fields {', '.join(first) or 'of no object'}; people's feedback must have " +
                     "; or ".join(f"{', '.join(fields)} ({reader.__name__})" for reader, fields in FORMS.items()))


# ── Several annotators: votes, the merged row, agreement

def _votes(annotations: list[dict], ground: Callable | None) -> list[tuple[list[dict], dict[str, np.ndarray]]]:
    """Of each (id, prompt, response), in order of first appearance: its annotations, and by the annotator's name the
    labels of its characters, [characters], +1, −1, or 0 where they marked nothing, or both ways."""
    groups: dict = {}
    for said in annotations:
        group, marks = groups.setdefault((said["id"], said["prompt"], said["response"]), ([], {}))
        group.append(said)
        good_poor = marks.setdefault(said["annotator"], np.zeros((2, len(said["response"])), np.int8))
        if (spans := said["spans"]) is None and ground is None:
            raise InputError(f"{said['id']}: {said['annotator']} gave quotes; pass a function that finds them")
        for span in ground(said["response"], said["good_spans"], said["poor_spans"]) if spans is None else spans:
            good_poor[int(span["label"] < 0), span["start"]:span["end"]] = 1
    return [(group, {name: good - poor for name, (good, poor) in sorted(marks.items())})
            for group, marks in groups.values()]


def merge(annotations: list[dict], ground: Callable | None = None) -> list[dict]:
    """One row for each (id, prompt, response), in order of first appearance; the order of annotators never matters.
    A character is good (poor) where more than half of the annotators marked it good (poor), else 0: so ties give 0, and
    who marks it both ways votes 0. Equal neighbours become spans, trimmed of white space. Annotations under one name
    are one annotator's. ground(response, good_spans, poor_spans) → [{start, end, label}] finds quotes; without it they
    raise InputError."""
    rows = []
    for group, votes in _votes(annotations, ground):
        labels = sum((2 * sum(v == sign for v in votes.values()) > len(votes)) * sign for sign in (1, -1))
        response, spans = group[0]["response"], []
        for start, end in pairwise(np.flatnonzero(np.diff(labels, prepend=0, append=0)).tolist()):
            label, (start, end) = int(labels[start]), trimmed(response, start, end)
            if label and start < end:
                spans.append({"start": start, "end": end, "label": label})
        said = sorted({(one["annotator"], one["critique"]) for one in group if one["critique"].strip()})
        critique = "\n".join(text if len(votes) == 1 else f"{name}: {' '.join(text.split())}" for name, text in said)
        rows.append(people_row(group[0]["id"], group[0]["prompt"], response, critique, ", ".join(votes), spans))
    return rows


def krippendorff_alpha(labels) -> float | None:
    """Nominal α of labels [units, annotators], numbers, missing ones NaN or None; None where it is undefined.
    α = 1 − (n − 1) Σ_u (m_u² − Σ_c n_uc²)/(m_u − 1) / (n² − Σ_c n_c²), over the units u with m_u ≥ 2 labels, n in all,
    n_uc of them c (Krippendorff 2011). Undefined: no unit has two labels, or all labels are the same."""
    labels = np.asarray(labels, np.float64)
    values = np.unique(labels[~np.isnan(labels)])
    counts = np.array([(labels == value).sum(1) for value in values]).reshape(len(values), len(labels)).T     # n_uc
    counts = counts[counts.sum(1) >= 2]
    per_unit, totals, n = counts.sum(1), counts.sum(0), int(counts.sum())
    expected = n * n - int((totals ** 2).sum())
    observed = ((per_unit ** 2 - (counts ** 2).sum(1)) / (per_unit - 1)).sum()
    return float(1 - (n - 1) * observed / expected) if expected else None


def cohen_kappa(a, b) -> float | None:
    """κ of two annotators' labels [units]; None where chance alone would always agree, or there are no units."""
    a, b = np.asarray(a), np.asarray(b)
    n, agreed = len(a), int((a == b).sum())
    chance = sum(int((a == value).sum()) * int((b == value).sum()) for value in np.unique(a))        # of n² pairs
    return (agreed * n - chance) / (n * n - chance) if n * n > chance else None


def agreement(annotations: list[dict], ground: Callable | None = None) -> dict:
    """{annotators, responses, shared, characters, alpha, kappa}. shared: how many responses two or more annotated;
    characters: theirs, other than white space, which are the units, labelled +1, −1 or 0; kappa: where the same two
    people annotated all of these. None where undefined. Raises InputError for quotes without `ground`, as `merge`."""
    groups = _votes(annotations, ground)
    shared = [(group[0]["response"], votes) for group, votes in groups if len(votes) > 1]
    text, at, teams = "".join(response for response, _ in shared), 0, len({tuple(votes) for _, votes in shared})
    labels = np.full((max((len(votes) for _, votes in shared), default=0), len(text)), np.nan)
    for response, votes in shared:
        labels[:len(votes), at:at + len(response)] = list(votes.values())
        at += len(response)
    labels = labels[:, ~np.fromiter(map(str.isspace, text), bool, len(text))]             # [annotators, units]
    return {"annotators": len({said["annotator"] for said in annotations}), "responses": len(groups),
            "shared": len(shared), "characters": labels.shape[1], "alpha": krippendorff_alpha(labels.T),
            "kappa": cohen_kappa(*labels) if teams == 1 and len(labels) == 2 else None}


# ── An export of people's feedback

def people_file(path: str, output: str, task: str = "slf5k", html: str | None = None) -> str:
    """An export → rows of feedback in `output`, a row for each response; says what it holds.

    Raises InputError with the file where it cannot be read or nobody has finished an annotation.
    """
    get_task(task)
    try:
        annotations = read_people(read_rows(path))
    except InputError as error:
        raise InputError(f"{path}: {str(error).removeprefix(f'{path}: ')}") from error
    if not annotations:
        raise InputError(f"{path}: nobody has finished an annotation in it")
    placed: dict[str, dict] = {}                        # response → what was quoted → where it stands

    def place(response: str, good: list[str], poor: list[str]) -> list[dict]:
        known, quotes = placed.setdefault(response, {}), (tuple(good), tuple(poor))
        if quotes not in known:
            known[quotes] = ground(response, Feedback("", list(good), list(poor)))
        return [asdict(span) for span in known[quotes].spans]

    agreed, rows = agreement(annotations, place), []
    voices = {tuple(said[key] for key in ("id", "prompt", "response", "annotator"))
              for said in annotations}
    team = Counter(voice[:3] for voice in voices)
    for row in merge(annotations, place):
        spans = [Span(**span) for span in row["spans"]]
        found = placed.get(row["response"], {}).values()
        unmatched = [quote for one in found for quote in one.unmatched]
        grounding = Grounding(spans, unmatched, sum(one.ambiguous for one in found))
        people = team[row["id"], row["prompt"], row["response"]]
        feedback = quoted(row["response"], row["critique"], spans)
        rows.append(feedback_row(task, row, feedback, grounding,
                                 f"{people} people" if people > 1 else "a person"))
    write_rows(output, rows)
    if html:
        feedback_page(html, output, rows)
    said = [f"{output}: {len(rows)} responses",
            f"{sum(len(row['unmatched']) for row in rows)} quotes not found",
            f"{sum(row['ambiguous'] for row in rows)} ambiguous"]
    if agreed["shared"]:
        alpha, kappa = ("–" if agreed[key] is None else f"{agreed[key]:.3f}"
                        for key in ("alpha", "kappa"))
        said.append(f"{agreed['shared']} annotated by several, over whose {agreed['characters']} "
                    f"characters Krippendorff's alpha is {alpha}, Cohen's kappa {kappa}")
    if mute := sum(not row["critique"].strip() for row in rows):
        said.append(f"{mute} have no critique, which reward_model.py needs")
    return "; ".join(said)


def main():
    """Read what people marked."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("export", help="of Label Studio or Argilla, or rows with spans or quotes")
    parser.add_argument("--output", required=True, help="rows of feedback are written there")
    parser.add_argument("--task", default="slf5k", help="named in the rows (default: slf5k)")
    parser.add_argument("--html", help="write a page of the rows there")
    args = parser.parse_args()
    check_paths([args.export], [args.output, args.html])
    print(people_file(args.export, args.output, args.task, args.html))
    print(f"next: python reward_model.py --task {args.task} --data {args.output} --model MODEL")


if __name__ == "__main__":
    run_script(main, "people")
