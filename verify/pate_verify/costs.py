"""Bounds on epsilon of privacy events, implemented from the papers for this check alone.

If mechanisms of different costs have the same event, the lower bound is the cost of one such mechanism.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from mpmath import mp, mpf

from pate_verify.events import LIMITS_TEXT, PURE_KINDS, Event, get_max_loss, sum_squared_mu

_ORDERS = [1 + 10 ** (k / 50) for k in range(-100, 201)]  # Renyi orders from 1.01 to 10,001, 5 % apart in a - 1


@dataclass(frozen=True)
class EpsilonBounds:
    """Bounds ``low`` <= epsilon <= ``high``, and the name of their derivation.

    Attributes:
        is_complete: False if ``low`` leaves out events whose losses are too large for the check.
    """

    low: float
    high: float
    derivation: str
    is_complete: bool = True


def compute_bounds(events: Sequence[Event], delta: float) -> EpsilonBounds:
    """Bound the smallest epsilon for which these non-adaptive events are (epsilon, delta)-DP."""
    rest = delta - sum_failures([e for e in events if e["kind"] == "delta"])
    losses = [e for e in events if e["kind"] != "delta" and e["count"]]
    kinds = {e["kind"] for e in losses}
    pure_epsilon = math.fsum(e["count"] * get_max_loss(e) for e in losses)  # Dwork et al. 2006: epsilons add up
    if rest < 0 or (rest == 0 and pure_epsilon == math.inf):
        return EpsilonBounds(math.inf, math.inf, "the failure probability of the events exceeds delta")
    if not losses:
        failure = f"only a failure of probability {delta - rest:.6g}"
        return EpsilonBounds(0.0, 0.0, failure if rest < delta else "nothing was released")
    if kinds == {"gaussian"}:
        epsilon = compute_gaussian_epsilon(math.sqrt(sum_squared_mu(losses)), rest)
        return EpsilonBounds(epsilon, epsilon, "exact Gaussian, 50 digits")
    is_complete = True
    low, high, derivation = 0.0, min(compute_renyi_epsilon(losses, rest), pure_epsilon), "Renyi"
    if known_events := [e for e in losses if e["kind"] in {*PURE_KINDS, "gaussian", "zcdp"}]:
        low, upper, is_complete = bound_known_losses(known_events, rest)
        if is_complete and kinds <= {*PURE_KINDS, "gaussian"}:
            high, derivation = min(high, upper), "Renyi, and losses convolved"
    if "sampled_gaussian" in kinds:
        if high > 100:
            raise ValueError(f"sampled Gaussian with epsilon {high:.6g}: the check {LIMITS_TEXT}")
        lower, upper = _import_losses().compose_sampled_losses([e for e in losses if e["kind"] != "rdp_curve"], rest)
        low, left = max(low, lower), rest - sum_failures(losses)
        if len(losses) > 1 and kinds <= {"gaussian", "sampled_gaussian"} and 0 < left < rest:
            mu2 = math.fsum(e["count"] * compute_dominating_mu(e) ** 2 for e in losses)
            high, derivation = min(high, compute_gaussian_epsilon(math.sqrt(mu2), left)), "a Gaussian above DP-SGD"
        elif kinds <= {*PURE_KINDS, "gaussian", "sampled_gaussian"}:
            high, derivation = min(high, upper), "Renyi, and the privacy loss distribution of dp-accounting"
    derivation += "" if is_complete else f"; the check {LIMITS_TEXT}"
    return EpsilonBounds(low, high, derivation, is_complete)


def bound_known_losses(events: Sequence[Event], delta: float) -> tuple[float, float, bool]:
    """Bound epsilon of events other than DP-SGD and Renyi curves; a rho-zCDP event counts as Gaussian with this rho.

    More events never cost less, so each part of the events bounds epsilon from below: each event alone, the Gaussian
    ones, and those whose losses are not too large to be convolved. The last result states whether these are all.
    """
    bounded_events = [e for e in events if e["kind"] in PURE_KINDS]
    low = compute_gaussian_epsilon(math.sqrt(mu2), delta) if (mu2 := sum_squared_mu(events)) else 0.0
    if not bounded_events:
        return low, low, True
    losses, upper = _import_losses(), math.inf
    low = max(low, *(losses.bound_single_loss(e, delta) for e in bounded_events))
    selected = losses.select_convolvable(events)
    if any(e["kind"] in PURE_KINDS for e in selected):
        lower, upper = losses.convolve_losses(selected, delta)
        low = max(low, lower)
    return low, upper, len(selected) == len(events)


def _import_losses() -> ModuleType:
    return importlib.import_module("pate_verify.losses")  # needs the extra "losses"


def sum_failures(events: Sequence[Event]) -> float:
    """Sum the probabilities of failures, also those at which a Gaussian mechanism dominates DP-SGD."""
    return math.fsum(e["count"] * e.get("delta", e.get("failure_delta", 0)) for e in events)


def compute_dominating_mu(event: Event) -> float:
    """Compute the smallest mu for which mu-GDP dominates the event, DP-SGD up to its failure probability.

    Source: Dong, Roth & Su 2022.
    """
    if event["kind"] == "gaussian":
        return float(event["mu"])
    if event["kind"] == "sampled_gaussian":
        scales = (event[key] for key in ("rate", "noise_multiplier", "steps", "failure_delta"))
        return float(_import_losses().compute_sampled_mu(*scales)) if event["failure_delta"] else 1e6  # above any cap
    with mp.workdps(50):
        return float(2 * mp.sqrt(2) * mp.erfinv(mp.tanh(mpf(get_max_loss(event)) / 2)))


@functools.cache
def compute_gaussian_epsilon(mu: float, delta: float) -> float:
    """Compute epsilon of mu-GDP. Source: Balle & Wang 2018, Theorem 8; Dong, Roth & Su 2022, Corollary 2.13."""
    with mp.workdps(50):
        m = mpf(mu)

        def compute_delta(e: mpf) -> mpf:
            return mp.ncdf(-e / m + m / 2) - mp.exp(e) * mp.ncdf(-e / m - m / 2)

        low, high = mpf(0), m * m / 2 + m * mp.sqrt(2 * mp.log(1 / mpf(delta)))
        if compute_delta(low) <= delta:
            return 0.0
        for _ in range(100):
            middle = (low + high) / 2
            low, high = (middle, high) if compute_delta(middle) > delta else (low, middle)
        return float(high)


def compute_renyi_epsilon(events: Sequence[Event], delta: float) -> float:
    """Compute epsilon by the best Renyi order of all curves. Source: Canonne, Kamath & Steinke 2020, Prop. 12."""
    tables = [set(e["orders"]) for e in events if e["kind"] == "rdp_curve"]
    orders = sorted(set.intersection(*tables)) if tables else _ORDERS
    if delta <= 0:
        return math.inf
    epsilons = (convert_divergence(a, compute_divergence(events, a), delta) for a in orders)
    return max(0.0, min(epsilons, default=math.inf))


def convert_divergence(a: float, divergence: float, delta: float) -> float:
    """Convert a Renyi divergence of order a to epsilon. Source: Canonne, Kamath & Steinke 2020, Prop. 12."""
    return divergence + math.log1p(-1 / a) - (math.log(delta) + math.log(a)) / (a - 1)


def compute_divergence(events: Sequence[Event], a: float) -> float:
    """Compute the Renyi divergence of order a of all events. Source: Mironov 2017, Proposition 1."""
    with mp.workdps(30):
        return float(sum(e["count"] * _DIVERGENCES[e["kind"]](e, mpf(a)) for e in events))


def _compute_laplace_divergence(e: Event, a: mpf) -> mpf:
    r = mpf(e["ratio"])
    return mp.log(a / (2 * a - 1) * mp.exp((a - 1) * r) + (a - 1) / (2 * a - 1) * mp.exp(-a * r)) / (a - 1)


def _compute_pure_divergence(e: Event, a: mpf) -> mpf:
    p, q = (1 / (1 + mp.exp(sign * mpf(e["epsilon"]))) for sign in (-1, 1))
    return mp.log(p**a * q ** (1 - a) + q**a * p ** (1 - a)) / (a - 1)


def _compute_range_divergence(e: Event, a: mpf) -> mpf:
    """Compute the largest divergence of the pairs whose likelihood ratio has mean 1 and lies in [exp(t - eta), exp(t)].

    The moment of order a is convex in the ratio, so a pair on the two ends has the largest one at each t. The best t
    makes both terms below equal. For small losses, the closed form differs by rounding from the bound a eta^2 / 8.
    """
    eta = mpf(e["eta"])

    def h(x: mpf) -> mpf:
        return mp.log(mp.sinh(x / 2) / (x / 2))

    return min(eta, a * eta**2 / 8, (a * h(a * eta) - (a - 1) * h((a - 1) * eta) - h(eta)) / (a - 1))


_DIVERGENCES: dict[str, Callable[[Any, Any], Any]] = {
    "gaussian": lambda e, a: a * mpf(e["mu"]) ** 2 / 2,  # Mironov 2017, Proposition 7
    "laplace": _compute_laplace_divergence,  # Mironov 2017, Proposition 6
    "pure": _compute_pure_divergence,  # Mironov 2017, Proposition 5, of the pair of Kairouz, Oh & Viswanath 2015
    "bounded_range": _compute_range_divergence,  # Cesar & Rogers 2021, Lemma 3.2 and its two-point pairs
    "zcdp": lambda e, a: a * mpf(e["rho"]),  # Bun & Steinke 2016, Definition 1.1
    "rdp_curve": lambda e, a: mpf(dict(zip(e["orders"], e["rdp"], strict=True)).get(float(a), math.inf)),
    "sampled_gaussian": lambda e, a: e["steps"] * mpf(_import_losses().compute_sampled_divergence(e, float(a))),
}
