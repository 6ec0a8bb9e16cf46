"""One run of a study: a reward model, a policy or a look at trajectories, its record kept.

    from experiments.trials import Run, settle, workers
    runs = [Run(reward="true", updates=15, batch=32, learning_rate=1e-3)]
    with workers(2) as pool:
        records = settle(runs, Path("runs/studies"), pool)

A job is a frozen dataclass that holds all that its record depends on. The record is kept in a
cache under a hash of the job: what was stopped goes on, and studies share the runs that they
have in common. Delete the cache after a change of code. A job has a process and one thread of
its own: two such jobs at once do more than one job with two threads, in a model this small.

Paper: the runs of §4.3, Table 11 and Appendix A. B rows, T tokens, N responses.
"""

from __future__ import annotations

import hashlib
import json
import math
import multiprocessing
import os
import random
import re
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean as mean, stdev
from tempfile import TemporaryDirectory

import torch
from torch import Tensor
from tqdm import tqdm

import toy
from annotate import Span, annotate, ground
from data import InputError, read_rows, write_rows
from experiments.baselines import (BaselineConfig, encode_answers, encode_preferences,
                                   encode_rewriting, fit_scores, policy_settings,
                                   preference_loss, preferences, references, refinements,
                                   reflect, start_policy)
from experiments.designs import DESIGNS, LEARNT, scalar, steps, true_critic, weighted
from measures.spans import (character_labels, compare, figures, readable, span_accuracy,
                            total)
from model import add_lora, load_lora, load_model
from reward_model import fit_adapter, write_critiques, z_loss
from sampling import head_weight, token_logprobs
from text2grad import (add_feedback, annotator, batch_rows, critique, fit_reward, forward, gae,
                       respond, sample_rollouts, train, whiten)


# ── Jobs, and the cache that keeps their records

@dataclass(frozen=True)
class Judge:
    """A reward model: trained once, and shared by all runs that it rewards."""
    kind: str = "critique"              # R_φ; or scalar: Bradley–Terry; or steps: a PRM
    critic: str = "toy:critique"        # whom it learns from
    rows: int = 2000                    # annotated responses; scalar: twice as many, in pairs
    seed: int = 1000


@dataclass(frozen=True)
class Run:
    """One policy, trained and judged: all that its record depends on."""
    method: str = "text2grad"           # or one of baselines.METHODS, or "base", only judged
    reward: str = "critique"            # one of designs.DESIGNS
    critic: str = "toy:critique"        # whom R_φ learnt from, or who judges itself
    weighting: str = "uniform"          # or one of designs.WEIGHTINGS, of what `reward` says
    noise: str = ""                     # what is done to the critic's spans,
    share: float = 0.0                  # and to which share of them
    learning_rate: float = 0.0
    seed: int = 0
    tuning: bool = False                # judged by other held-out posts
    updates: int = 0                    # batches of rollouts, each for 4 optimizer steps
    batch: int = 0
    judge_rows: int = 0


@dataclass(frozen=True)
class Trajectories:
    """Responses of the base, and advantages and gradients in both settings of Appendix A."""
    posts: int = 512
    samples: int = 4
    seed: int = 2


MODES = {"experiments.designs:critique_no_cot": "no_cot",
         "experiments.designs:critique_human": "no_cot",
         "experiments.designs:critique_dense": "experiments.modes:DENSE",
         "experiments.designs:critique_steps": "experiments.modes:STEPS",
         "experiments.trials:noisy_critique": "experiments.modes:DENSE"}
FITTED = ("sft", "ilf", "dpo", "reflection")       # policies that are fitted to rows
SCORED = {"ppo": ("scalar", scalar), "prm_ppo": ("steps", steps)}
POSTS, HELD_OUT = 3000, 400                        # to train on, and to judge by
STEPS = 4                                          # optimizer steps per update


def key(job) -> str:
    """A name for the record of a job: a hash of its kind and all of its settings."""
    said = json.dumps([type(job).__name__, asdict(job)], sort_keys=True)
    return hashlib.sha256(said.encode()).hexdigest()[:16]


def judge_of(run: Run) -> Judge | None:
    """The reward model that a run needs."""
    if run.method in SCORED:
        kind, _ = SCORED[run.method]
        own = "experiments.designs:critique_steps" if kind == "steps" else run.critic
        return Judge(kind, own, run.judge_rows)
    if run.reward in LEARNT and run.method in ("text2grad", "reflection"):
        return Judge("critique", run.critic, run.judge_rows)
    return None


