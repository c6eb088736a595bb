"""K trained teachers of one architecture: stacked parameters, and how they vote."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pate_torch import networks
from pate_torch.core.device import run_in_parallel, to_device
from pate_torch.core.progress import Progress, do_nothing
from pate_torch.privacy.records import DataSpec
from pate_torch.privacy.sensitive import Votes
from pate_torch.teachers import distributed, stacked, voting
from pate_torch.teachers.recipe import Trunk

CPU_TEACHERS, CPU_POINTS = 8, 64
"""Teachers and points evaluated together on a CPU: their activations stay in a core's cache (512 points take 2.5 times
as long)."""

GPU_TEACHERS, MAX_GPU_POINTS = 16, 512
"""Teachers and points evaluated together on a GPU, at most: more points hardly fill the GPU better."""

GPU_PIXELS = 1 << 22
"""Image pixels (numbers of rows) of all batches of one launch on a GPU, at most.

The convnet of the PATE papers, which keeps most for the backward pass, takes 4.5 KiB for each pixel: 18 GiB, which a
card of 24 GiB has. ``teacher.chunk`` sets another size."""

TALLY_CHUNK_QUERIES = 1 << 16
"""Queries whose predictions are in memory at a time."""

LogitsCallback = Callable[[slice, Iterable[tuple[int, Tensor]]], None]
"""PRIVATE. Called with the rows of some teachers and an iterable of their logits, part by part."""


def count_pixels(spec: DataSpec) -> int:
    """Height times width of an image, or the length of a row."""
    return math.prod(spec.input_shape[-2:])


def compute_gpu_points(spec: DataSpec) -> int:
    """Number of points on which a GPU evaluates ``GPU_TEACHERS`` at once."""
    return max(1, min(MAX_GPU_POINTS, GPU_PIXELS // (GPU_TEACHERS * count_pixels(spec))))


@dataclass(frozen=True, eq=False, repr=False)
class TeacherEnsemble:
    """PRIVATE. Teachers with stacked parameters. A teacher whose shard was empty is not trained and votes class 0.

    Attributes:
        network: Description of the network (``networks.describe``).
        params: Stacked parameters, [K, ...] each.
        trained_K: Whether each teacher was trained, bool [K].
        spec: Facts of the points that the teachers label.
        trunk: Encoder of the features that the networks take; None if the networks take the points.
    """

    network: dict[str, Any]
    params: stacked.Parameters
    trained_K: Tensor
    spec: DataSpec
    trunk: Trunk | None = None

    def __post_init__(self) -> None:
        shapes = {name: tuple(p.shape) for name, p in self.params.items()}
        if shapes != {name: (len(self), *p.shape) for name, p in networks.rebuild(self.network).named_parameters()}:
            raise ValueError(f"ensemble: parameters {shapes} do not fit {len(self)} networks {self.network['name']!r}")

    def __len__(self) -> int:
        return len(self.trained_K)

    def __repr__(self) -> str:
        return f"TeacherEnsemble({len(self)} teachers, {self.network['name']}, content withheld)"

    def select(self, teachers: slice) -> TeacherEnsemble:
        """Some of the teachers (views, no copy)."""
        params = {name: p[teachers] for name, p in self.params.items()}
        return dataclasses.replace(self, params=params, trained_K=self.trained_K[teachers])

    def forward_batches(
        self,
        x: Tensor,
        on_logits: LogitsCallback,
        device: torch.device | str = "cpu",
        progress: Progress = do_nothing,
    ) -> None:
        """PRIVATE. Call ``on_logits(rows, parts)`` for a few teachers at a time, from several threads on a CPU.

        Non-finite logits of a point become all equal, a vote for class 0: a teacher which diverged still has exactly
        one vote. On a CPU each thread does its operations alone, because sums that threads share change with their
        number.

        Args:
            x: Raw points [Q, ...].
            on_logits: Called with the rows of some teachers, and (start, logits [k, B, C]) of successive points, on the
                device.
            device: Device of the evaluation.
            progress: Called with (done, total) teachers.
        """
        device, spec = torch.device(device), self.spec
        if self.trunk is not None:
            x, spec = self.trunk.compute_features(x, device), self.trunk.spec
        module, dtype = networks.rebuild(self.network).to(device), next(iter(self.params.values())).dtype
        on_cpu = device.type == "cpu"
        chunk_teachers, size = (CPU_TEACHERS, CPU_POINTS) if on_cpu else (GPU_TEACHERS, compute_gpu_points(spec))

        def iterate_logits(rows: slice) -> Iterator[tuple[int, Tensor]]:
            params = {name: to_device(p[rows], device) for name, p in self.params.items()}
            for start in range(0, len(x), size):
                part = spec.normalize(to_device(x[start : start + size], device), dtype)
                logits = stacked.forward(module, params, part.unsqueeze(1))
                yield start, torch.where(logits.isfinite().all(2, keepdim=True), logits, 0.0)

        @torch.no_grad()
        def evaluate_chunk(first: int, report: Progress) -> None:
            rows = slice(first, min(first + chunk_teachers, len(self)))
            on_logits(rows, iterate_logits(rows))
            report(rows.stop - rows.start, rows.stop - rows.start)

        chunks = [functools.partial(evaluate_chunk, first) for first in range(0, len(self), chunk_teachers)]
        run_in_parallel(chunks, device, progress)

    def predict(self, x: Tensor, device: torch.device | str = "cpu", progress: Progress = do_nothing) -> Tensor:
        """PRIVATE. Each teacher's class, [K, Q], of raw points x [Q, ...]; ties go to the lowest class.

        The type is the smallest integer type that holds the classes (uint8 up to 256): convert before indexing with it.
        """
        out = torch.zeros(len(self), len(x), dtype=voting.get_label_dtype(self.network["num_classes"]))

        def store_predictions(rows: slice, parts: Iterable[tuple[int, Tensor]]) -> None:
            classes = [logits.argmax(2).to(out.dtype) for _, logits in parts]
            if classes:
                out[rows] = torch.cat(classes, 1).cpu()

        self.forward_batches(x, store_predictions, device, progress)
        out[~self.trained_K] = 0
        return out

    def compute_logits(self, x: Tensor, device: torch.device | str = "cpu", progress: Progress = do_nothing) -> Tensor:
        """PRIVATE. Each teacher's logits, float32 [K, Q, C], of raw points x [Q, ...]."""
        out = torch.zeros(len(self), len(x), self.network["num_classes"])

        def store_logits(rows: slice, parts: Iterable[tuple[int, Tensor]]) -> None:
            for start, logits in parts:
                out[rows, start : start + logits.shape[1]] = logits.float().cpu()

        self.forward_batches(x, store_logits, device, progress)
        return out

    def predict_proba(self, x: Tensor, device: torch.device | str = "cpu", progress: Progress = do_nothing) -> Tensor:
        """PRIVATE. Each teacher's class probabilities, float32 [K, Q, C], of raw points x [Q, ...]."""
        out = self.compute_logits(x, device, progress)
        for logits_QC in out:  # in place, because K * Q * C numbers may be a large part of memory
            logits_QC.copy_(logits_QC.softmax(1))
        out[~self.trained_K] = F.one_hot(torch.tensor(0), out.shape[2]).float()
        return out

    def count_votes(self, x: Tensor, device: torch.device | str = "cpu", progress: Progress = do_nothing) -> Votes:
        """PRIVATE. Every teacher's one vote on each point."""
        return Votes(self.tally(x, device, progress), len(self))

    def tally(self, x: Tensor, device: torch.device | str = "cpu", progress: Progress = do_nothing) -> Tensor:
        """PRIVATE. Counts, int32 [Q, C], in chunks of queries, so that memory does not grow with K * Q."""
        num_classes = self.network["num_classes"]
        counts = torch.zeros(len(x), num_classes, dtype=torch.int32)
        for start in range(0, len(x), TALLY_CHUNK_QUERIES):
            part = x[start : start + TALLY_CHUNK_QUERIES]

            def report(done: int, total: int, start: int = start, size: int = len(part)) -> None:
                progress(start + size * done // total, len(x))

            counts[start : start + len(part)] = voting.tally(self.predict(part, device, report), num_classes)
        return counts


def tally_over_ranks(ensemble: TeacherEnsemble, tally: Callable[[TeacherEnsemble], Tensor], num_points: int) -> Votes:
    """PRIVATE. The votes of all teachers, on every rank; each rank evaluates its share of the teachers.

    Args:
        ensemble: All teachers.
        tally: Counts the votes of some of the teachers, int32 [P, C].
        num_points: P.
    """
    ranks = distributed.get_world()
    counts = torch.zeros(num_points, ensemble.network["num_classes"], dtype=torch.int32)
    if ranks.rank < len(ensemble):
        counts += tally(ensemble.select(slice(ranks.rank, None, ranks.size)))
    distributed.add_over_ranks(counts)
    return Votes(counts, len(ensemble))
