"""Reward designs: what judges a rollout in phase 3, and which tokens are paid (§4.3, Table 11, Appendices A, I and N).

    python text2grad.py --reward true          # the annotator itself instead of R_φ: the price of a learned critic
    python text2grad.py --reward end           # the same feedback with no placement: setting B of Appendix A

Paper: §4.3, Table 11, Appendices A, I and N. Shapes: B rows, T response tokens.

A design takes rollouts to δ, one number per sampled token, and changes nothing else of Algorithm 4:

    critique    δ' from the spans of the critique that R_φ writes (the method)
    graded      the mean δ' of several critiques, drawn from R_φ at temperature 1: E[δ'_t] in [−1, 1], by Monte Carlo
    end         Σ_t δ'_t of the critique, paid at the last token (setting B): the same information with no placement
    true        the function of --critic judges the rollout itself; true_end pays its Σ_t δ_t at the last token
    scalar      a Bradley–Terry reward model's score r(x, y), paid at the last token (PPO of Tables 2 and 3)
    steps       a process reward model: tanh(ℓ/2) = 2σ(ℓ) − 1 at the last token of every step (PRM-PPO, Appendix N)

"Human spans" (Table 11) are no design of their own: people cannot mark rollouts while a policy trains, so R_φ learns
from what they marked (annotate.py --people, then reward_model.py, then --reward_model here). Dense labels, and
critiques with and without chain of thought, are modes of the annotator (--mode).

Scalar and step reward models are adapters on the same base and have no head of their own: the score is read from two
rows of the frozen language-model head, ℓ_t = h_t · (W[+] − W[−]), so that an adapter in PEFT's format is all to keep.
"""

from __future__ import annotations

import zlib
from dataclasses import replace

import torch
from torch import Tensor

from annotate import InputError, programmatic_annotator
from model import encode_prompt, head_weight, pad_batch, response_hidden, use_lora
from parts import step_spans
from reward_model import Judgement, chunks, judge, write_critiques

JUDGES = {"critique": "R_φ", "graded": "R_φ", "end": "R_φ", "true": "the critic", "true_end": "the critic",
          "scalar": "the scalar reward model", "steps": "the step reward model"}
# "none", which no flag can name, is the design of a baseline that has nobody to judge its table.
LEARNT = ("critique", "graded", "end")                 # need R_φ, from phases 1 and 2
SCORED = ("scalar", "steps")                           # need another adapter "reward", from baselines.py


def verdicts(model, tokenizer, config, rows, prompts, texts, ids, offsets) -> tuple[list[Judgement], int]:
    """What the design of config.reward says of each rollout (Alg. 4 l.12–13), and the tokens written to say it.

    rows: as the data has them. ids: the sampled tokens, and offsets: the characters of `texts` that each wrote.
    """
    name = config.reward.removesuffix("_end")
    if name in LEARNT:
        draws = config.critique_samples if name == "graded" else 1
        critiques, written = _critiques(model, tokenizer, prompts, texts, config, draws)
        found = [mean([judge(z, y, at, config.weighting) for z in critiques[i * draws : (i + 1) * draws]])
                 for i, (y, at) in enumerate(zip(texts, offsets))]
    elif name in SCORED:
        found, written = score_rewards(model, tokenizer, config, prompts, texts, ids, offsets), 0
    elif name == "none":
        found, written = [Judgement("", [0.0] * len(at), "nobody judges") for at in offsets], 0
    else:
        found, written = [true_verdict(*each, config) for each in zip(rows, texts, offsets)], 0
    return [at_end(v) if config.reward.endswith("end") else v for v in found], written


def at_end(verdict: Judgement) -> Judgement:
    """Setting B of Appendix A: r_T = Σ_t δ_t at the last token, 0 before it."""
    return replace(verdict, delta=[0.0] * (len(verdict.delta) - 1) + [sum(verdict.delta)])     # Eq. §3.6 A^B


# ── Critiques: of R_φ, and of the annotator itself ──────────────────────────────────────────────────────

