"""Algorithm 4: the policy learns from the token rewards that R_φ's critiques give (§3.5).

    train(model, tokenizer, rows, PolicyConfig(), Path("runs/policy"))   # as text2grad.py does

    for each iteration:                                              function           line
        y ~ π_θold(·|x)                                              sample_rollouts    8–11
        z' ~ R_φ(·|x, y), and δ'_t from the spans of z'              critic             12–13
        log π_θold, log π_ref and V_ψ of each y_t                    add_scores         7
        r_t = δ'_t − β log(π_θold(y_t) / π_ref(y_t)), A_t by GAE     add_advantages     14–17
        for each epoch and minibatch:                                ppo_update         19–32
            ρ_t = π_θ(y_t) / π_θold(y_t)
            θ, ψ ← AdamW on −L_CLIP − β_H H + c_V L_VF               minibatch_loss     21–30

Start with `train`. The functions above it are its steps, in order; the functions below it only
measure and log. `critic` is the function that criticises the rollouts: R_φ, or another one that
`train` is given. It is not the critic of actor–critic, which is V_ψ, here called value head.
c_V is the weight of the value loss. β_H is the weight of the entropy, which the paper calls β;
here β is the KL coefficient.

Departures. "Release" is the code that the authors published.

    entropy     the loss is −L_CLIP − β_H H; to maximise the paper's L_CLIP − β H lowers H
    GAE         the sum ends at T − t, not at T − t − 1; V is 0 after the last token
    δ_t         the paper has two: `delta`, of the critique, and `td_error`, of GAE
    sampling    all π are at the sampling temperature, and R_φ writes z' greedily
    KL          of the sampled token; the release pays the exact KL_t of all tokens, which is
                the same for every y_t and so gives no gradient at y_t
    release     A_t is whitened (there in each process, here over all), the target of V is
                A_t + V_t, the value loss is halved and clipped, β adapts to a target KL, one
                optimizer with one gradient clip steps θ and ψ, and a step whose mean ρ_t is
                above 10 is skipped; for SLF5K it has Adafactor and no gradient clip
    ours        a step whose loss or gradient is not finite is skipped, too

Shapes: B rows, P prompt tokens (padded left), T response tokens (padded right), N sampled
tokens of some rows, H hidden size. Each rank samples, judges and trains on the rows
[RANK::WORLD_SIZE], and every rank holds the full batch. A random draw depends only on the seed,
the iteration and the position in the batch. On a CPU, an interrupted run that continues ends
with bit-identical weights. A GPU does not guarantee this.
"""

import importlib
import math
import random
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor

from annotate import token_offsets
from data import InputError, append_row, chunks, get_task, prompt_text
from model import (ValueHead, encode_prompt, eos_ids, gathered, lora_parameters,
                   response_hidden, save_lora, use_lora)
from report import colour_tokens, split_text
from reward_model import Judgement, read_judgement, write_critiques
from runtime import (RANK, WORLD_SIZE, Timer, all_sum, checkpointed, gather_rows,
                     optimizer_parameters, print_rank0, save_tensors, token_groups)
from sampling import generate, head_weight, pad_batch, token_entropy, token_logprobs
from settings import PolicyConfig


# ── The equations

def nl_gradient_loss(logprobs: Tensor, delta: Tensor, mask: Tensor) -> Tensor:
    """Surrogate loss; its negative gradient is g_NL = Σ_t δ_t ∇_θ log π_θ(y_t | x, y_<t).

    Definition 1 (§3.1), §3.5. All arguments are [B, T]; the loss is a scalar, averaged over the
    batch. This is the NL gradient alone: `train` does not call it, because PPO has A_t in the
    place of δ_t. Tests, notebooks and experiments/ use it.
    """
    assert delta.shape == logprobs.shape == mask.shape, "Definition 1: one δ_t per log π(y_t)"
    return -(delta * logprobs * mask).sum() / len(logprobs)


