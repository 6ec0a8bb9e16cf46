"""Resuming runs after SIGKILL, Ctrl-C or with damaged files."""

import gc
import os
import re
import shutil
import signal
from dataclasses import replace
from itertools import count
from multiprocessing import get_context
from pkgutil import resolve_name

import pytest
import torch
import policy
import reward_model
from data import InputError, write_rows
from helpers import (ROOT, SMALL, assert_equal_runs, assert_equal_tensors, error_message,
                     flip_bit, needs_posix, read_jsonl, run_main, toy_config)
from model import load_model, lora_parameters
from reward_model import z_loss
from runtime import checkpoints, save_settings

REWARD = "reward/adapter/adapter_model.safetensors"


def numbers(run) -> list[int]:
    """The steps of a run's checkpoints."""
    return [int(path.stem.removeprefix("checkpoint-")) for path in checkpoints(run)]


# ── Stopped runs

# Where a run is killed: a function, and the number of the call at which it is. Each phase is
# killed twice.
KILLS = [("text2grad.sample_rollouts", 1), ("text2grad.write_rows", 1),      # phase 1, respond
         ("ask.Journal.append", 50), ("annotate.write_rows", 1),             # phase 1, annotate
         ("reward_model.add_gradients", 5), ("runtime.save_tensors", 2),   # phase 2
         ("policy.ppo_update", 2), ("runtime.save_tensors", 3)]              # phase 3


def run_and_die(out, name, number):
    """Run all phases, and end this process by SIGKILL at a call of a function."""
    owner, _, attribute = name.rpartition(".")
    function = resolve_name(name)
    calls = count(1)

    def deadly(*arguments, **options):
        if next(calls) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **options)

    setattr(resolve_name(owner), attribute, deadly)
    for module in (reward_model, policy):                # they have imported save_tensors
        vars(module).update({attribute: deadly} if attribute in vars(module) else {})
    reward_model.SAVE_EVERY = 3
    run_main(*SMALL, "--output_dir", out)


@needs_posix
def test_killed_twice_in_each_phase_it_ends_with_the_same_bits(finished_run, tmp_path):
    for name, number in KILLS:
        process = get_context("fork").Process(target=run_and_die, args=(tmp_path, name, number))
        process.start()
        process.join()
        assert process.exitcode == -signal.SIGKILL, name
    assert numbers(tmp_path / "reward")[-1] == 28 and numbers(tmp_path) == [2, 3]
    run_main(*SMALL, "--output_dir", tmp_path)
    assert_equal_runs(tmp_path, finished_run)
    assert_equal_tensors(tmp_path / REWARD, finished_run / REWARD)


def test_stopped_before_its_first_line_it_ends_with_the_same_bits(unbroken, phase_3, tmp_path,
                                                                  spy):
    """Ctrl-C before the log of an iteration is written, with half a line in metrics.jsonl."""
    def stop(metrics, *_):
        if not (tmp_path / "metrics.jsonl").exists():
            append(b'{"iteration": 9')(tmp_path / "metrics.jsonl")
            raise KeyboardInterrupt

    spy("policy.log_iteration", stop)
    with pytest.raises(KeyboardInterrupt):
        run_main(*phase_3, "--output_dir", tmp_path)
    gc.collect()                                         # release the lock of the stopped run
    run_main(*phase_3, "--output_dir", tmp_path)
    assert_equal_runs(tmp_path, unbroken)


def fitted(out, stops_after=None, rows=30):
    """The losses, tensors and step count of a fit with dropout, which may stop early."""
    model, tokenizer = load_model(ROOT / "toy" / "base", device="cpu")
    pairs = [([5, 6, 7 + n % 9], [8 + n % 5, 9, 10 + n]) for n in range(rows)]
    config = toy_config(reward_batch_size=4, reward_lora_dropout=0.3, reward_epochs=2)
    steps = []

    def loss(model, part):
        if len(steps) + 1 == stops_after:
            raise KeyboardInterrupt
        steps.append(part)
        return z_loss(model, part)

    losses = reward_model.fit_adapter(model, pairs, "reward", config, loss, out=out)
    return losses, lora_parameters(model, "reward"), len(steps)


def test_a_fit_that_was_stopped_ends_with_the_same_bits(tmp_path, monkeypatch):
    """A fit killed in step 11 of 16 resumes after step 9, or 6 if that checkpoint is damaged.
    With other rows, or two damaged checkpoints, it starts anew."""
    monkeypatch.setattr(reward_model, "SAVE_EVERY", 3)
    losses, tensors, _ = fitted(None)
    run = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        fitted(run, stops_after=11)
    assert numbers(run) == [6, 9]
    for damaged, steps_left in enumerate((7, 10, 16)):
        out = shutil.copytree(run, tmp_path / str(damaged))
        for path in checkpoints(out)[2 - damaged :]:
            flip_bit(path, -8000)
        resumed_losses, resumed, steps = fitted(out)
        assert resumed_losses == losses and len(losses) == 16 and steps == steps_left
        assert all(torch.equal(a, b) for a, b in zip(tensors, resumed, strict=True))
    assert fitted(run, rows=31)[2] == 16 and numbers(run) == [15, 16]


# ── Damaged files

def append(data: bytes):
    """A function that appends bytes to a file."""
    return lambda path: path.write_bytes((path.read_bytes() if path.exists() else b"") + data)


def zeros(path):
    """A file as a power cut may leave it."""
    path.write_bytes(b"\0" * 99)


def remove(path):
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def damaged_copy(run, out, damages):
    """Copy a run directory, and damage files of the copy: {name: function}."""
    shutil.copytree(run, out, dirs_exist_ok=True)
    for name, damage in damages.items():
        damage(out / name)
    return out


