"""The base class of query strategies, and the state that a strategy may use."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from pate_torch.core import checks
from pate_torch.privacy.records import DataSpec


@dataclass(frozen=True, eq=False)
class QueryState:
    """Releasable. All inputs of a query strategy.

    Attributes:
        spec: Public description of the data.
        pool_x: Public points as loaded, [P, ...].
        query_Q: Pool indices of the questions of earlier rounds, in order.
        label_Q: Released labels of these questions, NO_ANSWER (-1) for a question without an answer.
        num_remaining: Number of questions still allowed.
        num_rounds_left: Number of rounds left, including this round.
        seed: Seed of the strategy's random choices.
        student_PC: Class probabilities of the guide student on all public points. None in the first round.
        feature_PD: Features learned from public points without labels, on the run's device. None without an encoder.
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
    """A rule that chooses the public points to ask about next. The release records the fields of the strategy.

    Attributes:
        uses_guide: Whether ``select`` reads ``state.student_PC``. If False, no guide student is fitted between rounds.
        name: Name of the strategy in settings and reports.
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
