"""Requests to a chat model or to a function: each is paid once, kept, and never asked again.

    with Journal("feedback.jsonl.journal", price_in, price_out, max_usd) as journal:
        records = ask(questions, journal, Server("gpt-4o"), review)

`annotate.py` asks the annotator and `measures/judge.py` the judge, both by `ask`. The journal
is a file of JSON lines beside the output. A request is written to it before it is sent, and a
reply when it arrives, so a killed run loses nothing and pays for nothing twice.

Paper: §3.3 and Appendix B say what the annotator is asked, not how requests are made.
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

from tqdm import tqdm

from data import InputError


@dataclass(frozen=True)
class Question:
    """A request. key: its `question_key`; id: its row's name; about: what its asker reads."""
    key: str
    id: str
    messages: list[dict]
    about: dict = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Its bytes: no tokenizer makes more tokens of it."""
        return len(json.dumps(self.messages))


def question_key(*parts) -> str:
    """The hash that names a request in the journal: equal parts, equal key, in any process."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


FREE = {"prompt_tokens": 0, "completion_tokens": 0}


@dataclass(frozen=True)
class Reply:
    """What came back. reason: why it cannot be used; usage: the tokens that are billed for;
    again: whether to ask once more, since the question is not at fault."""
    text: str
    reason: str | None = None
    usage: dict = field(default_factory=FREE.copy)
    again: bool = False


class Journal:
    """Every request, before it is sent, and every reply as a JSON line; and what they cost.

    Prices are in USD per million tokens, max_usd in USD, of all runs together. records: key →
    the last reply; one that can be used is never asked for again. due: key → the most that a
    request may cost that is under way, or that was so when a process was killed.
    """

    def __init__(self, path, price_in=None, price_out=None, max_usd=None):
        self.path, self.prices, self.max_usd = Path(path), (price_in, price_out), max_usd
        self.records, self.due, self.spent = {}, {}, 0.0

    def __enter__(self) -> Journal:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.file = open(self.path, "a+b")
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self.file.close()
            raise InputError(f"{self.path}: another process is writing to it; wait for it, or "
                             f"choose another output") from error
        self.file.seek(0)
        line = b"\n"
        for number, line in enumerate(self.file, 1):
            try:
                self._note(json.loads(line))
            except (ValueError, LookupError, TypeError):
                print(f"{self.path}, line {number}: damaged, and passed over", file=sys.stderr)
        if not line.endswith(b"\n"):                         # torn when a process was killed
            self.file.write(b"\n")
        # What was asked and not answered when a process was killed may have been billed.
        self.spent += sum(self.due.values())
        self.due.clear()
        return self

    def __exit__(self, *exception):
        if not self.file.seek(0, os.SEEK_END):               # a dry run leaves nothing behind
            self.path.unlink()                               # while nobody else can open it
        self.file.close()

    def usd(self, prompt_tokens: float, completion_tokens: float) -> float | None:
        """What so many tokens cost, or None without prices."""
        if None in self.prices:
            return None
        return (prompt_tokens * self.prices[0] + completion_tokens * self.prices[1]) / 1e6

    def affords(self, usage: dict) -> bool:
        """Whether a request that may cost this much leaves all within max_usd."""
        booked = self.spent + sum(self.due.values()) + (self.usd(**usage) or 0.0)
        return self.max_usd is None or booked <= self.max_usd

    def begin(self, question: Question, usage: dict):
        """Book the most that a request may cost, before it is sent."""
        self._write({"key": question.key, "due": usage, "usd": self.usd(**usage)})

    def append(self, question: Question, reply: Reply, reason: str | None):
        """Keep a reply with its bill, and with the reason why it cannot be used."""
        self._write({"key": question.key, "id": question.id, "reply": reply.text,
                     "reason": reason, "usage": reply.usage, "usd": self.usd(**reply.usage)})

    def _write(self, record: dict):
        self.file.write(json.dumps(record).encode() + b"\n")
        self.file.flush()
        self._note(record)

    def _note(self, record: dict):
        key, usage = record["key"], record.get("due") or record["usage"]
        usd = record["usd"] or self.usd(**usage)                     # of a run without prices
        if not 0 <= (usd or 0.0) < math.inf:
            raise ValueError("no bill")
        if "due" in record:
            self.spent += self.due.pop(key, 0.0)             # under way when a run was killed
            self.due[key] = usd or 0.0
        else:
            self.records[key] = {"reply": record["reply"], "reason": record["reason"],
                                 "usage": usage, "usd": usd}
            self.due.pop(key, None)
            self.spent += usd or 0.0

    def usable(self, key: str) -> bool:
        """Whether there is a reply that need not be asked for again."""
        return key in self.records and self.records[key]["reason"] is None


