"""Renyi differential privacy: the curve of each event, their sum, and the tight conversion to (epsilon, delta).

Each curve is exact for the pair of distributions that dominates the event (two Laplace distributions, randomized
response, the two-point pair of a bounded range). No formula subtracts nearly equal terms, for epsilon from 1e-8 to 1e3.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import minimize_scalar

from pate_torch.accounting.events import (
    BoundedRangeEvent,
    DeltaEvent,
    GaussianEvent,
    LaplaceEvent,
    PrivacyEvent,
    PureDPEvent,
    RdpCurveEvent,
    SampledGaussianEvent,
    ZCDPEvent,
    merge_events,
)
from pate_torch.core import checks

Array = NDArray[np.float64]

ORDERS: Array = 1.0 + np.geomspace(0.01, 1000.0, 160)
"""Default Renyi orders a, geometric in a - 1 with steps of 7.5 %. Epsilon at the best of these orders is within 0.2 %
of epsilon at the best real order."""
ORDERS.setflags(write=False)


def compute_curve(events: Iterable[PrivacyEvent], orders: ArrayLike = ORDERS) -> Array:
    """Compute the Renyi divergence of the composed events at each order, [A], infinite where a curve is unknown.

    ``DeltaEvent`` events add nothing, because the accountant subtracts their failure probability from delta.

    Raises:
        ValueError: An order is infinite or at most 1, or an item is not an event.
    """
    a = check_orders(orders)
    total = np.zeros_like(a)
    for event in merge_events(events):
        total += event.count * _CURVE_FUNCTIONS[type(event)](event, a)
    assert not np.isnan(total).any(), "a Renyi curve is not a number"
    return total


def compute_laplace_curve(ratio: float, orders: ArrayLike) -> Array:
    """Compute the curve of Lap(b) against Lap(b) shifted by s, ratio = s/b (Mironov 2017, table II).

    R(a) = ln[ a/(2a-1) e^((a-1)r) + (a-1)/(2a-1) e^(-ar) ] / (a-1).
    """
    a = check_orders(orders)
    x, y = (a - 1) * ratio, a * ratio
    # The weights sum to 1 and the linear terms of both exponentials cancel exactly, so only e^u - 1 - u remains.
    excess = (a * _compute_exp_remainder(np.minimum(x, 1.0)) + (a - 1) * _compute_exp_remainder(-y)) / (2 * a - 1)
    log_moment = np.logaddexp(np.log(a / (2 * a - 1)) + x, np.log((a - 1) / (2 * a - 1)) - y)
    return np.where(x < 1, np.log1p(excess), log_moment) / (a - 1)


def compute_pure_dp_curve(epsilon: float, orders: ArrayLike) -> Array:
    """Compute the curve of the pair that dominates every epsilon-DP mechanism (Kairouz, Oh & Viswanath 2015).

    R(a) = ln[ p e^((a-1)eps) + (1-p) e^(-(a-1)eps) ] / (a-1), p = e^eps/(1 + e^eps), at most min(eps, a eps^2/2).
    """
    a = check_orders(orders)
    x = (a - 1) * epsilon
    capped_x = np.minimum(x, 1.0)
    excess = 2 * np.sinh(capped_x / 2) ** 2 + math.tanh(epsilon / 2) * np.sinh(capped_x)
    log_p = -math.log1p(math.exp(-epsilon))
    log_moment = np.logaddexp(log_p + x, log_p - epsilon - x)
    return np.where(x < 1, np.log1p(excess), log_moment) / (a - 1)


def compute_bounded_range_curve(eta: float, orders: ArrayLike) -> Array:
    """Compute the tight curve of an eta-bounded-range mechanism, at most min(eta, a eta^2/8) (Cesar & Rogers 2021).

    The likelihood ratio L of neighbors lies in [e^(t-eta), e^t] for some t in [0, eta] and has mean 1; L -> L^a is
    convex, so E[L^a] is largest with all mass on the two ends. The maximum over t has a closed form. With
    h(x) = ln( sinh(x/2) / (x/2) ):  R(a) = [ a h(a eta) - (a-1) h((a-1) eta) - h(eta) ] / (a-1)
    = [ h(a eta) - h((a-1) eta) ] + [ h(a eta) - h(eta) ] / (a-1).
    """
    a = check_orders(orders)
    scaled_eta = (a - 1) * eta
    eta_A = np.full_like(a, eta)
    return _compute_log_sinhc_rise(scaled_eta, eta_A) + _compute_log_sinhc_rise(eta_A, scaled_eta) / (a - 1)


def to_epsilon(orders: ArrayLike, rdp: ArrayLike, delta: float) -> float:
    """Compute the smallest epsilon over the orders (Canonne, Kamath & Steinke 2020, Prop. 12), at least 0.

    epsilon = min_a R(a) + ln((a-1)/a) - (ln delta + ln a)/(a-1), which is infinite if R is infinite at all orders.
    """
    a, r = check_orders(orders), np.atleast_1d(np.asarray(rdp, dtype=np.float64))
    if r.shape != a.shape or np.isnan(r).any() or (r < 0).any():
        raise checks.error("rdp", rdp, "must have one number of at least 0 (or infinite) for each order")
    return max(0.0, float(np.min(r + compute_conversion_term(a, delta))))


def compute_conversion_term(orders: ArrayLike, delta: float) -> Array:
    """Compute the term that ``to_epsilon`` adds to R(a) at each order, [A]."""
    a = check_orders(orders)
    checks.delta("delta", delta)
    return np.log1p(-1 / a) - (math.log(delta) + np.log(a)) / (a - 1)


def compute_epsilon(events: Iterable[PrivacyEvent], delta: float) -> float:
    """Compute epsilon of the composed events at the best *real* order, or at the best order that all tables share."""
    return max(0.0, _minimize_over_orders(events, lambda a, r: r + compute_conversion_term(a, delta)))


def compute_delta(events: Iterable[PrivacyEvent], epsilon: float) -> float:
    """Compute delta of the composed events at this epsilon and the best order, as in ``compute_epsilon``."""
    checks.non_negative("epsilon", epsilon)

    def compute_log_delta(a: Array, r: Array) -> Array:
        return (a - 1) * (r - epsilon + np.log1p(-1 / a)) - np.log(a)

    return math.exp(min(0.0, _minimize_over_orders(events, compute_log_delta)))


def _minimize_over_orders(events: Iterable[PrivacyEvent], objective: Callable[[Array, Array], Array]) -> float:
    """Minimize a function of orders and divergences over real orders, between the neighbors of the best grid order.

    Every order gives a valid bound, so an inexact minimum is valid, too, and only slightly less tight. With tabulated
    curves only the orders that all tables share count. Without a shared order the minimum is infinite. With sampled
    Gaussians, whose quadrature takes long at large orders, only the orders of ``ORDERS`` count.
    """
    merged_events = merge_events(events)
    order_sets = [set(e.orders) for e in merged_events if isinstance(e, RdpCurveEvent)]
    if not order_sets and any(isinstance(e, SampledGaussianEvent) for e in merged_events):
        order_sets = [set(ORDERS.tolist())]
    if order_sets:
        a = np.array(sorted(set.intersection(*order_sets)))
        return float(np.min(objective(a, compute_curve(merged_events, a)))) if len(a) else math.inf

    values = objective(ORDERS, compute_curve(merged_events))
    best = int(np.argmin(values))
    low = ORDERS[best - 1] - 1 if best > 0 else 1e-6
    high = ORDERS[best + 1] - 1 if best + 1 < len(ORDERS) else 1e7

    def evaluate(log_excess: float) -> float:
        a = np.array([1 + math.exp(log_excess)])
        return float(objective(a, compute_curve(merged_events, a))[0])

    bounds = math.log(low), math.log(high)
    optimum = minimize_scalar(evaluate, bounds=bounds, method="bounded", options={"xatol": 1e-8})
    return min(float(values[best]), float(optimum.fun))


def check_orders(orders: ArrayLike) -> Array:
    """Check that Renyi orders are finite and above 1, and convert the orders to float64 [A]."""
    rule = "every order must be a finite number above 1"
    try:
        a = np.atleast_1d(np.asarray(orders, dtype=np.float64))
    except (TypeError, ValueError) as error:
        raise checks.error("orders", orders, rule) from error
    if a.ndim != 1 or not len(a):
        raise checks.error("orders", orders, "must be a list of at least one order")
    if not (np.isfinite(a).all() and (a > 1).all()):
        raise checks.error("orders", orders, rule)
    return a


def _compute_exp_remainder(x: Array) -> Array:
    """Compute e^x - 1 - x >= 0, without cancellation near 0."""
    is_small = np.abs(x) < 0.5
    small_x = np.where(is_small, x, 0.0)
    series = np.zeros_like(small_x)
    for k in range(16, 1, -1):  # x^2/2 (1 + x/3 (1 + x/4 (...)))
        series = small_x / k * (1 + series) if k > 2 else small_x**2 / 2 * (1 + series)
    return np.where(is_small, series, np.expm1(x) - x)


def _compute_log_sinhc_rise(x: Array, step: Array) -> Array:
    """Compute h(x + step) - h(x) for x, step >= 0, h(x) = ln( sinh(x/2) / (x/2) ), with an error of a few ulp.

    If x + step <= 8, the rise follows from the power series of sinhc, whose terms are all positive. Otherwise the
    series covers the rise up to max(x, 4), and exponentials, which cancel by less than half there, cover the rest.
    """
    near_step = np.where(x + step <= 8, step, np.clip(4 - x, 0, step))
    b = np.minimum(x, 8) / 2
    a2, b2 = (b + near_step / 2) ** 2, b**2
    rise, base, spread, power, factor = np.zeros_like(b), np.ones_like(b), np.ones_like(b), np.ones_like(b), 1.0
    for k in range(1, 21):  # sinhc(a) - sinhc(b) = (a^2 - b^2) sum_k [ sum_{j<k} a^2j b^2(k-1-j) ] / (2k+1)!
        factor /= 2 * k * (2 * k + 1)
        rise += factor * spread
        power *= b2
        base += factor * power
        spread = a2 * spread + power
    start, far_step = np.maximum(x + near_step, 4), step - near_step
    far_log = np.log1p(np.expm1(-far_step) / np.expm1(-start) * np.exp(-start))
    far_rise = far_step / 2 - np.log1p(far_step / start) + far_log
    return np.log1p(near_step / 2 * (2 * b + near_step / 2) * rise / base) + far_rise


def _evaluate_tabulated_curve(event: RdpCurveEvent, a: Array) -> Array:
    rdp_by_order = dict(zip(event.orders, event.rdp, strict=True))
    return np.array([rdp_by_order.get(float(order), math.inf) for order in a])


def _evaluate_sampled_gaussian_curve(event: SampledGaussianEvent, a: Array) -> Array:
    return event.steps * np.array(_compute_divergences(event.rate, event.noise_multiplier, tuple(a.tolist())))


_CURVE_FUNCTIONS: dict[type[PrivacyEvent], Callable[[Any, Array], Array]] = {
    GaussianEvent: lambda event, a: a * event.mu**2 / 2,
    LaplaceEvent: lambda event, a: compute_laplace_curve(event.ratio, a),
    PureDPEvent: lambda event, a: compute_pure_dp_curve(event.epsilon, a),
    BoundedRangeEvent: lambda event, a: compute_bounded_range_curve(event.eta, a),
    ZCDPEvent: lambda event, a: a * event.rho,
    RdpCurveEvent: _evaluate_tabulated_curve,
    SampledGaussianEvent: _evaluate_sampled_gaussian_curve,
    DeltaEvent: lambda event, a: np.zeros_like(a),
}


# ---- a step of DP-SGD: a sum over independently sampled records plus Gaussian noise, by quadrature -------------------

_RANGE_STANDARD_DEVIATIONS = 16.0
"""Number of standard deviations beyond [0, order] that the quadrature covers. Points farther out have probability
1e-57."""


@lru_cache(maxsize=64)
def _compute_divergences(q: float, z: float, orders: tuple[float, ...]) -> tuple[float, ...]:
    """Compute R(a) = ln E_x[v^a] / (a - 1), v = 1 - q + q e^s, s = (2x - 1)/(2 z^2), x ~ N(0, z^2), at each order.

    It bounds one step, in which a record is in the sum with probability q and then changes the sum by at most 1, in
    both directions under add_remove (Mironov, Talwar & Zhang 2019, Theorem 5). R(a) = ln(1 + E) / (a - 1), where E is
    the mean excess of v^a.

    v has mean 1, so E is the mean of v^a - 1 - a (v - 1) >= 0 (Bernoulli's inequality). With v = e^w and f(t) =
    e^t - 1 - t, the integrand is v [ (a-1) f(-w) + f((a-1) w) ], whose terms are both >= 0. The integral is computed
    by the trapezoidal rule, whose error is exp(-2 pi width / step) for a function that is analytic in a strip. The
    nearest singularities are pi z^2 from the real axis, and the Gaussian factor needs a step well below z. With a step
    of min(z, z^2)/8 the error is exp(-150).
    """
    step = min(z, z * z) / 8
    x = np.arange(-_RANGE_STANDARD_DEVIATIONS * z, max(orders) + _RANGE_STANDARD_DEVIATIONS * z + step, step)
    w = _compute_log_ratio(q, (2 * x - 1) / (2 * z * z))
    log_weight = w - x * x / (2 * z * z) + math.log(step / (z * math.sqrt(2 * math.pi)))
    log_first = _compute_log_exp_remainder(-w)
    values = []
    for order in orders:
        order_minus_1, grid_slice = order - 1, slice(math.ceil((order + 2 * _RANGE_STANDARD_DEVIATIONS * z) / step) + 1)
        log_excess = np.logaddexp(
            math.log(order_minus_1) + log_first[grid_slice], _compute_log_exp_remainder(order_minus_1 * w[grid_slice])
        )
        log_mean = float(np.logaddexp.reduce(log_weight[grid_slice] + log_excess))
        values.append(float(np.logaddexp(0.0, log_mean)) / order_minus_1)
    return tuple(values)


def _compute_log_ratio(q: float, s: Array) -> Array:
    """Compute ln(1 + u), u = q (e^s - 1), to the relative precision of u."""
    if q == 1:
        return s
    u = q * np.expm1(np.minimum(s, 500.0))
    is_direct = (s < 500) & (u > -0.5)
    return np.where(is_direct, np.log1p(np.where(is_direct, u, 0.0)), np.logaddexp(math.log1p(-q), math.log(q) + s))


def _compute_log_exp_remainder(t: Array) -> Array:
    """Compute ln(e^t - 1 - t), which is -inf at 0."""
    large_t = np.maximum(t, 1.0)
    with np.errstate(divide="ignore", under="ignore"):
        log_small_value = np.log(_compute_exp_remainder(np.minimum(t, 1.0)))
        return np.where(t > 1, large_t + np.log1p(-(1 + large_t) * np.exp(-large_t)), log_small_value)
