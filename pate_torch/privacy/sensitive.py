"""Sensitive values: values computed from private records, each with a bound on the effect of one privacy unit.

The code that makes a value states its sensitivity. Only a mechanism opens a sensitive value, and only if the cost of
the mechanism covers the stated sensitivity. This module holds every kind of value that a mechanism takes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from pate_torch.core import checks
from pate_torch.privacy.records import ADJACENCIES, OUTSIDE_STEPS, LinearModel, Shards
from pate_torch.privacy.whitening import Whitening


@dataclass(frozen=True, kw_only=True)
class Sensitivity:
    """Largest distances between the values of two neighboring data sets, in units of the value (such as votes).

    Attributes:
        l1: Largest L1 distance, which may be infinite.
        l2: Largest L2 distance, which may be infinite.
        linf: Largest change of one number, which may be infinite.
        adjacency: Neighboring relation. None if the distances hold under the relation that the shards justify.
    """

    l1: float
    l2: float
    linf: float
    adjacency: str | None = None

    def __post_init__(self) -> None:
        for norm in ("l1", "l2", "linf"):
            if not getattr(self, norm) >= 0:  # also refuses NaN
                raise checks.error(f"sensitivity.{norm}", getattr(self, norm), "must be a number of at least 0")
        checks.optional(checks.one_of, "adjacency", self.adjacency, ADJACENCIES)


def check_sensitivity(sensitivity: Sensitivity, max_sensitivity: Sensitivity, mechanism: str) -> None:
    """Raise ValueError if a value has a larger sensitivity, or another adjacency, than a mechanism's cost covers."""
    value, limit = sensitivity, max_sensitivity
    if None not in (value.adjacency, limit.adjacency) and value.adjacency != limit.adjacency:
        message = f"must be {value.adjacency!r}, the adjacency of the value that the mechanism opens"
        raise checks.error("mechanism.adjacency", limit.adjacency, message, "Set it to the partition's adjacency.")
    if not (value.l1 <= limit.l1 and value.l2 <= limit.l2 and value.linf <= limit.linf):  # refuses NaN, too
        message = f"is more than mechanism={mechanism} is priced for ({limit})"
        fix = "Leave out partition.capacity, or use a mechanism whose cost covers this sensitivity."
        raise checks.error("sensitivity", value, message, fix)


class SensitiveValue(Protocol):
    """PRIVATE. A value for each public point that a mechanism opens: votes of teachers, or sums over records."""

    def __len__(self) -> int:
        """Number of public points."""
        ...

    @property
    def num_classes(self) -> int: ...

    @property
    def sensitivity(self) -> Sensitivity: ...

    def select(self, index_Q: Tensor, /) -> Any:
        """Select the values for these public points, in this order."""
        ...


class SensitiveRecords(SensitiveValue, Protocol):
    """PRIVATE. Sums over records, which depend on features of public points."""

    @property
    def feature_PD(self) -> Tensor:
        """Releasable. Unit-length features [P, D] of the public points, in which the next queries are chosen."""
        ...


VOTE_SENSITIVITY = Sensitivity(l1=2.0, l2=math.sqrt(2.0), linf=1.0)
"""Sensitivity of one row of votes: a unit affects one shard and therefore moves one teacher's vote to another class."""


@dataclass(frozen=True, eq=False, repr=False)
class _Counts:
    """PRIVATE. Counts of each class for each query, integers [Q, C]."""

    counts_QC: Tensor

    def __len__(self) -> int:
        return self.counts_QC.shape[0]

    @property
    def num_classes(self) -> int:
        return self.counts_QC.shape[1]


