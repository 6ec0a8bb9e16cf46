"""The scripts as a user runs them: all phases, reuse, real rows with a loopback annotator,
a task of one's own, and bad input."""

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from importlib.machinery import SourceFileLoader

import pytest
import torch
from conftest import ROOT, fails
from loopback import loopback
from runs import PHASE_3, SMALL, assert_equal_runs, rows_of, run_main
from safetensors.torch import load_file

import reward_model
import text2grad
from data import get_task, read_rows, write_rows
from model import ValueHead, add_lora, load_lora, lock_directory, newest_checkpoint, use_lora
from report import NOTES
from reward_model import Judgement
from text2grad import Config, evaluate, train


def refused(*flags) -> str:
    return fails("text2grad.py", *flags)


# ── What a run leaves

def test_a_run_leaves_everything_that_the_readme_names(finished_run):
    metrics, samples = (rows_of(finished_run / f"{name}.jsonl")
                        for name in ("metrics", "samples"))
    assert [row["iteration"] for row in metrics] == [1, 2, 3, 4]
    assert [row["iteration"] for row in samples] == [1, 2, 3, 4]
    assert set().union(*metrics) == {"iteration", *get_task("toy").truth, *NOTES}
    assert all(row["seconds_update"] > 0 for row in metrics)
    for row in samples:
        assert len(row["tokens"]) == len(row["delta"]) == len(row["advantage"])
        assert "".join(row["tokens"]) == row["response"]
    for file in ("config.json", "policy/adapter_model.safetensors", "value_head.safetensors",
                 "reward/adapter/adapter_config.json", "feedback.jsonl", "result.json",
                 "phases.jsonl", "report.html", "before_samples.jsonl", "after_samples.jsonl"):
        assert (finished_run / file).is_file(), file


def test_the_policy_that_is_saved_has_moved_from_the_base(finished_run):
    """Alg. 4 l.29–33: the newest checkpoint's weights are the ones that are saved,
    and not B = 0."""
    tensors = load_file(finished_run / "policy" / "adapter_model.safetensors")
    assert any(t.abs().max() > 0 for name, t in tensors.items() if "lora_B" in name)
    head = load_file(finished_run / "value_head.safetensors")
    assert head["linear.weight"].abs().max() > 0
    _, last, state = newest_checkpoint(finished_run)
    trained = [last[f"{i}.parameter"] for i in range(len(tensors))]
    assert state["iteration"] == 4
    assert all(torch.equal(tensors[name], p) for name, p in zip(sorted(tensors), trained))


def test_the_policy_starts_as_the_base_and_every_value_at_zero(finished_run):
    """Alg. 4 l.5: no KL to π_ref in the first rollouts and V = 0;
    both are so no more after it."""
    first, *later = rows_of(finished_run / "metrics.jsonl")
    assert abs(first["kl"]) < 1e-5 and first["explained_variance"] == 0
    assert all(row["kl"] != 0 and row["explained_variance"] != 0 for row in later)


def test_the_kl_coefficient_follows_nats_per_response(toy_model, tmp_path):
    """β after an iteration, recomputed from the KL that it logged; a target near it, so that
    the error is not clipped and nats per token would give another β (Ziegler 2.2)."""
    model, tokenizer = toy_model
    for p in add_lora(model, "policy", 16, 32)[1::2]:                    # B of every layer
        p.data.normal_(std=0.15)
    rows = get_task("toy").rows("train", 8, 0)
    config = Config(iterations=2, batch_size=8, minibatch_size=8, learning_rate=0.0)
    batch = text2grad.sample_rollouts(model, tokenizer, text2grad.batch_rows(rows, config, 0),
                                      config, "policy", torch.Generator().manual_seed(0))
    text2grad.add_scores(batch, model, ValueHead(128), config)
    log_ratio = (batch.logprobs_old - batch.logprobs_ref) * batch.mask
    kl = log_ratio.sum(1).mean().item()
    config = replace(config, kl_target=kl / 1.1)                         # error: .1
    train(model, tokenizer, rows, config, tmp_path, judged_by_length)
    first, second = rows_of(tmp_path / "metrics.jsonl")
    assert first["kl"] == pytest.approx(kl, rel=1e-4) and kl > 5
    assert second["kl_coef"] == pytest.approx(first["kl_coef"] * (1 + 0.1 * 8 / 10_000),
                                              rel=1e-7)


