"""eval.py as a user runs it: every task, comparisons before/after, resuming, and bad input."""

import hashlib
import json
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from loopback import loopback
import eval as evaluation
import toy
from annotate import token_rewards
from data import read_rows, write_rows
from helpers import ROOT, error_message, run_main
from measures import benchmarks, metrics, spans
from measures.metrics import bleu, bootstrap, perplexity, rouge
from model import add_lora, load_lora, load_model, lora_parameters, save_lora


def run(capsys, *flags) -> tuple[dict, str]:
    """Run eval.py and return (result.json, its output)."""
    run_main(*flags, module=evaluation)
    out = Path(flags[flags.index("--output_dir") + 1])
    return json.loads((out / "result.json").read_text()), capsys.readouterr().out


def figure(result: dict, measure: str) -> dict:
    return next(line for line in result["figures"] if line["measure"] == measure)


def value(result: dict, measure: str, side: str = "after") -> float:
    """A figure of one side, without its interval."""
    return figure(result, measure)[side][0]


def random_adapter(base, directory, scale):
    """Save an adapter with random weights, so that its answers differ from the base."""
    torch.manual_seed(1)
    model, _ = load_model(base, device="cpu")
    add_lora(model, "policy", 4, 8, 0.0, ["q_proj", "v_proj"])
    with torch.no_grad():
        for p in lora_parameters(model, "policy"):
            p += scale * torch.randn(p.shape)
    save_lora(model, "policy", directory)
    return directory


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    return random_adapter(ROOT / "toy" / "base", tmp_path_factory.mktemp("adapter"), 0.05)


@pytest.fixture(scope="module")
def stories_flags(shared, tmp_path_factory):
    model = shared / "models" / "stories260K"
    path = random_adapter(model, tmp_path_factory.mktemp("stories"), 0.1)
    return ["--model", model, "--adapter", path, "--max_new_tokens", "12"]


def test_every_figure_of_the_toy_table_can_be_recomputed_from_the_answers(
        adapter, tmp_path, monkeypatch, capsys):  # Table 2
    scored = []
    monkeypatch.setattr(evaluation, "perplexity",
                        lambda *args: scored.append(args[3]) or perplexity(*args))
    # test_metrics.py compares BERTScore itself with the bert-score package.
    monkeypatch.setattr(metrics, "load_encoder", lambda name: [name])
    monkeypatch.setattr(metrics, "bert_score", lambda texts, references, name: [
        {"precision": 0, "recall": 0, "f1": len(text + reference + name) / 1000}
        for text, reference in zip(texts, references, strict=True)])
    result, printed = run(capsys, "--adapter", adapter, "--limit", "30", "--encoder", "name",
                          "--output_dir", tmp_path)
    assert len(scored) == 3  # the answers of both sides, and the references once
    rows = toy.rows("eval", 30)
    texts = {name: [row["response"] for row in read_rows(tmp_path / f"{name}.jsonl")]
             for name in ("before", "after")}
    references = [row["reference"] for row in rows]
    model, tokenizer = load_model(ROOT / "toy" / "base", device="cpu")
    prompts = [f"Summarise the post in one sentence.\n\nPost: {row['post']}" for row in rows]
    assert texts["before"] != texts["after"]
    for name, answers in texts.items():
        truth = [toy.fact_accuracy(row, text) for row, text in zip(rows, answers)]
        assert figure(result, "fact accuracy")[name] == pytest.approx(
            [np.mean(truth), *bootstrap(truth)])
        scores = [rouge(text, reference)["rougeL"]
                  for text, reference in zip(answers, references)]
        assert value(result, "rougeL", name) == pytest.approx(np.mean(scores))
        lengths = [len(text + reference + "name")
                   for text, reference in zip(answers, references)]
        assert value(result, "BERTScore F1", name) == pytest.approx(np.mean(lengths) / 1000)
        assert value(result, "BLEU", name) == pytest.approx(bleu(answers, references))
        nats, tokens = np.sum(perplexity(model, tokenizer, prompts, answers), axis=0)
        assert value(result, "perplexity", name) == pytest.approx(np.exp(nats / tokens))
        assert value(result, "tokens", name) == pytest.approx(tokens / 30)
    line = figure(result, "fact accuracy")
    change, low, high = line["difference"]
    assert (change == pytest.approx(line["after"][0] - line["before"][0])
            and low <= change <= high)
    assert line["rows"] == 30 and line["unit"] == "0–1 ↑"
    assert f"{line['after'][0]:.3f} [{line['after'][1]:.3f}, " in printed
    assert "before: no adapter, the base toy/base" in printed and f"after: {adapter}" in printed


