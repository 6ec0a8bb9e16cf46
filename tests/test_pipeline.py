"""The scripts from the command line: all phases, resuming, real rows with a fake annotator
server, user-defined tasks, and bad input."""

import importlib
import json
import re
import shlex
import shutil
import sys
from contextlib import closing
from dataclasses import replace
from functools import partial
from importlib.machinery import SourceFileLoader

import pytest
import torch
import transformers
from loopback import loopback
from safetensors.torch import load_file
import reward_model
import text2grad
from annotate import annotate
from data import InputError, checksum, get_task, read_rows, write_rows
from helpers import (PHASE_3, SMALL, assert_equal_runs, error_message, read_jsonl, run_main,
                     toy_config, toy_feedback)
from model import add_lora
from policy import Rollouts
from report import NOTES
from reward_model import judge_by_annotator, read_judgement
from runtime import checkpoints, load_tensors, lock_directory
from text2grad import drop_long_rows


def refused(*flags) -> str:
    return error_message("text2grad.py", *flags)


# ── What a run leaves

def test_a_run_leaves_everything_that_the_readme_names(finished_run):
    metrics, samples = (read_jsonl(finished_run / f"{name}.jsonl")
                        for name in ("metrics", "samples"))
    assert [row["iteration"] for row in metrics] == [1, 2, 3, 4]
    assert [row["iteration"] for row in samples] == [1, 2, 3, 4]
    assert set().union(*metrics) == {"iteration", "kl_target", *NOTES, *get_task("toy").truth}
    assert all(row["seconds_update"] > 0 for row in metrics)
    for row in samples:
        assert len(row["tokens"]) == len(row["delta"]) == len(row["advantage"])
        assert "".join(row["tokens"]) == row["response"]
    for file in ("config.json", "policy/adapter_model.safetensors", "value_head.safetensors",
                 "reward/adapter/adapter_config.json", "feedback.jsonl", "result.json",
                 "phases.jsonl", "report.html", "before_samples.jsonl", "after_samples.jsonl"):
        assert (finished_run / file).is_file(), file


def test_the_policy_that_is_saved_has_moved_from_the_base(finished_run):
    """Alg. 4 l.29–33: the saved weights equal the newest checkpoint's, and B is not 0."""
    tensors = load_file(finished_run / "policy" / "adapter_model.safetensors")
    assert any(t.abs().max() > 0 for name, t in tensors.items() if "lora_B" in name)
    head = load_file(finished_run / "value_head.safetensors")
    assert head["linear.weight"].abs().max() > 0
    last, state = load_tensors(checkpoints(finished_run)[-1])
    trained = [last[f"{i}.parameter"] for i in range(len(tensors))]
    assert state["step"] == 4
    assert all(torch.equal(tensors[name], p) for name, p in zip(sorted(tensors), trained))


def test_the_policy_starts_as_the_base_and_every_value_at_zero(finished_run):
    """Alg. 4 l.5: KL to π_ref and V are 0 in the first iteration, and not 0 afterwards."""
    first, *later = read_jsonl(finished_run / "metrics.jsonl")
    assert abs(first["kl"]) < 1e-5 and first["explained_variance"] == 0
    assert all(row["kl"] != 0 and row["explained_variance"] != 0 for row in later)


@pytest.mark.parametrize("unreadable, quote, message", [
    (1, "", ""), (4, "", "67% of the critiques cannot be read"),
    (0, "xylophone", "δ is nearly the same for every token"),
    (0, "", "δ is nearly the same for every token")])
