"""Ranks, files that survive a kill, checkpoints, and the phases of a run.

    device = start_ranks(minutes=30)             # torchrun starts one process, a rank, per GPU
    rows = gather_rows([work(row) for row in rows[RANK::WORLD_SIZE]])
    save_checkpoint("run/checkpoint-20", tensors, {"iteration": 20})

Under torchrun each process is one rank, with its own GPU. Without torchrun, the only process is
rank 0 of 1. Files are written completely or not at all, and loading one never runs code from
it. Each phase of Algorithm 1 runs once per run directory.

The paper does not describe any of this.
"""

import importlib
import json
import math
import os
import resource
import shlex
import shutil
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from tqdm import tqdm

from data import (InputError, ModelError, append_row, changed_files, checksum, lock, public,
                  read_rows, whole_rows, write_rows)

# ── Ranks: the processes that torchrun starts, one per GPU

RANK = int(os.environ.get("RANK", 0))                # torchrun sets RANK and WORLD_SIZE
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))


def find_device() -> torch.device:
    """This rank's GPU, or the CPU. torch warns if it cannot use an existing GPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    return torch.device("cpu")


def start_ranks(minutes: float) -> torch.device:
    """Join the other ranks, if any, and return this rank's device.

    minutes: how long a rank waits for the others.
    """
    is_complete = WORLD_SIZE == 1 or "MASTER_ADDR" in os.environ
    if RANK >= WORLD_SIZE or not is_complete:
        raise InputError(f"RANK={RANK} and WORLD_SIZE={WORLD_SIZE} are set without torchrun; "
                         f"unset them, or use torchrun")
    device = find_device()
    backend = "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"               # gather_rows uses the first of them
    if WORLD_SIZE > 1:
        dist.init_process_group(backend, timeout=timedelta(minutes=minutes))
    return device


def run_collective(collective, *args, **options):
    """Run a collective operation of torch.distributed; with one rank, do nothing.

    Raises InputError where another rank has ended or is late. On CUDA only `gather_rows` raises
    it, because NCCL ends a process that waits too long.
    """
    try:
        return collective(*args, **options) if WORLD_SIZE > 1 else None
    except RuntimeError as error:
        raise InputError(f"rank {RANK} lost another rank, or waited --rank_timeout for it "
                         f"({error}); find the cause in the first error of any rank, then run "
                         f"the same command to continue from the last checkpoint") from error


def gather_rows(share: list) -> list:
    """The lists of all ranks as one list, in the order of the rows before the split.

    Each rank's list belongs to rows[RANK::WORLD_SIZE].
    """
    shares = [share] * WORLD_SIZE
    run_collective(dist.all_gather_object, shares, share)
    rows = [None] * sum(map(len, shares))
    for rank, rank_share in enumerate(shares):
        rows[rank::WORLD_SIZE] = rank_share
    return rows


def all_sum(x: Tensor) -> Tensor:
    """Sum a tensor of any shape over all ranks, in place."""
    run_collective(dist.all_reduce, x)
    return x


def check_ranks(state):
    """Raise InputError where the ranks differ in `state`: settings, rows, hashes or paths."""
    if len(set(gather_rows([checksum(state=state)]))) > 1:
        raise InputError("the ranks have different settings, rows, models, adapters or "
                         "checkpoints; give all nodes the same files and flags, and an output "
                         "directory that they share")


def peak_memory() -> float:
    """Peak memory of this process so far in GB: on its GPU, or in main memory without one."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 1e9
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9


def print_rank0(text: str):
    """Print on rank 0 only, without breaking a progress bar."""
    if RANK == 0:
        tqdm.write(text)


# ── Files that are complete or absent

@contextmanager
def atomic_directory(directory):
    """Write into a temporary directory beside `directory`; it is renamed once it is on disk."""
    directory = Path(directory)
    new = directory.with_name(f".{directory.name}.new")
    old = directory.with_name(f".{directory.name}.old")
    shutil.rmtree(new, ignore_errors=True)           # from a killed run
    new.mkdir(parents=True)
    try:
        yield new
        for path in (*new.iterdir(), new):
            _sync(path)
        if directory.exists():
            shutil.rmtree(old, ignore_errors=True)
            directory.rename(old)
        new.rename(directory)
        _sync(directory.parent)                      # the new name also survives a power cut
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(new, ignore_errors=True)


