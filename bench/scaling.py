"""Compute the memory and the time of large models for the presets; no model runs.

    python bench/scaling.py

All texts are as long as the settings allow. Seconds are based on the H100's in README.md.
"""

from bench import print_table             # this import also puts the root on Python's path
from sampling import PREFILL_TOKENS, round_up
from settings import Config, parse_flags

# Layers, hidden size H, inner size, heads, heads of keys, vocabulary V, V × H matrices
SHAPES = {"1B": (16, 2048, 8192, 32, 8, 128_256, 1), "3B": (28, 3072, 8192, 24, 8, 128_256, 1),
          "8B": (32, 4096, 14_336, 32, 8, 128_256, 2),
          "32B": (64, 5120, 27_648, 40, 8, 152_064, 2),
          "70B": (80, 8192, 28_672, 64, 8, 128_256, 2)}
SMALL = "--activation_checkpointing --decode_batch_size 8"
CASES = [("8B", 1, ""), ("8B", 1, SMALL), ("8B", 8, "--shard"), ("3B", 1, SMALL), ("1B", 1, ""),
         ("32B", 8, f"--shard {SMALL}"), ("70B", 8, f"--shard {SMALL}")]
# Preset, published rows, GPUs, rollouts. SLF5K has 12; 8 GPUs have 96, as 8 does not divide 12.
RUNS = [("slf5k", 5000, 1, 12), ("slf5k", 5000, 8, 96), ("kodcode", 10_000, 1, 64),
        ("kodcode", 10_000, 8, 64), ("ultrafeedback", 61_135, 1, 64),
        ("ultrafeedback", 61_135, 8, 64)]
# STEP and COLUMN are fitted to three measured times of README.md, without the time of the
# prompts: decoding one token takes 18.2 ms in the rollout and 23.8 ms in the critique, both for
# 32 rows, and 21.3 ms for 64 rows. The fit gives 19.1, 22.2 and 23.2 ms.
STEP = 15e-3                       # of decoding one token for each row
COLUMN = 0.5e-6                    # more, for each row and column of the cache
SCORE = 0.578 / (32 * 256)         # for each token of x and y: policy and reference
UPDATE = 2.59 / (4 * 32 * 256)     # for each token of x and y in one PPO epoch


def memory(name: str, config, ranks: int) -> list[float]:
    """GB on each GPU: base, sampling and training; bfloat16, with adapters in float32."""
    L, H, inner, heads, groups, V, matrices = SHAPES[name]
    y_end = config.max_prompt_tokens + config.max_new_tokens
    keys = H * groups // heads                                # of one token, in one layer
    block = 2 * (2 * H * (H + keys) + 3 * H * inner)
    held = 2 * matrices * V * H + L * block / (ranks if config.shard else 1)
    adapters = 4 * 5 * L * 16 * (3 * H + keys)    # policy with gradient and moments, and R_φ
    # While sampling with --shard, each GPU holds all blocks in addition to its share.
    rows = min(config.decode_batch_size, config.batch_size // ranks)
    cache = 4 * L * keys * rows * (y_end + config.max_critique_tokens)
    prefill = min(PREFILL_TOKENS, rows * y_end) * (18.2 * H + 6.32 * inner)
    sampling = held + L * block * config.shard + adapters + cache + max(prefill, 12 * rows * V)
    # With checkpointing, the activations of one block and the inputs of all blocks are kept.
    per_token = (31.3 * H + 5.94 * inner) * (1 if config.activation_checkpointing else L)
    per_token += 6.44 * inner - 3.44 * H + 2.36 * L * H * config.activation_checkpointing
    longest = max(y_end, config.reward_max_tokens, config.micro_batch_tokens)
    training = held + 2 * block * config.shard + adapters + longest * per_token + 2**28
    return [held / 1e9, sampling / 1e9, training / 1e9]


def seconds(config, rows: int) -> tuple[float, float]:
    """Seconds of an iteration: (decoding of y and z; log-probs and updates).

    rows: number of rollouts on each GPU.
    """
    y_end = config.max_prompt_tokens + config.max_new_tokens

    def decode(P: int, T: int) -> float:            # T tokens after prompts of P tokens
        columns = sum(min(round_up(P + t, 256), round_up(P + T, 64)) for t in range(T))
        return rows * P * SCORE / 2 + T * STEP + rows * columns * COLUMN

    decoding = (decode(config.max_prompt_tokens, config.max_new_tokens)
                + decode(y_end, config.max_critique_tokens))
    return decoding, rows * y_end * (SCORE + config.ppo_epochs * UPDATE)


if __name__ == "__main__":
    lines = []
    for model, ranks, flags in CASES:
        config = parse_flags(Config, argv=["--task", "ultrafeedback", *flags.split()])
        figures = [f"{gb:.1f}" for gb in memory(model, config, ranks)]
        lines.append([model, str(ranks), flags, *figures])
    print_table("GB", ["model", "GPUs", "flags", "base", "sampling", "training"], lines)
    lines = []
    for task, rows, ranks, rollouts in RUNS:
        config = parse_flags(Config, argv=["--task", task])
        decoding, rest = seconds(config, rollouts // ranks)
        iteration = decoding + rest
        hours = config.epochs * rows // rollouts * iteration / 3600
        lines.append([f"{task}, {rollouts}", str(ranks), f"{iteration:.0f}",
                      f"{decoding / iteration:.0%}", f"{hours:.0f}"])
    print_table("Phase 3, 8B", ["preset, rollouts", "GPUs", "s", "decoding", "hours"], lines)
