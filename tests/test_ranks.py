"""Several processes on one machine and the CPU (gloo) must do what one process does."""

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
from conftest import ROOT
from runs import rows_of, run_main, timeless
from safetensors.torch import load_file
from test_sharding import free_port
from torch.multiprocessing import ProcessRaisedException, start_processes

import reward_model
import text2grad

# AdamW turns the rounding of a gradient near 0 into a share of the learning rate.
SMALL = ["--iterations", 3, "--batch_size", 8, "--minibatch_size", 4, "--micro_batch_size", 2,
         "--ppo_epochs", 2, "--max_new_tokens", 24, "--max_critique_tokens", 100,
         "--eval_rows", 3, "--dtype", "float32", "--learning_rate", 2e-4]


def as_rank(rank, port, module, flags):
    """A script's main as one of two ranks, in a fork of a process that had loaded it alone."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2",
                      MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    for one in [*sys.modules.values()]:
        if vars(one).get("RANKS") == 1:                      # which its import read of these
            one.RANK, one.RANKS = rank, 2
    run_main(*flags, module=module)


def on_two_ranks(out, *flags, module=text2grad, join=True):
    """The same as torchrun makes it, but for the seconds of loading: `start` is torchrun."""
    arguments = free_port(), module, (*flags, "--output_dir", out)
    return start_processes(as_rank, arguments, 2, join, start_method="fork")


def start(ranks, out, *flags, stderr=subprocess.PIPE, script="text2grad.py", settings=SMALL):
    """The run of a script on some ranks, by torchrun."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone",
               "--nproc_per_node", ranks, script, *settings, *flags, "--output_dir", out]
    return subprocess.Popen([*map(str, command)], cwd=ROOT, stdout=subprocess.PIPE,
                            stderr=stderr, text=True, start_new_session=True)


def finish(process) -> str:
    """Wait for a run that must succeed; returns what it said."""
    said, complained = process.communicate(timeout=900)
    assert process.returncode == 0, complained[-3000:]
    return said


def wait_for(path, ended):
    """Until the file is there, as long as the run goes on; at most two minutes."""
    for _ in range(2400):
        if path.exists():
            return
        assert not ended(), "the run ended too early"
        time.sleep(0.05)
    raise AssertionError("two minutes have passed")


@pytest.fixture(scope="module")
def alone(reward, tmp_path_factory):
    """Three iterations on one rank."""
    out = tmp_path_factory.mktemp("ranks") / "alone"
    run_main(*SMALL, "--reward_model", reward, "--output_dir", out)
    return out


@pytest.fixture(scope="module")
def two(reward, tmp_path_factory):
    """The same on two ranks, each with a copy of the base."""
    out = tmp_path_factory.mktemp("ranks") / "two"
    on_two_ranks(out, *SMALL, "--reward_model", reward, "--save_every", 2)
    return out


def agree(out, alone):
    """The same texts; all metrics and trained tensors within 1e-5 after three iterations."""
    mine, theirs = (rows_of(run / "samples.jsonl") for run in (out, alone))
    for name in ("response", "critique"):
        assert [row[name] for row in mine] == [row[name] for row in theirs]
    mine, theirs = (timeless(run / "metrics.jsonl") for run in (out, alone))
    assert len(mine) == 3 and any(row["delta"] for row in theirs)
    for ours, whole in zip(mine, theirs, strict=True):
        assert ours == pytest.approx(whole, rel=1e-5, abs=1e-5)
    for file in ("policy/adapter_model.safetensors", "value_head.safetensors"):
        ours, whole = load_file(out / file), load_file(alone / file)
        assert all(t.abs().max() > 1e-4 for t in whole.values())
        torch.testing.assert_close(ours, whole, rtol=0, atol=1e-5)
    ours, whole = (json.loads((run / "result.json").read_text()) for run in (out, alone))
    assert ours["before"] == pytest.approx(whole["before"])


def test_two_ranks_are_one_rank(alone, two):
    """Invariant 3."""
    agree(two, alone)


def test_two_ranks_with_a_sharded_base_are_one_rank(alone, reward, tmp_path):
    """FSDP2, and activations computed twice: less memory, the same numbers."""
    on_two_ranks(tmp_path, *SMALL, "--reward_model", reward, "--shard",
                 "--activation_checkpointing")
    agree(tmp_path, alone)


def test_two_ranks_are_one_rank_in_phases_1_and_2(tmp_path):
    """Responses, feedback and R_φ: sampled, fitted and judged by all, its base sharded, and by
    reward_model.py alone. In float32; 27 rows, so that one rank has none of a last batch."""
    phases = [*SMALL, "--annotated_rows", 27, "--iterations", 1, "--learning_rate", 0]
    run_main(*phases, "--output_dir", tmp_path / "one")
    on_two_ranks(tmp_path / "two", *phases, "--shard")
    on_two_ranks(tmp_path / "fit", "--data", tmp_path / "one" / "feedback.jsonl",
                 "--micro_batch_size", 2, "--max_critique_tokens", 100, module=reward_model)
    for name in ("responses", "feedback"):
        texts = [(tmp_path / run / f"{name}.jsonl").read_bytes() for run in ("one", "two")]
        assert texts[0] == texts[1]
    one = tmp_path / "one" / "reward"
    for other in (tmp_path / "two" / "reward", tmp_path / "fit"):
        assert (other / "samples.jsonl").read_bytes() == (one / "samples.jsonl").read_bytes()
        ours, whole = (rows_of(path / "metrics.json")[0] for path in (other, one))
        for name in ("final_loss", "held_out_loss"):
            assert ours[name] == pytest.approx(whole[name], rel=1e-6)
        ours, whole = (load_file(path / "adapter" / "adapter_model.safetensors")
                       for path in (other, one))
        torch.testing.assert_close(ours, whole, rtol=0, atol=1e-4)


def test_a_rank_that_dies_ends_the_run(reward, tmp_path):
    """torchrun ends the other one."""
    process = start(2, tmp_path, "--reward_model", reward, "--iterations", 500)
    wait_for(tmp_path / "metrics.jsonl", process.poll)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    victim, = (int(pid) for pid in children
               if b"RANK=1" in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
    os.kill(victim, signal.SIGKILL)
    _, complained = process.communicate(timeout=300)
    assert process.returncode != 0 and "Signal 9" in complained


def test_a_rank_that_hangs_ends_the_run(reward, tmp_path):
    """Alive but silent: the other one waits --rank_timeout, says so, and ends."""
    ranks = on_two_ranks(tmp_path, *SMALL, "--reward_model", reward, "--iterations", 500,
                         "--rank_timeout", 0.05, join=False)
    wait_for(tmp_path / "metrics.jsonl", lambda: not all(p.is_alive() for p in ranks.processes))
    os.kill(ranks.pids()[1], signal.SIGSTOP)
    said = "rank 0 lost another rank, or waited --rank_timeout"
    with pytest.raises(ProcessRaisedException, match=said):
        while not ranks.join(grace_period=1):
            pass


def test_another_number_of_ranks_goes_on_and_says_that_it_is_not_exact(alone, two, reward,
                                                                       tmp_path, capsys):
    """A checkpoint of two ranks, taken up by one: it says so, and is still the unbroken run
    beyond rounding."""
    out = tmp_path / "one"
    shutil.copytree(two, out)
    for done in ("policy", "checkpoint-3"):
        shutil.rmtree(out / done)
    (out / "result.json").unlink()
    run_main(*SMALL, "--reward_model", reward, "--output_dir", out)
    said = "not bit-exact from here on: 2 ranks summed in another order"
    assert said in capsys.readouterr().out
    agree(out, alone)
