"""Margin sampling: the smallest lead of the student's first class over its second (Scheffer et al. 2001)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from pate_torch.queries.uncertainty import Uncertainty


@dataclass(frozen=True, kw_only=True)
class Margin(Uncertainty):
    """Doubt is minus the difference of the two largest probabilities."""

    name: str = "margin"

    def doubt(self, student_PC: Tensor) -> Tensor:
        best = student_PC.topk(2, dim=1).values
        return best[:, 1] - best[:, 0]
