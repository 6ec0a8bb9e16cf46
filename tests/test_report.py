"""The text, charts and pages of report.py, read back with HTML and XML parsers."""

import json
import math
import re
import sys
import xml.etree.ElementTree as xml
from itertools import groupby
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
import report
from data import InputError, public
from helpers import HOSTILE, Page, assert_closed, often, read_jsonl, run_main
from report import (NOTES, batch_metrics, colour_tokens, curves, heatmap, html_table,
                    run_report, sample_row, split_text, svg_line, table, ticks)

METRICS = [*NOTES]                       # all metrics of a run (checked in test_pipeline)
numbers = st.integers(-10**9, 10**9).map(lambda n: n / 1000)
texts = st.one_of(st.sampled_from(HOSTILE),
                  st.text("<>/!-'\"\ud800🏠é\u0301\n\t x", max_size=20))


# ── The terminal

def test_tokens_are_marked_by_their_sign_in_runs_and_lose_no_text(monkeypatch):  # Figure 1
    assert (split_text("a🏠b", [(0, 1), (1, 2), (1, 2), (2, 3), (3, 3)])
            == ["a", "🏠", "", "b", ""])
    tokens, delta = ["The", " big", " cat", " ", "flew", " \n"], [0, 1, .5, -1, -1, 1]
    assert colour_tokens(tokens, delta, False) == "The [+big cat+] [-flew-] \n"
    coloured = "The \033[32mbig cat\033[0m \033[31mflew\033[0m \n"
    assert colour_tokens(tokens, delta, True) == coloured
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert colour_tokens(tokens, delta) == coloured
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\033" not in colour_tokens(tokens, delta)


def test_tables_are_aligned_and_absent_figures_are_dashes():
    lines = table(["name", "x"], [["a", 1.0], ["long one", None], ["b", -0.0001]],
                  2).split("\n")
    assert lines == ["name         x", "──────────────", "a         1.00", "long one     –",
                     "b         0.00"]
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
    """The connected segments of a chart's curves as (x, value), read from its axis labels."""
    root = xml.fromstring(svg)
    (y0, v0), *_, (y1, v1) = [(float(e.get("y")) - 4, float(e.text))
                              for e in root.iter() if e.get("class") == "y"]
    (x0, i0), (x1, i1) = [(float(e.get("x")), float(e.text))
                          for e in root.iter() if e.get("class") == "x"]
    out = []
    for path in (e.get("d") for e in root.iter() if e.get("class") == "curve"):
        pieces = [re.findall(r"(-?[\d.]+) (-?[\d.]+)h0", p) for p in path.split("M")[1:]]
        out.append([[(i0 + (float(x) - x0) * (i1 - i0) / (x1 - x0),
                      v0 + (float(y) - y0) * (v1 - v0) / (y1 - y0)) for x, y in piece]
                    for piece in pieces])
    return out


@often
@given(st.lists(numbers | st.sampled_from([None, math.nan, math.inf]), min_size=2, max_size=30),
       st.integers(-3, 3))
def test_the_points_of_a_curve_are_the_metrics(values, power):
    """Missing and non-finite values break the line; the legend shows the last finite value."""
    values = [value and value * 10.0 ** power for value in values]
    places = [*range(1, len(values) + 1)]
    svg = svg_line("t", places, {"a": values, "b": values[::-1]})
    known = [value for value in values if value is not None and math.isfinite(value)]
    reach = max([*known, 0]) - min([*known, 0]) or 1.0
    for curve, expected in zip(drawn(svg), (values, values[::-1]), strict=True):
        groups = groupby(zip(places, expected), key=lambda point: point[1] in known)
        pieces = [[*group] for is_known, group in groups if is_known]
        assert [len(piece) for piece in curve] == [len(piece) for piece in pieces]
        for (x, y), (place, value) in zip(sum(curve, []), sum(pieces, [])):
            assert round(x, 1) == place and abs(y - value) < .005 * reach
    last = f"{known[-1]:.4g}" if known else "–"
    assert f"a {last}" in [e.text for e in xml.fromstring(svg).iter()]


