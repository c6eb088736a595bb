"""The verifier's bounds: they hold the accountant between them, and closed forms."""

import json
import math

import pytest
from mpmath import mp, mpf

from pate_torch.accounting import domination, gdp
from pate_torch.accounting.accountant import compute_guarantee
from pate_torch.accounting.events import (
    BoundedRangeEvent,
    DeltaEvent,
    GaussianEvent,
    LaplaceEvent,
    PureDPEvent,
    RdpCurveEvent,
    SampledGaussianEvent,
    ZCDPEvent,
    to_json,
)
from pate_torch.accounting.rdp import ORDERS, compute_curve, compute_epsilon
from pate_verify.costs import (
    EpsilonBounds,
    compute_bounds,
    compute_dominating_mu,
    compute_gaussian_epsilon,
)
from pate_verify.losses import compute_sampled_divergence
from pate_verify.release import check_epsilon


def priced(*events, delta=1e-5) -> EpsilonBounds:
    return compute_bounds(json.loads(to_json(events)), delta)


def is_confirmed(epsilon: float, found: EpsilonBounds) -> bool:
    check = check_epsilon("x", epsilon, found)
    return check.is_ok and check.is_checked


RELEASES = [
    (GaussianEvent(mu=0.1, count=100),),
    (GaussianEvent(mu=0.1, count=100), GaussianEvent(mu=0.3), DeltaEvent(delta=1e-6)),
    (LaplaceEvent(ratio=0.025, count=2000),),
    (LaplaceEvent(ratio=0.5, count=20),),
    (LaplaceEvent(ratio=0.005, count=10_000),),
    (LaplaceEvent(ratio=1.0),),
    (PureDPEvent(epsilon=0.1, count=30), DeltaEvent(delta=5e-6)),
    (PureDPEvent(epsilon=1.0, count=3),),
    (BoundedRangeEvent(eta=0.05, count=400),),
    (BoundedRangeEvent(eta=1.0),),
    (BoundedRangeEvent(eta=0.3), GaussianEvent(mu=0.7)),
    (PureDPEvent(epsilon=0.013, count=3), LaplaceEvent(ratio=0.2, count=100)),
    (ZCDPEvent(rho=0.01, count=50),),
    (ZCDPEvent(rho=0.01, count=50), BoundedRangeEvent(eta=0.3)),
    (
        RdpCurveEvent(orders=(2.0, 4.0, 8.0, 16.0), rdp=(0.2, 0.4, 0.8, 1.6), source="a test"),
        GaussianEvent(mu=0.3, count=4),
    ),
    (DeltaEvent(delta=1e-6),),
]


@pytest.mark.parametrize("events", RELEASES, ids=lambda events: "+".join(e.kind for e in events))
def test_the_accountant_s_cost_passes_and_one_less_by_a_hundredth_fails(events):
    found, claimed = priced(*events), compute_guarantee(events, 1e-5).epsilon
    check = check_epsilon("x", claimed, found)
    assert check.is_ok and check.is_checked and not check.is_loose, (found, claimed)
    assert found.high == 0 or not is_confirmed(0.997 * claimed, found)
    if claimed and events[0].kind != "rdp_curve":  # of a table nothing is known but what it bounds
        gap = found.high / found.low - 1  # at most 1 for one bounded range, whose lower bound is half of it
        assert gap < (1.0 if events[0].kind in ("zcdp", "bounded_range") else 2e-3), found
        assert not check_epsilon("x", claimed * (0.99 - gap), found).is_ok
        assert check_epsilon("x", claimed * (1.02 + gap), found).is_loose


