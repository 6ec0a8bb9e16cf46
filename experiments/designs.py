"""Reward designs: critics that take R_φ's place (§4.3, Table 11, Appendices A, I and N).

    python -m experiments.baselines importance      # token weights within a span
    python -m experiments.baselines end --seed 1    # setting B of App. A: Σ_t δ_t at the end

A critic maps rollouts to one Judgement for each row of this rank. The rest of Algorithm 4 does
not change. DESIGNS maps these names to critics:

    critique           δ' from the spans of the critique that R_φ writes (Text2Grad itself)
    graded             mean δ' of four critiques sampled from R_φ at temperature 1
    end                Σ_t δ_t at the last token: the same feedback without token positions
    linear_decay, importance   token weights within a span (Appendix I.1)
    true, true_end, …  the function of --annotator_function judges the rollouts, not R_φ, as
                       --critic annotator of text2grad.py does
    score              numbers of --annotator_function, see `score_critic`
    scalar, steps      score of a reward model at the last token, or at the end of each step;
                       PPO and PRM-PPO in baselines.py train these reward models first

"Human spans" (Table 11) need no separate design: R_φ is then trained on spans that people
marked. Dense labels and steps are modes of the annotator (experiments/modes.py).

Scalar and step reward models are adapters on the same base model. They have no separate head.
The score ℓ_t = h_t · (W[+] − W[−]) uses the rows W[+] and W[−] of the frozen language-model
head for the tokens "+" and "-". B rows, T response tokens.
"""

import json
import math
import random
import re
import zlib
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Callable

import torch
from torch import Tensor

import toy
from annotate import (FeedbackError, Span, annotation_question, get_mode, ground,
                      load_annotator, token_labels, token_rewards)
from data import InputError, chunks, get_task, load_object
from experiments.modes import quoted
from model import encode_prompt, response_hidden, use_lora
from policy import reward_model_critic
from report import split_text
from reward_model import Judgement, read_judgement, reward_tokens, write_critiques
from runtime import RANK, WORLD_SIZE
from sampling import head_weight, pad_batch


def row_share(rollouts) -> range:
    """Indices of the rows that this rank judges."""
    return range(RANK, len(rollouts.rows), WORLD_SIZE)


def tokens_inside(text: str, offsets, spans: list[Span]) -> list[list[int]]:
    """The indices of the tokens inside each span."""
    return [[t for t, labels in enumerate(token_labels(text, offsets, [span])) if labels]
            for span in spans]


# ── Critics that change the rewards of another critic

def replace_delta(critic, change, *options):
    """A critic like another, but with δ = change(text, offsets, judgement, *options)."""
    def new_critic(rollouts, model, tokenizer, config):
        judgements = critic(rollouts, model, tokenizer, config)
        results = []
        for i, judgement in zip(row_share(rollouts), judgements):
            delta = change(rollouts.texts[i], rollouts.offsets[i], judgement, *options)
            results.append(replace(judgement, delta=delta))
        return results
    return new_critic


def at_end(critic):
    """Setting B of Appendix A: r_T = Σ_t δ_t at the last token, and 0 before it."""
    return replace_delta(critic, pay_sum)


def pay_sum(_, offsets, judgement) -> list[float]:
    """Σ_t δ_t at the last token, and 0 before it."""
    return [0.0] * (len(offsets) - 1) + [sum(judgement.delta)]        # Eq. §3.6 A^B


def weigh(text: str, offsets, judgement, weighting: str) -> list[float]:
    """Token rewards with a weight for each token of a span (Appendix I.1): `span_weights`."""
    spans = judgement.spans
    delta = list(judgement.delta)
    for span, tokens in zip(spans, tokens_inside(text, offsets, spans)):
        weights = span_weights(text, [offsets[t] for t in tokens], weighting)
        for t, weight in zip(tokens, weights):
            # δ is 0 where a good and a poor span conflict, and stays 0 there.
            delta[t] = weight * span.label if judgement.delta[t] else 0.0
    return delta


def remove_praise(text, offsets, judgement) -> list[float]:
    """min(δ, 0): the penalties without the rewards."""
    return [min(d, 0.0) for d in judgement.delta]


def charge_omissions(text, offsets, judgement) -> list[float]:
    """δ with a penalty of 1 for each fact that the critique misses.

    A span cannot mark what is missing. The last token, usually EOS, is therefore charged.
    """
    *delta, last = judgement.delta
    return [*delta, last - judgement.critique.count(" is missing.")]


