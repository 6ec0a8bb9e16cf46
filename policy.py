"""Algorithm 4: the policy learns from the token rewards that R_φ's critiques give (§3.5).

    train(model, tokenizer, rows, config, Path("runs/policy"))           # as text2grad.py does

    for each iteration:                                              function           line
        y ~ π_θold(·|x)                                              sample_rollouts    8–11
        z' ~ R_φ(·|x, y), and δ'_t from the spans of z'              critic             12–13
        log π_θold, log π_ref and V_ψ of each y_t                    add_scores         7
        r_t = δ'_t − β log(π_θold(y_t) / π_ref(y_t)), A_t by GAE     add_advantages     14–17
        for each epoch and minibatch:                                ppo_update         19–32
            ρ_t = π_θ(y_t) / π_θold(y_t)
            θ, ψ ← AdamW on −L_CLIP − β_H H + c_V L_VF               minibatch_loss     21–30

Start with `train`, at the end. The file begins with the equations. Then come the steps of
`train`, in their order. `critic` is the function that reviews the rollouts: R_φ, the annotator,
or another function that `train` gets as argument. The critic of actor–critic methods is
something else: it is V_ψ, here called value head.
c_V is the weight of the value loss. β_H is the weight of the entropy, which the paper calls β;
here β is the KL coefficient.

Departures from the paper.

    entropy     the loss −L_CLIP − β_H H raises H; maximising the paper's L_CLIP − β H lowers it
    GAE         the sum ends at T − t, not at T − t − 1; V is 0 after the last token
    δ_t         two values have this name in the paper; here they are `delta` (from the
                critique) and `td_error` (of GAE)
    sampling    all log π are at the sampling temperature, and R_φ writes z' greedily
    KL          the penalty uses only the log-probs of the sampled token
    skipping    a step whose loss or gradient is not finite is skipped

From the release, the code that the authors published, and not in the paper:

    whitening   A_t has mean 0 and variance 1 over the batch (release: in each process)
    V's target  A_t + V_t; --value_target return is the paper's
    V's loss    halved; a V that moves far from its old value is clipped, as ρ_t is
    β           adapts to a target KL
    optimizer   one AdamW, with one gradient clip, updates θ and ψ together; for SLF5K, the
                release has Adafactor and no gradient clip
    ratio       a step whose mean ρ_t is above 10 is skipped

Not from the release:

    KL          the penalty of the release is the exact KL_t, a mean over the vocabulary. It is
                the same for every y_t that π could sample. Such a reward is only a baseline
                for y_t: its expected gradient at t is 0

Shapes: B rows, P prompt tokens (padded left), T response tokens (padded right), N sampled
tokens of some rows, H hidden size. With several GPUs, each has a process, called a rank.
`rank_share` returns the rows of a list on which this rank works, every WORLD_SIZE-th row. With
one process, these are all rows. Every rank holds the full batch. A group is a micro-batch.

A random draw depends only on the seed, the iteration and the position in the batch. On a CPU, a
run that is interrupted and continued therefore ends with exactly the weights of a run without
interruption. A GPU does not guarantee this.
"""

import math
import random
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from annotate import (Review, annotation_question, ask_annotator, ground, make_review,
                      read_critique, token_offsets)
from ask import Reply, run_journal
from data import InputError, Task, chunks, examples, get_task, prompt_text
from model import (ValueHead, encode_prompt, eos_ids, lora_parameters, response_hidden,
                   save_lora, unsharded, use_lora)
from report import batch_metrics, log_iteration
from reward_model import write_critiques
from runtime import (RANK, Timer, all_sum, checkpointed, from_rank0, gather_rows,
                     optimizer_parameters, print_rank0, rank_share, save_tensors,
                     token_groups)
from sampling import generate, head_weight, pad_batch, token_entropy, token_logprobs
from settings import PolicyConfig


# ── The equations

