"""Any server: seventy behaviours against caps and concurrency, and what a run does with each.

Most servers here are functions behind a real openai client, in this process. Each bills by its
own rule. `SLOW=1` tries every cap with every concurrency and prints the table of FAULTS.md.
One test uses a server that nobody here wrote, `transformers serve` (extra `serving`).
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import math
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass, field
from email.utils import formatdate
from pathlib import Path
from types import SimpleNamespace
from typing import Callable

import openai
import pytest
from annotate import AnnotateConfig, Feedback, FeedbackError, Grounding, Mode, annotate
from ask import Journal, Question, Server, ask, question_key, read_retry_after
from data import InputError, public, read_rows, write_rows
from helpers import SLOW, free_port
from measures.judge import JudgeConfig, ask_judge, pairwise_questions

httpx = sys.modules.get("httpx2") or sys.modules["httpx"]        # openai 3 uses httpx2
PRICES = {"price_in": 2.5, "price_out": 10.0}                    # USD per million tokens
MAX_TOKENS = 100


def usd(prompt, completion) -> float:
    return (prompt * 2.5 + completion * 10) / 1e6


# ── A server is a function (request body, number of the request) → Answer

@dataclass
class Answer:
    """billed: (prompt, completion) tokens on the server's bill. body: a text or JSON."""
    body: object = ""
    status: int = 200
    billed: tuple = (0, 0)
    headers: dict = field(default_factory=dict)
    error: Exception | None = None                               # raised instead of an answer
    wait: float = 0.0


def size(body) -> int:
    """The largest number of tokens in the prompt, as ask.py counts it."""
    return len(json.dumps(body["messages"]))


def completion(usage=..., content="fine", finish="stop", billed=(40, 60), **more) -> Answer:
    """A chat completion. usage: what it reports; by default what is billed."""
    if usage is ...:
        usage = {"prompt_tokens": billed[0], "completion_tokens": billed[1],
                 "total_tokens": sum(billed)}
    message = {"role": "assistant", "content": content, **more}
    choice = {"index": 0, "message": message, "finish_reason": finish}
    body = {"id": "x", "object": "chat.completion", "choices": [choice]}
    return Answer(body if usage is None else {**body, "usage": usage}, billed=billed)


def error(code, message="Provider returned error", **more) -> dict:
    return {"error": {"message": message, "code": code, **more}, "user_id": "u"}


class World:
    """Replaces the network of openai's client by a server, and counts what it does."""

    client = openai.AsyncOpenAI

    def __init__(self, monkeypatch):
        monkeypatch.setattr(openai, "AsyncOpenAI", self.connect)
        monkeypatch.setattr("ask.PAUSE", 0.0)
        self.start(None)

    def start(self, server):
        self.server = server
        self.requests = []                                       # bodies
        self.bills = [0.0]                                       # USD of each request
        self.answers = 0
        self.open = self.most_open = self.most_open_at_first = 0

    def connect(self, **options):
        network = httpx.AsyncClient(transport=httpx.MockTransport(self.handle))
        return self.client(http_client=network, **options)

    async def handle(self, request):
        self.requests.append(json.loads(request.content))
        answer = self.server(self.requests[-1], len(self.requests))
        self.bills.append(usd(*answer.billed))
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        if not self.answers:
            self.most_open_at_first = max(self.most_open_at_first, self.open)
        try:
            await asyncio.sleep(answer.wait)
        finally:
            self.open -= 1
        self.answers += 1
        if answer.error:
            raise answer.error
        text = answer.body if isinstance(answer.body, str) else json.dumps(answer.body)
        return httpx.Response(answer.status, headers=answer.headers, content=text.encode())


@pytest.fixture()
def world(monkeypatch):
    return World(monkeypatch)


def questions(n: int) -> list[Question]:
    messages = [[{"role": "system", "content": "Judge the answer."},
                 {"role": "user", "content": f"An answer to judge, number {i}. " + "w " * 60}]
                for i in range(n)]
    return [Question(question_key(m), f"row-{i}", m) for i, m in enumerate(messages)]


def run(world, path, n=3, cap=None, concurrency=1, review=lambda *_: None, **options):
    """Ask n questions → (records, message of the InputError or None, USD booked)."""
    server = Server("m", "http://u:pass-word@h/v1", max_tokens=MAX_TOKENS,
                    **{"retries": 2, **options})
    message = None
    with Journal(path, *PRICES.values(), cap) as journal:
        try:
            ask(questions(n), journal, server, review, concurrency)
        except InputError as failure:
            message = str(failure)
            assert "\n" not in message and "pass-word" not in message
        return journal.records, message, journal.spent


# ── Stress: whatever a server does, the cap holds

def reports(make, **more) -> Callable:
    """A good reply. make(prompt, completion) → usage, of what is nearly the largest bill."""
    def server(body, number):
        bill = size(body) - 20, MAX_TOKENS - 3
        return completion(make(*bill), billed=bill, **more)
    return server


def exceeds(factor_in, factor_out) -> Callable:
    """Bills and reports a multiple of what was asked for."""
    def server(body, number):
        bill = int(size(body) * factor_in), int(MAX_TOKENS * factor_out)
        return completion(billed=bill)
    return server


def at_first(n, answer, then=completion) -> Callable:
    return lambda body, number: answer(body) if number <= n else then()


