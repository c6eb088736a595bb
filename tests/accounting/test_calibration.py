"""Calibrated noise meets its target, and less noise does not."""

import math

import numpy as np
import pytest

from pate_torch.accounting.calibration import calibrate_noise, calibrate_sigma, compute_epsilon
from pate_torch.accounting.costs import ConfidentCost, GaussianNoisyMaxCost, LaplaceNoisyMaxCost
from pate_torch.accounting.events import GaussianEvent, ZCDPEvent


def gnmax(queries):
    return lambda sigma: [GaussianEvent(mu=math.sqrt(2) / sigma, count=queries)]


def test_oracle_noise():
    # The oracle's dense grid of orders lies 1e-6 above the best real order.
    by_renyi = calibrate_sigma(gnmax(286), epsilon=2, delta=1e-5, accountant="rdp")
    assert 51.3992441 * (1 - 2e-6) <= by_renyi <= 51.3992441


def test_out_of_reach_is_said():
    with pytest.raises(ValueError, match="out of reach"):
        calibrate_sigma(lambda s: [ZCDPEvent(rho=1.0), GaussianEvent(mu=1 / s)], epsilon=0.5, delta=1e-5)
    with pytest.raises(ValueError, match="accountant"):
        calibrate_sigma(lambda s: [ZCDPEvent(rho=1 / s)], epsilon=0.5, delta=1e-5, accountant="gdp")


# ---- costs of mechanisms --------------------------------------------------------------------------------------------

GNMAX, LNMAX = GaussianNoisyMaxCost(40), LaplaceNoisyMaxCost(40)


def test_accountants_of_one_cost():
    """Values of the literature and of dense grids of orders; 286 queries at delta 1e-5."""
    known = {"best": 2.43535974942, "gdp": 2.43535974942, "rdp": 2.64240142, "zcdp": 3.0478512020}
    for accountant, epsilon in known.items():
        assert compute_epsilon(GNMAX, 286, delta=1e-5, accountant=accountant) == pytest.approx(epsilon, rel=1e-8)
    by_pld = compute_epsilon(GNMAX, 286, delta=1e-5, accountant="pld")
    assert 1 < by_pld / 2.43535974942 < 1 + 1e-7
    for accountant, epsilon in {"best": 2.4179, "pld": 2.4179, "rdp": 2.6211, "pure": 14.3}.items():
        assert compute_epsilon(LNMAX, 286, delta=1e-5, accountant=accountant) == pytest.approx(epsilon, abs=1e-4)


def test_several_costs_compose():
    """mu^2 adds up: 100 queries at sigma 40 and 400 at sigma 80 cost what 200 at sigma 40 cost."""
    together = compute_epsilon([GNMAX, GaussianNoisyMaxCost(80)], [100, 400], delta=1e-5)
    assert together == pytest.approx(compute_epsilon(GNMAX, 200, delta=1e-5), rel=1e-12)
    assert compute_epsilon([GNMAX, LNMAX], (0, 0), delta=1e-5) == 0
    assert compute_epsilon([GNMAX, LNMAX], np.array([5, 0]), delta=1e-5) == compute_epsilon(GNMAX, 5, delta=1e-5)


@pytest.mark.parametrize(
    ("make_cost", "queries", "accountant"),
    [
        (GaussianNoisyMaxCost, 1000, "best"),
        (GaussianNoisyMaxCost, 1000, "rdp"),
        (LaplaceNoisyMaxCost, 200, "rdp"),
        (lambda sigma: ConfidentCost(sigma, screen_sigma=4 * sigma), 500, "best"),
        (lambda sigma: [GaussianNoisyMaxCost(sigma), GaussianNoisyMaxCost(100)], [200, 100], "gdp"),
    ],
)
def test_calibrated_noise_of_a_cost_is_the_smallest(make_cost, queries, accountant):
    noise = calibrate_noise(make_cost, queries, epsilon=1.0, delta=1e-5, accountant=accountant)
    assert compute_epsilon(make_cost(noise), queries, delta=1e-5, accountant=accountant) <= 1
    assert compute_epsilon(make_cost(noise * (1 - 1e-7)), queries, delta=1e-5, accountant=accountant) > 1


def test_published_noise():
    assert calibrate_noise(GaussianNoisyMaxCost, 286, epsilon=2, delta=1e-5) == pytest.approx(47.6850582, abs=6e-8)
    # LZCW21 adds N(0, s1^2) to one of two counts, which is GNMax with sqrt(2) s1; its own formula gives s1 = 80.533.
    sigma = calibrate_noise(GaussianNoisyMaxCost, 293, epsilon=1, delta=1 / 39073)
    assert sigma / math.sqrt(2) == pytest.approx(60.169, abs=6e-4)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: compute_epsilon(GNMAX, -1, delta=1e-5), "num_queries=-1"),
        (lambda: compute_epsilon(GNMAX, 1.5, delta=1e-5), "num_queries=1.5"),
        (lambda: compute_epsilon(GNMAX, [1, 2], delta=1e-5), "num_queries"),
        (lambda: compute_epsilon([GNMAX, GNMAX], 100, delta=1e-5), "num_queries=100: must be one number for each"),
        (lambda: compute_epsilon(GNMAX, 1, delta=0), "delta=0"),
        (lambda: compute_epsilon(GNMAX, 1, delta=1e-5, accountant="rpd"), "accountant='rpd': must be one of best, gdp"),
        (lambda: compute_epsilon(LNMAX, 1, delta=1e-5, accountant="gdp"), "do not cover these mechanisms"),
        (lambda: compute_epsilon(40.0, 1, delta=1e-5), "cost=40.0"),
        (lambda: calibrate_noise(GaussianNoisyMaxCost, 1, epsilon=0, delta=1e-5), "epsilon=0"),
    ],
)
def test_a_wrong_argument_is_named(wrong, message):
    with pytest.raises(ValueError, match=message):
        wrong()
