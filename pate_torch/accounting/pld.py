"""Privacy loss distributions (dp_accounting), for mixtures of Gaussian, Laplace and pure events. Pessimistic.

Sensitivity is in the event already (a moved vote is mu = sqrt(2)/s, or two Laplace coordinates), so every event is
one unit-sensitivity mechanism under the library's add-or-remove relation; its replace-one relation would double it.
The import is lazy: the library takes a second to load, and most plans are Gaussian.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from pate_torch.accounting.events import BoundedRange, Delta, Event, Gaussian, Laplace, PureDP, merged
from pate_torch.core import checks

_INTERVAL = 1e-4
_CELLS = 2e6
_ROUNDING = 1e-14  # of delta, per composition: k-fold powers of a transform carry an error of about k 1e-16 log n


def priceable(events: Iterable[Event]) -> bool:
    """Whether a loss distribution is known for every event and the grid is affordable (a few seconds)."""
    smooth = _smooth(events)
    return all(isinstance(e, Gaussian | Laplace | PureDP | BoundedRange) for e in smooth) and (
        not smooth or 2 * _reach(smooth) / _interval(smooth) <= _CELLS
    )


def epsilon(events: Iterable[Event], delta: float) -> float:
    """Epsilon of the composed events at delta, rounded up; infinite where rounding errors could reach delta."""
    checks.delta("delta", delta)
    smooth = _smooth(events)
    safe = delta - _rounding(smooth)
    if safe < 0.999 * delta:
        return math.inf
    return float(_composed(smooth).get_epsilon_for_delta(safe)) if smooth else 0.0


def delta(events: Iterable[Event], epsilon: float) -> float:
    """Delta of the composed events at epsilon, rounded up."""
    checks.non_negative("epsilon", epsilon)
    smooth = _smooth(events)
    if not smooth:
        return 0.0
    return min(1.0, max(0.0, float(_composed(smooth).get_delta_for_epsilon(epsilon))) + _rounding(smooth))


def _smooth(events: Iterable[Event]) -> tuple[Event, ...]:
    """The events without Delta."""
    return tuple(e for e in merged(events) if not isinstance(e, Delta))


def _rounding(smooth: tuple[Event, ...]) -> float:
    return _ROUNDING * sum(1 if isinstance(e, Gaussian) else e.count for e in smooth)


def _ratio(event: Event) -> float:
    """The event's largest loss (a Gaussian's mu: its loss has that standard deviation)."""
    match event:
        case Gaussian():
            return event.mu
        case Laplace():
            return event.ratio
        case PureDP():
            return event.epsilon
        case BoundedRange():
            return event.eta
    raise checks.fail("event", event, "has no privacy loss distribution; use the RDP route")


def _reach(smooth: tuple[Event, ...]) -> float:
    """Where the composed loss has about all its mass."""
    variance = math.fsum(e.count * _ratio(e) ** 2 for e in smooth)
    pure = math.inf if any(isinstance(e, Gaussian) for e in smooth) else math.fsum(e.count * _ratio(e) for e in smooth)
    return min(pure, variance / 2 + 9 * math.sqrt(variance))


def _interval(smooth: tuple[Event, ...]) -> float:
    """Grid step: fine against the smallest loss, and a divisor of the commonest pure loss, which then is exact."""
    step = min(_INTERVAL, min(_ratio(e) for e in smooth) / 4)
    pure = [e for e in smooth if isinstance(e, PureDP | BoundedRange)]
    if pure:
        loss = _ratio(max(pure, key=lambda e: e.count))
        step = loss / math.ceil(loss / step)
    return step


@lru_cache(maxsize=32)
def _composed(smooth: tuple[Event, ...]) -> Any:
    from dp_accounting.pld import privacy_loss_distribution as library

    if not priceable(smooth):
        raise checks.fail("events", smooth, "have no affordable privacy loss distribution", "Use the RDP route.")
    step = _interval(smooth)
    total = library.identity(value_discretization_interval=step)
    for event in smooth:
        match event:
            case Gaussian():
                part = library.from_gaussian_mechanism(
                    1 / (event.mu * math.sqrt(event.count)), value_discretization_interval=step
                )
            case Laplace():
                part = library.from_laplace_mechanism(1 / event.ratio, value_discretization_interval=step)
                part = part.self_compose(event.count)
            case _:
                part = _randomized_response(library, _ratio(event), step).self_compose(event.count)
        total = total.compose(part)
    return total


def _randomized_response(library: Any, loss: float, step: float) -> Any:
    """The pair that dominates every mechanism of this pure loss, both losses rounded up to the grid.

    Not the library's ``from_privacy_parameters``: a loss that *is* on the grid can fall one rounding error above it,
    and would be charged a whole cell more, count times over.
    """

    def cell(value: float) -> int:
        nearest = round(value / step)
        return nearest if abs(value / step - nearest) < 1e-9 else math.ceil(value / step)

    lie = 1 / (1 + math.exp(loss)) if loss < 700 else 0.0
    masses = {cell(loss): 1 - lie}
    masses[cell(-loss)] = masses.get(cell(-loss), 0.0) + lie
    return library.PrivacyLossDistribution.create_from_rounded_probability(masses, 0.0, step)
