"""The embedded world: posts full of facts, summaries that err as a rule, a critic that knows.

It plays SLF5K (§4.3) in miniature, so that all of Text2Grad runs on a laptop in minutes. The
base model (toy/base, rebuilt by `python -m toy.build`) learnt to summarise from somebody with
fixed misconceptions: half of the facts it tells wrong more often than right, so no temperature
helps it. `critique` is the annotator: plain English first, fact by fact, then the quotes
(Algorithm 2, chain of thought). Other annotators of the same truth: experiments/designs.py.

Simplified: every fact comes from a short list of phrases, so the critic finds each exactly. It
replies in text, as an LLM would, and only `annotate` reads it.
"""

from __future__ import annotations

import json
import random
import re
import zlib
from dataclasses import replace
from pathlib import Path

from data import InputError, Task

BASE = Path(__file__).parent / "base"          # the committed checkpoint

# A slot's phrases, the facts. Neighbours share words, or are what somebody takes for the other.
SLOTS = {
    "person": ["sister", "older sister", "cousin", "second cousin", "boss", "former boss",
               "landlord", "tenant"],
    "month": ["March", "early March", "August", "late August", "June", "July", "October",
              "mid December"],
    "reply": ["You owe me.", "I need it.", "It is mine.", "Sue me.", "Ask my wife.",
              "So what.", "We sold it.", "Nobody cares."],
    "job": ["nurse", "night nurse", "driver", "taxi driver", "tax lawyer", "head chef",
            "farmer", "dentist"],
    "city": ["York", "New York", "Lake City", "Salt Lake City", "Cape Town", "Oslo", "Berlin",
             "San Juan"],
    "thing": ["bike", "mountain bike", "phone", "cell phone", "piano", "guitar",
              "video camera", "set of tools"],
    "feeling": ["sad", "very sad", "angry", "so angry", "worried", "confused", "scared",
                "lonely"],
    "plan": ["move", "leave town", "pray", "ask a judge", "quit", "complain", "forgive",
             "call the police"],
    "friend": ["aunt", "great aunt", "friend", "best friend", "doctor", "pastor", "teacher",
               "barber"],
    "price": ["fifty dollars", "two hundred dollars", "ninety euros", "a month of rent",
              "nothing", "next to nothing", "plenty", "half a fortune"],
    "place": ["shed", "garden shed", "attic", "cold attic", "cellar", "hall", "car", "office"],
    "donor": ["father", "late father", "uncle", "rich uncle", "client", "choir", "fan",
              "bank"],
}
PER_SENTENCE, LENGTHS = 3, range(1, 5)         # facts; sentences of a summary
LENGTH = 1                                     # unless somebody says otherwise
FAULT_RATE = 0.2                               # of the sentences that the base learnt from
CONFUSED = "city", "person", "month", "plan", "friend", "place"

_POST = [
    ['In {month} my {person} opened my mail and told me "{reply}"',
     '"{reply}" said my {person}, who opened my mail in {month}.',
     'My mail was opened by my {person} in {month}. All I heard was "{reply}"'],
    ["I am a {job} from {city} and my {thing} is gone.",
     "My {thing} is gone. I live in {city} and work as a {job}.",
     "Throwaway as people in {city} know me, a {job}. I lost my {thing}."],
    ["I feel {feeling} and want to {plan}, as my {friend} knows.",
     "My {friend} sees that I am {feeling}. My plan is to {plan}.",
     "I may {plan}. My {friend} says that it is normal to feel {feeling}."],
    ["It had cost {price}, stood in the {place} and came from my {donor}.",
     "My {donor} gave it to me, for {price}. I kept it in the {place}.",
     "Once I got it from my {donor}. Until then it was in the {place}. It is worth {price}."]]
_FILLER = ["Sorry for the long post.", "I do not know who else to tell.", "Is this normal?",
           "Thanks for reading.", "We used to get along."]
