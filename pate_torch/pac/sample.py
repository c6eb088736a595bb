"""Private labeled sample of the PAC algorithms, and what they all do before they draw anything."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pate_torch.accounting.events import PrivacyEvent
from pate_torch.core import checks
from pate_torch.privacy.budget import NoiseProvider
from pate_torch.privacy.ledger import PURPOSE_HYPOTHESIS
from pate_torch.privacy.noise import NoiseSource
from pate_torch.privacy.sensitive import Sensitivity

Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class BelowGuaranteeWarning(UserWarning):
    """The sample is smaller than the theorem needs: privacy holds, the accuracy guarantee says nothing."""


class NoisyVotesWarning(UserWarning):
    """The noise outweighs the votes: few labels are better than guesses."""


def check_points(name: str, x: Any) -> Floats:
    """Feature rows as float64 [n, D]; a vector becomes one column.

    Raises:
        ValueError: NaN, infinities or another shape.
    """
    rows = np.asarray(x, dtype=np.float64)
    rows = rows[:, None] if rows.ndim == 1 else rows
    if rows.ndim != 2:
        raise checks.error(f"{name}.shape", rows.shape, "must be [points] or [points, features]")
    if not np.isfinite(rows).all():
        raise ValueError(f"{name}: every feature must be finite (a NaN has no place in an ordering)")
    return rows


@dataclass(frozen=True, eq=False, repr=False)
class Sample:
    """PRIVATE. Labeled records, whose number n is public.

    Attributes:
        x: float64 [n, D].
        y: bool [n].
        adjacency: What a neighbor is. The algorithms here are stated for "replace_one" with a public n (sub-sampling,
            means and nets all use n); ``check_replace_one`` refuses anything else.
    """

    x: Floats
    y: Bools
    adjacency: str = "replace_one"

    def __post_init__(self) -> None:
        checks.one_of("adjacency", self.adjacency, ("add_remove", "replace_one"))
        object.__setattr__(self, "x", check_points("sample.x", self.x))
        y = np.asarray(self.y)
        if y.ndim != 1 or len(y) != len(self.x) or not (y.dtype == np.bool_ or np.isin(y, (0, 1)).all()):
            raise ValueError(f"sample.y: must be {len(self.x)} labels, each 0 or 1 (map -1/+1 to 0/1 first)")
        if len(y) == 0:
            raise ValueError("sample: must hold at least one record")
        object.__setattr__(self, "y", y.astype(bool))

    @property
    def n(self) -> int:
        """Number of records."""
        return len(self.y)

    def select(self, index: Ints | slice) -> Sample:
        """The records of these positions."""
        return Sample(self.x[index], self.y[index], self.adjacency)

    def replace_labels(self, y: Bools) -> Sample:
        """The same points with other labels."""
        return Sample(self.x, y, self.adjacency)

    def __repr__(self) -> str:
        return "Sample(content withheld)"


def draw_without_replacement(n: int, size: int, noise: NoiseSource) -> Ints:
    """A uniformly random subset of 0..n-1, from the noise source: amplification by sampling needs it kept secret."""
    key = noise.draw_uniform((n,), torch.device("cpu")).numpy()
    return np.argpartition(key, size - 1)[:size].astype(np.int64) if size < n else np.arange(n, dtype=np.int64)


def draw_with_replacement(n: int, size: int, noise: NoiseSource) -> Ints:
    """``size`` independent uniform draws from 0..n-1, from the noise source."""
    return np.floor(noise.draw_uniform((size,), torch.device("cpu")).numpy() * n).astype(np.int64)


def check_replace_one(sample: Sample, algorithm: str) -> None:
    """Refuse a sample whose adjacency the algorithm's proof does not cover."""
    if sample.adjacency != "replace_one":
        raise checks.error(
            "sample.adjacency",
            sample.adjacency,
            f"{algorithm} is private for replace_one with a public n only",
            "Removing a record changes n, and with it every sub-sample and every mean.",
        )


REPLACE_ONE_SENSITIVITY = Sensitivity(l1=math.inf, l2=math.inf, linf=math.inf, adjacency="replace_one")
"""All of these algorithms are private with regard to a record that is replaced, each by its own argument."""


def charge_events(
    budget: NoiseProvider, events: tuple[PrivacyEvent, ...], algorithm: str
) -> AbstractContextManager[Any]:
    """Charge first, then noise: every algorithm draws within this.

    Raises:
        ValueError: An account of another adjacency.
    """
    budget.check_adjacency(REPLACE_ONE_SENSITIVITY)
    check_noise_kind(budget, algorithm)
    return budget.spend(events, mechanism=algorithm, purpose=PURPOSE_HYPOTHESIS)


def check_noise_kind(budget: NoiseProvider, algorithm: str) -> None:
    """Refuse, before anything is charged, an account whose noise is discrete: these algorithms draw real numbers.

    Raises:
        ValueError: Names the algorithm.
    """
    if budget.kind == "discrete":
        fix = "Use an account whose noise is torch."
        raise checks.error("noise", budget.kind, f"{algorithm} is drawn in floating point", fix)


def warn_below_guarantee(
    algorithm: str,
    n: int,
    sample_conditions: Iterable[tuple[str, float]],
    other_conditions: Iterable[tuple[str, int, float]] = (),
    *,
    stack_depth: int = 0,
) -> None:
    """Warn, by name, of every condition that the sample does not meet.

    Args:
        algorithm: Its name.
        n: Records.
        sample_conditions: (What, smallest value of n).
        other_conditions: (What, how many there are, how many it takes) of anything else.
        stack_depth: How many functions stand between this call and the algorithm itself.
    """
    unmet_conditions = [f"{condition}: n >= {minimum:,.0f}" for condition, minimum in sample_conditions if n < minimum]
    unmet_conditions += [
        f"{condition} >= {minimum:,.0f}, here {value:,}"
        for condition, value, minimum in other_conditions
        if value < minimum
    ]
    if unmet_conditions:
        warnings.warn(
            f"{algorithm}: n = {n:,}: the accuracy guarantee needs more ({'; '.join(unmet_conditions)}). "
            "Privacy holds; accuracy is not promised.",
            BelowGuaranteeWarning,
            stacklevel=3 + stack_depth,
        )
