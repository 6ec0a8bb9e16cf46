"""Requests to a chat model, with a budget and a journal: no reply is paid for twice.

    with Journal("feedback.jsonl.journal", price_in, price_out, max_usd) as journal:
        records = ask(questions, journal, Server("gpt-4o"), review)

`annotate.py` calls the annotator and `measures/judge.py` calls the judge; both use `ask`. The
journal is a file of JSON lines beside the output. Each request is written to it before it is
sent, and each reply when it arrives, before it is parsed. A run that is killed or that fails
therefore keeps all replies that arrived, and the next run does not request them again.

Paper: §3.3 and Appendix B define the prompts. They do not say how requests are sent.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
import time
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from email.utils import mktime_tz, parsedate_tz
from pathlib import Path
from typing import Callable

from tqdm import tqdm

from data import InputError, checksum, lock


def hide_key(text: str) -> str:
    """The text without the API key. A key of letters only stays: "none" is a usual word."""
    key = os.environ.get("OPENAI_API_KEY", "")
    return text if key.isalpha() or len(key) < 8 else text.replace(key, "…")


public = hide_key


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
    return checksum(state=parts)[:32]


MALFORMED = ValueError, LookupError, TypeError, AttributeError, RecursionError
FREE = {"prompt_tokens": 0, "completion_tokens": 0}


@dataclass(frozen=True)
class Reply:
    """One reply. reason: why it is unusable, or None; usage: number of billed tokens, or None
    if they are unknown; status: HTTP status; pause: seconds that the server asks to wait."""
    text: str
    reason: str | None = None
    usage: dict | None = None
    status: int = 200
    pause: float = 0.0


class Journal:
    """A file with one JSON line per request and one per reply, and their total cost.

    Prices are in USD per million tokens. max_usd is the budget in USD over all runs. records:
    key → last reply; a usable reply is never requested again. open_costs: key → maximum cost in
    USD of a request without a reply yet. spent: cost of all requests in USD, including these.
    """

    def __init__(self, path, price_in=None, price_out=None, max_usd=None):
        self.path = Path(path)
        self.prices = price_in, price_out
        self.max_usd = max_usd
        self.records = {}
        self.open_costs = {}
        self.spent = 0.0

    def __enter__(self):
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.file = open(self.path, "a+b")
        lock(self.file, self.path)
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
        total = self.spent + (self.usd(**usage) or 0.0)
        return self.max_usd is None or total <= self.max_usd

    def begin(self, question: Question, usage: dict):
        """Record the maximum usage of a request, before it is sent."""
        self._write(question, due=usage, usd=self.usd(**usage))

    def append(self, question: Question, reply: Reply, max_usage: dict):
        """Record a reply with its cost. max_usage: what is booked if its usage is unknown."""
        usage = reply.usage or max_usage
        self._write(question, id=question.id, reply=reply.text, reason=reply.reason,
                    usage=usage, usd=self.usd(**usage))

    def append_reason(self, question: Question, reason: str | None) -> str | None:
        """Record why a parser refuses the reply, or that it accepts it; return the reason."""
        reason = reason and one_line(reason)
        if reason != self.records[question.key]["reason"]:
            self._write(question, reason=reason, is_read=True)
        return reason

    def _write(self, question, **fields):
        record = {"key": question.key, **fields, "time": time.time()}   # no two are equal
        line = json.dumps(record | {"sha256": question_key(record)})
        self.file.write(line.encode() + b"\n")
        self.file.flush()
        self._account(record)

    def _replay(self):
        """Read the records of earlier runs. A copy of a line counts once."""
        self.file.seek(0)
        line = b"\n"
        hashes = set()
        for number, line in enumerate(self.file, 1):
            try:
                record = json.loads(line)
                digest = record.pop("sha256", None)
                # Only the second version of this file wrote lines without a hash or a time.
                if digest != question_key(record) and (digest or hashes or "time" in record):
                    raise ValueError("the line was changed")
                if digest not in hashes or "time" not in record:
                    self._account(record)
                if digest:
                    hashes.add(digest)
            except MALFORMED:
                print(f"{self.path}, line {number}: skipping corrupt line", file=sys.stderr)
        if not line.endswith(b"\n"):                         # a killed process left half a line
            self.file.write(b"\n")
        self.open_costs.clear()              # a killed process may have been billed for them

    def _account(self, record):
        """Update records, open_costs and spent with a line of the file."""
        key = record["key"]
        if "is_read" in record:
            self.records[key] |= record
            return
        usage = record.get("due") or record["usage"]
        usd = record["usd"] or self.usd(**usage)             # a run without prices wrote None
        cost = usd or 0.0
        if "due" in record:
            self.spent += cost                               # until its reply shows the cost
            self.open_costs[key] = cost
        else:
            self.spent += cost - self.open_costs.pop(key, 0.0)
            self.records[key] = record | {"usd": usd}


def missing(questions: list[Question], journal: Journal) -> list[Question]:
    """The questions without a usable reply, without duplicates."""
    usable = {key for key, record in journal.records.items() if record["reason"] is None}
    return list({q.key: q for q in questions if q.key not in usable}.values())


def forecast(todo: list[Question], journal: Journal, reply_tokens: int) -> str:
    """One line with the expected cost, at 4 bytes per token and reply_tokens per reply."""
    prompt = sum(question.size for question in todo) // 4
    reply = len(todo) * reply_tokens
    usd = journal.usd(prompt, reply)
    cost = "USD unknown: set --price_in and --price_out" if usd is None else f"${usd:,.4f}"
    return (f"{len(todo)} requests to send: about {prompt:,} prompt + {reply:,} reply tokens "
            f"(4 bytes per token, {reply_tokens} tokens per reply), {cost}")


def one_line(text: str) -> str:
    """The text as a part of a message: one line without secrets, at most 500 characters."""
    return " ".join(public(text[:2000]).split())[:500]


def ask(questions: list[Question], journal: Journal, model: Server | LocalFunction, review,
        concurrency: int = 8) -> dict[str, dict]:
    """Request every reply that is missing → {key: record {reply, reason, usage, usd}}.

    review(question, text) returns why a reply is unusable, or None. It also reads the replies
    of earlier runs again, before they are requested again. Raises InputError where the budget
    is reached, after 25 unusable replies in a row, or where the server never answers. The first
    Ctrl-C sends no new request and waits for open requests, which are billed. A second Ctrl-C
    stops at once.
    """
    for question in questions:
        record = journal.records.get(question.key)
        if record and (record["reason"] is None or "is_read" in record):
            reason = review(question, record["reply"])
            if reason and record["reason"] is None:
                print(f"{journal.path}: the reply to {question.id} is now refused "
                      f"({one_line(reason)}); requesting it again", file=sys.stderr)
            journal.append_reason(question, reason)
    todo = missing(questions, journal)
    todo.sort(key=lambda question: question.key in journal.records)    # earlier failures last
    if todo and asyncio.run(_ask_all(todo, journal, model, review, concurrency)):
        todo = missing(todo, journal)
        raise InputError(f"--max_usd {journal.max_usd:g} reached: ${journal.spent:.4f} is "
                         f"spent at {model}, and the next of {len(todo)} requests may cost "
                         f"${journal.usd(**model.max_usage(todo[0])):.4f}. Raise --max_usd to "
                         f"continue, or lower `max_tokens` of the task or mode, which limits a "
                         f"reply. Every reply is in {journal.path}")
    return journal.records


MOST_FAILURES_IN_A_ROW = 25           # more requests would waste money
PAUSE = 1.5                           # seconds before the first retry; then 3, 6, …


@dataclass
class _Run:
    """The state that the workers of one `_ask_all` share."""
    journal: Journal
    model: Server | LocalFunction
    review: Callable
    old_keys: set                                            # requests with a reply before
    bar: tqdm
    stop: asyncio.Event = field(default_factory=asyncio.Event)     # set: send no new request
    failures: int = 0
    failures_in_a_row: int = 0


async def _ask_all(todo, journal, model, review, concurrency):
    """Whether the budget ended the run."""
    with tqdm(total=len(todo), desc="ask", delay=1) as bar:
        run = _Run(journal, model, review, set(journal.records), bar)
        async with model.connect():
            # The first request goes alone: it shows what the server accepts and bills.
            for questions in filter(None, (todo[:1], todo[1:])):
                await _ask_in_parallel(run, questions, concurrency)
    return run.stop.is_set()


async def _ask_in_parallel(run, questions, concurrency):
    """Ask all questions. After an error or Ctrl-C, wait for open requests, which are billed."""
    left = iter(questions)                                   # each worker takes the next
    workers = [asyncio.create_task(_work(run, left)) for _ in questions[:concurrency]]
    try:
        await asyncio.wait(workers, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        if not all(worker.done() for worker in workers):
            run.stop.set()
            run.bar.set_description("waiting for open requests")
        errors = await asyncio.gather(*workers, return_exceptions=True)
    for error in filter(None, errors):
        raise error


async def _work(run, questions):
    """Request one reply after another, until no question is left or the run stops."""
    for question in questions:
        reply = await _request(run, question)
        if reply is None:
            return
        reason = (reply.reason
                  or run.journal.append_reason(question, run.review(question, reply.text)))
        if reason and not run.model.has_answered:
            raise InputError(f"{run.model}: {reason}; check OPENAI_API_KEY, the URL and the "
                             f"name of the model, and run the same command again")
        _count(run, question, reason)


async def _request(run, question):
    """Send a request, with retries, and record its replies; None if the run was stopped."""
    for trial in range(run.model.retries + 1):
        while not (run.stop.is_set() or run.journal.can_afford(run.model.max_usage(question))):
            if not run.journal.open_costs:
                run.stop.set()                               # the budget is too small
            await asyncio.sleep(0.1)                         # open requests may cost less
        if run.stop.is_set():
            return None
        usage = run.model.max_usage(question)
        run.journal.begin(question, usage)
        reply = await run.model.ask(question)
        run.journal.append(question, reply, usage)
        is_final = reply.status < 500 and reply.status not in (408, 409, 429)
        if is_final or trial == run.model.retries:
            return reply
        run.bar.set_postfix_str(reply.reason[:60])
        with suppress(TimeoutError):
            pause = max(reply.pause, PAUSE * 2**trial)
            await asyncio.wait_for(run.stop.wait(), pause)


def _count(run, question, reason):
    """Count a reply. Raises InputError after MOST_FAILURES_IN_A_ROW unusable ones."""
    run.bar.update()
    if not reason:
        run.failures_in_a_row = 0
        return
    run.failures += 1
    run.bar.set_postfix(failed=run.failures)
    if question.key not in run.old_keys:                    # an earlier failure may recur
        run.failures_in_a_row += 1
    if run.failures_in_a_row == MOST_FAILURES_IN_A_ROW:
        raise InputError(f"{run.failures_in_a_row} replies in a row are unusable, the last for "
                         f"{question.id}: {reason}; read them in {run.journal.path}")


@dataclass
class LocalFunction:
    """A Python function (question) → reply text, with the interface of `Server`. It is free."""
    function: Callable[[Question], str]
    retries: int = 0
    has_answered: bool = True

    connect = nullcontext                                # a function needs no client

    def max_usage(self, _question) -> dict:
        """A function bills no tokens."""
        return FREE

    async def ask(self, question: Question) -> Reply:
        """Call the function in a thread."""
        return Reply(await asyncio.to_thread(self.function, question))


# What a server may refuse, and the pattern of its message. A message about `temperature` or
# `top_p` leaves out `top_p` first. A `max_tokens` that is only too large is not left out.
REFUSABLE = {
    "top_p": r"top_?p\b|temperature",
    "temperature": r"temperature",
    "max_tokens": r"^(?=.*max_tokens).*(instead|(un|not |n't )support|unrecogni[sz]ed|unknown|"
                  r"extra|unexpected|deprecated|not (permitted|allowed))",
    "system turn": r"\broles?\b(?!\"\s*:)|(system|developer)\W{0,3}(prompt|message|instruction|"
                   r"turn|parameter|is not)",
}


@dataclass
class Server:
    """A model on an OpenAI-compatible server. The client reads OPENAI_API_KEY.

    refused: names in REFUSABLE that the server refused. ratio: the largest number of tokens
    that it reported, relative to what was asked for.
    """
    model: str
    base_url: str | None = None
    temperature: float = 0.3
    max_tokens: int = 1200                               # per reply
    retries: int = 6                                     # per request
    timeout: float = 120.0                               # seconds per reply
    has_answered: bool = False            # if not, a failure ends the run
    refused: frozenset = frozenset()
    ratio: float = 1

    def __str__(self):
        name = f"{public(str(self.client.base_url))} with model {self.model!r}"
        if self.ratio > 1:
            name += f", which reports {self.ratio:.3g} times the tokens that were asked for"
        return name

    def connect(self):
        """Open the client, an asynchronous context manager."""
        import openai                                    # slow: half a second
        try:
            self.client = openai.AsyncOpenAI(base_url=self.base_url, max_retries=0,
                                             timeout=None)
        except Exception as error:                       # httpx has its own error classes
            raise InputError(one_line(f"--base_url {self.base_url}: {error}")) from error
        return self.client

    def max_usage(self, question: Question) -> dict:
        """The maximum number of billed tokens, as far as the server's reports tell."""
        return {"prompt_tokens": question.size * self.ratio,
                "completion_tokens": self.max_tokens * self.ratio}

    def _body(self, question):
        """The body of a request, without what the server has refused."""
        body = {"model": self.model, "messages": question.messages, "top_p": 0.95,
                "temperature": self.temperature, "max_tokens": self.max_tokens}
        if "system turn" in self.refused:
            text = "\n\n".join(message["content"] for message in question.messages)
            body["messages"] = [{"role": "user", "content": text}]
        if "max_tokens" in self.refused:
            body["max_completion_tokens"] = self.max_tokens
        return {name: body[name] for name in body.keys() - self.refused}

    async def ask(self, question: Question) -> Reply:
        """Send a request once; resend it without a parameter that the server refuses."""
        import openai
        refused_before = self.refused
        try:
            async with asyncio.timeout(self.timeout):    # also limits a slow stream
                answer = await self.client.chat.completions.with_raw_response.create(
                    **self._body(question))
        except TimeoutError:                             # the server may have billed it
            return Reply("", f"no answer in {self.timeout:g} s; lower --concurrency, or raise "
                             f"--timeout of annotate.py", status=408)
        except openai.APIConnectionError as error:       # billed, unless it was never sent
            is_unsent = type(error.__cause__).__name__ == "ConnectError"
            return Reply("", one_line(f"{error} {error.__cause__!r}"),
                         FREE if is_unsent else None, status=503)
        except openai.APIStatusError as error:
            answer = error.response
        reply = read_answer(answer, question.size, self.max_tokens)
        if reply.usage:
            self.ratio = max(self.ratio, reply.usage["prompt_tokens"] / question.size,
                             reply.usage["completion_tokens"] / self.max_tokens)
        if reply.status == 200 or re.search("context (length|size)|too long", reply.reason):
            self.has_answered = True                     # a request that is too long is refused
        for name, pattern in REFUSABLE.items() if reply.status in (400, 422, 500) else ():
            if name not in refused_before and re.search(pattern, reply.reason, re.IGNORECASE):
                if name not in self.refused:
                    print(f"{self.model}: leaving out the {name} ({reply.reason})",
                          file=sys.stderr)
                self.refused |= {name}
                return await self.ask(question)
        return reply


