"""Privacy filters: how a cap on (epsilon, delta) is kept when what is asked next depends on what was answered.

A data owner looks at one release before choosing the next, and a mechanism may stop when it has seen enough: the
charges are then random, and the theorems about a fixed list of mechanisms do not apply. A *filter* does: one quantity,
fixed when the account opens, is added up, and a release that could take it past a fixed capacity is refused before
anything is drawn. Everything that is released then satisfies (epsilon, delta) of the cap together.

- "gdp": the sum of mu^2, at most mu(epsilon, delta)^2 (Smith & Thakurta 2022; Koskela, Tobaben & Honkela 2022).
  Gaussian mechanisms exactly; pure ones by the Gaussian that dominates them (``gdp.pure_to_mu``).
- "rdp": the sum of Renyi divergences at one order, at most what converts to (epsilon, delta) there
  (Feldman & Zrnic 2021). Every event with a finite divergence at that order.

Not covered, and so not offered: the best order *after* an adaptive run (the order would depend on the answers, and
each order's filter bounds its own sum only); the smaller of two filters, or a change from one to the other, for the
same reason. Failure probabilities (Delta events) add up separately, within ``delta_reserve``, also fixed at opening:
the bad events happen with that probability at most, whatever the choices in between.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from pate_torch.accounting import gdp, rdp
from pate_torch.accounting.events import Delta, Event, Gaussian, merged
from pate_torch.core import checks

KINDS = ("gdp", "rdp")


@dataclass(frozen=True)
class Spend:
    """What a filter adds up.

    Attributes:
        scalar: mu^2, or the divergence at the filter's order.
        delta: Failure probability.
    """

    scalar: float = 0.0
    delta: float = 0.0

    def __post_init__(self) -> None:
        if not (self.scalar >= 0 and self.delta >= 0):  # also refuses NaN
            raise checks.fail("Spend", (self.scalar, self.delta), "must be numbers of at least 0")

    @staticmethod
    def sum(parts: Iterable[Spend]) -> Spend:
        """Exactly rounded sum, so that the order of charges does not matter."""
        spends = list(parts)
        return Spend(math.fsum(s.scalar for s in spends), math.fsum(s.delta for s in spends))


@dataclass(frozen=True, kw_only=True)
class Filter:
    """A cap of (epsilon, delta) and the quantity that keeps it.

    Attributes:
        kind: "gdp" or "rdp".
        epsilon: Epsilon of the cap.
        delta: Delta of the cap.
        delta_reserve: The part of delta set aside for failures (Delta events).
        order: Renyi order of an rdp filter; None for gdp.

    Raises:
        ValueError: No sum could keep the cap (an rdp order at which even zero divergence converts to more).
    """

    kind: str
    epsilon: float
    delta: float
    delta_reserve: float = 0.0
    order: float | None = None

    def __post_init__(self) -> None:
        checks.one_of("filter", self.kind, KINDS)
        checks.positive("budget_epsilon", self.epsilon)
        checks.delta("delta", self.delta)
        checks.non_negative("delta_reserve", self.delta_reserve)
        if self.delta_reserve >= self.delta:
            raise checks.fail("delta_reserve", self.delta_reserve, f"must be below delta={self.delta:g}")
        if (self.kind == "rdp") != (self.order is not None):
            raise checks.fail("order", self.order, "must be given with filter=rdp, and only there")
        if not self.capacity > 0:
            raise checks.fail(
                "budget_epsilon",
                self.epsilon,
                f"is too small for an RDP filter of order {self.order:g} at delta={self.delta:g}",
                "Raise it, or plan Gaussian mechanisms only.",
            )

    @classmethod
    def plan(
        cls,
        planned: Iterable[Event],
        *,
        epsilon: float,
        delta: float,
        kind: str | None = None,
        delta_reserve: float | None = None,
    ) -> Filter:
        """The filter that suits what is planned: gdp if all is Gaussian, else rdp at the order that fits most of it.

        The order maximizes capacity / planned divergence, which for Gaussian plans is the order that converts best
        at the cap, and which lets a plan calibrated to the cap through.

        Args:
            planned: Worst-case events of the releases to come.
            epsilon: Epsilon of the cap.
            delta: Delta of the cap.
            kind: "gdp" or "rdp"; None: whichever suits.
            delta_reserve: None: half of delta if the plan has Delta events, else 0.
        """
        merged_events = merged(planned)
        smooth = tuple(e for e in merged_events if not isinstance(e, Delta))
        if kind is None:
            kind = "gdp" if all(isinstance(e, Gaussian) for e in smooth) else "rdp"
        if delta_reserve is None:
            delta_reserve = delta / 2 if len(smooth) < len(merged_events) else 0.0
        order = None
        if kind == "rdp":
            checks.positive("budget_epsilon", epsilon)
            checks.delta("delta", delta)
            order = _best_order(smooth or (Gaussian(mu=1.0),), epsilon, delta - delta_reserve)
        return cls(kind=kind, epsilon=epsilon, delta=delta, delta_reserve=delta_reserve, order=order)

    @classmethod
    def would_open(cls, planned: Iterable[Event], *, epsilon: float, delta: float) -> bool:
        """Whether an account with this cap, opened for these events, would admit them."""
        planned = tuple(planned)
        account = cls.plan(planned, epsilon=epsilon, delta=delta)
        return account.admits(Spend(), account.price(planned))

    @cached_property
    def capacity(self) -> float:
        """Largest sum that keeps the cap: of mu^2, or of divergences at ``order``."""
        left = self.delta - self.delta_reserve
        if self.order is None:
            return gdp.mu(self.epsilon, left) ** 2
        return float((self.epsilon - rdp.conversion(self.order, left))[0])

    def price(self, events: Iterable[Event]) -> Spend:
        """What these events add to the sum.

        Raises:
            ValueError: An event this filter cannot bound.
        """
        merged_events = merged(events)
        smooth = tuple(e for e in merged_events if not isinstance(e, Delta))
        failure = math.fsum(e.count * e.delta for e in merged_events if isinstance(e, Delta))
        return Spend(math.fsum(e.count * self._unit(e) for e in smooth), failure)

    def admits(self, spent: Spend, new: Spend) -> bool:
        """Whether ``new`` may still be drawn after ``spent``."""
        total = Spend.sum((spent, new))
        return total.scalar <= self.capacity and total.delta <= self.delta_reserve

    def to_epsilon(self, spend: Spend) -> float:
        """Epsilon of a sum at the account's delta: the cap at full capacity, 0 for nothing spent."""
        if spend.scalar == 0:
            return 0.0
        left = self.delta - self.delta_reserve
        if self.order is None:
            return gdp.epsilon(math.sqrt(spend.scalar), left)
        return rdp.to_epsilon(self.order, spend.scalar, left)

    def _unit(self, event: Event) -> float:
        if self.order is not None:
            value = float(rdp.curve([replace(event, count=1)], self.order)[0])
            if math.isfinite(value):
                return value
            raise checks.fail("event", event, f"has no finite Renyi divergence at this account's order {self.order!r}")
        mu = gdp.dominating_mu(event)
        if mu is None:
            raise checks.fail(
                "event",
                event,
                "cannot be charged to an account with a gdp filter",
                "Only Gaussian and pure events have a Gaussian that dominates them. Noise of another kind (discrete"
                " noise, say) must be planned when the account opens, which then gets an rdp filter.",
            )
        return mu**2


def _best_order(planned: tuple[Event, ...], epsilon: float, delta: float) -> float:
    """The order of the default grid (and of the plan's own tables) at which most copies of the plan fit the cap."""
    tables = [order for e in planned for order in getattr(e, "orders", ())]
    orders = np.array(sorted({*rdp.ORDERS.tolist(), *tables}))
    capacity = epsilon - rdp.conversion(orders, delta)
    fits = np.where(capacity > 0, capacity, 0) / rdp.curve(planned, orders)
    if not fits.max() > 0:
        raise checks.fail(
            "budget_epsilon",
            epsilon,
            f"is too small for an RDP filter at delta={delta:g}",
            f"At least {float(np.min(rdp.conversion(orders, delta))):.4g} is needed before anything can be charged.",
        )
    return float(orders[int(np.argmax(fits))])
