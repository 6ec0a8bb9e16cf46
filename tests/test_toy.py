"""The toy world and the task of notebooks/prose.py: splits, critics and the base model."""

import json
import random
import re
from collections import Counter
from functools import partial
from statistics import mean

import pytest
import torch
import toy
from annotate import Feedback, read_reply, token_offsets
from data import InputError, reward_prompt
from helpers import ROOT, SLOW
from model import encode_answer, encode_prompt
from notebooks import prose
from reward_model import read_judgement
from sampling import generate


def read(response, reply):
    """The feedback and its grounding of a critic's reply."""
    return read_reply({"id": "", "prompt": "", "response": response}, reply)


# ── Rows

def test_splits_share_no_facts_and_no_posts_whatever_the_seed():
    rows = {split: [row for seed in range(3) for row in toy.rows(split, 1500, seed)]
            for split in toy.SPLITS}
    base, train, evaluation = ({tuple(row["facts"].values()) for row in rows[split]}
                               for split in toy.SPLITS)
    assert not base & train and not base & evaluation and not train & evaluation
    held_out = {row["post"] for row in toy.rows("eval", 1000)}
    training = {row["post"] for row in toy.rows("train", 3000)}
    assert len(held_out) == 1000 and len(training) == 3000
    assert not held_out & {row["post"] for row in rows["train"]}


def test_rows_are_a_function_of_split_seed_and_length():
    assert toy.rows("eval", 5, 3) == toy.rows("eval", 9, 3)[:5] != toy.rows("eval", 5, 4)
    assert ([len(toy.rows("train", 1, 0, length)[0]["facts"]) for length in toy.LENGTHS]
            == [3, 6, 9, 12])


@pytest.mark.parametrize("call, error, message", [
    (partial(toy.rows, "eval", 100_000), InputError,
     "100000 posts are too many; .* split 'eval' at length 1"),
    *[(partial(toy.rows, "train", 1, 0, length), InputError,
       f"cannot have {length!r} sentences; choose 1 to 4") for length in (0, 5, 1.5)],
    (partial(toy.critique, {}, " "), ValueError, "empty")])
def test_what_cannot_be_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("rows", [*(partial(toy.rows, length=n) for n in toy.LENGTHS),
                                  prose.TASK.rows])
def test_every_fact_stands_once_in_the_post_and_once_in_a_true_summary(rows):
    """Summaries in which the critics find nothing poor."""
    for row in rows("train", 100, 0):
        for text in (row["post"], row["reference"]):
            phrases = [value for _, _, value in toy.said_facts(text)]
            assert sorted(phrases) == sorted(row["facts"].values())
        reply = toy.critique(row, row["reference"])
        assert json.loads(reply.split("\n")[1])["poor_spans"] == []
        assert prose.critique(row, row["reference"]) == reply
        assert toy.fact_accuracy(row, row["reference"]) == 1
        assert prose.supported_words(row, row["reference"]) == 1
        assert prose.repeated_facts(row, row["reference"]) == 0


def test_prose_posts_have_no_sentence_with_all_facts_and_references_of_four_forms():
    """A policy that copies a sentence of such a post cannot state every fact."""
    rows = prose.TASK.rows("train", 400, 0)
    openings = Counter()
    for row in rows:
        for sentence in re.split(r'(?<=\.)"? ', row["post"]):
            assert sum(fact in sentence for fact in row["facts"].values()) < 3, sentence
        text = row["reference"]
        for slot, fact in row["facts"].items():
            text = text.replace(fact, slot)
        openings[text] += 1
    assert len(openings) == 4 and min(openings.values()) > 60
    held_out = {row["post"] for row in prose.TASK.rows("eval", 200, 0)}
    assert len(held_out) == 200 and not held_out & {row["post"] for row in rows}


