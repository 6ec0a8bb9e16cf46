"""One frozen base model for all roles, with LoRA adapters, a value head and FSDP2 sharding.

    model, tokenizer = load_model("toy/base")
    add_lora(model, "policy", r=16, alpha=32)
    with use_lora(model, "policy"):
        ids = generate(model, [encode_prompt(tokenizer, "Hello")], max_new_tokens=20)

The policy, the reward model R_φ and the reference share one base model. `use_lora` chooses one
of their adapters, or none. Memory therefore holds the large base only once.
B rows, P prompt tokens (padded left), T response tokens (padded right), H hidden size.

Paper: the adapters of Appendix D and V_ψ of §3.5. The paper does not describe loading,
parallel processes or files. Departure from common practice: adapters are merged into the base
only while decoding (or for serving, by `merge_lora`), and only if the base is float32. Rounding
to bfloat16 would remove most of a small update, such as that of PPO.
"""

import json
import os
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from data import InputError, Task, critique_prompt, error_text, write_rows
from runtime import WORLD_SIZE, find_device, load_tensors, print_rank0, save_tensors
from sampling import Decoder, context_length, head_weight

# Chat templates get this date instead of today's, so that a prompt is the same on any day. The
# template of Llama 3.1 has this date as its default.
DATE = datetime(2024, 7, 26)
# The chat template for a tokenizer that has none (toy/base, most base models).
PLAIN_TEMPLATE = ("{{ bos_token }}{% for turn in messages %}{{ turn.content }}"
                  "{{ '\\n\\nAnswer:\\n' if turn.role == 'user' else '\\n\\n' }}{% endfor %}")
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")        # PEFT's names
# On Hopper GPUs, the attention kernel of cuDNN returns NaN gradients for masked inputs of 64,
# 192, 320, … tokens (pytorch issue 196678). It also needs a new setup for each input
# shape. The other kernels do not have these problems.
torch.backends.cuda.enable_cudnn_sdp(False)
# Even with use_safetensors=True, transformers reads a pickle file that the index of the
# safetensors files names. With this patch, such a file is an error.
NO_PICKLES = mock.patch("torch.load", side_effect=ValueError(
    "a file of weights is a pickle, which can run code"))
# An adapter must be plain LoRA: W x + (alpha / r) B A x, with the W of the base. So the options
# of PEFT that are in OPTIONS may have any value. For those in VALUES, the allowed values are
# listed there. All others may only have a value in OFF.
OPTIONS = """
    task_type auto_mapping peft_version base_model_name_or_path revision inference_mode r
    lora_alpha lora_dropout target_modules exclude_modules layers_to_transform layers_pattern
    megatron_core qalora_group_size""".split()
VALUES = {"peft_type": ["LORA"], "bias": ["none"],
          "init_lora_weights": [True, False, "gaussian"]}
OFF = [None, False, [], {}]                                  # the option is not used
PREFIX = "base_model.model."                                 # of tensor names in PEFT's files


# ── Loading and prompts

def find_model(path) -> str:
    """The path of a base. One in the code's folder is found from any working directory."""
    shipped = Path(__file__).parent / path
    return str(shipped if shipped.is_dir() and not os.path.isdir(path) else path)


