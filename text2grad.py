"""Text2Grad: reinforcement learning from natural-language feedback (arXiv 2505.22338), Algorithms 1 and 4.

    python text2grad.py                      # all three phases on the embedded toy world, minutes on a laptop
    torchrun --nproc_per_node 8 text2grad.py --task slf5k --model meta-llama/Llama-3.1-8B-Instruct --data slf5k.jsonl \
             --batch_size 96 --minibatch_size 96

Phase 1 (annotate.py) turns responses of the base model into critiques with quoted spans, phase 2 (reward_model.py)
teaches R_φ to write them, and phase 3, here, is the policy gradient of what R_φ writes:

    y ~ π_θ(·|x)   z' ~ R_φ(·|x, y)   δ' from the spans of z'   r_t = δ'_t + r_t^KL   A_t by GAE   clipped PPO

Everything lands in runs/NAME. Phases that are done are reused; a phase 3 that was stopped goes on from its checkpoint.

Departures from the paper. Slips, read by their evident meaning: the loss is −L_CLIP − β H (with the printed signs a
maximised objective would punish entropy); GAE sums to T − t with V = 0 after the last token (to T − t − 1 it would drop
the last TD error); `delta` is the pseudo-reward δ_t and `td_error` the other δ_t. Choices, as in the release: A_t is
whitened over the batch, the value loss is halved and clipped, and θ and ψ share one AdamW and one gradient clip. Our
own: R_φ writes z' greedily.

Ranks share the work, not the batch: each samples, judges and trains on its share of the rows, and all hold the whole.
Every draw is a function of (seed, iteration) and the row's place in the batch, so there is no generator whose state a
checkpoint must keep: a run that is resumed, or spread over another number of ranks, draws the same.

Shapes: B rows, P prompt tokens (padded on the left), T response tokens (padded on the right), N tokens of a flat batch.
Paper: §3.5 and Algorithms 1 and 4; it says nothing of ranks, checkpoints and flags.
"""

from __future__ import annotations

import json
import math
import random
import signal
import sys
import time
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from experiments import designs as rewards
import toy
from annotate import (AnnotateConfig, InputError, annotate, flag, get_task, read_rows, reward_prompt, run, token_offsets,
                      write_rows)
from checkpoints import checkpoints, keep_checkpoint, newest_checkpoint
from model import (ModelError, ValueHead, add_lora, checkpoint_activations, context_length, encode_prompt, eos_ids,
                   fingerprint, gathered, generate, head_weight, load_lora, load_model, lora_parameters, pad_batch,
                   response_hidden, save_lora, shard, token_kl, token_logprobs, use_lora)
from parts import WEIGHTINGS
from ranks import RANK, RANKS, all_sum, everyone, say, start_ranks, together
from report import (TRACKERS, ReportError, Tracker, colour_tokens, public, run_report, split_text, table, tracker_module)
from reward_model import (REWARD_PRESETS, Judgement, RewardConfig, chunks, fit, parse_config, summary, timed)
from runs import changed, forgotten_if_it_fails, log, note_machine, open_run, phase
from measures.sandbox import SandboxError


@dataclass
class Config:
    """Defaults are the toy world's; --task sets the paper's values (Table 10, as its release has them).

    max_new_tokens, max_prompt_tokens and max_critique_tokens are in tokens, rank_timeout in minutes, kl_target in nats.
    """
    task: str = flag("toy", "toy, slf5k, ultrafeedback or kodcode; sets the preset")
    model: str = flag("toy/base", "base model: a directory or hub id (paper: Llama-3.1-8B-Instruct)")
    adapter: str | None = flag(None, "SFT adapter: policy starts from it, reference keeps it")
    reward_model: str | None = flag(None, "adapter of R_φ; none: phases 1 and 2 make it")
    data: str | None = flag(None, "rows to train on, JSON lines; the toy world makes its own")
    output_dir: str = flag("runs/toy", "run directory: config, metrics, samples, adapters")
    seed: int = flag(0, "of everything that is drawn")
    resume: bool = flag(True, "reuse what the run directory holds; --no_resume wants it empty")
    dtype: str | None = flag(None, "of the frozen base; none: bfloat16 on CUDA, float32 on a CPU")
    shard: bool = flag(False, "spread the frozen base over the ranks (FSDP2); else each holds a copy")
    activation_checkpointing: bool = flag(False, "compute activations again in backward: less memory, more time")
    rank_timeout: float = flag(30.0, "minutes that ranks wait for one another before the run ends")
    # Phase 1
    annotator_model: str = flag("gpt-4o", "annotator on the server (paper: gpt-4o)")
    base_url: str | None = flag(None, "any OpenAI-compatible server; else OPENAI_BASE_URL")
    critic: str | None = flag("toy:critique", "a function module:function instead of a server")
    mode: str = flag("cot", "how the annotator works: cot, no_cot, dense, steps (paper: cot)")
    allow_code_execution: bool = flag(False, "kodcode: run the code of every response with the row's tests")
    unsafe_sandbox: bool = flag(False, "run it also where a layer of the sandbox cannot be put up")
    concurrency: int = flag(8, "annotation requests under way at once")
    price_in: float | None = flag(None, "USD per million prompt tokens of the annotator")
    price_out: float | None = flag(None, "USD per million reply tokens of the annotator")
    max_usd: float | None = flag(None, "USD that annotation may cost, all runs together; needs prices")
    annotated_rows: int = flag(3000, "rows for phases 1 and 2 at most (paper: 5000 to 10000)")
    # Phase 3: rollouts and rewards
    iterations: int = flag(50, "of Algorithm 4's outer loop")
    batch_size: int = flag(64, "rollouts per iteration, all ranks together (paper: 12, 8 per GPU)")
    rollout_batch_size: int = flag(256, "texts that a rank decodes at once; changes memory, not numbers")
    temperature: float = flag(1.0, "of the policy, in sampling and in scoring (paper: .6)")
    max_new_tokens: int = flag(32, "longest response (paper: 89, 256, 512)")
    max_prompt_tokens: int = flag(0, "leave out and count longer prompts; 0: a longer one is an error")
    max_critique_tokens: int = flag(128, "longest critique of R_φ (paper: 500, 768)")
    reward: str = flag("critique", "design: critique (paper), graded, end, true, true_end, scalar, steps (rewards.py)")
    critique_samples: int = flag(4, "with --reward graded: critiques per rollout, whose δ are averaged")
    weighting: str = flag("uniform", "δ in a span: uniform (paper), linear_decay, importance, importance_code")
    kl_coef: float = flag(0.1, "first KL coefficient (paper: .2, .07, .05)")
    kl_target: float = flag(6.0, "nats per response the adaptive KL aims at (paper: 6, 1, 3); 0: fixed")
    kl_horizon: int = flag(10000, "rollouts over which it adapts (paper: 10000)")
    kl_estimator: str = flag("full", "full: exact over the vocabulary, no noise; k1: log π − log π_ref")
    gamma: float = flag(1.0, "discount γ (paper: 1)")
    lam: float = flag(0.95, "GAE λ (paper: .95)")
    # Phase 3: the update
    ppo_epochs: int = flag(4, "passes over each batch (paper: 4)")
    minibatch_size: int = flag(64, "rollouts per optimizer step, all ranks together")
    micro_batch_size: int = flag(64, "rollouts per forward pass; changes memory, not numbers")
    learning_rate: float = flag(7e-4, "peak, AdamW (paper: 1e-6, KodCode 5e-7)")
    schedule: str = flag("linear", "to zero: linear (paper, SLF5K) or cosine (the others)")
    max_grad_norm: float = flag(1.0, "gradient clip")
    max_skipped: int = flag(5, "end the run after so many harmful optimizer steps in a row were skipped")
    clip: float = flag(0.2, "ε of the clipped ratio (paper: .2)")
    value_clip: float = flag(0.2, "of the value's move from its old value (paper: .2)")
    value_coef: float = flag(0.1, "of the value loss (paper: .1)")
    entropy_coef: float = flag(0.0, "β of the entropy bonus; 0 as in the release, δ is dense enough")
    value_target: str = flag("gae", "gae: A + V, less noise, as the release; return: Alg. 4 l.24")
    value_grad_to_policy: bool = flag(False, "let the value loss shape the policy's adapter too (the release does)")
    lora_r: int = flag(16, "rank of the policy's adapter (paper: 16)")
    lora_alpha: float = flag(32, "the update is scaled by alpha / r (paper: 32)")
    lora_targets: str = flag("q_proj,v_proj", "layers that get the adapter")
    # Looking and keeping
    eval_rows: int = flag(200, "held-out prompts for the table before and after")
    show_every: int = flag(10, "iterations between sampled responses in the terminal")
    save_every: int = flag(20, "iterations between checkpoints")
    keep_checkpoints: int = flag(2, "how many of them stay, the newest")
    report_to: str = flag("none", "also send metrics to wandb, trackio or tensorboard, where installed")

    @property
    def reference(self) -> str | None:
        """The adapter of π_ref: the frozen SFT adapter where there is one, else the bare base."""
        return "reference" if self.adapter else None


