"""Algorithm 3: R_φ learns to write z, a critique and its spans as JSON (§3.4, phase 2).

    python reward_model.py --task slf5k --data feedback.jsonl --model MODEL
    torchrun --nproc_per_node 8 reward_model.py …       # the same on eight ranks

    [x ; y ; z] ← the tokens of each annotated row                       encode_rows      l.2
    φ ← a new LoRA adapter "reward" with B = 0 on the frozen base        add_lora         l.4
    for each batch:                                                      fit_adapter      l.5–7
        L_R(φ) = −Σ_j log p_φ(z_j | z_<j, x, y)                          z_loss
        φ ← AdamW on L_R / number of tokens of z in the batch
    z' ~ R_φ(·|x, y) and its token rewards δ', for Algorithm 4           write_critiques

The base is the policy's, so memory holds it once. The tokens of the prompt have no loss, but
the EOS token does. `judge_rows` compares R_φ with the annotator on held-out rows, token by
token (§4.2, Table 1).

Departures: the loss is the mean per token of z, whereas the paper's is the mean per row. Quotes
that do not occur in the response are removed from z before training, whereas Appendix L removes
them from the annotation. If a critique cannot be parsed, its δ' is zero. The paper does not say
what a quote that occurs several times means; see `ground`.
B rows, T tokens of a response, N tokens of z in a flat batch, H hidden size.
"""

import math
import random
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import torch

from annotate import (Feedback, FeedbackError, Span, annotation_question, ask_annotator,
                      conflicting_tokens, ground, parse_feedback, token_offsets,
                      token_rewards)
from ask import Reply, run_journal
from data import (InputError, Task, chunks, examples, get_task, next_command, read_rows,
                  reward_prompt, run_script, write_rows)
from model import (add_lora, encode_answer, encode_prompt, encode_text, eos_ids, gathered,
                   load_model, lora_parameters, response_hidden, save_lora, use_lora)
from runtime import (RANK, WORLD_SIZE, all_sum, check_ranks, checkpointed, checksum,
                     gather_rows, lock_directory, print_rank0, save_settings, start_ranks,
                     stop_ranks, token_groups)
from sampling import context_length, generate, head_weight, pad_batch, token_logprobs
from settings import FitConfig, RewardConfig, derive_settings, parse_flags


MAX_GRAD_NORM = 1.0                                       # the value in the release
SAVE_EVERY = 100                                          # steps between checkpoints


# ── Algorithm 3: teacher forcing

def z_loss(model, pairs: list[tuple]) -> torch.Tensor:
    """−Σ_j log p_φ(z_j | z_<j, x, y) of all pairs (§3.4, Algorithm 3): a scalar in nats."""
    x_ids, z_ids = zip(*pairs)                              # x_ids: of the instruction, x and y
    prompts, prompt_mask, z, z_mask = pad_batch(x_ids, z_ids, model.device)
    indices = z_mask.flatten().nonzero().squeeze(1)         # tokens of z in the flat batch, [N]
    hidden = response_hidden(model, prompts, prompt_mask, z, z_mask)                # h of all z
    hidden = hidden.flatten(0, 1)[indices]                                             # [N, H]
    assert len(hidden) == sum(map(len, z_ids)), "Alg. 3 l.5: one p_φ(z_j | ·) per token of z"
    targets = z.flatten()[indices]                                                        # [N]
    return -token_logprobs(hidden, head_weight(model), targets).sum()                 # l.5–6