def usage(prompt, completion, total=None, **more) -> dict:
    return {"prompt_tokens": prompt, "completion_tokens": completion, **more} | (
        {} if total is None else {"total_tokens": total})


def lost(status=500, body=None, every=1, **more) -> Callable:
    """Bills the largest reply and fails, at every n-th request."""
    def server(request, number):
        if number % every:
            return completion()
        text = error(status) if body is None else body
        return Answer(text, status, (size(request), MAX_TOKENS), **more)
    return server


def unbilled(body, status, n=10**9) -> Callable:
    return at_first(n, lambda _: Answer(body, status))


def in_choice(code) -> dict:
    return {"choices": [{"index": 0, "finish_reason": "error", "error": {"code": code},
                         "message": {"role": "assistant", "content": "It is"}}]}


def beside(code) -> dict:
    return {**completion(None, content=None).body, "error": {"message": "no", "code": code}}


HTML = "<!doctype html>\n<title>Gateway</title>\x1b[31m"
BARE_ERROR = {"choices": [{"finish_reason": "error", "message": {"content": ""}}]}
# Contents of a reply, as JSON texts, and bodies that are no completion.
PART = '{"type": "text", "text": "fine"}'
CONTENTS = [
    f"[{PART}]", f"[{PART}, {PART}]", f'[{PART}, {{"type": "image_url"}}]', "[]", "null", "7",
    '{"text": "x"}', "true", '"  "', '["a", "b"]', '[{"type": "text"}]', '"\\ud83d"',
    '[{"type": "text", "text": 7}]', json.dumps("[" * 100_000), "[" * 900 + "]" * 900]
BODIES = [
    "{}", '{"choices": []}', '{"choices": {}}', '{"choices": [null]}', '{"choices": [{}]}',
    '{"choices": [{"message": null}]}', '{"choices": [{"message": "hi"}]}', "[]", "5", "null",
    '{"choices": [{"mess', "", "[" * 200_000, '{"error": {"message": "no"}}', HTML,
    'data: {"choices": []}\n\n', '{"choices": [{"message": {}, "finish_reason": ["stop"]}]}']
# Servers whose bill is at most what was asked for. Those that report report the truth, or
# nothing that can be used.
WITHIN = {
    **{name: reports(make) for name, make in {
        "true": usage, "true with total": lambda p, c: usage(p, c, p + c),
        "floats": lambda p, c: usage(float(p), float(c)),
        "null total": lambda p, c: usage(p, c) | {"total_tokens": None},
        "details": lambda p, c: usage(p, c, completion_tokens_details=None),
        "reasoning outside": lambda p, c: usage(p, 3, p + c),
        "all reasoning outside": lambda p, c: usage(p, 0, p + c),
        "cached prompt": lambda p, c: usage(0, c, c), "negative": lambda p, c: usage(-p, -c),
        "total only": lambda p, c: {"total_tokens": p + c},
        "anthropic names": lambda p, c: {"input_tokens": p, "output_tokens": c},
        "texts": lambda p, c: usage(str(p), str(c)), "list": lambda p, c: [p, c]}.items()},
    # `report` belongs to the lambda, so that each server has its own.
    **{name: reports(lambda p, c, report=report: report) for name, report in {
        "absent": None, "null": [], "empty": {}, "word": "many", "zeros": usage(0, 0, 0),
        "no prompt": {"completion_tokens": 1}, "no completion": {"prompt_tokens": 3},
        "booleans": usage(True, True), "fractions": usage(1.5, 1.5),
        "NaN": usage(math.nan, math.nan), "infinite": usage(math.inf, math.inf),
        "nulls": usage(None, None)}.items()},
    "5,000 digits": lambda body, number: Answer(
        json.dumps(completion(usage("N", "N")).body).replace('"N"', "9" * 5000), billed=(9, 9)),
    "cut off": reports(usage, finish="length"),
    **{f"content {i}": reports(usage, content=json.loads(text))
       for i, text in enumerate(CONTENTS)},
    **{f"body {i}": lost(200, text) for i, text in enumerate(BODIES)},
    **{f"{status} billed": lost(status) for status in (408, 500, 503, 529)},
    "502 HTML billed": lost(502, HTML), "504 billed": lost(504, HTML),
    "524 billed": lost(524, "timeout"), "500 in 200 billed": lost(200, error(500)),
    "every second 500": lost(every=2), "every third 503": lost(503, every=3),
    "error in a choice": lost(200, in_choice(502)), "null and error": lost(200, beside(500)),
    "finish_reason error": lost(200, BARE_ERROR),
    "reset after billing": lost(error=httpx.ReadError("reset")),
    "every second reset": lost(every=2, error=httpx.RemoteProtocolError("closed")),
    "timeout after billing": lost(wait=9), "every third timeout": lost(every=3, wait=9),
    "500, nothing generated": unbilled(error(500, "Overloaded; nothing was generated."), 500),
    "no connection": at_first(10**9, lambda _: Answer(error=httpx.ConnectError("refused"))),
    **{str(status): unbilled(error(None), status) for status in (400, 401, 403, 429)},
    "404": unbilled(HTML, 404), "302": unbilled("", 302),
    "429 twice": unbilled(error(None), 429, 2), "429 in 200": unbilled(error(429), 200),
    "429 in 200 twice": unbilled(error(429), 200, 2),
    "HTML later": lambda body, n: (exceeds(1, 1) if n < 3 else lost(200, HTML))(body, n),
    "top_p refused": lambda body, n: (Answer(error(400, "top_p?"), 400) if "top_p" in body
                                      else exceeds(1, 1)(body, n)),
}
# Servers that bill more than was asked for, and say so.
EXCEEDING = {
    "2.5 times": exceeds(2.5, 2.5), "9 times": exceeds(9, 9),
    "40 times the reply": exceeds(1, 40), "3 times the prompt": exceeds(3, 1),
    "reasoning 12 times": lambda body, n: completion(usage(300, 60, 1560), billed=(300, 1260)),
    "more with every reply": lambda body, n: completion(billed=(300, 100 + 90 * n)),
    "only the fifth": lambda body, n: completion(billed=(300, 5000 if n == 5 else 90)),
    "a million": lambda body, n: completion(billed=(300, 10**6)),
    "an error that reports 30 times": lambda body, n: Answer(
        {**error(500), "usage": usage(300, 3000)}, 500, (300, 3000)),
}
CAPS = {"none": None, "part": 0.4, "all": 9.0}                     # of all rows' largest cost
SETTINGS = [(cap, n) for cap in CAPS for n in (1, 8, 64)]
KINDS = WITHIN | EXCEEDING


