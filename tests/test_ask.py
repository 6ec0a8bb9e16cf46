"""Requests to a server or a function: the bill, the journal, failures, Ctrl-C and SIGKILL."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import warnings
from types import SimpleNamespace

import pytest
from annotate import (Feedback, FeedbackError, Grounding, Mode, annotate,
                      annotation_questions, function_hash)
from ask import Journal, Question, Server, ask, hide_key, question_key
from data import InputError, read_rows, write_rows
from helpers import ROOT, SLOW, error_message, read_jsonl
from loopback import Answer, completion, critique, httpx, loopback
from settings import AnnotateConfig

MAX_TOKENS = 100


def usd(prompt_tokens, completion_tokens) -> float:
    return (prompt_tokens * 2.5 + completion_tokens * 10) / 1e6       # USD per million tokens


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch):
    monkeypatch.setattr("ask.PAUSE", 0.0)


@pytest.fixture()
def server():
    with loopback() as fake:
        fake.answer = lambda body, number: completion()
        yield fake


def questions(n: int, schema=None) -> list[Question]:
    """Some prompts are longer than others."""
    messages = [[{"role": "user", "content": f"Answer number {i}. " + "w " * (60 + i % 7)}]
                for i in range(n)]
    return [Question(question_key(m), f"row-{i}", m, {"id": i}, MAX_TOKENS, schema)
            for i, m in enumerate(messages)]


def size(body: dict) -> int:
    """The largest number of tokens in the prompt, as ask.py counts it."""
    return len(json.dumps([body["messages"], None]))


def run(path, n=3, cap=None, concurrency=1, read=lambda context, text: text, retries=2,
        prices=(2.5, 10.0), asked=None):
    """Ask n questions; return ({row: Reply}, message of the InputError or None, spent USD)."""
    message = None
    asked = asked or questions(n)
    with Journal(path, *prices, cap) as journal:
        try:
            ask(asked, journal, Server("m", "http://h/v1"), read, concurrency, retries)
        except InputError as error:
            message = str(error)
            assert "\n" not in message
        replies = {question.id: journal.replies[question.key] for question in asked
                   if question.key in journal.replies}
        return replies, message, journal.spent


# ── The bill

def usage(prompt, completion_tokens, total=None) -> dict:
    counts = {"prompt_tokens": prompt, "completion_tokens": completion_tokens}
    return counts if total is None else counts | {"total_tokens": total}


def good(body, number, report=usage) -> Answer:
    """A reply that costs nearly the maximum."""
    billed = size(body) - 20, MAX_TOKENS - 3
    return completion(report(*billed), billed=billed)


def lost(every=1, status=500, body="{}", error=None):
    """A server that bills every n-th request at the maximum and does not answer it."""
    def answer(request, number):
        if number % every:
            return good(request, number)
        return Answer(body, status, (size(request), MAX_TOKENS), error)
    return answer


def reports(report):
    return lambda body, number: good(body, number, report)


def exceeds(times, every=1):
    """Bills and reports a multiple of max_tokens."""
    return lambda body, number: completion(
        billed=(size(body) - 20, MAX_TOKENS * times if number % every == 0 else 60))


TIMEOUT = httpx.ReadTimeout("timed out")
ERROR_WITH_USAGE = {"error": {"message": "content filter"}, "usage": usage(300, 1200, 1500)}
# Servers whose bill is at most what was asked for.
WITHIN = {
    "honest": good, "total only": reports(lambda p, c: {"total_tokens": p + c}),
    "reasoning outside": reports(lambda p, c: usage(p, 3, p + c)),
    "negative": reports(lambda p, c: usage(-p, -c)),
    "huge": reports(lambda p, c: usage(10**12, 10**12)),
    "no report": reports(lambda p, c: None),
    "500": lost(), "every third 503": lost(3, 503), "hang": lost(error=TIMEOUT),
    "every second reset": lost(2, error=httpx.ReadError("reset")),
    "cut JSON": lost(2, 200, '{"choices": [{"mess'),
    "429": lambda body, number: Answer("{}", 429) if number % 3 == 0 else good(body, number),
}
# Servers that bill more, and say so.
EXCEEDING = {
    "3 times": exceeds(3), "9 times, later": exceeds(9, 5),
    "400 with usage": lambda body, number: good(body, number) if number == 1 else Answer(
        ERROR_WITH_USAGE, 400, (300, 1200)),
}
CAPS = (None, 0.4, 9.0)                                      # of the largest cost of all rows
SETTINGS = [(cap, concurrency) for cap in CAPS for concurrency in (1, 8, 64)]


@pytest.mark.parametrize("kind", WITHIN | EXCEEDING)
def test_the_cap_holds_and_the_bill_is_booked(server, tmp_path, kind):
    """Two runs each. Also: the first request is alone, and no usable reply is bought twice."""
    number = [*WITHIN, *EXCEEDING].index(kind)
    for cap, concurrency in SETTINGS if SLOW else {SETTINGS[number % 3 + 3],
                                                   SETTINGS[number * 4 % 9]}:
        path = tmp_path / f"{cap}-{concurrency}"
        server.requests, server.billed = [], []
        dollars = cap and cap * sum(usd(q.size, MAX_TOKENS) for q in questions(24))

        def answer(body, number):
            open_at.append(server.open)
            answer = (WITHIN | EXCEEDING)[kind](body, number)
            answer.wait = 0.002
            return answer

        open_at = []                               # number of open requests at each request
        server.answer = answer
        for _ in range(2):
            _, message, booked = run(path, 24, dollars, concurrency, retries=1)
        assert open_at[:2] in ([1], [1, 1]) and max(open_at) <= concurrency
        bills = [usd(*billed) for billed in server.billed]
        assert sum(bills) <= booked * (1 + 1e-9)
        if dollars:
            surprise = concurrency * max(bills) if kind in EXCEEDING else 0.0
            assert sum(bills) <= dollars * (1 + 1e-9) + surprise
        usable = [row["key"] for row in read_jsonl(path) if not row["reason"]]
        assert len(set(usable)) == len(usable)
        if cap == 0.4 and len(usable) > 3:
            assert "--max_usd" in message and sum(bills) > 0.3 * dollars


def test_a_later_run_expects_what_an_earlier_one_was_billed(server, tmp_path):
    server.answer = exceeds(3)
    run(tmp_path / "j", 1)
    cap = 3.5 * usd(questions(1)[0].size, 3 * MAX_TOKENS)
    replies, message, booked = run(tmp_path / "j", 30, cap, 64)
    assert "reached" in message and sum(usd(*billed) for billed in server.billed) <= cap
    assert len(replies) == 3 == len(server.requests)
    assert "reached" in run(tmp_path / "j", 30, booked / 2)[1]
    assert "--max_usd 0 reached" in run(tmp_path / "new", 30, 0.0)[1]
    assert len(server.requests) == 3


SIZE = questions(1)[0].size


@pytest.mark.parametrize("report, booked", [
    (usage(300, 60, 1360), (300, 1060)), (usage(300.0, 60.0, 12), (300, 60)),
    (usage(0, 60, 60), (SIZE, 60)), ({"total_tokens": 300}, (SIZE, 300)),
    ({"prompt_tokens": 300, "total_tokens": 5300}, (300, 5000)),
    *[(report, (SIZE, MAX_TOKENS)) for report in (
        usage(0, 0, 0), usage("300", "many"), usage(1e10, 60), usage([], {}), None, "many")]])
def test_what_is_reported_is_booked(server, tmp_path, report, booked):
    server.answer = lambda body, number: completion(report)
    replies, _, spent = run(tmp_path / "j", 1)
    assert tuple(replies["row-0"].usage.values()) == booked
    assert spent == pytest.approx(usd(*booked))


@pytest.mark.parametrize("answer, booked, tries", [
    (Answer(ERROR_WITH_USAGE, 400), (300, 1200), 1), (Answer("{}", 400), (0, 0), 1),
    (Answer({"error": {"code": 401}}), (0, 0), 1), (Answer("{}", 429), (0, 0), 3),
    (Answer({"error": {"code": 502}}), (SIZE, MAX_TOKENS), 3),
    (Answer({"usage": usage(300, 7)}, 500), (300, 7), 3),
    (Answer(error=httpx.ConnectError("refused")), (0, 0), 3),
    (Answer(error=TIMEOUT), (SIZE, MAX_TOKENS), 3), (Answer(" <!doctype html>"), (0, 0), 1),
    (Answer('{"choices": [{"mes'), (SIZE, 100), 1), (Answer("null"), (SIZE, 100), 1),
    (Answer({"choices": [{"message": {"content": 7}}]}), (SIZE, 100), 1)])
def test_each_failed_attempt_is_booked_if_it_may_be_billed(server, tmp_path, answer, booked,
                                                           tries):
    """429, 5xx and lost connections are retried. The first question ends the run."""
    server.answer = lambda body, number: answer
    replies, message, spent = run(tmp_path / "j", 60, concurrency=8)
    assert "1 unusable" in message and "check OPENAI_API_KEY, and the URL http://h/" in message
    assert len(server.requests) == tries == len(read_jsonl(tmp_path / "j"))
    assert spent == pytest.approx(tries * usd(*booked))
    words = answer.body if isinstance(answer.body, str) else json.dumps(answer.body)
    assert words.strip()[:20] in replies["row-0"].reason


# ── Replies that are unusable, and what a server refuses

@pytest.mark.parametrize("message, finish, words", [
    ({"refusal": "I cannot judge this."}, "stop", "I cannot judge this."),
    ({"content": " "}, "content_filter", "empty"), ({"content": "It is"}, "error", "failed"),
    *[({"content": "It is"}, finish, "cut off after 100 tokens")
      for finish in ("length", "MAX_TOKENS")]])
def test_the_reason_says_what_is_there_instead(server, tmp_path, message, finish, words):
    """The next question is asked. A text that was cut off is not read, but asked again."""
    answer = completion(finish=finish, **{"content": None} | message)
    text = '{"finish_reason": "length"}'             # a text that only speaks of it is whole
    server.answer = lambda body, number: answer if number <= 2 else completion(content=text)
    replies, error, _ = run(tmp_path / "j", 2)
    assert error is None and len(server.requests) == 2
    assert words in replies["row-0"].reason and words in replies["row-1"].reason
    assert run(tmp_path / "j", 2)[0]["row-0"].value == text and len(server.requests) == 4


def test_25_unusable_replies_in_a_row_end_a_run_but_do_not_block_later_rows(server, tmp_path):
    """An earlier failure is asked last and does not count, unless nothing is answered."""
    def answer(body, number):
        row = int(re.search(r"number (\d+)", str(body))[1])
        return completion(content="" if row < 40 else "fine") if row else Answer("{}", 400)

    server.answer = answer
    for message, count in (("1 unusable replies", 1), ("25 unusable.*; read them in", 26)):
        assert re.search(message, run(tmp_path / "j", 60)[1]) and len(server.requests) == count
    replies, message, _ = run(tmp_path / "j", 60, concurrency=4)
    assert message is None and len(server.requests) == 26 + 60
    assert sum(reply.reason is None for reply in replies.values()) == 20
    server.answer = lambda body, number: Answer("{}", 401)
    assert "1 unusable replies" in run(tmp_path / "j", 60)[1] and len(server.requests) == 87
    server.answer = lambda body, n: completion(content="" if n % 25 and n > 88 else "fine")
    assert run(tmp_path / "new", 74)[1] is None      # a good reply starts the count again


SCHEMA = {"type": "object"}
NAMES = {"response_format", "top_p", "temperature", "max_tokens"}


@pytest.mark.parametrize("text, is_refused, left_out", [
    ("temperature and top_p cannot both be given", {"temperature", "top_p"}.issubset,
     {"top_p"}),
    ("'temperature' does not support 0.3", {"temperature"}.intersection,
     {"temperature", "top_p"}),
    ("'max_tokens' is not supported. Use 'max_completion_tokens' instead.",
     {"max_tokens"}.intersection, {"max_tokens"}),
    ("Invalid parameter: 'response_format' is not supported", {"response_format"}.intersection,
     {"response_format"}),
    ("max_tokens is too large: 100", {"max_tokens"}.intersection, None)])
def test_what_a_server_refuses_is_left_out(server, tmp_path, text, is_refused, left_out):
    """All rows have a reply, and no more is left out. Other refusals end the run at once."""
    server.answer = lambda body, number: (Answer({"detail": text}, 422)
                                          if is_refused(body.keys()) else completion())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _, message, spent = run(tmp_path / "j", asked=questions(3, SCHEMA), concurrency=8)
    if left_out is None:
        assert text in message and len(server.requests) == 1 and spent == 0 and not caught
        return
    assert message is None and spent == pytest.approx(3 * usd(40, 60))
    for body in server.requests[-2:]:
        assert NAMES - body.keys() == left_out
        assert body.get("max_completion_tokens", body.get("max_tokens")) == MAX_TOKENS
    assert len(caught) == len(server.requests) - 3 and text in str(caught[0].message)


def test_the_form_is_asked_for_as_a_schema_then_as_an_object(server, tmp_path):
    """Also: a prompt that was cut off is warned of."""
    server.answer = lambda body, number: (
        Answer("response_format of type json_schema is not supported", 400)
        if body["response_format"]["type"] == "json_schema" else completion(billed=(2, 60)))
    with pytest.warns(UserWarning, match="leaving out the json|is too small") as seen:
        run(tmp_path / "j", asked=questions(2, SCHEMA))
    assert {str(warning.message)[:10] for warning in seen} == {"m: leaving", "the server"}
    formats = [body["response_format"] for body in server.requests]
    assert [f["type"] for f in formats] == ["json_schema", "json_object", "json_object"]
    assert formats[0]["json_schema"] == {"name": "reply", "strict": True, "schema": SCHEMA}


# ── The journal

def test_a_reply_is_written_before_it_is_read_and_read_before_it_is_bought_again(server,
                                                                                 tmp_path):
    """A reader that refuses replies, and one with a fault, lose no reply."""
    def refuse(context, text):
        raise ValueError(f"no labels\n in {context['id']}" if context["id"] else "")

    def fail(context, text):
        if context["id"] == 5:
            raise InputError("--mode x: a fault")

    server.answer = lambda body, number: completion(content=f"reply {number}")
    assert run(tmp_path / "j", 20, read=fail)[1] == "--mode x: a fault"
    assert 6 == len(server.requests) == len(read_jsonl(tmp_path / "j"))
    assert run(tmp_path / "j", 20, concurrency=4)[1] is None and len(server.requests) == 20
    replies, _, _ = run(tmp_path / "j", 20, read=refuse)     # it refuses, so they are bought
    assert len(server.requests) == 40 and replies["row-3"].reason == "no labels in 3"
    assert all(reply.reason and reply.value is None for reply in replies.values())
    replies, _, _ = run(tmp_path / "j", 20, read=lambda context, text: len(text))
    assert len(server.requests) == 40 and replies["row-3"].value == len("reply 24")


@pytest.mark.parametrize("line, pattern, text", [
    (2, b"^.*$", b"7"), (2, b"^.*$", b"\xff"), (4, b"^(.{40}).*$", rb"\1")])
def test_a_line_that_is_malformed_or_cut_off_costs_only_its_row(server, tmp_path, line, pattern,
                                                                text):
    path = tmp_path / "j"
    run(path, 4)
    lines = path.read_bytes().splitlines()
    lines[line - 1] = re.sub(pattern, text, lines[line - 1])
    path.write_bytes(b"\n".join(lines) + b"\n" * (line < 4))
    for _ in range(2):
        assert len(run(path, 4)[0]) == 4 and len(server.requests) == 5


def test_a_journal_of_the_fourth_version_is_read(server, tmp_path):
    """Its replies are reused and its costs count, with today's prices. It has one writer."""
    first, second, third = questions(3)
    rows = [
        {"key": first.key, "due": usage(900, 100), "usd": 0.1, "time": 1.0, "sha256": "a"},
        {"key": first.key, "id": first.id, "reply": "one", "reason": None,
         "usage": usage(300, 60), "usd": 0.01, "time": 2.0, "sha256": "b"},
        {"key": second.key, "reason": "refused", "is_read": True, "time": 4.0, "sha256": "d"}]
    write_rows(tmp_path / "j", rows)
    with Journal(tmp_path / "j"), pytest.raises(InputError, match="another process"):
        Journal(tmp_path / "j").__enter__()
    replies, _, spent = run(tmp_path / "j")
    assert [reply.value for reply in replies.values()] == ["one", "fine", "fine"]
    assert len(server.requests) == 2
    assert spent == pytest.approx(usd(300, 60) + 2 * usd(40, 60))
    assert run(tmp_path / "j", prices=(5.0, 20.0))[2] == pytest.approx(2 * spent)