_PAPER = dict(model="meta-llama/Llama-3.1-8B-Instruct", critic=None, temperature=0.6, annotated_rows=10000,
              iterations=1000, batch_size=64, rollout_batch_size=64, minibatch_size=64, micro_batch_size=1,
              learning_rate=1e-6, schedule="cosine", max_critique_tokens=768, kl_coef=0.05, kl_target=3.0, eval_rows=64)
PRESETS = {  # Table 10
    "toy": {},
    "slf5k": {**_PAPER, "output_dir": "runs/slf5k", "batch_size": 12, "minibatch_size": 12, "schedule": "linear",
              "kl_coef": 0.2, "kl_target": 6.0, "max_new_tokens": 89, "max_critique_tokens": 500,
              "annotated_rows": 5000},
    "ultrafeedback": {**_PAPER, "output_dir": "runs/ultrafeedback", "max_new_tokens": 512},
    "kodcode": {**_PAPER, "output_dir": "runs/kodcode", "max_new_tokens": 256, "learning_rate": 5e-7, "kl_coef": 0.07,
                "kl_target": 1.0},
}


# ── The equations ───────────────────────────────────────────────────────────────────────────────────────

def nl_gradient_loss(logprobs: Tensor, delta: Tensor, mask: Tensor) -> Tensor:
    """Its negative gradient is g_NL = Σ_t δ_t ∇_θ log π_θ(y_t | x, y_<t) (Definition 1), averaged over the batch.

    logprobs (nats), delta, mask: [B, T] → scalar. To be read and tested: Algorithm 4 puts A_t in the place of δ_t.
    """
    assert delta.shape == logprobs.shape == mask.shape, "Definition 1: one δ_t and one log π per token"
    return -(delta * logprobs * mask).sum() / len(logprobs)                    # Eq. §3.1 Definition 1; Eq. §3.5 g_NL


def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """A_t = Σ_{l=0}^{T−t} (γλ)^l td_error_{t+l},  td_error_t = r_t + γ V(y_<t+1) − V(y_<t)  (§3.5, Appendix A).

    rewards, values, mask: [B, T], right-padded → (advantages, returns = A + V), both 0 where mask is 0, not whitened.
    V after the last token is 0. λ = 1 gives Alg. 4 l.16's first form, Σ_k γ^{k−t} r_k − V.
    """
    assert rewards.shape == values.shape == mask.shape, "Eq. §3.5 GAE: r_t, V and the mask are [B, T]"
    advantages = torch.zeros_like(rewards)
    next_value = next_advantage = torch.zeros_like(rewards[:, 0])
    for t in reversed(range(rewards.shape[1])):
        td_error = rewards[:, t] + gamma * next_value - values[:, t]           # Alg. 4 l.15–16; Eq. §3.5 GAE
        next_advantage = (td_error + gamma * lam * next_advantage) * mask[:, t]
        advantages[:, t], next_value = next_advantage, values[:, t] * mask[:, t]
    return advantages, (advantages + values) * mask


def discounted_returns(rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """Σ_{k=t}^{T} γ^{k−t} r_k, the value target of Alg. 4 l.24: GAE with λ = 1 and no values. [B, T] → [B, T]"""
    return gae(rewards, torch.zeros_like(rewards), mask, gamma, 1.0)[0]


def whiten(x: Tensor, mask: Tensor) -> Tensor:
    """Mean 0 and variance 1 over the masked entries; 0 where mask is 0. Any shape. As the release; not in the paper."""
    wide, count = x.double(), mask.sum()                  # float32 would leave the mean's rounding over a tiny spread
    mean = (wide * mask).sum() / count
    variance = ((wide - mean) ** 2 * mask).sum() / count
    return ((wide - mean) * torch.rsqrt(variance + 1e-8) * mask).to(x.dtype)


def ppo_loss(logprobs: Tensor, logprobs_old: Tensor, advantages: Tensor, mask: Tensor, clip: float,
             count=None) -> Tensor:
    """−E_t[min(ρ_t A_t, clip(ρ_t, 1−ε, 1+ε) A_t)],  ρ_t = π_θ(y_t)/π_θold(y_t)  (§3.5, Alg. 4 l.22–23, 27).

    Log-probs in nats. Any shape → scalar. count: tokens to average over, where this is a part of a batch the whole's;
    default mask.sum().
    """
    ratio = torch.exp((logprobs - logprobs_old) * mask)                                      # Alg. 4 l.21–22
    gain = torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)  # Alg. 4 l.23; Eq. §3.5 PPO
    return -(gain * mask).sum() / (mask.sum() if count is None else count)


