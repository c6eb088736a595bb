"""Sensitive values: values computed from private records, each with a bound on how far one privacy unit moves it.

The code that makes a value states its sensitivity. Only a mechanism opens a sensitive value, and only if its price
covers the stated sensitivity. This module holds every kind of value that a mechanism takes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from pate_torch.core import checks
from pate_torch.privacy.records import ADJACENCIES, LinearModel, Shards
from pate_torch.privacy.whitening import Whitening


@dataclass(frozen=True, kw_only=True)
class Sensitivity:
    """The largest distance by which one privacy unit moves a value, in the units of the value (such as votes).

    The distances are taken over the whole value. They are infinite if nothing bounds them.

    Attributes:
        l1: Largest L1 distance.
        l2: Largest L2 distance.
        linf: Largest change of one number.
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
        if self.adjacency is not None:
            checks.one_of("adjacency", self.adjacency, ADJACENCIES)

    def is_within(self, max_sensitivity: Sensitivity) -> bool:
        """Whether no distance exceeds that of ``max_sensitivity`` and the adjacencies agree."""
        has_small_norms = (
            self.l1 <= max_sensitivity.l1 and self.l2 <= max_sensitivity.l2 and self.linf <= max_sensitivity.linf
        )
        return has_small_norms and self.has_adjacency_of(max_sensitivity)

    def has_adjacency_of(self, other: Sensitivity) -> bool:
        """Whether the adjacencies agree; None agrees with every adjacency."""
        return None in (self.adjacency, other.adjacency) or self.adjacency == other.adjacency


def check_sensitivity(sensitivity: Sensitivity, max_sensitivity: Sensitivity, mechanism: str) -> None:
    """Raise ValueError if a value has a larger sensitivity, or another adjacency, than a mechanism's price covers."""
    if not sensitivity.has_adjacency_of(max_sensitivity):
        message = f"is not the records' ({sensitivity.adjacency})"
        raise checks.error("mechanism.adjacency", max_sensitivity.adjacency, message, "Set it to the partition's.")
    if not sensitivity.is_within(max_sensitivity):
        message = f"is more than mechanism={mechanism} is priced for ({max_sensitivity})"
        raise checks.error("sensitivity", sensitivity, message, "Leave out partition.capacity, or price what it says.")


class SensitiveValue(Protocol):
    """PRIVATE. A value about the public pool that a mechanism opens: votes of teachers, or sums over records."""

    def __len__(self) -> int:
        """Number of public points."""
        ...

    @property
    def num_classes(self) -> int:
        """Number C of classes."""
        ...

    @property
    def sensitivity(self) -> Sensitivity:
        """Sensitivity of the value that a mechanism opens."""
        ...

    def select(self, index_Q: Tensor, /) -> Any:
        """Select the value for these public points, in this order."""
        ...


class SensitiveRecords(SensitiveValue, Protocol):
    """PRIVATE. A sum over records that is computed in features of public points."""

    @property
    def feature_PD(self) -> Tensor:
        """Releasable. Unit-length features [P, D] of the public points, in which the next questions are chosen."""
        ...


VOTE_SENSITIVITY = Sensitivity(l1=2.0, l2=math.sqrt(2.0), linf=1.0)
"""Sensitivity of one row of votes: a unit affects one shard, so it moves one teacher's vote to another class."""


