"""Studies of the paper's claims and open questions in the toy world, where the truth is known.

    python -m experiments.studies --study 1            # writes runs/studies/1_….md and .svg
    python -m experiments.studies --study all          # all of them; many hours on two cores
    python -m experiments.studies --study all --quick  # short runs, as a check of the code

A study compares several arms. An arm is a name and a `Run`. All studies follow one procedure.
It first tunes the learning rate, with seeds and held-out posts that the results do not use. It
then trains each arm with several seeds and writes a page with a table and curves. Each seed
also trains its own reward models.

The record of a run is kept in --cache under a hash of its settings. A stopped study can
therefore resume, and studies share runs. The records of policies are also kept beside the
pages, in records.jsonl. Delete both after a change of code. Runs are executed in parallel
processes with one thread each. The section "What was found" of a page is written by people; a
new run of the study keeps it.

Paper: §4.3, Tables 1, 2 and 11, Figures 3, 5 and 6, Appendices A, I and N. B rows, T tokens.
"""

from __future__ import annotations

import hashlib
import math
import multiprocessing
import os
import platform
import re
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
from experiments.advantages import ADVANTAGES, position_mean
from experiments.baselines import METHODS, annotate_rows, fit_scores, reflect
from experiments.designs import ANNOTATORS, DAMAGES, DESIGNS, LEARNT, SCORED, true_critic
from model import load_lora, load_model, lora_parameters
from report import svg_line, table
from reward_model import count_tokens, fit, token_figures
from sampling import head_weight, token_logprobs
from policy import (add_advantages, add_feedback, forward, gae, reward_model_critic,
                    sample_rollouts, train, whiten)
from reward_model import reward_settings
from text2grad import Config, start_policy

# ── Runs: what a study compares

POSTS = 3000                            # training posts of the policy
BETA = 0.2                              # initial β, as in the paper for SLF5K
RATES = (3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2)     # learning rates
TUNING = (100, 101)                     # seeds of the tuning runs


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
    rate: float = 0.0               # learning rate; 0: not tuned yet
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
    arms: dict[str, Run]
    cannot: str                     # what the study cannot show
    tuned: tuple[str, ...] = ()     # arms to tune, see `shared_rate`; (): all without a rate
    trajectories: tuple[Run, ...] = ()     # runs of `follow_trajectories` on the base
    seeds: int = 5
    compared: tuple[str, ...] = ("length",)    # fields of Run that an arm shares with its first


TRUE = Run("true")
# Tuning chooses the rate .003 for TRUE at 20 tokens, where some runs diverge. STABLE does not.
FAST = replace(TRUE, rate=3e-3)
STABLE = replace(TRUE, rate=1e-3)
END = Run("true_end")
DENSE = Run("true", annotator="dense")
NOISY = {f"{percent} % {damage}": replace(STABLE, method=f"true_{damage}_{percent}")
         for damage in DAMAGES for percent in (10, 20, 40)}
TRAJECTORIES = tuple(Run("look", length=n, posts=256) for n in (1, 2, 4))


def group(size: int, advantages: str, method: str = "scalar") -> Run:
    """A run whose advantages compare responses to one prompt."""
    return Run(method, advantages, settings=(("responses_per_prompt", size),))


# The rungs between Definition 1 and PPO: name → (key of ADVANTAGES, changed fields of Config).
LADDER = {
    "δ": ("definition_1", ()),
    "PPO": ("gae", ()),
    "whitened δ": ("whitened_rewards", ()),
    "reward-to-go": ("reward_to_go", ()),
    "reward-to-go, λ = .95": ("decayed_to_go", ()),
    "reward-to-go − position's mean": ("position_mean", ()),
    "PPO, λ = 0": ("gae", (("lam", 0.0),)),
    "PPO, λ = 1": ("gae", (("lam", 1.0),)),
    "PPO without clip": ("gae", (("clip", 1e6),)),
    "PPO, one pass": ("gae", (("ppo_epochs", 1),)),
}
SHORT_LADDER = ("δ", "PPO", "reward-to-go", "PPO, λ = 1")


def ladder(method: str, length: int, names=LADDER) -> dict[str, Run]:
    """Arms with the rungs of the ladder, for one critic and one length.

    PPO also has an arm at a rate below the tuned one, see STABLE.
    """
    critic = {"true": "true critic", "critique": "R_φ"}[method]
    arms = {f"{name}, {critic}, {20 * length} tokens":
            Run(method, LADDER[name][0], settings=LADDER[name][1], length=length)
            for name in names}
    stable = replace(STABLE, method=method, length=length)
    return arms | {f"PPO at .001, {critic}, {20 * length} tokens": stable}


