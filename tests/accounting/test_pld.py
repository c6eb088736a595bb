"""Privacy loss distributions against the exact prices of composed mechanisms."""

import math

import mpmath as mp
import pytest

from pate_torch.accounting import gdp, pld
from pate_torch.accounting.accountant import compute_delta
from pate_torch.accounting.events import GaussianEvent, LaplaceEvent, PureDPEvent, ZCDPEvent

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
