"""Teachers under torchrun: chunks dealt to ranks, parameters and votes gathered.

Teachers never communicate while they learn, so there is nothing to synchronize but the end, through host memory: the
group is gloo even where ranks train on GPUs. Without torchrun everything here is the single-process case.
"""

from __future__ import annotations

import atexit
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

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

TRAIN, BASELINE, DONE = "train", "baseline", "done"
"""What rank 0 tells the others to do."""

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


def broadcast_text(text: str) -> str:
    """Rank 0's text on every rank: the run id, for instance."""
    if get_world().size == 1:
        return text
    texts = [text]
    _run_collective(lambda: dist.broadcast_object_list(texts, src=0))
    return texts[0]


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


def broadcast_trunk(trunk: Trunk | None, input_spec: DataSpec) -> Trunk:
    """Rank 0's trunk on every rank (the others pass None): machines differ in the last bits."""
    if trunk is not None and get_world().size == 1:
        return trunk
    facts = json.loads(broadcast_text("" if trunk is None else json.dumps(trunk.to_facts())))
    state = broadcast_tensors(None if trunk is None else trunk.get_state())
    return Trunk.rebuild(facts, state, input_spec, DataSpec.from_dict(facts["spec"]))


def learn_public_trunk(
    recipe: TeacherRecipe, pool: PublicPool, spec: DataSpec, seed: int, device: torch.device, stages: Stages
) -> Trunk | None:
    """The trunk that teachers start from, learnt by rank 0 from the public points; None: the recipe has none."""
    if recipe.start is None:
        return None
    trunk = None
    if is_main():
        progress = stages("Learning features from public points")
        trunk = recipe.start.learn(pool.x, spec, seed=seed, device=device, progress=progress)
    return broadcast_trunk(trunk, spec)


def broadcast_tensors(tensors: dict[str, Tensor] | None) -> dict[str, Tensor]:
    """Rank 0's tensors on every rank (the others pass None)."""
    if tensors is not None and get_world().size == 1:
        return tensors
    shapes = {
        name: (list(value.shape), str(value.dtype).removeprefix("torch.")) for name, value in (tensors or {}).items()
    }
    rows = {
        name: torch.empty(1, *shape, dtype=getattr(torch, dtype)) if tensors is None else tensors[name][None]
        for name, (shape, dtype) in json.loads(broadcast_text(json.dumps(shapes))).items()
    }
    broadcast_rows(rows, [0])
    return {name: row[0] for name, row in rows.items()}


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
