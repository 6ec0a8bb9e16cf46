"""Every equation of the method against a second computation: sums, brute force or autograd.

The order is the paper's: Definition 1, §3.5 (GAE, PPO), §3.6 with Appendix A, Algorithms 3, 4.
"""

import copy
import math
import random
import re

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from annotate import Feedback, Review, ground, parse_feedback, read_critique, token_rewards
from data import critique_prompt, split_rows
from helpers import toy_config, noise, random_rollouts, randomise, scored
from model import add_lora, encode_prompt, lora_parameters, response_hidden, use_lora
from reward_model import encode_rows, fit_adapter, z_loss
from sampling import head_weight, token_logprobs
from policy import (Rollouts, adapt_beta, add_advantages, add_feedback, add_scores, batch_rows,
                    gae, minibatch_loss, nl_gradient_loss, ppo_loss, ppo_update,
                    set_learning_rates, value_loss, whiten)

close = torch.testing.assert_close
many = settings(deadline=None, max_examples=60, database=None, derandomize=True)
pytestmark = pytest.mark.inner
row_lengths = st.lists(st.integers(1, 7), min_size=1, max_size=4)
seeds = st.integers(0, 10**6)
unit = st.floats(0, 1)


# ── Helpers

def prefix_mask(lengths):
    """[B, T]: 1 on the tokens of each row, 0 on its right padding, as `pad_batch` makes it."""
    return (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()


def one_row(rewards, values, gamma=1.0, lam=0.95):
    """A_1 … A_T of one unpadded response, through `gae`: [T], [T] → [T]"""
    advantages, _ = gae(rewards[None], values[None], torch.ones_like(rewards[None]), gamma, lam)
    return advantages[0]


def end_reward(delta):
    """Setting B of Appendix A: the sum of all δ at the last token, 0 elsewhere, [T]."""
    return torch.cat([0 * delta[1:], delta.sum()[None]])


def discounted(x, weight):
    """Σ_{k=t}^{T} weight^{k−t} x_k at each t, [T]."""
    T = len(x)
    return torch.stack([sum(weight ** (k - t) * x[k] for k in range(t, T)) for t in range(T)])


def td_errors(rewards, values, gamma):
    """r_t + γ V_{t+1} − V_t at each t, with V = 0 after the last token, [T]."""
    return rewards + gamma * torch.cat([values[1:], values.new_zeros(1)]) - values


def unpadded(rollouts):
    """[(x, y)] as plain lists of ids."""
    tensors = (rollouts.prompt_ids, rollouts.prompt_mask, rollouts.response_ids, rollouts.mask)
    return [(x[m.bool()].tolist(), y[n.bool()].tolist()) for x, m, y, n in zip(*tensors)]


def brute(model, x, y, temperature=1.0):
    """log π(·|x, y_<t) [T, V] and hidden states [T, H] of a row, from the model's logits."""
    out = model(torch.tensor([x + y]), output_hidden_states=True)
    rows = slice(len(x) - 1, len(x) + len(y) - 1)
    return (out.logits[0, rows] / temperature).log_softmax(-1), out.hidden_states[-1][0, rows]


def gradients(loss, parameters):
    """The gradient as one flat vector, with zeros for parameters that the loss does not use."""
    got = torch.autograd.grad(loss, parameters, allow_unused=True)
    return torch.cat([(torch.zeros_like(p) if g is None else g).flatten()
                      for p, g in zip(parameters, got)])


def flat(parameters):
    """All entries of some parameters, detached."""
    return torch.cat([p.detach().flatten() for p in parameters])


# ── Definition 1

def test_only_setting_b_blames_a_token_that_takes_back_an_earlier_reward():
    """Two tokens, "a" or "b" each. The critique quotes "a" of the first; a second "a" makes the
    quote ambiguous. The exact gradient of E Σ_t δ_t comes from all four responses.
    """
    theta = torch.tensor([[0.3, -0.2], [0.5, 0.1]], dtype=torch.double, requires_grad=True)
    logits = theta.log_softmax(-1)                                  # [position, token]
    responses = torch.cartesian_prod(torch.arange(2), torch.arange(2))             # [4, 2]
    delta = []
    for ids in responses.tolist():
        text = " ".join("ab"[i] for i in ids)
        grounding = ground(text, Feedback("", ["a"] if text[0] == "a" else [], []))
        delta.append(token_rewards(text, [(0, 1), (1, 3)], grounding.spans))
    delta = torch.tensor(delta, dtype=torch.double)
    assert delta.tolist() == [[0, 0], [1, 0], [0, 0], [0, 0]]
    logprobs = logits[torch.arange(2), responses]                                  # [4, 2]
    probability = logprobs.sum(1).exp()
    exact = torch.autograd.grad((probability * delta.sum(1)).sum(), theta, retain_graph=True)[0]
    mask = torch.ones_like(delta)
    zeros = torch.zeros_like(delta)
    end = zeros.clone()
    end[:, -1] = delta.sum(1)
    weights = {"Definition 1": delta, "Algorithm 4": gae(delta, zeros, mask, 1.0, 1.0)[0],
               "setting B": gae(end, zeros, mask, 1.0, 1.0)[0]}
    found = {}
    for name, weight in weights.items():
        loss = 4 * nl_gradient_loss(logprobs * probability.detach()[:, None], weight, mask)
        found[name] = -torch.autograd.grad(loss, theta, retain_graph=True)[0]
    close(found["setting B"], exact)
    close(found["Definition 1"][0], exact[0])
    assert exact[1, 0] < -0.1                         # a second "a" loses the reward
    assert not found["Definition 1"][1].any() and not found["Algorithm 4"][1].any()


def test_gradient_of_nl_gradient_loss_is_minus_definition_1(policy):  # Eq. §3.1 Definition 1
    """g_NL = Σ_t δ_t ∇ log π(y_t | x, y_<t) from the model's logits, averaged over rows."""
    model, _, rollouts = policy
    parameters = lora_parameters(model, "policy")
    mask = rollouts.mask[:3]
    # padding holds δ too
    delta = torch.tensor([[1.0, -1, 0, 1, 0.3]]).repeat(3, 2)[:, : mask.shape[1]]
    with use_lora(model, "policy"):
        hidden = response_hidden(model, rollouts.prompt_ids[:3], rollouts.prompt_mask[:3],
                                 rollouts.response_ids[:3], mask)
        logprobs = token_logprobs(hidden.flatten(0, 1), head_weight(model),
                                  rollouts.response_ids[:3].flatten())
        gradient = gradients(nl_gradient_loss(logprobs.view_as(delta), delta, mask), parameters)
        g_nl = sum(delta[row, t] * gradients(brute(model, x, y)[0][t, token], parameters)
                   for row, (x, y) in enumerate(unpadded(rollouts)[:3])
                   for t, token in enumerate(y))
    assert g_nl.norm() > 1e-3
    close(gradient, -g_nl / 3, rtol=1e-3, atol=1e-5 * g_nl.norm().item())


# ── §3.5, §3.6 and Appendix A: advantages

@many
@given(row_lengths, seeds, unit, unit)
# Eq. §3.5 GAE; Alg. 4 l.15–16
def test_gae_is_its_double_sum_and_ignores_the_padding(lengths, seed, gamma, lam):
    """A_t = Σ_{l=0}^{T−t} (γλ)^l td_error_{t+l}, with V = 0 after the last token of a row."""
    mask = prefix_mask(lengths)
    rewards, values = noise(seed, *mask.shape), noise(seed + 1, *mask.shape)
    rewards, values = (torch.where(mask.bool(), x, 1e6 * x) for x in (rewards, values))
    advantages, returns = gae(rewards, values, mask, gamma, lam)
    for row, n in enumerate(lengths):
        r, v = rewards[row, :n], values[row, :n]
        close(advantages[row, :n], discounted(td_errors(r, v, gamma), gamma * lam),
              rtol=1e-9, atol=1e-9)
        close(returns[row, :n], advantages[row, :n] + v)
        assert not advantages[row, n:].any() and not returns[row, n:].any()


def without_last(x):
    """A vector whose last entry is set to 0, [T]."""
    return torch.cat([x[:-1], 0 * x[-1:]])


# A formula of the paper → (rewards, V, γ, λ), the formula, and what it lacks to be A_1 … A_T.
# d, v and w hold δ_t, V_t and (γλ)^(T−t), [T]; g and l are γ and λ.
FORMULAS = {
    "Alg. 4 l.16 in its first form has λ = 1":
        lambda d, v, w, g, l: ((d, v, g, 1.0), discounted(d, g) - v, 0),
    "§3.6 A^A lacks a constant V":
        lambda d, v, w, g, l: ((d, 0 * v + 3, 1.0, g * l), discounted(d, g * l), -3 * w),
    "§3.6 A^B sums from t":
        lambda d, v, w, g, l: ((end_reward(d), 0 * v, g, l), w * discounted(d, 1.0),
                               w * (d.sum() - discounted(d, 1.0))),
    "§3.5 and Alg. 4 l.16 end at T − t − 1":
        lambda d, v, w, g, l: ((d, v, g, l),
                               discounted(without_last(td_errors(d, v, g)), g * l),
                               w * (d - v)[-1]),
}


@pytest.mark.parametrize("formula", FORMULAS.values(), ids=FORMULAS)
@pytest.mark.parametrize("gamma, lam", [(1.0, 0.95), (0.9, 0.6)])
def test_gae_gives_the_formulas_of_the_paper(formula, gamma, lam):  # Eq. §3.6 A^A, A^B
    """The last three lack a term; PAPER.md's errata name it."""
    for T in range(1, 9):
        delta, values = noise(T, T).round().clamp(-1, 1), noise(T + 10, T)
        weights = (gamma * lam) ** torch.arange(T - 1, -1, -1).double()
        arguments, printed, lacking = formula(delta, values, weights, gamma, lam)
        close(one_row(*arguments), printed + lacking, rtol=1e-9, atol=1e-9)


def test_a_reward_twenty_tokens_before_the_end_weighs_2_79_times_more():  # Eq. Appendix A α
    """Appendix A: α(T − 20, T) = 0.95^−20 ≈ 2.8, as a ratio of two outputs of `gae`."""
    delta = torch.zeros(30, dtype=torch.float64)
    delta[9] = 1
    alpha = (one_row(delta, 0 * delta)[0] / one_row(end_reward(delta), 0 * delta)[0]).item()
    assert alpha == pytest.approx(0.95**-20) == pytest.approx(2.79, abs=0.005)


def test_difference_of_the_two_settings():
    """§3.6: ΔA_1^A − ΔA_1^B = Σ_{k<T} ((γλ)^{k−1} − (γλ)^{T−1}) Δδ_k, as the KL and V cancel.

    The paper prints no second power. So ΔA_1^A > ΔA_1^B if every Δδ_k ≥ 0 and one with k < T
    is > 0, and not, as Appendix A claims, whenever one is > 0: (−1, 1, 0) gives −.05 and 0.
    """
    for seed in range(100):
        T = 2 + seed % 7
        kl, values = noise(seed, 2, T)
        better, worse = (2 * noise(seed + 100, 2, T)).round().clamp(-1, 1)
        if seed % 2:
            better, worse = torch.maximum(better, worse), torch.minimum(better, worse)
        a, b = (one_row(pay(better) + kl, values)[0] - one_row(pay(worse) + kl, values)[0]
                for pay in (torch.clone, end_reward))
        powers = 0.95 ** torch.arange(T).double()                            # (γλ)^(k−1)
        close(a - b, ((powers - powers[-1]) * (better - worse)).sum())
        assert a > b or seed % 2 == 0 or not (better - worse)[:-1].any()
    change = torch.tensor([-1.0, 1, 0])
    assert one_row(change, 0 * change)[0].item() == pytest.approx(-0.05)
    assert one_row(end_reward(change), 0 * change)[0] == 0


def test_a_constant_value_is_gone_after_whitening_where_lambda_is_one():
    """With γ = λ = 1, A_t = Σ_{k≥t} δ_k − c, a common shift; not so with λ = 0.95."""
    mask = prefix_mask([5, 2, 7])
    delta = noise(0, 3, 7) * mask
    change = {}
    for lam in (1.0, 0.95):
        a, b = (whiten(gae(delta, torch.full_like(delta, c), mask, 1.0, lam)[0], mask)
                for c in (0.0, 2.0))
        change[lam] = (a - b).abs().max()
    assert change[1.0] < 1e-6 and change[0.95] > 0.1


# ── Whitening

@many
@given(st.lists(st.integers(1, 7), min_size=2, max_size=4), seeds)
def test_whiten_is_the_z_score_of_the_unpadded_tokens(lengths, seed):
    """(x − mean) / population std over the tokens; padding is ignored and becomes 0."""
    mask = prefix_mask(lengths)
    x = 3 * noise(seed, *mask.shape) + 5
    tokens = x[mask.bool()]
    std = tokens.std(correction=0)
    assume(std > 0.1)                          # else the ε beside the variance counts
    got = whiten(torch.where(mask.bool(), x, -1e6), mask)
    close(got[mask.bool()], (tokens - tokens.mean()) / std, rtol=1e-4, atol=1e-6)
    assert not got[~mask.bool()].any()


def test_whiten_of_equal_tokens_is_zero():
    """Equal values give 0, even if rounding of the mean leaves small differences."""
    got = whiten(torch.full((48, 48), 4.1), torch.ones(48, 48).long())
    assert got.abs().max() < 1e-3                                       # NaN fails too


# ── §3.5, Alg. 4 l.24: the losses and the adaptive KL coefficient

@pytest.mark.parametrize("ratio, advantage, loss, gradient", [
    (1.0, 2.0, -2.0, -2.0), (1.0, -2.0, 2.0, 2.0),      # at θ_old
    (1.1, 2.0, -2.2, -2.2), (0.9, -2.0, 1.8, 1.8),      # inside
    (1.5, 2.0, -2.4, 0.0), (0.5, -2.0, 1.6, 0.0),       # clipped
    (1.5, -2.0, 3.0, 3.0), (0.5, 2.0, -1.0, -1.0)])     # outside, not clipped
# Eq. §3.5 PPO; Alg. 4 l.21–22; Alg. 4 l.23
def test_ppo_loss_by_cases(ratio, advantage, loss, gradient):
    """Alg. 4 l.23 at ε = 0.2; d ρ / d log π = ρ, and a clipped token has no gradient."""
    ratios, advantages = torch.tensor([[ratio], [advantage]], dtype=torch.float64)
    logprobs = (ratios.log() - 1.3).requires_grad_()
    got = ppo_loss(logprobs, torch.full_like(ratios, -1.3), advantages, torch.ones(1), 0.2)
    close((got.item(), gradients(got, [logprobs]).item()), (loss, gradient),
          rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("value, loss, gradient", [
    (0.1, 0.405, -0.9),   # within the clip: ½ (0.1 − 1)²
    (0.5, 0.32, 0.0),     # moved to the target by more than the clip: ½ (0.2 − 1)², held there
    (-0.5, 1.125, -1.5),  # moved away: the larger error ½ (−0.5 − 1)² counts, and pulls back
    (2.5, 1.125, 1.5),    # past the target, and farther from it than the clip is
])
def test_value_loss_by_cases(value, loss, gradient, sign):  # Alg. 4 l.24
    """Alg. 4 l.24 with the release's clipping around V_old = 5, R = 5 ± 1, clip 0.2."""
    old, v, target = torch.tensor([[0], [value], [1]], dtype=torch.float64) * sign + 5
    v.requires_grad_()
    got = value_loss(v, old, target, torch.ones(1), 0.2)
    close((got.item(), gradients(got, [v]).item()), (loss, sign * gradient),
          rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("loss", [ppo_loss, value_loss])
def test_a_loss_is_the_mean_of_its_tokens(loss):
    """𝔼_t is over all tokens, not over row means; padding affects neither loss nor gradient.

    Invariant 3: the losses of parts, divided by the count of all tokens, sum to the full loss.
    """
    mask, (new, old, target) = prefix_mask([4, 2, 7, 1]), noise(0, 3, 4, 7)
    at = mask.bool()
    new = torch.where(at, new, 1e30).requires_grad_()
    target = torch.where(at, target, -1e30)
    whole = loss(new, old, target, mask, 0.2)
    tokens = torch.stack([loss(*numbers[:, None], torch.ones(1), 0.2)
                          for numbers in torch.stack([new, old, target], -1)[at]])
    close(whole, tokens.mean())
    gradient, = torch.autograd.grad(whole, new, retain_graph=True)
    close(gradient, torch.autograd.grad(tokens.mean(), new)[0])
    assert gradient.any() and not gradient[~at].any()
    parts = [loss(new[i], old[i], target[i], mask[i], 0.2, mask.sum())
             for i in ([0], [1, 2], [3])]
    close(sum(parts), whole)


@pytest.mark.parametrize("kl, target, error", [
    (6.6, 6, 0.1), (5.4, 6, -0.1), (6.0, 6, 0.0), (60.0, 6, 0.2), (0.0, 6, -0.2),
    (7.21, 6, 0.2), (60.0, 0, 0.0), (math.nan, 6, 0.0), (math.inf, 6, 0.0)])
def test_adaptive_kl_by_hand(kl, target, error):
    """Ziegler et al. 2019 §2.2: β ← β (1 + clip(KL / target − 1, ±0.2) n / horizon)."""
    beta = 0.5
    for n in (100, 50, 5000):                              # five horizons count as one
        beta = adapt_beta(beta, kl, n, target, 1000)
    want = 0.5 * (1 + error * 0.1) * (1 + error * 0.05) * (1 + error)
    assert beta == pytest.approx(want, rel=1e-9)


# ── Algorithm 4, l.9–18: rows, δ', scores, rewards, advantages

@pytest.mark.parametrize("batch", [4, 10, 25])
def test_every_prompt_is_drawn_once_per_pass(batch):  # Alg. 4 l.9–10
    """Alg. 4 l.10: every pass takes all prompts, even if a batch spans two passes. Each pass
    has a new order, which depends only on seed and iteration."""
    prompts = [f"p{i}" for i in range(10)]
    draw = lambda seed, i: batch_rows(prompts, toy_config(batch_size=batch, seed=seed), i)
    batches = [draw(0, i) for i in range(50 // batch)]
    walk = sum(batches, [])
    passes = [walk[i : i + 10] for i in range(0, len(walk) - 9, 10)]
    assert len(passes) >= 4 and all(sorted(p) == prompts for p in passes)
    assert len({tuple(p) for p in [prompts, *passes]}) == 1 + len(passes)
    random.seed(99)
    assert [draw(0, i) for i in reversed(range(50 // batch))] == batches[::-1]
    assert [draw(1, i) for i in range(50 // batch)] != batches
    first, second, *_ = batch_rows(prompts, toy_config(batch_size=20), 0)
    pairs = toy_config(batch_size=4, responses_per_prompt=2)
    assert batch_rows(prompts, pairs, 0) == [first, first, second, second]


def test_delta_is_in_the_column_of_its_token():
    """Alg. 4 l.13: δ'_t of each row at column t, none on padding."""
    batch = random_rollouts()
    expected = torch.arange(batch.mask.numel()).view_as(batch.mask) * batch.mask.float()
    deltas = [row[:n] for row, n in zip(expected.tolist(), batch.mask.sum(1).tolist())]
    add_feedback(batch, [Review("", delta) for delta in deltas])
    assert torch.equal(batch.delta, expected)


@pytest.mark.parametrize("temperature, micro, sft, reference", [
    (1.0, 4, None, None), (0.6, 1, "sft/adapter", "reference")])
def test_scores_are_those_of_the_full_softmax(policy, temperature, micro, sft, reference):
    """Alg. 4 l.7, 14, 16, 25: log π_old, H, log π_ref, V, from the full logits of each row."""
    model, head, rollouts = policy
    randomise(add_lora(model, "reference", 4, 8))
    config = toy_config(temperature=temperature, micro_batch_tokens=14 * micro, adapter=sft)
    add_scores(rollouts, model, head, config)
    names = "logprobs_old", "entropy", "logprobs_ref", "values"
    assert not any(getattr(rollouts, name)[rollouts.mask == 0].any() for name in names)
    assert (rollouts.logprobs_old - rollouts.logprobs_ref).abs().max() > 0.01
    for row, (x, y) in enumerate(unpadded(rollouts)):
        with torch.no_grad(), use_lora(model, "policy"):
            logp, hidden = brute(model, x, y, temperature)
        with torch.no_grad(), use_lora(model, reference):
            logq, _ = brute(model, x, y, temperature)
        at = torch.arange(len(y)), torch.tensor(y)
        expected = (logp[at], -(logp.exp() * logp).sum(-1), logq[at],
                    hidden @ head.linear.weight[0] + head.linear.bias)
        for name, value in zip(names, expected):
            close(getattr(rollouts, name)[row, : len(y)], value.detach(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("target", ["gae", "return"])
def test_rewards_advantages_and_value_targets(policy, target):
    """Alg. 4 l.14–17, 24: r_t = δ_t − β (log π − log π_ref); A is whitened, targets are not."""
    _, _, rollouts = policy
    config, mask = toy_config(value_target=target, gamma=0.9, lam=0.8), rollouts.mask
    rollouts.logprobs_old, rollouts.logprobs_ref, rollouts.values = (
        noise(i, *mask.shape).float() for i in (0, 1, 2))  # rubbish in the padding too
    add_advantages(rollouts, 0.3, config)
    log_ratio = rollouts.logprobs_old - rollouts.logprobs_ref
    rewards = (rollouts.delta - 0.3 * log_ratio) * mask
    close(rollouts.rewards, rewards)
    raw = []
    for row, n in enumerate(mask.sum(1).tolist()):
        r, v = rewards[row, :n], rollouts.values[row, :n]
        raw.append(discounted(td_errors(r, v, 0.9), 0.9 * 0.8))
        expected = discounted(r, 0.9) if target == "return" else raw[-1] + v
        close(rollouts.returns[row, :n], expected, rtol=1e-4, atol=1e-5)
    assert not rollouts.advantages[mask == 0].any() and not rollouts.returns[mask == 0].any()
    tokens = torch.cat(raw)
    white = (tokens - tokens.mean()) / tokens.std(correction=0)
    close(rollouts.advantages[mask.bool()], white, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("T", [1, 4])
def test_the_kl_penalty_has_the_gradient_of_minus_the_kl(T, monkeypatch):
    """Every response of a tabular policy, V = 4: E[Σ_t A_t ∇ log π(y_t)] = −β ∇ KL(π ‖ π_ref).

    Unwhitened, γ = λ = 1, V = 0, δ = 0. The exact KL_t as a reward fails here: at T = 1 its
    gradient is 0.
    """
    V, steps = 4, torch.arange(T)
    monkeypatch.setattr("policy.whiten", lambda x, mask: x)
    # All V^T responses in order: the first t tokens of the i-th are the number i // V^(T−t).
    y = torch.cartesian_prod(*[torch.arange(V)] * T).reshape(-1, T)
    prefix = torch.arange(V**T)[:, None] // V ** (T - steps)
    theta, reference = noise(0, 2, T, V**T, V)                # logits after each prefix
    theta.requires_grad_()
    logp, logq = (table.log_softmax(-1)[steps, prefix].gather(2, y[..., None]).squeeze(2)
                  for table in (theta, reference))
    probability = logp.sum(1).exp().detach()
    ones = torch.ones_like(y)
    batch = Rollouts([{}] * len(y), [], [], [], y, ones, y, ones)
    batch.delta, batch.values = torch.zeros_like(logq), torch.zeros_like(logq)
    batch.logprobs_old, batch.logprobs_ref = logp.detach(), logq
    add_advantages(batch, 0.7, toy_config(gamma=1.0, lam=1.0))
    surrogate = (probability[:, None] * batch.advantages * logp).sum()
    got, = torch.autograd.grad(surrogate, theta, retain_graph=True)
    kl = (logp.sum(1).exp() * (logp - logq).sum(1)).sum()
    want = -0.7 * torch.autograd.grad(kl, theta)[0]
    assert want.norm() > 0.1
    close(got, want, rtol=1e-6, atol=1e-8)


# ── Algorithm 4, l.19–32: the update

def brute_loss(model, head, rollouts, config):
    """−𝔼[L_CLIP] + c 𝔼[L_VF] − β 𝔼[H], token by token, from the full logits of each row."""
    total, count = 0.0, rollouts.mask.sum()
    for row, (x, y) in enumerate(unpadded(rollouts)):
        with use_lora(model, "policy"):
            logp, hidden = brute(model, x, y, config.temperature)
        values = head(hidden.detach())
        for t, token in enumerate(y):
            a, v_old, target = (getattr(rollouts, k)[row, t]
                                for k in ("advantages", "values", "returns"))
            rho, v = (logp[t, token] - rollouts.logprobs_old[row, t]).exp(), values[t]
            rho_clip = rho if abs(rho - 1) < config.clip else 1 + config.clip * (rho - 1).sign()
            v_clip = (v if abs(v - v_old) < config.value_clip
                      else v_old + config.value_clip * (v - v_old).sign())
            l_clip, l_vf = (min(rho * a, rho_clip * a),
                            max((v - target) ** 2, (v_clip - target) ** 2) / 2)
            total = (total - l_clip + config.value_coef * l_vf
                     + config.entropy_coef * (logp[t].exp() * logp[t]).sum())
    return total / count


def test_minibatch_loss_is_algorithm_4_by_brute_force(policy):  # Alg. 4 l.25–28
    """Alg. 4 l.22–30, minimise −L_CLIP − β H: loss, metrics and every gradient, some tokens
    clipped."""
    config = toy_config(temperature=0.7, entropy_coef=0.3, value_coef=0.5, value_clip=0.2,
                    micro_batch_tokens=99)
    model, head, rollouts = scored(policy, config)
    # as after some epochs of updates
    rollouts.logprobs_old += 0.3 * torch.randn_like(rollouts.logprobs_old)
    rollouts.values += 0.3 * torch.randn_like(rollouts.values)
    parameters = [*lora_parameters(model, "policy"), *head.parameters()]
    loss, stats = minibatch_loss(rollouts, list(range(6)), model, head, config,
                                 rollouts.mask.sum())
    with torch.no_grad(), use_lora(model, "policy"):
        rows = [(*brute(model, x, y, config.temperature), y) for x, y in unpadded(rollouts)]
    at = rollouts.mask.bool()
    logprobs = torch.cat([logp[range(len(y)), y] for logp, _, y in rows])
    moved = (torch.cat([head(hidden) for _, hidden, _ in rows]) - rollouts.values[at]).abs()
    log_ratio = logprobs - rollouts.logprobs_old[at]
    ratio = log_ratio.exp()
    is_clipped = ((ratio - 1).abs() > config.clip).float()
    assert 0 < is_clipped.mean() < 1 and moved.max() > config.value_clip > moved.min()
    for name, x in (("ratio", ratio), ("policy_kl", ratio - 1 - log_ratio),
                    ("clip_fraction", is_clipped)):
        close(stats[name], x.mean(), rtol=1e-4, atol=1e-5)
    expected = brute_loss(model, head, rollouts, config)
    close(loss, expected, rtol=1e-4, atol=1e-5)
    got, want = gradients(loss, parameters), gradients(expected, parameters)
    close(got, want, rtol=1e-3, atol=1e-4 * want.abs().max().item())


def updated(model, head, rollouts, config):
    """(parameters after `ppo_update` on copies, what it logs)"""
    model, head = copy.deepcopy((model, head))
    parameters = [*lora_parameters(model, "policy"), *head.parameters()]
    stats = ppo_update(rollouts, model, head, torch.optim.SGD(parameters, lr=0.1), config,
                       random.Random(0))
    return flat(parameters), stats


@pytest.mark.parametrize("micro", [1, 4])
def test_update_is_gradient_descent_on_algorithm_4(policy, micro, monkeypatch):
    """Alg. 4 l.19–31: three passes of clipped descent on the brute-force loss, targets kept.

    Invariant 3: micro-batches change no number.
    """
    config = toy_config(minibatch_size=6, micro_batch_tokens=14 * micro, ppo_epochs=3,
                        entropy_coef=0.1)
    monkeypatch.setattr("policy.MAX_GRAD_NORM", 0.5)
    model, head, rollouts = scored(policy, config)
    got, stats = updated(model, head, rollouts, config)
    parameters, norms = [*lora_parameters(model, "policy"), *head.parameters()], []
    before = flat(parameters)
    for _ in range(3):
        gradient = gradients(brute_loss(model, head, rollouts, config), parameters)
        norms.append(gradient.norm().item())
        for p, g in zip(parameters, gradient.split([p.numel() for p in parameters])):
            p.data -= 0.1 * min(1.0, 0.5 / norms[-1]) * g.view_as(p)
    assert min(norms) > 0.5 and (got - before).norm() > 0.05
    close(got, flat(parameters), rtol=0, atol=1e-5)
    assert stats["grad_norm"] == pytest.approx(sum(norms) / 3, rel=1e-3)


def test_every_pass_takes_every_rollout_once(policy, spy):  # Alg. 4 l.19; Alg. 4 l.20
    """Alg. 4 l.20: 4 + 2 rollouts in passes of one row each, in a new order each epoch. In the
    training mode, without which --activation_checkpointing has no effect."""
    config = toy_config(minibatch_size=4, micro_batch_tokens=1, ppo_epochs=4)
    model, head, rollouts = scored(policy, config)
    calls = spy("policy.minibatch_loss", lambda rollouts, index, model, head, config, count: (
        index, int(rollouts.mask[index].sum()), model.training and int(count)))
    updated(model, head, rollouts, config)
    epochs = [calls[i : i + 6] for i in range(0, 24, 6)]
    assert len(calls) == 24
    for epoch in epochs:
        assert sorted(index for (index,), _, _ in epoch) == [*range(6)]
        for minibatch in (epoch[:4], epoch[4:]):
            tokens = sum(n for _, n, _ in minibatch)
            assert {count for *_, count in minibatch} == {tokens}
    assert len({tuple(index for (index,), _, _ in epoch[4:]) for epoch in epochs}) > 1


@pytest.mark.parametrize("schedule, oracle", [
    ("linear", lambda o, n: torch.optim.lr_scheduler.LinearLR(o, 1.0, 0.0, n)),
    ("cosine", lambda o, n: torch.optim.lr_scheduler.CosineAnnealingLR(o, n))])
def test_learning_rate_is_torchs_schedule(schedule, oracle):
    """From the peak at iteration 0 to zero after the last, every step against torch."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=3e-4)
    ours = torch.optim.SGD([{"params": torch.zeros(1)}, {"params": torch.zeros(1)}])
    config = toy_config(schedule=schedule, iterations=10, learning_rate=3e-4)
    scheduler = oracle(optimizer, 10)
    for iteration in range(11):
        set_learning_rates(ours, config, iteration)
        theta, psi = (group["lr"] for group in ours.param_groups)
        assert theta == pytest.approx(scheduler.get_last_lr()[0], rel=1e-6, abs=1e-12)
        assert psi == pytest.approx(theta * config.value_rate_factor)
        optimizer.step()
        scheduler.step()


# ── Algorithm 3

PAIRS = [([5, 6, 7, 8], [9, 10, 1]), ([11], [12, 13, 14, 15, 1]), ([16, 17], [1])]


# Eq. §3.4 L_R; Alg. 3 l.5–6
def test_z_loss_is_the_negative_log_likelihood_of_z_alone(toy_model):
    """Alg. 3 l.5–6: −Σ log p(z_j | z_<j, x, y) over z and EOS, and its gradient."""
    model, _ = toy_model
    parameters = add_lora(model, "reward", 4, 8)
    randomise(parameters)
    with use_lora(model, "reward"):
        loss = z_loss(model, PAIRS)
        expected = sum(-brute(model, x, z)[0][torch.arange(len(z)), torch.tensor(z)].sum()
                       for x, z in PAIRS)
        close(loss, expected, rtol=1e-4, atol=1e-4)
        got, want = gradients(loss, parameters), gradients(expected, parameters)
        close(got, want, rtol=1e-3, atol=1e-4 * want.abs().max().item())


# Alg. 3 l.4; Alg. 3 l.7
def test_teacher_forcing_starts_at_the_base_and_lowers_the_loss(toy_model):
    """φ is a new adapter of the given shape, at first the base; every step makes z likelier."""
    model, _ = toy_model
    bare = z_loss(model, PAIRS).item() / 9
    config = toy_config(reward_lora_r=4, reward_lora_alpha=12, reward_epochs=4,
                        reward_lora_targets="q_proj,v_proj", reward_learning_rate=1e-3,
                        reward_batch_size=3, micro_batch_tokens=14)
    losses = fit_adapter(model, PAIRS, "reward", config)
    assert len(losses) == 4 and losses[0] == pytest.approx(bare, rel=1e-5)
    # Each step lowers it by 0.11 or more, over eight seeds of the adapter.
    assert all(later < former - 0.01 for former, later in zip(losses, losses[1:]))
    assert {min(p.shape) for p in lora_parameters(model, "reward")} == {4}
    assert model.model.layers[0].self_attn.q_proj.scaling == {"reward": 12 / 4}


def test_encode_rows_leaves_out_quotes_that_are_not_there_and_rows_that_are_too_long(toy_model):
    """§3.4, Appendix L: x is what R_φ will see; z is the critique, grounded spans and one EOS.

    The response has one cat, so that of two quotes of it one stays. Rows of up to max_tokens,
    EOS included, keep their pairs.
    """
    _, tokenizer = toy_model
    rows = [{"prompt": "Summarise.", "response": "the cat sat" + " on" * n,
             "critique": "Some of it is right.", "good_spans": ["cat", "dog", "cat"],
             "poor_spans": ["horse", "sat"]} for n in (0, 9, 3)]
    kept, pairs = encode_rows(rows, tokenizer, 10**6)
    x, z = pairs[0]
    assert kept == rows
    assert x == encode_prompt(tokenizer, critique_prompt("Summarise.", "the cat sat"))
    assert z[-1] == tokenizer.eos_token_id and z.count(tokenizer.eos_token_id) == 1
    read = parse_feedback(tokenizer.decode(z[:-1]))
    assert read == Feedback("Some of it is right.", ["cat"], ["sat"])
    limit = sum(map(len, pairs[2]))
    assert encode_rows(rows, tokenizer, limit) == (rows[::2], pairs[::2])
    assert encode_rows(rows, tokenizer, limit - 1)[0] == rows[:1]


@many
@given(st.integers(1, 60), st.integers(0, 8), seeds)
def test_split_rows_keeps_a_prompt_on_one_side(n, held_out, seed):
    """No prompt, here a list of messages, is both trained on and judged by; none is lost; at
    most a tenth is held out, or one prompt of fewer than ten."""
    rows = [{"x": [{"role": "user", "content": str(i % n)}], "id": i} for i in range(2 * n)]
    split = lambda count, seed: split_rows(rows, count, seed, lambda row: row["x"])
    train, held = split(held_out, seed)
    assert not any(row["x"] == other["x"] for row in train for other in held)
    assert sorted(train + held, key=lambda row: row["id"]) == rows
    assert len(held) == 2 * min(held_out, max(1, n // 10), n - 1)
    assert (train, held) == split(held_out, seed)
    others = [split(8, seed)[1] for seed in range(9)]
    assert n < 20 or others != others[:1] * 9, "another seed holds out other prompts"


# ── Alg. 4 l.13: what a critique is worth

TEXT = "the cat saw the dog run"


def judged(critique):
    """The Review of TEXT, whose tokens are its words and EOS."""
    words = [match.span() for match in re.finditer(r" ?\S+", TEXT)]
    return read_critique(critique, TEXT, [*words, (len(TEXT), len(TEXT))])


@pytest.mark.parametrize("critique, reason", [
    ("The cat is right.", "no JSON object"), ("", "no critique"),
    ('Right.\n{"good_spans": [1], "poor_spans": []}', "list of strings")])
def test_an_unreadable_critique_rewards_nothing_and_says_why(critique, reason):
    """Invariant 2: zeros for every token, with a reason; "" is R_φ's for an empty response."""
    verdict = judged(critique)
    assert verdict == Review(critique, [0.0] * 7, verdict.reason)
    assert reason in verdict.reason


def test_a_readable_critique_gives_the_delta_of_its_spans():
    """§3.3, Alg. 4 l.13: +1 on a good span's tokens, −1 on a poor one's, 0 elsewhere and on
    EOS. Quotes without reward are counted (invariant 2)."""
    # "horse" is not there, "the" occurs twice, "dog" is both good and poor.
    critique = ('Mixed.\n{"good_spans": ["cat", "the", "horse", "dog"], '
                '"poor_spans": ["the dog", "run"]}')
    verdict = judged(critique)
    assert (verdict.critique, verdict.reason) == (critique, "")
    assert verdict.delta == [0, 1, 0, -1, 0, -1, 0]
    assert [verdict.quotes, verdict.unmatched, verdict.ambiguous, verdict.conflicts] == [
        6, 1, 1, 1]


def test_g_nl_of_a_critique_is_what_ppo_follows_at_first():  # Eq. §3.5 g_NL
    """§3.5: −∂ loss / ∂ log π(y_t) is R_φ's δ_t; PPO with A_t = δ_t has it over T at θ_old."""
    verdict = judged('Mixed.\n{"good_spans": ["cat saw"], "poor_spans": ["run"]}')
    delta, mask = torch.tensor([verdict.delta], dtype=torch.float64), torch.ones(1, 7)
    logprobs = noise(0, 1, 7).requires_grad_()
    g_nl = -torch.autograd.grad(nl_gradient_loss(logprobs, delta, mask), logprobs)[0]
    assert g_nl.tolist() == [[0, 1, 1, 0, 0, -1, 0]]
    close(-7 * torch.autograd.grad(
        ppo_loss(logprobs, logprobs.detach().clone(), delta, mask, 0.2), logprobs)[0], g_nl)
