"""Requests to the annotator. No test depends on the speed of the machine."""

from __future__ import annotations

import gc
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from types import SimpleNamespace

import annotate as annotate_script
import openai.resources.chat  # noqa: F401  loading it takes 1 s of the first --timeout
import pytest
from annotate import (AnnotateConfig, Feedback, annotate, annotation_questions,
                      describe_feedback, feedback_row, ground)
from ask import Journal, Question, Server, read_answer
from data import InputError, read_rows, write_rows
from helpers import ROOT, SLOW, error_message, run_main
from loopback import critique
from loopback import loopback as serving


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch):
    monkeypatch.setattr("ask.PAUSE", 0.1)


@pytest.fixture()
def work(tmp_path):
    """A `Work` with a new server."""
    with serving() as server:
        yield Work(tmp_path, server)


GOOD = json.dumps({"critique": "It ends.", "good_spans": ["the end"], "poor_spans": []})
PRICES = {"price_in": 2.5, "price_out": 10.0}                     # USD per million tokens
WORDS = ("the plot is thin but every hero has a name and old Bob says “never” "
         "in the end 🎉 of it all").split()


def random_rows(n: int) -> list[dict]:
    rng = random.Random(n)
    return [{"id": f"row-{i}", "prompt": f"Question {i}?",
             "response": f"{i}: " + " ".join(rng.choices(WORDS, k=rng.randint(3, 40)))}
            for i in range(n)]


def hostile_rows(n: int) -> list[dict]:
    """Rows in which nearly every character is a token if the server counts "pieces"."""
    return [{"id": f"row-{i}", "prompt": "1a" * 900, "response": f"{i} " + "7b_" * 700}
            for i in range(n)]


def usd(usage: dict) -> float:
    return (usage["prompt_tokens"] * 2.5 + usage["completion_tokens"] * 10) / 1e6


class Work:
    """A folder with rows, runs of annotate.py over them, and the server that they ask."""

    def __init__(self, folder, server):
        self.folder, self.server, self.rows = folder, server, []
        self.data = folder / "rows.jsonl"
        self.output = folder / "new" / "f.jsonl"
        self.journal = self.output.with_name("f.jsonl.journal")

    def set(self, **settings):
        """Change the behaviour of the server."""
        vars(self.server.settings).update(settings)

    def write(self, rows):
        self.rows = rows
        self.data.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def config(self, **options) -> AnnotateConfig:
        return AnnotateConfig(**{
            "task": "ultrafeedback", "data": str(self.data), "output": str(self.output),
            "annotator_model": "tiny", "base_url": self.server.url, "retries": 2, "timeout": 20,
            **options})

    def flags(self, **options) -> list[str]:
        settings = vars(self.config(**options))
        return [f"--{name}={value}" for name, value in settings.items()
                if value not in (None, False)]

    def run(self, rows=None, **options) -> str:
        if rows is not None:
            self.write(rows)
        return annotate(self.config(**options))

    def fails(self, message: str, rows=None, **options) -> str:
        with pytest.raises(InputError, match=message) as error:
            self.run(rows, **options)
        assert "\n" not in str(error.value) and "sk-loopback" not in str(error.value)
        return str(error.value)

    def output_rows(self) -> list[dict]:
        """The rows of OUTPUT, after a check that they are all rows of the data in order."""
        rows = read_rows(self.output)
        assert [(r["id"], r["prompt"], r["response"]) for r in rows] == [
            (r["id"], r["prompt"], r["response"]) for r in self.rows]
        return rows

    def records(self) -> list[dict]:
        """The replies in the journal, each with its last reason, without a line cut off."""
        lines = self.journal.read_bytes().split(b"\n")[:-1] if self.journal.exists() else []
        replies = []
        for record in map(json.loads, lines):
            if "reply" in record:
                replies.append(record)
            elif "is_read" in record:
                last = [reply for reply in replies if reply["key"] == record["key"]][-1]
                last["reason"] = record["reason"]
        return replies

    def calls(self) -> int:
        return self.server.stats()["calls"]

    def bill(self) -> float:
        return usd(self.server.stats())

    def worst_usd(self) -> float:
        """The most that one row may cost."""
        questions = annotation_questions(self.config())
        return max(usd(Server("tiny").max_usage(question)) for question in questions)


