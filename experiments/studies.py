"""Studies of the paper's claims and open questions in the toy world, where the truth is known.

    python -m experiments.studies --study 1            # writes runs/studies/1_….md and .svg
    python -m experiments.studies --study all          # all of them; many hours on two cores
    python -m experiments.studies --study 1 --tune     # searches its learning rates

A study compares several arms. They are data: studies.toml names each arm with its learning rate
and with the fields of `Run` that it changes. --tune searches a rate with two other seeds, on
posts of the training split that this run does not train on. A study trains each arm with
several seeds, each with its own reward models, and writes a page with a table and curves.

The record of a run is one line of records.jsonl, beside the pages. A stopped study can
therefore resume, and studies share runs. Reward models are kept in --cache. Delete both after
a change of code. Runs are executed in parallel processes with one thread each. The section
"What was found" of a page is written by people; a new run of the study keeps it.

Paper: §4.3, Tables 1, 2 and 11, Figures 3, 5 and 6, Appendices A, I and N. B rows, T tokens.
"""

import math
import multiprocessing
import os
import platform
import re
import time
import tomllib
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, permutations
from operator import attrgetter
from pathlib import Path
from shutil import rmtree
from statistics import fmean as mean
from tempfile import TemporaryDirectory

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

import toy
from data import (InputError, append_row, checksum, chunks, read_rows, run_script, whole_rows,
                  write_rows)
from experiments.advantages import ADVANTAGES, position_mean
from experiments.baselines import METHODS, annotate_rows, fit_scores, reflect
from experiments.designs import ANNOTATORS, DESIGNS, LEARNT, SCORED, true_critic
from model import load_lora, load_model, lora_parameters
from policy import (add_advantages, add_feedback, forward, gae, reward_model_critic,
                    sample_rollouts, train, whiten)
from report import svg_line, table
from reward_model import count_tokens, fit, token_figures
from sampling import head_weight, token_logprobs
from settings import Config, flag, parse_flags
from text2grad import start_policy

# ── Runs: what a study compares

POSTS = 3000                            # training posts of the policy
BETA = 0.2                              # initial β, as in the paper for SLF5K
RATES = (3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2)     # learning rates
TUNING = (100, 101)                     # seeds of the tuning runs
CHANCE = 0.6                            # a scored reward model below this is drawn again
DRAWS = 5                               # at most so often


@dataclass(frozen=True)
class Run:
    """All settings of one training run of a policy or a reward model, or of a measurement."""
    method: str = "critique"        # key of DESIGNS or METHODS, "two_rounds", or see `work`
    advantages: str = "gae"         # or a key of ADVANTAGES
    annotator: str = "careful"      # key of ANNOTATORS: labels R_φ's rows, or judges rollouts
    settings: tuple = ()            # (name, value) of changed fields of text2grad.Config
    judge: tuple = ()               # (name, value) of changed fields of R_φ's RewardConfig
    length: int = toy.LENGTH        # sentences per summary, about 20 tokens each
    updates: int = 16               # number of batches; each is used for 4 optimizer steps
    batch: int = 24                 # rollouts per batch
    rows: int = 3000                # annotated rows for R_φ
    rate: float = 0.0               # learning rate
    seed: int = 0
    posts: int = 300                # held-out posts for evaluation

    @property
    def critic(self) -> str:
        """Who judges the rollouts."""
        return "annotator" if self.method.startswith("true") else "reward model"


@dataclass(frozen=True)
class Study:
    """One study: its question, its arms by name, and what its page says about its limits."""
    title: str
    question: str
    cannot: str                     # what the study cannot show
    arms: dict[str, Run]
    shown: Sequence[str] = ()       # arms of the small table at the top of the page
    tuned: Sequence[str] = ()       # arms with a rate that `tune` has found
    trajectories: Sequence[Run] = ()          # runs of `follow_trajectories` on the base
    compared: Sequence[str] = ("length",)     # fields of Run that an arm shares with its first
    seeds: int = 5


def read_study(title, question, cannot, arms, trajectories=(), shown=(), **fields) -> Study:
    """A study from its table in studies.toml, which explains the names."""
    runs = {}
    tuned = []
    for name, values in arms.items():
        if "tuned_rate" in values:
            values["rate"] = values.pop("tuned_rate")
            tuned.append(name)
        for changes in ("settings", "judge"):
            values[changes] = tuple(values.get(changes, {}).items())
        runs[name] = Run(**values)
    measurements = [Run("look", length=length, posts=256)
                    for length in trajectories]
    shown = shown or [*runs][:8]
    return Study(title, question, cannot, runs, shown, tuned, measurements, **fields)


DATA = tomllib.loads(Path(__file__).with_name("studies.toml").read_text(encoding="utf-8"))
STUDIES = {number: read_study(**fields) for number, fields in DATA.items()}


# ── Runs and their records

MODELS = "reward_models.jsonl"          # records of the reward models, in --cache


def key(fields: dict) -> str:
    """A short name for a run: a hash of its fields."""
    return checksum(state=fields)[:16]


