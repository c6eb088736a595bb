"""The k-nearest-neighbor graph of the public points, its leading eigenvectors, and label propagation along its edges.

Distances between far points carry little information about classes, so far points are compared by paths of neighbors.
Points and graphs are public, so no sensitivity depends on whether the search for neighbors is exact.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from scipy.sparse import csr_array
from torch import Tensor

from pate_torch.core import checks
from pate_torch.core.device import single_thread_mode
from pate_torch.core.files import compute_tensor_digest
from pate_torch.core.progress import Progress, Stages, do_nothing
from pate_torch.privacy.records import DataSpec

_CPU_BLOCK_ENTRIES, _GPU_BLOCK_ENTRIES = 1 << 21, 1 << 26
"""Number of entries in a block of distances. A block fits the cache of a CPU core, or keeps a GPU busy (256 MB)."""
_MAX_EXACT_POINTS, _MIN_RECALL, _NUM_SAMPLE_POINTS = 50_000, 0.95, 500
"""Number of points on a CPU above which the search is approximate, its recall, and number of points that show it."""
_NUM_SHARED_NEIGHBORS = 10  # always searched, so that stages that need fewer share one search


@single_thread_mode()  # the rounding depends on the number of threads
def compute_coordinates(x_P: Tensor, spec: DataSpec, width: int = 64) -> Tensor:
    """Project normalized points on their leading principal axes, [P, min(D, width)] on the CPU.

    Distances between points are computed from these rows if no features are learned.
    """
    x_PD = spec.normalize(x_P.cpu()).flatten(1)
    x_PD = x_PD - x_PD.mean(0)
    if x_PD.shape[1] <= width:
        return x_PD
    # The smaller of the two Gram matrices, because some rows have far more features than there are points.
    if x_PD.shape[1] <= len(x_PD):
        return x_PD @ torch.linalg.eigh(x_PD.T @ x_PD).eigenvectors[:, -width:]
    values, vectors = torch.linalg.eigh(x_PD @ x_PD.T)
    return vectors[:, -width:] * values[-width:].clamp(min=0).sqrt()


def to_graph_device(x_PD: Tensor, device: torch.device) -> Tensor:
    """Move points to the device of the distances: ``device``, or the CPU if ``device`` lacks operations (MPS)."""
    return x_PD.to("cpu" if device.type == "mps" else device)


@dataclass(frozen=True, eq=False)
class Graph:
    """A symmetric graph, normalized by degree.

    Attributes:
        weight_PP: Normalized edge weights w_ij / sqrt(d_i d_j), sparse.
        spacing_P: Mean distance of each point to its neighbors, which is small in dense regions.
    """

    weight_PP: csr_array
    spacing_P: Tensor

    def __len__(self) -> int:
        return int(self.weight_PP.shape[0])

    def __matmul__(self, value_PC: Tensor) -> Tensor:
        # SciPy multiplies row by row in one thread, so results have the same bits on every machine.
        return torch.from_numpy(self.weight_PP @ value_PC.numpy())


class NeighborSearch:
    """The search for neighbors in a run. The last result is kept, because stages of a run search the same points."""

    def __init__(self, stages: Stages | None = None) -> None:
        self._stages = Stages(quiet=True) if stages is None else stages
        self.recalls: list[float] = []  # of the approximate searches: share of the nearest neighbors that they found
        self._last: tuple[object, list[Tensor]] = None, []

    def find(self, x_PD: Tensor, count: int) -> list[Tensor]:
        """Find neighbors as ``find_nearest`` does. For a few neighbors, the result for ten is cut."""
        num_searched = min(max(count, _NUM_SHARED_NEIGHBORS), len(x_PD) - 1)
        key, (last_key, found) = (compute_tensor_digest(x_PD), x_PD.device, num_searched), self._last
        if key != last_key:
            found = self._search(x_PD, num_searched)
            self._last = key, found
        return [part[:, :count].clone() for part in found]  # graphs sort their edges in place

    def _search(self, x_PD: Tensor, count: int) -> list[Tensor]:
        """Search exactly, or in more and more of faiss's inverted lists, with the same result on the same machine."""
        if len(x_PD) <= _MAX_EXACT_POINTS or x_PD.device.type != "cpu":
            return find_nearest(x_PD, count)
        name = f"Finding the neighbors of {len(x_PD):,} public points"
        if importlib.util.find_spec("faiss") is None:
            return find_nearest(x_PD, count, self._stages(f"{name}, slower than after pip install 'pate-torch[large]'"))
        faiss, x, progress = importlib.import_module("faiss"), x_PD.contiguous().numpy(), self._stages(name)
        num_threads = faiss.omp_get_max_threads()
        try:
            faiss.omp_set_num_threads(1)  # the rounding depends on the number of threads
            num_lists, recall, parts = round(4 * len(x) ** 0.5), 0.0, []
            index = faiss.IndexIVFFlat(faiss.IndexFlatL2(x.shape[1]), x.shape[1], num_lists)
            index.cp.max_points_per_centroid = 64  # a quarter of the default, and of the time
            index.train(x)
            index.add(x)
            # One point more is searched, because each point finds itself. The two searches round distances differently.
            x_RD = x[np.linspace(0, len(x) - 1, _NUM_SAMPLE_POINTS).astype(int)]
            reach_R1 = faiss.knn(x_RD, x, count + 1)[0][:, -1:] + 1e-5 * np.square(x_RD).mean() * x.shape[1]
            while recall < _MIN_RECALL and index.nprobe < num_lists:
                index.nprobe += 1 + index.nprobe // 4
                recall = float((index.search(x_RD, count + 1)[0][:, 1:] <= reach_R1).mean())
            for x_BD in np.array_split(x, 64):
                parts.append(index.search(x_BD, count + 1))
                progress(len(parts), 64)
            squared_PK, neighbor_PK = (np.concatenate(part) for part in zip(*parts, strict=True))
            few_P = neighbor_PK[:, -1] < 0  # the lists that were read hold too few points
            squared_PK[few_P], neighbor_PK[few_P] = faiss.knn(x[few_P], x, count + 1)
        finally:
            faiss.omp_set_num_threads(num_threads)
        self.recalls.append(recall)
        self._stages.print_message(
            f"Found {recall:.1%} of the nearest neighbors of {_NUM_SAMPLE_POINTS} of the points."
        )
        # Leave out the point itself, or the last of its neighbors, if more points than these are in one place.
        order_PK = (neighbor_PK == np.arange(len(x))[:, None]).argsort(1, kind="stable")[:, :count]
        return [torch.from_numpy(np.take_along_axis(part, order_PK, 1)) for part in (squared_PK, neighbor_PK)]


