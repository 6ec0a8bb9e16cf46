"""model.py against other implementations: autograd, torch's own losses, PEFT, transformers' generate and counting."""

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
import torch
import torch.nn.functional as F
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers.processors import TemplateProcessing
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (AutoModelForCausalLM, Gemma2Config, Gemma2ForCausalLM, GPT2Config,
                          GPT2LMHeadModel, MistralConfig, MistralForCausalLM, PhiConfig, PhiForCausalLM, Qwen2Config,
                          Qwen2ForCausalLM)

from model import (LoRALinear, ModelError, ValueHead, add_lora, checkpoint_activations,
                   decoder_blocks, encode_answer, encode_prompt, eos_ids, fingerprint, generate, head_weight,
                   load_checkpoint, load_lora, load_model, lora_parameters, pad_batch, response_hidden,
                   save_checkpoint, save_lora, token_kl, token_logprobs, use_lora)
from sampling import StaticCache

DEVICES = ["cpu"] + ["cuda"] * torch.cuda.is_available()
DTYPES = [torch.float64, torch.float32, torch.bfloat16]
RELATIVE = {torch.float64: 1e-6, torch.float32: 1e-5, torch.bfloat16: 2e-2}      # outputs are float32
TEXTS = ["Once upon a time", "The dog", "Lily and her mom went to the park to play with a big red ball", "He",
         "One day, a little cat saw", "Tom was sad. He", "I like to eat", "Where is the bird that sang all day long"]


# ── Helpers ─────────────────────────────────────────────────────────────────────────────────────────────

@pytest.fixture(params=["toy_model", "stories"])
def base(request):
    """Each of the two real checkpoints in turn."""
    return request.getfixturevalue(request.param)


@pytest.fixture()
def tiny(tmp_path, toy_model):
    """A function that saves a tiny random model of any architecture with the toy tokenizer; returns its directory."""
    def build(architecture, config, name="tiny", edit=None, **extra):
        sizes = dict(vocab_size=toy_model[0].config.vocab_size, hidden_size=32, intermediate_size=48,
                     num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
                     initializer_range=0.3, bos_token_id=None, eos_token_id=1, pad_token_id=0)
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


def drawn(n, v, h, dtype, device="cpu", trained=False):
    """Random hidden states, head, targets and two upstream gradients."""
    hidden = torch.randn(n, h, device=device).to(dtype).requires_grad_()
    weight = (torch.randn(v, h, device=device) / 4).to(dtype).requires_grad_(trained)
    return (hidden, weight, torch.randint(v, (n,), device=device), torch.randn(n, device=device),
            torch.randn(n, device=device))


def naive(hidden, weight, targets, temperature):
    """Log-probs and entropy with all the logits at once, in the wider of float32 and the inputs' dtype."""
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
    """An adapter with random weights, made and saved by PEFT on a fresh copy of the base; returns the PEFT model."""
    fresh = AutoModelForCausalLM.from_pretrained(directory_of(model))
    peft = get_peft_model(fresh, LoraConfig(r=3, lora_alpha=7, target_modules=list(targets), task_type="CAUSAL_LM",
                                            **options))
    randomise(p for name, p in peft.named_parameters() if "lora_" in name)
    peft.save_pretrained(directory)
    return peft.eval()


def up_to_eos(row, eos):
    """The row through its first end-of-sequence id."""
    return next((row[: t + 1] for t, token in enumerate(row) if token in eos), row)


