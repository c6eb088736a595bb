"""The exact Gaussian cost against mpmath and published values."""

import math

import mpmath as mp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pate_torch.accounting import gdp

mp.mp.dps = 60


def mp_gaussian_delta(epsilon: float, mu: float) -> mp.mpf:
    e, m = mp.mpf(epsilon), mp.mpf(mu)

    def upper_tail(x: mp.mpf) -> mp.mpf:
        return mp.erfc(x / mp.sqrt(2)) / 2

    return upper_tail(e / m - m / 2) - mp.exp(e) * upper_tail(e / m + m / 2)


@pytest.mark.parametrize("mu", [1e-6, 0.1, 0.4999, 0.5001, 7, 1e3])
def test_gaussian_epsilon_against_mpmath(mu):
    for target in (1e-300, 1e-12, 1e-5, 0.499, 0.501, 1 - 1e-9):
        value = gdp.compute_epsilon(mu, target)
        with mp.workdps(700 if mu > 100 else 400):
            assert value == 0 or mp_gaussian_delta(value * (1 - 1e-9), mu) > target
            assert mp_gaussian_delta(value * (1 + 1e-9), mu) <= target
        if value > 0:
            assert gdp.compute_mu(value, target) == pytest.approx(mu, rel=1e-8)


def test_the_exact_gaussian_cost_is_never_below_the_true_one():
    """By sixty digits: at epsilon the true delta is at most the target, and a few parts in 1e13 below it no more."""
    draw, below = np.random.default_rng(0), 0
    for mu, target in zip(10 ** draw.uniform(-2, 1.2, 60), 10 ** draw.uniform(-12, -1, 60), strict=True):
        value = mp.mpf(gdp.compute_epsilon(mu, target))
        below += value > 0 and mp_gaussian_delta(value * (1 - mp.mpf(2e-13)), mu) > target
        assert value == 0 or mp_gaussian_delta(value, mu) <= target
    assert below > 40


@settings(max_examples=40)
@given(st.floats(1e-3, 50), st.floats(1e-12, 0.9))
def test_gaussian_mu_inverts_epsilon_from_below(target_epsilon, target_delta):
    mu = gdp.compute_mu(target_epsilon, target_delta)
    assert gdp.compute_delta(target_epsilon, mu) <= target_delta * (1 + 1e-12)
    assert gdp.compute_delta(target_epsilon, mu * (1 + 1e-6)) > target_delta


@settings(max_examples=40)
@given(st.floats(1e-9, 300))
def test_a_pure_mechanism_is_dominated_by_its_gaussian_and_by_no_smaller(loss):
    mu = gdp.compute_mu_of_pure_epsilon(loss)
    q = 1 / (1 + math.exp(loss)) if loss < 700 else 0.0
    # At every epsilon the pure curve (e^loss - e^eps)/(1 + e^loss) lies below the Gaussian's.
    for share in (0.0, 0.1, 0.5, 0.9, 0.999):
        pure = -math.expm1((share - 1) * loss) * (1 - q)
        assert pure <= gdp.compute_delta(share * loss, mu) * (1 + 1e-9)
    assert gdp.compute_delta(0.0, mu) == pytest.approx(
        math.tanh(loss / 2), rel=1e-9
    )  # met at the vertex: no smaller mu


def test_the_cost_covers_a_real_release():
    """Votes (5, 5) against (6, 4): the law of the released label is covered, and by 2/3 of mu it would not be."""
    sigma, root2 = 1.0, math.sqrt(2)
    wins = 0.5 * math.erfc(-2 / (root2 * sigma) / root2)  # the gap of 2 carries noise of deviation sqrt(2) sigma
    spread = wins - 0.5  # its delta at epsilon 0
    assert spread <= gdp.compute_delta(0.0, root2 / sigma)
    assert spread > gdp.compute_delta(0.0, 2 / 3 * root2 / sigma)
