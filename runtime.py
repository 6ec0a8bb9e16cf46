"""Ranks, tensors on disk, checkpoints, and the phases of a run.

    device = start_ranks()                       # torchrun starts one process, a rank, per GPU
    rows = gather_rows([work(row) for row in rank_share(rows)])
    for step in checkpointed(100, optimizer, {}, Path("run"), "fit"):
        …                                        # a new run continues from the last checkpoint

Under torchrun each process is one rank, with its own GPU if there are GPUs. Without torchrun,
the only process is rank 0 of 1. Files are written completely or not at all, except logs, to
which lines are appended. Loading a file does not run code from it. A phase of Algorithm 1 that
is finished is not run again in the same run directory.

The paper does not describe any of this.
"""

import hashlib
import json
import math
import os
import time
from dataclasses import asdict
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn
from tqdm import tqdm

from data import (InputError, append_row, atomic_file, checksum, chunks, git, lock,
                  read_rows, read_log, write_rows)

# ── Ranks: the processes that torchrun starts, one per GPU

RANK = int(os.environ.get("RANK", 0))                # torchrun sets RANK and WORLD_SIZE
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))
TIMEOUT = timedelta(minutes=30)                      # of a collective operation
ANNOTATION_TIMEOUT = timedelta(days=1)               # of waiting for rank 0 in `run_phase`


def find_device() -> torch.device:
    """This rank's GPU, or the CPU. torch warns if it cannot use an existing GPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    return torch.device("cpu")


def start_ranks() -> torch.device:
    """Join the group of all ranks, if there are several, and return this rank's device."""
    device = find_device()
    backend = "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"               # gather_rows uses gloo, all_sum nccl
    if WORLD_SIZE > 1:
        dist.init_process_group(backend, timeout=TIMEOUT)
    return device


def stop_ranks():
    """Leave the group of all ranks, if there are several."""
    run_collective(dist.destroy_process_group)


def run_collective(collective, *args, **options):
    """Run a collective operation of torch.distributed; with one rank, do nothing.

    Raises InputError if another rank has ended or is late. With NCCL (`all_sum` on CUDA), a
    process that waits too long is ended instead.
    """
    try:
        return collective(*args, **options) if WORLD_SIZE > 1 else None
    except RuntimeError as error:
        raise InputError(f"rank {RANK} lost another rank, or waited too long ({error}); find "
                         f"the first error of any rank, then run the same command to continue"
                         ) from error


def rank_share(rows):
    """This rank's part of a list, a range or a Tensor of any shape: every WORLD_SIZE-th row."""
    return rows[RANK::WORLD_SIZE]


def gather_rows(share: list) -> list:
    """Gather the lists of all ranks into one list, which each rank gets.

    It has the order that the rows had before `rank_share`.
    """
    shares = [share] * WORLD_SIZE
    run_collective(dist.all_gather_object, shares, share)
    rows = [None] * sum(map(len, shares))
    for rank in range(WORLD_SIZE):
        rows[rank::WORLD_SIZE] = shares[rank]
    return rows


def from_rank0(value):
    """Rank 0's value, on every rank. The other ranks may pass None."""
    return gather_rows([value])[0]


def all_sum(x: Tensor) -> Tensor:
    """Sum a tensor of any shape over all ranks, in place."""
    run_collective(dist.all_reduce, x)
    return x


