"""Interactive GNMax: the teachers answer only the questions on which they disagree with the student."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from pate_torch.accounting.events import PrivacyEvent
from pate_torch.core import checks
from pate_torch.mechanisms.base import VoteMechanism
from pate_torch.mechanisms.confident import make_screen_event
from pate_torch.mechanisms.gaussian import make_answer_event
from pate_torch.mechanisms.neighbors import NeighborPair, make_screened_pairs
from pate_torch.privacy.noise import NoiseSource
from pate_torch.privacy.records import Answers, MechanismContext
from pate_torch.privacy.sensitive import Votes


@dataclass(frozen=True, kw_only=True)
class InteractiveGNMax(VoteMechanism):
    """Interactive GNMax: a check of the votes against the student's expectation, then GNMax for those that exceed it.

    Let p be the class probabilities of the student, which are public. If max_c(n_c - K p_c) + N(0, screen_sigma^2) >=
    threshold, the answer is argmax(n + N(0, sigma^2)). Otherwise it is the student's label if max p >
    student_confidence, and there is no answer if not. In the first round there is no student: p is uniform, and no
    label is the student's.

    Attributes:
        sigma: Standard deviation of the noise of an answer, in votes.
        screen_sigma: Standard deviation of the noise of the check, in votes.
        threshold: Threshold of the check, in votes.
        student_confidence: Probability above which the student's label is the answer.

    Guarantee: rho = 1/(2 screen_sigma^2) for each checked question and 1/sigma^2 for each question that the teachers
    answer, both Gaussian, under the adjacency of the shards (p depends on a unit only through earlier answers, and
    max_c(n_c - K p_c) has sensitivity 1). The guarantee is the worst case that ``privacy_events`` returns. With
    discrete noise K p_c is rounded to whole votes, because integer noise protects integers only; rho is the same, by
    zCDP.
    Source: PATE 2018 (arXiv 1802.08908) Algorithm 2.
    """

    uses_guide: ClassVar[bool] = True
    name: str = "interactive"
    sigma: float
    screen_sigma: float
    threshold: float
    student_confidence: float

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.noise_scale("mechanism.sigma", self.sigma, "It is the noise of the answer, in votes.")
        checks.noise_scale("mechanism.screen_sigma", self.screen_sigma, "It is the noise of the check, in votes.")
        checks.number("mechanism.threshold", self.threshold, "It is a number of votes.")
        checks.between("mechanism.student_confidence", self.student_confidence, 0, 1)

    def _make_events(self, num_asked: int, num_answered: int) -> tuple[PrivacyEvent, ...]:
        return (
            make_screen_event(self.screen_sigma, num_asked, self.discrete),
            make_answer_event(self.sigma, num_answered, self.discrete),
        )

    def worst_case_neighbors(self, num_queries: int) -> list[NeighborPair]:
        """A student who is sure of the second class expects none of the first, whose count is then the excess."""
        return make_screened_pairs(self.threshold, self.screen_sigma, self.sigma, num_queries, student=(0.0, 1.0))

    def privacy_events(self, num_queries: int, rounds: int = 1) -> tuple[PrivacyEvent, ...]:
        """Return the price of a check and an answer for each question."""
        return self._make_events(num_queries, num_queries)

    def draw(self, votes: Votes, noise: NoiseSource, context: MechanismContext) -> Answers:
        """Check all questions, then answer.

        Raises:
            ValueError: The student's probabilities are no probabilities.
        """
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
        return Answers(label_Q, self._make_events(len(votes), int(passed_Q.sum())), from_student_Q=from_student_Q)


def _get_student_probabilities(votes: Votes, context: MechanismContext) -> Tensor:
    """Return the student's probabilities on the device of the votes, float64 [Q, C]; uniform without a student."""
    shape = votes.counts_QC.shape
    device = votes.counts_QC.device
    if context.student_QC is None:
        return torch.full(shape, 1 / shape[1], dtype=torch.float64, device=device)
    student_QC = context.student_QC.to(device, torch.float64)
    if student_QC.shape != shape:
        raise ValueError(f"student probabilities: shape {tuple(student_QC.shape)}, must be {tuple(shape)}")
    # Written so that NaN fails.
    if not bool(((student_QC >= 0) & (student_QC <= 1)).all()) or not bool(
        ((student_QC.sum(1) - 1).abs() < 1e-3).all()
    ):
        raise ValueError("student probabilities: every row must lie in [0, 1] and sum to 1")
    return student_QC
