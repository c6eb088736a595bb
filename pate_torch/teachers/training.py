"""Train K teachers on K disjoint shards, all at once where the machine allows it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from pate_torch import checks, networks
from pate_torch.protocols import Log, Progress, silent
from pate_torch.teachers import distributed, stacked
from pate_torch.teachers.checkpoints import Checkpoints
from pate_torch.teachers.engine import POINTS, Trained, gather_chunk, train_loop, train_stacked
from pate_torch.teachers.ensemble import Ensemble
from pate_torch.teachers.processes import train_chunks
from pate_torch.teachers.recipe import TeacherRecipe
from pate_torch.types import DataSpec, PrivateData, Shards

__all__ = ["TeacherRecipe", "train"]

Losses = Callable[[int, Tensor], None]
"""PRIVATE. Called as losses(step, loss_K)."""

LARGEST_CHUNK = 16
"""On a CPU: beyond it, the tensors of a step fall out of the cache and nothing is gained."""

WORTH_PROCESSES = 2e12
"""Multiplications above which starting worker processes (some three seconds) pays on a CPU."""


def chunks(num_teachers: int, chunk: int) -> list[range]:
    """Teacher k sits in chunk k // chunk: a fixed grouping, whoever trains it."""
    return [range(first, min(first + chunk, num_teachers)) for first in range(0, num_teachers, chunk)]


def chunk_size(recipe: TeacherRecipe, num_teachers: int, device: torch.device) -> int:
    """Teachers per chunk, from public numbers and the kind of device: never from the number of workers or ranks.

    On a CPU about eight: the size that leaves least idle time to 4 or 8 workers. On a GPU as many as fill it.
    """
    if recipe.chunk is not None:
        return min(recipe.chunk, num_teachers)
    if device.type != "cpu":
        return min(256, num_teachers)

    def idle(size: int) -> int:
        return sum(-(-num_teachers // size // workers) * size * workers for workers in (4, 8))

    return min(range(1, LARGEST_CHUNK + 1), key=lambda size: (idle(size), abs(size - 8)))


def multiplications(recipe: TeacherRecipe, spec: DataSpec) -> float:
    """Of one teacher's whole training, forward and backward; counted on shapes alone."""
    total = 0

    def count(layer: nn.Module, _: object, out: Tensor) -> None:
        nonlocal total
        if isinstance(layer, nn.Linear | nn.Conv2d):
            total += out.numel() * layer.weight[0].numel()

    with torch.device("meta"):
        module = networks.build(recipe.network, spec.input_shape, spec.num_classes, **recipe.options)
        for layer in module.modules():
            layer.register_forward_hook(count)
        module(torch.zeros(1, *spec.input_shape))
    return 3.0 * total * recipe.steps * recipe.batch_size


def choose_backend(recipe: TeacherRecipe, spec: DataSpec, num_chunks: int, chunk: int, device: torch.device) -> str:
    """The measured rule behind ``backend=auto`` (benchmarks/README.md)."""
    if recipe.backend != "auto":
        return recipe.backend
    work = multiplications(recipe, spec) * num_chunks * chunk
    if device.type == "cpu" and os.name == "posix" and num_workers(recipe) > 1 and num_chunks > 1:
        return "processes" if work > WORTH_PROCESSES else "vectorised"
    return "vectorised"


def num_workers(recipe: TeacherRecipe) -> int:
    """Worker processes of this rank: as asked, else its share of the cores this process may use."""
    if recipe.workers is not None:
        return recipe.workers
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // distributed.world().local_size)


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
    """PRIVATE. One teacher per shard, on every rank (torchrun deals the chunks out and shares what they learnt).

    checkpoint_dir: a private folder where finished chunks are kept; a run that was stopped goes on from there, to the
    same bits. progress(done, total) counts teachers. ``log`` and ``losses`` receive private learning curves.

    Raises ValueError for a recipe that does not fit the data, RuntimeError when a worker or another rank dies.
    """
    device = distributed.local_device(torch.device(device))
    recipe.check(spec)
    module = networks.build(recipe.network, spec.input_shape, spec.num_classes, **recipe.options)
    stacked.check_teacher(module, recipe.network)
    teachers_total = shards.num_teachers
    grouping = chunks(teachers_total, chunk_size(recipe, teachers_total, device))
    me = distributed.world()
    owner = [number % me.size for number in range(len(grouping))]
    mine = [number for number in range(len(grouping)) if owner[number] == me.rank]

    params = {
        name: torch.zeros(teachers_total, *p.shape, dtype=recipe.torch_dtype) for name, p in module.named_parameters()
    }
    points = min(POINTS, recipe.steps)
    curves_KP = {name: torch.zeros(teachers_total, points) for name in ("loss", "accuracy")}
    finished = 0
    for number, trained in _train_mine(private, spec, shards, recipe, seed, device, grouping, mine, checkpoint_dir):
        rows = slice(grouping[number].start, grouping[number].stop)
        for name, parameter in trained.params.items():
            params[name][rows] = parameter
        curves_KP["loss"][rows], curves_KP["accuracy"][rows] = trained.loss_Pk.T, trained.accuracy_Pk.T
        finished += len(grouping[number])
        progress(finished, sum(len(grouping[number]) for number in mine))
    owner_K = [owner[number] for number, teachers in enumerate(grouping) for _ in teachers]
    distributed.share_rows(params | {f"curve.{name}": curve for name, curve in curves_KP.items()}, owner_K)
    _show_curves(curves_KP, recipe.steps, log, losses)
    network = networks.describe(recipe.network, spec.input_shape, spec.num_classes, **recipe.options)
    return Ensemble(network, params, shards.mask_KS.any(1), spec)


def _train_mine(
    private: PrivateData,
    spec: DataSpec,
    shards: Shards,
    recipe: TeacherRecipe,
    seed: int,
    device: torch.device,
    grouping: list[range],
    mine: list[int],
    checkpoint_dir: Path | None,
) -> Iterator[tuple[int, Trained]]:
    """This rank's chunks: those kept from an interrupted run first, then the others as they finish."""
    kept = Checkpoints(checkpoint_dir, recipe, seed) if checkpoint_dir is not None else None
    todo = []
    for number in mine:
        trained = kept.load(gather_chunk(private, shards, grouping[number])) if kept else None
        if trained is None:
            todo.append(number)
        else:
            yield number, trained
    backend = choose_backend(recipe, spec, len(grouping), len(grouping[0]), device)
    if backend == "processes":
        if device.type != "cpu":
            raise checks.fail("backend", backend, f"needs device=cpu, not {device}", "Use backend=vectorised.")
        done = train_chunks(private, spec, shards, recipe, seed, grouping, todo, num_workers(recipe))
    else:
        method = train_loop if backend == "loop" else train_stacked
        done = (
            (number, method(gather_chunk(private, shards, grouping[number]), spec, recipe, seed, device))
            for number in todo
        )
    for number, trained in done:
        if kept:
            kept.save(gather_chunk(private, shards, grouping[number]), trained)
        yield number, trained


def _show_curves(curves_KP: dict[str, Tensor], steps: int, log: Log, losses: Losses) -> None:
    points = curves_KP["loss"].shape[1]
    for point in range(points):
        step = (point + 1) * steps // points
        for name, curve_KP in curves_KP.items():
            value_K = curve_KP[:, point]
            log(f"teachers/{name}_mean", float(value_K.mean()), step)
            log(f"teachers/{name}_min", float(value_K.min()), step)
            log(f"teachers/{name}_max", float(value_K.max()), step)
        losses(step, curves_KP["loss"][:, point])
