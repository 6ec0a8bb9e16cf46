"""Studies on the embedded world, where truth is known: what the paper claims or left open.

    python -m experiments.studies --study 1            # a page and figure in runs/studies/
    python -m experiments.studies --study all          # all nine, some hours on two cores
    python -m experiments.studies --study all --quick  # short runs: shows that everything works

A study is a table of arms: a name, and the `Run` behind it. One runner does them all: it tunes
the learning rate over one grid, with a seed and held-out posts that are not among the reported,
and writes a page with the arms' table and curves. What a run found is kept in --cache under a
hash of its settings: what was stopped goes on, and studies share runs; delete the cache after a
change of code. A run has a process and one thread of its own. People write what was found on
each page; a new run leaves it there.

Paper: §4.3, Tables 1, 2 and 11, Figures 3, 5 and 6, Appendices A, I and N. B rows, T tokens.
"""

from __future__ import annotations

import hashlib
import math
import multiprocessing
import os
import platform
import re
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import count, permutations, repeat
from pathlib import Path
from statistics import fmean as mean
from tempfile import TemporaryDirectory

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

import toy
from data import (InputError, chunks, flag, parse_flags, read_rows, run_script, whole_rows,
                  write_rows)
from experiments.baselines import METHODS, annotated, fit_scores, reflect
from experiments.designs import ANNOTATORS, DAMAGES, DESIGNS, LEARNT, SCORED, true_critic
from model import load_lora, load_model, lora_parameters
from report import svg_line, table
from reward_model import count_tokens, fit, token_figures
from sampling import head_weight, token_logprobs
from text2grad import (Config, add_feedback, forward, gae, reward_model_critic, reward_settings,
                       sample_rollouts, start_policy, train, whiten)

# ── Runs: what a study compares

POSTS = 3000                                       # to train on
BETA = 0.2                                         # the paper's, of SLF5K
RATES, TUNING = (3e-4, 1e-3, 3e-3), 100            # the grid of every arm, and its seed


@dataclass(frozen=True)
class Run:
    """One policy, or what it needs: all that the record depends on."""
    method: str = "critique"        # of DESIGNS or METHODS, or "two_rounds"; else see `work`
    annotator: str = "careful"      # whom R_φ learnt from, or who judges itself
    settings: tuple = ()            # of text2grad.Config, as (name, value)
    judge: tuple = ()               # of R_φ's RewardConfig
    length: int = toy.LENGTH        # sentences of a summary, of 20 tokens each
    updates: int = 16               # batches of rollouts, each for 4 optimizer steps
    batch: int = 24
    rows: int = 3000                # annotated for R_φ
    rate: float = 0.0
    seed: int = 0
    posts: int = 300                # held out, to be judged by


@dataclass(frozen=True)
class Study:
    """A page: its arms by name, how their rates are found, what it cannot show."""
    title: str
    question: str
    arms: dict[str, Run]
    cannot: str
    tuned: int | None = None        # this many arms, the others as the first; None: every arm
    looks: tuple[Run, ...] = ()     # at trajectories of the base
    seeds: int = 5


TRUE, END = Run("true"), Run("true_end")
DENSE = Run("true", annotator="dense")
NOISY = {f"{percent} % {kind}": Run(f"true_{kind}_{percent}")
         for kind in DAMAGES for percent in (10, 20, 40)}
