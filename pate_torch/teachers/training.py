"""Training of K teachers on K disjoint shards, many at once.

Teachers are divided into groups (``teachers.groups``). The teachers that a device trains at once are a launch, which
lies in one group. The sizes of both depend on public values alone: the network, its input, the batch, the kind of
device, and the numbers of teachers and of workers. If they depended on the number of records in a shard, which is
private, one record would influence all teachers of the launch. On processors of one kind, teachers are the same to the
bit in groups of any size if launches have the same size.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Generator
from contextlib import closing
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pate_torch import networks
from pate_torch.core import checks, ranks
from pate_torch.core.device import describe_processor, single_thread_mode
from pate_torch.core.executors import Workers, can_fork
from pate_torch.core.files import read_tensors
from pate_torch.core.progress import Log, Progress, Stages, do_nothing
from pate_torch.core.scheduling import run_units
from pate_torch.privacy.records import Dataset, DataSpec, PrivateRecords, Shards
from pate_torch.privacy.sensitive import SoftVotes, Votes
from pate_torch.teachers import stacked
from pate_torch.teachers.engine import CURVES, ChunkSource, TrainingTask, gather_chunk, train_launches
from pate_torch.teachers.ensemble import GPU_PIXELS, TeacherEnsemble
from pate_torch.teachers.groups import RECORDS_KEY, GroupTally, Manifest, VoteRequest, provide_inputs, train_group
from pate_torch.teachers.independence import RetrainingCheck
from pate_torch.teachers.recipe import TeacherRecipe, Trunk

__all__ = ["TeacherRecipe", "train", "train_on_all"]

Parts = dict[range, dict[str, Tensor]]
"""PRIVATE. Parameters and learning curves of each group, by name."""

LossesCallback = Callable[[int, Tensor], None]
"""PRIVATE. Function on_losses(step, loss_K) that receives the losses of all teachers."""

Results = Generator[tuple[range, tuple[str, str]], None, None]
"""Groups with the names of the files of their parameters and counts."""

GROUP_TEACHERS = 16
"""Largest number of teachers of a group on a CPU."""

CACHE_PARAMETERS = 2_000_000
"""Largest number of parameters of all teachers of a launch on a CPU (8 MB of weights, and 24 MB with moments)."""


def train(
    private: PrivateRecords,
    spec: DataSpec,
    shards: Shards,
    recipe: TeacherRecipe,
    *,
    seed: int,
    device: torch.device | str = "cpu",
    executor: Workers = Workers(),
    trunk: Trunk | None = None,
    folder: Path | None = None,
    request: VoteRequest | None = None,
    progress: Progress = do_nothing,
    log: Log = do_nothing,
    on_losses: LossesCallback = do_nothing,
    on_retraining_check: Callable[[RetrainingCheck], object] = do_nothing,
    on_votes: Callable[[Votes | SoftVotes], object] = do_nothing,
    print_message: Callable[[str], object] = do_nothing,
) -> TeacherEnsemble:
    """PRIVATE. Train one teacher per shard. Under torchrun, a rank above 0 trains and returns its groups alone.

    Args:
        private: PRIVATE. Records.
        spec: Facts of the records.
        shards: PRIVATE. Shards, one for each teacher.
        recipe: Recipe of the teachers.
        seed: Seed of the initialization, batches and distortions of all teachers.
        device: Device of the training.
        executor: Workers that train the groups.
        trunk: Trunk of ``recipe.start``.
        folder: PRIVATE. Folder of the groups' files, for interrupted runs. None to train in memory, without votes.
        request: Request for votes, which are counted where the teachers are trained.
        progress: Function that receives (done, total) teachers by their finished steps, or steps of a single teacher.
        log: PRIVATE. Function that receives points of the learning curves.
        on_losses: PRIVATE. Function that receives the losses of all teachers.
        on_retraining_check: PRIVATE. Function that rank 0 calls to check one of several teachers, drawn at random.
        on_votes: PRIVATE. Function that receives the votes of all teachers.
        print_message: Function that shows a line about lost workers.

    Raises:
        ValueError: The recipe does not fit the data, or the launches do not fit into a GPU.
        ChildProcessError: The same group lost its worker several times.
        RuntimeError: Another rank died.
    """
    device = torch.device(device)
    task, get_chunk = _make_task(private, spec, shards, recipe, seed, device, trunk, executor.chunk)
    if folder is None:
        parts = _train_in_memory(task, get_chunk, shards.num_teachers, progress)
    else:
        request = VoteRequest(private.x[:0]) if request is None else request
        x = request.x if trunk is None or not len(request.x) else trunk.compute_features(request.x, device)
        manifest = Manifest.make(folder, task, request)
        parts, votes = _train_in_folder(manifest, get_chunk, shards.num_teachers, x, executor, progress, print_message)
        on_votes(votes)
    ensemble = _make_ensemble(task, parts, shards, spec, trunk)
    if folder is None or ranks.is_main():
        curve_KP = {name: torch.cat([part[name] for part in parts.values()]) for name in CURVES}
        _report_curves(curve_KP, recipe, log, on_losses)
        if shards.num_teachers > 1:
            on_retraining_check(RetrainingCheck.draw(ensemble, list(parts), task, get_chunk))
    return ensemble


def _make_ensemble(
    task: TrainingTask, parts: Parts, shards: Shards, spec: DataSpec, trunk: Trunk | None
) -> TeacherEnsemble:
    params = [{name: part[name] for name in part if name not in (*CURVES, RECORDS_KEY)} for part in parts.values()]
    trained_K = shards.mask_KS.any(1)[[teacher for group in parts for teacher in group]]
    return TeacherEnsemble(task.network, params, trained_K, spec, trunk)


def train_on_all(
    data: Dataset, recipe: TeacherRecipe, *, seed: int, device: torch.device, stages: Stages
) -> TeacherEnsemble:
    """PRIVATE. Train one network on all private records without privacy, as a baseline. Return an ensemble of one.

    Batches have at least 128 records, if there are as many.
    """
    count = len(data.private)
    one_shard = Shards(torch.arange(count)[None], torch.ones(1, count, dtype=torch.bool), "replace_one")
    recipe = dataclasses.replace(recipe, batch_size=max(recipe.batch_size, min(128, count)))
    trunk = recipe.learn_trunk(data.pool, data.spec, seed, device, stages)
    progress = stages("Training a model without privacy")
    return train(data.private, data.spec, one_shard, recipe, seed=seed, device=device, trunk=trunk, progress=progress)


class _ShareReport:
    """Report of the finished share ``share_K`` of each teacher's training, as teachers or steps of a single teacher."""

    def __init__(self, share_K: np.ndarray, groups: list[range], steps: int, progress: Progress) -> None:
        self.share_K, self._progress = share_K, progress
        self._total, self._scale = sum(map(len, groups)), steps if len(share_K) == 1 else 1
        self()

    def __call__(self, group: range = range(0), share: float = 1.0) -> None:
        self.share_K[group.start : group.stop] = share
        self._progress(int(self._scale * self.share_K.sum() + 1e-3), self._scale * self._total)


