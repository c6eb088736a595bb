"""Noisy descent: a public model moves a few times along the sum of all records' slopes, with Gaussian noise."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from pate_torch.accounting.events import Event
from pate_torch.core import checks
from pate_torch.mechanisms.base import RecordMechanism
from pate_torch.noise.source import NoiseSource
from pate_torch.types import Answers, Context, Sensitivity, one_vector
from pate_torch.voters.gradient_sums import SHORTEST, WHOLE, Leanings


@dataclass(frozen=True, kw_only=True)
class Descent(RecordMechanism):
    """W <- W + rate * scale * (sum of slopes(W)/cut + N(0, sigma^2)), ``steps`` times from W = 0; then W's answers.

    For records that answer by slopes (``voting=slopes``). cut: length of the longest change of a record's answer, of at
    most 1; a longer one is cut to it. After a few steps the changes of records that the model is right about are short,
    and they count for more, beside the noise and beside the others, the shorter the longest is. sigma: standard
    deviation of the noise of one number of the sum, in slopes of the greatest length; ``early`` times as much in every
    round but the last, for these only lead to the features in which the last one's model lies. first, rate: how far the
    first step goes and the later ones, of a Newton step whose curvature is ``cut`` (a logistic loss's is at most 1/2
    and mostly far less). adjacency: of the partition. Every public point gets an answer and its model's logits: how
    many are asked changes no price.

    Guarantee: ``steps`` times D/s-GDP per round, adaptively composed, hence rho = steps D^2/(2 s^2) (zCDP), with s =
    sigma in the last round and early x sigma before, D the L2 sensitivity of the sum over cut: 1 under adjacency
    add_remove, 2 under replace_one. There is no discrete form.
    Source: Bassily, Smith & Thakurta 2014, Algorithm 1, with full batches; Dong, Roth & Su 2022, Corollary 3.3.
    """

    kinds: ClassVar[tuple[str, ...]] = ("torch",)  # a discrete sampler's tables are as long as its noise: here 2^30
    voting: ClassVar[str] = "slopes"
    makes: ClassVar[str] = "sums slopes"
    takes: ClassVar[Any] = Leanings
    name: str = "descent"
    early: float = 1.0
    cut: float = 1.0
    steps: int = 2
    first: float = 8.0
    rate: float = 16.0

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.noise("mechanism.early", self.early)
        checks.between("mechanism.cut", self.cut, SHORTEST, 1)
        checks.integer("mechanism.steps", self.steps, low=1)
        checks.positive("mechanism.first", self.first)
        checks.positive("mechanism.rate", self.rate)

    @property
    def priced_for(self) -> Sensitivity:
        """One unit, one slope of length at most ``cut``, which is sigma's unit. Its L1 is no part of the price."""
        return replace(one_vector(self.adjacency, 1), l1=math.inf)

    def worst_case(self, num_queries: int, rounds: int = 1) -> tuple[Event, ...]:
        """``steps`` sums per round, whatever it asks; the last of the rounds has the last one's noise."""
        if num_queries == 0:
            return (self._price(0),)
        before = (self._price(self.steps * (rounds - 1), self.early),) if rounds > 1 else ()
        return (*before, self._price(self.steps))

    def draw(self, votes: Leanings, noise: NoiseSource, context: Context) -> Answers:
        """Answer every question of a round."""
        if len(votes) == 0:
            return Answers(torch.zeros(0, dtype=torch.int64), (self._price(0),))
        times, longest = 1.0 if context.last else self.early, self.cut * WHOLE
        weight_DC = torch.zeros(votes.shape, dtype=torch.float64)
        for step in range(self.steps):
            slope_DC = votes.slope(weight_DC, self.cut)
            # In whole numbers of 1/WHOLE: the last bits of a float could tell of what it was added to.
            noisy_DC = (noise.gaussian(votes.shape, times * self.sigma * longest, slope_DC.device) + slope_DC).round()
            weight_DC = weight_DC + (self.rate if step else self.first) * votes.scale * noisy_DC / longest
        score_PC = votes.scores(weight_DC)
        asked_QC = score_PC if votes.asked_Q is None else score_PC[votes.asked_Q]
        return Answers(
            asked_QC.argmax(1), (self._price(self.steps, times),), score_PC=score_PC, model=votes.model(weight_DC)
        )
