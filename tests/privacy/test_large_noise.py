"""Large discrete Gaussian noise: the law of a draw, against wrong samplers, and the bounds of its shortcuts."""

import math
from fractions import Fraction

import mpmath
import numpy as np
import pytest
from scipy.stats import chi2, kstest

from pate_torch.privacy import noise
from pate_torch.privacy.noise import draw_large_discrete_gaussian

SMALL_SIGMA = Fraction(25, 3)
SMALL_RANGE = np.arange(-40, 41)
COUNT = 20_000


@pytest.fixture
def few_steps(monkeypatch):
    """With 2 steps within a sigma, nearly half of the pairs are not kept, so that a wrong step shows."""
    monkeypatch.setattr(noise, "_COARSE_STEPS", 2)
    monkeypatch.setattr(noise, "MAX_DISCRETE_SCALE", 3)


def compute_law(sigma):
    weight = np.exp(-(SMALL_RANGE.astype(float) ** 2) / (2 * float(sigma) ** 2))
    return weight / weight.sum()


def compute_p_value(number_N, law=None):
    """Compare frequencies with the law of SMALL_SIGMA; numbers beyond 24 are one class."""
    law = compute_law(SMALL_SIGMA) if law is None else law
    group = np.clip(SMALL_RANGE, -24, 24) + 24
    expected = np.bincount(group, law) * len(number_N)
    observed = np.bincount(np.clip(number_N, -24, 24) + 24, minlength=49)
    return chi2.sf(((observed - expected) ** 2 / expected).sum(), 48)


def test_the_law_of_a_draw_is_the_discrete_gaussian(few_steps):
    number_N = draw_large_discrete_gaussian((COUNT,), SMALL_SIGMA).numpy()
    assert number_N.dtype == np.int64 and compute_p_value(number_N) > 1e-6


FAULTS = ["every pair is kept", "low number is zero", "low number is one too large", "sigma is 10 % too small"]


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(few_steps, monkeypatch, fault):
    draw_uniform, sigma = noise._draw_uniform_integers, SMALL_SIGMA
    if fault == "every pair is kept":
        monkeypatch.setattr(noise, "_is_below_exp", lambda *_: True)
    elif fault == "low number is zero":
        monkeypatch.setattr(noise, "_draw_uniform_integers", lambda limit, size: np.zeros(size, np.int64))
    elif fault == "low number is one too large":
        monkeypatch.setattr(noise, "_draw_uniform_integers", lambda limit, size: draw_uniform(limit + 1, size))
    else:
        sigma *= Fraction(9, 10)
    assert compute_p_value(draw_large_discrete_gaussian((COUNT,), sigma).numpy()) < 1e-9


@pytest.mark.parametrize("fault", ["two zeros", "no sign"])
def test_wrong_laws_are_rejected(fault):
    law = compute_law(SMALL_SIGMA)
    if fault == "two zeros":
        law[40] *= 2
    else:
        law[:40], law[40:] = 0, 2 * law[40:]
    number_N = np.random.default_rng(0).choice(SMALL_RANGE, COUNT, p=law / law.sum())
    assert compute_p_value(number_N) < 1e-9
    right_N = np.random.default_rng(0).choice(SMALL_RANGE, COUNT, p=compute_law(SMALL_SIGMA))
    assert compute_p_value(right_N) > 1e-6


@pytest.mark.parametrize("sigma", [Fraction(20_001), Fraction((1 << 33) * 3 + 1, 3), Fraction(1 << 50)])
def test_draws_of_full_size(sigma):
    number_N = draw_large_discrete_gaussian((COUNT,), sigma).numpy()
    width = math.floor(sigma / 4096)
    assert kstest(number_N / float(sigma), "norm").pvalue > 1e-6
    assert abs(np.mean(number_N < 0) - 0.5) < 6 * 0.5 / COUNT**0.5
    # The low part of a number is nearly uniform: within one sigma the weight changes by 1/4096 of itself at most.
    bins = min(width, 64)
    low_N = np.abs(number_N) % width
    edge = [-(-width * part // bins) for part in range(bins + 1)]
    observed = np.histogram(low_N, edge)[0]
    expected = np.diff(edge) / width * COUNT
    assert chi2.sf(((observed - expected) ** 2 / expected).sum(), bins - 1) > 1e-6
    assert kstest(number_N / float(sigma) * 1.15, "norm").pvalue < 1e-6
    assert draw_large_discrete_gaussian((2, 3), sigma).shape == (2, 3)


def test_parameters_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"must be at most 2\^50"):
        draw_large_discrete_gaussian((1,), Fraction(1 << 50) + 1)
    largest = len(noise._build_cdf_table("gaussian", Fraction(4097), 63 + 64).low) * ((1 << 50) // 4096 + 1)
    assert largest < 1 << 62


def test_the_shortcut_keeps_no_pair_that_could_be_rejected():
    """Pairs with y < 2^18 are kept if U < 1 - 2^-6; the probability of keeping them must be at least that."""
    for sigma in (Fraction(20_001), Fraction(40_959), Fraction(1 << 33), Fraction(1 << 50)):
        width = math.floor(sigma / 4096)
        largest_y = (2 * 4096**2 >> 7) - 1
        exponent = (2 * width * largest_y * (width - 1) + (width - 1) ** 2) / (2 * sigma**2)
        assert mpmath.exp(-mpmath.mpf(exponent.numerator) / exponent.denominator) >= 1 - mpmath.mpf(2) ** -6


def test_a_comparison_with_an_exponential_is_exact(monkeypatch):
    """The first bits decide where they can, and otherwise the next ones do."""
    asked = []

    def urandom(size, value=b"\x00"):
        asked.append(size)
        return value * size

    with mpmath.workdps(80):
        for exponent in (Fraction(1, 3), Fraction(7, 2), Fraction(1, 10**12), Fraction(40)):
            power = mpmath.exp(-mpmath.mpf(exponent.numerator) / exponent.denominator) * mpmath.mpf(2) ** 63
            border = int(mpmath.floor(power))
            for first_bits in (border - 10, border + 10, 0, (1 << 63) - 1):
                asked.clear()
                monkeypatch.setattr(noise.os, "urandom", urandom)
                assert noise._is_below_exp(first_bits, exponent) == (first_bits < power)
                assert not asked or abs(first_bits - border) < 6
            rest = int(mpmath.floor((power - border) * mpmath.mpf(2) ** 64))
            for bits, is_below in ((rest - 10, True), (rest + 10, False)):
                if 0 <= bits < 1 << 64:
                    monkeypatch.setattr(noise.os, "urandom", lambda size, bits=bits: bits.to_bytes(size, "big"))
                    assert noise._is_below_exp(border, exponent) == is_below


def test_uniform_integers_are_uniform():
    for limit in (1, 2, 5, 64, 65):
        count = np.bincount(noise._draw_uniform_integers(limit, COUNT), minlength=limit)
        assert len(count) == limit and count.sum() == COUNT
        expected = COUNT / limit
        assert limit == 1 or chi2.sf(((count - expected) ** 2 / expected).sum(), limit - 1) > 1e-6