def test_saved_answers_are_reused_and_do_not_depend_on_the_batch_size(
        adapter, tmp_path, monkeypatch, capsys):
    flags = ("--adapter", adapter, "--max_new_tokens", 16)
    folder = tmp_path / "b"
    expected, _ = run(capsys, *flags, "--limit", 6, "--output_dir", tmp_path / "a")
    files = sorted((tmp_path / "a").glob("answers-*.jsonl"))
    assert len(files) == 2
    lines = files[0].read_bytes().splitlines(True)
    folder.mkdir()
    (folder / files[0].name).write_bytes(b"".join(lines[:4]) + lines[4][:20])  # as after a kill
    batch_sizes, generate = [], evaluation.generate
    monkeypatch.setattr(evaluation, "generate", lambda model, prompts, *a, **k:
                        batch_sizes.append(len(prompts)) or generate(model, prompts, *a, **k))
    copy = shutil.copytree(ROOT / "toy" / "base", tmp_path / "copy_of_base")
    flags = (*flags, "--output_dir", folder)
    result, _ = run(capsys, *flags, "--limit", 6, "--batch_size", 5)
    assert sum(batch_sizes) == 12 - 4 and max(batch_sizes) == 5
    assert result["figures"] == expected["figures"]
    for change in (("--seed", 1), ("--model", copy)):                 # need other answers
        batch_sizes.clear()
        run(capsys, *flags, "--limit", 2, *change)
        assert sum(batch_sizes) == 4
    run(capsys, *flags, "--limit", 2, "--model", copy)
    assert sum(batch_sizes) == 4                                      # all answers are reused
    os.utime(copy / "model.safetensors", (1, 1))                      # as if overwritten
    run(capsys, *flags, "--limit", 2, "--model", copy)
    assert sum(batch_sizes) == 8


def annotated_rows(n: int) -> tuple[list[dict], list[dict]]:
    """(rows as annotate.py writes them, the replies of the toy's exact critic to them)."""
    rows, replies = [], []
    rng = random.Random(0)
    for row in toy.rows("eval", n):
        response = toy.write_summary(toy.confuse(row["facts"], rng), rng)
        reply = toy.critique(row, response)
        quotes = json.loads(reply.split("\n")[1])
        spans = [{"start": response.index(quote), "end": response.index(quote) + len(quote),
                  "label": 1 if key == "good_spans" else -1}
                 for key in quotes for quote in quotes[key]]
        rows.append({"id": row["id"], "prompt": row["post"], "response": response,
                     "critique": "c", **quotes, "spans": spans})
        replies.append({"id": row["id"], "response": reply})
    return rows, replies


