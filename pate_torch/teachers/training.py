"""Train K teachers on K disjoint shards, all at once where the machine allows it."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from pate_torch import networks
from pate_torch.core import checks
from pate_torch.core.files import content, private_folder, read_tensors, replacing
from pate_torch.core.parallel import one_thread
from pate_torch.protocols import Log, Progress, silent
from pate_torch.teachers import distributed, stacked
from pate_torch.teachers.engine import POINTS, Chunk, Trained, gather_chunk, train_loop, train_stacked
from pate_torch.teachers.ensemble import Ensemble
from pate_torch.teachers.recipe import TeacherRecipe
from pate_torch.teachers.trunk import Trunk
from pate_torch.teachers.workers import may_fork, train_chunks
from pate_torch.types import DataSpec, PrivateData, Shards

__all__ = ["TeacherRecipe", "train"]

Losses = Callable[[int, Tensor], None]
"""PRIVATE. Called as losses(step, loss_K)."""

LARGEST_CHUNK = 64
CACHE = 2e6
"""On a CPU: numbers in the stacked parameters above which a step slows down (8 MB of weights, 24 of moments)."""

STEP_SECONDS = 8e-4
MULTIPLICATIONS_PER_SECOND = 5e10
UPDATES_PER_SECOND = 1e9
"""A core's time for one stacked step: a constant, the products, and the optimizer. Only their proportions matter."""

WORTH_PROCESSES, WORTH_SPAWNING = 0.5, 4.0
"""Estimated seconds of one core above which worker processes pay: copies of this one, or new ones importing torch."""


def chunks(num_teachers: int, chunk: int) -> list[range]:
    """The teachers of each chunk: teacher k is in chunk k // chunk, a fixed grouping, whoever trains it."""
    return [range(first, min(first + chunk, num_teachers)) for first in range(0, num_teachers, chunk)]


def chunk_size(recipe: TeacherRecipe, spec: DataSpec, num_teachers: int, device: torch.device) -> int:
    """Teachers per chunk, from public numbers and the kind of device: never from the number of workers or ranks.

    On a CPU small networks are bound by the fixed cost of a step and want large chunks, large ones fall out of the
    cache: the size that one worker would finish first with where one is enough, else the one for 4 and 8 workers. On a
    GPU as many as fill it.
    """
    if recipe.chunk is not None:
        return min(recipe.chunk, num_teachers)
    if device.type != "cpu":
        return min(256, num_teachers)

    cost = network_cost(recipe, spec)

    def seconds(size: int, *workers: int) -> float:
        rounds = sum(w * math.ceil(math.ceil(num_teachers / size) / w) for w in workers)
        return recipe.steps * rounds * step_seconds(recipe, cost, size)

    sizes = range(1, min(LARGEST_CHUNK, num_teachers) + 1)
    alone = min(sizes, key=lambda size: seconds(size, 1))
    return alone if seconds(alone, 1) < WORTH_PROCESSES else min(sizes, key=lambda size: seconds(size, 4, 8))


def step_seconds(recipe: TeacherRecipe, cost: tuple[int, int], size: int) -> float:
    """A core's estimated time for one step of ``size`` stacked teachers. ``cost``: the network's."""
    parameters, products = cost
    spilled = 1 + max(0.0, size * parameters / CACHE - 1) / 4
    one = 3 * products * recipe.batch_size / MULTIPLICATIONS_PER_SECOND + parameters / UPDATES_PER_SECOND
    return STEP_SECONDS + size * one * spilled


def network_cost(recipe: TeacherRecipe, spec: DataSpec) -> tuple[int, int]:
    """The number of parameters, and of multiplications in one forward pass; counted on one blank point.

    (On the meta device nothing would be computed, but its first use imports a thousand modules: three seconds.)
    """
    products = 0

    def count(layer: nn.Module, _: object, out: Tensor) -> None:
        nonlocal products
        if isinstance(layer, nn.Linear | nn.Conv2d):
            products += out.numel() * layer.weight[0].numel()

    with torch.random.fork_rng(devices=[]), torch.no_grad(), one_thread():
        module = networks.build(recipe.network, spec.input_shape, spec.num_classes, **recipe.options).eval()
        for layer in module.modules():
            layer.register_forward_hook(count)
        module(torch.zeros(1, *spec.input_shape))
    return networks.num_parameters(module), products


