"""Renyi curves and conversions against mpmath, two libraries, enumeration and published values."""

import math

import dp_accounting
import mpmath as mp
import numpy as np
import pytest
from dp_accounting import rdp as google
from hypothesis import given, settings
from hypothesis import strategies as st
from opacus.accountants.analysis.rdp import compute_rdp, get_privacy_spent

from pate_torch.accounting import rdp
from pate_torch.accounting.events import (
    DeltaEvent,
    GaussianEvent,
    RdpCurveEvent,
    SampledGaussianEvent,
    ZCDPEvent,
)
from tests.accounting.exact_divergences import move_one_vote

mp.mp.dps = 60


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
    for _ in range(100):
        left, right = low + (high - low) / 3, high - (high - low) / 3
        low, high = (left, high) if moment(left) < moment(right) else (low, right)
    return moment((low + high) / 2) / (a - 1)


@pytest.mark.parametrize(
    ("curve", "exact", "ratios"),
    [
        (rdp.compute_laplace_curve, mp_laplace, (1e-8, 1e-4, 0.1, 0.7, 3.0, 40.0, 1e3)),
        (rdp.compute_pure_dp_curve, mp_randomized_response, (1e-8, 1e-4, 0.1, 0.7, 3.0, 40.0, 1e3)),
        (rdp.compute_bounded_range_curve, mp_bounded_range, (1e-8, 3.0, 40.0)),
    ],
)
def test_curves_against_mpmath(curve, exact, ratios):
    orders = (1.01, 2, 17.3, 1001)
    for ratio in ratios:
        with mp.workdps(1000 if ratio > 100 else 60):
            expected = [float(exact(ratio, order)) for order in orders]
        assert curve(ratio, orders) == pytest.approx(expected, rel=1e-12)


ETAS = [*np.geomspace(1e-8, 500, 23).tolist(), 1.0, 4.0, 8.0]


@pytest.mark.parametrize("order", [1.0001, 1.7, 20, 1e6])
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
            votes = (first, second, 12 - first - second)
            for moved in move_one_vote(votes):
                p, q = (np.exp(rate * v) / np.exp(rate * v).sum() for v in map(np.array, (votes, moved)))
                divergence = np.log((p[None] ** orders[:, None] * q[None] ** (1 - orders[:, None])).sum(1))
                worst = np.maximum(worst, divergence / (orders - 1))
    bound = rdp.compute_bounded_range_curve(2 * rate, orders)
    assert (worst <= bound * (1 + 1e-12)).all()
    assert (worst >= 0.95 * bound).all()


@settings(max_examples=40)
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
    for mu in (0.005, 0.05, 1, 15):
        for target in (1e-4, 1e-10):
            best = rdp.compute_epsilon([GaussianEvent(mu=mu)], target)
            dense = 1 + np.geomspace(1e-3, 1e5, 20_001)
            exact = rdp.to_epsilon(dense, dense * mu**2 / 2, target)
            grid = rdp.to_epsilon(rdp.ORDERS, rdp.compute_curve([GaussianEvent(mu=mu)]), target)
            if mu >= 0.05:
                assert exact <= grid * (1 + 1e-6) and grid <= 1.002 * exact, (mu, target)
                assert best == pytest.approx(exact, rel=1e-6)
            # The dense grid's step of 1e-3 leaves it up to 1e-6 above the real optimum.
            assert exact <= best * (1 + 1e-6)


def test_conversion_against_two_libraries():
    orders = [1.5, 2, 5, 20, 64, 300]
    values = [0.01 * a for a in orders]
    expected = google.compute_epsilon(orders, values, 1e-6)[0]
    assert rdp.to_epsilon(orders, values, 1e-6) == pytest.approx(expected, rel=1e-12)
    assert get_privacy_spent(orders=orders, rdp=values, delta=1e-6)[0] == pytest.approx(expected, rel=1e-12)
    table = RdpCurveEvent(orders=tuple(orders), rdp=tuple(values), source="test")
    assert rdp.compute_delta([table], expected) == pytest.approx(1e-6, rel=1e-9)


