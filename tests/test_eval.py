"""eval.py as a user runs it: every task, comparisons before/after, resuming, and bad input."""

import json
import os
import random
import re
import shutil
import sys

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

BASE = ROOT / "toy" / "base"


def arguments(**flags) -> list:
    """--name value of each flag; only --name if the value is True."""
    return [word for name, value in flags.items()
            for word in ([f"--{name}"] if value is True else [f"--{name}", value])]


@pytest.fixture()
def run(tmp_path, capsys):
    """A function of flags that runs eval.py and returns (result.json, its output)."""
    def evaluate(out=tmp_path / "out", **flags) -> tuple[dict, str]:
        run_main(*arguments(output_dir=out, **flags), module=evaluation)
        return json.loads((out / "result.json").read_text()), capsys.readouterr().out
    return evaluate


def figure(result: dict, measure: str) -> dict:
    return next(line for line in result["figures"] if line["measure"] == measure)


def value(result: dict, measure: str, side: str = "after") -> float:
    """A figure of one side, without its interval."""
    return figure(result, measure)[side][0]


def column(path, name: str = "response") -> list:
    """One field of each row in a file."""
    return [row[name] for row in read_rows(path)]


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
    return random_adapter(BASE, tmp_path_factory.mktemp("adapter"), 0.05)


@pytest.fixture(scope="module")
def stories_flags(shared, tmp_path_factory):
    model = shared / "models" / "stories260K"
    path = random_adapter(model, tmp_path_factory.mktemp("stories"), 0.1)
    return {"model": model, "adapter": path, "max_new_tokens": 12}


def test_every_figure_of_the_toy_table_can_be_recomputed_from_the_answers(
        adapter, run, tmp_path, monkeypatch):  # Table 2
    # test_measures.py compares BERTScore itself with the bert-score package.
    monkeypatch.setattr(metrics, "load_encoder", lambda name: [name])
    monkeypatch.setattr(metrics, "bert_score", lambda texts, references, name: [
        {"precision": 0, "recall": 0, "f1": len(text + reference + name) / 1000}
        for text, reference in zip(texts, references, strict=True)])
    result, printed = run(tmp_path, adapter=adapter, limit=30, encoder="name")
    rows = toy.rows("eval", 30)
    references = [row["reference"] for row in rows]
    prompts = [f"Summarise the post in one sentence.\n\nPost: {row['post']}" for row in rows]
    texts = {name: column(tmp_path / f"{name}.jsonl") for name in ("before", "after")}
    assert texts["before"] != texts["after"]
    for name, answers in texts.items():
        pairs = [*zip(answers, references)]
        truth = [toy.fact_accuracy(row, text) for row, text in zip(rows, answers)]
        assert figure(result, "fact accuracy")[name] == pytest.approx(
            [np.mean(truth), *bootstrap(truth)])
        nats, tokens = np.sum(perplexity(*load_model(BASE, device="cpu"), prompts, answers), 0)
        for measure, expected in {
                "rougeL": np.mean([rouge(*pair)["rougeL"] for pair in pairs]),
                "BERTScore F1": np.mean([len("".join(pair) + "name") for pair in pairs]) / 1000,
                "BLEU": bleu(answers, references), "perplexity": np.exp(nats / tokens),
                "tokens": tokens / 30}.items():
            assert value(result, measure, name) == pytest.approx(expected)
    line = figure(result, "fact accuracy")
    assert line["rows"] == 30 and line["unit"] == "↑"
    assert f"{line['after'][0]:.3f} [{line['after'][1]:.3f}, " in printed
    assert "before: no adapter, the base toy/base" in printed and f"after: {adapter}" in printed
    for line in result["figures"]:
        if "difference" in line:
            change, low, high = line["difference"]
            assert change == pytest.approx(line["after"][0] - line["before"][0])
            assert low <= change <= high


