"""Exact privacy audits over tiny domains: every data set, every neighbour, no sampling."""

import itertools
import math

import numpy as np
from scipy.stats import chi2

from pate_torch.noise import NoiseSource
from pate_torch.pac.sample import Sample


class Spy(NoiseSource):
    """A seeded source that notes when it draws; everything it offers comes from ``uniform``."""

    def __init__(self, seed=0):
        super().__init__(insecure_seed=seed)
        self.log = []

    def uniform(self, shape, device):
        self.log.append("draw")
        return super().uniform(shape, device)

    def charge(self, events):
        self.log.append("charge")
        self.charged = events


def universe(num_points):
    """Every labelled record over the points 0..num_points-1."""
    return list(itertools.product(range(num_points), (0, 1)))


def sample_of(records):
    return Sample(np.array([[float(x)] for x, _ in records]), np.array([y for _, y in records]))


def neighbours(records, records_U):
    for i, new in itertools.product(range(len(records)), records_U):
        if new != records[i]:
            yield (*records[:i], new, *records[i + 1 :])


def worst(laws, records_U):
    """Over all replace-one neighbours: the largest ln(P/P'), its largest range over outcomes, and largest |P - P'|."""
    loss = span = moved = 0.0
    for records, law in laws.items():
        for other in neighbours(records, records_U):
            ratio = np.log(law) - np.log(laws[other])
            loss = max(loss, float(ratio.max()))
            span = max(span, float(np.ptp(ratio)))
            moved = max(moved, float(np.abs(law - laws[other]).max()))
    return loss, span, moved


def all_laws(law, num_points, n):
    records_U = universe(num_points)
    return {records: np.asarray(law(records)) for records in itertools.product(records_U, repeat=n)}, records_U


def fit(counts, law):
    """p-value of Pearson's chi-square test of counts against a law."""
    counts, law = np.asarray(counts, float), np.asarray(law, float)
    expected = counts.sum() * law
    assert (expected >= 5).all(), "too few draws for a chi-square test"
    return float(chi2.sf(((counts - expected) ** 2 / expected).sum(), len(counts) - 1))


def pure_total(events):
    """Plain composition of pure and bounded-range events."""
    return math.fsum(e.count * getattr(e, "epsilon", getattr(e, "eta", 0.0)) for e in events)