def pay_late(text, offsets, judgement, share: float) -> list[float]:
    """δ of which a share is paid at the next labelled span, and for the last one at the end."""
    spans = sorted(judgement.spans, key=lambda span: span.start)
    places = tokens_inside(text, offsets, spans)
    delta = [0.0] * len(offsets)
    for span, here, later in zip(spans, places, [*places[1:], [len(offsets) - 1]]):
        for t in here:
            delta[t] += (1 - share) * span.label
        for t in later:
            delta[t] += share * span.label
    return delta


def follow_errors(text, offsets, judgement) -> list[float]:
    """δ of spans that are poor themselves or stand after a poor one."""
    first_poor = min((span.start for span in judgement.spans if span.label < 0),
                     default=len(text))
    spans = [replace(span, label=-1) if span.start > first_poor else span
             for span in judgement.spans]
    return token_rewards(text, offsets, spans)


def damp_length(text, offsets, judgement, suggested: int) -> list[float]:
    """δ of token n times σ(6 − (n − suggested)): the length term of the release for SLF5K."""
    return [d / (1 + math.exp(n - suggested - 6))
            for n, d in enumerate(judgement.delta, 1)]


def damage(text: str, offsets, judgement, kind: str, percent: int) -> list[float]:
    """Token rewards after a percentage of the spans is damaged, see `damaged`.

    The text is the random seed, so the same text always gets the same damage.
    """
    rng = random.Random(text)
    spans = damaged(text, judgement.spans, kind, percent / 100, rng)
    return token_rewards(text, offsets, spans)


def damaged(text: str, spans: list[Span], kind: str, fraction: float, rng) -> list[Span]:
    """A copy of the spans in which a random fraction is damaged.

    kind: "flipped" changes the sign of the label. "dropped" removes the span. "shifted" moves
    the span to the nearest word without a label. "widened" adds up to two words before the span
    and one word after it. Of n spans ⌊n · fraction + u⌋ are damaged, with u uniform in [0, 1),
    so the expected number is exactly n · fraction.
    """
    count = int(len(spans) * fraction + rng.random())
    chosen = rng.sample(range(len(spans)), count)
    out = [span for i, span in enumerate(spans) if i not in chosen]
    for i in chosen:
        span = spans[i]
        if kind == "flipped":
            out.append(replace(span, label=-span.label))
        if kind == "shifted":
            out += nearest_free_word(text, span, spans + out)
        if kind == "widened":
            before = re.search(r"(?:\S+\s+){0,2}$", text[: span.start])
            after = re.compile(r"\S*(?:\s+\S+)?").match(text, span.end)
            out.append(replace(span, start=before.start(), end=after.end()))
    return out


def nearest_free_word(text: str, span: Span, spans: list[Span]) -> list[Span]:
    """The span, moved to the nearest word that overlaps no span: a list of one or no span."""
    free_words = []
    for word in re.finditer(r"\S+", text):
        start, end = word.span()
        if all(end <= label.start or label.end <= start for label in spans):
            free_words.append(replace(span, start=start, end=end))
    free_words.sort(key=lambda word: abs(word.start - span.start))
    return free_words[:1]


# ── Critics that do not need another critic

def true_critic(rollouts, model, tokenizer, config) -> list[Judgement]:
    """Judge rollouts with the function of --annotator_function.

    The function is not called for empty responses, which get δ = 0.
    """
    annotator = load_annotator(config)
    repeats_are_poor = get_task(config.task).repeats_are_poor
    judgements = []
    for i in row_share(rollouts):
        text = rollouts.texts[i]
        offsets = rollouts.offsets[i]
        row = rollouts.rows[i]
        example = {"id": row.get("id", i), "row": row, "response": text, "prompt": ""}
        question = annotation_question(example, config)
        reply = annotator(question).text if text.strip() else ""
        try:
            feedback, grounding = get_mode(config.mode).read(example, reply)
            if repeats_are_poor:
                grounding = ground(text, feedback, repeats_are_poor=True)
            judgement = reward_tokens(reply, text, offsets, feedback, grounding)
        except FeedbackError as error:
            judgement = Judgement(reply, [0.0] * len(offsets), str(error))
        judgements.append(judgement)
    return judgements


