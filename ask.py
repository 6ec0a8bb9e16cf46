"""Requests to a chat model, with a budget and a journal: no reply is paid for twice.

    with Journal("feedback.jsonl.journal", price_in, price_out, max_usd) as journal:
        records = ask(questions, journal, Server("gpt-4o"), review)

`annotate.py` calls the annotator and `measures/judge.py` calls the judge; both use `ask`. The
journal is a file of JSON lines beside the output. Each request is written to it before it is
sent, and each reply when it arrives. A killed run therefore keeps all replies that arrived, and
the next run does not request them again.

Paper: §3.3 and Appendix B define the prompts. They do not say how requests are sent.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import json
import math
import os
import re
import sys
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Callable, Iterator

from tqdm import tqdm

from data import InputError


@dataclass(frozen=True)
class Question:
    """A request. key: its `question_key`; id: the row's id; context: data of the caller."""
    key: str
    id: str
    messages: list[dict]
    context: dict = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Length in bytes, an upper bound on the number of tokens."""
        return len(json.dumps(self.messages))


def question_key(*parts) -> str:
    """The hash of a request's parts, which identifies it in the journal of every run."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


FREE = {"prompt_tokens": 0, "completion_tokens": 0}


@dataclass(frozen=True)
class Reply:
    """One reply. reason: why it is unusable, or None; usage: number of billed tokens;
    needs_retry: whether the server failed, so that the same request may succeed later."""
    text: str
    reason: str | None = None
    usage: dict = field(default_factory=FREE.copy)
    needs_retry: bool = False


class Journal:
    """A file with one JSON line per request and one per reply, and their total cost.

    Prices are in USD per million tokens. max_usd is the budget in USD over all runs. records:
    key → last reply; a usable reply is never requested again. open_costs: key → maximum cost of
    a request without a reply yet, in USD. spent: cost of all other requests, in USD.
    """

    def __init__(self, path, price_in=None, price_out=None, max_usd=None):
        self.path = Path(path)
        self.prices = price_in, price_out
        self.max_usd = max_usd
        self.records = {}
        self.open_costs = {}
        self.spent = 0.0

    def __enter__(self) -> Journal:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.file = open(self.path, "a+b")
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self.file.close()
            raise InputError(f"{self.path}: another process is writing to this file; wait for "
                             f"it to end, or choose another output") from error
        self._replay()
        return self

    def __exit__(self, *exception):
        if not self.file.seek(0, os.SEEK_END):               # a dry run leaves no empty file
            self.path.unlink()                               # the lock is still held
        self.file.close()

    def usd(self, prompt_tokens: float, completion_tokens: float) -> float | None:
        """The cost of the tokens in USD, or None without prices."""
        if None in self.prices:
            return None
        return (prompt_tokens * self.prices[0] + completion_tokens * self.prices[1]) / 1e6

    def can_afford(self, usage: dict) -> bool:
        """Whether the budget covers one more request of at most this usage."""
        total = self.spent + sum(self.open_costs.values()) + (self.usd(**usage) or 0.0)
        return self.max_usd is None or total <= self.max_usd

    def begin(self, question: Question, usage: dict):
        """Record the maximum usage of a request, before it is sent."""
        self._write({"key": question.key, "due": usage, "usd": self.usd(**usage)})

    def append(self, question: Question, reply: Reply, reason: str | None):
        """Record a reply with its cost. reason: why it is unusable, or None."""
        self._write({"key": question.key, "id": question.id, "reply": reply.text,
                     "reason": reason, "usage": reply.usage, "usd": self.usd(**reply.usage)})

    def _write(self, record: dict):
        sealed = {**record, "sha256": question_key(record)}
        self.file.write(json.dumps(sealed).encode() + b"\n")
        self.file.flush()
        self._account(record)

    def _replay(self):
        """Read the records of earlier runs."""
        self.file.seek(0)
        line = b"\n"
        for number, line in enumerate(self.file, 1):
            try:
                record = json.loads(line)
                # Journals of the second version have no hashes.
                if record.pop("sha256", None) not in (None, question_key(record)):
                    raise ValueError("a bit of the line has changed")
                self._account(record)
            except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
                print(f"{self.path}, line {number}: skipping corrupt line", file=sys.stderr)
        if not line.endswith(b"\n"):                         # a killed process left half a line
            self.file.write(b"\n")
        # A killed process may have been billed for requests without a reply.
        self.spent += sum(self.open_costs.values())
        self.open_costs.clear()

    def _checked_usd(self, record: dict) -> float | None:
        """The cost in a record in USD. Raises ValueError unless it is finite and ≥ 0."""
        usage = record.get("due") or record["usage"]
        usd = record["usd"] or self.usd(**usage)             # a run without prices wrote None
        if not 0 <= (usd or 0.0) < math.inf:
            raise ValueError("the cost is not a finite number ≥ 0")
        return usd

    def _account(self, record: dict):
        """Update records, due and spent with a request or a reply."""
        key = record["key"]
        usd = self._checked_usd(record)
        if "due" in record:
            self.spent += self.open_costs.pop(key, 0.0)      # a killed run sent it, too
            self.open_costs[key] = usd or 0.0
        else:
            self.records[key] = {"reply": record["reply"], "reason": record["reason"],
                                 "usage": record["usage"], "usd": usd}
            self.open_costs.pop(key, None)
            self.spent += usd or 0.0

    def has_reply(self, key: str) -> bool:
        """Whether the journal has a usable reply to this request."""
        return key in self.records and self.records[key]["reason"] is None


