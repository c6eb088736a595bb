"""The Renyi curve, by quadrature, of a DP-SGD step: a sum over independently sampled records plus Gaussian noise."""

from __future__ import annotations

import math

import numpy as np

from pate_torch.accounting import rdp
from pate_torch.accounting.events import RdpCurveEvent
from pate_torch.core import checks

_RANGE_STANDARD_DEVIATIONS = 16.0
"""Number of standard deviations beyond [0, order] that the quadrature covers. The rest has probability 1e-57."""


def make_sampled_gaussian_event(rate: float, noise_multiplier: float, steps: int) -> RdpCurveEvent:
    """Make the event of ``steps`` noisy sums over sampled records.

    A record is in a sum with probability ``rate`` and then changes it by at most 1. The noise is N(0,
    noise_multiplier^2). With q the rate and z the noise multiplier,
    R(a) = ln E_{x ~ N(0, z^2)} [ (1 - q + q e^{(2x - 1)/(2 z^2)})^a ] / (a - 1).

    Guarantee: the curve bounds the divergences of both directions under add_remove at the orders of ``rdp.ORDERS``,
        because the divergence of the reverse direction is smaller (Theorem 5).
    Source: Mironov, Talwar and Zhang 2019 (arXiv 1908.10530), sections 3.1 and 3.3.
    """
    q = checks.between("rate", rate, 0, 1)
    z = checks.positive("noise_multiplier", noise_multiplier)
    divergences = _compute_divergences(q, z, rdp.ORDERS.tolist()) if q > 0 else [0.0] * len(rdp.ORDERS)
    finite_points = [(a, r) for a, r in zip(rdp.ORDERS.tolist(), divergences, strict=True) if math.isfinite(r)]
    return RdpCurveEvent(
        orders=tuple(a for a, _ in finite_points),
        rdp=tuple(r for _, r in finite_points),
        source="sampled Gaussian, Mironov, Talwar & Zhang 2019",
        count=steps,
    )


def _compute_divergences(q: float, z: float, orders: list[float]) -> list[float]:
    """Compute ln(1 + E) / (a - 1), where E is the mean excess of v^a, v = 1 - q + q e^s, s = (2x - 1)/(2 z^2).

    v has mean 1, so E is the mean of v^a - 1 - a (v - 1) >= 0 (Bernoulli), in which nothing cancels. With v = e^w and
    f(t) = e^t - 1 - t, the integrand is v [ (a-1) f(-w) + f((a-1) w) ], whose terms are both >= 0. The integral is
    computed by the trapezoidal rule. For a function that is analytic in a strip its error is exp(-2 pi width / step).
    The nearest singularities are pi z^2 from the real axis, and the Gaussian factor needs a step well below z. A step
    of an eighth of the smaller one leaves an error of exp(-150).
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
    return values


def _compute_log_ratio(q: float, s: rdp.Array) -> rdp.Array:
    """Compute ln(1 + u), u = q (e^s - 1), to the relative precision of u."""
    if q == 1:
        return s
    u = q * np.expm1(np.minimum(s, 500.0))
    is_direct = (s < 500) & (u > -0.5)
    return np.where(is_direct, np.log1p(np.where(is_direct, u, 0.0)), np.logaddexp(math.log1p(-q), math.log(q) + s))


def _compute_log_exp_remainder(t: rdp.Array) -> rdp.Array:
    """Compute ln(e^t - 1 - t), which is -inf at 0."""
    large_t = np.maximum(t, 1.0)
    with np.errstate(divide="ignore", under="ignore"):
        log_small_value = np.log(rdp.compute_exp_remainder(np.minimum(t, 1.0)))
        return np.where(t > 1, large_t + np.log1p(-(1 + large_t) * np.exp(-large_t)), log_small_value)
