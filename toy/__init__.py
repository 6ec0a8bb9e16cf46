"""The embedded world: posts with seven facts, one-sentence summaries, a critic that knows them.

It plays SLF5K (§4.3) in miniature, so that all of Text2Grad runs on a laptop in minutes. A post
states seven facts in the first person. The base model (toy/base, rebuilt by `python -m
toy.build`) summarises it in one sentence and gets about a third of the facts wrong. `critique`
is the programmatic annotator: it checks the summary fact by fact in plain English and then
quotes the good and the poor spans (Algorithm 2, with chain of thought).

Paper: SLF5K, §4.1 and §4.3; it has no such world.

Simplified: every fact comes from a short list of phrases, and no phrase occurs inside another,
so the critic can find each of them exactly. It replies in text, as an LLM would, and only
`annotate.parse_feedback` and `annotate.ground` read it. Other annotators of the same truth
stand in experiments/designs.py.

Splits are disjoint in their facts, not only in their seeds: a hash of the seven facts says to
which split a post belongs, so no post of `eval` can ever be trained on, whatever the seed.
"""

from __future__ import annotations

import json
import random
import re
import zlib
from pathlib import Path

from data import Task

BASE = Path(__file__).parent / "base"          # the committed checkpoint

SLOTS = {
    "job": ["nurse", "teacher", "lawyer", "farmer", "driver", "baker", "dentist", "chef"],
    "city": ["Leeds", "York", "Paris", "Boston", "Dublin", "Oslo", "Berlin", "Tokyo"],
    "person": ["sister", "brother", "boss", "cousin", "landlord", "roommate", "coach",
               "tenant"],
    "thing": ["bike", "phone", "laptop", "guitar", "camera", "piano", "sofa", "canoe"],
    "month": ["January", "March", "April", "June", "July", "August", "October", "December"],
    "feeling": ["angry", "sad", "worried", "confused", "scared", "jealous", "ashamed",
                "lonely"],
    "plan": ["sue", "quit", "leave", "pray", "apologise", "complain", "forgive", "travel"],
}

_INTRO = ["I am a {job} from {city}.", "I live in {city} and work as a {job}.",
          "Throwaway because people in {city} know me, I am a {job} there."]
_EVENT = ["My {person} took my {thing} in {month}.",
          "So in {month} my {person} walked off with my {thing}.",
          "My {thing} is gone because my {person} took it in {month}."]
_FEELING = ["I feel so {feeling}.", "Now I am {feeling} all day.", "It made me {feeling}."]
_PLAN = ["I want to {plan}.", "I may {plan}.", "My plan is to {plan}."]
_FILLER = ["Sorry for the long post.", "I do not know who else to tell.", "Is this normal?",
           "Thanks for reading.", "We used to get along."]
_SUMMARY = [
    "A {job} from {city} is {feeling} because the {person} took the {thing} in {month} and "
    "wants to {plan}.",
    "The {person} took the {thing} of a {job} from {city} in {month}, who is {feeling} and "
    "wants to {plan}.",
    "One {feeling} {job} from {city} wants to {plan} because the {person} took the {thing} "
    "in {month}."]

_BUCKETS = {"base": range(0, 12), "train": range(12, 15), "eval": range(15, 16)}   # of 16
SPLITS = tuple(_BUCKETS)


def split_of(facts: dict[str, str]) -> str:
    """The one split that these seven facts belong to."""
    bucket = zlib.crc32("|".join(facts[slot] for slot in SLOTS).encode()) % 16
    return next(split for split, buckets in _BUCKETS.items() if bucket in buckets)


def write_post(facts: dict[str, str], rng: random.Random) -> str:
    """A first-person post that states every fact once, in varying words and order."""
    middle = [rng.choice(_EVENT), rng.choice(_FEELING)]
    rng.shuffle(middle)
    sentences = [rng.choice(_INTRO), *middle, rng.choice(_PLAN)]
    if rng.random() < 0.5:
        sentences.insert(rng.randrange(1, 5), rng.choice(_FILLER))
    return " ".join(sentences).format(**facts)


