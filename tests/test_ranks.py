"""Two ranks on one CPU (gloo) give the same results as one process, also with a sharded base.

A base that FSDP2 shards needs less memory, and few all-gathers.
"""

import ctypes
import os
import pickle
import re
import shutil
import signal
import sys
import time
from datetime import timedelta
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from data import InputError
from helpers import (ROOT, free_port, often, randomise, read_jsonl, read_metrics, run_main)
from hypothesis import given
from hypothesis.strategies import integers, lists
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor
from torch.multiprocessing import start_processes
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

import reward_model
import runtime
import text2grad
from model import (add_lora, load_model, lora_parameters, response_hidden, unsharded,
                   use_lora)
from runtime import all_sum, run_phase, token_groups
from sampling import generate, head_weight, pad_batch, token_logprobs


if os.name == "nt":
    pytest.skip("the ranks are forks of one process", allow_module_level=True)


# ── Runs on two ranks

def become_rank(rank, port):
    """Make this process, a fork of one that is not a rank, one of two ranks."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2",
                      MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    for loaded in [*sys.modules.values()]:              # each has imported one or both of them
        for name, value in (("RANK", rank), ("WORLD_SIZE", 2)):
            if vars(loaded).get(name) == getattr(runtime, name) and loaded is not runtime:
                setattr(loaded, name, value)
    runtime.RANK, runtime.WORLD_SIZE = rank, 2


def as_rank(rank, port, module, flags):
    """Run a script's main as one of two ranks."""
    become_rank(rank, port)
    run_main(*flags, module=module)


def on_two_ranks(out, *flags, module=text2grad, join=True):
    """Run a script on two ranks by fork, which saves torchrun's loading time."""
    arguments = free_port(), module, (*flags, "--output_dir", out)
    return start_processes(as_rank, arguments, 2, join, start_method="fork")


@pytest.fixture(scope="module")
def two(phase_3, tmp_path_factory):
    """The output directory of the run `unbroken` on two ranks, each with a copy of the base."""
    out = tmp_path_factory.mktemp("ranks") / "two"
    on_two_ranks(out, *phase_3)
    return out


def assert_close_in_norm(file, expected_file, tolerance):
    """The norm of each tensor's error is below `tolerance` times the expected norm. Single
    elements may differ by more, as AdamW amplifies the rounding of gradients near 0."""
    tensors = load_file(file)
    for name, expected in load_file(expected_file).items():
        assert expected.abs().max() > 1e-4
        error = (tensors[name] - expected).norm() / expected.norm()
        assert error < tolerance, f"{name}: {error:.1e}"


def assert_same_run(out, unbroken):
    """Equal texts; metrics and trained tensors are equal up to rounding."""
    samples, expected = (read_jsonl(run / "samples.jsonl") for run in (out, unbroken))
    for name in ("response", "critique"):
        assert [row[name] for row in samples] == [row[name] for row in expected]
    metrics, expected = (read_metrics(run / "metrics.jsonl") for run in (out, unbroken))
    assert any(row["delta"] for row in expected)
    for row, expected_row in zip(metrics, expected, strict=True):
        assert row == pytest.approx(expected_row, rel=1e-4, abs=1e-4)
    for file in ("policy/adapter_model.safetensors", "value_head.safetensors"):
        assert_close_in_norm(out / file, unbroken / file, 1e-3)
    (result,), (expected,) = (read_jsonl(run / "result.json") for run in (out, unbroken))
    assert result["before"] == pytest.approx(expected["before"])