@pytest.mark.parametrize("kind", KINDS)
def test_the_cap_holds_and_the_bill_is_booked(world, tmp_path, kind, capsys):
    """Two runs each. Also: no usable reply is bought twice, and the first request is alone."""
    number = [*KINDS].index(kind)
    n = 80 if SLOW else 12
    for cap, concurrency in SETTINGS if SLOW else [SETTINGS[number % 9]]:
        world.start(KINDS[kind])
        path = tmp_path / f"{cap}-{concurrency}"
        largest = sum(usd(question.size, MAX_TOKENS) for question in questions(n))
        dollars = CAPS[cap] and CAPS[cap] * largest
        for _ in range(2):
            _, message, booked = run(world, path, n, dollars, concurrency, retries=1,
                                     timeout=0.05)
        billed = sum(world.bills)
        if SLOW:
            with capsys.disabled():
                print(f"{kind}, cap {cap}, {concurrency} at once: billed {billed:.4f}, booked "
                      f"{booked:.4f}, cap {dollars}, {len(world.requests)} requests: {message}")
        assert billed <= booked * (1 + 1e-9)
        if dollars:
            in_flight = max(world.bills) * world.most_open if kind in EXCEEDING else 0.0
            assert billed <= dollars * (1 + 1e-9) + in_flight
            if kind in WITHIN:
                assert booked <= dollars * (1 + 1e-9)
        assert world.most_open_at_first == 1
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        usable = [line["key"] for line in lines if "reply" in line and not line["reason"]]
        assert len(set(usable)) == len(usable)
        if dollars and booked > dollars and len(usable) < n:
            assert "reached" in message and "h/v1/ with model 'm'" in message


# ── Parameters that a server refuses

BOTH = {"temperature", "top_p"}
EVERYTHING = {"max_tokens", "system", *BOTH}
# (message, whether the names in a request are refused, names that are left out in the end)
REFUSALS = [
    *[(text, {"temperature"}.intersection, BOTH) for text in (
        "`temperature` is deprecated for this model.",
        "Unsupported value: 'temperature' does not support 0.3 with this model. Only the "
        "default (1) value is supported.",
        "invalid temperature: only 1 is allowed for this model",
        "temperature must be 1 when thinking is enabled")],
    *[(text, BOTH.intersection, BOTH) for text in (
        "temperature and top_p are not supported",
        "Unsupported value: 'temperature' is not supported.")],
    ("`temperature` and `top_p` cannot both be given; use one.", BOTH.issubset, {"top_p"}),
    ("This role, temperature and max_tokens are unsupported", EVERYTHING.intersection,
     EVERYTHING),
    *[(text, {"top_p"}.intersection, {"top_p"}) for text in (
        "Unsupported parameter: 'top_p' is not supported with this model.",
        "Unrecognized request argument supplied: top_p",
        "Unknown name \"topP\": Cannot find field.")],
    *[(text, {"max_tokens"}.intersection, {"max_tokens"}) for text in (
        "Unsupported parameter: 'max_tokens' is not supported with this model. Use "
        "'max_completion_tokens' instead.", "max_tokens is not supported",
        "Unknown parameter: 'max_tokens'.", "max_tokens: Extra inputs are not permitted",
        "max_tokens is deprecated", "This model does not take max_tokens; it is unsupported")],
    *[(text, {"system"}.intersection, {"system"}) for text in (
        "System role not supported", "Only user and assistant roles are supported!",
        "Unsupported value: 'messages[0].role' does not support 'system' with this model.",
        "Conversation roles must alternate user/assistant/user/assistant/...",
        "Developer instruction is not enabled for models/gemma-3-27b-it",
        "This model does not support system prompts.", "system messages are not allowed",
        "messages: Unexpected role \"system\".", "Jinja: System role not supported")],
]
FORMS = [
    lambda text: Answer(error(None, text), 400), lambda text: Answer({"detail": text}, 422),
    lambda text: Answer({"object": "error", "message": text, "code": 400}, 400),
    lambda text: Answer(error(400, text)), lambda text: Answer(error("400", text)),
    lambda text: Answer({"error": {"code": 500, "message": text, "type": "server_error"}}, 500),
    lambda text: Answer({"detail": [{"type": "x", "loc": ["body"], "msg": text}]}, 422),
]


