"""Exact draws: the law against quadrature, the range over every neighbor, and how often a proposal is kept."""

import itertools
import math

import numpy as np
import pytest
from scipy.stats import kstest

from pate_torch.accounting.events import BoundedRangeEvent
from pate_torch.pac import logistic
from pate_torch.pac.logistic import clip_rows, compute_min_acceptance, run_logistic_exponential
from pate_torch.pac.sample import BelowGuaranteeWarning, Sample
from pate_torch.privacy.noise import DryRunNoise
from tests.pac.pac_audit import Spy

quiet = pytest.mark.filterwarnings("ignore::pate_torch.pac.sample.BelowGuaranteeWarning")
GRID = np.linspace(-1, 1, 4001)


def density(records, epsilon, radius, ridge):
    """On a grid of the interval [-radius, radius], from the definition."""
    theta = radius * GRID
    loss = np.mean([np.logaddexp(0, -(1 if y else -1) * x * theta) for x, y in records], axis=0)
    weight = np.exp(-epsilon * len(records) / (2 * radius) * (loss + ridge / 2 * theta**2))
    return weight / weight.sum()


@quiet
@pytest.mark.parametrize("radius,ridge,runs", [(2.0, 0.5, 800), pytest.param(0.5, 0.05, 300, marks=pytest.mark.slow)])
def test_draws_follow_the_density(radius, ridge, runs):
    """Where the best parameter lies inside the ball, and where it lies far outside."""
    records, epsilon = [(1.0, 1), (-0.8, 1), (0.5, 0), (0.9, 1), (-1.0, 0), (1.0, 1)], 14.0
    sample = Sample(np.array([[x] for x, _ in records]), np.array([y for _, y in records]))
    asked = {"radius": radius, "ridge": ridge, "budget": DryRunNoise(insecure_seed=0)}
    drawn = [float(run_logistic_exponential(sample, epsilon=epsilon, **asked).hypothesis[0]) for _ in range(runs)]

    def cdf(epsilon):
        mass = np.cumsum(density(records, epsilon, radius, ridge))
        return lambda t: np.interp(t, radius * GRID, mass)

    assert kstest(drawn, cdf(epsilon)).pvalue > 1e-3
    assert kstest(drawn, cdf(3 * epsilon)).pvalue < 1e-6


def test_the_density_has_the_range_that_is_charged():
    """All data sets of two records, every neighbor: log ratios span epsilon at most, and nearly that."""
    epsilon, radius, kinds = 1.0, 2.0, list(itertools.product((-1.0, 0.3, 1.0), (0, 1)))
    laws = {two: density(two, epsilon, radius, 0.1) for two in itertools.product(kinds, repeat=2)}
    spans = [np.ptp(np.log(laws[(a, b)] / laws[(c, b)])) for a, b, c in itertools.product(kinds, repeat=3)]
    assert 0.9 * epsilon < max(spans) <= epsilon * (1 + 1e-12)


@quiet
def test_proposals_are_kept_as_often_as_bounded_in_many_dimensions():
    generator, radius, ridge = np.random.default_rng(0), 3.0, 0.05
    x = clip_rows(3 * generator.normal(size=(2000, 40)))
    sample = Sample(x, x[:, 0] > 0.1 * generator.normal(size=2000))
    spy = Spy()
    for _ in range(20):
        found = run_logistic_exponential(sample, radius=radius, ridge=ridge, epsilon=2.0, budget=spy)
        assert np.linalg.norm(found.hypothesis) <= radius and found.events == (BoundedRangeEvent(eta=2.0),)
    proposals = spy.log.count("draw") / 20  # a uniform one for each
    assert spy.log[0] == "charge" and proposals < 2 / compute_min_acceptance(radius, ridge) + 20


def test_a_longer_record_weighs_no_more():
    assert np.linalg.norm(clip_rows(np.array([[3.0, 4.0], [0.3, 0.4]])), axis=1) == pytest.approx([1.0, 0.5])


def test_what_would_take_for_ever_is_refused_before_the_charge(monkeypatch):
    spy, sample = Spy(), Sample(np.zeros((5, 1)), np.zeros(5))
    with pytest.raises(ValueError, match=r"ridge=0\.01.*Take ridge >= 0\.014"):
        run_logistic_exponential(sample, radius=20.0, ridge=0.01, epsilon=1.0, budget=spy)
    assert not spy.log
    assert compute_min_acceptance(20.0, 0.014) > 0.9 * logistic.MIN_ACCEPTANCE_RATE
    with pytest.raises(ValueError, match=r"sample\.n=5.*Take n >= 10,"):
        run_logistic_exponential(sample, radius=2.0, ridge=0.1, epsilon=1.0, budget=spy)
    assert not spy.log
    with pytest.warns(BelowGuaranteeWarning, match=r"excess mean loss 0\.5: n >= 8"):
        run_logistic_exponential(sample, radius=2.0, ridge=0.5, epsilon=1.0, budget=spy)
    with pytest.raises(ValueError, match="replace_one"):
        run_logistic_exponential(Sample(np.zeros(5), np.zeros(5), "add_remove"), radius=2.0, ridge=1.0, epsilon=1.0,
                             budget=spy)  # fmt: skip
    assert math.isclose(compute_min_acceptance(1e9, 0.25), math.exp(-0.5))
