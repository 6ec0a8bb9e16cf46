"""Resuming runs after SIGKILL or damaged files; harmful steps and out-of-memory errors."""

import gc
import json
import random
import re
import shutil
import subprocess
import sys
import time
from functools import partial

import pytest
import torch
from safetensors.torch import load_file
import reward_model
import policy
from data import InputError, run_script
from helpers import (PHASE_3, ROOT, SLOW, SMALL, assert_equal_runs, assert_equal_tensors,
                     error_message, read_jsonl, run_main)
from model import load_model, lora_parameters
from reward_model import RewardConfig, z_loss
from runtime import checkpoints


@pytest.fixture()
def broken(unbroken, tmp_path):
    """A copy of the run `unbroken`, as if it had stopped right after its last checkpoint."""
    out = tmp_path / "broken"
    shutil.copytree(unbroken, out)
    shutil.rmtree(out / "policy")
    for file in ("result.json", "value_head.safetensors"):
        (out / file).unlink()
    return out


@pytest.mark.parametrize("number", range(20 if SLOW else 1))
def test_killed_at_a_random_instant_it_ends_with_the_same_bits(finished_run, unbroken, reward,
                                                               tmp_path, number):
    """After SIGKILL the same command gives the adapters, metrics and samples of an
    uninterrupted run. SLOW=1 kills in any phase, otherwise only in phase 3."""
    reference, flags, begins = (
        (finished_run, SMALL, "responses.jsonl") if SLOW else
        (unbroken, [*PHASE_3, "--reward_model", reward], "before_samples.jsonl"))
    start, end = ((reference / name).stat().st_mtime for name in (begins, "result.json"))
    words = [sys.executable, "text2grad.py", *flags, "--output_dir", out := tmp_path / "killed"]
    process = subprocess.Popen(list(map(str, words)), cwd=ROOT, stdout=subprocess.DEVNULL)
    while process.poll() is None and not (out / begins).exists():
        time.sleep(0.05)
    try:
        process.communicate(timeout=random.Random(number).random() * (end - start))
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
    run_main(*flags, "--output_dir", out)
    assert_equal_runs(out, reference)
    if SLOW:
        assert_equal_tensors(*(run / "reward/adapter/adapter_model.safetensors"
                               for run in (out, reference)))


@pytest.mark.parametrize("killed_after", [1, 3])
def test_stopped_between_two_lines_it_ends_with_the_same_bits(unbroken, reward, tmp_path,
                                                              monkeypatch, killed_after):
    """Stop before and after the first checkpoint (2), with half a line in metrics.jsonl."""
    out, unpatched = tmp_path / "stopped", policy.write_metrics

    def stops(metrics, *args):
        unpatched(metrics, *args)
        if metrics["iteration"] == killed_after:
            with open(out / "metrics.jsonl", "a") as file:
                file.write('{"iteration": 9')
            raise KeyboardInterrupt

    monkeypatch.setattr("policy.write_metrics", stops)
    flags = [*PHASE_3, "--reward_model", reward, "--output_dir", out]
    with pytest.raises(KeyboardInterrupt):
        run_main(*flags)
    gc.collect()                                         # release the lock of the stopped run
    monkeypatch.setattr("policy.write_metrics", unpatched)
    run_main(*flags)
    assert_equal_runs(out, unbroken)


def test_after_a_flipped_bit_the_run_ends_with_the_same_bits(broken, unbroken, reward, capsys):
    """The run names the damaged checkpoint, repeats two iterations and replaces it."""
    path = broken / "checkpoint-6" / "tensors.safetensors"
    data = bytearray(path.read_bytes())
    data[-1000] ^= 1
    path.write_bytes(data)
    run_main(*PHASE_3, "--reward_model", reward, "--output_dir", broken)
    output = capsys.readouterr().out
    assert f"{broken / 'checkpoint-6'}" in output and "resumed after iteration 4" in output
    assert_equal_runs(broken, unbroken)