def sent_names(body) -> set:
    return {"system" if body["messages"][0]["role"] == "system" else "", *body}


@pytest.mark.parametrize("number", range(len(REFUSALS)))
def test_what_a_server_refuses_is_left_out(world, tmp_path, number, capsys):
    """All three rows have a reply; later requests leave out what was refused, and no more."""
    text, refuses, left_out = REFUSALS[number]
    forms = FORMS if SLOW else [FORMS[0], FORMS[number % len(FORMS)]]
    for path, form in zip((tmp_path / str(i) for i in range(9)), forms):
        world.start(lambda body, n: form(text) if refuses(sent_names(body)) else completion())
        records, message, booked = run(world, path, concurrency=8)
        assert message is None and not any(record["reason"] for record in records.values())
        assert records.keys() == {question.key for question in questions(3)}
        assert booked == pytest.approx(3 * usd(40, 60))
        for body in world.requests[-2:]:
            names = sent_names(body) - {"", "model", "messages", "max_completion_tokens"}
            assert names == EVERYTHING - left_out
            assert body.get("max_completion_tokens", body.get("max_tokens")) == MAX_TOKENS
            text_sent = "\n\n".join(message["content"] for message in body["messages"])
            assert "Judge the answer.\n\nAn answer to judge" in text_sent
        lines = capsys.readouterr().err.splitlines()
        assert sum("leaving out the" in line for line in lines) == len(left_out)
        run(world, path)
        assert len(world.requests) == 3 + len(left_out), "the keys of the journal have changed"


@pytest.mark.parametrize("text", [
    "This model only supports stream mode, enable the stream parameter", "Bad request.",
    "max_tokens is too large: 100. This model supports at most 64 completion tokens.",
    "Invalid 'model'", "Could not finish the message because max_tokens was reached",
    "thinking budget must be set", "seed is required"])
def test_another_refusal_ends_the_run_at_once_with_the_servers_words(world, tmp_path, text):
    world.server = lambda body, n: FORMS[0](text)
    _, message, booked = run(world, tmp_path / "j", 60, concurrency=8)
    assert text in message and len(world.requests) == 1 and booked == 0
    assert "max_completion_tokens" not in world.requests[0]
    world.server = lambda body, n: FORMS[0](text) if "number 0." in str(body) else completion()
    records, message, _ = run(world, tmp_path / "j", 60, concurrency=8)
    assert message is None, "the row that was refused is asked last"
    assert sum(record["reason"] is None for record in records.values()) == 59


@pytest.mark.parametrize("text", [
    "This model's maximum context length is 100 tokens. However, you requested 150 tokens.",
    "the request exceeds the available context size. try increasing the context size",
    "prompt is too long: 208310 tokens > 200000 maximum"])
def test_rows_that_are_too_long_do_not_end_a_run(world, tmp_path, text):
    world.server = lambda body, n: (FORMS[0](text) if re.search(r"number \d\.", str(body))
                                    else completion())
    records, message, _ = run(world, tmp_path / "j", 20, concurrency=4)
    assert message is None and len(world.requests) == 20
    assert sum(record["reason"] is None for record in records.values()) == 10


# ── Errors in an answer with status 200, and answers that are no completion

ERRORS = [error, lambda code: error(str(code)), in_choice, beside,
          lambda code: {"code": code, "message": "slow down"},
          lambda code: {"error": {"status": code, "message": "x"}},
          lambda code: [{"error": {"code": code, "message": "slow down", "status": "BUSY"}}],
          lambda code: {"error": {"message": "x", "metadata": {"status_code": code}}}]


@pytest.mark.parametrize("make", ERRORS)
def test_the_code_in_the_body_is_the_status(world, tmp_path, make):
    """429 is retried for free, 5xx is retried and booked, 401 ends the run at once."""
    largest = usd(questions(1)[0].size, MAX_TOKENS)
    for code, booked in ((429, 0), (502, 2 * largest), ("503", 2 * largest)):
        world.start(at_first(2, lambda _: Answer(make(code))))
        records, message, spent = run(world, tmp_path / str(code), 1)
        assert message is None and len(world.requests) == 3
        assert [record["reason"] for record in records.values()] == [None]
        assert spent == pytest.approx(booked + usd(40, 60))
    for code in (401, 403, 404):
        world.start(lambda body, n: Answer(make(code)))
        _, message, spent = run(world, tmp_path / str(code), 30, concurrency=8)
        assert "check OPENAI_API_KEY" in message and str(code) in message
        assert len(world.requests) == 1 and spent == 0


@pytest.mark.parametrize("body, n", [
    (HTML, 1), ("", 1), ("pong", 1), ({"status": "ok"}, 1), ({"choices": []}, 1), ([], 1),
    ('data: {"choices": []}\n\n', 1), (error(None), 1), ({"text": "fine"}, 1), ("null", 1),
    (BARE_ERROR, 3)])
