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
from pate_torch.core.device import single_thread_mode
from pate_torch.core.files import atomic_replacement, create_private_folder, get_tensor_bytes, read_tensors
from pate_torch.core.progress import Log, Progress, do_nothing
from pate_torch.privacy.records import DataSpec, PrivateRecords, Shards
from pate_torch.teachers import distributed, launch, stacked
from pate_torch.teachers.engine import CURVE_POINTS, CURVES, TrainedChunk, TrainingTask, train_stacked
from pate_torch.teachers.ensemble import TeacherEnsemble
from pate_torch.teachers.independence import Trial
from pate_torch.teachers.recipe import TeacherRecipe
from pate_torch.teachers.trunk import Trunk
from pate_torch.teachers.workers import can_fork, train_chunks

__all__ = ["TeacherRecipe", "train"]

LossesCallback = Callable[[int, Tensor], None]
"""PRIVATE. Called as on_losses(step, loss_K)."""

MIN_STEPS_FOR_FORK, MIN_STEPS_FOR_SPAWN = 600, 5000
"""Stacked steps above which worker processes pay: copies of this process (half a second of one core), and those that
import torch anew."""


def choose_backend(recipe: TeacherRecipe, launches: list[range], device: torch.device) -> str:
    """The rule behind ``backend=auto``, for the launches that are planned."""
    if recipe.backend != "auto":
        return recipe.backend
    is_parallel = device.type == "cpu" and os.name == "posix" and get_num_workers(recipe) > 1 and len(launches) > 1
    min_steps = MIN_STEPS_FOR_FORK if can_fork() else MIN_STEPS_FOR_SPAWN
    return "processes" if is_parallel and recipe.steps * len(launches) > min_steps else "vectorized"


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
        spec: Facts of the records, by which they are normalized.
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
        ValueError: The recipe does not fit the data, or the launches do not fit into a GPU.
        ChildProcessError: A worker died.
        RuntimeError: Another rank died.
    """
    recipe.check(spec)
    task = _make_task(private, spec, shards, recipe, seed, torch.device(device), trunk)
    recipe, num_teachers = task.recipe, shards.num_teachers
    module = networks.build(recipe.network, task.spec.input_shape, spec.num_classes, **recipe.options)
    stacked.check_teacher(module, recipe.network)
    rows_K = {
        name: torch.zeros(num_teachers, *p.shape, dtype=recipe.torch_dtype) for name, p in module.named_parameters()
    }
    curves_KP = {name: torch.zeros(num_teachers, min(CURVE_POINTS, recipe.steps)) for name in CURVES}
    launches = _train_own_groups(task, rows_K | curves_KP, checkpoint_dir, progress)
    distributed.broadcast_rows(rows_K | curves_KP, _get_owners(num_teachers))
    _check_converged(curves_KP["curve.loss"], recipe)
    _log_curves(curves_KP, recipe.steps, log, on_losses)
    network = networks.describe(recipe.network, task.spec.input_shape, spec.num_classes, **recipe.options)
    ensemble = TeacherEnsemble(network, rows_K, task.shards.mask_KS.any(1), spec, trunk)
    if num_teachers > 1 and distributed.is_main():
        on_trial(Trial.draw(ensemble, launches, task))
    return ensemble


def _make_task(
    private: PrivateRecords,
    spec: DataSpec,
    shards: Shards,
    recipe: TeacherRecipe,
    seed: int,
    device: torch.device,
    trunk: Trunk | None,
) -> TrainingTask:
    """What the teachers are trained on: the records themselves, or the trunk's features of them and of their copies."""
    if recipe.start is None:
        return TrainingTask(private, spec, shards, recipe, seed, device)
    if trunk is None:
        problem, fix = "has no public points to learn from here", "Set teacher.start=null."
        raise checks.error("teacher.start", recipe.start.features.name, problem, fix)
    private, shards = trunk.encode_shards(
        private, shards, start=recipe.start, augment=recipe.augment, seed=seed, device=device
    )
    head_recipe = dataclasses.replace(recipe, start=None, augment=None)
    return TrainingTask(private, trunk.spec, shards, head_recipe, seed, device)


def _get_owners(num_teachers: int) -> list[int]:
    """The rank of each teacher."""
    groups = launch.split_groups(num_teachers)
    owners = launch.assign_owners(len(groups), distributed.get_world().size)
    return [rank for group, rank in zip(groups, owners, strict=True) for _ in group]


