"""The accountant, which converts events to (epsilon, delta) by several routes and takes the smallest epsilon."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from pate_torch.accounting import domination, gdp, pld, rdp
from pate_torch.accounting.events import (
    BoundedRangeEvent,
    GaussianEvent,
    PrivacyEvent,
    SampledGaussianEvent,
    ZCDPEvent,
    get_pure_epsilon,
    split_off_deltas,
)
from pate_torch.core import checks

CAP_ROUTE = "cap"
"""The route of a guarantee that is the cap of an account, which its privacy filter enforces."""
DELTA_ONLY_ROUTE = "delta"
"""The route of events that cost only delta: outputs for neighbors are equal, up to failures of this probability."""


@dataclass(frozen=True, kw_only=True)
class Guarantee:
    """(epsilon, delta)-differential privacy, between neighbors that differ in one privacy unit.

    Attributes:
        epsilon: Epsilon at ``delta``.
        delta: Delta at which epsilon was computed.
        route: Accountant that computed epsilon: "gdp" (Gaussian, exact or dominating DP-SGD), "pld" (privacy loss
            distribution), "rdp" (Renyi, best order), "zcdp" (closed form), "pure" (sum of epsilons), "none" (nothing
            was released), "delta" (the events cost only delta), or "cap" (epsilon of the account's cap, if its releases
            reserved more).
        adjacency: Neighboring relation. None if the caller states no relation.
        unit: Kind of the privacy unit. None if the caller states no unit.
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

    Events that were chosen after seeing earlier answers need a privacy filter (``filters.py``). Delta includes the
    failure probabilities of the Delta events. Adjacency and unit are stated in the guarantee, and not checked.

    Raises:
        ValueError: An event is unknown, or the Delta events leave no part of delta for the other events.
    """
    epsilon_by_route = compute_route_epsilons(events, delta)
    route = min(epsilon_by_route, key=lambda name: epsilon_by_route[name])
    return Guarantee(epsilon=epsilon_by_route[route], delta=delta, route=route, adjacency=adjacency, unit=unit)


def compute_route_epsilons(events: Iterable[PrivacyEvent], delta: float, accountant: str = "best") -> dict[str, float]:
    """Compute epsilon by every route that applies to these events ("best"), exact routes first, or by one accountant.

    The result is {"none": 0.0} without events and {"delta": 0.0} if all events cost only delta. Infinite values are
    left out unless all values are infinite. (At a small delta the route "pld" may be infinite although others are not.)
    """
    checks.delta("delta", delta)
    noise_events, failure_delta = split_off_deltas(events)
    if failure_delta <= delta:
        if failure_delta and not noise_events:
            return {DELTA_ONLY_ROUTE: 0.0}
        epsilon_by_route = _compute_route_epsilons(noise_events, delta - failure_delta, accountant)
        if epsilon_by_route:
            return dict(epsilon_by_route)
    rule = f"must exceed {failure_delta:.6g}, the failure probability (sum of the Delta events) of the release"
    raise checks.error("delta", delta, rule, "Use a larger delta, or a mechanism with a smaller delta.")


@functools.lru_cache(maxsize=256)  # a report needs the same totals many times
def _compute_route_epsilons(events: tuple[PrivacyEvent, ...], delta: float, accountant: str) -> Mapping[str, float]:
    if not events:
        return {"none": 0.0}
    routes: dict[str, Callable[[], float]] = {}
    if delta > 0:
        dominating_events, failure_delta = split_off_deltas(domination.replace_sampled_gaussians(events))
        mu, rho = gdp.compute_total_mu(dominating_events), compute_total_rho(events)
        if mu is not None and failure_delta < delta:
            routes["gdp"] = functools.partial(gdp.compute_epsilon, mu, delta - failure_delta)
        # Of a DP-SGD run alone, all parameters were fixed. Other releases may have been chosen after it.
        is_single_run = len(events) == 1 and isinstance(events[0], SampledGaussianEvent) and events[0].count == 1
        if (mu is None or is_single_run or accountant == "pld") and pld.can_compose(events):
            routes["pld"] = functools.partial(pld.compute_epsilon, events, delta)
        routes["rdp"] = functools.partial(rdp.compute_epsilon, events, delta)
        if rho is not None:
            routes["zcdp"] = functools.partial(float, rho + 2 * math.sqrt(rho * -math.log(delta)))
    if (pure_epsilon := compute_total_pure_epsilon(events)) is not None:
        routes["pure"] = functools.partial(float, pure_epsilon)
    if routes:
        checks.one_of("accountant", accountant, ("best", *routes), "Other accountants do not cover these mechanisms.")
    epsilon_by_route = {name: compute() for name, compute in routes.items() if accountant in ("best", name)}
    if any(math.isnan(value) for value in epsilon_by_route.values()):
        raise ArithmeticError(f"an accountant computed NaN: {epsilon_by_route}")
    return {name: value for name, value in epsilon_by_route.items() if math.isfinite(value)} or epsilon_by_route


def compute_delta(events: Iterable[PrivacyEvent], epsilon: float) -> float:
    """Compute the smallest delta at this epsilon of a release whose events were fixed beforehand."""
    checks.non_negative("epsilon", epsilon)
    noise_events, failure_delta = split_off_deltas(events)
    if not noise_events:
        return min(1.0, failure_delta)
    deltas = [rdp.compute_delta(noise_events, epsilon)]
    dominating_events, domination_delta = split_off_deltas(domination.replace_sampled_gaussians(noise_events))
    if (mu := gdp.compute_total_mu(dominating_events)) is not None:
        deltas.append(gdp.compute_delta(epsilon, mu) + domination_delta)
    elif pld.can_compose(noise_events):
        deltas.append(pld.compute_delta(noise_events, epsilon))
    pure_epsilon = compute_total_pure_epsilon(noise_events)
    if pure_epsilon is not None and pure_epsilon <= epsilon:
        deltas.append(0.0)
    return min(1.0, failure_delta + min(deltas))


def compute_total_rho(events: Iterable[PrivacyEvent]) -> float | None:
    """Compute the sum of the zCDP costs rho of all events, or None if the rho of an event is unknown.

    A pure event has rho = epsilon^2/2, and an event of bounded range has rho = eta^2/8.
    """
    noise_events, _ = split_off_deltas(events)
    parts = []
    for event in noise_events:
        match event:
            case GaussianEvent():
                rho = event.mu**2 / 2
            case BoundedRangeEvent():
                rho = event.eta**2 / 8
            case ZCDPEvent():
                rho = event.rho
            case _:
                pure_epsilon = get_pure_epsilon(event)
                if pure_epsilon is None:
                    return None
                rho = pure_epsilon**2 / 2
        parts.append(event.count * rho)
    return math.fsum(parts)


def compute_total_pure_epsilon(events: Iterable[PrivacyEvent]) -> float | None:
    """Compute the sum of the pure epsilons of all events, or None if an event is not pure."""
    noise_events, _ = split_off_deltas(events)
    parts = [(event.count, get_pure_epsilon(event)) for event in noise_events]
    if any(epsilon is None for _, epsilon in parts):
        return None
    return math.fsum(count * epsilon for count, epsilon in parts if epsilon is not None)
