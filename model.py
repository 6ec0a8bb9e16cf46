"""What the three phases share: one frozen base, named LoRA adapters, sampling, and the fused log-probs.

One base model plays every role (policy, critic R_φ, reference); `use_lora` switches between them, so an
8B model lies in memory once. Read this file when a mechanism is wanted; the paper's method is in
annotate.py, reward_model.py and text2grad.py.

    model, tokenizer = load_model("toy/base")
    add_lora(model, "policy", r=16, alpha=32)
    with use_lora(model, "policy"):
        ids = generate(model, [encode_prompt(tokenizer, "Hello")], max_new_tokens=20)

Shapes: B rows, P prompt tokens (padded on the left), T response tokens (padded on the right),
H hidden size, V vocabulary, N tokens of a flattened batch.

Departures from common practice: adapters are never merged into the base, not even for sampling, because in
bfloat16 a merged update of the size that PPO makes is rounded away; and π is sampled with no top-k, top-p or
repetition penalty, so that the distribution which is scored is the one that was sampled.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

# The prompt of a model that has no chat template of its own (toy/base, most base models).
PLAIN_TEMPLATE = "{prompt}\n\nAnswer:\n"
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")     # PEFT's names


class ModelError(ValueError):
    """A model, an adapter or a prompt that cannot be used; the message names it and the remedy."""


# ── Loading and prompts ─────────────────────────────────────────────────────────────────────────────────

def load_model(path, dtype=None, device=None):
    """Load a causal LM and its tokenizer from a directory or a Hugging Face hub id; every weight is frozen.

    dtype: a torch dtype or its name. None keeps the checkpoint's own, except half precision on a CPU, which
    becomes float32 (CPU kernels for bfloat16 are slow). device: None takes CUDA where there is one.
    Only safetensors are read, never pickles. Raises ModelError where the model cannot be found, or where its
    head is not the plain product `hidden @ weight.T` that `token_logprobs` scores.
    """
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, model_max_length=1 << 30)     # lengths are checked here, by row
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype or "auto", use_safetensors=True)
    except (OSError, ValueError) as error:
        reason = str(error).strip().split("\n")[0]
        raise ModelError(f"cannot load a model from {path}: {reason} (--model takes a directory in Hugging "
                         f"Face format or a hub id)") from error
    if dtype is None and device.type == "cpu":
        model.float()
    model.requires_grad_(False).eval().to(device)
    _assert_plain_head(model, path)
    return model, tokenizer


@torch.no_grad()
def _assert_plain_head(model, path):
    """Soft-capped, scaled or biased logits would be sampled and scored by different formulas."""
    ids = torch.arange(1, min(9, model.config.vocab_size), device=model.device)[None]      # 0 may be a blank padding row
    logits, plain = model(ids).logits, model.base_model(ids).last_hidden_state @ head_weight(model).T
    changed = [key for key in ("final_logit_softcapping", "logit_scale", "logits_scaling")
               if getattr(model.config, key, None) not in (None, 1)]
    if changed or not torch.allclose(plain, logits, rtol=1e-2, atol=1e-2):
        raise ModelError(f"{path}: this architecture changes its logits after the head (a bias, a scale or a "
                         f"soft cap); the fused log-probs here need a plain head, as Llama, Mistral and Qwen have")


def head_weight(model) -> Tensor:
    """The language-model head, [V, H]."""
    return model.get_output_embeddings().weight


def context_length(model) -> int:
    """Tokens the model can attend to: prompt and response together."""
    return getattr(model.config, "max_position_embeddings", None) or 1 << 30


def encode_prompt(tokenizer, prompt: str) -> list[int]:
    """One user turn as token ids, ready for the model's answer.

    Uses the tokenizer's own chat template where it has one, else PLAIN_TEMPLATE after the tokenizer's BOS.
    """
    if tokenizer.chat_template:
        text = tokenizer.apply_chat_template([{"role": "user", "content": prompt}], tokenize=False,
                                             add_generation_prompt=True)
        return tokenizer(text, add_special_tokens=False).input_ids      # the template wrote its own BOS
    bos = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    return bos + tokenizer(PLAIN_TEMPLATE.format(prompt=prompt), add_special_tokens=False).input_ids


def encode_answer(tokenizer, text: str) -> list[int]:
    """Target ids of teacher forcing: the text and EOS, so that the model learns to stop."""
    return tokenizer(text, add_special_tokens=False).input_ids + [eos_ids(tokenizer)[0]]


def eos_ids(tokenizer, model=None) -> list[int]:
    """Every id that ends an answer: the tokenizer's EOS first, then those of the generation config."""
    ids = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    more = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    for extra in more if isinstance(more, list) else [more]:
        if extra is not None and extra not in ids:
            ids.append(extra)
    if not ids:
        raise ModelError("the tokenizer has no EOS token, so an answer could never end")
    return ids


