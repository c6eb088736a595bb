"""From predictions to votes: counting, and nothing else (noise belongs to the mechanisms)."""

from __future__ import annotations

import torch
from torch import Tensor

from pate_torch import checks
from pate_torch.types import Votes

CELLS = 1 << 22
"""Counts held at a time while counting in chunks."""


def tally(prediction_KQ: Tensor, num_classes: int) -> Tensor:
    """Count classes over teachers: integers [K, Q] in 0..C-1 -> int64 [Q, C], by chunks of queries.

    Raises ValueError for a class outside the range: one teacher has exactly one vote.
    """
    if prediction_KQ.dim() != 2 or prediction_KQ.is_floating_point():
        raise ValueError("predictions must be integers [teachers, queries]")
    checks.integer("num_classes", num_classes, low=2)
    if prediction_KQ.numel() and (int(prediction_KQ.min()) < 0 or int(prediction_KQ.max()) >= num_classes):
        raise ValueError(f"predictions must lie in 0..{num_classes - 1}")
    teachers, queries = prediction_KQ.shape
    counts = torch.zeros(queries, num_classes, dtype=torch.int64, device=prediction_KQ.device)
    width = max(1, CELLS // max(1, teachers))
    for start in range(0, queries, width):
        part = prediction_KQ[:, start : start + width]
        ones = torch.ones((), dtype=torch.int64, device=part.device).expand(part.shape[1], teachers)
        counts[start : start + width].scatter_add_(1, part.T.to(torch.int64), ones)
    return counts


def count(prediction_KQ: Tensor, num_classes: int) -> Votes:
    """PRIVATE. The votes of K teachers, one each."""
    return Votes(tally(prediction_KQ, num_classes), prediction_KQ.shape[0])
