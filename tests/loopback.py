"""A fake OpenAI-compatible server that answers, delays or fails requests and counts them.

    python tests/loopback.py '{"delay": 0.2}'          # prints its URL and runs until killed
    with loopback(faults={"429": 0.1}) as server: ...  # in a thread, or with process=True in a
                                                       # separate process

It serves chat completions and needs only the standard library. Whether a call fails depends on
the prompt and the number of earlier requests with it, so a run meets the same faults in any
order of arrival. GET /stats returns the counts and the bill. A reply is billed when it is
generated, even if it never arrives.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import select
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
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

MIX = {"429": 0.10, "500": 0.05, "timeout": 0.03, "garbage": 0.02, "truncated": 0.01}

# Other faults: "garbage" and "truncated" replies; "drip", a byte every 0.5 s; "timeout", no
# reply; "reset" and "late", a reply that is billed and does not arrive.
ERRORS = {                          # fault with this HTTP status → message; they are not billed
    "400": "Bad request.", "429": "Rate limit reached.", "500": "The server had an error."}


@dataclass
class Settings:
    """Behaviour of the server; a server in a thread accepts changes while it runs."""
    delay: float = 0.0                  # seconds before each answer
    faults: dict = field(default_factory=dict)      # fault → share of calls
    plan: list = field(default_factory=list)        # faults of the first calls; "ok" for none
    hang: float = 600.0                 # seconds before "timeout" closes the connection
    counting: str = "quarters"          # a key of TOKEN
    responder: object = None            # function (request body) → reply text


def digest(text: str) -> str:
    """Hash of a user message, under which /stats counts its requests."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


# How tokens are counted: four characters each, or short words and numbers.
TOKEN = {"quarters": re.compile("(?s).{1,4}"),
         "pieces": re.compile(r" ?[^\W\d_]{1,8}|\d{1,3}| ?[^\w\s]{1,3}|_|\s+")}


def critique(body: dict) -> str:
    """A valid reply, which quotes up to three words that occur once in the response."""
    user = body["messages"][-1]["content"]
    fence = re.search(r"<response[^>]*>\n?(.*?)\n?</response[^>]*>(?!.*</response)", user,
                      re.DOTALL)
    response = (fence[1] if fence else user)[:20_000]
    words = [word for word in response.split() if response.count(word) == 1][:3]
    value = {"textual_feedback": f"{len(words)} words are worth a remark.",
             "good_spans": words[:2], "poor_spans": words[2:]}
    if "reasoning" in body["messages"][0]["content"]:
        value = {"reasoning": "I read the response part by part.", **value}
    return f"Here is what I found.\n\n```json\n{json.dumps(value, ensure_ascii=False)}\n```"


# ── The server

@dataclass
class Answer:
    """An HTTP answer of the server."""
    status: int | None              # None: send nothing and close the connection
    body: dict = field(default_factory=dict)
    usage: dict = field(default_factory=dict)       # billed tokens


