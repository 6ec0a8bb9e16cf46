"""One frozen base model for all roles, with LoRA adapters, a value head and FSDP2 sharding.

    model, tokenizer = load_model("toy/base")
    add_lora(model, "policy", r=16, alpha=32)
    with use_lora(model, "policy"):
        ids = generate(model, [encode_prompt(tokenizer, "Hello")], max_new_tokens=20)

The same base model is the policy, the critic R_φ and the reference. `use_lora` switches between
them, so memory holds an 8B model only once.
B rows, P prompt tokens (padded left), T response tokens (padded right), H hidden size.

Paper: the adapters of Appendix D and V_ψ of §3.5. The paper does not describe loading, ranks or
files. Departure from common practice: adapters are merged into the base only while decoding
(or for serving, by `merge_lora`), and only if the base is float32. In bfloat16, rounding would
cancel most of a small update, such as that of PPO.
"""

import json
import os
import re
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import date
from functools import cache, partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, AutoTokenizer

from data import DTYPES, InputError, ModelError, flag, get_task, reward_prompt
from runtime import (WORLD_SIZE, atomic_directory, checksum, find_device, find_files,
                     print_rank0, read_json, read_tensors)
from sampling import context_length, head_weight

# Chat templates get this date instead of today's. It is the default date of Llama 3.1.
DATE = date(2024, 7, 26)
# The chat template of a model that has none (toy/base, most base models).
PLAIN_TEMPLATE = ("{{ bos_token }}{% for turn in messages %}{{ turn.content }}"
                  "{{ '\\n\\nAnswer:\\n' if turn.role == 'user' else '\\n\\n' }}{% endfor %}")
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")        # PEFT's names
HASH_FILE = "sha256.json"
# On Hopper GPUs, the attention kernel of cuDNN returns NaN gradients for masked inputs of 64,
# 192, 320, … tokens (pytorch issue 196678). It also builds a new plan for each input shape. The
# other kernels do not have these problems.
torch.backends.cuda.enable_cudnn_sdp(False)
# With these options of PEFT, an adapter computes W x + (alpha / r) B A x with the base's own W.
# The free ones may have any value: the tensors in the file say which layers are adapted, and a
# `*_config` has an effect only together with its value of init_lora_weights.
FREE_OPTIONS = """
    task_type auto_mapping peft_version base_model_name_or_path revision inference_mode r
    lora_alpha lora_dropout target_modules exclude_modules layers_to_transform layers_pattern
    megatron_core qalora_group_size eva_config corda_config lora_ga_config loftq_config
    ensure_weight_tying""".split()
# Neutral values. PiSSA, OLoRA, CorDA, LoftQ and LoRA-GA change W, so they are not among them.
NEUTRAL_VALUES = {"peft_type": ["LORA"], "bias": ["none"],
                  "init_lora_weights": [True, False, "gaussian", "eva", "orthogonal", "mica"]}
OFF = [None, False, [], {}]                       # neutral values of all other options


# ── Loading and prompts

@dataclass
class BaseConfig:
    """Base model: flags of text2grad.py and reward_model.py."""
    task: str = flag("toy", "toy, slf5k, ultrafeedback, kodcode, or module:NAME of your own")
    model: str = flag("toy/base", "base model: path or hub id (paper: Llama-3.1-8B-Instruct)")
    seed: int = flag(0, "random seed", most=10**9)
    max_critique_tokens: int = flag(96, "tokens of a critique (release: 500, 768)", least=1)
    dtype: str | None = flag(
        None, "data type of the base; None: bfloat16 on CUDA, float32 on a CPU", DTYPES)
    activation_checkpointing: bool = flag(False, "recompute activations to save memory")
    shard: bool = flag(False, "shard the frozen base over the ranks (FSDP2)")


def find_model(path) -> str:
    """The path of a base. One that is shipped with the code is found from any directory."""
    shipped = os.path.join(os.path.dirname(__file__), path)
    return shipped if os.path.isdir(shipped) and not os.path.isdir(path) else str(path)


