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
from pate_torch.privacy.records import DataSpec
from pate_torch.teachers.engine import BLOCK_STEPS
from pate_torch.teachers.recipe import TeacherRecipe
from pate_torch.teachers.stacked import plan_layers

GROUP_TEACHERS = 16
"""Teachers dealt and checkpointed together."""
MAX_GPU_POINTS = 512
"""Points asked at once on a GPU, at most: more hardly fill it better."""

CACHE_PARAMETERS = 2_000_000
"""On a CPU: numbers in the stacked parameters of a launch, at most (8 MB of weights, 24 of moments)."""
MIN_SECONDS_FOR_FORK = 600
"""Stacked steps, half a second of one core or more, above which worker processes that are copies of this one pay."""

_PARAMETER_COPIES = {"adam": 4, "sgd": 3}
"""Copies of the parameters: themselves, their gradients, and the optimizer's moments."""


# ---- dealing ---------------------------------------------------------------------------------------------------------


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


# ---- what a network takes --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NetworkCost:
    """What one network takes, in numbers: of itself, and for every point.

    Attributes:
        parameters: Number of parameters.
        saved_numbers: What a forward pass keeps for the backward pass.
        training_peak: What is alive beside that, at most, in one layer of either pass.
    """

    parameters: int
    saved_numbers: int
    training_peak: int


def compute_network_cost(network: str, options: Mapping[str, Any], spec: DataSpec) -> NetworkCost:
    """The cost of a network, counted on one blank point.

    (On the meta device nothing would be computed, but its first use imports a thousand modules: three seconds.)
    """
    image = math.prod(spec.input_shape)
    saved_numbers, training_peaks = (
        [image],
        [4 * image],
    )  # distorting images takes a grid of two numbers a pixel, and copies

    def count_layer(layer: nn.Module, inputs: tuple[Tensor, ...], out: Tensor) -> None:
        if isinstance(layer, nn.Sequential | nn.Flatten | nn.Identity):
            return
        layer_peak, output_size = inputs[0].numel(), out.numel()
        if isinstance(layer, nn.Conv2d):
            # Patches of the images with a margin; in the backward pass those of their gradient, afterwards.
            assert not isinstance(layer.padding, str)
            (_, channels, height, width), (top, left) = inputs[0].shape, layer.padding
            patches = layer.weight[0].numel() * out[0, 0].numel()
            layer_peak = patches + 2 * channels * (height + 2 * top) * (width + 2 * left)
        training_peaks.append(layer_peak + 3 * output_size)
        # A norm keeps what it takes, not what it makes; a ReLU after a layer with weights is a part of it.
        if not isinstance(layer, nn.GroupNorm) and layer not in fused_layers:
            saved_numbers.append(
                3 * output_size if isinstance(layer, nn.MaxPool2d) else output_size
            )  # places are of 64 bits

    with torch.random.fork_rng(devices=[]), torch.no_grad(), single_thread_mode():
        module = networks.build(network, spec.input_shape, spec.num_classes, **options).eval()
        sequences = [layer for layer in module.modules() if isinstance(layer, nn.Sequential)]
        separate_layers = {layer for sequence in sequences for _, layer, _ in plan_layers(sequence)}
        fused_layers = {layer for sequence in sequences for layer in sequence if layer not in separate_layers}
        for layer in module.modules():
            layer.register_forward_hook(count_layer)
        module(torch.zeros(1, *spec.input_shape))
    return NetworkCost(networks.count_parameters(module), sum(saved_numbers), max(training_peaks))


def estimate_training_bytes(recipe: TeacherRecipe, cost: NetworkCost) -> int:
    """Memory of a device that one teacher takes while it is trained, beside its records.

    How many these are is private: a launch that followed from it would tell one record to every teacher of the launch.
    """
    itemsize = recipe.torch_dtype.itemsize
    cast_weights = cost.parameters // 2 if recipe.dtype == "bf16" else 0  # weights are cast in each step
    draw_bytes = BLOCK_STEPS * recipe.batch_size * (8 + 6 * 4)  # indices, and maps of distortions
    numbers = (
        _PARAMETER_COPIES[recipe.optimizer] * cost.parameters
        + cast_weights
        + recipe.batch_size * (cost.saved_numbers + cost.training_peak)
    )
    return itemsize * numbers + draw_bytes


def estimate_query_bytes(cost: NetworkCost, points: int, itemsize: int = 4) -> int:
    """Memory of a device that one teacher takes while it is asked about so many points at once."""
    return itemsize * (cost.parameters + points * cost.training_peak)


# ---- how many at once ------------------------------------------------------------------------------------------------


def compute_train_size(recipe: TeacherRecipe, cost: NetworkCost, num_teachers: int, device: torch.device) -> int:
    """Teachers trained at once, from public numbers and the kind of device: never from the number of workers or ranks.

    On a CPU as many as keep their parameters in the cache; on a GPU as many groups as its memory holds.

    Raises:
        ValueError: Not even one teacher fits.
    """
    max_size = GROUP_TEACHERS if device.type == "cpu" else GROUP_TEACHERS * math.ceil(num_teachers / GROUP_TEACHERS)
    if recipe.chunk is not None:
        return min(recipe.chunk, max_size)
    if device.type == "cpu":
        return max(1, min(CACHE_PARAMETERS // cost.parameters, max_size))
    subject = f"a teacher of network={recipe.network} at batch_size={recipe.batch_size}"
    advice = "Lower teacher.batch_size, or use a smaller network"
    size = _count_fitting(recipe.memory_gib, estimate_training_bytes(recipe, cost), subject, advice)
    return min(size - size % GROUP_TEACHERS if size >= GROUP_TEACHERS else size, max_size)


def compute_query_size(cost: NetworkCost, num_teachers: int, memory_gib: float, itemsize: int = 4) -> tuple[int, int]:
    """Teachers and points asked at once on a GPU.

    Raises:
        ValueError: Not even one teacher fits with one point.
    """

    def count_fitting(points: int) -> int:
        subject = f"one teacher that is asked about {points} points"
        return _count_fitting(
            memory_gib, estimate_query_bytes(cost, points, itemsize), subject, "Use a smaller network"
        )

    points = MAX_GPU_POINTS
    while (
        points > 1
        and estimate_query_bytes(cost, points, itemsize) * min(GROUP_TEACHERS, num_teachers) > memory_gib * 2**30
    ):
        points //= 2
    return min(4 * GROUP_TEACHERS, num_teachers, count_fitting(points)), points


def _count_fitting(memory_gib: float, bytes_each: int, subject: str, advice: str) -> int:
    size = int(memory_gib * 2**30 // bytes_each)
    if size < 1:
        message = f"is too little: {subject} takes {bytes_each / 2**30:.3g} GiB"
        raise checks.error("teacher.memory_gib", memory_gib, message, f"{advice}, or raise it where the GPU has more.")
    return size
