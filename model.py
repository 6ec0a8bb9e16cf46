"""One base for every role: LoRA adapters by hand, value head, ranks, FSDP2, checkpoints.

    model, tokenizer = load_model("toy/base")
    add_lora(model, "policy", r=16, alpha=32)
    with use_lora(model, "policy"):
        ids = generate(model, [encode_prompt(tokenizer, "Hello")], max_new_tokens=20)

One frozen base plays policy, critic R_φ and reference; `use_lora` switches between them, so an
8B model lies in memory once. Under torchrun each process is one rank; alone it is rank 0 of 1.
B rows, P prompt tokens (padded left), T response tokens (padded right), H hidden size.

Paper: the adapters of Appendix D, the V_ψ of §3.5; nothing of loading, ranks and files.
Departure from common practice: adapters are merged into the base for decoding alone, and only
in float32: in bfloat16 a merged update of the size that PPO makes is rounded away.
"""

from __future__ import annotations

import json
import math
import os
import re
from contextlib import contextmanager, nullcontext
from datetime import date
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, AutoTokenizer

from data import ModelError
from runtime import atomic_directory, checksum, find_device, find_files, read_json, read_tensors
from sampling import head_weight, positions_of

DATE = date(2024, 7, 26)             # in the place of today's; Llama 3.1's own
# The prompt of a model that has no chat template of its own (toy/base, most base models).
PLAIN_TEMPLATE = "{prompt}\n\nAnswer:\n"
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")        # PEFT's names
# On Hopper GPUs cuDNN's attention returns NaN gradients for masked inputs of 64, 192, 320, …
# tokens (pytorch issue 196678), and it plans anew for each shape. The other kernels do neither.
torch.backends.cuda.enable_cudnn_sdp(False)
# What makes of PEFT's adapters something else than W x + (alpha / r) B A x.
OTHER_KINDS = ("use_dora", "use_rslora", "rank_pattern", "alpha_pattern", "modules_to_save",
               "fan_in_fan_out", "lora_bias")


# ── Loading and prompts

def load_model(path, dtype=None, device=None, to_shard=False):  # Table 5
    """Load a causal LM, frozen, and its tokenizer from a directory or hub id; never a pickle.

    dtype: a torch dtype or its name; None is bfloat16, but on a CPU, whose bfloat16 kernels are
    slow, float32. to_shard: leave the weights in their files, which are mapped into memory,
    until `shard` moves them to `device`. A template that writes today's date is given DATE.
    Raises ModelError where there is no such model, where the tokenizer has more tokens than it,
    where the head is not the product `hidden @ weight.T` that is scored, or where the GPU has
    no bfloat16.
    """
    device = torch.device(device or find_device())
    dtype = dtype or ("float32" if device.type == "cpu" else "bfloat16")
    if (device.type == "cuda" and str(dtype).endswith("bfloat16")
            and not torch.cuda.is_bf16_supported(including_emulation=False)):
        raise ModelError(f"{torch.cuda.get_device_name(device)} has no bfloat16; use --dtype "
                         f"float32, or float16 for a small memory")
    try:
        # Lengths are checked by row, and not by the tokenizer.
        tokenizer = AutoTokenizer.from_pretrained(path, model_max_length=1 << 30)
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, use_safetensors=True)
    except (OSError, ValueError, SafetensorError) as error:
        reason = str(error).strip().split("\n")[0]
        raise ModelError(f"cannot load a model from {path}: {reason} (--model takes a hub id "
                         f"or a directory in Hugging Face format)") from error
    if tokenizer.vocab_size > model.config.vocab_size:
        raise ModelError(f"{path}: its tokenizer has {tokenizer.vocab_size} tokens and the "
                         f"model {model.config.vocab_size}; they do not belong together")
    if isinstance(tokenizer.chat_template, str):
        # Whenever a run goes on, and for R_φ and eval.py on any day, x is to be the same.
        tokenizer.chat_template = re.sub(
            r"""strftime_now\((["'])(.*?)\1\)""",
            lambda call: repr(DATE.strftime(call[2])), tokenizer.chat_template)
    model.requires_grad_(False).eval()
    if not to_shard:
        model.to(device)
    _check_plain_head(model, path)
    return model, tokenizer


