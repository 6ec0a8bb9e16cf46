"""Asking a language model that costs money: its server's rate kept, every reply kept, nothing bought twice.

annotate.py asks for critiques through this file. `Server.ask` sends one request to any OpenAI-compatible server (OpenAI,
vLLM, Ollama, llama.cpp), `ask_all` keeps many of them under way, `ask_by_batch` hands them to the provider's Batch API
at half the price, and `Journal` is where every reply lies from the moment it came.

    async with Server("gpt-4o") as server:
        reply = await server.ask(Question("key", "row 7", [{"role": "user", "content": "…"}], schema))

Paper: the calls to GPT-4o (§3.3) and what they cost (Table 14); it says nothing of servers, retries and journals.

There is one layer of retries, the openai client's own: exponential with jitter, for time-outs, 408, 409, 429 and 5xx.
Retry-After holds for the request that was refused; where three are refused with none answered between them, or the wait
is longer than the client would keep, it holds for every request of this process.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import json
import os
import random
import re
import secrets
import signal
import sys
import threading
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Awaitable, Callable, Iterable, Iterator

from tqdm import tqdm

LONGEST_PAUSE = 600.0                # seconds; a server that asks for more is asked again by the next run
CLIENT_PAUSE = 60.0                  # seconds; up to here the openai client itself obeys Retry-After
REFUSALS = 3                         # in a row: then the limit is the account's, and everybody waits
MOST_FAILURES_IN_A_ROW = 25          # then something is wrong with the model or the prompt, and money is being burnt
BATCH_DISCOUNT = 0.5
BATCH_REQUESTS, BATCH_BYTES = 50_000, 190_000_000          # per file, as OpenAI sets them (200 MB, with some room)


class InputError(ValueError):
    """Something the user gave cannot be used; the message is one line with the file, the row and the remedy."""


@dataclass(frozen=True)
class Question:
    """One request. key: what makes it the same request in another run; id: the row's name; schema: of the reply;
    about: whatever the asker wants to know of it when the reply is there; kind: questions of one kind cost alike."""
    key: str
    id: str
    messages: list[dict]
    schema: dict = field(default_factory=dict)
    about: dict = field(default_factory=dict)
    kind: str = ""

    @property
    def characters(self) -> int:
        """Length of what is sent, in characters."""
        return sum(len(message["content"]) for message in self.messages)


@dataclass(frozen=True)
class Reply:
    """What came back, whole. reason: why it cannot be used, or None; usage: the server's own token counts, or None."""
    text: str
    reason: str | None = None
    finish_reason: str | None = None
    usage: dict | None = None
    discount: float = 1.0


def question_key(*parts) -> str:
    """The hash that names a request in the journal: equal parts, equal key, in every process."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


# ── Money ───────────────────────────────────────────────────────────────────────────────────────────────

@dataclass(frozen=True)
class Prices:
    """USD per million tokens of prompts and of replies; None where the user gave none."""
    prompt: float | None = None
    reply: float | None = None

    def usd(self, prompt_tokens: float, reply_tokens: float, discount: float = 1.0) -> float | None:
        """Cost of so many tokens in USD, or None without prices."""
        if self.prompt is None or self.reply is None:
            return None
        return discount * (prompt_tokens * self.prompt + reply_tokens * self.reply) / 1e6

    def of(self, usage: dict | None, discount: float = 1.0) -> float | None:
        """Cost of a reply in USD by the server's own counts, or None without counts or prices."""
        return self.usd(usage["prompt_tokens"], usage["completion_tokens"], discount) if usage else None


class Budget:
    """Lets a request start only where its worst case fits under max_usd (USD) beside all that is spent and under way.

    A process that is killed loses the bills of the requests that were under way, so each kill may cost that much more.
    """

    def __init__(self, max_usd: float | None, spent: float):
        self.max_usd, self.spent, self.reserved, self.under_way, self.stopped = max_usd, spent, 0.0, 0, False
        self.settled = asyncio.Condition()

    async def reserve(self, worst: float) -> bool:
        """Wait for room; False where even with nothing under way there is none, and then for every later request."""
        async with self.settled:
            while self.max_usd is not None and not self.stopped and self.spent + self.reserved + worst > self.max_usd:
                if self.under_way:
                    await self.settled.wait()
                else:
                    self.stopped = True
            if not self.stopped:
                self.reserved, self.under_way = self.reserved + worst, self.under_way + 1
            self.settled.notify_all()
            return not self.stopped

    async def close(self):
        """Let nobody wait any longer: nothing more will be asked."""
        async with self.settled:
            self.stopped = True
            self.settled.notify_all()

    async def settle(self, worst: float, usd: float):
        """Put the bill in the place of the worst case."""
        async with self.settled:
            self.reserved, self.under_way, self.spent = self.reserved - worst, self.under_way - 1, self.spent + usd
            self.settled.notify_all()


