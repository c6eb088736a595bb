"""Private prediction (DF20 Corollary 1): exact stability and privacy over every pair of neighbors."""

import functools
import itertools
import math

import numpy as np
import pytest

from pate_torch.accounting.events import PureDPEvent
from pate_torch.hypotheses.classes import Thresholds
from pate_torch.hypotheses.prediction import (
    compute_flipping_gamma,
    compute_stability,
    compute_stable_predictor_size,
    run_private_prediction,
)
from pate_torch.hypotheses.sample import BelowGuaranteeWarning, Sample, compute_net_size
from pate_torch.privacy.noise import DryRunNoise
from tests.hypotheses.exact_laws import Spy, all_laws, both, charges_first, fit, quiet, sample_of, threshold_law, worst


@functools.cache
def brute_prediction(records, size, gamma, queries=(0, 1, 2)):
    """P(answer = 1) of DF20 Theorem 1's algorithm for thresholds, from the definition, over all subsets."""
    total = np.zeros(len(queries))
    subsets = list(itertools.combinations(range(len(records)), size))
    for index in subsets:
        seen = sorted({records[i][0] for i in index})
        # The library puts a cut half-way between neighboring values of the subset.
        cuts = [-math.inf, *((a + b) / 2 for a, b in itertools.pairwise(seen)), math.inf]
        total += threshold_law(records, cuts, gamma / 2) @ [[float(q >= t) for q in queries] for t in cuts]
    return total / len(subsets)


@pytest.mark.parametrize("size,n", [(1, 4), (2, 4)])
def test_stability_holds_over_every_pair_of_neighbors(size, n):
    """DF20 Lemma 7: given the subset, a draw of bounded range gamma moves a probability by tanh(gamma/4) at most."""
    gamma = size / n
    laws = all_laws(lambda r: both(brute_prediction(r, size, gamma)), 3, n)
    moved, sharp = worst(laws)[2], compute_stability(gamma, size / n, "sharp")
    assert moved <= sharp + 1e-12 < 3 * gamma == compute_stability(gamma, size / n) and sharp <= 1.25 * gamma
    assert moved > 0.9 * math.tanh(gamma / 4)  # the exponential mechanism's part is met


def exact_epsilon(gamma, alpha, size, n):
    """The largest ln ratio of one flipped prediction over every data set, neighbor, query and answer."""
    return worst(all_laws(lambda r: both(alpha + (1 - 2 * alpha) * brute_prediction(r, size, gamma)), 3, n))[0]


def test_private_prediction_is_private_over_every_pair_of_neighbors():
    n, size, alpha = 4, 2, 0.3
    # A subset of two records of four needs gamma >= 1/2: epsilon is solved for, not chosen.
    epsilon = math.log1p((1 - 2 * alpha) * compute_stability(0.5, 0.5, "sharp") / alpha)
    assert compute_flipping_gamma(epsilon, alpha, "sharp") == pytest.approx(0.5)
    assert compute_flipping_gamma(6 * 0.5 / alpha, alpha) == pytest.approx(0.5)
    assert 0.4 * epsilon < exact_epsilon(0.5, alpha, size, n) <= epsilon
    # The audit sees faults: no flip, or a gamma six times too large.
    assert exact_epsilon(0.5, 1e-9, size, n) > epsilon
    assert exact_epsilon(6 * 0.5, alpha, size, n) > epsilon


def test_the_gamma_fault_is_not_a_breach():
    """gamma = epsilon alpha/2 where the proof needs epsilon alpha/6: Lemma 7's 3 gamma is too loose to tell them apart.

    The sharp bound admits gamma up to 0.8 epsilon alpha, and the exact loss at epsilon alpha/2 stays below epsilon.
    """
    alpha = 0.2
    for epsilon in (0.1, 0.5, 1.0, 2.5):
        assert compute_flipping_gamma(epsilon, alpha) == pytest.approx(epsilon * alpha / 6)
        assert compute_flipping_gamma(epsilon, alpha, "sharp") > epsilon * alpha / 2
    epsilon = 2 * 0.25 / alpha
    assert exact_epsilon(epsilon * alpha / 2, alpha, 1, 4) < epsilon
    # The paper's own chain would break all the same: 3 gamma = 1.5 epsilon alpha is too much for a small alpha.
    epsilon, alpha = 0.05, 0.05
    assert math.log1p((1 - 2 * alpha) * 3 * (epsilon * alpha / 2) / alpha) > epsilon
    assert math.log1p((1 - 2 * alpha) * 3 * (epsilon * alpha / 6) / alpha) <= epsilon


@quiet
def test_predictions_are_drawn_from_their_law_and_charged():
    """And not from the law without a flip, of twice the rate, or of scores on the subset only."""
    records, draws, spy, alpha, size = ((0, 0), (1, 1), (2, 1), (2, 1), (0, 0), (1, 1)), 2000, Spy(1), 0.2, 2
    epsilon = math.log1p((1 - 2 * alpha) * compute_stability(0.8, 0.8, "sharp") / alpha)
    done = run_private_prediction(
        Thresholds(), sample_of(records), np.full((draws, 1), 1.0), epsilon=epsilon, alpha=alpha, subset_size=size,
        constants="sharp", budget=spy,
    )  # fmt: skip
    assert done.events == spy.charged == (PureDPEvent(epsilon=epsilon, count=draws),) and charges_first(spy)
    ones, p = int(done.label_Q.sum()), brute_prediction(records, size, 0.8)[1]
    doubled = brute_prediction(records, size, 2 * 0.8)[1]
    # Cuts of the subset, scored on the subset alone.
    subsets = list(itertools.combinations(records, size))
    alone = np.mean([brute_prediction(subset, size, 0.8)[1] for subset in subsets])

    def p_value(p):
        law = alpha + (1 - 2 * alpha) * p
        return fit([ones, draws - ones], [law, 1 - law])

    assert p_value(p) > 1e-3 and fit([ones, draws - ones], [p, 1 - p]) < 1e-6
    assert p_value(doubled) < 1e-4 and p_value(alone) < 1e-4


def test_small_samples_are_refused_or_warned_about():
    sample, spy = sample_of(((0, 1),) * 9), Spy()
    asked = {"alpha": 0.2, "budget": spy}
    for changes, message in (
        ({"epsilon": 3.0}, r"sample\.n=9.*n >= 10"),
        ({"epsilon": 9.0, "subset_size": 5}, "subset"),
        ({"epsilon": 1.0, "alpha": 0.5}, "alpha"),
        ({"epsilon": 30.0}, "gamma"),
        ({"epsilon": 1.0, "constants": "best"}, "constants"),
    ):
        with pytest.raises(ValueError, match=message):
            run_private_prediction(Thresholds(), sample, [0.0], **(asked | changes))
    assert spy.log == []
    with pytest.warns(BelowGuaranteeWarning, match="private prediction: n = 9 "):
        run_private_prediction(Thresholds(), sample, [0.0], **asked, epsilon=9.0)
    big, asked = Sample(np.zeros(10**5), np.ones(10**5)), {"epsilon": 2.0, "alpha": 0.3, "budget": DryRunNoise()}
    assert len(run_private_prediction(Thresholds(), big, [0.0], **asked).label_Q) == 1  # no warning
    with pytest.warns(BelowGuaranteeWarning, match=f"subset >= {compute_net_size(0.3, 0.3, 1)}, here 2"):
        run_private_prediction(Thresholds(), big, [0.0], **asked, subset_size=2)
    sizes = [compute_stable_predictor_size(1, gamma=gamma, alpha=0.1) for gamma in (0.1, 0.01)]
    assert sizes[0] < sizes[1]