def test_a_critic_without_rewards_is_reported_before_training(
        toy_model, tmp_path, monkeypatch, capsys, unreadable, quote, message):
    """Of six critiques one may be unreadable, and four are an error. The responses and the
    shares of their tokens are shown before training."""
    def critic(rollouts, model, tokenizer, config):
        replies = [json.dumps({"critique": "Well done.", "good_spans": [quote or text],
                               "poor_spans": []}) for text in rollouts.texts]
        replies[:unreadable] = ["no JSON"] * unreadable
        return [*map(read_judgement, replies, rollouts.texts, rollouts.offsets)]

    monkeypatch.setattr(text2grad, "train", lambda *_: printed.append(capsys.readouterr().out))
    printed, rows = [], get_task("toy").rows("eval", 6, 0)
    add_lora(toy_model[0], "policy", 4, 8)
    run = partial(text2grad.train_and_evaluate, *toy_model, rows, rows,
                  toy_config(max_new_tokens=3), tmp_path, critic)
    if unreadable == 4:
        with pytest.raises(InputError, match=f"^{message}.*higher --reward_learning_rate"):
            run()
        assert not printed
    else:
        run()
        assert f"warning: {message}" in printed[0] if message else "warning" not in printed[0]
        assert printed[0].count("response: ") == 5 and f"unparseable {unreadable / 6:.0%}" in (
            printed[0])
        result = json.loads((tmp_path / "result.json").read_text())
        assert result["before"]["truncated"] == 1


def test_the_settings_of_a_run_name_its_versions(finished_run):
    config, = read_jsonl(finished_run / "config.json")
    assert config["torch"] == torch.__version__
    assert config["transformers"] == transformers.__version__ and "commit" in config


@pytest.fixture()
def unreadable_r_phi(monkeypatch):
    """Phase 3 starts although the R_φ of a small run writes no readable critique."""
    monkeypatch.setattr(text2grad, "MOST_UNREADABLE", 1.0)


# ── Continuing a run, and reusing its results

def test_a_second_run_reuses_every_phase_or_is_refused(finished_run, capsys):
    """The same settings change no result; others, and a second process, are refused."""
    kept = [p for p in finished_run.rglob("*") if p.is_file() and p.name not in
            ("config.json", "report.html", "phases.jsonl", ".lock")]
    before = {p: p.stat().st_mtime_ns for p in kept}
    run_main(*SMALL, "--output_dir", finished_run)
    output = capsys.readouterr().out
    assert output.count("reused") == 4 and "fact accuracy" in output
    for flag, old, new in (("learning_rate", 0.001, 0.0007), ("temperature", 1.0, 0.7),
                           ("kl_coef", 0.5, 0.3)):
        message = refused(*SMALL, f"--{flag}", new, "--output_dir", finished_run)
        assert f"{flag} was {old}, is {new}); choose another --output_dir" in message
        assert f"--reward_model {finished_run / 'reward' / 'adapter'}" in message
    with closing(lock_directory(finished_run)):
        assert "another process" in refused(*SMALL, "--output_dir", finished_run)
    assert before == {p: p.stat().st_mtime_ns for p in kept}


def test_a_setting_binds_only_what_has_read_it(finished_run, tmp_path, capsys):
    """After phase 2 --learning_rate may change, but not --temperature, which the responses
    depend on. --micro_batch_tokens may always change."""
    out = shutil.copytree(finished_run, tmp_path / "run")
    for path in (*out.glob("checkpoint-*"), out / "result.json"):
        path.unlink()
    for name, value in (("temperature", 0.7), ("mode", "no_cot")):
        assert f"{name} was" in refused(*SMALL, f"--{name}", value, "--output_dir", out)
    run_main(*SMALL, "--learning_rate", 1e-3, "--micro_batch_tokens", 300,
             "--iterations", 1, "--output_dir", out)
    assert capsys.readouterr().out.count("reused") == 3
    (out / "feedback.jsonl").unlink()
    message = refused(*SMALL, "--annotator_function", "toy:none", "--output_dir", out)
    assert "cannot import" in message, "the annotator may change if no feedback exists"


