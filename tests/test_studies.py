"""The studies' machinery: statistics, noise, the cache, Appendix A, the committed pages."""

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

import toy
from annotate import get_mode, read_reply
from data import InputError, load_object
from experiments import designs, studies, trials
from experiments.studies import Arm, Desk, Plan, StudyConfig, arm_figure
from experiments.trials import (Judge, Run, arrival, critic_of, damaged, interval, judge_of,
                                key, noisy_critique, ordered_pairs, settle, shown_arrival,
                                smooth, true_spans, updates_to)
from model import add_lora, response_hidden, use_lora
from sampling import head_weight
from text2grad import nl_gradient_loss, sample_rollouts


class Here:
    """A pool that does the work at once, in this process."""

    def submit(self, work, *args):
        future = Future()
        try:
            future.set_result(work(*args))
        except ValueError as error:
            future.set_exception(error)
        return future


# ── Statistics

def test_the_interval_holds_95_percent_of_students_t():
    """The half width of [−1, 1, …] gives the quantile back; the density is integrated anew."""
    for degrees in range(1, 10):
        values = [random.Random(i).random() for i in range(degrees + 1)]
        centre, half = interval(values)
        quantile = half / (np.std(values, ddof=1) / math.sqrt(len(values)))
        x = np.linspace(0, quantile, 200_001)
        density = (1 + x ** 2 / degrees) ** (-(degrees + 1) / 2)
        density *= math.gamma((degrees + 1) / 2) / math.gamma(degrees / 2)
        density /= math.sqrt(degrees * math.pi)
        assert centre == pytest.approx(np.mean(values))
        assert 2 * np.trapezoid(density, x) == pytest.approx(0.95, abs=1e-4)


def test_updates_to_90_percent_of_a_gain_by_hand():
    assert smooth([0.0, 3.0, 6.0, 3.0]) == [0.0, 3.0, 4.0, 3.0]
    rising = [0.6, 0.7, 0.8, 0.9]
    assert updates_to(rising, 0.6, 0.9) == pytest.approx(2.7)           # 0.87 on the last piece
    assert updates_to(rising, 0.6, 1.1) == math.inf                     # 1.05 is never reached
    assert updates_to([0.9, 0.7, 0.8, 0.9], 0.6, 0.9) == 0              # already there
    assert updates_to([0.5, 0.5, 0.9, 0.5, 0.9], 0.5, 0.9) == pytest.approx(1.9)      # first


def test_arrival_resamples_seeds_and_says_what_is_never_reached():
    rising = [0.5, 0.6, 0.7, 0.8, 0.9, 0.9, 0.9, 0.9]
    middle, low, high = arrival([rising] * 4, 0.5)
    own = updates_to(smooth(rising), 0.5, mean(smooth(rising)[-3:]))
    assert middle == low == high == pytest.approx(own)
    late = [0.5] * 4 + rising[:4]
    middle, low, high = arrival([rising, rising, late], 0.5, 0.85)
    assert low < middle <= high == math.inf         # three draws of the late seed do not arrive
    assert shown_arrival([late] * 2, 0.5, 0.95) == "> 7 (> 7 to > 7)"


# ── Noise

@pytest.mark.parametrize("share, wrong", [(0.1, 1), (0.2, 2), (0.4, 4), (0, 0)])
def test_of_ten_labels_exactly_the_share_is_damaged(share, wrong):
    marks = {place: 1 if place % 3 else -1 for place in range(0, 30, 3)} | {1: 1}
    marks.pop(27)
    for seed in range(20):
        flipped, dropped, shifted = (damaged(marks, 30, kind, share, random.Random(seed))
                                     for kind in ("flipped", "dropped", "shifted"))
        assert flipped.keys() == marks.keys()
        assert sum(flipped[i] == -marks[i] for i in marks) == wrong
        assert len(dropped) == len(marks) - wrong and dropped.items() <= marks.items()
        assert sorted(shifted.values()) == sorted(marks.values())
        assert len(shifted.items() - marks.items()) == wrong
        left, moved = marks.keys() - shifted.keys(), shifted.keys() - marks.keys()
        assert all(min(abs(new - old) for old in left) <= 2 for new in moved)