@often
@given(numbers, numbers, st.integers(3, 8))
def test_ticks_are_round_evenly_spaced_and_reach_around_the_numbers(a, b, most):
    low, high = min(a, b), max(a, b)
    marks = ticks(low, high, most)
    steps = [q - p for p, q in zip(marks, marks[1:])]
    assert marks[0] <= low + 1e-6 * steps[0] and high - 1e-6 * steps[0] <= marks[-1]
    assert len(marks) <= most + 1 and max(steps) - min(steps) < 1e-6 * max(map(abs, marks))
    assert round(float(f"{steps[0]:.3e}".split("e")[0]), 2) in (1, 2, 5)


@pytest.mark.parametrize("low, high", [(-1, 1), (0, 1), (1, 4), (1, 1)])
def test_ticks_forgive_a_rounding(low, high):
    """The axis tolerates rounding, as some processors compute a cosine of 1.0000001."""
    for error in (1 - 1e-7, 1 + 1e-7):
        assert ticks(low, high * error) == ticks(low * error, high) == ticks(low, high)


def test_every_metric_has_a_curve_and_a_note_and_new_ones_get_a_curve(run):  # Figure 3
    """A metric of some iterations only, such as those of `probe`, gives a curve of these; δ of
    R_φ and of the annotator share a chart."""
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
    for key, note in [*NOTES.items(), ("new <thing>", "")]:
        ((points,), *_), caption = found[key.replace("_", " ")]
        assert caption == note and (note.strip() or key not in NOTES)
        known = [(row["iteration"], row[key]) for row in rows if key in row]
        assert points == [pytest.approx(point, abs=.05) for point in known]
    (_, (beside,)), _ = found["true delta"]
    assert beside == [pytest.approx((i, i / 10), abs=.05) for i in (2, 5, 8)]


def test_one_value_is_a_dot_and_none_is_an_empty_chart():
    assert "h0" in svg_line("t", [4], {"a": [1.0]})
    assert xml.fromstring(svg_line("t", [4], {"a": [None]})) is not None


# ── The page of a run

def row_of(iteration, response="a cat", **more):
    tokens = [*re.findall(r"\s?\S+", response), ""]
    return {"iteration": iteration, "prompt": "Say it.", "response": response,
            "critique": f"critique {iteration}", "unreadable": None, "tokens": tokens,
            "delta": [1.0, -1.0, 0.0], "advantage": [.5, -2.25, iteration / 10], **more}


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture()
def run(tmp_path):
    """A small finished run of 8 iterations."""
    out = tmp_path / "my run"
    metrics = {key: .1 * k for k, key in enumerate(METRICS)} | {"fact accuracy": .5}
    write(out / "metrics.jsonl", [{"iteration": i, **metrics} for i in range(1, 9)])
    write(out / "samples.jsonl", [row_of(i) for i in range(1, 9)])
    for when in ("before", "after"):
        rows = [row_of(i, f"{when} {i}", id=f"row-{i}") for i in range(20)]
        write(out / f"{when}_samples.jsonl", rows)
    write(out / "config.json",
          [{"task": "toy", "base_url": "http://me:geheim@h/v1?key=tresor"}])
    write(out / "result.json",
          [{"before": {"fact accuracy": .5}, "after": {"fact accuracy": .75}}])
    write(out / "reward" / "metrics.json", [{"held_out_loss": .25}])
    write(out / "phases.jsonl", [{"phase": "annotate", "seconds": 3.2, "summary": "20 rows"}])
    return out


def test_a_run_is_shown_examples_first_and_every_file_below(run):
    run_main(run, module=report)
    text = (run / "report.html").read_text("utf-8")
    page = Page(text)
    assert_closed(text)
    assert page.all("h1")[0][1] == "Text2Grad: my run"
    assert [text for _, text in page.all("h2")] == [
        "Held-out examples", "Training samples", "Before and after", "Curves", "Reward model",
        "Phases", "Settings"]
    assert len(page.all("figure")) == len(METRICS) + 1
    cells = [text for _, text in page.all("td")]
    assert cells == ["fact accuracy", "0.500", "0.750", "0.250", "held_out_loss", "0.25",
                     "phase", "annotate", "seconds", "3.2", "summary", "20 rows",
                     "task", "toy", "base_url", "http://…@h/v1?…"]        # nothing secret
    addresses = public("https://u:p@h/x?k=1 and http://h/y, ftp://z#k")
    assert addresses == "https://…@h/x?… and http://h/y, ftp://z?…"
    assert "does not exist" not in text


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
    write(run / "samples.jsonl", [row_of(i) for i in range(1, 30)] + [
        row_of(30, critique="", unreadable="it was cut off")])
    text = run_report(run).read_text()
    shown = [int(i) for i in re.findall(r"<b>iteration (\d+)</b>", text)]
    assert shown == [*range(3, 31, 3)]
    for i in shown:
        card = re.search(rf"(?s)<b>iteration {i}</b>.*?</article>", text)[0]
        delta, advantage = (
            card.index(heatmap(["a", " cat", ""], values, limit))
            for values, limit in (([1.0, -1.0, 0.0], 1), ([.5, -2.25, i / 10], 2)))
        said = f"critique {i}" if i < 30 else "no reward: it was cut"
        assert delta < advantage < card.index(said)


