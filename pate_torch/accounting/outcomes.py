"""Distributions of the answer to one question given its votes. Data-dependent prices are computed from them.

They exist for mechanisms whose answers are independent categorical draws given the votes. The interactive mechanism,
whose expectation is learned from earlier answers, the sparse vector technique and discrete noise have no data-dependent
price.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Union

from pate_torch.core import checks


class _Outcome:
    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            (checks.number if name == "threshold" else checks.positive)(name, value)


@dataclass(frozen=True, kw_only=True)
class GNMaxOutcomes(_Outcome):
    """Gaussian noisy maximum: argmax(n + N(0, sigma^2 I)); sigma in votes."""

    sigma: float


@dataclass(frozen=True, kw_only=True)
class LNMaxOutcomes(_Outcome):
    """Laplace noisy maximum: argmax(n + Lap(scale)); scale in votes."""

    scale: float


@dataclass(frozen=True, kw_only=True)
class ExponentialOutcomes(_Outcome):
    """Exponential mechanism: P(c) proportional to exp(rate * n_c); rate per vote."""

    rate: float


@dataclass(frozen=True, kw_only=True)
class ConfidentOutcomes(_Outcome):
    """Confident GNMax: no answer if max(n) + N(0, screen_sigma^2) < threshold, else GNMax(sigma); in votes."""

    screen_sigma: float
    threshold: float
    sigma: float


OutcomeModel = Union[GNMaxOutcomes, LNMaxOutcomes, ExponentialOutcomes, ConfidentOutcomes]  # noqa: UP007 (a runtime alias)
