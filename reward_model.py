"""Algorithm 3: R_φ learns to write z, a critique and its spans as JSON (§3.4, phase 2).

    python reward_model.py --task slf5k --data feedback.jsonl --model MODEL
    torchrun --nproc_per_node 8 reward_model.py …       # the same on eight ranks

    [x ; y ; z] ← the tokens of each annotated row                       encode_rows      l.2
    φ ← a new LoRA adapter "reward" with B = 0 on the frozen base        add_lora         l.4
    for each batch:                                                      fit_adapter      l.5–7
        L_R(φ) = −Σ_j log p_φ(z_j | z_<j, x, y)                          z_loss
        φ ← AdamW on L_R / number of tokens of z in the batch
    z' ~ R_φ(·|x, y) and its token rewards δ', for Algorithm 4           write_critiques, judge

The base is the policy's, so memory holds it once. The tokens of the prompt have no loss, but
the EOS token does. `judge_rows` compares R_φ with the annotator on held-out rows, token by
token (§4.2, Table 1); `probe` does so on the policy's own responses during phase 3.

Departures: the loss is the mean per token of z, whereas the paper's is the mean per row. Quotes
that do not occur in the response are removed from z before training, whereas Appendix L removes
them from the annotation. If a critique cannot be parsed, its δ' is zero. The paper does not say
what a quote that occurs several times means; see `ground`.
B rows, T tokens of a response, N tokens of z in a flat batch, H hidden size.
"""

import math
import os
import random
import sys
from collections import Counter
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from tqdm import tqdm

from annotate import (Feedback, FeedbackError, Span, annotation_question, annotation_settings,
                      ask_annotator, conflicting_tokens, ground, half_inside_tokens,
                      parse_feedback, token_offsets, token_rewards)
from ask import Journal
from data import (InputError, Task, chunks, examples, fill, flag, get_task,
                  next_command, parse_flags, preset, read_rows, reward_prompt, run_script,
                  write_rows)
from model import (BaseConfig, add_lora, encode_answer, encode_prompt, encode_text, eos_ids,
                   gathered, load_base, lora_parameters, response_hidden, save_lora,
                   scaled_rate, use_lora)
from runtime import (CHANGEABLE, RANK, WORLD_SIZE, all_sum, check_ranks, check_settings,
                     checksum, forecast_minutes, gather_rows, keep_checkpoint, lock_directory,
                     print_rank0, result_exists, resume, run_collective, start_ranks)
from sampling import context_length, generate, head_weight, pad_batch, token_logprobs


@dataclass
class RewardConfig(BaseConfig):
    """Reward model R_φ: rows and training. The defaults suit the toy task (Table 9)."""
    data: str = flag("feedback.jsonl", "annotated rows, written by annotate.py")
    output_dir: str = flag("runs/reward", "directory for the adapter, metrics and samples")
    epochs: int | None = flag(
        2, "passes over the rows (release: 3); none: about 200 steps", least=1)
    batch_size: int = flag(16, "rows per optimizer step", least=1)
    learning_rate: float | None = flag(
        5e-3, "peak value (release: 1e-5, KodCode 2e-5); none: by the size of the model",
        most=10)
    weight_decay: float = flag(0.0, "decay (release: 3e-7, KodCode .01)", most=10)
    lora_r: int = flag(32, "rank of the adapter (release: 16)", least=1, most=10**4)
    lora_alpha: float = flag(64, "LoRA α; the update is scaled by α / r (release: 32)")
    lora_dropout: float = flag(0.0, "dropout of the adapter (release: .05, .1)", most=0.99)
    lora_targets: str = flag("q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj",
                             "adapted layers (release: q_proj,v_proj)")
    max_tokens: int = flag(512, "longest x + y + z in tokens; longer rows are dropped", least=1)
    held_out: int = flag(200, "prompts held out, at most a tenth")
    micro_batch_size: int = flag(16, "rows per forward pass; affects dropout masks", least=1)


# The rows of feedback.jsonl; their lists of spans may be empty.
FEEDBACK = Task("feedback", lambda row: row["prompt"],
                ("id", "prompt", "response", "critique", "good_spans", "poor_spans"))
