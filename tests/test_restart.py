"""Stopping and going on: checkpoints, SIGKILL, SIGTERM, damaged and foreign checkpoints, full disks, skipped steps."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file

import checkpoints as mechanisms
import text2grad
import toy
from annotate import InputError, get_task, parse_feedback
from conftest import ROOT
from model import load_model, save_lora
from reward_model import RewardConfig, encode_rows, timed, train_reward_model

FLAGS = ["--iterations", 6, "--batch_size", 8, "--minibatch_size", 4, "--ppo_epochs", 2, "--max_new_tokens", 24,
         "--max_critique_tokens", 100, "--eval_rows", 3, "--save_every", 2]
KILLS = int(os.environ.get("KILLS", 2))                   # random instants of SIGKILL: KILLS=20 pytest tests/test_restart.py


@pytest.fixture(scope="session")
def reward(tmp_path_factory):
    """An adapter "reward" that writes readable critiques of toy summaries, made once for all tests that need one."""
    out = tmp_path_factory.getbasetemp() / "reward"
    if not out.exists():
        task, rng, rows = get_task("toy"), random.Random(0), []
        for row in toy.rows("train", 240):
            response = toy.write_summary(row["facts"], rng, 0.5)
            read = parse_feedback(toy.critique(row, response))
            rows.append({"prompt": task.policy_prompt(row), "response": response, "critique": read.critique,
                         "good_spans": read.good_spans, "poor_spans": read.poor_spans})
        model, tokenizer = load_model(ROOT / "toy" / "base", device="cpu")
        _, pairs = encode_rows(rows, tokenizer, 512)
        train_reward_model(model, tokenizer, pairs, RewardConfig(batch_size=8))
        save_lora(model, "reward", out)
    return out


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def timeless(path):
    """The metrics without the fields that measure time."""
    return [{k: v for k, v in row.items() if not k.startswith(("seconds", "tokens_per"))} for row in rows_of(path)]


def start(reward, out, *flags):
    """A run of phase 3 as a process of its own."""
    words = [sys.executable, "text2grad.py", *FLAGS, "--reward_model", reward, "--output_dir", out, *flags]
    return subprocess.Popen(list(map(str, words)), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process):
    """(exit status, what it said, its errors but for the progress bars)"""
    said, complained = process.communicate(timeout=300)
    return process.returncode, said, "\n".join(line for line in complained.splitlines() if "%|" not in line and line)


def run(monkeypatch, reward, out, *flags):
    """The same run within this process."""
    monkeypatch.chdir(ROOT)
    words = ["text2grad", *FLAGS, "--reward_model", reward, "--output_dir", out, *flags]
    monkeypatch.setattr(sys, "argv", list(map(str, words)))
    text2grad.main()


@pytest.fixture(scope="module")
def unbroken(reward, tmp_path_factory):
    """A run that nothing stopped, and its seconds."""
    out, started = tmp_path_factory.mktemp("restart") / "unbroken", time.time()
    status, _, complained = finish(start(reward, out))
    assert status == 0, complained
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


def equal(a, b):
    """All that two runs leave is the same, bit for bit: trained tensors, optimizer, metrics, samples."""
    for file in ("policy/adapter_model.safetensors", "value_head.safetensors", "checkpoint-6/tensors.safetensors"):
        ours, theirs = load_file(a / file), load_file(b / file)
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[k], theirs[k]) for k in ours), file
    assert timeless(a / "metrics.jsonl") == timeless(b / "metrics.jsonl")
    assert (a / "samples.jsonl").read_bytes() == (b / "samples.jsonl").read_bytes()
    assert json.loads((a / "result.json").read_text())["after"] == json.loads((b / "result.json").read_text())["after"]


# ── Exact restart ───────────────────────────────────────────────────────────────────────────────────────

@pytest.mark.parametrize("number", range(KILLS))
def test_killed_at_a_random_instant_it_ends_with_the_same_bits(unbroken, reward, tmp_path, number):
    """SIGKILL, then the same command: adapter, value head, optimizer, metrics and samples of the unbroken run."""
    out, seconds = tmp_path / "killed", float((unbroken / "seconds").read_text())
    process = start(reward, out)
    try:
        process.communicate(timeout=random.Random(number).uniform(0.3, 1) * seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
    status, _, complained = finish(start(reward, out))
    assert status == 0, complained
    equal(out, unbroken)


def test_checkpoints_hold_the_optimizer_and_only_the_newest_stay(unbroken):
    """--keep_checkpoints 2 of 3; AdamW's two moments and its step for every trained tensor, six iterations of four steps."""
    assert [p.name for p in mechanisms.checkpoints(unbroken)] == ["checkpoint-4", "checkpoint-6"]
    tensors = load_file(unbroken / "checkpoint-6" / "tensors.safetensors")
    trained = {name.split(".")[0] for name in tensors}
    assert tensors.keys() == {f"{i}.{key}" for i in trained for key in ("parameter", "exp_avg", "exp_avg_sq", "step")}
    assert all(tensors[f"{i}.step"] == 24 for i in trained)


