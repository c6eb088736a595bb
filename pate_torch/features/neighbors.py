"""The k-nearest-neighbor graph of the public points, its leading eigenvectors, and label propagation along its edges.

Distances between far points carry little information about classes, so far points are compared by paths of neighbors.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from scipy.sparse import csr_array
from torch import Tensor

from pate_torch.core import checks
from pate_torch.core.device import single_thread_mode
from pate_torch.privacy.records import DataSpec

_CPU_BLOCK_ENTRIES, _GPU_BLOCK_ENTRIES = 1 << 21, 1 << 26
"""Number of entries in a block of distances. A block fits the cache of a CPU core, or keeps a GPU busy (256 MB)."""


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


def build_neighbor_graph(x_PD: Tensor, neighbors: int = 10) -> Graph:
    """Connect each point to its nearest ``neighbors`` by edges of weight exp(-d_ij^2 / (s_i s_j)), float32.

    s_i is the distance of i to its last neighbor (Zelnik-Manor and Perona 2004), so that sparse and dense regions are
    connected alike. The memory is P x neighbors, plus one block of distances on the device of the points.
    """
    checks.integer("neighbors", neighbors, low=1)
    count, num_near = len(x_PD), min(neighbors, len(x_PD) - 1)
    if num_near < 1:
        raise ValueError(f"public points: the neighbor graph needs at least two points, not {count}")
    squared_PK, neighbor_PK = (part.cpu() for part in find_nearest(x_PD.float(), num_near))
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


def find_nearest(x_PD: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Find the ``count`` nearest other points of each point: squared distances and indices, both [P, count].

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
    return torch.cat([values for values, _ in parts]).clamp(min=0), torch.cat([indices for _, indices in parts])


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


def sinkhorn_balance(mass_PC: Tensor, target_C: Tensor, iterations: int = 20) -> Tensor:
    """Scale rows to probabilities whose mean is ``target_C`` (Sinkhorn). Rows of zeros become ``target_C``."""
    share_PC = torch.where(mass_PC.sum(1, keepdim=True) > 0, mass_PC, target_C)
    for _ in range(iterations):
        share_PC = share_PC / share_PC.sum(1, keepdim=True).clamp(min=1e-30)
        share_PC = share_PC * (target_C / share_PC.mean(0).clamp(min=1e-12))
    return share_PC / share_PC.sum(1, keepdim=True).clamp(min=1e-30)