def test_r_phi_is_judged_by_spans_and_unreadable_replies_count_as_wrong(
        tmp_path, monkeypatch, capsys):  # Table 1, Appendix E
    rows, replies = annotated_rows(20)
    for reply in replies[:5]:
        reply["response"] = "no idea"
    write_rows(tmp_path / "gold.jsonl", rows)
    write_rows(tmp_path / "a.jsonl", replies)
    write_rows(tmp_path / "b.jsonl", [row | {"response": "I cannot say."} for row in replies])
    prompts = []
    out = tmp_path / "out"
    with loopback(responder=lambda body: prompts.append(body["messages"][1]["content"])
                  or "[[C]]") as server:
        result, printed = run(
            capsys, "--task", "reward_model", "--data", tmp_path / "gold.jsonl", "--adapter",
            tmp_path / "a.jsonl", "--before", tmp_path / "b.jsonl", "--judge_model", "judge",
            "--base_url", server.url, "--output_dir", out)
    assert value(result, "win rate") == 0.5 and all("<feedback_a" in text for text in prompts)
    assert len(prompts) == 40                                         # both orders of each pair
    assert value(result, "critiques that cannot be read", "before") == 1
    assert value(result, "critiques that cannot be read") == 0.25
    for measure in ("tokens, precision", "spans, exact", "spans, overlap index",
                    "spans, ≥ 90 % overlap"):
        share, low, high = figure(result, f"good {measure}")["after"]
        assert share == high == 1 and 0.7 < low < 1         # Wilson's interval, not [1, 1]
    assert value(result, "good tokens, recall") < 1 and "Table 19" in printed
    reasons = [row["reason"] for row in read_rows(out / "after.jsonl")]
    assert reasons == 5 * ["this critique cannot be read"] + 15 * [None]
    monkeypatch.setattr(sys, "argv", ["spans", "--audit", str(out / "after.jsonl")])
    spans.main()
    assert "5 rows without feedback were left out" in capsys.readouterr().out


def test_r_phi_is_judged_on_rows_outside_its_training_set(adapter, tmp_path, capsys):
    rows, _ = annotated_rows(12)
    write_rows(tmp_path / "gold.jsonl", rows)
    reward_model = shutil.copytree(adapter, tmp_path / "reward" / "adapter")
    flags = ("--task", "reward_model", "--data", tmp_path / "gold.jsonl",
             "--adapter", reward_model, "--max_new_tokens", "4",
             "--output_dir", tmp_path / "out")
    result, printed = run(capsys, *flags)                # without samples.jsonl
    assert figure(result, "critiques that cannot be read")["rows"] == 12
    assert "may have been trained on these rows" in printed
    samples = [{"id": row["id"], "response": row["response"]} for row in rows]
    samples[0] |= {"response": "another response to it, which was trained on"}
    write_rows(reward_model.parent / "samples.jsonl", samples[:5])
    result, printed = run(capsys, *flags, "--limit", "3")
    assert "4 of 12 rows, held out" in printed and "may have been" not in printed
    assert not (tmp_path / "out" / "before.jsonl").exists()     # the base is not evaluated
    assert [row["id"] for row in read_rows(tmp_path / "out" / "after.jsonl")] == \
        [row["id"] for row in rows[1:4]]
    _, tokenizer = load_model(ROOT / "toy" / "base", device="cpu")
    good_tokens = [token_rewards(
        row["response"], spans.response_tokens(tokenizer, row["response"]),
        spans.read_spans(row)).count(1) for row in rows[1:4]]
    counts, = read_rows(tmp_path / "out" / "after_counts.json")
    assert [total for _, total in counts["good tokens, recall"]] == good_tokens


def test_arc_and_code_before_and_after(stories_flags, shared, tmp_path, capsys):
    data = shared / "data" / "arc_challenge_dev.jsonl"
    result, _ = run(capsys, "--task", "arc", "--data", data, "--limit", "12",
                    *stories_flags, "--output_dir", tmp_path / "arc")
    model, tokenizer = load_model(stories_flags[1], device="cpu")
    load_lora(model, "mine", stories_flags[3])
    for name, lora in (("before", None), ("after", "mine")):
        questions = benchmarks.read_arc(data)[:12]
        rows = benchmarks.arc_scores(
            questions, benchmarks.choice_logprobs(model, tokenizer, questions, lora))
        for key in ("accuracy", "accuracy_norm"):
            assert (value(result, key, name)
                    == pytest.approx(np.mean([row[key] for row in rows])))
    data = shared / "data" / "HumanEval.jsonl.gz"
    flags = ("--task", "code", "--data", data, "--limit", "4")
    out = tmp_path / "not_run"
    result, printed = run(capsys, *flags, *stories_flags, "--output_dir", out)
    assert "nothing was run" in printed and result["figures"] == []
    assert {"task_id", "solution"} <= read_rows(out / "after.jsonl")[2].keys()
    write_rows(tmp_path / "samples.jsonl", [
        {"task_id": p["task_id"],
         "solution": p["prompt"] + (p["canonical_solution"] if i else "    pass\n")}
        for i, p in enumerate(read_rows(data)[:4])])
    result, _ = run(capsys, *flags, "--adapter", tmp_path / "samples.jsonl",
                    "--allow_code_execution", "--output_dir", tmp_path)
    assert value(result, "pass@1") == 0.75
    status = [row["status"] for row in read_rows(tmp_path / "after.jsonl")]
    assert status[0] != "passed" and status[1:] == 3 * ["passed"]


