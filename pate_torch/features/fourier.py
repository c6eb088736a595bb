"""Random Fourier features, with which a linear model separates classes that are not linearly separable.

The features of a point x are x and sqrt(2) cos(x W + b), with normal W and uniform b; nothing is trained. The mean
product of the cosines of two points approximates the Gaussian kernel exp(-|x - x'|^2 / 2 s^2), whose width s is a
multiple of the median distance of the public points. The features suit rows of numbers with ``method=gradients``, whose
public model is linear in the features.

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
from pate_torch.core.progress import Progress, do_nothing
from pate_torch.core.rng import make_torch_generator
from pate_torch.features.base import Device, FeatureRecipe
from pate_torch.networks import Fourier, remove_head
from pate_torch.privacy.records import DataSpec

_NUM_COMPARED_POINTS = 500
"""Number of public points in the estimate of the median distance."""


@dataclass(frozen=True, kw_only=True)
class FourierFeatures(FeatureRecipe):
    """A recipe that appends random cosines to the points.

    Attributes:
        cosines: Number F of cosines. A point of D numbers gets D + F features.
        width: Width of the kernel, as a multiple of the median distance of the public points.
        balanced: Whether points are divided by their length, and cosines by sqrt(F), so that both have the same weight.
    """

    name: str = "fourier"
    cosines: int = 256
    width: float = 1.0
    balanced: bool = False

    def __post_init__(self) -> None:
        checks.integer("features.cosines", self.cosines, low=1)
        checks.positive("features.width", self.width)
        checks.boolean("features.balanced", self.balanced)

    @property
    def design(self) -> dict[str, Any]:
        # Without the default, so that students of earlier releases have the same description.
        return {"name": "fourier", "options": {"cosines": self.cosines} | ({"balanced": True} if self.balanced else {})}

    def learn(
        self, x_P: Tensor, spec: DataSpec, *, seed: int, device: Device = "cpu", progress: Progress = do_nothing
    ) -> nn.Module:
        generator = make_torch_generator(seed, "representation", "fourier")
        network = remove_head(networks.build("fourier", spec.input_shape, spec.num_classes, **self.design["options"]))
        module = next(layer for layer in network.modules() if isinstance(layer, Fourier))
        z_PD = spec.normalize(x_P.cpu()).flatten(1)
        sample = torch.randperm(len(z_PD), generator=generator)[:_NUM_COMPARED_POINTS]
        distance = torch.pdist(z_PD[sample].double())
        distance = distance[distance > 0]
        scale = self.width * (float(distance.median()) if len(distance) else 1.0)
        module.frequency_DF.copy_(torch.randn(module.frequency_DF.shape, generator=generator) / scale)
        module.phase_F.copy_(torch.rand(module.phase_F.shape, generator=generator) * 2 * math.pi)
        progress(1, 1)
        return network.to(device).eval()
