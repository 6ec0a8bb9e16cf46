"""A real instruct model, SmolLM2-135M-Instruct: the three phases, restart, ranks, template,
files, and a step of notebook 3.

Skipped, visibly, unless the directory of its checkpoint is in the variable SMOLLM2.
"""

import json
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file
from data import InputError, read_rows
from experiments import baselines
from helpers import ROOT, assert_equal_tensors, finish, read_jsonl, run_main, start
from model import (add_lora, encode_answer, encode_prompt, load_lora, load_model,
                   response_hidden, use_lora)
from notebooks import prose
from policy import annotator_critic, nl_gradient_loss, train
from sampling import head_weight, pad_batch, token_logprobs
from settings import Config, parse_flags
from text2grad import start_policy

BASE = os.environ.get("SMOLLM2", "")
pytestmark = pytest.mark.skipif(not os.path.isdir(BASE), reason="SMOLLM2 names no directory of "
                                "SmolLM2-135M-Instruct: a real instruct model is not tested")
SHORT = ["--task", "notebooks.prose:TASK", "--model", BASE, "--batch_size", 2,
         "--minibatch_size", 2, "--max_new_tokens", 8, "--eval_rows", 1,
         "--iterations", 1, "--ppo_epochs", 1]


@pytest.fixture(scope="module")
def smollm2():
    return load_model(BASE, device="cpu")


