"""Runs from the command line: what they leave, reuse and refuse; a user's own task; rows, files
and machines that misbehave; sample.py."""

import errno
import io
import json
import os
import random
import re
import shlex
import shutil
import sys
from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import transformers
from loopback import loopback
from safetensors.torch import load_file
import report
import reward_model
import runtime
import sample
import text2grad
import toy
from annotate import annotate, annotation_questions, read_critique
from data import (FEEDBACK, InputError, checksum, examples, get_task, is_prompt, read_rows,
                  run_script, write_rows)
from helpers import (ROOT, SLOW, SMALL, error_message, needs_posix, randomise, read_jsonl,
                     run_main, toy_config, toy_feedback)
from model import (add_lora, drop_long_rows, encode_prompt, eos_ids, load_lora, load_model,
                   save_lora, use_lora)
from policy import Rollouts, critique_by_annotator
from report import NOTES
from reward_model import encode_rows
from runtime import checkpoints, load_tensors, lock_directory
from sampling import generate
from settings import AnnotateConfig


def refused(*flags) -> str:
    return error_message("text2grad.py", *flags)


# ── What a run leaves

def test_a_run_leaves_everything_that_the_readme_names(finished_run):
    metrics, samples = (read_jsonl(finished_run / f"{name}.jsonl")
                        for name in ("metrics", "samples"))
    assert [row["iteration"] for row in metrics] == [1, 2, 3, 4]
    assert set().union(*metrics) == {"iteration", "kl_target", *NOTES, *get_task("toy").truth}
    assert all(row["seconds_update"] > 0 for row in metrics)
    held_out = {toy.prompt(row) for row in read_jsonl(finished_run / "held_out.jsonl")}
    for iteration, row in enumerate(samples, 1):
        assert row["iteration"] == iteration and row["prompt"] not in held_out
        assert len(row["tokens"]) == len(row["delta"]) == len(row["advantage"])
        assert "".join(row["tokens"]) == row["response"]
    for file in ("policy/adapter_model.safetensors", "reward/adapter/adapter_config.json",
                 "feedback.jsonl", "result.json", "phases.jsonl", "report.html",
                 "before_samples.jsonl", "after_samples.jsonl"):
        assert (finished_run / file).is_file(), file
    config, = read_jsonl(finished_run / "config.json")
    assert (config["torch"], config["transformers"]) == (torch.__version__,
                                                         transformers.__version__)
    kinds = {path.suffix for path in finished_run.rglob("*") if path.is_file()}
    assert kinds <= {".json", ".jsonl", ".journal", ".safetensors", ".html", ""}, "no pickle"


def test_the_policy_starts_as_the_base_and_the_one_that_is_saved_has_moved(finished_run):
    """Alg. 4 l.5: KL to π_ref and V are 0 in the first iteration alone. l.29–33: the saved
    weights equal the newest checkpoint's, and B is not 0."""
    first, *later = read_jsonl(finished_run / "metrics.jsonl")
    assert abs(first["kl"]) < 1e-5 and first["explained_variance"] == 0
    assert all(row["kl"] != 0 and row["explained_variance"] != 0 for row in later)
    tensors = load_file(finished_run / "policy" / "adapter_model.safetensors")
    assert any(t.abs().max() > 0 for name, t in tensors.items() if "lora_B" in name)
    assert load_file(finished_run / "value_head.safetensors")["linear.weight"].any()
    last, state = load_tensors(checkpoints(finished_run)[-1])
    trained = [last[f"{i}.parameter"] for i in range(len(tensors))]
    assert state["step"] == 4
    assert all(torch.equal(tensors[name], p) for name, p in zip(sorted(tensors), trained))


