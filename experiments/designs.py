"""Reward designs: other critics in the place of R_φ's (§4.3, Table 11, Appendices A, I and N).

    python -m experiments.baselines true            # the annotator itself judges every rollout
    python -m experiments.baselines end --seed 1    # the same feedback, not placed: B of App. A

A critic takes rollouts to a Judgement of each row of this rank's share, and changes nothing
else of Algorithm 4. Those of DESIGNS, by name:

    critique           δ' from the spans of the critique that R_φ writes (the method)
    graded             the mean δ' of four critiques drawn from R_φ at temperature 1
    end                Σ_t δ_t paid at the last token: the same information with no placement
    linear_decay, importance   weights within a span (Appendix I.1)
    true, true_end, …  the function of --annotator_function judges the rollout itself
    scalar, steps      a reward model's score at the last token, or at the end of each step:
                       those of PPO and PRM-PPO in baselines.py, which fit them first

"Human spans" (Table 11) are no design of their own: R_φ learns from what people marked. Dense
labels and steps are modes of the annotator (experiments/modes.py).

Scalar and step reward models are adapters on the same base and have no head of their own: the
score is read from two rows of the frozen language-model head, ℓ_t = h_t · (W[+] − W[−]).
B rows, T response tokens.
"""

from __future__ import annotations

import json
import random
import re
import zlib
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

import torch
from torch import Tensor

import toy
from annotate import FeedbackError, Span, get_mode, quoted, token_rewards, tokens_inside
from data import chunks, load_object
from model import encode_prompt, response_hidden, use_lora
from reward_model import Judgement, judge, reward_tokens, write_critiques
from runtime import RANK, WORLD_SIZE
from sampling import head_weight, pad_batch
from text2grad import reward_model_critic


def share(rollouts) -> range:
    """The rows that this rank judges."""
    return range(RANK, len(rollouts.rows), WORLD_SIZE)


# ── Critics around another critic

def changed(critic, change):
    """A critic whose δ is change(text, offsets, judgement) of what another one says."""
    def changed_critic(rollouts, model, tokenizer, config):
        judged = zip(share(rollouts), critic(rollouts, model, tokenizer, config))
        return [replace(found, delta=change(rollouts.texts[i], rollouts.offsets[i], found))
                for i, found in judged]
    return changed_critic


def at_end(critic):
    """Setting B of Appendix A: r_T = Σ_t δ_t at the last token, 0 before it."""
    # Eq. §3.6 A^B
    return changed(critic, lambda _, offsets, found:
                   [0.0] * (len(offsets) - 1) + [sum(found.delta)])


def weighted(critic, weighting: str):
    """Another share of the reward for each token of a span (Appendix I.1)."""
    def weigh(text, offsets, found):
        delta = list(found.delta)
        for span, inside in zip(found.spans, tokens_inside(text, offsets, found.spans)):
            weights = span_weights(text, [offsets[i] for i in inside], weighting)
            for i, weight in zip(inside, weights):
                delta[i] = weight * span.label if found.delta[i] else 0.0      # in conflict
        return delta
    return changed(critic, weigh)


def noisy(critic, kind: str, percent: int):
    """A critic of whose spans so many per cent are `damaged`; a text always in the same way."""
    def damage(text, offsets, found):
        spans = damaged(text, found.spans, kind, percent / 100, random.Random(text))
        return token_rewards(text, offsets, spans)
    return changed(critic, damage)


def damaged(text: str, spans: list[Span], kind: str, share: float, rng) -> list[Span]:
    """Spans of which a share is "flipped" in sign, "dropped", "shifted" to the nearest word
    without a label, or "widened" by the words around. ⌊n · share + u⌋ of n, u uniform: exact in
    the mean."""
    wrong = rng.sample(range(len(spans)), int(len(spans) * share + rng.random()))
    out = [span for i, span in enumerate(spans) if i not in wrong]
    for span in (spans[i] for i in wrong):
        if kind == "flipped":
            out.append(replace(span, label=-span.label))
        if kind == "widened":
            before = re.search(r"(?:\S+\s+){0,2}$", text[: span.start])
            after = re.compile(r"\S*(?:\s+\S+)?").match(text, span.end)
            out.append(replace(span, start=before.start(), end=after.end()))
        free = [word.span() for word in re.finditer(r"\S+", text)
                if all(word.end() <= s.start or s.end <= word.start() for s in spans + out)]
        if kind == "shifted" and free:
            start, end = min(free, key=lambda word: abs(word[0] - span.start))
            out.append(replace(span, start=start, end=end))
    return out


# ── Critics of their own

def true_critic(rollouts, model, tokenizer, config) -> list[Judgement]:
    """The function of --annotator_function judges all texts that are not empty."""
    critic = load_object("--annotator_function", config.annotator_function)
    read = get_mode(config.mode).read
    judged = []
    for i in share(rollouts):
        text, offsets = rollouts.texts[i], rollouts.offsets[i]
        reply = critic(rollouts.rows[i], text) if text.strip() else ""
        try:
            feedback, grounding = read({"response": text}, reply)
            judged.append(reward_tokens(reply, text, offsets, feedback, grounding))
        except FeedbackError as error:
            judged.append(Judgement(reply, [0.0] * len(offsets), str(error)))
    return judged


