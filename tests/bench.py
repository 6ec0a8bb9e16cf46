"""Every figure of speed and memory in this repository: one command, one table, each row a ratio against its peer.

    python tests/bench.py                                   # all rows that a CPU can measure
    python tests/bench.py --only ppo decode --write         # some rows; --write puts them into tests/BENCHMARKS.md
    python tests/bench.py --device cuda --shape llama3-8b --write      # the GPU's rows, random weights, no download
    python tests/bench.py --scaling --write                 # the page tests/SCALING.md

Two peers live in environments of their own; without them their rows say how to make one:

    --trl_python PATH     TRL 0.11.3's PPOTrainer.step, the engine of the authors' release
    --trl1_python PATH    TRL 1.x's chunked log-probs

How it measures. A worker process (bench_work.py) builds the sides of a row on the same weights and inputs, calls each
once, then times them in turn for 3 s a side; sides from different environments take turns by process, and all of it
is done --rounds times. A figure is the median, min–max in brackets. Memory is measured in a process per side: the
most it held during one call above what it held before (resident set on a CPU, with an allocator that returns what is
freed; torch's allocator on CUDA), after one call that loads what is loaded once. The sides return a number that must
agree, so no ratio compares different work; where the work differs by design, the note says in what.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import textwrap
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path[:0] = [str(ROOT), str(HERE)]

from bench_work import SHAPES, Shape                                       # noqa: E402

ENVIRONMENTS = {
    "trl_python": "python3 -m venv trl0 && trl0/bin/pip install torch==2.13.0 && trl0/bin/pip install trl==0.11.3 "
                  "transformers==4.45.2 peft==0.13.2 accelerate==1.0.1 'numpy<2' 'pyarrow<20' 'datasets<3.2' rich; "
                  "then --trl_python trl0/bin/python",
    "trl1_python": "python3 -m venv trl1 && trl1/bin/pip install torch==2.13.0 trl==1.16.0; "
                   "then --trl1_python trl1/bin/python"}
ELSEWHERE = {"trl-full": "trl_python", "trl-k1": "trl_python", "trl1": "trl1_python"}
SIDES = {"naive": "log_softmax and gather", "trl1": "TRL 1.x chunked log-probs", "peft": "PEFT",
         "dynamic": "transformers, dynamic cache", "static": "transformers, static cache",
         "trl-full": "TRL 0.11.3, full KL", "trl-k1": "TRL 0.11.3, KL of the sampled token",
         "copy": "copying as many bytes"}


def start(task: dict, python: str = sys.executable, ranks: int = 0) -> dict:
    """Run a worker and return what it measured; an error of its own ends the bench with its last lines."""
    launch = [python, "-m", "torch.distributed.run", "--nproc_per_node", str(ranks)] if ranks else [python]
    extra = {"PYTHONPATH": f"{ROOT}:{HERE}", "TOKENIZERS_PARALLELISM": "false"}
    if task["mode"] in ("memory", "footprint"):
        extra["MALLOC_MMAP_THRESHOLD_"] = "65536"     # freed tensors leave the resident set, so its peak is what lives
    done = subprocess.run([*launch, str(HERE / "bench_work.py"), json.dumps(task)], capture_output=True, text=True,
                          env=os.environ | extra)
    found = re.findall(r"^RESULT (.*)$", done.stdout, re.M)
    if done.returncode or not found:
        raise RuntimeError(f"worker {task} under {python} failed:\n" + "\n".join(done.stderr.splitlines()[-15:]))
    return json.loads(found[-1])


# ── Rows: one call against another ────────────────────────────────────────────────────────────────────

@dataclass(frozen=True)
class Case:
    """A row or more: what is built, with which options, against whom, and what must be reached.

    limits: (measure, side) → the most that ours / peer may be. measures: "time", "memory" or both.
    """
    build: str
    title: str
    sides: tuple[str, ...]
    options: dict
    limits: dict
    measures: tuple[str, ...] = ("time", "memory")
    note: str = ""


@dataclass
class Row:
    """One line of the table. ratio None: not measured, and `note` says why."""
    what: str
    measure: str
    peer: str
    ours: str = "–"
    theirs: str = "–"
    ratio: float | None = None
    limit: float | None = None
    note: str = ""
    fastest: str = ""

    def cells(self) -> list[str]:
        """As text, in the order of HEADER."""
        must = "–" if self.limit is None else f"≤ {self.limit:.3g}"
        if self.ratio is None:
            return [self.what, self.measure, self.peer, "–", "–", "not measured", must, self.note, ""]
        met = "" if self.limit is None else " ✓" if self.ratio <= self.limit else " ✗"
        ratio = f"**{self.ratio:.3g}**{met}{self.fastest}"
        return [self.what, self.measure, self.peer, self.ours, self.theirs, ratio, must, self.note,
                date.today().isoformat()]


HEADER = ["what", "measure", "peer", "ours", "peer's", "ours / peer", "must reach", "note", "date"]
_PPO = {"batch": 32, "micro": 16, "epochs": 4, "prompts": (20, 100), "responses": (10, 120)}
_PPO_NOTE = ("theirs also computes the entropy of every position and many statistics, on padded rows; ours works on "
             "response positions alone. Both: old log-probs, values, reference, {kl}, GAE, an optimizer step per epoch")
_DECODE = {"batch": 32, "new": 100, "prompts": (20, 60)}


def cases(arguments) -> dict[str, Case]:
    """The rows of a device. Add a row here; what it calls stands in BUILD."""
    peers = ("ours", "dynamic", "static")
    if arguments.device != "cpu":
        big = {"shape": arguments.shape}
        return {
            "logprobs": Case("logprobs", "log-probs, forward and backward, bf16, N 8192, H 4096, V 128,256",
                             ("ours", "naive", "trl1"), {"N": 8192, "H": 4096, "V": 128256},
                             {("time", "naive"): 1.05, ("memory", "naive"): 1 / 20, ("time", "trl1"): 1,
                              ("memory", "trl1"): 1}),
            "decode-1": Case("decode", f"decode, {arguments.shape}, batch 1, 100 tokens", ("ours", "copy"),
                             big | _DECODE | {"batch": 1}, {("time", "copy"): 1 / 0.75}, ("time",),
                             "1/ratio is the share of the copy bandwidth that decoding reaches"),
            "decode-64": Case("decode", f"decode, {arguments.shape}, batch 64, 100 tokens", peers,
                              big | _DECODE | {"batch": 64}, {("time", side): 1 / 4 for side in peers[1:]}),
            "lora": Case("lora", f"LoRA, forward and backward, {arguments.shape}, 4 × 256 tokens", ("ours", "peft"),
                         big | {"batch": 4, "prompts": (256, 256)}, {},
                         note="adapters float32 in both")}
    return {
        "logprobs": Case("logprobs", "log-probs, forward and backward, float32, N 1024, H 1024, V 128,256",
                         ("ours", "naive", "trl1"), {"N": 1024, "H": 1024, "V": 128256},
                         {("time", "naive"): 1, ("memory", "naive"): 1 / 8}),
        "decode-toy": Case("decode", "decode, toy/base, batch 32, 100 tokens", peers,
                           _DECODE | {"model": str(ROOT / "toy/base")}, {("time", side): 1 for side in peers[1:]}),
        "decode-stories": Case("decode", "decode, stories260K, batch 32, 100 tokens", peers,
                               _DECODE | {"model": arguments.stories}, {("time", side): 1 for side in peers[1:]}),
        "ppo": Case("ppo", "PPO update, exact KL, batch 32, 3 layers × 128, V 32,000", ("ours", "trl-full", "trl-k1"),
                    _PPO | {"shape": "small"}, {("time", "trl-full"): 0.2, ("memory", "trl-full"): 0.25},
                    note=_PPO_NOTE.format(kl="exact KL (theirs of the sampled token where it says so)")),
        "ppo-512": Case("ppo", "PPO update, exact KL, batch 32, 3 layers × 128, V 512, equal lengths",
                        ("ours", "trl-full"), _PPO | {"shape": "small-512", "prompts": (60, 60), "responses": (65, 65)},
                        {("time", "trl-full"): 1}, note=_PPO_NOTE.format(kl="exact KL")),
        "lora": Case("lora", "LoRA, forward and backward, 8 layers × 512, 8 × 128 tokens", ("ours", "peft"),
                     {"shape": "middle", "batch": 8, "prompts": (128, 128)}, {})}


def measure(case: Case, arguments) -> list[Row]:
    """All rows of a case, its processes taking turns for --rounds rounds."""
    here, away = [s for s in case.sides if s not in ELSEWHERE], {}
    for side in set(case.sides) - set(here):
        flag = ELSEWHERE[side]
        if getattr(arguments, flag):
            away[side] = getattr(arguments, flag)
    if not Path(case.options.get("model", ROOT)).is_dir():
        return unmeasured(case, f"{Path(case.options['model']).name} is not here (--stories PATH)")
    found = {side: {"time": [], "check": None} for side in [*here, *away]}
    with tempfile.TemporaryDirectory() as work:
        options = case.options | {"device": arguments.device, "work": work}
        task = {"build": case.build, "options": options, "budget": 3.0}
        if case.build == "ppo":
            start(task | {"mode": "prepare"})
        groups = [(here, sys.executable), *(([side], python) for side, python in away.items())]
        for _ in range(arguments.rounds):
            for sides, python in groups:
                for side, result in start(task | {"mode": "time", "sides": sides}, python).items():
                    found[side]["time"] += result["time"]
                    found[side]["check"] = result["check"]
        for side in found if "memory" in case.measures else ():
            alone = start(task | {"mode": "memory", "sides": [side]}, away.get(side, sys.executable))
            found[side]["memory"] = alone[side]["memory"]
    agree(case, {side: result["check"] for side, result in found.items()}, arguments.device)
    rows = unmeasured(case)
    rows[0].note = case.note
    for row, (side, what) in zip(rows, ((side, what) for side in case.sides[1:] for what in case.measures)):
        if side not in found:
            row.note = ENVIRONMENTS[ELSEWHERE[side]]
            continue
        (row.ours, ours), (row.theirs, theirs) = (shown(found[s][what]) for s in ("ours", side))
        row.ratio = ours / theirs
        if what == "time":            # what other work on the machine disturbs least
            row.fastest = f", fastest runs {min(found['ours'][what]) / min(found[side][what]):.3g}"
    return rows


def unmeasured(case: Case, note: str = "") -> list[Row]:
    """The rows of a case without figures."""
    return [Row(case.title, what, SIDES[side], limit=case.limits.get((what, side)), note=note)
            for side in case.sides[1:] for what in case.measures]


def agree(case: Case, checks: dict[str, float], device: str):
    """Raises RuntimeError where the sides did not compute the same thing."""
    tolerance = 1e-3 if device == "cpu" else 2e-2
    ours = checks["ours"]
    apart = {side: value for side, value in checks.items() if not math.isclose(value, ours, rel_tol=tolerance)}
    if apart:
        raise RuntimeError(f"{case.title}: ours gives {ours}, but {apart}; the row would compare different work")


def shown(value) -> tuple[str, float]:
    """A measurement as text and as one number: the median of a list of seconds, or bytes."""
    if isinstance(value, list):
        middle = statistics.median(value)
        return f"{middle:#.3g} s ({min(value):#.3g}–{max(value):#.3g})", middle
    return human(value), float(value)


def human(size: float) -> str:
    """Bytes as MB or GB, powers of ten."""
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"


# ── Rows that are not one call against another ─────────────────────────────────────────────────────────

def iteration_rows(arguments) -> list[Row]:
    """Time per phase, the share of feedback, and the peak of one whole iteration of Algorithm 4."""
    big = arguments.device != "cpu"
    title = f"one iteration, {arguments.shape}, 64 rollouts of 256, critiques of 256, 4 epochs" if big else \
        "one iteration, 3 layers × 128, V 32,000, 16 rollouts of 64, critiques of 64, 4 epochs"
    rows = [Row(title, "time", "the iteration without feedback", note="paper: 1.09–1.11"),
            Row(title, "memory, model included", "a 40 GB card" if big else "the weights alone")]
    rows[1].limit = 1.0 if big else None
    if big and not torch.cuda.is_available():
        return rows
    found = start({"mode": "iteration", "options": {"device": arguments.device} | (
        {"shape": arguments.shape, "batch": 64, "new": 256, "micro": 4, "checkpointed": True} if big else
        {"shape": "small", "batch": 16, "new": 64, "micro": 8})})
    phases = found["seconds"]
    total, limit = sum(phases.values()), 40e9 if big else found["weights"]
    rows[0].ours, rows[0].theirs = f"{total:.3g} s", f"{total - phases['critique']:.3g} s"
    rows[0].ratio = total / (total - phases["critique"])
    rows[0].note += "; " + ", ".join(f"{phase} {s:.3g} s" for phase, s in phases.items())
    rows[1].ours, rows[1].theirs, rows[1].ratio = human(found["peak"]), human(limit), found["peak"] / limit
    return rows


def asserts_rows(arguments) -> list[Row]:
    """What the asserts at the seams cost."""
    row = Row("asserts of one iteration, toy world, no critique written", "time", "the iteration", limit=0.01)
    if arguments.device != "cpu" and not torch.cuda.is_available():
        return [row]
    found = start({"mode": "asserts", "options": {"device": arguments.device}})
    row.ours, row.theirs = f"{found['asserts'] * 1e3:.3g} ms", f"{found['whole'] * 1e3:.4g} ms"
    row.ratio, row.note = found["asserts"] / found["whole"], f"{found['number']} asserts passed"
    return [row]


def fsdp_rows(arguments) -> list[Row]:
    """Two ranks: what a rank holds of the parameters, and whether a rollout's all-gathers depend on its length."""
    title = "FSDP2, 2 ranks, 3 layers × 128, V 32,000"
    rows = [Row(title, "parameter bytes of a rank", "not sharded", limit=0.55, note="adapters included, whole"),
            Row(title, "all-gathers, rollout of 100 tokens", "rollout of 10 tokens", limit=1.0)]
    if arguments.device != "cpu" and torch.cuda.device_count() < 2:
        return rows
    found = start({"mode": "fsdp", "options": {"shape": "small", "device": arguments.device}}, ranks=2)
    rows[0].ours, rows[0].theirs, rows[0].ratio = (human(found["held"]), human(found["whole"]),
                                                   found["held"] / found["whole"])
    short, long = found["gathers"]
    rows[1].ours, rows[1].theirs, rows[1].ratio = str(long), str(short), long / short
    return rows


