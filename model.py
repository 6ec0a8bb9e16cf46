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

import fcntl
import hashlib
import json
import math
import os
import re
import resource
import shutil
import sys
import warnings
from contextlib import contextmanager, nullcontext
from datetime import date, timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

from data import InputError
from sampling import ModelError, head_weight, positions_of

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


# ── Ranks: the processes that torchrun starts, one per GPU

RANK = int(os.environ.get("RANK", 0))                # as torchrun sets them
RANKS = int(os.environ.get("WORLD_SIZE", 1))
HOSTS = None                                         # the processors, where `everyone` meets


def find_device() -> torch.device:
    """This rank's GPU, else the CPU; prints why a GPU that is there cannot be used."""
    with warnings.catch_warnings(record=True) as problems:
        warnings.simplefilter("always")
        cuda = torch.cuda.is_available()
    for problem in problems:                         # a driver for another version of CUDA
        reason = str(problem.message).split(" (Triggered")[0]
        say(f"warning: no GPU is used, torch {torch.__version__} is built for CUDA "
            f"{torch.version.cuda}: {' '.join(reason.split())}")
    local = int(os.environ.get("LOCAL_RANK", 0))
    return torch.device("cuda", local) if cuda else torch.device("cpu")


def start_ranks(minutes: float) -> torch.device:
    """Join the other ranks, if any; this one's device. minutes: how long ranks wait."""
    global HOSTS
    device = find_device()
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.set_device(device)
    if RANKS > 1:
        wait = timedelta(minutes=minutes)
        dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=wait)
        HOSTS = dist.new_group(backend="gloo", timeout=wait)
    return device


def together(collective, *args, **options):
    """What all ranks do at once, where there are several. InputError where one is gone or late.

    On CUDA for `everyone` alone: a sum over NCCL that waits too long ends the process itself.
    """
    try:
        return collective(*args, **options) if RANKS > 1 else None
    except RuntimeError as error:
        raise InputError(f"rank {RANK} lost another rank, or waited --rank_timeout for it "
                         f"({error}); the first error says why, and the same command goes on "
                         f"from the last checkpoint") from error


def everyone(share: list) -> list:
    """The lists of all ranks as one; it undoes rows[RANK::RANKS], by which they are dealt."""
    if RANKS == 1:
        return share
    shares = [share] * RANKS
    together(dist.all_gather_object, shares, share, group=HOSTS)
    rows = [None] * sum(map(len, shares))
    for rank, part in enumerate(shares):
        rows[rank::RANKS] = part
    return rows


def all_sum(x: Tensor) -> Tensor:
    """The sum of a tensor of any shape over all ranks, in place where there are several."""
    together(dist.all_reduce, x)
    return x


