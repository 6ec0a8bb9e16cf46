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
    only_default_sampling: bool = False  # no temperature, as models that reason first
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


def critique(body: dict) -> str:
    """A reply that grounds: quotes of one to three words
    that occur once in the response of the last user message."""
    user = body["messages"][-1]["content"]
    inside = re.search(r"<response[^>]*>\n?(.*?)\n?</response[^>]*>(?!.*</response)", user,
                       re.DOTALL)
    response = inside[1] if inside else user
    words = [match.span() for match in re.finditer(r"\S+", response[:20_000])]
    rng, quotes = random.Random(digest(user)), []
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


# ── Answers

@dataclass
class Answer:
    """What goes back; no status: nothing, and the connection closes after `wait` seconds."""
    status: int | None
    body: dict | bytes = b""
    wait: float = 0.0
    usage: dict = field(default_factory=dict)       # what is billed
    drip: float = 0.0                               # seconds between two bytes of the body


def failed(status: int, message: str, code=None) -> Answer:
    """An error in OpenAI's form."""
    return Answer(status, {"error": {"message": message, "code": code}})


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
        name = digest(body["messages"][-1]["content"])
        self.asked[name] += 1
        refused = self._refused(body)
        if refused:
            return refused
        s, kind = self.settings, self._kind(name)
        if kind:
            self.faults[kind] += 1
        answer = self._fault(kind, body) or self._completion(body, self._reply(body))
        waits = {"timeout": s.hang, "late": s.hang, "429": 0, "quota": 0}
        answer.wait = waits.get(kind, s.delay)
        answer.drip = 0.5 if kind == "drip" else 0.0
        if kind == "reset":
            answer.status = None
        self.billed.update(answer.usage)
        return answer

    def _kind(self, name: str) -> str:
        """What goes wrong with the next call; "" for nothing."""
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
                          "have access to it.")
        if s.only_default_sampling and "max_tokens" in body:
            return failed(400, "Unsupported parameter: 'max_tokens' is not supported with this "
                          "model. Use 'max_completion_tokens' instead.")
        if s.only_default_sampling and {"temperature", "top_p"} & set(body):
            return failed(400, "Unsupported value: 'temperature' is not supported.")
        asked = prompt_tokens(body["messages"], s.counting)
        if s.context and asked > s.context:
            return failed(400, f"This model's maximum context length is {s.context} tokens. "
                          f"However, your messages resulted in {asked} tokens.")
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
            "429": lambda: failed(429, "Rate limit reached for requests."),
            "quota": lambda: failed(429, "You exceeded your current quota.",
                                    "insufficient_quota"),
            "500": lambda: failed(500, "The server had an error."),
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
        message = {"role": "assistant", "content": text}
        choice = {"index": 0, "message": message, "finish_reason": finish}
        whole = {"id": f"chatcmpl-{self.calls}", "object": "chat.completion",
                 "created": int(time.time()), "model": body.get("model"),
                 "choices": [choice] if choices else []}
        if reported is not None:
            whole["usage"] = reported or {**usage, "total_tokens": asked + said}
        return Answer(200, whole, usage=usage)

    def route(self, path: str, head: bytes, content: bytes) -> tuple[Answer, dict | None]:
        """The answer, and the body of a chat completion, which is counted when it is given."""
        if path == "/stats":
            return Answer(200, self.stats()), None
        if path != "/v1/chat/completions":
            return failed(404, f"Unknown request: {path}"), None
        if self.settings.key and f"Bearer {self.settings.key}\r".encode() not in head:
            return failed(401, "Incorrect API key provided."), None
        body = json.loads(content)
        return self.chat(body), body

    # HTTP/1.1

    async def connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        """Answer the requests of one connection until either side closes it."""
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                path = head.split(b" ")[1].decode("latin-1")
                length = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
                content = await reader.readexactly(int(length[1])) if length else b""
                answer, chat = self.route(path, head, content)
                await self._give(reader, writer, answer, chat)
                if answer.status is None or re.search(rb"(?i)\r\nconnection: *close", head):
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass                                              # the client has gone
        finally:
            writer.close()

    async def _give(self, reader, writer, answer: Answer, chat: dict | None):
        if answer.status is None:  # nobody waits longer than the client does
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

    async def serve(self, ready: Callable[[str], None], stop: asyncio.Event):
        """Listen until `stop` is set; ready(url) is called once with the base URL."""
        listener = await asyncio.start_server(self.connection, "127.0.0.1", 0, backlog=1024)
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


def loopback(process: bool = False, **settings):
    """A server for the length of a `with` block: in a thread, or in a process,
    which leaves this one its core."""
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
    running, loop = Running(settings=settings), asyncio.new_event_loop()
    started, stop = threading.Event(), asyncio.Event()

    def ready(url: str):
        running.url = url
        started.set()

    async def main():
        await Server(running.settings).serve(ready, stop)
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
    asyncio.run(server.serve(lambda url: print(url, flush=True), asyncio.Event()))


if __name__ == "__main__":
    main()
