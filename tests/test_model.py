"""model.py and sampling.py against autograd, PEFT, transformers' generate, counting, a kill."""

import errno
import json
import os
import shutil
import warnings
from collections import Counter
from contextlib import contextmanager
from itertools import combinations
from pathlib import Path

import pytest
from helpers import ROOT
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers.processors import TemplateProcessing
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (AutoModelForCausalLM, Gemma2Config, Gemma2ForCausalLM, GPT2Config,
                          GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, MistralConfig,
                          MistralForCausalLM, PhiConfig, PhiForCausalLM, Qwen2Config,
                          Qwen2ForCausalLM)

import model as model_file
import sampling
from data import InputError
from model import (LoRALinear, ModelError, ValueHead, add_lora, checkpoint_activations,
                   checkpoints, decoder_blocks, encode_answer, encode_prompt, eos_ids,
                   fingerprint, keep_checkpoint, load_checkpoint, load_lora, load_model,
                   lock_directory, lora_parameters, newest_checkpoint, response_hidden,
                   save_checkpoint, save_lora, use_lora)
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

@pytest.fixture(params=["toy_model", "stories"])
def base(request):
    """Each of the two real checkpoints in turn."""
    return request.getfixturevalue(request.param)


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
    """The toy tokenizer with a BOS that it writes in front of every text, as Llama's does."""
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


def drawn(n, v, h, dtype, device="cpu"):
    """Random hidden states, a frozen head, targets and two upstream gradients."""
    hidden = torch.randn(n, h, device=device).to(dtype).requires_grad_()
    weight = (torch.randn(v, h, device=device) / 4).to(dtype)
    return (hidden, weight, torch.randint(v, (n,), device=device),
            torch.randn(n, device=device), torch.randn(n, device=device))


def both(hidden, weight, targets, temperature=1.0):
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


def randomise(parameters, std=0.2):
    for parameter in parameters:
        torch.nn.init.normal_(parameter, std=std)


def peft_adapter(model, directory, targets=("q_proj", "v_proj"), **options):
    """An adapter with random weights, made and saved by PEFT on a fresh copy of the base."""
    fresh = AutoModelForCausalLM.from_pretrained(directory_of(model))
    peft = get_peft_model(fresh, LoraConfig(r=3, lora_alpha=7, target_modules=list(targets),
                                            task_type="CAUSAL_LM", **options))
    randomise(p for name, p in peft.named_parameters() if "lora_" in name)
    peft.save_pretrained(directory)
    return peft.eval()


def up_to_eos(row, eos):
    """The row through its first end-of-sequence id."""
    return next((row[: t + 1] for t, token in enumerate(row) if token in eos), row)


def transformers_greedy(model, prompts, max_new_tokens, eos):
    """What transformers' generate makes of the left-padded batch, cut after each EOS."""
    ids, mask, *_ = pad_batch(prompts, [])
    out = model.generate(ids, attention_mask=mask, do_sample=False, eos_token_id=eos,
                         max_new_tokens=max_new_tokens, pad_token_id=0)
    return [up_to_eos(row, eos) for row in out[:, ids.shape[1]:].tolist()]


def staggering_eos(rows):
    """The two ids that, as EOS, end these rows at the most different times; the cut rows."""
    pairs = combinations(sorted({token for row in rows for token in row[1:]}), 2)
    best = max(pairs, key=lambda eos: len({len(up_to_eos(row, eos)) for row in rows}))
    cut = [up_to_eos(row, best) for row in rows]
    assert len({len(row) for row in cut}) >= 3, "the rows must end at different times"
    return list(best), cut


def refused(match, call, *arguments, **options):
    """The call raises a ModelError of one line that contains `match`."""
    with pytest.raises(ModelError) as caught:
        call(*arguments, **options)
    message = str(caught.value)
    assert isinstance(caught.value, InputError) and match in message and "\n" not in message


@contextmanager
def sizes_of(model):
    """The [B, columns] of the ids of every pass through the model inside."""
    sizes = []
    hook = model.base_model.register_forward_pre_hook(
        lambda _, args: sizes.append(tuple(args[0].shape)))
    yield sizes
    hook.remove()


