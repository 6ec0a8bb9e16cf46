"""The toy world and the task of notebooks/prose.py: splits, critics and the base model."""

import hashlib
import json
import random
import re
from collections import Counter
from functools import partial
from statistics import mean

import pytest
import torch
import toy
from annotate import Feedback, read_reply
from data import InputError, critique_prompt
from experiments import designs
from helpers import SLOW
from model import encode_answer, encode_prompt
from notebooks import prose
from toy import build
from sampling import generate


def test_rows_are_those_of_the_committed_base_and_of_all_studies():
    """Equal bit for bit, on every machine: the checksums of all splits, lengths and tasks."""
    rows = [toy.rows(split, 100, seed, length) for split in toy.SPLITS for seed in (0, 7)
            for length in toy.LENGTHS]
    rows += [prose.TASK.rows(split, 100, 7) for split in ("train", "eval")]
    assert hashlib.sha256(json.dumps(rows).encode()).hexdigest().startswith("cbb6e2c3d6177619")


def test_splits_share_no_facts_and_no_posts_whatever_the_seed():
    facts = [{tuple(row["facts"].values()) for seed in range(3)
              for row in toy.rows(split, 1000, seed)} for split in toy.SPLITS]
    assert not facts[0] & facts[1] and not facts[0] & facts[2] and not facts[1] & facts[2]
    assert len({row["post"] for row in toy.rows("train", 3000)}) == 3000


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


def test_unseen_posts_share_no_facts_with_the_posts_of_the_settings():
    seen = {str(row["facts"]) for row in prose.TASK.rows("eval", 64, 0)}
    unseen = {str(row["facts"]) for row in prose.UNSEEN.rows("eval", 162, 0)}
    assert len(unseen) == 162 and not seen & unseen


def test_a_policy_that_copies_a_sentence_of_a_prose_post_loses_a_fact():
    for row in prose.TASK.rows("train", 400, 0):
        for sentence in re.split(r'(?<=\.)"? ', row["post"]):
            assert sum(fact in sentence for fact in row["facts"].values()) < 3, sentence


def test_half_of_the_facts_are_wrong_more_often_than_right():
    """Binomial: the standard deviation of a share of 2000 is .011 at .6 and .008 at .175."""
    rng = random.Random(0)
    wrong = Counter()
    for row in toy.rows("base", 2000, 0, 4):
        stated = toy.confuse(row["facts"], rng)
        wrong.update(slot for slot in toy.SLOTS if stated[slot] != row["facts"][slot])
    for slot in toy.SLOTS:
        expected = 0.6 if slot in toy.CONFUSED else 0.2 * 7 / 8
        assert wrong[slot] / 2000 == pytest.approx(expected, abs=0.04), slot


def test_the_critic_quotes_right_facts_as_good_and_wrong_ones_as_poor():  # Alg. 2 l.13
    """Labels follow from the facts of the draft; every quote is found, none is ambiguous."""
    rng = random.Random(1)
    for row in toy.rows("train", 300, length=2):
        stated = toy.confuse(row["facts"], rng)
        summary = toy.write_summary(stated, rng)
        feedback, grounding = read_reply({"response": summary}, toy.critique(row, summary))
        right = {*stated.values()} & {*row["facts"].values()}
        assert {*feedback.good_spans} == right and len(grounding.spans) == 6
        assert {*feedback.poor_spans} == {*stated.values()} - right
        assert not grounding.unmatched and not grounding.ambiguous
        assert toy.fact_accuracy(row, summary) == len(feedback.good_spans) / 6


ROW = {"post": "…", "facts": {"job": "nurse", "city": "New York", "thing": "bike"}}
POST = {"post": 'In March my sister opened my mail and told me "Sue me."',
        "facts": {"person": "sister", "month": "March", "reply": "Sue me."}}


# value: `fact_accuracy` for ROW, `supported_words` for POST
@pytest.mark.parametrize("row, response, good, poor, said, value, ambiguous", [
    (ROW, "A nurse from York writes that the bike is gone.", ["nurse", "bike"], ["York"],
     "New York", 2 / 3, 0),
    (ROW, "A nurse writes that the bike is gone.", ["nurse", "bike"], [],
     "that the writer lives in New York.", 2 / 3, 0),
    (ROW, "A driver, a nurse from New York lost the bike.", ["nurse", "New York", "bike"],
     ["driver"], "he writer is a nurse", 2 / 3, 0),
    # A phrase of a slot that the post does not have.
    (ROW, "A sad nurse from New York lost the bike.", ["nurse", "New York", "bike"], ["sad"],
     "that the writer feels sad.", 1, 0),
    # A repeated clause: its fact is quoted once and so ambiguous, and the repetition is poor.
    (ROW, "A nurse comes from New York, comes from New York, as the bike shows.",
     ["nurse", "New York", "bike"], [", comes from New York"],
     '"comes from New York"', 2 / 3, 1),
    # The first person: "bike" is good and "my bike" is poor, so "bike" gets 0.
    (ROW, "A nurse from New York lost my bike.", ["nurse", "New York", "bike"], ["my bike"],
     '"my"', 1, 0),
    # In prose, words that the post does not have are poor. Words of it, also inflected, words
    # about posts, and facts are not.
    (POST, "My sister did so, did so in March.", ["sister", "March"], [", did so"], "", 1, 0),
    (POST, "A polar bear opened it, a 16-year-old bear.", [],
     ["polar bear", "16-year-old bear"],
     "The post has no polar bear. The post has no 16-year-old bear.", 1 / 7, 0),
    (POST, "The author says that opening mails in June didn't cost dinner.", [],
     ["June", "dinner"], "The post has no dinner.", 5 / 7, 0),
    (POST, "It is what it is.", [], [], "", 1, 0)])
