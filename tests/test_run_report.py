"""The report of a run and the trackers: real tiny runs, HTML and XML parsers, the trackers' public interfaces."""

import inspect
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import types
import xml.etree.ElementTree as xml
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import report
import text2grad
from report import (ReportError, Tracker, curves, environment, evenly, heatmap, public, run_report, svg_line, text_block,
                    ticks)
from test_pipeline import SMALL, rows_of, run_main
from test_report import HOSTILE, Page, often, texts

ROOT = Path(__file__).resolve().parent.parent
TINY = [*SMALL, "--annotated_rows", "48"]
numbers = st.floats(-1e6, 1e6)


def metrics_row(iteration, **more):
    return {"iteration": iteration, "delta": iteration / 7, "good": .5, "poor": .25, "kl": 2.0, **more}


def sample_row(iteration, response="a cat", **more):
    tokens = re.findall(r"\s?\S+|\s", response)
    return {"iteration": iteration, "prompt": "Say it.", "response": response, "critique": f"critique {iteration}",
            "unreadable": None, "tokens": tokens, "delta": [1.0, -1.0][: len(tokens)] + [0.0] * (len(tokens) - 2),
            "advantage": [.5, -2.25][: len(tokens)] + [0.0] * (len(tokens) - 2), **more}


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture()
def run_directory(tmp_path):
    """A small run directory, written by hand."""
    out = tmp_path / "run"
    write(out / "metrics.jsonl", [metrics_row(i) for i in range(1, 9)])
    write(out / "samples.jsonl", [sample_row(i) for i in range(1, 9)])
    write(out / "config.json", [{"task": "toy", "iterations": 8, "base_url": None}])
    write(out / "result.json", [{"before": {"fact accuracy": .5}, "after": {"fact accuracy": .75}}])
    for when in ("before", "after"):
        write(out / f"{when}_samples.jsonl", [sample_row(i, f"{when} {i}", id=f"row-{i}") for i in range(20)])
    return out


def made(out):
    return Page(run_report(out).read_text("utf-8"))


# ── Heatmaps ────────────────────────────────────────────────────────────────────────────────────────────

@often
@given(st.lists(st.tuples(texts, st.floats(-3, 3)), max_size=8))
def test_a_heatmap_shows_every_token_with_its_value_and_no_other_markup(pairs):
    tokens, values = [token for token, _ in pairs], [value for _, value in pairs]
    found = Page(heatmap(tokens, values))
    shown = [text.replace("↵\n", "\n").replace("⇥\t", "\t") for _, text in found.all("span")]
    assert len(found.tags) == 1 + len(tokens)
    whole = lambda text: text.replace("\0", "\ufffd")
    assert list(map(whole, shown)) == [whole(token) or "▯" for token in tokens]
    for value, (attributes, _) in zip(values, found.all("span")):
        assert float(attributes["title"]) == pytest.approx(value, rel=1e-3)


def test_colours_are_symmetric_deepest_at_the_limit_and_told_apart_by_lines():
    spans = [a.get("style", "") for a, _ in Page(heatmap(list("abcdef"), [-4, -2, -1, 0, 1, 2], limit=2)).all("span")]
    depth = [int(re.search(r"#\w{6}(\w\w)", style)[1], 16) if style else 0 for style in spans]
    assert depth[0] == depth[1] > depth[2] > depth[3] == 0 and depth[1:4] == depth[5:2:-1]
    assert ["wavy" in style for style in spans] == [True] * 3 + [False] * 3
    assert ["underline #" in style for style in spans] == [False] * 4 + [True] * 2


def test_a_heatmap_shows_what_is_not_a_number_and_refuses_other_lengths():
    (attributes, _), _ = Page(heatmap(["a", "b"], [math.nan, 1.0])).all("span")
    assert attributes["title"] == "+nan" and "dotted" in attributes["style"]
    for tokens, values in ((["a"], []), (["a"], ["1"])):
        with pytest.raises(ReportError, match="one number for every token"):
            heatmap(tokens, values)


# ── Curves ──────────────────────────────────────────────────────────────────────────────────────────────