LOOKS = tuple(Run("look", length=n, posts=256) for n in (1, 2, 4))
SMALL = "One world, one tiny base, short runs: an order of methods here is none elsewhere."
STUDIES = {
    1: Study(
        "Text2Grad and its baselines",
        "How far does each method get with as many rollouts, and how fast? The paper claims 22 "
        "% fewer steps than PPO.",
        {"Text2Grad": Run(), "PPO": Run("scalar"), "PRM-PPO": Run("steps"),
         "PPO, R_φ's sum": Run("end"), "PPO, true sum": END, "true critic": TRUE,
         "DPO": Run("dpo"), "SFT": Run("sft"), "ILF": Run("ilf"),
         "reflection": Run("reflection"), "SDPO": Run("sdpo")},
        "SFT imitates perfect references and ILF refinements by a function that reads "
        "the critique's corrections, which no real row brings. SDPO's policy was first taught "
        "to rewrite, from as many annotated rows again."),
    2: Study(
        "Reward designs",
        "Which tokens should be paid (Table 11, Appendix I)? The true critic judges, so that "
        "only the design differs; weights within spans are compared on its dense labels.",
        {"spans": TRUE, "dense labels": DENSE,
         "dense, importance": replace(DENSE, method="true_importance"),
         "dense, linear decay": replace(DENSE, method="true_linear_decay"),
         "human-like spans": Run("true", annotator="human"), "end of sequence": END},
        "Content words are told by a list, not by a tagger; and no person marked."),
    3: Study(
        "Chain of thought",
        "What does reasoning do for R_φ, and for the policy that it rewards (Tables 1, 2, 19)? "
        "Reasoning may stand in z, or only lead the annotator to what z says.",
        {"in z": Run(), "not in z": Run(annotator="no_cot"),
         "none, one verdict in ten wrong": Run(annotator="hasty")},
        "That an annotator errs in one verdict of ten without reasoning is assumed.",
        tuned=1, seeds=3),
    4: Study(
        "Wrong labels",
        "How fast does the gain fall with wrong spans, and which noise hurts most? Flipped "
        "ones change their sign, shifted ones stand at the nearest word that has none, dropped "
        "ones are gone.",
        {"none": TRUE, **NOISY},
        "The noise is independent of the text; an annotator's errors are not.",
        tuned=1, seeds=3),
    5: Study(
        "Graded rewards",
        "Is δ of one greedy critique, −1, 0 or 1, enough, or is the mean of four sampled "
        "critiques better?",
        {"discrete": Run(), "graded": Run("graded")},
        "Its facts are right or wrong: there is no degree to be learnt.",
        tuned=1, seeds=3),
    6: Study(
        "Human-like feedback",
        "What if R_φ learns from rougher feedback: facts passed over, quotes too long, "
        "verdicts wrong?",
        {"programmatic": Run(), "human-like": Run(annotator="human")},
        "A random generator played the people; theirs are other errors.",
        tuned=1, seeds=3),
    7: Study(
        "A critic that falls behind",
        "R_φ has learnt from the base's responses and is asked about those of a policy that "
        "has moved. What keeps it right, at equal annotations?",
        {"as it is": Run(), "β of .5": Run(settings=(("kl_coef", 0.5),)),
         "β of 1": Run(settings=(("kl_coef", 1.0),)),
         "R_φ of rank 128": Run(judge=(("lora_r", 128), ("lora_alpha", 256))),
         "four critiques": Run("graded"), "two rounds": Run("two_rounds"),
         "true critic": TRUE},
        "Two rounds cost a second phase 1 and 2; what a person's hour costs is not in "
        "the table.", tuned=1),
    8: Study(
        "Discriminative power", "What does Appendix A come to on real trajectories?", {},
        "The gradients are of the base, before any update, with V = 0 and without clipping.",
        looks=LOOKS),
    9: Study(
        "Placement and length",
        "The same δ per token, or as a sum at the end: how does the gain of placing it grow "
        "with the length of a response?",
        {f"{name}, {20 * n} tokens": replace(run, length=n)
         for n in (1, 2, 4) for name, run in (("placed", TRUE), ("at the end", END))},
        "80 tokens are no essay; the critic is the true one, which never errs; facts "
        "are as dense in long responses as in short ones.", looks=LOOKS),
}


# ── Doing a run, and keeping its record

def key(run: Run) -> str:
    """A name for the record of a run: a hash of all of its settings."""
    return hashlib.sha256(repr(run).encode()).hexdigest()[:16]


def judge_of(run: Run) -> Run | None:
    """The reward model that a run needs: trained once, and shared by all seeds."""
    if run.method not in (*LEARNT, *SCORED, "two_rounds", "reflection", "sdpo"):
        return None
    kind = run.method if run.method in SCORED else "critique"
    rows = run.rows // (1 + (run.method == "two_rounds"))
    return Run(f"fit {kind}", run.annotator, judge=run.judge, rows=rows, posts=run.posts)


def record_of(run: Run, cache: Path) -> dict:
    """What a run that is done has found."""
    return read_rows(cache / f"{key(run)}.json")[0]


def work(run: Run, cache: Path):
    """Do a run in one thread, without a word, and keep its record."""
    torch.set_num_threads(1)
    special, started = {"fit": fit_judge, "look": follow_trajectories}, time.process_time()
    does = special.get(run.method.split()[0], train_policy)
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        record = does(run, cache)
    record = {"run": asdict(run), **record, "seconds": time.process_time() - started}
    write_rows(cache / f"{key(run)}.json", [record])


