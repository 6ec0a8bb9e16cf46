"""Every equation of the method, recomputed another way:
double sums, brute force, autograd, by hand.

The order is the paper's: Definition 1, §3.5 (GAE, PPO), §3.6 with Appendix A,
Algorithm 3, Algorithm 4.
"""

import copy
import json
import math
import random
from dataclasses import replace

import pytest
from helpers import random_rollouts, randomise, scored
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import text2grad
from annotate import Feedback, FeedbackError, Span, ground, parse_feedback, token_rewards
from data import reward_prompt
from model import (add_lora, encode_prompt, lora_parameters, response_hidden,
                   use_lora)
from reward_model import (Judgement, RewardConfig, encode_rows, fit_adapter, judge, split_rows,
                          z_loss)
from sampling import head_weight, token_logprobs
from text2grad import (AdaptiveKL, Config, Rollouts, add_advantages, add_feedback, add_scores,
                       batch_rows, decay, gae, minibatch_loss, nl_gradient_loss, ppo_loss,
                       ppo_update, value_loss, whiten)

close = torch.testing.assert_close
many = settings(deadline=None, max_examples=60, database=None, derandomize=True)
row_lengths = st.lists(st.integers(1, 7), min_size=1, max_size=4)
seeds = st.integers(0, 10**6)
unit = st.floats(0, 1)


# ── Helpers