def _sync(path: Path):
    """Write a file or a directory from the system's cache to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def find_files(directory, *names: str) -> list[Path]:
    """Paths of these files of an adapter or a checkpoint.

    Raises ModelError where one is missing.
    """
    paths = [Path(directory) / name for name in names]
    for path in paths:
        if not path.is_file():
            raise ModelError(f"{directory} holds no {path.name}; restore the file, or choose "
                             f"another directory")
    return paths


def read_json(path: Path) -> dict:
    """The JSON object in a file. Raises ModelError where the file is damaged."""
    try:
        return dict(json.loads(path.read_text("utf-8")))
    except (ValueError, TypeError) as error:
        raise ModelError(f"{path} is damaged: it is not a JSON object ({error}); restore the "
                         f"file, or remove its directory") from error


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """A safetensors file as (name → tensor of any shape, metadata).

    Raises ModelError where the file is damaged.
    """
    try:
        with safe_open(path, "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}
    except SafetensorError as error:
        raise ModelError(f"{path} is damaged ({error}); restore the file, or remove its "
                         f"directory") from error


# ── Checkpoints

def save_checkpoint(directory, tensors: dict[str, Tensor], state: dict):
    """Write tensors of any shape and a JSON state to a directory, completely or not at all."""
    copies = {name: x.cpu().contiguous().clone() for name, x in tensors.items()}
    with atomic_directory(directory) as temporary:
        path = temporary / "tensors.safetensors"
        save_file(copies, path)
        saved_state = state | {"sha256": checksum(path, state=state)}
        (temporary / "state.json").write_text(json.dumps(saved_state))


def load_checkpoint(directory) -> tuple[dict[str, Tensor], dict]:
    """A checkpoint as (tensors of any shape, state).

    Raises ModelError where a file is missing or a single bit has changed.
    """
    path, state_path = find_files(directory, "tensors.safetensors", "state.json")
    state = read_json(state_path)
    state.pop("sha256", None)
    # The text is compared, because a flipped bit may not change the JSON value: 1e-5 is 1E-5.
    if state_path.read_text() != json.dumps(state | {"sha256": checksum(path, state=state)}):
        raise ModelError(f"{path} is damaged: its sha256 is not the one in state.json; remove "
                         f"the checkpoint")
    return read_tensors(path)[0], state


def checkpoints(run: Path) -> list[Path]:
    """The checkpoints of a run directory, oldest first."""
    paths = {path.name.removeprefix("checkpoint-"): path for path in run.glob("checkpoint-*")}
    return [paths[n] for n in sorted(filter(str.isdecimal, paths), key=int)]


def keep_checkpoint(run: Path, optimizer, state: dict, previous: Path | None) -> Path:
    """Write checkpoint-N after iteration N and return its path.

    All other checkpoints are deleted, even damaged ones, except `previous`: the last that this
    process wrote or resumed from. Raises ModelError where the disk does not take the file.
    """
    path = run / f"checkpoint-{state['iteration']}"
    if RANK > 0:
        return path
    try:
        save_checkpoint(path, optimizer_tensors(optimizer), state | {"ranks": WORLD_SIZE})
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path} could not be written ({error}); free some disk space and run "
                         f"the same command to continue from {previous or 'the start'}"
                         ) from error
    for old in {*checkpoints(run)} - {path, previous}:
        shutil.rmtree(old)
    return path


def newest_checkpoint(run: Path) -> tuple[Path | None, dict[str, Tensor], dict]:
    """The newest undamaged checkpoint as (path, tensors of any shape, state).

    (None, {}, {}) if there is none. Prints a warning for each damaged checkpoint.
    """
    checkpoint = None, {}, {}
    for path in reversed(checkpoints(run)):
        try:
            checkpoint = path, *load_checkpoint(path)
            break
        except (ModelError, OSError) as error:
            print_rank0(f"warning: skipping {path} ({error})")
    path, _, state = checkpoint
    check_ranks(str(path))
    ranks = state.get("ranks", WORLD_SIZE)
    if ranks != WORLD_SIZE:
        print_rank0(f"warning: the results are no longer bit-exact, because {ranks} ranks "
                    f"wrote {path} and {WORLD_SIZE} continue")
    return checkpoint


def optimizer_parameters(optimizer) -> list[nn.Parameter]:
    """All parameters that an optimizer trains, of any shape, in a fixed order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def optimizer_tensors(optimizer) -> dict[str, Tensor]:
    """All parameters, of any shape, and their moments, for a checkpoint."""
    tensors = {}
    for i, parameter in enumerate(optimizer_parameters(optimizer)):
        tensors[f"{i}.parameter"] = parameter.data
        for name, moment in optimizer.state[parameter].items():
            tensors[f"{i}.{name}"] = moment
    return tensors


def resume(run: Path, optimizer, made_of: str | None = None) -> tuple[Path | None, dict]:
    """Restore parameters and moments from the newest checkpoint; return its path and state.

    made_of: the hash in the state. Without a checkpoint of this hash, the result is (None, {}).
    """
    path, tensors, state = newest_checkpoint(run)
    if path is None or state.get("made_of") != made_of:
        return None, {}
    parameters = optimizer_parameters(optimizer)
    for key, tensor in tensors.items():                      # of `optimizer_tensors`
        i, name = key.split(".")
        parameter = parameters[int(i)]
        if name == "parameter":
            parameter.data.copy_(tensor)
        else:
            optimizer.state[parameter][name] = tensor.to(parameter.device)
    print_rank0(f"resumed after iteration {state['iteration']} from {path}")
    return path, state


