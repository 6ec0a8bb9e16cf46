"""Text2Grad: reinforcement learning from natural-language feedback (arXiv 2505.22338).

    python text2grad.py                              # all three phases on the toy world
    torchrun --nproc_per_node 8 text2grad.py --task slf5k --data slf5k.jsonl \\
             --model meta-llama/Llama-3.1-8B-Instruct --batch_size 96 --minibatch_size 96

    y ~ π_θ(·|x)   z' ~ R_φ(·|x, y)   δ' from the spans of z'   r_t = δ'_t + r_t^KL   GAE   PPO

Read `train` first: it is Algorithm 4, line by line. The functions above it are its steps.
`main` is Algorithm 1. The same command continues a run that was stopped.

Departures. Corrected errors of the paper: the loss is −L_CLIP − β H. The sum of GAE ends at
T − t, and V is 0 after the last token. The paper has two δ_t; here they are `delta` and
`td_error`. Taken from the release: A_t is whitened over the batch, the value loss is halved and
clipped, and θ and ψ share one gradient clip. Our own: R_φ writes z' greedily. A harmful
optimizer step is skipped and counted. r_t^KL is the log-ratio of the sampled token. The release
uses the exact KL_t as a reward, whose policy gradient is not −∇KL.

Shapes: B rows, P prompt tokens (padded left), T response tokens (padded right), N tokens of a
flat batch, H hidden size. Each rank samples, judges and trains on rows [RANK::WORLD_SIZE], and
every rank holds the full batch. Every random draw depends only on (seed, iteration, row). On a
CPU, an interrupted run that continues ends with bit-identical weights. A GPU does not guarantee
this.
"""

import math
import random
from collections import Counter
from dataclasses import dataclass, field, fields, replace
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from annotate import (AnnotateConfig, AnnotatorConfig, annotate, annotation_question,
                      ask_annotator, check_annotator, ground, token_offsets, token_rewards)
from ask import Journal
from data import (TASKS, InputError, chunks, examples, flag, get_task, parse_flags,
                  prompt_text, read_rows, run_script, whole_rows, write_rows)
from model import (BaseConfig, ValueHead, add_lora, drop_long_rows, encode_prompt, eos_ids,
                   gathered, load_base, load_lora, lora_parameters, response_hidden, save_lora,
                   scaled_rate, target_layers, use_lora)
from report import batch_metrics, colour_tokens, print_result, sample_row, score_response
from reward_model import (Judgement, RewardConfig, count_tokens, fit, judge, reward_preset,
                          split_rows, summary, token_figures, write_critiques)
from runtime import (RANK, WORLD_SIZE, Timer, all_sum, check_settings, gather_rows,
                     keep_checkpoint, lock_directory, newest_checkpoint, on_rank0,
                     optimizer_parameters, policy_settings, print_rank0, restore_optimizer,
                     result_exists, reward_model_hint, run_collective, run_phase, save_settings,
                     start_ranks, write_metrics)
from sampling import generate, head_weight, pad_batch, token_entropy, token_logprobs


@dataclass
class Config(AnnotatorConfig, BaseConfig):
    """Defaults suit the toy task; --task sets the values of the release (Table 10)."""
    data: str | None = flag(None, "training rows as JSON lines; None: the toy world makes them")
    output_dir: str = flag("runs/toy", "run directory: adapters, metrics, samples, report")
    annotator_function: str | None = flag(
        "toy:critique", "local annotator as module:function; None: a server")
    reward_model: str | None = flag(None, "adapter of R_φ; None: phases 1 and 2 train it")
    iterations: int | None = flag(25, "iterations of Algorithm 4; None: from the rows", least=1)
    learning_rate: float | None = flag(
        1e-3, "peak rate, AdamW (release: 1e-6, KodCode 5e-7); None: from the model", most=10)
    adapter: str | None = flag(
        None, "SFT adapter: initial policy and reference; None: the bare base")
    reward_learning_rate: float | None = flag(
        None, "peak rate of R_φ; None: the task's, or from the model", most=10)
    reward_epochs: int | None = flag(
        None, "passes of R_φ; None: the task's, or from the rows", least=1)
    reward_lora_targets: str | None = flag(
        None, "layers of R_φ with an adapter; None: the task's, or all")
    annotated_rows: int = flag(3000, "rows for phases 1 and 2 (paper: 5000, 10000)", least=1)
    allow_code_execution: bool = flag(False, "kodcode: run responses with their tests")
    batch_size: int | None = flag(
        64, "rollouts per iteration, all ranks (release: 12, 64); None: from the rows", least=1)
    responses_per_prompt: int = flag(1, "rollouts per prompt; must divide batch_size", least=1)
    temperature: float = flag(1.0, "sampling temperature of π (release: .6)", least=0.01)
    max_prompt_tokens: int | None = flag(
        None, "longest prompt in tokens; longer ones are dropped", least=1)
    max_new_tokens: int = flag(32, "tokens of a response (release: 89, 256, 512)", least=1)
    kl_coef: float = flag(0.5, "initial KL coefficient β (release: .2, .07, .05)")
    kl_target: float = flag(2.0, "target KL per response, nats (release: 6, 1, 3); 0: fixed β")
    kl_horizon: int | None = flag(
        None, "rollouts in which β adapts (release: 10000); None: a tenth of the run", least=1)
    gamma: float = flag(1.0, "discount γ (release: 1)", most=1)
    lam: float = flag(0.95, "GAE λ (release: .95)", most=1)
    ppo_epochs: int = flag(4, "passes over each batch (release: 4)", least=1)
    minibatch_size: int | None = flag(
        64, "rollouts per optimizer step, all ranks; None: half a batch", least=1)
    schedule: str = flag("linear", "learning rate decay (release: both)", ("linear", "cosine"))
    clip: float = flag(0.2, "PPO clip range ε (release: .2)")
    value_learning_rate: float | None = flag(
        7e-3, "peak rate of the value head; None: the policy's (release)", most=10)
    value_clip: float = flag(5.0, "clip range of the value loss (release: .2)")
    value_coef: float = flag(0.1, "weight of the value loss (release: .1)")
    value_target: str = flag(
        "gae", "target of V: gae is A + V, return is Alg. 4 l.24", ("gae", "return"))
    entropy_coef: float = flag(0.0, "weight β of the entropy bonus (release: 0)")
    lora_r: int = flag(16, "rank of the policy's adapter (release: 16)", least=1, most=10**4)
    lora_alpha: float = flag(32, "LoRA alpha; the update is scaled by alpha / r (release: 32)")
    lora_targets: str = flag("q_proj,v_proj", "layers with an adapter, comma-separated")
    eval_rows: int = flag(200, "held-out prompts for the table before and after", least=1)
    micro_batch_size: int = flag(64, "rollouts per forward pass", least=1)
    rollout_batch_size: int = flag(256, "texts that a rank decodes together", least=1)
    rank_timeout: float = flag(30.0, "timeout of collective operations in minutes", least=0.01)
    save_every: int = flag(20, "iterations between checkpoints", least=1)
    probe_rows: int = flag(64, "rollouts also scored by the annotator, ten times per run")
    wandb: str | None = flag(None, "Weights & Biases project for the metrics; None: no upload")

    GROUPS = {"task": "start here", "max_critique_tokens": "rollouts and rewards",
              "dtype": "the machine", "annotator_model": "start here",
              "mode": "phases 1 and 2", "data": "start here", "adapter": "phases 1 and 2",
              "batch_size": "rollouts and rewards", "ppo_epochs": "the update",
              "micro_batch_size": "the machine"}

    @property
    def reference(self) -> str | None:
        """The adapter of π_ref: the frozen SFT adapter, or None for the bare base."""
        return "reference" if self.adapter else None