def test_conversion_edges():
    assert rdp.to_epsilon([2], [0.0], 0.5) == 0.0
    assert rdp.to_epsilon([2, 3], [math.inf, math.inf], 1e-5) == math.inf
    assert rdp.to_epsilon(3, 0.1, 1e-5) == rdp.to_epsilon([3.0], [0.1], 1e-5)
    tables = [RdpCurveEvent(orders=(order,), rdp=(0.1,), source="test") for order in (2.0, 3.0)]
    assert rdp.compute_delta(tables, 1.0) == 1.0  # no shared order: the divergence is infinite


@pytest.mark.parametrize(
    ("words", "orders", "values", "delta"),
    [
        *(("order", orders, [0.1] * len(orders), 1e-5) for orders in ([], [1], [0.5], [math.nan], [math.inf], ["two"])),
        *(("rdp", [2], values, 1e-5) for values in ([math.nan], [-1e-9], [0.1, 0.2])),
        *(("delta", [2], [0.1], delta) for delta in (0.0, 1.0, math.nan)),
    ],
)
def test_what_is_no_curve_and_no_delta_is_refused(words, orders, values, delta):
    with pytest.raises(ValueError, match=words):
        rdp.to_epsilon(orders, values, delta)


@pytest.mark.parametrize(("rate", "multiplier"), [(-0.1, 1.0), (0.0, 1.0), (1.1, 1.0), (0.1, 0.0)])
def test_what_is_no_sampled_gaussian_is_refused(rate, multiplier):
    with pytest.raises(ValueError, match=r"rate|noise_multiplier"):
        SampledGaussianEvent(rate=rate, noise_multiplier=multiplier, steps=1)


CASES = [(0.2, 2.0), (0.01, 0.8), (0.5, 6.0), (0.02, 0.5), (0.9, 0.7)]


def _divergence(q, z, order):
    return rdp._compute_divergences(q, z, (order,))[0]


def by_mpmath(q, z, order, reverse=False):
    """The integral as it is written, forty digits."""
    with mp.workdps(40):
        ratio = lambda x: (1 - q) + q * mp.e ** ((2 * x - 1) / (2 * mp.mpf(z) ** 2))  # noqa: E731
        power = 1 - order if reverse else order
        cuts = sorted({-20 * z, -3 * z, 0, 3 * z, order / 2, order, order + 3 * z, order + 20 * z})
        return float(mp.log(mp.quad(lambda x: mp.npdf(x, 0, z) * ratio(x) ** power, cuts)) / (order - 1))


slow_quadrature = pytest.mark.slow(reason="quadrature in 40 digits")


@pytest.mark.parametrize(
    "q,z,orders",
    [
        (0.2, 2.0, (3.0,)),
        *(pytest.param(q, z, (1.3, 6.3, 20.0), marks=slow_quadrature) for q, z in CASES),
    ],
)
def test_the_quadrature_is_the_integral_of_the_larger_direction(q, z, orders):
    for order in orders:
        assert _divergence(q, z, order) == pytest.approx(by_mpmath(q, z, order), rel=1e-10)
        assert by_mpmath(q, z, order, reverse=True) <= _divergence(q, z, order)


def by_the_binomial(q, z, order):
    """A whole power expands into as many Gaussian moments; sixty digits."""
    with mp.workdps(60):
        q, z = mp.mpf(q), mp.mpf(z)
        weight, excess = (1 - q) ** order, mp.mpf(0)
        for k in range(order):
            weight *= mp.mpf(order - k) / (k + 1) * q / (1 - q)
            excess += weight * mp.expm1((k + 1) * k / (2 * z * z))
        return mp.log1p(excess) / (order - 1)


