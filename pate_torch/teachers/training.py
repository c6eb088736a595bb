"""Train K teachers on K disjoint shards, all at once where the machine allows it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from pate_torch import networks
from pate_torch.protocols import Log, Progress, silent
from pate_torch.teachers import stacked
from pate_torch.teachers.engine import Trained, gather_chunk, train_loop, train_stacked
from pate_torch.teachers.ensemble import Ensemble
from pate_torch.teachers.recipe import TeacherRecipe
from pate_torch.types import DataSpec, PrivateData, Shards

__all__ = ["TeacherRecipe", "train"]

Losses = Callable[[int, Tensor], None]
"""PRIVATE. Called as losses(step, loss_K)."""


def chunks(num_teachers: int, chunk: int) -> list[range]:
    """Teacher k sits in chunk k // chunk: a fixed grouping, whoever trains it."""
    return [range(first, min(first + chunk, num_teachers)) for first in range(0, num_teachers, chunk)]


def train(
    private: PrivateData,
    spec: DataSpec,
    shards: Shards,
    recipe: TeacherRecipe,
    *,
    seed: int,
    device: torch.device | str = "cpu",
    checkpoint_dir: Path | None = None,
    progress: Progress = silent,
    log: Log = silent,
    losses: Losses = silent,
) -> Ensemble:
    """PRIVATE. One teacher per shard. ``log`` and ``losses`` receive private learning curves.

    progress(done, total) counts teachers.
    """
    device = torch.device(device)
    recipe.check(spec)
    module = networks.build(recipe.network, spec.input_shape, spec.num_classes, **recipe.options)
    stacked.check_teacher(module, recipe.network)
    method = train_loop if recipe.backend == "loop" else train_stacked
    done: list[Trained] = []
    for teachers in chunks(shards.num_teachers, recipe.chunk or 12):
        done.append(method(gather_chunk(private, shards, teachers), spec, recipe, seed, device))
        progress(teachers.stop, shards.num_teachers)
    params = {name: torch.cat([t.params[name] for t in done]) for name in done[0].params}
    network = networks.describe(recipe.network, spec.input_shape, spec.num_classes, **recipe.options)
    _show_curves(done, recipe.steps, log, losses)
    return Ensemble(network, params, shards.mask_KS.any(1), spec)


def _show_curves(done: list[Trained], steps: int, log: Log, losses: Losses) -> None:
    loss_PK = torch.cat([t.loss_Pk for t in done], 1)
    accuracy_PK = torch.cat([t.accuracy_Pk for t in done], 1)
    points = len(loss_PK)
    for point in range(points):
        step = (point + 1) * steps // points
        for name, value_K in (("loss", loss_PK[point]), ("accuracy", accuracy_PK[point])):
            log(f"teachers/{name}_mean", float(value_K.mean()), step)
            log(f"teachers/{name}_min", float(value_K.min()), step)
            log(f"teachers/{name}_max", float(value_K.max()), step)
        losses(step, loss_PK[point])