def critic_of(run: Run):
    """What judges a run's rollouts in Algorithm 4."""
    if run.method in SCORED:
        return SCORED[run.method][1]
    design = DESIGNS[run.reward]
    return design if run.weighting == "uniform" else weighted(design, run.weighting)


def work(job, cache: Path):
    """Do a job in one thread, without a word, and keep its record."""
    torch.set_num_threads(1)
    does = {Judge: train_judge, Run: train_policy, Trajectories: follow_trajectories}
    started = time.time()
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        record = does[type(job)](job, cache)
    record = {"job": asdict(job), **record, "seconds": time.time() - started}
    write_rows(cache / f"{key(job)}.json", [record])


def workers(count: int):
    """Processes that do jobs, as a context."""
    return ProcessPoolExecutor(count, multiprocessing.get_context("spawn"))


def settle(jobs: list, cache: Path, pool) -> list[dict]:
    """The records of jobs, in order; the pool does first what the cache lacks, each once.

    Raises InputError with the job and its error where one fails.
    """
    def record(job) -> Path:
        return cache / f"{key(job)}.json"

    absent = {pool.submit(work, job, cache): job
              for job in dict.fromkeys(jobs) if not record(job).exists()}
    for done in tqdm(as_completed(absent), total=len(absent), desc="runs", disable=not absent):
        if error := done.exception():
            for other in absent:
                other.cancel()
            raise InputError(f"{absent[done]}: {type(error).__name__}: {error}") from error
    return [json.loads(record(job).read_text()) for job in jobs]


# ── Judges

def settings(run: Run, out: Path) -> BaselineConfig:
    """A run's settings for baselines.py and text2grad.py; what is not named has its default."""
    return BaselineConfig(
        method=run.method, output_dir=str(out), seed=run.seed, critic=run.critic,
        mode=MODES.get(run.critic, "cot"), learning_rate=run.learning_rate,
        iterations=run.updates, batch_size=run.batch, minibatch_size=run.batch,
        ppo_epochs=STEPS, annotated_rows=POSTS, save_every=10**9)


def annotate_rows(model, tokenizer, rows, config: BaselineConfig, out: Path):
    """Responses of the base, and what the critic says of them → feedback.jsonl."""
    respond(model, tokenizer, rows, config, out)
    annotate(annotator(config, out))


def train_judge(judge: Judge, cache: Path) -> dict:
    """A reward model → CACHE/KEY/reward/adapter; R_φ is also judged by the truth."""
    out = cache / key(judge)
    out.mkdir(parents=True, exist_ok=True)
    model, tokenizer = load_model(toy.BASE, device="cpu")
    rows = toy.rows("train", judge.rows, judge.seed)
    method = {"scalar": "ppo", "steps": "prm_ppo"}.get(judge.kind, "text2grad")
    config = settings(Run(method, critic=judge.critic, seed=judge.seed), out)
    if judge.kind == "scalar":
        write_rows(out / "preferences.jsonl", preferences(model, tokenizer, rows, config))
    else:
        annotate_rows(model, tokenizer, rows, config, out)
    if judge.kind != "critique":
        return {"said": fit_scores(model, tokenizer, config, out)}
    said = fit_reward(model, tokenizer, config, out)
    posts, generator = toy.rows("eval", HELD_OUT, 3), torch.Generator().manual_seed(3)
    fresh = sample_rollouts(model, tokenizer, posts, config, None, generator)
    critiques = write_critiques(model, tokenizer, fresh.prompts, fresh.texts,
                                config.max_critique_tokens)
    return {"said": said, **true_figures(fresh, critiques)}


def true_spans(row: dict, response: str) -> list[Span]:
    """Every fact phrase, with its true label."""
    judged = toy.judged_facts(row, response) if response.strip() else []
    return [Span(at, at + len(value), 1 if right else -1) for at, _, value, _, right in judged]


def true_figures(rollouts, critiques: list[str]) -> dict:
    """R_φ's critiques against the truth: tokens (Table 1), and spans by their length.

    A quoted span is right if more than half of its characters have its label in truth; a true
    one is found likewise.
    """
    counts, lengths = [], {}
    places = zip(rollouts.rows, rollouts.texts, rollouts.offsets, critiques)
    for row, text, offsets, z in places:
        said, truth = readable(z, text), true_spans(row, text)
        spans = ground(text, said).spans if said else []
        counts.append(compare(text, offsets, truth, said))
        for kind, marked, other in (("quoted", spans, truth), ("true", truth, spans)):
            by_character = character_labels(text, other)
            for span in marked:
                tokens = sum(start < span.end and end > span.start for start, end in offsets)
                name = f"{'good' if span.label > 0 else 'poor'} {kind} {min(tokens, 6)}"
                count = lengths.setdefault(name, [0, 0])
                count[0] += span_accuracy(text, span, by_character) > 0.5
                count[1] += 1
    return {"tokens": figures(total(counts)), "lengths": lengths}


