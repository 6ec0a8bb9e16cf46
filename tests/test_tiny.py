"""tiny.py computes what the package computes, part by part, from the same inputs."""

import json
import random
from functools import partial
from types import SimpleNamespace

import pytest
import tiny
import torch
import toy
from torch.testing import assert_close

from annotate import ground, parse_feedback, token_offsets, token_rewards
from model import add_lora, encode_prompt, load_model, response_hidden, use_lora
from policy import Rollouts, add_advantages, nl_gradient_loss, ppo_loss
from reward_model import z_loss
from sampling import generate, pad_batch, token_logprobs

pytestmark = pytest.mark.inner
LAYERS = "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"


def drafts(count, length=1):
    """(row, draft y, the annotator's z) of toy posts."""
    rows = toy.rows("train", count, 0, length)
    responses = [toy.write_draft(row["facts"], random.Random(row["id"])) for row in rows]
    return [(row, y, tiny.generate_dual_feedback(row, y)) for row, y in zip(rows, responses)]


@pytest.fixture()
def base():
    """toy/base in float64: in float32, rounding decides the signs of some steps of AdamW."""
    torch.set_default_dtype(torch.float64)
    yield load_model(toy.BASE, torch.float64, "cpu")[0]
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("length", [1, 4])
def test_delta(length):
    """Where δ differs, tiny.py gives 0, because a quote is also a part of another word."""
    for _, y, z in drafts(200, length):
        ids = tiny.TOKENIZER(y).input_ids + [tiny.EOS]
        texts = tiny.token_texts(ids)
        delta = tiny.pseudo_rewards(ids, y, z).tolist()
        text, offsets = token_offsets(tiny.TOKENIZER, ids)
        expected = token_rewards(text, offsets, ground(text, parse_feedback(z)).spans)
        assert texts == [text[start:end] for start, end in offsets]
        changed = [a for a, b in zip(delta, expected, strict=True) if a != b]
        assert not any(changed) and not (changed and length == 1)
        assert not changed or any(
            y.count(quote) > 1 for quotes in json.loads(z.split("\n")[1]).values()
            for quote in quotes)


def test_critiques_without_reward():
    for z in (tiny.generate_dual_feedback({}, " "), "Good.", "4", '{"good_spans": ["a"]}',
              '{"good_spans": 5}', '{"good_spans": ["a"], "poor_spans": ["a"]'):
        assert tiny.find_spans("a", z) == []
    z = 'Fine. {"good_spans": ["a", "c", 5], "poor_spans": ["b"]}'
    assert tiny.find_spans("a b a", z) == [(2, 3, -1)]
    # A token with both labels gets 0, and so does a token that is half inside a span.
    y = "It was my sister."
    z = '{"good_spans": ["sister", "It wa"], "poor_spans": ["my sister"]}'
    ids = tiny.TOKENIZER(y).input_ids
    assert tiny.token_texts(ids) == ["It", " was", " my", " sister", "."]
    assert tiny.pseudo_rewards(ids, y, z).tolist() == [1, 0, -1, 0, 0]


def test_logprobs_and_sampling(base, monkeypatch):
    prompts = [toy.prompt(row) for row, _, _ in drafts(5)]
    ids = [encode_prompt(tiny.TOKENIZER, prompt) for prompt in prompts]
    greedy = generate(base, ids, 20, 0.0, [tiny.EOS])
    assert tiny.sample(base, prompts, 20, True)[0] == greedy
    seen = []
    draw = torch.Tensor.multinomial
    monkeypatch.setattr(torch.Tensor, "multinomial", lambda p, n: seen.append(p) or draw(p, n))
    answers, _ = tiny.sample(base, prompts, 20)
    drawn = [p[i, token].log() for i, y in enumerate(answers) for p, token in zip(seen, y)]
    logprobs, hidden, mask = tiny.score_tokens(base, prompts, answers)
    x, x_mask, y, _ = pad_batch(ids, answers)
    expected_hidden = response_hidden(base, x, x_mask, y, mask)[mask]                # [N, H]
    expected = token_logprobs(expected_hidden, base.lm_head.weight, y[mask]).double()
    assert_close((hidden[mask], logprobs[mask], torch.stack(drawn)),
                 (expected_hidden, expected, expected), atol=1e-5, rtol=0)


