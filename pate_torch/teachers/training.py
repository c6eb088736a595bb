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
from pate_torch.core.progress import Log, Progress, do_nothing
from pate_torch.privacy.records import DataSpec, PrivateRecords, Shards
from pate_torch.teachers import distributed, launch, stacked
from pate_torch.teachers.engine import CURVE_POINTS, Chunk, TrainedChunk, gather_chunk, train_stacked
from pate_torch.teachers.ensemble import TeacherEnsemble
from pate_torch.teachers.independence import Trial
from pate_torch.teachers.recipe import TeacherRecipe
from pate_torch.teachers.trunk import Trunk
from pate_torch.teachers.workers import can_fork, train_chunks

__all__ = ["TeacherRecipe", "train"]

LossesCallback = Callable[[int, Tensor], None]
"""PRIVATE. Called as on_losses(step, loss_K)."""

MIN_SECONDS_FOR_SPAWN = 5000
"""Stacked steps above which worker processes pay that import torch anew."""


def choose_backend(recipe: TeacherRecipe, launches: list[range], device: torch.device) -> str:
    """The rule behind ``backend=auto``, for the launches that are planned."""
    if recipe.backend != "auto":
        return recipe.backend
    is_parallel = device.type == "cpu" and os.name == "posix" and get_num_workers(recipe) > 1 and len(launches) > 1
    min_seconds = launch.MIN_SECONDS_FOR_FORK if can_fork() else MIN_SECONDS_FOR_SPAWN
    return "processes" if is_parallel and recipe.steps * len(launches) > min_seconds else "vectorized"


def get_num_workers(recipe: TeacherRecipe) -> int:
    """Worker processes of this rank: as asked, else its share of the cores this process may use."""
    if recipe.workers is not None:
        return recipe.workers
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // distributed.get_world().local_size)


def train(
    private: PrivateRecords,
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
    on_losses: LossesCallback = do_nothing,
    on_trial: Callable[[Trial], object] = do_nothing,
) -> TeacherEnsemble:
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
        on_losses: PRIVATE. Takes every teacher's loss at a step.
        on_trial: PRIVATE. Takes one of the teachers that rank 0 trained, drawn at random; there is none where there is
            one teacher in all.

    Raises:
        ValueError: The recipe does not fit the data.
        ChildProcessError: A worker died.
        RuntimeError: Another rank died.
    """
    device = torch.device(device)
    recipe.check(spec)
    if recipe.start is not None and trunk is None:
        recipe_name = recipe.start.features.name
        raise checks.error(
            "teacher.start", recipe_name, "has no public points to learn from here", "Set teacher.start=null."
        )
    input_spec = spec
    if trunk is not None and recipe.start is not None:
        private, shards = trunk.encode_shards(
            private, shards, start=recipe.start, augment=recipe.augment, seed=seed, device=device
        )
        spec, recipe = trunk.spec, dataclasses.replace(recipe, start=None, augment=None)
    module = networks.build(recipe.network, spec.input_shape, spec.num_classes, **recipe.options)
    stacked.check_teacher(module, recipe.network)
    total = shards.num_teachers
    ranks, groups = distributed.get_world(), launch.split_groups(total)
    owner = launch.assign_owners(len(groups), ranks.size)
    own_groups = [group for group, rank in zip(groups, owner, strict=True) if rank == ranks.rank]
    length = min(CURVE_POINTS, recipe.steps)
    params = {name: torch.zeros(total, *p.shape, dtype=recipe.torch_dtype) for name, p in module.named_parameters()}
    curves_KP = {name: torch.zeros(total, length) for name in ("loss", "accuracy")}
    rows_K = params | {f"curve.{name}": curve_KP for name, curve_KP in curves_KP.items()}
    done, num_own, partial_by_launch = 0, sum(map(len, own_groups)), dict[range, float]()
    launches: list[range] = []

    def report_share(teachers: range, share: float) -> None:
        partial_by_launch[teachers] = share * len(teachers)
        progress(min(num_own, done + int(sum(partial_by_launch.values()))), num_own)

    for teachers, result in _train_own_groups(
        private, spec, shards, recipe, seed, device, own_groups, checkpoint_dir, report_share, launches
    ):
        for name, value in result.to_rows().items():
            rows_K[name][teachers.start : teachers.stop] = value
        partial_by_launch.pop(teachers, None)
        done += len(teachers)
        progress(min(num_own, done + int(sum(partial_by_launch.values()))), num_own)
    distributed.broadcast_rows(rows_K, [rank for group, rank in zip(groups, owner, strict=True) for _ in group])
    _check_converged(curves_KP["loss"], recipe)
    _log_curves(curves_KP, recipe.steps, log, on_losses)
    network = networks.describe(recipe.network, spec.input_shape, spec.num_classes, **recipe.options)
    ensemble = TeacherEnsemble(network, params, shards.mask_KS.any(1), input_spec, trunk, recipe.memory_gib)
    if total > 1 and ranks.rank == 0:
        on_trial(Trial.draw(ensemble, launches, private, spec, shards, recipe, seed, device))
    return ensemble


def _train_own_groups(
    private: PrivateRecords,
    spec: DataSpec,
    shards: Shards,
    recipe: TeacherRecipe,
    seed: int,
    device: torch.device,
    groups: list[range],
    checkpoint_dir: Path | None,
    report_share: Callable[[range, float], object],
    launches: list[range],
) -> Iterator[tuple[range, TrainedChunk]]:
    """This rank's teachers: the groups kept from an interrupted run first, then the others, launch by launch.

    ``launches`` gets the launches (of the groups that are kept, where there are no others).
    """
    checkpoints = Checkpoints(checkpoint_dir, recipe, seed) if checkpoint_dir is not None else None
    pending = []
    for group in groups:
        result = checkpoints.load(gather_chunk(private, shards, group)) if checkpoints else None
        if result is None:
            pending.append(group)
        else:
            yield group, result
    cost = launch.compute_network_cost(recipe.network, recipe.options, spec)
    size = launch.compute_train_size(recipe, cost, shards.num_teachers, device)
    planned_launches = launch.plan_launches(pending, size)
    launches += planned_launches or launch.plan_launches(groups, size)
    backend = choose_backend(recipe, planned_launches, device)
    if backend == "processes":
        if device.type != "cpu":
            raise checks.error("backend", backend, f"needs device=cpu, not {device}", "Use backend=vectorized.")
        results = train_chunks(
            private, spec, shards, recipe, seed, planned_launches, get_num_workers(recipe), report_share
        )
    else:
        results = _train_in_process(private, spec, shards, recipe, seed, device, planned_launches, report_share)
    parts: dict[range, dict[int, TrainedChunk]] = {group: {} for group in pending}
    for teachers, result in results:
        for group in pending:
            overlap = range(max(group.start, teachers.start), min(group.stop, teachers.stop))
            if not overlap or not checkpoints:
                continue
            parts[group][overlap.start] = result.select(
                slice(overlap.start - teachers.start, overlap.stop - teachers.start)
            )
            if sum(map(len, parts[group].values())) == len(group):
                group_result = TrainedChunk.merge([part for _, part in sorted(parts.pop(group).items())])
                checkpoints.save(gather_chunk(private, shards, group), group_result)
        yield teachers, result


def _train_in_process(
    private: PrivateRecords,
    spec: DataSpec,
    shards: Shards,
    recipe: TeacherRecipe,
    seed: int,
    device: torch.device,
    launches: list[range],
    report_share: Callable[[range, float], object],
) -> Iterator[tuple[range, TrainedChunk]]:
    """Launches in this process, by one thread where there are several teachers.

    Sums are split among threads, so that another number of them (torchrun gives each rank one) would give other bits.
    """
    for teachers in launches:
        chunk = gather_chunk(private, shards, teachers)
        with single_thread_mode(device.type == "cpu" and shards.num_teachers > 1):
            result = train_stacked(chunk, spec, recipe, seed, device, functools.partial(report_share, teachers))
        yield teachers, result


def _check_converged(loss_KP: Tensor, recipe: TeacherRecipe) -> None:
    """Raise ValueError where no teacher has learnt anything. One that has not may be a single record's doing."""
    if not bool(loss_KP[:, -1].isfinite().any()):
        fix = "Lower teacher.learning_rate."
        raise checks.error("teacher.learning_rate", recipe.learning_rate, "all teachers diverged", fix)