METHODS_COMPARED = {
    "Text2Grad": Run(),
    "PPO": Run("scalar"),
    "PRM-PPO": Run("steps"),
    "GRPO of 4": group(4, "grpo"),
    "RLOO of 4": group(4, "rloo"),
    "DPO": Run("dpo"),
    "SFT": Run("sft"),
    "ILF": Run("ilf"),
    "reflection": Run("reflection"),
    "SDPO": Run("sdpo"),
    "DPO, β of .05": Run("dpo", settings=(("kl_coef", 0.05),)),
    "DPO, β of .5": Run("dpo", settings=(("kl_coef", 0.5),))}
MORE_METHODS = {
    # At all rates that tuning tries first, three times as many steps are worse.
    "DPO, three times the steps": Run("dpo", settings=(("ppo_epochs", 12),), rate=1e-4),
    "GRPO of 8": group(8, "grpo"), "RLOO of 8": group(8, "rloo"),
    "Dr. GRPO of 4": group(4, "dr_grpo"),
    "GRPO of 4, R_φ's sum": group(4, "grpo", "critique"),
    "RLOO of 4, R_φ's sum": group(4, "rloo", "critique"),
    "tokens of groups of 4, R_φ": group(4, "group_tokens", "critique"),
    "PPO, R_φ's sum": Run("end"), "PPO, true sum": END, "true critic": TRUE}
FEW_STEPS = Run("dpo", settings=(("ppo_epochs", 1),))      # with 3,000: as many as the default
FEW = {f"{name}, 400 annotations": replace(run, rows=400) for name, run in
       (METHODS_COMPARED | {"DPO, a quarter of the steps": FEW_STEPS}).items()}
