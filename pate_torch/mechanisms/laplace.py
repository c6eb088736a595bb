"""LNMax: the plurality label after Laplace noise on every count."""

from __future__ import annotations

from dataclasses import dataclass

from pate_torch.accounting import events
from pate_torch.accounting.data_dependent import theorems
from pate_torch.accounting.events import PrivacyEvent
from pate_torch.core import checks
from pate_torch.mechanisms.base import VoteMechanism
from pate_torch.privacy.noise import NoiseSource
from pate_torch.privacy.records import Answers, MechanismContext
from pate_torch.privacy.sensitive import Votes


@dataclass(frozen=True, kw_only=True)
class LNMax(VoteMechanism):
    """LNMax: argmax_c(n_c + Lap(sigma)) for all questions, with independent noise for each question and class.

    Attributes:
        sigma: Laplace *scale* b, in votes. The standard deviation is sqrt(2) b, and PATE 2017 writes gamma = 1/b.

    Guarantee: one teacher changes its vote under the adjacency of the shards, so two counts change by 1, each with
    noise Lap(b). Together they cost pure 2/b and rho = 1/b^2 for each question. With discrete noise each of the two
    costs pure 1/b.
    Source: PATE 2017 (arXiv 1610.05755) section 2.1; discrete Laplace: Ghosh, Roughgarden & Sundararajan 2012.
    """

    name: str = "laplace"
    sigma: float

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.noise_scale("mechanism.sigma", self.sigma, "It is the Laplace scale b of the answer's noise, in votes.")

    @property
    def count_noise_scale(self) -> float:
        return self.sigma

    def privacy_events(self, num_queries: int, rounds: int = 1) -> tuple[PrivacyEvent, ...]:
        """Return the price of two Laplace counts for each question: one count loses the vote, and one gains it."""
        ratio = 1 / self.sigma
        if self.discrete:
            return (events.PureDPEvent(epsilon=ratio, count=2 * num_queries),)
        return (events.LaplaceEvent(ratio=ratio, count=2 * num_queries),)

    def draw(self, votes: Votes, noise: NoiseSource, context: MechanismContext) -> Answers:
        """Answer all questions."""
        counts_QC = self._cast_counts(votes)
        noisy_QC = counts_QC + noise.draw_laplace(tuple(counts_QC.shape), self.sigma, counts_QC.device)
        return Answers(noisy_QC.argmax(1), self.privacy_events(len(votes)))

    def make_outcome_model(self) -> theorems.LNMaxOutcomes | None:
        return None if self.discrete else theorems.LNMaxOutcomes(scale=self.sigma)
