"""From predictions to votes: counting, and nothing else (noise belongs to the mechanisms)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from pate_torch import checks
from pate_torch.types import Votes

WIDTH = 4096
"""Queries counted together: with 255 teachers of one byte each they stay in a core's cache."""

FEW_CLASSES = 64
"""Up to here comparing with every class in turn beats scattering."""


def label_dtype(num_classes: int) -> torch.dtype:
    """The smallest type for classes 0..C-1: predictions are read once per class, so their size is the time."""
    return torch.uint8 if num_classes <= 256 else torch.int16 if num_classes <= 2**15 else torch.int32


def _count_bytes(prediction_KQ: Tensor, num_classes: int) -> Tensor:
    """uint8 [K, Q] -> int32 [Q, C]: compare to bytes 0 or 1, and add eight queries in one 64-bit addition.

    No byte overflows its neighbour below 256 teachers. (A comparison to ``bool`` takes fourteen times as long as to
    bytes on a CPU; ``scatter_add_`` and ``bincount`` are slower by a factor of ten and twenty.)
    """
    teachers, queries = prediction_KQ.shape
    counts_CQ = torch.zeros(num_classes, queries, dtype=torch.int32, device=prediction_KQ.device)
    for start in range(0, queries, WIDTH):
        part = prediction_KQ[:, start : start + WIDTH]
        width = part.shape[1]
        part = F.pad(part, (0, -width % 8)) if width % 8 else part
        for first in range(0, teachers, 255):
            group = part[first : first + 255]
            equal = torch.empty(group.shape, dtype=torch.uint8, device=group.device)
            sums_C = torch.empty(num_classes, group.shape[1] // 8, dtype=torch.int64, device=group.device)
            for label, sums in enumerate(sums_C):
                torch.eq(group, label, out=equal)
                torch.sum(equal.view(torch.int64), 0, out=sums)
            counts_CQ[:, start : start + width] += sums_C.view(torch.uint8)[:, :width]
    return counts_CQ.T.contiguous()


def _count_scattered(prediction_KQ: Tensor, num_classes: int) -> Tensor:
    """Any integers [K, Q] -> int32 [Q, C]: one addition per vote."""
    queries = prediction_KQ.shape[1]
    counts = torch.zeros(queries, num_classes, dtype=torch.int32, device=prediction_KQ.device)
    one = torch.ones((), dtype=torch.int32, device=prediction_KQ.device)
    for start in range(0, queries, WIDTH):
        part = prediction_KQ[:, start : start + WIDTH].T.to(torch.int64)
        counts[start : start + WIDTH].scatter_add_(1, part, one.expand(part.shape))
    return counts


def tally(prediction_KQ: Tensor, num_classes: int) -> Tensor:
    """Count classes over teachers: integers [K, Q] in 0..C-1 -> int32 [Q, C], in chunks of queries.

    Fastest for uint8, where a class outside the range is not counted (and refused by ``Votes``, whose rows must sum
    to K); for other types it raises ValueError.
    """
    if prediction_KQ.dim() != 2 or prediction_KQ.is_floating_point():
        raise ValueError("predictions must be integers [teachers, queries]")
    checks.integer("num_classes", num_classes, low=2)
    narrow = prediction_KQ.dtype == torch.uint8
    if prediction_KQ.numel() and not (narrow and num_classes <= FEW_CLASSES):
        low, high = prediction_KQ.aminmax()
        if low < 0 or high >= num_classes:
            raise ValueError(f"predictions must lie in 0..{num_classes - 1}")
    if num_classes > FEW_CLASSES:
        return _count_scattered(prediction_KQ, num_classes)
    return _count_bytes(prediction_KQ if narrow else prediction_KQ.to(torch.uint8), num_classes)


def count(prediction_KQ: Tensor, num_classes: int) -> Votes:
    """PRIVATE. The votes of K teachers, one each."""
    return Votes(tally(prediction_KQ, num_classes), prediction_KQ.shape[0])
