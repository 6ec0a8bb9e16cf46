"""Requests to a chat model, with a budget and a journal: no usable reply is paid for twice.

    with Journal("feedback.jsonl.journal", price_in, price_out, max_usd) as journal:
        replies = ask(questions, journal, Server("gpt-4o"), read)
    for question in questions:
        print(replies[question.key].value)              # what read(context, text) returned

`annotate.py` asks the annotator and `measures/judge.py` asks the judge; both use `ask`. The
journal is a file of JSON lines next to the output file. It has one line for each reply. Threads
send the requests. Only the main thread writes the journal and reads the replies: it writes a
reply as soon as the reply arrives, and then reads it. So a run that is killed or that fails
keeps all replies that arrived, and the next run does not request the usable ones again.

Paper: §3.3 and Appendix B define the prompts. They do not say how requests are sent. The tokens
and the cost of annotation (Tables 12 and 14) follow from `usage` in each line of the journal.
"""

import json
import os
import re
import warnings
from collections import deque
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property
from multiprocessing.pool import ThreadPool
from pathlib import Path
from threading import Event
from typing import Callable

from tqdm import tqdm

from data import (InputError, checksum, error_text, iterate_log, load_object, lock, one_line,
                  source_hashes)


@dataclass
class Question:
    """A request. key: its `question_key`; id: the row's id; context: data for `read`.

    max_tokens: the maximum length of the reply; schema: its JSON schema, or None for any form.
    old_key: its key in a journal that the fifth version of this project wrote. That key does
    not depend on the `source`.
    """
    key: str
    id: str
    messages: list
    context: dict
    max_tokens: int
    schema: dict | None = None
    old_key: str | None = None

    @cached_property
    def size(self):
        """Length of the request in bytes, an upper bound on the number of its tokens."""
        return len(json.dumps([self.messages, self.schema]))


def question_key(*parts):
    """The hash of a request's parts, which identifies it in the journal of every run.

    The `source` of a Server or Function is one of the parts. So two servers do not share
    replies, even if their models have the same name.
    """
    return checksum(state=parts)[:32]


NO_TOKENS = {"prompt_tokens": 0, "completion_tokens": 0}


@dataclass
class Reply:
    """The reply to a question, or the failure of a request.

    reason: why the reply is unusable, or None; usage: number of billed tokens, or None if it is
    unknown; status: HTTP status, or 0 if a function returned an object that is not a text;
    remedy: what to do if the reply is unusable; value: the value that `read` returned.
    """
    text: str
    reason: str | None = None
    usage: dict | None = None
    status: int = 200
    remedy: str = ""
    value: object = None


class Journal:
    """A file with one JSON line per reply or failed request, and their total cost.

    Prices are in USD per million tokens; None counts as 0. max_usd: the budget in USD over all
    runs that use this file. spent: cost of all its requests in USD, at these prices. replies:
    key → last reply. overrun: the largest ratio of a reply's length, as its server reported it,
    to `max_tokens` of the question; at least 1.
    """

    overrun = 1
    size = None                                      # of the file when it was last closed

    def __init__(self, path, price_in=None, price_out=None, max_usd=None):
        self.path = Path(path)
        self.prices = {"prompt_tokens": price_in or 0, "completion_tokens": price_out or 0}
        self.max_usd = max_usd

    def __enter__(self):
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.file = open(self.path, "a+")
        lock(self.file, self.path)
        size = self.file.tell()
        if size != self.size:
            self.spent = 0.0
            self.replies = {}
            for _ in tqdm(iterate_log(self.path, self._add), "read the journal", delay=1):
                pass
        self.file.seek(max(0, size - 1))
        if self.file.read() not in "\n":
            print(file=self.file)                    # end the half line of a killed process
        return self

    def __exit__(self, *exception):
        self.size = self.file.tell()
        self.file.close()

    def usd(self, usage):
        """The cost of the tokens in USD."""
        return sum(usage[name] * price for name, price in self.prices.items()) / 1e6

    def max_usage(self, question):
        """The most tokens that a request may use: its `size`, and max_tokens × `overrun`."""
        return {"prompt_tokens": question.size,
                "completion_tokens": question.max_tokens * self.overrun}

    def can_afford(self, requests):
        """Whether the budget covers all these requests together.

        A request is a pair (question, …). Raises InputError if there is only one request and
        the budget does not cover it.
        """
        usd = sum(self.usd(self.max_usage(question)) for question, _ in requests)
        if self.max_usd is None or self.spent + usd <= self.max_usd:
            return True
        if len(requests) == 1:
            raise InputError(f"--max_usd {self.max_usd:g} reached: ${self.spent:.4f} is spent, "
                             f"and the next request may cost ${usd:.4f}. Raise it, or lower "
                             "`max_tokens` of the task or mode")
        return False

    def append(self, question, reply):
        """Write a reply. If its usage is unknown, the maximum is counted."""
        usage = reply.usage or self.max_usage(question)
        row = {"key": question.key, "id": question.id, "reply": reply.text,
               "reason": reply.reason, "usage": usage,
               "ratio": usage["completion_tokens"] / question.max_tokens}
        print(json.dumps(row), file=self.file, flush=True)
        self._add(row)

    def _add(self, row):
        """Update replies, spent and overrun with a line of the file.

        Raises ValueError, TypeError or LookupError if the line has another form.
        """
        usd = self.usd(row["usage"])
        if not (0 <= usd < 1e9 and "".join([row["key"], row["reply"], row["reason"] or ""])):
            raise ValueError("no text, or a cost that cannot be")
        # The fourth version of this project stored no ratio. Then 1 is used.
        self.overrun = max(self.overrun, row.get("ratio", 1))
        self.replies[row["key"]] = Reply(row["reply"], row["reason"], row["usage"])
        self.spent += usd


