"""A base sharded over two ranks (FSDP2, gloo) gives the numbers and files of one process, with
less memory and few all-gathers."""

import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.multiprocessing import start_processes
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM
import model as model_file
import reward_model
import text2grad
from data import write_rows
from helpers import ROOT, free_port, randomise, run_main
from model import (add_lora, checkpoint_activations, fingerprint, gathered, load_lora,
                   load_model, lora_parameters, response_hidden, save_lora, shard, use_lora)
from sampling import generate, head_weight, pad_batch, token_logprobs

PROMPTS = [[5, 9, 33], [7], [101, 12, 13, 14, 15, 16], [200, 201], [3, 4, 5, 6], [44, 45, 46]]
RESPONSES = [[8, 8, 9], [10, 11, 12, 13, 14], [15], [30, 31], [50, 60, 70, 80], [90, 91]]


# ── What a rank does

def prepared(path):
    """The base at `path` with a policy adapter whose weights are not zero."""
    model, _ = load_model(path, device="cpu")
    torch.manual_seed(1)
    randomise(add_lora(model, "policy", r=4), 0.03)
    return model


def trained(model, rows, total):
    """Hidden states, log-probs, and the adapter gradients of the log-probs' sum / `total`."""
    batch = pad_batch([PROMPTS[i] for i in rows], [RESPONSES[i] for i in rows])
    at = batch[3].bool()
    with use_lora(model, "policy"):
        hidden = response_hidden(model, *batch)[at]
    logprobs = token_logprobs(hidden, head_weight(model), batch[2][at])
    (logprobs.sum() / total).backward()
    gradients = [p.grad for p in lora_parameters(model, "policy")]
    return hidden.detach(), logprobs.detach(), gradients


def sampled(model, tokens=12):
    """Sampled responses to all prompts with the adapter; the rows end at different times."""
    with gathered(model), use_lora(model, "policy"):
        return generate(model, PROMPTS, tokens, eos_token_id=list(range(0, 700, 3)),
                        generator=torch.Generator().manual_seed(2))


class Gathers(TorchDispatchMode):
    """Counts the all-gathers that are issued while this mode is active."""
    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = str(function).replace("_", "")
        self.count += "allgather" in name and name.startswith("c10d")
        return function(*args, **(kwargs or {}))


def gathers(model, tokens):
    """The number of all-gathers in a rollout of this many tokens."""
    with Gathers() as seen, gathered(model):
        assert [len(row) for row in generate(model, PROMPTS, tokens)] == [tokens] * len(PROMPTS)
    return seen.count


def local_bytes(model):
    """Bytes of the parameters that this rank holds."""
    local = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
    return sum(p.nbytes for p in local)