def test_a_share_that_is_no_whole_number_is_met_in_the_mean():
    marks = {i: 1 for i in range(0, 14, 2)}
    counts = [7 - len(damaged(marks, 14, "dropped", 0.1, random.Random(seed)))
              for seed in range(4000)]
    assert {*counts} == {0, 1} and mean(counts) == pytest.approx(0.7, abs=0.03)


def test_the_noisy_critic_labels_words_where_they_stand():
    row = toy.rows("train", 1)[0]
    other = next(c for c in toy.SLOTS["city"] if c != row["facts"]["city"])
    response = toy.write_summary({**row["facts"], "city": other}, random.Random(0))

    def spans(noise, share):
        reply = noisy_critique(row | {"noise": [noise, share]}, response)
        assert reply == noisy_critique(row | {"noise": [noise, share]}, response)
        example = {"id": "", "prompt": "", "response": response}
        return read_reply(example, reply, "experiments.modes:DENSE")[1].spans

    def words(spans):
        return {(response[s.start : s.end].strip(".,"), s.label) for s in spans}

    truth = true_spans(row, response)
    assert len(truth) == 7 and sum(span.label for span in truth) == 5
    assert words(spans("", 0.0)) == words(truth)
    assert words(spans("flipped", 1.0)) == {(word, -label) for word, label in words(truth)}
    assert not spans("dropped", 1.0)
    shifted = spans("shifted", 1.0)
    assert not words(shifted) & words(truth) and len(shifted) >= 2


# ── Jobs

def test_a_key_depends_on_every_setting_and_on_nothing_else():
    run = Run(learning_rate=1e-3, seed=1)
    others = [replace(run, **{name: value}) for name, value in dict(
        method="ppo", reward="true", critic="experiments.designs:critique_human",
        noise="flipped", weighting="importance", share=0.1, learning_rate=2e-3, seed=2,
        tuning=True, updates=3, batch=4, judge_rows=5).items()]
    assert len({key(job) for job in [run, *others, Judge(), Judge(seed=2)]}) == 15
    assert key(run) == key(replace(run))


def test_runs_have_the_judges_and_critics_that_they_name():
    assert judge_of(Run(reward="true")) is None and judge_of(Run("dpo")) is None
    assert judge_of(Run("ppo", judge_rows=9)).kind == "scalar"
    assert judge_of(Run("prm_ppo")).critic == "experiments.designs:critique_steps"
    assert judge_of(Run("reflection", judge_rows=9)) == Judge(rows=9)
    runs = {Run("ppo"): "scalar", Run("prm_ppo"): "steps", Run(reward="graded"): "graded"}
    assert all(critic_of(run) is designs.DESIGNS[name] for run, name in runs.items())
    assert critic_of(Run(reward="true", weighting="importance")) is not designs.true_critic
    for run in (run for _, _, arms, _ in studies.COMPARED.values() for run in arms.values()):
        mode = trials.settings(run, "").mode           # every name leads to something
        assert get_mode(mode) and callable(load_object("--critic", run.critic))


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
    more = settle([Run(seed=1), Run(seed=3)], tmp_path, Here())
    assert [r["seed"] for r in more] == [1, 3] and len(done) == 3
    with pytest.raises(InputError, match=r"Run\(.*seed=9.*ValueError: no such luck"):
        settle([Run(seed=9)], tmp_path, Here())


# ── Appendix A

@pytest.mark.parametrize("delta, found", [
    ([[0, 1, 1], [1, 0, 0]], (1, 2, 2, 1)),        # Δδ = (−1, 1, 1): 0.95 − 1 + 0.95² < 0.95²
    ([[1, 0, 1], [0, 0, 0]], (1, 2, 1, 1)),        # with Δδ ≥ 0 it always holds
    ([[0, 0, 1, 1, 1], [1, 1, 0, 0, 0]], (1, 4, 4, 2))])   # t = 2: −1 + w + w² + w³ < 2 w³