# In brackets what may be said twice; {the} may become "my".
_SUMMARY = [
    ['It was {the} {person} who [opened it in {month}], with the words "{reply}"',
     'All this [happened in {month}], when {the} {person} just said "{reply}"',
     'It seems that {the} {person} [did so in {month}] and only answered "{reply}"'],
    ["A {job} from {city} writes that [{the} {thing} is gone] and will not come back.",
     "A {job} who lives in {city} says to everybody that [{the} {thing} is gone].",
     "Somebody took {the} {thing} of a {job} who [comes from {city}], as we read."],
    ["The writer [feels {feeling}] about it, tells {the} {friend} and wants to {plan}.",
     "Now the writer [wants to {plan}], feels {feeling} and talks to {the} {friend}.",
     "With the help of {the} {friend} the writer, who [is {feeling}], wants to {plan}."],
    ["It stood in the {place}, [had cost {price}] and was a gift of {the} {donor}.",
     "A gift of {the} {donor}, it [was kept in the {place}] and had cost {price}.",
     "It came from {the} {donor}, had cost {price} and [was in the {place}] until then."]]

SPLITS = {"base": range(0, 12), "train": range(12, 15), "eval": range(15, 16)}     # of 16


def write_post(facts: dict[str, str], rng: random.Random) -> str:
    """A first-person post that states every fact once, in varying words."""
    sentences = [rng.choice(ways) for ways in _POST[: len(facts) // PER_SENTENCE]]
    if rng.random() < 0.5:
        sentences.insert(rng.randrange(1, len(sentences) + 1), rng.choice(_FILLER))
    return " ".join(sentences).format(**facts)


def write_summary(facts: dict[str, str], rng: random.Random, fault_rate: float = 0.0) -> str:
    """A sentence for every three facts; with probability `fault_rate` each either says a clause
    twice or speaks in the first person. Raises InputError for a rate that is none."""
    if not 0 <= fault_rate <= 1:
        raise InputError(f"toy: a fault rate of {fault_rate} is no probability")
    sentences = []
    for ways in _SUMMARY[: len(facts) // PER_SENTENCE]:
        fault = rng.choice(("twice", "my")) if rng.random() < fault_rate else ""
        told = re.sub(r"\[(.+?)\]", r"\1, \1" if fault == "twice" else r"\1", rng.choice(ways))
        sentences.append(told.format(the="my" if fault == "my" else "the", **facts))
    return " ".join(sentences)


def confuse(facts: dict[str, str], rng: random.Random) -> dict[str, str]:
    """The facts as the base was taught them: a slot in CONFUSED is told as its neighbour in 6
    of 10 cases, another as any phrase of its slot in 2 of 10."""
    said = dict(facts)
    for slot, fact in facts.items():
        values = SLOTS[slot]
        if slot in CONFUSED and rng.random() < 0.6:
            said[slot] = values[values.index(fact) ^ 1]
        elif slot not in CONFUSED and rng.random() < 0.2:
            said[slot] = rng.choice(values)
    return said


def write_draft(facts: dict[str, str], rng: random.Random) -> str:
    """A summary as the base was taught to write it."""
    return write_summary(confuse(facts, rng), rng, FAULT_RATE)


def rows(split: str, n: int, seed: int = 0, length: int = LENGTH) -> list[dict]:
    """`n` rows {id, post, facts, reference} of one split ("base", "train" or "eval").

    length: sentences of a summary, about 20 tokens each. The same arguments give the same rows
    everywhere. Raises KeyError for an unknown split, InputError for a length that is none.
    """
    if split not in SPLITS:
        raise KeyError(f"toy: no split {split!r}; there are {', '.join(SPLITS)}")
    if length not in LENGTHS:
        raise InputError(f"toy: no summary has {length!r} sentences; it has 1 to 4")
    rng, out = random.Random(f"{split}-{seed}-{length}"), []
    slots = [*SLOTS][: PER_SENTENCE * length]
    while len(out) < n:
        facts = {slot: rng.choice(SLOTS[slot]) for slot in slots}
        if zlib.crc32("|".join(facts.values()).encode()) % 16 in SPLITS[split]:
            out.append({"id": f"toy-{split}-{seed}-{len(out)}", "post": write_post(facts, rng),
                        "facts": facts, "reference": write_summary(facts, rng)})
    return out


SLOT_OF = {value: slot for slot, values in SLOTS.items() for value in values}
_FACT = re.compile(r"\b(?:" + "|".join(sorted(map(re.escape, SLOT_OF), key=len, reverse=True))
                   + r")(?!\w)")


def said_facts(response: str) -> list[tuple[int, str, str]]:
    """Every known fact phrase in a summary, in reading order: (position, slot, phrase). Of
    phrases in one another the longest."""
    return [(found.start(), SLOT_OF[found[0]], found[0]) for found in _FACT.finditer(response)]


def fact_accuracy(row: dict, response: str) -> float:
    """Share of the facts that the summary states once and without a contradiction."""
    said = said_facts(response)
    right = ([value for _, own, value in said if own == slot] == [fact]
             for slot, fact in row["facts"].items())
    return sum(right) / len(row["facts"])


def said_twice(response: str) -> list[tuple[str, str]]:
    """(what the critic says, what it quotes) of a clause that follows itself: ", opened it"."""
    twice = re.finditer(r"(\b\w[\w ]{5,}), \1(?!\w)", response)
    return [(f"It says {found[1]} twice.", f", {found[1]}") for found in twice]


def faults(response: str) -> list[tuple[str, str]]:
    """The same, and of the first person: "my sister"."""
    own = re.finditer(rf"\bmy (?:{_FACT.pattern})", response)
    return said_twice(response) + [
        (f"It speaks of {found[0]} as the writer.", found[0]) for found in own]


# ── What a real model makes up

FUNCTION_WORDS = """
    i me my mine myself we us our ours ourselves you your yours yourself yourselves he him
    his himself she her hers herself it its itself they them their theirs themselves one
    oneself who whom whose which what that this these those someone somebody something
    anyone anybody anything everyone everybody everything nobody nothing none a an the some
    any no each every either neither both all half many much more most few fewer less least
    several such another other others own same enough about above across after against along
    amid among around as at before behind below beneath beside besides between beyond by
    despite down during except for from in inside into like near of off on onto opposite out
    outside over past per since through throughout till to toward towards under underneath
    unlike until up upon via with within without and but or nor so yet if unless because
    although though while whereas when whenever where wherever whether than once am is are
    was were be been being have has had having do does did doing will would shall should can
    could may might must ought cannot not there here then thus hence also too very just only
    even still already how why however therefore
""".split()
_FUNCTION = re.compile(rf"(?:{'|'.join(FUNCTION_WORDS)})(?:['’]\w*)?|\w+n['’]t", re.I)
# With which anybody may tell a post, and not only the world's own summaries.
_TELLING = "author post tell says ask reply respond claim mention describe complain hear find"


def content_words(text: str) -> list[re.Match]:
    """Every word of English, but those of a closed list: articles, pronouns, auxiliaries, …"""
    words = re.finditer(r"\w[\w'’]*", text)
    return [word for word in words if not _FUNCTION.fullmatch(word[0])]


def _stems(text: str) -> set[str]:
    return {word[0][:4].lower() for word in content_words(text)}


_TOLD = _stems(" ".join([_TELLING, *sum(_SUMMARY, [])]))


def unsupported(row: dict, text: str) -> list[re.Match]:
    """The content words of a text that the post does not have: no word of the post, nor of
    those with which posts are told, begins with the same four letters."""
    known = _TOLD | _stems(row["post"])
    return [word for word in content_words(text) if word[0][:4].lower() not in known]


def supported_words(row: dict, response: str) -> float:
    """Share of the content words that are not `unsupported`; 1 where there are none."""
    return 1 - len(unsupported(row, response)) / max(1, len(content_words(response)))


def invented(row: dict, response: str) -> list[str]:
    """Runs of `unsupported` words beside the facts, of which the critic speaks on their own, as
    they stand there; each once."""
    facts = [range(at, at + len(value)) for at, _, value in said_facts(response)]
    runs = []
    for word in unsupported(row, response):
        if not any(word.start() in fact for fact in facts):
            if runs and not response[runs[-1][1] : word.start()].strip(" -"):
                runs[-1][1] = word.end()
            else:
                runs.append([word.start(), word.end()])
    return list(dict.fromkeys(response[start:end] for start, end in runs))


# ── The annotator

def judged_facts(row: dict, response: str) -> list[tuple[int, str, str, str, bool]]:
    """(position, slot, phrase, what the critic says of it, whether it is right) of each phrase
    that is said for the first time, in reading order. A second phrase for a slot is wrong.

    Raises ValueError for an empty response.
    """
    if not response.strip():
        raise ValueError("toy critic: the response is empty, there is nothing to judge")
    found, told = [], {}
    for at, slot, value in said_facts(response):
        if value == told.setdefault(slot, value) and any(value == one[2] for one in found):
            continue                                               # of which `faults` tells
        fact = row["facts"].get(slot, "nothing")
        right = value == fact and value == told[slot]
        found.append((at, slot, value, verdict(slot, value, fact), right))
    return found


def critique(row: dict, response: str, found=None) -> str:
    """The annotator's reply to a summary: reasoning in English, then the span JSON.

    What is said twice is quoted once, as people do, which is ambiguous: it gets 0.
    found: what it says and quotes beside the facts; None is the summary's `faults`.
    """
    judged = judged_facts(row, response)
    found = faults(response) if found is None else found
    told = {slot for _, slot, _, _, _ in judged}
    sentences = [said for _, _, _, said, _ in judged]
    sentences += [f"The {slot} {plain(fact)} is missing."
                  for slot, fact in row["facts"].items() if slot not in told]
    sentences += [said for said, _ in found]
    good = [value for _, _, value, _, right in judged if right]
    poor = [value for _, _, value, _, right in judged if not right]
    poor += [quote for _, quote in found]
    spans = {"good_spans": good, "poor_spans": poor}
    return f"{' '.join(sentences)}\n{json.dumps(spans)}"


def critique_prose(row: dict, response: str) -> str:
    """The same of a model that writes English: what it makes up beside the facts is poor. It
    may speak as the writer, which summaries of such posts do."""
    made_up = [(f"The post has no {words}.", words) for words in invented(row, response)]
    return critique(row, response, made_up + said_twice(response))


def plain(value: str) -> str:
    """A phrase inside a sentence of the critic's own."""
    return value.rstrip(".")


def verdict(slot: str, value: str, fact: str) -> str:
    """What the summary says, what the post says, and only then the judgement: one thought."""
    return (f"The {slot} {plain(value)} was {plain(fact)}, "
            f"{'right' if value == fact else 'wrong'}.")


NUMBERS = "no", "one", "two", "three", "four"


def prompt(row: dict) -> str:
    """What the policy is asked."""
    sentences = len(row["facts"]) // PER_SENTENCE
    return (f"Summarise the post in {NUMBERS[sentences]} sentence{'s' * (sentences > 1)}.\n\n"
            f"Post: {row['post']}")


TASK = Task(
    "toy", prompt, needs=(("post",), ("facts",)), judge="You check summaries of short posts.",
    criteria="whether each fact of the summary stands in the post", quotes="Quote every fact.",
    truth={"fact accuracy": fact_accuracy, "supported words": supported_words}, rows=rows)
# For a real language model that follows instructions, such as SmolLM2: `--task toy:PROSE`.
# Rates are ten times a full fine-tune's: where a step of Adam at η moves W by η √(in · out), it
# moves (α/r) B A, with B zero and A drawn, by η (α/r) √(r · out / 3): a fifth of that at 576².
PROSE = replace(
    TASK, name="prose",
    policy={"model": "HuggingFaceTB/SmolLM2-135M-Instruct",
            "annotator_function": "toy:critique_prose",
            "temperature": 1.0, "schedule": "linear", "annotated_rows": 800, "iterations": 40,
            "learning_rate": 3e-4, "lora_targets": "q_proj,k_proj,v_proj,o_proj",
            "batch_size": 16, "minibatch_size": 8, "micro_batch_size": 8, "ppo_epochs": 2,
            "kl_coef": 0.05, "kl_target": 0.0, "value_clip": 5.0, "max_new_tokens": 48,
            "value_learning_rate": 3e-3, "entropy_coef": 0.01,
            "max_critique_tokens": 160, "probe_rows": 16},
    reward={"model": "HuggingFaceTB/SmolLM2-135M-Instruct", "learning_rate": 1e-3,
            "lora_dropout": 0.0, "weight_decay": 0.0, "epochs": 2, "micro_batch_size": 4,
            "lora_targets": "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj",
            "max_tokens": 400, "max_critique_tokens": 160, "held_out": 80})
