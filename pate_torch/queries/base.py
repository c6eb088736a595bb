"""The base class of query strategies, which choose the public points to ask about."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from pate_torch.core import checks
from pate_torch.privacy.records import DataSpec


@dataclass(frozen=True, eq=False)
class QueryState:
    """Releasable. Everything that a query strategy sees.

    Attributes:
        spec: Public facts about the data.
        pool_x: Public points as loaded, [P, ...].
        query_Q: Pool indices asked before, in order.
        label_Q: Released labels of these points; -1 for a question that was not answered.
        num_remaining: Number of questions still allowed.
        num_rounds_left: Number of rounds left, including this one.
        seed: Seed of the strategy's random choices.
        student_PC: Class probabilities of the guide student on all public points. None in the first round.
        feature_PD: Features learned from public points without labels, on the run's device. None if there are none.
    """

    spec: DataSpec
    pool_x: Tensor
    query_Q: Tensor
    label_Q: Tensor
    num_remaining: int
    num_rounds_left: int
    seed: int
    student_PC: Tensor | None = None
    feature_PD: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class QueryStrategy(ABC):
    """A rule that chooses the public points to ask next. Its fields are recorded in the release.

    Attributes:
        uses_guide: Whether ``select`` reads ``state.student_PC``. If false, no student is fitted between rounds for it.
        name: Name in settings and reports.
        rounds: Number of rounds in which questions are asked.
    """

    uses_guide: ClassVar[bool] = True
    name: str
    rounds: int = 1

    def __post_init__(self) -> None:
        checks.integer("query.rounds", self.rounds, low=1)

    @abstractmethod
    def select(self, state: QueryState) -> Tensor:
        """Select at most ``state.num_remaining`` distinct pool indices that were not asked before, int64 [Q]."""