def test_torn_lines_are_left_out_and_said(broken, unbroken, reward, capsys):
    """Files may end in half a UTF-8 character, zeros after a power cut, or half a value."""
    torn = {"metrics.jsonl": '{"iteration": 9, "x": "δ'.encode()[:-1],
            "samples.jsonl": b"\0" * 99, "phases.jsonl": b"[1, 2\n"}
    for name, damage in torn.items():
        with open(broken / name, "ab") as file:
            file.write(damage)
    (broken / "result.json").write_bytes(b"")              # counts as missing
    run_main(*PHASE_3, "--reward_model", reward, "--output_dir", broken)
    output = capsys.readouterr().out
    assert all(f"{broken / name}, line" in output for name in torn)
    assert_equal_runs(broken, unbroken)


def test_damaged_settings_are_named(unbroken, reward, tmp_path):
    out = shutil.copytree(unbroken, tmp_path / "run")
    (out / "config.json").write_bytes(b"\0" * 99)
    message = error_message("text2grad.py", *PHASE_3, "--reward_model", reward,
                            "--output_dir", out)
    assert re.search("config.json, line 1: not JSON.*fix it or remove", message)


@pytest.mark.parametrize("name", ["result.json", "policy", "value_head.safetensors",
                                  "after_samples.jsonl"])
@pytest.mark.parametrize("is_removed", [False, True])
def test_a_lost_result_is_rebuilt_from_the_last_checkpoint(unbroken, reward, tmp_path, capsys,
                                                           name, is_removed):
    out = shutil.copytree(unbroken, tmp_path / "run")
    file = out / name / "adapter_config.json" if name == "policy" else out / name
    if is_removed:
        shutil.rmtree(out / name) if name == "policy" else file.unlink()
    else:
        file.write_bytes(b"\0" * 99)
    run_main(*PHASE_3, "--reward_model", reward, "--output_dir", out)
    output = capsys.readouterr().out
    if (name, is_removed) != ("result.json", True):              # then the phase has not ended
        assert f"{file} is missing or has changed" in output
    assert "resumed after iteration 6" in output
    assert_equal_runs(out, unbroken)


def test_without_a_checkpoint_a_damaged_result_is_refused(unbroken, reward, tmp_path):
    out = shutil.copytree(unbroken, tmp_path / "run")
    shutil.rmtree(out / "policy")
    for path in checkpoints(out):
        shutil.rmtree(path)
    message = error_message("text2grad.py", *PHASE_3, "--reward_model", reward,
                            "--output_dir", out)
    assert re.search("policy/.* is missing or has changed.*restore it, or remove", message)


def test_a_lost_log_is_named_and_files_of_killed_writers_are_replaced(broken, reward, capsys):
    (broken / "metrics.jsonl").unlink()
    for name in (".result.json.new", ".samples.jsonl.new"):
        (broken / name).write_text("{")
    for name in (".policy.new", ".policy.old"):
        (broken / name).mkdir()
        (broken / name / "adapter_config.json").write_text("{")
    run_main(*PHASE_3, "--reward_model", reward, "--output_dir", broken)
    assert f"{broken / 'metrics.jsonl'} has changed since the checkpoint after iteration 6" in capsys.readouterr().out
    assert [path.name for path in broken.glob(".*")] == [".lock"]


def fitted(out, stops_after=None, seed=0):
    """The losses, tensors and step count of a fit with dropout, which may stop early."""
    model, tokenizer = load_model(ROOT / "toy" / "base", device="cpu")
    pairs = [([5, 6, 7 + n % 9], [8 + n % 5, 9, 10 + n]) for n in range(30)]
    config = RewardConfig(batch_size=4, epochs=2, lora_dropout=0.3, seed=seed)

    def loss(model, part):
        if len(calls := [*seen, 1]) == stops_after:
            raise KeyboardInterrupt
        seen[:] = calls
        return z_loss(model, part)

    seen = []
    losses = reward_model.fit_adapter(model, pairs, "reward", config, loss, out=out)
    return losses, lora_parameters(model, "reward"), len(seen)


