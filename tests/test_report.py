"""The text, charts and pages of report.py, read back with HTML and XML parsers."""

import json
import math
import re
import sys
import xml.etree.ElementTree as xml
from datetime import datetime
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
import report
from data import InputError, checksum, public
from helpers import HOSTILE, Page, assert_closed, often, read_jsonl, run_main
from report import (NOTES, batch_metrics, card, colour_tokens, curves, health, heatmap,
                    html_table, run_report, sample_row, split_text, svg_line, table, ticks)
from reward_model import Judgement
from runtime import newest_checkpoint

METRICS = [*NOTES]                       # all metrics of a run (checked in test_pipeline)
numbers = st.integers(-10**9, 10**9).map(lambda n: n / 1000)
texts = st.one_of(st.sampled_from(HOSTILE),
                  st.text("<>/!-'\"\ud800🏠é\u0301\n\t x", max_size=20))


# ── The terminal

def test_tokens_are_marked_by_their_sign_in_runs_and_lose_no_text(monkeypatch):  # Figure 1
    offsets = [(0, 1), (1, 2), (1, 2), (2, 3), (3, 3)]
    assert split_text("a🏠b", offsets) == ["a", "🏠", "", "b", ""]
    tokens, delta = ["The", " big", " cat", " ", "flew", " \n"], [0, 1, .5, -1, -1, 1]
    assert colour_tokens(tokens, delta, False) == "The [+big cat+] [-flew-] \n"
    coloured = "The \033[32mbig cat\033[0m \033[31mflew\033[0m \n"
    assert colour_tokens(tokens, delta, True) == coloured
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("NO_COLOR", "1")
    assert colour_tokens(["\033[2J", "\x9b"], [1, 0]) == " [+[2J+] "  # no ESC
    assert "\033" not in colour_tokens(tokens, delta)
    monkeypatch.delenv("NO_COLOR")
    assert colour_tokens(tokens, delta) == coloured


def test_tables_are_aligned_and_absent_figures_are_dashes():
    text = table(["name", "x"], [["a", 1.0], ["long one", None], ["b", -0.0001]], 2)
    assert text.split("\n") == ["name         x", "──────────────", "a         1.00",
                                "long one     –", "b         0.00"]
    cells = Page(html_table(["a", "<b>"], [["x&y", None], ["z", 0.5]]))
    assert [text for _, text in cells.all("td")] == ["x&y", "–", "z", "0.50"]
    assert [text for _, text in cells.all("th")] == ["a", "<b>"]


# ── Heatmaps

@often
@given(st.lists(st.tuples(texts, st.floats(-3, 3)), max_size=8))
def test_a_heatmap_shows_every_token_with_its_value_and_no_other_markup(pairs):
    tokens, values = [token for token, _ in pairs], [value for _, value in pairs]
    found = Page(heatmap(tokens, values))
    assert len(found.tags) == 1 + len(tokens)
    for token, value, (attributes, text) in zip(tokens, values, found.all("span"), strict=True):
        shown = text.replace("↵\n", "\n").replace("⇥\t", "\t").replace("\ufffd", "\0")
        assert shown == (token or "▯")
        assert float(attributes["title"]) == pytest.approx(value, rel=1e-3)


def test_colours_are_symmetric_deepest_at_the_limit_and_told_apart_by_lines():
    found = Page(heatmap([*"abcdef", "", "g"], [-4, -2, -1, 0, 1, 2, 1, float("nan")], limit=2))
    style = r"background:(#\w{6})(\w\w);text-decoration:(.*) #\w{6}(\w\w)"
    colours, depth, lines, ink = zip(*(re.match(style, attributes["style"]).groups()
                                       for attributes, _ in found.all("span")))
    depth, ink = [int(value, 16) for value in depth], [int(value, 16) for value in ink]
    assert depth[0] == depth[1] > depth[2] > depth[3] == depth[7] == ink[3] == 0
    assert depth[1:4] == depth[5:2:-1] and ink[1] > ink[2] > 0
    assert {*zip(colours[:3], lines[:3])} == {("#d55e00", "underline wavy")}
    assert {*zip(colours[4:7], lines[4:7])} == {("#009e73", "underline")}
    with pytest.raises(ValueError):
        heatmap(["a"], [])