def transformers_greedy(model, prompts, max_new_tokens, eos):
    """What transformers' own generate makes of the left-padded batch, each row cut after its EOS."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    out = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=max_new_tokens, eos_token_id=eos,
                         pad_token_id=0)
    return [up_to_eos(row, eos) for row in out[:, width:].tolist()]


def staggering_eos(rows):
    """The two ids that, taken as EOS, make these rows end at the most different times; and the cut rows."""
    pairs = combinations(sorted({token for row in rows for token in row[1:]}), 2)
    best = max(pairs, key=lambda eos: len({len(up_to_eos(row, eos)) for row in rows}))
    cut = [up_to_eos(row, best) for row in rows]
    assert len({len(row) for row in cut}) >= 3, "the rows must end at different times for this test to mean anything"
    return list(best), cut


def refused(match, call, *arguments, **options):
    """The call raises a ModelError of one line that contains `match`."""
    with pytest.raises(ModelError) as caught:
        call(*arguments, **options)
    message = str(caught.value)
    assert match in message and "\n" not in message, message


@contextmanager
def sizes_of(model):
    """The [B, columns] of the ids of every pass through the model inside."""
    sizes = []
    hook = model.base_model.register_forward_pre_hook(lambda _, args: sizes.append(tuple(args[0].shape)))
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


# ── token_logprobs ──────────────────────────────────────────────────────────────────────────────────────

@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("trained", [False, True], ids=["frozen", "trained"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("n", [1, 2, 7, 64])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_token_logprobs_is_log_softmax_and_gather(dtype, n, temperature, trained, device):
    """Values, and the gradients in the hidden states and in a trained head, under a random upstream gradient."""
    hidden, weight, targets, upstream, _ = drawn(n, 203, 24, dtype, device, trained)
    leaves = [hidden, weight] if trained else [hidden]
    ours = token_logprobs(hidden, weight, targets, temperature)
    theirs, _ = naive(hidden, weight, targets, temperature)
    assert ours.dtype == torch.float32 and relative(ours, theirs) < RELATIVE[dtype]
    for a, b in zip(torch.autograd.grad((ours * upstream).sum(), leaves),
                    torch.autograd.grad((theirs * upstream).sum(), leaves), strict=True):
        assert a.dtype == dtype and relative(a, b) < RELATIVE[dtype]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("trained", [False, True], ids=["frozen", "trained"])
@pytest.mark.parametrize("parts", [(0, 1), (1, 1)], ids=["entropy", "both"])
@pytest.mark.parametrize("n, temperature", [(1, 0.6), (7, 1.0), (64, 0.6)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_entropy_and_its_gradient(dtype, n, temperature, parts, trained, device):
    """−Σ p log p and a loss of the entropy, alone and with the log-probs, as autograd has them."""
    hidden, weight, targets, upstream, upstream_entropy = drawn(n, 203, 24, dtype, device, trained)
    leaves = [hidden, weight] if trained else [hidden]
    ours = token_logprobs(hidden, weight, targets, temperature, with_entropy=True)
    theirs = naive(hidden, weight, targets, temperature)
    grads = [torch.autograd.grad((parts[0] * logp * upstream + parts[1] * entropy * upstream_entropy).sum(), leaves)
             for logp, entropy in (ours, theirs)]
    assert relative(ours[0], theirs[0]) < RELATIVE[dtype] and relative(ours[1], theirs[1]) < RELATIVE[dtype]
    for a, b in zip(*grads, strict=True):
        assert relative(a, b) < RELATIVE[dtype]


def test_hidden_gradient_keeps_float64():
    """The gradient in float64 hidden states is good to float64, though the log-probs come out in float32."""
    hidden, weight, targets, upstream, _ = drawn(7, 203, 24, torch.float64)
    ours, (theirs, _) = token_logprobs(hidden, weight, targets, 0.6), naive(hidden, weight, targets, 0.6)
    assert relative(*(torch.autograd.grad((x * upstream).sum(), hidden)[0] for x in (ours, theirs))) < 1e-13


@pytest.mark.parametrize("trained", [False, True], ids=["frozen", "trained"])
def test_gradcheck(trained):
    """Finite differences agree with backward; the step is large because the outputs are float32."""
    hidden, weight, targets, _, _ = drawn(3, 11, 5, torch.float64, trained=trained)
    torch.autograd.gradcheck(lambda h, w: token_logprobs(h, w, targets, 0.6, with_entropy=True), (hidden, weight),
                             eps=1e-2, atol=2e-3, rtol=2e-3)


def test_entropy_of_a_flat_and_of_a_certain_distribution():
    """log V where all logits are equal, 0 where one token has all the probability."""
    weight = torch.tensor([[900.0], [0], [0], [0], [0]])
    logp, entropy = token_logprobs(torch.tensor([[0.0], [1.0]]), weight, torch.tensor([3, 0]), with_entropy=True)
    torch.testing.assert_close(entropy, torch.tensor([5.0, 1.0]).log())
    torch.testing.assert_close(logp, torch.tensor([0.2, 1.0]).log())


def test_no_rows_give_no_logprobs():
    """An empty batch is not an error."""
    logp, entropy = token_logprobs(torch.zeros(0, 4), torch.zeros(9, 4), torch.zeros(0, dtype=torch.long),
                                   with_entropy=True)
    assert logp.shape == entropy.shape == (0,)


@pytest.mark.parametrize("n, share", [(512, 4), (7, 1)])
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_the_logits_never_exist_at_once(dtype, n, share):
    """No operator of forward or backward returns N·V numbers, nor a gradient the size of the frozen head."""
    v, h = 4096, 32
    hidden, weight, targets, upstream, upstream_entropy = drawn(n, v, h, dtype)

    def numel(function):
        with Outputs() as seen:
            logp, entropy = function(hidden, weight, targets, 1.0)
            (logp * upstream + entropy * upstream_entropy).sum().backward()
        head = weight.untyped_storage().data_ptr()
        return [t.numel() for t in seen.tensors if t.untyped_storage().data_ptr() != head]

    ours = numel(lambda *a: token_logprobs(*a, with_entropy=True))
    assert max(numel(naive)) >= n * v, "the recorder must see the tensor where it is made"
    assert max(ours) < n * v and max(ours) <= n * v / share
    assert v * h not in ours and weight.grad is None and hidden.grad is not None


# ── token_kl ────────────────────────────────────────────────────────────────────────────────────────────

@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("n", [1, 7, 64])
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_token_kl_is_torchs_kl_div(dtype, n, temperature, device):
    """Σ_v π (log π − log π_ref) at every position: never negative, exactly zero for the same hidden states."""
    (hidden, weight, *_), (ref, *_) = drawn(n, 203, 24, dtype, device), drawn(n, 203, 24, dtype, device)
    logp, logq = (F.log_softmax(h.float() @ weight.float().T / temperature, -1) for h in (hidden, ref))
    ours = token_kl(hidden, ref, weight, temperature)
    assert relative(ours, F.kl_div(logq, logp, log_target=True, reduction="none").sum(-1)) < RELATIVE[dtype]
    assert (ours > 0).all() and ours.dtype == torch.float32
    assert torch.equal(token_kl(hidden, hidden, weight, temperature), torch.zeros(n, device=device))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("n, temperature", [(1, 0.6), (7, 1.0), (64, 0.6)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_token_kl_has_its_gradient_in_the_policy_alone(dtype, n, temperature, device):
    """As autograd has it for torch's kl_div; the reference and the head are constants."""
    (hidden, weight, _, upstream, _), (ref, *_) = drawn(n, 203, 24, dtype, device, True), drawn(n, 203, 24, dtype, device)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    logp, logq = (F.log_softmax(h.to(wide) @ weight.to(wide).T / temperature, -1) for h in (hidden, ref))
    theirs = F.kl_div(logq, logp, log_target=True, reduction="none").sum(-1)
    wanted, = torch.autograd.grad((theirs * upstream).sum(), hidden)
    (token_kl(hidden, ref, weight, temperature) * upstream).sum().backward()
    assert hidden.grad.dtype == dtype and relative(hidden.grad, wanted) < RELATIVE[dtype]
    assert ref.grad is None and weight.grad is None


def test_token_kl_of_near_policies_is_not_negative():
    """For a policy one small step from its reference the KL is tiny and, to rounding, not negative."""
    hidden, weight, *_ = drawn(64, 203, 24, torch.float32)
    near = hidden + 1e-2 * torch.randn_like(hidden)
    logp, logq = (F.log_softmax(h.double() @ weight.double().T, -1) for h in (hidden, near))
    theirs = F.kl_div(logq, logp, log_target=True, reduction="none").sum(-1)
    assert theirs.max() < 1e-2
    torch.testing.assert_close(token_kl(hidden, near, weight), theirs.float(), atol=1e-6, rtol=1e-3)
    assert token_kl(hidden, near, weight).min() > -1e-6


def test_token_kl_never_has_the_logits_at_once():
    """No operator returns more than a quarter of N·V numbers."""
    hidden, weight, *_ = drawn(512, 4096, 32, torch.float32)
    with Outputs() as seen:
        token_kl(hidden, hidden.detach() + 1, weight).sum().backward()
    assert hidden.grad is not None and max(t.numel() for t in seen.tensors) <= 512 * 4096 / 4


