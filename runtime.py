"""Running on one or many GPUs, and files that a killed run leaves whole.

    device = start_ranks(minutes=30)             # torchrun starts one process, a rank, per GPU
    rows = gather_rows([work(row) for row in rows[RANK::WORLD_SIZE]])
    save_checkpoint("run/checkpoint-20", tensors, {"iteration": 20})

Ranks, files that are written whole or not at all, checkpoints, the settings of a run directory,
and the phases of Algorithm 1, each of which runs once. Nothing that is loaded can run code.

Paper: nothing of this.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import resource
import shutil
import sys
import time
import warnings
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from tqdm import tqdm

from data import InputError, ModelError, append_row, public, read_rows, whole_rows, write_rows

# ── Ranks: the processes that torchrun starts, one per GPU

RANK = int(os.environ.get("RANK", 0))                # as torchrun sets them


WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))


CPU_GROUP = None                                     # for `gather_rows`, over gloo


def find_device() -> torch.device:
    """This rank's GPU, else the CPU; prints why a GPU that is there cannot be used."""
    with warnings.catch_warnings(record=True) as problems:
        warnings.simplefilter("always")
        cuda = torch.cuda.is_available()
    for problem in problems:                         # a driver for another version of CUDA
        reason = str(problem.message).split(" (Triggered")[0]
        print_rank0(f"warning: no GPU is used, torch {torch.__version__} is built for CUDA "
            f"{torch.version.cuda}: {' '.join(reason.split())}")
    local = int(os.environ.get("LOCAL_RANK", 0))
    return torch.device("cuda", local) if cuda else torch.device("cpu")


def start_ranks(minutes: float) -> torch.device:
    """Join the other ranks, if any; this one's device. minutes: how long ranks wait."""
    global CPU_GROUP
    device = find_device()
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.set_device(device)
    if WORLD_SIZE > 1:
        wait = timedelta(minutes=minutes)
        dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=wait)
        CPU_GROUP = dist.new_group(backend="gloo", timeout=wait)
    return device


def run_collective(collective, *args, **options):
    """What all ranks do at once, where there are several. InputError where one is gone or late.

    On CUDA this holds for `gather_rows` alone: NCCL ends a process that waits too long.
    """
    try:
        return collective(*args, **options) if WORLD_SIZE > 1 else None
    except RuntimeError as error:
        raise InputError(f"rank {RANK} lost another rank, or waited --rank_timeout for it "
                         f"({error}); the first error says why, and the same command goes on "
                         f"from the last checkpoint") from error


def gather_rows(share: list) -> list:
    """The lists of all ranks as one list; it undoes rows[RANK::WORLD_SIZE]."""
    if WORLD_SIZE == 1:
        return share
    shares = [share] * WORLD_SIZE
    run_collective(dist.all_gather_object, shares, share, group=CPU_GROUP)
    rows = [None] * sum(map(len, shares))
    for rank, part in enumerate(shares):
        rows[rank::WORLD_SIZE] = part
    return rows


def all_sum(x: Tensor) -> Tensor:
    """The sum of a tensor of any shape over all ranks, in place where there are several."""
    run_collective(dist.all_reduce, x)
    return x