def test_without_asserts_the_numbers_are_the_same(unbroken, reward, tmp_path, monkeypatch):
    """Compiled as by python -O, a run gives the same result, and a failing assert is absent."""
    monkeypatch.setattr(SourceFileLoader, "get_code", lambda self, name: compile(
        self.get_data(self.path), self.path, "exec", optimize=1))
    for name in ("annotate", "ask", "data", "model", "policy", "report", "reward_model",
                 "runtime", "sampling", "settings", "text2grad", "toy"):
        monkeypatch.delitem(sys.modules, name)
    module, x = importlib.import_module("text2grad"), torch.ones(1, 2)
    sys.modules["policy"].nl_gradient_loss(x, x[0], x)
    run_main(*PHASE_3, "--reward_model", reward, "--output_dir", tmp_path, module=module)
    assert_equal_runs(tmp_path, unbroken)


# ── A real checkpoint with real rows and a server; a task of the user

TINY = ["--iterations", 2, "--batch_size", 4, "--minibatch_size", 4, "--micro_batch_tokens", 99,
        "--max_new_tokens", 24, "--max_critique_tokens", 64, "--eval_rows", 2,
        "--temperature", 1.0, "--ppo_epochs", 1]


def test_all_phases_on_a_real_checkpoint_with_real_rows(shared, stories, tmp_path, capsys,
                                                        monkeypatch, unreadable_r_phi):
    """stories260K, SLF5K posts, feedback over HTTP. A second run sends no requests."""
    stories[0].config.max_position_embeddings = 2048               # enough for the posts
    for part in stories:
        part.save_pretrained(tmp_path / "base")
    flags = ["--task", "slf5k", "--model", tmp_path / "base",
             "--data", shared / "data" / "slf5k.jsonl", "--max_prompt_tokens", 800,
             "--annotated_rows", 5, "--reward_epochs", 1, *TINY, "--iterations", 1,
             "--max_critique_tokens", 16, "--output_dir", tmp_path / "run"]
    with loopback() as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.url)
        run_main(*flags)
        feedback = read_jsonl(tmp_path / "run" / "feedback.jsonl")
        assert len(server.requests) == len(feedback) == 5
        assert "left out" in capsys.readouterr().out
        run_main(*flags)
        assert len(server.requests) == 5 and capsys.readouterr().out.count("reused") == 4
    assert all(row["annotator"] == "gpt-4o" and row["spans"] is not None for row in feedback)


MY_TASK = '''
import json

from data import Task

HEADLINES = Task(
    name="headlines",
    policy_prompt=lambda row: f"Write a headline.\\n\\n{row['article']}",
    needs=(("article",),),
    judge="You are a news editor.",
    criteria="whether the headline is true and short",
    settings={"kl_coef": 0.3, "annotated_rows": 6, "reward_epochs": 1},
)

def critic(row, response):
    spans = {"good_spans": response.split()[:1], "poor_spans": []}
    return f"Fine.\\n{json.dumps(spans)}"
'''


def test_a_task_of_the_user_from_end_to_end(tmp_path, monkeypatch, unreadable_r_phi):
    """--task module:NAME uses its prompt and fields; its settings override the defaults."""
    (tmp_path / "my_task.py").write_text(MY_TASK)
    monkeypatch.syspath_prepend(tmp_path)
    data = tmp_path / "rows.jsonl"
    write_rows(data, [{"id": str(i), "article": f"Once upon a time {i} dogs ran."}
                      for i in range(12)])
    run_main("--task", "my_task:HEADLINES", "--annotator_function", "my_task:critic",
             "--data", data, "--model", "toy/base", *TINY, "--output_dir", tmp_path / "run")
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert (config["kl_coef"], config["learning_rate"], config["schedule"]) == (
        0.3, 1.3e-3, "cosine")
    assert len(read_jsonl(tmp_path / "run" / "feedback.jsonl")) <= 6
    assert read_jsonl(tmp_path / "run" / "samples.jsonl")[0]["prompt"].startswith(
        "Write a headline.")


# ── Bad input

