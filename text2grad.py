"""Text2Grad: reinforcement learning from natural-language feedback (arXiv 2505.22338).

    python text2grad.py                              # all three phases on the toy world
    torchrun --nproc_per_node 8 text2grad.py --task slf5k --data slf5k.jsonl \\
             --model meta-llama/Llama-3.1-8B-Instruct --batch_size 96 --minibatch_size 96

    y ~ π_θ(·|x)   z' ~ R_φ(·|x, y)   δ' from the spans of z'   r_t = δ'_t + r_t^KL   GAE   PPO

Read `train` first: it is Algorithm 4, line by line; everything above it is one of its steps.
`main` is Algorithm 1. The same command goes on where a run was stopped.

Departures. Slips of the paper, read by their evident meaning: the loss is −L_CLIP − β H; GAE
sums to T − t with V = 0 after the last token; δ_t is `delta`, and the other δ_t is `td_error`.
As in the release, not in the paper: A_t is whitened over the batch, the value loss is halved
and clipped, θ and ψ share one gradient clip. Our own: R_φ writes z' greedily; a step that would
do harm is skipped and counted; r_t^KL is of the sampled token (the release's exact KL_t is, as
a reward, a baseline and penalises nothing).

Shapes: B rows, P prompt tokens (padded left), T response tokens (padded right), N tokens of a
flat batch, H hidden size. Ranks share the work, not the batch: each samples, judges and trains
on rows [RANK::WORLD_SIZE], all hold the whole. Every draw depends on (seed, iteration, row).
On a CPU a stopped run that goes on ends with the same bits; a GPU does not promise that.
"""

from __future__ import annotations

import importlib
import math
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from annotate import (AnnotateConfig, annotate, annotation_question, ask_annotator,
                      check_annotator, token_offsets, token_rewards)
from ask import Journal
from data import (DTYPES, InputError, append_row, chunks, examples, flag, get_task, load_object,
                  parse_flags, read_rows, reward_prompt, run_script, whole_rows, write_rows)
from model import (ValueHead, add_lora, checkpoint_activations, encode_prompt, eos_ids,
                   gathered, load_lora, load_model, lora_parameters, response_hidden, save_lora,
                   shard, target_layers, use_lora)
from report import batch_metrics, colour_tokens, run_report, sample_row, table
from reward_model import (Judgement, RewardConfig, count_tokens, fit, judge, reward_preset,
                          split_rows, summary, token_figures, write_critiques)
from runtime import (RANK, WORLD_SIZE, all_sum, gather_rows, keep_checkpoint, lock_directory,
                     newest_checkpoint, on_rank0, optimizer_parameters, print_rank0,
                     restore_optimizer, result_exists, reward_model_hint, run_collective,
                     run_phase, run_settings, save_settings, start_ranks)
from sampling import (context_length, generate, head_weight, pad_batch, token_entropy,
                      token_logprobs)


@dataclass
class Config:
    """Defaults are the toy world's; --task sets the release's values (for Table 10)."""
    task: str = flag("toy", "toy, slf5k, ultrafeedback, kodcode, or module:NAME of your own")
    model: str = flag("toy/base", "base: a directory or hub id (paper: Llama-3.1-8B-Instruct)")
    data: str | None = flag(None, "rows to train on, JSON lines; the toy world makes its own")
    output_dir: str = flag("runs/toy", "run directory: adapters, metrics, samples, report")
    annotator_model: str = flag("gpt-4o", "annotator on an OpenAI-compatible server")
    annotator_function: str | None = flag(
        "toy:critique", "annotator as module:function, instead of a server")
    reward_model: str | None = flag(None, "adapter of R_φ; none: phases 1 and 2 make it")
    iterations: int = flag(25, "of Algorithm 4's outer loop", least=1)
    learning_rate: float = flag(1e-3, "peak, AdamW (release: 1e-6, KodCode 5e-7)", most=10)
    seed: int = flag(0, "of everything that is drawn", most=10**9)
    adapter: str | None = flag(None, "SFT adapter: policy starts from it, reference keeps it")
    base_url: str | None = flag(None, "the annotator's server; none: OPENAI_BASE_URL")
    mode: str = flag("cot", "how it works: cot (paper), no_cot, align, or module:NAME")
    annotated_rows: int = flag(3000, "rows for phases 1 and 2 (paper: 5000, 10000)", least=1)
    price_in: float | None = flag(None, "USD per million prompt tokens")
    price_out: float | None = flag(None, "USD per million reply tokens")
    max_usd: float | None = flag(None, "USD that annotation may cost; needs prices")
    allow_code_execution: bool = flag(False, "kodcode: run the responses with the rows' tests")
    batch_size: int = flag(64, "rollouts per iteration, all ranks (release: 12, 64)", least=1)
    temperature: float = flag(1.0, "of π, sampled and scored (release: .6)", least=0.01)
    max_prompt_tokens: int | None = flag(None, "leave out and count longer prompts", least=1)
    max_new_tokens: int = flag(32, "longest response (release: 89, 256, 512)", least=1)
    max_critique_tokens: int = flag(96, "longest critique of R_φ (release: 500, 768)", least=1)
    kl_coef: float = flag(0.5, "first KL coefficient β (release: .2, .07, .05)")
    kl_target: float = flag(6.0, "nats per response (release: 6, 1, 3); 0: β stays")
    gamma: float = flag(1.0, "discount γ (release: 1)", most=1)
    lam: float = flag(0.95, "GAE λ (release: .95)", most=1)
    ppo_epochs: int = flag(4, "passes over each batch (release: 4)", least=1)
    minibatch_size: int = flag(64, "rollouts per optimizer step, all ranks", least=1)
    schedule: str = flag("linear", "to zero (release: both)", ("linear", "cosine"))
    clip: float = flag(0.2, "ε of the clipped ratio (release: .2)")
    value_learning_rate: float | None = flag(7e-3, "ψ's peak; none: θ's (release)", most=10)
    value_clip: float = flag(5.0, "of V's move from its old value (release: .2)")
    value_coef: float = flag(0.1, "of the value loss (release: .1)")
    value_target: str = flag("gae", "A + V; return: Alg. 4 l.24", ("gae", "return"))
    entropy_coef: float = flag(0.0, "β of the entropy bonus; 0 as in the release")
    lora_r: int = flag(16, "rank of the policy's adapter (release: 16)", least=1, most=10**4)
    lora_alpha: float = flag(32, "the update is scaled by alpha / r (release: 32)")
    lora_targets: str = flag("q_proj,v_proj", "layers that get the adapter")
    eval_rows: int = flag(200, "held-out prompts of the table before and after", least=1)
    dtype: str | None = flag(None, "of the base; none: bfloat16 on CUDA, float32 on a CPU",
                             DTYPES)
    micro_batch_size: int = flag(64, "rollouts per forward pass", least=1)
    rollout_batch_size: int = flag(256, "texts that a rank decodes at once", least=1)
    activation_checkpointing: bool = flag(False, "less memory, more time in the update")
    rank_timeout: float = flag(30.0, "minutes that ranks wait for one another", least=0.01)
    shard: bool = flag(False, "spread the frozen base over the ranks (FSDP2)")
    save_every: int = flag(20, "iterations between checkpoints", least=1)
    probe_rows: int = flag(64, "rollouts of which the annotator is asked ten times in a run")
    wandb: str | None = flag(None, "also send the metrics to this project of wandb")

    GROUPS = {"task": "start here", "adapter": "phases 1 and 2", "dtype": "the machine",
              "batch_size": "rollouts and rewards", "ppo_epochs": "the update"}

    @property
    def reference(self) -> str | None:
        """The adapter of π_ref: the frozen SFT adapter, or None for the bare base."""
        return "reference" if self.adapter else None


