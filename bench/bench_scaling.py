"""Memory and hours of large models for the presets of text2grad.py, computed by formulas.

    python bench/bench_scaling.py                # writes the tables of bench/SCALING.md

No model runs. Every text has its maximum length; base and cache are bfloat16. SCALING.md says
which constants were measured and which are assumed. Units: bytes, FLOP, seconds.
"""

import sys
from dataclasses import replace
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

from bench import pipes                                                    # noqa: E402
from bench_work import SHAPES, Shape                                       # noqa: E402
from sampling import PREFILL_TOKENS                                        # noqa: E402
from settings import Config, parse_flags                                    # noqa: E402

FLOPS = 0.4 * 989e12                  # H100: 40 % of the data sheet's FLOP/s
BANDWIDTH = 0.75 * 3.35e12            # and 75 % of its bytes/s
EAGER, CAPTURED = 25e-6, 9e-6         # seconds for each operation: host, CUDA graph
DATA = {"slf5k": (5000, 1), "ultrafeedback": (61_135, 2), "kodcode": (10_000, 0)}
WIDE = {"batch_size": 96, "minibatch_size": 96}       # 8 GPUs do not divide SLF5K's batch of 12
SMALL = {"rollout_batch_size": 8, "activation_checkpointing": True}
CASES = [("8b", "slf5k", 1, {}), ("8b", "ultrafeedback", 1, {}), ("8b", "kodcode", 1, {}),
         ("8b", "slf5k", 8, WIDE), ("8b", "ultrafeedback", 8, {}), ("8b", "kodcode", 8, {}),
         ("8b", "ultrafeedback", 8, {"shard": True}), ("8b", "ultrafeedback", 1, SMALL),
         ("8b", "ultrafeedback", 2, SMALL | {"shard": True}),
         ("3b", "ultrafeedback", 1, SMALL | {"rollout_batch_size": 16}),
         ("1b", "ultrafeedback", 1, {}), ("70b", "ultrafeedback", 8, {"shard": True})]


def sizes(s: Shape) -> dict[str, int]:
    """Elements of the base and of an adapter, cache of a token, operations of a decode step."""
    kv = s.kv * s.H // s.heads
    block = 2 * s.H * s.H + 2 * s.H * kv + 3 * s.H * s.I + 2 * s.H
    return {"blocks": s.L * block + s.H, "head": s.V * s.H,
            "embedding": 0 if s.tied else s.V * s.H, "adapter": s.L * 16 * (3 * s.H + kv),
            "cache": 2 * s.L * kv, "operations": 52 * s.L + 39}


def activations(s: Shape, kind: str) -> float:
    """Bytes per token of a pass: prefill, training, or checkpointed training."""
    hidden = 4 * s.H                                      # float32: norms and adapters
    inner = 2 * s.I
    if kind == "prefill":
        return 4.55 * hidden + 3.16 * inner
    block = 7.83 * hidden + 2.97 * inner
    in_flight = 3.22 * inner - 0.86 * hidden
    if kind == "checkpointed":
        return block + in_flight + 1.18 * s.L * 2 * s.H
    return s.L * block + in_flight