# ── LoRA ────────────────────────────────────────────────────────────────────────────────────────────────

def test_peft_reads_our_adapter(base, tmp_path):
    """An adapter of ours, through disk, gives the same logits in PEFT as here."""
    model, tokenizer = base
    ids = tokenizer(TEXTS[2]).input_ids
    randomise(add_lora(model, "policy", r=5, alpha=12))
    save_lora(model, "policy", tmp_path / "adapter")
    peft = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(directory_of(model)), tmp_path / "adapter")
    bare = logits_of(model, ids)
    with use_lora(model, "policy"):
        ours = logits_of(model, ids)
    torch.testing.assert_close(ours, logits_of(peft, ids), atol=1e-4, rtol=1e-5)
    assert (ours - bare).abs().max() > 0.1


@pytest.mark.parametrize("targets", [("q_proj", "v_proj"), ("q_proj", "v_proj", "gate_proj")], ids=len)
def test_we_read_an_adapter_of_peft(base, tmp_path, targets):
    """An adapter that PEFT made and saved gives the same logits here, and comes back from save_lora unchanged."""
    model, tokenizer = base
    ids = tokenizer(TEXTS[2]).input_ids
    theirs = logits_of(peft_adapter(model, tmp_path / "peft", targets), ids)
    bare = logits_of(model, ids)
    load_lora(model, "policy", tmp_path / "peft")
    with use_lora(model, "policy"):
        torch.testing.assert_close(logits_of(model, ids), theirs, atol=1e-4, rtol=1e-5)
    assert torch.equal(logits_of(model, ids), bare) and (theirs - bare).abs().max() > 0.1
    save_lora(model, "policy", tmp_path / "again")
    again = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(directory_of(model)), tmp_path / "again")
    assert torch.equal(logits_of(again, ids), theirs)


def test_adapter_dropout_is_off_outside_training(toy_model, tmp_path):
    """A model that is not in training mode ignores the dropout of an adapter loaded into it, as PEFT does."""
    model, tokenizer = toy_model
    ids = tokenizer(TEXTS[2]).input_ids
    theirs = logits_of(peft_adapter(model, tmp_path / "peft", lora_dropout=0.5), ids)
    load_lora(model, "policy", tmp_path / "peft")
    with use_lora(model, "policy"):
        torch.testing.assert_close(logits_of(model, ids), theirs, atol=1e-4, rtol=1e-5)


def test_adapter_dropout_is_on_in_training(toy_model):
    """In training mode the dropout acts on the adapter's input and on nothing else."""
    model, tokenizer = toy_model
    ids = tokenizer(TEXTS[2]).input_ids
    bare = logits_of(model, ids)
    randomise(add_lora(model, "policy", dropout=0.5))
    model.train()
    with use_lora(model, "policy"):
        assert not torch.equal(logits_of(model, ids), logits_of(model, ids))
    assert torch.equal(logits_of(model, ids), bare)


def test_a_fresh_adapter_changes_nothing_until_it_is_trained(base):
    """B = 0 gives the bare base, bit for bit; B ≠ 0 does not."""
    model, tokenizer = base
    ids = tokenizer(TEXTS[2]).input_ids
    bare = logits_of(model, ids)
    parameters = add_lora(model, "policy")
    with use_lora(model, "policy"):
        assert torch.equal(logits_of(model, ids), bare)
        randomise(parameters)
        assert not torch.allclose(logits_of(model, ids), bare, atol=0.1)
    assert torch.equal(logits_of(model, ids), bare)


def test_two_adapters_do_not_mix(toy_model, tmp_path):
    """Each of two adapters on one base gives what it gives alone; None is the base; the block before is restored."""
    model, tokenizer = toy_model
    ids = tokenizer(TEXTS[2]).input_ids
    alone = {None: logits_of(model, ids)}
    for name, targets in (("policy", ("q_proj", "v_proj")), ("reward", ("v_proj", "gate_proj"))):
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
        assert torch.equal(logits_of(model, ids), alone["policy"])
    assert torch.equal(logits_of(model, ids), alone[None])


def test_use_lora_restores_after_an_exception(toy_model):
    """The adapter that was active before an error is active after it."""
    model, tokenizer = toy_model
    ids = tokenizer(TEXTS[2]).input_ids
    randomise(add_lora(model, "policy")), randomise(add_lora(model, "reward"))
    with use_lora(model, "policy"):
        before = logits_of(model, ids)
        with pytest.raises(ZeroDivisionError), use_lora(model, "reward"):
            assert not torch.equal(logits_of(model, ids), before)
            1 / 0
        assert torch.equal(logits_of(model, ids), before)


def test_only_the_active_adapter_learns(toy_model):
    """Backward reaches A and B of the active adapter, nothing of the other one and nothing of the base."""
    model, tokenizer = toy_model
    active, idle = add_lora(model, "policy"), add_lora(model, "reward")
    randomise([*active, *idle])
    with use_lora(model, "policy"):
        model(torch.tensor([tokenizer(TEXTS[2]).input_ids])).logits.logsumexp(-1).sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in active)
    with_gradient = {id(p) for p in model.parameters() if p.grad is not None}
    assert with_gradient == {id(p) for p in active} == {id(p) for p in lora_parameters(model, "policy")}
    assert {id(p) for p in model.parameters() if p.requires_grad} == {id(p) for p in [*active, *idle]}


def test_a_bfloat16_base_keeps_its_adapter_in_float32(toy_model):
    """The update is made in float32 and rounded once: 99 % of it is the rounded float64 update, bit for bit."""
    model, tokenizer = load_model(directory_of(toy_model[0]), dtype="bfloat16", device="cpu")
    randomise(parameters := add_lora(model, "policy"))
    assert {p.dtype for p in parameters} == {torch.float32}
    layer = model.model.layers[0].self_attn.q_proj
    x = torch.randn(5, model.config.hidden_size, dtype=torch.bfloat16)
    A, B = layer.lora_A["policy"], layer.lora_B["policy"]
    with use_lora(model, "policy"), torch.no_grad():
        theirs = layer.base_layer(x) + (2 * (x.double() @ A.double().T @ B.double().T)).bfloat16()
        assert layer(x).dtype == torch.bfloat16 and (layer(x) == theirs).float().mean() > 0.99