def nl_gradient_loss(logprobs: Tensor, delta: Tensor, mask: Tensor) -> Tensor:
    """Surrogate loss; its negative gradient is g_NL = Σ_t δ_t ∇_θ log π_θ(y_t | x, y_<t).

    Definition 1 (§3.1), §3.5. All arguments are [B, T]. The loss is a scalar, the mean over the
    batch. Tests and notebooks use it. `train` does not, because PPO uses A_t instead of δ_t.
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
    # The sum over l, from the last token to the first: A_t = td_error_t + γλ A_{t+1}
    advantages = torch.zeros_like(rewards)
    next_value = next_advantage = torch.zeros_like(rewards[:, 0])
    for t in reversed(range(rewards.shape[1])):
        td_error = rewards[:, t] + gamma * next_value - values[:, t]            # l.15–16
        next_advantage = (td_error + gamma * lam * next_advantage) * mask[:, t]
        next_value = values[:, t] * mask[:, t]
        advantages[:, t] = next_advantage
    return advantages, (advantages + values) * mask


def whiten(x: Tensor, mask: Tensor) -> Tensor:
    """Shift and scale x to mean 0 and variance 1 over all tokens in the mask.

    [B, T] → [B, T]. The release does this for the rows of each process alone.
    """
    wide = x.double()                 # float32 rounding would be large beside a tiny variance
    count = mask.sum()
    mean = (wide * mask).sum() / count
    variance = ((wide - mean) ** 2 * mask).sum() / count
    white = (wide - mean) * torch.rsqrt(variance + 1e-8) * mask
    # "not >" lets NaN pass: `ppo_update` skips and counts such a step.
    assert not (white.sum() / count).abs() > 1e-6, "whitened advantages have mean 0"
    return white.to(x.dtype)


def ppo_loss(logprobs, logprobs_old, advantages, mask, clip: float, count=None) -> Tensor:
    """−E_t[min(ρ_t A_t, clip(ρ_t, 1−ε, 1+ε) A_t)],  ρ_t = π_θ(y_t)/π_θold(y_t)   (§3.5)

    Any shape → scalar (Alg. 4 l.21–23, 27). count: divisor of the sum; default mask.sum().
    """
    assert logprobs.shape == logprobs_old.shape == advantages.shape, "§3.5: one A_t per ρ_t"
    ratio = torch.exp((logprobs - logprobs_old) * mask)                         # l.21–22
    # A_t > 0 should raise ρ_t, and A_t < 0 should lower it. Once ρ_t has moved beyond 1 ± ε in
    # this direction, the gradient is 0. If ρ_t has moved in the wrong direction, the minimum is
    # the first term, and its gradient moves ρ_t back.
    # l.23
    gain = torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)
    return -(gain * mask).sum() / (mask.sum() if count is None else count)


def value_loss(values, values_old, returns, mask, clip: float, count=None) -> Tensor:
    """½ E_t[max((V − R)², (clip(V, V_old ± clip) − R)²)]   (Alg. 4 l.24, 28; the release clips)

    Any shape → scalar; count as in `ppo_loss`.
    """
    assert values.shape == values_old.shape == returns.shape, "Alg. 4 l.24: one R_t per V"
    # If V has moved towards R by more than `clip`, and not past R, the clipped error is larger.
    # It has no gradient. If V has moved away from R, the error without clipping is larger.
    clipped = torch.clamp(values, values_old - clip, values_old + clip)
    error = torch.maximum((values - returns) ** 2, (clipped - returns) ** 2)            # l.24
    return 0.5 * (error * mask).sum() / (mask.sum() if count is None else count)


def adapt_beta(beta: float, kl: float, n: int, target: float, horizon: int) -> float:
    """β after a batch of n rollouts, adapted to a target KL (Ziegler et al. 2019, §2.2).

    kl: mean KL per response of the batch in nats. target: in nats; 0 keeps β fixed. horizon:
    number of rollouts over which β adapts. β changes by at most 20 %, even if n is larger than
    horizon. If kl is not finite, β stays as it is.
    """
    if target and math.isfinite(kl):
        error = min(max(kl / target - 1, -0.2), 0.2)
        beta *= 1 + error * min(1, n / horizon)
    assert beta >= 0, "Alg. 4 l.14: the KL term is a penalty"
    return beta


# ── A batch of rollouts (Alg. 4 l.8–18)

@dataclass
class Rollouts:
    """ℬ, the batch of an iteration. Unless noted, tensors are [B, T], padded on the right.

    Log-probs are in nats. Fields that are None at first are filled in later.
    """
    rows: list[dict]
    prompts: list[str]
    texts: list[str]
    offsets: list[list[tuple[int, int]]]  # characters [start, end) of each token in its text
    prompt_ids: Tensor                    # x, [B, P], left-padded
    prompt_mask: Tensor                   # [B, P]
    response_ids: Tensor                  # y
    mask: Tensor                          # 1 on sampled tokens, EOS included
    reviews: list[Review] = None      # one per row, also of rows that other ranks reviewed
    delta: Tensor = None              # δ'_t
    logprobs_old: Tensor = None       # log π_θold(y_t)
    entropy: Tensor = None            # H(π_θold(·|x, y_<t))
    logprobs_ref: Tensor = None       # log π_ref(y_t)
    values: Tensor = None             # V_ψ(x, y_<t)
    rewards: Tensor = None            # r_t = δ'_t + r_t^KL
    advantages: Tensor = None         # A_t, whitened
    returns: Tensor = None            # targets of V
    truncated: list[bool] = None      # no EOS within max_new_tokens
    task: Task = None                 # makes the prompts from rows, and has the metrics

    def groups(self, index, config: PolicyConfig) -> list[list[int]]:
        """Split some rows into micro-batches by the length of x and y, see `token_groups`."""
        lengths = (self.prompt_mask.sum(1) + self.mask.sum(1)).tolist()
        return token_groups(index, lengths, config.micro_batch_tokens)


def batch_rows(rows: list, config: PolicyConfig, iteration: int) -> list:
    """The rows of an iteration. Each epoch visits all rows once, in a new random order.

    A row is repeated --responses_per_prompt times.
    """
    n = len(rows)
    prompt_count = config.batch_size // config.responses_per_prompt
    start = iteration * prompt_count
    order = []                                      # of the epochs that this iteration is in
    for epoch in range(start // n, (start + prompt_count - 1) // n + 1):
        order += random.Random(f"{config.seed}-{epoch}").sample(rows, n)
    iteration_rows = order[start % n :][:prompt_count]
    return [row for row in iteration_rows for _ in range(config.responses_per_prompt)]


def sample_rollouts(model, tokenizer, rows, config: PolicyConfig, adapter,
                    generator) -> Rollouts:
    """y ~ π(·|x) for every row (Alg. 4 l.8–11). The critic reads texts, not token ids."""
    task = get_task(config.task)
    prompts = [task.policy_prompt(row) for row in rows]
    prompt_ids = [encode_prompt(tokenizer, prompt) for prompt in prompts]
    prompts = [prompt_text(prompt) for prompt in prompts]
    # All ranks draw the same numbers, one for each token, and use those of their own rows. So
    # the number of ranks and the other rows do not change the random numbers of a text.
    uniforms = torch.rand(len(rows), config.max_new_tokens, generator=generator)
    eos = eos_ids(tokenizer, model)
    with use_lora(model, adapter, merge=True):
        ids = generate(model, rank_share(prompt_ids), config.max_new_tokens,             # l.11
                       config.temperature, eos, rank_share(uniforms),
                       config.decode_batch_size)
    ids = gather_rows(ids)
    truncated = [y[-1] not in eos for y in ids]
    assert all(len(y) == config.max_new_tokens for y, cut in zip(ids, truncated) if cut), \
        "Alg. 4 l.11: y ends with its EOS, or is cut off"
    texts, offsets = zip(*(token_offsets(tokenizer, y) for y in ids))
    padded = pad_batch(prompt_ids, ids, model.device)
    return Rollouts(rows, prompts, list(texts), list(offsets), *padded,                  # l.8
                    truncated=truncated, task=task)


def reward_model_critic(rollouts: Rollouts, model, tokenizer, config) -> list[Review]:
    """z' ~ R_φ(·|x, y) and its δ' (Alg. 4 l.12–13) for this rank's rows: the paper's critic.

    `train` and `evaluate` accept any such function; experiments/designs.py has others.
    """
    texts = rank_share(rollouts.texts)
    critiques = write_critiques(model, tokenizer, rank_share(rollouts.prompts), texts,   # l.12
                                config.max_critique_tokens,
                                batch_size=config.decode_batch_size)
    return [read_critique(z, text, offsets, rollouts.task.repeats_are_poor)              # l.13
            for z, text, offsets in zip(critiques, texts, rank_share(rollouts.offsets))]


def annotator_critic(rollouts: Rollouts, model, tokenizer, config):  # noqa: ARG001
    """The annotator in the place of R_φ (--critic annotator): reviews of this rank's rows.

    Rank 0 asks about all rows, because only one process may write the journal, the file of the
    annotator's replies.
    """
    reviews = critique_by_annotator(rollouts, config) if RANK == 0 else None
    return rank_share(from_rank0(reviews))


CRITICS = {"reward_model": reward_model_critic, "annotator": annotator_critic}     # --critic


def critique_by_annotator(rollouts: Rollouts, config) -> list[Review]:
    """The annotator's reviews of all rollouts, in the place of Alg. 4 l.12–13.

    Requests use the journal (file of replies), budget and prices of phase 1. If a response is
    empty, or its reply cannot be used, its review has δ = 0 and says the reason.
    """
    task = rollouts.task
    rows = [*map(answer_row, rollouts.rows, rollouts.texts)]
    rows = with_outcomes(rows, task, config)
    questions = [annotation_question(example, task, config) for example in examples(task, rows)
                 if example["response"].strip()]
    path = Path(config.output_dir, "feedback.jsonl.journal")
    with run_journal(path, *config.prices) as journal:
        replies = iter(ask_annotator(questions, journal, task, config))
    reviews = []
    for text, offsets in zip(rollouts.texts, rollouts.offsets):
        reply = next(replies) if text.strip() else Reply("", "the response is empty")
        if reply.reason:
            reviews.append(Review(reply.text, [0.0] * len(offsets), reply.reason))
            continue
        feedback, grounding = reply.value
        # `ask_annotator` finds the quotes without repeats_are_poor. So they are found again.
        if task.repeats_are_poor:
            grounding = ground(text, feedback, repeats_are_poor=True)
        reviews.append(make_review(feedback.text(), text, offsets, feedback, grounding))
    return reviews


def answer_row(row: dict, response: str) -> dict:
    """The row with a new response, without the critique and the outcome of the old response."""
    return {name: value for name, value in row.items()
            if name not in ("critique", "feedback", "outcome")} | {"response": response}


def with_outcomes(rows: list[dict], task: Task, config) -> list[dict]:
    """Add test outcomes to the rows if the task has tests and --allow_code_execution is set."""
    if not (task.tests and config.allow_code_execution):
        return rows
    from measures.sandbox import add_outcomes
    return add_outcomes(rows, task)


def add_feedback(rollouts: Rollouts, rank_reviews: list[Review]):
    """Gather the reviews of all ranks, and their δ' as one tensor [B, T] (Alg. 4 l.13)."""
    rollouts.reviews = gather_rows(rank_reviews)
    rollouts.delta = torch.zeros_like(rollouts.mask, dtype=torch.float32)
    assert len(rollouts.reviews) == len(rollouts.rows), "Alg. 4 l.12: one z' for each y"
    for row, review in enumerate(rollouts.reviews):
        n = int(rollouts.mask[row].sum())
        assert len(review.delta) == n, \
            "Alg. 4 l.13: one δ'_t per sampled token, EOS included"
        rollouts.delta[row, :n] = torch.tensor(review.delta)