def drawn(svg):
    """The curves of a chart as lists of (iteration, value) per unbroken piece, read back by the ticks of its axes."""
    root = xml.fromstring(svg)
    marks = lambda axis: [(float(e.get(axis)), float(e.text)) for e in root.iter() if e.get("class") == axis]
    (y0, v0), *_, (y1, v1) = [(y - 4, value) for y, value in marks("y")]
    (x0, i0), *_, (x1, i1) = marks("x")
    out = []
    for path in (e.get("d") for e in root.iter() if e.get("class") == "curve"):
        pieces = [re.findall(r"(-?[\d.]+) (-?[\d.]+)", piece) for piece in path.split("M")[1:]]
        out.append([[(i0 + (float(x) - x0) * (i1 - i0) / (x1 - x0), v0 + (float(y) - y0) * (v1 - v0) / (y1 - y0))
                     for x, y in piece] for piece in pieces])
    return out


@often
@given(st.lists(numbers, min_size=2, max_size=30), st.integers(-3, 3))
def test_the_points_of_a_curve_are_the_metrics(values, power):
    values = [value * 10.0 ** power for value in values]
    (curve,), = drawn(svg_line("t", list(range(1, len(values) + 1)), {"a": values}))
    reach = max(max(values), 0) - min(min(values), 0) or 1e-12                     # the axis may begin at 0
    assert [round(i, 1) for i, _ in curve] == list(range(1, len(values) + 1))
    assert all(abs(v - value) < .005 * reach for (_, v), value in zip(curve, values))


@often
@given(numbers, numbers, st.integers(3, 8))
def test_ticks_are_round_evenly_spaced_and_reach_around_the_numbers(a, b, most):
    low, high = min(a, b), max(a, b)
    marks = ticks(low, high, most)
    steps = [q - p for p, q in zip(marks, marks[1:])]
    assert marks[0] <= low + 1e-6 * steps[0] and high - 1e-6 * steps[0] <= marks[-1] and len(marks) <= most + 1
    assert max(steps) - min(steps) < 1e-6 * max(map(abs, marks))
    assert round(float(f"{steps[0]:.3e}".split("e")[0]), 2) in (1, 2, 5)


def test_values_that_are_not_finite_are_gaps_and_named():
    rows = [metrics_row(i, kl=[1.0, math.nan, 3.0, None, math.inf, 6.0][i - 1]) for i in range(1, 7)]
    chart, = [f for f in re.findall(r"(?s)<figure.*?</figure>", curves(rows)) if "KL to the reference" in f]
    assert "kl: 3 of 6 values are not finite, iterations 2, 4, 5" in chart
    pieces, = drawn(re.search("(?s)<svg.*</svg>", chart)[0])
    assert [[(round(i), round(v)) for i, v in piece] for piece in pieces] == [[(1, 1)], [(3, 3)], [(6, 6)]]
    assert "not finite" not in curves([metrics_row(1), metrics_row(2)])


def test_every_metric_of_a_real_run_has_a_curve_and_new_ones_get_their_own(finished_run):  # Figure 3
    rows = rows_of(finished_run / "metrics.jsonl")
    found = re.findall("(?s)<svg.*?</svg>", curves([row | {"new_thing": 1.5} for row in rows]))
    titles = [xml.fromstring(svg)[0].text for svg in found]
    assert len(set(titles)) == len(titles) and "new thing" in titles
    assert sum(len(drawn(svg)) for svg in found) == len(rows[0])          # one is new, the iteration is none
    (points,), = drawn(found[titles.index("entropy of the policy, nats per token")])
    assert len({row["entropy"] for row in rows}) == 4 and points == [
        pytest.approx((row["iteration"], row["entropy"]), rel=.01) for row in rows]


def test_a_long_curve_is_drawn_by_means_with_a_band_that_keeps_its_peaks():
    values = [math.sin(i / 50) for i in range(3000)]
    values[1234] = 9.0
    svg = svg_line("t", list(range(1, 3001)), {"a": values})
    (curve,), = drawn(svg)
    means = [sum(values[i: i + 10]) / 10 for i in range(0, 3000, 10)]
    assert len(curve) == 300 and all(abs(v - mean) < .05 for (_, v), mean in zip(curve, means))
    assert "mean of iterations 1231–1240" in svg and re.search(r"a 0\.\d+ \(-0\.\d+ to 9\)", svg)
    assert len(svg) < 100_000