def settle(cache: Path, pool, runs: list[Run]) -> list[dict]:
    """The records of runs, in order; the pool does what the cache lacks, each once."""
    absent = [run for run in dict.fromkeys(runs) if not (cache / f"{key(run)}.json").exists()]
    done = pool.map(work, absent, repeat(cache))
    for run in tqdm(absent, "runs", disable=not absent):
        try:
            next(done)
        except Exception as error:
            raise InputError(f"{run}: {type(error).__name__}: {error}") from error
    return [record_of(run, cache) for run in runs]


def settings(run: Run, out: Path) -> Config:
    """A run's settings for text2grad.py; what is not named has its default."""
    critic, mode = ANNOTATORS[run.annotator]
    return Config(output_dir=str(out), seed=run.seed, annotator_function=critic, mode=mode,
                  probe_rows=0,
                  learning_rate=run.rate, iterations=run.updates, batch_size=run.batch,
                  minibatch_size=run.batch, save_every=10**9, max_new_tokens=28 * run.length,
                  **{"kl_coef": BETA} | dict(run.settings))


def fit_judge(run: Run, cache: Path) -> dict:
    """A reward model → CACHE/KEY/reward/adapter; R_φ is judged by the truth, on the base's."""
    out, config = cache / key(run), settings(run, cache / key(run))
    out.mkdir(parents=True, exist_ok=True)
    model, tokenizer = load_model(toy.BASE, device="cpu")
    rows = toy.rows("train", run.rows, 1000)
    _, kind = run.method.split()
    if kind in SCORED:
        return {"right": fit_scores(model, tokenizer, rows, config, out, kind)}
    annotated(model, tokenizer, rows, config, out)
    fit(model, tokenizer, replace(reward_settings(config, out), **dict(run.judge)))
    rollouts = answers(model, tokenizer, run, config, None)
    return probe(rollouts, model, tokenizer, config, reward_model_critic)


def probe(rollouts, model, tokenizer, config: Config, critic) -> dict:
    """Precision and recall of a critic's tokens against the careful annotator's (Table 1).

    A token of mean δ counts as what half of the critiques or more say of it.
    """
    function, mode = ANNOTATORS["careful"]
    careful = replace(config, annotator_function=function, mode=mode)
    truth, counts = true_critic(rollouts, model, tokenizer, careful), Counter()
    for one, found in zip(truth, critic(rollouts, model, tokenizer, config)):
        said = [math.copysign(abs(d) >= 0.5, d) for d in found.delta]
        counts += count_tokens(one.delta, said)
    return token_figures(counts)


# Whose tokens are critiques': where a design moves the reward, there is nothing to compare.
PROBED = {"critique": reward_model_critic, "two_rounds": reward_model_critic,
          "graded": DESIGNS["graded"]}


def train_policy(run: Run, cache: Path) -> dict:
    """Train as the run says; the curve: right facts in rollouts before each update."""
    model, tokenizer = load_model(toy.BASE, device="cpu")
    rows = toy.rows("train", POSTS, run.seed, run.length)
    critic, judge, record = DESIGNS.get(run.method), judge_of(run), {}
    if judge:
        load_lora(model, "reward", cache / key(judge) / "reward" / "adapter")
        record["before"] = record_of(judge, cache).get("poor_recall")
    if run.method == "two_rounds":
        critic = renewed(run, read_rows(cache / key(judge) / "feedback.jsonl"))
    with TemporaryDirectory() as directory:
        out = Path(directory)
        config = settings(run, out)
        start_policy(model, config)
        if critic:
            train(model, tokenizer, rows, config, out, critic)
        else:
            METHODS[run.method](model, tokenizer, rows, config, out)
        curve = whole_rows(out / "metrics.jsonl")
    record["curve"] = [row["fact accuracy"] for row in curve]
    for name, temperature in (("greedy", 0.0), ("accuracy", 1.0)):
        cooled = replace(config, temperature=temperature)
        final = answers(model, tokenizer, run, cooled, "policy")
        record[name] = mean(map(toy.fact_accuracy, final.rows, final.texts))
    if run.method in PROBED:
        record |= probe(final, model, tokenizer, config, PROBED[run.method])
    return record


