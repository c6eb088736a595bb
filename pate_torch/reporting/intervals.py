"""Intervals for shares: an accuracy measured on some hundred points is known to a few percent, and is shown so."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

from pate_torch import checks

Z95 = 1.959963984540054


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
        return None if self.size is None else wilson(self.value, self.size)


def wilson(share: float, size: int, z: float = Z95) -> tuple[float, float]:
    """Wilson's score interval (1927, without continuity correction): stays inside [0, 1], and honest near its ends."""
    checks.between("share", share, 0, 1)
    checks.integer("size", size, low=1)
    spread = z * z / size
    centre = (share + spread / 2) / (1 + spread)
    half = z / (1 + spread) * sqrt(share * (1 - share) / size + spread / (4 * size))
    return max(0.0, centre - half), min(1.0, centre + half)