@pytest.mark.parametrize("text", HOSTILE)
def test_no_text_of_a_run_becomes_markup(run, text):
    before = Page(run_report(run).read_text())
    text = text.encode("utf-8", "replace").decode()
    row = {"prompt": text, "response": text, "critique": text, "unreadable": text, "id": text,
           "tokens": [text, "", ""], "delta": [1.0, 0.0, 0.0], "advantage": [.5, .1, .1]}
    write(run / "samples.jsonl", [{"iteration": i, **row} for i in range(1, 9)])
    for when in ("before", "after"):
        write(run / f"{when}_samples.jsonl", [row] * 20)
    write(run / "config.json", [{"task": text, text: text}])
    write(run / "phases.jsonl", [{"phase": text, "seconds": 1.0, "summary": text}])
    write(run / "result.json", [{"before": {text: .5}, "after": {text: .75}}])
    page = run_report(run).read_text("utf-8")
    assert_closed(page)
    assert [tag for tag, *_ in Page(page).tags] == [tag for tag, *_ in before.tags]


def test_an_unfinished_run_says_what_is_not_there_yet(run):
    """After two iterations the page already shows the examples from before training."""
    for name in ("after_samples.jsonl", "result.json"):
        (run / name).unlink()
    lines = (run / "metrics.jsonl").read_text().splitlines(True)
    (run / "metrics.jsonl").write_text("".join(lines[:2]))
    text = run_report(run).read_text()
    said = re.findall(r'<p class="muted">(\S+) does not exist yet', text)
    assert said == ["after_samples.jsonl", "result.json"]
    assert text.count("<h3>Before</h3>") == 7 and "<h3>After</h3>" not in text
    for path in run.rglob("*.json*"):
        path.unlink()
    (run / "metrics.jsonl").write_text("")
    assert run_report(run).read_text().count("does not exist yet") == 8
    (run / "metrics.jsonl").unlink()
    with pytest.raises(InputError, match="no metrics.jsonl, so phase 3 .* not begun"):
        run_report(run)


def test_a_damaged_line_is_named_and_the_old_page_stays(run):
    before = run_report(run).read_bytes()
    with open(run / "samples.jsonl", "a") as file:
        file.write('{"iteration": 9\n')
    with pytest.raises(InputError, match="samples.jsonl.*line 9: not JSON"):
        run_report(run)
    assert (run / "report.html").read_bytes() == before


def test_a_rollout_and_its_batch_are_measured_as_by_hand():
    """Padding is ignored; KL is per response, counts are per critique or per quote."""
    judged = [SimpleNamespace(critique="c", delta=[1.0, 0.0], reason="", quotes=3, unmatched=1,
                              ambiguous=0, conflicts=1, half_inside=0),
              SimpleNamespace(critique="d", delta=[-1.0], reason="unread", quotes=1,
                              unmatched=0, ambiguous=2, conflicts=0, half_inside=3)]
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
        "half_inside": 3, "right": (6 + 5) / 2})
    sample = sample_row(batch, 0)
    assert sample == {"prompt": "x", "response": "a b", "critique": "c", "unreadable": "",
                      "tokens": ["a", " b"], "delta": [1.0, 0.0]}
    batch.advantages = torch.tensor([[.5, -.5], [0.0, 9.0]])
    assert sample_row(batch, 1) == {
        "prompt": "x'", "response": "c", "critique": "d", "unreadable": "unread",
        "tokens": ["c"], "delta": [-1.0], "advantage": [0.0]}
