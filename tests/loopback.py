"""A fake OpenAI-compatible server that answers, delays or fails requests and counts them.

    python tests/loopback.py '{"delay": 0.2}'          # prints its URL and runs until killed
    with loopback(faults={"429": 0.1}) as server: ...  # in a thread, or with process=True in a
                                                       # separate process

It serves chat completions and needs only the standard library. Whether a call fails depends on
the seed, the prompt and the number of earlier requests with that prompt, so a run meets the
same faults in any order of arrival. GET /stats returns the counts and the bill. `tokens` counts
the billed tokens, so that tests can recompute every bill. A reply is billed when it is
generated, even if the server reports a false usage or the reply never arrives.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import random
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
from dataclasses import asdict, dataclass, field
from http import HTTPStatus
from typing import Callable

MIX = {"429": 0.10, "500": 0.05, "timeout": 0.03, "garbage": 0.02, "truncated": 0.01}

# Faults of complete replies that report a false usage: name → the `usage` field of the reply.
REPORTS = {
    "unreported": None,
    "total": {"total_tokens": 12},
    "counts": {"prompt_tokens": None, "completion_tokens": None},
    "no_prompt": {"completion_tokens": 1},
    "negative": {"prompt_tokens": -9000, "completion_tokens": -9000},
}


@dataclass
class Settings:
    """Behaviour of the server; a server in a thread accepts changes while it runs."""
    delay: float = 0.0                  # seconds before each answer
    seed: int = 0                       # random seed of the faults
    faults: dict = field(default_factory=dict)      # name in `Server._fault` → share of calls
    plan: list = field(default_factory=list)        # faults of the first calls; "ok" for none
    hang: float = 600.0                 # seconds before "timeout" closes the connection
    only_default_sampling: bool = False  # reject `temperature`, like hosted reasoning models
    key: str = ""                       # API key; requests with another key get a 401
    models: list = field(default_factory=list)      # other models get a 404; empty: allow all
    context: int = 0                    # context length in tokens; 0: no limit
    counting: str = "quarters"          # how `tokens` counts: "quarters" or "pieces"
    responder: object = None            # function (request body) → reply text


def digest(text: str) -> str:
    """Hash of a user message, under which /stats counts its requests."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


_PIECES = re.compile(r" ?[^\W\d_]{1,8}|\d{1,3}| ?[^\w\s]{1,3}|_|\s+")


def tokens(text: str, counting: str = "quarters") -> int:
    """Count tokens of four characters ("quarters"), or short words and numbers ("pieces")."""
    return math.ceil(len(text) / 4) if counting == "quarters" else len(_PIECES.findall(text))


def prompt_tokens(messages: list[dict], counting: str = "quarters") -> int:
    """Tokens of all messages, plus three per message and three for the start of the reply."""
    return 3 + sum(3 + tokens(message.get("content") or "", counting) for message in messages)


def critique(body: dict) -> str:
    """A valid reply, whose quotes have one to three words and occur once in the response."""
    user = body["messages"][-1]["content"]
    fence = re.search(r"<response[^>]*>\n?(.*?)\n?</response[^>]*>(?!.*</response)", user,
                       re.DOTALL)
    response = fence[1] if fence else user
    words = [match.span() for match in re.finditer(r"\S+", response[:20_000])]
    rng = random.Random(digest(user))
    quotes = []
    for _ in range(8 if words else 0):
        first = rng.randrange(len(words))
        last = min(first + rng.randrange(3), len(words) - 1)
        quote = response[words[first][0] : words[last][1]]
        if response.count(quote) == 1 and not any(quote in q or q in quote for q in quotes):
            quotes.append(quote)
    value = {"textual_feedback":
             f"Of {len(words)} words, {len(quotes[:3])} parts are worth a remark.",
             "good_spans": quotes[:2], "poor_spans": quotes[2:3]}
    if "reasoning" in str(body["messages"][0].get("content")):
        value = {"reasoning": "I read the response part by part.", **value}
    return f"Here is what I found.\n\n```json\n{json.dumps(value, ensure_ascii=False)}\n```"


# ── The server

@dataclass
class Answer:
    """An HTTP answer of the server."""
    status: int | None              # None: send nothing, close the connection after `wait`
    body: dict | bytes = b""
    wait: float = 0.0                               # seconds before the answer
    usage: dict = field(default_factory=dict)       # billed tokens
    drip: float = 0.0                               # seconds between two bytes of the body


def openai_error(status: int, message: str, code=None) -> Answer:
    """An error in OpenAI's format."""
    return Answer(status, {"error": {"message": message, "code": code}})


