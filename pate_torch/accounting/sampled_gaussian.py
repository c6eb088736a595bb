"""DP-SGD's step: a sum over records, each sampled independently, plus Gaussian noise; its Renyi curve by quadrature."""

from __future__ import annotations

import math

import numpy as np

from pate_torch.accounting import rdp
from pate_torch.accounting.events import RdpCurveEvent
from pate_torch.core import checks

_RANGE_STANDARD_DEVIATIONS = 16.0
"""Standard deviations beyond [0, order]: 1e-57 of the mass, where the excess below is about (rate / z)^2 of it."""


def make_sampled_gaussian_event(rate: float, noise_multiplier: float, steps: int) -> RdpCurveEvent:
    """Renyi curve of ``steps`` noisy sums of sampled records.

    A record moves a sum by at most 1 and is in it with probability ``rate``; the noise is N(0, noise_multiplier^2).
    R(a) = ln E_{x ~ N(0, z^2)} [ (1 - q + q e^{(2x - 1)/(2 z^2)})^a ] / (a - 1), q the rate and z the noise multiplier.

    Guarantee: the divergences of both directions, for add_remove, at the orders of ``rdp.ORDERS``: the reverse one is
        the smaller (Theorem 5).
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
    """ln(1 + E) / (a - 1), E the mean excess of the a-th power of v = 1 - q + q e^s, s = (2x - 1)/(2 z^2).

    v has mean 1, so E is the mean of v^a - 1 - a (v - 1) >= 0 (Bernoulli): nothing cancels, however small it is. With
    v = e^w and f(t) = e^t - 1 - t it is v [ (a-1) f(-w) + f((a-1) w) ], both of whose terms are >= 0.
    Trapezoidal rule, which for a function analytic in a strip errs by exp(-2 pi width / step): the nearest
    singularities lie pi z^2 off the real axis, and the Gaussian factor asks for a step well below z; an eighth of
    either leaves exp(-150).
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
    """ln(1 + u), u = q (e^s - 1), to the relative precision of u."""
    if q == 1:
        return s
    u = q * np.expm1(np.minimum(s, 500.0))
    is_direct = (s < 500) & (u > -0.5)
    return np.where(is_direct, np.log1p(np.where(is_direct, u, 0.0)), np.logaddexp(math.log1p(-q), math.log(q) + s))


def _compute_log_exp_remainder(t: rdp.Array) -> rdp.Array:
    """ln(e^t - 1 - t), -inf at 0."""
    large_t = np.maximum(t, 1.0)
    with np.errstate(divide="ignore", under="ignore"):
        log_small_value = np.log(rdp.compute_exp_remainder(np.minimum(t, 1.0)))
        return np.where(t > 1, large_t + np.log1p(-(1 + large_t) * np.exp(-large_t)), log_small_value)