def token_counter(tokenizer: str | None) -> Callable[[str], float]:
    """Text → its number of tokens: with a tokenizer of Hugging Face's, or 4 characters each."""
    if tokenizer is None:
        return lambda text: len(text) / 4
    from transformers import AutoTokenizer
    loaded = AutoTokenizer.from_pretrained(tokenizer, model_max_length=1 << 30)
    return lambda text: len(loaded.encode(text, add_special_tokens=False))


# ── The journal ─────────────────────────────────────────────────────────────────────────────────────────

class Journal:
    """Append-only JSON lines, flushed one by one: every reply with its key, usable or not, and every batch sent.

    Only offsets are held in memory. A last line torn by a kill is cut off, a damaged one in the middle is passed over;
    both are said on standard error. Raises InputError where another process has the file open.
    """

    def __init__(self, path, prices: Prices = Prices()):
        self.path, self.prices = Path(path), prices
        self.done: dict[bytes, int] = {}             # key → offset of a usable reply
        self.failed: dict[bytes, int] = {}           # key → offset of an unusable one
        self.batches: dict[str, dict] = {}           # our name → {batch: the provider's or None, collected}
        self.usd = 0.0
        self.counted = Counter()                     # prompt_tokens and completion_tokens, of all replies
        self.measured: dict[str, Counter] = {}       # by kind, with characters and replies, where the request is known
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.file = open(self.path, "a+b")
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self.file.close()
            raise InputError(f"{self.path}: another process is writing to it; wait for it, or choose another --output"
                             ) from error
        self._load()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *exception):
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()

    def _load(self):
        self.file.seek(0)
        offset = 0
        for number, line in enumerate(self.file, 1):
            if not line.endswith(b"\n"):
                print(f"{self.path}: cut off a torn last line ({len(line)} bytes); its row is asked for again",
                      file=sys.stderr)
                self.file.truncate(offset)
                break
            try:
                self._note(json.loads(line), offset)
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                print(f"{self.path}, line {number}: damaged, passed over; its row is asked for again", file=sys.stderr)
            offset += len(line)
        self.end = offset

    def _note(self, record: dict, offset: int):
        if "sending" in record:
            self.batches[record["sending"]] = record
            return
        key, _, _ = bytes.fromhex(record["key"]), record["id"], record["reply"]
        now, before = (self.done, self.failed) if record["reason"] is None else (self.failed, self.done)
        now[key] = offset                            # the last word on a key counts
        before.pop(key, None)
        self.usd += self.cost(record) or 0.0
        if record["usage"]:
            self.counted.update(record["usage"])
            if record["characters"]:
                self.measured.setdefault(record["kind"], Counter()).update(
                    record["usage"] | {"characters": record["characters"], "replies": 1})

    def cost(self, record: dict) -> float | None:
        """USD of a record: as it was then, or, where no prices were known then, by those of now."""
        return self.prices.of(record["usage"], record["discount"]) if record["usd"] is None else record["usd"]

    def _write(self, record: dict):
        line = json.dumps(record).encode() + b"\n"
        self.file.write(line)
        self.file.flush()
        self._note(record, self.end)
        self.end += len(line)

    def append(self, question: Question, reply: Reply):
        """Keep a reply, whole, with what it cost."""
        self._write({"key": question.key, "id": question.id, "reply": reply.text, "reason": reply.reason,
                     "finish_reason": reply.finish_reason, "usage": reply.usage,
                     "usd": self.prices.of(reply.usage, reply.discount), "discount": reply.discount,
                     "kind": question.kind, "characters": question.characters})

    def append_batch(self, sending: str, batch: str | None = None, collected: bool = False):
        """Keep that a batch is about to be sent (no name yet), was sent, or that all its replies are here."""
        self._write({"sending": sending, "batch": batch, "collected": collected})

    @property
    def open_batches(self) -> dict[str, str | None]:
        """Our name → the provider's (None: not known to be sent), of every batch whose replies are not here."""
        return {name: record["batch"] for name, record in self.batches.items() if not record["collected"]}

    def __contains__(self, key: str) -> bool:
        return bytes.fromhex(key) in self.done

    def read(self, key: str) -> dict | None:
        """The usable reply's record, or the last unusable one's, or None where nothing was asked yet."""
        key = bytes.fromhex(key)
        offset = self.done.get(key, self.failed.get(key))
        if offset is None:
            return None
        self.file.seek(offset)                       # appends go to the end whatever the position is
        return json.loads(self.file.readline())


