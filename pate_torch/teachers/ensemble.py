"""Ensembles: K trained teachers of one architecture with stacked parameters, and their predictions and votes."""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pate_torch import networks
from pate_torch.core.device import Device, run_in_parallel, to_device
from pate_torch.core.progress import Progress, do_nothing
from pate_torch.privacy.records import DataSpec
from pate_torch.privacy.sensitive import SoftVotes, Votes, count_bins, get_scores
from pate_torch.teachers import stacked, voting
from pate_torch.teachers.recipe import Trunk

CPU_TEACHERS, CPU_POINTS = 8, 64
"""Numbers of teachers and of points evaluated together on a CPU. Their activations fit into the cache of a core."""

GPU_TEACHERS, MAX_GPU_POINTS = 16, 512
"""Number of teachers and largest number of points evaluated together on a GPU."""

GPU_PIXELS = 1 << 22
"""Largest number of image pixels (of numbers, for rows) in all batches of one launch on a GPU.

The convnet of the PATE papers, which needs most memory, takes 4.5 KiB for each pixel, together 18 GiB."""

TALLY_CHUNK_QUERIES = 1 << 16
"""Number of queries whose predictions are in memory at a time."""

LogitsCallback = Callable[[slice, Iterable[tuple[int, Tensor]]], None]
"""PRIVATE. Function that receives the rows of some teachers and an iterable of (first point, logits [k, B, C])."""

VoteFunction = Callable[[Tensor], Tensor]
"""PRIVATE. Function from one teacher's logits of all points, float32 [Q, C] on the CPU, to its classes, [Q]."""