def token_groups(index, lengths: list[int], limit: int) -> list[list[int]]:
    """Split rows into micro-batches, here called groups, which are lists of row numbers.

    For each group, each rank runs one forward pass on its `rank_share` of the group. index:
    numbers of the rows. lengths[i]: tokens of row i. Rows of similar length share a group. With
    padding, the share of a rank has at most `limit` tokens, or it is a single row. All ranks
    have equally many passes, as FSDP needs.
    """
    groups = []
    order = sorted(index, key=lengths.__getitem__)
    for rows in chunks(order, WORLD_SIZE):               # one row for each rank
        longest = lengths[rows[-1]]                      # rows are sorted by length
        if groups and (len(groups[-1]) // WORLD_SIZE + 1) * longest <= limit:
            groups[-1] += rows
        else:
            groups.append(rows)
    return groups


def check_ranks(state):
    """Raise InputError if the ranks differ in `state`: settings, rows, hashes or paths."""
    if len(set(gather_rows([checksum(state=state)]))) > 1:
        raise InputError("the ranks have different settings, rows, models or checkpoints; give "
                         "all nodes the same files and flags, and one output directory")


def check_batches(config):
    """Raise InputError if the ranks cannot share each batch equally.

    A batch must also hold all --responses_per_prompt rollouts of each of its prompts. config: a
    settings.PolicyConfig.
    """
    unit = math.lcm(WORLD_SIZE, config.responses_per_prompt)
    if config.batch_size % unit or config.minibatch_size % WORLD_SIZE:
        message = f"--batch_size must be a multiple of {unit}"
        if WORLD_SIZE > 1:
            message = (f"ranks share each batch equally: {message}, and --minibatch_size of "
                       f"{WORLD_SIZE}")
        raise InputError(message)


def print_rank0(text: str | None):
    """Print on rank 0 only, without breaking a progress bar. None and "" print nothing."""
    if RANK == 0 and text:
        tqdm.write(text)


# ── Tensors on disk

def _digest(tensors: dict[str, Tensor], text: str) -> str:
    """The sha256 of tensors of any shape, their names and types, and a text."""
    return hashlib.sha256(save(tensors) + text.encode()).hexdigest()


def save_tensors(path, tensors: dict[str, Tensor], state: dict):
    """Write tensors of any shape and a JSON state to one safetensors file, atomically.

    The state and the sha256 are in one metadata entry. safetensors writes several entries in
    random order, and then equal runs would not write equal files.
    """
    copies = {name: x.detach().cpu().contiguous() for name, x in tensors.items()}
    text = json.dumps(state)
    with atomic_file(path) as temporary:
        temporary.write_bytes(save(copies, {"state": f"{_digest(copies, text)} {text}"}))


def load_tensors(path) -> tuple[dict[str, Tensor], dict]:
    """A safetensors file as (tensors of any shape, state).

    The state is {} if another program wrote the file. Raises InputError if the file is missing
    or cannot be read, or if `save_tensors` wrote it and even a single bit has changed.
    """
    try:
        with safe_open(path, "pt") as file:
            # Tensors are copied: Windows cannot replace a file while it is mapped to memory.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}
            metadata = file.metadata() or {}
        digest, _, text = metadata.get("state", "").partition(" ")
        is_foreign = not metadata or "format" in metadata        # as PEFT writes it
        if not is_foreign and digest != _digest(tensors, text):
            raise ValueError("its sha256 is not the one in its metadata")
        return tensors, json.loads(text or "{}")
    except (SafetensorError, OSError, ValueError) as error:
        raise InputError(f"{path} is missing or damaged ({error}); restore it, or remove it to "
                         f"start anew") from error


# ── Checkpoints

def checkpoints(run: Path) -> list[Path]:
    """The checkpoints of a run directory, oldest first."""
    return sorted(run.glob("checkpoint-*.safetensors"))


def optimizer_parameters(optimizer) -> list[nn.Parameter]:
    """All parameters that an optimizer trains, of any shape, in a fixed order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def optimizer_tensors(optimizer) -> dict[str, Tensor]:
    """All parameters, of any shape, and their moments, for a checkpoint."""
    return {f"{i}.{name}": tensor for i, x in enumerate(optimizer_parameters(optimizer))
            for name, tensor in {"parameter": x.data, **optimizer.state[x]}.items()}


def resume(run: Path, optimizer, state: dict):
    """Restore parameters, moments and state from the newest undamaged checkpoint, if any.

    `made_of` is a checksum of the training pairs; phase 3 has none. A checkpoint with another
    `made_of` was made of other pairs, so it is not used.
    """
    for path in reversed(checkpoints(run)):
        try:
            tensors, saved = load_tensors(path)
        except InputError as error:
            print_rank0(f"skipping a checkpoint: {error}")
            continue
        if saved.get("made_of") == state.get("made_of"):
            break
    else:
        path = None
    check_ranks(str(path))
    if path is None:
        return
    parameters = optimizer_parameters(optimizer)
    for key, tensor in tensors.items():                      # of `optimizer_tensors`
        i, name = key.split(".")
        parameter = parameters[int(i)]
        if name == "parameter":
            parameter.data.copy_(tensor)
        else:
            optimizer.state[parameter][name] = tensor.to(parameter.device)
    state.update(saved)
    print_rank0(f"resumed after step {state['step']} from {path}")


def checkpointed(count: int, optimizer, state: dict, run: Path | None, name: str, every=1):
    """Yield the steps that are left, with a progress bar, and save checkpoints between them.

    A checkpoint holds the optimizer's parameters, their moments, and `state`, a dict that the
    caller fills. Before the first step, all three are read from the newest usable checkpoint in
    `run`. Rows of later steps are removed from the logs. The two newest checkpoints are kept.
    every: steps between two checkpoints; there is one after the last step, too. run: None for
    no checkpoints. The bar shows state["shown"], a dict of numbers.
    """
    if run:
        resume(run, optimizer, state)
    start = state.setdefault("step", 0)
    if run and RANK == 0:
        state |= {"binds": row.get("binds") for row in read_log(run / "config.json")}
        if start == 0:
            for path in checkpoints(run):                # damaged, or of other rows
                path.unlink()
        for log in filter(Path.exists, [run / "metrics.jsonl", run / "samples.jsonl"]):
            write_rows(log, [row for row in read_log(log, lambda row: row["iteration"] + 1)
                             if row["iteration"] <= start])
    bar = tqdm(range(start, count), name, count, initial=start, disable=RANK > 0)
    for step in bar:
        yield step
        bar.set_postfix(state.get("shown", {}))
        done = step + 1
        state["step"] = done
        is_due = done % every == 0 or done == count
        if run and is_due and RANK == 0:
            save_tensors(run / f"checkpoint-{done:06d}.safetensors",
                         optimizer_tensors(optimizer), state)
            for old in checkpoints(run)[:-2]:
                old.unlink()


# ── A run directory: its settings and its phases

# Settings that may always change. They are not meant to change weights or texts. Some still can
# do so, for example by rounding, by the dropout masks, which phase 2 draws for each forward
# pass, or by the responses that --skip_failed leaves out.
CHANGEABLE = set("""
    output_dir base_url price_in price_out max_usd concurrency timeout skip_failed preview
    micro_batch_tokens decode_batch_size activation_checkpointing shard wandb
    allow_code_execution torch transformers""".split())
# Settings that may change until phase 3 has a checkpoint. The others that begin with "reward_"
# are those of R_φ, and may change until phase 2 has a checkpoint. Every remaining setting must
# stay the same as soon as phase 1 has responses. For another `commit`, there is only a warning.
POLICY_SETTINGS = set("""
    reward_model critic iterations epochs learning_rate value_rate_factor batch_size
    minibatch_size responses_per_prompt kl_coef kl_target kl_horizon gamma lam ppo_epochs
    schedule clip value_clip value_coef value_target entropy_coef lora_r lora_alpha
    lora_targets""".split())
VERSION = 5                                          # of the files in a run directory


def lock_directory(directory: Path):
    """Create a directory and lock it, so that it has one writer; the lock file is returned.

    The lock lasts until that file is closed. Raises InputError if another process has it.
    """
    directory.mkdir(parents=True, exist_ok=True)
    file = open(directory / ".lock", "a")
    if RANK == 0:
        lock(file, directory)
    return file


def save_settings(config, directory: Path, **names):
    """Write config.json. Raises InputError if existing results were made with other settings.

    names: further entries, such as the hashes of the source files of --annotator_function. The
    entry `binds` is a hash of all settings outside of CHANGEABLE. Each checkpoint of phase 3
    holds it. So if config.json is lost, the run can continue with equal settings at the same
    commit. While config.json exists, another commit of this project only gives a warning.
    """
    def exists(*patterns) -> bool:
        return any(list(directory.glob(pattern)) for pattern in patterns)

    settings = asdict(config) | names | {
        "version": VERSION, "torch": torch.__version__,
        "transformers": version("transformers"),
        "commit": git("describe", "--always", "--dirty")}
    binding = sorted(settings.keys() - CHANGEABLE)
    settings["binds"] = checksum(state=[settings[name] for name in binding])
    has_policy = exists("checkpoint-*", "result.json")
    has_reward_model = has_policy or exists("reward/checkpoint-*", "reward/metrics.json")
    has_rows = has_reward_model or exists("responses.jsonl")
    saved, *others = [settings]
    if exists("config.json"):
        saved, *others = read_rows(directory / "config.json")
    elif has_rows and settings["binds"] not in [load_tensors(path)[1].get("binds")
                                                for path in checkpoints(directory)]:
        raise InputError(f"{directory} has lost config.json; choose another --output_dir")
    if others or saved.get("version") != VERSION:
        raise InputError(f"{directory} was written by version {saved.get('version', 4)} of "
                         f"this project; choose another --output_dir")
    changes = []
    for name in saved.keys() & binding:
        is_bound = has_rows
        if name in POLICY_SETTINGS:
            is_bound = has_policy
        elif name.startswith("reward_"):
            is_bound = has_reward_model
        before = saved[name]
        after = settings[name]
        if not is_bound or before == after:
            continue
        text = f"{name} was {before}, is {after}"
        if name == "commit":
            print_rank0(f"warning: {text}; an unbroken run may have other weights")
            continue
        if isinstance(before, dict) and isinstance(after, dict):      # files and their hashes
            edited = sorted({file for file, _ in before.items() ^ after.items()})
            text = f"{', '.join(edited)} was edited: restore it to continue this run"
        changes.append(text)
    if changes:
        raise InputError(f"{directory} was made with other settings ({'; '.join(changes)}); "
                         f"choose another --output_dir{reward_model_hint(directory)}")
    if RANK == 0:
        write_rows(directory / "config.json", [settings])


def reward_model_hint(directory: Path) -> str:
    """The flag that reuses the R_φ of this run in another run; "" without an R_φ."""
    adapter = directory / "reward/adapter"
    return f", with --reward_model {adapter}" if adapter.exists() else ""


def run_phase(name: str, result: str, directory: Path, phase, only_rank0=False):
    """Run a phase, unless the directory has the file `result`, which the phase writes last.

    phase() does the work and returns a summary. only_rank0: rank 0 alone runs the phase, and
    the other ranks wait for up to a day.
    """
    if from_rank0((directory / result).exists()):
        print_rank0(f"{name}: reused {directory / result}")
        return
    start = time.time()
    group = None
    if only_rank0:
        group = run_collective(dist.new_group, backend="gloo", timeout=ANNOTATION_TIMEOUT)
    if RANK == 0 or not only_rank0:
        summary = phase()
    if only_rank0:
        run_collective(dist.barrier, group)
    if RANK == 0:
        row = {"phase": name, "ended": time.strftime("%Y-%m-%d %H:%M"),
               "seconds": time.time() - start, "summary": summary}
        append_row(directory / "phases.jsonl", row)
        print_rank0(f"{name}: {summary} ({row['seconds']:.0f} s)")


class Timer(dict):
    """Seconds that each part of an iteration takes (Table 13)."""

    def __init__(self):
        self.start = time.time()

    def lap(self, name: str):
        """Store the seconds since the last lap, or since the start, as "seconds_NAME"."""
        end = time.time()
        self[f"seconds_{name}"] = end - self.start
        self.start = end