def test_saved_answers_are_reused_and_do_not_depend_on_the_batch_size(
        adapter, run, tmp_path, monkeypatch):
    sizes, generate = [], evaluation.generate
    monkeypatch.setattr(evaluation, "generate", lambda model, prompts, *a, **k:
                        sizes.append(len(prompts)) or generate(model, prompts, *a, **k))
    flags = {"adapter": adapter, "max_new_tokens": 16}
    expected, _ = run(**flags, limit=6)
    files = sorted((tmp_path / "out").glob("answers-*.jsonl"))
    assert len(files) == 2
    lines = files[0].read_bytes().splitlines(True)
    folder = tmp_path / "b"
    folder.mkdir()
    (folder / files[0].name).write_bytes(b"".join(lines[:4]) + lines[4][:20])  # as after a kill
    sizes.clear()
    result, _ = run(folder, **flags, limit=6, rollout_batch_size=5)
    assert sum(sizes) == 12 - 4 and max(sizes) == 5
    assert result["figures"] == expected["figures"]
    copy = shutil.copytree(BASE, tmp_path / "copy_of_base")
    for change, expected in (({"seed": 1}, 4), ({"model": copy}, 4), ({"model": copy}, 0)):
        sizes.clear()                                  # another seed or base needs new answers
        run(folder, **flags | change, limit=2)
        assert sum(sizes) == expected
    os.utime(copy / "model.safetensors", (1, 1))       # as if overwritten
    run(folder, **flags, limit=2, model=copy)
    assert sum(sizes) == 4


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


@pytest.fixture()
def gold(tmp_path) -> dict:
    """Flags of --task reward_model with 20 rows of gold spans; replies are in replies.jsonl."""
    rows, replies = annotated_rows(20)
    write_rows(tmp_path / "gold.jsonl", rows)
    write_rows(tmp_path / "replies.jsonl", replies)
    return {"task": "reward_model", "data": tmp_path / "gold.jsonl"}


def test_r_phi_is_judged_by_spans_and_unreadable_replies_count_as_wrong(
        gold, run, tmp_path, monkeypatch, capsys):  # Table 1, Appendix E
    replies = read_rows(tmp_path / "replies.jsonl")
    write_rows(tmp_path / "a.jsonl", [row | {"response": "no idea"} for row in replies[:5]]
               + replies[5:])
    write_rows(tmp_path / "b.jsonl", [row | {"response": "I cannot say."} for row in replies])
    prompts = []
    with loopback(responder=lambda body: prompts.append(body["messages"][1]["content"])
                  or "[[C]]") as server:
        result, printed = run(**gold, adapter=tmp_path / "a.jsonl", before=tmp_path / "b.jsonl",
                              judge_model="judge", base_url=server.url)
    assert value(result, "win rate") == 0.5 and all("<feedback_a" in text for text in prompts)
    assert len(prompts) == 40                                         # both orders of each pair
    assert value(result, "unparseable", "before") == 1
    assert value(result, "unparseable") == 0.25
    for metric in ("good_precision", "good_exact", "good_overlap_index", "good_near"):
        share, low, high = figure(result, metric)["after"]
        assert share == high == 1 and 0.7 < low < 1         # Wilson's interval, not [1, 1]
    assert value(result, "good_recall") < 1 and "Table 19" in printed
    assert "in words of the response" in printed
    scored = tmp_path / "out" / "after.jsonl"
    assert column(scored, "reason") == 5 * ["this critique cannot be read"] + 15 * [None]
    monkeypatch.setattr(sys, "argv", ["spans", "--audit", str(scored)])
    spans.main()
    assert "5 rows without feedback were left out" in capsys.readouterr().out


