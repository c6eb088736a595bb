"""Questions spread over the public points by their geometry alone: covers, clusters, and the most typical of each."""

from __future__ import annotations

import dataclasses
import warnings
from dataclasses import dataclass
from typing import ClassVar

import torch
from sklearn.cluster import KMeans
from sklearn.exceptions import ConvergenceWarning
from threadpoolctl import threadpool_limits
from torch import Tensor

from pate_torch.core import checks, rng
from pate_torch.features.neighbors import build_neighbor_graph, compute_spectral_embedding, split_blocks
from pate_torch.queries.base import QueryState, QueryStrategy
from pate_torch.queries.random import compute_round_size, get_features, get_open_points, shuffle
from pate_torch.queries.uncertainty import Margin

_MAX_EIGENVECTORS = 256
"""Eigenvectors that clusters are sought in, at most: more find none that are purer, and cost their square
(docs/experiments/questions.md)."""


@dataclass(frozen=True, kw_only=True)
class Coreset(QueryStrategy):
    """The greedy k-center cover: each question is the point farthest from all before it; the first, nearest the mean.

    Asks for outliers by design, which an ensemble labels worst: ``Prototypes`` is better under noise.

    Source: Sener and Savarese 2018, Algorithm 1 (core-set).
    """

    uses_guide: ClassVar[bool] = False
    name: str = "coreset"
    rounds: int = 1

    def __post_init__(self) -> None:
        checks.integer("query.rounds", self.rounds, low=1)

    def select(self, state: QueryState) -> Tensor:
        x_PD = get_features(state)
        norm_P = x_PD.square().sum(1)
        nearest_P = torch.full((len(x_PD),), torch.inf, device=x_PD.device)

        def cover(point: int) -> None:
            """Distances to the nearest asked point, -1 at itself: what coincides with one (0) may be asked too."""
            nearest_P.clamp_(max=_compute_distances_to(point, x_PD, norm_P))
            nearest_P[point] = -1.0

        for index in state.query_Q.tolist():
            cover(index)
        query_indices: list[int] = []
        for _ in range(compute_round_size(state)):
            if torch.isinf(nearest_P).all():
                query_indices.append(int(compute_squared_distances(x_PD, x_PD.mean(0, keepdim=True)).argmin()))
            else:
                query_indices.append(int(nearest_P.argmax()))
            cover(query_indices[-1])
        return torch.tensor(query_indices, dtype=torch.int64)


@dataclass(frozen=True, kw_only=True)
class Medoids(QueryStrategy):
    """The most central point of each of many small k-means clusters, as many as questions.

    In the learnt features, else on principal axes. For questions that cost nothing each, as in reverse k-NN labeling,
    whose cells are the clusters. For few and costly ones see ``Prototypes``: k-means in learnt features does not find
    large clusters, whose points lie as far apart as those of different ones.

    Attributes:
        restarts: Number of runs of k-means.
    """

    uses_guide: ClassVar[bool] = False
    name: str = "medoids"
    rounds: int = 1
    restarts: int = 1

    def __post_init__(self) -> None:
        checks.integer("query.rounds", self.rounds, low=1)
        checks.integer("query.restarts", self.restarts, low=1)

    def select(self, state: QueryState) -> Tensor:
        count = compute_round_size(state)
        points = get_open_points(state)
        if count == 0:
            return points[:0]
        x_RD = get_features(state)[points]
        stream = rng.make_torch_generator(state.seed, "query", self.name, len(state.query_Q))
        cluster_R, center_KD = fit_kmeans(x_RD, count, stream, self.restarts)
        distance_R = compute_center_distances(x_RD, cluster_R, center_KD).cpu()
        cluster_R = cluster_R.cpu()
        query_indices = []
        for cluster in cluster_R.unique().tolist():
            members = (cluster_R == cluster).nonzero().squeeze(1)
            query_indices.append(int(points[members[distance_R[members].argmin()]]))
        # Coinciding points leave fewer clusters than questions.
        medoid_Q = torch.tensor(query_indices, dtype=torch.int64)
        other_points = shuffle(points[~torch.isin(points, medoid_Q)], state, self.name)
        return torch.cat([medoid_Q, other_points[: count - len(query_indices)]])