def verdict(body):
    """A judge that prefers the answer with more letters "e", and rates prompts by length."""
    system, text = (message["content"] for message in body["messages"])
    if "[[A]]" not in system:
        return f"Its length: [[{1 + len(text) % 10}]]"
    a, b = (re.search(rf"<answer_{x}-(\w+)>\n(.*?)\n</answer_{x}-\1>", text, re.S)[2].count("e")
            for x in "ab")
    return "[[C]]" if a == b else "[[A]]" if a > b else "[[B]]"


def test_the_judge_says_win_tie_loss_and_is_not_asked_twice(adapter, tmp_path, capsys):
    """The rows are of task slf5k, and each one occurs twice."""
    posts = 2 * [{"post": row["post"], "ideal_human_summary": row["reference"]}
                 for row in toy.rows("eval", 5)]
    write_rows(tmp_path / "posts.jsonl", posts)
    with loopback(responder=verdict) as server:
        flags = ("--task", "slf5k", "--data", tmp_path / "posts.jsonl", "--adapter", adapter,
                 "--model", "toy/base", "--max_new_tokens", "32", "--max_critique_tokens", "96",
                 "--judge_model", "judge", "--base_url", server.url,
                 "--output_dir", tmp_path)
        _, dry = run(capsys, *flags, "--dry_run")
        before, after = ([row["response"] for row in read_rows(tmp_path / f"{name}.jsonl")]
                         for name in ("before", "after"))
        # Equal rows share their requests, and so do both orders of equal answers.
        pairs = {(row["post"], *pair) for row, a, b in zip(posts, before, after)
                 for pair in ((a, b), (b, a))}
        assert f"20 questions, {len(pairs)} requests to send" in dry
        assert server.stats()["calls"] == 0
        result, printed = run(capsys, *flags)
        assert server.stats()["calls"] == len(pairs)
        counts = [(a.count("e"), b.count("e")) for a, b in zip(after, before)]
        wins = [(a > b) + 0.5 * (a == b) for a, b in counts]
        assert value(result, "win rate") == pytest.approx(np.mean(wins))
        table = rf"win +tie +loss.*\n─+\n{wins.count(1)} +{wins.count(0.5)} +{wins.count(0)} "
        assert re.search(table, printed)
        assert figure(result, "rouge1")["rows"] == 10
        assert value(result, "perplexity of references") > 1
        run(capsys, *flags)
        assert server.stats()["calls"] == len(pairs)
        server.settings.responder = lambda body: "I like both of them a lot."
        result, printed = run(capsys, *flags, "--judge_model", "another")
    assert "20 of 20 questions have no verdict; the first is 0: no verdict" in printed
    assert figure(result, "win rate")["rows"] == 0 and "after" not in figure(result, "win rate")


