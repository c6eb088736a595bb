"""Random distortions of points that keep their class: affine and elastic maps, cutout, masks and noise.

Images are normalized after the distortion, so that pixels from outside the image are background. Affine maps are drawn
separately from the batched warp, so that each teacher gets the same distortions from its random stream in all backends.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pate_torch.core import checks
from pate_torch.privacy.records import DataSpec


@dataclass(frozen=True, kw_only=True)
class Affine:
    """Ranges of a random affine map, each drawn uniformly.

    Attributes:
        rotate: Largest rotation, in degrees.
        scale: Largest deviation of the zoom factor from 1.
        shift: Largest translation, in pixels.
        shear: Largest shear, in degrees.
        flip: Whether to mirror each image with probability 1/2.
        padding: Pixels outside the image: "zeros" for dark backgrounds, "border" or "reflection" for photographs.
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
        """Draw ``count`` maps from output to input coordinates, float32 [count, 2, 3]."""
        u = torch.rand(count, 6, generator=generator, device=generator.device)
        signed_u = 2 * u - 1
        angle = signed_u[:, 0] * math.radians(self.rotate)
        shear = torch.tan(signed_u[:, 1] * math.radians(self.shear))
        zoom_x, zoom_y = 1 + signed_u[:, 2] * self.scale, 1 + signed_u[:, 3] * self.scale
        if self.flip:
            zoom_x = zoom_x * torch.where(u[:, 4] < 0.5, -1.0, 1.0)
        signed_shift = torch.rand(count, 2, generator=generator, device=generator.device) * 2 - 1
        height, width = image_shape[-2:]
        shift_x, shift_y = signed_shift[:, 0] * 2 * self.shift / width, signed_shift[:, 1] * 2 * self.shift / height
        cos, sin = angle.cos(), angle.sin()
        row_x = torch.stack([cos / zoom_x, (shear * cos - sin) / zoom_y, shift_x], 1)
        row_y = torch.stack([sin / zoom_x, (shear * sin + cos) / zoom_y, shift_y], 1)
        return torch.stack([row_x, row_y], 1)


def warp(x: Tensor, theta: Tensor, padding: str = "zeros") -> Tensor:
    """Resample float images x [B, Ch, H, W], whose background is 0, by the affine maps theta [B, 2, 3]."""
    grid = F.affine_grid(theta.to(x.dtype), list(x.shape), align_corners=False)
    return F.grid_sample(x, grid, padding_mode=padding, align_corners=False)


def parse_affine(augment: Affine | Mapping[str, Any] | None, key: str = "augment") -> Affine | None:
    """Convert the mapping of a configuration to an ``Affine``. None is returned as None. Messages name ``key``."""
    if augment is None or isinstance(augment, Affine):
        return augment
    checks.mapping(key, augment, fields(Affine))
    return Affine(**augment)


@dataclass(frozen=True, kw_only=True)
class View:
    """A random distortion of points.

    Attributes:
        affine: Ranges of the affine maps of images. None for no affine map.
        elastic: Amplitude of a smooth random displacement of images, in pixels.
        cutout: Largest side of an erased square, as a share of the height of the image.
        mask: Probability with which a feature of a row is set to its normalization mean.
        jitter: Standard deviation of the noise on normalized rows. For images: largest relative change of the contrast.
    """

    affine: Affine | None = None
    elastic: float = 0.0
    cutout: float = 0.0
    mask: float = 0.0
    jitter: float = 0.0

    def __call__(self, x: Tensor, spec: DataSpec, generator: torch.Generator) -> Tensor:
        """Distort and normalize raw points [B, ...]. The generator must be on the device of the points."""
        if spec.is_image:
            return self._distort_images(x, spec, generator)
        x = spec.normalize(x)
        if self.mask:
            x = x * (torch.rand(x.shape, generator=generator, device=generator.device) >= self.mask)
        if self.jitter:
            x = x + self.jitter * torch.randn(x.shape, generator=generator, device=generator.device)
        return x

    def _distort_images(self, x: Tensor, spec: DataSpec, generator: torch.Generator) -> Tensor:
        x = x.float() / 255 if x.dtype == torch.uint8 else x
        count, _, height, width = x.shape
        if self.affine is not None or self.elastic:
            affine = self.affine or Affine()
            grid = F.affine_grid(affine.draw(count, x.shape, generator), list(x.shape), align_corners=False)
            if self.elastic:  # a smooth field: 4 x 4 normal draws are interpolated
                coarse = torch.randn(count, 2, 4, 4, generator=generator, device=generator.device)
                field = F.interpolate(coarse, (height, width), mode="bicubic", align_corners=True)
                grid = grid + field.permute(0, 2, 3, 1) * _pixels_to_grid(self.elastic, height, width, generator.device)
            x = F.grid_sample(x, grid, padding_mode=affine.padding, align_corners=False)
        if self.jitter:
            contrast = torch.rand(count, 1, 1, 1, generator=generator, device=generator.device)
            x = x * (1 + self.jitter * (2 * contrast - 1))
        x = spec.normalize(x)
        if self.cutout:
            # The square gets the mean color, 0 after normalization, because a black square is invisible on black.
            u = torch.rand(count, 3, generator=generator, device=generator.device)
            side = u[:, 0] * self.cutout * height
            rows, columns = (torch.arange(size, device=u.device) for size in (height, width))
            inside_y = (rows - u[:, 1:2] * height).abs() * 2 <= side[:, None]
            inside_x = (columns - u[:, 2:3] * width).abs() * 2 <= side[:, None]
            x = x.masked_fill(inside_y[:, None, :, None] & inside_x[:, None, None, :], 0.0)
        return x


@functools.lru_cache(maxsize=32)  # cached, so that the tensor is copied to each device once
def _pixels_to_grid(pixels: float, height: int, width: int, device: torch.device) -> Tensor:
    return (pixels * torch.tensor([2 / width, 2 / height])).to(device)


def make_weak_view(spec: DataSpec, augment: Affine | None) -> View:
    """Make the weak view, which preserves the class: affine maps of images, or light noise on rows."""
    return View(affine=augment) if spec.is_image else View(jitter=0.05)


def make_strong_view(spec: DataSpec, augment: Affine | None) -> View:
    """Make the strong view of consistency training: wider affine maps and cutout of images, or masked rows."""
    if not spec.is_image:
        return View(mask=0.25, jitter=0.1)
    if augment is None:
        return View(cutout=0.5, jitter=0.3)
    elastic = 0.03 * min(spec.input_shape[-2:])
    return View(affine=widen_affine(augment), elastic=elastic, cutout=0.5, jitter=0.3)


def widen_affine(affine: Affine) -> Affine:
    """Widen the ranges of a distortion by half. Flips and padding stay the same."""
    rotate, scale = min(affine.rotate * 1.5, 180.0), min(affine.scale * 1.5, 0.5)
    return replace(affine, rotate=rotate, scale=scale, shift=affine.shift * 1.5, shear=min(affine.shear * 1.5, 45.0))
