"""Adapters, tokenizers, templates and RoPE types of other projects: each is read as its author
meant it, or refused in one line. The tests compare with PEFT and transformers."""

import copy
import json
import shutil
from functools import cache

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import (Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM,
                          Phi3Config, Phi3ForCausalLM)

import sampling
from data import InputError
from helpers import ROOT, randomise
from model import (LoRALinear, add_lora, encode_prompt, load_lora, load_model, response_hidden,
                   save_lora, use_lora)
from sampling import context_length, generate, head_weight, pad_batch, token_logprobs

IDS = [5, 9, 77, 300, 12, 8, 99, 640]
SIZES = dict(vocab_size=960, hidden_size=32, intermediate_size=48, num_hidden_layers=3,
             num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
             initializer_range=0.3, bos_token_id=None, eos_token_id=1, pad_token_id=0)


def save_base(folder, architecture=LlamaForCausalLM, config=LlamaConfig, **extra):
    """Save a tiny random model with the toy tokenizer; return its directory."""
    torch.manual_seed(0)
    architecture(config(**SIZES | extra)).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(ROOT / "toy" / "base" / name, folder)
    return folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """The directory of a tiny random Llama. It has biases, so that option `bias` matters."""
    return save_base(tmp_path_factory.mktemp("llama"), attention_bias=True)


@cache
def load_once(folder):
    return load_model(folder, device="cpu")[0]


def new_model(folder):
    """A new copy of the model in a directory."""
    return copy.deepcopy(load_once(folder))


