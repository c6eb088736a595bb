"""Uncertainty sampling: ask where the student, as trained on the answers so far, is least sure."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from pate_torch.core import checks
from pate_torch.queries.base import QueryState, QueryStrategy
from pate_torch.queries.random import compute_round_size, get_open_points, shuffle


@dataclass(frozen=True, kw_only=True)
class Margin(QueryStrategy):
    """A random first round, then in each round the open points where the first class leads the second by the least.

    Ties are in random order (Scheffer et al. 2001).
    """

    name: str = "margin"
    rounds: int = 4

    def __post_init__(self) -> None:
        checks.integer("query.rounds", self.rounds, low=1)

    def select(self, state: QueryState) -> Tensor:
        points = shuffle(get_open_points(state), state, self.name)
        if state.student_PC is not None:
            best = state.student_PC.cpu()[points].topk(2, dim=1).values
            points = points[(best[:, 1] - best[:, 0]).argsort(descending=True, stable=True)]
        return points[: compute_round_size(state)]