def write_summary(facts: dict[str, str], rng: random.Random, error_rate: float = 0.0) -> str:
    """One sentence with the seven facts, each a wrong one with probability `error_rate`."""
    said = dict(facts)
    for slot, fact in facts.items():
        if rng.random() < error_rate:
            said[slot] = rng.choice([value for value in SLOTS[slot] if value != fact])
    return rng.choice(_SUMMARY).format(**said)


def rows(split: str, n: int, seed: int = 0) -> list[dict]:
    """`n` rows {id, post, facts, reference} of one split ("base", "train" or "eval").

    The same split and seed give the same rows everywhere. Raises KeyError for an unknown split.
    """
    if split not in _BUCKETS:
        raise KeyError(f"toy: no split {split!r}; there are {', '.join(SPLITS)}")
    rng, out = random.Random(f"{split}-{seed}"), []
    while len(out) < n:
        facts = {slot: rng.choice(values) for slot, values in SLOTS.items()}
        if split_of(facts) == split:
            out.append({"id": f"toy-{split}-{seed}-{len(out)}", "post": write_post(facts, rng),
                        "facts": facts, "reference": write_summary(facts, rng)})
    return out


def said_facts(response: str) -> list[tuple[int, str, str]]:
    """Every known fact phrase in a summary, in reading order: (position, slot, phrase)."""
    found = []
    for slot, values in SLOTS.items():
        for value in values:
            at = response.find(value)
            while at >= 0:
                found.append((at, slot, value))
                at = response.find(value, at + 1)
    return sorted(found)


def fact_accuracy(row: dict, response: str) -> float:
    """Share of the seven facts that the summary states once and without a contradiction."""
    said: dict[str, list[str]] = {slot: [] for slot in SLOTS}
    for _, slot, value in said_facts(response):
        said[slot].append(value)
    return sum(said[slot] == [fact] for slot, fact in row["facts"].items()) / len(SLOTS)


# ── The annotator

def judged_facts(row: dict, response: str) -> list[tuple[int, str, str, str, bool]]:
    """(position, slot, phrase, what the critic says of it, whether it is right) of each phrase.

    In reading order. A phrase that repeats a slot is wrong: saying a fact twice earns nothing.
    Raises ValueError for an empty response.
    """
    if not response.strip():
        raise ValueError("toy critic: the response is empty, there is nothing to judge")
    found, seen = [], set()
    for at, slot, value in said_facts(response):
        fact, repeat = row["facts"][slot], slot in seen
        said = f"The {slot} {value} is a repeat." if repeat else verdict(slot, value, fact)
        found.append((at, slot, value, said, value == fact and not repeat))
        seen.add(slot)
    return found


def missing(row: dict, response: str) -> list[str]:
    """A sentence for every fact of which the response says nothing."""
    said = {slot for _, slot, _ in said_facts(response)}
    return [f"The {slot} {fact} is missing."
            for slot, fact in row["facts"].items() if slot not in said]


def critique(row: dict, response: str) -> str:
    """The annotator's reply to a summary: reasoning fact by fact, then the span JSON."""
    judged = judged_facts(row, response)
    sentences = [said for _, _, _, said, _ in judged] + missing(row, response)
    spans = {"good_spans": [value for _, _, value, _, right in judged if right],
             "poor_spans": [value for _, _, value, _, right in judged if not right]}
    return f"{' '.join(sentences)}\n{json.dumps(spans)}"


def verdict(slot: str, value: str, fact: str) -> str:
    """What the summary says, what the post says, and only then the judgement: one thought."""
    return f"The {slot} {value} was {fact}, {'right' if value == fact else 'wrong'}."


def refine(response: str, critique: str) -> str:
    """The response as a critique corrects it, by somebody who has not seen the post."""
    for _, value, fact in re.findall(r"The (\w+) (\w+) was (\w+), wrong\.", critique):
        response = re.sub(rf"\b{value}\b", fact, response, count=1)
    return response


TASK = Task(
    "toy", lambda row: f"Summarise the post in one sentence.\n\nPost: {row['post']}",
    needs=(("post",), ("facts",)), judge="You check summaries of short posts.",
    criteria="whether each fact of the summary stands in the post", quotes="Quote every fact.",
    truth={"fact accuracy": fact_accuracy}, rows=rows)
