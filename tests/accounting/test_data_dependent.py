"""The published data-dependent curves against mpmath, published values, a loop, and the exact divergence."""

import functools
import itertools
import math

import mpmath
import numpy as np
import pytest

from pate_torch.accounting import data_dependent, rdp
from pate_torch.accounting.costs import (
    ConfidentCost,
    ExponentialCost,
    GaussianNoisyMaxCost,
    LaplaceNoisyMaxCost,
    SparseVectorCost,
)
from tests.accounting.exact_divergences import ROW, compute_divergences, compute_log_q, mp_theorem


@pytest.fixture(autouse=True)
def digits():
    with mpmath.workdps(340):  # q goes down to 1e-300 and 1 - q must keep its digits
        yield


ORDERS = np.array([1.25, 2, 8, 10, 20, 32, 50, 120])


def simulated(queries: int, classes: int = 10, teachers: int = 250, seed: int = 0) -> np.ndarray:
    """Votes whose consensus varies from unanimous to none."""
    rng = np.random.default_rng(seed)
    accuracy = rng.beta(4, 1, queries)
    probability = (1 - accuracy[:, None]) * rng.dirichlet(np.full(classes, 0.5), queries)
    probability[:, 0] += accuracy
    probability = np.take_along_axis(probability, rng.permuted(np.tile(np.arange(classes), (queries, 1)), axis=1), 1)
    return rng.multinomial(teachers, probability / probability.sum(1, keepdims=True))


def theorem_rows(model, rows_UC, orders_A):
    """Forward Renyi cost of one query with each of these vote rows, [U, A], by the parts that ``compute_rdp`` sums."""
    return sum(curve(log_q_U) for log_q_U, curve in data_dependent._make_cost_terms(model, rows_UC, orders_A))


@functools.cache
def mp_tail(gap: int, sigma: float) -> mpmath.mpf:
    return mpmath.erfc(gap / (2 * mpmath.mpf(sigma))) / 2


def mp_gnmax(row: np.ndarray, sigma: float, order: float) -> float:
    """PATE 2018, Theorem 6, in 340 digits, condition by condition as printed."""
    counts = sorted((int(n) for n in row), reverse=True)
    s, a = mpmath.mpf(sigma), mpmath.mpf(order)
    q = sum(mp_tail(counts[0] - n, sigma) for n in counts[1:])
    return mp_gnmax_of_q(min(q, 1 - mpmath.mpf(1) / len(counts)), s, a)


def mp_gnmax_of_q(q: mpmath.mpf, s: mpmath.mpf, a: mpmath.mpf) -> float:
    mu2 = s * mpmath.sqrt(mpmath.log(1 / q))
    mu1, e2, independent = mu2 + 1, mu2 / s**2, a / s**2
    if not (a <= mu1 and mu2 > 1 and q * mpmath.exp(e2) < 1):
        return float(independent)
    if q > mpmath.exp((mu2 - 1) * e2) / (mu1 / (mu1 - 1) * mu2 / (mu2 - 1)) ** mu2:
        return float(independent)
    return float(min(independent, mp_theorem(q, s, a)))


SIGMA_40, SOME = GaussianNoisyMaxCost(sigma=40), [240, 5, 5] + 7 * [0]
GNMAX_CURVE = {2: 3.5689319957e-5, 10: 5.3203246781e-5, 20: 1.1461160803e-4, 50: 3.4677719177e-3}
LNMAX_CURVE = {2: 4.3006433690e-5, 10: 5.4651568595e-5, 20: 8.2629960760e-5, 50: 5.6966699904e-4}


@pytest.mark.parametrize(
    ("model", "row", "log_q", "curve"),
    [
        (SIGMA_40, ROW, -9.119733711451717, GNMAX_CURVE),
        (SIGMA_40, SOME, -9.1154664087313, {2: 3.58329057277e-5, 8: 4.75095163021e-5, 32: 4.01404692596e-4}),
        (SIGMA_40, [200, 50] + 8 * [0], -5.1791523112596, {8: 0.00165488418923, 32: 0.00617548466484}),
        (GaussianNoisyMaxCost(sigma=20), [250] + 9 * [0], -39.975783151575, {2: 7.67668387478e-18}),
        (LaplaceNoisyMaxCost(scale=20), ROW, -8.495128803091019, LNMAX_CURVE),
    ],
)
def test_published_values(model, row, log_q, curve):
    assert compute_log_q(model, row) == pytest.approx(log_q, rel=1e-12)
    assert data_dependent.compute_rdp(model, [row], list(curve)) == pytest.approx(list(curve.values()), rel=1e-9)


