"""Phase 1 of Text2Grad: a critique and its quoted spans for every response, and δ from the spans (§3.3, Alg. 2).

    python annotate.py --task slf5k --data rows.jsonl --dry_run                          # what would it cost?
    python annotate.py --task slf5k --data rows.jsonl --output feedback.jsonl            # an OpenAI-compatible model
    python annotate.py --task toy --data rows.jsonl --output feedback.jsonl --critic toy:critique     # a function
    python annotate.py --people export.json --output feedback.jsonl                      # spans that people marked
    python annotate.py --audit feedback.jsonl --html feedback.html                       # the paper's tables, and a page

Read it in the order of the paper: `parse_feedback` (reply → critique and quotes), `ground` (quotes → character spans),
`token_offsets` and `token_rewards` (spans → δ_t ∈ {−1, 0, +1}), then `annotate`, which asks R_LLM(x, y) = (c, A(y)) of
a model or a function. The prompts are in tasks.py (Appendix B), servers and money in endpoint.py, people's spans in
people.py, the characters of a token in offsets.py. Nothing here needs torch.

Paper: §3.3, Algorithm 2 and Algorithm 1 l.4–11; it says nothing of journals, budgets and files.

Departures from the paper: a quote that stands in the response more often than it was quoted says nothing about which
place is meant, so it gives 0 and is counted (the paper is silent; precision comes first, §4.2). Tokens are never made
by encoding a text again (Appendix L does): offsets are computed from the sampled ids.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import unicodedata
from bisect import bisect_left
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby, islice
from pathlib import Path
from typing import Iterable, Iterator

from tqdm import tqdm

from measures import people
import report
from measures.audit import audit_file
from endpoint import (BATCH_DISCOUNT, Budget, InputError, Journal, Prices, Question, Reply, Server, ask_all, ask_by_batch,
                      question_key, token_counter)
from offsets import token_offsets
from parts import span_weights
from measures.sandbox import SandboxError, run_python
from tasks import (LABELS, MODES, annotation_messages, examples, flag, get_task, iter_rows, parse_flags,
                   programmatic_annotator, read_rows, read_table, reply_schema, reward_prompt, run, write_rows)


class FeedbackError(ValueError):
    """A reply that cannot be read as feedback; the message is the reason."""


# ── From a reply to feedback ────────────────────────────────────────────────────────────────────────────

@dataclass(frozen=True)
class Feedback:
    """(c, A(y)): a critique and the quotes that it calls good and poor."""
    critique: str
    good_spans: list[str]
    poor_spans: list[str]

    def text(self) -> str:
        """z = [c ; span JSON], what R_φ learns to write (§3.4)."""
        spans = {"good_spans": self.good_spans, "poor_spans": self.poor_spans}
        return f"{self.critique.strip()}\n{json.dumps(spans, ensure_ascii=False)}"         # Alg. 1 l.9


# Keys as the paper, its release and models spell them, after lower-casing and "_" for everything but letters.
_CRITIQUE_KEYS = ("textual_feedback", "code_feedback", "critique", "feedback")
_GOOD_KEYS = ("good_spans",)
_POOR_KEYS = ("poor_spans",)
_CODE_KEYS = ("wrong_code", "improvement_code")            # both say: this code should change
_LONGEST = 100_000                                          # characters of a reply; bounds the work on a hostile one


def _key(name: str) -> str:
    return re.sub(r"[^a-z]+", "_", name.lower()).strip("_")


def _unique_keys(pairs: list[tuple]) -> dict:
    value = {_key(name): part for name, part in pairs}
    if len(value) < len(pairs):
        keys = [_key(name) for name, _ in pairs]
        for known in (*_CRITIQUE_KEYS, *_GOOD_KEYS, *_POOR_KEYS, *_CODE_KEYS):
            if keys.count(known) > 1:
                raise FeedbackError(f"the key {known!r} stands twice in one object")
    return value


def _objects(text: str, wanted: set[str]) -> list[tuple[int, int, dict]]:
    """Every outermost JSON object in the text that has one of the wanted keys, with its start and end."""
    if len(text) > _LONGEST:
        raise FeedbackError(f"the reply has {len(text):,} characters; at most {_LONGEST:,} are read")
    decoder, found, end, vain = json.JSONDecoder(object_pairs_hook=_unique_keys, strict=False), [], 0, 0
    while opening := re.compile(r'\{\s*"').search(text, end):
        at = opening.start()
        try:
            value, end = decoder.raw_decode(text, at)
        except FeedbackError:
            raise
        except RecursionError as error:
            raise FeedbackError("the JSON is nested too deeply") from error
        except ValueError:                                  # not JSON from here on, or a number of absurd length
            end, vain = at + 1, vain + len(text) - at
            if vain > 3 * _LONGEST:
                raise FeedbackError("the reply begins too many JSON objects that are none")
        else:
            if wanted & value.keys():
                found.append((at, end, value))
    return found


def _the_object(text: str, wanted: set[str]) -> tuple[dict, str]:
    """The one object that has wanted keys, and the prose before it. Raises FeedbackError where it is not clear."""
    objects = _objects(text, wanted)
    if not objects:
        names = " and ".join(sorted(wanted & {"good_spans", "poor_spans", "labels", "steps"}))
        cut = any(name in text for name in wanted) and "{" in text
        raise FeedbackError(f"no JSON object with {names}" + (", and the reply stops inside one" if cut else ""))
    if any(other != objects[-1][2] for _, _, other in objects):
        raise FeedbackError(f"{len(objects)} span objects that differ; which one is meant is unclear")
    after = r'"(%s)"\s*:' % "|".join(wanted).replace("_", "[^a-z]+")      # the final word may be the part that was cut off
    if re.search(after, text[objects[-1][1] :], re.IGNORECASE):
        raise FeedbackError("a part of a second span object stands after the one that can be read")
    prose = text[: objects[0][0]]
    if text[objects[0][1] :].lstrip().startswith("```"):    # the object is fenced: its opening fence is no critique
        prose = re.sub(r"```\w*\s*$", "", prose)
    return objects[-1][2], prose


def _critique(value: dict, prose: str) -> str:
    said = [value[key] for key in _CRITIQUE_KEYS if key in value]
    if not all(isinstance(critique, str) for critique in said):
        raise FeedbackError("the critique is not a string")
    critique = (said[0] if said else prose).strip()
    if not critique:
        raise FeedbackError("the reply labels spans but holds no critique")
    return critique


def _whole_characters(where: str, *texts: str):
    if any(re.search("[\ud800-\udfff]", text) for text in texts):
        raise FeedbackError(f"{where} holds half of a surrogate pair, which is no character")


def _quotes(value: dict, key: str) -> list[str]:
    if key not in value:
        raise FeedbackError(f"the key {key!r} is missing")
    if not isinstance(value[key], list):
        raise FeedbackError(f"{key!r} must be a list of strings, found a {type(value[key]).__name__}")
    for quote in value[key]:
        if not isinstance(quote, str):
            raise FeedbackError(f"{key!r} must be a list of strings, found a {type(quote).__name__} in it")
    return value[key]


def parse_feedback(text: str, critique: str | None = None) -> Feedback:
    """A reply → (c, A(y)) (Alg. 2 l.13): one JSON object with span lists, fenced or in prose, keys of paper or release.

    The critique is the object's own text, or else the prose before the object; or `critique`, where a person wrote it.
    Raises FeedbackError with the reason where there is no such object, or several that differ, a list is missing or
    holds anything but strings, or there is no critique: a label that no critique explains is not feedback.
    """
    value, prose = _the_object(text, {*_GOOD_KEYS, *_POOR_KEYS, *_CODE_KEYS})
    if value.keys() & set(_CODE_KEYS):                         # the code task's form, which may leave out span keys
        value = {"good_spans": [], "poor_spans": []} | value
        keys = ("poor_spans", *_CODE_KEYS)
    else:
        keys = ("poor_spans",)
    good, poor = _quotes(value, "good_spans"), [quote for key in keys for quote in _quotes(value, key)]
    critique = critique or _critique(value, prose)
    _whole_characters("the reply", critique, *good, *poor)
    return Feedback(critique, good, poor)


def _items(value: dict, key: str, types: dict[str, type]) -> list[dict]:
    """A list of objects with fields of these types. Raises FeedbackError with the place of the first that differs."""
    if not isinstance(value[key], list):
        raise FeedbackError(f"{key!r} must be a list of objects, found a {type(value[key]).__name__}")
    for number, item in enumerate(value[key], 1):
        if not isinstance(item, dict) or any(not isinstance(item.get(name), kind) for name, kind in types.items()):
            raise FeedbackError(f"entry {number} of {key!r} must have " +
                                ", ".join(f"{name} ({kind.__name__})" for name, kind in types.items()))
    return value[key]


def parse_labels(text: str, response: str) -> tuple[str, list[Span]]:
    """Read a dense reply (Table 11): one label for every word of the response, in order → critique and spans.

    Neighbouring words with one label make one span. Raises FeedbackError where the words are not the response's.
    """
    value, prose = _the_object(text, {"labels"})
    labels = _items(value, "labels", {"word": str, "label": str})
    words = list(re.finditer(r"\S+", response))
    if len(labels) != len(words):
        raise FeedbackError(f"{len(labels)} labels for the {len(words)} words of the response")
    for number, (item, word) in enumerate(zip(labels, words), 1):
        if item["word"].strip() != word.group() or item["label"] not in LABELS:
            raise FeedbackError(f"label {number} says {item['label']!r} of {item['word']!r}; the word is {word.group()!r}")
    spans = []
    for label, pairs in groupby(zip(labels, words), key=lambda pair: LABELS[pair[0]["label"]]):
        piece = [word for _, word in pairs]
        if label:
            spans.append(Span(piece[0].start(), piece[-1].end(), label))
    critique = _critique(value, prose)
    _whole_characters("the reply", critique)
    return critique, spans


def parse_steps(text: str, response: str) -> tuple[str, Grounding]:
    """Read step labels (Appendix N): quotes of the steps in order, each correct or not, with a reason → critique, spans.

    A step stands where it is found after the one before; one that is not found there is unmatched, and the next must then
    have only one place left, else it is ambiguous. Neither gives a span. Raises FeedbackError where there are no steps.
    """
    value, _ = _the_object(text, {"steps"})
    steps = _items(value, "steps", {"step": str, "reason": str, "correct": bool})
    if not steps:
        raise FeedbackError("the list of steps is empty")
    _whole_characters("the reply", *(item[name] for item in steps for name in ("step", "reason")))
    normal, origin, at, grounding, lost = _plain(response), _origin(response), 0, Grounding(), False
    for item in steps:
        plain = _plain(item["step"])
        places = plain and list(islice(_origins(origin, _occurrences(normal, plain, at)), 2))
        if not places:
            grounding.unmatched.append(item["step"])
            lost = True                            # the next step may stand anywhere from here on
            continue
        if lost and len(places) > 1:
            grounding = replace(grounding, ambiguous=grounding.ambiguous + 1)
            continue
        grounding.spans.append(Span(*places[0], 1 if item["correct"] else -1))
        at, lost = normal.index(plain, at) + len(plain), False
    critique = "\n".join(f"{'Correct' if item['correct'] else 'Incorrect'}: {item['step']} ({item['reason']})"
                         for item in steps)
    return critique, grounding


# ── From feedback to spans ──────────────────────────────────────────────────────────────────────────────

@dataclass(frozen=True)
class Span:
    """s_k and its label ℓ_k (Alg. 2 l.16–17): characters [start, end) of the response; +1 (good) or −1 (poor)."""
    start: int
    end: int
    label: int


@dataclass(frozen=True)
class Grounding:
    """Where the quotes stand (Appendix L). unmatched: quotes not in the response (Table 15); ambiguous: how many
    distinct quotes stand there more often than they were quoted, and so give no span."""
    spans: list[Span] = field(default_factory=list)
    unmatched: list[str] = field(default_factory=list)
    ambiguous: int = 0


_PLAIN = {ord(mark): plain for marks, plain in (("‘’‚‛`´", "'"), ("“”„‟«»", '"')) for mark in marks}


def _plain(text: str) -> str:
    """Text with one form of white space, quotation marks and Unicode (NFC), and no white space around it."""
    return unicodedata.normalize("NFC", " ".join(text.split())).translate(_PLAIN)


def _origin(text: str) -> list[tuple[int, int]]:
    """The original [start, end) of each character of _plain(text)."""
    origin, start, last = [], len(text) - len(text.lstrip()), len(text.rstrip())
    for end in range(start + 1, last + 1):
        if end < last and _continues(text[end - 1], text[end]):
            continue
        single = text[start].isspace() or end == start + 1 and text[start] < "\u0300"
        origin += [(start, end)] * (1 if single else len(unicodedata.normalize("NFC", text[start:end])))
        start = end
    return origin


def _continues(before: str, char: str) -> bool:
    """Whether a character belongs to the one before: white space after white space, a mark, a Korean vowel or final."""
    return char.isspace() if before.isspace() else unicodedata.category(char)[0] == "M" or "\u1160" <= char <= "\u11ff"


def _occurrences(text: str, quote: str, start: int = 0) -> Iterator[tuple[int, int]]:
    at = text.find(quote, start)
    while at >= 0:
        yield at, at + len(quote)
        at = text.find(quote, at + 1)


def _origins(origin, places: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Places in normalised text as places in the original; one that begins or ends inside a character is none."""
    for start, end in places:
        if (start == 0 or origin[start - 1] != origin[start]) and (end == len(origin) or origin[end] != origin[end - 1]):
            yield origin[start][0], origin[end - 1][1]


