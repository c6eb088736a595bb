"""GNMax: the plurality label after Gaussian noise on every count."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pate_torch.accounting import GaussianNoisyMaxCost
from pate_torch.core import checks
from pate_torch.mechanisms.base import NoisyMaximum
from pate_torch.privacy.noise import NoiseSource
from pate_torch.privacy.records import Answers, MechanismContext, NoisyCounts
from pate_torch.privacy.sensitive import Votes


@dataclass(frozen=True, kw_only=True)
class GNMax(NoisyMaximum):
    """GNMax: argmax_c(n_c + N(0, sigma^2)) for all queries, with independent noise for each query and class.

    The binary form of LZCW21, which adds N(0, s1^2) to the count of ones and compares the sum with K/2, is this
    mechanism with sigma = sqrt(2) s1.

    Attributes:
        sigma: Standard deviation of the noise, in votes.
        counts: Whether to release the noisy counts beside their argmax. The noisy counts are rounded to whole votes,
            because the last bits of a floating-point sum could reveal the exact count.

    Guarantee: sqrt(2)/sigma-GDP for each query, hence rho = 1/sigma^2 (zCDP) and RDP(a) = a/sigma^2, under the
    adjacency of the shards (one teacher changes its vote, so the L2 sensitivity is sqrt(2)). With discrete noise only
    rho = 1/sigma^2 holds. This is the cost of the whole noisy vector, so ``counts`` has no additional cost. The
    data-dependent costs hold for the argmax only.
    Source: PATE 2018 (arXiv 1802.08908) section 4.1; LZCW21 Algorithm 1; Canonne, Kamath & Steinke 2020, Theorem 14.
    """

    name: str = "gaussian"
    counts: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.boolean("mechanism.counts", self.counts)

    @property
    def cost(self) -> GaussianNoisyMaxCost:
        return GaussianNoisyMaxCost(self.sigma, discrete=self.discrete)

    @property
    def releases_counts(self) -> bool:
        return self.counts

    def draw(self, votes: Votes, noise: NoiseSource, context: MechanismContext) -> Answers:
        answer_events = self.privacy_events(len(votes))
        noisy_QC = self._draw_noisy_counts(votes, noise, self.sigma)
        if not self.counts:
            return Answers(noisy_QC.argmax(1), answer_events)
        noisy_QC = noisy_QC if self.discrete else noisy_QC.round().to(torch.int64)
        return Answers(noisy_QC.argmax(1), answer_events, noisy_counts=NoisyCounts(noisy_QC, self.sigma))
