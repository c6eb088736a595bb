"""Mechanisms that answer with the exact winner of stable votes, tested by the sparse vector technique or one by one.

The sparse vector technique pays for failed tests only, for hard and soft labels:

    block: w_hat = w + Lap(lambda)
    each test: pass if dist + Lap(2 lambda) > w_hat; the first test that fails ends the block

Here w is the threshold, lambda the noise scale, and ``dist`` the number of moved votes that cannot change the winner.
This module corrects four errors of the papers:

- BTT18 Algorithms 4 and 8 and NB20 Algorithm 5 use the distance ``top - second (- 1)``, whose sensitivity is 2. We
  halve the gap.
- BTT18 loops while failures <= T, which allows T + 1 failures. We stop after T.
- BTT18 Algorithm 6 tests w = lambda ln(4m/delta) against Lap(2 lambda) noise, which lacks a factor 2.
- LZCW21 Algorithm 6 prints w + 1 for w + Lap(lambda).
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from pate_torch.accounting import SparseVectorCost, calibrate_noise
from pate_torch.accounting.costs import compute_min_teachers
from pate_torch.accounting.events import DeltaEvent, LaplaceEvent, PrivacyEvent, PureDPEvent
from pate_torch.accounting.filters import DELTA_OVER_FAILURE
from pate_torch.core import checks
from pate_torch.mechanisms.base import VoteMechanism
from pate_torch.mechanisms.neighboring_values import NeighborPair, make_distance_pairs
from pate_torch.privacy.noise import NoiseSource
from pate_torch.privacy.records import NO_ANSWER, Answers, MechanismContext
from pate_torch.privacy.sensitive import SoftVotes, Votes


def compute_instability_distance(counts_QC: Tensor) -> Tensor:
    """Compute the distance to instability max(0, ceil(gap / 2) - 1), int64 [Q].

    The distance has sensitivity 1, and is 0 if the winner of some neighbor differs.
    """
    best_Q2 = counts_QC.to(torch.int64).topk(2, dim=1).values
    gap_Q = best_Q2[:, 0] - best_Q2[:, 1]
    return ((gap_Q + 1) // 2 - 1).clamp(min=0)


@functools.lru_cache(maxsize=1024)
def _calibrate_noise_scale(epsilon: float, delta: float, max_failures: int, failure_delta: float) -> float:
    """Compute the smallest lambda with which all thresholds and ``failure_delta`` cost (epsilon, delta)."""
    make_cost = functools.partial(SparseVectorCost, max_failures=max_failures, failure_delta=failure_delta, num_tests=1)
    return calibrate_noise(make_cost, 1, epsilon=epsilon, delta=delta)


@dataclass(frozen=True, kw_only=True)
class SparseVectorMechanism(VoteMechanism):
    """Base of the mechanisms that pay for each failed test: costs and calibration.

    Attributes:
        epsilon: Epsilon of the whole release.
        delta: Delta of the whole release.
        max_failures: Number T of failed tests, in all calls together, after which the mechanism stops.
        failure_delta: Part of delta for the event that an unstable query passes, which the account reserves for
            failures. None for delta/40, a quarter of the default reserve. (The papers take delta/2.)
    """

    epsilon: float
    delta: float
    max_failures: int
    failure_delta: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.positive("mechanism.epsilon", self.epsilon)
        checks.delta("mechanism.delta", self.delta)
        checks.integer("mechanism.max_failures", self.max_failures, low=1)
        if self.failure_delta is None:
            object.__setattr__(self, "failure_delta", self.delta / DELTA_OVER_FAILURE)
        checks.between("mechanism.failure_delta", self.failure_delta, 0, self.delta, exclusive=True)

    def count_tests(self, num_queries: int, num_classes: int) -> int:
        """Return the largest number of noisy tests for ``num_queries`` queries."""
        return num_queries

    def make_cost(self, num_queries: int, num_classes: int = 2) -> SparseVectorCost:
        """Compute the cost, with noise scale and threshold, of a release of ``num_queries`` queries."""
        assert self.failure_delta is not None
        return SparseVectorCost(
            _calibrate_noise_scale(self.epsilon, self.delta, self.max_failures, self.failure_delta),
            max_failures=self.max_failures,
            failure_delta=self.failure_delta,
            num_tests=max(1, self.count_tests(num_queries, num_classes)),
            discrete=self.discrete,
        )

    def check(self, *, num_queries: int, num_teachers: int, num_classes: int, rounds: int = 1) -> None:
        """Raise ValueError if there are so few teachers that even unanimous votes fail the test."""
        super().check(num_queries=num_queries, num_teachers=num_teachers, num_classes=num_classes, rounds=rounds)
        cost = self.make_cost(num_queries, num_classes)
        if num_teachers < cost.min_teachers:
            rule = (
                f"must be at least {cost.min_teachers} for mechanism={self.name}: epsilon={self.epsilon:g}, "
                f"delta={self.delta:g}, max_failures={self.max_failures} and {num_queries} queries require "
                f"lambda={cost.noise_scale:.1f} and w={cost.threshold:.1f}, and only a gap above 2w passes"
            )
            fix = "Use more teachers, fewer failures, a larger epsilon, or mechanism=gaussian."
            raise checks.error("num_teachers", num_teachers, rule, fix)

    @property
    def has_independent_queries(self) -> bool:
        return False

    def worst_case_neighbors(self, num_queries: int) -> list[NeighborPair]:
        cost = self.make_cost(num_queries)
        return make_distance_pairs(cost.threshold, 2 * cost.noise_scale, num_queries)

    def privacy_events(self, num_queries: int, rounds: int = 1) -> tuple[PrivacyEvent, ...]:
        return self.make_cost(num_queries).privacy_events(num_queries)


class NoisyThresholds:
    """The noisy thresholds of a release. Each threshold is drawn when needed, and used until a test fails.

    Args:
        cost: Cost of the release, with its noise scale and threshold.
        noise: Source of noise, whose ``state`` stores the current threshold for the next call.
        device: Device of the noisy distances.
        context: Context of the call. Its ``round_index`` is 0 in the first call of a release.
    """

    def __init__(
        self, cost: SparseVectorCost, noise: NoiseSource, device: torch.device, context: MechanismContext
    ) -> None:
        self._cost, self._noise, self._device, self._state = cost, noise, device, noise.state
        if context.round_index == 0:
            assert not context.num_answered and not context.num_failures
            self._state.clear()
            self._state.update(failures=0, blocks=0)
        elif "blocks" not in self._state:
            raise ValueError("noise: a later call needs the threshold of the first call, and noise.state has none")
        self._num_blocks_before = int(self._state["blocks"])

    @property
    def is_stopped(self) -> bool:
        """Whether the last allowed failure has happened."""
        return self._state["failures"] >= self._cost.max_failures

    def get_noisy_threshold(self) -> float:
        """Return the noisy threshold w_hat of the current block."""
        assert not self.is_stopped
        if "threshold" not in self._state:
            self._state["blocks"] += 1
            noise = self._noise.draw_laplace((1,), self._cost.noise_scale, self._device)
            self._state["threshold"] = self._cost.threshold + float(noise)
        return self._state["threshold"]

    def make_events(self) -> tuple[PrivacyEvent, ...]:
        """Make the events of this call: its new thresholds, and delta if it drew the first threshold of the release."""
        num_blocks = int(self._state["blocks"])
        is_first = self._num_blocks_before == 0 < num_blocks
        return self._cost.make_events(num_blocks - self._num_blocks_before, with_delta=is_first)

    def end_block(self) -> None:
        self._state["failures"] += 1
        del self._state["threshold"]

    def find_next_failure(self, noisy_Q: Tensor, start: int) -> int:
        """Return the first index >= ``start`` whose noisy distance is at most w_hat, or len(noisy_Q).

        The result is the same as testing one query at a time, because the threshold changes at failures only.
        """
        failure_indices = (noisy_Q[start:] <= self.get_noisy_threshold()).nonzero()
        return start + int(failure_indices[0]) if len(failure_indices) else len(noisy_Q)


@dataclass(frozen=True, kw_only=True)
class SparseVector(SparseVectorMechanism):
    """The exact plurality if dist + Lap(2 lambda) > w + Lap(lambda), else no answer, until the T-th failure.

    dist = max(0, ceil(gap/2) - 1) is the number of moved votes that cannot change the winner, for any number of
    classes. lambda and w, in votes, follow from (epsilon, delta, T, number of queries). A noisy threshold is used
    until the first failed test, over all rounds. If the mechanism stops early, the answers are those of a *prefix*.

    Guarantee: (epsilon, delta) for the whole release, with adaptive queries, under the adjacency of the shards (one
    teacher changes its vote, so dist has sensitivity 1). Each noisy threshold that is drawn is (2/lambda)-DP, and
    ``failure_delta`` is paid once for the event that an unstable query passes.
    Source: LZCW21 Algorithm 2; BTT18 Algorithms 3-4 (the module's docstring lists the corrected errors).
    """

    name: str = "sparse_vector"

    def draw(self, votes: Votes, noise: NoiseSource, context: MechanismContext) -> Answers:
        device = votes.counts_QC.device
        cost = self.make_cost(context.num_queries)
        noise_Q = noise.draw_laplace((len(votes),), 2 * cost.noise_scale, device)
        noisy_Q = compute_instability_distance(votes.counts_QC) + noise_Q
        label_Q = votes.compute_plurality()
        blocks = NoisyThresholds(cost, noise, device, context)
        start = 0
        while start < len(votes) and not blocks.is_stopped:
            query = blocks.find_next_failure(noisy_Q, start)
            start = min(query + 1, len(votes))
            if query < len(votes):
                label_Q[query] = NO_ANSWER
                blocks.end_block()
        # The clone is needed, because a view would share memory with the exact labels after the stop.
        return Answers(label_Q[:start].clone(), blocks.make_events())


@dataclass(frozen=True, kw_only=True)
class SoftSparseVector(SparseVectorMechanism):
    """Class scores by stable histograms with bins of width g = 1/bins, and with the same bins shifted by g/2.

    With two classes the score of the second class is tested, with more classes the scores of all classes, one after the
    other. The histogram of the teachers' scores is tested as in ``sparse_vector``. If the test fails, the threshold is
    redrawn and the shifted histogram is tested. If this test fails, too, the threshold is redrawn and there is no
    score. ``score_QC`` holds the center (2v-1)g/2 of the fullest bin, or v g for a shifted bin. ``label_Q`` is the
    class of the largest score, or NO_ANSWER if a score of the query is missing. The mechanism stops after T
    failures, and the answers are those of a *prefix*. Votes are treated as scores 0 and 1.

    Attributes:
        bins: Number of bins, 1/g.

    Guarantee: (epsilon, delta) for the whole release, as for ``sparse_vector`` with at most l S + T tests, under the
    adjacency of the shards. Here l is the number of queries and S the number of scores for each query. T scores
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
        cost = self.make_cost(num_queries, 3)
        soft_pairs = make_distance_pairs(cost.threshold, 2 * cost.noise_scale, num_queries, bins=self.bins)
        return super().worst_case_neighbors(num_queries) + soft_pairs

    def draw(self, votes: Votes | SoftVotes, noise: NoiseSource, context: MechanismContext) -> Answers:
        if isinstance(votes, SoftVotes):
            if votes.counts_QSV.shape[2] != self.bins:
                raise checks.error("mechanism.bins", self.bins, f"must be {votes.counts_QSV.shape[2]}, as in the votes")
            counts_SV, shifted_SV = (c.flatten(0, 1).to(torch.int64) for c in (votes.counts_QSV, votes.shifted_QSW))
        else:
            ones_S = votes.counts_QC[:, -_count_scores_per_query(votes.num_classes) :].to(torch.int64).flatten()
            counts_SV = torch.zeros(len(ones_S), self.bins, dtype=torch.int64, device=ones_S.device)
            counts_SV[:, 0], counts_SV[:, -1] = votes.num_teachers - ones_S, ones_S
            shifted_SV = torch.zeros_like(counts_SV[:, 1:])
        score_S, incurred_events = self._draw_scores(counts_SV, shifted_SV, votes.num_classes, noise, context)
        num_scores = _count_scores_per_query(votes.num_classes)
        # A query whose scores are incomplete after the last failure has no answer. The clone is needed, because a
        # view would share memory with the scores of later queries.
        score_QC = score_S[: len(score_S) // num_scores * num_scores].view(-1, num_scores).clone()
        score_QC = torch.cat([1 - score_QC, score_QC], 1) if num_scores == 1 else score_QC
        # Among equal scores the last class wins, as in the paper.
        largest_class_Q = score_QC.shape[1] - 1 - score_QC.flip(1).argmax(1)
        label_Q = torch.where(score_QC.isnan().any(1), NO_ANSWER, largest_class_Q)
        return Answers(label_Q, incurred_events, score_QC=score_QC)

    def _draw_scores(
        self, counts_SV: Tensor, shifted_SV: Tensor, num_classes: int, noise: NoiseSource, context: MechanismContext
    ) -> tuple[Tensor, tuple[PrivacyEvent, ...]]:
        """Draw the scores of a prefix of the queries, NaN for a missing score, and return them with their events."""
        device, size = counts_SV.device, len(counts_SV)
        cost = self.make_cost(context.num_queries, num_classes)
        # A column of zeros is appended, so that there is a second largest count even with a single shifted bin.
        padded_SV = torch.nn.functional.pad(shifted_SV, (0, 1))
        noisy_S = compute_instability_distance(counts_SV) + noise.draw_laplace((size,), 2 * cost.noise_scale, device)
        shifted_noise_S = noise.draw_laplace((size,), 2 * cost.noise_scale, device)
        noisy_shifted_S = compute_instability_distance(padded_SV) + shifted_noise_S
        score_S = (2 * counts_SV.argmax(1).double() + 1) / (2 * self.bins)
        shifted_score_S = (padded_SV.argmax(1).double() + 1) / self.bins

        blocks = NoisyThresholds(cost, noise, device, context)
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
    """Return the number of tested scores for each query."""
    return 1 if num_classes == 2 else num_classes


@dataclass(frozen=True, kw_only=True)
class DistanceToInstability(VoteMechanism):
    """The exact plurality if dist + Lap(1/epsilon) > ln(1/delta)/epsilon, else no answer, at a cost per query.

    dist = max(0, ceil(gap/2) - 1) is the number of moved votes that cannot change the winner. Use this mechanism for
    few queries, and ``SparseVector`` for many.

    Attributes:
        epsilon: Epsilon of *one query*.
        delta: Delta of *one query*.

    Guarantee: (epsilon, delta) for each query under the adjacency of the shards (dist has sensitivity 1). The cost
    is one Laplace event of ratio epsilon, and delta for the event that a test passes although its winner differs
    between neighbors. (Then dist is 0, and the test passes with probability delta/2, or slightly more with discrete
    noise.)
    Source: BTT18 Algorithm 2 and Theorem 3.2 (Smith & Thakurta 2013).
    """

    name: str = "single_stable"
    epsilon: float
    delta: float

    def __post_init__(self) -> None:
        super().__post_init__()
        fix = "mechanism.epsilon is the cost of one query."
        checks.between("mechanism.epsilon", self.epsilon, 0, 1 / checks.MIN_NOISE_SCALE, exclusive=True, fix=fix)
        checks.delta("mechanism.delta", self.delta)

    @property
    def threshold(self) -> float:
        """Threshold ln(1/delta)/epsilon, in moved votes."""
        return math.log(1 / self.delta) / self.epsilon

    @property
    def min_teachers(self) -> int:
        """Smallest number of teachers whose unanimous vote passes with probability at least 1/2."""
        return compute_min_teachers(self.threshold)

    def check(self, *, num_queries: int, num_teachers: int, num_classes: int, rounds: int = 1) -> None:
        """Raise ValueError if there are so few teachers that even unanimous votes fail the test."""
        super().check(num_queries=num_queries, num_teachers=num_teachers, num_classes=num_classes, rounds=rounds)
        if num_teachers < self.min_teachers:
            rule = (
                f"must be at least {self.min_teachers} for mechanism={self.name} at epsilon={self.epsilon:g} and "
                f"delta={self.delta:g} per query: only a gap above {2 * self.threshold:.1f} votes passes"
            )
            fix = "Use more teachers, a larger epsilon or delta, or mechanism=gaussian."
            raise checks.error("num_teachers", num_teachers, rule, fix)

    def worst_case_neighbors(self, num_queries: int) -> list[NeighborPair]:
        return make_distance_pairs(self.threshold, 1 / self.epsilon, num_queries)

    def privacy_events(self, num_queries: int, rounds: int = 1) -> tuple[PrivacyEvent, ...]:
        # Each query is paid for, answered or not.
        delta_event = DeltaEvent(delta=self.delta, count=num_queries)
        if self.discrete:
            return PureDPEvent(epsilon=self.epsilon, count=num_queries), delta_event
        return LaplaceEvent(ratio=self.epsilon, count=num_queries), delta_event

    def draw(self, votes: Votes, noise: NoiseSource, context: MechanismContext) -> Answers:
        noise_Q = noise.draw_laplace((len(votes),), 1 / self.epsilon, votes.counts_QC.device)
        noisy_Q = compute_instability_distance(votes.counts_QC) + noise_Q
        label_Q = torch.where(noisy_Q > self.threshold, votes.compute_plurality(), NO_ANSWER)
        return Answers(label_Q.to(torch.int64), self.privacy_events(len(votes)))