# ── Every row gets feedback or a recorded failure

@pytest.mark.parametrize("fault, reason, text", [
    ("truncated", "cut off after 1200 tokens", '{"reasoning'),
    ("garbage", "no JSON object", "the weather"), ("400", "Bad request.", "")])
def test_an_unusable_reply_is_kept_whole_and_costs_one_row(work, capsys, fault, reason, text):
    """FACTS §5: failed calls must never become rows. The progress bar counts them at once."""
    work.set(plan=["ok", fault, "ok"])
    assert "row-1" in work.fails(reason, random_rows(3), concurrency=1)
    counts = dict(re.findall(r"(\d)/3 [^|]*failed=(\d)", capsys.readouterr().err))
    assert counts["2"] == "1"
    failure, = [record for record in work.records() if record["reason"] is not None]
    assert failure["id"] == "row-1" and reason in failure["reason"]
    assert text in failure["reply"] and bool(text) == bool(failure["reply"])
    assert work.calls() == 3
    work.run()
    assert work.calls() == 4 and len(work.output_rows()) == 3


PARTS = '[{"type": "text", "text": "It "}, {"type": "text", "text": "ends."}'


@pytest.mark.parametrize("content, is_usable", [
    ('"It ends."', True), (f'{PARTS}, {{"type": "image_url"}}]', True),
    *[(text, False) for text in (
        "[]", "null", "7", "true", '"  "', '{"text": "It ends."}', '["It", "ends."]',
        '[{"type": "text"}]', '[{"type": "text", "text": 7}]')]])
def test_a_content_is_a_text_or_a_list_with_texts(content, is_usable):
    body = f'{{"choices": [{{"message": {{"content": {content}}}, "finish_reason": "stop"}}]}}'
    answer = SimpleNamespace(status_code=200, headers={}, content=body.encode())
    reply = read_answer(answer, 90, 100)
    assert (reply.reason is None) == (reply.text == "It ends.") == is_usable


# ── The journal: no request is sent twice

