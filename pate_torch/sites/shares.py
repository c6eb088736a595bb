"""Shares of noise: the noise that each site adds, and the privacy cost of the sum of the honest sites' shares.

Each of H sites adds an independent discrete Gaussian number of parameter s to every number of its table, and at most t
sites leave their share out or reveal it, so the sum always has H - t shares. The sum of discrete Gaussian numbers is
not a discrete Gaussian number, but nearly (Kairouz, Liu & Steinke 2021, "The distributed discrete Gaussian mechanism"):
for n shares, |ln P[sum = z] - ln N_Z(0, n s^2)(z)| <= tau/2 with tau = 10 sum_{k<n} exp(-2 pi^2 s^2 k/(k+1)).

``accounting.discrete_gaussian`` computes the cost. Its additional delta is negligible, because tables of counts are
multiplied by ``tables.COUNT_STEPS`` before noise is added.
"""

from __future__ import annotations

import math
from fractions import Fraction

from pate_torch.accounting import discrete_gaussian
from pate_torch.accounting.events import PrivacyEvent
from pate_torch.core import checks

SAMPLER, ACCOUNTING = "discrete gaussian 1", "shares 1"
MIN_SHARE = 3
"""Smallest parameter of a share. The sum of such shares is a discrete Gaussian number up to a factor of 1 + 1e-36."""
_SHARE_STEPS = 1 << 16  # shares are multiples of 2^-16


def compute_share(sigma: Fraction, num_sites: int, colluding: int) -> Fraction:
    """Compute the parameter of each site's share, rounded up, so that H - t shares have the variance sigma^2."""
    honest = _count_honest(num_sites, colluding)
    square = math.ceil(sigma**2 * _SHARE_STEPS**2 / honest)
    share = Fraction(math.isqrt(square - 1) + 1, _SHARE_STEPS)
    check_share(share, sigma, num_sites, colluding)
    return share


def check_share(share: Fraction, sigma: Fraction, num_sites: int, colluding: int) -> None:
    """Raise ValueError if the shares of H - t sites have less than the variance sigma^2, or a share is below 3."""
    honest = _count_honest(num_sites, colluding)
    if share < MIN_SHARE:
        problem = f"must be at least {MIN_SHARE}: the sum of smaller shares has another law than the cost assumes"
        raise checks.error("share", str(share), problem, "Use more noise, or fewer sites.")
    if honest * share.numerator**2 * sigma.denominator**2 < sigma.numerator**2 * share.denominator**2:
        problem = f"is too small: {honest} shares have less noise than sigma={sigma}"
        raise checks.error("share", str(share), problem, "The joiner must compute the share anew.")


def _count_honest(num_sites: int, colluding: int) -> int:
    checks.integer("sites", num_sites, low=1)
    return num_sites - checks.integer("colluding", colluding, 0, num_sites - 1)


def compute_events(squared_length: int, numbers: int, share: Fraction, honest: int) -> tuple[PrivacyEvent, ...]:
    """Compute the events of a round whose noise is the sum of the shares of ``honest`` sites.

    Args:
        squared_length: Square of the L2 length by which one unit can change the sum over all sites, in whole numbers.
        numbers: Number of numbers in the table.
        share: Parameter of each share.
        honest: Number of shares that the attacker does not know.
    """
    for name, value in (("squared_length", squared_length), ("numbers", numbers), ("honest", honest)):
        checks.integer(name, value, low=1)
    if share < MIN_SHARE:
        raise checks.error("share", str(share), f"must be at least {MIN_SHARE}")
    variance = honest * share**2
    return discrete_gaussian.make_events(
        math.sqrt(squared_length / variance),
        float(variance),
        numbers=numbers,
        tau=discrete_gaussian.bound_tau(float(share), honest),
    )