def load_model(path, dtype=None, device=None, to_shard=False):  # Table 5
    """Load a frozen causal LM and its tokenizer from a directory (`find_model`) or hub id.

    Only safetensors files are read, because pickle files can run code, and Python files in the
    directory are not run. dtype: a torch dtype or its name. None means float32 on a CPU, where
    bfloat16 is slow, and bfloat16 on a GPU.
    to_shard: keep the weights in memory-mapped files until `shard` moves them to `device`. Chat
    templates insert DATE instead of today's date.
    Raises ModelError if the model cannot be loaded, if weights are missing or not finite, if
    the tokenizer has an id without embedding, if the logits are not exactly `hidden @
    weight.T`, or if the GPU does not support bfloat16.
    """
    device = torch.device(device or find_device())
    dtype = dtype or ("float32" if device.type == "cpu" else "bfloat16")
    needs_bfloat16 = device.type == "cuda" and str(dtype).endswith("bfloat16")
    if needs_bfloat16 and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise ModelError(f"{torch.cuda.get_device_name(device)} has no bfloat16; use --dtype "
                         f"float32, or float16 to save memory")
    try:
        return _read_model(find_model(path), dtype, device, to_shard)
    except ModelError:
        raise
    except Exception as error:      # reading a damaged directory can raise any exception
        reason = str(error).strip().split("\n")[0]
        raise ModelError(f"cannot load a model from {path}: {type(error).__name__}: {reason}; "
                         f"give --model a hub id or a directory in Hugging Face format"
                         ) from error


def load_base(config, device):
    """`load_model` with the settings of a BaseConfig → (model, tokenizer)."""
    if config.shard and WORLD_SIZE == 1:
        raise ModelError("--shard spreads the base over ranks: use torchrun --nproc_per_node N")
    model, tokenizer = load_model(config.model, config.dtype, device, to_shard=config.shard)
    if config.activation_checkpointing:
        checkpoint_activations(model)
    if config.shard:
        shard(model, device)
    return model, tokenizer


def _read_model(path, dtype, device, to_shard):
    if os.path.exists(os.path.join(path, ADAPTER_FILES[0])):
        raise ModelError(f"{path} is an adapter; give its base as --model, and the adapter as "
                         f"--adapter or --reward_model")
    # Callers check the length of each row, so the tokenizer needs no limit.
    tokenizer = AutoTokenizer.from_pretrained(path, model_max_length=1 << 30,
                                              trust_remote_code=False)
    model, report = AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, use_safetensors=True, output_loading_info=True,
        trust_remote_code=False)
    missing = report["missing_keys"]
    if missing:
        raise ModelError(f"{path}: {len(missing)} weights are missing, the first is "
                         f"{min(missing)}; restore the files of the model")
    largest_id = max(tokenizer.get_vocab().values())               # with added tokens
    if largest_id >= model.config.vocab_size:
        raise ModelError(f"{path}: the tokenizer has {largest_id + 1} tokens and the model "
                         f"{model.config.vocab_size}; use the model's own tokenizer, or resize "
                         f"its embeddings")
    if isinstance(tokenizer.chat_template, str):
        # A resumed run, R_φ and eval.py must see the same prompt x on any day.
        tokenizer.chat_template = re.sub(
            r"""strftime_now\((["'])(.*?)\1\)""",
            lambda match: repr(DATE.strftime(match[2])), tokenizer.chat_template)
    model.requires_grad_(False).eval()
    if not to_shard:
        model.to(device)
        _check_finite(model.named_parameters(), path)
    _check_plain_head(model, path)
    return model, tokenizer


def _check_finite(named_tensors, source):
    """Raise ModelError if one of the (name, tensor) pairs has a NaN or infinite number."""
    for name, x in named_tensors:
        local = x.to_local() if isinstance(x, DTensor) else x
        if not local.sum(dtype=torch.float32).isfinite():              # needs no copy of x
            raise ModelError(f"{source}: {name} has a NaN or infinite value; restore it "
                             f"or train it again")


@torch.no_grad()
def _check_plain_head(model, path):
    """Raise ModelError if the model caps or scales its logits, or adds a bias to them.

    Sampling and scoring compute only `hidden @ weight.T`. The check skips the decoder
    blocks, so that a model that will be sharded does not read all its weights yet.
    """
    blocks = getattr(model.base_model, "layers", None)
    if blocks:
        model.base_model.layers = nn.ModuleList()
    # The ids start at 1, because the embedding of id 0 may be all zeros (padding).
    ids = torch.arange(1, 9, device=model.device)[None]
    expected = model.base_model(ids).last_hidden_state @ head_weight(model).T
    logits = model(ids).logits
    if blocks:
        model.base_model.layers = blocks
    if not torch.allclose(expected, logits, rtol=1e-2, atol=1e-2):
        raise ModelError(f"{path}: this architecture changes its logits after the head (with a "
                         f"bias, a scale or a soft cap); use Llama, Mistral or Qwen")