def peak_memory() -> float:
    """GB that this process has held at most so far: of its GPU, else of main memory."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 1e9
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9


def print_rank0(text: str):
    """Print from the first rank only, past any progress bar."""
    if RANK == 0:
        tqdm.write(text)


# ── Files that are whole or absent

@contextmanager
def atomic_directory(directory):
    """Write into a temporary neighbour, which becomes `directory` when it is on the disk."""
    directory = Path(directory)
    new, old = (directory.with_name(f".{directory.name}.{kind}-{os.getpid()}")
                for kind in ("new", "old"))
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    try:
        yield new
        for path in (*new.iterdir(), new):
            _sync(path)
        if directory.exists():
            shutil.rmtree(old, ignore_errors=True)   # of a killed run with this process id
            directory.rename(old)
        new.rename(directory)
        _sync(directory.parent)                      # the new name, too, survives a power cut
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(new, ignore_errors=True)


def _sync(path: Path):
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def find_files(directory, *names: str) -> list[Path]:
    """Files of an adapter or a checkpoint. Raises ModelError where one is lost."""
    paths = [Path(directory) / name for name in names]
    if lost := [path.name for path in paths if not path.is_file()]:
        raise ModelError(f"{directory} holds no {lost[0]}, and cannot be used without it")
    return paths


def read_json(path: Path) -> dict:
    """The JSON object in a file. Raises ModelError where it is damaged."""
    try:
        return dict(json.loads(path.read_text("utf-8")))
    except (ValueError, TypeError) as error:
        raise ModelError(f"{path} is no JSON object ({error}); the file is damaged") from error


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """(name → tensor of any shape, metadata) of a safetensors file, or ModelError."""
    try:
        with safe_open(path, "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}
    except SafetensorError as error:
        raise ModelError(f"{path} is damaged ({error})") from error


def checksum(*paths: Path, state=None) -> str:
    """sha256 of files and of a JSON value."""
    total = hashlib.sha256(json.dumps(state).encode())
    for path in paths:
        with open(path, "rb") as file:
            total.update(hashlib.file_digest(file, "sha256").digest())
    return total.hexdigest()


# ── Checkpoints

def save_checkpoint(directory, tensors: dict[str, Tensor], state: dict):
    """Write tensors of any shape and a JSON state to one directory, whole or not at all."""
    plain = {name: x.detach().cpu().contiguous().clone() for name, x in tensors.items()}
    with atomic_directory(directory) as temporary:
        path = temporary / "tensors.safetensors"
        save_file(plain, path)
        checked = {**state, "sha256": checksum(path, state=state)}
        (temporary / "state.json").write_text(json.dumps(checked))


def load_checkpoint(directory) -> tuple[dict[str, Tensor], dict]:
    """(tensors of any shape, state), or ModelError where a file is lost or one bit damaged."""
    path, state_path = find_files(directory, "tensors.safetensors", "state.json")
    state = read_json(state_path)
    state.pop("sha256", None)
    # The text, for a flip may leave the JSON as it was: 1e-5 is 1E-5.
    if state_path.read_text() != json.dumps({**state, "sha256": checksum(path, state=state)}):
        raise ModelError(f"{path} is damaged: its sha256 is not the one in state.json")
    return read_tensors(path)[0], state


def checkpoints(run: Path) -> list[Path]:
    """The checkpoints of a run directory, oldest first."""
    number = re.compile(r"checkpoint-(\d+)").fullmatch
    found = [path for path in run.glob("checkpoint-*") if number(path.name)]
    return sorted(found, key=lambda path: int(number(path.name)[1]))


def keep_checkpoint(run: Path, optimizer, state: dict, every: int, start: int, last: int):
    """Write checkpoint-N of the N-th iteration: of every so many, and of the last.

    Once it is whole, only the one before stays with it, which this process has written or taken
    up at `start`: what is damaged goes. Raises ModelError where the disk does not take it.
    """
    n = state["iteration"]
    if RANK > 0 or n % every and n < last:
        return
    former, tensors = max(start, (n - 1) // every * every), optimizer_tensors(optimizer)
    path, good = (run / f"checkpoint-{number}" for number in (n, former))
    try:
        save_checkpoint(path, tensors, {**state, "ranks": WORLD_SIZE})
    except (OSError, SafetensorError) as error:
        need = sum(x.nbytes for x in tensors.values()) / 1e6
        raise ModelError(f"{path} could not be written ({error}): it needs {need:.1f} MB; "
                         f"the same command goes on from iteration {former}") from error
    killed = run.glob(".checkpoint-*")
    for old in {*checkpoints(run), *killed} - {path, good}:
        shutil.rmtree(old)


def newest_checkpoint(run: Path) -> tuple[Path | None, dict[str, Tensor], dict]:
    """(path, tensors of any shape, state) of the newest that is whole; says which are not."""
    found = None, {}, {}
    for path in reversed(checkpoints(run)):
        try:
            found = path, *load_checkpoint(path)
            break
        except (ModelError, OSError) as error:
            print_rank0(f"warning: skipping {path} ({error}); using the one before, if any")
    if len(set(gather_rows([str(found[0])]))) > 1:
        raise InputError(f"{run}: the ranks see different checkpoints; all nodes must share it")
    if (ranks := found[2].get("ranks", WORLD_SIZE)) != WORLD_SIZE:
        print_rank0(f"not bit-exact from here on: {ranks} ranks summed in another order")
    return found


def optimizer_parameters(optimizer) -> list[nn.Parameter]:
    """All that an optimizer trains, of any shape, in a fixed order."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def optimizer_tensors(optimizer) -> dict[str, Tensor]:
    """Every parameter, of any shape, and its moments, for a checkpoint."""
    return {f"{i}.{name}": x for i, p in enumerate(optimizer_parameters(optimizer))
            for name, x in {"parameter": p.data, **optimizer.state[p]}.items()}


def restore_optimizer(optimizer, tensors: dict[str, Tensor]):
    """Put back what `optimizer_tensors` gave; parameters and moments keep any shape."""
    parameters = optimizer_parameters(optimizer)
    for key, x in tensors.items():
        i, name = key.split(".")
        p = parameters[int(i)]
        if name == "parameter":
            p.data.copy_(x)
        else:
            optimizer.state[p][name] = x.to(p.device)