@dataclass(frozen=True, eq=False, repr=False)
class Votes:
    """PRIVATE. Vote counts, to which each teacher contributes one vote a row.

    Attributes:
        counts_QC: Integers [Q, C]. Each row sums to ``num_teachers``.
        num_teachers: Number K of teachers.
        sensitivity: Sensitivity of each row. The default holds if a privacy unit affects one shard: it then moves one
            teacher, whose vote may go to another class in every row at once. Votes made by another rule state another.
    """

    counts_QC: Tensor
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
            # Counts within 0..K sum to C K at most. Sums in 32 bits take a quarter of the time of sums in 64 bits.
            fits_int32 = self.num_teachers * counts.shape[1] < 2**31
            total = counts.sum(1, dtype=torch.int32 if fits_int32 else torch.int64)
            min_total, max_total = total.aminmax()  # one pass and one tensor less than a comparison
            if low < 0 or high > self.num_teachers or min_total != self.num_teachers or max_total != self.num_teachers:
                problem = "every row must be non-negative and sum to num_teachers (one teacher, one vote)"
                raise ValueError(f"votes: {problem}")

    def __len__(self) -> int:
        return self.counts_QC.shape[0]

    @property
    def num_classes(self) -> int:
        """Number C of classes."""
        return self.counts_QC.shape[1]

    def select(self, index_Q: Tensor) -> Votes:
        """Select the votes on some of the questions."""
        return Votes(self.counts_QC[index_Q.to(self.counts_QC.device)], self.num_teachers, self.sensitivity)

    def compute_plurality(self) -> Tensor:
        """PRIVATE. Compute the noiseless winners, int64 [Q]; ties go to the lowest class."""
        # max over equal values returns an unspecified index on some devices; the sum of a prefix is exact.
        top = self.counts_QC.max(1, keepdim=True).values
        return (self.counts_QC == top).int().argmax(1)

    def compute_top_counts(self) -> Tensor:
        """PRIVATE. Compute the winning counts, [Q], of which each changes by at most 1."""
        return self.counts_QC.max(1).values

    def compute_gaps(self) -> Tensor:
        """PRIVATE. Compute winner minus runner-up, [Q], of which each changes by at most 2."""
        top_two_Q2 = self.counts_QC.topk(2, dim=1).values
        return top_two_Q2[:, 0] - top_two_Q2[:, 1]

    def __repr__(self) -> str:
        return f"Votes({len(self)} queries, content withheld)"


@dataclass(frozen=True, eq=False, repr=False)
class SoftVotes:
    """PRIVATE. Class probabilities of the teachers, in place of votes.

    Attributes:
        score_KQS: Scores in [0, 1] of each teacher for each question, [K, Q, S]: one score for each class, or for two
            classes the score of the second alone. A privacy unit affects one teacher, which is one row.
    """

    score_KQS: Tensor

    def __post_init__(self) -> None:
        score = self.score_KQS
        if not isinstance(score, Tensor) or score.dim() != 3 or not score.is_floating_point() or len(score) == 0:
            raise ValueError("soft votes: scores must be a floating-point [teachers, queries, scores] tensor")
        if score.shape[2] in (0, 2):
            raise ValueError("soft votes: of two classes the second one's score alone is asked about")
        if not bool(((score >= 0) & (score <= 1)).all()):  # written so that NaN fails
            raise ValueError("soft votes: every score must lie in [0, 1]")

    @classmethod
    def from_probabilities(cls, probability_KQC: Tensor) -> SoftVotes:
        """Make soft votes of class probabilities [K, Q, C]."""
        return cls(probability_KQC[..., 1:] if probability_KQC.shape[2] == 2 else probability_KQC)

    @property
    def num_teachers(self) -> int:
        """Number K of teachers."""
        return len(self.score_KQS)

    @property
    def num_classes(self) -> int:
        """Number C of classes."""
        return max(2, self.score_KQS.shape[2])

    @property
    def sensitivity(self) -> Sensitivity:
        """Sensitivity of each histogram: one teacher's score moves to another bin, into the bins or out of them."""
        return VOTE_SENSITIVITY

    def __len__(self) -> int:
        return self.score_KQS.shape[1]

    def select(self, index_Q: Tensor) -> SoftVotes:
        """Select the scores on some of the questions."""
        return SoftVotes(self.score_KQS[:, index_Q.to(self.score_KQS.device)])

    def compute_histogram(self, bins: int) -> Tensor:
        """Count the scores in ``bins`` equal bins [v/bins, (v+1)/bins), the last one closed; int64 [Q S, bins]."""
        return _count_bins((self.score_KQS.double() * bins).floor().clamp(max=bins - 1), bins)

    def compute_shifted_histogram(self, bins: int) -> Tensor:
        """Count the scores in the same bins moved by half a bin, without the half bins at the ends; [Q S, bins - 1]."""
        return _count_bins((self.score_KQS.double() * bins + 0.5).floor() - 1, bins - 1)

    def __repr__(self) -> str:
        return f"SoftVotes({len(self)} queries, content withheld)"


def _count_bins(bin_KQS: Tensor, bins: int) -> Tensor:
    """Count each score's bin numbers, [Q S, bins], without those outside 0..bins-1."""
    index_QK = bin_KQS.to(torch.int64).flatten(1).T
    inside_QK = (index_QK >= 0) & (index_QK < bins)
    counts = torch.zeros(len(index_QK), bins, dtype=torch.int64, device=index_QK.device)
    return counts.scatter_add_(1, index_QK.clamp(0, bins - 1), inside_QK.to(torch.int64))