@torch.no_grad()
def _check_plain_head(model, path):
    """Soft-capped, scaled or biased logits would be drawn and scored by different formulas.

    Without the blocks, which a model that is to be sharded should not read whole.
    """
    blocks = getattr(model.base_model, "layers", None)
    if blocks:
        model.base_model.layers = nn.ModuleList()
    # From id 1 on: 0 may be a blank padding row.
    ids = torch.arange(1, min(9, model.config.vocab_size), device=model.device)[None]
    plain = model.base_model(ids).last_hidden_state @ head_weight(model).T
    logits = model(ids).logits
    if blocks:
        model.base_model.layers = blocks
    if not torch.allclose(plain, logits, rtol=1e-2, atol=1e-2):
        raise ModelError(f"{path}: this architecture changes its logits after the head (by a "
                         f"bias, a scale or a soft cap); Llama, Mistral and Qwen do not")


def encode_prompt(tokenizer, prompt: str | list[dict]) -> list[int]:  # Table 5
    """A user turn, or chat messages that end with one, as ids, ready for the model's answer."""
    turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if tokenizer.chat_template:                                   # which writes its own BOS
        text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        return tokenizer(text, add_special_tokens=False).input_ids
    bos = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    plain = {"user": PLAIN_TEMPLATE, "system": "{prompt}\n\n", "assistant": "{prompt}\n\n"}
    text = "".join(plain[turn["role"]].replace("{prompt}", turn["content"]) for turn in turns)
    return bos + tokenizer(text, add_special_tokens=False).input_ids


def encode_answer(tokenizer, text: str) -> list[int]:
    """Target ids of teacher forcing: the text and EOS, so that the model learns to stop."""
    return tokenizer(text, add_special_tokens=False).input_ids + [eos_ids(tokenizer)[0]]


def eos_ids(tokenizer, model=None) -> list[int]:
    """Every id that ends an answer: the tokenizer's EOS, then the generation config's."""
    more = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ids = [tokenizer.eos_token_id, *(more if isinstance(more, list) else [more])]
    ids = [token for token in dict.fromkeys(ids) if token is not None]
    if not ids:
        raise ModelError("the tokenizer has no EOS token, so an answer could never end")
    return ids


# ── LoRA by hand (Hu et al. 2021): W x + (alpha / r) B A x

class LoRALinear(nn.Module):
    """A frozen linear layer with named low-rank updates, of which at most one is active."""

    def __init__(self, base_layer: nn.Linear):
        super().__init__()
        self.base_layer = base_layer
        self.lora_A, self.lora_B = nn.ParameterDict(), nn.ParameterDict()   # [r, in], [out, r]
        self.scaling, self.dropout = {}, {}                                 # alpha / r, share
        self.active: str | None = None
        self.merged: Tensor | None = None                # W + (alpha / r) B A of the active one

    def add(self, name: str, r: int, alpha: float, dropout: float):
        """A uniform as nn.Linear draws it, B zero: it changes nothing until it is trained.

        A is drawn on the CPU, so that its values do not depend on the device.
        """
        weight = self.base_layer.weight
        A, B = torch.empty(r, weight.shape[1]), torch.zeros(weight.shape[0], r)
        nn.init.kaiming_uniform_(A, a=math.sqrt(5))
        self.lora_A[name] = nn.Parameter(A.to(weight.device, torch.float32))
        self.lora_B[name] = nn.Parameter(B.to(weight.device, torch.float32))
        self.scaling[name], self.dropout[name] = alpha / r, dropout

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] → [..., out] in the base layer's dtype; the update is made in float32."""
        if self.merged is not None:
            return F.linear(x, self.merged, self.base_layer.bias)
        y = self.base_layer(x)
        if self.active not in self.lora_A:
            return y
        A, B = self.lora_A[self.active], self.lora_B[self.active]
        if self.training and self.dropout[self.active]:
            x = F.dropout(x, self.dropout[self.active])
        low = F.linear(x.to(A.dtype), A) * self.scaling[self.active]             # [..., r]
        return y + F.linear(low, B).to(y.dtype)


