"""Soft labels by stability: class scores in [0, 1] for each question, at a price for each failed test."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from pate_torch.accounting.events import PrivacyEvent
from pate_torch.core import checks
from pate_torch.mechanisms.neighbors import NeighborPair, make_distance_pairs
from pate_torch.mechanisms.sparse_vector import NoisyThresholds, SparseVectorMechanism, compute_instability_distance
from pate_torch.privacy.noise import NoiseSource
from pate_torch.privacy.records import NO_ANSWER, Answers, MechanismContext
from pate_torch.privacy.sensitive import SoftVotes, Votes


@dataclass(frozen=True, kw_only=True)
class SoftSparseVector(SparseVectorMechanism):
    """Class scores by stable histograms with bins of width g = 1/bins, and with the same bins shifted by g/2.

    With two classes the score of the second class is tested, with more classes the scores of all classes, one after the
    other. The histogram of the teachers' scores is tested as in ``sparse_vector``. If the test fails, the threshold is
    redrawn and the shifted histogram is tested. If this test fails, too, the threshold is redrawn and there is no
    score. ``score_QC`` holds the center (2v-1)g/2 of the fullest bin, or v g for a shifted bin. ``label_Q`` is the
    class of the largest score, or NO_ANSWER if a score of the question is missing. The mechanism stops after T
    failures, and the answers are those of a *prefix*. Votes are treated as scores 0 and 1.

    Attributes:
        bins: Number of bins, 1/g.

    Guarantee: (epsilon, delta) for the whole release, as for ``sparse_vector`` with at most l S + T tests, under the
    adjacency of the shards. Here l is the number of questions and S the number of scores for each question. T scores
    may be tested twice. One teacher changes its scores, and both distances have sensitivity 1.
    Source: BTT18 Algorithms 6-8 (``sparse_vector`` lists the corrected errors).
    """

    soft: ClassVar[bool] = True
    input_type: ClassVar[Any] = Votes | SoftVotes
    name: str = "soft_sparse_vector"
    bins: int

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.integer("mechanism.bins", self.bins, low=2, fix="A histogram of scores needs two bins.")

    def count_tests(self, num_queries: int, num_classes: int) -> int:
        # At most ``max_failures`` scores are tested twice.
        return num_queries * _count_scores_per_query(num_classes) + self.max_failures

    def worst_case_neighbors(self, num_queries: int) -> list[NeighborPair]:
        scales = self.compute_scales(num_queries, 3)
        soft_pairs = make_distance_pairs(scales.threshold, 2 * scales.noise_scale, num_queries, soft=True)
        return super().worst_case_neighbors(num_queries) + soft_pairs

    def draw(self, votes: Votes | SoftVotes, noise: NoiseSource, context: MechanismContext) -> Answers:
        if isinstance(votes, SoftVotes):
            counts_SV, shifted_SV = votes.compute_histogram(self.bins), votes.compute_shifted_histogram(self.bins)
        else:
            ones_S = votes.counts_QC[:, -_count_scores_per_query(votes.num_classes) :].to(torch.int64).flatten()
            counts_SV = torch.zeros(len(ones_S), self.bins, dtype=torch.int64, device=ones_S.device)
            counts_SV[:, 0], counts_SV[:, -1] = votes.num_teachers - ones_S, ones_S
            shifted_SV = torch.zeros_like(counts_SV[:, 1:])
        score_S, incurred_events = self._draw_scores(counts_SV, shifted_SV, votes.num_classes, noise, context)
        num_scores = _count_scores_per_query(votes.num_classes)
        # A question whose scores are incomplete after the last failure has no answer. The clone is needed, because a
        # view would share memory with the scores of later questions.
        score_QC = score_S[: len(score_S) // num_scores * num_scores].view(-1, num_scores).clone()
        score_QC = torch.cat([1 - score_QC, score_QC], 1) if num_scores == 1 else score_QC
        # Among equal scores the last class wins, as in the paper.
        largest_class_Q = score_QC.shape[1] - 1 - score_QC.flip(1).argmax(1)
        label_Q = torch.where(score_QC.isnan().any(1), NO_ANSWER, largest_class_Q)
        return Answers(label_Q, incurred_events, score_QC=score_QC)

    def _draw_scores(
        self, counts_SV: Tensor, shifted_SV: Tensor, num_classes: int, noise: NoiseSource, context: MechanismContext
    ) -> tuple[Tensor, tuple[PrivacyEvent, ...]]:
        """Draw the scores of a prefix of the questions, NaN for a missing score, and return them with their events."""
        device, size = counts_SV.device, len(counts_SV)
        scales = self.compute_scales(context.num_queries, num_classes)
        # A column of zeros is appended, so that there is a second largest count even with a single shifted bin.
        padded_SV = torch.nn.functional.pad(shifted_SV, (0, 1))
        noisy_S = compute_instability_distance(counts_SV) + noise.draw_laplace((size,), 2 * scales.noise_scale, device)
        shifted_noise_S = noise.draw_laplace((size,), 2 * scales.noise_scale, device)
        noisy_shifted_S = compute_instability_distance(padded_SV) + shifted_noise_S
        score_S = (2 * counts_SV.argmax(1).double() + 1) / (2 * self.bins)
        shifted_score_S = (padded_SV.argmax(1).double() + 1) / self.bins

        blocks = NoisyThresholds(scales, noise, device, context)
        start = 0
        while start < size and not blocks.is_stopped:
            score_index = blocks.find_next_failure(noisy_S, start)
            start = min(score_index + 1, size)
            if score_index == size:
                break
            score_S[score_index] = torch.nan
            blocks.end_block()
            if blocks.is_stopped:
                break
            if bool(noisy_shifted_S[score_index] > blocks.get_noisy_threshold()):
                score_S[score_index] = shifted_score_S[score_index]
            else:
                blocks.end_block()
        return score_S[:start], blocks.make_events()


def _count_scores_per_query(num_classes: int) -> int:
    """Return the number of tested scores for each question."""
    return 1 if num_classes == 2 else num_classes