@torch.no_grad()
def add_scores(rollouts: Rollouts, model, value_head, config: PolicyConfig):
    """log π_θold, H, log π_ref and V_ψ of all y_t (Alg. 4 l.7, 14, 16).

    `forward` computes them, as in training. The update needs only the log-probs of π_θold, so
    its weights are not copied (l.7).
    """
    weight = head_weight(model)
    # Four numbers for each token: log π_θold, H, log π_ref and V_ψ. Each rank fills in its own
    # rows and leaves 0 in the others, so the sum over the ranks is the whole batch.
    scores = torch.zeros(4, *rollouts.mask.shape, device=model.device)               # [4, B, T]
    for group in rollouts.groups(range(len(rollouts.rows)), config):
        index = rank_share(group)
        if not index:
            continue
        hidden, targets = forward(model, rollouts, index, "policy")
        hidden_ref, _ = forward(model, rollouts, index, config.reference)
        logprobs = token_logprobs(hidden, weight, targets, config.temperature)           # l.7
        entropy = token_entropy(hidden, weight, config.temperature)
        logprobs_ref = token_logprobs(hidden_ref, weight, targets, config.temperature)
        values = value_head(hidden)
        # From N sampled tokens back to rows of T: the padding stays 0.
        sampled = rollouts.mask[index].bool()
        part = torch.zeros(4, *sampled.shape, device=model.device)
        part[:, sampled] = torch.stack([logprobs, entropy, logprobs_ref, values])
        scores[:, index] = part
    (rollouts.logprobs_old, rollouts.entropy,
     rollouts.logprobs_ref, rollouts.values) = all_sum(scores)