def answers(model, tokenizer, run: Run, config: Config, adapter):
    """A policy's responses to held-out posts; by reflection the second ones."""
    posts = toy.rows("eval", run.posts, int(run.seed == TUNING), run.length)
    generator = torch.Generator().manual_seed(run.seed)
    rollouts = sample_rollouts(model, tokenizer, posts, config, adapter, generator)
    if run.method == "reflection":
        rollouts.texts = reflect(rollouts, model, tokenizer, config, generator)
    return rollouts


def renewed(run: Run, feedback: list[dict]):
    """Algorithm 1 repeated: when half of the updates are done, the policy's own responses are
    annotated and R_φ learns on, from all rows so far; the policy's optimizer and β go on."""
    batches = count()

    def renewed_critique(rollouts, model, tokenizer, config):
        if next(batches) == config.iterations // 2:
            out = Path(config.output_dir) / "round-2"
            posts = toy.rows("train", run.rows // 2, 2000 + run.seed)
            generator = torch.Generator().manual_seed(run.seed)
            own = sample_rollouts(model, tokenizer, posts, config, "policy", generator)
            rows = [row | {"response": text} for row, text in zip(posts, own.texts)]
            out.mkdir()
            fresh = annotated(model, tokenizer, rows, config, out)
            write_rows(out / "feedback.jsonl", feedback + fresh)
            fit(model, tokenizer, reward_settings(config, out))
        return reward_model_critic(rollouts, model, tokenizer, config)
    return renewed_critique


# ── Appendix A on real trajectories

SETTINGS = {"A, λ = .95": (False, 0.95), "A, λ = 1": (False, 1.0), "B, λ = .95": (True, 0.95),
            "B, λ = 1": (True, 1.0)}
SAMPLES = 4                                        # responses to each post


def follow_trajectories(run: Run, cache: Path) -> dict:
    """Responses of the base to held-out posts, and the true critic's δ; V = 0, γ = 1, no KL."""
    model, tokenizer = load_model(toy.BASE, device="cpu")
    config, generator = settings(run, cache), torch.Generator().manual_seed(2)
    posts = toy.rows("eval", run.posts, 2, run.length)
    posts = [row for row in posts for _ in range(SAMPLES)]
    rollouts = sample_rollouts(model, tokenizer, posts, config, None, generator)
    add_feedback(rollouts, true_critic(rollouts, model, tokenizer, config))
    start_policy(model, config)
    mask, delta = rollouts.mask, rollouts.delta
    fact, advantages = delta != 0, advantages_of(delta, mask)
    whitened = {name: whiten(a, mask) for name, a in advantages.items()}
    dots = gradient_products(model, rollouts, range(0, len(posts), SAMPLES), whitened,
                             lora_parameters(model, "policy"))
    left = mask.sum(1, keepdim=True) - 1 - torch.arange(mask.shape[1])
    return {"tokens": mask.sum().item() / len(posts),
            "pairs": ordered_pairs(delta, mask, 0.95),
            "correlation": {name: correlation(a[fact], delta[fact])
                            for name, a in advantages.items()},
            "alpha": (0.95 ** -left[fact].float()).mean().item(),  # Eq. Appendix A α
            "noise": {name: noise_scale(products) for name, products in dots.items()}}


def advantages_of(delta: Tensor, mask: Tensor) -> dict[str, Tensor]:  # Eq. §3.6 A^A
    """A_t of both settings without V: B pays Σ_t δ_t at the last token. [B, T] each."""
    nothing, last = torch.zeros_like(delta), mask.sum(1, keepdim=True).long() - 1
    end = nothing.scatter(1, last, delta.sum(1, keepdim=True))
    return {name: gae(end if late else delta, nothing, mask, 1.0, lam)[0]
            for name, (late, lam) in SETTINGS.items()}


def correlation(x, y) -> float:
    """Pearson's."""
    return torch.corrcoef(torch.stack([x.double(), y.double()]))[0, 1].item()


def ordered_pairs(delta, mask, weight: float, samples=SAMPLES) -> dict:  # Eq. Appendix A ΔA
    """ΔA^A_t > ΔA^B_t, for equally long responses to one post, the first better, at all t < T.

    As Appendix A has it: ΔA^A_t = Σ_{k≥t} w^(k−t) Δδ_k and ΔA^B_t = w^(T−t) Σ_{k≥t} Δδ_k; it
    says that the first is the greater wherever any Δδ_k > 0 with t ≤ k < T. Better: by Σ δ.
    """
    def tail(x):
        return x.flip(0).cumsum(0).flip(0)                                  # Σ_{k≥t} x_k

    found = Counter(pairs=0, places=0, premise=0, held=0)
    lengths, sums = mask.sum(1).int().tolist(), delta.sum(1).tolist()
    for i, j in permutations(range(len(delta)), 2):
        T, one_post = lengths[i], i // samples == j // samples
        if one_post and lengths[j] == T and sums[i] > sums[j]:
            apart, power = (delta[i] - delta[j])[:T].double(), weight ** torch.arange(T)
            a, b = tail(apart * power) / power, tail(apart) * power.flip(0)
            premise = tail((apart[:-1] > 0).int()) > 0
            held = premise & (a > b + 1e-9)[:-1]
            found.update(pairs=1, places=T - 1, premise=int(premise.sum()),
                         held=int(held.sum()))
    return found


def gradient_products(model, rollouts, rows, advantages, parameters) -> dict[str, Tensor]:
    """g_i · g_j for the gradients g_i = Σ_t A_t ∇ log π(y_t) of single responses. → [B, B]"""
    found = {name: [] for name in advantages}
    for i in rows:
        hidden, targets = forward(model, rollouts.part([i]), "policy")                  # [T, H]
        logprobs = token_logprobs(hidden, head_weight(model), targets)
        for name, a in advantages.items():
            gain = (a[i, : len(targets)] * logprobs).sum()
            grads = torch.autograd.grad(gain, parameters, retain_graph=True)
            found[name].append(torch.cat([g.flatten() for g in grads]))
    return {name: (g := torch.stack(rows)) @ g.T for name, rows in found.items()}


def noise_scale(dots: Tensor) -> tuple[float, float, float]:
    """The batch at which a gradient's noise equals its signal, and a 95 % interval of it.

    tr Σ / |E g|² (McCandlish et al. 2018), over resampled posts. dots: g_i · g_j, [B, B].
    """
    rng, n = torch.Generator().manual_seed(0), len(dots)

    def scale(index):
        drawn, same = dots[index][:, index], (index[:, None] == index[None, :])
        signal = drawn[~same].mean()
        noise = drawn.diagonal().mean() - signal
        return (noise / signal).item() if signal > 0 else math.inf

    drawn = sorted(scale(torch.randint(n, (n,), generator=rng)) for _ in range(200))
    return scale(torch.arange(n)), drawn[5], drawn[194]


# ── Statistics over seeds

# The 97.5 % point of Student's t with 1 to 9 degrees of freedom.
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


def interval(values):
    """(mean, half width of the 95 % interval by Student's t), of 2 to 10 values or curves."""
    half = _T[len(values) - 2] * np.std(values, 0, ddof=1) / math.sqrt(len(values))
    return np.mean(values, 0), half


def plus_minus(values: list[float], digits=3, sign="") -> str | None:
    """Mean ± half of the 95 % interval; of one value itself, of none None."""
    if len(values) < 2:
        return f"{values[0]:.{digits}f}" if len(values) else None
    centre, half = interval(values)
    return f"{centre:{sign}.{digits}f} ± {half:.{digits}f}"


def smooth(curve: list[float]):
    """The mean of every point and its two neighbours; the ends, which have one, stay."""
    return np.r_[curve[0], np.convolve(curve, [1 / 3] * 3, "valid"), curve[-1]]


# ── Pages

@dataclass(eq=False)
class Arm:
    """One line of a study: its run, and the records of the reported seeds."""
    name: str
    run: Run
    records: list[dict]

    def of(self, figure: str) -> list:
        """What the seeds have of a figure."""
        found = [record.get(figure) for record in self.records]
        return [value for value in found if value not in (None, [])]

    def rollouts_to(self, goal: float) -> str:
        """Rollouts after which a smoothed curve's best, between two points on a line, reaches a
        share of right facts; how many seeds never show it."""
        bests = [np.maximum.accumulate(smooth(curve)) for curve in self.of("curve")]
        found = [self.run.batch * np.interp(goal, best, range(len(best)), right=math.inf)
                 for best in bests]
        reached = [x for x in found if x < math.inf]
        never = len(found) - len(reached)
        late = f" ({never} of {len(found)} never)" if never else ""
        return (plus_minus(reached, 0) or "–") + late


def arm_table(arms: list[Arm]) -> str:
    """A row for each arm, beside the first of its length, and what stands where."""
    header = ["", "rate", "at first", "right facts", "greedy", "less the first",
              "rollouts to 90 %", "recall, before", "recall", "precision", "seconds"]
    rows = []
    for arm in arms:
        first = next(other for other in arms if other.run.length == arm.run.length)
        apart = np.subtract(arm.of("accuracy"), first.of("accuracy"))
        start, end = np.mean([(curve[0], mean(curve[-3:])) for curve in first.of("curve")], 0)
        rows.append([arm.name, f"{arm.run.rate:g}",
                     plus_minus([curve[0] for curve in arm.of("curve")]),
                     plus_minus(arm.of("accuracy")), plus_minus(arm.of("greedy")),
                     plus_minus(apart, sign="+"),
                     arm.rollouts_to(start + 0.9 * (end - start)),
                     plus_minus(arm.of("before")[:1]), plus_minus(arm.of("poor_recall")),
                     plus_minus(arm.of("poor_precision")), f"{mean(arm.of('seconds')):.0f}"])
    return f"""
```
{table(header, rows)}
```

Right facts: in the first rollouts, before any update; of held-out posts, at T = 1 and greedy, \
and less the first arm's of the same length. Rollouts: to 90 % of that arm's gain, which ends \
at the mean of its curve's last three points. Recall and precision: of R_φ's poor tokens, by \
the careful annotator's, on responses of the base (before) and of the final policy.
"""


def arm_figure(arms: list[Arm]) -> list[str]:  # Figure 5; Figure 6
    """A chart of every arm that has curves: smoothed, by rollouts, with the 95 % interval over
    seeds, and the mean of the first arm of its length."""
    charts, firsts = [], {}
    for arm in arms:
        if curves := [smooth(curve) for curve in arm.of("curve")]:
            means, halves = interval(curves)
            lines = {"mean": means, "least": means - halves, "most": means + halves,
                     "the first": firsts.setdefault(arm.run.length, means)}
            x = [arm.run.batch * i for i in range(len(means))]
            charts.append(svg_line(f"{arm.name}: right facts in rollouts", x, lines,
                                   "rollouts"))
    return charts


def look_tables(looks: list[dict]) -> str:
    """What the base's trajectories say of Appendix A, at every length of a response."""
    settings = [[name, f"{look['tokens']:.0f}", look["correlation"][name],
                 "{:.1f} ({:.1f} to {:.1f})".format(*look["noise"][name])]
                for look in looks for name in SETTINGS]
    pairs = [[f"{look['tokens']:.0f}", *look["pairs"].values(), look["alpha"]]
             for look in looks]
    header = ["", "tokens", "correlation of A_t with δ_t", "batch at which noise equals signal"]
    below = ["tokens", "pairs", "their places", "where the premise holds",
             "and ΔA^A > ΔA^B too", "mean 0.95^−(T−k) of δ_k ≠ 0"]
    return f"""
```
{table(header, settings)}
```

Setting A pays every token its δ, setting B their sum at the last token: responses of the \
base, judged by the true critic; V = 0, γ = 1, no KL. Correlation: over tokens with δ ≠ 0. \
Noise equals signal at a batch of tr Σ / |E g|² responses, g the policy gradient of one \
response with whitened advantages; in brackets 95 % by resampling posts.

```
{table(below, pairs)}
```

Pairs of equally long responses to one post, one better by Σ δ, at γλ = .95; the premise of \
Appendix A: some Δδ_k > 0 with t ≤ k < T.
"""


def look_figure(looks: list[dict]) -> str:
    """The noise scale of the settings by the length of responses."""
    noise = {name: [look["noise"][name][0] for look in looks] for name in SETTINGS}
    return svg_line("batch at which noise equals signal",
                    [round(look["tokens"]) for look in looks], noise, "tokens of a response")


def sheet(charts: list[str], across: int = 3) -> str:
    """Charts of `svg_line`, 340 × 180 each, as one SVG."""
    out = "".join(f'<svg x="{350 * (i % across)}" y="{190 * (i // across)}" width="340" '
                  f'height="180">{chart}</svg>' for i, chart in enumerate(charts))
    height = 190 * math.ceil(len(charts) / across)
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {350 * across} {height}" '
            f'color="#777">{out}</svg>\n')


