"""Prototypes: one typical point of each cluster of the public points.

A label is worth most where it speaks for many points, and it is most often right where the point is typical: the
noisy vote of an ensemble is won most clearly there. Uses no answers, so one round suffices and the queries stay
non-adaptive.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from pate_torch.core import checks, rng
from pate_torch.features.neighbors import neighbor_graph, spectral
from pate_torch.protocols import QueryState
from pate_torch.queries.geometry import features, kmeans, neighbor_distance, squared_distances
from pate_torch.queries.order import open_points, share


@dataclass(frozen=True, kw_only=True)
class Prototypes:
    """Spectral clusters of the neighbor graph (Ng, Jordan and Weiss 2002), as many as questions.

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
