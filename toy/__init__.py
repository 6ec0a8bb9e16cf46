"""The toy task: posts full of facts, summaries with systematic errors, and an exact annotator.

It is a miniature of SLF5K (§4.3), so that all of Text2Grad runs on a laptop in minutes. The
base model (toy/base, rebuilt by `python -m toy.build`) was trained on summaries with systematic
errors. In half of the slots (kinds of facts), the facts are more often wrong than right.
`critique` is the annotator. It knows the true facts, reasons about them one by one in English,
and then quotes spans (Algorithm 2, chain of thought). experiments/designs.py has other
annotators that know the same facts.

Simplification: every fact is a phrase from a short list, so the annotator finds each one
exactly. It replies in text, as an LLM would, and `annotate` parses the reply.
"""

import json
import random
import re
import zlib
from pathlib import Path

from data import InputError, Task

BASE = Path(__file__).parent / "base"          # the committed checkpoint

# The phrases (facts) of each slot. The first and second, third and fourth, … are neighbours:
# they share words or are easily confused.
SLOTS = {
    "person": ["sister", "older sister", "cousin", "second cousin", "boss", "former boss",
               "landlord", "tenant", "brother", "half brother", "neighbour",
               "noisy neighbour", "nephew", "niece", "lodger", "roommate"],
    "month": ["March", "early March", "August", "late August", "June", "July", "October",
              "mid December", "April", "rainy April", "November", "dark November", "January",
              "snowy January", "September", "February"],
    "reply": ["You owe me.", "I need it.", "It is mine.", "Sue me.", "Ask my wife.",
              "So what.", "We sold it.", "Nobody cares.", "Not now.", "Too late.", "Go away.",
              "They knew.", "Prove it.", "She agreed.", "He told me.", "Wait and see."],
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
PER_SENTENCE = 3                               # number of facts in a sentence
LENGTHS = range(1, 5)                          # possible numbers of sentences in a summary
LENGTH = 1                                     # default number of sentences
FAULT_RATE = 0.2                               # share of faulty sentences in the base's data
CONFUSED = "city", "person", "month", "plan", "friend", "place"    # slots the base gets wrong

POSTS = [
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
           "Thanks for reading.", "We used to get along.", "It may be my own fault.",
           "This is still going on.", "I hope that it ends well."]
# A faulty sentence repeats the clause in brackets, or has "my" for {the}.
SUMMARIES = [
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

# The facts of a row belong to the split that contains their hash modulo 16.
SPLITS = {"base": range(0, 12), "train": range(12, 15), "eval": range(15, 16)}


def write_post(facts: dict[str, str], rng: random.Random, forms) -> str:
    """A first-person post that states every fact once, in random wording."""
    sentences = [rng.choice(choices) for choices in forms[: len(facts) // PER_SENTENCE]]
    if rng.random() < 0.5:
        sentences.insert(rng.randrange(1, len(sentences) + 1), rng.choice(_FILLER))
    return " ".join(sentences).format(**facts)


def write_summary(facts: dict[str, str], rng: random.Random, fault_rate: float = 0.0,
                  forms=SUMMARIES) -> str:
    """A summary with one sentence for every three facts.

    With probability `fault_rate`, a sentence either repeats a clause or uses the first person.
    """
    sentences = []
    for choices in forms[: len(facts) // PER_SENTENCE]:
        fault = rng.choice(("twice", "my")) if rng.random() < fault_rate else ""
        clause = r"\1, \1" if fault == "twice" else r"\1"
        sentence = re.sub(r"\[(.+?)\]", clause, rng.choice(choices))
        sentences.append(sentence.format(the="my" if fault == "my" else "the", **facts))
    return " ".join(sentences)


def confuse(facts: dict[str, str], rng: random.Random) -> dict[str, str]:
    """The facts with errors, as in the base's training data.

    A fact in a CONFUSED slot is replaced by its neighbour with probability 0.6. Any other fact
    is replaced by a random phrase of its slot with probability 0.2.
    """
    confused = dict(facts)
    for slot, fact in facts.items():
        values = SLOTS[slot]
        if slot in CONFUSED and rng.random() < 0.6:
            confused[slot] = values[values.index(fact) ^ 1]
        elif slot not in CONFUSED and rng.random() < 0.2:
            confused[slot] = rng.choice(values)
    return confused


def write_draft(facts: dict[str, str], rng: random.Random) -> str:
    """A summary as in the base's training data, with its errors and faults."""
    return write_summary(confuse(facts, rng), rng, FAULT_RATE)


def rows(split: str, n: int, seed: int = 0, length: int = LENGTH, posts=POSTS,
         summaries=SUMMARIES) -> list[dict]:
    """`n` rows {id, post, facts, reference} of one split ("base", "train" or "eval").

    length: number of sentences in a summary; a sentence has about 20 tokens. posts, summaries:
    the forms of their sentences, one list for each sentence, as in POSTS and SUMMARIES. No two
    posts are equal. The same arguments give the same rows on every machine. Raises InputError
    if the length is not in LENGTHS, or if `n` different posts are not found.
    """
    if length not in LENGTHS:
        raise InputError(f"toy: a summary cannot have {length!r} sentences; choose 1 to 4")
    rng = random.Random(f"{split}-{seed}-{length}")
    slots = [*SLOTS][: PER_SENTENCE * length]
    examples = {}                                                  # by post
    attempts = 0                                                   # since the last new post
    while len(examples) < n:
        attempts += 1
        if attempts > 2000:
            raise InputError(f"toy: {n} posts are too many; {len(examples)} different ones "
                             f"were found in the split {split!r} at length {length}")
        facts = {slot: rng.choice(SLOTS[slot]) for slot in slots}
        if zlib.crc32("|".join(facts.values()).encode()) % 16 not in SPLITS[split]:
            continue
        post = write_post(facts, rng, posts)
        if post not in examples:
            examples[post] = {"id": f"toy-{split}-{seed}-{len(examples)}", "post": post,
                              "facts": facts,
                              "reference": write_summary(facts, rng, forms=summaries)}
            attempts = 0
    return list(examples.values())


SLOT_OF = {value: slot for slot, values in SLOTS.items() for value in values}
_FACT = re.compile(r"\b(?:" + "|".join(sorted(map(re.escape, SLOT_OF), key=len, reverse=True))
                   + r")(?!\w)")


def said_facts(response: str) -> list[tuple[int, str, str]]:
    """(position, slot, phrase) of every fact phrase in a summary, in order of position.

    If one phrase contains another, only the longer one is listed.
    """
    return [(match.start(), SLOT_OF[match[0]], match[0]) for match in _FACT.finditer(response)]


def fact_accuracy(row: dict, response: str) -> float:
    """Share of the facts that the summary states exactly once and does not contradict."""
    phrases = {}
    for _, slot, phrase in said_facts(response):
        phrases.setdefault(slot, []).append(phrase)
    facts = row["facts"]
    return sum(phrases.get(slot) == [fact] for slot, fact in facts.items()) / len(facts)


def said_twice(response: str) -> list[tuple[str, str]]:
    """(annotator's sentence, quote) for each clause that is repeated immediately.

    The quote is the second occurrence with its comma, for example ", opened it".
    """
    repeats = re.finditer(r"(\b\w[\w ]{5,}), \1(?!\w)", response)
    return [(say(TWICE, response, match[1]), f", {match[1]}") for match in repeats]


def faults(response: str) -> list[tuple[str, str]]:
    """(annotator's sentence, quote) for each fault of style.

    These are the repeats of `said_twice`, and "my" before a fact, such as "my sister".
    """
    first_person = re.finditer(rf"\bmy (?:{_FACT.pattern})", response)
    return said_twice(response) + [
        (say(FIRST_PERSON, response, match[0]), match[0]) for match in first_person]


# ── Words

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


# ── The annotator

# How a sentence states a fact. The part after the bar also occurs alone, as in "not in June".
STATEMENTS = {
    "person": "it was |the {}", "month": "it happened |in {}", "reply": 'the words were |"{}"',
    "job": "the writer is |a {}", "city": "the writer lives |in {}",
    "thing": "the writer lost |the {}", "feeling": "the writer feels |{}",
    "plan": "the writer wants |to {}", "friend": "the writer talks |to the {}",
    "price": "it had cost |{}", "place": "it stood |in the {}", "donor": "it came |from the {}"}

# What the annotator says: {fact} states the post's fact, {phrase} is what the summary says.
RIGHT = ["{fact}, as the summary says.", "{fact}, and the summary says so."]
WRONG = ["{fact}, not {phrase}.", "{fact}, but the summary says {phrase}."]
# The same if the summary adds words to the fact or leaves some out: "dark" of "dark November".
ADDED = ['{fact}, but the summary adds "{word}".']
DROPPED = ['{fact}, but the summary says only "{value}".']
UNFOUNDED = ["the post does not say that {}.", "nobody says that {}."]
MISSING = ["it leaves out that {}.", "it does not say that {}."]
TWICE = ['it says "{}" twice.', 'why is "{}" said twice?']
FIRST_PERSON = ['it says "my", but somebody else wrote the summary.',
                'why "my"? Somebody else wrote the summary.']


def say(sentences: list[str], response: str, text: str) -> str:
    """One of the sentences about a text of the response, with the text in it.

    A hash of response and text chooses the sentence, so it is the same in each call.
    """
    choice = zlib.crc32(f"{response}|{text}".encode()) % len(sentences)
    sentence = sentences[choice].format(text)
    return sentence[0].upper() + sentence[1:]


def state(slot: str, value: str) -> tuple[str, str]:
    """A phrase as people write it ("in June"), and its statement ("it happened in June")."""
    verb, _, phrase = STATEMENTS[slot].format(plain(value)).partition("|")
    return phrase, verb + phrase


def judged_facts(row: dict, response: str) -> list[tuple[int, str, str, str, bool]]:
    """(position, slot, phrase, annotator's sentence, whether it is right) of each phrase.

    The phrases are in order of position, without repeats. Raises ValueError if the response is
    empty.
    """
    if not response.strip():
        raise ValueError("toy annotator: the response is empty; only text can be judged")
    judgements = {}                                                # by phrase
    for start, slot, phrase in said_facts(response):
        fact = row["facts"].get(slot)
        sentence = say(verdicts(slot, phrase, fact), response, phrase)
        # Only the first place is judged; `faults` reports repeated clauses.
        judgements.setdefault(phrase, (start, slot, phrase, sentence, phrase == fact))
    return list(judgements.values())


def critique(row: dict, response: str, remarks=None) -> str:
    """The annotator's reply to a summary: reasoning in English, then the span JSON.

    A repeated phrase is quoted only once. This quote is ambiguous, so it gives no reward (but
    see Task.repeats_are_poor). remarks: (sentence, quote) pairs that follow the facts; None
    uses the summary's `faults`.
    """
    judgements = judged_facts(row, response)
    slots = {slot for _, slot, *_ in judgements}
    sentences = []
    spans = {"good_spans": [], "poor_spans": []}
    for _, _, phrase, sentence, is_right in judgements:
        sentences.append(sentence)
        spans["good_spans" if is_right else "poor_spans"].append(phrase)
    sentences += [say(MISSING, response, state(slot, fact)[1])
                  for slot, fact in row["facts"].items() if slot not in slots]
    for sentence, quote in faults(response) if remarks is None else remarks:
        sentences.append(sentence)
        spans["poor_spans"].append(quote)
    return f"{' '.join(sentences)}\n{json.dumps(spans)}"


def plain(value: str) -> str:
    """A phrase without its full stop, for use inside a sentence."""
    return value.rstrip(".")


def verdicts(slot: str, value: str, fact: str | None) -> list[str]:
    """The possible sentences about a phrase of the summary. fact: the post's fact, or None."""
    phrase, statement = state(slot, value)
    if fact is None:
        return [form.format(statement) for form in UNFOUNDED]
    forms = RIGHT if value == fact else WRONG
    if fact.endswith(f" {value}"):
        forms = DROPPED
    elif value.endswith(f" {fact}"):
        forms = ADDED
    return [form.format(fact=state(slot, fact)[1], phrase=phrase, value=value,
                        word=value.removesuffix(f" {fact}")) for form in forms]


NUMBERS = "no", "one", "two", "three", "four"


def prompt(row: dict) -> str:
    """The policy's prompt for a row."""
    sentences = len(row["facts"]) // PER_SENTENCE
    return (f"Summarise the post in {NUMBERS[sentences]} sentence{'s' * (sentences > 1)}.\n\n"
            "Post: " + row["post"])                         # + raises TypeError for non-text


TASK = Task(
    "toy", prompt, needs=(("post",), ("facts",)),
    annotator_role="You check summaries of short posts.",
    criteria="whether each fact of the summary stands in the post", quotes="Quote every fact.",
    truth={"fact accuracy": fact_accuracy}, rows=rows,
    settings={
        "model": "toy/base", "annotator_function": "toy:critique", "annotated_rows": 3000,
        "eval_rows": 200, "max_critique_tokens": 104,
        "reward_epochs": 4, "reward_batch_size": 16, "reward_learning_rate": 5e-3,
        "reward_lora_r": 32, "reward_lora_alpha": 64, "reward_max_tokens": 512,
        "iterations": 18, "batch_size": 64, "minibatch_size": 64, "ppo_epochs": 4,
        "decode_batch_size": 256, "temperature": 1.0, "max_new_tokens": 32, "kl_coef": 0.5,
        "kl_target": 2.0, "kl_horizon": 115, "learning_rate": 1e-3, "value_rate_factor": 7,
        "schedule": "linear", "lora_targets": "q_proj,v_proj"})
