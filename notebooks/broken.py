"""Ten wrong versions of functions, and the record of the runs that notebook 5 shows.

    python notebooks/broken.py                # trains again, and writes broken.jsonl

Each run has one seed and 24 responses per iteration in the toy world, and 8 iterations unless
RUNS has another number. The critic is the annotator, unless RUNS has another.
"""

import os
import random
import sys
import tempfile
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ["TQDM_DISABLE"] = "1"
import torch

import policy
import toy
from annotate import Review, Span, combine_labels, token_rewards
from data import write_rows
from experiments.designs import end, replace_delta
from model import ValueHead, add_lora, load_model
from policy import (add_advantages, add_feedback, add_scores, annotator_critic, batch_rows,
                    forward, minibatch_loss, sample_rollouts, whiten)
from sampling import generate, head_weight
from settings import Config, parse_flags
from report import batch_metrics

RECORD = Path(__file__).with_suffix(".jsonl")
SEED = 0


# ── The right run

model, tokenizer = load_model(toy.BASE, device="cpu")
torch.manual_seed(SEED)
theta = add_lora(model, "policy")                                              # θ
base = [p.detach().clone() for p in theta]
no_values = ValueHead(model.config.hidden_size)                                # V = 0
config = replace(parse_flags(Config, argv=[]), batch_size=24, minibatch_size=12, ppo_epochs=2,
                 learning_rate=3e-3, iterations=8, seed=SEED, output_dir=tempfile.mkdtemp())
posts = toy.rows("train", 500)
held_out = toy.rows("eval", 128)


def put(values):
    """Set the weights of the policy."""
    with torch.no_grad():
        for p, value in zip(theta, values):
            p.copy_(value)


def learn(critic=annotator_critic, start=base, **settings) -> list[dict]:
    """policy.train in short, with a warm-up of the rates → one row of metrics per iteration.

    The functions are called as `policy.…`, so that a patched function takes effect.
    """
    now = replace(config, **settings)
    put(start)
    torch.manual_seed(SEED)
    value_head = ValueHead(model.config.hidden_size)
    optimizer = torch.optim.AdamW([{"params": theta}, {"params": value_head.parameters()}],
                                  weight_decay=0.0)
    curve = []
    for i in range(now.iterations):                                            # Alg. 4 l.6
        share = min((i + 1) / 4, 1 - i / now.iterations)
        for group, factor in zip(optimizer.param_groups, (1, now.value_rate_factor)):
            group["lr"] = now.learning_rate * factor * share
        generator = torch.Generator().manual_seed(1000 * SEED + i)
        batch = policy.sample_rollouts(model, tokenizer, batch_rows(posts, now, i), now,
                                       "policy", generator)                    # l.9–11
        policy.add_feedback(batch, critic(batch, model, tokenizer, now))       # l.12–13
        policy.add_scores(batch, model, value_head, now)                       # l.7
        policy.add_advantages(batch, now.kl_coef, now)                         # l.14–17
        index = list(range(12))
        with torch.no_grad():
            _, first = policy.minibatch_loss(batch, index, model, value_head, now,
                                             batch.mask[index].sum())
        rng = random.Random(1000 * SEED + i)
        policy.ppo_update(batch, model, value_head, optimizer, now, rng)       # l.19–32
        metrics = batch_metrics(batch)
        curve.append({
            "right facts": metrics["fact accuracy"],
            "reward": batch.delta.sum().item() / len(batch.rows),
            "KL": metrics["kl"],
            "tokens": batch.mask.sum().item() / len(batch.rows),
            "clipped at once": first["clip_fraction"].item()})
    return curve


def answered(rows=held_out, **settings):
    """Rollouts of the policy: one response to each row, by default to 128 held-out posts."""
    generator = torch.Generator().manual_seed(1000 * SEED + 999)
    return policy.sample_rollouts(model, tokenizer, rows, replace(config, **settings),
                                  "policy", generator)


def facts(batch) -> float:
    """The share of right facts."""
    return sum(map(toy.fact_accuracy, batch.rows, batch.texts)) / len(batch.rows)


def kl(batch) -> float:
    """The mean over the responses of Σ_t (log π(y_t) − log π_ref(y_t)), in nats."""
    add_scores(batch, model, no_values, config)
    return (batch.logprobs_old - batch.logprobs_ref).sum().item() / len(batch.rows)


# ── The wrong versions

def exact_kl(batch, beta, config):
    """add_advantages with the exact KL at each token, not log π(y_t) − log π_ref(y_t)."""
    index = list(range(len(batch.rows)))
    exact = torch.zeros_like(batch.values)
    with torch.no_grad():
        log_p, log_ref = (
            (forward(model, batch, index, adapter)[0] @ head_weight(model).T).log_softmax(-1)
            for adapter in ("policy", None))                                        # [N, V]
    exact[batch.mask.bool()] = (log_p.exp() * (log_p - log_ref)).sum(-1)
    scored = replace(batch, logprobs_ref=batch.logprobs_old - exact)
    add_advantages(scored, beta, config)
    batch.rewards = scored.rewards
    batch.advantages = scored.advantages
    batch.returns = scored.returns


