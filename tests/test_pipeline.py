"""The scripts as a user runs them: all phases, resuming, real rows with a loopback annotator, and bad input."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import annotate
import reward_model
import text2grad
import toy
from checkpoints import newest_checkpoint
from loopback import loopback
from model import load_lora, use_lora

ROOT = Path(__file__).resolve().parent.parent
SMALL = ["--annotated_rows", "400", "--iterations", "4", "--batch_size", "8", "--minibatch_size", "8",
         "--eval_rows", "8", "--save_every", "2", "--ppo_epochs", "2"]


def run_main(monkeypatch, *flags, module=text2grad):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", [module.__name__, *map(str, flags)])
    module.main()


def fails(*command, cwd=ROOT, env=None) -> str:
    """Run a script that must fail; returns its error, which must be one line that starts with the script's name."""
    done = subprocess.run([sys.executable, *map(str, command)], cwd=cwd, capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": str(ROOT), **(env or {})})
    lines = [line for line in done.stderr.splitlines() if line and "%|" not in line]
    assert done.returncode == 1, done.stderr
    assert len(lines) == 1 and lines[0].startswith(Path(command[0]).stem + ":"), done.stderr
    return lines[0]


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory):
    """A small toy run, all three phases."""
    out = tmp_path_factory.mktemp("runs") / "small"
    with pytest.MonkeyPatch.context() as patch:
        run_main(patch, *SMALL, "--output_dir", out)
    return out


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_run_leaves_everything_that_the_readme_names(finished_run):  # Alg. 4 l.6
    metrics, samples = rows_of(finished_run / "metrics.jsonl"), rows_of(finished_run / "samples.jsonl")
    assert [row["iteration"] for row in metrics] == [1, 2, 3, 4] == [row["iteration"] for row in samples]
    named = {"delta", "labelled", "unmatched", "unparseable", "policy_kl", "kl", "entropy", "ratio", "clip_fraction",
             "value_clip_fraction", "explained_variance", "tokens_per_second", "seconds_rollout", "seconds_critique",
             "seconds_score", "seconds_update", "kl_coef", "learning_rate"}
    assert named <= metrics[0].keys()
    for row in samples:
        assert len(row["tokens"]) == len(row["delta"]) == len(row["advantage"])
        assert "".join(row["tokens"]) == row["response"]
    for file in ("config.json", "policy/adapter_model.safetensors", "reward/adapter/adapter_config.json",
                 "value_head.safetensors", "feedback.jsonl", "result.json", "phases.jsonl"):
        assert (finished_run / file).is_file(), file


def test_the_policy_that_is_saved_has_moved_from_the_base(finished_run):  # Alg. 1 l.18; Alg. 1 l.19; Alg. 4 l.33
    tensors = load_file(finished_run / "policy" / "adapter_model.safetensors")
    assert any(t.abs().max() > 0 for name, t in tensors.items() if "lora_B" in name)
    assert load_file(finished_run / "value_head.safetensors")["linear.weight"].abs().max() > 0
    _, last, state = newest_checkpoint(finished_run, warn=print)
    trained = [last[f"{i}.parameter"] for i in range(len(tensors))]                  # A and B of each layer, in order
    assert state["iteration"] == 4 and all(torch.equal(tensors[name], p) for name, p in zip(sorted(tensors), trained))


def test_the_policy_starts_as_the_base_and_every_value_at_zero(finished_run):  # Alg. 1 l.17; Alg. 4 l.5
    """No KL to π_ref in the first rollouts, and V = 0 explains nothing of the returns; both are so no more after it."""
    first, *later = rows_of(finished_run / "metrics.jsonl")
    assert abs(first["kl"]) < 1e-5 and first["explained_variance"] == 0
    assert all(row["kl"] > 1e-4 and row["explained_variance"] != 0 for row in later)


def test_r_phi_has_learned_to_write_the_feedback(finished_run, toy_model):  # Alg. 1 l.14; Alg. 3 l.8
    """The adapter that phase 2 left makes the annotated z far likelier than the base does."""
    model, tokenizer = toy_model
    load_lora(model, "reward", finished_run / "reward" / "adapter")
    _, pairs = reward_model.encode_rows(rows_of(finished_run / "feedback.jsonl")[:20], tokenizer, 512)
    loss = {}
    for name in (None, "reward"):
        with use_lora(model, name), torch.no_grad():
            loss[name] = reward_model.z_loss(model, pairs, 0)[0].item()
    assert loss["reward"] < 0.25 * loss[None]


