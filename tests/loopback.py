"""A fake OpenAI-compatible server: a function from the body of a request to its answer.

`loopback(responder)` puts it into openai's client. `billed`: (prompt, reply) tokens of each.
"""

import json
import re
import sys
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

import openai

httpx = sys.modules.get("httpx2") or sys.modules["httpx"]        # openai 3 uses httpx2


class Answer(NamedTuple):
    body: object = "{}"                          # a text, JSON, or an error of the connection
    status: int = 200
    billed: tuple = (0, 0)


def completion(content="fine", billed=(40, 60), usage=None, finish="stop", **message) -> Answer:
    """A chat completion. usage: what it reports; by default what is billed."""
    usage = usage or {"prompt_tokens": billed[0], "completion_tokens": billed[1]}
    choice = {"message": {"content": content, **message}, "finish_reason": finish}
    return Answer({"choices": [choice], "usage": usage}, billed=billed)


def critique(body: dict) -> str:
    """A valid reply, which quotes up to three words that occur once in the response."""
    user = body["messages"][-1]["content"]
    response = re.search(r"(?s)<response[^>]*>\n(.*?)\n</response", user)[1]
    words = [word for word in response.split() if response.count(word) == 1][:3]
    return json.dumps({"reasoning": "I read it.", "textual_feedback": f"{len(words)} words.",
                       "good_spans": words[:2], "poor_spans": words[2:]})


@contextmanager
def loopback(responder=critique):
    """responder(body) → an Answer, or a text, billed at four characters per token."""
    def handle(request):
        body = json.loads(request.content)
        server.requests.append(body)
        answer = server.responder(body)
        if isinstance(answer, str):
            answer = completion(answer, (len(request.content) // 4, len(answer) // 4))
        server.billed.append(answer.billed)
        if isinstance(answer.body, Exception):
            raise answer.body
        text = answer.body if isinstance(answer.body, str) else json.dumps(answer.body)
        return httpx.Response(answer.status, content=text.encode())

    server = SimpleNamespace(url="http://fake/v1", responder=responder, requests=[], billed=[])
    client = httpx.Client(transport=httpx.MockTransport(handle))
    with (mock.patch("openai.OpenAI", partial(openai.OpenAI, http_client=client)),
          mock.patch.dict("os.environ", OPENAI_API_KEY="sk-loopback")):
        yield server
