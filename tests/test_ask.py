"""Requests to a server or a function: the budget, the journal, failures, Ctrl-C and SIGKILL."""

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

import pytest
from ask import Journal, Question, Server, ask, hide_key, question_key
from data import InputError, write_rows
from helpers import ROOT, SLOW, read_jsonl
from loopback import Answer, completion, httpx, loopback

MAX_TOKENS = 100


def usd(prompt, completion_tokens) -> float:
    return (prompt * 2.5 + completion_tokens * 10) / 1e6       # USD per million tokens


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
    messages = [[{"role": "system", "content": "Judge the answer."},
                 {"role": "user", "content": f"Answer number {i}. " + "w " * (60 + i % 7)}]
                for i in range(n)]
    return [Question(question_key(m), f"row-{i}", m, {"id": i}, MAX_TOKENS, schema)
            for i, m in enumerate(messages)]


def size(body: dict) -> int:
    """The largest number of tokens in the prompt, as ask.py counts it."""
    return len(json.dumps([body["messages"], None]))


def run(path, n=3, cap=None, concurrency=1, read=lambda context, text: text, retries=2,
        prices=(2.5, 10.0), model=None, asked=None):
    """Ask n questions; return ({row: Reply}, message of the InputError or None, spent USD)."""
    message = None
    with Journal(path, *prices, cap) as journal:
        try:
            ask(asked or questions(n), journal, model or Server("m", "http://h/v1"), read,
                concurrency, retries)
        except InputError as error:
            message = str(error)
            assert "\n" not in message
        replies = {question.id: journal.replies[question.key]
                   for question in asked or questions(n) if question.key in journal.replies}
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
    "honest": good, "total": reports(lambda p, c: usage(p, c, p + c)),
    "total only": reports(lambda p, c: {"total_tokens": p + c}),
    "no completion_tokens": reports(lambda p, c: {"prompt_tokens": p, "total_tokens": p + c}),
    "reasoning outside": reports(lambda p, c: usage(p, 3, p + c)),
    "negative": reports(lambda p, c: usage(-p, -c)),
    "one is negative": reports(lambda p, c: usage(p, -c)),
    "huge": reports(lambda p, c: usage(10**12, 10**12)),
    "no report": reports(lambda p, c: None),
    "500": lost(), "every second 500": lost(2), "every third 503": lost(3, 503),
    "hang": lost(error=TIMEOUT), "every third hang": lost(3, error=TIMEOUT),
    "every second reset": lost(2, error=httpx.ReadError("reset")),
    "cut JSON": lost(2, 200, '{"choices": [{"mess'), "empty body": lost(2, 200, ""),
    "429": lambda body, number: Answer("{}", 429) if number % 3 == 0 else good(body, number),
}
# Servers that bill more, and say so.
EXCEEDING = {
    "3 times": exceeds(3), "3 times, later": exceeds(3, 5), "9 times": exceeds(9),
    "400 with usage": lambda body, number: good(body, number) if number == 1 else Answer(
        ERROR_WITH_USAGE, 400, (300, 1200)),
    "3 times, and 500": lambda body, number: completion(billed=(size(body) - 20, 300))
    if number % 2 else Answer("{}", 500, (size(body) - 20, 300)),
}
CAPS = (None, 0.4, 9.0)                                      # of the largest cost of all rows
SETTINGS = [(cap, concurrency) for cap in CAPS for concurrency in (1, 8, 64)]


@pytest.mark.parametrize("kind", WITHIN | EXCEEDING)
def test_the_cap_holds_and_the_bill_is_booked(server, tmp_path, kind):
    """Two runs each. Also: the first request is alone, and no usable reply is bought twice."""
    number = [*WITHIN, *EXCEEDING].index(kind)
    n = 80 if SLOW else 24
    for cap, concurrency in SETTINGS if SLOW else {SETTINGS[number % 3 + 3],
                                                   SETTINGS[number * 4 % 9]}:
        path = tmp_path / f"{cap}-{concurrency}"
        server.requests, server.billed = [], []
        largest = sum(usd(question.size, MAX_TOKENS) for question in questions(n))
        dollars = cap and cap * largest

        def answer(body, number):
            open_at.append(server.open)
            answer = (WITHIN | EXCEEDING)[kind](body, number)
            answer.wait = 0.002
            return answer

        open_at = []                               # number of open requests at each request
        server.answer = answer
        for _ in range(2):
            replies, message, booked = run(path, n, dollars, concurrency, retries=1)
        assert open_at[:2] in ([1], [1, 1]) and max(open_at) <= concurrency
        bills = [usd(*billed) for billed in server.billed]
        assert sum(bills) <= booked * (1 + 1e-9)
        if dollars:
            surprise = concurrency * max(bills) if kind in EXCEEDING else 0.0
            assert sum(bills) <= dollars * (1 + 1e-9) + surprise
            if kind in WITHIN and kind != "total only":
                assert booked <= dollars * (1 + 1e-9)
        usable = [row["key"] for row in read_jsonl(path) if not row["reason"]]
        assert len(set(usable)) == len(usable)
        if cap == 0.4 and len(usable) > 3:
            assert "--max_usd" in message and sum(bills) > 0.3 * dollars


