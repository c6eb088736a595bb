"""What all mechanisms share: a name, a kind of noise, a price, and the refusal of values that were not priced."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from pate_torch.accounting import events
from pate_torch.accounting.events import PrivacyEvent
from pate_torch.accounting.outcomes import OutcomeModel
from pate_torch.core import checks
from pate_torch.mechanisms import neighbors
from pate_torch.mechanisms.neighbors import NeighborPair
from pate_torch.privacy.noise import NoiseSource
from pate_torch.privacy.records import ADJACENCIES, NO_ANSWER, Answers, MechanismContext
from pate_torch.privacy.sensitive import VOTE_SENSITIVITY, CellHistogram, Sensitivity, Votes, check_sensitivity


@dataclass(frozen=True, kw_only=True)
class Mechanism(ABC):
    """A noisy answer to sensitive values. Subclasses set the default of ``name``, the kinds of noise, and ``draw``.

    A mechanism is a frozen keyword-only dataclass whose methods are pure but for the noise drawn. The kind of noise is
    part of it because it is part of the price: integer noise is priced by zCDP or pure DP, never by the continuous
    curve (its delta exceeds it). ``privacy_events`` prices a whole release of ``num_queries`` in at most ``rounds``
    calls of ``release`` and is charged before anything is drawn; the events of ``Answers`` never exceed it, summed over
    the calls.

    Attributes:
        name: As settings and reports call it.
        input_type: The type of value it opens.
        noise: Kind of noise, ``torch`` (continuous) or ``discrete`` (integers).
        noise_kinds: Which of them the mechanism has.
        uses_guide: Whether ``draw`` looks at ``context.student_QC``.
        soft: Whether it takes teachers' probabilities, where they can be had, rather than votes.
        sensitivity_unit: What it is priced for (``max_sensitivity``) is of one of these: a question, a round, a step.
    """

    input_type: ClassVar[Any]

    name: str = ""
    noise: str = "torch"
    noise_kinds: ClassVar[tuple[str, ...]] = ("torch", "discrete")
    uses_guide: ClassVar[bool] = False
    soft: ClassVar[bool] = False
    sensitivity_unit: ClassVar[str] = "question"

    def __post_init__(self) -> None:
        checks.one_of("mechanism.name", self.name, (type(self).name,))
        checks.one_of("mechanism.noise", self.noise, ("torch", "discrete"))
        if self.noise not in self.noise_kinds:
            kinds_text = " or ".join(self.noise_kinds)
            raise checks.error(
                "noise", self.noise, f"must be {kinds_text}: {self.name} has no other form", "Set noise=torch."
            )

    @property
    def discrete(self) -> bool:
        """Whether the noise is integer."""
        return self.noise == "discrete"

    @property
    def releases_counts(self) -> bool:
        """Whether the noisy counts leave beside the labels."""
        return False

    @property
    def has_independent_queries(self) -> bool:
        """Whether the answers to different queries are independent given the votes, as an audit may then draw them."""
        return True

    @property
    def count_noise_scale(self) -> float | None:
        """Scale of the noise on every count, in votes, for audits; None if answers are drawn in another way."""
        return None

    def worst_case_neighbors(self, num_queries: int) -> list[NeighborPair]:
        """Neighboring values on which the noise shows most, for audits; votes by ``count_noise_scale``.

        Raises:
            ValueError: The mechanism has neither a ``count_noise_scale`` nor pairs of its own.
        """
        if self.count_noise_scale is None:
            fix = "Give it a count_noise_scale, or audit it on pairs of your own."
            raise checks.error("mechanism", self.name, "has no votes on which its noise is known to show", fix)
        return neighbors.make_gap_pairs(self.count_noise_scale, num_queries)

    @property
    @abstractmethod
    def max_sensitivity(self) -> Sensitivity:
        """The sensitivity that ``privacy_events`` prices; a value of a larger one is not opened."""

    @abstractmethod
    def privacy_events(self, num_queries: int, rounds: int = 1) -> tuple[PrivacyEvent, ...]:
        """Events of a whole release at its worst."""

    @final
    def release(self, sensitive: Any, noise: NoiseSource, context: MechanismContext) -> Answers:
        """Answer through noise: what ``draw`` returns, marked by the source with what paid for it.

        Raises:
            ValueError: The value's type or sensitivity, or the kind of noise, is not the one that was priced.
        """
        return noise.stamp(self.draw(self._check_input(sensitive, noise), noise, context))

    @abstractmethod
    def draw(self, votes: Any, noise: NoiseSource, context: MechanismContext) -> Answers:
        """The answers, with noise from ``noise`` alone, and the events they incurred."""

    def make_outcome_model(self) -> OutcomeModel | None:
        """The categorical law of one answer, or None where there is no such law (see ``accounting.outcomes``)."""
        return None

    def _check_input(self, sensitive: Any, noise: NoiseSource) -> Any:
        """``sensitive``, which must be what was priced, and the noise of the kind that was priced."""
        if noise.kind != self.noise:
            raise checks.error(
                "noise.kind",
                noise.kind,
                f"must be {self.noise!r}, the kind {self.name} was priced for",
                "Build both from the top-level key noise.",
            )
        if not isinstance(sensitive, self.input_type):
            input_name = "teachers" if isinstance(sensitive, Votes) else type(sensitive).__name__.lower()
            raise checks.error("method", input_name, f"cannot go with mechanism={self.name}", self._format_fix())
        check_sensitivity(sensitive.sensitivity, self.max_sensitivity, self.name)
        return sensitive

    @abstractmethod
    def _format_fix(self) -> str:
        """Which method gives what the mechanism opens, for messages."""

    def _cast_counts(self, votes: Votes | CellHistogram) -> Tensor:
        """The counts in the noise's own type: int64 for discrete, float64 for continuous; votes.counts_QC's shape."""
        return votes.counts_QC.to(torch.int64 if self.discrete else torch.float64)

    def _draw_noisy_counts(self, votes: Votes | CellHistogram, noise: NoiseSource, sigma: float) -> Tensor:
        """The noisy counts n + N(0, sigma^2), [Q, C], in the noise's own type."""
        counts_QC = self._cast_counts(votes)
        return noise.draw_gaussian(tuple(counts_QC.shape), sigma, counts_QC.device).add_(counts_QC)