def test_mt_bench_and_alpaca_eval_on_the_published_files(
        stories_flags, shared, tmp_path, capsys):
    questions = [row for row in read_rows(shared / "data" / "mt_bench_question.jsonl")
                 if sum(map(len, row["turns"])) < 400][:4]
    write_rows(tmp_path / "questions.jsonl", questions)
    with loopback(responder=verdict) as server:
        judge = ("--judge_model", "judge", "--base_url", server.url)
        result, _ = run(capsys, "--task", "mt_bench", "--data", tmp_path / "questions.jsonl",
                        *stories_flags, *judge, "--output_dir", tmp_path / "mt")
        line = figure(result, "rating")
        assert 1 <= line["before"][0] <= 10 and line["rows"] == 4 and line["unit"] == "1–10 ↑"
        turns = [value(result, f"rating, turn {k}") for k in (1, 2)]
        assert line["after"][0] == pytest.approx(np.mean(turns))
        row = read_rows(tmp_path / "mt" / "after.jsonl")[0]
        assert len(row["response"]) == 2 and row["question_id"] == questions[0]["question_id"]
        data = shared / "data" / "alpaca_eval_100.jsonl"
        result, printed = run(capsys, "--task", "alpaca_eval", "--data", data, "--limit", "6",
                              *stories_flags, *judge, "--output_dir", tmp_path / "alpaca")
        assert figure(result, "win rate")["rows"] == 6
        for name in ("before", "after"):
            path = tmp_path / "alpaca" / f"{name}_outputs.json"
            assert f"run: alpaca_eval --model_outputs {path} --is_over" in printed
        outputs = json.loads((tmp_path / "alpaca" / "after_outputs.json").read_text())
        rows = read_rows(tmp_path / "alpaca" / "after.jsonl")
        assert outputs == [{"instruction": row["instruction"], "output": answer["response"],
                            "generator": str(stories_flags[3])}
                           for row, answer in zip(read_rows(data), rows)]
        from_file, _ = run(capsys, "--task", "alpaca_eval", "--data", data, "--limit", "6",
                           "--adapter", tmp_path / "alpaca" / "after_outputs.json", *judge,
                           "--output_dir", tmp_path / "from_file")
        assert figure(from_file, "win rate")["after"] == figure(result, "win rate")["after"]


def test_rows_without_a_verdict_are_left_out_of_every_side():
    line, = metrics.table_lines({"before": {"rating": [1, None, 5]},
                                 "after": {"rating": [2, 9, 4]}}, evaluation.UNITS)
    assert line["rows"] == 2 and line["before"][0] == 3 and line["after"][0] == 3


def test_an_adapter_and_its_copy_give_the_same_answers(adapter, tmp_path, capsys):
    """Both sides use the same random numbers, and the times of the files do not matter."""
    out = tmp_path / "out"
    copy = shutil.copytree(adapter, tmp_path / "copy")
    os.utime(copy / "adapter_model.safetensors", (1, 1))
    flags = ("--adapter", copy, "--before", adapter, "--limit", "8", "--temperature", "2",
             "--output_dir", out)
    result, _ = run(capsys, *flags)
    rows = read_rows(out / "after.jsonl")
    assert rows == read_rows(out / "before.jsonl")
    assert read_rows(out / "after_counts.json") == read_rows(out / "before_counts.json")
    assert all(line["difference"] == [0, 0, 0] for line in result["figures"])
    file, = out.glob("answers-*")
    assert len(read_rows(file)) == 8                                  # both sides share them
    run(capsys, *flags, "--seed", "1")
    assert read_rows(out / "after.jsonl") != rows


def test_empty_answers_from_a_file_are_not_dropped(tmp_path, capsys):
    answers = [{"id": row["id"], "response": row["reference"] if i else ""}
               for i, row in enumerate(toy.rows("eval", 4))]
    file = tmp_path / "answers.json"
    flags = ("--limit", "4", "--output_dir", tmp_path / "out")
    file.write_text(json.dumps(answers))
    result, _ = run(capsys, *flags, "--adapter", file)
    assert value(result, "fact accuracy") == value(result, "rouge1") == pytest.approx(0.75)
    for rows, message in (([*answers, answers[0]], "two rows have the id toy-eval-0-0;"),
                          (answers[:1], "row toy-eval-0-1 has no 'response'; ")):
        file.write_text(json.dumps(rows))
        assert message in error_message("eval.py", *flags, "--adapter", file)
    # `--adapter none` evaluates only the base, although the toy preset names an adapter.
    flags = ("--limit", "4", "--output_dir", tmp_path / "base")
    result, printed = run(capsys, *flags, "--adapter", "none", "--max_new_tokens", "3")
    assert result["config"]["adapter"] is None and "difference" not in printed
    assert set(figure(result, "fact accuracy")) == {"measure", "unit", "rows", "base"}


