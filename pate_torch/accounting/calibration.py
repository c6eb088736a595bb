"""The smallest noise that a privacy target allows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from scipy.optimize import brentq

from pate_torch.accounting.accountant import compute_route_epsilons
from pate_torch.accounting.events import PrivacyEvent
from pate_torch.core import checks

_MIN_SIGMA, _MAX_SIGMA = 1e-9, 1e12
_EPSILON_RELATIVE_MARGIN = 1e-11  # relative: what is returned still fits after the rounding of whoever prices it again


def compute_epsilon(events: Iterable[PrivacyEvent], delta: float, route: str | None = None) -> float:
    """Epsilon of the events by one named route, or the smallest over all routes (``route=None``)."""
    epsilon_by_route = compute_route_epsilons(events, delta)
    if route is None or set(epsilon_by_route) <= {"none", "delta"}:
        return min(epsilon_by_route.values())
    if route not in epsilon_by_route:
        raise checks.error("route", route, f"must be one that prices these events: {', '.join(epsilon_by_route)}")
    return epsilon_by_route[route]


def calibrate_sigma(
    make_events: Callable[[float], Iterable[PrivacyEvent]], *, epsilon: float, delta: float, route: str | None = None
) -> float:
    """Smallest noise sigma for which ``make_events(sigma)`` costs at most epsilon, accurate to 1e-9 and never below.

    Args:
        make_events: Noise in votes -> the worst-case events of the whole release; its price must fall as sigma grows.
        epsilon: Target epsilon.
        delta: Target delta.
        route: None for the smallest valid price, or one route's name ("gdp", "rdp", ...).

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
            raise checks.error("epsilon", epsilon, "is out of reach for this plan, however large its noise")
    while compute_excess(low) <= 0:
        low, high = low - math.log(2), low
        if low < math.log(_MIN_SIGMA):
            return math.exp(low)
    root = brentq(compute_excess, low, high, xtol=1e-11, rtol=1e-12)
    step = 1e-11
    while compute_excess(root) > 0:
        root, step = root + step, 2 * step
    return math.exp(root)
