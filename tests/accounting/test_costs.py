"""Costs against dp-accounting, against sums over all outcomes, and against what a moved vote does to counts."""

import itertools
import math
import subprocess
import sys

import dp_accounting
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant
from scipy import integrate, stats

from pate_torch.accounting import (
    ConfidentCost,
    GaussianNoisyMaxCost,
    LaplaceNoisyMaxCost,
    SparseVectorCost,
    compute_epsilon,
)
from pate_torch.accounting.costs import ExponentialCost, _bound_max_threshold_moment
from tests.mechanisms.vote_laws import Discrete

SPARSE = SparseVectorCost(40.0, max_failures=20, failure_delta=5e-6, num_tests=1000)


def ask_library(*events) -> float:
    """Epsilon at delta 1e-5 by the privacy loss distributions of dp-accounting, composed by it."""
    accountant = PLDAccountant(dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE)
    for event, count in events:
        accountant.compose(event, count)
    return accountant.get_epsilon(1e-5)


def test_a_thousand_questions_of_gnmax_cost_what_the_library_says():
    epsilon = compute_epsilon(GaussianNoisyMaxCost(40), 1000, delta=1e-5)
    assert epsilon == pytest.approx(4.983306, abs=5e-7)
    assert epsilon == pytest.approx(ask_library((dp_accounting.GaussianDpEvent(40 / math.sqrt(2)), 1000)), rel=1e-6)


def test_laplace_and_confident_and_mixed_costs_are_those_of_the_library():
    laplace, gaussian = dp_accounting.LaplaceDpEvent, dp_accounting.GaussianDpEvent
    # A vote moves between two counts, so each query has two numbers of sensitivity 1.
    assert compute_epsilon(LaplaceNoisyMaxCost(20), 100, delta=1e-5) == pytest.approx(
        ask_library((laplace(20), 200)), rel=1e-3
    )
    confident = ConfidentCost(40, screen_sigma=150, max_answers=286)
    answers = (gaussian(150), 640), (gaussian(40 / math.sqrt(2)), 286)
    assert compute_epsilon(confident, 640, delta=1e-5) == pytest.approx(ask_library(*answers), rel=1e-6)
    mixed = compute_epsilon([confident, LaplaceNoisyMaxCost(20)], [640, 50], delta=1e-5)
    assert mixed == pytest.approx(ask_library(*answers, (laplace(20), 100)), rel=1e-3)


def test_confident_is_priced_as_if_all_were_answered_unless_there_is_a_cap():
    uncapped, capped = ConfidentCost(40, screen_sigma=150), ConfidentCost(40, screen_sigma=150, max_answers=30)
    separately = [GaussianNoisyMaxCost(40), GaussianNoisyMaxCost(150 * math.sqrt(2))]
    for cost, answers in ((uncapped, 100), (capped, 30)):
        assert compute_epsilon(cost, 100, delta=1e-5) == pytest.approx(
            compute_epsilon(separately, [answers, 100], delta=1e-5), rel=1e-12
        )
    assert compute_epsilon(capped, 20, delta=1e-5) == compute_epsilon(uncapped, 20, delta=1e-5)


def test_exponential_cost_bounds_every_change_of_one_vote():
    """ln P(c)/P'(c) spans at most eta = 2 rate over all neighbors, and reaches it nearly."""
    cost = ExponentialCost(0.3)
    (event,) = cost.privacy_events(7)
    assert event.count == 7
    spans = []
    for row in itertools.product(range(7), repeat=3):
        for a, b in itertools.permutations(range(3), 2):
            moved = np.array(row)
            moved[[a, b]] += (-1, 1)
            if row[a]:
                law, other = (np.exp(0.3 * n) / np.exp(0.3 * n).sum() for n in (np.array(row), moved))
                spans.append(np.ptp(np.log(law / other)))
    assert 0.99 * event.eta < max(spans) <= event.eta * (1 + 1e-12)


