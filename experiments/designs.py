"""Reward designs, a scalar critic and toy annotators (§4.3, Table 11, Appendices A, I and N).

    python -m experiments.baselines linear_decay  # token weights within a span
    python -m experiments.baselines end --seed 1  # setting B of App. A: Σ_t δ_t at the end
    python -m experiments.baselines late end --critic annotator

A critic returns a Review, which holds δ, for each row that this process works on. A design
changes only δ; the rest of Algorithm 4 stays as it is. CHANGES holds the designs by name.
"Human spans" (Table 11) need no design: R_φ is then trained on spans that people marked. Dense
labels and weights of content words are not here; commit 8f4232e has them.

The scalar reward model is an adapter on the same base model. It has no separate head.
The score ℓ_t = h_t · (W[+] − W[−]) uses the rows W[+] and W[−] of the frozen language-model
head for the tokens "+" and "-". B rows, T response tokens, H hidden size.
"""

import random
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

import toy
from annotate import Feedback, Review, Span, parse_feedback, token_labels
from data import chunks
from model import encode_prompt, response_hidden, use_lora
from runtime import rank_share
from sampling import head_weight, pad_batch


def tokens_inside(text: str, offsets, spans: list[Span]) -> list[list[int]]:
    """The indices of the tokens inside each span."""
    return [[t for t, labels in enumerate(token_labels(text, offsets, [span])) if labels]
            for span in spans]


# ── Designs: changes of the δ of any critic

def replace_delta(critic, change):
    """A critic like the given one, but δ of each review is change(text, offsets, review)."""
    def new_critic(rollouts, model, tokenizer, config):
        reviews = critic(rollouts, model, tokenizer, config)
        # The next design gets this δ in the review.
        return [replace(review, delta=change(text, offsets, review))
                for text, offsets, review in zip(rank_share(rollouts.texts),
                                                 rank_share(rollouts.offsets), reviews)]
    return new_critic


def end(text, offsets, review) -> list[float]:
    """Σ_t δ_t at the last token: the same feedback without positions (App. A, setting B)"""
    return [0.0] * (len(offsets) - 1) + [sum(review.delta)]        # Eq. §3.6 A^B


def late(text, offsets, review) -> list[float]:
    """the label of a span at the next span, and that of the last span at the last token"""
    spans = sorted(review.spans, key=lambda span: span.start)
    places = tokens_inside(text, offsets, spans)
    last = len(offsets) - 1
    delta = [0.0] * len(offsets)
    for span, later in zip(spans, [*places[1:], [last]]):
        for t in later:
            delta[t] += span.label
    return delta


def minus_faults(text, offsets, review) -> list[float]:
    """minus the number of poor spans at the last token: a penalty on the whole answer"""
    return [0.0] * (len(offsets) - 1) + [-1.0 * sum(span.label < 0 for span in review.spans)]


def linear_decay(text, offsets, review) -> list[float]:
    """weights that fall from 1 to 0.1 within a span (App. I.1)"""
    delta = list(review.delta)
    for span, tokens in zip(review.spans, tokens_inside(text, offsets, review.spans)):
        for i, t in enumerate(tokens):
            weight = 1 - 0.9 * i / max(1, len(tokens) - 1)
            # δ is 0 where a good and a poor span conflict, and stays 0 there.
            delta[t] = weight * span.label if review.delta[t] else 0.0
    return delta


CHANGES = {change.__name__: change for change in (end, late, minus_faults, linear_decay)}


# ── Scores of a Bradley–Terry reward model (Appendix N)

def response_scores(model, tokenizer, pairs: list[tuple]) -> Tensor:
    """ℓ_T = h_T · (W[+] − W[−]) with the active adapter; h_T: hidden state after x and y.

    pairs: [(x, y)] as token ids → scores [B].
    """
    plus, minus = (tokenizer(sign, add_special_tokens=False).input_ids[-1]
                   for sign in ("+", "-"))
    prompts = [x for x, _ in pairs]
    # `response_hidden` returns the states that predict each token. So, with an extra token at
    # the end, its last state is the one after y.
    responses = [[*y, plus] for _, y in pairs]
    batch = pad_batch(prompts, responses, model.device)
    last = batch[3].sum(1, keepdim=True) - 1                            # its column, [B, 1]
    hidden = response_hidden(model, *batch).take_along_dim(last[..., None], 1)  # [B, 1, H]
    weight = head_weight(model)
    direction = weight[plus].float() - weight[minus].float()            # W[+] − W[−], [H]
    return (hidden.float() @ direction).squeeze(1)


