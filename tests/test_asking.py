"""Asking over HTTP: a loopback server that fails in every way, the real command killed, the
server's bill beside ours. No test depends on how fast the machine is."""

from __future__ import annotations

import gc
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from types import SimpleNamespace

import openai.resources.chat  # noqa: F401  else a second of the first short --timeout
import pytest
import loopback
from annotate import AnnotateConfig, annotate, annotation_questions, main
from ask import Journal, Question, Server, read_completion
from data import InputError, parse_flags, read_rows, run_script, write_rows
from helpers import ROOT, SLOW
from loopback import MIX, critique, prompt_tokens, tokens
from loopback import loopback as serving


@pytest.fixture(autouse=True)
def _in_haste(monkeypatch):
    monkeypatch.setattr("ask.PAUSE", 0.1)


@pytest.fixture()
def work(tmp_path):
    """Runs over rows in a folder, with a server of their own."""
    with serving() as server:
        yield Work(tmp_path, server)


GOOD = json.dumps({"critique": "It ends.", "good_spans": ["the end"], "poor_spans": []})
WORDS = ("the plot is thin but every hero has a name and old Bob says “never” "
         "in the end 🎉 of it all").split()


def made_rows(n: int, longest: int = 40) -> list[dict]:
    rng = random.Random(n)
    return [{"id": f"row-{i}", "prompt": f"Question {i}?", "response": f"{i}: " + " ".join(
        rng.choices(WORDS, k=rng.randint(3, longest)))} for i in range(n)]


class Work:
    """Rows in a folder, and runs of annotate over them."""

    def __init__(self, folder, server):
        self.folder, self.server, self.rows = folder, server, []
        self.data, self.output = folder / "rows.jsonl", folder / "new" / "f.jsonl"
        self.journal = self.output.with_name("f.jsonl.journal")

    def config(self, **options) -> AnnotateConfig:
        return AnnotateConfig(**{
            "task": "ultrafeedback", "data": str(self.data), "output": str(self.output),
            "annotator_model": "tiny", "base_url": self.server.url, "retries": 2, "timeout": 20,
            **options})

    def run(self, rows=None, **options) -> str:
        if rows is not None:
            self.rows = rows
            self.data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return annotate(self.config(**options))

    def fails(self, message: str, rows=None, **options) -> str:
        with pytest.raises(InputError, match=message) as caught:
            self.run(rows, **options)
        return str(caught.value)

    def written(self) -> list[dict]:
        """OUTPUT, which must hold every row of the data in its order."""
        rows = read_rows(self.output)
        assert [(r["id"], r["prompt"], r["response"]) for r in rows] == [
            (r["id"], r["prompt"], r["response"]) for r in self.rows]
        return rows

    def kept(self) -> list[dict]:
        """The journal's replies; a last line that a kill has torn is none."""
        lines = self.journal.read_bytes().split(b"\n")[:-1] if self.journal.exists() else []
        return [record for record in map(json.loads, lines) if "due" not in record]

    def calls(self) -> int:
        return self.server.stats()["calls"]


# ── Every row ends as feedback or as a recorded failure

@pytest.mark.parametrize("counting", ["quarters", "pieces"])
def test_rows_stay_in_order_and_are_billed_when_the_first_reply_comes_last(work, counting):
    """The server's bill and critiques are what they should be; else no other test here proves
    anything."""
    work.server.settings.__dict__.update(counting=counting, plan=["late"], hang=0.3)
    work.run(made_rows(5), concurrency=5)
    for row in work.written():
        assert row["spans"] and not row["unmatched"] and not row["ambiguous"]
        assert row["critique"] and row["annotator"] == "tiny"
    stats, replies = work.server.stats(), [record["reply"] for record in work.kept()]
    assert stats["completion_tokens"] == sum(tokens(reply, counting) for reply in replies)
    bodies = stats["recent"]
    assert stats["prompt_tokens"] == sum(prompt_tokens(body["messages"], counting)
                                         for body in bodies)
    assert {(body["temperature"], body["max_tokens"], body["model"])
            for body in bodies} == {(0.6, 1200, "tiny")}
    files = work.output.read_text() + work.journal.read_text()
    assert "sk-loopback" not in files + json.dumps(bodies)


