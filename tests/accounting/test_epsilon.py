"""Every route against mpmath, a library or another route; the oracle values of the literature."""

from __future__ import annotations

import math

import mpmath as mp
import numpy as np
import pytest
from dp_accounting.rdp import compute_epsilon
from hypothesis import given, settings
from hypothesis import strategies as st
from opacus.accountants.analysis.rdp import get_privacy_spent

from pate_torch.accounting import gdp, pld, rdp
from pate_torch.accounting.accountant import Guarantee, compute_delta, compute_guarantee, compute_route_epsilons
from pate_torch.accounting.events import (
    BoundedRangeEvent,
    DeltaEvent,
    GaussianEvent,
    LaplaceEvent,
    PrivacyEvent,
    PureDPEvent,
    RdpCurveEvent,
    ZCDPEvent,
)

ROOT2 = math.sqrt(2)
mp.mp.dps = 60


def gnmax(sigma: float, queries: int) -> list[PrivacyEvent]:
    return [GaussianEvent(mu=ROOT2 / sigma, count=queries)]


def confident(asked: int, screen: float, answered: int, sigma: float) -> list[PrivacyEvent]:
    return [GaussianEvent(mu=1 / screen, count=asked), *gnmax(sigma, answered)]


# ---- Renyi curves against mpmath ------------------------------------------------------------------------------------


def mp_laplace(ratio: float, order: float) -> mp.mpf:
    r, a = mp.mpf(ratio), mp.mpf(order)
    return mp.log(a / (2 * a - 1) * mp.exp((a - 1) * r) + (a - 1) / (2 * a - 1) * mp.exp(-a * r)) / (a - 1)


def mp_randomized_response(epsilon: float, order: float) -> mp.mpf:
    a, p = mp.mpf(order), mp.exp(mp.mpf(epsilon)) / (1 + mp.exp(mp.mpf(epsilon)))
    return mp.log(p**a * (1 - p) ** (1 - a) + (1 - p) ** a * p ** (1 - a)) / (a - 1)


def mp_bounded_range(eta: float, order: float) -> mp.mpf:
    """The two-point pair at the interior maximum over t, by ternary search: no closed form used."""
    n, a = mp.mpf(eta), mp.mpf(order)

    def moment(t: mp.mpf) -> mp.mpf:
        q = (1 - mp.exp(t - n)) / (mp.exp(t) - mp.exp(t - n))
        return mp.log(q * mp.exp(a * t) + (1 - q) * mp.exp(a * (t - n)))

    low, high = mp.mpf(0), n
    for _ in range(300):
        left, right = low + (high - low) / 3, high - (high - low) / 3
        low, high = (left, high) if moment(left) < moment(right) else (low, right)
    return moment((low + high) / 2) / (a - 1)


GRID = [(r, a) for r in (1e-8, 1e-4, 0.1, 0.7, 3.0, 40.0, 1e3) for a in (1.01, 1.5, 2, 17.3, 300, 1001)]


@pytest.mark.parametrize(("ratio", "order"), GRID)
def test_laplace_curve(ratio, order):
    with mp.workdps(200 if ratio * order > 100 else 60):
        assert rdp.compute_laplace_curve(ratio, order)[0] == pytest.approx(float(mp_laplace(ratio, order)), rel=1e-12)


@pytest.mark.parametrize(("ratio", "order"), GRID)
def test_randomized_response_curve(ratio, order):
    with mp.workdps(1000 if ratio > 100 else 60):
        expected = float(mp_randomized_response(ratio, order))
    assert rdp.compute_pure_dp_curve(ratio, order)[0] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("eta", "order"), [(r, a) for r, a in GRID if r < 1e3])
def test_bounded_range_curve(eta, order):
    with mp.workdps(120):
        expected = float(mp_bounded_range(eta, order))
    assert rdp.compute_bounded_range_curve(eta, order)[0] == pytest.approx(expected, rel=1e-10)