def test_phrases_belong_to_one_slot_and_begin_with_words_of_their_own():
    """Phrases of a slot differ in their first word; a phrase inside another has its slot."""
    phrases = [value for values in toy.SLOTS.values() for value in values]
    assert len(set(phrases)) == len(phrases) == 16 * 3 + 8 * 9
    for values in toy.SLOTS.values():
        assert len({value.split()[0] for value in values}) == len(values), values
    inside = [(a, b) for a in phrases for b in phrases if a != b and f" {a} " in f" {b} "]
    assert len(inside) > 10 and all(toy.SLOT_OF[a] == toy.SLOT_OF[b] for a, b in inside)


def test_half_of_the_facts_are_confused_with_their_neighbour_more_often_than_not():
    """Binomial: the standard deviation of a share of 2000 is .011 at .6 and .008 at .825."""
    rng, told = random.Random(0), Counter()
    for row in toy.rows("base", 2000, 0, 4):
        for slot, value in toy.confuse(row["facts"], rng).items():
            values, fact = toy.SLOTS[slot], row["facts"][slot]
            neighbour = values[values.index(fact) ^ 1]
            told[slot, {fact: "right", neighbour: "neighbour"}.get(value, "other")] += 1
    for slot in toy.SLOTS:
        if slot in toy.CONFUSED:
            assert told[slot, "other"] == 0, slot
            assert told[slot, "neighbour"] / 2000 == pytest.approx(0.6, abs=0.04), slot
        else:
            assert told[slot, "right"] / 2000 == pytest.approx(0.8 + 0.2 / 8, abs=0.03), slot


# ── The critic

def test_the_critic_quotes_right_facts_as_good_and_wrong_ones_as_poor():  # Alg. 2 l.13
    """Labels follow from the facts of the draft; every quote is found, none is ambiguous."""
    rng = random.Random(1)
    for row in toy.rows("train", 300, length=2):
        said = toy.confuse(row["facts"], rng)
        summary = toy.write_summary(said, rng)
        feedback, found = read(summary, toy.critique(row, summary))
        right = {*said.values()} & {*row["facts"].values()}
        assert sorted(feedback.good_spans) == sorted(right)
        assert sorted(feedback.good_spans + feedback.poor_spans) == sorted(said.values())
        assert not found.unmatched and not found.ambiguous and len(found.spans) == 6
        for slot, value in said.items():
            assert toy.verdict(slot, value, row["facts"][slot]) in feedback.critique
        assert toy.fact_accuracy(row, summary) == len(feedback.good_spans) / 6


ROW = {"post": "…", "facts": {"job": "nurse", "city": "New York", "thing": "bike"}}
POST = {"post": 'In March my sister opened my mail and told me "Sue me."',
        "facts": {"person": "sister", "month": "March", "reply": "Sue me."}}


# value: `fact_accuracy` for ROW, `supported_words` for POST
@pytest.mark.parametrize("row, response, good, poor, said, value, ambiguous", [
    (ROW, "A nurse from York writes that the bike is gone.", ["nurse", "bike"], ["York"],
     "The city York was New York, wrong.", 2 / 3, 0),
    (ROW, "A nurse writes that the bike is gone.", ["nurse", "bike"], [],
     "The city New York is missing.", 2 / 3, 0),
    (ROW, "A nurse, a driver from New York lost the bike.", ["nurse", "New York", "bike"],
     ["driver"], "The job driver was nurse, wrong.", 2 / 3, 0),
    (ROW, "A driver, a nurse from New York lost the bike.", ["nurse", "New York", "bike"],
     ["driver"], "The job driver was nurse, wrong.", 2 / 3, 0),
    # A repeated clause: its fact is quoted once and so ambiguous, and the repetition is poor.
    (ROW, "A nurse comes from New York, comes from New York, as the bike shows.",
     ["nurse", "New York", "bike"], [", comes from New York"],
     "It says comes from New York twice.", 2 / 3, 1),
    # The first person: "bike" is good and "my bike" is poor, so "bike" gets 0.
    (ROW, "A nurse from New York lost my bike.", ["nurse", "New York", "bike"], ["my bike"],
     "It speaks of my bike as the writer.", 1, 0),
    # In prose, words that the post does not have are poor. Words of it, also inflected, words
    # about posts, and facts are not.
    (POST, "The sister opened it in March.", ["sister", "March"], [], "", 1, 0),
    (POST, "A polar bear opened it, a 16-year-old bear.", [],
     ["polar bear", "16-year-old bear"],
     "The post has no polar bear. The post has no 16-year-old bear.", 1 / 7, 0),
    (POST, "A bear opened it, a bear.", [], ["bear"], "The post has no bear.", 1 / 3, 1),
    (POST, "The author says that opening mails in June didn't cost dinner.", [],
     ["June", "dinner"], "The post has no dinner.", 5 / 7, 0),
    (POST, "Slightly rephrased for clarity", [], ["Slightly rephrased", "clarity"],
     "The post has no Slightly rephrased.", 0, 0),
    (POST, "It is what it is.", [], [], "", 1, 0)])