def value_loss(values: Tensor, values_old: Tensor, returns: Tensor, mask: Tensor, clip: float, count=None) -> Tensor:
    """½ E_t[max((V − R)², (clip(V, V_old ± clip) − R)²)] (Alg. 4 l.24, 28; the release clips). Any shape → scalar."""
    clipped = torch.clamp(values, values_old - clip, values_old + clip)
    error = torch.maximum((values - returns) ** 2, (clipped - returns) ** 2)                 # Alg. 4 l.24
    return 0.5 * (error * mask).sum() / (mask.sum() if count is None else count)


@dataclass
class AdaptiveKL:
    """The coefficient β of the KL penalty, steered to a target (Ziegler et al. 2019, §2.2; Appendix D.2 has targets).

    target: nats per response; 0 keeps β fixed. horizon: rollouts over which it adapts.
    """
    beta: float
    target: float
    horizon: int

    def update(self, kl: float, n: int):
        """kl: mean nats per response in the last batch; n: its rollouts. β moves by at most 20 % · n / horizon."""
        if self.target:
            error = min(max(kl / self.target - 1, -0.2), 0.2)
            self.beta *= 1 + error * n / self.horizon


# ── Rollouts (Algorithm 4, l.8–18) ─────────────────────────────────────────────────────────────────────

MAX_RATIO = 10                                                             # mean ρ_t over which a step is skipped
INPUTS = ("prompt_ids", "prompt_mask", "response_ids", "mask")             # what a forward pass takes


@dataclass
class Rollouts:
    """ℬ, one batch on its way through Alg. 4 l.8–18. mask is 1 on sampled tokens, EOS included.

    Tensors are [B, T], right-padded, where no other shape stands beside them; log-probs, entropy and KL are in nats.
    offsets: the characters [start, end) of its text that each token wrote.
    """
    prompts: list[str]
    texts: list[str]
    offsets: list[list[tuple[int, int]]]
    prompt_ids: Tensor                  # [B, P], left-padded
    prompt_mask: Tensor                 # [B, P]
    response_ids: Tensor                # [B, T]
    mask: Tensor                        # [B, T]
    feedback: list[Judgement] = field(default_factory=list)
    delta: Tensor | None = None         # δ'_t
    logprobs_old: Tensor | None = None  # log π_θold(y_t)
    entropy: Tensor | None = None       # H(π_θold(·|x, y_<t))
    kl: Tensor | None = None            # KL_t(π ‖ π_ref)
    values: Tensor | None = None        # V_ψ(x, y_<t)
    rewards: Tensor | None = None       # r_t = δ'_t + r_t^KL
    advantages: Tensor | None = None    # A_t, whitened
    returns: Tensor | None = None       # value targets
    rows: list[dict] = field(default_factory=list)     # as the data has them

    def part(self, index: list[int]) -> dict[str, Tensor]:
        """The tensors of some rows, [B, P] and [B, T] without the columns that are padding in all of them."""
        P, T = int(self.prompt_mask[index].sum(1).max()), int(self.mask[index].sum(1).max())
        tensors = {f.name: getattr(self, f.name) for f in fields(self) if isinstance(getattr(self, f.name), Tensor)}
        return {name: x[index][:, -P:] if name.startswith("prompt_") else x[index][:, :T] for name, x in tensors.items()}


def sample(model, tokenizer, prompt_ids, config: Config, adapter: str | None, uniforms: Tensor) -> list[list[int]]:
    """y ~ π(·|x) (Alg. 4 l.11) as ids; uniforms [B, max_new_tokens] in [0, 1): from which each token is drawn."""
    parts = zip(chunks(prompt_ids, config.rollout_batch_size), chunks(uniforms, config.rollout_batch_size))
    with use_lora(model, adapter):
        return [y for x, u in parts for y in generate(model, x, config.max_new_tokens, config.temperature,
                                                      eos_ids(tokenizer, model), tokenizer.pad_token_id, uniforms=u)]


def sample_rollouts(model, tokenizer, rows: list[dict], config: Config, adapter: str | None, generator) -> Rollouts:
    """y ~ π_θold(·|x) for every row (Alg. 4 l.9–11). The sampled ids are kept as they are; texts are for the critic."""
    prompts = [get_task(config.task).policy_prompt(row) for row in rows]
    prompt_ids = [encode_prompt(tokenizer, prompt) for prompt in prompts]
    uniforms = torch.rand(len(prompts), config.max_new_tokens, generator=generator)
    ids = everyone(sample(model, tokenizer, prompt_ids[RANK::RANKS], config, adapter, uniforms[RANK::RANKS]))  # Alg. 4 l.11
    texts, offsets = zip(*(token_offsets(tokenizer, y) for y in ids))
    assert [*map(len, offsets)] == [*map(len, ids)], "Alg. 4 l.11: every sampled y_t has its characters in y"
    padded = pad_batch(prompt_ids, ids, tokenizer.pad_token_id or 0, model.device)
    return Rollouts(prompts, list(texts), list(offsets), *padded, rows=rows)                 # Alg. 4 l.8


def add_feedback(rollouts: Rollouts, model, tokenizer, config: Config) -> int:
    """z' ~ R_φ(·|x, y), parsed to δ' (Alg. 4 l.12–13), or another design; returns the tokens that R_φ wrote for it."""
    verdicts, written = [], 0
    ids = [y[m.bool()].tolist() for y, m in zip(rollouts.response_ids, rollouts.mask)]
    shares = list(zip(rollouts.rows, rollouts.prompts, rollouts.texts, ids, rollouts.offsets))[RANK::RANKS]
    for part in chunks(shares, config.rollout_batch_size):
        judged, n = rewards.verdicts(model, tokenizer, config, *zip(*part))
        verdicts, written = verdicts + judged, written + n
    rollouts.feedback = everyone(verdicts)
    rollouts.delta = torch.zeros(rollouts.mask.shape, device=model.device)
    for row, (verdict, n) in enumerate(zip(rollouts.feedback, rollouts.mask.sum(1).tolist())):
        assert len(verdict.delta) == n, "Alg. 4 l.13: one δ'_t per sampled token, EOS included"
        rollouts.delta[row, :n] = torch.tensor(verdict.delta)
    return sum(everyone([written]))