def fit_adapter(model, pairs: list[tuple], name: str, config: RewardConfig,
                loss_of=z_loss, count_of=lambda pair: len(pair[1]), out=None):
    """Train an adapter by minimising its mean loss (Algorithm 3); return the loss of each step.

    The adapter is created if it does not exist. loss_of(model, pairs): the summed loss in nats.
    count_of(pair): the number of terms in this sum, by default the tokens of z. out: directory
    of checkpoints; training continues from the newest one, if it was made of the same pairs.
    The ranks share each batch. Raises InputError where a loss or gradient is not finite.
    """
    torch.manual_seed(config.seed)
    parameters = lora_parameters(model, name) or add_lora(                              # l.4
        model, name, config.reward_lora_r, config.reward_lora_alpha,
        config.reward_lora_dropout, config.reward_lora_targets.split(","))
    optimizer = torch.optim.AdamW(parameters, config.reward_learning_rate,
                                  weight_decay=config.reward_weight_decay, fused=True)
    rng = random.Random(config.seed)
    batches = []
    for _ in range(config.reward_epochs):
        batches += chunks(rng.sample(pairs, len(pairs)), config.reward_batch_size)
    state = {"losses": [], "made_of": checksum(state=pairs)}
    check_ranks(state)
    warm_up = max(1, len(batches) // 20)                                              # steps
    model.train()
    with use_lora(model, name):
        for step in checkpointed(len(batches), optimizer, state, out, f"fit {name}",
                                 SAVE_EVERY):
            # Each step and rank draws different dropout masks.
            torch.manual_seed(config.seed * 1_000_003 + step * WORLD_SIZE + RANK)
            factor = min((step + 1) / warm_up, 1 - step / len(batches))
            optimizer.param_groups[0]["lr"] = config.reward_learning_rate * factor
            loss = add_gradients(model, batches[step], config, loss_of, count_of)    # l.5–6
            for p in parameters:
                all_sum(p.grad)
            norm = torch.nn.utils.clip_grad_norm_(parameters, MAX_GRAD_NORM)
            if not math.isfinite(loss + norm.item()):
                raise InputError(f"fit {name}: the loss or gradient of step {step} is not "
                                 f"finite; lower --reward_learning_rate or try --dtype "
                                 f"float32")
            optimizer.step()                                                            # l.7
            optimizer.zero_grad()
            state["losses"].append(loss)
    model.eval()
    return state["losses"]


def add_gradients(model, batch, config: RewardConfig, loss_of, count_of) -> float:
    """Add the gradients of this rank's part of a batch; return the mean loss of the batch."""
    terms = sum(map(count_of, batch))
    lengths = [sum(map(len, pair)) for pair in batch]                       # tokens of x, y, z
    mean_loss = 0.0                                         # this rank's share of the mean
    for group in token_groups(range(len(batch)), lengths, config.micro_batch_tokens):
        index = group[RANK::WORLD_SIZE]
        # FSDP needs all ranks in every forward pass; a rank without rows uses weight 0.
        weight = 1 if index else 0
        rank_pairs = [batch[i] for i in index or group[:1]]
        loss = loss_of(model, rank_pairs) / terms * weight
        loss.backward()
        mean_loss += loss.item()
    return sum(gather_rows([mean_loss]))


# ── Phase 2: rows of feedback, [x ; y ; z]

def _feedback_prompt(row: dict) -> str:
    """x of a row of feedback.jsonl. `join` raises TypeError where a field is not of texts."""
    "".join(row["good_spans"] + row["poor_spans"] + [row["critique"], row["prompt"]])
    return row["prompt"]


# The rows of feedback.jsonl; their lists of spans may be empty.
FEEDBACK = Task("feedback", _feedback_prompt,
                ("id", "prompt", "response", "critique", "good_spans", "poor_spans"))


def encode_rows(rows: list[dict], tokenizer, max_tokens: int) -> tuple[list[dict], list[tuple]]:
    """Tokenize rows as [x ; y ; z] (§3.4); return (kept rows, their token ids).

    The token ids of a row are a pair (ids of x and y, ids of z). Rows with more than
    max_tokens tokens are dropped. Quotes that `ground` does not find in the response are
    removed from z, so that R_φ does not learn to invent quotes.
    """
    kept_rows = []
    pairs = []
    for row in rows:
        z = Feedback(row["critique"], [*row["good_spans"]], [*row["poor_spans"]])
        for quotes in (z.good_spans, z.poor_spans):
            for quote in ground(row["response"], Feedback("", quotes, [])).unmatched:
                quotes.remove(quote)
        assert not ground(row["response"], z).unmatched, "§3.4: z quotes the response"
        x_ids = encode_prompt(tokenizer, reward_prompt(row["prompt"], row["response"]))
        z_ids = encode_answer(tokenizer, z.text())
        if len(x_ids) + len(z_ids) <= max_tokens:
            kept_rows.append(row)
            pairs.append((x_ids, z_ids))
    return kept_rows, pairs


def split_rows(rows: list[dict], held_out: int, seed: int, prompt_of
               ) -> tuple[list[dict], list[dict]]:
    """Split rows into (training rows, held-out rows) by their prompts (§4.1).

    All rows of a prompt are in the same part, and both parts keep the order of `rows`.
    held_out: number of held-out prompts. It is reduced to a tenth of all prompts, or to one if
    there are fewer than ten. A single prompt is not held out. prompt_of(row): the prompt.
    """
    prompts = sorted({str(prompt_of(row)) for row in rows})
    random.Random(seed).shuffle(prompts)
    count = min(held_out, max(1, len(prompts) // 10), len(prompts) - 1)
    held_out_prompts = set(prompts[:count])
    training = []
    evaluation = []
    for row in rows:
        part = evaluation if str(prompt_of(row)) in held_out_prompts else training
        part.append(row)
    return training, evaluation


def fit(model, tokenizer, config: RewardConfig, data, out: Path) -> str:
    """Phase 2 (Alg. 1 l.13–14, Algorithm 3): train R_φ, evaluate it and return the summary.

    data: the annotated rows. out: directory for the adapter, metrics and samples. Raises
    InputError if every training row is too long.
    """
    rows = read_rows(data, task=FEEDBACK)
    limit = min(config.reward_max_tokens, context_length(model))
    _lock = lock_directory(out)                       # held until the function ends
    training, evaluation = split_rows(rows, config.reward_held_out, config.seed,
                                      FEEDBACK.policy_prompt)
    _, pairs = encode_rows(training, tokenizer, limit)
    held_out, _ = encode_rows(evaluation, tokenizer, limit)
    too_long = len(rows) - len(pairs) - len(held_out)
    problem = (f"{data}: {too_long} of {len(rows)} rows have more than {limit} tokens "
               f"(--reward_max_tokens, or the model's context)")
    if not pairs:
        raise InputError(problem)
    if too_long:
        print_rank0(f"left out: {problem}")
    losses = fit_adapter(model, pairs, "reward", config, out=out)
    with gathered(model):
        figures, samples = judge_rows(model, tokenizer, held_out, config.max_critique_tokens)
    metrics = {"training_rows": len(pairs), "too_long": too_long, "final_loss": losses[-1],
               "held_out_rows": len(held_out), **figures}
    if RANK == 0:
        save_lora(model, "reward", out / "adapter")                                      # l.8
        write_rows(out / "losses.jsonl", [{"iteration": step, "loss in nats per token of z": x}
                                          for step, x in enumerate(losses, 1)])
        write_rows(out / "samples.jsonl", samples)
        # This file is written last, because its presence marks the phase as finished.
        write_rows(out / "metrics.json", [metrics])
    return summary(metrics)


# ── Critiques of R_φ and of the annotator: z' ~ R_φ(z' | x, y) and its δ'

@dataclass
class Judgement:
    """A critique of one response and the token rewards computed from it (Alg. 4 l.13)."""
    critique: str
    delta: list[float]                    # δ'_t of each token of the response
    reason: str = ""                      # why the critique cannot be parsed, or ""
    quotes: int = 0                       # number of quotes in the critique
    unmatched: int = 0                    # quotes that do not occur in the response
    ambiguous: int = 0                    # quotes that occur more often than they are quoted
    conflicts: int = 0                    # tokens in both a good and a poor span
    spans: list[Span] = field(default_factory=list)


def read_judgement(critique: str, text: str, offsets, task=None) -> Judgement:
    """Parse A'(y) from a critique and compute δ' from it (Alg. 4 l.13).

    If the critique cannot be parsed, δ' is zero. offsets: the characters [start, end) of each
    token of the text. task: see `reward_tokens`.
    """
    try:
        if not critique:
            raise FeedbackError("no critique: the response is empty or too long for R_φ")
        feedback = parse_feedback(critique, response=text)
    except FeedbackError as error:
        return Judgement(critique, [0.0] * len(offsets), str(error))
    return reward_tokens(critique, text, offsets, feedback, ground(text, feedback), task)


def reward_tokens(critique: str, text: str, offsets, feedback, grounding, task) -> Judgement:
    """Compute δ' from grounded feedback (Alg. 4 l.13), and count quotes without reward.

    If task.repeats_are_poor, a good quote is poor at its further places. task may be None.
    """
    if task and task.repeats_are_poor:
        grounding = ground(text, feedback, repeats_are_poor=True)
    delta = token_rewards(text, offsets, grounding.spans)                              # l.13
    return Judgement(critique, delta, "", len(feedback.good_spans + feedback.poor_spans),
                     len(grounding.unmatched), grounding.ambiguous,
                     conflicting_tokens(text, offsets, grounding.spans), grounding.spans)


def write_critiques(model, tokenizer, prompts: list[str], responses: list[str],
                    max_new_tokens: int, temperature=0.0, uniforms=None,
                    batch_size=64) -> list[str]:
    """Write one critique per response with the adapter "reward" (Alg. 4 l.12).

    By default decoding is greedy, so that rewards are deterministic, whereas l.12 samples z'.
    With a temperature above 0, `uniforms` decide the draws, [B, max_new_tokens]. batch_size:
    critiques that are decoded together. The critique is "" if the response is empty or too long
    for the context.
    """
    max_prompt_tokens = context_length(model) - max_new_tokens
    prompt_ids = {}                        # index of a response → prompt ids
    for i, (x, y) in enumerate(zip(prompts, responses)):
        ids = encode_prompt(tokenizer, reward_prompt(x, y))
        if y.strip() and len(ids) <= max_prompt_tokens:
            prompt_ids[i] = ids
    u = None if uniforms is None else uniforms[list(prompt_ids)]
    with use_lora(model, "reward", merge=True):
        critique_ids = generate(model, list(prompt_ids.values()), max_new_tokens, temperature,
                                eos_ids(tokenizer, model), u, batch_size)
    critiques = [""] * len(responses)
    for i, ids in zip(prompt_ids, critique_ids, strict=True):
        critiques[i] = tokenizer.decode(ids, skip_special_tokens=True)
    return critiques


def judge_by_annotator(batch, config) -> list[Judgement]:
    """The annotator's judgements of the rollouts of a batch.

    Requests use the journal, budget and prices of phase 1. A judgement of an empty response, or
    without a usable reply, has a reason and δ = 0.
    """
    task = get_task(config.task)
    rows = [row | {"response": y, "outcome": None} for row, y in zip(batch.rows, batch.texts)]
    if task.tests and config.allow_code_execution:
        from measures.sandbox import add_outcomes
        rows = add_outcomes(rows, task)
    questions = [annotation_question(example, config) for example in examples(task, rows)
                 if example["response"].strip()]
    path = Path(config.output_dir, "feedback.jsonl.journal")
    with run_journal(path, *config.prices) as journal:
        replies = iter(ask_annotator(questions, journal, config))
    judgements = []
    for text, offsets in zip(batch.texts, batch.offsets):
        reply = next(replies) if text.strip() else Reply("", "the response is empty")
        if reply.reason:
            judgements.append(Judgement(reply.text, [0.0] * len(offsets), reply.reason))
            continue
        judgements.append(reward_tokens(reply.text, text, offsets, *reply.value, task))
    return judgements


def annotator_critic(rollouts, model, tokenizer, config) -> list[Judgement]:  # noqa: ARG001
    """The annotator in the place of R_φ (--critic annotator): judgements of this rank's rows.

    Rank 0 asks about all rows, because the journal has one writer.
    """
    judgements = judge_by_annotator(rollouts, config) if RANK == 0 else None
    return gather_rows([judgements])[0][RANK::WORLD_SIZE]


# ── Evaluation of R_φ on held-out rows (§4.2, Table 1)

def count_tokens(truth: list[float], predicted: list[float]) -> Counter:
    """Count the marked, predicted and correctly predicted tokens of a response (Table 1).

    truth: δ of the annotator, [T]. predicted: δ' of R_φ, [T]. Only their signs are compared, so
    that graded values such as .75 count as well.
    """
    counts = Counter(tokens=len(truth))
    for true_delta, predicted_delta in zip(truth, predicted):
        for name, sign in (("good", 1), ("poor", -1)):
            is_marked = true_delta * sign > 0
            is_predicted = predicted_delta * sign > 0
            counts[f"{name} marked"] += is_marked
            counts[f"{name} predicted"] += is_predicted
            counts[f"{name} hit"] += is_marked and is_predicted
    return counts


def token_figures(counts: Counter) -> dict[str, float | None]:
    """Precision and recall from the sums of `count_tokens`; None if a denominator is 0."""
    figures = {}
    for name in ("good", "poor"):
        for figure, denominator in (("precision", "predicted"), ("recall", "marked")):
            total = counts[f"{name} {denominator}"]
            figures[f"{name}_{figure}"] = counts[f"{name} hit"] / total if total else None
    return figures


def judge_rows(model, tokenizer, rows: list[dict], max_critique_tokens: int):
    """Compare R_φ with the annotator on annotated rows (Table 1); return (figures, samples).

    figures: precision, recall, and the share of R_φ's critiques that cannot be parsed
    ("unparseable"). samples: both critiques of each row. The ranks share the rows.
    """
    counts = Counter()
    samples = []
    rank_rows = rows[RANK::WORLD_SIZE]
    critiques = write_critiques(model, tokenizer, [row["prompt"] for row in rank_rows],
                                [row["response"] for row in rank_rows], max_critique_tokens)
    for row, z in zip(rank_rows, critiques):
        text, offsets = token_offsets(tokenizer, encode_text(tokenizer, row["response"]))
        annotation = Feedback("", row["good_spans"], row["poor_spans"])
        truth = token_rewards(text, offsets, ground(text, annotation).spans)
        judgement = read_judgement(z, text, offsets)
        counts += count_tokens(truth, judgement.delta)
        counts["unparseable"] += bool(judgement.reason)
        samples.append({"id": row["id"], "response": row["response"],
                        "annotator": row["critique"], "reward_model": z,
                        "unreadable": judgement.reason})
    counts = sum(gather_rows([counts]), Counter())
    figures = {"unparseable": counts["unparseable"] / max(1, len(rows)),
               "tokens": counts["tokens"], "poor_tokens": counts["poor marked"]}
    return figures | token_figures(counts), gather_rows(samples)


def summary(metrics: dict) -> str:
    """One line with the precision and recall of the tokens that R_φ marks, and a warning.

    R_φ is weak if it finds less than a fifth of the poor tokens, or if random marks would be as
    precise.
    """
    if not metrics["held_out_rows"]:
        return "trained, but not evaluated: too few rows to hold any out"
    figures = ", ".join(f"{name} {metrics[name] or 0.0:.3f}" for name in (
        "poor_precision", "poor_recall", "good_precision", "good_recall", "unparseable"))
    share = metrics["poor_tokens"] / max(1, metrics["tokens"])
    text = f"{figures}; {share:.3f} of {metrics['tokens']} held-out tokens are poor"
    if (metrics["poor_recall"] or 0.0) < 0.2 or (metrics["poor_precision"] or 0.0) <= share:
        text += ("\nwarning: R_φ is weak; annotate more rows, raise --reward_epochs, or use "
                 "--critic annotator")
    return text


# ── The script

def main():
    """Train and evaluate a reward model, with settings from the command line."""
    config = parse_flags(FitConfig, __doc__)
    task = read_rows(config.data)[0].get("task") or config.task
    # If the command line has a --task, it comes later and has priority.
    config = parse_flags(FitConfig, __doc__, ["--task", task, *sys.argv[1:]])
    out = Path(config.output_dir)
    model, tokenizer = load_model(config.model, config.dtype, start_ranks(), config.shard,
                                  config.activation_checkpointing)
    config = derive_settings(config, 0, model)
    save_settings(config, out)
    text = fit(model, tokenizer, config, config.data, out)
    data = None if get_task(config.task).rows else "ROWS"           # the toy world makes rows
    command = next_command("text2grad.py", task=config.task, model=config.model, data=data,
                           reward_model=out / "adapter", output_dir=f"{out}-policy")
    print_rank0(f"{out}: {text}\n{command}")
    stop_ranks()


if __name__ == "__main__":
    run_script(main, "reward_model")