def test_an_unreadable_reward_model_ends_the_run_after_phase_2(tmp_path):
    """Phases 1 and 2; PEFT finds the base from any directory; phase 3 does not start, because
    R_φ has learnt nothing from two rows."""
    with pytest.raises(InputError, match="100% of the critiques cannot be read.*"
                                         "higher .*--max_critique_tokens"):
        run_main(*SHORT, "--annotated_rows", 2, "--max_critique_tokens", 8,
                 "--output_dir", tmp_path)
    phases = read_rows(tmp_path / "phases.jsonl")
    assert [row["phase"][:7] for row in phases] == ["phase 1", "phase 1", "phase 2"]
    assert all(row["seconds"] > 0 for row in phases)
    config = json.loads((tmp_path / "reward" / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == os.path.abspath(BASE)


@pytest.fixture(scope="module")
def trained(smollm2, tmp_path_factory):
    """Two iterations with the annotator as critic, a checkpoint after each."""
    return learn(smollm2, tmp_path_factory.mktemp("trained"))


def learn(smollm2, out):
    """`train` with the annotator as critic, from whatever lies in `out`."""
    config = parse_flags(Config, argv=[*map(str, SHORT), "--iterations", "2",
                                       "--output_dir", str(out)])
    model, tokenizer = load_model(BASE, device="cpu")
    start_policy(model, config)
    train(model, tokenizer, prose.TASK.rows("train", 8, 0), config, out, annotator_critic)
    return out


def test_a_resumed_run_has_the_same_bits(smollm2, trained, tmp_path):
    for name in ("checkpoint-000001.safetensors", "metrics.jsonl", "samples.jsonl"):
        shutil.copy(trained / name, tmp_path)
    learn(smollm2, tmp_path)
    for name in ("policy/adapter_model.safetensors", "value_head.safetensors"):
        assert_equal_tensors(trained / name, tmp_path / name)
    assert (trained / "samples.jsonl").read_bytes() == (tmp_path / "samples.jsonl").read_bytes()


def test_two_ranks_are_one_rank(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    flags = ["text2grad", "--critic", "annotator", *SHORT]
    both = start(2, tmp_path / "2", script="experiments/baselines.py", settings=flags)
    baselines.main([*map(str, flags), "--output_dir", str(tmp_path / "1")])
    finish(both)
    one, two = (read_jsonl(tmp_path / str(n) / "samples.jsonl") for n in (1, 2))
    assert [row["response"] for row in one] == [row["response"] for row in two]
    ours, whole = (load_file(tmp_path / str(n) / "policy" / "adapter_model.safetensors")
                   for n in (2, 1))
    moved = {name: x for name, x in whole.items() if "lora_B" in name}               # from 0
    assert all((ours[name] - x).norm() < 0.01 * x.norm() for name, x in moved.items())


def test_the_template_is_transformers_own_and_its_texts_come_back(smollm2):
    _, tokenizer = smollm2
    text = 'My sister said "You owe me." — déjà vu 🙂\n\n\tTwice.'
    ids = encode_prompt(tokenizer, text)
    turns = [{"role": "user", "content": text}]
    assert ids == tokenizer.apply_chat_template(turns, add_generation_prompt=True)["input_ids"]
    assert (text in tokenizer.decode(ids)
            and tokenizer.decode(ids).endswith("<|im_start|>assistant\n"))


def test_merged_in_float32_it_is_a_plain_checkpoint_with_the_same_outputs(smollm2, trained,
                                                                          tmp_path):
    """Serving: PEFT merges, transformers loads."""
    from peft import AutoPeftModelForCausalLM
    merged = AutoPeftModelForCausalLM.from_pretrained(
        trained / "policy", dtype="float32").merge_and_unload()
    merged.save_pretrained(tmp_path)
    smollm2[1].save_pretrained(tmp_path)
    model, tokenizer = load_model(tmp_path, device="cpu")
    ours, _ = load_model(BASE, device="cpu")
    load_lora(ours, "policy", trained / "policy")
    ids = torch.tensor([encode_prompt(tokenizer, "Summarise the post in one sentence.")])
    with torch.no_grad(), use_lora(ours, "policy"):
        whole, bare = ours(ids).logits, smollm2[0](ids).logits
        torch.testing.assert_close(model(ids).logits, whole, rtol=1e-3, atol=1e-3)
    assert (whole - bare).abs().max() > 0.01


POST = (
    "My flatmate Dana borrowed my bike last Friday without asking and brought it back with a "
    "bent wheel. She offered to pay half of the repair, 40 euros, but I think that she should "
    "pay all of it. We have lived together for two years and I do not want to lose her as a "
    "friend. Should I insist?")


def test_a_step_has_the_numbers_of_notebook_3(smollm2):
    model, tokenizer = smollm2
    cells = json.loads((ROOT / "notebooks" / "3_why_token_level.ipynb").read_text())["cells"]
    sources = ["".join(cell["source"]) for cell in cells]
    (cell,) = [source for source in sources if source.startswith("pieces =")]
    stored = {"table": lambda *_: ""}
    exec(cell, stored)
    torch.manual_seed(0)
    theta = add_lora(model, "policy", 16, 32)
    prompt = encode_prompt(tokenizer, f"Summarise the post in one sentence.\n\nPost: {POST}")
    y = encode_answer(tokenizer, "Dana's actions not only violated her personal space but also "
                                 "undermined her friendship.")
    batch = pad_batch([prompt], [y], "cpu")

    def logprobs():
        with use_lora(model, "policy"):
            hidden = response_hidden(model, *batch)[0]
        return token_logprobs(hidden, head_weight(model), batch[2][0], 0.6)

    for name in ("first", "second"):
        before = logprobs()
        loss = nl_gradient_loss(before[None], torch.tensor([stored[f"{name}_delta"]]), batch[3])
        gradient = torch.autograd.grad(loss, theta)
        length = torch.cat([part.flatten() for part in gradient]).norm()
        base = [parameter.detach().clone() for parameter in theta]
        with torch.no_grad():
            for parameter, part in zip(theta, gradient):
                parameter -= 0.06 * part / length
            change = logprobs() - before
            for parameter, value in zip(theta, base):
                parameter.copy_(value)
        assert before.exp().tolist() == pytest.approx(stored["pi_before"], abs=2e-3)
        assert change.tolist() == pytest.approx(stored[f"{name}_change"], abs=2e-3)
