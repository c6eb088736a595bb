"""PRIVATE. Vote histograms for data-dependent prices, sorted and grouped.

The mechanisms treat all classes alike, so a price depends on the sorted counts, and equal sorted rows are priced once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pate_torch.core import checks

Array = NDArray[np.float64]
Counts = NDArray[np.int64]


@dataclass(frozen=True, eq=False, repr=False)
class VoteRows:
    """PRIVATE. Distinct sorted vote rows.

    Attributes:
        rows_UC: Distinct rows, with counts in descending order.
        count_U: Number of questions that have each row.
        inverse_Q: Row of each question.
        num_teachers: Number K of teachers.
    """

    rows_UC: Counts
    count_U: Counts
    inverse_Q: Counts
    num_teachers: int

    def __len__(self) -> int:
        return len(self.rows_UC)

    @property
    def num_classes(self) -> int:
        """Number C of classes."""
        return int(self.rows_UC.shape[1])

    def __repr__(self) -> str:
        return "VoteRows(content withheld)"


def group_votes(votes: ArrayLike) -> VoteRows:
    """Sort and group integer votes [Q, C] whose rows all sum to the same K >= 1.

    Raises:
        ValueError: The votes have another form. The message shows no count.
    """
    votes_QC = np.asarray(votes)
    if votes_QC.ndim != 2 or votes_QC.shape[0] < 1 or votes_QC.shape[1] < 2:
        raise ValueError(
            f"votes: must be a [queries, classes] array with at least one query and two classes, not {votes_QC.shape}."
        )
    if not np.issubdtype(votes_QC.dtype, np.integer):
        raise ValueError(f"votes: counts must be integers, not {votes_QC.dtype} (one teacher, one whole vote).")
    rows_QC = np.sort(votes_QC.astype(np.int64), axis=1)[:, ::-1]
    num_teachers = int(rows_QC[0].sum())
    if rows_QC.min() < 0 or num_teachers < 1 or (rows_QC.sum(1) != num_teachers).any():
        raise ValueError("votes: counts must be at least 0 and every row must sum to the same number of teachers.")
    return _group_distinct_rows(rows_QC, num_teachers)


def check_orders(orders: ArrayLike) -> Array:
    """Check Renyi orders, finite and above 1, and convert them to float64 [A] (powers of integers would overflow)."""
    if isinstance(orders, Sequence) and any(isinstance(a, bool) for a in orders):
        raise checks.error("orders", orders, "every order must be a finite number above 1")
    try:
        orders_A = np.atleast_1d(np.asarray(orders, dtype=np.float64))
    except (TypeError, ValueError) as error:
        raise checks.error("orders", orders, "every order must be a finite number above 1") from error
    if orders_A.ndim != 1 or not len(orders_A):
        raise checks.error("orders", orders, "must be a list of at least one order")
    if not (np.isfinite(orders_A).all() and (orders_A > 1).all()):
        raise checks.error("orders", orders, "every order must be a finite number above 1")
    return orders_A


def _group_distinct_rows(rows_QC: Counts, num_teachers: int) -> VoteRows:
    """Find distinct rows by packing counts into 64-bit keys (ten times faster than ``np.unique`` at 1e6 rows)."""
    # The last count follows from the others and K, so it is not compared.
    base = num_teachers + 1
    columns_per_key = max(1, int(62 / np.log2(base)))
    keys = []
    for start in range(0, rows_QC.shape[1] - 1, columns_per_key):
        key = np.zeros(len(rows_QC), dtype=np.int64)
        for column in range(start, min(start + columns_per_key, rows_QC.shape[1] - 1)):
            key = key * base + rows_QC[:, column]
        keys.append(key)
    order = np.lexsort(keys)
    is_new = np.ones(len(rows_QC), dtype=bool)
    is_new[1:] = np.any([key[order][1:] != key[order][:-1] for key in keys], axis=0)
    inverse_Q = np.empty(len(rows_QC), dtype=np.int64)
    inverse_Q[order] = np.cumsum(is_new) - 1
    return VoteRows(
        rows_UC=rows_QC[order[is_new]],
        count_U=np.bincount(inverse_Q),
        inverse_Q=inverse_Q,
        num_teachers=num_teachers,
    )