def test_r_phi_has_learned_to_write_the_feedback(finished_run, toy_model):
    """Alg. 3 l.8: the adapter of phase 2 makes the annotated z far likelier
    than the base does."""
    model, tokenizer = toy_model
    load_lora(model, "reward", finished_run / "reward" / "adapter")
    rows = rows_of(finished_run / "feedback.jsonl")[:20]
    _, pairs = reward_model.encode_rows(rows, tokenizer, 512)
    loss = {}
    for name in (None, "reward"):
        with use_lora(model, name), torch.no_grad():
            loss[name] = reward_model.z_loss(model, pairs).item()
    assert loss["reward"] < 0.3 * loss[None]


def judged_by_length(rollouts, model, tokenizer, config):
    """A critic that needs no R_φ: δ_1 = length of the response."""
    return [Judgement("", [float(len(at)), *[0.0] * (len(at) - 1)]) for at in rollouts.offsets]


def test_before_is_the_reference_and_after_is_the_policy(toy_model, tmp_path):
    """result.json's two columns are `evaluate` with the two adapters, and they differ."""
    model, tokenizer = toy_model
    for p in add_lora(model, "policy", 4, 8):
        p.data.normal_(std=0.3)
    rows = get_task("toy").rows("eval", 6, 0)
    config = Config(iterations=1, batch_size=6, minibatch_size=6, learning_rate=0.0)
    text2grad.optimise(model, tokenizer, rows, rows, config, tmp_path, judged_by_length)
    result = json.loads((tmp_path / "result.json").read_text())
    texts = {}
    for name, adapter in (("before", None), ("after", "policy")):
        means, samples = evaluate(model, tokenizer, rows, config, adapter, judged_by_length)
        assert means == result[name]
        kept = rows_of(tmp_path / f"{name}_samples.jsonl")
        texts[name] = [row["response"] for row in kept]
        assert texts[name] == [row["response"] for row in samples]
    assert texts["before"] != texts["after"]


@pytest.mark.parametrize("lost, said", [(2, True), (1, False)])
def test_an_r_phi_that_cannot_be_read_is_said_before_it_trains(toy_model, tmp_path, capsys,
                                                               lost, said):
    """Two of six are over a fifth, one is not; the reason and the remedy are told. Responses
    that are cut off are counted, too."""
    def critic(rollouts, model, tokenizer, config):
        judged = judged_by_length(rollouts, model, tokenizer, config)
        return [replace(found, reason="no JSON" * (i < lost)) for i, found in enumerate(judged)]

    model, tokenizer = toy_model
    add_lora(model, "policy", 4, 8)
    rows = get_task("toy").rows("eval", 6, 0)
    config = Config(iterations=1, batch_size=6, minibatch_size=6, learning_rate=0.0,
                    max_new_tokens=3, probe_rows=0)
    text2grad.optimise(model, tokenizer, rows, rows, config, tmp_path, critic)
    told = capsys.readouterr().out
    assert ("33% of the critiques cannot be read, and pay nothing (one: no JSON); stop"
            in told) == said
    assert (json.loads((tmp_path / "result.json").read_text())["before"]["truncated responses"]
            == 1)
    assert rows_of(tmp_path / "metrics.jsonl")[0]["truncated"] == 1


def test_the_kl_penalty_takes_a_policy_back_to_the_reference(toy_model, tmp_path):
    """δ = 0, β = 1 fixed: from KL ≥ 5 nats a response to a third of it in 8 iterations."""
    model, tokenizer = toy_model
    for p in add_lora(model, "policy", 16, 32)[1::2]:                    # B of every layer
        p.data.normal_(std=0.15)
    config = Config(iterations=8, batch_size=24, minibatch_size=24, kl_coef=1.0, kl_target=0.0,
                    seed=1, learning_rate=2e-3, max_new_tokens=20)

    def silent(rollouts, *_):
        return [Judgement("", [0.0] * len(at)) for at in rollouts.offsets]

    train(model, tokenizer, get_task("toy").rows("train", 200, 0), config, tmp_path, silent)
    kl = [row["kl"] for row in rows_of(tmp_path / "metrics.jsonl")]
    assert kl[0] >= 5 and kl[-1] <= kl[0] / 3, kl


