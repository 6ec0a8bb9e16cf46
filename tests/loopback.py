"""An OpenAI-compatible server that answers at once, late, wrongly or never,
and counts what it is asked.

    python tests/loopback.py '{"delay": 0.2}'          # prints its URL, runs until it is killed
    with loopback(faults={"429": 0.1}) as server: ...  # in a thread;
                                                       process=True: in a process of its own

Chat completions; the standard library only. Whether a call fails is a function of the
seed, the prompt and how often that prompt was asked, so a run meets the same faults in any
order of arrival. GET /stats says what was asked and billed. `tokens` is the rule of the bill,
so that every bill can be recomputed. A reply is billed once it is made, whatever is reported of
it, and whether or not it arrives.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import re
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter, deque
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Callable

MIX = {"429": 0.10, "500": 0.05, "timeout": 0.03, "garbage": 0.02, "truncated": 0.01}

# Kinds of a whole reply, and what is then said of its bill.
REPORTS = {
    "unreported": None,
    "total": {"total_tokens": 12},
    "counts": {"prompt_tokens": None, "completion_tokens": None},
    "no_prompt": {"completion_tokens": 1},
    "negative": {"prompt_tokens": -9000, "completion_tokens": -9000},
}


@dataclass
class Settings:
    """How the server behaves; in a thread, `server.settings` may be changed while it runs."""
    delay: float = 0.0                  # seconds before an answer
    seed: int = 0                       # of the faults
    # kind → share of the calls; the kinds are those of `Server._fault`
    faults: dict = field(default_factory=dict)
    # kinds for the first calls in order of arrival, "ok" for none
    plan: list = field(default_factory=list)
    hang: float = 600.0  # seconds that "timeout" keeps the connection open before it closes it
    # or the only one taken: "max_tokens", "max_completion_tokens" (and then no temperature or
    # top_p but 1, as with models that reason first)
    token_parameter: str = "either"
    key: str = ""                       # else 401
    models: list = field(default_factory=list)      # else 404; empty: every name
    context: int = 0                    # tokens; a longer prompt gets a 400; 0: no limit
    counting: str = "quarters"          # of `tokens`
    responder: object = None            # function (request body) → reply text


def digest(text: str) -> str:
    """Under this name /stats counts how often a user message was asked."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


_PIECES = re.compile(r" ?[^\W\d_]{1,8}|\d{1,3}| ?[^\w\s]{1,3}|_|\s+")


def tokens(text: str, counting: str = "quarters") -> int:
    """By "quarters" a token is four characters, rounded up;
    by "pieces" a short word, a number or a few marks."""
    return math.ceil(len(text) / 4) if counting == "quarters" else len(_PIECES.findall(text))


def prompt_tokens(messages: list[dict], counting: str = "quarters") -> int:
    """Tokens of all messages; each costs three more, and the reply's opening three."""
    return 3 + sum(3 + tokens(message.get("content") or "", counting) for message in messages)


def user_message(body: dict) -> str:
    """The last message of the user."""
    said = [m["content"] for m in body["messages"]
            if m.get("role") == "user" and isinstance(m.get("content"), str)]
    return said[-1] if said else ""


def critique(body: dict) -> str:
    """A reply that grounds: quotes of one to three words
    that occur once in the response of the last user message."""
    user = user_message(body)
    inside = re.search(r"<response[^>]*>\n?(.*?)\n?</response[^>]*>(?!.*</response)", user,
                       re.DOTALL)
    response = inside[1] if inside else user
    words, chance = ([match.span() for match in re.finditer(r"\S+", response[:20_000])],
                     int(digest(user), 16))
    quotes = []
    for k in range(8):
        first = (chance >> 4 * k) % max(len(words), 1)
        last = min(first + (chance >> 2 * k) % 3, len(words) - 1)
        quote = response[words[first][0] : words[last][1]] if words else ""
        if (quote and response.count(quote) == 1
                and not any(quote in q or q in quote for q in quotes)):
            quotes.append(quote)
    value = {"textual_feedback":
             f"Of {len(words)} words, {len(quotes[:3])} parts are worth a remark.",
             "good_spans": quotes[:2], "poor_spans": quotes[2:3]}
    if "reasoning" in str(body["messages"][0].get("content")):
        value = {"reasoning": "I read the response part by part.", **value}
    return f"Here is what I found.\n\n```json\n{json.dumps(value, ensure_ascii=False)}\n```"


# ── Answers

@dataclass
class Answer:
    """What goes back; no status: nothing, and the connection closes after `wait` seconds."""
    status: int | None
    body: dict | bytes = b""
    wait: float = 0.0
    usage: dict = field(default_factory=dict)       # what is billed
    drip: float = 0.0                               # seconds between two bytes of the body


def failed(status: int, message: str, code=None, param=None, kind="invalid_request_error",
           **more) -> Answer:
    """An error in OpenAI's form."""
    return Answer(status, {"error": {"message": message, "type": kind, "param": param,
                                     "code": code}},
                  **more)


