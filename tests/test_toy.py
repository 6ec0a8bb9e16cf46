"""The toy world: its splits, its critic and its base model."""

import random

import pytest
import torch
from conftest import ROOT

import toy
from annotate import Feedback, parse_feedback, read_reply
from data import get_task, reward_prompt
from model import encode_answer, encode_prompt
from report import colour_tokens, split_text, table
from sampling import generate


def key(row):
    return tuple(row["facts"].values())


def test_splits_share_no_facts_whatever_the_seed():
    seen = {split: {key(r) for seed in range(3) for r in toy.rows(split, 1500, seed)} for split in toy.SPLITS}
    assert not seen["base"] & seen["train"] and not seen["base"] & seen["eval"] and not seen["train"] & seen["eval"]


def test_rows_are_a_function_of_split_and_seed():
    assert toy.rows("eval", 5, 3) == toy.rows("eval", 9, 3)[:5] != toy.rows("eval", 5, 4)
    with pytest.raises(KeyError, match="no split 'test'"):
        toy.rows("test", 1)


def test_every_fact_stands_once_in_the_post_and_once_in_a_true_summary():
    for row in toy.rows("train", 300):
        for text in (row["post"], row["reference"]):
            assert all(text.count(fact) == 1 for fact in row["facts"].values()), text


def test_no_phrase_of_the_world_lies_inside_another():
    phrases = [value for values in toy.SLOTS.values() for value in values]
    assert not [(a, b) for a in phrases for b in phrases if a != b and a in b]


def test_wrong_facts_come_at_the_error_rate():
    rng = random.Random(0)
    rows = toy.rows("base", 1000)
    right = sum(toy.fact_accuracy(row, toy.write_summary(row["facts"], rng, 0.36)) for row in rows) / len(rows)
    assert abs(right - 0.64) < 0.02


def test_the_critic_quotes_right_facts_as_good_and_wrong_ones_as_poor():  # Alg. 2 l.13
    """Recomputed from the facts that went into the summary; every quote is found, none is ambiguous."""
    rng = random.Random(1)
    for row in toy.rows("train", 300):
        said = {s: rng.choice(toy.SLOTS[s]) if rng.random() < 0.4 else fact for s, fact in row["facts"].items()}
        summary = toy.write_summary(said, rng)
        feedback, found = read_reply({"id": "", "prompt": "", "response": summary}, toy.critique(row, summary))
        assert sorted(feedback.good_spans) == sorted(v for s, v in said.items() if v == row["facts"][s])
        assert sorted(feedback.poor_spans) == sorted(v for s, v in said.items() if v != row["facts"][s])
        assert not found.unmatched and not found.ambiguous and len(found.spans) == 7
        for slot, value in said.items():
            assert toy.verdict(slot, value, row["facts"][slot]) in feedback.critique
        assert toy.fact_accuracy(row, summary) == len(feedback.good_spans) / 7


def test_the_critic_names_missing_and_repeated_facts_and_rewards_no_repeat():
    row = toy.rows("train", 1)[0]
    job, city = row["facts"]["job"], row["facts"]["city"]
    feedback = parse_feedback(toy.critique(row, f"A {job}, a {job} from {city}."))
    assert f"The job {job} is a repeat." in feedback.critique and f"The plan {row['facts']['plan']} is missing." in feedback.critique
    assert feedback == Feedback(feedback.critique, [job, city], [job])
    assert toy.fact_accuracy(row, f"A {job}, a {job} from {city}.") == 1 / 7
    with pytest.raises(ValueError, match="empty"):
        toy.critique(row, " ")


def test_the_committed_base_is_small_and_gets_a_third_of_the_facts_wrong(toy_model):
    """README: base .60 to .75 when sampled at temperature 1 on 200 held-out posts."""
    assert sum(path.stat().st_size for path in (ROOT / "toy" / "base").iterdir()) <= 3 * 1024 * 1024
    model, tokenizer = toy_model
    rows = toy.rows("eval", 200)
    ids = generate(model, [encode_prompt(tokenizer, get_task("toy").policy_prompt(row)) for row in rows], 48, 1.0,
                   tokenizer.eos_token_id, generator=torch.Generator().manual_seed(0))
    texts = [tokenizer.decode(y, skip_special_tokens=True) for y in ids]
    assert 0.60 <= sum(map(toy.fact_accuracy, rows, texts)) / len(rows) <= 0.75


def test_everything_the_toy_run_writes_fits_its_limits(toy_model):
    """The longest critique is shorter than max_critique_tokens, instruction and all within the context of 512."""
    _, tokenizer = toy_model
    rng = random.Random(2)
    for row in toy.rows("train", 200):
        summary = toy.write_summary(row["facts"], rng, 1.0)
        x = encode_prompt(tokenizer, reward_prompt(get_task("toy").policy_prompt(row), summary))
        z = encode_answer(tokenizer, toy.critique(row, summary))
        assert len(z) <= 160 and len(x) + len(z) <= 300 and len(encode_answer(tokenizer, summary)) <= 48


def test_coloured_tokens_lose_no_text_and_mark_signs_once():  # Figure 1
    tokens, delta = ["The", " nurse", " from", " York", " left", "."], [0, 1, 0, -1, -1, 0]
    assert colour_tokens(tokens, delta, colour=False) == "The [+nurse+] from [-York left-]."
    assert colour_tokens(tokens, delta, colour=True) == "The \033[32mnurse\033[0m from \033[31mYork left\033[0m."


def test_split_text_gives_a_shared_character_to_its_first_token():
    assert split_text("a😀b", [(0, 1), (1, 2), (1, 2), (2, 3), (3, 3)]) == ["a", "😀", "", "b", ""]


def test_table_aligns_numbers_and_shows_none_as_a_dash():
    lines = table(["what", "before", "after"], [["accuracy", 0.5, 0.9761], ["steps", 3, None]]).split("\n")
    assert lines[2:] == ["accuracy   0.500  0.976", "steps          3      –"]
