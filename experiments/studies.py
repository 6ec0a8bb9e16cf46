"""Studies on the embedded world, where truth is known: what the paper claims or left open.

    python -m experiments.studies --study 1            # a page and figure in notebooks/studies/
    python -m experiments.studies --study all          # all eight, within an hour on two cores
    python -m experiments.studies --study all --quick  # in minutes: shows that everything works

    1 Text2Grad against PPO, PRM-PPO, DPO, SFT, ILF and reflection
    2 reward designs of Table 11 and Appendix I
    3 with and without chain of thought
    4 wrong spans: flipped, shifted, dropped
    5 δ in {−1, 0, 1} against graded δ
    6 programmatic against human-like feedback
    7 R_φ against the true critic as reward
    8 Appendix A on real trajectories

What one run is stands in trials.py. The learning rate of every arm is tuned over one grid, with
a seed and held-out posts that are not among the reported. People write what was found on each
page; a new run leaves it there.

Paper: §4.3, Tables 1, 2 and 11, Figure 3, Appendices A, I and N.
"""

from __future__ import annotations

import os
import platform
import re
import sys
import time
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from statistics import fmean as mean

import torch

from data import flag, parse_flags, run_script
from experiments.trials import (HELD_OUT, STEPS, Run, Trajectories, interval, judge_of,
                                plus_minus, settle, shown_arrival, smooth, workers)
from report import ticks


# ── Arms: what a study compares

@dataclass(frozen=True)
class Plan:
    """How much the studies do."""
    rates: tuple[float, ...] = (3e-4, 1e-3, 3e-3)       # the grid for every arm
    tuning: tuple[int, ...] = (100,)                    # seeds that only tune
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)            # seeds that are reported
    updates: int = 15
    batch: int = 32
    judge_rows: int = 2000
    posts: int = 512                                    # of study 8

    def sized(self, run: Run) -> Run:
        """The run with this plan's budget; one with a batch of its own has as many rollouts."""
        batch = run.batch or self.batch
        return replace(run, batch=batch, updates=self.updates * self.batch // batch,
                       judge_rows=self.judge_rows)


QUICK = Plan(rates=(1e-3,), tuning=(), seeds=(0, 1), updates=8, judge_rows=400, posts=48)


@dataclass(eq=False)
class Arm:
    """One line of a study: its run, what every rate gave in tuning, the reported records."""
    name: str
    run: Run
    tuned: dict[float, float]
    records: list[dict]

    @property
    def accuracy(self) -> list[float]:
        """Share of right facts in summaries of the held-out posts, one per seed."""
        return [record["accuracy"] for record in self.records]

    @property
    def curves(self) -> list[list[float]]:
        """The same in training rollouts, update by update, one curve per seed."""
        return [record["curve"] for record in self.records if record.get("curve")]

    @property
    def end(self) -> float:
        """Where the curves end: the mean of their last three points."""
        return mean(mean(curve[-3:]) for curve in self.curves)


def tune(runs: dict[str, Run], plan: Plan, do) -> dict[str, tuple[Run, dict[float, float]]]:
    """Every run with its rate, and what each rate gave.

    The rate is the smallest of the grid that tunes within 0.01 of the best.
    """
    runs = {name: plan.sized(run) for name, run in runs.items()}
    do([judge for run in runs.values() if (judge := judge_of(run))])
    jobs = {(name, rate, seed): replace(run, learning_rate=rate, seed=seed, tuning=True)
            for name, run in runs.items() for rate in plan.rates for seed in plan.tuning}
    found, out = dict(zip(jobs, do(list(jobs.values())))), {}
    for name, run in runs.items():
        gave = {rate: mean(found[name, rate, seed]["accuracy"] for seed in plan.tuning)
                for rate in plan.rates if plan.tuning}
        good = [rate for rate in gave if gave[rate] >= max(gave.values()) - 0.01]
        out[name] = replace(run, learning_rate=[*good, plan.rates[0]][0]), gave
    return out


def follow(leader: Run, runs: dict[str, Run], plan: Plan, do):
    """`tune` with the rate that the leader tunes to: for studies whose arms are many."""
    rate = tune({"": leader}, plan, do)[""][0].learning_rate
    return tune(runs, replace(plan, rates=(rate,), tuning=()), do)