def test_r_phi_is_judged_on_rows_outside_its_training_set(adapter, gold, run, tmp_path):
    rows = read_rows(gold["data"])
    reward_model = shutil.copytree(adapter, tmp_path / "reward" / "adapter")
    flags = gold | {"adapter": reward_model, "max_new_tokens": 4}
    result, printed = run(**flags)                       # without samples.jsonl
    assert figure(result, "unparseable")["rows"] == 20
    assert "may have been trained on these rows" in printed
    samples = [{"id": row["id"], "response": row["response"]} for row in rows[:5]]
    samples[0] |= {"response": "another response to it, which was trained on"}
    write_rows(reward_model.parent / "samples.jsonl", samples)
    result, printed = run(**flags, limit=3)
    assert "4 of 20 rows, held out" in printed and "may have been" not in printed
    out = tmp_path / "out"
    assert not (out / "before.jsonl").exists()           # the base is not evaluated
    assert column(out / "after.jsonl", "id") == [row["id"] for row in rows[1:4]]
    _, tokenizer = load_model(BASE, device="cpu")
    good_tokens = [token_rewards(
        row["response"], spans.response_tokens(tokenizer, row["response"]),
        spans.read_spans(row)).count(1) for row in rows[1:4]]
    counts = result["counts"]["after"]["good_recall"]
    assert [total for _, total in counts] == good_tokens


def test_a_prompt_that_exceeds_the_context_is_refused(adapter, gold, tmp_path):
    """An answer gets at most half of the context, and the longest prompt comes first."""
    rows = read_rows(gold["data"])
    write_rows(gold["data"], rows[:2] + [rows[2] | {"prompt": "word " * 400}])
    message = error_message("eval.py", *arguments(
        **gold, adapter=adapter, output_dir=tmp_path, rollout_batch_size=1))
    assert "with 256 new tokens it exceeds the model's context of 512 tokens" in message
    assert not [*tmp_path.glob("answers*")][0].read_text()


def test_arc_and_code_before_and_after(stories_flags, shared, run, tmp_path):
    data = shared / "data" / "arc_challenge_dev.jsonl"
    result, _ = run(tmp_path / "arc", task="arc", data=data, limit=12, **stories_flags)
    model, tokenizer = load_model(stories_flags["model"], device="cpu")
    load_lora(model, "mine", stories_flags["adapter"])
    questions = benchmarks.read_arc(data)[:12]
    for name, lora in (("before", None), ("after", "mine")):
        rows = benchmarks.arc_scores(
            questions, benchmarks.choice_logprobs(model, tokenizer, questions, lora))
        for key in ("accuracy", "accuracy_norm"):
            mean = np.mean([row[key] for row in rows])
            assert value(result, key, name) == pytest.approx(mean)
    data = shared / "data" / "HumanEval.jsonl.gz"
    result, printed = run(task="code", data=data, limit=4, **stories_flags)
    assert "nothing was run" in printed and result["figures"] == []
    assert {"task_id", "solution"} <= read_rows(tmp_path / "out" / "after.jsonl")[2].keys()
    write_rows(tmp_path / "samples.jsonl", [
        {"task_id": p["task_id"],
         "solution": p["prompt"] + (p["canonical_solution"] if i else "    pass\n")}
        for i, p in enumerate(read_rows(data)[:4])])
    result, _ = run(tmp_path, task="code", data=data, limit=4, allow_code_execution=True,
                    adapter=tmp_path / "samples.jsonl")
    assert value(result, "pass@1") == 0.75
    status = column(tmp_path / "after.jsonl", "status")
    assert status[0] != "passed" and status[1:] == 3 * ["passed"]


def verdict(body):
    """A judge that prefers the answer with more letters "e", and rates prompts by length."""
    system, text = (message["content"] for message in body["messages"])
    if "[[A]]" not in system:
        return f"Its length: [[{1 + len(text) % 10}]]"
    a, b = (re.search(rf"<answer_{x}-(\w+)>\n(.*?)\n</answer_{x}-\1>", text, re.S)[2].count("e")
            for x in "ab")
    return "[[C]]" if a == b else "[[A]]" if a > b else "[[B]]"


