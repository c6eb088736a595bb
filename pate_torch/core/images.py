"""Conversion of arrays of images to uint8 [N, Ch, H, W], each image alone. The module does not import torch."""

from __future__ import annotations

from typing import Any

import numpy as np

from pate_torch.core import checks


def has_fractions(x: np.ndarray) -> bool:
    """Return whether the values of an array are fractions in 0..1 by its type, and not whole numbers in 0..255."""
    return x.dtype.kind in "fb"


def convert_images(
    key: str, x: Any, *, is_private: bool = False, fractions: bool | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Convert images to uint8 [N, Ch, H, W]. Also return which images are valid, bool [N].

    Fractions are rounded to multiples of 1/255, so images of ``torchvision.transforms.ToTensor`` come back exactly.
    An image is valid if it is finite and its values are ``fractions`` or not, as is stated.

    Args:
        key: Name of the argument, for messages.
        x: Array of images [N, H, W] or [N, Ch, H, W] of whole numbers in 0..255 or fractions in 0..1.
        is_private: Whether the images are private. Then values out of range are clipped, and values that are not finite
            become 0. Otherwise both are errors.
        fractions: Whether the values are fractions, and not whole numbers, of whatever type they are. None to tell by
            the type of the array, which one private image can change, so private images need True or False.
    """
    x = np.asarray(x)
    x = x[:, None] if x.ndim == 3 else x
    if x.ndim != 4 or x.dtype.kind not in "buif":
        problem = "must be images [N, H, W] or [N, Ch, H, W], uint8 or floats in 0..1"
        raise checks.error(key, f"{x.dtype} {list(x.shape)}", problem)
    if x.shape[1] > 4 >= x.shape[3]:
        problem = "must have the channels before the height and the width, [N, Ch, H, W]"
        raise checks.error(key, list(x.shape), problem, "Use x.transpose(0, 3, 1, 2).")
    fractions = has_fractions(x) if fractions is None else fractions
    if x.dtype == np.uint8 and not fractions:
        return x, np.ones(len(x), dtype=bool)
    # One private image can change the type of all, in which they must not be rounded.
    dtype, x, high = x.dtype, x.astype(np.float64), 1 if fractions else 255
    if not is_private and not ((x >= 0) & (x <= high)).all():  # NaN fails, too
        values = f"{dtype} from {x.min():g} to {x.max():g}"
        fix = "Scale the values, without a normalization by mean and std."
        raise checks.error(key, values, "must be whole numbers in 0..255 or fractions in 0..1", fix)
    is_whole_N = (x == np.rint(x)).all((1, 2, 3))
    fits_N = ~is_whole_N | (x <= 1).all((1, 2, 3)) if fractions else is_whole_N
    pixels = np.nan_to_num(x, nan=0, posinf=0, neginf=0).clip(0, high) * (255 / high)
    return np.rint(pixels).astype(np.uint8), np.isfinite(x).all((1, 2, 3)) & fits_N