@pytest.mark.parametrize("architecture, config, extra", [
    (MistralForCausalLM, MistralConfig, {"sliding_window": 6}), (MistralForCausalLM, MistralConfig, {}),
    (Qwen2ForCausalLM, Qwen2Config, {})], ids=["mistral-sliding", "mistral", "qwen2"])
def test_other_families_load_sample_and_take_adapters(tiny, tmp_path, architecture, config, extra):  # Table 5
    """load_model, generate (against transformers) and LoRA (against PEFT) on Mistral and Qwen2."""
    model, tokenizer = load_model(tiny(architecture, config, **extra), device="cpu")
    assert type(model) is architecture and not any(p.requires_grad for p in model.parameters())
    ids, prompts = tokenizer(TEXTS[2]).input_ids, prompts_of(tokenizer)
    theirs = logits_of(peft_adapter(model, tmp_path / "peft"), ids)
    load_lora(model, "policy", tmp_path / "peft")
    eos, _ = staggering_eos(generate(model, prompts, 16, temperature=0))
    with use_lora(model, "policy"):
        torch.testing.assert_close(logits_of(model, ids), theirs, atol=1e-4, rtol=1e-4)
        assert generate(model, prompts, 16, 0, eos) == transformers_greedy(model, prompts, 16, eos)
        responses, scores = generate(model, prompts, 16, 0.6, eos, return_logprobs=True)
        torch.testing.assert_close(torch.tensor(sum(scores, [])), rescored(model, prompts, responses, 0.6),
                                   atol=1e-4, rtol=1e-4)
    assert generate(model, prompts, 16, 0, eos) == transformers_greedy(model, prompts, 16, eos)


# ── load_model, fingerprint, ValueHead ──────────────────────────────────────────────────────────────────

def test_half_precision_becomes_float32_on_a_cpu_unless_asked_for(toy_model, tmp_path):
    """A bfloat16 checkpoint loads as float32 on a CPU, with the same values; dtype= is obeyed."""
    half = AutoModelForCausalLM.from_pretrained(directory_of(toy_model[0]), dtype=torch.bfloat16)
    half.save_pretrained(tmp_path / "half"), toy_model[1].save_pretrained(tmp_path / "half")
    assert head_weight(half).dtype == torch.bfloat16
    model, _ = load_model(tmp_path / "half", device="cpu")
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert torch.equal(head_weight(model), head_weight(half).float())
    for dtype in ("bfloat16", torch.bfloat16):
        assert head_weight(load_model(tmp_path / "half", dtype, "cpu")[0]).dtype == torch.bfloat16


def test_a_fingerprint_names_the_base_and_not_its_precision(toy_model, tmp_path):
    """Equal for float32 and bfloat16 loads and under an adapter, different for other weights or another depth."""
    model, _ = toy_model
    name = fingerprint(model)
    assert fingerprint(load_model(directory_of(model), "bfloat16", "cpu")[0]) == name
    randomise(add_lora(model, "policy"))
    assert fingerprint(model) == name
    model.config.num_hidden_layers += 1
    assert fingerprint(model) != name
    model.config.num_hidden_layers -= 1
    model.get_input_embeddings().weight.data.mul_(1.1)
    assert fingerprint(model) != name


def test_fingerprints_of_the_two_checkpoints_differ(toy_model, stories):
    """toy/base is not stories260K."""
    assert fingerprint(toy_model[0]) != fingerprint(stories[0])


def test_value_head_is_zero_and_then_linear():
    """V = 0 at the start; with weights, w·h + b in float32 for every leading shape and dtype."""
    head = ValueHead(6)
    hidden = torch.randn(2, 3, 6)
    assert torch.equal(head(hidden), torch.zeros(2, 3)) and head(hidden[0, 0]).shape == ()
    randomise(head.parameters(), std=1)
    w, b = head.parameters()
    for h in (hidden, hidden.bfloat16()):
        torch.testing.assert_close(head(h), torch.einsum("btd,d->bt", h.float(), w[0]) + b)


# ── Errors ──────────────────────────────────────────────────────────────────────────────────────────────

def test_a_missing_model_is_named(tmp_path):
    """The path and the flag stand in the message."""
    refused(str(tmp_path / "nowhere"), load_model, tmp_path / "nowhere", device="cpu")
    refused("--model", load_model, str(tmp_path / "nowhere"), device="cpu")


def test_a_pickled_checkpoint_is_not_read(toy_model, tmp_path):
    """A directory that holds pytorch_model.bin alone is refused, though transformers could read it."""
    model, tokenizer = toy_model
    model.config.save_pretrained(tmp_path), tokenizer.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    refused(str(tmp_path), load_model, tmp_path, device="cpu")


@pytest.mark.parametrize("pad_token_id", [0, 3])
def test_soft_capped_logits_are_refused(tiny, pad_token_id):
    """Whatever the padding token, whose embedding is zero; the same model without the cap is loaded."""
    gemma = {"head_dim": 8, "query_pre_attn_scalar": 8, "initializer_range": 1.0, "pad_token_id": pad_token_id}
    capped = tiny(Gemma2ForCausalLM, Gemma2Config, "capped", final_logit_softcapping=5.0, **gemma)
    refused(str(capped), load_model, capped, device="cpu")
    load_model(tiny(Gemma2ForCausalLM, Gemma2Config, "free", final_logit_softcapping=None, **gemma), device="cpu")


def test_a_head_with_a_bias_is_refused(tiny):
    """The same model with a zero bias is loaded."""
    biased = tiny(PhiForCausalLM, PhiConfig, "biased", lambda m: m.lm_head.bias.data.normal_())
    refused(str(biased), load_model, biased, device="cpu")
    load_model(tiny(PhiForCausalLM, PhiConfig, "unbiased"), device="cpu")


@pytest.mark.parametrize("absent", ["adapter_config.json", "adapter_model.safetensors"])
def test_an_adapter_without_its_files_is_refused(toy_model, tmp_path, absent):
    """The directory and the missing file are named."""
    model, _ = toy_model
    add_lora(model, "policy")
    save_lora(model, "policy", tmp_path / "adapter")
    (tmp_path / "adapter" / absent).unlink()
    refused(absent, load_lora, model, "other", tmp_path / "adapter")
    refused(str(tmp_path / "adapter"), load_lora, model, "other", tmp_path / "adapter")