PAPER = dict(model="meta-llama/Llama-3.1-8B-Instruct", annotator_function=None, temperature=0.6,
             probe_rows=0, annotated_rows=10000, iterations=1000, rollout_batch_size=64,
             micro_batch_size=1,
             learning_rate=1e-6, schedule="cosine", kl_coef=0.05, kl_target=3.0, eval_rows=64,
             max_new_tokens=512, max_critique_tokens=768, value_learning_rate=None,
             value_clip=0.2)
# max_prompt_tokens: with y behind them, R_φ saw no longer prompts in the release.
PRESETS = {  # Table 10
    "toy": {},
    "slf5k": {**PAPER, "batch_size": 12, "minibatch_size": 12, "schedule": "linear",
              "kl_coef": 0.2, "kl_target": 6.0, "max_new_tokens": 89,
              "max_critique_tokens": 500, "annotated_rows": 5000, "max_prompt_tokens": 811},
    "ultrafeedback": {**PAPER, "max_prompt_tokens": 438},
    "kodcode": {**PAPER, "max_new_tokens": 256, "learning_rate": 5e-7, "kl_coef": 0.07,
                "kl_target": 1.0, "max_prompt_tokens": 644},
}


def preset(task: str) -> dict:
    """The defaults of a task: its own, on top of the paper's common ones."""
    if task in PRESETS:
        return {"output_dir": f"runs/{task}", **PRESETS[task]}
    own = get_task(task)
    return {**PAPER, "output_dir": f"runs/{own.name}", **own.policy}


# ── The equations

def nl_gradient_loss(logprobs: Tensor, delta: Tensor, mask: Tensor) -> Tensor:
    """Its negative gradient is g_NL = Σ_t δ_t ∇_θ log π_θ(y_t | x, y_<t), the batch's mean.

    Definition 1 (§3.1), §3.5. [B, T] each → scalar. Algorithm 4 has A_t in the place of δ_t.
    """
    assert delta.shape == logprobs.shape == mask.shape, "Definition 1: one δ_t per log π(y_t)"
    return -(delta * logprobs * mask).sum() / len(logprobs)


