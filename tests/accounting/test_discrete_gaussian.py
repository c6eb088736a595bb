"""The cost of discrete Gaussian noise, against exact laws: sums over all integers, and convolutions of shares."""

import math

import numpy as np
import pytest
from mpmath import mp

from pate_torch.accounting import discrete_gaussian
from pate_torch.accounting.accountant import compute_guarantee
from pate_torch.accounting.calibration import calibrate_sigma
from pate_torch.accounting.discrete_gaussian import bound_log_ratio, make_events
from pate_torch.accounting.events import DeltaEvent, GaussianEvent, ZCDPEvent
from pate_torch.mechanisms.gradient_descent import GradientDescent


@pytest.mark.parametrize("sigma", [5, 30, 1000])
def test_the_law_is_nearly_that_of_a_rounded_gaussian_number(sigma):
    with mp.workdps(60):
        total = sigma * mp.sqrt(2 * mp.pi)  # of all integers, by Poisson summation with an error below 1e-200
        errors = []
        for sds in (0, 1, 5, 12, 20, 24):
            z = mp.mpf(int(sds * sigma))
            rounded = (mp.erf((z + 0.5) / sigma / mp.sqrt(2)) - mp.erf((z - 0.5) / sigma / mp.sqrt(2))) / 2
            rounded = mp.quad(lambda x: mp.npdf(x, 0, sigma), [z - 0.5, z + 0.5]) if rounded < 1e-30 else rounded
            errors.append(abs(mp.log(mp.exp(-(z**2) / (2 * mp.mpf(sigma) ** 2)) / total / rounded)))
    bound = bound_log_ratio(sigma**2)
    assert all(error <= bound for error in errors) and max(errors) > 0.1 * bound
    assert max(errors) > (discrete_gaussian._TAIL_SDS**2 - 1) / (30 * sigma**2)  # the first order is z^2/24


def compute_exact_delta(epsilon, shift, sigma):
    z = np.arange(-int(9 * sigma), int(9 * sigma) + 1, dtype=np.float64)
    p = np.exp(-(z**2) / (2 * sigma**2))
    shifted = np.exp(-((z - shift) ** 2) / (2 * sigma**2))
    return float(np.maximum(p - math.exp(epsilon) * shifted, 0).sum() / p.sum())


@pytest.mark.parametrize("epsilon", [0.1, 1.0])
def test_the_cost_covers_the_exact_delta_also_where_the_laws_differ(monkeypatch, epsilon):
    """With so little noise the laws differ visibly; the delta of the cost covers the difference at every epsilon."""
    monkeypatch.setattr(discrete_gaussian, "_MAX_LAW_DELTA", 1.0)
    for sigma, shift in ((60.0, 30), (300.0, 100)):
        gaussian, failure = make_events(shift / sigma, sigma**2, numbers=1)
        delta = compute_exact_delta(epsilon, shift, sigma)
        assert compute_guarantee((gaussian, failure), delta + failure.delta).epsilon >= epsilon
        assert failure.delta > 6 * bound_log_ratio(sigma**2)


def test_the_cost_is_gaussian_with_a_small_delta_or_zcdp():
    gaussian, failure = make_events(0.1, 1e18, numbers=1000, count=16)
    assert gaussian == GaussianEvent(mu=0.1 * (1 + 1e-12), count=16)
    assert isinstance(failure, DeltaEvent) and failure.count == 16 and 1e-60 < failure.delta < 1e-12
    (event,) = make_events(0.1, 100.0, numbers=1000, count=16)
    assert isinstance(event, ZCDPEvent) and event.count == 16 and event.rho == pytest.approx(0.005, rel=1e-9)
    assert isinstance(make_events(4.5, 1e18, numbers=1)[0], ZCDPEvent)
    assert all(event.count == 0 for event in make_events(0.1, 1e18, numbers=1, count=0))


@pytest.mark.parametrize("epsilon", [0.1, 0.5, 1.0, 4.0])
def test_discrete_noise_of_gradients_costs_hardly_more_than_continuous_noise(epsilon):
    sigmas = {}
    for noise in ("torch", "discrete"):

        def make(sigma, noise=noise):
            mechanism = GradientDescent(sigma=sigma, adjacency="add_remove", steps=8, clip_norm=0.5, noise=noise)
            return mechanism.privacy_events(1)

        sigmas[noise] = calibrate_sigma(make, epsilon=epsilon, delta=1e-5)
        assert compute_guarantee(make(sigmas[noise]), 1e-5).epsilon <= epsilon
    assert 1 <= sigmas["discrete"] / sigmas["torch"] < (1.00005 if epsilon < 2 else 1.12)