def test_what_phase_3_learns_from_is_shown_and_unreadable_critiques_stop_it(
        toy_model, tmp_path, monkeypatch, capsys):
    """Of six critiques one may be unreadable, and four are an error."""
    def critic(rollouts, model, tokenizer, config):
        replies = [json.dumps({"critique": "Well done.", "good_spans": [text.split()[0]],
                               "poor_spans": []}) for text in rollouts.texts]
        replies[:unreadable] = ["no JSON"] * unreadable
        return [*map(read_critique, replies, rollouts.texts, rollouts.offsets)]

    monkeypatch.setattr(text2grad, "train", lambda *_: trained.append(capsys.readouterr().out))
    trained, rows = [], toy.rows("eval", 6)
    add_lora(toy_model[0], "policy", 4, 8)
    arguments = *toy_model, rows, rows, toy_config(max_new_tokens=3), tmp_path, critic
    unreadable = 1
    text2grad.train_and_evaluate(*arguments)
    assert trained[0].count("response: ") == 5 and "6 responses, 1 unreadable" in trained[0]
    assert "warning: truncated is 1: " in trained[0]
    assert read_jsonl(tmp_path / "result.json")[0]["before"]["truncated"] == 1
    unreadable = 4
    with pytest.raises(InputError, match="^67% of the critiques cannot be read .as for: no "
                                         "JSON object.*higher --reward_learning_rate"):
        text2grad.train_and_evaluate(*arguments)
    assert len(trained) == 1


def test_a_preview_shows_critiques_and_trains_nothing(tmp_path, capsys, monkeypatch):
    """It shows the first held-out responses and the ends of their prompts, without an R_φ by
    the annotator. A critic that cannot teach is named as in phase 3, and nothing is trained."""
    flags = [*SMALL, "--output_dir", tmp_path]
    long = replace(toy.TASK, policy_prompt=lambda row: f"{'post ' * 99}{row['id']}?")
    monkeypatch.setattr(toy, "TASK", long)
    write_rows(tmp_path / "config.json", [{"version": 1}])     # it may share a directory
    run_main(*flags, "--preview", 3)
    printed = capsys.readouterr().out
    assert all(f"post {row['id']}?\n" in printed for row in toy.rows("eval", 3))
    assert printed.count("response: ") == 3 == printed.count("\n…")
    assert "critiques of 3 responses, 0 unread" in printed
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".lock", "config.json", "feedback.jsonl.journal"]
    monkeypatch.setattr(toy, "critique", lambda row, response: {
        "critique": "All of it is fine.", "good_spans": [response.strip()], "poor_spans": []})
    for mode in (["--preview", 3], ["--critic", "annotator"]):
        assert "around all words" in refused(*flags[:-1], tmp_path / "new", *mode)
        assert not [*(tmp_path / "new").glob("checkpoint-*")]


def test_the_tracker_is_looked_for_first_and_gets_every_iteration(tmp_path, monkeypatch):
    """With the annotator as critic, there is neither feedback nor R_φ, and it binds the run."""
    monkeypatch.setitem(sys.modules, "wandb", None)
    flags = [*SMALL, "--critic", "annotator", "--wandb", "p", "--output_dir", tmp_path / "run"]
    assert "--wandb needs the package wandb" in refused(*flags)
    assert not (tmp_path / "run").exists()
    logged = []
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(
        run=True, log=lambda metrics, step: logged.append((step, metrics["delta"]))))
    run_main(*flags)
    assert logged == [(row["iteration"], row["delta"])
                      for row in read_jsonl(tmp_path / "run" / "metrics.jsonl")]
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert "report.html" in names and not {"feedback.jsonl", "reward"} & names
    message = refused(*flags, "--annotator_function", "toy:fact_accuracy")
    assert "annotator_function was toy:critique, is toy:fact_accuracy" in message


# ── Continuing a run, and reusing its results

def test_a_second_run_reuses_every_phase_or_is_refused(finished_run, tmp_path, capsys):
    """The same settings change no result; others, and a second process, are refused."""
    finished_run = shutil.copytree(finished_run, tmp_path / "run")
    kept = [p for p in finished_run.rglob("*") if p.is_file() and p.name not in
            ("config.json", "report.html", "phases.jsonl", ".lock")]
    before = {p: p.stat().st_mtime_ns for p in kept}
    run_main(*SMALL, "--output_dir", finished_run)
    output = capsys.readouterr().out
    assert output.count("reused") == 4 and "fact accuracy" in output
    message = refused(*SMALL, "--kl_coef", 0.3, "--output_dir", finished_run)
    assert "kl_coef was 0.5, is 0.3); choose another --output_dir" in message
    assert f"--reward_model {finished_run / 'reward' / 'adapter'}" in message
    with closing(lock_directory(finished_run)):
        assert "another process" in refused(*SMALL, "--output_dir", finished_run)
    assert before == {p: p.stat().st_mtime_ns for p in kept}