def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float):
    """A_t = Σ_l (γλ)^l td_error_{t+l},  td_error_t = r_t + γ V_{t+1} − V_t   (§3.5, App. A)

    [B, T] each → (advantages, returns = A + V), 0 in the padding. V after the last token is 0;
    λ = 1 gives Alg. 4 l.16's first form, Σ_k γ^{k−t} r_k − V.
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
    """Mean 0, variance 1 over the mask, 0 in padding: [B, T] → [B, T]. As the release does."""
    wide, count = x.double(), mask.sum()    # float32 would leave rounding over a tiny spread
    mean = (wide * mask).sum() / count
    variance = ((wide - mean) ** 2 * mask).sum() / count
    white = (wide - mean) * torch.rsqrt(variance + 1e-8) * mask
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


KL_HORIZON = 10_000                       # rollouts over which β adapts (Table 10)


@dataclass
class AdaptiveKL:
    """β of the KL penalty, steered to `target` nats per response (Ziegler et al. 2019, 2.2)."""
    beta: float
    target: float                         # 0: β stays
    horizon: int = KL_HORIZON

    def update(self, kl: float, n: int):
        """kl: mean nats per response in the last batch; n: its rollouts."""
        if self.target and math.isfinite(kl):
            error = min(max(kl / self.target - 1, -0.2), 0.2)
            self.beta *= 1 + error * n / self.horizon
        assert self.beta >= 0, "Alg. 4 l.14: the KL term is a penalty"


# ── A batch of rollouts (Alg. 4 l.8–18)

@dataclass
class Rollouts:
    """ℬ. Tensors are [B, T], right-padded, unless said otherwise; log-probs are in nats."""
    rows: list[dict]
    prompts: list[str]
    texts: list[str]
    offsets: list[list[tuple[int, int]]]  # the characters of its text that each token wrote
    prompt_ids: Tensor                    # x, [B, P], left-padded
    prompt_mask: Tensor                   # [B, P]
    response_ids: Tensor                  # y
    mask: Tensor                          # 1 on sampled tokens, EOS included
    feedback: list[Judgement] = field(default_factory=list)
    delta: Tensor | None = None           # δ'_t
    logprobs_old: Tensor | None = None    # log π_θold(y_t)
    entropy: Tensor | None = None         # H(π_θold(·|x, y_<t))
    logprobs_ref: Tensor | None = None    # log π_ref(y_t)
    values: Tensor | None = None          # V_ψ(x, y_<t)
    rewards: Tensor | None = None         # r_t = δ'_t + r_t^KL
    advantages: Tensor | None = None      # A_t, whitened
    returns: Tensor | None = None         # what V is fitted to
    truncated: list[bool] = field(default_factory=list)       # no EOS in max_new_tokens

    def part(self, index: list[int]) -> dict[str, Tensor]:
        """The tensors of some rows, [B, P] and [B, T], less columns padded in all of them.

        "sampled" holds the indices, [N], of the sampled tokens in a flat [B · T].
        """
        P, T = (int(m[index].sum(1).max()) for m in (self.prompt_mask, self.mask))
        part = {name: x[index][:, -P:] if name.startswith("prompt_") else x[index][:, :T]
                for name, x in vars(self).items() if isinstance(x, Tensor)}
        part["sampled"] = part["mask"].flatten().nonzero().squeeze(1)
        return part

    def by_length(self, index) -> list[int]:
        """Rows by response length, so that a micro-batch holds little padding."""
        lengths = self.mask.sum(1).tolist()
        return sorted(index, key=lengths.__getitem__)


def sample_rollouts(model, tokenizer, rows, config: Config, adapter, generator) -> Rollouts:
    """y ~ π(·|x) for every row (Alg. 4 l.8–11). The ids are kept; texts are for the critic."""
    prompts = [get_task(config.task).policy_prompt(row) for row in rows]
    prompt_ids, ids = [encode_prompt(tokenizer, prompt) for prompt in prompts], []
    uniforms = torch.rand(len(rows), config.max_new_tokens, generator=generator)
    ends = eos_ids(tokenizer, model)
    with use_lora(model, adapter, merge=True):
        for part in chunks(range(RANK, len(rows), WORLD_SIZE), config.rollout_batch_size):
            x, u = [prompt_ids[i] for i in part], uniforms[list(part)]
            ids += generate(model, x, config.max_new_tokens, config.temperature, ends,
                            uniforms=u)                                                  # l.11
    ids = gather_rows(ids)
    truncated = [y[-1] not in ends for y in ids]
    assert all(len(y) == config.max_new_tokens for y, cut in zip(ids, truncated) if cut), \
        "Alg. 4 l.11: y ends with its EOS, or is cut off"
    texts, offsets = zip(*(token_offsets(tokenizer, y) for y in ids))
    assert [*map(len, offsets)] == [*map(len, ids)], "Alg. 4 l.11: each y_t has its characters"
    padded = pad_batch(prompt_ids, ids, model.device)
    return Rollouts(rows, prompts, list(texts), list(offsets), *padded,                  # l.8
                    truncated=truncated)


def reward_model_critic(rollouts: Rollouts, model, tokenizer, config) -> list[Judgement]:
    """z' ~ R_φ(·|x, y) and its δ' (Alg. 4 l.12–13) for this rank's rows: the paper's critic.

    `train` and `evaluate` take any function like this one; experiments/designs.py has others.
    """
    judged = []
    for part in chunks(range(RANK, len(rollouts.rows), WORLD_SIZE), config.rollout_batch_size):
        texts = [rollouts.texts[i] for i in part]
        prompts = [rollouts.prompts[i] for i in part]
        # l.12
        written = write_critiques(model, tokenizer, prompts, texts, config.max_critique_tokens)
        judged += [judge(z, y, rollouts.offsets[i]) for z, y, i in zip(written, texts, part)]
    return judged


def add_feedback(rollouts: Rollouts, judged: list[Judgement]):
    """δ' of every rank's judgements as one tensor (Alg. 4 l.13)."""
    rollouts.feedback = gather_rows(judged)
    rollouts.delta = torch.zeros(rollouts.mask.shape, device=rollouts.mask.device)
    assert len(rollouts.feedback) == len(rollouts.rows), "Alg. 4 l.12: one z' for each y"
    for row, found in enumerate(rollouts.feedback):
        n = int(rollouts.mask[row].sum())
        assert len(found.delta) == n, "Alg. 4 l.13: one δ'_t per sampled token, EOS included"
        rollouts.delta[row, :n] = torch.tensor(found.delta)
    assert not (rollouts.delta * (1 - rollouts.mask)).any(), "Alg. 4 l.13: no δ' on padding"


@torch.no_grad()
def add_scores(rollouts: Rollouts, model, value_head, config: Config):
    """log π_θold, H, log π_ref and V_ψ (Alg. 4 l.7, 14, 16), by training's own forward pass."""
    weight = head_weight(model)
    scores = torch.zeros(4, *rollouts.mask.shape, device=model.device)
    order = rollouts.by_length(range(len(rollouts.rows)))
    for index in chunks(order[RANK::WORLD_SIZE], config.micro_batch_size):
        part = rollouts.part(index)
        hidden, targets = forward(model, part, "policy")
        reference, _ = forward(model, part, config.reference)
        # l.7: no weights are copied for π_θold, its log-probs are all that the update needs
        logprobs = token_logprobs(hidden, weight, targets, config.temperature)
        entropy = token_entropy(hidden, weight, config.temperature)
        logprobs_ref = token_logprobs(reference, weight, targets, config.temperature)
        B, T = part["mask"].shape
        full = torch.zeros(4, B * T, device=model.device)
        full[:, part["sampled"]] = torch.stack(
            [logprobs, entropy, logprobs_ref, value_head(hidden)])
        scores[:, index, :T] = full.view(4, B, T)
    (rollouts.logprobs_old, rollouts.entropy,
     rollouts.logprobs_ref, rollouts.values) = all_sum(scores)
    # Written so that NaN passes: `ppo_update` skips, counts and names such a step.
    assert not rollouts.logprobs_old.max() > 1e-3, "Alg. 4 l.22: log π_θold of a probability"
    assert not rollouts.logprobs_ref.max() > 1e-3, "Alg. 4 l.14: log π_ref of a probability"
    assert not rollouts.entropy.min() < -1e-2, "Alg. 4 l.25: H ≥ 0"


