"""Communication between the ranks of a run under torchrun, each of which trains a part of the teachers.

Ranks do not communicate during training. They exchange the trained parameters at the end, through host memory: the
process group is gloo even if ranks train on GPUs. Without torchrun there is one rank.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pate_torch.core import checks

TRAIN, BASELINE, DONE = "train", "baseline", "done"
"""Commands that rank 0 broadcasts to the other ranks."""

TIMEOUT = timedelta(hours=12)
"""Time that a rank waits for slower ranks. A rank that dies closes its connection, which ends the wait at once."""


@dataclass(frozen=True)
class World:
    """Rank of this process and number of ranks, in the whole run and on this machine (``local``)."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1


def get_world() -> World:
    """Return the rank of this process. The first call under torchrun joins the process group."""
    if "RANK" not in os.environ or int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return World()
    if not dist.is_initialized():
        dist.init_process_group("gloo", timeout=TIMEOUT)
        atexit.register(dist.destroy_process_group)  # threads of the group may crash the end of Python
    local_rank = int(os.environ.get("LOCAL_RANK", dist.get_rank()))
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    return World(dist.get_rank(), dist.get_world_size(), local_rank, local_size)


def is_main() -> bool:
    """Return whether this process is rank 0, which writes files, charges accounts and reports."""
    return get_world().rank == 0


def get_local_device(device: torch.device) -> torch.device:
    """Return the device of this rank: rank i of a machine uses the i-th GPU. All ranks must call this function.

    Raises:
        ValueError: Ranks have devices of different kinds, for which the sizes of launches differ.
    """
    ranks = get_world()
    if ranks.size == 1:
        return device
    kinds: list[str] = [""] * ranks.size
    _run_collective(lambda: dist.all_gather_object(kinds, device.type))
    if len(set(kinds)) > 1:
        kinds_by_rank = ", ".join(f"rank {rank} {kind}" for rank, kind in enumerate(kinds))
        problem = f"must be of one kind on all ranks ({kinds_by_rank})"
        raise checks.error("device", device.type, problem, "Set device=cpu or device=cuda.")
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", ranks.local_rank % torch.cuda.device_count())
    return device


def broadcast_object(value: Any = None) -> Any:
    """Return the value of rank 0 on every rank. Other ranks may pass None. Tensors must be on the CPU."""
    values = [value]
    if get_world().size > 1:
        _run_collective(lambda: dist.broadcast_object_list(values, src=0))
    return values[0]


def broadcast_rows(rows_K: dict[str, Tensor], owner_K: list[int]) -> None:
    """Fill tensors [K, ...] in place: rank ``owner_K[k]`` sends row k to all ranks, with its neighboring rows."""
    if get_world().size == 1:
        return
    starts = [k for k in range(len(owner_K)) if k == 0 or owner_K[k] != owner_K[k - 1]]
    for start, stop in zip(starts, [*starts[1:], len(owner_K)], strict=True):
        for tensor in rows_K.values():
            part = tensor[start:stop].contiguous()
            _run_collective(lambda part=part, source=owner_K[start]: dist.broadcast(part, source))  # type: ignore[misc]
            tensor[start:stop] = part


def add_over_ranks(counts: Tensor) -> None:
    """Replace the tensor on every rank by the sum over all ranks."""
    if get_world().size > 1:
        _run_collective(lambda: dist.all_reduce(counts))


def _run_collective(operation: Callable[[], object]) -> None:
    try:
        operation()
    except RuntimeError as error:
        message = "another rank has stopped, so this run cannot finish. Start the run again; finished teachers are kept"
        raise RuntimeError(message) from error