SMALL = "One toy world, one tiny base and short runs: methods may rank differently elsewhere."
STUDIES = {
    1: Study(
        "Text2Grad and its baselines",
        "How accurate does each method become with the same number of rollouts and of "
        "annotations, and how fast? The paper claims that Text2Grad needs 22 % fewer steps "
        "than PPO.",
        METHODS_COMPARED | MORE_METHODS | FEW,
        "SFT imitates perfect references. ILF imitates refinements by a function that reads "
        "the corrections in the critique. Real data has neither. SDPO's policy was first "
        "trained to rewrite, which needs as many annotated rows again.",
        tuned=(*METHODS_COMPARED, "Dr. GRPO of 4", "GRPO of 4, R_φ's sum",
               "RLOO of 4, R_φ's sum", "tokens of groups of 4, R_φ", "PPO, R_φ's sum",
               "PPO, true sum", "true critic", *FEW),
        compared=("rows",)),
    2: Study(
        "Reward designs",
        "Which tokens should be rewarded (Table 11, Appendix I)? The true critic judges, so "
        "that only the reward design differs. Token weights are compared within quoted spans "
        "(Appendix I.1) and on dense labels.",
        {"spans": STABLE, "spans at .003": FAST, "dense labels": DENSE,
         "dense, importance": replace(DENSE, method="true_importance"),
         "dense, linear decay": replace(DENSE, method="true_linear_decay"),
         "spans, importance": Run("true_importance"),
         "spans, linear decay": Run("true_linear_decay"),
         "human-like spans": Run("true", annotator="human"), "end of sequence": END},
        "Content words are found with a word list, not with a part-of-speech tagger. The "
        "human-like spans are simulated; no person marked spans."),
    3: Study(
        "Chain of thought",
        "Does reasoning improve R_φ and the policy that it rewards (Tables 1, 2, 19)? The "
        "reasoning may be part of z, or it may only help the annotator and be left out of z. "
        "Without prose, z holds only the quotes and their labels, as in §4.5.",
        {"in z": Run(), "not in z": Run(annotator="no_cot"), "no prose": Run(annotator="spans"),
         "none, one verdict in ten wrong": Run(annotator="hasty")},
        "It is assumed, not measured, that an annotator without reasoning gives one wrong "
        "verdict in ten.",
        tuned=("in z",)),
    4: Study(
        "Wrong labels",
        "How fast does the gain fall as more spans are wrong, and which noise hurts most? "
        "Flipped spans have the wrong sign, shifted spans have moved to the nearest word "
        "without a label, and dropped spans are missing.",
        {"none": STABLE, **NOISY},
        "The noise is independent of the text. The errors of a real annotator are not. All "
        "arms use a rate at which the runs without noise are stable (study 2)."),
    5: Study(
        "Graded rewards",
        "Is the δ of one greedy critique (−1, 0 or 1) enough, or is the mean δ of four sampled "
        "critiques better?",
        {"discrete": Run(), "graded": Run("graded")},
        "Facts of the toy world are either right or wrong, so no degrees can be learned.",
        tuned=("discrete",)),
    6: Study(
        "Human-like feedback",
        "What happens if R_φ learns from rougher feedback, with missed facts, quotes that are "
        "too long, and wrong verdicts?",
        {"programmatic": Run(), "human-like": Run(annotator="human")},
        "The errors of people are simulated at random. Real people make other errors.",
        tuned=("programmatic",)),
    7: Study(
        "A critic that falls behind",
        "R_φ is trained on responses of the base, but it judges responses of a policy that has "
        "changed. What keeps it accurate, with the same number of annotations?",
        {"as it is": Run(), "β of .5": Run(settings=(("kl_coef", 0.5),)),
         "β of 1": Run(settings=(("kl_coef", 1.0),)),
         "R_φ of rank 128": Run(judge=(("lora_r", 128), ("lora_alpha", 256))),
         "four critiques": Run("graded"), "two rounds": Run("two_rounds"),
         "true critic": TRUE},
        "Two rounds need phases 1 and 2 twice. The table does not count the cost of the "
        "people who would annotate.", tuned=("as it is",)),
    8: Study(
        "Discriminative power", "Do the claims of Appendix A hold on real trajectories?", {},
        "All gradients are those of the base before any update, with V = 0 and no clipping.",
        trajectories=TRAJECTORIES),
    9: Study(
        "Placement and length",
        "The same δ is paid either at its tokens (placed) or as a sum at the end. How does the "
        "benefit of placement grow with the length of a response?",
        {"placed, 20 tokens": STABLE, "placed at .003, 20 tokens": FAST,
         "placed, 40 tokens": replace(TRUE, length=2),
         "placed, 80 tokens": replace(TRUE, length=4),
         **{f"at the end, {20 * n} tokens": replace(END, length=n) for n in (1, 2, 4)},
         **{f"{name}, R_φ, {20 * n} tokens": Run(method, length=n) for n in (1, 2)
            for name, method in (("placed", "critique"), ("at the end", "end"))}},
        "80 tokens are still a short text. Facts are as dense in long responses as in short "
        "ones. There is no R_φ for 80 tokens: in a trial with one seed it found only a quarter "
        "of the wrong tokens, because the base never saw such long critiques.",
        tuned=("placed, 40 tokens", "placed, 80 tokens", "at the end, 20 tokens",
               "at the end, 40 tokens", "at the end, 80 tokens", "placed, R_φ, 20 tokens",
               "at the end, R_φ, 20 tokens"),
        compared=("length", "critic"), trajectories=TRAJECTORIES),
    10: Study(
        "What PPO adds to Definition 1",
        "Definition 1 weights log π(y_t) by δ_t. PPO adds whitening, the sum over later "
        "tokens, a baseline V, the decay λ, and the clip. What does each of them buy, and from "
        "which length on?",
        {**ladder("true", 1), **ladder("critique", 1),
         **ladder("true", 2, SHORT_LADDER), **ladder("critique", 2, SHORT_LADDER),
         **ladder("true", 4)},
        "Facts are independent of each other, so a token's reward depends on few other tokens. "
        "Where later text depends on earlier choices, the sum over later tokens matters more.",
        tuned=(*ladder("true", 1), *ladder("true", 2, SHORT_LADDER),
               *ladder("true", 4, SHORT_LADDER)),
        compared=("length", "method"), trajectories=TRAJECTORIES),
    11: Study(
        "Omissions",
        "A span cannot mark what is missing. Does the policy learn to say less? If the critic "
        "only marks poor spans, silence has the best reward. Two remedies are a charge of −1 "
        "at the last token for each missing fact, and the length term of the release.",
        {f"{name}, {20 * n} tokens": Run(method, length=n, rate=rate)
         for n, rate in ((1, 1e-3), (4, 3e-3))
         for name, method in (("spans", "true"), ("spans, charge", "true_omission"),
                              ("poor spans", "true_poor"),
                              ("poor spans, charge", "true_poor_omission"),
                              ("poor spans, length term", "true_poor_length"))},
        "The true critic judges, and it names every missing fact. An LLM may overlook some. "
        "The length term suggests 48 tokens, so it changes nothing at 20 tokens."),
}


# ── Runs and their records

def key(run: Run) -> str:
    """The file name of a run's record: a hash of all its settings."""
    return hashlib.sha256(repr(run).encode()).hexdigest()[:16]


def judge_of(run: Run) -> Run | None:
    """The run that trains the reward model of this run, or None. Tuning shares one."""
    if run.method not in (*LEARNT, *SCORED, "two_rounds", "reflection", "sdpo"):
        return None
    reward_type = run.method if run.method in SCORED else "critique"
    rows = run.rows // 2 if run.method == "two_rounds" else run.rows
    seed = TUNING[0] if run.seed in TUNING else run.seed
    return Run(f"fit {reward_type}", annotator=run.annotator, judge=run.judge, rows=rows,
               length=run.length, seed=seed, posts=run.posts)


def read_record(run: Run, cache: Path) -> dict:
    """The record of a finished run, from the cache."""
    return read_rows(cache / f"{key(run)}.json")[0]


