"""Distance to instability, tested for each question separately: the exact winner, or no answer."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from pate_torch.accounting import events
from pate_torch.accounting.events import PrivacyEvent
from pate_torch.core import checks
from pate_torch.mechanisms.base import VoteMechanism
from pate_torch.mechanisms.neighbors import NeighborPair, make_distance_pairs
from pate_torch.mechanisms.sparse_vector_base import compute_instability_distance, compute_min_teachers
from pate_torch.privacy.noise import NoiseSource
from pate_torch.privacy.records import NO_ANSWER, Answers, MechanismContext
from pate_torch.privacy.sensitive import Votes


@dataclass(frozen=True, kw_only=True)
class DistanceToInstability(VoteMechanism):
    """The exact plurality if dist + Lap(1/epsilon) > ln(1/delta)/epsilon, else no answer. It suits few questions.

    dist = max(0, ceil(gap/2) - 1) is the number of moved votes that cannot change the winner.

    Attributes:
        epsilon: Epsilon of *one question*.
        delta: Delta of *one question*.

    Guarantee: (epsilon, delta) for each question under the adjacency of the shards (dist has sensitivity 1). The price
    is one Laplace number of ratio epsilon, and delta for the event that a winner passes which differs between neighbors
    (dist is then 0, and it passes with probability delta/2; slightly more with discrete noise).
    Source: BTT18 Algorithm 2 and Theorem 3.2 (Smith & Thakurta 2013).
    """

    name: str = "single_stable"
    epsilon: float
    delta: float

    def __post_init__(self) -> None:
        super().__post_init__()
        fix = "It is the price of one query."
        checks.between("mechanism.epsilon", self.epsilon, 0, 1 / checks.MIN_NOISE_SCALE, exclusive=True, fix=fix)
        checks.delta("mechanism.delta", self.delta)

    @property
    def threshold(self) -> float:
        """Threshold ln(1/delta)/epsilon, in moved votes."""
        return math.log(1 / self.delta) / self.epsilon

    def check(self, *, num_queries: int, num_teachers: int, num_classes: int, rounds: int = 1) -> None:
        """Raise ValueError for an ensemble that is too small to pass even if it is unanimous."""
        super().check(num_queries=num_queries, num_teachers=num_teachers, num_classes=num_classes, rounds=rounds)
        min_teachers = compute_min_teachers(self.threshold)
        if num_teachers < min_teachers:
            raise checks.error(
                "num_teachers",
                num_teachers,
                f"must be at least {min_teachers} for mechanism={self.name} at epsilon={self.epsilon:g} and "
                f"delta={self.delta:g} per query: the threshold is {self.threshold:.1f} moves, a gap of twice that",
                "Take more teachers, a larger epsilon or delta, or mechanism=gaussian.",
            )

    def worst_case_neighbors(self, num_queries: int) -> list[NeighborPair]:
        return make_distance_pairs(self.threshold, 1 / self.epsilon, num_queries)

    def privacy_events(self, num_queries: int, rounds: int = 1) -> tuple[PrivacyEvent, ...]:
        """Return the price of all questions, answered or not."""
        noise_event: PrivacyEvent = (
            events.PureDPEvent(epsilon=self.epsilon, count=num_queries)
            if self.discrete
            else events.LaplaceEvent(ratio=self.epsilon, count=num_queries)
        )
        return (noise_event, events.DeltaEvent(delta=self.delta, count=num_queries))

    def draw(self, votes: Votes, noise: NoiseSource, context: MechanismContext) -> Answers:
        """Test all questions."""
        noisy_Q = compute_instability_distance(votes.counts_QC) + noise.draw_laplace(
            (len(votes),), 1 / self.epsilon, votes.counts_QC.device
        )
        label_Q = torch.where(noisy_Q > self.threshold, votes.compute_plurality(), NO_ANSWER)
        return Answers(label_Q.to(torch.int64), self.privacy_events(len(votes)))