def test_a_setting_binds_only_what_has_read_it(finished_run, tmp_path, capsys):
    """After phase 2 --learning_rate may change, but no setting of phases 1 and 2."""
    out = shutil.copytree(finished_run, tmp_path / "run")
    for path in (*out.glob("checkpoint-*"), out / "result.json", out / "reward/metrics.json"):
        path.unlink()
    for name, value in (("temperature", 0.7), ("mode", "no_cot"), ("reward_epochs", 9)):
        assert f"{name} was" in refused(*SMALL, f"--{name}", value, "--output_dir", out)
    run_main(*SMALL, "--learning_rate", 1e-3, "--micro_batch_tokens", 300,
             "--iterations", 1, "--output_dir", out)
    assert capsys.readouterr().out.count("reused") == 2
    (out / "feedback.jsonl").unlink()
    message = refused(*SMALL, "--annotator_function", "toy:none", "--output_dir", out)
    assert "cannot import" in message, "the annotator may change if no feedback exists"


# ── A real checkpoint with real rows, a server and a task of the user

MY_TASK = """
from dataclasses import replace
from data import get_task

POSTS = replace(get_task("slf5k"), name="posts", settings={"kl_coef": 0.3, "reward_epochs": 1})
"""


def test_all_phases_on_a_real_checkpoint_with_real_rows(shared, stories, tmp_path, capsys,
                                                        monkeypatch):
    """stories260K, SLF5K posts, feedback over HTTP. A second run sends no requests. --task
    module:NAME is a task of the user, whose settings override the defaults."""
    (tmp_path / "my_task.py").write_text(MY_TASK)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(report, "check_critiques", lambda *_: "")       # R_φ is poor here
    stories[0].config.max_position_embeddings = 2048               # enough for the posts
    for part in stories:
        part.save_pretrained(tmp_path / "base")
    flags = ["--task", "my_task:POSTS", "--model", tmp_path / "base",
             "--data", shared / "data" / "slf5k.jsonl", "--max_prompt_tokens", 800,
             "--annotated_rows", 5, "--iterations", 1, "--batch_size", 4, "--ppo_epochs", 1,
             "--minibatch_size", 4, "--micro_batch_tokens", 99, "--max_new_tokens", 24,
             "--max_critique_tokens", 16, "--eval_rows", 2, "--temperature", 1.0,
             "--output_dir", tmp_path / "run"]
    with loopback() as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.url)
        run_main(*flags)
        feedback = read_jsonl(tmp_path / "run" / "feedback.jsonl")
        assert len(server.requests) == len(feedback) == 5, "one request for each response"
        assert "left out" in capsys.readouterr().out
        run_main(*flags)
        assert len(server.requests) == 5 and capsys.readouterr().out.count("reused") == 4
    assert all(row["annotator"] == "gpt-4o" and row["spans"] is not None for row in feedback)
    config, = read_jsonl(tmp_path / "run" / "config.json")
    assert (config["kl_coef"], config["learning_rate"]) == (0.3, 1.3e-3)


# ── Bad input