PAPER = dict(
    iterations=None,
    model="meta-llama/Llama-3.1-8B-Instruct",
    annotator_function=None,
    temperature=0.6,
    probe_rows=0,
    annotated_rows=10000,
    rollout_batch_size=64,
    micro_batch_size=1,
    learning_rate=1e-6,
    schedule="cosine",
    kl_coef=0.05,
    kl_target=3.0,
    kl_horizon=10_000,
    eval_rows=64,
    max_new_tokens=512,
    max_critique_tokens=768,
    value_learning_rate=None,
    value_clip=0.2,
)


# An own task replaces these settings of the release, which suit only an 8B model and thousands
# of rows. None: `fit_to_rows` derives the value.
OWN = dict(
    batch_size=None,
    minibatch_size=None,
    learning_rate=None,
    ppo_epochs=2,
    lora_targets="q_proj,k_proj,v_proj,o_proj",
    value_clip=5.0,
    kl_horizon=None,
    micro_batch_size=4,
    max_new_tokens=128,
    max_critique_tokens=256,
)


def preset(task: str) -> dict:
    """Defaults of a task: the release's common values, then the task's own (Table 10)."""
    if task == "toy":
        return {}                                       # the defaults of Config
    custom = get_task(task)
    common = PAPER if task in TASKS else PAPER | OWN
    return common | {"output_dir": f"runs/{custom.name}"} | custom.policy


