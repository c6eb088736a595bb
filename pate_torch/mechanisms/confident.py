"""Confident and Interactive GNMax: a noisy check of each query, and GNMax for the queries that pass the check."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from pate_torch.accounting import ConfidentCost
from pate_torch.accounting.events import PrivacyEvent
from pate_torch.core import checks
from pate_torch.mechanisms.base import VoteMechanism
from pate_torch.mechanisms.neighboring_values import NeighborPair, make_screened_pairs
from pate_torch.privacy.noise import NoiseSource
from pate_torch.privacy.records import Answers, MechanismContext
from pate_torch.privacy.sensitive import Votes


@dataclass(frozen=True, kw_only=True)
class _ScreenedMechanism(VoteMechanism):
    """Base of the mechanisms that check each query and answer those that pass by GNMax.

    Attributes:
        sigma: Standard deviation of the noise of an answer, in votes.
        screen_sigma: Standard deviation of the noise of the check, in votes.
        threshold: Threshold of the check, in votes.
    """

    sigma: float
    screen_sigma: float
    threshold: float

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.noise_scale("mechanism.sigma", self.sigma, "mechanism.sigma is the noise of an answer, in votes.")
        fix = "mechanism.screen_sigma is the noise of the check, in votes."
        checks.noise_scale("mechanism.screen_sigma", self.screen_sigma, fix)
        checks.number("mechanism.threshold", self.threshold, "mechanism.threshold is a number of votes.")

    @property
    def cost(self) -> ConfidentCost:
        return ConfidentCost(self.sigma, screen_sigma=self.screen_sigma, discrete=self.discrete)

    def privacy_events(self, num_queries: int, rounds: int = 1) -> tuple[PrivacyEvent, ...]:
        return self.cost.privacy_events(num_queries)


@dataclass(frozen=True, kw_only=True)
class ConfidentGNMax(_ScreenedMechanism):
    """Confident GNMax: argmax(n + N(0, sigma^2)) if max(n) + N(0, screen_sigma^2) >= threshold, else no answer.

    The noise of the check is *one* number for each query. (Noise on the count of each class, before the maximum,
    would have a higher cost.)

    Attributes:
        threshold: Number of votes that the noisy top count must reach.
        max_answers: Number of answers, over all rounds, after which the mechanism stops. None if the mechanism never
            stops. Later queries cost nothing, and the answers are those of a *prefix* of the queries.

    Guarantee: rho = 1/(2 screen_sigma^2) for each checked query and 1/sigma^2 for each answered query, both
    Gaussian (GDP with mu = 1/screen_sigma and sqrt(2)/sigma), under the adjacency of the shards (the top count has
    sensitivity 1). The set of answered queries depends on private data, so the guarantee of a release is the worst
    case that ``privacy_events`` returns (Smith & Thakurta 2022). Discrete noise has the same rho, but no GDP guarantee.
    Source: PATE 2018 (arXiv 1802.08908) Algorithm 1.
    """

    name: str = "confident"
    max_answers: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        fix = "Null sets no cap on answers."
        checks.optional(checks.integer, "mechanism.max_answers", self.max_answers, low=1, fix=fix)

    def check(self, *, num_queries: int, num_teachers: int, num_classes: int, rounds: int = 1) -> None:
        """Raise ValueError if unanimous teachers pass the check less than once in a thousand queries."""
        super().check(num_queries=num_queries, num_teachers=num_teachers, num_classes=num_classes, rounds=rounds)
        if self.threshold > num_teachers + 3.1 * self.screen_sigma:
            rule = f"is out of reach of {num_teachers} teachers, even unanimous, at screen_sigma={self.screen_sigma:g}"
            fix = f"Set mechanism.threshold below {num_teachers}, or train more teachers."
            raise checks.error("mechanism.threshold", self.threshold, rule, fix)

    @property
    def has_independent_queries(self) -> bool:
        return self.max_answers is None

    def worst_case_neighbors(self, num_queries: int) -> list[NeighborPair]:
        return make_screened_pairs(self.threshold, self.screen_sigma, self.sigma, num_queries)

    @property
    def cost(self) -> ConfidentCost:
        return replace(super().cost, max_answers=self.max_answers, threshold=self.threshold)

    def draw(self, votes: Votes, noise: NoiseSource, context: MechanismContext) -> Answers:
        top_Q = self._cast_counts(votes).max(1).values
        passed_Q = top_Q + noise.draw_gaussian((len(votes),), self.screen_sigma, top_Q.device) >= self.threshold
        if self.max_answers is not None:  # keep the queries up to the last answer that is allowed
            max_passes = self.max_answers - context.num_answered
            passed_Q = passed_Q[: int((passed_Q.cumsum(0) - passed_Q.long() < max_passes).sum())]
        num_asked = len(passed_Q)
        asked_votes = votes.select(torch.arange(num_asked))
        label_Q = self._draw_labels_where(asked_votes, noise, self.sigma, passed_Q)
        return Answers(label_Q, self.cost.make_events(num_asked, int(passed_Q.sum())))

    def make_outcome_model(self) -> ConfidentCost | None:
        return self.cost if self.cost.has_data_dependent_cost else None


@dataclass(frozen=True, kw_only=True)
class InteractiveGNMax(_ScreenedMechanism):
    """Interactive GNMax: the teachers answer by GNMax where their votes contradict the student's prediction.

    Let p be the class probabilities of the student, which are public. If max_c(n_c - K p_c) + N(0, screen_sigma^2) >=
    threshold, the answer is argmax(n + N(0, sigma^2)). Otherwise the answer is the student's label if max p >
    student_confidence, else there is no answer. In the first round there is no student: p is uniform, and only the
    teachers answer.

    Attributes:
        student_confidence: Probability above which the student's label is the answer.

    Guarantee: that of ``ConfidentGNMax``, under the adjacency of the shards. (p depends on a unit by earlier answers
    alone, and max_c(n_c - K p_c) has sensitivity 1.) With discrete noise, K p_c is rounded to whole votes.
    Source: PATE 2018 (arXiv 1802.08908) Algorithm 2.
    """

    uses_guide: ClassVar[bool] = True
    name: str = "interactive"
    student_confidence: float

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.between("mechanism.student_confidence", self.student_confidence, 0, 1)

    def worst_case_neighbors(self, num_queries: int) -> list[NeighborPair]:
        # The student is sure of the second class, so the count of the first class is the value of the check.
        return make_screened_pairs(self.threshold, self.screen_sigma, self.sigma, num_queries, student=(0.0, 1.0))

    def draw(self, votes: Votes, noise: NoiseSource, context: MechanismContext) -> Answers:
        counts_QC = self._cast_counts(votes)
        student_QC = _get_student_probabilities(votes, context)
        expected_QC = votes.num_teachers * student_QC
        excess_QC = counts_QC - (expected_QC.round().to(torch.int64) if self.discrete else expected_QC)
        screen_Q = noise.draw_gaussian((len(votes),), self.screen_sigma, counts_QC.device)
        passed_Q = excess_QC.max(1).values + screen_Q >= self.threshold
        label_Q = self._draw_labels_where(votes, noise, self.sigma, passed_Q)
        from_student_Q = torch.zeros_like(passed_Q)
        if context.student_QC is not None:
            confidence_Q, student_label_Q = student_QC.max(1)
            from_student_Q = ~passed_Q & (confidence_Q > self.student_confidence)
            label_Q = torch.where(from_student_Q, student_label_Q, label_Q)
        return Answers(label_Q, self.cost.make_events(len(votes), int(passed_Q.sum())), from_student_Q=from_student_Q)


def _get_student_probabilities(votes: Votes, context: MechanismContext) -> Tensor:
    """Return the student's probabilities on the device of the votes, float64 [Q, C], or 1/C without a student."""
    shape, device = votes.counts_QC.shape, votes.counts_QC.device
    if context.student_QC is None:
        return torch.full(shape, 1 / shape[1], dtype=torch.float64, device=device)
    student_QC = context.student_QC.to(device, torch.float64)
    if student_QC.shape != shape:
        raise ValueError(f"student probabilities: the shape must be {tuple(shape)}, not {tuple(student_QC.shape)}")
    is_probability_QC, is_normalized_Q = (student_QC >= 0) & (student_QC <= 1), (student_QC.sum(1) - 1).abs() < 1e-3
    if not (bool(is_probability_QC.all()) and bool(is_normalized_Q.all())):  # also refuses NaN
        raise ValueError("student probabilities: all values must lie in [0, 1], and every row must sum to 1")
    return student_QC