def choose_backend(recipe: TeacherRecipe, spec: DataSpec, grouping: list[range], device: torch.device) -> str:
    """The measured rule behind ``backend=auto`` (benchmarks/README.md)."""
    if recipe.backend != "auto":
        return recipe.backend
    work = recipe.steps * len(grouping) * step_seconds(recipe, network_cost(recipe, spec), len(grouping[0]))
    parallel = device.type == "cpu" and os.name == "posix" and num_workers(recipe) > 1 and len(grouping) > 1
    worth = WORTH_PROCESSES if may_fork() else WORTH_SPAWNING
    return "processes" if parallel and work > worth else "vectorised"


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
    trunk: Trunk | None = None,
    checkpoint_dir: Path | None = None,
    progress: Progress = silent,
    log: Log = silent,
    losses: Losses = silent,
) -> Ensemble:
    """PRIVATE. One teacher per shard, on every rank (torchrun deals the chunks out and shares what they learnt).

    Args:
        private: The private records.
        spec: How they are normalized.
        shards: Which records each teacher learns from.
        recipe: Recipe of the teachers.
        seed: Seed of their streams.
        device: Device of the training.
        trunk: What the recipe's ``start`` learnt from public points; the teachers are then heads over its features.
        checkpoint_dir: A private folder where finished chunks are kept; a run that was stopped goes on from there, to
            the same bits.
        progress: Called with (done, total) teachers; those under way by the share of their steps.
        log: PRIVATE. Takes learning curves.
        losses: PRIVATE. Takes every teacher's loss at a step.

    Raises:
        ValueError: The recipe does not fit the data.
        ChildProcessError: A worker died.
        RuntimeError: Another rank died.
    """
    device = distributed.local_device(torch.device(device))
    recipe.check(spec)
    if recipe.start is not None and trunk is None:
        given = recipe.start.features.name
        raise checks.fail("teacher.start", given, "has no public points to learn from here", "Set teacher.start=null.")
    points = spec
    if trunk is not None and recipe.start is not None:
        private, shards = trunk.shards(
            private, shards, start=recipe.start, augment=recipe.augment, seed=seed, device=device
        )
        spec, recipe = trunk.spec, dataclasses.replace(recipe, start=None, augment=None)
    module = networks.build(recipe.network, spec.input_shape, spec.num_classes, **recipe.options)
    stacked.check_teacher(module, recipe.network)
    teachers_total = shards.num_teachers
    grouping = chunks(teachers_total, chunk_size(recipe, spec, teachers_total, device))
    me = distributed.world()
    owner = [number % me.size for number in range(len(grouping))]
    mine = [number for number in range(len(grouping)) if owner[number] == me.rank]

    params = {
        name: torch.zeros(teachers_total, *p.shape, dtype=recipe.torch_dtype) for name, p in module.named_parameters()
    }
    length = min(POINTS, recipe.steps)
    curves_KP = {name: torch.zeros(teachers_total, length) for name in ("loss", "accuracy")}
    finished, total = 0, sum(len(grouping[number]) for number in mine)
    under_way: dict[int, float] = {}

    def tell(number: int, share: float) -> None:
        under_way[number] = share * len(grouping[number])
        progress(min(total, finished + int(sum(under_way.values()))), total)

    for number, trained in _train_mine(
        private, spec, shards, recipe, seed, device, grouping, mine, checkpoint_dir, tell
    ):
        rows = slice(grouping[number].start, grouping[number].stop)
        for name, parameter in trained.params.items():
            params[name][rows] = parameter
        curves_KP["loss"][rows], curves_KP["accuracy"][rows] = trained.loss_Pk.T, trained.accuracy_Pk.T
        under_way.pop(number, None)
        finished += len(grouping[number])
        progress(min(total, finished + int(sum(under_way.values()))), total)
    owner_K = [owner[number] for number, teachers in enumerate(grouping) for _ in teachers]
    distributed.share_rows(params | {f"curve.{name}": curve for name, curve in curves_KP.items()}, owner_K)
    _refuse_diverged(curves_KP["loss"], recipe)
    _show_curves(curves_KP, recipe.steps, log, losses)
    network = networks.describe(recipe.network, spec.input_shape, spec.num_classes, **recipe.options)
    return Ensemble(network, params, shards.mask_KS.any(1), points, trunk)


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
    tell: Callable[[int, float], object],
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
    backend = choose_backend(recipe, spec, grouping, device)
    if backend == "processes":
        if device.type != "cpu":
            raise checks.fail("backend", backend, f"needs device=cpu, not {device}", "Use backend=vectorised.")
        done = train_chunks(private, spec, shards, recipe, seed, grouping, todo, num_workers(recipe), tell)
    else:
        done = _train_here(private, spec, shards, recipe, seed, device, grouping, todo, backend, tell)
    for number, trained in done:
        if kept:
            kept.save(gather_chunk(private, shards, grouping[number]), trained)
        yield number, trained