def memory(s: Shape, config: Config, ranks: int) -> list[float]:
    """Bytes per GPU: weights of the base, sampling, training, and the larger of the two."""
    n = sizes(s)
    base = 2 * (n["blocks"] + n["head"] + n["embedding"])
    held = base / ranks if config.shard else base
    gathered = base if config.shard else 0
    units = 4 * max(n["blocks"] // s.L, n["head"]) if config.shard else 0
    adapters = 4 * n["adapter"] * (4 + 1)        # weight, gradient, two moments; R_φ's weight
    tokens = config.max_prompt_tokens + config.max_new_tokens
    rows = min(config.rollout_batch_size, config.batch_size // ranks)
    cache = 2 * n["cache"] * rows * (tokens + config.max_critique_tokens)
    prefill = min(PREFILL_TOKENS, rows * tokens) * activations(s, "prefill")
    sampling = held + gathered + adapters + cache + max(prefill, 12 * rows * s.V)
    kind = "checkpointed" if config.activation_checkpointing else "training"
    widest = max(tokens, config.reward_max_tokens, config.micro_batch_tokens)
    training = held + units + adapters + widest * activations(s, kind) + 2**28
    return [held, sampling, training, max(sampling, training)]


def decode(s: Shape, rows: int, prompt: int, new: int) -> float:
    """Seconds of the prefill and of all decode steps, which a CUDA graph launches."""
    n = sizes(s)
    weights = n["blocks"] + n["head"]
    read = 2 * (weights + rows * (prompt + new / 2) * n["cache"]) / BANDWIDTH
    step = max(2 * weights * rows / FLOPS, read) + n["operations"] * CAPTURED
    return 2 * n["blocks"] * rows * prompt / FLOPS + new * step


def train(s: Shape, tokens: int, scored: int) -> float:
    """Seconds of a forward and a backward pass: 4 FLOP per frozen weight and token."""
    n = sizes(s)
    flops = 4 * (n["blocks"] * tokens + n["head"] * scored)
    return max(flops / FLOPS, 3 * n["operations"] * EAGER)


def hours(s: Shape, config: Config, ranks: int) -> list[str]:
    """Seconds of each part of an iteration; share of the critique; hours of the phases."""
    n = sizes(s)
    x = config.max_prompt_tokens
    y = config.max_new_tokens
    z = config.max_critique_tokens
    count, given = DATA[config.task]                      # rows, and responses in each row
    rows = config.batch_size // ranks
    micro = max(1, config.micro_batch_tokens // (x + y))
    reward_micro = max(1, config.micro_batch_tokens // config.reward_max_tokens)
    forward = 2 * n["blocks"] * rows * (x + y) + 3 * n["head"] * rows * y
    score = 2 * max(forward / FLOPS, rows * n["operations"] * EAGER)
    update = config.ppo_epochs * rows / micro * train(s, (x + y) * micro, y * micro)
    parts = [decode(s, rows, x, y), decode(s, rows, x + y, z), score, update]
    iterations = min(6000, config.passes * count // config.batch_size)
    annotated = min(count, config.annotated_rows) / ranks
    chunk = config.rollout_batch_size
    phases = [0 if given else annotated / chunk * decode(s, chunk, x, y),
              config.reward_epochs * annotated * max(1, given) / reward_micro
              * train(s, config.reward_max_tokens * reward_micro, z * reward_micro),
              sum(parts) * iterations]
    return [*(f"{x:.1f}" for x in parts), f"+{parts[1] / (sum(parts) - parts[1]):.0%}",
            iterations, *(f"{x / 3600:.1f}" for x in [*phases, sum(phases)])]


def tables() -> dict[str, list[list]]:
    """The lines of both tables of SCALING.md."""
    lines = {"memory": [], "hours": []}
    for model, task, ranks, flags in CASES:
        s = SHAPES[f"llama3-{model}"]
        config = replace(parse_flags(Config, argv=["--task", task]), **flags)
        assert config.batch_size % ranks == config.minibatch_size % ranks == 0, flags
        text = " ".join(f"--{name}" if value is True else f"--{name} {value}"
                        for name, value in flags.items())
        case = [model.upper(), task, ranks, text]
        values = memory(s, config, ranks)
        lines["memory"].append([*case, *(f"{value / 1e9:.1f}" for value in values)])
        if model == "8b" and not flags.keys() & {"shard", "rollout_batch_size"}:
            lines["hours"].append([*case[1:3], *hours(s, config, ranks)])
    return lines


def update(text: str) -> str:
    """The text of SCALING.md with new tables between its markers."""
    headers = {"memory": ["model", "task", "GPUs", "other flags", "base GB", "sampling GB",
                          "training GB", "needed GB"],
               "hours": ["task", "GPUs", "rollout s", "critique s", "score s", "update s",
                         "feedback adds", "iterations", "1 h", "2 h", "3 h", "all h"]}
    for name, lines in tables().items():
        before, start, rest = text.partition(f"<!-- {name} -->\n")
        text = f"{before}{start}{pipes(headers[name], lines)}\n{rest[rest.index('<!-- end'):]}"
    return text


if __name__ == "__main__":
    page = HERE / "SCALING.md"
    page.write_text(update(page.read_text()))