# Annotation throughput (2,000 rows, concurrency 64, loopback server, faults) gets its rows here.

def annotation_rows(arguments) -> list[Row]:
    """Annotation against a bare loop over the same client, its memory, and how many calls a faulty server costs."""
    n = 2000
    rows = [Row(f"annotation, {n:,} rows, a server that answers in 200 ms, concurrency 64", "time",
                "a bare asyncio loop over the same client", limit=1 / 0.9),
            Row("annotation, the same", "peak memory", f"{n // 4:,} rows"),
            Row("annotation, 10 % 429, 5 % 500, 3 % time-outs, 2 % garbage, 1 % truncated", "calls", "rows", limit=1.25)]
    if arguments.device != "cpu":
        return []
    from bench_annotation import measure as annotate
    found = annotate(n, rounds=arguments.rounds)
    (rows[0].ours, ours), (rows[0].theirs, theirs) = shown(found["ours"]), shown(found["bare"])
    rows[0].ratio = ours / theirs
    rows[1].ours, rows[1].theirs = (human(1e6 * found["peak_mb"][k]) for k in (n, n // 4))
    rows[1].ratio = found["peak_mb"][n] / found["peak_mb"][n // 4]
    rows[2].ours, rows[2].theirs, rows[2].ratio = f"{found['faults']['calls']:,}", f"{n:,}", found["faults"]["calls"] / n
    rows[2].note = f"{found['faults']['seconds']:.0f} s; " + found["faults"]["said"].split(". ")[0].split(": ", 1)[-1]
    return rows


OTHERS = {"iteration": iteration_rows, "asserts": asserts_rows, "fsdp": fsdp_rows, "annotation": annotation_rows}


# ── The table and its page ──────────────────────────────────────────────────────────────────────────────

def machine(device: str) -> str:
    """Processor or GPU, cores, memory, and the versions that matter."""
    name = next((line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")), "?")
    gigabytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9
    where = f"{len(os.sched_getaffinity(0))} cores of {name}, {gigabytes:.0f} GB"
    if device != "cpu":
        where = f"{torch.cuda.get_device_name()}, {torch.cuda.mem_get_info()[1] / 1e9:.0f} GB; host {where}"
    versions = ", ".join(f"{p} {importlib.metadata.version(p)}" for p in ("torch", "transformers", "peft"))
    return f"{where}; Python {platform.python_version()}, {versions}"


def pipes(header: list[str], rows: list[list]) -> str:
    """A table in Markdown."""
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in [header, ["---"] * len(header), *rows])


def write_page(rows: list[Row], arguments):
    """Put the rows into this device's section of BENCHMARKS.md; other rows of the same machine stay."""
    page = HERE / "BENCHMARKS.md"
    sections = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", page.read_text() if page.exists() else "", re.M | re.S))
    old, here, kept = sections.get(arguments.device, ""), machine(arguments.device), {}
    if f"Machine: {here}" in old:
        for line in re.findall(r"^\| (?!what |--- )(.*) \|$", old, re.M):
            cells = [cell.strip() for cell in line.split(" | ")]
            kept[tuple(cells[:3])] = cells
    for cells in (row.cells() for row in rows):
        if cells[5] != "not measured" or tuple(cells[:3]) not in kept:
            kept[tuple(cells[:3])] = cells
    command = " ".join(["python tests/bench.py", *("PATH" if a.startswith("/") else a for a in sys.argv[1:])])
    when = f"{date.today()}, load average {os.getloadavg()[1]:.1f}"
    sections[arguments.device] = (f"\nMachine: {here}\n\nLast command, {when}: `{command}`\n\n"
                                  f"{pipes(HEADER, list(kept.values()))}\n\n")
    if "Machine:" not in sections.get("cuda", ""):
        wanting = argparse.Namespace(device="cuda", shape="llama3-8b")
        lines = [row.cells() for rows in (*(unmeasured(case) for case in cases(wanting).values()),
                                          iteration_rows(wanting), asserts_rows(wanting), fsdp_rows(wanting)) for row in rows]
        sections["cuda"] = ("\nNo GPU was used yet. The command: `python tests/bench.py --device cuda --shape llama3-8b"
                            f" --write`\n\n{pipes(HEADER, lines)}\n\n")
    page.write_text("# Benchmarks\n\n" + INTRODUCTION + "".join(f"## {name}\n{body.rstrip()}\n\n"
                                                               for name, body in sections.items()).rstrip() + "\n")
    print(f"written: {page}")


INTRODUCTION = """\
Written by `python tests/bench.py --write`; no figure here was typed. Every row is a ratio
against its peer in the same run: times are the median of alternating runs (min–max), memory is
the most one call held above what was held before it. How, in detail: the first lines of
`bench.py`. Below 1 is better than the peer; ✓ and ✗ say whether what must be reached was. Where
other work disturbed a run, the ratio of the fastest runs says more than that of the medians.

"""


# ── SCALING.md: memory and time from a formula ─────────────────────────────────────────────────────────

@dataclass(frozen=True)
class Card:
    """What a device brings: sustained FLOP/s of matrix products, bytes/s of reading weights, seconds of overhead per
    block and pass, seconds to draw from a distribution per entry, bytes/s to other ranks, memory, bytes per weight."""
    flops: float
    bandwidth: float
    overhead: float
    draw: float
    link: float
    memory: float
    width: int = 2


def h100(link: float) -> Card:
    """Assumed until a GPU was used: NVIDIA's data sheet for the H100 SXM, 989 TFLOP/s dense bf16, 3.35 TB/s, 80 GB; of
    which 40 % in products, 75 % in reading, 80 % of the link; drawing reads a logit five times; no overhead per block,
    as in one CUDA graph."""
    return Card(0.4 * 989e12, 0.75 * 3.35e12, 0.0, 20 / (0.75 * 3.35e12), 0.8 * link, 80e9)


CLUSTERS = {1: h100(math.inf), 8: h100(450e9), 64: h100(50e9)}     # NVLink each way; 400 Gb/s of network per GPU
WORK = {"rollouts": 64, "prompt": 512, "response": 256, "critique": 256, "instruction": 200, "epochs": 4, "micro": 4}
FIT = ("fit-a", "fit-b", "fit-c", "fit-d")


def sizes(s: Shape) -> dict[str, int]:
    """Numbers in a shape's blocks, head, input embedding, one LoRA adapter (r 16, q and v), and its cache per token."""
    kv = s.kv * s.H // s.heads
    return {"blocks": s.L * (2 * s.H * s.H + 2 * s.H * kv + 3 * s.H * s.I + 2 * s.H) + s.H, "head": s.V * s.H,
            "embedding": 0 if s.tied else s.V * s.H, "lora": s.L * 16 * (3 * s.H + kv), "cache": 2 * s.L * kv}


def activations(s: Shape, c: list[float], width: int, checkpointed: bool) -> float:
    """Bytes that a training pass holds per token. c: numbers kept per block and H, per block and I; in flight per H,
    per I; kept per block and H where activations are checkpointed. What goes by H is float32 in any base (norms,
    adapters)."""
    kept_h, kept_i, flight_h, flight_i, inputs = c
    layers = 1 if checkpointed else s.L
    return 4 * (layers * kept_h + flight_h) * s.H + width * (layers * kept_i + flight_i) * s.I + \
        (width * inputs * s.L * s.H if checkpointed else 0)


def memory(s: Shape, card: Card, c: list[float], ranks: int, sharded: bool, checkpointed=True) -> dict[str, float]:
    """Bytes on one rank while it samples (the weights gathered whole) and while it trains."""
    n, w, k = sizes(s), WORK, card.width
    rows, length = math.ceil(w["rollouts"] / ranks), w["prompt"] + w["response"]
    base = k * (n["blocks"] + n["head"] + n["embedding"])
    adapters = 4 * n["lora"] * (4 + 1)                    # policy: weight, gradient, two moments; critic: weight
    cache = k * n["cache"] * rows * (length + w["instruction"] + w["critique"])
    tokens = min(w["micro"], rows) * length
    at_work = 2 * k * max(n["blocks"] // s.L, n["head"]) if sharded else 0              # two units gathered at a time
    head = 2**28 + 2 * k * s.H * min(w["micro"], rows) * w["response"]
    held = base / ranks if sharded else base
    return {"weights": held, "sampling": base + (held if sharded else 0) + adapters + cache + 12 * rows * s.V,
            "training": held + at_work + adapters + tokens * activations(s, c, k, checkpointed) + head}


def step_seconds(s: Shape, card: Card, rows: int, context: float) -> float:
    """One decode step: every weight multiplied, or read with the cache, whichever is longer; and the drawing."""
    n = sizes(s)
    weights = n["blocks"] + n["head"]
    read = card.width * (weights + rows * context * n["cache"]) / card.bandwidth
    return s.L * card.overhead + max(2 * weights * rows / card.flops, read) + rows * s.V * card.draw


def training_seconds(s: Shape, card: Card, tokens: int, scored: int, checkpointed: bool) -> float:
    """Forward and backward with a frozen base (no weight gradients): 4 FLOP a weight and token, 6 if checkpointed."""
    n = sizes(s)
    flops = (6 if checkpointed else 4) * n["blocks"] * tokens + 4 * n["head"] * scored
    return 3 * s.L * card.overhead + flops / card.flops


def iteration_seconds(s: Shape, card: Card, ranks: int, sharded: bool) -> dict[str, float]:
    """The phases of one iteration on every rank; transfers overlap the products, the longer one counts."""
    n, w = sizes(s), WORK
    rows, length = math.ceil(w["rollouts"] / ranks), w["prompt"] + w["response"]
    gather = card.width * (n["blocks"] + n["head"] + n["embedding"]) / card.link if sharded else 0
    prefill = lambda tokens: 2 * n["blocks"] * rows * tokens / card.flops
    asked = length + w["instruction"]
    update = training_seconds(s, card, rows * length, rows * w["response"], checkpointed=True)
    return {"rollout": gather + prefill(w["prompt"]) + w["response"] * step_seconds(s, card, rows, w["prompt"] + 128),
            "critique": prefill(asked) + w["critique"] * step_seconds(s, card, rows, asked + 128),
            "score": 2 * prefill(length) + 6 * n["head"] * rows * w["response"] / card.flops,
            "update": w["epochs"] * max(update, 2 * gather * math.ceil(rows / w["micro"]))}


def fit_activations(device: str) -> list[float]:
    """The five constants of `activations`, by least squares on the relative errors of the fit-* shapes."""
    left = []
    for name in FIT:
        s, found = SHAPES[name], start({"mode": "footprint", "options": {"shape": name, "device": device, "rows": 8,
                                                                         "length": 128}})
        for key, layers, inputs in (("training", s.L, 0), ("checkpointed", 1, s.L)):
            y, half = found[key] / 4 / 1024, 1.0 if device == "cpu" else 0.5        # `activations` counts these in the base's width
            left.append([x / y for x in (layers * s.H, half * layers * s.I, s.H, half * s.I, half * inputs * s.H)])
    return torch.linalg.lstsq(torch.tensor(left, dtype=torch.float64), torch.ones(len(left), 1, dtype=torch.float64)
                              ).solution.flatten().tolist()


def fit_speed(device: str) -> tuple[Card, dict[str, list[float]]]:
    """This machine as a Card (overhead from toy, products and reading from middle with one row, drawing from small
    with 32), and all times; the last two runs gave no constant."""
    runs = [["toy", 1], ["middle", 1], ["small", 32], ["small", 8], ["middle", 32]]
    found = start({"mode": "speed", "options": {"device": device, "runs": runs, "rows": 8, "length": 128}})
    n, s = sizes(SHAPES["middle"]), SHAPES["middle"]
    overhead = found["step"][0] / SHAPES["toy"].L
    width = 4 if device == "cpu" else 2
    flops = 1024 * 4 * (n["blocks"] + n["head"]) / (found["train"][1] - 3 * s.L * overhead)
    bandwidth = width * (n["blocks"] + n["head"]) / (found["step"][1] - s.L * overhead)
    card = Card(flops, bandwidth, overhead, 0.0, math.inf, 0, width)
    draw = (found["step"][2] - step_seconds(SHAPES["small"], card, 32, 32)) / (32 * SHAPES["small"].V)
    return replace(card, draw=max(0.0, draw)), found


def scaling_checks(device: str) -> tuple[list[float], Card, list[list]]:
    """Measured constants of this machine, and [what, predicted, measured] where no constant came from."""
    c, (card, times), checks = fit_activations(device), fit_speed(device), []
    for name in ("toy", "small", "middle", "llama3-8b", "llama3-70b"):
        s, n, real = SHAPES[name], sizes(SHAPES[name]), not name.startswith("llama3")
        found = start({"mode": "footprint", "options": {"shape": name, "device": device if real else "meta",
                                                        "rows": 16, "length": 160}})
        size = (card.width if real else 2) * (n["blocks"] + n["head"] + n["embedding"])
        checks.append([f"{name}: parameters, MB", size / 1e6, found["parameters"] / 1e6])
        if not real:
            continue
        size = card.width * n["cache"] * 2560
        checks.append([f"{name}: cache of 16 × 160 tokens, MB", size / 1e6, found["cache"] / 1e6])
        for key in ("training", "checkpointed"):
            size = 2560 * activations(s, c, card.width, key == "checkpointed")
            checks.append([f"{name}: {key} pass of 16 × 160 tokens, MB", size / 1e6, found[key] / 1e6])
    for run, name, rows in ((3, "small", 8), (4, "middle", 32)):
        checks.append([f"{name}: decode step, batch {rows}, ms", 1e3 * step_seconds(SHAPES[name], card, rows, 32),
                       1e3 * times["step"][run]])
    checks.append(["small: training pass of 8 × 128 tokens, ms",
                   1e3 * training_seconds(SHAPES["small"], card, 1024, 1024, False), 1e3 * times["train"][2]])
    return c, card, checks


def predictions(c: list[float]) -> list[list[str]]:
    """8B and 70B on 1, 8 and 64 GPUs: gigabytes and seconds."""
    table = []
    for name in ("llama3-8b", "llama3-70b"):
        for ranks, gpu in CLUSTERS.items():
            for sharded in (False, True)[: 1 if ranks == 1 else 2]:
                m = memory(SHAPES[name], gpu, c, ranks, sharded)
                t = iteration_seconds(SHAPES[name], gpu, ranks, sharded)
                fits = "yes" if max(m["sampling"], m["training"]) <= gpu.memory else "**no**"
                table.append([name, ranks, "sharded" if sharded else "replicated",
                              *(f"{x / 1e9:.1f}" for x in m.values()), fits,
                              *(f"{x:.1f}" for x in t.values()), f"{sum(t.values()):.1f}"])
    return table


def scaling_page(device: str) -> str:
    """The text of SCALING.md."""
    c, card, checks = scaling_checks(device)
    checked = [[what, f"{p:,.1f}", f"{m:,.1f}", f"{p / m:.2f}"] for what, p, m in checks]
    columns = ["model", "GPUs", "base", "weights GB", "sampling GB", "training GB", "fits 80 GB", "rollout s",
               "critique s", "score s", "update s", "iteration s"]
    text = SCALING.format(
        machine=machine(device), date=date.today(), device=device, c=", ".join(f"{x:.2f}" for x in c),
        gflops=card.flops / 1e9, gbs=card.bandwidth / 1e9, us=card.overhead * 1e6, ns=card.draw * 1e9,
        work=WORK, table=pipes(columns, predictions(c)),
        checks=pipes(["what", "formula", "measured", "formula / measured"], checked))
    return "\n\n".join(part if part[0] in "#|" else textwrap.fill(part, 118, break_on_hyphens=False)
                       for part in text.strip().split("\n\n")) + "\n"


SCALING = """# Scaling

Written by `python tests/bench.py --scaling --write` on {date}; the formula is the code of that section of `bench.py`.
Measured on: {machine}.

**Memory of a rank.** The base in bf16 (divided by the ranks where it is sharded); LoRA adapters of policy (weight,
gradient, two moments, float32) and critic; while sampling, the base whole, once more where it was gathered, and the
cache of all its rows; while training, two gathered units where sharded, the activations of one micro-batch, and the
bounded workspace of the fused head. Activations per token: L (a H + b I) + c H + d I numbers, or with checkpointing e
L H and one block.

**Time.** A decode step multiplies by every weight or reads them all and the cache, whichever is longer; a training
pass costs 4 FLOP per weight and token with a frozen base, 6 with checkpointing; sharded passes move the base twice
per micro-batch. Attention's own products are left out: below 4 % of an 8B's at these lengths.

**Constants measured here** ({device}): a, b, c, d, e = {c} (least squares over four shapes, none of them below);
products {gflops:.0f} GFLOP/s and reading {gbs:.1f} GB/s at 8 layers × 512, overhead {us:.0f} µs per block and pass from
toy, drawing {ns:.1f} ns per row and entry of the vocabulary.

## Checked

{checks}

## Predicted: 8B and 70B, activations checkpointed

One iteration: {work[rollouts]} rollouts on all GPUs together, prompts of {work[prompt]} tokens, responses of
{work[response]}, critiques of {work[critique]} (their instruction adds {work[instruction]}), {work[epochs]} epochs,
micro-batch {work[micro]}; LoRA r 16 on q and v. **The hardware is assumed, not measured**: H100 SXM by its data sheet
(989 TFLOP/s bf16, 3.35 TB/s, 80 GB), of which 40 % of the products and 75 % of the reading; NVLink 450 GB/s among 8
GPUs, 50 GB/s per GPU between nodes, 80 % of either. The activation constants come from float32 on a CPU; norms and
adapters are counted as float32 under bf16, too. Decoding is counted as one CUDA graph without overhead; a sharded
model decodes eagerly, so its rollout and critique seconds are lower bounds.

{table}

Reading it: an 8B fits one card of 40 GB where its sampling column stays below 40. Sharding saves memory in training,
not while sampling, because the weights are gathered whole for a rollout phase: so a 70B in bf16 (141 GB) does not fit
an 80 GB card at any number of ranks; it needs cards of more than its weights, or a base of fewer bytes per weight.
With 64 rollouts an iteration stops getting faster where a rank has one row left: the decode steps read the same
weights for fewer rows.
"""


def main():
    """Measure the rows that were asked for and print or write them."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", help="rows whose name starts so")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--shape", default="llama3-8b", choices=SHAPES, help="model of the GPU's rows, random weights")
    parser.add_argument("--rounds", type=int, default=3, help="how often the sides take turns")
    parser.add_argument("--trl_python", help="an interpreter with TRL 0.11.3")
    parser.add_argument("--trl1_python", help="an interpreter with TRL 1.x")
    parser.add_argument("--stories", default=str(ROOT.parent / "shared/models/stories260K"), help="a real tiny model")
    parser.add_argument("--write", action="store_true", help="put the rows into tests/BENCHMARKS.md")
    parser.add_argument("--scaling", action="store_true", help="the page SCALING.md: constants, checks, predictions")
    arguments = parser.parse_args()
    if arguments.scaling:
        page = scaling_page(arguments.device)
        print(page)
        if arguments.write:
            (HERE / "SCALING.md").write_text(page)
        return
    chosen, rows = cases(arguments), []
    for name in (n for n in [*chosen, *OTHERS] if n.startswith(tuple(arguments.only or [""]))):
        print(f"measuring {name} …", file=sys.stderr, flush=True)
        try:
            more = measure(chosen[name], arguments) if name in chosen else OTHERS[name](arguments)
        except RuntimeError as error:                    # one row's; the others are still worth their time
            print(f"{name} was not measured: {error}", file=sys.stderr)
            continue
        for row in more:
            print(" | ".join(row.cells()[:7]), flush=True)
        rows += more
    if arguments.write:
        write_page(rows, arguments)


if __name__ == "__main__":
    main()