@dataclass(frozen=True, eq=False, repr=False)
class Votes(_Counts):
    """PRIVATE. Vote counts, to which each teacher contributes one vote a row.

    Attributes:
        counts_QC: Integers [Q, C]. Each row sums to ``num_teachers``.
        num_teachers: Number K of teachers.
        sensitivity: Sensitivity of each row. The default holds if a privacy unit affects one shard, and therefore one
            teacher, whose vote may change in every row. Votes with another dependence on units need another value.
    """

    num_teachers: int
    sensitivity: Sensitivity = VOTE_SENSITIVITY

    def __post_init__(self) -> None:
        checks.integer("num_teachers", self.num_teachers, low=1)
        counts = self.counts_QC
        if not isinstance(counts, Tensor) or counts.dim() != 2 or counts.shape[1] < 2:
            raise ValueError("votes: counts must be a [queries, classes] tensor with at least two classes")
        if counts.is_floating_point() or counts.is_complex() or counts.dtype == torch.bool:
            raise ValueError(f"votes: counts must be integers, not {counts.dtype} (one teacher, one whole vote)")
        if len(counts):
            low, high = map(int, counts.aminmax())  # as Python integers: a uint8 tensor would compare 256 as 0
            # Sums of counts within 0..K are at most C K. Sums in 32 bits take a quarter of the time of sums in 64 bits.
            fits_int32 = self.num_teachers * counts.shape[1] < 2**31
            total = counts.sum(1, dtype=torch.int32 if fits_int32 else torch.int64)
            min_total, max_total = total.aminmax()  # one pass and one tensor less than a comparison
            if low < 0 or high > self.num_teachers or min_total != self.num_teachers or max_total != self.num_teachers:
                problem = "every row must be non-negative and sum to num_teachers (one teacher, one vote)"
                raise ValueError(f"votes: {problem}")

    def select(self, index_Q: Tensor) -> Votes:
        return Votes(self.counts_QC[index_Q.to(self.counts_QC.device)], self.num_teachers, self.sensitivity)

    def compute_plurality(self) -> Tensor:
        """PRIVATE. Compute the noiseless winners, int64 [Q]. In a tie the lowest class wins."""
        # max over equal values returns an unspecified index on some devices; the sum of a prefix is exact.
        top = self.counts_QC.max(1, keepdim=True).values
        return (self.counts_QC == top).int().argmax(1)

    def compute_top_counts(self) -> Tensor:
        """PRIVATE. Compute the winning counts, [Q]. One privacy unit changes each of them by at most 1."""
        return self.counts_QC.max(1).values

    def compute_gaps(self) -> Tensor:
        """PRIVATE. Compute winner minus runner-up, [Q]. One privacy unit changes each of them by at most 2."""
        top_two_Q2 = self.counts_QC.topk(2, dim=1).values
        return top_two_Q2[:, 0] - top_two_Q2[:, 1]

    def __repr__(self) -> str:
        return f"Votes({len(self)} queries, content withheld)"


@dataclass(frozen=True, eq=False, repr=False)
class SoftVotes:
    """PRIVATE. Histograms of the class probabilities of the teachers, in place of votes.

    A *score* is a probability of one class: there is one score for each class, or with two classes the score of the
    second class alone. A privacy unit affects the scores of one teacher.

    Attributes:
        counts_QSV: Number of teachers whose score lies in each of V bins [v/V, (v+1)/V), the last one closed, for each
            query and score: integers [Q, S, V].
        shifted_QSW: The same for bins shifted by half a bin, without the half bins at the ends, [Q, S, V - 1].
        num_teachers: Number of teachers, the sum of each row of ``counts_QSV``.
    """

    counts_QSV: Tensor
    shifted_QSW: Tensor
    num_teachers: int

    def __post_init__(self) -> None:
        counts, shifted = self.counts_QSV, self.shifted_QSW
        if counts.dim() != 3 or counts.is_floating_point() or shifted.shape != (*counts.shape[:2], counts.shape[2] - 1):
            raise ValueError(
                "soft votes: histograms must be integers [queries, scores, V] and [queries, scores, V - 1]"
            )
        if counts.shape[1] in (0, 2):
            raise ValueError("soft votes: with two classes, give the second one's score alone (from_probabilities)")
        fits = (counts >= 0).all() & (counts.sum(2) == self.num_teachers).all() & (shifted >= 0).all()
        if not bool(fits & (shifted.sum(2) <= self.num_teachers).all()):
            raise ValueError("soft votes: every histogram must count each teacher once")

    @classmethod
    def from_scores(cls, score_KQS: Tensor, bins: int) -> SoftVotes:
        """Count scores in [0, 1], [K, Q, S]."""
        return cls(*count_bins(score_KQS, bins), len(score_KQS))

    @classmethod
    def from_probabilities(cls, probability_KQC: Tensor, bins: int) -> SoftVotes:
        """Count class probabilities [K, Q, C]."""
        return cls.from_scores(get_scores(probability_KQC), bins)

    @property
    def num_classes(self) -> int:
        return max(2, self.counts_QSV.shape[1])

    @property
    def sensitivity(self) -> Sensitivity:
        """Sensitivity of each histogram: one teacher's score moves to another bin, or into or out of the range."""
        return VOTE_SENSITIVITY

    def __len__(self) -> int:
        return len(self.counts_QSV)

    def select(self, index_Q: Tensor) -> SoftVotes:
        index_Q = index_Q.to(self.counts_QSV.device)
        return SoftVotes(self.counts_QSV[index_Q], self.shifted_QSW[index_Q], self.num_teachers)