def load_model(path, dtype=None, device=None, is_sharded=False,
               checkpoint_activations=False):  # Table 5
    """Load a frozen causal LM and its tokenizer from a directory or hub id.

    Weights are read only from safetensors files, because pickle files can run code. Python
    files in the directory are not run. dtype: a torch dtype or its name. None means float32 on
    a CPU, where bfloat16 is slow, and bfloat16 on a GPU. is_sharded: split the weights over
    several processes, see `shard`. checkpoint_activations: in training mode, the backward pass
    computes the activations of each block again. Then `backward` must also run in `use_lora`.
    Raises InputError if path is an adapter, if the model cannot be loaded, if weights are
    missing or not finite, if the tokenizer has an id without embedding, if the logits are not
    `hidden @ weight.T`, or if sampling and scoring have different hidden states.
    """
    if Path(path, ADAPTER_FILES[0]).exists():
        raise InputError(f"{path} is an adapter; give its base as --model")
    device = torch.device(device or find_device())
    dtype = dtype or ("float32" if device.type == "cpu" else "bfloat16")
    try:
        parent = find_model(Path(path).parent)
        if parent != "." and os.path.isdir(parent) and not os.path.isdir(find_model(path)):
            raise FileNotFoundError("no such directory")     # it is no hub id
        tokenizer = AutoTokenizer.from_pretrained(find_model(path), trust_remote_code=False)
        with NO_PICKLES:
            model, report = AutoModelForCausalLM.from_pretrained(
                find_model(path), dtype=dtype, use_safetensors=True, output_loading_info=True,
                trust_remote_code=False)
    except Exception as error:      # reading a damaged directory can raise any exception
        raise InputError(f"cannot load a model from {path}: {error_text(error)}; give --model "
                         "a hub id or a Hugging Face directory") from error
    if report["missing_keys"]:
        raise InputError(f"{path}: weights are missing, such as {min(report['missing_keys'])}; "
                         f"restore the files of the model")
    largest_id = max(tokenizer.get_vocab().values())               # added tokens included
    if largest_id >= model.config.vocab_size:
        raise InputError(f"{path}: the tokenizer has {largest_id + 1} tokens and the model "
                         f"{model.config.vocab_size}; use the model's own tokenizer")
    model.requires_grad_(False).eval()
    if checkpoint_activations:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    shard(model, device) if is_sharded and WORLD_SIZE > 1 else model.to(device)
    try:
        check_passes(model)
    except Exception as error:      # an unknown architecture can raise any exception
        raise InputError(
            f"{path}, a {model.config.model_type} model, is unusable: {error_text(error)};"
            " restore it, or use another model") from error
    return model, tokenizer


@torch.no_grad()
def check_passes(model):
    """Check the weights, the logits, and the hidden states of sampling and scoring.

    Weights must be finite. Logits must be hidden @ weight.T. Two prompts, of 7 and of 3 tokens,
    get token 8 as next token, once with a cache and once in a forward pass. Both ways must give
    nearly equal hidden states. The short prompt is padded, so that a model that ignores the
    mask or the positions is found. Raises ValueError, or what the model raises.
    """
    for name, x in model.named_parameters():
        # Sharded weights (DTensor) are left out, because a NaN in one reaches the logits, which
        # are checked below. A NaN in an embedding may not, because few of its rows are read.
        if not isinstance(x, DTensor) and not all(map(torch.isfinite, x.aminmax())):
            raise ValueError(f"{name} is not finite")
    row = torch.arange(1, 9, device=model.device)   # without 0, which is the padding
    ids = torch.stack([row, row.roll(4)])           # 1 2 3 4 5 6 7 8, and 5 6 7 8 1 2 3 4
    # Sampling and scoring compute hidden @ weight.T, and do not run the model's own head. FSDP
    # takes the module that runs first as the outermost one, so it must be base_model.
    hidden = model.base_model(ids).last_hidden_state                           # [2, 8, H]
    if not torch.allclose(hidden @ head_weight(model).T, model(ids).logits, 1e-2, 1e-2):
        raise ValueError("the logits are not hidden @ weight.T: a bias, scale, soft cap or NaN")
    prompts = torch.stack([row, row * (row > 4)])[:, :7]     # 1 2 3 4 5 6 7, and 0 0 0 0 5 6 7
    mask = prompts.clamp(max=1)
    decoder = Decoder(model, 0, prompts, mask, mask, 8)      # the uniforms are not used
    outputs = []
    decoder.draw = outputs.append                   # keep the hidden states, and draw nothing
    decoder.prefill(prompts, mask)
    decoder.ids.fill_(8)
    decoder.cache.width = 8
    decoder.step()
    expected = hidden[[0, 1], [7, 3]]               # the hidden state at token 8
    # 9 % in bfloat16, where rounding alone gives a few percent. A wrong mask, position or cache
    # gives more.
    tolerance = torch.finfo(model.dtype).eps ** 0.5
    if not torch.dist(outputs[-1], expected) < tolerance * expected.norm():
        raise ValueError("sampling with a cache has other hidden states than a forward pass")


