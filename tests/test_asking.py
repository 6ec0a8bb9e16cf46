"""Asking over HTTP: a loopback server that fails in every way, the real command killed, the server's bill beside ours.

    KILLS=20 ROWS=2000 python -m pytest tests/test_asking.py -k killed     # as many as wanted; else 3 of 150 rows
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import tracemalloc
from collections import Counter
from types import SimpleNamespace

import pytest

import annotate
import endpoint
import loopback
from annotate import AnnotateConfig, InputError, read_rows, write_rows
from conftest import ROOT
from endpoint import Journal, Prices
from loopback import MIX, critique
from loopback import loopback as serving


@pytest.fixture(autouse=True)
def _key(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-loopback")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@pytest.fixture()
def server():
    with serving() as running:
        yield running


@pytest.fixture()
def work(tmp_path, server):
    """A small annotation of a given number of rows, and what came of it."""
    return Work(tmp_path, server)


WORDS = "the plot is thin but every hero has a name and old Bob says “never” in the end 🎉 of it all".split()


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
        return AnnotateConfig(**{"task": "ultrafeedback", "data": str(self.data), "output": str(self.output),
                                 "annotator_model": "tiny", "base_url": self.server.url, "retries": 2, "timeout": 20,
                                 **options})

    def run(self, rows=None, **options) -> str:
        if rows is not None:
            self.rows = rows
            self.data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return annotate.annotate(self.config(**options))

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
        """The journal's records; a last line that a kill has torn is none."""
        lines = self.journal.read_bytes().split(b"\n")[:-1] if self.journal.exists() else []
        return [json.loads(line) for line in lines]

    def calls(self) -> int:
        return self.server.stats()["calls"]


# ── Every row ends as feedback or as a recorded failure ─────────────────────────────────────────────────

def test_under_faults_every_row_is_feedback_or_a_failure_with_its_reason(work):
    """One layer of retries: a call for every row and one for every 429, 500 and time-out, no more."""
    work.server.settings.faults, work.server.settings.seed = MIX, 3
    line = work.fails("responses have no feedback", made_rows(150), concurrency=32, timeout=0.5, retries=6)
    said, kept = work.server.stats(), work.kept()
    lost = [record for record in kept if record["reason"] is not None]
    assert said["faults"].keys() == MIX.keys(), "choose another seed: some fault did not happen"
    assert len(lost) == said["faults"]["garbage"] + said["faults"]["truncated"]
    assert said["calls"] == 150 + sum(said["faults"][kind] for kind in ("429", "500", "timeout")) <= 1.25 * 150
    assert len({record["key"] for record in kept}) == len(kept) == 150
    assert line.startswith(f"{len(lost)} responses") and str(work.journal) in line and "\n" not in line
    assert {r["reply"][:11] for r in lost if r["finish_reason"] == "stop"} == {"I am sorry,"}
    assert all(r["reply"] and "cut off" in r["reason"] for r in lost if r["finish_reason"] == "length")
    assert not work.output.exists()

    work.server.settings.faults = {"garbage": 1.0}
    work.run(skip_failed=True)
    gone = {record["id"] for record in lost}
    assert [row["id"] for row in read_rows(work.output)] == [r["id"] for r in work.rows if r["id"] not in gone]
    work.server.settings.faults, before = {}, work.calls()
    work.run()
    assert work.calls() - before == len(lost) and len(work.written()) == 150


@pytest.mark.parametrize("kind, reason, text", [
    ("refusal", "refused", "I'm sorry, I can't help with that."), ("filter", "content filter", ""),
    ("truncated", "cut off after 1200 tokens", '{"reasoning'), ("empty", "no chat completion", '"choices": []'),
    ("null", "empty", ""), ("garbage", "no JSON object", "the weather"),
    ("invalid", "no chat completion", '"chatcmpl-1"')])
def test_an_unusable_reply_is_kept_whole_and_costs_one_row(work, kind, reason, text):
    """FACTS §5: failed calls must never become rows."""
    work.server.settings.plan = ["ok", kind, "ok"]
    assert "row-1" in work.fails(reason, made_rows(3), concurrency=1)
    bad, = [record for record in work.kept() if record["reason"] is not None]
    assert bad["id"] == "row-1" and reason in bad["reason"]
    assert text in bad["reply"] and bool(text) == bool(bad["reply"])
    assert (work.calls(), work.run() and work.calls(), len(work.written())) == (3, 4, 3)


def test_rows_stay_in_order_when_the_first_reply_comes_last(work):
    said = []

    def slow_first(body):
        said.append(body)
        time.sleep(0.05 * (len(said) == 1))
        return critique(body)

    work.server.settings.responder = slow_first
    work.run(made_rows(12), concurrency=12)
    assert all(row["critique"] and row["annotator"] == "tiny" for row in work.written())
    assert "sk-loopback" not in work.output.read_text() + work.journal.read_text() + json.dumps(said)
    assert {(body["temperature"], body["max_tokens"], body["model"]) for body in said} == {(0.6, 1200, "tiny")}


