"""DF20 Theorem 2, exactly: every lemma on a small world, and the explicit cost and size."""

import itertools
import math

import numpy as np
import pytest
from scipy.special import expit

from benchmarks.theory.agnostic import compute_realizable_size
from benchmarks.theory.private_predictor import (
    compute_default_resolution,
    compute_predictor_epsilon,
    compute_private_predictor_size,
    compute_subset_size,
)
from pate_torch.hypotheses import sample as samples
from tests.hypotheses.exact_laws import both, neighbors, threshold_law, universe


def brute_predictor(records, index, eta, teachers, queries):
    """P(answer = 1 | subset) of Theorem 2's algorithm for thresholds, before the flip, from the definition."""
    n = len(records)
    seen = sorted({records[i][0] for i in index})
    cuts = [-math.inf, *((a + b) / 2 for a, b in itertools.pairwise(seen)), math.inf]
    answers = np.zeros((len(cuts), len(queries)))
    bounds = np.linspace(0, n, teachers + 1).astype(int)
    for row, cut in zip(answers, cuts, strict=True):
        ones = np.zeros(len(queries))
        for a, b in itertools.pairwise(bounds):
            part = [(x, x >= cut) for x, _ in records[a:b]]
            values = sorted({x for x, _ in part})
            options = [-math.inf, *((u + v) / 2 for u, v in itertools.pairwise(values)), math.inf]
            best = min(options, key=lambda t: sum((x >= t) != y for x, y in part))
            ones += [q >= best for q in queries]
        row[:] = expit((2 * ones - teachers) / (2 * eta * n))
    return threshold_law(records, cuts, 1 / (eta * n)) @ answers


@pytest.mark.parametrize("eta", [0.5, pytest.param(1.0, marks=pytest.mark.slow(reason="the same at another eta"))])
def test_every_lemma_of_the_private_predictor_holds_exactly(eta):
    """Lemma 11 (same subset, neighboring samples), Lemma 10 (net subsets) and the total: 2 points, n = 4, n' = 3."""
    n, size, teachers, alpha = 4, 3, 2, 0.2
    records_U, queries = universe(2), (0.0, 1.0)
    subsets = list(itertools.combinations(range(n), size))
    laws = {
        r: {i: both(brute_predictor(r, i, eta, teachers, queries)) for i in subsets}
        for r in itertools.product(records_U, repeat=n)
    }
    spread = (eta * (n - 1) + 1) / (eta * n)
    lemma_10, lemma_11 = 4 * math.exp(3 * spread), math.exp(3 / (eta * n))
    factor = (1 + lemma_10 * size / (n - size)) * lemma_11
    for records, law in laws.items():
        # Lemma 11 needs the subset's candidates to stay: compare where the odd record is outside the subset.
        for j, new in itertools.product(range(n), records_U):
            other = (*records[:j], new, *records[j + 1 :])
            for index in subsets:
                if j not in index:
                    assert (law[index] <= lemma_11 * laws[other][index] * (1 + 1e-12)).all()
        for index, j in itertools.product(subsets, range(n)):
            if j in index:
                rest = [records[i][0] for i in index if i != j]
                others = [records[i][0] for i in range(n) if i != j]
                if uncovered(rest, others) <= eta * (n - 1):
                    (swap,) = set(range(n)) - set(index)
                    twin = tuple(sorted((*(i for i in index if i != j), swap)))
                    assert (law[index] <= lemma_10 * law[twin] * (1 + 1e-12)).all()
        flipped = alpha + (1 - 2 * alpha) * np.mean(list(law.values()), axis=0)
        for other in neighbors(records, records_U):
            theirs = alpha + (1 - 2 * alpha) * np.mean(list(laws[other].values()), axis=0)
            assert (flipped <= (factor + size / n) * theirs).all()


def uncovered(net, points):
    """The most of ``points`` on which two thresholds can differ that agree on ``net``."""
    cuts = [-math.inf, *(p + 0.5 for p in sorted({*net, *points}))]
    return max(
        sum((p >= s) != (p >= t) for p in points) for s in cuts for t in cuts if all((p >= s) == (p >= t) for p in net)
    )


def test_the_price_is_the_explicit_formula():
    n, subset, eta = 10**6, 100, 0.01
    paper = math.log((1 + 4 * math.e**6 * subset / (n - subset)) * math.exp(3 / (eta * n)) + subset / n)
    assert compute_predictor_epsilon(n, subset, eta) == pytest.approx(paper, rel=1e-12)
    sharp = compute_predictor_epsilon(n, subset, eta, "sharp")
    assert sharp < paper / 10
    # eta n = 1 is where the paper's 2 eta n is what it claims to be: both agree there up to (1 - eta)/(eta n) -> 1.
    agreed = compute_predictor_epsilon(10**6, 5, 1e-6)
    assert compute_predictor_epsilon(10**6, 5, 1e-6, "sharp") == pytest.approx(agreed, rel=1e-4)
    # What "n' about epsilon n" costs: the first factor alone.
    assert math.log1p(4 * math.e**6 * 0.01 / 0.99) == pytest.approx(2.85, abs=0.01)
    assert math.log1p(4 * math.e**6 * 1e-4) == pytest.approx(0.15, abs=0.01)


@pytest.mark.parametrize("d", [1, 7])
@pytest.mark.parametrize("alpha", [0.02, 0.1, 0.45])
def test_the_default_eta_meets_every_condition_of_lemma_8(d, alpha):
    eta, subset_size = compute_default_resolution(d, alpha), compute_subset_size(d, alpha)
    n = compute_private_predictor_size(d, epsilon=0.5, alpha=alpha, constants="sharp")
    assert compute_predictor_epsilon(n, subset_size, eta, "sharp") <= 0.5
    assert compute_predictor_epsilon(n - 1, subset_size, eta, "sharp") > 0.5
    teachers = math.ceil(2 * eta * n * math.log(1 / alpha))
    assert eta <= alpha
    assert subset_size >= max(samples.compute_net_size(a, alpha, d) for a in (alpha, eta))
    assert n >= samples.compute_uniform_size(alpha, 0.1, d) and 1 / (eta * n) <= 0.5 and subset_size <= 0.5 * n
    assert n >= 2 * samples.compute_log_sauer_shelah(subset_size, d) / (2 / (eta * n) * alpha)
    assert n // teachers >= compute_realizable_size(alpha, alpha, d)
    # A unanimous vote says otherwise with probability alpha at most.
    assert expit(-teachers / (2 * eta * n)) <= alpha
    assert compute_default_resolution(1, alpha) > compute_default_resolution(3, alpha)
