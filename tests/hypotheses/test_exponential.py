"""The exponential mechanism over hypotheses: exact laws, exact privacy, draws from the law, and refusals."""

import itertools
import math

import numpy as np
import pytest
from scipy import stats
from scipy.stats import kstest

from benchmarks.theory.classes import Listed
from pate_torch.accounting.events import BoundedRangeEvent
from pate_torch.hypotheses import exponential
from pate_torch.hypotheses.classes import Thresholds
from pate_torch.hypotheses.exponential import (
    certify,
    compute_convex_size,
    compute_excess_risk,
    compute_min_acceptance,
    compute_sspp_private_size,
    compute_sspp_public_size,
    run_exponential_mechanism,
    run_logistic_exponential,
    run_sspp,
)
from pate_torch.hypotheses.sample import BelowGuaranteeWarning, Sample
from pate_torch.mechanisms.exponential import compute_log_probabilities, draw_gumbel_max
from pate_torch.privacy.noise import DryRunNoise
from tests.hypotheses.exact_laws import Spy, all_laws, charges_first, fit, quiet, sample_of, threshold_law, worst

DOMAIN = np.arange(3.0)
GRID = np.linspace(-1, 1, 4001)


@pytest.fixture
def executed(monkeypatch):
    """Runs an algorithm and returns the exact law of its draw instead of a draw."""

    def law_of(run):
        seen = []
        record = lambda u, rate, noise: seen.append(np.exp(compute_log_probabilities(u, rate))) or 0  # noqa: E731
        monkeypatch.setattr(exponential, "draw_gumbel_max", record)
        run()
        return seen[-1]

    return law_of


@quiet
def test_sspp_is_private_over_every_pair_of_neighbors(executed):
    """All 6^3 data sets over three points: executed law = brute force; loss and range at most epsilon, nearly met."""
    epsilon, hypotheses = 0.8, Thresholds()
    cuts = hypotheses.enumerate_representatives(DOMAIN[:, None])

    def law(records):
        asked = {"epsilon": epsilon, "budget": DryRunNoise()}
        found = executed(lambda: run_sspp(hypotheses, sample_of(records), DOMAIN, **asked))
        np.testing.assert_allclose(found, threshold_law(records, cuts, epsilon / 2), rtol=1e-12)
        return found

    laws = all_laws(law, 3, 3)
    loss, span, _ = worst(laws)
    assert span <= epsilon + 1e-9 and loss <= epsilon
    assert span > 0.99 * epsilon  # the event charged is not just an upper bound
    assert worst(laws**2 / (laws**2).sum(-1, keepdims=True))[1] > 1.9 * epsilon  # a rate without the 1/2 is caught


@quiet
@pytest.mark.slow(reason="statistical audit: 3,000 draws")
def test_sspp_draws_from_its_law():
    records, noise, counts = ((0, 0), (1, 1), (2, 1), (1, 0)), DryRunNoise(insecure_seed=1), np.zeros(4)
    for _ in range(3000):
        counts[run_sspp(Thresholds(), sample_of(records), DOMAIN, epsilon=1.0, budget=noise).index] += 1
    cuts = Thresholds().enumerate_representatives(DOMAIN[:, None])
    assert fit(counts, threshold_law(records, cuts, 0.5)) > 1e-4
    assert fit(counts, threshold_law(records, cuts, 1.0)) < 1e-6


def test_one_candidate_costs_nothing():
    free, constant = Spy(), Listed([lambda x: np.ones(len(x)), lambda x: x[:, 0] > -1])
    big, public = Sample(np.zeros(10**6), np.ones(10**6)), np.zeros(compute_sspp_public_size(1, alpha=0.5, beta=0.5))
    assert run_sspp(constant, big, public, epsilon=1.0, budget=free).events == () and free.log == []


@quiet
@pytest.mark.parametrize(
    "run",
    [
        lambda sample, budget: run_exponential_mechanism(Thresholds(), [0.5, 1.5], sample, epsilon=1.0, budget=budget),
        lambda sample, budget: run_sspp(Thresholds(), sample, DOMAIN, epsilon=1.0, budget=budget),
        lambda sample, budget: run_logistic_exponential(sample, radius=2.0, ridge=0.5, epsilon=2.0, budget=budget),
    ],
    ids=["exponential", "sspp", "convex"],
)
def test_the_charge_comes_before_the_noise_and_can_refuse(run):
    class Empty(Spy):
        def spend(self, events, **facts):
            raise RuntimeError("over budget")

    sample, spy, empty = sample_of(((0, 0), (1, 1), (2, 1)) * 3), Spy(), Empty()
    assert run(sample, spy).events == spy.charged and charges_first(spy)
    with pytest.raises(RuntimeError, match="over budget"):
        run(sample, empty)
    assert empty.log == []


