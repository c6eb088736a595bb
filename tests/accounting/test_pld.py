"""Privacy loss distributions against the exact costs of composed mechanisms."""

import math

import mpmath as mp
import pytest

from pate_torch.accounting import gdp, pld, rdp
from pate_torch.accounting.accountant import compute_delta, compute_guarantee
from pate_torch.accounting.events import (
    DeltaEvent,
    GaussianEvent,
    LaplaceEvent,
    PureDPEvent,
    SampledGaussianEvent,
    ZCDPEvent,
)

mp.mp.dps = 60


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
def test_gaussian_loss_distribution_meets_the_exact_cost_from_above(mu, target):
    exact = gdp.compute_epsilon(mu, target)
    assert exact <= pld.compute_epsilon([GaussianEvent(mu=mu / 2, count=4)], target) <= exact * 1.0001


def test_laplace_loss_distribution_of_one_is_exact():
    """One Laplace: delta(eps) = 1 - e^((eps - r)/2)."""
    value = compute_delta([LaplaceEvent(ratio=0.8)], 0.3)
    assert 1 - math.exp(-0.25) <= value <= (1 - math.exp(-0.25)) * (1 + 1e-4)


def test_loss_distribution_is_left_alone_where_it_cannot_be_trusted():
    assert pld.compute_epsilon([LaplaceEvent(ratio=0.1, count=1000)], 1e-14) == math.inf
    assert not pld.can_compose([ZCDPEvent(rho=0.1)])
    assert not pld.can_compose([LaplaceEvent(ratio=1.0, count=10**6), LaplaceEvent(ratio=1e-7)])
    with pytest.raises(ValueError):
        pld.compute_epsilon([ZCDPEvent(rho=0.1)], 1e-5)


def test_one_step_on_a_sample_costs_its_closed_form():
    """For epsilon > 0 the larger direction is remove: P(mixture > x) - exp(epsilon) P(N(0, z^2) > x) at the root x."""
    q, z = mp.mpf("0.2"), mp.mpf("0.9")
    for epsilon in (0.1, 0.5, 1.5):
        e = mp.mpf(epsilon)
        x = z**2 * mp.log((mp.exp(e) - 1 + q) / q) + mp.mpf(1) / 2
        tail = mp.ncdf(-x / z)
        exact = (1 - q) * tail + q * mp.ncdf((1 - x) / z) - mp.exp(e) * tail
        value = pld.compute_delta([SampledGaussianEvent(rate=0.2, noise_multiplier=0.9, steps=1)], epsilon)
        assert exact <= value <= exact * (1 + 1e-4) + 1e-12


def test_a_full_batch_is_gaussian_and_runs_compose_with_gaussian_answers():
    runs = SampledGaussianEvent(rate=1.0, noise_multiplier=5.0, steps=4, count=2)
    exact = gdp.compute_epsilon(math.sqrt(8 / 25 + 0.04), 1e-5)
    assert exact <= pld.compute_epsilon([runs, GaussianEvent(mu=0.1, count=4)], 1e-5) <= exact * 1.0002


def test_a_run_of_dp_sgd_is_claimed_by_its_loss_distribution():
    run = SampledGaussianEvent(rate=0.05, noise_multiplier=1.2, steps=200)
    guarantee = compute_guarantee([run], 1e-5)
    assert guarantee.route == "pld"
    assert 0.85 * rdp.compute_epsilon([run], 1e-5) < guarantee.epsilon < 0.92 * rdp.compute_epsilon([run], 1e-5)
    with_failures = compute_guarantee([run, DeltaEvent(delta=1e-6)], 1e-5)
    assert with_failures.route == "pld" and with_failures.epsilon == pld.compute_epsilon([run], 1e-5 - 1e-6)


def test_a_run_that_takes_too_long_is_left_to_renyi_divergences():
    mixed = [SampledGaussianEvent(rate=0.5, noise_multiplier=0.2, steps=5), LaplaceEvent(ratio=1e-4)]
    assert not pld.can_compose(mixed)
