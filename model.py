"""What the three phases share: one frozen base, named LoRA adapters, the value head, FSDP.

One base model plays every role (policy, critic R_φ, reference); `use_lora` switches between them, so an
8B model lies in memory once. Read this file when a mechanism is wanted; the paper's method is in
annotate.py, reward_model.py and text2grad.py. Sampling is in sampling.py, the fused log-probs in logprobs.py,
checkpoints in checkpoints.py; what other scripts need of them can be had from here, too.

    model, tokenizer = load_model("toy/base")
    add_lora(model, "policy", r=16, alpha=32)
    with use_lora(model, "policy"):
        ids = generate(model, [encode_prompt(tokenizer, "Hello")], max_new_tokens=20)

Shapes: B rows, P prompt tokens (padded on the left), T response tokens (padded on the right),
H hidden size, V vocabulary, N tokens of a flattened batch, r rank of an adapter.
Paper: the adapters of Appendix D and the V_ψ of §3.5; it says nothing of how a model is loaded, sharded or switched.

Departure from common practice: adapters are never merged into the base, not even for sampling, because in
bfloat16 a merged update of the size that PPO makes is rounded away.
"""

from __future__ import annotations

import hashlib
import json
import math
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, AutoTokenizer

from checkpoints import ModelError, atomic_directory, load_checkpoint, read_json, save_checkpoint
from logprobs import head_weight, token_kl, token_logprobs
from sampling import context_length, generate, pad_batch, positions_of

# The prompt of a model that has no chat template of its own (toy/base, most base models).
PLAIN_TEMPLATE = "{prompt}\n\nAnswer:\n"
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")     # PEFT's names


# ── Loading and prompts ─────────────────────────────────────────────────────────────────────────────────

def load_model(path, dtype=None, device=None):  # Table 5
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


def encode_prompt(tokenizer, prompt: str | list[dict]) -> list[int]:  # Table 5
    """One user turn, or a conversation as chat messages that ends with one, as token ids, ready for the model's answer.

    Uses the tokenizer's own chat template where it has one, else PLAIN_TEMPLATE for every turn, after the tokenizer's BOS.
    """
    turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if tokenizer.chat_template:
        text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        return tokenizer(text, add_special_tokens=False).input_ids      # the template wrote its own BOS
    bos = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    plain = {"user": PLAIN_TEMPLATE, "system": "{prompt}\n\n", "assistant": "{prompt}\n\n"}
    text = "".join(plain[turn["role"]].replace("{prompt}", turn["content"]) for turn in turns)
    return bos + tokenizer(text, add_special_tokens=False).input_ids


def encode_answer(tokenizer, text: str) -> list[int]:
    """Target ids of teacher forcing: the text and EOS, so that the model learns to stop."""
    return tokenizer(text, add_special_tokens=False).input_ids + [eos_ids(tokenizer)[0]]


def eos_ids(tokenizer, model=None) -> list[int]:
    """Every id that ends an answer: the tokenizer's EOS, then the generation config's. ModelError where none does."""
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
    """A frozen linear layer with any number of named low-rank updates, A [r, in] and B [out, r], at most one active."""

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
    """Inside, the model runs with this adapter alone; None is the bare base. Raises ModelError for one not loaded."""
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
    """The trainable tensors of one adapter, A [r, in] and B [out, r] of each layer, in a fixed order."""
    return [p for _, layer in sorted(_lora_layers(model).items()) if name in layer.lora_A
            for p in (layer.lora_A[name], layer.lora_B[name])]


