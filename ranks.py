"""The processes that torchrun starts, one per GPU: who this one is, and how all of them meet.

    torchrun --nproc_per_node 8 text2grad.py …

Paper: it says nothing of ranks.

Started alone, a process is rank 0 of 1 and every function here returns at once what it was given.
"""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from endpoint import InputError

RANK, RANKS = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))        # as torchrun sets them
HOSTS = None                                                   # the ranks' processors, where `everyone` meets


def everyone(share: list) -> list:
    """The lists of all ranks as one, the same on each: rows[RANK::RANKS] is how rows are dealt, and this undoes it."""
    shares = [share] * RANKS
    together(dist.all_gather_object, shares, share, group=HOSTS)
    out = [None] * sum(map(len, shares))
    for r, part in enumerate(shares):
        out[r :: RANKS] = part
    return out


def all_sum(x: Tensor) -> Tensor:
    """The sum of a tensor of any shape over all ranks, in place where there are several."""
    together(dist.all_reduce, x)
    return x


def together(collective, *args, **options):
    """What all ranks do at once, where there are several. Raises InputError where one of them is gone or too late.

    On CUDA that holds for `everyone`, which speaks over gloo; a sum over NCCL that waits too long ends the process itself.
    """
    try:
        return collective(*args, **options) if RANKS > 1 else None
    except RuntimeError as error:
        raise InputError(f"rank {RANK} lost another rank, or waited --rank_timeout for it ({error}); the first error "
                         f"says why, and the same command goes on from the last checkpoint") from error


def start_ranks(minutes: float) -> torch.device:
    """Join the other processes that torchrun started, if any; returns this rank's device. minutes: that ranks wait."""
    cuda, local = torch.cuda.is_available(), int(os.environ.get("LOCAL_RANK", 0))
    if cuda:
        torch.cuda.set_device(local)
    if RANKS > 1:
        global HOSTS
        wait = timedelta(minutes=minutes)
        dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=wait)
        HOSTS = dist.new_group(backend="gloo", timeout=wait)
    return torch.device("cuda", local) if cuda else torch.device("cpu")


def say(text: str):
    """Print from the first rank only, past any progress bar."""
    if RANK == 0:
        tqdm.write(text)
