"""Hypothesis classes small enough to enumerate: every dichotomy of a set of points, exactly, none twice.

A class is "what a learner may answer". Its *dichotomies* on points x_1..x_n are the distinct label vectors
(h(x_1), ..., h(x_n)); Sauer and Shelah bound their number (``nets.compute_log_sauer_shelah``).
NB20's relabeling lemma and DF20's matching argument both count each dichotomy once: a duplicate would not only
waste time, it would change the law that their privacy proofs speak of.
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
from pate_torch.pac.sample import Bools, Floats, Ints, check_points


def find_distinct(labelings_Mn: Bools) -> Ints:
    """The first row of each distinct labeling, in their original order."""
    packed_rows = np.packbits(labelings_Mn, axis=1)
    if packed_rows.shape[1] == 0:
        return np.zeros(min(1, len(packed_rows)), dtype=np.int64)
    rows = np.ascontiguousarray(packed_rows).view(np.dtype((np.void, packed_rows.shape[1]))).ravel()
    return np.sort(np.unique(rows, return_index=True)[1]).astype(np.int64)


def compute_cuts(value_n: Floats) -> Floats:
    """Thresholds that cut the values in every way.

    -inf, one between every two neighboring distinct values (lower < cut <= upper), +inf.
    """
    distinct_v = np.unique(value_n)
    middle = distinct_v[:-1] / 2 + distinct_v[1:] / 2
    # Between adjacent floats the midpoint rounds to the lower one, which would put it on the wrong side.
    middle = np.where((middle > distinct_v[:-1]) & (middle <= distinct_v[1:]), middle, distinct_v[1:])
    return np.concatenate(([-np.inf], middle, [np.inf])) if len(distinct_v) else np.array([np.inf])


def _sum_below(value_n: Floats, weight_n: Ints, cut_M: Floats) -> Ints:
    """Total weight of {i : value_i < cut}, for every cut; O((n + M) log n)."""
    order = np.argsort(value_n, kind="stable")
    prefix = np.concatenate(([0], np.cumsum(weight_n[order])))
    return prefix[np.searchsorted(value_n[order], cut_M, side="left")].astype(np.int64)


class HypothesisClass(ABC):
    """A small class of hypotheses, enumerated exactly (NB20, DF20, WLF16)."""

    name: str
    vc_dimension: int

    @abstractmethod
    def enumerate_representatives(self, x: Floats) -> Sequence[Any]:
        """One hypothesis for each dichotomy of x [n, D]: no two agree on all of x, none is missing."""

    @abstractmethod
    def predict(self, hypothesis: Any, x: Floats) -> Bools:
        """The labels of x [n, D], bool [n]."""

    def compute_labelings(self, hypotheses: Sequence[Any], x: Floats) -> Bools:
        """Labels of x [n, D] by each hypothesis, bool [M, n]."""
        return np.array([self.predict(h, x) for h in hypotheses], dtype=bool).reshape(len(hypotheses), len(x))

    def count_errors(self, hypotheses: Sequence[Any], x: Floats, y: Bools) -> Ints:
        """Number of (x, y) each hypothesis gets wrong, int64 [M]; sensitivity 1."""
        return np.array([np.count_nonzero(self.predict(h, x) != y) for h in hypotheses], dtype=np.int64)

    def enumerate_dichotomies(self, x: Floats) -> tuple[Bools, list[Any]]:
        """Every labeling of x [n, D] that the class realizes, bool [M, n], and one hypothesis for each."""
        x = check_points("x", x)
        hypotheses = self.enumerate_representatives(x)
        return self.compute_labelings(hypotheses, x), list(hypotheses)


def enumerate_representatives(hypotheses: HypothesisClass, x: Floats) -> Sequence[Any]:
    """One hypothesis per dichotomy of x."""
    return hypotheses.enumerate_representatives(x)


def count_errors(hypotheses: HypothesisClass, candidates: Sequence[Any], x: Floats, y: Bools) -> Ints:
    """Number of (x, y) each candidate gets wrong, int64 [M]."""
    return hypotheses.count_errors(candidates, x, y)


def fit_erm(hypotheses: HypothesisClass, x: Floats, y: Bools) -> Any:
    """Empirical risk minimizer (the first of equals): the non-private learner B_PAC of the papers."""
    candidates = enumerate_representatives(hypotheses, x)
    return candidates[int(np.argmin(count_errors(hypotheses, candidates, x, y)))]


def _select_column(x: Floats, name: str) -> Floats:
    if x.shape[1] != 1:
        raise checks.error("x.shape", x.shape, f"{name} live on the line: one feature per point")
    return x[:, 0]


@dataclass(frozen=True)
class Thresholds(HypothesisClass):
    """Thresholds on the line, h_t(x) = 1[x >= t], t in [-inf, inf].

    VC dimension 1; n + 1 dichotomies of n distinct points.
    """

    name: str = "thresholds"
    vc_dimension: int = 1

    def enumerate_representatives(self, x: Floats) -> Sequence[float]:
        return compute_cuts(_select_column(x, self.name)).tolist()

    def predict(self, hypothesis: float, x: Floats) -> Bools:
        return _select_column(x, self.name) >= hypothesis

    def count_errors(self, hypotheses: Sequence[float], x: Floats, y: Bools) -> Ints:
        sign = np.where(y, 1, -1)
        return np.count_nonzero(~y) + _sum_below(
            _select_column(x, self.name), sign, np.asarray(hypotheses, dtype=np.float64)
        )


@dataclass(frozen=True)
class Intervals(HypothesisClass):
    """Intervals on the line, h_{a,b}(x) = 1[a <= x < b].

    VC dimension 2; 1 + n(n+1)/2 dichotomies of n distinct points.
    """

    name: str = "intervals"
    vc_dimension: int = 2

    def enumerate_representatives(self, x: Floats) -> Sequence[tuple[float, float]]:
        cut = compute_cuts(_select_column(x, self.name))
        low, high = np.triu_indices(len(cut), k=1)
        return [(np.inf, np.inf), *zip(cut[low].tolist(), cut[high].tolist(), strict=True)]

    def predict(self, hypothesis: tuple[float, float], x: Floats) -> Bools:
        value = _select_column(x, self.name)
        return (value >= hypothesis[0]) & (value < hypothesis[1])

    def count_errors(self, hypotheses: Sequence[tuple[float, float]], x: Floats, y: Bools) -> Ints:
        value, sign = _select_column(x, self.name), np.where(y, -1, 1)
        low, high = np.asarray(hypotheses, dtype=np.float64).reshape(-1, 2).T
        inside_weight = _sum_below(value, sign, high) - _sum_below(value, sign, low)
        return np.count_nonzero(y) + inside_weight


class Stump(NamedTuple):
    """Decision stump: 1[x_feature >= threshold] if ``is_above``, its complement if not."""

    feature: int
    threshold: float
    is_above: bool


@dataclass(frozen=True)
class Stumps(HypothesisClass):
    """Decision stumps over ``num_features`` features, both directions.

    ``vc_dimension`` is the largest k with C(k, floor(k/2)) <= 2 num_features, an upper bound: each feature cuts out
    at most two subsets of size floor(k/2) of any k points, one from either end. (Attained for 1, 2 and 3 features.)
    """

    num_features: int
    name: str = "stumps"

    def __post_init__(self) -> None:
        checks.integer("num_features", self.num_features, low=1)

    @property
    def vc_dimension(self) -> int:  # type: ignore[override]
        """Upper bound on the VC dimension."""
        k = 1
        while math.comb(k + 1, (k + 1) // 2) <= 2 * self.num_features:
            k += 1
        return k

    def _check_features(self, x: Floats) -> Floats:
        if x.shape[1] != self.num_features:
            raise checks.error("x.shape", x.shape, f"must have {self.num_features} features")
        return x

    def enumerate_representatives(self, x: Floats) -> Sequence[Stump]:
        x = self._check_features(x)
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
        return (self._check_features(x)[:, hypothesis.feature] >= hypothesis.threshold) == hypothesis.is_above

    def count_errors(self, hypotheses: Sequence[Stump], x: Floats, y: Bools) -> Ints:
        x = self._check_features(x)
        feature = np.array([h.feature for h in hypotheses])
        threshold = np.array([h.threshold for h in hypotheses], dtype=np.float64)
        is_above = np.array([h.is_above for h in hypotheses])
        error_M = np.empty(len(hypotheses), dtype=np.int64)
        for j in np.unique(feature):
            mask = feature == j
            error_M[mask] = np.count_nonzero(~y) + _sum_below(x[:, j], np.where(y, 1, -1), threshold[mask])
        return np.where(is_above, error_M, len(y) - error_M)


class HalfPlane(NamedTuple):
    """The points strictly left of the line tail -> head, and those on it not beyond the tail.

    That is an open half-plane with a boundary ray, the limit of half-planes turned a little about a point between
    tail and head: on any finite set it labels like a half-plane, and it needs no rounding to write down.
    """

    tail: tuple[float, float]
    head: tuple[float, float]


@dataclass(frozen=True)
class HalfPlanes(HypothesisClass):
    """Half-planes {x : w.x >= b}, all directions.

    VC dimension 3; n^2 - n + 2 dichotomies in general position.

    Enumeration: if both labels occur, the two convex hulls have two inner common tangents; along one of them, with
    the positive points on its left, the positive contact comes first. So every such dichotomy is one ordered pair
    (tail, head) of distinct points, and in general position exactly one. Orientations are exact (adaptive rational
    arithmetic), so collinear and repeated points are handled, not perturbed. O(n^3). Hypotheses: bool or HalfPlane.
    """

    name: str = "half-planes"
    vc_dimension: int = 3

    def enumerate_representatives(self, x: Floats) -> Sequence[bool | HalfPlane]:
        distinct_P2 = np.unique(x, axis=0)
        if distinct_P2.shape[1] != 2:
            raise checks.error("x.shape", x.shape, "half-planes live in two dimensions")
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


# ---- exact orientation of points in the plane: floats where they decide, rationals where they do not ----------------

# Shewchuk (1997): a 2x2 determinant of differences is off by at most this times the sum of its absolute products.
_RELATIVE_ERROR = (3 + 16 * 2**-53) * 2**-53
_MIN_RELIABLE_PRODUCT = (
    1e-280  # below it products may have been rounded to subnormals, where the relative bound does not hold
)


def compute_orientation(tail: Floats, heads_H: Floats, points_P: Floats) -> Ints:
    """Sign of the cross product (head - tail) x (point - tail), int [H, P]: 1 left of tail -> head, 0 on the line."""
    head_offset, point_offset = heads_H - tail, points_P - tail
    left_product = np.multiply.outer(head_offset[:, 0], point_offset[:, 1])
    right_product = np.multiply.outer(head_offset[:, 1], point_offset[:, 0])
    det = left_product - right_product
    magnitude = np.abs(left_product) + np.abs(right_product)
    sign = np.sign(det).astype(np.int64)
    is_uncertain = (np.abs(det) <= _RELATIVE_ERROR * magnitude) | (magnitude < _MIN_RELIABLE_PRODUCT)
    for h, p in zip(*np.nonzero(is_uncertain), strict=True):
        sign[h, p] = _compute_exact_orientation(tail, heads_H[h], points_P[p])
    return sign


def _compute_exact_orientation(tail: Floats, head: Floats, point: Floats) -> int:
    if (point == tail).all() or (point == head).all():
        return 0
    tx, ty, hx, hy, px, py = (Fraction(float(v)) for v in (*tail, *head, *point))
    det = (hx - tx) * (py - ty) - (hy - ty) * (px - tx)
    return (det > 0) - (det < 0)


def is_on_positive_side(tail: Floats, heads_H: Floats, points_P: Floats) -> Bools:
    """Whether a point is strictly left of tail -> head, or on the line and not beyond the tail, bool [H, P].

    Heads differ from the tail.
    """
    sign = compute_orientation(tail, heads_H, points_P)
    # On the line, order is that of any coordinate in which tail and head differ; comparing floats is exact.
    axis = (heads_H[:, 0] == tail[0]).astype(np.int64)
    is_forward = heads_H[np.arange(len(heads_H)), axis] > tail[axis]
    coordinate_HP, start_H1 = points_P.T[axis], tail[axis][:, None]
    is_beyond = np.where(is_forward[:, None], coordinate_HP > start_H1, coordinate_HP < start_H1)
    return (sign > 0) | ((sign == 0) & ~is_beyond)
