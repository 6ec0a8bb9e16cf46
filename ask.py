"""Requests to a chat model, with a budget and a journal: no reply is paid for twice.

    with Journal("feedback.jsonl.journal", price_in, price_out, max_usd) as journal:
        replies = ask(questions, journal, Server("gpt-4o"), read)
    for question in questions:
        print(replies[question.key].value)              # what read(context, text) returned

`annotate.py` asks the annotator and `measures/judge.py` asks the judge; both use `ask`. The
journal is a file of JSON lines beside the output, one line for each reply. Threads send the
requests. The main thread alone writes the journal and reads the replies: it writes a reply as
soon as the reply arrives, and then reads it. A run that is killed or that fails therefore keeps
all replies that arrived, and the next run does not request them again.

Paper: §3.3 and Appendix B define the prompts. They do not say how requests are sent. The tokens
and the cost of annotation (Tables 12 and 14) follow from `usage` in each line of the journal.
"""

import json
import os
import re
import warnings
from collections import deque
from dataclasses import dataclass
from functools import cached_property
from multiprocessing.pool import ThreadPool
from pathlib import Path
from threading import Event

from tqdm import tqdm

from data import InputError, checksum, lock, whole_rows


@dataclass
class Question:
    """A request. key: its `question_key`; id: the row's id; context: data for `read`.

    max_tokens: the maximum length of the reply; schema: its JSON schema, or None for any form.
    """
    key: str
    id: str
    messages: list
    context: dict
    max_tokens: int
    schema: dict | None = None

    @cached_property
    def size(self):
        """Length in bytes, an upper bound on the number of tokens."""
        return len(json.dumps([self.messages, self.schema]))


def question_key(*parts):
    """The hash of a request's parts, which identifies it in the journal of every run."""
    return checksum(state=parts)[:32]


FREE = {"prompt_tokens": 0, "completion_tokens": 0}


@dataclass
class Reply:
    """The reply to a question, or the failure of a request.

    reason: why the reply is unusable, or None; usage: number of billed tokens, or None if it is
    unknown; status: HTTP status; value: the value that `read` returned.
    """
    text: str
    reason: str | None = None
    usage: dict | None = None
    status: int = 200
    value: object = None


class Journal:
    """A file with one JSON line per reply or failed request, and their total cost.

    Prices are in USD per million tokens; None counts as 0. max_usd: the budget in USD over all
    runs. spent: cost of all requests in USD, at these prices. replies: key → last reply.
    ratio: the largest length of a reply that a server reported, relative to its `max_tokens`.
    """

    spent = 0.0
    ratio = 1

    def __init__(self, path, price_in=None, price_out=None, max_usd=None):
        self.path = Path(path)
        self.prices = {"prompt_tokens": price_in or 0, "completion_tokens": price_out or 0}
        self.max_usd = max_usd
        self.replies = {}

    def __enter__(self):
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.file = open(self.path, "a")
        lock(self.file, self.path)
        for row in whole_rows(self.path):
            if "reply" in row:                       # the fourth version wrote other lines, too
                self._add(row)
        if self.path.read_bytes()[-1:] not in b"\n":
            print(file=self.file)                    # a killed process left half a line
        return self

    def __exit__(self, *exception):
        self.file.close()

    def usd(self, usage):
        """The cost of the tokens in USD."""
        return sum(count * self.prices[name] for name, count in usage.items()) / 1e6

    def largest(self, question):
        """The maximum usage of a request, as far as the reports so far tell."""
        return {"prompt_tokens": question.size,
                "completion_tokens": question.max_tokens * self.ratio}

    def can_afford(self, requests):
        """Whether the budget covers these requests, which are pairs (question, …), together.

        Raises InputError if it does not cover a single one.
        """
        usd = sum(self.usd(self.largest(question)) for question, _ in requests)
        if self.max_usd is None or self.spent + usd <= self.max_usd:
            return True
        if len(requests) == 1:
            raise InputError(f"--max_usd {self.max_usd:g} reached: ${self.spent:.4f} is spent, "
                             f"and the next request may cost ${usd:.4f}. Raise --max_usd, or "
                             f"lower `max_tokens` of the task or mode")
        return False

    def append(self, question, reply):
        """Write a reply. If its usage is unknown, the maximum is booked."""
        usage = reply.usage or self.largest(question)
        row = {"key": question.key, "id": question.id, "reply": reply.text,
               "reason": reply.reason, "usage": usage,
               "ratio": usage["completion_tokens"] / question.max_tokens}
        print(json.dumps(row), file=self.file, flush=True)
        self._add(row)

    def _add(self, row):
        """Update replies, spent and ratio with a line of the file."""
        self.spent += self.usd(row["usage"])
        self.replies[row["key"]] = Reply(row["reply"], row["reason"], row["usage"])
        self.ratio = max(self.ratio, row.get("ratio", 1))    # the fourth version has none