def refusal(call, *arguments, **options) -> str:
    """The message of the InputError that the call raises, which has one line."""
    with pytest.raises(InputError) as caught:
        call(*arguments, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@torch.no_grad()
def logits_of(model):
    return model(torch.tensor([IDS])).logits[0]


# ── Adapters

PLAIN = dict(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


def peft_adapter(base, folder, **options):
    """Save an adapter of PEFT with these options and random weights; return PEFT's logits."""
    model = get_peft_model(new_model(base), LoraConfig(**PLAIN | options))
    randomise((p for name, p in model.named_parameters()
               if p.requires_grad or "lora_" in name), 0.2)
    model.save_pretrained(folder)
    return logits_of(model.eval())


def edit_config(folder, removed="", file="adapter_config.json", **options):
    """Change the options in a file of a directory, and remove one."""
    config = json.loads((folder / file).read_text())
    config.pop(removed, None)
    (folder / file).write_text(json.dumps(config | options))


def our_logits(base, folder):
    """The logits with the adapter in our implementation, and after we have saved it again."""
    model = new_model(base)
    load_lora(model, "policy", folder)
    save_lora(model, "policy", folder / "again")
    again = PeftModel.from_pretrained(new_model(base), folder / "again")
    with use_lora(model, "policy"):
        ours = logits_of(model)
    torch.testing.assert_close(logits_of(again), ours, atol=1e-4, rtol=1e-5)
    return ours


def refused_adapter(base, folder) -> str:
    """The refusal of an adapter, which leaves the model unchanged."""
    model = new_model(base)
    message = refusal(load_lora, model, "policy", folder)
    assert not any(isinstance(module, LoRALinear) for module in model.modules())
    return message


@pytest.mark.parametrize("options", [
    {}, {"r": 7, "lora_alpha": 3}, {"lora_dropout": 0.3}, {"task_type": None},
    {"target_modules": None}, {"target_modules": "all-linear"},
    {"target_modules": ["layers.0.mlp.up_proj", "model.layers.1.self_attn.q_proj"]},
    {"target_modules": r".*\.[01]\.(self_attn|mlp)\.(k_proj|up_proj)"},
    {"exclude_modules": ["layers.0.self_attn.q_proj"]},
    {"layers_to_transform": [0, 2]}, {"layers_to_transform": 1, "layers_pattern": ["layers"]},
    {"init_lora_weights": False}, {"init_lora_weights": "gaussian"}], ids=str)
def test_a_plain_adapter_of_peft_is_computed(llama, tmp_path, options):
    """An option of a later PEFT, too, if it is off."""
    theirs = peft_adapter(llama, tmp_path, **options)
    edit_config(tmp_path, revision="main", auto_mapping={"parent_library": "transformers"},
                later_flag=False, later_config=None, later_list=[], later_dict={})
    torch.testing.assert_close(our_logits(llama, tmp_path), theirs, atol=1e-4, rtol=0)


@pytest.mark.parametrize("options", [
    {"use_rslora": True}, {"use_dora": True}, {"init_lora_weights": "pissa_niter_4"},
    {"init_lora_weights": "olora"}, {"alora_invocation_tokens": [77, 300]}, {"bias": "all"},
    {"modules_to_save": ["lm_head"]}, {"rank_pattern": {"q_proj": 2}},
    {"alpha_pattern": {"q_proj": 32}}, {"lora_bias": True},
    {"layer_replication": [[0, 2], [1, 3]]}, {"trainable_token_indices": [5, 9]},
    {"target_parameters": ["self_attn.q_proj.weight"]}, {"init_lora_weights": "a_later_one"},
    {"peft_type": "ADALORA"}, {"peft_type": None}, {"later_option": True},
    {"later_option": {"rank": 4}}, {"later_option": 0.5}], ids=str)
def test_another_adapter_is_refused_by_the_name_of_its_option(llama, tmp_path, options):
    """Where PEFT cannot make such an adapter here, a plain one gets the option in its file."""
    try:
        peft_adapter(llama, tmp_path, **options)
    except Exception:
        peft_adapter(llama, tmp_path)
    edit_config(tmp_path, **options)
    (name, value), = options.items()
    message = refused_adapter(llama, tmp_path)
    assert f"is not plain LoRA, because it sets {name} to {value!r:.60};" in message


def test_a_config_without_a_type_is_refused(llama, tmp_path):
    """MLX writes such files."""
    peft_adapter(llama, tmp_path)
    edit_config(tmp_path, removed="peft_type")
    assert "sets peft_type to None" in refused_adapter(llama, tmp_path)


@pytest.mark.parametrize("value", ["pissa", "pissa_niter_2", "olora"])
def test_an_adapter_that_peft_converted_to_plain_lora_is_read(llama, tmp_path, value):
    """PEFT subtracts the initial adapter, so that the converted one fits the unchanged base."""
    model = get_peft_model(new_model(llama), LoraConfig(**PLAIN, init_lora_weights=value))
    model.peft_config["default"].init_lora_weights = True
    model.save_pretrained(tmp_path / "initial")
    model.peft_config["default"].init_lora_weights = value
    for name, p in model.named_parameters():
        p.data += 0.1 * torch.randn_like(p) * ("lora_" in name)
    theirs = logits_of(model)
    model.save_pretrained(tmp_path / "raw")
    model.save_pretrained(tmp_path / "plain",
                          path_initial_model_for_weight_conversion=str(tmp_path / "initial"))
    torch.testing.assert_close(our_logits(llama, tmp_path / "plain"), theirs, atol=1e-3, rtol=0)
    assert f"init_lora_weights to '{value}'" in refused_adapter(llama, tmp_path / "raw")


MODEL = "base_model.model."
LAYER = MODEL + "model.layers.1.self_attn.q_proj."


@pytest.mark.parametrize("change", [
    {LAYER + "lora_B.weight": None}, {LAYER + "lora_A.weight": None},
    {LAYER + "lora_A.weight": (5, 32)}, {LAYER + "lora_B.weight": (32, 4, 4)},
    {LAYER + "lora_B.bias": (32,)}, {LAYER + "lora_magnitude_vector": (32,)},
    {LAYER + "lora_A.other.weight": (4, 32)}, {LAYER + "base_layer.weight": (32, 32)},
    {LAYER.replace("1", "3") + "lora_A.weight": (4, 32),
     LAYER.replace("1", "3") + "lora_B.weight": (32, 4)},
    {MODEL + "model.embed_tokens.lora_embedding_A": (4, 960)},
    {MODEL + "model.embed_tokens.weight": (960, 32)}, {MODEL + "lm_head.weight": (960, 32)},
    {MODEL + "lm_head.lora_A.weight": (4, 32), MODEL + "lm_head.lora_B.weight": (960, 4)},
    {MODEL + "model.norm.weight": (32,)}], ids=lambda change: next(iter(change))[17:])
def test_a_tensor_that_is_not_half_of_a_fitting_pair_is_refused_by_name(llama, tmp_path,
                                                                        change):
    peft_adapter(llama, tmp_path)
    path = tmp_path / "adapter_model.safetensors"
    tensors = load_file(path)
    for name, shape in change.items():
        tensors.pop(name, None)
        if shape:
            tensors[name] = torch.ones(shape)
    save_file(tensors, path, {"format": "pt"})
    message = refused_adapter(llama, tmp_path)
    assert f"does not fit --model: {next(iter(change))} has the shape " in message


def test_an_adapter_without_tensors_is_refused(llama, tmp_path):
    peft_adapter(llama, tmp_path)
    save_file({}, tmp_path / "adapter_model.safetensors", {"format": "pt"})
    assert "does not fit --model" in refused_adapter(llama, tmp_path)


# ── Tokenizers, templates and code of a model directory

@pytest.mark.parametrize("tokens, vocab_size, size", [
    (["<extra>"], 960, 961), (["<a>", "<b>", "<c>"], 962, 963), ([], 959, 960), ([], 960, None),
    (["<extra>"], 961, None), (["<a>", "<b>"], 1024, None)])
@pytest.mark.parametrize("is_special", [False, True])
def test_each_token_of_the_tokenizer_needs_an_embedding(tmp_path, toy_model, tokens, vocab_size,
                                                        size, is_special):
    save_base(tmp_path, vocab_size=vocab_size)
    tokenizer = toy_model[1]
    tokenizer.add_tokens(tokens, special_tokens=is_special)
    tokenizer.save_pretrained(tmp_path)
    if size:
        message = refusal(load_model, tmp_path, device="cpu")
        assert f"has {size} tokens and the model {vocab_size}; use" in message
    else:
        model, tokenizer = load_model(tmp_path, device="cpu")
        assert len(generate(model, [encode_prompt(tokenizer, "".join(tokens) + "x")], 2)) == 1


def test_a_gap_in_the_ids_does_not_hide_a_token_without_embedding(tmp_path):
    """961 tokens and 1,000 embeddings, but the last token has the id 2,000."""
    path = save_base(tmp_path, vocab_size=1000) / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["model"]["vocab"]["<far>"] = 2000
    path.write_text(json.dumps(tokenizer))
    assert "has 2001 tokens and the model 1000" in refusal(load_model, tmp_path, device="cpu")


def loop(content):
    """A chat template that writes the role of each turn and then `content`."""
    return "{% for m in messages %}[{{ m.role }}]" + content + "{% endfor %}[assistant]"


TURNS = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Is a < b?"},
         {"role": "assistant", "content": "<think>Hm.</think> Yes."},
         {"role": "user", "content": " And then, what follows?\n"}]


@pytest.mark.parametrize("template, lost", [
    *[(template, "system") for template in (
        loop(""), loop("{{ m.content | upper }}"), loop("{{ m.content | replace(' ', '') }}"),
        "{{ messages[-1].content }}",
        loop("{% if m.role == 'user' %}{{ m.content }}{% endif %}"))],
    *[(template, "user") for template in (
        loop("{{ m.content[:9] }}"), loop("{{ m.content | e }}"), "{{ messages[0].content }}")],
    *[(template, None) for template in (
        loop("{{ m.content }}"), loop("{{ m.content | trim }}<|end|>"),
        loop("{{ m.content.split('</think>')[-1] }}"), None)]])
def test_a_template_must_keep_the_texts_of_the_prompt(toy_model, template, lost):
    """The thoughts of earlier answers and white space around a text may be left out."""
    tokenizer = toy_model[1]
    tokenizer.chat_template = template
    if lost:
        message = refusal(encode_prompt, tokenizer, TURNS)
        assert f"it leaves out a {lost} turn; change it, or `policy_prompt`" in message
    else:
        text = tokenizer.decode(encode_prompt(tokenizer, TURNS))
        assert "Is a < b?" in text and "And then, what follows?" in text


@pytest.mark.parametrize("file, entry", [
    ("config.json", {"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig"}}),
    ("config.json", {"model_type": "own", "auto_map": {
        "AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}}),
    ("config.json", {"auto_map": {"AutoModelForCausalLM": "own.OwnModel"}}),
    ("tokenizer_config.json", {"tokenizer_class": "OwnTokenizer",
                               "auto_map": {"AutoTokenizer": ["own.OwnTokenizer", None]}}),
    ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": [None, "own.OwnTokenizer"]}}),
    ("generation_config.json", {"custom_generate": "own"})])
def test_code_of_a_model_directory_never_runs_and_no_question_is_asked(
        tmp_path, monkeypatch, file, entry):
    """The directory is refused, or loads with the code of transformers."""
    folder = save_base(tmp_path / "base")
    edit_config(folder, file=file, **entry)
    (folder / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    questions = []
    monkeypatch.setattr("builtins.input", lambda *text: questions.append(text) or "y")
    try:
        load_model(folder, device="cpu")
    except InputError as error:
        assert "custom code" in str(error) and "\n" not in str(error)
    assert questions == [] and not (tmp_path / "ran").exists()


# ── RoPE whose frequencies depend on the length

FACTORS = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [4.0, 4.4, 4.8, 5.2]}
LONGROPE = {"rope_type": "longrope", **FACTORS}
ORIGINAL = {"original_max_position_embeddings": 40}
PHI3 = dict(architecture=Phi3ForCausalLM, config=Phi3Config)


@pytest.mark.parametrize("limit, options", [
    (40, PHI3 | ORIGINAL | {"rope_scaling": {"type": "longrope", **FACTORS}}),
    (40, PHI3 | ORIGINAL | {"rope_parameters": LONGROPE}),
    (40, {"rope_scaling": LONGROPE | ORIGINAL}),
    (40, {"rope_parameters": LONGROPE | ORIGINAL | {"factor": 4.0}}),
    (40, dict(architecture=Gemma3ForCausalLM, config=Gemma3TextConfig, head_dim=8,
              query_pre_attn_scalar=8, layer_types=["sliding_attention", "full_attention"] * 2,
              num_hidden_layers=4, sliding_window=24, rope_parameters={
                  "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                  "full_attention": LONGROPE | ORIGINAL | {"rope_theta": 1e4}})),
    (64, PHI3 | {"max_position_embeddings": 64, "original_max_position_embeddings": 4096,
                 "rope_scaling": {"type": "longrope", **FACTORS}}),
    (48, {"max_position_embeddings": 48, "rope_scaling": {"type": "dynamic", "factor": 4.0}}),
    (40, {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0, **ORIGINAL}}),
    (128, {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, **ORIGINAL}}),
    (128, {"rope_scaling": {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0,
                            "high_freq_factor": 4.0, **ORIGINAL}}),
    (128, {"rope_scaling": {"type": "linear", "factor": 4.0}}), (128, {})])
def test_what_was_sampled_with_a_cache_is_scored_alike_wherever_a_run_is_accepted(
        tmp_path, monkeypatch, limit, options):
    """The context is filled to its last token; a run of one token more is refused."""
    save_base(tmp_path, **options)
    model, _ = load_model(tmp_path, device="cpu")
    assert context_length(model) == limit
    drawn, draw = [], sampling._draw

    def recorded(logits, uniforms, temperature):
        ids = draw(logits, uniforms, temperature)
        drawn.append(logits.log_softmax(-1).gather(1, ids))
        return ids

    monkeypatch.setattr(sampling, "_draw", recorded)
    prompts = [IDS, IDS[:3]]
    answers = generate(model, prompts, limit - len(IDS))
    batch = pad_batch(prompts, answers)
    with torch.no_grad():
        hidden = response_hidden(model, *batch).flatten(0, 1)
        scores = token_logprobs(hidden, head_weight(model), batch[2].flatten())
        alone = [model(torch.tensor([x + y])).logits[0].log_softmax(-1)[len(x) - 1 : -1]
                 .gather(1, torch.tensor(y)[:, None])[:, 0] for x, y in zip(prompts, answers)]
    torch.testing.assert_close(torch.cat(drawn, 1).flatten(), scores, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(torch.cat(alone), scores, atol=1e-4, rtol=1e-4)
    message = refusal(generate, model, prompts, limit - len(IDS) + 1)
    assert f"exceeds the model's context of {limit} tokens" in message


def test_an_adapter_is_no_base(tmp_path, toy_model):
    add_lora(toy_model[0], "policy", 4, 8)
    save_lora(toy_model[0], "policy", tmp_path / "adapter")
    assert "is an adapter; give its base" in refusal(load_model, tmp_path / "adapter")