def ground(response: str, feedback: Feedback) -> Grounding:
    """Find each quote in the response (§3.3, Appendix L): exactly, or else up to white space, quotation
    marks and Unicode form.

    The k-th repeat of a quote takes the k-th occurrence; repeats beyond the last are unmatched. A quote that occurs
    more often than it is quoted is ambiguous: no place is guessed, it gives no span and is counted.
    """
    spans, unmatched, ambiguous, normal, origin = [], [], 0, None, None
    for label, quotes in ((+1, feedback.good_spans), (-1, feedback.poor_spans)):
        for quote, repeats in Counter(quotes).items():         # distinct, in order
            if not quote.strip():
                unmatched += [quote] * repeats
                continue
            found = list(islice(_occurrences(response, quote), repeats + 1))       # one more: it is ambiguous
            if not found:
                normal, plain = normal or _plain(response), _plain(quote)      # most responses never need it
                if plain in normal:
                    origin = origin or _origin(response)
                    found = list(islice(_origins(origin, _occurrences(normal, plain)), repeats + 1))
            if len(found) > repeats:
                ambiguous += 1
                continue
            spans += [Span(start, end, label) for start, end in found]
            unmatched += [quote] * (repeats - len(found))
    return Grounding(sorted(spans, key=lambda span: (span.start, span.end)), unmatched, ambiguous)


