"""Digits of handwriting fonts, distorted: image records about as hard as MNIST's, made offline.

Choices can be made on them that MNIST must not make. A digit is drawn in a font, its strokes thickened, turned,
sheared, stretched and bent smoothly, then centered by its mass. Fonts are as common as words are (Zipf), so that some
styles are rare. Records are independent draws.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import ImageFont
from torch import Tensor

from benchmarks.fonts import drawn
from pate_torch.core import checks, rng
from pate_torch.data import benchmark
from pate_torch.data.base import resolve_path
from pate_torch.features.augmentation import Affine
from pate_torch.privacy.records import Dataset

SUFFIXES = (".otf", ".ttf", ".woff")
_DIGITS = "0123456789"
_SIZE = 28
_OVERSAMPLING = 3
_DRAWN = 80  # pixels; a digit takes up 56 of them, as MNIST's take up 20 of 28
_BATCH = 1000
_KNOTS = 6  # of a bend, each way


@dataclass(frozen=True, kw_only=True)
class Handwriting(benchmark.Benchmark):
    """Digits 0 to 9 in every font of a folder, uint8 [N, 1, 28, 28], white on black.

    Attributes:
        name: Declared name.
        path: The folder; its ``SUFFIXES`` files are fonts, and those without ten different digits are left out.
        root: The folder, where ``path`` is None.
        private: Private records.
        public: Public points.
        test: Test records.
        rotate: Largest rotation in degrees.
        shear: Largest shear in degrees.
        scale: Largest change of size: 1 +- scale.
        bend: How far the knots of a smooth displacement lie off, in 160ths of the picture (standard deviation).
        seed: Seed of the data set itself, not of a run; a record depends on (fonts, seed, part, position) alone.
    """

    name: str = "handwriting"
    path: str | PathLike[str] | None = None
    root: str | PathLike[str] | None = None
    private: int = 60_000
    public: int = 9_000
    test: int = 4_000
    rotate: float = 16.0
    shear: float = 14.0
    scale: float = 0.2
    bend: float = 3.2
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.between("dataset.bend", self.bend, 0, 20)
        self._distortion()

    def load(self) -> Dataset:
        """Draw the records.

        Raises:
            ValueError: There is no folder, or no font in it has ten different digits.
        """
        atlas = _atlas(resolve_path("dataset.path", self.path, self.root))
        order = torch.randperm(len(atlas), generator=rng.make_torch_generator(self.seed, "handwriting", "fonts"))
        draw = functools.partial(self._batch, atlas, 1 / (order + 1).double())
        return drawn.dataset(self, kind="handwriting", seed=self.seed, batch=draw, size=_BATCH)

    def _distortion(self) -> Affine:
        return Affine(rotate=self.rotate, shear=self.shear, scale=self.scale)

    def _batch(self, atlas: Tensor, common_F: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """common_F: how common each font is, up to a factor."""
        label_B = torch.randint(10, (_BATCH,), generator=generator)
        font_B = torch.multinomial(common_F, _BATCH, replacement=True, generator=generator)
        x = atlas[font_B, label_B][:, None]
        thick_B = torch.randint(3, (_BATCH,), generator=generator)[:, None, None, None]
        thicker, thickest = F.max_pool2d(x, 3, 1, 1), F.max_pool2d(x, 5, 1, 2)
        x = torch.where(thick_B == 0, x, torch.where(thick_B == 1, thicker, thickest))
        theta = self._distortion().draw(_BATCH, tuple(x.shape[2:]), generator)
        knots = torch.randn(_BATCH, 2, _KNOTS, _KNOTS, generator=generator) * self.bend / _DRAWN
        bend = F.interpolate(knots, size=x.shape[2:], mode="bicubic", align_corners=False)
        grid = F.affine_grid(theta, list(x.shape), align_corners=False) + bend.permute(0, 2, 3, 1)
        x = _centered(F.grid_sample(x, grid, align_corners=False))
        return (x.clamp(0, 1) * 255).round().to(torch.uint8), label_B


def _centered(x: Tensor) -> Tensor:
    """Pictures with their centers of mass in the middle, made smaller: [B, 1, 28, 28]."""
    at = (torch.arange(x.shape[2]) + 0.5) * 2 / x.shape[2] - 1
    mass_B = x.sum((1, 2, 3)).clamp(min=1e-6)
    theta = torch.eye(2, 3).repeat(len(x), 1, 1)
    theta[:, 0, 2] = (x.sum((1, 2)) @ at) / mass_B
    theta[:, 1, 2] = (x.sum((1, 3)) @ at) / mass_B
    fine = _OVERSAMPLING * _SIZE
    grid = F.affine_grid(theta, [len(x), 1, fine, fine], align_corners=False)
    return F.avg_pool2d(F.grid_sample(x, grid, align_corners=False), _OVERSAMPLING)


@functools.lru_cache(maxsize=2)
def _atlas(folder: Path) -> Tensor:
    """Every font and digit, centered by its box, float32 [fonts, 10, 80, 80], in the order of the files' names."""
    files = sorted(file for file in folder.glob("**/*") if file.suffix.lower() in SUFFIXES)
    fonts = [digits for digits in map(_digits, files) if digits is not None]
    if not fonts:
        what = f"must hold fonts ({', '.join(SUFFIXES)}) with ten different digits; it holds {len(files)} such files"
        raise checks.error("dataset.path", str(folder), what, "docs/howto/files.md says where fonts are to be had.")
    return torch.from_numpy(np.stack(fonts))


def _digits(file: Path) -> np.ndarray | None:
    """The ten digits of one font; None where it cannot be read, or leaves some out or blank."""
    try:
        font = ImageFont.truetype(str(file), 100)
    except OSError:
        return None
    pictures = np.zeros((10, _DRAWN, _DRAWN), dtype=np.float32)
    for place, digit in zip(pictures, _DIGITS, strict=True):
        left, top, right, bottom = font.getbbox(digit)
        if right - left < 4 or bottom - top < 10:
            return None
        fitting = font.font_variant(size=int(100 * 56 / max(right - left, bottom - top)))
        place[:] = drawn.picture(digit, fitting, _DRAWN)
    rows = pictures.reshape(10, -1)
    apart = np.abs(rows[:, None] - rows[None]).mean(2) + np.eye(10)
    # A font without digits has one box for them all.
    return pictures if apart.min() > 0.005 and rows.sum(1).min() > 30 else None
