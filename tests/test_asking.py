"""Phase 1: the requests of annotate.py, to a server or a function, and what is written."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
from annotate import (Feedback, FeedbackError, Grounding, Mode, annotate,
                      annotation_questions, describe_feedback, feedback_row, function_hash,
                      ground)
from data import InputError, read_rows, write_rows
from settings import AnnotateConfig
from helpers import ROOT, error_message, read_jsonl
from loopback import Answer, completion, loopback, over_http

PRICES = {"price_in": 2.5, "price_out": 10.0}                    # USD per million tokens


def usd(prompt_tokens, completion_tokens, **_) -> float:
    return (prompt_tokens * 2.5 + completion_tokens * 10) / 1e6


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch):
    monkeypatch.setattr("ask.PAUSE", 0.0)


@pytest.fixture()
def server():
    with loopback() as fake:
        yield fake


WORDS = ("the plot is thin but every hero has a name and old Bob says “never” "
         "in the end 🎉 of it all").split()
GOOD = json.dumps({"critique": "It ends.", "good_spans": ["the end"], "poor_spans": []})


class Work:
    """A folder with rows, and runs of annotate.py over them."""

    def __init__(self, folder, url):
        self.url = url
        self.data = folder / "rows.jsonl"
        self.output = folder / "new" / "f.jsonl"
        self.journal = self.output.with_name("f.jsonl.journal")

    def config(self, **options) -> AnnotateConfig:
        return AnnotateConfig(**{
            "task": "ultrafeedback", "data": str(self.data), "output": str(self.output),
            "annotator_model": "tiny", "base_url": self.url, "retries": 2, **options})

    def write(self, rows):
        write_rows(self.data, rows)

    def flags(self, **options) -> list[str]:
        return [f"--{name}={value}" for name, value in vars(self.config(**options)).items()
                if value not in (None, False)]

    def run(self, rows=None, **options) -> str:
        if rows:
            self.write(rows)
        config = self.config(**options)
        return annotate(config, config.data, config.output, config.limit, config.dry_run)

    def fails(self, message: str, rows=None, **options):
        with pytest.raises(InputError, match=message) as error:
            self.run(rows, **options)
        assert "\n" not in str(error.value)


@pytest.fixture()
def work(server, tmp_path):
    return Work(tmp_path, server.url)


def random_rows(n: int) -> list[dict]:
    rng = random.Random(n)
    return [{"id": f"row-{i}", "prompt": f"Question {i}?",
             "response": f"{i}: " + " ".join(rng.choices(WORDS, k=rng.randint(3, 40)))}
            for i in range(n)]


def test_rows_stay_in_order_and_their_cost_is_the_servers_own(work, server):
    """The first reply comes last, and some replies are unusable or refused."""
    def answer(body, number):
        if number == 9:
            return Answer("{}", 429)
        answer = honest(body, number)
        if "Question 2?" in str(body) and number < 15:
            answer.body["choices"][0]["message"]["content"] = "It is late."
        answer.wait = 0.2 if number == 2 else 0.0
        return answer

    honest, server.answer = server.answer, answer
    rows = random_rows(20)
    work.fails("1 responses have no feedback.*row-2: no JSON object", rows, **PRICES)
    line = work.run(**PRICES)
    bill = sum(usd(*billed) for billed in server.billed)
    assert float(re.search(r"\$([\d.]+) in all runs", line)[1]) == pytest.approx(bill, abs=1e-4)
    written = read_rows(work.output)
    assert [(row["id"], row["response"]) for row in written] == [
        (row["id"], row["response"]) for row in rows]
    for row in written:
        assert row["usd"] == pytest.approx(usd(**row["usage"]))
        assert row["spans"] and row["critique"] and row["annotator"] == "tiny"
    schema = server.requests[0]["response_format"]["json_schema"]["schema"]
    assert schema["required"][0] == "reasoning" and schema["additionalProperties"] is False


def test_a_question_is_asked_once(work, server):
    """A new request is sent only for a new row, or for another model, mode or text."""
    rows = random_rows(4)
    rows.append(rows[1] | {"id": "twin"})
    work.run(rows)
    assert len(server.requests) == 4
    first, twin = read_rows(work.output)[1], read_rows(work.output)[4]
    assert {**first, "id": "twin"} == twin and twin["spans"]
    added = [row | {"id": f"new-{k}", "prompt": f"New {k}?"} for k, row in enumerate(rows[:3])]
    for changed_rows, options, requests in [
            (rows, {}, 0), (rows[::-1], {}, 0), (rows + added, {}, 3),
            (rows, {"annotator_model": "other"}, 4), (rows, {"mode": "no_cot"}, 4),
            ([rows[0] | {"prompt": "Another?"}, *rows[1:]], {}, 1)]:
        before = len(server.requests)
        work.output.unlink()
        work.run(changed_rows, **options)
        assert len(server.requests) - before == requests and work.output.exists()


def test_a_dry_run_sends_no_request_and_bounds_the_cost(work, server, monkeypatch, capsys):
    work.run(random_rows(30), limit=5, **PRICES)
    monkeypatch.delenv("OPENAI_API_KEY")
    left = annotation_questions(work.config(), work.data)[5:]
    cost = sum(usd(question.size, question.max_tokens) for question in left)
    forecast, feedback = work.run(dry_run=True, **PRICES).split("\n", 1)
    assert forecast.startswith(f"30 responses, 25 requests to send, at most ${cost:.4f}")
    assert feedback.startswith("feedback: ")
    work.output.unlink()
    work.write([{"prompt": row["prompt"]} for row in random_rows(5)])
    assert work.run(dry_run=True).startswith("5 responses, 5 requests to send")
    assert "5 rows have no response; the forecast counts" in capsys.readouterr().out
    assert len(server.requests) == 5


def test_a_fault_of_a_mode_is_one_line_and_loses_no_reply(work, server, monkeypatch):
    """A FeedbackError refuses a reply; any other error is a fault of the mode."""
    def read(example, reply):
        if example["id"] == "row-5":
            raise error
        return Feedback(reply, [], []), Grounding()

    monkeypatch.setitem(sys.modules, "mode_of_the_test", SimpleNamespace(
        MODE=Mode("Judge.", {"textual_feedback": "…"}, read)))
    for error, message in ((KeyError("labels"), "the reply to row row-5: KeyError"),
                           (FeedbackError("no labels"), "1 responses .*row-5: no labels")):
        work.fails(message, random_rows(20), mode="mode_of_the_test:MODE")
    assert len(server.requests) == 21                # row-5, which was refused, is asked again
    work.run(mode="mode_of_the_test:MODE", skip_failed=True)
    assert len(read_rows(work.output)) == 19 and len(server.requests) == 22


@pytest.mark.parametrize("flags, message", [
    *[(flag, flag.split()[0]) for flag in (
        "--mood x", "--limit 0", "--concurrency 0", "--retries -1", "--timeout inf")],
    ("--task nope", "nope"), ("--data none", "--data is missing"),
    *[(f"--base_url {url}", "--base_url")
      for url in ("ftp://h/", "localhost:8000/v1", "http://h:port/v1", "http://")],
    *[(f"OPENAI_API_KEY={key}", "OPENAI_API_KEY") for key in ("", "sk-secr\u00e8t", "sk\n")],
    ("--max_usd 0", "--max_usd needs"),
    ("--output {}/x/../rows.jsonl", "is a directory or --data"),
    ("--output {}", "is a directory"), ("--mode cots", "one of: cot, no_cot, align"),
    ("--mode experiments.modes:LABELS", "--mode.*found a dict"),
    *[(f"--annotator_function={name}", "--annotator_function")
      for name in ("toy", "toy:absent", "no_such_module:f", "toy:SLOTS")]])
def test_invalid_flags_are_one_line_before_any_request(work, server, monkeypatch, flags,
                                                       message):
    work.write(random_rows(2))
    if flags.startswith("OPENAI"):
        monkeypatch.setenv(*flags.split("=", 1))
        flags = ""
    flags = flags.format(work.data.parent).split()
    assert re.search(message, error_message("annotate.py", *work.flags(), *flags))
    assert not server.requests and not work.journal.exists()


def test_killed_runs_lose_no_reply_and_stay_within_the_budget(tmp_path):
    """SIGKILL, twice, with 8 requests at once."""
    n, concurrency = 150, 8
    with over_http() as server:
        def answer(body, number):
            answer = honest(body, number)
            answer.wait = 0.02
            return answer

        honest, server.answer = server.answer, answer
        work = Work(tmp_path, server.url)
        work.write(random_rows(n))
        for kill in (1, 2):
            process = subprocess.Popen(
                [sys.executable, ROOT / "annotate.py", *work.flags(concurrency=concurrency)],
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            while len(server.requests) < 50 * kill and process.poll() is None:
                time.sleep(0.005)
            process.kill()
            process.wait()
            rows = work.journal.read_bytes().count(b"\n")
            assert rows <= len(server.requests) <= rows + concurrency * kill
        work.run(concurrency=concurrency)
        assert len(read_rows(work.output)) == n
        assert n <= len(server.requests) <= n + 2 * concurrency


# Case of servers.jsonl → requests for three rows, (prompt, reply) tokens booked for each; a
# prompt of None is the maximum; words of the message or the warning.
RIGHT = {
    "claude_temperature_and_top_p": (4, (300, 60), None),
    "no_system_role": (1, (0, 0), "System role not supported"),
    "xai_reasoning_usage": (3, (300, 1060), None),
    "openrouter_429_in_200": (5, (300, 60), None),
    "openrouter_401_in_200": (1, (0, 0), "check OPENAI_API_KEY"),
    "content_in_reasoning_content": (3, (300, 60), "reasoning_content"),
    "ollama_cached_prompt": (3, (None, 60), None),
    "finish_MAX_TOKENS": (3, (300, 60), "cut off"),
    "stream_only_400": (1, (0, 0), "only supports stream mode"),
    "error_that_reports_usage": (1, (300, 1200), "content filter"),
    "usage_without_completion_tokens": (3, (300, 5000), "no JSON object"),
    "three_times_max_tokens_in_two_runs": (3, (300, 3600), "no JSON object"),
    "prompt_was_cut": (3, (10, 80), "context is too small")}
BOTH = {"temperature", "top_p"}
FAILS = {"temperature and top_p together": lambda body, n: body.keys() >= BOTH,
         "a system turn": lambda body, n: body["messages"][0]["role"] == "system",
         "any (the first two only)": lambda body, n: n <= 2}


@pytest.mark.parametrize("name", RIGHT)
def test_the_bodies_of_real_servers(shared, work, server, recwarn, name):
    """`../shared/data/public_cases/servers.jsonl`; its field `right` says what is right."""
    cases = read_rows(shared / "data" / "public_cases" / "servers.jsonl")
    case, = [case for case in cases if case["case"] == name]
    fails = FAILS.get(case["request_that_fails"], lambda body, n: True)
    good = json.dumps({"textual_feedback": "Short.", "good_spans": [], "poor_spans": []})
    server.answer = lambda body, n: (Answer(case["body"], case["status"]) if fails(body, n)
                                     else completion(content=good, billed=(300, 60)))
    requests, (prompt, reply), words = RIGHT[name]
    message = ""
    try:
        work.run(random_rows(3), mode="no_cot")
    except InputError as error:
        message = str(error)
    assert len(server.requests) == requests
    if words:
        assert words in message + str([warning.message for warning in recwarn])
    else:
        assert not message and len(read_rows(work.output)) == 3
    used = [row["usage"] for row in read_jsonl(work.journal)][-min(3, requests):]
    questions = annotation_questions(work.config(mode="no_cot"), work.data)
    for question, counts in zip(questions, used):
        expected = question.size if prompt is None else prompt
        assert tuple(counts.values()) == (expected, reply)


# ── --annotator_function

@pytest.fixture()
def critic(work, monkeypatch):
    """A `Work` that calls `critic.module.judge`, which tests may replace."""
    monkeypatch.delenv("OPENAI_API_KEY")
    work.module = SimpleNamespace(judge=lambda row, response: GOOD)
    monkeypatch.setitem(sys.modules, "critic_of_the_test", work.module)
    config = work.config
    work.config = lambda **options: config(annotator_function="critic_of_the_test:judge",
                                           **options)
    return work


# Alg. 1 l.5; Alg. 1 l.7–8; Alg. 1 l.10
def test_a_critic_is_asked_with_row_and_response_in_parallel(critic, server):
    barrier = threading.Barrier(3, timeout=20)

    def judge(row, response):
        calls.append((row["more"], response))
        if 1 < len(calls) <= 7:
            barrier.wait()                         # three calls wait for each other
        return Feedback("It ends.", ["the end"], [])

    calls = []
    critic.module.judge = judge
    rows = [row | {"more": k} for k, row in enumerate(random_rows(7))]
    critic.run(rows, concurrency=3)
    assert sorted(calls) == [(k, row["response"]) for k, row in enumerate(rows)]
    assert not server.requests
    assert {(row["annotator"], row["critique"], row["usd"])
            for row in read_rows(critic.output)} == {("critic_of_the_test:judge", "It ends.",
                                                      None)}
    critic.run([rows[0], *[row | {"more": 9} for row in rows[1:]]], concurrency=3)
    assert len(calls) == 7 + 6, "any changed field of a row calls the function again"


def test_failures_of_a_critic_are_recorded_and_its_exceptions_end_the_run(critic):
    critic.module.judge = lambda row, response: "It is late." if row["id"] == "row-2" else GOOD
    critic.fails("1 responses.*row-2: no JSON object", random_rows(40), concurrency=16)
    critic.module.judge = lambda row, response: 1 // 0 if row["id"] == "row-9" else GOOD
    critic.fails("--annotator_function critic_of_the_test:judge, row row-9: ZeroDivisionError",
                 [row | {"more": 1} for row in random_rows(40)], concurrency=16)
    critic.module.judge = lambda row, response: sys.exit("enough")
    critic.fails("SystemExit: enough", [row | {"more": 2} for row in random_rows(3)])


def test_an_empty_response_is_named_and_left_out(critic, capsys):
    rows = random_rows(3)
    rows[1]["response"] = " "
    critic.run(rows)
    assert [row["id"] for row in read_rows(critic.output)] == ["row-0", "row-2"]
    assert "left out 1 empty responses (the first: row row-1)" in capsys.readouterr().err
    critic.fails("every response is empty; .* choose another --model$",
                 [row | {"response": ""} for row in rows])
    critic.fails("no row has a response", [{"prompt": row["prompt"]} for row in rows])


@pytest.mark.parametrize("value", [None, 7, {"critique": "c", "good_spans": 7}])
def test_a_wrong_return_is_one_line(critic, value):
    critic.module.judge = lambda row, response: value
    critic.fails("critic_of_the_test:judge, row row-0.* returned ", random_rows(1))


CRITIC = ("from annotate import Feedback\n"
          "def give(row, response):\n    return Feedback({!r}, [], [])")


def test_a_critic_that_was_edited_is_another_critic(tmp_path):
    """In processes of their own. A comment counts as an edit; an equal module does not."""
    write_rows(tmp_path / "rows.jsonl", [{"prompt": "Go on.", "response": "The end."}])
    critiques = []
    for source in (CRITIC.format("old"), CRITIC.format("new"), CRITIC.format("new") + "  # hm"):
        (tmp_path / "mine.py").write_text(source)
        for _ in range(2):
            process = subprocess.run(
                [sys.executable, "-B", ROOT / "annotate.py", "--task", "ultrafeedback",
                 "--data", "rows.jsonl", "--annotator_function", "mine:give"], cwd=tmp_path,
                check=True, capture_output=True, text=True)
            assert "reward_model.py --task ultrafeedback --data feedback" in process.stdout
        row, = read_rows(tmp_path / "feedback.jsonl")
        replies = read_jsonl(tmp_path / "feedback.jsonl.journal")
        critiques.append((row["critique"], len(replies)))
    assert critiques == [("old", 1), ("new", 2), ("new", 3)]


def test_the_hash_of_a_function_is_its_module_s_or_its_own_in_a_notebook(tmp_path,
                                                                         monkeypatch):
    """A module's hash stays while the process runs: it is of the source that was loaded."""
    def hash_of(function):
        module.judge = function
        return function_hash("module_of_the_test:judge")

    module = SimpleNamespace()
    monkeypatch.setitem(sys.modules, "module_of_the_test", module)
    first, second = lambda row, response: "one", (
        lambda row, response: "two")                 # getsource returns whole lines
    assert hash_of(first) != hash_of(second) and hash_of(first) == hash_of(first)
    module.__file__ = str(tmp_path / "module.py")
    (tmp_path / "module.py").write_text("x")
    third, fourth = lambda: "three", lambda: "four"
    loaded = hash_of(third)
    assert loaded == hash_of(fourth) != hash_of(first)
    (tmp_path / "module.py").write_text("edited")
    assert hash_of(third) == loaded != hash_of(lambda: "reloaded")


# ── What is said of the feedback

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
