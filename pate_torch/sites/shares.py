"""Shares of noise: the noise that each site adds, and the privacy cost of the sum of the honest sites' shares.

Each of H sites adds an independent discrete Gaussian number of parameter s to every number of its table, and at most t
sites leave their share out or reveal it, so the sum always has H - t shares. The sum of discrete Gaussian numbers is
not a discrete Gaussian number, but nearly (Kairouz, Liu & Steinke 2021, "The distributed discrete Gaussian mechanism"):
for n shares, |ln P[sum = z] - ln N_Z(0, n s^2)(z)| <= tau/2 with tau = 10 sum_{k<n} exp(-2 pi^2 s^2 k/(k+1)).

``accounting.discrete_gaussian`` computes the price. Its additional delta is negligible, because tables of counts are
multiplied by ``tables.COUNT_STEPS`` before noise is added.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

from pate_torch.accounting import discrete_gaussian
from pate_torch.accounting.accountant import Guarantee, compute_guarantee
from pate_torch.accounting.events import PrivacyEvent
from pate_torch.core import checks

SAMPLER, ACCOUNTING = "discrete gaussian 1", "shares 1"
MIN_SHARE = 3
"""Smallest parameter of a share. The sum of such shares is a discrete Gaussian number up to a factor of 1 + 1e-36."""
_SHARE_STEPS = 1 << 16  # shares are multiples of 2^-16


@dataclass(frozen=True, kw_only=True)
class TableChange:
    """How far one unit at one site can change the table of a round.

    Attributes:
        length_squared: Square of the table's L2 sensitivity, in the whole numbers of the table.
        numbers: Number of numbers in the table.
    """

    length_squared: int
    numbers: int

    def __post_init__(self) -> None:
        checks.integer("numbers", self.numbers, low=1)
        checks.integer("length_squared", self.length_squared, low=1)


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
        problem = f"must be at least {MIN_SHARE}: the sum of smaller shares has another law than the price assumes"
        raise checks.error("share", str(share), problem, "Use more noise, or fewer sites.")
    if honest * share.numerator**2 * sigma.denominator**2 < sigma.numerator**2 * share.denominator**2:
        problem = f"is too small: {honest} shares have less noise than sigma={sigma}"
        raise checks.error("share", str(share), problem, "The joiner must compute the share anew.")


def _count_honest(num_sites: int, colluding: int) -> int:
    checks.integer("sites", num_sites, low=1)
    return num_sites - checks.integer("colluding", colluding, 0, num_sites - 1)


# ---- prices ----------------------------------------------------------------------------------------------------------


def compute_events(
    change: TableChange, share: Fraction, honest: int, *, max_sites_per_unit: int = 1
) -> tuple[PrivacyEvent, ...]:
    """Compute the events of a round whose noise is the sum of the shares of ``honest`` sites.

    Args:
        change: Effect of a unit at one site on the table.
        share: Parameter of each share.
        honest: Number of shares that the attacker does not know.
        max_sites_per_unit: Number M of sites at which a unit may have records; the lengths of its changes add up.
    """
    checks.integer("honest", honest, low=1)
    checks.integer("max_sites_per_unit", max_sites_per_unit, low=1)
    if share < MIN_SHARE:
        raise checks.error("share", str(share), f"must be at least {MIN_SHARE}")
    variance = honest * share**2
    return discrete_gaussian.make_events(
        math.sqrt(max_sites_per_unit**2 * change.length_squared / variance),
        float(variance),
        numbers=change.numbers,
        tau=discrete_gaussian.bound_tau(float(share), honest),
    )


def compute_guarantees(
    change: TableChange,
    share: Fraction,
    num_sites: int,
    *,
    delta: float,
    adjacency: str,
    unit: str,
    max_sites_per_unit: int = 1,
) -> dict[int, Guarantee]:
    """Compute the guarantee against every number of colluding sites, 0 to H - 1.

    Number 0 is the guarantee against readers who see the results only and know the noise of no site.
    """
    guarantees = {}
    for colluding in range(num_sites):
        events = compute_events(change, share, num_sites - colluding, max_sites_per_unit=max_sites_per_unit)
        guarantees[colluding] = compute_guarantee(events, delta, adjacency=adjacency, unit=unit)
    return guarantees