def read_records(file: Path) -> dict[str, dict]:
    """The records in a file: key of the run → record. A record without its rate: InputError."""
    records = whole_rows(file)
    for number, record in enumerate(records, 1):
        if "rate" not in record.get("run", {}):
            raise InputError(f"{file}, line {number}: the record does not name its learning "
                             f"rate; remove the line, and its run is repeated")
    return {key(record["run"]): record for record in records}


def judge_of(run: Run) -> Run | None:
    """The run that trains the reward model of this run, or None."""
    if run.method not in (*LEARNT, *SCORED, "two_rounds", "reflection"):
        return None
    reward_type = run.method if run.method in SCORED else "critique"
    rows = run.rows // 2 if run.method == "two_rounds" else run.rows
    return Run(f"fit {reward_type}", annotator=run.annotator, judge=run.judge, rows=rows,
               length=run.length, seed=run.seed, posts=run.posts)


def settle(file: Path, cache: Path, pool, runs) -> list[dict]:
    """The records of runs, in order. The pool first executes the runs that the file lacks.

    The reward models of these runs are trained before them. Raises InputError if a run fails.
    """
    records = read_records(file)
    missing = [run for run in dict.fromkeys(runs) if key(vars(run)) not in records]
    judges = [*filter(None, map(judge_of, missing))]
    if judges:
        settle(cache / MODELS, cache, pool, judges)
    results = pool.map(partial(work, file=file, cache=cache), missing)
    for run in tqdm(missing, "runs", disable=not missing):
        try:
            next(results)
        except Exception as error:
            raise InputError(f"{run} failed: {type(error).__name__}: {error}") from error
    records = read_records(file)
    return [records[key(vars(run))] for run in runs]


def work(run: Run, file: Path, cache: Path):
    """Execute a run in one thread, without output, and append its record to the file."""
    torch.set_num_threads(1)
    start = time.process_time()
    functions = {"fit": fit_judge, "try": fit_judge, "look": follow_trajectories}
    function = functions.get(run.method.split()[0], train_policy)
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        record = function(run, cache)
    seconds = time.process_time() - start
    append_row(file, {"run": vars(run), **record, "seconds": seconds})


def config_of(run: Run, out: Path) -> Config:
    """The flags of text2grad.py for a run. Flags that are not set here keep their defaults."""
    function, mode = ANNOTATORS[run.annotator]
    config = replace(
        parse_flags(Config, argv=[]),
        output_dir=str(out), seed=run.seed, annotator_function=function, mode=mode,
        annotated_rows=run.rows,
        learning_rate=run.rate, kl_coef=BETA, iterations=run.updates,
        value_rate_factor=7e-3 / (run.rate or 1.0), kl_horizon=run.updates * run.batch // 10,
        batch_size=run.batch, minibatch_size=run.batch,
        max_new_tokens=28 * run.length,
        max_critique_tokens=40 + 56 * run.length)
    return replace(config, **dict(run.settings))


def judge_settings(config: Config, **changes):
    """R_φ's settings in all records: three passes at .003, more than the default."""
    return replace(config, **{"reward_epochs": 3, "reward_learning_rate": 3e-3} | changes)


def fit_judge(run: Run, cache: Path) -> dict:
    """Train a reward model, save it in CACHE/KEY/reward/adapter, and evaluate it → record.

    R_φ is evaluated on responses of the base, with `probe_reward_model`. The others are
    evaluated by their accuracy on held-out examples ("right"). One at chance is trained again
    with other rows and another start; "draws" counts this. Raises InputError after DRAWS. The
    method "try …" trains once, to tune the settings.
    """
    out = cache / key(vars(run))
    verb, reward_type = run.method.split()
    for draw in range(1 if verb == "try" else DRAWS):
        rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
        config = config_of(replace(run, seed=run.seed + 10_000 * draw), out)
        model, tokenizer = load_model(toy.BASE, device="cpu")
        rows = toy.rows("train", run.rows, 1000 + config.seed, run.length)
        if reward_type not in SCORED:
            break
        changes = {f"reward_{name}": value for name, value in run.judge}
        right = fit_scores(model, tokenizer, rows, config, out, reward_type, **changes)
        if right >= CHANCE or verb == "try":
            return {"right": right, "draws": draw + 1}
    else:
        raise InputError(f"{DRAWS} reward models have an accuracy below {CHANCE}, the last "
                         f"{right:.3f}: more annotated rows or other settings are needed")
    annotate_rows(model, tokenizer, rows, config, out)
    changes = {f"reward_{name}": value for name, value in run.judge}
    fit(model, tokenizer, judge_settings(config, **changes), out / "feedback.jsonl",
        out / "reward")
    rollouts = sample_answers(model, tokenizer, run, config, None)
    return probe_reward_model(rollouts, model, tokenizer, config, reward_model_critic)