# ── From spans to δ ─────────────────────────────────────────────────────────────────────────────────────

def _tokens_inside(text: str, offsets, spans: list[Span]) -> list[list[int]]:
    """For each span the tokens whose non-space characters it holds, or all characters where all are white space."""
    words = []
    for start, end in offsets:
        word = text[start:end].strip() or text[start:end]
        start += text[start:end].index(word)
        words.append((start, start + len(word)))
    starts = [start for start, _ in words]
    return [[i for i in range(bisect_left(starts, span.start), bisect_left(starts, span.end))
             if starts[i] < words[i][1] <= span.end] for span in spans]


def conflicting_tokens(text: str, offsets, spans: list[Span]) -> int:
    """How many tokens lie in a good and in a poor span at once; `token_rewards` gives each of them 0.

    Alg. 2 l.16–25 would give them the later span's label. offsets: the characters [start, end) of each token.
    """
    inside = _tokens_inside(text, offsets, spans)
    good, poor = ({i for span, tokens in zip(spans, inside) if span.label == label for i in tokens} for label in (1, -1))
    return len(good & poor)


def token_rewards(text: str, offsets, spans: list[Span], weighting: str = "uniform") -> list[float]:
    """δ, one pseudo-reward per token (§3.3; Alg. 2 l.15–27). offsets: the characters [start, end) of each token.

    A token is in a span where all its non-space characters are, or, if it has none, where all of it is; half inside is
    outside, and a token in a good and a poor span gets 0. weighting: "uniform" (the paper's method, ±1), or one of those
    of Appendix I.1 that `parts.span_weights` gives. Raises ValueError for any other.
    """
    span_weights(text, [], weighting)                          # refuses an unknown one, also where there is no span
    delta = [0.0] * len(offsets)                                                            # Alg. 2 l.15
    labels: list[set[int]] = [set() for _ in offsets]
    for span, inside in zip(spans, _tokens_inside(text, offsets, spans)):                   # Alg. 2 l.16–17
        for index, weight in zip(inside, span_weights(text, [offsets[i] for i in inside], weighting)):
            labels[index].add(span.label)
            delta[index] = 0.0 if len(labels[index]) > 1 else span.label * weight           # Alg. 2 l.18–25; Eq. §3.3 δ
    assert len(delta) == len(offsets) and all(-1 <= d <= 1 for d in delta), "Eq. §3.3: one δ_t in [−1, +1] per token"
    return delta