def peak_memory() -> float:
    """GB that this process has held at most so far: of its GPU, else of main memory."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 1e9
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9


def say(text: str):
    """Print from the first rank only, past any progress bar."""
    if RANK == 0:
        tqdm.write(text)


# ── Files that are whole or absent; nothing that is loaded can run code

@contextmanager
def atomic_directory(directory):
    """Write into a temporary neighbour, which becomes `directory` when it is on the disk."""
    directory = Path(directory)
    new, old = (directory.with_name(f".{directory.name}.{kind}-{os.getpid()}")
                for kind in ("new", "old"))
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    try:
        yield new
        for path in (*new.iterdir(), new):
            _sync(path)
        if directory.exists():
            shutil.rmtree(old, ignore_errors=True)   # of a killed run with this process id
            directory.rename(old)
        new.rename(directory)
        _sync(directory.parent)                      # the new name, too, survives a power cut
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(new, ignore_errors=True)


def _sync(path: Path):
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def find_files(directory, *names: str) -> list[Path]:
    """Files of an adapter or a checkpoint. Raises ModelError where one is lost."""
    paths = [Path(directory) / name for name in names]
    if lost := [path.name for path in paths if not path.is_file()]:
        raise ModelError(f"{directory} holds no {lost[0]}, and cannot be used without it")
    return paths


def read_json(path: Path) -> dict:
    """The JSON object in a file. Raises ModelError where it is damaged."""
    try:
        return dict(json.loads(path.read_text("utf-8")))
    except (ValueError, TypeError) as error:
        raise ModelError(f"{path} is no JSON object ({error}); the file is damaged") from error


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """(name → tensor of any shape, metadata) of a safetensors file, or ModelError."""
    try:
        with safe_open(path, "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}
    except SafetensorError as error:
        raise ModelError(f"{path} is damaged ({error})") from error


def checksum(*paths: Path, state=None) -> str:
    """sha256 of files and of a JSON value."""
    total = hashlib.sha256(json.dumps(state).encode())
    for path in paths:
        with open(path, "rb") as file:
            total.update(hashlib.file_digest(file, "sha256").digest())
    return total.hexdigest()


def save_checkpoint(directory, tensors: dict[str, Tensor], state: dict):
    """Write tensors of any shape and a JSON state to one directory, whole or not at all."""
    plain = {name: x.detach().cpu().contiguous().clone() for name, x in tensors.items()}
    with atomic_directory(directory) as temporary:
        path = temporary / "tensors.safetensors"
        save_file(plain, path)
        checked = {**state, "sha256": checksum(path, state=state)}
        (temporary / "state.json").write_text(json.dumps(checked))


def load_checkpoint(directory) -> tuple[dict[str, Tensor], dict]:
    """(tensors of any shape, state), or ModelError where a file is lost or one bit damaged."""
    path, state_path = find_files(directory, "tensors.safetensors", "state.json")
    state = read_json(state_path)
    state.pop("sha256", None)
    # The text, for a flip may leave the JSON as it was: 1e-5 is 1E-5.
    if state_path.read_text() != json.dumps({**state, "sha256": checksum(path, state=state)}):
        raise ModelError(f"{path} is damaged: its sha256 is not the one in state.json")
    return read_tensors(path)[0], state


def checkpoints(run: Path) -> list[Path]:
    """The checkpoints of a run directory, oldest first."""
    number = re.compile(r"checkpoint-(\d+)").fullmatch
    found = [path for path in run.glob("checkpoint-*") if number(path.name)]
    return sorted(found, key=lambda path: int(number(path.name)[1]))


def keep_checkpoint(run: Path, optimizer, state: dict, every: int, start: int, last: int):
    """Write checkpoint-N of the N-th iteration: of every so many, and of the last.

    Once it is whole, only the one before stays with it, which this process has written or taken
    up at `start`: what is damaged goes. Raises ModelError where the disk does not take it.
    """
    n = state["iteration"]
    if RANK > 0 or n % every and n < last:
        return
    former, tensors = max(start, (n - 1) // every * every), optimizer_tensors(optimizer)
    path, good = (run / f"checkpoint-{number}" for number in (n, former))
    try:
        save_checkpoint(path, tensors, {**state, "ranks": RANKS})
    except (OSError, SafetensorError) as error:
        need = sum(x.nbytes for x in tensors.values()) / 1e6
        raise ModelError(f"{path} could not be written ({error}): it needs {need:.1f} MB; "
                         f"the same command goes on from iteration {former}") from error
    killed = run.glob(".checkpoint-*")
    for old in {*checkpoints(run), *killed} - {path, good}:
        shutil.rmtree(old)


def newest_checkpoint(run: Path) -> tuple[Path | None, dict[str, Tensor], dict]:
    """(path, tensors of any shape, state) of the newest that is whole; says which are not."""
    found = None, {}, {}
    for path in reversed(checkpoints(run)):
        try:
            found = path, *load_checkpoint(path)
            break
        except (ModelError, OSError) as error:
            say(f"warning: passed over {path} ({error}); going on from the one before, if any")
    if len(set(everyone([str(found[0])]))) > 1:
        raise InputError(f"{run}: the ranks see different checkpoints; all nodes must share it")
    if (ranks := found[2].get("ranks", RANKS)) != RANKS:
        say(f"not bit-exact from here on: {ranks} ranks summed in another order")
    return found


def optimizer_parameters(optimizer) -> list[nn.Parameter]:
    """All that an optimizer trains, of any shape, in a fixed order."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def optimizer_tensors(optimizer) -> dict[str, Tensor]:
    """Every parameter, of any shape, and its moments, for a checkpoint."""
    return {f"{i}.{name}": x for i, p in enumerate(optimizer_parameters(optimizer))
            for name, x in {"parameter": p.data, **optimizer.state[p]}.items()}


def restore_optimizer(optimizer, tensors: dict[str, Tensor]):
    """Put back what `optimizer_tensors` gave; parameters and moments keep any shape."""
    parameters = optimizer_parameters(optimizer)
    for key, x in tensors.items():
        i, name = key.split(".")
        p = parameters[int(i)]
        if name == "parameter":
            p.data.copy_(x)
        else:
            optimizer.state[p][name] = x.to(p.device)


def lock_directory(directory: Path):
    """A directory has one writer: the lock lasts as long as the file that is returned."""
    directory.mkdir(parents=True, exist_ok=True)
    file = open(directory / ".lock", "a")
    try:
        if RANK == 0:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise InputError(f"{directory}: another process is writing to it; wait for it, or "
                         f"choose another directory") from error
    return file