BAD_TASKS = """
from data import Task
BAD = Task("bad", lambda row: row["question"], settings={
    "reward_lora_targets": "q_prj", "max_new_tokens": 9, "max_critique_tokens": 9})
MISSPELT = Task("misspelt", lambda row: row["question"], settings={"kl_coeff": 0.3})
ROWS = Task("rows", lambda row: row["text"],
            rows=lambda split, n, seed: [{"text": "a"}] * 9 + [{"txt": "a"}])
"""
SOLVED = {"test": "assert f()", "response": "def f(): return 1"}
FILES = {
    "prompts": [{"prompt": "a"}, {"question": "b"}], "same": [{"prompt": "Say 1."}] * 12,
    "solved": [{"question": f"f{i}", **SOLVED} for i in range(6)],
    "tested": [{"question": f"f{i}", **SOLVED, "outcome": "fails"} for i in range(20)]
              + [{"question": f"g{i}", "test": "t"} for i in range(9)]}
BASE = "--task ultrafeedback --model toy/base"
LOCAL = f"{BASE} --annotator_function toy:critique"
TASK = "--model toy/base --annotator_function toy:critique --data {}/solved.jsonl --task"
CODE = ("--task kodcode --model toy/base --base_url http://127.0.0.1:9/v1 --max_new_tokens 9 "
        "--max_critique_tokens 9 --data")
SLF5K = "--task slf5k --data {}/none --reward_model {}/r"
# Flags, where {} is the folder of these files → a part of the message.
REFUSED = [
    (BASE, "needs --data"), (f"{LOCAL} --data nowhere.jsonl", "nowhere.jsonl: not rows of"),
    (f"{LOCAL} --data {{}}/prompts.jsonl", "prompts.jsonl, line 2: field 'prompt'"),
    (f"{LOCAL} --data {{}}/same.jsonl", "same.jsonl: all rows have the same prompt; add rows"),
    (f"{BASE} --data {{}}/prompts.jsonl", "OPENAI_API_KEY"),
    (SLF5K, "No such file"),
    ("--annotator_function toy:nothing", "--annotator_function toy:nothing"),
    ("--lora_targets q_prj", "has no linear layer named q_prj"),
    ("--task poetry", "poetry"), ("--task toy:critique", "expected a Task"),
    (f"{TASK} bad_tasks:BAD", "has no linear layer named q_prj"),
    (f"{TASK} bad_tasks:MISSPELT",
     "the settings of --task bad_tasks:MISSPELT: unrecognized arguments: --kl_coeff"),
    ("--task bad_tasks:ROWS --annotator_function toy:critique",
     "its `rows`: the row does not fit"),
    (f"{CODE} {{}}/solved.jsonl", "needs the outcomes of the tests"),
    (f"{CODE} {{}}/tested.jsonl", "needs the outcomes of the tests"),
    ("--reward_model {}", "adapter_config.json is missing or damaged"),
    ("--model {}/none", "{}/none"),
    ("--schedule square", "--schedule: invalid choice: 'square'"),
    ("--model ''", "--model: expected str that is not empty"),
    ("--output_dir ''", "--output_dir: expected str that is not"),
    ("--temperature 0", "--temperature: expected float from 0.01"),
    ("--batch_size 0", "--batch_size: "), (f"--batch_size {10**30}", "--batch_size: "),
    ("--lora_r 0", "--lora_r: "), ("--learning_rate -1", "--learning_rate: "),
    ("--learning_rate 1e400", "--learning_rate: "), ("--kl_coef nan", "--kl_coef: "),
    ("--kl_target nan", "--kl_target: "), ("--gamma 3", "--gamma: "),
    ("--clip -0.1", "--clip: "), ("--dtype fp16", "--dtype: "), ("--seed -1", "--seed: "),
    (f"--iterations {'9' * 5000}", "--iterations: "), ("--learning_rat 1", "--learning_rat"),
    ("--kl_penalty 0", "unrecognized arguments: --kl_penalty"), ("--shard", "torchrun"),
    ("--learning-rates 1", "similar: --learning_rate"), ("--xyz", "--xyz (--help"),
    ("--max_usd 1 --annotator_function none", "--max_usd needs --price_in")]


