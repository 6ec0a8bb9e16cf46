"""A real instruct model, SmolLM2-135M-Instruct: phase 3 on two ranks of torchrun, its template,
and a step of notebook 3. Restart, adapters and phases 1 and 2 are tested with smaller models.

Skipped, visibly, unless the directory of its checkpoint is in the variable SMOLLM2.
"""

import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file
from experiments import baselines
from helpers import ROOT, read_jsonl
from model import (add_lora, encode_answer, encode_prompt, load_model,
                   response_hidden, use_lora)
from policy import nl_gradient_loss
from sampling import head_weight, pad_batch, token_logprobs

BASE = os.environ.get("SMOLLM2", "")
pytestmark = pytest.mark.skipif(not os.path.isdir(BASE), reason="SMOLLM2 names no directory of "
                                "SmolLM2-135M-Instruct: a real instruct model is not tested")
SHORT = ["--task", "notebooks.prose:TASK", "--model", BASE, "--batch_size", 2,
         "--minibatch_size", 2, "--max_new_tokens", 8, "--eval_rows", 1,
         "--iterations", 1, "--ppo_epochs", 1]


@pytest.fixture(scope="module")
def smollm2():
    return load_model(BASE, device="cpu")


def test_two_ranks_are_one_rank(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    flags = [*map(str, ["text2grad", "--critic", "annotator", *SHORT]), "--output_dir"]
    baselines.main([*flags, str(tmp_path / "1")])
    subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone",
                    "--nproc_per_node", "2", "experiments/baselines.py", *flags,
                    str(tmp_path / "2")], cwd=ROOT, check=True, timeout=900)
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
