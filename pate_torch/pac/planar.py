"""Exact orientation of points in the plane: floats where they decide, rationals where they do not."""

from __future__ import annotations

from fractions import Fraction

import numpy as np

from pate_torch.pac.sample import Bools, Floats, Ints

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