SECRET = "sk-Ab3-" + "x1" * 20


@pytest.mark.parametrize("answer", [
    Answer(f"top_p {SECRET}", 400), completion(content=f"It is {SECRET}."), Answer(SECRET)])
def test_the_key_reaches_neither_the_journal_nor_a_message(server, tmp_path, monkeypatch,
                                                           capsys, answer):
    monkeypatch.setenv("OPENAI_API_KEY", SECRET)
    server.answer = lambda body, number: answer
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        replies, message, _ = run(tmp_path / "j")
    texts = [(tmp_path / "j").read_text(), str(replies), str(message), *capsys.readouterr()]
    assert SECRET not in str(texts + [warning.message for warning in caught])
    monkeypatch.setenv("OPENAI_API_KEY", "something")            # a usual word is no secret
    assert hide_key("There is something.") == "There is something."


# ── Retries, Ctrl-C and SIGKILL

def press_ctrl_c():
    os.kill(os.getpid(), signal.SIGINT)


def interrupted(path):
    signal.signal(signal.SIGINT, signal.default_int_handler)     # a shell may ignore SIGINT
    with pytest.raises(KeyboardInterrupt):
        run(path, 60, concurrency=8)


@pytest.mark.parametrize("press_at", range(6 if SLOW else 2))
def test_ctrl_c_waits_and_loses_no_reply(server, tmp_path, capsys, press_at):
    """A press while a line is written may write it twice."""
    server.answer = lambda body, number: Answer(completion().body, wait=0.05)
    threading.Timer(0.25 + 0.017 * press_at, press_ctrl_c).start()
    interrupted(tmp_path / "j")
    requests = len(server.requests)
    assert 1 < requests == len({row["key"] for row in read_jsonl(tmp_path / "j")}) < 60
    assert "waiting for open requests" in capsys.readouterr().err
    assert run(tmp_path / "j", 60, concurrency=8)[1] is None
    assert len(server.requests) == 60


