"""model.py and checkpoints, tested against autograd, PEFT and transformers."""

import json
import math
import os
import shutil
from contextlib import suppress
from itertools import combinations
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM
from helpers import IDS, ROOT, flip_bit, logits_of, prompts_of, randomise, refused, save_tiny
from model import (ADAPTER_FILES, LoRALinear, add_lora, encode_answer, encode_prompt, eos_ids,
                   find_model, load_lora, load_model, response_hidden, save_lora,
                   target_layers, use_lora)
from runtime import load_tensors, save_tensors
from sampling import Decoder, generate, head_weight, pad_batch

CONFIG, WEIGHTS = ADAPTER_FILES
FORMAT = {"format": "pt"}


# ── Helpers

@pytest.fixture()
def llama(tmp_path):
    return load_model(save_tiny(tmp_path / "llama"), device="cpu")[0]


def peft_adapter(model, folder, **options):
    """Save an adapter of PEFT with random weights; return PEFT's model, on a new base."""
    fresh = AutoModelForCausalLM.from_pretrained(model.config._name_or_path)
    plain = dict(r=3, lora_alpha=7, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    peft = get_peft_model(fresh, LoraConfig(**plain | options))
    randomise((p for name, p in peft.named_parameters() if "lora_" in name), 0.2)
    peft.save_pretrained(folder)
    return peft.eval()


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


# ── LoRA

def test_we_read_an_adapter_of_peft(base, tmp_path):  # Table 5
    """Logits and gradients equal PEFT's, without its dropout, and PEFT reads our files."""
    model, _ = base
    peft = peft_adapter(model, tmp_path / "peft", lora_dropout=0.5,
                        target_modules=["q_proj", "v_proj", "gate_proj"])
    theirs, bare = logits_of(peft), logits_of(model)
    load_lora(model, "policy", tmp_path / "peft")
    with use_lora(model.train(), "policy"):
        torch.testing.assert_close(logits_of(model), theirs, atol=1e-4, rtol=1e-5)
        model(torch.tensor([IDS])).logits.logsumexp(-1).sum().backward()
    assert torch.equal(logits_of(model), bare) and (theirs - bare).abs().max() > 0.1
    for name, p in peft.named_parameters():
        p.requires_grad_("lora_" in name)
    peft(torch.tensor([IDS])).logits.logsumexp(-1).sum().backward()
    ours = {name.replace(".policy", ".weight"): p.grad for name, p in model.named_parameters()}
    for name, p in peft.named_parameters():
        if p.requires_grad:
            name = name.replace(".default", "").removeprefix("base_model.model.")
            torch.testing.assert_close(ours[name], p.grad, atol=1e-4, rtol=1e-3)
    save_lora(model, "policy", tmp_path / "again")
    config = json.loads((tmp_path / "again" / CONFIG).read_text())
    assert config["base_model_name_or_path"] == os.path.abspath(model.config._name_or_path)
    fresh = AutoModelForCausalLM.from_pretrained(model.config._name_or_path)
    assert torch.equal(logits_of(PeftModel.from_pretrained(fresh, tmp_path / "again")), theirs)


def test_two_adapters_do_not_mix(toy_model):
    """Leaving use_lora restores the former adapter and removes merged weights. Dropout is
    active in training mode alone."""
    model, _ = toy_model
    alone = {None: logits_of(model)}
    for name, targets in (("policy", ("q_proj",)), ("reward", ("v_proj", "gate_proj"))):
        parameters = add_lora(model, name, r=4, dropout=0.5, target_modules=targets)
        with use_lora(model, name):
            assert torch.equal(logits_of(model), alone[None])
            randomise(parameters, 0.2)
            alone[name] = logits_of(model)
    assert not any(torch.allclose(a, b, atol=0.1) for a, b in combinations(alone.values(), 2))
    for outer in ("policy", None):
        with use_lora(model, outer):
            for name in ("reward", None, "policy"):
                with use_lora(model, name, merge=True):
                    layers = [x for x in model.modules() if isinstance(x, LoRALinear)]
                    assert any(x.merged is not None for x in layers) == (name is not None)
                    torch.testing.assert_close(logits_of(model), alone[name], atol=1e-4,
                                               rtol=1e-4)
                    with use_lora(model, "policy"):
                        assert torch.equal(logits_of(model), alone["policy"])
            with suppress(ZeroDivisionError), use_lora(model, "reward", merge=True):
                1 / 0
            assert torch.equal(logits_of(model), alone[outer])


def test_a_bfloat16_base_keeps_its_adapter_in_float32(toy_model, tmp_path):
    """The update is computed in float32, rounded once and not merged. Without a dtype, a
    bfloat16 checkpoint is loaded as float32 on a CPU."""
    model, tokenizer = load_model(toy_model[0].config._name_or_path, "bfloat16", "cpu")
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert head_weight(load_model(tmp_path, device="cpu")[0]).dtype == torch.float32
    randomise(add_lora(model, "policy"), 0.2)
    layer = model.model.layers[0].self_attn.q_proj
    x = torch.randn(5, model.config.hidden_size, dtype=torch.bfloat16)
    A, B = layer.lora_A["policy"], layer.lora_B["policy"]
    with use_lora(model, "policy", merge=True), torch.no_grad():
        update = 2 * (x.double() @ A.double().T @ B.double().T)
        theirs = layer.base_layer(x) + update.bfloat16()
        # Over eight seeds all are equal; of an update in bfloat16 44 to 52 % are.
        assert (layer(x) == theirs).float().mean() > 0.99


def test_recomputed_activations_give_the_same_gradients(base):
    """The gradients are bit-identical, with dropout, and the blocks run once more."""
    plain, tokenizer = base
    again, _ = load_model(plain.config._name_or_path, device="cpu", checkpoint_activations=True)
    gradients, runs = [], []
    for model in (plain, again):
        torch.manual_seed(7)
        policy = add_lora(model, "policy", dropout=0.2)
        randomise(policy, 0.05)
        block_runs = []
        model.model.layers[0].self_attn.register_forward_hook(lambda *_: block_runs.append(1))
        with use_lora(model.train(), "policy"):
            batch = pad_batch(prompts_of(tokenizer), prompts_of(tokenizer))
            response_hidden(model, *batch).square().sum().backward()
        gradients.append([p.grad for p in policy])
        runs.append(len(block_runs))
    assert runs == [1, 2] and all(map(torch.equal, *gradients)) and gradients[0][0].any()


# ── What is refused, by name

@pytest.mark.parametrize("options", [
    {}, {"r": 7, "lora_alpha": 3}, {"target_modules": "all-linear"},
    {"target_modules": ["layers.0.mlp.up_proj", "model.layers.1.self_attn.q_proj"]},
    {"layers_to_transform": 1, "layers_pattern": ["layers"]}, {"init_lora_weights": "gaussian"},
], ids=str)
def test_a_plain_adapter_of_peft_is_computed(llama, tmp_path, capsys, options):
    """An option of a later PEFT, too, if it is off. Another base is a warning."""
    theirs = logits_of(peft_adapter(llama, tmp_path / "a", **options))
    edit(lambda x: x.update(later=False, later_list=[]))(tmp_path / "a" / CONFIG)
    llama.config._name_or_path = "another"
    load_lora(llama, "policy", tmp_path / "a")
    assert "llama, and this base is another" in capsys.readouterr().out
    with use_lora(llama, "policy"):
        torch.testing.assert_close(logits_of(llama), theirs, atol=1e-4, rtol=0)


def option(name, value):
    """A row of REFUSED: the adapter's file gets an option, which must be named."""
    return (CONFIG, edit(lambda x: x.update({name: value})),
            f"is not plain LoRA, because it sets {name} to {value!r:.60};")


def tensor(name, shape):
    """A row of REFUSED: a tensor has another shape, or None for no such tensor."""
    def change(tensors):
        tensors.pop(name, None)
        tensors.update({name: torch.ones(shape)} if shape else {})
    return WEIGHTS, edit(change), f"does not fit --model: {name} has the shape {shape}"


LAYER = "base_model.model.model.layers.1.self_attn.q_proj."
REFUSED = [
    option("use_rslora", True), option("use_dora", True), option("bias", "all"),
    option("init_lora_weights", "pissa_niter_4"), option("init_lora_weights", "olora"),
    option("alora_invocation_tokens", [77, 300]), option("rank_pattern", {"q_proj": 2}),
    option("peft_type", "ADALORA"), option("peft_type", None), option("later_option", 0.5),
    tensor(LAYER + "lora_B.weight", None), tensor(LAYER + "lora_A.weight", (5, 32)),
    tensor(LAYER + "lora_B.bias", (32,)), tensor(LAYER.replace("1", "3") + "lora_A.x", (3, 32)),
    tensor("base_model.model.lm_head.lora_A.weight", (3, 32)),
    (WEIGHTS, edit(dict.clear), "does not fit --model"),
    (WEIGHTS, edit(lambda x: next(iter(x.values())).fill_(torch.nan)), "expected finite numb"),
    (WEIGHTS, Path.unlink, "is missing"), (CONFIG, cut, f"{CONFIG} is missing or damaged"),
    (CONFIG, edit(lambda x: x.pop("r")), f"{CONFIG} is missing or damaged (KeyError('r'))"),
    (CONFIG, edit(lambda x: x.update(lora_alpha=[])), f"{CONFIG} is missing or damaged (Type"),
    *[(CONFIG, edit(lambda x, r=r: x.update(r=r)), f"r is {r!r} and lora_alpha 7")
      for r in (4.0, True, 0, -3)],
    *[(CONFIG, edit(lambda x, alpha=alpha: x.update(lora_alpha=alpha)), f"lora_alpha {alpha!r}")
      for alpha in (math.nan, math.inf, -1e300)]]


@pytest.mark.parametrize("file, damage, message", REFUSED, ids=[row[2] for row in REFUSED])
def test_a_damaged_adapter_or_another_one_is_refused_by_name(llama, tmp_path, file, damage,
                                                             message):
    peft_adapter(llama, tmp_path)
    damage(tmp_path / file)
    assert str(tmp_path) in refused(message, load_lora, llama, "policy", tmp_path)
    assert not any(isinstance(module, LoRALinear) for module in llama.modules())


def test_no_flipped_bit_of_an_adapter_is_loaded(toy_model, tmp_path):
    model, _ = toy_model
    add_lora(model, "policy", r=1)
    save_lora(model, "policy", tmp_path)
    for name, step in ((CONFIG, 5), (WEIGHTS, 199)):
        for bit in range(0, 8 * (tmp_path / name).stat().st_size, step):
            flip_bit(tmp_path / name, bit)
            assert str(tmp_path) in refused("damaged", load_lora, model, "other", tmp_path)
            flip_bit(tmp_path / name, bit)
    assert load_lora(model, "other", tmp_path)


def turn_into_pickle(path):
    """Replace a safetensors file by a pickle, which transformers would read."""
    torch.save(load_file(path), path.with_name("pytorch_model.bin"))
    path.unlink()


def turn_into_indexed_pickle(path):
    """The same, but an index of safetensors files names the pickle."""
    names = dict.fromkeys(load_file(path), "pytorch_model.bin")
    turn_into_pickle(path)
    index = {"metadata": {}, "weight_map": names}
    path.with_name(MODEL + ".index.json").write_text(json.dumps(index))


MODEL = "model.safetensors"
UP = "model.layers.1.mlp.up_proj.weight"
EMBEDDING = "model.embed_tokens.weight"
# The last token gets the first id without an embedding.
FAR = edit(lambda x: x["model"]["vocab"].update({max(
    x["model"]["vocab"], key=x["model"]["vocab"].get): 960}))


def test_a_shipped_base_is_found_from_any_directory(tmp_path, monkeypatch):
    """A hub id stays as it is, and a directory that is here comes first."""
    monkeypatch.chdir(tmp_path)
    assert find_model("meta-llama/Llama-3.1-8B") == "meta-llama/Llama-3.1-8B"
    assert find_model("toy/base") == str(ROOT / "toy" / "base")
    (tmp_path / "toy" / "base").mkdir(parents=True)
    assert find_model("toy/base") == "toy/base"


@pytest.mark.parametrize("file, damage, message", [
    ("", shutil.rmtree, "no such directory; give --model a hub id or a Hugging"),
    (MODEL, cut, "cannot load"),
    (MODEL, turn_into_pickle, "cannot load a model"),
    (MODEL, edit(lambda x: x.pop(UP)),     # transformers would draw random numbers
     f"weights are missing, such as {UP}"),
    (MODEL, turn_into_indexed_pickle, "a file of weights is a pickle"),
    (MODEL, edit(lambda x: x[UP].fill_(torch.nan)), f"{UP} is not finite"),
    *[(MODEL, edit(lambda x, bad=bad: x[EMBEDDING][500, 3].fill_(bad)),  # a row of no prompt
       f"{EMBEDDING} is not finite") for bad in (torch.nan, -torch.inf)],
    ("config.json", edit(lambda x: x.update(model_type="own", auto_map={
        "AutoConfig": "own.OwnConfig"})), "custom code"),
    ("tokenizer.json", FAR, "the tokenizer has 961 tokens and the model 960"),
    (CONFIG, Path.touch, "is an adapter; give its base")])
def test_a_base_that_cannot_be_used_is_refused(tmp_path, file, damage, message):
    base = shutil.copytree(ROOT / "toy" / "base", tmp_path / "base")
    damage(base / file)
    assert str(base) in refused(message, load_model, base, device="cpu")


def test_what_an_architecture_cannot_do_is_refused(tmp_path, toy_model):
    """A soft cap after the head, unknown layers, a cache without attention, too many tokens."""
    gemma = dict(head_dim=8, query_pre_attn_scalar=8, initializer_range=1.0)
    for cap in (5.0, None):
        folder = save_tiny(tmp_path / str(cap), "Gemma2", final_logit_softcapping=cap, **gemma)
        refused("soft cap", load_model, folder) if cap else load_model(folder, device="cpu")
    refused("a bloom model, is unusable", load_model, save_tiny(tmp_path / "bloom", "Bloom"))
    linear = save_tiny(tmp_path / "linear")
    edit(lambda x: x.update(layer_types=2 * ["linear_attention"]))(linear / "config.json")
    refused("a llama model, is unusable", load_model, linear)
    gpt2, _ = load_model(save_tiny(tmp_path / "gpt2", "GPT2"))
    refused("GPT2LMHeadModel has no linear layer named up", target_layers, gpt2, ["up_proj"])
    model, _ = toy_model
    refused("layer named W_pack; choose the targets of an adapter from down_proj, gate_proj",
            add_lora, model, "policy", target_modules=("q_proj", "W_pack"))
    limit = model.config.max_position_embeddings
    refused(f"prompt has {limit - 2} tokens", generate, model, [[5], [5] * (limit - 2)], 3)
    assert len(generate(model, [[5] * (limit - 1)], 1)[0]) == 1


@pytest.mark.parametrize("change", [
    lambda mask, positions: (torch.zeros_like(mask), positions),             # padding is seen
    lambda mask, positions: (mask, 0 * positions),
    lambda mask, positions: (mask, positions + (positions == positions.max()))])   # of one row
def test_a_decoding_step_that_is_not_the_forward_pass_is_found(tmp_path, monkeypatch, change):
    path = save_tiny(tmp_path, "OPT", ffn_dim=48, word_embed_proj_dim=32)
    load_model(path, device="cpu")
    right = Decoder.last_hidden
    monkeypatch.setattr(Decoder, "last_hidden", lambda self, ids, *arguments: right(
        self, ids, *change(*arguments)))
    refused("a opt model, is unusable: ValueError: sampling with", load_model, path)


# ── Prompts and answers

def test_answers_end_with_eos_and_every_eos_is_known(toy_model):
    """The tokenizer's EOS comes first, then those of the config, without duplicates."""
    model, tokenizer = toy_model
    assert tokenizer.decode(encode_answer(tokenizer, "Because.")) == "Because.<eos>"
    model.generation_config.eos_token_id = [7, 1, 9]
    assert eos_ids(tokenizer, model) == [1, 7, 9]
    tokenizer.eos_token = None
    refused("EOS", eos_ids, tokenizer)


def loop(content):
    """A chat template that writes the role of each turn and then `content`."""
    return ("{{ bos_token }}{% for m in messages %}[{{ m.role }}] " + content
            + "\n{% endfor %}[assistant] ")


TURNS = [{"role": role, "content": text} for role, text in
         (("system", "Be brief."), ("user", "A < a?"), ("assistant", "<think>Hm</think>B."),
          ("user", " C?\n"))]


@pytest.mark.parametrize("template, prompt, text", [
    (loop("{{ m.content }}"), "Why {so}?", "<bos>[user] Why {so}?\n[assistant] "),
    (None, "Why {so}?", "<bos>Why {so}?\n\nAnswer:\n"),
    (None, TURNS[:2], "<bos>Be brief.\n\nA < a?\n\nAnswer:\n"),
    (loop("{{ m.content.split('</think>')[-1] | trim }}"), TURNS,     # it may drop the thoughts
     "<bos>[system] Be brief.\n[user] A < a?\n[assistant] B.\n[user] C?\n[assistant] "),
    (loop("{{ m.content | e }}"), TURNS, "it leaves out a user turn; change it, or `policy_p"),
    ("{{ messages[-1].content }}", TURNS, "it leaves out a system turn"),
    ("{{ raise_exception('no system') }}", TURNS, "refuses the turns: no system"),
    ("Today: {{ date_string }} {{ messages[0].content }}", "Hi", "Today: 26 Jul 2024 Hi"),
    ("{{ strftime_now('%Y-%m-%d') }} {{ messages[0].content }}", "Hi", "2024-07-26 Hi")])
# Table 5
def test_a_chat_template_is_used_where_there_is_one(toy_model, template, prompt, text):
    """A template that refuses or loses a turn is named. A date is the same on any day."""
    _, tokenizer = toy_model
    tokenizer.add_special_tokens({"bos_token": "<bos>"})
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", tokenizer.bos_token_id)])
    tokenizer.chat_template = template
    if "turn" in text:
        refused(text, encode_prompt, tokenizer, prompt)
    else:
        assert tokenizer.decode(encode_prompt(tokenizer, prompt)) == text


# ── Tensors on disk and checkpoints

def test_tensors_and_state_come_back_bit_for_bit(tmp_path):
    """Tensors of every dtype and layout, with NaN and −0, and every number of the state. No
    flipped bit of them is loaded; 1e-05 is 1E-05, a flip away."""
    x = torch.tensor([[float("nan"), -0.0], [float("inf"), 1e-45]])
    tensors = {"turned": x.T, "view": x[1], "half": x.bfloat16(), "flag": torch.tensor([True]),
               "trained": torch.nn.Parameter(x.clone())}
    state = {"beta": 0.1 + 0.2, "iteration": 2**53 + 1, "kl": None, "list": [1, [2.5, "χ²"]]}
    files = [tmp_path / str(number) for number in range(9)]
    for path in files:
        save_tensors(path, tensors, state)
    assert len({path.read_bytes() for path in files}) == 1, "equal runs write equal files"
    loaded, again = load_tensors(path)
    assert again == state and set(loaded) == set(tensors)
    for name, x in tensors.items():
        assert loaded[name].dtype == x.dtype
        assert torch.equal(*(y.detach().flatten().view(torch.uint8) for y in (loaded[name], x)))
    save_tensors(path, {"turned": x.T, "half": x.bfloat16()}, {"beta": 1e-5})
    for bit in range(0, 8 * path.stat().st_size, 3):
        flip_bit(path, bit)
        assert str(path) in refused("damaged", load_tensors, path)
        flip_bit(path, bit)
