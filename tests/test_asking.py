"""Asking over HTTP: a loopback server that fails in every way, the real command killed, the server's bill beside ours.

    KILLS=20 ROWS=2000 python -m pytest tests/test_asking.py -k killed     # as many as wanted; else 3 of 150 rows
"""

from __future__ import annotations

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

import pytest

import loopback
from annotate import AnnotateConfig, annotate, check_annotator, main, read_completion
from conftest import ROOT
from data import InputError, parse_flags, read_rows, run_script, write_rows
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
    assert Counter(record["reply"][:11] for record in lost)["I am sorry,"] == said["faults"]["garbage"]
    assert sum("cut off" in record["reason"] for record in lost) == said["faults"]["truncated"]
    assert not work.output.exists()

    work.server.settings.faults = {"garbage": 1.0}
    work.run(skip_failed=True)
    gone = {record["id"] for record in lost}
    assert [row["id"] for row in read_rows(work.output)] == [r["id"] for r in work.rows if r["id"] not in gone]
    work.server.settings.faults, before = {}, work.calls()
    work.run()
    assert work.calls() - before == len(lost) and len(work.written()) == 150


@pytest.mark.parametrize("kind, reason, text", [
    ("refusal", "empty: I'm sorry", "I'm sorry, I can't help with that."), ("filter", "content_filter", ""),
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
    rows[1]["response"] = "word " * 200_000 + "the end."
    work.server.settings.context = 10_000
    work.fails("1 responses.*row-1: .*context length", rows)
    assert {record["id"] for record in work.kept() if record["reason"] is None} == {"row-0", "row-2"}
    work.server.settings.context = 0
    said = json.dumps({"critique": "It ends.", "good_spans": ["the end."], "poor_spans": []})
    work.server.settings.responder = lambda body: said
    work.run()
    assert work.written()[1]["spans"] == [{"start": 10 ** 6, "end": 10 ** 6 + 8, "label": 1}]
    assert work.calls() == 4


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


def run_command(work, monkeypatch, **options):
    """The command in this process."""
    monkeypatch.setattr(sys, "argv", command(work, **options)[1:])
    run_script(main, "annotate")


def test_the_command_ends_with_status_1_and_one_line_where_replies_failed(work, monkeypatch, capsys):
    work.server.settings.plan = ["ok", "garbage"]
    write_rows(work.data, made_rows(3))
    with pytest.raises(SystemExit) as ended:
        run_command(work, monkeypatch)
    assert re.fullmatch(r"annotate: 1 responses have no feedback.*", ended.value.code)
    run_command(work, monkeypatch)
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 4 and str(work.output) in said[2]
    assert said[3] == f"next: python reward_model.py --task ultrafeedback --data {work.output} --model MODEL"


def test_a_torn_last_line_costs_its_row_alone_and_the_lines_behind_it_are_whole(work, capsys):
    """Also where the line only lacks its end: then nothing is asked again."""
    work.run(made_rows(4), concurrency=1)
    whole, final = work.journal.read_bytes(), work.output.read_bytes()
    last = whole.rindex(b"\n", 0, -1) + 1
    for torn, asked in ((last + 1, 1), (last + 40, 1), (len(whole) - 2, 1), (len(whole) - 1, 0)):
        work.journal.write_bytes(whole[:torn])
        before = work.calls()
        work.run()
        assert (work.calls() - before, work.output.read_bytes()) == (asked, final)
        assert ("line 4: damaged" in capsys.readouterr().err) == bool(asked)
        work.run()
        assert work.calls() - before == asked and capsys.readouterr()


@pytest.mark.parametrize("damage", [lambda line: b"\xff\x00" + line[2:], lambda line: line[: len(line) // 2],
                                    lambda line: b"", lambda line: b"7", lambda line: b'"7"', lambda line: b"[]",
                                    lambda line: line.replace(b'"reply"', b'"rfply"'),
                                    lambda line: line.replace(b'"reason": null', b'"reason": nul')])
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
    """25 unusable replies in a row stop a run; the next one does not count what has failed before."""
    rows = made_rows(60)
    for row in rows[:40]:
        row["response"] += " word" * 3000
    work.server.settings.context = 2000
    work.fails("25 replies in a row", rows, concurrency=4)
    work.fails("40 responses have no feedback", concurrency=4)
    work.run(skip_failed=True, concurrency=4)
    assert [row["id"] for row in read_rows(work.output)] == [f"row-{i}" for i in range(40, 60)]
    assert {r["id"] for r in work.kept() if r["reason"] is None} == {f"row-{i}" for i in range(40, 60)}


# ── What the server takes is found out once ─────────────────────────────────────────────────────────────

OPENAI, SCHEMA, OBJECT = "max_completion_tokens", "json_schema", "json_object"


@pytest.mark.parametrize("settings, refused, form", [
    ({}, 0, SCHEMA), ({"structured": "ignored"}, 0, SCHEMA), ({"structured": OBJECT}, 1, OBJECT),
    ({"structured": "none"}, 2, None), ({"structured": OBJECT, "vague": True}, 1, OBJECT),
    ({"structured": "none", "vague": True}, 2, None), ({"token_parameter": "max_tokens"}, 0, SCHEMA),
    ({"token_parameter": OPENAI}, 3, SCHEMA),
    ({"token_parameter": OPENAI, "structured": OBJECT}, 4, OBJECT)])
def test_the_form_of_requests_is_found_out_by_the_first_and_kept(tmp_path, settings, refused, form,
                                                                 capsys):
    """And said, where it is not what was wanted: such a model takes no temperature either."""
    with serving(**settings) as server:
        work = Work(tmp_path, server)
        work.run(made_rows(20), concurrency=8)
        said = server.stats()
        assert (said["calls"], said["statuses"].get("400", 0)) == (20 + refused, refused)
        assert {(body.get("response_format") or {}).get("type") for body in said["recent"]} == {form}
        assert len(work.written()) == 20
    limit = OPENAI if OPENAI in settings.values() else "max_tokens"
    assert all(body[limit] == 1200 and ("temperature" in body) == (limit == "max_tokens")
               for body in said["recent"])
    assert ("tiny is asked with " + limit in capsys.readouterr().err) == bool(refused)


@pytest.mark.parametrize("settings", [{}, {"structured": OBJECT}, {"token_parameter": OPENAI}])
def test_a_first_row_that_is_bad_does_not_spoil_the_form_for_the_others(tmp_path, settings):
    """Too long for the model, then half of a surrogate pair; and the slowest replies come first."""
    with serving(context=2000, **settings) as server:
        work, rows = Work(tmp_path, server), made_rows(10)
        rows[0]["response"] = "word " * 5000
        rows[1]["response"] += " \ud83d"
        work.fails("2 responses.*row-0: .*context.*row-1: .*surrogate", rows, concurrency=4)
        forms = {body["response_format"]["type"] for body in server.stats()["recent"]}
        assert forms == {settings.get("structured", SCHEMA)}
        assert sum(record["reason"] is None for record in work.kept()) == 8


# ── Manners ─────────────────────────────────────────────────────────────────────────────────────────────

@pytest.mark.parametrize("settings, message", [
    ({"plan": ["quota"] * 99}, "exceeded your current quota"), ({"plan": ["500"] * 99}, "500.*had an error"),
    ({"key": "another"}, "Incorrect API key.*check OPENAI_API_KEY"),
    ({"models": ["another"]}, "'tiny'.*does not exist.*name of the model")])
def test_a_server_that_can_serve_nobody_is_one_line(work, settings, message):
    for name, value in settings.items():
        setattr(work.server.settings, name, value)
    line = work.fails(message, made_rows(20), concurrency=3, retries=1)
    assert "\n" not in line and work.server.url in line and "sk-loopback" not in line
    assert work.calls() <= 1 + 1 and not work.kept(), "the first alone, with its retry"


def test_a_server_that_gives_up_later_ends_the_run_and_nothing_is_lost(work):
    """One kind of refusal: the account is empty; 25 rows tell."""
    work.server.settings.plan = ["ok"] * 3 + ["quota"] * 99
    line = work.fails("25 replies in a row.*exceeded your current quota", made_rows(60), concurrency=3, retries=0)
    assert "\n" not in line and work.calls() <= 3 + 25 + 3
    assert sum(record["reason"] is None for record in work.kept()) == 3
    work.server.settings.plan, before = [], work.calls()
    work.run()
    assert work.calls() - before == 57 and len(work.written()) == 60


def test_replies_under_way_are_kept_when_another_request_ends_the_run(work):
    """They are on the bill: the 25th refusal comes while others are still asked."""
    work.server.settings.plan, work.server.settings.delay = ["ok"] * 4 + ["quota"] * 25, 0.3
    work.fails("quota", made_rows(60), concurrency=4, retries=0)
    said = work.server.stats()
    assert said["statuses"]["200"] == sum(record["reason"] is None for record in work.kept()) >= 4


def test_a_server_that_is_down_or_a_missing_key_is_one_line(work, monkeypatch):
    url = "http://bob:secret@127.0.0.1:9/v1"
    line = work.fails("Connection error.*check OPENAI_API_KEY, the URL", made_rows(3), base_url=url, retries=0)
    assert "127.0.0.1:9" in line and "\n" not in line and "secret" not in line
    monkeypatch.delenv("OPENAI_API_KEY")
    work.fails("OPENAI_API_KEY is not set")
    with pytest.raises(InputError, match="OPENAI_API_KEY is not set"):
        check_annotator(work.config())
    check_annotator(work.config(critic="toy:critique"))
    with pytest.raises(InputError, match="--critic"):
        check_annotator(work.config(critic="toy:nothing"))
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
    assert sum(record["usd"] for record in kept) == pytest.approx(bill(work.server), rel=1e-12)
    assert float(re.search(r"\$([\d.]+) in all runs", line)[1]) == pytest.approx(bill(work.server), abs=1e-4)
    for row in work.written():
        assert row["usd"] == pytest.approx(usd(row["usage"]))


def hostile_rows(n: int) -> list[dict]:
    """By "pieces" nearly every character of these is a token."""
    return [{"id": f"row-{i}", "prompt": "1a" * 900, "response": f"{i} " + "7b_" * 700} for i in range(n)]


@pytest.mark.parametrize("counting, rows, reply", [
    ("pieces", made_rows(40), None), ("pieces", hostile_rows(15), "c"),
    ("quarters", made_rows(15), "c" * 4400)])
def test_the_bill_never_passes_the_budget_and_a_higher_one_goes_on(tmp_path, counting, rows, reply):
    options = PRICES
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


def test_without_the_servers_count_the_worst_case_is_booked(work, monkeypatch):
    whole = loopback.Server._completion

    def uncounted(*args, **kwargs):
        answer = whole(*args, **kwargs)
        del answer.body["usage"]
        return answer

    monkeypatch.setattr(loopback.Server, "_completion", uncounted)
    work.fails("--max_usd 0.05 reached", made_rows(30), max_usd=0.05, concurrency=4, **PRICES)
    kept = work.kept()
    assert 1 < work.calls() == len(kept) < 30
    assert all(record["usage"]["completion_tokens"] == 1200 for record in kept)
    assert bill(work.server) < 0.04 < sum(record["usd"] for record in kept) <= 0.05


def test_a_forecast_asks_nothing_and_counts_what_is_left(work, monkeypatch):
    """Four bytes a token and 350 tokens a reply, as it says; 80 where only spans are asked for."""
    rows = made_rows(300, longest=150)
    monkeypatch.delenv("OPENAI_API_KEY")
    assert "USD unknown" in work.run(rows, dry_run=True) and work.calls() == 0
    monkeypatch.setenv("OPENAI_API_KEY", "any")
    work.run(limit=50, **PRICES)
    pilot, said = bill(work.server), work.run(dry_run=True, **PRICES)
    assert work.calls() == 50 and said.startswith("300 responses, 250 to ask")
    assert "87,500 reply tokens (4 bytes a token, 350 tokens a reply)" in said
    work.run(price_in=2.5, price_out=0.0)
    due = sum(record["usage"]["prompt_tokens"] for record in work.kept()[50:])
    prompt = int(re.search(r"about ([\d,]+) prompt", said)[1].replace(",", ""))
    assert prompt == pytest.approx(due, rel=0.35) and pilot > 0
    aligned = [row | {"critique": "c"} for row in rows]
    assert "80 tokens a reply" in work.run(aligned, dry_run=True, mode="align")


GOOD = json.dumps({"critique": "It ends.", "good_spans": ["the end"], "poor_spans": []})


def test_quotes_that_are_not_there_are_dropped_and_counted(work):
    """§3.3: no place is guessed, and nothing is asked again."""
    work.server.settings.responder = lambda body: GOOD.replace("the end", "zq")
    work.run([{"id": "a", "prompt": "p", "response": "This is the end."}])
    row, = work.written()
    assert (row["spans"], row["unmatched"], row["good_spans"]) == ([], ["zq"], ["zq"])
    assert work.calls() == 1


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
    critic.fails("1 responses.*row-2: no JSON object", made_rows(5))
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
    critic.run(skip_failed=True)
    assert [row["id"] for row in read_rows(critic.output)] == ["row-0"]


# ── Flags ───────────────────────────────────────────────────────────────────────────────────────────────

@pytest.mark.parametrize("flags, message", [
    (["--mode", "cots"], "--mode must be one of.*no_cot"), (["--unmatched", "drop"], "--unmatched"),
    (["--limit", "0"], "--limit"), (["--limit", "-1"], "--limit"), (["--concurrency", "0"], "--concurrency"),
    (["--retries", "-1"], "--retries"), (["--timeout", "inf"], "--timeout"), (["--max_usd", "1"], "--max_usd needs")])
def test_flags_that_make_no_sense_are_refused_before_anything_is_spent(work, flags, message):
    write_rows(work.data, made_rows(2))
    flags = ["--task", "ultrafeedback", "--data", str(work.data), "--output", str(work.output),
             "--base_url", work.server.url, *flags]
    with pytest.raises(InputError, match=message):
        annotate(parse_flags(AnnotateConfig, flags, "Ask."))
    assert work.calls() == 0 and not work.kept()


@pytest.mark.parametrize("change, text, reason, counted", [
    ({}, "Fine.", None, True), ({"usage": None}, "Fine.", None, False),
    ({"usage": {"total_tokens": 9}}, "Fine.", None, False),
    ({"usage": {"prompt_tokens": 5, "completion_tokens": None}}, "Fine.", None, False),
    ({"choices": [{"message": {"content": 7}}]}, "", "no chat completion", True),
    ({"choices": None}, "", "no chat completion", True)])
def test_completions_of_other_servers_are_read(change, text, reason, counted):
    usage = {"prompt_tokens": 5, "completion_tokens": 7}
    body = {"choices": [{"message": {"content": "Fine."}, "finish_reason": "stop"}], "usage": usage} | change
    worst = {"prompt_tokens": 99, "completion_tokens": 9}
    reply = read_completion(json.dumps(body), worst)
    assert reply.usage == (usage if counted else worst) and text in reply.text
    assert reason in reply.reason if reason else reply.reason is None


# ── Leaving early, and coming back with other flags ─────────────────────────────────────────────────────

def test_ctrl_c_waits_for_the_replies_that_are_paid_for(work):
    signal.signal(signal.SIGINT, signal.default_int_handler)     # a shell may have it ignored
    work.server.settings.delay = 0.5
    timer = threading.Timer(1.2, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        work.run(made_rows(60), concurrency=8)
    assert 8 < len(work.kept()) == work.calls() < 60
    work.server.settings.delay = 0
    work.run()
    assert work.calls() == 60 == len(work.written())


def test_a_second_ctrl_c_does_not_wait(work):
    """The server hangs for ten minutes; what is under way then is not kept."""
    signal.signal(signal.SIGINT, signal.default_int_handler)     # a shell may have it ignored
    work.server.settings.delay = 600
    timers = [threading.Timer(wait, os.kill, (os.getpid(), signal.SIGINT)) for wait in (1.2, 1.8)]
    for timer in timers:
        timer.start()
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


def test_the_output_is_not_written_over_the_data(tmp_path):
    one = tmp_path / "x" / ".." / "one.jsonl"
    with pytest.raises(InputError, match="are one file"):
        annotate(AnnotateConfig(data=str(tmp_path / "one.jsonl"), output=str(one), dry_run=True))
