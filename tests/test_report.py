"""The text, charts and pages of report.py, read back with HTML and XML parsers."""

import json
import math
import re
import sys
import xml.etree.ElementTree as xml
from types import SimpleNamespace

import pytest
import report
import torch
from data import InputError
from helpers import HOSTILE, Page, assert_closed, often, read_jsonl, run_main
from hypothesis import given
from hypothesis import strategies as st
from policy import batch_metrics, sample_row
from report import (LIMITS, NOTES, above_limits, before_and_after, colour_tokens,
                    critique_block, curves, heatmap, html_table, print_examples, run_report,
                    split_text, svg_line, table)
from reward_model import Judgement
from runtime import checkpoints, load_tensors


# ── The terminal

def test_tokens_are_marked_by_their_sign_in_runs_and_lose_no_text(monkeypatch):  # Figure 1
    offsets = [(0, 1), (1, 2), (1, 2), (2, 3), (3, 3)]
    assert split_text("a🏠b", offsets) == ["a", "🏠", "", "b", ""]
    tokens, delta = ["The", " big", " cat", " ", "flew", " \n"], [0, 1, .5, -1, -1, 1]
    assert colour_tokens(tokens, delta, False) == "The [+big cat+] [-flew-] \n"
    coloured = "The \033[32mbig cat\033[0m \033[31mflew\033[0m \n"
    assert colour_tokens(tokens, delta, True) == coloured
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert colour_tokens(tokens, delta) == coloured
    monkeypatch.setenv("NO_COLOR", "1")
    assert colour_tokens(tokens, delta) == "The [+big cat+] [-flew-] \n"


def test_five_examples_are_printed_with_their_spans_and_critiques(capsys):
    rows = [{"tokens": ["A", " cat"], "delta": [0, -1], "critique": f"{i}", "prompt": "x"}
            for i in range(7)]
    rows[0].pop("prompt")
    print_examples(rows)
    output = capsys.readouterr().out
    assert output.count("response: A [-cat-]\n") == 5 and output.count("\nx\n") == 4
    assert [int(i) for i in re.findall(r"critique: (\d)\n", output)] == [0, 1, 2, 3, 4]


def test_tables_are_aligned_and_absent_figures_are_dashes():
    text = table(["name", "x"], [["a", 1.0], ["long one", None], ["b", -0.0001]], 2)
    assert text.split("\n") == ["name         x", "──────────────", "a         1.00",
                                "long one     –", "b         0.00"]
    cells = Page(html_table(["a", "<b>"], [["x&y", None], ["z", 0.5]]))
    assert [text for _, text in cells.all("td")] == ["x&y", "–", "z", "0.50"]
    assert [text for _, text in cells.all("th")] == ["a", "<b>"]


# ── Tokens and quotes in colour

@pytest.mark.parametrize("text", HOSTILE)
def test_a_heatmap_shows_each_token_and_its_value_by_colour_line_and_depth(text):
    """Colours are deepest at the limit."""
    values = [-4, -2, -1, 0, 1, 2, 1, float("nan")]
    page = Page(heatmap([text, *"bcd\nf", "", "g"], values, limit=2))
    titles, styles, tokens = zip(*((attributes["title"], attributes["style"], token)
                                   for attributes, token in page.all("span")))
    assert tokens == (text, *"bcd", "↵\n", "f", "▯", "g") and len(page.tags) == 9
    assert titles == tuple(f"{value:+g}" for value in values)
    style = r"background:(#\w{6})(\w\w);text-decoration:(.*) #\w{6}(\w\w)"
    colours, depth, lines, ink = zip(*(re.match(style, text).groups() for text in styles))
    assert depth == ("80", "80", "40", "00", "40", "80", "40", "00")
    assert ink == ("ff", "ff", "80", "00", "80", "ff", "80", "00")
    assert {*zip(colours[:3], lines[:3])} == {("#d55e00", "underline wavy")}
    assert {*zip(colours[4:7], lines[4:7])} == {("#009e73", "underline")}
    with pytest.raises(ValueError):
        heatmap(["a"], [])


def test_a_critique_is_text_with_the_quotes_of_the_response_in_colour():
    z = 'One <b>.\n{"good_spans": ["a cat", "no"], "poor_spans": ["sat"], "note": "sat"}'
    page = Page(critique_block(z, "a cat sat"))
    marks = [(float(attributes["title"]), text) for attributes, text in page.all("span")]
    assert marks == [(1, "a cat"), (0, "no"), (-1, "sat"), (0, "sat")]
    (_, text), = page.all("div")
    assert text.startswith("One <b>.\ngood_spans: ")
    for raw in ("Fine {x}.", "Cut\n{\"good_spans\": [", "Deep\n{\"a\": " + "[" * 10**5, ""):
        (_, text), = Page(critique_block(raw, "a cat")).all("div")
        assert text == raw