def test_a_label_without_gold_spans_has_no_figures(tmp_path, capsys):
    text = "The cat sat on the mat."
    row = {"id": "1", "prompt": "p", "response": text, "critique": "c", "good_spans": [],
           "poor_spans": ["mat"], "spans": [{"start": 19, "end": 22, "label": -1}]}
    write_rows(tmp_path / "gold.jsonl", [row, row | {"id": "2"}])
    reply = json.dumps({"textual_feedback": "so", "good_spans": ["cat"], "poor_spans": ["mat"]})
    write_rows(tmp_path / "a.jsonl", [{"id": n, "response": reply} for n in "12"])
    result, printed = run(capsys, "--task", "reward_model", "--data", tmp_path / "gold.jsonl",
                          "--adapter", tmp_path / "a.jsonl", "--output_dir", tmp_path / "o")
    assert value(result, "poor spans, exact") == 1
    assert not re.search(r"^good, quarter", printed, re.M)              # lines of Table 19
    assert not any(line["measure"].startswith("good") for line in result["figures"])
    assert "after: in words of the response" in printed


MY_TASK = """
import json

from data import Task

CHAT = Task(
    name="chat", needs=(("article",),), truth={"words": lambda row, text: len(text.split())},
    policy_prompt=lambda row: [{"role": "user", "content":
        f"Summarise the post in one sentence.\\n\\nPost: {row['article']}"}])

def critic(row, response):
    assert not row.get("outcome"), "this outcome belongs to another response"
    return json.dumps({"critique": "c", "good_spans": [response], "poor_spans": []})
"""


@pytest.fixture()
def own_rows(tmp_path, monkeypatch) -> list[dict]:
    """40 rows of an own task with chat prompts, my_task:CHAT in tmp_path; three references."""
    (tmp_path / "my_task.py").write_text(MY_TASK)
    monkeypatch.syspath_prepend(tmp_path)
    return [{"id": row["id"], "article": row["post"], "outcome": "passed"}
            | ({"reference": row["reference"]} if i < 3 else {})
            for i, row in enumerate(toy.rows("eval", 40))]


def test_an_own_task_with_chat_prompts_is_judged_by_every_critic(
        own_rows, adapter, tmp_path, capsys):
    """A prompt that is too long is left out, and only rows with a reference have ROUGE."""
    data = tmp_path / "rows.jsonl"
    write_rows(data, [*own_rows[:6], {"id": "long", "article": "word " * 999}])
    out = tmp_path / "out"
    with loopback(responder=verdict) as server:
        result, printed = run(
            capsys, "--task", "my_task:CHAT", "--data", data, "--model", "toy/base",
            "--adapter", adapter, "--annotator_function", "my_task:critic", "--max_new_tokens",
            24, "--judge_model", "judge", "--base_url", server.url, "--output_dir", out)
    assert printed.count("left out 1 of 7 rows") == 1
    _, tokenizer = load_model("toy/base", device="cpu")
    for name in ("before", "after"):
        rows = read_rows(out / f"{name}.jsonl")
        texts = [row["response"] for row in rows]
        assert [row["id"] for row in rows] == [row["id"] for row in own_rows[:6]]
        assert rows[0]["prompt"].startswith("user: Summarise")
        assert value(result, "words", name) == np.mean([len(text.split()) for text in texts])
        lengths = np.array([len(tokenizer.encode(text)) for text in texts])
        assert value(result, "mean δ per token, annotator", name) == pytest.approx(
            np.mean(lengths / (lengths + 1)))                        # δ is 1, and 0 for EOS
        scores = [rouge(text, row["reference"])["rouge1"]
                  for text, row in zip(texts, own_rows[:3])]
        assert value(result, "rouge1", name) == pytest.approx(np.mean(scores))
    assert figure(result, "rouge1")["rows"] == 3 and figure(result, "tokens")["rows"] == 6
    assert figure(result, "words")["unit"] == "↑"
    assert figure(result, "win rate")["rows"] == 6