def test_under_faults_every_row_is_feedback_or_a_failure_with_its_reason(work):
    """A call for every row, and one more for every 429, 500 and lost reply."""
    work.server.settings.__dict__.update(faults=MIX, seed=3, hang=0.2)
    line = work.fails("responses have no feedback", made_rows(150), concurrency=32, retries=6)
    stats, kept = work.server.stats(), work.kept()
    faults = stats["faults"]
    assert faults.keys() == MIX.keys(), "choose another seed: some fault did not happen"
    assert stats["calls"] == len(kept) == 150 + sum(faults[kind]
                                                    for kind in ("429", "500", "timeout"))
    assert len({record["key"] for record in kept}) == 150
    lost = [record for record in kept if record["reason"] and record["reply"]]
    assert len(lost) == faults["garbage"] + faults["truncated"]
    assert sum("cut off" in record["reason"] for record in lost) == faults["truncated"]
    assert line.startswith(f"{len(lost)} responses") and str(work.journal) in line
    assert "\n" not in line and not work.output.exists()

    work.server.settings.faults = {"garbage": 1.0}
    work.run(skip_failed=True)
    lost_ids = {record["id"] for record in lost}
    assert ([row["id"] for row in read_rows(work.output)]
            == [row["id"] for row in work.rows if row["id"] not in lost_ids])
    work.server.settings.faults, before = {}, work.calls()
    work.run()
    assert work.calls() - before == len(lost) and len(work.written()) == 150


@pytest.mark.parametrize("kind, reason, text", [
    ("filter", "empty: content_filter", ""),
    ("truncated", "cut off after 1200 tokens", '{"reasoning'),
    ("empty", "no chat completion", '"choices": []'),
    ("null", "empty", ""), ("garbage", "no JSON object", "the weather"),
    ("invalid", "no chat completion", '"chatcmpl-1"'), ("400", "Bad request.", ""),
    ("error200", "The provider has gone to lunch.", "The provider has gone to lunch.")])
def test_an_unusable_reply_is_kept_whole_and_costs_one_row(work, kind, reason, text):
    """FACTS §5: failed calls must never become rows."""
    work.server.settings.plan = ["ok", kind, "ok"]
    assert "row-1" in work.fails(reason, made_rows(3), concurrency=1)
    bad, = [record for record in work.kept() if record["reason"] is not None]
    assert bad["id"] == "row-1" and reason in bad["reason"]
    assert text in bad["reply"] and bool(text) == bool(bad["reply"])
    assert work.calls() == 3
    work.run()
    assert work.calls() == 4 and len(work.written()) == 3


# ── The journal: nothing is asked twice

def command(work, **options) -> list[str]:
    flags = vars(work.config(**options))
    return [sys.executable, str(ROOT / "annotate.py"), *(f"--{name}={flags[name]}" for name in (
        "task", "data", "output", "annotator_model", "base_url", "retries", "timeout",
        *options))]


def kill_when_asked(work, calls: int, **options):
    """Start the command, and kill it once the server has had so many calls in all."""
    process = subprocess.Popen(command(work, **options), stderr=subprocess.DEVNULL,
                               stdout=subprocess.DEVNULL)
    while work.calls() < calls and process.poll() is None:
        time.sleep(0.01)
    process.kill()
    process.wait()


