"""Algorithm 3: R_φ learns to write z, a critique and its spans as JSON (§3.4, phase 2).

    python reward_model.py --task slf5k --data feedback.jsonl --model MODEL
    torchrun --nproc_per_node 8 reward_model.py …       # the same with eight processes (ranks)

    [x ; y ; z] ← the tokens of each annotated row                       encode_rows      l.2
    φ ← a new LoRA adapter "reward" with B = 0 on the frozen base        add_lora         l.4
    for each batch:                                                      fit_adapter      l.5–7
        L_R(φ) = −Σ_j log p_φ(z_j | z_<j, x, y)                          z_loss           l.5–6
        φ ← AdamW on L_R / number of tokens of z in the batch
    return R_φ, which writes z' ~ R_φ(·|x, y)                            write_critiques  l.8

R_φ and the policy share one base, so memory holds it once. The tokens of the prompt have no
loss, but the EOS token of z does. The second part of this file is phase 2, which trains R_φ and
compares it with the annotator on held-out rows, token by token (§4.2, Table 1).

Departures.

    loss        the mean per token of z; the paper's is the mean per row
    quotes      quotes that do not occur in the response are removed from z before training;
                Appendix L removes them from the annotation
    greedy      z' is decoded greedily; Alg. 4 l.12 samples it

B rows, P tokens of x and y (padded left), T tokens of z (padded right), N tokens of z in a flat
batch, H hidden size.
"""

import math
import random
import sys
from collections import Counter
from pathlib import Path

import torch

from annotate import Feedback, ground, read_critique, token_offsets, token_rewards
from data import (FEEDBACK, InputError, checksum, chunks, critique_prompt, get_task,
                  next_command, read_rows, run_script, split_rows, write_rows)
from model import (add_lora, encode_answer, encode_prompt, encode_text, eos_ids, load_model,
                   lora_parameters, response_hidden, save_lora, unsharded, use_lora)
from report import count_tokens, reward_model_summary, token_figures
from runtime import (RANK, WORLD_SIZE, all_sum, check_ranks, checkpointed, gather_rows,
                     lock_directory, print_rank0, rank_share, save_settings, start_ranks,
                     stop_ranks, token_groups)
from sampling import context_length, generate, head_weight, pad_batch, token_logprobs
from settings import FitConfig, RewardConfig, derive_settings, parse_flags


MAX_GRAD_NORM = 1.0                                       # the value in the release
SAVE_EVERY = 100                                          # steps between checkpoints


# ── Algorithm 3

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
        # `unmatched` does not say from which list a quote comes, so each list is grounded
        # alone. It is passed as the good list, because the label makes no difference here.
        for quotes in (z.good_spans, z.poor_spans):
            for quote in ground(row["response"], Feedback("", quotes, [])).unmatched:
                quotes.remove(quote)
        assert not ground(row["response"], z).unmatched, "§3.4: z quotes the response"
        x_ids = encode_prompt(tokenizer, critique_prompt(row["prompt"], row["response"]))
        z_ids = encode_answer(tokenizer, z.text())               # ends with EOS
        if len(x_ids) + len(z_ids) <= max_tokens:
            kept_rows.append(row)
            pairs.append((x_ids, z_ids))
    return kept_rows, pairs


def z_loss(model, pairs: list[tuple]) -> torch.Tensor:
    """−Σ_j log p_φ(z_j | z_<j, x, y) of all pairs (§3.4, Alg. 3 l.5–6): a scalar in nats.

    Teacher forcing: the model reads the annotator's z_<j, not its own, and one pass gives the
    log-probs of all z_j.
    """
    x_ids, z_ids = zip(*pairs)                              # x_ids: of the instruction, x and y
    prompts, prompt_mask, z, z_mask = pad_batch(x_ids, z_ids, model.device)       # [B, P], …
    # Most z are shorter than the longest one, and the rest of their row is padding, which the
    # mask leaves out.
    is_token = z_mask.bool()                                                           # [B, T]
    hidden = response_hidden(model, prompts, prompt_mask, z, z_mask)[is_token]         # [N, H]
    assert len(hidden) == sum(map(len, z_ids)), "Alg. 3 l.5: one p_φ(z_j | ·) per token of z"
    return -token_logprobs(hidden, head_weight(model), z[is_token]).sum()             # l.5–6


