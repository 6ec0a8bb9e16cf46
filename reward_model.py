"""Phase 2: R_φ learns to write z = [critique ; span JSON] of a response (§3.4, Algorithm 3).

    python reward_model.py --task slf5k --data feedback.jsonl --model MODEL
    torchrun --nproc_per_node 8 reward_model.py …       # the same, by eight

R_φ is a LoRA adapter on the base that the policy shares, trained by teacher forcing:
L_R(φ) = −E[log p_φ(z | x, y)], prompt masked, EOS trained. It is judged on rows it never saw:
by its loss, and by its spans against the annotator's, token by token (§4.2, Table 1). `judge`
and `write_critiques` are what phase 3 asks of it (Alg. 4 l.12–13).

Departures: quotes that are not in the response are taken out of z before training (Appendix L
does this with the annotation), and a critique that does not parse has found nothing.
B rows, T tokens of a response, N tokens of z in a flat batch, H hidden size.
"""

from __future__ import annotations

import math
import random
import sys
from collections import Counter
from dataclasses import asdict, dataclass, field
from operator import itemgetter
from pathlib import Path

import torch
import torch.distributed as dist
from tqdm import tqdm

from annotate import (Feedback, FeedbackError, Span, conflicting_tokens, ground,
                      half_inside_tokens, parse_feedback, token_offsets, token_rewards)
from data import (DTYPES, InputError, chunks, flag, get_task, parse_flags, read_rows,
                  reward_prompt, run_script, write_rows)
from model import (add_lora, checkpoint_activations, encode_answer, encode_prompt, eos_ids,
                   gathered, load_model, lora_parameters, response_hidden, save_lora, shard,
                   use_lora)
from runtime import (RANK, WORLD_SIZE, all_sum, checksum, gather_rows, keep_checkpoint,
                     lock_directory, newest_checkpoint, print_rank0, restore_optimizer,
                     run_collective, start_ranks)
from sampling import context_length, generate, head_weight, pad_batch, token_logprobs


@dataclass
class RewardConfig:
    """Defaults are the toy world's; --task sets the release's for the others (Table 9)."""
    task: str = flag("toy", "toy, slf5k, ultrafeedback, kodcode, or module:NAME of your own")
    model: str = flag("toy/base", "base: a directory or hub id (paper: Llama-3.1-8B-Instruct)")
    data: str = flag("feedback.jsonl", "annotated rows, from annotate.py")
    output_dir: str = flag("runs/reward", "where the adapter, metrics and samples go")
    seed: int = flag(0, "of the split, the order and the adapter's first values", most=10**9)
    epochs: int = flag(3, "passes over the rows (release: 3)", least=1)
    batch_size: int = flag(16, "rows per optimizer step", least=1)
    learning_rate: float = flag(3e-3, "peak, AdamW (release: 1e-5, KodCode 2e-5)", most=10)
    weight_decay: float = flag(0.0, "of the adapter (release: 3e-7, KodCode .01)", most=10)
    lora_r: int = flag(32, "rank of the adapter (release: 16)", least=1, most=10**4)
    lora_alpha: float = flag(64, "the update is scaled by alpha / r (release: 32)")
    lora_dropout: float = flag(0.0, "on the adapter's input (release: .05, .1)", most=0.99)
    lora_targets: str = flag("q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj",
                             "layers that get it (release: q_proj,v_proj)")
    max_tokens: int = flag(512, "of x, y, z; longer rows are left out and counted", least=1)
    max_critique_tokens: int = flag(96, "longest z it may write (release: 500, 768)", least=1)
    held_out: int = flag(200, "prompts kept for judging, at most a tenth of all")
    dtype: str | None = flag(None, "of the base; none: bfloat16 on CUDA, float32 on a CPU",
                             DTYPES)
    micro_batch_size: int = flag(16, "rows per forward pass; moves dropout's masks", least=1)
    activation_checkpointing: bool = flag(False, "less memory, more time")
    shard: bool = flag(False, "spread the frozen base over the ranks (FSDP2)")

    GROUPS = {"task": "start here", "epochs": "training", "dtype": "the machine"}


