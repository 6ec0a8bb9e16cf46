"""Two ranks on one CPU (gloo) must give the same results as one process."""

import json
import os
import pickle
import shutil
import signal
import sys
import time
from datetime import timedelta
from itertools import pairwise
from pathlib import Path

import pytest
from data import InputError, write_rows
from helpers import free_port, often, read_jsonl, read_metrics, run_main
from hypothesis import given
from hypothesis.strategies import integers, lists
from safetensors.torch import load_file
from torch.multiprocessing import start_processes

import reward_model
import runtime
import text2grad
import toy
from runtime import on_rank0, token_groups

# A low learning rate, as AdamW turns rounding errors of small gradients into steps of its size.
SMALL = ["--iterations", 3, "--batch_size", 8, "--minibatch_size", 4, "--eval_rows", 3,
         "--micro_batch_tokens", 150, "--ppo_epochs", 2, "--max_new_tokens", 24,
         "--max_critique_tokens", 100, "--dtype", "float32", "--learning_rate", 2e-4]


def become_rank(rank, port):
    """Make this process, a fork of one that is not a rank, one of two ranks."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2",
                      MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    for loaded in [*sys.modules.values()]:
        if vars(loaded).get("WORLD_SIZE") == 1:         # read from the environment at import
            loaded.RANK, loaded.WORLD_SIZE = rank, 2


def as_rank(rank, port, module, flags):
    """Run a script's main as one of two ranks."""
    become_rank(rank, port)
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
def flags(tmp_path_factory):
    """The flags of all runs. Their posts have 25 to 100 tokens; a pass takes one or two."""
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    write_rows(path, [*toy.rows("train", 20), *toy.rows("train", 20, length=4)])
    return [*SMALL, "--data", path]


@pytest.fixture(scope="module")
def alone(flags, reward, tmp_path_factory):
    """The output directory of three iterations on one rank."""
    out = tmp_path_factory.mktemp("ranks") / "alone"
    run_main(*flags, "--reward_model", reward, "--output_dir", out)
    return out


@pytest.fixture(scope="module")
def two(flags, reward, tmp_path_factory):
    """The output directory of the same run on two ranks, each with a copy of the base."""
    out = tmp_path_factory.mktemp("ranks") / "two"
    on_two_ranks(out, *flags, "--reward_model", reward)
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
    """Equal texts; metrics and trained tensors are equal up to rounding (measured: 7e-7 of a
    metric and 3e-6 of a tensor's norm, less than a hundredth of the bounds)."""
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


def test_two_ranks_are_one_rank(alone, two):
    """Invariant 3."""
    assert_same_run(two, alone)


def test_two_ranks_with_a_sharded_base_are_one_rank(flags, alone, reward, tmp_path):
    """FSDP2, activation checkpointing and passes of one row do not change the numbers."""
    on_two_ranks(tmp_path, *flags, "--reward_model", reward, "--shard",
                 "--activation_checkpointing", "--micro_batch_tokens", 40)
    assert_same_run(tmp_path, alone)


def test_two_ranks_are_one_rank_in_phases_1_and_2(flags, tmp_path):
    """Phases 1 and 2 with a sharded base, and reward_model.py alone, equal one rank.

    With 27 rows one rank has no row in the last batch. The losses differ by 1.3e-6 at most. As
    critiques of R_φ may differ in a token, only the judged rows are compared.
    """
    phases = [*flags, "--annotated_rows", 27, "--iterations", 1, "--learning_rate", 0]
    for run in ("one", "two"):                             # phase 3 counts as finished
        (tmp_path / run).mkdir()
        write_rows(tmp_path / run / "result.json", [{"before": {}, "after": {}}])
        for side in ("before", "after"):
            write_rows(tmp_path / run / f"{side}_samples.jsonl", [{
                "id": "x", "prompt": "x", "response": "", "critique": "", "unreadable": "",
                "tokens": [], "delta": [], "scores": {}}])
        write_rows(tmp_path / run / "metrics.jsonl", [])
    run_main(*phases, "--output_dir", tmp_path / "one")
    on_two_ranks(tmp_path / "two", *phases, "--shard", "--micro_batch_tokens", 400)
    on_two_ranks(tmp_path / "fit", "--data", tmp_path / "one" / "feedback.jsonl",
                 "--micro_batch_tokens", 40, "--max_critique_tokens", 100, module=reward_model)
    for name in ("responses.jsonl", "feedback.jsonl"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    alone = tmp_path / "one" / "reward"
    for out in (tmp_path / "two" / "reward", tmp_path / "fit"):
        samples, expected = (read_jsonl(path / "samples.jsonl") for path in (out, alone))
        for name in ("id", "response", "annotator"):
            assert [row[name] for row in samples] == [row[name] for row in expected]
        metrics, expected = (read_jsonl(path / "metrics.json")[0] for path in (out, alone))
        for name in ("final_loss", "poor_recall"):
            assert metrics[name] == pytest.approx(expected[name], rel=1e-4)
        assert_close_in_norm(out / "adapter" / "adapter_model.safetensors",
                             alone / "adapter" / "adapter_model.safetensors", 1e-3)


@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL])
def test_a_rank_that_hangs_or_dies_ends_the_run(flags, reward, tmp_path, monkeypatch, how):
    """The other rank waits for half an hour at most (here 3 s), reports it and ends."""
    monkeypatch.setattr(runtime, "TIMEOUT", timedelta(seconds=3))
    ranks = on_two_ranks(tmp_path, *flags, "--reward_model", reward, "--iterations", 500,
                         join=False)
    wait_for(tmp_path / "metrics.jsonl", lambda: not all(p.is_alive() for p in ranks.processes))
    os.kill(ranks.pids()[1], how)
    ranks.processes[0].join(120)
    ranks.processes[1].kill()
    assert ranks.processes[0].exitcode == 1
    error = pickle.loads(Path(ranks.error_files[0]).read_bytes())
    assert "rank 0 lost another rank, or waited too long" in error


def wait_for_the_annotator(rank, port):
    """Rank 1 waits longer for rank 0 than a collective operation may take, but not for ever."""
    become_rank(rank, port)
    runtime.TIMEOUT = timedelta(seconds=1)
    runtime.start_ranks()
    on_rank0(time.sleep, 3)
    runtime.ANNOTATION_TIMEOUT = timedelta(seconds=1)
    with pytest.raises(InputError, match=f"rank {rank} lost another rank, or waited too long"):
        on_rank0(time.sleep, 3)


def test_the_ranks_wait_for_the_annotator():
    start_processes(wait_for_the_annotator, (free_port(),), 2, start_method="fork")


def test_another_number_of_ranks_continues(flags, alone, two, reward, tmp_path, capsys):
    """One rank resumes a checkpoint of two, and gives the same run up to rounding."""
    out = shutil.copytree(two, tmp_path / "one")
    shutil.rmtree(out / "policy")
    for name in ("checkpoint-000003.safetensors", "result.json"):
        (out / name).unlink()
    run_main(*flags, "--reward_model", reward, "--output_dir", out)
    assert "resumed after step 2" in capsys.readouterr().out
    assert_same_run(out, alone)