class Server:
    """Settings, and what was asked so far."""

    def __init__(self, settings: Settings):
        self.settings = settings
        self.calls, self.billed = 0, Counter(prompt_tokens=0, completion_tokens=0)
        self.statuses, self.faults, self.asked = Counter(), Counter(), Counter()
        self.recent = deque(maxlen=5)

    def stats(self) -> dict:
        """Calls are chat completions; statuses: of those that went back to a client."""
        return {"calls": self.calls, "statuses": self.statuses, "faults": self.faults,
                "asked": self.asked, "recent": list(self.recent), **self.billed}

    # Chat completions

    def chat(self, body: dict) -> Answer:
        """The answer to one request, which is billed at once."""
        self.calls += 1
        self.recent.append(body)
        name = digest(user_message(body))
        self.asked[name] += 1
        refused = self._refused(body)
        if refused:
            return refused
        s, kind = self.settings, self._kind(name)
        if kind:
            self.faults[kind] += 1
        answer = self._fault(kind, body) or self._completion(body, self._reply(body))
        slow = kind in ("timeout", "late")
        answer.wait = s.hang if slow else 0 if kind in ("429", "quota") else s.delay
        answer.drip = 0.5 if kind == "drip" else 0.0
        if kind == "reset":
            answer.status = None
        self.billed.update(answer.usage)
        return answer

    def _kind(self, name: str) -> str:
        if self.calls <= len(self.settings.plan):
            kind = str(self.settings.plan[self.calls - 1])
            return "" if kind == "ok" else kind
        chance = int(digest(f"{self.settings.seed}/{name}/{self.asked[name]}"), 16) / 16 ** 16
        for kind, share in self.settings.faults.items():
            chance -= share
            if chance < 0:
                return kind
        return ""

    def _refused(self, body: dict) -> Answer | None:
        s = self.settings
        if s.models and body.get("model") not in s.models:
            return failed(404, f"The model `{body.get('model')}` does not exist or you do not "
                          "have access to it.", "model_not_found")
        if s.token_parameter == "max_tokens" and "max_completion_tokens" in body:
            return failed(400, "Unrecognized request argument supplied: max_completion_tokens")
        if s.token_parameter == "max_completion_tokens":
            if "max_tokens" in body:
                return failed(400, "Unsupported parameter: 'max_tokens' is not supported with "
                              "this model. Use 'max_completion_tokens' instead.",
                              "unsupported_parameter", "max_tokens")
            for name in ("temperature", "top_p"):
                if body.get(name, 1) != 1:
                    return failed(400,
                                  f"Unsupported value: '{name}' does not support {body[name]} "
                                  "with this model. Only the default (1) value is supported.",
                                  "unsupported_value", name)
        asked = prompt_tokens(body["messages"], s.counting)
        if s.context and asked > s.context:
            return failed(400, f"This model's maximum context length is {s.context} tokens. "
                          f"However, your messages resulted in {asked} tokens. "
                          "Please reduce the length of the messages.",
                          "context_length_exceeded", "messages")
        return None

    def _fault(self, kind: str, body: dict) -> Answer | None:
        """The answer that goes wrong in the way of that kind, or None where nothing does."""
        text = self._reply(body) if kind == "truncated" else ""
        if kind in REPORTS:
            return self._completion(body, self._reply(body), reported=REPORTS[kind])
        return {
            "": lambda: None, "reset": lambda: None, "late": lambda: None, "drip": lambda: None,
            "400": lambda: failed(400, "Bad request."),
            "error200": lambda: failed(200, "The provider has gone to lunch.", 502),
            "429": lambda: failed(429, "Rate limit reached for requests.",
                                  "rate_limit_exceeded", kind="requests"),
            "quota": lambda: failed(429, "You exceeded your current quota, please check your "
                                    "plan and billing details.", "insufficient_quota",
                                    kind="insufficient_quota"),
            "500": lambda: failed(500, "The server had an error while processing your request.",
                                  kind="server_error"),
            "timeout": lambda: Answer(None),
            "garbage": lambda: self._completion(
                body, "I am sorry, I would rather talk about the weather {today}."),
            "truncated": lambda: self._completion(body, text[: len(text) * 2 // 3], "length"),
            "filter": lambda: self._completion(body, None, "content_filter"),
            "empty": lambda: self._completion(body, "", choices=False),
            "null": lambda: self._completion(body, None),
            "invalid": lambda: Answer(200, b'{"id": "chatcmpl-1", "choices": [{"index"'),
        }[kind]()

    def _reply(self, body: dict) -> str:
        return (self.settings.responder or critique)(body)

    def _completion(self, body: dict, text: str | None, finish="stop", choices=True,
                    reported: dict | None = {}) -> Answer:
        counting = self.settings.counting
        most = body.get("max_completion_tokens") or body.get("max_tokens") or math.inf
        if tokens(text or "", counting) > most:
            finish = "length"
            text = (text[: most * 4] if counting == "quarters"
                    else "".join(_PIECES.findall(text)[:most]))
        asked, said = prompt_tokens(body["messages"], counting), tokens(text or "", counting)
        usage = {"prompt_tokens": asked, "completion_tokens": said}
        message = {"role": "assistant", "content": text, "refusal": None}
        whole = {
            "id": f"chatcmpl-{self.calls}", "object": "chat.completion",
            "created": int(time.time()), "model": body.get("model"),
            "choices": [{"index": 0, "message": message, "finish_reason": finish,
                         "logprobs": None}] if choices else []}
        if reported is not None:
            whole["usage"] = reported or {**usage, "total_tokens": asked + said}
        return Answer(200, whole, usage=usage)

    # Routes

    def route(self, method: str, path: str, head: bytes,
              content: bytes) -> tuple[Answer, dict | None]:
        """The answer to a request, and the body of a chat completion,
        which is counted when it is given."""
        if path == "/stats":
            return Answer(200, self.stats()), None
        key = re.search(rb"(?i)\r\nauthorization: *bearer ([^\r]*)", head)
        if self.settings.key and (not key
                                  or key[1].decode("latin-1").strip() != self.settings.key):
            return failed(401, "Incorrect API key provided.", "invalid_api_key"), None
        try:
            body = json.loads(content) if content else {}
        except ValueError:
            return failed(400, "We could not parse the JSON body of your request."), None
        if (method, path) == ("POST", "/v1/chat/completions"):
            if (not isinstance(body, dict) or not isinstance(body.get("messages"), list)
                    or not body["messages"]):
                return failed(400, "Missing required parameter: 'messages'.",
                              param="messages"), None
            return self.chat(body), body
        return failed(404, f"Unknown request: {method} {path}"), None

    # HTTP/1.1

    async def connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        """Answer the requests of one connection until either side closes it."""
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                method, target, _ = head[: head.index(b"\r\n")].decode("latin-1").split(" ", 2)
                length = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
                content = await reader.readexactly(int(length[1])) if length else b""
                path = target.partition("?")[0]
                answer, chat = self.route(method, path.rstrip("/"), head, content)
                await self._give(reader, writer, answer, chat)
                if answer.status is None or re.search(rb"(?i)\r\nconnection: *close", head):
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass                                              # the client has gone
        finally:
            writer.close()

    async def _give(self, reader, writer, answer: Answer, chat: dict | None):
        if answer.status is None:  # nobody waits longer than the client does
            self.statuses["none"] += 1
            await asyncio.wait([asyncio.ensure_future(reader.read(1))], timeout=answer.wait)
            if answer.usage:                                # reset, where else it is closed
                hard = socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
                writer.get_extra_info("socket").setsockopt(*hard)
            return
        if answer.wait:
            await asyncio.sleep(answer.wait)
        if reader.at_eof():  # killed while it waited: nothing was delivered
            raise ConnectionResetError
        body = (json.dumps(answer.body).encode() if isinstance(answer.body, dict)
                else answer.body)
        lines = (f"HTTP/1.1 {answer.status} {HTTPStatus(answer.status).phrase}",
                 "Content-Type: application/json", f"Content-Length: {len(body)}")
        writer.write("\r\n".join(lines).encode() + b"\r\n\r\n")
        for byte in body if answer.drip else ():
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(answer.drip)
        writer.write(b"" if answer.drip else body)
        self.statuses[str(answer.status)] += chat is not None
        await writer.drain()

    async def serve(self, port: int, ready: Callable[[str], None], stop: asyncio.Event):
        """Listen until `stop` is set; ready(url) is called once with the base URL."""
        listener = await asyncio.start_server(self.connection, "127.0.0.1", port, backlog=1024)
        ready(f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}/v1")
        await stop.wait()
        listener.close()


# ── Starting it

@dataclass
class Running:
    """A server that runs: its base URL, and its settings where it runs in this process."""
    url: str = ""
    settings: Settings | None = None

    def stats(self) -> dict:
        """What GET /stats says."""
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with direct.open(self.url.removesuffix("/v1") + "/stats", timeout=30) as answer:
            return json.load(answer)


@contextmanager
def loopback(process: bool = False, **settings):
    """A server for the length of a `with` block: in a thread, or in a process,
    which leaves this one its core."""
    Settings(**settings)  # an unknown name is an error here
    with (_in_process if process else _in_thread)(settings) as running:
        yield running


@contextmanager
def _in_process(settings: dict):
    with subprocess.Popen([sys.executable, __file__, json.dumps(settings)],
                          stdout=subprocess.PIPE, text=True) as child:
        try:
            yield Running(child.stdout.readline().strip())
        finally:
            child.terminate()


@contextmanager
def _in_thread(settings: dict):
    running, started, loop = (Running(settings=Settings(**settings)), threading.Event(),
                              asyncio.new_event_loop())
    stop = asyncio.Event()

    def ready(url: str):
        running.url = url
        started.set()

    async def main():
        await Server(running.settings).serve(0, ready, stop)
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    thread = threading.Thread(target=lambda: loop.run_until_complete(main()), daemon=True)
    thread.start()
    assert started.wait(30), "the server did not start"
    try:
        yield running
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()


def main():
    """Run with the settings of the first argument, in JSON, until killed;
    prints the base URL."""
    server = Server(Settings(**json.loads(sys.argv[1])))
    asyncio.run(server.serve(0, lambda url: print(url, flush=True), asyncio.Event()))


if __name__ == "__main__":
    main()
