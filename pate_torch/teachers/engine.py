"""Training of a chunk of teachers with stacked parameters, with the same arithmetic as a loop over the teachers.

A chunk holds copies of the records of some teachers, and the code in this module has no access to other records. Every
teacher draws its initialization, batches and distortions from streams named by (seed, teacher), so that the result does
not depend on the chunk in which the teacher is trained.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from pate_torch import networks
from pate_torch.core import checks
from pate_torch.core.device import float32_precision, to_device
from pate_torch.core.optimizers import Adam, ParameterBuffer, Sgd
from pate_torch.core.progress import do_nothing
from pate_torch.core.rng import make_torch_generator
from pate_torch.features import augmentation
from pate_torch.privacy.records import DataSpec, PrivateRecords, Shards
from pate_torch.teachers import stacked
from pate_torch.teachers.recipe import TeacherRecipe

ShareCallback = Callable[[float], object]
"""Function that receives the share of the finished steps of a chunk, while it is less than 1."""

BLOCK_STEPS = 32
"""Number of steps whose distortions are drawn together. The draws depend on this number."""

ABSENT_CLASS_LOGIT = -1e6
"""Logit of a class that a shard lacks. It is so low that a ridge regression never votes for this class."""

CURVE_POINTS, CURVES = 50, ("curve.loss", "curve.accuracy")
"""Number of points and names of a teacher's private learning curves."""


@dataclass(frozen=True, eq=False, repr=False)
class Chunk:
    """PRIVATE. Records of k teachers with successive numbers, at most S records of each.

    Attributes:
        first: Number of the first teacher.
        x_kS: PRIVATE. Points, [k, S, ...], zero after the last record of a teacher.
        y_kS: PRIVATE. Labels, int64 [k, S], zero after the last record of a teacher.
        size_k: PRIVATE. Number of records of each teacher, int64 [k].
    """

    first: int
    x_kS: Tensor
    y_kS: Tensor
    size_k: Tensor

    def __len__(self) -> int:
        return len(self.size_k)

    @property
    def teachers(self) -> range:
        """Numbers of the teachers, which name their streams."""
        return range(self.first, self.first + len(self))


ChunkSource = Callable[[range], Chunk]
"""PRIVATE. Function that returns the records of some teachers."""


@dataclass(frozen=True, eq=False, repr=False)
class TrainedChunk:
    """PRIVATE. Stacked parameters [k, ...] and learning curves [k, CURVE_POINTS] of a chunk, by name."""

    params: stacked.Parameters
    curves: dict[str, Tensor]


@dataclass(frozen=True, eq=False, repr=False)
class TrainingTask:
    """Public settings that decide, together with the records, the teachers of one ensemble.

    ``spec`` describes the inputs of the networks. ``launch_size`` teachers are trained at once. The last bits depend on
    the kind of ``processor`` of all workers.
    """

    network: dict[str, Any]
    spec: DataSpec
    recipe: TeacherRecipe
    seed: int
    device: torch.device
    launch_size: int
    processor: str

    def plan_launches(self, group: range) -> list[range]:
        size = self.launch_size
        return [range(first, min(first + size, group.stop)) for first in range(group.start, group.stop, size)]


def gather_chunk(private: PrivateRecords, shards: Shards, teachers: range) -> Chunk:
    """PRIVATE. Copy the records of some teachers into a chunk."""
    mask = shards.mask_KS[teachers.start : teachers.stop]
    capacity = max(1, mask.shape[1])
    x = torch.zeros(len(teachers), capacity, *private.x.shape[1:], dtype=private.x.dtype)
    y = torch.zeros(len(teachers), capacity, dtype=torch.int64)
    for row, teacher in enumerate(teachers):
        index = shards.get_indices(teacher)
        x[row, : len(index)], y[row, : len(index)] = private.x[index], private.y[index]
    return Chunk(teachers.start, x, y, mask.sum(1))