# ── Curves

def drawn(svg):
    """The points (x, value) of each curve of a chart, in shares of its axes."""
    paths = [e.get("d") for e in xml.fromstring(svg).iter() if e.get("class") == "curve"]
    assert all(path.startswith("M") and path.count("M") == 1 for path in paths)   # no gaps
    return [[((float(x) - 56) / 270, (156 - float(y)) / 110)
             for x, y in re.findall(r"(-?[\d.]+) (-?[\d.]+)h0", path)] for path in paths]


@often
@given(st.lists(st.integers(-10**6, 10**6) | st.sampled_from([None, math.nan, math.inf]),
                min_size=2, max_size=30), st.integers(-3, 3))
def test_the_points_of_a_curve_are_the_metrics(values, power):
    """The axis goes from the lowest to the highest value; a line goes on over missing ones."""
    values = [value and value * 10.0 ** power for value in values]
    svg = svg_line("t", [*range(1, len(values) + 1)], {"a": values, "b": values[::-1]}, "u")
    known = [value for value in values if value is not None and math.isfinite(value)] or [0.0]
    low = min(known)
    height = max(max(known) - low, abs(low) / 100) or 1.0
    for curve, expected in zip(drawn(svg), (values, values[::-1]), strict=True):
        points = [(i / (len(values) - 1), (value - low) / height)
                  for i, value in enumerate(expected)
                  if value is not None and math.isfinite(value)]
        assert len(curve) == len(points)
        for point, expected_point in zip(curve, points):
            assert point == pytest.approx(expected_point, abs=1e-3)
    labels = {e.text for e in xml.fromstring(svg).iter()}
    assert {"t", "a", "b", "u", "1", f"{len(values)}", f"{low:.3g}"} <= labels


def test_every_metric_has_a_curve_and_a_note_and_new_ones_come_first(run):  # Figure 3
    rows = read_jsonl(run / "metrics.jsonl")
    for row in rows[1::3]:
        row["new <thing>"] = 1.0 * row["iteration"]
    page = Page(curves(rows))
    titles = [text for _, text in page.all("title")]
    assert titles == ["fact accuracy", "new <thing>", *NOTES]
    notes = [text for _, text in page.all("figcaption")]
    assert notes == ["", "", *NOTES.values()] and all(NOTES.values())
    assert "last 8.0000" in [text for _, text in page.all("text")]


# ── The page of a run

def row_of(iteration, response="a cat", **more):
    tokens = [*re.findall(r"\s?\S+", response), ""]
    return {"iteration": iteration, "prompt": "Say it.", "response": response,
            "critique": f"critique {iteration}", "unreadable": "", "tokens": tokens,
            "delta": [1.0, -1.0, 0.0], "advantage": [.5, -2.25, iteration / 10], **more}


def write(run, files: dict):
    """Write the rows of some files of a run."""
    for file, rows in files.items():
        (run / file).parent.mkdir(parents=True, exist_ok=True)
        (run / file).write_text("".join(json.dumps(row) + "\n" for row in rows))


HEALTHY = dict.fromkeys(NOTES, 0.0) | {"fact accuracy": .5, **LIMITS, "kl": 6.0, "kl_target": 2}


@pytest.fixture()
def run(tmp_path):
    """A small finished run of 8 iterations, whose metrics reach their limits."""
    write(tmp_path / "my run", {
        "metrics.jsonl": [{"iteration": i, **HEALTHY} for i in range(1, 9)],
        "samples.jsonl": [row_of(i) for i in range(1, 9)],
        **{f"{when}_samples.jsonl": [
            row_of(i, f"{when} {i}", id=f"row-{i}", scores={"fact accuracy": i / 20 + gain})
            for i in range(20)] for when, gain in (("before", 0.0), ("after", .25))},
        "config.json": [{"task": "toy", "model": "toy/base", "critic": "annotator",
                         "temperature": 0.7}],
        "reward/metrics.json": [{"poor_recall": .25}],
        "reward/losses.jsonl": [{"iteration": i, "loss": 1 / i} for i in (1, 2, 3)],
        "phases.jsonl": [{"phase": "policy", "seconds": 4.1}]})
    return tmp_path / "my run"