def test_sigterm_finishes_the_iteration_saves_and_leaves_with_0(unbroken, reward, tmp_path):
    """Stopped within phase 3, far from --save_every; the next command goes on to the bits of the unbroken run."""
    out = tmp_path / "stopped"
    process = start(reward, out, "--save_every", 100)
    while not (out / "metrics.jsonl").exists() or not rows_of(out / "metrics.jsonl"):
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    status, said, complained = finish(process)
    done = len(rows_of(out / "metrics.jsonl"))
    assert status == 0 and 1 <= done < 6, complained
    assert f"stopped by SIGTERM: checkpoint-{done} is saved" in said and "goes on from it" in said
    assert finish(start(reward, out, "--save_every", 100))[0] == 0
    equal(out, unbroken)


# ── Damaged and foreign checkpoints ─────────────────────────────────────────────────────────────────────

DAMAGES = {"no tensors": lambda p: (p / "tensors.safetensors").unlink(),
           "half the tensors": lambda p: os.truncate(p / "tensors.safetensors", (p / "tensors.safetensors").stat().st_size // 2),
           "empty tensors": lambda p: os.truncate(p / "tensors.safetensors", 0),
           "no state": lambda p: (p / "state.json").unlink(),
           "half the state": lambda p: (p / "state.json").write_text('{"iterat')}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_taken(tmp_path, damage):
    """Of three, the two newest are damaged; of one, there is none left to take."""
    for i in (1, 2, 3):
        mechanisms.save_checkpoint(tmp_path / f"checkpoint-{i}", {"a": torch.full((50,), i)}, {"iteration": i})
    warnings = []
    for i in (2, 3):
        DAMAGES[damage](tmp_path / f"checkpoint-{i}")
    path, tensors, state = mechanisms.newest_checkpoint(tmp_path, warnings.append)
    assert (path.name, tensors["a"].tolist(), state) == ("checkpoint-1", [1] * 50, {"iteration": 1})
    assert [f"checkpoint-{i} is damaged" in line and f"checkpoint-{i - 1} instead" in line
            for i, line in zip((3, 2), warnings, strict=True)] == [True, True]
    DAMAGES[damage](path)
    assert mechanisms.newest_checkpoint(tmp_path, warnings.append)[0] is None and "going on from the start" in warnings[-1]


def test_after_a_damaged_checkpoint_the_run_ends_with_the_same_bits(broken, unbroken, reward, monkeypatch, capsys):
    """It does two iterations again and replaces the damaged checkpoint."""
    DAMAGES["half the tensors"](broken / "checkpoint-6")
    run(monkeypatch, reward, broken)
    said = capsys.readouterr().out
    assert f"warning: {broken / 'checkpoint-6'} is damaged" in said and "resumed after iteration 4" in said
    equal(broken, unbroken)


def edited(path, **changes):
    """Change some settings in a checkpoint's state."""
    state = json.loads((path / "state.json").read_text())
    state["settings"] |= changes
    (path / "state.json").write_text(json.dumps(state))


@pytest.mark.parametrize("changes, named", [({"base": "0123"}, "base was 0123"), ({"clip": 0.1}, "clip was 0.1, is 0.2"),
                                            ({"lora_shapes": [[4, 128]]}, r"lora_shapes was \[\[4, 128\]\], is \[\[16, 128\]")])
def test_a_checkpoint_of_another_base_shape_or_setting_is_refused(broken, reward, monkeypatch, changes, named):
    """Not skipped: an older one would be as wrong. The checkpoint stays as it is."""
    edited(broken / "checkpoint-6", **changes)
    before = (broken / "checkpoint-6" / "tensors.safetensors").read_bytes()
    with pytest.raises(InputError, match=f"checkpoint-6 was made with other settings.*{named}"):
        run(monkeypatch, reward, broken)
    assert (broken / "checkpoint-6" / "tensors.safetensors").read_bytes() == before


def test_a_disk_that_fills_while_saving_keeps_the_last_good_checkpoint(tmp_path):
    """A file-size limit stands in for it; the error names the directory, the room that is needed and what stays."""
    script = ("import resource, signal, sys, torch\nfrom pathlib import Path\nfrom annotate import run\nimport checkpoints as model\n"
              "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\nout = Path(sys.argv[1])\n"
              "model.keep_checkpoint(out, {'a': torch.ones(9)}, {'iteration': 1}, 1)\n"
              "resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))\n"
              "run(lambda: model.keep_checkpoint(out, {'a': torch.ones(500_000)}, {'iteration': 2}, 1), 'x', model.ModelError)\n")
    done = subprocess.run([sys.executable, "-c", script.replace("model.ModelError", "(model.ModelError,)"), str(tmp_path)],
                          cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert str(tmp_path / "checkpoint-2") in done.stderr and "needs 2.0 MB" in done.stderr
    assert f"last good checkpoint: {tmp_path / 'checkpoint-1'}" in done.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint-1"]
    assert torch.equal(mechanisms.load_checkpoint(tmp_path / "checkpoint-1")[0]["a"], torch.ones(9))


def test_what_killed_runs_left_half_written_goes_with_the_next_checkpoint(tmp_path):
    (tmp_path / ".checkpoint-1.new-123").mkdir()
    mechanisms.keep_checkpoint(tmp_path, {"a": torch.ones(1)}, {"iteration": 2}, 1)
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint-2"]


# ── Guards ──────────────────────────────────────────────────────────────────────────────────────────────

def without_gradient(loss, stats):
    return loss * float("nan"), stats                     # the loss that is logged is finite, its gradient is not


def far_off(loss, stats):
    return loss, stats | {"ratio": 10.5}


def infinite(loss, stats):
    return loss, stats | {"policy_loss": float("inf")}


def test_harmful_steps_are_skipped_and_counted(reward, tmp_path, monkeypatch):
    """Three of 24 steps, each harmful in its own way: AdamW counts 21, nothing is not finite, and the run ends well."""
    def spoil(*args):
        calls.append(1)
        loss, stats = whole(*args)
        return {2: without_gradient, 7: far_off, 12: infinite}.get(len(calls), lambda *both: both)(loss, stats)

    whole, calls = text2grad.minibatch_loss, []
    monkeypatch.setattr(text2grad, "minibatch_loss", spoil)
    run(monkeypatch, reward, tmp_path / "run")
    assert [row["skipped_steps"] for row in rows_of(tmp_path / "run" / "metrics.jsonl")] == [1, 1, 1, 0, 0, 0]
    tensors = load_file(tmp_path / "run" / "checkpoint-6" / "tensors.safetensors")
    assert all(t.isfinite().all() for t in tensors.values()) and tensors["0.step"] == 21


def test_too_many_skipped_steps_in_a_row_end_the_run_and_name_the_checkpoint(reward, tmp_path, monkeypatch):
    """Three in a row are too many; two, a good one and two are not. The count goes on across iterations."""
    def spoil(*args):
        calls.append(1)
        loss, stats = whole(*args)
        return without_gradient(loss, stats) if len(calls) in (1, 2, 4, 5, 15, 16, 17) else (loss, stats)

    whole, calls = text2grad.minibatch_loss, []                    # four steps per iteration: 15 to 17 are in 4 and 5
    monkeypatch.setattr(text2grad, "minibatch_loss", spoil)
    with pytest.raises(InputError, match=r"3 optimizer steps in a row were skipped.*last good checkpoint: .*checkpoint-4"):
        run(monkeypatch, reward, tmp_path / "run", "--max_skipped", 3)
    assert len(calls) == 17
    assert [row["skipped_steps"] for row in rows_of(tmp_path / "run" / "metrics.jsonl")] == [3, 1, 0, 2]
    assert json.loads((tmp_path / "run" / "checkpoint-4" / "state.json").read_text())["skipped"] == 2


def test_cuda_out_of_memory_says_which_flag_to_turn(broken, reward, monkeypatch):
    """One line for each phase; the error itself is PyTorch's."""
    def full(*args, **options):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has")

    shutil.rmtree(broken / "checkpoint-6")
    for name, said in (("sample_rollouts", "in rollout: lower --rollout_batch_size"), ("add_scores", "in score: lower --micro_batch_size"),
                       ("ppo_update", "in update: lower --micro_batch_size.*--activation_checkpointing or --shard")):
        with monkeypatch.context() as patch, pytest.raises(InputError, match=said):
            patch.setattr(text2grad, name, full)
            run(patch, reward, broken)
    with pytest.raises(InputError, match="in phase 2: lower --x"), timed("phase 2", {}, "--x"):
        full()