# ── One request ─────────────────────────────────────────────────────────────────────────────────────────

class Pace:
    """When the next request may start: even spacing under both rates, and nobody before a pause is over."""

    def __init__(self, requests_per_minute: float | None, tokens_per_minute: float | None):
        self.per_request = 60 / requests_per_minute if requests_per_minute else 0.0
        self.per_token = 60 / tokens_per_minute if tokens_per_minute else 0.0
        self.free = self.paused = 0.0                # of time.monotonic()
        self.refused = 0                             # requests in a row

    async def wait(self, tokens: float):
        """Sleep until a request of so many tokens may start."""
        cost = max(self.per_request, tokens * self.per_token)
        while True:
            now, pause = time.monotonic(), self.paused
            late = random.uniform(0, 0.25) * (pause - now) if pause > now else 0.0      # not all at once after it
            turn = max(self.free, now, pause + late)
            self.free = max(self.free, now, pause) + cost
            while (delay := turn - time.monotonic()) > 0:
                await asyncio.sleep(delay)
            if self.paused <= pause:                 # else a pause came while this one slept
                return

    def heard(self, response):
        """Learn from an answer whether to hold back, and stop the client from trying again where that is no use."""
        if response.status_code not in (429, 503):
            self.refused = 0
            return
        self.refused += 1
        seconds = retry_after(response.headers)
        if seconds > LONGEST_PAUSE or response.is_closed and b"insufficient_quota" in response.content:    # `_send` says so
            response.headers["x-should-retry"] = "false"
        elif self.refused >= REFUSALS or seconds > CLIENT_PAUSE:
            self.paused = max(self.paused, time.monotonic() + seconds)


def retry_after(headers) -> float:
    """Seconds that a server asks to wait: retry-after-ms, or Retry-After in seconds or as a date; 0 where it says nothing."""
    text = headers.get("retry-after", "")
    try:
        return float(headers["retry-after-ms"]) / 1000 if "retry-after-ms" in headers else float(text)
    except ValueError:
        try:
            return max(0.0, parsedate_to_datetime(text).timestamp() - time.time())
        except (ValueError, TypeError):
            return 0.0                               # then the client's own back-off has to do


