"""Rounds of votes for candidate rows, as in private evolution. Everything here but the votes is post-processing.

A pool of rows with weights stands for the synthetic table. In each round some rows of the pool are candidates, every
private record is counted at its nearest candidate and its class, and the weights of the pool change so that each cell
gets the noisy count of its records. Between rounds rows are drawn again by weight and varied: two rows of one cell and
class exchange some columns. The votes find relations among many columns at once, which no marginal table shows.

Source: Lin, Gopi, Kulkarni, Nori & Yekhanin 2024 (private evolution).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_BLOCK_ROWS = 4096
_CLASS_MIXING = 0.1
"""Share of a row's weight that goes to the classes by their frequency, so that every cell can get every class."""


@dataclass(frozen=True, eq=False)
class Candidates:
    """Releasable. Candidate rows, which divide all rows into cells.

    Attributes:
        codes_MF: Distinct rows of codes without the target, int64 [M, F].
        sizes: Number of codes of each of these columns.
        ordered: Whether the codes of each column are ordered, so that near codes are near values.
    """

    codes_MF: np.ndarray
    sizes: tuple[int, ...]
    ordered: tuple[bool, ...]

    def find_nearest(self, codes_NF: np.ndarray) -> np.ndarray:
        """Find the nearest candidate of each row, int64 [N]; ties go to the first.

        Two codes of a column are at distance 1, or in an ordered column at their difference over the number of codes;
        a missing value is at distance 1 from every other code. Distances are sums of whole multiples of 2^-16, which
        are exact, so the result of a row does not depend on other rows.
        """
        columns = zip(self.codes_MF.T, self.sizes, self.ordered, strict=True)
        distance_DM = np.concatenate([make_distances(size, order)[:, code_M] for code_M, size, order in columns])
        distance_DM, start_F = distance_DM.astype(np.float64), np.cumsum([0, *self.sizes[:-1]])
        parts = [np.zeros(0, dtype=np.int64)]
        for block_BF in np.split(codes_NF, range(_BLOCK_ROWS, len(codes_NF), _BLOCK_ROWS)):
            one_hot_BD = np.zeros((len(block_BF), len(distance_DM)))
            np.put_along_axis(one_hot_BD, block_BF + start_F, 1.0, axis=1)
            parts.append((one_hot_BD @ distance_DM).argmin(1))  # sums of integers below 2^53, which are exact
        return np.concatenate(parts)


def make_distances(size: int, is_ordered: bool) -> np.ndarray:
    """Make the distances between the codes of a column in units of 2^-16, int64 [size, size]."""
    code_S = np.arange(size)
    difference_SS = np.abs(code_S[:, None] - code_S)
    distance_SS = (difference_SS > 0) * 65536
    if is_ordered:
        has_value_SS = (code_S[:, None] > 0) & (code_S > 0)
        distance_SS = np.where(has_value_SS, difference_SS * 65536 // max(1, size - 1), distance_SS)
    return distance_SS


@dataclass(frozen=True, eq=False)
class Pool:
    """Releasable. Rows of codes with weights that sum to 1.

    Attributes:
        codes_NJ: Rows, int64 [N, J].
        weight_N: Weights, float64 [N].
        target: Position of the target among the columns.
        sizes: Number of codes of each column.
        ordered: Whether the codes of each column are ordered.
    """

    codes_NJ: np.ndarray
    weight_N: np.ndarray
    target: int
    sizes: tuple[int, ...]
    ordered: tuple[bool, ...]

    @classmethod
    def from_rows(cls, codes_NJ: np.ndarray, target: int, sizes: Sequence[int], ordered: Sequence[bool]) -> Pool:
        """Make a pool of these rows, each with every class, with the class frequencies of the rows.

        The class of the row itself has most of its weight, and the other classes have the rest by their frequency.
        """
        num_classes, own_N = sizes[target], codes_NJ[:, target]
        pool_NJ = np.repeat(codes_NJ, num_classes, axis=0)
        pool_NJ[:, target] = np.tile(np.arange(num_classes), len(codes_NJ))
        frequency_N = np.tile(np.bincount(own_N, minlength=num_classes) / len(own_N), len(own_N))
        is_own_N = pool_NJ[:, target] == np.repeat(own_N, num_classes)
        weight_N = (1 - _CLASS_MIXING) * is_own_N + _CLASS_MIXING * frequency_N
        return cls(pool_NJ, weight_N / weight_N.sum(), target, tuple(sizes), tuple(ordered))

    def choose_candidates(self, count: int, random: np.random.Generator) -> Candidates:
        rows = random.choice(len(self.codes_NJ), size=count, p=self.weight_N)
        codes_MF = np.unique(np.delete(self.codes_NJ[rows], self.target, axis=1), axis=0)
        sizes, ordered = (tuple(np.delete(np.array(v), self.target).tolist()) for v in (self.sizes, self.ordered))
        return Candidates(codes_MF, sizes, ordered)

    def find_cells(self, candidates: Candidates) -> np.ndarray:
        """Find the candidate and class of each row as one number, int64 [N]."""
        num_classes = self.sizes[self.target]  # the rows come in groups of this size, which differ in the target alone
        nearest_N = candidates.find_nearest(np.delete(self.codes_NJ[::num_classes], self.target, axis=1))
        return np.repeat(nearest_N, num_classes) * num_classes + self.codes_NJ[:, self.target]

    def reweight(self, cell_N: np.ndarray, counts_MC: np.ndarray, sigma: float) -> Pool:
        """Return the pool with the noisy counts of the cells, shrunk to its own counts as far as these are noise.

        The squared difference between a count and the pool's own count has mean sigma^2 + v (own count)^2, where v is
        estimated from all cells. The share v (own)^2 / (v (own)^2 + sigma^2) of the difference is kept.
        """
        noisy_M, size = counts_MC.astype(np.float64).ravel(), max(1.0, float(counts_MC.sum()))
        own_M = np.bincount(cell_N, self.weight_N, minlength=len(noisy_M)) * size
        difference_M = noisy_M - own_M
        variation = max(0.0, float((difference_M**2 - sigma**2).sum() / max(1.0, (own_M**2).sum())))
        signal_M = variation * own_M**2
        target_M = np.maximum(own_M + signal_M / (signal_M + sigma**2) * difference_M, 0)
        ratio_M = np.divide(target_M, own_M, out=np.zeros_like(own_M), where=own_M > 0)
        weight_N = self.weight_N * ratio_M[cell_N]
        if not weight_N.sum() > 0:
            return self
        return Pool(self.codes_NJ, weight_N / weight_N.sum(), self.target, self.sizes, self.ordered)

    def vary(self, cell_N: np.ndarray, random: np.random.Generator) -> Pool:
        """Draw as many rows by weight, and let rows of one cell and class exchange half of their columns at random."""
        rows = random.choice(len(self.codes_NJ), size=len(self.codes_NJ) // self.sizes[self.target], p=self.weight_N)
        rows = rows[np.argsort(cell_N[rows], kind="stable")]  # neighbors in this order mostly share a cell
        codes_NJ, partner_N = self.codes_NJ[rows], np.roll(np.arange(len(rows)), 1)
        is_exchanged_NJ = (random.random(codes_NJ.shape) < 0.5) & (random.random((len(rows), 1)) < 0.5)
        is_exchanged_NJ &= (cell_N[rows] == cell_N[rows[partner_N]])[:, None]
        codes_NJ = np.where(is_exchanged_NJ, codes_NJ[partner_N], codes_NJ)
        return Pool.from_rows(codes_NJ, self.target, self.sizes, self.ordered)