def test_what_is_no_completion_is_no_answer_of_the_server(world, tmp_path, body, n):
    """The run ends at its first request, which is booked once (a failure is retried)."""
    world.server = lambda request, number: Answer(body)
    _, message, booked = run(world, tmp_path / "j", 60, concurrency=8)
    assert "the URL and the name of the model" in message and len(world.requests) == n
    assert booked == pytest.approx(n * usd(questions(1)[0].size, MAX_TOKENS))


def test_a_good_reply_starts_the_count_of_failures_again(world, tmp_path):
    """In the second run, the key expires after three replies. Then 25 requests are sent."""
    world.server = lambda body, n: completion(content="" if n % 25 and n != 1 else "fine")
    records, message, _ = run(world, tmp_path / "j", 74)
    assert message is None and len(records) == 74
    world.start(at_first(3, lambda _: completion(), lambda: Answer(error(None), 401)))
    _, message, booked = run(world, tmp_path / "expires", 60)
    assert "25 replies in a row" in message and len(world.requests) == 28
    assert booked == pytest.approx(3 * usd(40, 60))


@pytest.mark.parametrize("message, finish, words", [
    *[({name: "Let me see."}, "stop", name)
      for name in ("reasoning_content", "reasoning", "thinking", "refusal")],
    ({"tool_calls": [{"id": "c"}]}, "tool_calls", "tool_calls"),
    ({"function_call": {"name": "f"}}, "function_call", "function_call"),
    ({}, "content_filter", "content_filter"), ({}, "SAFETY", "SAFETY"),
    ({"content": [{"type": "refusal", "refusal": "No."}]}, "stop", "content"),
    *[({"content": "It is", "reasoning_content": "x"}, finish, "cut off after 100 tokens")
      for finish in ("length", "MAX_TOKENS", "max_tokens", "model_length", "max_output_tokens",
                     "LENGTH", "token_limit")]])
def test_the_reason_says_what_is_there_instead(world, tmp_path, message, finish, words):
    def server(body, n):
        return completion(finish=finish, **({"content": None, "refusal": None} | message))

    world.server = server
    records, _, booked = run(world, tmp_path / "j", 2)
    assert len(world.requests) == 2 and booked == pytest.approx(2 * usd(40, 60))
    for record in records.values():
        assert words in record["reason"]
        assert "empty" in record["reason"] or "cut off" in words


@pytest.mark.parametrize("text, seconds", [
    ("7", 7), ("0.5", 0.5), ("120", 120), ("121", 0), ("-3", 0), ("0", 0), ("", 0), ("soon", 0),
    ("nan", 0), ("inf", 0), ("Wed, 21 Oct 2015 07:28:00 GMT", 0), ("Wed, 99 Foo", 0),
    ("Wed, 21 Oct 99999 07:28:00 GMT", 0), (60, 60), (300, 0)])
def test_retry_after_is_a_number_or_a_date_within_two_minutes(text, seconds):
    if isinstance(text, int):
        text = formatdate(time.time() + text, usegmt=True)
    assert read_retry_after(text) == pytest.approx(seconds, abs=2 if seconds == 60 else 0)


@pytest.mark.parametrize("status", [429, 503, 200])
def test_the_server_is_asked_again_after_the_time_that_it_names(world, tmp_path, status):
    answer = Answer(error(429), status, headers={"Retry-After": "0.4"})
    world.server = at_first(1, lambda _: answer)
    start = time.monotonic()
    run(world, tmp_path / "j", 1)
    assert time.monotonic() - start >= 0.4 and len(world.requests) == 2


# ── Money

@pytest.mark.parametrize("report, booked", [
    (usage(300, 60, 1360), (300, 1060)), (usage(300, 60, 360), (300, 60)),
    (usage(300, 60), (300, 60)), (usage(300, 0, 900), (300, 600)),
    (usage(300, 60, 0), (300, 60)), (usage(300, 60, 12), (300, 60)),
    (usage(300.0, 60.0, 1360.0), (300, 1060)),
    (usage(0, 60, 60), (None, 60)), (usage(0, 60, 1060), (None, 1060)),
    (usage(0, 60), (None, 60)), (usage(3000, 20_000, 23_000), (3000, 20_000)),
    *[(report, (None, None)) for report in (
        usage(300, 60, "1360"), usage(300, 60, -1), usage(0, 0, 0), usage(300, None),
        usage("300", 60), usage(300, 1e308), usage(300, True), None)]])
def test_what_is_reported_is_booked(world, tmp_path, report, booked):
    """None: the reservation is booked, as for a reply without a report."""
    world.server = lambda body, n: completion(report)
    records, _, spent = run(world, tmp_path / "j", 3)
    for question in questions(3):
        prompt, reply = booked
        assert records[question.key]["usage"] == {
            "prompt_tokens": question.size if prompt is None else prompt,
            "completion_tokens": MAX_TOKENS if reply is None else reply}
    assert spent == pytest.approx(sum(record["usd"] for record in records.values()))


@pytest.mark.parametrize("text, is_free", [
    ("Overloaded; nothing was generated.", True), ("You were not charged for this.", True),
    ("No tokens were generated", True), ("The request was never billed", True),
    ("You will not be billed.", True), ("The server had an error.", False), (HTML, False),
    ("upstream overloaded", False), ("could not send the generated reply; charged", False)])
