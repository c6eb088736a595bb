"""The Gaussian that dominates DP-SGD, against the mechanism's own curve in 30 digits."""

import math
from dataclasses import replace

import mpmath as mp
import numpy as np
import pytest

from pate_torch.accounting import domination, gdp, pld, rdp
from pate_torch.accounting.accountant import compute_guarantee
from pate_torch.accounting.domination import compute_dominating_gaussian, is_dominated
from pate_torch.accounting.events import DeltaEvent, GaussianEvent, LaplaceEvent, SampledGaussianEvent

ABADI = SampledGaussianEvent(rate=0.01, noise_multiplier=1.0, steps=1000)


def exact_gaussian_delta(mu, epsilon):
    with mp.workdps(30):
        m, e = mp.mpf(mu), mp.mpf(epsilon)
        return mp.ncdf(m / 2 - e / m) - mp.exp(e) * mp.ncdf(-m / 2 - e / m)


def exact_step_delta(q, z, epsilon):
    """delta of one step in the larger direction, in closed form: the loss is monotone in the noisy sum x."""
    with mp.workdps(30):
        q, z, e = mp.mpf(q), mp.mpf(z), mp.mpf(epsilon)
        mixture = lambda x: (1 - q) * mp.ncdf(x / z) + q * mp.ncdf((x - 1) / z)  # noqa: E731
        where = lambda loss: z**2 * mp.log((mp.exp(loss) - (1 - q)) / q) + mp.mpf(1) / 2  # noqa: E731
        x = where(e)  # remove: the mixture is exp(e) times as likely as N(0, z^2) above x
        remove = 1 - mixture(x) - mp.exp(e) * mp.ncdf(-x / z)
        if mp.exp(-e) <= 1 - q:  # add: N(0, z^2) is nowhere exp(e) times as likely as the mixture
            return remove
        x = where(-e)
        return max(remove, mp.ncdf(x / z) - mp.exp(e) * mixture(x))


def composed_delta(q, z, steps, epsilon, direction, low=-14.0, high=16.0, num=481):
    """delta of some steps by direct integration over the noisy sums of all steps, without any grid of losses."""
    x = np.linspace(low * z, high * z, num)
    weight = np.full(num, x[1] - x[0])
    density_0 = np.exp(-((x / z) ** 2) / 2) / (z * math.sqrt(2 * math.pi))
    ratio = 1 - q + q * np.exp((2 * x - 1) / (2 * z * z))
    p, r = np.ones(1), np.ones(1)  # probability under N(0, z^2), and likelihood ratio, of all sums so far
    for _ in range(steps):
        p, r = np.outer(p, density_0 * weight).ravel(), np.outer(r, ratio).ravel()
    if direction == "remove":
        return float(p @ np.maximum(r - math.exp(epsilon), 0))
    return float(p @ np.maximum(1 - math.exp(epsilon) * r, 0))


def bound(mu, failure_delta, epsilon):
    return failure_delta + (1 - failure_delta) * exact_gaussian_delta(mu, epsilon)


def exceeded(exact_deltas, mu, failure_delta):
    """Whether the exact curve, delta by epsilon, is anywhere above the curve of the dominating mechanism."""
    return any(delta > bound(mu, failure_delta, epsilon) for epsilon, delta in exact_deltas.items())


@pytest.mark.parametrize(
    ("q", "z", "failure_delta"),
    [(0.3, 0.6, 1e-6), (0.01, 1.0, 1e-9), (0.99, 0.5, 1e-9)],
)
def test_one_step_is_dominated_in_both_directions_and_not_by_a_slightly_smaller_mu(q, z, failure_delta):
    event = SampledGaussianEvent(rate=q, noise_multiplier=z, steps=1)
    mu, top = compute_dominating_gaussian(event, failure_delta), pld.compute_epsilon([event], failure_delta)
    epsilons = [*np.linspace(0, top, 41), *np.linspace(top, 3 * top + 1, 5), *np.geomspace(1e-9, top, 10)]
    exact_deltas = {epsilon: exact_step_delta(q, z, epsilon) for epsilon in epsilons}
    assert not exceeded(exact_deltas, mu, failure_delta)
    assert exceeded(exact_deltas, mu * (1 - 3e-3), failure_delta)


@pytest.mark.parametrize(("q", "z", "steps", "num", "error"), [(0.2, 0.9, 2, 801, 2e-3), (0.05, 0.8, 3, 161, 0.02)])
def test_few_steps_are_dominated_in_both_directions_by_direct_integration(q, z, steps, num, error):
    """``error`` is what the kink of the integrand costs the trapezoidal rule, relative to delta."""
    event = SampledGaussianEvent(rate=q, noise_multiplier=z, steps=steps)
    mu, top = compute_dominating_gaussian(event, 1e-5), pld.compute_epsilon([event], 1e-5)
    exact_deltas = {
        epsilon: max(composed_delta(q, z, steps, epsilon, d, num=num) for d in ("add", "remove")) * (1 - error)
        for epsilon in (*np.linspace(0, 0.8 * top, 2), *np.linspace(0.85 * top, top, 4))
    }
    assert not exceeded(exact_deltas, mu, 1e-5) and exceeded(exact_deltas, 0.98 * mu, 1e-5)


def test_the_integration_finds_the_closed_form_of_a_step():
    for epsilon in (0.0, 0.2, 1.0):
        both = max(composed_delta(0.2, 0.9, 1, epsilon, d, num=20001) for d in ("add", "remove"))
        assert both == pytest.approx(float(exact_step_delta(0.2, 0.9, epsilon)), abs=1e-7)