# The one Journal of a run. With --critic annotator, each iteration of phase 3 opens the file.
# After the first time, it is read again only if another process has changed its size.
run_journal = cache(Journal)


def _why_unusable(question, journal, read):
    """Apply `read` to the stored reply, if needed; return why it is unusable, or None."""
    reply = journal.replies[question.key]
    if not (reply.reason or reply.value):
        try:
            reply.value = read(question.context, reply.text)
        except InputError:
            raise
        except ValueError as error:
            reply.reason = one_line(str(error)) or "refused"
    return reply.reason


def _missing(questions, journal, read):
    """The questions without a usable reply, without duplicates.

    A question without a reply gets the reply that is stored under its `old_key`, if any.
    """
    for question in questions:
        if question.old_key in journal.replies:
            warnings.warn("using replies that the fifth version stored without their server")
            journal.replies.setdefault(question.key, journal.replies[question.old_key])
    return {question.key: question for question in questions
            if question.key not in journal.replies
            or _why_unusable(question, journal, read)}.values()


def forecast(questions, journal, read):
    """One line with the number of missing replies and their maximum cost."""
    todo = _missing(questions, journal, read)
    usd = sum(journal.usd(journal.max_usage(question)) for question in todo)
    cost = f"at most ${usd:,.4f}" if usd else "USD unknown without prices"
    return f"{len(todo)} requests to send, {cost}"


def hide_key(text):
    """The text with "…" in place of the API key.

    A key below ten characters is not hidden, because it is a placeholder such as "none".
    """
    key = os.getenv("OPENAI_API_KEY", "")
    return text.replace(key, "…") if len(key) > 9 else text


# ── Asking

MOST_FAILURES = 25                    # unusable replies in a row; after them the run ends
RETRIES = 6                           # of a request, if the server is too busy or has failed
AGAIN = 300                           # our own status: send again, without one parameter
PAUSE = 1.5                           # seconds before the first retry; then 6, 13.5, 24, …