ETAS = [*np.geomspace(1e-8, 500, 23).tolist(), 1.0, 4.0, 8.0]


@pytest.mark.parametrize("order", [1.0001, 1.01, 1.7, 2, 3.3, 20, 700, 1e4, 1e6])
def test_bounded_range_keeps_its_precision_at_any_order(order):
    """The closed form (which is the maximum: above) in 100 digits: off by a few ulp, above it or below."""
    with mp.workdps(100):
        a = mp.mpf(order)

        def h(x: mp.mpf) -> mp.mpf:
            return mp.log(mp.sinh(x / 2) / (x / 2))

        each = [(a * h(a * n) - (a - 1) * h((a - 1) * n) - h(n)) / (a - 1) for n in map(mp.mpf, ETAS)]
        found = [mp.mpf(float(rdp.compute_bounded_range_curve(eta, order)[0])) for eta in ETAS]
        off = [float((ours - true) / true) for ours, true in zip(found, each, strict=True)]
    assert max(map(abs, off)) < 2e-15


def test_laplace_curve_is_the_divergence_of_the_densities():
    ratio, order = 1.3, 2.7

    def density(x):
        return mp.exp(order * -abs(x) + (1 - order) * -abs(x - ratio)) / 2

    integral = mp.quad(density, [-60, 0, ratio, 60])
    assert rdp.compute_laplace_curve(ratio, order)[0] == pytest.approx(float(mp.log(integral) / (order - 1)), rel=1e-12)


def test_bounded_range_dominates_the_exponential_mechanism():
    """All votes of 12 teachers on 3 classes, all moves: the curve holds, and is nearly met by some move."""
    rate, orders = 0.4, np.array([1.5, 2, 8, 64])
    worst = np.zeros(len(orders))
    for first in range(13):
        for second in range(13 - first):
            votes = np.array([first, second, 12 - first - second])
            for source in range(3):
                for target in range(3):
                    if source == target or votes[source] == 0:
                        continue
                    moved = votes.copy()
                    moved[source] -= 1
                    moved[target] += 1
                    p, q = (np.exp(rate * v) / np.exp(rate * v).sum() for v in (votes, moved))
                    divergence = np.log((p[None] ** orders[:, None] * q[None] ** (1 - orders[:, None])).sum(1))
                    worst = np.maximum(worst, divergence / (orders - 1))
    bound = rdp.compute_bounded_range_curve(2 * rate, orders)
    assert (worst <= bound * (1 + 1e-12)).all()
    assert (worst >= 0.95 * bound).all()


@given(st.floats(1e-9, 50), st.floats(1.001, 5e3))
def test_curves_keep_their_known_bounds(ratio, order):
    slack = 1 + 1e-9
    laplace, response = rdp.compute_laplace_curve(ratio, order)[0], rdp.compute_pure_dp_curve(ratio, order)[0]
    ranged = rdp.compute_bounded_range_curve(ratio, order)[0]
    assert 0 < laplace <= response * slack
    assert response <= min(ratio, order * ratio**2 / 2) * slack
    assert 0 < ranged <= min(ratio, order * ratio**2 / 8) * slack
    assert ranged <= response * slack


def test_curve_sums_events_and_counts():
    orders = [2, 3.5]
    a = np.array(orders)
    table = RdpCurveEvent(orders=(2.0, 9.0), rdp=(0.5, 0.7), source="test", count=2)
    total = rdp.compute_curve(
        [GaussianEvent(mu=0.5, count=3), ZCDPEvent(rho=0.1), DeltaEvent(delta=0.5), GaussianEvent(mu=0.5)], orders
    )
    np.testing.assert_allclose(total, 4 * a * 0.125 + 0.1 * a, rtol=1e-15)
    np.testing.assert_array_equal(rdp.compute_curve([table], orders), [1.0, math.inf])
    np.testing.assert_array_equal(
        rdp.compute_curve([RdpCurveEvent(orders=(2,), rdp=(1,), source="", count=0)], orders), [0, 0]
    )