def test_retries_pause_longer_each_time_and_ctrl_c_does_not_wait_for_them(server, tmp_path,
                                                                          monkeypatch):
    monkeypatch.setattr("ask.PAUSE", 0.05)
    server.answer = lambda body, n: Answer("{}", 429) if n <= 3 else completion()
    start = time.monotonic()
    assert run(tmp_path / "j", 2, retries=3)[1] is None
    assert time.monotonic() - start >= 0.05 * (1 + 4 + 9) and len(server.requests) == 5
    monkeypatch.setattr("ask.PAUSE", 3600)
    server.answer = lambda body, n: Answer("{}", 429) if n > 6 else completion()
    threading.Timer(0.5, press_ctrl_c).start()
    interrupted(tmp_path / "new")
    assert len(server.requests) == 6 + 8


CRITIC = """
import os, time

def judge(row, response):
    os.write(1, b"asked\\n")                  # one write: threads do not mix their lines
    time.sleep(0 if int(row["id"]) < {quick} else 60)
    return {{"critique": "c", "good_spans": [], "poor_spans": []}}
"""


def start_annotating(folder, quick):
    """annotate.py in a process, with a critic that sleeps from row `quick` on."""
    (folder / "critic.py").write_text(CRITIC.format(quick=quick))
    write_rows(folder / "rows.jsonl", [{"id": str(i), "prompt": "p", "response": f"It is {i}."}
                                       for i in range(60)])
    program = (f"import signal, sys\nsys.path[:0] = ['.', {str(ROOT)!r}]\n"
               f"signal.signal(signal.SIGINT, signal.default_int_handler)\n"
               f"sys.argv[1:] = ['--task=ultrafeedback', '--annotator_function=critic:judge']\n"
               f"import annotate\nannotate.main()")
    process = subprocess.Popen([sys.executable, "-c", program], cwd=folder, text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    for _ in range(quick + 8):
        while process.stdout.readline() != "asked\n":
            assert process.poll() is None, process.stderr.read()
    return process


def test_a_second_ctrl_c_does_not_wait_and_a_killed_run_loses_no_reply(tmp_path):
    """In a process, which ends although threads sleep for a minute. An edited critic is asked
    anew."""
    process = start_annotating(tmp_path, 20)
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=20) and "KeyboardInterrupt" in process.stderr.read()
    journal = tmp_path / "feedback.jsonl.journal"
    assert sorted(int(row["id"]) for row in read_jsonl(journal)) == [*range(20)]
    process = start_annotating(tmp_path, 40)
    process.kill()
    process.wait()
    assert len(read_jsonl(journal)) == 20 + 40


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
FAILS = {"temperature and top_p together": lambda body, n: BOTH.issubset(body),
         "a system turn": lambda body, n: body["messages"][0]["role"] == "system",
         "any (the first two only)": lambda body, n: n <= 2}


