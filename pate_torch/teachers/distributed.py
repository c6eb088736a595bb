"""Teachers under torchrun: chunks dealt to ranks, parameters and votes gathered.

Teachers never communicate while they learn, so there is nothing to synchronize but the end, through host memory: the
group is gloo even where ranks train on GPUs. Without torchrun everything here is the single-process case.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from pate_torch.core import checks
from pate_torch.core.progress import Stages
from pate_torch.privacy.records import DataSpec, PublicPool
from pate_torch.privacy.sensitive import Votes
from pate_torch.teachers.ensemble import TeacherEnsemble
from pate_torch.teachers.recipe import TeacherRecipe
from pate_torch.teachers.trunk import Trunk

T = TypeVar("T")

TRAIN, BASELINE, DONE = "train", "baseline", "done"
"""What rank 0 tells the others to do."""

_RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

TIMEOUT = timedelta(hours=12)
"""A rank waits this long for slower ones; a dead peer is noticed at once, by its closed connection."""


@dataclass(frozen=True)
class World:
    """This process among its peers."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1


def get_world() -> World:
    """The ranks of this run; joins the group on the first call when started by torchrun."""
    if "RANK" not in os.environ or int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return World()
    if not dist.is_initialized():
        dist.init_process_group("gloo", timeout=TIMEOUT)
        atexit.register(close)  # else its threads may outlive Python, which then ends by a signal
    local_rank = int(os.environ.get("LOCAL_RANK", dist.get_rank()))
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    return World(dist.get_rank(), dist.get_world_size(), local_rank, local_size)


def is_main() -> bool:
    """Whether this process is the one that writes, charges and reports."""
    return get_world().rank == 0


def get_local_device(device: torch.device) -> torch.device:
    """The device of this rank, resolved once, by all ranks together: rank i of a machine takes its i-th GPU.

    Raises:
        ValueError: Ranks have devices of different kinds, on which launches are of other sizes.
    """
    ranks = get_world()
    if ranks.size == 1:
        return device
    kinds: list[str] = [""] * ranks.size
    _run_collective(lambda: dist.all_gather_object(kinds, device.type))
    if len(set(kinds)) > 1:
        kinds_by_rank = ", ".join(f"rank {rank} {kind}" for rank, kind in enumerate(kinds))
        raise checks.error(
            "device", device.type, f"must be of one kind on all ranks ({kinds_by_rank})", "Name it: device=cpu."
        )
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", ranks.local_rank % torch.cuda.device_count())
    return device


def broadcast_object(value: T | None) -> T:
    """Rank 0's value on every rank (the others may pass None); its tensors must be on the CPU."""
    values = [value]
    if get_world().size > 1:
        _run_collective(lambda: dist.broadcast_object_list(values, src=0))
    return cast(T, values[0])


def broadcast_text(text: str) -> str:
    """Rank 0's text on every rank: what it tells the others to do."""
    return broadcast_object(text)


def make_child_environment() -> dict[str, str]:
    """The environment of a child process that finds this package, and is no rank of this run."""
    environment = {key: value for key, value in os.environ.items() if key not in _RANK_VARIABLES}
    package = str(Path(__file__).resolve().parents[2])
    return environment | {"PYTHONPATH": os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))}


def close() -> None:
    """Leave the group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _run_collective(operation: Callable[[], object]) -> None:
    try:
        operation()
    except RuntimeError as error:
        raise RuntimeError(
            "another rank has stopped, so this run cannot finish; start it again: finished chunks of teachers are kept"
        ) from error


def broadcast_rows(rows_K: dict[str, Tensor], owner_K: list[int]) -> None:
    """Fill tensors [K, ...] in place: row k is sent by rank ``owner_K[k]`` to all. Equal neighbors travel together."""
    if get_world().size == 1:
        return
    starts = [k for k in range(len(owner_K)) if k == 0 or owner_K[k] != owner_K[k - 1]]
    for start, stop in zip(starts, [*starts[1:], len(owner_K)], strict=True):
        for tensor in rows_K.values():
            part = tensor[start:stop].contiguous()
            _run_collective(lambda part=part, source=owner_K[start]: dist.broadcast(part, source))  # type: ignore[misc]
            tensor[start:stop] = part


def learn_public_trunk(
    recipe: TeacherRecipe, pool: PublicPool, spec: DataSpec, seed: int, device: torch.device, stages: Stages
) -> Trunk | None:
    """The trunk that teachers start from, learnt from the public points; None if the recipe has none.

    Rank 0 learns it for all: machines differ in the last bits.
    """
    if recipe.start is None:
        return None
    parts = None
    if is_main():
        progress = stages("Learning features from public points")
        trunk = recipe.start.learn(pool.x, spec, seed=seed, device=device, progress=progress)
        if get_world().size == 1:
            return trunk
        parts = trunk.to_facts(), trunk.get_state()
    facts, state = broadcast_object(parts)
    return Trunk.rebuild(facts, state, spec)


def count_votes(
    ensemble: TeacherEnsemble, tally: Callable[[TeacherEnsemble], Tensor], num_points: int, *, across_ranks: bool = True
) -> Votes:
    """PRIVATE. The votes of all teachers, on every rank; each rank asks its share of them.

    Args:
        ensemble: All teachers.
        tally: Counts, int32 [P, C], of some of the teachers.
        num_points: P.
        across_ranks: False where this rank asks them all alone.
    """
    ranks = get_world()
    if ranks.size == 1 or not across_ranks:
        return Votes(tally(ensemble), len(ensemble))
    counts = torch.zeros(num_points, ensemble.network["num_classes"], dtype=torch.int32)
    share = slice(ranks.rank, None, ranks.size)
    if len(ensemble.trained_K[share]):
        counts += tally(ensemble.select(share))
    _run_collective(lambda: dist.all_reduce(counts))
    return Votes(counts, len(ensemble))