# ── The page ────────────────────────────────────────────────────────────────────────────────────────────

@pytest.fixture(scope="session")
def finished_run(tmp_path_factory):
    """A small toy run, all three phases, with an address that must not be kept."""
    out = tmp_path_factory.mktemp("report") / "small"
    with pytest.MonkeyPatch.context() as patch:
        run_main(patch, *TINY, "--output_dir", out, "--base_url", "http://me:geheim@127.0.0.1:1/v1?key=tresor")
    return out


def test_a_run_leaves_its_report_and_what_is_known_only_while_it_runs(finished_run):
    text = (finished_run / "report.html").read_text()
    page = Page(text)
    started, = rows_of(finished_run / "environment.jsonl")
    cells = [cell for _, cell in page.all("td")]
    assert started["torch"] == torch.__version__ and started["ranks"] == 1 and started["device"] == "cpu"
    for key in ("command", "memory", "started", "python", "transformers"):
        assert started[key] in cells
    result = json.loads((finished_run / "result.json").read_text())
    for key, value in result["before"].items():
        at = cells.index(key)
        after = result["after"][key]
        assert cells[at + 1: at + 4] == [f"{value:.3f}", f"{after:.3f}", f"{after - value:.3f}"]
    assert {"phase 1, annotate", "phase 2, reward model", "phase 3, policy", "held_out_loss", "kl_coef"} <= set(cells)
    assert not re.search(r"https?:(?!//(www\.w3\.org/2000/svg|…@127))|<script|<link|<img|@import|url\(", text)


def test_no_password_or_key_of_an_address_is_kept(finished_run):
    for path in [finished_run / "report.html", *finished_run.rglob("*.json"), finished_run / "environment.jsonl"]:
        assert not re.search("geheim|tresor", path.read_text()), path
    assert json.loads((finished_run / "config.json").read_text())["base_url"] == "http://…@127.0.0.1:1/v1?…"
    assert public({"a": ["https://u:p@h/x?k=1 and http://h/y"]}) == {"a": ["https://…@h/x?… and http://h/y"]}


def test_examples_are_of_the_same_prompts_before_and_after_with_delta_for_every_token(finished_run):  # Figure 4
    before, after = (rows_of(finished_run / f"{when}_samples.jsonl") for when in ("before", "after"))
    assert len(before) == len(after) == 8
    for old, new in zip(before, after):
        assert (old["id"], old["prompt"]) == (new["id"], new["prompt"])
        assert "".join(old["tokens"]) == old["response"] and len(old["delta"]) == len(old["tokens"])
    means = json.loads((finished_run / "result.json").read_text())
    for rows, when in ((before, "before"), (after, "after")):
        mean = sum(sum(row["delta"]) / len(row["delta"]) for row in rows) / len(rows)
        assert means[when]["mean δ per token, by R_φ"] == pytest.approx(mean)
    text = (finished_run / "report.html").read_text()
    assert all(text_block(row["prompt"]) in text and heatmap(row["tokens"], row["delta"], 1) in text for row in before + after)
    shown = [title for _, title in Page(text).all("h3")]
    assert sum(title.startswith("After: trained policy, mean δ ") for title in shown) == 8


def test_a_run_that_is_stopped_leaves_a_report_and_goes_on_to_the_whole_one(finished_run, tmp_path, monkeypatch):
    """SIGTERM in iteration 2; the run that goes on has all four iterations, and a row of its own in environment.jsonl."""
    out = tmp_path / "stopped"
    shutil.copytree(finished_run, out, ignore=shutil.ignore_patterns(
        "checkpoint-*", "policy", "result.json", "report.html", "metrics.jsonl", "samples.jsonl", "after_samples.jsonl"))
    config = json.loads((out / "config.json").read_text()) | {"output_dir": str(out)}
    (out / "config.json").write_text(json.dumps(config))
    whole = text2grad.one_iteration

    def terminated(*args):
        if args[-1] == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return whole(*args)

    monkeypatch.setattr(text2grad, "one_iteration", terminated)
    with pytest.raises(SystemExit):
        run_main(monkeypatch, *TINY, "--output_dir", out)
    page = (out / "report.html").read_text()
    for said in ("2 of 4 iterations", "result.json: the run is not finished", "after_samples.jsonl: not there"):
        assert said in page
    monkeypatch.setattr(text2grad, "one_iteration", whole)
    run_main(monkeypatch, *TINY, "--output_dir", out)
    page = (out / "report.html").read_text()
    assert "4 of 4 iterations" in page and len(rows_of(out / "environment.jsonl")) == 3
    assert re.findall("<b>iteration (.)</b>", page) == list("1234") and "not there" not in page


