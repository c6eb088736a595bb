"""How teachers are dealt to ranks, and how many are trained or queried at once.

Teachers are dealt, and kept when a run is stopped, by groups of 16, always. How many a device works on at once follows
from public numbers alone: the size of the network and of its input, the batch and the kind of device. The number of
records in a shard is private: a launch that followed from it would tell one record to every teacher of the launch.

On a CPU no launch crosses a group, so that teachers are the same to the bit however many ranks or workers share them.
On a GPU a launch takes several of a rank's groups, and teachers are the same to the bit where launches are of equal
size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby

import torch

from pate_torch.privacy.records import DataSpec
from pate_torch.teachers.recipe import TeacherRecipe

GROUP_TEACHERS = 16
"""Teachers dealt and checkpointed together."""

CACHE_PARAMETERS = 2_000_000
"""Numbers in the stacked parameters of one launch on a CPU, at most (8 MB of weights, 24 MB of moments)."""

GPU_PIXELS = 1 << 22
"""Image pixels (numbers, for rows) that one launch on a GPU works on, over its teachers and their batches, at most.

The network that keeps most for the backward pass, the convnet of the PATE papers, takes 4.5 KiB for each
pixel: 18 GiB, which a card of 24 GiB has. ``teacher.chunk`` sets another size."""

MAX_GPU_POINTS = 512
"""Points queried at once on a GPU, at most: more hardly fill it better."""


def split_groups(num_teachers: int) -> list[range]:
    """The teachers of each group."""
    return [range(first, min(first + GROUP_TEACHERS, num_teachers)) for first in range(0, num_teachers, GROUP_TEACHERS)]


def assign_owners(num_groups: int, ranks: int) -> list[int]:
    """The rank of each group: neighbors go to one rank, and no rank has more than one group more than another."""
    num_slots = max(num_groups, ranks)  # where ranks are more, the first ones have one each
    return [group * ranks // num_slots for group in range(num_groups)]


def plan_launches(pending: Sequence[range], size: int) -> list[range]:
    """The teachers trained at once, of the groups that are to be trained: parts of a group, or neighboring groups."""
    if size < GROUP_TEACHERS:
        return [range(k, min(k + size, group.stop)) for group in pending for k in range(group.start, group.stop, size)]
    runs = groupby(enumerate(pending), key=lambda item: item[1].start // GROUP_TEACHERS - item[0])
    neighbor_runs, groups_per_launch = [[group for _, group in run] for _, run in runs], size // GROUP_TEACHERS
    return [
        range(run[first].start, run[min(first + groups_per_launch, len(run)) - 1].stop)
        for run in neighbor_runs
        for first in range(0, len(run), groups_per_launch)
    ]


def compute_train_size(
    recipe: TeacherRecipe, num_parameters: int, spec: DataSpec, num_teachers: int, device: torch.device
) -> int:
    """Number of teachers trained at once: ``recipe.chunk``, or as many as a CPU's cache or a GPU's memory holds."""
    on_cpu = device.type == "cpu"
    max_size = GROUP_TEACHERS if on_cpu else GROUP_TEACHERS * math.ceil(num_teachers / GROUP_TEACHERS)
    if recipe.chunk is not None:
        return min(recipe.chunk, max_size)
    size = CACHE_PARAMETERS // num_parameters if on_cpu else GPU_PIXELS // (recipe.batch_size * _count_pixels(spec))
    size -= size % GROUP_TEACHERS if size >= GROUP_TEACHERS else 0
    return max(1, min(size, max_size))


def compute_gpu_points(spec: DataSpec) -> int:
    """Number of points that a group of teachers is asked about at once on a GPU."""
    return max(1, min(MAX_GPU_POINTS, GPU_PIXELS // (GROUP_TEACHERS * _count_pixels(spec))))


def _count_pixels(spec: DataSpec) -> int:
    """Height times width of an image, or the length of a row."""
    return math.prod(spec.input_shape[-2:])