def fingerprint(model) -> str:
    """A hash that tells one base from another: shapes, and the corners of two weights in bfloat16.

    bfloat16, so that the same base has the same name in whatever precision it was loaded.
    """
    if isinstance(model.get_input_embeddings().weight, DTensor):
        return model.fingerprint_when_whole          # `shard` noted it, so that one rank can save without the others
    weights = [model.get_input_embeddings().weight, head_weight(model)]
    digest = hashlib.sha256(json.dumps([list(w.shape) for w in weights] + [model.config.num_hidden_layers]).encode())
    for weight in weights:
        corner = weight.detach()[:: max(1, len(weight) // 64), :64].to(torch.bfloat16).float().cpu()
        digest.update(corner.contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def save_lora(model, name: str, directory):
    """Write one adapter in PEFT's format, whole or not at all. Raises ModelError where none of that name is loaded."""
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
    config = read_json(directory / ADAPTER_FILES[0])
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
    """V_ψ(x, y_<t) (§3.5, Alg. 4 l.5): a linear unit on the policy's last hidden state; zero at the start, so V = 0."""

    def __init__(self, hidden_size: int, device=None):
        super().__init__()
        self.linear = nn.Linear(hidden_size, 1, dtype=torch.float32, device=device)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., H] → [...]"""
        return self.linear(hidden.float()).squeeze(-1)


# ── Forward passes ────────────────────────────────────────────────────────────────────────

def response_hidden(model, prompts: Tensor, prompt_mask: Tensor, responses: Tensor, mask: Tensor) -> Tensor:
    """The hidden states that predict the response: position t has seen x and y_<t (Alg. 4 l.22, 24).

    prompts, prompt_mask: [B, P]; responses, mask: [B, T] → [B, T, H]
    """
    P, T = prompts.shape[1], responses.shape[1]
    attention = torch.cat([prompt_mask, mask], dim=1)
    hidden = model.base_model(torch.cat([prompts, responses], dim=1), attention_mask=attention,
                              position_ids=positions_of(attention), use_cache=False).last_hidden_state
    return hidden[:, P - 1 : P + T - 1]


# ── Less memory: recomputed activations, and a base spread over the ranks (FSDP2) ──────────────────────

def decoder_blocks(model) -> list[nn.Module]:
    """The repeated layers of the base, in order."""
    n = model.config.num_hidden_layers
    return list(next(m for m in model.base_model.modules() if isinstance(m, nn.ModuleList) and len(m) == n))


def checkpoint_activations(model):
    """From now on a block keeps only its input for the backward pass, which runs the block once more.

    transformers' `gradient_checkpointing_enable` acts in training mode alone, and in the second run the adapter must be
    active that was so in the first, though `use_lora` has been left.
    """
    for block in decoder_blocks(model):
        if not isinstance(block.forward, partial):
            block.forward = partial(_recomputed, block, block.forward)


def _recomputed(block, forward, *args, **kwargs):
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    name = next((layer.active for layer in _lora_layers(block).values() if layer.active in layer.lora_A), None)
    return checkpoint(forward, *args, use_reentrant=False, context_fn=lambda: (nullcontext(), use_lora(block, name)),
                      **kwargs)


def shard(model, mesh=None):
    """Spread the frozen base over the ranks of `mesh` (all of them by default) with FSDP2; returns the model.

    Units that are gathered and freed together: the embeddings, every block, the head, and what is left (the last
    norm) with the base. Adapters, loaded before or after, are ignored by FSDP and stay whole on every rank, in
    float32: they are small, an FSDP unit must be of one dtype, and so any one rank saves them whole, for any number
    of ranks. The caller sums their gradients over the ranks. For more weights than one card holds, load on the CPU
    (`load_model(path, dtype, "cpu")`) and give a CUDA mesh: a unit at a time is moved.
    """
    mesh = mesh or init_device_mesh(model.device.type, (dist.get_world_size(),))
    model.fingerprint_when_whole = fingerprint(model)
    adapters = {p for layer in _lora_layers(model).values() for p in (*layer.lora_A.values(), *layer.lora_B.values())}
    for p in adapters:
        p.data = p.data.to(mesh.device_type)         # FSDP moves only what it manages
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = head.weight is embeddings.weight
    for unit in (embeddings, *decoder_blocks(model), model.base_model, *([] if tied else [head])):
        fully_shard(unit, mesh=mesh, reshard_after_forward=True, ignored_params=adapters)
    if tied:
        head.weight = embeddings.weight              # the sharded one
    model.sharded_with_tied_head = tied
    with torch.no_grad():                            # FSDP learns from the first pass who the roots are
        hidden = model.base_model(torch.zeros(1, 1, dtype=torch.long, device=model.device), use_cache=False)
        if not tied:
            head(hidden.last_hidden_state)
    return model


@contextmanager
def gathered(model):
    """Inside, a sharded model is whole on every rank: gathered once, freed at the end. Else nothing happens.

    For sampling, where the parameters would otherwise be gathered for every token. No rank has to wait for another
    inside, so each may sample as many tokens as its own rows need; they meet again when the block is left.
    """
    units = [m for m in model.modules() if isinstance(m, FSDPModule)]
    for unit in units:
        unit.set_reshard_after_forward(False, recurse=False)
        unit.unshard()
    try:
        yield model
    finally:
        for unit in units:
            unit.set_reshard_after_forward(True, recurse=False)
            unit.reshard()