def test_the_first_screen_names_the_run_and_every_file_is_below(run):
    run_main(run, module=report)
    text = (run / "report.html").read_text("utf-8")
    page = Page(text)
    assert_closed(text)
    assert "does not exist" not in text and page.all("h1")[0][1] == "Text2Grad: my run"
    first, limits, *_ = [text for attributes, text in page.all("div", **{"class": "text"})]
    assert first == "model toy/base · task toy · critic: annotator" and limits == "none"
    assert [text for _, text in page.all("h2")] == [
        "Before and after", "Metrics above their limits", "Curves",
        "Held-out examples, before and after training", "Samples, by iteration", "Loss of R_φ",
        "Reward model", "Phases", "Settings"]
    assert len(page.all("figure")) == len(NOTES) + 2
    for line in ("poor_recall: 0.25", "phase: policy\nseconds: 4.1", "temperature: 0.7"):
        assert line in text


def test_the_table_says_of_how_many_responses_it_is_and_how_sure_a_change_is(run):
    """The changes of 20 responses are .25 ± .02 in turn: 1.96 · .0205 / √20 = .009."""
    after, before, config = (read_jsonl(run / name) for name in report._RESULT)
    for i, row in enumerate(after):
        row["scores"]["fact accuracy"] += .02 * (-1) ** i
    header, lines = before_and_after(after, before, config)
    assert header[0] == "20 held-out responses, temperature 0.7"
    (name, old, new, change), = lines
    assert (name, old, new) == ("fact accuracy", .475, pytest.approx(.725))
    assert change == "+0.250 ± 0.009"
    assert before_and_after(before[:1], after[:1], config)[1][0][3] == "-0.270"


def test_examples_are_of_the_same_prompts_before_and_after_with_delta_of_every_token(run):
    """Figure 4: the page shows 10 of 20 held-out prompts, evenly spaced."""
    text = run_report(run).read_text()
    cards = re.findall(r"(?s)<b>row-(\d+)</b>(.*?)</article>", text)
    assert [int(i) for i, _ in cards] == [*range(0, 20, 2)]
    for i, html in cards:
        before, after = (html.index(heatmap([when, f" {i}", ""], [1.0, -1.0, 0.0], 1))
                         for when in ("before", "after"))
        assert before < after and html.count(f"critique {i}") == 2
    rows = [row_of(i) for i in range(1, 24)]
    rows[0] |= {"critique": "", "unreadable": "it was cut off"}
    write(run, {"samples.jsonl": rows})
    text = run_report(run).read_text()
    cards = re.findall(r"(?s)<b>(\d+)</b>(.*?)</article>", text)
    assert [int(i) for i, _ in cards] == [*range(1, 24, 3)]
    for i, html in cards:
        delta = html.index(heatmap(["a", " cat", ""], [1.0, -1.0, 0.0], 1))
        advantage = html.index(heatmap(["a", " cat", ""], [.5, -2.25, int(i) / 10], 2))
        critique = f"critique {i}" if i != "1" else "no reward, it was cut off"
        assert delta < advantage < html.index(critique)


@pytest.mark.parametrize("text", HOSTILE)
def test_no_text_of_a_run_becomes_markup(run, text):
    before = Page(run_report(run).read_text())
    text = text.encode("utf-8", "replace").decode()
    row = {**dict.fromkeys(("prompt", "response", "critique", "unreadable", "id"), text),
           "tokens": [text, "", ""], "delta": [1.0, 0.0, 0.0], "advantage": [.5, .1, .1],
           "scores": {text: .5}}
    metrics = read_jsonl(run / "metrics.jsonl")
    write(run, {
        "samples.jsonl": [{"iteration": i, **row} for i in range(1, 9)],
        "before_samples.jsonl": [row] * 20, "after_samples.jsonl": [row] * 20,
        "config.json": [{"task": text, "model": text, text: text, "temperature": 1,
                         "critic": text}],
        "phases.jsonl": [{"phase": text, text: 1.0}],
        "metrics.jsonl": [row | {text: row.pop("fact accuracy")} for row in metrics],
        "reward/losses.jsonl": [{"iteration": i, text: 1 / i} for i in (1, 2, 3)]})
    page = run_report(run).read_text("utf-8")
    assert_closed(page)
    assert [tag for tag, *_ in Page(page).tags] == [tag for tag, *_ in before.tags]