def test_a_run_killed_many_times_asks_no_row_twice_but_those_in_flight(work):
    """SIGKILL of the real command; while it waits for its first reply a second process is
    refused, and the first is unharmed."""
    kills, n, concurrency = (20, 2000, 8) if SLOW else (3, 150, 8)
    rng, work.rows, refusals = random.Random(0), made_rows(n), []
    write_rows(work.data, work.rows)

    def answer(body):
        if not refusals:
            refusals.append(work.fails("another process"))
        return critique(body)

    work.server.settings.__dict__.update(delay=0.02, responder=answer)
    for kill in range(kills):
        target = work.calls() + rng.randrange(1, 2 * n // (kills + 1))
        kill_when_asked(work, min(target, n), concurrency=concurrency)
        read = {record["key"] for record in work.kept()}
        assert len(read) <= work.calls() <= n + concurrency * (kill + 1)
    process = subprocess.run(command(work, concurrency=concurrency), capture_output=True,
                             text=True)
    assert process.returncode == 0, process.stderr
    stats = work.server.stats()
    assert len(work.written()) == n == len(stats["asked"]) and refusals
    twice = stats["calls"] - n
    print(f"{kills} kills, {n} rows, {stats['calls']} calls: {twice} asked twice, "
          f"{concurrency * kills} allowed")
    assert twice <= concurrency * kills
    assert Counter(record["key"] for record in work.kept()).most_common(1)[0][1] == 1, (
        "bought twice")


def test_the_command_ends_with_status_1_and_one_line_where_replies_failed(work, monkeypatch,
                                                                          capsys):
    work.server.settings.plan = ["ok", "garbage"]
    write_rows(work.data, made_rows(3))
    monkeypatch.setattr(sys, "argv", command(work)[1:])
    with pytest.raises(SystemExit) as ended:
        run_script(main, "annotate")
    assert re.fullmatch(r"annotate: 1 responses have no feedback.*", ended.value.code)
    run_script(main, "annotate")
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 4 and str(work.output) in said[2]
    assert said[3] == ("next: python reward_model.py --task ultrafeedback "
                       f"--data {work.output} --model MODEL")


def test_a_torn_last_line_costs_its_row_alone_and_the_lines_behind_it_are_whole(work, capsys):
    """Also where the line only lacks its end: then nothing is asked again."""
    work.run(made_rows(4), concurrency=1)
    whole, final = work.journal.read_bytes(), work.output.read_bytes()
    last = whole.rindex(b"\n", 0, -1) + 1
    number = whole.count(b"\n")
    for torn, asked in ((last + 1, 1), (last + 40, 1), (len(whole) - 2, 1),
                        (len(whole) - 1, 0)):
        work.journal.write_bytes(whole[:torn])
        before = work.calls()
        work.run()
        assert (work.calls() - before, work.output.read_bytes()) == (asked, final)
        assert (f"line {number}: skipping" in capsys.readouterr().err) == bool(asked)
        work.run()
        assert work.calls() - before == asked and capsys.readouterr()


def test_after_a_line_without_its_end_a_request_has_a_line_of_its_own(tmp_path):
    """Both requests were sent and never answered: a later run books what both may have cost."""
    path, cost = tmp_path / "f.jsonl.journal", {"prompt_tokens": 3, "completion_tokens": 2}
    with Journal(path, 1e6, 1e6) as journal:
        journal.begin(Question("first", "row-0", []), cost)
    path.write_bytes(path.read_bytes().removesuffix(b"\n"))
    with Journal(path, 1e6, 1e6) as journal:
        journal.begin(Question("second", "row-1", []), cost)
    with Journal(path, 1e6, 1e6) as journal:
        assert journal.spent == 10


DAMAGED = "f.jsonl.journal, line 2: skipping corrupt line"


@pytest.mark.parametrize("pattern, text, message", [
    (b"^..", b"\xff\0", DAMAGED), (b".{99}$", b"", DAMAGED), (b"^.*$", b"", DAMAGED),
    (b"^.*$", b"7", DAMAGED), (b"^.*$", b'"7"', DAMAGED), (b"^.*$", b"[]", DAMAGED),
    (b'"reply"', b'"rfply"', DAMAGED), (b'"usd": [^}]*', b'"usd": NaN', DAMAGED),
    (b"good_spans", b"bad_spans", "f.jsonl.journal: the reply to row-0 was changed")])
def test_a_damaged_or_changed_line_is_named_and_its_row_asked_again(work, capsys, pattern, text,
                                                                    message):
    work.run(made_rows(4), concurrency=1, **PRICES)
    lines, final = work.journal.read_bytes().split(b"\n"), work.output.read_bytes()
    lines[1], changes = re.subn(pattern, text, lines[1])
    assert changes == 1
    work.journal.write_bytes(b"\n".join(lines))
    work.run(**PRICES)
    assert (work.calls(), work.output.read_bytes()) == (5, final)
    assert message in capsys.readouterr().err


def test_what_was_asked_already_is_not_asked_again(work):
    """Same prompt and response: once. Another model, mode or text: again.
    Rows added: only those."""
    rows = made_rows(4)
    rows.append(rows[1] | {"id": "twin"})
    work.run(rows)
    assert work.calls() == 4
    first, twin = work.written()[1], work.written()[4]
    assert {**first, "id": "twin"} == twin and twin["spans"]
    added = [row | {"id": f"new-{k}", "prompt": f"New {k}?"} for k, row in enumerate(rows[:3])]
    for changed, options, new in [
            (rows, {}, 0), (rows[::-1], {}, 0), (rows + added, {}, 3),
            (rows, {"annotator_model": "other"}, 4), (rows, {"mode": "no_cot"}, 4),
            ([rows[0] | {"prompt": "Another?"}, *rows[1:]], {}, 1), (rows, {}, 0)]:
        before = work.calls()
        work.run(changed, **options)
        assert work.calls() - before == new and work.written()


def test_rows_that_can_never_succeed_do_not_block_those_behind_them(work):
    """25 unusable replies in a row stop a run;
    the next one does not count what has failed before."""
    rows = made_rows(60)
    for row in rows[:40]:
        row["response"] += " word" * 3000
    work.server.settings.context = 2000
    work.fails("25 replies in a row", rows, concurrency=4)
    work.fails("40 responses have no feedback", concurrency=4)
    work.run(skip_failed=True, concurrency=4)
    assert [row["id"] for row in read_rows(work.output)] == [f"row-{i}" for i in range(40, 60)]
    assert ({r["id"] for r in work.kept() if r["reason"] is None}
            == {f"row-{i}" for i in range(40, 60)})


# ── What the server takes, and what it refuses

@pytest.mark.parametrize("only_default", [False, True])
def test_a_model_that_takes_no_temperature_is_asked_without_and_that_is_said(work, capsys,
                                                                             only_default):
    """As today's hosted models; also where the first rows are too long, or cannot be sent."""
    work.server.settings.__dict__.update(only_default_sampling=only_default, context=2000)
    rows = made_rows(20)
    rows[0]["response"] = "word " * 5000
    rows[1]["response"] += " \ud83d"
    work.fails("2 responses.*row-0: .*context.*row-1: .*surrogate", rows, concurrency=4)
    stats = work.server.stats()
    assert 19 + only_default <= stats["calls"] <= 19 + 4 * only_default
    options = ({"max_completion_tokens": 1200} if only_default
               else {"max_tokens": 1200, "temperature": 0.6, "top_p": 0.95})
    for body in stats["recent"]:
        assert body == {"model": "tiny", "messages": body["messages"], **options}
    assert sum(record["reason"] is None for record in work.kept()) == 18
    assert capsys.readouterr().err.count("tiny takes no temperature") == only_default


@pytest.mark.parametrize("settings, message", [
    ({"plan": ["quota"] * 99}, "http://127.*exceeded your current quota"),
    ({"plan": ["429", "500"] * 99}, "http://127.*(Rate limit|had an error)"),
    ({"key": "another"}, "http://127.*Incorrect API key.*check OPENAI_API_KEY"),
    ({"models": ["another"]}, "http://127.*'tiny'.*does not exist.*name of the model"),
    ({"plan": ["ok", *["429"] * 99]}, "429")])
def test_a_server_that_refuses_is_one_line_and_costs_nothing(work, settings, message):
    """Four runs in a row leave the budget as it was, or at the one reply that came."""
    work.server.settings.__dict__.update(settings)
    work.rows = made_rows(3)
    write_rows(work.data, work.rows)
    budget = 3.5 * worst_usd(work)
    for n in range(1, 5):
        line = work.fails(message, concurrency=3, retries=1, max_usd=budget, **PRICES)
        assert "\n" not in line and "sk-loopback" not in line
        assert work.calls() <= n * 3 * 2
    work.server.settings.__dict__.update(key="", models=[], plan=[])
    work.run(max_usd=budget, **PRICES)
    assert len(work.written()) == 3


def test_a_server_that_gives_up_later_ends_the_run_and_nothing_is_lost(work):
    """25 failures in a row tell; a reply that is under way then is billed, and kept."""
    plan = ["ok"] * 3 + ["late"] + ["quota"] * 99
    work.server.settings.__dict__.update(plan=plan, hang=1)
    line = work.fails("25 replies in a row.*exceeded your current quota", made_rows(99),
                      concurrency=4, retries=0)
    assert "\n" not in line and str(work.journal) in line
    read = sum(record["reason"] is None for record in work.kept())
    assert read == 4 == work.server.stats()["statuses"]["200"] and work.calls() < 99
    work.server.settings.plan, before = [], work.calls()
    work.run()
    assert work.calls() - before == 95 and len(work.written()) == 99


@pytest.mark.parametrize("concurrency", [1, 64])
@pytest.mark.parametrize("kind", ["timeout", "drip"])
def test_a_server_that_never_answers_ends_the_run(work, kind, concurrency):
    """The first questions are asked twice, and no other; a byte now and then is no answer."""
    work.server.settings.__dict__.update(faults={kind: 1.0}, hang=20)
    work.fails("no answer in 0.5 s; check", made_rows(150), concurrency=concurrency,
               timeout=0.5, retries=1)
    assert 2 <= work.calls() <= 2 * concurrency


@pytest.mark.parametrize("kind", ["429", "reset"])
def test_each_pause_of_an_outage_is_twice_as_long_as_the_one_before(work, kind):
    """A slow machine can only make them longer."""
    work.server.settings.plan = [kind] * 3
    start = time.monotonic()
    work.run(made_rows(2), concurrency=1, retries=3)
    assert time.monotonic() - start >= 0.1 + 0.2 + 0.4
    assert work.calls() == 3 + 2 == len(work.written()) + 3


@pytest.mark.parametrize("url", [
    "http://127.0.0.1:9/v1", "http://127.0.0.1:9/\x01", " http://127.0.0.1:9/v1",
    "http://[::1", "http://", "ftp://x/", "localhost:8000/v1", "http://h:port/v1",
    "http://no.such.host.invalid/v1", "http://" + "a" * 70 + ".org/v1"])
def test_a_url_without_a_server_is_one_line_and_costs_nothing(work, url):
    line = work.fails("--base_url|with model.*check OPENAI_API_KEY, the URL", made_rows(2),
                      base_url=url, retries=0)
    assert "\n" not in line and work.calls() == 0
    assert not any(sum(record["usage"].values()) for record in work.kept())


@pytest.mark.parametrize("key", ["", "sk-secret\n", "sk-secr\u00e8t", "sk secret"])
def test_a_key_that_cannot_be_sent_is_refused_and_not_shown(work, monkeypatch, capsys, key):
    monkeypatch.setenv("OPENAI_API_KEY", key)
    assert "secr" not in work.fails("OPENAI_API_KEY", made_rows(2)) + capsys.readouterr().err
    assert work.calls() == 0


def test_the_progress_bar_counts_failures_as_they_come(work, capsys):
    work.server.settings.plan = ["ok", "garbage", "ok", "garbage"]
    work.fails("2 responses", made_rows(5), concurrency=1)
    shown = dict(re.findall(r"(\d)/5 [^|]*failed=(\d)", capsys.readouterr().err))
    assert shown == {"2": "1", "3": "1", "4": "2", "5": "2"}


# ── Money

PRICES = {"price_in": 2.5, "price_out": 10.0}


def usd(usage: dict) -> float:
    return (usage["prompt_tokens"] * 2.5 + usage["completion_tokens"] * 10) / 1e6


def bill(server) -> float:
    return usd(server.stats())


def test_usage_and_cost_are_the_servers_own(work):
    work.server.settings.plan = ["ok", "garbage", "truncated", "filter", "429", "null"]
    work.fails("4 responses", made_rows(20), concurrency=1, **PRICES)
    line = work.run(**PRICES)
    said, kept = work.server.stats(), work.kept()
    for name in ("prompt_tokens", "completion_tokens"):
        assert sum(record["usage"][name] for record in kept) == said[name]
    assert sum(record["usd"] for record in kept) == pytest.approx(bill(work.server), rel=1e-12)
    assert (float(re.search(r"\$([\d.]+) in all runs", line)[1])
            == pytest.approx(bill(work.server), abs=1e-4))
    for row in work.written():
        assert row["usd"] == pytest.approx(usd(row["usage"]))


def test_refused_requests_end_no_run_that_has_money_left(work):
    """What one gives back while it waits is not all that there is: others may cost less."""
    rows = made_rows(60)
    work.run(rows, **PRICES)
    whole = bill(work.server)
    work.journal.unlink()
    work.server.settings.__dict__.update(delay=0.02, faults={"429": 0.3})
    work.run(rows, max_usd=whole + 0.03, concurrency=16, retries=9, **PRICES)
    assert bill(work.server) <= 2 * whole + 0.03


def hostile_rows(n: int) -> list[dict]:
    """By "pieces" nearly every character of these is a token."""
    return [{"id": f"row-{i}", "prompt": "1a" * 900, "response": f"{i} " + "7b_" * 700}
            for i in range(n)]


@pytest.mark.parametrize("counting, rows, critique", [
    ("pieces", made_rows(40), None), ("pieces", hostile_rows(15), "c"),
    ("quarters", made_rows(15), "c" * 4400)])
def test_the_bill_never_passes_the_budget_and_a_higher_one_goes_on(work, counting, rows,
                                                                   critique):
    work.server.settings.__dict__.update(counting=counting, delay=0.005)
    if critique:
        reply = json.dumps({"critique": critique, "good_spans": ["zq"], "poor_spans": []})
        work.server.settings.responder = lambda body: reply
    work.run(rows, **PRICES)
    whole, final = bill(work.server), work.output.read_bytes()
    work.journal.unlink()
    work.output.unlink()
    for share in (0.01, 0.2, 0.5, 0.8):
        work.fails("--max_usd .* reached", max_usd=share * whole, concurrency=8, **PRICES)
        assert bill(work.server) - whole <= share * whole and not work.output.exists()
    assert bill(work.server) - whole > 0.4 * whole, "it must not stop long before the budget"
    work.run(max_usd=2 * whole + 1, **PRICES)
    assert bill(work.server) == pytest.approx(2 * whole) and work.output.read_bytes() == final


AT_ONCE = [1, 8, 64] if SLOW else [1, 64]


def worst_usd(work) -> float:
    """The most that one row may cost."""
    question = next(annotation_questions(work.config()))
    return usd(Server("tiny").max_usage(question))


@pytest.fixture()
def dear(work):
    """150 rows, each of which is billed nearly at its worst case."""
    reply = GOOD.replace("It ends.", "7b_" * 380).replace("the end", "zq")
    work.server.settings.__dict__.update(counting="pieces", delay=0.02,
                                         responder=lambda body: reply)
    work.rows = hostile_rows(150)
    write_rows(work.data, work.rows)
    return work


@pytest.mark.parametrize("concurrency", AT_ONCE)
@pytest.mark.parametrize("kind", [*loopback.REPORTS, "reset", "late"])
def test_five_runs_are_never_billed_more_than_the_budget(dear, kind, concurrency):
    """All ask at once, the budget has room for a few retries, and the server bills every reply,
    also those that never arrive; then what it does not count is booked at its worst case."""
    settings, worst = dear.server.settings, worst_usd(dear)
    settings.faults, budget = {kind: 1.0}, (concurrency + 2.2) * worst
    for _ in range(5):
        settings.plan = ["ok"] * (dear.calls() + 1)  # so that all others ask at once
        dear.fails("reached|in a row|no answer|Connection error", max_usd=budget,
                   concurrency=concurrency,
                   timeout=2 if kind == "late" else 20, **PRICES)
        assert bill(dear.server) <= budget
    kept = dear.kept()
    booked, read = sum(record["usd"] for record in kept), sum(bool(r["reply"]) for r in kept)
    print(f"{kind}, {concurrency} at once: billed / budget {bill(dear.server) / budget:.3f}, "
          f"booked {booked / budget:.3f}, {dear.calls()} calls, {read} replies kept")
    assert bill(dear.server) <= booked * (1 + 1e-9) <= budget * (1 + 2e-9)
    assert bill(dear.server) > 0.3 * budget and dear.calls() > concurrency
    assert read == dear.server.stats()["statuses"]["200"]


@pytest.mark.parametrize("concurrency", AT_ONCE)
def test_runs_killed_while_they_ask_are_never_billed_more_than_the_budget(dear, concurrency):
    """What was under way when a process was killed is booked by the next one."""
    dear.server.settings.delay = 0.2
    budget = (2 * concurrency + 1.2) * worst_usd(dear)
    for _ in range(2):
        kill_when_asked(dear, dear.calls() + concurrency + 1, concurrency=concurrency,
                        max_usd=budget, **PRICES)
        assert bill(dear.server) <= budget
    assert dear.calls() > concurrency
    dear.fails("--max_usd .* reached", max_usd=budget, concurrency=concurrency, **PRICES)
    print(f"SIGKILL, {concurrency} at once: billed / budget {bill(dear.server) / budget:.3f}")
    assert 0.4 * budget < bill(dear.server) <= budget


def test_a_forecast_asks_nothing_and_counts_what_is_left(work, monkeypatch):
    """Four bytes a token and 350 tokens a reply, as it says;
    80 where only spans are asked for."""
    rows = made_rows(300, longest=150)
    monkeypatch.delenv("OPENAI_API_KEY")
    assert "USD unknown" in work.run(rows, dry_run=True) and work.calls() == 0
    monkeypatch.setenv("OPENAI_API_KEY", "any")
    work.run(limit=50, **PRICES)
    said = work.run(dry_run=True, **PRICES)
    assert work.calls() == 50 and said.startswith("300 responses, 250 requests to send")
    assert "87,500 reply tokens (4 bytes per token, 350 tokens per reply)" in said
    work.run(price_in=2.5, price_out=0.0)
    due = sum(record["usage"]["prompt_tokens"] for record in work.kept()[50:])
    prompt = int(re.search(r"about ([\d,]+) prompt", said)[1].replace(",", ""))
    assert prompt == pytest.approx(due, rel=0.35)
    aligned = [row | {"critique": "c"} for row in rows]
    assert "80 tokens per reply" in work.run(aligned, dry_run=True, mode="align")


# ── A function instead of a server

@pytest.fixture()
def critic(work, monkeypatch):
    """Needs no key and no server; `critic.judge` may be set."""
    monkeypatch.delenv("OPENAI_API_KEY")
    module = SimpleNamespace(judge=lambda row, response: GOOD)
    monkeypatch.setitem(sys.modules, "critic_of_the_test", module)
    work.module, whole = module, work.config
    work.config = lambda **options: whole(annotator_function="critic_of_the_test:judge",
                                          base_url=None, **options)
    return work


# Alg. 1 l.5; Alg. 1 l.7–8; Alg. 1 l.10
def test_a_critic_is_asked_with_row_and_response(critic):
    seen = []
    critic.module.judge = lambda row, response: seen.append((row["more"], response)) or GOOD
    critic.run([row | {"more": k} for k, row in enumerate(made_rows(6))], concurrency=3)
    assert (sorted(seen) == [(k, row["response"]) for k, row in enumerate(critic.rows)]
            and critic.calls() == 0)
    assert {(row["annotator"], row["critique"], row["usd"]) for row in critic.written()} == {
        ("critic_of_the_test:judge", "It ends.", None)}
    critic.run([row | {"more": k * 2} for k, row in enumerate(made_rows(6))])
    assert len(seen) == 6 + 5, "a critic may look at any field, so a changed one asks again"
    assert len(critic.written()) == 6, (
        "𝒟_R starts empty: OUTPUT holds this run's rows, not those of the one before")


def test_failures_of_a_critic_are_recorded_and_its_exceptions_are_its_own(critic, capfd):
    critic.module.judge = lambda row, response: "It is late." if row["id"] == "row-2" else GOOD
    critic.fails("1 responses.*row-2: no JSON object", made_rows(40), concurrency=16)
    critic.module.judge = lambda row, response: 1 // 0
    critic.fails("row row-2: ZeroDivisionError: integer")
    assert "\n" not in critic.fails(
        "--annotator_function critic_of_the_test:judge, row .*: ZeroDivision",
        [row | {"more": 1} for row in critic.rows], concurrency=16)
    gc.collect()                                       # an error that nobody awaits is shown
    assert "Traceback" not in capfd.readouterr().err
    critic.module.judge = lambda row, response: None
    critic.fails("critic_of_the_test:judge, row row-.*NoneType")
    critic.module.judge = lambda row, response: GOOD
    critic.run()
    assert len(critic.written()) == 40


def test_half_characters_harm_only_their_row_with_a_critic_too(critic):
    rows = made_rows(5)
    rows[1]["response"], rows[2]["id"], rows[3]["prompt"] = (
        "the end \ud83d", "row-2\udc00", "\ud83d?")
    critic.module.judge = lambda row, response: (
        '{"critique": "c", "good_spans": ["\\ud83d"], "poor_spans": []}'
        if row["id"] == "row-4" else GOOD)
    critic.fails("4 responses", rows)
    critic.run(skip_failed=True)
    assert [row["id"] for row in read_rows(critic.output)] == ["row-0"]


# ── Flags

@pytest.mark.parametrize("flags, message", [
    (["--mode", "cots"], "--mode must be one of.*no_cot"),
    (["--unmatched", "drop"], "--unmatched"), (["--limit", "0"], "--limit"),
    (["--limit", "-1"], "--limit"), (["--concurrency", "0"], "--concurrency"),
    (["--retries", "-1"], "--retries"), (["--timeout", "inf"], "--timeout"),
    (["--max_usd", "1"], "--max_usd needs"), (["--output", "x/../rows.jsonl"], "are one file")])
def test_flags_that_make_no_sense_are_refused_before_anything_is_spent(work, monkeypatch, flags,
                                                                       message):
    monkeypatch.chdir(work.folder)
    write_rows(work.data, made_rows(2))
    flags = ["--task", "ultrafeedback", "--data", str(work.data), "--output", str(work.output),
             "--base_url", work.server.url, *flags]
    with pytest.raises(InputError, match=message):
        annotate(parse_flags(AnnotateConfig, flags, "Ask."))
    assert work.calls() == 0 and not work.kept()


@pytest.mark.parametrize("choices", [None, [{"message": {"content": 7}}]])
def test_a_completion_without_a_text_is_unusable_and_billed(choices):
    usage = {"prompt_tokens": 5, "completion_tokens": 7}
    body = json.dumps({"choices": choices, "usage": usage})
    reply = read_completion(body, {"prompt_tokens": 99, "completion_tokens": 9})
    assert "no chat completion" in reply.reason and reply.text == body and reply.usage == usage


# ── Leaving early, and coming back with other flags

def press_ctrl_c():
    os.kill(os.getpid(), signal.SIGINT)


def press_ctrl_c_at(work, call: int):
    """Ctrl-C as soon as so many requests have come."""
    def answer(body):
        bodies.append(body)
        if len(bodies) == call:
            press_ctrl_c()
        return critique(body)

    bodies, work.server.settings.responder = [], answer
    signal.signal(signal.SIGINT, signal.default_int_handler)     # a shell may have it ignored


def test_ctrl_c_waits_for_the_replies_that_are_paid_for(work):
    work.server.settings.delay = 0.2
    press_ctrl_c_at(work, 9)
    with pytest.raises(KeyboardInterrupt):
        work.run(made_rows(60), concurrency=8)
    assert 8 < len(work.kept()) == work.calls() < 60
    work.server.settings.delay = 0
    work.run()
    assert work.calls() == 60 == len(work.written())


def test_ctrl_c_does_not_wait_to_ask_again_who_was_refused(work, monkeypatch):
    """It is pressed when all eight begin to pause for an hour."""
    def note_refusal(bar, reason):
        reasons.append(reason)
        if len(reasons) == 8:
            threading.Timer(0.1, press_ctrl_c).start()

    reasons = []
    monkeypatch.setattr("ask.PAUSE", 3600)
    monkeypatch.setattr("ask.tqdm.set_postfix_str", note_refusal)
    work.server.settings.__dict__.update(plan=["ok"], faults={"429": 1.0})
    signal.signal(signal.SIGINT, signal.default_int_handler)     # a shell may have it ignored
    rescue = threading.Timer(120, press_ctrl_c)                  # a second one never waits
    rescue.start()
    with pytest.raises(KeyboardInterrupt):
        work.run(made_rows(20), concurrency=8)
    assert rescue.is_alive(), "the first waited for the pause"
    rescue.cancel()
    assert work.calls() == 1 + 8


def test_a_second_ctrl_c_does_not_wait(work, monkeypatch):
    """What is under way then is not kept; its replies would come after a minute."""
    def press_again(bar, description):                           # the first one is being heeded
        threading.Timer(0.1, press_ctrl_c).start()

    monkeypatch.setattr("ask.tqdm.set_description", press_again)
    work.server.settings.delay = 60
    press_ctrl_c_at(work, 1)
    with pytest.raises(KeyboardInterrupt):
        work.run(made_rows(20))
    assert 0 < work.calls() <= 8 and not work.kept()


def test_replies_of_a_run_without_prices_count_against_a_later_budget(work):
    work.run(made_rows(20))
    said = work.server.stats()
    bill = (100 * said["prompt_tokens"] + 100 * said["completion_tokens"]) / 1e6
    line = work.fails("max_usd", made_rows(40), price_in=100.0, price_out=100.0, max_usd=bill)
    assert f"reached at ${bill:.4f}" in line and work.calls() == 20
    work.run(price_in=100.0, price_out=100.0)
    assert all(row["usd"] > 0 for row in work.written())