def test_default_orders_lose_less_than_two_per_mille_and_never_gain():
    for mu in (0.005, 0.05, 0.3, 1, 4, 15):
        for target in (1e-4, 1e-6, 1e-10):
            best = rdp.compute_epsilon([GaussianEvent(mu=mu)], target)
            dense = 1 + np.geomspace(1e-3, 1e5, 200_001)
            exact = rdp.to_epsilon(dense, dense * mu**2 / 2, target)
            grid = rdp.to_epsilon(rdp.ORDERS, rdp.compute_curve([GaussianEvent(mu=mu)]), target)
            if mu >= 0.05:
                assert exact <= grid * (1 + 1e-12) and grid <= 1.002 * exact, (mu, target)
                assert best == pytest.approx(exact, rel=1e-7)
            # The dense grid's step of 1e-4 leaves it up to 1e-8 above the real optimum.
            assert exact <= best * (1 + 1e-8) and exact <= grid * (1 + 1e-12)


# ---- conversions ----------------------------------------------------------------------------------------------------


def test_conversion_against_two_libraries():
    orders = [1.5, 2, 5, 20, 64, 300]
    values = [0.01 * a for a in orders]
    expected = compute_epsilon(orders, values, 1e-6)[0]
    assert rdp.to_epsilon(orders, values, 1e-6) == pytest.approx(expected, rel=1e-12)
    assert get_privacy_spent(orders=orders, rdp=values, delta=1e-6)[0] == pytest.approx(expected, rel=1e-12)


def test_conversion_against_mpmath_and_back():
    orders, values = [1.01, 3, 8], [0.001, 0.2, 0.5]
    exact = min(
        mp.mpf(r) + mp.log((mp.mpf(a) - 1) / a) - (mp.log(mp.mpf("1e-7")) + mp.log(a)) / (mp.mpf(a) - 1)
        for a, r in zip(orders, values, strict=True)
    )
    value = rdp.to_epsilon(orders, values, 1e-7)
    assert value == pytest.approx(float(exact), rel=1e-12)
    table = RdpCurveEvent(orders=tuple(orders), rdp=tuple(values), source="test")
    assert rdp.compute_delta([table], value) == pytest.approx(1e-7, rel=1e-9)


def test_conversion_edges():
    assert rdp.to_epsilon([2], [0.0], 0.5) == 0.0
    assert rdp.to_epsilon([2, 3], [math.inf, math.inf], 1e-5) == math.inf
    assert rdp.to_epsilon(3, 0.1, 1e-5) == rdp.to_epsilon([3.0], [0.1], 1e-5)


@pytest.mark.parametrize(
    ("orders", "values", "target"),
    [
        ([], [], 1e-5),
        ([1], [0.1], 1e-5),
        ([0.5], [0.1], 1e-5),
        ([math.nan], [0.1], 1e-5),
        ([math.inf], [0.1], 1e-5),
        ([2], [math.nan], 1e-5),
        ([2], [-1e-9], 1e-5),
        ([2, 3], [0.1], 1e-5),
        ([2], [0.1], 0.0),
        ([2], [0.1], 1.0),
        ([2], [0.1], math.nan),
    ],
)
def test_conversion_refuses(orders, values, target):
    with pytest.raises(ValueError):
        rdp.to_epsilon(orders, values, target)


# ---- exact Gaussian -------------------------------------------------------------------------------------------------


def mp_gaussian_delta(epsilon: float, mu: float) -> mp.mpf:
    e, m = mp.mpf(epsilon), mp.mpf(mu)

    def upper_tail(x: mp.mpf) -> mp.mpf:
        return mp.erfc(x / mp.sqrt(2)) / 2

    return upper_tail(e / m - m / 2) - mp.exp(e) * upper_tail(e / m + m / 2)