def test_a_later_run_expects_what_an_earlier_one_was_billed(server, tmp_path):
    server.answer = exceeds(3)
    largest = usd(questions(1)[0].size, 3 * MAX_TOKENS)
    run(tmp_path / "j", 1)
    cap = 3.5 * largest
    replies, message, booked = run(tmp_path / "j", 30, cap, 64)
    assert "reached" in message and sum(usd(*billed) for billed in server.billed) <= cap
    assert len(replies) == 3 == len(server.requests)
    requests = len(server.requests)
    assert "reached" in run(tmp_path / "j", 30, booked / 2)[1]
    assert "--max_usd 0 reached" in run(tmp_path / "new", 30, 0.0)[1]
    assert len(server.requests) == requests


SIZE = questions(1)[0].size


@pytest.mark.parametrize("report, booked", [
    (usage(300, 60, 1360), (300, 1060)), (usage(300, 60), (300, 60)),
    (usage(300, 0, 900), (300, 600)), (usage(300, 60, 12), (300, 60)),
    (usage(300.0, 60.0, 1360.0), (300, 1060)), (usage(0, 60, 60), (SIZE, 60)),
    ({"prompt_tokens": 300, "total_tokens": 5300}, (300, 5000)),
    ({"completion_tokens": 60}, (SIZE, 60)), ({"total_tokens": 300}, (SIZE, 300)),
    (usage(3000, 20_000), (3000, 20_000)),
    *[(report, (SIZE, MAX_TOKENS)) for report in (
        usage(0, 0, 0), usage("300", "many"), usage(1e10, 60), usage(float("nan"), 60),
        usage([], {"a": 1}), None, [300, 60], "many")]])
def test_what_is_reported_is_booked(server, tmp_path, report, booked):
    server.answer = lambda body, number: completion(report)
    replies, _, spent = run(tmp_path / "j", 1)
    assert tuple(replies["row-0"].usage.values()) == booked
    assert spent == pytest.approx(usd(*booked))


@pytest.mark.parametrize("answer, booked, tries", [
    (Answer(ERROR_WITH_USAGE, 400), (300, 1200), 1), (Answer("{}", 400), (0, 0), 1),
    (Answer("<html>", 403), (0, 0), 1), (Answer({"error": {"code": 401}}), (0, 0), 1),
    (Answer("{}", 429), (0, 0), 3), (Answer({"error": {"code": 429}}), (0, 0), 3),
    (Answer({"error": {"code": 502}}), (SIZE, MAX_TOKENS), 3),
    (Answer("<html>", 504), (SIZE, MAX_TOKENS), 3),
    (Answer({"usage": usage(300, 7)}, 500), (300, 7), 3),
    (Answer(error=httpx.ConnectError("refused")), (0, 0), 3),
    (Answer(error=httpx.ReadTimeout("timed out")), (SIZE, MAX_TOKENS), 3),
    (Answer(" <!doctype html>"), (0, 0), 1), (Answer('{"choices": [{"mes'), (SIZE, 100), 1),
    (Answer({"status": "ok"}), (SIZE, 100), 1), (Answer("null"), (SIZE, 100), 1),
    (Answer({"choices": [{"message": {"content": 7}}]}), (SIZE, 100), 1)])
def test_each_failed_attempt_is_booked_if_it_may_be_billed(server, tmp_path, answer, booked,
                                                           tries):
    """429, 5xx and lost connections are retried. The first question ends the run."""
    server.answer = lambda body, number: answer
    replies, message, spent = run(tmp_path / "j", 60, concurrency=8)
    assert "http://h/v1/ with model 'm': 1 unusable" in message
    assert "check OPENAI_API_KEY, the URL" in message
    assert len(server.requests) == tries == len(read_jsonl(tmp_path / "j"))
    assert spent == pytest.approx(tries * usd(*booked))
    words = answer.body if isinstance(answer.body, str) else json.dumps(answer.body)
    assert words.strip()[:20] in replies["row-0"].reason


# ── Replies that are unusable

