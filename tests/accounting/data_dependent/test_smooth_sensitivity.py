"""Local and smooth sensitivity against published values, enumeration and mpmath."""

import functools
import itertools
import math

import mpmath
import numpy as np
import pytest

from pate_torch.accounting.data_dependent import smooth_sensitivity, theorems
from pate_torch.accounting.prices import (
    ConfidentPrice,
    ExponentialPrice,
    GaussianNoisyMaxPrice,
    LaplaceNoisyMaxPrice,
)
from tests.accounting.data_dependent.exact_divergences import ROW, compute_log_q, move_one_vote, mp_theorem


@pytest.fixture(autouse=True)
def digits():
    with mpmath.workdps(60):
        yield


def sensitivity(model, votes, order) -> np.ndarray:
    return smooth_sensitivity.compute_local_sensitivity(model, votes, [order])[:, 0]


def histograms(teachers: int, classes: int) -> list[tuple[int, ...]]:
    return [r for r in itertools.product(range(teachers + 1), repeat=classes) if sum(r) == teachers]


def distance(one, two) -> int:
    return sum(abs(a - b) for a, b in zip(one, two, strict=True)) // 2


def test_published_values_at_sigma_40():
    local = sensitivity(GaussianNoisyMaxPrice(sigma=40), [ROW], 20)
    assert local[0] == pytest.approx(1.6246537120e-5, rel=1e-6)
    assert local.max() == pytest.approx(8.1819863428e-4, rel=1e-6)
    smooth = smooth_sensitivity.compute_smooth_sensitivity(local[:, None], 0.02)
    assert smooth == pytest.approx([2.2416720052e-4], rel=1e-6)
    of_q, _ = smooth_sensitivity.make_price_parts(GaussianNoisyMaxPrice(sigma=40), np.array([20.0]), 250, 10)
    assert of_q.log_q0_A == pytest.approx([-3.1568730493512733], rel=1e-12)


def test_published_values_rising_to_the_plateau():
    local = sensitivity(GaussianNoisyMaxPrice(sigma=0.5), [[10, 0, 0]], 1.5)
    assert local[:10] == pytest.approx([3.13503646e-17, 1.60178280e-08, 5.90681786e-03] + 7 * [5.99981308], rel=1e-6)


def test_published_values_from_the_data_independent_side():
    local = sensitivity(GaussianNoisyMaxPrice(sigma=250), [[1000, 500, 300, 200, 0]], 10)
    assert (local[:298] == 0).all()
    assert local[298:301] == pytest.approx([2.77693450548e-7, 2.10853979548e-6, 2.73113623988e-6], rel=1e-6)
    assert local[301:] == pytest.approx(2.73113623988e-6, rel=1e-6)


CASES = [
    (GaussianNoisyMaxPrice(sigma=0.5), 1.5),
    (GaussianNoisyMaxPrice(sigma=1.5), 2.0),
    (GaussianNoisyMaxPrice(sigma=3.0), 3.0),
    (LaplaceNoisyMaxPrice(scale=0.5), 3.0),
    (LaplaceNoisyMaxPrice(scale=2.0), 2.0),
    (ConfidentPrice(screen_sigma=1.0, threshold=5.0, sigma=1.5), 2.0),
]


enumeration = pytest.mark.slow(reason="enumerates the neighbors of every histogram")
FIRST_AND_SLOW = [CASES[0], *(pytest.param(*case, marks=enumeration) for case in CASES[1:])]


@functools.cache
def enumerated(model, order):
    """Every histogram of nine votes in three classes: its cost, and the bound at each distance."""
    rows = histograms(9, 3)
    price = {row: smooth_sensitivity.compute_total_price(model, [row], [order])[0] for row in rows}
    return rows, price, {row: sensitivity(model, [row], order) for row in rows}


