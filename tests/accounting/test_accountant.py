"""The routes of the accountant against published values and against each other."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pate_torch.accounting import rdp
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


def gnmax(sigma: float, queries: int) -> list[PrivacyEvent]:
    return [GaussianEvent(mu=ROOT2 / sigma, count=queries)]


def confident(asked: int, screen: float, answered: int, sigma: float) -> list[PrivacyEvent]:
    return [GaussianEvent(mu=1 / screen, count=asked), *gnmax(sigma, answered)]


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
def test_table_of_costs(events, exact, renyi, concentrated):
    assert compute_route_epsilons(events, 1e-5) == pytest.approx(
        {"gdp": exact, "rdp": renyi, "zcdp": concentrated}, abs=6e-6
    )
    assert compute_guarantee(events, 1e-5).route == "gdp"


def test_laplace_oracles():
    values = compute_route_epsilons([LaplaceEvent(ratio=1 / 20, count=200)], 1e-5)
    assert values["pure"] == pytest.approx(10, rel=1e-12)
    assert 3.1265 * (1 - 1e-4) <= values["rdp"] <= 3.1265  # of a grid, so a little high
    assert values["pld"] == pytest.approx(2.8934, abs=6e-5)
    assert values["rdp"] < rdp.compute_epsilon([LaplaceEvent(ratio=2 / 20, count=100)], 1e-5)


few_examples = settings(max_examples=25)


@few_examples
@given(st.floats(1, 1000), st.integers(1, 5000), st.floats(-30, -3))
def test_gaussian_routes_bracket_each_other(sigma, queries, log_target):
    values = compute_route_epsilons(gnmax(sigma, queries), math.exp(log_target))
    assert 0 <= values["gdp"] <= values["rdp"] * (1 + 1e-9)
    assert values["rdp"] <= values["zcdp"] * (1 + 1e-9)


@few_examples
@given(st.floats(1, 1000), st.floats(1.001, 2), st.integers(1, 5000), st.integers(1, 100))
def test_cost_falls_with_noise_and_rises_with_queries(sigma, factor, queries, more):
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
@settings(max_examples=60)
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


def test_no_events_and_failures_alone_cost_no_epsilon():
    for events in ([], [GaussianEvent(mu=1.0, count=0)]):
        assert compute_guarantee(events, 1e-5) == Guarantee(epsilon=0.0, delta=1e-5, route="none")
    failures = [DeltaEvent(delta=1e-6, count=3)]
    assert compute_guarantee(failures, 1e-5) == Guarantee(epsilon=0.0, delta=1e-5, route="delta")
    assert compute_delta([], 0.0) == 0.0


def test_delta_events_are_paid_from_delta():
    plain = compute_guarantee(gnmax(40, 286), 1e-5 - 4e-6).epsilon
    assert compute_guarantee([*gnmax(40, 286), DeltaEvent(delta=2e-6, count=2)], 1e-5).epsilon == pytest.approx(
        plain, rel=1e-9
    )
    for events in ([DeltaEvent(delta=2e-5)], [PureDPEvent(epsilon=1.0), DeltaEvent(delta=6e-6, count=2)]):
        with pytest.raises(ValueError, match="failure probability"):
            compute_guarantee(events, 1e-5)
    # Nothing is left of delta: only pure costs hold.
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