# ── Policies

def train_policy(run: Run, cache: Path) -> dict:
    """Train as the run says; the curve: right facts in rollouts before each update."""
    model, tokenizer = load_model(toy.BASE, device="cpu")
    rows = toy.rows("train", POSTS, run.seed)
    rows = [row | {"noise": [run.noise, run.share]} for row in rows]
    if judge := judge_of(run):
        load_lora(model, "reward", cache / key(judge) / "reward" / "adapter")
    record = {}
    with TemporaryDirectory() as directory:
        out = Path(directory)
        config = settings(run, out)
        if run.method in FITTED:
            record = {"curve": fit_policy(model, tokenizer, rows, run, config, out)}
        elif run.method != "base":
            start_policy(model, config)
            train(model, tokenizer, rows, config, out, critic_of(run))
            metrics = read_rows(out / "metrics.jsonl")
            record = {"curve": [m["fact accuracy"] for m in metrics], "kl": metrics[-1]["kl"]}
    adapter = None if run.method == "base" else "policy"
    posts = toy.rows("eval", HELD_OUT, 1 if run.tuning else 0)

    def answer(posts):
        generator = torch.Generator().manual_seed(run.seed)
        return sample_rollouts(model, tokenizer, posts, config, adapter, generator)

    rollouts = answer(posts)
    if run.method == "reflection":
        rollouts = reflect(rollouts, model, tokenizer, config)
    record |= {"accuracy": mean(map(toy.fact_accuracy, posts, rollouts.texts)),
               "tokens": rollouts.mask.sum().item() / HELD_OUT}
    if judge and run.method == "text2grad":       # the reward model, where the policy has moved
        few = answer(posts[:100])
        critiques = [found.critique for found in critique(few, model, tokenizer, config)]
        record |= {"judge": true_figures(few, critiques)["tokens"]}
    return record