@dataclass(frozen=True, kw_only=True)
class Prototypes(QueryStrategy):
    """A typical point of each spectral cluster of the neighbor graph (Ng, Jordan and Weiss 2002), as many as questions.

    A label is worth most where it speaks for many points, and it is most often right where the point is typical: the
    noisy vote of an ensemble is won most clearly there. Uses no answers, so one round suffices and the queries stay
    non-adaptive.

    The graph joins near points in the learnt features, or on principal axes where there are none. k-means straight on
    contrastive features was tried and is far worse: they are even on the sphere, and far distances in them mean
    nothing. Of each cluster's denser half, the point nearest the center is asked; largest clusters first, so that a
    release cut short has asked about most of the pool.

    Attributes:
        neighbors: Number of neighbors in the graph, and in the measure of density.
        restarts: Number of runs of k-means on the eigenvectors.
    """

    uses_guide: ClassVar[bool] = False
    name: str = "prototypes"
    rounds: int = 1
    neighbors: int = 6
    restarts: int = 4

    def __post_init__(self) -> None:
        checks.integer("query.rounds", self.rounds, low=1)
        checks.integer("query.neighbors", self.neighbors, low=1)
        checks.integer("query.restarts", self.restarts, low=1)

    def select(self, state: QueryState) -> Tensor:
        count = compute_round_size(state)
        if count == 0 or len(state.pool_x) == 1:
            return get_open_points(state)[:count]
        graph = build_neighbor_graph(get_features(state), self.neighbors)
        stream = rng.make_torch_generator(state.seed, "query", self.name, len(state.query_Q))
        # Later rounds cut finer: a cluster with an asked point in it has spoken.
        clusters = len(state.query_Q) + count
        place_PW = compute_spectral_embedding(graph, min(clusters, _MAX_EIGENVECTORS), stream)
        cluster_P, center_KW = fit_kmeans(place_PW, clusters, stream, self.restarts)
        distance_P = compute_center_distances(place_PW, cluster_P, center_KW).cpu()
        spacing_P, cluster_P = graph.spacing_P.cpu(), cluster_P.cpu()
        size_K = torch.bincount(cluster_P, minlength=len(center_KW))
        size_K[cluster_P[state.query_Q]] = 0
        first_K = torch.full_like(size_K, len(cluster_P))  # clusters are numbered as rounding has it, points are not
        first_K = first_K.scatter_reduce(0, cluster_P, torch.arange(len(cluster_P)), "amin")
        clusters_by_size = sorted(zip((-size_K).tolist(), first_K.tolist(), range(len(size_K)), strict=True))
        query_indices = []
        for cluster in [cluster for negative_size, _, cluster in clusters_by_size if negative_size < 0][:count]:
            members = (cluster_P == cluster).nonzero().squeeze(1)
            dense_members = members[spacing_P[members] <= spacing_P[members].median()]
            query_indices.append(int(dense_members[distance_P[dense_members].argmin()]))
        # Coinciding points leave fewer clusters than questions: the densest open points follow.
        prototype_Q = torch.tensor(query_indices, dtype=torch.int64)
        extra = get_open_points(state)
        extra = extra[~torch.isin(extra, prototype_Q)]
        extra = extra[spacing_P[extra].argsort(stable=True)]
        return torch.cat([prototype_Q, extra[: count - len(prototype_Q)]])


@dataclass(frozen=True, kw_only=True)
class PrototypesThenMargin(Prototypes):
    """Asks ``num_prototypes`` prototypes; what remains, in equal shares over the other rounds, by the smallest margin.

    Labels that found clusters, then labels that mend their borders. Random first questions find fewer clusters (see
    ``Prototypes``), and the margin of a student that has missed one is large there. Without answers to learn from,
    prototypes again.

    Attributes:
        num_prototypes: Number of prototypes that are asked in the first round.
    """

    uses_guide: ClassVar[bool] = True
    name: str = "prototypes_then_margin"
    rounds: int = 2
    num_prototypes: int = 50

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.integer("query.rounds", self.rounds, low=2)
        checks.integer("query.num_prototypes", self.num_prototypes, low=1)

    def select(self, state: QueryState) -> Tensor:
        if len(state.query_Q) == 0:
            num_remaining = min(self.num_prototypes, state.num_remaining)
            state = dataclasses.replace(state, num_remaining=num_remaining, num_rounds_left=1)
        if state.student_PC is None:
            return super().select(state)
        return Margin(name=self.name, rounds=self.rounds).select(state)


def compute_squared_distances(x_PD: Tensor, y_KD: Tensor) -> Tensor:
    """Squared distances [P, K], never negative; direct differences would need P x K x D memory."""
    norms = x_PD.square().sum(1)[:, None] + y_KD.square().sum(1)[None]
    return (norms - 2 * x_PD @ y_KD.T).clamp(min=0)


def compute_center_distances(x_PD: Tensor, cluster_P: Tensor, center_KD: Tensor) -> Tensor:
    """Squared distance [P] of each point to its cluster's center, by blocks of all distances."""
    blocks = split_blocks(x_PD, len(center_KD))
    parts = [compute_squared_distances(x_PD[rows], center_KD).gather(1, cluster_P[rows, None]) for rows in blocks]
    return torch.cat(parts).squeeze(1)


def fit_kmeans(
    x_PD: Tensor, clusters: int, generator: torch.Generator, restarts: int = 4, steps: int = 50
) -> tuple[Tensor, Tensor]:
    """The cluster of each point [P] and the centers [K, D] by the best of a few runs of Lloyd's algorithm.

    Runs start from k-means++ (Arthur and Vassilvitskii 2007).
    """
    starts = [_draw_plus_plus_centers(x_PD, clusters, generator).cpu().numpy() for _ in range(restarts)]
    # Of several threads each would add up a part of a cluster, in another order on another machine.
    with threadpool_limits(1), warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # coinciding points leave fewer clusters
        x = x_PD.cpu().numpy()
        runs = [KMeans(clusters, init=start, n_init=1, max_iter=steps, tol=0).fit(x) for start in starts]
    best = min(runs, key=lambda run: float(run.inertia_))
    cluster_P, center_KD = torch.from_numpy(best.labels_).long(), torch.from_numpy(best.cluster_centers_)
    return cluster_P.to(x_PD.device), center_KD.to(x_PD.device)


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