def forward(model, part: dict[str, Tensor], adapter: str | None) -> tuple[Tensor, Tensor]:
    """The hidden state that predicts each sampled token, and that token: [N, H], [N]."""
    inputs = [part[k] for k in ("prompt_ids", "prompt_mask", "response_ids", "mask")]
    with use_lora(model, adapter):
        hidden = response_hidden(model, *inputs)
    sampled = part["sampled"]
    return hidden.flatten(0, 1)[sampled], part["response_ids"].flatten()[sampled]


def add_advantages(rollouts: Rollouts, beta: float, config: Config):
    """r_t = δ'_t + r_t^KL, A_t by GAE, whitened, and the value targets (Alg. 4 l.14–17, 24).

    r_t^KL = −β (log π(y_t) − log π_ref(y_t)), whose policy gradient is −β ∇KL. The exact KL_t
    would be no penalty: it depends on y_<t alone, so for y_t it is a baseline.
    """
    mask = rollouts.mask
    kl = rollouts.logprobs_old - rollouts.logprobs_ref
    rollouts.rewards = (rollouts.delta - beta * kl) * mask                               # l.14
    assert not (rollouts.rewards * (1 - mask)).any(), "Alg. 4 l.14: no r_t on padding"
    rewards, values = rollouts.rewards, rollouts.values
    advantages, rollouts.returns = gae(rewards, values, mask, config.gamma, config.lam)  # l.17
    if config.value_target == "return":                # l.24: Σ_k γ^{k−t} r_k, λ = 1 and V = 0
        rollouts.returns = gae(rewards, torch.zeros_like(values), mask, config.gamma, 1.0)[0]
    last = mask.sum(1, keepdim=True).long() - 1                                     # [B, 1]
    for name, x, y in (("§3.5 GAE, V = 0 after y: A_T = r_T − V", advantages, rewards - values),
                       ("Alg. 4 l.24: R_T = r_T", rollouts.returns, rewards)):
        ends = x.gather(1, last), y.gather(1, last)
        assert torch.allclose(*ends, atol=1e-5, equal_nan=True), name
    rollouts.advantages = whiten(advantages, mask)


# ── The update (Alg. 4 l.19–32)

MAX_GRAD_NORM = 1.0
MAX_RATIO = 10          # of a minibatch's mean ρ_t; a step over it would do harm and is skipped


