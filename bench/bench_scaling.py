"""Memory and hours of eight billion parameters, by formula, for the presets: bench/SCALING.md.

    python bench/bench_scaling.py --write

Lengths and batches are the presets' of text2grad.py and reward_model.py, every text at its
limit. Constants of memory are fitted on this machine to four shapes and checked on others; the
time formula is checked with this machine's own speed; a card's speed is its data sheet's.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import textwrap
import time
from dataclasses import dataclass, replace
from datetime import date
from functools import partial
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

from bench import machine, pipes                                           # noqa: E402
from bench_work import (ENVIRONMENT, SHAPES, Shape, keep_memory,           # noqa: E402
                        peak_bytes, random_model, seconds, sequences)
from data import SLF5K_RESPONSE, get_task                                  # noqa: E402
from model import add_lora, checkpoint_activations, use_lora               # noqa: E402
from reward_model import RewardConfig, reward_preset                       # noqa: E402
from sampling import PREFILL_TOKENS, generate, head_weight, token_logprobs  # noqa: E402
from text2grad import Config, preset                                       # noqa: E402

FIT = ("fit-a", "fit-b", "fit-c", "fit-d")
EAGER, CAPTURED = 5e-6, 1e-6             # seconds for an operation, assumed


@dataclass(frozen=True)
class Card:
    """A device: sustained FLOP/s and bytes/s, memory, bytes per weight, launch seconds per
    operation, and whether launches overlap with the work."""
    flops: float
    bandwidth: float
    memory: float
    width: int = 2
    launch: float = EAGER
    beside: bool = True

    def seconds(self, work: float, operations: int) -> float:
        """Seconds of a pass that takes `work` seconds without its launches."""
        host = operations * self.launch
        return max(work, host) if self.beside else work + host


def sheet(flops: float, bandwidth: float, memory: float) -> Card:
    """A device that reaches 40 % of the data sheet's FLOP/s and 75 % of its bandwidth."""
    return Card(0.4 * flops, 0.75 * bandwidth, memory)


H100, RTX4090 = sheet(989e12, 3.35e12, 80e9), sheet(165e12, 1.008e12, 24e9)
GRAPH = replace(H100, launch=CAPTURED, beside=False)


@dataclass(frozen=True)
class Work:
    """The presets of a task and the sizes of its rows."""
    name: str
    policy: Config
    reward: RewardConfig

    @property
    def lengths(self) -> tuple[int, int, int]:
        """The largest number of tokens of x, y and z."""
        p = self.policy
        return p.max_prompt_tokens, p.max_new_tokens, p.max_critique_tokens

    @property
    def brought(self) -> int:
        """Responses in each row; with 0 the policy writes one."""
        text = [{"content": "y"}]
        row = {"chosen": text, "rejected": text, SLF5K_RESPONSE: "y"}
        return len(get_task(self.name).responses(row))


WORKS = [Work(name, Config(**preset(name)), RewardConfig(**reward_preset(name)))
         for name in ("slf5k", "ultrafeedback", "kodcode")]


def sizes(s: Shape) -> dict[str, int]:
    """Elements of the blocks, head, input embedding, an adapter (r 16, q and v), and the cache
    of one token."""
    kv = s.kv * s.H // s.heads
    block = 2 * s.H * s.H + 2 * s.H * kv + 3 * s.H * s.I + 2 * s.H
    return {"blocks": s.L * block + s.H, "head": s.V * s.H,
            "embedding": 0 if s.tied else s.V * s.H, "lora": s.L * 16 * (3 * s.H + kv),
            "cache": 2 * s.L * kv}


def base_bytes(s: Shape, width: int) -> int:
    """Bytes of the frozen base."""
    return width * sum(sizes(s)[key] for key in ("blocks", "head", "embedding"))


# ── Memory

def terms(s: Shape, kind: str, width: int) -> list[float]:
    """What a pass holds per token, before the constants: kept per block by H and by I, in
    flight by H and by I, inputs of blocks. What goes by H is float32 (norms, adapters)."""
    layers = {"training": s.L, "checkpointed": 1, "prefill": 0}[kind]
    inputs = s.L if kind == "checkpointed" else 0
    return [4 * layers * s.H, width * layers * s.I, 4 * s.H * (kind != "prefill"),
            width * s.I * (kind != "prefill"), width * inputs * s.H,
            4 * s.H * (kind == "prefill"), width * s.I * (kind == "prefill")]


