"""Measure all speed and memory figures of this repository, as ratios to other implementations:

    python bench/bench.py --write                  # all CPU measurements → BENCHMARKS.md
    python bench/bench.py --only ppo decode          # some groups
    python bench/bench.py --device cuda --shape llama3-8b --write FILE      # random weights
    python bench/bench.py --tiny                     # the GPU cases at toy size, on a CPU

Two peers need separate Python environments; without one, its rows say how to create it:

    --trl_python PATH     TRL 0.11.3's PPOTrainer.step, the engine of the authors' release
    --trl1_python PATH    TRL 1.x's chunked log-probs

Method. Each side of a comparison runs in its own process (bench_work.py) with the same weights
and inputs. After a warm-up, one call measures the memory (resident set; on CUDA torch's
allocator) and returns a number that must be equal for all sides. Then the sides take turns for
--rounds rounds, each with .3 s or one call per side. Rounds stop after --patience seconds, but
not before the second. On CUDA one side runs after the other, because the GPU may not hold two.
A ratio is that of the fastest runs, with the smallest and largest ratio of a round in brackets.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import date
from itertools import product
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path[:0] = [str(ROOT), str(HERE)]

from bench_work import ENVIRONMENT, SHAPES, once                           # noqa: E402

PIP = "python3 -m venv trl && trl/bin/pip install torch==2.13.0 trl=="
TRL = "trl_python", PIP + ("0.11.3 transformers==4.45.2 peft==0.13.2 accelerate==1.0.1 "
                           "'numpy<2' 'pyarrow<20' 'datasets<3.2' rich")
ELSEWHERE = {"trl-full": TRL, "trl-k1": TRL, "trl1": ("trl1_python", PIP + "1.16.0")}
SIDES = {"naive": "log_softmax, gather", "products": "its two matrix products alone",
         "trl1": "TRL 1.x, chunked", "merged": "PEFT, merged",
         "peft": "PEFT", "static": "PEFT, static cache", "eager": "the same, not captured",
         "trl-full": "TRL 0.11.3, full KL", "trl-k1": "TRL 0.11.3, sampled KL",
         "copy": "copying as many bytes"}


# ── The rows

@dataclass(frozen=True)
class Case:
    """One comparison of our code with one or more peers.

    peers maps each peer to the upper limits of ours / peer: (time, memory), None without limit.
    whole: a single process measures both sides. rounds: the minimal number of rounds.
    """
    group: str
    what: str
    build: str
    peers: dict[str, tuple]
    options: dict = field(default_factory=dict)
    whole: bool = False
    rounds: int = 2
    ranks: int = 0


GROUPS = {
    "logprobs": "Log-probs of N tokens: forward, and backward to the hidden states. Every side "
                "has the two products h Wᵀ and pᵀW to make",
    "decode": "Decoding 100 tokens a row, LoRA r 16 on q and v, as the product does it (merged "
              "where float32), beside transformers' `generate`",
    "ppo": "A PPO update of 32 rows, 4 epochs: old log-probs, values, reference, GAE, steps. "
           "Theirs adds the entropy of every position and statistics, on padded rows",
    "lora": "LoRA r 16 on q and v, forward and backward",
    "iteration": "One iteration of Algorithm 4; paper, Table 13: 1.09–1.11 with feedback",
    "growth": "Cost beside linear growth: the last size's over the first's times what it grew",
    "rest": "Asserts, ranks and annotation"}
GRID = sorted(product((256, 1024, 4096), (512, 2048), (32000, 128256, 151936)), key=math.prod)


def sweep(what: str, build: str, key: str, points, options: dict) -> Case:
    """A case that runs the same work at growing sizes; points: (size, value of option key)."""
    options = {"build": build, "key": key, "points": points} | options
    return Case("growth", what, "growth", {"linear": (1, None)}, options, whole=True)


def cpu_cases(stories: str) -> list[Case]:
    """The cases for a CPU."""
    found = []
    for n, h, v in [(256, 128, 900), (1344, 128, 900), *GRID]:
        peers = {"naive": (0.8 if v > 900 else 1, 1 / 8 if v >= 128000 else None),
                 "products": (None, None)}
        if (n, h, v) == (1024, 512, 128256):
            peers["trl1"] = (None, None)
        size = {"N": n, "H": h, "V": v, "GB": 4 * v * (2 * h + 3 * n) / 1e9}
        found.append(Case("logprobs", f"N {n:,}, H {h:,}, V {v:,}", "logprobs", peers, size))
    for model in (str(ROOT / "toy/base"), stories):
        for batch in (1, 8, 32, 128):
            peers = {"peft": (0.8, None), "merged": (None, None)}
            peers |= {"static": (None, None)} if batch == 32 else {}
            size = {"model": model, "batch": batch, "new": 100, "prompts": (20, 60)}
            title = f"{Path(model).name.replace('base', 'toy/base')}, batch {batch}"
            found.append(Case("decode", title, "decode", peers, size))
    ppo = {"shape": "small", "batch": 32, "micro": 16, "epochs": 4}
    ragged = ppo | {"prompts": (20, 100), "responses": (10, 120)}
    equal = ppo | {"V": 512, "prompts": (60, 60), "responses": (65, 65)}
    full = {"trl-full": (0.2, 0.25)}
    found += [Case("ppo", "3 layers × 128, V 32,000, ragged lengths", "ppo",
                   full | {"trl-k1": (None, None)}, ragged, rounds=5),
              Case("ppo", "3 layers × 128, V 512, equal lengths", "ppo",
                   {"trl-full": (1, None)}, equal, rounds=5),
              Case("lora", "8 layers × 512, 8 × 128 tokens", "lora", {"peft": (None, None)},
                   {"shape": "middle", "batch": 8, "prompts": (128, 128)})]
    found.append(Case("iteration", "3 layers × 128, V 32,000, 16 rollouts of 64, critiques of "
                      "64", "iteration", {"without feedback": (1.3, None),
                                          "the weights": (None, None)},
                      {"shape": "small", "batch": 16, "new": 64, "micro": 8}, whole=True))
    few = {"shape": "small", "prompts": (32, 32)}
    update, short = few | {"batch": 8, "micro": 8, "epochs": 4}, {"responses": (64, 64)}
    decode, ends = few | {"batch": 8, "new": 32}, (32, 128, 512)
    sizes, rows = [(v, v) for v in (2000, 8000, 32000)], [(b, b) for b in (8, 32, 128)]
    found += [
        sweep("log-probs, N (H 512, V 32,000)", "logprobs", "N",
              [(n, n) for n in (256, 1024, 4096)], {"H": 512, "V": 32000}),
        sweep("log-probs, V (N 256, H 512)", "logprobs", "V",
              [(v, v) for v in (8000, 32000, 128000)], {"N": 256, "H": 512}),
        sweep("update, response tokens (batch 8)", "ppo", "responses",
              [(t, (t, t)) for t in ends], update),
        sweep("update, batch (64 tokens)", "ppo", "batch", rows, update | short),
        sweep("update, V (batch 8)", "ppo", "V", sizes, update | short),
        sweep("decode, new tokens (batch 8)", "decode", "new", [(t, t) for t in ends], decode),
        sweep("decode, batch (32 tokens)", "decode", "batch", rows, decode),
        sweep("decode, V (batch 8)", "decode", "V", sizes, decode)]
    annotated = {"a bare loop over the same client": (1 / 0.9, None), "500 rows": (None, None),
                 "rows, where the server fails": (1.25, None)}
    return [*found, *rest_cases(), Case("rest", "annotation, 2,000 rows, 64 at once, replies "
                                        "in 200 ms", "annotation", annotated, whole=True)]


def rest_cases() -> list[Case]:
    """The cases for both devices in which one process measures both sides."""
    ranks = {"not sharded": (0.55, None), "of a rollout of 10 tokens": (1, None)}
    return [Case("rest", "asserts, an iteration of the toy world", "asserts",
                 {"the iteration": (0.01, None)}, whole=True),
            Case("rest", "2 ranks (FSDP2): a rank's parameters; all-gathers of a rollout of "
                 "100 tokens", "fsdp", ranks, {"shape": "small"}, whole=True, ranks=2)]


def cuda_cases(shape: str, tiny: bool) -> list[Case]:
    """The cases for a GPU; tiny makes all of them small enough for a CPU."""
    n, h, v, batch = (256, 128, 900, 4) if tiny else (8192, 4096, 128256, 64)
    rollouts, new = (4, 8) if tiny else (32, 128)
    peers = {"eager": (1 / 1.5, None)}                # the gain that justifies the CUDA graph
    many = {"peft": (0.8, None), "static": (0.8, None), "merged": (None, None)}
    base = {"shape": shape, "prompts": (20, 60), "new": 8 if tiny else 100}
    card = ("the weights", None) if tiny else ("a card of 40 GB", 40e9)
    whole = {"without feedback": (None, None), card[0]: (card[1] and 1, None),
             "rollout and critique, not captured": (1 / 1.5, None)}
    return [
        Case("logprobs", f"N {n:,}, H {h:,}, V {v:,}", "logprobs",
             {"naive": (1.05, 1 / 20), "trl1": (1, 1)}, {"N": n, "H": h, "V": v}),
        Case("decode", f"{shape}, batch 1", "decode", peers | {"copy": (1 / 0.75, None)},
             base | {"batch": 1}),
        Case("decode", f"{shape}, batch {batch}", "decode", peers | many,
             base | {"batch": batch}),
        Case("lora", f"{shape}, 4 × 256 tokens", "lora", {"peft": (None, None)},
             {"shape": shape, "batch": 4, "prompts": (256, 256)}),
        Case("iteration", f"{shape}, {rollouts} rollouts of {new}, critiques of {new}",
             "iteration", whole, {"shape": shape, "batch": rollouts, "new": new, "micro": 1,
                                  "card": card[1], "eager": True}, whole=True),
        *rest_cases()]


# ── Measuring

LONG = 4.0         # s: for longer calls, the call that measures memory also counts as a round


class Worker:
    """A process that runs one side of a comparison."""

    def __init__(self, python: str):
        self.errors = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(
            [python, str(HERE / "bench_work.py")], stdin=subprocess.PIPE, text=True,
            stdout=subprocess.PIPE, stderr=self.errors, env=ENVIRONMENT)

    def ask(self, mode: str, **task):
        """Send a task and return the result; RuntimeError with stderr if the process ends."""
        print(json.dumps({"mode": mode, **task}), file=self.process.stdin, flush=True)
        for line in self.process.stdout:
            if line.startswith("RESULT "):
                return json.loads(line[7:])
        self.errors.seek(0)
        raise RuntimeError(self.errors.read().strip()[-2000:] or "the process printed no error")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()


def compare(case: Case, arguments) -> dict[str, dict]:
    """The figures of each peer and of ours, or {"note": reason} if there are none."""
    options, found = case.options | {"device": arguments.device}, {}
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9
    if options.get("GB", 0) > free:
        note = f"needs {options['GB']:.1f} GB, {free:.1f} were free"
        return {side: {"note": note} for side in case.peers}
    if not Path(options.get("model", ROOT)).is_dir():
        return {side: {"note": "the model is not here: --stories PATH"} for side in case.peers}
    there = {}
    with tempfile.TemporaryDirectory() as work, ExitStack() as ends:
        options |= {"work": work} if case.build == "ppo" else {}
        for side in ("ours", *case.peers):
            flag, remedy = ELSEWHERE.get(side, ("", ""))
            python = getattr(arguments, flag) if flag else sys.executable
            build = "trl-ppo" if flag == "trl_python" else case.build
            try:
                if not python:
                    raise RuntimeError(f"--{flag}: {remedy}")
                worker = ends.enter_context(Worker(python))
                worker.ask("build", build=build, side=side, options=options)
                found[side] = worker.ask("first")
                if arguments.device != "cpu":          # the GPU may not hold two sides
                    take_turns({side: worker}, found, case, arguments)
                    worker.__exit__()
                there[side] = worker
            except RuntimeError as error:
                found[side] = {"note": str(error).splitlines()[-1]}
                print(error, file=sys.stderr)
        if "ours" not in there:
            return {side: found["ours"] for side in case.peers}
        agree(case, {side: found[side]["check"] for side in there}, arguments.device)
        if arguments.device == "cpu":
            take_turns(there, found, case, arguments)
    ours = found.pop("ours")
    return {side: {key: [ours[key], x[key]] for key in ("seconds", "bytes")}
            | {"note": ours["note"]} if "bytes" in x else x for side, x in found.items()}


def take_turns(workers: dict[str, Worker], found: dict, case: Case, arguments):
    """Time all sides and store the seconds of each round in found[side]["seconds"]."""
    long, start = min(found[side]["seconds"] for side in workers) > LONG, time.time()
    for side in workers:
        found[side]["seconds"] = [found[side]["seconds"]] * long
    for n in range(long, max(arguments.rounds, case.rounds)):
        if n >= case.rounds and time.time() - start > arguments.patience:
            break
        for side, worker in workers.items():
            found[side]["seconds"].append(min(worker.ask("time", least=0.3)))


def agree(case: Case, checks: dict[str, float | None], device: str):
    """Raise RuntimeError if results differ; None marks a side that does part of the work."""
    tolerance = 1e-3 if device == "cpu" else 2e-2
    apart = [side for side, x in checks.items()
             if x is not None and not math.isclose(x, checks["ours"], rel_tol=tolerance)]
    if apart:
        raise RuntimeError(f"{case.what}: {checks}; the row would compare different work")


def measure(case: Case, arguments) -> list[dict]:
    """The table rows of a case, as dictionaries from column to cell."""
    if case.ranks and arguments.device != "cpu" and torch.cuda.device_count() < case.ranks:
        return [cells(case, peer) for peer in case.peers]
    if not case.whole:
        found = compare(case, arguments)
    else:
        rounds = {"device": arguments.device, "rounds": arguments.rounds}
        task = {"mode": case.build, "options": case.options | rounds}
        found = dict(zip(case.peers, once(task, ranks=case.ranks)))
    return [cells(case, peer, found[peer]) for peer in case.peers]


# ── The table and its page

def cells(case: Case, peer: str, found: dict | None = None) -> dict[str, str]:
    """One table row as {column: text}, with the measured figures or only the limits."""
    time_limit, memory_limit = case.peers[peer]
    row = {"what": case.what, "peer": SIDES.get(peer, peer), "group": case.group}
    if not found or found.keys() == {"note"}:
        must = "" if time_limit is None else f", must be ≤ {time_limit:.3g}"
        return row | {"ours / peer": f"not measured{must}", **(found or {})}
    row |= {"note": found.get("note", ""), "load": f"{os.getloadavg()[0]:.1f}",
            "date": date.today().isoformat()}
    if times := found.get("seconds"):
        row |= {"ours, s": spread(times[0]), "peer, s": spread(times[1])}
        rounds = [a / b for a, b in zip(*times)]
        row["ours / peer"] = judged(min(times[0]) / min(times[1]), time_limit, rounds)
    if numbers := found.get("numbers"):
        row |= {"ours, s": f"{numbers[0]:,}", "peer, s": f"{numbers[1]:,}"}
        row["ours / peer"] = judged(numbers[0] / numbers[1], time_limit)
    if both := found.get("bytes"):
        own = memory_limit if times else time_limit
        row |= {"ours, MB": f"{both[0] / 1e6:,.1f}", "peer, MB": f"{both[1] / 1e6:,.1f}",
                "ours / peer, memory": judged(both[0] / max(both[1], 1), own)}
    return row


def spread(times: list[float]) -> str:
    """The times of the fastest and of the slowest round, as text."""
    return f"{min(times):.3g}–{max(times):.3g}" if len(times) > 1 else f"{times[0]:.3g}"


def judged(ratio: float, limit: float | None, rounds=()) -> str:
    """A ratio with its range; ≈ if the range includes 1; ✓ or ✗ if there is a limit."""
    text = f"**{ratio:.3g}**"
    if len(rounds) > 1:
        text += f" ({min(rounds):.3g}–{max(rounds):.3g})"
        text += " ≈" if min(rounds) <= 1 <= max(rounds) else ""
    return text if limit is None else f"{text} {'✓' if ratio <= limit else '✗'} ≤ {limit:.3g}"


COLUMNS = ["what", "peer", "ours, s", "peer, s", "ours / peer", "ours, MB", "peer, MB",
           "ours / peer, memory", "note", "load", "date"]


def machine(device: str) -> str:
    """The processor or GPU, cores, memory, and the versions of the main packages."""
    names = re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    gigabytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9
    cores = len(os.sched_getaffinity(0))
    where = f"{cores} cores of {(names or ['?'])[0]}, {torch.get_num_threads()} of them " \
            f"used, {gigabytes:.0f} GB"
    if device == "cuda":
        card = torch.cuda.get_device_properties(0)
        where = f"{card.name}, {card.total_memory / 1e9:.0f} GB; host {where}"
    packages = "torch", "transformers", "peft"
    versions = ", ".join(f"{p} {importlib.metadata.version(p)}" for p in packages)
    return f"{where}; Python {platform.python_version()}, {versions}"


def pipes(header: list[str], rows: list[list]) -> str:
    """A table in Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def tables(rows: list[dict]) -> str:
    """One table for each group, without its empty columns."""
    out = ""
    for group, title in GROUPS.items():
        if mine := [row for row in rows if row["group"] == group]:
            header = [c for c in COLUMNS if any(row.get(c) for row in mine)]
            lines = [[row.get(c, "") for c in header] for row in mine]
            out += f"**{group}.** {title}.\n\n{pipes(header, lines)}\n\n"
    return out


