"""Several processes that torchrun starts, on one machine and the CPU (gloo): they must do what one process does."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from conftest import ROOT
from runs import reward, rows_of, timeless  # noqa: F401  (reward is a fixture)

SMALL = ["--iterations", 5, "--batch_size", 8, "--minibatch_size", 4, "--micro_batch_size", 2, "--ppo_epochs", 2,
         "--max_new_tokens", 24, "--max_critique_tokens", 100, "--eval_rows", 3, "--dtype", "float32",
         "--learning_rate", 2e-4]       # AdamW turns the rounding of a gradient near 0 into a share of this


def start(ranks, out, *flags, stderr=subprocess.PIPE, script="text2grad.py", settings=SMALL):
    """The run of a script on some ranks, as a process of its own."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", ranks] if ranks > 1 else \
        [sys.executable]
    return subprocess.Popen([str(word) for word in [*command, script, *settings, *flags, "--output_dir", out]], cwd=ROOT,
                            stdout=subprocess.PIPE, stderr=stderr,
                            text=True, start_new_session=True)


def finish(process) -> str:
    """Wait for a run that must succeed; returns what it said."""
    said, complained = process.communicate(timeout=900)
    assert process.returncode == 0, complained[-3000:]
    return said


def wait_for(condition, process):
    """Until it holds, as long as the run goes on; at most a minute."""
    for _ in range(1200):
        if condition():
            return
        assert process.poll() is None, "the run ended too early"
        time.sleep(0.05)
    raise AssertionError("a minute has passed")


@pytest.fixture(scope="module")
def alone(reward, tmp_path_factory):
    """Five iterations on one rank."""
    out = tmp_path_factory.mktemp("ranks") / "alone"
    finish(start(1, out, "--reward_model", reward))
    return out


@pytest.fixture(scope="module")
def two(reward, tmp_path_factory):
    """The same on two ranks, each with a copy of the base."""
    out = tmp_path_factory.mktemp("ranks") / "two"
    finish(start(2, out, "--reward_model", reward, "--save_every", 4))
    return out


def agree(out, alone):
    """The same texts; losses, every other metric and all trained tensors within 1e-5 after five iterations."""
    mine, theirs = rows_of(out / "samples.jsonl"), rows_of(alone / "samples.jsonl")
    assert [(row["response"], row["critique"]) for row in mine] == [(row["response"], row["critique"]) for row in theirs]
    mine, theirs = timeless(out / "metrics.jsonl"), timeless(alone / "metrics.jsonl")
    assert len(mine) == 5 and any(row["delta"] for row in theirs)
    worst = max(abs(a[key] - b[key]) / max(1, abs(b[key])) for a, b in zip(mine, theirs) for key in b)
    assert worst < 1e-5
    for file in ("policy/adapter_model.safetensors", "value_head.safetensors"):
        ours, whole = load_file(out / file), load_file(alone / file)
        assert ours.keys() == whole.keys() and all(t.abs().max() > 1e-4 for t in whole.values())
        for name in whole:
            torch.testing.assert_close(ours[name], whole[name], rtol=0, atol=1e-5, msg=lambda text: f"{name}: {text}")
    assert json.loads((out / "result.json").read_text())["before"] == pytest.approx(
        json.loads((alone / "result.json").read_text())["before"])


def test_two_ranks_are_one_rank(alone, two):
    """Invariant 3."""
    agree(two, alone)


def test_two_ranks_with_a_sharded_base_are_one_rank(alone, reward, tmp_path):
    """FSDP2, and activations computed twice: less memory, the same numbers."""
    finish(start(2, tmp_path / "two", "--reward_model", reward, "--shard", "--activation_checkpointing"))
    agree(tmp_path / "two", alone)


def test_two_ranks_are_one_rank_in_phases_1_and_2(tmp_path):
    """Responses, feedback and R_φ: sampled, fitted and judged by all, its base sharded, and by
    reward_model.py alone. In float32; 27 rows, so that one rank has none of a last batch."""
    phases = ["--annotated_rows", 27, "--iterations", 1, "--learning_rate", 0]
    finish(start(1, tmp_path / "one", *phases))
    finish(start(2, tmp_path / "two", *phases, "--shard"))
    flags = ["--data", tmp_path / "one" / "feedback.jsonl", "--micro_batch_size", 2, "--max_critique_tokens", 100]
    finish(start(2, tmp_path / "fit", *flags, script="reward_model.py", settings=()))
    for name in ("responses", "feedback"):
        texts = [(tmp_path / run / f"{name}.jsonl").read_bytes() for run in ("one", "two")]
        assert texts[0] == texts[1]
    one = tmp_path / "one" / "reward"
    for other in (tmp_path / "two" / "reward", tmp_path / "fit"):
        assert (other / "samples.jsonl").read_bytes() == (one / "samples.jsonl").read_bytes()
        ours, whole = (rows_of(path / "metrics.json")[0] for path in (other, one))
        assert all(ours[name] == pytest.approx(whole[name], rel=1e-6) for name in ("final_loss", "held_out_loss"))
        ours, whole = (load_file(path / "adapter" / "adapter_model.safetensors") for path in (other, one))
        assert all((ours[name] - whole[name]).abs().max() < 1e-4 for name in whole)


@pytest.mark.parametrize("how", ["SIGKILL", "SIGSTOP"])
def test_a_rank_that_dies_or_hangs_ends_the_run(reward, tmp_path, how):
    """Dead: torchrun ends the other one. Alive but silent: the other one waits --rank_timeout, says so, and ends."""
    errors, out = tmp_path / "errors", tmp_path / "run"
    with open(errors, "w") as file:
        process = start(2, out, "--reward_model", reward, "--iterations", 500, "--rank_timeout", 0.1, stderr=file)
    wait_for(lambda: (out / "metrics.jsonl").exists(), process)
    ranks = [int(word) for word in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
    victim = next(pid for pid in ranks if b"RANK=1" in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
    os.kill(victim, getattr(signal, how))
    if how == "SIGSTOP":
        wait_for(lambda: "rank 0 lost another rank, or waited --rank_timeout" in errors.read_text(), process)
        os.kill(victim, signal.SIGCONT)                   # so that torchrun can end it too
    process.communicate(timeout=300)
    assert process.returncode != 0 and ("Signal 9" in errors.read_text() or how == "SIGSTOP")


def test_another_number_of_ranks_goes_on_and_says_that_it_is_not_exact(alone, two, reward, tmp_path):
    """A checkpoint of two ranks, taken up by one: it says so, and is still the unbroken run beyond rounding."""
    out = tmp_path / "one"
    shutil.copytree(two, out)
    for done in ("policy", "checkpoint-5"):
        shutil.rmtree(out / done)
    (out / "result.json").unlink()
    said = finish(start(1, out, "--reward_model", reward))
    assert "not bit-exact from here on: 2 ranks summed in another order" in said
    agree(out, alone)
