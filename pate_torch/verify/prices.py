"""What events cost at least and at most: typed anew from the papers, and without a line of ``accounting``.

An event is a mapping as ``release.json`` has it: its kind, its scale, its count. Of a mechanism about which no more is
known than its event, "at least" means: of all mechanisms with this event some cost as much.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from mpmath import mp, mpf
from scipy.special import ndtr

Event = Mapping[str, Any]
PURE = {"laplace": "ratio", "pure": "epsilon", "bounded_range": "eta"}
"""Kinds whose loss is bounded, and what bounds it."""
_ORDERS = [1 + 10 ** (k / 50) for k in range(-100, 201)]  # Renyi orders from 1.01 to 10,001, 5 % apart in a - 1
_CELL, _CELLS = 2.5e-4, 1 << 21
MOST_STEPS = 10**6
LIMITS = f"what is checked has {MOST_STEPS} steps at most, a noise multiplier of .3 and more, epsilon below 100"


@dataclass(frozen=True)
class Bounds:
    """Epsilon lies in [low, high]; how that is known."""

    low: float
    high: float
    how: str


def bounds(events: Sequence[Event], delta: float) -> Bounds:
    """Bounds on the smallest epsilon at which these events, fixed beforehand, are (epsilon, delta)-DP."""
    left = delta - math.fsum(e["count"] * e["delta"] for e in events if e["kind"] == "delta")
    smooth = [e for e in events if e["kind"] != "delta" and e["count"]]
    kinds = {e["kind"] for e in smooth}
    pure = math.fsum(e["count"] * loss(e) for e in smooth)  # Dwork et al. 2006: epsilons add up
    if left < 0 or (left == 0 and pure == math.inf):
        return Bounds(math.inf, math.inf, "the events fail more often than delta allows")
    if not smooth:
        how = f"no loss but a failure of probability {delta - left:.6g}" if left < delta else "nothing was released"
        return Bounds(0.0, 0.0, how)
    if kinds == {"gaussian"}:
        exact = gaussian(math.sqrt(math.fsum(e["count"] * e["mu"] ** 2 for e in smooth)), left)
        return Bounds(exact, exact, "exact Gaussian, 50 digits")
    low, high, how = 0.0, min(renyi(smooth, left), pure), "Renyi"
    if known := [e for e in smooth if e["kind"] in {*PURE, "gaussian", "zcdp"}]:
        low, above = convolved(known, left)
        if kinds <= {*PURE, "gaussian"}:
            high, how = min(high, above), "Renyi, and losses convolved"
    for e in smooth:
        if e["kind"] == "sampled_gaussian":
            if high > 100:
                raise ValueError(f"epsilon {high:.6g} by Renyi divergences: {LIMITS}")
            below, above = sampled(e, left)
            low = max(low, below)
            if len(smooth) == 1:
                high, how = min(high, above), "Renyi, and the privacy loss distribution of dp-accounting"
    return Bounds(low, high, how)


def loss(event: Event) -> float:
    """The largest privacy loss of an event; infinite where it has none."""
    return float(event[PURE[event["kind"]]]) if event["kind"] in PURE else math.inf


def gaussian(mu: float, delta: float) -> float:
    """Epsilon of a mu-GDP mechanism. Source: Balle & Wang 2018, Theorem 8; Dong, Roth & Su 2022, Corollary 2.13."""
    with mp.workdps(50):
        m = mpf(mu)

        def at(e: mpf) -> mpf:
            return mp.ncdf(-e / m + m / 2) - mp.exp(e) * mp.ncdf(-e / m - m / 2)

        low, high = mpf(0), m * m / 2 + m * mp.sqrt(2 * mp.log(1 / mpf(delta)))
        if at(low) <= delta:
            return 0.0
        for _ in range(100):
            middle = (low + high) / 2
            low, high = (middle, high) if at(middle) > delta else (low, middle)
        return float(high)


def renyi(events: Sequence[Event], delta: float) -> float:
    """Epsilon by the best order, of those that every table has. Source: Canonne, Kamath & Steinke 2020, Prop. 12."""
    tables = [set(e["orders"]) for e in events if e["kind"] == "rdp_curve"]
    orders = sorted(set.intersection(*tables)) if tables else _ORDERS
    if delta <= 0:
        return math.inf
    return max(0.0, min((converted(a, divergence(events, a), delta) for a in orders), default=math.inf))


def converted(a: float, divergence: float, delta: float) -> float:
    """Epsilon of a Renyi divergence of order a (the same proposition)."""
    return divergence + math.log1p(-1 / a) - (math.log(delta) + math.log(a)) / (a - 1)


def divergence(events: Sequence[Event], a: float) -> float:
    """Renyi divergence of order a of the events together. Source: Mironov 2017, Proposition 1."""
    with mp.workdps(30):
        return float(sum(e["count"] * _CURVES[e["kind"]](e, mpf(a)) for e in events))


def _laplace(e: Event, a: mpf) -> mpf:
    r = mpf(e["ratio"])
    return mp.log(a / (2 * a - 1) * mp.exp((a - 1) * r) + (a - 1) / (2 * a - 1) * mp.exp(-a * r)) / (a - 1)


def _pure(e: Event, a: mpf) -> mpf:
    p, q = (1 / (1 + mp.exp(sign * mpf(e["epsilon"]))) for sign in (-1, 1))
    return mp.log(p**a * q ** (1 - a) + q**a * p ** (1 - a)) / (a - 1)


def sampled_divergence(e: Event, a: float) -> float:
    """Of the sampled Gaussian. Source: Mironov, Talwar & Zhang 2019, section 3.3, summed over a grid."""
    q, z = e["rate"], e["noise"]
    if e["count"] > MOST_STEPS or z < 0.3:
        raise ValueError(f"{e['count']} steps at noise multiplier {z:g}: {LIMITS}")
    x = np.arange(-40 * z, a + 40 * z, min(z, z * z) / 16)
    ratio = np.logaddexp(math.log1p(-q) if q < 1 else -math.inf, math.log(q) + (2 * x - 1) / (2 * z * z))
    density = -(x**2) / (2 * z * z) + math.log((x[1] - x[0]) / (z * math.sqrt(2 * math.pi)))
    return max(0.0, float(np.logaddexp.reduce(density + a * ratio)) / (a - 1))


_CURVES: dict[str, Callable[[Any, Any], Any]] = {
    "gaussian": lambda e, a: a * mpf(e["mu"]) ** 2 / 2,  # Mironov 2017, Proposition 7
    "laplace": _laplace,  # Mironov 2017, Proposition 6
    "pure": _pure,  # Mironov 2017, Proposition 5, of the pair that dominates (Kairouz, Oh & Viswanath 2015)
    "bounded_range": lambda e, a: min(mpf(e["eta"]), a * mpf(e["eta"]) ** 2 / 8),  # Cesar & Rogers 2021, Lemma 3.2
    "zcdp": lambda e, a: a * mpf(e["rho"]),  # Bun & Steinke 2016, Definition 1.1
    "rdp_curve": lambda e, a: mpf(dict(zip(e["orders"], e["rdp"], strict=True)).get(float(a), math.inf)),
    "sampled_gaussian": lambda e, a: mpf(sampled_divergence(e, float(a))),
}


def convolved(events: Sequence[Event], delta: float) -> tuple[float, float]:
    """Bounds by convolving the laws of losses, each rounded down and up to a grid: delta rises with the loss.

    Rounded up, a bounded range is taken for a pure event; rounded down, for randomized response of half of it, and
    rho-zCDP for a Gaussian of the same rho. Source: Sommer, Meiser & Mohammadi 2019; Koskela, Jälkö & Honkela 2020.
    """
    mu2 = math.fsum(e["count"] * (e["mu"] ** 2 if e["kind"] == "gaussian" else 2 * e["rho"])
                    for e in events if e["kind"] not in PURE)  # fmt: skip
    pure = [e for e in events if e["kind"] in PURE]
    if not pure:
        return (gaussian(math.sqrt(mu2), delta),) * 2
    spread = math.sqrt(mu2 + math.fsum(e["count"] * loss(e) ** 2 for e in pure))
    width = 2 * (spread**2 / 2 + 12 * spread)
    step = max(min(_CELL, min(map(loss, pure)) / 16), width / _CELLS)
    commonest = loss(max(pure, key=lambda e: e["count"])) / 2  # of which a half is on the grid, too
    step = max(step, commonest / max(1, commonest // step))
    size = 1 << math.ceil(math.log2(max(width / step, 64)))
    grid, found = np.arange(-size // 2, size // 2 + 1), []
    for up in (False, True):
        total = np.ones(size // 2 + 1, dtype=complex)
        for e in (*pure, {"kind": "gaussian", "mu": math.sqrt(mu2), "count": 1}) if mu2 else pure:
            mass = np.diff(_law(e, (grid + (1e-9 if up else -1e-9)) * step, up))
            total *= np.fft.rfft(np.roll(mass, size // 2 + up)) ** e["count"]
        mass = np.roll(np.fft.irfft(total, size), size // 2)
        found.append(_get_epsilon(grid[:-1] * step, mass, delta + (-1 if up else 1) * size * 1e-15))
    return found[0], found[1]


def _law(e: Event, at: np.ndarray, up: bool) -> np.ndarray:
    """P(loss <= at) of one event."""
    if e["kind"] == "gaussian":
        return ndtr(at / e["mu"] - e["mu"] / 2)
    top = loss(e) / (2 if e["kind"] == "bounded_range" and not up else 1)
    inside = np.exp(np.minimum(at - top, 0) / 2) / 2 if e["kind"] == "laplace" else 1 - 1 / (1 + math.exp(-top))
    return np.where(at < -top, 0, np.where(at < top, inside, 1))


def _get_epsilon(loss: np.ndarray, mass: np.ndarray, delta: float) -> float:
    """The least epsilon of a law: its delta is the most of P(loss >= t) - exp(epsilon) E[exp(-loss); loss >= t]."""
    loss, mass = loss[::-1], mass[::-1]
    loss, mass = (x[(loss > 0) & (mass > 0)] for x in (loss, mass))
    more, other = np.cumsum(mass), np.logaddexp.accumulate(np.log(mass) - loss)
    over = more > delta
    return float((np.log(more[over] - delta) - other[over]).max(initial=0))


def sampled(e: Event, delta: float) -> tuple[float, float]:
    """Bounds of the sampled Gaussian, by dp-accounting: the run prices it by Renyi divergences, never by these."""
    from dp_accounting.pld import privacy_loss_distribution as library

    step = max(1e-5, min(_CELL / 5, 0.05 / e["count"]))  # each step is rounded by half of one at most
    slack = 1e-14 * e["count"]  # of delta: what so many convolutions err by

    def epsilon(pessimistic: bool, at: float) -> float:
        how = {"pessimistic_estimate": pessimistic, "use_connect_dots": pessimistic, "sampling_prob": e["rate"]}
        law = library.from_gaussian_mechanism(e["noise"], value_discretization_interval=step, **how)
        return float(law.self_compose(e["count"]).get_epsilon_for_delta(at))

    return epsilon(False, delta + slack), epsilon(True, delta - slack) if delta > slack else math.inf