def fit_to_rows(config: Config, count: int, model) -> Config:
    """Derive the settings that are None from the number of rows and the size of the model."""
    unit = math.lcm(WORLD_SIZE, config.responses_per_prompt)
    batch_size = config.batch_size or -(-(64 if count >= 1000 else 16) // unit) * unit
    passes = 4 if config.task in TASKS else 1             # over the rows; 4 as in the release
    iterations = config.iterations or min(6000, max(12, passes * count // batch_size))
    minibatch_size = config.minibatch_size or max(1, batch_size // 2 // WORLD_SIZE) * WORLD_SIZE
    learning_rate = config.learning_rate
    value_learning_rate = config.value_learning_rate
    if value_learning_rate is None:
        value_learning_rate = learning_rate               # the policy's, as in the release
    if learning_rate is None:
        learning_rate = scaled_rate(model, 2e-3)
    if value_learning_rate is None:
        value_learning_rate = 10 * learning_rate
    return replace(config, batch_size=batch_size, iterations=iterations,
                   minibatch_size=minibatch_size, learning_rate=learning_rate,
                   value_learning_rate=value_learning_rate)


# ── The equations

def nl_gradient_loss(logprobs: Tensor, delta: Tensor, mask: Tensor) -> Tensor:
    """Surrogate loss; its negative gradient is g_NL = Σ_t δ_t ∇_θ log π_θ(y_t | x, y_<t).

    Definition 1 (§3.1), §3.5. All arguments are [B, T]; the loss is a scalar, averaged over the
    batch. Algorithm 4 uses A_t instead of δ_t.
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
    """Scale to mean 0 and variance 1 over the mask, as the release does. [B, T] → [B, T]"""
    wide = x.double()                 # float32 would leave rounding error over a tiny spread
    count = mask.sum()
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


@dataclass
class AdaptiveKL:
    """KL coefficient β, adapted to a target KL per response (Ziegler et al. 2019, §2.2).

    An update changes β by 20 % at most, even if a batch is larger than the horizon.
    """
    beta: float
    target: float                         # nats per response; 0: β is fixed
    horizon: int                          # number of rollouts over which β adapts

    def update(self, kl: float, n: int):
        """kl: mean KL per response of the last batch, in nats; n: number of its rollouts."""
        if self.target and math.isfinite(kl):
            error = min(max(kl / self.target - 1, -0.2), 0.2)
            self.beta *= 1 + error * min(1, n / self.horizon)
        assert self.beta >= 0, "Alg. 4 l.14: the KL term is a penalty"


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
    feedback: list[Judgement] = field(default_factory=list)
    delta: Tensor = None              # δ'_t
    logprobs_old: Tensor = None       # log π_θold(y_t)
    entropy: Tensor = None            # H(π_θold(·|x, y_<t))
    logprobs_ref: Tensor = None       # log π_ref(y_t)
    values: Tensor = None             # V_ψ(x, y_<t)
    rewards: Tensor = None            # r_t = δ'_t + r_t^KL
    advantages: Tensor = None         # A_t, whitened
    returns: Tensor = None            # targets of V
    truncated: list[bool] = field(default_factory=list)       # no EOS within max_new_tokens

    def part(self, index: list[int]) -> dict[str, Tensor]:
        """The tensors of some rows, [B, P] and [B, T], without columns that are all padding.

        "sampled" holds the indices, [N], of the sampled tokens in a flat [B · T].
        """
        P = int(self.prompt_mask[index].sum(1).max())
        T = int(self.mask[index].sum(1).max())
        part = {}
        for name, x in vars(self).items():
            if isinstance(x, Tensor):
                is_prompt = name.startswith("prompt_")
                part[name] = x[index][:, -P:] if is_prompt else x[index][:, :T]
        part["sampled"] = part["mask"].flatten().nonzero().squeeze(1)
        return part

    def by_length(self, index) -> list[int]:
        """Rows by response length, so that a micro-batch holds little padding."""
        lengths = self.mask.sum(1).tolist()
        return sorted(index, key=lengths.__getitem__)


def sample_rollouts(model, tokenizer, rows, config: Config, adapter, generator) -> Rollouts:
    """y ~ π(·|x) for every row (Alg. 4 l.8–11). The critic reads the texts only."""
    prompts = [get_task(config.task).policy_prompt(row) for row in rows]
    prompt_ids = [encode_prompt(tokenizer, prompt) for prompt in prompts]
    prompts = [prompt_text(prompt) for prompt in prompts]
    uniforms = torch.rand(len(rows), config.max_new_tokens, generator=generator)
    eos = eos_ids(tokenizer, model)
    ids = []
    with use_lora(model, adapter, merge=True):
        for part in chunks(range(RANK, len(rows), WORLD_SIZE), config.rollout_batch_size):
            part_prompts = [prompt_ids[i] for i in part]
            ids += generate(model, part_prompts, config.max_new_tokens, config.temperature, eos,
                            uniforms=uniforms[list(part)])                               # l.11
    ids = gather_rows(ids)
    truncated = [y[-1] not in eos for y in ids]
    assert all(len(y) == config.max_new_tokens for y, cut in zip(ids, truncated) if cut), \
        "Alg. 4 l.11: y ends with its EOS, or is cut off"
    texts, offsets = zip(*(token_offsets(tokenizer, y) for y in ids))
    assert [*map(len, offsets)] == [*map(len, ids)], "Alg. 4 l.11: each y_t has its characters"
    padded = pad_batch(prompt_ids, ids, model.device)
    return Rollouts(rows, prompts, list(texts), list(offsets), *padded,                  # l.8
                    truncated=truncated)


def reward_model_critic(rollouts: Rollouts, model, tokenizer, config) -> list[Judgement]:
    """z' ~ R_φ(·|x, y) and its δ' (Alg. 4 l.12–13) for this rank's rows: the paper's critic.

    `train` and `evaluate` accept any such function; experiments/designs.py has others.
    """
    repeats_are_poor = get_task(config.task).repeats_are_poor
    judgements = []
    triples = [*zip(rollouts.prompts, rollouts.texts, rollouts.offsets)]
    for part in chunks(triples[RANK::WORLD_SIZE], config.rollout_batch_size):
        prompts, texts, _ = zip(*part)
        critiques = write_critiques(model, tokenizer, prompts, texts,                    # l.12
                                    config.max_critique_tokens)
        for z, (_, text, offsets) in zip(critiques, part):
            judgements.append(judge(z, text, offsets, repeats_are_poor))                 # l.13
    return judgements


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
    assert not (rollouts.delta * (1 - rollouts.mask)).any(), "Alg. 4 l.13: no δ' on padding"


@torch.no_grad()
def add_scores(rollouts: Rollouts, model, value_head, config: Config):
    """log π_θold, H, log π_ref and V_ψ (Alg. 4 l.7, 14, 16), from the training forward pass."""
    weight = head_weight(model)
    scores = torch.zeros(4, *rollouts.mask.shape, device=model.device)
    order = rollouts.by_length(range(len(rollouts.rows)))
    for index in chunks(order[RANK::WORLD_SIZE], config.micro_batch_size):
        part = rollouts.part(index)
        hidden, targets = forward(model, part, "policy")
        reference, _ = forward(model, part, config.reference)
        # l.7: the update needs only the log-probs of π_θold, so no weights are copied.
        logprobs = token_logprobs(hidden, weight, targets, config.temperature)
        entropy = token_entropy(hidden, weight, config.temperature)
        logprobs_ref = token_logprobs(reference, weight, targets, config.temperature)
        full = torch.zeros(4, *part["mask"].shape, device=model.device)
        full.view(4, -1)[:, part["sampled"]] = torch.stack(
            [logprobs, entropy, logprobs_ref, value_head(hidden)])
        scores[:, index, : full.shape[2]] = full
    (rollouts.logprobs_old, rollouts.entropy,
     rollouts.logprobs_ref, rollouts.values) = all_sum(scores)
    # NaN passes these asserts: `ppo_update` skips and counts such a step.
    assert not rollouts.logprobs_old.max() > 1e-3, "Alg. 4 l.22: log π_θold of a probability"
    assert not rollouts.logprobs_ref.max() > 1e-3, "Alg. 4 l.14: log π_ref of a probability"
    assert not rollouts.entropy.min() < -1e-2, "Alg. 4 l.25: H ≥ 0"


def forward(model, part: dict[str, Tensor], adapter: str | None) -> tuple[Tensor, Tensor]:
    """The hidden state that predicts each sampled token, and that token: [N, H], [N]."""
    with use_lora(model, adapter):
        hidden = response_hidden(model, part["prompt_ids"], part["prompt_mask"],
                                 part["response_ids"], part["mask"])
    sampled = part["sampled"]
    return hidden.flatten(0, 1)[sampled], part["response_ids"].flatten()[sampled]


def add_advantages(rollouts: Rollouts, beta: float, config: Config):
    """r_t = δ'_t + r_t^KL, A_t by GAE, whitened, and the value targets (Alg. 4 l.14–17, 24).

    r_t^KL = −β (log π(y_t) − log π_ref(y_t)), whose policy gradient is −β ∇KL. The exact KL_t
    depends only on x and y_<t, so for y_t it would be a baseline.
    """
    mask = rollouts.mask
    values = rollouts.values
    kl = rollouts.logprobs_old - rollouts.logprobs_ref
    rewards = (rollouts.delta - beta * kl) * mask                                        # l.14
    rollouts.rewards = rewards
    assert not (rewards * (1 - mask)).any(), "Alg. 4 l.14: no r_t on padding"
    advantages, rollouts.returns = gae(rewards, values, mask, config.gamma, config.lam)  # l.17
    if config.value_target == "return":                # l.24: Σ_k γ^{k−t} r_k, λ = 1 and V = 0
        no_values = torch.zeros_like(values)
        rollouts.returns, _ = gae(rewards, no_values, mask, config.gamma, 1.0)
    last = mask.sum(1, keepdim=True).long() - 1                                     # [B, 1]
    assert_equal_at(last, advantages, rewards - values, "§3.5, V = 0 after y: A_T = r_T − V")
    assert_equal_at(last, rollouts.returns, rewards, "Alg. 4 l.24: R_T = r_T")
    rollouts.advantages = whiten(advantages, mask)


def assert_one_per_token(rollouts: Rollouts):
    """Assert that r_t, A_t and R_t are filled, [B, T] each (Alg. 4 l.14–17)."""
    for x in (rollouts.rewards, rollouts.advantages, rollouts.returns):
        assert x.shape == rollouts.mask.shape, "Alg. 4 l.14–17: one r_t, A_t, R_t per token"


def assert_equal_at(index: Tensor, x: Tensor, y: Tensor, equation: str):
    """Assert x = y in column index[b] of each row b; x and y are [B, T], index is [B, 1]."""
    pair = x.gather(1, index), y.gather(1, index)
    assert torch.allclose(*pair, atol=1e-5, equal_nan=True), equation


# ── The update (Alg. 4 l.19–32)

MAX_GRAD_NORM = 1.0
MAX_RATIO = 10          # a step is skipped if the mean ρ_t of its minibatch is larger


def ppo_update(rollouts: Rollouts, model, value_head, optimizer, config: Config, rng) -> dict:
    """ppo_epochs passes over the batch in minibatches (Alg. 4 l.19–32) → means over the steps.

    Losses are divided by the token count of the whole minibatch, so neither micro-batches nor
    ranks change the update. A harmful step is skipped and counted. Raises InputError if all
    steps are harmful.
    """
    parameters = optimizer_parameters(optimizer)
    steps = []
    skipped = 0
    for _ in range(config.ppo_epochs):                                                # l.19
        order = rng.sample(range(len(rollouts.rows)), len(rollouts.rows))
        for minibatch in chunks(order, config.minibatch_size):                        # l.20
            stats = add_gradients(rollouts, minibatch, model, value_head, parameters, config)
            norm = torch.nn.utils.clip_grad_norm_(parameters, MAX_GRAD_NORM)
            stats["grad_norm"] = norm.item()
            if all(map(math.isfinite, stats.values())) and stats["ratio"] <= MAX_RATIO:
                has_moved = steps or skipped or model.dtype != torch.float32
                assert has_moved or abs(stats["ratio"] - 1) < 0.1, \
                    "Alg. 4 l.22: ρ = 1 until θ moves"
                optimizer.step()                                                   # l.29–30
                steps.append(stats)
            else:
                skipped += 1
            optimizer.zero_grad()
    if not steps:
        raise InputError(f"all optimizer steps of an iteration were skipped, because they were "
                         f"not finite or their mean ratio exceeded {MAX_RATIO} (the last: "
                         f"{stats}); lower --learning_rate")
    if skipped > len(steps):
        print_rank0(f"warning: {skipped} of {skipped + len(steps)} optimizer steps were "
                    f"harmful and skipped; stop the run and lower --learning_rate")
    means = {key: sum(step[key] for step in steps) / len(steps) for key in stats}
    return means | {"skipped_steps": skipped}


def add_gradients(rollouts: Rollouts, minibatch: list[int], model, value_head, parameters,
                  config: Config) -> dict[str, float]:
    """Accumulate the gradients of a minibatch over all ranks (Alg. 4 l.21–28) → metrics."""
    minibatch = rollouts.by_length(minibatch)
    count = rollouts.mask[minibatch].sum()
    totals = []
    for index in chunks(minibatch[RANK::WORLD_SIZE], config.micro_batch_size):
        loss, stats = minibatch_loss(rollouts.part(index), model, value_head, config, count)
        loss.backward()
        totals.append(torch.stack(list(stats.values())).detach())
    for p in parameters:
        all_sum(p.grad)
    return dict(zip(stats, all_sum(sum(totals)).tolist()))


def minibatch_loss(part: dict[str, Tensor], model, value_head, config: Config, count):
    """(loss, metrics), scalars: −L_CLIP − β H + c L_VF, Σ / count (Alg. 4 l.21–28)."""
    hidden, targets = forward(model, part, "policy")
    weight = head_weight(model)
    logprobs = token_logprobs(hidden, weight, targets, config.temperature)
    values = value_head(hidden.detach())          # the value loss does not move the policy
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
    return loss, stats


# ── Algorithm 4

def train(model, tokenizer, rows, config: Config, out: Path, critic=reward_model_critic,
          advantages=add_advantages):
    """Algorithm 4: the adapter "policy" learns from the critic's judgements of its rollouts.

    critic(rollouts, model, tokenizer, config) → a Judgement of each row of this rank's share.
    advantages(rollouts, beta, config) fills rewards, advantages and returns, and may return
    further metrics. Writes policy/, value_head.safetensors, metrics, samples and checkpoints to
    `out`, and continues from the newest checkpoint there.
    """
    value_head = ValueHead(model.config.hidden_size, model.device)                     # l.5
    groups = [{"params": lora_parameters(model, "policy")}, {"params": value_head.parameters()}]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.0, fused=True)
    horizon = config.kl_horizon or max(1, config.iterations * config.batch_size // 10)
    kl = AdaptiveKL(config.kl_coef, config.kl_target, horizon)
    settings = policy_settings(config)
    start = resume(optimizer, kl, settings, out)
    bar = tqdm(range(start, config.iterations), "policy", initial=start,
               total=config.iterations, disable=RANK > 0)
    for iteration in bar:                                                              # l.6
        seed = config.seed * 1_000_003 + iteration
        generator = torch.Generator().manual_seed(seed)
        rng = random.Random(seed)
        timer = Timer()
        set_learning_rates(optimizer, config, iteration)
        with gathered(model):
            drawn_rows = batch_rows(rows, config, iteration)                         # l.9–10
            batch = sample_rollouts(model, tokenizer, drawn_rows, config, "policy", generator)
            timer.lap("rollout")
            add_feedback(batch, critic(batch, model, tokenizer, config))            # l.12–13
            timer.lap("critique")
            add_scores(batch, model, value_head, config)                                # l.7
            counts = advantages(batch, kl.beta, config) or {}                      # l.14–17
            assert_one_per_token(batch)
            timer.lap("score")
        stats = ppo_update(batch, model, value_head, optimizer, config, rng)        # l.19–32
        timer.lap("update")
        metrics = {"iteration": iteration + 1, "kl_coef": kl.beta}
        metrics |= batch_metrics(batch, get_task(config.task)) | counts | stats | timer.seconds
        if kl.target:
            metrics["kl_target"] = kl.target
        kl.update(metrics["kl"], config.batch_size)
        if RANK == 0:
            log_iteration(metrics, batch, bar, config, out)
        state = {"iteration": iteration + 1, "kl_coef": kl.beta, "settings": settings}
        keep_checkpoint(out, optimizer, state, config.save_every, start, config.iterations)
    if RANK == 0:
        save_lora(model, "policy", out / "policy")                                     # l.33
        save_file(value_head.state_dict(), out / "value_head.safetensors")


def set_learning_rates(optimizer, config: Config, iteration: int):
    """The decayed rates of θ and ψ (Appendix D.2)."""
    rates = config.learning_rate, config.value_learning_rate
    for group, rate in zip(optimizer.param_groups, rates):
        group["lr"] = rate * decay(config, iteration)


PROBES = 10                               # probes per run; the last iteration has the last one


def probe(batch: Rollouts, config: Config, out: Path) -> dict[str, float | None]:
    """R_φ beside the annotator on the first --probe_rows of the policy's own rollouts.

    R_φ was trained on another policy's responses. If its δ' rises and the annotator's does not,
    the policy exploits R_φ. Requests use the journal, budget and prices of phase 1.
    """
    task = get_task(config.task)
    annotation = annotation_settings(config, out)
    indices = [i for i, y in enumerate(batch.texts[: config.probe_rows]) if y.strip()]
    rows = [batch.rows[i] | {"response": batch.texts[i], "outcome": None} for i in indices]
    if task.tests and config.allow_code_execution:
        from measures.sandbox import add_outcomes
        rows = add_outcomes(rows, task)
    questions = [annotation_question(example, annotation) for example in examples(task, rows)]
    counts = Counter()
    true_delta = []
    with Journal(f"{annotation.output}.journal", *annotation.prices) as journal:
        replies = ask_annotator(questions, journal, annotation)
        for i, (_, _, parsed) in zip(indices, replies):
            if parsed:                     # a missing reply gets no default
                feedback, grounding = parsed
                if task.repeats_are_poor:
                    grounding = ground(batch.texts[i], feedback, repeats_are_poor=True)
                truth = token_rewards(batch.texts[i], batch.offsets[i], grounding.spans)
                counts += count_tokens(truth, batch.feedback[i].delta)
                true_delta += truth
    mean = sum(true_delta) / len(true_delta) if true_delta else None
    return {"true_delta": mean, **token_figures(counts)}


def batch_rows(rows: list, config: Config, iteration: int) -> list:
    """The rows of an iteration. Each epoch visits all rows once, in a new random order.

    A row is repeated --responses_per_prompt times.
    """
    n = len(rows)
    prompts = config.batch_size // config.responses_per_prompt
    start = iteration * prompts
    end = start + prompts
    order = []
    for epoch in range(start // n, (end - 1) // n + 1):
        order += random.Random(f"{config.seed}-{epoch}").sample(rows, n)
    drawn = order[start % n :][:prompts]
    return [row for row in drawn for _ in range(config.responses_per_prompt)]


def decay(config: Config, iteration: int) -> float:
    """Factor of the learning rates, from 1 to 0: linear or cosine (Appendix D.2)."""
    remaining = 1 - iteration / config.iterations
    if config.schedule == "linear":
        return remaining
    return 0.5 * (1 - math.cos(math.pi * remaining))


def log_iteration(metrics: dict, batch: Rollouts, bar, config: Config, out: Path):
    """Log an iteration's metrics and a sample; in ten iterations, also run `probe`."""
    iteration = metrics["iteration"]
    probes_done = (iteration - 1) * PROBES // config.iterations
    if config.probe_rows and iteration * PROBES // config.iterations > probes_done:
        metrics |= probe(batch, config, out)
    bar.set_postfix(delta=f"{metrics['delta']:+.3f}", kl=f"{metrics['kl']:.2f}")
    sample = sample_row(batch, (iteration - 1) % len(batch.rows))
    write_metrics(metrics, sample, config, out)
    if iteration % 10 == 1:
        tokens = colour_tokens(sample["tokens"], sample["delta"])
        print_rank0(f"{iteration:4d}  {tokens}")


def resume(optimizer, kl: AdaptiveKL, settings: dict, out: Path) -> int:
    """Load the newest checkpoint, drop later lines of the logs → the iterations done.

    Raises InputError where the checkpoint was made with other settings.
    """
    path, tensors, state = newest_checkpoint(out)
    check_settings(settings, state.get("settings", {}), settings.keys(), path,
                   "choose another --output_dir")
    start = state.get("iteration", 0)
    kl.beta = state.get("kl_coef", kl.beta)
    restore_optimizer(optimizer, tensors)
    if path:
        print_rank0(f"phase 3: resumed after iteration {start} from {path}")
    for file in (out / "metrics.jsonl", out / "samples.jsonl"):
        if RANK == 0:
            rows = [row for row in whole_rows(file) if row.get("iteration", math.inf) <= start]
            if len(rows) < start:
                print_rank0(f"warning: {file} has lost {start - len(rows)} of the lines before "
                            f"the checkpoint; the report shows the others")
            write_rows(file, rows)
    return start


# ── Algorithm 1: annotate, train R_φ, optimise the policy

def check_config(config: Config, out: Path, needs_reward_model: bool):
    """Check flags, annotator, key and directory before anything is sampled or paid."""
    task = get_task(config.task)
    parse_flags(RewardConfig, "", reward_preset, ["--task", config.task])    # checks its values
    sizes = {name: getattr(config, name) or 0 for name in ("batch_size", "minibatch_size")}
    if any(size % WORLD_SIZE for size in sizes.values()):
        remedy = " ".join(f"--{name} {-(-size // WORLD_SIZE) * WORLD_SIZE}"
                          for name, size in sizes.items() if size)
        raise InputError(f"{WORLD_SIZE} ranks share each batch equally: set {remedy}")
    if (config.batch_size or 0) % config.responses_per_prompt:
        raise InputError(f"--batch_size {config.batch_size} is not a multiple of "
                         f"--responses_per_prompt {config.responses_per_prompt}")
    if config.data is None and task.rows is None:
        raise InputError(f"--task {config.task} needs --data rows.jsonl")
    if config.wandb and not find_spec("wandb"):
        raise InputError("--wandb needs the package wandb: pip install wandb")
    if config.probe_rows and config.mode == "align":
        raise InputError("--mode align needs feedback that people wrote, and there is none for "
                         "the policy's new responses: set --probe_rows 0")
    has_outcomes = config.annotator_function or config.allow_code_execution
    if config.probe_rows and task.tests and not has_outcomes:
        raise InputError("--probe_rows: the annotator needs the test outcome of each response: "
                         "set --allow_code_execution, or --probe_rows 0")
    has_feedback = config.reward_model or result_exists(out / "feedback.jsonl")
    if config.probe_rows or (needs_reward_model and not has_feedback):
        check_annotator(annotation_settings(config, out))


def check_phases(model, rows: list[dict], config: Config, out: Path):
    """Check what needs the base and the rows: the layers for R_φ, and the sandbox."""
    target_layers(model, reward_settings(config, out).lora_targets.split(","),
                  "--reward_lora_targets")
    task = get_task(config.task)
    needs_outcomes = task.tests and not config.annotator_function
    if not needs_outcomes or result_exists(out / "responses.jsonl"):
        return
    with_outcome = {id(example["row"]) for example in examples(task, rows)
                    if "outcome" in example}
    if len(with_outcome) == len(rows):
        return
    if not config.allow_code_execution:
        raise InputError(f"{len(rows) - len(with_outcome)} of {len(rows)} rows have no test "
                         f"outcome: set --allow_code_execution to run their tests in the "
                         f"sandbox")
    from measures.sandbox import add_outcomes
    add_outcomes([rows[0] | {"response": "pass", "outcome": None}], task)  # SandboxError early


def load_rows(config: Config) -> tuple[list[dict], list[dict]]:
    """(training rows, held-out rows) (§4.1). No held-out prompt is trained on or annotated.

    The seed shuffles the training rows. One row is kept per held-out prompt. Raises InputError
    where all rows have the same prompt.
    """
    task = get_task(config.task)
    if config.data is None:
        training = task.rows("train", config.annotated_rows, config.seed)
        evaluation = task.rows("eval", config.eval_rows, 0)
        for number, row in enumerate([*training, *evaluation], 1):
            task.check(row, f"--task {config.task}: row {number} of its `rows`")
        return training, evaluation
    rows = read_rows(config.data, task=task)
    shuffled = random.Random(config.seed).sample(rows, len(rows))
    training, evaluation = split_rows(shuffled, config.eval_rows, config.seed,
                                      task.policy_prompt, least=1)
    if not training:
        raise InputError(f"{config.data}: all rows have the same prompt; add rows with another "
                         f"prompt, because one prompt is held out for evaluation")
    one_per_prompt = {str(task.policy_prompt(row)): row for row in evaluation}
    return training, list(one_per_prompt.values())


def write_responses(model, tokenizer, rows: list[dict], config: Config, out: Path) -> str:
    """Alg. 1 l.6: π_ref answers the rows that have no response → responses.jsonl."""
    task = get_task(config.task)
    generator = torch.Generator().manual_seed(config.seed)
    with_response = [row for row in rows if task.all_responses(row)]
    without_response = [row for row in rows if not task.all_responses(row)]
    parts = chunks(without_response, 256)
    for part in tqdm(parts, "respond", disable=not without_response or RANK > 0):
        with gathered(model):
            batch = sample_rollouts(model, tokenizer, part, config, config.reference, generator)
        with_response += [row | {"response": y} for row, y in zip(part, batch.texts)]    # l.6
    if task.tests and config.allow_code_execution:
        from measures.sandbox import add_outcomes
        with_response = gather_rows(add_outcomes(with_response[RANK::WORLD_SIZE], task))
    if RANK == 0:
        write_rows(out / "responses.jsonl", with_response)
    return f"{len(with_response)} responses, {len(without_response)} of them sampled"


def annotation_settings(config: Config, out: Path) -> AnnotateConfig:
    """Settings of phase 1 (Alg. 1 l.7–11): responses.jsonl → feedback.jsonl."""
    shared = {f.name: getattr(config, f.name) for f in fields(AnnotatorConfig)}
    return AnnotateConfig(task=config.task, data=str(out / "responses.jsonl"),
                          output=str(out / "feedback.jsonl"), skip_empty=True, **shared)


def reward_settings(config: Config, out: Path) -> RewardConfig:
    """Settings of phase 2: feedback.jsonl → reward/adapter."""
    shared = {f.name: getattr(config, f.name) for f in fields(BaseConfig)}
    shared["micro_batch_size"] = config.micro_batch_size
    files = {"data": str(out / "feedback.jsonl"), "output_dir": str(out / "reward")}
    flags = {"learning_rate": config.reward_learning_rate, "epochs": config.reward_epochs,
             "lora_targets": config.reward_lora_targets}
    flags = {name: value for name, value in flags.items() if value is not None}
    return RewardConfig(**(reward_preset(config.task) | shared | files | flags))


@torch.no_grad()
def base_nats(rollouts: Rollouts, model, tokenizer, config: Config) -> Tensor:
    """Nats −Σ_t log p(y_t | x, y_<t) of the base and number of tokens, without the EOS → [2]"""
    eos = torch.tensor([*eos_ids(tokenizer, model)], device=model.device)
    sums = torch.zeros(2, device=model.device)
    for index in chunks(range(RANK, len(rollouts.rows), WORLD_SIZE), config.micro_batch_size):
        hidden, targets = forward(model, rollouts.part([*index]), None)
        logprobs = token_logprobs(hidden, head_weight(model), targets)
        is_text = ~torch.isin(targets, eos)
        sums += torch.stack([-logprobs[is_text].sum(), is_text.sum()])
    return all_sum(sums)


def evaluate(model, tokenizer, rows, config: Config, adapter, critic=reward_model_critic):
    """A sampled response to each held-out row, judged by the critic: (means, samples)."""
    nats = torch.zeros(2, device=model.device)
    generator = torch.Generator().manual_seed(config.seed)
    truths = get_task(config.task).truth
    scores = []
    samples = []
    for part in tqdm(chunks(rows, config.batch_size), desc="evaluate", disable=RANK > 0):
        with gathered(model):
            batch = sample_rollouts(model, tokenizer, part, config, adapter, generator)
            add_feedback(batch, critic(batch, model, tokenizer, config))
            nats += base_nats(batch, model, tokenizer, config)
        for i, row in enumerate(part):
            samples.append({"id": row.get("id"), **sample_row(batch, i)})
            score = {name: truth(row, batch.texts[i]) for name, truth in truths.items()}
            scores.append(score | score_response(batch.feedback[i], batch.truncated[i]))
    means = {key: sum(score[key] for score in scores) / len(scores) for key in scores[0]}
    means["perplexity under the base"] = (nats[0] / nats[1].clamp(min=1)).exp().item()
    return means, samples


WARN_UNREADABLE = 0.2                     # share of critiques; a warning above it
MOST_UNREADABLE = 0.5                     # phase 3 does not start above it


def train_and_evaluate(model, tokenizer, rows, held_out, config: Config, out: Path,
                       critic=reward_model_critic, advantages=add_advantages) -> str:
    """Phase 3 (Alg. 1 l.16–19), with an evaluation before and after → policy/, result.json."""
    before, samples = evaluate(model, tokenizer, held_out, config, config.reference, critic)
    if RANK == 0:
        write_rows(out / "before_samples.jsonl", samples)
    unreadable = before["unparseable critiques"]
    if unreadable > WARN_UNREADABLE:
        reason = next(sample["unreadable"] for sample in samples if sample["unreadable"])
        problem = (f"{unreadable:.0%} of the critiques cannot be read and give no reward (the "
                   f"first: {reason}); train R_φ again with a higher --reward_learning_rate, "
                   f"more --reward_epochs or more rows (remove {out / 'reward'} first), or "
                   f"raise --max_critique_tokens; python report.py {out} shows them")
        if unreadable > MOST_UNREADABLE:
            raise InputError(problem)
        print_rank0(f"warning: {problem}")
    if before["tokens in good spans"] + before["tokens in poor spans"] == 0:
        print_rank0(f"warning: every δ is 0 on the {len(samples)} held-out responses; if R_φ "
                    f"judges, its quotes do not occur in them; python report.py {out} shows "
                    f"them")
    train(model, tokenizer, rows, config, out, critic, advantages)                      # l.18
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


def main(argv=None, critic=reward_model_critic, needs_reward_model=True,
         advantages=add_advantages):
    """Algorithm 1. needs_reward_model: whether the critic uses R_φ (phases 1 and 2)."""
    config = parse_flags(Config, __doc__, preset, argv)
    out = Path(config.output_dir)
    check_config(config, out, needs_reward_model)
    device = start_ranks(config.rank_timeout)
    _lock = lock_directory(out)                               # held until the process ends
    rows, held_out = load_rows(config)
    model, tokenizer = load_base(config, device)
    rows = drop_long_rows(rows, model, tokenizer, config)
    held_out = drop_long_rows(held_out, model, tokenizer, config)
    config = fit_to_rows(config, len(rows), model)
    annotation_rows = rows[: config.annotated_rows]
    trains_reward_model = needs_reward_model and config.reward_model is None
    if config.reward_model:
        load_lora(model, "reward", config.reward_model)
    start_policy(model, config)
    if trains_reward_model:
        check_phases(model, annotation_rows, config, out)
    save_settings(config, out, "R_φ" if needs_reward_model else config.annotator_function)
    print_rank0(f"Text2Grad on {config.task}: {config.model}, {len(rows)} training prompts, "
                f"{config.iterations} iterations of {config.batch_size} rollouts, learning "
                f"rate {config.learning_rate:.2g}, {device}; files in {out}/")
    try:
        if trains_reward_model:
            run_phase("phase 1, respond", "responses.jsonl", out,
                      lambda: write_responses(model, tokenizer, annotation_rows, config,
                                              out))                                    # l.4–6
            run_phase("phase 1, annotate", "feedback.jsonl", out,
                      lambda: on_rank0(annotate, annotation_settings(config, out)))  # l.7–11
            run_phase("phase 2, reward model", "reward/metrics.json", out,
                      lambda: summary(fit(model, tokenizer,                          # l.13–14
                                          reward_settings(config, out))), out / "reward")
            if not lora_parameters(model, "reward"):            # trained in an earlier run
                load_lora(model, "reward", out / "reward" / "adapter")
        run_phase("phase 3, policy", "result.json", out,
                  lambda: train_and_evaluate(model, tokenizer, rows, held_out, config, out,
                                             critic, advantages), out)               # l.16–19
    except torch.OutOfMemoryError as error:
        raise InputError(f"out of memory ({error}): lower --micro_batch_size (update) or "
                         f"--rollout_batch_size (texts), or set --activation_checkpointing or "
                         f"--shard, and run the same command to continue") from error
    if RANK == 0:
        hint = reward_model_hint(config, out)
        print_result(config, out, len(held_out), hint)
    run_collective(dist.destroy_process_group)


if __name__ == "__main__":
    run_script(main, "text2grad")