def reported(tuned: dict[str, tuple[Run, dict]], plan: Plan, do) -> list[Arm]:
    """The reported seeds of tuned runs."""
    jobs = [replace(run, seed=seed) for run, _ in tuned.values() for seed in plan.seeds]
    records = iter(do(jobs))
    return [Arm(name, run, gave, [next(records) for _ in plan.seeds])
            for name, (run, gave) in tuned.items()]


def arm_table(arms: list[Arm], start: float, goals: list[str]) -> str:
    """One row per arm: rate, held-out accuracy, less the first's, updates to 90 % of gains."""
    ends = {name: next(arm.end for arm in arms if arm.name == name) for name in goals}
    header = ["", "learning rate", "right facts, held out", f"less {arms[0].name}",
              "updates to 90 % of its own gain",
              *(f"… of the gain of {name}" for name in goals), "seconds"]
    rows = []
    for arm in arms:
        apart = [a - b for a, b in zip(arm.accuracy, arms[0].accuracy)]
        reach = [shown_arrival(arm.curves, start, end) if arm.curves else None
                 for end in [None, *ends.values()]]
        rows.append([arm.name, f"{arm.run.learning_rate:g}", plus_minus(arm.accuracy),
                     None if arm is arms[0] else plus_minus(apart, "+"), *reach,
                     f"{mean(record['seconds'] for record in arm.records):.0f}"])
    return md_table(header, rows)


def judge_tables(arms: list[Arm], do) -> list[str]:
    """The reward models: what they say of themselves, and R_φ against the truth."""
    first = {judge_of(arm.run): arm for arm in reversed(arms) if judge_of(arm.run)}
    if not first:
        return []
    judged = {first[judge]: do([judge])[0] for judge in reversed(first)}
    tokens, lengths = [], []

    def add_row(who, where, found):
        means = (average([each[figure] for each in found]) for figure in _TOKENS)
        tokens.append([who, where, *means])

    for arm in arms:
        if "tokens" in judged.get(arm, {}):
            add_row(arm.name, "the base", [judged[arm]["tokens"]])
        if after := [record["judge"] for record in arm.records if "judge" in record]:
            add_row(arm.name, "its policies", after)
    for arm, judge in judged.items():
        for label, (right, count) in sorted(judge.get("lengths", {}).items()):
            sign, kind, length = label.split()
            what = {"quoted": "precision", "true": "recall"}[kind]
            lengths.append([arm.name, sign, what, length, count, right / count])
    return [
        "Reward models, by annotations that they did not see:",
        "\n".join(f"- {arm.name}: {judge['said']}" for arm, judge in judged.items()),
        "R_φ against the truth, token by token, on responses to held-out posts:",
        md_table(["", "responses of", *(name.replace("_", " ") for name in _TOKENS)], tokens),
        ("The same by the length of spans (6: or more), on responses of the base. Precision is "
         "of quoted spans, recall of true ones; a span is right if over half of its characters "
         "have its label on the other side:"),
        md_table(["", "spans", "", "tokens", "in all", "share right"], lengths)]


_TOKENS = ("good_precision", "good_recall", "poor_precision", "poor_recall")


def average(values: list[float | None]) -> float | None:
    """The mean of those that there are."""
    known = [v for v in values if v is not None]
    return mean(known) if known else None


# ── Figures and pages

_COLOURS = ("#2f7fd1", "#c9700a", "#1a9a7a", "#8a63d2", "#c2477f", "#7d8f1f", "#8a6a4a",
            "#4aa3b5", "#a04a3a")
_LOOK = ("svg{color:#1b2027}"
         "@media(prefers-color-scheme:dark){svg{color:#e4e8ec}}")


