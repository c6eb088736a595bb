"""Soft labels by stability: a released score in [0, 1] per query, paid for per failure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from pate_torch.core import checks
from pate_torch.mechanisms.sparse_vector import Blocks, SparseVector, distance
from pate_torch.noise.source import NoiseSource
from pate_torch.sensitive import SoftVotes, Votes
from pate_torch.types import NO_ANSWER, Answers, Context


@dataclass(frozen=True, kw_only=True)
class SoftStability(SparseVector):
    """Scores by stable histograms: bins of width g = 1/bins, then the same bins shifted by g/2, then "no answer".

    The first histogram is tested as in ``stability``; on failure (one counted, the threshold redrawn) the shifted one;
    on a second failure (another counted) there is no answer. Released: the center (2v-1)g/2 of the fullest bin, or v g
    of the shifted ones, as ``score_Q``; ``label_Q`` is whether it reaches 1/2. At most T failures in all, then it stops
    and the answers are those of a *prefix*.

    ``release_scores`` takes the teachers' scores; ``release`` takes the votes of two classes, as scores 0 and 1.

    Attributes:
        bins: Number of bins, 1/g.

    Guarantee: (epsilon, delta) for the whole release, as ``stability`` with up to l + T tests (a query may be tested
    twice), under the shards' adjacency: one teacher moves its scores, and both distances have sensitivity 1.
    Source: BTT18 Algorithms 6-8 (see ``sparse_vector`` for the errors put right).
    """

    takes: ClassVar[Any] = Votes | SoftVotes
    name: str = "soft_stability"
    bins: int

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.integer("mechanism.bins", self.bins, low=2, fix="It is 1/g, g the width of a bin.")

    def tests(self, num_queries: int) -> int:
        """The number of tests: a query may be tested twice, at most ``max_failures`` times over."""
        return num_queries + self.max_failures

    def check(self, *, num_queries: int, num_teachers: int, num_classes: int, rounds: int = 1) -> None:
        """Refuse what ``stability`` refuses, and votes of more than two classes.

        Raises:
            ValueError: The plan cannot work; the message says what would.
        """
        super().check(num_queries=num_queries, num_teachers=num_teachers, num_classes=num_classes, rounds=rounds)
        if num_classes != 2:
            raise checks.fail(
                "num_classes",
                num_classes,
                f"must be 2 for mechanism={self.name}: a score in [0, 1] says how much one class is preferred",
                "Take mechanism=stability, or release_scores on one score per class.",
            )

    def draw(self, votes: Votes | SoftVotes, noise: NoiseSource, context: Context) -> Answers:
        """Scores of soft votes (``context.num_queries`` counts scores), or of two-class votes: then 0 or 1."""
        if isinstance(votes, SoftVotes):
            return self._answer(votes.histogram(self.bins), votes.shifted(self.bins), noise, context)
        if votes.num_classes != 2:
            raise checks.fail("num_classes", votes.num_classes, f"must be 2 for mechanism={self.name}")
        counts_QV = torch.zeros(len(votes), self.bins, dtype=torch.int64, device=votes.counts_QC.device)
        counts_QV[:, [0, -1]] = votes.counts_QC.to(torch.int64)
        return self._answer(counts_QV, torch.zeros_like(counts_QV[:, 1:]), noise, context)

    def release_scores(self, soft: SoftVotes, noise: NoiseSource, context: Context) -> Answers:
        """Scores of soft votes; ``context.num_queries`` counts scores (C per query after ``per_class``)."""
        return self.release(soft, noise, context)

    def _answer(self, counts_QV: Tensor, shifted_QV: Tensor, noise: NoiseSource, context: Context) -> Answers:
        device, size = counts_QV.device, len(counts_QV)
        calibration = self.calibration(context.num_queries)
        # A column of zeros stands beside a single shifted bin, so that there is a second largest.
        padded_QV = torch.nn.functional.pad(shifted_QV, (0, 1))
        noisy_Q = distance(counts_QV) + noise.laplace((size,), 2 * calibration.scale, device)
        noisy_shifted_Q = distance(padded_QV) + noise.laplace((size,), 2 * calibration.scale, device)
        score_Q = (2 * counts_QV.argmax(1).double() + 1) / (2 * self.bins)
        shifted_score_Q = (padded_QV.argmax(1).double() + 1) / self.bins

        blocks = Blocks(calibration, noise, device, context)
        start = 0
        while start < size and not blocks.stopped:
            query = blocks.next_failure(noisy_Q, start)
            start = min(query + 1, size)
            if query == size:
                break
            score_Q[query] = torch.nan
            blocks.fail()
            if blocks.stopped:
                break
            if bool(noisy_shifted_Q[query] > blocks.threshold()):
                score_Q[query] = shifted_score_Q[query]
            else:
                blocks.fail()
        score_Q = score_Q[:start].clone()  # a view would carry the rest along
        label_Q = torch.where(score_Q.isnan(), NO_ANSWER, (score_Q >= 0.5).to(torch.int64))
        incurred = self._events(blocks.started, context.num_queries, first=blocks.first)
        return Answers(label_Q, incurred, score_Q=score_Q)
