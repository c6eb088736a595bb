"""Training of K teachers on K disjoint shards, many at once.

Ranks and checkpoints divide the teachers into groups of 16. The teachers that a device trains at once are a launch. Its
size depends on public values alone: the network, its input, the batch and the kind of device. If it depended on the
number of records in a shard, which is private, one record would influence all teachers of the launch. On a CPU a launch
lies in one group, so teachers are the same to the bit for any number of ranks or workers. On a GPU a launch may contain
several groups of a rank, and teachers are the same to the bit if launches have the same size.
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
from pate_torch.teachers.ensemble import GPU_PIXELS, TeacherEnsemble
from pate_torch.teachers.independence import Trial
from pate_torch.teachers.recipe import TeacherRecipe, TrainingExecution, Trunk
from pate_torch.teachers.workers import can_fork, train_in_processes

__all__ = ["TeacherRecipe", "train", "train_on_all"]

LossesCallback = Callable[[int, Tensor], None]
"""PRIVATE. Function on_losses(step, loss_K) that receives the losses of all teachers."""

GROUP_TEACHERS = 16
"""Number of teachers of a group, which one rank trains and one checkpoint holds."""

CACHE_PARAMETERS = 2_000_000
"""Largest number of parameters of all teachers of a launch on a CPU (8 MB of weights, and 24 MB with moments)."""

MIN_STEPS_FOR_FORK, MIN_STEPS_FOR_SPAWN = 600, 5000
"""Number of steps of all launches above which worker processes save time. Spawned processes import torch anew."""


def train(
    private: PrivateRecords,
    spec: DataSpec,
    shards: Shards,
    recipe: TeacherRecipe,
    *,
    seed: int,
    device: torch.device | str = "cpu",
    execution: TrainingExecution = TrainingExecution(),
    trunk: Trunk | None = None,
    checkpoint_dir: Path | None = None,
    progress: Progress = do_nothing,
    log: Log = do_nothing,
    on_losses: LossesCallback = do_nothing,
    on_trial: Callable[[Trial], object] = do_nothing,
) -> TeacherEnsemble:
    """PRIVATE. Train one teacher per shard. Under torchrun, every rank trains a part, and every rank returns all.

    Args:
        private: PRIVATE. Records.
        spec: Facts of the records, with the constants of their normalization.
        shards: PRIVATE. Shards, one for each teacher.
        recipe: Recipe of the teachers.
        seed: Seed of the initialization, batches and distortions of all teachers.
        device: Device of the training.
        execution: Settings that decide how fast teachers are trained.
        trunk: Trunk of ``recipe.start``. None if ``recipe.start`` is None.
        checkpoint_dir: Private folder of finished groups, from which an interrupted run continues. None to write no
            checkpoints.
        progress: Function that receives (done, total) teachers by their finished steps, or steps of a single teacher.
        log: PRIVATE. Function that receives points of the learning curves.
        on_losses: PRIVATE. Function that receives the losses of all teachers.
        on_trial: PRIVATE. Function that rank 0 calls to check one of several teachers, drawn at random.

    Raises:
        ValueError: The recipe does not fit the data, or the launches do not fit into a GPU.
        ChildProcessError: A worker died.
        RuntimeError: Another rank died.
    """
    recipe.check(spec)
    task = _make_task(private, spec, shards, recipe, seed, torch.device(device), trunk)
    recipe, num_teachers, dtype = task.recipe, shards.num_teachers, recipe.torch_dtype
    module = networks.build(recipe.network, task.spec.input_shape, spec.num_classes, **recipe.options)
    stacked.check_teacher(module, recipe.network)
    param_K = {name: torch.zeros(num_teachers, *p.shape, dtype=dtype) for name, p in module.named_parameters()}
    curve_KP = {name: torch.zeros(num_teachers, min(CURVE_POINTS, recipe.steps)) for name in CURVES}
    launch_size = compute_launch_size(recipe, networks.count_parameters(module), task.spec, num_teachers, task.device)
    if execution.chunk is not None:
        launch_size = min(execution.chunk, GROUP_TEACHERS) if task.device.type == "cpu" else execution.chunk
    launches = _train_own_groups(task, execution, param_K | curve_KP, launch_size, checkpoint_dir, progress)
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
    """PRIVATE. Train one network on all private records without privacy, as a baseline. Return an ensemble of one.

    Batches have at least 128 records, if there are as many. All ranks of torchrun must call this function.
    """
    count = len(data.private)
    one_shard = Shards(torch.arange(count)[None], torch.ones(1, count, dtype=torch.bool), "replace_one")
    recipe = dataclasses.replace(recipe, batch_size=max(recipe.batch_size, min(128, count)))
    trunk = recipe.learn_trunk(data.pool, data.spec, seed, device, stages)
    progress = stages("Training a model without privacy")
    return train(data.private, data.spec, one_shard, recipe, seed=seed, device=device, trunk=trunk, progress=progress)


def _make_task(
    private: PrivateRecords,
    spec: DataSpec,
    shards: Shards,
    recipe: TeacherRecipe,
    seed: int,
    device: torch.device,
    trunk: Trunk | None,
) -> TrainingTask:
    """Make the task for the private records, or for their features if the recipe has a trunk."""
    if recipe.start is not None:
        if trunk is None:
            problem, fix = "needs a trunk, which is learned from public points", "Set teacher.start=null."
            raise checks.error("teacher.start", recipe.start.features.name, problem, fix)
        private, spec = trunk.encode_shards(private, shards, device), trunk.spec
        recipe = dataclasses.replace(recipe, start=None, augment=None)
    return TrainingTask(private, spec, shards, recipe, seed, device)


# ---- groups and launches --------------------------------------------------------------------------------------------


def split_groups(num_teachers: int) -> list[range]:
    """Return the teachers of each group."""
    return [range(first, min(first + GROUP_TEACHERS, num_teachers)) for first in range(0, num_teachers, GROUP_TEACHERS)]


def get_owners(num_teachers: int, ranks: int) -> list[int]:
    """Return the rank of each teacher. Ranks train successive groups, whose numbers differ by one group at most."""
    num_slots = max(math.ceil(num_teachers / GROUP_TEACHERS), ranks)  # if ranks > groups, the last ranks train nothing
    return [teacher // GROUP_TEACHERS * ranks // num_slots for teacher in range(num_teachers)]


def compute_launch_size(
    recipe: TeacherRecipe, num_parameters: int, spec: DataSpec, num_teachers: int, device: torch.device
) -> int:
    """Compute the number of teachers of a launch: as many as the CPU's cache or the GPU holds."""
    on_cpu = device.type == "cpu"
    max_size = GROUP_TEACHERS if on_cpu else GROUP_TEACHERS * math.ceil(num_teachers / GROUP_TEACHERS)
    num_pixels = recipe.batch_size * math.prod(spec.input_shape[-2:])
    size = CACHE_PARAMETERS // num_parameters if on_cpu else GPU_PIXELS // num_pixels
    size -= size % GROUP_TEACHERS if size >= GROUP_TEACHERS else 0
    return max(1, min(size, max_size))