def score_critic(rollouts, model, tokenizer, config) -> list[Judgement]:
    """Rewards that --annotator_function, a user's function (row, response), returns as numbers.

    One number is paid at the last token, such as `run_python(code_of(response), row["test"])
    .passed` of measures/sandbox.py, where True is 1. A list has one number for each token. For
    this, the row also has the field "response_tokens", the texts of the tokens; the text of EOS
    is "". Empty responses are scored, too. Raises InputError if the function returns anything
    else.
    """
    function = load_object("--annotator_function", config.annotator_function, Callable)
    judgements = []
    for i in row_share(rollouts):
        tokens = split_text(rollouts.texts[i], rollouts.offsets[i])
        row = rollouts.rows[i] | {"response_tokens": tokens}
        place = f"--annotator_function {config.annotator_function}, row {row.get('id', i)}"
        value = function(row, rollouts.texts[i])
        try:
            scores = torch.as_tensor(value, dtype=torch.float64)
        except (TypeError, ValueError, RuntimeError):
            scores = torch.tensor(math.nan)                  # these are no numbers
        if scores.shape not in ((), (len(tokens),)) or not scores.isfinite().all():
            raise InputError(f"{place}: returned {value!r:.60}; return a number, such as "
                             f"1.0 if all tests pass, or a list of {len(tokens)} numbers, one "
                             f"for each of row['response_tokens']")
        delta = scores.tolist()
        if scores.ndim == 0:
            delta = [0.0] * (len(tokens) - 1) + [delta]
        judgements.append(Judgement("", delta))
    return judgements


DRAWS = 4                               # sampled critiques per rollout in `graded`


def graded(rollouts, model, tokenizer, config) -> list[Judgement]:
    """Mean δ' of DRAWS critiques at temperature 1: a Monte Carlo estimate of E[δ'_t] ∈ [−1, 1].

    The random numbers depend on the seed and the rollout, not on the batch or the ranks. An
    unreadable critique contributes δ' = 0. All other fields of a Judgement are those of the
    first critique.
    """
    indices = [i for i in row_share(rollouts) for _ in range(DRAWS)]
    prompts = [rollouts.prompts[i] for i in indices]
    texts = [rollouts.texts[i] for i in indices]
    uniforms = []
    for prompt, text in zip(prompts[::DRAWS], texts[::DRAWS]):
        seed = zlib.crc32(f"{config.seed} {prompt} {text}".encode())
        generator = torch.Generator().manual_seed(seed)
        uniforms.append(torch.rand(DRAWS, config.max_critique_tokens, generator=generator))
    critiques = write_critiques(model, tokenizer, prompts, texts, config.max_critique_tokens,
                                1.0, torch.cat(uniforms))
    judgements = [read_judgement(critique, rollouts.texts[i], rollouts.offsets[i])
                  for critique, i in zip(critiques, indices)]
    means = []
    for group in chunks(judgements, DRAWS):
        deltas = [judgement.delta for judgement in group]
        mean_delta = [sum(column) / DRAWS for column in zip(*deltas)]
        means.append(replace(group[0], delta=mean_delta))
    return means


# ── Scores: Bradley–Terry and process reward models (Appendix N)

def token_scores(model, tokenizer, pairs: list[tuple]) -> tuple[Tensor, Tensor]:
    """ℓ_t = h_t · (W[+] − W[−]) with the active adapter; h_t: hidden state after x and y_≤t.

    pairs: [(x, y)] as token ids → scores [B, T], mask [B, T].
    """
    plus, minus = (tokenizer(sign, add_special_tokens=False).input_ids[-1]
                   for sign in ("+", "-"))
    prompts = [x for x, _ in pairs]
    # One extra token gives a hidden state after the last token of y.
    responses = [[*y, plus] for _, y in pairs]
    batch = pad_batch(prompts, responses, model.device)
    hidden = response_hidden(model, *batch)[:, 1:]                      # [B, T, H]
    weight = head_weight(model)
    direction = weight[plus].float() - weight[minus].float()            # W[+] − W[−], [H]
    return hidden.float() @ direction, batch[3][:, 1:]


def mark_ends(text: str, offsets, steps: list[Span]) -> list[int]:
    """The label of each step at its last token, and 0 at all other tokens: [T]"""
    labels = [0] * len(offsets)
    for step, indices in zip(steps, tokens_inside(text, offsets, steps)):
        if indices:
            labels[indices[-1]] = step.label
    return labels


