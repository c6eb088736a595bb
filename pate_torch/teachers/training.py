"""Train K teachers on K disjoint shards, all at once where the machine allows it.

Teachers are dealt to ranks, and written to checkpoints, by groups of 16. How many a device trains at once (a launch)
follows from public numbers alone: the size of the network and of its input, the batch and the kind of device. The
number of records in a shard is private: a launch that followed from it would tell one record to every teacher of the
launch. On a CPU no launch crosses a group, so that teachers are the same to the bit for any number of ranks or workers.
On a GPU a launch takes several of a rank's groups, and teachers are the same to the bit where launches are of equal
size.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from pate_torch import networks
from pate_torch.core import checks
from pate_torch.core.device import single_thread_mode
from pate_torch.core.files import atomic_replacement, create_private_folder, get_tensor_bytes, read_tensors
from pate_torch.core.progress import Log, Progress, Stages, do_nothing
from pate_torch.privacy.records import Dataset, DataSpec, PrivateRecords, Shards
from pate_torch.teachers import distributed, stacked
from pate_torch.teachers.engine import CURVE_POINTS, CURVES, TrainingTask, gather_chunk, train_stacked
from pate_torch.teachers.ensemble import GPU_PIXELS, TeacherEnsemble, count_pixels
from pate_torch.teachers.independence import Trial
from pate_torch.teachers.recipe import TeacherRecipe, Trunk
from pate_torch.teachers.workers import can_fork, train_in_processes

__all__ = ["TeacherRecipe", "train", "train_on_all"]

LossesCallback = Callable[[int, Tensor], None]
"""PRIVATE. Called as on_losses(step, loss_K)."""

GROUP_TEACHERS = 16
"""Teachers that are dealt to one rank and written to one checkpoint."""

CACHE_PARAMETERS = 2_000_000
"""Numbers in the stacked parameters of one launch on a CPU, at most (8 MB of weights, 24 MB of moments)."""

MIN_STEPS_FOR_FORK, MIN_STEPS_FOR_SPAWN = 600, 5000
"""Stacked steps above which worker processes pay: copies of this process (half a second of one core), and processes
that import torch anew."""


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
    """PRIVATE. Train one teacher per shard; under torchrun every rank trains a part, and every rank returns all.

    Args:
        private: The private records.
        spec: Facts of the records, by which the records are normalized.
        shards: Which records each teacher learns from.
        recipe: Recipe of the teachers.
        seed: Seed of the teachers' streams.
        device: Device of the training.
        trunk: The trunk of the recipe's ``start``, over whose features the teachers are heads; None if it has none.
        checkpoint_dir: A private folder for finished groups, from which an interrupted run continues (on a CPU to the
            same bits); None if there are no checkpoints.
        progress: Called with (done, total) teachers; an unfinished launch counts by the share of its steps.
        log: PRIVATE. Called with points of the learning curves.
        on_losses: PRIVATE. Called with every teacher's loss at a step.
        on_trial: PRIVATE. Called on rank 0 with one of its teachers, drawn at random, where there are several teachers.

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
    param_K = {
        name: torch.zeros(num_teachers, *p.shape, dtype=recipe.torch_dtype) for name, p in module.named_parameters()
    }
    curve_KP = {name: torch.zeros(num_teachers, min(CURVE_POINTS, recipe.steps)) for name in CURVES}
    launch_size = compute_launch_size(recipe, networks.count_parameters(module), task.spec, num_teachers, task.device)
    launches = _train_own_groups(task, param_K | curve_KP, launch_size, checkpoint_dir, progress)
    distributed.broadcast_rows(param_K | curve_KP, get_owners(num_teachers, distributed.get_world().size))
    _report_curves(curve_KP, recipe, log, on_losses)
    network = networks.describe(recipe.network, task.spec.input_shape, spec.num_classes, **recipe.options)
    ensemble = TeacherEnsemble(network, param_K, task.shards.mask_KS.any(1), spec, trunk)
    if num_teachers > 1 and distributed.is_main():
        on_trial(Trial.draw(ensemble, launches, task))
    return ensemble


def train_on_all(
    data: Dataset, recipe: TeacherRecipe, *, seed: int, device: torch.device, stages: Stages
) -> TeacherEnsemble:
    """PRIVATE. Train one network on every private record, without privacy, to compare with; an ensemble of one.

    The network is private: it is shown to the owner only, or belongs to a public benchmark. Batches have up to 128
    records. Every rank of a torchrun takes part.
    """
    count = len(data.private)
    single_shard = Shards(torch.arange(count)[None], torch.ones(1, count, dtype=torch.bool), "replace_one")
    recipe = dataclasses.replace(recipe, batch_size=max(recipe.batch_size, min(128, count)))
    trunk = recipe.learn_trunk(data.pool, data.spec, seed, device, stages)
    progress = stages("Training a model without privacy")
    return train(
        data.private, data.spec, single_shard, recipe, seed=seed, device=device, trunk=trunk, progress=progress
    )