def test_an_adapter_for_another_base_is_refused(toy_model, tiny, tmp_path):
    """By a layer that is absent, by shape, and, where all shapes fit, by the fingerprint; the model stays as it was."""
    model, _ = toy_model
    peft_adapter(model, tmp_path / "toy")
    small, _ = load_model(tiny(MistralForCausalLM, MistralConfig, num_hidden_layers=3), device="cpu")
    shallow, _ = load_model(tiny(Qwen2ForCausalLM, Qwen2Config, "shallow", num_hidden_layers=1), device="cpu")
    refused("q_proj is [32, 32] here and [128, 128] in the adapter", load_lora, small, "policy", tmp_path / "toy")
    peft_adapter(small, tmp_path / "small")
    refused("no layer model.layers.1.self_attn", load_lora, shallow, "policy", tmp_path / "small")
    add_lora(model, "policy")
    save_lora(model, "policy", tmp_path / "ours")
    twin, _ = load_model(directory_of(model), device="cpu")
    twin.get_input_embeddings().weight.data.mul_(1.1)
    refused("another base", load_lora, twin, "policy", tmp_path / "ours")
    assert not any(isinstance(m, LoRALinear) for m in [*small.modules(), *shallow.modules(), *twin.modules()])


@pytest.mark.parametrize("option", ["use_dora", "use_rslora", "lora_bias"])
def test_adapters_of_other_kinds_are_refused(toy_model, tmp_path, option):
    """What PEFT computes in another way is not loaded as if it were plain LoRA; the option is named."""
    peft_adapter(toy_model[0], tmp_path / "adapter", **{option: True})
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())[option] is True
    refused(option, load_lora, toy_model[0], "policy", tmp_path / "adapter")


def test_unknown_names_are_refused(toy_model, tmp_path):
    """A target that the model lacks, an adapter that is not loaded, and a name that is taken."""
    model, _ = toy_model
    refused("W_pack", add_lora, model, "policy", target_modules=("q_proj", "W_pack"))
    refused("gate_proj", add_lora, model, "policy", target_modules=("W_pack",))
    add_lora(model, "policy")
    refused("'policy'", add_lora, model, "policy")
    refused("'reward'", save_lora, model, "reward", tmp_path / "adapter")
    refused("'reward'", use_lora(model, "reward").__enter__)


def test_a_layer_that_is_not_linear_is_refused(tiny):
    """GPT-2's c_attn is a Conv1D, so add_lora finds no linear layer of that name."""
    directory = tiny(GPT2LMHeadModel, GPT2Config, n_embd=32, n_layer=2, n_head=4)
    model, _ = load_model(directory, device="cpu")
    refused("c_attn", add_lora, model, "policy", target_modules=("c_attn",))


def test_prompts_that_cannot_be_answered_are_refused(toy_model):
    """A prompt with no tokens, and one that exceeds the context with its answer; one that just fits is answered."""
    model, _ = toy_model
    limit = model.config.max_position_embeddings
    refused("no tokens", generate, model, [[5], []], 4)
    refused(f"{limit - 2} tokens", generate, model, [[5], [5] * (limit - 2)], 3)
    refused(f"{limit}", generate, model, [[5], [5] * (limit - 2)], 3)
    assert len(generate(model, [[5] * (limit - 2)], 2)[0]) == 2
    assert generate(model, [], 3) == []


# ── Prompts and answers ─────────────────────────────────────────────────────────────────────────────────

def test_a_chat_template_is_used_where_there_is_one(bos_tokenizer):  # Table 5
    """The ids are those of the rendered text, whose BOS the template wrote: exactly one."""
    bos_tokenizer.chat_template = ("{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
                                   "{% if add_generation_prompt %}[assistant] {% endif %}")
    ids = encode_prompt(bos_tokenizer, "Why {so}?")
    assert ids == bos_tokenizer("<bos>[user] Why {so}?\n[assistant] ", add_special_tokens=False).input_ids
    assert ids[0] == bos_tokenizer.bos_token_id and Counter(ids)[bos_tokenizer.bos_token_id] == 1
    assert bos_tokenizer.decode(ids[1:]) == "[user] Why {so}?\n[assistant] "


def test_the_plain_template_stands_after_one_bos(bos_tokenizer):
    """Without a chat template: BOS, the prompt, a blank line and 'Answer:'."""
    ids = encode_prompt(bos_tokenizer, "Why {so}?")
    assert ids[0] == bos_tokenizer.bos_token_id and Counter(ids)[bos_tokenizer.bos_token_id] == 1
    assert bos_tokenizer.decode(ids[1:]) == "Why {so}?\n\nAnswer:\n"
    bos_tokenizer.bos_token = None
    assert encode_prompt(bos_tokenizer, "Why {so}?") == ids[1:]


def test_an_answer_ends_with_eos(bos_tokenizer):
    """The target of teacher forcing is the text and EOS, with no BOS."""
    ids = encode_answer(bos_tokenizer, "Because.")
    assert bos_tokenizer.decode(ids[:-1]) == "Because." and ids[-1] == bos_tokenizer.eos_token_id


def test_every_eos_of_the_model_is_known(toy_model):
    """The tokenizer's first, then the generation config's, each once; a tokenizer without any is refused."""
    model, tokenizer = toy_model
    model.generation_config.eos_token_id = [7, tokenizer.eos_token_id, 9]
    assert eos_ids(tokenizer, model) == [tokenizer.eos_token_id, 7, 9]
    tokenizer.eos_token = None
    assert eos_ids(tokenizer, model) == [7, 1, 9]
    refused("EOS", eos_ids, tokenizer)


# ── The training forward ────────────────────────────────────────────────────────────────────────────────

def rescored(model, prompts, responses, temperature=1.0):
    """Log-probs of all sampled tokens, row after row, by the forward pass of training."""
    ids, prompt_mask, out, mask = pad_batch(prompts, responses, 0)
    with torch.no_grad():
        hidden = response_hidden(model, ids, prompt_mask, out, mask)
        return token_logprobs(hidden[mask.bool()], head_weight(model), out[mask.bool()], temperature)


