"""Calibrated noise meets its target, and less noise does not."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pate_torch.accounting.accountant import compute_guarantee
from pate_torch.accounting.calibration import calibrate_sigma, compute_epsilon
from pate_torch.accounting.events import (
    BoundedRangeEvent,
    DeltaEvent,
    GaussianEvent,
    LaplaceEvent,
    PureDPEvent,
    ZCDPEvent,
)


def gnmax(queries):
    return lambda sigma: [GaussianEvent(mu=math.sqrt(2) / sigma, count=queries)]


def test_oracle_noise():
    assert calibrate_sigma(gnmax(286), epsilon=2, delta=1e-5) == pytest.approx(47.6850582, abs=6e-8)
    # The oracle's dense grid of orders lies 1e-6 above the best real order.
    by_renyi = calibrate_sigma(gnmax(286), epsilon=2, delta=1e-5, route="rdp")
    assert 51.3992441 * (1 - 2e-6) <= by_renyi <= 51.3992441


@given(st.floats(0.05, 20), st.integers(1, 5000), st.floats(-25, -4))
@settings(max_examples=40, deadline=None)
def test_calibrated_noise_fits_and_less_does_not(target, queries, log_delta):
    delta = math.exp(log_delta)
    sigma = calibrate_sigma(gnmax(queries), epsilon=target, delta=delta)
    assert compute_guarantee(gnmax(queries)(sigma), delta).epsilon <= target
    assert compute_guarantee(gnmax(queries)(sigma * (1 - 1e-8)), delta).epsilon > target


@pytest.mark.parametrize(
    "plan",
    [
        lambda b: [LaplaceEvent(ratio=1 / b, count=40)],
        lambda b: [BoundedRangeEvent(eta=2 / b, count=20)],
        lambda b: [ZCDPEvent(rho=1 / b**2, count=20), DeltaEvent(delta=1e-6)],
        lambda b: [PureDPEvent(epsilon=1 / b, count=5)],
    ],
)
def test_other_mechanisms_calibrate_too(plan):
    scale = calibrate_sigma(plan, epsilon=1.5, delta=1e-5)
    assert 1.5 * (1 - 1e-4) <= compute_epsilon(plan(scale), 1e-5) <= 1.5


def test_out_of_reach_is_said():
    with pytest.raises(ValueError, match="out of reach"):
        calibrate_sigma(lambda s: [PureDPEvent(epsilon=1.0), GaussianEvent(mu=1 / s)], epsilon=0.5, delta=1e-5)
    with pytest.raises(ValueError, match="route"):
        calibrate_sigma(lambda s: [ZCDPEvent(rho=1 / s)], epsilon=0.5, delta=1e-5, route="gdp")