class Server:
    """A model behind an OpenAI-compatible server. The key is read by the client from OPENAI_API_KEY and goes nowhere else.

    Raises InputError without a key, and from `ask` where no request could succeed: a key or model that is refused, a
    server that does not answer, an empty account.
    """
    FORMS = ("json_schema", "json_object", "text")

    def __init__(self, model: str, base_url: str | None = None, temperature: float = 0.3, max_tokens: int = 1200,
                 requests_per_minute: float | None = None, tokens_per_minute: float | None = None, retries: int = 6,
                 timeout: float = 120.0, model_flag: str = "--annotator_model"):
        if not os.environ.get("OPENAI_API_KEY"):
            raise InputError("OPENAI_API_KEY is not set; export it (any text will do for a local server without keys)")
        self.model, self.base_url, self.max_tokens = model, base_url, max_tokens
        self.retries, self.timeout, self.model_flag = retries, timeout, model_flag
        self.pace = Pace(requests_per_minute, tokens_per_minute)
        # What this server takes; the first request finds it out.
        self.known, self.finding_out = False, asyncio.Lock()
        self.form, self.budget_name, self.sampling = "json_schema", "max_tokens", {"temperature": temperature, "top_p": 0.95}

    async def __aenter__(self) -> Server:
        import openai                                # half a second, for those who need it
        pace = self.pace

        class PoliteClient(openai.DefaultAsyncHttpxClient):
            """Every attempt, the first and the client's retries, waits for its turn."""

            async def send(self, request, **options):
                await pace.wait(len(request.content) / 4 if pace.per_token and "/chat/" in request.url.path else 0)
                response = await super().send(request, **options)
                pace.heard(response)
                return response

        self.client = openai.AsyncOpenAI(base_url=self.base_url, max_retries=self.retries, timeout=self.timeout,
                                         http_client=PoliteClient())
        return self

    async def __aexit__(self, *exception):
        await self.client.close()

    def body(self, question: Question) -> dict:
        """The request as JSON, in the form that this server takes."""
        form = {"json_schema": {"type": "json_schema", "json_schema": {"name": "reply", "strict": True,
                                                                      "schema": question.schema}},
                "json_object": {"type": "json_object"}}
        return {"model": self.model, "messages": question.messages, self.budget_name: self.max_tokens, **self.sampling,
                **({"response_format": form[self.form]} if self.form in form and question.schema else {})}

    async def ask(self, question: Question) -> Reply:
        """Send one request. A reply that cannot be used comes back whole with its reason. InputError as said above."""
        if not sendable(question):
            return Reply("", "the row holds half of a surrogate pair, which is no character and cannot be sent")
        async with self.finding_out:                 # held by one request at a time, and only until the form is known
            if not self.known:
                return await self._find_out(question)
        return await self._send(question)

    async def _find_out(self, question: Question) -> Reply:
        """The first request: step down from what the server refuses, to what it takes."""
        start = self.form, self.budget_name, self.sampling
        while True:
            reply = await self._send(question)
            if not (reply.reason or "").startswith("400"):
                self.known = reply.usage is not None or reply.reason is None
                return reply
            if not self._concede(reply.reason):
                self.form, self.budget_name, self.sampling = start       # it was this row, not the form
                return reply

    def _concede(self, refusal: str) -> bool:
        if "context_length" in refusal or "context length" in refusal:
            return False
        if "max_completion_tokens" in refusal and self.budget_name == "max_tokens":
            self.budget_name = "max_completion_tokens"
        elif ("temperature" in refusal or "top_p" in refusal) and self.sampling:
            self.sampling = {}
        elif self.form != "text":
            self.form = self.FORMS[self.FORMS.index(self.form) + 1]
        else:
            return False
        return True

    async def _send(self, question: Question) -> Reply:
        import openai
        where = f"{self.client.base_url} with model {self.model!r}"
        try:
            raw = await self.client.chat.completions.with_raw_response.create(**self.body(question))
            return read_completion(raw.text, self.max_tokens)
        except (openai.AuthenticationError, openai.PermissionDeniedError, openai.NotFoundError) as error:
            if self.known and error.status_code == 403:      # of this row alone: some servers so refuse a text
                return Reply(error.response.text, f"403: {_said(error)}")
            raise InputError(f"{where}: {_said(error)}; check OPENAI_API_KEY, --base_url and {self.model_flag}") from error
        except openai.APITimeoutError:
            return Reply("", f"no answer within {self.timeout:g} s, asked {1 + self.retries} times")
        except openai.APIConnectionError as error:
            if self.known:                                   # a server that is gone for good ends the run by 25 in a row
                return Reply("", f"the connection failed ({error.__cause__ or error})")
            raise InputError(f"{where}: cannot be reached ({error.__cause__ or error}); is the server up?") from error
        except openai.APIStatusError as error:
            seconds = retry_after(error.response.headers)
            if error.code == "insufficient_quota" or seconds > LONGEST_PAUSE:
                wait = f" (it asks to wait {seconds:.0f} s)" if seconds else ""
                raise InputError(f"{where}: {_said(error)}{wait}; all replies so far are kept, run again later") from error
            status = 400 if error.status_code == 422 else error.status_code
            return Reply(error.response.text, f"{status}: {_said(error)}")


def sendable(question: Question) -> bool:
    """Whether the messages are text that UTF-8 can carry."""
    return not any(re.search("[\ud800-\udfff]", message["content"]) for message in question.messages)


def _said(error) -> str:
    """The server's own words, with the parameter and code it names."""
    parts = [getattr(error, "message", ""), error.param or "", error.code or ""]
    return " ".join(str(part) for part in dict.fromkeys(parts) if part)[:500]