def test_pad_batch_puts_prompts_right_and_responses_left():
    """Ids and masks, written out."""
    prompts, prompt_mask, responses, mask = pad_batch([[4, 5, 6], [7]], [[8], [9, 10]], pad=3)
    assert prompts.tolist() == [[4, 5, 6], [3, 3, 7]] and prompt_mask.tolist() == [[1, 1, 1], [0, 0, 1]]
    assert responses.tolist() == [[8, 3], [9, 10]] and mask.tolist() == [[1, 0], [1, 1]]


def test_scores_are_those_of_the_unpadded_sequence(base):
    """Each row of a padded batch has the log-softmax of model(input_ids) on prompt and response alone."""
    model, tokenizer = base
    rows = prompts_of(tokenizer)
    prompts, responses = [row[:k] for k, row in zip((3, 1, 9, 1, 2, 5, 4, 6), rows)], rows[::-1]
    scores = rescored(model, prompts, responses)
    alone = []
    for prompt, response in zip(prompts, responses):
        logp = logits_of(model, prompt + response).log_softmax(-1)[len(prompt) - 1 : -1]
        alone.append(logp[range(len(response)), response])
    torch.testing.assert_close(scores, torch.cat(alone), atol=1e-4, rtol=1e-5)


def test_positions_count_from_the_first_token_of_the_prompt(tiny):
    """GPT-2 learns absolute positions, so a padded row scores and samples as it does alone only if they are right."""
    model, tokenizer = load_model(tiny(GPT2LMHeadModel, GPT2Config, n_embd=32, n_layer=2, n_head=4), device="cpu")
    prompts = prompts_of(tokenizer)
    alone = [rescored(model, [prompt], [response]) for prompt, response in zip(prompts, prompts[::-1])]
    torch.testing.assert_close(rescored(model, prompts, prompts[::-1]), torch.cat(alone), atol=1e-4, rtol=1e-5)
    eos, cut = staggering_eos(generate(model, prompts, 16, temperature=0))
    assert generate(model, prompts, 16, 0, eos) == transformers_greedy(model, prompts, 16, eos) == cut


def test_padding_changes_no_score(base):
    """A row scored beside longer prompts and responses has the scores that it has alone."""
    model, tokenizer = base
    prompts = prompts_of(tokenizer)
    together = rescored(model, [prompts[1], prompts[2]], [prompts[3], prompts[2]])
    alone = rescored(model, [prompts[1]], [prompts[3]])
    torch.testing.assert_close(together[: len(alone)], alone, atol=1e-5, rtol=1e-5)


# ── generate ────────────────────────────────────────────────────────────────────────────────────────────

def test_greedy_is_transformers_greedy(base):
    """Token for token on prompts of unequal length whose rows end at different times, EOS kept as the last token."""
    model, tokenizer = base
    prompts = prompts_of(tokenizer)
    long = generate(model, prompts, 24, temperature=0)
    eos, cut = staggering_eos(long)
    with sizes_of(model) as sizes:
        ours = generate(model, prompts, 24, 0, eos, pad_token_id=0)
    assert ours == transformers_greedy(model, prompts, 24, eos) == cut
    assert [b for b, _ in sizes] == sorted((b for b, _ in sizes), reverse=True) and sizes[-1][0] < len(prompts) * 3 / 4, \
        "rows that ended must have left the batch"
    assert {len(row) for row in long} == {24} and all(len(row) == 24 or row[-1] in eos for row in ours)
    assert not any(token in eos for row in ours for token in row[:-1])


def test_a_row_does_not_depend_on_its_batch(base):
    """Greedy rows that end early or late are what each prompt gives alone, in any order of the batch."""
    model, tokenizer = base
    prompts = prompts_of(tokenizer)
    eos, _ = staggering_eos(generate(model, prompts, 24, temperature=0))
    together = generate(model, prompts, 24, 0, eos)
    assert together == [generate(model, [prompt], 24, 0, eos)[0] for prompt in prompts]
    assert together[::-1] == generate(model, prompts[::-1], 24, 0, eos)


def test_eos_is_an_id_or_a_list(toy_model):
    """One id, and a list of which any ends the row."""
    model, tokenizer = toy_model
    prompts = prompts_of(tokenizer)
    eos, cut = staggering_eos(generate(model, prompts, 24, temperature=0))
    each = [generate(model, prompts, 24, 0, end) for end in eos]
    assert [min(pair, key=len) for pair in zip(*each)] == generate(model, prompts, 24, 0, eos) == cut
    assert each[0] == generate(model, prompts, 24, 0, eos[:1]) != each[1]


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_sampled_logprobs_are_those_of_training(base, temperature):
    """What the sampler says of its tokens, under an adapter and with rows that leave early, training says too."""
    model, tokenizer = base
    prompts = prompts_of(tokenizer)
    randomise(add_lora(model, "policy"), std=0.1)
    eos = list(range(0, model.config.vocab_size, 8))
    with use_lora(model, "policy"):
        responses, scores = generate(model, prompts, 20, temperature, eos, generator=torch.Generator().manual_seed(3),
                                     return_logprobs=True)
        again = rescored(model, prompts, responses, temperature)
    assert [len(row) for row in scores] == [len(row) for row in responses] and len({len(r) for r in responses}) > 3
    torch.testing.assert_close(torch.tensor(sum(scores, [])), again, atol=1e-4, rtol=0)
    assert (again - rescored(model, prompts, responses, temperature)).abs().max() > 0.1, "the adapter must matter"