def test_below_the_guarantee_it_warns_and_above_it_does_not():
    n, asked = math.ceil(2 * math.log(3) / 0.2), {"epsilon": 1.0, "budget": DryRunNoise(), "alpha": 0.2}
    run_exponential_mechanism(Thresholds(), [0.5, 1.5, 2.5], sample_of(((1, 1),) * n), **asked)
    with pytest.warns(BelowGuaranteeWarning, match=r"excess empirical error 0\.2"):
        run_exponential_mechanism(Thresholds(), [0.5, 1.5, 2.5], sample_of(((1, 1),) * (n - 1)), **asked)
    # Too few public points do not cover the class. Too many make a cover that takes more records to choose from.
    asked = {"epsilon": 0.01, "alpha": 0.4, "beta": 0.4}
    enough, n = compute_sspp_public_size(1, alpha=0.4, beta=0.4), compute_sspp_private_size(1, **asked)
    assert n == compute_sspp_private_size(1, **asked, num_public=enough)
    assert n < compute_sspp_private_size(1, **asked, num_public=10 * enough)
    run, sample = {**asked, "budget": DryRunNoise()}, Sample(np.zeros(n), np.ones(n))
    run_sspp(Thresholds(), sample, np.linspace(0, 1, enough), **run)
    with pytest.warns(BelowGuaranteeWarning, match=rf"public points >= {enough}, here {enough - 1}"):
        run_sspp(Thresholds(), sample, np.linspace(0, 1, enough - 1), **run)
    with pytest.warns(BelowGuaranteeWarning, match=r"excess error 0\.4 with probability 0\.6: n >="):
        run_sspp(Thresholds(), sample, np.linspace(0, 1, 10 * enough), **run)


def test_bad_choices_are_refused_before_a_charge():
    spy, sample = Spy(), Sample(np.zeros(3), np.ones(3))
    for epsilon, points, message in ((0.0, DOMAIN, "epsilon"), (math.inf, DOMAIN, "epsilon"), (1.0, [], "public_x")):
        with pytest.raises(ValueError, match=message):
            run_sspp(Thresholds(), sample, points, epsilon=epsilon, budget=spy)
    for epsilon, candidates, message in ((math.nan, [0.5], "epsilon"), (1.0, [], "candidates")):
        with pytest.raises(ValueError, match=message):
            run_exponential_mechanism(Thresholds(), candidates, sample, epsilon=epsilon, budget=spy)
    assert not spy.log


def density(records, epsilon, radius, ridge):
    """On a grid of the interval [-radius, radius], from the definition."""
    theta = radius * GRID
    loss = np.mean([np.logaddexp(0, -(1 if y else -1) * x * theta) for x, y in records], axis=0)
    weight = np.exp(-epsilon * len(records) / (2 * radius) * (loss + ridge / 2 * theta**2))
    return weight / weight.sum()


@quiet
@pytest.mark.parametrize(
    "radius,ridge,runs",
    [(2.0, 0.5, 400), pytest.param(0.5, 0.05, 300, marks=pytest.mark.slow(reason="statistical audit: 300 draws"))],
    ids=["best inside the ball", "best outside"],
)
def test_parameters_follow_the_density(radius, ridge, runs):
    records, epsilon = [(1.0, 1), (-0.8, 1), (0.5, 0), (0.9, 1), (-1.0, 0), (1.0, 1)], 14.0
    asked = {"radius": radius, "ridge": ridge, "budget": DryRunNoise(insecure_seed=0)}
    found = (run_logistic_exponential(sample_of(records), epsilon=epsilon, **asked) for _ in range(runs))
    drawn = [float(one.hypothesis[0]) for one in found]

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
def test_proposals_are_accepted_as_often_as_bounded_in_many_dimensions():
    generator, radius, ridge = np.random.default_rng(0), 3.0, 0.05
    x = 3 * generator.normal(size=(2000, 40))
    x /= np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1)
    sample, spy = Sample(x, x[:, 0] > 0.1 * generator.normal(size=2000)), Spy()
    for _ in range(20):
        found = run_logistic_exponential(sample, radius=radius, ridge=ridge, epsilon=2.0, budget=spy)
        assert np.linalg.norm(found.hypothesis) <= radius and found.events == (BoundedRangeEvent(eta=2.0),)
    assert spy.log.count("draw") / 20 < 2 / compute_min_acceptance(radius, ridge) + 20  # one uniform a proposal


@quiet
def test_a_longer_record_weighs_no_more():
    x, y = np.array([[3.0, 4.0], [0.3, 0.4]]), np.array([1, 0])
    asked = {"radius": 2.0, "ridge": 0.5, "epsilon": 2.0}
    drawn = []
    for rows in (x, np.array([[0.6, 0.8], [0.3, 0.4]])):
        sample = Sample(np.tile(rows, (20, 1)), np.tile(y, 20))
        drawn.append(run_logistic_exponential(sample, **asked, budget=DryRunNoise(insecure_seed=0)).hypothesis)
    np.testing.assert_allclose(*drawn)


