"""Calibration of noise: the smallest noise whose price is at most a target epsilon."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from scipy.optimize import brentq

from pate_torch.accounting.accountant import compute_route_epsilons
from pate_torch.accounting.events import PrivacyEvent
from pate_torch.core import checks

_MIN_SIGMA, _MAX_SIGMA = 1e-9, 1e12
_EPSILON_RELATIVE_MARGIN = 1e-11  # keeps the price below epsilon after rounding


def compute_epsilon(events: Iterable[PrivacyEvent], delta: float, route: str | None = None) -> float:
    """Compute epsilon of the events by one route, or the smallest over all routes if ``route`` is None."""
    epsilon_by_route = compute_route_epsilons(events, delta)
    if route is None or set(epsilon_by_route) <= {"none", "delta"}:
        return min(epsilon_by_route.values())
    if route not in epsilon_by_route:
        raise checks.error("route", route, f"must be a route that prices these events: {', '.join(epsilon_by_route)}")
    return epsilon_by_route[route]


def calibrate_sigma(
    make_events: Callable[[float], Iterable[PrivacyEvent]], *, epsilon: float, delta: float, route: str | None = None
) -> float:
    """Compute the smallest sigma for which ``make_events(sigma)`` costs at most epsilon, with relative error 1e-9.

    Args:
        make_events: Function from sigma, in votes, to the worst-case events of the whole release. Their price must
            decrease as sigma increases.
        epsilon: Target epsilon, at ``delta``.
        delta: Target delta.
        route: Name of the accountant ("gdp", "rdp", ...). None if the smallest price over all accountants counts.

    Raises:
        ValueError: No sigma up to 1e12 reaches epsilon.
    """
    target = checks.positive("epsilon", epsilon) * (1 - _EPSILON_RELATIVE_MARGIN)
    checks.delta("delta", delta)

    def compute_excess(log_sigma: float) -> float:
        event_epsilon = compute_epsilon(make_events(math.exp(log_sigma)), delta, route)
        return min(event_epsilon, 1e12) - target

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
