"""eval.py as a user runs it: every task, comparisons before/after, resuming, and bad input."""

import json
import os
import random
import re
import shlex
import shutil
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from loopback import loopback
import eval as evaluation
import toy
from data import Task, read_rows, write_rows
from helpers import ROOT, error_message, randomise, run_main
from measures import benchmarks, metrics
from measures.metrics import bootstrap, perplexity, rouge
from model import add_lora, load_model, lora_parameters, save_lora

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


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    """An adapter with random weights, so that its answers differ from those of the base."""
    torch.manual_seed(1)
    model, _ = load_model(BASE, device="cpu")
    add_lora(model, "policy", 4, 8, 0.0, ["q_proj", "v_proj"])
    randomise(lora_parameters(model, "policy"), 0.05)
    directory = tmp_path_factory.mktemp("adapter")
    save_lora(model, "policy", directory)
    return directory


def test_every_figure_of_the_toy_table_can_be_recomputed_from_the_answers(
        adapter, run, tmp_path, monkeypatch):  # Table 2
    # test_measures.py compares BERTScore itself with the bert-score package.
    monkeypatch.setattr(metrics, "load_encoder", lambda name: [name])
    monkeypatch.setattr(metrics, "bert_score", lambda texts, references, name: [
        {"precision": 0, "recall": 0, "f1": len(text + reference + name) / 1000}
        for text, reference in zip(texts, references, strict=True)])
    result, printed = run(tmp_path, adapter=adapter, limit=12, encoder="name")
    rows = toy.rows("eval", 12)
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
                "BLEU": metrics.bleu_of(sum(np.array(metrics.bleu_counts(*p)) for p in pairs)),
                "perplexity": np.exp(nats / tokens),
                "tokens": tokens / 12}.items():
            assert value(result, measure, name) == pytest.approx(expected)
    line = figure(result, "fact accuracy")
    assert line["rows"] == 12 and line["unit"] == "↑"
    assert f"{line['after'][0]:.3f} [{line['after'][1]:.3f}, " in printed
    assert "before: no adapter, the base toy/base" in printed and f"after: {adapter}" in printed
    for line in result["figures"]:
        if "difference" in line:
            change, low, high = line["difference"]
            assert change == pytest.approx(line["after"][0] - line["before"][0])
            assert low <= change <= high


def test_saved_answers_are_reused_and_both_sides_share_random_numbers(adapter, run, tmp_path,
                                                                      monkeypatch):
    """Answers do not depend on the batch size, nor on the time of an adapter's file."""
    sizes, generate = [], evaluation.generate
    monkeypatch.setattr(evaluation, "generate", lambda model, prompts, *a, **k:
                        sizes.append(len(prompts)) or generate(model, prompts, *a, **k))
    same = shutil.copytree(adapter, tmp_path / "same")
    os.utime(same / "adapter_model.safetensors", (1, 1))
    flags = {"adapter": same, "before": adapter, "temperature": 2, "max_new_tokens": 16}
    expected, _ = run(**flags, limit=6)
    out = tmp_path / "out"
    rows = read_rows(out / "after.jsonl")
    assert rows == read_rows(out / "before.jsonl")
    file, = out.glob("answers-*.jsonl")
    lines = file.read_bytes().splitlines(True)
    folder = tmp_path / "b"
    folder.mkdir()
    (folder / file.name).write_bytes(lines[0] + lines[1][:20])                 # as after a kill
    result, _ = run(folder, **flags, limit=6, decode_batch_size=3)
    assert sizes == [6, 3, 2]
    assert result["figures"] == expected["figures"]
    run(**flags, limit=6, seed=1)
    assert read_rows(out / "after.jsonl") != rows
    copy = shutil.copytree(BASE, tmp_path / "copy_of_base")
    for time in (1, 2):                                # another base, and a changed one
        os.utime(copy / "model.safetensors", (time, time))
        sizes.clear()
        run(folder, **flags, limit=2, model=copy)
        assert sizes == [2]