def old_rows(text: str) -> list[dict]:
    """Parse the tables that `tables` wrote."""
    rows, group, header = [], "", None
    for line in text.splitlines():
        if found := re.match(r"\*\*(\w+)\.\*\*", line):
            group, header = found[1], None
        elif line.startswith("| "):
            texts = [cell.strip() for cell in line.strip("| ").split(" | ")]
            texts += [""] * (len(header or []) - len(texts))
            if header is None:
                header = texts
            elif texts[0] != "---":
                rows.append(dict(zip(header, texts), group=group))
    return rows


def write_page(page: Path, rows: list[dict], cases: list[Case], section: str, arguments):
    """Write the rows to their section of the page, and keep the machine's other rows."""
    text, here = page.read_text() if page.exists() else "", machine(arguments.device)
    sections = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", text, re.M | re.S))
    known = {(case.what, SIDES.get(peer, peer)): cells(case, peer)
             for case in cases for peer in case.peers}
    old = sections.get(section, "")
    for row in [*(old_rows(old) if here in old else []), *rows]:
        key = row["what"], row["peer"]
        if key in known and (row.get("date") or not known[key].get("date")):
            known[key] = row
    load = f"{date.today()}, load average {os.getloadavg()[1]:.1f}"
    command = " ".join("PATH" if x.startswith("/") else x for x in sys.argv[1:])
    sections[section] = f"\nMachine: {here}.\n\nLast command, {load}: `python bench/bench.py " \
                        f"{command}`\n\n{tables(list(known.values()))}"
    if "Machine:" not in sections.get("cuda", "") and section == "cpu":
        wanting = [cells(case, peer) for case in cuda_cases("llama3-8b", False)
                   for peer in case.peers]
        sections["cuda"] = "\nNo GPU was used yet; several GPUs (NCCL) never. The command: " \
                           f"`tests/gpu.sh`\n\n{tables(wanting)}"
    body = "".join(f"## {name}\n{part.rstrip()}\n\n" for name, part in sections.items())
    page.write_text(f"{INTRODUCTION}\n{body.rstrip()}\n")
    print(f"written: {page}")