MAX_GRAD_NORM = 1.0                                       # as in the release
SAVE_EVERY = 100                                          # steps between checkpoints
# What a fit that goes on may change: its weights depend on it by dropout's masks at most.
FREE = {"data", "output_dir", "micro_batch_size", "activation_checkpointing", "shard"}
PAPER = dict(model="meta-llama/Llama-3.1-8B-Instruct", lora_r=16, lora_alpha=32,
             lora_dropout=0.1, lora_targets="q_proj,v_proj", learning_rate=1e-5,
             weight_decay=3e-7, batch_size=8, micro_batch_size=1, max_tokens=1250,
             max_critique_tokens=768)
PRESETS = {  # Table 9
    "toy": {},
    "slf5k": {**PAPER, "lora_dropout": 0.05, "max_tokens": 1400, "max_critique_tokens": 500},
    "ultrafeedback": PAPER,
    "kodcode": {**PAPER, "learning_rate": 2e-5, "weight_decay": 0.01,
                "lora_targets": "q_proj,k_proj,v_proj,o_proj"},
}


def reward_preset(task: str) -> dict:
    """The defaults of a task: its own, on top of the paper's common ones."""
    return PRESETS[task] if task in PRESETS else {**PAPER, **get_task(task).reward}


# ── Rows as token sequences [x ; y ; z]

def encode_rows(rows: list[dict], tokenizer, max_tokens: int) -> tuple[list[dict], list[tuple]]:
    """[x ; y ; z] (§3.4): the rows of at most max_tokens; (ids of x and y, ids of z) of each.

    Quotes that `ground` did not find are left out of z: R_φ never learns to invent one.
    """
    kept, pairs = [], []
    for row in rows:
        good, poor = list(row["good_spans"]), list(row["poor_spans"])
        for quotes in (good, poor):
            for quote in ground(row["response"], Feedback("", quotes, [])).unmatched:
                quotes.remove(quote)
        z = Feedback(row["critique"], good, poor)
        assert not ground(row["response"], z).unmatched, "§3.4: z quotes the response"
        x_ids = encode_prompt(tokenizer, reward_prompt(row["prompt"], row["response"]))
        z_ids = encode_answer(tokenizer, z.text())
        if len(x_ids) + len(z_ids) <= max_tokens:
            kept.append(row)
            pairs.append((x_ids, z_ids))
    return kept, pairs