def ppo_update(rollouts: Rollouts, model, value_head, optimizer, config: Config, rng) -> dict:
    """ppo_epochs passes over the batch in minibatches (Alg. 4 l.19–32) → means over the steps.

    Micro-batches and ranks are normalised by the token count of the whole minibatch, so neither
    changes the update. A harmful step is skipped and counted; InputError where all are.
    """
    parameters, taken, skipped = optimizer_parameters(optimizer), [], 0
    for _ in range(config.ppo_epochs):                                                # l.19
        order = rng.sample(range(len(rollouts.rows)), len(rollouts.rows))
        for minibatch in chunks(order, config.minibatch_size):                        # l.20
            minibatch = rollouts.by_length(minibatch)
            count, parts = rollouts.mask[minibatch].sum(), []
            for index in chunks(minibatch[RANK::WORLD_SIZE], config.micro_batch_size):
                loss, stats = minibatch_loss(rollouts.part(index), model, value_head, config,
                                             count)
                loss.backward()
                parts.append(torch.stack(list(stats.values())))
            for p in parameters:
                all_sum(p.grad)
            step = dict(zip(stats, all_sum(sum(parts)).tolist()))
            norm = torch.nn.utils.clip_grad_norm_(parameters, MAX_GRAD_NORM)
            step["grad_norm"] = norm.item()
            if all(map(math.isfinite, step.values())) and step["ratio"] <= MAX_RATIO:
                moved = taken or skipped or model.dtype != torch.float32
                assert moved or abs(step["ratio"] - 1) < 0.1, "Alg. 4 l.22: ρ = 1 until θ moves"
                optimizer.step()                                                   # l.29–30
                taken.append(step)
            else:
                skipped += 1
            optimizer.zero_grad()
    if skipped > len(taken) > 0:
        print_rank0(f"warning: {skipped} of {skipped + len(taken)} optimizer steps were "
                    f"skipped as harmful; stop, and lower --learning_rate")
    if not taken:
        raise InputError(f"no optimizer step of an iteration was finite with a mean ratio of "
                         f"{MAX_RATIO}: {step}; lower --learning_rate")
    means = {key: sum(step[key] for step in taken) / len(taken) for key in step}
    return means | {"skipped_steps": skipped}


def minibatch_loss(part: dict[str, Tensor], model, value_head, config: Config, count):
    """−L_CLIP − β H + c L_VF (Alg. 4 l.21–28): (scalar, what to log), sums / count."""
    hidden, targets = forward(model, part, "policy")
    weight = head_weight(model)
    logprobs = token_logprobs(hidden, weight, targets, config.temperature)
    values = value_head(hidden.detach())          # its errors do not move the policy
    names = "logprobs_old", "advantages", "values", "returns", "mask"
    logprobs_old, advantages, values_old, returns, mask = (
        part[name].flatten()[part["sampled"]] for name in names)
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
            "policy_kl": (ratio - 1 - log_ratio).sum() / count,      # KL(π_old ‖ π), k3: ≥ 0
            "clip_fraction": ((ratio - 1).abs() > config.clip).sum() / count,
        }
    return loss, {key: x.detach() for key, x in stats.items()}


# ── Algorithm 4

def train(model, tokenizer, rows, config: Config, out: Path, critic=reward_model_critic):
    """Algorithm 4: the adapter "policy" learns from what `critic` says of its rollouts.

    Writes policy/, value_head.safetensors, metrics, samples and checkpoints to `out`, and goes
    on from the newest checkpoint there.
    """
    value_head = ValueHead(model.config.hidden_size, model.device)                     # l.5
    groups = [{"params": lora_parameters(model, "policy")}, {"params": value_head.parameters()}]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.0, fused=True)
    own = config.value_learning_rate
    rates = config.learning_rate, config.learning_rate if own is None else own
    kl, task = AdaptiveKL(config.kl_coef, config.kl_target), get_task(config.task)
    start = resume(optimizer, kl, out)
    bar = tqdm(range(start, config.iterations), "policy", initial=start,
               total=config.iterations, disable=RANK > 0)
    for iteration in bar:                                                              # l.6
        seed, clock = config.seed * 1_000_003 + iteration, [time.time()]
        generator, rng = torch.Generator().manual_seed(seed), random.Random(seed)
        for group, rate in zip(optimizer.param_groups, rates):
            group["lr"] = rate * decay(config, iteration)
        with gathered(model):
            drawn = batch_rows(rows, config, iteration)                             # l.9–10
            batch = sample_rollouts(model, tokenizer, drawn, config, "policy", generator)
            clock.append(time.time())
            add_feedback(batch, critic(batch, model, tokenizer, config))           # l.12–13
            clock.append(time.time())
            add_scores(batch, model, value_head, config)                               # l.7
            add_advantages(batch, kl.beta, config)                                 # l.14–17
            clock.append(time.time())
        stats = ppo_update(batch, model, value_head, optimizer, config, rng)       # l.19–32
        clock.append(time.time())
        metrics = {"iteration": iteration + 1, "kl_coef": kl.beta, **batch_metrics(batch, task),
                   **stats}
        phases = "rollout", "critique", "score", "update"
        # Table 13
        metrics |= {f"seconds_{k}": b - a for k, a, b in zip(phases, clock, clock[1:])}
        kl.update(metrics["kl"], config.batch_size)
        if RANK == 0:
            tenth = (iteration + 1) * PROBES // config.iterations
            if config.probe_rows and tenth > iteration * PROBES // config.iterations:
                metrics |= probe(batch, config, out)
            bar.set_postfix(delta=f"{metrics['delta']:+.3f}", kl=f"{metrics['kl']:.2f}")
            record(metrics, sample_row(batch, iteration % len(batch.rows)), config, out)
        state = {"iteration": iteration + 1, "kl_coef": kl.beta}
        keep_checkpoint(out, optimizer, state, config.save_every, start, config.iterations)
    if RANK == 0:
        save_lora(model, "policy", out / "policy")                                    # l.33
        save_file(value_head.state_dict(), out / "value_head.safetensors")


PROBES = 10                               # in a run, the last in its last iteration


