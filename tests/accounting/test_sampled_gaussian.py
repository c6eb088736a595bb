"""The sampled Gaussian's Renyi curve: by mpmath, by two libraries, and at the ends of the rate."""

import dp_accounting
import mpmath as mp
import numpy as np
import pytest
from dp_accounting import rdp as google
from opacus.accountants.analysis.rdp import compute_rdp

from pate_torch.accounting import accountant as accounting
from pate_torch.accounting import rdp
from pate_torch.accounting.rdp import _compute_divergences, make_sampled_gaussian_event

CASES = [(0.2, 2.0), (0.01, 0.8), (0.5, 6.0), (0.02, 0.5), (0.9, 0.7)]


def _divergence(q, z, order):
    return _compute_divergences(q, z, [order])[0]


def by_mpmath(q, z, order, reverse=False):
    """The integral as it is written, forty digits."""
    with mp.workdps(40):
        ratio = lambda x: (1 - q) + q * mp.e ** ((2 * x - 1) / (2 * mp.mpf(z) ** 2))  # noqa: E731
        power = 1 - order if reverse else order
        cuts = sorted({-20 * z, -3 * z, 0, 3 * z, order / 2, order, order + 3 * z, order + 20 * z})
        return float(mp.log(mp.quad(lambda x: mp.npdf(x, 0, z) * ratio(x) ** power, cuts)) / (order - 1))


QUADRATURE = [(q, z, order) for q, z in CASES for order in (1.3, 3.0, 6.3, 20.0)]
slow_quadrature = pytest.mark.slow(reason="quadrature in 40 digits")


@pytest.mark.parametrize(
    "q,z,order",
    [case if index % 5 == 0 else pytest.param(*case, marks=slow_quadrature) for index, case in enumerate(QUADRATURE)],
)
def test_the_quadrature_is_the_integral(q, z, order):
    assert _divergence(q, z, order) == pytest.approx(by_mpmath(q, z, order), rel=1e-10)


@pytest.mark.parametrize("q,z", [CASES[0], *(pytest.param(*case, marks=slow_quadrature) for case in CASES[1:4])])
def test_the_other_direction_is_the_smaller(q, z):
    for order in (1.5, 4.0, 12.0):
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


@pytest.mark.parametrize("z", [0.5, 0.8, 1.0, 3.3, 20.0, 100.0, 200.0])
def test_tiny_rates_keep_their_relative_precision(z):
    """Down to a moment of 1 + 1e-21; by the exact sum."""
    for q in (1e-8, 1e-6, 1e-4, 0.01, 0.2, 0.5):
        orders = [2, 3, 8, 64, 600]
        found = _compute_divergences(q, z, [float(a) for a in orders])
        true = [by_the_binomial(q, z, a) for a in orders]
        assert max(abs(ours / value - 1) for ours, value in zip(found, true, strict=True)) < 1e-12


@pytest.mark.parametrize("q,z", [(1e-8, 0.5), (1e-8, 200.0), (1e-4, 3.3), (0.5, 0.5), (0.5, 200.0)])
@pytest.mark.parametrize("order", [1.01, pytest.param(6.3, marks=slow_quadrature)])
def test_fractional_orders_keep_it_too(q, z, order):
    assert abs(_divergence(q, z, order) / by_excess(q, z, order) - 1) < 1e-12


def test_together_and_alone_orders_cost_the_same():
    orders = [1.01, 2.0, 37.5, 1001.0]
    for q, z in CASES:
        np.testing.assert_allclose(
            _compute_divergences(q, z, orders), [_divergence(q, z, a) for a in orders], rtol=1e-14
        )


@pytest.mark.parametrize("q,z", CASES)
def test_opacus_agrees_at_all_orders_and_google_at_whole_ones(q, z):
    orders = rdp.ORDERS[20:110:7]
    ours = [_divergence(q, z, float(order)) for order in orders]
    theirs = compute_rdp(q=q, noise_multiplier=z, steps=1, orders=orders.tolist())
    np.testing.assert_allclose(ours, theirs, rtol=1e-6)
    whole = [2.0, 5.0, 17.0]
    accountant = google.RdpAccountant(orders=whole)
    accountant.compose(dp_accounting.PoissonSampledDpEvent(q, dp_accounting.GaussianDpEvent(z)), 1)
    np.testing.assert_allclose([_divergence(q, z, order) for order in whole], accountant._rdp, rtol=1e-9)


def test_whole_batches_are_the_plain_gaussian_and_empty_ones_nothing():
    curve = make_sampled_gaussian_event(1.0, 3.0, 7)
    np.testing.assert_allclose(curve.rdp, np.array(curve.orders) / (2 * 3.0**2), rtol=1e-9)
    assert curve.count == 7
    assert set(make_sampled_gaussian_event(0.0, 3.0, 7).rdp) == {0.0}


def test_it_composes_to_the_epsilon_of_a_library():
    """At the best whole order of Google's accountant; ours may pick one in between, and gain less than 1 %."""
    accountant = google.RdpAccountant(orders=list(range(2, 64)))
    accountant.compose(dp_accounting.PoissonSampledDpEvent(0.2, dp_accounting.GaussianDpEvent(2.0)), 50)
    ours, theirs = (
        accounting.compute_guarantee([make_sampled_gaussian_event(0.2, 2.0, 50)], 1e-5).epsilon,
        accountant.get_epsilon(1e-5),
    )
    assert 0.99 * theirs < ours <= theirs * 1.002


def test_arguments_are_checked():
    for rate, multiplier in ((-0.1, 1.0), (1.1, 1.0), (0.1, 0.0)):
        with pytest.raises(ValueError, match=r"rate|noise_multiplier"):
            make_sampled_gaussian_event(rate, multiplier, 1)
