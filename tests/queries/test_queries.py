"""Query strategies: distinct open points within the allowance, from public points and released answers alone."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from hydra.utils import instantiate
from scipy.optimize import minimize
from threadpoolctl import threadpool_limits

from pate_torch.core import rng
from pate_torch.features import neighbors
from pate_torch.privacy.records import DataSpec
from pate_torch.queries import clusters as queries_of_clusters
from pate_torch.queries.base import QueryState, QueryStrategy
from pate_torch.queries.clusters import Coreset, Medoids, Prototypes, compute_squared_distances, fit_kmeans
from pate_torch.queries.committee import Committee
from pate_torch.queries.disagreement import (
    Disagreement,
    append_ones,
    compute_penalized_loss,
    count_mistakes,
    fit_logistic,
    fit_through_point,
)
from pate_torch.queries.random import Random
from pate_torch.queries.uncertainty import Margin
from tests.configurations import list_options, load_option
from tests.tensor_sizes import Largest

NAMES = list_options("query")
NONE = torch.zeros(0, dtype=torch.int64)


def configured(name: str) -> QueryStrategy:
    return instantiate(load_option("query", name), _convert_="all")


def spec(features: int, classes: int = 3) -> DataSpec:
    return DataSpec(
        name="cloud",
        num_classes=classes,
        input_shape=(features,),
        class_names=tuple("abcdef"[:classes]),
        mean=(0.0,) * features,
        std=(1.0,) * features,
    )


def blobs(count: int = 90, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Three well-parted clusters in 5 dimensions."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(count) % 3
    centers = torch.eye(3, 5) * 8
    return centers[y] + torch.randn(count, 5, generator=generator), y


def state(x: torch.Tensor, remaining: int, rounds_left: int = 1, classes: int = 3, **more) -> QueryState:
    first = {"query_Q": NONE, "label_Q": NONE, "seed": 0, **more}
    return QueryState(
        spec=spec(x.shape[1], classes), pool_x=x, num_remaining=remaining, num_rounds_left=rounds_left, **first
    )


@pytest.mark.parametrize("features", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_asks_distinct_open_points_within_the_allowance_and_repeats_itself(name, features):
    strategy = configured(name)
    assert isinstance(strategy, QueryStrategy) and strategy.name == name and strategy.rounds >= 1
    x, y = blobs()
    feature_PD = torch.nn.functional.normalize(x @ torch.randn(5, 4), dim=1) if features else None
    asked, student = NONE, None
    for turn in range(strategy.rounds):
        now = state(
            x,
            remaining=20 - len(asked),
            rounds_left=strategy.rounds - turn,
            query_Q=asked,
            # every third question is left unanswered
            label_Q=torch.where(torch.arange(len(asked)) % 3 == 2, -1, y[asked]),
            student_PC=student,
            feature_PD=feature_PD,
        )
        ask = strategy.select(now)
        assert torch.equal(ask, strategy.select(now)), "the same state must give the same questions"
        assert ask.dtype == torch.int64 and len(ask) <= now.num_remaining
        assert len(torch.unique(torch.cat([asked, ask]))) == len(asked) + len(ask)
        assert len(ask) == 0 or (int(ask.min()) >= 0 and int(ask.max()) < len(x))
        if len(ask) == 0 or len(asked) + len(ask) == 20:
            asked = torch.cat([asked, ask])
            break
        asked = torch.cat([asked, ask])
        student = torch.softmax(torch.randn(len(x), 3, generator=torch.Generator().manual_seed(turn)), 1)
    assert len(asked) == 20 if name != "disagreement" else len(asked) > 0


@pytest.mark.parametrize("name", NAMES)
def test_the_whole_pool_may_be_asked_and_a_pool_of_one(name):
    strategy = configured(name)
    x, y = blobs(12)
    asked = NONE
    for turn in range(strategy.rounds):
        left = strategy.rounds - turn
        ask = strategy.select(state(x, 12 - len(asked), left, query_Q=asked, label_Q=y[asked]))
        asked = torch.cat([asked, ask])
    assert len(torch.unique(asked)) == len(asked) <= 12
    assert len(asked) == 12 or name == "disagreement"
    assert strategy.select(state(x[:1], 1, 1)).tolist() == [0]


@pytest.mark.parametrize("name", NAMES)
def test_coinciding_points_are_no_obstacle(name):
    x = torch.ones(30, 5)
    ask = configured(name).select(state(x, 7, 1))
    assert len(torch.unique(ask)) == len(ask) and len(ask) in (1, 7)


def test_a_strategy_sees_no_private_label():
    fields = {field.name for field in dataclasses.fields(QueryState)}
    asked, opinions = {"query_Q", "label_Q", "num_remaining", "num_rounds_left"}, {"student_PC", "feature_PD"}
    assert fields == {"spec", "pool_x", "seed"} | asked | opinions


def test_passive_asks_in_order():
    x, _ = blobs()
    after = state(x, 3, query_Q=torch.tensor([1]), label_Q=torch.tensor([0]))
    assert Random(shuffle=False).select(after).tolist() == [0, 2, 3]


def test_random_order_is_the_seed_s():
    x, _ = blobs()
    first, second = (configured("random").select(state(x, 30, seed=seed)) for seed in (0, 1))
    assert not torch.equal(first, second)
    counts = torch.zeros(90)
    for seed in range(300):
        counts[configured("random").select(state(x, 30, seed=seed))] += 1
    # Each point is drawn 100 times of 300 on average, with deviation 8.2: 5 of them.
    assert (counts - 100).abs().max() < 41


def test_margin_ranks_as_it_says():
    x, _ = blobs(4)
    p = torch.tensor([[0.5, 0.5, 0.0], [0.4, 0.3, 0.3], [0.9, 0.05, 0.05], [1.0, 0.0, 0.0]])
    assert Margin().select(state(x, 4, student_PC=p)).tolist() == [0, 1, 2, 3]


def test_coreset_is_the_greedy_cover():
    x, _ = blobs(40)
    chosen = Coreset().select(state(x, 6, query_Q=torch.tensor([7]), label_Q=torch.tensor([1])))
    centers = [7]
    for pick in chosen.tolist():  # the slow twin, over all pairs
        distance = torch.cdist(x, x[centers]).min(1).values
        assert pick == int(distance.argmax())
        centers.append(pick)


def test_prototypes_cover_every_cluster_with_dense_central_points():
    x, y = blobs(150)
    for seed in range(5):
        ask = Prototypes().select(state(x, 3, seed=seed))
        assert sorted(y[ask].tolist()) == [0, 1, 2]
        spacing = torch.cdist(x, x).sort(1).values[:, 1:7].mean(1)
        for point in ask.tolist():
            assert spacing[point] <= spacing[y == y[point]].median()


def test_prototypes_of_later_rounds_leave_answered_clusters():
    x, y = blobs(150)
    first = Prototypes(rounds=2).select(state(x, 3, 2))
    second = Prototypes(rounds=2).select(state(x, 3 - len(first), 1, query_Q=first, label_Q=y[first]))
    assert sorted(y[torch.cat([first, second])].tolist()) == [0, 1, 2]


def test_prototypes_follow_moons_where_straight_distances_fail():
    """Two rings: every cluster of the graph stays within one of them."""
    angle = torch.linspace(0, 2 * math.pi, 101)[:-1]
    ring = torch.stack([angle.cos(), angle.sin()], 1)
    x = torch.cat([ring, 3 * ring])
    ask = Prototypes().select(state(x, 2, classes=2))
    assert sorted((ask >= 100).tolist()) == [False, True]


def test_kmeans_finds_the_clusters_and_its_distances_are_right():
    x, y = blobs(90)
    cluster, center = fit_kmeans(x, 3, torch.Generator().manual_seed(0))
    assert all(len(cluster[y == c].unique()) == 1 for c in range(3)) and len(cluster.unique()) == 3
    torch.testing.assert_close(center[cluster[0]], x[y == 0].mean(0))
    torch.testing.assert_close(compute_squared_distances(x, center), torch.cdist(x, center) ** 2, rtol=1e-4, atol=1e-3)


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


@pytest.mark.parametrize("clusters", [2, 7, 40])
@pytest.mark.parametrize("seed", range(3))
def test_kmeans_is_the_best_run_of_its_slow_twin(clusters, seed, monkeypatch):
    monkeypatch.setattr(neighbors, "_CPU_BLOCK_ENTRIES", 1000)
    x = torch.randn(300, 6, generator=torch.Generator().manual_seed(seed)) + 2 * (torch.arange(300) % 5)[:, None]
    cluster, center = fit_kmeans(x, clusters, torch.Generator().manual_seed(seed), restarts=3)
    draws = torch.Generator().manual_seed(seed)
    cost, twin = min((lloyd(x, clusters, 50, draws) for _ in range(3)), key=lambda run: run[0])
    assert torch.equal(cluster, twin) and center.dtype == torch.float32
    assert float((torch.cdist(x, center).min(1).values ** 2).sum()) == pytest.approx(cost, rel=1e-5)


@pytest.mark.parametrize("strategy", [Coreset(), Medoids(), Prototypes()], ids=lambda strategy: strategy.name)
def test_no_array_of_points_by_points_or_by_questions_is_made(strategy, monkeypatch):
    monkeypatch.setattr(neighbors, "_CPU_BLOCK_ENTRIES", 10_000)
    monkeypatch.setattr(queries_of_clusters, "_MAX_EIGENVECTORS", 50)
    x = torch.randn(2000, 5, generator=torch.Generator().manual_seed(0))
    with Largest() as made:
        assert len(strategy.select(state(x, 300, feature_PD=x))) == 300
    assert made.entries < 2000 * 300 / 4


@pytest.mark.parametrize("strategy", [Coreset(), Medoids(), Prototypes()], ids=lambda strategy: strategy.name)
def test_on_a_gpu_the_same_questions_are_asked(strategy, simulated_gpu):
    x, _ = blobs(90)
    asked = strategy.select(state(x, 6, feature_PD=x))
    simulated_gpu.reset_counts()
    assert torch.equal(strategy.select(state(x, 6, feature_PD=x.to("cuda"))), asked)
    assert simulated_gpu.kernels.total() > 10


def test_kmeans_gives_the_same_bits_on_any_number_of_threads():
    """Several would each add up a part of a cluster, in the order in which they come by."""
    x = torch.randn(3000, 8, generator=torch.Generator().manual_seed(0))
    found = []
    for threads in (1, 2, 4):
        with threadpool_limits(threads):
            found.append(fit_kmeans(x, 20, torch.Generator().manual_seed(0), restarts=1)[1])
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_committee_asks_where_the_members_differ():
    x, y = blobs(90)
    middle = torch.zeros(1, 5)
    middle[0, :3] = 8 / 3  # as near to one cluster as to another
    x = torch.cat([x, middle])
    asked = torch.arange(9)
    ask = Committee(members=30).select(state(x, 5, 1, query_Q=asked, label_Q=y[asked]))
    assert 90 in ask.tolist()


# Disagreement -----------------------------------------------------------------------------------------------------


def thresholds(point: np.ndarray, label: np.ndarray, slack: float) -> np.ndarray:
    """Brute force over every cut and direction: do two with at most minimum + slack errors differ on a point?"""
    answered = label >= 0
    cuts = np.concatenate([[point.min() - 1], (np.sort(point)[1:] + np.sort(point)[:-1]) / 2, [point.max() + 1]])
    opinions = np.array([side * (point - cut) > 0 for cut in cuts for side in (1, -1)])
    errors = (opinions[:, answered] != label[answered]).sum(1)
    kept = opinions[errors <= errors.min() + slack]
    return kept.any(0) & ~kept.all(0)


@pytest.mark.parametrize("slack", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("seed", range(6))
def test_disagreement_is_the_version_space_of_thresholds(seed, slack):
    """One stretch of the stream of thresholds on a line, against every threshold there is."""
    generator = np.random.default_rng(seed)
    point = np.sort(generator.uniform(-3, 3, 64))
    truth = (point > generator.uniform(-1, 1)).astype(int)
    stream = torch.randperm(64, generator=rng.make_torch_generator(seed, "query", "disagreement")).numpy()
    asked = stream[:16]
    label = np.full(64, -1)
    label[asked] = truth[asked]
    expected = thresholds(point, label, slack)
    strategy = Disagreement(criterion="error", slack=1.0, ridge=1e-3)
    # The schedule's slack is exchanged for a plain count of errors.
    object.__setattr__(strategy, "compute_allowed_excess", lambda time, errors: slack)
    ask = strategy.select(
        state(
            torch.from_numpy(point[:, None]).float(),
            48,
            10,
            classes=2,
            seed=seed,
            query_Q=torch.from_numpy(asked),
            label_Q=torch.from_numpy(truth[asked]),
        )
    )
    wanted = [p for p in stream[16:32] if expected[p]]
    if not wanted:  # nothing in this stretch: the next one, with the same version space
        wanted = [p for p in stream[32:] if expected[p]]
    assert ask.tolist() == wanted


def test_disagreement_halves_the_interval():
    """Noiseless thresholds: a few dozen questions settle 500 points, and the boundary is pinned."""
    point = torch.linspace(-1, 1, 500)[:, None]
    truth = (point[:, 0] > 0.2).long()
    strategy, asked = Disagreement(criterion="error", slack=0.0, ridge=1e-3), NONE
    for turn in range(strategy.rounds):
        ask = strategy.select(
            state(point, 500 - len(asked), strategy.rounds - turn, 2, query_Q=asked, label_Q=truth[asked])
        )
        if len(ask) == 0:
            break
        asked = torch.cat([asked, ask])
    assert len(asked) < 60
    low, high = point[asked][truth[asked] == 0].max(), point[asked][truth[asked] == 1].min()
    assert low < 0.2 < high and high - low < 0.05


def test_disagreement_stops_at_the_allowance_and_at_the_end_of_the_stream():
    x, y = blobs(90)
    assert len(Disagreement().select(state(x, 1, 20))) == 1
    everything = torch.randperm(90, generator=torch.Generator().manual_seed(0))
    assert len(Disagreement().select(state(x, 5, 20, query_Q=everything, label_Q=y[everything]))) == 0


def test_unanswered_questions_do_not_count_as_labels():
    x, y = blobs(90)
    asked = torch.randperm(90, generator=rng.make_torch_generator(0, "query", "disagreement"))[:16]
    silent = state(x, 30, 10, query_Q=asked, label_Q=torch.full((16,), -1))
    assert len(Disagreement().select(silent)) == 16, "without answers every hypothesis stands"
    answered = state(x, 30, 10, query_Q=asked, label_Q=y[asked])
    assert len(Disagreement().select(answered)) < 16


def test_fits_through_a_point_are_the_constrained_minimum():
    generator = torch.Generator().manual_seed(0)
    x = append_ones(torch.randn(30, 3, generator=generator))
    sign = torch.where(x[:, 0] + 0.5 * torch.randn(30, generator=generator) > 0, 1.0, -1.0).double()
    best = fit_logistic(x, sign, 0.7)
    points = append_ones(torch.randn(4, 3, generator=generator))
    through = fit_through_point(x, sign, points, best, 0.7)
    torch.testing.assert_close((through * points).sum(1), torch.zeros(4, dtype=torch.float64), atol=1e-9, rtol=0)

    def loss(w: np.ndarray) -> float:
        return float(compute_penalized_loss(x, sign, torch.from_numpy(w)[None], 0.7))

    free = minimize(loss, np.zeros(4), method="BFGS", options={"gtol": 1e-8})
    np.testing.assert_allclose(best.numpy(), free.x, atol=1e-4)
    for w, point in zip(through, points, strict=True):
        normal = point.numpy()
        on_plane = {"type": "eq", "fun": lambda v, p=normal: v @ p}
        reference = minimize(loss, np.zeros(4), method="SLSQP", constraints=on_plane, options={"ftol": 1e-14})
        np.testing.assert_allclose(loss(w.numpy()), reference.fun, rtol=1e-7)
        assert loss(w.numpy()) >= free.fun - 1e-9
    assert count_mistakes(torch.tensor([[1.0, -2.0, 0.0]]), torch.tensor([1.0, 1.0, 1.0])).tolist() == [2]


def test_the_slack_grows_with_errors_and_time():
    strategy = Disagreement(slack=0.5, confidence=0.1)
    complexity = math.log(math.log2(2 * 8) ** 2 / 0.1)
    assert strategy.compute_allowed_excess(8, 0) == pytest.approx(0.5 * complexity)
    assert strategy.compute_allowed_excess(8, 9) == pytest.approx(0.5 * (complexity + 3 * math.sqrt(complexity)))
    assert strategy.compute_allowed_excess(64, 9) > strategy.compute_allowed_excess(8, 9)


@pytest.mark.parametrize(
    "make,key",
    [
        (lambda: Random(rounds=0), "query.rounds"),
        (lambda: Disagreement(slack=-1), "query.slack"),
        (lambda: Disagreement(criterion="errors"), "Did you mean 'error'"),
        (lambda: Committee(members=1), "query.members"),
        (lambda: Prototypes(neighbors=0), "query.neighbors"),
    ],
)
def test_bad_settings_are_named(make, key):
    with pytest.raises(ValueError, match=key):
        make()
