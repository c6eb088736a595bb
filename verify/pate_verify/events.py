"""Privacy events: mappings with kind, scale and count, as in ``release.json``."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

Event = Mapping[str, Any]
PURE_KINDS = {"laplace": "ratio", "pure": "epsilon", "bounded_range": "eta"}
"""Kind of an event with a bounded privacy loss -> key of the bound."""
MAX_LOSS = 100
LIMITS_TEXT = "needs at most 1000000 steps, a noise multiplier of at least .3, and epsilon below 100"


def get_max_loss(event: Event) -> float:
    """Return the largest privacy loss of an event; infinite if the loss is unbounded."""
    return float(event[PURE_KINDS[event["kind"]]]) if event["kind"] in PURE_KINDS else math.inf


def sum_squared_mu(events: Iterable[Event]) -> float:
    """Sum mu^2 of the Gaussian events; a rho-zCDP event counts as Gaussian with this rho."""
    mu2_by_kind = {"gaussian": lambda e: e["mu"] ** 2, "zcdp": lambda e: 2 * e["rho"]}
    return math.fsum(e["count"] * mu2_by_kind[e["kind"]](e) for e in events if e["kind"] in mu2_by_kind)
