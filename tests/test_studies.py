"""The studies: statistics, cached runs, remedies, Appendix A, and the committed pages."""

import math
import random
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from functools import partial
from itertools import permutations
from statistics import mean
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import toy
from annotate import get_mode
from data import InputError, append_row, load_object, read_rows
from experiments import designs, studies
from experiments.baselines import METHODS
from experiments.studies import (RATES, STUDIES, Arm, Run, Study, arm_figure, config_of,
                                 do_study, judge_of, key, noise_scale, ordered_pairs,
                                 probe_reward_model, renewed, seed_interval, settle, smooth,
                                 tune)
from helpers import toy_config, ROOT
from model import add_lora, response_hidden, use_lora
from policy import nl_gradient_loss, sample_rollouts
from reward_model import Judgement
from sampling import head_weight

HERE = SimpleNamespace(map=map)                  # a pool that works in this process
NOTEBOOKS = ROOT / "notebooks"
RECORDS = studies.read_records(NOTEBOOKS / "studies" / "records.jsonl")


def committed(runs):
    """The committed records of runs; KeyError if one was not committed."""
    return [RECORDS[key(vars(run))] for run in runs]


# ── Statistics

def test_the_interval_holds_95_percent_of_students_t():
    """The half width of [−1, 1, …] gives the quantile, compared with an integrated density."""
    for degrees in range(1, 10):
        values = [random.Random(i).random() for i in range(degrees + 1)]
        centre, half = seed_interval(values)
        quantile = half / (np.std(values, ddof=1) / math.sqrt(len(values)))
        x = np.linspace(0, quantile, 200_001)
        density = (1 + x ** 2 / degrees) ** (-(degrees + 1) / 2)
        density *= math.gamma((degrees + 1) / 2) / math.gamma(degrees / 2)
        density /= math.sqrt(degrees * math.pi)
        assert centre == pytest.approx(np.mean(values))
        assert 2 * np.trapezoid(density, x) == pytest.approx(0.95, abs=1e-4)


@pytest.mark.parametrize("curves, goal, text", [
    ([(.6, .7, .8, .9)], .87, "270"), ([(.6, .7, .8, .9)], .6, "0"), ([()], .9, "–"),
    ([(.6, .7, .8, .9)], 1.05, "– (1 of 1 never)"),
    ([(.5, .5, .5, .8, .5, .5, .5, .8)], .59, "190"),                        # the first time
    ([(.5, .9, .9, .5, .5, .5, .5, .5)], .7, "75"),                          # and then it falls
    ([(.6, .7, .8, .9), (.5, .5, .5, .5)], .87, "270 (1 of 2 never)")])
def test_rollouts_to_a_goal_by_hand(curves, goal, text):
    """The running maximum of the smoothed curve, interpolated linearly, or "never"."""
    records = [{"curve": [*curve]} for curve in curves]
    assert Arm("a", Run(batch=100), records).rollouts_to(goal) == text
    assert smooth([0.0, 3.0, 6.0, 3.0]) == pytest.approx([0.0, 3.0, 4.0, 3.0])


# ── Runs

def test_runs_have_the_reward_models_that_they_name():
    assert judge_of(Run("true")) is None and judge_of(Run("dpo")) is None
    assert judge_of(Run("scalar", rows=9)) == Run("fit scalar", rows=9)
    assert judge_of(Run("reflection", seed=4, rate=1.0)) == judge_of(Run("graded", seed=4))
    assert judge_of(Run(seed=4)) != judge_of(Run()) != judge_of(Run(length=2))
    assert judge_of(Run(seed=100)) != judge_of(Run(seed=101))            # each trains its own
    assert judge_of(Run("two_rounds")).rows == Run().rows // 2


@pytest.mark.parametrize("number", STUDIES)
def test_arms_differ_have_rates_and_name_what_exists(number):
    """A tuned rate is the one that `tune` finds in the committed records of the tuning runs."""
    study = STUDIES[number]
    assert len({*study.arms.values()}) == len(study.arms)
    for name, run in study.arms.items():
        config = config_of(run, "")
        function = load_object("--annotator_function", config.annotator_function)
        assert get_mode(config.mode) and callable(function)
        assert run.method in {*designs.DESIGNS, *METHODS, "two_rounds"}
        assert run.rate in RATES and config.learning_rate == run.rate
        assert all(getattr(config, field) == value for field, value in run.settings)
        assert name not in study.tuned or tune(run, committed) == run.rate


