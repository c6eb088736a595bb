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
from pate_torch.protocols import Progress, do_nothing
from pate_torch.sensitive import Votes
from pate_torch.teachers import launch, stacked, voting
from pate_torch.teachers.recipe import MEMORY_GIB
from pate_torch.teachers.trunk import Trunk
from pate_torch.types import DataSpec

TEACHERS, POINTS = 8, 64
"""Teachers and points evaluated together on a CPU: their activations stay in a core's cache (512 points take 2.5 times
as long). A GPU takes as many as its memory holds (``launch.ask_size``)."""

STRETCH = 1 << 16
"""Queries whose predictions are held at a time."""

Hear = Callable[[slice, Iterable[tuple[int, Tensor]]], None]
"""PRIVATE. Takes some teachers' rows and their logits, part by part."""


def _in_threads(work: Callable[[int], int], items: range, on_cpu: bool) -> Iterator[int]:
    """Results in any order; on a CPU by as many Python threads as torch has, each doing its operations alone.

    Threads inside operations of this size mostly wait for each other; and sums they share out change with their number.
    """
    threads = min(torch.get_num_threads(), len(items))
    if not on_cpu or threads == 1:
        yield from map(work, items)
        return
    before = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            for future in as_completed([pool.submit(work, item) for item in items]):
                yield future.result()
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True, eq=False, repr=False)
class Ensemble:
    """PRIVATE. Teachers with stacked parameters. A teacher whose shard was empty is not trained and votes class 0.

    Attributes:
        network: Description of the network (networks.py).
        params: Stacked parameters, [K, ...] each.
        trained_K: Whether each was trained, bool.
        spec: Facts of the points that are asked about.
        trunk: Gives the features that the networks take; None: they take the points.
        memory_gib: Memory that the teachers may take on a GPU while they are asked.
    """

    network: dict[str, Any]
    params: stacked.Parameters
    trained_K: Tensor
    spec: DataSpec
    trunk: Trunk | None = None
    memory_gib: float = MEMORY_GIB

    def __post_init__(self) -> None:
        teachers = len(self.trained_K)
        if self.trained_K.dtype != torch.bool or teachers < 1:
            raise ValueError("ensemble: trained_K must be a bool tensor with at least one teacher")
        expected = {name: tuple(p.shape) for name, p in self._module().named_parameters()}
        found = {name: tuple(p.shape) for name, p in self.params.items()}
        if found != {name: (teachers, *shape) for name, shape in expected.items()}:
            raise ValueError(f"ensemble: parameters {found} do not fit {teachers} networks {self.network['name']!r}")

    def __len__(self) -> int:
        return len(self.trained_K)

    def __repr__(self) -> str:
        return f"Ensemble({len(self)} teachers, {self.network['name']}, content withheld)"

    def _module(self) -> torch.nn.Module:
        return networks.rebuild(self.network)

    def select(self, teachers: slice) -> Ensemble:
        """Some of the teachers (views, no copy)."""
        params = {name: p[teachers] for name, p in self.params.items()}
        return Ensemble(self.network, params, self.trained_K[teachers], self.spec, self.trunk, self.memory_gib)

    def opinions(
        self,
        x: Tensor,
        hear: Hear,
        batch: int | None = None,
        device: torch.device | str = "cpu",
        progress: Progress = do_nothing,
    ) -> None:
        """PRIVATE. Call ``hear(rows, parts)`` for a few teachers at a time, from several threads on a CPU.

        Non-finite logits of a point become all equal, a vote for class 0: a teacher which diverged still has exactly
        one vote.

        Args:
            x: Raw points [Q, ...].
            hear: Takes (start, logits [k, B, C]) of successive points, on the device.
            batch: Points at a time; None: by the device.
            device: Device of the evaluation.
            progress: Called with (done, total).
        """
        device, spec = torch.device(device), self.spec
        if self.trunk is not None:
            x, spec = self.trunk.features(x, device), self.trunk.spec
        on_cpu = device.type == "cpu"
        module = self._module().to(device)
        dtype = next(iter(self.params.values())).dtype
        together, size = (TEACHERS, POINTS) if on_cpu else self._fitting(spec, dtype)
        size = batch or size

        def parts(rows: slice) -> Iterator[tuple[int, Tensor]]:
            params = {name: to_device(p[rows], device) for name, p in self.params.items()}
            for start in range(0, len(x), size):
                part = spec.normalize(to_device(x[start : start + size], device), dtype)
                logits = stacked.forward(module, params, part.unsqueeze(1))
                yield start, torch.where(logits.isfinite().all(2, keepdim=True), logits, 0.0)

        @torch.no_grad()
        def ask(first: int) -> int:
            rows = slice(first, min(first + together, len(self)))
            hear(rows, parts(rows))
            return rows.stop - rows.start

        done = 0
        for count in _in_threads(ask, range(0, len(self), together), on_cpu):
            done += count
            progress(done, len(self))

    def _fitting(self, spec: DataSpec, dtype: torch.dtype) -> tuple[int, int]:
        """Teachers and points that are asked at once on a GPU."""
        cost = launch.network_cost(self.network["name"], self.network["options"], spec)
        return launch.ask_size(cost, len(self), self.memory_gib, dtype.itemsize)

    def predictions(
        self, x: Tensor, batch: int | None = None, device: torch.device | str = "cpu", progress: Progress = do_nothing
    ) -> Tensor:
        """PRIVATE. Each teacher's class, [K, Q], of raw points x [Q, ...]; ties go to the lowest class.

        Of the smallest integer type that holds the classes (uint8 up to 256 of them): convert before indexing with it.
        """
        out = torch.zeros(len(self), len(x), dtype=voting.label_dtype(self.network["num_classes"]))

        def hear(rows: slice, parts: Iterable[tuple[int, Tensor]]) -> None:
            predicted = [logits.argmax(2).to(out.dtype) for _, logits in parts]
            if predicted:
                out[rows] = torch.cat(predicted, 1).cpu()

        self.opinions(x, hear, batch, device, progress)
        out[~self.trained_K] = 0
        return out

    def probabilities(
        self, x: Tensor, batch: int | None = None, device: torch.device | str = "cpu", progress: Progress = do_nothing
    ) -> Tensor:
        """PRIVATE. Each teacher's class probabilities, float32 [K, Q, C], of raw points x [Q, ...]."""
        out = torch.zeros(len(self), len(x), self.network["num_classes"])

        def hear(rows: slice, parts: Iterable[tuple[int, Tensor]]) -> None:
            for start, logits in parts:
                out[rows, start : start + logits.shape[1]] = logits.float().softmax(2).cpu()

        self.opinions(x, hear, batch, device, progress)
        out[~self.trained_K] = F.one_hot(torch.tensor(0), out.shape[2]).float()
        return out

    def votes(
        self, x: Tensor, batch: int | None = None, device: torch.device | str = "cpu", progress: Progress = do_nothing
    ) -> Votes:
        """PRIVATE. Every teacher's one vote on each point."""
        return Votes(self.tally(x, batch, device, progress), len(self))

    def tally(
        self, x: Tensor, batch: int | None = None, device: torch.device | str = "cpu", progress: Progress = do_nothing
    ) -> Tensor:
        """PRIVATE. Counts, int32 [Q, C], by stretches of queries: memory does not grow with K * Q."""
        num_classes = self.network["num_classes"]
        counts = torch.zeros(len(x), num_classes, dtype=torch.int32)
        stretch = max(batch or 0, STRETCH)
        for start in range(0, len(x), stretch):
            part = x[start : start + stretch]

            def report(done: int, total: int, start: int = start, size: int = len(part)) -> None:
                progress(start + size * done // total, len(x))

            counts[start : start + stretch] = voting.tally(self.predictions(part, batch, device, report), num_classes)
        return counts
