"""Sum of clipped per-record gradients of a softmax-linear model, in exact fixed-point arithmetic, and its sensitivity.

All sums are of whole numbers, so no record influences the rounding of another's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from pate_torch.features.whitening import Whitening
from pate_torch.types import LinearModel, Sensitivity

GRID = 1 << 15
"""Features of length 1 and residuals of length 1 are written in units of 1/GRID, rounded towards zero."""
UNIT_NORM = GRID**2
"""A gradient of length 1. With fewer than 2^22 records every sum stays below 2^53, where float64 is exact."""
MIN_CLIP_NORM = 1 / 64
"""Clipping norms below would leave a residual fewer than 512 units of the grid."""
_BELOW = 1 - 2.0**-30  # far more than float64 can be off in a length
_BLOCK = 4096


def quantize(value: Tensor) -> Tensor:
    """Round vectors of length at most 1 towards zero to units of 1/GRID, int64, so that none is longer than GRID."""
    return (value.double() * (_BELOW * GRID)).trunc().to(torch.int64)


def _whole_weights(weight_DC: Tensor) -> tuple[Tensor, float]:
    """(weights as multiples of a unit, the unit: a power of 2).

    Its columns are shorter than 2^37 units, so that all sums of products with features, each at most GRID long, stay
    below 2^53 (Cauchy-Schwarz), and its entries lie off by at most 2^-36 of the longest column.
    """
    longest = float(weight_DC.norm(dim=0).max())
    unit = 2.0 ** (math.frexp(longest)[1] - 36)
    return (weight_DC / unit).round(), unit


@dataclass(frozen=True, eq=False, repr=False)
class GradientSums:
    """PRIVATE. Records as voters: whatever the weights, the sum of their clipped gradients.

    Attributes:
        z_ND: PRIVATE. Whitened and clipped features, in units of 1/GRID.
        y_N: PRIVATE. Labels.
        place_PD: Releasable features of the public points.
        sensitivity: Sensitivity of ``gradient_sum`` in units of ``UNIT_NORM``, at clipping norm 1; a smaller clipping
            norm scales it.
        scale: How far a sum of gradients in units of ``UNIT_NORM`` moves the model at step size 1.
        whitening: Releasable. The map by which ``place_PD`` came from features.
        neighbors: Number of neighbors of the mean-shift step before it; 0: none.
        asked_Q: The public points whose labels are wanted; None: all.
    """

    z_ND: Tensor
    y_N: Tensor
    place_PD: Tensor
    num_classes: int
    sensitivity: Sensitivity
    scale: float
    whitening: Whitening | None = None
    neighbors: int = 0
    asked_Q: Tensor | None = None
    num_teachers: int = 0

    def __post_init__(self) -> None:
        # No assert: the guarantee rests on this, and python -O drops asserts.
        if not bool((self.z_ND.long().square().sum(1) <= UNIT_NORM).all()):
            raise ValueError("gradients: a record's features are longer than 1")

    def __len__(self) -> int:
        return len(self.place_PD) if self.asked_Q is None else len(self.asked_Q)

    def take(self, index_Q: Tensor) -> GradientSums:
        """The same records, asked about these public points."""
        asked_Q = index_Q.cpu() if self.asked_Q is None else self.asked_Q[index_Q.cpu()]
        return replace(self, asked_Q=asked_Q)

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the model's weights, [D, C]."""
        return self.z_ND.shape[1], self.num_classes

    @property
    def adjacency(self) -> str | None:
        """The adjacency of the sensitivity."""
        return self.sensitivity.adjacency

    def gradient_sum(self, weight_DC: Tensor, clip_norm: float = 1.0) -> Tensor:
        """PRIVATE. The sum of all records' clipped gradients in units of 1/UNIT_NORM, int64 [D, C].

        One unit moves it by at most ``clip_norm * UNIT_NORM`` times ``sensitivity``.

        Args:
            weight_DC: Weights at which the gradients are taken.
            clip_norm: Length to which longer residuals e_y - softmax(z W) are clipped, at most 1.

        Raises:
            ValueError: A residual is longer than ``clip_norm``: a fault of the arithmetic, on which the guarantee
                rests.
        """
        weight_DC, unit = _whole_weights(weight_DC.double().cpu())
        total_DC = torch.zeros(self.shape, dtype=torch.int64)
        named_NC = F.one_hot(self.y_N, self.num_classes).double()
        for z_BD, named_BC in zip(self.z_ND.split(_BLOCK), named_NC.split(_BLOCK), strict=True):
            # Whole numbers below 2^53, here and in the sum: exact in float64, in whatever order they are added, so that
            # a record's logits are the same in any company.
            change_BC = named_BC - (z_BD.double() @ weight_DC * (unit / GRID)).softmax(1)
            change_BC = quantize(change_BC * (clip_norm / change_BC.norm(dim=1, keepdim=True).clamp(min=clip_norm)))
            if not bool((change_BC.square().sum(1) <= clip_norm**2 * UNIT_NORM).all()):
                raise ValueError("gradients: a record's residual is longer than clip_norm")
            total_DC += (z_BD.double().T @ change_BC.double()).to(torch.int64)
        return total_DC

    def scores(self, weight_DC: Tensor) -> Tensor:
        """Releasable. The logits of a released model on every public point, float32 [P, C]."""
        return self.place_PD @ weight_DC.float()

    def model(self, weight_DC: Tensor) -> LinearModel | None:
        """Releasable. A released model for points that are not here; None: their features are not known."""
        return None if self.whitening is None else self.whitening.model(weight_DC, self.neighbors)

    def __repr__(self) -> str:
        return f"GradientSums(adjacency={self.adjacency!r}, content withheld)"
