"""Noise and queries that a target allows; privacy filters."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pate_torch.accounting import gdp, rdp
from pate_torch.accounting.accountant import epsilon
from pate_torch.accounting.calibration import price, smallest_sigma
from pate_torch.accounting.events import ZCDP, BoundedRange, Delta, Gaussian, Laplace, PureDP, RdpCurve
from pate_torch.accounting.filters import Filter, Spend

ROOT2 = math.sqrt(2)


def gnmax(queries):
    return lambda sigma: [Gaussian(mu=ROOT2 / sigma, count=queries)]


def test_oracle_noise():
    assert smallest_sigma(gnmax(286), epsilon=2, delta=1e-5) == pytest.approx(47.6850582, abs=6e-8)
    # The oracle's dense grid of orders lies 1e-6 above the best real order.
    by_renyi = smallest_sigma(gnmax(286), epsilon=2, delta=1e-5, route="rdp")
    assert 51.3992441 * (1 - 2e-6) <= by_renyi <= 51.3992441


@given(st.floats(0.05, 20), st.integers(1, 5000), st.floats(-25, -4))
@settings(max_examples=40, deadline=None)
def test_calibrated_noise_fits_and_less_does_not(target, queries, log_delta):
    delta = math.exp(log_delta)
    sigma = smallest_sigma(gnmax(queries), epsilon=target, delta=delta)
    assert epsilon(gnmax(queries)(sigma), delta).epsilon <= target
    assert epsilon(gnmax(queries)(sigma * (1 - 1e-8)), delta).epsilon > target


@pytest.mark.parametrize(
    "plan",
    [
        lambda b: [Laplace(ratio=1 / b, count=40)],
        lambda b: [BoundedRange(eta=2 / b, count=20)],
        lambda b: [ZCDP(rho=1 / b**2, count=20), Delta(delta=1e-6)],
        lambda b: [PureDP(epsilon=1 / b, count=5)],
    ],
)
def test_other_mechanisms_calibrate_too(plan):
    scale = smallest_sigma(plan, epsilon=1.5, delta=1e-5)
    assert 1.5 * (1 - 1e-4) <= price(plan(scale), 1e-5) <= 1.5


def test_out_of_reach_is_said():
    with pytest.raises(ValueError, match="out of reach"):
        smallest_sigma(lambda s: [PureDP(epsilon=1.0), Gaussian(mu=1 / s)], epsilon=0.5, delta=1e-5)
    with pytest.raises(ValueError, match="route"):
        smallest_sigma(lambda s: [ZCDP(rho=1 / s)], epsilon=0.5, delta=1e-5, route="gdp")


# ---- filters --------------------------------------------------------------------------------------------------------


def test_the_plan_chooses_the_filter():
    gaussian = Filter.plan([Gaussian(mu=0.1)], epsilon=2, delta=1e-5)
    assert (gaussian.kind, gaussian.order, gaussian.delta_reserve) == ("gdp", None, 0.0)
    assert gaussian.capacity == gdp.mu(2, 1e-5) ** 2
    with_failures = Filter.plan([Gaussian(mu=0.1), Delta(delta=1e-7)], epsilon=2, delta=1e-5)
    assert (with_failures.kind, with_failures.delta_reserve) == ("gdp", 5e-6)
    for event in (Laplace(ratio=0.1), PureDP(epsilon=0.1), ZCDP(rho=0.1), BoundedRange(eta=0.1)):
        assert Filter.plan([event], epsilon=2, delta=1e-5).kind == "rdp"


def test_the_order_of_an_rdp_filter_is_the_best_for_a_gaussian_that_fills_the_cap():
    chosen = Filter.plan([ZCDP(rho=0.01)], epsilon=2, delta=1e-5)

    def rho_at(order):
        return float((2 - rdp.conversion(order, 1e-5))[0]) / order

    assert chosen.order in rdp.ORDERS
    assert rho_at(chosen.order) == max(rho_at(order) for order in rdp.ORDERS)
    assert chosen.capacity == pytest.approx(chosen.order * rho_at(chosen.order), rel=1e-12)


def test_full_capacity_converts_to_the_cap():
    for planned in ([Gaussian(mu=1.0)], [ZCDP(rho=1.0)], [PureDP(epsilon=0.1), Delta(delta=1e-7)]):
        account = Filter.plan(planned, epsilon=1.7, delta=1e-6)
        assert account.to_epsilon(Spend(account.capacity)) == pytest.approx(1.7, rel=1e-9)
        assert account.to_epsilon(Spend()) == 0
        assert account.admits(Spend(), Spend(account.capacity))
        assert not account.admits(Spend(account.capacity / 2), Spend(account.capacity / 2 * (1 + 1e-9)))


def test_a_plan_calibrated_to_the_cap_is_admitted_once():
    for plan, route in ((gnmax(100), None), (lambda s: [ZCDP(rho=1 / s**2, count=100)], "rdp")):
        sigma = smallest_sigma(plan, epsilon=2, delta=1e-5, route=route)
        # The filter's order comes from a grid: 0.2 % more epsilon at most, so that much is left open.
        account = Filter.plan(plan(sigma), epsilon=2 * (1 if route is None else 1.002), delta=1e-5)
        charge = account.price(plan(sigma))
        assert account.admits(Spend(), charge)
        assert not account.admits(charge, charge)


def test_a_gdp_filter_bounds_pure_events_and_refuses_what_it_cannot():
    account = Filter.plan([Gaussian(mu=0.1)], epsilon=2, delta=1e-5)
    assert account.price([Gaussian(mu=0.3, count=4)]).scalar == pytest.approx(0.36, rel=1e-12)
    for event in (Laplace(ratio=0.1, count=3), PureDP(epsilon=0.1, count=3), BoundedRange(eta=0.1, count=3)):
        assert account.price([event]).scalar == pytest.approx(3 * gdp.pure_to_mu(0.1) ** 2, rel=1e-12)
    for event in (ZCDP(rho=0.1), RdpCurve(orders=(2.0,), rdp=(0.1,), source="test")):
        with pytest.raises(ValueError, match="gdp filter"):
            account.price([event])


def test_an_rdp_filter_adds_divergences_at_its_order():
    account = Filter.plan([ZCDP(rho=0.1)], epsilon=2, delta=1e-5)
    events = [Gaussian(mu=0.1, count=7), Laplace(ratio=0.2), ZCDP(rho=0.01, count=2)]
    assert account.price(events).scalar == pytest.approx(float(rdp.curve(events, account.order)[0]), rel=1e-12)
    with pytest.raises(ValueError, match="no finite"):
        account.price([RdpCurve(orders=(2.0,), rdp=(0.1,), source="test")])
    table = RdpCurve(orders=(5.0, 9.0), rdp=(0.1, 0.3), source="test")
    assert Filter.plan([table], epsilon=3, delta=1e-5).order in (5.0, 9.0)


def test_failures_draw_on_their_own_reserve():
    account = Filter.plan([PureDP(epsilon=0.1), Delta(delta=1e-6)], epsilon=2, delta=1e-5)
    small, large = account.price([Delta(delta=1e-6, count=2)]), account.price([Delta(delta=4e-6)])
    assert small == Spend(0.0, 2e-6)
    assert account.admits(small, account.price([Delta(delta=2e-6)]))
    assert not account.admits(small, large)
    plain = Filter.plan([Gaussian(mu=0.1)], epsilon=2, delta=1e-5)
    assert not plain.admits(Spend(), plain.price([Delta(delta=1e-12)]))


def test_a_filter_is_never_below_the_fixed_price():
    """What an adaptive account is charged covers what a fixed list of the same events would cost."""
    for events in ([Gaussian(mu=0.3, count=2)], [Laplace(ratio=0.1, count=50)], [ZCDP(rho=0.05, count=3)]):
        account = Filter.plan(events, epsilon=5, delta=1e-5)
        assert account.to_epsilon(account.price(events)) >= epsilon(events, 1e-5).epsilon * (1 - 1e-9)


@pytest.mark.parametrize(
    "bad",
    [
        {"kind": "zcdp"},
        {"kind": "rdp"},
        {"kind": "gdp", "order": 2.0},
        {"kind": "gdp", "epsilon": 0.0},
        {"kind": "gdp", "epsilon": math.nan},
        {"kind": "gdp", "delta_reserve": 1e-5},
        {"kind": "gdp", "delta_reserve": -1e-9},
        {"kind": "rdp", "order": 1.5, "epsilon": 0.1},
    ],
)
def test_impossible_filters_are_refused(bad):
    with pytest.raises(ValueError):
        Filter(**{"epsilon": 1.0, "delta": 1e-5, **bad})


def test_a_cap_too_small_for_renyi_is_said():
    # At delta near 1e-300 even the largest order of the grid converts a zero divergence to 0.68.
    with pytest.raises(ValueError, match="too small"):
        Filter.plan([ZCDP(rho=0.1)], epsilon=0.1, delta=1e-300)
    with pytest.raises(ValueError):
        Spend(math.nan)