def forward(model, rollouts: Rollouts, index, adapter: str | None) -> tuple[Tensor, Tensor]:
    """(hidden states [N, H], the N sampled tokens [N] that they predict) of some rows.

    index: the row numbers, a list.
    """
    sampled = rollouts.mask[index].bool()
    response_ids = rollouts.response_ids[index]
    with use_lora(model, adapter):
        hidden = response_hidden(model, rollouts.prompt_ids[index], rollouts.prompt_mask[index],
                                 response_ids, rollouts.mask[index])
    return hidden[sampled], response_ids[sampled]


def add_advantages(rollouts: Rollouts, beta: float, config: PolicyConfig):
    """r_t = δ'_t + r_t^KL, A_t by GAE, whitened, and the value targets (Alg. 4 l.14–17, 24).

    r_t^KL = −β (log π(y_t) − log π_ref(y_t)), of the sampled token (see the top of this file).
    All tensors are [B, T].
    """
    mask = rollouts.mask
    values = rollouts.values
    kl = rollouts.logprobs_old - rollouts.logprobs_ref
    rewards = (rollouts.delta - beta * kl) * mask                                        # l.14
    rollouts.rewards = rewards
    advantages, rollouts.returns = gae(rewards, values, mask, config.gamma, config.lam)  # l.15
    # By default V learns A_t + V_t, which mixes the rewards with V itself, as GAE does. In the
    # paper, V learns the discounted sum of the rewards from t on, R_t = Σ_k γ^{k−t} r_k (l.24).
    # GAE gives this sum if λ is 1 and V is 0.
    if config.value_target == "return":
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
    """Update θ and ψ by ppo_epochs passes over the batch in minibatches (Alg. 4 l.19–32).

    Returns the metrics as means over the steps that were not skipped. Losses are divided by the
    token count of the whole minibatch. So, up to rounding, the update depends neither on the
    micro-batches nor on the number of ranks. A step is skipped and counted if its loss or
    gradient is not finite, or if its mean ρ_t is above MAX_RATIO. Raises InputError if all
    steps are skipped.
    """
    assert rollouts.advantages.shape == rollouts.returns.shape == rollouts.mask.shape, \
        "Alg. 4 l.17: one A_t, R_t per token"
    parameters = optimizer_parameters(optimizer)
    steps = []                                     # the metrics of each step
    skipped = 0
    # Only --activation_checkpointing needs the training mode. Adapters of the policy have no
    # dropout, because a random mask would change π between two passes.
    model.train()
    for _ in range(config.ppo_epochs):                                                # l.19
        order = rng.sample(range(len(rollouts.rows)), len(rollouts.rows))
        for minibatch in chunks(order, config.minibatch_size):                        # l.20
            stats = add_gradients(rollouts, minibatch, model, value_head, parameters, config)
            norm = torch.nn.utils.clip_grad_norm_(parameters, MAX_GRAD_NORM)
            stats["grad_norm"] = norm.item()
            if all(map(math.isfinite, stats.values())) and stats["ratio"] <= MAX_RATIO:
                # Before the first step, π_θ is π_θold, so ρ is 1. This is not checked in half
                # precision, where the two passes are rounded differently.
                may_differ = steps or model.dtype != torch.float32
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
    # The loss is a mean over all tokens of the minibatch. Each pass divides its sum by this
    # count. So the gradients of all passes and ranks add up to the gradient of the mean.
    count = rollouts.mask[minibatch].sum()
    totals = []
    for group in rollouts.groups(minibatch, config):
        index = rank_share(group)          # never empty, see `check_batches`
        # With --activation_checkpointing, `backward` runs the forward pass a second time. So
        # `backward` is called inside `use_lora`, too.
        with use_lora(model, "policy"):
            loss, stats = minibatch_loss(rollouts, index, model, value_head, config, count)
            loss.backward()
        totals.append(torch.stack(list(stats.values())).detach())
    for p in parameters:
        all_sum(p.grad)
    return dict(zip(stats, all_sum(sum(totals)).tolist()))


