"""The histogram mechanism: Gaussian noise on all counts of a table that counts each privacy unit once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from pate_torch.accounting.events import PrivacyEvent
from pate_torch.mechanisms.base import RecordMechanism
from pate_torch.mechanisms.neighboring_values import NeighborPair, make_histogram_pairs
from pate_torch.privacy.noise import NoiseSource
from pate_torch.privacy.records import Answers, MechanismContext, NoisyCounts
from pate_torch.privacy.sensitive import COUNT_SENSITIVITY, CellHistogram, Sensitivity


@dataclass(frozen=True, kw_only=True)
class Histogram(RecordMechanism):
    """Noisy counts n_qc + N(0, sigma^2) for all queries q and classes c of a round, and the argmax of each query.

    This is the mechanism of ``method=reverse_knn``, where each unit is counted at one query and one class. The cost
    of a round therefore does not depend on the number of queries. Votes of teachers, who vote on every query, are
    refused. Counts are rounded to whole records, because the last bits of a float could reveal the exact count.

    Attributes:
        sigma: Standard deviation of the noise, in records.

    Guarantee: D/sigma-GDP for each round, hence rho = D^2/(2 sigma^2) (zCDP). D is the L2 sensitivity of the table: 1
    under adjacency add_remove (one count changes by one), sqrt(2) under replace_one (one record moves to another
    count). With discrete noise only rho = D^2/(2 sigma^2) holds.
    Source: Dwork, McSherry, Nissim & Smith 2006, Example 1 (histograms); Canonne, Kamath & Steinke 2020, Theorem 14.
    """

    method: ClassVar[str] = "reverse_knn"
    input_type: ClassVar[Any] = CellHistogram
    sensitivity_unit: ClassVar[str] = "round"
    name: str = "histogram"

    @property
    def max_sensitivity(self) -> Sensitivity:
        return COUNT_SENSITIVITY[self.adjacency]

    def worst_case_neighbors(self, num_queries: int) -> list[NeighborPair]:
        return make_histogram_pairs(self.sigma, self.adjacency, num_queries)

    def privacy_events(self, num_queries: int, rounds: int = 1) -> tuple[PrivacyEvent, ...]:
        # A round costs one table, for any number of queries.
        return (self._make_event(rounds if num_queries else 0),)

    def draw(self, votes: CellHistogram, noise: NoiseSource, context: MechanismContext) -> Answers:
        noisy_QC = self._draw_noisy_counts(votes, noise, self.sigma)
        noisy_QC = noisy_QC if self.discrete else noisy_QC.round().to(torch.int64)
        event = self._make_event(1 if len(votes) else 0)
        return Answers(noisy_QC.argmax(1), (event,), noisy_counts=NoisyCounts(noisy_QC, self.sigma))
