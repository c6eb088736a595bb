"""Whitening: as many directions of the public points as are asked for."""

import numpy as np
import pytest
import torch

from pate_torch.privacy.whitening import Whitening, solve_ridge


@pytest.fixture
def points():
    draw = torch.Generator().manual_seed(3)
    return torch.randn(400, 12, generator=draw) * torch.logspace(0, -3, 12)


@pytest.mark.parametrize("directions", [0.5, 2.0, 5.0, 7.0])
def test_the_ridge_leaves_so_many_directions_which_is_the_mean_squared_length(points, directions):
    """By numpy: the trace of C (C + r v I)^-1, C the covariance and v its mean eigenvalue."""
    values = torch.linalg.eigvalsh(torch.cov(points.T.double(), correction=0))
    ridge = solve_ridge(values, directions)
    cov = np.cov(points.T.numpy().astype(float), bias=True)
    trace = np.trace(cov @ np.linalg.inv(cov + ridge * np.trace(cov) / 12 * np.eye(12)))
    assert trace == pytest.approx(directions, rel=1e-3)
    z = Whitening.from_features(points, ridge)(points)[:, :-1]
    assert float(z.square().sum(1).mean()) == pytest.approx(directions, rel=1e-3)


def test_axes_along_which_points_hardly_vary_are_left_out(points):
    """By numpy: of the whitened variances v / (v + r), those below 3 % of the largest."""
    whitening = Whitening.from_features(points, 0.1, 3.0)
    values = np.linalg.eigvalsh(np.cov(points.T.numpy().astype(float), bias=True))
    variances = values / (values + solve_ridge(torch.from_numpy(values), 3.0) * values.mean())
    is_kept = variances >= 0.03 * variances.max()
    z = whitening(points)[:, :-1]
    assert z.shape[1] == is_kept.sum() < 12
    np.testing.assert_allclose(z.var(0, correction=0), variances[is_kept], rtol=1e-3)


def test_more_than_there_are_is_all_of_them(points):
    values = torch.linalg.eigvalsh(torch.cov(points.T.double()))
    assert solve_ridge(values, 12.0) == solve_ridge(values, 1e9) == 1e-3 and solve_ridge(values, 1e-9) == 1e6
    assert solve_ridge(torch.zeros(4), 2.0) == 1e-3


def test_in_place_of_the_ridge(points):
    values = torch.linalg.eigvalsh(torch.cov(points.T.double(), correction=0))
    given, found = Whitening.from_features(points, solve_ridge(values, 3.0)), Whitening.from_features(points, 77.0, 3.0)
    assert given.radius == pytest.approx(found.radius, rel=0.02)  # some axes are left out
    assert torch.allclose(given(points)[:, -found.axis_DE.shape[1] - 1 :], found(points), atol=1e-5)