def encode_prompt(tokenizer, prompt: str | list[dict]) -> list[int]:  # Table 5
    """Encode a user turn, or chat messages, as a prompt that ends where the answer begins.

    If a turn contains the name of a special token, the name gets a zero-width space. It is then
    encoded as plain text. Raises InputError if the chat template refuses the turns, or leaves
    out the text of a turn that is not the assistant's.
    """
    turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    for token in tokenizer.added_tokens_decoder.values():
        if token.special:
            plain = f"{token.content[0]}\u200b{token.content[1:]}"
            turns = [turn | {"content": turn["content"].replace(token.content, plain)}
                     for turn in turns]
    template = None if tokenizer.chat_template else PLAIN_TEMPLATE   # None: the tokenizer's own
    try:
        # Some templates take the date from date_string, which we pass. Others call a function
        # for it, so `datetime` is replaced.
        with mock.patch("transformers.utils.chat_template_utils.datetime", now=lambda: DATE):
            text = tokenizer.apply_chat_template(                            # with BOS, if any
                turns, chat_template=template, tokenize=False, add_generation_prompt=True,
                date_string=f"{DATE:%d %b %Y}")
        for turn in turns:             # a template may drop the reasoning of earlier answers
            if turn["role"] != "assistant" and turn["content"].strip() not in text:
                raise ValueError(f"it leaves out a {turn['role']} turn")
    except Exception as error:
        raise InputError(f"the chat template of {tokenizer.name_or_path} refuses the turns: "
                         f"{error}; change it, or `policy_prompt` of the task") from error
    return tokenizer(text, add_special_tokens=False).input_ids


def drop_long_rows(rows: list[dict], task: Task, model, tokenizer, config) -> list[dict]:
    """Keep rows whose prompt leaves room for response and critique; print how many do not.

    The context must hold the instruction to R_φ, the prompt, --max_new_tokens and
    --max_critique_tokens. --max_prompt_tokens may set a lower limit. Raises InputError if no
    row is left.
    """
    instruction = encode_prompt(tokenizer, critique_prompt("", ""))
    room = (context_length(model) - len(instruction) - config.max_new_tokens
            - config.max_critique_tokens)
    limit = min(room, config.max_prompt_tokens or room)
    fitting_rows = [row for row in rows
                    if len(encode_prompt(tokenizer, task.policy_prompt(row))) <= limit]
    too_long = len(rows) - len(fitting_rows)
    problem = f"{too_long} of {len(rows)} prompts have more than {limit} tokens"
    if not fitting_rows:
        raise InputError(f"no prompt is left for training or evaluation ({problem}): add rows "
                         f"with other prompts, lower --max_new_tokens or "
                         f"--max_critique_tokens, or raise --max_prompt_tokens")
    if too_long:
        print_rank0(f"left out: {problem}")
    return fitting_rows


def encode_text(tokenizer, text: str) -> list[int]:
    """Encode a text without BOS or EOS. The name of a special token stays text."""
    return tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids


def encode_answer(tokenizer, text: str) -> list[int]:
    """Encode a text as training target. It ends with EOS, so that the model learns to stop."""
    return encode_text(tokenizer, text) + [eos_ids(tokenizer)[0]]


def eos_ids(tokenizer, model=None) -> list[int]:
    """Ids that end an answer: the tokenizer's EOS, then those in the model's generation config.

    Raises InputError if there are none.
    """
    ids = [tokenizer.eos_token_id]
    if model is not None:
        config_ids = model.generation_config.eos_token_id
        ids += config_ids if isinstance(config_ids, list) else [config_ids]
    ids = [token for token in dict.fromkeys(ids) if token is not None]
    if not ids:
        raise InputError("the tokenizer has no EOS token, so answers would never end; set "
                         "eos_token in tokenizer_config.json")
    return ids


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
        assert name not in self.lora_A, f"the adapter {name!r} exists"
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
    """The LoRA layers by path; with a `name`, only the layers that have this adapter."""
    return {path: layer for path, layer in model.named_modules()
            if isinstance(layer, LoRALinear) and (name is None or name in layer.lora_A)}


