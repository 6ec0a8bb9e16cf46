"""The text, charts and pages of report.py, read back with HTML and XML parsers."""

import json
import math
import re
import xml.etree.ElementTree as xml
from types import SimpleNamespace

import pytest
import report
import torch
from helpers import Page, read_jsonl, refused, run_main
from report import (LIMITS, NOTES, above_limits, batch_metrics, before_and_after,
                    colour_tokens, compare_with_annotator, curves, heatmap, html_table,
                    measure_held_out, run_report,
                    sample_row, split_text, svg_line, table)
from annotate import Review


def test_tokens_are_marked_by_their_sign_in_runs_and_lose_no_text(monkeypatch):  # Figure 1
    offsets = [(0, 1), (1, 2), (1, 2), (2, 3), (3, 3)]
    assert split_text("a🏠b", offsets) == ["a", "🏠", "", "b", ""]
    tokens, delta = ["The", " big", " cat", " ", "flew", " \n"], [0, 1, .5, -1, -1, 1]
    coloured = "The \033[32mbig cat\033[0m \033[31mflew\033[0m \n"
    assert colour_tokens(tokens, delta, True) == coloured
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert colour_tokens(tokens, delta) == coloured
    monkeypatch.setenv("NO_COLOR", "1")
    assert colour_tokens(tokens, delta) == "The [+big cat+] [-flew-] \n"
    assert colour_tokens(["a\x1b[2J\t\n\x9b1A"], [1]) == "[+a[2J\t\n1A+]"      # no escapes


def test_tables_are_aligned_and_absent_figures_are_dashes():
    text = table(["name", "x"], [["a", 1.0], ["long one", None], ["b", -0.0001]], 2)
    assert text.split("\n") == ["name         x", "──────────────", "a         1.00",
                                "long one     –", "b         0.00"]
    cells = Page(html_table(["a", "<b>"], [["x&y", None], ["z", 0.5]]))
    assert [text for _, text in cells.all("td")] == ["x&y", "–", "z", "0.50"]


def test_a_heatmap_shows_each_token_and_its_value_by_colour_line_and_depth():
    page = Page(heatmap(["a\nf", "", "<b>"], [-4, 1, math.nan], limit=2))
    assert [(span["title"], span["style"], token) for span, token in page.all("span")] == [
        ("-4", "background:#d55e0080;text-decoration:underline wavy #d55e00ff", "a↵\nf"),
        ("+1", "background:#009e7340;text-decoration:underline #009e7380", "▯"),
        ("+nan", "background:#009e7300;text-decoration:underline #009e7300", "<b>")]


@pytest.mark.parametrize("values, low, high, path", [
    ([1, None, 3, math.nan, -2], "-2", "3", "M56.00 90.00h0L191.00 46.00h0L326.00 156.00h0"),
    ([5, 5], "5", "5.05", "M56.00 156.00h0L326.00 156.00h0"), ([math.inf], "0", "1", "M"),
    ([-.000121, .1], "-0.00012", "0.1", "M56.00 156.00h0L326.00 46.00h0")])
def test_the_points_of_a_curve_are_the_metrics(values, low, high, path):
    """The plot is 270 × 110, from (56, 156) upwards; a line goes on over missing values."""
    elements = [*xml.fromstring(svg_line("t", [*range(len(values))], {"a": values})).iter()]
    assert [e.get("d") for e in elements if e.get("class") == "curve"] == [path]
    last = str(len(values) - 1)
    assert [e.text for e in elements if e.text] == [
        "t", "t", high, low, "0", "iteration", last, "a"]


def test_every_metric_has_a_curve_and_a_note_and_new_ones_come_first(run):  # Figure 3
    rows = read_jsonl(run / "metrics.jsonl")
    rows[1]["new <thing>"] = 1.0
    page = Page(curves(rows))
    assert [text for _, text in page.all("title")] == ["fact accuracy", "new <thing>", *NOTES]
    assert [text for _, text in page.all("figcaption")] == ["", "", *NOTES.values()]


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
        "samples.jsonl": [row_of(i, unreadable="cut off" * (i == 1)) for i in range(1, 9)],
        **{f"{when}_samples.jsonl": [
            row_of(i, f"{when} {i}", id=f"row-{i}", scores={"fact accuracy": i / 20 + gain})
            for i in range(20)] for when, gain in (("before", 0.0), ("after", .25))},
        "config.json": [{"task": "toy", "model": "toy/base", "critic": "annotator",
                         "temperature": 0.7}],
        "reward/metrics.json": [{"poor_recall": .25}], "result.json": [{"before": {}}],
        "reward/losses.jsonl": [{"iteration": i, "loss": 1 / i} for i in (1, 2, 3)],
        "phases.jsonl": [{"phase": "policy", "seconds": 4.1}]})
    return tmp_path / "my run"


