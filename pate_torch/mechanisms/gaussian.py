"""GNMax: the plurality label after Gaussian noise on every count."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from pate_torch.accounting import events, outcomes
from pate_torch.accounting.events import PrivacyEvent
from pate_torch.core import checks
from pate_torch.mechanisms.base import VoteMechanism
from pate_torch.privacy.noise import NoiseSource
from pate_torch.privacy.records import Answers, MechanismContext, NoisyCounts
from pate_torch.privacy.sensitive import Votes


def make_answer_event(sigma: float, count: int, discrete: bool) -> PrivacyEvent:
    """The price of ``count`` GNMax answers with noise sigma, in votes: a moved vote changes counts by sqrt(2) in L2."""
    if discrete:
        return events.ZCDPEvent(rho=1 / sigma**2, count=count)
    return events.GaussianEvent(mu=math.sqrt(2) / sigma, count=count)


@dataclass(frozen=True, kw_only=True)
class GNMax(VoteMechanism):
    """argmax_c(n_c + N(0, sigma^2)), noise independent per query and class; answers every query.

    LZCW21's binary form, which adds N(0, s1^2) to the count of ones and compares with K/2, is this mechanism at sigma =
    sqrt(2) s1.

    Attributes:
        sigma: Standard deviation of the noise, in votes.
        counts: Release the noisy counts themselves, rounded to whole votes (the last bits of a float could tell of what
            it was added to), and the argmax of those.

    Guarantee: sqrt(2)/sigma-GDP per query, hence rho = 1/sigma^2 (zCDP) and RDP(a) = a/sigma^2, under the shards'
    adjacency (one teacher changes its vote: L2 sensitivity sqrt(2)). Discrete noise: rho = 1/sigma^2 only. It is the
    price of the whole noisy vector, so ``counts`` costs nothing; but the data-dependent prices are those of the argmax.
    Source: PATE 2018 (arXiv 1802.08908) section 4.1; LZCW21 Algorithm 1; Canonne, Kamath & Steinke 2020, Theorem 14.
    """

    name: str = "gaussian"
    sigma: float
    counts: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.noise_scale("mechanism.sigma", self.sigma, "It is the noise of the answer, in votes.")
        checks.boolean("mechanism.counts", self.counts)

    @property
    def releases_counts(self) -> bool:
        return self.counts

    @property
    def count_noise_scale(self) -> float:
        return self.sigma

    def privacy_events(self, num_queries: int, rounds: int = 1) -> tuple[PrivacyEvent, ...]:
        """One answer per query, however the queries are split into rounds."""
        return (make_answer_event(self.sigma, num_queries, self.discrete),)

    def draw(self, votes: Votes, noise: NoiseSource, context: MechanismContext) -> Answers:
        """Answer every query."""
        answer_events = self.privacy_events(len(votes))
        if not self.counts:
            return Answers(self._draw_noisy_argmax(votes, noise, self.sigma), answer_events)
        noisy_QC = self._draw_noisy_counts(votes, noise, self.sigma)
        noisy_QC = noisy_QC if self.discrete else noisy_QC.round().to(torch.int64)
        return Answers(noisy_QC.argmax(1), answer_events, noisy_counts=NoisyCounts(noisy_QC, self.sigma))

    def make_outcome_model(self) -> outcomes.GNMaxOutcomes | None:
        """None where more than the label is released, or the noise is discrete."""
        return None if self.discrete or self.counts else outcomes.GNMaxOutcomes(sigma=self.sigma)
