"""eval.py as a user runs it: every task, before against after, resuming, and bad input."""

import json
import os
import random
import re
import shutil
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
from measures import benchmarks, spans
from measures.metrics import bleu, bootstrap, perplexity, rouge
from model import add_lora, load_lora, load_model, lora_parameters, save_lora


def run(capsys, *flags) -> tuple[dict, str]:
    """Run eval.py; returns result.json and what was printed."""
    run_main(*flags, module=evaluation)
    out = Path(flags[flags.index("--output_dir") + 1])
    return json.loads((out / "result.json").read_text()), capsys.readouterr().out


def figure(result: dict, measure: str) -> dict:
    return next(line for line in result["figures"] if line["measure"] == measure)


def value(result: dict, measure: str, side: str = "after") -> float:
    """The figure without its interval."""
    return figure(result, measure)[side][0]


def shaken(base, directory, scale):
    """An adapter whose update is not zero, so that it answers otherwise than its base."""
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
    return shaken(ROOT / "toy" / "base", tmp_path_factory.mktemp("adapter"), 0.05)


@pytest.fixture(scope="module")
def stories_flags(shared, tmp_path_factory):
    model = shared / "models" / "stories260K"
    return ["--model", model, "--adapter",
            shaken(model, tmp_path_factory.mktemp("stories"), 0.1), "--max_new_tokens", "12"]


def test_every_figure_of_the_toy_table_can_be_recomputed_from_the_answers(
        adapter, tmp_path, monkeypatch, capsys):  # Table 2
    scored = []
    monkeypatch.setattr(evaluation, "perplexity",
                        lambda *args: scored.append(args[3]) or perplexity(*args))
    # BERTScore itself is held against its package in test_metrics.
    monkeypatch.setattr(evaluation, "load_encoder", lambda name: [name])
    monkeypatch.setattr(evaluation, "bert_score", lambda texts, references, name: [
        {"precision": 0, "recall": 0, "f1": len(text + reference + name) / 1000}
        for text, reference in zip(texts, references, strict=True)])
    result, printed = run(capsys, "--adapter", adapter, "--limit", "30", "--encoder", "name",
                          "--output_dir", tmp_path)
    assert len(scored) == 3  # both sides' answers, and the references once
    rows = toy.rows("eval", 30)
    texts = {name: [row["response"] for row in read_rows(tmp_path / f"{name}.jsonl")]
             for name in ("before", "after")}
    references = [row["reference"] for row in rows]
    model, tokenizer = load_model(ROOT / "toy" / "base", device="cpu")
    prompts = [f"Summarise the post in one sentence.\n\nPost: {row['post']}" for row in rows]
    assert texts["before"] != texts["after"]
    for name, found in texts.items():
        truth = [toy.fact_accuracy(row, text) for row, text in zip(rows, found)]
        assert figure(result, "fact accuracy")[name] == pytest.approx(
            [np.mean(truth), *bootstrap(truth)])
        scores = [rouge(text, reference)["rougeL"]
                  for text, reference in zip(found, references)]
        assert value(result, "rougeL", name) == pytest.approx(np.mean(scores))
        lengths = [len(text + reference + "name") for text, reference in zip(found, references)]
        assert value(result, "BERTScore F1", name) == pytest.approx(np.mean(lengths) / 1000)
        assert value(result, "BLEU", name) == pytest.approx(bleu(found, references))
        nats, tokens = np.sum(perplexity(model, tokenizer, prompts, found), axis=0)
        assert value(result, "perplexity", name) == pytest.approx(np.exp(nats / tokens))
        assert value(result, "tokens", name) == pytest.approx(tokens / 30)
    line = figure(result, "fact accuracy")
    change, low, high = line["difference"]
    assert (change == pytest.approx(line["after"][0] - line["before"][0])
            and low <= change <= high)
    assert line["rows"] == 30 and line["unit"] == "0–1 ↑"
    assert f"{line['after'][0]:.3f} [{line['after'][1]:.3f}, " in printed
    assert "before: no adapter, the base toy/base" in printed and f"after: {adapter}" in printed