@pytest.mark.parametrize("text", HOSTILE)
def test_no_text_of_a_row_becomes_markup(run_directory, text):
    text, tags = text.encode("utf-8", "replace").decode(), {tag for tag, *_ in made(run_directory).tags}
    row = {"prompt": text, "response": text, "critique": text, "unreadable": text, "id": text, "tokens": [text, ""],
           "delta": [1.0, 0.0], "advantage": [.5, .1]}
    write(run_directory / "samples.jsonl", [{"iteration": 1, **row}])
    for when in ("before", "after"):
        write(run_directory / f"{when}_samples.jsonl", [row])
    write(run_directory / "config.json", [{"task": text, "iterations": 8}])
    write(run_directory / "phases.jsonl", [{"phase": text, "seconds": 1.0, "summary": text}])
    write(run_directory / "environment.jsonl", [{"started": text, "command": text}])
    page = made(run_directory)
    assert not page.all("script") and not page.all("img") and {tag for tag, *_ in page.tags} == tags
    assert len(page.all("article")) == 2 and len([1 for _, t in page.all("span") if t == "▯"]) == 4


def test_ten_thousand_rows_make_a_page_of_five_megabytes_at_most(run_directory):
    """Responses of 100 tokens with emoji, markup and code; and metrics as long."""
    rng, words = random.Random(0), ["the", " cat", "\n    ", " 🏠", "<b>", " & ", "é", "\t", ""]
    with open(run_directory / "samples.jsonl", "w") as file:
        for i in range(1, 10001):
            tokens = rng.choices(words, k=100)
            text = "".join(tokens)
            file.write(json.dumps({"iteration": i, "prompt": 2 * text, "response": text, "critique": text,
                                   "unreadable": None, "tokens": tokens, "delta": rng.choices((-1, 0, 1), k=100),
                                   "advantage": [round(rng.gauss(0, 1), 4) for _ in tokens]}) + "\n")
    row = rows_of(run_directory / "metrics.jsonl")[0] | {f"metric_{k}": 1.0 for k in range(26)}
    write(run_directory / "metrics.jsonl", [row | {"iteration": i, "delta": rng.gauss(0, 1)} for i in range(1, 10001)])
    path = run_report(run_directory)
    text = path.read_text()
    assert path.stat().st_size <= 5_000_000 and "24 of the 10,000 rows" in text
    shown = [int(i) for i in re.findall(r"<b>iteration (\d+)</b>", text)]
    assert shown[0] == 1 and shown[-1] == 10000 and {b - a for a, b in zip(shown, shown[1:])} <= {434, 435}


@often
@given(st.lists(st.integers(1, 100), max_size=60), st.integers(1, 12), st.integers(1, 2000))
def test_rows_are_chosen_evenly_within_the_room(sizes, most, room):
    places = evenly(sizes, most, room)
    assert places == sorted(set(places)) and len(places) <= most and bool(places) == bool(sizes)
    if len(places) > 2:
        assert sum(sizes[i] for i in places) <= room
    if len(places) > 1:
        steps = [b - a for a, b in zip(places, places[1:])]
        assert (places[0], places[-1]) == (0, len(sizes) - 1) and max(steps) - min(steps) <= 1