def _critiques(model, tokenizer, prompts, texts, config, draws: int) -> tuple[list[str], int]:
    """`draws` critiques of each rollout, those of one rollout together: greedy where it is one, else at temperature 1.

    What is drawn is a function of the seed and the rollout, so it depends neither on the batch nor on the ranks.
    """
    if draws == 1 and config.reward != "graded":
        return write_critiques(model, tokenizer, prompts, texts, config.max_critique_tokens)
    seeds = [zlib.crc32(f"{config.seed} {x} {y}".encode()) for x, y in zip(prompts, texts)]
    uniforms = torch.cat([torch.rand(draws, config.max_critique_tokens, generator=torch.Generator().manual_seed(s))
                          for s in seeds])
    many = lambda texts: [text for text in texts for _ in range(draws)]
    return write_critiques(model, tokenizer, many(prompts), many(texts), config.max_critique_tokens, 1.0,
                           uniforms=uniforms)


def mean(judged: list[Judgement]) -> Judgement:
    """The mean δ of several critiques of one response; one that cannot be read says nothing, and so counts as zeros."""
    if len(judged) == 1:
        return judged[0]
    read = [v for v in judged if not v.reason]
    first, total = (read or judged)[0], {name: sum(getattr(v, name) for v in judged)
                                         for name in ("quotes", "unmatched", "ambiguous", "conflicts")}
    return replace(first, delta=[sum(column) / len(judged) for column in zip(*(v.delta for v in judged))], **total)


def true_verdict(row: dict, text: str, offsets, config) -> Judgement:
    """What the annotator says of a rollout, read as phase 1 reads it; an empty response is not shown to it.

    offsets: the characters [start, end) of each token.
    """
    critique = programmatic_annotator(config.critic)({"row": row, "response": text}) if text.strip() else ""
    return judge(critique, text, offsets, config.weighting, config.mode)


# ── Scores: Bradley–Terry and process reward models ─────────────────────────────────────────────────────

def token_scores(model, tokenizer, pairs: list[tuple]) -> tuple[Tensor, Tensor]:
    """ℓ_t = h_t · (W[+] − W[−]), where h_t has seen x and y_≤t, with the adapter in use.

    pairs: [(x, y)] as ids → scores [B, T], mask [B, T]. Raises InputError where the tokenizer tells + and − not apart.
    """
    plus, minus = (tokenizer(mark, add_special_tokens=False).input_ids[-1] for mark in "+-")
    if plus == minus:
        raise InputError("this tokenizer has no tokens for + and −, from which scores are read")
    # One more token, so that there is a state after the last one of y.
    batch = pad_batch([x for x, _ in pairs], [[*y, plus] for _, y in pairs], tokenizer.pad_token_id or 0, model.device)
    hidden, weight = response_hidden(model, *batch)[:, 1:], head_weight(model)
    return hidden.float() @ (weight[plus].float() - weight[minus].float()), batch[3][:, 1:]


def sequence_scores(model, tokenizer, pairs: list[tuple]) -> Tensor:
    """r(x, y): the score at the last token of each y, EOS included. [(x, y)] as ids → [B]"""
    scores, mask = token_scores(model, tokenizer, pairs)
    return scores.gather(1, mask.sum(1, keepdim=True) - 1).squeeze(1)


def step_ends(text: str, offsets, spans) -> list[int | None]:
    """For each span of characters the last token that wrote some of it, white space aside; None where none did."""
    def wrote(place, start, end):
        return bool(text[max(place[0], start) : min(place[1], end)].strip())
    return [next((i for i in reversed(range(len(offsets))) if wrote(offsets[i], *span)), None) for span in spans]


@torch.no_grad()
def score_rewards(model, tokenizer, config, prompts, texts, ids, offsets) -> list[Judgement]:
    """What the adapter "reward" pays (Appendix N), at the last token of y or of every step, 0 at all others.

    scalar, for PPO: r(x, y). steps, for PRM-PPO: 2σ(ℓ) − 1, how sure it is that the step is correct, in [−1, 1].
    offsets: the characters [start, end) of each token.
    """
    found, steps = [], config.reward == "steps"
    with use_lora(model, "reward"):
        for part in chunks(list(zip(prompts, texts, ids, offsets)), config.micro_batch_size):
            scores, _ = token_scores(model, tokenizer, [(encode_prompt(tokenizer, x), y) for x, _, y, _ in part])
            for (_, text, y, at), row in zip(part, (torch.tanh(scores / 2) if steps else scores).tolist()):
                ends = step_ends(text, at, step_spans(text, config.task == "kodcode")) if steps else [len(y) - 1]
                found.append(Judgement("", [row[t] if t in ends else 0.0 for t in range(len(y))]))
    return found