def missing(questions: list[Question], journal: Journal) -> list[Question]:
    """The questions without a usable reply, without duplicates."""
    return list({q.key: q for q in questions if not journal.has_reply(q.key)}.values())


def forecast(todo: list[Question], journal: Journal, reply_tokens: int) -> str:
    """One line with the expected cost, at 4 bytes per token and reply_tokens per reply."""
    prompt = sum(question.size for question in todo) // 4
    reply = len(todo) * reply_tokens
    usd = journal.usd(prompt, reply)
    cost = "USD unknown: set --price_in and --price_out" if usd is None else f"${usd:,.4f}"
    return (f"{len(todo)} requests to send: about {prompt:,} prompt + {reply:,} reply tokens "
            f"(4 bytes per token, {reply_tokens} tokens per reply), {cost}")


def ask(questions: list[Question], journal: Journal, model: Server | LocalFunction, review,
        concurrency: int = 8) -> dict[str, dict]:
    """Request every reply that is missing → {key: record {reply, reason, usage, usd}}.

    review(question, text) returns why a reply is unusable, or None. Raises InputError where the
    budget is reached, after 25 unusable replies in a row, or where the server never answers.
    The first Ctrl-C sends no new request and waits for open requests, which are billed. A
    second Ctrl-C stops at once.
    """
    for question in questions:
        if journal.has_reply(question.key):
            record = journal.records[question.key]
            record["reason"] = review(question, record["reply"])
            if record["reason"]:                     # the reply was usable when it was written
                print(f"{journal.path}: the reply to {question.id} was changed "
                      f"({record['reason']}); requesting it again", file=sys.stderr)
    todo = missing(questions, journal)
    if todo and asyncio.run(_ask_all(todo, journal, model, review, concurrency)):
        todo = missing(todo, journal)
        usage = model.max_usage(todo[0])
        raise InputError(f"--max_usd {journal.max_usd:g} reached: ${journal.spent:.4f} is "
                         f"spent, and the next of {len(todo)} requests may cost "
                         f"${journal.usd(**usage):.4f}, with {usage['prompt_tokens']:g} + "
                         f"{usage['completion_tokens']} tokens. Raise --max_usd to continue, "
                         f"or lower `max_tokens` of the task or mode, which limits a reply. "
                         f"Every reply is in {journal.path}")
    return journal.records


MOST_FAILURES_IN_A_ROW = 25           # more requests would waste money
PAUSE = 1.5                           # seconds before the first retry; then 3, 6, …


@dataclass
class _Run:
    """The state that the workers of one `_ask_all` share."""
    questions: Iterator[Question]                            # each worker takes the next
    journal: Journal
    model: Server | LocalFunction
    review: Callable[[Question, str], str | None]
    old_keys: set[str]                                       # requests with a reply before
    bar: tqdm
    stop: asyncio.Event = field(default_factory=asyncio.Event)     # set: send no new request
    failures: int = 0
    failures_in_a_row: int = 0


