"""Diffusion maps: the walk's coordinates against dense linear algebra, pieces told apart, new points among theirs."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from pate_torch.features import neighbors
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
    exact, vectors = np.linalg.eigh(graph.weight_PP.toarray().astype(np.float64))
    values, found = leading(graph, 6, stream(), iterations=2000)
    np.testing.assert_allclose(values.numpy(), exact[-6:], atol=1e-5)
    inside = vectors[:, -6:].T @ found.double().numpy()  # vectors of equal values may be turned among themselves
    np.testing.assert_allclose(inside.T @ inside, np.eye(6), atol=1e-3)


def test_rare_orthogonalization_gives_the_subspace_of_its_slow_twin():
    graph = neighbor_graph(moons()[0], 8)
    dense = torch.from_numpy(graph.weight_PP.toarray())
    basis = torch.linalg.qr(torch.randn(len(graph), 14, generator=stream())).Q
    for _ in range(60):
        basis = torch.linalg.qr((dense @ basis + basis) / 2).Q
    values, vectors = torch.linalg.eigh(basis.T @ dense @ basis)
    found, among = leading(graph, 6, stream())
    torch.testing.assert_close(found, values[-6:], atol=1e-5, rtol=0)
    torch.testing.assert_close(among @ among.T, vectors_of(basis @ vectors), atol=1e-3, rtol=0)


def vectors_of(vectors):
    """What the last six span, whatever their signs."""
    return vectors[:, -6:] @ vectors[:, -6:].T


def test_eigenvectors_have_the_same_bits_on_any_number_of_threads():
    graph, before, found = neighbor_graph(moons(3000)[0], 8), torch.get_num_threads(), []
    try:
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            found.append(spectral(graph, 30, stream()))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@pytest.mark.parametrize("block", [1, 1000, 1 << 23])
def test_nearest_are_those_of_all_pairs(block, monkeypatch):
    monkeypatch.setattr(neighbors, "_BLOCK", block)
    x = torch.randn(70, 5, generator=stream())
    squared, places = neighbors.nearest(x, 9)
    every = (x[:, None] - x[None]).square().sum(2).fill_diagonal_(torch.inf)
    assert torch.equal(places, every.argsort(1)[:, :9])
    torch.testing.assert_close(squared, every.sort(1).values[:, :9], atol=1e-5, rtol=1e-4)
    _, places = neighbors.nearest(torch.cat([x, x[:1]]), 9)
    assert (int(places[0, 0]), int(places[70, 0])) == (70, 0), "points that coincide are neighbors"


def test_the_graph_is_that_of_all_pairs():
    x, _ = moons(60)
    graph = neighbor_graph(x, 5)
    every = (x[:, None] - x[None]).square().sum(2).double().fill_diagonal_(torch.inf)
    squared, places = every.sort(1).values[:, :5], every.argsort(1)[:, :5]
    reach, weight = squared[:, -1].sqrt(), torch.zeros(60, 60, dtype=torch.float64)
    for i in range(60):
        for d, j in zip(squared[i], places[i].tolist(), strict=True):
            weight[i, j] += torch.exp(-d / (reach[i] * reach[j]))
            weight[j, i] += torch.exp(-d / (reach[i] * reach[j]))
    degree = weight.sum(1)
    np.testing.assert_allclose(graph.weight_PP.toarray(), weight / (degree[:, None] * degree).sqrt(), atol=1e-5)
    torch.testing.assert_close(graph.spacing_P.double(), squared.sqrt().mean(1), atol=1e-5, rtol=1e-4)
    value = torch.rand(60, 3, generator=stream())
    torch.testing.assert_close(graph @ value, torch.from_numpy(graph.weight_PP.toarray()) @ value)


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
