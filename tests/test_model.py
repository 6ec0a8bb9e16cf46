"""model.py, sampling.py and checkpoints, tested against autograd, PEFT and transformers."""

import errno
import json
import os
import shutil
import warnings
from contextlib import contextmanager
from itertools import combinations, count, takewhile
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from tokenizers.processors import TemplateProcessing
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (AutoModelForCausalLM, Gemma2Config, Gemma2ForCausalLM, GPT2Config,
                          GPT2LMHeadModel, MistralConfig, MistralForCausalLM, Phi3Config,
                          Phi3ForCausalLM, PhiConfig, PhiForCausalLM, Qwen2Config,
                          Qwen2ForCausalLM)
import sampling
from data import InputError
from helpers import ROOT, flip_bit, randomise
from model import (ADAPTER_FILES, LoRALinear, ValueHead, add_lora, encode_answer, encode_prompt,
                   eos_ids, load_lora, load_model, lora_parameters, response_hidden, save_lora,
                   target_layers, use_lora)
from runtime import checkpointed, checkpoints, load_tensors, save_tensors
from sampling import (StaticCache, generate, head_weight, pad_batch, token_entropy,
                      token_logprobs)

DEVICES = ["cpu"] + ["cuda"] * torch.cuda.is_available()
DTYPES = [torch.float64, torch.float32, torch.bfloat16]
RELATIVE = {torch.float64: 1e-6, torch.float32: 1e-5, torch.bfloat16: 2e-2}  # float32 comes out
TEXTS = ["Once upon a time", "The dog", "He", "One day, a little cat saw", "Tom was sad. He",
         "Lily and her mom went to the park to play with a big red ball", "I like to eat",
         "Where is the bird that sang all day long"]
LONG = TEXTS[5]
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA on this machine")


# ── Helpers

REAL = ["toy_model", "stories"]
# Tiny random models: architecture, its config, and how they differ from the fixture `tiny`.
FAMILIES = {
    "mistral": (MistralForCausalLM, MistralConfig, {}),
    "mistral-sliding": (MistralForCausalLM, MistralConfig, {"sliding_window": 6}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {"vocab_size": 961}),   # its tokenizer adds one
    "qwen2-mixed": (Qwen2ForCausalLM, Qwen2Config, {
        "vocab_size": 961, "use_sliding_window": True, "sliding_window": 5,
        "max_window_layers": 1})}


@pytest.fixture(params=REAL)
def base(request, tiny):
    """A real checkpoint or a random model of a family, with its tokenizer."""
    if request.param in REAL:
        return request.getfixturevalue(request.param)
    architecture, config, options = FAMILIES[request.param]
    model, tokenizer = load_model(tiny(architecture, config, **options), device="cpu")
    assert type(model) is architecture and not any(p.requires_grad for p in model.parameters())
    return model, tokenizer


with_families = pytest.mark.parametrize("base", [*REAL, *FAMILIES], indirect=True)


@pytest.fixture()
def tiny(tmp_path, toy_model):
    """A function that saves a tiny random model of any architecture; returns its directory."""
    def build(architecture, config, name="tiny", edit=None, **extra):
        sizes = dict(vocab_size=toy_model[0].config.vocab_size, hidden_size=32,
                     intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                     num_key_value_heads=2, max_position_embeddings=128, initializer_range=0.3,
                     bos_token_id=None, eos_token_id=1, pad_token_id=0)
        model = architecture(config(**{**sizes, **extra}))
        if edit:
            edit(model)
        model.save_pretrained(tmp_path / name)
        toy_model[1].save_pretrained(tmp_path / name)
        return tmp_path / name
    return build


@pytest.fixture()
def bos_tokenizer(toy_model):
    """The toy tokenizer, changed to put BOS before every text, as Llama's does."""
    tokenizer = toy_model[1]
    tokenizer.add_special_tokens({"bos_token": "<bos>"})
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", tokenizer.bos_token_id)])
    assert tokenizer("Hi").input_ids[0] == tokenizer.bos_token_id
    return tokenizer


def relative(ours, theirs):
    """‖ours − theirs‖ / ‖theirs‖."""
    ours, theirs = ours.detach().double(), theirs.detach().double()
    return float((ours - theirs).norm() / theirs.norm())


def random_inputs(n, v, h, dtype, device="cpu"):
    """Random hidden states, a frozen head, targets and two upstream gradients."""
    hidden = torch.randn(n, h, device=device).to(dtype).requires_grad_()
    weight = (torch.randn(v, h, device=device) / 4).to(dtype)
    return (hidden, weight, torch.randint(v, (n,), device=device),
            torch.randn(n, device=device), torch.randn(n, device=device))


def logprobs_and_entropy(hidden, weight, targets, temperature=1.0):
    """Ours: log-probs and entropy."""
    return (token_logprobs(hidden, weight, targets, temperature),
            token_entropy(hidden, weight, temperature))


def naive(hidden, weight, targets, temperature):
    """Log-probs and entropy with all the logits at once, in float32 or wider."""
    wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    logp = torch.log_softmax(hidden.to(wide) @ weight.to(wide).T / temperature, dim=-1)
    return logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


def prompts_of(tokenizer):
    """Eight prompts of unequal length."""
    prompts = [tokenizer(text, add_special_tokens=False).input_ids for text in TEXTS]
    assert len({len(p) for p in prompts}) > 4
    return prompts


def directory_of(model):
    return model.config._name_or_path


def logits_of(model, ids):
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0]


