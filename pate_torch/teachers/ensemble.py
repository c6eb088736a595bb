"""K trained teachers of one architecture: stacked parameters, and how they vote."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pate_torch import networks
from pate_torch.core.device import to_device
from pate_torch.core.progress import Progress, do_nothing
from pate_torch.privacy.records import DataSpec
from pate_torch.privacy.sensitive import Votes
from pate_torch.teachers import launch, stacked, voting
from pate_torch.teachers.trunk import Trunk

CPU_TEACHERS, CPU_POINTS = 8, 64
"""Teachers and points evaluated together on a CPU: their activations stay in a core's cache (512 points take 2.5 times
as long). A GPU evaluates a group of teachers on ``launch.compute_gpu_points`` points."""

TALLY_CHUNK_QUERIES = 1 << 16
"""Queries whose predictions are held at a time."""

LogitsCallback = Callable[[slice, Iterable[tuple[int, Tensor]]], None]
"""PRIVATE. Takes some teachers' rows and their logits, part by part."""


def _map_in_threads(work: Callable[[int], int], items: range, on_cpu: bool) -> Iterator[int]:
    """Results in any order; on a CPU by as many Python threads as torch has, each doing its operations alone.

    Threads inside operations of this size mostly wait for each other; and sums they share out change with their number.
    """
    threads = min(torch.get_num_threads(), len(items))
    if not on_cpu or threads == 1:
        yield from map(work, items)
        return
    previous_threads = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            for future in as_completed([pool.submit(work, item) for item in items]):
                yield future.result()
    finally:
        torch.set_num_threads(previous_threads)


@dataclass(frozen=True, eq=False, repr=False)
class TeacherEnsemble:
    """PRIVATE. Teachers with stacked parameters. A teacher whose shard was empty is not trained and votes class 0.

    Attributes:
        network: Description of the network (networks.py).
        params: Stacked parameters, [K, ...] each.
        trained_K: Whether each was trained, bool.
        spec: Facts of the points that are asked about.
        trunk: Gives the features that the networks take; None: they take the points.
    """

    network: dict[str, Any]
    params: stacked.Parameters
    trained_K: Tensor
    spec: DataSpec
    trunk: Trunk | None = None

    def __post_init__(self) -> None:
        teachers = len(self.trained_K)
        if self.trained_K.dtype != torch.bool or teachers < 1:
            raise ValueError("ensemble: trained_K must be a bool tensor with at least one teacher")
        shapes = {name: tuple(p.shape) for name, p in self.params.items()}
        if shapes != {name: (teachers, *p.shape) for name, p in networks.rebuild(self.network).named_parameters()}:
            raise ValueError(f"ensemble: parameters {shapes} do not fit {teachers} networks {self.network['name']!r}")

    def __len__(self) -> int:
        return len(self.trained_K)

    def __repr__(self) -> str:
        return f"TeacherEnsemble({len(self)} teachers, {self.network['name']}, content withheld)"

    def select(self, teachers: slice) -> TeacherEnsemble:
        """Some of the teachers (views, no copy)."""
        params = {name: p[teachers] for name, p in self.params.items()}
        return TeacherEnsemble(self.network, params, self.trained_K[teachers], self.spec, self.trunk)

    def forward_batches(
        self,
        x: Tensor,
        on_logits: LogitsCallback,
        device: torch.device | str = "cpu",
        progress: Progress = do_nothing,
    ) -> None:
        """PRIVATE. Call ``on_logits(rows, parts)`` for a few teachers at a time, from several threads on a CPU.

        Non-finite logits of a point become all equal, a vote for class 0: a teacher which diverged still has exactly
        one vote.

        Args:
            x: Raw points [Q, ...].
            on_logits: Takes (start, logits [k, B, C]) of successive points, on the device.
            device: Device of the evaluation.
            progress: Called with (done, total).
        """
        device, spec = torch.device(device), self.spec
        if self.trunk is not None:
            x, spec = self.trunk.compute_features(x, device), self.trunk.spec
        on_cpu = device.type == "cpu"
        module = networks.rebuild(self.network).to(device)
        dtype = next(iter(self.params.values())).dtype
        chunk_teachers = CPU_TEACHERS if on_cpu else launch.GROUP_TEACHERS
        size = CPU_POINTS if on_cpu else launch.compute_gpu_points(spec)

        def iterate_logits(rows: slice) -> Iterator[tuple[int, Tensor]]:
            params = {name: to_device(p[rows], device) for name, p in self.params.items()}
            for start in range(0, len(x), size):
                part = spec.normalize(to_device(x[start : start + size], device), dtype)
                logits = stacked.forward(module, params, part.unsqueeze(1))
                yield start, torch.where(logits.isfinite().all(2, keepdim=True), logits, 0.0)

        @torch.no_grad()
        def evaluate_chunk(first: int) -> int:
            rows = slice(first, min(first + chunk_teachers, len(self)))
            on_logits(rows, iterate_logits(rows))
            return rows.stop - rows.start

        done = 0
        for count in _map_in_threads(evaluate_chunk, range(0, len(self), chunk_teachers), on_cpu):
            done += count
            progress(done, len(self))

    def predict(self, x: Tensor, device: torch.device | str = "cpu", progress: Progress = do_nothing) -> Tensor:
        """PRIVATE. Each teacher's class, [K, Q], of raw points x [Q, ...]; ties go to the lowest class.

        Of the smallest integer type that holds the classes (uint8 up to 256 of them): convert before indexing with it.
        """
        out = torch.zeros(len(self), len(x), dtype=voting.get_label_dtype(self.network["num_classes"]))

        def store_predictions(rows: slice, parts: Iterable[tuple[int, Tensor]]) -> None:
            classes = [logits.argmax(2).to(out.dtype) for _, logits in parts]
            if classes:
                out[rows] = torch.cat(classes, 1).cpu()

        self.forward_batches(x, store_predictions, device, progress)
        out[~self.trained_K] = 0
        return out

    def predict_proba(self, x: Tensor, device: torch.device | str = "cpu", progress: Progress = do_nothing) -> Tensor:
        """PRIVATE. Each teacher's class probabilities, float32 [K, Q, C], of raw points x [Q, ...]."""
        out = torch.zeros(len(self), len(x), self.network["num_classes"])

        def store_probabilities(rows: slice, parts: Iterable[tuple[int, Tensor]]) -> None:
            for start, logits in parts:
                out[rows, start : start + logits.shape[1]] = logits.float().softmax(2).cpu()

        self.forward_batches(x, store_probabilities, device, progress)
        out[~self.trained_K] = F.one_hot(torch.tensor(0), out.shape[2]).float()
        return out

    def count_votes(self, x: Tensor, device: torch.device | str = "cpu", progress: Progress = do_nothing) -> Votes:
        """PRIVATE. Every teacher's one vote on each point."""
        return Votes(self.tally(x, device, progress), len(self))

    def tally(self, x: Tensor, device: torch.device | str = "cpu", progress: Progress = do_nothing) -> Tensor:
        """PRIVATE. Counts, int32 [Q, C], by stretches of queries: memory does not grow with K * Q."""
        num_classes = self.network["num_classes"]
        counts = torch.zeros(len(x), num_classes, dtype=torch.int32)
        for start in range(0, len(x), TALLY_CHUNK_QUERIES):
            part = x[start : start + TALLY_CHUNK_QUERIES]

            def report(done: int, total: int, start: int = start, size: int = len(part)) -> None:
                progress(start + size * done // total, len(x))

            counts[start : start + len(part)] = voting.tally(self.predict(part, device, report), num_classes)
        return counts
