"""Events in, (epsilon, delta) out: the smallest valid value over the routes, and which route it came from."""

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
"""Not a route of composition: the account's cap, which its filter keeps."""
NO_ROUTE = "none"
DELTA_ONLY_ROUTE = "delta"
"""The route of events that cost only delta: neighbors give the same, but for a failure of this probability."""


@dataclass(frozen=True, kw_only=True)
class Guarantee:
    """(epsilon, delta)-differential privacy, between neighbors that differ in one privacy unit.

    Attributes:
        epsilon: Epsilon at ``delta``.
        delta: Delta of the account, or as asked.
        route: How epsilon was computed: "gdp" (exact Gaussian), "pld" (privacy loss distribution), "rdp" (Renyi, best
            order), "zcdp" (closed form), "pure" (sum of epsilons), "none" (nothing was released), "delta" (the
            events cost only delta), "cap" (of the account, where its releases reserved more).
        adjacency: Neighboring relation; None: not stated.
        unit: What the privacy unit is; None: not stated.
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
    """The smallest epsilon of a release with these events, fixed beforehand, at this delta.

    Not covered: events chosen after seeing earlier answers (``filters.py``). Source: ALGORITHMS of each route.

    Args:
        events: Events of the whole release.
        delta: Target delta, Delta events included.
        adjacency: Stated in the guarantee.
        unit: Stated in the guarantee.

    Raises:
        ValueError: An unknown event, or Delta events that alone pass delta.
    """
    epsilon_by_route = compute_route_epsilons(events, delta)
    route = min(epsilon_by_route, key=lambda name: epsilon_by_route[name])
    return Guarantee(epsilon=epsilon_by_route[route], delta=delta, route=route, adjacency=adjacency, unit=unit)


def compute_route_epsilons(events: Iterable[PrivacyEvent], delta: float) -> dict[str, float]:
    """Epsilon by every route that applies to these events, exact routes first.

    No events: {"none": 0.0}; events that cost only delta: {"delta": 0.0}.
    Infinite only where every route is: one of them may fail at a small delta (``pld``) where the others do not.
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
    """The smallest delta of a release with these events, fixed beforehand, at this epsilon; Delta events included."""
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
    """Sum of zCDP prices; None where an event has no finite one.

    An epsilon-DP event has eps^2/2, one of bounded range eta^2/8.
    """
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
    """Sum of pure epsilons; None where an event is not pure."""
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
    """The events without Delta, and what those leave of delta."""
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
        "Ask at a larger delta, or give the mechanism a smaller one.",
    )
