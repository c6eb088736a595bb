"""Calibration of noise: the smallest noise whose cost is at most a target epsilon."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from scipy.optimize import brentq

from pate_torch.accounting.accountant import compute_guarantee, compute_route_epsilons
from pate_torch.accounting.costs import Cost
from pate_torch.accounting.events import PrivacyEvent, SampledGaussianEvent
from pate_torch.core import checks

_MIN_SIGMA, _MAX_SIGMA = 1e-9, 1e12
_MAX_SECANT_STEPS, _SECANT_TOLERANCE = 8, 1e-6
_EPSILON_RELATIVE_MARGIN = 1e-11  # keeps the cost below epsilon after rounding


def compute_epsilon(
    cost: Cost | Sequence[Cost], num_queries: int | Sequence[int], *, delta: float, accountant: str = "best"
) -> float:
    """Compute epsilon of ``num_queries`` queries, or of several mechanisms together, for any votes.

    Args:
        cost: Cost of a mechanism, or costs of the mechanisms that are composed.
        num_queries: Number of queries, fixed beforehand, or one number for each cost.
        delta: Delta at which epsilon is computed.
        accountant: "best" (smallest epsilon), "gdp" (exact, for continuous Gaussian noise), "pld" (privacy loss
            distribution of dp-accounting, rounded up), "rdp" (best real order), "zcdp" or "pure".
    """
    return min(compute_route_epsilons(_list_events(cost, num_queries), delta, accountant).values())


def calibrate_noise(
    make_cost: Callable[[float], Cost | Sequence[Cost]],
    num_queries: int | Sequence[int],
    *,
    epsilon: float,
    delta: float,
    accountant: str = "best",
) -> float:
    """Compute the smallest noise, in votes, with which ``num_queries`` queries cost at most epsilon at delta.

    ``make_cost`` maps the noise to a cost or several costs: ``GaussianNoisyMaxCost``, or ``lambda sigma:
    ConfidentCost(sigma, screen_sigma=4 * sigma)``.
    """
    return calibrate_sigma(
        lambda sigma: _list_events(make_cost(sigma), num_queries), epsilon=epsilon, delta=delta, accountant=accountant
    )


def _list_events(cost: Cost | Sequence[Cost], num_queries: int | Sequence[int]) -> list[PrivacyEvent]:
    costs, numbers = cost if isinstance(cost, Sequence) else [cost], np.ravel(num_queries).tolist()
    if not all(isinstance(one_cost, Cost) for one_cost in costs):
        raise checks.error("cost", cost, "must be a cost, such as GaussianNoisyMaxCost(sigma), or several costs")
    if len(costs) != len(numbers):
        raise checks.error("num_queries", num_queries, f"must be one number for each cost ({len(costs)})")
    pairs = [(p, checks.integer("num_queries", n, low=0)) for p, n in zip(costs, numbers, strict=True)]
    return [event for one_cost, number in pairs for event in one_cost.privacy_events(number)]


def calibrate_sigma(
    make_events: Callable[[float], Iterable[PrivacyEvent]], *, epsilon: float, delta: float, accountant: str = "best"
) -> float:
    """Compute the smallest sigma for which ``make_events(sigma)`` costs at most epsilon, with relative error 1e-9.

    Args:
        make_events: Function from sigma, in votes, to the worst-case events of the whole release. Their cost must
            decrease as sigma increases.
        epsilon: Target epsilon, at ``delta``.
        delta: Target delta.
        accountant: Name of the accountant ("gdp", "rdp", ...), or "best" if the smallest cost counts.

    Raises:
        ValueError: No sigma up to 1e12 reaches epsilon.
    """
    target = checks.positive("epsilon", epsilon) * (1 - _EPSILON_RELATIVE_MARGIN)
    checks.delta("delta", delta)

    def compute_excess(log_sigma: float) -> float:
        route_epsilons = compute_route_epsilons(make_events(math.exp(log_sigma)), delta, accountant).values()
        return min(*route_epsilons, 1e12) - target

    low = high = 0.0
    while compute_excess(high) > 0:
        low, high = high, high + math.log(2)
        if high > math.log(_MAX_SIGMA):
            rule = f"is out of reach of any noise up to sigma={_MAX_SIGMA:g}"
            raise checks.error("epsilon", epsilon, rule, "Use a larger epsilon or delta.")
    while compute_excess(low) <= 0:
        low, high = low - math.log(2), low
        if low < math.log(_MIN_SIGMA):
            return math.exp(low)
    root = brentq(compute_excess, low, high, xtol=1e-11, rtol=1e-12)
    step = 1e-11
    while compute_excess(root) > 0:
        root, step = root + step, 2 * step
    return math.exp(root)


def calibrate_sampled_gaussian(rate: float, steps: int, *, epsilon: float, delta: float) -> float:
    """Compute the noise multiplier for which a run of DP-SGD costs epsilon, by a secant search from the Renyi cost."""

    def make_events(multiplier: float) -> tuple[PrivacyEvent, ...]:
        return (SampledGaussianEvent(rate=rate, noise_multiplier=multiplier, steps=steps),)

    multiplier = smallest = calibrate_sigma(make_events, epsilon=epsilon, delta=delta, accountant="rdp")
    log_step, slope, last_excess = 0.0, -1.0, math.inf
    for _ in range(_MAX_SECANT_STEPS):
        excess = compute_guarantee(make_events(multiplier), delta).epsilon / epsilon - 1
        if excess <= 0:
            smallest = min(smallest, multiplier)
            if excess > -_SECANT_TOLERANCE:
                break
        slope = min((excess - last_excess) / log_step, -0.1) if log_step else slope
        log_step, last_excess = (excess + _SECANT_TOLERANCE / 2) / -slope, excess
        multiplier *= math.exp(log_step)
    return smallest