def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float):
    """A_t = Σ_l (γλ)^l td_error_{t+l},  td_error_t = r_t + γ V_{t+1} − V_t   (§3.5, App. A)

    [B, T] each → (advantages, returns = A + V), 0 in the padding. V after the last token is 0;
    λ = 1 gives Alg. 4 l.16's first form, Σ_k γ^{k−t} r_k − V. With V = 0 and no KL, A_t is the
    sum Σ_k (γλ)^{k−t} δ_k of §3.6.
    """
    assert rewards.shape == values.shape == mask.shape, "§3.5 GAE: one r_t and V per token"
    advantages = torch.zeros_like(rewards)
    next_value = next_advantage = torch.zeros_like(rewards[:, 0])
    for t in reversed(range(rewards.shape[1])):
        td_error = rewards[:, t] + gamma * next_value - values[:, t]            # l.15–16
        next_advantage = (td_error + gamma * lam * next_advantage) * mask[:, t]
        next_value = values[:, t] * mask[:, t]
        advantages[:, t] = next_advantage
    return advantages, (advantages + values) * mask


def whiten(x: Tensor, mask: Tensor) -> Tensor:
    """Scale to mean 0 and variance 1 over the mask, as the release does in each process.

    [B, T] → [B, T]
    """
    wide = x.double()                 # float32 would leave rounding error over a tiny spread
    count = mask.sum()
    mean = (wide * mask).sum() / count
    variance = ((wide - mean) ** 2 * mask).sum() / count
    white = (wide - mean) * torch.rsqrt(variance + 1e-8) * mask
    # "not >" lets NaN pass: `ppo_update` skips and counts such a step.
    assert not (white.sum() / count).abs() > 1e-6, "whitened advantages have mean 0"
    return white.to(x.dtype)


def ppo_loss(logprobs, logprobs_old, advantages, mask, clip: float, count=None) -> Tensor:
    """−E_t[min(ρ_t A_t, clip(ρ_t, 1−ε, 1+ε) A_t)],  ρ_t = π_θ(y_t)/π_θold(y_t)   (§3.5)

    Any shape → scalar (Alg. 4 l.21–23, 27). count: tokens to average over; default mask.sum().
    """
    assert logprobs.shape == logprobs_old.shape == advantages.shape, "§3.5: one A_t per ρ_t"
    ratio = torch.exp((logprobs - logprobs_old) * mask)                         # l.21–22
    # l.23
    gain = torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)
    return -(gain * mask).sum() / (mask.sum() if count is None else count)


def value_loss(values, values_old, returns, mask, clip: float, count=None) -> Tensor:
    """½ E_t[max((V − R)², (clip(V, V_old ± clip) − R)²)]   (Alg. 4 l.24, 28; the release clips)

    Any shape → scalar; count as in `ppo_loss`.
    """
    assert values.shape == values_old.shape == returns.shape, "Alg. 4 l.24: one R_t per V"
    clipped = torch.clamp(values, values_old - clip, values_old + clip)
    error = torch.maximum((values - returns) ** 2, (clipped - returns) ** 2)            # l.24
    return 0.5 * (error * mask).sum() / (mask.sum() if count is None else count)


def adapt_beta(beta: float, kl: float, n: int, target: float, horizon: int) -> float:
    """β after a batch of n rollouts, adapted to a target KL (Ziegler et al. 2019, §2.2).

    kl: mean KL per response of the batch in nats. target: in nats; 0 keeps β. horizon: number
    of rollouts over which β adapts. β changes by at most 20 %, even if n is larger.
    """
    if target and math.isfinite(kl):
        error = min(max(kl / target - 1, -0.2), 0.2)
        beta *= 1 + error * min(1, n / horizon)
    assert beta >= 0, "Alg. 4 l.14: the KL term is a penalty"
    return beta


# ── A batch of rollouts (Alg. 4 l.8–18)

