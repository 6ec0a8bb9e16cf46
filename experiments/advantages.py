"""Advantage functions: the steps from Definition 1 to PPO's GAE, and advantages of groups.

    python -m experiments.baselines reward_to_go        # R_φ, with G_t in place of GAE
    python -m experiments.baselines grpo --responses_per_prompt 4

An advantage function fills `rewards`, `advantages` and `returns` of policy.Rollouts, and
`policy.train` accepts it. All functions here use r_t = δ_t − β log π(y_t) / π_ref(y_t), and
none uses V. ADVANTAGES maps these names to functions:

    definition_1       A_t = r_t, the weight of log π(y_t) in Definition 1 (§3.1)
    whitened_rewards   r_t, whitened over the batch
    reward_to_go       G_t = Σ_{k≥t} γ^{k−t} r_k, whitened
    decayed_to_go      the same with (γλ)^{k−t}, which is GAE with V = 0
    position_mean      G_t minus its mean over the batch at position t, whitened
    rloo               R − the mean R of the other responses to the prompt (arXiv 2402.14740)
    grpo               (R − mean R) / std R of the group (arXiv 2402.03300); the response's
                       tokens share a weight of 1, so that long responses do not count more
    dr_grpo            R − mean R, without these two normalisations (arXiv 2503.20783)
    group_tokens       G_t minus the mean G_t of the other responses, whitened

R = Σ_t r_t is the reward of a response, and a group is --responses_per_prompt responses to one
prompt. The penalty of the KL is part of the reward, as in RLOO; GRPO has it in the loss.
B responses, T tokens, K responses of a group.
"""

from functools import partial

import torch
from torch import Tensor

from policy import Rollouts, gae, whiten
from settings import Config


def to_go(rewards: Tensor, mask: Tensor, discount: float) -> Tensor:
    """G_t = Σ_{k≥t} discount^{k−t} r_k, [B, T]."""
    return gae(rewards, torch.zeros_like(rewards), mask, discount, 1.0)[0]


def without_values(advantages_of):
    """An advantage function from advantages_of(rewards, mask, config) → A_t, [B, T].

    The targets of V are V itself, so that the value loss is 0. With groups, the number of
    groups whose rewards R are all equal is a metric.
    """
    def fill(rollouts: Rollouts, beta: float, config: Config):
        mask = rollouts.mask
        kl = rollouts.logprobs_old - rollouts.logprobs_ref
        rewards = (rollouts.delta - beta * kl) * mask                               # [B, T]
        rollouts.rewards = rewards
        rollouts.advantages = advantages_of(rewards, mask, config) * mask
        rollouts.returns = rollouts.values
        K = config.responses_per_prompt
        if K == 1:
            return {}
        R = rewards.sum(1).unflatten(0, (-1, K))                                # [B / K, K]
        return {"equal_groups": int((R == R[:, :1]).all(1).sum())}
    return fill


def reward_to_go(rewards, mask, config):
    """G_t, whitened. [B, T] → [B, T]"""
    return whiten(to_go(rewards, mask, config.gamma), mask)


def decayed_to_go(rewards, mask, config):
    """GAE with V = 0, whitened. [B, T] → [B, T]"""
    return whiten(to_go(rewards, mask, config.gamma * config.lam), mask)


def position_mean(rewards, mask, config):
    """G_t minus the mean of all responses that have a token t, whitened. [B, T] → [B, T]"""
    totals = to_go(rewards, mask, config.gamma)
    means = totals.sum(0) / mask.sum(0).clamp(min=1)                                # [T]
    return whiten((totals - means) * mask, mask)


def others_mean(x: Tensor, K: int) -> Tensor:
    """The mean of x over the other members of the same group. [B, …] → [B, …]"""
    groups = x.unflatten(0, (-1, K))
    totals = groups.sum(1, keepdim=True)
    return ((totals - groups) / (K - 1)).flatten(0, 1)


def group_tokens(rewards, mask, config):
    """G_t minus the mean G_t of the group's other responses, whitened. [B, T] → [B, T]

    G_t is 0 after the end of a response.
    """
    totals = to_go(rewards, mask, config.gamma)
    baseline = others_mean(totals, config.responses_per_prompt)
    return whiten((totals - baseline) * mask, mask)


def rloo(rewards, mask, config):
    """R minus the mean R of the group's other responses, at every token. [B, T] → [B, T]"""
    R = rewards.sum(1, keepdim=True)                                                # [B, 1]
    baseline = others_mean(R, config.responses_per_prompt)
    return (R - baseline).expand_as(mask)


def grpo(rewards, mask, config, is_normalised=True):
    """R minus the group's mean R, at every token. [B, T] → [B, T]

    is_normalised: divide by the group's standard deviation, and weight the tokens of a response
    by 1 / T. Dr. GRPO does neither. Groups of equal rewards get 0.
    """
    R = rewards.sum(1).unflatten(0, (-1, config.responses_per_prompt))          # [B / K, K]
    A = R - R.mean(1, keepdim=True)
    if is_normalised:
        A = A / (R.std(1, keepdim=True, correction=0) + 1e-4)
    A = A.flatten()[:, None].expand_as(mask)
    if is_normalised:
        lengths = mask.sum(1, keepdim=True, dtype=torch.float32)
        A = A * lengths.mean() / lengths
    return A


GROUPED = {"rloo": rloo, "grpo": grpo, "dr_grpo": partial(grpo, is_normalised=False),
           "group_tokens": group_tokens}
_FUNCTIONS = {
    "definition_1": lambda rewards, mask, config: rewards,
    "whitened_rewards": lambda rewards, mask, config: whiten(rewards, mask),
    "reward_to_go": reward_to_go,
    "decayed_to_go": decayed_to_go,
    "position_mean": position_mean,
    **GROUPED}
ADVANTAGES = {name: without_values(function) for name, function in _FUNCTIONS.items()}
