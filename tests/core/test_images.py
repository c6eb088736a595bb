"""Images of any common form become the same pixels, each image alone."""

import numpy as np
import pytest
import torch
from torchvision.transforms.functional import to_tensor

from pate_torch.core.images import convert_images

PIXELS = np.random.default_rng(0).integers(0, 256, (5, 3, 6, 4), dtype=np.uint8)


@pytest.mark.parametrize("dtype", ["uint8", "int16", "int64", "uint32", "float16", "float32", "float64"])
def test_whole_numbers_are_pixels_and_fractions_of_torchvision_come_back_exactly(dtype):
    fractions = torch.stack([to_tensor(image.transpose(1, 2, 0)) for image in PIXELS]).numpy()
    x, is_finite = convert_images("x", (fractions if "float" in dtype else PIXELS).astype(dtype))
    np.testing.assert_array_equal(x, PIXELS)
    assert x.dtype == np.uint8 and is_finite.all()
    x, _ = convert_images("x", PIXELS[:, 0] > 99)  # gray masks get a channel
    np.testing.assert_array_equal(x, np.where(PIXELS[:, :1] > 99, 255, 0))


@pytest.mark.parametrize("scale,odd", [(1.0, [np.nan, np.inf, -np.inf, 3.0, -2.0]), (255, [300, -1, 2**40, 256, -300])])
def test_an_odd_private_image_changes_no_other_and_raises_nothing(scale, odd):
    x = (PIXELS / 255 * scale).astype(np.float64 if scale == 1.0 else np.int64)
    for value in odd:
        changed = x.copy()
        changed[2, 1, 3] = value
        pixels, is_finite = convert_images("x", changed, is_private=True)
        np.testing.assert_array_equal(np.delete(pixels, 2, axis=0), np.delete(convert_images("x", x)[0], 2, axis=0))
        assert is_finite.tolist() == [True, True, bool(np.isfinite(value)), True, True]
        assert set(pixels[2, 1, 3]) == {255 if np.isfinite(value) and value > 0 else 0}
        with pytest.raises(ValueError, match=r"^x=.*from .*must be whole numbers in 0\.\.255 or fractions in 0\.\.1"):
            convert_images("x", changed)


@pytest.mark.parametrize(
    "x,message",
    [
        (np.zeros((4, 9, 9, 3)), r"\[4, 9, 9, 3\].*channels before.*transpose\(0, 3, 1, 2\)"),
        (np.zeros((4, 9)), r"float64 \[4, 9\].*must be images"),
        (np.zeros((4, 9, 9), dtype=object), "object .*must be images"),
        (np.zeros((4, 9, 9), dtype=complex), "complex128 .*must be images"),
    ],
)
@pytest.mark.parametrize("is_private", [False, True])
def test_other_arrays_are_refused_by_shape_and_type(x, message, is_private):
    with pytest.raises(ValueError, match=message):
        convert_images("x", x, is_private=is_private)
