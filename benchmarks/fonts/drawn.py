"""Common parts of data sets drawn from fonts: a character in a picture, and records in whole batches."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from pate_torch.core import rng
from pate_torch.data import benchmark
from pate_torch.privacy.records import Dataset

Batch = Callable[[torch.Generator], tuple[Tensor, Tensor]]
"""Random numbers -> a batch of records, always as many: uint8 [B, Ch, H, W] and int64 [B]."""


def picture(character: str, font: ImageFont.FreeTypeFont, size: int) -> np.ndarray:
    """Draw a character, white on black and centered by its box, float32 [size, size]."""
    left, top, right, bottom = font.getbbox(character)
    image = Image.new("L", (size, size))
    corner = ((size - left - right) / 2, (size - top - bottom) / 2)
    ImageDraw.Draw(image).text(corner, character, fill=255, font=font)
    return np.asarray(image, dtype=np.float32) / 255


def dataset(source: benchmark.Benchmark, *, kind: str, seed: int, batch: Batch, size: int) -> Dataset:
    """The data set of a source whose records are drawn.

    Args:
        source: Says how many records each part has, and which classes there are.
        kind: Names the random streams.
        seed: Seed of the data set.
        batch: Draws a batch of records.
        size: Records in a batch.
    """

    def records(part: str, count: int) -> tuple[Tensor, Tensor]:
        # Whole batches are drawn, and the last one cut, so that the count changes no record.
        drawn = [batch(rng.make_torch_generator(seed, kind, part, start)) for start in range(0, count, size)]
        x, y = (torch.cat(parts)[:count] for parts in zip(*drawn, strict=True))
        return x, y

    assert source.private is not None
    return source.assemble(
        records("private", source.private), records("public", source.public), records("test", source.test)
    )
