"""Train K teachers on K disjoint shards, all at once where the machine allows it."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from pate_torch import networks
from pate_torch.core import checks
from pate_torch.core.files import atomic_replacement, create_private_folder, get_tensor_bytes, read_tensors
from pate_torch.core.parallel import single_thread_mode
from pate_torch.protocols import Log, Progress, do_nothing
from pate_torch.teachers import distributed, launch, stacked
from pate_torch.teachers.engine import CURVE_POINTS, Chunk, Trained, gather_chunk, train_stacked
from pate_torch.teachers.ensemble import Ensemble
from pate_torch.teachers.independence import Trial
from pate_torch.teachers.recipe import TeacherRecipe
from pate_torch.teachers.trunk import Trunk
from pate_torch.teachers.workers import may_fork, train_chunks
from pate_torch.types import DataSpec, PrivateData, Shards

__all__ = ["TeacherRecipe", "train"]

Losses = Callable[[int, Tensor], None]
"""PRIVATE. Called as losses(step, loss_K)."""

WORTH_SPAWNING = 5000
"""Stacked steps above which worker processes pay that import torch anew."""


def choose_backend(recipe: TeacherRecipe, planned: list[range], device: torch.device) -> str:
    """The rule behind ``backend=auto``, for the launches that are planned."""
    if recipe.backend != "auto":
        return recipe.backend
    parallel = device.type == "cpu" and os.name == "posix" and num_workers(recipe) > 1 and len(planned) > 1
    worth = launch.WORTH_PROCESSES if may_fork() else WORTH_SPAWNING
    return "processes" if parallel and recipe.steps * len(planned) > worth else "vectorised"


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
    progress: Progress = do_nothing,
    log: Log = do_nothing,
    losses: Losses = do_nothing,
    try_again: Callable[[Trial], object] = do_nothing,
) -> Ensemble:
    """PRIVATE. One teacher per shard, on every rank (torchrun deals groups of them out and shares what they learnt).

    Args:
        private: The private records.
        spec: How they are normalized.
        shards: Which records each teacher learns from.
        recipe: Recipe of the teachers.
        seed: Seed of their streams.
        device: Device of the training.
        trunk: What the recipe's ``start`` learnt from public points; the teachers are then heads over its features.
        checkpoint_dir: A private folder where finished groups are kept; a run that was stopped goes on from there, on a
            CPU to the same bits.
        progress: Called with (done, total) teachers; those under way by the share of their steps.
        log: PRIVATE. Takes learning curves.
        losses: PRIVATE. Takes every teacher's loss at a step.
        try_again: PRIVATE. Takes one of the teachers that rank 0 trained, drawn at random; there is none where there is
            one teacher in all.

    Raises:
        ValueError: The recipe does not fit the data.
        ChildProcessError: A worker died.
        RuntimeError: Another rank died.
    """
    device = torch.device(device)
    recipe.check(spec)
    if recipe.start is not None and trunk is None:
        given = recipe.start.features.name
        raise checks.error("teacher.start", given, "has no public points to learn from here", "Set teacher.start=null.")
    input_spec = spec
    if trunk is not None and recipe.start is not None:
        private, shards = trunk.shards(
            private, shards, start=recipe.start, augment=recipe.augment, seed=seed, device=device
        )
        spec, recipe = trunk.spec, dataclasses.replace(recipe, start=None, augment=None)
    module = networks.build(recipe.network, spec.input_shape, spec.num_classes, **recipe.options)
    stacked.check_teacher(module, recipe.network)
    total = shards.num_teachers
    me, groups = distributed.world(), launch.groups(total)
    owner = launch.owners(len(groups), me.size)
    mine = [group for group, rank in zip(groups, owner, strict=True) if rank == me.rank]
    length = min(CURVE_POINTS, recipe.steps)
    params = {name: torch.zeros(total, *p.shape, dtype=recipe.torch_dtype) for name, p in module.named_parameters()}
    curves_KP = {name: torch.zeros(total, length) for name in ("loss", "accuracy")}
    rows_K = params | {f"curve.{name}": curve_KP for name, curve_KP in curves_KP.items()}
    done, wanted, under_way = 0, sum(map(len, mine)), dict[range, float]()
    launched: list[range] = []

    def tell(teachers: range, share: float) -> None:
        under_way[teachers] = share * len(teachers)
        progress(min(wanted, done + int(sum(under_way.values()))), wanted)

    for teachers, trained in _train_mine(
        private, spec, shards, recipe, seed, device, mine, checkpoint_dir, tell, launched
    ):
        for name, value in trained.rows().items():
            rows_K[name][teachers.start : teachers.stop] = value
        under_way.pop(teachers, None)
        done += len(teachers)
        progress(min(wanted, done + int(sum(under_way.values()))), wanted)
    distributed.share_rows(rows_K, [rank for group, rank in zip(groups, owner, strict=True) for _ in group])
    _refuse_diverged(curves_KP["loss"], recipe)
    _show_curves(curves_KP, recipe.steps, log, losses)
    network = networks.describe(recipe.network, spec.input_shape, spec.num_classes, **recipe.options)
    ensemble = Ensemble(network, params, shards.mask_KS.any(1), input_spec, trunk, recipe.memory_gib)
    if total > 1 and me.rank == 0:
        try_again(Trial.drawn(ensemble, launched, private, spec, shards, recipe, seed, device))
    return ensemble


def _train_mine(
    private: PrivateData,
    spec: DataSpec,
    shards: Shards,
    recipe: TeacherRecipe,
    seed: int,
    device: torch.device,
    groups: list[range],
    checkpoint_dir: Path | None,
    tell: Callable[[range, float], object],
    launched: list[range],
) -> Iterator[tuple[range, Trained]]:
    """This rank's teachers: the groups kept from an interrupted run first, then the others, launch by launch.

    ``launched`` gets the launches (of the groups that are kept, where there are no others).
    """
    kept = Checkpoints(checkpoint_dir, recipe, seed) if checkpoint_dir is not None else None
    todo = []
    for group in groups:
        trained = kept.load(gather_chunk(private, shards, group)) if kept else None
        if trained is None:
            todo.append(group)
        else:
            yield group, trained
    cost = launch.network_cost(recipe.network, recipe.options, spec)
    size = launch.train_size(recipe, cost, shards.num_teachers, device)
    planned = launch.launches(todo, size)
    launched += planned or launch.launches(groups, size)
    backend = choose_backend(recipe, planned, device)
    if backend == "processes":
        if device.type != "cpu":
            raise checks.error("backend", backend, f"needs device=cpu, not {device}", "Use backend=vectorised.")
        ended = train_chunks(private, spec, shards, recipe, seed, planned, num_workers(recipe), tell)
    else:
        ended = _train_here(private, spec, shards, recipe, seed, device, planned, tell)
    parts: dict[range, dict[int, Trained]] = {group: {} for group in todo}
    for teachers, trained in ended:
        for group in todo:
            own = range(max(group.start, teachers.start), min(group.stop, teachers.stop))
            if not own or not kept:
                continue
            parts[group][own.start] = trained.take(slice(own.start - teachers.start, own.stop - teachers.start))
            if sum(map(len, parts[group].values())) == len(group):
                whole = Trained.joined([part for _, part in sorted(parts.pop(group).items())])
                kept.save(gather_chunk(private, shards, group), whole)
        yield teachers, trained


def _train_here(
    private: PrivateData,
    spec: DataSpec,
    shards: Shards,
    recipe: TeacherRecipe,
    seed: int,
    device: torch.device,
    planned: list[range],
    tell: Callable[[range, float], object],
) -> Iterator[tuple[range, Trained]]:
    """Launches in this process, by one thread where there are several teachers.

    Sums are split among threads, so that another number of them (torchrun gives each rank one) would give other bits.
    """
    for teachers in planned:
        chunk = gather_chunk(private, shards, teachers)
        with single_thread_mode(device.type == "cpu" and shards.num_teachers > 1):
            trained = train_stacked(chunk, spec, recipe, seed, device, functools.partial(tell, teachers))
        yield teachers, trained


def _refuse_diverged(loss_KP: Tensor, recipe: TeacherRecipe) -> None:
    """Raise ValueError where no teacher has learnt anything. One that has not may be a single record's doing."""
    if not bool(loss_KP[:, -1].isfinite().any()):
        fix = "Lower teacher.learning_rate."
        raise checks.error("teacher.learning_rate", recipe.learning_rate, "all teachers diverged", fix)


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
    """A folder of groups, each file named by what decides its result (records, recipe, seed): a stale one is not found.

    Args:
        folder: PRIVATE. The folder for the files.
        recipe: Recipe of the teachers.
        seed: Seed of their training.
    """

    def __init__(self, folder: Path, recipe: TeacherRecipe, seed: int) -> None:
        self.folder = create_private_folder(Path(folder))
        self.decides = json.dumps([recipe.configuration(), seed], sort_keys=True)

    def _path(self, chunk: Chunk) -> Path:
        state = hashlib.sha256(self.decides.encode())
        state.update(f"{chunk.first} {tuple(chunk.x_kS.shape)} {chunk.x_kS.dtype}".encode())
        for tensor in (chunk.x_kS, chunk.y_kS, chunk.size_k):
            state.update(get_tensor_bytes(tensor))
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
        with atomic_replacement(self._path(chunk)) as temporary:
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, temporary)
