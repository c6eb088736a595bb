"""Events in, (epsilon, delta) out: the smallest valid value over the routes, and which route it came from."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pate_torch.accounting import gdp, pld, rdp
from pate_torch.accounting.events import ZCDP, BoundedRange, Delta, Event, Gaussian, Laplace, PureDP, merged
from pate_torch.core import checks

CAP = "cap"
"""Not a route of composition: the account's cap, which its filter keeps."""
NO_ROUTE = "none"
DELTA_ALONE = "delta"
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
            raise checks.fail("Guarantee.epsilon", self.epsilon, "must be a number of at least 0 (or infinite)")
        checks.between("Guarantee.delta", self.delta, 0, 1)


def epsilon(
    events: Iterable[Event], delta: float, *, adjacency: str | None = None, unit: str | None = None
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
    values = routes(events, delta)
    route = min(values, key=lambda name: values[name])
    return Guarantee(epsilon=values[route], delta=delta, route=route, adjacency=adjacency, unit=unit)


def routes(events: Iterable[Event], delta: float) -> dict[str, float]:
    """Epsilon by every route that applies to these events, exact routes first.

    No events: {"none": 0.0}; events that cost only delta: {"delta": 0.0}.
    Infinite only where every route is: one of them may fail at a small delta (``pld``) where the others do not.
    """
    every = merged(events)
    smooth, left = _split(every, delta)
    values = {DELTA_ALONE: 0.0} if every and not smooth else dict(_routes(smooth, left))
    if not values:
        raise _too_small(delta, delta - left)
    return values


@functools.lru_cache(maxsize=256)  # a report asks for the same totals many times
def _routes(smooth: tuple[Event, ...], left: float) -> Mapping[str, float]:
    if not smooth:
        return {NO_ROUTE: 0.0}
    values: dict[str, float] = {}
    if left > 0:
        mu = gdp.total_mu(smooth)
        if mu is not None:
            values["gdp"] = gdp.epsilon(mu, left)
        elif pld.priceable(smooth):
            values["pld"] = pld.epsilon(smooth, left)
        values["rdp"] = rdp.epsilon(smooth, left)
        rho = total_rho(smooth)
        if rho is not None:
            values["zcdp"] = rho + 2 * math.sqrt(rho * -math.log(left))
    pure = total_pure(smooth)
    if pure is not None:
        values["pure"] = pure
    if any(math.isnan(value) for value in values.values()):
        raise ArithmeticError(f"a route gave no number: {values}")
    return {name: value for name, value in values.items() if math.isfinite(value)} or values


def delta(events: Iterable[Event], epsilon: float) -> float:
    """The smallest delta of a release with these events, fixed beforehand, at this epsilon; Delta events included."""
    checks.non_negative("epsilon", epsilon)
    merged_events = merged(events)
    smooth = tuple(e for e in merged_events if not isinstance(e, Delta))
    failure = _failure(merged_events)
    if not smooth:
        return min(1.0, failure)
    values = [rdp.delta(smooth, epsilon)]
    mu = gdp.total_mu(smooth)
    if mu is not None:
        values.append(gdp.delta(epsilon, mu))
    elif pld.priceable(smooth):
        values.append(pld.delta(smooth, epsilon))
    pure = total_pure(smooth)
    if pure is not None and pure <= epsilon:
        values.append(0.0)
    return min(1.0, failure + min(values))


def total_rho(events: Iterable[Event]) -> float | None:
    """Sum of zCDP prices; None where an event has no finite one.

    An epsilon-DP event has eps^2/2, one of bounded range eta^2/8.
    """
    parts = []
    for event in merged(events):
        match event:
            case Delta():
                continue
            case Gaussian():
                rho = event.mu**2 / 2
            case Laplace():
                rho = event.ratio**2 / 2
            case PureDP():
                rho = event.epsilon**2 / 2
            case BoundedRange():
                rho = event.eta**2 / 8
            case ZCDP():
                rho = event.rho
            case _:
                return None
        parts.append(event.count * rho)
    return math.fsum(parts)


def total_pure(events: Iterable[Event]) -> float | None:
    """Sum of pure epsilons; None where an event is not pure."""
    parts = []
    for event in merged(events):
        match event:
            case Delta():
                continue
            case Laplace():
                parts.append(event.count * event.ratio)
            case PureDP():
                parts.append(event.count * event.epsilon)
            case BoundedRange():
                parts.append(event.count * event.eta)
            case _:
                return None
    return math.fsum(parts)


def _failure(events: Iterable[Event]) -> float:
    return math.fsum(e.count * e.delta for e in events if isinstance(e, Delta))


def _split(events: Iterable[Event], delta: float) -> tuple[tuple[Event, ...], float]:
    """The events without Delta, and what those leave of delta."""
    checks.delta("delta", delta)
    merged_events = merged(events)
    failure = _failure(merged_events)
    if failure > delta:
        raise _too_small(delta, failure)
    return tuple(e for e in merged_events if not isinstance(e, Delta)), delta - failure


def _too_small(delta: float, failure: float) -> ValueError:
    return checks.fail(
        "delta",
        delta,
        f"must exceed the release's own failure probability {failure:.6g}",
        "Ask at a larger delta, or give the mechanism a smaller one.",
    )
