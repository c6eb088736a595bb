"""Queries that cover the public points geometrically: central points of clusters."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import ClassVar

import torch
from threadpoolctl import threadpool_limits
from torch import Tensor

from pate_torch.core import rng
from pate_torch.features.neighbors import build_neighbor_graph, compute_spectral_embedding
from pate_torch.queries.base import (
    QueryState,
    QueryStrategy,
    compute_round_size,
    get_features,
    get_open_points,
    shuffle,
)

_MAX_EIGENVECTORS = 256
"""Largest number of eigenvectors for clustering. More eigenvectors do not make the clusters purer, and the time grows
with the square of the number (docs/experiments/questions.md)."""
MAX_PROTOTYPE_POINTS = 100_000
"""Largest number of public points for ``Prototypes``, whose eigenvectors would take minutes for more points."""
_NUM_NEIGHBORS = 6
"""Number of neighbors of each point in the graph of ``Prototypes``, which also measures density."""


@dataclass(frozen=True, kw_only=True)
class Medoids(QueryStrategy):
    """The most central point of each k-means cluster, with as many clusters as queries.

    Use this strategy if the cost does not depend on the number of queries, as in reverse k-NN labeling, whose cells
    are the clusters. For few and costly queries use ``Prototypes``, because k-means in learned features does not find
    large clusters.
    """

    uses_guide: ClassVar[bool] = False
    name: str = "medoids"

    def select(self, state: QueryState) -> Tensor:
        count, points = compute_round_size(state), get_open_points(state)
        if count == 0:
            return points[:0]
        stream = rng.make_torch_generator(state.seed, "query", self.name, len(state.query_Q))
        cluster_R, distance_R = fit_kmeans(get_features(state)[points], count, stream)
        medoid_Q = points[[int(distance_R.masked_fill(cluster_R != c, torch.inf).argmin()) for c in cluster_R.unique()]]
        # Duplicate points can leave fewer clusters than queries. Then other points follow.
        other_points = shuffle(points[~torch.isin(points, medoid_Q)], state, self.name)
        return torch.cat([medoid_Q, other_points[: count - len(medoid_Q)]])


@dataclass(frozen=True, kw_only=True)
class Prototypes(QueryStrategy):
    """A typical point of each spectral cluster of the neighbor graph (Ng, Jordan and Weiss 2002).

    There are as many clusters as queries. In the denser half of each cluster, the point nearest to the center is
    asked about, because teachers agree most on typical points. The largest clusters come first, so that a release that
    stops early has covered most of the pool. The strategy uses no answers, so one round suffices.

    k-means on contrastive features without the graph is far worse, because contrastive features are spread evenly over
    the sphere, where large distances are not informative.
    """

    uses_guide: ClassVar[bool] = False
    name: str = "prototypes"

    def select(self, state: QueryState) -> Tensor:
        count, points = compute_round_size(state), get_open_points(state)
        if count == 0 or len(state.pool_x) == 1:
            return points[:count]
        graph = build_neighbor_graph(get_features(state), _NUM_NEIGHBORS, state.search)
        stream = rng.make_torch_generator(state.seed, "query", self.name, len(state.query_Q))
        # Later rounds make more clusters and skip the clusters with an earlier query.
        num_clusters = len(state.query_Q) + count
        place_PW = compute_spectral_embedding(graph, min(num_clusters, _MAX_EIGENVECTORS), stream)
        cluster_P, distance_P = fit_kmeans(place_PW, num_clusters, stream, restarts=4)
        spacing_P = graph.spacing_P.cpu()
        clusters, size_K = cluster_P[~torch.isin(cluster_P, cluster_P[state.query_Q])].unique(return_counts=True)
        # Equal sizes are ordered by the first member, because cluster numbers depend on rounding.
        first_members = [int((cluster_P == cluster).nonzero()[0]) for cluster in clusters]
        prototypes = []
        for _, _, cluster in sorted(zip((-size_K).tolist(), first_members, clusters, strict=True))[:count]:
            is_member_P = cluster_P == cluster
            is_dense_P = is_member_P & (spacing_P <= spacing_P[is_member_P].median())
            prototypes.append(int(distance_P.masked_fill(~is_dense_P, torch.inf).argmin()))
        # Duplicate points can leave fewer clusters than queries. Then the open points with the densest neighborhoods
        # follow.
        prototype_Q = torch.tensor(prototypes, dtype=torch.int64)
        other_points = points[~torch.isin(points, prototype_Q)]
        other_points = other_points[spacing_P[other_points].argsort(stable=True)]
        return torch.cat([prototype_Q, other_points[: count - len(prototype_Q)]])


def fit_kmeans(x_PD: Tensor, clusters: int, generator: torch.Generator, restarts: int = 1) -> tuple[Tensor, Tensor]:
    """Cluster points by the best of ``restarts`` runs of k-means from k-means++ (Arthur and Vassilvitskii 2007).

    Returns:
        Cluster of each point, int64 [P], and squared distance of each point to the center, [P], both on the CPU.
    """
    from sklearn.cluster import KMeans
    from sklearn.exceptions import ConvergenceWarning

    starts = [_draw_plus_plus_centers(x_PD, clusters, generator).cpu().numpy() for _ in range(restarts)]
    # With several threads, the order of additions would depend on the number of threads.
    with threadpool_limits(1), warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # duplicate points leave fewer clusters
        x = x_PD.cpu().numpy()
        runs = [KMeans(clusters, init=start, n_init=1, max_iter=50, tol=0).fit(x) for start in starts]
    best = min(runs, key=lambda run: float(run.inertia_))
    cluster_P, center_KD = torch.from_numpy(best.labels_).long(), torch.from_numpy(best.cluster_centers_)
    return cluster_P, (x_PD.cpu() - center_KD[cluster_P]).square().sum(1)


def _draw_plus_plus_centers(x_PD: Tensor, clusters: int, generator: torch.Generator) -> Tensor:
    """Draw each center with probability proportional to its squared distance to the nearest earlier center.

    The k-means++ of scikit-learn tries several points for each center, and takes five times as long
    (benchmarks/results/timings.md).
    """
    norm_P = x_PD.square().sum(1)
    nearest_P = torch.full((len(x_PD),), torch.inf, device=x_PD.device)
    indices = [int(torch.randint(len(x_PD), (1,), generator=generator))]
    for _ in range(clusters - 1):
        nearest_P = torch.minimum(nearest_P, _compute_distances_to(indices[-1], x_PD, norm_P))
        weight_P = nearest_P.cpu() if float(nearest_P.sum()) > 0 else torch.ones(len(x_PD))
        indices.append(int(torch.multinomial(weight_P, 1, generator=generator)))
    return x_PD[indices]


def _compute_distances_to(point: int, x_PD: Tensor, norm_P: Tensor) -> Tensor:
    return (norm_P + norm_P[point] - 2 * (x_PD @ x_PD[point : point + 1].T).squeeze(1)).clamp(min=0)
