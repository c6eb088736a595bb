"""Whitening by the covariance of the public points. No private record is read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from scipy.optimize import brentq
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Whitening:
    """Releasable. Affine map z -> (z - center) axis that whitens the features of the public points.

    Attributes:
        center_D: Mean of the public points, [D].
        axis_DE: Principal axes of the public points as columns, each divided by the standard deviation along the axis,
            with a ridge, [D, E].
        radius: Clipping norm of whitened features.
    """

    center_D: Tensor
    axis_DE: Tensor
    radius: float

    @classmethod
    def from_features(cls, feature_PD: Tensor, ridge: float, effective_dim: float | None = None) -> Whitening:
        """Fit the map to public points. The clipping norm is the median length of their whitened features.

        Args:
            feature_PD: Features of the public points.
            ridge: Number added to the variance along each axis, in units of the mean variance.
            effective_dim: Effective dimension that determines the ridge (``solve_ridge``). Axes along which whitened
                points hardly vary are then left out. None to use ``ridge``, and all axes.
        """
        center_D = feature_PD.mean(0)
        centered_PD = (feature_PD - center_D).double()
        values_D, axis_DE = torch.linalg.eigh(centered_PD.T @ centered_PD / len(centered_PD))
        values_D = values_D.clamp(min=0)
        if effective_dim is not None:
            ridge = solve_ridge(values_D, effective_dim)
        ridged_D = (values_D + ridge * values_D.mean()).clamp(min=1e-12)
        axis_DE /= ridged_D.sqrt()
        if effective_dim is not None:
            variance_D = values_D / ridged_D
            axis_DE = axis_DE[:, variance_D >= _MIN_VARIANCE * variance_D.max()]
        axis_DE = axis_DE.float()
        unclipped_map = cls(center_D, axis_DE, math.inf)
        return replace(unclipped_map, radius=float(unclipped_map(feature_PD).norm(dim=1).median()))

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Whitening:
        """Make the map from a mapping that contains the output of ``to_tensors``."""
        return cls(tensors["center_D"], tensors["axis_DE"], float(tensors["radius"]))

    def to_tensors(self) -> dict[str, Tensor]:
        """Return the tensors by name, which are the buffers of ``networks.WhitenAndClip``."""
        radius = torch.tensor(self.radius)
        return {"center_D": self.center_D, "axis_DE": self.axis_DE.contiguous(), "radius": radius}

    def __call__(self, feature_PD: Tensor) -> Tensor:
        """Whiten features and append a 1 for the intercept, float32 [P, E + 1], without clipping."""
        return F.pad((feature_PD - self.center_D) @ self.axis_DE, (0, 1), value=1.0)

    def whiten_and_clip(self, feature_PD: Tensor) -> Tensor:
        """Whiten features, append a 1, clip to ``radius``, and divide by ``radius``; float64 [P, E + 1].

        A point whose whitened features are not finite becomes zeros, so that such a record contributes nothing.
        """
        z_PD = self(feature_PD).double() / self.radius
        length_P1 = z_PD.norm(dim=1, keepdim=True)
        z_PD /= length_P1.clamp(min=1)
        finite_P1 = length_P1.isfinite()
        return z_PD if bool(finite_P1.all()) else torch.where(finite_P1, z_PD, 0.0)


_RIDGE_RANGE = (1e-3, 1e6)
_MIN_VARIANCE = 0.03
"""Smallest variance of the whitened public points along an axis, relative to the largest."""


def solve_ridge(values_D: Tensor, effective_dim: float) -> float:
    """Solve sum_d v_d / (v_d + r v) = effective_dim for the ridge r, in units of the mean v of the variances v_d.

    The sum is the mean squared length of a whitened point, which is the effective dimension of ridge regression. A
    solution outside ``_RIDGE_RANGE`` is replaced by the nearest end of the range.
    """
    unit_D = values_D / values_D.mean().clamp(min=1e-12)

    def compute_excess(log_ridge: float) -> float:
        return float((unit_D / (unit_D + math.exp(log_ridge))).sum()) - effective_dim

    low, high = (math.log(end) for end in _RIDGE_RANGE)
    if compute_excess(low) <= 0:
        return _RIDGE_RANGE[0]
    return _RIDGE_RANGE[1] if compute_excess(high) >= 0 else math.exp(brentq(compute_excess, low, high))