def fit_policy(model, tokenizer, rows, run: Run, config, out: Path) -> list[float]:
    """SFT, ILF, DPO, reflection: as many responses as rollouts, as many steps → the curve."""
    config, rows = replace(config, mode="cot"), rows[: run.updates * run.batch]
    loss, count, mended = z_loss, {}, []
    if run.method in ("ilf", "reflection"):
        annotate_rows(model, tokenizer, rows, config, out)
        feedback = read_rows(out / "feedback.jsonl")
        mended = [row for row in refinements(model, tokenizer, feedback, config) if row["kept"]]
    if run.method == "dpo":                        # two responses to each of half of the posts
        found = preferences(model, tokenizer, rows[: len(rows) // 2], config)
        pairs = encode_preferences(found, tokenizer)
        loss, count = preference_loss(config), {"count_of": lambda _: 1}
    elif run.method == "ilf":
        answers = [(row["prompt"], row["refinement"]) for row in mended]
        pairs = encode_answers(answers, tokenizer)
    else:
        pairs = encode_answers(references(rows, config), tokenizer)
    curve, calls = [], []

    def watched_loss(model, part, pad):
        if len(calls) % STEPS == 0:
            posts = batch_rows(rows, config, len(curve))
            generator = torch.Generator().manual_seed(len(curve))
            seen = sample_rollouts(model, tokenizer, posts, config, "policy", generator)
            curve.append(mean(map(toy.fact_accuracy, posts, seen.texts)))
        calls.append(part)
        return loss(model, part, pad)

    def budget(pairs):
        epochs = max(1, round(STEPS * len(rows) / len(pairs)))
        return replace(policy_settings(config), epochs=epochs)

    fit_adapter(model, tokenizer, pairs, "policy", budget(pairs), loss_of=watched_loss, **count)
    if run.method == "reflection":
        pairs = encode_rewriting(mended, tokenizer)
        fit_adapter(model, tokenizer, pairs, "rewriter", budget(pairs))
    return curve


# ── Noise (study 4)

def damaged(marks: dict[int, int], words: int, noise: str, share: float, rng) -> dict[int, int]:
    """Labels of words by place, with a share of them wrong.

    noise: "flipped" in sign, "dropped", or "shifted" to the nearest word without a label. Of n
    marks ⌊n · share + u⌋ are chosen, u uniform in [0, 1): the share is exact in the mean.
    """
    out = dict(marks)
    for place in rng.sample(sorted(marks), int(len(marks) * share + rng.random())):
        label = out.pop(place)
        free = [i for i in range(words) if i not in out and i != place]
        if noise == "flipped":
            out[place] = -label
        elif noise == "shifted" and free:
            out[min(free, key=lambda i: (abs(i - place), rng.random()))] = label
    return out


def noisy_critique(row: dict, response: str) -> str:
    """The true critic's labels, damaged as row["noise"] = [kind, share] says.

    In mode experiments.modes:DENSE, so that a label can stand at any word. A post and a
    response always get the same reply.
    """
    (noise, share), words = row["noise"], list(re.finditer(r"\S+", response))
    marks = {}
    for span in true_spans(row, response):
        at = next(i for i, word in enumerate(words) if word.end() > span.start)
        marks[at] = span.label
    rng = random.Random(f"{row['post']}|{response}")
    marks = damaged(marks, len(words), noise, share, rng)
    names = {1: "good", -1: "poor"}
    labels = [{"word": word.group(), "label": names.get(marks.get(i), "neutral")}
              for i, word in enumerate(words)]
    return json.dumps({"textual_feedback": "Every fact is labelled.", "labels": labels})


# ── Appendix A on real trajectories (study 8)

SETTINGS = {"A, λ = .95": (False, 0.95), "A, λ = 1": (False, 1.0), "B, λ = .95": (True, 0.95),
            "B, λ = 1": (True, 1.0)}


def follow_trajectories(job: Trajectories, cache: Path) -> dict:
    """Responses of the base to held-out posts, and the true critic's δ; V = 0, γ = 1, no KL."""
    model, tokenizer = load_model(toy.BASE, device="cpu")
    config = settings(Run(reward="true", batch=1), cache)
    posts = toy.rows("eval", job.posts, job.seed)
    posts = [row for row in posts for _ in range(job.samples)]
    generator = torch.Generator().manual_seed(job.seed)
    rollouts = sample_rollouts(model, tokenizer, posts, config, None, generator)
    add_feedback(rollouts, true_critic(rollouts, model, tokenizer, config))
    mask, at = rollouts.mask, rollouts.mask.bool()
    advantages = advantages_of(rollouts.delta, mask)
    torch.manual_seed(job.seed)
    parameters = add_lora(model, "policy", config.lora_r, config.lora_alpha, 0.0,
                          config.lora_targets.split(","))
    first = list(range(0, len(posts), job.samples))                # one response of each post
    whitened = {name: whiten(a, mask) for name, a in advantages.items()}
    dots = gradient_products(model, rollouts, first, whitened, parameters)
    label = rollouts.delta[at]
    left = (mask.sum(1, keepdim=True) - 1 - torch.arange(mask.shape[1]))[at]
    fact, places = label != 0, {name: [] for name in advantages}
    for begin in range(0, 24, 3):
        here = fact & (left >= begin) & (left < begin + 3)
        if here.sum() > 50:
            for name, a in advantages.items():
                places[name].append((begin, correlation(a[at][here], label[here])))
    return {"pairs": ordered_pairs(rollouts.delta, mask, job.samples, 0.95), "places": places,
            "all": {name: correlation(a[at][fact], label[fact])
                    for name, a in advantages.items()},
            "alpha": (0.95 ** -left[fact].float()).mean().item(),  # Eq. Appendix A α
            "noise": {name: noise_scale(products, job.seed) for name, products in dots.items()}}


def advantages_of(delta, mask) -> dict[str, Tensor]:  # Eq. §3.6 A^A
    """A_t of both settings without V: B pays Σ_t δ_t at the last token. [B, T] each."""
    nothing, last = torch.zeros_like(delta), mask.sum(1, keepdim=True).long() - 1
    end = nothing.scatter(1, last, delta.sum(1, keepdim=True))
    return {name: gae(end if late else delta, nothing, mask, 1.0, lam)[0]
            for name, (late, lam) in SETTINGS.items()}


def correlation(x, y) -> float:
    """Pearson's."""
    return torch.corrcoef(torch.stack([x.double(), y.double()]))[0, 1].item()


def ordered_pairs(delta, mask, samples: int, weight: float) -> dict:  # Eq. Appendix A ΔA
    """ΔA^A_t > ΔA^B_t, for equally long responses to one post, the first better, at all t < T.

    As Appendix A has it: ΔA^A_t = Σ_{k≥t} w^(k−t) Δδ_k and ΔA^B_t = w^(T−t) Σ_{k≥t} Δδ_k; it
    says that the first is the greater wherever any Δδ_k > 0 with t ≤ k < T. Better: by Σ δ.
    """
    found, claimed, held, pairs = 0, 0, 0, 0
    for i in range(len(delta)):
        for j in range(i - i % samples, i - i % samples + samples):
            T = int(mask[i].sum())
            if T != int(mask[j].sum()) or delta[i].sum() <= delta[j].sum():
                continue
            pairs += 1
            apart = (delta[i] - delta[j])[:T].tolist()
            for t in range(T - 1):
                a = sum(weight ** (k - t) * apart[k] for k in range(t, T))
                b = weight ** (T - 1 - t) * sum(apart[t:])
                premise = any(d > 0 for d in apart[t : T - 1])
                found += 1
                claimed += premise
                held += premise and a > b + 1e-9
    return {"pairs": pairs, "places": found, "premise": claimed, "held": held}


def gradient_products(model, rollouts, rows, advantages, parameters) -> dict[str, Tensor]:
    """g_i · g_j for the gradients g_i = Σ_t A_t ∇ log π(y_t) of single responses. → [N, N]"""
    found = {name: [] for name in advantages}
    for i in rows:
        hidden, targets = forward(model, rollouts.part([i]), "policy")                  # [T, H]
        logprobs = token_logprobs(hidden, head_weight(model), targets)
        for name, a in advantages.items():
            gain = (a[i, : len(targets)] * logprobs).sum()
            grads = torch.autograd.grad(gain, parameters, retain_graph=True)
            found[name].append(torch.cat([g.flatten() for g in grads]))
    stacked = {name: torch.stack(g) for name, g in found.items()}
    return {name: g @ g.T for name, g in stacked.items()}


def noise_scale(dots, seed: int) -> tuple[float, float, float]:
    """The batch at which a gradient's noise equals its signal, and a 95 % interval of it.

    tr Σ / |E g|² (McCandlish et al. 2018), over resampled posts. dots: g_i · g_j, [N, N].
    """
    rng, n = torch.Generator().manual_seed(seed), len(dots)

    def scale(index):
        drawn, same = dots[index][:, index], (index[:, None] == index[None, :])
        signal = drawn[~same].mean()
        return ((drawn.diagonal().mean() - signal) / signal).item()

    drawn = sorted(scale(torch.randint(n, (n,), generator=rng)) for _ in range(200))
    return scale(torch.arange(n)), drawn[5], drawn[194]


# ── Statistics over runs

# The 97.5 % point of Student's t with 1 to 9 degrees of freedom.
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


def interval(values: list[float]) -> tuple[float, float]:
    """(mean, half width of the 95 % interval by Student's t), of 2 to 10 values."""
    return mean(values), _T[len(values) - 2] * stdev(values) / math.sqrt(len(values))


def plus_minus(values: list[float], sign: str = "") -> str:
    """Mean ± half of the 95 % interval."""
    centre, half = interval(values)
    return f"{centre:{sign}.3f} ± {half:.3f}"


def smooth(curve: list[float]) -> list[float]:
    """The mean of every point and its two neighbours; the ends, which have one, stay."""
    inner = (mean(curve[i - 1 : i + 2]) for i in range(1, len(curve) - 1))
    return [curve[0], *inner, curve[-1]]


def updates_to(curve: list[float], start: float, end: float, share: float = 0.9) -> float:
    """The updates after which a curve first stands at start + share · (end − start).

    Between two points on the line that joins them; ∞ where it never does. curve[i]: what
    rollouts show after i updates.
    """
    goal = start + share * (end - start)
    for i, value in enumerate(curve):
        if value >= goal:
            before = curve[i - 1] if i else value
            return i - (value - goal) / (value - before) if value > before else float(i)
    return math.inf


def arrival(curves: list[list[float]], start: float, end: float | None = None, draws=1000):
    """(`updates_to` of the mean smoothed curve, its 2.5 and 97.5 % points over seeds).

    end: None for the mean of the last three points of the curves themselves: their own gain.
    """
    curves = [smooth(curve) for curve in curves]

    def of(curves):
        line = [mean(values) for values in zip(*curves)]
        return updates_to(line, start, mean(line[-3:]) if end is None else end)

    rng = random.Random(0)
    drawn = sorted(of(rng.choices(curves, k=len(curves))) for _ in range(draws))
    return of(curves), drawn[round(0.025 * draws)], drawn[round(0.975 * draws) - 1]


def shown_arrival(curves: list[list[float]], start: float, end: float | None = None) -> str:
    """The arrival as text; what is not reached comes after the last update."""
    if end is None and mean([mean(curve[-3:]) for curve in curves]) <= start:
        return "no gain"

    def name(x):
        return f"{x:.1f}" if x < math.inf else f"> {len(curves[0]) - 1}"

    middle, low, high = map(name, arrival(curves, start, end))
    return f"{middle} ({low} to {high})"