def work(run: Run, cache: Path):
    """Execute a run in one thread, without output, and save its record."""
    torch.set_num_threads(1)
    start = time.process_time()
    functions = {"fit": fit_judge, "look": follow_trajectories}
    function = functions.get(run.method.split()[0], train_policy)
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        record = function(run, cache)
    record = {"run": asdict(run), **record, "seconds": time.process_time() - start}
    write_rows(cache / f"{key(run)}.json", [record])


def settle(cache: Path, pool, runs: list[Run]) -> list[dict]:
    """The records of runs, in order. The pool first executes the runs that the cache lacks.

    The reward models of these runs are trained before them. Raises InputError if a run fails.
    """
    missing = [run for run in dict.fromkeys(runs) if not (cache / f"{key(run)}.json").exists()]
    judges = [*filter(None, map(judge_of, missing))]
    if judges:
        settle(cache, pool, judges)
    results = pool.map(work, missing, repeat(cache))
    for run in tqdm(missing, "runs", disable=not missing):
        try:
            next(results)
        except Exception as error:
            raise InputError(f"{run} failed: {type(error).__name__}: {error}") from error
    return [read_record(run, cache) for run in runs]


def settings(run: Run, out: Path) -> Config:
    """The flags of text2grad.py for a run. Flags that are not set here keep their defaults."""
    critic, mode = ANNOTATORS[run.annotator]
    return Config(output_dir=str(out), seed=run.seed, annotator_function=critic, mode=mode,
                  probe_rows=0, learning_rate=run.rate, iterations=run.updates,
                  batch_size=run.batch, minibatch_size=run.batch, save_every=10**9,
                  max_new_tokens=28 * run.length, max_critique_tokens=40 + 56 * run.length,
                  annotated_rows=run.rows,
                  **{"kl_coef": BETA} | dict(run.settings))


def fit_judge(run: Run, cache: Path) -> dict:
    """Train a reward model, save it in CACHE/KEY/reward/adapter, and evaluate it → record.

    R_φ is evaluated on responses of the base, with `probe_reward_model`. The other reward
    models are evaluated by their accuracy on held-out examples.
    """
    out = cache / key(run)
    config = settings(run, out)
    out.mkdir(parents=True, exist_ok=True)
    model, tokenizer = load_model(toy.BASE, device="cpu")
    rows = toy.rows("train", run.rows, 1000 + run.seed, run.length)
    _, reward_type = run.method.split()
    if reward_type in SCORED:
        return {"right": fit_scores(model, tokenizer, rows, config, out, reward_type)}
    annotate_rows(model, tokenizer, rows, config, out)
    fit(model, tokenizer, replace(reward_settings(config, out), **dict(run.judge)))
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
        labels = [math.copysign(abs(d) >= 0.5, d) for d in judgement.delta]
        counts += count_tokens(truth.delta, labels)
    return token_figures(counts)


# Methods whose δ can be compared with spans. Other designs move rewards between tokens.
PROBED = ("critique", "two_rounds", "graded")


def train_policy(run: Run, cache: Path) -> dict:
    """Train and evaluate a policy → record; "curve": fact accuracy of each batch."""
    model, tokenizer = load_model(toy.BASE, device="cpu")
    rows = toy.rows("train", POSTS, run.seed, run.length)
    critic = DESIGNS.get(run.method)
    judge_run = judge_of(run)
    record = {}
    if judge_run:
        load_lora(model, "reward", cache / key(judge_run) / "reward" / "adapter")
        figures = read_record(judge_run, cache)
        record["before"] = figures.get("poor_recall", figures.get("right"))
    if run.method == "two_rounds":
        critic = renewed(run, read_rows(cache / key(judge_run) / "feedback.jsonl"))
    with TemporaryDirectory() as directory:
        out = Path(directory)
        config = settings(run, out)
        base = sample_answers(model, tokenizer, replace(run, method=""), config, None)
        record["start"] = mean(map(toy.fact_accuracy, base.rows, base.texts))
        start_policy(model, config)
        if critic:
            advantages = ADVANTAGES.get(run.advantages, add_advantages)
            train(model, tokenizer, rows, config, out, critic, advantages)
        else:
            METHODS[run.method](model, tokenizer, rows, config, out)
        curve = whole_rows(out / "metrics.jsonl")
    record["curve"] = [row["fact accuracy"] for row in curve]
    record["kl"] = curve[-1].get("kl") if curve else None
    for name, temperature in (("greedy", 0.0), ("accuracy", 1.0)):
        eval_config = replace(config, temperature=temperature)
        rollouts = sample_answers(model, tokenizer, run, eval_config, "policy")
        record[name] = mean(map(toy.fact_accuracy, rollouts.rows, rollouts.texts))
    record["omitted"] = mean(map(omitted_facts, rollouts.rows, rollouts.texts))
    record["tokens"] = rollouts.mask.sum().item() / len(rollouts.texts)
    if run.method in PROBED:                           # on the responses at temperature 1
        probed_critic = DESIGNS.get(run.method, reward_model_critic)
        record |= probe_reward_model(rollouts, model, tokenizer, config, probed_critic)
    return record


