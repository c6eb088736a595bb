"""Printed characters, distorted: as many image records as wanted, made offline from a seed.

Every font of a small set that matplotlib ships is rendered once for each character, at twice the resolution; records
are batched affine warps of these, averaged down, with varying ink and noise. Records are independent draws.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np
import torch
import torch.nn.functional as F
from PIL import ImageFont
from torch import Tensor

from benchmarks.fonts import drawn
from pate_torch.core import checks
from pate_torch.data import benchmark
from pate_torch.features.augmentation import Affine, warp
from pate_torch.privacy.records import Dataset

CHARACTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"
FONTS = (
    *(f"DejaVuSans{style}" for style in ("", "-Bold", "-Oblique", "-BoldOblique")),
    *(f"DejaVuSansMono{style}" for style in ("", "-Bold", "-Oblique", "-BoldOblique")),
    *(f"DejaVuSerif{style}" for style in ("", "-Bold", "-Italic", "-BoldItalic")),
    *(f"STIXGeneral{style}" for style in ("", "Bol", "Italic", "BolIta")),
)
_BATCH = 4096
_OVERSAMPLING = 2


@dataclass(frozen=True, kw_only=True)
class Glyphs(benchmark.Benchmark):
    """The first ``num_classes`` of 0-9A-Z in 16 fonts, uint8 [N, 1, size, size], white on black.

    Attributes:
        name: Declared name.
        private: Private records.
        public: Public points.
        test: Test records.
        num_classes: At most 36.
        size: Height and width in pixels.
        rotate: Largest rotation in degrees.
        shear: Largest shear in degrees.
        scale: Largest change of size: 1 +- scale.
        shift: Largest shift in pixels.
        noise: Standard deviation of the pixels' noise, of 1.
        seed: Seed of the data set itself, not of a run; a record depends on (seed, part, position) alone, so a larger
            set begins with the smaller one.
    """

    name: str = "glyphs"
    private: int = 25_000
    public: int = 4_000
    test: int = 1_000
    num_classes: int = 10
    size: int = 28
    rotate: float = 15.0
    shear: float = 10.0
    scale: float = 0.15
    shift: float = 2.0
    noise: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.integer("dataset.num_classes", self.num_classes, low=2, high=len(CHARACTERS))
        checks.integer("dataset.size", self.size, low=8, high=256)
        checks.between("dataset.noise", self.noise, 0, 1)
        self._distortion()

    @property
    def class_names(self) -> tuple[str, ...]:
        return tuple(CHARACTERS[: self.num_classes])

    def load(self) -> Dataset:
        atlas = _atlas(self.size * _OVERSAMPLING)[:, : self.num_classes]
        draw = functools.partial(self._batch, atlas)
        return drawn.dataset(self, kind="glyphs", seed=self.seed, batch=draw, size=_BATCH)

    def _distortion(self) -> Affine:
        """In pixels of the oversampled picture."""
        return Affine(rotate=self.rotate, shear=self.shear, scale=self.scale, shift=_OVERSAMPLING * self.shift)

    def _batch(self, atlas: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        label = torch.randint(self.num_classes, (_BATCH,), generator=generator)
        font = torch.randint(len(atlas), (_BATCH,), generator=generator)
        ink = 0.5 + 0.5 * torch.rand(_BATCH, 1, 1, 1, generator=generator)
        theta = self._distortion().draw(_BATCH, tuple(atlas.shape[2:]), generator)
        noise = self.noise * torch.randn(_BATCH, 1, self.size, self.size, generator=generator)
        glyph = atlas[font, label][:, None]
        images = F.avg_pool2d(warp(glyph, theta), _OVERSAMPLING) * ink + noise
        return (images.clamp(0, 1) * 255).round().to(torch.uint8), label


@functools.lru_cache(maxsize=4)
def _atlas(size: int) -> Tensor:
    """Every font and character, centered by its box and 70 % of the picture high, float32 [fonts, 36, size, size]."""
    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    atlas = np.zeros((len(FONTS), len(CHARACTERS), size, size), dtype=np.float32)
    for row, name in zip(atlas, FONTS, strict=True):
        font = _font(folder / f"{name}.ttf", 0.7 * size)
        for place, character in zip(row, CHARACTERS, strict=True):
            place[:] = drawn.picture(character, font, size)
    return torch.from_numpy(atlas)


def _font(path: Path, height: float) -> ImageFont.FreeTypeFont:
    """The font at the size where its capitals are ``height`` pixels high: point sizes differ in that."""
    trial = ImageFont.truetype(str(path), 100)
    _, top, _, bottom = trial.getbbox("H")
    return ImageFont.truetype(str(path), 100 * height / (bottom - top))