def peft_adapter(model, directory, targets=("q_proj", "v_proj"), **options):
    """An adapter with random weights that PEFT creates and saves on a new copy of the base."""
    fresh = AutoModelForCausalLM.from_pretrained(directory_of(model))
    peft = get_peft_model(fresh, LoraConfig(r=3, lora_alpha=7, target_modules=list(targets),
                                            task_type="CAUSAL_LM", **options))
    randomise((p for name, p in peft.named_parameters() if "lora_" in name), 0.2)
    peft.save_pretrained(directory)
    return peft.eval()


def up_to_eos(row, eos):
    """The row through its first end-of-sequence id."""
    return next((row[: t + 1] for t, token in enumerate(row) if token in eos), row)


def transformers_greedy(model, prompts, max_new_tokens, eos):
    """The greedy output of transformers' generate for the left-padded batch, cut at EOS."""
    ids, mask, *_ = pad_batch(prompts, [])
    out = model.generate(ids, attention_mask=mask, do_sample=False, eos_token_id=eos,
                         max_new_tokens=max_new_tokens, pad_token_id=0)
    rows = [up_to_eos(row, eos) for row in out[:, ids.shape[1]:].tolist()]
    for prompt, row in zip(prompts, rows):
        likeliest = logits_of(model, prompt + row)[len(prompt) - 1 : -1].topk(2).values
        # Over all tests the smallest gap is 0.0014; rounding moves logits by less than 1e-5.
        assert likeliest.diff().abs().min() > 1e-4, "rounding must not decide a token"
    return rows


def staggering_eos(rows):
    """Two EOS ids that end these rows at as many different lengths as possible, and the rows
    cut at these ids."""
    pairs = combinations(sorted({token for row in rows for token in row[1:]}), 2)
    best = max(pairs, key=lambda eos: len({len(up_to_eos(row, eos)) for row in rows}))
    cut = [up_to_eos(row, best) for row in rows]
    assert len({len(row) for row in cut}) >= 3, "the rows must end at different times"
    return best, cut


def refused(match, call, *arguments, **options) -> str:
    """The InputError of one line that the call raises; `match` is a part of it."""
    with pytest.raises(InputError) as caught:
        call(*arguments, **options)
    message = str(caught.value)
    assert match in message and "\n" not in message
    return message


@contextmanager
def sizes_of(model):
    """Collects the shape [B, columns] of the input ids of every forward pass."""
    sizes = []
    hook = model.base_model.register_forward_pre_hook(
        lambda _, args: sizes.append(tuple(args[0].shape)))
    yield sizes
    hook.remove()