# ── Going on, and reusing what is done

def test_a_second_run_reuses_every_phase_and_says_so(finished_run, capsys):
    kept = [p for p in finished_run.rglob("*") if p.is_file() and p.name not in
            ("config.json", "report.html", "phases.jsonl", ".lock")]
    before = {p: p.stat().st_mtime_ns for p in kept}
    run_main(*SMALL, "--output_dir", finished_run)
    said = capsys.readouterr().out
    assert said.count("reused") == 3 and "fact accuracy" in said
    assert before == {p: p.stat().st_mtime_ns for p in kept}
    with closing(lock_directory(finished_run)):
        assert "another process" in refused(*SMALL, "--output_dir", finished_run)


@pytest.mark.parametrize("flag, was, now", [("learning_rate", 0.001, 0.0007),
                                            ("temperature", 1.0, 0.7), ("kl_coef", 0.5, 0.3)])
def test_other_settings_in_the_same_directory_are_refused(finished_run, flag, was, now):
    told = refused(*SMALL, f"--{flag}", now, "--output_dir", finished_run)
    assert f"{flag} was {was}, is {now}" in told and "another --output_dir" in told
    assert f"--reward_model {finished_run / 'reward' / 'adapter'}" in told


def test_a_setting_binds_only_what_has_read_it(finished_run, tmp_path, capsys):
    """After phase 2 another --learning_rate is taken; another --temperature,
    which the responses depend on, is not. --micro_batch_size never binds."""
    out = tmp_path / "run"
    shutil.copytree(finished_run, out)
    for path in [*out.glob("checkpoint-*"), out / "policy"]:
        shutil.rmtree(path)
    for name in ("result.json", "metrics.jsonl", "samples.jsonl"):
        (out / name).unlink()
    for name, value in (("temperature", 0.7), ("mode", "no_cot")):
        assert f"{name} was" in refused(*SMALL, f"--{name}", value,
                                        "--output_dir", out)
    run_main(*SMALL, "--learning_rate", 1e-3, "--micro_batch_size", 3,
             "--iterations", 1, "--output_dir", out)
    assert capsys.readouterr().out.count("reused") == 2
    (out / "feedback.jsonl").unlink()
    told = refused(*SMALL, "--critic", "toy:none", "--output_dir", out)
    assert "cannot import" in told, "who annotates is free again, once it is to be done"


def test_what_lies_behind_a_path_binds_too(reward, tmp_path):
    """Other rows under the same name, one bit of an adapter: named. A password is not kept."""
    data, out = tmp_path / "rows.jsonl", tmp_path / "run"
    adapter = tmp_path / "adapter"
    shutil.copytree(reward, adapter)
    write_rows(data, [{"prompt": f"Say {i}."} for i in range(12)])
    flags = ["--task", "ultrafeedback", "--model", "toy/base", "--data", data, *TINY,
             "--adapter", adapter, "--reward_model", adapter, "--output_dir", out]
    run_main(*flags, "--base_url", "http://me:secret@host/v1?key=secret")
    assert "secret" not in (out / "config.json").read_text()
    run_main(*flags)
    write_rows(data, [{"prompt": f"Say {i + 1}."} for i in range(12)])
    assert "what lies behind --data was" in refused(*flags)
    write_rows(data, [{"prompt": f"Say {i}."} for i in range(12)])
    tensors = adapter / "adapter_model.safetensors"
    flipped = bytearray(tensors.read_bytes())
    flipped[-9] ^= 1
    tensors.write_bytes(flipped)
    told = refused(*flags)
    assert all(f"behind --{name} was" in told for name in ("adapter", "reward_model"))


def test_without_asserts_the_numbers_are_the_same(unbroken, reward, tmp_path, monkeypatch):
    """As python -O compiles it: the asserts only look. That they are gone is seen from one
    that would fail."""
    monkeypatch.setattr(SourceFileLoader, "get_code", lambda self, name: compile(
        self.get_data(self.path), self.path, "exec", optimize=1))
    for name in ("annotate", "data", "model", "reward_model", "sampling", "text2grad", "toy"):
        monkeypatch.delitem(sys.modules, name)
    module, x = importlib.import_module("text2grad"), torch.ones(1, 2)
    module.nl_gradient_loss(x, x[0], x)
    run_main(*PHASE_3, "--reward_model", reward, "--output_dir", tmp_path, module=module)
    assert_equal_runs(tmp_path, unbroken)


