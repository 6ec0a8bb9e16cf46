"""Phase 2 of Text2Grad: R_φ learns to write z = [critique ; span JSON] for a prompt and a response (§3.4, Alg. 3).

    python reward_model.py --task slf5k --data feedback.jsonl --model MODEL --output_dir runs/reward

R_φ is a LoRA adapter on the base that the policy shares. It is trained by teacher forcing on the annotated rows,
L_R(φ) = −E[log p_φ(z | x, y)], prompt masked, EOS trained, without the [N, V] logits (logprobs.py). It is judged on rows
that it never saw: the loss, and the spans that it writes itself against the annotator's, token by token (§4.2, Table 1).

Paper: §3.4, §4.2, Algorithm 3 and Table 9. B rows, N tokens of z in a flat batch.

Departures from the paper: quotes that are not in the response are taken out of z before training (Appendix L does this
with the annotation), and a critique that does not parse has found nothing: it never counts as agreement.
"""

from __future__ import annotations

import random
import sys
import time
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from tqdm import tqdm
from transformers import HfArgumentParser

from annotate import (Feedback, FeedbackError, InputError, conflicting_tokens, flag, ground, parse_flags,
                      read_reply, read_rows, reward_prompt, run, token_offsets, token_rewards, write_rows)
from model import (ModelError, add_lora, checkpoint_activations, context_length, encode_answer, encode_prompt, eos_ids,
                   generate, head_weight, load_model, lora_parameters, pad_batch, response_hidden, save_lora,
                   token_logprobs, use_lora)
from measures.spans import compare, figures, readable, total

ALL_LINEAR = "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj"


@dataclass
class RewardConfig:
    """Phase 2. Defaults are the toy world's; --task sets the paper's values for the other tasks (Table 9).

    max_tokens (of x, y and z) and max_critique_tokens (of z) are in tokens."""
    task: str = flag("toy", "toy, slf5k, ultrafeedback or kodcode; sets the preset")
    model: str = flag("toy/base", "base model: a directory or hub id (paper: Llama-3.1-8B-Instruct)")
    data: str = flag("feedback.jsonl", "annotated rows, from annotate.py")
    output_dir: str = flag("runs/reward", "where the adapter, metrics and samples go")
    seed: int = flag(0, "of the split, the order and the adapter's first values")
    dtype: str | None = flag(None, "of the frozen base; none: bfloat16 on CUDA, float32 on a CPU")
    activation_checkpointing: bool = flag(False, "compute activations again in backward: less memory, more time")
    lora_r: int = flag(32, "rank of the adapter (paper: 16)")
    lora_alpha: float = flag(64, "the update is scaled by alpha / r (paper: 32)")
    lora_dropout: float = flag(0.0, "on the adapter's input (paper: .05, .1)")
    lora_targets: str = flag(ALL_LINEAR, "layers that get it (paper: q_proj,v_proj)")
    learning_rate: float = flag(3e-3, "peak, AdamW (paper: 1e-5, KodCode 2e-5)")
    weight_decay: float = flag(0.0, "of the adapter (paper: 3e-7, KodCode .01)")
    epochs: int = flag(3, "passes over the rows (paper: 3)")
    batch_size: int = flag(16, "rows per optimizer step")
    micro_batch_size: int = flag(16, "rows per forward pass; changes memory, not numbers")
    max_grad_norm: float = flag(1.0, "gradient clip (paper: 1.0)")
    max_tokens: int = flag(512, "longer rows are left out and counted (paper: 1400, 1250)")
    max_critique_tokens: int = flag(128, "longest z that R_φ may write (paper: 500, 768)")
    held_out: int = flag(200, "rows kept for judging, at most a tenth of all")


_PAPER = dict(model="meta-llama/Llama-3.1-8B-Instruct", lora_r=16, lora_alpha=32, lora_targets="q_proj,v_proj",
              lora_dropout=0.1, epochs=3, learning_rate=1e-5, weight_decay=3e-7, batch_size=8, micro_batch_size=1)
REWARD_PRESETS = {  # Table 9
    "toy": {},
    "slf5k": {**_PAPER, "lora_dropout": 0.05, "max_tokens": 1400, "max_critique_tokens": 500},
    "ultrafeedback": {**_PAPER, "max_tokens": 1250, "max_critique_tokens": 768},
    "kodcode": {**_PAPER, "learning_rate": 2e-5, "weight_decay": 0.01, "lora_targets": "q_proj,k_proj,v_proj,o_proj",
                "max_tokens": 1250, "max_critique_tokens": 768},
}


