"""The disagreement coefficient against its definition by brute force, and against classes whose law is known."""

import numpy as np
import pytest

from benchmarks.theory.disagreement import disagreement_coefficient
from pate_torch.hypotheses.classes import Intervals, Stumps, Thresholds


def by_definition(hypotheses, center, x, radius):
    """Balls of every radius, pairs of hypotheses, points: three loops."""
    labels = hypotheses.compute_labelings(hypotheses.enumerate_representatives(x), x)
    middle = hypotheses.predict(center, x)
    share = (labels != middle).mean(1)
    best = 1.0
    for r in np.unique(np.maximum(share, radius)):
        ball = labels[share <= r]
        region = [len({bool(row[i]) for row in ball} | {bool(middle[i])}) > 1 for i in range(len(x))]
        best = max(best, float(np.mean(region)) / r)
    return best


@pytest.mark.parametrize("radius", [0.05, 0.3])
@pytest.mark.parametrize(
    "hypotheses,center",
    [(Thresholds(), 0.5), (Intervals(), (0.4, 0.6)), (Stumps(2), None)],
    ids=["thresholds", "intervals", "stumps"],
)
def test_it_is_what_its_definition_says(hypotheses, center, radius):
    x = np.random.default_rng(0).random((15, getattr(hypotheses, "num_features", 1)))
    center = hypotheses.enumerate_representatives(x)[7] if center is None else center
    found = disagreement_coefficient(hypotheses, center, x, radius=radius)
    assert found == pytest.approx(by_definition(hypotheses, center, x, radius))


def test_thresholds_have_two_and_thin_intervals_many():
    """A threshold may move by r either way; an interval of weight w, moved away wholly, reaches everything."""
    x = (np.arange(200)[:, None] + 0.5) / 200
    assert disagreement_coefficient(Thresholds(), 0.5, x, radius=0.01) == pytest.approx(2.0)
    for width in (0.1, 0.25):
        theta = disagreement_coefficient(Intervals(), (0.4, 0.4 + width), x, radius=0.005)
        assert theta == pytest.approx(1 / (width + 0.005), rel=0.1)
    with pytest.raises(ValueError, match="radius"):
        disagreement_coefficient(Thresholds(), 0.5, x, radius=0.0)