def test_what_the_critic_says(row, response, good, poor, said, value, ambiguous):
    is_prose = row is POST
    critic, truth = ((prose.critique, prose.supported_words) if is_prose
                     else (toy.critique, toy.fact_accuracy))
    feedback, grounding = read(response, critic(row, response))
    assert feedback == Feedback(feedback.critique, good, poor) and said in feedback.critique
    assert ("has no" in feedback.critique) == (is_prose and bool(said))
    assert truth(row, response) == pytest.approx(value)
    assert is_prose or prose.repeated_facts(row, response) == ambiguous
    assert grounding.ambiguous == ambiguous and not grounding.unmatched


# ── The base model

def test_critiques_fit_the_limits_of_the_toy_run(toy_model):
    """max_new_tokens, max_critique_tokens, and the context, with prompt and instruction."""
    _, tokenizer = toy_model
    rng = random.Random(1)
    marked = Counter()
    for row in toy.rows("train", 400):
        ids = encode_answer(tokenizer, toy.write_draft(row["facts"], rng))
        text, offsets = token_offsets(tokenizer, ids)
        critique = toy.critique(row, text)
        x = encode_prompt(tokenizer, reward_prompt(toy.prompt(row), text))
        z = encode_answer(tokenizer, critique)
        assert len(ids) <= 32 and len(z) <= 96 and len(x) + len(z) <= 256
        judgement = read_judgement(critique, text, offsets)
        marked.update(ambiguous=judgement.ambiguous, conflicting=judgement.conflicts)
    assert min(marked["ambiguous"], marked["conflicting"]) > 10, marked


@pytest.mark.parametrize("length", [1, 2])
def test_no_temperature_solves_the_committed_base(toy_model, length):
    """README: at most .75 of the facts at any temperature, on held-out posts; ≤ 3 MB. Eight
    seeds give .35 ± .01 to .58 ± .03 for one sentence, .51 ± .01 to .66 ± .02 for two."""
    size = sum(path.stat().st_size for path in (ROOT / "toy" / "base").iterdir())
    assert size <= 3 * 1024 * 1024
    model, tokenizer = toy_model
    rows = toy.rows("eval", 200 if SLOW else 64, 0, length)
    prompts = [encode_prompt(tokenizer, toy.prompt(row)) for row in rows]
    for temperature in (0, 0.3, 0.5, 0.7, 1):
        uniforms = torch.rand(len(prompts), 28 * length,
                              generator=torch.Generator().manual_seed(0))
        ids = generate(model, prompts, 28 * length, temperature, [tokenizer.eos_token_id],
                       uniforms)
        texts = [tokenizer.decode(y, skip_special_tokens=True) for y in ids]
        assert 0.3 <= mean(map(toy.fact_accuracy, rows, texts)) <= 0.75, temperature
