"""Uncertainty sampling: ask where the student, as trained on the answers so far, is least sure."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor

from pate_torch.core import checks
from pate_torch.protocols import QueryState
from pate_torch.queries.order import open_points, share, shuffled


@dataclass(frozen=True, kw_only=True)
class Uncertainty(ABC):
    """A random first round, then in each round the open points with the highest ``doubt``; ties in random order."""

    name: str
    rounds: int = 4

    def __post_init__(self) -> None:
        checks.integer("query.rounds", self.rounds, low=1)

    def select(self, state: QueryState) -> Tensor:
        """Pool indices, most doubtful first, int64 [at most state.remaining]."""
        points = shuffled(open_points(state), state, self.name)
        if state.student_PC is not None:
            doubt = self.doubt(state.student_PC.cpu()[points])
            points = points[doubt.argsort(descending=True, stable=True)]
        return points[: share(state)]

    @abstractmethod
    def doubt(self, student_PC: Tensor) -> Tensor:
        """How unsure each row of class probabilities is, [P]."""