def figure(titles: tuple[str, str, str], lines: dict[str, list], dots: dict[str, tuple]) -> str:
    """SVG: left, lines of (x, y, least, most) with bands; right, (value, least, most) by name.

    A name has one colour on both sides. titles: of the left, of its x axis, of the right.
    """
    colours = dict(zip([*dots], _COLOURS))
    points = [point for line in lines.values() for point in line]
    bottom, low = max(300, 60 + 26 * len(dots)), 56 + 26 * len(dots)
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 960 {bottom + 20}" '
           f'role="img" font-size="12" fill="currentColor" '
           f'font-family="system-ui,sans-serif"><style>{_LOOK}</style>']

    def text(x, y, said, anchor="start", more=""):
        out.append(f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {more}>'
                   f'{escape(said)}</text>')

    def grid(path):
        out.append(f'<path d="{path}" stroke="currentColor" opacity=".16"/>')

    text(10, 18, titles[0], more='font-weight="600"')
    text(500, 18, titles[2], more='font-weight="600"')
    text(265, bottom + 14, titles[1], "middle", 'opacity=".75"')
    xs = ticks(min(p[0] for p in points), max(p[0] for p in points), 6)
    ys = ticks(min(p[2] for p in points), max(p[3] for p in points))
    across, up = scale(xs, 50, 480), scale(ys, bottom - 20, 34)

    def path_of(points, i):
        return " ".join(f"{across(p[0]):.1f},{up(p[i]):.1f}" for p in points)

    for y in ys:
        grid(f"M50 {up(y):.1f}H480")
        text(44, up(y) + 4, f"{y:g}", "end", 'opacity=".75"')
    for x in xs:
        text(across(x), bottom - 3, f"{x:g}", "middle", 'opacity=".75"')
    for name, line in lines.items():
        band = f"{path_of(line, 2)} {path_of(line[::-1], 3)}"
        out += [f'<polygon points="{band}" fill="{colours[name]}" opacity=".1"/>',
                f'<polyline points="{path_of(line, 1)}" fill="none" '
                f'stroke="{colours[name]}" stroke-width="2"/>']
    marks = ticks(min(d[1] for d in dots.values()), max(d[2] for d in dots.values()), 4)
    along = scale(marks, 670, 850)
    for mark in marks:
        grid(f"M{along(mark):.1f} 32V{low - 16}")
        text(along(mark), low, f"{mark:g}", "middle", 'opacity=".75"')
    for i, (name, (value, least, most)) in enumerate(dots.items()):
        y, colour = 50 + 26 * i, colours[name]
        text(660, y + 4, name, "end", f'fill="{colour}" font-weight="600"')
        out += [f'<path d="M{along(least):.1f} {y}H{along(most):.1f}" stroke="{colour}" '
                f'stroke-width="2"/>',
                f'<circle cx="{along(value):.1f}" cy="{y}" r="4.5" fill="{colour}"/>']
        text(868, y + 4, f"{value:.3g}")
    return "".join(out) + "</svg>\n"


def scale(marks: list[float], begin: float, end: float):
    """The line that takes the first mark to `begin` and the last to `end`."""
    return lambda value: begin + (end - begin) * (value - marks[0]) / (marks[-1] - marks[0])


def spread(values: list[float]) -> tuple[float, float, float]:
    """(mean, least, most) of the 95 % interval."""
    centre, half = interval(values)
    return centre, centre - half, centre + half


def arm_figure(arms: list[Arm]) -> str:  # Figure 5; Figure 6
    """The smoothed curves of every arm by rollouts, and its held-out accuracy."""
    lines = {}
    for arm in arms:
        if arm.curves:
            steps = enumerate(zip(*map(smooth, arm.curves)))
            lines[arm.name] = [(i * arm.run.batch, *spread(values)) for i, values in steps]
    return figure(("right facts in training rollouts", "rollouts", "right facts, held out"),
                  lines, {arm.name: spread(arm.accuracy) for arm in arms})


def md_table(header: list[str], rows: list[list]) -> str:
    """A Markdown table: numbers with three decimals, None as a dash."""
    def line(values):
        cells = []
        for value in values:
            cells.append("–" if value is None else
                         f"{value:.3f}" if isinstance(value, float) else str(value))
        return f"| {' | '.join(cells)} |"

    return "\n".join([line(header), "|" + "---|" * len(header), *map(line, rows)])


def machine() -> str:
    """What the runs were made on."""
    info = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.*)", info.read_text()) if info.exists() else []
    return (f"{names[0] if names else platform.machine()}, {os.cpu_count()} cores, "
            f"{platform.system()}, Python {platform.python_version()}, "
            f"torch {torch.__version__}")