@pytest.mark.parametrize("mu", [1e-6, 1e-3, 0.1, 0.4999, 0.5001, 1, 7, 60, 1e3])
@pytest.mark.parametrize("target", [1e-300, 1e-60, 1e-12, 1e-5, 0.1, 0.499, 0.501, 0.9, 1 - 1e-9])
def test_gaussian_epsilon_against_mpmath(mu, target):
    value = gdp.compute_epsilon(mu, target)
    with mp.workdps(700 if mu > 100 else 400):
        assert value == 0 or mp_gaussian_delta(value * (1 - 1e-9), mu) > target
        assert mp_gaussian_delta(value * (1 + 1e-9), mu) <= target
    if value > 0:
        assert gdp.compute_mu(value, target) == pytest.approx(mu, rel=1e-8)


@given(st.floats(1e-6, 1e3), st.floats(-600, -1e-6))
@settings(max_examples=200)
def test_gaussian_epsilon_never_undershoots(mu, log_target):
    target = math.exp(log_target)
    value = gdp.compute_epsilon(mu, target)
    assert value >= 0 and math.isfinite(value)
    assert gdp.compute_log_delta(value, mu) <= log_target + 1e-10 * abs(log_target) + 1e-12


@given(st.floats(1e-3, 50), st.floats(1e-12, 0.9))
def test_gaussian_mu_inverts_epsilon_from_below(target_epsilon, target_delta):
    mu = gdp.compute_mu(target_epsilon, target_delta)
    assert gdp.compute_delta(target_epsilon, mu) <= target_delta * (1 + 1e-12)
    assert gdp.compute_delta(target_epsilon, mu * (1 + 1e-6)) > target_delta


@given(st.floats(1e-9, 300))
def test_a_pure_mechanism_is_dominated_by_its_gaussian_and_by_no_smaller(loss):
    mu = gdp.compute_mu_of_pure_epsilon(loss)
    q = 1 / (1 + math.exp(loss)) if loss < 700 else 0.0
    # At every epsilon the pure curve (e^loss - e^eps)/(1 + e^loss) lies below the Gaussian's.
    for share in (0.0, 0.1, 0.5, 0.9, 0.999):
        pure = -math.expm1((share - 1) * loss) * (1 - q)
        assert pure <= gdp.compute_delta(share * loss, mu) * (1 + 1e-9)
    assert gdp.compute_delta(0.0, mu) == pytest.approx(
        math.tanh(loss / 2), rel=1e-9
    )  # met at the vertex: no smaller mu


# ---- privacy loss distributions -------------------------------------------------------------------------------------


def mp_pure_delta(loss: float, count: int, target_epsilon: float) -> float:
    """k-fold randomized response, exactly (Kairouz, Oh & Viswanath 2015)."""
    p = mp.exp(mp.mpf(loss)) / (1 + mp.exp(mp.mpf(loss)))
    total = mp.mpf(0)
    for wins in range(count + 1):
        gain = 1 - mp.exp(mp.mpf(target_epsilon) - (2 * wins - count) * mp.mpf(loss))
        if gain > 0:
            total += mp.binomial(count, wins) * p**wins * (1 - p) ** (count - wins) * gain
    return float(total)


@pytest.mark.parametrize(("loss", "count"), [(0.1, 50), (0.0333, 200), (1.0, 3), (0.001, 100)])
def test_pure_loss_distribution_is_exact_to_the_grid(loss, count):
    value = pld.compute_epsilon([PureDPEvent(epsilon=loss, count=count)], 1e-5)
    assert mp_pure_delta(loss, count, value) <= 1e-5
    assert mp_pure_delta(loss, count, value - 1e-4 * value - 1e-6) > 1e-5


@pytest.mark.parametrize(("mu", "target"), [(0.1, 1e-6), (0.6, 1e-5), (2.0, 1e-8)])
def test_gaussian_loss_distribution_meets_the_exact_price_from_above(mu, target):
    exact = gdp.compute_epsilon(mu, target)
    assert exact <= pld.compute_epsilon([GaussianEvent(mu=mu / 2, count=4)], target) <= exact * 1.0001