# ── Curves

def drawn(svg):
    """The points (x, value) of each curve of a chart, read from its axis labels."""
    root = xml.fromstring(svg)
    (y0, v0), *_, (y1, v1) = [(float(e.get("y")) - 4, float(e.text))
                              for e in root.iter() if e.get("class") == "y"]
    (x0, i0), (x1, i1) = [(float(e.get("x")), float(e.text))
                          for e in root.iter() if e.get("class") == "x"]
    paths = [e.get("d") for e in root.iter() if e.get("class") == "curve"]
    assert all(path.startswith("M") and path.count("M") == 1 for path in paths)   # no gaps
    return [[(i0 + (float(x) - x0) * (i1 - i0) / (x1 - x0),
              v0 + (float(y) - y0) * (v1 - v0) / (y1 - y0))
             for x, y in re.findall(r"(-?[\d.]+) (-?[\d.]+)h0", path)] for path in paths]


@often
@given(st.lists(numbers | st.sampled_from([None, math.nan, math.inf]), min_size=2, max_size=30),
       st.integers(-3, 3))
def test_the_points_of_a_curve_are_the_metrics(values, power):
    """The line goes on over missing and non-finite values; the legend shows the last value."""
    values = [value and value * 10.0 ** power for value in values]
    places = [*range(1, len(values) + 1)]
    svg = svg_line("t", places, {"a": values, "b": values[::-1]})
    known = [value for value in values if value is not None and math.isfinite(value)]
    reach = max([*known, 0]) - min([*known, 0]) or 1.0
    for curve, expected in zip(drawn(svg), (values, values[::-1]), strict=True):
        points = [point for point in zip(places, expected) if point[1] in known]
        for (x, y), (place, value) in zip(curve, points, strict=True):
            assert round(x, 1) == place and abs(y - value) < .005 * reach
    label = f"a {known[-1]:.4g}" if known else "a"
    assert label in [e.text for e in xml.fromstring(svg).iter()]


@often
@given(numbers, numbers)
def test_ticks_are_round_evenly_spaced_and_reach_around_the_numbers(a, b):
    low, high = min(a, b), max(a, b)
    marks = ticks(low, high)
    steps = [q - p for p, q in zip(marks, marks[1:])]
    assert marks[0] <= low + 1e-6 * steps[0] and high - 1e-6 * steps[0] <= marks[-1]
    assert len(marks) <= 6 and max(steps) - min(steps) < 1e-6 * max(map(abs, marks))
    assert round(float(f"{steps[0]:.3e}".split("e")[0]), 2) in (1, 2, 5)


@pytest.mark.parametrize("low, high", [(-1, 1), (0, 1), (1, 4), (1, 1)])
def test_ticks_forgive_a_rounding(low, high):
    """The axis tolerates rounding, as some processors compute a cosine of 1.0000001."""
    for error in (1 - 1e-7, 1 + 1e-7):
        assert ticks(low, high * error) == ticks(low * error, high) == ticks(low, high)