def test_a_stretch_of_work_has_the_seconds_from_its_begin_to_its_end(monkeypatch):  # Table 13
    seconds, clock = {}, iter([100.0, 107.5])
    monkeypatch.setattr(reward_model.time, "time", lambda: next(clock))
    with reward_model.timed("critique", seconds, "nothing"):
        pass
    assert seconds == {"critique": 7.5}


def test_a_second_run_reuses_every_phase_and_says_so(finished_run, monkeypatch, capsys):
    before = {p: p.stat().st_mtime_ns for p in finished_run.rglob("*") if p.is_file()}
    run_main(monkeypatch, *SMALL, "--output_dir", finished_run)
    said = capsys.readouterr().out
    assert said.count("reused") == 3 and "fact accuracy" in said
    assert before == {p: p.stat().st_mtime_ns for p in finished_run.rglob("*") if p.is_file()}


def test_other_settings_in_the_same_directory_are_refused(finished_run, monkeypatch):
    with pytest.raises(annotate.InputError, match="iterations was 4, is 5"):
        run_main(monkeypatch, *SMALL, "--iterations", 5, "--output_dir", finished_run)


def before_phase_3(finished_run, out):
    """A copy of the run as it stood when phase 2 was done."""
    shutil.copytree(finished_run, out)
    shutil.rmtree(out / "policy")
    for checkpoint in out.glob("checkpoint-*"):
        shutil.rmtree(checkpoint)
    for file in ("result.json", "value_head.safetensors", "metrics.jsonl", "samples.jsonl"):
        (out / file).unlink()
    config = json.loads((out / "config.json").read_text()) | {"output_dir": str(out)}
    (out / "config.json").write_text(json.dumps(config))


def same_phase_3(out, finished_run):
    """Phase 3 ended with the same weights, bit for bit, and said the same numbers on the way."""
    for file in ("policy/adapter_model.safetensors", "value_head.safetensors"):
        ours, theirs = load_file(out / file), load_file(finished_run / file)
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[k], theirs[k]) for k in ours), file
    timeless = lambda row: {k: v for k, v in row.items() if not k.startswith(("seconds", "tokens_per"))}
    assert [timeless(r) for r in rows_of(out / "metrics.jsonl")] == [timeless(r) for r in rows_of(finished_run / "metrics.jsonl")]


