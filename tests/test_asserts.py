"""Asserts that mirror the equations: each in text2grad.py
and reward_model.py is broken once here.

Those of annotate.py are broken in test_annotate.py, those of model.py and sampling.py in
test_model.py. What they cost is a row of bench.py; -O takes them out (test_pipeline.py).
"""

import ast
import random

import pytest
from helpers import ROOT, random_rollouts, scored
import torch

import reward_model
import text2grad
from annotate import Grounding
from data import get_task
from reward_model import Judgement
from text2grad import AdaptiveKL, Config, add_advantages, add_feedback, add_scores

CORE = ("annotate", "data", "model", "reward_model", "sampling", "text2grad")
ONES, SHORT = torch.ones(2, 3), torch.ones(2, 2)
CONFIG = Config(micro_batch_size=6, minibatch_size=6)


def messages(module: str) -> list[str]:
    """The literal messages of a module's asserts."""
    tree = ast.parse((ROOT / f"{module}.py").read_text("utf-8"))
    found = [node.msg for node in ast.walk(tree) if isinstance(node, ast.Assert)]
    return [msg.value for msg in found if isinstance(msg, ast.Constant)]


def test_the_core_asserts_its_equations():
    """At least 25, each naming its equation or line;
    all of the two files here are broken below."""
    every = [message for module in CORE for message in messages(module)]
    assert len(every) >= 25
    places = ("§", "Alg.", "Appendix", "Definition")
    assert all(any(place in message for place in places) for message in every
               if message not in ("whitened advantages have mean 0", "the head is frozen here"))
    ours = messages("text2grad") + messages("reward_model")
    names = [text for text, _ in BROKEN]
    assert {text for text in ours if not any(name in text for name in names)} == set()


def rows():
    return get_task("toy").rows("train", 2, 0)


def rollouts_of(policy, tokenizer, monkeypatch, **patches):
    for name, value in patches.items():
        monkeypatch.setattr(text2grad, name, value)
    text2grad.sample_rollouts(policy[0], tokenizer, rows(), CONFIG, None,
                              torch.Generator().manual_seed(0))


def feedback(judged, mask=None):
    batch = random_rollouts()
    if mask is not None:
        batch.mask = mask
    add_feedback(batch, judged or [Judgement("", [0.0] * int(m.sum())) for m in batch.mask])


def hole():
    mask = random_rollouts().mask
    mask[0, 1] = 0
    return mask


def scores(policy, monkeypatch, **patches):
    for name, value in patches.items():
        monkeypatch.setattr(text2grad, name, value)
    add_scores(policy[2], policy[0], policy[1], CONFIG)


def second_time_above_one():
    calls = []

    def logprobs(hidden, *_):
        calls.append(1)
        return torch.full((len(hidden),), -1.0 if len(calls) == 1 else 1.0)
    return logprobs


def advantages(policy, monkeypatch, moved=(0, 0), mask=1):
    batch = scored(policy, CONFIG)[2]
    batch.mask = batch.mask * mask
    whole = text2grad.gae
    monkeypatch.setattr(text2grad, "gae", lambda *args: tuple(
        x + by for x, by in zip(whole(*args), moved)))
    add_advantages(batch, 0.1, CONFIG)


def update(policy):
    model, head, batch = scored(policy, CONFIG)
    batch.logprobs_old += 1
    parameters = [p for p in model.parameters() if p.requires_grad] + [*head.parameters()]
    optimizer = torch.optim.SGD(parameters, 0.1)
    text2grad.ppo_update(batch, model, head, optimizer, CONFIG, random.Random(0))


def encoded(policy, tokenizer, monkeypatch):
    monkeypatch.setattr(reward_model, "ground", lambda response, said: Grounding(
        unmatched=["x"] if said.critique else []))
    row = {"prompt": "x", "response": "y", "critique": "c", "good_spans": [], "poor_spans": []}
    reward_model.encode_rows([row], tokenizer, 99)


