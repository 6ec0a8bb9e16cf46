"""Requests to a server or a function: the bill, the journal, failures, Ctrl-C and SIGKILL."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
from annotate import (Feedback, FeedbackError, Grounding, Mode, annotate, function_hash,
                      print_feedback)
from ask import Journal, Question, Server, ask, hide_key, question_key
from data import InputError, read_rows, write_rows
from helpers import ROOT, error_message, read_jsonl
from loopback import Answer, completion, critique, httpx, loopback
from settings import AnnotateConfig

MAX_TOKENS = 100


def usd(prompt_tokens, completion_tokens) -> float:
    return (prompt_tokens * 2.5 + completion_tokens * 10) / 1e6       # USD per million tokens


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch):
    monkeypatch.setattr("ask.PAUSE", 0.0)


@pytest.fixture()
def server():
    """Tests replace `answer(body, number of the request)`."""
    with loopback(lambda body: fake.answer(body, len(fake.requests))) as fake:
        fake.answer = lambda body, number: completion()
        yield fake


def questions(n: int, schema=None) -> list[Question]:
    """Some prompts are longer than others."""
    messages = [[{"role": "user", "content": f"Answer number {i}. " + "w " * (60 + i % 7)}]
                for i in range(n)]
    return [Question(question_key(m), f"row-{i}", m, {"id": i}, MAX_TOKENS, schema)
            for i, m in enumerate(messages)]


SIZE = questions(1)[0].size


def run(path, n=3, cap=None, concurrency=1, read=lambda context, text: text, retries=2,
        prices=(2.5, 10.0), schema=None, **settings):
    """Ask n questions; return ({row: Reply}, message of the InputError or None, spent USD)."""
    message = None
    asked = questions(n, schema)
    model = Server("m", **{"base_url": "http://h/v1", **settings})
    with Journal(path, *prices, cap) as journal:
        try:
            ask(asked, journal, model, read, concurrency, retries)
        except InputError as error:
            message = str(error)
            assert "\n" not in message
        replies = {question.id: journal.replies[question.key] for question in asked
                   if question.key in journal.replies}
        return replies, message, journal.spent


# ── The bill

def usage(prompt, reply, total=0) -> dict:
    return {"prompt_tokens": prompt, "completion_tokens": reply, "total_tokens": total}


def good(report):
    """A server that bills nearly the maximum of each request, and reports it in some way."""
    def answer(body, number):
        billed = len(json.dumps([body["messages"], None])) - 20, MAX_TOKENS - 3
        return completion(billed=billed, usage=report(*billed))
    return answer


honest = good(usage)


def lost(every, body, status=500):
    """A server that bills every n-th request at the maximum and does not answer it."""
    return lambda request, number: honest(request, number) if number % every else Answer(
        body, status, (len(json.dumps([request["messages"], None])), MAX_TOKENS))


def exceeds(times, every=1):
    """A server that bills a multiple of max_tokens for every n-th request, and says so."""
    return lambda body, number: completion(
        billed=(SIZE - 20, MAX_TOKENS * (times if number % every == 0 else 0.5)))


TIMEOUT = httpx.ReadTimeout("timed out")
ERROR_WITH_USAGE = {"error": {"message": "content filter"}, "usage": usage(300, 1200, 1500)}
WITHIN = [honest, good(lambda p, c: {"total_tokens": p + c}), good(lambda p, c: usage(-p, -c)),
          lost(1, "{}"), lost(1, TIMEOUT), lost(2, httpx.ReadError("reset")),
          lost(2, '{"choices": [{"mess', 200)]
EXCEEDING = [exceeds(3), exceeds(9, 5), lambda body, number: honest(body, number) if number == 1
             else Answer(ERROR_WITH_USAGE, 400, (300, 1200))]


@pytest.mark.parametrize("cap, concurrency", [(0.4, 1), (9.0, 64)])      # of the largest cost
@pytest.mark.parametrize("answer", WITHIN + EXCEEDING)
def test_the_cap_holds_and_the_bill_is_booked(server, tmp_path, answer, cap, concurrency):
    """Two runs of 24 questions. No usable reply is bought twice."""
    server.answer = answer
    dollars = cap * sum(usd(q.size, MAX_TOKENS) for q in questions(24))
    for _ in range(2):
        _, message, booked = run(tmp_path / "j", 24, dollars, concurrency, retries=1)
    bills = [usd(*billed) for billed in server.billed]
    surprise = concurrency * max(bills) if answer in EXCEEDING else 0.0
    assert sum(bills) <= min(booked, dollars + surprise) * (1 + 1e-9)
    usable = [row["key"] for row in read_jsonl(tmp_path / "j") if not row["reason"]]
    assert len(set(usable)) == len(usable)
    if cap == 0.4 and len(usable) > 3:
        assert "--max_usd" in message and sum(bills) > 0.3 * dollars


def test_a_later_run_expects_what_an_earlier_one_was_billed(server, tmp_path):
    server.answer = exceeds(3)
    run(tmp_path / "j", 1)
    cap = 3.5 * usd(SIZE, 3 * MAX_TOKENS)
    replies, message, booked = run(tmp_path / "j", 30, cap, 64)
    assert "reached" in message and sum(usd(*billed) for billed in server.billed) <= cap
    assert len(replies) == 3 == len(server.requests)
    assert "reached" in run(tmp_path / "j", 30, booked / 2)[1]
    assert "--max_usd 0 reached" in run(tmp_path / "new", 30, 0.0)[1]
    assert len(server.requests) == 3


MAXIMUM = SIZE, MAX_TOKENS


@pytest.mark.parametrize("report, booked", [
    (usage(300, 60, 1360), (300, 1060)), (usage(300.0, 60.0, 12), (300, 60)),
    (usage(0, 60, 60), (SIZE, 60)), ({"total_tokens": 300}, (SIZE, 300)),
    *[(report, MAXIMUM) for report in (usage("300", "many"), usage(1e10, 60), [0], "many")]])
def test_what_is_reported_is_booked(server, tmp_path, report, booked):
    server.answer = lambda body, number: completion(usage=report)
    replies, _, spent = run(tmp_path / "j", 1)
    assert tuple(replies["row-0"].usage.values()) == booked
    assert spent == pytest.approx(usd(*booked))


@pytest.mark.parametrize("answer, booked, tries", [
    (Answer(ERROR_WITH_USAGE, 400), (300, 1200), 1), (Answer("{}", 400), (0, 0), 1),
    (Answer({"error": {"code": 401}}), (0, 0), 1), (Answer("{}", 429), (0, 0), 3),
    (Answer({"error": {"code": 502}}), MAXIMUM, 3), (Answer(TIMEOUT), MAXIMUM, 3),
    (Answer(httpx.ConnectError("refused")), (0, 0), 3), (Answer(" <!doctype>"), (0, 0), 1),
    (Answer('{"choices": [{"mes'), MAXIMUM, 1), (Answer("null"), MAXIMUM, 1)])
def test_each_failed_attempt_is_booked_if_it_may_be_billed(server, tmp_path, answer, booked,
                                                           tries):
    """429, 5xx and lost connections are retried. The first question goes alone and ends it."""
    server.answer = lambda body, number: answer
    replies, message, spent = run(tmp_path / "j", 60, concurrency=8)
    assert "1 unusable" in message and "check OPENAI_API_KEY, and the URL http://h/" in message
    assert len(server.requests) == tries == len(read_jsonl(tmp_path / "j"))
    assert spent == pytest.approx(tries * usd(*booked))
    words = answer.body if isinstance(answer.body, str | Exception) else json.dumps(answer.body)
    assert f"{words}".strip()[:20] in replies["row-0"].reason


# ── Replies that are unusable, and what a server refuses

@pytest.mark.parametrize("message, finish, words", [
    ({"refusal": "I cannot judge this."}, "stop", "I cannot judge this."),
    ({"content": " "}, "content_filter", "empty"), ({"content": "It is"}, "error", "failed"),
    ({"content": "It is"}, "MAX_TOKENS", "cut off after 100 tokens")])
def test_the_reason_says_what_is_there_instead(server, tmp_path, message, finish, words):
    """The next question is asked. A text that was cut off is not read, but asked again."""
    answer = completion(finish=finish, **{"content": None} | message)
    text = '{"finish_reason": "length"}'             # a text that only speaks of it is whole
    server.answer = lambda body, number: answer if number <= 2 else completion(text)
    replies, error, _ = run(tmp_path / "j", 2)
    assert error is None and len(server.requests) == 2
    assert words in replies["row-0"].reason and words in replies["row-1"].reason
    assert run(tmp_path / "j", 2)[0]["row-0"].value == text and len(server.requests) == 4


def test_25_unusable_replies_in_a_row_end_a_run_but_do_not_block_later_rows(server, tmp_path):
    """An earlier failure is asked last and does not count, unless nothing is answered."""
    def answer(body, number):
        row = int(re.search(r"number (\d+)", str(body))[1])
        return completion("" if row < 40 else "fine") if row else Answer("{}", 400)

    server.answer = answer
    for message, count in (("1 unusable replies", 1), ("25 unusable.*; read them in", 26)):
        assert re.search(message, run(tmp_path / "j", 60)[1]) and len(server.requests) == count
    replies, message, _ = run(tmp_path / "j", 60, concurrency=4)
    assert message is None and len(server.requests) == 26 + 60
    assert sum(reply.reason is None for reply in replies.values()) == 20
    server.answer = lambda body, number: Answer("{}", 401)
    assert "1 unusable replies" in run(tmp_path / "j", 60)[1] and len(server.requests) == 87
    server.answer = lambda body, n: completion("" if n % 25 and n > 88 else "fine")
    assert run(tmp_path / "new", 74)[1] is None      # a good reply starts the count again


@pytest.mark.parametrize("text, refused, left_out", [
    ("temperature and top_p cannot both be given", {"temperature", "top_p"}, {"top_p"}),
    ("'temperature' does not support 0.3", {"temperature"}, {"temperature", "top_p"}),
    ("'max_tokens' is not supported. Use 'max_completion_tokens' instead.", {"max_tokens"},
     {"max_tokens"}),
    ("max_tokens is too large: 100", {"max_tokens"}, None)])
def test_what_a_server_refuses_is_left_out(server, tmp_path, recwarn, text, refused, left_out):
    """All rows have a reply, and no more is left out. Other refusals end the run at once."""
    server.answer = lambda body, number: (Answer({"detail": text}, 422)
                                          if refused <= body.keys() else completion())
    _, message, spent = run(tmp_path / "j", concurrency=8)
    if left_out is None:
        assert text in message and len(server.requests) == 1 and spent == 0 and not recwarn
        return
    assert message is None and spent == pytest.approx(3 * usd(40, 60))
    for body in server.requests[-2:]:
        assert {"top_p", "temperature", "max_tokens"} - body.keys() == left_out
        assert body.get("max_completion_tokens", body.get("max_tokens")) == MAX_TOKENS
    assert len(recwarn) == len(server.requests) - 3 and text in str(recwarn[0].message)


def test_the_form_is_asked_for_as_a_schema_then_as_an_object_then_not(server, tmp_path):
    """Also: a prompt that was cut off is warned of."""
    server.answer = lambda body, number: (Answer("Unknown response_format", 400)
                                          if number <= 2 else completion(billed=(2, 60)))
    with pytest.warns(UserWarning, match="leaving out the|is too small") as seen:
        run(tmp_path / "j", 2, schema={"type": "object"})
    assert {str(warning.message)[:10] for warning in seen} == {"m: leaving", "the server"}
    formats = [body.get("response_format", {}) for body in server.requests]
    assert [f.get("type") for f in formats] == ["json_schema", "json_object", None, None]
    assert formats[0]["json_schema"] == {"name": "reply", "strict": True,
                                         "schema": {"type": "object"}}


# ── The journal

def test_a_reply_is_written_before_it_is_read_and_read_before_it_is_bought_again(server,
                                                                                 tmp_path):
    """A reader that refuses replies, and one with a fault, lose no reply."""
    def refuse(context, text):
        raise ValueError(f"no labels\n in {context['id']}" if context["id"] else "")

    def fail(context, text):
        if context["id"] == 5:
            raise InputError("--mode x: a fault")

    server.answer = lambda body, number: completion(f"reply {number}")
    assert run(tmp_path / "j", 20, read=fail)[1] == "--mode x: a fault"
    assert 6 == len(server.requests) == len(read_jsonl(tmp_path / "j"))
    assert run(tmp_path / "j", 20, concurrency=4)[1] is None and len(server.requests) == 20
    replies, _, _ = run(tmp_path / "j", 20, read=refuse)     # it refuses, so they are bought
    assert len(server.requests) == 40 and replies["row-3"].reason == "no labels in 3"
    assert all(reply.reason and reply.value is None for reply in replies.values())
    replies, _, _ = run(tmp_path / "j", 20, read=lambda context, text: len(text))
    assert len(server.requests) == 40 and replies["row-3"].value == len("reply 24")


@pytest.mark.parametrize("line, pattern, text", [
    (2, b"^.*$", b"7"), (2, b"^.*$", b"\xff"), (4, b"^(.{40}).*$", rb"\1")])
def test_a_line_that_is_malformed_or_cut_off_costs_only_its_row(server, tmp_path, line, pattern,
                                                                text):
    path = tmp_path / "j"
    run(path, 4)
    lines = path.read_bytes().splitlines()
    lines[line - 1] = re.sub(pattern, text, lines[line - 1])
    path.write_bytes(b"\n".join(lines) + b"\n" * (line < 4))
    for _ in range(2):
        assert len(run(path, 4)[0]) == 4 and len(server.requests) == 5


def test_a_journal_of_the_fourth_version_is_read(server, tmp_path):
    """Its replies are reused and its costs count, with today's prices. It has one writer."""
    key = questions(1)[0].key
    write_rows(tmp_path / "j", [
        {"key": key, "due": usage(900, 100), "usd": 0.1, "time": 1.0, "sha256": "a"},
        {"key": key, "id": "row-0", "reply": "one", "reason": None, "usd": 0.01, "time": 2.0,
         "usage": {"prompt_tokens": 300, "completion_tokens": 60}}])
    with Journal(tmp_path / "j"), pytest.raises(InputError, match="another process"):
        Journal(tmp_path / "j").__enter__()
    replies, _, spent = run(tmp_path / "j", prices=(5.0, 20.0))
    assert [reply.value for reply in replies.values()] == ["one", "fine", "fine"]
    assert len(server.requests) == 2
    assert spent == pytest.approx(2 * (usd(300, 60) + 2 * usd(40, 60)))


