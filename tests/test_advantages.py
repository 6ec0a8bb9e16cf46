"""Advantages without V: their gradients by enumeration, tables by hand, groups of responses."""

import pytest
import torch
from experiments import advantages
from experiments.advantages import ADVANTAGES
from helpers import toy_config, noise
from policy import Rollouts, batch_rows

V, T, BETA = 4, 3, 0.7


def filled(name, delta, config, lengths=None, kl=0.0, beta=0.0):
    """Rollouts with the given δ, [B, T], after an advantage function."""
    delta = torch.as_tensor(delta, dtype=torch.double)
    lengths = lengths or [delta.shape[1]] * len(delta)
    mask = (torch.arange(delta.shape[1]) < torch.tensor(lengths)[:, None]).long()
    ids = torch.zeros_like(mask).long()
    rollouts = Rollouts([{}] * len(delta), [], [], [], ids, ids, ids, mask)
    rollouts.delta, rollouts.values = delta, torch.zeros_like(delta)
    rollouts.logprobs_ref = torch.zeros_like(delta)
    rollouts.logprobs_old = torch.zeros_like(delta) + kl
    ADVANTAGES[name](rollouts, beta, config)
    return rollouts


# ── Gradients, against the enumeration of all responses

class Policy:
    """A tabular policy of three tokens and four words: every response, its log π and δ."""

    def __init__(self):
        steps = torch.arange(T)
        # All V^T responses in order: i // V^(T−t) is the number of the first t tokens of i.
        self.y = torch.cartesian_prod(*[torch.arange(V)] * T)
        prefix = torch.arange(V**T)[:, None] // V ** (T - steps)
        self.theta, reference, rewards = noise(0, 3, T, V**T, V)          # after each prefix
        self.theta.requires_grad_()
        select = steps.expand(V**T, T), prefix, self.y
        self.logp = self.theta.log_softmax(-1)[select]                    # [V^T, T]
        self.kl = self.logp - reference.log_softmax(-1)[select]
        self.delta = rewards[select].sign()
        self.probability = self.logp.sum(1).exp()

    def gradient(self, objective):
        return torch.autograd.grad(objective, self.theta, retain_graph=True)[0].flatten()


@pytest.fixture
def tabular(monkeypatch):
    monkeypatch.setattr(advantages, "whiten", lambda x, mask: x)
    return Policy()


def assert_same_gradient(got, want):
    assert want.norm() > 0.1
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-7)


def test_definition_1_by_enumeration(tabular):
    """Σ_t E[r_t ∇ log π(y_t)]: the derivative of each π(y_t | prefix), at fixed prefixes."""
    p = tabular
    rollouts = filled("definition_1", p.delta, toy_config(), kl=p.kl.detach(), beta=BETA)
    got = p.gradient((p.probability.detach()[:, None] * rollouts.advantages * p.logp).sum())
    reward = (p.delta - BETA * p.kl).detach()
    want = 0
    for t in range(T):
        for first in range(V**t):                                         # every prefix
            for word in range(V):
                i = (first * V + word) * V ** (T - 1 - t)                 # one continuation
                prefix_probability = p.logp[i, :t].sum().exp().detach()
                want += prefix_probability * p.logp[i, t].exp() * reward[i, t]
    assert_same_gradient(got, p.gradient(want))


@pytest.mark.parametrize("name, K", [("reward_to_go", 1), ("rloo", 2)])
def test_sums_are_the_gradient_of_the_expected_reward(tabular, name, K):
    """Over all groups of K responses."""
    p = tabular
    y = torch.cartesian_prod(*[torch.arange(V**T)] * K).flatten()
    config = toy_config(responses_per_prompt=K)
    rollouts = filled(name, p.delta[y], config, kl=p.kl[y].detach(),
                         beta=BETA)
    weight = p.probability.detach()[y].view(-1, K).prod(1).repeat_interleave(K)
    got = p.gradient((weight[:, None] * rollouts.advantages * p.logp[y]).sum() / K)
    want = p.gradient((p.probability * (p.delta - BETA * p.kl).sum(1)).sum())
    assert_same_gradient(got, want)


# ── Tables by hand

DELTA = [[1, 0, -1], [1, 1, 0], [0, -1, 0], [0, 0, 1]]
LENGTHS = [3, 2, 3, 3]


@pytest.mark.parametrize("name, expected", [
    ("definition_1", DELTA),
    ("reward_to_go", [[0, -1, -1], [2, 1, 0], [-1, -1, 0], [1, 1, 1]]),
    # R = 0, 2, −1, 1 in groups of two
    ("rloo", [[-2] * 3, [2, 2, 0], [-2] * 3, [2] * 3]),
    # A = ∓1 in both groups; the mean length is 2.75
    ("grpo", [[-2.75 / 3] * 3, [2.75 / 2, 2.75 / 2, 0], [-2.75 / 3] * 3, [2.75 / 3] * 3])])
def test_advantages_by_hand(name, expected, monkeypatch):
    monkeypatch.setattr(advantages, "whiten", lambda x, mask: x)
    rollouts = filled(name, DELTA, toy_config(lam=0.5, responses_per_prompt=2), LENGTHS)
    expected = torch.tensor(expected, dtype=torch.double)
    torch.testing.assert_close(rollouts.advantages, expected, rtol=1e-3, atol=1e-9)
    assert torch.equal(rollouts.returns, rollouts.values)


def test_whitened_advantages_have_mean_0_and_variance_1():
    rollouts = filled("reward_to_go", DELTA, toy_config(responses_per_prompt=2), LENGTHS)
    values = rollouts.advantages[rollouts.mask.bool()]
    assert values.mean().abs() < 1e-6 and values.var(correction=0) == pytest.approx(1, abs=1e-4)


# ── Groups

@pytest.mark.parametrize("name", ["rloo", "grpo"])
def test_a_group_of_equal_rewards_gets_0(name):
    delta = [[1, 0], [0, 1], [1, 1], [0, 0]]
    rollouts = filled(name, delta, toy_config(responses_per_prompt=2))
    assert not rollouts.advantages[:2].any() and rollouts.advantages[2:].all()


def test_a_batch_holds_every_prompt_as_often_as_the_group_is_large():
    config = toy_config(batch_size=12, responses_per_prompt=4)
    drawn = [batch_rows([*range(6)], config, i) for i in range(2)]
    assert sorted(drawn[0] + drawn[1]) == [i for i in range(6) for _ in range(4)]
    assert all(len(set(batch[i : i + 4])) == 1 for batch in drawn for i in (0, 4, 8))