def test_a_fit_that_was_stopped_ends_with_the_same_bits(tmp_path, monkeypatch):
    """A fit killed in step 11 of 16 resumes after step 9; with another seed it starts over."""
    monkeypatch.setattr(reward_model, "SAVE_EVERY", 3)
    losses, tensors, _ = fitted(None)
    with pytest.raises(KeyboardInterrupt):
        fitted(tmp_path, stops_after=11)
    assert [p.name for p in checkpoints(tmp_path)] == ["checkpoint-6", "checkpoint-9"]
    resumed_losses, resumed, steps = fitted(tmp_path)
    assert resumed_losses == losses and len(losses) == 16 and steps == 7
    assert all(torch.equal(a, b) for a, b in zip(tensors, resumed, strict=True))
    assert fitted(tmp_path, seed=1)[2] == 16


# ── Guards

def without_gradient(loss, stats):
    """The logged loss is finite, but its gradient is not."""
    return loss * float("nan"), stats


def far_off(loss, stats):
    return loss, stats | {"ratio": torch.tensor(10.5)}


def infinite(loss, stats):
    return loss, stats | {"policy_loss": torch.tensor(float("inf"))}


def test_harmful_steps_are_skipped_and_counted(reward, tmp_path, monkeypatch, capsys):
    """Six of 24 steps are harmful, so AdamW takes 18. A warning appears if most steps of an
    iteration are skipped."""
    unpatched, calls = policy.minibatch_loss, []

    def spoil(*args):
        calls.append(1)
        harm = {2: without_gradient, 7: far_off, 12: infinite, 21: far_off, 22: infinite,
                24: far_off}.get(len(calls))
        return harm(*unpatched(*args)) if harm else unpatched(*args)

    monkeypatch.setattr("policy.minibatch_loss", spoil)
    run_main(*PHASE_3, "--reward_model", reward, "--output_dir", tmp_path / "run")
    metrics = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert [row["skipped_steps"] for row in metrics] == [1, 1, 1, 0, 0, 3]
    assert capsys.readouterr().out.count("3 of 4 optimizer steps were harmful") == 1
    tensors = load_file(tmp_path / "run" / "checkpoint-6" / "tensors.safetensors")
    assert all(t.isfinite().all() for t in tensors.values()) and tensors["0.step"] == 18


def test_a_step_size_that_ruins_the_policy_is_said(reward, tmp_path, capsys):
    run_main(*PHASE_3, "--iterations", 2, "--learning_rate", 1, "--reward_model", reward,
             "--output_dir", tmp_path / "run")
    assert "warning: fact accuracy is unhealthy: -" in capsys.readouterr().out


def test_an_iteration_without_a_good_step_ends_the_run(reward, tmp_path, monkeypatch):
    """The last checkpoint stays, and the error suggests a lower --learning_rate."""
    unpatched, calls = policy.minibatch_loss, []

    def spoil(*args):
        calls.append(1)
        return without_gradient(*unpatched(*args)) if len(calls) > 12 else unpatched(*args)

    monkeypatch.setattr("policy.minibatch_loss", spoil)
    with pytest.raises(InputError, match="finite.*lower --learning_rate"):
        run_main(*PHASE_3, "--reward_model", reward, "--output_dir", tmp_path / "run")
    assert [p.name for p in checkpoints(tmp_path / "run")] == ["checkpoint-2"]


def test_out_of_memory_says_which_flags_to_turn(reward, tmp_path, monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. "
                                     "GPU 0 has")

    monkeypatch.setattr("policy.ppo_update", full)
    run = partial(run_main, *PHASE_3, "--reward_model", reward, "--output_dir", tmp_path / "run")
    with pytest.raises(SystemExit, match="out of memory.*--micro_batch_size.*--shard"):
        run_script(run, "text2grad")


def test_metrics_and_state_are_json_alone(unbroken):
    """A run directory contains no pickle files (invariant 8)."""
    kinds = {path.suffix for path in unbroken.rglob("*") if path.is_file()}
    assert kinds <= {".json", ".jsonl", ".journal", ".safetensors", ".html", ""}
    state = json.loads((unbroken / "checkpoint-6" / "state.json").read_text())
    assert state["iteration"] == 6 and state["ranks"] == 1