def probe_reward_model(rollouts, model, tokenizer, config: Config, critic) -> dict:
    """Precision and recall of a critic's token labels against the careful annotator (Table 1).

    The label of a token is the sign of δ if |δ| ≥ 0.5, and 0 otherwise. For `graded`, δ is a
    mean, so at least half of the critiques must agree on a label.
    """
    function, mode = ANNOTATORS["careful"]
    careful = replace(config, annotator_function=function, mode=mode)
    truths = true_critic(rollouts, model, tokenizer, careful)
    judgements = critic(rollouts, model, tokenizer, config)
    counts = Counter()
    for truth, judgement in zip(truths, judgements):
        labels = [d if abs(d) >= 0.5 else 0 for d in judgement.delta]
        counts += count_tokens(truth.delta, labels)
    return token_figures(counts)


# Methods whose δ can be compared with spans. Other designs move rewards between tokens.
PROBED = ("critique", "two_rounds", "graded")


def train_policy(run: Run, cache: Path) -> dict:
    """Train and evaluate a policy → record; "curve": fact accuracy of each batch."""
    model, tokenizer = load_model(toy.BASE, device="cpu")
    rows = toy.rows("train", POSTS, run.seed, run.length)
    critic = DESIGNS.get(run.method)
    record = {}
    judge_run = judge_of(run)
    if judge_run:
        judge_key = key(vars(judge_run))
        load_lora(model, "reward", cache / judge_key / "reward" / "adapter")
        figures = read_records(cache / MODELS)[judge_key]
        record["before"] = figures.get("poor_recall", figures.get("right"))
        record["draws"] = figures.get("draws", 1)
    if run.method == "two_rounds":
        critic = renewed(run, read_rows(cache / judge_key / "feedback.jsonl"))
    with TemporaryDirectory() as directory:
        out = Path(directory)
        config = config_of(run, out)
        start_policy(model, config)
        if critic:
            advantages = ADVANTAGES.get(run.advantages, add_advantages)
            train(model, tokenizer, rows, config, out, critic, advantages)
        else:
            METHODS[run.method](model, tokenizer, rows, config, out)
        metrics = whole_rows(out / "metrics.jsonl")
    record["curve"] = [row["fact accuracy"] for row in metrics]
    record["kl"] = metrics[-1].get("kl") if metrics else None
    record["explained"] = [row["explained_variance"] for row in metrics
                           if "explained_variance" in row]
    for name, adapter, temperature in (
            ("start", None, 1.0),
            ("greedy", "policy", 0.0),
            ("accuracy", "policy", 1.0)):
        config = replace(config, temperature=temperature)
        rollouts = sample_answers(model, tokenizer, run, config, adapter)
        record[name] = mean(map(toy.fact_accuracy, rollouts.rows, rollouts.texts))
    # The last evaluation samples from the policy at temperature 1.
    record["omitted"] = mean(map(omitted_facts, rollouts.rows, rollouts.texts))
    record["tokens"] = rollouts.mask.sum().item() / len(rollouts.rows)
    if run.method in PROBED:
        critic = DESIGNS.get(run.method, reward_model_critic)
        record |= probe_reward_model(rollouts, model, tokenizer, config, critic)
    return record


def held_out_posts(run: Run) -> list[dict]:
    """The posts on which a run is evaluated.

    They are posts of the split "eval". For a seed of TUNING, they are posts of the split
    "train" that no run of this seed trains on. Raises InputError if tuning and results share a
    post.
    """
    posts = toy.rows("eval", run.posts, 0, run.length)
    if run.seed not in TUNING:
        return posts
    trained = {row["post"] for seed in (run.seed, 1000 + run.seed, 2000 + run.seed)
               for row in toy.rows("train", POSTS, seed, run.length)}
    tuning = [row for row in toy.rows("train", 4 * run.posts, 3000, run.length)
              if row["post"] not in trained][: run.posts]
    if {row["post"] for row in posts} & {row["post"] for row in tuning}:
        raise InputError("a post of the results is also a post of tuning: choose other splits")
    return tuning


def omitted_facts(row: dict, text: str) -> float:
    """Share of the slots for which a summary states no fact at all, right or wrong."""
    stated = {slot for _, slot, _ in toy.said_facts(text)}
    return len(row["facts"].keys() - stated) / len(row["facts"])


def sample_answers(model, tokenizer, run: Run, config: Config, adapter):
    """Sample responses to held-out posts. For reflection, return the rewritten responses."""
    posts = held_out_posts(run)
    generator = torch.Generator().manual_seed(run.seed)
    rollouts = sample_rollouts(model, tokenizer, posts, config, adapter, generator)
    if adapter and run.method == "reflection":
        rollouts.texts = reflect(rollouts, model, tokenizer, config, generator)
    return rollouts


