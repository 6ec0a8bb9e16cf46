"""Requests to a server or a function: the bill, the journal, failures, Ctrl-C and SIGKILL."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
from annotate import Feedback, Mode, annotate, annotation_questions, load_annotator
from ask import Function, Journal, Question, Server, ask, hide_key, question_key, run_journal
from data import (SCRIPTS, InputError, get_task, imported_files, iterate_log, load_object,
                  read_log, read_rows, write_rows)
from helpers import ROOT, error_message, needs_posix, read_jsonl
from loopback import Answer, completion, critique, httpx, loopback
from measures import judge
from measures.judge import JudgeConfig, ask_judge, pairwise_questions
from settings import AnnotateConfig
from test_house import TOP

MAX_TOKENS = 100
TIMEOUT = httpx.ReadTimeout("timed out")


def usd(prompt_tokens, completion_tokens) -> float:
    return (prompt_tokens * 2.5 + completion_tokens * 10) / 1e6       # USD per million tokens


@pytest.fixture(autouse=True)
def _few_retries(monkeypatch):
    monkeypatch.setattr("ask.PAUSE", 0.0)
    monkeypatch.setattr("ask.RETRIES", 2)


@pytest.fixture()
def server():
    """Tests replace `answer(body, number of the request)`."""
    with loopback(lambda body: fake.answer(body, len(fake.requests))) as fake:
        fake.answer = lambda body, number: completion()
        yield fake


def questions(n: int, schema=None) -> list[Question]:
    """Some prompts are longer than others."""
    messages = [[{"role": "user", "content": f"Answer number {i}. " + "w " * (60 + i % 7)}]
                for i in range(n)]
    return [Question(question_key(m), f"row-{i}", m, {"id": i}, MAX_TOKENS, schema)
            for i, m in enumerate(messages)]


SIZE = questions(1)[0].size
MAXIMUM = SIZE, MAX_TOKENS


def run(path, n=3, cap=None, concurrency=1, read=lambda context, text: text,
        prices=(2.5, 10.0), schema=None, **settings):
    """Ask n questions; return ({row: Reply}, message of the InputError or None, spent USD)."""
    message = None
    asked = questions(n, schema)
    model = Server("m", **{"base_url": "http://h/v1", **settings})
    with Journal(path, *prices, cap) as journal:
        try:
            ask(asked, journal, model, read, concurrency)
        except InputError as error:
            message = str(error)
            assert "\n" not in message
        replies = {question.id: journal.replies[question.key] for question in asked
                   if question.key in journal.replies}
        return replies, message, journal.spent


# ── The bill

def usage(prompt, reply, total=0) -> dict:
    return {"prompt_tokens": prompt, "completion_tokens": reply, "total_tokens": total}


def honest(body, number):
    """A server that bills and reports nearly the maximum of each request."""
    return completion(billed=(len(json.dumps([body["messages"], None])) - 20, MAX_TOKENS - 3))


def lost(body, number):
    """A server that bills every second request at the maximum and does not answer it."""
    if number % 2:
        return honest(body, number)
    return Answer(TIMEOUT, billed=(len(json.dumps([body["messages"], None])), MAX_TOKENS))


def exceeds(every):
    """A server that bills three times max_tokens for every n-th request, and says so."""
    return lambda body, number: completion(
        billed=(SIZE - 20, MAX_TOKENS * (3 if number % every == 0 else 0.5)))


ERROR_WITH_USAGE = {"error": {"message": "content filter"}, "usage": usage(300, 1200, 1500)}


def refuses(body, number):
    """A server that bills the refusal of a parameter, and says so."""
    if "temperature" in body:
        return Answer(ERROR_WITH_USAGE | {"error": "temperature"}, 400, (300, 1200))
    return honest(body, number)


def fails_late(body, number):
    """A server that bills every second reply, which then has an error in place of an end."""
    choice = {"message": {"content": "half"}, "error": {"code": 502}}
    return honest(body, number) if number % 2 else Answer({"choices": [choice]}, 200, MAXIMUM)


EXCEEDING = [exceeds(1), exceeds(5), refuses, lambda body, number: honest(body, number)
             if number == 1 else Answer(ERROR_WITH_USAGE, 400, (300, 1200))]


@pytest.mark.parametrize("cap, concurrency", [(0.4, 1), (0.4, 8), (9.0, 64)])   # of the maximum
@pytest.mark.parametrize("answer", [honest, lost, fails_late, *EXCEEDING])
def test_the_cap_holds_and_the_bill_is_booked(server, tmp_path, answer, cap, concurrency):
    """Two runs of 24 questions. No usable reply is bought twice."""
    server.answer = answer
    dollars = cap * sum(usd(q.size, MAX_TOKENS) for q in questions(24))
    for _ in range(2):
        _, message, booked = run(tmp_path / "j", 24, dollars, concurrency)
    bills = [usd(*billed) for billed in server.billed]
    surprise = concurrency * max(bills) if answer in EXCEEDING else 0.0
    assert sum(bills) <= min(booked, dollars + surprise) * (1 + 1e-9)
    usable = [row["key"] for row in read_jsonl(tmp_path / "j") if not row["reason"]]
    assert len(set(usable)) == len(usable)
    if cap == 0.4 and len(usable) > 3 and concurrency == 1:
        assert "--max_usd" in message and sum(bills) > 0.3 * dollars


def test_a_later_run_expects_what_an_earlier_one_was_billed(server, tmp_path):
    server.answer = exceeds(1)
    run(tmp_path / "j", 1)
    cap = 3.5 * usd(SIZE, 3 * MAX_TOKENS)
    replies, message, _ = run(tmp_path / "j", 30, cap, 64)
    assert "reached" in message and sum(usd(*billed) for billed in server.billed) <= cap
    assert "--max_usd 0 reached" in run(tmp_path / "new", 30, 0.0)[1]
    assert len(replies) == 3 == len(server.requests), "the cap ends the second run"


@pytest.mark.parametrize("answer, booked, tries", [
    *[(completion(usage=report), booked, 1) for report, booked in (
        (usage(300, 60, 1360), (300, 1060)), (usage(300.0, 60.0, 12), (300, 60)),
        (usage(0, 60, 60), (SIZE, 60)), ({"total_tokens": 300}, (SIZE, 300)),
        (usage("300", "many"), MAXIMUM), (usage(1e10, 60), MAXIMUM), (usage(-9, 60), MAXIMUM))],
    (Answer(ERROR_WITH_USAGE, 400), (300, 1200), 1), (Answer("{}", 400), (0, 0), 1),
    (Answer({"error": {"code": 401}}), (0, 0), 1), (Answer("{}", 429), (0, 0), 3),
    (Answer("{}", 500), MAXIMUM, 3),
    (Answer({"error": {"code": 502}}), MAXIMUM, 3), (Answer(TIMEOUT), MAXIMUM, 3),
    (Answer(httpx.ConnectError("refused")), (0, 0), 3), (Answer(" <!doctype>"), (0, 0), 1),
    (Answer({"error": {"code": 400}}), MAXIMUM, 1), (Answer({"error": "busy"}), MAXIMUM, 1),
    (Answer({"error": {"code": 200}, "choices": [{"message": {"content": "x"}}]}), MAXIMUM, 1),
    (Answer({"choices": [{"error": {"code": "429"}}]}), (0, 0), 3),
    (Answer(httpx.RemoteProtocolError("ConnectError")), MAXIMUM, 3),
    (Answer('{"choices": [{"mes'), MAXIMUM, 1), (Answer("max_tokens: big", 400), (0, 0), 1)])
def test_what_is_reported_or_may_be_billed_is_booked(server, tmp_path, answer, booked, tries):
    """429, 5xx and lost connections are retried. The reason has the words of a failure."""
    server.answer = lambda body, number: answer
    replies, message, spent = run(tmp_path / "j", 1)
    assert len(server.requests) == tries == len(read_jsonl(tmp_path / "j")), "all are booked"
    assert spent == pytest.approx(tries * usd(*booked))
    if message:
        is_lost = booked == MAXIMUM and isinstance(answer.body, Exception)
        advice = "--timeout 120, or lower" if is_lost else "OPENAI_API_KEY, and the URL http"
        assert "1 unusable" in message and advice in message
    if message or answer.status == 400:
        words = json.dumps(answer.body) if isinstance(answer.body, dict) else f"{answer.body}"
        assert words.strip()[:20] in replies["row-0"].reason


# ── Replies that are unusable, and what a server refuses

@pytest.mark.parametrize("message, finish, words", [
    ({"refusal": "I cannot judge this."}, "stop", "I cannot judge this."),
    ({"content": " "}, "content_filter", "empty"), ({"content": "It is"}, "error", "failed"),
    ({"content": "It is"}, "MAX_TOKENS", "cut off after 100 tokens")])
def test_the_reason_says_what_is_there_instead(server, tmp_path, message, finish, words):
    """The next question is asked. A text that was cut off is not read, but asked again."""
    answer = completion(finish=finish, **{"content": None} | message)
    text = '{"finish_reason": "length"}'             # a text that only speaks of it is whole
    server.answer = lambda body, number: answer if number <= 2 else completion(text)
    replies, error, _ = run(tmp_path / "j", 2)
    assert error is None and len(server.requests) == 2
    assert words in replies["row-0"].reason and words in replies["row-1"].reason
    assert run(tmp_path / "j", 2)[0]["row-0"].value == text and len(server.requests) == 4


def row_of(body) -> int:
    return int(re.search(r"number (\d+)", str(body["messages"]))[1])


# Case of public_cases → (whether a request fails, from its body and number; usable replies of
# 8, requests, USD beyond a usual reply each)
SERVERS = {
    "claude_temperature_and_top_p": (lambda body, n: {"temperature", "top_p"} <= {*body},
                                     8, 9, 0),
    "openrouter_429_in_200": (lambda body, n: n <= 2, 8, 10, 0),
    "content_parts": (lambda body, n: True, 8, 8, 0),
    "choice_error": (lambda body, n: n <= 2, 8, 10, 2 * usd(300, 10)),
    "one_row_refused_with_its_text": (lambda body, n: row_of(body) == 3, 7, 8, -usd(300, 60)),
    "filter_on_the_first_row": (lambda body, n: row_of(body) == 0, 7, 8, -usd(300, 60)),
    "stream_only_400": (lambda body, n: True, 0, 3, -8 * usd(300, 60)),
    "no_system_role": (lambda body, n: True, 0, 3, -8 * usd(300, 60))}


@pytest.mark.parametrize("concurrency", [1, 8])
@pytest.mark.parametrize("case", SERVERS)
def test_servers_of_others(server, tmp_path, shared, case, concurrency):
    """After an answer, all requests have the same parameters. A row's own fault is no key's."""
    fails, usable, requests, extra = SERVERS[case]
    given = {row["case"]: row for row in
             read_jsonl(shared / "data/public_cases/servers.jsonl")}[case]
    server.answer = lambda body, number: (
        Answer(given["body"], given["status"]) if fails(body, number)
        else completion(billed=(300, 60)))
    replies, message, spent = run(tmp_path / "j", 8, concurrency=concurrency,
                                  schema={"type": "object"})
    assert sum(bool(reply.value) for reply in replies.values()) == usable
    assert len(server.requests) == requests
    assert spent == pytest.approx(8 * usd(300, 60) + extra)
    assert all(body.keys() == server.requests[-1].keys() for body in server.requests[2:])
    assert "OPENAI_API_KEY" not in str(message) and "URL" not in str(message)
    reasons = [reply.reason for reply in replies.values() if reply.reason]
    assert len(reasons) == (3 if usable == 0 else 8 - usable)
    assert all(reason.startswith("HTTP 4") for reason in reasons)
    assert (message is None) == (usable > 0)


def test_a_first_row_that_is_refused_with_its_text_leaves_no_parameter_out(server, tmp_path):
    """Nor does a later one, and a text in parts of another type is not read."""
    server.answer = lambda body, number: (
        Answer("temperature top_p response_format", 422) if row_of(body) == 0 else
        completion([{"type": "thinking", "text": "no"}, {"type": "text", "text": f"{number}"}]))
    replies, message, _ = run(tmp_path / "j", 3, schema={"type": "object"})
    assert message is None and replies["row-2"].value == f"{len(server.requests)}"
    for body in server.requests[-2:]:
        assert {"top_p", "temperature", "response_format"} <= body.keys()
        assert body["response_format"]["type"] == "json_schema"


def test_25_unusable_replies_in_a_row_end_a_run_but_do_not_block_later_rows(server, tmp_path):
    """An earlier failure is asked last and does not count, unless nothing is answered."""
    def answer(body, number):
        row = int(re.search(r"number (\d+)", str(body))[1])
        return completion("" if row < 40 else "fine") if row else Answer("{}", 401)

    server.answer = answer
    for message, count in (("1 unusable replies", 1), ("25 unusable.*; check .*/j$", 26)):
        assert re.search(message, run(tmp_path / "j", 60)[1]) and len(server.requests) == count
    replies, message, _ = run(tmp_path / "j", 60, concurrency=4)
    assert message is None and len(server.requests) == 26 + 60
    assert sum(reply.reason is None for reply in replies.values()) == 20
    server.answer = lambda body, number: Answer("{}", 401)
    _, message, _ = run(tmp_path / "j", 60, concurrency=4)       # the first goes alone
    assert "1 unusable replies" in message and len(server.requests) == 87
    server.answer = lambda body, n: completion("" if n % 25 and n > 88 else "fine")
    assert run(tmp_path / "new", 74)[1] is None      # a good reply starts the count again


@pytest.mark.parametrize("text, refused, left_out", [
    ("temperature and top_p cannot both be given", {"temperature", "top_p"}, {"top_p"}),
    ("'temperature' does not support 0.3", {"temperature"}, {"temperature", "top_p"}),
    ("'max_tokens' is not supported. Use 'max_completion_tokens' instead.", {"max_tokens"},
     {"max_tokens"})])
def test_what_a_server_refuses_is_left_out(server, tmp_path, recwarn, text, refused, left_out):
    """All rows have a reply, and no more is left out. The first request has all settings."""
    server.answer = lambda body, number: (Answer({"detail": text}, 422)
                                          if refused <= body.keys() else completion())
    _, message, spent = run(tmp_path / "j", concurrency=8, temperature=0.7)
    assert message is None and spent == pytest.approx(3 * usd(40, 60))
    assert server.requests[0] == {
        "model": "m", "messages": questions(1)[0].messages, "temperature": 0.7, "top_p": 0.95,
        "max_tokens": MAX_TOKENS}
    for body in server.requests[-2:]:
        assert {"top_p", "temperature", "max_tokens"} - body.keys() == left_out
        assert body.get("max_completion_tokens", body.get("max_tokens")) == MAX_TOKENS
    assert len(recwarn) == len(server.requests) - 3 and text in str(recwarn[0].message)


def test_the_form_is_asked_for_as_a_schema_then_as_an_object_then_not(server, tmp_path):
    """Also: a prompt that was cut off is warned of."""
    server.answer = lambda body, number: (Answer("Unknown response_format", 400)
                                          if number <= 2 else completion(billed=(2, 60)))
    with pytest.warns(UserWarning, match="leaving out the|is too small") as seen:
        run(tmp_path / "j", 2, schema={"type": "object"})
    assert {str(warning.message)[:10] for warning in seen} == {"m: leaving", "the server"}
    formats = [body.get("response_format", {}) for body in server.requests]
    assert [f.get("type") for f in formats] == ["json_schema", "json_object", None, None]
    assert formats[0]["json_schema"] == {"name": "reply", "strict": True,
                                         "schema": {"type": "object"}}


# ── The journal

def test_a_reply_is_written_before_it_is_read_and_never_bought_twice(server, tmp_path):
    """A reader that refuses replies, and one with a fault, lose no reply."""
    def refuse(context, text):
        raise ValueError(f"no labels\n in {context['id']}" if context["id"] else "")

    def fail(context, text):
        if context["id"] == 5:
            raise InputError("--mode x: a fault")

    server.answer = lambda body, number: completion(f"reply {number}")
    assert run(tmp_path / "j", 20, read=fail)[1] == "--mode x: a fault"
    assert 6 == len(server.requests) == len(read_jsonl(tmp_path / "j")), "written before read"
    assert run(tmp_path / "j", 20, concurrency=4)[1] is None
    assert len(server.requests) == 20, "no reply is bought twice"
    replies, _, _ = run(tmp_path / "j", 20, read=refuse)     # it refuses, so they are bought
    assert len(server.requests) == 40 and replies["row-3"].reason == "no labels in 3"
    assert all(reply.reason and reply.value is None for reply in replies.values())
    replies, _, _ = run(tmp_path / "j", 20, read=lambda context, text: len(text))
    assert len(server.requests) == 40 and replies["row-3"].value == len("reply 24")


def test_a_journal_of_the_fourth_version_is_read_but_for_damaged_lines(server, tmp_path):
    """Its replies are reused and its costs count, with today's prices. It has one writer."""
    path = tmp_path / "j"
    key = questions(1)[0].key
    rows = [{"key": key, "due": usage(900, 100), "usd": 0.1, "time": 1.0, "sha256": "a"},
            {"key": key, "id": "row-0", "reply": "one", "reason": None, "usd": 0.01,
             "usage": {"prompt_tokens": 300, "completion_tokens": 60}}]
    write_rows(path, rows)
    path.write_bytes(b"7\n\xff\n" + path.read_bytes() + json.dumps(rows[0]).encode())
    with Journal(path), pytest.raises(InputError, match="another process"):
        Journal(path).__enter__()
    for _ in range(2):                                   # the last line lacks its line break
        replies, _, spent = run(path, prices=(5.0, 20.0))
        assert [reply.value for reply in replies.values()] == ["one", "fine", "fine"]
        assert len(server.requests) == 2, "the reply of the fourth version is not bought again"
        assert spent == pytest.approx(2 * (usd(300, 60) + 2 * usd(40, 60)))


