"""LZCW21's Table 1: its figures are those of the theorems at the best number of queries, with the printed exponents."""

import math

import pytest

from benchmarks.theory import sample_sizes
from benchmarks.theory.table_1 import lzcw21_table_1


def test_the_table_is_optimal_in_the_queries():
    table = lzcw21_table_1(20_000, 500, 3, epsilon=1.0, delta=1e-5, tau=1.0, theta=2.0, best=0.05)
    rows = {(setting, algorithm): bound for setting, algorithm, bound, _ in table}
    every = [sample_sizes.lzcw21_theorem_28_error(q, 3, 20_000, epsilon=1.0, tau=1.0) for q in range(1, 501)]
    assert rows[("realizable", "Gaussian")] == pytest.approx(min(every), rel=1e-3)
    # With tau = 1 the noise condition's rows are the realizable ones, as in the table.
    assert rows[("noise, tau = 1", "active")] == rows[("realizable", "active")]


def test_table_1_has_the_exponents_that_are_printed():
    """With public points in plenty: (n eps)^-2/3 by Gaussian noise and before, 1/(n eps) by the others."""

    def at(n):
        rows = lzcw21_table_1(n, 10**12, 2, epsilon=1.0, delta=1e-5, tau=0.5, theta=2.0, best=0.0)
        return {(setting, name): bound for setting, name, bound, _ in rows}

    low, high = at(10**6), at(10**8)
    slope = {key: math.log(low[key] / high[key]) / math.log(100) for key in low}
    printed = {"Gaussian": 2 / 3, "sparse vector": 1.0, "active": 1.0, "sparse vector (BTT18)": 2 / 3}
    for name, exponent in printed.items():
        assert slope[("realizable", name)] == pytest.approx(exponent, abs=0.02), name
    # tau = 1/2: 2 tau/(4 - tau) = 2/7 and tau/(2 - tau) = 1/3
    noisy = {name: slope[("noise, tau = 0.5", name)] for name in ("Gaussian", "sparse vector", "active")}
    assert noisy == pytest.approx({"Gaussian": 2 / 7, "sparse vector": 1 / 3, "active": 1 / 3}, abs=0.02)
