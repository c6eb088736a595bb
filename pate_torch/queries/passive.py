"""Passive student queries: the first public points, in the order they were loaded (LZCW21 Algorithm 3, PSQ)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from pate_torch.core import checks
from pate_torch.protocols import QueryState
from pate_torch.queries.order import open_points, share


@dataclass(frozen=True, kw_only=True)
class Passive:
    """Asks the first open points. Right where the loader's order is already random."""

    guided: ClassVar[bool] = False
    name: str = "passive"
    rounds: int = 1

    def __post_init__(self) -> None:
        checks.integer("query.rounds", self.rounds, low=1)

    def select(self, state: QueryState) -> Tensor:
        """Pool indices in increasing order, int64 [at most state.remaining]."""
        return open_points(state)[: share(state)]