def test_phase_2_leaves_the_losses_of_its_last_checkpoint(finished_run):
    _, state = load_tensors(checkpoints(finished_run / "reward")[-1])
    rows = read_jsonl(finished_run / "reward" / "losses.jsonl")
    assert [row["loss in nats per token of z"] for row in rows] == state["losses"]


def test_an_unfinished_run_says_what_is_not_there_yet(run, capsys):
    """A line that a crash cut off is named and skipped."""
    (run / "after_samples.jsonl").unlink()
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"iteration": 9\n')
    text = run_report(run).read_text()
    assert re.findall(r"(\S+)</h2>(\S+) does not exist yet", text) == [
        ("after", "after_samples.jsonl")]
    assert "metrics.jsonl, line 9: skipping corrupt line" in capsys.readouterr().out
    assert len(re.findall(r"<b>row-\d+</b>", text)) == 10 and "after training, δ" not in text
    for path in run.rglob("*.json*"):
        if path.name != "config.json":
            path.unlink()
    assert run_report(run).read_text().count("does not exist yet") == 8
    (run / "config.json").unlink()
    with pytest.raises(InputError, match="no config.json; name the --output_dir of a run"):
        run_report(run)


# ── What is above its limit

@pytest.mark.parametrize("name", [*LIMITS, "kl"])
@pytest.mark.parametrize("excess", [.004, math.nan])
def test_a_mean_above_its_limit_is_one_line_with_a_remedy(run, name, excess):
    """The mean over all iterations counts. The note names the limit, which for KL is 3 times
    the target; with a fixed β there is none."""
    rows = [{"iteration": i, **HEALTHY} for i in range(1, 9)]
    assert above_limits(rows) == above_limits([]) == []
    rows[3][name] += 8 * excess
    line, = above_limits(rows)
    mean = HEALTHY[name] + excess
    assert line == f"{name} is {mean:.3g}: {NOTES[name]}"
    limit, remedy = re.search(r"healthy (?:under|at) (\S+).*, otherwise (.+)", line).groups()
    assert float(limit) == LIMITS.get(name, 3) and remedy
    write(run, {"metrics.jsonl": rows})
    assert line in [text for _, text in Page(run_report(run).read_text()).all("div")]
    for row in rows:
        row.pop("kl_target")
    assert len(above_limits(rows)) == (name != "kl" or excess != excess)


# ── Rollouts

def test_a_rollout_and_its_batch_are_measured_as_by_hand():
    """Padding is ignored. Entropy is per token and shares of quotes are per quote; all others
    are means over the responses."""
    judged = [Judgement("c", [1.0, 0.0], quotes=3, unmatched=1, conflicts=1),
              Judgement("d", [-1.0], "unread", quotes=1, ambiguous=2)]
    batch = SimpleNamespace(
        mask=torch.tensor([[1, 1], [1, 0]]), feedback=judged, prompts=["x", "x'"], rows=[3, 4],
        truncated=[True, False],
        texts=["a b", "c"], offsets=[[(0, 1), (1, 3)], [(0, 1)]], advantages=None,
        entropy=torch.tensor([[1.0, 2], [3, 9]]),
        logprobs_old=torch.tensor([[-1.0, -2], [-3, 9]]), logprobs_ref=-torch.ones(2, 2) * 3,
        returns=torch.tensor([[1.0, 2], [3, 9]]), values=torch.tensor([[1.0, 2], [1, 9]]))
    task = SimpleNamespace(truth={"right": lambda row, text: row + len(text)})
    assert batch_metrics(batch, task) == pytest.approx({
        "delta": (.5 - 1) / 2, "good": .5 / 2, "poor": 1 / 2, "entropy": 2,
        "kl": (2 + 1 + 0) / 2, "response_tokens": 1.5, "truncated": .5,
        "explained_variance": 1 - (8 / 9) / (2 / 3), "unparseable": .5, "unmatched": .25,
        "ambiguous": .5, "conflicting": .25, "right": (6 + 5) / 2})
    sample = sample_row(batch, 0)
    assert sample == {"prompt": "x", "response": "a b", "critique": "c", "unreadable": "",
                      "tokens": ["a", " b"], "delta": [1.0, 0.0]}
    batch.advantages = torch.tensor([[.5, -.5], [0.0, 9.0]])
    assert sample_row(batch, 1) == {
        "prompt": "x'", "response": "c", "critique": "d", "unreadable": "unread",
        "tokens": ["c"], "delta": [-1.0], "advantage": [0.0]}