def make_vector_sum_sensitivity(adjacency: str, size: int) -> Sensitivity:
    """Make the sensitivity of a sum to which each privacy unit adds a vector of ``size`` numbers and length at most 1.

    Adding or removing a unit moves the sum by one such vector. Replacing a unit moves it by the difference of two.
    """
    num_vectors = {"add_remove": 1.0, "replace_one": 2.0}[checks.one_of("adjacency", adjacency, ADJACENCIES)]
    return Sensitivity(l1=num_vectors * math.sqrt(size), l2=num_vectors, linf=num_vectors, adjacency=adjacency)


def make_record_sum_sensitivity(shards: Shards, sensitivity: Sensitivity) -> Sensitivity:
    """Make the sensitivity of a sum over records, given the sensitivity of the contribution of one unit.

    If shards have a capacity, an added unit can displace records of other units, so the sensitivity is unbounded.
    """
    if not shards.has_capacity:
        return sensitivity
    return Sensitivity(l1=math.inf, l2=math.inf, linf=math.inf, adjacency=shards.adjacency)


COUNT_SENSITIVITY = {
    "add_remove": Sensitivity(l1=1.0, l2=1.0, linf=1.0, adjacency="add_remove"),
    "replace_one": Sensitivity(l1=2.0, l2=math.sqrt(2.0), linf=1.0, adjacency="replace_one"),
}
"""Sensitivity of a table that counts each unit once: one count changes by one, or one unit moves to another count."""


@dataclass(frozen=True, eq=False, repr=False)
class CellHistogram:
    """PRIVATE. Number of units in the cell of each question, for each class. Each unit is counted once in the table.

    Attributes:
        counts_QC: Integers of at least 0, [Q, C].
        sensitivity: Sensitivity of the *whole* table, for any number of rows (``COUNT_SENSITIVITY``).
        cell_P: Releasable. The row whose cell holds each public point, int64 [P].
    """

    counts_QC: Tensor
    sensitivity: Sensitivity
    cell_P: Tensor

    def __post_init__(self) -> None:
        counts = self.counts_QC
        if counts.dim() != 2 or counts.is_floating_point() or counts.dtype == torch.bool:
            raise ValueError("cells: counts must be integers [questions, classes] (one unit, counted once)")
        if len(counts) and int(counts.min()) < 0:
            raise ValueError("cells: counts must be non-negative")

    def __len__(self) -> int:
        return self.counts_QC.shape[0]

    @property
    def num_classes(self) -> int:
        """Number C of classes."""
        return self.counts_QC.shape[1]

    def select(self, index_Q: Tensor) -> CellHistogram:
        """Select the counts of some of the questions, which must be distinct."""
        return CellHistogram(self.counts_QC[index_Q.to(self.counts_QC.device)], self.sensitivity, self.cell_P)

    def __repr__(self) -> str:
        return f"CellHistogram({len(self)} questions, content withheld)"


GRID_STEPS = 1 << 15
"""Features and residuals, of length at most 1, are rounded towards zero to multiples of 1/GRID_STEPS."""
UNIT_NORM = GRID_STEPS**2
"""Length of a unit gradient in grid units. Sums over fewer than 2^22 records stay below 2^53: exact in float64."""
MIN_CLIP_NORM = 1 / 64
"""Smallest clipping norm. A residual of a smaller norm would have fewer than 512 grid units."""
_ROUNDING_SHRINKAGE = 1 - 2.0**-30  # a margin far larger than the rounding error of a length in float64
_BLOCK_RECORDS = 4096


def quantize(value: Tensor) -> Tensor:
    """Round vectors of length at most 1 towards zero to multiples of 1/GRID_STEPS, int64, so that none gets longer.

    Raises:
        ValueError: A number is not finite or exceeds 2 in magnitude. Its square could overflow to a small integer.
    """
    value = value.double()
    if value.numel() and not -2 <= float(value.min()) <= float(value.max()) <= 2:  # written so that NaN fails
        raise ValueError("gradients: a vector that is to be rounded is not finite or too long")
    return (value * (_ROUNDING_SHRINKAGE * GRID_STEPS)).trunc().to(torch.int64)