def test_a_row_that_cannot_be_sent_is_a_failure_and_the_others_are_unharmed(work):
    rows = made_rows(5)
    rows[1]["response"] += " \ud83d"
    rows[2]["prompt"] += "\udc00"
    line = work.fails("2 responses.*surrogate", rows)
    assert work.calls() == 3 and "row-1" in line
    assert {r["id"] for r in work.kept() if r["reason"]} == {"row-1", "row-2"}
    work.run(skip_failed=True)
    assert [row["id"] for row in read_rows(work.output)] == ["row-0", "row-3", "row-4"]


def test_a_response_of_a_megabyte_is_annotated_or_a_failure(work):
    rows = made_rows(3)
    rows[0]["response"] = "word " * 200_000 + "the end."
    work.server.settings.context = 10_000
    work.fails("1 responses.*context length", rows)
    assert {record["id"] for record in work.kept() if record["reason"] is None} == {"row-1", "row-2"}
    work.server.settings.context = 0
    said = json.dumps({"critique": "It ends.", "good_spans": ["the end."], "poor_spans": []})
    work.server.settings.responder = lambda body: said
    work.run()
    assert work.written()[0]["spans"] == [{"start": 10 ** 6, "end": 10 ** 6 + 8, "label": 1}] and work.calls() == 4


# ── The journal: nothing is asked twice ─────────────────────────────────────────────────────────────────

def command(work, **options) -> list[str]:
    flags = vars(work.config(**options))
    return [sys.executable, str(ROOT / "annotate.py"), *(f"--{name}={flags[name]}" for name in (
        "task", "data", "output", "annotator_model", "base_url", "retries", "timeout", *options))]