def read_retry_after(text: str) -> float:
    """Seconds to wait: a number or a date within two minutes; otherwise 0."""
    seconds = 0.0
    date = parsedate_tz(text)
    with suppress(ValueError, OverflowError):
        seconds = mktime_tz(date) - time.time() if date else float(text)
    return seconds if 0 < seconds <= 120 else 0.0


def read_answer(answer, prompt_size: int, max_tokens: int) -> Reply:
    """The Reply in an HTTP answer {status_code, headers, content} to a request.

    prompt_size: an upper bound on the prompt's tokens. An error in the body of an answer with
    status 200 determines the status.
    """
    text = hide_key(answer.content.decode(errors="replace"))
    usage = content = None
    finish_reason = ""
    try:
        body = json.loads(text, parse_int=float)         # int refuses more than 4,300 digits
        usage = read_usage(body.get("usage"), prompt_size)
        choice = body["choices"][0]
        finish_reason = str(choice.get("finish_reason"))
        message = choice["message"]
        content = message.get("content") or ""
        if isinstance(content, list):
            content = "".join(part["text"] for part in content if part["type"] == "text")
        content = content.strip() and content
    except MALFORMED:
        content = None

    status = answer.status_code
    if status < 400 and (finish_reason == "error" or not content):
        code = re.search(r'"\w*(?:code|status)\w*"\s*:\s*"?([45]\d\d)\b', text)
        status = int(code[1]) if code else 502 if finish_reason == "error" else 200
    if status >= 400:
        # A server may bill a request that fails on its side, unless it says that it does not.
        if status < 500 and status != 408 or re.search(
                r"(?i)\b(nothing|no tokens|not|never)( was| were| be| been| has| have)* "
                r"(generated|billed|charged)", text):
            usage = FREE
        return Reply("", one_line(f"HTTP {status}: {text}"), usage, status,
                     read_retry_after(answer.headers.get("Retry-After", "")))
    if content is None:
        reason = one_line(f"the server's answer is no chat completion: {text}")
        return Reply(public(text), reason, usage, 404)
    reason = None
    if re.search("(?i)length|max|limit", finish_reason):
        reason = f"cut off after {max_tokens} tokens; raise `max_tokens` of the task or mode"
    elif not content:
        parts = [name for name, value in message.items() if value]
        reason = one_line(f"the reply is empty: {finish_reason}; it has only {parts}")
    return Reply(content, reason, usage)