def test_the_deletion_test(tmp_path):
    """Without eval.py, measures/ and experiments/, `python text2grad.py` still runs."""
    names = ("annotate", "data", "model", "report", "reward_model", "sampling", "text2grad")
    for name in names:
        shutil.copy(ROOT / f"{name}.py", tmp_path)
    shutil.copytree(ROOT / "toy", tmp_path / "toy")
    flags = [*TINY, "--iterations", 1, "--annotated_rows", 12]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run([sys.executable, "text2grad.py", *map(str, flags)], cwd=tmp_path,
                          capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs" / "toy" / "report.html").is_file()


def test_few_functions_in_few_files_make_delta_of_a_critique(reward, toy_model):
    """Alg. 4 l.12–13 can be walked through: public functions by sys.setprofile,
    decoding as one."""
    model, tokenizer = toy_model
    load_lora(model, "reward", reward)
    rows, config = get_task("toy").rows("eval", 2, 0), Config()
    batch = text2grad.sample_rollouts(model, tokenizer, rows, config, None,
                                      torch.Generator().manual_seed(0))
    entered, decoding = [], []

    def profile(frame, event, _):
        file, name = os.path.basename(frame.f_code.co_filename), frame.f_code.co_name
        if (not frame.f_code.co_filename.startswith(str(ROOT))
                or ".venv" in frame.f_code.co_filename):
            return
        if event not in ("call", "return"):                    # of C functions, in our frames
            return
        if name == "generate" and file == "sampling.py":
            decoding[:] = [event] if event == "call" else []
            entered.append((file, name))
        elif event == "call" and not decoding and name[0] not in "_<":
            entered.append((file, name))

    sys.setprofile(profile)
    try:
        text2grad.add_feedback(batch, text2grad.critique(batch, model, tokenizer, config))
    finally:
        sys.setprofile(None)
    assert batch.delta.any()
    assert len(set(entered)) <= 22 and len({file for file, _ in entered}) <= 6, set(entered)


# ── Real checkpoint, real rows, an OpenAI-compatible server; a task of one's own

@pytest.fixture()
def server(monkeypatch):
    """A loopback chat-completions server; counts its calls."""
    with loopback() as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.url)
        yield server


@pytest.fixture()
def long_stories(shared, tmp_path):
    """stories260K with room for the posts."""
    base = tmp_path / "stories260K"
    shutil.copytree(shared / "models" / "stories260K", base)
    for path in (base, *base.iterdir()):
        path.chmod(0o755)
    config = json.loads((base / "config.json").read_text())
    text = json.dumps(config | {"max_position_embeddings": 2048})
    (base / "config.json").write_text(text)
    return base


TINY = ["--iterations", 2, "--batch_size", 4, "--minibatch_size", 4, "--micro_batch_size", 2,
        "--max_new_tokens", 24, "--max_critique_tokens", 64, "--eval_rows", 2,
        "--temperature", 1.0, "--ppo_epochs", 1]


def test_all_phases_on_a_real_checkpoint_with_real_rows(shared, server, long_stories, tmp_path,
                                                        capsys):
    """stories260K, SLF5K posts, feedback over HTTP; the second run asks the server nothing."""
    flags = ["--task", "slf5k", "--model", long_stories,
             "--data", shared / "data" / "slf5k.jsonl", "--max_prompt_tokens", 800,
             "--annotated_rows", 5, *TINY, "--output_dir", tmp_path / "run"]
    run_main(*flags)
    asked, feedback = server.stats()["calls"], rows_of(tmp_path / "run" / "feedback.jsonl")
    assert asked == len(feedback) == 5
    assert all(row["annotator"] == "gpt-4o" and row["spans"] is not None for row in feedback)
    assert "left out" in capsys.readouterr().out
    run_main(*flags)
    assert server.stats()["calls"] == asked and capsys.readouterr().out.count("reused") == 3


