"""Advantage functions without V: Definition 1, the sum of later rewards, and groups.

    python -m experiments.baselines definition_1
    python -m experiments.baselines ppo grpo --responses_per_prompt 4

`policy.train` accepts a function (rollouts, beta, config) that fills `rewards`, `advantages`
and `returns` of policy.Rollouts. All functions here use r_t = δ_t − β log(π(y_t) / π_ref(y_t)).
R = Σ_t r_t is the reward of a response. A group is --responses_per_prompt responses to one
prompt. The KL penalty is part of the reward here; the published GRPO has it in the loss.
B responses, T tokens, K responses of a group.
"""

from functools import wraps

import torch
from torch import Tensor

from policy import Rollouts, gae, whiten
from settings import Config


def without_values(advantages_of):
    """An advantage function from advantages_of(rewards, mask, config), which returns A_t.

    V starts at 0, and its targets are V itself. So the value loss is 0, and V is never trained.
    """
    @wraps(advantages_of)
    def fill(rollouts: Rollouts, beta: float, config: Config):
        mask = rollouts.mask
        kl = rollouts.logprobs_old - rollouts.logprobs_ref
        rollouts.rewards = (rollouts.delta - beta * kl) * mask                      # [B, T]
        rollouts.advantages = advantages_of(rollouts.rewards, mask, config) * mask
        rollouts.returns = rollouts.values
    return fill


def definition_1(rewards: Tensor, mask: Tensor, config) -> Tensor:  # noqa: ARG001
    """A_t = r_t: the weight δ_t of Definition 1 (§3.1), with the KL penalty"""
    return rewards                                                                  # [B, T]


def reward_to_go(rewards, mask, config):
    """A_t = Σ_{k≥t} γ^{k−t} r_k, whitened over the batch"""
    no_values = torch.zeros_like(rewards)
    totals, _ = gae(rewards, no_values, mask, config.gamma, 1.0)
    return whiten(totals, mask)


def grpo(rewards, mask, config):
    """A = (R − mean R) / std R of the group, and a weight of 1 per response (2402.03300)"""
    R = rewards.sum(1).unflatten(0, (-1, config.responses_per_prompt))             # [B / K, K]
    A = R - R.mean(1, keepdim=True)
    A = A / (A.std(1, keepdim=True, correction=0) + 1e-4)       # 0 where all R are equal
    lengths = mask.sum(1, keepdim=True, dtype=torch.float32)                        # [B, 1]
    return A.flatten()[:, None] * lengths.mean() / lengths


ADVANTAGES = {function.__name__: without_values(function)
              for function in (definition_1, reward_to_go, grpo)}