def get_scores(probability_KQC: Tensor) -> Tensor:
    """Return the scores of class probabilities, [K, Q, C], or [K, Q, 1] for two classes."""
    return probability_KQC[..., 1:] if probability_KQC.shape[2] == 2 else probability_KQC


def count_bins(score_KQS: Tensor, bins: int) -> tuple[Tensor, Tensor]:
    """Count scores in ``bins`` equal bins and in the shifted bins: ``counts_QSV`` and ``shifted_QSW``, int64."""
    score = score_KQS
    if not isinstance(score, Tensor) or score.dim() != 3 or not score.is_floating_point() or len(score) == 0:
        raise ValueError("soft votes: scores must be a floating-point [teachers, queries, scores] tensor")
    if not bool(((score >= 0) & (score <= 1)).all()):  # written so that NaN fails
        raise ValueError("soft votes: every score must lie in [0, 1]")
    scaled_KQS = score.double() * bins
    plain_KQS, shifted_KQS = scaled_KQS.floor().clamp(max=bins - 1), (scaled_KQS + 0.5).floor() - 1
    return _count_values(plain_KQS, bins), _count_values(shifted_KQS, bins - 1)


def _count_values(bin_KQS: Tensor, bins: int) -> Tensor:
    """Count the bin numbers in 0..bins-1 for each query and score, int64 [Q, S, bins]."""
    index_QSK = bin_KQS.to(torch.int64).permute(1, 2, 0)
    inside_QSK = (index_QSK >= 0) & (index_QSK < bins)
    counts = torch.zeros(*index_QSK.shape[:2], bins, dtype=torch.int64, device=index_QSK.device)
    return counts.scatter_add_(2, index_QSK.clamp(0, bins - 1), inside_QSK.to(torch.int64))


def make_vector_sum_sensitivity(adjacency: str, size: int) -> Sensitivity:
    """Make the sensitivity of a sum to which each privacy unit adds a vector of ``size`` numbers and length at most 1.

    Adding or removing a unit moves the sum by one such vector. Replacing a unit moves it by the difference of two.
    """
    num_vectors = float(_count_contributions(adjacency))
    return Sensitivity(l1=num_vectors * math.sqrt(size), l2=num_vectors, linf=num_vectors, adjacency=adjacency)


def _count_contributions(adjacency: str) -> int:
    return {"add_remove": 1, "replace_one": 2}[checks.one_of("adjacency", adjacency, ADJACENCIES)]


def make_record_sum_sensitivity(shards: Shards, sensitivity: Sensitivity) -> Sensitivity:
    """Make the sensitivity of a sum over records from the sensitivity of one unit's contribution.

    If shards have a capacity, an added unit can displace records of other units, so the sensitivity is unbounded.
    """
    if not shards.has_capacity:
        return sensitivity
    return Sensitivity(l1=math.inf, l2=math.inf, linf=math.inf, adjacency=shards.adjacency)


def make_table_sensitivity(num_tables: int, adjacency: str) -> Sensitivity:
    """Make the sensitivity of tables that each count every unit once.

    Adding or removing a unit changes one count of each table by 1. Replacing a unit changes two.
    """
    changes = num_tables * _count_contributions(adjacency)
    return Sensitivity(l1=float(changes), l2=math.sqrt(changes), linf=1.0, adjacency=adjacency)


COUNT_SENSITIVITY = {adjacency: make_table_sensitivity(1, adjacency) for adjacency in ADJACENCIES}
"""Sensitivity of one table that counts each unit once, by adjacency."""