def encode_prompt(tokenizer, prompt: str | list[dict]) -> list[int]:  # Table 5
    """Encode a user turn, or chat messages, as a prompt that the model continues to answer.

    Raises ModelError if the chat template refuses the turns, or leaves out the text of one.
    """
    turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    template = None if tokenizer.chat_template else PLAIN_TEMPLATE   # None: the tokenizer's own
    render = partial(tokenizer.apply_chat_template, chat_template=template, tokenize=False,
                     add_generation_prompt=True)                             # it contains BOS
    try:
        text = render(turns)
        for turn in turns:             # of earlier answers, a template may drop the thoughts
            if turn["role"] != "assistant" and turn["content"].strip() not in text:
                raise ValueError(f"it leaves out a {turn['role']} turn")
    except Exception as error:
        roles = ", ".join(turn["role"] for turn in turns)
        raise ModelError(f"the chat template of {tokenizer.name_or_path} refuses the turns "
                         f"{roles}: {error}; change it, or `policy_prompt` of the task"
                         ) from error
    tokens = special_tokens(tokenizer)
    if not any(token in turn["content"] for turn in turns for token in tokens):
        return tokenizer(text, add_special_tokens=False).input_ids
    # Special tokens of the template keep their meaning, and those that were typed are text.
    marks = [f"[text {i} of {len(turns)}]" for i in range(len(turns))]
    text = render([turn | {"content": mark} for turn, mark in zip(turns, marks)])
    ids = []
    for turn, mark in zip(turns, marks):
        before, _, text = text.partition(mark)
        ids += tokenizer(before, add_special_tokens=False).input_ids
        ids += encode_text(tokenizer, turn["content"])
    return ids + tokenizer(text, add_special_tokens=False).input_ids


@cache
def special_tokens(tokenizer) -> list[str]:
    """The texts of a tokenizer's special tokens, such as "<|im_end|>"."""
    return [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]


def encode_text(tokenizer, text: str) -> list[int]:
    """Encode a text without BOS or EOS. A special token that is typed in it is plain text."""
    return tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids


def encode_answer(tokenizer, text: str) -> list[int]:
    """Encode a text as training target. It ends with EOS, so that the model learns to stop."""
    return encode_text(tokenizer, text) + [eos_ids(tokenizer)[0]]


def scaled_rate(model, rate: float) -> float:
    """A learning rate for a model of this size: `rate` / (millions of parameters)^(1/3).

    `rate` suits a model of up to a million parameters.
    """
    frozen = sum(p.numel() for p in model.parameters() if not p.requires_grad)
    return rate / max(1.0, frozen / 1e6) ** (1 / 3)


def eos_ids(tokenizer, model=None) -> list[int]:
    """Ids that end an answer: the tokenizer's EOS, then the ids in the generation config."""
    ids = [tokenizer.eos_token_id]
    if model is not None:
        config_ids = model.generation_config.eos_token_id
        ids += config_ids if isinstance(config_ids, list) else [config_ids]
    ids = [token for token in dict.fromkeys(ids) if token is not None]
    if not ids:
        raise ModelError("the tokenizer has no EOS token, so answers would never end; set "
                         "eos_token in tokenizer_config.json")
    return ids


