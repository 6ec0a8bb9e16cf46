"""Each assert of the core modules, except annotate.py's, fails once its equation is broken.

test_annotate.py breaks those of annotate.py.
"""

import ast
import random
import re
from types import SimpleNamespace

import pytest
import torch
import reward_model
import sampling
import policy
from annotate import Grounding, Review
from data import get_task
from helpers import toy_config, ROOT, scored
from model import response_hidden
from sampling import generate, token_entropy, token_logprobs
from policy import adapt_beta, add_feedback, gae

CORE = ("annotate", "ask", "data", "model", "policy", "reward_model", "runtime", "sampling",
        "text2grad")
pytestmark = pytest.mark.inner
ONES, SHORT = torch.ones(2, 3), torch.ones(2, 2)
IDS = torch.ones(1, 2).long()
HIDDEN, HEAD = -torch.ones(5, 4), torch.full((2600, 4), 9.0)
TARGETS = torch.zeros(5).long()
CONFIG = toy_config(minibatch_size=6)
ROW = {"prompt": "x", "response": "y", "critique": "c", "good_spans": [], "poor_spans": []}


def messages(module: str) -> list[str]:
    """The literal messages of a module's asserts."""
    tree = ast.parse((ROOT / f"{module}.py").read_text("utf-8"))
    nodes = [node.msg for node in ast.walk(tree) if isinstance(node, ast.Assert)]
    return [message.value for message in nodes if isinstance(message, ast.Constant)]


def test_the_core_asserts_its_equations():
    """At least 20 asserts name their equation or line; BROKEN lists all but annotate.py's."""
    all_messages = [message for module in CORE for message in messages(module)]
    assert len(all_messages) >= 20
    places = ("§", "Alg.", "Appendix", "Definition")
    assert all(any(place in message for place in places) for message in all_messages
               if message not in ("whitened advantages have mean 0", "the head is frozen here"))
    broken = [message for message, _, _ in BROKEN]
    rest = {message for message in all_messages if not any(part in message for part in broken)}
    assert rest <= set(messages("annotate"))


# ── Calls that must fail an assert, with the arguments model, value head, rollouts, tokenizer

def sample(model, head, rollouts, tokenizer):
    rows = get_task("toy").rows("train", 2, 0)
    policy.sample_rollouts(model, tokenizer, rows, CONFIG, None, torch.Generator())


def judge_as(judge_row):
    """A call of add_feedback in which each row of n tokens has the δ' judge_row(n)."""
    def call(model, head, rollouts, tokenizer):
        lengths = rollouts.mask.sum(1).tolist()
        add_feedback(rollouts, [Review("", judge_row(n)) for n in lengths])
    return call


def advance(model, head, rollouts, tokenizer):
    scored((model, head, rollouts), CONFIG)


def update(model, head, rollouts, tokenizer):
    scored((model, head, rollouts), CONFIG)
    rollouts.logprobs_old += 1
    parameters = [p for p in model.parameters() if p.requires_grad] + [*head.parameters()]
    optimizer = torch.optim.SGD(parameters, 0.1)
    policy.ppo_update(rollouts, model, head, optimizer, CONFIG, random.Random(0))


# ── Replacements for functions of the core

def moved_gae(*arguments):
    """A gae that adds 1 to its advantages."""
    advantages, returns = gae(*arguments)
    return advantages + 1, returns


def pad_without_the_last(*arguments):
    *others, mask = sampling.pad_batch(*arguments)
    mask[:, -1] = 0
    return *others, mask


# (a part of the message, the patched names, the call)
BROKEN = [
    ("Definition 1", {}, lambda *_: policy.nl_gradient_loss(ONES, SHORT, ONES)),
    ("one r_t and V per token", {}, lambda *_: policy.gae(ONES, SHORT, ONES, 1, 1)),
    ("mean 0", {"torch.rsqrt": lambda _: torch.tensor([[1.0, 2, 5]])},
     lambda *_: policy.whiten(torch.tensor([[1.0, 2, 4]]), torch.ones(1, 3))),
    ("one A_t per ρ_t", {}, lambda *_: policy.ppo_loss(ONES, ONES, SHORT, ONES, 0.2)),
    ("one R_t per V", {}, lambda *_: policy.value_loss(ONES, ONES, SHORT, ONES, 0.2)),
    ("y ends with its EOS",
     {"policy.generate": lambda model, x, *_, **__: [[5, 6]] * len(x)}, sample),
    ("Alg. 4 l.12: one z' for each y", {"policy.gather_rows": lambda judged: judged[1:]},
     judge_as(lambda n: [0.0] * n)),
    ("one δ'_t per sampled token", {}, judge_as(lambda n: [0.0])),
    ("one A_t, R_t per token", {}, lambda *_: policy.ppo_update(
        SimpleNamespace(mask=ONES, advantages=ONES, returns=SHORT), *[None] * 5)),
    ("A_T = r_T − V", {"policy.gae": moved_gae}, advance),
    ("ρ = 1 until θ moves", {}, update),
    ("a penalty", {}, lambda *_: adapt_beta(-1.0, 7.0, 10, 6.0, 100)),
    ("z quotes the response", {"reward_model.ground": lambda response, feedback: Grounding(
        [], ["x"] if feedback.critique else [])},
     lambda model, head, rollouts, tokenizer: reward_model.encode_rows([ROW], tokenizer, 99)),
    ("per token of z", {"reward_model.pad_batch": pad_without_the_last},
     lambda model, *_: reward_model.z_loss(model, [([5], [6, 7])])),
    ("y_1 follows the last of x", {},
     lambda model, *_: response_hidden(model, IDS, torch.tensor([[1, 0]]), IDS, IDS)),
    ("one y_i for each token", {}, lambda *_: token_logprobs(HIDDEN, HEAD, TARGETS[:3])),
    ("the head is frozen here", {},
     lambda *_: token_logprobs(HIDDEN, HEAD.clone().requires_grad_(), TARGETS)),
    ("log π(y) ≤ 0", {"sampling._tiles": lambda *_: [slice(9, 2600)]},
     lambda *_: token_logprobs(HIDDEN, HEAD, TARGETS)),
    ("0 ≤ H(π) ≤ log V", {"sampling.math.log": lambda _: 1.0},
     lambda *_: token_entropy(HIDDEN, HEAD)),
    ("each token y_t has one u", {},
     lambda model, *_: generate(model, [[5]], 3, uniforms=torch.rand(2, 3))),
]


@pytest.mark.parametrize("message, patches, call", BROKEN, ids=[row[0] for row in BROKEN])
def test_each_assert_is_broken_once(policy, toy_model, monkeypatch, message, patches, call):
    for name, value in patches.items():
        monkeypatch.setattr(name, value)
    with pytest.raises(AssertionError, match=re.escape(message)):
        call(*policy, toy_model[1])