@often
@given(lists(integers(1, 60), min_size=1), integers(1, 4), integers(1, 200))
def test_a_pass_of_each_rank_takes_as_many_rows_as_fit(lengths, ranks, limit):
    """Each row is in one pass. All ranks have equally many passes: only the last may leave a
    rank without a row."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtime, "WORLD_SIZE", ranks)
        groups = token_groups(range(len(lengths)), lengths, limit)
    assert sum(groups, []) == sorted(range(len(lengths)), key=lengths.__getitem__)
    assert not any(len(group) % ranks for group in groups[:-1])
    for group in groups:
        share = group[::ranks]                                     # no rank has more
        assert len(share) == 1 or len(share) * lengths[group[-1]] <= limit
    for group, following in pairwise(groups):
        larger = group + following[:ranks]
        assert len(larger[::ranks]) * lengths[larger[-1]] > limit



def test_two_ranks_are_one_rank(unbroken, two):
    """Invariant 3."""
    assert_same_run(two, unbroken)


def test_two_ranks_with_a_sharded_base_are_one_rank(phase_3, unbroken, tmp_path):
    """FSDP2, activation checkpointing and passes of one row do not change the numbers."""
    on_two_ranks(tmp_path, *phase_3, "--shard", "--activation_checkpointing",
                 "--micro_batch_tokens", 40)
    assert_same_run(tmp_path, unbroken)


FEW_STEPS = "--reward_epochs", 1, "--max_critique_tokens", 8


def test_two_ranks_are_one_rank_in_phases_1_and_2(phase_3, tmp_path, monkeypatch):
    """Phases 1 and 2 with a sharded base, and reward_model.py alone, equal one rank.

    With 27 rows one rank has no row in the last batch. The losses differ by 1.3e-6 at most. As
    critiques of R_φ may differ in a token, only the rows and their counts are compared.
    """
    for name in ("train_and_evaluate", "print_result"):    # of phase 3
        monkeypatch.setattr(text2grad, name, lambda *_: None)
    phases = [*phase_3, "--reward_model", "none", "--annotated_rows", 27, *FEW_STEPS]
    run_main(*phases, "--output_dir", tmp_path / "one")
    on_two_ranks(tmp_path / "two", *phases, "--shard", "--micro_batch_tokens", 400)
    on_two_ranks(tmp_path / "fit", "--data", tmp_path / "one" / "feedback.jsonl",
                 "--micro_batch_tokens", 40, *FEW_STEPS, module=reward_model)
    for name in ("responses.jsonl", "feedback.jsonl"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    alone = tmp_path / "one" / "reward"
    for out in (tmp_path / "two" / "reward", tmp_path / "fit"):
        samples, expected = (read_jsonl(path / "samples.jsonl") for path in (out, alone))
        for name in ("id", "response", "annotator"):
            assert [row[name] for row in samples] == [row[name] for row in expected]
        metrics, expected = (read_jsonl(path / "metrics.json")[0] for path in (out, alone))
        for name in ("final_loss", "tokens", "poor_tokens", "unparseable"):
            assert metrics[name] == pytest.approx(expected[name], rel=1e-4)
        assert_close_in_norm(out / "adapter" / "adapter_model.safetensors",
                             alone / "adapter" / "adapter_model.safetensors", 1e-3)


@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL])
def test_a_rank_that_hangs_or_dies_ends_the_run(phase_3, tmp_path, monkeypatch, how):
    """The other rank waits for half an hour at most (here 3 s), reports it and ends."""
    monkeypatch.setattr(runtime, "TIMEOUT", timedelta(seconds=3))
    ranks = on_two_ranks(tmp_path, *phase_3, "--iterations", 500, join=False)
    while not (tmp_path / "metrics.jsonl").exists() and ranks.processes[0].is_alive():
        time.sleep(0.05)
    os.kill(ranks.pids()[1], how)
    ranks.processes[0].join(120)
    ranks.processes[1].kill()
    assert ranks.processes[0].exitcode == 1
    error = pickle.loads(Path(ranks.error_files[0]).read_bytes())
    assert "rank 0 lost another rank, or waited too long" in error


def wait_for_the_annotator(rank, port, out):
    """Rank 0 annotates until rank 1 has waited too long, but for 30 s at most."""
    def annotate():
        end = time.monotonic() + 30
        while not (out / "too long").exists() and time.monotonic() < end:
            time.sleep(0.05)

    become_rank(rank, port)
    runtime.start_ranks()
    runtime.ANNOTATION_TIMEOUT = timedelta(seconds=2)
    with pytest.raises(InputError, match=f"rank {rank} lost another rank, or waited too long"):
        run_phase("annotate", "never", out, annotate, only_rank0=True)
    (out / "too long").touch()


def test_the_ranks_wait_longer_for_the_annotator_than_for_each_other(tmp_path):
    """The time-out of this wait is one of its own, which is shorter here."""
    assert runtime.ANNOTATION_TIMEOUT > runtime.TIMEOUT
    start_processes(wait_for_the_annotator, (free_port(), tmp_path), 2, start_method="fork")


def test_another_number_of_ranks_continues(phase_3, unbroken, two, tmp_path, capsys):
    """One rank resumes a checkpoint of two, and gives the same run up to rounding."""
    out = shutil.copytree(two, tmp_path / "one")
    shutil.rmtree(out / "policy")
    for name in ("checkpoint-000004.safetensors", "result.json"):
        (out / name).unlink()
    run_main(*phase_3, "--output_dir", out)
    assert "resumed after step 3" in capsys.readouterr().out
    assert_same_run(out, unbroken)


# ── A sharded base

PROMPTS = [[5, 9, 33], [7], [101, 12, 13, 14, 15, 16], [200, 201], [3, 4, 5, 6], [44, 45, 46]]
RESPONSES = [[8, 8, 9], [10, 11, 12, 13, 14], [15], [30, 31], [50, 60, 70, 80], [90, 91]]


def prepared(path, **options):
    """The base at `path` with a policy adapter whose weights are not zero."""
    model, _ = load_model(path, device="cpu", **options)
    torch.manual_seed(1)
    randomise(add_lora(model, "policy", r=4), 0.03)
    return model


def trained(model, rows):
    """The adapter's gradients of the sum of the log-probs of some rows."""
    batch = pad_batch([PROMPTS[i] for i in rows], [RESPONSES[i] for i in rows])
    at = batch[3].bool()
    with use_lora(model.train(), "policy"):
        hidden = response_hidden(model, *batch)[at]
        token_logprobs(hidden, head_weight(model), batch[2][at]).sum().backward()
    return [p.grad for p in lora_parameters(model, "policy")]