@dataclass(frozen=True, eq=False, repr=False)
class CellHistogram(_Counts):
    """PRIVATE. Number of units of each class in the cell of each query. The whole table counts each unit once.

    Attributes:
        counts_QC: Integers of at least 0, [Q, C].
        sensitivity: Sensitivity of the *whole* table, for any number of rows (``COUNT_SENSITIVITY``).
        cell_P: Releasable. The row whose cell holds each public point, int64 [P].
    """

    sensitivity: Sensitivity
    cell_P: Tensor

    def __post_init__(self) -> None:
        counts = self.counts_QC
        if counts.dim() != 2 or counts.is_floating_point() or counts.dtype == torch.bool:
            raise ValueError("cells: counts must be integers [queries, classes]")
        if len(counts) and int(counts.min()) < 0:
            raise ValueError("cells: counts must be non-negative")

    def select(self, index_Q: Tensor) -> CellHistogram:
        """Select the counts of some queries, which must be distinct."""
        return CellHistogram(self.counts_QC[index_Q.to(self.counts_QC.device)], self.sensitivity, self.cell_P)


class _WholeTable:
    """A value whose numbers are answered together, as one query."""

    def __len__(self) -> int:
        return 1

    def select(self, index_Q: Tensor) -> Self:
        return self


@dataclass(frozen=True, eq=False, repr=False)
class MarginalTables(_WholeTable):
    """PRIVATE. Marginal tables: the number of units with each combination of codes of some columns.

    Attributes:
        counts_M: Counts of all tables, one after another, int64 [M].
        sensitivity: Sensitivity of ``counts_M`` (``make_table_sensitivity``).
    """

    counts_M: Tensor
    sensitivity: Sensitivity

    @classmethod
    def from_units(
        cls, codes_UJ: Tensor, sizes: Sequence[int], cliques: Sequence[tuple[int, ...]], adjacency: str
    ) -> MarginalTables:
        """Count one record of each unit in a table for each clique of columns.

        Args:
            codes_UJ: PRIVATE. Code of each column, int64 [U, J].
            sizes: Number of codes of each column.
            cliques: Columns of each table.
            adjacency: Neighboring relation.
        """
        tables = []
        for clique in cliques:
            cell_U = torch.zeros(len(codes_UJ), dtype=torch.int64)
            for column in clique:
                cell_U = cell_U * sizes[column] + codes_UJ[:, column]
            tables.append(torch.bincount(cell_U, minlength=math.prod(sizes[column] for column in clique)))
        return cls(torch.cat(tables), make_table_sensitivity(len(cliques), adjacency))

    @property
    def num_classes(self) -> int:
        return len(self.counts_M)


UNIT_COUNT_GRID = 1 << 16
"""Number of grid steps in one unit of ``UnitCounts``."""
UNIT_COUNT_SENSITIVITY = {
    "add_remove": Sensitivity(l1=1.5, l2=math.sqrt(1.25), linf=1.0, adjacency="add_remove"),
    "replace_one": Sensitivity(l1=2.5, l2=1.5, linf=1.0, adjacency="replace_one"),
}
"""Sensitivity of ``UnitCounts``: a unit changes one count by 1, or two by replacement, and half of the sum by 1/2."""


@dataclass(frozen=True, eq=False, repr=False)
class UnitCounts(_WholeTable):
    """PRIVATE. Number of units in each class, and sum of their shares of numeric values outside the public range.

    Attributes:
        counts_C: Number of units in each class, int64 [C].
        outside_sum: Sum of the units' shares in multiples of 1/OUTSIDE_STEPS, int64 scalar. In grid steps of
            ``UNIT_COUNT_GRID``, this number is half of the sum.
        sensitivity: Sensitivity of the vector of the counts and half of the sum, in units.
    """

    counts_C: Tensor
    outside_sum: Tensor
    sensitivity: Sensitivity

    @classmethod
    def from_units(cls, y_U: Tensor, outside_U: Tensor, num_classes: int, adjacency: str) -> UnitCounts:
        """Count one record of each unit.

        Args:
            y_U: PRIVATE. Class of each unit.
            outside_U: PRIVATE. Share of each unit's values outside the public range, int64 in 0..OUTSIDE_STEPS.
            num_classes: Number C of classes.
            adjacency: Neighboring relation.
        """
        counts_C = torch.bincount(y_U, minlength=num_classes)
        return cls(counts_C, outside_U.clamp(0, OUTSIDE_STEPS).sum(), UNIT_COUNT_SENSITIVITY[adjacency])

    @property
    def num_classes(self) -> int:
        return len(self.counts_C)