def test_without_asserts_the_numbers_are_the_same(finished_run, tmp_path):
    """python -O: the asserts only look. That -O removed them is seen from one that fails."""
    out, command = tmp_path / "optimised", [sys.executable, "-O", "text2grad.py", *SMALL, "--output_dir"]
    before_phase_3(finished_run, out)
    environment = os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    done = subprocess.run([*command, str(out)], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    same_phase_3(out, finished_run)
    fails_with = "import torch, text2grad as t\nx = torch.ones(1, 2)\nprint(t.nl_gradient_loss(x, x[0], x))"
    loud, silent = (subprocess.run([sys.executable, *flags, "-c", fails_with], cwd=ROOT, capture_output=True, text=True)
                    for flags in ([], ["-O"]))
    assert "AssertionError: Definition 1" in loud.stderr and silent.returncode == 0, silent.stderr


@pytest.mark.parametrize("killed_after", [1, 3])
def test_a_run_killed_in_phase_3_ends_with_the_same_bits(finished_run, tmp_path, monkeypatch, killed_after):
    """Killed before the first checkpoint (2) and after it."""
    out = tmp_path / "killed"
    before_phase_3(finished_run, out)
    whole = text2grad.one_iteration

    def stops(*args):
        if args[-1] == killed_after:
            raise KeyboardInterrupt
        return whole(*args)

    monkeypatch.setattr(text2grad, "one_iteration", stops)
    with pytest.raises(KeyboardInterrupt):
        run_main(monkeypatch, *SMALL, "--output_dir", out)
    monkeypatch.setattr(text2grad, "one_iteration", whole)
    run_main(monkeypatch, *SMALL, "--output_dir", out)
    same_phase_3(out, finished_run)


def test_two_ranks_train_and_agree(finished_run, tmp_path):
    """torchrun with two processes; the adapters they save come from gradients summed over both."""
    out = tmp_path / "ranks"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "text2grad.py", *SMALL,
               "--iterations", "1", "--reward_model", str(finished_run / "reward" / "adapter"), "--output_dir", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    row, = rows_of(out / "metrics.jsonl")
    assert row["response_tokens"] * 8 == row["tokens"] and abs(row["ratio"] - 1) < 0.5
    assert any(t.abs().max() > 0 for name, t in load_file(out / "policy" / "adapter_model.safetensors").items()
               if "lora_B" in name)


# ── Real checkpoint, real rows, an OpenAI-compatible server ────────────────────────────────────────────

@pytest.fixture()
def server(monkeypatch):
    """A loopback chat-completions server; counts its calls."""
    with loopback() as server:
        monkeypatch.setenv("OPENAI_API_KEY", "none")
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        monkeypatch.setenv("OPENAI_BASE_URL", server.url)
        yield server


def test_all_phases_on_a_real_checkpoint_with_real_rows(shared, server, tmp_path, monkeypatch, capsys):  # Alg. 1 l.6
    """stories260K, SLF5K posts, feedback over HTTP; the second run asks the server nothing."""
    base = tmp_path / "stories260K"
    shutil.copytree(shared / "models" / "stories260K", base)
    for path in (base, *base.iterdir()):
        path.chmod(0o755)
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 2048}))     # the posts are long
    flags = ["--task", "slf5k", "--model", base, "--data", shared / "data" / "slf5k.jsonl", "--output_dir", tmp_path / "run",
             "--iterations", 2, "--batch_size", 4, "--minibatch_size", 4, "--micro_batch_size", 2, "--max_new_tokens", 24,
             "--max_critique_tokens", 64, "--max_prompt_tokens", 800, "--eval_rows", 2, "--temperature", 1.0]
    run_main(monkeypatch, *flags)
    asked = server.stats()["calls"]
    feedback = rows_of(tmp_path / "run" / "feedback.jsonl")
    assert asked == len(feedback) >= 7
    assert all(row["annotator"] == "gpt-4o" and row["spans"] is not None for row in feedback)
    assert "left out" in capsys.readouterr().out
    run_main(monkeypatch, *flags)
    assert server.stats()["calls"] == asked and capsys.readouterr().out.count("reused") == 3


# ── Bad input ───────────────────────────────────────────────────────────────────────────────────────────

def test_a_missing_data_file_is_named(tmp_path):
    assert "nowhere.jsonl: no such file" in fails("text2grad.py", "--task", "slf5k", "--data", "nowhere.jsonl", "--model",
                                                  "toy/base", "--output_dir", tmp_path / "run")


def test_a_start_that_failed_does_not_stand_in_the_way_of_the_next(tmp_path):
    """Its settings bind nobody; those of a run that has made something do (test_other_settings_…)."""
    assert "needs --data" in fails("text2grad.py", "--task", "slf5k", "--output_dir", tmp_path / "r")
    assert "nowhere.jsonl: no such file" in fails("text2grad.py", "--task", "slf5k", "--data", "nowhere.jsonl",
                                                  "--output_dir", tmp_path / "r")


def test_a_missing_field_is_named_with_file_and_line(tmp_path):
    data = tmp_path / "rows.jsonl"
    data.write_text('{"prompt": "a"}\n{"question": "b"}\n')
    error = fails("text2grad.py", "--task", "ultrafeedback", "--data", data, "--model", "toy/base", "--output_dir", tmp_path / "r")
    assert f"{data}, line 2" in error and "'prompt'" in error


def test_an_unknown_task_is_refused_by_every_script():
    for script in ("annotate.py", "reward_model.py", "text2grad.py"):
        assert "no task 'poetry'" in fails(script, "--task", "poetry")


def test_a_missing_model_is_named(tmp_path):
    assert str(tmp_path / "none") in fails("text2grad.py", "--model", tmp_path / "none", "--output_dir", tmp_path / "r")