def test_the_inequality_of_appendix_a_by_hand(delta, found):  # Eq. Appendix A ΔA
    delta = torch.tensor(delta, dtype=torch.float)
    names = ("pairs", "places", "premise", "held")
    assert ordered_pairs(delta, torch.ones_like(delta), 2, 0.95) == dict(zip(names, found))
    assert ordered_pairs(delta, torch.ones_like(delta), 1, 0.95)["pairs"] == 0       # two posts


# Eq. §3.6 A^A; Eq. Appendix A α
def test_real_trajectories_give_both_advantages_and_alpha(tmp_path, monkeypatch):
    """§3.6 token by token: A is Σ λ^(k−t) δ_k, B λ^(T−t) Σ δ; α = λ^−(T−k), its mean."""
    kept, add = [], trials.add_feedback
    monkeypatch.setattr(trials, "add_feedback", lambda x, said: kept.append(x) or add(x, said))
    found = trials.follow_trajectories(trials.Trajectories(posts=8, samples=2), tmp_path)
    (rollouts,) = kept
    lengths = rollouts.mask.sum(1).tolist()
    advantages = trials.advantages_of(rollouts.delta, rollouts.mask)
    assert len(set(lengths)) > 1
    for setting, decay in (("A", 0.95), ("A", 1.0), ("B", 0.95), ("B", 1.0)):
        got = advantages[f"{setting}, λ = {decay:g}".replace("0.", ".")]
        for row, n in enumerate(lengths):
            delta = rollouts.delta[row, :n].tolist()
            want = [sum(decay ** (k - t) * delta[k] for k in range(t, n)) if setting == "A" else
                    decay ** (n - 1 - t) * sum(delta) for t in range(n)]
            assert got[row, :n].tolist() == pytest.approx(want, abs=1e-4)
            assert not got[row, n:].any()
    alpha = [0.95 ** -(n - 1 - k) for row, n in enumerate(lengths) for k in range(n)
             if rollouts.delta[row, k]]
    assert found["alpha"] == pytest.approx(mean(alpha), rel=1e-5) and found["alpha"] > 1


def test_the_noise_scale_of_gradients_that_are_drawn_is_found():
    generator = torch.Generator().manual_seed(2)
    signal = torch.full((50,), 0.3)                                # tr Σ / |μ|² = 50 / 4.5
    gradients = signal + torch.randn(600, 50, generator=generator)
    middle, low, high = trials.noise_scale(gradients @ gradients.T, 0)
    assert middle == pytest.approx(50 / 4.5, rel=0.15)
    assert low < 50 / 4.5 < high and high - low < 6