@dataclass
class Rollouts:
    """ℬ. Tensors are [B, T], right-padded, unless said otherwise; log-probs are in nats."""
    rows: list[dict]
    prompts: list[str]
    texts: list[str]
    offsets: list[list[tuple[int, int]]]  # characters [start, end) of each token in its text
    prompt_ids: Tensor                    # x, [B, P], left-padded
    prompt_mask: Tensor                   # [B, P]
    response_ids: Tensor                  # y
    mask: Tensor                          # 1 on sampled tokens, EOS included
    feedback: list[Judgement] = None
    delta: Tensor = None              # δ'_t
    logprobs_old: Tensor = None       # log π_θold(y_t)
    entropy: Tensor = None            # H(π_θold(·|x, y_<t))
    logprobs_ref: Tensor = None       # log π_ref(y_t)
    values: Tensor = None             # V_ψ(x, y_<t)
    rewards: Tensor = None            # r_t = δ'_t + r_t^KL
    advantages: Tensor = None         # A_t, whitened
    returns: Tensor = None            # targets of V
    truncated: list[bool] = None      # no EOS within max_new_tokens

    def sampled(self, index) -> Tensor:
        """Whether each column of these rows holds a sampled token, [len(index), T]."""
        return self.mask[index].bool()

    def groups(self, index, config: PolicyConfig) -> list[list[int]]:
        """Rows by the length of x and y, in groups for the ranks; see `token_groups`."""
        lengths = (self.prompt_mask.sum(1) + self.mask.sum(1)).tolist()
        return token_groups(index, lengths, config.micro_batch_tokens)


