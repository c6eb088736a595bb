"""Core-set: the greedy k-center cover of the public points (Sener and Savarese 2018, Algorithm 1).

Asks for outliers by design, which an ensemble labels worst; ``prototypes`` is the better default under noise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from pate_torch.core import checks
from pate_torch.protocols import QueryState
from pate_torch.queries.geometry import features, squared_distances
from pate_torch.queries.order import share


@dataclass(frozen=True, kw_only=True)
class Coreset:
    """Each question is the point farthest from all asked before it; the first is the one nearest the mean."""

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
