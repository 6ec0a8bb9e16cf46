"""A base sharded over two ranks (FSDP2, gloo) gives the numbers and files of one process, with
less memory and few all-gathers."""

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.multiprocessing import start_processes
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

import model as model_file
from helpers import ROOT, free_port, randomise
from model import (add_lora, gathered, load_lora, load_model, lora_parameters, response_hidden,
                   save_lora, use_lora)
from sampling import generate, head_weight, pad_batch, token_logprobs

PROMPTS = [[5, 9, 33], [7], [101, 12, 13, 14, 15, 16], [200, 201], [3, 4, 5, 6], [44, 45, 46]]
RESPONSES = [[8, 8, 9], [10, 11, 12, 13, 14], [15], [30, 31], [50, 60, 70, 80], [90, 91]]
TOKENS = sum(map(len, RESPONSES))


# ── What a rank does

def join(rank, port):
    """Make this process one of two ranks."""
    model_file.WORLD_SIZE = 2                       # a fork has imported it as 1
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank,
                            world_size=2)


def prepared(path, **options):
    """The base at `path` with a policy adapter whose weights are not zero."""
    model, _ = load_model(path, device="cpu", **options)
    torch.manual_seed(1)
    randomise(add_lora(model, "policy", r=4), 0.03)
    return model


def trained(model, rows):
    """Hidden states, log-probs, and the adapter gradients of the log-probs' sum / TOKENS."""
    batch = pad_batch([PROMPTS[i] for i in rows], [RESPONSES[i] for i in rows])
    at = batch[3].bool()
    with use_lora(model.train(), "policy"):
        hidden = response_hidden(model, *batch)[at]
        logprobs = token_logprobs(hidden, head_weight(model), batch[2][at])
        (logprobs.sum() / TOKENS).backward()
    gradients = [p.grad for p in lora_parameters(model, "policy")]
    return hidden.detach(), logprobs.detach(), gradients


def sampled(model):
    """Sampled responses to all prompts with the adapter; the rows end at different times."""
    uniforms = torch.rand(len(PROMPTS), 12, generator=torch.Generator().manual_seed(2))
    with gathered(model), use_lora(model, "policy"):
        return generate(model, PROMPTS, 12, 1.0, range(0, 700, 3), uniforms)


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