@pytest.mark.parametrize(
    ("extra", "is_complete"),
    [
        (PureDPEvent(epsilon=1e100), False),
        (LaplaceEvent(ratio=150.0), False),
        (PureDPEvent(epsilon=50.0, count=10**6), False),
        (PureDPEvent(epsilon=1e-6, count=10**9), True),
        (LaplaceEvent(ratio=3e-4, count=39), True),
        (BoundedRangeEvent(eta=2e-3, count=30_000), True),
        (GaussianEvent(mu=1e3), False),
    ],
)
def test_a_further_event_never_lowers_the_bound(extra, is_complete):
    events = LaplaceEvent(ratio=0.1, count=40), PureDPEvent(epsilon=0.2)
    alone, together = priced(*events), priced(*events, extra)
    assert together.low >= 0.999 * max(alone.low, priced(extra).low) > 1
    assert together.is_complete == is_complete == check_epsilon("x", 1e101, together).is_checked
    assert not check_epsilon("x", 0.99 * alone.low, together).is_ok


@pytest.mark.parametrize("mu", [1e-4, 0.02, 0.5, 3.0, 40.0, 2e4])
@pytest.mark.parametrize("delta", [0.3, 1e-5, 1e-14])
def test_two_exact_gaussian_costs_agree(mu, delta):
    assert compute_gaussian_epsilon(mu, delta) == pytest.approx(gdp.compute_epsilon(mu, delta), rel=1e-9, abs=1e-300)


def binomial(loss: float, count: int, delta: float) -> float:
    """Epsilon of ``count`` randomized responses, from their law written out: the sum of losses is binomial."""
    with mp.workdps(40):
        p = 1 / (1 + mp.exp(-mpf(loss)))
        masses = [mp.binomial(count, k) * p**k * (1 - p) ** (count - k) for k in range(count + 1)]
        law = [((2 * k - count) * mpf(loss), mass) for k, mass in enumerate(masses)]
        low, high = mpf(0), count * mpf(loss)
        for _ in range(80):
            middle = (low + high) / 2
            over = sum(m * (1 - mp.exp(middle - at)) for at, m in law if at > middle) > delta
            low, high = (middle, high) if over else (low, middle)
        return float(high)


@pytest.mark.parametrize("loss,count", [(0.05, 300), (0.4, 25), (1.3, 4)])
def test_the_convolved_bounds_hold_a_law_written_out(loss, count):
    found, exact = priced(PureDPEvent(epsilon=loss, count=count)), binomial(loss, count, 1e-5)
    assert found.low <= exact * (1 + 1e-9) and exact <= found.high * (1 + 1e-9)
    assert found.high / found.low < 1 + 1e-4


def test_large_losses_are_bounded_as_closely_as_small_ones():
    """A Gaussian beside which a pure event is nothing; an event whose loss no double holds the exponential of."""
    found, exact = priced(GaussianEvent(mu=40.0), PureDPEvent(epsilon=1e-6)), compute_gaussian_epsilon(40.0, 1e-5)
    assert exact * (1 - 1e-4) <= found.low <= exact * (1 + 1e-6) and exact <= found.high <= exact * (1 + 1e-4)
    assert priced(PureDPEvent(epsilon=1000.0)).low == pytest.approx(1000.0 + math.log1p(-1e-5), abs=1e-4)


@pytest.mark.parametrize("delta", [0.3, 1e-12, 1e-18])
@pytest.mark.parametrize(
    "event", [LaplaceEvent(ratio=0.1, count=50), PureDPEvent(epsilon=0.4, count=20), BoundedRangeEvent(eta=2.0)]
)
def test_no_lower_bound_is_above_the_upper_one_at_any_delta(event, delta):
    found = priced(event, delta=delta)
    assert found.low <= compute_guarantee((event,), delta).epsilon * (1 + 1e-9) and found.low <= found.high < math.inf


def test_half_of_a_bounded_range_as_randomized_response_is_a_lower_bound():
    """It is one of the mechanisms of this range: its epsilon, written out, is where the lower bound lies."""
    found = priced(BoundedRangeEvent(eta=0.1, count=300))
    assert found.low == pytest.approx(binomial(0.05, 300, 1e-5), rel=1e-4) and found.high > found.low