def missing(questions: list[Question], journal: Journal) -> list[Question]:
    """Those without a usable reply, each once."""
    return list({q.key: q for q in questions if not journal.usable(q.key)}.values())


def forecast(todo: list[Question], journal: Journal, reply_tokens: int) -> str:
    """What asking will cost, at 4 bytes a token and so many tokens a reply, in a line."""
    prompt, reply = sum(q.size for q in todo) // 4, len(todo) * reply_tokens
    usd = journal.usd(prompt, reply)
    cost = "USD unknown: set --price_in and --price_out" if usd is None else f"${usd:,.4f}"
    return (f"{len(todo)} to ask: about {prompt:,} prompt + {reply:,} reply tokens (4 bytes a "
            f"token, {reply_tokens} tokens a reply), {cost}")


def ask(questions: list[Question], journal: Journal, answer, review,
        concurrency: int = 8) -> dict[str, dict]:
    """Ask what the journal has no usable reply to → key → record {reply, reason, usage, usd}.

    answer: a Server, or a function (question) → text. review(question, text): why it cannot be
    used, or None. Raises InputError where the budget is reached, after 25 unusable replies in a
    row, or where the server is gone. The first Ctrl-C asks nothing new and waits for what is
    under way, which is paid for; the second does not wait.
    """
    for question in questions:
        if journal.usable(question.key):
            record = journal.records[question.key]
            record["reason"] = review(question, record["reply"])
            if record["reason"]:                             # it was when it came
                print(f"{journal.path}: the reply to {question.id} was changed "
                      f"({record['reason']}) and is asked for again", file=sys.stderr)
    todo = missing(questions, journal)
    if todo and asyncio.run(_ask_all(todo, journal, answer, review, concurrency)):
        raise InputError(f"--max_usd {journal.max_usd:g} reached at ${journal.spent:.4f}, with "
                         f"{len(missing(todo, journal))} questions left; raise it to go on. "
                         f"Every reply is in {journal.path}")
    return journal.records


MOST_FAILURES_IN_A_ROW = 25           # then something is wrong, and money is being burnt


PAUSE = 1.5                           # seconds before a question is asked again; then 3, 6, …


async def _ask_all(todo, journal: Journal, answer, review, concurrency: int) -> bool:
    """Whether the budget ended it."""
    server = answer if isinstance(answer, Server) else None
    before, in_a_row, failed = set(journal.records), 0, 0
    waiting, stop = iter(todo), asyncio.Event()
    bar = tqdm(total=len(todo), desc="ask", delay=1)

    async def room(most: dict) -> bool:
        """Whether to send what may cost this much, once it is known what the others cost."""
        while not (stop.is_set() or journal.affords(most)):
            if journal.due:
                await asyncio.sleep(0.1)
            else:
                stop.set()
        return not stop.is_set()

    async def attempt(question: Question) -> bool:
        """Ask until there is an answer, which the journal then has; False: stopped before."""
        most = server.most(question) if server else FREE
        for n in range(server.retries + 1 if server else 1):
            if n:
                with suppress(TimeoutError):
                    await asyncio.wait_for(stop.wait(), PAUSE * 2 ** (n - 1))
            if not await room(most):
                return False
            journal.begin(question, most)
            if server:
                reply = await server.ask(question)
            else:
                reply = Reply(await asyncio.to_thread(answer, question))
            reason = reply.reason or review(question, reply.text)
            journal.append(question, reply, reason)
            if not reply.again:
                break
            bar.set_postfix_str(reason[:60])                 # it is asked again
        return True

    async def worker():
        nonlocal in_a_row, failed
        for question in waiting:
            if not await attempt(question):
                return
            reason = journal.records[question.key]["reason"]
            if reason and server and not server.answered:
                raise InputError(f"{server.client.base_url} with model {server.model!r}: "
                                 f"{reason}; check OPENAI_API_KEY, the URL and the name of "
                                 f"the model, and run the same command again")
            bar.update()
            failed += bool(reason)
            bar.set_postfix(failed=failed, refresh=failed > 0)
            # What has failed in an earlier run may never succeed.
            in_a_row = in_a_row + (question.key not in before) if reason else 0
            if in_a_row == MOST_FAILURES_IN_A_ROW:
                stop.set()
                raise InputError(f"{in_a_row} replies in a row cannot be used, last "
                                 f"{question.id}: {reason}; they are kept in {journal.path}")

    async with server.connect() if server else nullcontext():
        workers = [asyncio.create_task(worker()) for _ in range(min(concurrency, len(todo)))]
        try:
            await asyncio.wait(workers, return_when=asyncio.FIRST_EXCEPTION)
            too_dear = stop.is_set()
        finally:       # it is paid for, whatever has ended the run: an error, the first Ctrl-C
            stop.set()
            if not all(task.done() for task in workers):
                bar.set_description("waiting for what is under way")
            ends = await asyncio.gather(*workers, return_exceptions=True)
            bar.close()
    for error in filter(None, ends):
        raise error
    return too_dear