def loss_of_z(policy, monkeypatch):
    whole = reward_model.pad_batch

    def without_the_last(*args):
        *others, mask = whole(*args)
        mask[:, -1] = 0
        return *others, mask

    monkeypatch.setattr(reward_model, "pad_batch", without_the_last)
    reward_model.z_loss(policy[0], [([5], [6, 7])])


def written(policy, tokenizer, monkeypatch):
    monkeypatch.setattr(reward_model, "use_lora", text2grad.use_lora)
    monkeypatch.setattr(reward_model, "generate", lambda *_, **__: [])
    text2grad.add_lora(policy[0], "reward", 2, 2)
    reward_model.write_critiques(policy[0], tokenizer, ["x"], ["y"], 3)


def judged(monkeypatch):
    monkeypatch.setattr(reward_model, "token_rewards", lambda *_: [])
    reward_model.judge('c\n{"good_spans": [], "poor_spans": []}', "y", [(0, 1)])


def whitened(monkeypatch):
    monkeypatch.setattr(torch, "rsqrt", lambda x: torch.tensor([[1.0, 2.0, 5.0]]))
    text2grad.whiten(torch.tensor([[1.0, 2.0, 4.0]]), torch.ones(1, 3))


BROKEN = [
    ("Definition 1", lambda p, t, m: text2grad.nl_gradient_loss(ONES, SHORT, ONES)),
    ("one r_t and V per token", lambda p, t, m: text2grad.gae(ONES, SHORT, ONES, 1, 1)),
    ("mean 0", lambda p, t, m: whitened(m)),
    ("one A_t per ρ_t", lambda p, t, m: text2grad.ppo_loss(ONES, ONES, SHORT, ONES, 0.2)),
    ("one R_t per V", lambda p, t, m: text2grad.value_loss(ONES, ONES, SHORT, ONES, 0.2)),
    ("y ends with its EOS", lambda p, t, m: rollouts_of(
        p, t, m, generate=lambda model, x, *_, **__: [[5, 6]] * len(x))),
    ("each y_t has its characters", lambda p, t, m: rollouts_of(
        p, t, m, token_offsets=lambda *_: ("", []))),
    ("one z' for each y", lambda p, t, m: feedback([Judgement("", [])])),
    ("one δ'_t per sampled token", lambda p, t, m: feedback([Judgement("", [0.0])] * 6)),
    ("no δ' on padding", lambda p, t, m: feedback(
        [Judgement("", [1.0] * int(row.sum())) for row in hole()], hole())),
    ("log π_θold of a probability", lambda p, t, m: scores(
        p, m, token_logprobs=lambda hidden, *_: torch.ones(len(hidden)))),
    ("log π_ref of a probability", lambda p, t, m: scores(
        p, m, token_logprobs=second_time_above_one())),
    ("H ≥ 0", lambda p, t, m: scores(
        p, m, token_entropy=lambda hidden, *_: -torch.ones(len(hidden)))),
    ("no r_t on padding", lambda p, t, m: advantages(p, m, mask=2)),
    ("A_T = r_T − V", lambda p, t, m: advantages(p, m, (1, 0))),
    ("R_T = r_T", lambda p, t, m: advantages(p, m, (0, 1))),
    ("ρ = 1 until θ moves", lambda p, t, m: update(p)),
    ("a penalty", lambda p, t, m: AdaptiveKL(-1.0, 6.0).update(7.0, 10)),
    ("z quotes the response", lambda p, t, m: encoded(p, t, m)),
    ("per token of z", lambda p, t, m: loss_of_z(p, m)),
    ("one δ'_t per token of y", lambda p, t, m: judged(m)),
    ("one z' for each y", lambda p, t, m: written(p, t, m)),
]


@pytest.mark.parametrize("said, breaks", BROKEN, ids=[said for said, _ in BROKEN])
def test_each_assert_is_broken_once(policy, toy_model, monkeypatch, said, breaks):
    with pytest.raises(AssertionError, match=said.replace("(", r"\(")):
        breaks(policy, toy_model[1], monkeypatch)