def test_the_rate_is_the_best_of_two_seeds_and_has_a_worse_neighbour_on_each_side():
    """The optimum of "dpo" lies two rates above the first three, so the grid grows twice."""
    def measure(runs):
        tried.update(run.rate for run in runs)
        assert {run.seed for run in runs} == {*studies.TUNING}
        # Alone, each seed would choose another rate.
        return [{"accuracy": -abs(math.log(run.rate / optimum))
                 + (run.seed == 100) * (run.rate == 3e-4) * 0.8} for run in runs]

    for optimum, rate, rates in ((1e-3, 1e-3, RATES[2:5]), (1e-2, 1e-2, RATES[2:7]),
                                 (1e-5, 3e-5, RATES[:5])):              # 3e-5 ends the grid
        tried = set()
        assert tune(Run("dpo"), measure) == rate and tried == {*rates}


def test_tuning_takes_the_scalar_reward_model_that_is_right_most_often_over_both_seeds():
    def measure(runs):
        assert {(run.method, run.rows, run.seed) for run in runs} == {
            ("try scalar", 3000, 100), ("try scalar", 3000, 101)}
        # Alone, seed 100 would choose ten passes at .003.
        return [{"right": {(1e-3, 10): 0.8, (3e-3, 10): 0.5 + 0.4 * (run.seed == 100)}.get(
            tuple(dict(run.judge).values()), 0.5)} for run in runs]

    best = studies.tune_judge(Run("scalar"), measure)
    assert dict(best) == {"learning_rate": 1e-3, "epochs": 10}


def test_what_is_done_is_not_done_again_and_what_fails_is_named(tmp_path, monkeypatch):
    """Reward models come first. Their records are in the cache, where their adapters are."""
    def work(run, file, cache):
        if run.seed == 9:
            raise ValueError("no such luck")
        done.append((run.method, file.name))
        append_row(file, {"run": vars(run), "seed": run.seed})

    done = []
    monkeypatch.setattr(studies, "work", work)
    do = partial(settle, tmp_path / "records.jsonl", tmp_path, HERE)
    runs = [Run(settings=(("lam", 0.5),), seed=n) for n in range(3)]
    assert [record["seed"] for record in do([runs[2], runs[1], runs[2]])] == [2, 1, 2]
    policies = [("critique", "records.jsonl")] * 2
    assert done == [("fit critique", "reward_models.jsonl")] * 2 + policies
    assert [record["seed"] for record in do(runs)] == [0, 1, 2] and len(done) == 6
    with pytest.raises(InputError, match=r"Run\(.*seed=9.*ValueError: no such luck"):
        do([Run(seed=9)])


def test_facts_that_are_not_stated_at_all_are_omitted():
    """A wrong phrase of a slot states it, and a phrase of another sentence's slot does not."""
    row = {"facts": {"person": "sister", "month": "June", "reply": "So what."}}
    assert studies.omitted_facts(row, "My boss opened it in July, a nurse says.") == 1 / 3
    assert studies.omitted_facts(row, "It is a pity.") == 1


def test_a_critic_is_probed_against_the_careful_annotator(monkeypatch):
    """Hits, misses and false alarms by hand; half of the critiques or more decide."""
    def critic(deltas, rollouts, model, tokenizer, config):
        assert config.annotator_function in ("toy:critique", "no:thing")
        return [Judgement("", delta) for delta in deltas]

    truth = [[1.0, -1.0, -1.0, -1.0, 0.0, 0.0]]
    said = [[0.25, -0.5, 0.5, -1.0, -0.75, 0.0]]
    monkeypatch.setattr(studies, "true_critic", partial(critic, truth))
    config = toy_config(annotator_function="no:thing")
    figures = probe_reward_model(None, None, None, config, partial(critic, said))
    assert figures == {"poor_recall": 2 / 3, "poor_precision": 2 / 3, "good_recall": 0,
                       "good_precision": 0}


def test_half_way_r_phi_learns_from_the_policys_own_responses(tmp_path, monkeypatch, toy_model):
    """R_φ is refitted once, on all rows so far, and judges every later batch."""
    fits, judged = [], []
    monkeypatch.setattr(studies, "fit", lambda *_: fits.append(len(judged)))
    monkeypatch.setattr(studies, "reward_model_critic",
                        lambda batch, *_: judged.append(batch) or "judged")
    add_lora(toy_model[0], "policy", 2, 4)
    config = toy_config(output_dir=str(tmp_path), iterations=5, max_new_tokens=48)
    critic = renewed(Run(rows=6), [{"id": "old"}])
    assert [critic(n, *toy_model, config) for n in range(5)] == ["judged"] * 5
    assert fits == [2] and judged == [0, 1, 2, 3, 4]
    old, *new = read_rows(tmp_path / "round-2" / "feedback.jsonl")
    assert old == {"id": "old"} and len(new) == 3
    assert all(row["spans"] and row["response"] for row in new)