def test_answers_on_file_are_not_written_again_and_depend_on_no_batch(
        adapter, tmp_path, monkeypatch, capsys):
    flags = ("--adapter", adapter, "--max_new_tokens", 16)
    first, again = tmp_path / "a", ("--output_dir", tmp_path / "b")
    whole, _ = run(capsys, *flags, "--limit", 6, "--output_dir", first)
    files = sorted(first.glob("answers-*.jsonl"))
    assert len(files) == 2
    lines = files[0].read_bytes().splitlines(True)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / files[0].name).write_bytes(b"".join(lines[:4]) + lines[4][:20])  # killed
    asked, real = [], evaluation.generate
    monkeypatch.setattr(evaluation, "generate", lambda model, prompts, *a, **k: asked.append(
        len(prompts)) or real(model, prompts, *a, **k))
    other = shutil.copytree(ROOT / "toy" / "base", tmp_path / "other_base")
    found, _ = run(capsys, *flags, "--limit", 6, "--batch_size", 5, *again)
    assert sum(asked) == 12 - 4 and max(asked) == 5
    assert found["figures"] == whole["figures"]
    few = *flags, "--limit", 2, *again
    for changed in (("--seed", 1), ("--model", other)):               # other answers
        asked.clear()
        run(capsys, *few, *changed)
        assert sum(asked) == 4
    run(capsys, *few, "--model", other)
    assert sum(asked) == 4                                            # all are there now
    os.utime(other / "model.safetensors", (1, 1))                     # overwritten in place
    run(capsys, *few, "--model", other)
    assert sum(asked) == 8


def marked_rows(n: int) -> tuple[list[dict], list[dict]]:
    """Rows as annotate.py writes them, and the true critic's reply to each."""
    rows, replies = [], []
    rng = random.Random(0)
    for row in toy.rows("eval", n):
        response = toy.write_summary(toy.confuse(row["facts"], rng), rng)
        said = json.loads(toy.critique(row, response).split("\n")[1])
        spans = [{"start": response.index(q), "end": response.index(q) + len(q),
                  "label": 1 if kind[0] == "g" else -1}
                 for kind, quotes in said.items() for q in quotes]
        rows.append({"id": row["id"], "prompt": row["post"], "response": response,
                     "critique": "c", **said, "spans": spans})
        replies.append({"id": row["id"], "response": toy.critique(row, response)})
    return rows, replies


def test_r_phi_is_judged_by_spans_and_unreadable_replies_count_as_wrong(
        tmp_path, monkeypatch, capsys):  # Table 1, Appendix E
    rows, replies = marked_rows(20)
    for reply in replies[:5]:
        reply["response"] = "no idea"
    write_rows(tmp_path / "gold.jsonl", rows)
    write_rows(tmp_path / "a.jsonl", replies)
    write_rows(tmp_path / "b.jsonl", [row | {"response": "I cannot say."} for row in replies])
    asked, out = [], tmp_path / "out"
    with loopback(responder=lambda body: asked.append(body["messages"][1]["content"]) or "[[C]]"
                  ) as server:
        result, printed = run(
            capsys, "--task", "reward_model", "--data", tmp_path / "gold.jsonl", "--adapter",
            tmp_path / "a.jsonl", "--before", tmp_path / "b.jsonl", "--judge_model", "judge",
            "--base_url", server.url, "--output_dir", out)
    assert value(result, "win rate") == 0.5 and all("<feedback_a" in text for text in asked)
    assert len(asked) == 40                                           # both orders of each
    assert value(result, "critiques that cannot be read", "before") == 1
    assert value(result, "critiques that cannot be read") == 0.25
    for perfect in ("tokens, precision", "spans, exact", "spans, overlap index",
                    "spans, ≥ 90 % overlap"):
        right, low, high = figure(result, f"good {perfect}")["after"]
        assert right == high == 1 and 0.7 < low < 1                   # Wilson's, not [1, 1]
    assert value(result, "good tokens, recall") < 1 and "Table 19" in printed
    reasons = [row["reason"] for row in read_rows(out / "after.jsonl")]
    assert reasons == 5 * ["this critique cannot be read"] + 15 * [None]
    monkeypatch.setattr(sys, "argv", ["spans", "--audit", str(out / "after.jsonl")])
    spans.main()
    assert "5 rows without feedback were left out" in capsys.readouterr().out