def test_the_judge_says_win_tie_loss_and_is_not_asked_twice(adapter, run, tmp_path):
    """The rows are of task slf5k, and each one occurs twice."""
    posts = 2 * [{"post": row["post"], "ideal_human_summary": row["reference"]}
                 for row in toy.rows("eval", 5)]
    write_rows(tmp_path / "posts.jsonl", posts)
    with loopback(responder=verdict) as server:
        flags = {"task": "slf5k", "data": tmp_path / "posts.jsonl", "adapter": adapter,
                 "model": "toy/base", "max_new_tokens": 32, "max_critique_tokens": 96,
                 "judge_model": "judge", "base_url": server.url}
        _, dry = run(**flags, dry_run=True)
        before, after = (column(tmp_path / "out" / f"{name}.jsonl")
                         for name in ("before", "after"))
        # Equal rows share their requests, and so do both orders of equal answers.
        pairs = {(row["post"], *pair) for row, a, b in zip(posts, before, after)
                 for pair in ((a, b), (b, a))}
        assert f"20 questions, {len(pairs)} requests to send" in dry
        assert len(server.requests) == 0
        result, printed = run(**flags)
        run(**flags)
        assert len(server.requests) == len(pairs)
        counts = [(a.count("e"), b.count("e")) for a, b in zip(after, before)]
        wins = [(a > b) + 0.5 * (a == b) for a, b in counts]
        assert value(result, "win rate") == pytest.approx(np.mean(wins))
        assert (f"{{'win': {wins.count(1)}, 'tie': {wins.count(0.5)}, 'loss': {wins.count(0)}"
                in printed)
        assert figure(result, "rouge1")["rows"] == 10
        assert value(result, "perplexity of references") > 1
        server.responder = lambda body: "I like both of them a lot."
        result, printed = run(**flags | {"judge_model": "another"})
    assert "20 of 20 questions have no verdict (the first: no verdict in [[ ]]" in printed
    assert figure(result, "win rate") == {"measure": "win rate", "unit": "↑", "rows": 0}


def test_mt_bench_and_alpaca_eval_on_the_published_files(stories_flags, shared, run, tmp_path):
    questions = [row for row in read_rows(shared / "data" / "mt_bench_question.jsonl")
                 if sum(map(len, row["turns"])) < 400][:4]
    write_rows(tmp_path / "questions.jsonl", questions)
    with loopback(responder=verdict) as server:
        judge = {"judge_model": "judge", "base_url": server.url, **stories_flags}
        result, _ = run(tmp_path / "mt", task="mt_bench", data=tmp_path / "questions.jsonl",
                        **judge)
        line = figure(result, "rating")
        turns = [value(result, f"rating, turn {k}") for k in (1, 2)]
        assert line["after"][0] == pytest.approx(np.mean(turns)) and line["unit"] == "1–10 ↑"
        assert [len(texts) for texts in column(tmp_path / "mt" / "after.jsonl")] == 4 * [2]
        flags = {"task": "alpaca_eval", "data": shared / "data" / "alpaca_eval_100.jsonl",
                 "limit": 6}
        result, printed = run(**flags, **judge)
        assert figure(result, "win rate")["rows"] == 6
        file = tmp_path / "out" / "after_outputs.json"
        assert f"run: alpaca_eval --model_outputs {file} --is_over" in printed
        from_file, _ = run(tmp_path / "from_file", **flags, **judge | {"adapter": file})
        assert figure(from_file, "win rate")["after"] == figure(result, "win rate")["after"]


def test_rows_without_a_verdict_are_left_out_of_every_side():
    line, = metrics.table_lines({"before": {"rating": [1, None, 5]},
                                 "after": {"rating": [2, 9, 4]}}, evaluation.UNITS)
    assert line["rows"] == 2 and line["before"][0] == 3 and line["after"][0] == 3


