"""Random student queries: a uniform sample of the public points, without replacement."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from pate_torch.core import checks
from pate_torch.protocols import QueryState
from pate_torch.queries.order import open_points, share, shuffled


@dataclass(frozen=True, kw_only=True)
class Random:
    """Asks open points drawn uniformly: the passive baseline where the loader's order has meaning."""

    guided: ClassVar[bool] = False
    name: str = "random"
    rounds: int = 1

    def __post_init__(self) -> None:
        checks.integer("query.rounds", self.rounds, low=1)

    def select(self, state: QueryState) -> Tensor:
        """Pool indices in random order, int64 [at most state.remaining]."""
        return shuffled(open_points(state), state, self.name)[: share(state)]