# ── LoRA by hand (Hu et al. 2021): W x + (alpha / r) B A x ─────────────────────────────────────────────

class LoRALinear(nn.Module):
    """A frozen linear layer with any number of named low-rank updates, at most one of them active."""

    def __init__(self, base_layer: nn.Linear):
        super().__init__()
        self.base_layer = base_layer
        self.lora_A, self.lora_B = nn.ParameterDict(), nn.ParameterDict()     # A [r, in], B [out, r]
        self.scaling: dict[str, float] = {}
        self.dropout: dict[str, float] = {}
        self.active: str | None = None

    def add(self, name: str, r: int, alpha: float, dropout: float):
        """A uniform as nn.Linear draws it, B zero: the new adapter changes nothing until it is trained."""
        weight = self.base_layer.weight
        A = torch.empty(r, weight.shape[1], dtype=torch.float32, device=weight.device)
        self.lora_A[name] = nn.Parameter(nn.init.kaiming_uniform_(A, a=math.sqrt(5)))
        self.lora_B[name] = nn.Parameter(torch.zeros(weight.shape[0], r, dtype=torch.float32, device=weight.device))
        self.scaling[name], self.dropout[name] = alpha / r, dropout

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] → [..., out], in the dtype of the base layer; the update itself is float32."""
        y = self.base_layer(x)
        if self.active not in self.lora_A:
            return y
        A, B = self.lora_A[self.active], self.lora_B[self.active]
        if self.training and self.dropout[self.active]:
            x = F.dropout(x, self.dropout[self.active])
        x = x.to(A.dtype)
        return y + (F.linear(F.linear(x, A), B) * self.scaling[self.active]).to(y.dtype)


def _lora_layers(model) -> dict[str, LoRALinear]:
    return {path: m for path, m in model.named_modules() if isinstance(m, LoRALinear)}


def _wrap(model, path: str) -> LoRALinear:
    """The LoRALinear at `path`, put around the nn.Linear that stands there if need be."""
    parent, _, child = path.rpartition(".")
    layer = getattr(model.get_submodule(parent), child)
    if isinstance(layer, LoRALinear):
        return layer
    if not isinstance(layer, nn.Linear):
        raise ModelError(f"LoRA needs a linear layer, but {path} is a {type(layer).__name__}")
    setattr(model.get_submodule(parent), child, LoRALinear(layer).train(layer.training))
    return model.get_submodule(path)


def add_lora(model, name: str, r: int = 16, alpha: float = 32, dropout: float = 0.0,
             target_modules=("q_proj", "v_proj")):
    """Give every linear layer whose last name is in `target_modules` a new adapter; returns its parameters.

    It stays inactive until `use_lora`. Raises ModelError where a target is not in the model or the name is taken.
    """
    layers = _lora_layers(model)
    if any(name in layer.lora_A for layer in layers.values()):
        raise ModelError(f"an adapter named {name!r} is loaded already")
    linear = [p for p, m in model.named_modules()
              if isinstance(m, nn.Linear) and m is not model.get_output_embeddings() and not p.endswith(".base_layer")]
    paths = [p for p in sorted({*linear, *layers}) if p.rpartition(".")[2] in target_modules]
    absent = set(target_modules) - {p.rpartition(".")[2] for p in paths}
    if absent:
        raise ModelError(f"no linear layer is named {', '.join(sorted(absent))}; this model has "
                         f"{', '.join(sorted({p.rpartition('.')[2] for p in {*linear, *layers}}))}")
    for path in paths:
        _wrap(model, path).add(name, r, alpha, dropout)
    return lora_parameters(model, name)


@contextmanager
def use_lora(model, name: str | None):
    """Inside, the model runs with this adapter alone; None is the bare base (the reference policy)."""
    layers = _lora_layers(model)
    if name is not None and not any(name in layer.lora_A for layer in layers.values()):
        raise ModelError(f"no adapter named {name!r} is loaded")
    before = {path: layer.active for path, layer in layers.items()}
    for layer in layers.values():
        layer.active = name
    try:
        yield model
    finally:
        for path, layer in layers.items():
            layer.active = before[path]


def lora_parameters(model, name: str) -> list[nn.Parameter]:
    """The trainable tensors of one adapter, in a fixed order."""
    return [p for _, layer in sorted(_lora_layers(model).items()) if name in layer.lora_A
            for p in (layer.lora_A[name], layer.lora_B[name])]


def fingerprint(model) -> str:
    """A hash that tells one base from another: shapes, and the corners of two weights in bfloat16.

    bfloat16, so that the same base has the same name in whatever precision it was loaded.
    """
    weights = [model.get_input_embeddings().weight, head_weight(model)]
    digest = hashlib.sha256(json.dumps([list(w.shape) for w in weights] + [model.config.num_hidden_layers]).encode())
    for weight in weights:
        corner = weight.detach()[:: max(1, len(weight) // 64), :64].to(torch.bfloat16).float().cpu()
        digest.update(corner.contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def save_lora(model, name: str, directory):
    """Write one adapter in PEFT's format, whole or not at all; PEFT loads it as it is."""
    layers = {path: layer for path, layer in _lora_layers(model).items() if name in layer.lora_A}
    if not layers:
        raise ModelError(f"no adapter named {name!r} is loaded")
    first = next(iter(layers.values()))
    r = first.lora_A[name].shape[0]
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": r, "lora_alpha": first.scaling[name] * r,
              "lora_dropout": first.dropout[name], "bias": "none", "inference_mode": True, "fan_in_fan_out": False,
              "target_modules": sorted({path.rpartition(".")[2] for path in layers}),
              "base_model_name_or_path": model.config._name_or_path}
    tensors = {f"base_model.model.{path}.lora_{side}.weight": getattr(layer, f"lora_{side}")[name].detach().cpu()
               for path, layer in layers.items() for side in "AB"}
    with atomic_directory(directory) as temporary:
        (temporary / ADAPTER_FILES[0]).write_text(json.dumps(config, indent=2) + "\n")
        save_file({key: t.contiguous() for key, t in tensors.items()}, temporary / ADAPTER_FILES[1],
                  metadata={"format": "pt", "base_fingerprint": fingerprint(model)})