LOGS = "metrics.jsonl", "samples.jsonl"


def hash_files(directory: Path, patterns=LOGS) -> dict[str, str]:
    """{file: sha256} of the files with these names, by default the logs of phase 3."""
    return {str(path.relative_to(directory)): checksum(path)
            for pattern in patterns for path in sorted(directory.glob(pattern))}


def cut_logs(run: Path, state: dict):
    """Remove the lines after the checkpoint with this state from both logs.

    A log whose other lines have changed since the checkpoint is emptied, with a warning.
    """
    done = state.get("iteration", 0)
    for name in LOGS:
        file = run / name
        rows = [row for row in whole_rows(file) if row.get("iteration", math.inf) <= done]
        write_rows(file, rows)
        expected = state.get("logs", {}).get(name)     # None: written by the third version
        if len(rows) < done or expected not in (None, checksum(file)):
            print_rank0(f"warning: {file} has changed since the checkpoint after iteration "
                        f"{done}; its lines up to there are left out")
            write_rows(file, [])


def lock_directory(directory: Path):
    """Create a directory and lock it, so that it has one writer; the lock file is returned.

    The lock lasts until that file is closed. Raises InputError where another process has it.
    """
    directory.mkdir(parents=True, exist_ok=True)
    file = open(directory / ".lock", "a")
    if RANK == 0:
        lock(file, directory)
    return file


# ── A run directory: its settings and its phases

# The settings of text2grad.py, and the results of a run that depend on them. A result binds its
# settings when a run continues. The last row may change: weights and texts do not depend on it,
# except for dropout masks, which phase 2 draws for each micro-batch.
POLICY = ["result.json", "checkpoint-*"]
REWARD_MODEL = ["reward/metrics.json", *POLICY]
SETTINGS = [
    ("task, model, adapter, data, seed, temperature, dtype, eval_rows, annotated_rows, "
     "annotated_responses_per_prompt, max_prompt_tokens, max_new_tokens, max_critique_tokens",
     ["responses.jsonl", "feedback.jsonl", *REWARD_MODEL]),
    ("annotator_model, annotator_function, mode", ["feedback.jsonl", "reward/metrics.json"]),
    ("reward_learning_rate, reward_epochs, reward_lora_targets", REWARD_MODEL),
    ("reward_model, critic, critic of phase 3, iterations, learning_rate, batch_size, "
     "responses_per_prompt, kl_coef, kl_target, kl_horizon, gamma, lam, ppo_epochs, "
     "minibatch_size, schedule, clip, value_learning_rate, value_clip, value_coef, "
     "value_target, entropy_coef, lora_r, lora_alpha, lora_targets", POLICY),
    ("output_dir, base_url, price_in, price_out, max_usd, concurrency, micro_batch_size, "
     "rollout_batch_size, activation_checkpointing, shard, rank_timeout, save_every, "
     "probe_rows, wandb, allow_code_execution, allow_weak_reward_model", []),
]
CHANGEABLE = set(SETTINGS[-1][0].split(", "))
HASH = "sha256 of --"                     # prefix of a flag whose file has this hash


def result_exists(path: Path) -> bool:
    """Whether a phase has written this file. A file that a power cut left empty is none."""
    return path.exists() and path.stat().st_size > 0


def run_settings(config) -> dict:
    """The settings for config.json: flags without passwords, and hashes of named files."""
    settings = asdict(config)
    if config.base_url:
        settings["base_url"] = public(config.base_url)
    for name in ("data", "reward_model", "adapter"):
        path = getattr(config, name)
        if path:
            files = sorted(Path(path).glob("adapter_*")) or [path]
            settings[HASH + name] = checksum(*files)[:16]
    return settings


def bound_settings(run: Path) -> set[str]:
    """The settings, and the hashes of named files, that the results of a run depend on."""
    bound = set()
    for names, results in SETTINGS:
        if any(result_exists(path) for pattern in results for path in run.glob(pattern)):
            bound |= {f"{prefix}{name}" for name in names.split(", ") for prefix in ("", HASH)}
    return bound


def check_settings(settings: dict, saved: dict, bound: set[str], place: Path, remedy: str):
    """Raise InputError where a bound setting is not the one that `place` was made with."""
    changes = [f"{name} was {saved[name]}, is {value}" for name, value in settings.items()
               if name in bound and saved.get(name, value) != value]
    if changes:
        raise InputError(f"{place} was made with other settings ({'; '.join(changes)}); "
                         f"{remedy}")


