"""Covers do what they say: every labeling is near one that is kept, and few are kept."""

import math

import numpy as np
import pytest

from pate_torch.pac.classes import Intervals, Stumps, Thresholds
from pate_torch.pac.nets import compute_net_size
from pate_torch.pac.sample import Sample
from pate_torch.pac.stable import run_stable_predictor, select_alpha_cover
from pate_torch.privacy.noise import DryRunNoise


@pytest.mark.parametrize("alpha", [0.05, 0.2])
@pytest.mark.parametrize("hypotheses", [Thresholds(), Intervals(), Stumps(2)], ids=lambda h: h.name)
def test_a_cover_is_near_everything_and_small(hypotheses, alpha):
    x = np.random.default_rng(0).random((40, getattr(hypotheses, "num_features", 1)))
    candidates = hypotheses.enumerate_representatives(x)
    kept = select_alpha_cover(hypotheses, candidates, x, alpha)
    far = (
        (hypotheses.compute_labelings(candidates, x)[:, None] != hypotheses.compute_labelings(kept, x)[None])
        .sum(2)
        .min(1)
    )
    assert far.max() <= alpha * len(x) and far.max() > 0
    d = hypotheses.vc_dimension
    assert len(kept) < len(candidates) and len(kept) <= math.e * (d + 1) * (2 * math.e / alpha) ** d  # Haussler 1995
    labels = hypotheses.compute_labelings(kept, x)
    apart = (labels[:, None] != labels[None]).sum(2) + len(x) * np.eye(len(kept), dtype=int)
    assert apart.min() > alpha * len(x)


def test_the_cover_stops_growing_with_the_points():
    """log(1/alpha) in the place of log(d/alpha): more points make more dichotomies, and no more of a cover."""
    sizes = [
        len(select_alpha_cover(Thresholds(), Thresholds().enumerate_representatives(x), x, 0.1))
        for x in (np.random.default_rng(1).random((n, 1)) for n in (50, 500))
    ]
    assert abs(sizes[0] - sizes[1]) <= 1 and 9 <= max(sizes) <= 11


@pytest.mark.filterwarnings("ignore::pate_torch.pac.sample.BelowGuaranteeWarning")
def test_a_stable_predictor_over_a_cover_is_as_good():
    """DF20 Remark 1: fewer candidates, empirical excess error of the same order, the same price."""
    generator = np.random.default_rng(2)
    x = generator.random(1500)
    sample, x_Q = Sample(x, x >= 0.3), generator.random((150, 1))
    asked = {"gamma": 0.2, "alpha": 0.05, "constants": "sharp"}
    errors, events = [], []
    for cover in (False, True):
        found = run_stable_predictor(
            Thresholds(), sample, x_Q, **asked, cover=cover, budget=DryRunNoise(insecure_seed=3)
        )
        errors.append(np.mean(found.label_Q != (x_Q[:, 0] >= 0.3)))
        events.append(found.events)
    assert events[0] == events[1]
    assert errors[0] < 0.05 and errors[1] < 3 * asked["alpha"]


def test_reference_points_cover_what_the_reference_dominates():
    """A distribution twice as dense where it lives: every threshold is within alpha of some candidate there."""
    alpha, beta, domination = 0.1, 0.1, 2.0
    size = compute_net_size(alpha / domination, beta, 1)
    few = max(1, round(domination / alpha / 4))
    generator, found = np.random.default_rng(0), {size: 0, few: 0}
    target = np.sort(generator.random(2000) / domination)  # uniform on [0, 1/2]: density 2 against 1
    for count in found:
        for _ in range(100):
            cuts = np.sort(generator.random(count))
            # The best candidate for a threshold lies between the same two draws: its error is at most what lies there.
            between = np.diff(np.searchsorted(target, np.concatenate([[-1], cuts, [2]]))) / len(target)
            found[count] += between.max() <= alpha
    assert found[size] >= 100 * (1 - beta) > found[few]