def prefix_mask(lengths):
    """[B, T]: 1 on the tokens of each row, 0 on its right padding, as `pad_batch` makes it."""
    return (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()


def noise(seed, *shape):
    """Normal numbers in float64, so that only the formula can make a difference."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed),
                       dtype=torch.float64)


def vector(*values):
    """A float64 row that wants a gradient."""
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


def one_row(*rewards, values=None, gamma=1.0, lam=0.95):
    """A_1 … A_T of one unpadded response, through `gae`."""
    r = torch.tensor([rewards], dtype=torch.float64)
    v = torch.zeros_like(r) if values is None else torch.tensor([values], dtype=torch.float64)
    return gae(r, v, torch.ones_like(r), gamma, lam)[0][0]


def end_reward(*delta):
    """Setting B of Appendix A: the same total, all of it at the last token."""
    return [0.0] * (len(delta) - 1) + [sum(delta)]


def double_sum(rewards, values, gamma, lam, drop=0):
    """§3.5 over one unpadded row in plain Python: Σ_l (γλ)^l td_error_{t+l};
    drop=1 is the printed limit T−t−1."""
    n, v = len(rewards), [*values, 0.0]
    td = [rewards[t] + gamma * v[t + 1] - v[t] for t in range(n)]
    return [sum((gamma * lam) ** l * td[t + l] for l in range(n - t - drop)) for t in range(n)]


def unpadded(rollouts):
    """[(x, y)] as plain lists of ids."""
    tensors = (rollouts.prompt_ids, rollouts.prompt_mask, rollouts.response_ids, rollouts.mask)
    return [(x[m.bool()].tolist(), y[n.bool()].tolist()) for x, m, y, n in zip(*tensors)]


def brute(model, x, y, temperature=1.0):
    """One unpadded row through the model's own logits: log π(·|x, y_<t) [T, V]
    and the hidden states [T, H]."""
    out = model(torch.tensor([x + y]), output_hidden_states=True)
    rows = slice(len(x) - 1, len(x) + len(y) - 1)
    return (out.logits[0, rows] / temperature).log_softmax(-1), out.hidden_states[-1][0, rows]


def gradients(loss, parameters):
    """The gradient as one flat vector; a parameter that the loss does not touch has zeros."""
    got = torch.autograd.grad(loss, parameters, allow_unused=True)
    return torch.cat([(torch.zeros_like(p) if g is None else g).flatten()
                      for p, g in zip(parameters, got)])


def flat(parameters):
    """All entries of some parameters, detached."""
    return torch.cat([p.detach().flatten() for p in parameters])


# ── Definition 1

def test_gradient_of_nl_gradient_loss_is_minus_definition_1(policy):  # Eq. §3.1 Definition 1
    """Definition 1: g_NL = Σ_t δ_t ∇ log π(y_t | x, y_<t),
    token by token through the plain model, mean of rows."""
    model, _, rollouts = policy
    parameters, part = lora_parameters(model, "policy"), rollouts.part([0, 1, 2])
    # padding holds δ too
    delta = torch.tensor([[1.0, -1, 0, 1, 0.3]]).repeat(3, 2)[:, : part["mask"].shape[1]]
    with use_lora(model, "policy"):
        hidden = response_hidden(model, *(
            part[k] for k in ("prompt_ids", "prompt_mask", "response_ids", "mask")))
        logprobs = token_logprobs(hidden.flatten(0, 1), head_weight(model),
                                  part["response_ids"].flatten())
        got = gradients(nl_gradient_loss(logprobs.view_as(delta), delta, part["mask"]),
                        parameters)
        g_nl = torch.zeros_like(got)
        for row, (x, y) in enumerate(unpadded(rollouts)[:3]):
            for t, token in enumerate(y):
                g_nl += delta[row, t] * gradients(brute(model, x, y)[0][t, token], parameters)
    assert g_nl.norm() > 1e-3
    close(got, -g_nl / 3, rtol=1e-3, atol=1e-5 * g_nl.norm().item())


# ── §3.5: advantages

@many
@given(row_lengths, seeds, unit, unit)
# Eq. §3.5 GAE; Alg. 4 l.15–16
def test_gae_is_its_double_sum_whatever_stands_in_the_padding(lengths, seed, gamma, lam):
    """§3.5, Appendix A: A_t = Σ_{l=0}^{T−t} (γλ)^l td_error_{t+l},
    V = 0 after the last token of every row."""
    mask = prefix_mask(lengths)
    rewards, values = noise(seed, *mask.shape), noise(seed + 1, *mask.shape)
    rewards, values = (torch.where(mask.bool(), x, 1e6 * x) for x in (rewards, values))
    advantages, returns = gae(rewards, values, mask, gamma, lam)
    for row, n in enumerate(lengths):
        r, v = rewards[row, :n].tolist(), values[row, :n].tolist()
        close(advantages[row, :n].tolist(), double_sum(r, v, gamma, lam), rtol=1e-9, atol=1e-9)
        close(returns[row, :n], advantages[row, :n] + values[row, :n])
        assert not advantages[row, n:].any() and not returns[row, n:].any()


def test_gae_by_hand():
    """§3.5 with γ = 1, λ = ½: td_error = (1 + 4 − 2, 0 + 6 − 4, −1 − 6) = (3, 2, −7);
    A_1 = 3 + 2/2 − 7/4."""
    close(one_row(1, 0, -1, values=[2.0, 4, 6], lam=0.5).tolist(), [2.25, -1.5, -7.0])


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_gae_with_lambda_zero_is_the_td_error(gamma):
    """λ = 0: A_t = r_t + γ V_{t+1} − V_t."""
    r, v = noise(1, 5), noise(2, 5)
    close(one_row(*r.tolist(), values=v.tolist(), gamma=gamma, lam=0.0),
          r + gamma * F.pad(v[1:], (0, 1)) - v)


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_gae_with_lambda_one_is_the_first_form_of_line_16(gamma):  # Alg. 4 l.15–16
    """Alg. 4 l.16: A_t = Σ_{k=t}^{T} γ^{k−t} r_k − V(x, y_<t)."""
    r, v = noise(1, 6).tolist(), noise(2, 6).tolist()
    expected = [sum(gamma ** (k - t) * r[k] for k in range(t, 6)) - v[t] for t in range(6)]
    close(one_row(*r, values=v, gamma=gamma, lam=1.0).tolist(), expected)


def test_printed_upper_limit_would_drop_the_last_td_error():
    """§3.5 and Alg. 4 l.16 print T−t−1: y_T would get no advantage,
    and the others miss (γλ)^{T−t} td_error_T."""
    r, v = noise(1, 6).tolist(), noise(2, 6).tolist()
    printed, ours = double_sum(r, v, 1.0, 0.95, drop=1), one_row(*r, values=v).tolist()
    assert printed[-1] == 0
    close([a - p for a, p in zip(ours, printed)],
          [0.95 ** (5 - t) * (r[5] - v[5]) for t in range(6)])


# ── §3.6 and Appendix A

@many
@given(st.lists(st.sampled_from([-1.0, 0.0, 1.0]), min_size=1, max_size=8), unit, unit)
# Eq. §3.6 A^A
def test_without_values_the_advantage_is_the_discounted_sum_of_delta(delta, gamma, lam):
    """§3.6, setting A with V = 0 and no KL: A_t = Σ_{k=t}^{T} (γλ)^{k−t} δ_k."""
    n = len(delta)
    expected = [math.fsum((gamma * lam) ** (k - t) * delta[k] for k in range(t, n))
                for t in range(n)]
    close(one_row(*delta, gamma=gamma, lam=lam).tolist(), expected, rtol=1e-9, atol=1e-9)


@many
@given(st.lists(st.sampled_from([-1.0, 0.0, 1.0]), min_size=1, max_size=8), unit)
def test_end_of_sequence_reward_spreads_the_whole_sum_backwards(delta, lam):  # Eq. §3.6 A^B
    """§3.6, setting B: A_t = (γλ)^{T−t} Σ δ.
    GAE sums over all k, which is the printed Σ_{k=t} at t = 1 only."""
    n, got = len(delta), one_row(*end_reward(*delta), lam=lam).tolist()
    close(got, [lam ** (n - 1 - t) * sum(delta) for t in range(n)])
    printed = [lam ** (n - 1 - t) * sum(delta[t:]) for t in range(n)]
    close(got[0], printed[0])
    for t in range(n):
        close(got[t] - printed[t], lam ** (n - 1 - t) * sum(delta[:t]), rtol=1e-9, atol=1e-9)


def test_a_reward_twenty_tokens_before_the_end_weighs_2_79_times_more():  # Eq. Appendix A α
    """Appendix A: α(T − 20, T) = 0.95^−20 ≈ 2.8, as a ratio of two outputs of `gae`."""
    T, k = 30, 10
    delta = [float(t == k) for t in range(1, T + 1)]
    alpha = (one_row(*delta)[0] / one_row(*end_reward(*delta))[0]).item()
    assert alpha == pytest.approx(0.95**-20) == pytest.approx(2.79, abs=0.005)


deltas = st.lists(st.tuples(*[st.sampled_from([-1.0, 0.0, 1.0])] * 2), min_size=2, max_size=8)


def advantage_differences(better, worse, shared, lam=0.95):
    """(ΔA_1^A, ΔA_1^B) of two trajectories that share their KL rewards and values."""
    kl, v = shared[0].tolist(), shared[1].tolist()
    run = lambda rewards: one_row(*[r + k for r, k in zip(rewards, kl)],
                                  values=v, lam=lam)[0].item()
    return run(better) - run(worse), run(end_reward(*better)) - run(end_reward(*worse))


@many
@given(deltas, seeds)
def test_token_rewards_discriminate_more_where_no_token_got_worse(pairs, seed):
    """Appendix A: ΔA^A > ΔA^B where every Δr_k ≥ 0 and one before T is > 0;
    KL and V are shared and cancel."""
    better, worse = ([f(p) for p in pairs] for f in (max, min))
    assume(any(b > w for b, w in zip(better[:-1], worse)))
    a, b = advantage_differences(better, worse, noise(seed, 2, len(pairs)))
    assert a > b + 1e-9


@many
@given(deltas, seeds)
def test_difference_of_the_two_settings(pairs, seed):
    """ΔA_1^A − ΔA_1^B = Σ_{k<T} ((γλ)^{k−1} − (γλ)^{T−1}) Δδ_k, for any signs;
    §3.6 prints no second power."""
    better, worse = zip(*pairs)
    T, change = len(pairs), [b - w for b, w in pairs]
    a, b = advantage_differences(better, worse, noise(seed, 2, T))
    close(a - b, sum((0.95**k - 0.95 ** (T - 1)) * change[k] for k in range(T - 1)),
          rtol=1e-9, atol=1e-9)
    printed = sum(0.95**k * change[k] for k in range(T - 1))
    close(printed - (a - b), 0.95 ** (T - 1) * sum(change[:-1]), rtol=1e-9, atol=1e-9)


def test_appendix_a_claims_too_much():
    """"Whenever any Δr_k > 0 for k < T" is false:
    Δr = (−1, 1, 0) has one, and gives −0.05 against 0."""
    change = (-1.0, 1.0, 0.0)
    a, b = one_row(*change)[0].item(), one_row(*end_reward(*change))[0].item()
    assert (a, b) == (pytest.approx(-0.05), 0.0)
    assert not a > b


@many
@given(row_lengths, seeds, st.floats(-3, 3), unit)
def test_a_constant_value_subtracts_lambda_to_the_distance_from_the_end(lengths, seed, c, lam):
    """§3.6 with V = c and γ = 1: all TD errors but the last are δ_t,
    so A_t = Σ λ^{k−t} δ_k − c λ^{T−t}, not Σ."""
    mask = prefix_mask(lengths)
    delta = noise(seed, *mask.shape)
    plain, shifted = (gae(delta, torch.full_like(delta, v), mask, 1.0, lam)[0]
                      for v in (0.0, c))
    for row, n in enumerate(lengths):
        close((plain - shifted)[row, :n].tolist(), [c * lam ** (n - 1 - t) for t in range(n)],
              rtol=1e-9, atol=1e-9)


def test_a_constant_value_is_gone_after_whitening_where_lambda_is_one():
    """With γ = λ = 1 the TD errors telescope to Σ_{k≥t} δ_k − c, one shift for all;
    λ = 0.95 gives none."""
    mask = prefix_mask([5, 2, 7])
    delta = noise(0, 3, 7) * mask
    advantages = lambda c, lam: gae(delta, torch.full_like(delta, c), mask, 1.0, lam)[0]
    suffix_sums = delta.flip(1).cumsum(1).flip(1)
    close(advantages(2.0, 1.0), (suffix_sums - 2) * mask)
    close(whiten(advantages(2.0, 1.0), mask), whiten(advantages(0.0, 1.0), mask))
    assert (whiten(advantages(2.0, 0.95), mask)
            - whiten(advantages(0.0, 0.95), mask)).abs().max() > 0.1


# ── Whitening

@many
@given(st.lists(st.integers(1, 7), min_size=2, max_size=4), seeds)
def test_whiten_is_the_z_score_of_the_unpadded_tokens(lengths, seed):
    """(x − mean) / population std over the tokens of the batch;
    0 on padding, rubbish there ignored."""
    mask = prefix_mask(lengths)
    x = 3 * noise(seed, *mask.shape) + 5
    tokens = x[mask.bool()]
    got = whiten(torch.where(mask.bool(), x, -1e6), mask)
    close(got[mask.bool()], (tokens - tokens.mean()) / tokens.std(correction=0),
          rtol=1e-4, atol=1e-6)
    assert (abs(got.sum()) < 1e-6
            and (got**2).sum().item() == pytest.approx(len(tokens), rel=1e-3))
    assert not got[~mask.bool()].any()


@pytest.mark.parametrize("value, tokens", [
    (0.0, 48), (4.0, 48), (0.1, 48), (4.1, 48), (7.3, 1)])
def test_whiten_of_equal_tokens_is_zero(value, tokens):
    """No spread gives 0 also where the mean is not a float32: the rounding of a sum must not be
    divided by √1e-8."""
    got = whiten(torch.full((tokens, tokens), value), torch.ones(tokens, tokens).long())
    assert got.abs().max() < 1e-3                                       # NaN fails too


# ── §3.5: the clipped policy loss

@pytest.mark.parametrize("ratio, advantage, loss, gradient", [
    # inside
    (1.0, 2.0, -2.0, -2.0), (1.0, -2.0, 2.0, 2.0),
    (1.1, 2.0, -2.2, -2.2), (0.9, -2.0, 1.8, 1.8),
    # clipped
    (1.5, 2.0, -2.4, 0.0), (0.5, -2.0, 1.6, 0.0),
    # outside, not clipped
    (1.5, -2.0, 3.0, 3.0), (0.5, 2.0, -1.0, -1.0),
])
# Eq. §3.5 PPO; Alg. 4 l.21–22; Alg. 4 l.23
def test_ppo_loss_by_cases(ratio, advantage, loss, gradient):
    """Alg. 4 l.23 at ε = 0.2; d ρ / d log π = ρ, and a clipped token has no gradient."""
    old = torch.tensor([-1.3], dtype=torch.float64)
    logprobs = vector(-1.3 + math.log(ratio))
    got = ppo_loss(logprobs, old, torch.tensor([advantage], dtype=torch.float64),
                   torch.ones(1), 0.2)
    close((got.item(), gradients(got, [logprobs]).item()), (loss, gradient),
          rtol=1e-9, atol=1e-9)


def test_ppo_loss_is_a_mean_over_tokens():
    """𝔼_t: the mean over all tokens of the batch, not of row means.
    (2.4 − 3 + 1 + 1) / 4 for three tokens and one."""
    logprobs = torch.tensor([[1.5, 1.5, 0.5], [1.0, 1.0, 1.0]]).log()
    advantages = torch.tensor([[2.0, -2.0, 2.0], [1.0, 5.0, 5.0]])
    assert (ppo_loss(logprobs, torch.zeros(2, 3), advantages, prefix_mask([3, 1]), 0.2).item()
            == pytest.approx(-0.35))


@pytest.mark.parametrize("rubbish", [1e30, -1e30])
def test_ppo_loss_ignores_padding(rubbish):
    """A ratio that would overflow in the padding reaches neither the loss nor the gradient."""
    mask, (logprobs, old, advantages) = prefix_mask([4, 1]), noise(0, 3, 2, 4)
    at = mask.bool()
    tokens = logprobs[at].requires_grad_()
    expected = ppo_loss(tokens, old[at], advantages[at], torch.ones(5), 0.2)
    padded = torch.where(at, logprobs, rubbish).requires_grad_()
    got = ppo_loss(padded, old, torch.where(at, advantages, rubbish), mask, 0.2)
    close(got, expected)
    gradient = torch.autograd.grad(got, padded)[0]
    close(gradient[at], torch.autograd.grad(expected, tokens)[0])
    assert not gradient[~at].any()


@pytest.mark.parametrize("loss", [ppo_loss, value_loss])
def test_parts_add_up_to_the_whole_with_count(loss):
    """Invariant 3: parts of unequal token counts, each divided by the whole count,
    sum to the loss of the whole."""
    mask, (new, old, target) = prefix_mask([4, 2, 7, 1]), noise(0, 3, 4, 7)
    whole = loss(new, old, target, mask, 0.2)
    parts = [loss(new[i], old[i], target[i], mask[i], 0.2, mask.sum())
             for i in ([0], [1, 2], [3])]
    close(sum(parts), whole)
    assert abs(sum(loss(new[i], old[i], target[i], mask[i], 0.2)
                   for i in ([0], [1, 2], [3])) / 3 - whole) > 1e-3


# ── Alg. 4 l.24: the value loss

@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("value, loss, gradient", [
    (0.1, 0.405, -0.9),   # within the clip: ½ (0.1 − 1)²
    (0.5, 0.32, 0.0),     # moved to the target by more than the clip: ½ (0.2 − 1)², held there
    (-0.5, 1.125, -1.5),  # moved away: the larger error ½ (−0.5 − 1)² counts, and pulls back
    (2.5, 1.125, 1.5),    # past the target, and farther from it than the clip is
])
def test_value_loss_by_cases(value, loss, gradient, sign):  # Alg. 4 l.24
    """Alg. 4 l.24 with the release's clipping, V_old = 0, R = ±1, clip 0.2."""
    v = vector(sign * value)
    got = value_loss(v, torch.zeros(1), torch.tensor([float(sign)]), torch.ones(1), 0.2)
    close((got.item(), gradients(got, [v]).item()), (loss, sign * gradient),
          rtol=1e-6, atol=1e-9)


def test_value_loss_is_clipped_around_the_old_value_and_ignores_padding():
    """½ (0.9² + 0.8² + 0.8²) / 3: V_old = 5, so two values are held at 5.2; R = 6;
    the fourth token is padding."""
    values, returns = (torch.tensor([[5.1, 6.3, 5.5, -1e6]]),
                       torch.tensor([[6.0, 6.0, 6.0, 1e6]]))
    got = value_loss(values, torch.full((1, 4), 5.0), returns, torch.tensor([[1, 1, 1, 0]]),
                     0.2)
    assert got.item() == pytest.approx((0.9**2 + 0.8**2 + 0.8**2) / 6, rel=1e-4)


# ── The adaptive KL coefficient

@pytest.mark.parametrize("kl, target, error", [
    (6.6, 6, 0.1), (5.4, 6, -0.1), (6.0, 6, 0.0), (60.0, 6, 0.2), (0.0, 6, -0.2),
    (7.21, 6, 0.2), (60.0, 0, 0.0)])
def test_adaptive_kl_by_hand(kl, target, error):
    """Ziegler et al. 2019 §2.2: e = clip(KL / target − 1, ±0.2); β ← β (1 + e n / horizon).
    With --kl_target 0 it stays."""
    controller = AdaptiveKL(0.5, target, 1000)
    controller.update(kl, 100)
    controller.update(kl, 50)
    want = 0.5 * (1 + error * 0.1) * (1 + error * 0.05)
    assert controller.beta == pytest.approx(want, rel=1e-9)


# ── Algorithm 4, l.14–18: scores, rewards, advantages

@pytest.mark.parametrize("temperature, sft, reference", [
    (1.0, None, None), (0.6, "sft/adapter", "reference")])
def test_scores_are_those_of_the_full_softmax(policy, temperature, sft, reference):
    """Alg. 4 l.7, 14, 16, 25: log π_old, H, log π_ref and V,
    from whole logits of unpadded rows."""
    model, head, rollouts = policy
    randomise(add_lora(model, "reference", 4, 8))
    config = Config(temperature=temperature, micro_batch_size=4, adapter=sft)
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
            got = getattr(rollouts, name)[row, : len(y)]
            close(got, value.detach(), rtol=1e-3, atol=1e-4,
                  msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("target", ["gae", "return"])
def test_rewards_advantages_and_value_targets(policy, target):
    """Alg. 4 l.14–17, 24: r_t = δ_t − β (log π − log π_ref) on tokens; A whitened;
    targets raw."""
    _, _, rollouts = policy
    config, mask = Config(value_target=target, gamma=0.9, lam=0.8), rollouts.mask
    rollouts.logprobs_old, rollouts.logprobs_ref, rollouts.values = (
        noise(i, *mask.shape).float() for i in (0, 1, 2))  # rubbish in the padding too
    add_advantages(rollouts, 0.3, config)
    raw = torch.zeros_like(rollouts.delta)
    for row, n in enumerate(mask.sum(1).tolist()):
        log_ratio = rollouts.logprobs_old - rollouts.logprobs_ref
        r = (rollouts.delta - 0.3 * log_ratio)[row, :n]
        v = rollouts.values[row, :n].tolist()
        close(rollouts.rewards[row, :n], r)
        raw[row, :n] = torch.tensor(double_sum(r.tolist(), v, 0.9, 0.8))
        expected = (raw[row, :n] + rollouts.values[row, :n]).tolist()
        if target == "return":
            expected = [sum(0.9 ** (k - t) * r[k].item() for k in range(t, n))
                        for t in range(n)]
        close(rollouts.returns[row, :n].tolist(), expected, rtol=1e-4, atol=1e-5)
    assert not any(getattr(rollouts, k)[mask == 0].any()
                   for k in ("rewards", "advantages", "returns"))
    tokens = raw[mask.bool()]
    white = (tokens - tokens.mean()) / tokens.std(correction=0)
    close(rollouts.advantages[mask.bool()], white, rtol=1e-4, atol=1e-5)


# ── The KL penalty penalises

def enumerated(T, V=4):
    """(logits of a tabular policy for every prefix, of a reference, all V^T responses)."""
    prefixes = sum(V**t for t in range(T))
    theta, reference = noise(T, prefixes, V), noise(T + 9, prefixes, V)
    responses = torch.cartesian_prod(*[torch.arange(V)] * T).reshape(-1, T)
    return theta.requires_grad_(), reference, responses


def prefix_rows(responses, V=4):
    """The row of the table that each token of each response was drawn from."""
    rows, first, index = [], 0, torch.zeros(len(responses), dtype=torch.long)
    for t in range(responses.shape[1]):
        rows.append(first + index)
        first, index = first + V**t, index * V + responses[:, t]
    return torch.stack(rows, 1)


@pytest.mark.parametrize("T", [1, 2, 3, 4])
def test_the_kl_penalty_has_the_gradient_of_minus_the_kl(T, monkeypatch):
    """Every response of a tabular policy, V = 4: E[Σ_t A_t ∇ log π(y_t)] = −β ∇ KL(π ‖ π_ref).

    Unwhitened, γ = λ = 1, V = 0, δ = 0. The exact KL_t as a reward fails here: at T = 1 its
    gradient is 0.
    """
    monkeypatch.setattr(text2grad, "whiten", lambda x, mask: x)
    theta, reference, y = enumerated(T)
    rows = prefix_rows(y)
    logp = theta.log_softmax(-1)[rows].gather(2, y[..., None]).squeeze(2)  # [V^T, T]
    logq = reference.log_softmax(-1)[rows].gather(2, y[..., None]).squeeze(2)
    probability = logp.sum(1).exp().detach()
    ones = torch.ones_like(y)
    batch = Rollouts([{}] * len(y), [], [], [], y, ones, y, ones)
    batch.delta, batch.values = torch.zeros_like(logq), torch.zeros_like(logq)
    batch.logprobs_old, batch.logprobs_ref = logp.detach(), logq
    add_advantages(batch, 0.7, Config(gamma=1.0, lam=1.0))
    surrogate = (probability[:, None] * batch.advantages * logp).sum()
    got, = torch.autograd.grad(surrogate, theta, retain_graph=True)
    kl = (logp.sum(1).exp() * (logp - logq).sum(1)).sum()
    want = -0.7 * torch.autograd.grad(kl, theta)[0]
    cosine = F.cosine_similarity(got.flatten(), want.flatten(), dim=0)
    assert cosine > 0.999 and got.norm() == pytest.approx(want.norm().item(), rel=1e-3)


# ── Algorithm 4, l.19–32: the update

def brute_loss(model, head, rollouts, config):
    """−𝔼[L_CLIP] + c 𝔼[L_VF] − β 𝔼[H], one token at a time,
    from whole logits of unpadded rows."""
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


def test_minibatch_loss_is_algorithm_4_by_brute_force(policy):  # Alg. 4 l.27; Alg. 4 l.28
    """Alg. 4 l.22–30 with the signs read as minimise −L_CLIP − β H:
    loss and every gradient, some tokens clipped."""
    config = Config(temperature=0.7, entropy_coef=0.3, value_coef=0.5, value_clip=0.2,
                    micro_batch_size=6)
    model, head, rollouts = scored(policy, config)
    # as after some epochs of updates
    rollouts.logprobs_old += 0.3 * torch.randn_like(rollouts.logprobs_old)
    rollouts.values += 0.3 * torch.randn_like(rollouts.values)
    parameters = [*lora_parameters(model, "policy"), *head.parameters()]
    loss, stats = minibatch_loss(rollouts.part(list(range(6))), model, head, config,
                                 rollouts.mask.sum())
    with torch.no_grad(), use_lora(model, "policy"):
        values = [head(brute(model, x, y)[1]) for x, y in unpadded(rollouts)]
    moved = (torch.cat(values) - rollouts.values[rollouts.mask.bool()]).abs()
    assert 0 < stats["clip_fraction"] < 1 and moved.max() > config.value_clip > moved.min()
    expected = brute_loss(model, head, rollouts, config)
    close(loss, expected, rtol=1e-4, atol=1e-5)
    got, want = gradients(loss, parameters), gradients(expected, parameters)
    close(got, want, rtol=1e-3, atol=1e-4 * want.abs().max().item())


def test_entropy_bonus_has_a_gradient_that_raises_entropy(policy):  # Alg. 4 l.25; Eq. §3.5 PPO
    """Alg. 4 l.25, 27: the bonus adds −β ∇ mean H, by autograd through the full softmax,
    and descent on it raises H."""
    config = Config(entropy_coef=0.5, micro_batch_size=6)
    model, head, rollouts = scored(policy, config)
    parameters, part, count = (lora_parameters(model, "policy"), rollouts.part(list(range(6))),
                               rollouts.mask.sum())
    with_bonus, without = (gradients(minibatch_loss(part, model, head, c, count)[0], parameters)
                           for c in (config, replace(config, entropy_coef=0.0)))

    def mean_entropy():
        with use_lora(model, "policy"):
            logps = [brute(model, x, y)[0] for x, y in unpadded(rollouts)]
        return sum(-(logp.exp() * logp).sum() for logp in logps) / count

    before = mean_entropy()
    expected = -0.5 * gradients(before, parameters)
    assert expected.abs().max() > 1e-4
    close(with_bonus - without, expected, rtol=1e-3, atol=1e-3 * expected.abs().max().item())
    step = with_bonus - without
    for p, s in zip(parameters, step.split([p.numel() for p in parameters])):
        p.data -= 1e-2 / step.norm() * s.view_as(p)
    assert mean_entropy() > before


def test_ratio_is_one_at_the_old_policy_and_only_there(policy):  # Alg. 4 l.7
    """Alg. 4 l.22 and invariant 1: recomputed log-probs are the old ones;
    k3, never negative, says so of each."""
    config = Config(temperature=0.7, micro_batch_size=2)
    model, head, rollouts = scored(policy, config)
    part, count = rollouts.part(list(range(6))), rollouts.mask.sum()
    stats = minibatch_loss(part, model, head, config, count)[1]
    assert stats["ratio"] == pytest.approx(1, abs=1e-5)
    assert stats["clip_fraction"] == 0 and abs(stats["policy_kl"]) < 1e-6
    randomise(lora_parameters(model, "policy"))
    assert minibatch_loss(part, model, head, config, count)[1]["policy_kl"] > 1e-3


def test_the_value_loss_does_not_move_the_policy(policy):
    """Alg. 4 l.30: with no advantage the adapter's gradient is exactly 0,
    the value head's is not."""
    config = Config(value_coef=1000.0, micro_batch_size=6)
    model, head, rollouts = scored(policy, config)
    rollouts.advantages.zero_()
    part, count = rollouts.part(list(range(6))), rollouts.mask.sum()
    loss, _ = minibatch_loss(part, model, head, config, count)
    adapter, n = lora_parameters(model, "policy"), sum(p.numel() for p in head.parameters())
    got = gradients(loss, [*adapter, *head.parameters()])
    assert not got[:-n].any() and got[-n:].abs().max() > 1e-3


def updated(model, head, rollouts, config):
    """(parameters after `ppo_update` on copies, what it logs)"""
    model, head = copy.deepcopy((model, head))
    parameters = [*lora_parameters(model, "policy"), *head.parameters()]
    stats = ppo_update(rollouts, model, head, torch.optim.SGD(parameters, lr=0.1), config,
                       random.Random(0))
    return flat(parameters), stats


def test_update_is_gradient_descent_on_algorithm_4(policy, monkeypatch):  # Alg. 4 l.29–30
    """Alg. 4 l.19–31: three passes of clipped gradient descent on the brute-force loss,
    old policy and targets kept."""
    config = Config(minibatch_size=6, micro_batch_size=4, ppo_epochs=3, entropy_coef=0.1)
    monkeypatch.setattr(text2grad, "MAX_GRAD_NORM", 0.5)
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


def test_every_pass_takes_every_rollout_once(policy, monkeypatch):  # Alg. 4 l.19; Alg. 4 l.20
    """Alg. 4 l.20: 4 + 2 rollouts in micro-batches of 3, a new order each pass;
    `count` is the tokens of the 4 or 2."""
    config, calls = Config(minibatch_size=4, micro_batch_size=3, ppo_epochs=4), []
    model, head, rollouts = scored(policy, config)

    def spy(part, model, head, config, count):
        calls.append((part["response_ids"].sum(1).tolist(),
                      int(part["mask"].sum()), int(count)))
        return minibatch_loss(part, model, head, config, count)

    monkeypatch.setattr(text2grad, "minibatch_loss", spy)
    updated(model, head, rollouts, config)
    passes = [calls[i : i + 3] for i in range(0, 12, 3)]
    names = sorted(rollouts.response_ids.sum(1).tolist())  # the sum of its ids tells each row
    assert len(calls) == 12 and len(set(names)) == 6
    for (a, n_a, count_a), (b, n_b, count_b), (c, n_c, count_c) in passes:
        assert (len(a), len(b), len(c)) == (3, 1, 2) and sorted(a + b + c) == names
        assert count_a == count_b == n_a + n_b and count_c == n_c
    assert len({tuple(sorted(last[0])) for _, _, last in passes}) > 1


@pytest.mark.parametrize("minibatch", [12, 6])
def test_micro_batches_change_no_number(policy, minibatch):
    """Invariant 3: scores, advantages and the update of micro-batches of 1, 2, 8 and all 12
    are the same beyond rounding."""
    model, head, rollouts = *policy[:2], random_rollouts(2)
    whole = Config(minibatch_size=minibatch, ppo_epochs=2, entropy_coef=0.01)
    before, outcomes = flat([*lora_parameters(model, "policy"), *head.parameters()]), []
    for micro in (12, 8, 2, 1):
        config, mine = replace(whole, micro_batch_size=micro), replace(rollouts)
        scored((model, head, mine), config)
        outcomes.append((mine, *updated(model, head, mine, config)))
    assert (outcomes[0][1] - before).abs().max() > 1e-2
    for mine, after, stats in outcomes[1:]:
        for name in ("logprobs_old", "entropy", "logprobs_ref", "values", "advantages",
                     "returns"):
            close(getattr(mine, name), getattr(outcomes[0][0], name), rtol=1e-4, atol=1e-5)
        close(after, outcomes[0][1], rtol=0, atol=1e-6)
        assert stats == pytest.approx(outcomes[0][2], rel=1e-3, abs=1e-5)


def widened(name, x, left=64, right=64):
    """More padding, of a real token's id with mask 0: left of a prompt, right of a response."""
    return F.pad(x, (left, 0) if name.startswith("prompt_") else (0, right),
                 value=5 if name.endswith("_ids") else 0)


def test_padding_changes_no_number(policy):
    """Invariant 3: 64 more columns of padding on both sides, through the whole phase,
    and untrimmed in the loss."""
    config = Config(minibatch_size=3, micro_batch_size=3, ppo_epochs=2, entropy_coef=0.01)
    model, head, rollouts = policy
    wide = replace(rollouts, **{
        k: widened(k, getattr(rollouts, k))
        for k in ("prompt_ids", "prompt_mask", "response_ids", "mask", "delta")})
    for mine in (rollouts, wide):
        scored((model, head, mine), config)
    for name in ("logprobs_old", "entropy", "logprobs_ref", "values", "rewards", "advantages",
                 "returns"):
        close(getattr(wide, name), widened(name, getattr(rollouts, name)), rtol=1e-4, atol=1e-5)
    (after, _), (after_wide, _) = (updated(model, head, mine, config)
                                   for mine in (rollouts, wide))
    close(after_wide, after, rtol=0, atol=1e-6)

    parameters, part = ([*lora_parameters(model, "policy"), *head.parameters()],
                        rollouts.part(list(range(6))))
    loss, wide_loss = (minibatch_loss(p, model, head, config, rollouts.mask.sum())[0]
                       for p in (part, {k: widened(k, x) for k, x in part.items()}))
    got, want = gradients(wide_loss, parameters), gradients(loss, parameters)
    close(wide_loss, loss, rtol=1e-4, atol=1e-5)
    close(got, want, rtol=1e-3, atol=1e-4 * want.abs().max().item())


# ── Algorithm 3

# Eq. §3.4 L_R; Alg. 3 l.5–6
def test_z_loss_is_the_negative_log_likelihood_of_z_alone(toy_model):
    """Alg. 3 l.5–6: −Σ log p(z_j | z_<j, x, y) over z and EOS from whole logits, row by row;
    with its gradient."""
    model, _ = toy_model
    parameters = add_lora(model, "reward", 4, 8)
    randomise(parameters)
    pairs = [([5, 6, 7, 8], [9, 10, 1]), ([11], [12, 13, 14, 15, 1]), ([16, 17], [1])]
    with use_lora(model, "reward"):
        loss = z_loss(model, pairs)
        expected = sum(-brute(model, x, z)[0][torch.arange(len(z)), torch.tensor(z)].sum()
                       for x, z in pairs)
        close(loss, expected, rtol=1e-4, atol=1e-4)
        got, want = gradients(loss, parameters), gradients(expected, parameters)
        close(got, want, rtol=1e-3, atol=1e-4 * want.abs().max().item())
        alone = [z_loss(model, [pair]) for pair in pairs]
    close(sum(alone), loss, rtol=1e-4, atol=1e-4)


# Alg. 3 l.4; Alg. 3 l.7
def test_teacher_forcing_starts_at_the_base_and_lowers_the_loss(toy_model):
    """φ is a new adapter of the shape that was asked for, which says what the base says;
    every step makes z likelier."""
    model, tokenizer = toy_model
    pairs = [([5, 6, 7, 8], [9, 10, 1]), ([11], [12, 13, 14, 15, 1]), ([16, 17], [1])]
    bare = z_loss(model, pairs).item() / 9
    config = RewardConfig(lora_r=4, lora_alpha=12, lora_targets="q_proj,v_proj",
                          learning_rate=1e-3, batch_size=3, micro_batch_size=2, epochs=4)
    losses = fit_adapter(model, pairs, "reward", config)
    assert (len(losses) == 4 and losses[0] == pytest.approx(bare, rel=1e-5)
            and losses == sorted(losses)[::-1])
    assert (losses[-1] < bare - 1e-3
            and {min(p.shape) for p in lora_parameters(model, "reward")} == {4})
    assert model.model.layers[0].self_attn.q_proj.scaling == {"reward": 12 / 4}


def feedback_row(response, good, poor, unmatched=(), prompt="Summarise.",
                 critique="Some of it is right."):
    """A row of feedback.jsonl, as far as `encode_rows` reads it."""
    return {"prompt": prompt, "response": response, "critique": critique,
            "good_spans": good, "poor_spans": poor, "unmatched": list(unmatched)}


def test_encode_rows_leaves_out_quotes_that_are_not_there(toy_model):
    """§3.4, Appendix L: z is the critique, the grounded span JSON and one EOS;
    x is the prompt that R_φ will see."""
    _, tokenizer = toy_model
    row = feedback_row("the cat sat", ["cat", "dog"], ["horse", "sat"], ["dog", "horse"])
    kept, [(x, z)] = encode_rows([row], tokenizer, 10**6)
    assert (kept == [row]
            and x == encode_prompt(tokenizer, reward_prompt("Summarise.", "the cat sat")))
    assert z[-1] == tokenizer.eos_token_id and z.count(tokenizer.eos_token_id) == 1
    read = parse_feedback(tokenizer.decode(z[:-1]))
    assert ((read.critique, read.good_spans, read.poor_spans)
            == ("Some of it is right.", ["cat"], ["sat"]))


def test_encode_rows_keeps_a_quote_that_was_repeated_once_too_often(toy_model):
    """What `ground` found stays in z: of two quotes of the one cat,
    the first is found and only the second is not."""
    _, tokenizer = toy_model
    given = Feedback("Some of it is right.", ["cat", "cat"], [])
    found = ground("the cat sat", given)
    assert (found.spans, found.unmatched) == ([Span(4, 7, 1)], ["cat"])
    row = feedback_row("the cat sat", given.good_spans, given.poor_spans, found.unmatched)
    _, [(_, z)] = encode_rows([row], tokenizer, 10**6)
    assert parse_feedback(tokenizer.decode(z[:-1])).good_spans == ["cat"]


def test_encode_rows_leaves_out_rows_that_are_too_long(toy_model):
    """Rows of up to max_tokens tokens, EOS included, stay beside their pairs;
    longer ones go whole, never cut."""
    _, tokenizer = toy_model
    rows = [feedback_row("the cat sat " * n, [], []) for n in (1, 9, 3, 9)]
    lengths = [len(x) + len(z) for x, z in encode_rows(rows, tokenizer, 10**6)[1]]
    kept, pairs = encode_rows(rows, tokenizer, lengths[2])
    assert (kept == [rows[0], rows[2]]
            and [len(x) + len(z) for x, z in pairs] == [lengths[0], lengths[2]])
    assert encode_rows(rows, tokenizer, lengths[2] - 1)[0] == rows[:1]
    assert encode_rows(rows, tokenizer, min(lengths) - 1) == ([], [])


@many
@given(st.integers(1, 60), st.integers(0, 8), seeds)
def test_split_rows_keeps_a_prompt_on_one_side(n, held_out, seed):
    """No prompt is both trained on and judged by; no row is lost;
    at most a tenth is held out."""
    rows = [{"prompt": f"prompt {i % n}", "response": f"response {i}"} for i in range(2 * n)]
    train, held = split_rows(rows, held_out, seed)
    assert not {r["prompt"] for r in train} & {r["prompt"] for r in held}
    assert sorted(map(json.dumps, train + held)) == sorted(map(json.dumps, rows))
    assert len(held) == 2 * min(held_out, n // 10)
    assert (train, held) == split_rows(rows, held_out, seed)
    drawn = [json.dumps(split_rows(rows, 8, seed)[1]) for seed in range(9)]
    assert n < 20 or len(set(drawn)) > 1, "another seed holds out other prompts"


# ── Alg. 4 l.13: what a critique is worth

TEXT = "the cat saw the dog run"
WORDS = [(0, 3), (4, 7), (8, 11), (12, 15), (16, 19), (20, 23), (23, 23)]  # the last one is EOS


@pytest.mark.parametrize("critique", [
    "The cat is right.", '{"good_spans": ["cat"], "poor_spans": []}',
    'Right.\n{"good_spans": ["cat"], "poor_spans": [',
    'Right.\n{"good_spans": "cat", "poor_spans": []}', 'Right.\n{"good_spans": ["cat"]}',
    'Right.\n{"good_spans": [1], "poor_spans": []}'])
def test_an_unreadable_critique_rewards_nothing_and_says_why(critique):
    """Invariant 2: zeros for every token, with the parser's own reason."""
    with pytest.raises(FeedbackError) as error:
        parse_feedback(critique)
    verdict = judge(critique, TEXT, WORDS)
    assert verdict.delta == [0.0] * 7 and verdict.reason == str(error.value) != ""
    assert ((verdict.quotes, verdict.unmatched, verdict.ambiguous, verdict.conflicts)
            == (0, 0, 0, 0))


def test_no_critique_rewards_nothing_and_says_why():
    """Invariant 2: R_φ writes "" for an empty response;
    that is counted as unreadable, not as neutral."""
    assert judge("", "", [(0, 0)]).delta == [0.0] and judge("", TEXT, WORDS).delta == [0.0] * 7
    assert "no critique" in judge("", TEXT, WORDS).reason


def test_a_readable_critique_gives_the_delta_of_its_spans():  # Alg. 4 l.13
    """§3.3: +1 on a good span's tokens, −1 on a poor one's, 0 elsewhere and on EOS."""
    critique = ('The cat is right, the run is not.\n'
                '{"good_spans": ["cat saw"], "poor_spans": ["run"]}')
    verdict = judge(critique, TEXT, WORDS)
    assert (verdict.delta == [0, 1, 1, 0, 0, -1, 0]
            == token_rewards(TEXT, WORDS, [Span(4, 11, 1), Span(20, 23, -1)]))
    assert (verdict.critique, verdict.reason, verdict.quotes) == (critique, "", 2)


def test_g_nl_of_a_critique_is_what_ppo_follows_at_first():  # Eq. §3.5 g_NL
    """§3.5: with δ of what R_φ wrote, −∂ loss / ∂ log π(y_t) is δ_t;
    PPO with A_t = δ_t has it over T at θ_old."""
    verdict = judge('Mixed.\n{"good_spans": ["cat saw"], "poor_spans": ["run"]}', TEXT, WORDS)
    delta, mask = torch.tensor([verdict.delta], dtype=torch.float64), torch.ones(1, 7)
    logprobs = noise(0, 1, 7).requires_grad_()
    g_nl = -torch.autograd.grad(nl_gradient_loss(logprobs, delta, mask), logprobs)[0]
    assert g_nl.tolist() == [[0, 1, 1, 0, 0, -1, 0]]
    close(-7 * torch.autograd.grad(
        ppo_loss(logprobs, logprobs.detach().clone(), delta, mask, 0.2), logprobs)[0], g_nl)


def test_unmatched_ambiguous_and_conflicting_quotes_reward_nothing_and_are_counted():
    """Invariant 2: "horse" is not there, "the" stands twice, "dog" is both good and poor."""
    spans = {"good_spans": ["cat", "the", "horse", "dog"], "poor_spans": ["the dog", "run"]}
    verdict = judge("Mixed.\n" + json.dumps(spans), TEXT, WORDS)
    assert verdict.delta == [0, 1, 0, -1, 0, -1, 0] and verdict.reason == ""
    assert ((verdict.quotes, verdict.unmatched, verdict.ambiguous, verdict.conflicts)
            == (6, 1, 1, 1))


# ── Algorithm 4, around the update

@pytest.mark.parametrize("schedule, oracle", [
    ("linear", lambda o, n: torch.optim.lr_scheduler.LinearLR(o, 1.0, 0.0, n)),
    ("cosine", lambda o, n: torch.optim.lr_scheduler.CosineAnnealingLR(o, n))])
def test_learning_rate_is_torchs_schedule(schedule, oracle):
    """From the peak at iteration 0 to exactly zero after the last, half-way at a half;
    every step against torch."""
    config = Config(schedule=schedule, iterations=10)
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=3e-4)
    scheduler, expected = oracle(optimizer, 10), []
    for _ in range(11):
        expected.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    assert ([3e-4 * decay(config, i) for i in range(11)]
            == pytest.approx(expected, rel=1e-6, abs=1e-12))
    assert (decay(config, 0), decay(config, 5)) == (1.0, pytest.approx(0.5))


@pytest.mark.parametrize("batch", [1, 4, 10, 25])
def test_every_prompt_is_drawn_once_per_pass(batch):  # Alg. 4 l.9–10
    """Alg. 4 l.10: passes over all prompts, each in an order of its own,
    also where batches straddle them."""
    prompts, config = [f"p{i}" for i in range(10)], Config(batch_size=batch)
    walk = [p for i in range(50 // batch) for p in batch_rows(prompts, config, i)]
    passes = [walk[i : i + 10] for i in range(0, len(walk) - 9, 10)]
    assert len(passes) >= 4 and all(sorted(p) == prompts for p in passes)
    assert (len({tuple(p) for p in passes}) == len(passes)
            and tuple(prompts) not in map(tuple, passes))


def test_drawn_prompts_are_a_function_of_seed_and_iteration():
    """Any order of calls, any state of the global generator: the same prompts;
    another seed, other prompts."""
    prompts = [f"p{i}" for i in range(10)]
    draw = lambda seed, i: batch_rows(prompts, Config(batch_size=4, seed=seed), i)
    forward = [draw(0, i) for i in range(8)]
    random.seed(99)
    assert [draw(0, i) for i in reversed(range(8))] == forward[::-1]
    assert [draw(1, i) for i in range(8)] != forward


# ── Algorithm 4, l.8–13: rollouts and their δ

def test_delta_stands_at_its_own_token():
    """Alg. 4 l.13: δ'_t of each row at column t, none on padding;
    a list of another length is refused."""
    batch = random_rollouts()
    lengths = batch.mask.sum(1).tolist()
    judged = [Judgement("", [float(10 * row + t) for t in range(n)])
              for row, n in enumerate(lengths)]
    add_feedback(batch, judged)
    for row, n in enumerate(lengths):
        assert batch.delta[row, :n].tolist() == judged[row].delta
        assert not batch.delta[row, n:].any()
    judged[2].delta.append(0.0)
    with pytest.raises(AssertionError, match="Alg. 4 l.13"):
        add_feedback(batch, judged)