@pytest.mark.parametrize("status", [500, 502, 503, 504, 529])
def test_a_failure_of_the_server_is_booked_unless_nothing_was_generated(world, tmp_path, status,
                                                                        text, is_free):
    world.server = at_first(2, lambda _: Answer(error(None, text), status))
    _, message, booked = run(world, tmp_path / "j", 1)
    failures = 0 if is_free else 2 * usd(questions(1)[0].size, MAX_TOKENS)
    assert message is None and booked == pytest.approx(failures + usd(40, 60))


def test_later_reservations_use_the_ratio_that_the_server_reports(world, tmp_path):
    """Of ten times the largest cost, the cap pays for seven replies; 64 could be in flight."""
    world.server = lambda body, n: completion(billed=(size(body), 10 * MAX_TOKENS))
    largest = usd(10 * questions(1)[0].size, 10 * MAX_TOKENS)
    _, message, booked = run(world, tmp_path / "j", 64, 7.5 * largest, 64)
    assert sum(world.bills) == pytest.approx(booked) and booked <= 7.5 * largest
    assert len(world.requests) >= 7 and world.most_open > 1
    assert "which reports 10 times the tokens" in message and "$" in message
    requests = len(world.requests)
    _, message, _ = run(world, tmp_path / "j", 64, booked / 2, 64)
    assert "reached" in message and len(world.requests) == requests


# ── A reply is in the journal before any parser sees it

GOOD = json.dumps({"textual_feedback": "Short and clear.", "good_spans": ["a short answer"],
                   "poor_spans": []})


@pytest.fixture()
def work(world, tmp_path, monkeypatch):
    """Runs annotate.py over n rows with a mode of the test, whose parser may be replaced."""
    module = SimpleNamespace()
    monkeypatch.setitem(sys.modules, "mode_of_the_test", module)
    output = tmp_path / "feedback.jsonl"

    def annotate_rows(read=None, n=3, **options) -> str | None:
        """The message of the InputError, or None."""
        write_rows(tmp_path / "rows.jsonl", [
            {"id": f"row-{i}", "prompt": f"Question {i}?", "response": "It is a short answer."}
            for i in range(n)])
        module.MODE = Mode("Judge.", {"textual_feedback": "…"}, read)
        config = AnnotateConfig(
            task="ultrafeedback", data=str(tmp_path / "rows.jsonl"), output=str(output),
            **{"base_url": "http://u:pass-word@h/v1", "retries": 2,
               "mode": "mode_of_the_test:MODE", **PRICES, **options})
        try:
            annotate(config)
        except InputError as failure:
            return str(failure)
        return None

    return SimpleNamespace(run=annotate_rows, world=world, output=output,
                           journal=output.with_name("feedback.jsonl.journal"))


def any_text(example, reply):
    return Feedback(reply, [], []), Grounding()


def failing(failure, rows) -> Callable:
    """A parser that raises for some rows."""
    def read(example, reply):
        if int(example["id"].partition("-")[2]) in rows:
            raise failure
        return any_text(example, reply)
    return read


@pytest.mark.parametrize("failure, concurrency", [
    (KeyError("labels"), 64), (ValueError("x"), 8), (IndexError(), 1), (RecursionError(), 64),
    (AttributeError("\x1b[1m"), 8), (AssertionError(), 64)])
def test_a_parser_that_raises_loses_no_reply(work, failure, concurrency):
    """Nothing is requested while the parser raises on row 0. When it raises on row 5, up to 63
    requests are open; their replies are in the journal. No reply is requested twice."""
    work.world.server = lambda body, n: completion(content=f"reply {n}")
    for row in (0, 0, 5):
        message = work.run(failing(failure, [row]), 80, concurrency=concurrency)
        assert (f"the reply to row row-{row} in {work.journal}: {type(failure).__name__}"
                in message)
        assert "\n" not in message and "\x1b" not in message and __file__ in message
        assert (len(work.world.requests) == 1) == (row == 0)
    assert work.run(any_text, 80, concurrency=concurrency) is None
    assert len(work.world.requests) == 80
    critiques = [row["critique"] for row in read_rows(work.output)]
    assert sorted(critiques) == sorted(f"reply {n}" for n in range(1, 81))


@pytest.mark.parametrize("every", [1, 2, 3])
def test_a_refused_reply_is_read_again_before_it_is_bought_again(work, every):
    work.world.server = lambda body, n: completion(content=f"reply {n}")
    refused = range(0, 20, every)
    read = failing(FeedbackError("no labels\r\x1b]0;x\x07"), refused)
    message = work.run(read, 20, concurrency=4)
    assert "no labels" in message and "\x1b" not in message and "\r" not in message
    assert len(work.world.requests) == 20
    records = [json.loads(line) for line in work.journal.read_text().splitlines()]
    assert (sum(bool(record.get("is_read") and record["reason"]) for record in records)
            == len(refused))
    work.run(any_text, 20, dry_run=True)
    assert work.run(any_text, 20) is None
    assert len(work.world.requests) == 20, "a reply was bought twice"
    assert work.run(any_text, 20) is None and len(read_rows(work.output)) == 20
    work.run(read, 20)                       # it refuses again, so they are bought again
    assert len(work.world.requests) == 20 + len(refused)


def test_a_reply_that_is_cut_off_is_not_read_again(work):
    """Its text might be read as something that it is not."""
    work.world.server = lambda body, n: completion(finish="length" if n <= 3 else "stop")
    assert "cut off" in work.run(any_text)
    assert work.run(any_text) is None and len(work.world.requests) == 6


