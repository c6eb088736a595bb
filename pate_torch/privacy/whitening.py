"""Whitening by the covariance of the public points. Nothing private is read."""

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
    """Releasable. The affine map z -> (z - center) axis that whitens the public points' features.

    Attributes:
        center_D: Mean of the public points.
        axis_DD: Principal axes of the public points, each over the standard deviation along it (with a ridge).
        radius: Clipping norm of a whitened feature.
    """

    center_D: Tensor
    axis_DD: Tensor
    radius: float

    @classmethod
    def from_features(cls, feature_PD: Tensor, ridge: float, effective_dim: float | None = None) -> Whitening:
        """Compute the map that whitens the public points. The clipping norm is the median length of their images.

        Args:
            feature_PD: Features of the public points.
            ridge: Number added to the variance of every direction, in units of the mean variance.
            effective_dim: Effective number of directions, from which ``solve_ridge`` then computes the ridge.
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
        """Whiten features without clipping, and append a 1, whose weight is the intercept: float32 [P, D + 1]."""
        return F.pad((feature_PD - self.center_D) @ self.axis_DD, (0, 1), value=1.0)

    def to_linear_model(self, weight_DC: Tensor, neighbors: int) -> LinearModel:
        """Convert a model that is linear in whitened features and their 1 to one that is linear in the features."""
        weight_FC = self.axis_DD.double() @ weight_DC[:-1]
        bias_C = weight_DC[-1] - self.center_D.double() @ weight_FC
        return LinearModel(weight_FC.float(), bias_C.float(), neighbors, self.radius)

    def whiten_and_clip(self, feature_PD: Tensor) -> Tensor:
        """Whiten features, append the 1, clip to ``radius`` and divide by it: float64 [P, D + 1].

        A point whose whitened features are not finite becomes zeros, so that a record that is one contributes nothing.
        """
        z_PD = self(feature_PD).double() / self.radius
        length_P1 = z_PD.norm(dim=1, keepdim=True)
        z_PD /= length_P1.clamp(min=1)
        finite_P1 = length_P1.isfinite()
        return z_PD if bool(finite_P1.all()) else torch.where(finite_P1, z_PD, 0.0)


_RIDGE_RANGE = (1e-3, 1e6)


def solve_ridge(values_D: Tensor, effective_dim: float) -> float:
    """Solve sum_d v_d / (v_d + r v) = effective_dim for the ridge r, in units of the mean variance v.

    The sum is the mean squared length of a whitened point, which is the effective dimension of ridge regression. If no
    ridge of the searched range solves the equation, the nearer end of the range is returned.
    """
    unit_D = values_D / values_D.mean().clamp(min=1e-12)

    def compute_excess(log_ridge: float) -> float:
        return float((unit_D / (unit_D + math.exp(log_ridge))).sum()) - effective_dim

    low, high = (math.log(end) for end in _RIDGE_RANGE)
    if compute_excess(low) <= 0:
        return _RIDGE_RANGE[0]
    return _RIDGE_RANGE[1] if compute_excess(high) >= 0 else math.exp(brentq(compute_excess, low, high))
