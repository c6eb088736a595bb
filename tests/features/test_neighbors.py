"""The neighbor graph, its eigenvectors and propagated labels, against all pairs and dense linear algebra."""

import numpy as np
import pytest
import torch

from pate_torch.core.progress import Stages
from pate_torch.features import neighbors
from pate_torch.features.neighbors import (
    NeighborSearch,
    build_neighbor_graph,
    compute_eigenvectors,
    compute_spectral_embedding,
)
from pate_torch.privacy.records import DataSpec


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
    graph = build_neighbor_graph(moons(120)[0], 8)
    exact, vectors = np.linalg.eigh(graph.weight_PP.toarray().astype(np.float64))
    values, found = compute_eigenvectors(graph, 6, stream(), iterations=2000)
    np.testing.assert_allclose(values.numpy(), exact[-6:], atol=1e-5)
    inside = vectors[:, -6:].T @ found.double().numpy()  # vectors of equal values may be turned among themselves
    np.testing.assert_allclose(inside.T @ inside, np.eye(6), atol=1e-3)
    rows = compute_spectral_embedding(graph, 6, stream(), iterations=2000).double().numpy()
    exact_rows = vectors[:, -6:] / np.linalg.norm(vectors[:, -6:], axis=1, keepdims=True)
    np.testing.assert_allclose(rows @ rows.T, exact_rows @ exact_rows.T, atol=2e-3)
    assert compute_spectral_embedding(build_neighbor_graph(moons(5)[0], 2), 9, stream()).shape == (5, 5)


def test_rare_orthogonalization_gives_the_subspace_of_its_slow_twin():
    graph = build_neighbor_graph(moons()[0], 8)
    dense = torch.from_numpy(graph.weight_PP.toarray())
    basis = torch.linalg.qr(torch.randn(len(graph), 14, generator=stream())).Q
    for _ in range(60):
        basis = torch.linalg.qr((dense @ basis + basis) / 2).Q
    values, vectors = torch.linalg.eigh(basis.T @ dense @ basis)
    found_values, found = compute_eigenvectors(graph, 6, stream())
    torch.testing.assert_close(found_values, values[-6:], atol=1e-5, rtol=0)
    expected = (basis @ vectors)[:, -6:]  # the subspace is compared, since vectors have any sign
    torch.testing.assert_close(found @ found.T, expected @ expected.T, atol=1e-3, rtol=0)


def test_eigenvectors_have_the_same_bits_on_any_number_of_threads():
    graph, before, found = build_neighbor_graph(moons(1000)[0], 8), torch.get_num_threads(), []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            found.append(compute_spectral_embedding(graph, 30, stream()))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*found)


@pytest.mark.parametrize("block", [1, 1000, 1 << 23])
def test_nearest_are_those_of_all_pairs(block, monkeypatch):
    monkeypatch.setattr(neighbors, "_CPU_BLOCK_ENTRIES", block)
    count = 203
    x = torch.randn(count, 5, generator=stream())
    squared, places = neighbors.find_nearest(x, 9)
    every = (x[:, None] - x[None]).square().sum(2).fill_diagonal_(torch.inf)
    assert torch.equal(places, every.argsort(1)[:, :9])
    torch.testing.assert_close(squared, every.sort(1).values[:, :9], atol=1e-5, rtol=1e-4)
    _, places = neighbors.find_nearest(torch.cat([x, x[:1]]), 9)
    assert (int(places[0, 0]), int(places[count, 0])) == (count, 0), "points that coincide are neighbors"


def scattered(count=3000):
    """Points in clusters, of which some lie in one place."""
    draw = torch.Generator().manual_seed(3)
    x = torch.randn(20, 8, generator=draw)[torch.arange(count) % 20] + 0.5 * torch.randn(count, 8, generator=draw)
    x[100:140], x[200:208] = x[100], x[200]
    return x


def assert_same(first, second):
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("is_approximate", [False, True])
def test_stages_in_any_order_get_the_same_neighbors_from_one_search(is_approximate, monkeypatch):
    searched, search_once, x = [], NeighborSearch._search, scattered()
    if is_approximate:
        pytest.importorskip("faiss")
        monkeypatch.setattr(neighbors, "_MAX_EXACT_POINTS", 2999)

    def search_and_count(self, x_PD, count):
        searched.append(count)
        return search_once(self, x_PD, count)

    monkeypatch.setattr(NeighborSearch, "_search", search_and_count)
    first, second = NeighborSearch(), NeighborSearch()
    few, many = first.find(x, 6), first.find(x.clone(), 10)
    assert_same(few, (part[:, :6] for part in many))
    assert_same(many, second.find(x, 10))
    assert_same(few, second.find(x, 6))
    assert searched == [10, 10]
    assert_same(second.find(x, 13), search_once(NeighborSearch(), x, 13))
    assert_same(second.find(x[:5], 3), (part[:, :3] for part in neighbors.find_nearest(x[:5], 4)))
    assert searched == [10, 10, 13, 4]
    if not is_approximate:
        assert_same(many, neighbors.find_nearest(x, 10))
        apart = torch.randn(400, 5, generator=stream())
        assert_same(first.find(apart, 6), neighbors.find_nearest(apart, 6))
        for count in (6, 10, 10, 6):  # also after a graph of all neighbors, whose edges are sorted in place
            ours, alone = build_neighbor_graph(apart, count, first), build_neighbor_graph(apart, count)
            assert abs(ours.weight_PP - alone.weight_PP).max() == 0 and torch.equal(ours.spacing_P, alone.spacing_P)