def _train_in_memory(task: TrainingTask, get_chunk: ChunkSource, num_teachers: int, progress: Progress) -> Parts:
    groups = _split_task(task, num_teachers, 1)
    report = _ShareReport(np.zeros(num_teachers, np.float32), groups, task.recipe.steps, progress)
    # The rounding of sums depends on the number of threads.
    with single_thread_mode(task.device.type == "cpu" and num_teachers > 1):
        return {group: train_launches(task, get_chunk(group), partial(report, group)) for group in groups}


def _train_in_folder(
    manifest: Manifest,
    get_chunk: ChunkSource,
    num_teachers: int,
    x: Tensor,
    executor: Workers,
    progress: Progress,
    print_message: Callable[[str], object],
) -> tuple[Parts, Votes | SoftVotes]:
    """PRIVATE. Train the groups of this rank by workers, and sum the votes of all ranks.

    ``x`` are the points on which the teachers vote, as inputs of their networks. Return the groups of all ranks on
    rank 0, and the own groups on other ranks.
    """
    task, folder, world = manifest.task, manifest.folder, ranks.get_world()
    num_steps = task.recipe.steps * math.ceil(num_teachers / task.launch_size)
    num_workers = executor.count_workers(task.device, num_steps)  # 0 if this process trains the groups
    groups = _split_task(task, num_teachers, sum(ranks.gather_objects(max(1, num_workers))))
    own_groups = groups[world.rank :: world.size]
    share_K = np.memmap(manifest.progress_file, np.float32, "w+", shape=num_teachers)
    report = _ShareReport(share_K, own_groups, task.recipe.steps, progress)
    train_one, tally, names = partial(train_group, manifest), GroupTally(manifest, num_teachers), dict[range, str]()
    by_files = num_workers > 0 and not (executor.are_local and can_fork())
    results: Results = ((group, train_one(group, report)) for group in own_groups)
    if num_workers > 0:
        start = partial(executor.start, folder=folder)
        results = run_units(train_one, own_groups, start, num_workers, report, print_message)
    with provide_inputs(folder, own_groups, get_chunk, x, by_files=by_files), closing(results):
        for group, (names[group], votes_name) in results:
            tally.add(manifest.votes_key, group, votes_name)
            report(group)
    ranks.send_files(folder, list(names.values()))
    votes = tally.sum_counts()
    names = {group: name for part in ranks.gather_objects(names) for group, name in part.items()}
    return {group: read_tensors(folder / names[group]) for group in (own_groups if world.rank else groups)}, votes