def test_r_phi_is_judged_on_the_rows_that_it_was_not_trained_on(
        adapter, tmp_path, capsys):
    rows, _ = marked_rows(12)
    write_rows(tmp_path / "gold.jsonl", rows)
    mine = tmp_path / "reward" / "adapter"
    shutil.copytree(adapter, mine)
    flags = ("--task", "reward_model", "--data", tmp_path / "gold.jsonl", "--adapter", mine,
             "--max_new_tokens", "4", "--output_dir", tmp_path / "out")
    result, printed = run(capsys, *flags)                # nobody says which
    assert figure(result, "critiques that cannot be read")["rows"] == 12
    assert "may have been trained on these rows" in printed
    samples = [{"id": row["id"], "response": row["response"]} for row in rows]
    samples[0] |= {"response": "another response to it, which was trained on"}
    write_rows(mine.parent / "samples.jsonl", samples[:5])
    result, printed = run(capsys, *flags, "--limit", "3")
    assert "4 of 12 rows, held out" in printed and "may have been" not in printed
    assert not (tmp_path / "out" / "before.jsonl").exists()     # a base is no critic
    assert [row["id"] for row in read_rows(tmp_path / "out" / "after.jsonl")] == \
        [row["id"] for row in rows[1:4]]
    _, tokenizer = load_model(ROOT / "toy" / "base", device="cpu")
    marked = [token_rewards(row["response"], spans.response_tokens(tokenizer, row["response"]),
                            spans.read_spans(row)).count(1) for row in rows[1:4]]
    counts, = read_rows(tmp_path / "out" / "after_counts.json")
    assert [of for _, of in counts["good tokens, recall"]] == marked  # in tokens, not in words


def test_arc_and_code_before_against_after(stories_flags, shared, tmp_path, capsys):
    data = shared / "data" / "arc_challenge_dev.jsonl"
    result, _ = run(capsys, "--task", "arc", "--data", data, "--limit", "12",
                    *stories_flags, "--output_dir", tmp_path / "arc")
    model, tokenizer = load_model(stories_flags[1], device="cpu")
    load_lora(model, "mine", stories_flags[3])
    for name, lora in (("before", None), ("after", "mine")):
        asked = benchmarks.read_arc(data)[:12]
        rows = benchmarks.arc_scores(
            asked, benchmarks.choice_logprobs(model, tokenizer, asked, lora))
        for key in ("accuracy", "accuracy_norm"):
            assert (value(result, key, name)
                    == pytest.approx(np.mean([row[key] for row in rows])))
    data = shared / "data" / "HumanEval.jsonl.gz"
    flags = ("--task", "code", "--data", data, "--limit", "4", "--output_dir", tmp_path)
    result, printed = run(capsys, *flags, *stories_flags)
    assert "nothing was run" in printed and result["figures"] == []
    assert {"task_id", "solution"} <= read_rows(tmp_path / "after.jsonl")[2].keys()
    write_rows(tmp_path / "samples.jsonl", [
        {"task_id": p["task_id"],
         "solution": p["prompt"] + (p["canonical_solution"] if i else "    pass\n")}
        for i, p in enumerate(read_rows(data)[:4])])
    result, _ = run(capsys, *flags, "--adapter", tmp_path / "samples.jsonl",
                    "--allow_code_execution")
    assert value(result, "pass@1") == 0.75
    status = [row["status"] for row in read_rows(tmp_path / "after.jsonl")]
    assert status[0] != "passed" and status[1:] == 3 * ["passed"]


def verdict(body):
    """A judge that prefers the answer with more letters e, and rates by length."""
    system, text = (message["content"] for message in body["messages"])
    if "[[A]]" not in system:
        return f"Its length: [[{1 + len(text) % 10}]]"
    a, b = (re.search(rf"<answer_{x}-(\w+)>\n(.*?)\n</answer_{x}-\1>", text, re.S)[2].count("e")
            for x in "ab")
    return "[[C]]" if a == b else "[[A]]" if a > b else "[[B]]"


