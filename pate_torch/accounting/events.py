"""Privacy events: frozen dataclasses that describe the noise of a mechanism relative to its sensitivity.

A mechanism translates its answers into events, and the accountant composes events to (epsilon, delta), so a new
mechanism needs no change in the accountant. An event bounds the effect that one privacy unit has on the answers under
the adjacency of the shards (see ``sensitive.Votes``).

Policy: from version 0.1.0 on, event types and their fields are not removed, because ledgers store events.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Union, get_args

from pate_torch.core import checks


@dataclass(frozen=True, kw_only=True)
class _Event:
    count: int = 1
    kind: ClassVar[str] = ""

    def __post_init__(self) -> None:
        checks.integer(f"{type(self).__name__}.count", self.count, low=0)
        # NumPy scalars are converted, because they equal Python numbers but cannot be serialized.
        object.__setattr__(self, "count", int(self.count))
        for f in fields(self):
            if f.type == "float":
                name = f"{type(self).__name__.removesuffix('Event')}.{f.name}"
                check = checks.non_negative if f.default == 0 else checks.positive
                object.__setattr__(self, f.name, check(name, getattr(self, f.name)))


@dataclass(frozen=True, kw_only=True)
class GaussianEvent(_Event):
    """A Gaussian mechanism whose noise is 1/mu times its L2 sensitivity: mu-GDP, rho = mu^2/2 (Balle & Wang 2018)."""

    mu: float
    kind: ClassVar[str] = "gaussian"


@dataclass(frozen=True, kw_only=True)
class LaplaceEvent(_Event):
    """A real number plus Laplace noise, which is epsilon-DP with epsilon = ratio.

    A moved vote changes two counts by 1, so each query of LNMax with scale b is two events of ratio 1/b.

    Attributes:
        ratio: Sensitivity divided by the scale of the noise.
    """

    ratio: float
    kind: ClassVar[str] = "laplace"


@dataclass(frozen=True, kw_only=True)
class PureDPEvent(_Event):
    """Any epsilon-DP mechanism, priced as randomized response, which dominates every epsilon-DP mechanism."""

    epsilon: float
    kind: ClassVar[str] = "pure"


@dataclass(frozen=True, kw_only=True)
class BoundedRangeEvent(_Event):
    """An eta-bounded-range mechanism, like the exponential mechanism: eta-DP, rho = eta^2/8 (Cesar & Rogers 2021)."""

    eta: float
    kind: ClassVar[str] = "bounded_range"


@dataclass(frozen=True, kw_only=True)
class ZCDPEvent(_Event):
    """A rho-zCDP mechanism, like discrete Gaussian noise: its Renyi divergence is at most a rho at each order a > 1."""

    rho: float
    kind: ClassVar[str] = "zcdp"


@dataclass(frozen=True, kw_only=True)
class RdpCurveEvent(_Event):
    """A mechanism whose Renyi divergence is bounded at some orders. At other orders the divergence counts as infinite.

    Attributes:
        orders: Renyi orders [A], each above 1.
        rdp: Bound on the Renyi divergence at each order, [A].
        source: Theorem that proves the bounds.
    """

    orders: tuple[float, ...]
    rdp: tuple[float, ...]
    source: str
    kind: ClassVar[str] = "rdp_curve"

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "orders", tuple(float(a) for a in self.orders))
        object.__setattr__(self, "rdp", tuple(float(r) for r in self.rdp))
        if not self.orders or len(self.orders) != len(self.rdp):
            rule = f"must have one value for each of the {len(self.orders)} orders, and at least one value"
            raise checks.error("RdpCurve.rdp", self.rdp, rule)
        for order, value in zip(self.orders, self.rdp, strict=True):
            if not 1 < order < math.inf:
                raise checks.error("RdpCurve.orders", order, "every order must be a finite number above 1")
            if not 0 <= value < math.inf:
                fix = "Leave out the orders at which the divergence is infinite."
                raise checks.error("RdpCurve.rdp", value, "every value must be finite and at least 0", fix)


@dataclass(frozen=True, kw_only=True)
class SampledGaussianEvent(_Event):
    """A run of DP-SGD: noisy sums over Poisson-sampled records, under add_remove, for units of one record.

    Attributes:
        rate: Probability with which a step includes a record.
        noise_multiplier: Standard deviation of the noise relative to the largest contribution of a record to a sum.
        steps: Number of steps of one run. ``count`` is the number of runs.
        failure_delta: Failure probability of one run at which a Gaussian mechanism dominates the run (``domination``).
            An account whose filter adds up mu^2 chooses this probability when it reserves the run. 0 if not chosen.
    """

    rate: float
    noise_multiplier: float
    steps: int
    failure_delta: float = 0
    kind: ClassVar[str] = "sampled_gaussian"

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.between("SampledGaussian.rate", self.rate, 0, 1)
        object.__setattr__(self, "steps", int(checks.integer("SampledGaussian.steps", self.steps, low=1)))


@dataclass(frozen=True, kw_only=True)
class DeltaEvent(_Event):
    """A failure probability that adds to the delta of a release, as in the sparse vector technique."""

    delta: float
    kind: ClassVar[str] = "delta"

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.delta("Delta.delta", self.delta)


_NoiseEvent = Union[GaussianEvent, LaplaceEvent, PureDPEvent, BoundedRangeEvent, ZCDPEvent, RdpCurveEvent]  # noqa: UP007
PrivacyEvent = Union[_NoiseEvent, SampledGaussianEvent, DeltaEvent]  # noqa: UP007 (runtime aliases)
_EVENT_TYPES: dict[str, type[Any]] = {event_type.kind: event_type for event_type in get_args(PrivacyEvent)}


def merge_events(events: Iterable[PrivacyEvent]) -> tuple[PrivacyEvent, ...]:
    """Merge equal events into one, with the sum of their counts, in the order of their first appearance.

    Raises:
        ValueError: An item is not an event. Every accountant calls this function first, and so checks its events.
    """
    counts: dict[PrivacyEvent, int] = {}
    for event in events:
        if type(event) not in _EVENT_TYPES.values():
            raise checks.error("event", event, f"must be one of {', '.join(c.__name__ for c in _EVENT_TYPES.values())}")
        single_event = replace(event, count=1)
        counts[single_event] = counts.get(single_event, 0) + event.count
    return tuple(replace(single_event, count=count) for single_event, count in counts.items() if count)


def split_off_deltas(events: Iterable[PrivacyEvent]) -> tuple[tuple[PrivacyEvent, ...], float]:
    """Return the merged events other than Delta events, and the sum of the deltas of the Delta events."""
    merged_events = merge_events(events)
    noise_events = tuple(e for e in merged_events if not isinstance(e, DeltaEvent))
    return noise_events, math.fsum(e.count * e.delta for e in merged_events if isinstance(e, DeltaEvent))


def get_pure_epsilon(event: PrivacyEvent) -> float | None:
    """Return the pure epsilon of an event, whatever its count, or None if the event is not pure."""
    match event:
        case LaplaceEvent():
            return event.ratio
        case PureDPEvent():
            return event.epsilon
        case BoundedRangeEvent():
            return event.eta
    return None


def to_json(events: Iterable[PrivacyEvent]) -> str:
    """Return the canonical JSON (sorted keys, exact floats) that the ledger stores and hashes."""
    rows = [{"kind": e.kind, **{f.name: getattr(e, f.name) for f in fields(e)}} for e in events]
    return json.dumps(rows, sort_keys=True, separators=(",", ":"), allow_nan=False)


def from_json(text: str) -> tuple[PrivacyEvent, ...]:
    """Read the output of ``to_json``.

    Raises:
        ValueError: A kind or a field is unknown.
    """
    rows = json.loads(text)
    if not (isinstance(rows, list) and all(isinstance(row, dict) for row in rows)):
        raise checks.error("events", text[:80], "must be a JSON list of objects")
    events = []
    for row in rows:
        kind = row.pop("kind", None)
        if kind not in _EVENT_TYPES:
            rule = f"must be one of {', '.join(sorted(_EVENT_TYPES))}"
            raise checks.error("event.kind", kind, rule, "A newer version may have written it: update pate_torch.")
        try:
            events.append(_EVENT_TYPES[kind](**row))
        except TypeError as error:
            raise checks.error("event", row, f"is not a {kind} event ({error})") from error
    return tuple(events)