FILES = {"prompts": [{"prompt": "a"}, {"question": "b"}], "same": [{"prompt": "Say 1."}] * 12}
LOCAL = "--task ultrafeedback --model toy/base --annotator_function toy:critique"
CODE = "--task kodcode --data rows.jsonl --base_url http://127.0.0.1:9/v1"
# Flags, where {} is the folder of these files → a part of the message.
REFUSED = [
    (LOCAL, "needs --data"), (f"{LOCAL} --data nowhere.jsonl", "nowhere.jsonl is missing"),
    (f"{LOCAL} --data {{}}/prompts.jsonl", "prompts.jsonl, line 2: field 'prompt'"),
    (f"{LOCAL} --data {{}}/same.jsonl", "no prompt is left for training or evaluation"),
    ("--annotator_function none", "OPENAI_API_KEY"), (CODE, "needs the outcomes of the tests"),
    ("--annotator_function toy:nothing", "--annotator_function toy:nothing"),
    ("--lora_targets q_prj", "has no linear layer named q_prj"),
    ("--task poetry", "use module:NAME, or one of: slf5k, ultrafeedback, kodcode, toy"),
    ("--reward_lora_targets q_pr", "has no linear layer named q_pr"),
    ("--annotator_function none --reward_model {}", "adapter_config.json is missing or dama"),
    ("--model {}/none", "{}/none"), ("--model ''", "--model: expected str that is not empty"),
    ("--critic annotator --annotator_function none", "set --max_usd with --price_in and --pr"),
    ("--critic annotator --mode align", "new answers, and --mode align needs a critique"),
    ("--temperature 0", "--temperature: expected float from 0.01"), ("--xyz", "--xyz (--help"),
    ("--max_usd 1 --annotator_function none", "--max_usd needs --price_in")]


@pytest.mark.parametrize("flags, message", REFUSED, ids=[message for _, message in REFUSED])
def test_bad_flags_and_files_are_one_line_before_anything_is_done(tmp_path, monkeypatch, flags,
                                                                  message):
    if flags == CODE:
        monkeypatch.setenv("OPENAI_API_KEY", "sk-a-key")
    for name, rows in FILES.items():
        write_rows(tmp_path / f"{name}.jsonl", rows)
    out = tmp_path / "run"
    flags = [word.replace("{}", str(tmp_path)) for word in shlex.split(flags)]
    assert message.replace("{}", str(tmp_path)) in refused("--output_dir", out, *flags)
    assert {path.name for path in out.glob("*")} <= {".lock"}


def test_help_has_the_flags_in_groups_and_the_script_s_own_first(capsys):
    with pytest.raises(SystemExit):
        run_main("--help")
    output = capsys.readouterr().out
    titles = re.findall(r"(?m)^(\w[^:\n]*):", output)
    assert titles == ["usage", "Algorithm 1", "options", "Run", "Policy",
                      "Reward model R_φ (Algorithm 3, Table 9)", "Base model", "Annotator",
                      "Server of the annotator or of the judge"]
    assert output.count("\n") <= 100 and max(map(len, output.split("\n"))) <= 96


def test_prompts_that_do_not_fit_are_left_out_and_counted(toy_model, capsys):
    rows = [{"prompt": "word " * (5 + 600 * (i == 3))} for i in range(6)]
    config = toy_config(task="ultrafeedback", data="rows.jsonl", max_new_tokens=24)
    task = get_task("ultrafeedback")
    assert drop_long_rows(rows, task, *toy_model, config) == rows[:3] + rows[4:]
    assert "left out: 1 of 6 prompts have more than" in capsys.readouterr().out
    fitting = replace(config, max_prompt_tokens=len(encode_prompt(toy_model[1], "word " * 5)))
    assert drop_long_rows(rows, task, *toy_model, fitting) == rows[:3] + rows[4:]
    for setting in ({"max_new_tokens": 480}, {"max_prompt_tokens": 4}):
        with pytest.raises(InputError, match="6 of 6 prompts .*, or raise --max_prompt_tokens"):
            drop_long_rows(rows, task, *toy_model, replace(config, **setting))


def test_responses_get_outcomes_only_where_code_may_run(toy_model, tmp_path, monkeypatch):
    monkeypatch.setattr("measures.sandbox.add_outcomes", lambda rows, task: [
        row | {"outcome": task.name} for row in rows])
    for allowed, outcome in ((False, None), (True, "kodcode")):
        config = toy_config(task="kodcode", allow_code_execution=allowed)
        text2grad.write_responses(*toy_model, [{"response": "f = abs"}], config, tmp_path)
        assert read_jsonl(tmp_path / "responses.jsonl")[0].get("outcome") == outcome
    # A critique or outcome of an answer that is not in the row says nothing about a new one.
    row = toy.rows("train", 1)[0] | {"critique": "It was long.", "outcome": "passed"}
    text2grad.write_responses(*toy_model, [row], toy_config(), tmp_path)
    assert not {"critique", "outcome"} & read_jsonl(tmp_path / "responses.jsonl")[0].keys()