def kept_words(path: Path) -> str:
    """What people wrote on a page below "What was found"; "" where there is nothing."""
    page = path.read_text() if path.exists() else ""
    found = re.search(r"^## What was found\n(.*?)(?=^## )", page, re.DOTALL | re.MULTILINE)
    return found.group(1).strip() if found else ""


_TUNED = {4: "the true critic without noise, and all have its rate",
          6: "the first arm, and both have its rate",
          8: "both settings at batches of 32, and those of 8 have the same"}


def listed(values) -> str:
    """Numbers, with commas between them."""
    return ", ".join(f"{value:g}" for value in values)


def how(number: int, plan: Plan, records: list[dict], quick: bool) -> str:
    """Everything that is needed to judge a study, or to repeat it."""
    tuned = f"none, {plan.rates[0]:g} for all"
    if plan.tuning:
        tuned = (f"grid {listed(plan.rates)} for {_TUNED.get(number, 'every arm')}; seed "
                 f"{listed(plan.tuning)}; the smallest rate within 0.01 of the best on "
                 f"{HELD_OUT} held-out posts that are not the reported ones")
    seconds = sum(record["seconds"] for record in records)
    return "\n".join(f"- {line}" for line in (
        f"Command: `python -m experiments.studies --study {number}{' --quick' * quick}`. Date: "
        f"{time.strftime('%Y-%m-%d')}. Machine: {machine()}.",
        f"Time: {seconds:.0f} seconds, summed over {len(records)} jobs of one thread, two at a "
        f"time; studies share jobs.",
        f"Seeds: {listed(plan.seeds)}. A seed draws the training posts, the adapter's first "
        f"values and every sample. Differences are paired by seed.",
        "Intervals: 95 %; of means by Student's t over seeds, of updates by resampling seeds.",
        f"Tuning of the learning rate: {tuned}.",
        f"Budget of a run: {plan.updates * plan.batch} rollouts, in updates of {plan.batch} if "
        f"nothing else is said, each used for {STEPS} optimizer steps; a method that is fitted "
        f"to rows gets as many responses and steps. LoRA on toy/base; all other settings as "
        f"text2grad.py and baselines.py have them.",
        f"Held out: one sampled summary of each of {HELD_OUT} posts of the split eval.",
        f"Reward models: trained once, on {plan.judge_rows} responses of the base to other "
        f"posts (PPO: a pair for each post), and shared by all seeds: the intervals do not "
        f"hold what another one would change."))


def write_study(number: int, title: str, question: str, svg: str, parts: list[str], plan: Plan,
                do, config) -> Path:
    """Write figure and page of a study; what people wrote on the page stays."""
    name = f"{number}_{re.sub('[^a-z0-9]+', '_', title.lower())}"
    path = Path(config.output_dir) / f"{name}.md"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".svg").write_text(svg)
    words = kept_words(path)
    found = [f"## What was found\n\n{words}"] if words else []
    parts = [f"# Study {number}: {title}", question, *found, "## Table and figure",
             f"![{title}]({name}.svg)", *parts,
             "## How", how(number, plan, do.records, config.quick)]
    path.write_text("\n\n".join(parts) + "\n")
    return path


# ── The studies

TRUE = Run(reward="true")
HUMAN = "experiments.designs:critique_human"
DENSE = replace(TRUE, critic="experiments.designs:critique_dense")
COMPARED = {                            # number: title, question, arms, whose gains are goals
    1: ("Text2Grad and its baselines",
        "How far does each method get with as many rollouts, and how fast? The paper claims 22 "
        "% fewer steps than PPO.",
        {"Text2Grad": Run(), "PPO": Run("ppo"), "PRM-PPO": Run("prm_ppo"), "DPO": Run("dpo"),
         "SFT": Run("sft"), "ILF": Run("ilf"), "SFT + reflection": Run("reflection"),
         "PPO, R_φ's sum": Run(reward="end"),
         "PPO, true sum": replace(TRUE, reward="true_end")},
        ["Text2Grad", "PPO"]),
    2: ("Reward designs",
        "Which tokens should be paid (Table 11, Appendix I)? The true critic judges, so that "
        "only the design differs. Its own spans are single words, in which all weights are 1; "
        "weights are compared on its dense labels.",
        {"facts": TRUE, "dense labels": DENSE,
         "dense, importance": replace(DENSE, weighting="importance"),
         "dense, linear decay": replace(DENSE, weighting="linear_decay"),
         "human-like spans": replace(TRUE, critic=HUMAN),
         "end of sequence": replace(TRUE, reward="true_end")}, ["facts"]),
    3: ("Chain of thought",
        "What does the reasoning before the spans do for R_φ, and for the policy that it "
        "rewards (Tables 1, 2, 19)?",
        {"with": Run(), "without": Run(critic="experiments.designs:critique_no_cot")},
        ["with"]),
    5: ("Graded rewards",
        "Is δ of one greedy critique, −1, 0 or 1, enough, or is the mean of four sampled "
        "critiques better?",
        {"discrete": Run(), "graded": Run(reward="graded")}, ["discrete"]),
    6: ("Human-like feedback",
        "What if R_φ learns from rougher feedback: facts passed over, quotes too long, "
        "verdicts wrong?",
        {"programmatic": Run(), "human-like": Run(critic=HUMAN)}, ["programmatic"]),
    7: ("The price of a learned critic",
        "What would the true critic have given in R_φ's place?",
        {"R_φ": Run(), "true critic": TRUE}, ["R_φ"]),
}