# ── Lines of the journal

def booked(path) -> float:
    with Journal(path, *PRICES.values()) as journal:
        return journal.spent


@pytest.fixture()
def lines(world, tmp_path):
    """The lines of a journal with 12 replies: 3 refused by the parser and 3 by the server."""
    def server(body, n):
        return Answer(error(None), 500) if n in (2, 3, 4) else completion()

    world.server = server
    run(world, tmp_path / "j", 12, review=lambda q, text: "no" if q.id[-1] == "5" else None,
        retries=0)
    return (tmp_path / "j").read_bytes().splitlines(keepends=True)


def write_lines(path, lines) -> float:
    path.write_bytes(b"".join(lines))
    return booked(path)


def test_a_copied_line_changes_neither_the_cost_nor_the_requests(lines, world, tmp_path):
    total = write_lines(tmp_path / "j", lines)
    for copy in (lines * 3, lines + lines[::-1], lines[:5] + lines[2:5] + lines[5:],
                 [line for line in lines for _ in (0, 1)]):
        assert write_lines(tmp_path / "j", copy) == total
    requests = len(world.requests)
    run(world, tmp_path / "j", 12)
    assert len(world.requests) == requests + 3


def without(line: bytes, *names) -> bytes:
    record = json.loads(line)
    for name in names:
        record.pop(name, None)
    return json.dumps(record).encode() + b"\n"


def sealed(line: bytes) -> bytes:
    record = json.loads(without(line, "sha256", "time"))
    return json.dumps({**record, "sha256": question_key(record)}).encode() + b"\n"


def test_a_line_without_its_hash_was_edited(lines, tmp_path, capsys):
    for i in range(len(lines)):
        write_lines(tmp_path / "j", [*lines[:i], without(lines[i], "sha256"), *lines[i + 1 :]])
        assert f"line {i + 1}: skipping corrupt line" in capsys.readouterr().err
    replies = [i for i, line in enumerate(lines) if b'"reply"' in line]
    total = write_lines(tmp_path / "j", lines)
    cheaper = [line.replace(b'"usd": 0.0', b'"usd": 0.000') for line in lines]
    for edit in (without(cheaper[replies[-1]], "sha256"), cheaper[replies[-1]]):
        changed = [*lines[: replies[-1]], edit, *lines[replies[-1] + 1 :]]
        assert write_lines(tmp_path / "j", changed) > total, "the worst case is booked"


def test_journals_of_earlier_versions_are_read_as_before(lines, tmp_path, capsys):
    """The second version wrote no hashes, and the third no times; they did not mark copies."""
    lines = [line for line in lines if b'"is_read"' not in line]
    total = write_lines(tmp_path / "j", lines)
    second = [without(line, "sha256", "time") for line in lines]
    third = [sealed(line) for line in lines]
    for old in (second, third, second[:8] + third[8:], second[:8] + lines[8:],
                third[:8] + lines[8:], second[:4] + third[4:8] + lines[8:]):
        assert write_lines(tmp_path / "j", old) == pytest.approx(total)
    assert write_lines(tmp_path / "j", third + third) == pytest.approx(2 * total)
    assert "skipping" not in capsys.readouterr().err
    write_lines(tmp_path / "j", third[:5] + second[5:6] + third[6:])
    assert "line 6: skipping corrupt line" in capsys.readouterr().err


# ── Nothing secret and nothing that a terminal obeys leaves a run

SECRET = "sk-Ab3-" + "x1" * 20
NASTY = (f"\x1b]0;owned\x07\x1b[2Kgone\rBearer {SECRET} \x9b31m "
         f"https://u:pass-word@h/v1?k=query-key")


@pytest.mark.parametrize("answer", [
    Answer(error(None, NASTY), 401), Answer(error(None, NASTY), 429), Answer(error(401, NASTY)),
    Answer(NASTY), Answer(NASTY, 502), completion(content=None, **{NASTY: NASTY}),
    completion(finish=NASTY, content=""), completion(content=f"It is {SECRET}."),
    Answer(error(None, "top_p " + NASTY), 400), Answer(error=httpx.ReadError(NASTY)),
    Answer(error=httpx.ConnectError(NASTY)), Answer(error=httpx.UnsupportedProtocol(NASTY))])
def test_no_key_no_password_and_no_control_character_leaves(work, monkeypatch, capsys, answer):
    monkeypatch.setenv("OPENAI_API_KEY", SECRET)
    work.world.server = at_first(99, lambda _: answer)
    message = work.run(failing(FeedbackError(NASTY), range(3)))
    captured = capsys.readouterr()
    printed = f"{message}{captured.out}{captured.err}"
    assert message and "\n" not in message
    for text in (printed, work.journal.read_text()):
        assert SECRET not in text and "pass-word" not in text
    assert not re.search("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]", printed)
    assert "\r" not in message and "query-key" not in printed


@pytest.mark.parametrize("key", ["none", "EMPTY", "local", "something"])
def test_a_key_that_is_a_word_is_left_in_texts(monkeypatch, key):
    monkeypatch.setenv("OPENAI_API_KEY", key)
    assert public(f"There is {key} here.\n\tIt is") == f"There is {key} here.\n\tIt is"


# ── Bodies of servers, and a server that nobody here wrote