def parse_config(config_class, presets: dict[str, dict], argv=None, description=""):
    """Flags of a dataclass, one help line each; `--task` sets the defaults and every flag given overrides them.

    Raises InputError where there is no such task."""
    parser = HfArgumentParser(config_class, description=description.split("\n")[0])
    task = parser.parse_known_args([flag for flag in argv if flag not in ("-h", "--help")])[0].task
    if task not in presets:
        raise InputError(f"there is no task {task!r}; there are {', '.join(presets)}")
    parser.set_defaults(**presets[task])
    return parse_flags(parser, argv)


def chunks(rows, size: int) -> list:
    """Consecutive parts of at most `size` rows."""
    return [rows[i : i + size] for i in range(0, len(rows), size)]


@contextmanager
def timed(name: str, seconds: dict[str, float], remedy: str):  # Table 13
    """Keep the seconds of a stretch of work. Raises InputError where CUDA runs out of memory, with the remedy."""
    started = time.time()
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise InputError(f"CUDA out of memory in {name}: lower {remedy} ({str(error).split('. ')[0]})") from error
    seconds[name] = time.time() - started


# ── Rows as token sequences [x ; y ; z] ────────────────────────────────────────────────────────────────

def encode_rows(rows: list[dict], tokenizer, max_tokens: int) -> tuple[list[dict], list[tuple]]:
    """[x ; y ; z] (§3.4): the rows of at most max_tokens tokens, and of each (ids asking with x and y, ids of z, EOS).

    Quotes that `ground` did not find are left out of z, so that R_φ never learns to invent one.
    """
    kept, pairs = [], []
    for row in rows:
        quotes = {"good_spans": list(row["good_spans"]), "poor_spans": list(row["poor_spans"])}
        for listed in quotes.values():
            for quote in ground(row["response"], Feedback(row["critique"], listed, [])).unmatched:
                listed.remove(quote)
        x = encode_prompt(tokenizer, reward_prompt(row["prompt"], row["response"]))
        z = encode_answer(tokenizer, Feedback(row["critique"], **quotes).text())
        if len(x) + len(z) <= max_tokens:
            kept.append(row)
            pairs.append((x, z))
    return kept, pairs


