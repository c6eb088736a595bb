"""Random affine distortion as one batched resampling, for images of any number of leading dimensions.

Parameters are drawn apart from the warp, so that a teacher's distortions come from its own stream and stay the same
in every backend. Flips are part of the affine map.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from pate_torch.core import checks


@dataclass(frozen=True, kw_only=True)
class Affine:
    """Ranges of a random affine map, each drawn uniformly.

    Attributes:
        rotate: Rotation in +-degrees.
        scale: Zoom factor, as 1 +- scale.
        shift: Translation in +-pixels.
        shear: Shear in +-degrees.
        flip: Whether to mirror each image with probability 1/2.
        padding: What lies outside the image: "zeros" for dark backgrounds, "border" or "reflection" for photographs.
    """

    rotate: float = 0.0
    scale: float = 0.0
    shift: float = 0.0
    shear: float = 0.0
    flip: bool = False
    padding: str = "zeros"

    def __post_init__(self) -> None:
        checks.between("augment.rotate", self.rotate, 0, 180)
        checks.between("augment.scale", self.scale, 0, 0.9)
        checks.non_negative("augment.shift", self.shift)
        checks.between("augment.shear", self.shear, 0, 60)
        checks.boolean("augment.flip", self.flip)
        checks.one_of("augment.padding", self.padding, ("zeros", "border", "reflection"))

    def draw(self, count: int, image_shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Draw ``count`` maps from output to input coordinates, float32 [count, 2, 3], from a CPU generator."""
        u = torch.rand(count, 6, generator=generator)
        signed = 2 * u - 1
        angle = signed[:, 0] * math.radians(self.rotate)
        shear = torch.tan(signed[:, 1] * math.radians(self.shear))
        zoom_x, zoom_y = 1 + signed[:, 2] * self.scale, 1 + signed[:, 3] * self.scale
        if self.flip:
            zoom_x = zoom_x * torch.where(u[:, 4] < 0.5, -1.0, 1.0)
        extra = torch.rand(count, 2, generator=generator) * 2 - 1
        height, width = image_shape[-2:]
        shift_x, shift_y = extra[:, 0] * 2 * self.shift / width, extra[:, 1] * 2 * self.shift / height
        cos, sin = angle.cos(), angle.sin()
        row_x = torch.stack([cos / zoom_x, (shear * cos - sin) / zoom_y, shift_x], 1)
        row_y = torch.stack([sin / zoom_x, (shear * sin + cos) / zoom_y, shift_y], 1)
        return torch.stack([row_x, row_y], 1)


def warp(x: Tensor, theta: Tensor, padding: str = "zeros") -> Tensor:
    """Resample float images x [B, Ch, H, W] (in any scale where 0 is background) by the maps theta [B, 2, 3]."""
    grid = F.affine_grid(theta.to(x.dtype), list(x.shape), align_corners=False)
    return F.grid_sample(x, grid, padding_mode=padding, align_corners=False)