@torch.no_grad()
def add_scores(rollouts: Rollouts, model, value_head, config: Config):
    """log π_θold, V_ψ, entropy and KL_t(π ‖ π_ref), [B, T], by training's forward pass (for Alg. 4 l.14, 16, 22).

    No weights are copied for π_θold (l.7): these log-probs are all that the update needs of it.
    """
    weight, scores = head_weight(model), torch.zeros(4, *rollouts.mask.shape, device=model.device)
    for index in chunks(by_length(rollouts.mask)[RANK::RANKS], config.micro_batch_size):
        part = rollouts.part(index)
        at = part["mask"].bool()
        T, targets = at.shape[1], part["response_ids"][at]
        inputs = [part[k] for k in INPUTS]
        with use_lora(model, "policy"):
            hidden = response_hidden(model, *inputs)[at]                                   # [N, H]
        with use_lora(model, config.reference):
            ref_hidden = response_hidden(model, *inputs)[at]
        logprobs, entropy = token_logprobs(hidden, weight, targets, config.temperature, with_entropy=True)  # Alg. 4 l.7
        kl = token_kl(hidden, ref_hidden, weight, config.temperature) if config.kl_estimator == "full" else \
            logprobs - token_logprobs(ref_hidden, weight, targets, config.temperature)
        full = torch.zeros(4, *at.shape, device=model.device)
        full[:, at] = torch.stack([logprobs, entropy, kl, value_head(hidden)])
        scores[:, index, :T] = full
    rollouts.logprobs_old, rollouts.entropy, rollouts.kl, rollouts.values = all_sum(scores)    # 0 in others' rows
    # Written so that NaN passes: such a step is skipped, counted and named by ppo_update.
    assert not rollouts.logprobs_old.max() > 1e-3, "Alg. 4 l.22: log π_θold(y_t) of a probability"
    assert config.kl_estimator == "k1" or not rollouts.kl.min() < -1e-2, "Alg. 4 l.14: KL(π ‖ π_ref) ≥ 0"


def add_advantages(rollouts: Rollouts, beta: float, config: Config):
    """r_t = δ'_t − β KL_t, then A_t by GAE, whitened, and the value targets (Alg. 4 l.14–16, 24)."""
    rollouts.rewards = (rollouts.delta - beta * rollouts.kl) * rollouts.mask       # Alg. 4 l.14; Eq. §3.5 total reward
    rollouts.advantages, rollouts.returns = gae(rollouts.rewards, rollouts.values, rollouts.mask,    # Alg. 4 l.17
                                                config.gamma, config.lam)
    if config.value_target == "return":
        rollouts.returns = discounted_returns(rollouts.rewards, rollouts.mask, config.gamma)     # Alg. 4 l.24
    last = rollouts.mask.sum(1, keepdim=True).long() - 1                                        # [B, 1]
    assert torch.allclose(rollouts.advantages.gather(1, last), (rollouts.rewards - rollouts.values).gather(1, last),
                          atol=1e-5, equal_nan=True), "Eq. §3.5 GAE: V = 0 after the last token, so A_T = r_T − V(y_<T)"
    rollouts.advantages = whiten(rollouts.advantages, rollouts.mask)      # not in the paper: the scale of δ drops out
    mean = (rollouts.advantages * rollouts.mask).sum() / rollouts.mask.sum()
    assert not abs(mean) > 1e-3, f"whitened advantages have mean 0 over the mask, not {mean}"


def by_length(mask: Tensor) -> list[int]:
    """Rows ordered by response length, so that a micro-batch holds little padding. mask: [B, T]"""
    return sorted(range(len(mask)), key=mask.sum(1).tolist().__getitem__)


# ── The update (Algorithm 4, l.19–32) ──────────────────────────────────────────────────────────────────

def ppo_update(rollouts: Rollouts, model, value_head, optimizer, config: Config, rng: random.Random) -> dict[str, float]:
    """Alg. 4 l.19–32: ppo_epochs passes over the batch in shuffled minibatches; returns means over the optimizer steps.

    A minibatch is dealt to the ranks and split into micro-batches, every one normalised by the token count of the whole
    minibatch, so neither the split nor the number of ranks changes the update. A step that would do harm is skipped and
    counted; raises InputError after --max_skipped in a row.
    """
    group, taken, skipped = optimizer.param_groups[0], [], 0
    for _ in range(config.ppo_epochs):                                                           # Alg. 4 l.19
        for rows in chunks(rng.sample(range(len(rollouts.mask)), len(rollouts.mask)), config.minibatch_size):  # Alg. 4 l.20
            step: dict[str, float] = {}
            rows = [rows[i] for i in by_length(rollouts.mask[rows])]
            for index in chunks(rows[RANK::RANKS], config.micro_batch_size):
                loss, stats = minibatch_loss(rollouts.part(index), model, value_head, config, rollouts.mask[rows].sum())
                loss.backward()
                step = {key: step.get(key, 0.0) + value for key, value in stats.items()}
            for p in group["params"]:
                all_sum(p.grad)
            step = dict(zip(step, all_sum(torch.tensor(list(step.values()), device=model.device)).tolist()))
            step["grad_norm"] = torch.nn.utils.clip_grad_norm_(group["params"], config.max_grad_norm).item()
            if all(map(math.isfinite, step.values())) and step["ratio"] <= MAX_RATIO:      # alike on every rank
                assert taken or skipped or model.dtype != torch.float32 or abs(step["ratio"] - 1) < 0.1, \
                    "Alg. 4 l.22: ρ_t = 1 until θ has moved"          # half precision rounds otherwise in other batches
                optimizer.step()                                                                 # Alg. 4 l.29–30
                taken.append(step)
                group["skipped"] = 0                    # in a row; with the optimizer, so that checkpoints hold it
            else:
                skipped, group["skipped"] = skipped + 1, group.get("skipped", 0) + 1
            optimizer.zero_grad()
            if group["skipped"] >= config.max_skipped:
                raise InputError(f"{group['skipped']} optimizer steps in a row were skipped, not finite or of a mean "
                                 f"ratio over {MAX_RATIO}; the last: {step}. Lower --learning_rate; last good checkpoint: "
                                 f"{[None, *checkpoints(Path(config.output_dir))][-1]}")
    means = {key: sum(s[key] for s in taken) / len(taken) if taken else None for key in step}
    return means | {"skipped_steps": skipped}