def versions() -> dict[str, str]:
    """The versions of torch and transformers, and the git commit of this project, if any."""
    git = f"git -C {shlex.quote(str(Path(__file__).parent))} describe --always --dirty"
    return {"torch": torch.__version__, "transformers": version("transformers"),
            "commit": subprocess.getoutput(f"{git} 2>/dev/null")}


def save_settings(config, directory: Path, critic=None):
    """Write config.json. Raises InputError where existing results have other settings.

    critic: name of the critic of phase 3.
    """
    path = directory / "config.json"
    settings = run_settings(config) | {"critic of phase 3": critic} | versions()
    saved = read_rows(path)[0] if path.exists() else {}
    check_settings(settings, saved, bound_settings(directory), directory,
                   f"choose another --output_dir{reward_model_hint(config, directory)}")
    if RANK == 0:
        write_rows(path, [settings])
        # This removes an incomplete last line, which a killed run may have left.
        write_rows(directory / "phases.jsonl", whole_rows(directory / "phases.jsonl"))


def reward_model_hint(config, directory: Path) -> str:
    """The flag that reuses the R_φ of this run in another run; "" without an R_φ."""
    adapter = Path(config.reward_model or directory / "reward" / "adapter")
    return f", with --reward_model {adapter}" if adapter.exists() else ""


def on_rank0(function, *args):
    """Run a function on rank 0 and return its result; other ranks wait up to a day for None."""
    group = run_collective(dist.new_group, backend="gloo", timeout=timedelta(days=1))
    result = function(*args) if RANK == 0 else None
    run_collective(dist.barrier, group)
    return result


# Result of a phase → the files that the phase writes, whose hashes phases.jsonl stores.
FILES_WRITTEN = {
    "responses.jsonl": ["responses.jsonl"],
    "feedback.jsonl": ["feedback.jsonl"],
    "reward/metrics.json": ["reward/*.json*", "reward/adapter/*"],
    "result.json": ["result.json", "*samples.jsonl", "metrics.jsonl", "value_head.safetensors",
                    "policy/*"],
}


def run_phase(name: str, result: str, directory: Path, function, checkpoint_directory=None):
    """Run a phase, unless its result exists and its files are unchanged.

    function() returns a summary. phases.jsonl stores it with the hashes of the files that the
    phase wrote. If files are missing or damaged and a checkpoint exists, the phase runs again
    from it. Raises InputError where there is none.
    """
    path = directory / result
    changed = None                                    # the result does not exist
    if RANK == 0 and result_exists(path):
        changed = changed_files(directory, result)
    changed = gather_rows([changed])[0]
    if changed == []:
        print_rank0(f"{name}: reused {path}")
        return
    if changed:
        problem = f"{directory / changed[0]} is missing or has changed since {name} ended"
        if not (checkpoint_directory and checkpoints(checkpoint_directory)):
            raise InputError(f"{problem}; restore it, or remove {path} to repeat the phase")
        print_rank0(f"warning: {problem}; repeating the end of the phase")
    start = time.time()
    summary = function()
    if RANK == 0:
        row = {"phase": name, "ended": time.strftime("%Y-%m-%d %H:%M"),
               "seconds": time.time() - start, "GB": peak_memory(), "summary": summary,
               "result": result,
               "sha256": hash_files(directory, FILES_WRITTEN[result])}
        append_row(directory / "phases.jsonl", row)
        print_rank0(f"{name}: {summary} ({row['seconds']:.0f} s, {row['GB']:.1f} GB)")


# ── Metrics of a run

def forecast_minutes(steps: tqdm, name: str):
    """Yield the steps of a phase; after a tenth of them, print when the last one will end.

    It goes to stderr, as progress bars do.
    """
    start = time.time()
    count = max(1, len(steps) // 10)
    for number, step in enumerate(steps, 1):
        yield step
        seconds = (time.time() - start) / number * (len(steps) - number)
        if number == count and seconds > 30 and RANK == 0:
            tqdm.write(f"{name}: ends in about {seconds / 60:.1f} min", sys.stderr)


class Timer:
    """Seconds that each part of an iteration takes (Table 13)."""

    def __init__(self):
        self.start = time.time()
        self.seconds = {}

    def lap(self, name: str):
        """Store the seconds since the last lap under a name."""
        end = time.time()
        self.seconds[f"seconds_{name}"] = end - self.start
        self.start = end


def write_metrics(metrics: dict, sample: dict, config, out: Path):
    """One line in metrics.jsonl and one in samples.jsonl; the metrics also go to wandb."""
    iteration = metrics["iteration"]
    append_row(out / "metrics.jsonl", metrics)
    append_row(out / "samples.jsonl", {"iteration": iteration, **sample})
    if config.wandb:
        wandb = importlib.import_module("wandb")
        if wandb.run is None:
            wandb.init(project=config.wandb, name=out.name, config=run_settings(config))
        wandb.log(metrics, step=iteration)
