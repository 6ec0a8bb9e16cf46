"""Two ranks on one CPU (gloo) must give the same results as one process."""

import json
import os
import pickle
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest
from data import write_rows
from helpers import free_port, read_jsonl, read_metrics, run_main
from safetensors.torch import load_file
from torch.multiprocessing import start_processes

import reward_model
import text2grad

# A low learning rate, as AdamW turns rounding errors of small gradients into steps of its size.
SMALL = ["--iterations", 3, "--batch_size", 8, "--minibatch_size", 4, "--micro_batch_size", 2,
         "--ppo_epochs", 2, "--max_new_tokens", 24, "--max_critique_tokens", 100,
         "--eval_rows", 3, "--dtype", "float32", "--learning_rate", 2e-4]


def as_rank(rank, port, module, flags):
    """Run a script's main as one of two ranks, in a fork of a process that is not a rank."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2",
                      MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    for loaded in [*sys.modules.values()]:
        if vars(loaded).get("WORLD_SIZE") == 1:         # read from the environment at import
            loaded.RANK, loaded.WORLD_SIZE = rank, 2
    run_main(*flags, module=module)


def on_two_ranks(out, *flags, module=text2grad, join=True):
    """Run a script on two ranks by fork, which saves torchrun's loading time (cf. `start`)."""
    arguments = free_port(), module, (*flags, "--output_dir", out)
    return start_processes(as_rank, arguments, 2, join, start_method="fork")


def wait_for(path, ended):
    """Wait at most two minutes until the file exists; fail if the run ends before."""
    for _ in range(2400):
        if path.exists():
            return
        assert not ended(), "the run ended too early"
        time.sleep(0.05)
    raise AssertionError(f"{path} does not exist after two minutes")


@pytest.fixture(scope="module")
def alone(reward, tmp_path_factory):
    """The output directory of three iterations on one rank."""
    out = tmp_path_factory.mktemp("ranks") / "alone"
    run_main(*SMALL, "--reward_model", reward, "--output_dir", out)
    return out


@pytest.fixture(scope="module")
def two(reward, tmp_path_factory):
    """The output directory of the same run on two ranks, each with a copy of the base."""
    out = tmp_path_factory.mktemp("ranks") / "two"
    on_two_ranks(out, *SMALL, "--reward_model", reward, "--save_every", 2)
    return out


def assert_close_in_norm(file, expected_file, tolerance):
    """The norm of each tensor's error is below `tolerance` times the expected norm. Single
    elements may differ by more, as AdamW amplifies the rounding of gradients near 0."""
    tensors = load_file(file)
    for name, expected in load_file(expected_file).items():
        assert expected.abs().max() > 1e-4
        error = (tensors[name] - expected).norm() / expected.norm()
        assert error < tolerance, f"{name}: {error:.1e}"


def assert_same_run(out, alone):
    """Equal texts; metrics and trained tensors are equal up to rounding (measured: 1.3e-6 of a
    metric and 1.8e-5 of a tensor's norm, less than a fiftieth of the bounds)."""
    samples, expected = (read_jsonl(run / "samples.jsonl") for run in (out, alone))
    for name in ("response", "critique"):
        assert [row[name] for row in samples] == [row[name] for row in expected]
    metrics, expected = (read_metrics(run / "metrics.jsonl") for run in (out, alone))
    assert len(metrics) == 3 and any(row["delta"] for row in expected)
    for row, expected_row in zip(metrics, expected, strict=True):
        assert row == pytest.approx(expected_row, rel=1e-4, abs=1e-4)
    for file in ("policy/adapter_model.safetensors", "value_head.safetensors"):
        assert_close_in_norm(out / file, alone / file, 1e-3)
    result, expected = (json.loads((run / "result.json").read_text()) for run in (out, alone))
    assert result["before"] == pytest.approx(expected["before"])