def test_a_directory_of_an_older_version_says_what_it_lacks(run_directory):
    for name in ("before_samples.jsonl", "after_samples.jsonl", "samples.jsonl", "config.json", "result.json"):
        (run_directory / name).unlink()
    text = run_report(run_directory).read_text()
    for name in ("before_samples.jsonl and after_samples.jsonl: not there", "samples.jsonl is not there",
                 "environment.jsonl is not there", "config.json is not there", "reward/metrics.json is not there"):
        assert name in text
    (run_directory / "metrics.jsonl").write_text("")
    assert "No iteration is done" in run_report(run_directory).read_text()


@pytest.mark.parametrize("file, line, message", [
    ("metrics.jsonl", '{"iteration": 9', "line 9: not JSON"),
    ("metrics.jsonl", '{"delta": 1}', "line 9: 'iteration' is missing"),
    ("metrics.jsonl", '{"iteration": 8}', "line 9: iteration 8 comes after 8"),
    ("metrics.jsonl", "[1]", "line 9: no JSON object"),
    ("samples.jsonl", '{"iteration": 9, "prompt": "p"}', "line 9: 'response' is missing"),
    ("samples.jsonl", json.dumps(sample_row(9, delta=[1.0])), "line 9: 1 values in 'delta', 2 tokens"),
    ("samples.jsonl", json.dumps(sample_row(9, advantage=["x", 1])), "line 9: 'advantage' must hold numbers"),
    ("samples.jsonl", json.dumps(sample_row(9, tokens=[1, 2])), "line 9: 'tokens' must hold texts"),
    ("after_samples.jsonl", json.dumps(sample_row(9)), "21 rows, before_samples.jsonl 20"),
    ("result.json", '{"before": {}}', "line 2: 'after' is missing")])
def test_a_broken_line_is_named_and_the_old_page_stays(run_directory, file, line, message):
    before = run_report(run_directory).read_bytes()
    with open(run_directory / file, "a") as out:
        out.write(line + "\n")
    with pytest.raises(ReportError, match=re.escape(message)) as error:
        run_report(run_directory)
    assert file in str(error.value) and (run_directory / "report.html").read_bytes() == before


def test_the_script_writes_a_report_or_says_why_not(run_directory, tmp_path):
    script = lambda *flags: subprocess.run([sys.executable, ROOT / "report.py", *flags], capture_output=True, text=True)
    done = script(run_directory)
    assert done.returncode == 0 and done.stdout.strip() == str(run_directory / "report.html")
    failed = script(tmp_path)
    assert failed.returncode == 1 and failed.stderr.strip() == \
        f"report: {tmp_path}: no metrics.jsonl; give a directory in which text2grad.py has begun phase 3"
    assert script("--help").returncode == 0 and "RUN" in script().stderr


# ── Trackers ────────────────────────────────────────────────────────────────────────────────────────────

class Run:
    """What wandb's and trackio's `init` return, as far as both have it; takes their arguments and no others."""

    def __init__(self):
        self.logged, self.finished, self.fails = [], 0, False

    def log(self, metrics, step=None):
        if self.fails:
            raise ConnectionError("the server is gone")
        assert isinstance(metrics, dict) and type(step) is int
        self.logged.append((step, metrics))

    def finish(self):
        self.finished += 1


def wandb_init(entity=None, project=None, dir=None, id=None, name=None, notes=None, tags=None, config=None, resume=None):
    """The first parameters of wandb.init and its resume (docs.wandb.ai/ref/python/init)."""


def trackio_init(project, name=None, group=None, space_id=None, dataset_id=None, config=None, resume="never"):
    """The parameters of trackio.init that matter here (huggingface.co/docs/trackio/api)."""


@pytest.fixture()
def tracker_package(monkeypatch):
    """Puts a package with the signature of the real one in place; returns its runs as (arguments of init, Run)."""
    def put(name):
        runs, signature = [], inspect.signature({"wandb": wandb_init, "trackio": trackio_init}[name])

        def init(*args, **kwargs):
            runs.append((signature.bind(*args, **kwargs).arguments, Run()))
            return runs[-1][1]

        monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(init=init))
        return runs
    return put


