"""A histogram: Gaussian noise on every count of a table in which each privacy unit is counted once."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pate_torch import checks
from pate_torch.accounting import events
from pate_torch.accounting.events import Event
from pate_torch.mechanisms.base import VoteMechanism
from pate_torch.noise import NoiseSource
from pate_torch.types import BALLOT_L2, Answers, Ballots, Context, NoisyCounts, Votes


@dataclass(frozen=True, kw_only=True)
class Histogram(VoteMechanism):
    """Releases n_qc + N(0, sigma^2) for all questions q and classes c of a round, and the argmax of each question.

    For ballots only (``voting=census``), where one unit names one class of one question: so a round costs the same
    whether it asks one question or ten thousand. Teachers vote on every question, and are refused. sigma: standard
    deviation of the noise, in ballots. adjacency: of the partition. Counts leave rounded to whole ballots (the last
    bits of a float could tell of what it was added to).

    Guarantee: D/sigma-GDP per round, hence rho = D^2/(2 sigma^2) (zCDP), D the L2 sensitivity of the table: 1 under
    adjacency add_remove (one number changes by one), sqrt(2) under replace_one (one ballot moves). Discrete noise: rho
    = D^2/(2 sigma^2) only.
    Source: Dwork, McSherry, Nissim & Smith 2006, Example 1 (histograms); Canonne, Kamath & Steinke 2020, Theorem 14.
    """

    name: str = "histogram"
    sigma: float
    adjacency: str

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.positive("mechanism.sigma", self.sigma, "It is the noise of a count, in ballots.")
        checks.one_of("mechanism.adjacency", self.adjacency, tuple(BALLOT_L2))

    def check(self, *, num_queries: int, num_teachers: int, num_classes: int, rounds: int = 1) -> None:
        """Raise ValueError when the plan cannot work: a census has no teachers, hence num_teachers = 0."""
        if num_teachers:
            what = f"counts ballots of records, not votes of {num_teachers} teachers"
            fix = "Use voting=census, or mechanism=gaussian for teachers."
            raise checks.fail("mechanism", self.name, what, fix)
        super().check(num_queries=num_queries, num_teachers=1, num_classes=num_classes, rounds=rounds)

    def worst_case(self, num_queries: int, rounds: int = 1) -> tuple[Event, ...]:
        """One table per round, whatever it asks."""
        return (self._table(rounds if num_queries else 0),)

    def release(self, votes: Votes | Ballots, noise: NoiseSource, context: Context) -> Answers:
        """Answer every question of a round. ValueError: votes of teachers, another adjacency, another kind of noise."""
        self._accept(noise)
        if not isinstance(votes, Ballots):
            raise checks.fail("voting", "teachers", f"cannot go with mechanism={self.name}", "Use voting=census.")
        if votes.adjacency != self.adjacency:
            fix = "Set it to the partition's."
            raise checks.fail("mechanism.adjacency", self.adjacency, f"is not the ballots' ({votes.adjacency})", fix)
        noisy_QC = self._gaussian_counts(votes, noise, self.sigma)
        noisy_QC = noisy_QC if self.discrete else noisy_QC.round().to(torch.int64)
        event = self._table(1 if len(votes) else 0)
        return Answers(noisy_QC.argmax(1), (event,), noisy=NoisyCounts(noisy_QC, self.sigma))

    def _table(self, count: int) -> Event:
        mu = BALLOT_L2[self.adjacency] / self.sigma
        return events.ZCDP(rho=mu**2 / 2, count=count) if self.discrete else events.Gaussian(mu=mu, count=count)
