"""A fake OpenAI-compatible server: a function from the body of a request to its answer.

    with loopback() as server: ...       # the client of this process talks to it

Tests replace `server.answer(body, number)`, which returns an `Answer`, or `server.responder`,
a function (body) that returns only the text of a reply.
"""

from __future__ import annotations

import json
import re
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass

import openai
import pytest

httpx = sys.modules.get("httpx2") or sys.modules["httpx"]        # openai 3 uses httpx2


@dataclass
class Answer:
    """billed: (prompt, completion) tokens on the server's bill. body: a text or JSON."""
    body: object = ""
    status: int = 200
    billed: tuple = (0, 0)
    error: Exception | None = None                               # raised instead of an answer
    wait: float = 0.0


def completion(usage=..., content="fine", finish="stop", billed=(40, 60), **message) -> Answer:
    """A chat completion. usage: what it reports; by default what is billed."""
    if usage is ...:
        usage = {"prompt_tokens": billed[0], "completion_tokens": billed[1],
                 "total_tokens": sum(billed)}
    message = {"role": "assistant", "content": content, **message}
    body = {"id": "x", "choices": [{"index": 0, "message": message, "finish_reason": finish}]}
    return Answer(body if usage is None else {**body, "usage": usage}, billed=billed)


def critique(body: dict) -> str:
    """A valid reply, which quotes up to three words that occur once in the response."""
    user = body["messages"][-1]["content"]
    response = re.search(r"<response[^>]*>\n(.*?)\n</response", user, re.DOTALL)
    response = (response[1] if response else user)[:20_000]
    words = [word for word in response.split() if response.count(word) == 1][:3]
    return json.dumps({"reasoning": "I read it.", "textual_feedback": f"{len(words)} words.",
                       "good_spans": words[:2], "poor_spans": words[2:]})


class FakeServer:
    """Its answers, and what it counted."""

    def __init__(self, responder):
        self.url = "http://fake/v1"
        self.responder = responder
        self.lock = threading.Lock()
        self.requests = []                                       # bodies
        self.billed = []                                         # (prompt, completion) tokens
        self.open = 0                                            # requests without an answer

    def answer(self, body: dict, number: int) -> Answer:
        """The responder's text, billed at four characters per token."""
        text = self.responder(body)
        is_cut = len(text) // 4 > body["max_tokens"]
        text = text[: 4 * body["max_tokens"]]
        prompt = sum(len(message["content"]) for message in body["messages"]) // 4
        return completion(content=text, finish="length" if is_cut else "stop",
                          billed=(prompt, len(text) // 4))

    def reply(self, content: bytes) -> tuple[int, bytes]:
        """(status, body) of the answer to a request, which is counted and billed."""
        with self.lock:
            self.requests.append(json.loads(content))
            self.open += 1
            answer = self.answer(self.requests[-1], len(self.requests))
            self.billed.append(answer.billed)
        time.sleep(answer.wait)
        with self.lock:
            self.open -= 1
        if answer.error:
            raise answer.error
        text = answer.body if isinstance(answer.body, str) else json.dumps(answer.body)
        return answer.status, text.encode()


@contextmanager
def loopback(responder=critique):
    """Replace the network of openai's client by a FakeServer."""
    server = FakeServer(responder)

    def handle(request):
        status, content = server.reply(request.content)
        return httpx.Response(status, content=content)

    def client(**options):
        return real(http_client=httpx.Client(transport=httpx.MockTransport(handle)), **options)

    real = openai.OpenAI
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(openai, "OpenAI", client)
        yield server