def kill_when_asked(work, calls: int, **options):
    """Start the command and kill it when the server's count of calls reaches `calls`."""
    process = subprocess.Popen([sys.executable, ROOT / "annotate.py", *work.flags(**options)],
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while work.calls() < calls and process.poll() is None:
        time.sleep(0.01)
    process.kill()
    process.wait()


def test_a_run_killed_many_times_asks_no_row_twice_but_those_in_flight(work):
    """Kills the command with SIGKILL. A second process is refused while the first one runs."""
    kills, n = (20, 2000) if SLOW else (3, 150)
    concurrency = 8
    rng = random.Random(0)
    refusals = []
    work.write(random_rows(n))

    def answer(body):
        if not refusals:
            refusals.append(work.fails("another process"))
        return critique(body)

    work.set(delay=0.02, responder=answer)
    for kill in range(kills):
        target = work.calls() + rng.randrange(1, 2 * n // (kills + 1))
        kill_when_asked(work, min(target, n), concurrency=concurrency)
        keys = {record["key"] for record in work.records()}
        assert len(keys) <= work.calls() <= n + concurrency * (kill + 1)
    work.run(concurrency=concurrency)
    stats = work.server.stats()
    assert len(work.output_rows()) == n == len(stats["asked"]) and refusals
    print(f"{kills} kills, {n} rows: {stats['calls'] - n} of {concurrency * kills} repeats")
    assert stats["calls"] - n <= concurrency * kills
    counts = Counter(record["key"] for record in work.records())
    assert counts.most_common(1)[0][1] == 1, "the journal holds two replies to one question"


def test_the_command_ends_in_one_line_or_names_the_next_command(work, capsys):
    work.set(plan=["ok", "garbage"])
    work.write(random_rows(3))
    assert "1 responses have no feedback" in error_message("annotate.py", *work.flags())
    run_main(*work.flags(), module=annotate_script)
    *_, line, following = capsys.readouterr().out.splitlines()
    assert str(work.output) in line and following == (
        f"next: python reward_model.py --task ultrafeedback --data {work.output} --model MODEL")


# Changes of line 2, and of the last line, which then lacks its final newline.
@pytest.mark.parametrize("line, pattern, text, requests", [
    *[(2, *change, 1) for change in (
        (b"^..", b"\xff\0"), (b".{99}$", b""), (b"^.*$", b""), (b"^.*$", b"7"),
        (b"^.*$", b"[]"), (b"good_spans", b"bad_spans"),
        (rb'good_spans(.*), "sha256": "\w+"', rb"bad_spans\1"))],
    (8, b"^(.{40}).*$", rb"\1", 1), (8, b".$", b"", 1), (8, b"$", b"", 0)])
def test_a_changed_or_cut_off_line_costs_only_its_row(work, capsys, line, pattern, text,
                                                      requests):
    """Later lines are complete: the second run asks for nothing."""
    work.run(random_rows(4), concurrency=1, **PRICES)
    lines, final = work.journal.read_bytes().splitlines(), work.output.read_bytes()
    lines[line - 1], changes = re.subn(pattern, text, lines[line - 1])
    assert changes == 1 and len(lines) == 8
    work.journal.write_bytes(b"\n".join(lines) + b"\n" * (line < 8))
    for _ in range(2):
        work.run(**PRICES)
        assert (work.calls(), work.output.read_bytes()) == (4 + requests, final)
    message = f"f.jsonl.journal, line {line}: skipping corrupt line"
    assert (message in capsys.readouterr().err) == bool(requests)


def test_a_request_starts_a_new_line_after_one_without_a_newline(tmp_path):
    """Neither request was answered, so the next run books the largest cost of both."""
    path = tmp_path / "f.jsonl.journal"
    for key in "first", "second":
        with Journal(path, 1e6, 1e6) as journal:
            journal.begin(Question(key, "", []), {"prompt_tokens": 3, "completion_tokens": 2})
        path.write_bytes(path.read_bytes().removesuffix(b"\n"))
    with Journal(path, 1e6, 1e6) as journal:
        assert journal.spent == 10


def test_a_question_is_asked_once(work):
    """A new request is sent only for a new row, or for another model, mode or text."""
    rows = random_rows(4)
    rows.append(rows[1] | {"id": "twin"})
    work.run(rows)
    assert work.calls() == 4
    first, twin = work.output_rows()[1], work.output_rows()[4]
    assert {**first, "id": "twin"} == twin and twin["spans"]
    added = [row | {"id": f"new-{k}", "prompt": f"New {k}?"} for k, row in enumerate(rows[:3])]
    for changed_rows, options, requests in [
            (rows, {}, 0), (rows[::-1], {}, 0), (rows + added, {}, 3),
            (rows, {"annotator_model": "other"}, 4), (rows, {"mode": "no_cot"}, 4),
            ([rows[0] | {"prompt": "Another?"}, *rows[1:]], {}, 1), (rows, {}, 0)]:
        calls_before = work.calls()
        work.output.unlink()
        work.run(changed_rows, **options)
        assert work.calls() - calls_before == requests and work.output_rows()


def test_rows_that_always_fail_do_not_block_later_rows(work):
    """25 consecutive failures stop a run; the next run does not count earlier failures."""
    work.set(responder=lambda body: GOOD if "a good row" in str(body) else "It is late.")
    rows = random_rows(60)
    for row in rows[40:]:
        row["response"] += " a good row"
    work.fails("25 replies in a row", rows, concurrency=4)
    work.fails("40 responses have no feedback", concurrency=4)
    work.run(skip_failed=True, concurrency=4)
    assert [row["id"] for row in read_rows(work.output)] == [row["id"] for row in rows[40:]]


# ── Servers that fail or are absent

@pytest.mark.parametrize("concurrency", [1, 64])
@pytest.mark.parametrize("fault", ["timeout", "drip"])
def test_a_server_that_never_answers_ends_the_run(work, fault, concurrency):
    """Only the first questions are asked, each twice; "drip" sends a byte every 0.5 s."""
    work.set(faults={fault: 1.0}, hang=20)
    work.fails("no answer in 0.5 s; lower --concurrency, or raise --timeout", random_rows(150),
               concurrency=concurrency, timeout=0.5, retries=1)
    assert 2 <= work.calls() <= 2 * concurrency


@pytest.mark.parametrize("fault", ["429", "reset"])
def test_each_pause_is_twice_as_long_as_the_one_before(work, fault):
    """A slow machine can only make the pauses longer."""
    work.set(plan=[fault] * 3)
    start = time.monotonic()
    work.run(random_rows(2), concurrency=1, retries=3)
    assert time.monotonic() - start >= 0.1 + 0.2 + 0.4
    assert work.calls() == 3 + 2 == len(work.output_rows()) + 3


@pytest.mark.parametrize("url", [
    "http://u:pass-word@127.0.0.1:9/v1", "http://127.0.0.1:9/sk-loopback\x01",
    " http://127.0.0.1:9/v1", "http://u:pass-word@[::1", "http://", "ftp://u:pass-word@h/",
    "u:pass-word@h:80/v1", "http://u:pass-word@h:port/v1", "http://u:pass-word@h\x1b/v1",
    "http://no.such.host.invalid/v1", "http://" + "a" * 70 + ".org/v1"])
def test_a_url_without_a_server_is_one_line_without_secrets_and_costs_nothing(work, capsys,
                                                                              url):
    message = work.fails("--base_url|with model.*check OPENAI_API_KEY, the URL",
                         random_rows(2), base_url=url, retries=0)
    assert "http" in message and not re.search("\x1b|\x01", message)
    assert "pass-word" not in message + capsys.readouterr().err
    assert not any(sum(record["usage"].values()) for record in work.records())


@pytest.mark.parametrize("key", ["", "sk-secret\n", "sk-secr\u00e8t", "sk secret"])
def test_a_key_that_cannot_be_sent_is_refused_and_not_shown(work, monkeypatch, capsys, key):
    monkeypatch.setenv("OPENAI_API_KEY", key)
    assert "secr" not in work.fails("OPENAI_API_KEY", random_rows(2)) + capsys.readouterr().err
    assert work.calls() == 0


# ── Money

def test_rows_stay_in_order_and_their_cost_is_the_servers_own(work):
    """The first reply comes last, and some replies are unusable or refused."""
    work.set(plan=["late", "garbage", "truncated", "429"], hang=0.3)
    work.fails("2 responses", random_rows(20), concurrency=8, **PRICES)
    line = work.run(**PRICES)
    assert (sum(record["usd"] for record in work.records())
            == pytest.approx(work.bill(), rel=1e-12))
    assert (float(re.search(r"\$([\d.]+) in all runs", line)[1])
            == pytest.approx(work.bill(), abs=1e-4))
    for row in work.output_rows():
        assert row["usd"] == pytest.approx(usd(row["usage"]))
        assert row["spans"] and not row["unmatched"] and not row["ambiguous"]
        assert row["critique"] and row["annotator"] == "tiny"
    files = work.output.read_text() + work.journal.read_text()
    assert "sk-loopback" not in files + json.dumps(work.server.stats()["recent"])


@pytest.mark.parametrize("counting, rows, text", [
    ("pieces", random_rows(40), None), ("pieces", hostile_rows(15), "c"),
    ("quarters", random_rows(15), "c" * 4400)])
def test_the_bill_stays_within_the_budget_and_a_larger_one_goes_on(work, counting, rows, text):
    """In the last run, a refused request frees its share of the budget until it is retried."""
    work.set(counting=counting, delay=0.005)
    if text:
        reply = json.dumps({"critique": text, "good_spans": ["zq"], "poor_spans": []})
        work.set(responder=lambda body: reply)
    work.run(rows, **PRICES)
    cost, final = work.bill(), work.output.read_bytes()
    work.journal.unlink()
    work.output.unlink()
    for share in (0.01, 0.2, 0.5, 0.8):
        work.fails("--max_usd .* reached", max_usd=share * cost, concurrency=8, **PRICES)
        assert work.bill() - cost <= share * cost and not work.output.exists()
    assert work.bill() - cost > 0.4 * cost, "the run stopped long before the budget"
    work.set(faults={"429": 0.3})
    work.run(max_usd=cost + 1.1 * work.worst_usd(), retries=9, **PRICES)
    assert work.bill() == pytest.approx(2 * cost) and work.output.read_bytes() == final


@pytest.mark.parametrize("concurrency", [1, 8, 64] if SLOW else [1, 64])
def test_killed_runs_are_never_billed_more_than_the_budget(work, concurrency):
    """Each row is billed nearly at its worst case. A run books the requests that were in flight
    when the process before it was killed."""
    reply = GOOD.replace("It ends.", "7b_" * 380).replace("the end", "zq")
    work.set(counting="pieces", delay=0.2, responder=lambda body: reply)
    work.write(hostile_rows(150))
    budget = (2 * concurrency + 1.2) * work.worst_usd()
    for _ in range(2):
        kill_when_asked(work, work.calls() + concurrency + 1, concurrency=concurrency,
                        max_usd=budget, **PRICES)
        assert work.bill() <= budget
    assert work.calls() > concurrency
    work.fails("--max_usd .* reached", max_usd=budget, concurrency=concurrency, **PRICES)
    print(f"SIGKILL, {concurrency} at once: billed / budget {work.bill() / budget:.3f}")
    assert 0.4 * budget < work.bill() <= budget


def test_replies_of_a_run_without_prices_count_against_a_later_budget(work):
    work.run(random_rows(40), limit=20)
    cost = work.bill()
    line = work.fails("max_usd", max_usd=cost, **PRICES)
    assert f"reached: ${cost:.4f} is spent" in line and work.calls() == 20
    work.run(**PRICES)
    assert all(row["usd"] > 0 for row in work.output_rows())


def test_a_dry_run_sends_no_request_and_counts_those_that_are_left(work, monkeypatch, capsys):
    """It assumes 4 bytes per token and 350 tokens per reply, or 80 in mode "align"."""
    work.run(random_rows(300), limit=50, **PRICES)
    monkeypatch.delenv("OPENAI_API_KEY")
    sizes = [question.size for question in annotation_questions(work.config())[50:]]
    forecast, feedback = work.run(dry_run=True, **PRICES).split("\n", 1)
    assert feedback.startswith("feedback: ") and " 0% of the quotes ambiguous" in feedback
    assert forecast == (
        f"300 responses, 250 requests to send: about {sum(sizes) // 4:,} prompt + 87,500 reply "
        "tokens (4 bytes per token, 350 tokens per reply), "
        f"${usd({'prompt_tokens': sum(sizes) // 4, 'completion_tokens': 87_500}):.4f}")
    rows = [row | {"critique": "c"} for row in work.rows]
    aligned = work.run(rows, dry_run=True, mode="align")
    assert "80 tokens per reply" in aligned and "USD unknown" in aligned
    work.output.unlink()
    rows = [{"prompt": row["prompt"]} for row in rows[:5]]
    assert work.run(rows, dry_run=True).startswith("5 responses, 5 requests to send")
    assert "5 rows have no response; the forecast counts" in capsys.readouterr().out
    assert work.calls() == 50


def feedback_rows(quotes_of):
    """Annotated responses; quotes_of(response) → (good quotes, poor quotes)."""
    rows = []
    for i in range(20):
        example = {"id": str(i), "prompt": "p", "response": f"the cat {i} and the dog sat here"}
        z = Feedback("c", *quotes_of(example["response"]))
        rows.append(feedback_row("t", example, z, ground(example["response"], z), "me"))
    return rows


@pytest.mark.parametrize("quotes_of, warned", [
    (lambda y: (["cat"], ["sat here"]), []),
    (lambda y: ([], []), [("responses without a span", "the cat 0 and the dog sat here")]),
    (lambda y: (["cat", "the", "the"], ["the"]), [("quotes ambiguous", "the")]),
    (lambda y: (["a bird", "cat"], ["sat"]), [("quotes unmatched", "a bird")]),
    # A repeat that has no place is in the response, and "ca" is there only inside a word.
    (lambda y: (["cat", "cat"], []), [("quotes unmatched", "cat")]),
    (lambda y: (["cat", "dog"], ["ca"]), [("quotes unmatched", "inside a word: ca")])])
def test_feedback_of_no_worth_is_warned_of_in_one_line(quotes_of, warned):
    _, *warnings = describe_feedback(feedback_rows(quotes_of)).splitlines()
    pattern = r"of the ([\w ]+) \(healthy: .*; for example '(.*)'$"
    assert [re.search(pattern, line).groups() for line in warnings] == warned


def test_the_figures_of_feedback_are_counted_by_hand():
    """"cat" is good, "a bird" does not occur, and "the" occurs twice."""
    rows = feedback_rows(lambda y: (["cat", "a bird"], ["the"]))
    line = describe_feedback(rows).splitlines()[0]
    assert line == ("feedback: 60 quotes, 33% of the quotes unmatched, 33% of the quotes "
                    "ambiguous, 0% of the responses without a span")


# ── --annotator_function: a Python function instead of a server

@pytest.fixture()
def critic(work, monkeypatch):
    """A `Work` that calls `critic.module.judge`, which tests may replace."""
    monkeypatch.delenv("OPENAI_API_KEY")
    work.module = SimpleNamespace(judge=lambda row, response: GOOD)
    monkeypatch.setitem(sys.modules, "critic_of_the_test", work.module)
    config = work.config
    work.config = lambda **options: config(annotator_function="critic_of_the_test:judge",
                                           base_url=None, **options)
    return work


# Alg. 1 l.5; Alg. 1 l.7–8; Alg. 1 l.10
def test_a_critic_is_asked_with_row_and_response(critic):
    calls = []
    critic.module.judge = lambda row, response: calls.append((row["more"], response)) or GOOD
    critic.run([row | {"more": k} for k, row in enumerate(random_rows(6))], concurrency=3)
    assert (sorted(calls) == [(k, row["response"]) for k, row in enumerate(critic.rows)]
            and critic.calls() == 0)
    assert {(row["annotator"], row["critique"], row["usd"])
            for row in critic.output_rows()} == {("critic_of_the_test:judge", "It ends.", None)}
    critic.run([row | {"more": k * 2} for k, row in enumerate(random_rows(6))])
    assert len(calls) == 6 + 5, "any changed field of a row calls the function again"
    assert len(critic.output_rows()) == 6, "𝒟_R must start empty in each run"


def test_failures_of_a_critic_are_recorded_and_its_exceptions_end_the_run(critic, capfd):
    critic.module.judge = lambda row, response: "It is late." if row["id"] == "row-2" else GOOD
    critic.fails("1 responses.*row-2: no JSON object", random_rows(40), concurrency=16)
    critic.module.judge = lambda row, response: 1 // 0
    critic.fails("--annotator_function critic_of_the_test:judge, row .*: ZeroDivisionError: in",
                 [row | {"more": 1} for row in critic.rows], concurrency=16)
    gc.collect()                           # would print the error of a task never awaited
    assert "Traceback" not in capfd.readouterr().err
    critic.module.judge = lambda row, response: GOOD
    critic.run()
    assert len(critic.output_rows()) == 40


def test_an_empty_response_is_named_and_left_out(critic, capsys):
    rows = random_rows(3)
    rows[1]["response"] = " "
    critic.run(rows)
    assert [row["id"] for row in read_rows(critic.output)] == ["row-0", "row-2"]
    assert "left out 1 empty responses (the first: row row-1)" in capsys.readouterr().err
    critic.fails("every response is empty; .* choose another --model$",
                 [row | {"response": ""} for row in rows])
    critic.fails("no row has a response", [{"prompt": row["prompt"]} for row in rows])


@pytest.mark.parametrize("value, mode", [
    ('Feedback("It ends.", ["The end"], [])', "cot"),
    ('{"critique": "It ends.", "labels": [{"word": "The", "label": "good"},'
     ' {"word": "end.", "label": "good"}]}', "experiments.modes:DENSE"),
    ("json.loads(response)", "cot")])
def test_a_module_of_the_user_gives_feedback_a_dict_or_the_line_of_its_error(
        tmp_path, value, mode):
    """In its own process: the `annotate` that a mode imports must be the script that runs."""
    (tmp_path / "mine.py").write_text("import json\nfrom annotate import Feedback\n"
                                      f"def give(row, response):\n    return {value}")
    write_rows(tmp_path / "rows.jsonl", [{"prompt": "Go on.", "response": "The end."}])
    process = subprocess.run(
        [sys.executable, ROOT / "annotate.py", "--task", "ultrafeedback", "--data",
         "rows.jsonl", "--annotator_function", "mine:give", "--mode", mode],
        cwd=tmp_path, capture_output=True, text=True)
    if "json" in value:
        assert ("row 1: JSONDecodeError: Expecting value: line 1 column 1 (char 0) "
                f"({tmp_path}/mine.py, line 4)") in process.stderr
        return
    row, = read_rows(tmp_path / "feedback.jsonl")
    assert row["critique"] == "It ends." and row["good_spans"][0][:7] == "The end"
    assert [(span["start"], span["label"]) for span in row["spans"]] == [(0, 1)]


@pytest.mark.parametrize("value, reason", [
    (None, "None"), (7, "7"), (["the end"], "the end"), ({"good_spans": {1}}, "dataclass"),
    ({"critique": "c", "good_spans": 7, "poor_spans": []}, "must be a list of strings")])
def test_a_wrong_return_is_answered_with_the_form(critic, value, reason):
    critic.module.judge = lambda row, response: value
    message = critic.fails("critic_of_the_test:judge, row row-0: returned ", random_rows(1))
    form = message.partition("return a Feedback, a dict such as ")[2].partition(", or its")[0]
    assert reason in message and json.loads(form.replace("'", '"'))["good_spans"] == ["…"]


# ── Flags

@pytest.mark.parametrize("flags, message", [
    *[(flag, flag.split()[0]) for flag in (
        "--mood x", "--limit 0", "--limit -1", "--concurrency 0", "--retries -1",
        "--timeout inf")],
    ("--task nope", "nope"), ("--data none", "--data is missing"),
    ("--max_usd 1", "--max_usd needs"), ("--output {}/x/../rows.jsonl", "are one file"),
    ("--output {}", "is a directory"), ("--mode cots", "no such name; use cot, no_cot, align"),
    ("--mode dense", "no such name.*module:NAME"),
    ("--mode experiments.modes:NONE", "--mode.*cannot import"),
    ("--mode experiments.modes:LABELS", "--mode.*found a dict"),
    *[(f"--annotator_function={name}", "--annotator_function") for name in (
        "", "toy", "toy:", "toy:absent", ":critique", "no_such_module:f", "./toy:critique",
        "toy:SLOTS")]])
def test_invalid_flags_are_one_line_before_any_request(work, flags, message):
    work.write(random_rows(2))
    flags = flags.format(work.folder).split()
    assert re.search(message, error_message("annotate.py", *work.flags(), *flags))
    assert work.calls() == 0 and not work.records()


# ── Ctrl-C

def press_ctrl_c():
    os.kill(os.getpid(), signal.SIGINT)


def interrupt(work, call=None, **settings):
    """Run with eight requests at a time until KeyboardInterrupt. call: this request presses."""
    def answer(body):
        if work.server.calls == call:
            press_ctrl_c()
        return critique(body)

    work.set(responder=answer, **settings)
    signal.signal(signal.SIGINT, signal.default_int_handler)     # a shell may ignore SIGINT
    with pytest.raises(KeyboardInterrupt):
        work.run(random_rows(60), concurrency=8)


def test_ctrl_c_waits_for_the_replies_that_are_paid_for(work):
    interrupt(work, 9, delay=0.2)
    assert 8 < len(work.records()) == work.calls() < 60
    work.set(delay=0)
    work.run()
    assert work.calls() == 60 == len(work.output_rows())


def test_ctrl_c_does_not_wait_for_retries(work, monkeypatch):
    """It is pressed when all eight requests start to pause for an hour."""
    def note_refusal(bar, reason):
        reasons.append(reason)
        if len(reasons) == 8:
            threading.Timer(0.1, press_ctrl_c).start()

    reasons = []
    monkeypatch.setattr("ask.PAUSE", 3600)
    monkeypatch.setattr("ask.tqdm.set_postfix_str", note_refusal)
    rescue = threading.Timer(120, press_ctrl_c)                  # a second Ctrl-C never waits
    rescue.start()
    interrupt(work, plan=["ok"], faults={"429": 1.0})
    assert rescue.is_alive(), "the first Ctrl-C waited for the pauses"
    rescue.cancel()
    assert work.calls() == 1 + 8


def test_a_second_ctrl_c_does_not_wait(work, monkeypatch):
    """It drops the requests in flight, whose replies would take a minute."""
    def press_again(bar, description):                           # the first Ctrl-C was handled
        threading.Timer(0.1, press_ctrl_c).start()

    monkeypatch.setattr("ask.tqdm.set_description", press_again)
    interrupt(work, 1, delay=60)
    assert 0 < work.calls() <= 8 and not work.records()