def test_every_metric_has_a_curve_and_a_note_and_new_ones_get_a_curve(run):  # Figure 3
    """A metric of some iterations only, such as those of `probe`, gives a curve of these; δ of
    the critic and of the annotator share a chart."""
    rows = read_jsonl(run / "metrics.jsonl")
    for row in rows:
        row |= {"new <thing>": 1.0 * row["iteration"], "delta": row["iteration"] / 10}
        row.pop("true_delta")
    for row in rows[1::3]:
        row["true_delta"] = row["delta"] / 2
    found = {}
    for figure in re.findall("(?s)<figure>.*?</figure>", curves(rows)):
        root = xml.fromstring(re.search("(?s)<svg.*</svg>", figure)[0])
        found[root[0].text] = drawn(xml.tostring(root)), Page(figure).all("figcaption")[0][1]
    assert [*found][:2] == ["fact accuracy", "new <thing>"]  # the task's metrics come first
    assert [*found][2:] == [key.replace("_", " ") for key in METRICS]
    assert ">last 0.8<" in curves(rows) and ">kl target 2<" in curves(rows)
    for key, note in [*NOTES.items(), ("new <thing>", "")]:
        (points, *_), caption = found[key.replace("_", " ")]
        assert caption == note and (note.strip() or key not in NOTES)
        known = [(row["iteration"], row[key]) for row in rows if key in row]
        assert points == [pytest.approx(point, abs=.05) for point in known]
    (_, beside), _ = found["true delta"]
    assert beside == [pytest.approx((i, i / 10), abs=.05) for i in range(1, 9)]


def test_runs_of_other_lengths_share_axes_and_are_named_by_letters():
    runs = [[{"iteration": i, "new": k + i / 10} for i in range(1, 5 + k)] for k in range(6)]
    svg = re.search("(?s)<svg.*</svg>", curves(*runs))[0]
    for points, run in zip(drawn(svg), runs, strict=True):
        assert points == [pytest.approx((row["iteration"], row["new"]), abs=.05) for row in run]
    lines = [e for e in xml.fromstring(svg).iter() if e.get("class") == "curve"]
    assert len({(e.get("stroke"), e.get("stroke-dasharray")) for e in lines}) == 6
    assert {*"ABCDEF"} <= {e.text for e in xml.fromstring(svg).iter()}
    rows = [{"iteration": 1, "kl": 1.0, "kl_target": 2.0}]
    assert ">kl target 2<" in curves(rows) and ">kl target 2<" not in curves(rows, rows)


def test_one_value_is_a_dot_and_none_is_an_empty_chart():
    assert "h0" in svg_line("t", [4], {"a": [1.0]})
    assert xml.fromstring(svg_line("t", [4], {"a": [None]})) is not None


# ── The page of a run

def row_of(iteration, response="a cat", **more):
    tokens = [*re.findall(r"\s?\S+", response), ""]
    return {"iteration": iteration, "prompt": "Say it.", "response": response,
            "critique": f"critique {iteration}", "unreadable": None, "tokens": tokens,
            "delta": [1.0, -1.0, 0.0], "advantage": [.5, -2.25, iteration / 10], **more}


def write(run, files: dict):
    """Write the rows of some files of a run."""
    for file, rows in files.items():
        (run / file).parent.mkdir(parents=True, exist_ok=True)
        (run / file).write_text("".join(json.dumps(row) + "\n" for row in rows))


HEALTHY = {"fact accuracy": .5, "unparseable": .04, "unmatched": 0.0, "ambiguous": .05,
           "clip_fraction": .2, "policy_kl": 0.0, "skipped_steps": 0, "kl": 3.0,
           "kl_target": 2.0, "explained_variance": .3}


@pytest.fixture()
def run(tmp_path):
    """A small finished run of 8 iterations."""
    metrics = {key: .1 * k for k, key in enumerate(METRICS)} | HEALTHY
    write(tmp_path / "my run", {
        "metrics.jsonl": [{"iteration": i, **metrics} for i in range(1, 9)],
        "samples.jsonl": [row_of(i) for i in range(1, 9)],
        **{f"{when}_samples.jsonl": [row_of(i, f"{when} {i}", id=f"row-{i}") for i in range(20)]
           for when in ("before", "after")},
        "config.json": [{"task": "toy", "base_url": "http://me:geheim@h/v1?key=tresor",
                         "model": "toy/base", "critic of phase 3": "R_φ"}],
        "result.json": [{"before": {"fact accuracy": .5}, "after": {"fact accuracy": .75}}],
        "reward/metrics.json": [{"held_out_loss": .25}],
        "reward/losses.jsonl": [{"iteration": i, "loss": 1 / i} for i in (1, 2, 3)],
        "phases.jsonl": [{"phase": "annotate", "seconds": 3.2, "ended": "2026-11-22"},
                         {"phase": "policy", "seconds": 4.1, "ended": "2026-11-23"}]})
    return tmp_path / "my run"


