"""The studies' machinery: statistics, noise, the cache, Appendix A's quantities, and the pages that are committed."""

import json
import math
import random
import re
import xml.etree.ElementTree as ElementTree
from concurrent.futures import Future
from dataclasses import replace
from statistics import mean

import numpy as np
import pytest
import torch
from conftest import ROOT

from experiments import studies
import toy
from experiments import trials
from annotate import read_reply
from endpoint import InputError
from model import add_lora, use_lora
from experiments.studies import Arm, Desk, Plan, StudyConfig, arm_figure
from text2grad import nl_gradient_loss, sample_rollouts
from experiments.trials import (Judge, Run, arrival, damaged, interval, judge_of, key, noisy_critique, ordered_pairs, settle,
                    shown_arrival, smooth, true_spans, updates_to)


class Here:
    """A pool that does the work at once, in this process."""

    def submit(self, work, *args):
        future = Future()
        try:
            future.set_result(work(*args))
        except ValueError as error:
            future.set_exception(error)
        return future


# ── Statistics ──────────────────────────────────────────────────────────────────────────────────────────

def test_the_interval_holds_95_percent_of_students_t():
    """The half width of [−1, 1, …] gives the quantile back; the density is integrated anew."""
    for degrees in range(1, 10):
        values = [random.Random(i).random() for i in range(degrees + 1)]
        centre, half = interval(values)
        quantile = half / (np.std(values, ddof=1) / math.sqrt(len(values)))
        x = np.linspace(0, quantile, 200_001)
        density = math.gamma((degrees + 1) / 2) / math.sqrt(degrees * math.pi) / math.gamma(degrees / 2) * \
            (1 + x ** 2 / degrees) ** (-(degrees + 1) / 2)
        assert centre == pytest.approx(np.mean(values))
        assert 2 * np.trapezoid(density, x) == pytest.approx(0.95, abs=1e-4)


def test_updates_to_90_percent_of_a_gain_by_hand():
    assert smooth([0.0, 3.0, 6.0, 3.0]) == [0.0, 3.0, 4.0, 3.0]
    assert updates_to([0.6, 0.7, 0.8, 0.9], 0.6, 0.9) == pytest.approx(2.7)           # 0.87 on the last piece
    assert updates_to([0.6, 0.7, 0.8, 0.9], 0.6, 1.1) == math.inf                     # 1.05 is never reached
    assert updates_to([0.9, 0.7, 0.8, 0.9], 0.6, 0.9) == 0                            # already there
    assert updates_to([0.5, 0.5, 0.9, 0.5, 0.9], 0.5, 0.9) == pytest.approx(1.9)      # the first time counts


def test_arrival_resamples_seeds_and_says_what_is_never_reached():
    rising = [0.5, 0.6, 0.7, 0.8, 0.9, 0.9, 0.9, 0.9]
    middle, low, high = arrival([rising] * 4, 0.5)
    own = updates_to(smooth(rising), 0.5, mean(smooth(rising)[-3:]))
    assert middle == low == high == pytest.approx(own)
    late = [0.5] * 4 + rising[:4]
    middle, low, high = arrival([rising, rising, late], 0.5, 0.85)
    assert low < middle <= high == math.inf                        # three draws of the late seed do not arrive
    assert shown_arrival([late] * 2, 0.5, 0.95) == "> 7 (> 7 to > 7)"


# ── Noise ───────────────────────────────────────────────────────────────────────────────────────────────

@pytest.mark.parametrize("share, wrong", [(0.1, 1), (0.2, 2), (0.4, 4), (0, 0)])
def test_of_ten_labels_exactly_the_share_is_damaged(share, wrong):
    marks = {place: 1 if place % 3 else -1 for place in range(0, 30, 3)} | {1: 1}
    marks.pop(27)
    for seed in range(20):
        flipped, dropped, shifted = (damaged(marks, 30, kind, share, random.Random(seed))
                                     for kind in ("flipped", "dropped", "shifted"))
        assert flipped.keys() == marks.keys() and sum(flipped[i] == -marks[i] for i in marks) == wrong
        assert len(dropped) == len(marks) - wrong and dropped.items() <= marks.items()
        assert sorted(shifted.values()) == sorted(marks.values()) and len(shifted.items() - marks.items()) == wrong
        left = marks.keys() - shifted.keys()
        assert all(min(abs(new - old) for old in left) <= 2 for new in shifted.keys() - marks.keys())