def by_excess(q, z, order):
    """The mean of (1 + u)^a - 1 - a u, sixty digits."""
    with mp.workdps(60):
        q, z, a = mp.mpf(q), mp.mpf(z), mp.mpf(order)

        def excess(x):
            u = q * mp.expm1((2 * x - 1) / (2 * z * z))
            return mp.npdf(x, 0, z) * ((1 + u) ** a - 1 - a * u)

        return mp.log1p(mp.quad(excess, mp.linspace(-18 * z, a + 18 * z, 13))) / (a - 1)


@pytest.mark.parametrize("z", [0.5, 3.3, 200.0])
def test_tiny_rates_keep_their_relative_precision(z):
    """Down to a moment of 1 + 1e-21; by the exact sum."""
    for q in (1e-8, 1e-4, 0.5):
        orders = [2, 8, 600]
        found = rdp._compute_divergences(q, z, tuple(float(a) for a in orders))
        true = [by_the_binomial(q, z, a) for a in orders]
        assert max(abs(ours / value - 1) for ours, value in zip(found, true, strict=True)) < 1e-12


@pytest.mark.parametrize("q,z", [(1e-8, 0.5), (0.5, 200.0)])
@pytest.mark.parametrize("order", [1.01, pytest.param(6.3, marks=slow_quadrature)])
def test_fractional_orders_keep_it_too(q, z, order):
    assert abs(_divergence(q, z, order) / by_excess(q, z, order) - 1) < 1e-12


@pytest.mark.parametrize("q,z", CASES[::2])
def test_opacus_agrees_at_all_orders_and_google_at_whole_ones(q, z):
    orders = rdp.ORDERS[20:110:7]
    ours = [_divergence(q, z, float(order)) for order in orders]
    theirs = compute_rdp(q=q, noise_multiplier=z, steps=1, orders=orders.tolist())
    np.testing.assert_allclose(ours, theirs, rtol=1e-6)
    whole = [2.0, 5.0, 17.0]
    accountant = google.RdpAccountant(orders=whole)
    accountant.compose(dp_accounting.PoissonSampledDpEvent(q, dp_accounting.GaussianDpEvent(z)), 1)
    np.testing.assert_allclose([_divergence(q, z, order) for order in whole], accountant._rdp, rtol=1e-9)


def test_whole_batches_are_the_plain_gaussian():
    curve = rdp.compute_curve([SampledGaussianEvent(rate=1.0, noise_multiplier=3.0, steps=7, count=2)])
    np.testing.assert_allclose(curve, 14 * rdp.ORDERS / (2 * 3.0**2), rtol=1e-9)


def test_the_epsilon_is_that_of_the_best_order_of_the_grid_also_beside_a_table():
    run = SampledGaussianEvent(rate=0.01, noise_multiplier=1.0, steps=1000)
    value = rdp.compute_epsilon([run], 1e-5)
    assert value == rdp.to_epsilon(rdp.ORDERS, rdp.compute_curve([run]), 1e-5) == pytest.approx(2.101, abs=1e-3)
    table = RdpCurveEvent(orders=(3.0, 11.0), rdp=(0.0, 0.0), source="test")
    both = rdp.to_epsilon([3.0, 11.0], 1000 * np.array([_divergence(0.01, 1.0, a) for a in (3.0, 11.0)]), 1e-5)
    assert rdp.compute_epsilon([run, table], 1e-5) == pytest.approx(both, rel=1e-12)


def test_it_composes_to_the_epsilon_of_a_library():
    """At the best whole order of Google's accountant; ours may pick one in between, and gain less than 1 %."""
    accountant = google.RdpAccountant(orders=list(range(2, 64)))
    accountant.compose(dp_accounting.PoissonSampledDpEvent(0.2, dp_accounting.GaussianDpEvent(2.0)), 50)
    ours = rdp.compute_epsilon([SampledGaussianEvent(rate=0.2, noise_multiplier=2.0, steps=50)], 1e-5)
    theirs = accountant.get_epsilon(1e-5)
    assert 0.99 * theirs < ours <= theirs * 1.002
