"""Privacy filters: the kind that a plan needs, full capacity, costs and refusals."""

import math
import random
from dataclasses import replace

import pytest

from pate_torch.accounting import domination, gdp, rdp
from pate_torch.accounting.accountant import compute_guarantee
from pate_torch.accounting.calibration import calibrate_sigma
from pate_torch.accounting.events import (
    BoundedRangeEvent,
    DeltaEvent,
    GaussianEvent,
    LaplaceEvent,
    PureDPEvent,
    RdpCurveEvent,
    SampledGaussianEvent,
    ZCDPEvent,
)
from pate_torch.accounting.filters import ExactCost, FilterCost, PrivacyFilter


def filter_of(*planned, epsilon=2, delta=1e-5, **terms):
    return PrivacyFilter.from_planned_events(planned, epsilon=epsilon, delta=delta, **terms)


def test_a_running_sum_rounds_as_the_sum_of_all_costs_does():
    """Also across 600 orders of magnitude, at subnormal numbers, and where costs are taken out again."""
    draws, held, exact = random.Random(7), [], ExactCost()
    for turn in range(1000):
        exponent = draws.choice((-1074, -1022, -300, -60, -20, 0, 900))
        cost = FilterCost(math.ldexp(draws.random(), exponent), math.ldexp(draws.getrandbits(53), -1074 + turn % 80))
        held.append(cost)
        exact = exact.add(cost)
        if turn % 3 == 0:
            exact = exact.add(held.pop(draws.randrange(len(held))), -1)
        assert exact.round() == FilterCost.from_sum(held)
    for cost in held:
        exact = exact.add(cost, -1)
    assert exact.round() == FilterCost() and exact == ExactCost()


def test_the_plan_chooses_the_filter():
    gaussian = filter_of(GaussianEvent(mu=0.1))
    assert (gaussian.kind, gaussian.order, gaussian.delta_reserve) == ("gdp", None, pytest.approx(1e-6))
    assert gaussian.capacity == gdp.compute_mu(2, 1e-5 - gaussian.delta_reserve) ** 2
    assert filter_of(GaussianEvent(mu=0.1), DeltaEvent(delta=1e-7)).delta_reserve == gaussian.delta_reserve
    assert filter_of(GaussianEvent(mu=0.1), DeltaEvent(delta=1.01e-6)).delta_reserve == 5e-6
    assert filter_of(GaussianEvent(mu=0.1), kind="rdp").kind == "rdp"
    assert filter_of(GaussianEvent(mu=0.1), delta_reserve=3e-6).delta_reserve == 3e-6
    with pytest.raises(ValueError, match="delta_reserve=1e-05"):
        filter_of(GaussianEvent(mu=0.1), delta_reserve=1e-5)
    for event in (LaplaceEvent(ratio=0.1), PureDPEvent(epsilon=0.1), ZCDPEvent(rho=0.1), BoundedRangeEvent(eta=0.1)):
        assert filter_of(event).kind == "rdp"


def test_the_order_of_an_rdp_filter_is_the_best_for_a_gaussian_that_fills_the_cap():
    chosen = filter_of(ZCDPEvent(rho=0.01))

    def rho_at(order):
        return float((2 - rdp.compute_conversion_term(order, 1e-5 - chosen.delta_reserve))[0]) / order

    assert chosen.order in rdp.ORDERS
    assert rho_at(chosen.order) == max(rho_at(order) for order in rdp.ORDERS)
    assert chosen.capacity == pytest.approx(chosen.order * rho_at(chosen.order), rel=1e-12)


def test_full_capacity_converts_to_the_cap():
    for planned in ([GaussianEvent(mu=1.0)], [ZCDPEvent(rho=1.0)], [PureDPEvent(epsilon=0.1), DeltaEvent(delta=1e-7)]):
        account = filter_of(*planned, epsilon=1.7, delta=1e-6)
        assert account.to_epsilon(FilterCost(account.capacity)) == pytest.approx(1.7, rel=1e-9)
        assert account.to_epsilon(FilterCost()) == 0
        assert account.admits(FilterCost(), FilterCost(account.capacity))
        assert not account.admits(FilterCost(account.capacity / 2), FilterCost(account.capacity / 2 * (1 + 1e-9)))


PLANS = [
    (lambda sigma: [GaussianEvent(mu=math.sqrt(2) / sigma, count=100)], "best"),
    (lambda sigma: [ZCDPEvent(rho=1 / sigma**2, count=100)], "rdp"),
]