def split_rows(rows: list[dict], held_out: int, seed: int) -> tuple[list[dict], list[dict]]:
    """(training rows, held-out rows); all responses to one prompt fall on the same side."""
    prompts = sorted({row["prompt"] for row in rows})
    random.Random(seed).shuffle(prompts)
    kept = set(prompts[: min(held_out, len(prompts) // 10)])
    return [r for r in rows if r["prompt"] not in kept], [r for r in rows if r["prompt"] in kept]


# ── Algorithm 3: teacher forcing ───────────────────────────────────────────────────────────────────────

def z_loss(model, pairs: list[tuple], pad: int) -> tuple[torch.Tensor, int]:
    """−Σ_j log p_φ(z_j | z_<j, x, y) over the tokens of z, EOS included (Alg. 3 l.5–6): (scalar, in nats; how many)."""
    prompts, prompt_mask, z, mask = pad_batch([x for x, _ in pairs], [z for _, z in pairs], pad, model.device)
    hidden = response_hidden(model, prompts, prompt_mask, z, mask)[mask.bool()]        # [N, H]
    assert len(hidden) == sum(len(z) for _, z in pairs), "Eq. §3.4: one factor of p_φ(z | x, y) per token of z"
    return -token_logprobs(hidden, head_weight(model), z[mask.bool()]).sum(), len(hidden)    # Alg. 3 l.5–6; Eq. §3.4 L_R


def batches(pairs: list[tuple], config: RewardConfig, rng: random.Random) -> list[list[tuple]]:
    """Shuffled batches whose rows have like lengths: sorted within pools of 16 batches, so little is padding."""
    pools = chunks(rng.sample(pairs, len(pairs)), 16 * config.batch_size)
    order = [pair for pool in pools for pair in sorted(pool, key=lambda pair: sum(map(len, pair)))]
    out = chunks(order, config.batch_size)
    return rng.sample(out, len(out))


def train_reward_model(model, tokenizer, pairs: list[tuple], config: RewardConfig) -> list[float]:
    """Fit the adapter "reward" by maximum likelihood (Alg. 3 l.7); returns the loss of every step, nats per token."""
    return fit_adapter(model, tokenizer, pairs, "reward", config)


def fit_adapter(model, tokenizer, pairs: list[tuple], name: str, config: RewardConfig, loss_of=z_loss,
                count_of=lambda pair: len(pair[1])) -> list[float]:
    """Minimise a mean loss by one adapter, a new one unless it is loaded; returns each step's loss (as loss_of: nats).

    pairs: tuples of lists of ids. loss_of(model, pairs, pad) → (the loss summed over some of them, …). count_of(pair): how
    many terms of the mean it holds, by default the tokens of z.
    """
    torch.manual_seed(config.seed)
    parameters = lora_parameters(model, name) or add_lora(model, name, config.lora_r, config.lora_alpha,   # Alg. 3 l.4
                                                          config.lora_dropout, config.lora_targets.split(","))
    optimizer = torch.optim.AdamW(parameters, lr=config.learning_rate, weight_decay=config.weight_decay,
                                  fused=model.device.type == "cuda")
    rng = random.Random(config.seed)
    steps = [batch for _ in range(config.epochs) for batch in batches(pairs, config, rng)]
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda i: min((i + 1) / max(1, len(steps) // 20), 1 - i / len(steps)))       # warm-up, then linear
    losses, bar = [], tqdm(steps, desc=f"fit {name}")
    model.train()
    with use_lora(model, name):
        for batch in bar:
            total = sum(map(count_of, batch))
            losses.append(0.0)
            for part in chunks(batch, config.micro_batch_size):
                loss = loss_of(model, part, tokenizer.pad_token_id or 0)[0] / total
                loss.backward()
                losses[-1] += loss.item()
            torch.nn.utils.clip_grad_norm_(parameters, config.max_grad_norm)
            optimizer.step()                                                                 # Alg. 3 l.7
            schedule.step()
            optimizer.zero_grad()
            bar.set_postfix(loss=f"{losses[-1]:.3f}")
    model.eval()
    return losses


# ── Using R_φ: z' ~ R_φ(z' | x, y) and its δ ───────────────────────────────────────────────────────────

@dataclass
class Judgement:
    """What one critique did to one response (Alg. 4 l.13): δ_t for every response token, and what had to be left out.

    reason is why δ is zero throughout: "" where the critique was read, else what kept it from being read."""
    critique: str
    delta: list[float]
    reason: str = ""
    quotes: int = 0
    unmatched: int = 0
    ambiguous: int = 0
    conflicts: int = 0


def judge(critique: str, text: str, offsets, weighting: str = "uniform", mode: str = "cot") -> Judgement:
    """Parse A'(y) from a critique and map it to δ' (Alg. 4 l.13). What cannot be read gives zeros and a reason.

    offsets: the characters [start, end) of each token. mode: the annotator's, where it wrote the critique itself; R_φ
    quotes spans, whatever it was trained on."""
    try:
        if not critique:
            raise FeedbackError("no critique was written: the response is empty or too long for R_φ's context")
        example = {"id": "", "prompt": "", "response": text}
        feedback, found = read_reply(example, critique, mode)
    except FeedbackError as error:
        return Judgement(critique, [0.0] * len(offsets), str(error))
    return Judgement(critique, token_rewards(text, offsets, found.spans, weighting),                        # Alg. 4 l.13
                     quotes=len(feedback.good_spans) + len(feedback.poor_spans), unmatched=len(found.unmatched),
                     ambiguous=found.ambiguous, conflicts=conflicting_tokens(text, offsets, found.spans))


def write_critiques(model, tokenizer, prompts: list[str], responses: list[str], max_new_tokens: int,
                    temperature: float = 0.0, uniforms=None) -> tuple[list[str], int]:
    """One critique per response from the adapter "reward" (Alg. 4 l.12), and the tokens written.

    Greedy by default, where l.12 samples z' and the release takes beams or temperature .1: a policy should not be
    rewarded by the luck of a draw. With a temperature, uniforms [B, max_new_tokens] in [0, 1) decide. A response that is empty, or that does not fit the context when it is encoded again, gets "".
    """
    asked = {i: encode_prompt(tokenizer, reward_prompt(x, y))
             for i, (x, y) in enumerate(zip(prompts, responses)) if y.strip()}
    asked = {i: ids for i, ids in asked.items() if len(ids) + max_new_tokens <= context_length(model)}
    with use_lora(model, "reward"):                                                          # Alg. 4 l.12
        written = generate(model, list(asked.values()), max_new_tokens, temperature, eos_ids(tokenizer, model),
                           tokenizer.pad_token_id, uniforms=None if uniforms is None else uniforms[list(asked)])
    out = [""] * len(responses)
    for i, z in zip(asked, written):
        out[i] = tokenizer.decode(z, skip_special_tokens=True)
    return out, sum(map(len, written))


@torch.no_grad()
def held_out_loss(model, pairs: list[tuple], config: RewardConfig, pad: int) -> float:
    """L_R(φ) (Alg. 3 l.6) on rows that were not trained on, nats per token of z."""
    with use_lora(model, "reward"):
        parts = [z_loss(model, part, pad) for part in chunks(pairs, config.micro_batch_size)]
    return sum(loss.item() for loss, _ in parts) / sum(tokens for _, tokens in parts)


def judge_rows(model, tokenizer, rows: list[dict], max_critique_tokens: int) -> tuple[list, list[dict]]:
    """The spans that R_φ writes against the row's, token by token (Table 1): (`spans.compare` of each row, samples)."""
    counts, samples = [], []
    for part in tqdm(chunks(rows, 64), desc="judge the reward model"):
        critiques, _ = write_critiques(model, tokenizer, [row["prompt"] for row in part],
                                       [row["response"] for row in part], max_critique_tokens)
        for row, critique in zip(part, critiques):
            text, offsets = token_offsets(tokenizer, tokenizer(row["response"], add_special_tokens=False).input_ids)
            marked = ground(text, Feedback(row["critique"], row["good_spans"], row["poor_spans"])).spans
            counts.append(compare(text, offsets, marked, readable(critique)))
            samples.append({"id": row["id"], "response": row["response"], "annotator": row["critique"],
                            "reward_model": critique, "unreadable": judge(critique, text, offsets).reason})
    return counts, samples


def fit(model, tokenizer, config: RewardConfig) -> dict:
    """Phase 2 (Alg. 1 l.13–14, Alg. 3): read rows, train, judge, write adapter, metrics and samples, each file whole.

    Raises InputError where every row is longer than --max_tokens tokens."""
    rows = read_rows(config.data, (("prompt",), ("response",), ("critique",)))
    limit, started = min(config.max_tokens, context_length(model)), time.time()
    (train_rows, pairs), (held_out, held_out_pairs) = (encode_rows(part, tokenizer, limit)
                                                       for part in split_rows(rows, config.held_out, config.seed))
    if not pairs:
        raise InputError(f"{config.data}: every row is longer than {limit} tokens (--max_tokens or the model's context)")
    losses = train_reward_model(model, tokenizer, pairs, config)
    trained = time.time()
    counts, samples = judge_rows(model, tokenizer, held_out, config.max_critique_tokens)
    judged = {"held_out_rows": len(held_out), "held_out_loss": held_out_loss(model, held_out_pairs, config,
              tokenizer.pad_token_id or 0), **figures(total(counts))} if held_out else {}
    metrics = {"training_rows": len(pairs), "too_long": len(rows) - len(pairs) - len(held_out), "steps": len(losses),
               "final_loss": losses[-1], "seconds_training": trained - started, **judged,
               "seconds": time.time() - started}
    out = Path(config.output_dir)
    save_lora(model, "reward", out / "adapter")            # Alg. 3 l.8
    write_rows(out / "samples.jsonl", samples)
    write_rows(out / "config.json", [asdict(config)])
    write_rows(out / "metrics.json", [metrics])            # last: its presence says that the phase is done
    return metrics


def summary(metrics: dict) -> str:
    """One line on R_φ: its held-out loss and the quality of the spans that it writes."""
    if "held_out_loss" not in metrics:
        return "trained; too few rows to hold any out"
    number = lambda key: "–" if metrics[key] is None else f"{metrics[key]:.3f}"
    return (f"held-out loss {metrics['held_out_loss']:.4f}; poor spans precision {number('poor_precision')}, recall "
            f"{number('poor_recall')}; good spans {number('good_precision')}, {number('good_recall')}; unparseable "
            f"{metrics['unparseable']:.1%}")


def main():
    """Train and judge a reward model from the command line."""
    config = parse_config(RewardConfig, REWARD_PRESETS, sys.argv[1:], __doc__)
    model, tokenizer = load_model(config.model, config.dtype or ("bfloat16" if torch.cuda.is_available() else None))
    if config.activation_checkpointing:
        checkpoint_activations(model)
    print(f"{config.output_dir}: {summary(fit(model, tokenizer, config))}\n"
          f"next: python text2grad.py --task {config.task} --model {config.model} --data ROWS "
          f"--reward_model {config.output_dir}/adapter")


if __name__ == "__main__":
    run(main, "reward_model", (ModelError, SafetensorError, torch.OutOfMemoryError))
