"""Reverse k-NN labeling: every record is counted once, at the asked public point nearest to it; there are no teachers.

The asked points divide the space of features into cells. Each unit adds one count, for its class, to the cell in which
it lies. Teachers vote on every query, so every query costs privacy. Here one unit changes one number of one
table, so ten thousand queries cost as much as one query (``mechanisms.histogram``). The noisy counts estimate the
class proportions of a cell, which label all public points of this cell. A second round can use the features of a
student of the first answers, in which the classes are better separated.

Guarantee: the cell and the class of a unit are functions of its own records and of public values, found by an exact
search, and other records do not influence even the rounding (``map_records_batch_invariant``). Therefore one unit
changes one count of each round's table (``CellHistogram``), and rounds compose adaptively.
Source: Li et al. 2022 (arXiv 2207.13253), reverse k-nearest-neighbor labeling, with k = 1, cells of many public points
instead of single points, and a second round; the histogram of Dwork, McSherry, Nissim & Smith 2006.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from pate_torch.core.progress import Progress, do_nothing
from pate_torch.features.contrastive import encode
from pate_torch.mechanisms.histogram import Histogram
from pate_torch.methods import feasibility
from pate_torch.methods.base import MethodDescription, get_unit_column
from pate_torch.methods.record_method import RecordMethod, map_records_batch_invariant
from pate_torch.privacy.partition import DatasetFacts, number_units
from pate_torch.privacy.records import LABEL_UNIT, DataSpec, PrivateRecords, Shards
from pate_torch.privacy.sensitive import COUNT_SENSITIVITY, CellHistogram, Sensitivity, make_record_sum_sensitivity

_BLOCK_ENTRIES = 1 << 22  # entries of one block of a distance matrix: 16 MB


@dataclass(frozen=True, kw_only=True)
class ReverseKnn(RecordMethod):
    """Reverse k-NN labeling. The queries and the features decide the cells, so there are no other settings."""

    mechanism_type = Histogram
    mechanism: Histogram
    name: str = "reverse_knn"

    def validate(self, facts: DatasetFacts) -> None:
        super().validate(facts)
        size = facts.spec.nominal_size
        if size is not None:  # the mean number of records in a cell takes the place of the number of teachers
            cell_size, allow = max(1, size * self.num_rounds // self.num_queries), self.allow_uninformative_labels
            num_classes = facts.spec.num_classes
            feasibility.check_informative(self.mechanism, cell_size, num_classes, allow_uninformative=allow)

    def describe(self, facts: DatasetFacts) -> MethodDescription:
        return describe(facts.unit)

    def make_sensitive(
        self, private: PrivateRecords, shards: Shards, facts: DatasetFacts, encoder: nn.Module, progress: Progress
    ) -> CellCounter:
        feature_PD = encode(encoder, facts.pool.x, facts.spec)
        sensitivity = make_record_sum_sensitivity(shards, COUNT_SENSITIVITY[shards.adjacency])
        return CellCounter(private, facts.spec, encoder, feature_PD, sensitivity, progress)


@dataclass(frozen=True, eq=False, repr=False)
class CellCounter:
    """PRIVATE. Records of units, each of which is counted once, in the cells of any queries.

    ``encoder`` maps normalized points to features. ``feature_PD`` are the unit-length features of the public points,
    float32 [P, D], which may be released. ``progress`` receives percentages.
    """

    private: PrivateRecords
    spec: DataSpec
    encoder: nn.Module
    feature_PD: Tensor
    sensitivity: Sensitivity
    progress: Progress = do_nothing

    def __len__(self) -> int:
        return len(self.feature_PD)

    @property
    def num_classes(self) -> int:
        return self.spec.num_classes

    def select(self, index_Q: Tensor) -> CellHistogram:
        """PRIVATE. Count the records in the cells of these queries, which are pool indices, int64 [Q]."""
        assert self.sensitivity.adjacency is not None
        query_QD = self.feature_PD[index_Q.cpu()]
        assign_to_queries = functools.partial(assign_cells, query_QD=query_QD)
        row_N = map_records_batch_invariant(assign_to_queries, self.encoder, self.private, self.spec, self.progress)
        counts_QC = torch.zeros(len(query_QD), self.num_classes, dtype=torch.int64)
        row_U, class_U = _select_unit_cells(row_N, self.private, self.sensitivity.adjacency)
        counts_QC.index_put_((row_U, class_U), torch.ones_like(row_U), accumulate=True)
        return CellHistogram(counts_QC, self.sensitivity, assign_cells(self.feature_PD, query_QD))


def describe(unit: str) -> MethodDescription:
    """Describe the method for reports, given the privacy unit."""
    every_unit = "The label of every record" if unit == LABEL_UNIT else f"Every {get_unit_column(unit) or 'record'}"
    count_clause = f"{every_unit} was counted once{{each_round}}"
    location_clause = "most of its records lie nearest" if get_unit_column(unit) else "it lies nearest"
    return MethodDescription(
        subject="reverse k-NN counts",
        procedure=f"{count_clause}: for its class, at the one of {{asked}} public points to which {location_clause}. "
        "The mechanism {mechanism} added noise to every count, and only the noisy counts were released. A student sees "
        "nothing but public points and these counts.",
        query_sentence="{asked}{each_round}, every record counted at the one nearest to it",
        examples="Public points, each with the class that the noisy counts of its cell gave it. Some classes are "
        "wrong, because of the noise and because cells contain several classes.",
        assumptions=(f"{count_clause}, in one number of one table, independently of all other records.",),
        uses_size=False,
    )


def assign_cells(feature_PD: Tensor, query_QD: Tensor) -> Tensor:
    """Return the row of the asked point that is nearest to each feature, int64 [P]; ties go to the first row.

    The sum of squared differences decides. A matrix product is faster, but the rounding of one of its rows may depend
    on the other rows, so the product only excludes points that cannot be nearest. With S = (|x| + |q|)^2 and
    g = (D + 2) 2^-24 (to first order), the error of the product is at most g S for any order of additions, and so is
    the error of the sum of squares. Therefore the nearest point is within 4 g S of the minimum of the product.
    """
    max_norm = float(query_QD.norm(dim=1).max()) if len(query_QD) else 0.0
    tolerance = 4 * (query_QD.shape[1] + 4) * torch.finfo(query_QD.dtype).eps  # twice 4 g
    norm_Q = query_QD.square().sum(1)
    parts = [torch.zeros(0, dtype=torch.int64)]
    for feature_BD in feature_PD.split(max(1, _BLOCK_ENTRIES // max(1, len(query_QD)))):
        rough_BQ = norm_Q - 2 * feature_BD @ query_QD.T
        slack_B1 = tolerance * (feature_BD.norm(dim=1, keepdim=True) + max_norm).square()
        row_M, col_M = (rough_BQ <= rough_BQ.amin(1, keepdim=True) + slack_B1).nonzero(as_tuple=True)
        squared_BQ = torch.full_like(rough_BQ, torch.inf)
        for part_M in torch.arange(len(row_M)).split(max(1, _BLOCK_ENTRIES // query_QD.shape[1])):
            row, col = row_M[part_M], col_M[part_M]
            squared_BQ[row, col] = (feature_BD[row] - query_QD[col]).square().sum(1)
        parts.append(squared_BQ.argmin(1))
    return torch.cat(parts)


def _select_unit_cells(row_N: Tensor, private: PrivateRecords, adjacency: str) -> tuple[Tensor, Tensor]:
    """Select the cell and class with most records of each unit, int64 [U] each; ties go to the lowest."""
    place_N3 = np.stack([number_units(private, adjacency), row_N.numpy(), private.y.numpy()], 1)
    distinct_M3, count_M = np.unique(place_N3, axis=0, return_counts=True)
    order = np.lexsort((distinct_M3[:, 2], distinct_M3[:, 1], -count_M, distinct_M3[:, 0]))
    _, first_U = np.unique(distinct_M3[order, 0], return_index=True)
    place_U3 = torch.from_numpy(distinct_M3[order[first_U]])
    return place_U3[:, 1], place_U3[:, 2]