def compared(number: int, plan: Plan, do, config) -> Path:
    """A study of tuned arms."""
    title, question, runs, goals = COMPARED[number]
    start = do([Run("base")])[0]["accuracy"]
    plan = replace(plan, seeds=plan.seeds[:3]) if number == 6 else plan
    tuned = follow(Run(), runs, plan, do) if number == 6 else tune(runs, plan, do)
    arms = reported(tuned, plan, do)
    parts = [arm_table(arms, start, goals),
             f"Before training: {start:.3f}. Updates are counted on the curve of the figure, "
             f"the mean over seeds of curves that are smoothed over three updates; a gain ends "
             f"at the mean of its curve's last three points."]
    if arms[0].tuned:
        rows = [[arm.name, *arm.tuned.values()] for arm in arms]
        parts += ["Right facts in tuning, by learning rate:",
                  md_table(["", *(f"{rate:g}" for rate in plan.rates)], rows)]
    return write_study(number, title, question, arm_figure(arms),
                       parts + judge_tables(arms, do), plan, do, config)


def noise(number: int, plan: Plan, do, config) -> Path:
    """Study 4: the true critic's labels, a share of them wrong; three seeds for many arms."""
    plan = replace(plan, seeds=plan.seeds[:3])
    start = do([Run("base")])[0]["accuracy"]
    kinds, shares = ("flipped", "shifted", "dropped"), (0.1, 0.2, 0.4)
    clean = replace(TRUE, critic="experiments.trials:noisy_critique")
    runs = {("none", 0): clean}
    runs |= {(kind, share): replace(clean, noise=kind, share=share)
             for kind in kinds for share in shares}
    arms = reported(follow(TRUE, runs, plan, do), plan, do)
    found = {arm.name: arm.accuracy for arm in arms}
    clean, rows = found["none", 0], []
    for (kind, share), right in found.items():
        apart = plus_minus([a - b for a, b in zip(right, clean)], "+") if share else None
        rows.append([f"{share:.0%} {kind}" if share else kind, plus_minus(right), apart,
                     f"{(mean(right) - start) / (mean(clean) - start):.0%}"])
    lines = {kind: [(0, *spread(clean)),
                    *((100 * share, *spread(found[kind, share])) for share in shares)]
             for kind in kinds}
    titles = "right facts, held out", "% of spans that are wrong", "right facts, 40 % wrong"
    svg = figure(titles, lines, {kind: spread(found[kind, 0.4]) for kind in kinds})
    header = ["wrong labels", "right facts, held out", "less none",
              "share of the gain that is left"]
    parts = [md_table(header, rows),
             f"Before training: {start:.3f}. All have the rate tuned for the true critic, "
             f"{arms[0].run.learning_rate:g}. Flipped labels change their sign, shifted ones "
             f"stand at the nearest word that has none, dropped ones are gone; which, is drawn "
             f"for every summary, and a summary of a post always gets the same reply."]
    question = "How fast does the gain fall with wrong spans, and which noise hurts most?"
    return write_study(number, "Wrong labels", question, svg, parts, plan, do, config)