DRAWS = 4                               # critiques of a rollout whose mean is `graded`


def graded(rollouts, model, tokenizer, config) -> list[Judgement]:
    """The mean δ' of critiques at temperature 1: E[δ'_t] in [−1, 1], by Monte Carlo.

    What is drawn depends on the seed and the rollout, and neither on the batch nor on ranks; an
    unreadable critique counts as zeros. The rest of a Judgement is of the first critique.
    """
    asked = [i for i in share(rollouts) for _ in range(DRAWS)]
    x, y = ([texts[i] for i in asked] for texts in (rollouts.prompts, rollouts.texts))
    uniforms = torch.zeros(len(asked), config.max_critique_tokens)
    for k in range(0, len(asked), DRAWS):
        seed = zlib.crc32(f"{config.seed} {x[k]} {y[k]}".encode())
        uniforms[k : k + DRAWS].uniform_(generator=torch.Generator().manual_seed(seed))
    written = write_critiques(model, tokenizer, x, y, uniforms.shape[1], 1.0, uniforms)
    judged = [judge(z, rollouts.texts[i], rollouts.offsets[i]) for z, i in zip(written, asked)]
    deltas = [[sum(column) / DRAWS for column in zip(*(found.delta for found in few))]
              for few in chunks(judged, DRAWS)]
    return [replace(first, delta=delta) for first, delta in zip(judged[::DRAWS], deltas)]


# ── Scores: Bradley–Terry and process reward models (Appendix N)

def token_scores(model, tokenizer, pairs: list[tuple]) -> tuple[Tensor, Tensor]:
    """ℓ_t = h_t · (W[+] − W[−]), where h_t has seen x and y_≤t, with the adapter in use.

    pairs: [(x, y)] as ids → scores [B, T], mask [B, T].
    """
    plus, minus = (tokenizer(mark, add_special_tokens=False).input_ids[-1] for mark in "+-")
    # One more token, so that there is a state after the last one of y.
    batch = pad_batch([x for x, _ in pairs], [[*y, plus] for _, y in pairs],
                      model.device)
    hidden, weight = response_hidden(model, *batch)[:, 1:], head_weight(model)
    return hidden.float() @ (weight[plus].float() - weight[minus].float()), batch[3][:, 1:]


def mark_ends(text: str, offsets, steps: list[Span]) -> list[int]:
    """The label of each step at its last token, 0 at all others: [T]"""
    labels = [0] * len(offsets)
    for step, inside in zip(steps, tokens_inside(text, offsets, steps)):
        for last in inside[-1:]:
            labels[last] = step.label
    return labels


@torch.no_grad()
def pay_scores(rollouts, model, tokenizer, config, by_step: bool) -> list[Judgement]:
    """What the adapter "reward" pays, at the last token of y or of every step; 0 at others.

    For PPO (Tables 2 and 3) r(x, y). For PRM-PPO (Appendix N) 2σ(ℓ) − 1 = tanh(ℓ/2): how
    surely a step is right.
    """
    judged = []
    with use_lora(model, "reward"):
        for part in chunks(share(rollouts), config.micro_batch_size):
            pairs = [(encode_prompt(tokenizer, rollouts.prompts[i]),
                      rollouts.response_ids[i][rollouts.mask[i].bool()].tolist()) for i in part]
            scores, _ = token_scores(model, tokenizer, pairs)
            for i, row in zip(part, torch.tanh(scores / 2) if by_step else scores):
                text, offsets = rollouts.texts[i], rollouts.offsets[i]
                paid = [0] * (len(offsets) - 1) + [1]
                if by_step:
                    paid = mark_ends(text, offsets, step_spans(text, config.task == "kodcode"))
                delta = [score if pays else 0.0 for score, pays in zip(row.tolist(), paid)]
                judged.append(Judgement("", delta))
    return judged


WEIGHTINGS, DAMAGES = ("linear_decay", "importance"), ("flipped", "shifted", "dropped")
LEARNT = {"critique": reward_model_critic, "graded": graded, "end": at_end(reward_model_critic),
          **{name: weighted(reward_model_critic, name) for name in WEIGHTINGS}}     # R_φ judges
SCORED = {"scalar": partial(pay_scores, by_step=False),       # an adapter of baselines.py
          "steps": partial(pay_scores, by_step=True)}
TRUE = {"true": true_critic, "true_end": at_end(true_critic),
        **{f"true_{name}": weighted(true_critic, name) for name in WEIGHTINGS},
        **{f"true_{kind}_{percent}": noisy(true_critic, kind, percent)
           for kind in DAMAGES for percent in (10, 20, 40)}}