@pytest.mark.parametrize("name", RIGHT)
def test_the_bodies_of_real_servers(shared, server, tmp_path, recwarn, name):
    """`../shared/data/public_cases/servers.jsonl`; its field `right` says what is right."""
    cases = read_rows(shared / "data" / "public_cases" / "servers.jsonl")
    case, = [case for case in cases if case["case"] == name]
    fails = FAILS.get(case["request_that_fails"], lambda body, n: True)
    reply = '{"textual_feedback": "Short.", "good_spans": [], "poor_spans": []}'
    server.answer = lambda body, n: (Answer(case["body"], case["status"]) if fails(body, n)
                                     else completion(content=reply, billed=(300, 60)))
    write_rows(tmp_path / "rows.jsonl", [{"prompt": "p", "response": text} for text in "abc"])
    config = AnnotateConfig(task="ultrafeedback", data=tmp_path / "rows.jsonl", mode="no_cot",
                            base_url="http://h/v1")
    requests, (prompt, completed), words = RIGHT[name]
    message = ""
    try:
        annotate(config, config.data, tmp_path / "f.jsonl")
    except InputError as error:
        message = str(error)
    assert len(server.requests) == requests and (words or not message)
    assert (words or "") in message + str([warning.message for warning in recwarn])
    lines = read_jsonl(tmp_path / "f.jsonl.journal")[-min(3, requests):]
    for question, line in zip(annotation_questions(config, config.data), lines):
        expected = question.size if prompt is None else prompt
        assert tuple(line["usage"].values()) == (expected, completed)