def test_sampled_frequencies_are_the_softmax(tiny):  # Alg. 4 l.11
    """χ² of 20,000 first tokens at temperature 0.7 against softmax(logits / 0.7), which temperature 1 fails."""
    model, tokenizer = load_model(tiny(Qwen2ForCausalLM, Qwen2Config), device="cpu")
    prompt, n = tokenizer("The post").input_ids, 20_000
    generator = torch.Generator().manual_seed(11)
    counts = Counter(row[0] for _ in range(4) for row in generate(model, [prompt] * (n // 4), 1, 0.7,
                                                                  generator=generator))
    seen = torch.tensor([counts[token] for token in range(model.config.vocab_size)], dtype=torch.float64)

    def excess(temperature):
        expected = n * (logits_of(model, prompt)[-1].double() / temperature).softmax(-1)
        common = expected >= 5
        observed, wanted = (torch.cat([x[common], x[~common].sum()[None]]) for x in (seen, expected))
        freedom = len(wanted) - 1
        assert freedom > 10, "the distribution must have a breadth"
        return float((((observed - wanted) ** 2 / wanted).sum() - freedom) / (2 * freedom) ** 0.5)

    assert abs(excess(0.7)) < 5 and excess(1.0) > 50


def test_the_seed_decides_the_samples(toy_model):
    """The same generator state gives the same rows, another gives others."""
    model, tokenizer = toy_model
    prompts = prompts_of(tokenizer)
    a, b, c = (generate(model, prompts, 12, generator=torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
    assert a == b != c and {len(row) for row in a} == {12}


def test_a_row_samples_what_its_uniforms_say(base):
    """Whatever batch a row is in; and the token is the one at which the distribution function passes u."""
    model, tokenizer = base
    prompts, uniforms = prompts_of(tokenizer), torch.rand(8, 10, generator=torch.Generator().manual_seed(5))
    eos = list(range(0, model.config.vocab_size, 5))
    together = generate(model, prompts, 10, 0.8, eos, uniforms=uniforms)
    assert together == [generate(model, [p], 10, 0.8, eos, uniforms=u[None])[0] for p, u in zip(prompts, uniforms)]
    for prompt, row, u in zip(prompts, together, uniforms):
        cdf = (logits_of(model, prompt)[-1].double() / 0.8).softmax(-1).cumsum(0)
        assert row[0] == int((cdf <= u[0]).sum()) or (cdf - u[0]).abs().min() < 1e-6


def test_a_long_prompt_is_read_in_parts(base, monkeypatch):
    """Parts of two columns leave the ids as they are, and no pass is wider."""
    model, tokenizer = base
    prompts = prompts_of(tokenizer)
    whole = generate(model, prompts, 8, 0)
    monkeypatch.setattr("sampling.PREFILL_TOKENS", 2 * len(prompts))
    with sizes_of(model) as sizes:
        assert generate(model, prompts, 8, 0) == whole
    assert max(columns for _, columns in sizes) == 2 and len(sizes) > 8


def test_the_cache_is_allocated_once(toy_model, monkeypatch):
    """Every step writes into the tensors of the first, a column per token and no more."""
    model, tokenizer = toy_model
    prompts, seen, update = prompts_of(tokenizer), set(), StaticCache.update
    monkeypatch.setattr(StaticCache, "update", lambda self, *a: [out := update(self, *a), seen.update(
        (x.data_ptr(), x.shape[2]) for x in self.layers[0])][0])
    generate(model, prompts, 9, 0)
    assert len(seen) == 2 and {columns for _, columns in seen} == {max(map(len, prompts)) + 9}


def test_stats_count_what_was_done(toy_model):
    """Tokens after the first of each row, steps, and all weights once per step (the tied head once)."""
    model, tokenizer = toy_model
    stats = {}
    rows = generate(model, prompts_of(tokenizer), 9, stats=stats)
    assert stats["tokens"] == sum(map(len, rows)) - len(rows) and stats["steps"] == 8
    assert stats["tokens_per_second"] == pytest.approx(stats["tokens"] / stats["seconds"])
    assert stats["bytes_per_step"] == sum(p.nbytes for p in model.parameters())
    assert 1e8 < stats["copy_bandwidth"] < 1e13
    assert stats["bandwidth_share"] * stats["seconds"] * stats["copy_bandwidth"] == \
        pytest.approx(8 * stats["bytes_per_step"])


def test_layers_with_a_state_of_their_own_are_refused(toy_model):
    """A kind of layer whose cache is not keys and values is named, not sampled wrongly."""
    model, _ = toy_model
    model.config.layer_types = ["full_attention", "linear_attention", "full_attention"]
    refused("linear_attention", generate, model, [[5, 6]], 3)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA: the captured step cannot be tested")
@pytest.mark.parametrize("temperature", [0, 0.8])
def test_the_captured_step_is_the_eager_step(toy_model, temperature):
    """CUDA: ids and log-probs with and without the graph, rows ending early, over two widths of the cache."""
    model, tokenizer = toy_model
    model.cuda()
    prompts, uniforms = prompts_of(tokenizer), torch.rand(8, 300, generator=torch.Generator().manual_seed(5))
    eos, _ = staggering_eos(generate(model, prompts, 40, temperature=0))
    for end in (eos, []):
        (ids, scores), (eager, eager_scores) = (
            generate(model, prompts, 300, temperature, end, return_logprobs=True, uniforms=uniforms, cuda_graph=graph)
            for graph in (True, False))
        assert ids == eager
        torch.testing.assert_close(torch.tensor(sum(scores, [])), torch.tensor(sum(eager_scores, [])), atol=1e-4, rtol=0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA: waits of the host cannot be tested")
def test_the_host_waits_only_every_16_tokens(toy_model):
    """CUDA: the synchronisations that PyTorch reports do not grow with the tokens of a row that never ends."""
    model, tokenizer = toy_model
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


@pytest.mark.parametrize("window_layers", [False, True], ids=["full", "mixed"])
def test_mixed_layers_sample_as_in_transformers(tiny, window_layers):
    """Qwen2 with a sliding window in one of its two layers."""
    extra = dict(use_sliding_window=window_layers, sliding_window=5, max_window_layers=1)
    model, tokenizer = load_model(tiny(Qwen2ForCausalLM, Qwen2Config, **extra), device="cpu")
    assert (len(set(model.config.layer_types)) == 2) == window_layers
    prompts = prompts_of(tokenizer)
    eos, cut = staggering_eos(generate(model, prompts, 16, temperature=0))
    assert generate(model, prompts, 16, 0, eos) == transformers_greedy(model, prompts, 16, eos) == cut


# ── Recomputed activations ──────────────────────────────────────────────────────────────────────────────

def test_recomputed_activations_give_the_same_gradients(base):
    """Bit for bit, though backward runs after the adapter's block has been left and another adapter is loaded."""
    model, tokenizer = base
    prompts = prompts_of(tokenizer)
    policy, other = add_lora(model, "policy", dropout=0.2), add_lora(model, "reward")
    randomise([*policy, *other], std=0.05)
    model.train()

    def gradients():
        torch.manual_seed(7)
        with use_lora(model, "policy"):
            hidden = response_hidden(model, *pad_batch(prompts, prompts[::-1], 0))
        hidden.square().sum().backward()
        made = [p.grad.clone() for p in policy]
        model.zero_grad()
        return made

    runs, plain = [], gradients()
    checkpoint_activations(model), checkpoint_activations(model)
    block = decoder_blocks(model)[0].self_attn
    block.register_forward_hook(lambda *_: runs.append(1))
    assert all(torch.equal(a, b) and a.abs().sum() > 0 for a, b in zip(plain, gradients(), strict=True))
    assert len(runs) == 2, "once forward, once in backward, however often it is asked for"
    assert all(p.grad is None for p in other)
    generate(model.eval(), prompts, 3)


# ── Checkpoints ─────────────────────────────────────────────────────────────────────────────────────────

def no_space(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


def bits(tensor):
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).tolist()


def contents(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_a_checkpoint_comes_back_bit_for_bit(tmp_path):
    """Every dtype and layout, NaN and −0 included, and every number of the state; a second save replaces the first."""
    odd = torch.tensor([float("nan"), -0.0, float("inf"), 1e-45, 1 / 3])
    shared = torch.randn(4, 6)
    tensors = {"odd": odd, "half": torch.randn(3, 5).bfloat16(), "fp16": torch.randn(3).half(),
               "step": torch.tensor(7.0), "double": torch.randn(2).double(), "rng": torch.get_rng_state(),
               "flag": torch.tensor([True, False]), "count": torch.tensor(2**62), "turned": shared.T,
               "view": shared[1], "none": torch.zeros(0, 3), "trained": torch.nn.Parameter(torch.randn(2))}
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


@pytest.mark.parametrize("missing", ["tensors.safetensors", "state.json"])
def test_a_checkpoint_with_a_missing_file_is_refused(tmp_path, missing):
    """The directory and the file are named."""
    save_checkpoint(tmp_path / "checkpoint", {"x": torch.ones(2)}, {})
    (tmp_path / "checkpoint" / missing).unlink()
    refused(missing, load_checkpoint, tmp_path / "checkpoint")
    refused(str(tmp_path / "checkpoint"), load_checkpoint, tmp_path / "checkpoint")


@pytest.mark.parametrize("name", ["tensors.safetensors", "state.json"])
@pytest.mark.parametrize("keep", [0, 5, 40, -1])
def test_a_truncated_checkpoint_is_refused(tmp_path, name, keep):
    """Cut anywhere, in the header or in the numbers: the file is named."""
    save_checkpoint(tmp_path / "checkpoint", {"x": torch.ones(2000)}, {"iteration": 1, "rng": list(range(50))})
    file = tmp_path / "checkpoint" / name
    file.write_bytes(file.read_bytes()[:keep])
    refused(name, load_checkpoint, tmp_path / "checkpoint")


def test_a_disk_that_fills_while_tensors_are_written_leaves_no_half(tmp_path, monkeypatch):
    """ENOSPC in the middle of save_file: no directory under the new name, and the one before as it was."""
    save_checkpoint(tmp_path / "checkpoint-1", {"x": torch.ones(2)}, {"iteration": 1})

    def half(tensors, path, **_):
        path.write_bytes(b"half")
        no_space()

    monkeypatch.setattr("checkpoints.save_file", half)
    with pytest.raises(OSError, match="No space"):
        save_checkpoint(tmp_path / "checkpoint-2", {"x": torch.zeros(2)}, {"iteration": 2})
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-1"]
    assert load_checkpoint(tmp_path / "checkpoint-1")[1] == {"iteration": 1}


def test_a_full_disk_leaves_the_former_checkpoint(tmp_path, monkeypatch):
    """ENOSPC while saving: the directory holds what it held, and nothing lies beside it."""
    save_checkpoint(tmp_path / "checkpoint", {"x": torch.ones(2)}, {"iteration": 1})
    before = contents(tmp_path / "checkpoint")
    with monkeypatch.context() as patched, pytest.raises(OSError, match="No space"):
        patched.setattr(os, "fsync", no_space)
        save_checkpoint(tmp_path / "checkpoint", {"x": torch.zeros(2)}, {"iteration": 2})
    assert contents(tmp_path / "checkpoint") == before and [p.name for p in tmp_path.iterdir()] == ["checkpoint"]
    save_checkpoint(tmp_path / "checkpoint", {"x": torch.zeros(2)}, {"iteration": 2})
    assert load_checkpoint(tmp_path / "checkpoint")[1] == {"iteration": 2}


def test_a_full_disk_leaves_the_former_adapter(toy_model, tmp_path, monkeypatch):
    """The same for an adapter that is saved over another; and a first save leaves nothing at all."""
    model, _ = toy_model
    parameters = add_lora(model, "policy")
    save_lora(model, "policy", tmp_path / "adapter")
    before = contents(tmp_path / "adapter")
    randomise(parameters)
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", no_space)
        for name in ("adapter", "first"):
            with pytest.raises(OSError, match="No space"):
                save_lora(model, "policy", tmp_path / name)
    assert contents(tmp_path / "adapter") == before and [p.name for p in tmp_path.iterdir()] == ["adapter"]
    save_lora(model, "policy", tmp_path / "adapter")
    assert contents(tmp_path / "adapter") != before


def test_a_failed_rename_leaves_the_former_checkpoint(tmp_path, monkeypatch):
    """Where the last step of a save fails, the former checkpoint still stands under its name."""
    save_checkpoint(tmp_path / "checkpoint", {"x": torch.ones(2)}, {"iteration": 1})
    rename = Path.rename
    monkeypatch.setattr(Path, "rename", lambda path, to: no_space() if ".new" in path.name else rename(path, to))
    with pytest.raises(OSError, match="No space"):
        save_checkpoint(tmp_path / "checkpoint", {"x": torch.zeros(2)}, {"iteration": 2})
    assert load_checkpoint(tmp_path / "checkpoint")[1] == {"iteration": 1}


def test_leftovers_of_a_killed_save_are_no_obstacle(tmp_path):
    """A process with the number of one killed in mid-save (the first process of any container) saves as usual."""
    save_checkpoint(tmp_path / "checkpoint", {"x": torch.ones(2)}, {"iteration": 1})
    for kind in ("new", "old"):
        shutil.copytree(tmp_path / "checkpoint", tmp_path / f".checkpoint.{kind}-{os.getpid()}")
    save_checkpoint(tmp_path / "checkpoint", {"x": torch.zeros(2)}, {"iteration": 2})
    assert load_checkpoint(tmp_path / "checkpoint")[1] == {"iteration": 2}
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]