@dataclass(frozen=True, kw_only=True)
class VoteMechanism(Mechanism):
    """Base of the mechanisms that open teachers' votes."""

    input_type: ClassVar[Any] = Votes

    def check(self, *, num_queries: int, num_teachers: int, num_classes: int, rounds: int = 1) -> None:
        """Refuse a plan that cannot work.

        Raises:
            ValueError: The plan cannot work; the message says what would.
        """
        checks.integer("num_teachers", num_teachers, low=1)
        checks.integer("num_queries", num_queries, low=0)
        checks.integer("num_classes", num_classes, low=2, fix="A vote needs at least two classes.")
        checks.integer("rounds", rounds, low=1)

    @property
    def max_sensitivity(self) -> Sensitivity:
        return VOTE_SENSITIVITY

    def _format_fix(self) -> str:
        return "Use method=teachers."

    def _draw_noisy_argmax(self, votes: Votes, noise: NoiseSource, sigma: float) -> Tensor:
        """argmax(n + N(0, sigma^2)), int64 [Q]; ties to the lowest class."""
        return self._draw_noisy_counts(votes, noise, sigma).argmax(1)

    def _draw_labels_where(self, votes: Votes, noise: NoiseSource, sigma: float, passed_Q: Tensor) -> Tensor:
        """``_draw_noisy_argmax`` where ``passed_Q``, NO_ANSWER elsewhere, int64 [Q]."""
        label_Q = torch.full_like(passed_Q, NO_ANSWER, dtype=torch.int64)
        label_Q[passed_Q] = self._draw_noisy_argmax(votes.select(passed_Q.nonzero().squeeze(1)), noise, sigma)
        return label_Q


@dataclass(frozen=True, kw_only=True)
class RecordMechanism(Mechanism):
    """Base of the mechanisms for records that answer for themselves, and not for teachers.

    A subclass also sets what it is priced for.

    Attributes:
        method: The choice of ``method`` whose answers it takes.
        sigma: Standard deviation of the noise.
        adjacency: The partition's adjacency.
    """

    method: ClassVar[str]
    sigma: float
    adjacency: str

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.noise_scale("mechanism.sigma", self.sigma)
        checks.one_of("mechanism.adjacency", self.adjacency, ADJACENCIES)

    def _format_fix(self) -> str:
        return f"Use method={self.method}."

    def _make_event(self, count: int, noise_factor: float = 1.0) -> PrivacyEvent:
        """Of so many tables with ``noise_factor`` sigma of noise."""
        mu = self.max_sensitivity.l2 / (noise_factor * self.sigma)
        return (
            events.ZCDPEvent(rho=mu**2 / 2, count=count) if self.discrete else events.GaussianEvent(mu=mu, count=count)
        )
