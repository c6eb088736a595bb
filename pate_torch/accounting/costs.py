"""Costs of the mechanisms on votes: their parameters, in votes, and the privacy events that bound their cost.

Neighboring data sets differ in one privacy unit, which one teacher saw. So one vote of each query moves from one
class to another, and two counts change by 1, whether a unit is added, removed or replaced.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import KW_ONLY, dataclass, fields

from scipy.special import beta, betainc

from pate_torch.accounting import events
from pate_torch.accounting.events import PrivacyEvent
from pate_torch.core import checks


@dataclass(frozen=True)
class Cost(ABC):
    """The cost of a mechanism for any votes.

    Attributes:
        discrete: Whether the noise consists of integers. Discrete Gaussian noise is priced by zCDP, with the same rho,
            and discrete Laplace noise by pure DP.
    """

    _: KW_ONLY
    discrete: bool = False

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.name in ("sigma", "screen_sigma", "scale", "noise_scale"):
                checks.noise_scale(field.name, getattr(self, field.name), "It is a number of votes.")
        checks.boolean("discrete", self.discrete)

    @abstractmethod
    def privacy_events(self, num_queries: int) -> tuple[PrivacyEvent, ...]:
        """Return the worst-case events of ``num_queries`` queries."""

    @property
    def has_data_dependent_cost(self) -> bool:
        """Whether answers are independent categorical draws given the votes, whose cost a theorem bounds."""
        return not self.discrete and isinstance(self, OutcomeModel)

    def _make_gaussian_event(self, sigma: float, squared_sensitivity: int, count: int) -> PrivacyEvent:
        if self.discrete:
            return events.ZCDPEvent(rho=squared_sensitivity / (2 * sigma**2), count=count)
        return events.GaussianEvent(mu=math.sqrt(squared_sensitivity) / sigma, count=count)


@dataclass(frozen=True)
class GaussianNoisyMaxCost(Cost):
    """GNMax (PATE 2018, section 4.1): argmax(n + N(0, sigma^2 I)) is sqrt(2)/sigma-GDP, and so are the noisy counts."""

    sigma: float

    def privacy_events(self, num_queries: int) -> tuple[PrivacyEvent, ...]:
        return (self._make_gaussian_event(self.sigma, 2, num_queries),)


@dataclass(frozen=True)
class LaplaceNoisyMaxCost(Cost):
    """LNMax (PATE 2017, section 2.1): argmax(n + Lap(scale)), scale = 1/gamma, is 2/scale-DP with rho = 1/scale^2."""

    scale: float

    def privacy_events(self, num_queries: int) -> tuple[PrivacyEvent, ...]:
        if self.discrete:
            return (events.PureDPEvent(epsilon=1 / self.scale, count=2 * num_queries),)
        return (events.LaplaceEvent(ratio=1 / self.scale, count=2 * num_queries),)


@dataclass(frozen=True)
class ExponentialCost(Cost):
    """The exponential mechanism: P(c) ~ exp(rate n_c), with the rate per vote, has a bounded range of 2 rate."""

    rate: float

    def privacy_events(self, num_queries: int) -> tuple[PrivacyEvent, ...]:
        return (events.BoundedRangeEvent(eta=2 * self.rate, count=num_queries),)


@dataclass(frozen=True)
class ConfidentCost(Cost):
    """Confident and Interactive GNMax (PATE 2018, Algorithms 1 and 2): GNMax after a check of sensitivity 1.

    Confident GNMax answers if max(n) + N(0, screen_sigma^2) >= threshold. In the worst case all queries are answered.

    Attributes:
        sigma: Standard deviation of the noise of an answer, in votes.
        screen_sigma: Standard deviation of the noise of the check, in votes.
        threshold: Threshold of the check, in votes, which only the data-dependent cost of Confident GNMax needs.
        max_answers: Number of answers after which the mechanism stops. None if the mechanism never stops.
    """

    sigma: float
    _: KW_ONLY
    screen_sigma: float
    threshold: float | None = None
    max_answers: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.threshold is not None:
            checks.number("threshold", self.threshold, "It is a number of votes.")
        if self.max_answers is not None:
            checks.integer("max_answers", self.max_answers, low=1)

    @property
    def has_data_dependent_cost(self) -> bool:
        return not self.discrete and self.max_answers is None and self.threshold is not None

    def privacy_events(self, num_queries: int) -> tuple[PrivacyEvent, ...]:
        return self.make_events(num_queries, min(num_queries, self.max_answers or num_queries))

    def make_events(self, num_checked: int, num_answered: int) -> tuple[PrivacyEvent, ...]:
        """Make the events of these numbers of checks and of answers."""
        screen_event = self._make_gaussian_event(self.screen_sigma, 1, num_checked)
        return screen_event, self._make_gaussian_event(self.sigma, 2, num_answered)


OutcomeModel = GaussianNoisyMaxCost | LaplaceNoisyMaxCost | ExponentialCost | ConfidentCost
"""Cost whose parameters fix the distribution of each answer given the votes, as a data-dependent cost requires."""


@dataclass(frozen=True)
class SparseVectorCost(Cost):
    """The sparse vector technique (LZCW21, Algorithm 2): each threshold w + Lap(noise_scale) is (2/noise_scale)-DP.

    Attributes:
        noise_scale: Noise scale lambda of the thresholds, in votes. The noise of a test is Lap(2 lambda).
        max_failures: Number T of failed tests after which the mechanism stops, and of thresholds.
        failure_delta: Delta of a failure of privacy, which is paid once.
        num_tests: Largest number of tests.
    """

    noise_scale: float
    _: KW_ONLY
    max_failures: int
    failure_delta: float
    num_tests: int

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.integer("max_failures", self.max_failures, low=1)
        checks.delta("failure_delta", self.failure_delta)
        checks.integer("num_tests", self.num_tests, low=1)

    @property
    def threshold(self) -> float:
        """Smallest threshold w, in votes, at which failures of privacy have probability ``failure_delta``.

        A *failure of privacy* is the event that a test passes although its winner differs between neighbors, where
        dist = 0. Let w + L_b be the noisy thresholds. Given all thresholds, such a test passes with probability at most
        Q exp(-(w + L_b)/(2 lambda)), Q = P(Lap(2 lambda) >= 0), for any earlier queries and answers. The probability
        that such a test passes at all is therefore at most

            num_tests Q exp(-w/(2 lambda)) E[max_b exp(-L_b/(2 lambda))],

        and w makes this bound ``failure_delta``. The maximum over b is needed because a low threshold is used for more
        tests than a high threshold. The tail of the difference of the two noises would not be a bound.
        """
        scale = self.noise_scale
        # Integer noise is 0 with positive probability, so that its tail is slightly larger than 1/2.
        tail_probability = 1 / (1 + math.exp(-1 / (2 * scale))) if self.discrete else 0.5
        moment = _bound_max_threshold_moment(self.max_failures, scale if self.discrete else None)
        failure_bound = self.num_tests * tail_probability * moment
        return max(0.0, 2 * scale * math.log(failure_bound / self.failure_delta))

    @property
    def min_teachers(self) -> int:
        """Smallest number of teachers whose unanimous vote passes with probability at least 1/2."""
        return compute_min_teachers(self.threshold)

    def privacy_events(self, num_queries: int) -> tuple[PrivacyEvent, ...]:
        checks.integer("num_queries", num_queries, low=0, high=self.num_tests, fix="Increase num_tests.")
        return self.make_events(self.max_failures)

    def make_events(self, num_thresholds: int, *, with_delta: bool = True) -> tuple[PrivacyEvent, ...]:
        """Make the events of ``num_thresholds`` noisy thresholds, and of ``failure_delta`` if ``with_delta``."""
        threshold_event = events.PureDPEvent(epsilon=2 / self.noise_scale, count=num_thresholds)
        return threshold_event, events.DeltaEvent(delta=self.failure_delta, count=int(with_delta))


def compute_min_teachers(threshold: float) -> int:
    """Compute the smallest number of teachers whose unanimous vote has a distance above ``threshold``."""
    return 2 * math.floor(threshold) + 3


def _bound_max_threshold_moment(num_blocks: int, noise_scale: float | None) -> float:
    """Compute E[max_b exp(-L_b/(2 scale))] of ``num_blocks`` Laplace variables L_b, or a bound for integer noise.

    Let F be the distribution function of X = exp(-L/(2 scale)). Then 1 - F(x) <= high/x^2 for x >= 1 and F(x) >= low
    x^2 for x <= 1 (high = low = 1/2 for continuous noise), and E[max X] is the integral of 1 - F^blocks.

    Args:
        num_blocks: Number of blocks.
        noise_scale: Scale of integer noise, in votes. None for continuous noise, for which the scale cancels.
    """
    high = 0.5 if noise_scale is None else 1 / (1 + math.exp(-1 / noise_scale))
    low = 0.5 if noise_scale is None else high * math.exp(-1 / noise_scale)
    below_1 = 1 - low**num_blocks / (2 * num_blocks + 1)
    # Integration by parts; the integral of (1 - high u^2)^(blocks - 1) over u = 1/x is an incomplete beta function.
    tail_integral = beta(0.5, num_blocks) * betainc(0.5, num_blocks, high) / (2 * math.sqrt(high))
    above_1 = 2 * high * num_blocks * float(tail_integral) - 1 + (1 - high) ** num_blocks
    return below_1 + above_1