def build_neighbor_graph(x_PD: Tensor, neighbors: int = 10, search: NeighborSearch | None = None) -> Graph:
    """Connect each point to its nearest ``neighbors`` by edges of weight exp(-d_ij^2 / (s_i s_j)), float32.

    s_i is the distance of i to its last neighbor (Zelnik-Manor and Perona 2004), so that sparse and dense regions are
    connected alike. The memory is P x neighbors, plus one block of distances on the device of the points. ``search`` is
    the search of the run. None for a search of its own.
    """
    checks.integer("neighbors", neighbors, low=1)
    count, num_near = len(x_PD), min(neighbors, len(x_PD) - 1)
    if num_near < 1:
        raise ValueError(f"public points: the neighbor graph needs at least two points, not {count}")
    squared_PK, neighbor_PK = (search or NeighborSearch()).find(x_PD.float(), num_near)
    distance_PK = squared_PK.sqrt()
    scale_P = distance_PK[:, -1].clamp(min=1e-6)
    weight_PK = torch.exp(-squared_PK / (scale_P[:, None] * scale_P[neighbor_PK]))
    first_P = np.arange(0, count * num_near + 1, num_near)
    directed_PP = csr_array((weight_PK.flatten().numpy(), neighbor_PK.flatten().numpy(), first_P), shape=(count, count))
    directed_PP.sort_indices()
    symmetric_PP = (directed_PP + directed_PP.T).tocoo()
    degree_P = symmetric_PP.sum(1).clip(min=1e-12)
    symmetric_PP.data /= np.sqrt(degree_P[symmetric_PP.row] * degree_P[symmetric_PP.col])
    return Graph(symmetric_PP.tocsr(), distance_PK.mean(1))


