"""Diffusion maps: the walk's coordinates against dense linear algebra, pieces told apart, new points among theirs."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from pate_torch.features.diffusion import Diffusion, Places
from pate_torch.features.neighbors import diffused, leading, neighbor_graph, spectral


def moons(count=300, seed=0):
    """Two interleaved half circles: no line parts them, and near points lie on one of them."""
    draw = torch.Generator().manual_seed(seed)
    y = torch.arange(count) % 2
    angle = torch.pi * torch.rand(count, generator=draw)
    x = torch.stack([angle.cos() + y, angle.sin() * (1 - 2 * y) + 0.5 * y], 1)
    return x + 0.05 * torch.randn(count, 2, generator=draw), y


def stream():
    return torch.Generator().manual_seed(1)


def test_leading_eigenpairs_are_those_of_the_dense_matrix():
    x, _ = moons(120)
    graph = neighbor_graph(x, 8)
    exact, vectors = np.linalg.eigh(graph.weight_PP.to_dense().double().numpy())
    values, found = leading(graph, 6, stream(), iterations=2000)
    np.testing.assert_allclose(values.numpy(), exact[-6:], atol=1e-5)
    inside = vectors[:, -6:].T @ found.double().numpy()  # vectors of equal values may be turned among themselves
    np.testing.assert_allclose(inside.T @ inside, np.eye(6), atol=1e-3)


def test_a_walk_of_no_steps_is_the_spectral_embedding_and_a_long_one_forgets_the_fast_directions():
    x, _ = moons()
    graph = neighbor_graph(x, 8)
    torch.testing.assert_close(diffused(graph, 12, 0, stream()), spectral(graph, 12, stream()))
    values, vectors = leading(graph, 12, stream())
    twin = F.normalize(vectors * ((1 + values.clamp(-1, 1)) / 2) ** 400, dim=1)
    torch.testing.assert_close(diffused(graph, 12, 400, stream()), twin)
    left = [float(diffused(graph, 12, time, stream())[:, :6].square().mean()) for time in (0, 400, 4000)]
    assert left[0] > 2 * left[1] > 4 * left[2]


def test_two_labels_name_two_moons():
    """One labeled point each: places along the walk tell the moons apart, distances in the plane do not."""
    x, _ = moons()
    new, truth = moons(200, seed=5)
    places = Diffusion(neighbors=8, width=8, time=20_000).learn(x, stream())
    seeds = torch.tensor([0, 1])

    def right(known, asked):
        return float(((asked[:, None] - known[seeds]).square().sum(2).argmin(1) == truth).double().mean())

    assert right(F.normalize(places(x), dim=1), F.normalize(places(new), dim=1)) > 0.97
    assert right(x, new) < 0.9


def test_a_new_point_lies_among_its_neighbors():
    feature, place = torch.tensor([[0.0], [1.0], [10.0]]), torch.eye(3)
    module = Places(feature, place, neighbors=2)
    (found,) = module(torch.tensor([[0.25]]))
    weights = np.exp([-(0.25**2) / 0.75**2, -1.0])
    np.testing.assert_allclose(found.numpy(), [*(weights / weights.sum()), 0.0], rtol=1e-5)
    assert torch.equal(module(torch.tensor([[0.5]]))[0], torch.tensor([0.5, 0.5, 0.0]))


def test_settings_are_checked():
    for wrong in ({"neighbors": 0}, {"width": 0}, {"time": -1}):
        with pytest.raises(ValueError, match=f"diffusion.{next(iter(wrong))}"):
            Diffusion(**wrong)