@torch.no_grad()
def pay_scores(rollouts, model, tokenizer, config, by_step: bool) -> list[Judgement]:
    """Rewards from the scores of the adapter "reward": for the response or for each step.

    by_step=False: r(x, y) = ℓ_T at the last token, for PPO (Tables 2 and 3). by_step=True:
    2σ(ℓ) − 1 = tanh(ℓ/2) at the last token of each step, for PRM-PPO (Appendix N). This maps
    σ(ℓ), the probability that the step is correct, to [−1, 1]. All other rewards are 0.
    """
    judgements = []
    with use_lora(model, "reward"):
        for part in chunks(row_share(rollouts), config.rollout_batch_size):
            pairs = []
            for i in part:
                y = rollouts.response_ids[i][rollouts.mask[i].bool()]
                x = encode_prompt(tokenizer, rollouts.prompts[i])
                pairs.append((x, y.tolist()))
            scores, _ = token_scores(model, tokenizer, pairs)
            if by_step:
                scores = torch.tanh(scores / 2)
            for i, row_scores in zip(part, scores.tolist()):
                text = rollouts.texts[i]
                offsets = rollouts.offsets[i]
                ends = [0] * (len(offsets) - 1) + [1]
                if by_step:
                    ends = mark_ends(text, offsets, step_spans(text, config.task == "kodcode"))
                delta = [score if end else 0.0 for score, end in zip(row_scores, ends)]
                judgements.append(Judgement("", delta))
    return judgements


# Critics that need a trained R_φ.
LEARNT = {
    "critique": reward_model_critic,
    "graded": graded,
    "end": at_end(reward_model_critic)}
# Critics that need a scalar or step reward model, trained by baselines.py.
SCORED = {
    "scalar": partial(pay_scores, by_step=False),
    "steps": partial(pay_scores, by_step=True)}
# Critics that need --annotator_function and no reward model.
_POOR = replace_delta(true_critic, remove_praise)
TRUE = {
    "true": true_critic,
    "score": score_critic,
    "true_end": at_end(true_critic),
    "true_late": replace_delta(true_critic, pay_late, 1.0),
    "true_half_late": replace_delta(true_critic, pay_late, 0.5),
    "true_after_errors": replace_delta(true_critic, follow_errors),
    "true_poor": _POOR,
    "true_omission": replace_delta(true_critic, charge_omissions),
    "true_poor_omission": replace_delta(_POOR, charge_omissions),
    "true_poor_length": replace_delta(_POOR, damp_length, 48)}
for _name in ("linear_decay", "importance"):
    LEARNT[_name] = replace_delta(reward_model_critic, weigh, _name)
    TRUE[f"true_{_name}"] = replace_delta(true_critic, weigh, _name)
for _kind in ("flipped", "shifted", "dropped"):
    for _percent in (10, 20, 40):
        TRUE[f"true_{_kind}_{_percent}"] = replace_delta(true_critic, damage, _kind, _percent)
DESIGNS = {**LEARNT, **SCORED, **TRUE}


# ── Weights within a span (Appendix I.1)

OTHERS = 0.2                            # weight of tokens outside content words


def span_weights(text: str, places, weighting: str) -> list[float]:  # Table 11
    """Weights in (0, 1] of the n tokens of a span (Appendix I.1).

    places: [start, end) of each token in the text. "linear_decay": 1 − (i−1)·0.9/(n−1) for
    token i. "importance": 1 on tokens that overlap a content word, 0.2 on other tokens. In the
    paper, a part-of-speech tagger finds the content words, which are nouns and verbs. Here all
    words are content words except a fixed list of English function words.
    """
    n = len(places)
    if weighting == "linear_decay":
        return [1.0 - 0.9 * i / max(1, n - 1) for i in range(n)]
    words = toy.content_words(text)
    weights = []
    for start, end in places:
        is_content = any(start < word.end() and word.start() < end for word in words)
        weights.append(1.0 if is_content else OTHERS)
    return weights


# ── Steps (Appendix N)

_LINE = r"\s*\n\s*"
_CLAUSE = (rf"(?<=[.!?;:,])\s+|{_LINE}|\s+(?=(?:and|but|because|so|who|which|while|although|"
           r"though|if|when|unless)\b)")