async def _ask_all(todo, journal: Journal, model, review, concurrency: int) -> bool:
    """Whether the budget ended the run."""
    bar = tqdm(total=len(todo), desc="ask", delay=1)
    run = _Run(iter(todo), journal, model, review, set(journal.records), bar)
    async with model.connect():
        workers = [asyncio.create_task(_work(run)) for _ in range(min(concurrency, len(todo)))]
        try:
            await asyncio.wait(workers, return_when=asyncio.FIRST_EXCEPTION)
            is_over_budget = run.stop.is_set()
        finally:            # open requests are billed: wait for them
            run.stop.set()
            if not all(worker.done() for worker in workers):
                bar.set_description("waiting for open requests")
            errors = await asyncio.gather(*workers, return_exceptions=True)
            bar.close()
    for error in filter(None, errors):
        raise error
    return is_over_budget


async def _work(run: _Run):
    """Request one reply after another, until no question is left or the run stops."""
    for question in run.questions:
        if not await _request(run, question):
            return
        reason = run.journal.records[question.key]["reason"]
        if reason:
            run.model.check_answered(reason)
        _count(run, question, reason)


async def _request(run: _Run, question: Question) -> bool:
    """Send a request, with retries, and record its replies; False if the run was stopped."""
    max_usage = run.model.max_usage(question)
    for trial in range(run.model.retries + 1):
        if trial:
            with suppress(TimeoutError):
                await asyncio.wait_for(run.stop.wait(), PAUSE * 2 ** (trial - 1))
        if not await _wait_for_budget(run, max_usage):
            return False
        run.journal.begin(question, max_usage)
        reply = await run.model.ask(question)
        reason = reply.reason or run.review(question, reply.text)
        run.journal.append(question, reply, reason)
        if not reply.needs_retry:
            break
        run.bar.set_postfix_str(reason[:60])
    return True


async def _wait_for_budget(run: _Run, usage: dict) -> bool:
    """Wait until the budget covers a request; False if the run stopped or it never will."""
    while not (run.stop.is_set() or run.journal.can_afford(usage)):
        if run.journal.open_costs:
            await asyncio.sleep(0.1)                         # open requests may cost less
        else:
            run.stop.set()
    return not run.stop.is_set()


def _count(run: _Run, question: Question, reason: str | None):
    """Count a reply. Raises InputError after MOST_FAILURES_IN_A_ROW unusable ones."""
    run.bar.update()
    run.failures += bool(reason)
    run.bar.set_postfix(failed=run.failures, refresh=run.failures > 0)
    if not reason:
        run.failures_in_a_row = 0
    elif question.key not in run.old_keys:                  # an earlier failure may recur
        run.failures_in_a_row += 1
    if run.failures_in_a_row == MOST_FAILURES_IN_A_ROW:
        run.stop.set()
        raise InputError(f"{run.failures_in_a_row} replies in a row are unusable, the last for "
                         f"{question.id}: {reason}; read them in {run.journal.path}")


@dataclass
class LocalFunction:
    """A Python function (question) → reply text, with the interface of `Server`. It is free."""
    function: Callable[[Question], str]
    retries: int = 0

    def connect(self) -> nullcontext:
        """A context manager that does nothing: a function needs no client."""
        return nullcontext()

    def max_usage(self, _question) -> dict:
        """A function bills no tokens."""
        return FREE

    async def ask(self, question: Question) -> Reply:
        """Call the function in a thread."""
        return Reply(await asyncio.to_thread(self.function, question))

    def check_answered(self, _reason):
        """A function always answers."""