# ── Asking: R_LLM(x, y) = (c, A(y)) of a model or a function, for every response (Alg. 1 l.4–11) ────────

@dataclass
class AnnotateConfig:
    """Phase 1: critiques and spans for responses. max_reply_tokens in tokens, max_usd in USD."""
    task: str = flag("slf5k", "toy, slf5k, ultrafeedback or kodcode")
    data: str = flag("", "rows with responses, JSON lines")
    output: str = flag("feedback.jsonl", "where the annotated rows go; every reply is kept in OUTPUT.journal")
    annotator_model: str = flag("gpt-4o", "model on the server (paper: gpt-4o)")
    base_url: str | None = flag(None, "any OpenAI-compatible server; else OPENAI_BASE_URL")
    critic: str | None = flag(None, "a function module:function instead of a server")
    mode: str = flag("cot", "cot, no_cot (Table 1), dense (Table 11), align (a person's critique), steps (Appendix N)")
    unmatched: str = flag("drop", "quotes that the response does not have: drop them, or reask once (Appendix M.1)")
    concurrency: int = flag(8, "requests under way at once")
    requests_per_minute: float | None = flag(None, "at most so many requests a minute")
    tokens_per_minute: float | None = flag(None, "at most so many prompt tokens a minute, 4 characters each")
    retries: int = flag(6, "attempts after the first, for time-outs, 408, 409, 429 and 5xx")
    timeout: float = flag(120.0, "seconds to wait for one reply")
    max_reply_tokens: int | None = flag(None, "longest reply (paper: 1200, KodCode 968; dense and steps: 4096)")
    price_in: float | None = flag(None, "USD per million prompt tokens")
    price_out: float | None = flag(None, "USD per million reply tokens")
    dry_run: bool = flag(False, "forecast tokens and USD, and ask nothing")
    tokenizer: str | None = flag(None, "a tokenizer to count with in forecasts and audits; else 4 characters a token")
    max_usd: float | None = flag(None, "stop before OUTPUT has cost more, all runs together; needs prices")
    batch: bool = flag(False, "use the provider's Batch API, at half the price and within 24 hours")
    batch_poll: float = flag(30.0, "seconds between two looks at a batch")
    limit: int | None = flag(None, "only the first so many responses")
    skip_failed: bool = flag(False, "write OUTPUT without the responses that have no feedback")
    allow_code_execution: bool = flag(False, "kodcode: run the code of every response with the row's tests")
    unsafe_sandbox: bool = flag(False, "run it also where a layer of the sandbox cannot be put up")
    people: str | None = flag(None, "read spans that people marked: offsets, quotes, Label Studio or Argilla exports")
    audit: str | None = flag(None, "print the paper's tables on an annotated file")
    gold: str | None = flag(None, "with --audit: rows of the same ids with the true spans (Table 19)")
    html: str | None = flag(None, "write a page of responses with their spans coloured, problems first to find")


