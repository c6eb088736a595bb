"""Noisy class counts: the first answers of a release, from which its plan is completed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from pate_torch.accounting.events import PrivacyEvent
from pate_torch.mechanisms.base import RecordMechanism
from pate_torch.privacy.noise import NoiseSource
from pate_torch.privacy.records import Answers, MechanismContext, NoisyCounts
from pate_torch.privacy.sensitive import UNIT_COUNT_GRID, UNIT_COUNT_SENSITIVITY, Sensitivity, UnitCounts

COUNT_COST_SHARE = 0.05
"""Share of mu^2 that the class counts may cost: at epsilon 1 the noise of a count is about 19 units."""


@dataclass(frozen=True, kw_only=True)
class ClassCounts(RecordMechanism):
    """Noisy number of units in each class, and noisy sum of the units' shares of values outside the public range.

    One vector holds the counts and half of the sum. The noise is drawn once, on a grid of 2^-16 units, and the counts
    are rounded to whole units afterwards, because the last bits of a float could reveal the exact count.

    Attributes:
        sigma: Standard deviation of the noise of each count, in units. The sum has twice this noise.

    Guarantee: D/sigma-GDP, where D is the L2 sensitivity of the vector: sqrt(1 + 1/4) under adjacency add_remove (a
    unit adds 1 to one count and at most 1/2 to half of the sum), sqrt(2 + 1/4) under replace_one.
    Source: Dwork, McSherry, Nissim & Smith 2006, Example 1 (histograms); Dong, Roth & Su 2022, Theorem 2.7.
    """

    noise_kinds: ClassVar[tuple[str, ...]] = ("torch",)
    input_type: ClassVar[Any] = UnitCounts
    sensitivity_unit: ClassVar[str] = "table"
    name: str = "class_counts"

    @property
    def max_sensitivity(self) -> Sensitivity:
        return UNIT_COUNT_SENSITIVITY[self.adjacency]

    def privacy_events(self, num_queries: int = 1, rounds: int = 1) -> tuple[PrivacyEvent, ...]:
        return (self._make_event(rounds if num_queries else 0),)

    def draw(self, votes: UnitCounts, noise: NoiseSource, context: MechanismContext) -> Answers:
        exact_F = torch.cat([votes.counts_C * UNIT_COUNT_GRID, votes.outside_sum[None]]).double()
        noise_F = noise.draw_gaussian(tuple(exact_F.shape), self.sigma * UNIT_COUNT_GRID, exact_F.device)
        noisy_F = (noise_F + exact_F).round() / UNIT_COUNT_GRID
        noisy_F[-1] *= 2
        noisy_1F = noisy_F.round().to(torch.int64)[None]
        noisy_counts = NoisyCounts(noisy_1F, self.sigma)
        return Answers(noisy_1F[:, :-1].argmax(1), (self._make_event(1),), noisy_counts=noisy_counts)