def probe(batch: Rollouts, config: Config, out: Path) -> dict[str, float | None]:
    """R_φ beside the annotator on the policy's own rollouts, the first --probe_rows of them.

    R_φ was trained on another policy's: where its δ' rises and the annotator's does not, the
    policy has learnt to please R_φ. Journal, budget and prices are phase 1's.
    """
    task, asked = get_task(config.task), annotator(config, out)
    first = range(min(config.probe_rows, len(batch.rows)))
    there = [i for i in first if batch.texts[i].strip()]
    rows = [batch.rows[i] | {"response": batch.texts[i], "outcome": None} for i in there]
    if task.tests and config.allow_code_execution:
        from measures.sandbox import add_outcomes
        rows = add_outcomes(rows, task)
    questions = [annotation_question(example, asked) for example in examples(task, rows)]
    counts, true_delta = Counter(), []
    with Journal(f"{asked.output}.journal", *asked.prices) as journal:
        for i, (_, _, found) in zip(there, ask_annotator(questions, journal, asked)):
            if found:                          # else there is no reply; nothing takes its place
                truth = token_rewards(batch.texts[i], batch.offsets[i], found[1].spans)
                counts += count_tokens(truth, batch.feedback[i].delta)
                true_delta += truth
    mean = sum(true_delta) / len(true_delta) if true_delta else None
    return {"true_delta": mean, **token_figures(counts)}


