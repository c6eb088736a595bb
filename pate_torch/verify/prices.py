"""Bounds on epsilon of privacy events, implemented from the papers and independent of ``pate_torch.accounting``.

An event is a mapping with kind, scale and count, as in ``release.json``. If several mechanisms have the same event, the
lower bound is the cost of one of them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from mpmath import mp, mpf
from scipy.special import log_ndtr, ndtr

Event = Mapping[str, Any]
PURE_KINDS = {"laplace": "ratio", "pure": "epsilon", "bounded_range": "eta"}
"""Kind of an event with a bounded privacy loss -> key of the bound."""
_ORDERS = [1 + 10 ** (k / 50) for k in range(-100, 201)]  # Renyi orders from 1.01 to 10,001, 5 % apart in a - 1
_GRID_STEP, _MAX_GRID_CELLS = 2.5e-4, 1 << 21
MAX_STEPS = 10**6
LIMITS_TEXT = f"needs at most {MAX_STEPS} steps, a noise multiplier of at least .3, and epsilon below 100"


@dataclass(frozen=True)
class EpsilonBounds:
    """Bounds ``low`` <= epsilon <= ``high``, and the name of their derivation."""

    low: float
    high: float
    derivation: str


def compute_bounds(events: Sequence[Event], delta: float) -> EpsilonBounds:
    """Bound the smallest epsilon for which these non-adaptive events are (epsilon, delta)-DP."""
    rest = delta - sum_failures([e for e in events if e["kind"] == "delta"])
    losses = [e for e in events if e["kind"] != "delta" and e["count"]]
    kinds = {e["kind"] for e in losses}
    pure_epsilon = math.fsum(e["count"] * get_max_loss(e) for e in losses)  # Dwork et al. 2006: epsilons add up
    if rest < 0 or (rest == 0 and pure_epsilon == math.inf):
        return EpsilonBounds(math.inf, math.inf, "the failure probability of the events exceeds delta")
    if not losses:
        failure = f"only a failure of probability {delta - rest:.6g}"
        return EpsilonBounds(0.0, 0.0, failure if rest < delta else "nothing was released")
    if kinds == {"gaussian"}:
        epsilon = compute_gaussian_epsilon(math.sqrt(math.fsum(e["count"] * e["mu"] ** 2 for e in losses)), rest)
        return EpsilonBounds(epsilon, epsilon, "exact Gaussian, 50 digits")
    low, high, derivation = 0.0, min(compute_renyi_epsilon(losses, rest), pure_epsilon), "Renyi"
    if known_events := [e for e in losses if e["kind"] in {*PURE_KINDS, "gaussian", "zcdp"}]:
        low, upper = convolve_losses(known_events, rest)
        if kinds <= {*PURE_KINDS, "gaussian"}:
            high, derivation = min(high, upper), "Renyi, and losses convolved"
    for event in (e for e in losses if e["kind"] == "sampled_gaussian"):
        if high > 100:
            raise ValueError(f"sampled Gaussian with epsilon {high:.6g}: the check {LIMITS_TEXT}")
        lower, upper = compute_sampled_bounds(event, rest)
        low = max(low, lower)
        if len(losses) == 1:
            high, derivation = min(high, upper), "Renyi, and the privacy loss distribution of dp-accounting"
        elif kinds <= {"gaussian", "sampled_gaussian"} and 0 < (left := rest - sum_failures(losses)) < rest:
            mu2 = math.fsum(e["count"] * compute_dominating_mu(e) ** 2 for e in losses)
            high, derivation = min(high, compute_gaussian_epsilon(math.sqrt(mu2), left)), "a Gaussian above DP-SGD"
    return EpsilonBounds(low, high, derivation)


def sum_failures(events: Sequence[Event]) -> float:
    """Sum the probabilities of failures, also those at which a Gaussian mechanism dominates DP-SGD."""
    return math.fsum(e["count"] * e.get("delta", e.get("failure_delta", 0)) for e in events)


def compute_dominating_mu(event: Event) -> float:
    """Compute the smallest mu for which mu-GDP dominates the event, DP-SGD up to its failure probability.

    Source: Dong, Roth & Su 2022.
    """
    if event["kind"] == "gaussian":
        return float(event["mu"])
    if event["kind"] == "sampled_gaussian":
        scales = (event[key] for key in ("rate", "noise_multiplier", "steps", "failure_delta"))
        return _compute_sampled_mu(*scales) if event["failure_delta"] else 1e6  # more than any cap admits
    with mp.workdps(50):
        return float(2 * mp.sqrt(2) * mp.erfinv(mp.tanh(mpf(get_max_loss(event)) / 2)))


def get_max_loss(event: Event) -> float:
    """Return the largest privacy loss of an event; infinite if the loss is unbounded."""
    return float(event[PURE_KINDS[event["kind"]]]) if event["kind"] in PURE_KINDS else math.inf


@functools.cache
def compute_gaussian_epsilon(mu: float, delta: float) -> float:
    """Compute epsilon of mu-GDP. Source: Balle & Wang 2018, Theorem 8; Dong, Roth & Su 2022, Corollary 2.13."""
    with mp.workdps(50):
        m = mpf(mu)

        def compute_delta(e: mpf) -> mpf:
            return mp.ncdf(-e / m + m / 2) - mp.exp(e) * mp.ncdf(-e / m - m / 2)

        low, high = mpf(0), m * m / 2 + m * mp.sqrt(2 * mp.log(1 / mpf(delta)))
        if compute_delta(low) <= delta:
            return 0.0
        for _ in range(100):
            middle = (low + high) / 2
            low, high = (middle, high) if compute_delta(middle) > delta else (low, middle)
        return float(high)


def compute_renyi_epsilon(events: Sequence[Event], delta: float) -> float:
    """Compute epsilon by the best Renyi order of all curves. Source: Canonne, Kamath & Steinke 2020, Prop. 12."""
    tables = [set(e["orders"]) for e in events if e["kind"] == "rdp_curve"]
    orders = sorted(set.intersection(*tables)) if tables else _ORDERS
    if delta <= 0:
        return math.inf
    epsilons = (convert_divergence(a, compute_divergence(events, a), delta) for a in orders)
    return max(0.0, min(epsilons, default=math.inf))


def convert_divergence(a: float, divergence: float, delta: float) -> float:
    """Convert a Renyi divergence of order a to epsilon. Source: Canonne, Kamath & Steinke 2020, Prop. 12."""
    return divergence + math.log1p(-1 / a) - (math.log(delta) + math.log(a)) / (a - 1)


def compute_divergence(events: Sequence[Event], a: float) -> float:
    """Compute the Renyi divergence of order a of all events. Source: Mironov 2017, Proposition 1."""
    with mp.workdps(30):
        return float(sum(e["count"] * _DIVERGENCES[e["kind"]](e, mpf(a)) for e in events))


def _compute_laplace_divergence(e: Event, a: mpf) -> mpf:
    r = mpf(e["ratio"])
    return mp.log(a / (2 * a - 1) * mp.exp((a - 1) * r) + (a - 1) / (2 * a - 1) * mp.exp(-a * r)) / (a - 1)


def _compute_pure_divergence(e: Event, a: mpf) -> mpf:
    p, q = (1 / (1 + mp.exp(sign * mpf(e["epsilon"]))) for sign in (-1, 1))
    return mp.log(p**a * q ** (1 - a) + q**a * p ** (1 - a)) / (a - 1)


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


_DIVERGENCES: dict[str, Callable[[Any, Any], Any]] = {
    "gaussian": lambda e, a: a * mpf(e["mu"]) ** 2 / 2,  # Mironov 2017, Proposition 7
    "laplace": _compute_laplace_divergence,  # Mironov 2017, Proposition 6
    "pure": _compute_pure_divergence,  # Mironov 2017, Proposition 5, of the pair of Kairouz, Oh & Viswanath 2015
    "bounded_range": lambda e, a: min(mpf(e["eta"]), a * mpf(e["eta"]) ** 2 / 8),  # Cesar & Rogers 2021, Lemma 3.2
    "zcdp": lambda e, a: a * mpf(e["rho"]),  # Bun & Steinke 2016, Definition 1.1
    "rdp_curve": lambda e, a: mpf(dict(zip(e["orders"], e["rdp"], strict=True)).get(float(a), math.inf)),
    "sampled_gaussian": lambda e, a: e["steps"] * mpf(compute_sampled_divergence(e, float(a))),
}


def convolve_losses(events: Sequence[Event], delta: float) -> tuple[float, float]:
    """Bound epsilon by convolving the privacy loss distributions, with losses rounded down and up to a grid.

    For the upper bound, a bounded range of eta is replaced by an eta-DP event. For the lower bound, it is replaced by
    randomized response with eta / 2. A rho-zCDP event is replaced by the Gaussian mechanism with the same rho.

    Source: Sommer, Meiser & Mohammadi 2019; Koskela, Jälkö & Honkela 2020.
    """
    pure_events, normal_events = ([e for e in events if (e["kind"] in PURE_KINDS) == pure] for pure in (True, False))
    mu2 = math.fsum(e["count"] * (e["mu"] ** 2 if e["kind"] == "gaussian" else 2 * e["rho"]) for e in normal_events)
    if not pure_events:
        return (compute_gaussian_epsilon(math.sqrt(mu2), delta),) * 2
    deviation = math.sqrt(mu2 + math.fsum(e["count"] * get_max_loss(e) ** 2 for e in pure_events))
    width = 2 * (deviation**2 / 2 + 12 * deviation)
    step = max(min(_GRID_STEP, min(map(get_max_loss, pure_events)) / 16), width / _MAX_GRID_CELLS)
    # Half of the most frequent loss is also a multiple of the step.
    half_loss = get_max_loss(max(pure_events, key=lambda e: e["count"])) / 2
    step = max(step, half_loss / max(1, half_loss // step))
    size = 1 << math.ceil(math.log2(max(width / step, 64)))
    grid, epsilons = np.arange(-size // 2, size // 2 + 1), []
    for rounds_up in (False, True):
        transform = np.ones(size // 2 + 1, dtype=complex)
        for e in (*pure_events, {"kind": "gaussian", "mu": math.sqrt(mu2), "count": 1}) if mu2 else pure_events:
            mass = np.diff(_compute_loss_cdf(e, (grid + (1e-9 if rounds_up else -1e-9)) * step, rounds_up))
            transform *= np.fft.rfft(np.roll(mass, size // 2 + rounds_up)) ** e["count"]
        mass = np.roll(np.fft.irfft(transform, size), size // 2)
        epsilons.append(_compute_epsilon(grid[:-1] * step, mass, delta + (-1 if rounds_up else 1) * size * 1e-15))
    return epsilons[0], epsilons[1]


def _compute_loss_cdf(e: Event, x: np.ndarray, rounds_up: bool) -> np.ndarray:
    if e["kind"] == "gaussian":
        return ndtr(x / e["mu"] - e["mu"] / 2)
    bound = get_max_loss(e) / (2 if e["kind"] == "bounded_range" and not rounds_up else 1)
    inner = np.exp(np.minimum(x - bound, 0) / 2) / 2 if e["kind"] == "laplace" else 1 - 1 / (1 + math.exp(-bound))
    return np.where(x < -bound, 0, np.where(x < bound, inner, 1))


def _compute_epsilon(loss: np.ndarray, mass: np.ndarray, delta: float) -> float:
    """Compute the least epsilon with P(loss >= t) - exp(epsilon) E[exp(-loss); loss >= t] <= delta for all t."""
    loss, mass = loss[::-1], mass[::-1]
    loss, mass = (x[(loss > 0) & (mass > 0)] for x in (loss, mass))
    tail_mass, log_weighted_tail = np.cumsum(mass), np.logaddexp.accumulate(np.log(mass) - loss)
    is_above_delta = tail_mass > delta
    return float((np.log(tail_mass[is_above_delta] - delta) - log_weighted_tail[is_above_delta]).max(initial=0))


def compute_sampled_bounds(e: Event, delta: float) -> tuple[float, float]:
    """Bound epsilon of the sampled Gaussian by the privacy loss distributions of dp-accounting."""
    scales = (e["rate"], e["noise_multiplier"], e["count"] * e["steps"])
    slack = 1e-14 * e["count"] * e["steps"]  # largest error of delta by so many convolutions
    low = _compose_steps(*scales, pessimistic=False).get_epsilon_for_delta(delta + slack)
    if delta <= slack:
        return low, math.inf
    return low, _compose_steps(*scales, pessimistic=True).get_epsilon_for_delta(delta - slack)


@functools.lru_cache(maxsize=8)
def _compose_steps(rate: float, noise: float, steps: int, *, pessimistic: bool) -> Any:
    from dp_accounting.pld import privacy_loss_distribution as library

    step = max(1e-5, min(_GRID_STEP / 5, 0.05 / steps))  # rounding changes each loss by at most half a step
    options = {"pessimistic_estimate": pessimistic, "use_connect_dots": pessimistic, "sampling_prob": rate}
    return library.from_gaussian_mechanism(noise, value_discretization_interval=step, **options).self_compose(steps)


@functools.cache
def _compute_sampled_mu(rate: float, noise: float, steps: int, failure_delta: float) -> float:
    """Compute the largest mu over a grid of e with delta_mu(e) = (delta(e) - failure_delta) / (1 - failure_delta)."""
    distribution = _compose_steps(rate, noise, steps, pessimistic=True)
    grid = np.linspace(0, distribution.get_epsilon_for_delta(failure_delta), 2000)
    target = (distribution.get_delta_for_epsilon(grid) - failure_delta) / (1 - failure_delta)
    low, high = np.full_like(grid, -16.0), np.full_like(grid, 8.0)  # logarithms of mu
    for _ in range(60):
        mu = np.exp((low + high) / 2)
        is_below = ndtr(mu / 2 - grid / mu) - np.exp(grid + log_ndtr(-mu / 2 - grid / mu)) < target
        low, high = np.where(is_below, np.log(mu), low), np.where(is_below, high, np.log(mu))
    return float(np.exp(high.max()))