@pytest.mark.parametrize("message, finish, words", [
    ({"reasoning_content": "Let me see."}, "stop", "reasoning_content': 'Let me see."),
    ({"refusal": "I cannot judge this."}, "stop", "I cannot judge this."),
    ({"content": " "}, "content_filter", "empty"), ({"content": "It is"}, "error", "failed"),
    *[({"content": "It is"}, finish, "cut off after 100 tokens")
      for finish in ("length", "MAX_TOKENS", "token_limit")]])
def test_the_reason_says_what_is_there_instead(server, tmp_path, message, finish, words):
    """The next question is asked. A text that was cut off is not read, but asked again."""
    answer = completion(finish=finish, **{"content": None} | message)
    server.answer = lambda body, number: answer if number <= 2 else completion()
    replies, error, spent = run(tmp_path / "j", 2)
    assert error is None and len(server.requests) == 2
    assert spent == pytest.approx(2 * usd(40, 60))
    assert words in replies["row-0"].reason and words in replies["row-1"].reason
    assert run(tmp_path / "j", 2)[0]["row-0"].value == "fine" and len(server.requests) == 4


def test_a_text_that_only_speaks_of_a_finish_reason_is_not_cut_off(server, tmp_path):
    text = '{"finish_reason": "length"}, "finish_reason" : "length"'
    server.answer = lambda body, number: completion(content=text)
    assert run(tmp_path / "j", 1)[0]["row-0"].value == text


def test_25_unusable_replies_in_a_row_end_a_run_and_a_good_one_starts_the_count_again(
        server, tmp_path):
    server.answer = lambda body, n: completion(content="" if n % 25 and n > 1 else "fine")
    replies, message, _ = run(tmp_path / "j", 74)
    assert message is None and len(replies) == 74
    server.answer = lambda body, n: completion() if n <= 77 else Answer("{}", 401)
    _, message, spent = run(tmp_path / "expires", 60)
    assert "25 unusable replies in a row, the last for row-27: HTTP 401" in message
    assert len(server.requests) == 74 + 28 and spent == pytest.approx(3 * usd(40, 60))


def test_rows_that_always_fail_do_not_block_later_rows(server, tmp_path):
    """An earlier failure is asked last and does not count, unless nothing is answered."""
    def answer(body, number):
        row = int(re.search(r"number (\d+)", str(body))[1])
        return completion(content="" if row < 40 else "fine") if row else Answer("{}", 400)

    server.answer = answer
    assert "1 unusable replies" in run(tmp_path / "j", 60)[1] and len(server.requests) == 1
    assert "25 unusable replies" in run(tmp_path / "j", 60)[1] and len(server.requests) == 26
    replies, message, _ = run(tmp_path / "j", 60, concurrency=4)
    assert message is None and len(server.requests) == 26 + 60
    assert sum(reply.reason is None for reply in replies.values()) == 20
    server.answer = lambda body, number: Answer("{}", 401)
    requests = len(server.requests)
    assert "1 unusable replies" in run(tmp_path / "j", 60)[1]
    assert len(server.requests) == requests + 1


# ── What a server refuses

SCHEMA = {"type": "object"}
NAMES = {"response_format", "top_p", "temperature", "max_tokens"}
FORMAT = lambda body: body.get("response_format", {}).get("type")


@pytest.mark.parametrize("text, is_refused, left_out", [
    ("temperature and top_p cannot both be given", {"temperature", "top_p"}.issubset,
     {"top_p"}),
    ("'temperature' does not support 0.3", {"temperature"}.intersection,
     {"temperature", "top_p"}),
    ("Unknown name topP", {"top_p"}.intersection, {"top_p"}),
    ("'max_tokens' is not supported. Use 'max_completion_tokens' instead.",
     {"max_tokens"}.intersection, {"max_tokens"}),
    ("Invalid parameter: 'response_format' is not supported", {"response_format"}.intersection,
     {"response_format"}),
    ("max_tokens is too large: 100", {"max_tokens"}.intersection, None),
    ("This model only supports stream mode", bool, None)])