def test_what_the_critic_says(row, response, good, poor, said, value, ambiguous):
    is_prose = row is POST
    critic = prose.critique if is_prose else toy.critique
    truth = prose.supported_words if is_prose else toy.fact_accuracy
    feedback, grounding = read_reply({"response": response}, critic(row, response))
    assert feedback == Feedback(feedback.critique, good, poor) and said in feedback.critique
    assert ("has no" in feedback.critique) == (is_prose and bool(said))
    assert truth(row, response) == pytest.approx(value)
    assert is_prose or prose.repeated_facts(row, response) == ambiguous
    assert grounding.ambiguous == ambiguous and not grounding.unmatched


def prose_of(rows):
    """(row, draft, the annotator's reply without its JSON) of rows."""
    for row in rows:
        text = toy.write_draft(row["facts"], random.Random(row["id"]))
        yield row, text, toy.critique(row, text).partition("\n{")[0]


def test_the_annotator_has_several_wordings_and_keeps_to_them():
    """Each sentence is used, and the same response gets the same ones again."""
    said = Counter()
    for row, text, words in prose_of(toy.rows("train", 400)):
        assert toy.critique(row, text).startswith(words)
        for name in ("RIGHT", "WRONG", "ADDED", "DROPPED", "TWICE", "FIRST_PERSON"):
            for number, sentence in enumerate(getattr(toy, name)):
                fixed = max(re.split(r"{\w*}", sentence), key=len)[1:]
                said[name, number] += fixed in words
    assert all(said.values()), said


def test_the_base_has_not_seen_a_sentence_of_the_annotator():
    """Neither in an answer of the exercises nor in the tokenizer's training text."""
    rng = random.Random(0)
    rows = [row for n in toy.LENGTHS for row in toy.rows("base", 30, 0, n)]
    sentences = {sentence for _, _, words in prose_of(rows)
                 for sentence in re.split(r'(?<=[.?]) (?=[A-Z])', words)}
    texts = "\n".join(build.tokenizer_texts(0) + [
        text for _ in range(3000) for text in build.exercise(rng)])
    assert len(sentences) > 300 and "May" not in sentences
    assert [sentence for sentence in sentences if sentence in texts] == []
    fixed = [part for sentences in (toy.RIGHT, toy.WRONG, toy.DROPPED, toy.MISSING,
                                     toy.TWICE)
             for sentence in sentences for part in re.split(r"{\w*}", sentence)
             if len(part) > 8]
    assert [part for part in fixed if part in texts] == []


def test_critiques_fit_the_limits_of_the_toy_runs(toy_model):
    """max_new_tokens; max_critique_tokens, but for one in a hundred; and the context, so that
    no row is dropped. z has 75 tokens on average at one sentence."""
    _, tokenizer = toy_model
    for task, length in ((toy.TASK, 1), (designs.LONG, 4)):
        assert task.settings["kl_target"] == 2 * length               # nats per response
        longest_y = task.settings["max_new_tokens"]
        longest_z = task.settings["max_critique_tokens"]
        sizes = []
        for row in toy.rows("train", 400, 0, length):
            text = toy.write_draft(row["facts"], random.Random(row["id"]))
            x = encode_prompt(tokenizer, critique_prompt(toy.prompt(row), ""))
            sizes.append(len(encode_answer(tokenizer, toy.critique(row, text))))
            assert len(encode_answer(tokenizer, text)) <= longest_y
            assert len(x) + longest_y + longest_z <= 512
        assert sum(size > longest_z for size in sizes) <= 4
        assert length > 1 or mean(sizes) <= 75


@pytest.mark.parametrize("length", [1, 2])
def test_no_temperature_solves_the_committed_base(toy_model, length):
    """At most .75 of the facts of held-out posts (.35 to .58 and .51 to .66 with 8 seeds)."""
    assert sum(path.stat().st_size for path in toy.BASE.iterdir()) <= 3 * 1024 * 1024
    model, tokenizer = toy_model
    rows = toy.rows("eval", 200 if SLOW else 64, 0, length)
    prompts = [encode_prompt(tokenizer, toy.prompt(row)) for row in rows]
    for temperature in (0, 0.3, 0.5, 0.7, 1):
        torch.manual_seed(0)
        ids = generate(model, prompts, 28 * length, temperature, [tokenizer.eos_token_id])
        texts = [tokenizer.decode(y, skip_special_tokens=True) for y in ids]
        assert 0.3 <= mean(map(toy.fact_accuracy, rows, texts)) <= 0.75, temperature
