"""The exponential mechanism over the vote counts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from pate_torch.accounting import events, outcomes
from pate_torch.accounting.events import PrivacyEvent
from pate_torch.core import checks
from pate_torch.mechanisms.base import VoteMechanism
from pate_torch.privacy.noise import NoiseSource
from pate_torch.privacy.records import Answers, MechanismContext
from pate_torch.privacy.sensitive import Votes


@dataclass(frozen=True, kw_only=True)
class ExponentialMechanism(VoteMechanism):
    """P(c) proportional to exp(h n_c), h = sqrt(2)/sigma, by Gumbel-max in log space; answers every query.

    Attributes:
        sigma: Noise scale in votes, such that the zCDP price rho = 1/sigma^2 is that of GNMax with Gaussian noise
            sigma; the two can be compared at one value.

    Guarantee: a moved vote takes one from a count and gives one to another, so 2h-bounded range per query, hence pure
    2h and rho = h^2/2 (Cesar & Rogers 2021: a quarter of what pure 2h alone would give), under the shards' adjacency.
    Source: McSherry & Talwar 2007; the private prediction of DF20 Lemma 6 (Dwork & Feldman 2018).
    """

    name: str = "exponential"
    sigma: float
    noise_kinds: ClassVar[tuple[str, ...]] = ("torch",)

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.noise_scale("mechanism.sigma", self.sigma, "It is in votes; the rate is sqrt(2)/sigma.")

    @property
    def rate(self) -> float:
        """The exponent h, per vote."""
        return math.sqrt(2) / self.sigma

    @property
    def count_noise_scale(self) -> float:
        return self.sigma

    def privacy_events(self, num_queries: int, rounds: int = 1) -> tuple[PrivacyEvent, ...]:
        """One answer per query, however the queries are split into rounds."""
        return (events.BoundedRangeEvent(eta=2 * self.rate, count=num_queries),)

    def draw(self, votes: Votes, noise: NoiseSource, context: MechanismContext) -> Answers:
        """Answer every query."""
        score_QC = self.rate * self._cast_counts(votes)
        label_Q = (score_QC + noise.draw_gumbel(tuple(score_QC.shape), score_QC.device)).argmax(1)
        return Answers(label_Q, self.privacy_events(len(votes)))

    def make_outcome_model(self) -> outcomes.ExponentialOutcomes:
        return outcomes.ExponentialOutcomes(rate=self.rate)