class Server(ThreadingHTTPServer):
    """The settings of a server and the counts of its requests."""

    request_queue_size = 1024
    daemon_threads = True

    def __init__(self, settings: Settings):
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}/v1"
        self.settings = settings
        self.lock = threading.RLock()               # one request at a time changes the counts
        self.calls = 0                              # chat completions requested
        self.billed = Counter(prompt_tokens=0, completion_tokens=0)
        self.prompt_counts = Counter()              # digest of the prompt → requests
        self.recent = deque(maxlen=5)               # bodies of the latest requests

    def handle_error(self, request, client_address):
        """Report no error: the clients of these tests disconnect at any time."""

    def stats(self) -> dict:
        """The counts and the bill."""
        with self.lock:
            return {"calls": self.calls, "asked": dict(self.prompt_counts),
                    "recent": list(self.recent), **self.billed}

    def chat(self, body: dict) -> tuple[str, Answer]:
        """(fault, answer) of one request, after it is billed."""
        with self.lock:
            self.calls += 1
            self.recent.append(body)
            prompt = digest(body["messages"][-1]["content"])
            self.prompt_counts[prompt] += 1
            fault = self._next_fault(prompt)
            answer = self._answer(fault, body)
            self.billed.update(answer.usage)
            return fault, answer

    def _next_fault(self, prompt: str) -> str:
        """The name of the next call's fault; "" if it has none."""
        if self.calls <= len(self.settings.plan):
            return self.settings.plan[self.calls - 1].replace("ok", "")
        chance = int(digest(f"{prompt}/{self.prompt_counts[prompt]}"), 16) / 16 ** 16
        for fault, share in self.settings.faults.items():
            chance -= share
            if chance < 0:
                return fault
        return ""

    def _answer(self, fault: str, body: dict) -> Answer:
        """The answer with this fault, or the good answer for "" and for late answers."""
        if fault in ERRORS:
            return Answer(int(fault), {"error": {"message": ERRORS[fault], "code": None}})
        if fault == "timeout":
            return Answer(None)
        text = (self.settings.responder or critique)(body)
        if fault == "garbage":
            text = "I am sorry, I would rather talk about the weather {today}."
        is_cut = fault == "truncated"
        answer = self._completion(body, text[: -len(text) // 3] if is_cut else text, is_cut)
        return Answer(None, usage=answer.usage) if fault == "reset" else answer

    def _completion(self, body: dict, text: str, is_cut: bool) -> Answer:
        split = TOKEN[self.settings.counting].findall
        max_tokens = body["max_tokens"]
        if len(split(text)) > max_tokens:
            is_cut = True
            text = "".join(split(text)[:max_tokens])
        # A message has three more tokens, and so has the start of the reply.
        usage = {"prompt_tokens": 3 + sum(3 + len(split(message["content"]))
                                          for message in body["messages"]),
                 "completion_tokens": len(split(text))}
        choice = {"message": {"role": "assistant", "content": text},
                  "finish_reason": "length" if is_cut else "stop"}
        return Answer(200, {"choices": [choice], "usage": usage}, usage)


class Handler(BaseHTTPRequestHandler):
    """Answers the requests of one connection, in a thread."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_GET(self):
        """Answer /stats."""
        self._send(Answer(200, self.server.stats()))

    def do_POST(self):
        """Answer a request for a chat completion."""
        content = self.rfile.read(int(self.headers["Content-Length"]))
        settings = self.server.settings
        fault, answer = self.server.chat(json.loads(content))
        wait = {"timeout": settings.hang, "late": settings.hang, "429": 0}
        is_gone = select.select([self.connection], [], [], wait.get(fault, settings.delay))[0]
        if answer.status is None and answer.usage and not is_gone:
            linger = socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
            self.connection.setsockopt(*linger)     # close with RST instead of FIN
            os.close(self.connection.detach())
        if answer.status is None or is_gone:
            self.close_connection = True
            return
        self._send(answer, fault == "drip")

    def _send(self, answer: Answer, is_dripping: bool = False):
        """Send an answer, at once or with a pause of 0.5 s after each byte of its body."""
        body = json.dumps(answer.body).encode()
        self.send_response(answer.status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if not is_dripping:
            self.wfile.write(body)
            return
        for byte in body:
            self.wfile.write(bytes([byte]))
            time.sleep(0.5)

    def log_message(self, *_):
        """Print nothing."""


# ── Starting a server

def loopback(process: bool = False, **settings):
    """Run a server during a `with` block, which gets its `url` and `stats()`.

    It runs in a thread, where `settings` may be changed, or in a separate process.
    """
    return (_in_process if process else _in_thread)(Settings(**settings))


@contextmanager
def _in_thread(settings: Settings):
    with Server(settings) as server:
        threading.Thread(target=server.serve_forever, args=[0.02], daemon=True).start()
        try:
            yield server
        finally:
            server.shutdown()


@contextmanager
def _in_process(settings: Settings):
    with subprocess.Popen([sys.executable, __file__, json.dumps(asdict(settings))],
                          stdout=subprocess.PIPE, text=True) as child:
        url = child.stdout.readline().strip()
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        page = url.removesuffix("/v1") + "/stats"
        try:
            yield SimpleNamespace(url=url,
                                  stats=lambda: json.load(direct.open(page, timeout=30)))
        finally:
            child.terminate()


if __name__ == "__main__":
    with Server(Settings(**json.loads(sys.argv[1]))) as server:
        print(server.url, flush=True)
        server.serve_forever()