# ── Appendix A

@pytest.mark.parametrize("delta, found", [
    ([[0, 1, 1], [1, 0, 0]], (1, 2, 2, 1)),        # Δδ = (−1, 1, 1): 0.95 − 1 + 0.95² < 0.95²
    ([[1, 0, 1], [0, 0, 0]], (1, 2, 1, 1)),        # with Δδ ≥ 0 it always holds
    ([[0, 0, 1, 1, 1], [1, 1, 0, 0, 0]], (1, 4, 4, 2))])   # t = 2: −1 + w + w² + w³ < 2 w³
def test_the_inequality_of_appendix_a_by_hand(delta, found):  # Eq. Appendix A ΔA
    delta = torch.tensor(delta, dtype=torch.float)
    names = ("pairs", "places", "premise", "held")
    assert ordered_pairs(delta, torch.ones_like(delta), 0.95, 2) == dict(zip(names, found))
    assert ordered_pairs(delta, torch.ones_like(delta), 0.95, 1)["pairs"] == 0       # two posts
    shorter = torch.ones_like(delta).tril(delta.shape[1] - 2)                # the first of them
    assert ordered_pairs(delta, shorter, 0.95, 2)["pairs"] == 0


# Eq. §3.6 A^A; Eq. Appendix A α
def test_real_trajectories_give_both_advantages_and_alpha(tmp_path, monkeypatch):
    """§3.6 token by token: A is Σ λ^(k−t) δ_k, B λ^(T−t) Σ δ; α = λ^−(T−k), its mean."""
    kept, add = [], studies.add_feedback
    monkeypatch.setattr(studies, "add_feedback", lambda x, said: kept.append(x) or add(x, said))
    found = studies.follow_trajectories(Run("look", posts=4), tmp_path)
    (rollouts,) = kept
    lengths = rollouts.mask.sum(1).tolist()
    advantages = studies.advantages_of(rollouts.delta, rollouts.mask)
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
    """tr Σ / |μ|² = 50 / 4.5; over twenty seeds 11.3 ± 0.4, so that 95 % are 1.7 wide."""
    generator = torch.Generator().manual_seed(2)
    gradients = 0.3 + torch.randn(600, 50, generator=generator)
    middle, low, high = noise_scale(gradients @ gradients.T)
    assert middle == pytest.approx(50 / 4.5, rel=0.15)
    assert low < middle < high and 1.1 < high - low < 2.5
    few = gradients[:7].double()
    dots = few @ few.T
    mu = mean(dots[i, j].item() for i, j in permutations(range(7), 2))
    assert noise_scale(dots)[0] == pytest.approx((dots.trace().item() / 7 - mu) / mu, rel=1e-4)


def test_gradients_of_single_responses_are_those_of_definition_1(toy_model, tmp_path):
    model, tokenizer = toy_model
    config = config_of(Run("true"), tmp_path)
    rollouts = sample_rollouts(model, tokenizer, toy.rows("train", 3), config, None,
                               torch.Generator().manual_seed(0))
    advantages = torch.randn(rollouts.mask.shape) * rollouts.mask
    parameters = add_lora(model, "policy", 2, 4, 0.0, ["q_proj"])
    dots = studies.gradient_products(model, rollouts, [0, 1, 2], {"a": advantages}, parameters)
    y = rollouts.response_ids
    with use_lora(model, "policy"):
        hidden = response_hidden(model, rollouts.prompt_ids, rollouts.prompt_mask, y,
                                 rollouts.mask)
        logprobs = (hidden @ head_weight(model).T).log_softmax(-1).gather(2, y[..., None])
        loss = nl_gradient_loss(logprobs[..., 0], advantages, rollouts.mask)
        whole = torch.autograd.grad(-3 * loss, parameters)
    want = sum((g ** 2).sum().item() for g in whole)
    assert dots["a"].sum().item() == pytest.approx(want, rel=1e-3)


# ── Pages