# Case of servers.jsonl → requests for three rows, tokens of a reply, words of the message.
RIGHT = {
    "claude_temperature_and_top_p": (4, 60, None), "no_system_role": (4, 60, None),
    "xai_reasoning_usage": (3, 1060, None), "openrouter_429_in_200": (5, 60, None),
    "openrouter_401_in_200": (1, 0, "check OPENAI_API_KEY"),
    "content_in_reasoning_content": (3, 60, "reasoning_content"),
    "ollama_cached_prompt": (3, 60, None), "finish_MAX_TOKENS": (3, 60, "cut off"),
    "stream_only_400": (1, 0, "only supports stream mode")}
FAILS = {"temperature and top_p together": lambda body, n: body.keys() >= BOTH,
         "a system turn": lambda body, n: "system" in sent_names(body),
         "any": lambda body, n: True, "any (the first two only)": lambda body, n: n <= 2}


@pytest.mark.parametrize("name", RIGHT)
def test_the_bodies_of_real_servers(shared, work, name):
    """`../shared/data/public_cases/servers.jsonl`; its field `right` says what is right."""
    cases = read_rows(shared / "data" / "public_cases" / "servers.jsonl")
    case, = [case for case in cases if case["case"] == name]
    fails = FAILS[case["request_that_fails"]]

    def server(body, n):
        if fails(body, n):
            return Answer(case["body"], case["status"])
        return completion(usage(300, 60), content=GOOD)

    requests, tokens, words = RIGHT[name]
    work.world.server = server
    message = work.run(mode="no_cot")
    assert len(work.world.requests) == requests
    assert words in message if words else message is None and len(read_rows(work.output)) == 3
    prompt = 300 * bool(tokens)
    if name == "ollama_cached_prompt":
        prompt = size(work.world.requests[-1])
    assert booked(work.journal) == pytest.approx(3 * usd(prompt, tokens))


@pytest.fixture(scope="module")
def transformers_serve(shared, tmp_path_factory):
    """(URL, model) of `transformers serve`, with stories260K and a chat template."""
    missing = [name for name in ("fastapi", "uvicorn") if not importlib.util.find_spec(name)]
    if missing:
        pytest.skip(f"{', '.join(missing)} missing: pip install 'transformers[serving]'")
    model = tmp_path_factory.mktemp("stories") / "model"
    model.mkdir()
    for path in (shared / "models" / "stories260K").iterdir():
        shutil.copyfile(path, model / path.name)
    (model / "chat_template.jinja").write_text(
        "{% for message in messages %}{{ message['content'][-200:] }}\n{% endfor %}")
    vocabulary = json.loads((model / "tokenizer.json").read_text())["model"]["vocab"]
    (model / "generation_config.json").write_text(          # a reply is one sentence
        json.dumps({"bos_token_id": 1, "eos_token_id": [2, vocabulary["."]]}))
    url = f"http://127.0.0.1:{free_port()}"
    program = "import sys; from transformers.cli.transformers import main; main()"
    with subprocess.Popen([sys.executable, "-c", program, "serve", "--device", "cpu", "--port",
                           url.rpartition(":")[2], "--host", "127.0.0.1"],
                          stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            for _ in range(600):
                assert process.poll() is None, "transformers serve has ended"
                try:
                    urllib.request.urlopen(f"{url}/health", timeout=5).close()
                    break
                except OSError:
                    time.sleep(0.2)
            yield f"{url}/v1", str(model)
        finally:
            process.terminate()


def test_transformers_serve_annotates_and_judges(transformers_serve, tmp_path, monkeypatch):
    """Its sentences are critiques in the test's mode; they hold no verdict of a judge."""
    url, model = transformers_serve
    mode = Mode("Judge.", {"textual_feedback": "…"}, any_text)
    monkeypatch.setitem(sys.modules, "mode_of_the_test", SimpleNamespace(MODE=mode))
    write_rows(tmp_path / "rows.jsonl", [
        {"id": f"row-{i}", "prompt": "Tell me more.", "response": f"Once there were {i} cats."}
        for i in range(5)])
    output = tmp_path / "f.jsonl"
    config = AnnotateConfig(
        task="ultrafeedback", data=str(tmp_path / "rows.jsonl"), output=str(output),
        mode="mode_of_the_test:MODE", annotator_model=model, base_url=url, **PRICES)
    annotate(config)
    journal = Path(f"{output}.journal")
    before = journal.read_bytes()
    records = [json.loads(line) for line in before.splitlines()]
    usages = [record["usage"] for record in records if "reply" in record]
    assert len(records) == 10 and len(usages) == 5
    assert all(10 < usage["prompt_tokens"] < 400 for usage in usages)
    assert all(usage["completion_tokens"] for usage in usages)
    assert all(row["critique"] and row["usd"] > 0 for row in read_rows(output))
    annotate(config)
    assert journal.read_bytes() == before, "the second run has sent a request"

    judge = JudgeConfig(judge_model=model, base_url=url, judge_tokens=60)
    pairs = pairwise_questions([{"id": "a", "prompt": "Which?"}], ["Cats."], ["Dogs."], judge)
    verdicts = ask_judge(pairs, judge, tmp_path / "judge.journal")
    assert len(verdicts) == 2 and all("no verdict" in verdict["reason"] for verdict in verdicts)