def test_what_a_server_refuses_is_left_out(server, tmp_path, text, is_refused, left_out):
    """All rows have a reply, and no more is left out. Other refusals end the run at once."""
    status = 422 if "Unknown" in text else 400
    server.answer = lambda body, number: (Answer({"detail": text}, status)
                                          if is_refused(body.keys()) else completion())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        replies, message, spent = run(tmp_path / "j", asked=questions(3, SCHEMA), concurrency=8)
    if left_out is None:
        assert text in message and len(server.requests) == 1 and spent == 0 and not caught
        return
    assert message is None and not any(reply.reason for reply in replies.values())
    assert spent == pytest.approx(3 * usd(40, 60))
    for body in server.requests[-2:]:
        assert NAMES - body.keys() == left_out
        assert body.get("max_completion_tokens", body.get("max_tokens")) == MAX_TOKENS
    assert len(caught) == len(server.requests) - 3 and text in str(caught[0].message)
    requests = len(server.requests)
    run(tmp_path / "j", asked=questions(3, SCHEMA))
    assert len(server.requests) == requests, "the keys of the journal have changed"


def test_the_form_is_asked_for_as_a_schema_then_as_an_object(server, tmp_path):
    server.answer = lambda body, number: (
        Answer("response_format of type json_schema is not supported", 400)
        if FORMAT(body) == "json_schema" else completion())
    with pytest.warns(UserWarning, match="leaving out the json_schema"):
        run(tmp_path / "j", asked=questions(2, SCHEMA))
    assert [*map(FORMAT, server.requests)] == ["json_schema", "json_object", "json_object"]
    format_sent = server.requests[0]["response_format"]["json_schema"]
    assert format_sent["schema"] == SCHEMA and format_sent["strict"] is True
    run(tmp_path / "j", 5)
    assert FORMAT(server.requests[-1]) is None


def test_a_prompt_that_was_cut_off_is_warned_of_once(server, tmp_path):
    asked = [Question(str(i), str(i), [{"role": "user", "content": "word " * 400}], {}, 100)
             for i in range(3)]
    for prompt, count in ((10, 1), (0, 0), (420, 0)):
        server.answer = lambda body, number: completion(usage(prompt, 80))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")
            run(tmp_path / str(prompt), asked=asked)
        assert ["context is too small" in str(warning.message) for warning in caught] == (
            [True] * count)


# ── The journal

def test_a_reply_is_written_before_it_is_read_and_read_again_before_it_is_bought_again(
        server, tmp_path):
    """A reader that refuses replies, and one with a fault, lose no reply."""
    def refuse(context, text):
        raise ValueError(f"no labels\n in {context['id']}" if context["id"] else "")

    def fail(context, text):
        if context["id"] == 5:
            raise InputError("--mode x: a fault")
        return text.upper()

    server.answer = lambda body, number: completion(content=f"reply {number}")
    _, message, _ = run(tmp_path / "j", 20, concurrency=4, read=fail)
    assert message == "--mode x: a fault" and 6 <= len(server.requests) < 20
    assert len(read_jsonl(tmp_path / "j")) == len(server.requests)
    replies, message, _ = run(tmp_path / "j", 20, concurrency=4)
    assert message is None and len(server.requests) == 20
    replies, _, _ = run(tmp_path / "j", 20, read=refuse)     # it refuses, so they are bought
    assert len(server.requests) == 40 and replies["row-3"].reason == "no labels in 3"
    assert all(reply.reason and reply.value is None for reply in replies.values())
    replies, _, _ = run(tmp_path / "j", 20, read=lambda context, text: len(text))
    assert len(server.requests) == 40 and replies["row-3"].value == len("reply 24")


@pytest.mark.parametrize("line, pattern, text", [
    (2, b"^.*$", b"7"), (2, b"^.*$", b"\xff"), (4, b"^(.{40}).*$", rb"\1")])
def test_a_line_that_is_malformed_or_cut_off_costs_only_its_row(server, tmp_path, capsys, line,
                                                                pattern, text):
    """The line after one that was cut off is whole, so the third run asks nothing."""
    path = tmp_path / "j"
    run(path, 4)
    lines = path.read_bytes().splitlines()
    lines[line - 1] = re.sub(pattern, text, lines[line - 1])
    path.write_bytes(b"\n".join(lines) + b"\n" * (line < 4))
    for _ in range(2):
        assert len(run(path, 4)[0]) == 4 and len(server.requests) == 5
    assert f"j, line {line}: skipping corrupt line" in capsys.readouterr().out


def test_a_journal_of_the_fourth_version_is_read(server, tmp_path):
    """Its replies are reused and its costs count, with today's prices."""
    first, second, third = questions(3)
    rows = [
        {"key": first.key, "due": usage(900, 100), "usd": 0.1, "time": 1.0, "sha256": "a"},
        {"key": first.key, "id": first.id, "reply": "one", "reason": None,
         "usage": usage(300, 60), "usd": 0.01, "time": 2.0, "sha256": "b"},
        {"key": second.key, "id": second.id, "reply": "two", "reason": None,
         "usage": usage(300, 40), "usd": None, "time": 3.0, "sha256": "c"},
        {"key": second.key, "reason": "refused", "is_read": True, "time": 4.0, "sha256": "d"},
        {"key": third.key, "due": usage(900, 100), "usd": 0.1, "time": 5.0, "sha256": "e"}]
    write_rows(tmp_path / "j", rows)
    replies, _, spent = run(tmp_path / "j")
    assert [reply.value for reply in replies.values()] == ["one", "two", "fine"]
    assert len(server.requests) == 1
    assert spent == pytest.approx(usd(300, 60) + usd(300, 40) + usd(40, 60))