def read_reply(example: dict, reply: str, mode: str = "cot") -> tuple[Feedback, Grounding]:
    """What a reply says of the response, and where (Alg. 2 l.13). Raises FeedbackError where it cannot be read."""
    response = example["response"]
    _whole_characters("the row", example["id"], example["prompt"], response)
    if mode == "dense":
        critique, spans = parse_labels(reply, response)
        return quoted(response, critique, spans), Grounding(spans)
    if mode == "steps":
        critique, grounding = parse_steps(reply, response)
        return quoted(response, critique, grounding.spans), grounding
    feedback = parse_feedback(reply, example["critique"] if mode == "align" else None)
    return feedback, ground(response, feedback)                                              # Alg. 2 l.13


def quoted(response: str, critique: str, spans: list[Span]) -> Feedback:
    """Feedback in quotes, from spans that are known."""
    return Feedback(critique, *([response[s.start:s.end] for s in spans if s.label == label] for label in (1, -1)))


def feedback_row(task: str, example: dict, feedback: Feedback, grounding: Grounding, annotator: str) -> dict:
    """One self-contained row of 𝒟_R (Alg. 1 l.9–10): x, y, the critique, the spans and what was wrong with them."""
    words = [match.span() for match in re.finditer(r"\S+", example["response"])]
    delta = token_rewards(example["response"], words, grounding.spans)         # per word: no tokenizer is known here
    return {"id": example["id"], "task": task, "prompt": example["prompt"], "response": example["response"],  # Alg. 2 l.28
            **asdict(feedback), "spans": [asdict(span) for span in grounding.spans], "unmatched": grounding.unmatched,
            "ambiguous": grounding.ambiguous,
            "conflicting": conflicting_tokens(example["response"], words, grounding.spans),
            "words": {"all": len(words), "good": sum(d > 0 for d in delta), "poor": sum(d < 0 for d in delta)},
            "annotator": annotator}


def annotator_name(config: AnnotateConfig) -> str:
    """Who annotated, for the rows and the journal."""
    return config.critic or config.annotator_model + ("" if config.mode == "cot" else f" ({config.mode})")


def questions(config: AnnotateConfig, journal: Journal) -> Iterator[Question]:
    """The request for every response, in the order of the data; `about` is the example."""
    task, name = get_task(config.task), annotator_name(config)
    for example in islice(examples(task, iter_rows(config.data, task.needs)), config.limit):
        if task.name == "kodcode" and not config.critic:
            example["outcome"] = outcome(example, config, journal)
        messages = annotation_messages(task, example, config.mode)
        own = [example["row"]] if config.critic else []       # a function may look at any field
        yield Question(question_key(task.name, name, messages, *own), example["id"], messages,
                       reply_schema(config.mode), example, f"{task.name}, {name}")


def outcome(example: dict, config: AnnotateConfig, journal: Journal) -> str:
    """What the row's tests say of a solution, kept in the journal so that no resumed run words it differently.

    Raises InputError where --allow_code_execution is not set and the row does not bring its outcome.
    """
    if not config.allow_code_execution:
        if example.get("outcome"):
            return example["outcome"]
        raise InputError(f"row {example['id']}: kodcode rows have their tests run before they are annotated; allow it "
                         f"with --allow_code_execution, or bring the result in a field 'outcome'")
    tests = example["row"].get("test_code") or example["row"]["test"]
    key = question_key("outcome", example["response"], tests)
    if key not in journal:
        result = run_python(example["response"], tests, unsafe=config.unsafe_sandbox)
        said = ("All tests passed." if result.passed else
                f"The tests did not pass ({result.status}). The end of their output:\n{result.stderr[-1500:]}")
        journal.append(Question(key, example["id"], []), Reply(said))
    return journal.read(key)["reply"]


