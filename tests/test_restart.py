"""Stopping and going on: SIGKILL at any instant, damaged checkpoints, harmful steps, memory."""

import gc
import json
import os
import random
import shutil
import subprocess
import sys
import time

import pytest
import torch
from conftest import ROOT
from runs import PHASE_3, assert_equal_runs, reward, rows_of, run_main  # noqa: F401
from safetensors.torch import load_file

import text2grad
from data import InputError
from model import checkpoints

KILLS = int(os.environ.get("KILLS", 1))         # random instants of SIGKILL: KILLS=20 pytest …


def start(reward, out, *flags):
    """A run of phase 3 as a process of its own."""
    words = [sys.executable, "text2grad.py", *PHASE_3, "--reward_model", reward, "--output_dir", out,
             *flags]
    return subprocess.Popen(list(map(str, words)), cwd=ROOT, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, text=True)


@pytest.fixture(scope="module")
def unbroken(reward, tmp_path_factory):
    """A run that nothing stopped, and its seconds."""
    out, started = tmp_path_factory.mktemp("restart") / "unbroken", time.time()
    process = start(reward, out)
    _, complained = process.communicate(timeout=300)
    assert process.returncode == 0, complained
    (out / "seconds").write_text(str(time.time() - started))
    return out


@pytest.fixture()
def broken(unbroken, tmp_path):
    """A copy of it as it stood between its last checkpoint and its end."""
    out = tmp_path / "broken"
    shutil.copytree(unbroken, out)
    shutil.rmtree(out / "policy")
    for file in ("result.json", "value_head.safetensors"):
        (out / file).unlink()
    return out


@pytest.mark.parametrize("number", range(KILLS))
def test_killed_at_a_random_instant_it_ends_with_the_same_bits(unbroken, reward, tmp_path, number,
                                                               monkeypatch):
    """SIGKILL, then the same command: the unbroken run's adapter, optimizer, metrics, samples."""
    out, seconds = tmp_path / "killed", float((unbroken / "seconds").read_text())
    process = start(reward, out)
    try:
        process.communicate(timeout=random.Random(number).uniform(0.4, 1) * seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
    run_main(monkeypatch, *PHASE_3, "--reward_model", reward, "--output_dir", out)
    assert_equal_runs(out, unbroken)


@pytest.mark.parametrize("killed_after", [1, 3])
def test_stopped_between_two_lines_it_ends_with_the_same_bits(unbroken, reward, tmp_path,
                                                              monkeypatch, killed_after):
    """Before the first checkpoint (2) and after it; metrics.jsonl ends in half a line."""
    out, whole = tmp_path / "stopped", text2grad.record

    def stops(metrics, *args):
        whole(metrics, *args)
        if metrics["iteration"] == killed_after:
            with open(out / "metrics.jsonl", "a") as file:
                file.write('{"iteration": 9')
            raise KeyboardInterrupt

    monkeypatch.setattr(text2grad, "record", stops)
    flags = [*PHASE_3, "--reward_model", reward, "--output_dir", out]
    with pytest.raises(KeyboardInterrupt):
        run_main(monkeypatch, *flags)
    gc.collect()                                         # the stopped run's lock goes with it
    monkeypatch.setattr(text2grad, "record", whole)
    run_main(monkeypatch, *flags)
    assert_equal_runs(out, unbroken)


def test_checkpoints_hold_the_optimizer_and_only_the_newest_stay(unbroken):
    """Two of three; AdamW's moments and step for every trained tensor, six times four steps."""
    assert [p.name for p in checkpoints(unbroken)] == ["checkpoint-4", "checkpoint-6"]
    tensors = load_file(unbroken / "checkpoint-6" / "tensors.safetensors")
    trained = {name.split(".")[0] for name in tensors}
    keys = "parameter", "exp_avg", "exp_avg_sq", "step"
    assert tensors.keys() == {f"{i}.{key}" for i in trained for key in keys}
    assert all(tensors[f"{i}.step"] == 24 for i in trained)


def test_after_a_flipped_bit_the_run_ends_with_the_same_bits(broken, unbroken, reward, monkeypatch,
                                                             capsys):
    """It names the checkpoint, does two iterations again and replaces it."""
    path = broken / "checkpoint-6" / "tensors.safetensors"
    data = bytearray(path.read_bytes())
    data[-1000] ^= 1
    path.write_bytes(data)
    run_main(monkeypatch, *PHASE_3, "--reward_model", reward, "--output_dir", broken)
    said = capsys.readouterr().out
    assert f"{broken / 'checkpoint-6'}" in said and "resumed after iteration 4" in said
    assert_equal_runs(broken, unbroken)


# ── Guards

def without_gradient(loss, stats):
    """The loss that is logged is finite, its gradient is not."""
    return loss * float("nan"), stats


def far_off(loss, stats):
    return loss, stats | {"ratio": torch.tensor(10.5)}


def infinite(loss, stats):
    return loss, stats | {"policy_loss": torch.tensor(float("inf"))}


def test_harmful_steps_are_skipped_and_counted(reward, tmp_path, monkeypatch):
    """Three of 24 steps, each harmful in its own way: AdamW counts 21, and the run ends well."""
    whole, calls = text2grad.minibatch_loss, []

    def spoil(*args):
        calls.append(1)
        harm = {2: without_gradient, 7: far_off, 12: infinite}.get(len(calls))
        return harm(*whole(*args)) if harm else whole(*args)

    monkeypatch.setattr(text2grad, "minibatch_loss", spoil)
    run_main(monkeypatch, *PHASE_3, "--reward_model", reward, "--output_dir", tmp_path / "run")
    metrics = rows_of(tmp_path / "run" / "metrics.jsonl")
    assert [row["skipped_steps"] for row in metrics] == [1, 1, 1, 0, 0, 0]
    tensors = load_file(tmp_path / "run" / "checkpoint-6" / "tensors.safetensors")
    assert all(t.isfinite().all() for t in tensors.values()) and tensors["0.step"] == 21


def test_an_iteration_without_a_good_step_ends_the_run(reward, tmp_path, monkeypatch):
    """The weights of the last checkpoint stay, and the error says what to turn."""
    whole, calls = text2grad.minibatch_loss, []

    def spoil(*args):
        calls.append(1)
        return without_gradient(*whole(*args)) if len(calls) > 12 else whole(*args)

    monkeypatch.setattr(text2grad, "minibatch_loss", spoil)
    with pytest.raises(InputError, match="finite.*lower --learning_rate"):
        run_main(monkeypatch, *PHASE_3, "--reward_model", reward, "--output_dir", tmp_path / "run")
    assert [p.name for p in checkpoints(tmp_path / "run")] == ["checkpoint-2"]


def test_out_of_memory_says_which_flags_to_turn(reward, tmp_path, monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has")

    monkeypatch.setattr(text2grad, "ppo_update", full)
    with pytest.raises(InputError, match="out of memory.*--micro_batch_size.*--shard"):
        run_main(monkeypatch, *PHASE_3, "--reward_model", reward, "--output_dir", tmp_path / "run")


def test_metrics_and_state_are_json_alone(unbroken):
    """No pickle lies in a run directory (invariant 8)."""
    kinds = {path.suffix for path in unbroken.rglob("*") if path.is_file()}
    assert kinds <= {".json", ".jsonl", ".safetensors", ".html", ""}
    state = json.loads((unbroken / "checkpoint-6" / "state.json").read_text())
    assert state["iteration"] == 6 and state["ranks"] == 1