WHOLE = {"key": "k", "id": "i", "reply": "r", "reason": None, "usage": usage(1, 1), "ratio": 1}


@pytest.mark.parametrize("line", [
    *map(json.dumps, [[], "", 7, None, {}, [["key", "k"]], {"reply": "r"}]),
    *[json.dumps(WHOLE | change) for change in (
        {"key": None}, {"key": ["k"]}, {"reply": 5}, {"reply": None}, {"reason": 5},
        {"usage": None}, {"usage": {}}, {"usage": usage("1", 1)}, {"usage": usage(-9, 1)},
        {"usage": usage(1e400, 1)}, {"usage": {"prompt_tokens": 3}}, {"ratio": "1"})]])
def test_a_line_of_a_journal_of_another_shape_is_named(server, tmp_path, capsys, line):
    """It is not counted, and the lines around it are."""
    (tmp_path / "j").write_text(f"{json.dumps(WHOLE)}\n{line}\n{json.dumps(WHOLE)}\n")
    assert run(tmp_path / "j", 1)[2] == pytest.approx(2 * usd(1, 1) + usd(40, 60))
    assert f"{tmp_path}/j, line 2: skipping corrupt line" in capsys.readouterr().out
    (tmp_path / "rows").write_text('[["a", 1]]\n{"b": 1}\n[]\n')
    assert read_log(tmp_path / "rows") == [{"b": 1}]


