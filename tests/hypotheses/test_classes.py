"""Hypothesis classes: their dichotomies against brute force over a fine grid, and against Sauer and Shelah."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pate_torch.hypotheses import classes
from pate_torch.hypotheses.classes import HalfPlanes, Intervals, Stumps, Thresholds, compute_orientation
from tests.hypotheses.exact_laws import sauer_shelah

LINE = np.array([0.3, -1.0, 0.3, 2.0, 0.7])[:, None]  # a repeated point
PLANE = np.array([[0.0, 0.0], [1.0, 0.0], [2.0, 0.0], [0.0, 1.0], [1.0, 1.0], [0.0, 0.0], [0.4, 0.7]])
FINE = np.linspace(-3, 4, 1401)
CLASSES = [(Thresholds(), 1), (Intervals(), 1), *((Stumps(d), d) for d in (1, 2, 3)), (HalfPlanes(), 2)]


def rows(labelings):
    return {tuple(row) for row in np.asarray(labelings, dtype=bool)}


def dichotomies(hypotheses, x):
    return hypotheses.compute_labelings(hypotheses.enumerate_representatives(x), x)


def grid_thresholds(x):
    return rows([x[:, 0] >= t for t in FINE])


def grid_intervals(x):
    coarse = np.linspace(-3, 4, 141) + 1e-3
    return rows([(x[:, 0] >= a) & (x[:, 0] < b) for a in coarse for b in coarse])


def grid_stumps(x):
    return rows([(x[:, j] >= t) == s for j in range(x.shape[1]) for t in FINE for s in (True, False)])


def grid_half_planes(x):
    angles = np.linspace(0, 2 * np.pi, 3601) + 1e-4
    projections = x @ np.stack([np.cos(angles), np.sin(angles)])
    return rows([p >= b for p in projections.T for b in np.linspace(-3, 3, 121)])


half_plane_grid = pytest.mark.slow(reason="brute force over 400,000 half-planes")


@pytest.mark.parametrize(
    "hypotheses,x,grid",
    [
        (Thresholds(), LINE, grid_thresholds),
        (Intervals(), LINE, grid_intervals),
        (Stumps(2), PLANE, grid_stumps),
        pytest.param(HalfPlanes(), PLANE, grid_half_planes, marks=half_plane_grid),
        pytest.param(HalfPlanes(), LINE @ np.array([[1.0, 2.0]]), grid_half_planes, marks=half_plane_grid),  # a line
    ],
    ids=lambda v: getattr(v, "name", ""),
)
def test_dichotomies_are_those_of_brute_force_and_none_twice(hypotheses, x, grid):
    labelings = dichotomies(hypotheses, x)
    assert len(rows(labelings)) == len(labelings) and rows(labelings) == grid(x)
    assert len(labelings) <= sauer_shelah(len(np.unique(x, axis=0)), hypotheses.vc_dimension)


@pytest.mark.parametrize(
    "hypotheses,features,count",
    [
        (Thresholds(), 1, lambda n: n + 1),
        (Intervals(), 1, lambda n: 1 + n * (n + 1) // 2),
        (HalfPlanes(), 2, lambda n: n * n - n + 2),
    ],
)
@pytest.mark.parametrize("n", [1, 2, 25])
def test_counts_in_general_position(hypotheses, features, count, n):
    x = np.random.default_rng(n).normal(size=(n, features))
    assert len(hypotheses.enumerate_representatives(x)) == count(n)


@pytest.mark.parametrize("hypotheses,features", CLASSES, ids=str)
def test_vc_dimension_is_attained_and_not_exceeded(hypotheses, features):
    generator, d = np.random.default_rng(0), hypotheses.vc_dimension
    attempts = (generator.normal(size=(d, features)) for _ in range(400))
    assert any(len(hypotheses.enumerate_representatives(x)) == 2**d for x in attempts)
    for x in generator.normal(size=(50, d + 1, features)):
        assert len(hypotheses.enumerate_representatives(x)) < 2 ** (d + 1)


@pytest.mark.parametrize("hypotheses,features", CLASSES, ids=str)
@settings(max_examples=20)
@given(data=st.data())
def test_enumeration_and_error_counts_hold_on_any_points(hypotheses, features, data):
    """No two hypotheses agree, there are no more than Sauer and Shelah allow, and errors are those of a loop."""
    record = st.tuples(st.lists(st.integers(0, 4), min_size=features, max_size=features), st.booleans())
    records = data.draw(st.lists(record, min_size=1, max_size=7))
    x, y = np.array([x for x, _ in records]) / 4, np.array([y for _, y in records])
    candidates = hypotheses.enumerate_representatives(x[: len(x) // 2 + 1])
    labelings = hypotheses.compute_labelings(candidates, x[: len(x) // 2 + 1])
    assert len(rows(labelings)) == len(labelings) <= sauer_shelah(len(x) // 2 + 1, hypotheses.vc_dimension)
    loop = [int((hypotheses.predict(h, x) != y).sum()) for h in candidates]
    np.testing.assert_array_equal(hypotheses.count_errors(candidates, x, y), loop)
    assert classes.fit_erm(hypotheses, x, y) in hypotheses.enumerate_representatives(x)


def test_cuts_and_orientations_are_exact_where_floats_are_not():
    """Points a few ulps off a line: the naive sign is wrong somewhere, the exact one nowhere."""
    x = np.array([1.0, np.nextafter(1.0, 2), -5e-324, 5e-324])[:, None]
    assert len(rows(dichotomies(Thresholds(), x))) == 5
    tail, head = np.array([12.0, 12.0]), np.array([[24.0, 24.0]])
    step = 2.0**-53
    grid = np.array([[0.5 + i * step, 0.5 + j * step] for i in range(24) for j in range(24)])
    sign = compute_orientation(tail, head, grid)[0]
    np.testing.assert_array_equal(sign, np.sign(grid[:, 1] - grid[:, 0]))  # the line is the diagonal
    to_tail, to_head = tail - grid, head[0] - grid
    naive = to_tail[:, 0] * to_head[:, 1] - to_tail[:, 1] * to_head[:, 0]
    assert (np.sign(naive) != sign).any()


@pytest.mark.parametrize("hypotheses,features", CLASSES, ids=str)
def test_points_of_other_features_are_refused(hypotheses, features):
    with pytest.raises(ValueError, match=rf"{features} feature.* for {hypotheses.name}"):
        hypotheses.enumerate_representatives(np.zeros((3, features + 1)))
