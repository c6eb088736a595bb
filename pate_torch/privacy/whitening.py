"""Whitening by the covariance of the public points. No private record is read."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from scipy.optimize import brentq
from torch import Tensor

from pate_torch.privacy.records import LinearModel


@dataclass(frozen=True, eq=False)
class Whitening:
    """Releasable. Affine map z -> (z - center) axis that whitens the features of the public points.

    Attributes:
        center_D: Mean of the public points, [D].
        axis_DD: Principal axes of the public points as columns, each divided by the standard deviation along the axis,
            with a ridge, [D, D].
        radius: Clipping norm of whitened features.
    """

    center_D: Tensor
    axis_DD: Tensor
    radius: float

    @classmethod
    def from_features(cls, feature_PD: Tensor, ridge: float, effective_dim: float | None = None) -> Whitening:
        """Fit the map to public points. The clipping norm is the median length of their whitened features.

        Args:
            feature_PD: Features of the public points.
            ridge: Number added to the variance along each axis, in units of the mean variance.
            effective_dim: Effective dimension that determines the ridge (``solve_ridge``). None to use ``ridge``.
        """
        center_D = feature_PD.mean(0)
        centered_PD = (feature_PD - center_D).double()
        values_D, axis_DD = torch.linalg.eigh(centered_PD.T @ centered_PD / len(centered_PD))
        values_D = values_D.clamp(min=0)
        if effective_dim is not None:
            ridge = solve_ridge(values_D, effective_dim)
        axis_DD = (axis_DD / (values_D + ridge * values_D.mean()).clamp(min=1e-12).sqrt()).float()
        unclipped_map = cls(center_D, axis_DD, math.inf)
        return replace(unclipped_map, radius=float(unclipped_map(feature_PD).norm(dim=1).median()))

    def __call__(self, feature_PD: Tensor) -> Tensor:
        """Whiten features and append a 1 for the intercept, float32 [P, D + 1], without clipping."""
        return F.pad((feature_PD - self.center_D) @ self.axis_DD, (0, 1), value=1.0)

    def to_linear_model(self, weight_DC: Tensor, neighbors: int) -> LinearModel:
        """Convert a linear model of whitened features and the appended 1 to a linear model of features."""
        weight_FC = self.axis_DD.double() @ weight_DC[:-1]
        bias_C = weight_DC[-1] - self.center_D.double() @ weight_FC
        return LinearModel(weight_FC.float(), bias_C.float(), neighbors, self.radius)

    def whiten_and_clip(self, feature_PD: Tensor) -> Tensor:
        """Whiten features, append a 1, clip to ``radius``, and divide by ``radius``; float64 [P, D + 1].

        A point whose whitened features are not finite becomes zeros, so that such a record contributes nothing.
        """
        z_PD = self(feature_PD).double() / self.radius
        length_P1 = z_PD.norm(dim=1, keepdim=True)
        z_PD /= length_P1.clamp(min=1)
        finite_P1 = length_P1.isfinite()
        return z_PD if bool(finite_P1.all()) else torch.where(finite_P1, z_PD, 0.0)


_RIDGE_RANGE = (1e-3, 1e6)


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
