"""Noisy descent: a public model moves a few times along the sum of all records' slopes, with Gaussian noise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from pate_torch import checks
from pate_torch.accounting import events
from pate_torch.accounting.events import Event
from pate_torch.leanings import WHOLE, Leanings
from pate_torch.mechanisms.base import VoteMechanism
from pate_torch.noise import NoiseSource
from pate_torch.types import SLOPE_L2, Answers, Ballots, Context, Votes


@dataclass(frozen=True, kw_only=True)
class Descent(VoteMechanism):
    """W <- W + rate * scale * (sum of slopes(W) + N(0, sigma^2)), ``steps`` times from W = 0; then W's answers.

    For records that answer by slopes (``voting=slopes``). sigma: standard deviation of the noise of one number of the
    sum, in slopes of length 1. first, rate: how far the first step goes and the later ones, of a Newton step whose
    curvature is 1 (a logistic loss's is at most 1/2 and mostly far less). adjacency: of the partition. Every public
    point gets an answer and its model's logits: how many are asked changes no price.

    Guarantee: ``steps`` times D/sigma-GDP per round, adaptively composed, hence rho = steps D^2/(2 sigma^2) (zCDP), D
    the L2 sensitivity of the sum: 1 under adjacency add_remove, 2 under replace_one. There is no discrete form.
    Source: Bassily, Smith & Thakurta 2014, Algorithm 1, with full batches; Dong, Roth & Su 2022, Corollary 3.3.
    """

    kinds: ClassVar[tuple[str, ...]] = ("torch",)  # a discrete sampler's tables are as long as its noise: here 2^30
    name: str = "descent"
    sigma: float
    adjacency: str
    steps: int = 2
    first: float = 8.0
    rate: float = 16.0

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.positive("mechanism.sigma", self.sigma, "It is the noise of a number, in slopes of length 1.")
        checks.one_of("mechanism.adjacency", self.adjacency, tuple(SLOPE_L2))
        checks.integer("mechanism.steps", self.steps, low=1)
        checks.positive("mechanism.first", self.first)
        checks.positive("mechanism.rate", self.rate)

    def check(self, *, num_queries: int, num_teachers: int, num_classes: int, rounds: int = 1) -> None:
        """Raise ValueError when the plan cannot work: records that answer for themselves mean num_teachers = 0."""
        if num_teachers:
            what = f"sums slopes of records, not votes of {num_teachers} teachers"
            fix = "Use voting=slopes, or mechanism=gaussian for teachers."
            raise checks.fail("mechanism", self.name, what, fix)
        super().check(num_queries=num_queries, num_teachers=1, num_classes=num_classes, rounds=rounds)

    def worst_case(self, num_queries: int, rounds: int = 1) -> tuple[Event, ...]:
        """``steps`` sums per round, whatever it asks."""
        return (self._sums(self.steps * rounds if num_queries else 0),)

    def release(self, votes: Votes | Ballots | Leanings, noise: NoiseSource, context: Context) -> Answers:
        """Answer every question of a round. ValueError: who does not answer by slopes, another adjacency or noise."""
        self._accept(noise)
        if not isinstance(votes, Leanings):
            what = "teachers" if isinstance(votes, Votes) else "census"
            raise checks.fail("voting", what, f"cannot go with mechanism={self.name}", "Use voting=slopes.")
        if votes.adjacency != self.adjacency:
            fix = "Set it to the partition's."
            raise checks.fail("mechanism.adjacency", self.adjacency, f"is not the records' ({votes.adjacency})", fix)
        if len(votes) == 0:
            return Answers(torch.zeros(0, dtype=torch.int64), (self._sums(0),))
        weight_DC = torch.zeros(votes.shape, dtype=torch.float64)
        for step in range(self.steps):
            slope_DC = votes.slope(weight_DC)
            # In whole numbers of 1/WHOLE: the last bits of a float could tell of what it was added to.
            noisy_DC = (noise.gaussian(votes.shape, self.sigma * WHOLE, slope_DC.device) + slope_DC).round()
            weight_DC = weight_DC + (self.rate if step else self.first) * votes.scale * noisy_DC / WHOLE
        score_PC = votes.scores(weight_DC)
        asked_QC = score_PC if votes.asked_Q is None else score_PC[votes.asked_Q]
        return Answers(asked_QC.argmax(1), (self._sums(self.steps),), score_PC=score_PC)

    def _sums(self, count: int) -> Event:
        return events.Gaussian(mu=SLOPE_L2[self.adjacency] / self.sigma, count=count)