def activations(s: Shape, c: list[float], kind: str, width: int) -> float:
    """Bytes per token of one training pass."""
    return sum(a * b for a, b in zip(c, terms(s, kind, width)))


def memory(s: Shape, c, work: Work, ranks=1, sharded=False, card=H100) -> dict[str, float]:
    """Bytes per rank: sampling with full weights, training with and without checkpointing."""
    n, k, (x, y, z), p = sizes(s), card.width, work.lengths, work.policy
    base = base_bytes(s, k)
    held = base / ranks if sharded else base
    adapters = 4 * n["lora"] * (4 + 1)   # weight, gradient, two moments; R_φ's weight
    rows = min(p.rollout_batch_size, math.ceil(p.batch_size / ranks))
    cache = k * n["cache"] * rows * (x + y + z)
    prefill = min(PREFILL_TOKENS, rows * (x + y)) * activations(s, c, "prefill", k)
    out = {"weights": held, "sampling": base + (held if sharded else 0) + adapters + cache
           + max(prefill, 12 * rows * s.V)}
    units = 2 * k * max(n["blocks"] // s.L, n["head"]) if sharded else 0    # gathered
    for kind in ("training", "checkpointed"):
        peaks = [tokens * micro * activations(s, c, kind, k) for tokens, micro in
                 ((x + y, p.micro_batch_size), (work.reward.max_tokens,
                                                work.reward.micro_batch_size))]
        out[kind] = held + units + adapters + max(peaks) + 2**28
    return out


# ── Time

class Count(TorchDispatchMode):
    """Counts the operations that compute something, that is, all except views."""
    n = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.n += not (function.is_view or "view" in str(function))
        return function(*args, **(kwargs or {}))


def operations(s: Shape, dtype=torch.bfloat16) -> int:
    """Operations of one decode step with an adapter, extrapolated from two and four blocks."""
    counts = {}
    for L in (2, 4):
        model = random_model(replace(SHAPES["small"], L=L, V=64)).to(dtype)
        add_lora(model, "policy", 16, 32)
        for new in (3, 4):
            with use_lora(model, "policy"), Count() as seen:
                generate(model, [[5, 6, 7]], new)
            counts[L, new] = seen.n
    few, more = (counts[L, 4] - counts[L, 3] for L in (2, 4))
    return few + (s.L - 2) * (more - few) // 2


def step_seconds(s: Shape, card: Card, rows: int, context: float, ops: int) -> float:
    """Seconds of one decode step: the maximum of computing and of reading weights and cache."""
    n = sizes(s)
    weights = n["blocks"] + n["head"]
    read = card.width * (weights + rows * context * n["cache"]) / card.bandwidth
    return card.seconds(max(2 * weights * rows / card.flops, read), ops)


def training_seconds(s: Shape, card: Card, tokens: int, scored: int, ops: int) -> float:
    """Seconds of forward and backward over a frozen base: 4 FLOP per weight and token, and
    three times the launches of a decode step."""
    n = sizes(s)
    flops = 4 * (n["blocks"] * tokens + n["head"] * scored)
    return card.seconds(flops / card.flops, 3 * ops)


def decode_seconds(s, card, ops, rows, prompt, new) -> float:
    """Seconds of the prefill and of all decode steps of some rows."""
    step = step_seconds(s, card, rows, prompt + new / 2, ops)
    return 2 * sizes(s)["blocks"] * rows * prompt / card.flops + new * step


def phase_seconds(s, card, work: Work, ranks: int, ops: int, decoding: Card):
    """Seconds of phases 1 and 2 and of each part of a phase 3 iteration, with the full base on
    every rank. decoding: the device with or without captured decode steps."""
    n, (x, y, z), p, r = sizes(s), work.lengths, work.policy, work.reward
    rows = math.ceil(p.batch_size / ranks)
    parts = math.ceil(rows / p.rollout_batch_size)
    each = math.ceil(rows / parts)
    decode = partial(decode_seconds, s, decoding, ops)
    one = training_seconds(s, card, (x + y) * p.micro_batch_size, y * p.micro_batch_size, ops)
    passes = p.ppo_epochs * math.ceil(rows / p.micro_batch_size)
    forward = 2 * n["blocks"] * rows * (x + y) + 3 * n["head"] * rows * y
    asked = math.ceil(p.annotated_rows / ranks / p.rollout_batch_size)
    fit = training_seconds(s, card, r.max_tokens * r.micro_batch_size,
                           z * r.micro_batch_size, ops)
    fits = r.epochs * p.annotated_rows * max(1, work.brought) / ranks / r.micro_batch_size
    return {"phase 1": 0 if work.brought else asked * decode(p.rollout_batch_size, x, y),
            "phase 2": fits * fit,
            "rollout": parts * decode(each, x, y),
            "critique": parts * decode(each, x + y, z),
            "score": max(2 * forward / card.flops, 2 * rows * ops * card.launch),
            "update": passes * one}


# ── Constants and checks, measured here

def footprints(name: str, rows: int, length: int) -> dict[str, float]:
    """The measured bytes per token of a shape's training passes."""
    s, out = SHAPES[name], {}
    model = random_model(s)
    add_lora(model, "policy", 16, 32)
    prompts = sequences(rows, length, length, s.V, 1)
    ids = torch.tensor(prompts)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0                       # padding, so that attention uses a mask

    def work():
        with use_lora(model, "policy"):
            hidden = model.base_model(ids, attention_mask=mask, use_cache=False)
            hidden.last_hidden_state.square().mean().backward()

    def prefill():
        with use_lora(model, "policy"):
            generate(model, prompts, 1)

    for kind, call in (("prefill", prefill), ("training", work), ("checkpointed", work)):
        if kind == "checkpointed":
            checkpoint_activations(model)
        call()
        out[kind] = peak_bytes(call, "cpu") / rows / length
    out["prefill"] -= 4 * sizes(s)["cache"] * (1 + 1 / length)
    return out


def fit_activations() -> list[float]:
    """Fit the seven constants to the fit-* shapes by least squares of the relative errors."""
    left = []
    for name in FIT:
        found = footprints(name, 8, 128)
        left += [[x / found[kind] for x in terms(SHAPES[name], kind, 4)] for kind in found]
    left = torch.tensor(left, dtype=torch.float64)
    ones = torch.ones(len(left), 1, dtype=torch.float64)
    return torch.linalg.lstsq(left, ones).solution.flatten().tolist()


def this_cpu() -> Card:
    """The speed of this processor in a matrix product and in a sum."""
    square, long = torch.randn(1024, 1024), torch.randn(1 << 26)
    flops = 2 * 1024**3 / best(lambda: square @ square)
    return Card(flops, long.nbytes / best(long.sum), 0, 4, 0.0, False)


def best(work) -> float:
    """The fastest of some calls, in seconds."""
    start, found = time.time(), []
    while len(found) < 5 or time.time() - start < 1:
        found.append(seconds(work, "cpu"))
    return min(found)


def speeds(name: str) -> tuple[float, float]:
    """Seconds of a decode step of 8 rows, and of a training pass of 8 × 128 tokens."""
    s = SHAPES[name]
    model = random_model(s)
    add_lora(model, "policy", 16, 32)
    prompts = sequences(8, 128, 128, s.V, 1)
    ids = torch.tensor(prompts)

    def train():
        with use_lora(model, "policy"):
            hidden = model.base_model(ids, use_cache=False).last_hidden_state.flatten(0, 1)
        token_logprobs(hidden, head_weight(model), ids.flatten()).sum().backward()

    with use_lora(model, "policy"):
        long, short = (best(partial(generate, model, prompts, new)) for new in (33, 1))
    return (long - short) / 32, best(train)


def checks(c: list[float]) -> list[list]:
    """Rows [what, formula, measured] for shapes that were not used to fit the constants; the
    time of the toy base's step is an exception."""
    out, names = [], ("toy", "small", "middle")
    for name in names:
        found = footprints(name, 16, 160)
        out += [[f"{name}: {kind}, kB per token", activations(SHAPES[name], c, kind, 4) / 1e3,
                 x / 1e3] for kind, x in found.items()]
    keep_memory()
    cpu, measured = this_cpu(), {name: speeds(name) for name in names}
    ops = operations(SHAPES["toy"], torch.float32)
    bare = step_seconds(SHAPES["toy"], cpu, 8, 144, ops)
    cpu = replace(cpu, launch=max(0.0, measured["toy"][0] - bare) / ops)
    for name in names[1:]:
        s, ops = SHAPES[name], operations(SHAPES[name], torch.float32)
        step, train = measured[name]
        out += [[f"{name}: decode step, 8 rows, ms",
                 1e3 * step_seconds(s, cpu, 8, 144, ops), 1e3 * step],
                [f"{name}: training pass, 8 × 128 tokens, ms",
                 1e3 * training_seconds(s, cpu, 1024, 1024, ops), 1e3 * train]]
    for name in ("llama3-1b", "llama3-8b"):
        meta = sum(p.nbytes for p in random_model(SHAPES[name], "meta").parameters())
        out.append([f"{name}: base, GB", base_bytes(SHAPES[name], 2) / 1e9, meta / 1e9])
    return out


# ── The page

def gigabytes(x: float) -> str:
    return f"{x / 1e9:.1f}"


def memory_rows(c: list[float]) -> list[list]:
    """Memory of an 8B model for each preset, the saving by checkpointing, and a 70B model."""
    rows = []
    for name, ranks, sharded in (("llama3-8b", 1, False), ("llama3-8b", 8, False),
                                 ("llama3-8b", 8, True), ("llama3-70b", 8, True)):
        for work in WORKS if name == "llama3-8b" else WORKS[1:2]:
            m = memory(SHAPES[name], c, work, ranks, sharded)
            peak = max(m["sampling"], m["training"])
            saved = peak - max(m["sampling"], m["checkpointed"])
            rows.append([name, work.name, ranks, "sharded" if sharded else "whole",
                         *map(gigabytes, m.values()), gigabytes(peak),
                         gigabytes(saved) if saved > 0 else "nothing",
                         "yes" if peak < H100.memory else "**no**"])
    return rows


def hours_rows() -> list[list]:
    """Hours of phases 1 to 3 for an 8B model on H100s, with and without captured decoding."""
    s, rows = SHAPES["llama3-8b"], []
    ops = operations(s)
    for work in WORKS:
        for ranks in (1, 8):
            t, slow = (phase_seconds(s, H100, work, ranks, ops, how) for how in (GRAPH, H100))
            parts = [t[key] for key in ("rollout", "critique", "score", "update")]
            more = sum(parts) / (sum(parts) - t["critique"]) - 1
            hours = [t["phase 1"] / 3600, t["phase 2"] / 3600,
                     sum(parts) * work.policy.iterations / 3600]
            apart = slow["rollout"] + slow["critique"]
            rows.append([work.name, ranks, *(f"{x:.1f}" for x in parts), f"+{more:.0%}",
                         f"{apart / (parts[0] + parts[1]):.2f}",
                         *(f"{x:.1f}" if x else "–" for x in hours), f"{sum(hours):.0f}"])
    return rows


def small_card(c: list[float]) -> list[list]:
    """Memory on a 24 GB GPU: UltraFeedback's preset, and with flags that reduce it."""
    work, rows = WORKS[1], []
    for name, batch, kind, ranks in (
            ("llama3-8b", None, "training", 1), ("llama3-8b", 8, "checkpointed", 1),
            ("llama3-8b", 8, "training", 2), ("llama3-3b", 16, "checkpointed", 1),
            ("llama3-1b", None, "training", 1)):
        p = work.policy if batch is None else replace(work.policy, rollout_batch_size=batch)
        m = memory(SHAPES[name], c, replace(work, policy=p), ranks, ranks > 1, RTX4090)
        peak = max(m["sampling"], m[kind])
        flags = [f"--rollout_batch_size {batch}"] * (batch is not None)
        flags += ["--activation_checkpointing"] * (kind == "checkpointed")
        flags += [f"--shard, {ranks} cards"] * (ranks > 1)
        rows.append([name, ", ".join(flags) or "the preset", gigabytes(m["sampling"]),
                     gigabytes(m[kind]), "yes" if peak < 0.93 * RTX4090.memory else "**no**"])
    return rows


def page() -> str:
    """The text of SCALING.md."""
    c, ops = fit_activations(), operations(SHAPES["llama3-8b"])
    checked = [[what, f"{p:,.1f}", f"{m:,.1f}", f"{p / m:.2f}"] for what, p, m in checks(c)]
    memory_table = pipes(
        ["model", "task", "GPUs", "base", "weights GB", "sampling GB", "training GB",
         "checkpointed GB", "peak GB", "checkpointing saves", "fits 80 GB"], memory_rows(c))
    hours_table = pipes(
        ["task", "GPUs", "rollout s", "critique s", "score s", "update s", "feedback adds",
         "not captured", "phase 1 h", "phase 2 h", "phase 3 h", "all h"], hours_rows())
    card_table = pipes(["model", "flags", "sampling GB", "training GB", "fits 24 GB"],
                       small_card(c))
    check_table = pipes(["what", "formula", "measured", "formula / measured"], checked)
    x, y, z = WORKS[1].lengths
    text = TEXT.format(
        machine=machine("cpu"), load=os.getloadavg()[0], date=date.today(), ops=ops,
        c=", ".join(f"{k:.2f}" for k in c), x=x, y=y, z=z, eager=EAGER * 1e6,
        captured=CAPTURED * 1e6, checks=check_table,
        memory=memory_table, hours=hours_table, card=card_table)
    parts = [part if part[0] in "#|" else textwrap.fill(part, 96, break_on_hyphens=False)
             for part in text.strip().split("\n\n")]
    return "\n\n".join(parts) + "\n"


TEXT = """# Scaling: eight billion, on paper

Written by `python bench/bench_scaling.py --write` on {date}; the formulas are in its code.
Nothing here was run on a GPU. Constants and checks were measured on {machine}.

The figures are for the presets of `text2grad.py` and `reward_model.py`, with every text at its
limit. For UltraFeedback this means {x} tokens of prompt, {y} of response and {z} of critique.
The figures are therefore upper bounds of the work, at assumed speeds.

## Memory, by preset

{memory}

Sampling needs memory for the whole base in bf16 (plus the shard of a rank if it is sharded),
the adapters, the cache of --rollout_batch_size rows, and the widest forward pass over prompts.
Training is the larger of the policy update and the training of R_φ, with one row per pass as in
the presets. Checkpointing recomputes each block in the backward pass. It lowers the peak only
where the column "checkpointing saves" has a number; do not use it elsewhere.

## A card of 24 GB

{card}

7 % of the memory is reserved for CUDA. Sharding over two such cards does not help an 8B model,
because sampling needs the whole weights, 16.1 GB, in addition to the shard of half that size.

## Time, by preset: an 8B on H100s, base whole on each

{hours}

The columns from rollout to update are seconds of one iteration. "Feedback adds" is the time of
the critique relative to all other parts. The paper's Table 13 gives +9–11 %, but our copy of
the paper has neither its minutes per step nor total hours, so totals cannot be compared. "Not
captured" is the time of rollout and critique without a CUDA graph, as a multiple of the time
with one. Phase 1 is annotation by an API and needs no GPU. If rows have no response (KodCode),
the policy writes one first, and that time is counted. Phase 2 trains R_φ for its epochs over
all annotated responses, each with --max_tokens. Evaluation and critiques of held-out rows are
not included.

**Assumed, not measured**: the H100 SXM by its data sheet (989 TFLOP/s bf16, 3.35 TB/s, 80 GB),
of which matrix products reach 40 % and reads reach 75 %. A decode step of an 8B model with an
adapter has {ops:,} operations that are not views. A dispatch mode counted them in bf16 for two
and four blocks, and the number is linear in the blocks. An operation takes {eager:.0f} µs if
the host launches it, and {captured:.0f} µs in a CUDA graph. A training pass launches three
times as many. The matrix products of attention are left out: at these lengths they are below 4
% of those of an 8B model.

## Checked here

{checks}

The memory constants are {c}. They are fitted by least squares to four shapes that are not in
the table. In order, they are the memory kept per block by H and by I, in flight by H and by I,
of the inputs of blocks, and in flight without gradients by H and by I. The speeds of this
processor are measured with a product of 1,024 × 1,024 and a sum of 256 MB. The overhead of an
operation is what the decode step of toy takes beyond them. The load average was {load:.1f}. If
it is above the number of cores used, other programs were running, and the measured times are
too long.
"""


def main():
    """Measure the constants, compute the tables, and print or write the page."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--write", action="store_true", help="write bench/SCALING.md")
    write = parser.parse_args().write
    if os.environ.get(MALLOC := "MALLOC_MMAP_THRESHOLD_") != ENVIRONMENT[MALLOC]:
        os.execve(sys.executable, [sys.executable, *sys.argv], ENVIRONMENT)
    text = page()
    print(text)
    if write:
        (HERE / "SCALING.md").write_text(text)


if __name__ == "__main__":
    main()
