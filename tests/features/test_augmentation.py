"""Distortions: known maps against plain indexing, ranges that are filled, masks and squares, and streams."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from pate_torch.features.augmentation import (
    Affine,
    View,
    make_strong_view,
    make_weak_view,
    parse_affine,
    warp,
    widen_affine,
)
from pate_torch.privacy.records import DataSpec

SPEC = DataSpec(name="images", num_classes=2, input_shape=(1, 8, 8), class_names=("a", "b"), mean=(0.3,), std=(0.38,))


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


def test_a_shift_of_whole_pixels_moves_the_image_and_a_quarter_turn_rotates_it():
    x = images(count=1, channels=1)
    theta = torch.tensor([[[1.0, 0.0, 2 * 2 / 9], [0.0, 1.0, 0.0]]])  # two pixels along x, in normalized coordinates
    expected = torch.zeros_like(x)
    expected[..., :-2] = x[..., 2:]
    torch.testing.assert_close(warp(x, theta), expected, atol=1e-5, rtol=0)
    turned = warp(x, torch.tensor([[[0.0, -1.0, 0.0], [1.0, 0.0, 0.0]]]))
    assert any(torch.allclose(turned, x.rot90(k, (2, 3)), atol=1e-5) for k in (1, -1))


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
    # Shear tilts one axis by up to its angle.
    theta = Affine(shear=10).draw(5_000, (1, 8, 8), stream())
    tilt = theta[:, 0, 1].atan().rad2deg()
    assert 9.5 < tilt.abs().max() <= 10.001
    torch.testing.assert_close(theta[:, 0, 0], torch.ones(5_000))


@pytest.mark.parametrize(
    "bad", [{"rotate": -1}, {"scale": 1.0}, {"shift": float("nan")}, {"shear": 90}, {"flip": 1}, {"padding": "wrap"}]
)
def test_refuses(bad):
    with pytest.raises(ValueError, match="augment"):
        Affine(**bad)


def test_no_distortion_is_normalization_and_seeds_decide_the_rest():
    x = (255 * images(20, 1, 8)).byte()
    torch.testing.assert_close(View()(x, SPEC, stream()), SPEC.normalize(x))
    view = make_strong_view(SPEC, Affine(rotate=10))
    first, again, other = (view(x, SPEC, stream(seed)) for seed in (0, 0, 1))
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_cutout_erases_a_square_to_the_mean():
    x = torch.full((200, 1, 8, 8), 255, dtype=torch.uint8)
    erased = View(cutout=0.5)(x, SPEC, stream())
    hidden = erased == 0
    assert 0 < hidden.float().mean() < 0.25  # at most half the side, so a quarter of the area
    for image in hidden[:, 0]:
        rows, columns = image.any(1).nonzero().squeeze(1), image.any(0).nonzero().squeeze(1)
        if len(rows):
            assert image[rows.min() : rows.max() + 1, columns.min() : columns.max() + 1].all()
    assert torch.equal(erased[~hidden], SPEC.normalize(x)[~hidden])


def test_elastic_moves_content_by_about_its_amplitude():
    x = torch.zeros(300, 1, 8, 8)
    x[:, 0, 4, 4] = 1
    spec = dataclasses.replace(SPEC, mean=(0.0,), std=(1.0,))
    moved = View(elastic=1.0)(x, spec, stream())[:, 0]
    mass = moved.sum((1, 2))
    center = (moved.sum(2) * torch.arange(8)).sum(1) / mass.clamp(min=1e-6)
    assert 0.3 < (center[mass > 0.3] - 4).std() < 1.2


def test_rows_are_masked_and_shaken():
    spec = dataclasses.replace(SPEC, input_shape=(6,), mean=(1.0,) * 6, std=(2.0,) * 6)
    x = torch.full((2000, 6), 5.0)
    masked = View(mask=0.25)(x, spec, stream())
    assert set(masked.unique().tolist()) == {0.0, 2.0}
    assert (masked == 0).float().mean().item() == pytest.approx(0.25, abs=0.02)  # 5 deviations of 12,000 draws
    shaken = View(jitter=0.5)(x, spec, stream()) - 2.0
    assert shaken.std().item() == pytest.approx(0.5, rel=0.03)
    assert make_weak_view(spec, None).mask == 0 < make_strong_view(spec, None).mask


def test_ranges_widen_and_stay_legal():
    wide = widen_affine(Affine(rotate=150, scale=0.4, shift=2, shear=40, flip=True, padding="border"))
    assert wide == Affine(rotate=180, scale=0.5, shift=3, shear=45, flip=True, padding="border")
    assert parse_affine(None) is None and parse_affine({"rotate": 3}) == Affine(rotate=3)