def _train_own_groups(
    task: TrainingTask, rows_K: dict[str, Tensor], checkpoint_dir: Path | None, progress: Progress
) -> list[range]:
    """Fill the rows of this rank's teachers: groups kept from an interrupted run first, then the others by launches.

    Returns:
        The launches (of the groups that were kept, if there are no others).
    """
    rank, owners, total = distributed.get_world().rank, _get_owners(task.shards.num_teachers), task.shards.num_teachers
    own_groups = [group for group in launch.split_groups(total) if owners[group.start] == rank]
    num_own, done, share_by_launch = sum(map(len, own_groups)), set[int](), dict[range, float]()
    checkpoints = None if checkpoint_dir is None else Checkpoints(checkpoint_dir, task, rows_K)

    def report_share(teachers: range, share: float) -> None:
        share_by_launch[teachers] = share * len(teachers)
        progress(min(num_own, len(done) + int(sum(share_by_launch.values()))), num_own)

    def report_finished(teachers: range) -> None:
        done.update(teachers)
        report_share(teachers, 0)

    pending = []
    for group in own_groups:
        if checkpoints is not None and checkpoints.load(group):
            report_finished(group)
        else:
            pending.append(group)
    num_parameters = sum(value[0].numel() for name, value in rows_K.items() if name not in CURVES)
    size = launch.compute_train_size(task.recipe, num_parameters, task.spec, total, task.device)
    for teachers, result in _train_launches(task, launch.plan_launches(pending, size), report_share):
        for name, value in result.to_rows().items():
            rows_K[name][teachers.start : teachers.stop] = value
        done.update(teachers)
        for group in pending:
            is_touched = group.start < teachers.stop and teachers.start < group.stop
            if checkpoints is not None and is_touched and done.issuperset(group):
                checkpoints.save(group)
        report_finished(teachers)
    return launch.plan_launches(pending or own_groups, size)


def _train_launches(
    task: TrainingTask, launches: list[range], report_share: Callable[[range, float], object]
) -> Iterator[tuple[range, TrainedChunk]]:
    """Train launches in worker processes, or in this process by one thread where there are several teachers."""
    backend = choose_backend(task.recipe, launches, task.device)
    if backend == "processes":
        if task.device.type != "cpu":
            raise checks.error("backend", backend, f"needs device=cpu, not {task.device}", "Use backend=vectorized.")
        yield from train_chunks(task, launches, get_num_workers(task.recipe), report_share)
        return
    for teachers in launches:
        chunk, report = task.gather_chunk(teachers), functools.partial(report_share, teachers)
        # Sums are split among threads, so that another number of them (torchrun gives each rank one) would give other
        # bits.
        with single_thread_mode(task.device.type == "cpu" and task.shards.num_teachers > 1):
            try:
                result = train_stacked(chunk, task.spec, task.recipe, task.seed, task.device, report)
            except torch.OutOfMemoryError as error:
                problem = f"{len(teachers)} teachers at once do not fit into the memory of the GPU"
                raise checks.error(
                    "teacher.chunk", task.recipe.chunk, problem, "Set it or teacher.batch_size lower."
                ) from error
        yield teachers, result


def _check_converged(loss_KP: Tensor, recipe: TeacherRecipe) -> None:
    """Raise ValueError where no teacher has learnt anything. One that has not may be a single record's doing."""
    if not bool(loss_KP[:, -1].isfinite().any()):
        fix = "Lower teacher.learning_rate."
        raise checks.error("teacher.learning_rate", recipe.learning_rate, "all teachers diverged", fix)


def _log_curves(curves_KP: dict[str, Tensor], steps: int, log: Log, on_losses: LossesCallback) -> None:
    points = curves_KP["curve.loss"].shape[1]
    for point in range(points):
        step = (point + 1) * steps // points
        for name, curve_KP in curves_KP.items():
            value_K = curve_KP[:, point]
            for statistic, value in (("mean", value_K.mean()), ("min", value_K.min()), ("max", value_K.max())):
                log(f"teachers/{name.removeprefix('curve.')}_{statistic}", float(value), step)
        on_losses(step, curves_KP["curve.loss"][:, point])


class Checkpoints:
    """A folder of groups, each file named by what decides its result (records, recipe, seed): a stale one is not found.

    Args:
        folder: PRIVATE. The folder for the files.
        task: What the teachers are trained on.
        rows_K: PRIVATE. Everything that is known of every teacher, [K, ...] each.
    """

    def __init__(self, folder: Path, task: TrainingTask, rows_K: dict[str, Tensor]) -> None:
        self.folder, self.task, self.rows_K = create_private_folder(Path(folder)), task, rows_K
        self.key_text = json.dumps([task.recipe.to_configuration(), task.seed], sort_keys=True)

    def _get_path(self, group: range) -> Path:
        chunk = self.task.gather_chunk(group)
        state = hashlib.sha256(self.key_text.encode())
        state.update(f"{chunk.first} {tuple(chunk.x_kS.shape)} {chunk.x_kS.dtype}".encode())
        for tensor in (chunk.x_kS, chunk.y_kS, chunk.size_k):
            state.update(get_tensor_bytes(tensor))
        return self.folder / f"chunk_{chunk.first:05d}_{state.hexdigest()[:32]}.safetensors"

    def _get_rows(self, group: range) -> dict[str, Tensor]:
        return {name: value[group.start : group.stop] for name, value in self.rows_K.items()}

    def load(self, group: range) -> bool:
        """Fill the rows of a kept group; False where it is to be trained, also where its file is damaged."""
        try:
            tensors = read_tensors(self._get_path(group))
        except ValueError:
            return False
        rows = self._get_rows(group)
        if {name: value.shape for name, value in tensors.items()} != {name: row.shape for name, row in rows.items()}:
            return False
        for name, row in rows.items():
            row.copy_(tensors[name])
        return True

    def save(self, group: range) -> None:
        """Write the rows of a group beside and rename the file: a run killed here leaves no half a group."""
        with atomic_replacement(self._get_path(group)) as temporary:
            save_file({name: row.contiguous() for name, row in self._get_rows(group).items()}, temporary)
