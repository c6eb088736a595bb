"""Hypothesis classes: their dichotomies against brute force over a fine grid, and against Sauer and Shelah."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest

from benchmarks.theory.classes import Listed
from pate_torch.pac import classes
from pate_torch.pac.classes import HalfPlanes, Intervals, Stumps, Thresholds, compute_orientation
from pate_torch.pac.sample import Sample, check_points
from tests.pac.pac_audit import sauer_shelah

LINE = np.array([0.3, -1.0, 0.3, 2.0, 0.7])[:, None]  # a repeated point
PLANE = np.array([[0.0, 0.0], [1.0, 0.0], [2.0, 0.0], [0.0, 1.0], [1.0, 1.0], [0.0, 0.0], [0.4, 0.7]])
FINE = np.linspace(-3, 4, 1401)


def rows(labelings):
    return {tuple(row) for row in np.asarray(labelings, dtype=bool)}


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


CASES = [
    (Thresholds(), LINE, grid_thresholds),
    (Intervals(), LINE, grid_intervals),
    (Stumps(2), PLANE, grid_stumps),
    (HalfPlanes(), PLANE, grid_half_planes),
    (HalfPlanes(), LINE @ np.array([[1.0, 2.0]]), grid_half_planes),  # all on one line
]


@pytest.mark.parametrize("hypotheses,x,grid", CASES, ids=lambda v: getattr(v, "name", ""))
def test_dichotomies_are_those_of_brute_force_and_none_twice(hypotheses, x, grid):
    labelings, found = hypotheses.enumerate_dichotomies(x)
    assert len(rows(labelings)) == len(labelings) == len(found)
    assert rows(labelings) == grid(x)
    assert len(labelings) <= sauer_shelah(len(np.unique(x, axis=0)), hypotheses.vc_dimension)
    for labels, h in zip(labelings, found, strict=True):
        np.testing.assert_array_equal(hypotheses.predict(h, x), labels)


@pytest.mark.parametrize(
    "hypotheses,features,count",
    [
        (Thresholds(), 1, lambda n: n + 1),
        (Intervals(), 1, lambda n: 1 + n * (n + 1) // 2),
        (HalfPlanes(), 2, lambda n: n * n - n + 2),
    ],
)
@pytest.mark.parametrize("n", [1, 2, 3, 7, 25])
def test_counts_in_general_position(hypotheses, features, count, n):
    x = np.random.default_rng(n).normal(size=(n, features))
    assert len(hypotheses.enumerate_dichotomies(x)[0]) == count(n)


@pytest.mark.parametrize(
    "hypotheses,features",
    [(Thresholds(), 1), (Intervals(), 1), *((Stumps(d), d) for d in (1, 2, 3)), (HalfPlanes(), 2)],
)
def test_vc_dimension_is_attained_and_not_exceeded(hypotheses, features):
    generator = np.random.default_rng(0)
    d = hypotheses.vc_dimension
    tries = [generator.normal(size=(d, features)) for _ in range(400)]
    assert any(len(hypotheses.enumerate_dichotomies(x)[0]) == 2**d for x in tries)
    for x in (generator.normal(size=(d + 1, features)) for _ in range(100)):
        assert len(hypotheses.enumerate_dichotomies(x)[0]) < 2 ** (d + 1)


@pytest.mark.parametrize("hypotheses,x", [(c[0], c[1]) for c in CASES], ids=lambda v: getattr(v, "name", ""))
def test_fast_error_counts_equal_the_loop(hypotheses, x):
    generator = np.random.default_rng(1)
    more = np.concatenate([x, generator.normal(size=(40, x.shape[1]))])
    y = generator.random(len(more)) < 0.4
    candidates = hypotheses.enumerate_representatives(x)
    loop = [int((hypotheses.predict(h, more) != y).sum()) for h in candidates]
    np.testing.assert_array_equal(hypotheses.count_errors(candidates, more, y), loop)


def test_cuts_separate_adjacent_floats():
    low = 1.0
    x = np.array([low, np.nextafter(low, 2), -5e-324, 5e-324])
    labelings, _ = Thresholds().enumerate_dichotomies(x)
    assert len(labelings) == 5


def test_orientation_is_exact_where_floats_are_not():
    """Points a few ulps off a line: the naive sign is wrong somewhere, the exact one nowhere."""
    tail, head = np.array([12.0, 12.0]), np.array([[24.0, 24.0]])
    step = 2.0**-53
    grid = np.array([[0.5 + i * step, 0.5 + j * step] for i in range(24) for j in range(24)])
    sign = compute_orientation(tail, head, grid)[0]

    def exact(p):
        x, y = Fraction(float(p[0])), Fraction(float(p[1]))
        return int(y > x) - int(y < x)  # the line is the diagonal

    np.testing.assert_array_equal(sign, [exact(p) for p in grid])
    to_tail, to_head = tail - grid, head[0] - grid
    naive = to_tail[:, 0] * to_head[:, 1] - to_tail[:, 1] * to_head[:, 0]
    assert (np.sign(naive) != sign).any()


def test_a_list_keeps_one_of_predictors_that_agree():
    predictors = [lambda x: x[:, 0] > 0, lambda x: x[:, 0] > 0.01, lambda x: np.zeros(len(x))]
    labelings, found = Listed(predictors).enumerate_dichotomies(np.array([[-1.0], [1.0]]))
    assert found == [0, 2] and rows(labelings) == {(False, True), (False, False)}
    assert Listed(predictors).vc_dimension == 1 and Listed(predictors[:1]).vc_dimension == 0


def test_a_class_of_ones_own_will_do():
    class Parity(classes.HypothesisClass):
        name, vc_dimension = "parity", 1

        def enumerate_representatives(self, x):
            return [0, 1]

        def predict(self, h, x):
            return (np.floor(x[:, 0]).astype(int) + h) % 2 == 1

    x, y = np.arange(5.0)[:, None], np.array([1, 0, 1, 0, 1], dtype=bool)
    assert classes.fit_erm(Parity(), x, y) == 1
    np.testing.assert_array_equal(classes.count_errors(Parity(), [0, 1], x, y), [5, 0])


@pytest.mark.parametrize("n,d", [(0, 0), (5, 0), (5, 2), (3, 9), (40, 3)])
def test_sauer_shelah_counts_small_subsets(n, d):
    assert sauer_shelah(n, d) == sum(1 for k in range(d + 1) for _ in itertools.combinations(range(min(n, 40)), k))
    assert sauer_shelah(3, 9) == 8 and math.isfinite(sauer_shelah(10**6, 3))


def test_bad_input_is_named():
    with pytest.raises(ValueError, match="NaN"):
        check_points("x", [1.0, float("nan")])
    with pytest.raises(ValueError, match=r"sample\.y"):
        Sample(np.zeros(2), np.array([-1, 1]))
    with pytest.raises(ValueError, match="at least one record"):
        Sample(np.zeros((0, 1)), np.zeros(0))
    with pytest.raises(ValueError, match="thresholds live on the line"):
        Thresholds().enumerate_dichotomies(np.zeros((3, 2)))
    with pytest.raises(ValueError, match="two dimensions"):
        HalfPlanes().enumerate_dichotomies(np.zeros((3, 3)))
    with pytest.raises(ValueError, match="features"):
        Stumps(2).enumerate_dichotomies(np.zeros((3, 3)))
    with pytest.raises(ValueError, match="predictors"):
        Listed([])
    with pytest.raises(ValueError, match="each 0 or 1"):
        Listed([lambda x: x[:, 0]]).enumerate_dichotomies(np.array([[0.5], [2.0]]))
    assert "0.25" not in repr(Sample(np.array([0.25]), np.array([1])))
