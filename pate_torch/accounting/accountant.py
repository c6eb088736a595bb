"""The accountant: it converts events to (epsilon, delta) by several routes and takes the smallest valid epsilon."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pate_torch.accounting import gdp, pld, rdp
from pate_torch.accounting.events import (
    BoundedRangeEvent,
    DeltaEvent,
    GaussianEvent,
    LaplaceEvent,
    PrivacyEvent,
    PureDPEvent,
    ZCDPEvent,
    merge_events,
)
from pate_torch.core import checks

CAP_ROUTE = "cap"
"""The route of a guarantee that is the cap of an account, which its privacy filter enforces."""
NO_ROUTE = "none"
DELTA_ONLY_ROUTE = "delta"
"""The route of events that cost only delta: outputs for neighbors are equal, up to failures of this probability."""


@dataclass(frozen=True, kw_only=True)
class Guarantee:
    """(epsilon, delta)-differential privacy, between neighbors that differ in one privacy unit.

    Attributes:
        epsilon: Epsilon at ``delta``.
        delta: Delta at which epsilon was computed.
        route: Accountant that computed epsilon: "gdp" (exact Gaussian), "pld" (privacy loss distribution), "rdp"
            (Renyi, best order), "zcdp" (closed form), "pure" (sum of epsilons), "none" (nothing was released), "delta"
            (the events cost only delta), or "cap" (the cap of the account, if its releases reserved more).
        adjacency: Neighboring relation. None if it is not stated.
        unit: Kind of the privacy unit. None if it is not stated.
    """

    epsilon: float
    delta: float
    route: str
    adjacency: str | None = None
    unit: str | None = None

    def __post_init__(self) -> None:
        if not self.epsilon >= 0:  # also refuses NaN
            raise checks.error("Guarantee.epsilon", self.epsilon, "must be a number of at least 0 (or infinite)")
        checks.between("Guarantee.delta", self.delta, 0, 1)


def compute_guarantee(
    events: Iterable[PrivacyEvent], delta: float, *, adjacency: str | None = None, unit: str | None = None
) -> Guarantee:
    """Compute the smallest epsilon at this delta of a release whose events were fixed beforehand.

    Events that were chosen after seeing earlier answers need a privacy filter (``filters.py``).

    Args:
        events: Events of the whole release.
        delta: Target delta, which includes the Delta events.
        adjacency: Neighboring relation, for the guarantee.
        unit: Kind of the privacy unit, for the guarantee.

    Raises:
        ValueError: An event is unknown, or the Delta events alone exceed delta.
    """
    epsilon_by_route = compute_route_epsilons(events, delta)
    route = min(epsilon_by_route, key=lambda name: epsilon_by_route[name])
    return Guarantee(epsilon=epsilon_by_route[route], delta=delta, route=route, adjacency=adjacency, unit=unit)


def compute_route_epsilons(events: Iterable[PrivacyEvent], delta: float) -> dict[str, float]:
    """Compute epsilon by every route that applies to these events, exact routes first.

    The result is {"none": 0.0} without events and {"delta": 0.0} if all events cost only delta. Infinite values are
    left out unless all are infinite: at a small delta the route "pld" may fail where others do not.
    """
    merged_events = merge_events(events)
    noise_events, delta_left = _split_off_delta_events(merged_events, delta)
    epsilon_by_route = (
        {DELTA_ONLY_ROUTE: 0.0}
        if merged_events and not noise_events
        else dict(_compute_route_epsilons(noise_events, delta_left))
    )
    if not epsilon_by_route:
        raise _delta_too_small_error(delta, delta - delta_left)
    return epsilon_by_route


@functools.lru_cache(maxsize=256)  # a report asks for the same totals many times
def _compute_route_epsilons(noise_events: tuple[PrivacyEvent, ...], delta_left: float) -> Mapping[str, float]:
    if not noise_events:
        return {NO_ROUTE: 0.0}
    epsilon_by_route: dict[str, float] = {}
    if delta_left > 0:
        mu = gdp.compute_total_mu(noise_events)
        if mu is not None:
            epsilon_by_route["gdp"] = gdp.compute_epsilon(mu, delta_left)
        elif pld.can_price(noise_events):
            epsilon_by_route["pld"] = pld.compute_epsilon(noise_events, delta_left)
        epsilon_by_route["rdp"] = rdp.compute_epsilon(noise_events, delta_left)
        rho = compute_total_rho(noise_events)
        if rho is not None:
            epsilon_by_route["zcdp"] = rho + 2 * math.sqrt(rho * -math.log(delta_left))
    pure_epsilon = compute_total_pure_epsilon(noise_events)
    if pure_epsilon is not None:
        epsilon_by_route["pure"] = pure_epsilon
    if any(math.isnan(value) for value in epsilon_by_route.values()):
        raise ArithmeticError(f"a route gave no number: {epsilon_by_route}")
    return {name: value for name, value in epsilon_by_route.items() if math.isfinite(value)} or epsilon_by_route


def compute_delta(events: Iterable[PrivacyEvent], epsilon: float) -> float:
    """Compute the smallest delta at this epsilon of a release whose events were fixed beforehand."""
    checks.non_negative("epsilon", epsilon)
    merged_events = merge_events(events)
    noise_events = tuple(e for e in merged_events if not isinstance(e, DeltaEvent))
    failure_delta = _sum_deltas(merged_events)
    if not noise_events:
        return min(1.0, failure_delta)
    deltas = [rdp.compute_delta(noise_events, epsilon)]
    mu = gdp.compute_total_mu(noise_events)
    if mu is not None:
        deltas.append(gdp.compute_delta(epsilon, mu))
    elif pld.can_price(noise_events):
        deltas.append(pld.compute_delta(noise_events, epsilon))
    pure_epsilon = compute_total_pure_epsilon(noise_events)
    if pure_epsilon is not None and pure_epsilon <= epsilon:
        deltas.append(0.0)
    return min(1.0, failure_delta + min(deltas))


def compute_total_rho(events: Iterable[PrivacyEvent]) -> float | None:
    """Compute the sum of the zCDP prices (eps^2/2 if pure, eta^2/8 if of bounded range); None if one is not finite."""
    parts = []
    for event in merge_events(events):
        match event:
            case DeltaEvent():
                continue
            case GaussianEvent():
                rho = event.mu**2 / 2
            case LaplaceEvent():
                rho = event.ratio**2 / 2
            case PureDPEvent():
                rho = event.epsilon**2 / 2
            case BoundedRangeEvent():
                rho = event.eta**2 / 8
            case ZCDPEvent():
                rho = event.rho
            case _:
                return None
        parts.append(event.count * rho)
    return math.fsum(parts)


def compute_total_pure_epsilon(events: Iterable[PrivacyEvent]) -> float | None:
    """Compute the sum of the pure epsilons; None if an event is not pure."""
    parts = []
    for event in merge_events(events):
        match event:
            case DeltaEvent():
                continue
            case LaplaceEvent():
                parts.append(event.count * event.ratio)
            case PureDPEvent():
                parts.append(event.count * event.epsilon)
            case BoundedRangeEvent():
                parts.append(event.count * event.eta)
            case _:
                return None
    return math.fsum(parts)


def _sum_deltas(events: Iterable[PrivacyEvent]) -> float:
    return math.fsum(e.count * e.delta for e in events if isinstance(e, DeltaEvent))


def _split_off_delta_events(events: Iterable[PrivacyEvent], delta: float) -> tuple[tuple[PrivacyEvent, ...], float]:
    """Return the events without Delta events, and delta minus the Delta events."""
    checks.delta("delta", delta)
    merged_events = merge_events(events)
    failure_delta = _sum_deltas(merged_events)
    if failure_delta > delta:
        raise _delta_too_small_error(delta, failure_delta)
    return tuple(e for e in merged_events if not isinstance(e, DeltaEvent)), delta - failure_delta


def _delta_too_small_error(delta: float, failure_delta: float) -> ValueError:
    return checks.error(
        "delta",
        delta,
        f"must exceed the release's own failure probability {failure_delta:.6g}",
        "Use a larger delta, or a mechanism with a smaller one.",
    )