def test_the_first_screen_names_the_run_and_every_file_is_below(run, capsys):
    """What is not there yet is named, and a line that a crash cut off is skipped."""
    run_main(run, module=report)
    text = (run / "report.html").read_text("utf-8")
    page = Page(text)
    assert "does not exist" not in text and page.all("h1")[0][1] == "Text2Grad: my run"
    first, limits, *_ = [text for attributes, text in page.all("div", **{"class": "text"})]
    assert first == "model toy/base · task toy · critic: annotator" and limits == "none"
    assert len(page.all("h2")) == 10 and len(page.all("figure")) == len(NOTES) + 2
    for line in ("poor_recall: 0.25", "phase: policy\nseconds: 4.1", "temperature: 0.7"):
        assert line in text
    (run / "after_samples.jsonl").unlink()
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"iteration": 9\n')
    assert "after</h2>after_samples.jsonl does not exist yet" in run_report(run).read_text()
    assert "metrics.jsonl, line 9: skipping corrupt line" in capsys.readouterr().out
    (run / "config.json").unlink()
    refused("no config.json; name the --output_dir of a run", run_report, run)


def test_the_table_says_of_how_many_responses_it_is_and_how_sure_a_change_is(run):
    """The changes of 20 responses are .25 ± .2 in turn: 1.96 · .205 / √20 = .090."""
    after, before, config = (read_jsonl(run / name) for name in report._RESULT)
    for i, row in enumerate(after):
        row["scores"]["fact accuracy"] += .2 * (-1) ** i
    header, lines = before_and_after(after, before, config)
    assert header[0] == "20 held-out responses, temperature 0.7"
    assert lines == [["fact accuracy", .475, pytest.approx(.725), "+0.250 ± 0.090"]]
    assert before_and_after(before[:1], after[:1], config)[1][0][3] == "-0.450"


def test_examples_are_of_the_same_prompts_before_and_after_with_delta_of_every_token(run):
    """Figure 4: the page shows 10 of 20 held-out prompts, evenly spaced."""
    text = run_report(run).read_text()
    cards = re.findall(r"(?s)<b>row-(\d+)</b>(.*?)</article>", text)
    assert [int(i) for i, _ in cards] == [*range(0, 20, 2)]
    for i, html in cards:
        pair = [heatmap([when, f" {i}", ""], [1.0, -1.0, 0.0]) for when in ("before", "after")]
        assert re.search(".*".join(map(re.escape, pair)), html, re.DOTALL)
        assert html.count(f"critique {i}") == 2
    for i, html in re.findall(r"(?s)<b>(\d+)</b>(.*?)</article>", text):
        assert heatmap(["a", " cat", ""], [1.0, -1.0, 0.0], 1) in html
        assert heatmap(["a", " cat", ""], [.5, -2.25, int(i) / 10], 2) in html
        assert ("no reward, cut off" in html) == (i == "1")


def test_no_text_of_a_run_becomes_markup(run):
    """A page has no scripts, loads nothing, and forbids both in its policy."""
    before = Page(run_report(run).read_text())
    text = "</script><img src=x onerror=\"x()\"> a\"b'c&amp;<b> \0 half \ud83d </style></title>"
    row = {**dict.fromkeys(("prompt", "response", "critique", "unreadable", "id"), text),
           "tokens": [text, "", ""], "delta": [1.0, 0.0, 0.0], "advantage": [.5, .1, .1],
           "scores": {text: .5}}
    metrics = read_jsonl(run / "metrics.jsonl")
    write(run, {
        "samples.jsonl": [{"iteration": i, **row} for i in range(1, 9)],
        "before_samples.jsonl": [row] * 20, "after_samples.jsonl": [row] * 20,
        "config.json": [{"task": text, "model": text, text: text, "temperature": 1,
                         "critic": text}],
        "metrics.jsonl": [row | {text: row.pop("fact accuracy")} for row in metrics]})
    page = Page(run_report(run).read_text("utf-8"))
    assert [tag for tag, *_ in page.tags] == [tag for tag, *_ in before.tags]
    assert not {tag for tag, *_ in page.tags} & {"script", "img", "link", "iframe", "base"}
    for _, attributes, _ in page.tags:
        assert not [key for key in attributes if key in ("src", "href") or key[:2] == "on"]
    (meta, _), = page.all("meta", **{"http-equiv": "Content-Security-Policy"})
    assert "default-src 'none'; style-src 'unsafe-inline'; base-uri" in meta["content"]