@pytest.mark.parametrize("flags, message", REFUSED, ids=[message for _, message in REFUSED])
def test_bad_flags_and_files_are_one_line_before_anything_is_done(tmp_path, monkeypatch, flags,
                                                                  message):
    if not flags.startswith(CODE):
        monkeypatch.delenv("OPENAI_API_KEY")
    (tmp_path / "bad_tasks.py").write_text(BAD_TASKS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "bad_tasks", raising=False)
    for name, rows in FILES.items():
        write_rows(tmp_path / f"{name}.jsonl", rows)
    out = tmp_path / "run"
    flags = shlex.split(flags.replace("{}", str(tmp_path)))
    assert message.replace("{}", str(tmp_path)) in refused("--output_dir", out, *flags)
    assert not out.exists() or [path.name for path in out.iterdir()] == [".lock"]


@pytest.mark.parametrize("text", ['{"a": 1}\n{"a": 2}\n', ' [{"a": 1}, {"a": 2}]'])
def test_a_byte_order_mark_is_no_part_of_the_rows(tmp_path, text):
    (tmp_path / "rows.jsonl").write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert read_rows(tmp_path / "rows.jsonl") == [{"a": 1}, {"a": 2}]


def test_responses_get_outcomes_only_where_code_may_run(toy_model, tmp_path, monkeypatch):
    monkeypatch.setattr("measures.sandbox.add_outcomes", lambda rows, task: [
        row | {"outcome": task.name} for row in rows])
    rows = [{"question": "f", "test": "t", "response": "x"}]
    for allowed, outcome in ((False, None), (True, "kodcode")):
        config, out = (toy_config(task="kodcode", allow_code_execution=allowed),
                       tmp_path / str(allowed))
        text2grad.write_responses(*toy_model, rows, config, out)
        assert read_jsonl(out / "responses.jsonl")[0].get("outcome") == outcome


@pytest.mark.parametrize("script", ["annotate.py", "reward_model.py"])
def test_an_unknown_task_is_refused_by_every_script(script):
    assert "use module:NAME, or one of: slf5k, ultrafeedback, kodcode, toy" in (
        error_message(script, "--task", "poetry"))


@pytest.mark.parametrize("content", [b"a,b\n1,2\n", b"PAR1\x15\x04\xff", None])
def test_a_table_or_a_folder_is_told_how_to_become_json_lines(tmp_path, content):
    path = tmp_path / "rows"
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)
    with pytest.raises(InputError, match="rows.*not rows of JSON.*load_from_disk"):
        read_rows(path)


def test_help_names_every_flag_once(capsys):
    """Flags are in groups, and the script's own flags come first."""
    with pytest.raises(SystemExit):
        run_main("--help")
    output = capsys.readouterr().out
    flags = re.findall(r"--\w+", output)
    assert len(flags) == len(set(flags)) + flags.count("--flag") - 1
    titles = re.findall(r"(?m)^(\w[^:\n]*):", output)
    assert titles == ["usage", "Algorithm 1", "options", "Run", "Policy",
                      "Reward model R_φ (Algorithm 3, Table 9)", "Base model", "Annotator",
                      "Server of the annotator or of the judge"]
    run = output.partition("\nRun:")[2].partition("\n\n")[0]
    assert "--data" in run and "--output_dir" in run
    assert output.count("\n") <= 100 and max(map(len, output.split("\n"))) <= 96


def test_prompts_that_do_not_fit_are_left_out_and_counted(toy_model, capsys):
    rows = [{"prompt": "word " * (5 + 600 * (i == 3))} for i in range(6)]
    config = toy_config(task="ultrafeedback", data="rows.jsonl", max_new_tokens=24)
    assert drop_long_rows(rows, *toy_model, config) == rows[:3] + rows[4:]
    assert "left out: 1 of 6 prompts have more than" in capsys.readouterr().out
    for setting, message in (
            ({"max_new_tokens": 480}, "6 of 6 prompts have more than .*lower --max_new_tokens"),
            ({"max_prompt_tokens": 4}, "more than 4 tokens: .* raise --max_prompt_tokens")):
        with pytest.raises(InputError, match=message):
            drop_long_rows(rows, *toy_model, replace(config, **setting))