def missing(config: AnnotateConfig, journal: Journal) -> Iterator[Question]:
    """The questions that have no usable reply; rows that are the same are asked once."""
    seen, failed = set(), set(journal.failed)              # those of earlier runs come last: they may never succeed
    for again in (False, True) if failed else (False,):
        for question in questions(config, journal):
            key = bytes.fromhex(question.key)
            if (key in failed) == again and key not in seen and question.key not in journal:
                seen.add(key)
                yield question


def checked(question: Question, reply: Reply, mode: str) -> tuple[Reply, int]:
    """The reply with the reason why it is no feedback, if it is none; and how many of its quotes are unmatched."""
    if reply.reason is not None:
        return reply, 0
    try:
        return reply, len(read_reply(question.about, reply.text, mode)[1].unmatched)
    except FeedbackError as error:
        return replace(reply, reason=str(error)), 0


async def ask_and_check(server: Server, question: Question, config: AnnotateConfig, journal: Journal) -> Reply:
    """Ask, read, and with --unmatched reask once more for quotes that stand in the response; the better reply is kept."""
    first, wrong = checked(question, await server.ask(question), config.mode)
    if not wrong or config.unmatched == "drop":
        return first
    quotes = json.dumps(read_reply(question.about, first.text, config.mode)[1].unmatched, ensure_ascii=False)
    again = replace(question, messages=question.messages + [
        {"role": "assistant", "content": first.text},
        {"role": "user", "content": f"These quotes do not stand in the response character by character: {quotes}. Write "
                                    f"the whole JSON object again with quotes copied exactly, or without them."}])
    try:
        second, still = checked(question, await server.ask(again), config.mode)
    except InputError:
        journal.append(question, first)                    # paid for, whatever has become of the server
        raise
    better = second if second.reason is None and still < wrong else first
    usage = first.usage and second.usage and {name: n + second.usage[name] for name, n in first.usage.items()}
    return replace(better, usage=usage or first.usage)


async def ask_missing(config: AnnotateConfig, journal: Journal, total: int) -> bool:
    """Ask for all feedback that is missing (Alg. 1 l.7–8); returns whether the budget ended it.

    Raises InputError where the function of --critic returns anything but a text.
    """
    task, budget = get_task(config.task), Budget(config.max_usd, journal.usd)
    server = None if config.critic else Server(
        config.annotator_model, config.base_url, task.temperature, reply_limit(config), config.requests_per_minute,
        config.tokens_per_minute, config.retries, config.timeout)

    # No tokenizer makes more tokens than bytes. With reask the second prompt holds the first reply and, escaped, its quotes.
    def worst(question: Question) -> float:
        prompt, reply = len(json.dumps([question.messages, question.schema], ensure_ascii=False).encode(
            "utf-8", "surrogatepass")), reply_limit(config)
        usd = journal.prices.usd
        return (usd(prompt, reply) if config.unmatched == "drop" else usd(2 * prompt + 4 * reply, 2 * reply)) or 0.0

    with tqdm(total=total, desc="annotate", disable=not total) as progress:
        if server is None:
            critic, loop = programmatic_annotator(config.critic), asyncio.get_running_loop()
            with ThreadPoolExecutor(config.concurrency) as pool:
                async def ask(question):
                    text = await loop.run_in_executor(pool, critic, question.about)
                    if not isinstance(text, str):
                        raise InputError(f"--critic {config.critic} returned a {type(text).__name__}, not a text, for "
                                         f"{question.id}")
                    reply = Reply(text)
                    return checked(question, reply, config.mode)[0]
                await ask_all(missing(config, journal), ask, journal, config.concurrency, budget, worst, progress)
            return False
        async with server:
            if config.batch:
                await ask_by_batch(missing(config, journal), server, journal, budget, worst, config.batch_poll)
            else:
                await ask_all(missing(config, journal), lambda question: ask_and_check(server, question, config, journal),
                              journal, config.concurrency, budget, worst, progress)
    return budget.stopped


def reply_limit(config: AnnotateConfig) -> int:
    """The longest reply, in tokens."""
    return config.max_reply_tokens or (4096 if config.mode in ("dense", "steps") else get_task(config.task).max_tokens)


def annotated(config: AnnotateConfig, journal: Journal, failures: list[dict]) -> Iterator[dict]:
    """Feedback rows in the order of the data, from the journal; the responses that have none go into `failures`."""
    name = annotator_name(config)
    for question in questions(config, journal):                                              # Alg. 1 l.7–8
        record, example = journal.read(question.key), question.about
        reason = "not asked yet" if record is None else record["reason"]
        if reason is None:
            try:
                yield feedback_row(config.task, example, *read_reply(example, record["reply"], config.mode), name) | {
                    "usage": record["usage"], "usd": journal.cost(record)}
                continue
            except FeedbackError as error:               # a batch's reply, or one that an older parser read
                reason = str(error)
                journal.append(replace(question, messages=[]), Reply(record["reply"], reason))
        whole = {"prompt": example["prompt"], "response": example["response"], "reply": record["reply"] if record else ""}
        failures.append({"id": example["id"], "reason": reason} | (whole if config.html else {}))