GRID_STEPS = 1 << 15
"""Number of grid steps in 1. Features and residuals are rounded towards zero to multiples of 1/GRID_STEPS."""
UNIT_NORM = GRID_STEPS**2
"""Length of a unit gradient in grid units."""
_MAX_GRADIENT_SUM = 1 << 52
"""Largest entry of a gradient sum, so that float64 is exact: 2^22 unit gradients of one direction."""
MIN_CLIP_NORM = 1 / 64
"""Smallest clipping norm. A residual of a smaller norm would have fewer than 512 grid units."""
_ROUNDING_SHRINKAGE = 1 - 2.0**-30  # its margin is far larger than the rounding error of a length in float64
_BLOCK_RECORDS = 1024


def quantize(value: Tensor) -> Tensor:
    """Round vectors of length at most 1 towards zero to multiples of 1/GRID_STEPS, int64. No vector gets longer.

    Raises:
        ValueError: A number is not finite, or so large that its square could overflow (above 2 in magnitude).
    """
    value = value.double()
    if value.numel() and not -2 <= float(value.min()) <= float(value.max()) <= 2:  # written so that NaN fails
        raise ValueError("gradients: a vector holds a number that is not finite or above 2 in magnitude")
    return (value * (_ROUNDING_SHRINKAGE * GRID_STEPS)).trunc().to(torch.int64)


def _quantize_weights(weight_DC: Tensor) -> tuple[Tensor, float]:
    """Round weights to multiples of a grid unit, which is a power of 2; return (multiples, grid unit).

    The columns of the multiples are shorter than 2^37, and features are at most GRID_STEPS long, so sums of their
    products stay below 2^53 (Cauchy-Schwarz). The rounding error of an entry is at most 2^-36 of the longest column.

    Raises:
        ValueError: A column of weights is not finite or longer than 2^40.
    """
    max_column_norm = float(weight_DC.norm(dim=0).max())
    if not max_column_norm <= 2.0**40:  # written so that NaN fails
        raise ValueError("gradients: the weights of the model must be finite, and no column longer than 2^40")
    grid_unit = 2.0 ** (math.frexp(max_column_norm)[1] - 36)
    return (weight_DC / grid_unit).round(), grid_unit