MY_TASK = '''
import json

from data import Task

HEADLINES = Task(
    name="headlines",
    policy_prompt=lambda row: f"Write a headline.\\n\\n{row['article']}",
    needs=(("article",),),
    judge="You are a news editor.",
    criteria="whether the headline is true and short",
    policy={"kl_coef": 0.3, "annotated_rows": 6},
    reward={"epochs": 1},
)

def critic(row, response):
    spans = {"good_spans": response.split()[:1], "poor_spans": []}
    return f"Fine.\\n{json.dumps(spans)}"
'''


def test_a_task_of_ones_own_from_end_to_end(long_stories, tmp_path, monkeypatch):
    """--task module:NAME: its prompt, its needs, its settings over the paper's common ones."""
    (tmp_path / "my_task.py").write_text(MY_TASK)
    monkeypatch.syspath_prepend(tmp_path)
    data = tmp_path / "rows.jsonl"
    write_rows(data, [{"id": str(i), "article": f"Once upon a time {i} dogs ran."}
                      for i in range(12)])
    run_main("--task", "my_task:HEADLINES", "--critic", "my_task:critic", "--data", data,
             "--model", long_stories, *TINY, "--output_dir", tmp_path / "run")
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert (config["kl_coef"], config["learning_rate"], config["schedule"]) == (
        0.3, 1e-6, "cosine")
    assert len(rows_of(tmp_path / "run" / "feedback.jsonl")) <= 6
    assert rows_of(tmp_path / "run" / "samples.jsonl")[0]["prompt"].startswith(
        "Write a headline.")
    told = refused("--task", "my_task:critic", "--data", data)
    assert "not a Task" in told


# ── Bad input

WRONG = [("lora_r", 0), ("learning_rate", -1), ("learning_rate", "1e400"), ("kl_coef", "nan"),
         ("gamma", 3), ("clip", -0.1), ("dtype", "fp16"), ("seed", -1),
         ("batch_size", 10**30), ("rank_timeout", "inf"), ("iterations", "9" * 5000)]
BAD_TASK = """
from data import Task
BAD = Task("bad", lambda row: row["question"], reward={"lora_targets": "q_prj"},
           policy={"max_new_tokens": 9, "max_critique_tokens": 9})
MISSPELT = Task("misspelt", lambda row: row["question"], policy={"kl_coeff": 0.3})
"""