def test_an_adapter_and_its_copy_give_the_same_answers(adapter, run, tmp_path):
    """Both sides use the same random numbers, and the times of the files do not matter."""
    out = tmp_path / "out"
    copy = shutil.copytree(adapter, tmp_path / "copy")
    os.utime(copy / "adapter_model.safetensors", (1, 1))
    flags = {"adapter": copy, "before": adapter, "limit": 8, "temperature": 2}
    result, _ = run(**flags)
    rows = read_rows(out / "after.jsonl")
    assert rows == read_rows(out / "before.jsonl")
    assert result["counts"]["after"] == result["counts"]["before"]
    file, = out.glob("answers-*")
    assert len(read_rows(file)) == 8                                  # both sides share them
    run(**flags, seed=1)
    assert read_rows(out / "after.jsonl") != rows


def test_empty_answers_from_a_file_are_not_dropped(run, tmp_path):
    answers = [{"id": row["id"], "response": row["reference"] if i else ""}
               for i, row in enumerate(toy.rows("eval", 4))]
    file = tmp_path / "answers.json"
    file.write_text(json.dumps(answers))
    result, _ = run(limit=4, adapter=file)
    assert value(result, "fact accuracy") == value(result, "rouge1") == pytest.approx(0.75)
    for rows, message in (([*answers, answers[0]], "two rows have the same id;"),
                          (answers[:1], "row toy-eval-0-1 has no 'response'; ")):
        file.write_text(json.dumps(rows))
        assert message in error_message("eval.py", *arguments(
            limit=4, adapter=file, output_dir=tmp_path / "out"))
    # `--adapter none` evaluates only the base, although the toy preset names an adapter.
    result, _ = run(tmp_path / "base", limit=4, adapter="none", max_new_tokens=3)
    assert set(figure(result, "fact accuracy")) == {"measure", "unit", "rows", "base"}


MY_TASK = """
from data import Task

CHAT = Task(
    name="chat", needs=(("article",),), truth={"words": lambda row, text: len(text.split())},
    policy_prompt=lambda row: [{"role": "user", "content":
        f"Summarise the post in one sentence.\\n\\nPost: {row['article']}"}])
"""


def test_an_own_task_is_measured_on_the_rows_that_both_runs_held_out(adapter, run, tmp_path,
                                                                     monkeypatch):
    """A prompt that is too long is left out, and only rows with a reference have ROUGE."""
    (tmp_path / "chats.py").write_text(MY_TASK)
    monkeypatch.syspath_prepend(tmp_path)
    rows = [{"id": row["id"], "article": row["post"], "outcome": "passed"}
            | ({"reference": row["reference"]} if i < 3 else {})
            for i, row in enumerate(toy.rows("eval", 9))]
    rows += [{"id": "long", "article": "word " * 999}]
    data = tmp_path / "rows.jsonl"
    write_rows(data, rows)
    policies = []
    for number, held_out in enumerate((rows[1:], rows[2:5] + rows[9:], rows[:1])):
        policies.append(shutil.copytree(adapter, tmp_path / f"run{number}" / "policy"))
        write_rows(policies[-1].parent / "held_out.jsonl", held_out)
        write_rows(policies[-1].parent / "config.json", [{
            "task": "chats:CHAT", "data": str(data), "model": "toy/base",
            "max_new_tokens": 9, "max_critique_tokens": 50}])
    result, printed = run(adapter=policies[1], before=policies[0])
    assert f"uses 4 of 9 rows, held out from {policies[1]}" in printed
    assert printed.count("left out: 1 of 4 prompts") == 1
    after = read_rows(tmp_path / "out" / "after.jsonl")
    assert [row["id"] for row in after] == [row["id"] for row in rows[2:5]]
    assert after[0]["prompt"].startswith("user: Summarise") and "outcome" not in after[0]
    texts = [row["response"] for row in after]
    assert value(result, "words") == np.mean([len(text.split()) for text in texts])
    assert value(result, "rouge1") == rouge(texts[0], rows[2]["reference"])["rouge1"]
    assert (figure(result, "rouge1")["rows"], figure(result, "tokens")["rows"]) == (1, 3)
    message = error_message("eval.py", "--before", policies[0], "--adapter", policies[2])
    assert "rows.jsonl: no row is held out from both adapters" in message
    monkeypatch.setattr(evaluation, "WORLD_SIZE", 2)
    assert "without torchrun" in error_message("eval.py", "--adapter", policies[0])