# ── Phase 1

WORDS = "the plot is thin but every hero has a name and Bob says “never” in the end 🎉".split()


def rows_of(n: int) -> list[dict]:
    return [{"id": f"row-{i}", "prompt": f"Question {i}?",
             "response": f"{i}: " + " ".join(WORDS[i % 5 :])} for i in range(n)]


@pytest.fixture()
def work(tmp_path, monkeypatch):
    """A function (rows, **settings) that annotates rows and returns the summary.

    `work.rows()` reads the written rows. `work.module.judge` is a function to annotate with.
    """
    def run_phase(rows=None, dry_run=False, **settings):
        if rows:
            write_rows(tmp_path / "rows.jsonl", rows)
        return annotate(config(**settings), tmp_path / "rows.jsonl", output, dry_run)

    def config(**settings):
        return AnnotateConfig(**{"task": "ultrafeedback", "base_url": "http://h/v1",
                                 "price_in": 2.5, "price_out": 10.0, **settings})

    output = tmp_path / "new" / "f.jsonl"
    run_phase.rows = lambda: read_rows(output)
    run_phase.journal = output.with_name("f.jsonl.journal")
    run_phase.module = SimpleNamespace()
    monkeypatch.setitem(sys.modules, "module_of_the_test", run_phase.module)
    return run_phase