def compute_gpu_points(spec: DataSpec) -> int:
    """Compute the number of points on which a GPU evaluates ``GPU_TEACHERS`` at once."""
    return max(1, min(MAX_GPU_POINTS, GPU_PIXELS // (GPU_TEACHERS * math.prod(spec.input_shape[-2:]))))


@dataclass(frozen=True, eq=False, repr=False)
class TeacherEnsemble:
    """PRIVATE. Teachers with stacked parameters. A teacher with an empty shard is not trained and votes for class 0.

    Attributes:
        network: Description of the network (``networks.describe``).
        groups: PRIVATE. Stacked parameters of successive teachers, [k, ...] each, which may be maps of files.
        trained_K: Whether each teacher was trained, bool [K].
        spec: Facts of the points that the teachers label.
        trunk: Encoder of the features that the networks take as input. None if the input is the points.
    """

    network: dict[str, Any]
    groups: Sequence[stacked.Parameters]
    trained_K: Tensor
    spec: DataSpec
    trunk: Trunk | None = None

    def __post_init__(self) -> None:
        shapes = {name: p.shape for name, p in networks.rebuild(self.network).named_parameters()}
        sizes = [len(next(iter(group.values()))) for group in self.groups]
        for size, group in zip(sizes, self.groups, strict=True):
            if {name: p.shape for name, p in group.items()} != {name: (size, *shape) for name, shape in shapes.items()}:
                raise ValueError(f"ensemble: parameters of {size} teachers do not fit {self.network['name']!r}")
        if sum(sizes) != len(self):
            raise ValueError(f"ensemble: parameters of {sum(sizes)} teachers do not fit {len(self)} teachers")

    def __len__(self) -> int:
        return len(self.trained_K)

    def __repr__(self) -> str:
        return f"TeacherEnsemble({len(self)} teachers, {self.network['name']}, content withheld)"

    @property
    def params(self) -> stacked.Parameters:
        """PRIVATE. Parameters of all teachers in memory, [K, ...] each."""
        return {name: torch.cat([group[name] for group in self.groups]) for name in self.groups[0]}

    def split_chunks(self, size: int) -> list[tuple[slice, stacked.Parameters]]:
        """PRIVATE. Return the teachers of each group in chunks of ``size``, with their parameters, without a copy."""
        chunks, start = list[tuple[slice, stacked.Parameters]](), 0
        for group in self.groups:
            for parts in zip(*(p.split(size) for p in group.values()), strict=True):
                chunks.append((slice(start, start + len(parts[0])), dict(zip(group, parts, strict=True))))
                start += len(parts[0])
        return chunks

    def forward_batches(
        self, x: Tensor, on_logits: LogitsCallback, device: Device = "cpu", progress: Progress = do_nothing
    ) -> None:
        """PRIVATE. Compute logits of raw points [Q, ...], and call ``on_logits`` for a few teachers at a time.

        On a CPU several threads call ``on_logits``; the operations of each use one thread, because the rounding of sums
        depends on the number of threads. Logits that are not finite are replaced by zeros, so that a teacher that
        diverged votes for class 0.
        """
        device, spec = torch.device(device), self.spec
        if self.trunk is not None:
            x, spec = self.trunk.compute_features(x, device), self.trunk.spec
        module, dtype = networks.rebuild(self.network).to(device), next(iter(self.groups[0].values())).dtype
        on_cpu = device.type == "cpu"
        chunk_teachers, size = (CPU_TEACHERS, CPU_POINTS) if on_cpu else (GPU_TEACHERS, compute_gpu_points(spec))

        def iterate_logits(chunk: stacked.Parameters) -> Iterator[tuple[int, Tensor]]:
            # Copies start at aligned addresses, as views of files need not, and the rounding may depend on the address.
            params = {name: p.clone() if on_cpu else to_device(p, device) for name, p in chunk.items()}
            for start in range(0, len(x), size):
                part = spec.normalize(to_device(x[start : start + size], device), dtype)
                logits = stacked.forward(module, params, part.unsqueeze(1))
                yield start, torch.where(logits.isfinite().all(2, keepdim=True), logits, 0.0)

        @torch.no_grad()
        def evaluate_chunk(rows: slice, chunk: stacked.Parameters, report: Progress) -> None:
            on_logits(rows, iterate_logits(chunk))
            report(rows.stop - rows.start, rows.stop - rows.start)

        jobs = [functools.partial(evaluate_chunk, *chunk) for chunk in self.split_chunks(chunk_teachers)]
        run_in_parallel(jobs, device, progress)

    def predict(
        self, x: Tensor, device: Device = "cpu", progress: Progress = do_nothing, vote: VoteFunction | None = None
    ) -> Tensor:
        """PRIVATE. Predict the class of raw points [Q, ...] by each teacher, [K, Q]; ties go to the lowest class.

        If ``vote`` is None, a teacher votes for the class with the largest logit. The type of the result is
        ``voting.get_label_dtype``. Convert a uint8 tensor before indexing with it.
        """
        out = torch.zeros(len(self), len(x), dtype=voting.get_label_dtype(self.network["num_classes"]))

        def store_predictions(rows: slice, parts: Iterable[tuple[int, Tensor]]) -> None:
            if vote is not None:
                logits_kQC = torch.cat([logits.float().cpu() for _, logits in parts], 1)
                out[rows] = torch.stack([vote(logits_QC) for logits_QC in logits_kQC]).to(out.dtype)
            elif classes := [logits.argmax(2).to(out.dtype) for _, logits in parts]:
                out[rows] = torch.cat(classes, 1).cpu()

        self.forward_batches(x, store_predictions, device, progress)
        out[~self.trained_K] = 0
        return out

    def compute_logits(self, x: Tensor, device: Device = "cpu", progress: Progress = do_nothing) -> Tensor:
        """PRIVATE. Compute the logits of raw points [Q, ...] by each teacher, float32 [K, Q, C]."""
        out = torch.zeros(len(self), len(x), self.network["num_classes"])

        def store_logits(rows: slice, parts: Iterable[tuple[int, Tensor]]) -> None:
            for start, logits in parts:
                out[rows, start : start + logits.shape[1]] = logits.float().cpu()

        self.forward_batches(x, store_logits, device, progress)
        return out

    def predict_proba(self, x: Tensor, device: Device = "cpu", progress: Progress = do_nothing) -> Tensor:
        """PRIVATE. Compute the class probabilities of raw points [Q, ...] by each teacher, float32 [K, Q, C]."""
        out = self.compute_logits(x, device, progress)
        for logits_QC in out:  # in place, because the K x Q x C numbers may fill much of the memory
            logits_QC.copy_(logits_QC.softmax(1))
        out[~self.trained_K] = F.one_hot(torch.tensor(0), out.shape[2]).float()
        return out

    def count_votes(self, x: Tensor, device: Device = "cpu", progress: Progress = do_nothing) -> Votes:
        """PRIVATE. Return the votes on raw points [Q, ...], one of each teacher on each point."""
        return Votes(self.tally(x, device, progress), len(self))

    def tally(
        self, x: Tensor, device: Device = "cpu", progress: Progress = do_nothing, vote: VoteFunction | None = None
    ) -> Tensor:
        """PRIVATE. Count the votes on raw points [Q, ...], int32 [Q, C], in chunks of points without ``vote``."""
        num_classes, chunk_size = self.network["num_classes"], TALLY_CHUNK_QUERIES if vote is None else max(1, len(x))
        counts = torch.zeros(len(x), num_classes, dtype=torch.int32)
        for start in range(0, len(x), chunk_size):
            part = x[start : start + chunk_size]

            def report(done: int, total: int, start: int = start, size: int = len(part)) -> None:
                progress(start + size * done // total, len(x))

            counts[start : start + len(part)] = voting.tally(self.predict(part, device, report, vote), num_classes)
        return counts

    def tally_probabilities(
        self, x: Tensor, bins: int, device: Device = "cpu", progress: Progress = do_nothing
    ) -> SoftVotes:
        """PRIVATE. Count the class probabilities of raw points [Q, ...] in ``bins`` as they are computed."""
        first_class_C, lock = F.one_hot(torch.tensor(0), self.network["num_classes"]).float(), threading.Lock()
        num_scores, dtype = get_scores(first_class_C[None, None]).shape[2], voting.get_label_dtype(len(self) + 1)
        histograms = [torch.zeros(len(x), num_scores, size, dtype=dtype) for size in (bins, bins - 1)]

        def count_scores(rows: slice, parts: Iterable[tuple[int, Tensor]]) -> None:
            for start, logits in parts:
                probability_kBC = logits.float().cpu().softmax(2)
                probability_kBC[~self.trained_K[rows]] = first_class_C
                counts = count_bins(get_scores(probability_kBC), bins)
                with lock:  # several threads add to the same histograms
                    for histogram, count in zip(histograms, counts, strict=True):
                        histogram[start : start + len(count)] += count.to(dtype)

        self.forward_batches(x, count_scores, device, progress)
        return SoftVotes(histograms[0], histograms[1], len(self))