def test_the_run_beside_the_adapter_gives_the_settings_of_its_task(tmp_path):
    """For another task, it gives only the base. R_φ is the run's own if none is named."""
    adapter = str(tmp_path / "policy")
    assert evaluation.run_flags(evaluation.EvalConfig(adapter=adapter)) == []
    write_rows(tmp_path / "config.json", [{
        "task": "slf5k", "model": "m", "data": "d", "temperature": 0.6, "max_new_tokens": 89,
        "max_critique_tokens": 500, "seed": 1, "dtype": None}])
    (tmp_path / "reward" / "adapter").mkdir(parents=True)
    expected = ["--model=m", "--task=slf5k", "--data=d",
                f"--reward_model={tmp_path}/reward/adapter", "--temperature=0.6",
                "--max_new_tokens=89", "--max_critique_tokens=500"]
    for task in ("slf5k", "toy"):                     # "toy" is the default of --task
        config = evaluation.EvalConfig(adapter=adapter, task=task)
        assert evaluation.run_flags(config) == expected
    config = evaluation.EvalConfig(adapter=adapter, task="arc")
    assert evaluation.run_flags(config) == ["--model=m"]


def test_delta_is_that_of_the_table_that_training_prints(finished_run, run, tmp_path):
    trained, = read_rows(finished_run / "result.json")
    for name in ("before", "after"):
        result, _ = run(tmp_path / name, adapter=finished_run / f"{name}_samples.jsonl",
                        limit=8, reward_model=finished_run / "reward" / "adapter")
        for measure in ("delta", "good", "poor", "unparseable"):
            assert value(result, measure) == pytest.approx(trained[name][measure])
        assert value(result, "fact accuracy") == pytest.approx(trained[name]["fact accuracy"])


@pytest.mark.parametrize("flags, message", [
    ("--rollout_batch_size 0", "_size: expected int"), ("--dtype fp99", "invalid choice"),
    ("--max_usd 1 --judge_model x", "--price_in"), ("--task arc", "needs --data"),
    ("--judge_prompts nowhere", "nowhere: not rows of JSON"),
    ("--adapter nowhere", "there is no adapter"),
    (f"--task arc --data d --before {__file__}", "there is no adapter"),
    ("--task reward_model --data d", "needs --adapter, R_φ"),
    (f"--adapter none --reward_model {__file__}", "there is no adapter")])
def test_an_invalid_flag_is_refused_before_the_model_is_loaded(flags, message, monkeypatch,
                                                               tmp_path):
    monkeypatch.setattr(evaluation, "load_model", None)
    flags = "--output_dir", tmp_path / "out", *flags.split()
    assert message in error_message("eval.py", *flags)
    assert not (tmp_path / "out").exists()


def test_the_error_of_a_bad_row_names_the_row(tmp_path):
    write_rows(tmp_path / "d.jsonl", [{"id": "1", "prompt": "p", "response": "r",
                                       "spans": [{"start": 0, "end": 9, "label": 1}]}])
    flags = arguments(data=tmp_path / "d.jsonl", adapter=tmp_path / "d.jsonl",
                      output_dir=tmp_path / "out")
    for task, message in (("reward_model", "row 1: .* not a valid span"),
                          ("code", "d.jsonl, line 1: field")):
        assert re.search(message, error_message("eval.py", "--task", task, *flags))