@pytest.fixture()
def gold(tmp_path) -> dict:
    """Flags of 20 rows as annotate.py writes them; replies.jsonl has the exact critic's."""
    rows, replies = [], []
    rng = random.Random(0)
    for row in toy.rows("eval", 20):
        response = toy.write_summary(toy.confuse(row["facts"], rng), rng)
        reply = toy.critique(row, response)
        quotes = json.loads(reply.split("\n")[1])
        spans = [{"start": response.index(quote), "end": response.index(quote) + len(quote),
                  "label": 1 if key == "good_spans" else -1}
                 for key in quotes for quote in quotes[key]]
        rows.append({"id": row["id"], "prompt": row["post"], "response": response,
                     "critique": "c", **quotes, "spans": spans})
        replies.append({"id": row["id"], "response": reply})
    write_rows(tmp_path / "gold.jsonl", rows)
    write_rows(tmp_path / "replies.jsonl", replies)
    return {"task": "reward_model", "data": tmp_path / "gold.jsonl"}


def test_r_phi_is_judged_by_spans_and_unreadable_replies_count_as_wrong(
        gold, run, tmp_path, capsys):  # Table 1, Appendix E
    replies = read_rows(tmp_path / "replies.jsonl")
    write_rows(tmp_path / "a.jsonl", [row | {"response": "no idea"} for row in replies[:5]]
               + replies[5:])
    write_rows(tmp_path / "b.jsonl", [row | {"response": "I cannot say."} for row in replies])
    with loopback(lambda body: "[[C]]") as server:
        result, printed = run(**gold, adapter=tmp_path / "a.jsonl", before=tmp_path / "b.jsonl",
                              judge_model="judge", base_url=server.url)
    assert value(result, "win rate") == 0.5
    assert all("<feedback_a" in str(body) for body in server.requests)
    assert len(server.requests) == 40, "both orders of each pair"
    assert value(result, "unparseable", "before") == 1
    assert value(result, "unparseable") == 0.25
    for metric in ("good_precision", "good_exact", "good_overlap_index", "good_near"):
        share, low, high = figure(result, metric)["after"]
        assert share == high == 1 and 0.7 < low < 1         # Wilson's interval, not [1, 1]
    assert value(result, "good_recall") < 1 and "Table 15" in printed
    assert "in words of the response" in printed


def test_r_phi_is_judged_on_rows_outside_its_training_set(adapter, gold, run, tmp_path):
    rows = read_rows(gold["data"])
    reward_model = shutil.copytree(adapter, tmp_path / "reward" / "adapter")
    flags = gold | {"adapter": reward_model, "max_new_tokens": 4}
    _, printed = run(**flags, limit=1)                   # without samples.jsonl
    assert "may have been trained on these rows" in printed
    samples = [{"id": row["id"], "response": row["response"]} for row in rows[:5]]
    samples[0] |= {"response": "another response to it, which was trained on"}
    write_rows(reward_model.parent / "samples.jsonl", samples)
    _, printed = run(**flags, limit=3)
    assert "4 of 20 rows are held out" in printed and "may have been" not in printed
    assert "in tokens of the response" in printed
    assert not (tmp_path / "out" / "before.jsonl").exists()           # no base is evaluated
    assert column(tmp_path / "out" / "after.jsonl", "id") == [row["id"] for row in rows[1:4]]


def test_a_prompt_that_exceeds_the_context_is_refused(adapter, gold, tmp_path):
    """An answer gets at most half of the context, and the longest prompt comes first."""
    rows = read_rows(gold["data"])
    write_rows(gold["data"], rows[:2] + [rows[2] | {"prompt": "word " * 400}])
    message = error_message("eval.py", *arguments(
        **gold, adapter=adapter, output_dir=tmp_path, decode_batch_size=1))
    assert "with 256 new tokens it exceeds the model's context of 512 tokens" in message
    assert not [*tmp_path.glob("answers*")][0].read_text()