def plan_launches(pending: Sequence[range], size: int) -> list[range]:
    """Return the launches of the groups that are to be trained: parts of a group, or several successive groups."""
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
    execution: TrainingExecution,
    rows_K: dict[str, Tensor],
    launch_size: int,
    checkpoint_dir: Path | None,
    progress: Progress,
) -> list[range]:
    """Fill the rows of this rank's teachers, from checkpoints or by training.

    Returns:
        Launches of the trained groups, or of all own groups if all of them have checkpoints.
    """
    ranks, num_teachers = distributed.get_world(), task.shards.num_teachers
    owners = get_owners(num_teachers, ranks.size)
    own_groups = [group for group in split_groups(num_teachers) if owners[group.start] == ranks.rank]
    checkpoints = None if checkpoint_dir is None else Checkpoints(checkpoint_dir, task, launch_size, rows_K)
    pending = [group for group in own_groups if checkpoints is None or not checkpoints.load(group)]
    num_own, share_by_launch = sum(map(len, own_groups)), dict[range, float]()
    finished = {teacher for group in own_groups if group not in pending for teacher in group}
    scale = task.recipe.steps if num_own == 1 else 1

    def report_share(teachers: range, share: float) -> None:
        share_by_launch[teachers] = share * len(teachers)
        progress(int(scale * min(num_own, len(finished) + sum(share_by_launch.values()))), scale * num_own)

    progress(scale * len(finished), scale * num_own)
    launches = plan_launches(pending, launch_size)
    for teachers, rows in _train_launches(task, execution, launches, rows_K, report_share):
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
    execution: TrainingExecution,
    launches: list[range],
    rows_K: dict[str, Tensor],
    report_share: Callable[[range, float], object],
) -> Iterator[tuple[range, dict[str, Tensor]]]:
    """Train launches in worker processes or in this process, and yield each with its results."""
    if num_workers := count_workers(execution, task.recipe.steps, len(launches), task.device):
        yield from train_in_processes(task, launches, num_workers, rows_K, report_share)
        return
    for teachers in launches:
        chunk = gather_chunk(task.private, task.shards, teachers)
        report = functools.partial(report_share, teachers)
        # The rounding of sums depends on the number of threads, of which torchrun gives each rank one.
        with single_thread_mode(task.device.type == "cpu" and task.shards.num_teachers > 1):
            try:
                result = train_stacked(chunk, task.spec, task.recipe, task.seed, task.device, report)
            except torch.OutOfMemoryError as error:
                problem = f"{len(teachers)} teachers at once do not fit into the memory of the GPU"
                fix = "Lower execution.chunk or teacher.batch_size."
                raise checks.error("execution.chunk", execution.chunk, problem, fix) from error
        yield teachers, result.params | result.curves