def read_completion(text: str, max_tokens: int, discount: float = 1.0) -> Reply:
    """A chat completion's JSON → Reply; every way in which it can be unusable gets its reason, and the text is kept.

    max_tokens: the tokens that it was cut off after, if it was; discount: what part of the price it costs."""
    try:
        body = json.loads(text)
        usage = {name: int(body["usage"][name]) for name in ("prompt_tokens", "completion_tokens")} \
            if body.get("usage") else None
        choice = body["choices"][0]
        message, finish = choice["message"], choice.get("finish_reason")
        content, refusal = message.get("content") or "", message.get("refusal")
        if not isinstance(content, str):
            raise TypeError("content is no text")
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError) as error:
        return Reply(text, f"the server's answer is no chat completion ({type(error).__name__}: {error})")
    reason = (f"refused: {refusal}" if refusal else
              f"cut off after {max_tokens} tokens" if finish == "length" else
              "withheld by the server's content filter" if finish == "content_filter" else
              None if content.strip() else "the reply is empty")
    return Reply(content or str(refusal or ""), reason, finish, usage, discount)


# ── Many requests ───────────────────────────────────────────────────────────────────────────────────────

async def ask_all(questions: Iterable[Question], ask: Callable[[Question], Awaitable[Reply]], journal: Journal,
                  concurrency: int, budget: Budget, worst: Callable[[Question], float], progress: tqdm):
    """Ask every question, `concurrency` at once; each reply is in the journal before the next question is taken.

    worst(question): the most it can cost, in USD. Ends early, with budget.stopped, where the next might pass the
    budget. Raises InputError after 25 unusable replies in a row or where max_usd cannot be kept, and whatever `ask`
    raises; what has come by then is kept. Raises KeyboardInterrupt after the first Ctrl-C, which asks nothing new and
    waits for what is under way, since it is paid for; the second does not wait.
    """
    waiting, in_a_row, stop, loop = iter(questions), 0, False, asyncio.get_running_loop()
    in_main = threading.current_thread() is threading.main_thread()           # only there are signals heard

    def interrupt():
        nonlocal stop
        stop = True
        loop.remove_signal_handler(signal.SIGINT)
        loop.create_task(budget.close())
        progress.set_description("waiting for the replies under way")

    async def worker():
        nonlocal in_a_row, stop
        try:
            while not stop and (question := next(waiting, None)) is not None:     # shared: whoever is free takes the next
                most = worst(question)
                if not await budget.reserve(most):
                    return
                reply, failed_before = await ask(question), bytes.fromhex(question.key) in journal.failed
                journal.append(question, reply)
                await budget.settle(most, journal.prices.of(reply.usage, reply.discount) or 0.0)
                in_a_row = 0 if reply.reason is None else in_a_row + (not failed_before)
                if in_a_row == MOST_FAILURES_IN_A_ROW:
                    raise InputError(f"{in_a_row} replies in a row cannot be used, last {question.id}: {reply.reason}; "
                                     f"they are kept in {journal.path}")
                if budget.max_usd is not None and reply.usage is None and reply.reason is None:
                    raise InputError("the server counts no tokens (no usage in its replies), so --max_usd cannot be kept")
                progress.update()
                progress.set_postfix_str(f"${journal.usd:.2f}" if journal.usd else "", refresh=False)
        except BaseException:
            stop = True                              # nothing new is asked; what is under way is paid for and waited for
            await budget.close()
            raise

    if in_main:
        loop.add_signal_handler(signal.SIGINT, interrupt)
    ends = await asyncio.gather(*(worker() for _ in range(concurrency)), return_exceptions=True)
    if in_main and not loop.remove_signal_handler(signal.SIGINT):
        raise KeyboardInterrupt
    for error in filter(None, ends):
        raise error


# ── The Batch API ───────────────────────────────────────────────────────────────────────────────────────

