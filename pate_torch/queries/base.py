"""Which public points are asked about."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from pate_torch.privacy.records import DataSpec


@dataclass(frozen=True, eq=False)
class QueryState:
    """Releasable. All a query strategy sees: public points, what was asked and answered, and the student's opinion.

    Attributes:
        spec: Public facts about the data.
        pool_x: Public points, [P, ...] as loaded.
        query_Q: Pool indices already asked, in order.
        label_Q: Their released labels; -1: none.
        num_remaining: Queries still allowed.
        num_rounds_left: Including this one.
        seed: Names the strategy's own stream.
        student_PC: The current student's class probabilities on the whole pool; None: before the first round.
        feature_PD: Features learnt from public points without labels, on the run's device, or None.
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


class QueryStrategy(ABC):
    """Chooses which public points to ask next: a frozen dataclass of choices, which the release's record holds.

    Attributes:
        name: As settings and reports call it.
        rounds: Number of rounds of questions. A student is fitted before each round but the first, where it is used.
        uses_guide: Whether ``select`` looks at ``state.student_PC``; else no student is fitted between its rounds.
    """

    name: str
    uses_guide: ClassVar[bool] = True

    @property
    @abstractmethod
    def rounds(self) -> int:
        """Number of times it wants to be asked."""

    @abstractmethod
    def select(self, state: QueryState) -> Tensor:
        """Pool indices (int64, distinct, none asked before, at most ``state.num_remaining``)."""