def minibatch_loss(part: dict[str, Tensor], model, value_head, config: Config, count) -> tuple[Tensor, dict]:
    """−L_CLIP − β H + c L_VF of some rollouts (Alg. 4 l.21–28), each a sum over their tokens divided by `count`.

    part: tensors [B, P] or [B, T] → (the loss, a scalar; what to log).
    """
    at = part["mask"].bool()
    old = {k: part[k][at] for k in ("response_ids", "logprobs_old", "advantages", "values", "returns", "mask")}  # [N]
    with use_lora(model, "policy"):
        hidden = response_hidden(model, *(part[k] for k in INPUTS))[at]                                     # [N, H]
    out = token_logprobs(hidden, head_weight(model), old["response_ids"], config.temperature, config.entropy_coef > 0)
    logprobs, entropy = out if config.entropy_coef > 0 else (out, None)
    values = value_head(hidden if config.value_grad_to_policy else hidden.detach())
    policy = ppo_loss(logprobs, old["logprobs_old"], old["advantages"], old["mask"], config.clip, count)
    value = value_loss(values, old["values"], old["returns"], old["mask"], config.value_clip, count)    # Alg. 4 l.28
    loss = policy + config.value_coef * value
    if entropy is not None:
        loss = loss - config.entropy_coef * entropy.sum() / count            # Alg. 4 l.25; Alg. 4 l.27; Eq. §3.5 PPO
    with torch.no_grad():
        log_ratio = logprobs - old["logprobs_old"]
        ratio = log_ratio.exp()
        stats = {"policy_loss": policy, "value_loss": value, "ratio": ratio.sum() / count,
                 "policy_kl": (ratio - 1 - log_ratio).sum() / count,           # KL(π_old ‖ π), k3: never negative
                 "clip_fraction": ((ratio - 1).abs() > config.clip).sum() / count,
                 "value_clip_fraction": ((values - old["values"]).abs() > config.value_clip).sum() / count}
    return loss, {k: v.item() for k, v in stats.items()}


# ── Phases 1 and 2 ─────────────────────────────────────────────────────────────────────────────────────