def _linear_layers(model):
    """The linear layers by path, with or without adapters, but not the language-model head."""
    return {path.removesuffix(".base_layer"): layer for path, layer in model.named_modules()
            if isinstance(layer, nn.Linear) and layer is not model.get_output_embeddings()}


def _wrap(model, path):
    """Return the LoRALinear at `path`. If there is an nn.Linear, replace it first."""
    layer = model.get_submodule(path)
    if isinstance(layer, nn.Linear):
        layer = LoRALinear(layer).train(layer.training)
        model.set_submodule(path, layer)
    return layer


def target_layers(model, target_modules) -> list[str]:
    """Paths of all linear layers whose last name, such as "q_proj", is a target.

    Raises InputError if a target is not the name of any linear layer.
    """
    names = {path: path.rpartition(".")[2] for path in sorted(_linear_layers(model))}
    unknown = set(target_modules) - set(names.values())
    if unknown:
        raise InputError(f"{type(model).__name__} has no linear layer named "
                         f"{', '.join(sorted(unknown))}; choose the targets of an adapter from "
                         f"{', '.join(sorted(set(names.values())))}")
    return [path for path, name in names.items() if name in target_modules]


def add_lora(model, name: str, r: int = 16, alpha: float = 32, dropout: float = 0.0,
             target_modules=("q_proj", "v_proj")) -> list[nn.Parameter]:
    """Add an adapter to the layers in `target_modules`; return the adapter's parameters.

    Raises InputError if a target does not exist.
    """
    for path in target_layers(model, target_modules):
        _wrap(model, path).add(name, r, alpha, dropout)
    return lora_parameters(model, name)


@contextmanager
def use_lora(model, name: str | None, merge: bool = False):
    """Use only this adapter inside the `with` block; None means the base without adapters.

    merge: compute W + (alpha / r) B A once, if W is float32 and not sharded. Decoding is then
    faster, because each layer needs one matrix product instead of three. The merged weights
    take extra memory, as much as the base weights of these layers.
    """
    assert name is None or _lora_layers(model, name), f"add or load the adapter {name!r} first"
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

    `name` must be the only adapter. W must be float32 and not sharded.
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


def save_lora(model, name: str, directory):
    """Save an adapter in PEFT's format. Both files hold the options.

    If the base is a directory, its absolute path is saved, so that PEFT finds it from any
    working directory.
    """
    layers = _lora_layers(model, name)
    tensors = {}
    for path, layer in layers.items():
        tensors[f"{PREFIX}{path}.lora_A.weight"] = layer.lora_A[name]
        tensors[f"{PREFIX}{path}.lora_B.weight"] = layer.lora_B[name]
    r = len(layer.lora_A[name])
    base = model.config._name_or_path
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": r,
              "lora_alpha": layer.scaling[name] * r,
              "target_modules": sorted({path.rpartition(".")[2] for path in layers}),
              "base_model_name_or_path": os.path.abspath(base) if os.path.isdir(base) else base}
    config_path, path = (Path(directory) / file for file in ADAPTER_FILES)
    save_tensors(path, tensors, config)
    write_rows(config_path, [config])