def _log_curves(curves_KP: dict[str, Tensor], steps: int, log: Log, on_losses: LossesCallback) -> None:
    points = curves_KP["loss"].shape[1]
    for point in range(points):
        step = (point + 1) * steps // points
        for name, curve_KP in curves_KP.items():
            value_K = curve_KP[:, point]
            log(f"teachers/{name}_mean", float(value_K.mean()), step)
            log(f"teachers/{name}_min", float(value_K.min()), step)
            log(f"teachers/{name}_max", float(value_K.max()), step)
        on_losses(step, curves_KP["loss"][:, point])


class Checkpoints:
    """A folder of groups, each file named by what decides its result (records, recipe, seed): a stale one is not found.

    Args:
        folder: PRIVATE. The folder for the files.
        recipe: Recipe of the teachers.
        seed: Seed of their training.
    """

    def __init__(self, folder: Path, recipe: TeacherRecipe, seed: int) -> None:
        self.folder = create_private_folder(Path(folder))
        self.key_text = json.dumps([recipe.to_configuration(), seed], sort_keys=True)

    def _get_path(self, chunk: Chunk) -> Path:
        state = hashlib.sha256(self.key_text.encode())
        state.update(f"{chunk.first} {tuple(chunk.x_kS.shape)} {chunk.x_kS.dtype}".encode())
        for tensor in (chunk.x_kS, chunk.y_kS, chunk.size_k):
            state.update(get_tensor_bytes(tensor))
        return self.folder / f"chunk_{chunk.first:05d}_{state.hexdigest()[:32]}.safetensors"

    def load(self, chunk: Chunk) -> TrainedChunk | None:
        """The trained chunk, or None; a damaged file is trained again rather than trusted."""
        path = self._get_path(chunk)
        if not path.exists():
            return None
        try:
            tensors = read_tensors(path)
            loss, accuracy = tensors.pop("curve.loss"), tensors.pop("curve.accuracy")
        except (ValueError, KeyError):
            return None
        return TrainedChunk(tensors, loss, accuracy)

    def save(self, chunk: Chunk, result: TrainedChunk) -> None:
        """Write a chunk beside and rename it: a run killed here leaves no half a chunk."""
        tensors = result.params | {"curve.loss": result.loss_Pk, "curve.accuracy": result.accuracy_Pk}
        with atomic_replacement(self._get_path(chunk)) as temporary:
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, temporary)