def test_a_prompt_longer_than_the_context_is_named_with_the_remedy(tmp_path):
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps({"id": f"r{i}", "prompt": "word " * (5 + 600 * (i == 3))}) + "\n" for i in range(6)))
    command = ["text2grad.py", "--task", "ultrafeedback", "--data", data, "--model", "toy/base", "--max_critique_tokens", 32,
               "--output_dir", tmp_path / "r"]
    error = fails(*command, "--max_new_tokens", 16)
    remedy = re.search(r"set (--max_prompt_tokens) (\d+) to keep the 5 rows that fit", error)
    assert "r3" in error and remedy, error
    judged_by_r3 = fails(*command, "--max_new_tokens", 16, *remedy.groups())          # the split of seed 0 has no other
    assert "no row is left to judge by" in judged_by_r3 and "another --seed" in judged_by_r3
    assert "lower --max_new_tokens" in (hopeless := fails(*command, "--max_new_tokens", 480)) and "to keep" not in hopeless


def test_an_adapter_for_another_base_is_refused(finished_run, shared, tmp_path):
    data = tmp_path / "rows.jsonl"
    data.write_text('{"prompt": "once"}\n' * 4)
    error = fails("text2grad.py", "--task", "ultrafeedback", "--model", shared / "models" / "stories260K", "--data", data,
                  "--reward_model", finished_run / "reward" / "adapter", "--output_dir", tmp_path / "r", "--max_new_tokens", 8,
                  "--max_critique_tokens", 8)
    assert "another base" in error


def test_a_full_disk_stops_the_run_before_it_starts(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1 << 40, 1 << 40, 1 << 20))
    with pytest.raises(annotate.InputError, match="1 MB are free"):
        run_main(monkeypatch, *SMALL, "--output_dir", tmp_path / "r")


def test_a_disk_that_fills_while_feedback_is_written_leaves_no_half_file(tmp_path):
    """A file-size limit stands in for a full disk: the write fails as it would there; with room, it goes on."""
    data, out = tmp_path / "rows.jsonl", tmp_path / "feedback.jsonl"
    rows = [row | {"response": row["reference"]} for row in toy.rows("train", 50)]
    annotate.write_rows(data, rows)
    script = (f"import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
              f"resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))\n"
              f"import annotate\nsys.argv = ['annotate', '--task', 'toy', '--critic', 'toy:critique', '--data', {str(data)!r}, "
              f"'--output', {str(out)!r}]\nannotate.run(annotate.main, 'annotate')")
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and "File too large" in done.stderr and "Traceback" not in done.stderr
    assert not out.exists()
    kept = out.with_name("feedback.jsonl.journal").read_text().split("\n")[:-1]
    assert kept and {json.loads(line)["id"] for line in kept} < {row["id"] for row in rows}
    roomy = script.replace("20000", "2000000")
    done = subprocess.run([sys.executable, "-c", roomy], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and f"{50 - len(kept)} asked for now" in done.stdout
    assert [row["id"] for row in rows_of(out)] == [row["id"] for row in rows]


def test_a_flag_with_an_impossible_value_is_refused():
    assert "--kl_estimator k2" in fails("text2grad.py", "--kl_estimator", "k2")
    assert "--price_out nan" in fails("text2grad.py", "--price_out", "nan")
    assert "no --critic (toy:critique)" in fails("text2grad.py", "--price_in", 1, "--price_out", 1, "--max_usd", 1)
    assert "--batch_size 0" in fails("text2grad.py", "--batch_size", "0")


# ── The reward model's own script ───────────────────────────────────────────────────────────────────────

def test_reward_model_script_learns_and_reports(finished_run, tmp_path, monkeypatch, capsys):
    run_main(monkeypatch, "--data", finished_run / "feedback.jsonl", "--output_dir", tmp_path / "r", "--epochs", 1,
             "--held_out", 4, module=reward_model)
    metrics = json.loads((tmp_path / "r" / "metrics.json").read_text())
    assert metrics["final_loss"] < 6 and metrics["held_out_rows"] == 4
    assert "next: python text2grad.py" in capsys.readouterr().out
