"""Neighboring votes on which each mechanism shows most, and the settings under which it answers at all."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pate_torch.core import checks
from pate_torch.mechanisms.base import Mechanism, VoteMechanism
from pate_torch.mechanisms.confident import ConfidentGNMax
from pate_torch.mechanisms.distance_to_instability import DistanceToInstability
from pate_torch.mechanisms.gradient_descent import GradientDescent
from pate_torch.mechanisms.histogram import Histogram
from pate_torch.mechanisms.interactive import InteractiveGNMax
from pate_torch.mechanisms.soft_sparse_vector import SoftSparseVector
from pate_torch.mechanisms.sparse_vector_base import SparseVectorMechanism
from pate_torch.privacy.sensitive import (
    COUNT_SENSITIVITY,
    GRID_STEPS,
    CellHistogram,
    GradientSums,
    SoftVotes,
    Votes,
    make_vector_sum_sensitivity,
)


@dataclass(frozen=True, kw_only=True, eq=False)
class NeighborPair:
    """Two neighboring vote tables [queries, C]: in every row at most one vote has moved. Not private: made up.

    Attributes:
        student_QC: The student's class probabilities, for mechanisms that look at them.
        adjacency: For a table of cell counts: in the whole of it one count is added, removed or moved. None: for votes.
    """

    name: str
    left_QC: Tensor
    right_QC: Tensor
    student_QC: Tensor | None = None
    adjacency: str | None = None

    def __post_init__(self) -> None:
        if self.adjacency is not None:
            difference_QC = self.left_QC - self.right_QC
            changes, net_change = int(difference_QC.abs().sum()), int(difference_QC.sum())
            is_neighbor = changes <= 1 if self.adjacency == "add_remove" else changes <= 2 and net_change == 0
            if self.left_QC.shape != self.right_QC.shape or not is_neighbor:
                raise ValueError(f"pair {self.name!r}: the sides are not neighbors (one record in the whole table)")
            return
        change_Q = (self.left_QC - self.right_QC).abs().sum(1)
        if self.left_QC.shape != self.right_QC.shape or bool((change_Q > 2).any()):
            raise ValueError(f"pair {self.name!r}: the sides are not neighbors (one vote may move in each query)")
        if int(self.left_QC[0].sum()) != int(self.right_QC[0].sum()):
            raise ValueError(f"pair {self.name!r}: both sides need the same teachers")

    @property
    def num_queries(self) -> int:
        """How many rows the tables have."""
        return len(self.left_QC)

    @property
    def groups(self) -> list[int]:
        """Queries with equal rows on both sides share a number."""
        rows = [tuple(row) for row in torch.cat([self.left_QC, self.right_QC], 1).tolist()]
        return [rows.index(row) for row in rows]

    def make_votes(self, side: str) -> Votes | SoftVotes | CellHistogram | GradientSums:
        """The table of one side, ``left`` or ``right``, as the mechanism takes it."""
        counts_QC = self.left_QC if side == "left" else self.right_QC
        if self.adjacency is not None:
            return CellHistogram(counts_QC, COUNT_SENSITIVITY[self.adjacency], torch.arange(len(counts_QC)))
        return Votes(counts_QC, int(counts_QC[0].sum()))

    def check(self, mechanism: Mechanism) -> None:
        """Make the check that a mechanism for votes makes of a plan; raises its ValueError."""
        votes = self.make_votes("left")
        if isinstance(mechanism, VoteMechanism) and isinstance(votes, Votes | SoftVotes):
            teachers, classes = votes.num_teachers, votes.num_classes
            mechanism.check(num_queries=self.num_queries, num_teachers=teachers, num_classes=classes)


@dataclass(frozen=True, kw_only=True, eq=False)
class SoftPair(NeighborPair):
    """Probabilities of teachers who are of one of two opinions, as many as a row says; one teacher has moved.

    Attributes:
        probability_2C: Class probabilities of either opinion.
    """

    probability_2C: Tensor

    def __post_init__(self) -> None:
        super().__post_init__()
        if bool(((self.make_votes("left").score_KQS != self.make_votes("right").score_KQS).any(2).any(1)).sum() > 1):
            raise ValueError(f"pair {self.name!r}: the sides are not neighbors (one teacher may have moved)")

    def make_votes(self, side: str) -> SoftVotes:
        first_Q = (self.left_QC if side == "left" else self.right_QC)[:, 0]
        second_KQ = torch.arange(int(self.left_QC[0].sum()))[:, None] >= first_Q
        return SoftVotes.from_probabilities(self.probability_2C[second_KQ.long()])


_TEACHER_PROBABILITIES = torch.tensor([[0.2, 0.2, 0.6], [0.5, 0.5, 0.0]])
"""Of three classes; those of a class lie in different bins, however many there are."""


@dataclass(frozen=True, kw_only=True, eq=False)
class GradientPair(NeighborPair):
    """Gradient sums of neighbors: one record more, or another in its place.

    The record lies where the one public point that is asked does, its features of length 1, so that its gradient at W =
    0 is almost as long as any can be.

    Attributes:
        scale: See ``GradientSums``.
    """

    left_QC: Tensor = field(default_factory=lambda: torch.zeros(1, _NUM_CLASSES, dtype=torch.int64))
    right_QC: Tensor = field(default_factory=lambda: torch.zeros(1, _NUM_CLASSES, dtype=torch.int64))
    adjacency: str
    scale: float

    def make_votes(self, side: str) -> GradientSums:
        labels = [0] if side == "right" else [1] if self.adjacency == "replace_one" else []
        z_ND, y_N = torch.full((len(labels), 1), GRID_STEPS, dtype=torch.int32), torch.tensor(labels, dtype=torch.int64)
        return GradientSums(
            z_ND=z_ND,
            y_N=y_N,
            z_PD=torch.ones(1, 1),
            feature_PD=torch.ones(1, 1),
            num_classes=_NUM_CLASSES,
            sensitivity=make_vector_sum_sensitivity(self.adjacency, _NUM_CLASSES),
            scale=self.scale,
        )


_NUM_CLASSES = 50  # of a gradient at the start: then e_y - p has length .99


@dataclass(frozen=True, kw_only=True)
class AuditSetting:
    """How one mechanism is audited: values in place of the YAML's under which it answers and its noise shows.

    Attributes:
        queries: Number of queries in a run.
        runs: Number of runs on each side.
        overrides: Values in place of the YAML's.
    """

    queries: int = 2
    runs: int = 500_000
    overrides: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_name(cls, name: str) -> AuditSetting:
        """The setting for the mechanism called ``name``."""
        # One failure and lambda about 1: a block's price then shows in one block, eight tests of which can force the
        # threshold and the failing test both to the ends of their noise; over many failures it would be lost in noise.
        sparse = {"epsilon": 2.0, "max_failures": 1}
        return {
            "sparse_vector": cls(queries=8, runs=20_000, overrides=sparse),
            "soft_sparse_vector": cls(queries=8, runs=20_000, overrides={**sparse, "bins": 4}),
            "single_stable": cls(overrides={"epsilon": 1.0, "delta": 1e-7}),
            # Later steps start where noise has led, and there a gradient is shorter.
            "gradient_descent": cls(queries=1, runs=20_000, overrides={"steps": 1}),
        }.get(name, cls())


def make_worst_pairs(mechanism: Mechanism, queries: int) -> list[NeighborPair]:
    """The pairs for one mechanism: where its tests are undecided, and where an unlikely answer is much likelier."""
    if isinstance(mechanism, SparseVectorMechanism):
        scales = mechanism.compute_scales(queries)
        pairs = _make_distance_pairs(scales.threshold, 2 * scales.noise_scale, queries)
        if isinstance(mechanism, SoftSparseVector):
            threshold = mechanism.compute_scales(queries, _TEACHER_PROBABILITIES.shape[1]).threshold
            pairs += [
                SoftPair(
                    name=f"soft, {pair.name}",
                    left_QC=pair.left_QC,
                    right_QC=pair.right_QC,
                    probability_2C=_TEACHER_PROBABILITIES,
                )
                for pair in _make_distance_pairs(threshold, 2 * scales.noise_scale, queries)
            ]
        return pairs
    if isinstance(mechanism, DistanceToInstability):
        return _make_distance_pairs(mechanism.threshold, 1 / mechanism.epsilon, queries)
    if isinstance(mechanism, ConfidentGNMax | InteractiveGNMax):
        return _make_screened_pairs(mechanism, queries)
    if isinstance(mechanism, GradientDescent):
        scale = 1 / (mechanism.first_step_size * mechanism.sigma)  # logits whose noise is 1
        return [GradientPair(name="one record", adjacency=mechanism.adjacency, scale=scale)]
    if isinstance(mechanism, Histogram):
        return _make_histogram_pairs(mechanism, queries)
    if mechanism.count_noise_scale is None:
        fix = "Give it a count_noise_scale, or audit it on pairs of your own."
        raise checks.error("mechanism", mechanism.name, "has no votes on which its noise is known to show", fix)
    sigma = mechanism.count_noise_scale
    teachers = 2 * math.ceil(4 * sigma) + 20
    pairs = []
    for gap in (0, 2, 3, 4):
        winner_votes = min(teachers, (teachers + round(gap * sigma)) // 2)
        pairs.append(_make_pair(f"gap {gap} sigma", (winner_votes, teachers - winner_votes), queries))
    return pairs


def _make_histogram_pairs(mechanism: Histogram, queries: int) -> list[NeighborPair]:
    """One count more, or one that has moved: to another class, and (with two questions) to another question."""
    left_QC = torch.full((queries, 2), 2 * math.ceil(4 * mechanism.sigma))
    changes_by_name = {"one more": [(0, 0, 1)]}
    if mechanism.adjacency == "replace_one":
        changes_by_name = {"to another class": [(0, 0, 1), (0, 1, -1)]}
        if queries > 1:
            changes_by_name["to another question"] = [(0, 0, 1), (1, 0, -1)]
    pairs = []
    for name, changes in changes_by_name.items():
        right_QC = left_QC.clone()
        for query, label, change in changes:
            right_QC[query, label] += change
        pairs.append(NeighborPair(name=name, left_QC=left_QC, right_QC=right_QC, adjacency=mechanism.adjacency))
    return pairs


def _make_pair(
    name: str, counts: tuple[int, int], queries: int, student: tuple[float, float] | None = None
) -> NeighborPair:
    """The same two counts in every query; on the right one vote has moved from the first class to the second."""
    left_QC = torch.tensor([counts]).repeat(queries, 1)
    student_QC = None if student is None else torch.tensor([student], dtype=torch.float64).repeat(queries, 1)
    return NeighborPair(name=name, left_QC=left_QC, right_QC=left_QC + torch.tensor([-1, 1]), student_QC=student_QC)


def _make_screened_pairs(mechanism: ConfidentGNMax | InteractiveGNMax, queries: int) -> list[NeighborPair]:
    """About the threshold, with the answer undecided or not; beyond it, the answer alone."""
    # A student who is sure of the second class expects none of the first: the excess is then the first class's count.
    student = (0.0, 1.0) if isinstance(mechanism, InteractiveGNMax) else None
    low_votes, edge_votes, high_votes = (
        max(2, math.ceil(mechanism.threshold + offset * mechanism.screen_sigma)) for offset in (-2, 0, 6)
    )
    counts_by_name = {
        "at the threshold": (edge_votes, edge_votes // 2),
        "at the threshold, undecided": (edge_votes, edge_votes),
        "below the threshold, undecided": (low_votes, low_votes),
        "beyond the threshold, undecided": (high_votes, high_votes),
    }
    for gap in (2, 3):
        counts_by_name[f"beyond the threshold, gap {gap} sigma"] = high_votes + round(gap * mechanism.sigma), high_votes
    return [_make_pair(name, counts, queries, student) for name, counts in counts_by_name.items()]


def _make_distance_pairs(threshold: float, width: float, queries: int) -> list[NeighborPair]:
    """Distances at the threshold, moved all one way or the last against the others; and a winner that changes."""
    base_distance = round(threshold)
    high, low = (_make_votes_at_distance(base_distance + step, base_distance) for step in (1, 0))
    pairs = [NeighborPair(name="all moved one way", left_QC=high.repeat(queries, 1), right_QC=low.repeat(queries, 1))]
    if queries > 1:
        left_QC = torch.cat([high.repeat(queries - 1, 1), low])
        right_QC = torch.cat([low.repeat(queries - 1, 1), high])
        pairs.append(NeighborPair(name="the last moved against the others", left_QC=left_QC, right_QC=right_QC))
    half_votes = round(threshold + 2 * width) + 2
    return [*pairs, _make_pair("the winner changes", (half_votes + 1, half_votes), queries)]


def _make_votes_at_distance(distance: int, base_distance: int) -> Tensor:
    """Two-class votes [1, 2] of 4 near + 40 teachers whose winner stands for ``distance`` moved votes and no more."""
    teachers = 4 * base_distance + 40
    winner_votes = teachers // 2 + distance + 1
    return torch.tensor([[winner_votes, teachers - winner_votes]])