def renewed(run: Run, feedback: list[dict]):
    """A critic that trains R_φ a second time after half of the updates (Algorithm 1 repeated).

    Responses of the current policy are annotated, and R_φ continues training on the old and the
    new feedback. The optimizer and β of the policy are not reset.
    """
    batches = count()

    def renewed_critique(rollouts, model, tokenizer, config):
        if next(batches) == config.iterations // 2:
            out = Path(config.output_dir) / "round-2"
            out.mkdir()
            posts = toy.rows("train", run.rows // 2, 2000 + run.seed)
            generator = torch.Generator().manual_seed(run.seed)
            batch = sample_rollouts(model, tokenizer, posts, config, "policy", generator)
            rows = [row | {"response": text} for row, text in zip(posts, batch.texts)]
            new_feedback = annotate_rows(model, tokenizer, rows, config, out)
            write_rows(out / "feedback.jsonl", feedback + new_feedback)
            fit(model, tokenizer, judge_settings(config), out / "feedback.jsonl",
                out / "reward")
        return reward_model_critic(rollouts, model, tokenizer, config)
    return renewed_critique


# ── Appendix A on real trajectories

# Setting → (whether Σ_t δ_t is paid at the last token, λ)
SETTINGS = {
    "A, λ = .95": (False, 0.95),
    "A, λ = 1": (False, 1.0),
    "B, λ = .95": (True, 0.95),
    "B, λ = 1": (True, 1.0)}
SAMPLES = 4                                        # responses per post


def follow_trajectories(run: Run, cache: Path) -> dict:
    """Measure settings A and B on responses of the base to held-out posts (Appendix A).

    δ comes from the true critic. V = 0, γ = 1, and there is no KL penalty.
    """
    model, tokenizer = load_model(toy.BASE, device="cpu")
    config = config_of(run, cache)
    posts = toy.rows("eval", run.posts, 2, run.length)
    posts = [row for row in posts for _ in range(SAMPLES)]
    generator = torch.Generator().manual_seed(2)
    rollouts = sample_rollouts(model, tokenizer, posts, config, None, generator)
    add_feedback(rollouts, true_critic(rollouts, model, tokenizer, config))
    start_policy(model, config)
    mask = rollouts.mask
    delta = rollouts.delta
    advantages = advantages_of(delta, mask)
    advantages["δ_t"] = delta                                         # two rungs of study 10
    advantages["A, λ = 1, minus the mean"] = position_mean(delta, mask, config)
    whitened = {name: whiten(a, mask) for name, a in advantages.items()}
    products = gradient_products(model, rollouts, range(0, len(posts), SAMPLES), whitened,
                                 lora_parameters(model, "policy"))
    has_reward = delta != 0                                                         # [B, T]
    last = mask.sum(1, keepdim=True) - 1
    remaining = (last - torch.arange(mask.shape[1]))[has_reward]                    # T − k
    alpha = 0.95 ** -remaining.float()                              # Eq. Appendix A α
    return {
        "tokens": mask.sum().item() / len(posts),
        "pairs": ordered_pairs(delta, mask, 0.95),
        "correlation": {name: correlation(a[has_reward], delta[has_reward])
                        for name, a in advantages.items()},
        "alpha": alpha.mean().item(),
        "noise": {name: noise_scale(dots) for name, dots in products.items()}}


def advantages_of(delta: Tensor, mask: Tensor) -> dict[str, Tensor]:  # Eq. §3.6 A^A
    """The advantages under each of SETTINGS: name → A_t, [B, T]. V = 0; r_T = Σ_t δ_t in B."""
    zeros = torch.zeros_like(delta)
    last = mask.sum(1, keepdim=True).long() - 1                                     # [B, 1]
    end_rewards = zeros.scatter(1, last, delta.sum(1, keepdim=True))
    return {name: gae(end_rewards if pays_at_end else delta, zeros, mask, 1.0, lam)[0]
            for name, (pays_at_end, lam) in SETTINGS.items()}


def correlation(x, y) -> float:
    """Pearson correlation of two vectors."""
    matrix = torch.corrcoef(torch.stack([x, y]).double())
    return matrix[0, 1].item()


def ordered_pairs(delta, mask, weight: float, samples=SAMPLES) -> dict:  # Eq. Appendix A ΔA
    """Count where the claim ΔA^A_t > ΔA^B_t of Appendix A holds, with w = weight.

    ΔA^A_t = Σ_{k≥t} w^(k−t) Δδ_k and ΔA^B_t = w^(T−t) Σ_{k≥t} Δδ_k. The appendix claims that
    ΔA^A_t > ΔA^B_t wherever some Δδ_k > 0 with t ≤ k < T (the premise). A pair is two responses
    of equal length to one post. Δ is the difference between the response with the larger Σ δ
    and the other. Returns the numbers of "pairs", of "places" (all t < T), of places where the
    premise holds ("premise"), and of those where the claim holds, too ("held"). delta, mask:
    [B, T], with `samples` neighbouring rows per post.
    """
    def tail_sum(x):
        return x.flip(0).cumsum(0).flip(0)                                  # Σ_{k≥t} x_k

    counts = Counter(pairs=0, places=0, premise=0, held=0)
    lengths = mask.sum(1).int().tolist()
    sums = delta.sum(1).tolist()
    for group in chunks(range(len(delta)), samples):
        for i, j in permutations(group, 2):
            if lengths[i] != lengths[j] or sums[i] <= sums[j]:
                continue
            T = lengths[i]
            difference = (delta[i] - delta[j])[:T].double()                 # Δδ, [T]
            power = weight ** torch.arange(T)
            a = tail_sum(difference * power) / power                        # ΔA^A, [T]
            b = tail_sum(difference) * power.flip(0)                        # ΔA^B, [T]
            premise = tail_sum((difference[:-1] > 0).int()) > 0             # [T − 1]
            is_larger = premise & (a > b + 1e-9)[:-1]
            counts["pairs"] += 1
            counts["places"] += T - 1
            counts["premise"] += int(premise.sum())
            counts["held"] += int(is_larger.sum())
    return counts


def gradient_products(model, rollouts, rows, advantages, parameters) -> dict[str, Tensor]:
    """g_i · g_j, where g_i = Σ_t A_t ∇ log π(y_t) is the gradient of one response → [B, B].

    rows: indices of the responses. advantages: name → A, [B, T]. The result has the same names.
    """
    gradients = {name: [] for name in advantages}
    for i in rows:
        hidden, targets = forward(model, rollouts, [i], "policy")            # [T, H]
        logprobs = token_logprobs(hidden, head_weight(model), targets)
        for name, a in advantages.items():
            objective = (a[i, : len(targets)] * logprobs).sum()
            parts = torch.autograd.grad(objective, parameters, retain_graph=True)
            gradients[name].append(torch.nn.utils.parameters_to_vector(parts))
    products = {}
    for name, vectors in gradients.items():
        matrix = torch.stack(vectors)
        products[name] = matrix @ matrix.T
    return products


def noise_scale(dots: Tensor) -> tuple[float, float, float]:
    """Batch size at which the noise of the gradient equals its signal → (value, low, high).

    tr Σ / |E g|² (McCandlish et al. 2018). low, high: 95 % bootstrap interval over posts.
    dots: g_i · g_j, [B, B].
    """
    n = len(dots)
    generator = torch.Generator().manual_seed(0)

    def scale(index):
        products = dots[index][:, index]
        signal = products[index[:, None] != index].mean()
        noise = products.diagonal().mean() - signal
        return (noise / signal).item() if signal > 0 else math.inf

    draws = [torch.randint(n, (n,), generator=generator) for _ in range(200)]
    scales = sorted(map(scale, draws))
    return scale(torch.arange(n)), scales[5], scales[194]


# ── Statistics over seeds

# 97.5 % quantiles of Student's t for 1 to 9 degrees of freedom.
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


def seed_interval(values):
    """(mean, half width of the 95 % interval by Student's t) of 2 to 10 values or curves."""
    n = len(values)
    deviation = np.std(values, 0, ddof=1)
    half = _T[n - 2] * deviation / math.sqrt(n)
    return np.mean(values, 0), half


def plus_minus(values: list[float], digits=3, sign="") -> str | None:
    """Format as "mean ± half width of the 95 % interval"; a single value alone; [] → None."""
    if len(values) < 2:
        return f"{values[0]:.{digits}f}" if len(values) else None
    centre, half = seed_interval(values)
    return f"{centre:{sign}.{digits}f} ± {half:.{digits}f}"


def p_value(differences) -> float:
    """Two-sided p of a paired t test of five differences against 0 (4 degrees of freedom)."""
    mean_difference = np.mean(differences)
    error = np.std(differences, ddof=1) / math.sqrt(5)
    if error == 0:
        return float(mean_difference == 0)
    t = abs(mean_difference) / error
    share = t * t / (4 + t * t)
    # The distribution function of Student's t in closed form.
    return 1 - 1.5 * math.sqrt(share) * (1 - share / 3)


def holm(p_values: dict[str, float]) -> set[str]:
    """The comparisons that are significant at 5 % after Holm's correction."""
    significant = set()
    for i, name in enumerate(sorted(p_values, key=p_values.get)):
        if p_values[name] > 0.05 / (len(p_values) - i):
            break
        significant.add(name)
    return significant


def smooth(curve: list[float]):
    """Moving average of each point and its two neighbours. The end points do not change."""
    means = np.convolve(curve, [1 / 3] * 3, "valid")
    return np.r_[curve[0], means, curve[-1]]


# ── Pages

@dataclass(eq=False)
class Arm:
    """The results of one arm of a study: its run, and the record of each seed."""
    name: str
    run: Run
    records: list[dict]

    def values(self, figure: str) -> list:
        """The values under one key of the records. Missing and empty values are left out."""
        values = [record.get(figure) for record in self.records]
        return [value for value in values if value not in (None, [])]

    def curves(self) -> list:
        """The smoothed curve of each seed."""
        return [*map(smooth, self.values("curve"))]

    def rollouts_to(self, goal: float) -> str:
        """Rollouts until the best value so far of the smoothed curve reaches the goal.

        goal: fact accuracy. Values between two points are interpolated linearly. The text also
        counts the seeds that never reach the goal.
        """
        rollouts = []
        for curve in self.curves():
            best = np.maximum.accumulate(curve)
            batches = np.interp(goal, best, range(len(best)), right=math.inf)
            rollouts.append(batches * self.run.batch)
        finite = [value for value in rollouts if value < math.inf]
        n_never = len(rollouts) - len(finite)
        note = f" ({n_never} of {len(rollouts)} never)" if n_never else ""
        return (plus_minus(finite, 0) or "–") + note


def with_first(arms: list[Arm], compared) -> list[tuple[Arm, Arm]]:
    """Pair each arm with the first arm whose run has equal values of the fields `compared`."""
    fields_of = attrgetter(*compared)
    firsts = {}
    return [(arm, firsts.setdefault(fields_of(arm.run), arm)) for arm in arms]


def difference_of(arm: Arm, first: Arm):
    """The accuracy of an arm minus that of the first arm, paired by seed."""
    return np.subtract(arm.values("accuracy"), first.values("accuracy"))


def small_table(study: Study, arms: list[Arm]) -> str:
    """The Markdown table at the top of a page: at most eight arms. Bold: see `holm`."""
    pairs = with_first(arms, study.compared)
    differences = {arm.name: difference_of(arm, first)
                   for arm, first in pairs if arm is not first}
    certain = holm({name: p_value(values) for name, values in differences.items()
                    if len(values) == 5})
    lines = ["| | rate | accuracy | minus first arm | KL |", "|---|---|---|---|---|"]
    for arm in arms:
        if arm.name in study.shown:
            difference = plus_minus(differences.get(arm.name, []), sign="+") or "–"
            if arm.name in certain:
                difference = f"**{difference}**"
            kl = plus_minus(arm.values("kl"), 1) or "–"
            lines.append(f"| {arm.name} | {arm.run.rate:g} | "
                         f"{plus_minus(arm.values('accuracy'))} | {difference} | {kl} |")
    note = (f"Bold: significant at 5 % after Holm's correction ({len(certain)} of the "
            f"{len(differences)} comparisons of this study).")
    return "\n".join([*lines, "", note, ""])


ARM_HEADER = ("", "rate", "start", "accuracy", "greedy", "minus first arm", "rollouts to 90 %",
              "KL", "omitted", "base recall", "recall", "precision", "seconds")


def arm_table(arms: list[Arm], compared) -> str:
    """The full table; each row compares an arm with the first one, see `with_first`."""
    rows = []
    for arm, first in with_first(arms, compared):
        start = mean(first.values("start"))
        end = mean(mean(curve[-3:]) for curve in first.values("curve"))
        rows.append([
            arm.name,
            f"{arm.run.rate:g}",
            plus_minus(arm.values("start")),
            plus_minus(arm.values("accuracy")),
            plus_minus(arm.values("greedy")),
            plus_minus(difference_of(arm, first), sign="+"),
            arm.rollouts_to(start + 0.9 * (end - start)),
            plus_minus(arm.values("kl"), 1),
            plus_minus(arm.values("omitted")),
            plus_minus(arm.values("before")),
            plus_minus(arm.values("poor_recall")),
            plus_minus(arm.values("poor_precision")),
            f"{mean(arm.values('seconds')):.0f}"])
    return f"""
```
{table([*ARM_HEADER], rows)}
```

The first arm of a row is the first one with the same {' and '.join(compared)}. \
[What the columns mean](README.md#the-tables)
"""


INDEX = f"""# Studies in the toy world

Each page answers one question with the code of this repository, in a world in which the truth \
is known. A page begins with what was found. Its full table, its method and what it cannot \
show stand below.

{{pages}}

## The tables

Rate: learning rate. Start: fact accuracy of the base on held-out posts at temperature 1. \
Accuracy: the same of the trained policy; greedy: with greedy decoding. Minus first arm: \
accuracy minus that of the first arm of its kind. Rollouts to 90 %: rollouts until an arm \
reaches 90 % of the first arm's gain, which is measured from the start to the mean of the last \
three points of its curve. KL: in nats per response, in the last batch. Omitted: share of \
facts that the final policy does not state at all. Recall and precision: of R_φ's poor tokens \
against the careful annotator's, on responses of the final policy. Base recall: the same on \
responses of the base; for scalar and step rewards, the share of held-out labels that the \
reward model gets right.

## The runs

A seed determines the training posts, the initial adapter and all samples. Each seed trains \
its own reward model on responses of the base. Intervals are 95 % intervals over seeds by \
Student's t, and differences are paired by seed. All seeds answer the same held-out posts, so \
an interval does not include the choice of posts. Intervals are not corrected for the number \
of comparisons; bold differences survive Holm's correction.

Tuning takes the rate of {RATES} with the best mean accuracy over the seeds {TUNING}, each \
with its own reward model, on posts of the training split that the tuning run itself does not \
train on; the held-out posts have other combinations. It tries rates until the best one has a \
worse one on each side. The rates of 40 and 80 tokens were tuned on 300 other posts of the \
split "eval"; none of them has the combination of facts of a held-out post. A reward model \
with scalar or step rewards that gets less than {CHANCE} of the held-out labels right is \
trained again with other rows.

Each batch of rollouts is used for 4 optimizer steps. Methods that train on fixed rows make \
at least one pass over them, and otherwise about as many steps (64). β starts at {BETA}.
"""


def write_index(out: Path):
    """Write README.md: the pages in `out`, each with its first finding, and the legends."""
    lines = []
    for path in sorted(out.glob("*_*.md"), key=lambda path: int(path.stem.split("_")[0])):
        page = path.read_text()
        title = page.partition("\n")[0].removeprefix("# ")
        finding = section(page, "## What was found", "![").strip().partition("\n")[0]
        lines.append(f"- [{title}]({path.name}) {finding}")
    (out / "README.md").write_text(INDEX.format(pages="\n".join(lines)))


def section(page: str, start: str, end: str) -> str:
    """The text between two marks of a page; empty if the first mark is missing."""
    return page.partition(start)[2].partition(end)[0]


def arm_figure(arms: list[Arm], compared) -> list[str]:  # Figure 5; Figure 6
    """One SVG chart of the smoothed accuracy over rollouts for each arm that has curves.

    Lines: the mean over seeds, the ends of its 95 % interval, and the mean of its first arm.
    """
    charts = []
    for arm, first in with_first(arms, compared):
        curves = arm.curves()
        if curves:
            centre, half = seed_interval(curves)
            baseline, _ = seed_interval(first.curves())
            lines = {"mean": centre, "low": centre - half, "high": centre + half,
                     "first arm": baseline}
            x = [arm.run.batch * i for i in range(len(centre))]
            charts.append(svg_line(f"{arm.name}: accuracy of rollouts", x, lines, "rollouts"))
    return charts


def trajectory_tables(records: list[dict]) -> str:
    """Tables and legends for records of `follow_trajectories`, by response length (App. A)."""
    settings_rows = []
    pair_rows = []
    for record in records:
        tokens = f"{record['tokens']:.0f}"
        for name, (value, low, high) in record["noise"].items():
            noise = f"{value:.1f} ({low:.1f} to {high:.1f})"
            settings_rows.append([name, tokens, record["correlation"][name], noise])
        pairs = record["pairs"].values()
        pair_rows.append([tokens, *pairs, record["alpha"]])
    settings_header = ["", "tokens", "correlation of A_t with δ_t",
                       "noise scale in responses"]
    pair_header = ["tokens", "pairs", "places", "premise holds",
                   "premise and ΔA^A > ΔA^B", "mean 0.95^−(T−k) of δ_k ≠ 0"]
    return f"""
```
{table(settings_header, settings_rows)}
```

Setting A pays each δ at its token, and setting B pays their sum at the last token. δ_t are \
the weights of Definition 1; "minus the mean" subtracts the mean of A over all responses at t. \
The responses are those of the base, judged by the true critic, with V = 0, γ = 1 and no KL. \
Tokens: mean length of a response. The correlation is over tokens with δ ≠ 0. The noise scale \
tr Σ / |E g|² is the batch size at which noise equals signal, where g is the policy gradient \
of one response with whitened advantages; in brackets: 95 % bootstrap interval over posts.

```
{table(pair_header, pair_rows)}
```

A pair is two responses of equal length to one post, one with a larger Σ δ; γλ = .95. A place \
is a position t < T of a pair. The premise of Appendix A is that some Δδ_k > 0 with t ≤ k < T.
"""


def trajectory_figure(records: list[dict]) -> str:
    """SVG of the noise scale of each setting over the length of responses."""
    tokens = [round(record["tokens"]) for record in records]
    noise = {name: [record["noise"][name][0] for record in records]
             for name in SETTINGS}
    return svg_line("noise scale in responses", tokens, noise, "tokens per response")


def sheet(charts: list[str], across: int = 3) -> str:
    """One SVG of charts of `svg_line`, each 340 × 180. across: number of charts per row."""
    out = "".join(f'<svg x="{350 * (i % across)}" y="{190 * (i // across)}" width="340" '
                  f'height="180">{chart}</svg>' for i, chart in enumerate(charts))
    height = 190 * math.ceil(len(charts) / across)
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {350 * across} {height}" '
            f'color="#777">{out}</svg>\n')


