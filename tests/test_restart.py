"""Resuming runs after SIGKILL or with damaged files, and harmful steps."""

import gc
import json
import math
import random
import re
import shutil
from itertools import count

import pytest
import torch
from safetensors.torch import load_file
import policy
import reward_model
from data import InputError
from helpers import (PHASE_3, ROOT, SLOW, SMALL, assert_equal_runs, assert_equal_tensors,
                     error_message, flip_bit, kill_after, read_jsonl, run_main)
from model import load_model, lora_parameters
from reward_model import RewardConfig, z_loss
from runtime import checkpoints


@pytest.fixture()
def flags(reward):
    """The flags of the run `unbroken`; the output directory follows."""
    return [*PHASE_3, "--reward_model", reward, "--output_dir"]


# ── Stopped runs

@pytest.mark.parametrize("number", range(20 if SLOW else 1))
def test_killed_at_a_random_instant_it_ends_with_the_same_bits(finished_run, unbroken, flags,
                                                               tmp_path, number):
    """After SIGKILL the same command gives the adapters, metrics and samples of an
    uninterrupted run. SLOW=1 kills in any phase, otherwise only in phase 3."""
    reference, flags, begins = (
        (finished_run, [*SMALL, "--output_dir"], "responses.jsonl") if SLOW else
        (unbroken, flags, "before_samples.jsonl"))
    start, end = ((reference / name).stat().st_mtime for name in (begins, "result.json"))
    out = tmp_path / "killed"
    kill_after(begins, out, *flags[:-1], seconds=random.Random(number).random() * (end - start))
    run_main(*flags, out)
    assert_equal_runs(out, reference)
    if SLOW:
        assert_equal_tensors(*(run / "reward/adapter/adapter_model.safetensors"
                               for run in (out, reference)))


@pytest.mark.parametrize("killed_after", [1, 3])
def test_stopped_between_two_lines_it_ends_with_the_same_bits(unbroken, flags, tmp_path, spy,
                                                              killed_after):
    """Stop before and after the first checkpoint (2), with half a line in metrics.jsonl."""
    out, stops = tmp_path / "stopped", [killed_after + 1]

    def stop(metrics, *_):
        if metrics["iteration"] in stops:
            stops.clear()
            append(b'{"iteration": 9')(out / "metrics.jsonl")
            raise KeyboardInterrupt

    spy("policy.write_metrics", stop)
    with pytest.raises(KeyboardInterrupt):
        run_main(*flags, out)
    gc.collect()                                         # release the lock of the stopped run
    run_main(*flags, out)
    assert_equal_runs(out, unbroken)


def fitted(out, stops_after=None, seed=0):
    """The losses, tensors and step count of a fit with dropout, which may stop early."""
    model, tokenizer = load_model(ROOT / "toy" / "base", device="cpu")
    pairs = [([5, 6, 7 + n % 9], [8 + n % 5, 9, 10 + n]) for n in range(30)]
    config = RewardConfig(batch_size=4, epochs=2, lora_dropout=0.3, seed=seed)
    steps = []

    def loss(model, part):
        if len(steps) + 1 == stops_after:
            raise KeyboardInterrupt
        steps.append(part)
        return z_loss(model, part)

    losses = reward_model.fit_adapter(model, pairs, "reward", config, loss, out=out)
    return losses, lora_parameters(model, "reward"), len(steps)


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


# ── Damaged files

def append(data: bytes):
    """A function that appends bytes to a file."""
    return lambda path: path.write_bytes((path.read_bytes() if path.exists() else b"") + data)


def zeros(path):
    """A file as a power cut may leave it."""
    path.write_bytes(b"\0" * 99)


def remove(path):
    shutil.rmtree(path) if path.is_dir() else path.unlink()


# As if the run had stopped right after its last checkpoint.
STOPPED = dict.fromkeys(["policy", "result.json", "value_head.safetensors"], remove)
# Name → {file: its damage}, and what the next run prints.
DAMAGES = {
    "a flipped bit of a checkpoint": (
        STOPPED | {"checkpoint-6/tensors.safetensors": lambda path: flip_bit(path, -8000)},
        ["skipping .*/checkpoint-6 ", "resumed after iteration 4"]),
    "half a character, zeros and half a value": (
        STOPPED | {"metrics.jsonl": append('{"iteration": 9, "x": "δ'.encode()[:-1]),
                   "samples.jsonl": append(b"\0" * 99), "phases.jsonl": append(b"[1, 2\n"),
                   "result.json": lambda path: path.write_bytes(b"")},   # counts as missing
        ["metrics.jsonl, line", "samples.jsonl, line", "phases.jsonl, line"]),
    "no result": ({"result.json": remove}, ["resumed after iteration 6"]),
    "a damaged result": ({"result.json": zeros}, ["/result.json is missing or has changed"]),
    "no policy": ({"policy": remove}, ["/policy/.* is missing or has changed"]),
    "a damaged value head": ({"value_head.safetensors": zeros},
                             ["/value_head.safetensors is missing or has changed"]),
    "no samples": ({"after_samples.jsonl": remove},
                   ["/after_samples.jsonl is missing or has changed"]),
}