def omitted_facts(row: dict, text: str) -> float:
    """Share of the slots for which a summary states no fact at all, right or wrong."""
    slots = {slot for _, slot, _ in toy.said_facts(text)}
    return sum(slot not in slots for slot in row["facts"]) / len(row["facts"])


def sample_answers(model, tokenizer, run: Run, config: Config, adapter):
    """Sample responses to held-out posts. For reflection, return the rewritten responses."""
    posts = toy.rows("eval", run.posts, int(run.seed in TUNING), run.length)
    generator = torch.Generator().manual_seed(run.seed)
    rollouts = sample_rollouts(model, tokenizer, posts, config, adapter, generator)
    if run.method == "reflection":
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
            posts = toy.rows("train", run.rows // 2, 2000 + run.seed)
            generator = torch.Generator().manual_seed(run.seed)
            responses = sample_rollouts(model, tokenizer, posts, config, "policy",
                                        generator).texts
            rows = [row | {"response": text} for row, text in zip(posts, responses)]
            out.mkdir()
            new_feedback = annotate_rows(model, tokenizer, rows, config, out)
            write_rows(out / "feedback.jsonl", feedback + new_feedback)
            fit(model, tokenizer, reward_settings(config, out))
        return reward_model_critic(rollouts, model, tokenizer, config)
    return renewed_critique


# ── Appendix A on real trajectories

# Setting → (whether Σ_t δ_t is paid at the last token, λ)
SETTINGS = {"A, λ = .95": (False, 0.95), "A, λ = 1": (False, 1.0), "B, λ = .95": (True, 0.95),
            "B, λ = 1": (True, 1.0)}
SAMPLES = 4                                        # responses per post


def follow_trajectories(run: Run, cache: Path) -> dict:
    """Measure settings A and B on responses of the base to held-out posts (Appendix A).

    δ comes from the true critic. V = 0, γ = 1, and there is no KL penalty.
    """
    model, tokenizer = load_model(toy.BASE, device="cpu")
    config = settings(run, cache)
    generator = torch.Generator().manual_seed(2)
    posts = toy.rows("eval", run.posts, 2, run.length)
    posts = [row for row in posts for _ in range(SAMPLES)]
    rollouts = sample_rollouts(model, tokenizer, posts, config, None, generator)
    add_feedback(rollouts, true_critic(rollouts, model, tokenizer, config))
    start_policy(model, config)
    mask = rollouts.mask
    delta = rollouts.delta
    has_reward = delta != 0                                                         # [B, T]
    advantages = advantages_of(delta, mask)
    advantages |= {"δ_t": delta,                                   # two rungs of study 10
                   "A, λ = 1, minus the mean": position_mean(delta, mask, config)}
    whitened = {name: whiten(a, mask) for name, a in advantages.items()}
    products = gradient_products(model, rollouts, range(0, len(posts), SAMPLES), whitened,
                                 lora_parameters(model, "policy"))
    remaining = mask.sum(1, keepdim=True) - 1 - torch.arange(mask.shape[1])        # T − k
    return {"tokens": mask.sum().item() / len(posts),
            "pairs": ordered_pairs(delta, mask, 0.95),
            "correlation": {name: correlation(a[has_reward], delta[has_reward])
                            for name, a in advantages.items()},
            "alpha": (0.95 ** -remaining[has_reward].float()).mean().item(),  # Eq. Appendix A α
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
    return torch.corrcoef(torch.stack([x.double(), y.double()]))[0, 1].item()


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
    for i, j in permutations(range(len(delta)), 2):
        T = lengths[i]
        is_same_post = i // samples == j // samples
        is_ordered = lengths[j] == T and sums[i] > sums[j]
        if is_same_post and is_ordered:
            difference = (delta[i] - delta[j])[:T].double()                 # Δδ, [T]
            power = weight ** torch.arange(T)
            a = tail_sum(difference * power) / power                        # ΔA^A, [T]
            b = tail_sum(difference) * power.flip(0)                        # ΔA^B, [T]
            premise = tail_sum((difference[:-1] > 0).int()) > 0
            is_larger = premise & (a > b + 1e-9)[:-1]
            counts.update(pairs=1, places=T - 1, premise=int(premise.sum()),
                          held=int(is_larger.sum()))
    return counts


def gradient_products(model, rollouts, rows, advantages, parameters) -> dict[str, Tensor]:
    """g_i · g_j, where g_i = Σ_t A_t ∇ log π(y_t) is the gradient of one response → [B, B].

    rows: indices of the responses. advantages: name → A, [B, T]. The result has the same names.
    """
    gradients = {name: [] for name in advantages}
    for i in rows:
        hidden, targets = forward(model, rollouts, [i], "policy")                        # [T, H]
        logprobs = token_logprobs(hidden, head_weight(model), targets)
        for name, a in advantages.items():
            objective = (a[i, : len(targets)] * logprobs).sum()
            grads = torch.autograd.grad(objective, parameters, retain_graph=True)
            gradients[name].append(torch.cat([g.flatten() for g in grads]))
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
    rng = torch.Generator().manual_seed(0)
    n = len(dots)

    def scale(index):
        products = dots[index][:, index]
        is_same = index[:, None] == index[None, :]
        signal = products[~is_same].mean()
        noise = products.diagonal().mean() - signal
        return (noise / signal).item() if signal > 0 else math.inf

    scales = sorted(scale(torch.randint(n, (n,), generator=rng)) for _ in range(200))
    return scale(torch.arange(n)), scales[5], scales[194]


# ── Statistics over seeds

# 97.5 % quantiles of Student's t for 1 to 9 degrees of freedom.
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


def seed_interval(values):
    """(mean, half width of the 95 % interval by Student's t) of 2 to 10 values or curves."""
    half = _T[len(values) - 2] * np.std(values, 0, ddof=1) / math.sqrt(len(values))
    return np.mean(values, 0), half


def plus_minus(values: list[float], digits=3, sign="") -> str | None:
    """Format as "mean ± half width of the 95 % interval"; a single value alone; [] → None."""
    if len(values) < 2:
        return f"{values[0]:.{digits}f}" if len(values) else None
    centre, half = seed_interval(values)
    return f"{centre:{sign}.{digits}f} ± {half:.{digits}f}"


def smooth(curve: list[float]):
    """Moving average of each point and its two neighbours. The end points do not change."""
    return np.r_[curve[0], np.convolve(curve, [1 / 3] * 3, "valid"), curve[-1]]


# ── Pages

@dataclass(eq=False)
class Arm:
    """One arm of a study: its run, and its record for each seed."""
    name: str
    run: Run
    records: list[dict]

    def values(self, figure: str) -> list:
        """The values under one key of the records. Missing and empty values are left out."""
        values = [record.get(figure) for record in self.records]
        return [value for value in values if value not in (None, [])]

    def rollouts_to(self, goal: float) -> str:
        """Rollouts until the best value so far of the smoothed curve reaches the goal.

        goal: fact accuracy. Values between two points are interpolated linearly. The text also
        counts the seeds that never reach the goal.
        """
        bests = [np.maximum.accumulate(smooth(curve)) for curve in self.values("curve")]
        rollouts = [self.run.batch * np.interp(goal, best, range(len(best)), right=math.inf)
                    for best in bests]
        finite = [value for value in rollouts if value < math.inf]
        n_never = len(rollouts) - len(finite)
        note = f" ({n_never} of {len(rollouts)} never)" if n_never else ""
        return (plus_minus(finite, 0) or "–") + note


def first_arm(arm: Arm, arms: list[Arm], compared) -> Arm:
    """The first arm whose run agrees with an arm's in the fields `compared`."""
    return next(first for first in arms
                if all(getattr(first.run, name) == getattr(arm.run, name) for name in compared))


def arm_table(arms: list[Arm], compared=("length",)) -> str:
    """Table and legend; each row compares an arm with its `first_arm`."""
    rows = []
    for arm in arms:
        baseline = first_arm(arm, arms, compared)
        differences = np.subtract(arm.values("accuracy"), baseline.values("accuracy"))
        start = mean(baseline.values("start"))
        end = mean(mean(curve[-3:]) for curve in baseline.values("curve"))
        columns = {
            "": arm.name, "rate": f"{arm.run.rate:g}",
            "start": plus_minus(arm.values("start")),
            "accuracy": plus_minus(arm.values("accuracy")),
            "greedy": plus_minus(arm.values("greedy")),
            "minus first arm": plus_minus(differences, sign="+"),
            "rollouts to 90 %": arm.rollouts_to(start + 0.9 * (end - start)),
            "KL": plus_minus(arm.values("kl"), 1), "omitted": plus_minus(arm.values("omitted")),
            "base recall": plus_minus(arm.values("before")),
            "recall": plus_minus(arm.values("poor_recall")),
            "precision": plus_minus(arm.values("poor_precision")),
            "seconds": f"{mean(arm.values('seconds')):.0f}"}
        rows.append([*columns.values()])
    return f"""
```
{table([*columns], rows)}
```

Rate: learning rate. Start: fact accuracy of the base on held-out posts at temperature 1. \
Accuracy: the same of the trained policy; greedy: with greedy decoding. Minus first arm: \
accuracy minus that of the first arm with the same {' and '.join(compared)}. \
Rollouts to 90 %: rollouts until an arm reaches 90 % of the first arm's gain, which is \
measured from the start to the mean of the last three points of its curve. KL: in nats per \
response, in the last batch. Omitted: share of facts that the final policy does not state at \
all. Recall and precision: of R_φ's poor tokens against the careful annotator's, on responses \
of the final policy. Base recall: the same on responses of the base; for PPO and PRM-PPO, the \
share of held-out labels that the reward model gets right.
"""


def arm_figure(arms: list[Arm], compared=("length",)) -> list[str]:  # Figure 5; Figure 6
    """One SVG chart of the smoothed accuracy over rollouts for each arm that has curves.

    Lines: the mean over seeds, the ends of its 95 % interval, and the mean of its `first_arm`.
    """
    charts = []
    for arm in arms:
        curves = [smooth(curve) for curve in arm.values("curve")]
        if curves:
            means, halves = seed_interval(curves)
            baseline, _ = seed_interval([*map(smooth, first_arm(arm, arms, compared)
                                              .values("curve"))])
            lines = {"mean": means, "low": means - halves, "high": means + halves,
                     "first arm": baseline}
            x = [arm.run.batch * i for i in range(len(means))]
            charts.append(svg_line(f"{arm.name}: accuracy of rollouts", x, lines,
                                   "rollouts"))
    return charts


def trajectory_tables(records: list[dict]) -> str:
    """Tables and legends for records of `follow_trajectories`, by response length (App. A)."""
    settings_rows = [[name, f"{record['tokens']:.0f}", record["correlation"][name],
                      "{:.1f} ({:.1f} to {:.1f})".format(*record["noise"][name])]
                     for record in records for name in record["noise"]]
    pair_rows = [[f"{record['tokens']:.0f}", *record["pairs"].values(), record["alpha"]]
                 for record in records]
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
    noise = {name: [record["noise"][name][0] for record in records] for name in SETTINGS}
    return svg_line("noise scale in responses",
                    [round(record["tokens"]) for record in records], noise,
                    "tokens per response")


def sheet(charts: list[str], across: int = 3) -> str:
    """One SVG of charts of `svg_line`, each 340 × 180. across: number of charts per row."""
    out = "".join(f'<svg x="{350 * (i % across)}" y="{190 * (i // across)}" width="340" '
                  f'height="180">{chart}</svg>' for i, chart in enumerate(charts))
    height = 190 * math.ceil(len(charts) / across)
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {350 * across} {height}" '
            f'color="#777">{out}</svg>\n')


def describe_training(study: Study) -> str:
    """The paragraph about the arms of a study: seeds, learning rates and sizes."""
    n_tuned = sum(not study.arms[name].rate for name in study.tuned or study.arms)
    rates = "not tuned."
    if n_tuned:
        rates = (f"tuned for {n_tuned} of {len(study.arms)} arms. Tuning takes the rate of "
                 f"{RATES} with the best mean accuracy over the seeds {TUNING} and other "
                 f"held-out posts; it tries rates until the best one has a worse one on each "
                 f"side.")
    if 0 < n_tuned < len(study.arms):
        rates += (" Another arm uses the rate of the most similar one, by its advantages, "
                  "changed settings, method and length, in this order, if none is set for it.")
    run = next(iter(study.arms.values()))
    return f"""\
Seeds: 0 to {study.seeds - 1}. A seed determines the training posts, the initial adapter and \
all samples, and each seed trains its own reward model on responses of the base. Intervals are \
95 % intervals by Student's t, and differences are paired by seed. Learning rate: {rates} \
A run has {run.updates * run.batch} rollouts in batches of {run.batch}, and each batch is used \
for 4 optimizer steps. Methods that train on fixed rows use as many responses and optimizer \
steps. β starts at {BETA}. There are {run.posts} held-out posts."""


def write_study_page(path: Path, study: Study, arms: list[Arm],
                     trajectory_records: list[dict], flags: str):
    """Write the page of a study. The section "What was found" of an old page is kept."""
    number = path.stem.split("_")[0]
    page = path.read_text() if path.exists() else ""
    findings = "".join(page.partition("## What was found")[1:]).partition("## Table and figure")
    records = sum((arm.records for arm in arms), trajectory_records)
    seconds = sum(record["seconds"] for record in records)
    tables = ""
    details = []
    if arms:
        tables = arm_table(arms, study.compared)
        details.append(describe_training(study))
    if trajectory_records:
        tables += trajectory_tables(trajectory_records)
        details.append(f"Trajectories: {SAMPLES} responses to each of "
                       f"{study.trajectories[0].posts} held-out posts.")
    path.write_text(f"""# Study {number}: {study.title}

{study.question}

{findings[0]}## Table and figure

![{study.title}]({path.stem}.svg)
{tables}
## How

`python -m experiments.studies --study {number}{flags}`, {time.strftime('%Y-%m-%d')}, \
{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}. The reported runs \
took {seconds:.0f} CPU seconds; other studies share some of them. {' '.join(details)}

## What it cannot show

{study.cannot} {SMALL}
""")


# ── Command line

QUICK = {"updates": 3, "batch": 8, "rows": 120, "posts": 16, "rate": 1e-3, "length": 1}


@dataclass
class StudyConfig:
    """The flags: which studies to run, and where their pages are written."""
    study: str = flag("all", "number of a study, or all", ("all", *map(str, STUDIES)))
    quick: bool = flag(False, "check the code: two seeds, short runs and no tuning")
    output_dir: str = flag("runs/studies", "directory of the pages and figures")
    cache: str = flag("runs/studies", "directory of the records and reward models of past runs")
    workers: int = flag(2, "number of parallel runs; each uses one core", least=1)


def tune(runs: list[Run], get_records) -> list[Run]:
    """The runs, each with the rate of the best mean accuracy over the TUNING seeds.

    Three rates are tried first. If the best rate has no worse neighbour in RATES on one side,
    the next rate on that side is tried, too.
    """
    tried = [{*RATES[2:5]} for _ in runs]
    while True:
        tries = [replace(run, rate=rate, seed=seed) for run, rates in zip(runs, tried)
                 for rate in sorted(rates) for seed in TUNING]
        accuracies = {run: record["accuracy"] for run, record in zip(tries, get_records(tries))}
        best_rates = []
        for run, rates in zip(runs, tried):
            means = {rate: mean(accuracies[replace(run, rate=rate, seed=seed)]
                                for seed in TUNING) for rate in sorted(rates)}
            best = max(means, key=means.get)
            best_rates.append(best)
            i = RATES.index(best)
            rates |= {*RATES[max(0, i - 1) : i + 2]}
        if len(tries) == sum(map(len, tried)) * len(TUNING):
            return [replace(run, rate=rate) for run, rate in zip(runs, best_rates)]


def shared_rate(run: Run, tuned: list[Run]) -> float:
    """The rate of the most similar tuned run: by advantages, settings, method, then length."""
    def similarity(other):
        return [getattr(other, name) == getattr(run, name)
                for name in ("advantages", "settings", "method", "length")]
    return max(tuned, key=similarity, default=run).rate


def run_of(record: dict) -> Run:
    """The run of a record that was read from JSON, where tuples are lists."""
    pairs = {name: tuple(map(tuple, record["run"][name])) for name in ("settings", "judge")}
    return Run(**record["run"] | pairs)


def restore_records(path: Path, cache: Path):
    """Put the records of a file into the cache, so that finished runs are not repeated."""
    for record in whole_rows(path):
        file = cache / f"{key(run_of(record))}.json"
        if not file.exists():
            write_rows(file, [record])


def keep_records(path: Path, cache: Path):
    """Write the records in the cache to a file, in a fixed order.

    Those of reward models are left out, because a run needs the reward model itself.
    """
    records = [read_rows(file)[0] for file in sorted(cache.glob("*.json"))]
    write_rows(path, [record for record in records
                      if not record["run"]["method"].startswith("fit ")])


def do_study(number: int, study: Study, config: StudyConfig, get_records) -> Path:
    """Execute the runs of a study and write its page and figure → path of the page.

    get_records: function that maps runs to their records, see `settle`.
    """
    if config.quick:
        quick_arms = {name: replace(run, **QUICK) for name, run in study.arms.items()}
        trajectories = [replace(run, **QUICK) for run in study.trajectories]
        study = replace(study, arms=quick_arms, trajectories=trajectories, seeds=2)
    names = [name for name in study.tuned or study.arms if not study.arms[name].rate]
    tuned = dict(zip(names, tune([study.arms[name] for name in names], get_records)))
    runs = [tuned.get(name) or (run if run.rate else
                                replace(run, rate=shared_rate(run, [*tuned.values()])))
            for name, run in study.arms.items()]
    records = get_records([replace(run, seed=seed) for run in runs
                           for seed in range(study.seeds)])
    arms = [*map(Arm, study.arms, runs, chunks(records, study.seeds))]
    trajectory_records = get_records(study.trajectories)
    charts = arm_figure(arms, study.compared)
    if trajectory_records:
        charts.append(trajectory_figure(trajectory_records))
    name = re.sub("[^a-z0-9]+", "_", study.title.lower())
    path = Path(config.output_dir) / f"{number}_{name}.md"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".svg").write_text(sheet(charts))
    write_study_page(path, study, arms, trajectory_records, " --quick" if config.quick else "")
    return path


def main():
    """Execute the chosen studies and print the paths of their pages."""
    config = parse_flags(StudyConfig, __doc__)
    with ProcessPoolExecutor(config.workers, multiprocessing.get_context("spawn")) as pool:
        cache = Path(config.cache)
        records = Path(config.output_dir) / "records.jsonl"
        cache.mkdir(parents=True, exist_ok=True)
        restore_records(records, cache)
        get_records = partial(settle, cache, pool)
        for number, study in STUDIES.items():
            if config.study in ("all", str(number)):
                print(do_study(number, study, config, get_records))
                keep_records(records, cache)


if __name__ == "__main__":
    run_script(main, "studies")