def lock_directory(directory: Path):
    """A directory has one writer: the lock lasts as long as the file that is returned."""
    directory.mkdir(parents=True, exist_ok=True)
    file = open(directory / ".lock", "a")
    try:
        if RANK == 0:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise InputError(f"{directory}: another process is writing to it; wait for it, or "
                         f"choose another directory") from error
    return file


# ── A run directory: its settings and its phases

# Settings that a run may change when it continues. Neither weights nor texts depend on them,
# except for the dropout masks, which phase 2 draws for each micro-batch.
CHANGEABLE = {"output_dir", "base_url", "price_in", "price_out", "max_usd", "micro_batch_size",
              "rollout_batch_size", "activation_checkpointing", "shard", "rank_timeout",
              "save_every", "probe_rows", "wandb", "allow_code_execution"}
SAMPLING = {"task", "model", "adapter", "data", "seed", "temperature", "dtype", "eval_rows",
            "annotated_rows", "max_prompt_tokens", "max_new_tokens", "max_critique_tokens",
            "sha256 of --data", "sha256 of --adapter"}
ANNOTATION = {"annotator_model", "annotator_function", "mode"}
# Results of a phase → the settings that the phase reads. None: all that are not changeable and
# not phase 1's alone.
SETTINGS_READ = {
    "responses.jsonl": SAMPLING,
    "feedback.jsonl": SAMPLING | ANNOTATION,
    "reward/metrics.json": SAMPLING | ANNOTATION,
    "result.json": None,
    "checkpoint-*": None,
}


def result_exists(path: Path) -> bool:
    """Whether a phase has written this file. A power cut may leave an empty one: no result."""
    return path.exists() and path.stat().st_size > 0


def run_settings(config) -> dict:
    """The flags without passwords, and hashes of the files that they name: for config.json."""
    settings = asdict(config)
    if config.base_url:
        settings["base_url"] = public(config.base_url)
    for name in ("data", "reward_model", "adapter"):
        path = getattr(config, name)
        if path:
            files = sorted(Path(path).glob("adapter_*")) or [path]
            settings[f"sha256 of --{name}"] = checksum(*files)[:16]
    return settings


def bound_settings(directory: Path, names: set[str]) -> set[str]:
    """The settings that the results in a run directory depend on."""
    bound = set()
    for pattern, settings in SETTINGS_READ.items():
        if any(result_exists(path) for path in directory.glob(pattern)):
            bound |= names - CHANGEABLE - ANNOTATION if settings is None else settings
    return bound


def save_settings(config, directory: Path):
    """Write config.json. Raises InputError where other settings made the results there."""
    path = directory / "config.json"
    settings = run_settings(config)
    saved = settings | (read_rows(path)[0] if path.exists() else {})
    bound = bound_settings(directory, settings.keys())
    changes = [f"{name} was {saved[name]}, is {value}" for name, value in settings.items()
               if name in bound and saved[name] != value]
    if changes:
        raise InputError(f"{directory} was made with other settings ({'; '.join(changes)}); "
                         f"choose another --output_dir{reward_model_hint(config, directory)}")
    if RANK == 0:
        write_rows(path, [settings])
        write_rows(directory / "phases.jsonl", whole_rows(directory / "phases.jsonl"))


def reward_model_hint(config, directory: Path) -> str:
    """How another run can use the R_φ of this one, if there is one."""
    adapter = Path(config.reward_model or directory / "reward" / "adapter")
    return f", with --reward_model {adapter}" if adapter.exists() else ""


def on_rank0(function, *args):
    """The function's result on rank 0, None elsewhere. The other ranks wait up to a day."""
    group = run_collective(dist.new_group, backend="gloo", timeout=timedelta(days=1))
    result = function(*args) if RANK == 0 else None
    run_collective(dist.barrier, group)
    return result


def run_phase(name: str, result: str, directory: Path, function):
    """Run a phase unless its result exists.

    function() returns a summary, which phases.jsonl keeps with the seconds and the peak memory.
    """
    path = directory / result
    if gather_rows([result_exists(path)])[0]:
        print_rank0(f"{name}: reused {path}")
        return
    start = time.time()
    summary = function()
    if RANK == 0:
        row = {"phase": name, "seconds": time.time() - start, "GB": peak_memory(),
               "summary": summary}
        append_row(directory / "phases.jsonl", row)
        print_rank0(f"{name}: {summary} ({row['seconds']:.0f} s, {row['GB']:.1f} GB)")