@dataclass
class Server:
    """A model on an OpenAI-compatible server. The client reads OPENAI_API_KEY."""
    model: str
    base_url: str | None = None
    temperature: float | None = 0.3                      # None: not sent
    max_tokens: int = 1200                               # per reply
    retries: int = 6                                     # per request
    timeout: float = 120.0                               # seconds per reply
    has_answered: bool = False            # if not, any failure ends the run

    def connect(self):
        """Open the client, an asynchronous context manager."""
        import openai                                    # slow: half a second
        try:
            self.client = openai.AsyncOpenAI(base_url=self.base_url, max_retries=0,
                                             timeout=None)
        except Exception as error:                       # httpx has its own error classes
            raise InputError(f"--base_url {self.base_url}: {error}") from error
        return self.client

    def max_usage(self, question: Question) -> dict:
        """The maximum number of billed tokens, used where the server reports no usage."""
        return {"prompt_tokens": question.size, "completion_tokens": self.max_tokens}

    def check_answered(self, reason: str):
        """Raise InputError where the server has never answered. reason: its last failure."""
        if not self.has_answered:
            raise InputError(f"{self.client.base_url} with model {self.model!r}: {reason}; "
                             f"check OPENAI_API_KEY, the URL and the name of the model, and "
                             f"run the same command again")

    async def ask(self, question: Question) -> Reply:
        """Send a request once; resend it where the model rejects `max_tokens`."""
        import openai
        max_usage = self.max_usage(question)
        options = {"max_completion_tokens": self.max_tokens}
        if self.temperature is not None:
            options = {"max_tokens": self.max_tokens, "temperature": self.temperature,
                       "top_p": 0.95}
        try:
            async with asyncio.timeout(self.timeout):    # also limits a slow stream
                reply = await self.client.chat.completions.with_raw_response.create(
                    model=self.model, messages=question.messages, **options)
            self.has_answered = True
            return read_completion(reply.text, max_usage)
        except TimeoutError:                             # the server may have billed it
            return Reply("", f"no answer in {self.timeout:g} s", max_usage, True)
        except openai.APIConnectionError as error:       # billed, unless it was never sent
            is_unsent = type(error.__cause__).__name__ == "ConnectError"
            usage = FREE if is_unsent else max_usage
            return Reply("", f"{error} {error.__cause__!r}", usage, True)
        except openai.APIStatusError as error:           # refused, so not billed
            status = error.status_code
            message = str(error)[:500]
            if "max_tokens" in options and "max_completion_tokens' instead" in message:
                if self.temperature is not None:
                    print(f"{self.model} takes no temperature; sending requests without it",
                          file=sys.stderr)
                self.temperature = None
                return await self.ask(question)
            self.has_answered |= status in (400, 413, 422)   # the request is wrong, not the run
            needs_retry = status in (408, 409, 429) or status >= 500
            return Reply("", message, needs_retry=needs_retry)


def read_usage(counts, max_usage: dict) -> dict:
    """The token counts that a server reports, or max_usage if they are missing or implausible.

    Plausible counts are two integers, at most twice the maximum, with a prompt of ≥ 1 token.
    """
    if not isinstance(counts, dict):
        return max_usage
    usage = {name: counts.get(name) for name in max_usage}
    for name, count in usage.items():
        if type(count) is not int or not 0 <= count <= 2 * max_usage[name]:
            return max_usage
    return usage if usage["prompt_tokens"] else max_usage


def read_completion(text: str, max_usage: dict) -> Reply:
    """The Reply in the JSON of a chat completion."""
    usage = max_usage
    try:
        # Python refuses to read an int of over 4,300 digits. Thirty are already implausible.
        body = json.loads(text, parse_int=lambda digits: int(digits[:30]))
        usage = read_usage(body.get("usage"), max_usage)
        choice = body["choices"][0]
        content = choice["message"].get("content") or ""
        if isinstance(content, list):
            content = "".join(part["text"] for part in content if part["type"] == "text")
        finish_reason = choice.get("finish_reason")
        is_empty = not content.strip()
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return Reply(text, f"the server's answer is no chat completion: {text[:300]}", usage)
    if finish_reason == "length":
        return Reply(content, f"cut off after {max_usage['completion_tokens']} tokens", usage)
    return Reply(content, f"the reply is empty: {finish_reason}" if is_empty else None, usage)


def check_asking(price_in, price_out, max_usd, base_url=None, is_free=False):
    """Raise InputError for wrong settings, before any request. is_free: no server is used."""
    if max_usd is not None and None in (price_in, price_out):
        raise InputError("--max_usd needs --price_in and --price_out, USD per million tokens")
    if is_free:
        return
    if not re.fullmatch("[!-~]+", os.environ.get("OPENAI_API_KEY", "")):
        raise InputError("OPENAI_API_KEY is missing or contains characters that a key cannot "
                         "have; export a key (any word works for a local server without keys)")
    url = base_url or os.environ.get("OPENAI_BASE_URL") or "https://"
    if not url.startswith(("http://", "https://")):
        raise InputError(f"--base_url {url}: the URL must begin with http:// or https://, for "
                         f"example http://localhost:8000/v1")