def test_the_printed_command_evaluates_an_own_run_from_any_directory(
        own_rows, reward, tmp_path):
    """The toy base is found beside the scripts; only the held-out rows are used."""
    write_rows(tmp_path / "rows.jsonl", own_rows)
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}

    def run_script(command: list[str]) -> str:
        process = subprocess.run([sys.executable, *command], cwd=tmp_path, capture_output=True,
                                 text=True, env=environment)
        assert process.returncode == 0, process.stderr[-2000:]
        return process.stdout

    output = run_script(shlex.split(
        f"{ROOT}/text2grad.py --task my_task:CHAT --data rows.jsonl --model toy/base "
        f"--reward_model {reward} --annotator_function my_task:critic --iterations 1 "
        "--batch_size 8 --minibatch_size 8 --ppo_epochs 1 --probe_rows 0 --eval_rows 4 "
        "--max_new_tokens 32 --max_critique_tokens 96"))
    command = next(line for line in output.splitlines() if line.startswith("next: python "))
    printed = run_script(shlex.split(command.removeprefix("next: python ")))
    assert "uses 4 of 40 rows, held out from runs/chat/policy" in printed
    assert "mean δ per token, R_φ" in printed and "mean δ per token, annotator" in printed
    run_directory = tmp_path / "runs" / "chat"
    ids = {row["id"] for row in read_rows(run_directory / "policy-eval-chat" / "after.jsonl")}
    assert ids == {row["id"] for row in read_rows(run_directory / "after_samples.jsonl")}


def test_two_runs_without_a_common_held_out_prompt_are_refused(own_rows, adapter, tmp_path):
    data = tmp_path / "rows.jsonl"
    write_rows(data, own_rows)
    digest = hashlib.sha256(json.dumps(None).encode()
                            + hashlib.sha256(data.read_bytes()).digest()).hexdigest()
    for seed in (0, 1):
        shutil.copytree(adapter, tmp_path / f"run{seed}" / "policy")
        write_rows(tmp_path / f"run{seed}" / "config.json", [{
            "task": "my_task:CHAT", "seed": seed, "eval_rows": 1,
            "sha256 of --data": digest[:16]}])
    message = error_message("eval.py", "--task", "my_task:CHAT", "--data", data,
                            "--before", tmp_path / "run0" / "policy",
                            "--adapter", tmp_path / "run1" / "policy")
    assert "rows.jsonl: no prompt is held out from both adapters" in message


def test_delta_is_that_of_the_table_that_training_prints(finished_run, tmp_path, capsys):
    trained, = read_rows(finished_run / "result.json")
    for name in ("before", "after"):
        result, _ = run(capsys, "--adapter", finished_run / f"{name}_samples.jsonl",
                        "--limit", 8, "--reward_model", finished_run / "reward" / "adapter",
                        "--output_dir", tmp_path / name)
        for measure in ("mean δ per token", "tokens in good spans", "tokens in poor spans",
                        "unparseable critiques"):
            assert value(result, f"{measure}, R_φ") == pytest.approx(trained[name][measure])
        assert value(result, "fact accuracy") == pytest.approx(trained[name]["fact accuracy"])


def test_another_adapter_or_no_adapter_is_refused(adapter, tmp_path, monkeypatch, capsys):
    run_directory = tmp_path / "run"
    policy = shutil.copytree(adapter, run_directory / "policy")
    message = error_message("eval.py", "--adapter", run_directory)
    assert f"no adapter here; name {policy}" in message
    flags = ("--limit", 2, "--max_new_tokens", 3)
    run_main("--adapter", policy, *flags, module=evaluation)
    out = run_directory / "policy-eval-toy"                   # the default --output_dir
    assert (out / "result.json").exists()
    answers = out / "after.jsonl"
    message = error_message("eval.py", "--adapter", answers, *flags, "--output_dir", out)
    assert f"adapter was {policy}, is {answers}); choose another --output_dir" in message
    monkeypatch.setattr(evaluation, "WORLD_SIZE", 2)
    assert "without torchrun" in error_message("eval.py", "--adapter", policy, *flags)