def load_lora(model, name: str, directory) -> list[nn.Parameter]:
    """Read an adapter in PEFT's format, add it as `name` and return its parameters.

    The tensors in the file, not the option `target_modules`, say which layers are adapted. A
    warning is printed if the adapter names another base. Raises InputError if a file is missing
    or damaged, if the adapter is not plain LoRA (but DoRA, rsLoRA, PiSSA, …), if A or B of a
    layer is missing, does not fit or is not finite, or if there are other tensors. After an
    error, the model is unchanged.
    """
    config_path, path = (Path(directory) / file for file in ADAPTER_FILES)
    try:
        config = json.loads(config_path.read_text("utf-8"))
        r = config["r"]
        alpha = config["lora_alpha"]
        # `not abs(alpha) < 1e6` is also true for NaN.
        if type(r) is not int or r < 1 or not abs(alpha) < 1e6:
            raise ValueError(f"r is {r!r} and lora_alpha {alpha!r}")
    except (OSError, LookupError, TypeError, ValueError) as error:
        raise InputError(f"{config_path} is missing or damaged ({error!r})") from error
    tensors, saved_config = load_tensors(path)
    if saved_config not in ({}, config):
        raise InputError(f"{directory} is damaged: the options in its two files differ")
    for option, value in {"peft_type": None, **config}.items():
        if value not in VALUES.get(option, [value] if option in OPTIONS else OFF):
            raise InputError(f"{directory}: the adapter is not plain LoRA, because it sets "
                             f"{option} to {value!r:.60}; convert it, or train it without")
    paths = {key.removeprefix(PREFIX).partition(".lora_")[0] for key in tensors}
    layers = _linear_layers(model)
    shapes = {}                                      # expected tensor → its shape
    for path in paths & layers.keys():
        shapes[f"{PREFIX}{path}.lora_A.weight"] = (r, layers[path].in_features)
        shapes[f"{PREFIX}{path}.lora_B.weight"] = (layers[path].out_features, r)
    for key in sorted(shapes.keys() | tensors.keys()) or ["A"]:
        shape = tuple(tensors[key].shape) if key in tensors else None
        if shape is None or shape != shapes.get(key) or not tensors[key].isfinite().all():
            raise InputError(f"{directory} does not fit --model: {key} has the shape {shape}, "
                             f"expected finite numbers of the shape {shapes.get(key)}")
    base = str(config.get("base_model_name_or_path"))
    if os.path.basename(base) != os.path.basename(model.config._name_or_path):
        print_rank0(f"warning: {directory} was trained on {base}, and this base is "
                    f"{model.config._name_or_path}")
    for path in sorted(paths):
        layer = _wrap(model, path)
        layer.add(name, r, alpha, 0.0)          # dropout would change π while it is trained
        layer.lora_A[name].data.copy_(tensors[f"{PREFIX}{path}.lora_A.weight"])
        layer.lora_B[name].data.copy_(tensors[f"{PREFIX}{path}.lora_B.weight"])
    return lora_parameters(model, name)


# ── Forward passes

class ValueHead(nn.Module):
    """V_ψ(x, y_<t) (§3.5, Alg. 4 l.5): a linear layer on the policy's last hidden state.

    Its weights and bias are initialized to 0.
    """

    def __init__(self, hidden_size: int, device=None):
        super().__init__()
        self.linear = nn.Linear(hidden_size, 1, device=device)
        for parameter in self.linear.parameters():
            nn.init.zeros_(parameter)

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
    before = lengths - 1 + torch.arange(responses.shape[1], device=ids.device)   # columns of h
    return hidden.take_along_dim(before.clamp(max=longest - 1)[..., None], dim=1)


# ── Sharding (FSDP2)

def shard(model, device):
    """Shard the frozen blocks over all ranks (processes) with FSDP2; move the rest to `device`.

    The weights are read from memory-mapped files one block at a time. During a forward or
    backward pass, a device holds its part of each block, about two whole blocks, and the
    embeddings, head and norm, which are not sharded. For sampling, `unsharded` puts all weights
    on each device. Adapters are not sharded, whether they are loaded before or after this call.
    Each rank holds all adapters, so any single rank can save them. The caller sums their
    gradients over the ranks. Raises InputError if the model's blocks are not in `layers`.
    """
    if not hasattr(model.base_model, "layers"):
        raise InputError(f"{model.config._name_or_path}: decoder layers are not in `layers`; "
                         f"run without --shard")
    whole = {x for name, x in model.named_parameters()
             if ".lora_" in name or ".layers." not in name}
    for x in (*whole, *model.buffers()):
        x.data = x.data.to(device)
    mesh = dist.init_device_mesh(torch.device(device).type, (WORLD_SIZE,))
    for unit in (*model.base_model.layers, model.base_model):
        fully_shard(unit, mesh=mesh, reshard_after_forward=True, ignored_params=whole)


@contextmanager
def unsharded(model):
    """Hold all weights of a sharded model on every rank during a `with` block.

    Inside the block, a forward pass gathers no weights, so it waits for no other rank. Outside
    of it, sampling would gather all weights for each token.
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
