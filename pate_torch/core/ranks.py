"""Communication between the ranks of a run under torchrun, each of which trains some groups of teachers.

At the end, ranks add their counts, and rank 0 receives the files that it lacks. The process group is gloo even if ranks
train on GPUs. Without torchrun there is one rank.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from pate_torch.core import checks
from pate_torch.core.files import atomic_replacement

TIMEOUT = timedelta(hours=12)
"""Time that a rank waits for slower ranks. A rank that dies closes its connection, which ends the wait at once."""


class World(NamedTuple):
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
    """Return the device of this rank: rank i of a machine uses the i-th GPU. All ranks must call this function."""
    kinds = gather_objects(device.type)  # for devices of different kinds, the sizes of launches would differ
    if len(set(kinds)) > 1:
        kinds_by_rank = ", ".join(f"rank {rank} {kind}" for rank, kind in enumerate(kinds))
        problem = f"must be of one kind on all ranks ({kinds_by_rank})"
        raise checks.error("device", device.type, problem, "Set device=cpu or device=cuda.")
    if device.type == "cuda" and device.index is None and len(kinds) > 1:
        return torch.device("cuda", get_world().local_rank % torch.cuda.device_count())
    return device


def broadcast_object(value: Any = None) -> Any:
    """Return the value of rank 0 on every rank. Other ranks pass None. Tensors must be on the CPU."""
    return gather_objects(value)[0]


def gather_objects(value: Any) -> list[Any]:
    """Return the values of all ranks on every rank."""
    values = [value] * get_world().size
    if len(values) > 1:
        _run_collective(lambda: dist.all_gather_object(values, value))
    return values


def send_files(folder: Path, names: Sequence[str]) -> None:
    """PRIVATE. Send files of this rank's folder to rank 0, which writes those that its folder lacks."""
    files = [(rank, name) for rank, part in enumerate(gather_objects(list(names))) for name in part]
    for rank, name in broadcast_object([file for file in files if not (folder / file[1]).exists()]):
        content: list[Any] = [None]
        if rank == get_world().rank:
            _run_collective(lambda: dist.send_object_list([(folder / name).read_bytes()], dst=0))  # noqa: B023
        elif is_main():
            _run_collective(lambda: dist.recv_object_list(content, src=rank))  # noqa: B023
            with atomic_replacement(folder / name) as temporary:
                temporary.write_bytes(content[0])


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