def load_lora(model, name: str, directory):
    """Read an adapter in PEFT's format under a name of ours; returns its parameters.

    Raises ModelError where a file is missing, where the adapter uses what is not built here (DoRA, rsLoRA, …),
    or where it was made for another base.
    """
    directory = Path(directory)
    if lora_parameters(model, name):
        raise ModelError(f"an adapter named {name!r} is loaded already")
    for file in ADAPTER_FILES:
        if not (directory / file).is_file():
            raise ModelError(f"{directory} holds no {file}, so it is not an adapter in PEFT's format")
    config = _read_json(directory / ADAPTER_FILES[0])
    for key in ("use_dora", "use_rslora", "rank_pattern", "alpha_pattern", "modules_to_save", "fan_in_fan_out",
                "lora_bias"):
        if config.get(key):
            raise ModelError(f"{directory}: the adapter sets {key}, which is not supported here")
    with safe_open(directory / ADAPTER_FILES[1], "pt") as file:
        made_for = (file.metadata() or {}).get("base_fingerprint")
        tensors = {key: file.get_tensor(key) for key in file.keys()}
    if made_for not in (None, fingerprint(model)):
        raise ModelError(f"{directory}: this adapter was made for another base "
                         f"({config.get('base_model_name_or_path')}), not for {model.config._name_or_path}")
    paths = sorted({key.removeprefix("base_model.model.").rsplit(".lora_", 1)[0] for key in tensors})
    strange = tensors.keys() ^ {f"base_model.model.{path}.lora_{side}.weight" for path in paths for side in "AB"}
    if strange:
        raise ModelError(f"{directory}: {min(strange)} is not half of a LoRA pair on a linear layer")
    for path in paths:
        _check_fits(model, path, [tensors[f"base_model.model.{path}.lora_{side}.weight"] for side in "AB"], directory)
    for path in paths:
        layer = _wrap(model, path)
        r = len(tensors[f"base_model.model.{path}.lora_A.weight"])
        layer.add(name, r, config["lora_alpha"] * r / config["r"], config.get("lora_dropout", 0.0))
        for side in "AB":
            getattr(layer, f"lora_{side}")[name].data.copy_(tensors[f"base_model.model.{path}.lora_{side}.weight"])
    return lora_parameters(model, name)


