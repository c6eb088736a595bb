"""LNMax: the plurality label after Laplace noise on every count."""

from __future__ import annotations

from dataclasses import dataclass

from pate_torch.accounting import LaplaceNoisyMaxCost
from pate_torch.mechanisms.base import NoisyMaximum
from pate_torch.privacy.noise import NoiseSource
from pate_torch.privacy.records import Answers, MechanismContext
from pate_torch.privacy.sensitive import Votes


@dataclass(frozen=True, kw_only=True)
class LNMax(NoisyMaximum):
    """LNMax: argmax_c(n_c + Lap(sigma)) for all queries, with independent noise for each query and class.

    Attributes:
        sigma: Laplace *scale* b, in votes. The standard deviation is sqrt(2) b, and PATE 2017 writes gamma = 1/b.

    Guarantee: one teacher changes its vote under the adjacency of the shards, so two counts change by 1, each with
    noise Lap(b). Each query is therefore 2/b-DP with rho = 1/b^2. With discrete noise each of the two counts is
    priced as 1/b-DP.
    Source: PATE 2017 (arXiv 1610.05755) section 2.1; discrete Laplace: Ghosh, Roughgarden & Sundararajan 2012.
    """

    name: str = "laplace"

    @property
    def cost(self) -> LaplaceNoisyMaxCost:
        return LaplaceNoisyMaxCost(self.sigma, discrete=self.discrete)

    def draw(self, votes: Votes, noise: NoiseSource, context: MechanismContext) -> Answers:
        counts_QC = self._cast_counts(votes)
        noisy_QC = counts_QC + noise.draw_laplace(tuple(counts_QC.shape), self.sigma, counts_QC.device)
        return Answers(noisy_QC.argmax(1), self.privacy_events(len(votes)))
