"""How teachers are dealt to ranks, and how many are trained or asked at once.

Teachers are dealt, and kept when a run is stopped, by groups of 16, always. How many a device works on at once follows
from public numbers alone: the network, the kind of device and the memory that it may take (``memory_gib``). On a CPU no
launch crosses a group, so that teachers are the same to the bit however many ranks or workers share them. On a GPU a
launch takes as many of a rank's groups as fit, and teachers are the same to the bit where launches are of equal size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from pate_torch import networks
from pate_torch.core import checks
from pate_torch.core.parallel import single_thread_mode
from pate_torch.teachers.engine import BLOCK
from pate_torch.teachers.recipe import TeacherRecipe
from pate_torch.teachers.stacked import order
from pate_torch.types import DataSpec

GROUP = 16
"""Teachers dealt and checkpointed together."""
ASKED = 512
"""Points asked at once on a GPU, at most: more hardly fill it better."""

CACHE = 2_000_000
"""On a CPU: numbers in the stacked parameters of a launch, at most (8 MB of weights, 24 of moments)."""
WORTH_PROCESSES = 600
"""Stacked steps, half a second of one core or more, above which worker processes that are copies of this one pay."""

_STATE = {"adam": 4, "sgd": 3}
"""Copies of the parameters: themselves, their gradients, and the optimizer's moments."""


# ---- dealing ---------------------------------------------------------------------------------------------------------


def groups(num_teachers: int) -> list[range]:
    """The teachers of each group."""
    return [range(first, min(first + GROUP, num_teachers)) for first in range(0, num_teachers, GROUP)]


def owners(num_groups: int, ranks: int) -> list[int]:
    """The rank of each group: neighbors go to one rank, and no rank has more than one group more than another."""
    spread = max(num_groups, ranks)  # where ranks are more, the first ones have one each
    return [group * ranks // spread for group in range(num_groups)]


def launches(todo: Sequence[range], size: int) -> list[range]:
    """The teachers trained at once, of the groups that are to be trained: parts of a group, or neighboring groups."""
    if size < GROUP:
        return [range(k, min(k + size, group.stop)) for group in todo for k in range(group.start, group.stop, size)]
    runs = groupby(enumerate(todo), key=lambda numbered: numbered[1].start // GROUP - numbered[0])
    whole, every = [[group for _, group in run] for _, run in runs], size // GROUP
    return [
        range(run[first].start, run[min(first + every, len(run)) - 1].stop)
        for run in whole
        for first in range(0, len(run), every)
    ]


# ---- what a network takes --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cost:
    """What one network takes, in numbers: of itself, and for every point.

    Attributes:
        parameters: Number of parameters.
        kept: What a forward pass keeps for the backward pass.
        step: What is alive beside that, at most, in one layer of either pass.
    """

    parameters: int
    kept: int
    step: int


def network_cost(network: str, options: Mapping[str, Any], spec: DataSpec) -> Cost:
    """The cost of a network, counted on one blank point.

    (On the meta device nothing would be computed, but its first use imports a thousand modules: three seconds.)
    """
    image = math.prod(spec.input_shape)
    kept, step = [image], [4 * image]  # distorting images takes a grid of two numbers a pixel, and copies

    def count(layer: nn.Module, inputs: tuple[Tensor, ...], out: Tensor) -> None:
        if isinstance(layer, nn.Sequential | nn.Flatten | nn.Identity):
            return
        alive, made = inputs[0].numel(), out.numel()
        if isinstance(layer, nn.Conv2d):
            # Patches of the images with a margin; in the backward pass those of their gradient, afterwards.
            assert not isinstance(layer.padding, str)
            (_, channels, height, width), (top, left) = inputs[0].shape, layer.padding
            patches = layer.weight[0].numel() * out[0, 0].numel()
            alive = patches + 2 * channels * (height + 2 * top) * (width + 2 * left)
        step.append(alive + 3 * made)
        # A norm keeps what it takes, not what it makes; a ReLU after a layer with weights is a part of it.
        if not isinstance(layer, nn.GroupNorm) and layer not in fused:
            kept.append(3 * made if isinstance(layer, nn.MaxPool2d) else made)  # places are of 64 bits

    with torch.random.fork_rng(devices=[]), torch.no_grad(), single_thread_mode():
        module = networks.build(network, spec.input_shape, spec.num_classes, **options).eval()
        sequences = [layer for layer in module.modules() if isinstance(layer, nn.Sequential)]
        alone = {layer for sequence in sequences for _, layer, _ in order(sequence)}
        fused = {layer for sequence in sequences for layer in sequence if layer not in alone}
        for layer in module.modules():
            layer.register_forward_hook(count)
        module(torch.zeros(1, *spec.input_shape))
    return Cost(networks.count_parameters(module), sum(kept), max(step))


def training_bytes(recipe: TeacherRecipe, cost: Cost) -> int:
    """Memory of a device that one teacher takes while it is trained, beside its records.

    How many these are is private: a launch that followed from it would tell one record to every teacher of the launch.
    """
    number = recipe.torch_dtype.itemsize
    halves = cost.parameters // 2 if recipe.dtype == "bf16" else 0  # weights are cast in each step
    drawn = BLOCK * recipe.batch_size * (8 + 6 * 4)  # indices, and maps of distortions
    numbers = _STATE[recipe.optimizer] * cost.parameters + halves + recipe.batch_size * (cost.kept + cost.step)
    return number * numbers + drawn


def asking_bytes(cost: Cost, points: int, number: int = 4) -> int:
    """Memory of a device that one teacher takes while it is asked about so many points at once."""
    return number * (cost.parameters + points * cost.step)


# ---- how many at once ------------------------------------------------------------------------------------------------


def train_size(recipe: TeacherRecipe, cost: Cost, num_teachers: int, device: torch.device) -> int:
    """Teachers trained at once, from public numbers and the kind of device: never from the number of workers or ranks.

    On a CPU as many as keep their parameters in the cache; on a GPU as many groups as its memory holds.

    Raises:
        ValueError: Not even one teacher fits.
    """
    most = GROUP if device.type == "cpu" else GROUP * math.ceil(num_teachers / GROUP)
    if recipe.chunk is not None:
        return min(recipe.chunk, most)
    if device.type == "cpu":
        return max(1, min(CACHE // cost.parameters, most))
    what = f"a teacher of network={recipe.network} at batch_size={recipe.batch_size}"
    advice = "Lower teacher.batch_size, or use a smaller network"
    size = _fitting(recipe.memory_gib, training_bytes(recipe, cost), what, advice)
    return min(size - size % GROUP if size >= GROUP else size, most)


def ask_size(cost: Cost, num_teachers: int, memory_gib: float, number: int = 4) -> tuple[int, int]:
    """Teachers and points asked at once on a GPU.

    Raises:
        ValueError: Not even one teacher fits with one point.
    """

    def together(points: int) -> int:
        what = f"one teacher that is asked about {points} points"
        return _fitting(memory_gib, asking_bytes(cost, points, number), what, "Use a smaller network")

    points = ASKED
    while points > 1 and asking_bytes(cost, points, number) * min(GROUP, num_teachers) > memory_gib * 2**30:
        points //= 2
    return min(4 * GROUP, num_teachers, together(points)), points


def _fitting(memory_gib: float, each: int, what: str, advice: str) -> int:
    size = int(memory_gib * 2**30 // each)
    if size < 1:
        needs = f"is too little: {what} takes {each / 2**30:.3g} GiB"
        raise checks.error("teacher.memory_gib", memory_gib, needs, f"{advice}, or raise it where the GPU has more.")
    return size
