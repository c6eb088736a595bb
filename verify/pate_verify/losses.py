"""Bounds on epsilon that need more than mpmath: convolved privacy losses, and DP-SGD by dp-accounting.

NumPy, SciPy and dp-accounting come with ``pip install 'pate-verify[losses]'``. ``costs`` imports this module where an
event needs it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.special import log_ndtr, ndtr

from pate_verify.events import LIMITS_TEXT, MAX_LOSS, PURE_KINDS, Event, get_max_loss, sum_squared_mu

MAX_STEPS = 10**6
_GRID_STEP, _MAX_GRID_CELLS = 5e-5, 1 << 21
_MAX_WIDTH = 40 * _GRID_STEP * _MAX_GRID_CELLS


def compute_sampled_divergence(e: Event, a: float) -> float:
    """Compute the Renyi divergence of order a of one step of the sampled Gaussian by a sum over a grid.

    Source: Mironov, Talwar & Zhang 2019, section 3.3.
    """
    q, z = e["rate"], e["noise_multiplier"]
    if e["steps"] > MAX_STEPS or z < 0.3:
        raise ValueError(f"sampled Gaussian with {e['steps']} steps, noise multiplier {z:g}: the check {LIMITS_TEXT}")
    x = np.arange(-40 * z, a + 40 * z, min(z, z * z) / 16)
    ratio = np.logaddexp(math.log1p(-q) if q < 1 else -math.inf, math.log(q) + (2 * x - 1) / (2 * z * z))
    density = -(x**2) / (2 * z * z) + math.log((x[1] - x[0]) / (z * math.sqrt(2 * math.pi)))
    return max(0.0, float(np.logaddexp.reduce(density + a * ratio)) / (a - 1))


def convolve_losses(events: Sequence[Event], delta: float) -> tuple[float, float]:
    """Bound epsilon by convolving the privacy loss distributions, with losses rounded down and up to a grid.

    For the upper bound, a bounded range of eta is replaced by an eta-DP event. For the lower bound, it is replaced by
    randomized response with eta / 2, and every event by a function of it (``_round_down``), so that no event lowers the
    bound. A rho-zCDP event is replaced by the Gaussian mechanism with the same rho.

    Source: Sommer, Meiser & Mohammadi 2019; Koskela, Jälkö & Honkela 2020.
    """
    pure_events = [e for e in events if e["kind"] in PURE_KINDS]
    mu2, width = sum_squared_mu(events), compute_width(events)
    step = max(min(_GRID_STEP, min(map(get_max_loss, pure_events)) / 16), width / _MAX_GRID_CELLS)
    # Half of the most frequent loss is also a multiple of the step.
    half_loss = get_max_loss(max(pure_events, key=lambda e: e["count"])) / 2
    step = max(step, half_loss / max(1, half_loss // step))
    size = 1 << math.ceil(math.log2(max(width / step, 64)))
    grid, epsilons = np.arange(-size // 2, size // 2 + 1), []
    for rounds_up in (False, True):
        transform = np.ones(size // 2 + 1, dtype=complex)
        bounded_events = pure_events if rounds_up else [_round_down(e, step) for e in pure_events]
        for e in (*bounded_events, {"kind": "gaussian", "mu": math.sqrt(mu2), "count": 1}) if mu2 else bounded_events:
            mass = np.diff(_compute_loss_cdf(e, (grid + (1e-9 if rounds_up else -1e-9)) * step))
            transform *= np.fft.rfft(np.roll(mass, size // 2 + rounds_up)) ** e["count"]
        mass = np.roll(np.fft.irfft(transform, size), size // 2)
        epsilons.append(_compute_epsilon(grid[:-1] * step, mass, delta + (-1 if rounds_up else 1) * size * 1e-15))
    return epsilons[0], epsilons[1]


def select_convolvable(events: Sequence[Event]) -> list[Event]:
    """Select the events whose losses the grid resolves: no loss above ``MAX_LOSS``, and a width that is not too large.

    The events with the largest losses are left out first, because the others would vanish beside them.
    """
    selected = [e for e in events if e["kind"] not in PURE_KINDS or get_max_loss(e) <= MAX_LOSS]
    selected.sort(key=lambda e: compute_width([e]))
    while selected and compute_width(selected) > _MAX_WIDTH:
        selected.pop()
    return selected


def compute_width(events: Sequence[Event]) -> float:
    """Compute the width of the grid of losses."""
    pure_events = [e for e in events if e["kind"] in PURE_KINDS]
    deviation = math.sqrt(sum_squared_mu(events) + math.fsum(e["count"] * get_max_loss(e) ** 2 for e in pure_events))
    return 2 * (deviation**2 / 2 + 12 * deviation)


def bound_single_loss(e: Event, delta: float) -> float:
    """Bound epsilon from below by that of one run of the event."""
    loss = get_max_loss(e)
    if e["kind"] == "laplace":
        return max(0.0, loss + 2 * math.log1p(-delta))
    loss /= 2 if e["kind"] == "bounded_range" else 1
    return max(0.0, loss + math.log1p(-min(delta * (1 + math.exp(-loss)), 1 - 1e-16)))


def _round_down(e: Event, step: float) -> Event:
    """Replace an event by a function of it, whose largest loss is a multiple of the step.

    A Laplace number with more noise is a Laplace number to which further noise was added.
    """
    loss = get_max_loss(e) / (2 if e["kind"] == "bounded_range" else 1)
    loss = math.floor(loss / step * (1 + 1e-12)) * step
    if e["kind"] == "laplace" and loss:
        return {"kind": "laplace", "count": e["count"], "ratio": loss}
    return {"kind": "pure", "count": e["count"], "epsilon": loss}


def _compute_loss_cdf(e: Event, x: np.ndarray) -> np.ndarray:
    if e["kind"] == "gaussian":
        return ndtr(x / e["mu"] - e["mu"] / 2)
    bound = get_max_loss(e)
    inner = np.exp(np.minimum(x - bound, 0) / 2) / 2 if e["kind"] == "laplace" else 1 - 1 / (1 + math.exp(-bound))
    return np.where(x < -bound, 0, np.where(x < bound, inner, 1))


def _compute_epsilon(loss: np.ndarray, mass: np.ndarray, delta: float) -> float:
    """Compute the least epsilon with P(loss >= t) - exp(epsilon) E[exp(-loss); loss >= t] <= delta for all t."""
    loss, mass = loss[::-1], mass[::-1]
    loss, mass = (x[(loss > 0) & (mass > 0)] for x in (loss, mass))
    tail_mass, log_weighted_tail = np.cumsum(mass), np.logaddexp.accumulate(np.log(mass) - loss)
    is_above_delta = tail_mass > delta
    return float((np.log(tail_mass[is_above_delta] - delta) - log_weighted_tail[is_above_delta]).max(initial=0))


def compose_sampled_losses(events: Sequence[Event], delta: float) -> tuple[float, float]:
    """Bound epsilon of events, some of which are DP-SGD, by composing the distributions of dp-accounting.

    For the lower bound, a bounded range of eta is replaced by randomized response with eta / 2, and a rho-zCDP event by
    the Gaussian mechanism with this rho. The upper bound, of eta-DP and of this Gaussian, does not hold for zCDP.
    """
    num_steps = sum(e["count"] * e.get("steps", 1) for e in events)
    interval, slack = _choose_interval(num_steps), 1e-14 * num_steps  # largest error of delta by so many convolutions
    epsilons = []
    for is_upper in (False, True):
        parts = [_make_distribution(e, interval, is_upper) for e in events if e["kind"] not in ("gaussian", "zcdp")]
        if mu2 := sum_squared_mu(events):
            parts.append(_make_distribution({"kind": "gaussian", "mu": math.sqrt(mu2), "count": 1}, interval, is_upper))
        composed = functools.reduce(lambda first, second: first.compose(second), parts)
        left = delta + (-slack if is_upper else slack)
        epsilons.append(composed.get_epsilon_for_delta(left) if left > 0 else math.inf)
    return epsilons[0], epsilons[1]


def _choose_interval(num_steps: int) -> float:
    return max(1e-5, min(_GRID_STEP, 0.05 / num_steps))  # rounding changes each loss by at most half an interval


def _make_distribution(e: Event, interval: float, is_upper: bool) -> Any:
    """Make the privacy loss distribution of all runs of an event, with losses rounded up or down."""
    from dp_accounting.pld import privacy_loss_distribution as library

    options = {"pessimistic_estimate": is_upper, "value_discretization_interval": interval}
    if e["kind"] == "sampled_gaussian":
        return _compose_steps(e["rate"], e["noise_multiplier"], e["count"] * e["steps"], interval, is_upper)
    if e["kind"] in ("gaussian", "laplace"):
        make = library.from_gaussian_mechanism if e["kind"] == "gaussian" else library.from_laplace_mechanism
        scale = 1 / (e["mu"] if e["kind"] == "gaussian" else e["ratio"])
        return make(scale, use_connect_dots=is_upper, **options).self_compose(e["count"])
    loss = get_max_loss(e) / (2 if e["kind"] == "bounded_range" and not is_upper else 1)
    return library.from_randomized_response(2 / (1 + math.exp(loss)), 2, **options).self_compose(e["count"])


@functools.lru_cache(maxsize=32)
def _compose_steps(rate: float, noise: float, steps: int, interval: float, is_upper: bool) -> Any:
    from dp_accounting.pld import privacy_loss_distribution as library

    options = {"pessimistic_estimate": is_upper, "use_connect_dots": is_upper, "sampling_prob": rate}
    return library.from_gaussian_mechanism(noise, value_discretization_interval=interval, **options).self_compose(steps)


@functools.cache
def compute_sampled_mu(rate: float, noise: float, steps: int, failure_delta: float) -> float:
    """Compute the largest mu over a grid of e with delta_mu(e) = (delta(e) - failure_delta) / (1 - failure_delta)."""
    distribution = _compose_steps(rate, noise, steps, _choose_interval(steps), True)
    grid = np.linspace(0, distribution.get_epsilon_for_delta(failure_delta), 2000)
    target = (distribution.get_delta_for_epsilon(grid) - failure_delta) / (1 - failure_delta)
    low, high = np.full_like(grid, -16.0), np.full_like(grid, 8.0)  # logarithms of mu
    for _ in range(60):
        mu = np.exp((low + high) / 2)
        is_below = ndtr(mu / 2 - grid / mu) - np.exp(grid + log_ndtr(-mu / 2 - grid / mu)) < target
        low, high = np.where(is_below, np.log(mu), low), np.where(is_below, high, np.log(mu))
    return float(np.exp(high.max()))
