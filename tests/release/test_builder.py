"""What a report is built from: confusions that can be counted, pictures that keep their pixels."""

import base64
import io

import numpy as np
import pytest
import torch
from PIL import Image

from pate_torch.release import builder


def test_confusions_of_too_many_classes_are_not_counted():
    label = torch.tensor([0, 1023, 1023])
    counts = builder.compute_confusion(label, label.clamp(max=5), 1024)
    assert (counts[0][0], counts[1023][5], sum(map(sum, counts))) == (1, 2, 3)
    assert builder.compute_confusion(label, label, 2**15) == ()


@pytest.mark.parametrize("channels", [1, 3])
def test_pictures_keep_their_pixels(channels):
    image = np.random.default_rng(0).integers(0, 256, (channels, 5, 4), dtype=np.uint8)
    source = builder.encode_picture(image).removeprefix("data:image/png;base64,")
    pixels = np.asarray(Image.open(io.BytesIO(base64.b64decode(source))))
    assert np.array_equal(np.moveaxis(image, 0, 2), pixels.reshape(5, 4, channels))