def fit_adapter(model, pairs: list[tuple], name: str, config: RewardConfig,
                loss_of=z_loss, count_of=lambda pair: len(pair[1]), out=None):
    """Train an adapter by minimising its mean loss (Algorithm 3); return the loss of each step.

    The adapter is created if it does not exist. loss_of(model, pairs): the summed loss in nats.
    count_of(pair): the terms of one pair in this sum, by default the tokens of z. The baselines
    pass other functions: DPO has one term for each pair of answers. out: directory of
    checkpoints; training continues from the newest checkpoint with the same pairs, if any. The
    ranks share each batch. Raises InputError where a loss or gradient is not finite.
    """
    torch.manual_seed(config.seed)
    parameters = lora_parameters(model, name) or add_lora(                              # l.4
        model, name, config.reward_lora_r, config.reward_lora_alpha,
        config.reward_lora_dropout, config.reward_lora_targets.split(","))
    optimizer = torch.optim.AdamW(parameters, config.reward_learning_rate,
                                  weight_decay=config.reward_weight_decay, fused=True)
    # All batches are drawn now, so that a run that continues takes the same ones.
    rng = random.Random(config.seed)
    batches = []
    for _ in range(config.reward_epochs):
        batches += chunks(rng.sample(pairs, len(pairs)), config.reward_batch_size)
    # Each checkpoint holds this dict; `checkpointed` reads the newest one into it.
    state = {"losses": [], "made_of": checksum(state=pairs)}
    check_ranks(state)
    warm_up = max(1, len(batches) // 20)                                              # steps
    model.train()                                           # dropout is on
    with use_lora(model, name):
        for step in checkpointed(len(batches), optimizer, state, out, f"fit {name}",
                                 SAVE_EVERY):
            # Each step and rank draws different dropout masks.
            torch.manual_seed(config.seed * 1_000_003 + step * WORLD_SIZE + RANK)
            # The rate rises in the first 5 % of the steps, and then falls towards 0.
            factor = min((step + 1) / warm_up, 1 - step / len(batches))
            optimizer.param_groups[0]["lr"] = config.reward_learning_rate * factor
            loss = add_gradients(model, parameters, batches[step], config, loss_of, count_of)
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


def add_gradients(model, parameters, batch, config: RewardConfig, loss_of, count_of) -> float:
    """Accumulate the gradients of a batch over all ranks (§3.4, Alg. 3) → its mean loss."""
    terms = sum(map(count_of, batch))                       # of the whole batch, on all ranks
    lengths = [sum(map(len, pair)) for pair in batch]                       # tokens of x, y, z
    mean_loss = 0.0                                         # this rank's share of the mean
    for group in token_groups(range(len(batch)), lengths, config.micro_batch_tokens):
        index = rank_share(group)
        # FSDP gathers a block's weights from all ranks, so each rank must run every forward
        # pass. A rank without rows runs it with another rank's row and the weight 0.
        weight = 1 if index else 0
        rank_pairs = [batch[i] for i in index or group[:1]]
        loss = loss_of(model, rank_pairs) / terms * weight                            # l.5–6
        loss.backward()
        mean_loss += loss.item()
    for p in parameters:
        all_sum(p.grad)
    return sum(gather_rows([mean_loss]))


def write_critiques(model, tokenizer, prompts: list[str], responses: list[str],
                    max_new_tokens: int, batch_size=64) -> list[str]:
    """Write one critique per response with the adapter "reward" (Alg. 4 l.12).

    Decoding is greedy, so that the reward of a response is not random. In l.12, z' is sampled.
    batch_size: number of critiques that are decoded together. The critique is "" if the
    response is empty, or if it leaves too little room for a critique in the context.
    """
    max_prompt_tokens = context_length(model) - max_new_tokens
    # Index of a response → ids of its prompt. An empty response has nothing to quote. A very
    # long one leaves too little room for a critique. Both are left out.
    prompt_ids = {}
    for i, (x, y) in enumerate(zip(prompts, responses)):
        ids = encode_prompt(tokenizer, critique_prompt(x, y))
        if y.strip() and len(ids) <= max_prompt_tokens:
            prompt_ids[i] = ids
    with use_lora(model, "reward", merge=True):
        critique_ids = generate(model, list(prompt_ids.values()), max_new_tokens,
                                temperature=0, eos_token_id=eos_ids(tokenizer, model),
                                batch_size=batch_size)
    # Each critique goes back to its response. The responses that were left out keep "".
    critiques = [""] * len(responses)
    for i, ids in zip(prompt_ids, critique_ids, strict=True):
        # Some tokenizers clean up spaces by default. This would change the quotes.
        critiques[i] = tokenizer.decode(ids, skip_special_tokens=True,
                                        clean_up_tokenization_spaces=False)
    return critiques


# ── Phase 2: train R_φ on the annotated rows, and compare it with the annotator

def fit_reward_model(model, tokenizer, config: RewardConfig, data, out: Path) -> str:
    """Phase 2 (Alg. 1 l.13–14, Algorithm 3): train R_φ, evaluate it and return the summary.

    data: file of annotated rows. out: directory for the adapter, metrics and samples. Raises
    InputError if every training row is too long.
    """
    # The rows of phase 1, without those whose [x ; y ; z] is too long
    rows = read_rows(data, task=FEEDBACK)
    limit = min(config.reward_max_tokens, context_length(model))
    _lock = lock_directory(out)                       # held until the function ends
    training, evaluation = split_rows(rows, config.reward_held_out, config.seed,
                                      FEEDBACK.policy_prompt)
    _, pairs = encode_rows(training, tokenizer, limit)
    held_out, _ = encode_rows(evaluation, tokenizer, limit)
    too_long = len(rows) - len(pairs) - len(held_out)
    message = (f"{data}: {too_long} of {len(rows)} rows have more than {limit} tokens "
               f"(--reward_max_tokens, or the model's context)")
    if not pairs:
        raise InputError(message)
    if too_long:
        print_rank0(f"left out: {message}")
    losses = fit_adapter(model, pairs, "reward", config, out=out)
    # R_φ reviews responses to held-out prompts, on which it was not trained.
    with unsharded(model):
        figures, samples = compare_critiques(model, tokenizer, held_out,
                                             config.max_critique_tokens)
    metrics = {"training_rows": len(pairs), "too_long": too_long, "final_loss": losses[-1],
               "held_out_rows": len(held_out), **figures}
    if RANK == 0:
        save_lora(model, "reward", out / "adapter")                                      # l.8
        write_rows(out / "losses.jsonl", [{"iteration": step, "loss in nats per token of z": x}
                                          for step, x in enumerate(losses, 1)])
        write_rows(out / "samples.jsonl", samples)
        # This file is written last, because its presence marks the phase as finished.
        write_rows(out / "metrics.json", [metrics])
    return reward_model_summary(metrics)


def compare_critiques(model, tokenizer, rows: list[dict], max_critique_tokens: int):
    """Compare R_φ with the annotator on annotated rows (§4.2, Table 1) → (figures, samples).

    figures: precision and recall of R_φ's good and poor tokens, the numbers of all and of poor
    tokens, and the share of R_φ's critiques that cannot be parsed ("unparseable"). samples: the
    two critiques of each row. The ranks share the rows.
    """
    counts = Counter()
    samples = []
    rank_rows = rank_share(rows)
    critiques = write_critiques(model, tokenizer, [row["prompt"] for row in rank_rows],
                                [row["response"] for row in rank_rows], max_critique_tokens)
    for row, z in zip(rank_rows, critiques):
        # δ of the annotator and δ' of R_φ, for the same tokens
        text, offsets = token_offsets(tokenizer, encode_text(tokenizer, row["response"]))
        annotation = Feedback("", row["good_spans"], row["poor_spans"])
        truth = token_rewards(text, offsets, ground(text, annotation).spans)
        review = read_critique(z, text, offsets)
        counts += count_tokens(truth, review.delta)
        counts["unparseable"] += bool(review.reason)
        samples.append({"id": row["id"], "response": row["response"],
                        "annotator": row["critique"], "reward_model": z,
                        "unreadable": review.reason})
    counts = sum(gather_rows([counts]), Counter())
    figures = {"unparseable": counts["unparseable"] / max(1, len(rows)),
               "tokens": counts["tokens"], "poor_tokens": counts["poor marked"]}
    return figures | token_figures(counts), gather_rows(samples)


# ── The script

def main():
    """Train and evaluate a reward model, with settings from the command line."""
    # The rows name their task, and the task sets defaults of the flags.
    config = parse_flags(FitConfig, __doc__)
    task = read_rows(config.data)[0].get("task") or config.task
    # If the command line has a --task, it comes later and has priority.
    config = parse_flags(FitConfig, __doc__, ["--task", task, *sys.argv[1:]])
    out = Path(config.output_dir)
    model, tokenizer = load_model(config.model, config.dtype, start_ranks(), config.shard,
                                  config.activation_checkpointing)
    config = derive_settings(config, 0, model)
    save_settings(config, out)
    text = fit_reward_model(model, tokenizer, config, config.data, out)
    data = None if get_task(config.task).rows else "ROWS"           # toy needs no --data
    command = next_command("text2grad.py", task=config.task, model=config.model, data=data,
                           reward_model=out / "adapter", output_dir=f"{out}-policy")
    print_rank0(f"{out}: {text}\n{command}")
    stop_ranks()


if __name__ == "__main__":
    run_script(main, "reward_model")