def drop_long_rows(rows: list[dict], model, tokenizer, config) -> list[dict]:
    """Keep rows whose prompt, response and critique fit the context; print how many do not."""
    context = context_length(model)
    instruction = len(encode_prompt(tokenizer, reward_prompt("", "")))
    room = context - instruction - config.max_new_tokens - config.max_critique_tokens
    limit = min(room, config.max_prompt_tokens or room)
    prompt = get_task(config.task).policy_prompt
    lengths = [len(encode_prompt(tokenizer, prompt(row))) for row in rows]
    fitting_rows = [row for row, length in zip(rows, lengths) if length <= limit]
    source = config.data or config.task
    if not fitting_rows:
        raise InputError(
            f"{source}: the shortest prompt has {min(lengths)} tokens, and the longest that "
            f"fits has {max(0, limit)}: of the model's {context} tokens, R_φ's instruction "
            f"takes {instruction}; lower --max_new_tokens ({config.max_new_tokens}) or "
            f"--max_critique_tokens ({config.max_critique_tokens}), or raise "
            f"--max_prompt_tokens if it is set")
    if len(fitting_rows) < len(rows):
        print_rank0(f"{source}: left out {len(rows) - len(fitting_rows)} of {len(rows)} rows, "
                    f"whose prompts have more than {limit} tokens")
    return fitting_rows


# ── LoRA (Hu et al. 2021): W x + (alpha / r) B A x

class LoRALinear(nn.Module):
    """A frozen linear layer with named LoRA adapters. At most one adapter is active."""

    def __init__(self, base_layer: nn.Linear):
        super().__init__()
        self.base_layer = base_layer
        self.lora_A = nn.ParameterDict()                 # adapter → A, [r, in]
        self.lora_B = nn.ParameterDict()                 # adapter → B, [out, r]
        self.scaling = {}                                # adapter → alpha / r
        self.dropout = {}                                # adapter → dropout probability
        self.active = None                               # name of the active adapter
        self.merged = None                               # W + (alpha / r) B A, [out, in]

    def add(self, name: str, r: int, alpha: float, dropout: float):
        """Add an adapter. It does not change the output at first, because B is zero.

        A is initialized like the weight of nn.Linear. It is drawn on the CPU, so that its
        values do not depend on the device.
        """
        base = self.base_layer
        A = nn.Linear(base.in_features, r, bias=False).weight.data
        B = torch.zeros(base.out_features, r)
        self.lora_A[name] = nn.Parameter(A.to(base.weight.device))
        self.lora_B[name] = nn.Parameter(B.to(base.weight.device))
        self.scaling[name] = alpha / r
        self.dropout[name] = dropout

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] → [..., out] in the base layer's dtype. The adapter runs in float32."""
        if self.merged is not None:
            return F.linear(x, self.merged, self.base_layer.bias)
        y = self.base_layer(x)
        if self.active not in self.lora_A:
            return y
        A = self.lora_A[self.active]
        B = self.lora_B[self.active]
        x = F.dropout(x, self.dropout[self.active], self.training)
        projection = F.linear(x.to(A.dtype), A) * self.scaling[self.active]      # [..., r]
        return y + F.linear(projection, B).to(y.dtype)


def _lora_layers(model, name=None):
    """A dict from path to LoRA layer, for all layers or those with the adapter `name`."""
    return {path: layer for path, layer in model.named_modules()
            if isinstance(layer, LoRALinear) and (name is None or name in layer.lora_A)}


def _linear_layers(model):
    """A dict from path to linear layer, for all layers but the head, adapted or not."""
    return {path.removesuffix(".base_layer"): layer for path, layer in model.named_modules()
            if isinstance(layer, nn.Linear) and layer is not model.get_output_embeddings()}


def _wrap(model, path):
    """Return the LoRALinear at `path`. If there is an nn.Linear, replace it first."""
    layer = model.get_submodule(path)
    if isinstance(layer, nn.Linear):
        layer = LoRALinear(layer).train(layer.training)
        model.set_submodule(path, layer)
    return layer


def _check_name(model, name: str, should_exist: bool):
    if bool(_lora_layers(model, name)) != should_exist:
        problem = "not loaded; call load_lora first" if should_exist else "already loaded"
        raise ModelError(f"the adapter {name!r} is {problem}")


def target_layers(model, target_modules, flag_name="--lora_targets") -> list[str]:
    """Paths of all linear layers with a target name, such as "q_proj", at the end.

    flag_name: the flag with the names, for the error. Raises ModelError if no linear layer of
    the model has that name.
    """
    names = {path: path.rpartition(".")[2] for path in sorted(_linear_layers(model))}
    choices = ", ".join(sorted(set(names.values()))) or "none: it has no torch.nn.Linear"
    unknown = set(target_modules) - set(names.values())
    if unknown:
        raise ModelError(f"{flag_name}: {type(model).__name__} has no linear layer named "
                         f"{', '.join(sorted(unknown))}; choose from its layers ({choices})")
    return [path for path, name in names.items() if name in target_modules]