def _why_unusable(question, journal, read):
    """Read the reply in the journal, once; return why it is unusable, or None."""
    reply = journal.replies[question.key]
    if not (reply.reason or reply.value):
        try:
            reply.value = read(question.context, reply.text)
        except InputError:
            raise
        except ValueError as error:
            reply.reason = one_line(f"{error}") or "refused"
    return reply.reason


def _missing(questions, journal, read):
    """The questions without a usable reply, without duplicates."""
    return {question.key: question for question in questions
            if question.key not in journal.replies
            or _why_unusable(question, journal, read)}.values()


def forecast(questions, journal, read):
    """One line with the number of missing replies and their maximum cost."""
    todo = _missing(questions, journal, read)
    usd = sum(journal.usd(journal.largest(question)) for question in todo)
    cost = f"at most ${usd:,.4f}" if usd else "USD unknown without prices"
    return f"{len(todo)} requests to send, {cost}"


def hide_key(text):
    """The text without the API key. A key below ten characters is a word such as "none"."""
    key = os.getenv("OPENAI_API_KEY", "")
    return text.replace(key, "…") if len(key) > 9 else text


def one_line(text):
    """The text as a part of a message: one line of at most 500 characters."""
    return " ".join(text.split())[:500]


# ── Asking

MOST_FAILURES_IN_A_ROW = 25           # more requests would waste money
PAUSE = 1.5                           # seconds before the first retry; then 6, 13.5, 24, …


def ask(questions, journal, model, read, concurrency=8, retries=6):
    """Request every reply that is missing; return {key: last Reply}.

    model: a `Server`, or a function (Question) → Reply, which is called in threads.
    read(context, text) returns the value of a reply, or raises ValueError if the reply is
    unusable. It also reads the replies of earlier runs; an unusable one is requested again.

    Raises InputError where the budget is reached, after 25 unusable replies in a row, or where
    the server does not answer the first request. The first Ctrl-C sends no new request and
    waits for the open ones, which are billed. The second Ctrl-C stops at once.
    """
    old_keys = set(journal.replies)
    todo = sorted(_missing(questions, journal, read),
                  key=lambda question: question.key in old_keys)       # earlier failures last
    waiting = deque((question, 0) for question in todo)       # question, number of retries
    running = {}                          # result of a thread → question, number of retries
    stop = Event()
    has_answered = False
    failures = 0                          # in a row; earlier failures may recur

    def send(question, trial):
        if stop.wait(PAUSE * trial**2):
            raise InterruptedError        # the run ends in the pause before a retry
        return model(question)

    def arrived():
        """Write the replies that arrived; yield (result, question, number of retries)."""
        next(iter(running)).wait(0.01)
        for result in [result for result in running if result.ready()]:
            if result.successful():
                journal.append(running[result][0], result.get())
            yield result, *running.pop(result)

    # The end of the process does not wait for the threads of a ThreadPool.
    with ThreadPool(concurrency) as pool, tqdm(todo, "ask", delay=1) as bar:
        try:
            while waiting or running:
                # The first request goes alone: it shows what the server accepts and bills.
                while (waiting and len(running) < (concurrency if has_answered else 1)
                       and journal.can_afford([waiting[0], *running.values()])):
                    request = waiting.popleft()
                    running[pool.apply_async(send, request)] = request
                for result, question, trial in arrived():
                    reply = result.get()               # raises the error of a local function
                    reason = _why_unusable(question, journal, read)
                    if reason:
                        bar.set_postfix_str(reason)
                    has_answered |= reply.status == 200
                    # From 429 on: too many requests, or a failure of the server.
                    if reply.status >= 429 and trial < retries:
                        waiting.appendleft((question, trial + 1))
                        continue
                    bar.update()
                    is_new = question.key not in old_keys or not has_answered
                    failures = failures + is_new if reason else 0
                    if failures == (MOST_FAILURES_IN_A_ROW if has_answered else 1):
                        advice = (f"read them in {journal.path}" if has_answered else
                                  f"check OPENAI_API_KEY, and {model}")
                        raise InputError(f"{failures} unusable replies in a row, the last for "
                                         f"{question.id}: {reason}; {advice}")
        finally:
            stop.set()
            if running:
                bar.set_description("waiting for open requests; Ctrl-C stops at once")
            while running:
                list(arrived())
    return journal.replies


# ── A server

# What a server may refuse, and the pattern of its message. A message about `temperature` or
# `top_p` leaves out `top_p` first. A `max_tokens` that is only too large is not left out.
REFUSABLE = {
    "json_schema": "(?i)response.?format|schema",
    "response_format": "(?i)response.?format|json.?(object|mode)",
    "top_p": r"(?i)top_?p\b|temperature",
    "temperature": "(?i)temperature",
    "max_tokens": r"(?i)^(?=.*max_tokens).*(instead|(un|not |n't )support|unrecogni[sz]ed|"
                  r"unknown|extra|unexpected|deprecated|not (permitted|allowed))",
}