def count_workers(execution: TrainingExecution, steps: int, num_launches: int, device: torch.device) -> int:
    """Return the number of worker processes, or 0 to train in this process."""
    if execution.backend == "processes" and device.type != "cpu":
        problem, fix = f"needs device=cpu, but device is {device}", "Use execution.backend=vectorized."
        raise checks.error("execution.backend", execution.backend, problem, fix)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    workers = execution.workers or max(1, cores // distributed.get_world().local_size)
    min_steps = MIN_STEPS_FOR_FORK if can_fork() else MIN_STEPS_FOR_SPAWN
    is_parallel = device.type == "cpu" and os.name == "posix" and workers > 1 and num_launches > 1
    is_faster = is_parallel and steps * num_launches > min_steps
    return workers if execution.backend == "processes" or (execution.backend == "auto" and is_faster) else 0


# ---- results --------------------------------------------------------------------------------------------------------


def _report_curves(curve_KP: dict[str, Tensor], recipe: TeacherRecipe, log: Log, on_losses: LossesCallback) -> None:
    """Log the learning curves, and warn the owner if all teachers diverged.

    This is a warning, because in a small ensemble one unit may make the last teacher diverge, and an error would reveal
    this. A teacher that diverged has one vote, like all others.
    """
    loss_KP = curve_KP["curve.loss"]
    if not bool(loss_KP[:, -1].isfinite().any()):
        message = f"teacher.learning_rate={recipe.learning_rate:g}: all teachers diverged, so their labels are useless."
        warnings.warn(f"{message} Lower teacher.learning_rate. (Only the owner may see this message.)", stacklevel=3)
    num_points = loss_KP.shape[1]
    for point in range(num_points):
        step = (point + 1) * recipe.steps // num_points
        for name, curve in curve_KP.items():
            value_K = curve[:, point]
            for statistic, value in (("mean", value_K.mean()), ("min", value_K.min()), ("max", value_K.max())):
                log(f"teachers/{name.removeprefix('curve.')}_{statistic}", float(value), step)
        on_losses(step, loss_KP[:, point])


class Checkpoints:
    """PRIVATE. Folder of finished groups, in files that are named by a hash of all that decides their bits.

    One of them is the size of a launch. ``rows_K`` are parameters and learning curves of all teachers, [K, ...] each.
    """

    def __init__(self, folder: Path, task: TrainingTask, launch_size: int, rows_K: dict[str, Tensor]) -> None:
        self.folder, self.task, self.rows_K = create_private_folder(Path(folder)), task, rows_K
        self.key_text = json.dumps([dataclasses.asdict(task.recipe), task.seed, launch_size], sort_keys=True)

    def _get_path(self, group: range) -> Path:
        chunk = gather_chunk(self.task.private, self.task.shards, group)
        state = hashlib.sha256(self.key_text.encode())
        state.update(f"{chunk.first} {tuple(chunk.x_kS.shape)} {chunk.x_kS.dtype}".encode())
        for tensor in (chunk.x_kS, chunk.y_kS, chunk.size_k):
            state.update(get_tensor_bytes(tensor))
        return self.folder / f"chunk_{chunk.first:05d}_{state.hexdigest()[:32]}.safetensors"

    def load(self, group: range) -> bool:
        """Fill the rows of a group from its file. Return False if the file is missing or damaged."""
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
        """Write the rows of a group into its file, whole or not at all."""
        rows = {name: value[group.start : group.stop].contiguous() for name, value in self.rows_K.items()}
        with atomic_replacement(self._get_path(group)) as temporary:
            save_file(rows, temporary)