M_MMAP_THRESHOLD = -3                                        # a name of malloc.h


class Gathers(TorchDispatchMode):
    """Counts the all-gathers that are issued while this mode is active."""
    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = str(function).replace("_", "")
        self.count += "allgather" in name and name.startswith("c10d")
        return function(*args, **(kwargs or {}))


def local_bytes(model):
    """Bytes of the parameters that this rank holds."""
    local = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
    return sum(p.nbytes for p in local)


def memory(key):
    """Bytes of a line in /proc/self/status."""
    return 1024 * int(re.search(key + r":\s+(\d+)", Path("/proc/self/status").read_text())[1])


def run_rank(rank, port, path, folder):
    """Load, shard and use a base on each rank; save what the test checks to `folder`."""
    # Freed memory returns to the system at once, so that the peak counts only live memory.
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 65536)
    become_rank(rank, port)
    runtime.start_ranks()
    load_model(ROOT / "toy" / "base", device="cpu", is_sharded=True)      # connects the ranks
    before = memory("VmRSS")
    model = prepared(path, is_sharded=True, checkpoint_activations=True)
    used = memory("VmHWM") - before
    counts = []
    for tokens in (2, 8):
        with Gathers() as rollout, unsharded(model):
            rows = generate(model, PROMPTS, tokens)
        assert [len(row) for row in rows] == [tokens] * len(PROMPTS)
        counts.append(rollout.count)
    with Gathers() as each_pass:
        response_hidden(model, *pad_batch(PROMPTS, RESPONSES))
    resting = local_bytes(model)
    gradients = [all_sum(gradient) for gradient in trained(model, range(rank, 6, 2))]
    assert local_bytes(model) == resting, "what was gathered must be freed"
    torch.save({"used": used, "gradients": gradients, "counts": counts,
                "each_pass": each_pass.count, "bytes": resting}, folder / f"{rank}.pt")
    runtime.stop_ranks()


@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_a_sharded_base_is_held_in_halves_and_gathered_once(tmp_path):
    """64 MB in files of 12 MB, with an untied head and recomputed activations.

    The measured peak of each rank while it loads, including file pages, is .45 to .58 of the
    model, and .98 if `shard` holds references to the whole weights. Each rank holds half of
    the blocks, and all adapters, embeddings, head and norms. A rollout gathers the blocks once,
    whether it has 2 or 8 tokens. The summed gradients are those of a whole base.
    """
    torch.manual_seed(4)
    path = tmp_path / "base"
    LlamaForCausalLM(LlamaConfig(
        vocab_size=960, hidden_size=384, intermediate_size=1152, num_hidden_layers=8,
        num_attention_heads=8)).save_pretrained(path, max_shard_size="12MB")
    load_model(ROOT / "toy" / "base", device="cpu")[1].save_pretrained(path)
    assert len(list(path.glob("model-*.safetensors"))) >= 5
    start_processes(run_rank, (free_port(), path, tmp_path), 2, start_method="fork")
    model = prepared(path)
    size = local_bytes(model)
    blocks = sum(p.nbytes for name, p in model.named_parameters()
                 if ".layers." in name and ".lora_" not in name)
    gradients = trained(model, range(6))
    assert max(g.abs().max() for g in gradients) > 1e-2
    for rank in (0, 1):
        result = torch.load(tmp_path / f"{rank}.pt")
        torch.testing.assert_close(result["gradients"], gradients, atol=1e-4, rtol=1e-4)
        assert 0.3 * size < result["used"] < 0.8 * size, result["used"] / size
        assert result["bytes"] == pytest.approx(size - blocks / 2, rel=0.01)
        assert result["each_pass"] >= 8, "eight blocks"
        assert result["counts"][0] == result["counts"][1] <= result["each_pass"] + 2