@dataclass(frozen=True, eq=False, repr=False)
class GradientSums:
    """PRIVATE. Records whose clipped gradients can be summed for any weights of a linear softmax model.

    Attributes:
        z_ND: PRIVATE. Whitened features of length at most 1 in units of 1/GRID_STEPS; integers of any type.
        y_N: PRIVATE. Labels, int64.
        z_PD: Releasable. Whitened features of the public points, clipped to length 1 as those of the records.
        feature_PD: Releasable. Features of the public points before whitening.
        num_classes: Number C of classes.
        sensitivity: Sensitivity of ``compute_gradient_sum`` in units of ``UNIT_NORM`` at clipping norm 1. The
            sensitivity is proportional to the clipping norm.
        scale: Change of the weights by one unit (``UNIT_NORM``) of the gradient sum at step size 1.
        whitening: Releasable. Map from features to whitened features. None if the features of new points are unknown.
        neighbors: Number of neighbors of the mean-shift step before whitening. 0 if there is no such step.
        start_DC: Releasable. Weights before the first step, float64 [D, C]. None for zeros.
        query_Q: Indices of the public points whose labels are requested. None to request all labels.
    """

    z_ND: Tensor
    y_N: Tensor
    z_PD: Tensor
    feature_PD: Tensor
    num_classes: int
    sensitivity: Sensitivity
    scale: float
    whitening: Whitening | None = None
    neighbors: int = 0
    start_DC: Tensor | None = None
    query_Q: Tensor | None = None

    def __post_init__(self) -> None:
        # Not an assert, because the guarantee depends on this check, and python -O drops asserts.
        for z_BD in self.z_ND.split(_BLOCK_RECORDS):
            # A sum of at most UNIT_NORM is exact in float64, and a larger sum stays larger.
            is_in_range = not z_BD.numel() or -GRID_STEPS <= int(z_BD.min()) <= int(z_BD.max()) <= GRID_STEPS
            if not is_in_range or not bool((z_BD.double().square().sum(1) <= UNIT_NORM).all()):
                raise ValueError("gradients: a record's features are longer than 1")

    def __len__(self) -> int:
        return len(self.z_PD) if self.query_Q is None else len(self.query_Q)

    def select(self, index_Q: Tensor) -> GradientSums:
        """Select the public points whose labels are requested. The sum is over the same records."""
        query_Q = index_Q.cpu() if self.query_Q is None else self.query_Q[index_Q.cpu()]
        return replace(self, query_Q=query_Q)

    def without_records(self) -> GradientSums:
        """Releasable. Return the public values, without any record."""
        return replace(self, z_ND=self.z_ND[:0], y_N=self.y_N[:0])

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the model's weights, (D, C)."""
        return self.z_ND.shape[1], self.num_classes

    def compute_gradient_sum(self, weight_DC: Tensor, clip_norm: float = 1.0) -> Tensor:
        """PRIVATE. Compute the sum of the clipped gradients of all records in units of 1/UNIT_NORM, int64 [D, C].

        One privacy unit moves the sum by at most ``clip_norm * UNIT_NORM`` times ``sensitivity``. Each entry of the sum
        is clipped to 2^52 in magnitude. This increases no distance between two sums, and refuses no number of records.

        Args:
            weight_DC: Weights at which the gradients are computed.
            clip_norm: Length, at most 1, to which longer residuals e_y - softmax(z W) are clipped.

        Raises:
            ValueError: The weights are not finite or too large. Also raised if a clipped residual is longer than
                ``clip_norm``, which would be an error of this function.
        """
        weight_DC, weight_unit = _quantize_weights(weight_DC.double().cpu())
        total_DC = torch.zeros(self.shape, dtype=torch.int64)
        for z_BD, y_B in zip(self.z_ND.split(_BLOCK_RECORDS), self.y_N.split(_BLOCK_RECORDS), strict=True):
            # The products and sums are integers below 2^53, which float64 adds exactly in any order. The logits of a
            # record therefore do not depend on the other records of its block.
            z_BD, label_BC = z_BD.double(), F.one_hot(y_B, self.num_classes).double()
            residual_BC = label_BC - (z_BD @ weight_DC * (weight_unit / GRID_STEPS)).softmax(1)
            residual_norm_B1 = residual_BC.norm(dim=1, keepdim=True)
            residual_BC = quantize(residual_BC * (clip_norm / residual_norm_B1.clamp(min=clip_norm)))
            if not bool((residual_BC.square().sum(1) <= clip_norm**2 * UNIT_NORM).all()):
                raise ValueError("gradients: a record's residual is longer than clip_norm")
            total_DC += (residual_BC.double().T @ z_BD).T.to(torch.int64)  # exact for fewer than 2^33 records
        return total_DC.clamp(-_MAX_GRADIENT_SUM, _MAX_GRADIENT_SUM)

    def compute_class_sums(self) -> Tensor:
        """PRIVATE. Compute the sum of the features of each class in units of 1/UNIT_NORM, int64 [D, C].

        One privacy unit moves the sums by at most ``UNIT_NORM`` times ``sensitivity``. The gradient sum at weights that
        give every record the class probabilities p_C is, without clipping, S - (sum of S over classes) p_C.
        """
        total_CD = torch.zeros(self.num_classes, self.z_ND.shape[1], dtype=torch.int64)
        total_CD.index_add_(0, self.y_N, self.z_ND.to(torch.int64))
        return total_CD.T.contiguous() * GRID_STEPS

    def compute_scores(self, weight_DC: Tensor) -> Tensor:
        """Releasable. Compute the logits of a released model on every public point, float32 [P, C]."""
        return self.z_PD @ weight_DC.float()

    def make_model(self, weight_DC: Tensor) -> LinearModel | None:
        """Releasable. Make the released model for new points. None if the features of new points are unknown."""
        if self.whitening is None:
            return None
        return LinearModel(weight_DC.float(), torch.zeros(self.num_classes), self.whitening, self.neighbors)
