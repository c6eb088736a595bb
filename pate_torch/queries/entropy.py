"""Entropy sampling: the highest Shannon entropy of the student's class probabilities."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pate_torch.queries.uncertainty import Uncertainty


@dataclass(frozen=True, kw_only=True)
class Entropy(Uncertainty):
    """Doubt is the entropy, in nats; with two classes this orders points as ``margin`` does."""

    name: str = "entropy"

    def doubt(self, student_PC: Tensor) -> Tensor:
        return torch.special.entr(student_PC).sum(1)