@pytest.mark.parametrize("files, messages", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_run_is_named_and_ends_with_the_same_bits(unbroken, flags, tmp_path, capsys,
                                                            files, messages):
    out = shutil.copytree(unbroken, tmp_path / "run")
    for name, damage in files.items():
        damage(out / name)
    run_main(*flags, out)
    output = capsys.readouterr().out
    assert all(re.search(message, output) for message in messages), output
    assert_equal_runs(out, unbroken)
    assert [p.name for p in checkpoints(out)] == ["checkpoint-4", "checkpoint-6"]


@pytest.mark.parametrize("files, message", [
    ({"config.json": zeros}, "config.json, line 1: not JSON.*fix it or remove"),
    ({"policy": remove, "checkpoint-4": remove, "checkpoint-6": remove},
     "policy/.* is missing or has changed.*restore it, or remove")])
def test_a_damaged_run_without_a_way_out_is_refused(unbroken, flags, tmp_path, files, message):
    out = shutil.copytree(unbroken, tmp_path / "run")
    for name, damage in files.items():
        damage(out / name)
    assert re.search(message, error_message("text2grad.py", *flags, out))


def test_a_lost_log_is_named_and_files_of_killed_writers_are_replaced(unbroken, flags, tmp_path,
                                                                      capsys):
    out = shutil.copytree(unbroken, tmp_path / "run")
    for name, damage in {**STOPPED, "metrics.jsonl": remove}.items():
        damage(out / name)
    for name in (".result.json.new", ".samples.jsonl.new", ".policy.new/adapter_config.json",
                 ".policy.old/adapter_config.json"):
        (out / name).parent.mkdir(exist_ok=True)
        (out / name).write_text("{")
    run_main(*flags, out)
    message = f"{out / 'metrics.jsonl'} has changed since the checkpoint after iteration 6"
    assert message in capsys.readouterr().out
    assert [path.name for path in out.glob(".*")] == [".lock"]


def test_metrics_and_state_are_json_alone(unbroken):
    """A run directory contains no pickle files (invariant 8)."""
    kinds = {path.suffix for path in unbroken.rglob("*") if path.is_file()}
    assert kinds <= {".json", ".jsonl", ".journal", ".safetensors", ".html", ""}
    state = json.loads((unbroken / "checkpoint-6" / "state.json").read_text())
    assert state["iteration"] == 6 and state["ranks"] == 1


# ── Harmful steps

# A factor of the loss, and changed metrics. The first loss is logged before, and is finite.
WITHOUT_GRADIENT = math.nan, {}
FAR_OFF = 1.0, {"ratio": 10.5}
INFINITE = 1.0, {"policy_loss": math.inf}


def spoil(monkeypatch, harms):
    """Apply harms[n] to the loss and the metrics of the n-th step."""
    unpatched, steps = policy.minibatch_loss, count(1)

    def spoiled(*arguments):
        loss, stats = unpatched(*arguments)
        factor, changes = harms.get(next(steps), (1.0, {}))
        return loss * factor, stats | {name: torch.tensor(x) for name, x in changes.items()}

    monkeypatch.setattr("policy.minibatch_loss", spoiled)


def test_harmful_steps_are_skipped_and_counted(flags, tmp_path, monkeypatch, capsys):
    """Six of 24 steps are harmful, so AdamW takes 18. A warning appears if most steps of an
    iteration are skipped."""
    spoil(monkeypatch, {2: WITHOUT_GRADIENT, 7: FAR_OFF, 12: INFINITE, 21: FAR_OFF,
                        22: INFINITE, 24: FAR_OFF})
    run_main(*flags, tmp_path)
    metrics = read_jsonl(tmp_path / "metrics.jsonl")
    assert [row["skipped_steps"] for row in metrics] == [1, 1, 1, 0, 0, 3]
    assert capsys.readouterr().out.count("3 of 4 optimizer steps were harmful") == 1
    tensors = load_file(tmp_path / "checkpoint-6" / "tensors.safetensors")
    assert all(t.isfinite().all() for t in tensors.values()) and tensors["0.step"] == 18


def test_an_iteration_without_a_good_step_ends_the_run(flags, tmp_path, monkeypatch):
    """The last checkpoint stays, and the error suggests a lower --learning_rate."""
    spoil(monkeypatch, dict.fromkeys(range(13, 17), WITHOUT_GRADIENT))
    with pytest.raises(InputError, match="finite.*lower --learning_rate"):
        run_main(*flags, tmp_path)
    assert [p.name for p in checkpoints(tmp_path)] == ["checkpoint-2"]


def test_a_learning_rate_that_ruins_the_policy_is_reported(flags, tmp_path, capsys):
    run_main(*flags, tmp_path, "--iterations", 2, "--learning_rate", 1)
    warnings = re.findall(r"warning: (\w+) is .*lower --learning_rate", capsys.readouterr().out)
    assert {"policy_kl", "kl"} <= {*warnings}