def batch_rows(rows: list, config: PolicyConfig, iteration: int) -> list:
    """The rows of an iteration. Each epoch visits all rows once, in a new random order.

    A row is repeated --responses_per_prompt times.
    """
    n = len(rows)
    prompts = config.batch_size // config.responses_per_prompt
    start = iteration * prompts
    order = []                                      # of the epochs that this iteration is in
    for epoch in range(start // n, (start + prompts - 1) // n + 1):
        order += random.Random(f"{config.seed}-{epoch}").sample(rows, n)
    iteration_rows = order[start % n :][:prompts]
    return [row for row in iteration_rows for _ in range(config.responses_per_prompt)]


def sample_rollouts(model, tokenizer, rows, config: PolicyConfig, adapter,
                    generator) -> Rollouts:
    """y ~ π(·|x) for every row (Alg. 4 l.8–11). The critic reads the texts only."""
    prompts = [get_task(config.task).policy_prompt(row) for row in rows]
    prompt_ids = [encode_prompt(tokenizer, prompt) for prompt in prompts]
    prompts = [prompt_text(prompt) for prompt in prompts]
    uniforms = torch.rand(len(rows), config.max_new_tokens, generator=generator)
    eos = eos_ids(tokenizer, model)
    with use_lora(model, adapter, merge=True):
        ids = generate(model, prompt_ids[RANK::WORLD_SIZE], config.max_new_tokens,       # l.11
                       config.temperature, eos, uniforms[RANK::WORLD_SIZE],
                       config.rollout_batch_size)
    ids = gather_rows(ids)
    truncated = [y[-1] not in eos for y in ids]
    assert all(len(y) == config.max_new_tokens for y, cut in zip(ids, truncated) if cut), \
        "Alg. 4 l.11: y ends with its EOS, or is cut off"
    texts, offsets = zip(*(token_offsets(tokenizer, y) for y in ids))
    padded = pad_batch(prompt_ids, ids, model.device)
    return Rollouts(rows, prompts, list(texts), list(offsets), *padded,                  # l.8
                    truncated=truncated)


def reward_model_critic(rollouts: Rollouts, model, tokenizer, config) -> list[Judgement]:
    """z' ~ R_φ(·|x, y) and its δ' (Alg. 4 l.12–13) for this rank's rows: the paper's critic.

    `train` and `evaluate` accept any such function; experiments/designs.py has others.
    """
    task = get_task(config.task)
    share = slice(RANK, None, WORLD_SIZE)
    texts = rollouts.texts[share]
    critiques = write_critiques(model, tokenizer, rollouts.prompts[share], texts,        # l.12
                                config.max_critique_tokens,
                                batch_size=config.rollout_batch_size)
    return [read_judgement(z, text, offsets, task)                                       # l.13
            for z, text, offsets in zip(critiques, texts, rollouts.offsets[share])]


def add_feedback(rollouts: Rollouts, judgements: list[Judgement]):
    """Gather the judgements of all ranks, and their δ' as one tensor (Alg. 4 l.13)."""
    rollouts.feedback = gather_rows(judgements)
    rollouts.delta = torch.zeros_like(rollouts.mask, dtype=torch.float32)
    assert len(rollouts.feedback) == len(rollouts.rows), "Alg. 4 l.12: one z' for each y"
    for row, judgement in enumerate(rollouts.feedback):
        n = int(rollouts.mask[row].sum())
        assert len(judgement.delta) == n, \
            "Alg. 4 l.13: one δ'_t per sampled token, EOS included"
        rollouts.delta[row, :n] = torch.tensor(judgement.delta)


@torch.no_grad()
def add_scores(rollouts: Rollouts, model, value_head, config: PolicyConfig):
    """log π_θold, H, log π_ref and V_ψ (Alg. 4 l.7, 14, 16), from the training forward pass.

    The update needs only the log-probs of π_θold, so its weights are not copied (l.7).
    """
    weight = head_weight(model)
    scores = torch.zeros(4, *rollouts.mask.shape, device=model.device)
    for group in rollouts.groups(range(len(rollouts.rows)), config):
        index = group[RANK::WORLD_SIZE]
        if not index:
            continue
        hidden, targets = forward(model, rollouts, index, "policy")
        hidden_ref, _ = forward(model, rollouts, index, config.reference)
        logprobs = token_logprobs(hidden, weight, targets, config.temperature)           # l.7
        entropy = token_entropy(hidden, weight, config.temperature)
        logprobs_ref = token_logprobs(hidden_ref, weight, targets, config.temperature)
        values = value_head(hidden)
        sampled = rollouts.sampled(index)
        part = torch.zeros(4, *sampled.shape, device=model.device)
        part[:, sampled] = torch.stack([logprobs, entropy, logprobs_ref, values])
        scores[:, index] = part
    (rollouts.logprobs_old, rollouts.entropy,
     rollouts.logprobs_ref, rollouts.values) = all_sum(scores)


def forward(model, rollouts: Rollouts, index, adapter: str | None) -> tuple[Tensor, Tensor]:
    """The N sampled tokens of some rows, [N], and the hidden states that predict them, [N, H].

    The hidden states come first. index: the row numbers, a list.
    """
    sampled = rollouts.sampled(index)
    response_ids = rollouts.response_ids[index]
    with use_lora(model, adapter):
        hidden = response_hidden(model, rollouts.prompt_ids[index], rollouts.prompt_mask[index],
                                 response_ids, rollouts.mask[index])
    return hidden[sampled], response_ids[sampled]


def add_advantages(rollouts: Rollouts, beta: float, config: PolicyConfig):
    """r_t = δ'_t + r_t^KL, A_t by GAE, whitened, and the value targets (Alg. 4 l.14–17, 24).

    r_t^KL = −β (log π(y_t) − log π_ref(y_t)), of the sampled token (see the top of this file).
    """
    mask = rollouts.mask
    values = rollouts.values
    kl = rollouts.logprobs_old - rollouts.logprobs_ref
    rewards = (rollouts.delta - beta * kl) * mask                                        # l.14
    rollouts.rewards = rewards
    advantages, rollouts.returns = gae(rewards, values, mask, config.gamma, config.lam)  # l.17
    if config.value_target == "return":     # l.24: Σ_k γ^{k−t} r_k, as GAE with λ = 1 and V = 0
        no_values = torch.zeros_like(values)
        rollouts.returns, _ = gae(rewards, no_values, mask, config.gamma, 1.0)
    last = mask.sum(1, keepdim=True).long() - 1                                     # [B, 1]
    errors = (advantages + values - rewards).gather(1, last).abs()
    assert not errors.max() > 1e-4, "§3.5, V = 0 after y: A_T = r_T − V"      # NaN passes
    rollouts.advantages = whiten(advantages, mask)


# ── The update (Alg. 4 l.19–32)

MAX_GRAD_NORM = 1.0
MAX_RATIO = 10          # a step is skipped if the mean ρ_t of its minibatch is larger


def ppo_update(rollouts: Rollouts, model, value_head, optimizer, config: PolicyConfig,
               rng) -> dict:
    """ppo_epochs passes over the batch in minibatches (Alg. 4 l.19–32) → means over the steps.

    Losses are divided by the token count of the whole minibatch, so neither micro-batches nor
    ranks change the update. A step is skipped and counted if its loss or gradient is not
    finite, or if its mean ρ_t is above MAX_RATIO. Raises InputError if all are skipped.
    """
    assert rollouts.advantages.shape == rollouts.returns.shape == rollouts.mask.shape, \
        "Alg. 4 l.17: one A_t, R_t per token"
    parameters = optimizer_parameters(optimizer)
    steps = []
    skipped = 0
    model.train()                                  # for --activation_checkpointing
    for _ in range(config.ppo_epochs):                                                # l.19
        order = rng.sample(range(len(rollouts.rows)), len(rollouts.rows))
        for minibatch in chunks(order, config.minibatch_size):                        # l.20
            stats = add_gradients(rollouts, minibatch, model, value_head, parameters, config)
            norm = torch.nn.utils.clip_grad_norm_(parameters, MAX_GRAD_NORM)
            stats["grad_norm"] = norm.item()
            if all(map(math.isfinite, stats.values())) and stats["ratio"] <= MAX_RATIO:
                # ρ may differ from 1 after the first step, or because half precision rounds.
                may_differ = steps or skipped or model.dtype != torch.float32
                assert may_differ or abs(stats["ratio"] - 1) < 0.1, \
                    "Alg. 4 l.22: ρ = 1 until θ moves"
                optimizer.step()                                                   # l.29–30
                steps.append(stats)
            else:
                skipped += 1
            optimizer.zero_grad()
    model.eval()
    if not steps:
        raise InputError(f"all optimizer steps of an iteration were skipped: not finite, or "
                         f"with a mean ratio above {MAX_RATIO} (the last: {stats}); lower "
                         f"--learning_rate")
    means = {key: sum(step[key] for step in steps) / len(steps) for key in stats}
    return means | {"skipped_steps": skipped}


def add_gradients(rollouts: Rollouts, minibatch: list[int], model, value_head, parameters,
                  config: PolicyConfig) -> dict[str, float]:
    """Accumulate the gradients of a minibatch over all ranks (Alg. 4 l.21–28) → metrics."""
    count = rollouts.mask[minibatch].sum()
    totals = []
    for group in rollouts.groups(minibatch, config):
        index = group[RANK::WORLD_SIZE]
        with use_lora(model, "policy"):    # --activation_checkpointing: also while backward
            loss, stats = minibatch_loss(rollouts, index, model, value_head, config, count)
            loss.backward()
        totals.append(torch.stack(list(stats.values())).detach())
    for p in parameters:
        all_sum(p.grad)
    return dict(zip(stats, all_sum(sum(totals)).tolist()))


def minibatch_loss(rollouts: Rollouts, index, model, value_head, config: PolicyConfig, count):
    """The loss −L_CLIP − β_H H + c_V L_VF of some rows, and metrics (Alg. 4 l.21–28).

    Both are sums over the N sampled tokens of these rows, divided by `count`.
    """
    hidden, targets = forward(model, rollouts, index, "policy")
    weight = head_weight(model)
    sampled = rollouts.sampled(index)                              # picks N of [rows, T] tokens
    logprobs_old = rollouts.logprobs_old[index][sampled]
    advantages = rollouts.advantages[index][sampled]
    values_old = rollouts.values[index][sampled]
    returns = rollouts.returns[index][sampled]
    logprobs = token_logprobs(hidden, weight, targets, config.temperature)
    mask = torch.ones_like(logprobs)              # the padding is not among the N tokens
    values = value_head(hidden.detach())          # the value loss does not move the policy
    policy = ppo_loss(logprobs, logprobs_old, advantages, mask, config.clip, count)
    value = value_loss(values, values_old, returns, mask, config.value_clip, count)      # l.28
    loss = policy + config.value_coef * value
    if config.entropy_coef:
        entropy = token_entropy(hidden, weight, config.temperature)                      # l.25
        loss = loss - config.entropy_coef * entropy.sum() / count                        # l.27
    with torch.no_grad():
        log_ratio = logprobs - logprobs_old
        ratio = log_ratio.exp()
        stats = {
            "policy_loss": policy, "value_loss": value, "ratio": ratio.sum() / count,
            "policy_kl": (ratio - 1 - log_ratio).sum() / count,      # estimates KL(π_old ‖ π)
            "clip_fraction": ((ratio - 1).abs() > config.clip).sum() / count,
        }
    return loss, stats


# ── Algorithm 4

def set_learning_rates(optimizer, config: PolicyConfig, iteration: int):
    """Set the rates of θ and ψ, which fall from their peaks to 0 (Appendix D.2)."""
    factor = 1 - iteration / config.iterations
    if config.schedule == "cosine":
        factor = 0.5 * (1 - math.cos(math.pi * factor))
    theta, psi = optimizer.param_groups
    theta["lr"] = config.learning_rate * factor
    psi["lr"] = config.learning_rate * config.value_rate_factor * factor


def train(model, tokenizer, rows, config: PolicyConfig, out: Path, critic=reward_model_critic,
          advantages=add_advantages):
    """Algorithm 4: the adapter "policy" learns from the critic's judgements of its rollouts.

    critic(rollouts, model, tokenizer, config) → a Judgement of each row of this rank's share.
    advantages(rollouts, beta, config) fills rewards, advantages and returns, and may return
    further metrics. Writes policy/, value_head.safetensors, metrics, samples and a checkpoint
    after each iteration to `out`, and continues from the newest checkpoint there.
    """
    value_head = ValueHead(model.config.hidden_size, model.device)                     # l.5
    groups = [{"params": lora_parameters(model, "policy")}, {"params": value_head.parameters()}]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.0, fused=True)
    state = {"beta": config.kl_coef}
    for iteration in checkpointed(config.iterations, optimizer, state, out, "policy"):  # l.6
        seed = config.seed * 1_000_003 + iteration
        generator = torch.Generator().manual_seed(seed)
        rng = random.Random(seed)
        timer = Timer()
        set_learning_rates(optimizer, config, iteration)
        with gathered(model):                  # with --shard, each rank holds all weights here
            drawn_rows = batch_rows(rows, config, iteration)                         # l.9–10
            batch = sample_rollouts(model, tokenizer, drawn_rows, config, "policy", generator)
            timer.lap("rollout")
            add_feedback(batch, critic(batch, model, tokenizer, config))            # l.12–13
            timer.lap("critique")
            add_scores(batch, model, value_head, config)                                # l.7
            counts = advantages(batch, state["beta"], config) or {}                # l.14–17
            timer.lap("score")
        stats = ppo_update(batch, model, value_head, optimizer, config, rng)        # l.19–32
        timer.lap("update")
        metrics = {"iteration": iteration + 1, "kl_coef": state["beta"],
                   "kl_target": config.kl_target} | batch_metrics(
            batch, get_task(config.task)) | counts | stats | timer
        if RANK == 0:
            log_iteration(metrics, batch, config, out)
        state["beta"] = adapt_beta(state["beta"], metrics["kl"], config.batch_size,
                                   config.kl_target, config.kl_horizon)
    if RANK == 0:
        save_lora(model, "policy", out / "policy")                                     # l.33
        save_tensors(out / "value_head.safetensors", value_head.state_dict(), {})