def test_the_reward_model_script_reports(tmp_path, capsys):
    """It takes the task of its rows, unless --task is typed."""
    data, out = tmp_path / "rows.jsonl", tmp_path / "r"
    write_rows(data, toy_feedback(20))
    flags = ["--data", data, "--output_dir", out, "--reward_epochs", 1,
             "--max_critique_tokens", 32]
    run_main(*flags, module=reward_model)
    metrics, = read_jsonl(out / "metrics.json")
    assert metrics["training_rows"] == 18 and metrics["held_out_rows"] == 2
    output = capsys.readouterr().out
    command = ["text2grad.py", "--task", "toy", "--model", "toy/base", "--reward_model",
               f"{out}/adapter", "--output_dir", f"{out}-policy"]
    assert shlex.join(["python", *command]) in output and "poor_precision" in output
    with closing(lock_directory(out)):
        assert "another process" in error_message("reward_model.py", *flags)
    before = checksum(*out.glob("adapter/*"))
    message = error_message("reward_model.py", *flags, "--seed", 1, "--micro_batch_tokens", 99)
    assert message.endswith("(seed was 0, is 1); choose another --output_dir")
    assert checksum(*out.glob("adapter/*")) == before
    write_rows(data, [row | {"task": "nowhere:TASK"} for row in toy_feedback(9)])
    assert "--task nowhere:TASK: cannot import it" in error_message("reward_model.py", *flags)
    assert "x/x" in error_message("reward_model.py", *flags, "--task", "toy", "--model", "x/x")


def test_phase_1_and_the_annotator_as_critic_have_one_journal_and_one_budget(tmp_path):
    """The critic reuses the replies of phase 1 and may spend only the rest of its budget. The
    prompt omits the test outcome of the row's own response."""
    rows = [{"id": str(i), "prompt": f"Question {i}?"} for i in range(3)]
    texts = [f"{i} is right and {i} was wrong" for i in range(3)]
    rows[2]["outcome"] = "All tests passed."                  # outcome of the row's response
    offsets = [[m.span() for m in re.finditer(r" ?\S+", y)] for y in texts]
    batch = Rollouts(rows, [], texts, offsets, *[None] * 4,             # no ids, no masks
                     task=get_task("ultrafeedback"))
    responses = tmp_path / "responses.jsonl"
    write_rows(responses, [row | {"response": y} for row, y in zip(rows, texts)][:2])
    with loopback() as server:
        def config(usd):
            return toy_config(task="ultrafeedback", annotator_function=None,
                              base_url=server.url, price_in=1e3, price_out=1e3, max_usd=usd,
                              output_dir=str(tmp_path))

        annotate(config(1e6), responses, tmp_path / "feedback.jsonl")
        spent = sum(map(sum, server.billed)) / 1e3
        assert len(server.requests) == 2 and spent > 0
        with pytest.raises(InputError, match="--max_usd .* reached: .* the next request"):
            critique_by_annotator(batch, config(spent * 1.01))
        assert len(server.requests) == 2, "phase 1 has spent the budget"
        reviews = critique_by_annotator(batch, config(1e6))
        assert len(server.requests) == 3 and not any(x.reason for x in reviews)
        request = str(server.requests[-1])
        assert texts[2] in request and "passed" not in request
        assert critique_by_annotator(batch, config(0.0)) == reviews
        assert len(server.requests) == 3, "the journal answers"


# ── Rows

JUNK = [None, 7, True, [], {}, "", " ", ["a"], {"a": 1}, "\ud83d half", [["a"]],
        {"role": "user"}, [{"role": "user"}], [{"role": 1, "content": "x"}], ["\ud800"]]