def test_epsilon_of_votes():
    """The grid of orders lies at most 0.2 % above the best order; with whole orders epsilon is 0.337369."""
    epsilon = data_dependent.compute_data_dependent_epsilon(np.array([SOME] * 286), SIGMA_40, delta=1e-5)
    assert 0.999 * 0.337369 < epsilon < 0.337369
    orders = np.arange(2, 200)
    curve = data_dependent.compute_rdp(SIGMA_40, [SOME] * 286, orders)
    assert rdp.to_epsilon(orders, curve, 1e-5) == pytest.approx(0.3373690070, rel=1e-9)


@pytest.mark.parametrize(
    "cost",
    [
        GaussianNoisyMaxCost(40, discrete=True),
        LaplaceNoisyMaxCost(40, discrete=True),
        ConfidentCost(40, screen_sigma=150),
        ConfidentCost(40, screen_sigma=150, threshold=200, max_answers=10),
        ConfidentCost(40, screen_sigma=150, threshold=200, discrete=True),
        SparseVectorCost(40, max_failures=1, failure_delta=1e-6, num_tests=1),
    ],
    ids=str,
)
def test_costs_without_a_theorem_are_refused(cost):
    with pytest.raises(ValueError, match="has no data-dependent cost"):
        data_dependent.compute_data_dependent_epsilon([SOME], cost, delta=1e-5)


@pytest.mark.parametrize("sigma", [0.7, 40])
def test_gnmax_against_mpmath_row_by_row(sigma):
    votes = np.concatenate([simulated(8), [[250] + 9 * [0], [125, 125] + 8 * [0], 10 * [25]]])
    fast = theorem_rows(GaussianNoisyMaxCost(sigma=sigma), data_dependent.group_votes(votes)[0], ORDERS)
    loop = [[mp_gnmax(row, sigma, a) for a in ORDERS] for row in data_dependent.group_votes(votes)[0]]
    assert fast == pytest.approx(np.array(loop), rel=1e-9, abs=1e-290)


def mp_pure(q: mpmath.mpf, epsilon: float, cap_A: np.ndarray) -> list[float]:
    """PATE 2017, Theorem 3, at all orders; the data-independent cost outside its region or if it is smaller."""
    e0, curve = mpmath.mpf(epsilon), []
    for order, cap in zip(ORDERS, cap_A, strict=True):
        first = (1 - q) * ((1 - q) / (1 - mpmath.exp(e0) * q)) ** (order - 1) if q < 1 / (mpmath.exp(e0) + 1) else None
        value = first and mpmath.log(first + q * mpmath.exp(e0 * (order - 1))) / (order - 1)
        curve.append(cap if value is None else min(cap, float(value)))
    return curve


@pytest.mark.parametrize("scale", [1, 60])
def test_lnmax_against_mpmath_row_by_row(scale):
    rows, cap_A = data_dependent.group_votes(simulated(20))[0], 2 * rdp.compute_laplace_curve(1 / scale, ORDERS)
    loop = []
    for row in rows:
        gaps = [mpmath.mpf(int(row[0] - n)) / scale for n in row[1:]]
        q = min(sum((2 + x) / (4 * mpmath.exp(x)) for x in gaps), 1 - mpmath.mpf(1) / len(row))
        loop.append(mp_pure(q, 2 / scale, cap_A))
    assert theorem_rows(LaplaceNoisyMaxCost(scale=scale), rows, ORDERS) == pytest.approx(
        np.array(loop), rel=1e-9, abs=1e-290
    )


@pytest.mark.parametrize("rate", [0.01, 1])
def test_exponential_against_mpmath_row_by_row(rate):
    rows, cap_A = data_dependent.group_votes(simulated(20))[0], rdp.compute_bounded_range_curve(2 * rate, ORDERS)
    loop = []
    for row in rows:
        others = sum(mpmath.exp(mpmath.mpf(rate) * int(n - row[0])) for n in row[1:])
        q = min(others / (1 + others), 1 - mpmath.mpf(1) / len(row))
        loop.append(mp_pure(q, 2 * rate, cap_A))
    assert theorem_rows(ExponentialCost(rate=rate), rows, ORDERS) == pytest.approx(np.array(loop), rel=1e-9, abs=1e-290)