# ── What is measured and logged

def score_response(judgement: Judgement, is_truncated: bool) -> dict[str, float]:
    """The metrics of one response that its judgement gives; shares are of its tokens."""
    delta = judgement.delta
    tokens = max(1, len(delta))
    return {"delta": sum(delta) / tokens, "good": sum(d > 0 for d in delta) / tokens,
            "poor": sum(d < 0 for d in delta) / tokens, "response_tokens": len(delta),
            "truncated": float(is_truncated),
            "unparseable": float(bool(judgement.reason)),
            "conflicting": judgement.conflicts / tokens}


def response_scores(rollouts: Rollouts, task) -> list[dict[str, float]]:
    """The metrics of each response, task.truth first; curves and tables show their means."""
    scores = []
    for row, text, judgement, is_truncated in zip(
            rollouts.rows, rollouts.texts, rollouts.feedback, rollouts.truncated):
        truth = {name: float(measure(row, text)) for name, measure in task.truth.items()}
        scores.append(truth | score_response(judgement, is_truncated))
    return scores


def mean_scores(scores: list[dict], judgements: list[Judgement]) -> dict[str, float]:
    """The means of `response_scores`, and the shares of quotes whose place is unknown."""
    means = {name: fmean(score[name] for score in scores) for name in scores[0]}
    quotes = max(1, sum(judgement.quotes for judgement in judgements))
    return means | {
        "unmatched": sum(judgement.unmatched for judgement in judgements) / quotes,
        "ambiguous": sum(judgement.ambiguous for judgement in judgements) / quotes}


