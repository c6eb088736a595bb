"""DF20 Theorem 2, exactly: every lemma on a small world."""

import itertools
import math

import numpy as np
import pytest
from scipy.special import expit

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