CHAT = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because."}]
# Task → a row that fits it, and the fields that a request reads.
ROWS = {
    "slf5k": ({"id": "a", "title": "A loss", "post": "We lost a dog.",
               "generated_summary_for_feedback": "A dog is lost."},
              ["title", "post", "generated_summary_for_feedback"]),
    "ultrafeedback": ({"prompt_id": "p", "prompt": "Why?", "chosen": CHAT,
                       "rejected": CHAT}, ["prompt", "chosen", "rejected"]),
    "kodcode": ({"question_id": "q", "question": "Add.", "test": "assert add(1, 1) == 2",
                 "trials": {"t": {"solution_code": "def add(a, b):\n    return a + b",
                                  "test_result": "passed"}}}, ["question", "trials"]),
    "feedback": ({"id": "a", "prompt": "Why?", "response": "Because it is.", "critique": "Good",
                  "good_spans": ["it is"], "poor_spans": []}, [])}


@pytest.mark.parametrize("task", ROWS)
def test_a_mutated_row_is_named_or_read_correctly(task, tmp_path, toy_model):
    row, fields_read = ROWS[task]
    path = tmp_path / "rows.jsonl"
    lines = [(row | {name: value}, name) for name in row for value in JUNK]
    lines += [({k: v for k, v in row.items() if k != name}, name) for name in row]
    for changed, name in random.Random(task).sample(lines, len(lines) if SLOW else 40):
        path.write_text(f"{json.dumps(row)}\n{json.dumps(changed)}\n")
        try:
            if task == "feedback":
                encode_rows(read_rows(path, task=FEEDBACK), toy_model[1], 512)
                continue
            config = AnnotateConfig(task=task, annotator_function="toy:critique")
            questions = annotation_questions(config, path, get_task(task))
        except InputError as error:
            assert f"{path}, line 2: " in str(error) and "\n" not in str(error)
            assert re.search(f"{name}|surrogates not allowed|the response is empty", str(error))
            continue
        for question in questions:
            assert question.context["response"].strip()
            assert is_prompt(question.context["prompt"])
        value = changed.get(name) if name in fields_read else None
        if value not in (None, "", [], {}):
            assert type(value) is type(row[name]) or is_prompt(value), (name, value)


def test_rows_of_pandas_and_windows_are_read_and_other_files_refused(tmp_path):
    """null is no response, and a byte order mark no part of a row."""
    row = {"prompt": "p", "response": None, "chosen": [{"content": "stored"}], "rejected": None}
    path = tmp_path / "rows"
    for text in (json.dumps(row), json.dumps([row])):
        path.write_bytes(b"\xef\xbb\xbf" + text.encode())
        assert read_rows(path) == [row]
    task = get_task("ultrafeedback")
    assert [example["response"] for example in examples(task, [row])] == ["stored"]
    assert task.all_responses({"prompt": "p", "response": ""}) == [{"response": ""}]
    for content in (b"a,b\n1,2\n", b"PAR1\x15\x04\xff"):
        path.write_bytes(content)
        with pytest.raises(InputError, match="rows.*not rows of JSON.*load_from_disk"):
            read_rows(path)


# ── Files and machines

@needs_posix
def test_what_is_no_regular_file_is_refused_and_stays(tmp_path):
    """As for /dev/null, which no test touches: with a fault, root would replace it."""
    path = tmp_path / "output"
    os.mkfifo(path)
    with pytest.raises(InputError, match="is not a regular file; name another"):
        write_rows(path, [{"a": 1}])
    assert path.is_fifo()


def test_an_error_of_the_system_names_the_file_which_stays(tmp_path, monkeypatch):
    def fail(_):
        raise OSError(errno.ENOSPC, "No space left")

    path = tmp_path / "rows.jsonl"
    write_rows(path, [{"a": 1}])
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(SystemExit, match="No space left.*rows.jsonl.*; check the path, your"):
        run_script(lambda: write_rows(path, [{"a": 2}]), "script")
    assert read_jsonl(path) == [{"a": 1}] and len([*tmp_path.iterdir()]) == 1


@pytest.mark.parametrize("error", [
    MemoryError(), RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"),
    RuntimeError("CUDA error: out of memory"), RuntimeError("a fault")])
