"""Cost of discrete Gaussian noise with a large parameter, alone or as a sum of shares.

Let R be a Gaussian number that is rounded to an integer. For a shift by integers of length D, noise of the law of R is
D/sigma-GDP by post-processing. The law of discrete Gaussian noise N_Z(0, sigma^2) is nearly that of R: for |z| at most
T sigma, |ln N_Z(z) - ln R(z)| <= (T^2 + 1)/(8 sigma^2). A sum of n discrete Gaussian numbers of parameter s differs
from N_Z(0, n s^2) by at most tau/2 in the logarithm, for all integers, with tau = 10 sum_{k<n} exp(-2 pi^2 s^2 k/(k+1))
(Kairouz, Liu & Steinke 2021, "The distributed discrete Gaussian mechanism"). For m numbers, with e^h the largest ratio
of the laws of all noise and b the probability beyond T sigma, (epsilon, delta) of R becomes
(epsilon + 2 h, e^h delta + (1 + e^(epsilon + h)) b). The cost is therefore that of Gaussian noise, and a delta above
6 h and above all terms with b. Where this delta is not negligible, zCDP holds with rho = D^2/(2 sigma^2) and tau for
each number (Proposition 14 of the same paper; Canonne, Kamath & Steinke 2020, Theorem 14).
"""

from __future__ import annotations

import math

from pate_torch.accounting import gdp
from pate_torch.accounting.events import DeltaEvent, GaussianEvent, PrivacyEvent, ZCDPEvent

_TAIL_SDS = 24  # T: the probability beyond T standard deviations is below 1e-124
_TAIL_DELTA = 1e-60  # above all terms with the probability beyond T, for losses below 80 and fewer than 1e28 numbers
_MAX_MU = 4.0
_MAX_LAW_DELTA = 1e-9


def bound_tau(share: float, num_shares: int) -> float:
    """Bound tau of a sum of shares of parameter ``share``: all of its terms are at most that of k = 1."""
    return 10 * (num_shares - 1) * math.exp(-(math.pi**2) * share**2)


def bound_log_ratio(variance: float, tau: float = 0.0) -> float:
    """Bound |ln P[sum = z] - ln R(z)| of one number, for |z| of at most T standard deviations."""
    return (_TAIL_SDS**2 + 1) / (8 * variance) + tau / 2


def make_events(
    mu: float, variance: float, *, numbers: int, count: int = 1, tau: float = 0.0
) -> tuple[PrivacyEvent, ...]:
    """Make the events of tables of integers with discrete Gaussian noise.

    Args:
        mu: L2 sensitivity of a table over the standard deviation of the noise.
        variance: Variance of the noise of each number.
        numbers: Upper bound on the number of numbers in a table.
        count: Number of tables, each of which one unit may change.
        tau: Bound of ``bound_tau`` for a sum of shares. 0 if the noise is one discrete Gaussian number.
    """
    mu = _round_up(mu)
    law_delta = 6 * numbers * bound_log_ratio(variance, tau)
    if law_delta * max(count, 1) <= _MAX_LAW_DELTA and mu <= _MAX_MU:
        # The smallest d with delta_mu(e) + law_delta <= d + (1 - d) delta_mu(e) for all e >= 0.
        failure = _round_up((law_delta + _TAIL_DELTA) / (1 - gdp.compute_delta(0.0, mu)))
        return GaussianEvent(mu=mu, count=count), DeltaEvent(delta=failure, count=count)
    return (ZCDPEvent(rho=_round_up(mu**2 / 2 + tau * numbers), count=count),)


def _round_up(value: float) -> float:
    return value * (1 + 1e-12)
