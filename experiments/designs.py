"""Reward designs: other critics in the place of R_φ's (§4.3, Table 11, Appendices A, I and N).

    python -m experiments.designs true             # the annotator itself judges every rollout
    python -m experiments.designs end --seed 1     # the same feedback, not placed: B of App. A

The flags behind the name are those of text2grad.py. A critic takes rollouts to a Judgement of
each row of this rank's share, and changes nothing else of Algorithm 4:

    critique           δ' from the spans of the critique that R_φ writes (the method)
    graded             the mean δ' of four critiques drawn from R_φ at temperature 1
    end, true_end      Σ_t δ_t paid at the last token: the same information with no placement
    true               the function of --critic judges the rollout itself
    linear_decay, importance, importance_code     weights within a span (Appendix I.1)
    scalar             a Bradley–Terry reward model's score r(x, y) at the last token (PPO)
    steps              a process reward model, tanh(ℓ/2) at the end of each step (PRM-PPO)

"Human spans" (Table 11) are no design of their own: R_φ learns from what people marked. Dense
labels and steps are modes of the annotator (experiments/modes.py).

Scalar and step reward models are adapters on the same base and have no head of their own: the
score is read from two rows of the frozen language-model head, ℓ_t = h_t · (W[+] − W[−]).
B rows, T response tokens.
"""

from __future__ import annotations

import ast
import json
import keyword
import random
import re
import sys
import zlib
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

import text2grad
import toy
from annotate import FeedbackError, read_reply, tokens_inside
from data import InputError, chunks, load_object, parse_flags, run_script
from measures.sandbox import fences, parse_python
from model import RANK, RANKS, encode_prompt, response_hidden, use_lora
from reward_model import Judgement, judge, reward_tokens, write_critiques
from sampling import head_weight, pad_batch
from text2grad import critique


def share(rollouts) -> range:
    """The rows that this rank judges."""
    return range(RANK, len(rollouts.rows), RANKS)


# ── Critics around another critic

def at_end(critic):
    """Setting B of Appendix A: r_T = Σ_t δ_t at the last token, 0 before it."""
    def critic_at_end(rollouts, model, tokenizer, config):
        judged = critic(rollouts, model, tokenizer, config)
        # Eq. §3.6 A^B
        return [replace(found, delta=[0.0] * (len(found.delta) - 1) + [sum(found.delta)])
                for found in judged]
    return critic_at_end


def weighted(critic, weighting: str):
    """Another share of the reward for each token of a span (Appendix I.1)."""
    def weighted_critic(rollouts, model, tokenizer, config):
        judged = critic(rollouts, model, tokenizer, config)
        return [replace(found, delta=weigh(rollouts.texts[i], rollouts.offsets[i], found,
                                           weighting))
                for i, found in zip(share(rollouts), judged)]
    return weighted_critic


def weigh(text: str, offsets, found: Judgement, weighting: str) -> list[float]:
    """δ with the weights of its spans; what is 0, being in no span or in two, stays 0."""
    delta = list(found.delta)
    for span, inside in zip(found.spans, tokens_inside(text, offsets, found.spans)):
        weights = span_weights(text, [offsets[i] for i in inside], weighting)
        for i, weight in zip(inside, weights):
            delta[i] = weight * span.label if found.delta[i] else 0.0
    return delta


# ── Critics of their own

def silent(rollouts, model, tokenizer, config) -> list[Judgement]:
    """Nobody judges: for the tables of baselines that have no reward."""
    return [Judgement("", [0.0] * len(rollouts.offsets[i]), "nobody judges")
            for i in share(rollouts)]


def true_critic(rollouts, model, tokenizer, config) -> list[Judgement]:
    """The function of --critic judges, and is read as phase 1 reads it."""
    return [true_judgement(rollouts.rows[i], rollouts.texts[i], rollouts.offsets[i], config)
            for i in share(rollouts)]


def true_judgement(row: dict, text: str, offsets, config) -> Judgement:
    """What the annotator says of a response; an empty one is not shown to it."""
    critic = load_object("--critic", config.critic)
    example = {"id": "", "prompt": "", "response": text}
    if not text.strip():
        return judge("", text, offsets)
    reply = critic(row, text)
    try:
        return reward_tokens(reply, text, offsets, *read_reply(example, reply, config.mode))
    except FeedbackError as error:
        return Judgement(reply, [0.0] * len(offsets), str(error))