@dataclass
class Server:
    """A model behind an OpenAI-compatible server; its client reads the key."""
    model: str
    base_url: str | None = None
    temperature: float | None = 0.3                      # None: the model takes none
    max_tokens: int = 1200                               # of a reply
    retries: int = 6
    timeout: float = 120.0                               # seconds for a whole reply
    answered: bool = False                # ever; before, a failure ends the run at once

    def connect(self):
        """The client, to be closed behind the last question."""
        import openai                                    # half a second, for those who need it
        try:
            self.client = openai.AsyncOpenAI(base_url=self.base_url, max_retries=0,
                                             timeout=None)
        except Exception as error:                       # its transport has errors of its own
            raise InputError(f"--base_url {self.base_url}: {error}") from error
        return self.client

    def most(self, question: Question) -> dict:
        """The most tokens that a reply can be billed for, where the server does not count."""
        return {"prompt_tokens": question.size, "completion_tokens": self.max_tokens}

    async def ask(self, question: Question) -> Reply:
        """Send a question once, or again in the form that today's hosted models want."""
        import openai
        most, how = self.most(question), {"max_completion_tokens": self.max_tokens}
        if self.temperature is not None:
            how = {"max_tokens": self.max_tokens, "temperature": self.temperature,
                   "top_p": 0.95}
        try:
            async with asyncio.timeout(self.timeout):    # of all of it, however it trickles in
                reply = await self.client.chat.completions.with_raw_response.create(
                    model=self.model, messages=question.messages, **how)
            self.answered = True
            return read_completion(reply.text, most)
        except TimeoutError:                             # it may have been billed
            return Reply("", f"no answer in {self.timeout:g} s", most, True)
        except openai.APIConnectionError as error:       # so may this, once it was sent
            unsent = type(error.__cause__).__name__ == "ConnectError"
            return Reply("", f"{error} {error.__cause__!r}", FREE if unsent else most, True)
        except UnicodeEncodeError as error:              # half of a surrogate pair
            self.answered = True
            return Reply("", f"it cannot be sent: {error}")
        except openai.APIStatusError as error:           # refused, and so not billed
            status, said = error.status_code, str(error)[:500]
            if "max_tokens" in how and "max_completion_tokens' instead" in said:
                if self.temperature is not None:
                    print(f"{self.model} takes no temperature; it is asked without",
                          file=sys.stderr)
                self.temperature = None
                return await self.ask(question)
            self.answered |= status in (400, 413, 422)   # of this one question
            return Reply("", said, again=status in (408, 409, 429) or status >= 500)


def read_completion(text: str, most: dict) -> Reply:
    """A chat completion's JSON → Reply, billed by the server's own count, or else at most."""
    usage = most
    try:
        body = json.loads(text)
        counts = body.get("usage") or {}
        if all(isinstance(counts.get(name), int) and counts[name] >= 0 for name in most):
            usage = {name: counts[name] for name in most}
        choice = body["choices"][0]
        content, finish = choice["message"].get("content") or "", choice.get("finish_reason")
        empty = not content.strip()
    except (ValueError, LookupError, TypeError, AttributeError):
        return Reply(text, f"the server's answer is no chat completion: {text[:300]}", usage)
    if finish == "length":
        return Reply(content, f"cut off after {most['completion_tokens']} tokens", usage)
    return Reply(content, f"the reply is empty: {finish}" if empty else None, usage)


def check_asking(price_in, price_out, max_usd, base_url=None, free=False):
    """Raise InputError where nothing could be asked, before anything is read or spent."""
    if max_usd is not None and None in (price_in, price_out):
        raise InputError("--max_usd needs --price_in and --price_out, USD per million tokens")
    if free:
        return
    if not re.fullmatch("[!-~]+", os.environ.get("OPENAI_API_KEY", "")):
        raise InputError("OPENAI_API_KEY is not set, or no key; export it (any word does for a "
                         "local server without keys)")
    url = base_url or os.environ.get("OPENAI_BASE_URL") or "https://"
    if not url.startswith(("http://", "https://")):
        raise InputError(f"--base_url {url}: a URL begins as http://localhost:8000/v1 does")
