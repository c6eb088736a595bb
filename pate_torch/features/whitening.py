"""Features turned and scaled so that the public points spread alike in every direction. Nothing private is read."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from pate_torch.types import LinearModel


@dataclass(frozen=True, eq=False)
class Whitening:
    """Releasable. Coordinates of a feature, (z - center) axis, and how long those of a record may be (``radius``)."""

    center_D: Tensor
    axis_DD: Tensor
    radius: float

    @classmethod
    def of(cls, place_PD: Tensor, ridge: float) -> Whitening:
        """The public points' own: their mean, their axes over the spread along each, their median length."""
        center_D = place_PD.mean(0)
        centered_PD = (place_PD - center_D).double()
        values_D, axis_DD = torch.linalg.eigh(centered_PD.T @ centered_PD / len(centered_PD))
        values_D = values_D.clamp(min=0)
        axis_DD = (axis_DD / (values_D + ridge * values_D.mean()).clamp(min=1e-12).sqrt()).float()
        unbounded = cls(center_D, axis_DD, math.inf)
        return replace(unbounded, radius=float(unbounded(place_PD).norm(dim=1).median()))

    def __call__(self, place_PD: Tensor) -> Tensor:
        """Coordinates and a 1, whose weight is the intercept, float32 [P, D + 1]: of any length."""
        return F.pad((place_PD - self.center_D) @ self.axis_DD, (0, 1), value=1.0)

    def model(self, weight_DC: Tensor, neighbors: int) -> LinearModel:
        """The model that is linear in coordinates and their 1, as one that is linear in the features themselves."""
        weight_FC = self.axis_DD.double() @ weight_DC[:-1]
        bias_C = weight_DC[-1] - self.center_D.double() @ weight_FC
        return LinearModel(weight_FC.float(), bias_C.float(), neighbors)

    def bounded(self, place_PD: Tensor) -> Tensor:
        """What a call gives, of length at most ``radius``, over ``radius``, float64 [P, D + 1]."""
        z_PD = self(place_PD).double() / self.radius
        return z_PD / z_PD.norm(dim=1, keepdim=True).clamp(min=1)
