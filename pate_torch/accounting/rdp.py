"""Renyi differential privacy: each event's curve, their sum, and the tight conversion to (epsilon, delta).

Every curve is the exact one of the pair of distributions that dominates the event (Laplace, randomized response, the
two-point pair of a bounded range), arranged so that no two terms cancel: it stays correct from ratios of 1e-8 to 1e3.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import minimize_scalar

from pate_torch.accounting.events import ZCDP, BoundedRange, Delta, Event, Gaussian, Laplace, PureDP, RdpCurve, merged
from pate_torch.core import checks

Array = NDArray[np.float64]

ORDERS: Array = 1.0 + np.geomspace(0.01, 1000.0, 160)
"""Default grid, geometric in a - 1 (step 7.5 %): so flat is the optimum that this costs less than 0.2 %."""
ORDERS.setflags(write=False)


def curve(events: Iterable[Event], orders: ArrayLike = ORDERS) -> Array:
    """Renyi divergence of the composed events at each order, [A]; infinite where a curve is unknown.

    ``Delta`` events add nothing here: their failure probability is taken from delta separately (``epsilon.py``).

    Raises:
        ValueError: An order at or below 1, or anything that is not an event.
    """
    a = _orders(orders)
    total = np.zeros_like(a)
    for event in merged(events):
        total += event.count * _CURVES[type(event)](event, a)
    assert not np.isnan(total).any(), "a Renyi curve is not a number"
    return total


def laplace(ratio: float, orders: ArrayLike) -> Array:
    """Curve of Lap(b) against Lap(b) moved by s, ratio = s/b (Mironov 2017, table II).

    R(a) = ln[ a/(2a-1) e^((a-1)r) + (a-1)/(2a-1) e^(-ar) ] / (a-1).
    """
    a = _orders(orders)
    x, y = (a - 1) * ratio, a * ratio
    # The weights sum to 1 and the linear terms of both exponentials cancel exactly, so only e^u - 1 - u is left.
    excess = (a * expm1_less_linear(np.minimum(x, 1.0)) + (a - 1) * expm1_less_linear(-y)) / (2 * a - 1)
    large = np.logaddexp(np.log(a / (2 * a - 1)) + x, np.log((a - 1) / (2 * a - 1)) - y)
    return np.where(x < 1, np.log1p(excess), large) / (a - 1)


def randomized_response(epsilon: float, orders: ArrayLike) -> Array:
    """Curve of the pair that dominates every epsilon-DP mechanism (Kairouz, Oh & Viswanath 2015).

    R(a) = ln[ p e^((a-1)eps) + (1-p) e^(-(a-1)eps) ] / (a-1), p = e^eps/(1 + e^eps), at most min(eps, a eps^2/2).
    """
    a = _orders(orders)
    x = (a - 1) * epsilon
    small = np.minimum(x, 1.0)
    excess = 2 * np.sinh(small / 2) ** 2 + math.tanh(epsilon / 2) * np.sinh(small)
    log_p = -math.log1p(math.exp(-epsilon))
    large = np.logaddexp(log_p + x, log_p - epsilon - x)
    return np.where(x < 1, np.log1p(excess), large) / (a - 1)


def bounded_range(eta: float, orders: ArrayLike) -> Array:
    """Tight curve of an eta-bounded-range mechanism: at most min(eta, a eta^2/8) (Cesar & Rogers 2021).

    The likelihood ratio L of neighbors lies in [e^(t-eta), e^t] for some t in [0, eta] and has mean 1; L -> L^a is
    convex, so E[L^a] is largest with all mass on the two ends. Maximized over t in closed form, with
    h(x) = ln( sinh(x/2) / (x/2) ):  R(a) = [ a h(a eta) - (a-1) h((a-1) eta) - h(eta) ] / (a-1)
    = [ h(a eta) - h((a-1) eta) ] + [ h(a eta) - h(eta) ] / (a-1), two rises of h.
    """
    a = _orders(orders)
    most = (a - 1) * eta
    return _log_sinhc_rise(most, np.full_like(a, eta)) + _log_sinhc_rise(np.full_like(a, eta), most) / (a - 1)


def to_epsilon(orders: ArrayLike, rdp: ArrayLike, delta: float) -> float:
    """Smallest epsilon over the orders (Canonne, Kamath & Steinke 2020, Prop. 12), clipped at 0.

    epsilon = min_a R(a) + ln((a-1)/a) - (ln delta + ln a)/(a-1). Infinite when R is infinite everywhere.
    """
    a, r = _orders(orders), _values(orders, rdp)
    return max(0.0, float(np.min(r + conversion(a, delta))))


def to_delta(orders: ArrayLike, rdp: ArrayLike, epsilon: float) -> float:
    """Smallest delta over the orders at this epsilon: the inverse of ``to_epsilon``, clipped at 1."""
    a, r = _orders(orders), _values(orders, rdp)
    checks.non_negative("epsilon", epsilon)
    return math.exp(min(0.0, float(np.min(_log_delta(a, r, epsilon)))))


def conversion(orders: ArrayLike, delta: float) -> Array:
    """What the tight conversion adds to R(a) at each order, [A]."""
    a = _orders(orders)
    checks.delta("delta", delta)
    return np.log1p(-1 / a) - (math.log(delta) + np.log(a)) / (a - 1)


def epsilon(events: Iterable[Event], delta: float) -> float:
    """Epsilon of the composed events by the best *real* order (by the best common order if a curve is tabulated)."""
    merged_events = merged(events)
    tables = [set(e.orders) for e in merged_events if isinstance(e, RdpCurve)]
    if tables:
        common = sorted(set.intersection(*tables))
        return to_epsilon(common, curve(merged_events, common), delta) if common else math.inf
    return max(0.0, _refine(lambda a: curve(merged_events, a) + conversion(a, delta)))


def delta(events: Iterable[Event], epsilon: float) -> float:
    """Delta of the composed events at this epsilon, by the best real order (or tabulated one)."""
    merged_events = merged(events)
    tables = [set(e.orders) for e in merged_events if isinstance(e, RdpCurve)]
    if tables:
        common = sorted(set.intersection(*tables))
        return to_delta(common, curve(merged_events, common), epsilon) if common else 1.0
    checks.non_negative("epsilon", epsilon)
    return math.exp(min(0.0, _refine(lambda a: _log_delta(a, curve(merged_events, a), epsilon))))


def _log_delta(a: Array, r: Array, epsilon: float) -> Array:
    return (a - 1) * (r - epsilon + np.log1p(-1 / a)) - np.log(a)


def _refine(objective: Callable[[Array], Array]) -> float:
    """Minimum of the objective over real orders: the grid's best, then a bounded search between its neighbors.

    Any order is valid, so stopping short of the true minimum costs tightness only.
    """
    values = objective(ORDERS)
    best = int(np.argmin(values))
    low = ORDERS[best - 1] - 1 if best > 0 else 1e-6
    high = ORDERS[best + 1] - 1 if best + 1 < len(ORDERS) else 1e7
    found = minimize_scalar(
        lambda t: float(objective(np.array([1 + math.exp(t)]))[0]),
        bounds=(math.log(low), math.log(high)),
        method="bounded",
        options={"xatol": 1e-8},
    )
    return min(float(values[best]), float(found.fun))


def _orders(orders: ArrayLike) -> Array:
    a = np.atleast_1d(np.asarray(orders, dtype=np.float64))
    if a.ndim != 1 or not len(a):
        raise checks.fail("orders", orders, "must be a list of at least one order")
    if not (np.isfinite(a).all() and (a > 1).all()):
        raise checks.fail("orders", orders, "every order must be a finite number above 1")
    return a


def _values(orders: ArrayLike, rdp: ArrayLike) -> Array:
    r = np.atleast_1d(np.asarray(rdp, dtype=np.float64))
    if r.shape != np.atleast_1d(np.asarray(orders)).shape:
        raise checks.fail("rdp", rdp, "must have one value per order")
    if np.isnan(r).any() or (r < 0).any():
        raise checks.fail("rdp", rdp, "every value must be a number of at least 0 (or infinite)")
    return r


def expm1_less_linear(x: Array) -> Array:
    """Value of e^x - 1 - x >= 0, without cancellation near 0."""
    small = np.abs(x) < 0.5
    near = np.where(small, x, 0.0)
    series = np.zeros_like(near)
    for k in range(16, 1, -1):  # x^2/2 (1 + x/3 (1 + x/4 (...)))
        series = near / k * (1 + series) if k > 2 else near**2 / 2 * (1 + series)
    return np.where(small, series, np.expm1(x) - x)


def _log_sinhc_rise(x: Array, step: Array) -> Array:
    """h(x + step) - h(x) for x, step >= 0, h(x) = ln( sinh(x/2) / (x/2) ): to some ulp, however small the step.

    Up to 8 by the power series of sinhc, where every term is positive; beyond, from 4 or x on, by exponentials, where
    the logarithm takes away less than half.
    """
    near = np.where(x + step <= 8, step, np.clip(4 - x, 0, step))
    b = np.minimum(x, 8) / 2
    a2, b2 = (b + near / 2) ** 2, b**2
    rise, base, spread, power, factor = np.zeros_like(b), np.ones_like(b), np.ones_like(b), np.ones_like(b), 1.0
    for k in range(1, 21):  # sinhc(a) - sinhc(b) = (a^2 - b^2) sum_k [ sum_{j<k} a^2j b^2(k-1-j) ] / (2k+1)!
        factor /= 2 * k * (2 * k + 1)
        rise += factor * spread
        power *= b2
        base += factor * power
        spread = a2 * spread + power
    start, far = np.maximum(x + near, 4), step - near
    beyond = far / 2 - np.log1p(far / start) + np.log1p(np.expm1(-far) / np.expm1(-start) * np.exp(-start))
    return np.log1p(near / 2 * (2 * b + near / 2) * rise / base) + beyond


def _table(event: RdpCurve, a: Array) -> Array:
    known = dict(zip(event.orders, event.rdp, strict=True))
    return np.array([known.get(float(order), math.inf) for order in a])


_CURVES: dict[type[Event], Callable[[Any, Array], Array]] = {
    Gaussian: lambda event, a: a * event.mu**2 / 2,
    Laplace: lambda event, a: laplace(event.ratio, a),
    PureDP: lambda event, a: randomized_response(event.epsilon, a),
    BoundedRange: lambda event, a: bounded_range(event.eta, a),
    ZCDP: lambda event, a: a * event.rho,
    RdpCurve: _table,
    Delta: lambda event, a: np.zeros_like(a),
}