def write_page(path: Path, study: Study, arms: list[Arm], looks: list[dict], flags: str):
    """The page of a study; what people wrote below "What was found" stays."""
    page = path.read_text() if path.exists() else ""
    words = "".join(page.partition("## What was found")[1:]).partition("## Table and figure")
    run = [*study.arms.values(), *study.looks][0]
    rates = {0: "not tuned", 1: "tuned for the first arm, whose rate all have",
             None: "tuned for every arm"}[study.tuned]
    seconds = sum(record["seconds"] for record in sum((arm.records for arm in arms), looks))
    tables = (arm_table(arms) if arms else "") + (look_tables(looks) if looks else "")
    path.write_text(f"""# Study {path.stem[0]}: {study.title}

{study.question}

{words[0]}## Table and figure

![{study.title}]({path.stem}.svg)
{tables}
## How

`python -m experiments.studies --study {path.stem[0]}{flags}`, {time.strftime('%Y-%m-%d')}, \
{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}; {seconds:.0f} CPU \
seconds of the reported runs, which other studies share. \
Seeds: 0 to {study.seeds - 1}; each draws the training posts, the adapter's first values and \
every sample. Intervals: 95 %, by Student's t; differences are paired by seed. Learning rate: \
{rates}; of {RATES}, the smallest within 0.01 of the best by another seed, {TUNING}, and other \
held-out posts. A run has {run.updates * run.batch} rollouts, in updates of {run.batch}, each \
used for 4 optimizer steps; a method that is fitted to rows has as many responses and steps. β \
starts at {BETA}. Held out: {run.posts} posts. Reward models are trained once, on {run.rows} \
responses of the base, and shared by all seeds: no interval holds what another would change.

## What it cannot show

{study.cannot} {SMALL}
""")