def test_a_small_study_writes_its_page_and_keeps_what_people_wrote(tmp_path, monkeypatch):
    short = Run("true", updates=2, batch=8, posts=4, rate=1e-3, rows=24)
    arms = {"true": short, "dpo": replace(short, method="dpo"),
            "long": replace(short, length=2)}
    study = Study("Tiny", "Does it work?", "Nothing much.", arms, seeds=2,
                  trajectories=[Run("look", posts=4)])
    get_records = partial(settle, tmp_path / "records.jsonl", tmp_path, HERE)
    path = do_study("12", study, tmp_path, get_records)
    page, records = path.read_text(), read_rows(tmp_path / "records.jsonl")
    assert len(records) == 3 * 2 + 1 and path.name == "12_tiny.md"
    assert page.endswith("differently elsewhere.\n")
    for wanted in ("\ntrue ", "\ndpo ", "Does it work?", "(12_tiny.svg)", "Seeds: 0 to 1",
                   "16 rollouts", "Nothing much.", "--study 12", "tuned for 0 of 3"):
        assert wanted in page
    for record in records:
        assert record["run"]["method"] == "look" or 0 <= record["accuracy"] <= 1
        assert len(record.get("curve", [])) in (0, 2)                  # DPO is not a rollout
    svg = ElementTree.parse(path.with_suffix(".svg"))
    assert len(svg.findall("{*}svg")) == 3
    for heading, words in (("What was found", "It works."), ("Details", "In all runs.")):
        page = page.replace(f"## {heading}\n", f"## {heading}\n\n{words}", 1)
    path.write_text(page)
    monkeypatch.setattr(studies, "work", pytest.fail)                 # no run may be repeated
    do_study("12", study, tmp_path, get_records)
    new = path.read_text()
    assert "found\n\nIt works.\n\n!" in new and "Details\n\nIn all runs.\n\n## Full" in new


# Figure 5; Figure 6
def test_the_figure_of_arms_has_their_smoothed_means_and_intervals_by_rollouts(monkeypatch):
    """Each chart gets its mean and interval, and the mean of the first arm."""
    monkeypatch.setattr(studies, "svg_line", lambda *chart: chart)
    curves = [[.2, .5, .8, .9], [.3, .5, .7, .9], [.2, .6, .9, .9]], [[.2, .4], [.3, .3]]
    arms = [Arm(f"{batch}", Run(batch=batch), [{"curve": curve} for curve in part])
            for batch, part in zip((8, 20), curves)]
    fitted = Arm("fitted", Run("sft"), [{"curve": []}] * 2)
    charts = arm_figure([*arms, fitted], ["length"])
    for (title, x, lines, unit), arm, part in zip(charts, arms, curves, strict=True):
        m, h = zip(*[seed_interval(values) for values in zip(*map(smooth, part))])
        assert title.startswith(arm.name) and unit == "rollouts"
        assert x == [arm.run.batch * i for i in range(len(m))]
        for name, want in (("mean", m), ("low", np.subtract(m, h)), ("high", np.add(m, h)),
                           ("first arm", np.mean([*map(smooth, curves[0])], 0))):
            assert lines[name] == pytest.approx(want)


PAGES = sorted((NOTEBOOKS / "studies").glob("*_*.md"))
DECIMALS = re.compile(r"\d*(\.\d+)")


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_every_figure_of_a_page_follows_from_the_committed_records(path, tmp_path):
    """Table, chart and text: each decimal in the findings stands in the table."""
    page = path.read_text()
    (tmp_path / path.name).write_text(page)
    number = path.stem.split("_")[0]
    study = STUDIES[number]
    new = do_study(number, study, tmp_path, committed)
    assert new.name == path.name
    text, _, tables = page.partition("## How")[0].partition("## Full table")
    assert new.read_text().partition("## How")[0] == page.partition("## How")[0]
    assert new.with_suffix(".svg").read_text() == path.with_suffix(".svg").read_text()
    finding = studies.section(text, "## What was found", "![")
    assert len(re.findall(r"(?<!Dr)\.(?: |\n|$)", finding.strip())) == 3, "three sentences"
    rows = re.findall(r"(?m)^\| (?!\|)(?!---).*\|$", text.partition("## Details")[0])
    assert len(rows) <= 8 and all(row.count("|") == 6 for row in rows)
    assert {*DECIMALS.findall(text)} <= {*DECIMALS.findall(tables)}
    assert f"`python -m experiments.studies --study {number}`" in page and "/tmp" not in page
    seeds = 5 if number in ("1", "2", "7", "9") else 3
    assert not study.arms or int(re.search(r"Seeds: 0 to (\d+)", page)[1]) + 1 >= seeds
    for wanted in (r"\d+ CPU seconds", r"\d+ cores", r"\d{4}-\d\d-\d\d",
                   r"\d+ (rollouts|responses)", r"## What was found\n\n.{200,}",
                   r"## What it cannot show\n\n.{50,}"):
        assert re.search(wanted, page), wanted
    for file in re.findall(r"!\[.*?\]\((.*?)\)", page):
        ElementTree.parse(path.parent / file)