SECRET = "sk-Ab3-" + "x1" * 20


@pytest.mark.parametrize("answer", [
    Answer(f"top_p {SECRET}", 400), completion(f"It is {SECRET}."), Answer(SECRET)])
def test_the_key_reaches_neither_the_journal_nor_a_message(server, tmp_path, monkeypatch,
                                                           recwarn, capsys, answer):
    monkeypatch.setenv("OPENAI_API_KEY", SECRET)
    server.answer = lambda body, number: answer
    replies, message, _ = run(tmp_path / "j")
    texts = [(tmp_path / "j").read_text(), str(replies), str(message), *capsys.readouterr()]
    assert SECRET not in str(texts + [warning.message for warning in recwarn])
    monkeypatch.setenv("OPENAI_API_KEY", "something")            # a usual word is no secret
    assert hide_key("There is something.") == "There is something."


# ── Retries, Ctrl-C, SIGKILL, and a server that hangs or is killed

def interrupt_after(seconds, path):
    """Press Ctrl-C while 60 questions are asked."""
    signal.signal(signal.SIGINT, signal.default_int_handler)     # a shell may ignore SIGINT
    threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        run(path, 60, concurrency=8)


def test_ctrl_c_waits_and_loses_no_reply(server, tmp_path, capsys):
    """A press while a line is written may write it twice."""
    server.answer = lambda body, number: time.sleep(0.05) or completion()
    interrupt_after(0.25, tmp_path / "j")
    requests = len(server.requests)
    assert 1 < requests == len({row["key"] for row in read_jsonl(tmp_path / "j")}) < 60
    assert "waiting for open requests" in capsys.readouterr().err
    assert run(tmp_path / "j", 60, concurrency=8)[1] is None and len(server.requests) == 60


