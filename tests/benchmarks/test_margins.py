"""Margins and LZCW21's figures of them, against known votes."""

import math

import numpy as np
import pytest
import torch

from benchmarks.theory.margins import disagreement_margin, expected_margin, share_of_ones
from pate_torch.privacy.sensitive import Votes


def test_margins_of_known_votes():
    reference = np.array([True, True, True, False])
    share = share_of_ones(Votes(torch.tensor([[0, 10], [5, 5], [10, 0], [3, 7]]), 10))
    np.testing.assert_allclose(expected_margin(share), [0.5, 0.0, 0.5, 0.2])
    np.testing.assert_allclose(disagreement_margin(share, reference), [-0.5, 0.0, 0.5, 0.2])
    # In absolute value the two are the same thing, whatever the reference: hence the sign.
    np.testing.assert_allclose(np.abs(disagreement_margin(share, ~reference)), expected_margin(share))


def test_estimated_margin_is_biased_by_half_a_standard_error_at_most():
    generator, K = np.random.default_rng(0), 100
    share = generator.binomial(K, 0.5, size=20_000) / K
    bias = expected_margin(share).mean()
    assert bias == pytest.approx(math.sqrt(1 / (2 * math.pi * K)), rel=0.05)
    assert bias < 1 / (2 * math.sqrt(K))
