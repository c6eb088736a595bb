"""Prototypes first, then the smallest margins: labels that found clusters, and labels that mend their borders."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from pate_torch.core import checks
from pate_torch.protocols import QueryState
from pate_torch.queries.margin import Margin
from pate_torch.queries.prototypes import Prototypes


@dataclass(frozen=True, kw_only=True)
class PrototypesThenMargin(Prototypes):
    """Asks ``first`` prototypes; what remains, in equal shares over the other rounds, by the smallest margin.

    Random first questions find fewer clusters (see ``Prototypes``), and the margin of a student that has missed one is
    large there. Without answers to learn from, prototypes again.
    """

    guided: ClassVar[bool] = True
    name: str = "prototypes_then_margin"
    rounds: int = 2
    first: int = 50

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.integer("query.rounds", self.rounds, low=2)
        checks.integer("query.first", self.first, low=1)

    def select(self, state: QueryState) -> Tensor:
        """Pool indices, int64 [at most state.remaining]."""
        if len(state.asked_Q) == 0:
            state = dataclasses.replace(state, remaining=min(self.first, state.remaining), rounds_left=1)
        if state.student_PC is None:
            return super().select(state)
        return Margin(name=self.name, rounds=self.rounds).select(state)