def run_rank(rank, port, path, directory, is_checkpointed):
    """Save all results that the test checks to `directory`, on each rank."""
    join(rank, port)
    model = prepared(path, is_sharded=True, checkpoint_activations=is_checkpointed)
    ids = sampled(model)
    counts = [gathers(model, n) for n in (8, 24)]
    with Gathers() as each_pass:
        response_hidden(model, *pad_batch(PROMPTS, RESPONSES))
    resting = local_bytes(model)
    hidden, logprobs, gradients = trained(model, range(rank, 6, 2))
    for gradient in gradients:
        dist.all_reduce(gradient)
    assert local_bytes(model) == resting, "what was gathered must be freed"
    if rank == 1:                        # saving needs no collective, so one rank can do it
        save_lora(model, "policy", directory / "adapter")
    torch.save({"hidden": hidden, "logprobs": logprobs, "gradients": gradients, "ids": ids,
                "counts": counts, "each_pass": each_pass.count, "bytes": resting},
               directory / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def memory(key):
    """Bytes of a line in /proc/self/status."""
    return 1024 * int(re.search(key + r":\s+(\d+)", Path("/proc/self/status").read_text())[1])


PAIRS = [[5, 6], [7, 8, 9]], [[4], [3, 2]]


def load_rank(rank, port, path, directory):
    """Load and shard a base on each rank; save the peak of its memory, and hidden states."""
    join(rank, port)
    load_model(ROOT / "toy" / "base", device="cpu", is_sharded=True)      # imports
    before = memory("VmRSS")
    model, _ = load_model(path, device="cpu", is_sharded=True)
    used = memory("VmHWM") - before
    hidden = response_hidden(model, *pad_batch(*PAIRS)).detach()
    torch.save({"used": used, "hidden": hidden}, directory / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


# ── Tests

@pytest.mark.parametrize("is_tied", [True, False])
def test_two_ranks_make_the_numbers_of_one(is_tied, tmp_path):
    """Hidden states, log-probs, summed adapter gradients, samples and the adapter that one rank
    saves equal one process's, with a tied and an untied head.

    Each rank holds half of the blocks, and all adapters, embeddings, head and norms. A rollout
    gathers the blocks once, whether it has 8 or 24 tokens.
    """
    path = ROOT / "toy" / "base"
    if not is_tied:
        torch.manual_seed(3)
        model, tokenizer = load_model(path, device="cpu")
        config = {**model.config.to_dict(), "tie_word_embeddings": False}
        config["num_key_value_heads"], path = 2, tmp_path / "base"
        LlamaForCausalLM(LlamaConfig(**config)).save_pretrained(path)
        tokenizer.save_pretrained(path)
    # Forks need not load anything. The untied base recomputes its activations too.
    start_processes(run_rank, (free_port(), path, tmp_path, not is_tied), 2,
                    start_method="fork")
    model = prepared(path)
    blocks = sum(p.nbytes for name, p in model.named_parameters()
                 if ".layers." in name and ".lora_" not in name)
    expected_bytes = local_bytes(model) - blocks / 2
    ids = sampled(model)
    *_, gradients = trained(model, range(6))
    assert max(g.abs().max() for g in gradients) > 1e-3 and len({len(row) for row in ids}) > 1
    for rank in (0, 1):
        result = torch.load(tmp_path / f"{rank}.pt")
        hidden, logprobs, _ = trained(prepared(path), range(rank, 6, 2))
        expected = {"hidden": hidden, "logprobs": logprobs, "gradients": gradients}
        for name, numbers in expected.items():
            torch.testing.assert_close(result[name], numbers, atol=1e-5, rtol=1e-5)
        assert result["ids"] == ids
        assert result["bytes"] == pytest.approx(expected_bytes, rel=0.01)
        assert result["each_pass"] >= 3, "three blocks"
        assert result["counts"][0] == result["counts"][1] <= result["each_pass"] + 2
    model, _ = load_model(path, device="cpu")
    for ours, theirs in zip(load_lora(model, "policy", tmp_path / "adapter"),
                            lora_parameters(prepared(path), "policy"), strict=True):
        assert torch.equal(ours, theirs)


def test_a_rank_never_holds_the_whole_model_while_it_loads(tmp_path, monkeypatch):
    """Load 300 MB in files of 50 MB. The measured peak of each rank, including file pages, is
    .87 of the model, and 1.22 if `shard` holds references to the whole weights."""
    torch.manual_seed(4)
    config = LlamaConfig(vocab_size=960, hidden_size=640, intermediate_size=1920,
                         num_hidden_layers=14, num_attention_heads=10)
    whole, path = LlamaForCausalLM(config).eval(), tmp_path / "base"
    whole.save_pretrained(path, max_shard_size="50MB")
    load_model(ROOT / "toy" / "base", device="cpu")[1].save_pretrained(path)
    assert len(list(path.glob("model-*.safetensors"))) >= 5
    # Freed memory returns to the system at once, so that the peak counts only live memory.
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")
    start_processes(load_rank, (free_port(), path, tmp_path), 2, start_method="spawn")
    size = sum(p.nbytes for p in whole.parameters())
    expected = response_hidden(whole, *pad_batch(*PAIRS))
    for rank in (0, 1):
        result = torch.load(tmp_path / f"{rank}.pt")
        torch.testing.assert_close(result["hidden"], expected, atol=1e-5, rtol=1e-5)
        assert 0.5 * size < result["used"] < 0.95 * size, result["used"] / size
