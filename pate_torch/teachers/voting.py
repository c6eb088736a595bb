"""From predictions to votes: counting, and nothing else (noise belongs to the mechanisms)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from pate_torch.core import checks
from pate_torch.core.device import single_thread_mode
from pate_torch.privacy.sensitive import Votes

BLOCK_QUERIES = 2048
"""Queries counted together: with 255 teachers of one byte each they stay in a core's cache."""

MAX_COMPARED_CLASSES = 64
"""Up to here comparing with every class in turn beats scattering."""


def get_label_dtype(num_classes: int) -> torch.dtype:
    """The smallest type for classes 0..C-1: predictions are read once per class, so their size is the time."""
    return torch.uint8 if num_classes <= 256 else torch.int16 if num_classes <= 2**15 else torch.int32


def _count_bytes(prediction_KQ: Tensor, num_classes: int) -> Tensor:
    """uint8 [K, Q] -> int32 [Q, C]: compare to bytes 0 or 1, and add eight queries in one 64-bit addition.

    No byte overflows its neighbor below 256 teachers. (A comparison to ``bool`` takes fourteen times as long as to
    bytes on a CPU; ``scatter_add_`` takes two and a half times as long in all. Four Python threads, or
    torch's own, gain a third on an idle machine and lose tenfold on a busy one.)
    """
    teachers, queries = prediction_KQ.shape
    device = prediction_KQ.device
    counts_QC = torch.empty(queries, num_classes, dtype=torch.int32, device=device)
    equal_KW = torch.empty(min(teachers, 255), -(-BLOCK_QUERIES // 8) * 8, dtype=torch.uint8, device=device)
    padded_width = equal_KW.shape[1]
    sums_CW = torch.empty(num_classes, padded_width // 8, dtype=torch.int64, device=device)
    pairs = list(zip(torch.arange(num_classes, dtype=torch.uint8, device=device), sums_CW, strict=True))
    with single_thread_mode(device.type == "cpu"):
        for start in range(0, queries, padded_width):
            part_KW = prediction_KQ[:, start : start + padded_width]
            width = part_KW.shape[1]
            part_KW = F.pad(part_KW, (0, padded_width - width)) if width < padded_width else part_KW
            counts_CW = torch.zeros(num_classes, padded_width, dtype=torch.int32, device=device)
            for first in range(0, teachers, 255):
                group_KW = part_KW[first : first + 255]
                equal = equal_KW[: len(group_KW)]
                for label, sum_W in pairs:
                    torch.eq(group_KW, label, out=equal)
                    torch.sum(equal.view(torch.int64), 0, out=sum_W)
                counts_CW += sums_CW.view(torch.uint8)
            counts_QC[start : start + width] = counts_CW[:, :width].T
    return counts_QC


def _count_by_scatter(prediction_KQ: Tensor, num_classes: int) -> Tensor:
    """Any integers [K, Q] -> int32 [Q, C]: one addition per vote."""
    queries = prediction_KQ.shape[1]
    counts = torch.zeros(queries, num_classes, dtype=torch.int32, device=prediction_KQ.device)
    increment = torch.ones((), dtype=torch.int32, device=prediction_KQ.device)
    for start in range(0, queries, BLOCK_QUERIES):
        part = prediction_KQ[:, start : start + BLOCK_QUERIES].T.to(torch.int64)
        counts[start : start + BLOCK_QUERIES].scatter_add_(1, part, increment.expand(part.shape))
    return counts


def tally(prediction_KQ: Tensor, num_classes: int) -> Tensor:
    """PRIVATE. Count classes over teachers: integers [K, Q] in 0..C-1 -> int32 [Q, C], in chunks of queries.

    Fastest for uint8, where a class outside the range is not counted (and refused by ``Votes``, whose rows must sum to
    K).

    Raises:
        ValueError: A class of another type is outside the range.
    """
    if prediction_KQ.dim() != 2 or prediction_KQ.is_floating_point():
        raise ValueError("predictions must be integers [teachers, queries]")
    checks.integer("num_classes", num_classes, low=2)
    is_byte = prediction_KQ.dtype == torch.uint8
    if prediction_KQ.numel() and not (is_byte and num_classes <= MAX_COMPARED_CLASSES):
        low, high = map(int, prediction_KQ.aminmax())  # a byte compared with 256 is compared with 0
        if low < 0 or high >= num_classes:
            raise ValueError(f"predictions must lie in 0..{num_classes - 1}")
    if num_classes > MAX_COMPARED_CLASSES:
        return _count_by_scatter(prediction_KQ, num_classes)
    prediction_KQ = prediction_KQ if is_byte else prediction_KQ.to(torch.uint8)
    return _count_bytes(prediction_KQ, num_classes)


def count_votes(prediction_KQ: Tensor, num_classes: int) -> Votes:
    """PRIVATE. The votes of K teachers, one each."""
    return Votes(tally(prediction_KQ, num_classes), prediction_KQ.shape[0])