def add_lora(model, name: str, r: int = 16, alpha: float = 32, dropout: float = 0.0,
             target_modules=("q_proj", "v_proj")) -> list[nn.Parameter]:
    """Add an adapter to the layers in `target_modules`; return the adapter's parameters.

    Raises ModelError if the adapter's name is in use or if a target does not exist.
    """
    _check_name(model, name, should_exist=False)
    for path in target_layers(model, target_modules):
        _wrap(model, path).add(name, r, alpha, dropout)
    return lora_parameters(model, name)


@contextmanager
def use_lora(model, name: str | None, merge: bool = False):
    """Use only this adapter inside the `with` block; None means the base without adapters.

    merge: add the adapter to the base weights, if these are float32 and not sharded. Decoding
    is then faster, because each layer needs one matrix product instead of three. The merged
    weights take as much memory as the base weights of these layers.
    """
    if name is not None:
        _check_name(model, name, should_exist=True)
    layers = _lora_layers(model).values()
    previous = [layer.active for layer in layers]
    for layer in layers:
        layer.active = name
        layer.merged = None
        weight = layer.base_layer.weight
        can_merge = weight.dtype == torch.float32 and not isinstance(weight, DTensor)
        if merge and can_merge and name in layer.lora_A:
            update = layer.lora_B[name].data @ layer.lora_A[name].data
            layer.merged = torch.add(weight, update, alpha=layer.scaling[name])
    try:
        yield model
    finally:
        for layer, active in zip(layers, previous):
            layer.active = active
            layer.merged = None


def merge_lora(model, name: str):
    """Turn each LoRA layer into a linear layer with the weight W + (alpha / r) B A, [out, in].

    `name` must be the only adapter, and W float32, as for `use_lora(…, merge=True)`.
    """
    with use_lora(model, name, merge=True):
        for path, layer in _lora_layers(model, name).items():
            layer.base_layer.weight.data = layer.merged
            model.set_submodule(path, layer.base_layer)


def lora_parameters(model, name: str) -> list[nn.Parameter]:
    """The parameters of an adapter in a fixed order: A [r, in] and B [out, r] of each layer."""
    parameters = []
    for _, layer in sorted(_lora_layers(model, name).items()):
        parameters += [layer.lora_A[name], layer.lora_B[name]]
    return parameters