def test_the_journal_of_a_run_is_read_once_unless_it_changes(server, tmp_path, monkeypatch):
    """Phase 3 opens it in each iteration. Between two of them, another process may write."""
    def iterate(*arguments):
        reads.append(arguments)
        return iterate_log(*arguments)

    reads = []
    monkeypatch.setattr("ask.iterate_log", iterate)
    for number in range(3, 6):
        with run_journal(tmp_path / "j", 2.5, 10.0, None) as journal:
            ask(questions(number), journal, Server("m", "http://h/v1"), lambda _, text: text)
        assert len(reads) == 1 and len(server.requests) == number == len(journal.replies)
    run(tmp_path / "j", 6)
    with run_journal(tmp_path / "j", 2.5, 10.0, None) as journal:
        assert len(reads) == 3 and len(journal.replies) == 6
        assert journal.spent == pytest.approx(6 * usd(40, 60))


def test_each_server_has_its_own_replies_but_those_of_the_fifth_version_serve_all(
        server, tmp_path):
    """Two judges are called "default". No reply of the fifth version is paid for again."""
    server.answer = lambda body, number: completion("I see. [[A]]")
    rows = [{"id": "1", "prompt": "p"}]
    configs = [JudgeConfig(base_url=f"http://{host}/v1", judge_model="default")
               for host in ("a", "b")]
    for number, config in enumerate(configs * 2, 1):
        asked = pairwise_questions(rows, ["one"], ["two"], config)
        assert [row["verdict"] for row in ask_judge(asked, config, tmp_path / "j")] == [1, 1]
        assert len(server.requests) == 2 * min(number, 2), "each server is asked once"
    old = [row | {"key": question.old_key}
           for row, question in zip(read_jsonl(tmp_path / "j"), asked)]
    write_rows(tmp_path / "old", old)
    for config in configs:
        asked = pairwise_questions(rows, ["one"], ["two"], config)
        with pytest.warns(UserWarning, match="fifth version"):
            verdicts = ask_judge(asked, config, tmp_path / "old")
        assert [row["verdict"] for row in verdicts] == [1, 1] and len(server.requests) == 4
    sources = [Server("m", "http://a/v1", temperature).source for temperature in (0.0, 0.3)]
    assert sources[0] != sources[1]