def forecast(config: AnnotateConfig, journal: Journal) -> tuple[int, int, str]:
    """(responses, how many are to be asked, what they will cost): read before anything is spent.

    Tokens are counted from what earlier replies of this journal took where there are ten or more, or else with
    --tokenizer or 4 characters a token, and an assumed length of replies.
    """
    assumed = {"cot": 350, "no_cot": 200, "align": 80, "dense": 1500, "steps": 500}[config.mode]
    seen = journal.measured.get(f"{config.task}, {annotator_name(config)}", Counter())
    count = token_counter(config.tokenizer)
    measured, total, todo, prompt_tokens = seen["replies"] >= 10, 0, set(), 0.0
    for question in tqdm(questions(config, journal), desc="read", unit=" responses", delay=2):     # kodcode runs its tests
        total += 1
        if question.key not in journal and question.key not in todo:
            todo.add(question.key)
            prompt_tokens += (question.characters * seen["prompt_tokens"] / seen["characters"] if measured else
                              sum(count(message["content"]) + 4 for message in question.messages))
    todo = len(todo)
    per_reply = seen["completion_tokens"] / seen["replies"] if measured else assumed
    usd = journal.prices.usd(prompt_tokens, todo * per_reply, BATCH_DISCOUNT if config.batch else 1.0)
    basis = (f"as {seen['replies']} replies measured it" if measured else
             f"{'counted' if config.tokenizer else '4 characters a token'}, replies assumed at {assumed} tokens; "
             f"annotate.py --limit 50 measures" + f" ({seen['replies']} of 10 replies so far)" * bool(seen["replies"]))
    return total, todo, (f"{prompt_tokens:,.0f} prompt + {todo * per_reply:,.0f} reply tokens ({basis}), " +
                         (f"${usd:.{2 if usd >= 1 else 4}f}" if usd is not None else "USD unknown: set --price_in and --price_out"))


def annotate(config: AnnotateConfig) -> str:
    """Alg. 1 l.7–11: feedback for every response of --data → --output; returns what was done, in a line.

    A second run asks only for what the journal does not hold. Raises InputError where there are no responses, where a
    batch is still open, or where responses are left without feedback (unless --skip_failed); nothing takes its place.
    """
    check(config)
    with Journal(f"{config.output}.journal", Prices(config.price_in, config.price_out)) as journal:
        total, todo, cost = forecast(config, journal)
        say = f"{total} responses, {todo} to ask of {annotator_name(config)}"
        if not total:
            raise InputError(f"{config.data}: no row has a response; add a field 'response', or let text2grad.py write one")
        if journal.open_batches and not config.batch:
            raise InputError(f"a batch is under way ({', '.join(map(str, journal.open_batches.values()))}); collect it with "
                             f"--batch before anything is asked twice")
        if config.dry_run:
            return f"{say}: {cost}"
        if not config.critic:
            print(f"{say}: {cost}")
        stopped = bool(todo or journal.open_batches) and asyncio.run(ask_missing(config, journal, todo))
        failures = []
        try:
            write_rows(config.output, _complete(config, journal, failures, stopped))         # Alg. 1 l.5; Alg. 1 l.10
        finally:
            if config.html:
                report.feedback_page(config.html, config.output, [*annotated(config, journal, [])] + failures)
                print(f"look at {config.html}")
        spent = journal.counted["prompt_tokens"] and (f"; in all runs {journal.counted['prompt_tokens']:,} prompt + "
                                                f"{journal.counted['completion_tokens']:,} reply tokens")
        left_out = f", {len(failures)} left out" if failures else ""
        return (f"{config.output}: {total - len(failures)} responses with feedback{left_out}, {todo} asked for now"
                f"{spent or ''}{f', ${journal.usd:.4f}' if journal.usd else ''}")


def _complete(config: AnnotateConfig, journal: Journal, failures: list[dict], stopped: bool) -> Iterator[dict]:
    """The rows of OUTPUT; at the end, where some are missing, the error that says so."""
    n = 0
    for n, row in enumerate(annotated(config, journal, failures), 1):
        yield row
    if not failures or config.skip_failed and n and not stopped:
        return
    reasons = "; ".join(f"{n} × {reason}" for reason, n in Counter(f["reason"][:150] for f in failures).most_common(4))
    budget = f"--max_usd {config.max_usd:g} reached at ${journal.usd:.4f}, raise it to go on; " if stopped else ""
    raise InputError(f"{budget}{len(failures)} responses have no feedback, so {config.output} is not written: {reasons} "
                     f"(first {failures[0]['id']}). Every reply is kept in {journal.path}; run again to ask for these, or "
                     f"write the others with --skip_failed")