@torch.no_grad()
def pay_scores(rollouts, model, tokenizer, config) -> list[Review]:
    """A critic for PPO: r(x, y) = ℓ_T of the adapter "reward", at the last token (Tables 2, 3).

    All other rewards are 0.
    """
    reviews = []
    with use_lora(model, "reward"):
        for part in chunks(rank_share(range(len(rollouts.rows))), config.decode_batch_size):
            pairs = []
            for i in part:
                y = rollouts.response_ids[i][rollouts.mask[i].bool()]
                x = encode_prompt(tokenizer, rollouts.prompts[i])
                pairs.append((x, y.tolist()))
            scores = response_scores(model, tokenizer, pairs)
            reviews += [Review("", [0.0] * (len(y) - 1) + [score])
                        for (_, y), score in zip(pairs, scores.tolist())]
    return reviews


# ── Annotators that know the facts of the toy's posts

@dataclass(frozen=True)
class Mark(Span):
    """A span that the toy annotator mentions, with its slot (the kind of fact) or fault."""
    name: str


def marks(row: dict, response: str) -> list[Mark]:
    """The spans that the toy annotator (`toy.critique`) mentions, in order of their start."""
    result = []
    for start, slot, phrase, _, is_right in toy.judged_facts(row, response):
        label = 1 if is_right else -1
        result.append(Mark(start, start + len(phrase), label, slot))
    for _, phrase in toy.faults(response):
        start = response.index(phrase)
        name = "repetition" if phrase[0] == "," else "voice"
        result.append(Mark(start, start + len(phrase), -1, name))
    return sorted(result, key=lambda mark: mark.start)


# Sentences that do not name the post's facts: by the label of a fact, and by fault of style.
VERDICTS = {1: ["the {} is right.", "the {} fits the post."],
            -1: ["the {} is wrong.", "that is not the {} of the post."],
            "repetition": ["it says something twice.", "a clause is repeated."],
            "voice": ["it speaks as the writer.", "a summary should not say my."]}


def quoted(response: str, critique: str, spans: list[Span]) -> Feedback:
    """Feedback that quotes the text of each span."""
    good = [response[span.start : span.end] for span in spans if span.label > 0]
    poor = [response[span.start : span.end] for span in spans if span.label < 0]
    return Feedback(critique, good, poor)


def critique_no_cot(row: dict, response: str) -> str:
    """Reply in mode no_cot: a verdict on each fact, without the facts of the post (Table 1)."""
    spans = marks(row, response)
    verdicts = [toy.say(VERDICTS.get(mark.name) or VERDICTS[mark.label], response, mark.name)
                for mark in spans]
    return quoted(response, " ".join(verdicts) or "It says nothing.", spans).text()


def critique_spans(row: dict, response: str) -> str:
    """Reply in mode no_cot with quotes and labels, but no prose (§4.5, "w/o CoT")."""
    return quoted(response, "My marks are below.", marks(row, response)).text()


NOISE = 0.2                             # probability of a quote in the wrong list


def critique_noise(row: dict, response: str) -> str:
    """The toy annotator's reply, but each quote is in the wrong list with probability NOISE.

    The same reply to the same response always gets the same errors. The prose is not changed.
    """
    feedback = parse_feedback(toy.critique(row, response))
    rng = random.Random(response)
    good = []
    poor = []
    for is_good, quotes in ((True, feedback.good_spans), (False, feedback.poor_spans)):
        for quote in quotes:
            (poor if is_good == (rng.random() < NOISE) else good).append(quote)
    return Feedback(feedback.critique, good, poor).text()


def draft_rows(split: str, n: int, seed: int) -> list[dict]:
    """Rows whose references have the errors of the base's training data."""
    return [row | {"reference": toy.write_draft(row["facts"], random.Random(row["id"]))}
            for row in toy.rows(split, n, seed)]


DRAFTS = replace(toy.TASK, name="toy_drafts", rows=draft_rows)
# Posts with summaries of about 80 tokens, and critiques of about 240. With a prompt of 105
# tokens and R_φ's instruction, they just fit the base's context of 512. The KL target is for a
# whole response, so it is four times that of the toy task, too.
LONG = replace(toy.TASK, name="toy_long", rows=partial(toy.rows, length=4),
               settings=toy.TASK.settings | {"max_new_tokens": 96, "max_critique_tokens": 296,
                                             "kl_target": 8.0})