def test_a_plan_calibrated_to_the_cap_is_admitted_once():
    for plan, route in PLANS:
        sigma = calibrate_sigma(plan, epsilon=2, delta=1e-5, accountant=route)
        # The filter's order comes from a grid: 0.2 % more epsilon at most, so that much is left open.
        account = filter_of(*plan(sigma), epsilon=2 if route == "best" else 2.004)
        assert account.delta_reserve == 0  # the plan fits only without a reserve
        charge = account.compute_cost(plan(sigma))
        assert account.admits(FilterCost(), charge)
        assert not account.admits(charge, charge)


def test_a_gdp_filter_bounds_pure_events_and_refuses_what_it_cannot():
    account = filter_of(GaussianEvent(mu=0.1))
    assert account.compute_cost([GaussianEvent(mu=0.3, count=4)]).scalar == pytest.approx(0.36, rel=1e-12)
    dominating = 3 * gdp.compute_mu_of_pure_epsilon(0.1) ** 2
    for event in (LaplaceEvent(ratio=0.1), PureDPEvent(epsilon=0.1), BoundedRangeEvent(eta=0.1)):
        assert account.compute_cost([event] * 3).scalar == pytest.approx(dominating, rel=1e-12)
    for event in (ZCDPEvent(rho=0.1), RdpCurveEvent(orders=(2.0,), rdp=(0.1,), source="test")):
        with pytest.raises(ValueError, match="gdp filter"):
            account.compute_cost([event])


def test_an_rdp_filter_adds_divergences_at_its_order():
    account = filter_of(ZCDPEvent(rho=0.1))
    events = [GaussianEvent(mu=0.1, count=7), LaplaceEvent(ratio=0.2), ZCDPEvent(rho=0.01, count=2)]
    assert account.compute_cost(events).scalar == pytest.approx(
        float(rdp.compute_curve(events, account.order)[0]), rel=1e-12
    )
    with pytest.raises(ValueError, match="no finite"):
        account.compute_cost([RdpCurveEvent(orders=(2.0,), rdp=(0.1,), source="test")])
    table = RdpCurveEvent(orders=(5.0, 9.0), rdp=(0.1, 0.3), source="test")
    assert filter_of(table, epsilon=3).order in (5.0, 9.0)


def test_failures_draw_on_their_own_reserve():
    plan = [PureDPEvent(epsilon=0.1), DeltaEvent(delta=1e-6)]
    account = filter_of(*plan)
    small = account.compute_cost([DeltaEvent(delta=1e-7, count=2)])
    assert small == FilterCost(0.0, 2e-7)
    assert account.admits(small, account.compute_cost([DeltaEvent(delta=7e-7)]))
    assert not account.admits(small, account.compute_cost([DeltaEvent(delta=9e-7)]))
    plain = filter_of(GaussianEvent(mu=0.1), delta_reserve=0.0)
    assert not plain.admits(FilterCost(), plain.compute_cost([DeltaEvent(delta=1e-12)]))


def test_the_default_reserve_costs_few_gaussian_questions():
    """The share of queries is that of mu^2, whose capacity the reserve lowers."""
    for epsilon in (1, 3, 10):
        full = gdp.compute_mu(epsilon, 1e-5) ** 2
        assert 0.985 < filter_of(GaussianEvent(mu=1e-3), epsilon=epsilon).capacity / full < 0.995


def test_the_order_after_a_sparse_vector_suits_gaussian_answers():
    """At the best order of the sparse vector, 20 answers at sigma 40 would cost most of the cap of 10."""
    sparse_vector = [PureDPEvent(epsilon=4.0), DeltaEvent(delta=2.5e-7)]
    answers = [GaussianEvent(mu=math.sqrt(2) / 40, count=20)]
    account = filter_of(*sparse_vector, epsilon=10)

    def count_copies(order):
        return float((10 - rdp.compute_conversion_term(order, 9e-6))[0]) / float(
            rdp.compute_curve(sparse_vector, order)[0]
        )

    best_order = max(rdp.ORDERS.tolist(), key=count_copies)
    best = PrivacyFilter(kind="rdp", epsilon=10, delta=1e-5, delta_reserve=1e-6, order=best_order)
    assert best.to_epsilon(best.compute_cost(answers)) > 9
    assert account.to_epsilon(account.compute_cost(answers)) < 0.7  # 0.561 by the exact Gaussian cost
    assert count_copies(account.order) >= 0.98 * count_copies(best_order)
    assert account.admits(account.compute_cost(sparse_vector), account.compute_cost(answers))
    filled = filter_of(PureDPEvent(epsilon=4.0), epsilon=4.1)  # the plan still fits at the chosen order
    assert filled.admits_release([PureDPEvent(epsilon=4.0)])