def _lora_layers(model, name: str | None = None) -> dict[str, LoRALinear]:
    """Path → layer, of all or of those that have the adapter `name`."""
    return {path: layer for path, layer in model.named_modules()
            if isinstance(layer, LoRALinear) and (name is None or name in layer.lora_A)}


def _linear_layers(model) -> dict[str, nn.Linear]:
    """Path → linear layer, wrapped or not, of all that an adapter may change."""
    return {path.removesuffix(".base_layer"): layer for path, layer in model.named_modules()
            if isinstance(layer, nn.Linear) and layer is not model.get_output_embeddings()}


def _wrap(model, path: str) -> LoRALinear:
    """The LoRALinear at `path`, put around the nn.Linear that stands there if need be."""
    layer = model.get_submodule(path)
    if isinstance(layer, nn.Linear):
        layer = LoRALinear(layer).train(layer.training)
        model.set_submodule(path, layer)
    return layer


def _check_name(model, name: str, loaded: bool):
    if bool(_lora_layers(model, name)) != loaded:
        raise ModelError(f"{'no' if loaded else 'already an'} adapter named {name!r} is loaded")


def target_layers(model, target_modules) -> list[str]:
    """The paths of the linear layers whose last names are targets; ModelError for others."""
    names = {path: path.rpartition(".")[2] for path in sorted(_linear_layers(model))}
    known = set(names.values())
    if absent := set(target_modules) - known:
        raise ModelError(f"no linear layer is named {', '.join(sorted(absent))}; this model "
                         f"has {', '.join(sorted(known))}")
    return [path for path, last in names.items() if last in target_modules]


def add_lora(model, name: str, r: int = 16, alpha: float = 32, dropout: float = 0.0,
             target_modules=("q_proj", "v_proj")) -> list[nn.Parameter]:
    """Give every linear layer whose last name is a target a new adapter; its parameters."""
    _check_name(model, name, loaded=False)
    for path in target_layers(model, target_modules):
        _wrap(model, path).add(name, r, alpha, dropout)
    return lora_parameters(model, name)


@contextmanager
def use_lora(model, name: str | None, merge: bool = False):
    """Inside, the model runs with this adapter alone; None is the bare base.

    merge: one product for a layer, not three, where the base is whole and in float32. For
    decoding, whose passes are many and small: the copy costs the memory of those layers.
    """
    if name is not None:
        _check_name(model, name, loaded=True)
    layers = _lora_layers(model).values()
    before = [layer.active for layer in layers]
    for layer in layers:
        layer.active, layer.merged = name, None
        W = layer.base_layer.weight
        whole = W.dtype == torch.float32 and not isinstance(W, DTensor)
        if merge and whole and name in layer.lora_A:
            update = layer.lora_B[name].detach() @ layer.lora_A[name].detach()
            layer.merged = torch.add(W, update, alpha=layer.scaling[name])
    try:
        yield model
    finally:
        for layer, active in zip(layers, before):
            layer.active, layer.merged = active, None


def lora_parameters(model, name: str) -> list[nn.Parameter]:
    """The tensors of one adapter, A [r, in] and B [out, r] of each layer, in a fixed order."""
    layers = sorted(_lora_layers(model, name).items())
    return [x[name] for _, layer in layers for x in (layer.lora_A, layer.lora_B)]


