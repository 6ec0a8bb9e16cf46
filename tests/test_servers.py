"""Any server: seventy behaviours against caps and concurrency, and what a run does with each.

Most servers here are functions behind a real openai client, in this process. Each bills by its
own rule. `SLOW=1` tries every cap with every concurrency and prints the table of FAULTS.md.
One test uses a server that nobody here wrote, `transformers serve` (extra `serving`).
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from dataclasses import dataclass, field
from email.utils import formatdate
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
KEY = "sk-loopback"                                              # set in conftest.py
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

    def __init__(self, monkeypatch, server=None):
        self.server = server
        self.requests = []                                       # bodies
        self.bills = [0.0]                                       # USD of each request
        self.answers = 0
        self.open = self.most_open = self.most_open_at_first = 0
        monkeypatch.setattr(openai, "AsyncOpenAI", self.connect)
        monkeypatch.setattr("ask.PAUSE", 0.0)

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


def questions(n: int, start=0) -> list[Question]:
    messages = [[{"role": "system", "content": "Judge the answer."},
                 {"role": "user", "content": f"An answer to judge, number {i}. " + "w " * 60}]
                for i in range(start, start + n)]
    return [Question(question_key(m), f"row-{i}", m) for i, m in enumerate(messages, start)]


def accept(_question, _text):
    return None


def run(world, path, n=3, cap=None, concurrency=1, review=accept, retries=2, start=0, **options):
    """Ask n questions → (records, message of the InputError or None, USD booked)."""
    server = Server("m", "http://u:pass-word@h/v1", max_tokens=MAX_TOKENS, retries=retries,
                    **options)
    message = None
    with Journal(path, *PRICES.values(), cap) as journal:
        try:
            ask(questions(n, start), journal, server, review, concurrency)
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


def full(body) -> tuple:
    return size(body), MAX_TOKENS


def usage(prompt, completion, total=None, **more) -> dict:
    return {"prompt_tokens": prompt, "completion_tokens": completion, **more} | (
        {} if total is None else {"total_tokens": total})


def lost(status=500, body=None, every=1, **more) -> Callable:
    """Bills the largest reply and fails, at every n-th request."""
    def server(request, number):
        if number % every:
            return completion()
        return Answer(body or error(status), status, full(request), **more)
    return server


def unbilled(body, status, n=10**9) -> Callable:
    return at_first(n, lambda _: Answer(body, status))


HTML = "<!doctype html>\n<title>Gateway</title>\x1b[31m"
CODE_IN_CHOICE = {"choices": [{"index": 0, "finish_reason": "error", "error": {"code": 502},
                               "message": {"role": "assistant", "content": "It is"}}]}
NULL_AND_ERROR = {"choices": [{"message": {"content": None}}], "error": {"code": 500}}
BARE_ERROR = {"choices": [{"finish_reason": "error", "message": {"content": ""}}]}
# Servers whose bill is at most what was asked for. Those that report report the truth, or
# nothing that can be used.
WITHIN = {
    "true": reports(usage), "true with total": reports(lambda p, c: usage(p, c, p + c)),
    "floats": reports(lambda p, c: usage(float(p), float(c))),
    "null total": reports(lambda p, c: usage(p, c) | {"total_tokens": None}),
    "details": reports(lambda p, c: usage(p, c, completion_tokens_details=None)),
    "reasoning outside": reports(lambda p, c: usage(p, 3, p + c)),
    "all reasoning outside": reports(lambda p, c: usage(p, 0, p + c)),
    "cached prompt": reports(lambda p, c: usage(0, c, c)),
    "absent": reports(lambda p, c: None), "null": reports(lambda p, c: []),
    "empty": reports(lambda p, c: {}), "word": reports(lambda p, c: "many"),
    "list": reports(lambda p, c: [p, c]), "zeros": reports(lambda p, c: usage(0, 0, 0)),
    "total only": reports(lambda p, c: {"total_tokens": p + c}),
    "no prompt": reports(lambda p, c: {"completion_tokens": 1}),
    "no completion": reports(lambda p, c: {"prompt_tokens": 3}),
    "anthropic names": reports(lambda p, c: {"input_tokens": p, "output_tokens": c}),
    "texts": reports(lambda p, c: usage(str(p), str(c))),
    "booleans": reports(lambda p, c: usage(True, True)),
    "fractions": reports(lambda p, c: usage(1.5, 1.5)),
    "negative": reports(lambda p, c: usage(-p, -c)),
    "NaN": reports(lambda p, c: usage(float("nan"), float("nan"))),
    "infinite": reports(lambda p, c: usage(float("inf"), float("inf"))),
    "5,000 digits": lambda body, number: Answer(
        json.dumps(completion(usage("N", "N")).body).replace('"N"', "9" * 5000), billed=(40, 60)),
    "nulls": reports(lambda p, c: usage(None, None)),
    "content in parts": reports(usage, content=[{"type": "text", "text": "fine"}]),
    "cut off": reports(usage, finish="length"), "filtered": reports(usage, content=None),
    "500 billed": lost(), "502 HTML billed": lost(502, HTML), "503 billed": lost(503),
    "504 billed": lost(504, HTML), "524 billed": lost(524, "timeout"), "529 billed": lost(529),
    "408 billed": lost(408), "every second 500": lost(every=2), "every third 503": lost(503, every=3),
    "500 in 200 billed": lambda body, n: Answer(error(500), billed=full(body)),
    "error in a choice": lambda body, n: Answer(CODE_IN_CHOICE, billed=full(body)),
    "null and error": lambda body, n: Answer(NULL_AND_ERROR, billed=full(body)),
    "finish_reason error": lambda body, n: Answer(BARE_ERROR, billed=full(body)),
    "reset after billing": lost(error=httpx.ReadError("reset")),
    "every second reset": lost(every=2, error=httpx.RemoteProtocolError("closed")),
    "timeout after billing": lost(wait=9), "every third timeout": lost(every=3, wait=9),
    "500, nothing generated": unbilled(error(500, "Overloaded; nothing was generated."), 500),
    "no connection": at_first(10**9, lambda _: Answer(error=httpx.ConnectError("refused"))),
    "429": unbilled(error(None), 429), "429 twice": unbilled(error(None), 429, 2),
    "429 in 200": unbilled(error(429), 200), "429 in 200 twice": unbilled(error(429), 200, 2),
    "401": unbilled(error(None), 401), "403": unbilled(error(None), 403),
    "404": unbilled(HTML, 404), "400": unbilled(error(None), 400), "302": unbilled("", 302),
    "HTML billed": lambda body, n: Answer(HTML, billed=full(body)),
    "nothing billed": lambda body, n: Answer("", billed=full(body)),
    "event stream": lambda body, n: Answer('data: {"choices": []}\n\n', billed=full(body)),
    "HTML later": lambda body, n: (completion(billed=full(body)) if n < 3
                                   else Answer(HTML, billed=full(body))),
    "no choices": reports(usage, content=7),
    "top_p refused": lambda body, n: (Answer(error(400, "top_p?"), 400) if "top_p" in body
                                      else completion(billed=full(body))),
}
# Servers that bill more than was asked for, and say so.
EXCEEDING = {
    "2.5 times": exceeds(2.5, 2.5), "9 times": exceeds(9, 9), "40 times the reply": exceeds(1, 40),
    "3 times the prompt": exceeds(3, 1),
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
def test_the_cap_holds_and_the_bill_is_booked(monkeypatch, tmp_path, kind, capsys):
    """Two runs each. Also: no usable reply is bought twice, and the first request is alone."""
    number = [*KINDS].index(kind)
    n = 80 if SLOW else 20
    for cap, concurrency in SETTINGS if SLOW else {SETTINGS[number % 9], SETTINGS[5]}:
        world = World(monkeypatch, KINDS[kind])
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
            elif booked > dollars:
                assert "reached" in message and "h/v1/ with model 'm'" in message
        assert world.most_open_at_first == 1
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        usable = [line["key"] for line in lines if "reply" in line and not line["reason"]]
        assert len(set(usable)) == len(usable)