def test_retries_pause_longer_each_time_and_ctrl_c_does_not_wait_for_them(server, tmp_path,
                                                                          monkeypatch):
    monkeypatch.setattr("ask.PAUSE", 0.05)
    server.answer = lambda body, n: Answer("{}", 429) if n <= 3 else completion()
    start = time.monotonic()
    assert run(tmp_path / "j", 2, retries=3)[1] is None
    assert time.monotonic() - start >= 0.05 * (1 + 4 + 9) and len(server.requests) == 5
    monkeypatch.setattr("ask.PAUSE", 3600)
    server.answer = lambda body, n: Answer("{}", 429) if n > 6 else completion()
    interrupt_after(0.5, tmp_path / "new")
    assert len(server.requests) == 6 + 8


CRITIC = """
import os, time

def judge(row, response):
    os.write(1, b"asked\\n")                  # one write: threads do not mix their lines
    time.sleep(0 if int(row["id"]) < {quick} else 60)
    return {{"critique": "c", "good_spans": [], "poor_spans": []}}
"""


def start_annotating(folder, quick):
    """annotate.py in a process, with a critic that sleeps from row `quick` on."""
    (folder / "critic.py").write_text(CRITIC.format(quick=quick))
    write_rows(folder / "rows.jsonl", [{"id": str(i), "prompt": "p", "response": f"It is {i}."}
                                       for i in range(60)])
    program = (f"import signal, sys\nsys.path[:0] = ['.', {str(ROOT)!r}]\n"
               f"signal.signal(signal.SIGINT, signal.default_int_handler)\n"
               f"sys.argv[1:] = ['--task=ultrafeedback', '--annotator_function=critic:judge']\n"
               f"import annotate\nannotate.main()")
    process = subprocess.Popen([sys.executable, "-c", program], cwd=folder, text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    for _ in range(quick + 8):
        while process.stdout.readline() != "asked\n":
            assert process.poll() is None, process.stderr.read()
    return process


def test_a_second_ctrl_c_does_not_wait_and_a_killed_run_loses_no_reply(tmp_path):
    """Threads sleep for a minute, and the process ends. An edited critic is asked anew."""
    process = start_annotating(tmp_path, 20)
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=20) and "KeyboardInterrupt" in process.stderr.read()
    journal = tmp_path / "feedback.jsonl.journal"
    assert sorted(int(row["id"]) for row in read_jsonl(journal)) == [*range(20)]
    process = start_annotating(tmp_path, 40)
    process.kill()
    process.wait()
    assert len(read_jsonl(journal)) == 20 + 40


