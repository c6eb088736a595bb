"""What each rank does that torchrun starts for ``runs.several``: train its share of the teachers, and ask them."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TypedDict

import torch

from pate_torch.core.device import settled
from pate_torch.gpu_check import worlds
from pate_torch.gpu_check.parts import Bench
from pate_torch.teachers import distributed, launch
from pate_torch.teachers.training import train
from pate_torch.types import Shards

SIZE = 12  # records of a teacher


class Told(TypedDict):
    """What a rank tells of itself; ``peak``: bytes of its card."""

    device: str
    seconds: float
    peak: int
    votes: list[list[int]]


def work(device: torch.device) -> Told:
    """Train and ask; launches are of one group, so that teachers have the same bits on any number of ranks."""
    device = distributed.local_device(device)
    bench = Bench(device, toy=device.type == "cpu")
    spec, teachers = worlds.spec(bench), 16 * launch.GROUP
    private = worlds.records(spec, teachers * SIZE)
    index_KS = torch.arange(teachers * SIZE).view(teachers, SIZE)
    shards = Shards(index_KS, torch.ones_like(index_KS, dtype=torch.bool), "add_remove")
    recipe = worlds.recipe("lean_cnn", worlds.teacher_networks(bench)["lean_cnn"], steps=100, chunk=launch.GROUP)
    ended: list[float] = []
    with settled(device):
        start = time.monotonic()
        mine = train(
            private, spec, shards, recipe, seed=0, device=device, progress=lambda *_: ended.append(time.monotonic())
        )
        votes = distributed.votes(mine, lambda some: some.tally(private.x[:200], device=device), 200)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    return Told(device=str(device), seconds=ended[-1] - start, peak=peak, votes=votes.counts_QC.tolist())


if __name__ == "__main__":
    folder, kind = Path(sys.argv[1]), sys.argv[2]
    told = work(torch.device(kind))
    (folder / f"{distributed.world().rank}.json").write_text(json.dumps(told))
