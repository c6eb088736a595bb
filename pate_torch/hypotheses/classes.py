"""Hypothesis classes that enumerate one hypothesis for each dichotomy of a set of points.

The *dichotomies* of a class on points x_1..x_n are the distinct label vectors (h(x_1), ..., h(x_n)); Sauer and Shelah
bound their number (``sample.compute_log_sauer_shelah``). The privacy proofs count each dichotomy once, because a
duplicate would change the law of the answer.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

from pate_torch.core import checks
from pate_torch.hypotheses.sample import Bools, Floats, Ints


def find_distinct(labelings_Mn: Bools) -> Ints:
    """Find the index of the first row of each distinct labeling, in ascending order."""
    return np.sort(np.unique(np.packbits(labelings_Mn, axis=1), axis=0, return_index=True)[1]).astype(np.int64)


def compute_cuts(value_n: Floats) -> Floats:
    """Compute the thresholds -inf, one between any two adjacent distinct values (lower < cut <= upper), and +inf."""
    distinct_v = np.unique(value_n)
    middle = distinct_v[:-1] / 2 + distinct_v[1:] / 2
    # Between adjacent floats, the midpoint may round to the lower one, which is not above the lower value.
    middle = np.where((middle > distinct_v[:-1]) & (middle <= distinct_v[1:]), middle, distinct_v[1:])
    return np.concatenate(([-np.inf], middle, [np.inf])) if len(distinct_v) else np.array([np.inf])


def _sum_below(value_n: Floats, weight_n: Ints, cut_M: Any) -> Ints:
    """Sum the weights of {i : value_i < cut} for each cut, in O((n + M) log n)."""
    order = np.argsort(value_n, kind="stable")
    prefix = np.concatenate(([0], np.cumsum(weight_n[order])))
    return prefix[np.searchsorted(value_n[order], np.asarray(cut_M, np.float64), side="left")].astype(np.int64)


class HypothesisClass(ABC):
    """A small class of hypotheses over ``num_features`` features, enumerated exactly (NB20, DF20, WLF16)."""

    name: str
    num_features: int
    vc_dimension: int

    @abstractmethod
    def enumerate_representatives(self, x: Floats) -> Sequence[Any]:
        """Enumerate exactly one hypothesis for each dichotomy of x [n, D]."""

    @abstractmethod
    def predict(self, hypothesis: Any, x: Floats) -> Bools:
        """Compute the labels of x [n, D], bool [n]."""

    def compute_labelings(self, hypotheses: Sequence[Any], x: Floats) -> Bools:
        """Compute the labels of x [n, D] by each hypothesis, bool [M, n]."""
        return np.array([self.predict(h, x) for h in hypotheses], dtype=bool).reshape(len(hypotheses), len(x))

    def count_errors(self, hypotheses: Sequence[Any], x: Floats, y: Bools) -> Ints:
        """Count the records (x, y) that each hypothesis labels wrongly, int64 [M]. The sensitivity is 1."""
        return np.array([np.count_nonzero(self.predict(h, x) != y) for h in hypotheses], dtype=np.int64)

    def _check(self, x: Floats) -> Floats:
        if x.shape[1] != self.num_features:
            raise checks.error("x.shape", x.shape, f"must have {self.num_features} feature(s) for {self.name}")
        return x


def fit_erm(hypotheses: HypothesisClass, x: Floats, y: Bools) -> Any:
    """Fit the empirical risk minimizer, which is the non-private learner B_PAC of the papers."""
    candidates = hypotheses.enumerate_representatives(x)
    return candidates[int(np.argmin(hypotheses.count_errors(candidates, x, y)))]


@dataclass(frozen=True)
class Thresholds(HypothesisClass):
    """Thresholds on the line, h_t(x) = 1[x >= t], t in [-inf, inf].

    The VC dimension is 1; n distinct points have n + 1 dichotomies.
    """

    name: str = "thresholds"
    num_features: int = 1
    vc_dimension: int = 1

    def enumerate_representatives(self, x: Floats) -> Sequence[float]:
        return compute_cuts(self._check(x)).tolist()

    def predict(self, hypothesis: float, x: Floats) -> Bools:
        return self._check(x)[:, 0] >= hypothesis

    def count_errors(self, hypotheses: Sequence[float], x: Floats, y: Bools) -> Ints:
        return np.count_nonzero(~y) + _sum_below(self._check(x)[:, 0], np.where(y, 1, -1), hypotheses)


@dataclass(frozen=True)
class Intervals(HypothesisClass):
    """Intervals on the line, h_{a,b}(x) = 1[a <= x < b].

    The VC dimension is 2; n distinct points have 1 + n(n+1)/2 dichotomies.
    """

    name: str = "intervals"
    num_features: int = 1
    vc_dimension: int = 2

    def enumerate_representatives(self, x: Floats) -> Sequence[tuple[float, float]]:
        cut = compute_cuts(self._check(x))
        low, high = np.triu_indices(len(cut), k=1)
        return [(np.inf, np.inf), *zip(cut[low].tolist(), cut[high].tolist(), strict=True)]

    def predict(self, hypothesis: tuple[float, float], x: Floats) -> Bools:
        value = self._check(x)[:, 0]
        return (value >= hypothesis[0]) & (value < hypothesis[1])

    def count_errors(self, hypotheses: Sequence[tuple[float, float]], x: Floats, y: Bools) -> Ints:
        value, sign = self._check(x)[:, 0], np.where(y, -1, 1)
        low, high = np.asarray(hypotheses, dtype=np.float64).reshape(-1, 2).T
        return np.count_nonzero(y) + _sum_below(value, sign, high) - _sum_below(value, sign, low)


class Stump(NamedTuple):
    """A decision stump: 1[x_feature >= threshold] if ``is_above``, its complement if not."""

    feature: int
    threshold: float
    is_above: bool


@dataclass(frozen=True)
class Stumps(HypothesisClass):
    """Decision stumps over ``num_features`` features, in both directions.

    ``vc_dimension`` is the largest k with C(k, floor(k/2)) <= 2 num_features. It is an upper bound, because a feature
    separates at most two subsets of size floor(k/2) from any k points, one at each end. It is attained for 1, 2 and 3
    features.
    """

    num_features: int
    name: str = "stumps"

    def __post_init__(self) -> None:
        checks.integer("num_features", self.num_features, low=1)

    @property
    def vc_dimension(self) -> int:  # type: ignore[override]
        k = 1
        while math.comb(k + 1, (k + 1) // 2) <= 2 * self.num_features:
            k += 1
        return k

    def enumerate_representatives(self, x: Floats) -> Sequence[Stump]:
        x = self._check(x)
        stumps = [Stump(0, -np.inf, True), Stump(0, np.inf, True)]
        rows = [np.packbits(np.stack([np.ones(len(x), bool), np.zeros(len(x), bool)]), axis=1)]
        for feature in range(self.num_features):
            inner = compute_cuts(x[:, feature])[1:-1]
            above = x[None, :, feature] >= inner[:, None]
            for direction in (True, False):
                stumps += [Stump(feature, float(t), direction) for t in inner]
                rows.append(np.packbits(above == direction, axis=1))
        stump_index = find_distinct(np.unpackbits(np.concatenate(rows), axis=1, count=len(x)).astype(bool))
        return [stumps[i] for i in stump_index]

    def predict(self, hypothesis: Stump, x: Floats) -> Bools:
        return (self._check(x)[:, hypothesis.feature] >= hypothesis.threshold) == hypothesis.is_above

    def count_errors(self, hypotheses: Sequence[Stump], x: Floats, y: Bools) -> Ints:
        x = self._check(x)
        feature, threshold, is_above = (np.array(column) for column in zip(*hypotheses, strict=True))
        error_M = np.empty(len(hypotheses), dtype=np.int64)
        for j in np.unique(feature):
            mask = feature == j
            error_M[mask] = np.count_nonzero(~y) + _sum_below(x[:, j], np.where(y, 1, -1), threshold[mask])
        return np.where(is_above, error_M, len(y) - error_M)


class HalfPlane(NamedTuple):
    """The points strictly left of the line tail -> head, and the points on the line that are not beyond the tail.

    This set is an open half-plane with a boundary ray. It is the limit of half-planes that are turned slightly about a
    point between tail and head, so it labels any finite set as some half-plane does, and its description is exact.
    """

    tail: tuple[float, float]
    head: tuple[float, float]


@dataclass(frozen=True)
class HalfPlanes(HypothesisClass):
    """Half-planes {x : w.x >= b}, all directions.

    The VC dimension is 3; n points in general position have n^2 - n + 2 dichotomies.

    If both labels occur, the two convex hulls have two inner common tangents. Along one of them, with the positive
    points on its left, the positive contact point comes first. So every such dichotomy has an ordered pair (tail, head)
    of distinct points, and in general position exactly one. Orientations are exact (adaptive rational arithmetic), so
    collinear and repeated points need no perturbation. Enumeration is O(n^3). A hypothesis is a bool or a HalfPlane.
    """

    name: str = "half-planes"
    num_features: int = 2
    vc_dimension: int = 3

    def enumerate_representatives(self, x: Floats) -> Sequence[bool | HalfPlane]:
        distinct_P2 = np.unique(self._check(x), axis=0)
        hypotheses: list[bool | HalfPlane] = [True, False]
        rows = [np.stack([np.ones(len(distinct_P2), bool), np.zeros(len(distinct_P2), bool)])]
        for i, tail in enumerate(distinct_P2):
            heads = np.delete(distinct_P2, i, axis=0)
            hypotheses += [HalfPlane(tuple(tail.tolist()), tuple(head.tolist())) for head in heads]
            rows.append(is_on_positive_side(tail, heads, distinct_P2))
        return [hypotheses[i] for i in find_distinct(np.concatenate(rows))]

    def predict(self, hypothesis: bool | HalfPlane, x: Floats) -> Bools:
        if isinstance(hypothesis, HalfPlane):
            return is_on_positive_side(np.array(hypothesis.tail), np.array([hypothesis.head]), x)[0]
        return np.full(len(x), bool(hypothesis))


# Shewchuk (1997): largest error of a 2x2 determinant of differences, relative to the sum of its absolute products.
_RELATIVE_ERROR = (3 + 16 * 2**-53) * 2**-53
# The relative bound does not hold for smaller products, which may have been rounded to subnormals.
_MIN_RELIABLE_PRODUCT = 1e-280


def compute_orientation(tail: Floats, heads_H: Floats, points_P: Floats) -> Ints:
    """Compute the sign of (head - tail) x (point - tail), int [H, P]: 1 left of tail -> head, 0 on the line.

    The sign is exact: rational arithmetic computes it wherever floating-point arithmetic cannot decide it.
    """
    head_offset, point_offset = heads_H - tail, points_P - tail
    left_product = np.multiply.outer(head_offset[:, 0], point_offset[:, 1])
    right_product = np.multiply.outer(head_offset[:, 1], point_offset[:, 0])
    det = left_product - right_product
    magnitude = np.abs(left_product) + np.abs(right_product)
    sign = np.sign(det).astype(np.int64)
    is_uncertain = (np.abs(det) <= _RELATIVE_ERROR * magnitude) | (magnitude < _MIN_RELIABLE_PRODUCT)
    for h, p in zip(*np.nonzero(is_uncertain), strict=True):
        if not ((points_P[p] == tail).all() or (points_P[p] == heads_H[h]).all()):  # whose products are equal
            tx, ty, hx, hy, px, py = (Fraction(float(v)) for v in (*tail, *heads_H[h], *points_P[p]))
            exact_det = (hx - tx) * (py - ty) - (hy - ty) * (px - tx)
            sign[h, p] = (exact_det > 0) - (exact_det < 0)
    return sign


def is_on_positive_side(tail: Floats, heads_H: Floats, points_P: Floats) -> Bools:
    """Compute which points are strictly left of tail -> head, or on the line and not beyond the tail, bool [H, P]."""
    sign = compute_orientation(tail, heads_H, points_P)
    # Any coordinate in which tail and head differ orders the points on the line, and comparing floats is exact.
    axis = (heads_H[:, 0] == tail[0]).astype(np.int64)
    is_forward = heads_H[np.arange(len(heads_H)), axis] > tail[axis]
    coordinate_HP, start_H1 = points_P.T[axis], tail[axis][:, None]
    is_beyond = np.where(is_forward[:, None], coordinate_HP > start_H1, coordinate_HP < start_H1)
    return (sign > 0) | ((sign == 0) & ~is_beyond)