def test_the_settings_of_the_annotator_and_of_the_judge_reach_their_server(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-the-test")
    server = {"base_url": "http://h/v1", "timeout": 7.0}
    config = AnnotateConfig(annotator_model="m", **server)
    for name in ("slf5k", "kodcode", "ultrafeedback"):
        assert load_annotator(get_task(name), config) == Server(
            "m", temperature=get_task(name).temperature, **server)
    assert judge._server(JudgeConfig(judge_model="m", **server)) == Server(
        "m", temperature=0.0, **server)


SECRET = "sk-Ab3-" + "x1" * 20


@pytest.mark.parametrize("answer", [
    Answer(f"top_p {SECRET}", 400), completion(f"It is {SECRET}."), Answer(SECRET)])
def test_the_key_reaches_neither_the_journal_nor_a_message(server, tmp_path, monkeypatch,
                                                           recwarn, capsys, answer):
    monkeypatch.setenv("OPENAI_API_KEY", SECRET)
    server.answer = lambda body, number: answer
    replies, message, _ = run(tmp_path / "j")
    texts = [(tmp_path / "j").read_text(), str(replies), str(message), *capsys.readouterr()]
    assert SECRET not in str(texts + [warning.message for warning in recwarn])
    monkeypatch.setenv("OPENAI_API_KEY", "something")            # a usual word is no secret
    assert hide_key("There is something.") == "There is something."


# ── Retries, Ctrl-C, SIGKILL, and a server that hangs or is killed

def test_ctrl_c_waits_for_replies_but_not_for_retries(server, tmp_path, capsys, monkeypatch):
    """The server presses it. A press while a line is written may write it twice."""
    def answer(body, number):
        # In the second run, seven questions pause before their retry.
        time.sleep(0.5 if number == 61 + 8 else 0.02)
        if number in (20, 61 + 8):
            os.kill(os.getpid(), signal.SIGINT)
        return Answer("{}", 429) if number > 61 else completion()

    signal.signal(signal.SIGINT, signal.default_int_handler)     # a shell may ignore SIGINT
    server.answer = answer
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "j", 60, concurrency=8)
    requests = len(server.requests)
    assert 20 <= requests == len({row["key"] for row in read_jsonl(tmp_path / "j")}) < 60
    assert "waiting for open requests" in capsys.readouterr().err
    assert run(tmp_path / "j", 60, concurrency=8)[1] is None and len(server.requests) == 60
    monkeypatch.setattr("ask.PAUSE", 3600)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "new", 60, concurrency=8)
    assert len(server.requests) == 61 + 8, "no request is sent again after Ctrl-C"


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
    process = subprocess.Popen(
        [sys.executable, ROOT / "annotate.py", "--task=ultrafeedback",
         "--annotator_function=critic:judge"], cwd=folder, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    for _ in range(quick + 8):
        while process.stdout.readline() != "asked\n":
            assert process.poll() is None, process.stderr.read()
    return process


@needs_posix
def test_a_second_ctrl_c_does_not_wait_and_a_killed_run_loses_no_reply(tmp_path):
    """Threads sleep for a minute, and the process ends. An edited critic is asked anew."""
    process = start_annotating(tmp_path, 20)
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=20) and "interrupted" in process.stderr.read()
    journal = tmp_path / "feedback.jsonl.journal"
    assert sorted(int(row["id"]) for row in read_jsonl(journal)) == [*range(20)]
    process = start_annotating(tmp_path, 40)
    process.kill()
    process.wait()
    assert len(read_jsonl(journal)) == 20 + 40


