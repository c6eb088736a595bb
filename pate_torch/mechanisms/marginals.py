"""The mechanism of marginal tables: Gaussian noise on all counts of several tables, each of which counts every unit."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from pate_torch.accounting.events import PrivacyEvent
from pate_torch.core import checks
from pate_torch.mechanisms.base import RecordMechanism
from pate_torch.mechanisms.neighboring_values import NeighborPair, make_marginal_pair
from pate_torch.privacy.noise import NoiseSource
from pate_torch.privacy.records import Answers, MechanismContext, NoisyCounts
from pate_torch.privacy.sensitive import MarginalTables, Sensitivity, make_table_sensitivity


@dataclass(frozen=True, kw_only=True)
class Marginals(RecordMechanism):
    """Noisy counts n + N(0, sigma^2) of several marginal tables, which are released together.

    Each unit adds 1 to one count of every table. Counts are rounded to whole units, because the last bits of a float
    could reveal the exact count.

    Attributes:
        sigma: Standard deviation of the noise of each count, in units.
        num_tables: Number m of tables.

    Guarantee: D/sigma-GDP, hence rho = D^2/(2 sigma^2) (zCDP). D is the L2 sensitivity of all tables together: sqrt(m)
    under adjacency add_remove (one count of each table changes by one), sqrt(2m) under replace_one (two counts of each
    table change by one). With discrete noise only rho = D^2/(2 sigma^2) holds.
    Source: Dwork, McSherry, Nissim & Smith 2006, Example 1 (histograms); McKenna, Miklau & Sheldon 2021 (marginals).
    """

    method: ClassVar[str] = "synthetic"
    input_type: ClassVar[Any] = MarginalTables
    sensitivity_unit: ClassVar[str] = "table set"
    name: str = "marginals"
    num_tables: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.integer("mechanism.num_tables", self.num_tables, low=1)

    @classmethod
    def from_mu(cls, mu: float, num_tables: int, adjacency: str, noise: str = "torch") -> Marginals:
        """Make the mechanism of so many tables that costs at most mu, and at most as much as one table."""
        distance = make_table_sensitivity(num_tables, adjacency).l2
        slack = 1e-12 if num_tables > 1 else 1e-13  # larger than rounding errors
        return cls(sigma=distance / mu * (1 + slack), adjacency=adjacency, num_tables=num_tables, noise=noise)

    @property
    def has_independent_queries(self) -> bool:
        return False

    @property
    def max_sensitivity(self) -> Sensitivity:
        return make_table_sensitivity(self.num_tables, self.adjacency)

    @property
    def mu(self) -> float:
        """Parameter of Gaussian differential privacy."""
        return self.max_sensitivity.l2 / self.sigma

    def worst_case_neighbors(self, num_queries: int) -> list[NeighborPair]:
        return [make_marginal_pair(2 * math.ceil(4 * self.sigma), self.num_tables, self.adjacency)]

    def privacy_events(self, num_queries: int = 1, rounds: int = 1) -> tuple[PrivacyEvent, ...]:
        return (self._make_event(rounds if num_queries else 0),)

    def draw(self, votes: MarginalTables, noise: NoiseSource, context: MechanismContext) -> Answers:
        counts_M = votes.counts_M if self.discrete else votes.counts_M.double()
        noisy_M = noise.draw_gaussian(tuple(counts_M.shape), self.sigma, counts_M.device).add_(counts_M)
        noisy_1M = noisy_M.round().to(torch.int64)[None]
        return Answers(noisy_1M.argmax(1), (self._make_event(1),), noisy_counts=NoisyCounts(noisy_1M, self.sigma))