@pytest.mark.parametrize(("model", "order"), FIRST_AND_SLOW, ids=str)
def test_bounds_the_true_local_sensitivity_of_every_histogram_at_every_distance(model, order):
    rows, price, bounds = enumerated(model, order)
    true = {row: max(abs(price[row] - price[other]) for other in rows if distance(row, other) == 1) for row in rows}
    tight = 0
    for row in rows:
        bound = bounds[row]
        assert (np.diff(bound) >= 0).all()
        for d in range(10):
            within = max(true[other] for other in rows if distance(row, other) <= d)
            assert bound[d] >= within * (1 - 1e-9)
            tight += within > 0.3 * bound[d]
    assert tight > 0  # the bound is not vacuous


@pytest.mark.parametrize(("model", "order"), FIRST_AND_SLOW, ids=str)
@pytest.mark.parametrize("decay", [0.05, 0.5])
def test_smooth_sensitivity_is_smooth_and_bounds_the_change(model, order, decay):
    rows, price, bounds = enumerated(model, order)
    smooth = {row: smooth_sensitivity.compute_smooth_sensitivity(bounds[row][:, None], decay)[0] for row in rows}
    for one, two in itertools.permutations(rows, 2):
        if distance(one, two) == 1:
            assert smooth[one] <= smooth[two] * math.exp(decay) * (1 + 1e-9)
            assert abs(price[one] - price[two]) <= smooth[one] * (1 + 1e-9)


@pytest.mark.parametrize("teachers, classes", [(9, 3), (12, 2), (6, 4)])
@pytest.mark.parametrize("model", [GaussianNoisyMaxPrice(sigma=2.0), LaplaceNoisyMaxPrice(scale=1.0)], ids=str)
def test_reachable_q_by_enumeration(model, teachers, classes):
    of_q, _ = smooth_sensitivity.make_price_parts(model, np.array([2.0]), teachers, classes)
    rows = histograms(teachers, classes)
    log_q = {row: compute_log_q(model, row) for row in rows}
    for row in rows:
        if list(row) != sorted(row, reverse=True):
            continue
        lowest, highest = smooth_sensitivity._compute_reachable_log_q(np.array([row]), of_q.log_tail)
        for d in range(teachers + 1):
            within = [log_q[other] for other in rows if distance(row, other) <= d]
            assert lowest[0, d] == pytest.approx(min(within), rel=1e-12)
            if row[0] - row[1] >= 2 * d:
                assert highest[0, d] == pytest.approx(max(within), rel=1e-12)
            else:
                assert highest[0, d] == 0.0


@functools.cache
def mp_q0(sigma: float, order: float) -> mpmath.mpf:
    """Crossing of the theorem's value and a/sigma^2, by bisection; at most the end of the theorem's region."""
    limit = -max((1 + 1 / mpmath.mpf(sigma)) ** 2, ((mpmath.mpf(order) - mpmath.mpf("0.99")) / sigma) ** 2)
    target = order / mpmath.mpf(sigma) ** 2
    if mp_theorem(mpmath.exp(limit), sigma, order) < target:
        return mpmath.exp(limit)
    low, high = 2 * limit, limit
    while mp_theorem(mpmath.exp(low), sigma, order) > target:
        low *= 1.5
    for _ in range(150):
        middle = (low + high) / 2
        low, high = (low, middle) if mp_theorem(mpmath.exp(middle), sigma, order) >= target else (middle, high)
    return mpmath.exp(low)


def mp_price(q: mpmath.mpf, sigma: float, order: float) -> mpmath.mpf:
    if q < mp_q0(sigma, order):
        return mp_theorem(q, sigma, order)
    return mpmath.mpf(order) / mpmath.mpf(sigma) ** 2


def mp_moved(q: mpmath.mpf, votes: int, sigma: float, classes: int) -> mpmath.mpf:
    z = mpmath.findroot(
        lambda x: mpmath.log(mpmath.erfc(x) / 2) - mpmath.log(q / (classes - 1)),
        mpmath.sqrt(max(mpmath.log((classes - 1) / q), 0.1)),
    )
    return min((classes - 1) * mpmath.erfc(z + mpmath.mpf(votes) / (2 * sigma)) / 2, mpmath.mpf(1))


