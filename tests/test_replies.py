"""Sixty kinds of reply from a server, against budgets and concurrency: what is billed and kept.

The server bills each request by its own rule and then answers with a strange `usage`, content
or body. `SLOW=1` tries all budgets and concurrencies and prints the table of FAULTS.md.
"""

import json
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from annotate import AnnotateConfig, FeedbackError, annotate, parse_feedback
from ask import Journal
from data import InputError, write_rows
from helpers import SLOW

ROWS = 6
PRICES = {"price_in": 2.5, "price_out": 10.0}                     # USD per million tokens
GOOD = json.dumps({"reasoning": "Read it.", "textual_feedback": "It is short and clear.",
                   "good_spans": ["a short answer"], "poor_spans": []})
HUGE = "1" + "0" * 400
# Values of `usage`, as JSON text. The content is good, so every reply must be kept.
USAGES = {
    "null": "null", "list": "[1, 2]", "word": '"many"', "number": "12", "true": "true",
    "empty": "{}", "zeros": '{"prompt_tokens": 0, "completion_tokens": 0}',
    "no prompt": '{"completion_tokens": 3}', "no completion": '{"prompt_tokens": 3}',
    "total only": '{"total_tokens": 12}',
    **{f"counts {text[:12]}": f'{{"prompt_tokens": {text}, "completion_tokens": {text}}}'
       for text in ("null", "true", '"12"', "1.5", "-4", "1e308", "1e999", "NaN", "Infinity",
                    "1" + "0" * 308, HUGE, "9" * 5000, "[1]", "{}", "10000000000")},
    "zero prompt": '{"prompt_tokens": 0, "completion_tokens": 9}',
    "negative completion": '{"prompt_tokens": 9, "completion_tokens": -9}',
    "huge completion": f'{{"prompt_tokens": 9, "completion_tokens": {HUGE}}}',
    "deep": "[" * 900 + "]" * 900,
}
# Values of `content`, as JSON text → whether the reply can be used.
PART = json.dumps({"type": "text", "text": GOOD})
CONTENTS = {
    "text": (json.dumps(GOOD), True), "a list with one text": (f"[{PART}]", True),
    "two texts": (json.dumps([{"type": "text", "text": GOOD[:50]},
                              {"type": "text", "text": GOOD[50:]}]), True),
    "text and image": (f'[{PART}, {{"type": "image_url", "image_url": {{}}}}]', True),
    "empty list": ("[]", False), "null": ("null", False), "number": ("7", False),
    "object": ('{"text": "x"}', False), "true": ("true", False), "blank": ('"  "', False),
    "list of words": ('["a", "b"]', False), "part without text": ('[{"type": "text"}]', False),
    "part with number": ('[{"type": "text", "text": 7}]', False),
    "half a pair": ('"\\ud83d"', False), "no JSON": ('"It is fine."', False),
    "open braces": (json.dumps('{"' * 100_000), False),
    "brackets": (json.dumps("[" * 200_000), False),
    "deep object": (json.dumps('{"a":' * 100_000), False),
    "deep good_spans": (json.dumps('{"good_spans": ' + "[" * 100_000), False),
}
# Whole bodies; none can be used.
BODIES = {
    "no choices": "{}", "empty choices": '{"choices": []}', "choices object": '{"choices": {}}',
    "null choice": '{"choices": [null]}', "no message": '{"choices": [{}]}',
    "null message": '{"choices": [{"message": null}]}',
    "message text": '{"choices": [{"message": "hi"}]}', "list": "[]", "number": "5",
    "null body": "null", "not JSON": "<html>", "cut off": '{"choices": [{"mess', "nothing": "",
    "open lists": "[" * 200_000, "finish list": '{"choices": [{"message": {}, '
    '"finish_reason": ["stop"]}]}', "error": '{"error": {"message": "no"}}',
}
OK_USAGE = '{"prompt_tokens": 40, "completion_tokens": 60}'
KINDS = {f"usage {name}": (text, json.dumps(GOOD), None, True) for name, text in USAGES.items()}
KINDS |= {f"content {name}": (OK_USAGE, text, None, is_usable)
          for name, (text, is_usable) in CONTENTS.items()}
