"""Privacy events: mappings with kind, scale and count, as in ``release.json``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

Event = Mapping[str, Any]
PURE_KINDS = {"laplace": "ratio", "pure": "epsilon", "bounded_range": "eta"}
"""Kind of an event with a bounded privacy loss -> key of the bound."""
LIMITS_TEXT = "needs at most 1000000 steps, a noise multiplier of at least .3, and epsilon below 100"


def get_max_loss(event: Event) -> float:
    """Return the largest privacy loss of an event; infinite if the loss is unbounded."""
    return float(event[PURE_KINDS[event["kind"]]]) if event["kind"] in PURE_KINDS else math.inf
