"""Gaussian differential privacy: the exact price of Gaussian mechanisms, in log space.

Composition adds mu^2 (Dong, Roth & Su 2022), and (epsilon, delta) follow from the exact curve of Balle & Wang 2018,
Theorem 8:  delta(eps) = Phi(-eps/mu + mu/2) - e^eps Phi(-eps/mu - mu/2).

With x = eps/mu and Mills' ratio m(y) = (1 - Phi(y))/phi(y), the second term is phi(x - mu/2) m(x + mu/2), so that
delta = phi(x - mu/2) [ m(x - mu/2) - m(x + mu/2) ]: a difference that never overflows, and that an integral of m'
gives exactly where it would cancel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import numpy as np
from scipy.optimize import brentq
from scipy.special import erfcx, erfinv, log_ndtr, ndtri_exp

from pate_torch.accounting.events import BoundedRange, Delta, Event, Gaussian, Laplace, PureDP, merged
from pate_torch.core import checks

_HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(20)
_SLACK = 1e-13  # relative: a root is found to 1e-14, and the safe side of it is returned


def log_delta(epsilon: float, mu: float) -> float:
    """Exact ln delta of a mu-GDP mechanism at epsilon >= 0."""
    checks.non_negative("epsilon", epsilon)
    checks.positive("mu", mu)
    x = epsilon / mu
    low, high = x - mu / 2, x + mu / 2
    if mu < 0.5:  # m(low) - m(high) = integral over [low, high] of 1 - y m(y)
        y = x + mu / 2 * _NODES
        difference = mu / 2 * float(_WEIGHTS @ (1 - y * math.sqrt(math.pi / 2) * erfcx(y / math.sqrt(2))))
        if difference > 0:
            return -(low**2) / 2 - _HALF_LOG_2PI + math.log(difference)
        return float(log_ndtr(-low))  # beyond 1e7 standard deviations: the first term alone, an upper bound
    return float(log_ndtr(-low)) + math.log1p(-math.exp(min(_log_mills(high) - _log_mills(low), -1e-300)))


def delta(epsilon: float, mu: float) -> float:
    """Exact delta of a mu-GDP mechanism at epsilon >= 0 (0 where it underflows)."""
    return math.exp(log_delta(epsilon, mu))


def epsilon(mu: float, delta: float) -> float:
    """Smallest epsilon >= 0 at which a mu-GDP mechanism is (epsilon, delta)-DP; exact to 1e-12, never below."""
    checks.positive("mu", mu)
    checks.delta("delta", delta)
    excess = _objective(delta)
    if excess(0.0, mu) <= 0:
        return 0.0
    high = mu / 2 - float(ndtri_exp(math.log(delta)))  # here the first term alone is delta
    root = brentq(lambda x: excess(x * mu, mu), 0.0, max(high, 1e-300) * (1 + 1e-9), xtol=1e-300, rtol=1e-14)
    return float(root) * mu * (1 + _SLACK)


def mu(epsilon: float, delta: float) -> float:
    """Largest mu for which mu-GDP implies (epsilon, delta)-DP; never above it."""
    checks.non_negative("epsilon", epsilon)
    checks.delta("delta", delta)
    excess = _objective(delta)
    low = high = 1.0
    while excess(epsilon, high) <= 0:
        high *= 2
    while excess(epsilon, low) > 0:
        low /= 2
    root = brentq(lambda t: excess(epsilon, math.exp(t)), math.log(low), math.log(high), xtol=1e-15, rtol=1e-14)
    value = math.exp(root) * (1 - _SLACK)
    while excess(epsilon, value) > 0:
        value *= 1 - _SLACK
    return value


def total_mu(events: Iterable[Event]) -> float | None:
    """The mu of the composed events when all are Gaussian (Delta events aside), else None; 0 for none."""
    smooth = [e for e in merged(events) if not isinstance(e, Delta)]
    if not all(isinstance(e, Gaussian) for e in smooth):
        return None
    return math.sqrt(math.fsum(e.count * e.mu**2 for e in smooth if isinstance(e, Gaussian)))


def pure_to_mu(epsilon: float) -> float:
    """Smallest mu such that every epsilon-DP mechanism is mu-GDP: 2 Phi^-1(e^eps / (1 + e^eps)).

    Proof. The trade-off curve of epsilon-DP is the polygon through (0, 1), (q, q), (1, 0) with q = 1/(1 + e^eps).
    G_mu is convex, shares both ends, and passes through (q, q) exactly when Phi(-mu/2) = q; a convex curve lies below
    its chords, so G_mu lies below the polygon, which is what mu-GDP asks. A smaller mu lies above it at (q, q).
    """
    checks.positive("epsilon", epsilon)
    if epsilon < 1:  # 1 - 2q = tanh(eps/2) = erf(mu / (2 sqrt 2)): no cancellation at 1/2
        value = 2 * math.sqrt(2) * float(erfinv(math.tanh(epsilon / 2)))
    else:
        value = -2 * float(ndtri_exp(-(epsilon + math.log1p(math.exp(-epsilon)))))
    return value * (1 + _SLACK)


def dominating_mu(event: Event) -> float | None:
    """The mu of the Gaussian that dominates one such event; None where only Renyi bounds are known."""
    match event:
        case Gaussian():
            return event.mu
        case Laplace():
            return pure_to_mu(event.ratio)
        case PureDP():
            return pure_to_mu(event.epsilon)
        case BoundedRange():
            return pure_to_mu(event.eta)
    return None


def _objective(delta: float) -> Callable[[float, float], float]:
    """(epsilon, mu) -> a number above 0 exactly when delta(epsilon, mu) > delta, well scaled at both ends."""
    target = math.log(delta)
    if delta <= 0.5:
        return lambda eps, mu: log_delta(eps, mu) - target

    def complement(eps: float, mu: float) -> float:
        low, high = eps / mu - mu / 2, eps / mu + mu / 2
        second = -(low**2) / 2 - _HALF_LOG_2PI + _log_mills(high)
        return math.log1p(-delta) - float(np.logaddexp(log_ndtr(low), second))

    return complement


def _log_mills(y: float) -> float:
    """Log of (1 - Phi(y)) / phi(y)."""
    if y > -20:
        return float(np.log(erfcx(y / math.sqrt(2)))) + 0.5 * math.log(math.pi / 2)
    return float(log_ndtr(-y)) + y * y / 2 + _HALF_LOG_2PI