@dataclass
class Server:
    """A model on an OpenAI-compatible server. The client reads OPENAI_API_KEY.

    refused: names in REFUSABLE that the server refused.
    """
    model: str
    base_url: str | None = None
    temperature: float = 0.3
    timeout: float = 120.0                               # seconds without a byte of the reply
    refused: frozenset = frozenset()

    def __str__(self):
        return f"the URL {self.client.base_url} and the model's name, {self.model!r}"

    @cached_property
    def client(self):
        """The client. It sends each request once: `ask` retries, so that it books each try."""
        import openai                                    # slow: half a second
        return openai.OpenAI(base_url=self.base_url, max_retries=0, timeout=self.timeout)

    def __call__(self, question):
        """Send a request once; resend it without a parameter that the server refuses."""
        import openai
        body = {"model": self.model, "messages": question.messages, "top_p": 0.95,
                "temperature": self.temperature, "max_tokens": question.max_tokens}
        if "max_tokens" in self.refused:
            body["max_completion_tokens"] = question.max_tokens
        if question.schema:
            schema = {"name": "reply", "strict": True, "schema": question.schema}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
            if "json_schema" in self.refused:
                body["response_format"] = {"type": "json_object"}
        for name in self.refused:
            body.pop(name, None)
        try:
            answer = self.client.chat.completions.with_raw_response.create(**body)
        except openai.APIConnectionError as error:       # billed, unless it was never sent
            reason = one_line(f"{error} ({error.__cause__!r}, --timeout {self.timeout:g})")
            return Reply("", reason, FREE if "ConnectError" in reason else None, 503)
        except openai.APIStatusError as error:
            answer = error.response
        reply = _read_answer(answer.status_code, hide_key(answer.text), question)
        if reply.status in (400, 422):
            for name, pattern in REFUSABLE.items():
                if name not in self.refused and re.search(pattern, reply.reason):
                    warnings.warn(f"{self.model}: leaving out the {name} ({reply.reason})")
                    self.refused |= {name}
                    return self(question)
        return reply


MALFORMED = ValueError, LookupError, TypeError, AttributeError


def _read_answer(status, text, question):
    """The Reply in an HTTP answer. An error in the body of status 200 determines the status."""
    usage = content = None
    try:
        body = json.loads(text)
        usage = _read_usage(body.get("usage"), question)
        if status < 400 and body.get("error"):
            status = int(body["error"]["code"])
        message = body["choices"][0]["message"]
        content = (message.get("content") or "").strip()
    except MALFORMED:
        pass                                             # then there is no content
    reason = one_line(f"HTTP {status}: {text}")
    # A server may bill a failure on its side. It bills no error of ours, unless it says so, and
    # a page of HTML is not the model's.
    is_free = 400 <= status < 500
    if status < 400 and content is None:
        is_free = re.match(r"\s*<", text)
        status = 404
    if status >= 400:
        return Reply("", reason, usage or (FREE if is_free else None), status)
    if re.search(r'(?i)"finish_reason"\s*:\s*"\w*(length|max|limit|error)', text):
        reason = f"cut off after {question.max_tokens} tokens, or failed; raise `max_tokens`"
    else:
        reason = None if content else one_line(f"the reply is empty: {message}")
    return Reply(content, reason, usage)


def _read_usage(report, question):
    """The number of billed tokens that a server reports; None without a valid report.

    A server may report the tokens of a model's reasoning in the total alone, and no prompt
    tokens for a cached prompt. Then the maximum of the prompt is booked.
    """
    try:
        prompt, completion, total = counts = [
            int(report.get(name) or 0)
            for name in ("prompt_tokens", "completion_tokens", "total_tokens")]
    except MALFORMED:
        return None
    if min(counts) < 0 or not 0 < sum(counts) < 1e9:
        return None
    if 0 < prompt * 20 < question.size:          # in no language a token has 20 bytes
        warnings.warn("the server reads less than a token per 20 bytes of a prompt: its "
                      "context is too small, and it cuts prompts off")
    return {"prompt_tokens": prompt or question.size,
            "completion_tokens": max(completion, total - prompt)}


def check_asking(config):
    """Raise InputError for wrong settings of a server, before any request.

    config: a settings.ServerConfig.
    """
    if config.max_usd is not None and None in config.prices:
        raise InputError("--max_usd needs --price_in and --price_out, USD per million tokens")
    if not re.fullmatch("[!-~]+", os.getenv("OPENAI_API_KEY", "")):
        raise InputError("OPENAI_API_KEY is missing or is no key; export a key, or any word "
                         "for a local server")
    if not re.fullmatch(r"https?://([^\s/]+@)?([\w.-]+|\[[\da-f:.]+\])(:\d{1,5})?(/\S*)?",
                        config.base_url or "https://h"):
        raise InputError(f"--base_url {config.base_url} is not like http://localhost:8000/v1")
