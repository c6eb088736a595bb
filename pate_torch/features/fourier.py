"""Random Fourier features, with which a linear model separates classes that are not linearly separable.

The features of a point x are x, the ranks of its numbers among the public points, and cosines cos(x W + b) with normal
W and uniform b; nothing is trained. The mean product of the cosines of two points approximates half of the Gaussian
kernel exp(-|x - x'|^2 / 2 s^2), whose width s is a multiple of the median distance of the public points. Ranks make
columns with outliers and long tails useful. The features suit rows of numbers with ``method=gradients``, whose public
model is linear in the features.

Source: Rahimi and Recht 2007, "Random features for large-scale kernel machines".
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pate_torch import networks
from pate_torch.core import checks
from pate_torch.core.device import Device
from pate_torch.core.progress import Progress, do_nothing
from pate_torch.core.rng import make_torch_generator
from pate_torch.features.base import FeatureRecipe
from pate_torch.networks import Fourier, remove_head
from pate_torch.privacy.records import DataSpec

_NUM_COMPARED_POINTS = 500  # public points in the estimate of the median distance
_TIE_MARGIN = 1e-4
"""Distance, relative to numbers above 1, up to which numbers count as equal to a quantile."""


@dataclass(frozen=True, kw_only=True)
class FourierFeatures(FeatureRecipe):
    """A recipe that appends ranks and random cosines to the points.

    Attributes:
        cosines: Number F of cosines. A point of D numbers gets 2 D + F features.
        width: Width of the kernel, as a multiple of the median distance of the public points.
        cosine_variance: Total variance of the cosines over that of the columns and ranks. Noisy gradients fit few
            directions, and with a larger share these directions would leave out columns.
        quantiles: Number of public quantiles of each column, from which ranks follow.
    """

    name: str = "fourier"
    cosines: int = 256
    width: float = 1.0
    cosine_variance: float = 0.25
    quantiles: int = 32

    def __post_init__(self) -> None:
        checks.integer("features.cosines", self.cosines, low=1)
        checks.positive("features.width", self.width)
        checks.positive("features.cosine_variance", self.cosine_variance)
        checks.integer("features.quantiles", self.quantiles, low=1)

    @property
    def design(self) -> dict[str, Any]:
        return {"name": "fourier", "options": {"cosines": self.cosines, "knots": 2 * self.quantiles}}

    def learn(
        self, x_P: Tensor, spec: DataSpec, *, seed: int, device: Device = "cpu", progress: Progress = do_nothing
    ) -> nn.Module:
        generator = make_torch_generator(seed, "representation", "fourier")
        options = self.design["options"]
        network = remove_head(networks.build("fourier", spec.input_shape, spec.num_classes, **options))
        module = next(layer for layer in network.modules() if isinstance(layer, Fourier))
        z_PD = spec.normalize(x_P.cpu()).flatten(1)
        sample = torch.randperm(len(z_PD), generator=generator)[:_NUM_COMPARED_POINTS]
        distance = torch.pdist(z_PD[sample].double())
        distance = distance[distance > 0]
        scale = self.width * (float(distance.median()) if len(distance) else 1.0)
        module.frequency_DF.copy_(torch.randn(module.frequency_DF.shape, generator=generator) / scale)
        module.phase_F.copy_(torch.rand(module.phase_F.shape, generator=generator) * 2 * math.pi)
        self._set_ranks(module, z_PD)
        variance_E = torch.cat([module(part) for part in z_PD.split(1024)]).double().var(0, correction=0)
        columns, cosines = float(variance_E[: -self.cosines].sum()), float(variance_E[-self.cosines :].sum())
        if columns and cosines:
            module.cosine_weight.mul_(math.sqrt(self.cosine_variance * columns / cosines))
        progress(1, 1)
        return network.to(device).eval()

    def _set_ranks(self, module: Fourier, z_PD: Tensor) -> None:
        """Set the knots of each column, and give columns of more than two values and their ranks half of the variance.

        Each public quantile is two knots, just below and just above it, so that an equal number counts one half.
        """
        sorted_PD = z_PD.sort(dim=0).values
        level_Q = ((torch.arange(self.quantiles) + 0.5) / self.quantiles * len(sorted_PD)).long()
        quantile_DQ = sorted_PD[level_Q].T
        margin_DQ = _TIE_MARGIN * quantile_DQ.abs().clamp(min=1)
        module.knot_DK.copy_(torch.cat([quantile_DQ - margin_DQ, quantile_DQ + margin_DQ], 1))
        is_graded_D = (sorted_PD.diff(dim=0) != 0).sum(0) > 1
        module.column_weight_D[is_graded_D] = math.sqrt(0.5)
        module.rank_weight_D[is_graded_D] = math.sqrt(12 * 0.5)  # a uniform rank has variance 1/12