def _make_task(
    private: PrivateRecords,
    spec: DataSpec,
    shards: Shards,
    recipe: TeacherRecipe,
    seed: int,
    device: torch.device,
    trunk: Trunk | None,
) -> TrainingTask:
    """The task of the private records, or of the trunk's features of them."""
    if recipe.start is not None:
        if trunk is None:
            problem, fix = "has no public points to learn from here", "Set teacher.start=null."
            raise checks.error("teacher.start", recipe.start.features.name, problem, fix)
        private, spec = trunk.encode_shards(private, shards, device), trunk.spec
        recipe = dataclasses.replace(recipe, start=None, augment=None)
    return TrainingTask(private, spec, shards, recipe, seed, device)


# ---- groups and launches --------------------------------------------------------------------------------------------


def split_groups(num_teachers: int) -> list[range]:
    """The teachers of each group."""
    return [range(first, min(first + GROUP_TEACHERS, num_teachers)) for first in range(0, num_teachers, GROUP_TEACHERS)]


def get_owners(num_teachers: int, ranks: int) -> list[int]:
    """The rank of each teacher: neighbors go to one rank, and no rank has more than one group more than another."""
    num_slots = max(
        math.ceil(num_teachers / GROUP_TEACHERS), ranks
    )  # where ranks are more, the first ones have one each
    return [teacher // GROUP_TEACHERS * ranks // num_slots for teacher in range(num_teachers)]


def compute_launch_size(
    recipe: TeacherRecipe, num_parameters: int, spec: DataSpec, num_teachers: int, device: torch.device
) -> int:
    """Number of teachers trained at once: ``recipe.chunk``, or as many as a CPU's cache or a GPU's memory holds."""
    on_cpu = device.type == "cpu"
    max_size = GROUP_TEACHERS if on_cpu else GROUP_TEACHERS * math.ceil(num_teachers / GROUP_TEACHERS)
    if recipe.chunk is not None:
        return min(recipe.chunk, max_size)
    size = CACHE_PARAMETERS // num_parameters if on_cpu else GPU_PIXELS // (recipe.batch_size * count_pixels(spec))
    size -= size % GROUP_TEACHERS if size >= GROUP_TEACHERS else 0
    return max(1, min(size, max_size))


def plan_launches(pending: Sequence[range], size: int) -> list[range]:
    """The launches of the groups that are to be trained: parts of a group, or neighboring groups."""
    if size < GROUP_TEACHERS:
        return [range(k, min(k + size, group.stop)) for group in pending for k in range(group.start, group.stop, size)]
    launches: list[range] = []
    for group in pending:
        if launches and launches[-1].stop == group.start and len(launches[-1]) + GROUP_TEACHERS <= size:
            launches[-1] = range(launches[-1].start, group.stop)
        else:
            launches.append(group)
    return launches


def _train_own_groups(
    task: TrainingTask,
    rows_K: dict[str, Tensor],
    launch_size: int,
    checkpoint_dir: Path | None,
    progress: Progress,
) -> list[range]:
    """Fill the rows of this rank's teachers, from checkpoints first, then by training the other groups in launches.

    Returns:
        The launches (of all own groups, if all of them have checkpoints).
    """
    ranks, num_teachers = distributed.get_world(), task.shards.num_teachers
    owners = get_owners(num_teachers, ranks.size)
    own_groups = [group for group in split_groups(num_teachers) if owners[group.start] == ranks.rank]
    checkpoints = None if checkpoint_dir is None else Checkpoints(checkpoint_dir, task, rows_K)
    pending = [group for group in own_groups if checkpoints is None or not checkpoints.load(group)]
    num_own, share_by_launch = sum(map(len, own_groups)), dict[range, float]()
    finished = {teacher for group in own_groups if group not in pending for teacher in group}

    def report_share(teachers: range, share: float) -> None:
        share_by_launch[teachers] = share * len(teachers)
        progress(min(num_own, len(finished) + int(sum(share_by_launch.values()))), num_own)

    if finished:
        progress(len(finished), num_own)
    for teachers, rows in _train_launches(task, plan_launches(pending, launch_size), rows_K, report_share):
        for name, value in rows.items():
            rows_K[name][teachers.start : teachers.stop] = value
        finished.update(teachers)
        for group in pending:
            is_touched = group.start < teachers.stop and teachers.start < group.stop
            if checkpoints is not None and is_touched and finished.issuperset(group):
                checkpoints.save(group)
        report_share(teachers, 0)
    return plan_launches(pending or own_groups, launch_size)


def _train_launches(
    task: TrainingTask,
    launches: list[range],
    rows_K: dict[str, Tensor],
    report_share: Callable[[range, float], object],
) -> Iterator[tuple[range, dict[str, Tensor]]]:
    """Train launches in worker processes, or in this process by one thread where there are several teachers."""
    if num_workers := count_workers(task.recipe, len(launches), task.device):
        yield from train_in_processes(task, launches, num_workers, rows_K, report_share)
        return
    for teachers in launches:
        chunk = gather_chunk(task.private, task.shards, teachers)
        report = functools.partial(report_share, teachers)
        # Sums are split among threads, so that another number of them (torchrun gives each rank one) would give other
        # bits.
        with single_thread_mode(task.device.type == "cpu" and task.shards.num_teachers > 1):
            try:
                result = train_stacked(chunk, task.spec, task.recipe, task.seed, task.device, report)
            except torch.OutOfMemoryError as error:
                problem = f"{len(teachers)} teachers at once do not fit into the memory of the GPU"
                fix = "Set it or teacher.batch_size lower."
                raise checks.error("teacher.chunk", task.recipe.chunk, problem, fix) from error
        yield teachers, result.params | result.curves


def count_workers(recipe: TeacherRecipe, num_launches: int, device: torch.device) -> int:
    """Number of worker processes: 0 where the recipe has none, or leaves it open and this process is faster alone."""
    if recipe.backend == "processes" and device.type != "cpu":
        raise checks.error("backend", recipe.backend, f"needs device=cpu, not {device}", "Use backend=vectorized.")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    workers = recipe.workers or max(1, cores // distributed.get_world().local_size)
    min_steps = MIN_STEPS_FOR_FORK if can_fork() else MIN_STEPS_FOR_SPAWN
    is_parallel = device.type == "cpu" and os.name == "posix" and workers > 1 and num_launches > 1
    is_faster = is_parallel and recipe.steps * num_launches > min_steps
    return workers if recipe.backend == "processes" or (recipe.backend == "auto" and is_faster) else 0


# ---- results --------------------------------------------------------------------------------------------------------


def _report_curves(curve_KP: dict[str, Tensor], recipe: TeacherRecipe, log: Log, on_losses: LossesCallback) -> None:
    """Log the learning curves, and warn the owner if no teacher has learned anything.

    It is no error: in a small ensemble a single unit can make the last teacher diverge, and whether a run goes on must
    not depend on one unit. A teacher that diverged has one vote, like any other.
    """
    loss_KP = curve_KP["curve.loss"]
    if not bool(loss_KP[:, -1].isfinite().any()):
        message = f"teacher.learning_rate={recipe.learning_rate:g}: all teachers diverged, so their labels are useless."
        warnings.warn(f"{message} Lower teacher.learning_rate. (This message is private, for the owner.)", stacklevel=3)
    num_points = loss_KP.shape[1]
    for point in range(num_points):
        step = (point + 1) * recipe.steps // num_points
        for name, curve in curve_KP.items():
            value_K = curve[:, point]
            for statistic, value in (("mean", value_K.mean()), ("min", value_K.min()), ("max", value_K.max())):
                log(f"teachers/{name.removeprefix('curve.')}_{statistic}", float(value), step)
        on_losses(step, loss_KP[:, point])


class Checkpoints:
    """PRIVATE. A folder of finished groups, each file named by a hash of the records, the recipe and the seed.

    ``rows_K`` are the parameters and learning curves of every teacher, [K, ...] each.
    """

    def __init__(self, folder: Path, task: TrainingTask, rows_K: dict[str, Tensor]) -> None:
        self.folder, self.task, self.rows_K = create_private_folder(Path(folder)), task, rows_K
        self.key_text = json.dumps([task.recipe.to_configuration(), task.seed], sort_keys=True)

    def _get_path(self, group: range) -> Path:
        chunk = gather_chunk(self.task.private, self.task.shards, group)
        state = hashlib.sha256(self.key_text.encode())
        state.update(f"{chunk.first} {tuple(chunk.x_kS.shape)} {chunk.x_kS.dtype}".encode())
        for tensor in (chunk.x_kS, chunk.y_kS, chunk.size_k):
            state.update(get_tensor_bytes(tensor))
        return self.folder / f"chunk_{chunk.first:05d}_{state.hexdigest()[:32]}.safetensors"

    def load(self, group: range) -> bool:
        """Fill the rows of a group from its file; False where there is no such file, or a damaged one."""
        try:
            tensors = read_tensors(self._get_path(group))
        except ValueError:
            return False
        rows = {name: value[group.start : group.stop] for name, value in self.rows_K.items()}
        if {name: value.shape for name, value in tensors.items()} != {name: row.shape for name, row in rows.items()}:
            return False
        for name, row in rows.items():
            row.copy_(tensors[name])
        return True

    def save(self, group: range) -> None:
        """Write the rows of a group beside and rename the file: a run killed here leaves no half a group."""
        rows = {name: value[group.start : group.stop].contiguous() for name, value in self.rows_K.items()}
        with atomic_replacement(self._get_path(group)) as temporary:
            save_file(rows, temporary)