@pytest.fixture()
def started(tmp_path):
    write(tmp_path / "environment.jsonl", [{"started": "today"}])
    return tmp_path


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_tracker_gets_every_number_with_its_step_and_goes_on_in_the_same_run(name, tracker_package, started):
    runs = tracker_package(name)
    for first in (1, 3):                                                          # begun, then resumed
        tracker = Tracker(name, started, {"seed": 0}, first)
        for i in (first, first + 1):
            tracker.log(metrics_row(i, policy_loss=None))
        tracker.finish()
        write(started / "environment.jsonl", [{"started": "today"}, {"started": "later"}])
    (before, run), (after, resumed) = runs
    assert [step for step, _ in run.logged + resumed.logged] == [1, 2, 3, 4] and run.finished == resumed.finished == 1
    assert run.logged[0][1] == {"delta": 1 / 7, "good": .5, "poor": .25, "kl": 2.0}
    assert before == after and before["resume"] == "allow" and before["config"] == {"seed": 0}
    assert name == "trackio" or (before["id"] in before["name"] and before["dir"] == str(started))
    other = started / "other"
    write(other / "environment.jsonl", [{"started": "another day"}])
    Tracker(name, other, {}, 1)
    assert runs[-1][0]["name"].split("-")[-1] != before["name"].split("-")[-1]


def test_tensorboard_reads_back_what_was_sent_and_a_resumed_run_replaces_what_it_repeats(started):
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator",
                                 reason="tensorboard is not installed")
    for first, last, kl in ((1, 4, 1.0), (3, 5, 2.0)):
        tracker = Tracker("tensorboard", started, {}, first)
        for i in range(first, last + 1):
            tracker.log(metrics_row(i, kl=kl, policy_loss=None))
        tracker.finish()
    events = reader.EventAccumulator(str(started / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("kl")] == [(1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0), (5, 2.0)]
    assert set(events.Tags()["scalars"]) == {"delta", "good", "poor", "kl"}


def test_a_tracker_that_fails_is_told_once_and_the_run_goes_on(tracker_package, started):
    runs, told = tracker_package("wandb"), []
    tracker = Tracker("wandb", started, {}, 1, warn=told.append)
    tracker.log(metrics_row(1))
    runs[0][1].fails = True
    for i in (2, 3):
        tracker.log(metrics_row(i))
    tracker.finish()
    assert len(told) == 1 and "wandb" in told[0] and "the server is gone" in told[0] and "metrics.jsonl" in told[0]
    assert [step for step, _ in runs[0][1].logged] == [1]


def test_a_tracker_that_cannot_be_opened_is_an_error(monkeypatch, started):
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=lambda **_: 1 / 0))
    with pytest.raises(ReportError, match="wandb cannot be opened .*log in"):
        Tracker("wandb", started, {}, 1)


@pytest.mark.parametrize("name, package", [("wandb", "wandb"), ("trackio", "trackio"),
                                           ("tensorboard", "torch.utils.tensorboard")])
def test_a_missing_tracker_names_the_package_before_anything_is_made(name, package, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)                               # so that its import fails
    with pytest.raises(ReportError, match=f"pip install {name}"):
        run_main(monkeypatch, "--report_to", name, "--output_dir", tmp_path / "r")
    assert not (tmp_path / "r").exists()
    monkeypatch.setitem(sys.modules, package, types.ModuleType(package))          # a directory ./wandb imports, too
    with pytest.raises(ReportError, match=f"pip install {name}"):
        report.tracker_module(name)


def test_an_unknown_tracker_is_refused(tmp_path, monkeypatch):
    with pytest.raises(text2grad.InputError, match="--report_to mlflow: it is one of none, wandb, trackio, tensorboard"):
        run_main(monkeypatch, "--report_to", "mlflow", "--output_dir", tmp_path / "r")


def test_environment_holds_no_variable_and_the_launcher(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setattr(sys, "argv", ["text2grad.py", "--base_url", "http://u:p@h/v1", "--data", "my rows.jsonl"])
    row = environment(8, "NVIDIA H200")
    assert row["command"] == "torchrun --nproc_per_node 4 text2grad.py --base_url 'http://…@h/v1' --data 'my rows.jsonl'"
    assert row["device"] == "NVIDIA H200" and row["ranks"] == 8 and "sk-secret" not in json.dumps(row)