KINDS |= {f"body {name}": (OK_USAGE, "", text, False) for name, text in BODIES.items()}


class Handler(BaseHTTPRequestHandler):
    """Answers every request in the server's way, and bills 40 prompt and 60 reply tokens."""

    protocol_version = "HTTP/1.1"

    def do_POST(self):
        request = self.rfile.read(int(self.headers["Content-Length"]))
        usage, content, body, _ = self.server.kind
        if body is None:
            body = (f'{{"choices": [{{"message": {{"content": {content}}}, "finish_reason": '
                    f'"stop"}}], "usage": {usage}}}')
        with self.server.lock:
            self.server.requests[request] += 1
        data = body.encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        """Print nothing."""


@pytest.fixture(scope="module")
def server():
    class Server(ThreadingHTTPServer):
        request_queue_size = 128
        daemon_threads = True

    with Server(("127.0.0.1", 0), Handler) as running:
        running.lock = threading.Lock()
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield running
        running.shutdown()


SETTINGS = [(cap, n) for cap in (None, "half", "all") for n in (1, 8, 64)]


@pytest.mark.parametrize("kind", KINDS)
def test_no_reply_breaks_the_budget_or_is_paid_twice(kind, server, tmp_path, monkeypatch,
                                                     capsys):
    """Two runs: at most the cap is billed, at least the bill is booked, and each usable reply
    is bought once."""
    monkeypatch.setenv("OPENAI_API_KEY", "any")
    is_usable = KINDS[kind][-1]
    rows = [{"id": f"r{i}", "prompt": f"Question {i}?", "response": "This is a short answer."}
            for i in range(ROWS)]
    write_rows(tmp_path / "rows.jsonl", rows)
    for cap, concurrency in SETTINGS if SLOW else SETTINGS[7:8]:
        server.kind = KINDS[kind]
        server.requests = Counter()
        output = tmp_path / f"{cap}-{concurrency}.jsonl"
        dollars = {None: None, "half": 0.05, "all": 1.0}[cap]
        config = AnnotateConfig(
            task="ultrafeedback", data=str(tmp_path / "rows.jsonl"), output=str(output),
            base_url=f"http://127.0.0.1:{server.server_port}/v1", max_usd=dollars,
            concurrency=concurrency, retries=0, **PRICES)
        for _ in range(2):
            try:
                annotate(config)
            except InputError as error:
                assert "\n" not in str(error)
        calls = sum(server.requests.values())
        billed = calls * (40 * 2.5 + 60 * 10) / 1e6
        with Journal(f"{output}.journal", PRICES["price_in"], PRICES["price_out"]) as journal:
            booked = journal.spent
        assert billed <= booked + 1e-12
        assert dollars is None or booked <= dollars + 1e-12
        assert calls
        if is_usable:
            assert max(server.requests.values()) == 1
            assert output.exists() or cap == "half"
    capsys.readouterr()


@pytest.mark.parametrize("text", [
    '{"' * 600_000, "[" * 1_200_000, '{"a":' * 240_000, '{"a": [' * 170_000,
    '{"a": 1} ' * 130_000, '{"good_spans": [1]} ' * 60_000,
    '{"good_spans": ["' + "x" * 1_200_000, " " * 1_200_000,
    "{" + " " * 1_200_000 + '"', '```json\n{"' * 120_000, '"good' + "_" * 1_200_000,
    '{"good_spans": [' + '"a", ' * 240_000 + '"a"], "poor_spans": []}', "<think>" * 170_000])
def test_a_reply_of_a_megabyte_is_parsed_with_bounded_work(text, monkeypatch):
    """Each failed attempt may read the text up to the fault: at most 100 MB in all."""
    work = 0

    class Decoder(json.JSONDecoder):
        def raw_decode(self, text, start):
            nonlocal work
            try:
                return super().raw_decode(text, start)
            except json.JSONDecodeError as error:
                work += error.pos
                raise

    monkeypatch.setattr(json, "JSONDecoder", Decoder)
    with pytest.raises(FeedbackError):
        parse_feedback(text, response="This is a short answer.")
    assert work <= 101e6