def draw_batches(seed: int, teacher: int, size: int, steps: int, batch_size: int) -> Tensor:
    """Draw the batches of a teacher, int32 [steps, B], from successive permutations of 0 .. size - 1."""
    if size <= 1:
        return torch.zeros(steps, batch_size, dtype=torch.int32)
    generator, epochs = make_torch_generator(seed, "teacher", teacher, "batches"), -(-steps * batch_size // size)
    order = torch.rand(epochs, size, generator=generator).argsort(1).to(torch.int32)
    return order.flatten()[: steps * batch_size].view(steps, batch_size)


def iterate_batches(
    chunk: Chunk, spec: DataSpec, recipe: TeacherRecipe, seed: int, device: torch.device
) -> Iterator[tuple[Tensor, Tensor]]:
    """PRIVATE. Yield the batches of a chunk: normalized and distorted points [B, k, ...] and labels [k, B]."""
    dtype, affine, batch_size = recipe.torch_dtype, recipe.augment, recipe.batch_size
    mean, std = spec.get_constants(dtype, device)
    x_R, y_R = (to_device(value, device).flatten(0, 1) for value in (chunk.x_kS, chunk.y_kS))
    x_R = spec.clip(x_R)
    first_k = torch.arange(len(chunk), device=device) * chunk.x_kS.shape[1]
    sizes = zip(chunk.teachers, chunk.size_k.tolist(), strict=True)
    batches = [draw_batches(seed, k, size, recipe.steps, batch_size) for k, size in sizes]
    blocks = torch.stack(batches, dim=1).split(BLOCK_STEPS)  # [steps, k, B] each
    map_blocks: Iterator[Tensor] | None = None
    if affine is not None:
        generators = [make_torch_generator(seed, "teacher", k, "augment") for k in chunk.teachers]
        num_draws = (len(block) * batch_size for block in blocks)
        maps_by_teacher = ([affine.draw(n, spec.input_shape, g) for g in generators] for n in num_draws)
        map_blocks = prefetch(torch.stack(maps, 1).unflatten(0, (-1, batch_size)) for maps in maps_by_teacher)
    for block in blocks:
        index = to_device(block, device).long()
        maps = None if map_blocks is None else to_device(next(map_blocks), device)
        for t, index_kB in enumerate(index):
            row_kB = index_kB + first_k[:, None]
            # index_select copies whole rows. Indexing two dimensions would copy number by number.
            x = x_R.index_select(0, row_kB.T.flatten()).unflatten(0, row_kB.T.shape)
            x = x.to(dtype).div_(255) if x.dtype == torch.uint8 else x.to(dtype)
            if affine is not None and maps is not None:
                x = augmentation.warp(x.flatten(0, 1), maps[t].flatten(0, 1), affine.padding).view(x.shape)
            yield x.sub_(mean).div_(std), y_R[row_kB]


def prefetch(items: Iterator[Tensor]) -> Iterator[Tensor]:
    """Yield the items, while a thread computes the next item."""
    end_marker = object()
    with ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        next_item = pool.submit(next, items, end_marker)
        while (item := next_item.result()) is not end_marker:
            next_item = pool.submit(next, items, end_marker)
            yield cast(Tensor, item)


@contextmanager
def flush_denormals() -> Iterator[None]:
    """Replace denormal numbers by 0 in this thread, if the processor can.

    When a teacher fits its few records, Adam's squared gradients fall below 1e-38, where arithmetic takes a hundred
    times as long.
    """
    smallest = torch.tensor(torch.finfo(torch.float64).smallest_normal, dtype=torch.float64)
    was_flushing = not bool(smallest / 2)
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(was_flushing)


def _compute_losses(logits_kBC: Tensor, y_kB: Tensor, smoothing: float) -> Tensor:
    flat = logits_kBC.flatten(0, 1)
    flat = flat.float() if flat.dtype == torch.bfloat16 else flat
    return F.cross_entropy(flat, y_kB.flatten(), reduction="none", label_smoothing=smoothing).view(y_kB.shape).mean(1)


def train_params(
    forward: Callable[[Tensor], Tensor],
    params: stacked.Parameters,
    chunk: Chunk,
    spec: DataSpec,
    recipe: TeacherRecipe,
    seed: int,
    device: torch.device,
    report_share: ShareCallback = do_nothing,
) -> TrainedChunk:
    """PRIVATE. Train the parameters of a chunk, which are on the device.

    ``forward`` computes logits [k, B, C] of inputs [B, k, ...] with ``params``, whose values are replaced. In the
    result, the parameters of a teacher without records are zero, so that it votes for one class. ``report_share`` is
    called at each curve point.
    """
    buffer = ParameterBuffer(list(params.values()))
    params.update(zip(params, buffer.params, strict=True))
    optimizer: Adam | Sgd = Adam([buffer.values], recipe.weight_decay)
    if recipe.optimizer == "sgd":
        optimizer = Sgd([buffer.values], recipe.momentum, recipe.weight_decay)
    num_points = min(CURVE_POINTS, recipe.steps)
    sums = torch.zeros(3, num_points, len(chunk), device=device)
    with float32_precision(tf32=recipe.dtype == "tf32"), flush_denormals():
        for step, (x, y) in enumerate(iterate_batches(chunk, spec, recipe, seed, device)):
            logits = forward(x)
            losses = _compute_losses(logits, y, recipe.label_smoothing)
            losses.sum().backward()
            with torch.no_grad():
                buffer.gather_gradients()
                optimizer.step(recipe.compute_learning_rate(step))
                point, next_point = (s * num_points // recipe.steps for s in (step, step + 1))
                sums[0, point] += losses.detach()
                sums[1, point] += (logits.argmax(2) == y).to(sums.dtype).mean(1)
                sums[2, point] += 1
            if point < next_point < num_points:
                report_share((step + 1) / recipe.steps)
    curves = {name: (sums[i] / sums[2]).T.cpu() for i, name in enumerate(CURVES)}
    result = TrainedChunk({name: p.detach().cpu() for name, p in params.items()}, curves)
    for rows in (*result.params.values(), *curves.values()):
        rows[chunk.size_k == 0] = 0
    return result


def train_stacked(
    chunk: Chunk,
    spec: DataSpec,
    recipe: TeacherRecipe,
    seed: int,
    device: torch.device,
    report_share: ShareCallback = do_nothing,
) -> TrainedChunk:
    """PRIVATE. Train all teachers of a chunk at once. ``train_params`` describes the arguments."""
    if recipe.optimizer == "ridge":
        return fit_ridge(chunk, spec, recipe)
    module = networks.build(recipe.network, spec.input_shape, spec.num_classes, **recipe.options).to(recipe.torch_dtype)
    generators = [make_torch_generator(seed, "teacher", k, "init") for k in chunk.teachers]
    initial = stacked.stack_initial(module, generators, recipe.torch_dtype)
    params = {name: p.to(device) for name, p in initial.items()}
    dtype = torch.bfloat16 if recipe.dtype == "bf16" else recipe.torch_dtype

    def forward(x: Tensor) -> Tensor:
        return stacked.forward(module, params, x.to(dtype))

    return train_params(forward, params, chunk, spec, recipe, seed, device, report_share)


def train_launch(task: TrainingTask, chunk: Chunk, report_share: ShareCallback = do_nothing) -> TrainedChunk:
    """PRIVATE. Train the teachers of one launch at once.

    A single teacher is trained beside one without records if launches may be larger, because a product of single
    matrices is rounded otherwise than one of a stack.
    """
    size = len(chunk)
    if size == 1 < task.launch_size:
        tensors = (torch.cat([value, torch.zeros_like(value)]) for value in (chunk.x_kS, chunk.y_kS, chunk.size_k))
        chunk = Chunk(chunk.first, *tensors)
    result = train_stacked(chunk, task.spec, task.recipe, task.seed, task.device, report_share)
    params, curves = ({name: v[:size] for name, v in part.items()} for part in (result.params, result.curves))
    return TrainedChunk(params, curves)


def train_launches(task: TrainingTask, chunk: Chunk, report_share: ShareCallback = do_nothing) -> dict[str, Tensor]:
    """PRIVATE. Train a chunk in launches, and return parameters and learning curves, [k, ...] each, by name."""
    parts = list[dict[str, Tensor]]()
    for launch in task.plan_launches(chunk.teachers):
        rows = slice(launch.start - chunk.first, launch.stop - chunk.first)
        part = Chunk(launch.start, chunk.x_kS[rows], chunk.y_kS[rows], chunk.size_k[rows])

        def report(share: float, first: int = rows.start, size: int = len(part)) -> None:
            report_share((first + share * size) / len(chunk))

        try:
            result = train_launch(task, part, report)
        except torch.OutOfMemoryError as error:
            problem = f"{len(part)} teachers at once do not fit into the memory of the GPU"
            fix = "Lower executor.chunk or teacher.batch_size."
            raise checks.error("executor.chunk", task.launch_size, problem, fix) from error
        parts.append(result.params | result.curves)
        report(1.0)
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def fit_ridge(chunk: Chunk, spec: DataSpec, recipe: TeacherRecipe) -> TrainedChunk:
    """PRIVATE. Fit the ridge regression of each teacher of a chunk to one-hot labels, in float64 on the CPU.

    The logit of class c is (E(c | z) - m_c) / m_c for the regression E(c | z) of centered labels and the share m_c of
    the class in the shard, so a rare class wins where it is more frequent than usual. A class that the shard lacks
    never wins. Each teacher is computed from its own rows alone, so no other shard influences even its rounding.
    """
    width, num_points = math.prod(spec.input_shape), min(CURVE_POINTS, recipe.steps)
    weight_kCD, bias_kC = torch.zeros(len(chunk), spec.num_classes, width), torch.zeros(len(chunk), spec.num_classes)
    curve_kP = {name: torch.zeros(len(chunk), num_points) for name in CURVES}
    for row, size in enumerate(chunk.size_k.tolist()):
        if size == 0:
            continue
        z_SD = spec.normalize(chunk.x_kS[row, :size], torch.float64).flatten(1)
        z_SD = torch.where(z_SD.isfinite().all(1, keepdim=True), z_SD, 0.0)
        y_SC = F.one_hot(chunk.y_kS[row, :size], spec.num_classes).double()
        share_C = y_SC.mean(0)
        gram_SS, ridge_SS = z_SD @ z_SD.T, recipe.weight_decay * width * torch.eye(size, dtype=torch.float64)
        # solve_ex raises no error for a matrix that is singular in floating point; its teacher votes for class 0.
        dual_SC = torch.linalg.solve_ex(gram_SS + ridge_SS, y_SC - share_C).result
        weight_kCD[row] = (dual_SC.T @ z_SD / share_C.clamp(min=1 / size)[:, None]).float()
        bias_kC[row] = torch.where(share_C > 0, 0.0, ABSENT_CLASS_LOGIT)
        fitted_SC = share_C + gram_SS @ dual_SC
        curve_kP["curve.loss"][row] = (fitted_SC - y_SC).square().sum(1).mean()
        curve_kP["curve.accuracy"][row] = (fitted_SC.argmax(1) == y_SC.argmax(1)).float().mean()
    params = {"1.weight": weight_kCD.to(recipe.torch_dtype), "1.bias": bias_kC.to(recipe.torch_dtype)}
    return TrainedChunk(params, curve_kP)