def test_a_filter_is_never_below_the_fixed_cost():
    """What an adaptive account is charged covers what a fixed list of the same events would cost."""
    for event in (GaussianEvent(mu=0.3, count=2), LaplaceEvent(ratio=0.1, count=50), ZCDPEvent(rho=0.05, count=3)):
        events = [event]
        account = filter_of(*events, epsilon=5)
        assert account.to_epsilon(account.compute_cost(events)) >= compute_guarantee(events, 1e-5).epsilon * (1 - 1e-9)


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
        PrivacyFilter(**{"epsilon": 1.0, "delta": 1e-5, **bad})


def test_a_cap_too_small_for_renyi_is_said():
    # At delta near 1e-300 even the largest order of the grid converts a zero divergence to 0.68.
    with pytest.raises(ValueError, match="too small"):
        filter_of(ZCDPEvent(rho=0.1), epsilon=0.1, delta=1e-300)
    with pytest.raises(ValueError):
        FilterCost(math.nan)


# ---- DP-SGD

RUN = SampledGaussianEvent(rate=0.05, noise_multiplier=4.0, steps=20)


def gdp_filter(reserve=1e-6, epsilon=2.0):
    return PrivacyFilter(kind="gdp", epsilon=epsilon, delta=1e-5, delta_reserve=reserve)


def test_a_gdp_filter_charges_dp_sgd_as_a_gaussian_and_a_failure():
    account = gdp_filter()
    (run,) = account.choose_failures([RUN], FilterCost())
    assert run == replace(RUN, failure_delta=run.failure_delta) and 2.49e-7 <= run.failure_delta <= 2.5e-7
    mu = domination.compute_dominating_gaussian(RUN, run.failure_delta)
    assert account.compute_cost([run]) == FilterCost(mu**2, run.failure_delta)
    cost = account.compute_cost([GaussianEvent(mu=0.1, count=9), replace(run, count=2), DeltaEvent(delta=1e-8)])
    assert cost.scalar == pytest.approx(0.09 + 2 * mu**2, rel=1e-12)
    assert cost.delta == pytest.approx(2 * run.failure_delta + 1e-8, rel=1e-12)
    assert account.admits(FilterCost(), cost)


def test_all_runs_together_get_a_quarter_of_what_is_left_rounded_down():
    account, other = gdp_filter(), replace(RUN, steps=21)
    first, gaussian, second = account.choose_failures(
        [replace(RUN, count=2), GaussianEvent(mu=0.1), other], FilterCost(0.1, 3e-7)
    )
    assert gaussian == GaussianEvent(mu=0.1) and first.failure_delta == second.failure_delta
    assert first.failure_delta == 5.83e-8 <= 7e-7 / 4 / 3 < 5.84e-8
    assert account.choose_failures([first], FilterCost()) == (first,)  # a chosen one stays
    total = FilterCost()
    for _ in range(40):  # the reserve is never spent by these runs alone
        total = FilterCost.from_sum([total, account.compute_cost(account.choose_failures([RUN], total)[:1])])
        assert total.delta < account.delta_reserve
        if total.delta > 9e-7:
            break


def test_without_a_reserve_the_error_names_the_kind_of_account():
    full = FilterCost(0.1, 1e-6)
    for account, past in ((gdp_filter(0.0), FilterCost()), (gdp_filter(), full)):
        assert account.choose_failures([RUN], past) == (RUN,)
        with pytest.raises(ValueError, match=r"sampled|SampledGaussian.*filter=rdp.*delta is left in reserve"):
            account.compute_cost([RUN])
    with pytest.raises(ValueError, match=r"no Gaussian mechanism is known.*filter=rdp"):
        gdp_filter().compute_cost([replace(RUN, rate=1.0, noise_multiplier=0.1, steps=1000, failure_delta=1e-7)])


def test_an_account_opened_for_dp_sgd_charges_the_dominating_gaussian_if_there_is_one():
    assert filter_of(RUN).kind == filter_of(RUN, GaussianEvent(mu=0.1)).kind == "gdp"
    assert filter_of(RUN, delta_reserve=0.0).kind == filter_of(RUN, PureDPEvent(epsilon=0.1)).kind == "rdp"
    assert filter_of(replace(RUN, rate=1.0, noise_multiplier=0.1, steps=1000), epsilon=1e6).kind == "rdp"


def test_an_rdp_filter_charges_dp_sgd_at_its_order_without_a_failure():
    account = filter_of(RUN, kind="rdp")
    assert account.order in rdp.ORDERS
    assert account.choose_failures([RUN], FilterCost()) == (RUN,)
    (divergence,) = rdp.compute_curve([RUN], account.order)
    cost = account.compute_cost([replace(RUN, count=3)])
    assert cost.scalar == pytest.approx(3 * divergence, rel=1e-12) and cost.delta == 0
