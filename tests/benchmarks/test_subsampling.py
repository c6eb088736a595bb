"""Sub-sampling and stability lemmas, by what they say: exact laws of algorithms on every sub-sample, every neighbor."""

import itertools
import math

import numpy as np
import pytest

from benchmarks.theory import subsampling
from pate_torch.mechanisms.exponential import compute_log_probabilities
from tests.hypotheses.exact_laws import neighbors


def divergence(p, q, epsilon):
    """The largest P(S) - e^epsilon Q(S)."""
    return float(np.maximum(p - math.exp(epsilon) * q, 0).sum())


def worst_pair(epsilon, delta):
    """The pair of laws that dominates every (epsilon, delta)-DP pair (Kairouz, Oh & Viswanath 2015)."""
    a, b = (1 - delta) * math.exp(epsilon) / (1 + math.exp(epsilon)), (1 - delta) / (1 + math.exp(epsilon))
    return np.array([delta, a, b, 0.0]), np.array([0.0, b, a, delta])


def sampled(law, records, size):
    """The exact law of an algorithm on a random sub-sample: its laws, averaged over all of them."""
    return np.mean([law(part) for part in itertools.combinations(records, size)], axis=0)


@pytest.mark.parametrize("epsilon,delta", [(0.1, 0.0), (0.9, 0.01), (3.0, 0.1)])
def test_subsampling_lemmas_hold_exactly_and_the_sharp_one_is_met(epsilon, delta):
    """An algorithm that tells whether a record is there as well as (epsilon, delta) allows, on 2 of 5 records."""
    n, size = 5, 2
    share, (there, gone) = size / n, worst_pair(epsilon, delta)

    def law(part):
        return there if "odd" in part else gone

    p, q = sampled(law, ("odd", *"abcd"), size), sampled(law, tuple("eabcd"), size)
    sharp = subsampling.amplified(epsilon, delta, share)
    assert divergence(p, q, sharp[0]) == pytest.approx(sharp[1], abs=1e-12)
    assert divergence(p, q, sharp[0] * 0.99) > sharp[1] * (1 + 1e-9)
    printed = subsampling.wlf16_lemma_24(epsilon, delta, share)
    for x, y in ((p, q), (q, p)):
        assert divergence(x, y, sharp[0]) <= sharp[1] + 1e-12
        assert divergence(x, y, printed[0]) <= printed[1] + 1e-12
        if delta == 0:
            assert divergence(x, y, subsampling.wlf16_lemma_27(epsilon, share)) <= 1e-12
            if epsilon < 1:
                assert divergence(x, y, subsampling.df20_lemma_5(epsilon, share)) <= 1e-12
    assert divergence(p, q, sharp[0] / 2) > 2 * delta  # half of it would not do


def test_every_neighbor_of_a_small_domain_keeps_the_lemmas():
    """The exponential mechanism over thresholds on 2 of 4 records, all data sets over four kinds of record."""
    epsilon, size, n, kinds = 0.8, 2, 4, list(itertools.product((0, 1), (0, 1)))

    def law(part):
        wrong = [sum((x >= t) != y for x, y in part) for t in (0, 1, 2)]
        return np.exp(compute_log_probabilities(-np.array(wrong), epsilon / 2))

    laws = {records: sampled(law, records, size) for records in itertools.product(kinds, repeat=n)}
    sharp = subsampling.amplified(epsilon, 0.0, size / n)[0]
    worst = max(
        float(np.log(laws[records] / laws[other]).max()) for records in laws for other in neighbors(records, kinds)
    )
    assert worst <= sharp < subsampling.wlf16_lemma_24(epsilon, 0.0, size / n)[0]
    assert worst <= subsampling.wlf16_lemma_27(epsilon, size / n) and worst <= subsampling.df20_lemma_5(epsilon, 0.5)
    assert worst > sharp / 2