def describe_posts(run: Run) -> str:
    """Count the held-out posts of a run and their combinations of facts."""
    combinations = {tuple(row["facts"].values()) for row in held_out_posts(run)}
    return (f" At {20 * run.length} tokens, the {run.posts} held-out posts have "
            f"{len(combinations)} combinations of facts.")


def describe_training(study: Study) -> str:
    """The paragraph about the arms of a study: seeds, learning rates, sizes and posts."""
    run = next(iter(study.arms.values()))
    lengths = {run.length: run for run in study.arms.values()}
    return f"""\
Seeds: 0 to {study.seeds - 1}. Learning rate: tuned for {len(study.tuned)} of \
{len(study.arms)} arms; the others use the rate of a similar arm or a lower one. A run has \
{run.updates * run.batch} rollouts in batches of {run.batch}. [Intervals, tuning and \
seeds](README.md#the-runs).{"".join(map(describe_posts, lengths.values()))}"""


def write_study_page(path: Path, study: Study, arms: list[Arm], trajectories: list[dict]):
    """Write the page of a study. An old page keeps what people wrote: findings and details."""
    old = path.read_text() if path.exists() else ""
    findings = section(old, "## What was found", "![").strip()
    written = section(old, "## Details", "## Full table").strip()
    number = path.stem.split("_")[0]
    records = sum((arm.records for arm in arms), trajectories)
    seconds = sum(record["seconds"] for record in records)
    summary = ""
    tables = ""
    details = ""
    if arms:
        summary = small_table(study, arms)
        tables = arm_table(arms, study.compared)
        details = describe_training(study)
    if trajectories:
        tables += trajectory_tables(trajectories)
        details += (f" Trajectories: {SAMPLES} responses to each of "
                    f"{study.trajectories[0].posts} held-out posts.")
    path.write_text(f"""# Study {number}: {study.title}

{study.question}

## What was found

{findings}

![{study.title}]({path.stem}.svg)

{summary}
## Details

{written}

## Full table
{tables}
## How

`python -m experiments.studies --study {number}`, {time.strftime('%Y-%m-%d')}, \
{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}. The reported runs \
took {seconds:.0f} CPU seconds; other studies share some of them. {details.strip()}

## What it cannot show

{study.cannot} One toy world, one tiny base and short runs: methods may rank differently \
elsewhere.
""")