JUDGE = {"annotator_function": "module_of_the_test:judge"}


def test_rows_stay_in_order_and_a_question_is_asked_once(work, server):
    """The first reply comes last. A new row, model or mode asks anew."""
    def answer(body, number):
        is_late = number < 10 and "Question 2?" in str(body)
        answer = completion(content="It is late." if is_late else critique(body))
        answer.wait = 0.1 if number == 2 else 0.0
        return answer

    server.answer = answer
    rows = rows_of(9)
    rows.append(rows[1] | {"id": "twin"})
    with pytest.raises(InputError, match="1 responses have no feedback.*: no JSON object"):
        work(rows)
    for changed, settings, requests in [({}, {}, 1), ({}, {"annotator_model": "other"}, 9),
                                        ({}, {"mode": "no_cot"}, 9), ({"prompt": "?"}, {}, 1)]:
        before = len(server.requests)
        summary = work([rows[0] | changed, *rows[1:]], **settings)
        assert len(server.requests) - before == requests
    bill = sum(usd(*billed) for billed in server.billed)
    assert summary.endswith(f"10 responses with feedback, 0 skipped; ${bill:.4f} in all runs")
    written = work.rows()
    assert [row["id"] for row in written] == [row["id"] for row in rows]
    assert written[9] == written[1] | {"id": "twin"} and written[1]["annotator"] == "gpt-4o"
    assert all(row["usd"] == usd(40, 60) == usd(**row["usage"]) for row in written)
    schema = server.requests[0]["response_format"]["json_schema"]["schema"]
    assert schema["required"][0] == "reasoning" and schema["additionalProperties"] is False


