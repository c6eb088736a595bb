"""The practical AgPrivCl: its price step by step and exactly on a small world, its answers, and what it refuses."""

import itertools
import math
import warnings

import numpy as np
import pytest
from scipy.stats import norm

from pate_torch.mechanisms.exponential import compute_log_probabilities
from pate_torch.pac.agnostic import RELABEL_FACTOR
from pate_torch.pac.boosting import split_folds
from pate_torch.pac.classes import Thresholds, fit_erm
from pate_torch.pac.relabeled import compute_relabeled_size, plan_relabeled, run_relabeled_gnmax
from pate_torch.pac.sample import BelowGuaranteeWarning, NoisyVotesWarning, Sample
from pate_torch.privacy.noise import DryRunNoise
from tests.pac.pac_audit import Spy, neighbors, universe

quiet = pytest.mark.filterwarnings("ignore::pate_torch.pac.sample.BelowGuaranteeWarning")


@pytest.mark.parametrize("epsilon,delta,m", [(0.5, 1e-5, 50), (1.0, 1e-5, 163), (3.0, 1e-3, 10)])
def test_the_plan_adds_up_to_what_is_asked(epsilon, delta, m):
    """Each step of the proof, recomputed with scipy from the plan's own numbers."""
    n = 200_000
    plan = plan_relabeled(n, m, epsilon=epsilon, delta=delta)
    mu = math.sqrt(2 * m) / plan.sigma
    e = plan.inner_price[0]
    curve = norm.cdf(-e / mu + mu / 2) - math.exp(e) * norm.cdf(-e / mu - mu / 2)
    assert curve == pytest.approx(plan.inner_price[1], rel=1e-6)
    share = plan.subset_size / n
    assert math.log1p(share * (RELABEL_FACTOR * math.exp(e) - 1)) == pytest.approx(plan.total_price[0])
    assert plan.total_price[0] <= epsilon and share * plan.inner_price[1] <= delta * (1 + 1e-9)
    assert plan.total_price[0] > 0.999 * epsilon
    assert plan.num_teachers == plan.subset_size // 30


def test_no_rounding_puts_the_price_above_what_was_asked():
    """From sub-samples that leave nothing for the votes to those that leave nearly all."""
    for n, epsilon, delta in itertools.product((3000, 6499, 10**6, 10**9), (0.1, 0.5, 1.0, 4.0), (1e-9, 1e-4)):
        plan = plan_relabeled(n, 50, epsilon=epsilon, delta=delta, shard=10)
        assert 0 < plan.total_price[0] <= epsilon and 0 < plan.total_price[1] <= delta


def law_of(records, size, teachers, sigma):
    """The exact law of one answer on x = 1: over all sub-samples, all relabelings, and the noise."""
    law = []
    for part in itertools.combinations(records, size):
        x, y = np.array([[float(a)] for a, _ in part]), np.array([bool(b) for _, b in part])
        candidates = Thresholds().enumerate_representatives(x)
        wrong = np.array([(Thresholds().predict(h, x) != y).sum() for h in candidates])
        ones = []
        for h in candidates:
            label = Thresholds().predict(h, x)
            best = [fit_erm(Thresholds(), x[block], label[block]) for block in split_folds(size, teachers)]
            votes = sum(bool(Thresholds().predict(b, np.array([[1.0]]))[0]) for b in best)
            ones.append(norm.cdf((2 * votes - teachers) / (math.sqrt(2) * sigma)))
        law.append(float(np.exp(compute_log_probabilities(-wrong, 0.5)) @ ones))
    one = np.mean(law)
    return np.array([one, 1 - one])


@pytest.mark.parametrize("size", [2, 4])
def test_the_price_holds_exactly_over_every_neighbor_of_a_small_world(size):
    """Two points, four records, a teacher for each that is drawn: no hockey-stick above the total's delta.

    Without sub-sampling a tenth of the last total epsilon is passed, so the test can tell.
    """
    n, sigma = 4, 0.8
    mu, share = math.sqrt(2) / sigma, size / n
    laws = {r: law_of(r, size, size, sigma) for r in itertools.product(universe(2), repeat=n)}
    pairs = [(laws[records], laws[other]) for records in laws for other in neighbors(records, universe(2))]
    p, q = (np.array(side) for side in zip(*pairs, strict=True))

    def passed(epsilon):
        return np.maximum(p - math.exp(epsilon) * q, 0).sum(1).max()

    for e in (0.0, 0.5, 1.5, 3.0, 8.0):
        epsilon = math.log1p(share * (RELABEL_FACTOR * math.exp(e) - 1))
        delta = share * (norm.cdf(-e / mu + mu / 2) - math.exp(e) * norm.cdf(-e / mu - mu / 2))
        assert passed(epsilon) <= delta
    assert size < n or passed(epsilon / 10) > delta


@quiet
def test_it_answers_right_where_plain_voting_fails_and_charges_before_it_draws():
    """NB20's example: every second label a coin on the left; the best of the class is found by relabeling."""
    generator = np.random.default_rng(0)
    n = 40_000
    x = generator.random(n)
    y = np.where(generator.random(n) < 0.35, x < 0.5, x >= 0.5)
    spy, x_Q = Spy(), generator.random((60, 1))
    answers = run_relabeled_gnmax(Thresholds(), Sample(x, y), x_Q, epsilon=2.0, delta=1e-5, alpha=0.2, budget=spy)
    assert spy.log[0] == "charge" and spy.log.count("charge") == 1 and spy.charged == answers.events
    assert np.mean(answers.label_Q.numpy() == (x_Q[:, 0] >= 0.5)) > 0.9


def test_it_warns_below_what_it_needs_and_says_what_would_do():
    n, shard = compute_relabeled_size(20, 1, epsilon=1.0, delta=1e-5, alpha=0.4)
    x = np.random.default_rng(0).random(n)
    x_Q, asked = np.linspace(0, 1, 20), {"epsilon": 1.0, "delta": 1e-5, "alpha": 0.4}
    with warnings.catch_warnings():
        warnings.simplefilter("error", BelowGuaranteeWarning)
        answers = run_relabeled_gnmax(
            Thresholds(), Sample(x, x >= 0.3), x_Q, **asked, shard=shard, budget=DryRunNoise(insecure_seed=0)
        )
    assert np.mean(answers.label_Q.numpy() == (x_Q >= 0.3)) >= 0.6
    with (
        pytest.warns(BelowGuaranteeWarning, match="records of a teacher >= .*teachers >= "),
        pytest.warns(NoisyVotesWarning, match=r"20.7 of 17 votes"),
    ):
        run_relabeled_gnmax(Thresholds(), Sample(x[:5000], x[:5000] >= 0.3), x_Q, **asked, budget=DryRunNoise())
    with pytest.raises(ValueError, match=r"n=100: .* take n >= "):
        plan_relabeled(100, 20, epsilon=0.1, delta=1e-5)