def _train_here(
    private: PrivateData,
    spec: DataSpec,
    shards: Shards,
    recipe: TeacherRecipe,
    seed: int,
    device: torch.device,
    grouping: list[range],
    todo: list[int],
    backend: str,
    tell: Callable[[int, float], object],
) -> Iterator[tuple[int, Trained]]:
    """Chunks in this process, by one thread where there are several teachers.

    Sums are split among threads, so that another number of them (torchrun gives each rank one) would give other bits.
    """
    method = train_loop if backend == "loop" else train_stacked
    for number in todo:
        chunk = gather_chunk(private, shards, grouping[number])
        with one_thread(device.type == "cpu" and shards.num_teachers > 1):
            trained = method(chunk, spec, recipe, seed, device, functools.partial(tell, number))
        yield number, trained


def _refuse_diverged(loss_KP: Tensor, recipe: TeacherRecipe) -> None:
    """Raise ValueError where no teacher has learnt anything. One that has not may be a single record's doing."""
    if not bool(loss_KP[:, -1].isfinite().any()):
        fix = "Lower teacher.learning_rate."
        raise checks.fail("teacher.learning_rate", recipe.learning_rate, "all teachers diverged", fix)


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


class Checkpoints:
    """A folder of chunks, each file named by what decides its result (records, recipe, seed): a stale one is not found.

    Args:
        folder: PRIVATE. The folder for the files.
        recipe: Recipe of the teachers.
        seed: Seed of their training.
    """

    def __init__(self, folder: Path, recipe: TeacherRecipe, seed: int) -> None:
        self.folder = private_folder(Path(folder))
        self.decides = json.dumps([recipe.configuration(), seed], sort_keys=True)

    def _path(self, chunk: Chunk) -> Path:
        state = hashlib.sha256(self.decides.encode())
        state.update(f"{chunk.first} {tuple(chunk.x_kS.shape)} {chunk.x_kS.dtype}".encode())
        for tensor in (chunk.x_kS, chunk.y_kS, chunk.size_k):
            state.update(content(tensor))
        return self.folder / f"chunk_{chunk.first:05d}_{state.hexdigest()[:32]}.safetensors"

    def load(self, chunk: Chunk) -> Trained | None:
        """The trained chunk, or None; a damaged file is trained again rather than trusted."""
        path = self._path(chunk)
        if not path.exists():
            return None
        try:
            tensors = read_tensors(path)
            loss, accuracy = tensors.pop("curve.loss"), tensors.pop("curve.accuracy")
        except (ValueError, KeyError):
            return None
        return Trained(tensors, loss, accuracy)

    def save(self, chunk: Chunk, trained: Trained) -> None:
        """Write a chunk beside and rename it: a run killed here leaves no half a chunk."""
        tensors = trained.params | {"curve.loss": trained.loss_Pk, "curve.accuracy": trained.accuracy_Pk}
        with replacing(self._path(chunk)) as temporary:
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, temporary)