def discrimination(number: int, plan: Plan, do, config) -> Path:
    """Study 8: Appendix A by its inequality, by advantages, and by the gradient's noise."""
    found, start = do([Trajectories(plan.posts), Run("base")])
    plan, pairs, runs = replace(plan, seeds=plan.seeds[:3]), found["pairs"], {}
    for setting, leader in {"A": TRUE, "B": replace(TRUE, reward="true_end")}.items():
        sizes = {f"{setting}, batch {batch}": replace(leader, batch=batch) for batch in (8, 32)}
        runs |= follow(leader, sizes, plan, do)
    arms = reported(runs, plan, do)
    lines = {name: [(x, y, y, y) for x, y in line] for name, line in found["places"].items()}
    equal = "batch at which noise equals signal"
    titles = "correlation of A_t with the truth of a fact token", "tokens after it", equal
    svg = figure(titles, lines, found["noise"])
    rows = [[name, found["all"][name], "{:.1f} ({:.1f} to {:.1f})".format(*values)]
            for name, values in found["noise"].items()]
    held = pairs["held"] / max(1, pairs["premise"])
    parts = [
        md_table(["", "correlation of A_t with δ_t", equal], rows),
        (f"On responses of the base to {plan.posts} held-out posts, four each, judged by the "
         f"true critic; V = 0, γ = 1, no KL. Setting A pays every token its δ, setting B their "
         f"sum at the last token. Correlation: over tokens of facts, δ = ±1. Noise equals "
         f"signal at a batch of tr Σ / |E g|² responses, g the policy gradient of one response "
         f"with whitened advantages; in brackets 95 % by resampling posts. In batches far "
         f"below that, twice the rollouts are worth twice as much; far above it, nothing."),
        (f"The inequality ΔA^A_t > ΔA^B_t, at γλ = .95, for {pairs['pairs']} pairs of equally "
         f"long responses to one post, one better by Σ δ: its premise (some Δδ_k > 0 with t ≤ "
         f"k < T) holds at {pairs['premise']} of {pairs['places']} places, and there the "
         f"inequality holds at {held:.1%}. The factor 0.95^−(T−k) is {found['alpha']:.2f} in "
         f"the mean over tokens of facts."),
        "What this means in training, with equal rollouts in small and large batches:",
        arm_table(arms, start["accuracy"], [])]
    question = "What does Appendix A come to on real trajectories?"
    return write_study(number, "Discriminative power", question, svg, parts, plan, do, config)


# ── Command line

@dataclass
class StudyConfig:
    """Which studies, and where they go."""
    study: str = flag("all", "1 to 8, or all", ("all", *"12345678"))
    quick: bool = flag(False, "two seeds, short runs, nothing tuned: shows that all works")
    output_dir: str | None = flag(None, "for pages; none: notebooks/studies, or with --quick "
                                  "runs/studies/quick")
    cache: str = flag("runs/studies", "records of runs that are done, and the reward models")
    workers: int = flag(2, "runs at once, one core each", least=1)


class Desk:
    """Does jobs, and remembers the records that a study rests on."""

    def __init__(self, cache: Path, pool):
        self.cache, self.pool, self.seen = cache, pool, {}

    def __call__(self, jobs: list) -> list[dict]:
        self.seen |= dict(zip(jobs, settle(jobs, self.cache, self.pool)))
        return [self.seen[job] for job in jobs]

    @property
    def records(self) -> list[dict]:
        """One for every job."""
        return [*self.seen.values()]


def main(argv=None):
    """Do studies and write their pages."""
    config = parse_flags(StudyConfig, sys.argv[1:] if argv is None else argv, __doc__)
    studies = dict.fromkeys(COMPARED, compared) | {4: noise, 8: discrimination}
    wanted = [number for number in sorted(studies) if config.study in ("all", str(number))]
    pages = "runs/studies/quick" if config.quick else "notebooks/studies"
    config = replace(config, output_dir=config.output_dir or pages)
    plan, started = QUICK if config.quick else Plan(), time.time()
    with workers(config.workers) as pool:
        for number in wanted:
            path = studies[number](number, plan, Desk(Path(config.cache), pool), config)
            print(f"{path} ({time.time() - started:.0f} s so far)")


if __name__ == "__main__":
    run_script(main, "studies")