def split_data(config: Config) -> tuple[list[dict], list[dict]]:
    """(rows to train on, rows to judge by), disjoint (§4.1). Raises InputError where --data is missing or too short."""
    task = get_task(config.task)
    if config.data is None:
        if config.task != "toy":
            raise InputError(f"--task {config.task} needs --data rows.jsonl")
        return toy.rows("train", config.annotated_rows, config.seed), toy.rows("eval", config.eval_rows)
    rows = read_rows(config.data, task.needs)
    if len(rows) < 2:
        raise InputError(f"{config.data}: at least two rows are needed, one to train on and one to judge by")
    order = random.Random(config.seed).sample(rows, len(rows))
    held_out = min(config.eval_rows, max(1, len(rows) // 10))
    return order[held_out:], order[:held_out]


def fitting_rows(rows: list[dict], model, tokenizer, config: Config, source: str) -> list[dict]:
    """Rows whose prompt, response and critique fit the model; longer than --max_prompt_tokens are left out and counted.

    Raises InputError where none is left, or where a row would exceed the context.
    """
    task = get_task(config.task)
    lengths = [len(encode_prompt(tokenizer, task.policy_prompt(row))) for row in rows]
    kept = [(row, n) for row, n in zip(rows, lengths) if n <= (config.max_prompt_tokens or n)]
    if not kept:
        raise InputError(f"{source}: every prompt is longer than --max_prompt_tokens {config.max_prompt_tokens}")
    if len(kept) < len(rows):
        say(f"{source}: left out {len(rows) - len(kept)} of {len(rows)} rows, over {config.max_prompt_tokens} tokens")
    rows, lengths = map(list, zip(*kept))
    # R_φ reads the prompt and the response, and writes z: the longest sequence of the run.
    more = len(encode_prompt(tokenizer, reward_prompt("", ""))) + config.max_new_tokens + config.max_critique_tokens
    limit, worst = context_length(model), lengths.index(max(lengths))
    if lengths[worst] + more > limit:
        fitting = sum(n <= limit - more for n in lengths)
        remedy = f"set --max_prompt_tokens {limit - more} to keep the {fitting} rows that fit, or lower" if fitting else "lower"
        raise InputError(f"{source}, row {rows[worst].get('id', worst + 1)}: a prompt of {lengths[worst]} tokens, with its "
                         f"response and critique up to {lengths[worst] + more}, exceeds the context of {config.model} "
                         f"({limit}); {remedy} --max_new_tokens or --max_critique_tokens")
    return rows


def respond(model, tokenizer, rows: list[dict], config: Config) -> list[dict]:
    """Alg. 1 l.6: π_ref answers rows that bring no response; empty ones go. Raises InputError where none is left."""
    task, out = get_task(config.task), []
    mute = [row for row in rows if "response" not in row and not task.responses(row)]
    brought = [row for row in rows if "response" in row or task.responses(row)]
    generator = torch.Generator().manual_seed(config.seed)
    for part in tqdm(chunks(mute, 256), desc="respond", disable=not mute):
        ids = sample(model, tokenizer, [encode_prompt(tokenizer, task.policy_prompt(row)) for row in part], config,
                     config.reference, torch.rand(len(part), config.max_new_tokens, generator=generator))
        texts = [token_offsets(tokenizer, y)[0] for y in ids]
        out += [row | {"response": text} for row, text in zip(part, texts) if text.strip()]      # Alg. 1 l.6
    if len(out) < len(mute):
        say(f"left out {len(mute) - len(out)} of {len(mute)} sampled responses that are empty")
    if not brought and not out:
        raise InputError("every sampled response is empty: this model does not answer the prompts")
    return brought + out


def annotate_phase(model, tokenizer, rows: list[dict], config: Config, out: Path) -> str:
    """Phase 1 (Alg. 1 l.4–11): responses, critiques, spans → feedback.jsonl."""
    answered = out / "responses.jsonl"
    if not answered.exists():
        write_rows(answered, respond(model, tokenizer, rows[: config.annotated_rows], config))
    shared = ("task", "critic", "annotator_model", "base_url", "mode", "concurrency", "allow_code_execution",
              "unsafe_sandbox", "price_in", "price_out", "max_usd")
    return annotate(AnnotateConfig(data=str(answered), output=str(out / "feedback.jsonl"),
                                   **{name: getattr(config, name) for name in shared}))


def reward_phase(model, tokenizer, config: Config, out: Path) -> str:
    """Phase 2 (Alg. 1 l.13–14): R_φ from feedback.jsonl → reward/adapter. It keeps the preset of the task."""
    preset = {**REWARD_PRESETS[config.task], "max_critique_tokens": config.max_critique_tokens}
    metrics = fit(model, tokenizer, RewardConfig(**{                                             # Alg. 1 l.14
        **preset, "task": config.task, "model": config.model, "data": str(out / "feedback.jsonl"),
        "output_dir": str(out / "reward"), "seed": config.seed, "micro_batch_size": config.micro_batch_size}))
    if metrics.get("unparseable", 0) > 0.5:
        say(f"warning: of R_φ's critiques of held-out rows {metrics['unparseable']:.0%} cannot be read; δ is 0 there, and "
            f"phase 3 learns nothing from them. More rows or epochs may help: train it alone with reward_model.py")
    return summary(metrics)


# ── Phase 3 ─────────────────────────────────────────────────────────────────────────────────────────────

def evaluate_policy(model, tokenizer, rows: list[dict], config: Config, adapter: str | None,
                    sampler=sample_rollouts) -> tuple[dict, list[dict]]:
    """Held-out rows: a sampled response each, judged as --reward says; in the toy world also by facts. (means, samples)"""
    generator, scores, samples = torch.Generator().manual_seed(config.seed), [], []
    for part in tqdm(chunks(rows, config.batch_size), desc="evaluate", disable=RANK > 0):
        rollouts = sampler(model, tokenizer, part, config, adapter, generator)
        add_feedback(rollouts, model, tokenizer, config)
        samples += [{"id": row.get("id"), **sample_row(rollouts, i)} for i, row in enumerate(part)]
        for row, text, verdict in zip(part, rollouts.texts, rollouts.feedback):
            delta, n = verdict.delta, max(1, len(verdict.delta))
            scores.append({"fact accuracy": toy.fact_accuracy(row, text)} if config.task == "toy" else {})
            if config.reward != "none":
                scores[-1] |= {f"mean δ per token, by {rewards.JUDGES[config.reward]}": sum(delta) / n,
                               "tokens in good spans": sum(d > 0 for d in delta) / n,
                               "tokens in poor spans": sum(d < 0 for d in delta) / n,
                               "unparseable critiques": float(bool(verdict.reason))}
            scores[-1]["response tokens"] = float(len(delta))
    return {key: sum(score[key] for score in scores) / len(scores) for key in scores[0]}, samples


def batch_prompts(prompts: list, config: Config, iteration: int) -> list:
    """The prompts (or rows) of one iteration: a walk through shuffled passes over all of them, a function of the seed."""
    places = range(iteration * config.batch_size, (iteration + 1) * config.batch_size)
    passes = {place // len(prompts) for place in places}
    order = {e: random.Random(f"{config.seed}-{e}").sample(prompts, len(prompts)) for e in passes}
    return [order[place // len(prompts)][place % len(prompts)] for place in places]              # Alg. 4 l.9–10


def learning_rate(config: Config, iteration: int) -> float:
    """Linear or cosine decay to zero over the run (Appendix D.2)."""
    left = 1 - iteration / config.iterations
    return config.learning_rate * (left if config.schedule == "linear" else 0.5 * (1 - math.cos(math.pi * left)))


def batch_metrics(rollouts: Rollouts, written: int) -> dict[str, float]:
    """What one batch looked like: shares, nats of KL per response, … written: the tokens of all its critiques."""
    at, rows, judged = rollouts.mask.bool(), len(rollouts.mask), rollouts.feedback
    tensors = (rollouts.delta, rollouts.returns, rollouts.values, rollouts.kl, rollouts.entropy)
    delta, returns, values, kl, entropy = (x[at].double() for x in tensors)
    means = {"delta": delta, "labelled": delta != 0, "good": delta > 0, "poor": delta < 0, "entropy": entropy}
    quotes = max(1, sum(v.quotes for v in judged))
    variance, unexplained = (x.var(correction=0).item() for x in (returns, returns - values))
    return {**{name: x.double().mean().item() for name, x in means.items()}, "kl": kl.sum().item() / rows,
            "tokens": len(delta), "response_tokens": len(delta) / rows, "critique_tokens": written / rows,
            "explained_variance": 1 - unexplained / variance if variance > 1e-12 else 0.0,
            "unparseable": sum(bool(v.reason) for v in judged) / rows,
            "unmatched": sum(v.unmatched for v in judged) / quotes,
            "ambiguous": sum(v.ambiguous for v in judged) / quotes,
            "conflicting_tokens": sum(v.conflicts for v in judged)}


def one_iteration(model, tokenizer, value_head, optimizer, kl: AdaptiveKL, rows, config: Config, iteration: int):
    """Alg. 4 l.7–32, once; draws depend on (seed, iteration) alone. kl: β, moved by the batch's nats per response."""
    seed, seconds = config.seed * 1_000_003 + iteration, {}
    generator, rng = torch.Generator().manual_seed(seed), random.Random(seed)
    optimizer.param_groups[0]["lr"] = learning_rate(config, iteration)
    drawn = batch_prompts(rows, config, iteration)
    with gathered(model):                                   # a sharded base is put together once, not for every token
        with timed("rollout", seconds, "--rollout_batch_size or --max_new_tokens"):
            rollouts = sample_rollouts(model, tokenizer, drawn, config, "policy", generator)
        with timed("critique", seconds, "--rollout_batch_size or --max_critique_tokens"):
            written = add_feedback(rollouts, model, tokenizer, config)
        with timed("score", seconds, "--micro_batch_size, or set --shard"):
            add_scores(rollouts, model, value_head, config)
            add_advantages(rollouts, kl.beta, config)
    with timed("update", seconds, "--micro_batch_size, or set --activation_checkpointing or --shard"):
        stats = ppo_update(rollouts, model, value_head, optimizer, config, rng)
    metrics = {"iteration": iteration + 1, **batch_metrics(rollouts, written), **stats, "kl_coef": kl.beta,
               "learning_rate": learning_rate(config, iteration)} | {f"seconds_{k}": s for k, s in seconds.items()}
    if config.task == "toy":                                # the truth, which no reward design looks at
        metrics["fact_accuracy"] = sum(map(toy.fact_accuracy, drawn, rollouts.texts)) / len(drawn)
    kl.update(metrics["kl"], config.batch_size)
    metrics["tokens_per_second"] = (metrics["tokens"] + written) / sum(seconds.values())
    return rollouts, metrics


def sample_row(rollouts: Rollouts, row: int) -> dict:
    """One rollout for people to look at: every token with its δ and, where there are any, its (whitened) A_t."""
    verdict, text, offsets = rollouts.feedback[row], rollouts.texts[row], rollouts.offsets[row]
    found = {} if rollouts.advantages is None else {
        "advantage": [round(a, 4) for a in rollouts.advantages[row, : len(offsets)].tolist()]}
    return {"prompt": rollouts.prompts[row], "response": text, "critique": verdict.critique,
            "unreadable": verdict.reason, "tokens": split_text(text, offsets), "delta": verdict.delta, **found}


# ── Checkpoints: all that the next iteration depends on ────────────────────────────────────────────────

def training_state(optimizer) -> dict[str, Tensor]:
    """What the next iteration depends on, any shape: adapter and value head in a fixed order, and AdamW's of each."""
    return {f"{i}.{name}": tensor for i, p in enumerate(optimizer.param_groups[0]["params"])
            for name, tensor in {"parameter": p.data, **optimizer.state[p]}.items()}


def restore(optimizer, kl: AdaptiveKL, out: Path, settings: dict) -> int:
    """Go back to the newest checkpoint, if there is one; returns the number of iterations done.

    kl takes up its β (its target is in nats per response). Raises InputError where the checkpoint was made with other
    settings, on another base or for another LoRA shape, or where the ranks see different ones.
    """
    path, tensors, state = newest_checkpoint(out, warn=say)
    if len(set(everyone([path]))) > 1:
        raise InputError(f"{out}: the ranks see different checkpoints; it must lie on a disk that all nodes share")
    if path is None:
        return 0
    if differences := changed(state.get("settings", {}), settings):
        raise InputError(f"{path} was made with other settings ({differences}); choose another --output_dir")
    if state["ranks"] != RANKS:
        say(f"{path} was made on {state['ranks']} ranks, this run has {RANKS}: sums are taken in another order, so the "
            f"run is not bit-exact from here on")
    for name, tensor in tensors.items():
        i, key = name.split(".")
        p = optimizer.param_groups[0]["params"][int(i)]
        if key == "parameter":
            p.data.copy_(tensor)
        else:
            optimizer.state[p][key] = tensor.to(p.device)
    kl.beta, optimizer.param_groups[0]["skipped"] = state["kl_coef"], state["skipped"]
    say(f"phase 3: resumed after iteration {state['iteration']} from {path}")
    return state["iteration"]


def policy_phase(model, tokenizer, rows: list[dict], config: Config, out: Path, value_head, settings: dict) -> str:
    """Phase 3 (Alg. 1 l.18, Alg. 4 l.6–33): train the adapter "policy" and the value head."""
    optimizer = torch.optim.AdamW([*lora_parameters(model, "policy"), *value_head.parameters()],
                                  lr=config.learning_rate, weight_decay=0.0, fused=model.device.type == "cuda")
    kl = AdaptiveKL(config.kl_coef, config.kl_target, config.kl_horizon)
    start = restore(optimizer, kl, out, settings)
    if RANK == 0:
        for path in (out / "metrics.jsonl", out / "samples.jsonl"):    # drop what came after it, and a torn line
            lines = path.read_text("utf-8").split("\n")[:-1] if path.exists() else []
            write_rows(path, [row for row in map(json.loads, lines) if row["iteration"] <= start])
    tracker = Tracker(config.report_to if RANK == 0 else "none", out, public(asdict(config)), start + 1, warn=say)
    asked: list[int] = []                            # SIGTERM asks for an end after the iteration under way
    before = signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))
    bar = tqdm(range(start, config.iterations), desc="policy", initial=start, total=config.iterations,
               disable=RANK > 0)
    for iteration in bar:                                                                        # Alg. 4 l.6
        rollouts, metrics = one_iteration(model, tokenizer, value_head, optimizer, kl, rows, config, iteration)
        done, stop = iteration + 1, any(everyone([bool(asked)]))
        if RANK == 0:
            bar.set_postfix(delta=f"{metrics['delta']:+.3f}", kl=f"{metrics['kl']:.2f}", poor=f"{metrics['poor']:.1%}")
            sample = {"iteration": done, **sample_row(rollouts, iteration % len(rollouts.texts))}
            log(out / "metrics.jsonl", metrics)
            tracker.log(metrics)
            log(out / "samples.jsonl", sample)
            if iteration % config.show_every == 0 or done == config.iterations:
                say(f"{done:4d}  {colour_tokens(sample['tokens'], sample['delta'])}")
            if done % config.save_every == 0 or done == config.iterations or stop:
                keep_checkpoint(out, training_state(optimizer), {
                    "iteration": done, "kl_coef": kl.beta, "skipped": optimizer.param_groups[0]["skipped"],
                    "ranks": RANKS, "settings": settings}, config.keep_checkpoints)
        if stop:
            if RANK == 0:
                run_report(out)
            tracker.finish()
            say(f"stopped by SIGTERM: checkpoint-{done} is saved in {out}, and the same command goes on from it")
            sys.exit(0)
    tracker.finish()
    signal.signal(signal.SIGTERM, before)
    return f"{config.iterations} iterations of {config.batch_size} rollouts"


# ── Command line ────────────────────────────────────────────────────────────────────────────────────────

_CHOICES = {"kl_estimator": ("full", "k1"), "schedule": ("linear", "cosine"), "value_target": ("gae", "return"),
            "weighting": WEIGHTINGS, "dtype": (None, "bfloat16", "float16", "float32"),
            "report_to": TRACKERS, "reward": tuple(rewards.JUDGES)}


def check_config(config: Config):
    """Raises InputError for a flag whose value cannot be used."""
    for name, allowed in _CHOICES.items():
        if getattr(config, name) not in allowed:
            raise InputError(f"--{name} {getattr(config, name)}: it is one of {', '.join(allowed)}")
    for name in ("batch_size", "minibatch_size"):
        if getattr(config, name) % RANKS or getattr(config, name) < 1:
            raise InputError(f"--{name} {getattr(config, name)} must be a positive multiple of the {RANKS} ranks")
    for name in ("iterations", "micro_batch_size", "max_new_tokens", "max_critique_tokens", "ppo_epochs", "eval_rows",
                 "annotated_rows", "show_every", "save_every", "keep_checkpoints", "max_skipped", "rollout_batch_size",
                 "critique_samples"):
        if getattr(config, name) < 1:
            raise InputError(f"--{name} {getattr(config, name)}: it must be at least 1")
    if config.shard and RANKS == 1:
        raise InputError("--shard spreads the base over ranks, and this is one alone: use torchrun --nproc_per_node N")
    if config.reward.startswith("true") and not config.critic:
        raise InputError(f"--reward {config.reward} needs --critic module:function, which judges every rollout")
    if config.reward in rewards.SCORED and not config.reward_model:
        raise InputError(f"--reward {config.reward} needs --reward_model, an adapter that baselines.py has trained")
    for name in ("price_in", "price_out", "max_usd"):
        if (value := getattr(config, name)) is not None and not 0 <= value < math.inf:
            raise InputError(f"--{name} {value}: it is an amount of USD, at least 0")
    if config.max_usd is not None and (config.critic or None in (config.price_in, config.price_out)):
        raise InputError(f"--max_usd bounds what a server's model costs: it needs --price_in and --price_out, in USD per "
                         f"million tokens, and no --critic ({config.critic})")
    if config.temperature <= 0:
        raise InputError(f"--temperature {config.temperature}: it must be above 0, rollouts are sampled")
    if config.report_to != "none":
        tracker_module(config.report_to)


def optimise(model, tokenizer, train_rows, eval_rows, config: Config, out: Path):
    """Phase 3 (Alg. 1 l.16–19) between two evaluations; writes policy/, value_head.safetensors and result.json."""
    before_file = out / "before.json"
    if not everyone([before_file.exists()])[0]:
        before, samples = evaluate_policy(model, tokenizer, eval_rows, config, config.reference)
        if RANK == 0:
            write_rows(out / "before_samples.jsonl", samples)
            write_rows(before_file, [before])              # last: its presence says that both are there
    torch.manual_seed(config.seed)
    if config.adapter:
        load_lora(model, "policy", config.adapter)
    else:
        add_lora(model, "policy", config.lora_r, config.lora_alpha, 0.0, config.lora_targets.split(","))
    value_head = ValueHead(model.config.hidden_size, model.device)                               # Alg. 1 l.17; Alg. 4 l.5
    shapes = [list(p.shape) for p in lora_parameters(model, "policy")]
    settings, started = {"base": fingerprint(model), "lora_shapes": shapes, **public(asdict(config))}, time.time()
    if config.shard:
        shard(model)
    summary = policy_phase(model, tokenizer, train_rows, config, out, value_head, settings)      # Alg. 1 l.18
    with gathered(model):
        after, samples = evaluate_policy(model, tokenizer, eval_rows, config, "policy")
    if RANK == 0:
        save_lora(model, "policy", out / "policy")                                               # Alg. 1 l.19; Alg. 4 l.33
        save_file(value_head.state_dict(), out / "value_head.safetensors")
        write_rows(out / "after_samples.jsonl", samples)
        write_rows(out / "result.json", [{"before": json.loads(before_file.read_text("utf-8")), "after": after,
                                          "seconds_policy": time.time() - started}])
    return summary


def prepare(config: Config, device):
    """The base, its tokenizer, the rows to train on and those to judge by; the reference is loaded.

    Raises InputError where --max_prompt_tokens leaves one of the two without rows.
    """
    train_rows, eval_rows = split_data(config)
    model, tokenizer = load_model(config.model, config.dtype or ("bfloat16" if device.type == "cuda" else None), device)
    if config.activation_checkpointing:
        checkpoint_activations(model)
    source = config.data or "toy rows"
    fits = {id(row) for row in fitting_rows([*train_rows, *eval_rows], model, tokenizer, config, source)}
    train_rows, eval_rows = ([row for row in rows if id(row) in fits] for rows in (train_rows, eval_rows))
    if not train_rows or not eval_rows:
        raise InputError(f"{source}: no row is left to {'judge by' if train_rows else 'train on'} that has at most "
                         f"--max_prompt_tokens {config.max_prompt_tokens}; another --seed splits the rows anew")
    if config.reference:
        load_lora(model, config.reference, config.adapter)
    return model, tokenizer, train_rows, eval_rows


def show_result(result: dict, n: int) -> str:
    """The table before and after."""
    return table([f"{n} held-out prompts", "before", "after"],
                 [[key, value, result["after"][key]] for key, value in result["before"].items()])


def main():
    """Algorithm 1: annotate, train R_φ, optimise the policy."""
    config = parse_config(Config, PRESETS, sys.argv[1:], __doc__)
    device = start_ranks(config.rank_timeout)
    check_config(config)
    out, started = open_run(config), time.time()
    with forgotten_if_it_fails(out):
        model, tokenizer, train_rows, eval_rows = prepare(config, device)
    say(f"Text2Grad on {config.task}: {config.model}, {len(train_rows)} training prompts, {device}; files in {out}/")
    note_machine(out, device)
    if config.reward_model is None and config.reward in rewards.LEARNT:
        phase("phase 1, annotate", out / "feedback.jsonl", out,
              lambda: annotate_phase(model, tokenizer, train_rows, config, out))
        phase("phase 2, reward model", out / "reward" / "metrics.json", out,
              lambda: reward_phase(model, tokenizer, config, out))
    if not lora_parameters(model, "reward") and config.reward in rewards.LEARNT + rewards.SCORED:     # who need an R_φ
        load_lora(model, "reward", config.reward_model or out / "reward" / "adapter")
    phase("phase 3, policy", out / "result.json", out,
          lambda: optimise(model, tokenizer, train_rows, eval_rows, config, out), ranks="all")
    if RANK == 0:
        print(show_result(json.loads((out / "result.json").read_text("utf-8")), len(eval_rows)))
        page = run_report(out)
        adapters = " and ".join(f"{name}/" for name in ("policy", "reward/adapter") if (out / name).exists())
        print(f"\n{time.time() - started:.0f} s in all. Look at {page}. In {out}/: {adapters} (PEFT format), "
              f"metrics.jsonl, samples.jsonl.\n"
              f"next: the same command with --seed {config.seed + 1} --output_dir {out}-seed{config.seed + 1}, or your own "
              f"rows and model:\n"
              f"      python text2grad.py --task slf5k --model MODEL --data rows.jsonl --annotator_model gpt-4o")
    together(dist.destroy_process_group)


if __name__ == "__main__":
    run(main, "text2grad", (ModelError, ReportError, SafetensorError, SandboxError, torch.OutOfMemoryError))