def test_the_judge_says_win_tie_loss_and_is_not_asked_twice(adapter, tmp_path, capsys):
    """Of posts that people summarised, each of which stands twice."""
    posts = 2 * [{"post": row["post"], "ideal_human_summary": row["reference"]}
                 for row in toy.rows("eval", 5)]
    write_rows(tmp_path / "posts.jsonl", posts)
    with loopback(responder=verdict) as server:
        flags = ("--task", "slf5k", "--data", tmp_path / "posts.jsonl", "--adapter", adapter,
                 "--max_new_tokens", "32", "--judge_model", "judge", "--base_url", server.url,
                 "--output_dir", tmp_path)
        _, dry = run(capsys, *flags, "--dry_run")
        before, after = ([row["response"] for row in read_rows(tmp_path / f"{name}.jsonl")]
                         for name in ("before", "after"))
        # Of equal posts, and of equal answers in both orders, one question is asked.
        pairs = {(row["post"], *pair) for row, a, b in zip(posts, before, after)
                 for pair in ((a, b), (b, a))}
        assert f"20 questions, {len(pairs)} requests to send" in dry
        assert server.stats()["calls"] == 0
        result, printed = run(capsys, *flags)
        assert server.stats()["calls"] == len(pairs)
        counts = [(a.count("e"), b.count("e")) for a, b in zip(after, before)]
        wins = [(a > b) + 0.5 * (a == b) for a, b in counts]
        assert value(result, "win rate") == pytest.approx(np.mean(wins))
        shown = rf"win +tie +loss.*\n─+\n{wins.count(1)} +{wins.count(0.5)} +{wins.count(0)} "
        assert re.search(shown, printed)
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
    gamed = tmp_path / "df_gamed.csv"
    gamed.write_text(
        "model,preference,index,std_delta_len,instruction_difficulty,not_gamed_baseline\n"
        + "".join(f"long,0.{i},{i},-1.5,0.{i},False\n" for i in range(10)))
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
                              "--difficulty", gamed, *stories_flags, *judge,
                              "--output_dir", tmp_path / "alpaca")
        assert (figure(result, "win rate")["rows"] == 6
                and printed.count("length-controlled, %\n") == 2)
        outputs = json.loads((tmp_path / "alpaca" / "after_outputs.json").read_text())
        rows = read_rows(tmp_path / "alpaca" / "after.jsonl")
        assert outputs == [{"instruction": row["instruction"], "output": answer["response"],
                            "generator": str(stories_flags[3])}
                           for row, answer in zip(read_rows(data), rows)]
        again, _ = run(capsys, "--task", "alpaca_eval", "--data", data, "--limit", "6",
                       "--adapter", tmp_path / "alpaca" / "after_outputs.json", *judge,
                       "--output_dir", tmp_path / "again")
        assert figure(again, "win rate")["after"] == figure(result, "win rate")["after"]


def test_rows_that_a_judge_left_open_are_out_of_every_side():
    line, = evaluation.table_lines({"before": {"rating": [1, None, 5]},
                                    "after": {"rating": [2, 9, 4]}})
    assert line["rows"] == 2 and line["before"][0] == 3 and line["after"][0] == 3


def test_the_same_adapter_twice_makes_no_difference_and_file_times_change_nothing(
        adapter, tmp_path, capsys):
    """Both sides are sampled with the same random numbers, so their rows are equal."""
    copy, out = shutil.copytree(adapter, tmp_path / "copy"), tmp_path / "out"
    os.utime(copy / "adapter_model.safetensors", (1, 1))
    flags = ("--adapter", copy, "--before", adapter, "--limit", "8", "--temperature", "2",
             "--output_dir", out)
    result, _ = run(capsys, *flags)
    rows = read_rows(out / "after.jsonl")
    assert rows == read_rows(out / "before.jsonl")
    assert read_rows(out / "after_counts.json") == read_rows(out / "before_counts.json")
    assert all(line["difference"] == [0, 0, 0] for line in result["figures"])
    file, = out.glob("answers-*")
    assert len(read_rows(file)) == 8                                  # written once, for both
    run(capsys, *flags, "--seed", "1")
    assert read_rows(out / "after.jsonl") != rows           # other random numbers, other texts


def test_answers_from_a_file_may_be_empty_and_none_is_dropped(tmp_path, capsys):
    answers = [{"id": row["id"], "response": row["reference"] if i else ""}
               for i, row in enumerate(toy.rows("eval", 4))]
    file, flags = tmp_path / "answers.json", ("--limit", "4", "--output_dir", tmp_path / "out")
    file.write_text(json.dumps(answers))
    result, _ = run(capsys, *flags, "--adapter", file)
    assert value(result, "fact accuracy") == value(result, "rouge1") == pytest.approx(0.75)
    for rows, message in (([*answers, answers[0]], "two rows have the same id"),
                          (answers[:1], "row toy-eval-0-1 has no answer; ")):
        file.write_text(json.dumps(rows))
        assert message in error_message("eval.py", *flags, "--adapter", file)
    # "none" is the base alone, where the toy's preset names an adapter
    result, printed = run(capsys, *flags, "--adapter", "none", "--max_new_tokens", "3")
    assert result["config"]["adapter"] is None and "difference" not in printed
    assert set(figure(result, "fact accuracy")) == {"measure", "unit", "rows", "base"}