MAX_GRAD_NORM = 1.0                                       # the value in the release
SAVE_EVERY = 100                                          # steps between checkpoints


def reward_settings(config, run: Path) -> RewardConfig:
    """Settings of phase 2 in a run directory: feedback.jsonl → reward/adapter."""
    settings = preset(config.task, "reward")
    settings |= {f.name: getattr(config, f.name) for f in fields(BaseConfig)}
    named = {"learning_rate": config.reward_learning_rate, "epochs": config.reward_epochs,
             "lora_targets": config.reward_lora_targets}
    settings |= {name: value for name, value in named.items() if value is not None}
    return RewardConfig(**settings | {
        "data": str(run / "feedback.jsonl"), "output_dir": str(run / "reward"),
        "micro_batch_size": config.micro_batch_size})


def derive_reward_settings(config: RewardConfig, count: int, model) -> RewardConfig:
    """Choose the settings that are None: about 200 optimizer steps, and a rate for this model.

    count: number of training rows.
    """
    epochs = min(10, max(3, 200 * config.batch_size // count))
    return fill(config, epochs=epochs, learning_rate=scaled_rate(model, 5e-3))


# ── From rows to token sequences [x ; y ; z]

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


def split_rows(rows: list[dict], held_out: int, seed: int, prompt_of=lambda row: row["prompt"],
               least: int = 0) -> tuple[list[dict], list[dict]]:
    """Split rows into (training rows, held-out rows) by their prompts (§4.1).

    All rows of a prompt are in the same part, and both parts keep the order of `rows`.
    held_out: number of held-out prompts. It is reduced to a tenth of all prompts, but not below
    `least`. prompt_of(row): the prompt of a row.
    """
    prompts = sorted({str(prompt_of(row)) for row in rows})
    random.Random(seed).shuffle(prompts)
    count = max(least, min(held_out, len(prompts) // 10))
    held_out_prompts = set(prompts[:count])
    training = []
    evaluation = []
    for row in rows:
        part = evaluation if str(prompt_of(row)) in held_out_prompts else training
        part.append(row)
    return training, evaluation


# ── Algorithm 3: teacher forcing

def z_loss(model, pairs: list[tuple]) -> torch.Tensor:
    """−Σ_j log p_φ(z_j | z_<j, x, y) of all pairs (§3.4, Algorithm 3): a scalar in nats."""
    prompts, z_ids = zip(*pairs)
    *inputs, mask = pad_batch(prompts, z_ids, model.device)
    indices = mask.flatten().nonzero().squeeze(1)           # tokens of z in the flat batch, [N]
    hidden = response_hidden(model, *inputs, mask).flatten(0, 1)[indices]              # [N, H]
    assert len(hidden) == sum(map(len, z_ids)), "Alg. 3 l.5: one p_φ(z_j | ·) per token of z"
    targets = inputs[2].flatten()[indices]                                                # [N]
    return -token_logprobs(hidden, head_weight(model), targets).sum()                 # l.5–6


def shuffle_batches(pairs: list[tuple], size: int, rng: random.Random) -> list[list[tuple]]:
    """Shuffle pairs into batches of similar length, by sorting random pools of 16 batches."""
    order = []
    for pool in chunks(rng.sample(pairs, len(pairs)), 16 * size):
        order += sorted(pool, key=lambda pair: sum(map(len, pair)))
    batches = chunks(order, size)
    return rng.sample(batches, len(batches))


def _accumulate_gradients(model, batch, config, loss_of, count_of) -> float:
    """Accumulate gradients of this rank's part of a batch; return the batch's mean loss."""
    terms = sum(map(count_of, batch))
    mean_loss = 0.0
    for part in chunks(batch, config.micro_batch_size * WORLD_SIZE):
        rank_pairs = part[RANK::WORLD_SIZE]
        # FSDP needs all ranks in every forward pass; a rank without rows uses weight 0.
        weight = 1 if rank_pairs else 0
        loss = loss_of(model, rank_pairs or part[:1]) / terms * weight
        loss.backward()
        mean_loss += loss.item()
    return sum(gather_rows([mean_loss]))


def _optimizer_step(optimizer, parameters, mean_loss) -> bool:
    """Sum gradients over ranks, clip and step. False: skipped, because they are not finite."""
    for p in parameters:
        all_sum(p.grad)
    norm = torch.nn.utils.clip_grad_norm_(parameters, MAX_GRAD_NORM).item()
    is_finite = math.isfinite(mean_loss) and math.isfinite(norm)
    if is_finite:
        optimizer.step()
    optimizer.zero_grad()
    return is_finite


def fit_adapter(model, pairs: list[tuple], name: str, config: RewardConfig,
                loss_of=z_loss, count_of=lambda pair: len(pair[1]), out=None):
    """Train an adapter by minimising its mean loss (Algorithm 3); return the loss of each step.

    The adapter is created if it does not exist. loss_of(model, pairs): the summed loss in nats.
    count_of(pair): the number of terms in this sum, by default the tokens of z. out: directory
    of checkpoints; training resumes from the newest one. The ranks share each batch.

    A step is skipped if its loss or gradient is not finite; its loss is None in the result.
    Raises InputError if all steps are skipped.
    """
    torch.manual_seed(config.seed)
    parameters = lora_parameters(model, name) or add_lora(                              # l.4
        model, name, config.lora_r, config.lora_alpha, config.lora_dropout,
        config.lora_targets.split(","))
    optimizer = torch.optim.AdamW(parameters, config.learning_rate,
                                  weight_decay=config.weight_decay, fused=True)
    rng = random.Random(config.seed)
    batches = []
    for _ in range(config.epochs):
        batches += shuffle_batches(pairs, config.batch_size, rng)
    settings = {key: value for key, value in asdict(config).items()
                if key not in CHANGEABLE | {"data"}}
    fingerprint = checksum(state=[settings, pairs])
    check_ranks(fingerprint)
    checkpoint, state = resume(out, optimizer, fingerprint) if out else (None, {})
    start = state.get("iteration", 0)
    losses = state.get("losses", [])
    warm_up = max(1, len(batches) // 20)                                              # steps
    model.train()
    bar = tqdm(range(start, len(batches)), f"fit {name}", len(batches), initial=start,
               disable=RANK > 0)
    with use_lora(model, name):
        for step in forecast_minutes(bar, f"fit {name}"):
            # Each step and rank draws different dropout masks.
            torch.manual_seed(config.seed * 1_000_003 + step * WORLD_SIZE + RANK)
            rate = config.learning_rate * min((step + 1) / warm_up, 1 - step / len(batches))
            optimizer.param_groups[0]["lr"] = rate
            mean_loss = _accumulate_gradients(model, batches[step], config, loss_of, count_of)
            is_finite = _optimizer_step(optimizer, parameters, mean_loss)                # l.7
            losses.append(mean_loss if is_finite else None)
            bar.set_postfix(loss=f"{mean_loss:.3f}")
            is_due = (step + 1) % SAVE_EVERY == 0 or step + 1 == len(batches)
            if out and is_due:
                state = {"iteration": step + 1, "losses": losses, "made_of": fingerprint}
                checkpoint = keep_checkpoint(out, optimizer, state, checkpoint)
    model.eval()
    if skipped := losses.count(None):
        problem = (f"fit {name}: {skipped} of {len(losses)} optimizer steps were skipped "
                   f"because their loss or gradient was not finite; lower --learning_rate or "
                   f"try --dtype float32")
        if skipped == len(losses):
            raise InputError(problem)
        print_rank0(f"warning: {problem}")
    return losses


# ── Inference with R_φ: z' ~ R_φ(z' | x, y) and its δ'

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
    half_inside: int = 0                  # tokens that overlap a span without being inside any
    spans: list[Span] = field(default_factory=list)


def judge(critique: str, text: str, offsets, repeats_are_poor: bool = False) -> Judgement:
    """Parse A'(y) from a critique and compute δ' from it (Alg. 4 l.13).

    If the critique cannot be parsed, δ' is zero. offsets: the characters [start, end) of each
    token of the text. repeats_are_poor: see `ground`.
    """
    try:
        if not critique:
            raise FeedbackError("no critique: the response is empty or too long for R_φ, or "
                                "R_φ wrote nothing")
        feedback = parse_feedback(critique, response=text)
    except FeedbackError as error:
        return Judgement(critique, [0.0] * len(offsets), str(error))
    grounding = ground(text, feedback, repeats_are_poor)
    return reward_tokens(critique, text, offsets, feedback, grounding)


def reward_tokens(critique: str, text: str, offsets, feedback, grounding) -> Judgement:
    """Compute δ' from grounded feedback (Alg. 4 l.13), and count quotes without reward."""
    spans = grounding.spans
    delta = token_rewards(text, offsets, spans)                                        # l.13
    assert len(delta) == len(offsets), "Alg. 4 l.13: one δ'_t per token of y"
    return Judgement(critique, delta, "", len(feedback.good_spans + feedback.poor_spans),
                     len(grounding.unmatched), grounding.ambiguous,
                     conflicting_tokens(text, offsets, spans),
                     half_inside_tokens(text, offsets, spans), spans)


def write_critiques(model, tokenizer, prompts: list[str], responses: list[str],
                    max_new_tokens: int, temperature=0.0, uniforms=None) -> list[str]:
    """Write one critique per response with the adapter "reward" (Alg. 4 l.12).

    By default decoding is greedy, so that rewards are deterministic, whereas l.12 samples z'.
    With a temperature above 0, `uniforms` decide the draws, [B, max_new_tokens]. The critique
    is "" if the response is empty or too long for the context.
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
                                eos_ids(tokenizer, model), uniforms=u)
    assert len(critique_ids) == len(prompt_ids), "Alg. 4 l.12: one z' for each y"
    critiques = [""] * len(responses)
    for i, ids in zip(prompt_ids, critique_ids):
        critiques[i] = tokenizer.decode(ids, skip_special_tokens=True)
    return critiques


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


def judge_rows(model, tokenizer, rows: list[dict], max_critique_tokens: int):
    """Compare R_φ with the annotator on annotated rows (Table 1); return (figures, samples).

    figures: precision and recall, and "unparseable", the share of critiques that cannot be
    parsed. samples: the critiques of both for each row. The ranks share the rows.
    """
    counts = Counter()
    samples = []
    for part in tqdm(chunks(rows[RANK::WORLD_SIZE], 64), "judge the reward model",
                     disable=RANK > 0):
        prompts = [row["prompt"] for row in part]
        responses = [row["response"] for row in part]
        critiques = write_critiques(model, tokenizer, prompts, responses, max_critique_tokens)
        for row, z in zip(part, critiques):
            ids = encode_text(tokenizer, row["response"])
            text, offsets = token_offsets(tokenizer, ids)
            annotation = Feedback("", row["good_spans"], row["poor_spans"])
            truth = token_rewards(text, offsets, ground(text, annotation).spans)
            judgement = judge(z, text, offsets)
            counts += count_tokens(truth, judgement.delta)
            counts["unparseable"] += bool(judgement.reason)
            samples.append({"id": row["id"], "response": row["response"],
                            "annotator": row["critique"], "reward_model": z,
                            "unreadable": judgement.reason})
    counts = sum(gather_rows([counts]), Counter())
    figures = {"unparseable": counts["unparseable"] / max(1, len(rows)),
               "tokens": counts["tokens"], "poor_tokens": counts["poor marked"]}
    return figures | token_figures(counts), gather_rows(samples)


def token_figures(counts: Counter) -> dict[str, float | None]:
    """Precision and recall from the sums of `count_tokens`; None if a denominator is 0."""
    figures = {}
    for name in ("good", "poor"):
        for figure, denominator in (("precision", "predicted"), ("recall", "marked")):
            total = counts[f"{name} {denominator}"]
            figures[f"{name}_{figure}"] = counts[f"{name} hit"] / total if total else None
    return figures


def judge_by_annotator(batch, config, count: int | None = None) -> list[Judgement]:
    """The annotator's judgements of the first `count` rollouts of a batch; None: of all.

    Requests use the journal, budget and prices of phase 1. A judgement of an empty response, or
    without a usable reply, has a reason and δ = 0.
    """
    task = get_task(config.task)
    annotation = annotation_settings(config, Path(config.output_dir))
    texts = batch.texts[:count]
    judgements = [Judgement("", [0.0] * len(offsets), "the response is empty")
                  for offsets in batch.offsets[:count]]
    indices = [i for i, y in enumerate(texts) if y.strip()]
    rows = [batch.rows[i] | {"response": texts[i], "outcome": None} for i in indices]
    if task.tests and config.allow_code_execution:
        from measures.sandbox import add_outcomes
        rows = add_outcomes(rows, task)
    questions = [annotation_question(example, annotation) for example in examples(task, rows)]
    with Journal(f"{annotation.output}.journal", *annotation.prices) as journal:
        replies = ask_annotator(questions, journal, annotation)
        for i, reply in zip(indices, replies):
            offsets = batch.offsets[i]
            if reply.reason:
                judgements[i] = Judgement(reply.text, [0.0] * len(offsets), reply.reason)
                continue
            feedback, grounding = reply.value
            if task.repeats_are_poor:
                grounding = ground(texts[i], feedback, repeats_are_poor=True)
            judgements[i] = reward_tokens(reply.text, texts[i], offsets, feedback, grounding)
    return judgements


def probe(batch, config) -> dict[str, float | None]:
    """R_φ beside the annotator on the first --probe_rows of the policy's own rollouts.

    R_φ was trained on another policy's responses. If its δ' rises and the annotator's does not,
    the policy exploits R_φ. Responses that the annotator could not judge do not count.
    """
    counts = Counter()
    true_delta = []
    judgements = judge_by_annotator(batch, config, config.probe_rows)
    for judgement, predicted in zip(judgements, batch.feedback):
        if not judgement.reason:
            counts += count_tokens(judgement.delta, predicted.delta)
            true_delta += judgement.delta
    mean = sum(true_delta) / len(true_delta) if true_delta else None
    return {"true_delta": mean, "poor_tokens": counts["poor marked"], **token_figures(counts)}


def fit(model, tokenizer, config: RewardConfig) -> dict:
    """Phase 2 (Alg. 1 l.13–14, Algorithm 3): train R_φ, evaluate it and return the metrics."""
    rows = read_rows(config.data, task=FEEDBACK)
    limit = min(config.max_tokens, context_length(model))
    out = Path(config.output_dir)
    _lock = lock_directory(out)                       # held until the function ends
    training, evaluation = split_rows(rows, config.held_out, config.seed)
    _, pairs = encode_rows(training, tokenizer, limit)
    held_out, held_pairs = encode_rows(evaluation, tokenizer, limit)
    if not pairs:
        raise InputError(f"{config.data}: every training row has more than {limit} tokens; "
                         f"raise --max_tokens, or use a model with a longer context")
    too_long = len(rows) - len(pairs) - len(held_out)
    if too_long:
        print_rank0(f"{config.data}: left out {too_long} of {len(rows)} rows, which have more "
                    f"than {limit} tokens (--max_tokens)")
    config = derive_reward_settings(config, len(pairs), model)
    losses = fit_adapter(model, pairs, "reward", config, out=out)
    curve = [{"iteration": step, "loss in nats per token of z": loss}
             for step, loss in enumerate(losses, 1)]
    metrics = {"training_rows": len(pairs), "too_long": too_long, "steps": len(losses),
               "skipped_steps": losses.count(None), "final_loss": losses[-1]}
    with gathered(model), torch.no_grad():
        figures, samples = judge_rows(model, tokenizer, held_out, config.max_critique_tokens)
        parts = chunks(held_pairs[RANK::WORLD_SIZE], config.micro_batch_size)
        with use_lora(model, "reward"):                                          # L_R(φ)
            losses = [z_loss(model, part).item() for part in parts]
    if held_out:
        loss = sum(gather_rows([sum(losses)])) / sum(len(z) for _, z in held_pairs)
        metrics |= {"held_out_rows": len(held_out), "held_out_loss": loss, **figures}
    if RANK == 0:
        save_lora(model, "reward", out / "adapter")                                      # l.8
        write_rows(out / "losses.jsonl", curve)
        write_rows(out / "samples.jsonl", samples)
        write_rows(out / "config.json", [asdict(config)])
        # This file is written last, because its presence marks the phase as finished.
        write_rows(out / "metrics.json", [metrics])
    return metrics


def summary(metrics: dict) -> str:
    """One line with the held-out loss of R_φ and the precision and recall of its tokens."""
    if "held_out_loss" not in metrics:
        return "trained, but not evaluated: too few rows to hold any out"
    texts = {key: "–" if x is None else f"{x:.3f}" for key, x in metrics.items()}
    share = metrics["poor_tokens"] / max(1, metrics["tokens"])
    return (f"held-out loss {metrics['held_out_loss']:.4f}; poor tokens precision "
            f"{texts['poor_precision']}, recall {texts['poor_recall']} (all tokens marked: "
            f"{share:.3f}, 1; {metrics['poor_tokens']} of {metrics['tokens']} tokens in "
            f"{metrics['held_out_rows']} rows are poor); good tokens "
            f"{texts['good_precision']}, {texts['good_recall']}; unparseable "
            f"{metrics['unparseable']:.1%}")


FEW_TOKENS = 30                          # fewer poor tokens do not tell what R_φ finds
LEAST_RECALL = 0.2


def check_reward_model(path: Path, is_allowed: bool):
    """Warn before phase 3 where R_φ is weak; see `summary`. path: its metrics.json, if any.

    R_φ is weak if it finds less than a fifth of the poor tokens, or is not more precise than
    random marks. Raises InputError if both are true, unless is_allowed.
    """
    metrics = read_rows(path)[0] if result_exists(path) else {}
    if not metrics.get("tokens"):
        return                                # no held-out rows, or an R_φ of an old version
    count = metrics["poor_tokens"]
    if count < FEW_TOKENS:
        print_rank0(f"warning: {path}: only {count} poor tokens in the held-out rows, too few "
                    f"to say what R_φ finds; annotate more rows")
        return
    share = count / metrics["tokens"]
    recall = metrics["poor_recall"]
    precision = metrics["poor_precision"] or 0.0
    faults = []
    if recall < LEAST_RECALL:
        faults.append(f"finds {recall:.0%} of the poor tokens")
    if precision <= share:
        faults.append(f"has a precision of {precision:.2f}, and random marks reach {share:.2f}")
    if faults:
        problem = (f"R_φ {' and '.join(faults)} ({path}); annotate more rows, raise "
                   f"--reward_epochs, or use --critic annotator")
        if len(faults) == 2 and not is_allowed:
            raise InputError(f"{problem}, or set --allow_weak_reward_model")
        print_rank0(f"warning: {problem}")


def refuse_other_settings(config: RewardConfig):
    """Raise InputError where --output_dir holds an R_φ that was trained with other settings."""
    out = Path(config.output_dir)
    if result_exists(out / "metrics.json"):
        (saved,) = read_rows(out / "config.json")
        settings = asdict(config)
        given = {name for name, value in settings.items() if value is not None}
        check_settings(settings, saved, given - CHANGEABLE, out, "choose another --output_dir")


def main():
    """Train and evaluate a reward model, with settings from the command line."""
    settings = partial(preset, part="reward")
    config = parse_flags(RewardConfig, __doc__, settings)
    if os.path.isfile(config.data):
        task = read_rows(config.data)[0].get("task") or config.task
        # If the command line has a --task, it comes later and has priority.
        config = parse_flags(RewardConfig, __doc__, settings, ["--task", task, *sys.argv[1:]])
    refuse_other_settings(config)
    device = start_ranks(minutes=30.0)
    model, tokenizer = load_base(config, device)
    metrics = fit(model, tokenizer, config)
    data = None if get_task(config.task).rows else "ROWS"           # the toy world makes rows
    command = next_command("text2grad.py", task=config.task, model=config.model, data=data,
                           reward_model=f"{config.output_dir}/adapter",
                           output_dir=f"{config.output_dir}-policy")
    print_rank0(f"{config.output_dir}: {summary(metrics)}\n{command}")
    run_collective(dist.destroy_process_group)


if __name__ == "__main__":
    run_script(main, "reward_model")