def test_a_benchmark_prompt_without_room_for_an_answer_counts_as_wrong(
        adapter, tmp_path, capsys):
    rows, _ = annotated_rows(2)
    rows[0]["prompt"] = "word " * 999
    write_rows(tmp_path / "gold.jsonl", rows)
    result, printed = run(capsys, "--task", "reward_model", "--data", tmp_path / "gold.jsonl",
                          "--adapter", adapter, "--output_dir", tmp_path / "out")
    assert "no room for 1 answers" in printed
    assert read_rows(tmp_path / "out" / "after.jsonl")[0]["reply"] == ""
    assert figure(result, "critiques that cannot be read")["rows"] == 2


def test_nan_weights_are_an_error(tmp_path):
    broken = random_adapter(ROOT / "toy" / "base", tmp_path / "broken", float("nan"))
    message = error_message("eval.py", "--adapter", broken, "--output_dir", tmp_path / "out")
    assert "NaN or infinite value" in message


@pytest.mark.parametrize("flags, message", [
    (("--batch_size", "0"), "--batch_size: 0 must be at least 1"),
    (("--limit", "-2"), "--limit: -2"), (("--temperature", "nan"), "--temperature: nan"),
    (("--dtype", "fp99"), "--dtype: fp99 must be one of"),
    (("--max_usd", "1"), "--price_in"),
    (("--judge_prompts", "nowhere"), "nowhere: no such file"),
    (("--adapter", "nowhere"), "there is no adapter"), (("--task", "arc"), "needs --data"),
    (("--task", "arc", "--data", "d", "--before", __file__), "test_eval.py is a file"),
    (("--task", "reward_model", "--data", "d"), "needs --adapter, R_φ"),
    (("--adapter", "none", "--reward_model", __file__), "test_eval.py is a file"),
    (("--task", "poetry"), "--task poetry: no such name")])
def test_an_invalid_flag_is_refused_before_the_model_is_loaded(flags, message, monkeypatch,
                                                               tmp_path):
    monkeypatch.setattr(evaluation, "load_model", None)
    assert message in error_message("eval.py", "--output_dir", tmp_path / "out", *flags)
    assert not (tmp_path / "out").exists()


def test_the_error_of_a_bad_row_names_the_row(tmp_path):
    data = tmp_path / "rows.jsonl"
    out = ("--output_dir", tmp_path / "out")
    bad_span = {"id": "1", "prompt": "p", "response": "r",
                "spans": [{"start": 0, "end": 9, "label": 1}]}
    for rows, flags, message in (
            ([bad_span], ("--task", "reward_model", "--adapter", data),
             "1: .* not a valid span"),
            ([bad_span], ("--task", "code"), "rows.jsonl, line 1: field")):
        write_rows(data, rows)
        assert re.search(message, error_message("eval.py", *flags, "--data", data, *out))


def test_the_context_limits_an_answer_whatever_else_is_in_its_batch(
        adapter, tmp_path, monkeypatch, capsys):
    """The context has room for fewer tokens than --max_new_tokens allows."""
    rows, _ = annotated_rows(3)
    for row, n in zip(rows, (0, 40, 90)):
        row["prompt"] = "word " * n + row["prompt"]
    write_rows(tmp_path / "gold.jsonl", rows)
    limits, generate = [], evaluation.generate
    monkeypatch.setattr(evaluation, "generate", lambda model, prompts, n, *a, **k:
                        limits.append(n) or generate(model, prompts, n, *a, **k))
    flags = ("--task", "reward_model", "--data", tmp_path / "gold.jsonl", "--adapter", adapter)
    run(capsys, *flags, "--output_dir", tmp_path / "a")
    assert len(set(limits)) > 1 and all(n % 64 == 0 and 0 < n < 512 for n in limits)
    batched = read_rows(tmp_path / "a" / "after.jsonl")
    run(capsys, *flags, "--batch_size", "1", "--output_dir", tmp_path / "b")
    assert read_rows(tmp_path / "b" / "after.jsonl") == batched