def test_a_share_that_is_no_whole_number_is_met_in_the_mean():
    marks = {i: 1 for i in range(0, 14, 2)}
    counts = [7 - len(damaged(marks, 14, "dropped", 0.1, random.Random(seed))) for seed in range(4000)]
    assert {*counts} == {0, 1} and mean(counts) == pytest.approx(0.7, abs=0.03)


def test_the_noisy_critic_labels_words_where_they_stand():
    row = toy.rows("train", 1)[0]
    facts = {**row["facts"], "city": next(c for c in toy.SLOTS["city"] if c != row["facts"]["city"])}
    response = toy.write_summary(facts, random.Random(0))

    def spans(noise, share):
        reply = noisy_critique(row | {"noise": [noise, share]}, response)
        assert reply == noisy_critique(row | {"noise": [noise, share]}, response)
        return read_reply({"id": "", "prompt": "", "response": response}, reply, "dense")[1].spans

    truth = true_spans(row, response)
    assert len(truth) == 7 and sum(span.label for span in truth) == 5
    words = lambda spans: {(response[s.start:s.end].strip(".,"), s.label) for s in spans}
    assert words(spans("", 0.0)) == words(truth)
    assert words(spans("flipped", 1.0)) == {(word, -label) for word, label in words(truth)}
    assert not spans("dropped", 1.0)
    assert not words(spans("shifted", 1.0)) & words(truth) and len(spans("shifted", 1.0)) >= 2


# ── Jobs ────────────────────────────────────────────────────────────────────────────────────────────────

def test_a_key_depends_on_every_setting_and_on_nothing_else():
    run = Run(learning_rate=1e-3, seed=1)
    others = [replace(run, **{name: value}) for name, value in dict(
        method="ppo", reward="true", critic="toy:critique_human", weighting="importance", noise="flipped", share=0.1,
        learning_rate=2e-3, seed=2, tuning=True, updates=3, batch=4, judge_rows=5).items()]
    assert len({key(job) for job in [run, *others, Judge(), Judge(seed=2)]}) == 15 and key(run) == key(replace(run))
    assert judge_of(Run(reward="true")) is None and judge_of(Run("dpo")) is None
    assert judge_of(Run("ppo", judge_rows=9)).kind == "scalar"
    assert judge_of(Run("reflection", judge_rows=9)) == Judge(rows=9)


def test_what_is_done_is_not_done_again_and_what_fails_is_named(tmp_path, monkeypatch):
    done = []

    def work(job, cache):
        if job.seed == 9:
            raise ValueError("no such luck")
        done.append(job)
        (cache / f"{key(job)}.json").write_text(json.dumps({"seed": job.seed}))

    monkeypatch.setattr(trials, "work", work)
    jobs = [Run(seed=2), Run(seed=1), Run(seed=2)]
    assert [r["seed"] for r in settle(jobs, tmp_path, Here())] == [2, 1, 2] and len(done) == 2
    assert [r["seed"] for r in settle([Run(seed=1), Run(seed=3)], tmp_path, Here())] == [1, 3] and len(done) == 3
    with pytest.raises(InputError, match=r"Run\(.*seed=9.*ValueError: no such luck"):
        settle([Run(seed=9)], tmp_path, Here())


# ── Appendix A ──────────────────────────────────────────────────────────────────────────────────────────

def test_the_inequality_of_appendix_a_by_hand():  # Eq. Appendix A ΔA
    """Δδ = (−1, 1, 0) is the counterexample; with Δδ ≥ 0 it always holds."""
    mask = torch.ones(2, 3)
    found = ordered_pairs(torch.tensor([[0.0, 1, 1], [1, 0, 0]]), mask, 2, 0.95)         # Δδ = (−1, 1, 1)
    assert found == {"pairs": 1, "places": 2, "premise": 2, "held": 1}                   # 0.95 − 1 + 0.95² < 0.95²
    found = ordered_pairs(torch.tensor([[1.0, 0, 1], [0, 0, 0]]), mask, 2, 0.95)
    assert found == {"pairs": 1, "places": 2, "premise": 1, "held": 1}
    assert ordered_pairs(torch.tensor([[1.0, 0, 1], [0, 0, 0]]), mask, 1, 0.95)["pairs"] == 0        # two posts
    found = ordered_pairs(torch.tensor([[0.0, 0, 1, 1, 1], [1, 1, 0, 0, 0]]), torch.ones(2, 5), 2, 0.95)
    assert found == {"pairs": 1, "places": 4, "premise": 4, "held": 2}     # at t = 2: −1 + w + w² + w³ < 2 w³, by little


