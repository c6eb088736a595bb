"""Costs of shares of noise, against exact laws: convolutions of discrete Gaussian numbers and sums of their tails."""

import math
from fractions import Fraction

import numpy as np
import pytest
from mpmath import mp

from pate_torch.accounting import discrete_gaussian
from pate_torch.accounting.accountant import compute_guarantee
from pate_torch.accounting.discrete_gaussian import bound_tau
from pate_torch.accounting.events import ZCDPEvent
from pate_torch.accounting.gdp import compute_mu
from pate_torch.sites.shares import check_share, compute_events, compute_share


def compute_law(variance, limit):
    """Compute the probabilities of a discrete Gaussian number at -limit, ..., limit."""
    weights = [mp.exp(-(mp.mpf(z) ** 2) / (2 * mp.mpf(variance))) for z in range(-limit, limit + 1)]
    return [weight / mp.fsum(weights) for weight in weights]


@pytest.mark.parametrize(("square", "bound"), [(0.5, 5.0e-2), (1.0, 2.7e-4), (1.5, 1.9e-6)])
def test_the_sum_of_shares_is_nearly_a_discrete_gaussian_number(square, bound):
    """tau bounds the ratio of the law of the sum of 7 shares, by exact convolution, to that of one number."""
    with mp.workdps(40):
        limit = 25
        law = total = compute_law(square, limit)
        for _ in range(6):
            full = [mp.mpf(0)] * (len(total) + 2 * limit)
            for i, p in enumerate(total):
                for j, q in enumerate(law):
                    full[i + j] += p * q
            total = full
        middle = len(total) // 2
        single = compute_law(7 * square, middle)
        error = max(abs(mp.log(total[middle + z] / single[middle + z])) for z in range(-20, 21))
    share = Fraction(math.sqrt(square))
    assert 0 < error <= bound_tau(float(share), 7) / 2
    exact_tau = 10 * sum(math.exp(-2 * math.pi**2 * square * k / (k + 1)) for k in range(1, 7))
    assert exact_tau <= bound_tau(float(share), 7)
    assert exact_tau / 2 == pytest.approx(bound, rel=0.05)


def compute_exact_delta(epsilon, shift, sigma):
    """Compute the delta of a shift of a discrete Gaussian number by a sum over integers."""
    z = np.arange(-int(8 * sigma), int(8 * sigma) + 1, dtype=np.float64)
    p = np.exp(-(z**2) / (2 * sigma**2))
    shifted = np.exp(-((z - shift) ** 2) / (2 * sigma**2))
    return float(np.maximum(p - math.exp(epsilon) * shifted, 0).sum() / p.sum())


@pytest.mark.parametrize(("epsilon", "honest"), [(0.1, 1), (0.5, 7), (2.0, 7)])
def test_the_cost_covers_the_exact_delta_and_little_more(monkeypatch, epsilon, honest):
    """A table of one number, with so little noise that the sum over all integers can be computed."""
    monkeypatch.setattr(discrete_gaussian, "_MAX_LAW_DELTA", 1e-8)
    sigma = 2.5e5
    share = Fraction(math.ceil(sigma / math.sqrt(honest)))
    shift = int(0.5 * sigma)
    events = compute_events(shift**2, 1, share, honest)
    found = compute_guarantee(events, compute_exact_delta(epsilon, shift, float(share) * math.sqrt(honest)))
    assert epsilon <= found.epsilon < 1.001 * epsilon + 1e-6
    less_noise = compute_exact_delta(epsilon, shift, 0.98 * float(share) * math.sqrt(honest))
    assert compute_guarantee(events, less_noise).epsilon < epsilon  # the cost of more noise would not cover it


def test_the_cost_of_small_noise_is_zcdp():
    (event,) = compute_events(2, 10, Fraction(4), 7)
    assert isinstance(event, ZCDPEvent) and event.rho == pytest.approx(2 / (2 * 7 * 16), rel=1e-9)


@pytest.mark.parametrize("sigma", [Fraction(10), Fraction(70, 3), Fraction(10**9, 7)])
@pytest.mark.parametrize(("num_sites", "colluding"), [(3, 1), (10, 3), (10, 8)])
def test_a_share_is_rounded_up(sigma, num_sites, colluding):
    share, honest = compute_share(sigma, num_sites, colluding), num_sites - colluding
    assert honest * share**2 >= sigma**2 > honest * (share - Fraction(2, 1 << 16)) ** 2
    check_share(share, sigma, num_sites, colluding)
    with pytest.raises(ValueError, match="is too small"):
        check_share(share - Fraction(2, 1 << 16), sigma, num_sites, colluding)
    with pytest.raises(ValueError, match="at least 3"):
        check_share(Fraction(2), Fraction(1), num_sites, colluding)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("epsilon", [0.1, 0.5])
def test_the_cost_of_a_table_is_that_of_gaussian_noise_and_no_less(count, epsilon):
    """Independent of the package: the delta of a shift of Gaussian noise, with 50 digits."""
    length, honest, share = 1 << 28, 7, Fraction(5 << 28, 3)
    events = compute_events((count * length) ** 2, 2560, share, honest)
    with mp.workdps(50):
        mu, e = count * length / (mp.sqrt(honest) * share.numerator / share.denominator), mp.mpf(epsilon)
        delta = mp.ncdf(-e / mu + mu / 2) - mp.exp(e) * mp.ncdf(-e / mu - mu / 2)
        found = compute_guarantee(events, float(delta)).epsilon
    assert epsilon * (1 - 1e-12) <= found < epsilon * (1 + 1e-6)


def test_costs_of_ten_sites_against_three_of_which_the_noise_was_chosen():
    """Of epsilon .5: .41 for who sees results only, .60, .79 and 1.45 against 5, 7 and 9 sites (rounded)."""
    share = compute_share(Fraction(round(2**30 / compute_mu(0.5, 1e-5))), 10, 3)
    for colluding, epsilon in {0: 0.41, 3: 0.5, 5: 0.6, 7: 0.79, 9: 1.45}.items():
        found = compute_guarantee(compute_events(2**60, 2560, share, 10 - colluding), 1e-5).epsilon
        assert found == pytest.approx(epsilon, abs=0.005)