# ── Command line

@dataclass
class StudyConfig:
    """The flags: which studies to run, and where their pages are written."""
    study: str = flag("all", "number of a study, or all", ("all", *STUDIES))
    tune: bool = flag(False, "print the best rate of each arm with a tuned_rate, and no page")
    output_dir: str = flag("runs/studies", "directory of the pages, figures and records")
    cache: str = flag("runs/studies", "directory of the reward models of past runs")
    workers: int = flag(2, "number of parallel runs; each uses one core", least=1)


def tune_judge(run: Run, get_records) -> tuple:
    """The rate and passes of a scalar reward model with the best mean held-out accuracy."""
    passes = (4, 10) if run.rows > 1000 else (12, 40)
    judges = [(("learning_rate", rate), ("epochs", epochs))
              for rate in RATES[2:5] for epochs in passes]
    fits = [judge_of(replace(run, judge=judge, seed=seed))
            for judge in judges for seed in TUNING]
    tries = [replace(fit, method=fit.method.replace("fit", "try")) for fit in fits]
    rights = [mean(record["right"] for record in part)
              for part in chunks(get_records(tries), len(TUNING))]
    return judges[rights.index(max(rights))]


def tune(run: Run, get_records) -> float:
    """The rate of RATES with the best mean accuracy over the TUNING seeds.

    Three rates are tried first. If the best rate has no worse neighbour in RATES on one side,
    the next rate on that side is tried, too. get_records: see `do_study`.
    """
    accuracies = {}
    rates = RATES[2:5]
    while rates:
        tries = [replace(run, rate=rate, seed=seed)
                 for rate in rates for seed in TUNING]
        records = chunks(get_records(tries), len(TUNING))
        for rate, part in zip(rates, records):
            accuracies[rate] = mean(record["accuracy"] for record in part)
        best = max(sorted(accuracies), key=accuracies.get)
        i = RATES.index(best)
        neighbours = RATES[max(0, i - 1) : i + 2]
        rates = [rate for rate in neighbours if rate not in accuracies]
    return best