def test_bad_flags_and_files_are_one_line_before_anything_is_done(tmp_path, monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    data, out = tmp_path / "rows.jsonl", tmp_path / "r"
    data.write_text('{"prompt": "a"}\n{"question": "b"}\n')
    real = ["--task", "ultrafeedback", "--model", "toy/base"]
    (tmp_path / "bad_task.py").write_text(BAD_TASK)
    monkeypatch.syspath_prepend(tmp_path)
    write_rows(solved := tmp_path / "solved.jsonl", [
        {"question": "f", "test": "assert f()", "response": "def f(): return 1"}] * 6)
    code = ["--task", "kodcode", "--model", "toy/base", "--base_url", "http://127.0.0.1:9/v1",
            "--data", solved, "--max_new_tokens", 9, "--max_critique_tokens", 9]
    told = [{"question": "f", "test": "assert f()", "response": "x", "outcome": "fails"}] * 20
    write_rows(tested := tmp_path / "tested.jsonl", [*told, {"question": "f", "test": "t"}])
    for said, *flags in (
            ("needs --data", *real),
            ("nowhere.jsonl: no such file", *real, "--data", "nowhere.jsonl", "--critic",
             "toy:critique"),
            (f"{data}, line 2: field 'prompt'", *real, "--data", data,
             "--critic", "toy:critique"),
            ("OPENAI_API_KEY", *real, "--data", data),
            ("--critic toy:nothing", "--critic", "toy:nothing"),
            ("no linear layer is named q_prj", "--lora_targets", "q_prj"),
            ("no linear layer is named q_prj", "--task", "bad_task:BAD", "--model", "toy/base",
             "--critic", "toy:critique", "--data", solved),
            ("its settings name kl_coeff", "--task", "bad_task:MISSPELT", "--data", solved),
            ("5 of 5 rows bring no outcome", *code),
            ("bring no outcome", *code, "--data", tested),
            ("holds no adapter_config.json", "--reward_model", tmp_path),
            (str(tmp_path / "none"), "--model", tmp_path / "none"),
            ("--schedule: invalid choice", "--schedule", "square"),
            ("--kl_target: nan", "--kl_target", "nan"), ("--batch_size: 0", "--batch_size", 0),
            ("--temperature: 0", "--temperature", 0), ("--learning_rat", "--learning_rat", 1),
            *((f"argument --{name}: ", f"--{name}", value) for name, value in WRONG),
            ("unrecognized arguments: --kl_horizon", "--kl_horizon", 0),
            ("torchrun", "--shard"), ("--wandb", "--wandb", "project"),
            ("--max_usd needs --price_in", "--max_usd", 1)):
        with monkeypatch.context() as patch:
            if "kodcode" in flags:
                patch.setenv("OPENAI_API_KEY", "any")
            assert said in refused(*flags, "--output_dir", out), flags
    assert [path.name for path in out.iterdir()] == [".lock"]


@pytest.mark.parametrize("text", ['{"a": 1}\n{"a": 2}\n', ' [{"a": 1}, {"a": 2}]'])
def test_a_byte_order_mark_is_no_part_of_the_rows(tmp_path, text):
    (tmp_path / "rows.jsonl").write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert read_rows(tmp_path / "rows.jsonl") == [{"a": 1}, {"a": 2}]


def test_responses_get_outcomes_only_where_code_may_run(toy_model, tmp_path, monkeypatch):
    monkeypatch.setattr("measures.sandbox.add_outcomes", lambda rows, task: [
        row | {"outcome": task.name} for row in rows])
    rows = [{"question": "f", "test": "t", "response": "x"}]
    for allowed, outcome in ((False, None), (True, "kodcode")):
        config, out = (Config(task="kodcode", allow_code_execution=allowed),
                       tmp_path / str(allowed))
        text2grad.respond(*toy_model, rows, config, out)
        assert rows_of(out / "responses.jsonl")[0].get("outcome") == outcome


@pytest.mark.parametrize("script", ["annotate.py", "reward_model.py", "text2grad.py"])
def test_an_unknown_task_is_refused_by_every_script(script):
    assert "poetry" in fails(script, "--task", "poetry")


def test_help_names_every_flag_once(capsys):
    """In groups, the first of which is what a newcomer needs."""
    with pytest.raises(SystemExit):
        run_main("--help")
    said = capsys.readouterr().out
    flags = re.findall(r"--\w+", said)
    assert len(flags) == len(set(flags)) + flags.count("--flag") - 1
    first = said[said.index("start here:"):said.index("\nphases 1 and 2:")]
    assert len(set(re.findall(r"--[a-z_]+", first))) == 10, first


def test_prompts_that_do_not_fit_are_left_out_and_counted(tmp_path, reward, capsys):
    data = tmp_path / "rows.jsonl"
    write_rows(data, [{"id": f"r{i}", "prompt": "word " * (5 + 600 * (i == 3))}
                      for i in range(6)])
    flags = ["--task", "ultrafeedback", "--data", data,
             "--model", "toy/base", "--reward_model", reward, *TINY,
             "--output_dir", tmp_path / "r"]
    told = refused(*flags, "--max_new_tokens", 480)
    assert "no row is left" in told and "--max_new_tokens" in told
    capsys.readouterr()
    config = replace(Config(**{"task": "ultrafeedback", "data": str(data)}), max_new_tokens=24)
    from model import load_model
    model, tokenizer = load_model(ROOT / "toy" / "base", device="cpu")
    kept = text2grad.fitting(rows_of(data), model, tokenizer, config)
    assert [row["id"] for row in kept] == ["r0", "r1", "r2", "r4", "r5"]
    assert "left out 1 of 6 rows" in capsys.readouterr().out


def test_the_reward_model_script_learns_and_reports(finished_run, tmp_path, capsys):
    data, out = tmp_path / "rows.jsonl", tmp_path / "r"
    write_rows(data, rows_of(finished_run / "feedback.jsonl")[:40])
    flags = ["--data", data, "--output_dir", out, "--epochs", 1, "--held_out", 4]
    run_main(*flags, module=reward_model)
    metrics = json.loads((out / "metrics.json").read_text())
    assert metrics["final_loss"] < 6 and metrics["held_out_rows"] == 4
    with closing(lock_directory(out)):
        assert "another process" in fails("reward_model.py", *flags)
    said = capsys.readouterr().out
    assert "next: python text2grad.py" in said and "poor tokens precision" in said