def test_the_first_screen_names_the_run_and_every_file_is_below(run):
    run_main(run, module=report)
    text = (run / "report.html").read_text("utf-8")
    page = Page(text)
    assert_closed(text)
    assert "does not exist" not in text
    assert page.all("h1")[0][1] == "Text2Grad: my run"
    assert page.all("p")[0][1] == ("model: toy/base · task: toy · critic of phase 3: R_φ · "
                                   "policy: ended 2026-11-23 after 7 s in all")
    assert [text for _, text in page.all("h2")] == [
        "Before and after", "0 of 10 figures are unhealthy", "Curves", "Held-out examples",
        "Training samples", "Loss of R_φ", "Reward model", "Phases", "Settings"]
    assert len(page.all("figure")) == len(METRICS) + 2
    cells = [text for _, text in page.all("td")]
    assert cells == ["fact accuracy", "0.500", "0.750", "held_out_loss", "0.25",
                     "phase", "annotate", "seconds", "3.2", "ended", "2026-11-22",
                     "phase", "policy", "seconds", "4.1", "ended", "2026-11-23",
                     "task", "toy", "base_url", "http://…@h/v1?…",        # nothing secret
                     "model", "toy/base", "critic of phase 3", "R_φ"]
    addresses = public("https://u:p@h/x?k=1 and http://h/y, ftp://z#k")
    assert addresses == "https://…@h/x?… and http://h/y, ftp://z?…"


def test_examples_are_of_the_same_prompts_before_and_after_with_delta_of_every_token(run):
    """Figure 4: the page shows 7 of 20 samples, evenly spaced, with δ_t of every token."""
    text = run_report(run).read_text()
    shown = [int(i) for i in re.findall(r"<b>held-out row-(\d+)</b>", text)]
    assert shown == [0, 3, 6, 9, 12, 15, 18]
    for i in shown:
        before, after = (text.index(heatmap([when, f" {i}", ""], [1.0, -1.0, 0.0], 1))
                         for when in ("before", "after"))
        assert before < text.index(f"critique {i}", before) < after
    titles = [title for _, title in Page(text).all("h3")]
    sides = [title for title in titles if title in ("Before", "After")]
    assert sides == ["Before", "After"] * 7                  # a pair at every width


def test_samples_stand_with_delta_and_advantage_beside_the_critique(run):
    last = row_of(30, critique="", unreadable="it was cut off")
    write(run, {"samples.jsonl": [*map(row_of, range(1, 30)), last]})
    text = run_report(run).read_text()
    cards = re.findall(r"(?s)<b>iteration (\d+)</b>(.*?)</article>", text)
    assert [int(i) for i, _ in cards] == [*range(3, 31, 3)]
    for i, text in cards:
        delta = text.index(heatmap(["a", " cat", ""], [1.0, -1.0, 0.0], 1))
        advantage = text.index(heatmap(["a", " cat", ""], [.5, -2.25, int(i) / 10], 2))
        critique = f"critique {i}" if i != "30" else "no reward: it was cut"
        assert delta < advantage < text.index(critique)


