"""Pairs of artificial neighboring values, which audits use to test mechanisms.

The values are chosen so that a mechanism with too little noise is found quickly. No cost, noise or claim depends on
these values.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from pate_torch.privacy import sensitive
from pate_torch.privacy.sensitive import CellHistogram, GradientSums, MarginalTables, SoftVotes, Votes

NeighborValue = Votes | SoftVotes | CellHistogram | GradientSums | MarginalTables


@dataclass(frozen=True, kw_only=True, eq=False)
class NeighborPair:
    """Two neighboring values: at most one vote has moved in every row, or one unit has changed in the whole table.

    Attributes:
        name: Short description of the pair.
        left: Sensitive value of one data set.
        right: Sensitive value of the neighboring data set.
        student_QC: Class probabilities of the student, for mechanisms with ``uses_guide``. None without a student.

    Raises:
        ValueError: The values are not neighbors.
    """

    name: str
    left: NeighborValue
    right: NeighborValue
    student_QC: Tensor | None = None

    def __post_init__(self) -> None:
        left, right, rule = self.left, self.right, ""
        if _get_rows(left).shape != _get_rows(right).shape:
            rule = "both values must have the same teachers, queries and classes"
        elif isinstance(left, Votes) and isinstance(right, Votes):
            if left.num_teachers != right.num_teachers or ((left.counts_QC - right.counts_QC).abs().sum(1) > 2).any():
                rule = "the teachers must be the same, and at most one vote may move in each query"
        elif isinstance(left, SoftVotes) and isinstance(right, SoftVotes):
            pairs = (left.counts_QSV, right.counts_QSV), (left.shifted_QSW, right.shifted_QSW)
            if any(((a - b).abs().sum(2) > 2).any() for a, b in pairs):
                rule = "at most one teacher may differ, and moves from one bin to another"
        elif isinstance(left, CellHistogram):
            difference_QC, max_changes = _get_rows(left) - _get_rows(right), left.sensitivity.l1
            if difference_QC.abs().sum() > max_changes or (max_changes == 2 and difference_QC.sum() != 0):
                rule = "at most one record may change in the whole table"
        elif isinstance(left, MarginalTables):
            change_M = (_get_rows(left) - _get_rows(right)).abs()
            if change_M.max() > 1 or change_M.sum() > left.sensitivity.l1:
                rule = "at most one record may change in each table"
        if rule:
            raise ValueError(f"pair {self.name!r}: left and right are not neighbors: {rule}")

    @property
    def num_queries(self) -> int:
        """Number of queries."""
        return len(self.left)

    @property
    def groups(self) -> list[int]:
        """Group of each query. Queries with the same row in ``left`` and the same row in ``right`` share a group."""
        rows = [tuple(row) for row in torch.cat([_get_rows(self.left), _get_rows(self.right)], 1).tolist()]
        return [rows.index(row) for row in rows]


def _get_rows(value: NeighborValue) -> Tensor:
    """Return the values that determine the distribution of the answer to each query, [Q, ...]."""
    if isinstance(value, SoftVotes):
        return torch.cat([value.counts_QSV, value.shifted_QSW], 2).flatten(1)
    if isinstance(value, MarginalTables):
        return value.counts_M[None]
    return torch.arange(len(value))[:, None] if isinstance(value, GradientSums) else value.counts_QC


def make_vote_pair(name: str, left_QC: Tensor, right_QC: Tensor, student_QC: Tensor | None = None) -> NeighborPair:
    """Make a pair of vote counts [Q, C]."""
    left, right = (Votes(counts_QC, int(counts_QC[0].sum())) for counts_QC in (left_QC, right_QC))
    return NeighborPair(name=name, left=left, right=right, student_QC=student_QC)


def make_count_pair(name: str, left_QC: Tensor, right_QC: Tensor, adjacency: str) -> NeighborPair:
    """Make a pair of cell counts [Q, C]."""
    sensitivity, cell_P = sensitive.COUNT_SENSITIVITY[adjacency], torch.arange(len(left_QC))
    left, right = (CellHistogram(counts_QC, sensitivity, cell_P) for counts_QC in (left_QC, right_QC))
    return NeighborPair(name=name, left=left, right=right)


def make_soft_pair(name: str, left_QC: Tensor, right_QC: Tensor, probability_2C: Tensor, bins: int) -> NeighborPair:
    """Make a pair where each teacher gives one of two vectors of class probabilities, which are counted in ``bins``.

    ``left_QC`` and ``right_QC`` are the numbers of teachers that give the first and the second vector, [Q, 2].
    """

    def to_scores(counts_QC: Tensor) -> SoftVotes:
        is_second_KQ = torch.arange(int(counts_QC[0].sum()))[:, None] >= counts_QC[:, 0]
        return SoftVotes.from_probabilities(probability_2C[is_second_KQ.long()], bins)

    return NeighborPair(name=name, left=to_scores(left_QC), right=to_scores(right_QC))


def make_gap_pairs(sigma: float, num_queries: int) -> list[NeighborPair]:
    """Make votes for two classes whose counts are 0 to 4 noise scales apart, so that one answer is rare."""
    num_teachers = 2 * math.ceil(4 * sigma) + 20
    pairs = []
    for gap in (0, 2, 3, 4):
        winner_votes = (num_teachers + round(gap * sigma)) // 2
        counts = winner_votes, num_teachers - winner_votes
        pairs.append(_make_repeated_pair(f"gap {gap} sigma", counts, num_queries))
    return pairs


def make_screened_pairs(
    threshold: float, screen_sigma: float, sigma: float, num_queries: int, student: tuple[float, float] | None = None
) -> list[NeighborPair]:
    """Make votes below, at and above the threshold of a check, with tied and with different counts."""
    low_votes, edge_votes, high_votes = (max(2, math.ceil(threshold + z * screen_sigma)) for z in (-2, 0, 6))
    counts_by_name = {
        "at the threshold": (edge_votes, edge_votes // 2),
        "at the threshold, undecided": (edge_votes, edge_votes),
        "below the threshold, undecided": (low_votes, low_votes),
        "beyond the threshold, undecided": (high_votes, high_votes),
    }
    for gap in (2, 3):
        counts_by_name[f"beyond the threshold, gap {gap} sigma"] = high_votes + round(gap * sigma), high_votes
    return [_make_repeated_pair(name, counts, num_queries, student) for name, counts in counts_by_name.items()]


def make_distance_pairs(
    threshold: float, width: float, num_queries: int, *, bins: int | None = None
) -> list[NeighborPair]:
    """Make votes whose distance to instability is close to the threshold, and votes that are nearly tied.

    Between the neighbors the distances of all queries move in the same direction, or the distance of the last query
    moves in the other direction.

    Args:
        threshold: Threshold of the distance, in votes.
        width: Scale of the noise on a distance, in votes.
        num_queries: Number of queries.
        bins: Number of bins of the probabilities of three classes that the teachers give. None if they give votes.
    """
    num_teachers = 4 * round(threshold) + 40
    first_votes = num_teachers // 2 + round(threshold) + 1
    low = torch.tensor([[first_votes, num_teachers - first_votes]])
    high = low + torch.tensor([1, -1])
    counts_by_name = {"all moved one way": (high.repeat(num_queries, 1), low.repeat(num_queries, 1))}
    if num_queries > 1:
        left_QC, right_QC = (torch.cat([a.repeat(num_queries - 1, 1), b]) for a, b in ((high, low), (low, high)))
        counts_by_name["the last moved against the others"] = left_QC, right_QC
    half_votes = round(threshold + 2 * width) + 2
    tied_QC = torch.tensor([[half_votes + 1, half_votes]]).repeat(num_queries, 1)
    counts_by_name["the winner changes"] = tied_QC, tied_QC + torch.tensor([-1, 1])
    if bins is not None:  # the two probabilities of each class lie in different bins, for any number of bins
        probability_2C = torch.tensor([[0.2, 0.2, 0.6], [0.5, 0.5, 0.0]])
        return [
            make_soft_pair(f"soft, {name}", *counts, probability_2C, bins) for name, counts in counts_by_name.items()
        ]
    return [make_vote_pair(name, *counts) for name, counts in counts_by_name.items()]


def make_histogram_pairs(sigma: float, adjacency: str, num_queries: int) -> list[NeighborPair]:
    """Make tables that differ by one additional record, or by one record that moved to another class or query."""
    left_QC = torch.full((num_queries, 2), 2 * math.ceil(4 * sigma))
    changes_by_name = {"one more": [(0, 0, 1)]}
    if adjacency == "replace_one":
        changes_by_name = {"to another class": [(0, 0, 1), (0, 1, -1)]}
        if num_queries > 1:
            changes_by_name["to another query"] = [(0, 0, 1), (1, 0, -1)]
    pairs = []
    for name, changes in changes_by_name.items():
        right_QC = left_QC.clone()
        for query, label, change in changes:
            right_QC[query, label] += change
        pairs.append(make_count_pair(name, left_QC, right_QC, adjacency))
    return pairs


def make_marginal_pair(count: int, num_tables: int, adjacency: str) -> NeighborPair:
    """Make tables of two cells with and without one record, or with one record in the other cell of every table."""
    sensitivity = sensitive.make_table_sensitivity(num_tables, adjacency)
    left_M2 = torch.full((num_tables, 2), count)
    right_M2 = left_M2 + torch.tensor([1, -1 if adjacency == "replace_one" else 0])
    left, right = (MarginalTables(counts_M2.flatten(), sensitivity) for counts_M2 in (left_M2, right_M2))
    return NeighborPair(name="one record", left=left, right=right)


def make_gradient_pair(scale: float, adjacency: str) -> NeighborPair:
    """Make gradient sums with and without one record, or with one record in place of another.

    The record has the features of the only public point, of length 1. With 50 classes the record's gradient e_y - p at
    W = 0 has length 0.99, almost the clipping norm 1. ``scale`` is ``GradientSums.scale`` of both values.
    """
    num_classes = 50

    def make_sums(labels: list[int]) -> GradientSums:
        return GradientSums(
            z_ND=torch.full((len(labels), 1), sensitive.GRID_STEPS, dtype=torch.int32),
            y_N=torch.tensor(labels, dtype=torch.int64),
            z_PD=torch.ones(1, 1),
            feature_PD=torch.ones(1, 1),
            num_classes=num_classes,
            sensitivity=sensitive.make_vector_sum_sensitivity(adjacency, num_classes),
            scale=scale,
        )

    left = make_sums([1] if adjacency == "replace_one" else [])
    return NeighborPair(name="one record", left=left, right=make_sums([0]))


def _make_repeated_pair(
    name: str, counts: tuple[int, int], num_queries: int, student: tuple[float, float] | None = None
) -> NeighborPair:
    """Make a pair with the same two counts in every query, where one vote moves from the first class to the second."""
    left_QC = torch.tensor([counts]).repeat(num_queries, 1)
    student_QC = None if student is None else torch.tensor([student], dtype=torch.float64).repeat(num_queries, 1)
    return make_vote_pair(name, left_QC, left_QC + torch.tensor([-1, 1]), student_QC)
