"""Affine distortion: identity, known maps against plain indexing, ranges, and streams."""

import math

import numpy as np
import pytest
import torch

from pate_torch.features.augmentation import Affine, warp


def stream(seed=0):
    return torch.Generator().manual_seed(seed)


def images(count=4, channels=2, size=9):
    return torch.rand(count, channels, size, size, generator=stream(5))


@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
def test_no_range_is_the_identity(padding):
    x = images()
    theta = Affine(padding=padding).draw(len(x), x.shape[1:], stream())
    torch.testing.assert_close(warp(x, theta, padding), x, atol=1e-5, rtol=0)


def test_flip_mirrors_half_of_the_images_exactly():
    x = images(count=400)
    out = warp(x, Affine(flip=True).draw(len(x), x.shape[1:], stream()))
    mirrored = torch.tensor([torch.allclose(o, i.flip(-1), atol=1e-5) for o, i in zip(out, x, strict=True)])
    same = torch.tensor([torch.allclose(o, i, atol=1e-5) for o, i in zip(out, x, strict=True)])
    assert bool((mirrored ^ same).all())
    assert 160 < int(mirrored.sum()) < 240  # 4 standard deviations of Binomial(400, 1/2)


def test_a_shift_of_whole_pixels_moves_the_image():
    x = images(count=1, channels=1)
    theta = torch.tensor([[[1.0, 0.0, 2 * 2 / 9], [0.0, 1.0, 0.0]]])  # two pixels along x, in normalized coordinates
    expected = torch.zeros_like(x)
    expected[..., :-2] = x[..., 2:]
    torch.testing.assert_close(warp(x, theta), expected, atol=1e-5, rtol=0)


def test_a_quarter_turn_is_a_rotation_of_the_array():
    x = images(count=1, channels=1)
    theta = torch.tensor([[[0.0, -1.0, 0.0], [1.0, 0.0, 0.0]]])
    out = warp(x, theta)[0, 0].numpy()
    turns = [np.rot90(x[0, 0].numpy(), k) for k in (1, -1)]
    assert any(np.allclose(out, turned, atol=1e-5) for turned in turns)


def test_draws_fill_their_ranges_and_no_more():
    affine = Affine(rotate=20, scale=0.2, shift=3, shear=0)
    theta = affine.draw(20_000, (1, 28, 28), stream()).double()
    angle = torch.atan2(theta[:, 1, 0], theta[:, 0, 0]).rad2deg()
    assert angle.abs().max() <= 20.001
    # Uniform on [-20, 20]: standard deviation 20/sqrt(3), estimated here to 0.5 %.
    assert angle.std().item() == pytest.approx(20 / math.sqrt(3), rel=0.02)
    shift = theta[:, :, 2] * 14
    assert shift.abs().max() <= 3.001
    assert shift.std().item() == pytest.approx(math.sqrt(3), rel=0.02)
    zoom = 1 / theta[:, :, 0].norm(dim=1)
    assert zoom.min() >= 0.7999 and zoom.max() <= 1.2001
    assert abs(np.corrcoef(angle, shift[:, 0])[0, 1]) < 0.03


def test_shear_tilts_one_axis_by_up_to_its_angle():
    theta = Affine(shear=10).draw(5_000, (1, 8, 8), stream())
    tilt = theta[:, 0, 1].atan().rad2deg()
    assert 9.5 < tilt.abs().max() <= 10.001
    torch.testing.assert_close(theta[:, 0, 0], torch.ones(5_000))


@pytest.mark.parametrize(
    "bad",
    [{"rotate": -1}, {"scale": 1.0}, {"shift": float("nan")}, {"shear": 90}, {"flip": 1}, {"padding": "wrap"}],
)
def test_refuses(bad):
    with pytest.raises(ValueError, match="augment"):
        Affine(**bad)