class Outputs(TorchDispatchMode):
    """Records every tensor that an operator returns while this mode is active."""

    def __init__(self):
        super().__init__()
        self.tensors = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        self.tensors += [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        return out


# ── token_logprobs

@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("n, temperature", [(1, 0.6), (7, 1.0), (64, 0.6), (1100, 1.0)])
@pytest.mark.parametrize("v, tiles", [(203, 1), (2600, 3), (5000, 5)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_log_probs_and_entropy_are_those_of_log_softmax(dtype, v, tiles, n, temperature, device,
                                                        monkeypatch):
    """Compare the values and, for random upstream gradients, the gradients of the hidden
    states. A large vocabulary has several tiles, and a large batch several parts."""
    monkeypatch.setattr(sampling, "LOGITS", 1 << 20)
    hidden, weight, targets, *upstream = random_inputs(n, v, 24, dtype, device)
    if device == "cpu" and n > sampling.ROWS:
        assert len(sampling._tiles(sampling.ROWS, weight)) == tiles
    all_ours = logprobs_and_entropy(hidden, weight, targets, temperature)
    all_theirs = naive(hidden, weight, targets, temperature)
    for ours, theirs, up in zip(all_ours, all_theirs, upstream):
        assert ours.dtype == torch.float32 and relative(ours, theirs) < RELATIVE[dtype]
        gradient, expected = (torch.autograd.grad((x * up).sum(), hidden, retain_graph=True)[0]
                              for x in (ours, theirs))
        exact = 1e-12 if dtype == torch.float64 else RELATIVE[dtype]
        assert gradient.dtype == dtype and relative(gradient, expected) < exact
    with torch.no_grad():
        unlearnt = token_logprobs(hidden, weight, targets, temperature)
    assert torch.equal(all_ours[0], unlearnt) and not unlearnt.requires_grad


def test_entropy_of_a_flat_and_of_a_certain_distribution():
    """Entropy is log V if all logits are equal and 0 if one token has all the probability."""
    weight = torch.tensor([[900.0], [0], [0], [0], [0]])
    hidden = torch.tensor([[0.0], [1.0]])
    logp, entropy = logprobs_and_entropy(hidden, weight, torch.tensor([3, 0]))
    torch.testing.assert_close(entropy, torch.tensor([5.0, 1.0]).log())
    torch.testing.assert_close(logp, torch.tensor([0.2, 1.0]).log())
    for none in logprobs_and_entropy(torch.zeros(0, 1), weight, torch.zeros(0).long()):
        assert none.shape == (0,), "an empty batch is not an error"


@pytest.mark.parametrize("n, most", [(512, 512 * 1024), (7, 7 * 4095)])
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_the_logits_never_exist_at_once(dtype, n, most, monkeypatch):
    """No operator of forward or backward returns N·V numbers, nor a gradient of the head."""
    v, h = 4096, 32
    monkeypatch.setattr(sampling, "LOGITS", n * v // 8)
    hidden, weight, targets, *upstream = random_inputs(n, v, h, dtype)

    def sizes(function):
        with Outputs() as outputs:
            logp, entropy = function(hidden, weight, targets, 1.0)
            (logp * upstream[0] + entropy * upstream[1]).sum().backward()
        head = weight.untyped_storage().data_ptr()
        return [t.numel() for t in outputs.tensors if t.untyped_storage().data_ptr() != head]

    assert max(sizes(naive)) >= n * v, "the recorder must see the full logits of naive()"
    ours = sizes(logprobs_and_entropy)
    assert max(ours) <= most and v * h not in ours


# ── LoRA

@with_families
def test_we_read_an_adapter_of_peft(base, tmp_path):  # Table 5
    """Logits and gradients equal PEFT's, dropout acts in training, PEFT reads our files."""
    model, tokenizer = base
    ids = tokenizer(LONG).input_ids
    targets = "q_proj", "v_proj", "gate_proj"
    peft = peft_adapter(model, tmp_path / "peft", targets, lora_dropout=0.5)
    theirs, bare = logits_of(peft, ids), logits_of(model, ids)
    load_lora(model, "policy", tmp_path / "peft")
    with use_lora(model, "policy"):
        torch.testing.assert_close(logits_of(model, ids), theirs, atol=1e-4, rtol=1e-5)
        model(torch.tensor([ids])).logits.logsumexp(-1).sum().backward()
        model.train()
        assert not torch.equal(logits_of(model, ids), logits_of(model, ids))
    assert torch.equal(logits_of(model, ids), bare) and (theirs - bare).abs().max() > 0.1
    for name, p in peft.named_parameters():
        p.requires_grad_("lora_" in name)
    peft(torch.tensor([ids])).logits.logsumexp(-1).sum().backward()
    gradients = {name.replace(".default", "").removeprefix("base_model.model."): p.grad
                 for name, p in peft.named_parameters() if "lora_" in name}
    ours = {name.replace(".policy", ".weight"): p.grad for name, p in model.named_parameters()
            if "lora_" in name}
    assert ours.keys() == gradients.keys() and len(ours) == 6 * model.config.num_hidden_layers
    assert all(relative(ours[name], gradients[name]) < 1e-4 for name in ours)
    save_lora(model, "policy", tmp_path / "again")
    fresh = AutoModelForCausalLM.from_pretrained(directory_of(model))
    again = PeftModel.from_pretrained(fresh, tmp_path / "again")
    assert torch.equal(logits_of(again, ids), theirs)
    assert again.peft_config["default"].lora_dropout == 0.5


def test_two_adapters_do_not_mix(toy_model, tmp_path):
    """Each adapter acts as if it were alone. Leaving use_lora restores the former adapter and
    removes merged weights."""
    model, tokenizer = toy_model
    ids = tokenizer(LONG).input_ids
    alone = {None: logits_of(model, ids)}
    for name, targets in (("policy", ("q_proj",)), ("reward", ("v_proj", "gate_proj"))):
        single, _ = load_model(directory_of(model), device="cpu")
        parameters = add_lora(single, name, r=4, target_modules=targets)
        with use_lora(single, name):
            assert torch.equal(logits_of(single, ids), alone[None])
            randomise(parameters, 0.2)
            alone[name] = logits_of(single, ids)
        save_lora(single, name, tmp_path / name)
        load_lora(model, name, tmp_path / name)
    assert not any(torch.allclose(a, b, atol=0.1) for a, b in combinations(alone.values(), 2))
    layers = [module for module in model.modules() if isinstance(module, LoRALinear)]
    acts_as = lambda name: torch.equal(logits_of(model, ids), alone[name])
    for outer in ("policy", None):
        with use_lora(model, outer):
            for name in ("reward", None, "policy"):
                with use_lora(model, name):
                    assert acts_as(name)
                with use_lora(model, name, merge=True):
                    is_merged = any(layer.merged is not None for layer in layers)
                    assert is_merged == (name is not None)
                    torch.testing.assert_close(logits_of(model, ids), alone[name],
                                               atol=1e-4, rtol=1e-4)
                    with use_lora(model, "policy"):
                        assert acts_as("policy")
                assert acts_as(outer)
            with pytest.raises(ZeroDivisionError), use_lora(model, "reward", merge=True):
                1 / 0
            assert acts_as(outer)


def test_a_bfloat16_base_keeps_its_adapter_in_float32(toy_model):
    """The update is computed in float32 and rounded once. It is not merged, as merging in
    bfloat16 would lose it."""
    model, _ = load_model(directory_of(toy_model[0]), dtype="bfloat16", device="cpu")
    parameters = add_lora(model, "policy")
    randomise(parameters, 0.2)
    assert {p.dtype for p in parameters} == {torch.float32}
    layer = model.model.layers[0].self_attn.q_proj
    x = torch.randn(5, model.config.hidden_size, dtype=torch.bfloat16)
    A, B = layer.lora_A["policy"], layer.lora_B["policy"]
    with use_lora(model, "policy", merge=True), torch.no_grad():
        update = 2 * (x.double() @ A.double().T @ B.double().T)
        theirs = layer.base_layer(x) + update.bfloat16()
        assert layer(x).dtype == torch.bfloat16
        # Over eight seeds all are equal; of an update in bfloat16 44 to 52 % are.
        assert (layer(x) == theirs).float().mean() > 0.99


# ── load_model, ValueHead

def test_half_precision_becomes_float32_on_a_cpu_unless_asked_for(toy_model, tmp_path):
    """A bfloat16 checkpoint loads as float32 on a CPU, with equal values; dtype= overrides."""
    half, tokenizer = load_model(directory_of(toy_model[0]), torch.bfloat16, "cpu")
    assert head_weight(half).dtype == torch.bfloat16
    half.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    model, _ = load_model(tmp_path, device="cpu")
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert torch.equal(head_weight(model), head_weight(half).float())


def test_value_head_is_zero_and_then_linear():
    """V = 0 at the start; with weights, w·h + b in float32 for every shape and dtype."""
    head = ValueHead(6)
    hidden = torch.randn(2, 3, 6)
    assert torch.equal(head(hidden), torch.zeros(2, 3))
    randomise(head.parameters())
    w, b = head.parameters()
    for h in (hidden, hidden.bfloat16()):
        torch.testing.assert_close(head(h), torch.einsum("btd,d->bt", h.float(), w[0]) + b)


# ── Errors

def edit(change):
    """A function that edits a JSON or a safetensors file by change(its keys and values).

    The file then looks like one of PEFT, without our sha256.
    """
    def edit_file(path):
        is_json = path.suffix == ".json"
        values = json.loads(path.read_text()) if is_json else load_file(path)
        change(values)
        path.write_text(json.dumps(values)) if is_json else save_file(values, path, FORMAT)
    return edit_file


def cut(path):
    """Remove the last 20 bytes of a file."""
    path.write_bytes(path.read_bytes()[:-20])


def turn_into_pickle(path):
    """Replace a safetensors file by a pickle, which transformers would read."""
    torch.save(load_file(path), path.with_name("pytorch_model.bin"))
    path.unlink()


def drop_a_token(base):
    """Remove the last row of the embeddings, which the tokenizer needs."""
    edit(lambda x: x.update(vocab_size=959))(base / "config.json")
    edit(lambda x: x.update({EMBEDDINGS: x[EMBEDDINGS][:959].clone()}))(base / MODEL)


FORMAT = {"format": "pt"}
MODEL, EMBEDDINGS = "model.safetensors", "model.embed_tokens.weight"
UP = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize("file, damage, message", [
    ("", shutil.rmtree, "give --model a hub id or a directory"),
    (MODEL, turn_into_pickle, "cannot load a model"), (MODEL, cut, "cannot load a model"),
    (MODEL, edit(lambda x: x.pop(UP)),     # transformers would draw random numbers
     f"1 weights are missing, the first is {UP}"),
    (MODEL, edit(lambda x: x[UP].fill_(torch.nan)), "the logits are not finite"),
    ("", drop_a_token, "the tokenizer has 960 tokens and the model 959")])
def test_a_base_that_cannot_be_used_is_refused(tmp_path, file, damage, message):
    base = shutil.copytree(ROOT / "toy" / "base", tmp_path / "base")
    damage(base / file)
    assert str(base) in refused(message, load_model, base, device="cpu")


CONFIG, WEIGHTS = ADAPTER_FILES
Q_B = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"


@pytest.mark.parametrize("file, damage, message", [
    (CONFIG, cut, f"{CONFIG} is missing or damaged"), (WEIGHTS, cut, "missing or damaged"),
    (CONFIG, Path.unlink, f"{CONFIG} is missing"), (WEIGHTS, Path.unlink, f"{WEIGHTS} is mis"),
    # Single bits of α and of the last weight; both adapters would load without an error.
    (CONFIG, lambda path: flip_bit(path, 8 * path.read_text().index("32.0")), "files differ"),
    (WEIGHTS, lambda path: flip_bit(path, -72), "its sha256 is not the one in its metadata"),
    (CONFIG, edit(lambda x: x.pop("r")), f"{CONFIG} is missing or damaged (KeyError('r'))"),
    (CONFIG, edit(lambda x: x.pop("lora_alpha")), "(KeyError('lora_alpha'))"),
    (CONFIG, edit(lambda x: x.update(lora_alpha=[])), f"{CONFIG} is missing or damaged (Type"),
    (CONFIG, lambda path: path.write_text("[]"), f"{CONFIG} is missing or damaged"),
    (WEIGHTS, edit(lambda x: x[Q_B].fill_(torch.nan)), "(128, 16), expected finite numbers")])
def test_an_adapter_that_is_damaged_or_no_plain_lora_is_refused(toy_model, tmp_path, file,
                                                                damage, message):
    model, path = toy_model[0], tmp_path / "adapter"
    randomise(add_lora(model, "policy"))
    save_lora(model, "policy", path)
    damage(path / file)
    assert str(path) in refused(message, load_lora, model, "other", path)
    assert not lora_parameters(model, "other")


def test_no_flipped_bit_of_an_adapter_is_loaded(toy_model, tmp_path):
    model, _ = toy_model
    add_lora(model, "policy", r=1)
    save_lora(model, "policy", tmp_path)
    for name, step in ((CONFIG, 3), (WEIGHTS, 97)):
        for bit in range(0, 8 * (tmp_path / name).stat().st_size, step):
            flip_bit(tmp_path / name, bit)
            assert str(tmp_path) in refused("damaged", load_lora, model, "other", tmp_path)
            flip_bit(tmp_path / name, bit)
    assert load_lora(model, "other", tmp_path)


def test_logits_that_the_head_alone_does_not_make_are_refused(tiny):
    """Models with a soft cap on the logits (for any padding token) or a bias in the head are
    rejected, and load without them."""
    for pad in (0, 3):
        gemma = dict(head_dim=8, query_pre_attn_scalar=8, initializer_range=1.0,
                     pad_token_id=pad)
        capped, free = (tiny(Gemma2ForCausalLM, Gemma2Config, f"{cap}-{pad}",
                             final_logit_softcapping=cap, **gemma) for cap in (5.0, None))
        refused(str(capped), load_model, capped, device="cpu")
        load_model(free, device="cpu")
    biased = tiny(PhiForCausalLM, PhiConfig, "biased", lambda m: m.lm_head.bias.data.normal_())
    refused(str(biased), load_model, biased, device="cpu")
    load_model(tiny(PhiForCausalLM, PhiConfig, "unbiased"), device="cpu")


def test_an_adapter_for_another_base_is_refused_or_named(toy_model, tiny, tmp_path, capsys):
    """Wrong shapes, unknown layers and the head are refused, and the model is unchanged. A base
    of another name is a warning."""
    model, tokenizer = toy_model
    small, _ = load_model(tiny(MistralForCausalLM, MistralConfig, num_hidden_layers=3))
    shallow, _ = load_model(tiny(Qwen2ForCausalLM, Qwen2Config, "shallow", vocab_size=961,
                                 num_hidden_layers=1))
    peft_adapter(model, tmp_path / "toy")
    peft_adapter(small, tmp_path / "small")
    peft_adapter(small, tmp_path / "head", targets=("lm_head",))
    for other, adapter, message in (
            (small, "toy", "q_proj.lora_A.weight has the shape (3, 128), expected finite "
                           "numbers of the shape (3, 32)"),
            (shallow, "small", "layers.1.self_attn.q_proj.lora_A.weight has the shape (3, 32), "
                               "expected finite numbers of the shape None"),
            (small, "head", "model.lm_head.")):
        assert "does not fit --model" in refused(message, load_lora, other, "policy",
                                                 tmp_path / adapter)
        assert not any(isinstance(m, LoRALinear) for m in other.modules())
    for folder in ("base", "twin"):
        model.save_pretrained(tmp_path / folder)
        tokenizer.save_pretrained(tmp_path / folder)
        capsys.readouterr()
        load_lora(load_model(tmp_path / folder, device="cpu")[0], "policy", tmp_path / "toy")
        warning = f"toy was trained on {directory_of(model)}, and this base is "
        assert (warning in capsys.readouterr().out) == (folder == "twin")


@pytest.mark.parametrize("architecture, config, layers", [
    (GPT2LMHeadModel, GPT2Config, ""),                   # it has no torch.nn.Linear
    (PhiForCausalLM, PhiConfig, "dense, fc1, fc2, k_proj, q_proj, v_proj"),
    (Phi3ForCausalLM, Phi3Config, "down_proj, gate_up_proj, o_proj, qkv_proj")])
def test_a_layer_that_the_model_lacks_is_named_with_those_it_has(tiny, architecture, config,
                                                                 layers):
    model, _ = load_model(tiny(architecture, config), device="cpu")
    message = refused("has no linear layer named up_proj; ", target_layers, model, ["up_proj"])
    assert message.startswith(architecture.__name__) and message.endswith(f" from {layers}")


def test_unknown_names_are_refused(toy_model):
    """Missing target modules; a name that is in use or unknown is an error of the caller."""
    model, _ = toy_model
    refused("W_pack", add_lora, model, "policy", target_modules=("q_proj", "W_pack"))
    add_lora(model, "policy")
    with pytest.raises(AssertionError, match="'policy' exists"):
        add_lora(model, "policy")
    with pytest.raises(AssertionError, match="the adapter 'reward' first"):
        use_lora(model, "reward").__enter__()


def test_prompts_that_cannot_be_answered_are_refused(toy_model):
    """Prompts that are too long, and layers without a key-value cache; a prompt of the maximal
    length is accepted."""
    model, _ = toy_model
    limit = model.config.max_position_embeddings
    refused(f"prompt has {limit - 2} tokens", generate, model, [[5], [5] * (limit - 2)], 3)
    assert len(generate(model, [[5] * (limit - 1)], 1)[0]) == 1
    assert generate(model, [], 3) == []
    model.config.layer_types = ["full_attention", "linear_attention", "full_attention"]
    refused("linear_attention", generate, model, [[5, 6]], 3)


# ── Prompts and answers

CHAT = ("{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}[assistant] {% endif %}")
STRICT = ("{% for m in messages %}{% if m.role == 'system' %}"
          "{{ raise_exception('no system turn here') }}{% endif %}{{ m.content }}{% endfor %}")
TURNS = [{"role": role, "content": text} for role, text in
         (("system", "Be brief."), ("user", "A?"), ("assistant", "B."), ("user", "C?"))]


@pytest.mark.parametrize("template, bos, prompt, text", [
    (CHAT, "<bos>", "Why {so}?", "<bos>[user] Why {so}?\n[assistant] "),
    (STRICT, "<bos>", TURNS[1:], "A?B.C?"),
    (None, "<bos>", "Why {so}?", "<bos>Why {so}?\n\nAnswer:\n"),
    (None, "<bos>", TURNS, "<bos>Be brief.\n\nA?\n\nAnswer:\nB.\n\nC?\n\nAnswer:\n"),
    (None, None, "C?", "C?\n\nAnswer:\n")])
# Table 5
def test_a_chat_template_is_used_where_there_is_one(bos_tokenizer, template, bos, prompt, text):
    """The ids are those of the rendered text. Without a template each turn is the prompt, a
    blank line and "Answer:", after one BOS."""
    bos_tokenizer.chat_template = template
    bos_tokenizer.bos_token = bos
    ids = encode_prompt(bos_tokenizer, prompt)
    assert ids == bos_tokenizer(text, add_special_tokens=False).input_ids
    assert bos_tokenizer.decode(ids) == text


@pytest.mark.parametrize("template, reason", [
    (STRICT, "refuses the turns: no system turn here"),
    ("{{ messages[0]['content'] }}", "it leaves out a user turn")])
def test_a_template_that_refuses_or_loses_a_turn_is_named(bos_tokenizer, template, reason):
    bos_tokenizer.chat_template = template
    refused(reason, encode_prompt, bos_tokenizer, TURNS)


# The default date of the templates of Llama 3.1 and of Llama 3.2.
@pytest.mark.parametrize("date", ["'26 Jul 2024'", "strftime_now('%d %b %Y')"])
def test_a_template_that_prints_the_date_gives_the_same_prompt_on_any_day(
        toy_model, monkeypatch, date):
    """A run that resumes on another day, R_φ and the evaluation all use the same prompt."""
    tokenizer = toy_model[1]
    tokenizer.chat_template = (
        f"{{% if not date_string is defined %}}{{% set date_string = {date} %}}{{% endif %}}"
        "Today Date: {{ date_string }}, {{ messages[0]['content'] }}")
    monkeypatch.setattr("model.DATE", "31 Jul 2024")
    ids = encode_prompt(tokenizer, "Hello")
    assert tokenizer.decode(ids) == "Today Date: 31 Jul 2024, Hello"


@pytest.mark.parametrize("name, stored", [("toy/base", str(ROOT / "toy" / "base")),
                                          ("org/model", "org/model")])
def test_an_adapter_stores_the_path_of_its_base_or_its_hub_id(toy_model, tmp_path, monkeypatch,
                                                              name, stored):
    """The path is absolute, so that PEFT finds the base from any directory."""
    monkeypatch.chdir(ROOT)
    add_lora(toy_model[0], "policy", 4, 8)
    toy_model[0].config._name_or_path = name
    save_lora(toy_model[0], "policy", tmp_path / "adapter")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == stored


def test_answers_end_with_eos_and_every_eos_is_known(toy_model, bos_tokenizer):
    """An answer is the text and EOS, without BOS. eos_ids lists the tokenizer's EOS first, then
    the config's, without duplicates."""
    model, tokenizer = toy_model[0], bos_tokenizer
    ids = encode_answer(tokenizer, "Because.")
    assert tokenizer.decode(ids[:-1]) == "Because." and ids[-1] == tokenizer.eos_token_id
    model.generation_config.eos_token_id = [7, tokenizer.eos_token_id, 9]
    assert eos_ids(tokenizer, model) == [tokenizer.eos_token_id, 7, 9]
    tokenizer.eos_token = None
    assert eos_ids(tokenizer, model) == [7, 1, 9]
    refused("EOS", eos_ids, tokenizer)


# ── The training forward

@with_families
def test_scores_are_those_of_the_unpadded_sequence(base):
    """Each row of a padded batch gets the log-probs of its unpadded prompt and response."""
    model, tokenizer = base
    rows = prompts_of(tokenizer)
    prompts = [row[:k] for k, row in zip((3, 1, 1, 2, 5, 9, 4, 6), rows)]
    alone = []
    for prompt, response in zip(prompts, rows[::-1]):
        logp = logits_of(model, prompt + response).log_softmax(-1)[len(prompt) - 1 : -1]
        alone.append(logp[range(len(response)), response])
    batch = pad_batch(prompts, rows[::-1])
    at = batch[3].bool()
    with torch.no_grad():
        hidden = response_hidden(model, *batch)[at]
        together = token_logprobs(hidden, head_weight(model), batch[2][at])
    torch.testing.assert_close(together, torch.cat(alone), atol=1e-4, rtol=1e-5)


# ── generate

@pytest.mark.parametrize("size", [8, 128_256])
def test_no_token_without_probability_is_drawn(size):
    """Tokens at both ends of the vocabulary, and every other token between, have probability 0;
    u is the smallest or largest value of torch.rand."""
    u = torch.tensor([0, 1 - 2**-24]).repeat(8)[:, None]
    for nothing in (-torch.inf, -1e4):
        logits = torch.full((16, size), nothing)
        between = logits[:, size // 4 : -size // 4 : 2]
        between.normal_()
        between[:, -1] = 0                           # likely enough for the largest u to reach
        drawn_ids = sampling._draw(logits, u, 1.0)[:, 0]
        last = size // 4 + 2 * (between.shape[1] - 1)
        assert drawn_ids.tolist() == [size // 4, last] * 8


@with_families
def test_greedy_is_transformers_greedy(base, monkeypatch):  # Table 5
    """Equal tokens, including EOS, for prompts of unequal length that end at different times.

    The prefill processes two columns at a time, the cache is allocated once, and finished rows
    leave the batch.
    """
    model, tokenizer = base
    prompts, caches, update = prompts_of(tokenizer), set(), StaticCache.update

    def watched_update(self, *arguments, **options):   # transformers ≥ 5.24 passes keywords
        out = update(self, *arguments, **options)
        caches.update((x.data_ptr(), x.shape[2]) for x in self.layers[0])
        return out

    monkeypatch.setattr(sampling, "PREFILL_TOKENS", 2 * len(prompts))
    with monkeypatch.context() as patched, sizes_of(model) as sizes:
        patched.setattr(StaticCache, "update", watched_update)
        long = generate(model, prompts, 24, temperature=0)
    assert {len(row) for row in long} == {24} and {columns for _, columns in sizes} == {1, 2}
    assert len(caches) == 2 and {n for _, n in caches} == {max(map(len, prompts)) + 24}
    eos, cut = staggering_eos(long)
    with sizes_of(model) as sizes:
        ours = generate(model, prompts, 24, 0, eos)
    assert ours == transformers_greedy(model, prompts, 24, eos) == cut
    rows = [n for n, _ in sizes]
    assert rows == sorted(rows, reverse=True) and rows[-1] < len(prompts) * 3 / 4
    assert ours == generate(model, prompts, 24, 0, eos, batch_size=3), "in three parts"
    one_eos = generate(model, prompts, 24, 0, eos[:1])
    assert one_eos == [up_to_eos(row, eos[:1]) for row in long] != ours


def test_every_token_is_the_one_its_uniform_says(base):  # Alg. 4 l.11
    """y_t is the token at which the CDF of the uncached model exceeds u (T = 0.8, with an
    adapter, for any order of the batch, in parts, and with rows that end early). Without
    `uniforms`, u is torch.rand."""
    model, tokenizer = base
    randomise(add_lora(model, "policy"))
    prompts = prompts_of(tokenizer)
    uniforms = torch.rand(8, 14, generator=torch.Generator().manual_seed(11))
    eos = list(range(0, model.config.vocab_size, 8))
    with use_lora(model, "policy"):
        rows = generate(model, prompts, 14, 0.8, eos, uniforms=uniforms)
        turned = generate(model, prompts[::-1], 14, 0.8, eos, uniforms=uniforms.flip(0))
        assert rows[::-1] == turned
        torch.manual_seed(11)
        assert rows == generate(model, prompts, 14, 0.8, eos, batch_size=3)
        assert rows[2] == generate(model, [prompts[2]], 14, 0.8, eos, uniforms=uniforms[2:3])[0]
        assert len({len(row) for row in rows}) > 3
        for prompt, row, us in zip(prompts, rows, uniforms):
            logits = logits_of(model, prompt + row)[len(prompt) - 1 : -1]
            cdf = (logits.double() / 0.8).softmax(-1).cumsum(-1)
            for token, u, c in zip(row, us, cdf):
                # The smallest distance is 1.4e-4; rounding moves c by less than 1e-6.
                assert (c - u).abs().min() > 1e-5, "rounding must not decide a token"
                assert token == int((c <= u).sum())
    assert rows != generate(model, prompts, 14, 0.8, eos, uniforms=uniforms), "without adapter"


@needs_cuda
def test_the_host_waits_only_every_16_tokens(toy_model):
    """CUDA: the number of host–device syncs does not grow with the length of one row."""
    model, _ = toy_model
    model.cuda()
    waits = []
    for tokens in (40, 120):
        generate(model, [[5, 6, 7]], tokens)
        torch.cuda.set_sync_debug_mode("warn")
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            generate(model, [[5, 6, 7]], tokens)
        torch.cuda.set_sync_debug_mode("default")
        waits.append(sum("synchroniz" in str(w.message) for w in seen))
    assert waits[0] == waits[1]


# ── Recomputed activations

def test_recomputed_activations_give_the_same_gradients(base):
    """The gradients are bit-identical, with dropout, and the blocks run once more."""
    plain, tokenizer = base
    prompts = prompts_of(tokenizer)

    def gradients(model):
        """The gradients of the adapter, and how often the first block runs."""
        torch.manual_seed(7)
        policy = add_lora(model, "policy", dropout=0.2)
        other = add_lora(model, "reward")
        randomise([*policy, *other], 0.05)
        model.train()
        runs = []
        attention = model.model.layers[0].self_attn
        attention.register_forward_hook(lambda *_: runs.append(1))
        with use_lora(model, "policy"):
            hidden = response_hidden(model, *pad_batch(prompts, prompts[::-1]))
            hidden.square().sum().backward()
        trainable = {id(p) for p in model.parameters() if p.requires_grad}
        assert trainable == {*map(id, [*policy, *other])}, "the base is frozen"
        return [p.grad for p in policy], len(runs)

    model, _ = load_model(directory_of(plain), device="cpu", checkpoint_activations=True)
    expected, plain_runs = gradients(plain)
    ours, runs = gradients(model)
    assert (plain_runs, runs) == (1, 2), "one forward and one recomputation"
    for a, b in zip(expected, ours, strict=True):
        assert torch.equal(a, b) and a.abs().sum() > 0
    generate(model.eval(), prompts, 3)


# ── Tensors on disk and checkpoints

def test_tensors_and_state_come_back_bit_for_bit(tmp_path):
    """Tensors of every dtype and layout, with NaN and −0, and every number of the state."""
    odd, shared = torch.tensor([float("nan"), -0.0, float("inf"), 1e-45]), torch.randn(4, 6)
    tensors = {"odd": odd, "half": torch.randn(3, 5).bfloat16(), "step": torch.tensor(7.0),
               "double": torch.randn(2).double(), "rng": torch.get_rng_state(),
               "flag": torch.tensor([True, False]), "count": torch.tensor(2**62),
               "turned": shared.T, "view": shared[1], "none": torch.zeros(0, 3),
               "trained": torch.nn.Parameter(torch.randn(2))}
    state = {"beta": 0.1 + 0.2, "small": 5e-324, "iteration": 2**53 + 1, "kl": None, "on": True,
             "list": [1, [2.5, "χ²"]]}
    path = tmp_path / "checkpoint"
    save_tensors(path, {"gone": odd}, {"gone": 1})
    (tmp_path / ".checkpoint.new").write_text("half")                   # of a killed process
    save_tensors(path, tensors, state)
    loaded, again = load_tensors(path)
    assert again == state and set(loaded) == set(tensors)
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype and loaded[name].shape == tensor.shape
        ours, theirs = (x.detach().flatten().view(torch.uint8) for x in (loaded[name], tensor))
        assert torch.equal(ours, theirs), name
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]
    saved = path.read_bytes()
    for _ in range(9):
        save_tensors(path, tensors, state)
        assert path.read_bytes() == saved, "equal runs write equal files"


def train_to(run, count, made_of=None):
    """Continue a run of `count` steps, which adds 1 to forty numbers; return these steps."""
    parameter = torch.nn.Parameter(torch.zeros(40))
    state = {"made_of": made_of, "beta": 1e-5}          # 1e-05 is 1E-05, a flip away
    steps = []
    for step in checkpointed(count, torch.optim.SGD([parameter]), state, run, "test"):
        parameter.data += 1
        steps.append(step)
    assert parameter.tolist() == [count] * 40
    return steps


def test_a_damaged_checkpoint_is_refused_and_skipped(tmp_path, capsys):
    """A missing or truncated file or a flipped bit: the error names it, and the previous
    checkpoint is used. Without an undamaged checkpoint, or with one of other rows, a run starts
    anew."""
    assert train_to(tmp_path, 3) == [0, 1, 2]
    older, path = checkpoints(tmp_path)
    assert path.name == "checkpoint-000003.safetensors"
    whole = path.read_bytes()
    for bit in range(0, 8 * len(whole), 5):
        flip_bit(path, bit)
        assert str(path) in refused("damaged", load_tensors, path)
        flip_bit(path, bit)
    for size in (0, 5, 40, -1):
        path.write_bytes(whole[:size])
        assert str(path) in refused("damaged", load_tensors, path)
    capsys.readouterr()
    assert train_to(tmp_path, 4) == [2, 3]
    output = capsys.readouterr().out
    assert output.count(f"skipping a checkpoint: {path}") == 1
    assert f"resumed after step 2 from {older}" in output
    for file in checkpoints(tmp_path):
        file.write_bytes(file.read_bytes()[:-1])
    assert train_to(tmp_path, 2) == [0, 1]
    assert train_to(tmp_path, 3, "other rows") == [0, 1, 2]
    assert [file.name[-13:-12] for file in checkpoints(tmp_path)] == ["2", "3"]
    path.unlink()
    refused(f"{path} is missing", load_tensors, path)


FILE_OPERATIONS = [(os, "fsync"), (Path, "replace"), (Path, "mkdir"), (Path, "write_bytes"),
                   (Path, "unlink")]


def save_and_die(run, k):
    """Take step 3 in a process that ends at its k-th file operation, as by SIGKILL.

    Returns 9, the status of that process, or 0 if it has saved without a k-th operation.
    """
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    operations = count()

    def deadly(call):
        def die_or_call(*arguments, **options):
            return os._exit(9) if next(operations) == k else call(*arguments, **options)
        return die_or_call

    for owner, name in FILE_OPERATIONS:
        setattr(owner, name, deadly(getattr(owner, name)))
    train_to(run, 3)
    os._exit(0)


def test_a_save_killed_at_any_instant_leaves_a_whole_checkpoint(tmp_path, capsys):
    """For every k, the newest checkpoint is complete: the new one, or the one before."""
    status, steps = 9, []
    for k in takewhile(lambda _: status, count()):
        run = tmp_path / str(k)
        train_to(run, 2)
        status = save_and_die(run, k)
        steps.append(train_to(run, 4))
        assert "skipping" not in capsys.readouterr().out
        assert [path.name[-13:-12] for path in sorted(run.iterdir())] == ["3", "4"]
    assert status == 0 and steps == sorted(steps) and steps[0] == [2, 3] and steps[-1] == [3]
    assert len(steps) > 5


@pytest.mark.parametrize("what", ["checkpoint", "adapter"])
def test_a_full_disk_leaves_what_was_there(toy_model, tmp_path, monkeypatch, what):
    """After ENOSPC in write or fsync the old files remain, and no temporary ones."""
    model, _ = toy_model
    parameters = add_lora(model, "policy")
    saves = {"adapter": lambda path: save_lora(model, "policy", path),
             "checkpoint": lambda path: save_tensors(path / "x", {"x": parameters[0]}, {})}

    def no_space(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    def contents():
        return {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    saves[what](tmp_path / "kept")
    before = contents()
    randomise(parameters, 0.2)
    for owner, name in ((os, "fsync"), (Path, "write_bytes")):
        for target in ("kept", "first"):
            with monkeypatch.context() as patched, pytest.raises(OSError, match="No space"):
                patched.setattr(owner, name, no_space)
                saves[what](tmp_path / target)
        assert contents() == before
    saves[what](tmp_path / "kept")
    assert contents() != before
