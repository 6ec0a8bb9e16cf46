"""eval.py as a user runs it: every task on real rows, before against after, resuming, and bad input."""

import json
import os
import random
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

import eval as evaluation
import toy
from conftest import ROOT, fails
from data import read_rows, write_rows
from loopback import loopback
from measures import benchmarks, people
from measures.metrics import bleu, bootstrap, perplexity, rouge
from model import add_lora, load_lora, load_model, lora_parameters, save_lora


def run(monkeypatch, capsys, *flags) -> tuple[dict, str]:
    """Run eval.py; returns result.json and what was printed."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["eval", *map(str, flags)])
    evaluation.main()
    out = Path(flags[flags.index("--output_dir") + 1])
    return json.loads((out / "result.json").read_text()), capsys.readouterr().out


def figure(result: dict, measure: str) -> dict:
    return next(line for line in result["figures"] if line["measure"] == measure)


def shaken(base, directory, scale=0.02):
    """An adapter whose update is not zero, so that it answers otherwise than its base."""
    model, _ = load_model(base, device="cpu")
    add_lora(model, "policy", 4, 8, 0.0, ["q_proj", "v_proj"])
    with torch.no_grad():
        for p in lora_parameters(model, "policy"):
            p += scale * torch.randn(p.shape)
    save_lora(model, "policy", directory)
    return directory


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    torch.manual_seed(1)
    return shaken(ROOT / "toy" / "base", tmp_path_factory.mktemp("adapter"), 0.05)


@pytest.fixture(scope="module")
def stories_flags(tmp_path_factory):
    shared = ROOT.parent / "shared"
    if not shared.is_dir():
        pytest.skip("../shared is not here: real rows and the real checkpoint cannot be tested")
    model = shared / "models" / "stories260K"
    torch.manual_seed(1)
    return ["--model", model, "--adapter", shaken(model, tmp_path_factory.mktemp("stories"), 0.1),
            "--max_new_tokens", "12"]


def test_every_figure_of_the_toy_table_can_be_recomputed_from_the_answers(adapter, tmp_path, monkeypatch, capsys):  # Table 2
    flags = ("--adapter", adapter, "--limit", "30", "--output_dir", tmp_path)
    result, printed = run(monkeypatch, capsys, *flags)
    rows, kept = toy.rows("eval", 30), read_rows(tmp_path / "answers.jsonl")
    texts = {name: [row["response"] for row in kept if row["policy"] == name] for name in ("before", "after")}
    references = [row["reference"] for row in rows]
    model, tokenizer = load_model(ROOT / "toy" / "base", device="cpu")
    prompts = [f"Summarise the post in one sentence.\n\nPost: {row['post']}" for row in rows]
    assert texts["before"] != texts["after"]
    for name, found in texts.items():
        truth = [toy.fact_accuracy(row, text) for row, text in zip(rows, found)]
        assert figure(result, "fact accuracy")[name]["value"] == pytest.approx(np.mean(truth))
        assert (figure(result, "fact accuracy")[name]["low"], figure(result, "fact accuracy")[name]["high"]) == \
            pytest.approx(bootstrap(truth))
        assert figure(result, "rougeL")[name]["value"] == pytest.approx(
            np.mean([rouge(text, reference)["rougeL"] for text, reference in zip(found, references)]))
        assert figure(result, "BLEU")[name]["value"] == pytest.approx(bleu(found, references))
        nats, tokens = np.sum(perplexity(model, tokenizer, prompts, found), axis=0)
        assert figure(result, "perplexity")[name]["value"] == pytest.approx(np.exp(nats / tokens))
    change = figure(result, "fact accuracy")
    assert change["difference"]["value"] == pytest.approx(change["after"]["value"] - change["before"]["value"])
    assert change["difference"]["low"] <= change["difference"]["value"] <= change["difference"]["high"]
    assert f"{change['after']['value']:.3f} [{change['after']['low']:.3f}" in printed
    page = (tmp_path / "report.html").read_text()
    assert "fact accuracy" in page and texts["after"][0] in page and "src=" not in page


def test_answers_on_file_are_not_written_again_and_depend_on_no_batch(adapter, tmp_path, monkeypatch, capsys):
    flags = ("--adapter", adapter, "--limit", "12")
    whole, _ = run(monkeypatch, capsys, *flags, "--output_dir", tmp_path / "a")
    lines = (tmp_path / "a" / "answers.jsonl").read_bytes().splitlines(True)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "answers.jsonl").write_bytes(b"".join(lines[:7]) + lines[7][:20])          # as a kill leaves it
    asked = []
    real = evaluation.generate
    monkeypatch.setattr(evaluation, "generate", lambda model, prompts, *a, **k: asked.append(len(prompts)) or real(
        model, prompts, *a, **k))
    again, _ = run(monkeypatch, capsys, *flags, "--batch_size", "5", "--output_dir", tmp_path / "b")
    assert sum(asked) == 24 - 7 and max(asked) == 5
    assert again["figures"] == whole["figures"]
    run(monkeypatch, capsys, *flags, "--output_dir", tmp_path / "b")
    assert sum(asked) == 24 - 7                                       # all are there now
    run(monkeypatch, capsys, *flags, "--output_dir", tmp_path / "b", "--seed", "1", "--limit", "3")
    assert sum(asked) == 24 - 7 + 6                                   # another seed has answers of its own


def test_summaries_of_real_posts_with_bertscore(stories_flags, shared, tmp_path, monkeypatch, capsys):
    from transformers import BertConfig, BertModel, BertTokenizerFast
    encoder = tmp_path / "encoder"
    encoder.mkdir()
    words = sorted(set("".join(open(shared / "data" / "slf5k.jsonl")).lower().split()))[:2000]
    (encoder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]))
    BertTokenizerFast(str(encoder / "vocab.txt")).save_pretrained(encoder)
    BertModel(BertConfig(vocab_size=len(words) + 5, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
                         intermediate_size=32)).save_pretrained(encoder)
    posts = [{"post": row["summary_prompt"][:300 if i % 2 else 900], "ideal_human_summary": row["ideal_human_summary"]}
             for i, row in enumerate(read_rows(shared / "data" / "slf5k.jsonl")) if len(row["ideal_human_summary"]) < 300]
    write_rows(tmp_path / "posts.jsonl", posts)
    result, printed = run(monkeypatch, capsys, "--task", "slf5k", "--data", tmp_path / "posts.jsonl", *stories_flags,
                          "--max_prompt_tokens", "250", "--encoder", encoder, "--encoder_layer", "2", "--output_dir",
                          tmp_path / "out")
    left = figure(result, "rouge1")["after"]["rows"]
    assert 0 < left < len(posts) and f"left out {len(posts) - left} of {len(posts)} rows, over 250 tokens" in printed
    assert 0 < figure(result, "BERTScore F1")["after"]["value"] < 1
    assert "perplexity of the references" in printed


def test_r_phi_is_judged_by_spans_and_unreadable_replies_count_as_wrong(tmp_path, monkeypatch, capsys):
    rows, replies = [], []
    for i, row in enumerate(toy.rows("eval", 20)):
        response = toy.write_summary(row["facts"], random.Random(i), 0.3)
        said = json.loads(toy.critique(row, response).split("\n")[1])
        spans = [{"start": response.index(q), "end": response.index(q) + len(q), "label": 1 if kind[0] == "g" else -1}
                 for kind, quotes in said.items() for q in quotes]
        rows.append({"id": row["id"], "prompt": row["post"], "response": response, "critique": "c", **said, "spans": spans})
        replies.append({"id": row["id"], "response": "no idea" if i < 5 else toy.critique(row, response)})
    write_rows(tmp_path / "gold.jsonl", rows)
    write_rows(tmp_path / "replies.jsonl", replies)
    result, printed = run(monkeypatch, capsys, "--task", "reward_model", "--data", tmp_path / "gold.jsonl", "--responses",
                          tmp_path / "replies.jsonl", "--output_dir", tmp_path / "out")
    value = lambda name: figure(result, name)["answers"]["value"]
    assert value("unparseable") == 0.25 and value("row_f1") == pytest.approx(0.75)
    assert value("good_precision") == value("good_exact") == value("good_overlap_index") == 1
    assert value("good_recall") < 1 and "Table 19" in printed and "5 failed replies" in printed
    assert sum("reason" in row for row in read_rows(tmp_path / "out" / "answers_feedback.jsonl")) == 5


def test_r_phi_on_real_rows_writes_its_own_critiques(stories_flags, shared, tmp_path, monkeypatch, capsys):
    marked = tmp_path / "people.jsonl"
    monkeypatch.setattr(sys, "argv", [
        "people", str(shared / "data" / "finegrained_qa_human_spans.jsonl"),
        "--task", "ultrafeedback", "--output", str(marked)])
    people.main()
    short = [row | {"prompt": row["prompt"][:200]} for row in read_rows(marked)
             if len(row["response"]) < 400][:3]
    write_rows(marked, short)
    result, _ = run(monkeypatch, capsys, "--task", "reward_model", "--data", marked, *stories_flags,
                    "--output_dir", tmp_path / "out")
    assert figure(result, "unparseable")["after"] == {"value": 1.0, "low": 1.0, "high": 1.0, "rows": len(short)}


def test_arc_and_code_before_against_after(stories_flags, shared, tmp_path, monkeypatch, capsys):
    data = shared / "data" / "arc_challenge_dev.jsonl"
    result, _ = run(monkeypatch, capsys, "--task", "arc", "--data", data, "--limit", "12", *stories_flags, "--output_dir",
                    tmp_path / "arc")
    model, tokenizer = load_model(stories_flags[1], device="cpu")
    load_lora(model, "mine", stories_flags[3])
    for name, lora in (("before", None), ("after", "mine")):
        rows = benchmarks.arc_scores(model, tokenizer, benchmarks.read_arc(data)[:12], lora)
        for key in ("accuracy", "accuracy_norm"):
            assert figure(result, key)[name]["value"] == pytest.approx(np.mean([row[key] for row in rows]))
    flags = ("--task", "code", "--data", shared / "data" / "HumanEval.jsonl.gz", "--limit", "3", *stories_flags,
             "--samples_per_row", "2", "--k", "1,2", "--temperature", "1", "--output_dir", tmp_path / "code")
    result, printed = run(monkeypatch, capsys, *flags)
    assert "nothing was run" in printed and result["figures"] == []
    assert len(read_rows(tmp_path / "code" / "after_samples.jsonl")) == 6
    result, _ = run(monkeypatch, capsys, *flags, "--allow_code_execution", "--code_timeout", "5")
    assert figure(result, "pass@2")["after"]["value"] == 0


def test_solutions_from_a_file_are_run_and_counted(shared, tmp_path, monkeypatch, capsys):
    import gzip
    with gzip.open(shared / "data" / "HumanEval.jsonl.gz", "rt") as file:
        problems = [json.loads(line) for line in file][:4]
    write_rows(tmp_path / "samples.jsonl", [
        {"task_id": p["task_id"], "solution": p["prompt"] + (p["canonical_solution"] if i else "    pass\n")}
        for i, p in enumerate(problems)])
    result, _ = run(monkeypatch, capsys, "--task", "code", "--data", shared / "data" / "HumanEval.jsonl.gz", "--limit", "4",
                    "--responses", tmp_path / "samples.jsonl", "--allow_code_execution", "--output_dir", tmp_path / "out")
    assert figure(result, "pass@1")["answers"]["value"] == 0.75


def verdict(body):
    """A judge that prefers the answer with more letters e and rates by length, in the form that it is asked for."""
    text = body["messages"][-1]["content"]
    if "[[A]]" in body["messages"][0]["content"] or "winner" in body["messages"][0]["content"]:
        import re
        a, b = (re.search(rf"<answer_{side}-(\w+)>\n(.*?)\n</answer_{side}-\1>", text, re.S)[2] for side in "ab")
        return json.dumps({"reasoning": "e", "winner": "tie" if a.count("e") == b.count("e") else
                           "A" if a.count("e") > b.count("e") else "B"})
    return json.dumps({"reasoning": "length", "rating": 1 + len(text) % 10})


def test_the_judge_says_win_tie_loss_and_is_not_asked_twice(adapter, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    with loopback(responder=verdict) as server:
        flags = ("--adapter", adapter, "--limit", "10", "--judge_model", "judge", "--base_url", server.url, "--output_dir",
                 tmp_path)
        _, dry = run(monkeypatch, capsys, *flags, "--dry_run")
        answers = [row["response"] for row in read_rows(tmp_path / "answers.jsonl")]
        todo = 20 - sum(a == b for a, b in zip(answers[:10], answers[10:]))          # equal answers look alike both ways round
        assert f"20 questions, {todo} to ask" in dry and server.stats()["calls"] == 0
        result, printed = run(monkeypatch, capsys, *flags)
        asked = server.stats()["calls"]
        texts = {name: [row["response"].count("e") for row in read_rows(tmp_path / "answers.jsonl") if row["policy"] == name]
                 for name in ("before", "after")}
        wins = [(a > b) + 0.5 * (a == b) for a, b in zip(texts["after"], texts["before"])]
        assert figure(result, "win rate")["after"]["value"] == pytest.approx(np.mean(wins))
        assert f"judge: {wins.count(1)} : {wins.count(0.5)} : {wins.count(0)}" in printed and asked == todo
        run(monkeypatch, capsys, *flags)
        assert server.stats()["calls"] == asked
        result, _ = run(monkeypatch, capsys, *flags, "--rate")
        line = figure(result, "rating, 1 to 10")
        assert server.stats()["calls"] == asked + len({(i % 10, text) for i, text in enumerate(answers)}) and 1 <= line["before"]["value"] <= 10 and "difference" in line


def test_mt_bench_and_alpaca_eval_on_the_published_files(stories_flags, shared, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    questions = [row for row in read_rows(shared / "data" / "mt_bench_question.jsonl")
                 if sum(map(len, row["turns"])) < 400][:4]
    write_rows(tmp_path / "questions.jsonl", questions)
    with loopback(responder=verdict) as server:
        judge = ("--judge_model", "judge", "--base_url", server.url)
        result, printed = run(monkeypatch, capsys, "--task", "mt_bench", "--data", tmp_path / "questions.jsonl",
                              *stories_flags, *judge, "--output_dir", tmp_path / "mt")
        line = figure(result, "score")
        assert 1 <= line["before"]["value"] <= 10 and line["after"]["rows"] == 4
        turns = [figure(result, f"turn {k}")["after"]["value"] for k in (1, 2)]
        assert line["after"]["value"] == pytest.approx(np.mean(turns))
        row = read_rows(tmp_path / "mt" / "after_answers.jsonl")[0]
        assert len(row["choices"][0]["turns"]) == 2 and row["question_id"] == questions[0]["question_id"]
        result, printed = run(monkeypatch, capsys, "--task", "alpaca_eval", "--data", shared / "data" / "alpaca_eval_100.jsonl",
                              "--limit", "6", *stories_flags, *judge, "--output_dir", tmp_path / "alpaca")
        assert figure(result, "win rate")["after"]["rows"] == 6
        outputs = json.loads((tmp_path / "alpaca" / "after_outputs.json").read_text())
        assert [set(row) for row in outputs] == [{"instruction", "output", "generator", "dataset"}] * 6


def test_a_judge_that_answers_prose_is_counted_and_not_guessed(adapter, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    with loopback(responder=lambda body: "I like both of them a lot.") as server:
        result, printed = run(monkeypatch, capsys, "--adapter", adapter, "--limit", "4", "--judge_model", "judge",
                              "--base_url", server.url, "--output_dir", tmp_path)
    assert "4 unreadable" in printed and "4 of 4 rows without a verdict" in printed
    assert not any(line["measure"] == "win rate" for line in result["figures"])


def test_the_same_adapter_twice_makes_no_difference_and_file_times_change_nothing(adapter, tmp_path, monkeypatch, capsys):
    copy = tmp_path / "copy"
    shutil.copytree(adapter, copy)
    os.utime(copy / "adapter_model.safetensors", (1, 1))
    result, _ = run(monkeypatch, capsys, "--adapter", copy, "--before", adapter, "--limit", "8", "--output_dir", tmp_path / "a")
    assert all(line["difference"] == {"value": 0, "low": 0, "high": 0} for line in result["figures"])
    again, _ = run(monkeypatch, capsys, "--adapter", copy, "--limit", "8", "--output_dir", tmp_path / "b")
    assert figure(again, "fact accuracy")["after"] == figure(result, "fact accuracy")["after"]


def test_answers_from_a_file_may_be_empty_and_none_is_dropped(tmp_path, monkeypatch, capsys):
    rows = toy.rows("eval", 4)
    answers = [{"id": row["id"], "response": row["reference"] if i else ""} for i, row in enumerate(rows)]
    (tmp_path / "array.json").write_text(json.dumps(answers))
    result, _ = run(monkeypatch, capsys, "--responses", tmp_path / "array.json", "--limit", "4", "--output_dir", tmp_path / "a")
    assert figure(result, "fact accuracy")["answers"]["value"] == pytest.approx(0.75)
    assert figure(result, "rouge1")["answers"]["value"] == pytest.approx(0.75)
    (tmp_path / "twice.json").write_text(json.dumps([*answers, answers[0]]))
    assert "row 5: needed are an id of its own" in fails("eval.py", "--responses", tmp_path / "twice.json", "--limit", "4",
                                                         "--output_dir", tmp_path / "b")
    monkeypatch.setattr(toy, "TASK", replace(toy.TASK, rows=lambda split, n, seed: rows[:3]))
    assert "4 answers to 3 rows; leave out what belongs to no row, such as toy-eval-0-3" in fails(
        "eval.py", "--responses", tmp_path / "array.json", "--output_dir", tmp_path / "c")


def test_a_sign_that_people_never_marked_is_neither_right_nor_wrong(tmp_path, monkeypatch, capsys):
    text = "The cat sat on the mat."
    row = {"id": "1", "prompt": "p", "response": text, "critique": "c", "good_spans": [], "poor_spans": ["mat"],
           "spans": [{"start": 19, "end": 22, "label": -1}]}
    write_rows(tmp_path / "gold.jsonl", [row, row | {"id": "2"}])
    for good in ([], ["cat"]):
        said = json.dumps({"textual_feedback": "so", "good_spans": good, "poor_spans": ["mat"]})
        write_rows(tmp_path / "said.jsonl", [{"id": n, "response": said} for n in "12"])
        result, printed = run(monkeypatch, capsys, "--task", "reward_model", "--data", tmp_path / "gold.jsonl", "--responses",
                              tmp_path / "said.jsonl", "--output_dir", tmp_path / f"out{len(good)}")
        assert figure(result, "row_f1")["answers"]["value"] == 1 and not re.search(r"good +[1-9]", printed)
        assert not any(line["measure"].startswith("good") for line in result["figures"])
        assert "counted in words" in printed and "nobody marked a span other than poor" in printed


def test_damaged_weights_are_named_and_not_scored(adapter, tmp_path):
    from safetensors.torch import load_file, save_file
    broken = tmp_path / "broken"
    shutil.copytree(adapter, broken)
    tensors = load_file(broken / "adapter_model.safetensors")
    with safe_open(broken / "adapter_model.safetensors", "pt") as file:
        save_file({name: x * float("nan") for name, x in tensors.items()}, broken / "adapter_model.safetensors", file.metadata())
    assert "NaN or infinite weights" in fails("eval.py", "--adapter", broken, "--limit", "2", "--output_dir", tmp_path / "o")


@pytest.mark.parametrize("flags, said", [
    (("--k", "1,x"), "--k 1,x: needed are whole numbers"),
    (("--batch_size", "0"), "--batch_size: 0 must be at least 1"),
    (("--limit", "-2"), "--limit: -2"), (("--temperature", "nan"), "--temperature: nan"),
    (("--dtype", "fp99"), "--dtype: invalid choice: 'fp99'"),
    (("--k", "5"), "at least as many --samples_per_row"),
    (("--task", "arc", "--responses", "f"), "--responses does nothing"),
    (("--task", "code", "--samples_per_row", "2", "--data", "d"), "one sample, many times over"),
    (("--task", "reward_model", "--rate", "--data", "d"), "--rate does nothing for --task"),
    (("--max_usd", "1"), "--price_in"), (("--judge_prompts", "nowhere"), "nowhere: no such file"),
    (("--adapter", "nowhere"), "there is no adapter"), (("--task", "arc"), "needs --data"),
    (("--task", "poetry"), "--task: invalid choice: 'poetry'")])
def test_a_flag_that_cannot_be_used_is_refused_before_anything_is_done(flags, said, monkeypatch,
                                                                       tmp_path):
    monkeypatch.setattr(evaluation, "load_model", None)
    assert said in fails("eval.py", "--output_dir", tmp_path / "out", *flags)
    assert not (tmp_path / "out" / "answers.jsonl").exists()


def test_bad_input_is_one_line_that_says_what_to_do(tmp_path):
    out = ("--output_dir", tmp_path / "out")
    write_rows(tmp_path / "few.jsonl", [{"id": "toy-eval-0-0", "response": "x"}])
    told = fails("eval.py", "--responses", tmp_path / "few.jsonl", "--limit", "2", *out)
    assert "no answer to 1 of 2 rows, first toy-eval-0-1" in told
    spans = {"id": "1", "prompt": "p", "response": "r", "spans": [{"start": 0, "end": 9, "label": 1}]}
    write_rows(tmp_path / "spans.jsonl", [spans])
    told = fails("eval.py", "--task", "reward_model", "--data", tmp_path / "spans.jsonl", *out)
    assert "row 1: " in told and "is no span" in told
    told = fails("eval.py", "--task", "code", "--data", tmp_path / "spans.jsonl", *out)
    assert "spans.jsonl, row 1: field" in told


def test_none_names_the_base_alone(tmp_path, monkeypatch, capsys):
    """A text flag that may be empty takes "none"; the toy's preset names an adapter."""
    result, printed = run(monkeypatch, capsys, "--adapter", "none", "--limit", "2",
                          "--max_new_tokens", "3", "--output_dir", tmp_path)
    assert result["config"]["adapter"] is None and "difference" not in printed
    assert set(figure(result, "fact accuracy")) == {"measure", "base"}