def find_nearest(x_PD: Tensor, count: int, progress: Progress = do_nothing) -> list[Tensor]:
    """Find the ``count`` nearest other points of each point: squared distances and indices, [P, count] on the CPU.

    One product and one selection per block are twice as fast as scikit-learn's brute force (benchmarks/README.md).
    """
    norm_P, parts = x_PD.square().sum(1), []
    block_rows = max(1, (_CPU_BLOCK_ENTRIES if x_PD.device.type == "cpu" else _GPU_BLOCK_ENTRIES) // len(x_PD))
    buffer_BP = x_PD.new_empty(min(block_rows, len(x_PD)), len(x_PD))  # one allocation saves a fifth of the time
    for start in range(0, len(x_PD), block_rows):
        x_BD, norm_B = x_PD[start : start + block_rows], norm_P[start : start + block_rows]
        squared_BP = torch.add(norm_P, norm_B[:, None], out=buffer_BP[: len(x_BD)])
        squared_BP.addmm_(x_BD, x_PD.T, alpha=-2)
        squared_BP.diagonal(start).fill_(torch.inf)
        parts.append(squared_BP.topk(count, dim=1, largest=False))
        progress(start + len(x_BD), len(x_PD))
    return [torch.cat([values for values, _ in parts]).clamp(min=0).cpu(), torch.cat([row for _, row in parts]).cpu()]


@single_thread_mode()  # the rounding depends on the number of threads
def compute_eigenvectors(
    graph: Graph, width: int, generator: torch.Generator, iterations: int = 60
) -> tuple[Tensor, Tensor]:
    """Compute the largest eigenvalues [W], in increasing order, and their vectors [P, W], W = min(width, P).

    Subspace iteration with the lazy walk (graph + 1)/2, which has no negative eigenvalues, converges to the leading
    eigenvectors. ARPACK is slower, especially for many vectors (docs/experiments/speed.md).
    """
    size = min(width + 8, len(graph))
    basis = torch.linalg.qr(torch.randn(len(graph), size, generator=generator)).Q
    for step in range(1, iterations + 1):
        basis = (graph @ basis).add_(basis).div_(2)
        if step % 5 == 0 or step == iterations:  # every fifth step suffices for the subspace
            basis = torch.linalg.qr(basis).Q
    values, vectors = torch.linalg.eigh(basis.T @ (graph @ basis))
    return values[-width:], (basis @ vectors)[:, -width:]


def compute_spectral_embedding(graph: Graph, width: int, generator: torch.Generator, iterations: int = 60) -> Tensor:
    """Compute the rows of the leading eigenvectors, scaled to length 1, [P, min(width, P)] (Ng et al. 2002)."""
    return F.normalize(compute_eigenvectors(graph, width, generator, iterations)[1], dim=1)


def propagate_labels(graph: Graph, seeds_PC: Tensor, alpha: float = 0.99, iterations: int = 100) -> Tensor:
    """Propagate labels by iterating F = alpha W F + (1 - alpha) seeds, [P, C] (Zhou et al. 2004).

    ``seeds_PC`` is the non-negative label mass of each point, zero for points without labels. ``alpha`` is the share of
    the label of a point that comes from its neighbors.
    """
    checks.between("alpha", alpha, 0, 1, exclusive=True)
    mass_PC = seeds_PC
    for _ in range(iterations):
        mass_PC = alpha * (graph @ mass_PC) + (1 - alpha) * seeds_PC
    return mass_PC


def balance_classes(mass_PC: Tensor, target_C: Tensor) -> Tensor:
    """Scale rows to probabilities whose mean is ``target_C`` (Sinkhorn), [P, C]. Rows of zeros become ``target_C``."""
    share_PC = torch.where(mass_PC.sum(1, keepdim=True) > 0, mass_PC, target_C)
    for _ in range(20):
        share_PC = share_PC / share_PC.sum(1, keepdim=True).clamp(min=1e-30)
        share_PC = share_PC * (target_C / share_PC.mean(0).clamp(min=1e-12))
    return share_PC / share_PC.sum(1, keepdim=True).clamp(min=1e-30)