def test_two_ranks_are_one_rank(alone, two):
    """Invariant 3."""
    assert_same_run(two, alone)


def test_two_ranks_with_a_sharded_base_are_one_rank(alone, reward, tmp_path):
    """FSDP2 and activation checkpointing do not change the numbers."""
    on_two_ranks(tmp_path, *SMALL, "--reward_model", reward, "--shard",
                 "--activation_checkpointing")
    assert_same_run(tmp_path, alone)


def test_two_ranks_are_one_rank_in_phases_1_and_2(tmp_path):
    """Phases 1 and 2 with a sharded base, and reward_model.py alone, equal one rank.

    With 27 rows one rank has no row in the last batch. The losses differ by 1.3e-6 at most. As
    critiques of R_φ may differ in a token, only the judged rows are compared.
    """
    phases = [*SMALL, "--annotated_rows", 27, "--iterations", 1, "--learning_rate", 0]
    for run in ("one", "two"):                             # phase 3 counts as finished
        (tmp_path / run).mkdir()
        write_rows(tmp_path / run / "result.json", [{"before": {}, "after": {}}])
        (tmp_path / run / "metrics.jsonl").touch()
        sample = dict.fromkeys(("id", "prompt", "response", "critique", "unreadable"), "")
        for side in ("before", "after"):
            write_rows(tmp_path / run / f"{side}_samples.jsonl",
                       [sample | {"tokens": [], "delta": [], "scores": {}}])
    run_main(*phases, "--output_dir", tmp_path / "one")
    on_two_ranks(tmp_path / "two", *phases, "--shard")
    on_two_ranks(tmp_path / "fit", "--data", tmp_path / "one" / "feedback.jsonl",
                 "--micro_batch_size", 2, "--max_critique_tokens", 100, module=reward_model)
    for name in ("responses.jsonl", "feedback.jsonl"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    alone = tmp_path / "one" / "reward"
    for out in (tmp_path / "two" / "reward", tmp_path / "fit"):
        samples, expected = (read_jsonl(path / "samples.jsonl") for path in (out, alone))
        for name in ("id", "response", "annotator"):
            assert [row[name] for row in samples] == [row[name] for row in expected]
        metrics, expected = (read_jsonl(path / "metrics.json")[0] for path in (out, alone))
        for name in ("final_loss", "held_out_loss"):
            assert metrics[name] == pytest.approx(expected[name], rel=1e-4)
        assert_close_in_norm(out / "adapter" / "adapter_model.safetensors",
                             alone / "adapter" / "adapter_model.safetensors", 1e-3)


@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL])
def test_a_rank_that_hangs_or_dies_ends_the_run(reward, tmp_path, how):
    """The other rank waits --rank_timeout at most, reports it and ends."""
    ranks = on_two_ranks(tmp_path, *SMALL, "--reward_model", reward, "--iterations", 500,
                         "--rank_timeout", 0.05, join=False)
    wait_for(tmp_path / "metrics.jsonl", lambda: not all(p.is_alive() for p in ranks.processes))
    os.kill(ranks.pids()[1], how)
    ranks.processes[0].join(120)
    ranks.processes[1].kill()
    assert ranks.processes[0].exitcode == 1
    error = pickle.loads(Path(ranks.error_files[0]).read_bytes())
    assert "rank 0 lost another rank, or waited --rank_timeout" in error


def test_another_number_of_ranks_continues_with_a_warning(alone, two, reward, tmp_path,
                                                          capsys):
    """One rank resumes a checkpoint of two, says so, and gives the same run up to rounding."""
    out = tmp_path / "one"
    shutil.copytree(two, out)
    for done in ("policy", "checkpoint-3"):
        shutil.rmtree(out / done)
    (out / "result.json").unlink()
    run_main(*SMALL, "--reward_model", reward, "--output_dir", out)
    assert "no longer bit-exact, because 2 ranks wrote" in capsys.readouterr().out
    assert_same_run(out, alone)
