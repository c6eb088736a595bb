"""The sparse vector technique over distances to instability: what stability and soft_stability share.

    block: w_hat = w + Lap(lambda)
    each test: pass if dist + Lap(2 lambda) > w_hat; the first that does not ends the block

``dist`` counts moves of one vote that can never change the winner. Errors in print, put right here:

- The distance ``top - second (- 1)`` of BTT18 Algorithms 4 and 8 and NB20 Algorithm 5 has sensitivity 2 (halve it).
- BTT18 loops while failures <= T, which allows T + 1 (stop at T).
- BTT18 Algorithm 6 tests w = lambda ln(4m/delta) against Lap(2 lambda) noise, a factor 2 short.
- LZCW21 Algorithm 6 prints w + 1 for w + Lap(lambda).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from pate_torch.accounting import events
from pate_torch.accounting.events import Event
from pate_torch.core import checks
from pate_torch.mechanisms.base import VoteMechanism
from pate_torch.noise.source import NoiseSource


def distance(counts_QC: Tensor) -> Tensor:
    """The distance to instability max(0, ceil(gap / 2) - 1), int64 [Q].

    It has sensitivity 1, and is 0 wherever a neighbor's winner differs.
    """
    best_Q2 = counts_QC.to(torch.int64).topk(2, dim=1).values
    gap_Q = best_Q2[:, 0] - best_Q2[:, 1]
    return ((gap_Q + 1) // 2 - 1).clamp(min=0)


def teachers_to_pass(threshold: float) -> int:
    """The fewest teachers whose unanimous vote has a distance above ``threshold``."""
    return 2 * math.floor(threshold) + 3


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """The scales of one release.

    Attributes:
        scale: The noise scale lambda, in votes.
        threshold: The threshold w, in votes.
        blocks: Number of thresholds that may be drawn, each pure 2/lambda.
    """

    scale: float
    threshold: float
    blocks: int

    @property
    def teachers_needed(self) -> int:
        """Fewest teachers whose unanimous vote is answered at least every other time."""
        return teachers_to_pass(self.threshold)


def calibrate(*, epsilon: float, delta: float, blocks: int, tests: int, discrete: bool = False) -> Calibration:
    """Calibrate lambda such that ``blocks`` blocks spend (epsilon, delta/2), and w such that delta/2 covers the rest.

    rho = 2/lambda^2 per block, converted by epsilon = rho + 2 sqrt(rho ln(2/delta)) (Bun & Steinke 2016). The rest:
    some test whose winner differs between neighbors (then dist = 0) passes. Thresholds and tests are bounded apart,
    with delta/4 each, which stays true for adaptive queries; the tail of the difference of the two noises would not.
    """
    log_term = math.log(2 / delta)
    scale = (math.sqrt(2 * blocks * (epsilon + log_term)) + math.sqrt(2 * blocks * log_term)) / epsilon

    def margin(width: float, draws: int) -> float:
        # P(Z > t) = tail exp(-t/width) at most; on the integers the mass at 0 makes the tail a little above 1/2.
        tail = 1 / (1 + math.exp(-1 / width)) if discrete else 0.5
        return width * max(0.0, math.log(4 * tail * draws / delta))

    return Calibration(scale=scale, threshold=margin(scale, blocks) + margin(2 * scale, tests), blocks=blocks)


@dataclass(frozen=True, kw_only=True)
class SparseVector(VoteMechanism):
    """Base of the mechanisms that pay per failure. Subclasses answer; this prices and calibrates.

    Every call of ``release`` starts a fresh block, so T + rounds - 1 blocks are paid for.

    Attributes:
        epsilon: The epsilon of the whole release.
        delta: The delta of the whole release.
        max_failures: Number of failures, T, after which it stops.
    """

    epsilon: float
    delta: float
    max_failures: int

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.positive("mechanism.epsilon", self.epsilon)
        checks.delta("mechanism.delta", self.delta)
        checks.integer("mechanism.max_failures", self.max_failures, low=1)

    def tests(self, num_queries: int) -> int:
        """How many noisy tests ``num_queries`` queries can take."""
        return num_queries

    def calibration(self, num_queries: int, rounds: int = 1) -> Calibration:
        """The scales of a release of ``num_queries`` in ``rounds`` calls."""
        return calibrate(
            epsilon=self.epsilon,
            delta=self.delta,
            blocks=self.max_failures + rounds - 1,
            tests=max(1, self.tests(num_queries)),
            discrete=self.discrete,
        )

    def check(self, *, num_queries: int, num_teachers: int, num_classes: int, rounds: int = 1) -> None:
        """Refuse an ensemble too small to pass a test even when unanimous.

        Raises:
            ValueError: There are too few teachers; the message says how many it takes.
        """
        super().check(num_queries=num_queries, num_teachers=num_teachers, num_classes=num_classes, rounds=rounds)
        plan = self.calibration(num_queries, rounds)
        if num_teachers < plan.teachers_needed:
            raise checks.fail(
                "num_teachers",
                num_teachers,
                f"must be at least {plan.teachers_needed} for mechanism={self.name}: at epsilon={self.epsilon:g}, "
                f"delta={self.delta:g}, max_failures={self.max_failures}, {num_queries} queries in {rounds} round(s) "
                f"it needs lambda={plan.scale:.1f} and w={plan.threshold:.1f}, and only a gap above 2w passes",
                "Take more teachers, fewer failures, a larger epsilon, or mechanism=gaussian.",
            )

    def worst_case(self, num_queries: int, rounds: int = 1) -> tuple[Event, ...]:
        """The price of every block that may be started, and one delta."""
        return self._events(self.calibration(num_queries, rounds).blocks, num_queries, rounds)

    def _events(self, blocks: int, num_queries: int, rounds: int, *, first: bool = True) -> tuple[Event, ...]:
        pure = 2 / self.calibration(num_queries, rounds).scale
        return (
            events.PureDP(epsilon=pure, count=blocks),
            events.Delta(delta=self.delta / 2, count=int(first)),
        )


class Blocks:
    """The thresholds of one call of ``release``: drawn when first needed, counted, and gone after a failure.

    Args:
        plan: The scales.
        noise: Draws the thresholds.
        device: Device of the noisy distances.
        failures: Number of failures in earlier calls.
        limit: Largest number of failures, T.
    """

    def __init__(self, plan: Calibration, noise: NoiseSource, device: torch.device, failures: int, limit: int) -> None:
        self._plan, self._noise, self._device = plan, noise, device
        self._failures, self._limit = failures, limit
        self._threshold: Tensor | None = None
        self.started = 0

    @property
    def stopped(self) -> bool:
        """Whether the last failure allowed has happened."""
        return self._failures >= self._limit

    def threshold(self) -> Tensor:
        """The noisy threshold w_hat of the present block, a scalar."""
        assert not self.stopped
        if self._threshold is None:
            self.started += 1
            self._threshold = self._plan.threshold + self._noise.laplace((1,), self._plan.scale, self._device)[0]
        return self._threshold

    def fail(self) -> None:
        """End the block."""
        self._failures += 1
        self._threshold = None

    def next_failure(self, noisy_Q: Tensor, start: int) -> int:
        """The first index from ``start`` on whose noisy distance does not exceed w_hat; len(noisy_Q) if none.

        Between failures the threshold stands still, so one pass finds the next, where the paper tests query by query.
        """
        below = (noisy_Q[start:] <= self.threshold()).nonzero()
        return start + int(below[0]) if len(below) else len(noisy_Q)
