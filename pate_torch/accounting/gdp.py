"""Gaussian differential privacy: the exact (epsilon, delta) of Gaussian mechanisms, computed in log space.

Composition adds mu^2 (Dong, Roth & Su 2022), and (epsilon, delta) follow from the exact curve of Balle & Wang 2018,
Theorem 8:  delta(eps) = Phi(-eps/mu + mu/2) - e^eps Phi(-eps/mu - mu/2).

Let x = eps/mu and let m(y) = (1 - Phi(y))/phi(y) be Mills' ratio. The second term is phi(x - mu/2) m(x + mu/2), so
delta = phi(x - mu/2) [ m(x - mu/2) - m(x + mu/2) ]. The difference of ratios never overflows. For small mu, where the
subtraction would cancel, the difference is computed as an integral of m'.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import numpy as np
from scipy.optimize import brentq
from scipy.special import erfcx, erfinv, log_ndtr, ndtri_exp

from pate_torch.accounting.events import GaussianEvent, PrivacyEvent, get_pure_epsilon, split_off_deltas
from pate_torch.core import checks

_HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)
_QUADRATURE_NODES, _QUADRATURE_WEIGHTS = np.polynomial.legendre.leggauss(20)
_ROOT_RELATIVE_MARGIN = 1e-13  # roots have a relative error of 1e-14, and the margin moves them to the safe side


def compute_log_delta(epsilon: float, mu: float) -> float:
    """Compute the exact ln delta of a mu-GDP mechanism at epsilon >= 0."""
    checks.non_negative("epsilon", epsilon)
    checks.positive("mu", mu)
    x = epsilon / mu
    low, high = x - mu / 2, x + mu / 2
    if mu < 0.5:  # m(low) - m(high) = integral over [low, high] of 1 - y m(y)
        y = x + mu / 2 * _QUADRATURE_NODES
        difference = mu / 2 * float(_QUADRATURE_WEIGHTS @ (1 - y * math.sqrt(math.pi / 2) * erfcx(y / math.sqrt(2))))
        if difference > 0:
            return -(low**2) / 2 - _HALF_LOG_2PI + math.log(difference)
        return float(log_ndtr(-low))  # beyond 1e7 standard deviations the first term alone is an upper bound
    return float(log_ndtr(-low)) + math.log1p(
        -math.exp(min(_compute_log_mills_ratio(high) - _compute_log_mills_ratio(low), -1e-300))
    )


def compute_delta(epsilon: float, mu: float) -> float:
    """Compute the exact delta of a mu-GDP mechanism at epsilon >= 0 (0 if it underflows)."""
    return math.exp(compute_log_delta(epsilon, mu))


def compute_epsilon(mu: float, delta: float) -> float:
    """Compute the smallest epsilon >= 0 at which a mu-GDP mechanism is (epsilon, delta)-DP, rounded up by 1e-13."""
    checks.positive("mu", mu)
    checks.delta("delta", delta)
    compute_excess = _make_log_delta_excess(delta)
    if compute_excess(0.0, mu) <= 0:
        return 0.0
    high = mu / 2 - float(ndtri_exp(math.log(delta)))  # at x = high the first term alone equals delta
    root = brentq(lambda x: compute_excess(x * mu, mu), 0.0, max(high, 1e-300) * (1 + 1e-9), xtol=1e-300, rtol=1e-14)
    return float(root) * mu * (1 + _ROOT_RELATIVE_MARGIN)


def compute_mu(epsilon: float, delta: float) -> float:
    """Compute the largest mu for which mu-GDP implies (epsilon, delta)-DP, rounded down."""
    checks.non_negative("epsilon", epsilon)
    checks.delta("delta", delta)
    compute_excess = _make_log_delta_excess(delta)
    low = high = 1.0
    while compute_excess(epsilon, high) <= 0:
        high *= 2
    while compute_excess(epsilon, low) > 0:
        low /= 2
    root = brentq(lambda t: compute_excess(epsilon, math.exp(t)), math.log(low), math.log(high), xtol=1e-15, rtol=1e-14)
    largest_mu = math.exp(root) * (1 - _ROOT_RELATIVE_MARGIN)
    while compute_excess(epsilon, largest_mu) > 0:
        largest_mu *= 1 - _ROOT_RELATIVE_MARGIN
    return largest_mu


def compute_total_mu(events: Iterable[PrivacyEvent]) -> float | None:
    """Compute the mu of the composed events apart from Delta events, or None if one of these is not Gaussian."""
    noise_events, _ = split_off_deltas(events)
    if not all(isinstance(e, GaussianEvent) for e in noise_events):
        return None
    return math.sqrt(math.fsum(e.count * e.mu**2 for e in noise_events if isinstance(e, GaussianEvent)))


def compute_mu_of_pure_epsilon(epsilon: float) -> float:
    """Compute the smallest mu such that every epsilon-DP mechanism is mu-GDP: 2 Phi^-1(e^eps / (1 + e^eps)).

    Proof. The trade-off curve of epsilon-DP is the polygon through (0, 1), (q, q), (1, 0) with q = 1/(1 + e^eps).
    G_mu is convex, has the same ends, and passes through (q, q) exactly if Phi(-mu/2) = q. A convex curve lies below
    its chords, so G_mu lies below the polygon, as mu-GDP requires. For a smaller mu, G_mu at q exceeds q.
    """
    checks.positive("epsilon", epsilon)
    if epsilon < 1:  # 1 - 2q = tanh(eps/2) = erf(mu / (2 sqrt 2)) avoids cancellation at 1/2
        smallest_mu = 2 * math.sqrt(2) * float(erfinv(math.tanh(epsilon / 2)))
    else:
        smallest_mu = -2 * float(ndtri_exp(-(epsilon + math.log1p(math.exp(-epsilon)))))
    return smallest_mu * (1 + _ROOT_RELATIVE_MARGIN)


def compute_dominating_mu(event: PrivacyEvent) -> float | None:
    """Compute the mu of the Gaussian that dominates one event of this kind, or None if no such Gaussian is known."""
    if isinstance(event, GaussianEvent):
        return event.mu
    pure_epsilon = get_pure_epsilon(event)
    return None if pure_epsilon is None else compute_mu_of_pure_epsilon(pure_epsilon)


def _make_log_delta_excess(delta: float) -> Callable[[float, float], float]:
    """Make a function of (epsilon, mu) that is positive exactly if delta(epsilon, mu) > delta.

    The function compares ln delta, or ln(1 - delta) above 1/2, so that a root is found with full relative precision.
    """
    log_target = math.log(delta)
    if delta <= 0.5:
        return lambda eps, mu: compute_log_delta(eps, mu) - log_target

    def compute_complement_excess(eps: float, mu: float) -> float:
        low, high = eps / mu - mu / 2, eps / mu + mu / 2
        log_second_term = -(low**2) / 2 - _HALF_LOG_2PI + _compute_log_mills_ratio(high)
        return math.log1p(-delta) - float(np.logaddexp(log_ndtr(low), log_second_term))

    return compute_complement_excess


def _compute_log_mills_ratio(y: float) -> float:
    """Compute the logarithm of (1 - Phi(y)) / phi(y)."""
    if y > -20:
        return float(np.log(erfcx(y / math.sqrt(2)))) + 0.5 * math.log(math.pi / 2)
    return float(log_ndtr(-y)) + y * y / 2 + _HALF_LOG_2PI