def test_real_trajectories_give_both_advantages_and_alpha(tmp_path, monkeypatch):  # Eq. §3.6 A^A; Eq. Appendix A α
    """§3.6 token by token: A is Σ λ^(k−t) δ_k, B λ^(T−t) Σ δ; α = λ^−(T−k) in the mean over the tokens with a δ."""
    kept, judged = [], trials.add_feedback
    monkeypatch.setattr(trials, "add_feedback", lambda rollouts, *rest: kept.append(rollouts) or judged(rollouts, *rest))
    found = trials.follow_trajectories(trials.Trajectories(posts=8, samples=2), tmp_path)
    (rollouts,) = kept
    lengths, advantages = rollouts.mask.sum(1).tolist(), trials.advantages_of(rollouts.delta, rollouts.mask)
    assert len(set(lengths)) > 1
    for setting, decay in (("A", 0.95), ("A", 1.0), ("B", 0.95), ("B", 1.0)):
        got = advantages[f"{setting}, λ = {decay:g}".replace("0.", ".")]
        for row, n in enumerate(lengths):
            delta = rollouts.delta[row, :n].tolist()
            want = [sum(decay ** (k - t) * delta[k] for k in range(t, n)) if setting == "A" else
                    decay ** (n - 1 - t) * sum(delta) for t in range(n)]
            assert got[row, :n].tolist() == pytest.approx(want, abs=1e-4) and not got[row, n:].any()
    alpha = [0.95 ** -(n - 1 - k) for row, n in enumerate(lengths) for k in range(n) if rollouts.delta[row, k]]
    assert found["alpha"] == pytest.approx(mean(alpha), rel=1e-5) and found["alpha"] > 1


def test_the_noise_scale_of_gradients_that_are_drawn_is_found():
    generator = torch.Generator().manual_seed(2)
    signal = torch.full((50,), 0.3)                                                     # tr Σ / |μ|² = 50 / 4.5
    gradients = signal + torch.randn(600, 50, generator=generator)
    middle, low, high = trials.noise_scale(gradients @ gradients.T, 0)
    assert middle == pytest.approx(50 / 4.5, rel=0.15) and low < 50 / 4.5 < high and high - low < 6


def test_gradients_of_single_responses_are_those_of_definition_1(toy_model, tmp_path):
    model, tokenizer = toy_model
    config = trials.settings(Run(reward="true", batch=1), tmp_path)
    rollouts = sample_rollouts(model, tokenizer, toy.rows("train", 3), config, None, torch.Generator().manual_seed(0))
    advantages = torch.randn(rollouts.mask.shape, generator=torch.Generator().manual_seed(1)) * rollouts.mask
    parameters = add_lora(model, "policy", 2, 4, 0.0, ["q_proj"])
    with use_lora(model, "policy"):
        dots = trials.gradient_products(model, rollouts, [0, 1, 2], {"a": advantages}, parameters)["a"]
        hidden = trials.response_hidden(model, *(getattr(rollouts, k) for k in trials.INPUTS))
        logits = hidden @ trials.head_weight(model).T
        logprobs = logits.log_softmax(-1).gather(2, rollouts.response_ids[..., None])[..., 0]
        whole = torch.autograd.grad(-3 * nl_gradient_loss(logprobs, advantages, rollouts.mask), parameters)
    assert dots.sum().item() == pytest.approx(sum((g ** 2).sum().item() for g in whole), rel=1e-3)


# ── Pages ───────────────────────────────────────────────────────────────────────────────────────────────