class Server:
    """The settings of a server and the counts of its requests."""

    def __init__(self, settings: Settings):
        self.settings = settings
        self.calls = 0                              # chat completions requested
        self.billed = Counter(prompt_tokens=0, completion_tokens=0)
        self.statuses = Counter()                   # HTTP statuses of delivered answers
        self.faults = Counter()
        self.prompt_counts = Counter()              # digest of the prompt → requests
        self.recent = deque(maxlen=5)               # bodies of the latest requests

    def stats(self) -> dict:
        return {"calls": self.calls, "statuses": self.statuses, "faults": self.faults,
                "asked": self.prompt_counts, "recent": list(self.recent), **self.billed}

    def chat(self, body: dict) -> Answer:
        """Answer one request and bill it."""
        self.calls += 1
        self.recent.append(body)
        prompt = digest(body["messages"][-1]["content"])
        self.prompt_counts[prompt] += 1
        refusal = self._refusal(body)
        if refusal:
            return refusal
        fault = self._next_fault(prompt)
        if fault:
            self.faults[fault] += 1
        answer = self._fault(fault, body) or self._completion(body, self._reply(body))
        hang = self.settings.hang
        waits = {"timeout": hang, "late": hang, "429": 0, "quota": 0}
        answer.wait = waits.get(fault, self.settings.delay)
        answer.drip = 0.5 if fault == "drip" else 0.0
        if fault == "reset":
            answer.status = None
        self.billed.update(answer.usage)
        return answer

    def _next_fault(self, prompt: str) -> str:
        """The name of the next call's fault; "" if it has none."""
        if self.calls <= len(self.settings.plan):
            fault = str(self.settings.plan[self.calls - 1])
            return "" if fault == "ok" else fault
        hash_text = f"{self.settings.seed}/{prompt}/{self.prompt_counts[prompt]}"
        chance = int(digest(hash_text), 16) / 16 ** 16
        for fault, share in self.settings.faults.items():
            chance -= share
            if chance < 0:
                return fault
        return ""

    def _refusal(self, body: dict) -> Answer | None:
        """The error for a request that the settings do not allow, or None."""
        settings = self.settings
        if settings.models and body.get("model") not in settings.models:
            return openai_error(404, f"The model `{body.get('model')}` does not exist or you "
                                "do not have access to it.")
        if settings.only_default_sampling and "max_tokens" in body:
            return openai_error(400, "Unsupported parameter: 'max_tokens' is not supported "
                                "with this model. Use 'max_completion_tokens' instead.")
        if settings.only_default_sampling and {"temperature", "top_p"} & set(body):
            return openai_error(400, "Unsupported value: 'temperature' is not supported.")
        size = prompt_tokens(body["messages"], settings.counting)
        if settings.context and size > settings.context:
            return openai_error(400, "This model's maximum context length is "
                                f"{settings.context} tokens. However, your messages resulted "
                                f"in {size} tokens.")
        return None

    def _fault(self, fault: str, body: dict) -> Answer | None:
        """The answer with this fault; None where the usual completion is sent."""
        text = self._reply(body) if fault == "truncated" else ""
        if fault in REPORTS:
            return self._completion(body, self._reply(body), reported=REPORTS[fault])
        return {
            "": lambda: None, "reset": lambda: None, "late": lambda: None, "drip": lambda: None,
            "400": lambda: openai_error(400, "Bad request."),
            "error200": lambda: openai_error(200, "The provider has gone to lunch.", 502),
            "429": lambda: openai_error(429, "Rate limit reached for requests."),
            "quota": lambda: openai_error(429, "You exceeded your current quota.",
                                          "insufficient_quota"),
            "500": lambda: openai_error(500, "The server had an error."),
            "timeout": lambda: Answer(None),
            "garbage": lambda: self._completion(
                body, "I am sorry, I would rather talk about the weather {today}."),
            "truncated": lambda: self._completion(body, text[: len(text) * 2 // 3], "length"),
            "filter": lambda: self._completion(body, None, "content_filter"),
            "empty": lambda: self._completion(body, "", choices=False),
            "null": lambda: self._completion(body, None),
            "invalid": lambda: Answer(200, b'{"id": "chatcmpl-1", "choices": [{"index"'),
        }[fault]()

    def _reply(self, body: dict) -> str:
        return (self.settings.responder or critique)(body)

    def _completion(self, body: dict, text: str | None, finish="stop", choices=True,
                    reported: dict | None = {}) -> Answer:
        counting = self.settings.counting
        max_tokens = body.get("max_completion_tokens") or body.get("max_tokens") or math.inf
        if tokens(text or "", counting) > max_tokens:
            finish = "length"
            text = (text[: max_tokens * 4] if counting == "quarters"
                    else "".join(_PIECES.findall(text)[:max_tokens]))
        usage = {"prompt_tokens": prompt_tokens(body["messages"], counting),
                 "completion_tokens": tokens(text or "", counting)}
        message = {"role": "assistant", "content": text}
        choice = {"index": 0, "message": message, "finish_reason": finish}
        completion = {"id": f"chatcmpl-{self.calls}", "object": "chat.completion",
                      "created": int(time.time()), "model": body.get("model"),
                      "choices": [choice] if choices else []}
        if reported is not None:
            completion["usage"] = reported or {**usage, "total_tokens": sum(usage.values())}
        return Answer(200, completion, usage=usage)

    def route(self, path: str, head: bytes, content: bytes) -> tuple[Answer, bool]:
        """(answer, whether it is that of a chat completion)."""
        if path == "/stats":
            return Answer(200, self.stats()), False
        if path != "/v1/chat/completions":
            return openai_error(404, f"Unknown request: {path}"), False
        if self.settings.key and f"Bearer {self.settings.key}\r".encode() not in head:
            return openai_error(401, "Incorrect API key provided."), False
        return self.chat(json.loads(content)), True

    async def connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        """Answer the requests of one connection until either side closes it."""
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                path = head.split(b" ")[1].decode("latin-1")
                length = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
                content = await reader.readexactly(int(length[1])) if length else b""
                answer, is_chat = self.route(path, head, content)
                await self._send(reader, writer, answer, is_chat)
                if answer.status is None or re.search(rb"(?i)\r\nconnection: *close", head):
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass                                              # the client has disconnected
        finally:
            writer.close()

    async def _send(self, reader, writer, answer: Answer, is_chat: bool):
        if answer.status is None:  # reading ends early if the client disconnects
            await asyncio.wait([asyncio.ensure_future(reader.read(1))], timeout=answer.wait)
            if answer.usage:       # "reset": close with RST instead of FIN
                linger = socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
                writer.get_extra_info("socket").setsockopt(*linger)
            return
        if answer.wait:
            await asyncio.sleep(answer.wait)
        if reader.at_eof():        # the client was killed and receives nothing
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
        self.statuses[str(answer.status)] += is_chat
        await writer.drain()

    async def serve(self, ready: Callable[[str], None], stop: asyncio.Event):
        """Listen until `stop` is set; calls ready(url) once with the base URL."""
        listener = await asyncio.start_server(self.connection, "127.0.0.1", 0, backlog=1024)
        ready(f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}/v1")
        await stop.wait()
        listener.close()


# ── Starting a server

@dataclass
class Running:
    """A handle of a running server."""
    url: str = ""                       # the base URL
    settings: Settings | None = None    # None for a server in another process

    def stats(self) -> dict:
        """The reply to GET /stats."""
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with direct.open(self.url.removesuffix("/v1") + "/stats", timeout=30) as answer:
            return json.load(answer)


def loopback(process: bool = False, **settings):
    """Run a server during a `with` block: in a thread, or in a separate process."""
    return (_in_process if process else _in_thread)(Settings(**settings))


@contextmanager
def _in_process(settings: Settings):
    with subprocess.Popen([sys.executable, __file__, json.dumps(asdict(settings))],
                          stdout=subprocess.PIPE, text=True) as child:
        try:
            yield Running(child.stdout.readline().strip())
        finally:
            child.terminate()


@contextmanager
def _in_thread(settings: Settings):
    running = Running(settings=settings)
    loop = asyncio.new_event_loop()
    started = threading.Event()
    stop = asyncio.Event()

    def ready(url: str):
        running.url = url
        started.set()

    async def main():
        await Server(running.settings).serve(ready, stop)
        connections = asyncio.all_tasks() - {asyncio.current_task()}
        for task in connections:
            task.cancel()
        await asyncio.gather(*connections, return_exceptions=True)

    thread = threading.Thread(target=lambda: loop.run_until_complete(main()), daemon=True)
    thread.start()
    assert started.wait(30), "the loopback server did not start within 30 s"
    try:
        yield running
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()


def main():
    """Run a server with the JSON settings in argv[1] until killed; prints its base URL."""
    server = Server(Settings(**json.loads(sys.argv[1])))
    asyncio.run(server.serve(lambda url: print(url, flush=True), asyncio.Event()))


if __name__ == "__main__":
    main()