def mp_bound(q: mpmath.mpf, sigma: float, order: float, classes: int) -> mpmath.mpf:
    price = mp_price(q, sigma, order)
    up = mp_price(mp_moved(q, -2, sigma, classes), sigma, order) - price
    return max(up, price - mp_price(mp_moved(q, 2, sigma, classes), sigma, order))


@pytest.mark.parametrize(
    ("row", "sigma", "order"),
    [
        ((20, 6, 4), 4.0, 3.0),  # rises to the plateau
        ((13, 11, 6), 4.0, 3.0),  # starts on or beyond it
        ((10, 10, 10), 2.0, 2.5),  # falls to it
        ((30, 0, 0), 3.0, 2.0),
        ((12, 9, 9), 40.0, 5.0),  # never leaves the data-independent cost
    ],
)
def test_gnmax_against_the_definition_in_mpmath(row, sigma, order):
    teachers, classes = sum(row), len(row)
    q0 = mp_q0(sigma, order)
    q1 = mp_moved(q0, 2, sigma, classes)
    bound = sensitivity(GaussianNoisyMaxPrice(sigma=sigma), [row], order)
    votes = sorted(row, reverse=True)
    for d in range(0, teachers + 1, 3):
        within = [r for r in histograms(teachers, classes) if list(r) == sorted(r, reverse=True)]
        within = [r for r in within if distance(r, votes) <= d]
        reachable = [
            min(sum(mpmath.erfc((r[0] - n) / (2 * mpmath.mpf(sigma))) / 2 for n in r[1:]), 1 - mpmath.mpf(1) / classes)
            for r in within
        ]
        low, high = min(reachable), max(reachable)
        if low <= q0 and high >= q1:
            expected = mp_price(q0, sigma, order) - mp_price(q1, sigma, order)
        else:
            expected = max(mp_bound(q, sigma, order, classes) for q in (low, high))
        assert bound[d] == pytest.approx(float(expected), rel=1e-8, abs=1e-25)


def test_lnmax_tail_and_its_inverse():
    of_q, _ = smooth_sensitivity.make_price_parts(LaplaceNoisyMaxPrice(scale=3.0), np.array([2.0]), 50, 4)
    gaps = np.concatenate([[-40.0, -2.0, -1e-3, 0.0, 1e-3, 0.5], np.geomspace(1, 3000, 30)])
    assert of_q.inverse_log_tail(of_q.log_tail(gaps)) == pytest.approx(gaps, rel=1e-9, abs=1e-6)
    for gap in (-7.5, 0.0, 7.5):
        with mpmath.workdps(30):
            tail = mpmath.quad(lambda x: (1 + abs(x)) * mpmath.exp(-abs(x)) / 4, [*sorted({gap / 3, 0.0}), mpmath.inf])
            tail = tail if gap <= 0 else mpmath.quad(lambda x: (1 + x) * mpmath.exp(-x) / 4, [gap / 3, mpmath.inf])
        assert float(of_q.log_tail(np.array([gap]))[0]) == pytest.approx(float(mpmath.log(tail)), rel=1e-10)


@pytest.mark.parametrize("model", [GaussianNoisyMaxPrice(sigma=40.0), LaplaceNoisyMaxPrice(scale=20.0)], ids=str)
def test_moved_q_bounds_every_single_move(model):
    """[B_L, B_U] holds the q of every neighbor of random rows."""
    of_q, _ = smooth_sensitivity.make_price_parts(model, np.array([2.0]), 250, 10)
    rng = np.random.default_rng(3)
    for row in rng.multinomial(250, rng.dirichlet(np.full(10, 0.2)), 20):
        log_q = compute_log_q(model, row)
        low, high = (of_q.shift_log_q(np.array([log_q]), votes)[0] for votes in (2, -2))
        assert all(low - 1e-9 <= compute_log_q(model, moved) <= high + 1e-9 for moved in move_one_vote(row))