def test_a_dry_run_sends_no_request_and_bounds_the_cost(work, server, monkeypatch):
    server.answer = lambda body, number: completion(content=critique(body))
    work(rows_of(5))
    monkeypatch.delenv("OPENAI_API_KEY")
    forecast = work(rows_of(30), dry_run=True)
    assert re.match(r"25 requests to send, at most \$0\.[1-9]", forecast)
    assert len(server.requests) == 5


def test_a_mode_or_function_with_a_fault_ends_the_run_at_once(work, server):
    """A FeedbackError refuses a reply. Any other error is a fault, and loses no reply."""
    def read(example, reply):
        if example["id"] == "row-5":
            raise error
        return Feedback(reply, [], []), Grounding([])

    work.module.MODE = Mode("Judge.", {"textual_feedback": "…"}, read)
    error = KeyError("labels")
    with pytest.raises(KeyError, match="labels"):
        work(rows_of(20), mode="module_of_the_test:MODE")
    error = FeedbackError("no labels")
    with pytest.raises(InputError, match="1 responses .*row-5: no labels"):
        work(mode="module_of_the_test:MODE")
    assert len(server.requests) == 21                # row-5, which was refused, is asked again
    assert ", 1 skipped" in work(mode="module_of_the_test:MODE", skip_failed=True)
    work.module.judge = lambda row, response: row["absent"]
    with pytest.raises(KeyError, match="absent"):
        work(**JUDGE)
    for value in (None, 7, [Feedback("c", [], [])]):
        work.module.judge = lambda row, response: value
        with pytest.raises(InputError, match="module_of_the_test:judge, row row-0: returned "):
            work(**JUDGE, concurrency=1)


@pytest.mark.parametrize("flags, message", [
    *[(flag, flag.split()[0]) for flag in (
        "--mood x", "--concurrency 0", "--retries -1", "--timeout inf", "--base_url ftp://h/",
        "--base_url http://h:port/v1", "--annotator_function toy:absent",
        "--annotator_function toy:SLOTS")],
    ("--task nope", "nope"), ("--data none", "none: not rows"),
    ("--max_usd 0", "--max_usd needs"),
    *[(f"OPENAI_API_KEY={key}", "OPENAI_API_KEY") for key in ("", "sk-secr\u00e8t", "sk\n")],
    ("--output {}/x/../rows.jsonl", "is a directory or --data"),
    ("--output {}", "is a directory"), ("--mode cots", "one of: cot, no_cot, align"),
    ("--mode experiments.modes:LABELS", "--mode.*found a dict")])
