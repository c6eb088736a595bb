"""Questions spread over the public points by their geometry alone: covers, clusters, and the most typical of each."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from pate_torch.core import checks, rng
from pate_torch.features.neighbors import neighbor_graph, spectral
from pate_torch.protocols import QueryState
from pate_torch.queries.random import features, open_points, share, shuffled
from pate_torch.queries.uncertainty import Margin

_BLOCK = 1 << 22  # entries of one block of a distance matrix: 16 MB


@dataclass(frozen=True, kw_only=True)
class Coreset:
    """The greedy k-center cover: each question is the point farthest from all before it; the first, nearest the mean.

    Asks for outliers by design, which an ensemble labels worst: ``Prototypes`` is better under noise.

    Source: Sener and Savarese 2018, Algorithm 1 (core-set).
    """

    guided: ClassVar[bool] = False
    name: str = "coreset"
    rounds: int = 1

    def __post_init__(self) -> None:
        checks.integer("query.rounds", self.rounds, low=1)

    def select(self, state: QueryState) -> Tensor:
        """Pool indices in greedy order, int64 [at most state.remaining]."""
        x_PD = features(state)
        nearest_P = torch.full((len(x_PD),), torch.inf)
        for asked in state.asked_Q.tolist():
            nearest_P = self._cover(x_PD, nearest_P, asked)
        chosen: list[int] = []
        for _ in range(share(state)):
            if torch.isinf(nearest_P).all():
                pick = int(squared_distances(x_PD, x_PD.mean(0, keepdim=True)).argmin())
            else:
                pick = int(nearest_P.argmax())
            chosen.append(pick)
            nearest_P = self._cover(x_PD, nearest_P, pick)
        return torch.tensor(chosen, dtype=torch.int64)

    @staticmethod
    def _cover(x_PD: Tensor, nearest_P: Tensor, center: int) -> Tensor:
        """Distances to the nearest center, -1 at a center itself: coinciding points (0) may be asked, centers not."""
        center_1D = x_PD[center : center + 1]
        nearest_P = torch.minimum(nearest_P, squared_distances(x_PD, center_1D).squeeze(1))
        nearest_P[center] = -1.0
        return nearest_P


@dataclass(frozen=True, kw_only=True)
class Medoids:
    """The most central point of each of many small k-means clusters, as many as questions.

    In the learnt features, else on principal axes. For questions that cost nothing each, as in reverse k-NN labeling,
    whose cells are the clusters. For few and costly ones see ``Prototypes``: k-means in learnt features does not find
    large clusters, whose points lie as far apart as those of different ones.
    """

    guided: ClassVar[bool] = False
    name: str = "medoids"
    rounds: int = 1
    restarts: int = 1

    def __post_init__(self) -> None:
        checks.integer("query.rounds", self.rounds, low=1)
        checks.integer("query.restarts", self.restarts, low=1)

    def select(self, state: QueryState) -> Tensor:
        """Pool indices, int64 [at most state.remaining]: the open point of each cluster nearest to its center."""
        count = share(state)
        points = open_points(state)
        if count == 0:
            return points[:0]
        x_RD = features(state)[points]
        stream = rng.torch_stream(state.seed, "query", self.name, len(state.asked_Q))
        cluster_R, center_KD = kmeans(x_RD, count, stream, self.restarts)
        off_center_R = squared_distances(x_RD, center_KD).gather(1, cluster_R[:, None]).squeeze(1)
        chosen = []
        for cluster in range(count):
            members = (cluster_R == cluster).nonzero().squeeze(1)
            if len(members):
                chosen.append(int(points[members[off_center_R[members].argmin()]]))
        # Coinciding points leave fewer clusters than questions.
        chosen_Q = torch.tensor(chosen, dtype=torch.int64)
        rest = shuffled(points[~torch.isin(points, chosen_Q)], state, self.name)
        return torch.cat([chosen_Q, rest[: count - len(chosen)]])


@dataclass(frozen=True, kw_only=True)
class Prototypes:
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

    guided: ClassVar[bool] = False
    name: str = "prototypes"
    rounds: int = 1
    neighbors: int = 6
    restarts: int = 4

    def __post_init__(self) -> None:
        checks.integer("query.rounds", self.rounds, low=1)
        checks.integer("query.neighbors", self.neighbors, low=1)
        checks.integer("query.restarts", self.restarts, low=1)

    def select(self, state: QueryState) -> Tensor:
        """Pool indices, one for each cluster that holds no asked point yet, int64 [at most state.remaining]."""
        count = share(state)
        if count == 0:
            return torch.zeros(0, dtype=torch.int64)
        x_PD = features(state)
        stream = rng.torch_stream(state.seed, "query", self.name, len(state.asked_Q))
        # Later rounds cut finer: a cluster with an asked point in it has spoken.
        clusters = len(state.asked_Q) + count
        place_PK = spectral(neighbor_graph(x_PD, self.neighbors), clusters, stream) if len(x_PD) > 1 else x_PD
        cluster_P, center_KK = kmeans(place_PK, clusters, stream, self.restarts)
        spacing_P = neighbor_distance(x_PD, self.neighbors)
        off_center_P = squared_distances(place_PK, center_KK).gather(1, cluster_P[:, None]).squeeze(1)
        size_K = torch.bincount(cluster_P, minlength=len(center_KK))
        size_K[cluster_P[state.asked_Q]] = 0
        chosen = [
            self._typical((cluster_P == cluster).nonzero().squeeze(1), spacing_P, off_center_P)
            for cluster in size_K.argsort(descending=True, stable=True).tolist()
            if size_K[cluster] > 0
        ][:count]
        return self._filled(torch.tensor(chosen, dtype=torch.int64), state, count, spacing_P)

    @staticmethod
    def _typical(members: Tensor, spacing_P: Tensor, off_center_P: Tensor) -> int:
        dense = members[spacing_P[members] <= spacing_P[members].median()]
        return int(dense[off_center_P[dense].argmin()])

    @staticmethod
    def _filled(chosen: Tensor, state: QueryState, count: int, spacing_P: Tensor) -> Tensor:
        """Top up with the densest open points: coinciding points leave fewer clusters than questions."""
        rest = open_points(state)
        rest = rest[~torch.isin(rest, chosen)]
        rest = rest[spacing_P[rest].argsort(stable=True)]
        return torch.cat([chosen, rest[: count - len(chosen)]])


@dataclass(frozen=True, kw_only=True)
class PrototypesThenMargin(Prototypes):
    """Asks ``first`` prototypes; what remains, in equal shares over the other rounds, by the smallest margin.

    Labels that found clusters, then labels that mend their borders. Random first questions find fewer clusters (see
    ``Prototypes``), and the margin of a student that has missed one is large there. Without answers to learn from,
    prototypes again.
    """

    guided: ClassVar[bool] = True
    name: str = "prototypes_then_margin"
    rounds: int = 2
    first: int = 50

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.integer("query.rounds", self.rounds, low=2)
        checks.integer("query.first", self.first, low=1)

    def select(self, state: QueryState) -> Tensor:
        """Pool indices, int64 [at most state.remaining]."""
        if len(state.asked_Q) == 0:
            state = dataclasses.replace(state, remaining=min(self.first, state.remaining), rounds_left=1)
        if state.student_PC is None:
            return super().select(state)
        return Margin(name=self.name, rounds=self.rounds).select(state)


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