def _quantize_weights(weight_DC: Tensor) -> tuple[Tensor, float]:
    """Round weights to multiples of a grid unit, which is a power of 2; return (multiples, grid unit).

    The columns of the multiples are shorter than 2^37. Sums of products with features, which are at most GRID_STEPS
    long, then stay below 2^53 (Cauchy-Schwarz). The rounding error of an entry is at most 2^-36 of the longest column.

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
        y_N: PRIVATE. Labels.
        z_PD: Releasable. Whitened features of the public points.
        feature_PD: Releasable. Features of the public points before whitening.
        sensitivity: Sensitivity of ``compute_gradient_sum`` in units of ``UNIT_NORM`` at clipping norm 1. A smaller
            clipping norm scales it.
        scale: Change of the weights by one unit (``UNIT_NORM``) of the gradient sum at step size 1.
        whitening: Releasable. Map from features to whitened features. None if the features are not known elsewhere.
        neighbors: Number of neighbors of the mean-shift step before whitening. 0 if there is no such step.
        query_Q: Indices of the public points whose labels are requested. None if all are.
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
    query_Q: Tensor | None = None

    def __post_init__(self) -> None:
        # No assert: the guarantee rests on this, and python -O drops asserts.
        for z_BD in self.z_ND.split(_BLOCK_RECORDS):
            # The range is checked first, because the square of a larger integer could overflow to a small one.
            is_in_range = not z_BD.numel() or -GRID_STEPS <= int(z_BD.min()) <= int(z_BD.max()) <= GRID_STEPS
            if not is_in_range or not bool((z_BD.long().square().sum(1) <= UNIT_NORM).all()):
                raise ValueError("gradients: a record's features are longer than 1")

    def __len__(self) -> int:
        return len(self.z_PD) if self.query_Q is None else len(self.query_Q)

    def select(self, index_Q: Tensor) -> GradientSums:
        """Select the public points that are asked about. The records stay the same."""
        query_Q = index_Q.cpu() if self.query_Q is None else self.query_Q[index_Q.cpu()]
        return replace(self, query_Q=query_Q)

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the model's weights, [D, C]."""
        return self.z_ND.shape[1], self.num_classes

    @property
    def adjacency(self) -> str | None:
        """The adjacency of the sensitivity."""
        return self.sensitivity.adjacency

    def compute_gradient_sum(self, weight_DC: Tensor, clip_norm: float = 1.0) -> Tensor:
        """PRIVATE. Compute the sum of the clipped gradients of all records in units of 1/UNIT_NORM, int64 [D, C].

        One privacy unit moves the sum by at most ``clip_norm * UNIT_NORM`` times ``sensitivity``.

        Args:
            weight_DC: Weights at which the gradients are computed.
            clip_norm: Length, at most 1, to which longer residuals e_y - softmax(z W) are clipped.

        Raises:
            ValueError: A residual is longer than ``clip_norm``, which would be a fault of this function's arithmetic.
        """
        weight_DC, weight_unit = _quantize_weights(weight_DC.double().cpu())
        total_DC = torch.zeros(self.shape, dtype=torch.int64)
        for z_BD, y_B in zip(self.z_ND.split(_BLOCK_RECORDS), self.y_N.split(_BLOCK_RECORDS), strict=True):
            # All numbers here and in the sum are integers below 2^53. Float64 adds them exactly in any order, so the
            # logits of a record do not depend on the other records of its block.
            label_BC = F.one_hot(y_B, self.num_classes).double()
            residual_BC = label_BC - (z_BD.double() @ weight_DC * (weight_unit / GRID_STEPS)).softmax(1)
            residual_norm_B1 = residual_BC.norm(dim=1, keepdim=True)
            residual_BC = quantize(residual_BC * (clip_norm / residual_norm_B1.clamp(min=clip_norm)))
            if not bool((residual_BC.square().sum(1) <= clip_norm**2 * UNIT_NORM).all()):
                raise ValueError("gradients: a record's residual is longer than clip_norm")
            total_DC += (z_BD.double().T @ residual_BC.double()).to(torch.int64)
        return total_DC

    def compute_scores(self, weight_DC: Tensor) -> Tensor:
        """Releasable. Compute the logits of a released model on every public point, float32 [P, C]."""
        return self.z_PD @ weight_DC.float()

    def make_model(self, weight_DC: Tensor) -> LinearModel | None:
        """Releasable. Make the released model for new points; None if the features of new points are not known."""
        return None if self.whitening is None else self.whitening.to_linear_model(weight_DC, self.neighbors)

    def __repr__(self) -> str:
        return f"GradientSums(adjacency={self.adjacency!r}, content withheld)"
