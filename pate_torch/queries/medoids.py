"""Medoids: partition the public points into many small clusters, and ask the most central point of each.

For questions that cost nothing each, as in reverse k-NN labeling, whose cells are the clusters. For few and costly ones
see ``prototypes``: k-means in learnt features does not find large clusters, whose points lie as far apart as those of
different ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from pate_torch.core import checks, rng
from pate_torch.protocols import QueryState
from pate_torch.queries.geometry import features, kmeans, squared_distances
from pate_torch.queries.order import open_points, share, shuffled


@dataclass(frozen=True, kw_only=True)
class Medoids:
    """Medoids by k-means in the learnt features, else on principal axes; as many clusters as questions."""

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