def ask(questions, journal, model, read, concurrency=8):
    """Request every reply that is missing; return {key: last Reply}.

    model: a `Server` or a `Function`, which maps a Question to a Reply. Threads call it.
    read(context, text) returns the value of a reply, or raises ValueError if the reply is
    unusable. It also reads the replies of earlier runs; an unusable one is requested again.

    Raises InputError if the budget is reached; if 25 replies in a row are unusable (a question
    that failed in an earlier run does not count); if the first request fails, or the first
    three are refused as invalid (status 400 or 422); if a function returned an unusable object;
    or if the function or `read` raises it. After the first Ctrl-C, `ask` sends no new request
    and waits for the open ones, which are billed. The second Ctrl-C stops at once.
    """
    missing = _missing(questions, journal, read)
    old_keys = set(journal.replies)
    # Questions that failed in an earlier run come last.
    todo = sorted(missing, key=lambda question: question.key in old_keys)
    waiting = deque((question, 0) for question in todo)       # question, number of retries
    running = {}                          # result of a thread → question, number of retries
    stop = Event()
    has_answered = False
    failures = 0                          # in a row; old ones, which may recur, do not count

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

    # Threads of a ThreadPool do not keep the process alive: a second Ctrl-C ends it at once,
    # even if some still wait for the server.
    with ThreadPool(concurrency) as pool, tqdm(todo, "ask", delay=1) as bar:
        try:
            while waiting or running:
                # Until the server has answered, requests are sent one at a time: the first
                # answer shows what the server accepts and bills.
                while (waiting and len(running) < (concurrency if has_answered else 1)
                       and journal.can_afford([waiting[0], *running.values()])):
                    request = waiting.popleft()
                    running[pool.apply_async(send, request)] = request
                for result, question, trial in arrived():
                    reply = result.get()               # raises what `send` raised
                    reason = _why_unusable(question, journal, read)
                    if reason:
                        bar.set_postfix_str(reason)
                    has_answered |= reply.status <= 200
                    # From 429 on: too many requests, or a failure of the server.
                    is_retry = reply.status >= 429
                    if reply.status == AGAIN or is_retry and trial < RETRIES:
                        waiting.appendleft((question, trial + is_retry))
                        continue
                    bar.update()
                    is_certain = not (has_answered and reply.status)   # that a failure recurs
                    is_new = question.key not in old_keys or is_certain
                    failures = failures + is_new if reason else 0
                    most = MOST_FAILURES
                    if is_certain:               # 400 and 422 may be due to the row alone
                        most = 3 if reply.status in (400, 422) else 1
                    if reason and failures >= most:
                        advice = f"check {model if most == 1 else journal.path}"
                        raise InputError(f"{failures} unusable replies in a row, the last for "
                                         f"{question.id}: {reason}; {reply.remedy or advice}")
        finally:
            stop.set()
            if running:
                bar.set_description("waiting for open requests; Ctrl-C stops at once")
            while running:
                list(arrived())
    return journal.replies


# ── A server

# What a server may refuse → the pattern of its error message. After a message about
# `temperature` or `top_p`, `top_p` is left out first. `max_tokens` is not left out if the
# message only says that its value is too large.
REFUSABLE = {
    "json_schema": "(?i)response.?format|schema",
    "response_format": "(?i)response.?format|json.?(object|mode)",
    "top_p": r"(?i)top_?p\b|temperature",
    "temperature": "(?i)temperature",
    "max_tokens": r"(?i)^(?=.*max_tokens).*(instead|(un|not |n't )support|unrecogni[sz]ed|"
                  r"unknown|extra|unexpected|deprecated|not (permitted|allowed))",
}


TOP_P = 0.95


@dataclass
class Server:
    """A model on an OpenAI-compatible server. The client reads OPENAI_API_KEY.

    refused: names in REFUSABLE that the server refused. has_answered: whether the server has
    given an answer; then no more names are added.
    """
    model: str
    base_url: str | None = None
    temperature: float = 0.3
    timeout: float = 120.0                               # seconds without a byte of the reply
    refused: frozenset = frozenset()
    has_answered: bool = False

    def __str__(self):
        return (f"OPENAI_API_KEY, and the URL {self.client.base_url} and the model's name, "
                f"{self.model!r}")

    @property
    def source(self):
        """The URL and the sampling settings, which are a part of each `question_key`."""
        return [self.base_url or os.getenv("OPENAI_BASE_URL"), self.temperature, TOP_P]

    @cached_property
    def client(self):
        """The client. It does not retry, because `ask` does, so the journal has every try."""
        import openai                                    # slow: half a second
        return openai.OpenAI(base_url=self.base_url, max_retries=0, timeout=self.timeout)

    def __call__(self, question):
        """Send a request once; return the Reply.

        Its status is AGAIN if the server refused a parameter, which is left out from then on.
        An error message may repeat the prompt, and so name any parameter by chance. Therefore
        no parameter is left out after the first answer. If leaving out parameters did not help,
        the next request has all of them again.
        """
        import openai
        body = {"model": self.model, "messages": question.messages, "top_p": TOP_P,
                "temperature": self.temperature, "max_tokens": question.max_tokens}
        if "max_tokens" in self.refused:
            body["max_completion_tokens"] = question.max_tokens
        if question.schema:
            body["response_format"] = {"type": "json_schema", "json_schema": {
                "name": "reply", "strict": True, "schema": question.schema}}
            if "json_schema" in self.refused:
                body["response_format"] = {"type": "json_object"}
        for name in self.refused:
            body.pop(name, None)
        try:
            answer = self.client.chat.completions.with_raw_response.create(**body)
        except openai.APIConnectionError as error:
            cause = one_line(repr(error.__cause__))
            if cause.startswith("Connect"):              # the request was not sent: it is free
                return Reply("", cause, NO_TOKENS, 503)
            return Reply("", cause, None, 503,
                         f"raise --timeout {self.timeout:g}, or lower --concurrency")
        except openai.APIStatusError as error:
            answer = error.response
        reply = _read_answer(answer.status_code, hide_key(answer.text), question)
        self.has_answered |= reply.status == 200
        if reply.status in (400, 422) and not self.has_answered:
            for name, pattern in REFUSABLE.items():
                if name not in self.refused and re.search(pattern, reply.reason):
                    warnings.warn(f"{self.model}: leaving out the {name} ({reply.reason})")
                    self.refused |= {name}
                    return replace(reply, status=AGAIN)
            self.refused = frozenset()
        return reply