async def ask_by_batch(questions: Iterable[Question], server: Server, journal: Journal, budget: Budget,
                       worst: Callable[[Question], float], poll: float = 30.0):
    """Hand the questions to the provider's Batch API and wait for the replies, at half the price.

    worst: in USD, as in `ask_all`; poll: seconds between two looks. Batches that an earlier process sent are collected
    first, so `questions` must leave out, as it is read, what the journal holds by then. Raises InputError where the
    server has no Batch API or refuses a batch.
    """
    with _plain_errors(server):
        for name, batch in journal.open_batches.items():
            batch = batch or await _find_batch(name, server)      # killed between sending it and writing its name
            if batch is None:
                journal.append_batch(name, collected=True)          # it was never sent
            else:
                await _collect(name, batch, server, journal, poll)
        budget.spent = journal.usd
        waiting, failed = iter(questions), 0
        while not server.known and (question := next(waiting, None)) is not None:
            if not await budget.reserve(worst(question)):           # asked directly: finds out what the server takes
                return
            reply = await server.ask(question)
            journal.append(question, reply)
            await budget.settle(worst(question), journal.usd - budget.spent)
            failed += reply.reason is not None
            if failed == MOST_FAILURES_IN_A_ROW:
                raise InputError(f"the first {failed} replies cannot be used, last {question.id}: {reply.reason}")
        while data := _batch_input(waiting, server, journal, budget, worst):
            name = secrets.token_hex(16)
            journal.append_batch(name)
            file = await server.client.files.create(file=("requests.jsonl", data), purpose="batch")
            batch = await server.client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions",
                                                       completion_window="24h", metadata={"name": name})
            journal.append_batch(name, batch.id)
        for name, batch in journal.open_batches.items():
            await _collect(name, batch, server, journal, poll)


@contextmanager
def _plain_errors(server: Server):
    """What the Batch API refuses, as one line."""
    import openai
    try:
        yield
    except openai.APIStatusError as error:
        raise InputError(f"{server.client.base_url} refuses a batch ({error.status_code}: {_said(error)}); what was sent is "
                         f"in the journal, run again, or leave out --batch where this server has none") from error
    except openai.APIConnectionError as error:
        raise InputError(f"{server.client.base_url} cannot be reached ({error.__cause__ or error}); the batches under way "
                         f"are in the journal, run again to collect them") from error


def _batch_input(waiting: Iterator[Question], server: Server, journal: Journal, budget: Budget, worst) -> bytes:
    """The next file of requests, within the provider's limits and the budget."""
    lines, size = [], 0
    for question in waiting:
        if not sendable(question):
            journal.append(question, Reply("", "the row holds half of a surrogate pair and cannot be sent"))
            continue
        most = worst(question) * BATCH_DISCOUNT
        if budget.stopped or budget.max_usd is not None and budget.spent + budget.reserved + most > budget.max_usd:
            budget.stopped = True
            break
        budget.reserved += most
        lines.append(json.dumps({"custom_id": question.key, "method": "POST", "url": "/v1/chat/completions",
                                 "body": server.body(question)}).encode() + b"\n")
        size += len(lines[-1])
        if len(lines) == BATCH_REQUESTS or size > BATCH_BYTES:
            break
    return b"".join(lines)


async def _find_batch(name: str, server: Server) -> str | None:
    async for batch in server.client.batches.list(limit=100):
        if (batch.metadata or {}).get("name") == name:
            return batch.id
    return None


async def _collect(name: str, batch: str, server: Server, journal: Journal, poll: float):
    """Wait until a batch has ended and put its replies into the journal."""
    with tqdm(desc=batch, unit="reply") as progress:
        while True:
            state = await server.client.batches.retrieve(batch)
            counts = state.request_counts
            progress.total, progress.n = (counts.total, counts.completed + counts.failed) if counts else (None, 0)
            progress.set_postfix_str(state.status)
            if state.status in ("completed", "failed", "expired", "cancelled"):
                break
            await asyncio.sleep(poll)
    for file in filter(None, (state.output_file_id, state.error_file_id)):
        for line in (await server.client.files.content(file)).content.splitlines():     # bytes: U+2028 ends no line
            record = json.loads(line)
            if record["custom_id"] not in journal:   # else collected before, by a process that was killed in the middle
                journal.append(Question(record["custom_id"], batch, []), _batch_reply(record, server.max_tokens))
    journal.append_batch(name, batch, collected=True)
    if state.status == "failed":
        said = "; ".join(error.message or "" for error in (state.errors.data if state.errors else None) or [])
        raise InputError(f"the provider refused the batch {batch}: {said[:500]}")


def _batch_reply(record: dict, max_tokens: int) -> Reply:
    """One line of a batch's output: a chat completion, or what went wrong with it."""
    answer = record.get("response") or {}
    if answer.get("status_code") == 200:
        return read_completion(json.dumps(answer["body"]), max_tokens, BATCH_DISCOUNT)
    said = record.get("error") or answer.get("body")
    return Reply(json.dumps(record), f"{answer.get('status_code', 'no answer')}: {json.dumps(said)[:300]}")