HTTP_SERVER = """
import http.server, json, os, signal, time

class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        request = self.rfile.read(int(self.headers["Content-Length"]))
        if b"number 1" in request:
            time.sleep(60)
        if b"number 2" in request:
            os.kill(os.getpid(), signal.SIGKILL)
        reply = json.dumps({"choices": [{"message": {"content": "fine"}}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
print(server.server_port, flush=True)
signal.alarm(60)
server.serve_forever()
"""


def test_a_server_that_hangs_or_is_killed_is_booked_but_one_that_is_gone_is_free(
        tmp_path, monkeypatch):
    """Over HTTP. It answers question 0, hangs at 1, and is killed at 2."""
    monkeypatch.setattr("ask.RETRIES", 0)
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-the-test")
    with subprocess.Popen([sys.executable, "-c", HTTP_SERVER], text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        url = f"http://127.0.0.1:{int(process.stdout.readline())}/v1"
        assert run(tmp_path / "j", 1, base_url=url)[0]["row-0"].value == "fine"
        replies, message, _ = run(tmp_path / "j", 2, base_url=url, timeout=0.2)
        assert "1 unusable" in message and "ReadTimeout" in replies["row-1"].reason
        run(tmp_path / "j", 3, base_url=url)
    replies, message, _ = run(tmp_path / "j", 3, base_url=url)
    assert "1 unusable" in message and "ConnectError" in replies["row-1"].reason
    booked = [[*row["usage"].values()] for row in read_jsonl(tmp_path / "j")]
    first, second = ([question.size, MAX_TOKENS] for question in questions(3)[1:])
    assert booked[1:] == [first, second, [0, 0]]


# ── Phase 1

WORDS = "the plot is thin but every hero has a name and Bob says “never” in the end 🎉".split()
JUDGE = {"annotator_function": "module_of_the_test:judge"}


def rows_of(n: int) -> list[dict]:
    return [{"id": f"row-{i}", "prompt": f"Question {i}?",
             "response": f"{i}: " + " ".join(WORDS[i % 5 :])} for i in range(n)]


@pytest.fixture()
def work(tmp_path, monkeypatch):
    """A function (rows, **settings) → summary. `work.module.judge` may annotate them."""
    def run_phase(rows=None, dry_run=False, **settings):
        if rows:
            write_rows(tmp_path / "rows.jsonl", rows)
        config = AnnotateConfig(**{"task": "ultrafeedback", "base_url": "http://h/v1",
                                   "price_in": 2.5, "price_out": 10.0, **settings})
        return annotate(config, tmp_path / "rows.jsonl", run_phase.output, dry_run)

    run_phase.output = tmp_path / "new" / "f.jsonl"
    run_phase.module = SimpleNamespace()
    monkeypatch.setitem(sys.modules, "module_of_the_test", run_phase.module)
    return run_phase


def test_rows_stay_in_order_and_a_question_is_asked_once(work, server, capsys):
    """The second reply is late. A new model or mode asks anew, a dry run does not. The cost is
    forecast before it is paid."""
    def answer(body, number):
        time.sleep(0.1 if number == 2 else 0.0)
        is_late = number < 11 and "Question 2?" in str(body)
        return completion("It is late." if is_late else critique(body))

    server.answer = answer
    rows = [*rows_of(9), rows_of(2)[1] | {"id": "twin"}]
    with pytest.raises(InputError, match="1 responses have no feedback.*: no JSON object"):
        work(rows)
    assert ", 1 skipped" in work(skip_failed=True)
    assert re.match(r"1 requests to send, at most \$0\.0[1-9]", work(dry_run=True))
    for settings, requests in [({}, 11), ({"annotator_model": "other"}, 11 + 9),
                               ({"base_url": "http://other/v1"}, 11 + 18),
                               ({"mode": "no_cot"}, 11 + 27)]:
        before = len(server.requests)
        summary = work(**settings)
        assert len(server.requests) == requests, f"{settings} asks anew, and once"
        assert f"\n{requests - before} requests to send, at most $" in capsys.readouterr().out
    bill = sum(usd(*billed) for billed in server.billed)
    assert summary.endswith(f"10 responses with feedback, 0 skipped; ${bill:.4f} in all runs")
    written = read_rows(work.output)
    assert [row["id"] for row in written] == [row["id"] for row in rows]
    assert written[9] == written[1] | {"id": "twin"}
    assert written[1]["annotator"] == "gpt-4o (no_cot)"
    assert all(row["usd"] == usd(40, 60) == usd(**row["usage"]) for row in written)


@pytest.mark.parametrize("fault", [KeyError("absent"), SystemExit("absent"), None])
def test_a_function_with_a_fault_ends_the_run_and_loses_no_reply(work, fault):
    """SystemExit would end one thread alone, and the run would wait for its reply."""
    def judge(row, response):
        calls.append(row["id"])
        if row["id"] != "row-3":
            time.sleep(0.1)                              # the others return after the fault
            return Feedback("c", [], [])
        if fault:
            raise fault
        return ["absent"]                                # neither a text nor a Feedback

    calls = []
    work.module.judge = judge
    reason = "row-3: (KeyE|SystemE).*test_ask.py, l|row-3: no JSON"
    with pytest.raises(InputError, match=reason):
        work(rows_of(30), concurrency=8, **JUDGE)
    kept = {row["id"] for row in read_jsonl(work.output.with_name("f.jsonl.journal"))}
    assert kept - {"row-3"} == {*calls} - {"row-3"} and 1 < len(calls) < 30


@pytest.mark.parametrize("flags, message", [
    ("--base_url http://h:port/v1", "--base_url"), ("--max_usd 0", "--max_usd needs"),
    ("--annotator_function toy:SLOTS", "--annotator_function"), ("--output {}", "directory or"),
    ("--output {}/x/../rows.jsonl", "or --data"), ("--mode cots", "of: cot, no_cot, align")])
def test_invalid_flags_send_no_request(server, monkeypatch, tmp_path, flags, message):
    write_rows(tmp_path / "rows.jsonl", rows_of(2))
    words = f"--task ultrafeedback --data {{}}/rows.jsonl --output {{}}/f.jsonl {flags}"
    words = [word.replace("{}", str(tmp_path)) for word in words.split()]
    assert message in error_message("annotate.py", *words)
    monkeypatch.setenv("OPENAI_API_KEY", "sk\n")
    assert "OPENAI_API_KEY" in error_message("annotate.py", *words[:6])
    assert not server.requests


# Alg. 1 l.5; Alg. 1 l.7–8; Alg. 1 l.10
def test_a_critic_is_asked_with_row_and_response_in_parallel(work):
    barrier = threading.Barrier(3, timeout=20)

    def judge(row, response):
        calls.append((row["more"], response))
        if 1 < len(calls) <= 7:
            barrier.wait()                         # three calls wait for each other
        return Feedback("It ends.", [response.split()[-1]], [])

    calls = []
    work.module.judge = judge
    rows = [row | {"more": k} for k, row in enumerate(rows_of(7))]
    work([*rows, {"id": "empty", "prompt": "?", "response": " "}], concurrency=3, **JUDGE)
    assert sorted(calls) == [(k, row["response"]) for k, row in enumerate(rows)]
    assert {(row["annotator"], row["critique"], row["usd"]) for row in read_rows(work.output)
            } == {("module_of_the_test:judge", "It ends.", None)}
    work([rows[0], *[row | {"more": 9} for row in rows[1:]]], concurrency=3, **JUDGE)
    assert len(calls) == 7 + 6, "any changed field of a row calls the function again"
    work.module.judge = lambda row, response: calls.append(row) or Feedback("c", ["0"], [])
    work([rows[0]], **JUDGE)
    assert len(calls) == 7 + 6 + 1, "and so does another source of the function"
    with pytest.raises(InputError, match="no response to annotate; .* another --model"):
        work([{"prompt": "?", "response": ""}], **JUDGE)


def test_phase_1_ends_with_three_responses_in_colour_and_the_lost_quotes(work, capsys):
    """A quote that begins inside a word is called that. An example is the quote itself."""
    work.module.judge = lambda row, response: Feedback(
        "It is so.", ["cat", "and the"], ["the", "ca", "a bird", "og sat", "here"])
    work([{"id": str(i), "prompt": "p", "response": f"the cat {i} and the dog sat here"}
          for i in range(4)], **JUDGE)
    text = capsys.readouterr().out
    assert text.count("response: the [+cat+]") == 3 == text.count("critique: It is so.")
    assert "the [+cat+] 1 [+and the+] dog sat [-here-]\n" in text
    assert text.split("critiques of ")[1].splitlines() == [
        "4 responses, 0 unreadable: 38% of the tokens are good and 12% poor",
        "12 quotes found, for example 'cat'", "4 quotes ambiguous, for example 'the'",
        "8 quotes inside a word, for example 'ca'", "4 quotes unmatched, for example 'a bird'"]


@pytest.mark.parametrize("good, poor, cause, remedy", [
    (["a bird"], [], "quotes are unmatched .such as 'a bird'", "character by character"),
    (["ca"], ["og"], "quotes are inside a word .such as 'ca' and 'og'", "whole words"),
    (["the"], [], "quotes are ambiguous .such as 'the'", "more words"),
    (["cat"], ["cat"], "quotes are conflicting .such as 'cat'", "one list only"),
    (["the cat sat on the dog"], [], "around all words", "leave out"),
    ([], [], "nothing is quoted", "return passages")])
def test_feedback_that_cannot_teach_is_refused_with_its_remedy(work, good, poor, cause, remedy):
    """Nothing is written, so that no phase continues with it."""
    work.module.judge = lambda row, response: Feedback("It is so.", good, poor)
    with pytest.raises(InputError, match=f"nothing can be learned, because δ is . for every "
                                         f"token: .*{cause}.*; .*{remedy}"):
        work([{"id": str(i), "prompt": "p", "response": "the cat sat on the dog"}
              for i in range(4)], **JUDGE)
    assert not work.output.exists()


# ── A function or mode of the user that raises, returns something else, or was edited

@pytest.fixture()
def my_task(tmp_path, monkeypatch):
    """A function (source of helper.py, source of my_task.py) that writes both."""
    def write(helper, source="from helper import judge"):
        (tmp_path / "helper.py").write_text(helper)
        (tmp_path / "my_task.py").write_text(source)
        for name in ("my_task", "helper"):
            sys.modules.pop(name, None)

    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    write("judge = None")
    yield write
    for name in ("my_task", "helper"):
        sys.modules.pop(name, None)


MINE = {"annotator_function": "my_task:judge"}
KEYS = ".*a dict with critique, good_spans, poor_spans and no other list"


@pytest.mark.parametrize("body, message", [
    ("return row['absent']", "--annotator_function my_task:judge, row row-1: "
                             "KeyError: 'absent' .*helper.py, line 4"),
    ("from annotate import ground; ground(5, 6)", "AttributeError: .*helper.py, line 4"),
    ("import json; json.loads(5)", "row-1: TypeError: .*helper.py, line 4"),
    ("return {'critique': {1}}", "row-1: TypeError"),
    *[(f"return {value}", f"1 unusable replies in a row, the last for row-1: {reason}{KEYS}")
      for value, reason in (
          ("None", "no JSON"), ("{}", "no JSON"), ("{'good': []}", "good"),
          ("{'critique': 'c', 'good_spans': [], 'bad_spans': ['a']}", "bad_spans"),
          ("{'good_spans': ['a']}", "the reply has no critique"),
          ("{'critique': 'c', 'good_spans': 'a'}", "quotes must be a list"))]])
def test_a_function_that_raises_or_has_wrong_keys_is_one_line(work, my_task, body, message):
    """It has the function, the row, the error, and the user's own file and line."""
    my_task(f"def judge(row, response):\n    if row['id'] != 'row-1':\n"
            f"        return {{'critique': 'c', 'good_spans': []}}\n    {body}\n")
    with pytest.raises(InputError, match=message) as error:
        work(rows_of(3), **MINE)
    assert "epeat the command" not in str(error.value)


def test_a_text_of_a_function_that_cannot_be_read_is_a_failure_of_its_row(work, my_task):
    my_task("def judge(row, response):\n    return 'text'\n")
    with pytest.raises(InputError, match="3 responses have no.*change the function") as error:
        work(rows_of(3), **MINE)
    assert "epeat the command" not in str(error.value)


def test_a_mode_that_raises_is_one_line(work, server):
    """A ValueError says that the reply is unusable."""
    def read(example, reply):
        if example["id"] == "row-1":
            raise KeyError("absent")
        raise ValueError("no labels")

    work.module.MINE = Mode("", {"good_spans": ["…"]}, read)
    with pytest.raises(InputError, match="--mode module_of_the_test:MINE, row row-1: "
                                         "KeyError: 'absent' .*test_ask.py, line"):
        work(rows_of(2), mode="module_of_the_test:MINE")
    with pytest.raises(InputError, match="row-0: no labels"):
        work(rows_of(1), mode="module_of_the_test:MINE")


@pytest.mark.parametrize("name, near", [
    ("my_task:juge", "similar: judge;"), ("cots", "similar: cot;"),
    ("my_task:zzz", "similar: nothing;")])
def test_a_name_that_is_near_is_offered(my_task, name, near):
    my_task("def judge(row, response): pass")
    with pytest.raises(InputError, match=near):
        load_object("--mode", name, Mode, {"cot": None})


def test_no_file_in_the_current_directory_replaces_a_package(tmp_path, monkeypatch):
    (tmp_path / "json.py").write_text("TASK = 1")
    (tmp_path / "my_own.py").write_text("TASK = 2")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "json")
    assert load_object("--task", "my_own:TASK") == 2
    with pytest.raises(InputError, match="no attribute 'TASK'"):
        load_object("--task", "json:TASK")