def do_study(number: str, study: Study, out: Path, get_records) -> Path:
    """Execute the runs of a study and write its page and figure → path of the page.

    get_records: function that maps runs to their records, see `settle`.
    """
    runs = [replace(run, seed=seed) for run in study.arms.values()
            for seed in range(study.seeds)]
    records = chunks(get_records(runs), study.seeds)
    arms = [*map(Arm, study.arms, study.arms.values(), records)]
    trajectories = get_records(study.trajectories)
    charts = arm_figure(arms, study.compared)
    if trajectories:
        charts.append(trajectory_figure(trajectories))
    title = re.sub("[^a-z0-9]+", "_", study.title.lower())
    path = out / f"{number}_{title}.md"
    path.with_suffix(".svg").write_text(sheet(charts))
    write_study_page(path, study, arms, trajectories)
    return path


def main():
    """Execute the chosen studies and print the paths of their pages, or tune their rates."""
    config = parse_flags(StudyConfig, __doc__)
    out = Path(config.output_dir)
    out.mkdir(parents=True, exist_ok=True)
    numbers = STUDIES if config.study == "all" else [config.study]
    with ProcessPoolExecutor(config.workers, multiprocessing.get_context("spawn")) as pool:
        get_records = partial(settle, out / "records.jsonl", Path(config.cache), pool)
        for number in numbers:
            study = STUDIES[number]
            if not config.tune:
                print(do_study(number, study, out, get_records))
                write_index(out)
                continue
            scored = {run.rows: run for run in study.arms.values() if run.method == "scalar"}
            for rows, run in scored.items():
                best = dict(tune_judge(run, get_records))
                print(f"reward model, {rows} rows: {dict(run.judge)}, best {best}")
            for name in study.tuned:
                rate = tune(study.arms[name], get_records)
                print(f"{name}: rate {study.arms[name].rate:g}, best {rate:g}")


if __name__ == "__main__":
    run_script(main, "studies")
