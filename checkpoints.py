"""Files that are whole or absent: atomic directories, checkpoints, and how a run finds the newest good one.

    keep_checkpoint(run, {"weight": tensor}, {"iteration": 40}, keep=2)         # run/checkpoint-40
    path, tensors, state = newest_checkpoint(run)

Tensors are safetensors and the state is JSON, so nothing that is loaded can run code.
Paper: it says nothing of files.
"""

from __future__ import annotations

import json
import os
import shutil
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor


class ModelError(ValueError):
    """A model, adapter, checkpoint or prompt that cannot be used; the message names it and the remedy."""


@contextmanager
def atomic_directory(directory):
    """Write into a temporary neighbour that becomes `directory` only when it is complete and on the disk."""
    directory = Path(directory)
    temporary, old = (directory.with_name(f".{directory.name}.{kind}-{os.getpid()}") for kind in ("new", "old"))
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        for path in temporary.iterdir():
            _sync(path)
        _sync(temporary)
        if directory.exists():
            shutil.rmtree(old, ignore_errors=True)           # what a killed run with this process id left
            directory.rename(old)
        try:
            temporary.rename(directory)
        except OSError:
            if old.exists():
                old.rename(directory)
            raise
        _sync(directory.parent)                              # the new name, too, survives a power cut
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _sync(path: Path):
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def save_checkpoint(directory, tensors: dict[str, Tensor], state: dict):
    """Write tensors of any shape (safetensors) and a JSON state to one directory, whole or not at all."""
    with atomic_directory(directory) as temporary:
        plain = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
        save_file(plain, temporary / "tensors.safetensors")
        (temporary / "state.json").write_text(json.dumps(state))


def load_checkpoint(directory) -> tuple[dict[str, Tensor], dict]:
    """What `save_checkpoint` wrote: (tensors, any shape; state). Raises ModelError where a file is lost or damaged."""
    directory = Path(directory)
    for name in ("tensors.safetensors", "state.json"):
        if not (directory / name).is_file():
            raise ModelError(f"{directory}: the checkpoint has no {name}")
    try:
        tensors = load_file(directory / "tensors.safetensors")
    except SafetensorError as error:                 # the file is shorter or longer than its header says, or has none
        raise ModelError(f"{directory / 'tensors.safetensors'} is damaged ({error})") from error
    return tensors, read_json(directory / "state.json")


def checkpoints(run: Path) -> list[Path]:
    """The checkpoints of a run directory, oldest first."""
    return sorted((p for p in run.glob("checkpoint-*") if p.name[11:].isdigit()), key=lambda p: int(p.name[11:]))


def keep_checkpoint(run: Path, tensors: dict[str, Tensor], state: dict, keep: int):
    """Write checkpoint-N after state["iteration"] = N, and only when it is whole remove all but the newest `keep`.

    tensors: any shape. Raises ModelError, with the room that is needed, where the disk does not take it; the last good
    one stays.
    """
    path, good = run / f"checkpoint-{state['iteration']}", [None, *checkpoints(run)][-1]
    try:
        save_checkpoint(path, tensors, state)
    except (OSError, SafetensorError) as error:
        need, free = sum(t.nbytes for t in tensors.values()) / 1e6, shutil.disk_usage(run).free / 1e6
        raise ModelError(f"{path} could not be written ({error}): it needs {need:.1f} MB, {free:.1f} MB are free in {run}; "
                         f"last good checkpoint: {good}, and the same command goes on from it") from error
    for old in [*checkpoints(run)[:-keep], *run.glob(".checkpoint-*")]:          # the latter from runs that were killed
        shutil.rmtree(old)


def newest_checkpoint(run: Path, warn=print) -> tuple[Path | None, dict[str, Tensor], dict]:
    """(path, tensors, any shape, state) of the newest readable checkpoint; `warn` is told of those passed over."""
    found = checkpoints(run)[::-1]
    for path, older in zip(found, [*found[1:], "the start"]):
        try:
            return path, *load_checkpoint(path)
        except (ModelError, SafetensorError, OSError) as error:
            warn(f"warning: {path} is damaged ({error}); going on from {older} instead")
    return None, {}, {}


def read_json(path: Path) -> dict:
    """The JSON object in a file. Raises ModelError where it is damaged."""
    try:
        return json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ModelError(f"{path} is not JSON ({error}); the file is damaged") from error