def test_laplace_loss_distribution_of_one_is_exact():
    """One Laplace: delta(eps) = 1 - e^((eps - r)/2)."""
    value = compute_delta([LaplaceEvent(ratio=0.8)], 0.3)
    assert 1 - math.exp(-0.25) <= value <= (1 - math.exp(-0.25)) * (1 + 1e-4)


def test_loss_distribution_is_left_alone_where_it_cannot_be_trusted():
    assert pld.compute_epsilon([LaplaceEvent(ratio=0.1, count=1000)], 1e-14) == math.inf
    assert not pld.can_price([ZCDPEvent(rho=0.1)])
    assert not pld.can_price([LaplaceEvent(ratio=1.0, count=10**6), LaplaceEvent(ratio=1e-7)])
    with pytest.raises(ValueError):
        pld.compute_epsilon([ZCDPEvent(rho=0.1)], 1e-5)


# ---- oracle values --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("events", "exact", "renyi", "concentrated"),
    [
        (gnmax(40, 100), 1.35647, 1.47812, 1.75904),
        (gnmax(40, 50), 0.92634, 1.01229, 1.23088),
        (gnmax(40, 286), 2.43536, 2.6424, 3.04785),
        (confident(640, 150, 286, 40), 2.5426, 2.75789, 3.17403),
        (gnmax(100, 1000), 1.76006, 1.91424, 2.24597),
    ],
)
def test_table_of_prices(events, exact, renyi, concentrated):
    assert compute_route_epsilons(events, 1e-5) == pytest.approx(
        {"gdp": exact, "rdp": renyi, "zcdp": concentrated}, abs=6e-6
    )
    assert compute_guarantee(events, 1e-5).route == "gdp"


@pytest.mark.parametrize(
    ("events", "target", "value"),
    [
        (gnmax(40, 286), 1e-5, 2.4353597494239),
        (gnmax(100, 1000), 1e-5, 1.7600571495139),
        (confident(640, 150, 286, 40), 1e-5, 2.5426020855),
        (confident(1000, 200, 300, 40), 1e-5, 2.5943833805),
        ([GaussianEvent(mu=1 / 20, count=100)], 1e-6, 2.2540846502197396),
        ([GaussianEvent(mu=1 / 10, count=100)], 1e-6, 4.886554117462211),
        ([GaussianEvent(mu=1 / 4.530877117)], 1e-6, 0.92739),
    ],
)
def test_exact_gaussian_oracles(events, target, value):
    digits = len(str(value).split(".")[1])
    assert compute_guarantee(events, target).epsilon == pytest.approx(value, abs=max(0.6 * 10**-digits, 1e-12 * value))


def test_renyi_oracles():
    assert rdp.to_epsilon(range(2, 33), [1.1] * 31, 1e-5) == pytest.approx(1.32783806176, abs=6e-12)
    assert rdp.compute_epsilon([GaussianEvent(mu=1 / 4.530877117)], 1e-6) == pytest.approx(1.0, abs=1e-9)
    # These two were found on a dense grid of orders: the best real order may lie just below, never above.
    for events, value in ((gnmax(40, 286), 2.6424014216), (gnmax(100, 1000), 1.9142388331)):
        assert value * (1 - 1e-7) <= rdp.compute_epsilon(events, 1e-5) <= value
    assert compute_route_epsilons(gnmax(40, 286), 1e-5)["zcdp"] == pytest.approx(3.0478512020, abs=6e-11)


@pytest.mark.parametrize(
    ("scale", "queries", "pure", "renyi", "loss"),
    [(20, 100, 10, 3.1265, 2.8934), (40, 286, 14.3, 2.6211, 2.4179)],  # Renyi: on a grid, so a little high
)
def test_laplace_oracles(scale, queries, pure, renyi, loss):
    values = compute_route_epsilons([LaplaceEvent(ratio=1 / scale, count=2 * queries)], 1e-5)
    assert values["pure"] == pytest.approx(pure, rel=1e-12)
    assert renyi * (1 - 1e-4) <= values["rdp"] <= renyi
    assert values["pld"] == pytest.approx(loss, abs=6e-5)
    one_of_sensitivity_two = compute_route_epsilons([LaplaceEvent(ratio=2 / scale, count=queries)], 1e-5)
    assert values["rdp"] < one_of_sensitivity_two["rdp"]