def _check_fits(model, path: str, pair: list[Tensor], directory: Path):
    try:
        layer = model.get_submodule(path)
    except AttributeError as error:
        raise ModelError(f"{directory}: made for another base: this model has no layer {path}") from error
    weight = (layer.base_layer if isinstance(layer, LoRALinear) else layer).weight
    if (pair[1].shape[0], pair[0].shape[1]) != tuple(weight.shape):
        raise ModelError(f"{directory}: made for another base: {path} is {list(weight.shape)} here and "
                         f"{[pair[1].shape[0], pair[0].shape[1]]} in the adapter")


class ValueHead(nn.Module):
    """V_ψ(x, y_<t): one linear unit on the policy's last hidden state, zero at the start so that V = 0."""

    def __init__(self, hidden_size: int, device=None):
        super().__init__()
        self.linear = nn.Linear(hidden_size, 1, dtype=torch.float32, device=device)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., H] → [...]"""
        return self.linear(hidden.float()).squeeze(-1)


# ── Log-probs, entropy and KL without the [N, V] tensor ────────────────────────────────────────────────

def _chunk_rows(n: int, vocabulary: int) -> int:
    """Rows of logits that may exist at once: at most 2^22 numbers, and never more than an eighth of the rows."""
    return max(1, min((1 << 22) // vocabulary, math.ceil(n / 8)))


class _TokenLogprobs(torch.autograd.Function):
    """log p(y_i) = z_i[y_i] − logsumexp(z_i) with z = h Wᵀ / T, a chunk of rows at a time.

    ∂ log p(y_i) / ∂ h_i = (W[y_i] − p_iᵀ W) / T needs nothing from upstream, so it is made in the forward pass,
    where p_i is at hand, and backward is one scaling. The entropy's is −(p_i ⊙ (log p_i + H_i))ᵀ W / T.
    """

    @staticmethod
    def forward(ctx, hidden, weight, targets, temperature, with_entropy):
        """Log-probs and, if asked for, entropies; keeps what backward needs."""
        n = len(hidden)
        out = torch.empty(n, dtype=torch.float32, device=hidden.device)
        entropy = torch.empty_like(out) if with_entropy else None
        wants = ctx.needs_input_grad[0]
        grad = torch.empty_like(hidden) if wants else None
        grad_entropy = torch.empty_like(hidden) if wants and with_entropy else None
        step = _chunk_rows(n, len(weight))
        for rows in (slice(i, i + step) for i in range(0, n, step)):
            logp = F.log_softmax(_logits(hidden[rows], weight, temperature), dim=-1)      # [chunk, V]
            out[rows] = logp.gather(1, targets[rows, None]).squeeze(1)
            if not (wants or with_entropy):
                continue
            p = logp.exp()
            if with_entropy:
                entropy[rows] = -(p * logp).sum(-1)
            if grad_entropy is not None:
                grad_entropy[rows] = -((p * (logp + entropy[rows, None])).to(weight.dtype) @ weight) / temperature
            if wants:
                grad[rows] = (weight[targets[rows]] - p.to(weight.dtype) @ weight) / temperature
        ctx.save_for_backward(hidden, weight, targets, grad, grad_entropy)
        ctx.temperature = temperature
        return out, entropy

    @staticmethod
    def backward(ctx, grad_out, grad_entropy_out):
        """The kept gradients, scaled; and the head's own, where a base is trained."""
        hidden, weight, targets, grad, grad_entropy = ctx.saved_tensors
        d_hidden = d_weight = None
        if ctx.needs_input_grad[0]:
            d_hidden = grad * grad_out[:, None].to(grad.dtype)
            if grad_entropy is not None and grad_entropy_out is not None:
                d_hidden = d_hidden + grad_entropy * grad_entropy_out[:, None].to(grad.dtype)
        if ctx.needs_input_grad[1]:           # only where a base is trained: the probabilities are made again
            d_weight = torch.zeros_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32))
            step = _chunk_rows(len(hidden), len(weight))
            for rows in (slice(i, i + step) for i in range(0, len(hidden), step)):
                logp = F.log_softmax(_logits(hidden[rows], weight, ctx.temperature), dim=-1)
                p = logp.exp()
                upstream = grad_out[rows, None].to(p.dtype)
                d_logits = (-p * upstream).scatter_add(1, targets[rows, None], upstream)
                if grad_entropy_out is not None:
                    entropy = -(p * logp).sum(-1, keepdim=True)
                    d_logits -= p * (logp + entropy) * grad_entropy_out[rows, None]
                d_weight += (d_logits.T / ctx.temperature) @ hidden[rows].to(d_weight.dtype)
            d_weight = d_weight.to(weight.dtype)
        return d_hidden, d_weight, None, None, None