def test_what_would_take_for_ever_is_refused_before_the_charge():
    spy, sample = Spy(), Sample(np.zeros((5, 1)), np.zeros(5))
    with pytest.raises(ValueError, match=r"ridge=0\.01.*Take ridge >= 0\.014"):
        run_logistic_exponential(sample, radius=20.0, ridge=0.01, epsilon=1.0, budget=spy)
    assert compute_min_acceptance(20.0, 0.014) > 0.9 * exponential.MIN_ACCEPTANCE_RATE
    with pytest.raises(ValueError, match=r"sample\.n=5.*Take n >= 10,"):
        run_logistic_exponential(sample, radius=2.0, ridge=0.1, epsilon=1.0, budget=spy)
    assert not spy.log
    with pytest.warns(BelowGuaranteeWarning, match=r"excess mean loss 0\.5: n >= 8"):
        run_logistic_exponential(sample, radius=2.0, ridge=0.5, epsilon=1.0, budget=spy)
    assert math.isclose(compute_min_acceptance(1e9, 0.25), math.exp(-0.5))


@pytest.mark.parametrize("dimension", [1, 2, 3])
def test_the_convex_excess_is_dimension_over_rate(dimension):
    """By quadrature over the radius: |theta| over a ball has excess D/rate as the ball grows, and never more."""
    for radius in (0.5, 3.0, 40.0):
        r = np.linspace(0, radius, 200_001)
        weight = r ** (dimension - 1) * np.exp(-r)
        excess = (weight * r).sum() / weight.sum()
        assert excess <= dimension * (1 + 1e-3)
    assert excess == pytest.approx(dimension, rel=1e-3)
    assert compute_convex_size(dimension, epsilon=0.5, alpha=0.1, loss_range=2.0) == pytest.approx(80 * dimension)


# ---- Accuracy at a given number of records ---------------------------------------------------------------------------


def test_the_certificate_of_mushroom_is_that_of_the_formula():
    assert compute_excess_risk(6499, 254, 1.0, (0.05, 0.025, 0.025)) == pytest.approx(0.0461, abs=5e-5)
    facts = certify(6499, 254, 1.0, 0.1, 1, (1_800_310.2, "excess error 0.1"))
    assert facts["excess_risk"] == pytest.approx(0.0452, abs=5e-5) and facts["probability"] == 0.9
    assert "at most 4.6 percentage points" in facts["certificate"]  # rounded up
    assert "With probability 0.9," in facts["certificate"] and "among 254 rules" in facts["certificate"]
    assert "needs n >= 1,800,311 for its own promise (excess error 0.1)" in facts["certificate"]
    assert compute_excess_risk(6499, 1, 1.0, (0.01,) * 3) == 0 and compute_excess_risk(3, 254, 1.0, (0.1,) * 3) == 1


def test_each_term_of_the_certificate_holds_exactly_and_half_of_it_does_not():
    """The mechanism by its exact law, all others t errors above the best; deviations by exact binomials."""
    n, M, epsilon, b = 400, 64, 0.5, 0.05

    def chance_of_others(errors):
        weight = (M - 1) * math.exp(-epsilon * errors / 2)
        return weight / (1 + weight)

    draw_term = 2 * math.log(M / b) / epsilon  # in errors
    assert chance_of_others(draw_term) <= b < chance_of_others(draw_term / 2)
    for risk in (0.1, 0.3, 0.5):
        all_term, best_term = math.sqrt(n * math.log(M / b) / 2), math.sqrt(n * math.log(1 / b) / 2)
        too_few = M * stats.binom.cdf(math.ceil(n * risk - all_term) - 1, n, risk)
        too_many = stats.binom.sf(math.floor(n * risk + best_term), n, risk)
        assert too_few <= b and too_many <= b
    assert stats.binom.sf(math.floor(n / 2 + best_term / 2), n, 0.5) > b
    assert 1 - stats.binom.sf(math.ceil(n / 2 - all_term / 2) - 1, n, 0.5) ** M > b
    sum_of_terms = (draw_term + all_term + best_term) / n
    assert compute_excess_risk(n, M, epsilon, (b, b, b)) == pytest.approx(sum_of_terms)


@pytest.mark.slow(reason="statistical audit: 600 draws from 4,096 candidates")
def test_the_certificate_covers_and_half_of_it_does_not():
    """Independent candidates, of which one errs less by a little more than is certified: it must be drawn, and is not
    where the gap is a little more than half of the certificate.
    """
    n, M, epsilon, failure, draws = 200, 4096, 2.0, 0.1, 300
    excess = compute_excess_risk(n, M, epsilon, (failure / 3,) * 3)
    generator, noise = np.random.default_rng(0), DryRunNoise(insecure_seed=0)

    def fails(gap):
        risk = np.full(M, 0.5)
        risk[0] -= gap
        chosen = [draw_gumbel_max(-generator.binomial(n, risk), epsilon / 2, noise) for _ in range(draws)]
        return np.mean(np.array(chosen) != 0)

    assert fails(1.01 * excess) <= failure < 0.14 < fails(0.51 * excess)