def test_a_mean_above_its_limit_is_one_line_with_a_remedy():
    """The note names the limit, which for KL is 3 times the target."""
    for name, limit in {**LIMITS, "kl": 3}.items():
        rows = [{"iteration": i, **HEALTHY} for i in range(1, 9)]
        assert above_limits(rows, "annotator") == above_limits([], "annotator") == []
        rows[3][name] += 8 * .004                            # the mean of all iterations counts
        line, = above_limits(rows, "annotator")
        assert line.startswith(f"{name} is {HEALTHY[name] + .004:.3g}: {NOTES[name]}")
        number, = re.findall(r"healthy (?:under|at) (\S+).*, otherwise .", line)
        assert float(number) == limit
        rows[3][name] = math.nan
        line, = above_limits(rows, "reward_model")
        assert line.startswith(f"{name} is nan: {NOTES[name]}")


def test_a_rollout_and_its_batch_are_measured_as_by_hand():
    """Padding is ignored. Entropy is per token and shares of quotes are per quote; all others
    are means over the responses."""
    judged = [Review("c", [1.0, 0.0], quotes=3, unmatched=1, conflicts=1),
              Review("d", [-1.0], "unread", quotes=1, ambiguous=2)]
    batch = SimpleNamespace(
        mask=torch.tensor([[1, 1], [1, 0]]), reviews=judged, prompts=["x", "x'"], rows=[3, 4],
        truncated=[True, False], texts=["a b", "c"], offsets=[[(0, 1), (1, 3)], [(0, 1)]],
        advantages=torch.tensor([[.5, -.5], [0.0, 9.0]]),
        entropy=torch.tensor([[1.0, 2], [3, 9]]), logprobs_ref=-torch.ones(2, 2) * 3,
        logprobs_old=torch.tensor([[-1.0, -2], [-3, 9]]),
        returns=torch.tensor([[1.0, 2], [3, 9]]), values=torch.tensor([[1.0, 2], [1, 9]]))
    batch.task = SimpleNamespace(truth={"right": lambda row, text: row + len(text)})
    assert batch_metrics(batch) == pytest.approx({
        "delta": (.5 - 1) / 2, "good": .5 / 2, "poor": 1 / 2, "entropy": 2,
        "kl": (2 + 1 + 0) / 2, "response_tokens": 1.5, "truncated": .5,
        "explained_variance": 1 - (8 / 9) / (2 / 3), "unparseable": .5, "unmatched": .25,
        "ambiguous": .5, "conflicting": .25, "right": (6 + 5) / 2})
    assert sample_row(batch, 1) == {
        "prompt": "x'", "response": "c", "critique": "d", "unreadable": "unread",
        "tokens": ["c"], "delta": [-1.0], "fates": {}, "advantage": [0.0]}


@pytest.mark.parametrize("copies, advice", [(1, False), (100, True)])
def test_r_phi_is_compared_with_the_annotator_on_the_same_responses(copies, advice):
    """Of two poor tokens R_φ finds one, and it marks no other. From 100 poor tokens on, a low
    recall after training is worth a hint."""
    task = SimpleNamespace(truth={})
    found, truth = [Review("", [-1.0, 0.0, 1.0])], [Review("", [-1.0, -1.0, 0.0])]
    batch = SimpleNamespace(rows=[{}] * copies, texts=["abc"] * copies, task=task,
                            reviews=found * copies, truncated=[False] * copies,
                            prompts=["x"] * copies, advantages=None,
                            offsets=[[(0, 1), (1, 2), (2, 3)]] * copies)
    means, _ = measure_held_out(batch, truth * copies)
    assert (means["poor_recall"], means["poor_precision"]) == (0.5, 1.0)
    text = compare_with_annotator({"before": means, "after": means})
    assert text.count(f"poor tokens {2 * copies}, recall 0.500, precision 1.000") == 2
    assert ("--critic annotator" in text) == advice
    assert "poor_tokens" not in measure_held_out(batch)[0]
    assert compare_with_annotator({"before": measure_held_out(batch)[0]}) == ""