def test_a_full_batch_is_the_gaussian_itself():
    event, exact = SampledGaussianEvent(rate=1.0, noise_multiplier=25.0, steps=300), math.sqrt(300) / 25
    assert 1 - 1e-6 < compute_dominating_gaussian(event, 1e-9) / exact < 1 + 2e-4
    generous = compute_dominating_gaussian(event, 1e-3)
    assert generous < exact * 1.0001
    epsilons = np.linspace(0, 1.5 * gdp.compute_epsilon(exact, 1e-3), 40)
    assert not exceeded({epsilon: exact_gaussian_delta(exact, epsilon) for epsilon in epsilons}, generous, 1e-3)


def test_the_oracle_of_a_thousand_steps():
    mu = compute_dominating_gaussian(ABADI, 1e-6)
    assert gdp.compute_epsilon(mu, 1e-5 - 1e-6) == pytest.approx(1.832, abs=1e-3)
    assert pld.compute_epsilon([ABADI], 1e-5) == pytest.approx(1.829, abs=1e-3)
    assert rdp.compute_epsilon([ABADI], 1e-5) == pytest.approx(2.101, abs=1e-3)


def test_a_slightly_smaller_mu_is_rejected():
    """The result is a power of exp(1e-4), and the power below it fails the same check."""
    run = SampledGaussianEvent(rate=0.3, noise_multiplier=0.6, steps=1)
    mu, last = compute_dominating_gaussian(run, 1e-6), pld.compute_epsilon([run], 1e-6)
    epsilons = np.linspace(0, last, domination._NUM_INTERVALS + 1)
    deltas = np.array([pld.compute_delta([run], e) for e in epsilons])
    assert is_dominated(epsilons, deltas, mu, 1e-6) and is_dominated(epsilons, deltas, 2 * mu, 1e-6)
    assert not is_dominated(epsilons, deltas, mu * math.exp(-1e-4), 1e-6)
    assert math.log(mu) / 1e-4 == pytest.approx(round(math.log(mu) / 1e-4), abs=1e-6)


def test_the_check_holds_between_its_points():
    """A curve that touches the Gaussian's at distant points may lie above it between them, as its chord does."""
    epsilons = np.array([0.0, 1.5, 3.0])
    touching = np.array([gdp.compute_delta(e, 1.0) for e in epsilons])
    assert not is_dominated(epsilons, touching, 1.0, 1e-12)
    fine = np.linspace(0, 3, 4097)
    smooth = np.array([gdp.compute_delta(e, 1.0) for e in fine])
    assert not is_dominated(fine, smooth, 1.0, 1e-12) and is_dominated(fine, smooth, 1.0001, 1e-12)


def test_it_is_cached():
    first, hits = compute_dominating_gaussian(ABADI, 1e-6), domination._compute_mu.cache_info().hits
    same = replace(ABADI, count=3, failure_delta=1e-6)
    assert compute_dominating_gaussian(same, 1e-6) == first and domination._compute_mu.cache_info().hits == hits + 1


@pytest.fixture
def few_intervals(monkeypatch):
    """A tenth of the points at which a curve is compared: mu is a little larger, and found sooner."""
    monkeypatch.setattr(domination, "_NUM_INTERVALS", 60)
    domination._compute_mu.cache_clear()
    yield
    domination._compute_mu.cache_clear()


def test_what_cannot_be_shown_is_refused(few_intervals):
    loud = SampledGaussianEvent(rate=1.0, noise_multiplier=0.1, steps=1000)
    with pytest.raises(ValueError, match=r"no Gaussian mechanism is known.*filter=rdp"):
        compute_dominating_gaussian(loud, 1e-6)
    with pytest.raises(ValueError, match=r"no Gaussian mechanism is known.*filter=rdp"):
        compute_dominating_gaussian(ABADI, 1e-12)  # rounding errors of 1,000 convolutions reach 1e-11
    with pytest.raises(ValueError, match="failure_delta"):
        compute_dominating_gaussian(ABADI, 0.0)


def test_more_failures_more_noise_and_fewer_steps_lower_mu(few_intervals):
    fields = {"rate": 0.3, "noise_multiplier": 2.0, "steps": 10}
    event = SampledGaussianEvent(**fields)
    mu = compute_dominating_gaussian(event, 1e-6)
    assert compute_dominating_gaussian(event, 1e-8) > mu > compute_dominating_gaussian(event, 1e-4)
    for change in ({"rate": 0.33}, {"noise_multiplier": 1.9}, {"steps": 11}):
        assert compute_dominating_gaussian(SampledGaussianEvent(**fields | change), 1e-6) > mu


def test_events_with_a_failure_probability_are_replaced_and_others_stay(few_intervals):
    event = SampledGaussianEvent(rate=0.3, noise_multiplier=2.0, steps=10, failure_delta=1e-6, count=2)
    others = (SampledGaussianEvent(rate=0.3, noise_multiplier=2.0, steps=10), LaplaceEvent(ratio=0.1))
    mu = compute_dominating_gaussian(event, 1e-6)
    gaussian, failure = GaussianEvent(mu=mu, count=2), DeltaEvent(delta=1e-6, count=2)
    assert domination.replace_sampled_gaussians((*others, event)) == (*others, gaussian, failure)
    both = (GaussianEvent(mu=0.3, count=10), event)
    guarantee = compute_guarantee(both, 1e-5)
    assert guarantee.route == "gdp"
    assert guarantee.epsilon == gdp.compute_epsilon(math.sqrt(10 * 0.09 + 2 * mu**2), 1e-5 - 2e-6)