def fingerprint(model) -> str:
    """A hash of the base's shape and a sample of its weights; equal in float32 and bfloat16."""
    embeddings = model.get_input_embeddings().weight
    if isinstance(embeddings, DTensor):
        # `shard` has stored the hash, so that one rank can save an adapter on its own.
        return model.fingerprint_before_sharding
    samples = [weight[:: max(1, len(weight) // 64), :64].bfloat16().tolist()
               for weight in (embeddings, head_weight(model))]
    shape = [*embeddings.shape, model.config.num_hidden_layers]
    return checksum(state=[shape, samples])[:16]


def save_lora(model, name: str, directory):
    """Save an adapter in PEFT's format; an error leaves no incomplete directory.

    The path of the base is absolute, so that PEFT finds it from any working directory.
    """
    _check_name(model, name, should_exist=True)
    layers = _lora_layers(model, name)
    tensors = {}
    for path, layer in layers.items():
        tensors[f"base_model.model.{path}.lora_A.weight"] = layer.lora_A[name]
        tensors[f"base_model.model.{path}.lora_B.weight"] = layer.lora_B[name]
    r = len(layer.lora_A[name])
    base = model.config._name_or_path
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": r,
              "lora_alpha": layer.scaling[name] * r, "lora_dropout": layer.dropout[name],
              "target_modules": sorted({path.rpartition(".")[2] for path in layers}),
              "base_model_name_or_path": os.path.abspath(base) if os.path.isdir(base) else base}
    with atomic_directory(directory) as temporary:
        (temporary / ADAPTER_FILES[0]).write_text(json.dumps(config, indent=2) + "\n")
        path = temporary / ADAPTER_FILES[1]
        save_file(tensors, path, {"format": "pt", "base_fingerprint": fingerprint(model)})
        (temporary / HASH_FILE).write_bytes(_adapter_hash(config, path))


def _adapter_hash(config, path):
    state = [config.get(option)
             for option in ("r", "lora_alpha", "lora_dropout", "target_modules")]
    return json.dumps({"sha256": checksum(path, state=state)}).encode()


def load_lora(model, name: str, directory) -> list[nn.Parameter]:
    """Read an adapter in PEFT's format, add it as `name` and return its parameters.

    The tensors in the file, not the option `target_modules`, say which layers are adapted.
    Raises ModelError if a file is missing or damaged, if the adapter is not plain LoRA (but
    DoRA, rsLoRA, PiSSA, …), if A or B of a layer is missing or does not fit, if there are other
    tensors, or if the adapter was trained on another base. The model then stays unchanged.
    """
    _check_name(model, name, should_exist=False)
    config_path, path = find_files(directory, *ADAPTER_FILES)
    config = read_json(config_path)
    for option, value in {"peft_type": None, **config}.items():
        if option not in FREE_OPTIONS and value not in NEUTRAL_VALUES.get(option, OFF):
            raise ModelError(f"{directory}: the adapter sets {option} to {value!r:.60}, which "
                             f"is not known to be plain LoRA; convert it, or train it without")
    hash_path = config_path.with_name(HASH_FILE)                    # PEFT does not write it
    if hash_path.exists() and hash_path.read_bytes() != _adapter_hash(config, path):
        raise ModelError(f"{directory} is damaged: {HASH_FILE} does not fit the other files; "
                         f"restore the adapter")
    try:
        r = int(config["r"])
        alpha = float(config["lora_alpha"])
        dropout = float(config.get("lora_dropout", 0))
    except (LookupError, TypeError, ValueError) as error:
        raise ModelError(f"{config_path}: r, lora_alpha or lora_dropout is missing or not a "
                         f"number ({error}); save the adapter again") from error
    tensors, metadata = read_tensors(path)
    _check_finite(tensors.items(), path)
    model_hash = fingerprint(model)
    if metadata.get("base_fingerprint", model_hash) != model_hash:
        raise ModelError(f"{directory}: this adapter was trained on another base "
                         f"({config.get('base_model_name_or_path')}), not on "
                         f"{model.config._name_or_path}; choose its base with --model")
    pairs = {}                                        # path of a layer → {"A": A, "B": B}
    for key, tensor in tensors.items():
        path, _, side = key.removeprefix("base_model.model.").partition(".lora_")
        pairs.setdefault(path, {})[side.removesuffix(".weight")] = tensor
    expected = {path: {"A": (r, layer.in_features), "B": (layer.out_features, r)}
                for path, layer in _linear_layers(model).items()}
    if not pairs:
        raise ModelError(f"{path} has no tensors; save it again")
    for path, pair in pairs.items():
        shapes = {side: tuple(tensor.shape) for side, tensor in pair.items()}
        if shapes != expected.get(path):
            raise ModelError(f"{directory}: the adapter does not fit the base or its r: {path} "
                             f"has {shapes}, expected {expected.get(path, 'no tensor')}; "
                             f"choose another adapter or --model")
    for path, pair in pairs.items():
        layer = _wrap(model, path)
        layer.add(name, r, alpha, dropout)
        layer.lora_A[name].data.copy_(pair["A"])
        layer.lora_B[name].data.copy_(pair["B"])
    return lora_parameters(model, name)


# ── Forward passes

class ValueHead(nn.Module):
    """V_ψ(x, y_<t) (§3.5, Alg. 4 l.5): a linear layer on the policy's last hidden state.

    Its weights and bias are initialized to 0.
    """

    def __init__(self, hidden_size: int, device=None):
        super().__init__()
        self.linear = nn.Linear(hidden_size, 1, device=device)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., H] → [...]"""
        return self.linear(hidden.float()).squeeze(-1)


def response_hidden(model, prompts: Tensor, prompt_mask: Tensor, responses: Tensor,
                    mask: Tensor) -> Tensor:
    """The hidden states h_t that predict y_t from x and y_<t (Alg. 4 l.22, 24).

    prompts, prompt_mask: [B, P]; responses, mask: [B, T] → [B, T, H]

    Each row is moved to the left, so that all padding is on its right. A token sees only tokens
    to its left, so this pass needs neither an attention mask nor position ids.
    """
    assert prompt_mask[:, -1].all(), "Alg. 4 l.22: y_1 follows the last of x"
    ids = torch.cat([prompts, responses], dim=1)
    lengths = prompt_mask.sum(1, keepdim=True)                                   # of x, [B, 1]
    longest = int((lengths + mask.sum(1, keepdim=True)).max())
    columns = torch.arange(longest, device=ids.device) + prompts.shape[1] - lengths
    packed = ids.gather(1, columns.clamp(max=ids.shape[1] - 1))            # [x ; y ; padding]
    hidden = model.base_model(packed, use_cache=False).last_hidden_state
    assert hidden.shape[1] == longest, "Alg. 4 l.22: one h_t for each y_t"
    before = lengths - 1 + torch.arange(responses.shape[1], device=ids.device)   # of each h_t
    return hidden.take_along_dim(before.clamp(max=longest - 1)[..., None], dim=1)


# ── Less memory: activation checkpointing and sharding (FSDP2)

def decoder_blocks(model) -> nn.ModuleList:
    """The decoder layers in order. Llama, Mistral, Qwen and Phi store them in `layers`."""
    if not hasattr(model.base_model, "layers"):
        raise ModelError(f"{model.config._name_or_path}: decoder layers are not in `layers`; "
                         f"run without --shard and --activation_checkpointing")
    return model.base_model.layers


def checkpoint_activations(model):
    """Store only the input of each block; the backward pass computes its activations again.

    `gradient_checkpointing_enable` of transformers works only in training mode. The second
    forward pass must use the same adapter as the first, even if the `use_lora` block has ended.
    """
    for block in decoder_blocks(model):
        block.forward = partial(_run_checkpointed, block, block.forward)


def _run_checkpointed(block, forward, *args, **kwargs):
    """Run `forward` now, and again in the backward pass with the same active adapter."""
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    adapter = next((layer.active for layer in _lora_layers(block).values()
                    if layer.active in layer.lora_A), None)
    return checkpoint(forward, *args, use_reentrant=False,
                      context_fn=lambda: (nullcontext(), use_lora(block, adapter)), **kwargs)


def shard(model, device):
    """Shard the frozen base over all ranks with FSDP2 and return the model, now on `device`.

    A model from `load_model(…, to_shard=True)` is read one FSDP unit at a time, so that a
    device never holds more than its shard and two units. For sampling, `gathered` puts all
    weights on each device.

    The FSDP units are the embeddings, each block, the head, and the remaining parts of the
    base. Adapters are not sharded, whether they are loaded before or after this call: they are
    float32, and all parameters of an FSDP unit must have one dtype. Each rank holds all
    adapters, so any single rank can save them. The caller sums their gradients over the ranks.
    """
    device = torch.device(device)
    mesh = dist.init_device_mesh(device.type, (dist.get_world_size(),))
    model.fingerprint_before_sharding = fingerprint(model)
    adapters = {x for name, x in model.named_parameters() if ".lora_" in name}
    embeddings = model.get_input_embeddings()
    head = model.get_output_embeddings()
    is_tied = model.config.tie_word_embeddings
    units = [embeddings, *decoder_blocks(model), model.base_model]
    if not is_tied:
        units.append(head)
    for unit in units:
        fully_shard(unit, mesh=mesh, reshard_after_forward=True, ignored_params=adapters)
    if is_tied:
        head.weight = embeddings.weight              # tie them again: the weight is now sharded
    for parameter in adapters:
        parameter.data = parameter.data.to(device)
    _check_finite(model.named_parameters(), model.config._name_or_path)
    with torch.no_grad():         # the first forward pass lets FSDP find its root modules
        ids = torch.zeros(1, 1, dtype=torch.long, device=device)
        hidden = model.base_model(ids, use_cache=False).last_hidden_state
        if not is_tied:
            head(hidden)
    return model


@contextmanager
def gathered(model):
    """Hold all weights of a sharded model on every rank during a `with` block.

    Inside the block, no rank waits for another. Without `gathered`, sampling would gather all
    weights for each token.
    """
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for unit in units:
        unit.set_reshard_after_forward(False)
        unit.unshard()
    try:
        yield model
    finally:
        for unit in units:
            unit.set_reshard_after_forward(True)
            unit.reshard()