def batch_metrics(rollouts: Rollouts, task) -> dict[str, float]:
    """The means of the scores, and metrics of the policy; report.NOTES explains them."""
    scores = response_scores(rollouts, task)
    sampled = rollouts.mask.bool()
    kl = (rollouts.logprobs_old.double() - rollouts.logprobs_ref.double())[sampled]
    returns = rollouts.returns[sampled].double()
    errors = returns - rollouts.values[sampled].double()
    unexplained = errors.var(correction=0) / returns.var(correction=0).clamp(min=1e-12)
    return mean_scores(scores, rollouts.feedback) | {
        "kl": kl.sum().item() / len(scores),                      # nats per response
        "entropy": rollouts.entropy[sampled].double().mean().item(),
        "explained_variance": 1 - unexplained.item()}


def sample_row(rollouts: Rollouts, row: int) -> dict:
    """One rollout for the report: each token with its δ_t and, if computed, its A_t."""
    judgement = rollouts.feedback[row]
    offsets = rollouts.offsets[row]
    sample = {"prompt": rollouts.prompts[row], "response": rollouts.texts[row],
              "critique": judgement.critique, "unreadable": judgement.reason,
              "tokens": split_text(rollouts.texts[row], offsets), "delta": judgement.delta}
    if rollouts.advantages is not None:
        sample["advantage"] = rollouts.advantages[row, : len(offsets)].tolist()
    return sample


def log_iteration(metrics: dict, batch: Rollouts, config: PolicyConfig, out: Path):
    """Write an iteration's metrics and one sample; the metrics also go to --wandb."""
    iteration = metrics["iteration"]
    sample = sample_row(batch, (iteration - 1) % len(batch.rows))
    append_row(out / "metrics.jsonl", metrics)
    append_row(out / "samples.jsonl", {"iteration": iteration, **sample})
    if config.wandb:
        wandb = importlib.import_module("wandb")
        if wandb.run is None:
            wandb.init(project=config.wandb, name=out.name, config=asdict(config))
        wandb.log(metrics, step=iteration)
    if iteration % 10 == 1:
        print_rank0(f"{iteration:4d}  {colour_tokens(sample['tokens'], sample['delta'])}")