def fingerprint(model) -> str:
    """A hash of shapes and bfloat16 corners: of one base the same in float32 and bfloat16."""
    embeddings = model.get_input_embeddings().weight
    if isinstance(embeddings, DTensor):
        return model.fingerprint_when_whole     # by `shard`, so that one rank can save alone
    corners = [w.detach()[:: max(1, len(w) // 64), :64].bfloat16().tolist()
               for w in (embeddings, head_weight(model))]
    shape = [*embeddings.shape, model.config.num_hidden_layers]
    return checksum(state=[shape, corners])[:16]


def save_lora(model, name: str, directory):
    """Write one adapter in PEFT's format, whole or not at all; PEFT finds its base from any
    directory."""
    _check_name(model, name, loaded=True)
    layers, tensors = _lora_layers(model, name), {}
    for path, layer in layers.items():
        for side, x in (("A", layer.lora_A[name]), ("B", layer.lora_B[name])):
            key = f"base_model.model.{path}.lora_{side}.weight"
            tensors[key] = x.detach().cpu().contiguous()
    r, base = len(layer.lora_A[name]), model.config._name_or_path
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": r,
              "lora_alpha": layer.scaling[name] * r, "lora_dropout": layer.dropout[name],
              "target_modules": sorted({path.rpartition(".")[2] for path in layers}),
              "base_model_name_or_path": os.path.abspath(base) if os.path.isdir(base) else base}
    metadata = {"format": "pt", "base_fingerprint": fingerprint(model)}
    with atomic_directory(directory) as temporary:
        (temporary / ADAPTER_FILES[0]).write_text(json.dumps(config, indent=2) + "\n")
        save_file(tensors, temporary / ADAPTER_FILES[1], metadata)


def load_lora(model, name: str, directory) -> list[nn.Parameter]:
    """Read an adapter in PEFT's format under a name of ours; returns its parameters.

    Raises ModelError where a file is lost or damaged, or where the adapter is of another kind
    (DoRA, rsLoRA, …) or for another base; the model then stays as it was.
    """
    _check_name(model, name, loaded=False)
    config_path, path = find_files(directory, *ADAPTER_FILES)
    config = read_json(config_path)
    if kinds := [key for key in OTHER_KINDS if config.get(key)]:
        raise ModelError(f"{directory}: the adapter sets {kinds[0]}, not supported here")
    if lacking := {"r", "lora_alpha"} - config.keys():
        raise ModelError(f"{config_path}: {min(lacking)} is not there; save the adapter again")
    tensors, metadata = read_tensors(path)
    ours, base = fingerprint(model), config.get("base_model_name_or_path")
    if metadata.get("base_fingerprint", ours) != ours:
        raise ModelError(f"{directory}: this adapter was made for another base ({base}), not "
                         f"for {model.config._name_or_path}")
    pairs = {}                                        # path of the layer → its A and B
    for key, x in tensors.items():
        layer, _, side = key.removeprefix("base_model.model.").partition(".lora_")
        pairs.setdefault(layer, {})[side.removesuffix(".weight")] = x
    here = {layer: list(x.weight.shape) for layer, x in _linear_layers(model).items()}
    for layer, pair in pairs.items():
        whole = pair.keys() == {"A", "B"}
        there = [*pair["B"].shape[:1], *pair["A"].shape[1:]] if whole else "no LoRA pair"
        if here.get(layer) != there:
            raise ModelError(f"{directory}: made for another base: {layer} is "
                             f"{here.get(layer, 'absent')} here and {there} in the adapter")
    for layer, pair in pairs.items():
        lora, r = _wrap(model, layer), len(pair["A"])
        lora.add(name, r, config["lora_alpha"] * r / config["r"], config.get("lora_dropout", 0))
        lora.lora_A[name].data.copy_(pair["A"])
        lora.lora_B[name].data.copy_(pair["B"])
    return lora_parameters(model, name)


# ── Forward passes

class ValueHead(nn.Module):
    """V_ψ(x, y_<t) (§3.5, Alg. 4 l.5): linear in the policy's last hidden state, 0 at first."""

    def __init__(self, hidden_size: int, device=None):
        super().__init__()
        self.linear = nn.Linear(hidden_size, 1, dtype=torch.float32, device=device)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., H] → [...]"""
        return self.linear(hidden.float()).squeeze(-1)


def response_hidden(model, prompts: Tensor, prompt_mask: Tensor, responses: Tensor,
                    mask: Tensor) -> Tensor:
    """The states that predict the response: h_t has seen x and y_<t (Alg. 4 l.22, 24).

    prompts, prompt_mask: [B, P]; responses, mask: [B, T] → [B, T, H]
    """
    attention = torch.cat([prompt_mask, mask], dim=1)
    assert attention[:, prompts.shape[1] - 1].all(), "Alg. 4 l.22: y_1 follows the last of x"
    out = model.base_model(torch.cat([prompts, responses], dim=1), attention_mask=attention,
                           position_ids=positions_of(attention), use_cache=False)
    hidden = out.last_hidden_state[:, prompts.shape[1] - 1 : -1]
    assert hidden.shape[:2] == responses.shape, "Alg. 4 l.22: one h_t for each y_t"
    return hidden


# ── Less memory: recomputed activations, and a base spread over the ranks (FSDP2)

def decoder_blocks(model) -> list[nn.Module]:
    """The repeated layers of the base, in order, as Llama, Mistral, Qwen and Phi name them."""
    if not hasattr(model.base_model, "layers"):
        raise ModelError(f"{model.config._name_or_path}: its blocks are not named `layers`; "
                         f"run without --shard and --activation_checkpointing")
    return list(model.base_model.layers)


def checkpoint_activations(model):
    """From now on a block keeps only its input for the backward pass, which runs it once more.

    transformers' `gradient_checkpointing_enable` acts in training mode alone, and in the second
    run the adapter must be active that was so in the first, though `use_lora` has been left.
    """
    for block in decoder_blocks(model):
        if not isinstance(block.forward, partial):
            block.forward = partial(_recomputed, block, block.forward)


def _recomputed(block, forward, *args, **kwargs):
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    name = next((layer.active for layer in _lora_layers(block).values()
                 if layer.active in layer.lora_A), None)
    return checkpoint(forward, *args, use_reentrant=False,
                      context_fn=lambda: (nullcontext(), use_lora(block, name)), **kwargs)


def shard(model, device):
    """Spread the frozen base over all ranks with FSDP2; returns the model, now on `device`.

    A model from `load_model(…, to_shard=True)` is read unit by unit, so that a device never
    holds more than its share and two units. In sampling (`gathered`) it holds the whole base.

    Units that are gathered and freed together: the embeddings, every block, the head, and the
    rest with the base. Adapters, loaded before or after, stay whole on every rank, in float32:
    an FSDP unit must be of one dtype, and so any one rank saves them whole. The caller sums
    their gradients over the ranks.
    """
    device = torch.device(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    model.fingerprint_when_whole = fingerprint(model)
    adapters = {p for layer in _lora_layers(model).values()
                for p in (*layer.lora_A.values(), *layer.lora_B.values())}
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = model.config.tie_word_embeddings
    units = [embeddings, *decoder_blocks(model), model.base_model]
    for unit in units if tied else [*units, head]:
        fully_shard(unit, mesh=mesh, reshard_after_forward=True, ignored_params=adapters)
    if tied:
        head.weight = embeddings.weight              # the sharded one
    for p in adapters:
        p.data = p.data.to(device)
    with torch.no_grad():                            # FSDP learns from the first pass its roots
        ids = torch.zeros(1, 1, dtype=torch.long, device=device)
        hidden = model.base_model(ids, use_cache=False).last_hidden_state
        if not tied:
            head(hidden)
    return model


@contextmanager
def gathered(model):
    """Inside, a sharded model is whole on every rank, and no rank waits for another.

    For sampling, where the parameters would otherwise be gathered for every token.
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