# ---- routes together ------------------------------------------------------------------------------------------------


@given(st.floats(1, 1000), st.integers(1, 5000), st.floats(-30, -3))
def test_gaussian_routes_bracket_each_other(sigma, queries, log_target):
    values = compute_route_epsilons(gnmax(sigma, queries), math.exp(log_target))
    assert 0 <= values["gdp"] <= values["rdp"] * (1 + 1e-9)
    assert values["rdp"] <= values["zcdp"] * (1 + 1e-9)


@given(st.floats(1, 1000), st.floats(1.001, 2), st.integers(1, 5000), st.integers(1, 100))
def test_price_falls_with_noise_and_rises_with_queries(sigma, factor, queries, more):
    base = compute_guarantee(gnmax(sigma, queries), 1e-6).epsilon
    assert compute_guarantee(gnmax(sigma * factor, queries), 1e-6).epsilon <= base
    assert compute_guarantee(gnmax(sigma, queries + more), 1e-6).epsilon >= base
    assert compute_guarantee([ZCDPEvent(rho=1 / sigma**2, count=queries)], 1e-6).epsilon >= base * (1 - 1e-9)


mixed = st.lists(
    st.one_of(
        st.builds(PureDPEvent, epsilon=st.floats(1e-6, 5), count=st.integers(0, 50)),
        st.builds(BoundedRangeEvent, eta=st.floats(1e-6, 5), count=st.integers(0, 50)),
        st.builds(ZCDPEvent, rho=st.floats(1e-8, 5), count=st.integers(0, 50)),
        st.builds(GaussianEvent, mu=st.floats(1e-6, 5), count=st.integers(0, 50)),
        st.builds(DeltaEvent, delta=st.floats(1e-12, 1e-8), count=st.integers(0, 50)),
    ),
    max_size=4,
)


@pytest.mark.slow(reason="composes 120 random lists of events")
@given(mixed, mixed)
@settings(deadline=None, max_examples=60)
def test_more_events_never_cost_less(first, second):
    with_zcdp = [*first, ZCDPEvent(rho=1e-6)]  # keeps to the fast routes
    less, more = compute_guarantee(with_zcdp, 1e-5), compute_guarantee([*with_zcdp, *second], 1e-5)
    assert 0 <= less.epsilon <= more.epsilon * (1 + 1e-9)
    assert compute_delta(with_zcdp, 1.0) <= compute_delta([*with_zcdp, *second], 1.0) * (1 + 1e-9)


def test_delta_of_epsilon_is_delta():
    for events in (
        gnmax(40, 286),
        [LaplaceEvent(ratio=0.05, count=200)],
        [ZCDPEvent(rho=0.1)],
        [DeltaEvent(delta=1e-6), ZCDPEvent(rho=0.1)],
    ):
        value = compute_guarantee(events, 1e-5).epsilon
        assert compute_delta(events, value) == pytest.approx(1e-5, rel=2e-3)
    assert compute_delta([PureDPEvent(epsilon=1.0)], 1.0) == 0.0
    assert compute_delta([DeltaEvent(delta=0.25, count=2)], 1.0) == 0.5


def test_no_events_cost_nothing():
    assert compute_guarantee([], 1e-5) == Guarantee(epsilon=0.0, delta=1e-5, route="none")
    assert compute_guarantee([GaussianEvent(mu=1.0, count=0)], 1e-5).route == "none"
    assert compute_guarantee([DeltaEvent(delta=1e-6)], 1e-5).epsilon == 0
    assert compute_delta([], 0.0) == 0.0