def test_gradients_of_single_responses_are_those_of_definition_1(toy_model, tmp_path):
    model, tokenizer = toy_model
    config = trials.settings(Run(reward="true", batch=1), tmp_path)
    rollouts = sample_rollouts(model, tokenizer, toy.rows("train", 3), config, None,
                               torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(1)
    advantages = torch.randn(rollouts.mask.shape, generator=generator) * rollouts.mask
    parameters = add_lora(model, "policy", 2, 4, 0.0, ["q_proj"])
    dots = trials.gradient_products(model, rollouts, [0, 1, 2], {"a": advantages}, parameters)
    with use_lora(model, "policy"):
        hidden = response_hidden(model, rollouts.prompt_ids, rollouts.prompt_mask,
                                 rollouts.response_ids, rollouts.mask)
        logits = hidden @ head_weight(model).T
        logprobs = logits.log_softmax(-1).gather(2, rollouts.response_ids[..., None])[..., 0]
        loss = nl_gradient_loss(logprobs, advantages, rollouts.mask)
        whole = torch.autograd.grad(-3 * loss, parameters)
    want = sum((g ** 2).sum().item() for g in whole)
    assert dots["a"].sum().item() == pytest.approx(want, rel=1e-3)


# ── Pages

def test_a_small_study_writes_its_page_and_keeps_what_people_wrote(tmp_path, monkeypatch):
    monkeypatch.setattr(trials, "HELD_OUT", 6)
    runs = {"true": studies.TRUE, "dpo": Run("dpo"), "ilf": Run("ilf")}
    monkeypatch.setitem(studies.COMPARED, 2, ("Tiny", "Does it work?", runs, ["true"]))
    plan = Plan(rates=(1e-3, 2e-3), tuning=(7,), seeds=(0, 1), updates=2, batch=8)
    config, desk = StudyConfig(output_dir=str(tmp_path)), Desk(tmp_path, Here())
    path = studies.compared(2, plan, desk, config)
    page, records = path.read_text(), sorted(tmp_path.glob("*.json"))
    assert len(records) == 1 + 3 * (2 + 2) and path.name == "2_tiny.md"
    assert "## What was found" not in page
    for wanted in ("| true |", "| dpo |", "| ilf |", "Does it work?", "(2_tiny.svg)",
                   "Seeds: 0, 1", "16 rollouts"):
        assert wanted in page
    for record in map(json.loads, (file.read_text() for file in records)):
        assert 0 < record["accuracy"] <= 1
        assert 2 <= len(record.get("curve", [0, 0])) <= 3               # DPO: whole passes
    svg = ElementTree.parse(path.with_suffix(".svg"))
    assert len(svg.findall("{*}polyline")) == len(svg.findall("{*}circle")) == 3
    words = "## What was found\n\nIt works.\n\n## Table and figure"
    path.write_text(page.replace("## Table and figure", words))
    monkeypatch.setattr(trials, "work", None)                           # nothing is left to do
    studies.compared(2, plan, Desk(tmp_path, Here()), config)
    assert words in path.read_text()


# Figure 5; Figure 6
def test_the_figure_of_arms_has_their_smoothed_means_and_intervals_by_rollouts():
    """Lines and bands read back by the labels of the axes; the accuracies as printed."""
    curves = {"with": [[.2, .5, .8, .9], [.3, .5, .7, .9], [.2, .6, .9, .9]],
              "without": [[.2, .4, .5], [.3, .3, .4]]}
    arms = []
    for name, batch in (("with", 8), ("without", 20)):
        records = [{"accuracy": curve[-1], "curve": curve} for curve in curves[name]]
        arms.append(Arm(name, Run(batch=batch), {}, records))
    svg = ElementTree.fromstring(arm_figure(arms))
    texts = [(float(e.get("x")), float(e.get("y")), e.text) for e in svg.findall("{*}text")]
    xs = [(x, float(t)) for x, y, t in texts if y == 297]
    ys = [(y - 4, float(t)) for x, y, t in texts if x == 44]

    def read(element):
        pairs = [map(float, pair.split(",")) for pair in element.get("points").split()]
        return [tuple(np.interp(at, *zip(*sorted(marks))) for at, marks in zip(pair, (xs, ys)))
                for pair in pairs]

    for line, band, arm in zip(svg.findall("{*}polyline"), svg.findall("{*}polygon"), arms,
                               strict=True):
        spans = [interval(values) for values in zip(*map(smooth, curves[arm.name]))]
        want = [(i * arm.run.batch, centre) for i, (centre, _) in enumerate(spans)]
        assert read(line) == [pytest.approx(pair, abs=.01) for pair in want]
        edges = [c - h for c, h in spans] + [c + h for c, h in spans[::-1]]
        assert [y for _, y in read(band)] == pytest.approx(edges, abs=.01)
    assert [t for x, _, t in texts if x == 868] == ["0.9", "0.45"]


@pytest.mark.parametrize("number", range(1, 9))
def test_every_committed_page_can_be_judged_and_repeated(number):
    (path,) = (ROOT / "notebooks" / "studies").glob(f"{number}_*.md")
    page = path.read_text()
    assert f"`python -m experiments.studies --study {number}`" in page and "/tmp" not in page
    seeds = rf"Seeds: (\d+, ){{{2 if number in (4, 6, 8) else 4},}}\d+"
    for wanted in (seeds, r"Time: \d+ seconds", r"Machine: .+ cores", r"Date: \d{4}-\d\d-\d\d",
                   r"95 %", r"\d+ rollouts", r"## What was found\n\n.{200,}"):
        assert re.search(wanted, page), wanted
    for file in re.findall(r"!\[.*?\]\((.*?)\)", page):
        ElementTree.parse(path.parent / file)