def _logits(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    logits = F.linear(hidden, weight)
    return (logits if logits.dtype == torch.float64 else logits.float()) / temperature


def token_logprobs(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float = 1.0,
                   with_entropy: bool = False):
    """log π(y_i | x, y_<i) of N sampled tokens, and the entropy of each distribution (§3.5, Alg. 4 l.22, 25).

    hidden [N, H], weight [V, H] (the head), targets [N] → [N] in nats, float32; with_entropy → ([N], [N]).
    Both have their gradient in `hidden`, and in `weight` where it requires one. No [N, V] tensor ever exists.
    """
    assert hidden.ndim == 2 and weight.ndim == 2 and targets.shape == hidden.shape[:1], "expected [N,H], [V,H], [N]"
    logprobs, entropy = _TokenLogprobs.apply(hidden, weight, targets, temperature, with_entropy)
    return (logprobs, entropy) if with_entropy else logprobs


@torch.no_grad()
def token_kl(hidden: Tensor, ref_hidden: Tensor, weight: Tensor, temperature: float = 1.0) -> Tensor:
    """Exact KL(π ‖ π_ref) over the vocabulary at every position: [N, H], [N, H], [V, H] → [N] in nats.

    It enters the reward as r_t^KL = −β KL_t (§3.5), a constant of the update: it has no gradient.
    """
    out = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
    step = _chunk_rows(len(hidden), len(weight))
    for rows in (slice(i, i + step) for i in range(0, len(hidden), step)):
        logp = F.log_softmax(_logits(hidden[rows], weight, temperature), dim=-1)
        logq = F.log_softmax(_logits(ref_hidden[rows], weight, temperature), dim=-1)
        out[rows] = (logp.exp() * (logp - logq)).sum(-1)
    return out


# ── Forward passes and sampling ────────────────────────────────────────────────────────────────────────

def pad_batch(prompt_ids: list[list[int]], response_ids: list[list[int]], pad: int, device=None):
    """Prompts padded on the left, responses on the right: [B,P], [B,P], [B,T], [B,T] (ids and 0/1 masks)."""
    P, T = max(map(len, prompt_ids)), max(map(len, response_ids), default=0)
    prompts = torch.tensor([[pad] * (P - len(p)) + p for p in prompt_ids], device=device)
    prompt_mask = torch.tensor([[0] * (P - len(p)) + [1] * len(p) for p in prompt_ids], device=device)
    responses = torch.tensor([r + [pad] * (T - len(r)) for r in response_ids], device=device)
    mask = torch.tensor([[1] * len(r) + [0] * (T - len(r)) for r in response_ids], device=device)
    return prompts, prompt_mask, responses, mask


def response_hidden(model, prompts: Tensor, prompt_mask: Tensor, responses: Tensor, mask: Tensor) -> Tensor:
    """The hidden states that predict the response: position t has seen x and y_<t. → [B, T, H]"""
    P, T = prompts.shape[1], responses.shape[1]
    attention = torch.cat([prompt_mask, mask], dim=1)
    hidden = model.base_model(torch.cat([prompts, responses], dim=1), attention_mask=attention,
                              position_ids=_positions(attention), use_cache=False).last_hidden_state
    return hidden[:, P - 1 : P + T - 1]


def _positions(attention: Tensor) -> Tensor:
    return (attention.cumsum(dim=1) - 1).clamp(min=0)


def check_context(model, prompt_ids: list[list[int]], max_new_tokens: int):
    """Raises ModelError where a prompt and its answer would not fit the model's context."""
    longest, limit = max(map(len, prompt_ids)), context_length(model)
    if longest + max_new_tokens > limit:
        raise ModelError(f"a prompt of {longest} tokens and {max_new_tokens} new ones exceed the model's context of "
                         f"{limit}: shorten or drop that row (prompt {[len(p) for p in prompt_ids].index(longest)} "
                         f"of the batch), or lower the number of new tokens")


@torch.no_grad()
def generate(model, prompt_ids: list[list[int]], max_new_tokens: int, temperature: float = 1.0,
             eos_token_id=None, pad_token_id=None, generator=None, return_logprobs: bool = False):
    """Sample one answer per prompt with a key-value cache; rows end at an EOS, which is kept (Alg. 4 l.11).

    temperature 0 is greedy; otherwise the samples are from softmax(logits / temperature), the very distribution
    that `token_logprobs` scores: no top-k, top-p, beams or penalties. eos_token_id: an id, a list of ids or None.
    Returns B lists of ids; with return_logprobs also B lists of their log-probs. Rows that have ended leave the
    batch once a quarter of it is idle. Raises ModelError where a prompt is empty or does not fit the context.
    """
    if not prompt_ids or max_new_tokens < 1:
        return ([], []) if return_logprobs else []
    if min(map(len, prompt_ids)) == 0:
        raise ModelError("a prompt has no tokens; there is nothing to condition on")
    check_context(model, prompt_ids, max_new_tokens)
    eos = torch.tensor(eos_token_id if isinstance(eos_token_id, list) else [eos_token_id] if eos_token_id is not None
                       else [], dtype=torch.long, device=model.device)
    ids, attention, _, _ = pad_batch(prompt_ids, [[] for _ in prompt_ids], pad_token_id or 0, model.device)
    rows = torch.arange(len(prompt_ids), device=model.device)        # which prompt each line of the batch belongs to
    done = torch.zeros(len(prompt_ids), dtype=torch.bool, device=model.device)
    tokens: list[list[int]] = [[] for _ in prompt_ids]
    logprobs: list[list[float]] = [[] for _ in prompt_ids]
    cache, positions = DynamicCache(config=model.config), _positions(attention)
    for step in range(max_new_tokens):
        hidden = model.base_model(ids, attention_mask=attention, position_ids=positions, past_key_values=cache,
                                  use_cache=True).last_hidden_state[:, -1]
        logits = _logits(hidden, head_weight(model), temperature or 1.0)       # [B, V]
        ids = logits.argmax(-1) if temperature == 0 else \
            torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(1)
        scores = F.log_softmax(logits, -1).gather(1, ids[:, None]).squeeze(1).tolist() if return_logprobs else ()
        for line, (row, token, over) in enumerate(zip(rows.tolist(), ids.tolist(), done.tolist())):
            if not over:
                tokens[row].append(token)
                if return_logprobs:
                    logprobs[row].append(scores[line])
        done = done | torch.isin(ids, eos)
        if done.all():
            break
        attention = torch.cat([attention, attention.new_ones(len(ids), 1)], dim=1)
        ids, positions = ids[:, None], positions[:, -1:] + 1
        if done.float().mean() >= 0.25:
            keep = (~done).nonzero().squeeze(1)
            cache.batch_select_indices(keep)
            ids, attention, positions, rows, done = ids[keep], attention[keep], positions[keep], rows[keep], done[keep]
    return (tokens, logprobs) if return_logprobs else tokens


# ── Files that are whole or absent ─────────────────────────────────────────────────────────────────────

@contextmanager
def atomic_directory(directory):
    """Write into a temporary neighbour that becomes `directory` only when it is complete and on the disk."""
    directory = Path(directory)
    temporary, old = (directory.with_name(f".{directory.name}.{kind}-{os.getpid()}") for kind in ("new", "old"))
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        for path in temporary.iterdir():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
        if directory.exists():
            shutil.rmtree(old, ignore_errors=True)           # what a killed run with this process id left
            directory.rename(old)
        try:
            temporary.rename(directory)
        except OSError:
            if old.exists():
                old.rename(directory)
            raise
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def save_checkpoint(directory, tensors: dict[str, Tensor], state: dict):
    """Write tensors (safetensors) and a JSON state to one directory, whole or not at all."""
    with atomic_directory(directory) as temporary:
        plain = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
        save_file(plain, temporary / "tensors.safetensors")
        (temporary / "state.json").write_text(json.dumps(state))


def load_checkpoint(directory) -> tuple[dict[str, Tensor], dict]:
    """What `save_checkpoint` wrote, exactly: (tensors, state). Raises ModelError where a file is missing."""
    directory = Path(directory)
    for name in ("tensors.safetensors", "state.json"):
        if not (directory / name).is_file():
            raise ModelError(f"{directory}: the checkpoint has no {name}")
    return load_file(directory / "tensors.safetensors"), _read_json(directory / "state.json")


def _read_json(path: Path) -> dict:
    try:
        return json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ModelError(f"{path} is not JSON ({error}); the file is damaged") from error