def split_rows(rows: list[dict], held_out: int, seed: int, prompt_of=itemgetter("prompt"),
               least: int = 0) -> tuple[list[dict], list[dict]]:
    """(training rows, held-out rows) (§4.1). All rows of one prompt fall on the same side.

    held_out: number of held-out prompts, at most a tenth of all, but never fewer than `least`.
    prompt_of(row) is the prompt of a row. Both parts keep the order of `rows`.
    """
    prompts = [str(prompt_of(row)) for row in rows]
    order = sorted(set(prompts))
    random.Random(seed).shuffle(order)
    count = max(least, min(held_out, len(order) // 10))
    held_out_prompts = set(order[:count])
    training, evaluation = [], []
    for row, prompt in zip(rows, prompts):
        (evaluation if prompt in held_out_prompts else training).append(row)
    return training, evaluation


# ── Algorithm 3: teacher forcing

def z_loss(model, pairs: list[tuple]) -> torch.Tensor:
    """−Σ_j log p_φ(z_j | z_<j, x, y) over z (§3.4, Algorithm 3): a scalar, in nats."""
    prompts, z_ids = [x for x, _ in pairs], [z for _, z in pairs]
    *inputs, mask = pad_batch(prompts, z_ids, model.device)
    at = mask.flatten().nonzero().squeeze(1)                  # of tokens in a flat [B · T], [N]
    hidden = response_hidden(model, *inputs, mask).flatten(0, 1)[at]                   # [N, H]
    assert len(hidden) == sum(map(len, z_ids)), "Alg. 3 l.5: one p_φ(z_j | ·) per token of z"
    targets = inputs[2].flatten()[at]
    return -token_logprobs(hidden, head_weight(model), targets).sum()                 # l.5–6


def shuffle_batches(pairs: list[tuple], size: int, rng: random.Random) -> list[list[tuple]]:
    """Shuffled batches of like lengths: sorted within pools of 16 batches."""
    pools = chunks(rng.sample(pairs, len(pairs)), 16 * size)
    order = [pair for pool in pools for pair in sorted(pool, key=lambda p: sum(map(len, p)))]
    batches = chunks(order, size)
    return rng.sample(batches, len(batches))


def fit_adapter(model, pairs: list[tuple], name: str, config: RewardConfig,
                loss_of=z_loss, count_of=lambda pair: len(pair[1]), out=None):
    """Minimise a mean loss by one adapter, new unless it is loaded (Algorithm 3).

    loss_of(model, pairs) is a sum, in nats; count_of(pair): its terms, the tokens of z.
    The ranks share each batch. out: where checkpoints lie, from the newest of which it goes on.
    Returns the mean loss of each step. A step whose loss or gradient is not finite is skipped,
    and has None in that list. Raises InputError where all steps are.
    """
    torch.manual_seed(config.seed)
    shape = config.lora_r, config.lora_alpha, config.lora_dropout
    parameters = lora_parameters(model, name) or add_lora(                              # l.4
        model, name, *shape, config.lora_targets.split(","))
    optimizer = torch.optim.AdamW(parameters, config.learning_rate,
                                  weight_decay=config.weight_decay, fused=True)
    rng, losses, steps = random.Random(config.seed), [], []
    for _ in range(config.epochs):
        steps += shuffle_batches(pairs, config.batch_size, rng)
    warm_up, start = max(1, len(steps) // 20), 0
    given = {key: x for key, x in asdict(config).items() if key not in FREE}
    made_of = checksum(state=[given, pairs])
    path, tensors, state = newest_checkpoint(out) if out else (None, {}, {})
    if state.get("made_of") == made_of:
        print_rank0(f"fit {name}: resumed from {path}")
        restore_optimizer(optimizer, tensors)
        start, losses = state["iteration"], state["losses"]
    model.train()
    bar = tqdm(range(start, len(steps)), f"fit {name}", len(steps), initial=start,
               disable=RANK > 0)
    with use_lora(model, name):
        for step in bar:
            # The dropout masks of this step and rank.
            torch.manual_seed(config.seed * 1_000_003 + step * WORLD_SIZE + RANK)
            rate = config.learning_rate * min((step + 1) / warm_up, 1 - step / len(steps))
            optimizer.param_groups[0]["lr"] = rate
            total, mean = sum(map(count_of, steps[step])), 0.0
            for part in chunks(steps[step], config.micro_batch_size * WORLD_SIZE):
                # All ranks gather a sharded base: one without a row runs a pass of weight 0.
                mine = part[RANK::WORLD_SIZE]
                loss = loss_of(model, mine or part[:1]) / total * bool(mine)
                loss.backward()
                mean += loss.item()
            mean = sum(gather_rows([mean]))
            for p in parameters:
                all_sum(p.grad)
            norm = torch.nn.utils.clip_grad_norm_(parameters, MAX_GRAD_NORM).item()
            finite = math.isfinite(mean) and math.isfinite(norm)
            losses.append(mean if finite else None)
            if finite:
                optimizer.step()                                                         # l.7
            optimizer.zero_grad()
            bar.set_postfix(loss=f"{mean:.3f}")
            if out:
                state = {"iteration": step + 1, "losses": losses, "made_of": made_of}
                keep_checkpoint(out, optimizer, state, SAVE_EVERY, start, len(steps))
    model.eval()
    if skipped := losses.count(None):
        problem = (f"fit {name}: {skipped} of {len(losses)} optimizer steps were skipped, for "
                   f"their loss or gradient was not finite; lower --learning_rate or try "
                   f"--dtype float32")
        if skipped == len(losses):
            raise InputError(problem)
        print_rank0(f"warning: {problem}")
    return losses


# ── Using R_φ: z' ~ R_φ(z' | x, y) and its δ'

@dataclass
class Judgement:
    """What one critique did to one response (Alg. 4 l.13)."""
    critique: str
    delta: list[float]                    # δ'_t of every token of the response
    reason: str = ""                      # why δ' is zero throughout; "" where it was read
    quotes: int = 0
    unmatched: int = 0
    ambiguous: int = 0
    conflicts: int = 0                    # tokens in a good and in a poor span
    half_inside: int = 0                  # tokens half in a span
    spans: list[Span] = field(default_factory=list)


def judge(critique: str, text: str, offsets) -> Judgement:
    """Parse A'(y) from a critique and map it to δ' (Alg. 4 l.13); unreadable ones give zeros.

    offsets: the characters [start, end) of each token of the text.
    """
    try:
        if not critique:
            raise FeedbackError("no critique: the response is empty or too long for R_φ, or "
                                "R_φ wrote nothing")
        feedback = parse_feedback(critique, response=text)
    except FeedbackError as error:
        return Judgement(critique, [0.0] * len(offsets), str(error))
    return reward_tokens(critique, text, offsets, feedback, ground(text, feedback))


def reward_tokens(critique: str, text: str, offsets, feedback, found) -> Judgement:
    """δ' of feedback whose quotes are found (Alg. 4 l.13), and what could not be used."""
    delta = token_rewards(text, offsets, found.spans)                                  # l.13
    assert len(delta) == len(offsets), "Alg. 4 l.13: one δ'_t per token of y"
    lost = (conflicting_tokens(text, offsets, found.spans),
            half_inside_tokens(text, offsets, found.spans))
    quotes = len(feedback.good_spans + feedback.poor_spans)
    return Judgement(critique, delta, "", quotes, len(found.unmatched), found.ambiguous,
                     *lost, found.spans)


def write_critiques(model, tokenizer, prompts: list[str], responses: list[str],
                    max_new_tokens: int, temperature=0.0, uniforms=None) -> list[str]:
    """One critique per response from the adapter "reward" (Alg. 4 l.12).

    Greedy by default, where l.12 samples z': no policy should be rewarded by the luck of a
    draw; with a temperature, uniforms [B, max_new_tokens] in [0, 1) decide. A response that is
    empty, or too long for the context, gets "".
    """
    asked = {i: encode_prompt(tokenizer, reward_prompt(x, y))
             for i, (x, y) in enumerate(zip(prompts, responses)) if y.strip()}
    room = context_length(model) - max_new_tokens
    asked = {i: ids for i, ids in asked.items() if len(ids) <= room}
    u = None if uniforms is None else uniforms[list(asked)]
    with use_lora(model, "reward", merge=True):
        written = generate(model, list(asked.values()), max_new_tokens, temperature,
                           eos_ids(tokenizer, model), uniforms=u)
    assert len(written) == len(asked), "Alg. 4 l.12: one z' for each y"
    out = [""] * len(responses)
    for i, z in zip(asked, written):
        out[i] = tokenizer.decode(z, skip_special_tokens=True)
    return out


# ── Judging R_φ on held-out rows (§4.2, Table 1)

def count_tokens(truth: list[float], said: list[float]) -> Counter:
    """Tokens of one response marked, predicted and hit, of both signs (Table 1). [T], [T]"""
    counts = Counter()
    for name, sign in (("good", 1), ("poor", -1)):
        counts[f"{name} marked"] = sum(t == sign for t in truth)
        counts[f"{name} predicted"] = sum(s == sign for s in said)
        counts[f"{name} hit"] = sum(t == s == sign for t, s in zip(truth, said))
    return counts


def judge_rows(model, tokenizer, rows: list[dict], max_critique_tokens: int):
    """R_φ's critiques of annotated rows against the annotator's (Table 1): (figures, samples).

    The ranks share the rows. None where there is nothing to divide by; unparseable: the share
    that cannot be read.
    """
    counts, samples = Counter(), []
    mine = chunks(rows[RANK::WORLD_SIZE], 64)
    for part in tqdm(mine, "judge the reward model", disable=RANK > 0):
        prompts, responses = ([row[key] for row in part] for key in ("prompt", "response"))
        critiques = write_critiques(model, tokenizer, prompts, responses, max_critique_tokens)
        for row, z in zip(part, critiques):
            ids = tokenizer(row["response"], add_special_tokens=False).input_ids
            text, offsets = token_offsets(tokenizer, ids)
            marked = ground(text, Feedback("", row["good_spans"], row["poor_spans"])).spans
            found = judge(z, text, offsets)
            counts += count_tokens(token_rewards(text, offsets, marked), found.delta)
            counts["unparseable"] += bool(found.reason)
            samples.append({"id": row["id"], "response": row["response"],
                            "annotator": row["critique"], "reward_model": z,
                            "unreadable": found.reason})
    counts, samples = sum(gather_rows([counts]), Counter()), gather_rows(samples)
    unparseable = counts["unparseable"] / max(1, len(rows))
    return {"unparseable": unparseable, **token_figures(counts)}, samples


def token_figures(counts: Counter) -> dict[str, float | None]:
    """Precision and recall of summed `count_tokens`; None where there is nothing to find."""
    figures = {}
    for name in ("good", "poor"):
        for figure, of in (("precision", "predicted"), ("recall", "marked")):
            hit, whole = counts[f"{name} hit"], counts[f"{name} {of}"]
            figures[f"{name}_{figure}"] = hit / whole if whole else None
    return figures


def fit(model, tokenizer, config: RewardConfig) -> dict:
    """Phase 2 (Alg. 1 l.13–14, Algorithm 3): read rows, train, judge, write → the metrics."""
    rows = read_rows(config.data, (("prompt",), ("response",), ("critique",)))
    limit = min(config.max_tokens, context_length(model))
    out = Path(config.output_dir)
    _lock = lock_directory(out)                                        # held until the end
    parts = split_rows(rows, config.held_out, config.seed)
    (_, pairs), (held_out, held_pairs) = (encode_rows(part, tokenizer, limit) for part in parts)
    if not pairs:
        raise InputError(f"{config.data}: every row has over {limit} tokens (--max_tokens or "
                         f"the model's context)")
    losses = fit_adapter(model, pairs, "reward", config, out=out)
    metrics = {"training_rows": len(pairs), "too_long": len(rows) - len(pairs) - len(held_out),
               "steps": len(losses), "skipped_steps": losses.count(None),
               "final_loss": next(x for x in reversed(losses) if x is not None)}
    with gathered(model), torch.no_grad():
        figures, samples = judge_rows(model, tokenizer, held_out, config.max_critique_tokens)
        mine = chunks(held_pairs[RANK::WORLD_SIZE], config.micro_batch_size)
        with use_lora(model, "reward"):                                          # L_R(φ)
            losses = [z_loss(model, part).item() for part in mine]
    if held_out:
        loss = sum(gather_rows([sum(losses)])) / sum(len(z) for _, z in held_pairs)
        metrics |= {"held_out_rows": len(held_out), "held_out_loss": loss, **figures}
    if RANK == 0:
        save_lora(model, "reward", out / "adapter")                                      # l.8
        write_rows(out / "samples.jsonl", samples)
        write_rows(out / "config.json", [asdict(config)])
        # Last: its presence says that the phase is done.
        write_rows(out / "metrics.json", [metrics])
    return metrics


def summary(metrics: dict) -> str:
    """One line on R_φ: its held-out loss and how well it finds the annotator's tokens."""
    if "held_out_loss" not in metrics:
        return "trained; too few rows to hold any out"
    shown = {k: "–" if x is None else f"{x:.3f}" for k, x in metrics.items()}
    return (f"held-out loss {metrics['held_out_loss']:.4f}; poor tokens precision "
            f"{shown['poor_precision']}, recall {shown['poor_recall']}; good tokens "
            f"{shown['good_precision']}, {shown['good_recall']}; unparseable "
            f"{metrics['unparseable']:.1%}")


def main():
    """Train and judge a reward model from the command line."""
    config = parse_flags(RewardConfig, sys.argv[1:], __doc__, reward_preset)
    if config.shard and WORLD_SIZE == 1:
        raise InputError("--shard spreads the base over ranks: use torchrun --nproc_per_node N")
    device = start_ranks(minutes=30.0)
    model, tokenizer = load_model(config.model, config.dtype, device, to_shard=config.shard)
    if config.activation_checkpointing:
        checkpoint_activations(model)
    if config.shard:
        shard(model, device)
    print_rank0(f"{config.output_dir}: {summary(fit(model, tokenizer, config))}\n"
        f"next: python text2grad.py --task {config.task} --model {config.model} --data ROWS "
        f"--reward_model {config.output_dir}/adapter")
    run_collective(dist.destroy_process_group)


if __name__ == "__main__":
    run_script(main, "reward_model", torch.OutOfMemoryError)