def batch_rows(rows: list, config: Config, iteration: int) -> list:
    """The rows of one iteration: a walk through shuffled passes over all, by the seed alone."""
    first, n = iteration * config.batch_size, len(rows)
    passes = range(first // n, (first + config.batch_size - 1) // n + 1)
    order = sum((random.Random(f"{config.seed}-{e}").sample(rows, n) for e in passes), [])
    return order[first % n :][: config.batch_size]


def decay(config: Config, iteration: int) -> float:
    """What is left of the learning rates: linear or cosine, from 1 to 0 (Appendix D.2)."""
    left = 1 - iteration / config.iterations
    return left if config.schedule == "linear" else 0.5 * (1 - math.cos(math.pi * left))


def record(metrics: dict, sample: dict, config: Config, out: Path):
    """One line in metrics.jsonl and one in samples.jsonl; every tenth sample is shown."""
    append_row(out / "metrics.jsonl", metrics)
    append_row(out / "samples.jsonl", {"iteration": metrics["iteration"], **sample})
    if config.wandb:
        wandb = importlib.import_module("wandb")
        if wandb.run is None:
            wandb.init(project=config.wandb, name=out.name, config=run_settings(config))
        wandb.log(metrics, step=metrics["iteration"])
    if metrics["iteration"] % 10 == 1:
        tokens = colour_tokens(sample["tokens"], sample["delta"])
        print_rank0(f"{metrics['iteration']:4d}  {tokens}")


def resume(optimizer, kl: AdaptiveKL, out: Path) -> int:
    """Go back to the newest checkpoint → the iterations done. Later lines are dropped."""
    path, tensors, state = newest_checkpoint(out)
    if path:
        print_rank0(f"phase 3: resumed after iteration {state['iteration']} from {path}")
    restore_optimizer(optimizer, tensors)
    kl.beta, start = state.get("kl_coef", kl.beta), state.get("iteration", 0)
    for file in (out / "metrics.jsonl", out / "samples.jsonl"):
        if RANK == 0:
            kept = [row for row in whole_rows(file) if row.get("iteration", math.inf) <= start]
            write_rows(file, kept)
    return start


# ── Algorithm 1: annotate, train R_φ, optimise the policy

def check(config: Config, out: Path, learnt: bool):
    """Look at flags, critic, key and directory before anything is sampled or spent."""
    if config.batch_size % WORLD_SIZE or config.minibatch_size % WORLD_SIZE:
        raise InputError(f"--batch_size and --minibatch_size must be multiples of {WORLD_SIZE}")
    if config.shard and WORLD_SIZE == 1:
        raise InputError("--shard spreads the base over ranks: use torchrun --nproc_per_node N")
    if config.data is None and get_task(config.task).rows is None:
        raise InputError(f"--task {config.task} needs --data rows.jsonl")
    if config.wandb:
        load_object("--wandb", "wandb:init")
    if config.probe_rows and config.mode == "align":
        raise InputError("--mode align reads what people wrote of a response, and of the "
                         "policy's own they wrote nothing: set --probe_rows 0")
    told = config.annotator_function or config.allow_code_execution
    if config.probe_rows and get_task(config.task).tests and not told:
        raise InputError("--probe_rows: the annotator is told what the tests said of each "
                         "response; set --allow_code_execution, or --probe_rows 0")
    made = config.reward_model or result_exists(out / "feedback.jsonl")
    if config.probe_rows or learnt and not made:
        check_annotator(annotator(config, out))


def check_phases(model, rows: list[dict], config: Config, out: Path):
    """The same for what needs the base and the rows: R_φ's layers, the sandbox for tests."""
    target_layers(model, reward_settings(config, out).lora_targets.split(","))
    task = get_task(config.task)
    told = {id(one["row"]) for one in examples(task, rows) if "outcome" in one}
    untold = task.tests and not config.annotator_function and len(told) < len(rows)
    if not untold or result_exists(out / "responses.jsonl"):
        return
    if not config.allow_code_execution:
        raise InputError(f"{len(rows) - len(told)} of {len(rows)} rows bring no outcome of "
                         f"their tests: run them, in the sandbox, by --allow_code_execution")
    from measures.sandbox import add_outcomes
    add_outcomes([rows[0] | {"response": "pass", "outcome": None}], task)    # does it stand?


def load_rows(config: Config) -> tuple[list[dict], list[dict]]:
    """(training rows, held-out rows) (§4.1). No held-out prompt is trained on or annotated.

    Training rows are shuffled by the seed. Of each held-out prompt one row remains. Raises
    InputError where all rows have the same prompt.
    """
    task = get_task(config.task)
    if config.data is None:
        rows = task.rows("train", config.annotated_rows, config.seed)
        return rows, task.rows("eval", config.eval_rows, 0)
    rows = read_rows(config.data, task.needs)
    shuffled = random.Random(config.seed).sample(rows, len(rows))
    training, evaluation = split_rows(shuffled, config.eval_rows, config.seed,
                                      task.policy_prompt, least=1)
    if not training:
        raise InputError(f"{config.data}: all rows have the same prompt; add rows with another "
                         f"prompt, because one prompt is held out for evaluation")
    one_per_prompt = {str(task.policy_prompt(row)): row for row in evaluation}
    return training, list(one_per_prompt.values())


def fitting(rows: list[dict], model, tokenizer, config: Config) -> list[dict]:
    """The rows whose prompt, response and critique fit the context; the others are counted."""
    more = len(encode_prompt(tokenizer, reward_prompt("", "")))
    most = context_length(model) - more - config.max_new_tokens - config.max_critique_tokens
    most = min(most, config.max_prompt_tokens or most)
    prompt = get_task(config.task).policy_prompt
    kept = [row for row in rows if len(encode_prompt(tokenizer, prompt(row))) <= most]
    if len(kept) < len(rows):
        print_rank0(f"{config.data or config.task}: left out {len(rows) - len(kept)} of "
                    f"{len(rows)} rows, whose prompts have over {most} tokens")
    if not kept:
        raise InputError(f"{config.data or config.task}: no row is left to train on or "
                         f"to judge by; lower --max_new_tokens or raise --max_prompt_tokens")
    return kept


def respond(model, tokenizer, rows: list[dict], config: Config, out: Path):
    """Alg. 1 l.6: π_ref answers the rows that bring no response → responses.jsonl."""
    if gather_rows([result_exists(out / "responses.jsonl")])[0]:
        return
    task, generator = get_task(config.task), torch.Generator().manual_seed(config.seed)
    answered, mute = [], []
    for row in rows:
        (answered if "response" in row or task.responses(row) else mute).append(row)
    for part in tqdm(chunks(mute, 256), "respond", disable=not mute or RANK > 0):
        with gathered(model):
            batch = sample_rollouts(model, tokenizer, part, config, config.reference, generator)
        pairs = zip(part, batch.texts)
        answered += [row | {"response": y} for row, y in pairs if y.strip()]             # l.6
    if len(answered) < len(rows):
        print_rank0(f"left out {len(rows) - len(answered)} sampled responses that are empty")
    if not answered:
        raise InputError("every response is empty: this model does not answer the prompts")
    if task.tests and config.allow_code_execution:
        from measures.sandbox import add_outcomes
        answered = gather_rows(add_outcomes(answered[RANK::WORLD_SIZE], task))
    if RANK == 0:
        write_rows(out / "responses.jsonl", answered)


def annotator(config: Config, out: Path) -> AnnotateConfig:
    """Phase 1's settings (Alg. 1 l.7–11): responses.jsonl → feedback.jsonl."""
    names = ("task", "annotator_function", "annotator_model", "base_url", "mode", "price_in",
             "price_out", "max_usd")
    return AnnotateConfig(data=str(out / "responses.jsonl"), output=str(out / "feedback.jsonl"),
                          **{name: getattr(config, name) for name in names})


def reward_settings(config: Config, out: Path) -> RewardConfig:
    """Phase 2's settings: feedback.jsonl → reward/adapter."""
    names = "task", "model", "seed", "micro_batch_size", "max_critique_tokens"
    given = reward_preset(config.task) | {name: getattr(config, name) for name in names}
    files = {"data": str(out / "feedback.jsonl"), "output_dir": str(out / "reward")}
    return RewardConfig(**given | files)


def fit_reward(model, tokenizer, config: Config, out: Path) -> str:
    """Phase 2 (Alg. 1 l.13–14): R_φ from feedback.jsonl → reward/adapter."""
    return summary(fit(model, tokenizer, reward_settings(config, out)))                  # l.14


def evaluate(model, tokenizer, rows, config: Config, adapter, critic=reward_model_critic):
    """Held-out rows, a sampled response each, judged by the critic: (means, samples)."""
    generator, truths = torch.Generator().manual_seed(config.seed), get_task(config.task).truth
    scores, samples = [], []
    for part in tqdm(chunks(rows, config.batch_size), desc="evaluate", disable=RANK > 0):
        with gathered(model):
            batch = sample_rollouts(model, tokenizer, part, config, adapter, generator)
            add_feedback(batch, critic(batch, model, tokenizer, config))
        samples += [{"id": row.get("id"), **sample_row(batch, i)} for i, row in enumerate(part)]
        for row, text, found, cut in zip(part, batch.texts, batch.feedback, batch.truncated):
            n = max(1, len(found.delta))
            scores.append({name: truth(row, text) for name, truth in truths.items()} | {
                "mean δ per token": sum(found.delta) / n,
                "tokens in good spans": sum(d > 0 for d in found.delta) / n,
                "tokens in poor spans": sum(d < 0 for d in found.delta) / n,
                "unparseable critiques": float(bool(found.reason)),
                "truncated responses": float(cut), "response tokens": float(len(found.delta))})
    means = {key: sum(score[key] for score in scores) / len(scores) for key in scores[0]}
    return means, samples


MOST_UNREADABLE = 0.2                     # a share of critiques


def optimise(model, tokenizer, rows, held_out, config: Config, out: Path,
             critic=reward_model_critic) -> str:
    """Phase 3 (Alg. 1 l.16–19) between two evaluations → policy/ and result.json."""
    before, samples = evaluate(model, tokenizer, held_out, config, config.reference, critic)
    if RANK == 0:
        write_rows(out / "before_samples.jsonl", samples)
    if (lost := before["unparseable critiques"]) > MOST_UNREADABLE:
        why = next(sample["unreadable"] for sample in samples if sample["unreadable"])
        print_rank0(f"warning: {lost:.0%} of the critiques cannot be read and give no reward "
                    f"(one: {why}); stop, and train R_φ on more rows or epochs "
                    f"(reward_model.py), or raise --max_critique_tokens")
    train(model, tokenizer, rows, config, out, critic)                                  # l.18
    after, samples = evaluate(model, tokenizer, held_out, config, "policy", critic)
    if RANK == 0:
        write_rows(out / "after_samples.jsonl", samples)
        write_rows(out / "result.json", [{"before": before, "after": after}])
    return f"{config.iterations} iterations"


def start_policy(model, config: Config):
    """The adapter "policy" before the first step, and π_ref's (Alg. 1 l.17)."""
    if config.adapter:
        load_lora(model, "reference", config.adapter)
        load_lora(model, "policy", config.adapter)
    else:
        torch.manual_seed(config.seed)
        add_lora(model, "policy", config.lora_r, config.lora_alpha, 0.0,
                 config.lora_targets.split(","))


def main(argv=None, critic=reward_model_critic, learnt=True):
    """Algorithm 1. learnt: whether the critic asks R_φ, which phases 1 and 2 then make."""
    config = parse_flags(Config, sys.argv[1:] if argv is None else argv, __doc__, preset)
    out, started = Path(config.output_dir), time.time()
    check(config, out, learnt)
    device = start_ranks(config.rank_timeout)
    _lock = lock_directory(out)                               # held until the process ends
    rows, held_out = load_rows(config)
    model, tokenizer = load_model(config.model, config.dtype, device, to_shard=config.shard)
    rows, held_out = (fitting(part, model, tokenizer, config) for part in (rows, held_out))
    if config.reward_model:
        load_lora(model, "reward", config.reward_model)
    start_policy(model, config)
    if config.activation_checkpointing:
        checkpoint_activations(model)
    asked, makes = rows[: config.annotated_rows], learnt and config.reward_model is None
    if makes:
        check_phases(model, asked, config, out)
    save_settings(config, out)
    print_rank0(f"Text2Grad on {config.task}: {config.model}, {len(rows)} training prompts, "
                f"{device}; files in {out}/")
    if config.shard:
        shard(model, device)
    try:
        if makes:
            respond(model, tokenizer, asked, config, out)                             # l.4–6
            run_phase("phase 1, annotate", "feedback.jsonl", out,
                  lambda: on_rank0(annotate, annotator(config, out)))                 # l.7–11
            run_phase("phase 2, reward model", "reward/metrics.json", out,
                  lambda: fit_reward(model, tokenizer, config, out))                 # l.13–14
            if not lora_parameters(model, "reward"):            # made by an earlier start
                load_lora(model, "reward", out / "reward" / "adapter")
        run_phase("phase 3, policy", "result.json", out,
              lambda: optimise(model, tokenizer, rows, held_out, config, out,
                               critic))                                              # l.16–19
    except torch.OutOfMemoryError as error:
        raise InputError(f"out of memory ({error}): lower --micro_batch_size (update) or "
                         f"--rollout_batch_size (texts), or set --activation_checkpointing or "
                         f"--shard; the same command goes on") from error
    if RANK == 0:
        result = read_rows(out / "result.json")[0]
        lines = [[key, x, result["after"][key]] for key, x in result["before"].items()]
        print(table([f"{len(held_out)} held-out prompts", "before", "after"], lines))
        goals = "mean δ per token", *get_task(config.task).truth
        for name, x, y in lines:
            if name in goals and y < x - 0.1 * abs(x):
                print(f"warning: {name} fell from {x:.3f} to {y:.3f}; look at kl and entropy "
                      f"in the report, and lower --learning_rate or raise --kl_coef")
        benchmark = "" if config.task == "toy" else "--task BENCHMARK --data ROWS "
        print(f"\n{time.time() - started:.0f} s in all. Look at {run_report(out)}. In {out}/: "
              f"policy/ (PEFT format), metrics.jsonl, samples.jsonl.\n"
              f"next: python eval.py {benchmark}--model {config.model} --adapter {out}/policy; "
              f"or phase 3 with other settings: another --output_dir"
              f"{reward_model_hint(config, out)}")
    run_collective(dist.destroy_process_group)


if __name__ == "__main__":
    run_script(main, "text2grad")