def test_programs_run_only_on_request(adapter, shared, run, tmp_path, monkeypatch):
    """Programs run in the sandbox, which not every machine has; those of this test are safe."""
    execute, is_unsafe = benchmarks.execute, []
    monkeypatch.setattr(benchmarks, "execute", lambda *inputs, unsafe: (
        is_unsafe.append(unsafe) or execute(*inputs, unsafe=True)))
    data = shared / "data" / "HumanEval.jsonl.gz"
    result, printed = run(task="code", data=data, limit=2, adapter=adapter, max_new_tokens=12)
    assert "nothing was run" in printed and result["figures"] == []
    write_rows(tmp_path / "samples.jsonl", [
        {"task_id": p["task_id"],
         "solution": p["prompt"] + (p["canonical_solution"] if i else "    pass\n")}
        for i, p in enumerate(read_rows(data)[:2])])
    result, _ = run(tmp_path, task="code", data=data, limit=2, allow_code_execution=True,
                    adapter=tmp_path / "samples.jsonl")
    assert value(result, "pass@1") == 0.5
    wrong, right = column(tmp_path / "after.jsonl", "status")
    assert wrong != "passed" == right and is_unsafe == [False]


def verdict(body):
    """A judge that prefers the answer with more letters "e"."""
    text = body["messages"][1]["content"]
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
        assert not server.requests, "a dry run asks nothing"
        result, printed = run(**flags)
        assert len(server.requests) == len(pairs)
        counts = [(a.count("e"), b.count("e")) for a, b in zip(after, before)]
        wins = [(a > b) + 0.5 * (a == b) for a, b in counts]
        assert value(result, "win rate") == pytest.approx(np.mean(wins))
        assert (f"{{'win': {wins.count(1)}, 'tie': {wins.count(0.5)}, 'loss': {wins.count(0)}"
                in printed)
        assert figure(result, "rouge1")["rows"] == 10
        assert value(result, "perplexity of references") > 1
        server.responder = lambda body: "I like both of them a lot."
        run(**flags)
        assert len(server.requests) == len(pairs), "the journal answers a second run"
        result, printed = run(**flags | {"judge_model": "another"})
    assert "20 of 20 questions have no verdict (the first: no verdict in [[ ]]" in printed
    assert figure(result, "win rate") == {"measure": "win rate", "unit": "↑", "rows": 0}


def test_alpaca_eval_on_the_published_file(adapter, shared, run, tmp_path):
    with loopback(responder=verdict) as server:
        result, printed = run(
            task="alpaca_eval", data=shared / "data" / "alpaca_eval_100.jsonl", limit=3,
            judge_model="judge", base_url=server.url, adapter=adapter, max_new_tokens=12)
    assert figure(result, "win rate")["rows"] == 3
    file = tmp_path / "out" / "after_outputs.json"
    assert f"run: alpaca_eval --model_outputs {shlex.quote(str(file))} --is_ov" in printed
    # alpaca_eval 0.6.6 reads a list of objects with these three fields.
    assert {*json.loads(file.read_text())[0]} == {"instruction", "output", "generator"}


def test_rows_without_a_verdict_are_left_out_of_every_side():
    line, = metrics.table_lines({"before": {"win rate": [1, None, 0]},
                                 "after": {"win rate": [0.5, 1, 0]}}, evaluation.UNITS)
    assert line["rows"] == 2 and line["before"][0] == 0.5 and line["after"][0] == 0.25


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


