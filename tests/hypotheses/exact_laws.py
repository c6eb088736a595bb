"""Exact privacy audits over tiny domains: every data set, every neighbor, no sampling."""

import itertools
import math
from contextlib import contextmanager

import numpy as np
import pytest
from scipy.stats import chi2

from pate_torch.hypotheses.sample import Sample
from pate_torch.privacy.noise import DryRunNoise

quiet = pytest.mark.filterwarnings("ignore::pate_torch.hypotheses.sample.BelowGuaranteeWarning")


class Spy(DryRunNoise):
    """A seeded source that notes when it draws; everything it offers comes from ``_make_uniform_block``."""

    def __init__(self, seed=0):
        super().__init__(insecure_seed=seed)
        self.log = []

    def _make_uniform_block(self, size):
        self.log.append("draw")
        return super()._make_uniform_block(size)

    @contextmanager
    def spend(self, events, **facts):
        self.log.append("charge")
        self.charged = tuple(events)
        yield self


def charges_first(spy):
    """Whether there was one charge, before the first draw, and a draw."""
    return spy.log[0] == "charge" and spy.log.count("charge") == 1 and "draw" in spy.log


def universe(num_points):
    """Every labeled record over the points 0..num_points-1."""
    return list(itertools.product(range(num_points), (0, 1)))


def sample_of(records):
    return Sample(np.array([[float(x)] for x, _ in records]), np.array([y for _, y in records]))


def neighbors(records, records_U):
    for i, new in itertools.product(range(len(records)), records_U):
        if new != records[i]:
            yield (*records[:i], new, *records[i + 1 :])


def worst(laws):
    """Over all replace-one neighbors: the largest ln(P/P'), its largest range over outcomes, and largest |P - P'|."""
    loss = span = moved = 0.0
    for place in range(laws.ndim - 1):
        one = np.moveaxis(laws, place, 0)
        ratio = np.log(one)[:, None] - np.log(one)
        loss, span = max(loss, float(ratio.max())), max(span, float(np.ptp(ratio, axis=-1).max()))
        moved = max(moved, float(np.abs(one[:, None] - one).max()))
    return loss, span, moved


def all_laws(law, num_points, n):
    """The law of each data set of n records, [U, ..., U, outcomes]: an axis for each record."""
    records_U = universe(num_points)
    laws = [law(records) for records in itertools.product(records_U, repeat=n)]
    return np.array(laws).reshape(*[len(records_U)] * n, -1)


def fit(counts, law):
    """p-value of Pearson's chi-square test of counts against a law."""
    counts, law = np.asarray(counts, float), np.asarray(law, float)
    expected = counts.sum() * law
    assert (expected >= 5).all(), "too few draws for a chi-square test"
    return float(chi2.sf(((counts - expected) ** 2 / expected).sum(), len(counts) - 1))


def threshold_law(records, cuts, rate):
    """P(t) ~ exp(-rate errors(t)) for thresholds, from the definition."""
    weight = [math.exp(-rate * sum((x >= t) != y for x, y in records)) for t in cuts]
    return np.array(weight) / sum(weight)


def both(one_Q):
    """The laws of all answers, of which 1 has these chances, as one array of positive numbers."""
    return np.concatenate([one_Q, 1 - one_Q])


def sauer_shelah(n, d):
    """Most dichotomies n points can have: sum_{i <= d} C(n, i) (Sauer 1972, Shelah 1972)."""
    return sum(math.comb(n, i) for i in range(min(n, d) + 1))