def read_usage(counts, prompt_size: int) -> dict | None:
    """The number of billed tokens that a server reports; None without a valid report.

    A server may report the tokens of a model's reasoning outside of `completion_tokens`, and no
    prompt tokens for a cached prompt. Then prompt_size is booked.
    """
    if not isinstance(counts, dict):
        return None
    prompt = counts.get("prompt_tokens")
    completion = counts.get("completion_tokens")
    total = counts.get("total_tokens") or 0.0
    for count in (prompt, completion, total):
        if not isinstance(count, float) or not 0 <= count < 1e9 or count % 1:
            return None
    completion = max(completion, total - prompt)
    if not (prompt or completion):
        return None
    return {"prompt_tokens": int(prompt) or prompt_size, "completion_tokens": int(completion)}


def check_asking(config, is_free):
    """Raise InputError for wrong settings, before any request. is_free: no server is used.

    config: an annotate.ServerConfig.
    """
    if config.max_usd is not None and None in config.prices:
        raise InputError("--max_usd needs --price_in and --price_out, USD per million tokens")
    if is_free:
        return
    if not re.fullmatch("[!-~]+", os.environ.get("OPENAI_API_KEY", "")):
        raise InputError("OPENAI_API_KEY is missing or contains characters that a key cannot "
                         "have; export a key (any word works for a local server without keys)")
    url = config.base_url or os.environ.get("OPENAI_BASE_URL") or "https://"
    if not re.match("https?://", url):
        raise InputError(f"--base_url {public(url)}: the URL must begin with http:// or "
                         f"https://, for example http://localhost:8000/v1")
