"""A run directory: whose settings it holds, which phases are done, on what machine, and lines that stay.

    out = open_run(config)                                         # runs/NAME, or an error that says what differs
    phase("phase 1, annotate", out / "feedback.jsonl", out, work)  # done once, by the first rank; reused from then on

Paper: it says nothing of files. That a run which is stopped goes on is invariant 5 of the design.
"""

from __future__ import annotations

import json
import os
import shutil
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from annotate import InputError, write_rows
from ranks import RANK, RANKS, everyone, say, together
from report import environment, public
from reward_model import timed

_MAY_DIFFER = {"resume", "output_dir", "show_every", "save_every", "keep_checkpoints", "max_skipped", "rank_timeout",
               "micro_batch_size", "rollout_batch_size", "activation_checkpointing", "shard", "concurrency", "base_url",
               "report_to", "price_in", "price_out", "max_usd"}
ROOM_MB = 64        # what a run needs at least for its adapters, checkpoints and rows


def open_run(config) -> Path:
    """Make the run directory, or go on in one that was made with the same settings.

    Raises InputError where it was made with others, must be new (--no_resume), or less than ROOM_MB MB are free.
    """
    out = Path(config.output_dir)
    out.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(out).free >> 20
    if free < ROOM_MB:
        raise InputError(f"{out}: {free} MB are free on this disk, a run needs {ROOM_MB} MB; use another --output_dir")
    kept, now = out / "config.json", public(asdict(config))
    if everyone([kept.exists()])[0]:                 # as the first rank sees it: it makes the file
        if not config.resume:
            raise InputError(f"{out} holds a run already; choose another --output_dir or leave out --no_resume")
        if differences := changed(json.loads(kept.read_text("utf-8")), now):
            raise InputError(f"{out} was made with other settings ({differences}); choose another --output_dir")
    elif RANK == 0:
        write_rows(kept, [now])
    return out


@contextmanager
def forgotten_if_it_fails(out: Path):
    """Around what comes before anything is made: where it fails, the settings in a new directory bind nobody."""
    try:
        yield
    except BaseException:
        if RANK == 0 and [path.name for path in out.iterdir()] == ["config.json"]:
            (out / "config.json").unlink()
        raise


def changed(before: dict, now: dict) -> str:
    """The settings that differ and matter, for people to read; "" where none does."""
    return "; ".join(f"{name} was {str(before.get(name))[:80]}, is {str(value)[:80]}" for name, value in now.items()
                     if before.get(name) != value and name not in _MAY_DIFFER)


def note_machine(out: Path, device):
    """A line of environment.jsonl for every start that has something left to do: command, versions, machine."""
    if RANK == 0 and not (out / "result.json").exists():
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        log(out / "environment.jsonl", environment(RANKS, name))


def phase(title: str, done: Path, out: Path, work, ranks: str = "first"):
    """Do a phase on the first rank or on all, unless its result is there; keep its seconds in phases.jsonl."""
    if everyone([done.exists()])[0]:
        say(f"{title}: reused {done}")
        return
    patient = together(dist.new_group, backend="gloo", timeout=timedelta(days=1))
    seconds: dict[str, float] = {}
    with timed(title, seconds, "--rollout_batch_size or --micro_batch_size, or set --activation_checkpointing"):
        summary = work() if ranks == "all" or RANK == 0 else None
    if RANK == 0:
        log(out / "phases.jsonl", {"phase": title, "seconds": seconds[title], "summary": summary})
        say(f"{title}: {summary} ({seconds[title]:.0f} s)")
    together(dist.barrier, patient)                      # the others may wait hours for the annotation


def log(path: Path, row: dict):
    """Append one JSON line that stays, also where the machine stops."""
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(row, ensure_ascii=False) + "\n")
        file.flush()
        os.fsync(file.fileno())