INTRODUCTION = """\
# Benchmarks

Written by `python bench/bench.py --write`; no figure was typed by hand. Each row compares our
code with a peer in the same run. The ratio "ours / peer" is that of the fastest runs, and below
1 if ours is faster or smaller; in brackets are the smallest and the largest ratio of a round.
Seconds are those of the fastest and the slowest round. ≈ means that the rounds disagree on
which side is faster. ✓ and ✗ mean that a target was or was not met. Memory is the peak of one
call above what was held before it. Load is the load average of the machine at the end of the
row, to which the benchmark itself adds only the cores it uses. If it is higher, other programs
were running, and the seconds mean little. The top of `bench.py` explains the method.
"""


def main():
    """Measure the selected groups and print or write their tables."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="+", metavar="GROUP", choices=GROUPS, default=[*GROUPS])
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--shape", default="llama3-8b", choices=SHAPES, help="GPU model")
    parser.add_argument("--tiny", action="store_true", help="GPU cases at toy size")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of timing")
    parser.add_argument("--patience", type=float, default=15.0, help="time limit per case (s)")
    parser.add_argument("--trl_python", help="an interpreter with TRL 0.11.3")
    parser.add_argument("--trl1_python", help="an interpreter with TRL 1.x")
    parser.add_argument("--stories", default=str(ROOT.parent / "shared/models/stories260K"))
    parser.add_argument("--write", nargs="?", type=Path, const=HERE / "BENCHMARKS.md")
    arguments = parser.parse_args()
    section = "tiny" if arguments.tiny else arguments.device
    cases = cpu_cases(arguments.stories) if section == "cpu" else cuda_cases(
        "toy" if arguments.tiny else arguments.shape, arguments.tiny)
    rows, failures, start = [], 0, time.time()
    for case in (case for case in cases if case.group in arguments.only):
        try:
            more = measure(case, arguments)
        except RuntimeError as error:                # only this case failed; measure the others
            print(f"{case.what} was not measured: {error}", file=sys.stderr)
            failures += 1
            continue
        for row in more:
            shown = [row.get(column, "") for column in COLUMNS[:-2]]
            passed = f"{time.time() - start:4.0f} s"
            print(" | ".join([passed, *filter(None, shown)]), flush=True)
        rows += more
        if arguments.write:
            write_page(arguments.write, rows, cases, section, arguments)
    if failures:
        sys.exit(f"{failures} rows were not measured")


if __name__ == "__main__":
    main()