@pytest.mark.parametrize("text", HOSTILE)
def test_no_text_of_a_run_becomes_markup(run, text):
    before = Page(run_report(run).read_text())
    text = text.encode("utf-8", "replace").decode()
    row = {**dict.fromkeys(("prompt", "response", "critique", "unreadable", "id"), text),
           "tokens": [text, "", ""], "delta": [1.0, 0.0, 0.0], "advantage": [.5, .1, .1]}
    metrics = read_jsonl(run / "metrics.jsonl")
    write(run, {
        "samples.jsonl": [{"iteration": i, **row} for i in range(1, 9)],
        "before_samples.jsonl": [row] * 20, "after_samples.jsonl": [row] * 20,
        "config.json": [{"task": text, "model": text, text: text, "x": text}],
        "phases.jsonl": [{"phase": text, "seconds": 1.0, "ended": text}] * 2,
        "metrics.jsonl": [row | {text: row.pop("fact accuracy")} for row in metrics],
        "reward/losses.jsonl": [{"iteration": i, text: 1 / i} for i in (1, 2, 3)],
        "result.json": [{"before": {text: .5}, "after": {text: .75}}]})
    page = run_report(run).read_text("utf-8")
    assert_closed(page)
    assert [tag for tag, *_ in Page(page).tags] == [tag for tag, *_ in before.tags]


def test_a_run_leaves_its_critic_the_date_and_the_losses_of_r_phi(finished_run):
    """The losses are those that the last checkpoint of phase 2 holds."""
    _, _, state = newest_checkpoint(finished_run / "reward")
    rows = read_jsonl(finished_run / "reward" / "losses.jsonl")
    assert [row["iteration"] for row in rows] == [*range(1, len(state["losses"]) + 1)]
    assert [row["loss in nats per token of z"] for row in rows] == state["losses"]
    *_, phase = read_jsonl(finished_run / "phases.jsonl")
    ended = datetime.strptime(phase["ended"], "%Y-%m-%d %H:%M").timestamp()
    assert abs(ended - (finished_run / "result.json").stat().st_mtime) < 300
    text = (finished_run / "report.html").read_text()
    assert "critic of phase 3: R_φ · phase 3, policy: ended " + phase["ended"] in text


def test_an_unfinished_run_says_what_is_not_there_yet(run):
    """After two iterations the page already shows the examples from before training."""
    for name in ("after_samples.jsonl", "result.json"):
        (run / name).unlink()
    write(run, {"metrics.jsonl": read_jsonl(run / "metrics.jsonl")[:2]})
    text = run_report(run).read_text()
    assert re.findall(r"(\S+)</h2>(\S+) does not exist yet", text) == [("after", "result.json")]
    assert text.count("<h3>Before</h3>") == 7 and "<h3>After</h3>" not in text
    for path in run.rglob("*.json*"):
        if path.name != "config.json":
            path.unlink()
    assert run_report(run).read_text().count("does not exist yet") == 7
    (run / "config.json").unlink()
    with pytest.raises(InputError, match="no config.json; name the --output_dir of a run"):
        run_report(run)


def test_a_damaged_line_is_named_and_skipped(run, capsys):
    before = run_report(run).read_bytes()
    with open(run / "samples.jsonl", "a") as file:
        file.write('{"iteration": 9\n')
    assert run_report(run).read_bytes() == before
    assert "samples.jsonl, line 9: skipping corrupt line" in capsys.readouterr().out


# ── What is healthy

@pytest.mark.parametrize("name, value, words", [
    ("unparseable", 1.0, "100% of critiques unreadable (range: up to 5%); raise --reward_l"),
    ("unmatched", .06, "6% of quotes"), ("ambiguous", .06, "6% of quotes"),
    ("skipped_steps", 1, "1 per iteration"), ("repeated facts", .04, "0.04 per response"),
    ("explained_variance", -.01, "-0.01 of the returns"),
    ("kl", 6.5, "3.2 at the end (range: 0.5 to 3)"), ("kl", .5, "0.25 at the end")])
def test_a_late_metric_outside_its_range_comes_first_in_words_and_colour(run, name, value,
                                                                         words):
    """The last fifth of the iterations counts: two of eight, and not the first six."""
    assert "unhealthy" not in dict(health(run))
    write(run, {"metrics.jsonl": [
        {"iteration": i, **HEALTHY, name: value if i > 6 else 9.0} for i in range(1, 9)]})
    page = Page(run_report(run).read_text())
    lines = [(attributes["class"], text) for attributes, text in page.all("p")[1:]]
    n = 10 + (name not in HEALTHY)
    assert [state for state, _ in lines] == ["unhealthy"] + ["healthy"] * (n - 1)
    assert lines[0][1].startswith(name) and f" is unhealthy: {words}" in lines[0][1]
    assert f"1 of {n} figures are unhealthy" in [text for _, text in page.all("h2")]