HTTP_SERVER = """
import http.server, json, time

class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        request = self.rfile.read(int(self.headers["Content-Length"]))
        if b"number 0" not in request:
            time.sleep(60)
        reply = json.dumps({"choices": [{"message": {"content": "fine"}}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
print(server.server_port, flush=True)
server.serve_forever()
"""


def test_a_server_that_hangs_or_is_killed_is_booked_but_one_that_is_gone_is_free(tmp_path):
    """Over HTTP. It answers the first question and does not answer the others."""
    with subprocess.Popen([sys.executable, "-c", HTTP_SERVER], text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        url = f"http://127.0.0.1:{int(process.stdout.readline())}/v1"
        replies, message, _ = run(tmp_path / "j", 2, retries=1, base_url=url, timeout=0.5)
        assert message is None and replies["row-0"].value == "fine"
        assert "--timeout 0.5" in replies["row-1"].reason
        threading.Timer(0.5, process.kill).start()
        replies, message, _ = run(tmp_path / "j", 2, retries=1, base_url=url)
    assert "1 unusable" in message and "ConnectError" in replies["row-1"].reason
    booked = [[*row["usage"].values()] for row in read_jsonl(tmp_path / "j")]
    assert booked[1:] == [[questions(2)[1].size, MAX_TOKENS]] * 3 + [[0, 0]]


# ── Phase 1

WORDS = "the plot is thin but every hero has a name and Bob says “never” in the end 🎉".split()
JUDGE = {"annotator_function": "module_of_the_test:judge"}


def rows_of(n: int) -> list[dict]:
    return [{"id": f"row-{i}", "prompt": f"Question {i}?",
             "response": f"{i}: " + " ".join(WORDS[i % 5 :])} for i in range(n)]


@pytest.fixture()
def work(tmp_path, monkeypatch):
    """A function (rows, **settings) that annotates rows and returns the summary.

    `work.module.judge` is a function to annotate with.
    """
    def run_phase(rows=None, dry_run=False, **settings):
        if rows:
            write_rows(tmp_path / "rows.jsonl", rows)
        config = AnnotateConfig(**{"task": "ultrafeedback", "base_url": "http://h/v1",
                                   "price_in": 2.5, "price_out": 10.0, **settings})
        return annotate(config, tmp_path / "rows.jsonl", run_phase.output, dry_run)

    run_phase.output = tmp_path / "new" / "f.jsonl"
    run_phase.module = SimpleNamespace()
    monkeypatch.setitem(sys.modules, "module_of_the_test", run_phase.module)
    return run_phase


def test_rows_stay_in_order_and_a_question_is_asked_once(work, server):
    """The first reply comes last. A new row, model or mode asks anew, a dry run does not."""
    def answer(body, number):
        time.sleep(0.1 if number == 2 else 0.0)
        is_late = number < 10 and "Question 2?" in str(body)
        return completion("It is late." if is_late else critique(body))

    server.answer = answer
    rows = rows_of(9)
    rows.append(rows[1] | {"id": "twin"})
    with pytest.raises(InputError, match="1 responses have no feedback.*: no JSON object"):
        work(rows)
    assert re.match(r"1 requests to send, at most \$0\.0[1-9]", work(dry_run=True))
    for changed, settings, requests in [({}, {}, 1), ({}, {"annotator_model": "other"}, 9),
                                        ({}, {"mode": "no_cot"}, 9), ({"prompt": "?"}, {}, 1)]:
        before = len(server.requests)
        summary = work([rows[0] | changed, *rows[1:]], **settings)
        assert len(server.requests) - before == requests
    bill = sum(usd(*billed) for billed in server.billed)
    assert summary.endswith(f"10 responses with feedback, 0 skipped; ${bill:.4f} in all runs")
    written = read_rows(work.output)
    assert [row["id"] for row in written] == [row["id"] for row in rows]
    assert written[9] == written[1] | {"id": "twin"} and written[1]["annotator"] == "gpt-4o"
    assert all(row["usd"] == usd(40, 60) == usd(**row["usage"]) for row in written)


def test_a_mode_with_a_fault_ends_the_run_and_a_refused_reply_is_asked_again(work, server):
    """A FeedbackError refuses a reply. Any other error is a fault, and loses no reply."""
    def read(example, reply):
        if example["id"] == "row-5":
            raise error
        return Feedback(reply, [], []), Grounding([])

    work.module.MODE = Mode("Judge.", {"textual_feedback": "…"}, read)
    error = KeyError("labels")
    with pytest.raises(KeyError, match="labels"):
        work(rows_of(20), mode="module_of_the_test:MODE")
    error = FeedbackError("no labels")
    with pytest.raises(InputError, match="1 responses .*row-5: no labels"):
        work(mode="module_of_the_test:MODE")
    assert len(server.requests) == 21
    assert ", 1 skipped" in work(mode="module_of_the_test:MODE", skip_failed=True)


@pytest.mark.parametrize("fault", [KeyError("absent"), SystemExit("absent"), None])
def test_a_function_with_a_fault_ends_the_run_and_loses_no_reply(work, fault):
    """SystemExit would end one thread alone, and the run would wait for its reply."""
    def judge(row, response):
        calls.append(row["id"])
        if row["id"] != "row-3":
            time.sleep(0.1)                              # the others return after the fault
            return Feedback("c", [], [])
        if fault:
            raise fault
        return ["absent"]                                # neither a text nor a Feedback

    calls = []
    work.module.judge = judge
    with pytest.raises((KeyError, InputError), match="absent"):
        work(rows_of(30), concurrency=8, **JUDGE)
    kept = {row["id"] for row in read_jsonl(work.output.with_name("f.jsonl.journal"))}
    assert kept == {*calls} - {"row-3"} and 1 < len(calls) < 30


@pytest.mark.parametrize("flags, message", [
    ("--concurrency 0", "--concurrency"), ("--base_url http://h:port/v1", "--base_url"),
    ("--annotator_function toy:SLOTS", "--annotator_function"), ("--task nope", "nope"),
    ("--data none", "none: not rows"), ("--max_usd 0", "--max_usd needs"),
    ("--output {}", "is a directory or"), ("--output {}/x/../rows.jsonl", "or --data"),
    ("--mode cots", "one of: cot, no_cot, align"), ("--mode annotate:EXACT", "found a str")])
def test_invalid_flags_are_one_line_before_any_request(server, monkeypatch, tmp_path, flags,
                                                       message):
    write_rows(tmp_path / "rows.jsonl", rows_of(2))
    words = f"--task ultrafeedback --data {{}}/rows.jsonl --output {{}}/f.jsonl {flags}"
    words = words.replace("{}", str(tmp_path)).split()
    assert message in error_message("annotate.py", *words)
    monkeypatch.setenv("OPENAI_API_KEY", "sk\n")
    assert "OPENAI_API_KEY" in error_message("annotate.py", *words[:6])
    assert not server.requests


# Alg. 1 l.5; Alg. 1 l.7–8; Alg. 1 l.10
def test_a_critic_is_asked_with_row_and_response_in_parallel(work, capsys):
    barrier = threading.Barrier(3, timeout=20)

    def judge(row, response):
        calls.append((row["more"], response))
        if 1 < len(calls) <= 7:
            barrier.wait()                         # three calls wait for each other
        return Feedback("It ends.", ["the end"], [])

    calls = []
    work.module.judge = judge
    rows = [row | {"more": k} for k, row in enumerate(rows_of(7))]
    work([*rows, {"id": "empty", "prompt": "?", "response": " "}], concurrency=3, **JUDGE)
    assert sorted(calls) == [(k, row["response"]) for k, row in enumerate(rows)]
    assert {(row["annotator"], row["critique"], row["usd"]) for row in read_rows(work.output)
            } == {("module_of_the_test:judge", "It ends.", None)}
    assert "8 responses, 7 of them not empty" in capsys.readouterr().out
    work([rows[0], *[row | {"more": 9} for row in rows[1:]]], concurrency=3, **JUDGE)
    assert len(calls) == 7 + 6, "any changed field of a row calls the function again"
    with pytest.raises(InputError, match="no response to annotate; .* another --model"):
        work([{"prompt": "?", "response": ""}], **JUDGE)


def test_the_hash_of_a_function_is_its_module_s_or_its_own_in_a_notebook(work, tmp_path):
    hashes = []
    for text in (None, None, "x", "x", "x  # edited"):
        work.module.judge = (lambda row, response: 1) if len(hashes) % 2 else print_feedback
        if text:
            (tmp_path / "module.py").write_text(text)
            work.module.__file__ = str(tmp_path / "module.py")
        hashes.append(function_hash(JUDGE["annotator_function"]))
    assert hashes[2] == hashes[3] and len(set(hashes)) == 4


def test_phase_1_ends_with_three_responses_in_colour_and_the_lost_quotes(work, capsys):
    """A quote that begins inside a word is called that. An example is the quote itself."""
    work.module.judge = lambda row, response: Feedback(
        "It is so.", ["cat", "and the"], ["the", "ca", "a bird", "og sat", "here"])
    work([{"id": str(i), "prompt": "p", "response": f"the cat {i} and the dog sat here"}
          for i in range(4)], **JUDGE)
    text = capsys.readouterr().out
    assert text.count("response: the [+cat+]") == 3 == text.count("critique: It is so.")
    assert "the [+cat+] 1 [+and the+] dog sat [-here-]\n" in text
    assert text.split("feedback: ")[1].splitlines() == [
        "0 of 4 responses have no span", "12 quotes found, for example 'cat'",
        "4 quotes ambiguous, for example 'the'", "8 quotes inside a word, for example 'ca'",
        "4 quotes unmatched, for example 'a bird'"]