class Outputs(TorchDispatchMode):
    """Every tensor that an operator returns while this is on."""

    def __init__(self):
        super().__init__()
        self.tensors = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        self.tensors += [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        return out


# ── token_logprobs

@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("parts", [(1, 0), (0, 1), (1, 1)], ids=["log π", "entropy", "both"])
@pytest.mark.parametrize("n, temperature", [(1, 0.6), (7, 1.0), (64, 0.6), (1100, 1.0)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_log_probs_and_entropy_are_those_of_log_softmax(dtype, n, temperature, parts, device):
    """Values, and gradients in the hidden states under a random upstream gradient, of each."""
    hidden, weight, targets, *upstream = drawn(n, 203, 24, dtype, device)
    ours = both(hidden, weight, targets, temperature)
    theirs = naive(hidden, weight, targets, temperature)
    for a, b in zip(ours, theirs):
        assert a.dtype == torch.float32 and relative(a, b) < RELATIVE[dtype]
    alone = token_logprobs(hidden, weight, targets, temperature)
    with torch.no_grad():
        unlearnt = token_logprobs(hidden, weight, targets, temperature)
    assert torch.equal(alone, unlearnt) and not unlearnt.requires_grad

    def gradient(values):
        loss = sum((x * up * on).sum() for x, up, on in zip(values, upstream, parts))
        return torch.autograd.grad(loss, hidden)[0]

    ours, theirs = gradient(ours), gradient(theirs)
    exact = 1e-12 if dtype == torch.float64 else RELATIVE[dtype]
    assert ours.dtype == dtype and relative(ours, theirs) < exact
    if parts == (1, 0):
        assert torch.equal(alone, unlearnt) and relative(gradient([alone]), theirs) < exact


def test_entropy_of_a_flat_and_of_a_certain_distribution():
    """log V where all logits are equal, 0 where one token has all the probability."""
    weight = torch.tensor([[900.0], [0], [0], [0], [0]])
    logp, entropy = both(torch.tensor([[0.0], [1.0]]), weight, torch.tensor([3, 0]))
    torch.testing.assert_close(entropy, torch.tensor([5.0, 1.0]).log())
    torch.testing.assert_close(logp, torch.tensor([0.2, 1.0]).log())
    for none in both(torch.zeros(0, 1), weight, torch.zeros(0).long()):
        assert none.shape == (0,), "an empty batch is not an error"


@pytest.mark.parametrize("n, share", [(512, 4), (7, 1)])
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_the_logits_never_exist_at_once(dtype, n, share, monkeypatch):
    """No operator of forward or backward returns N·V numbers, nor a gradient of the head."""
    v, h = 4096, 32
    monkeypatch.setattr(sampling, "LOGITS", n * v // 8)
    hidden, weight, targets, upstream, upstream_entropy = drawn(n, v, h, dtype)

    def numel(function):
        with Outputs() as seen:
            logp, entropy = function(hidden, weight, targets, 1.0)
            (logp * upstream + entropy * upstream_entropy).sum().backward()
        head = weight.untyped_storage().data_ptr()
        return [t.numel() for t in seen.tensors if t.untyped_storage().data_ptr() != head]

    ours = numel(both)
    assert max(numel(naive)) >= n * v, "the recorder must see the tensor where it is made"
    assert max(ours) < n * v and max(ours) <= n * v / share and v * h not in ours


def test_assertions_mirror_the_equations(toy_model, monkeypatch):
    """Each is broken once: shapes, a head that trains, a draw without its u, a hole in a mask,
    a tile that is lost, tiles that are read twice, and rows that go on after their EOS."""
    model, ones = toy_model[0], torch.ones(1, 2).long()
    hidden, weight, targets, *_ = drawn(5, 2600, 4, torch.float32)
    tiles = sampling._tiles(5, weight)

    def broken(match, call, *arguments, **options):
        with pytest.raises(AssertionError, match=match):
            call(*arguments, **options)

    broken("one y_i for each token", token_logprobs, hidden, weight, targets[:3])
    broken("frozen", token_logprobs, hidden, weight.clone().requires_grad_(), targets)
    broken("l.11", generate, model, [[5]], 3, uniforms=torch.rand(2, 3))
    broken("l.22", response_hidden, model, ones, torch.tensor([[1, 0]]), ones, ones)
    with monkeypatch.context() as patched:
        patched.setattr(sampling, "_tiles", lambda *_: tiles[1:])
        broken(r"log π\(y\) ≤ 0", token_logprobs, hidden * 0 - 1, weight.abs() + 9, targets * 0)
        patched.setattr(sampling.math, "log", lambda v: 1.0)
        broken("≤ log V", token_entropy, hidden * 0, weight)
        patched.setattr(torch, "isin", lambda ids, ends: ids < 0)
        broken("at its end alone", generate, model, [[5]], 9, eos_token_id=list(range(719)))


# ── LoRA

@pytest.mark.parametrize("targets", [("q_proj", "v_proj"), ("q_proj", "gate_proj")])
def test_we_read_an_adapter_of_peft(base, tmp_path, targets):
    """The logits and gradients of PEFT; and save_lora gives back what PEFT had written."""
    model, tokenizer = base
    ids = tokenizer(LONG).input_ids
    peft = peft_adapter(model, tmp_path / "peft", targets)
    theirs, bare = logits_of(peft, ids), logits_of(model, ids)
    load_lora(model, "policy", tmp_path / "peft")
    with use_lora(model, "policy"):
        torch.testing.assert_close(logits_of(model, ids), theirs, atol=1e-4, rtol=1e-5)
        model(torch.tensor([ids])).logits.logsumexp(-1).sum().backward()
    assert torch.equal(logits_of(model, ids), bare) and (theirs - bare).abs().max() > 0.1
    for name, p in peft.named_parameters():
        p.requires_grad_("lora_" in name)
    peft(torch.tensor([ids])).logits.logsumexp(-1).sum().backward()
    gradients = {name.replace(".default", ".policy").removeprefix("base_model.model."): p.grad
                 for name, p in peft.named_parameters() if "lora_" in name}
    ours = {name.replace(".weight", ""): p.grad for name, p in model.named_parameters()
            if "lora_" in name}
    assert len(ours) == 2 * 2 * model.config.num_hidden_layers
    for name, gradient in gradients.items():
        assert relative(ours[name.replace(".weight", "")], gradient) < 1e-4
    save_lora(model, "policy", tmp_path / "again")
    fresh = AutoModelForCausalLM.from_pretrained(directory_of(model))
    again = PeftModel.from_pretrained(fresh, tmp_path / "again")
    assert torch.equal(logits_of(again, ids), theirs)


def test_adapter_dropout_acts_in_training_on_the_adapter_alone(toy_model, tmp_path):
    """As in PEFT: an adapter that has one is exact in evaluation, and random in training."""
    model, tokenizer = toy_model
    ids = tokenizer(LONG).input_ids
    bare = logits_of(model, ids)
    theirs = logits_of(peft_adapter(model, tmp_path / "peft", lora_dropout=0.5), ids)
    load_lora(model, "policy", tmp_path / "peft")
    with use_lora(model, "policy"):
        torch.testing.assert_close(logits_of(model, ids), theirs, atol=1e-4, rtol=1e-5)
        model.train()
        assert not torch.equal(logits_of(model, ids), logits_of(model, ids))
    assert torch.equal(logits_of(model, ids), bare)


def test_a_fresh_adapter_changes_nothing_until_it_is_trained(base):
    """B = 0 gives the bare base, bit for bit; B ≠ 0 does not."""
    model, tokenizer = base
    ids = tokenizer(LONG).input_ids
    bare = logits_of(model, ids)
    parameters = add_lora(model, "policy")
    with use_lora(model, "policy"):
        assert torch.equal(logits_of(model, ids), bare)
        randomise(parameters)
        assert not torch.allclose(logits_of(model, ids), bare, atol=0.1)
    assert torch.equal(logits_of(model, ids), bare)


def test_two_adapters_do_not_mix(toy_model, tmp_path):
    """Each gives what it gives alone; None is the base; what was active before comes back."""
    model, tokenizer = toy_model
    ids = tokenizer(LONG).input_ids
    alone = {None: logits_of(model, ids)}
    for name, targets in (("policy", ("q_proj",)), ("reward", ("v_proj", "gate_proj"))):
        single, _ = load_model(directory_of(model), device="cpu")
        randomise(add_lora(single, name, r=4, target_modules=targets))
        with use_lora(single, name):
            alone[name] = logits_of(single, ids)
        save_lora(single, name, tmp_path / name)
        load_lora(model, name, tmp_path / name)
    assert not any(torch.allclose(a, b, atol=0.1) for a, b in combinations(alone.values(), 2))
    with use_lora(model, "policy"):
        for name in ("reward", None, "policy"):
            with use_lora(model, name):
                assert torch.equal(logits_of(model, ids), alone[name])
            with use_lora(model, name, merge=True):
                merged = logits_of(model, ids)
                torch.testing.assert_close(merged, alone[name], atol=1e-4, rtol=1e-4)
                assert torch.equal(merged, alone[name]) == (name is None)
                with use_lora(model, "policy"):
                    assert torch.equal(logits_of(model, ids), alone["policy"])
        with pytest.raises(ZeroDivisionError), use_lora(model, "reward"):
            1 / 0
        assert torch.equal(logits_of(model, ids), alone["policy"])
    assert torch.equal(logits_of(model, ids), alone[None])


def test_only_the_active_adapter_learns(toy_model):
    """Backward reaches A and B of the active adapter, nothing of the other nor of the base."""
    model, tokenizer = toy_model
    active, idle = add_lora(model, "policy"), add_lora(model, "reward")
    randomise([*active, *idle])
    with use_lora(model, "policy"):
        model(torch.tensor([tokenizer(LONG).input_ids])).logits.logsumexp(-1).sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in active)
    learns = {id(p) for p in model.parameters() if p.grad is not None}
    assert learns == {id(p) for p in lora_parameters(model, "policy")} == set(map(id, active))
    trainable = {id(p) for p in model.parameters() if p.requires_grad}
    assert trainable == {id(p) for p in [*active, *idle]}


def test_a_bfloat16_base_keeps_its_adapter_in_float32(toy_model):
    """The update is made in float32 and rounded once: 99 % of it is float64's, bit for bit;
    nor is it merged, where a small one would be lost."""
    model, tokenizer = load_model(directory_of(toy_model[0]), dtype="bfloat16", device="cpu")
    randomise(parameters := add_lora(model, "policy"))
    assert {p.dtype for p in parameters} == {torch.float32}
    layer = model.model.layers[0].self_attn.q_proj
    x = torch.randn(5, model.config.hidden_size, dtype=torch.bfloat16)
    A, B = layer.lora_A["policy"], layer.lora_B["policy"]
    with use_lora(model, "policy", merge=True), torch.no_grad():
        update = 2 * (x.double() @ A.double().T @ B.double().T)
        theirs = layer.base_layer(x) + update.bfloat16()
        assert layer(x).dtype == torch.bfloat16 and (layer(x) == theirs).float().mean() > 0.99


@pytest.mark.parametrize("architecture, config, extra", [
    (MistralForCausalLM, MistralConfig, {"sliding_window": 6}),
    (MistralForCausalLM, MistralConfig, {}),
    (Qwen2ForCausalLM, Qwen2Config, {}),
    (Qwen2ForCausalLM, Qwen2Config,
     {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
], ids=["mistral-sliding", "mistral", "qwen2", "qwen2-mixed"])
def test_other_families_load_sample_and_take_adapters(tiny, tmp_path, architecture, config,
                                                      extra):  # Table 5
    """load_model, generate (against transformers) and LoRA (against PEFT), windows included."""
    model, tokenizer = load_model(tiny(architecture, config, **extra), device="cpu")
    assert type(model) is architecture and not any(p.requires_grad for p in model.parameters())
    if "max_window_layers" in extra:
        assert len(set(model.config.layer_types)) == 2
    ids, prompts = tokenizer(LONG).input_ids, prompts_of(tokenizer)
    theirs = logits_of(peft_adapter(model, tmp_path / "peft"), ids)
    load_lora(model, "policy", tmp_path / "peft")
    eos, cut = staggering_eos(generate(model, prompts, 16, temperature=0))
    with use_lora(model, "policy"):
        torch.testing.assert_close(logits_of(model, ids), theirs, atol=1e-4, rtol=1e-4)
        ours = generate(model, prompts, 16, 0, eos)
        assert ours == transformers_greedy(model, prompts, 16, eos)
    ours = generate(model, prompts, 16, 0, eos)
    assert ours == transformers_greedy(model, prompts, 16, eos) == cut


# ── load_model, fingerprint, ValueHead

def test_half_precision_becomes_float32_on_a_cpu_unless_asked_for(toy_model, tmp_path):
    """A bfloat16 checkpoint loads as float32 on a CPU, same values; dtype= is obeyed."""
    path = directory_of(toy_model[0])
    half = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    half.save_pretrained(tmp_path / "half")
    toy_model[1].save_pretrained(tmp_path / "half")
    assert head_weight(half).dtype == torch.bfloat16
    model, _ = load_model(tmp_path / "half", device="cpu")
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert torch.equal(head_weight(model), head_weight(half).float())
    for dtype in ("bfloat16", torch.bfloat16):
        model, _ = load_model(tmp_path / "half", dtype, "cpu")
        assert head_weight(model).dtype == torch.bfloat16


def test_a_fingerprint_names_the_base_and_not_its_precision(toy_model, stories):
    """Equal in bfloat16 and under an adapter, different for other weights or another depth."""
    model, _ = toy_model
    name = fingerprint(model)
    assert name != fingerprint(stories[0])
    assert fingerprint(load_model(directory_of(model), "bfloat16", "cpu")[0]) == name
    randomise(add_lora(model, "policy"))
    assert fingerprint(model) == name
    model.config.num_hidden_layers += 1
    assert fingerprint(model) != name
    model.config.num_hidden_layers -= 1
    model.get_input_embeddings().weight.data.mul_(1.1)
    assert fingerprint(model) != name


def test_value_head_is_zero_and_then_linear():
    """V = 0 at the start; with weights, w·h + b in float32 for every shape and dtype."""
    head = ValueHead(6)
    hidden = torch.randn(2, 3, 6)
    assert torch.equal(head(hidden), torch.zeros(2, 3)) and head(hidden[0, 0]).shape == ()
    randomise(head.parameters(), std=1)
    w, b = head.parameters()
    for h in (hidden, hidden.bfloat16()):
        torch.testing.assert_close(head(h), torch.einsum("btd,d->bt", h.float(), w[0]) + b)


# ── Errors

def test_a_model_that_cannot_be_loaded_is_named(toy_model, tmp_path):
    """Nothing there; a pickle alone, which transformers could read; damaged safetensors."""
    model, tokenizer = toy_model
    refused(str(tmp_path / "nowhere"), load_model, tmp_path / "nowhere", device="cpu")
    refused("--model", load_model, str(tmp_path / "nowhere"), device="cpu")
    model.config.save_pretrained(tmp_path), tokenizer.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    refused(str(tmp_path), load_model, tmp_path, device="cpu")
    (tmp_path / "model.safetensors").write_bytes(b"torn")
    refused(str(tmp_path), load_model, tmp_path, device="cpu")


def test_a_tokenizer_of_another_model_is_refused(toy_model, tmp_path):
    small = LlamaForCausalLM(LlamaConfig(vocab_size=500, hidden_size=8, intermediate_size=8,
                                         num_hidden_layers=1, num_attention_heads=1))
    small.save_pretrained(tmp_path), toy_model[1].save_pretrained(tmp_path)
    refused("tokenizer has 900 tokens and the model 500", load_model, tmp_path, device="cpu")


def test_logits_that_the_head_alone_does_not_make_are_refused(tiny):
    """A soft cap, whatever the padding token, whose embedding is zero; a bias. Not without."""
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


@pytest.mark.parametrize("file", ["adapter_config.json", "adapter_model.safetensors"])
def test_an_adapter_without_whole_files_is_refused(toy_model, tmp_path, file):
    """The directory and the file are named, whether it is torn or absent."""
    model, _ = toy_model
    add_lora(model, "policy")
    save_lora(model, "policy", tmp_path / "adapter")
    path = tmp_path / "adapter" / file
    path.write_bytes(path.read_bytes()[:-20])
    refused(f"{path} is", load_lora, model, "other", tmp_path / "adapter")
    path.unlink()
    refused(f"{tmp_path / 'adapter'} holds no {file}", load_lora, model, "other",
            tmp_path / "adapter")


def test_an_adapter_for_another_base_is_refused(toy_model, tiny, tmp_path):
    """By a layer that is absent, by shape, by half a pair, and, where all shapes fit, by the
    fingerprint; the model stays as it was."""
    model, _ = toy_model
    peft_adapter(model, tmp_path / "toy")
    small = tiny(MistralForCausalLM, MistralConfig, num_hidden_layers=3)
    shallow = tiny(Qwen2ForCausalLM, Qwen2Config, "shallow", num_hidden_layers=1)
    small, shallow = (load_model(path, device="cpu")[0] for path in (small, shallow))
    refused("q_proj is [32, 32] here and [128, 128] in the adapter", load_lora, small, "policy",
            tmp_path / "toy")
    peft_adapter(small, tmp_path / "small")
    refused("model.layers.1.self_attn.q_proj is absent", load_lora, shallow, "policy",
            tmp_path / "small")
    peft_adapter(small, tmp_path / "head", targets=("lm_head",))
    refused("lm_head", load_lora, small, "policy", tmp_path / "head")
    add_lora(model, "policy")
    save_lora(model, "policy", tmp_path / "ours")
    twin, _ = load_model(directory_of(model), device="cpu")
    twin.get_input_embeddings().weight.data.mul_(1.1)
    refused("another base", load_lora, twin, "policy", tmp_path / "ours")
    tensors, _ = model_file.read_tensors(tmp_path / "ours" / "adapter_model.safetensors")
    del tensors["base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"]
    model_file.save_file(tensors, tmp_path / "ours" / "adapter_model.safetensors")
    refused("no LoRA pair", load_lora, twin, "policy", tmp_path / "ours")
    for other in (small, shallow, twin):
        assert not any(isinstance(m, LoRALinear) for m in other.modules())


@pytest.mark.parametrize("option", ["use_dora", "use_rslora", "lora_bias"])
@pytest.mark.filterwarnings("ignore")                     # PEFT's, on what it is to make
def test_adapters_of_other_kinds_are_refused(toy_model, tmp_path, option):
    """What PEFT computes in another way is not loaded as if it were plain LoRA."""
    peft_adapter(toy_model[0], tmp_path / "adapter", **{option: True})
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config[option] is True
    refused(option, load_lora, toy_model[0], "policy", tmp_path / "adapter")


@pytest.mark.parametrize("key", ["r", "lora_alpha"])
def test_an_adapter_without_its_scale_is_refused(toy_model, tmp_path, key):
    """Nothing is guessed in its place, and the model stays as it was."""
    model, _ = toy_model
    peft_adapter(model, tmp_path)
    path = tmp_path / "adapter_config.json"
    config = json.loads(path.read_text())
    del config[key]
    path.write_text(json.dumps(config))
    refused(f"{path}: {key} is not there", load_lora, model, "policy", tmp_path)
    assert not any(isinstance(m, LoRALinear) for m in model.modules())


def test_unknown_names_are_refused(toy_model, tiny, tmp_path):
    """A target that the model lacks or that is not linear, an adapter unknown or known."""
    model, _ = toy_model
    refused("W_pack", add_lora, model, "policy", target_modules=("q_proj", "W_pack"))
    refused("gate_proj", add_lora, model, "policy", target_modules=("W_pack",))
    add_lora(model, "policy")
    refused("'policy'", add_lora, model, "policy")
    refused("'reward'", save_lora, model, "reward", tmp_path / "adapter")
    refused("'reward'", use_lora(model, "reward").__enter__)
    gpt = tiny(GPT2LMHeadModel, GPT2Config, n_embd=32, n_layer=2, n_head=4)     # a Conv1D
    refused("c_attn", add_lora, load_model(gpt, device="cpu")[0], "policy",
            target_modules=("c_attn",))


def test_prompts_that_cannot_be_answered_are_refused(toy_model):
    """No tokens, too many, or layers whose cache is not keys and values; one just fits."""
    model, _ = toy_model
    limit = model.config.max_position_embeddings
    refused("no tokens", generate, model, [[5], []], 4)
    refused(f"{limit - 2} tokens", generate, model, [[5], [5] * (limit - 2)], 3)
    refused("prompt 1 of", generate, model, [[5], [5] * (limit - 2)], 3)
    assert len(generate(model, [[5] * (limit - 2)], 2)[0]) == 2
    assert generate(model, [], 3) == []
    model.config.layer_types = ["full_attention", "linear_attention", "full_attention"]
    refused("linear_attention", generate, model, [[5, 6]], 3)


# ── Prompts and answers

def test_a_chat_template_is_used_where_there_is_one(bos_tokenizer):  # Table 5
    """The ids are those of the rendered text, whose BOS the template wrote: exactly one."""
    bos_tokenizer.chat_template = (
        "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}[assistant] {% endif %}")
    ids = encode_prompt(bos_tokenizer, "Why {so}?")
    text = "<bos>[user] Why {so}?\n[assistant] "
    assert ids == bos_tokenizer(text, add_special_tokens=False).input_ids
    assert ids[0] == bos_tokenizer.bos_token_id
    assert Counter(ids)[bos_tokenizer.bos_token_id] == 1
    assert bos_tokenizer.decode(ids[1:]) == "[user] Why {so}?\n[assistant] "


def test_a_template_that_prints_the_date_gives_the_same_prompt_on_any_day(tmp_path):
    """What goes on tomorrow, R_φ and evaluation see the prompt of today."""
    base = shutil.copytree(ROOT / "toy" / "base", tmp_path / "base")
    (base / "chat_template.jinja").write_text(
        "{{ strftime_now('%d %b') }} {{ strftime_now(\"%Y\") }}: {{ messages[0]['content'] }}")
    _, tokenizer = load_model(base, device="cpu")
    assert tokenizer.decode(encode_prompt(tokenizer, "Hello")) == "26 Jul 2024: Hello"


def test_an_adapter_names_its_base_so_that_it_is_found_from_anywhere(toy_model, tmp_path,
                                                                     monkeypatch):
    """A directory by its absolute path, a hub id as it is."""
    model, _ = toy_model
    add_lora(model, "policy", 4, 8)
    monkeypatch.chdir(ROOT)
    for name, told in (("toy/base", str(ROOT / "toy" / "base")), ("org/model", "org/model")):
        model.config._name_or_path = name
        save_lora(model, "policy", tmp_path / "adapter")
        config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
        assert config["base_model_name_or_path"] == told


def test_the_plain_template_stands_after_one_bos(bos_tokenizer):
    """Without a chat template: BOS, the prompt, a blank line and 'Answer:', for every turn."""
    ids = encode_prompt(bos_tokenizer, "Why {so}?")
    assert ids[0] == bos_tokenizer.bos_token_id
    assert Counter(ids)[bos_tokenizer.bos_token_id] == 1
    assert bos_tokenizer.decode(ids[1:]) == "Why {so}?\n\nAnswer:\n"
    turns = [("system", "Be brief."), ("user", "A?"), ("assistant", "B."), ("user", "C?")]
    ids = encode_prompt(bos_tokenizer, [{"role": role, "content": x} for role, x in turns])
    assert bos_tokenizer.decode(ids[1:]) == \
        "Be brief.\n\nA?\n\nAnswer:\nB.\n\nC?\n\nAnswer:\n"
    bos_tokenizer.bos_token = None
    assert bos_tokenizer.decode(encode_prompt(bos_tokenizer, "C?")) == "C?\n\nAnswer:\n"


def test_answers_end_with_eos_and_every_eos_is_known(toy_model, bos_tokenizer):
    """The text and EOS, no BOS; the tokenizer's EOS, then the config's, each once."""
    model, tokenizer = toy_model[0], bos_tokenizer
    ids = encode_answer(tokenizer, "Because.")
    assert tokenizer.decode(ids[:-1]) == "Because." and ids[-1] == tokenizer.eos_token_id
    model.generation_config.eos_token_id = [7, tokenizer.eos_token_id, 9]
    assert eos_ids(tokenizer, model) == [tokenizer.eos_token_id, 7, 9]
    tokenizer.eos_token = None
    assert eos_ids(tokenizer, model) == [7, 1, 9]
    refused("EOS", eos_ids, tokenizer)


# ── The training forward

def rescored(model, prompts, responses, temperature=1.0):
    """Log-probs of all sampled tokens, row after row, by the forward pass of training."""
    batch = pad_batch(prompts, responses)
    at = batch[3].bool()
    with torch.no_grad():
        hidden = response_hidden(model, *batch)
        return token_logprobs(hidden[at], head_weight(model), batch[2][at], temperature)


def test_scores_are_those_of_the_unpadded_sequence(base):
    """Each row of a padded batch has the log-softmax of prompt and response alone."""
    model, tokenizer = base
    rows = prompts_of(tokenizer)
    prompts = [row[:k] for k, row in zip((3, 1, 1, 2, 5, 9, 4, 6), rows)]
    alone = []
    for prompt, response in zip(prompts, rows[::-1]):
        logp = logits_of(model, prompt + response).log_softmax(-1)[len(prompt) - 1 : -1]
        alone.append(logp[range(len(response)), response])
    torch.testing.assert_close(rescored(model, prompts, rows[::-1]), torch.cat(alone),
                               atol=1e-4, rtol=1e-5)


def test_positions_count_from_the_first_token_of_the_prompt(tiny):
    """GPT-2 learns absolute positions: a padded row scores and samples as it does alone."""
    gpt = tiny(GPT2LMHeadModel, GPT2Config, n_embd=32, n_layer=2, n_head=4)
    model, tokenizer = load_model(gpt, device="cpu")
    prompts = prompts_of(tokenizer)
    alone = [rescored(model, [x], [y]) for x, y in zip(prompts, prompts[::-1])]
    torch.testing.assert_close(rescored(model, prompts, prompts[::-1]), torch.cat(alone),
                               atol=1e-4, rtol=1e-5)
    eos, cut = staggering_eos(generate(model, prompts, 16, temperature=0))
    ours = generate(model, prompts, 16, 0, eos)
    assert ours == transformers_greedy(model, prompts, 16, eos) == cut


# ── generate

def test_greedy_is_transformers_greedy(base):
    """Token for token on unequal prompts whose rows end at different times; EOS is kept."""
    model, tokenizer = base
    prompts = prompts_of(tokenizer)
    long = generate(model, prompts, 24, temperature=0)
    eos, cut = staggering_eos(long)
    with sizes_of(model) as sizes:
        ours = generate(model, prompts, 24, 0, eos)
    assert ours == transformers_greedy(model, prompts, 24, eos) == cut
    rows = [b for b, _ in sizes]
    assert rows == sorted(rows, reverse=True) and rows[-1] < len(prompts) * 3 / 4, \
        "rows that ended must have left the batch"
    one = generate(model, prompts, 24, 0, eos[0])
    assert one == [up_to_eos(row, eos[:1]) for row in long] != ours, "an id or a list of ids"
    assert {len(row) for row in long} == {24}
    assert all(len(row) == 24 or row[-1] in eos for row in ours)
    assert not any(token in eos for row in ours for token in row[:-1])


def test_every_token_is_the_one_its_uniform_says(base):
    """Whatever the batch, at T = .8, under an adapter, rows leaving early, cached or not: y_t
    is where the distribution function of the uncached model, all read at once, passes u."""
    model, tokenizer = base
    randomise(add_lora(model, "policy"), std=0.1)
    prompts = prompts_of(tokenizer)
    uniforms = torch.rand(8, 14, generator=torch.Generator().manual_seed(5))
    eos = list(range(0, model.config.vocab_size, 8))
    with use_lora(model, "policy"):
        rows = generate(model, prompts, 14, 0.8, eos, uniforms=uniforms)
        turned = generate(model, prompts[::-1], 14, 0.8, eos, uniforms=uniforms.flip(0))
        assert rows[::-1] == turned
        assert rows[2] == generate(model, [prompts[2]], 14, 0.8, eos, uniforms=uniforms[2:3])[0]
        assert len({len(row) for row in rows}) > 3
        for prompt, row, us in zip(prompts, rows, uniforms):
            logits = logits_of(model, prompt + row)[len(prompt) - 1 : -1]
            cdf = (logits.double() / 0.8).softmax(-1).cumsum(-1)
            for token, u, c in zip(row, us, cdf):
                assert token == int((c <= u).sum()) or (c - u).abs().min() < 1e-6
    assert rows != generate(model, prompts, 14, 0.8, eos, uniforms=uniforms), "without adapter"


def test_sampled_frequencies_are_the_softmax(tiny):  # Alg. 4 l.11
    """χ² of 20,000 first tokens at T = 0.7 against softmax(logits / 0.7), which T = 1 fails."""
    model, tokenizer = load_model(tiny(Qwen2ForCausalLM, Qwen2Config), device="cpu")
    prompt, n = tokenizer("The post").input_ids, 20_000
    generator = torch.Generator().manual_seed(11)
    rows = [row for _ in range(4)
            for row in generate(model, [prompt] * (n // 4), 1, 0.7, generator=generator)]
    counts = Counter(row[0] for row in rows)
    seen = torch.tensor([counts[v] for v in range(model.config.vocab_size)]).double()

    def excess(temperature):
        expected = n * (logits_of(model, prompt)[-1].double() / temperature).softmax(-1)
        common = expected >= 5
        observed, wanted = (torch.cat([x[common], x[~common].sum()[None]])
                            for x in (seen, expected))
        freedom = len(wanted) - 1
        assert freedom > 10, "the distribution must have a breadth"
        chi2 = ((observed - wanted) ** 2 / wanted).sum()
        return float((chi2 - freedom) / (2 * freedom) ** 0.5)

    assert abs(excess(0.7)) < 5 and excess(1.0) > 50
    again, other = (generate(model, [prompt] * 8, 9, generator=torch.Generator().manual_seed(k))
                    for k in (1, 2))
    assert again != other and len(set(map(tuple, again))) > 4
    assert again == generate(model, [prompt] * 8, 9, generator=torch.Generator().manual_seed(1))


def test_a_long_prompt_is_read_in_parts(base, monkeypatch):
    """Parts of two columns leave the ids as they are, and no pass is wider."""
    model, tokenizer = base
    prompts = prompts_of(tokenizer)
    whole = generate(model, prompts, 8, 0)
    monkeypatch.setattr(sampling, "PREFILL_TOKENS", 2 * len(prompts))
    with sizes_of(model) as sizes:
        assert generate(model, prompts, 8, 0) == whole
    assert max(columns for _, columns in sizes) == 2 and len(sizes) > 8


def test_the_cache_is_allocated_once(toy_model, monkeypatch):
    """Every step writes into the tensors of the first, a column per token and no more."""
    model, tokenizer = toy_model
    prompts, seen, update = prompts_of(tokenizer), set(), StaticCache.update

    def watched(self, *arguments):
        out = update(self, *arguments)
        seen.update((x.data_ptr(), x.shape[2]) for x in self.layers[0])
        return out

    monkeypatch.setattr(StaticCache, "update", watched)
    generate(model, prompts, 9, 0)
    assert len(seen) == 2 and {n for _, n in seen} == {max(map(len, prompts)) + 9}


@needs_cuda
@pytest.mark.parametrize("temperature", [0, 0.8])
def test_the_captured_step_is_the_eager_step(toy_model, temperature):
    """CUDA: ids with and without the graph, rows ending early, over two widths of the cache."""
    model, tokenizer = toy_model
    model.cuda()
    prompts = prompts_of(tokenizer)
    uniforms = torch.rand(8, 300, generator=torch.Generator().manual_seed(5))
    eos, _ = staggering_eos(generate(model, prompts, 40, temperature=0))
    for end in (eos, []):
        graph, eager = (generate(model, prompts, 300, temperature, end, uniforms=uniforms,
                                 cuda_graph=on) for on in (True, False))
        assert graph == eager


@needs_cuda
def test_the_host_waits_only_every_16_tokens(toy_model):
    """CUDA: the synchronisations that PyTorch reports do not grow with an endless row."""
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
    """Bit for bit, though backward runs after the adapter's block was left, beside another."""
    model, tokenizer = base
    prompts = prompts_of(tokenizer)
    policy, other = add_lora(model, "policy", dropout=0.2), add_lora(model, "reward")
    randomise([*policy, *other], std=0.05)
    model.train()

    def gradients():
        torch.manual_seed(7)
        with use_lora(model, "policy"):
            hidden = response_hidden(model, *pad_batch(prompts, prompts[::-1]))
        hidden.square().sum().backward()
        made = [p.grad.clone() for p in policy]
        model.zero_grad()
        return made

    runs, plain = [], gradients()
    checkpoint_activations(model), checkpoint_activations(model)
    decoder_blocks(model)[0].self_attn.register_forward_hook(lambda *_: runs.append(1))
    for a, b in zip(plain, gradients(), strict=True):
        assert torch.equal(a, b) and a.abs().sum() > 0
    assert len(runs) == 2, "once forward, once in backward, however often it is asked for"
    assert all(p.grad is None for p in other)
    generate(model.eval(), prompts, 3)


# ── Checkpoints

def no_space(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


def bits(tensor):
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).tolist()


def test_a_checkpoint_comes_back_bit_for_bit(tmp_path):
    """Every dtype and layout, NaN and −0 included, and every number of the state."""
    odd, shared = torch.tensor([float("nan"), -0.0, float("inf"), 1e-45]), torch.randn(4, 6)
    tensors = {"odd": odd, "half": torch.randn(3, 5).bfloat16(), "step": torch.tensor(7.0),
               "double": torch.randn(2).double(), "rng": torch.get_rng_state(),
               "flag": torch.tensor([True, False]), "count": torch.tensor(2**62),
               "turned": shared.T, "view": shared[1], "none": torch.zeros(0, 3),
               "trained": torch.nn.Parameter(torch.randn(2))}
    state = {"beta": 0.1 + 0.2, "small": 5e-324, "iteration": 2**53 + 1, "kl": None, "on": True,
             "list": [1, [2.5, "χ²"]]}
    save_checkpoint(tmp_path / "checkpoint", {"gone": odd}, {"gone": 1})
    save_checkpoint(tmp_path / "checkpoint", tensors, state)
    loaded, again = load_checkpoint(tmp_path / "checkpoint")
    assert again == state and set(loaded) == set(tensors)
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype and loaded[name].shape == tensor.shape
        assert bits(loaded[name]) == bits(tensor), name
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def kept(run, n, former, **state):
    """Checkpoint-n of forty numbers n, which grew from that of `former`."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.full((40,), float(n)))])
    keep_checkpoint(run, optimizer, {"iteration": n, **state}, 10**9, former, n)


@pytest.mark.parametrize("name", ["tensors.safetensors", "state.json"])
def test_a_damaged_checkpoint_is_refused_and_passed_over(tmp_path, name, capsys):
    """Absent, torn anywhere, one bit flipped: it is named, the one before taken. Every bit of
    the state, whose 1e-05 would be the same number as 1E-05."""
    for n in (9, 10):
        kept(tmp_path, n, n - 1, rng=list(range(5)), beta=1e-5)
    path, tensors, state = newest_checkpoint(tmp_path)
    assert (path.name == "checkpoint-10"
            and tensors["0.parameter"][0] == state["iteration"] == 10)
    file = path / name
    whole = file.read_bytes()
    damages = [whole[:keep] for keep in (0, 5, 40, -1)]
    for bit in range(0, 8 * len(whole), 1 if name == "state.json" else 57):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        damages.append(bytes(flipped))
    for damaged in damages:
        file.write_bytes(damaged)
        refused("damaged", load_checkpoint, path)
        refused(str(path), load_checkpoint, path)
    capsys.readouterr()
    older, _, state = newest_checkpoint(tmp_path)
    assert older.name == "checkpoint-9" and state["iteration"] == 9
    assert capsys.readouterr().out.count(f"passed over {path}") == 1
    file.unlink()
    refused(f"{path} holds no {name}", load_checkpoint, path)
    shutil.rmtree(tmp_path / "checkpoint-9")
    assert newest_checkpoint(tmp_path) == (None, {}, {})


def test_the_checkpoint_just_written_stays_and_the_damaged_ones_go(tmp_path):
    """3 to 9 are damaged, whatever their numbers, where 2 was taken up: then 4 is written."""
    for n in (2, 3, 6, 9):
        kept(tmp_path, n, 2)
        shutil.copytree(tmp_path / f"checkpoint-{n}", tmp_path / f"kept-{n}")
    for n in (2, 3, 6, 9):
        shutil.rmtree(tmp_path / f"checkpoint-{n}", ignore_errors=True)
        shutil.move(tmp_path / f"kept-{n}", tmp_path / f"checkpoint-{n}")
    kept(tmp_path, 4, 2)
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-2", "checkpoint-4"]


def test_a_save_killed_at_any_instant_leaves_a_whole_checkpoint(tmp_path, capsys):
    """A process ends at its k-th touch of the disk, for every k: the newest is whole."""
    def dies_at(k, run):
        """In a process of its own, without clean-up, as SIGKILL ends one: its exit status."""
        child = os.fork()
        if child:
            return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        left = [k]

        def deadly(call):
            def touch(*arguments, **options):
                left[0] -= 1
                if left[0] < 0:
                    os._exit(9)
                return call(*arguments, **options)
            return touch

        for owner, name in ((os, "fsync"), (os, "open"), (Path, "rename"), (Path, "mkdir"),
                            (Path, "write_text"), (shutil, "rmtree"),
                            (model_file, "save_file")):
            setattr(owner, name, deadly(getattr(owner, name)))
        kept(run, 2, 1)
        os._exit(0)

    status, k, found = 9, 0, []
    while status == 9:
        run = tmp_path / str(k)
        run.mkdir()
        kept(run, 1, 0)
        status, k = dies_at(k, run), k + 1
        found.append(newest_checkpoint(run)[2]["iteration"])
        assert "passed over" not in capsys.readouterr().out
        kept(run, 3, 0)
        assert [path.name for path in run.iterdir()] == ["checkpoint-3"], "nothing is left over"
    assert status == 0 and found == sorted(found) and set(found) == {1, 2} and k > 10


@pytest.mark.parametrize("what", ["checkpoint", "adapter"])
def test_a_full_disk_leaves_what_was_there(toy_model, tmp_path, monkeypatch, what):
    """ENOSPC in save_file or in fsync: the former stands, nothing lies beside it."""
    model, _ = toy_model
    parameters = add_lora(model, "policy")

    def save(name):
        if what == "adapter":
            save_lora(model, "policy", tmp_path / name)
        else:
            save_checkpoint(tmp_path / name, {"x": parameters[0]}, {"iteration": 1})

    def half(tensors, path, *_):
        path.write_bytes(b"half")
        no_space()

    def contents():
        return {path.name: path.read_bytes() for path in (tmp_path / "kept").iterdir()}

    save("kept")
    before = contents()
    randomise(parameters)
    for owner, name, broken in ((os, "fsync", no_space), (model_file, "save_file", half)):
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, broken)
            for target in ("kept", "first"):
                with pytest.raises(OSError, match="No space"):
                    save(target)
        assert contents() == before and [p.name for p in tmp_path.iterdir()] == ["kept"]
    save("kept")
    assert contents() != before


def test_leftovers_of_a_killed_save_are_no_obstacle(tmp_path):
    """A process with the number of a killed one (the first of any container) saves as usual."""
    save_checkpoint(tmp_path / "checkpoint", {"x": torch.ones(2)}, {"iteration": 1})
    for kind in ("new", "old"):
        shutil.copytree(tmp_path / "checkpoint", tmp_path / f".checkpoint.{kind}-{os.getpid()}")
    save_checkpoint(tmp_path / "checkpoint", {"x": torch.zeros(2)}, {"iteration": 2})
    assert load_checkpoint(tmp_path / "checkpoint")[1] == {"iteration": 2}
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def test_a_directory_has_one_writer(tmp_path):
    """A second lock is refused while the first is held, and given when it is not."""
    held = lock_directory(tmp_path)
    with pytest.raises(InputError, match=f"{tmp_path}: another process"):
        lock_directory(tmp_path)
    held.close()
    lock_directory(tmp_path).close()