def check_files(config: AnnotateConfig):
    """Raise InputError where no file is named to read, or one would be written over another."""
    paths = {name: os.path.realpath(path) for name in ("data", "people", "audit", "gold", "output", "html")
             if (path := getattr(config, name)) and not (name == "output" and config.audit)}
    for written in {"output", "html"} & paths.keys():
        for other in paths.keys() - {written}:
            if paths[other] == paths[written]:
                raise InputError(f"--{written} and --{other} are one file, {paths[other]}; it would be overwritten")
    if not (config.data or config.people or config.audit):
        raise InputError("--data is needed: rows with responses, JSON lines (or --people, or --audit)")


def check(config: AnnotateConfig):
    """Raise InputError for flags that do not go together, before anything is read or spent."""
    get_task(config.task)
    for name, allowed in (("mode", MODES), ("unmatched", ("drop", "reask"))):
        if getattr(config, name) not in allowed:
            raise InputError(f"--{name} must be one of {', '.join(allowed)}, not {getattr(config, name)!r}")
    for name, least in (("concurrency", 1), ("limit", 1), ("retries", 0), ("max_usd", 0), ("price_in", 0), ("price_out", 0),
                        ("requests_per_minute", 0.01), ("tokens_per_minute", 1), ("timeout", 0.01)):
        if (value := getattr(config, name)) is not None and not least <= value < float("inf"):
            raise InputError(f"--{name} must be at least {least}, not {value}")
    if config.max_usd is not None and None in (config.price_in, config.price_out):
        raise InputError("--max_usd needs --price_in and --price_out, in USD per million tokens")
    if config.batch and (config.critic or config.unmatched == "reask"):
        raise InputError("--batch goes with a server's model and --unmatched drop")


# ── Command line ────────────────────────────────────────────────────────────────────────────────────────

def from_people(config: AnnotateConfig) -> str:
    """--people: spans that people marked → --output, several annotators of a response merged into one row (Table 11).

    Raises InputError where nobody has finished an annotation.
    """
    path, rows = Path(config.people), read_table(config.people)
    found: dict[str, dict] = {}                              # response → what was quoted → where it stands

    def place(response: str, good: list[str], poor: list[str]) -> list[dict]:
        known, quotes = found.setdefault(response, {}), (tuple(good), tuple(poor))
        if quotes not in known:
            known[quotes] = ground(response, Feedback("", list(good), list(poor)))
        return [asdict(span) for span in known[quotes].spans]

    said = people.read_people(rows)
    if not said:
        raise InputError(f"{path}: nobody has finished an annotation in it")
    agreed, out = people.agreement(said, place), []
    voices = Counter(one[:3] for one in {(s["id"], s["prompt"], s["response"], s["annotator"]) for s in said})
    for row in people.merge(said, place):
        spans, team = [Span(**span) for span in row["spans"]], voices[row["id"], row["prompt"], row["response"]]
        placed = found.get(row["response"], {}).values()
        grounding = Grounding(spans, [q for g in placed for q in g.unmatched], sum(g.ambiguous for g in placed))
        out.append(feedback_row(config.task, row, quoted(row["response"], row["critique"], spans), grounding,
                                f"{team} people" if team > 1 else "a person"))
    write_rows(config.output, out)
    if config.html:
        report.feedback_page(config.html, config.output, out)
    mute = sum(not row["critique"].strip() for row in out)
    shown = {name: "–" if agreed[name] is None else f"{agreed[name]:.3f}" for name in ("alpha", "kappa")}
    several = (f"{agreed['shared']} annotated by several; over their {agreed['characters']} characters Krippendorff's alpha "
               f"{shown['alpha']}, Cohen's kappa {shown['kappa']}" if agreed["shared"] else "one annotation each")
    lost = sum(len(row["unmatched"]) for row in out), sum(row["ambiguous"] for row in out)
    return (f"{config.output}: {len(out)} responses, {several}; {lost[0]} quotes not found, {lost[1]} ambiguous" +
            (f"\n{mute} of them have spans but no critique, which reward_model.py needs" if mute else ""))


def main():
    """Annotate, audit, or read what people marked, from the command line."""
    from transformers import HfArgumentParser
    config = parse_flags(HfArgumentParser(AnnotateConfig, description=__doc__.split("\n")[0]))
    check(config)
    check_files(config)
    if config.audit:
        print(audit_file(config.audit, config.gold, config.tokenizer, config.html))
    elif config.people:
        print(from_people(config))
    else:
        print(annotate(config))
    if not config.audit and not config.dry_run:
        print(f"next: python reward_model.py --task {config.task} --data {config.output} --model MODEL")
    if config.html and (config.audit or config.people):
        print(f"look at {config.html}")


if __name__ == "__main__":
    run(main, "annotate", (SandboxError,))
