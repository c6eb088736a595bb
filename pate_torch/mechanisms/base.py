"""The base classes of mechanisms."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, ClassVar, Self, final

import torch
from torch import Tensor

from pate_torch.accounting import events
from pate_torch.accounting.costs import OutcomeModel
from pate_torch.accounting.events import GaussianEvent, PrivacyEvent
from pate_torch.core import checks
from pate_torch.mechanisms import neighboring_values
from pate_torch.mechanisms.neighboring_values import NeighborPair
from pate_torch.privacy.noise import NoiseSource
from pate_torch.privacy.records import ADJACENCIES, NO_ANSWER, Answers, MechanismContext
from pate_torch.privacy.sensitive import VOTE_SENSITIVITY, CellHistogram, Sensitivity, Votes, check_sensitivity


@dataclass(frozen=True, kw_only=True)
class Mechanism(ABC):
    """A mechanism that answers questions about sensitive values with noise.

    A mechanism is a frozen keyword-only dataclass. Its methods are pure functions, apart from the noise that they draw.
    The kind of noise is a field of the mechanism, because the cost depends on it: integer noise is priced by zCDP or
    pure DP, because its delta exceeds the delta of continuous noise with the same sigma. The events that
    ``privacy_events`` returns for a whole release of ``num_queries`` queries, in at most ``rounds`` calls of
    ``release``, are reserved before any noise is drawn. The ``Answers`` together never cost more than these events.

    Attributes:
        name: Name of the mechanism in settings and reports.
        input_type: Type of the values that the mechanism opens.
        method: Name of the method whose values the mechanism opens.
        noise: Kind of noise, "torch" (continuous) or "discrete" (integers).
        noise_kinds: Kinds of noise that the mechanism supports.
        uses_guide: Whether ``draw`` reads ``context.student_QC``.
        soft: Whether the mechanism opens class probabilities of teachers as well as votes.
        sensitivity_unit: What ``max_sensitivity`` applies to: each "query", "round", "step", "table" or "table set".
    """

    input_type: ClassVar[Any]
    method: ClassVar[str] = "teachers"
    name: str = ""
    noise: str = "torch"
    noise_kinds: ClassVar[tuple[str, ...]] = ("torch", "discrete")
    uses_guide: ClassVar[bool] = False
    soft: ClassVar[bool] = False
    sensitivity_unit: ClassVar[str] = "query"

    def __post_init__(self) -> None:
        checks.one_of("mechanism.name", self.name, (type(self).name,))
        checks.one_of("mechanism.noise", self.noise, ("torch", "discrete"))
        if self.noise not in self.noise_kinds:
            rule = f"must be {' or '.join(self.noise_kinds)} with mechanism={self.name}"
            raise checks.error("noise", self.noise, rule, f"Set noise={self.noise_kinds[0]}.")

    @property
    def discrete(self) -> bool:
        """Whether the noise consists of integers."""
        return self.noise == "discrete"

    @property
    def releases_counts(self) -> bool:
        """Whether noisy counts are released beside the labels."""
        return False

    @property
    def has_independent_queries(self) -> bool:
        """Whether answers to different queries are independent given the votes, so that an audit may batch them."""
        return True

    @property
    def count_noise_scale(self) -> float | None:
        """Scale of the noise on each count, in votes, for audits. None if the mechanism has no noise on counts."""
        return None

    def worst_case_neighbors(self, num_queries: int) -> list[NeighborPair]:
        """Return pairs of neighboring values that are hard to hide, for audits.

        By default these are votes whose gaps are multiples of ``count_noise_scale``.

        Raises:
            ValueError: ``count_noise_scale`` is None, and the mechanism does not define this method.
        """
        if self.count_noise_scale is None:
            fix = "Define count_noise_scale or worst_case_neighbors, or audit the mechanism on pairs that you make."
            raise checks.error("mechanism", self.name, "defines no neighboring values for an audit", fix)
        return neighboring_values.make_gap_pairs(self.count_noise_scale, num_queries)

    @property
    @abstractmethod
    def max_sensitivity(self) -> Sensitivity:
        """Largest sensitivity that ``privacy_events`` covers. ``release`` refuses values of a larger sensitivity."""

    @abstractmethod
    def privacy_events(self, num_queries: int, rounds: int = 1) -> tuple[PrivacyEvent, ...]:
        """Return the worst-case events of a whole release of ``num_queries`` queries in at most ``rounds`` calls."""

    @final
    def release(self, sensitive: Any, noise: NoiseSource, context: MechanismContext) -> Answers:
        """Answer queries with noise. The answers contain the id of the reservation that paid for the noise.

        Raises:
            ValueError: The cost does not cover the type or the sensitivity of the value, or the kind of noise.
        """
        return noise.stamp(self.draw(self._check_input(sensitive, noise), noise, context))

    @abstractmethod
    def draw(self, votes: Any, noise: NoiseSource, context: MechanismContext) -> Answers:
        """Compute the answers, with noise from ``noise`` only, and the events that these answers cost.

        ``votes`` is the value to open, which need not be votes (``input_type``).
        """

    def make_outcome_model(self) -> OutcomeModel | None:
        """Return the distribution of one answer, or None if the mechanism has no data-dependent cost."""
        return None

    def _check_input(self, sensitive: Any, noise: NoiseSource) -> Any:
        """Return ``sensitive`` after checking that the cost covers it and the noise."""
        if noise.kind != self.noise:
            rule = f"must be {self.noise!r}, the kind of noise that mechanism={self.name} was priced for"
            raise checks.error("noise.kind", noise.kind, rule, "Set the kind of noise by the top-level key noise only.")
        if not isinstance(sensitive, self.input_type):
            input_name = "teachers" if isinstance(sensitive, Votes) else type(sensitive).__name__.lower()
            fix = f"Use method={self.method}."
            raise checks.error("method", input_name, f"cannot go with mechanism={self.name}", fix)
        check_sensitivity(sensitive.sensitivity, self.max_sensitivity, self.name)
        return sensitive

    def _cast_counts(self, votes: Votes | CellHistogram) -> Tensor:
        """Return the counts [Q, C] in the type of the noise: int64 for discrete noise, float64 for continuous noise."""
        return votes.counts_QC.to(torch.int64 if self.discrete else torch.float64)

    def _draw_noisy_counts(self, votes: Votes | CellHistogram, noise: NoiseSource, sigma: float) -> Tensor:
        """Draw the noisy counts n + N(0, sigma^2), [Q, C], in the type of the noise."""
        counts_QC = self._cast_counts(votes)
        return noise.draw_gaussian(tuple(counts_QC.shape), sigma, counts_QC.device).add_(counts_QC)


@dataclass(frozen=True, kw_only=True)
class VoteMechanism(Mechanism):
    """Base of the mechanisms that open teachers' votes."""

    input_type: ClassVar[Any] = Votes

    def check(self, *, num_queries: int, num_teachers: int, num_classes: int, rounds: int = 1) -> None:
        """Raise ValueError if a plan with these numbers cannot give useful answers."""
        checks.integer("num_teachers", num_teachers, low=1)
        checks.integer("num_queries", num_queries, low=0)
        checks.integer("num_classes", num_classes, low=2, fix="A vote needs at least two classes.")
        checks.integer("rounds", rounds, low=1)

    @property
    def max_sensitivity(self) -> Sensitivity:
        return VOTE_SENSITIVITY

    def _draw_labels_where(self, votes: Votes, noise: NoiseSource, sigma: float, passed_Q: Tensor) -> Tensor:
        """Draw argmax(n + N(0, sigma^2)) where ``passed_Q`` is true, and return NO_ANSWER elsewhere, int64 [Q]."""
        label_Q = torch.full_like(passed_Q, NO_ANSWER, dtype=torch.int64)
        passed_votes = votes.select(passed_Q.nonzero().squeeze(1))
        label_Q[passed_Q] = self._draw_noisy_counts(passed_votes, noise, sigma).argmax(1)
        return label_Q


