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

import functools
import math
from dataclasses import dataclass

import torch
from scipy.special import beta, betainc
from torch import Tensor

from pate_torch.accounting import calibration, events
from pate_torch.accounting.events import Event
from pate_torch.core import checks
from pate_torch.mechanisms.base import VoteMechanism
from pate_torch.noise.source import NoiseSource
from pate_torch.types import Context


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

    lambda is the least at which the blocks, pure 2/lambda each, cost epsilon by the tightest accountant. The rest: some
    test whose winner differs between neighbors (then dist = 0) passes. Let w + L_b be the thresholds. Given them all,
    such a test passes with probability at most Q exp(-(w + L_b)/(2 lambda)), Q = P(Lap(2 lambda) >= 0), whatever was
    asked and answered before it; so one of all tests does with probability at most

        tests Q exp(-w/(2 lambda)) E[max_b exp(-L_b/(2 lambda))],

    which is delta/2 at w. A threshold that happens to be low serves more tests: the maximum allows for that, where the
    tail of the difference of the two noises would not.
    """
    scale = _least_scale(epsilon, delta, blocks)
    # On the integers the mass at 0 makes the tail a little above 1/2.
    tail = 1 / (1 + math.exp(-1 / (2 * scale))) if discrete else 0.5
    bound = tests * tail * _lowest_threshold(blocks, scale if discrete else None)
    return Calibration(scale=scale, threshold=max(0.0, 2 * scale * math.log(2 * bound / delta)), blocks=blocks)


@functools.lru_cache(maxsize=1024)
def _least_scale(epsilon: float, delta: float, blocks: int) -> float:
    def price(scale: float) -> tuple[Event, ...]:
        return (events.PureDP(epsilon=2 / scale, count=blocks), events.Delta(delta=delta / 2))

    return calibration.smallest_sigma(price, epsilon=epsilon, delta=delta)


def _lowest_threshold(blocks: int, scale: float | None) -> float:
    """E[max_b exp(-L_b/(2 scale))] of ``blocks`` independent L_b ~ Lap(scale), or more, on the integers; None: reals.

    With F the law of X = exp(-L/(2 scale)): 1 - F(x) <= high/x^2 where x >= 1, and F(x) >= low x^2 where x <= 1 (high =
    low = 1/2 on the reals), and E[max X] is the integral of 1 - F^blocks.
    """
    high = 0.5 if scale is None else 1 / (1 + math.exp(-1 / scale))
    low = 0.5 if scale is None else high * math.exp(-1 / scale)
    below_1 = 1 - low**blocks / (2 * blocks + 1)
    # By parts, with the integral of (1 - high u^2)^(blocks - 1) over u = 1/x as an incomplete beta function.
    inner = beta(0.5, blocks) * betainc(0.5, blocks, high) / (2 * math.sqrt(high))
    above_1 = 2 * high * blocks * float(inner) - 1 + (1 - high) ** blocks
    return below_1 + above_1


@dataclass(frozen=True, kw_only=True)
class SparseVector(VoteMechanism):
    """Base of the mechanisms that pay per failure. Subclasses answer; this prices and calibrates.

    A threshold serves until its first failure, over any number of calls: T blocks are paid for.

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

    def tests(self, num_queries: int, num_classes: int) -> int:
        """How many noisy tests ``num_queries`` queries can take."""
        return num_queries

    def calibration(self, num_queries: int, num_classes: int = 2) -> Calibration:
        """The scales of a release of ``num_queries``."""
        return calibrate(
            epsilon=self.epsilon,
            delta=self.delta,
            blocks=self.max_failures,
            tests=max(1, self.tests(num_queries, num_classes)),
            discrete=self.discrete,
        )

    def check(self, *, num_queries: int, num_teachers: int, num_classes: int, rounds: int = 1) -> None:
        """Refuse an ensemble too small to pass a test even when unanimous.

        Raises:
            ValueError: There are too few teachers; the message says how many it takes.
        """
        super().check(num_queries=num_queries, num_teachers=num_teachers, num_classes=num_classes, rounds=rounds)
        calibration = self.calibration(num_queries, num_classes)
        if num_teachers < calibration.teachers_needed:
            raise checks.fail(
                "num_teachers",
                num_teachers,
                f"must be at least {calibration.teachers_needed} for mechanism={self.name}: at "
                f"epsilon={self.epsilon:g}, delta={self.delta:g}, max_failures={self.max_failures}, "
                f"{num_queries} queries it needs lambda={calibration.scale:.1f} and w={calibration.threshold:.1f}, "
                "and only a gap above 2w passes",
                "Take more teachers, fewer failures, a larger epsilon, or mechanism=gaussian.",
            )

    def worst_case(self, num_queries: int, rounds: int = 1) -> tuple[Event, ...]:
        """The price of every block that may be started, and one delta."""
        return self._events(self.max_failures, num_queries)

    def _events(self, blocks: int, num_queries: int, *, first: bool = True) -> tuple[Event, ...]:
        pure = 2 / self.calibration(num_queries).scale
        return (
            events.PureDP(epsilon=pure, count=blocks),
            events.Delta(delta=self.delta / 2, count=int(first)),
        )


class Blocks:
    """The thresholds of a release: drawn when first needed, kept from call to call, gone after a failure.

    Args:
        calibration: The scales.
        noise: Draws the thresholds, and keeps the present one.
        device: Device of the noisy distances.
        context: Says whether this is the release's first call.
    """

    def __init__(self, calibration: Calibration, noise: NoiseSource, device: torch.device, context: Context) -> None:
        self._calibration, self._noise, self._device, self._kept = calibration, noise, device, noise.kept
        if context.turn == 0:
            assert not context.answered and not context.failures
            self._kept.clear()
            self._kept.update(failures=0, blocks=0)
        elif "blocks" not in self._kept:
            raise ValueError("noise: a later call goes on with the thresholds of the first, and here are none")
        self._before = self.blocks

    @property
    def blocks(self) -> int:
        """How many thresholds the release has drawn."""
        return int(self._kept["blocks"])

    @property
    def started(self) -> int:
        """How many this call has drawn."""
        return self.blocks - self._before

    @property
    def first(self) -> bool:
        """Whether the release's first threshold is among them."""
        return self._before == 0 < self.blocks

    @property
    def stopped(self) -> bool:
        """Whether the last failure allowed has happened."""
        return self._kept["failures"] >= self._calibration.blocks

    def threshold(self) -> float:
        """The noisy threshold w_hat of the present block."""
        assert not self.stopped
        if "threshold" not in self._kept:
            self._kept["blocks"] += 1
            noise = self._noise.laplace((1,), self._calibration.scale, self._device)
            self._kept["threshold"] = self._calibration.threshold + float(noise)
        return self._kept["threshold"]

    def fail(self) -> None:
        """End the block."""
        self._kept["failures"] += 1
        del self._kept["threshold"]

    def next_failure(self, noisy_Q: Tensor, start: int) -> int:
        """The first index from ``start`` on whose noisy distance does not exceed w_hat; len(noisy_Q) if none.

        Between failures the threshold stands still, so one pass finds the next, where the paper tests query by query.
        """
        below = (noisy_Q[start:] <= self.threshold()).nonzero()
        return start + int(below[0]) if len(below) else len(noisy_Q)