@pytest.mark.parametrize(("threshold", "screen_sigma"), [(200, 150), (0, 1)])
def test_confident_against_mpmath_even_fifty_sigma_from_the_threshold(threshold, screen_sigma):
    model = ConfidentCost(screen_sigma=screen_sigma, threshold=threshold, sigma=40)
    s = mpmath.sqrt(2) * mpmath.mpf(screen_sigma)
    rows = data_dependent.group_votes(np.concatenate([simulated(10), [[250] + 9 * [0]]]))[0]
    loop = []
    for row in rows:
        q = mpmath.erfc(abs(threshold - int(row[0])) / s) / 2
        loop.append([mp_gnmax_of_q(q, s, mpmath.mpf(a)) + mp_gnmax(row, 40, a) for a in ORDERS])
    assert theorem_rows(model, rows, ORDERS) == pytest.approx(np.array(loop), rel=1e-9, abs=1e-290)


def test_a_release_is_the_sum_over_its_queries_in_any_order_of_classes():
    votes = np.concatenate([simulated(50), [ROW, ROW, ROW]])
    shuffled = np.random.default_rng(2).permuted(votes, axis=1).astype(np.uint8)
    for model in (SIGMA_40, LaplaceNoisyMaxCost(scale=20), ExponentialCost(rate=0.1)):
        one_by_one = sum(data_dependent.compute_rdp(model, row[None], ORDERS) for row in votes)
        assert data_dependent.compute_rdp(model, shuffled, ORDERS) == pytest.approx(one_by_one, rel=1e-12)


def test_the_popular_region_of_theorem_3_is_wrong():
    """At eps = 2, q = .4 < 1/2, a = 3 the formula lies below a pair of laws that *is* eps-DP; so q < 1/(e^eps + 1)."""
    epsilon, q, order = 2.0, 0.4, 3.0
    p, neighbor = np.array([1 - q, q]), np.array([1 - q * math.exp(-epsilon), q * math.exp(-epsilon)])
    assert (np.abs(np.log(p / neighbor)) <= epsilon + 1e-12).all()
    true = math.log((p**order * neighbor ** (1 - order)).sum()) / (order - 1)
    base = (1 - q) / (1 - math.exp(epsilon) * q)
    formula = math.log((1 - q) * base ** (order - 1) + q * math.exp(epsilon * (order - 1))) / (order - 1)
    assert formula < true
    cost = data_dependent.compute_pate2017_curve(np.log([q]), epsilon, np.array([epsilon]), np.array([order]))[0, 0]
    assert cost == epsilon > true


NO_COUNTS = [np.array(row) for row in ([[1.0, 2.0]], [[np.nan, 2.0]], [[True, False]])]


@pytest.mark.parametrize(
    "votes", [*NO_COUNTS, [[3, -1]], [[1, 2], [2, 2]], [[0, 0]], [[3]], [3, 1], np.zeros((0, 3), int)]
)
def test_malformed_votes_are_refused(votes):
    with pytest.raises(ValueError, match="votes"):
        data_dependent.compute_rdp(GaussianNoisyMaxCost(sigma=40), votes, [2.0])


def test_integer_orders_do_not_overflow():
    curve = data_dependent.compute_rdp(GaussianNoisyMaxCost(sigma=40), [ROW], list(range(2, 4000)))
    assert (curve > 0).all() and (np.diff(curve) >= 0).all()


@pytest.mark.parametrize(
    "model",
    [
        GaussianNoisyMaxCost(sigma=3.0),
        GaussianNoisyMaxCost(sigma=0.6),
        LaplaceNoisyMaxCost(scale=1.5),
        ExponentialCost(rate=0.4),
        ConfidentCost(screen_sigma=1.5, threshold=4.0, sigma=2.0),
    ],
    ids=str,
)
def test_theorems_bound_the_exact_forward_divergence_of_every_small_histogram(model):
    """The theorems bound one direction only; the data-independent cost bounds both."""
    rows = [r for r in itertools.product(range(7), repeat=3) if sum(r) == 6 and list(r) == sorted(r)[::-1]]
    orders = ORDERS[:6]
    costs = theorem_rows(model, np.array(rows), orders)
    cap = rdp.compute_curve(model.privacy_events(1), orders)
    for row, cost in zip(rows, costs, strict=True):
        forward, two_sided = compute_divergences(model, row, orders)
        assert (forward <= cost * (1 + 1e-8) + 1e-11).all()
        assert (two_sided <= cap * (1 + 1e-8) + 1e-11).all()


def test_the_two_sided_divergence_can_pass_the_theorem():
    _, two_sided = compute_divergences(GaussianNoisyMaxCost(sigma=3.0), (20, 0, 0), ORDERS)
    assert (two_sided > 1.01 * data_dependent.compute_rdp(GaussianNoisyMaxCost(sigma=3.0), [[20, 0, 0]], ORDERS)).any()
