"""Private samples, the charge before every draw, and the sample sizes of the theorems."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pate_torch.accounting.events import PrivacyEvent
from pate_torch.core import checks
from pate_torch.privacy.accounts import PURPOSE_HYPOTHESIS
from pate_torch.privacy.noise import NoiseProvider, NoiseSource
from pate_torch.privacy.sensitive import Sensitivity

Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_REPLACE_ONE = Sensitivity(l1=math.inf, l2=math.inf, linf=math.inf, adjacency="replace_one")


class BelowGuaranteeWarning(UserWarning):
    """The sample is smaller than the theorem needs. Privacy holds, but no accuracy is promised."""


def check_points(name: str, x: Any) -> Floats:
    """Convert feature rows, or a vector of one feature, to float64 [n, D]. Raise ValueError for a non-finite value."""
    rows = np.asarray(x, dtype=np.float64)
    rows = rows[:, None] if rows.ndim == 1 else rows
    if rows.ndim != 2:
        raise checks.error(f"{name}.shape", rows.shape, "must be [points] or [points, features]")
    if not np.isfinite(rows).all():
        raise ValueError(f"{name}: every feature must be finite, because NaN cannot be ordered")
    return rows


@dataclass(frozen=True, eq=False, repr=False)
class Sample:
    """PRIVATE. Features x [n, D] and labels y [n] of records. Their number is public, and neighbors replace one record.

    ``is_usable``, bool [n], is None if all records can be used. The others keep their place.
    """

    x: Floats
    y: Bools
    is_usable: Bools | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "x", check_points("sample.x", self.x))
        y = np.asarray(self.y)
        if y.ndim != 1 or len(y) != len(self.x) or not (y.dtype == np.bool_ or np.isin(y, (0, 1)).all()):
            raise ValueError(f"sample.y: must be {len(self.x)} labels, each 0 or 1. Convert -1 to 0.")
        if len(y) == 0:
            raise ValueError("sample: must hold at least one record")
        object.__setattr__(self, "y", y.astype(bool))

    @property
    def n(self) -> int:
        return len(self.y)

    @property
    def usable(self) -> tuple[Floats, Bools]:
        """Features and labels of the usable records, which alone can be errors."""
        return (self.x, self.y) if self.is_usable is None else (self.x[self.is_usable], self.y[self.is_usable])

    def select(self, index: Ints | slice) -> Sample:
        return Sample(self.x[index], self.y[index], None if self.is_usable is None else self.is_usable[index])


def draw_without_replacement(n: int, size: int, noise: NoiseSource) -> Ints:
    """Draw a uniform subset of 0..n-1 from the noise source, because amplification needs the subset to be secret."""
    key = noise.draw_uniform((n,), torch.device("cpu")).numpy()
    return np.argpartition(key, size - 1)[:size].astype(np.int64) if size < n else np.arange(n, dtype=np.int64)


def charge_events(
    budget: NoiseProvider, events: tuple[PrivacyEvent, ...], algorithm: str
) -> AbstractContextManager[Any]:
    """Reserve the events for an algorithm, which draws its noise within the returned context.

    Raises:
        ValueError: The adjacency of the account is not replace_one, or its noise is discrete.
    """
    budget.check_adjacency(_REPLACE_ONE)
    if budget.kind == "discrete":
        problem = f"must be torch for {algorithm}, which draws floating-point noise"
        raise checks.error("noise", budget.kind, problem, "Use an account with noise=torch.")
    return budget.spend(events, mechanism=algorithm, purpose=PURPOSE_HYPOTHESIS)


def warn_below_guarantee(
    algorithm: str,
    n: int,
    sample_conditions: Iterable[tuple[str, float]],
    other_conditions: Iterable[tuple[str, int, float]] = (),
) -> None:
    """Warn about every condition of a theorem that does not hold.

    ``sample_conditions`` are pairs of a promise and the smallest n for this promise. ``other_conditions`` are triples
    of the name of a quantity, its value, and the smallest value that the theorem needs.
    """
    unmet = [f"{condition}: n >= {minimum:,.0f}" for condition, minimum in sample_conditions if n < minimum]
    for condition, value, minimum in other_conditions:
        unmet += [f"{condition} >= {minimum:,.0f}, here {value:,}"] if value < minimum else []
    if unmet:
        message = f"{algorithm}: n = {n:,} is too small for the accuracy guarantee ({'; '.join(unmet)}). "
        message += "Privacy holds, but the theorem promises no accuracy."
        warnings.warn(message, BelowGuaranteeWarning, stacklevel=3)


# ---- Sample sizes, with explicit constants in place of O(.) ----------------------------------------------------------


def compute_log_sauer_shelah(n: float, vc_dimension: int) -> float:
    """Compute ln sum_{i <= d} C(n, i)."""
    # A sum of logarithms of factors: from n = 1e15 on, the difference of two ln n! would lose all its digits.
    j = np.arange(min(int(n), vc_dimension))
    terms = np.cumsum(np.log((float(n) - j) / (j + 1)))
    return float(np.logaddexp.reduce(np.concatenate(([0.0], terms))))


def find_smallest(holds: Callable[[int], bool], low: int = 1) -> int:
    """Find the smallest integer >= low with ``holds(integer)`` by doubling and bisection. ``holds`` is monotone."""
    high = low
    while not holds(high):
        low, high = high + 1, 2 * high
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle + 1, high)
    return high


@lru_cache(maxsize=256)
def compute_net_size(eta: float, beta: float, vc_dimension: int, growth_power: int = 2) -> int:
    """Compute the number of points that form an eta-net of a class with probability at least 1 - beta.

    An eta-net meets every symmetric difference of measure above eta. m >= 8/eta points miss such a difference with
    probability at most 2 Pi(2m) 2^(-eta m/2), where the growth function Pi of the differences is at most that of the
    class to the power ``growth_power``. Sampling without replacement is no worse (DF20, after Lemma 1).

    Source: DF20 Lemma 1, with the constants of Blumer, Ehrenfeucht, Haussler & Warmuth 1989, Theorem A2.1.
    """

    def is_net(m: int) -> bool:
        log_growth = growth_power * compute_log_sauer_shelah(2 * m, vc_dimension)
        return math.log(2) + log_growth - eta * m / 2 * math.log(2) <= math.log(beta)

    return find_smallest(is_net, low=math.ceil(8 / eta))


@lru_cache(maxsize=256)
def compute_uniform_size(alpha: float, beta: float, vc_dimension: int, growth_power: int = 1) -> int:
    """Compute the number of examples that bounds all |empirical - true error| by alpha with probability 1 - beta.

    The failure probability is at most 4 Pi(2m) exp(-alpha^2 m/8). With ``growth_power`` 2, the same holds for the
    disagreement of any two hypotheses (NB20 Claim 3.6).

    Source: DF20 Lemma 3, with the constants of Vapnik & Chervonenkis 1971.
    """

    def is_enough(m: int) -> bool:
        log_growth = growth_power * compute_log_sauer_shelah(2 * m, vc_dimension)
        return math.log(4) + log_growth - alpha**2 * m / 8 <= math.log(beta)

    return find_smallest(is_enough)