def later(labels):
    """combine_labels, one token too late."""
    return [0.0, *combine_labels(labels)[:-1]]


def earlier(labels):
    """combine_labels, one token too early."""
    return [*combine_labels(labels)[1:], 0.0]


def encoded_again(*args, **settings):
    """generate, with tokenizer(text) in place of the sampled ids."""
    eos = tokenizer.eos_token_id
    texts = [tokenizer.decode(y, skip_special_tokens=True) for y in generate(*args, **settings)]
    return [tokenizer(text, add_special_tokens=False).input_ids + [eos] for text in texts]


def no_temperature(rollouts, index, model, value_head, config, count):
    """minibatch_loss at temperature 1, whatever the temperature of the samples was."""
    config = replace(config, temperature=1.0)
    return minibatch_loss(rollouts, index, model, value_head, config, count)


def without_eos(*args):
    """sample_rollouts with mask = ids != EOS."""
    batch = sample_rollouts(*args)
    for i, is_cut in enumerate(batch.truncated):
        if not is_cut:
            batch.mask[i, len(batch.offsets[i]) - 1] = 0
            batch.offsets[i] = batch.offsets[i][:-1]
    return batch


def by_row(x, mask):
    """whiten with one mean and variance for each row."""
    return torch.cat([whiten(row[None], row_mask[None]) for row, row_mask in zip(x, mask)])


def last_column(batch, reviews):
    """add_feedback with the sum of δ in delta[:, -1], where most rows have padding."""
    add_feedback(batch, reviews)
    total = batch.delta.sum(1)
    batch.delta = torch.zeros_like(batch.delta)
    batch.delta[:, -1] = total


def copied_once(batch, model, value_head, config):
    """add_scores with π_old of the first policy: the copy stands before the loop."""
    add_scores(batch, model, value_head, config)
    batch.logprobs_old = batch.logprobs_ref


def half_blind(rollouts, model, tokenizer, config) -> list[Review]:  # noqa: ARG001
    """A critic that knows all phrases of the base, and overlooks repeated and new words."""
    reviews = []
    for row, text, offsets in zip(rollouts.rows, rollouts.texts, rollouts.offsets):
        spans = [Span(start, start + len(value), 1 if row["facts"].get(slot) == value else -1)
                 for start, slot, value in toy.said_facts(text)]
        reviews.append(Review("", token_rewards(text, offsets, spans), spans=spans))
    return reviews


def silent(text, offsets, review) -> list[float]:  # noqa: ARG001
    """No reward, so that the penalty acts alone."""
    return [0.0] * len(offsets)


# ── The record

# name → ((place of the function, wrong function) or None, arguments of `learn`)
END = replace_delta(annotator_critic, end)
SILENT = replace_delta(annotator_critic, silent)
RUNS = {
    "right": (None, {}),
    "right, T = .7": (None, {"temperature": 0.7}),
    "δ too early": (("annotate.combine_labels", earlier), {}),
    "no temperature": (("policy.minibatch_loss", no_temperature), {"temperature": 0.7}),
    "right, at the end": (None, {"critic": END}),
    "reward on padding": (("policy.add_feedback", last_column), {"critic": END}),
    "rate × 10": (None, {"learning_rate": 3e-2}),
    "penalty alone": (None, {"critic": SILENT, "kl_coef": 1.0, "iterations": 4}),
    "exact KL alone": (("policy.add_advantages", exact_kl),
                       {"critic": SILENT, "kl_coef": 1.0, "iterations": 4}),
    "half-blind critic": (None, {"critic": half_blind, "learning_rate": 6e-3,
                                 "iterations": 16}),
    "half-blind critic, no KL": (None, {"critic": half_blind, "learning_rate": 6e-3,
                                        "iterations": 16, "kl_coef": 0.0})}
# The five runs of exercise 1: name → (letter, number of the mistake in the exercise's list)
PUZZLES = {"rate × 10": ("a", 4), "half-blind critic, no KL": ("b", 5),
           "no temperature": ("c", 2), "δ too early": ("d", 1), "reward on padding": ("e", 3)}
# These continue from the policy of the right run.
CONTINUED = "penalty alone", "exact KL alone", "half-blind critic", "half-blind critic, no KL"


def main():
    rows = []
    start = base
    for name, (mistake, settings) in RUNS.items():
        with patch(*mistake) if mistake else nullcontext():
            curve = learn(start=start if name in CONTINUED else base, **settings)
            if name == "right":
                start = [p.detach().clone() for p in theta]
        batch = answered(temperature=settings.get("temperature", 1.0))
        truth = annotator_critic(batch, model, tokenizer, config)
        reward = sum(sum(review.delta) for review in truth) / len(truth)
        letter, number = PUZZLES.get(name, (None, None))
        rows.append({"run": name, "letter": letter, "mistake": number, "curve": curve,
                     "facts": facts(batch), "KL": kl(batch), "annotator's reward": reward,
                     "texts": batch.texts[:3]})
        print(name, f"{rows[-1]['facts']:.3f} of the facts, {rows[-1]['KL']:.1f} nats")
        write_rows(RECORD, rows)


if __name__ == "__main__":
    main()