@pytest.mark.parametrize("min_recall", [0.95, 0.0])  # from one list, which often holds too few points, neighbors lack
def test_the_approximate_search_finds_as_many_neighbors_as_it_says(min_recall, monkeypatch, capsys):
    faiss = pytest.importorskip("faiss")
    monkeypatch.setattr(neighbors, "_MAX_EXACT_POINTS", 2999)
    monkeypatch.setattr(neighbors, "_MIN_RECALL", min_recall)
    x, num_threads, found = scattered(), faiss.omp_get_max_threads(), []
    every = torch.cdist(x.double(), x.double()).square().fill_diagonal_(torch.inf)
    try:
        for threads in (1, 3):
            faiss.omp_set_num_threads(threads)
            search = NeighborSearch(Stages())
            found.append(search.find(x, 10))
            assert faiss.omp_get_max_threads() == threads
        monkeypatch.setattr(faiss, "knn", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            NeighborSearch().find(x, 10)
        assert faiss.omp_get_max_threads() == threads, "also after an error"
    finally:
        faiss.omp_set_num_threads(num_threads)
    assert_same(*found)
    squared, places = found[0]
    torch.testing.assert_close(squared.double(), every.gather(1, places), atol=1e-5, rtol=1e-4)
    assert bool((places != torch.arange(len(x))[:, None]).all()), "no point is its own neighbor"
    assert all(len(row.unique()) == 10 for row in places)
    is_right = squared <= every.sort(1).values[:, 9:10] + 1e-5
    assert f"Found {search.recalls[0]:.1%} of the nearest neighbors of 500 of the points." in capsys.readouterr().err
    if min_recall:
        assert float(is_right.double().mean()) > 0.93 and min_recall <= search.recalls[0] < 1
    else:
        assert float(is_right.double().mean()) < 0.9


def test_without_faiss_the_search_is_exact_and_says_what_would_be_faster(monkeypatch, capsys):
    monkeypatch.setattr(neighbors, "_MAX_EXACT_POINTS", 299)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    x, search = moons()[0], NeighborSearch(Stages())
    assert_same(search.find(x, 10), neighbors.find_nearest(x, 10))
    assert search.recalls == [] and "after pip install 'pate-torch[large]'" in capsys.readouterr().err


def test_the_graph_is_that_of_all_pairs(monkeypatch):
    monkeypatch.setattr(neighbors, "_CPU_BLOCK_ENTRIES", 7 * 60)  # several blocks
    x, _ = moons(60)
    with pytest.raises(ValueError, match="two points"):
        build_neighbor_graph(x[:1])
    graph = build_neighbor_graph(x, 5)
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


def test_the_graph_of_points_on_a_gpu_is_that_of_the_cpu(simulated_gpu):
    x = moons()[0]
    here, there = build_neighbor_graph(x, 8), build_neighbor_graph(x.to("cuda"), 8)
    assert simulated_gpu.kernels and there.spacing_P.device.type == "cpu"
    assert abs(here.weight_PP - there.weight_PP).max() < 1e-6


def test_spreading_solves_its_equation_and_balancing_gives_each_class_its_share():
    seeds = torch.zeros(40, 2)
    seeds[0, 0] = seeds[1, 1] = 1
    graph = neighbors.build_neighbor_graph(torch.randn(40, 3, generator=stream()), 5)
    ours = neighbors.propagate_labels(graph, seeds, alpha=0.8)
    weight = torch.from_numpy(graph.weight_PP.toarray()).double()
    exact = 0.2 * torch.linalg.solve(torch.eye(40).double() - 0.8 * weight, seeds.double())
    torch.testing.assert_close(ours, exact.float(), rtol=1e-4, atol=1e-6)
    mass = torch.rand(50, 3, generator=stream()) * torch.tensor([5.0, 1.0, 0.2])
    mass[0] = 0
    target = torch.tensor([0.5, 0.3, 0.2])
    share = neighbors.balance_classes(mass, target)
    torch.testing.assert_close(share.sum(1), torch.ones(50))
    torch.testing.assert_close(share.mean(0), target, atol=1e-3, rtol=0)


@pytest.mark.parametrize("shape", [(50, 8), (8, 50)])
def test_principal_axes_keep_the_distances_of_their_plane(shape):
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(0))
    constants = {"mean": (0.0,) * shape[1], "std": (1.0,) * shape[1]}
    spec = DataSpec(name="rows", num_classes=2, input_shape=shape[1:], class_names=("a", "b"), **constants)
    projected = neighbors.compute_coordinates(x, spec, 4)
    u, s, _ = torch.linalg.svd(x - x.mean(0), full_matrices=False)
    exact = u[:, :4] * s[:4]
    projected, exact = projected.double(), exact.double()  # in float32 a point lies .002 from itself on some processors
    torch.testing.assert_close(torch.cdist(projected, projected), torch.cdist(exact, exact), atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(neighbors.compute_coordinates(x, spec, 90), x - x.mean(0))