def test_a_function_that_cannot_be_imported_has_the_line_of_its_file(my_task):
    my_task("x = 1\nx = y\n")
    with pytest.raises(InputError, match="NameError: .*helper.py, line 2"):
        Function("my_task:judge")


@pytest.mark.parametrize("source", [
    "import helper\njudge = len", "def judge(*_):\n    import os, helper as h",
    "from helper import (\n    judge)", "import part.deep\njudge = len"])
def test_an_edit_of_a_file_that_is_imported_makes_another_function(my_task, tmp_path, source,
                                                                   monkeypatch):
    """Not an edit of a file that it does not import. Scripts of this project do not count."""
    (tmp_path / "part").mkdir()
    (tmp_path / "part" / "__init__.py").write_text("")
    (tmp_path / "part" / "deep.py").write_text("import helper")
    (tmp_path / "other.py").write_text("")
    my_task("from annotate import Feedback\njudge = len", source)
    before = Function("my_task:judge").source
    assert [*before][0] == "my_task.py"
    assert {"helper.py", "other.py"} & {*before} == {"helper.py"}
    (tmp_path / "helper.py").write_text("judge = max")
    after = Function("my_task:judge").source
    assert {file for file in before if before[file] != after[file]} == {"helper.py"}
    assert {path.stem for path in SCRIPTS} == TOP
    assert [*Function("toy:critique").source] == ["__init__.py"]
    monkeypatch.setattr("data.SCRIPTS", {tmp_path / "helper.py"})
    imported_files.cache_clear()
    assert "helper.py" not in Function("my_task:judge").source


def test_replies_of_a_function_under_the_key_of_the_fifth_version_are_used(work, my_task):
    """That version hashed the function's file alone."""
    my_task("def judge(row, response):\n    raise SystemExit('asked')")
    with pytest.raises(InputError, match="asked"):
        work(rows_of(2), **MINE)
    config = AnnotateConfig(task="ultrafeedback", **MINE)
    asked = annotation_questions(config, work.output.parent.parent / "rows.jsonl",
                                 get_task("ultrafeedback"))
    reply = json.dumps({"critique": "c", "good_spans": ["plot"]})
    write_rows(f"{work.output}.journal", [WHOLE | {"key": question.old_key, "reply": reply}
                                          for question in asked])
    with pytest.warns(UserWarning, match="fifth version"):
        assert "2 responses with feedback" in work(**MINE)