def test_an_own_task_is_measured_on_the_rows_that_both_runs_held_out(adapter, run, tmp_path,
                                                                     monkeypatch):
    """A prompt that is too long is left out, and only rows with a reference have ROUGE."""
    own = Task("chat", lambda row: [{"role": "user", "content": f"Sum up: {row['article']}"}],
               (("article",),), truth={"words": lambda row, text: len(text.split())})
    monkeypatch.setitem(sys.modules, "chats", SimpleNamespace(CHAT=own))
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
    result, printed = run(adapter=policies[1], before=policies[0], max_new_tokens=5)
    names = "max_new_tokens", "max_critique_tokens", "temperature"       # typed, run's, task's
    assert [result["config"][name] for name in names] == [5, 50, 0.7]
    assert f"4 of 9 rows are held out from {policies[1]}; the oth" in printed
    assert printed.count("left out: 1 of 4 prompts") == 1
    after = read_rows(tmp_path / "out" / "after.jsonl")
    assert [row["id"] for row in after] == [row["id"] for row in rows[2:5]]
    assert after[0]["prompt"].startswith("user: Sum up") and "outcome" not in after[0]
    texts = [row["response"] for row in after]
    assert value(result, "words") == np.mean([len(text.split()) for text in texts])
    assert (figure(result, "words")["unit"], figure(result, "rouge1")["unit"]) == ("", "↑")
    assert value(result, "rouge1") == rouge(texts[0], rows[2]["reference"])["rouge1"]
    assert (figure(result, "rouge1")["rows"], figure(result, "tokens")["rows"]) == (1, 3)
    message = error_message("eval.py", "--before", policies[0], "--adapter", policies[2])
    assert "rows.jsonl: no row is held out from both adapters" in message


def test_the_run_beside_the_adapter_gives_the_settings_of_its_task(tmp_path):
    """For another task, it gives only the base. R_φ is the run's own if none is named."""
    adapter = str(tmp_path / "policy")
    write_rows(tmp_path / "config.json", [{
        "task": "slf5k", "model": "m", "data": "d", "temperature": 0.6, "max_new_tokens": 89,
        "max_critique_tokens": 500, "seed": 1, "dtype": None}])
    (tmp_path / "reward" / "adapter").mkdir(parents=True)
    expected = ["--model=m", "--task=slf5k", "--data=d",
                f"--reward_model={tmp_path}/reward/adapter", "--temperature=0.6",
                "--max_new_tokens=89", "--max_critique_tokens=500"]
    for task, flags in (("slf5k", expected), ("toy", expected),       # "toy" is the default
                        ("code", ["--model=m"])):
        config = evaluation.EvalConfig(adapter=adapter, task=task)
        assert evaluation.run_flags(config) == flags
    assert evaluation.settings_of("alpaca_eval") == {"max_new_tokens": 2048}
    settings = evaluation.settings_of("slf5k")
    assert (settings["max_new_tokens"], settings["temperature"]) == (89, 0.6)


def test_delta_is_that_of_the_table_that_training_prints(finished_run, run, tmp_path):
    trained, = read_rows(finished_run / "result.json")
    for name in ("before", "after"):
        result, _ = run(tmp_path / name, adapter=finished_run / f"{name}_samples.jsonl",
                        limit=8, reward_model=finished_run / "reward" / "adapter")
        for measure in ("delta", "good", "poor", "unparseable", "fact accuracy"):
            assert value(result, measure) == pytest.approx(trained[name][measure])


@pytest.mark.parametrize("flags, message", [
    ("--max_usd 1 --judge_model x", "--price_in"), ("--task code", "needs --data"),
    ("--judge_prompts nowhere", "nowhere is missing"),
    ("--task code --data d --before nowhere", "there is no adapter"),
    ("--task reward_model --data d", "needs --adapter, R_φ"),
    ("--adapter none --reward_model {}", "there is no adapter")])
def test_an_invalid_flag_is_refused_before_the_model_is_loaded(flags, message, monkeypatch,
                                                               tmp_path):
    monkeypatch.setattr(evaluation, "load_model", None)
    words = [word.replace("{}", __file__) for word in flags.split()]
    assert message in error_message("eval.py", "--output_dir", tmp_path / "out", *words)
    assert not (tmp_path / "out").exists()
