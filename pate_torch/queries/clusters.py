"""Questions spread over the public points by their geometry: covers, clusters, and the most typical point of each."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import ClassVar

import torch
from threadpoolctl import threadpool_limits
from torch import Tensor

from pate_torch.core import rng
from pate_torch.features.neighbors import build_neighbor_graph, compute_spectral_embedding
from pate_torch.queries.base import QueryState, QueryStrategy
from pate_torch.queries.random import compute_round_size, get_features, get_open_points, shuffle

_MAX_EIGENVECTORS = 256
"""Largest number of eigenvectors in which clusters are sought. More find no purer clusters and cost their square
(docs/experiments/questions.md)."""
_NUM_NEIGHBORS = 6
"""Number of neighbors in the graph of ``Prototypes`` and in its measure of density."""


@dataclass(frozen=True, kw_only=True)
class Coreset(QueryStrategy):
    """The greedy k-center cover: each question is the point farthest from all before it; the first, nearest the mean.

    Asks for outliers by design, which an ensemble labels worst: ``Prototypes`` is better under noise.

    Source: Sener and Savarese 2018, Algorithm 1 (core-set).
    """

    uses_guide: ClassVar[bool] = False
    name: str = "coreset"

    def select(self, state: QueryState) -> Tensor:
        x_PD = get_features(state)
        norm_P = x_PD.square().sum(1)
        nearest_P = torch.full((len(x_PD),), torch.inf, device=x_PD.device)
        asked, num_asked = state.query_Q.tolist(), len(state.query_Q)
        for i in range(num_asked + compute_round_size(state)):
            if i >= num_asked:
                asked.append(int(nearest_P.argmax() if i else (x_PD - x_PD.mean(0)).square().sum(1).argmin()))
            nearest_P.clamp_(max=_compute_distances_to(asked[i], x_PD, norm_P))
            nearest_P[asked[i]] = -1.0  # below that of a coinciding point, 0, which may be asked too
        return torch.tensor(asked[num_asked:], dtype=torch.int64)


@dataclass(frozen=True, kw_only=True)
class Medoids(QueryStrategy):
    """The most central point of each of many small k-means clusters, as many as questions.

    For questions that cost nothing each, as in reverse k-NN labeling, whose cells are the clusters. For few and costly
    questions see ``Prototypes``: k-means in learned features does not find large clusters.
    """

    uses_guide: ClassVar[bool] = False
    name: str = "medoids"

    def select(self, state: QueryState) -> Tensor:
        count, points = compute_round_size(state), get_open_points(state)
        if count == 0:
            return points[:0]
        stream = rng.make_torch_generator(state.seed, "query", self.name, len(state.query_Q))
        cluster_R, distance_R = fit_kmeans(get_features(state)[points], count, stream)
        medoid_Q = torch.stack([points[_argmin(distance_R, cluster_R == c)] for c in cluster_R.unique()])
        # Coinciding points leave fewer clusters than questions: other points follow.
        other_points = shuffle(points[~torch.isin(points, medoid_Q)], state, self.name)
        return torch.cat([medoid_Q, other_points[: count - len(medoid_Q)]])


@dataclass(frozen=True, kw_only=True)
class Prototypes(QueryStrategy):
    """A typical point of each spectral cluster of the neighbor graph (Ng, Jordan and Weiss 2002), as many as questions.

    A label is worth most where it speaks for many points, and it is most often right where the point is typical: the
    noisy vote of an ensemble is won most clearly there. Uses no answers, so one round suffices and the queries stay
    non-adaptive.

    k-means straight on contrastive features was tried and is far worse: they are even on the sphere, and far distances
    in them mean nothing. Of each cluster's denser half, the point nearest the center is asked; largest clusters first,
    so that a release cut short has asked about most of the pool.
    """

    uses_guide: ClassVar[bool] = False
    name: str = "prototypes"

    def select(self, state: QueryState) -> Tensor:
        count, points = compute_round_size(state), get_open_points(state)
        if count == 0 or len(state.pool_x) == 1:
            return points[:count]
        graph = build_neighbor_graph(get_features(state), _NUM_NEIGHBORS)
        stream = rng.make_torch_generator(state.seed, "query", self.name, len(state.query_Q))
        # Later rounds cut finer, and leave out the clusters of points that were asked before.
        num_clusters = len(state.query_Q) + count
        place_PW = compute_spectral_embedding(graph, min(num_clusters, _MAX_EIGENVECTORS), stream)
        cluster_P, distance_P = fit_kmeans(place_PW, num_clusters, stream, restarts=4)
        spacing_P = graph.spacing_P.cpu()
        clusters, size_K = cluster_P[~torch.isin(cluster_P, cluster_P[state.query_Q])].unique(return_counts=True)
        # By size, then by the first member: the numbers of clusters depend on rounding, those of points do not.
        first_members = [int((cluster_P == cluster).nonzero()[0]) for cluster in clusters]
        prototypes = []
        for _, _, cluster in sorted(zip((-size_K).tolist(), first_members, clusters, strict=True))[:count]:
            is_member_P = cluster_P == cluster
            prototypes.append(_argmin(distance_P, is_member_P & (spacing_P <= spacing_P[is_member_P].median())))
        # Coinciding points leave fewer clusters than questions: the densest open points follow.
        prototype_Q = torch.tensor(prototypes, dtype=torch.int64)
        other_points = points[~torch.isin(points, prototype_Q)]
        other_points = other_points[spacing_P[other_points].argsort(stable=True)]
        return torch.cat([prototype_Q, other_points[: count - len(prototype_Q)]])


def fit_kmeans(x_PD: Tensor, clusters: int, generator: torch.Generator, restarts: int = 1) -> tuple[Tensor, Tensor]:
    """The cluster of each point, int64 [P], and the squared distance to its center, [P], on the CPU.

    By the best of a few runs of Lloyd's algorithm from k-means++ (Arthur and Vassilvitskii 2007).
    """
    from sklearn.cluster import KMeans
    from sklearn.exceptions import ConvergenceWarning

    starts = [_draw_plus_plus_centers(x_PD, clusters, generator).cpu().numpy() for _ in range(restarts)]
    # Of several threads each would add up a part of a cluster, in another order on another machine.
    with threadpool_limits(1), warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # coinciding points leave fewer clusters
        x = x_PD.cpu().numpy()
        runs = [KMeans(clusters, init=start, n_init=1, max_iter=50, tol=0).fit(x) for start in starts]
    best = min(runs, key=lambda run: float(run.inertia_))
    cluster_P, center_KD = torch.from_numpy(best.labels_).long(), torch.from_numpy(best.cluster_centers_)
    return cluster_P, (x_PD.cpu() - center_KD[cluster_P]).square().sum(1)


def _draw_plus_plus_centers(x_PD: Tensor, clusters: int, generator: torch.Generator) -> Tensor:
    """The start of k-means: points drawn one after the other by their squared distance to the nearest before them.

    scikit-learn's tries several for each and takes five times as long (benchmarks/results/timings.md).
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
    """Squared distances [P] of points of these squared lengths to one of them, never negative."""
    return (norm_P + norm_P[point] - 2 * (x_PD @ x_PD[point : point + 1].T).squeeze(1)).clamp(min=0)


def _argmin(value_P: Tensor, mask_P: Tensor) -> int:
    """The index of the smallest value under the mask, the first of equal ones."""
    return int(value_P.masked_fill(~mask_P, torch.inf).argmin())