def test_threshold_sensitivity_by_enumeration_of_winning_counts():
    model, order = ConfidentPrice(screen_sigma=4.0, threshold=15.0, sigma=400.0), 6.0
    _, (screen,) = smooth_sensitivity.make_price_parts(model, np.array([order]), 30, 3)
    price = {n: screen.price_NA[n, 0] for n in range(10, 31)}  # 30 votes among 3: the winner has at least 10
    for top in range(10, 31):
        row = np.array([[top, 30 - top, 0]]) if top >= 15 else np.array([[top, top, 30 - 2 * top]])
        row = np.sort(row, axis=1)[:, ::-1]
        bound = screen.compute_local_sensitivity(row)[0, :, 0]
        for d in range(31):
            within = [n for n in price if abs(n - row[0, 0]) <= d]
            true = max(abs(price[n] - price[m]) for n in within for m in (n - 1, n + 1) if m in price)
            assert bound[d] == pytest.approx(true, rel=1e-12, abs=1e-300)


@pytest.mark.slow(reason="enumerates pairs of histograms")
def test_queries_add_up_at_each_distance():
    rng = np.random.default_rng(0)
    votes = np.array([rng.multinomial(250, rng.dirichlet(np.full(10, c))) for c in np.geomspace(0.03, 3, 40)])
    votes = np.concatenate([votes, votes[:7]])
    orders = [2.0, 8.0, 20.0]
    for model in (
        GaussianNoisyMaxPrice(sigma=40),
        LaplaceNoisyMaxPrice(scale=20),
        ConfidentPrice(screen_sigma=90, threshold=150, sigma=40),
    ):
        together = smooth_sensitivity.compute_local_sensitivity(model, votes, orders)
        one_by_one = sum(smooth_sensitivity.compute_local_sensitivity(model, [row], orders) for row in votes)
        assert together == pytest.approx(one_by_one, rel=1e-10)
        by_order = np.stack([sensitivity(model, votes, order) for order in orders], axis=1)
        assert together == pytest.approx(by_order, rel=1e-10)


def test_published_price_is_the_theorem_or_a_little_above_it():
    rng = np.random.default_rng(1)
    votes = np.array([rng.multinomial(250, rng.dirichlet(np.full(10, c))) for c in np.geomspace(0.03, 3, 60)])
    for model in (
        GaussianNoisyMaxPrice(sigma=40),
        LaplaceNoisyMaxPrice(scale=20),
        ConfidentPrice(screen_sigma=90, threshold=150, sigma=40),
    ):
        published = smooth_sensitivity.compute_total_price(model, votes, [2.0, 8.0, 20.0])
        theorem = theorems.compute_rdp(model, votes, [2.0, 8.0, 20.0])
        assert (published >= theorem * (1 - 1e-12)).all() and (published <= 1.2 * theorem).all()


def test_orders_and_models_without_a_proved_bound_are_refused():
    """PATE 2018's condition C6 fails for K = 250, C = 10, sigma = 40 at orders of about 38 to 122."""
    usable = smooth_sensitivity.find_usable_orders(
        GaussianNoisyMaxPrice(sigma=40), [20.0, 60.0], num_teachers=250, num_classes=10
    )
    assert usable.tolist() == [True, False]
    # At order 60 the rise of the cost is not monotone: it is larger at some smaller q.
    of_q, _ = smooth_sensitivity.make_price_parts(GaussianNoisyMaxPrice(sigma=40), np.array([60.0]), 250, 10)
    log_q = np.linspace(of_q.log_q1_A[0] - 1.5, of_q.log_q1_A[0], 50)
    rise = (of_q(of_q.shift_log_q(log_q, -2)) - of_q(log_q))[:, 0]
    assert rise.max() > of_q.max_local_sensitivity_A[0] * 1.01
    with pytest.raises(ValueError, match=r"orders=\[60.0\]"):
        smooth_sensitivity.compute_local_sensitivity(GaussianNoisyMaxPrice(sigma=40), [ROW], [20.0, 60.0])
    with pytest.raises(ValueError, match="local sensitivity"):
        smooth_sensitivity.compute_local_sensitivity(ExponentialPrice(rate=0.1), [ROW], [2.0])
    for decay in (0, -1, math.nan):
        with pytest.raises(ValueError, match="decay"):
            smooth_sensitivity.compute_smooth_sensitivity([[1.0]], decay)