def test_two_steps_of_adamw_on_lora(base, monkeypatch):
    monkeypatch.setattr(tiny, "REWARD_STEPS", 2)
    monkeypatch.setattr(tiny, "REWARD_BATCH", 1)
    triples = [(toy.prompt(row), y, z) for row, y, z in drafts(2)]
    draws = iter(triples)
    monkeypatch.setattr(tiny.random, "sample", lambda *_: [next(draws)])
    torch.manual_seed(0)
    trained = dict(tiny.train_reward_model(base, triples).named_parameters())
    torch.manual_seed(0)
    start = {n: p.data for n, p in tiny.with_lora(base).named_parameters() if p.requires_grad}
    parameters = add_lora(base, "reward", tiny.RANK, tiny.ALPHA, 0.0, LAYERS)
    for p, name in zip(parameters, sorted(start), strict=True):
        p.data = start[name].clone()
    optimizer = torch.optim.AdamW(parameters, tiny.REWARD_RATE, weight_decay=0.0)
    for x, y, z in triples:
        x_ids = encode_prompt(tiny.TOKENIZER, f"{x}\n\nResponse: {y}\n\nJudge the response.")
        z_ids = tiny.TOKENIZER(f"{z}<eos>").input_ids
        optimizer.zero_grad()
        with use_lora(base, "reward"):
            (z_loss(base, [(x_ids, z_ids)]) / len(z_ids)).backward()
        optimizer.step()
        optimizer.param_groups[0]["lr"] /= 2
    # AdamW divides by |g|: where g is nearly 0, rounding decides. 2 such elements are allowed.
    errors = [(trained[name] - p).abs() for name, p in zip(sorted(start), parameters)]
    assert sum((error > 1e-5).sum() for error in errors) <= 2


def test_rewards_advantages_and_losses(monkeypatch):
    mask = torch.arange(7) < torch.tensor([7, 1, 4, 6, 2])[:, None]                    # [B, T]
    delta, old, ref, values, new = torch.randn(5, 5, 7, dtype=torch.float64)
    for name, value in (("GAMMA", 0.9), ("LAMBDA", 0.8), ("CLIP", 0.3)):
        monkeypatch.setattr(tiny, name, value)
    rollouts = Rollouts([], [], [], [], None, None, None, mask.long(), delta=delta,
                        logprobs_old=old, logprobs_ref=ref, values=values)
    config = SimpleNamespace(gamma=0.9, lam=0.8, value_target="gae")
    add_advantages(rollouts, tiny.BETA, config)                         # with gae and whiten
    advantages = tiny.estimate_advantages(rollouts.rewards, values, mask)
    white = tiny.whiten(advantages, mask)
    assert_close(((advantages + values) * mask, white),
                 (rollouts.returns, rollouts.advantages), atol=1e-5, rtol=0)
    assert_close(tiny.clipped_loss(new, old, white, mask), ppo_loss(new, old, white, mask, 0.3))
    new = old.clone().requires_grad_()                   # Definition 1, with A_t for δ_t
    loss = nl_gradient_loss(new, white, mask) * len(mask) / mask.sum()
    gradient = torch.autograd.grad(tiny.clipped_loss(new, old, white, mask) - loss, new)[0]
    assert gradient.abs().max() < 1e-12


def test_one_iteration_on_rewards_with_a_kl_penalty(base, monkeypatch):
    """r_t of the second iteration, where π differs from π_ref: against the package's."""
    monkeypatch.setattr(tiny, "ITERATIONS", 2)
    monkeypatch.setattr(tiny, "BATCH", 4)
    calls = {}
    for name in ("score_tokens", "pseudo_rewards", "estimate_advantages"):
        function = getattr(tiny, name)
        monkeypatch.setattr(tiny, name, partial(
            lambda function, name, *args: calls.setdefault(name, []).append(
                (args, function(*args))) or calls[name][-1][1], function, name))
    tiny.optimize_policy(base, None, toy.rows("train", 8))
    (ref, _, mask), (old, _, _) = (result for _, result in calls["score_tokens"][6:8])
    rows = [delta for _, delta in calls["pseudo_rewards"][4:]]
    delta = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    rewards = calls["estimate_advantages"][1][0][0]
    assert (old - ref)[mask].abs().max() > 1e-4
    assert_close(rewards, (delta - tiny.BETA * (old - ref)) * mask)