@dataclass(frozen=True, kw_only=True)
class NoisyMaximum(VoteMechanism):
    """Base of the mechanisms that answer with the argmax of noisy counts.

    Attributes:
        sigma: Noise scale, in votes.
    """

    sigma: float

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.noise_scale("mechanism.sigma", self.sigma, "mechanism.sigma is the noise scale, in votes.")

    @property
    def count_noise_scale(self) -> float:
        return self.sigma

    @property
    @abstractmethod
    def cost(self) -> OutcomeModel:
        """Distribution and cost of one answer."""

    def privacy_events(self, num_queries: int, rounds: int = 1) -> tuple[PrivacyEvent, ...]:
        return self.cost.privacy_events(num_queries)

    def make_outcome_model(self) -> OutcomeModel | None:
        return None if self.discrete or self.releases_counts else self.cost


@dataclass(frozen=True, kw_only=True)
class RecordMechanism(Mechanism):
    """Base of the mechanisms that open sums over records.

    Attributes:
        sigma: Standard deviation of the noise, in records (or units) for counts and in clipping norms for gradients.
        adjacency: Adjacency of the partition.
    """

    sigma: float
    adjacency: str

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.noise_scale("mechanism.sigma", self.sigma)
        checks.one_of("mechanism.adjacency", self.adjacency, ADJACENCIES)

    @classmethod
    def from_share(cls, events: Collection[PrivacyEvent], adjacency: str, share: float) -> Self | None:
        """Make one table of noisy sums that costs ``share`` of mu^2 together with the ``events`` of the other noise.

        Return None if these events are not Gaussian, because their costs do not add in mu^2.
        """
        gaussian_events = [event for event in events if isinstance(event, GaussianEvent)]
        if len(gaussian_events) < len(events):
            return None
        mu = math.sqrt(sum(event.count * event.mu**2 for event in gaussian_events) * share / (1 - share))
        return cls(sigma=cls(sigma=1.0, adjacency=adjacency).max_sensitivity.l2 / mu, adjacency=adjacency)

    def _make_event(self, count: int, noise_factor: float = 1.0) -> PrivacyEvent:
        """Make the event of ``count`` sums with noise of standard deviation ``noise_factor`` times sigma."""
        mu = self.max_sensitivity.l2 / (noise_factor * self.sigma)
        if self.discrete:
            return events.ZCDPEvent(rho=mu**2 / 2, count=count)
        return events.GaussianEvent(mu=mu, count=count)