def minibatch_loss(rollouts: Rollouts, index, model, value_head, config: PolicyConfig, count):
    """The loss −L_CLIP − β_H H + c_V L_VF of some rows, and metrics (Alg. 4 l.21–28).

    Loss and metrics are sums over the N sampled tokens of these rows, divided by `count`.
    """
    hidden, targets = forward(model, rollouts, index, "policy")
    weight = head_weight(model)
    sampled = rollouts.mask[index].bool()                          # picks N of [rows, T] tokens
    logprobs_old = rollouts.logprobs_old[index][sampled]
    advantages = rollouts.advantages[index][sampled]
    values_old = rollouts.values[index][sampled]
    returns = rollouts.returns[index][sampled]
    logprobs = token_logprobs(hidden, weight, targets, config.temperature)
    mask = torch.ones_like(logprobs)              # the padding is not among the N tokens
    values = value_head(hidden.detach())          # the value loss does not move the policy
    policy_term = ppo_loss(logprobs, logprobs_old, advantages, mask, config.clip, count)
    value_term = value_loss(values, values_old, returns, mask, config.value_clip, count)  # l.28
    loss = policy_term + config.value_coef * value_term
    if config.entropy_coef:
        entropy = token_entropy(hidden, weight, config.temperature)                      # l.25
        loss = loss - config.entropy_coef * entropy.sum() / count                        # l.27
    with torch.no_grad():
        log_ratio = logprobs - logprobs_old
        ratio = log_ratio.exp()
        stats = {
            "policy_loss": policy_term, "value_loss": value_term, "ratio": ratio.sum() / count,
            "policy_kl": (ratio - 1 - log_ratio).sum() / count,      # estimates KL(π_old ‖ π)
            "clip_fraction": ((ratio - 1).abs() > config.clip).sum() / count,
        }
    return loss, stats


