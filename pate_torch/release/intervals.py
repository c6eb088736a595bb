"""Shares with their intervals: an accuracy measured on some hundred points is known to a few percent."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

from scipy.optimize import brentq

from pate_torch.core import checks

Z95 = 1.959963984540054


def format_percent(value: float, digits: int = 1) -> str:
    """The share as a percentage: 0.974 -> '97.4 %'."""
    return f"{100 * value:.{digits}f} %"


@dataclass(frozen=True, kw_only=True)
class Share:
    """A share of ``size`` points with its 95 % interval [low, high]; no interval (None) where the size is unknown."""

    value: float
    size: int | None = None

    def __post_init__(self) -> None:
        checks.between("share", self.value, 0, 1)
        if self.size is not None:
            checks.integer("share.size", self.size, low=1)

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % interval; None where the size is unknown."""
        return None if self.size is None else compute_wilson_interval(self.value, self.size)

    @property
    def interval_words(self) -> str:
        """The interval in percent, as in '96.1 to 98.3'; empty where it is not known."""
        return "" if self.interval is None else "{:.1f} to {:.1f}".format(*(100 * end for end in self.interval))

    def __str__(self) -> str:
        """Return '97.4 % (96.1 to 98.3)'."""
        return format_percent(self.value) + (f" ({self.interval_words})" if self.size else "")


def compute_wilson_interval(share: float, size: int, z: float = Z95) -> tuple[float, float]:
    """Wilson's score interval (1927, without continuity correction): stays inside [0, 1], and honest near its ends."""
    checks.between("share", share, 0, 1)
    checks.integer("size", size, low=1)
    z2_over_size = z * z / size
    center = (share + z2_over_size / 2) / (1 + z2_over_size)
    half_width = z / (1 + z2_over_size) * sqrt(share * (1 - share) / size + z2_over_size / (4 * size))
    return max(0.0, center - half_width), min(1.0, center + half_width)


def compute_difference_interval(
    first: float, first_size: int, second: float, second_size: int, z: float = Z95
) -> tuple[float, float]:
    """The interval for the difference of two shares of independent samples, from both of their Wilson intervals.

    Source: Newcombe 1998, *Interval estimation for the difference between independent proportions*, method 10.
    """
    gap = first - second
    (low, high), (other_low, other_high) = (
        compute_wilson_interval(first, first_size, z),
        compute_wilson_interval(second, second_size, z),
    )
    return gap - sqrt((first - low) ** 2 + (other_high - second) ** 2), gap + sqrt(
        (high - first) ** 2 + (second - other_low) ** 2
    )


def compute_auc_interval(auc: float, first_size: int, second_size: int, z: float = Z95) -> tuple[float, float]:
    """The interval for the area under a ROC curve: all areas whose own spread explains the one seen, as Wilson's does.

    The spread of area a is that of Hanley & McNeil 1982 with equal sizes' weights; it is exact at a = 1/2.

    Source: Newcombe 2006, *Confidence intervals for an effect size measure based on the Mann-Whitney statistic*, part
    2, method 5.
    """
    checks.between("auc", auc, 0, 1)
    checks.integer("size", min(first_size, second_size), low=1)
    mean_size_minus_1 = (first_size + second_size) / 2 - 1

    def compute_excess(a: float) -> float:
        variance = (
            a * (1 - a) * (1 + mean_size_minus_1 * ((1 - a) / (2 - a) + a / (1 + a))) / (first_size * second_size)
        )
        return (auc - a) ** 2 - z * z * variance

    margin = 1e-12  # an area of 0 or 1 explains itself and nothing else: the other end of the interval is looked for
    return (
        0.0 if auc == 0 else float(brentq(compute_excess, 0.0, auc - margin)),
        1.0 if auc == 1 else float(brentq(compute_excess, auc + margin, 1.0)),
    )