def test_a_run_killed_many_times_asks_no_row_twice_but_those_in_flight(work):
    """SIGKILL of the real command; while it runs a second process is refused, and the first is unharmed."""
    kills, n, concurrency = int(os.environ.get("KILLS", 3)), int(os.environ.get("ROWS", 150)), 8
    rng, work.rows = random.Random(0), made_rows(n)
    write_rows(work.data, work.rows)
    work.server.settings.delay = 0.02
    for kill in range(kills):
        process, before = subprocess.Popen(command(work, concurrency=concurrency), stderr=subprocess.DEVNULL,
                                           stdout=subprocess.DEVNULL), work.calls()
        target = min(before + rng.randrange(1, 2 * n // (kills + 1)), n)
        while work.calls() < target and process.poll() is None:
            time.sleep(rng.uniform(0, 0.03))
        if kill == 0:
            work.fails("another process")
        process.kill()
        process.wait()
        done = {record["key"] for record in work.kept()}
        assert len(done) <= work.calls() <= n + concurrency * (kill + 1)
    done = subprocess.run(command(work, concurrency=concurrency), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    said = work.server.stats()
    assert len(work.written()) == n == len(said["asked"])
    twice = said["calls"] - n
    print(f"{kills} kills, {n} rows, {said['calls']} calls: {twice} asked twice, {concurrency * kills} allowed")
    assert twice <= concurrency * kills
    assert Counter(record["key"] for record in work.kept()).most_common(1)[0][1] == 1, "bought twice"


def test_the_command_ends_with_status_1_and_one_line_where_replies_failed(work):
    work.server.settings.plan = ["ok", "garbage"]
    write_rows(work.data, made_rows(3))
    done = subprocess.run(command(work), capture_output=True, text=True)
    lines = [line for line in done.stderr.splitlines() if line and "%|" not in line]
    assert done.returncode == 1 and len(lines) == 1 and lines[0].startswith("annotate: 1 responses have no feedback")


def test_a_torn_last_line_is_cut_off_and_only_its_row_is_asked_again(work, capsys):
    work.run(made_rows(4), concurrency=1)
    whole, final = work.journal.read_bytes(), work.output.read_bytes()
    last = whole.rindex(b"\n", 0, -1) + 1
    for torn in (last + 1, last + 40, len(whole) - 2, len(whole) - 1):
        work.journal.write_bytes(whole[:torn])
        before = work.calls()
        work.run()
        assert (work.calls() - before, work.output.read_bytes()) == (1, final)
        assert f"torn last line ({torn - last} bytes)" in capsys.readouterr().err


@pytest.mark.parametrize("damage", [lambda line: b"\xff\x00" + line[2:], lambda line: line[: len(line) // 2],
                                    lambda line: b"", lambda line: b"[" * 100_000, lambda line: b"7",
                                    lambda line: line.replace(b'"reply"', b'"rfply"'),
                                    lambda line: line.replace(b'"reason": null', b'"reason": nul'),
                                    lambda line: line.replace(b'"key": "', b'"key": "z')])
def test_a_damaged_line_in_the_middle_costs_one_row(work, capsys, damage):
    work.run(made_rows(4), concurrency=1)
    lines, final = work.journal.read_bytes().split(b"\n"), work.output.read_bytes()
    lines[1] = damage(lines[1])
    work.journal.write_bytes(b"\n".join(lines))
    work.run()
    assert (work.calls(), work.output.read_bytes()) == (5, final)
    assert f"{work.journal}, line 2: damaged" in capsys.readouterr().err


def test_what_was_asked_already_is_not_asked_again(work):
    """Same prompt and response: once. Another model, mode or text: again. Rows added: only those."""
    rows = made_rows(4)
    rows.append(rows[1] | {"id": "twin"})
    work.run(rows)
    assert work.calls() == 4
    first, twin = work.written()[1], work.written()[4]
    assert {**first, "id": "twin"} == twin and twin["spans"]
    added = [row | {"id": f"new-{k}", "prompt": f"New {k}?"} for k, row in enumerate(rows[:3])]
    for changed, options, new in [
            (rows, {}, 0), (rows[::-1], {}, 0), (rows + added, {}, 3), (rows, {"annotator_model": "other"}, 4),
            (rows, {"mode": "no_cot"}, 4), ([rows[0] | {"prompt": "Another?"}, *rows[1:]], {}, 1), (rows, {}, 0)]:
        before = work.calls()
        work.run(changed, **options)
        assert work.calls() - before == new and work.written()


def test_rows_that_can_never_succeed_do_not_block_those_behind_them(work):
    """25 unusable replies in a row stop a run; the next one begins with the rows that were never asked."""
    rows = made_rows(60)
    for row in rows[:40]:
        row["response"] += " word" * 3000
    work.server.settings.context = 2000
    work.fails("25 replies in a row", rows, concurrency=4)
    work.fails("40 responses have no feedback", concurrency=4)
    assert {r["id"] for r in work.kept() if r["reason"] is None} == {f"row-{i}" for i in range(40, 60)}


# ── What the server takes is found out once ─────────────────────────────────────────────────────────────

@pytest.mark.parametrize("settings, refused, form", [
    ({}, 0, "json_schema"), ({"structured": "ignored"}, 0, "json_schema"),
    ({"structured": "json_object"}, 1, "json_object"), ({"structured": "none"}, 2, None),
    ({"structured": "json_object", "vague": True}, 1, "json_object"), ({"structured": "none", "vague": True}, 2, None),
    ({"token_parameter": "max_tokens"}, 0, "json_schema"),
    ({"token_parameter": "max_completion_tokens"}, 2, "json_schema"),
    ({"token_parameter": "max_completion_tokens", "structured": "json_object"}, 3, "json_object")])
def test_the_form_of_requests_is_found_out_by_the_first_and_kept(tmp_path, settings, refused, form):
    with serving(**settings) as server:
        work = Work(tmp_path, server)
        work.run(made_rows(20), concurrency=8)
        said = server.stats()
        assert (said["calls"], said["statuses"].get("400", 0)) == (20 + refused, refused)
        assert {(body.get("response_format") or {}).get("type") for body in said["recent"]} == {form}
        assert len(work.written()) == 20


@pytest.mark.parametrize("settings", [{}, {"structured": "json_object"}, {"token_parameter": "max_completion_tokens"}])
def test_a_first_row_that_is_too_long_does_not_spoil_the_form_for_the_others(tmp_path, settings):
    with serving(context=2000, **settings) as server:
        work, rows = Work(tmp_path, server), made_rows(10)
        rows[0]["response"] = "word " * 5000
        work.fails("1 responses.*context", rows, concurrency=4)
        forms = {(body["response_format"]["type"]) for body in server.stats()["recent"]}
        assert forms == {settings.get("structured", "json_schema")}
        assert sum(record["reason"] is None for record in work.kept()) == 9


# ── Manners ─────────────────────────────────────────────────────────────────────────────────────────────

@pytest.mark.parametrize("retry_after, seconds, limit", [
    ("0.8", 0.8, None), ("ms:800", 0.8, None), ("date:2", 1.0, None), ("0.8", 0.8, 1200)])
def test_no_request_starts_while_the_server_asks_to_wait(work, retry_after, seconds, limit):
    """Nor do all that waited start at once after it, where there is a rate to keep (20 a second)."""
    work.server.settings.plan, work.server.settings.retry_after = ["ok"] + ["429"] * 3, retry_after
    work.server.settings.delay = 0.1                          # so that no answer comes between the refusals
    work.run(made_rows(30), concurrency=8, requests_per_minute=limit)
    arrivals = sorted(work.server.stats()["arrivals"])
    third = arrivals[3]                           # now it is the account's limit, not one request's bad luck
    assert sum(third < at < third + seconds for at in arrivals) <= 8, "at most those sent before the client could know"
    after = [at for at in arrivals if at >= third + seconds]
    assert len(after) >= 20 and (not limit or sum(at < after[0] + 0.2 for at in after) <= 7)


def test_those_that_waited_for_a_pause_do_not_all_start_in_one_instant():
    """Retries with jitter: 40 requests after a pause of 0.3 s."""
    pace, starts = endpoint.Pace(None, None), []

    async def request():
        await pace.wait(0)
        starts.append(time.monotonic() - begin)

    async def all_of_them():
        await asyncio.gather(*(request() for _ in range(40)))

    begin = time.monotonic()
    for _ in range(endpoint.REFUSALS):
        pace.heard(SimpleNamespace(status_code=429, headers={"retry-after": "0.3"}, is_closed=False))
    asyncio.run(all_of_them())
    assert min(starts) >= 0.3 and max(starts) - min(starts) > 0.02


@pytest.mark.parametrize("headers, seconds", [
    ({}, 0), ({"retry-after": "7"}, 7), ({"retry-after-ms": "250", "retry-after": "7"}, 0.25),
    ({"retry-after": "soon"}, 0), ({"retry-after": "Wed, 21 Oct 2015 07:28:00 GMT"}, 0), ({"retry-after-ms": "x"}, 0)])
def test_what_retry_after_says_in_seconds(headers, seconds):
    assert endpoint.retry_after(headers) == seconds


def test_requests_and_tokens_per_minute_are_kept(work):
    work.server.settings.retry_after = ""
    for options in ({"requests_per_minute": 1200}, {"tokens_per_minute": 600_000}):
        begin, asked = len(work.server.stats()["arrivals"]), work.server.stats()["prompt_tokens"]
        work.run([row | {"prompt": f"{options} {row['prompt']}"} for row in made_rows(20)], concurrency=20, **options)
        said = work.server.stats()
        took = max(said["arrivals"][begin:]) - min(said["arrivals"][begin:])
        least = 19 * 60 / 1200 if "requests_per_minute" in options else (
            (said["prompt_tokens"] - asked) * 19 / 20 * 60 / 600_000)
        assert 0.7 * least < took, options
        assert least > 0.5


@pytest.mark.parametrize("settings, message, kept", [
    ({"plan": ["ok"] * 3 + ["quota"] * 99}, "exceeded your current quota.*run again later", 3),
    ({"plan": ["ok"] * 3 + ["429"] * 99, "retry_after": "3600"}, "asks to wait 3600 s.*again later", 3),
    ({"key": "another"}, "Incorrect API key.*check OPENAI_API_KEY", 0),
    ({"models": ["another"]}, "`tiny` does not exist.*--annotator_model", 0)])
def test_a_server_that_can_serve_nobody_is_one_line_and_nothing_is_lost(work, settings, message, kept):
    for name, value in settings.items():
        setattr(work.server.settings, name, value)
    line = work.fails(message, made_rows(20), concurrency=3)
    assert "\n" not in line and work.server.url in line and "sk-loopback" not in line
    assert work.calls() <= kept + 6, "it is no use to ask again"
    assert sum(record["reason"] is None for record in work.kept()) == kept
    work.server.settings.plan, work.server.settings.key, work.server.settings.models = [], "", []
    before = work.calls()
    work.run()
    assert work.calls() - before == 20 - kept and len(work.written()) == 20


def test_replies_under_way_are_kept_when_another_request_ends_the_run(work):
    """They are on the bill."""
    work.server.settings.plan, work.server.settings.delay = ["ok"] * 4 + ["quota"], 0.3
    work.fails("quota", made_rows(40), concurrency=4, retries=0)
    said = work.server.stats()
    assert said["statuses"]["200"] == sum(record["reason"] is None for record in work.kept()) >= 4


def test_a_server_that_is_down_or_a_missing_key_is_one_line(work, monkeypatch):
    line = work.fails("cannot be reached.*is the server up", made_rows(3), base_url="http://127.0.0.1:9/v1", retries=0)
    assert "127.0.0.1:9" in line and "\n" not in line
    monkeypatch.delenv("OPENAI_API_KEY")
    work.fails("OPENAI_API_KEY is not set")
    assert work.calls() == 0 and not work.kept()


def test_25_unusable_replies_in_a_row_stop_the_run(work):
    work.server.settings.faults = {"garbage": 1.0}
    line = work.fails("25 replies in a row cannot be used.*row-", made_rows(60), concurrency=4)
    assert str(work.journal) in line and 25 <= work.calls() <= 29 and work.calls() == len(work.kept())


# ── Money ───────────────────────────────────────────────────────────────────────────────────────────────

PRICES = {"price_in": 2.5, "price_out": 10.0}


def usd(usage: dict) -> float:
    return (usage["prompt_tokens"] * 2.5 + usage["completion_tokens"] * 10) / 1e6


def bill(server) -> float:
    return usd(server.stats())


def test_usage_and_cost_are_the_servers_own(work):
    work.server.settings.plan = ["ok", "garbage", "truncated", "refusal", "429", "null"]
    work.fails("4 responses", made_rows(20), concurrency=1, **PRICES)
    line = work.run(**PRICES)
    said, kept = work.server.stats(), work.kept()
    for name in ("prompt_tokens", "completion_tokens"):
        assert sum(record["usage"][name] for record in kept) == said[name]
        assert f"{said[name]:,}" in line
    assert sum(record["usd"] for record in kept) == pytest.approx(bill(work.server), rel=1e-12)
    assert float(line.rpartition("$")[2]) == pytest.approx(bill(work.server), abs=1e-4)
    for row in work.written():
        assert row["usd"] == pytest.approx(usd(row["usage"]))


def hostile_rows(n: int) -> list[dict]:
    """By "pieces" nearly every character of these is a token."""
    return [{"id": f"row-{i}", "prompt": "1a" * 900, "response": f"{i} " + "7b_" * 700} for i in range(n)]


@pytest.mark.parametrize("counting, rows, reply, options", [
    ("quarters", made_rows(40), None, {}), ("pieces", made_rows(40), None, {}), ("pieces", hostile_rows(15), "c", {}),
    ("quarters", made_rows(15), "c" * 4400, {"unmatched": "reask"})])
def test_the_bill_never_passes_the_budget_and_a_higher_one_goes_on(tmp_path, counting, rows, reply, options):
    options |= PRICES
    with serving(counting=counting, delay=0.005) as server:
        if reply:
            said = json.dumps({"critique": reply, "good_spans": ["zq"], "poor_spans": []})
            server.settings.responder = lambda body: said
        work = Work(tmp_path, server)
        work.run(rows, **options)
        whole, final = bill(server), work.output.read_bytes()
        work.journal.unlink()
        work.output.unlink()
        for share in (0.01, 0.2, 0.5, 0.8):
            work.fails("--max_usd .* reached", max_usd=share * whole, concurrency=8, **options)
            assert bill(server) - whole <= share * whole and not work.output.exists()
        assert bill(server) - whole > 0.4 * whole, "it must not stop long before the budget"
        work.run(max_usd=2 * whole + 1, **options)
        assert bill(server) == pytest.approx(2 * whole) and work.output.read_bytes() == final


def test_a_request_that_raises_frees_those_that_wait_for_the_budget(work):
    """The command ends; `timeout` is only there so that a hang fails."""
    work.server.settings.plan, work.server.settings.delay = ["ok"] * 3 + ["quota"] * 99, 0.05
    write_rows(work.data, made_rows(30))
    done = subprocess.run(command(work, concurrency=8, max_usd=0.05, **PRICES), capture_output=True, text=True,
                          timeout=60)
    assert done.returncode == 1 and "exceeded your current quota" in done.stderr
    assert sum(record["usage"]["prompt_tokens"] for record in work.kept() if record["usage"]) == (
        work.server.stats()["prompt_tokens"])


def test_a_budget_needs_prices_and_a_server_that_counts(work, monkeypatch):
    work.fails("--max_usd needs --price_in", made_rows(3), max_usd=1)
    whole = loopback.Server._completion

    def uncounted(*args, **kwargs):
        answer = whole(*args, **kwargs)
        del answer.body["usage"]
        return answer

    monkeypatch.setattr(loopback.Server, "_completion", uncounted)
    work.fails("no usage", max_usd=1, concurrency=1, **PRICES)
    assert work.calls() == 1 == len(work.kept())
    work.run()
    assert all(row["usage"] is None and row["usd"] is None for row in work.written())


@pytest.mark.parametrize("counting", ["quarters", "pieces"])
def test_the_forecast_after_a_pilot_is_within_10_percent_of_the_bill(tmp_path, counting, monkeypatch):
    """Rows and replies of many lengths."""
    def wordy(body):
        rng = random.Random(loopback.user_message(body))
        return json.dumps(json.loads(critique(body)) | {"reasoning": "So it is. " * rng.randint(1, 100)})

    with serving(counting=counting, responder=wordy) as server:
        work, rows = Work(tmp_path, server), made_rows(300, longest=150)
        monkeypatch.delenv("OPENAI_API_KEY")
        assert "--limit 50 measures" in work.run(rows, dry_run=True, **PRICES)
        assert work.calls() == 0
        monkeypatch.setenv("OPENAI_API_KEY", "any")
        work.run(limit=50, **PRICES)
        pilot, said = bill(server), work.run(dry_run=True, price_in=2500.0, price_out=10_000.0)
        assert work.calls() == 50 and "300 responses, 250 to ask" in said
        work.run(**PRICES)
        forecast, due = float(said.rpartition("$")[2].replace(",", "")) / 1000, bill(server) - pilot
        print(f"{counting}: forecast {forecast:.5f}, bill {due:.5f}: {forecast / due - 1:+.2%}")
        assert forecast == pytest.approx(due, rel=0.1)


# ── Quotes that the response does not have ──────────────────────────────────────────────────────────────

BAD, GOOD, WORSE = (json.dumps({"critique": "It ends.", "good_spans": quotes, "poor_spans": []})
                    for quotes in (["zq", "no “such” thing"], ["the end"], ["zq", "zq2", "zq3"]))


@pytest.mark.parametrize("second, kept", [(GOOD, GOOD), (WORSE, BAD), (BAD, BAD), ("It is late.", BAD)])
def test_unmatched_quotes_are_asked_about_once_and_the_better_reply_is_kept(work, second, kept):
    """Appendix M.1."""
    work.server.settings.responder = lambda body: second if len(body["messages"]) == 4 else BAD
    work.run([{"id": "a", "prompt": "p", "response": "This is the end."}], unmatched="reask", **PRICES)
    said, row = work.server.stats(), work.written()[0]
    system, user, wrong, again = said["recent"][-1]["messages"]
    assert said["calls"] == 2 and wrong == {"role": "assistant", "content": BAD} and again["role"] == "user"
    assert '"zq"' in again["content"] and '"no “such” thing"' in again["content"]
    assert row["good_spans"] == json.loads(kept)["good_spans"] and len(row["spans"]) == (kept == GOOD)
    assert row["usage"] == {name: said[name] for name in ("prompt_tokens", "completion_tokens")}
    assert row["usd"] == pytest.approx(bill(work.server))


@pytest.mark.parametrize("reply, unmatched", [(GOOD, "reask"), (BAD, "drop")])
def test_nothing_is_asked_again_without_need_or_leave(work, reply, unmatched):
    work.server.settings.responder = lambda body: reply
    work.run([{"id": "a", "prompt": "p", "response": "This is the end."}], unmatched=unmatched)
    wrong = json.loads(BAD)["good_spans"] if reply == BAD else []
    assert work.calls() == 1 and work.written()[0]["unmatched"] == wrong


def test_a_paid_reply_is_kept_where_the_second_request_fails(work):
    work.server.settings.responder, work.server.settings.plan = (lambda body: BAD), ["ok", "quota"]
    work.fails("exceeded your current quota", [{"id": "a", "prompt": "p", "response": "This is the end."}],
               unmatched="reask", **PRICES)
    record, = work.kept()
    assert record["reply"] == BAD and record["usd"] == pytest.approx(bill(work.server))


def test_usage_of_two_requests_is_added_where_a_server_counts_nothing_for_replies(work, monkeypatch):
    whole = loopback.Server._completion

    def uncounted(*args, **kwargs):
        answer = whole(*args, **kwargs)
        answer.body["usage"]["completion_tokens"] = 0
        return answer

    monkeypatch.setattr(loopback.Server, "_completion", uncounted)
    work.server.settings.responder = lambda body: BAD
    work.run([{"id": "a", "prompt": "p", "response": "This is the end."}], unmatched="reask", **PRICES)
    assert work.written()[0]["usage"] == {"prompt_tokens": work.server.stats()["prompt_tokens"], "completion_tokens": 0}


# ── The Batch API ───────────────────────────────────────────────────────────────────────────────────────

BATCH = {"batch": True, "batch_poll": 0.02, **PRICES}


@pytest.fixture()
def batching(work):
    work.server.settings.batch_seconds = 0.1
    work.rows = made_rows(12)
    work.run(work.rows, limit=1, **PRICES)                    # what the server takes is known from a row asked directly
    return work


def killed(*args, **kwargs):
    raise KeyboardInterrupt


def test_a_batch_costs_half_and_brings_every_row(batching):
    direct = read_rows(batching.output)[0]["usd"]
    line = batching.run(**BATCH)
    rows, said = batching.written(), batching.server.stats()
    assert said["calls"] == 12
    shares = Counter(round(row["usd"] / usd(row["usage"]), 6) for row in rows)
    assert shares[0.5] >= 10 and shares[0.5] + shares[1.0] == 12
    assert sum(row["usage"]["prompt_tokens"] for row in rows) == said["prompt_tokens"]
    assert f"{said['prompt_tokens']:,} prompt + {said['completion_tokens']:,} reply tokens" in line
    assert batching.run(**BATCH) and batching.calls() == 12 and direct == rows[0]["usd"]


def test_a_batch_is_collected_by_another_process_if_the_first_is_killed_after_sending(batching, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(endpoint, "_collect", killed)
        batching.run(**BATCH)
    batching.fails("batch")                                    # without --batch every row would be bought again
    batching.run(**BATCH)
    assert batching.calls() == 12 and len(batching.written()) == 12


def test_a_batch_is_found_if_the_process_was_killed_before_it_could_note_its_name(batching, monkeypatch):
    whole = Journal.append_batch

    def dies(journal, digest, batch=None, collected=False):
        return killed() if batch else whole(journal, digest, batch, collected)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Journal, "append_batch", dies)
        batching.run(**BATCH)
    batching.run(**BATCH)
    assert batching.calls() == 12 and len(batching.written()) == 12


def test_a_batch_that_never_reached_the_server_is_sent_again(batching, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(InputError):
        patch.setattr(loopback.Server, "new_batch", lambda self, body: loopback.failed(400, "No room."))
        batching.run(**BATCH)
    batching.run(**BATCH)
    assert batching.calls() == 12 and len(batching.written()) == 12


@pytest.mark.parametrize("after", [0, 1, 5])
def test_a_process_killed_while_it_collects_books_no_reply_twice(batching, monkeypatch, after):
    whole, n = Journal.append, []

    def dies(journal, question, reply):
        n.append(question)
        return killed() if reply.discount < 1 and len(n) > after + 3 else whole(journal, question, reply)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Journal, "append", dies)
        batching.run(**BATCH)
    line = batching.run(**BATCH)
    assert batching.calls() == 12 and len(batching.written()) == 12
    kept = [record for record in batching.kept() if "key" in record]
    assert len(kept) == len({record["key"] for record in kept}) == 12
    assert sum(record["usd"] for record in kept) == pytest.approx(float(line.rpartition("$")[2]), abs=1e-4)


def test_a_batch_of_the_same_rows_is_not_taken_for_an_earlier_one(batching, monkeypatch):
    """All of its replies were garbage, so the same content is sent again; killed before the server had it."""
    batching.server.settings.faults = {"garbage": 1.0}
    batching.fails("11 responses", **BATCH)
    batching.server.settings.faults, whole = {}, Journal.append_batch

    def dies(journal, *args, **kwargs):
        whole(journal, *args, **kwargs)
        killed()

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Journal, "append_batch", dies)
        batching.run(**BATCH)
    batching.run(**BATCH)
    counted = sum(record["usage"]["prompt_tokens"] for record in batching.kept() if record.get("usage"))
    assert len(batching.written()) == 12 and counted == batching.server.stats()["prompt_tokens"]


def test_an_expired_batch_gives_what_it_has_and_the_rest_is_asked_by_the_next_run(batching):
    batching.server.settings.batch_expires = 4
    line = batching.fails("responses have no feedback.*expired", **BATCH)
    have = 12 - int(line.split()[0])
    assert have >= 5
    batching.server.settings.batch_expires = -1
    batching.run(**BATCH)
    assert batching.calls() == 12 and len(batching.written()) == 12


def test_failed_and_garbage_lines_of_a_batch_are_recorded_failures(batching):
    batching.server.settings.faults, batching.server.settings.seed = {"500": 0.2, "garbage": 0.2, "truncated": 0.2}, 2
    line = batching.fails("responses have no feedback", **BATCH)
    bad = {record["key"] for record in batching.kept() if record.get("reason")}
    kinds = batching.server.stats()["faults"]
    assert all(kinds.get(kind) for kind in ("500", "garbage", "truncated")), "choose another seed"
    for reason in ("500", "no JSON object", "cut off"):
        assert reason in line, line
    batching.server.settings.faults, before = {}, batching.calls()
    batching.run(**BATCH)
    assert batching.calls() - before == int(line.split()[0]) == len(bad) and len(batching.written()) == 12
    counted = sum(record["usage"]["prompt_tokens"] for record in batching.kept() if record.get("usage"))
    assert counted == batching.server.stats()["prompt_tokens"]


def test_a_batch_that_is_refused_and_a_server_without_batches_are_one_line(batching, monkeypatch):
    def changes(body):
        batching.server.settings.models = ["another"]
        return critique(body)

    with monkeypatch.context() as patch:
        patch.setattr(loopback.Server, "_upload", lambda *args: loopback.failed(404, "Not Found"))
        patch.setattr(loopback.Server, "_held", lambda *args: loopback.failed(404, "Not Found"))
        line = batching.fails("batch.*404.*--batch", **BATCH)
        assert batching.server.url in line and "\n" not in line
    batching.server.settings.responder = changes
    batching.fails("refused the batch.*model_not_found", **BATCH)
    batching.server.settings.models, batching.server.settings.responder = [], None
    batching.run(**BATCH)
    assert len(batching.written()) == 12


def test_a_batch_keeps_the_budget(batching):
    """Also where the batch of a killed process is still to be collected."""
    whole = 12 * read_rows(batching.output)[0]["usd"]
    for share in (0.1, 0.4, 1.0):
        try:
            batching.run(max_usd=share * whole, **BATCH)
        except InputError as error:
            assert "--max_usd" in str(error)
        billed = sum(record["usd"] for record in batching.kept() if "key" in record)
        assert billed <= share * whole + read_rows(batching.output)[0]["usd"]
    batching.run(max_usd=9, **BATCH)
    assert batching.calls() == 12


def test_lines_of_a_batch_may_hold_any_line_separator(work):
    """U+2028 and others stand bare in JSON; only \\n ends a line."""
    body = {"choices": [{"message": {"content": GOOD.replace("It ends", "It\u2028ends\x85")}, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 5, "completion_tokens": 7}}
    line = json.dumps({"custom_id": "ab" * 16, "response": {"status_code": 200, "body": body}}, ensure_ascii=False)

    async def get(name):
        return SimpleNamespace(text=line + "\n", content=line.encode() + b"\n")

    async def retrieve(name):
        return SimpleNamespace(status="completed", output_file_id="file-1", error_file_id=None, request_counts=None)

    server = endpoint.Server("tiny", "http://127.0.0.1:9/v1")
    server.client = SimpleNamespace(files=SimpleNamespace(content=get), batches=SimpleNamespace(retrieve=retrieve))
    with Journal(work.folder / "j", Prices(1, 1)) as journal:
        asyncio.run(endpoint._collect("0" * 64, "batch_1", server, journal, 0.01))
        assert "It\u2028ends\x85" in journal.read("ab" * 16)["reply"] and journal.usd == pytest.approx(6e-6)


# ── A function instead of a server ──────────────────────────────────────────────────────────────────────

@pytest.fixture()
def critic(work, monkeypatch):
    """Needs no key and no server; `critic.judge` may be set."""
    monkeypatch.delenv("OPENAI_API_KEY")
    module = SimpleNamespace(judge=lambda row, response: GOOD)
    monkeypatch.setitem(sys.modules, "critic_of_the_test", module)
    work.module, whole = module, work.config
    work.config = lambda **options: whole(critic="critic_of_the_test:judge", base_url=None, **options)
    return work


def test_a_critic_is_asked_with_row_and_response(critic):  # Alg. 1 l.5; Alg. 1 l.7–8; Alg. 1 l.10
    seen = []
    critic.module.judge = lambda row, response: seen.append((row["more"], response)) or GOOD
    critic.run([row | {"more": k} for k, row in enumerate(made_rows(6))], concurrency=3)
    assert sorted(seen) == [(k, row["response"]) for k, row in enumerate(critic.rows)] and critic.calls() == 0
    assert {(row["annotator"], row["critique"], row["usd"]) for row in critic.written()} == {
        ("critic_of_the_test:judge", "It ends.", None)}
    critic.run([row | {"more": k * 2} for k, row in enumerate(made_rows(6))])
    assert len(seen) == 6 + 5, "a critic may look at any field, so a changed one asks again"
    assert len(critic.written()) == 6, "𝒟_R starts empty: OUTPUT holds this run's rows, not those of the one before"


def test_failures_of_a_critic_are_recorded_and_its_exceptions_are_its_own(critic):
    critic.module.judge = lambda row, response: "It is late." if row["id"] == "row-2" else GOOD
    critic.fails("1 responses.*no JSON object.*row-2", made_rows(5))
    critic.module.judge = lambda row, response: 1 // 0
    with pytest.raises(ZeroDivisionError):
        critic.run()
    critic.module.judge = lambda row, response: None
    critic.fails("critic_of_the_test:judge.*NoneType")
    critic.module.judge = lambda row, response: GOOD
    critic.run()
    assert len(critic.written()) == 5


def test_half_characters_harm_only_their_row_with_a_critic_too(critic):
    rows = made_rows(5)
    rows[1]["response"], rows[2]["id"], rows[3]["prompt"] = "the end \ud83d", "row-2\udc00", "\ud83d?"
    critic.module.judge = lambda row, response: '{"critique": "c", "good_spans": ["\\ud83d"], "poor_spans": []}' \
        if row["id"] == "row-4" else GOOD
    critic.fails("4 responses", rows)
    critic.run(skip_failed=True, html=str(critic.folder / "page.html"))
    assert [row["id"] for row in read_rows(critic.output)] == ["row-0"]


def test_the_toy_critic_runs_from_the_command_line(work):
    import toy
    work.rows = [{**row, "response": row["reference"]} for row in toy.rows("train", 3)]
    write_rows(work.data, work.rows)
    flags = ["--task", "toy", "--data", work.data, "--output", work.output, "--critic", "toy:critique"]
    done = subprocess.run([sys.executable, ROOT / "annotate.py", *map(str, flags)], capture_output=True, text=True)
    assert done.returncode == 0 and str(work.output) in done.stdout and "next: python reward_model.py" in done.stdout
    rows = read_rows(work.output)
    assert [row["id"] for row in rows] == [row["id"] for row in work.rows]
    assert all(len(row["spans"]) == 7 and row["annotator"] == "toy:critique" for row in rows)


def test_memory_does_not_grow_with_the_rows(critic):
    """Peak with 100 and with 800 rows of 10 KB: their difference is less than a tenth of the rows' size."""
    peaks, critic.module.judge = [], lambda row, response: '{"critique": "c", "good_spans": [], "poor_spans": []}'
    for n in (100, 800):
        rows = [{"id": f"row-{i}", "prompt": f"{i}" + "p" * 5000, "response": f"{i} " + "r" * 5000} for i in range(n)]
        critic.data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        size = critic.data.stat().st_size
        del rows
        tracemalloc.start()
        annotate.annotate(critic.config())
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        critic.journal.unlink()
    print(f"peaks {peaks[0] / 1e6:.2f} and {peaks[1] / 1e6:.2f} MB, rows of {size / 1e6:.1f} MB")
    assert peaks[1] - peaks[0] < 0.1 * 7 / 8 * size


# ── Flags ───────────────────────────────────────────────────────────────────────────────────────────────

@pytest.mark.parametrize("flags, message", [
    ({"mode": "cots"}, "--mode must be one of.*no_cot"), ({"unmatched": "guess"}, "--unmatched"),
    ({"limit": 0}, "--limit"), ({"limit": -1}, "--limit"), ({"concurrency": 0}, "--concurrency"),
    ({"retries": -1}, "--retries"),
    ({"max_usd": 1.0}, "--max_usd needs"), ({"batch": True, "unmatched": "reask"}, "--batch"),
    ({"batch": True, "critic": "toy:critique"}, "--batch")])
def test_flags_that_make_no_sense_are_refused_before_anything_is_spent(work, flags, message):
    work.fails(message, made_rows(2), **flags)
    assert work.calls() == 0 and not work.kept()


# ── Leaving early, and coming back with other flags ─────────────────────────────────────────────────────

def test_ctrl_c_waits_for_the_replies_that_are_paid_for(work):
    work.server.settings.delay = 0.5
    timer = threading.Timer(1.2, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        work.run(made_rows(60), concurrency=8)
    assert 8 < len(work.kept()) == work.calls() < 60
    work.server.settings.delay = 0
    work.run()
    assert work.calls() == 60 == len(work.written())


def test_replies_of_a_run_without_prices_count_against_a_later_budget(work):
    work.run(made_rows(20))
    said = work.server.stats()
    bill = (100 * said["prompt_tokens"] + 100 * said["completion_tokens"]) / 1e6
    line = work.fails("max_usd", made_rows(40), price_in=100.0, price_out=100.0, max_usd=bill)
    assert f"reached at ${bill:.4f}" in line and work.calls() == 20
    work.run(price_in=100.0, price_out=100.0)
    assert all(row["usd"] > 0 for row in work.written())


def test_a_forecast_is_measured_on_replies_of_its_own_mode(work):
    work.run(made_rows(12))
    assert "as 12 replies measured it" in work.run(made_rows(20), dry_run=True)
    assert "replies assumed at 1500 tokens" in work.run(dry_run=True, mode="dense")


@pytest.mark.parametrize("same", [("data", "output"), ("people", "output"), ("audit", "html"), ("output", "html")])
def test_no_file_is_written_over_another(tmp_path, same):
    paths = {"data": str(tmp_path / "rows.jsonl")} | {name: str(tmp_path / "x" / ".." / "one.jsonl") for name in same}
    with pytest.raises(InputError, match="are one file"):
        annotate.check_files(AnnotateConfig(**paths))