def test_a_study_in_miniature_writes_its_page_and_keeps_what_people_wrote(tmp_path, monkeypatch):
    monkeypatch.setattr(trials, "HELD_OUT", 6)
    monkeypatch.setitem(studies.COMPARED, 2, ("Tiny", "Does it work?", {"true": studies.TRUE, "dpo": Run("dpo"),
                                              "ilf": Run("ilf")}, ["true"]))
    plan = Plan(rates=(1e-3, 2e-3), tuning=(7,), seeds=(0, 1), updates=2, batch=8)
    config, desk = StudyConfig(output_dir=str(tmp_path)), Desk(tmp_path, Here())
    path = studies.compared(2, plan, desk, config)
    page, records = path.read_text(), sorted(tmp_path.glob("*.json"))
    assert len(records) == 1 + 3 * (2 + 2) and path.name == "2_tiny.md" and "## What was found" not in page
    for wanted in ("| true |", "| dpo |", "| ilf |", "Does it work?", "(2_tiny.svg)", "Seeds: 0, 1", "16 rollouts"):
        assert wanted in page
    for record in map(json.loads, (file.read_text() for file in records)):
        assert 0 < record["accuracy"] <= 1 and 2 <= len(record.get("curve", [0, 0])) <= 3          # DPO: whole passes
    svg = ElementTree.parse(path.with_suffix(".svg"))
    assert len(svg.findall("{*}polyline")) == len(svg.findall("{*}circle")) == 3
    path.write_text(page.replace("## Table and figure", "## What was found\n\nIt works.\n\n## Table and figure"))
    monkeypatch.setattr(trials, "work", None)                                   # nothing is left to do
    studies.compared(2, plan, Desk(tmp_path, Here()), config)
    assert "## What was found\n\nIt works.\n\n## Table and figure" in path.read_text()


def test_the_figure_of_arms_has_their_smoothed_means_and_intervals_by_rollouts():  # Figure 5; Figure 6
    """The lines and bands read back by the labels of the axes; the accuracies as they are printed."""
    curves = {"with": [[.2, .5, .8, .9], [.3, .5, .7, .9], [.2, .6, .9, .9]], "without": [[.2, .4, .5], [.3, .3, .4]]}
    arms = [Arm(name, Run(batch=batch), {}, [{"accuracy": curve[-1], "curve": curve} for curve in curves[name]])
            for name, batch in (("with", 8), ("without", 20))]
    svg = ElementTree.fromstring(arm_figure(arms))
    texts = [(float(e.get("x")), float(e.get("y")), e.text) for e in svg.findall("{*}text")]
    xs, ys = [(x, float(t)) for x, y, t in texts if y == 297], [(y - 4, float(t)) for x, y, t in texts if x == 44]
    read = lambda marks, at: np.interp(at, *zip(*sorted(marks)))
    for line, band, arm in zip(svg.findall("{*}polyline"), svg.findall("{*}polygon"), arms, strict=True):
        points, edge = ([(read(xs, x), read(ys, y)) for x, y in (map(float, pair.split(",")) for pair in e.get("points").split())]
                        for e in (line, band))
        spans = [interval(values) for values in zip(*map(smooth, curves[arm.name]))]
        want = [(i * arm.run.batch, centre) for i, (centre, _) in enumerate(spans)]
        assert points == [pytest.approx(pair, abs=.01) for pair in want] and len(edge) == 2 * len(want)
        assert [y for _, y in edge] == pytest.approx([c - h for c, h in spans] + [c + h for c, h in spans[::-1]], abs=.01)
    assert [t for x, _, t in texts if x == 868] == ["0.9", "0.45"]


@pytest.mark.parametrize("number", range(1, 9))
def test_every_committed_page_can_be_judged_and_repeated(number):
    (path,) = (ROOT / "notebooks" / "studies").glob(f"{number}_*.md")
    page = path.read_text()
    assert f"`python -m experiments.studies --study {number}`" in page and "/tmp" not in page
    seeds = rf"Seeds: (\d+, ){{{2 if number in (4, 6, 8) else 4},}}\d+"
    for wanted in (seeds, r"Time: \d+ seconds", r"Machine: .+ cores", r"Date: \d{4}-\d\d-\d\d", r"95 %",
                   r"\d+ rollouts", r"## What was found\n\n.{200,}"):
        assert re.search(wanted, page), wanted
    for file in re.findall(r"!\[.*?\]\((.*?)\)", page):
        ElementTree.parse(path.parent / file)
