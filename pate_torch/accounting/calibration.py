"""The smallest noise that a privacy target allows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from scipy.optimize import brentq

from pate_torch.accounting.accountant import routes
from pate_torch.accounting.events import Event
from pate_torch.core import checks

_LOW, _HIGH = 1e-9, 1e12
_MARGIN = 1e-11  # relative: what is returned still fits after the rounding of whoever prices it again


def price(events: Iterable[Event], delta: float, route: str | None = None) -> float:
    """Epsilon of the events by one named route, or the smallest over all routes (``route=None``)."""
    values = routes(events, delta)
    if route is None or set(values) <= {"none", "delta"}:
        return min(values.values())
    if route not in values:
        raise checks.fail("route", route, f"must be one that prices these events: {', '.join(values)}")
    return values[route]


def smallest_sigma(
    plan: Callable[[float], Iterable[Event]], *, epsilon: float, delta: float, route: str | None = None
) -> float:
    """Smallest noise sigma for which ``plan(sigma)`` costs at most epsilon, accurate to 1e-9 and never below.

    Args:
        plan: Noise in votes -> the worst-case events of the whole release; its price must fall as sigma grows.
        epsilon: Target epsilon.
        delta: Target delta.
        route: None for the smallest valid price, or one route's name ("gdp", "rdp", ...).

    Raises:
        ValueError: No sigma up to 1e12 reaches epsilon.
    """
    target = checks.positive("epsilon", epsilon) * (1 - _MARGIN)
    checks.delta("delta", delta)

    def excess(log_sigma: float) -> float:
        value = price(plan(math.exp(log_sigma)), delta, route)
        return min(value, 1e12) - target

    low = high = 0.0
    while excess(high) > 0:
        low, high = high, high + math.log(2)
        if high > math.log(_HIGH):
            raise checks.fail("epsilon", epsilon, "is out of reach for this plan, however large its noise")
    while excess(low) <= 0:
        low, high = low - math.log(2), low
        if low < math.log(_LOW):
            return math.exp(low)
    root = brentq(excess, low, high, xtol=1e-11, rtol=1e-12)
    step = 1e-11
    while excess(root) > 0:
        root, step = root + step, 2 * step
    return math.exp(root)