# ── Algorithm 4

def set_learning_rates(optimizer, config: PolicyConfig, iteration: int):
    """Set the learning rates of θ and ψ, falling from their peaks to near 0 (Appendix D.2)."""
    factor = 1 - iteration / config.iterations
    if config.schedule == "cosine":
        factor = 0.5 * (1 - math.cos(math.pi * factor))
    theta, psi = optimizer.param_groups
    theta["lr"] = config.learning_rate * factor
    psi["lr"] = config.learning_rate * config.value_rate_factor * factor


def train(model, tokenizer, rows, config: PolicyConfig, out: Path, critic=reward_model_critic,
          advantages=add_advantages):
    """Algorithm 4: the adapter "policy" learns from the critic's reviews of its rollouts.

    critic(rollouts, model, tokenizer, config) → a Review of each row of this rank's share.
    advantages(rollouts, beta, config) fills rewards, advantages and returns. Each iteration
    writes metrics, a sample and a checkpoint to `out`. An interrupted run continues from the
    newest checkpoint. At the end, policy/ and value_head.safetensors are written.
    """
    value_head = ValueHead(model.config.hidden_size, model.device)       # l.5; Alg. 1 l.17
    groups = [{"params": lora_parameters(model, "policy")}, {"params": value_head.parameters()}]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.0, fused=True)
    # This dict is saved in each checkpoint, beside the tensors. Before the first step,
    # `checkpointed` reads the newest checkpoint into parameters, optimizer and this dict.
    state = {"beta": config.kl_coef}
    for iteration in checkpointed(config.iterations, optimizer, state, out, "policy"):  # l.6
        # The seed depends on the iteration, so a run that continues makes the same draws.
        seed = config.seed * 1_000_003 + iteration
        generator = torch.Generator().manual_seed(seed)
        rng = random.Random(seed)
        timer = Timer()
        set_learning_rates(optimizer, config, iteration)
        with unsharded(model):                 # with --shard, each rank holds all weights here
            drawn_rows = batch_rows(rows, config, iteration)                         # l.9–10
            batch = sample_rollouts(model, tokenizer, drawn_rows, config, "policy", generator)
            timer.lap("rollout")
            add_feedback(batch, critic(batch, model, tokenizer, config))            # l.12–13
            timer.lap("critique")
            add_scores(batch, model, value_head, config)                                # l.7
            advantages(batch, state["beta"], config)                               # l.14–17
            timer.lap("score")
        stats = ppo_update(batch, model, value_head, optimizer, config, rng)        # l.19–32
        timer.lap("update")
        metrics = {"iteration": iteration + 1, "kl_coef": state["beta"],
                   "kl_target": config.kl_target}
        metrics |= batch_metrics(batch) | stats | timer
        if RANK == 0:
            print_rank0(log_iteration(metrics, batch, config, out))
        state["shown"] = {name: round(metrics[name], 3) for name in ("delta", "kl")}
        state["beta"] = adapt_beta(state["beta"], metrics["kl"], config.batch_size,
                                   config.kl_target, config.kl_horizon)
    if RANK == 0:
        save_lora(model, "policy", out / "policy")                                     # l.33
        save_tensors(out / "value_head.safetensors", value_head.state_dict(), {})
