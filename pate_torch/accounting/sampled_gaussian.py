"""DP-SGD's step: a sum over records, each sampled independently, plus Gaussian noise; its Renyi curve by quadrature."""

from __future__ import annotations

import math

import numpy as np

from pate_torch import checks
from pate_torch.accounting import rdp
from pate_torch.accounting.events import RdpCurve

_REACH = 40.0  # standard deviations beyond the integrand's bulk: exp(-800)


def sampled_gaussian(rate: float, noise_multiplier: float, steps: int) -> RdpCurve:
    """``steps`` releases of a sum in which a record moves at most 1, seen with probability ``rate``, plus N(0, z^2).

    R(a) = ln E_{x ~ N(0, z^2)} [ (1 - q + q e^{(2x - 1)/(2 z^2)})^a ] / (a - 1), q the rate and z the noise multiplier.

    Guarantee: the divergences of both directions, for add_remove, at the orders of ``rdp.ORDERS``: the reverse one is
        the smaller (Theorem 5).
    Source: Mironov, Talwar and Zhang 2019 (arXiv 1908.10530), sections 3.1 and 3.3.
    """
    q = checks.between("rate", rate, 0, 1)
    z = checks.positive("noise_multiplier", noise_multiplier)
    values = [_divergence(q, z, float(order)) for order in rdp.ORDERS] if q > 0 else [0.0] * len(rdp.ORDERS)
    known = [(a, r) for a, r in zip(rdp.ORDERS.tolist(), values, strict=True) if math.isfinite(r)]
    return RdpCurve(
        orders=tuple(a for a, _ in known),
        rdp=tuple(r for _, r in known),
        source="sampled Gaussian, Mironov, Talwar & Zhang 2019",
        count=steps,
    )


def _divergence(q: float, z: float, order: float) -> float:
    """The trapezoidal rule, which for a function analytic in a strip errs by exp(-2 pi width / step).

    The nearest singularities lie pi z^2 off the real axis, and the Gaussian factor asks for a step well below z: at
    an eighth of either the error is below the rounding.
    """
    step = min(z, z * z) / 8
    low, high = -_REACH * z / 4, order + _REACH * z / 4
    x = np.arange(low, high + step, step)
    slope = (2 * x - 1) / (2 * z * z)
    log_ratio = np.logaddexp(math.log1p(-q), math.log(q) + slope) if q < 1 else slope
    log_density = -x * x / (2 * z * z) - math.log(z * math.sqrt(2 * math.pi))
    log_moment = float(np.logaddexp.reduce(log_density + order * log_ratio)) + math.log(step)
    return max(0.0, log_moment / (order - 1))