MALFORMED = ValueError, LookupError, TypeError, AttributeError


def _read_answer(status, text, question):
    """The Reply in an HTTP answer. If a body with status 200 has an error, its code is used."""
    usage = content = None
    # A server may bill a request at which the server fails (5xx). A request that it refuses
    # (4xx) is free, unless the answer reports billed tokens.
    is_free = 400 <= status < 500
    try:
        body = json.loads(text)
        usage = _read_usage(body.get("usage"), question)
        choice = (body.get("choices") or [{}])[0]
        error = body.get("error") or choice.get("error")
        if error and status < 400:
            status = int(error["code"])
            is_free = 400 < status < 430                 # refused before the model began
        else:
            content = choice["message"].get("content") or ""
            if isinstance(content, list):
                content = "".join(part["text"] for part in content if part["type"] == "text")
            content = content.strip()
    except MALFORMED:
        pass                                             # then there is no content
    reason = one_line(f"HTTP {status}: {text}")
    if status < 400 and content is None:
        is_free = re.match(r"\s*<", text)                # a model writes no page of HTML
        status = 404
    if status >= 400:
        return Reply("", reason, usage or (NO_TOKENS if is_free else None), status)
    if re.search(r'(?i)"finish_reason"\s*:\s*"\w*(length|max|limit|error)', text):
        reason = f"cut off after {question.max_tokens} tokens, or failed; raise `max_tokens`"
    else:
        reason = None if content else one_line(f"the reply is empty: {choice}")
    return Reply(content, reason, usage)


def _read_usage(report, question):
    """The number of billed tokens that a server reports; None without a valid report.

    Some servers count the tokens of a model's reasoning only in the total, so the total is
    used, too. Some report no prompt tokens if the prompt was cached. Then the size of the
    question is counted, an upper bound.
    """
    try:
        prompt, completion, total = counts = [
            int(report.get(name) or 0)
            for name in ("prompt_tokens", "completion_tokens", "total_tokens")]
    except MALFORMED:
        return None
    if min(counts) < 0 or not 0 < sum(counts) < 1e9:
        return None
    if 0 < prompt * 20 < question.size:          # tokens have far fewer bytes on average
        warnings.warn("the server reads less than a token per 20 bytes of a prompt: its "
                      "context is too small, and it cuts prompts off")
    return {"prompt_tokens": prompt or question.size,
            "completion_tokens": max(completion, total - prompt)}


# ── A function in place of a server

@dataclass
class Function:
    """A function (row, response) of the user, which answers in place of a server, for free.

    name: module:function. Raises InputError if it cannot be imported or is no function.
    """
    name: str

    def __post_init__(self):
        self.function = load_object("--annotator_function", self.name, Callable)

    def __str__(self):
        return f"--annotator_function {self.name}"

    def __call__(self, question):
        """Call the function; its text, or its dict or dataclass as JSON, is the Reply.

        Raises InputError if the function raises. If a dict or dataclass is unusable, or has a
        list under a key that the form lacks, then `ask` ends the run: the function would
        return the same object again.
        """
        try:
            value = self.function(question.context["row"], question.context["response"])
            text = value if isinstance(value, str) else json.dumps(value, default=asdict)
        except (Exception, SystemExit) as error:         # SystemExit would end only this thread
            raise InputError(f"{self}, row {question.id}: {error_text(error)}") from error
        if text is value:
            return Reply(text, None, NO_TOKENS)
        lists = set(re.findall(r'"(\w+)": \[', text))
        unknown = ", ".join(lists - question.schema["properties"].keys())
        return Reply(text, unknown, NO_TOKENS, 0,
                     f"{self} must return a Feedback, or a dict with critique, good_spans, "
                     f"poor_spans and no other list")

    @property
    def source(self):
        """Its `source_hashes`: after an edit of the function, old replies are not used."""
        return source_hashes(self.name, self.function)


# ── Checks

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
