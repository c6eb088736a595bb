"""The geometry of the public points: features, distances, clusters. Deterministic given a generator."""

from __future__ import annotations

import torch
from torch import Tensor

from pate_torch.features.neighbors import coordinates
from pate_torch.protocols import QueryState

_BLOCK = 1 << 22  # entries of one block of a distance matrix: 16 MB


def features(state: QueryState, width: int = 64) -> Tensor:
    """The learnt features, else the normalized points on at most ``width`` axes; float32 [P, D] on the CPU."""
    if state.feature_PD is not None:
        return state.feature_PD.float().cpu()
    return coordinates(state.pool_x, state.spec, width)


def squared_distances(x_PD: Tensor, y_KD: Tensor) -> Tensor:
    """Squared distances [P, K], never negative; direct differences would need P x K x D memory."""
    norms = x_PD.square().sum(1)[:, None] + y_KD.square().sum(1)[None]
    return (norms - 2 * x_PD @ y_KD.T).clamp(min=0)


def neighbor_distance(x_PD: Tensor, neighbors: int) -> Tensor:
    """Mean distance of each point to its nearest ``neighbors`` others, [P]: small where points are dense."""
    count = min(neighbors, len(x_PD) - 1)
    if count < 1:
        return torch.zeros(len(x_PD))
    parts = []
    for block in x_PD.split(max(1, _BLOCK // len(x_PD))):
        nearest = squared_distances(block, x_PD).topk(count + 1, dim=1, largest=False).values
        parts.append(nearest[:, 1:].sqrt().mean(1))
    return torch.cat(parts)


def kmeans(
    x_PD: Tensor, clusters: int, generator: torch.Generator, restarts: int = 4, steps: int = 50
) -> tuple[Tensor, Tensor]:
    """The best of a few runs of Lloyd's algorithm.

    Starts are k-means++ (Arthur and Vassilvitskii 2007); a cluster left empty takes the point farthest from its own.

    Returns:
        The cluster of each point [P], and the centers [K, D].
    """
    best: tuple[float, Tensor, Tensor] | None = None
    for _ in range(restarts):
        center_KD = _plus_plus(x_PD, clusters, generator)
        cluster_P = torch.full((len(x_PD),), -1)
        for _ in range(steps):
            distance_PK = squared_distances(x_PD, center_KD)
            nearest_P, moved_P = distance_PK.min(1)
            if torch.equal(moved_P, cluster_P):
                break
            cluster_P = moved_P
            center_KD = _means(x_PD, cluster_P, nearest_P, clusters)
        cost = float(squared_distances(x_PD, center_KD).min(1).values.sum())
        if best is None or cost < best[0]:
            best = (cost, cluster_P, center_KD)
    assert best is not None
    return best[1], best[2]


def _means(x_PD: Tensor, cluster_P: Tensor, nearest_P: Tensor, clusters: int) -> Tensor:
    size_K = torch.bincount(cluster_P, minlength=clusters)
    sums = torch.zeros(clusters, x_PD.shape[1]).index_add_(0, cluster_P, x_PD)
    center_KD = sums / size_K.clamp(min=1)[:, None]
    empty = (size_K == 0).nonzero().squeeze(1)
    center_KD[empty] = x_PD[nearest_P.topk(len(empty)).indices]
    return center_KD


def _plus_plus(x_PD: Tensor, clusters: int, generator: torch.Generator) -> Tensor:
    first = int(torch.randint(len(x_PD), (1,), generator=generator))
    centers = [x_PD[first]]
    nearest_P = squared_distances(x_PD, x_PD[first : first + 1]).squeeze(1)
    for _ in range(clusters - 1):
        weight = nearest_P if float(nearest_P.sum()) > 0 else torch.ones(len(x_PD))
        chosen = int(torch.multinomial(weight, 1, generator=generator))
        centers.append(x_PD[chosen])
        nearest_P = torch.minimum(nearest_P, squared_distances(x_PD, x_PD[chosen : chosen + 1]).squeeze(1))
    return torch.stack(centers)