def test_the_reward_model_script_reports(tmp_path, capsys):
    data, out = tmp_path / "rows.jsonl", tmp_path / "r"
    write_rows(data, toy_feedback(40))
    flags = ["--data", data, "--output_dir", out, "--reward_epochs", 1,
             "--reward_held_out", 4]
    run_main(*flags, module=reward_model)
    metrics = json.loads((out / "metrics.json").read_text())
    assert metrics["training_rows"] == 36 and metrics["held_out_rows"] == 4
    with closing(lock_directory(out)):
        assert "another process" in error_message("reward_model.py", *flags)
    output = capsys.readouterr().out
    assert "next: python text2grad.py" in output and "poor_precision" in output
    before = checksum(*out.glob("adapter/*"))
    message = error_message("reward_model.py", *flags, "--seed", 1, "--micro_batch_tokens", 99)
    assert message.endswith("(seed was 0, is 1); choose another --output_dir")
    assert checksum(*out.glob("adapter/*")) == before


@pytest.mark.parametrize("task, flags, message", [
    ("notebooks.prose:TASK", [], "SmolLM2-135M-Instruct"),           # the base of this task
    ("notebooks.prose:TASK", ["--task", "toy", "--model", "none/none"],     # flags go first
     "none/none"),
    ("nowhere:TASK", [], "--task nowhere:TASK: cannot import it")])
def test_the_reward_model_script_takes_the_task_of_its_rows(tmp_path, task, flags, message):
    write_rows(tmp_path / "rows.jsonl", [row | {"task": task} for row in toy_feedback(9)])
    flags = ["--data", tmp_path / "rows.jsonl", "--output_dir", tmp_path, *flags]
    assert message in error_message("reward_model.py", *flags)


# ── The annotator as the critic

def test_phase_1_and_the_annotator_as_critic_have_one_journal_and_one_budget(tmp_path):
    """The critic reuses the replies of phase 1 and may spend only the rest of its budget. The
    prompt omits the test outcome of the row's own response."""
    rows = [{"id": str(i), "prompt": f"Question {i}?"} for i in range(3)]
    texts = [f"{i} is right and {i} was wrong" for i in range(3)]
    rows[2]["outcome"] = "All tests passed."                  # outcome of the row's response
    offsets = [[m.span() for m in re.finditer(r" ?\S+", y)] for y in texts]
    batch = Rollouts(rows, [], texts, offsets, *[None] * 4)             # no ids, no masks
    first = [row | {"response": text} for row, text in zip(rows, texts)][:2]
    responses = tmp_path / "responses.jsonl"
    write_rows(responses, first)
    with loopback() as server:
        def config(usd):
            return toy_config(task="ultrafeedback", annotator_function=None,
                              base_url=server.url, price_in=1e3, price_out=1e3, max_usd=usd,
                              output_dir=str(tmp_path))

        def asked_and_billed():
            return len(server.requests), sum(map(sum, server.billed)) / 1e3

        annotate(config(1e6), responses, tmp_path / "feedback.jsonl")
        calls, spent = asked_and_billed()
        assert calls == 2 and spent > 0
        with pytest.raises(InputError, match="--max_usd .* reached: .* the next request"):
            judge_by_annotator(batch, config(spent * 1.01))
        assert asked_and_billed() == (2, spent)
        judgements = judge_by_annotator(batch, config(1e6))
        assert asked_and_billed()[0] == 3 and not any(x.reason for x in judgements)
        request = str(server.requests[-1])
        assert texts[2] in request and "passed" not in request
        assert judge_by_annotator(batch, config(0.0)) == judgements
        assert asked_and_billed()[0] == 3