def test_sparse_vector_costs_its_thresholds_and_its_failures():
    """Twenty thresholds are dominated by twenty answers of randomized response, summed over all outcomes here."""

    def compute_delta(epsilon: float) -> float:
        loss, wins = 2 / 40.0, np.arange(21)
        gain = 1 - np.exp(epsilon - (2 * wins - 20) * loss)
        return float((stats.binom(20, 1 / (1 + math.exp(-loss))).pmf(wins) * np.maximum(gain, 0)).sum())

    epsilon = compute_epsilon(SPARSE, 1000, delta=1e-5)
    assert compute_delta(epsilon) <= 1e-5 - 5e-6 < compute_delta(0.999 * epsilon)
    with pytest.raises(ValueError, match="num_queries=1001"):
        SPARSE.privacy_events(1001)
    with pytest.raises(ValueError, match="delta"):  # all of delta is spent on failures
        compute_epsilon(SPARSE, 1000, delta=4e-6)


def test_discrete_noise_costs_no_less():
    for continuous, discrete in (
        (GaussianNoisyMaxCost(10), GaussianNoisyMaxCost(10, discrete=True)),
        (LaplaceNoisyMaxCost(10), LaplaceNoisyMaxCost(10, discrete=True)),
        (ConfidentCost(10, screen_sigma=30), ConfidentCost(10, screen_sigma=30, discrete=True)),
    ):
        assert compute_epsilon(continuous, 20, delta=1e-5) < compute_epsilon(discrete, 20, delta=1e-5)
        assert not discrete.has_data_dependent_cost


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: GaussianNoisyMaxCost(0), "sigma=0"),
        (lambda: GaussianNoisyMaxCost(math.nan), "sigma=nan"),
        (lambda: GaussianNoisyMaxCost(1, discrete=1), "discrete=1"),
        (lambda: LaplaceNoisyMaxCost(-1), "scale=-1"),
        (lambda: ExponentialCost(0).privacy_events(1), "eta=0"),
        (lambda: ConfidentCost(1, screen_sigma=0), "screen_sigma=0"),
        (lambda: ConfidentCost(1, screen_sigma=1, max_answers=0), "max_answers=0"),
        (lambda: ConfidentCost(1, screen_sigma=1, threshold=math.inf), "threshold=inf"),
        (lambda: SparseVectorCost(0, max_failures=1, failure_delta=0.1, num_tests=1), "noise_scale=0"),
        (lambda: SparseVectorCost(1, max_failures=0, failure_delta=0.1, num_tests=1), "max_failures=0"),
        (lambda: SparseVectorCost(1, max_failures=1, failure_delta=1, num_tests=1), "failure_delta=1"),
        (lambda: SparseVectorCost(1, max_failures=1, failure_delta=0.1, num_tests=0), "num_tests=0"),
    ],
)
def test_a_wrong_parameter_is_named(make, name):
    with pytest.raises(ValueError, match=name):
        make()


@pytest.mark.parametrize("noise", ["torch", "discrete"])
@pytest.mark.parametrize("blocks", [1, 7, 12_001])
def test_the_lowest_of_several_thresholds_is_bounded_by_its_mean(noise, blocks):
    """E[max_b exp(-L_b/(2 lambda))], by the integral of 1 - F^T on the reals and by a sum on the integers."""
    if noise == "torch":
        log_x = np.linspace(-30, 60, 400_001)
        below = stats.laplace(scale=2.0).sf(-4 * log_x)  # P(exp(-L/4) <= x)
        mean = integrate.trapezoid((1 - below**blocks) * np.exp(log_x), log_x)
        assert _bound_max_threshold_moment(blocks, None) == pytest.approx(mean, rel=1e-6)
        return
    law = Discrete("laplace", 2.0)
    least = np.arange(-law.reach, law.reach + 1)
    at_least = (law.sf(least - 1)) ** blocks  # P(min L >= l)
    mean = float(((at_least - law.sf(least) ** blocks) * np.exp(-least / 4)).sum())
    assert mean <= _bound_max_threshold_moment(blocks, 2.0) <= 1.3 * mean


def test_the_accountant_needs_no_torch_and_the_library_only_for_loss_distributions():
    code = (
        "import sys; from pate_torch.accounting import *\n"
        "compute_epsilon(GaussianNoisyMaxCost(40), 1000, delta=1e-5)\n"
        "compute_epsilon(LaplaceNoisyMaxCost(40), 1000, delta=1e-5, accountant='rdp')\n"
        "calibrate_noise(GaussianNoisyMaxCost, 1000, epsilon=1, delta=1e-5)\n"
        "compute_data_dependent_epsilon([[90, 10]], GaussianNoisyMaxCost(40), delta=1e-5)\n"
        "assert not {'torch', 'hydra', 'dp_accounting', 'pate_torch.mechanisms'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