def _split_task(task: TrainingTask, num_teachers: int, num_workers: int) -> list[range]:
    largest = GROUP_TEACHERS if task.device.type == "cpu" else task.launch_size
    return split_groups(num_teachers, num_workers, largest)


def _make_task(
    private: PrivateRecords,
    spec: DataSpec,
    shards: Shards,
    recipe: TeacherRecipe,
    seed: int,
    device: torch.device,
    trunk: Trunk | None,
    chunk: int | None,
) -> tuple[TrainingTask, ChunkSource]:
    recipe.check(spec)
    if recipe.start is not None:
        if trunk is None:
            problem, fix = "needs a trunk, which is learned from public points", "Set teacher.start=null."
            raise checks.error("teacher.start", recipe.start.features.name, problem, fix)
        private, spec = trunk.encode_shards(private, shards, device), trunk.spec
        recipe = dataclasses.replace(recipe, start=None, augment=None)
    module = networks.build(recipe.network, spec.input_shape, spec.num_classes, **recipe.options)
    stacked.check_teacher(module, recipe.network)
    size = compute_launch_size(recipe, networks.count_parameters(module), spec, shards.num_teachers, device)
    if chunk is not None:
        size = min(chunk, GROUP_TEACHERS) if device.type == "cpu" else chunk
    network = networks.describe(recipe.network, spec.input_shape, spec.num_classes, **recipe.options)
    processor = describe_processor(device)
    return TrainingTask(network, spec, recipe, seed, device, size, processor), partial(gather_chunk, private, shards)


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


def split_groups(num_teachers: int, num_workers: int, largest: int) -> list[range]:
    """Return the teachers of each group, at most ``largest``. Several workers train about equally many teachers."""
    num_rounds = math.ceil(num_teachers / (num_workers * largest))
    size = largest if num_workers == 1 else math.ceil(num_teachers / (num_workers * num_rounds))
    return [range(first, min(first + size, num_teachers)) for first in range(0, num_teachers, size)]


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