def test_the_cost_follows_from_usage_and_the_prices_of_today(server, tmp_path):
    assert run(tmp_path / "j", 2, prices=(None, None))[2] == 0
    assert run(tmp_path / "j", 2)[2] == pytest.approx(2 * usd(40, 60))
    assert run(tmp_path / "j", 2, prices=(5.0, 20.0))[2] == pytest.approx(4 * usd(40, 60))
    assert "reached: $0.0014 is spent" in run(tmp_path / "j", 3, cap=2 * usd(40, 60))[1]
    assert len(server.requests) == 2


def test_a_journal_has_one_writer(tmp_path):
    with Journal(tmp_path / "j"), pytest.raises(InputError, match="another process"):
        Journal(tmp_path / "j").__enter__()


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
    assert "…" in str(replies)
    monkeypatch.setenv("OPENAI_API_KEY", "something")            # a usual word is no secret
    assert hide_key("There is something.") == "There is something."


# ── Retries and Ctrl-C

def test_the_pause_grows_with_each_retry(server, tmp_path, monkeypatch):
    monkeypatch.setattr("ask.PAUSE", 0.05)
    server.answer = lambda body, n: Answer("{}", 429) if n <= 3 else completion()
    start = time.monotonic()
    assert run(tmp_path / "j", 2, retries=3)[1] is None
    assert time.monotonic() - start >= 0.05 * (1 + 4 + 9) and len(server.requests) == 5


def press_ctrl_c():
    os.kill(os.getpid(), signal.SIGINT)


def interrupted(path, **options):
    signal.signal(signal.SIGINT, signal.default_int_handler)     # a shell may ignore SIGINT
    with pytest.raises(KeyboardInterrupt):
        run(path, 60, concurrency=8, **options)


@pytest.mark.parametrize("press_at", range(6 if SLOW else 2))
def test_ctrl_c_waits_and_loses_no_reply(server, tmp_path, capsys, press_at):
    """It may fall into the reader. A press while a line is written may write it twice."""
    def read(context, text):
        time.sleep(0.002)
        return text

    server.answer = lambda body, number: Answer(completion().body, wait=0.05)
    timer = threading.Timer(0.25 + 0.017 * press_at, press_ctrl_c)
    timer.start()
    interrupted(tmp_path / "j", read=read)
    requests = len(server.requests)
    assert 1 < requests == len({row["key"] for row in read_jsonl(tmp_path / "j")}) < 60
    assert "waiting for open requests" in capsys.readouterr().err
    assert run(tmp_path / "j", 60, concurrency=8)[1] is None
    assert len(server.requests) == 60


def test_ctrl_c_does_not_wait_for_retries(server, tmp_path, monkeypatch):
    monkeypatch.setattr("ask.PAUSE", 3600)
    server.answer = lambda body, n: Answer("{}", 429) if n > 1 else completion()
    timer = threading.Timer(0.5, press_ctrl_c)
    timer.start()
    interrupted(tmp_path / "j")
    assert len(server.requests) == 1 + 8


SLEEPER = """
import os
import time
from ask import FREE, Journal, Question, Reply, ask

def model(question):
    os.write(1, b"asked\\n")                  # one write: threads do not mix their lines
    time.sleep(0 if question.id == "0" else 60)
    return Reply("fine", usage=FREE)

questions = [Question(str(i), str(i), [], {}, 1) for i in range(4)]
with Journal("j") as journal:
    ask(questions, journal, model, lambda context, text: text)
"""


def test_a_second_ctrl_c_does_not_wait(tmp_path):
    """In its own process, which ends although its threads sleep for a minute."""
    process = subprocess.Popen(
        [sys.executable, "-c", f"import signal\nsignal.signal(signal.SIGINT, "
         f"signal.default_int_handler)\n{SLEEPER}"], cwd=tmp_path, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    for _ in range(4):
        assert process.stdout.readline() == "asked\n"
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=20) and "KeyboardInterrupt" in process.stderr.read()
    assert len(read_jsonl(tmp_path / "j")) == 1
