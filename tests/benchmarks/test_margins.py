"""Margins and LZCW21's figures of them, against known votes."""

import math

import numpy as np
import pytest
import torch

from benchmarks.theory.margins import (
    disagreement_margin,
    expected_margin,
    high_margin_curve,
    margin_correlation,
    margin_distribution,
    share_of_ones,
)
from pate_torch.privacy.sensitive import Votes


def binary(ones, K):
    ones = torch.as_tensor(ones)
    return Votes(torch.stack([K - ones, ones], 1), K)


def test_margins_of_known_votes():
    votes, reference = binary([10, 5, 0, 7], 10), np.array([True, True, True, False])
    share = share_of_ones(votes)
    np.testing.assert_allclose(expected_margin(share), [0.5, 0.0, 0.5, 0.2])
    np.testing.assert_allclose(disagreement_margin(share, reference), [-0.5, 0.0, 0.5, 0.2])
    # In absolute value the two are the same thing, whatever the reference: hence the sign.
    np.testing.assert_allclose(np.abs(disagreement_margin(share, ~reference)), expected_margin(share))
    np.testing.assert_allclose(high_margin_curve(expected_margin(share), [0.0, 0.19, 0.2, 0.5]), [0.25, 0.25, 0.5, 1])


def test_estimated_margin_is_biased_by_half_a_standard_error_at_most():
    generator, K = np.random.default_rng(0), 100
    share = generator.binomial(K, 0.5, size=20_000) / K
    bias = expected_margin(share).mean()
    assert bias == pytest.approx(math.sqrt(1 / (2 * math.pi * K)), rel=0.05)
    assert bias < 1 / (2 * math.sqrt(K))


def test_figures_hold_the_numbers():
    generator, K = np.random.default_rng(1), 50
    votes, reference = binary(generator.binomial(K, 0.9, size=300), K), generator.random(300) < 0.8
    share = share_of_ones(votes)
    line = margin_correlation(votes, reference, queries=120).axes[0].get_lines()[1]
    np.testing.assert_allclose(line.get_xdata()[-1], expected_margin(share)[:120].sum())
    np.testing.assert_allclose(line.get_ydata()[-1], -disagreement_margin(share, reference)[:120].sum())
    figure = margin_distribution(votes, reference)
    heights = sum(patch.get_height() for patch in figure.axes[0].patches if hasattr(patch, "get_height"))
    assert heights == pytest.approx(1.0)
    curve = figure.axes[1].get_lines()[0]
    np.testing.assert_allclose(curve.get_ydata(), high_margin_curve(expected_margin(share), curve.get_xdata()))


def test_margins_refuse_what_they_are_not_defined_for():
    with pytest.raises(ValueError, match="two classes"):
        share_of_ones(Votes(torch.tensor([[1, 1, 1]]), 3))
    with pytest.raises(ValueError, match="fractions"):
        expected_margin([1.5])