def test_invalid_flags_are_one_line_before_any_request(server, monkeypatch, tmp_path, flags,
                                                       message):
    write_rows(tmp_path / "rows.jsonl", rows_of(2))
    if flags.startswith("OPENAI"):
        monkeypatch.setenv(*flags.split("=", 1))
        flags = ""
    words = (f"--task ultrafeedback --data {tmp_path}/rows.jsonl --output {tmp_path}/f.jsonl "
             + flags.format(tmp_path))
    assert re.search(message, error_message("annotate.py", *words.split()))
    assert not server.requests


@pytest.mark.parametrize("fault", [RuntimeError("no key"), SystemExit("no key")])
def test_a_function_that_fails_or_exits_ends_the_run_and_keeps_the_replies(work, fault):
    """SystemExit would end one thread alone, and the run would wait for its reply."""
    def judge(row, response):
        calls.append(row["id"])
        if row["id"] == "row-3":
            raise fault
        time.sleep(0.1)                                  # the others return after the fault
        return Feedback("c", [], [])

    calls = []
    work.module.judge = judge
    with pytest.raises((RuntimeError, InputError), match="no key"):
        work(rows_of(30), concurrency=8, **JUDGE)
    kept = {row["id"] for row in read_jsonl(work.journal)}
    assert kept == {*calls} - {"row-3"} and 1 < len(calls) < 30


# Alg. 1 l.5; Alg. 1 l.7–8; Alg. 1 l.10
def test_a_critic_is_asked_with_row_and_response_in_parallel(work, capsys):
    barrier = threading.Barrier(3, timeout=20)

    def judge(row, response):
        calls.append((row["more"], response))
        if 1 < len(calls) <= 7:
            barrier.wait()                         # three calls wait for each other
        return Feedback("It ends.", ["the end"], [])

    calls = []
    work.module.judge = judge
    rows = [row | {"more": k} for k, row in enumerate(rows_of(7))]
    work([*rows, {"id": "empty", "prompt": "?", "response": " "}], concurrency=3, **JUDGE)
    assert sorted(calls) == [(k, row["response"]) for k, row in enumerate(rows)]
    assert {(row["annotator"], row["critique"], row["usd"]) for row in work.rows()} == {
        ("module_of_the_test:judge", "It ends.", None)}
    assert "8 responses, 7 of them not empty" in capsys.readouterr().out
    work([rows[0], *[row | {"more": 9} for row in rows[1:]]], concurrency=3, **JUDGE)
    assert len(calls) == 7 + 6, "any changed field of a row calls the function again"
    for response in ({"response": ""}, {}):
        with pytest.raises(InputError, match="no response to annotate; .* another --model"):
            work([{"prompt": "?"} | response], **JUDGE)


def test_the_hash_of_a_function_is_its_module_s_or_its_own_in_a_notebook(work, tmp_path):
    def hash_of(function):
        work.module.judge = function
        return function_hash("module_of_the_test:judge")

    first = lambda row, response: "one"
    second = lambda row, response: "two"
    assert hash_of(first) != hash_of(second) and hash_of(first) == hash_of(first)
    work.module.__file__ = str(tmp_path / "module.py")
    (tmp_path / "module.py").write_text("x")
    of_file = hash_of(first)
    assert of_file == hash_of(second)
    (tmp_path / "module.py").write_text("x  # edited")
    assert hash_of(second) != of_file


def test_phase_1_ends_with_three_responses_in_colour_and_the_lost_quotes(work, capsys):
    """A quote that begins inside a word is called that. An example is the quote itself."""
    work.module.judge = lambda row, response: Feedback(
        "It is so.", ["cat", "and the"], ["the", "ca", "a bird", "og sat", "here"])
    work([{"id": str(i), "prompt": "p", "response": f"the cat {i} and the dog sat here"}
          for i in range(4)], **JUDGE)
    text = capsys.readouterr().out
    assert text.count("response: the [+cat+]") == 3 == text.count("critique: It is so.")
    assert "the [+cat+] 1 [+and the+] dog sat [-here-]\n" in text
    assert text.split("feedback: ")[1].splitlines()[1:] == [
        "12 quotes found, for example 'cat'", "4 quotes ambiguous, for example 'the'",
        "8 quotes inside a word, for example 'ca'", "4 quotes unmatched, for example 'a bird'"]
    assert "feedback: 0 of 4 responses have no span" in text