def test_the_index_lists_every_page_with_its_finding(tmp_path):
    for path in PAGES:
        (tmp_path / path.name).write_text(path.read_text())
    studies.write_index(tmp_path)
    index = (tmp_path / "README.md").read_text()
    assert index == (NOTEBOOKS / "studies" / "README.md").read_text()
    assert all(f"]({path.name}) " in index for path in PAGES) and len(PAGES) == len(STUDIES)


# t with 4 degrees of freedom at p = .1, .05, .01 and .001: from printed tables.
@pytest.mark.parametrize("t, p", [(2.1318, .1), (2.7764, .05), (4.6041, .01), (8.6103, .001)])
def test_p_of_a_paired_t_test(t, p):
    x = np.array([-2, -1, 0, 1, 2]) / np.std([-2, -1, 0, 1, 2], ddof=1)
    assert studies.p_value(x + t / math.sqrt(5)) == pytest.approx(p, abs=1e-5)
    assert studies.p_value([0.0] * 5) == 1 and studies.p_value([0.1] * 5) < 1e-6


def test_holm_by_hand():
    """Holm 1979: sorted, p₁ ≤ .05/4, p₂ ≤ .05/3, …; the first that fails ends it."""
    assert studies.holm({"a": .01, "b": .04, "c": .03, "d": .005}) == {"a", "d"}
    assert studies.holm({"a": .01, "b": .02}) == {"a", "b"}
    assert studies.holm({"a": .03, "b": .001, "c": .03}) == {"b"} and not studies.holm({})


# ── What stops a study

def test_a_reward_model_at_chance_is_drawn_again_and_then_stops_a_study(tmp_path, monkeypatch):
    rights = [.5, .59, .7]
    seeds = []

    def fit_scores(model, tokenizer, rows, config, out, reward_type, **changes):
        seeds.append(config.seed)
        return rights[len(seeds) - 1]

    monkeypatch.setattr(studies, "fit_scores", fit_scores)
    record = studies.fit_judge(Run("fit scalar", rows=4, seed=3), tmp_path)
    assert record == {"right": .7, "draws": 3} and len({*seeds}) == 3
    rights, seeds = [.5] * 9, []
    with pytest.raises(InputError, match="5 reward models have an accuracy below 0.6, the last "
                                         "0.500"):
        studies.fit_judge(Run("fit steps", rows=4), tmp_path)


def test_tuning_posts_are_no_posts_of_the_results_or_of_training(monkeypatch):
    run = Run(posts=100)
    results = {row["post"] for row in studies.held_out_posts(run)}
    for seed in studies.TUNING:
        tuning = studies.held_out_posts(Run(posts=100, seed=seed))
        posts = {row["post"] for row in tuning}
        trained = {row["post"] for row in toy.rows("train", 3000, seed)}
        trained |= {row["post"] for row in toy.rows("train", 3000, 1000 + seed)}
        assert len(posts) == 100 and not posts & results and not posts & trained
        assert not ({tuple(row["facts"].values()) for row in tuning}
                    & {tuple(row["facts"].values()) for row in studies.held_out_posts(run)})
    rows = toy.rows
    monkeypatch.setattr(toy, "rows", lambda split, n, seed=0, length=1: rows(
        "eval" if seed in (0, 3000) else split, n, 0 if seed == 3000 else seed, length))
    with pytest.raises(InputError, match="a post of the results is also a post of tuning"):
        studies.held_out_posts(Run(posts=10, seed=100))


def test_a_record_without_its_rate_is_named(tmp_path):
    append_row(tmp_path / "records.jsonl", {"run": {"method": "true"}})
    with pytest.raises(InputError, match="records.jsonl, line 1: the record does not name its "
                                         "learning rate"):
        studies.read_records(tmp_path / "records.jsonl")