# ── Command line

QUICK = {"updates": 5, "batch": 16, "rows": 240, "posts": 40, "rate": 1e-3}


@dataclass
class StudyConfig:
    """Which studies, and where they go."""
    study: str = flag("all", "1 to 9, or all", ("all", *map(str, STUDIES)))
    quick: bool = flag(False, "two seeds, short runs, nothing tuned: shows that all works")
    output_dir: str = flag("runs/studies", "for pages and figures")
    cache: str = flag("runs/studies", "records of runs that are done, and the reward models")
    workers: int = flag(2, "runs at once, one core each", least=1)


def tune(runs: list[Run], do) -> list[Run]:
    """Runs with the smallest rate that tunes within 0.01 of the best."""
    tries = [replace(run, rate=rate, seed=TUNING) for run in runs for rate in RATES]
    found = np.reshape([record["accuracy"] for record in do(tries)], (-1, len(RATES)))
    good = (found >= found.max(1, keepdims=True) - 0.01).argmax(1)
    return [replace(run, rate=RATES[first]) for run, first in zip(runs, good)]


def do_study(number: int, study: Study, config: StudyConfig, do) -> Path:
    """Do the runs of a study; write its page and figure."""
    if config.quick:
        arms = {name: replace(run, **QUICK) for name, run in study.arms.items()}
        looks = [replace(run, **QUICK) for run in study.looks]
        study = replace(study, arms=arms, looks=looks, tuned=0, seeds=2)
    runs = [*study.arms.values()]
    do([*filter(None, map(judge_of, runs))])
    if tuned := tune(runs[: study.tuned], do):
        runs = tuned + [replace(run, rate=tuned[0].rate) for run in runs[len(tuned):]]
    records = do([replace(run, seed=seed) for run in runs for seed in range(study.seeds)])
    arms = [*map(Arm, study.arms, runs, chunks(records, study.seeds))]
    looks = do(study.looks)
    charts = arm_figure(arms) + ([look_figure(looks)] if looks else [])
    name = re.sub("[^a-z0-9]+", "_", study.title.lower())
    path = Path(config.output_dir) / f"{number}_{name}.md"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".svg").write_text(sheet(charts))
    write_page(path, study, arms, looks, " --quick" if config.quick else "")
    return path


def main():
    """Do studies and write their pages."""
    config = parse_flags(StudyConfig, sys.argv[1:], __doc__)
    with ProcessPoolExecutor(config.workers, multiprocessing.get_context("spawn")) as pool:
        do = partial(settle, Path(config.cache), pool)
        for number, study in STUDIES.items():
            if config.study in ("all", str(number)):
                print(do_study(number, study, config, do))


if __name__ == "__main__":
    run_script(main, "studies")