DESIGNS = {**LEARNT, **SCORED, **TRUE}


# ── Weights within a span (Appendix I.1)

OTHERS = 0.2                            # what a token that is no content word gets


def span_weights(text: str, places, weighting: str) -> list[float]:  # Table 11
    """The weight in (0, 1] of each of a span's n tokens, by their characters (Appendix I.1).

    "linear_decay": 1 − (i−1)·0.9/(n−1). "importance": 1 on content words and parts of them, 0.2
    on others. The paper weighs nouns and verbs, as a tagger saw them; here every word of
    English is content that is not in a closed list.
    """
    if weighting == "linear_decay":
        return [1.0 - 0.9 * i / max(1, len(places) - 1) for i in range(len(places))]
    content = [word.span() for word in toy.content_words(text)]
    return [1.0 if any(start < b and a < end for a, b in content) else OTHERS
            for start, end in places]


# ── Steps (Appendix N)

_LINE = r"\s*\n\s*"
_CLAUSE = (rf"(?<=[.!?;:,])\s+|{_LINE}|\s+(?=(?:and|but|because|so|who|which|while|although|"
           r"though|if|when|unless)\b)")


def step_spans(text: str, code: bool = False) -> list[Span]:
    """Each step, labelled +1: clauses of a text, or lines of code."""
    cuts = [match.span() for match in re.finditer(_LINE if code else _CLAUSE, text)]
    at = [0, *chain(*cuts), len(text)]
    return [Span(a, b, 1) for a, b in zip(at[::2], at[1::2]) if text[a:b].strip()]


# ── Other annotators of the toy world's truth, each with its --mode

@dataclass(frozen=True)
class Mark(Span):
    """A span of which the careful critic speaks, and what it calls it."""
    name: str


def marks(row: dict, response: str) -> list[Mark]:
    """What the careful critic speaks of, in reading order."""
    found = [Mark(at, at + len(value), 1 if right else -1, slot)
             for at, slot, value, _, right in toy.judged_facts(row, response)]
    for _, words in toy.faults(response):
        at, name = response.index(words), "repetition" if words[0] == "," else "voice"
        found.append(Mark(at, at + len(words), -1, name))
    return sorted(found, key=lambda mark: mark.start)


def critique_no_cot(row: dict, response: str, damages=()) -> str:
    """Mode no_cot: a verdict on every fact, and never what the post says (Table 1).

    damages: [(kind, share)] of `damaged`. A post and a response always get the same reply.
    """
    rng, found = random.Random(f"{row['post']}|{response}"), marks(row, response)
    for kind, part in damages:
        found = damaged(response, found, kind, part, rng)
    found = sorted(found, key=lambda mark: mark.start)
    said = [f"The {mark.name} is {'right' if mark.label > 0 else 'wrong'}." for mark in found]
    return quoted(response, " ".join(said) or "It says nothing.", found).text()


# Somebody who did not think first: one verdict in ten is wrong.
critique_hasty = partial(critique_no_cot, damages=[("flipped", 0.1)])
# As people would: a third of the facts is passed over, one verdict in twenty is mistaken, and
# half of the quotes hold the words around them too.
critique_human = partial(critique_no_cot, damages=[("dropped", 1 / 3), ("flipped", 0.05),
                                                   ("widened", 0.5)])


def critique_steps(row: dict, response: str) -> str:
    """Mode experiments.modes:STEPS: every clause, correct where nothing in it is wrong."""
    found, wrong = [], [mark for mark in marks(row, response) if mark.label < 0]
    for step in step_spans(response):
        faults = [mark.name for mark in wrong if step.start < mark.end <= step.end]
        found.append({"step": response[step.start : step.end], "correct": not faults,
                      "reason": f"wrong: {faults}" if faults else "as in the post"})
    return json.dumps({"steps": found})


def critique_dense(row: dict, response: str) -> str:
    """Mode experiments.modes:DENSE, a label for every word (Table 11): the words that lead to a
    fact share its label, so that most of what is labelled are function words, as in the paper.
    """
    found, labels = marks(row, response), []
    for word in re.finditer(r"\S+", response):
        label = next((mark.label for mark in found if word.start() < mark.end), 0)
        name = {1: "good", -1: "poor", 0: "neutral"}[label]
        labels.append({"word": word.group(), "label": name})
    said, _, _ = toy.critique(row, response).partition("\n")
    return json.dumps({"textual_feedback": said, "labels": labels})


# Name → (--annotator_function, --mode)
ANNOTATORS = {"careful": ("toy:critique", "cot"),
              "no_cot": ("experiments.designs:critique_no_cot", "no_cot"),
              "hasty": ("experiments.designs:critique_hasty", "no_cot"),
              "human": ("experiments.designs:critique_human", "no_cot"),
              "steps": ("experiments.designs:critique_steps", "experiments.modes:STEPS"),
              "dense": ("experiments.designs:critique_dense", "experiments.modes:DENSE")}