def on_a_rank(rank, port, path, directory, checkpointed):
    """Save all results that the tests check to `directory`, on each rank."""
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank,
                            world_size=2)
    model = prepared(path)
    before = local_bytes(model), fingerprint(model)
    shard(model, "cpu")
    if checkpointed:
        checkpoint_activations(model)
    ids = sampled(model)
    counts = [gathers(model, n) for n in (8, 24)]
    with Gathers() as each_pass:
        response_hidden(model, *pad_batch(PROMPTS, RESPONSES))
    resting = local_bytes(model)
    mine = [0, 2, 4] if rank == 0 else [1, 3, 5]
    hidden, logprobs, gradients = trained(model, mine, sum(map(len, RESPONSES)))
    for gradient in gradients:
        dist.all_reduce(gradient)
    assert local_bytes(model) == resting, "what was gathered must be freed"
    if rank == 1:                        # saving needs no collective, so one rank can do it
        save_lora(model, "policy", directory / "adapter")
    torch.save({"hidden": hidden, "logprobs": logprobs, "gradients": gradients, "ids": ids,
                "counts": counts, "each_pass": each_pass.count, "share": resting / before[0],
                "fingerprint": fingerprint(model) == before[1]}, directory / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module", params=["tied", "untied"])
def runs(request, tmp_path_factory):
    """(path of the base, directory, results of two ranks), with a tied and an untied head."""
    path, directory = ROOT / "toy" / "base", tmp_path_factory.mktemp(request.param)
    untied = request.param == "untied"
    if untied:
        torch.manual_seed(3)
        model, tokenizer = load_model(path, device="cpu")
        config = {**model.config.to_dict(), "tie_word_embeddings": False}
        config["num_key_value_heads"], path = 2, directory / "base"
        LlamaForCausalLM(LlamaConfig(**config)).save_pretrained(path)
        tokenizer.save_pretrained(path)
    # Forks need not load anything. The untied base recomputes its activations too.
    arguments = free_port(), path, directory, untied
    start_processes(on_a_rank, arguments, 2, start_method="fork")
    return path, directory, [torch.load(directory / f"{rank}.pt") for rank in (0, 1)]


LOAD = """
import re, sys, torch
from pathlib import Path
import torch.distributed as dist
from model import load_model, response_hidden, shard
from runtime import start_ranks
from sampling import pad_batch

def memory(key):
    return 1024 * int(re.search(key + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

device, path, out = start_ranks(1), sys.argv[1], Path(sys.argv[2])
shard(load_model("toy/base", device=device, to_shard=True)[0], device)    # for late imports
before = memory("VmRSS")
model, _ = load_model(path, device=device, to_shard=True)
shard(model, device)
used = memory("VmHWM") - before
hidden = response_hidden(model, *pad_batch([[5, 6], [7, 8, 9]], [[4], [3, 2]])).detach()
torch.save({"used": used, "hidden": hidden}, out / f"{dist.get_rank()}.pt")
dist.destroy_process_group()
"""


# ── Tests

def test_a_rank_never_holds_the_whole_model_while_it_loads(tmp_path):
    """Load 300 MB in shards of 50 MB. The measured peak of each rank, including file pages, is
    .72 of the model, and 1.12 if the check of the head reads all shards."""
    torch.manual_seed(4)
    config = LlamaConfig(vocab_size=960, hidden_size=640, intermediate_size=1920,
                         num_hidden_layers=14, num_attention_heads=10)
    whole, path = LlamaForCausalLM(config).eval(), tmp_path / "base"
    whole.save_pretrained(path, max_shard_size="50MB")
    load_model(ROOT / "toy" / "base", device="cpu")[1].save_pretrained(path)
    assert len(list(path.glob("model-*.safetensors"))) >= 5
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone",
               "--nproc_per_node", 2, "--no-python", sys.executable, "-c", LOAD, path, tmp_path]
    # Freed memory returns to the system at once, so that the peak counts only live memory.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "PYTHONPATH": str(ROOT)}
    subprocess.run([*map(str, command)], cwd=ROOT, env=environment, check=True)
    size = sum(p.nbytes for p in whole.parameters())
    expected = response_hidden(whole, *pad_batch([[5, 6], [7, 8, 9]], [[4], [3, 2]]))
    for rank in (0, 1):
        result = torch.load(tmp_path / f"{rank}.pt")
        torch.testing.assert_close(result["hidden"], expected, atol=1e-5, rtol=1e-5)
        assert 0.5 * size < result["used"] < 0.9 * size


@pytest.mark.parametrize("script", [text2grad, reward_model])
def test_with_shard_the_weights_stay_in_their_files(script, monkeypatch, tmp_path):
    """The weights stay on the CPU until `shard` moves each rank's part to the device."""
    class Stop(Exception):
        pass

    def load(*args, **options):
        model, _ = load_model(ROOT / "toy" / "base", "float32", "meta", **options)
        assert model.device.type == "cpu"
        raise Stop

    monkeypatch.setattr(model_file, "WORLD_SIZE", 2)
    monkeypatch.setattr(model_file, "load_model", load)
    flags = ["--shard", "--output_dir", tmp_path]
    if script is reward_model:
        write_rows(tmp_path / "feedback.jsonl", [{"task": "toy"}])
        flags += ["--data", tmp_path / "feedback.jsonl"]
    with pytest.raises(Stop):
        run_main(*flags, module=script)


def test_two_ranks_make_the_numbers_of_one(runs):
    """Hidden states, log-probs, summed adapter gradients and samples equal one process's."""
    path, _, ranks = runs
    *_, gradients = trained(prepared(path), range(6), sum(map(len, RESPONSES)))
    ids = sampled(prepared(path))
    assert max(g.abs().max() for g in gradients) > 1e-3 and len({len(row) for row in ids}) > 1
    for result, rows in zip(ranks, ([0, 2, 4], [1, 3, 5])):
        hidden, logprobs, _ = trained(prepared(path), rows, 1)
        expected = {"hidden": hidden, "logprobs": logprobs, "gradients": gradients}
        for name, numbers in expected.items():
            torch.testing.assert_close(result[name], numbers, atol=1e-5, rtol=1e-5)
        assert result["ids"] == ids


def test_a_rank_holds_half_and_gathers_it_once(runs):
    """Each rank holds at most 55 % of the parameter bytes, including full adapters. A rollout
    gathers the weights once, whether it has 8 or 24 tokens."""
    for result in runs[2]:
        assert 0.45 < result["share"] <= 0.55
        assert result["each_pass"] >= 5, "embeddings, three blocks and the rest"
        assert result["counts"][0] == result["counts"][1] <= result["each_pass"] + 2


def test_an_adapter_of_a_sharded_model_is_whole(runs):
    """An adapter saved by one rank loads in one process with equal weights and its base."""
    path, directory, ranks = runs
    model, _ = load_model(path, device="cpu")
    for ours, theirs in zip(load_lora(model, "policy", directory / "adapter"),
                            lora_parameters(prepared(path), "policy"), strict=True):
        assert torch.equal(ours, theirs)
    assert all(result["fingerprint"] for result in ranks)