def test_a_sign_that_people_never_marked_is_neither_right_nor_wrong(tmp_path, capsys):
    text = "The cat sat on the mat."
    row = {"id": "1", "prompt": "p", "response": text, "critique": "c", "good_spans": [],
           "poor_spans": ["mat"], "spans": [{"start": 19, "end": 22, "label": -1}]}
    write_rows(tmp_path / "gold.jsonl", [row, row | {"id": "2"}])
    said = json.dumps({"textual_feedback": "so", "good_spans": ["cat"], "poor_spans": ["mat"]})
    write_rows(tmp_path / "said.jsonl", [{"id": n, "response": said} for n in "12"])
    result, printed = run(capsys, "--task", "reward_model", "--data", tmp_path / "gold.jsonl",
                          "--adapter", tmp_path / "said.jsonl", "--output_dir", tmp_path / "o")
    assert value(result, "poor spans, exact") == 1
    assert not re.search(r"^good, quarter", printed, re.M)  # Table 19 calls none wrong
    assert not any(line["measure"].startswith("good") for line in result["figures"])
    assert "after: in words of the response" in printed


def test_damaged_weights_are_named_and_not_scored(tmp_path):
    broken = shaken(ROOT / "toy" / "base", tmp_path / "broken", float("nan"))
    message = error_message("eval.py", "--adapter", broken, "--output_dir", tmp_path / "out")
    assert "NaN or infinite weights" in message


@pytest.mark.parametrize("flags, said", [
    (("--batch_size", "0"), "--batch_size: 0 must be at least 1"),
    (("--limit", "-2"), "--limit: -2"), (("--temperature", "nan"), "--temperature: nan"),
    (("--dtype", "fp99"), "--dtype: invalid choice: 'fp99'"),
    (("--max_usd", "1"), "--price_in"),
    (("--judge_prompts", "nowhere"), "nowhere: no such file"),
    (("--adapter", "nowhere"), "there is no adapter"), (("--task", "arc"), "needs --data"),
    (("--task", "arc", "--data", "d", "--before", __file__), "test_eval.py is a file"),
    (("--task", "reward_model", "--data", "d"), "needs --adapter, R_φ"),
    (("--task", "poetry"), "--task: invalid choice: 'poetry'")])
def test_a_flag_that_cannot_be_used_is_refused_before_anything_is_done(flags, said, monkeypatch,
                                                                       tmp_path):
    monkeypatch.setattr(evaluation, "load_model", None)
    assert said in error_message("eval.py", "--output_dir", tmp_path / "out", *flags)
    assert not (tmp_path / "out").exists()


def test_bad_input_is_one_line_that_says_what_to_do(tmp_path):
    data, out = tmp_path / "rows.jsonl", ("--output_dir", tmp_path / "out")
    marked = {"id": "1", "prompt": "p", "response": "r",
              "spans": [{"start": 0, "end": 9, "label": 1}]}
    short, long = ({"post": "word " * n, "facts": {"who": "me"}, "reference": "r"}
                   for n in (9, 999))
    for rows, flags, message in (
            ([marked], ("--task", "reward_model", "--adapter", data), "1: .* not a valid span"),
            ([marked], ("--task", "code"), "rows.jsonl, line 1: field"),
            ([short, long], ("--adapter", "none"),
             "no room for an answer to 'Summarise the post"),
            ([short, short | {"reference": 7}], ("--adapter", "none"),
             "rows.jsonl, row 2: 'reference'.* must be a text, but is 7")):
        write_rows(data, rows)
        assert re.search(message, error_message("eval.py", *flags, "--data", data, *out))


def test_the_context_bounds_an_answer_and_what_is_beside_it_does_not_matter(
        adapter, tmp_path, monkeypatch, capsys):
    """Two of three critiques have room for fewer than the 1,024 tokens that are asked for."""
    rows, _ = marked_rows(3)
    for row, n in zip(rows, (0, 40, 90)):
        row["prompt"] = "word " * n + row["prompt"]
    write_rows(tmp_path / "gold.jsonl", rows)
    whole, most = evaluation.generate, []
    monkeypatch.setattr(evaluation, "generate", lambda model, prompts, n, *a, **k: most.append(
        (len(prompts), n)) or whole(model, prompts, n, *a, **k))
    flags = ("--task", "reward_model", "--data", tmp_path / "gold.jsonl", "--adapter", adapter)
    run(capsys, *flags, "--output_dir", tmp_path / "a")
    assert len({n for _, n in most}) > 1 and all(n % 64 == 0 and 0 < n < 512 for _, n in most)
    together = read_rows(tmp_path / "a" / "after.jsonl")
    run(capsys, *flags, "--batch_size", "1", "--output_dir", tmp_path / "b")
    assert read_rows(tmp_path / "b" / "after.jsonl") == together