@pytest.mark.parametrize("name, value, words", [
    ("clip_fraction", .21, "21% of tokens"), ("policy_kl", .06, "0.06 nats"),
    ("policy_kl", math.nan, "nan nats"), ("kl", 10.5, "5.2 (range: up to 5)")])
@pytest.mark.parametrize("place", [0, 4, 7])
def test_the_worst_fifth_of_a_collapse_counts_and_not_one_iteration(run, name, value, words,
                                                                     place):
    """A fifth of ten iterations is two. A single high value beside a low one is no collapse."""
    rows = [{"iteration": i, **HEALTHY, "kl": 2.0, name: 1e-3 if name != "kl" else 2.0}
            for i in range(10)]
    rows[place][name] = 1.5 * value if value == value else 0.0
    write(run, {"metrics.jsonl": rows})
    assert "unhealthy" not in dict(health(run))
    for row in rows[place // 2 * 2 : place // 2 * 2 + 2]:
        row[name] = value
    write(run, {"metrics.jsonl": rows})
    (line,) = [text for state, text in health(run) if state == "unhealthy"
               and "at the end" not in text]
    assert name in line and words in line


@pytest.mark.parametrize("before, after, state", [
    (.5, .46, "healthy"), (.5, .44, "unhealthy"), (-.5, -.54, "healthy"),
    (-.5, -.56, "unhealthy"), (0.0, -.2, "unhealthy"), (0.0, .1, "healthy")])
def test_a_goal_that_falls_by_a_tenth_is_unhealthy(run, before, after, state):
    """The goals are δ and the task's own metrics, not the length of the responses. Repeated
    facts may fall; they must stay near 0."""
    rows = read_jsonl(run / "metrics.jsonl")
    falls = {"response tokens": 9.0, "repeated facts": .5}
    write(run, {"metrics.jsonl": [row | {"repeated facts": .03} for row in rows],
                "result.json": [{"before": {"mean δ per token": before, **falls},
                                 "after": {"mean δ per token": after,
                                           **dict.fromkeys(falls, 0.0)}}]})
    states = {text.split(" is ")[0]: found for found, text in health(run)}
    assert states["mean δ per token"] == state and states["repeated facts"] == "healthy"
    assert "response tokens" not in states


def test_a_file_that_has_changed_is_named(run):
    write(run, {"phases.jsonl": [{"phase": "policy", "seconds": 1.0, "sha256": {
        name: checksum(run / name) for name in ("result.json", "samples.jsonl")}}]})
    assert "unhealthy" not in dict(health(run))
    write(run, {"result.json": [{"before": {"a": .5}, "after": {"a": .7}}]})
    (run / "samples.jsonl").unlink()
    changed = [text.split()[0] for state, text in health(run) if state == "unhealthy"]
    assert sorted(changed) == ["result.json", "samples.jsonl"]


def test_a_run_stopped_by_unreadable_critiques_is_told_from_a_healthy_one(run):
    """Before the first iteration, the critiques of the held-out responses count."""
    for name in ("metrics.jsonl", "samples.jsonl", "after_samples.jsonl", "result.json"):
        (run / name).unlink()
    rows = [row_of(i, id=str(i), unreadable="no JSON" * (i < 5)) for i in range(20)]
    for samples, state, share in ((rows, "unhealthy", "25%"), (rows[5:], "healthy", "0%")):
        write(run, {"before_samples.jsonl": samples})
        (found, text), = health(run)
        assert found == state and f": {share} of critiques unreadable" in text


def test_several_runs_are_compared_on_one_page(run, tmp_path):
    """The page has each run's first screen, curves over each other, and changed settings."""
    other = tmp_path / "b"
    write(other, {"metrics.jsonl": [{"iteration": 1, "fact accuracy": .25}], "config.json": [
        {"task": "toy", "base_url": "http://x:geheim@h/", "seed": 1}]})
    run_main(run, other, module=report)
    text = (tmp_path / "comparison.html").read_text()
    page = Page(text)
    assert_closed(text)
    titles = [text for _, text in page.all("h2")]
    assert [titles[0], titles[3]] == [f"A: {run}", f"B: {other}"]
    assert len(page.all("figure")) == len(METRICS) + 1
    assert len(drawn(re.search("(?s)<svg.*?</svg>", text)[0])) == 2
    cells = [text for _, text in page.all("td")]
    assert cells[-12:] == ["base_url", "http://…@h/v1?…", "http://…@h/", "critic of phase 3",
                           "R_φ", "None", "model", "toy/base", "None", "seed", "None", "1"]
    assert not (run / "report.html").exists()
    write(other, {"result.json": [{"before": {}, "after": {"fact accuracy": .25}}]})
    run_main(run, other, module=report)
    cells = [text for _, text in Page((tmp_path / "comparison.html").read_text()).all("td")]
    assert cells[:4] == ["fact accuracy", "0.750", "0.250", "-0.500"]


def test_a_long_prompt_says_that_it_is_cut():
    long = "".join(chr(97 + i % 26) for i in range(1000))
    page = Page(card("x", long, {}))
    (_, summary), = page.all("summary")
    texts = [text for attributes, text in page.all("div") if attributes["class"] == "text"]
    assert "".join(texts) == long and "cut" in summary
    assert str(len(texts[1])) in summary
    assert not Page(card("x", long[:len(texts[0])], {})).all("summary")


# ── Rollouts

def test_a_rollout_and_its_batch_are_measured_as_by_hand():
    """Padding is ignored; KL is per response, counts are per critique or per quote."""
    judged = [Judgement("c", [1.0, 0.0], quotes=3, unmatched=1, conflicts=1),
              Judgement("d", [-1.0], "unread", quotes=1, ambiguous=2)]
    batch = SimpleNamespace(
        mask=torch.tensor([[1, 1], [1, 0]]), feedback=judged, prompts=["x", "x'"], rows=[3, 4],
        truncated=[True, False],
        texts=["a b", "c"], offsets=[[(0, 1), (1, 3)], [(0, 1)]], advantages=None,
        delta=torch.tensor([[1.0, 0.0], [-1.0, 9.0]]), entropy=torch.tensor([[1.0, 2], [3, 9]]),
        logprobs_old=torch.tensor([[-1.0, -2], [-3, 9]]), logprobs_ref=-torch.ones(2, 2) * 3,
        returns=torch.tensor([[1.0, 2], [3, 9]]), values=torch.tensor([[1.0, 2], [1, 9]]))
    task = SimpleNamespace(truth={"right": lambda row, text: row + len(text)})
    assert batch_metrics(batch, task) == pytest.approx({
        "delta": 0, "good": 1 / 3, "poor": 1 / 3, "entropy": 2, "kl": (2 + 1 + 0) / 2,
        "response_tokens": 1.5, "truncated": .5, "explained_variance": 1 - (8 / 9) / (2 / 3),
        "unparseable": .5, "unmatched": .25, "ambiguous": .5, "conflicting": 1,
        "right": (6 + 5) / 2})
    sample = sample_row(batch, 0)
    assert sample == {"prompt": "x", "response": "a b", "critique": "c", "unreadable": "",
                      "tokens": ["a", " b"], "delta": [1.0, 0.0]}
    batch.advantages = torch.tensor([[.5, -.5], [0.0, 9.0]])
    assert sample_row(batch, 1) == {
        "prompt": "x'", "response": "c", "critique": "d", "unreadable": "unread",
        "tokens": ["c"], "delta": [-1.0], "advantage": [0.0]}