def test_delta_events_are_paid_from_delta():
    plain = compute_guarantee(gnmax(40, 286), 1e-5 - 4e-6).epsilon
    assert compute_guarantee([*gnmax(40, 286), DeltaEvent(delta=2e-6, count=2)], 1e-5).epsilon == pytest.approx(
        plain, rel=1e-9
    )
    for events in ([DeltaEvent(delta=2e-5)], [PureDPEvent(epsilon=1.0), DeltaEvent(delta=6e-6, count=2)]):
        with pytest.raises(ValueError, match="failure probability"):
            compute_guarantee(events, 1e-5)
    # Nothing is left of delta: only pure prices hold.
    assert compute_route_epsilons([PureDPEvent(epsilon=1.0), DeltaEvent(delta=1e-5)], 1e-5) == {"pure": 1.0}
    with pytest.raises(ValueError, match="failure probability"):
        compute_route_epsilons([GaussianEvent(mu=1.0), DeltaEvent(delta=1e-5)], 1e-5)


def test_tabulated_curves_count_only_at_their_orders():
    table = RdpCurveEvent(orders=(4.0, 10.0), rdp=(0.2, 0.5), source="test")
    other = RdpCurveEvent(orders=(10.0, 64.0), rdp=(0.1, 0.4), source="test")
    alone = rdp.to_epsilon([4, 10], [0.2, 0.5], 1e-5)
    assert compute_route_epsilons([table], 1e-5) == {"rdp": alone}
    assert compute_guarantee([table, other], 1e-5).epsilon == rdp.to_epsilon([10], [0.6], 1e-5)
    assert compute_guarantee([table, RdpCurveEvent(orders=(5.0,), rdp=(0.1,), source="test")], 1e-5).epsilon == math.inf
    assert compute_delta([table, RdpCurveEvent(orders=(5.0,), rdp=(0.1,), source="test")], 3.0) == 1.0


def test_fails_closed():
    for bad in ([None], [1.0], ["gaussian"]):
        with pytest.raises(ValueError):
            compute_guarantee(bad, 1e-5)
        with pytest.raises(ValueError):
            compute_delta(bad, 1.0)
    for target in (0.0, 1.0, -1e-5, math.nan):
        with pytest.raises(ValueError):
            compute_guarantee(gnmax(40, 1), target)
    with pytest.raises(ValueError):
        Guarantee(epsilon=math.nan, delta=1e-5, route="gdp")


def test_the_price_covers_a_real_release():
    """Votes (5, 5) against (6, 4): the law of the released label is covered, and by 2/3 of mu it would not be."""
    sigma = 1.0
    wins = 0.5 * math.erfc(-2 / (ROOT2 * sigma) / ROOT2)  # the gap of 2 carries noise of deviation sqrt(2) sigma
    spread = wins - 0.5  # its delta at epsilon 0
    assert spread <= compute_delta(gnmax(sigma, 1), 0.0)
    assert spread > gdp.compute_delta(0.0, 2 / 3 * ROOT2 / sigma)


def test_the_exact_gaussian_price_is_never_below_the_true_one():
    """By sixty digits: at epsilon the true delta is at most the target, and a few parts in 1e13 below it no more."""
    draw, below = np.random.default_rng(0), 0
    for mu, target in zip(10 ** draw.uniform(-2, 1.2, 60), 10 ** draw.uniform(-12, -1, 60), strict=True):
        value = mp.mpf(gdp.compute_epsilon(mu, target))
        below += value > 0 and mp_gaussian_delta(value * (1 - mp.mpf(2e-13)), mu) > target
        assert value == 0 or mp_gaussian_delta(value, mu) <= target
    assert below > 40


def test_events_that_cost_only_delta_have_a_route_of_their_own():
    assert compute_guarantee([DeltaEvent(delta=1e-6, count=3)], 1e-5) == Guarantee(
        epsilon=0.0, delta=1e-5, route="delta"
    )
    assert compute_guarantee([], 1e-5).route == "none"