# As if the run had stopped right after its last checkpoint, or that of phase 2.
STOPPED = dict.fromkeys(["policy", "result.json", "value_head.safetensors"], remove)
IN_PHASE_2 = STOPPED | dict.fromkeys(
    ["checkpoint-000003.safetensors", "checkpoint-000004.safetensors", "reward/adapter",
     "reward/metrics.json"], remove)
HALF = b'{"id": 1, "response": "half'
# Name → {file: its damage}, and what the next run prints.
DAMAGES = {
    "a flipped bit of a checkpoint": (
        STOPPED | {"checkpoint-000004.safetensors": lambda path: flip_bit(path, -8000)},
        ["skipping a checkpoint: .*/checkpoint-000004", "resumed after step 3"]),
    "half a character and zeros": (
        STOPPED | {"metrics.jsonl": append('{"iteration": 9, "x": "δ'.encode()[:-1]),
                   "samples.jsonl": append(b"\0" * 99), ".result.json.new": append(HALF)},
        ["metrics.jsonl, line", "samples.jsonl, line", "resumed after step 4"]),
    "no config.json": (STOPPED | {"config.json": remove}, ["resumed after step 4"]),
    "no result": ({"result.json": remove}, ["resumed after step 4"])}


@pytest.mark.parametrize("files, messages", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_run_is_named_and_ends_with_the_same_bits(unbroken, phase_3, tmp_path, capsys,
                                                            files, messages):
    out = damaged_copy(unbroken, tmp_path, files)
    run_main(*phase_3, "--output_dir", out)
    output = capsys.readouterr().out
    assert all(re.search(message, output) for message in messages), output
    assert_equal_runs(out, unbroken)
    assert numbers(out) == [3, 4] and [path.name for path in out.glob(".*")] == [".lock"]


@pytest.mark.parametrize("files, message", [
    ({"config.json": zeros}, "config.json, line 1: not rows of JSON"),
    ({"after_samples.jsonl": zeros}, "after_samples.jsonl, line 1: not rows of JSON"),
    ({"after_samples.jsonl": remove}, "after_samples.jsonl is missing"),
    ({"feedback.jsonl": remove, "responses.jsonl": append(HALF)}, "responses.jsonl, line 121"),
    (IN_PHASE_2 | {"feedback.jsonl": append(HALF)}, "feedback.jsonl, line 121: not rows of"),
    (STOPPED | {REWARD: lambda path: flip_bit(path, -8000)}, "adapter_model.* is .*damaged"),
    ({"config.json": append(b'{"version": 5}\n')}, "was written by version 5"),
    ({"config.json": lambda path: path.write_text('{"train": {}, "torch": "2.13"}')},
     "was written by version 4 of this project; choose another --output_dir")])
def test_a_damaged_run_without_a_way_out_is_refused(finished_run, tmp_path, files, message):
    """Also one of the fourth version."""
    out = damaged_copy(finished_run, tmp_path, files)
    assert re.search(message, error_message("text2grad.py", *SMALL, "--output_dir", out))


@pytest.mark.parametrize("old, new", [
    ('"kl"', '"kl2"'), ('"iteration": 1', '"iteration": "1"'), ('"kl": ', '"kl": "x", "x": ')])
def test_a_row_of_metrics_of_another_shape_is_named(unbroken, phase_3, tmp_path, capsys, old,
                                                    new):
    """In a finished run, which prints its result again, and in one that continues."""
    def change(path):
        path.write_text(path.read_text("utf-8").replace(old, new, 1), "utf-8")

    for number, files in enumerate(({}, {"result.json": remove})):
        out = damaged_copy(unbroken, tmp_path / str(number), files | {"metrics.jsonl": change})
        run_main(*phase_3, "--output_dir", out)
        assert "metrics.jsonl, line 1: skipping corrupt line" in capsys.readouterr().out


def test_a_lost_config_is_written_anew_only_if_a_checkpoint_has_the_same_settings(
        unbroken, phase_3, tmp_path):
    for number, (files, flags) in enumerate([
            ({}, ["--temperature", 0.5]),
            (dict.fromkeys(["checkpoint-000003.safetensors", "checkpoint-000004.safetensors"],
                           remove), [])]):
        out = damaged_copy(unbroken, tmp_path / str(number), files | {"config.json": remove})
        with pytest.raises(InputError, match="has lost config.json"):
            run_main(*phase_3, "--output_dir", out, *flags)
        gc.collect()


def test_the_file_of_a_critic_that_was_edited_is_named_and_a_commit_gives_a_warning(
        tmp_path, capsys):
    """Also: the remedies --timeout and --skip_failed are allowed; the fifth version's hash."""
    config = toy_config(output_dir=str(tmp_path))
    files = {"my_task.py": "1" * 64, "helper.py": "2" * 64}
    save_settings(config, tmp_path, function_files=files)
    (tmp_path / "responses.jsonl").touch()
    with pytest.raises(InputError, match="settings .helper.py was edited: restore it to "
                       "continue this run.; choose another --output_dir$") as error:
        save_settings(config, tmp_path, function_files=files | {"helper.py": "3" * 64})
    assert "111" not in str(error.value) and "333" not in str(error.value)
    row, = read_jsonl(tmp_path / "config.json")
    write_rows(tmp_path / "config.json", [row | {"commit": "old", "function_hash": "4" * 64}])
    changed = replace(config, timeout=1.0, skip_failed=True)
    save_settings(changed, tmp_path, function_files=files)
    assert "warning: commit was old, is " in capsys.readouterr().out
