"""Medoids and prototypes against slow twins, and k-means against Lloyd's algorithm written out."""

import math

import pytest
import torch
from threadpoolctl import threadpool_limits

from pate_torch.features import neighbors
from pate_torch.queries import clusters as queries_of_clusters
from pate_torch.queries.clusters import Medoids, Prototypes, fit_kmeans
from tests.queries.states import blobs, state
from tests.tensor_sizes import Largest

STRATEGIES = pytest.mark.parametrize("strategy", [Medoids(), Prototypes()], ids=lambda one: one.name)


def test_prototypes_are_dense_points_of_every_cluster_in_every_round():
    x, y = blobs(150)
    spacing = torch.cdist(x, x).sort(1).values[:, 1:7].mean(1)
    for seed in range(3):
        query_Q = Prototypes().select(state(x, 3, seed=seed))
        assert sorted(y[query_Q].tolist()) == [0, 1, 2]
        assert all(spacing[point] <= spacing[y == y[point]].median() for point in query_Q.tolist())
    first = Prototypes(rounds=2).select(state(x, 3, 2))
    second = Prototypes(rounds=2).select(state(x, 3 - len(first), 1, query_Q=first, label_Q=y[first]))
    assert sorted(y[torch.cat([first, second])].tolist()) == [0, 1, 2]


def test_prototypes_follow_rings_where_straight_distances_fail():
    angle = torch.linspace(0, 2 * math.pi, 101)[:-1]
    ring = torch.stack([angle.cos(), angle.sin()], 1)
    query_Q = Prototypes().select(state(torch.cat([ring, 3 * ring]), 2, classes=2))
    assert sorted((query_Q >= 100).tolist()) == [False, True]


def lloyd(x: torch.Tensor, clusters: int, steps: int, generator: torch.Generator) -> tuple[float, torch.Tensor]:
    """The slow twin of one run, from the same start; a cluster left empty takes the point farthest from its own."""
    picks = [int(torch.randint(len(x), (1,), generator=generator))]
    for _ in range(clusters - 1):
        weight = torch.cdist(x, x[picks], compute_mode="donot_use_mm_for_euclid_dist").min(1).values ** 2
        picks.append(int(torch.multinomial(weight, 1, generator=generator)))
    center, before = x[picks], None
    for _ in range(steps):
        distance, cluster = torch.cdist(x, center).min(1)
        if before is not None and torch.equal(cluster, before):
            break
        before = cluster
        far = iter(distance.argsort(descending=True).tolist())
        center = torch.stack(
            [x[cluster == c].mean(0) if bool((cluster == c).any()) else x[next(far)] for c in range(clusters)]
        )
    return float((torch.cdist(x, center).min(1).values ** 2).sum()), cluster


@pytest.mark.parametrize("clusters,seed", [(2, 0), (7, 1), (40, 2)])
def test_kmeans_is_the_best_run_of_its_slow_twin(clusters, seed):
    x = torch.randn(300, 6, generator=torch.Generator().manual_seed(seed)) + 2 * (torch.arange(300) % 5)[:, None]
    cluster, distance = fit_kmeans(x, clusters, torch.Generator().manual_seed(seed), restarts=3)
    draws = torch.Generator().manual_seed(seed)
    cost, twin = min((lloyd(x, clusters, 50, draws) for _ in range(3)), key=lambda run: run[0])
    assert torch.equal(cluster, twin) and distance.dtype == torch.float32
    assert float(distance.sum()) == pytest.approx(cost, rel=1e-5)


def test_kmeans_gives_the_same_bits_on_any_number_of_threads():
    """Several would each add up a part of a cluster, in the order in which they come by."""
    x = torch.randn(3000, 8, generator=torch.Generator().manual_seed(0))
    found = []
    for threads in (1, 4):
        with threadpool_limits(threads):
            found.append(fit_kmeans(x, 20, torch.Generator().manual_seed(0))[1])
    assert torch.equal(*found)


@STRATEGIES
def test_no_array_of_points_by_points_or_by_questions_is_made(strategy, monkeypatch):
    monkeypatch.setattr(neighbors, "_CPU_BLOCK_ENTRIES", 10_000)
    monkeypatch.setattr(queries_of_clusters, "_MAX_EIGENVECTORS", 20)
    x = torch.randn(1000, 5, generator=torch.Generator().manual_seed(0))
    with Largest() as made:
        assert len(strategy.select(state(x, 150, feature_PD=x))) == 150
    assert made.entries < 1000 * 150 / 4


@STRATEGIES
def test_on_a_gpu_the_same_questions_are_asked(strategy, simulated_gpu):
    x, _ = blobs(90)
    asked = strategy.select(state(x, 6, feature_PD=x))
    simulated_gpu.reset_counts()
    assert torch.equal(strategy.select(state(x, 6, feature_PD=x.to("cuda"))), asked)
    assert simulated_gpu.kernels.total() > 10