def graded(rollouts, model, tokenizer, config, draws: int = 4) -> list[Judgement]:
    """The mean δ' of critiques at temperature 1: E[δ'_t] in [−1, 1], by Monte Carlo.

    What is drawn depends on the seed and the rollout, and neither on the batch nor on ranks.
    """
    judged = []
    for part in chunks(share(rollouts), max(1, config.rollout_batch_size // draws)):
        many = [i for i in part for _ in range(draws)]
        x, y = ([texts[i] for i in many] for texts in (rollouts.prompts, rollouts.texts))
        shape = draws, config.max_critique_tokens
        uniforms = torch.cat([own_uniforms(rollouts, i, config, shape) for i in part])
        written = write_critiques(model, tokenizer, x, y, config.max_critique_tokens, 1.0,
                                  uniforms)
        found = [judge(z, rollouts.texts[i], rollouts.offsets[i])
                 for z, i in zip(written, many)]
        judged += [mean(few) for few in chunks(found, draws)]
    return judged


def own_uniforms(rollouts, row: int, config, shape) -> Tensor:
    """Numbers in [0, 1) to draw from for one rollout: a function of its texts and the seed."""
    said = f"{config.seed} {rollouts.prompts[row]} {rollouts.texts[row]}"
    generator = torch.Generator().manual_seed(zlib.crc32(said.encode()))
    return torch.rand(shape, generator=generator)


def mean(judged: list[Judgement]) -> Judgement:
    """The mean δ of several critiques of one response; an unreadable one counts as zeros."""
    first = next((found for found in judged if not found.reason), judged[0])
    total = {name: sum(getattr(found, name) for found in judged)
             for name in ("quotes", "unmatched", "ambiguous", "conflicts")}
    delta = [sum(column) / len(judged) for column in zip(*(found.delta for found in judged))]
    return replace(first, delta=delta, **total)


# ── Scores: Bradley–Terry and process reward models (Appendix N)

def token_scores(model, tokenizer, pairs: list[tuple]) -> tuple[Tensor, Tensor]:
    """ℓ_t = h_t · (W[+] − W[−]), where h_t has seen x and y_≤t, with the adapter in use.

    pairs: [(x, y)] as ids → scores [B, T], mask [B, T].
    """
    plus, minus = (tokenizer(mark, add_special_tokens=False).input_ids[-1] for mark in "+-")
    if plus == minus:
        raise InputError("this tokenizer has no tokens for + and −, from which scores are read")
    # One more token, so that there is a state after the last one of y.
    batch = pad_batch([x for x, _ in pairs], [[*y, plus] for _, y in pairs],
                      tokenizer.pad_token_id or 0, model.device)
    hidden, weight = response_hidden(model, *batch)[:, 1:], head_weight(model)
    return hidden.float() @ (weight[plus].float() - weight[minus].float()), batch[3][:, 1:]


def sequence_scores(model, tokenizer, pairs: list[tuple]) -> Tensor:
    """r(x, y): the score at the last token of each y, EOS included. [(x, y)] as ids → [B]"""
    scores, mask = token_scores(model, tokenizer, pairs)
    return scores.gather(1, mask.sum(1, keepdim=True) - 1).squeeze(1)


def step_ends(text: str, offsets, spans) -> list[int | None]:
    """For each span of characters the last token that wrote some of it, white space aside."""
    def wrote(place, start, end):
        return bool(text[max(place[0], start) : min(place[1], end)].strip())
    return [next((i for i in reversed(range(len(offsets))) if wrote(offsets[i], *span)), None)
            for span in spans]


@torch.no_grad()
def scores_of(rollouts, model, tokenizer, config, steps: bool) -> list[Judgement]:
    """What the adapter "reward" pays, at the last token of y or of every step; 0 at others.

    scalar, for PPO: r(x, y). steps, for PRM-PPO: 2σ(ℓ) − 1, how surely a step is right.
    """
    judged = []
    with use_lora(model, "reward"):
        for part in chunks(share(rollouts), config.micro_batch_size):
            ids = [rollouts.response_ids[i][rollouts.mask[i].bool()].tolist() for i in part]
            prompts = [encode_prompt(tokenizer, rollouts.prompts[i]) for i in part]
            scores, _ = token_scores(model, tokenizer, list(zip(prompts, ids)))
            paid = (torch.tanh(scores / 2) if steps else scores).tolist()
            for i, y, row in zip(part, ids, paid):
                text, ends = rollouts.texts[i], [len(y) - 1]
                if steps:
                    spans = step_spans(text, config.task == "kodcode")
                    ends = step_ends(text, rollouts.offsets[i], spans)
                judged.append(Judgement("", [row[t] if t in ends else 0.0
                                             for t in range(len(y))]))
    return judged


def scalar(rollouts, model, tokenizer, config) -> list[Judgement]:
    """PPO of Tables 2 and 3: a sequence-level score at the last token."""
    return scores_of(rollouts, model, tokenizer, config, steps=False)


def steps(rollouts, model, tokenizer, config) -> list[Judgement]:
    """PRM-PPO (Appendix N): a score at the last token of each step."""
    return scores_of(rollouts, model, tokenizer, config, steps=True)


WEIGHTINGS = ("linear_decay", "importance", "importance_code")
LEARNT = {"critique": critique, "graded": graded, "end": at_end(critique),
          **{name: weighted(critique, name) for name in WEIGHTINGS}}     # R_φ judges
SCORED = {"scalar": scalar, "steps": steps}                   # need an adapter of baselines.py
DESIGNS = {**LEARNT, **SCORED, "true": true_critic, "true_end": at_end(true_critic)}


# ── Weights within a span (Appendix I.1)

OTHERS = 0.2                            # what a token that is no content word gets

FUNCTION_WORDS = frozenset("""
    i me my mine myself we us our ours ourselves you your yours yourself yourselves he him
    his himself she her hers herself it its itself they them their theirs themselves one
    oneself who whom whose which what that this these those someone somebody something
    anyone anybody anything everyone everybody everything nobody nothing none a an the some
    any no each every either neither both all half many much more most few fewer less least
    several such another other others own same enough about above across after against along
    amid among around as at before behind below beneath beside besides between beyond by
    despite down during except for from in inside into like near of off on onto opposite out
    outside over past per since through throughout till to toward towards under underneath
    unlike until up upon via with within without and but or nor so yet if unless because
    although though while whereas when whenever where wherever whether than once am is are
    was were be been being have has had having do does did doing will would shall should can
    could may might must ought cannot not there here then thus hence also too very just only
    even still already how why however therefore
""".split())


def word_of(text: str, start: int, end: int) -> str:
    """The whole word that the first letter or digit of text[start:end] belongs to, or ""."""
    first = re.compile(r"\w").search(text, start, end)
    if not first:
        return ""
    before = re.search(r"[\w'’]*$", text[: first.start()])
    after = re.compile(r"[\w'’]*").match(text, first.start())
    return (before.group() + after.group()).strip("'’")


def is_content(word: str, code: bool = False) -> bool:
    """Whether a word carries meaning by itself. The paper weighs nouns and verbs, as a tagger
    saw them; here every word of English is content that is not in a closed list, and in code
    every name, number and word that is no keyword."""
    if code:
        return bool(word) and not keyword.iskeyword(word)
    word = word.lower().replace("’", "'")
    return (bool(word) and not word.endswith("n't")
            and word.split("'")[0] not in FUNCTION_WORDS)


def span_weights(text: str, places, weighting: str) -> list[float]:  # Table 11
    """The weight in (0, 1] of each of a span's n tokens, by their characters (Appendix I.1).

    "linear_decay": 1 − (i−1)·0.9/(n−1). "importance": 1 on content words, 0.2 on others;
    "importance_code" reads the text as Python. A token weighs as the word that it is part of.
    """
    if weighting == "linear_decay":
        return [1.0 - 0.9 * i / max(1, len(places) - 1) for i in range(len(places))]
    if weighting in ("importance", "importance_code"):
        code = weighting == "importance_code"
        return [1.0 if is_content(word_of(text, *place), code) else OTHERS for place in places]
    raise ValueError(f"weighting must be one of {', '.join(WEIGHTINGS)}, not {weighting!r}")


# ── Steps (Appendix N)

_CLAUSE = (r"(?<=[.!?;:,])\s+|\s*\n\s*|\s+(?=(?:and|but|because|so|who|which|while|although|"
           r"though|if|when|unless)\b)")
WORDS = re.compile(r"\S(?:.*\S)?", re.DOTALL)      # without the white space at both ends


def step_spans(text: str, code: bool = False) -> list[tuple[int, int]]:
    """The characters [start, end) of each step: clauses of a text, or statements of code."""
    if code:
        return statement_spans(text)
    cuts = [(0, 0), *(match.span() for match in re.finditer(_CLAUSE, text)),
            (len(text), len(text))]
    return [WORDS.search(text, a, b).span()
            for (_, a), (b, _) in pairwise(cuts) if text[a:b].strip()]


def statement_spans(text: str) -> list[tuple[int, int]]:
    """Every statement of a Python program, in order; of a compound one (def, if, …) its head.

    Where there are fences, of what stands in them. What does not parse has a statement in every
    line that is not blank.
    """
    blocks = fences(text) or [(0, len(text))]
    return sum([_statements_of(text, *block) for block in blocks], [])


def _statements_of(text: str, start: int, end: int) -> list[tuple[int, int]]:
    code = text[start:end]
    lines = code.splitlines(keepends=True)
    begins = [start + sum(map(len, lines[:i])) for i in range(len(lines))]
    tree = parse_python(code)
    if tree is None:
        return [WORDS.search(text, at, at + len(line)).span()
                for at, line in zip(begins, lines) if line.strip()]

    def place(line: int, column: int) -> int:                       # ast counts bytes of UTF-8
        return begins[line - 1] + len(lines[line - 1].encode()[:column].decode())

    def first(node) -> int:
        head = min([node, *getattr(node, "decorator_list", [])],
                   key=lambda n: (n.lineno, n.col_offset))
        return place(head.lineno, head.col_offset) - (head is not node)  # @ before a decorator

    found = []
    for node in (n for n in ast.walk(tree) if isinstance(n, ast.stmt)):
        within = [child for child in ast.walk(node)
                  if isinstance(child, ast.stmt) and child is not node]
        end = min(map(first, within)) if within else place(node.end_lineno, node.end_col_offset)
        found.append(WORDS.search(text, first(node), end).span())
    return sorted(found)


# ── Other annotators of the toy world's truth, each with its --mode

def critique_no_cot(row: dict, response: str) -> str:
    """Mode no_cot: a verdict on every fact, and never what the post says (Table 1)."""
    judged = toy.judged_facts(row, response)
    sentences = [f"The {slot} is {'right' if right else 'wrong'}."
                 for _, slot, _, _, right in judged]
    return _spans_reply(sentences or ["No fact is there."],
                        [value for _, _, value, _, right in judged if right],
                        [value for _, _, value, _, right in judged if not right])


def _spans_reply(sentences: list[str], good: list[str], poor: list[str]) -> str:
    spans = json.dumps({"good_spans": good, "poor_spans": poor})
    return f"{' '.join(sentences)}\n{spans}"


def critique_dense(row: dict, response: str) -> str:
    """Mode experiments.modes:DENSE, a label for every word (Table 11): the words that lead to a
    fact share its label, so that most of what is labelled are function words, as in the paper.
    """
    judged, labels = toy.judged_facts(row, response), []
    for word in re.finditer(r"\S+", response):
        right = next((right for at, _, value, _, right in judged
                      if at + len(value) > word.start()), None)
        label = "neutral" if right is None else "good" if right else "poor"
        labels.append({"word": word.group(), "label": label})
    said = [said for _, _, _, said, _ in judged] + toy.missing(row, response)
    return json.dumps({"textual_feedback": " ".join(said), "labels": labels})


def critique_steps(row: dict, response: str) -> str:
    """Mode experiments.modes:STEPS: every clause, correct where all its facts are (App. N)."""
    judged, found = toy.judged_facts(row, response), []
    for start, end in step_spans(response):
        wrong = [value for at, _, value, _, right in judged if start <= at < end and not right]
        found.append({"step": response[start:end], "correct": not wrong,
                      "reason": f"{', '.join(wrong)} is wrong" if wrong else "as in the post"})
    return json.dumps({"steps": found})


def critique_human(row: dict, response: str) -> str:
    """Mode no_cot, as people would: a fifth of the wrong facts is missed and half of the right
    ones passed over, one verdict in twenty is mistaken, and half of the quotes hold the words
    around the fact too. A post and a response always get the same reply.
    """
    rng = random.Random(f"{row['post']}|{response}")
    sentences, quotes = [], {True: [], False: []}
    for at, slot, value, _, right in toy.judged_facts(row, response):
        if rng.random() < (0.5 if right else 0.2):
            continue
        right = right != (rng.random() < 0.05)
        start, end = at, at + len(value)
        if rng.random() < 0.5:
            start = re.search(r"(?:\S+\s+){0,2}$", response[:start]).start()
            end += re.match(r"\S*(?:\s+\S+)?", response[end:]).end()
        quotes[right].append(response[start:end])
        sentences.append(f"I like that it says {value}." if right
                         else f"The {slot} is not {value}.")
    return _spans_reply(sentences or ["It is fine."], quotes[True], quotes[False])


def main():
    """text2grad.py with the design that the first word names, and its flags."""
    name, *flags = sys.argv[1:] or [""]
    if name not in DESIGNS:
        raise InputError(f"{name or 'no design'}: name one of {', '.join(DESIGNS)}, then flags "
                         f"of text2grad.py")
    config = parse_flags(text2grad.Config, flags, __doc__, text2grad.preset)
    if name in SCORED and not config.reward_model:
        raise InputError(f"{name} needs --reward_model, an adapter of experiments/baselines.py")
    if name.startswith("true") and not config.critic:
        raise InputError(f"{name} needs --critic module:function, which judges every rollout")
    text2grad.main(flags, DESIGNS[name], learnt=name in LEARNT)


if __name__ == "__main__":
    run_script(main, "designs", torch.OutOfMemoryError)