def step_spans(text: str, code: bool = False) -> list[Span]:
    """The steps of a text, each with label +1: lines if it is code, clauses otherwise."""
    pattern = _LINE if code else _CLAUSE
    separators = [match.span() for match in re.finditer(pattern, text)]
    bounds = [0, *chain(*separators), len(text)]
    return [Span(start, end, 1) for start, end in zip(bounds[::2], bounds[1::2])
            if text[start:end].strip()]


# ── Annotator functions that know the truth of the toy world

@dataclass(frozen=True)
class Mark(Span):
    """A span that the careful critic mentions, with the name of its fact or fault."""
    name: str


def marks(row: dict, response: str) -> list[Mark]:
    """The spans that the careful critic mentions, in reading order."""
    result = []
    for start, slot, phrase, _, is_right in toy.judged_facts(row, response):
        label = 1 if is_right else -1
        result.append(Mark(start, start + len(phrase), label, slot))
    for _, phrase in toy.faults(response):
        start = response.index(phrase)
        name = "repetition" if phrase[0] == "," else "voice"
        result.append(Mark(start, start + len(phrase), -1, name))
    return sorted(result, key=lambda mark: mark.start)


def critique_no_cot(row: dict, response: str, damages=()) -> str:
    """Reply in mode no_cot: a verdict on each fact, without the facts of the post (Table 1).

    damages: [(kind, fraction)], applied to the spans one after another with `damaged`. The same
    post and response always get the same reply.
    """
    rng = random.Random(f"{row['post']}|{response}")
    spans = marks(row, response)
    for kind, fraction in damages:
        spans = damaged(response, spans, kind, fraction, rng)
    spans = sorted(spans, key=lambda mark: mark.start)
    verdicts = [f"The {mark.name} is {'right' if mark.label > 0 else 'wrong'}."
                for mark in spans]
    return quoted(response, " ".join(verdicts) or "It says nothing.", spans).text()


def critique_spans(row: dict, response: str) -> str:
    """Reply in mode no_cot with quotes and labels, but no prose (§4.5, "w/o CoT")."""
    return quoted(response, "Spans.", marks(row, response)).text()


# Simulates an annotator that does not reason first: one verdict in ten is wrong.
critique_hasty = partial(critique_no_cot, damages=[("flipped", 0.1)])
# Simulates the errors of people: a third of the facts are missed, one verdict in twenty is
# wrong, and half of the quotes include the words around them.
critique_human = partial(critique_no_cot, damages=[("dropped", 1 / 3), ("flipped", 0.05),
                                                   ("widened", 0.5)])


def critique_steps(row: dict, response: str) -> str:
    """Reply in mode STEPS: a step is a clause, and it is correct if it contains no fault."""
    poor_marks = [mark for mark in marks(row, response) if mark.label < 0]
    steps = []
    for step in step_spans(response):
        faults = [mark.name for mark in poor_marks
                  if step.start < mark.end <= step.end]
        steps.append({
            "step": response[step.start : step.end],
            "correct": not faults,
            "reason": f"wrong: {faults}" if faults else "as in the post"})
    return json.dumps({"steps": steps})


def critique_dense(row: dict, response: str) -> str:
    """Reply in mode DENSE: a label for every word (Table 11).

    The words before a fact share its label. As in the paper, most labelled words are therefore
    function words.
    """
    facts = marks(row, response)
    names = {1: "good", -1: "poor", 0: "neutral"}
    labels = []
    for word in re.finditer(r"\S+", response):
        label = next((mark.label for mark in facts if word.start() < mark.end), 0)
        labels.append({"word": word[0], "label": names[label]})
    critique, _, _ = toy.critique(row, response).partition("\n")
    return json.dumps({"textual_feedback": critique, "labels": labels})


# Name → (--annotator_function, --mode)
ANNOTATORS = {"careful": ("toy:critique", "cot"),
              "no_cot": ("experiments.designs:critique_no_cot", "no_cot"),
              "spans": ("experiments.designs:critique_spans", "no_cot"),
              "hasty": ("experiments.designs:critique_hasty", "no_cot"),
              "human": ("experiments.designs:critique_human", "no_cot"),
              "steps": ("experiments.designs:critique_steps", "experiments.modes:STEPS"),
              "dense": ("experiments.designs:critique_dense", "experiments.modes:DENSE")}
