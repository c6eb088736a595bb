"""Uncertainty sampling: ask where the student, as trained on the answers so far, is least sure."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from pate_torch.core import checks
from pate_torch.protocols import QueryState
from pate_torch.queries.random import open_points, share, shuffled


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


@dataclass(frozen=True, kw_only=True)
class Entropy(Uncertainty):
    """Doubt is the entropy of the probabilities, in nats; with two classes this orders points as ``margin`` does."""

    name: str = "entropy"

    def doubt(self, student_PC: Tensor) -> Tensor:
        return torch.special.entr(student_PC).sum(1)


@dataclass(frozen=True, kw_only=True)
class Margin(Uncertainty):
    """Doubt is minus the lead of the first class over the second (Scheffer et al. 2001)."""

    name: str = "margin"

    def doubt(self, student_PC: Tensor) -> Tensor:
        best = student_PC.topk(2, dim=1).values
        return best[:, 1] - best[:, 0]