@pytest.mark.parametrize(
    "rate,noise,steps", [pytest.param(0.01, 1.1, 200, marks=pytest.mark.slow(reason="200 convolutions")), (0.3, 2.0, 5)]
)
def test_the_sampled_gaussian_is_bounded_by_another_library_and_our_renyi_cost_is_above(rate, noise, steps):
    run = SampledGaussianEvent(rate=rate, noise_multiplier=noise, steps=steps)
    (event,) = json.loads(to_json([run]))
    found = compute_bounds([event], 1e-5)
    assert found.low < found.high < compute_epsilon([run], 1e-5) < 1.6 * found.low
    assert found.low < compute_guarantee((run,), 1e-5).epsilon < found.high * 1.001
    for order, value in zip(ORDERS[::8], compute_curve([run], ORDERS[::8]), strict=True):
        assert steps * compute_sampled_divergence(event, float(order)) == pytest.approx(value, rel=1e-7, abs=1e-15)


def test_dp_sgd_beside_gaussian_answers_is_priced_by_the_gaussian_that_dominates_it():
    run = SampledGaussianEvent(rate=0.3, noise_multiplier=2.0, steps=5, failure_delta=2.5e-7)
    events = (GaussianEvent(mu=0.3), run)
    guarantee, found = compute_guarantee(events, 1e-5), priced(*events)
    assert guarantee.route == "gdp" and found.derivation.startswith("a Gaussian")
    assert (
        check_epsilon("x", guarantee.epsilon, found).is_ok and not check_epsilon("x", guarantee.epsilon, found).is_loose
    )
    assert found.high <= guarantee.epsilon < found.high * 1.001
    (event,) = json.loads(to_json([run]))
    ours, theirs = domination.compute_dominating_gaussian(run, 2.5e-7), compute_dominating_mu(event)
    assert theirs <= ours < theirs * (1 + 3e-4)
    assert compute_dominating_mu({**event, "failure_delta": 0}) > 1e5


SAMPLED = SampledGaussianEvent(rate=0.3, noise_multiplier=8.0, steps=20)
FAILING = SampledGaussianEvent(rate=0.3, noise_multiplier=8.0, steps=20, failure_delta=1e-7)


@pytest.mark.parametrize(
    "events",
    [
        (SAMPLED,),
        (SAMPLED, SAMPLED),
        (FAILING, FAILING, GaussianEvent(mu=0.3)),
        (SAMPLED, GaussianEvent(mu=0.3), LaplaceEvent(ratio=0.3, count=3)),
        (FAILING, BoundedRangeEvent(eta=0.3)),
        (SAMPLED, ZCDPEvent(rho=0.02)),
    ],
    ids=lambda events: "+".join(e.kind for e in events),
)
def test_releases_by_dp_sgd_are_composed_with_all_others(events):
    """Each of them costs more than the dearest one, and an epsilon below the cost of all is not confirmed."""
    found, claimed = priced(*events), compute_guarantee(events, 1e-5).epsilon
    assert is_confirmed(claimed, found) and not is_confirmed(0.997 * found.high, found)
    assert found.low < found.high < 1.17 * found.low
    assert len(events) == 1 or found.low > 1.1 * max(priced(event).low for event in events if event.kind != "laplace")


def test_a_curve_alone_confirms_its_own_epsilon_only():
    found = priced(RdpCurveEvent(orders=(2.0, 4.0, 8.0, 16.0), rdp=(0.2, 0.4, 0.8, 1.6), source="a test", count=10))
    assert found.low == 0 and check_epsilon("x", 0.001, found).is_ok
    assert is_confirmed(found.high, found) and not is_confirmed(0.001, found)


def test_a_dominating_gaussian_touches_the_pure_event():
    """At epsilon = the loss both have delta 0 or more, and at its corner the same sum of errors."""
    for loss in (0.01, 0.7, 5.0):
        found = compute_dominating_mu({"kind": "pure", "epsilon": loss})
        assert found == pytest.approx(gdp.compute_mu_of_pure_epsilon(loss), rel=1e-9)


def test_events_that_fail_more_often_than_delta_have_no_epsilon():
    assert priced(GaussianEvent(mu=1.0), DeltaEvent(delta=1e-4)).low == math.inf