def test_a_lack_of_memory_is_one_line_and_a_fault_keeps_its_traceback(error):
    def main():
        raise error

    with pytest.raises((SystemExit, RuntimeError)) as caught:
        run_script(main, "script")
    is_fault = str(error) == "a fault"
    assert isinstance(caught.value, RuntimeError) == is_fault
    assert is_fault or re.search("out of memory.*--micro_batch.*--shard", str(caught.value))


def test_different_ranks_are_refused(monkeypatch):
    monkeypatch.setattr("runtime.gather_rows", lambda share: [*share, "b"])
    with pytest.raises(InputError, match="ranks have different settings, rows, models"):
        runtime.check_ranks([])


# ── sample.py

def answer(model, tokenizer, prompt, adapter) -> str:
    """The greedy answer with an adapter that is not merged."""
    with use_lora(model, adapter):
        ids, = generate(model, [encode_prompt(tokenizer, prompt)], 48, 0,
                        eos_ids(tokenizer, model))
    return tokenizer.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("name, scale", [("toy", 0.06), ("stories", 0.1)])
def test_a_pipeline_on_the_merged_directory_answers_as_the_project(name, scale, shared,
                                                                   tmp_path):
    """toy/base has no BOS and no template, stories260K has BOS. The adapter names the base,
    whose own sampling settings have no effect."""
    sources = {"toy": ROOT / "toy" / "base", "stories": shared / "models" / "stories260K"}
    base = shutil.copytree(sources.pop(name), tmp_path / "base", copy_function=shutil.copyfile)
    path = base / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {
        "do_sample": True, "temperature": 2.0, "repetition_penalty": 1.5, "eos_token_id": 3}))
    model, tokenizer = load_model(base, device="cpu")
    randomise(add_lora(model, "policy", 4, 8), scale)
    adapter = tmp_path / "policy"
    save_lora(model, "policy", adapter)
    run_main("--adapter", adapter, "--merge", tmp_path / "merged", module=sample)
    merged = transformers.pipeline("text-generation", f"{tmp_path}/merged", device="cpu")
    changed = []
    for row in toy.rows("eval", 2):
        turns = [{"role": "user", "content": toy.prompt(row)}]
        expected = answer(model, tokenizer, turns, "policy")
        output, = merged(turns, max_new_tokens=48)
        assert output["generated_text"][-1] == {"role": "assistant", "content": expected}
        changed.append(expected != answer(model, tokenizer, turns, None))
    assert any(changed), "the adapter must change some answer"
    with pytest.raises(FileExistsError):
        run_main("--adapter", adapter, "--merge", base, module=sample)
    other_base, = sources.values()
    with pytest.raises(InputError, match="does not fit --model"):
        run_main("--adapter", adapter, "--model", other_base, "--prompt", "x", module=sample)


def test_both_answers_are_printed_each_with_its_critique(finished_run, capsys, monkeypatch):
    """The prompt is typed in several lines."""
    prompt = toy.prompt(toy.rows("eval", 3)[2])
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{prompt}\n"))
    run_main("--adapter", finished_run / "policy", "--max_new_tokens", 96,
             "--reward_model", finished_run / "reward/adapter", module=sample)
    parts = capsys.readouterr().out.strip().split("\n\n")
    model, tokenizer = load_model(ROOT / "toy" / "base", device="cpu")
    load_lora(model, "policy", finished_run / "policy")
    for name, adapter, part in zip(("base", "policy"), (None, "policy"), parts, strict=True):
        expected = answer(model, tokenizer, prompt, adapter)
        line, tokens, *critique = part.strip().splitlines()
        assert line == f"{name}: {expected}"
        assert re.sub(r"\[[+-]|[+-]\]", "", tokens) == f"R_φ: {expected}"
        spans = json.loads(critique[1])
        for sign, key in (("+", "good_spans"), ("-", "poor_spans")):
            marks = re.findall(rf"\[\{sign}(.*?)\{sign}\]", tokens)
            assert all(any(mark in quote for quote in spans[key]) for mark in marks)
    assert re.search(r"\[[+-].*[+-]\]", "".join(parts))
