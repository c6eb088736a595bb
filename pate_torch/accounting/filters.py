"""Privacy filters, which enforce a cap on (epsilon, delta) although later queries depend on earlier answers.

A data owner looks at one release before choosing the next, and a mechanism may stop early. The charges are then random,
and theorems about a fixed list of mechanisms do not apply. A *filter* adds up one quantity, which is chosen when the
account opens. Before any noise is drawn, the filter refuses a release that could make the sum exceed a fixed capacity.
All releases together then satisfy the (epsilon, delta) of the cap.

- "gdp": the sum of mu^2 is at most mu(epsilon, delta)^2 (Smith & Thakurta 2022; Koskela, Tobaben & Honkela 2022). The
  filter costs Gaussian mechanisms exactly, pure mechanisms by the Gaussian mechanism that dominates them
  (``gdp.compute_mu_of_pure_epsilon``), and DP-SGD by the one that dominates it up to a failure (``domination``).
- "rdp": the sum of Renyi divergences at one order is at most the value that converts to (epsilon, delta) (Feldman &
  Zrnic 2021). The filter costs every event with a finite divergence at this order.

The theorems do not cover the best order *after* an adaptive run, because this order would depend on the answers. For
the same reason the theorems cover neither the better of two filters nor a change of the filter, and this module offers
neither. Failure probabilities (Delta events) add up separately. Their sum is at most ``delta_reserve``, which is also
fixed when the account opens, and bounds the probability of a failure for any adaptive choices. A tenth of delta is
reserved by default, so that an account opened for Gaussian answers admits sparse vectors, too.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from decimal import ROUND_DOWN, Context
from functools import cached_property

import numpy as np

from pate_torch.accounting import domination, gdp, rdp
from pate_torch.accounting.events import (
    GaussianEvent,
    PrivacyEvent,
    RdpCurveEvent,
    SampledGaussianEvent,
    split_off_deltas,
)
from pate_torch.core import checks

FILTER_KINDS = ("gdp", "rdp")
DELTA_OVER_RESERVE = 10
"""Delta over the part that is reserved for failures by default, which costs a "gdp" filter 1 % of its queries."""
DELTA_OVER_FAILURE = 4 * DELTA_OVER_RESERVE
"""Delta over the probability with which a sparse vector may fail by default: a quarter of the default reserve."""
_MIN_SHARE_OF_COPIES = 0.98
"""Share of the largest number of copies of the plan that must fit at the order of an "rdp" filter."""


@dataclass(frozen=True)
class FilterCost:
    """A cost in the units of a filter.

    Attributes:
        scalar: Sum of mu^2 for a "gdp" filter; Renyi divergence at the order of the filter for an "rdp" filter.
        delta: Failure probability.
    """

    scalar: float = 0.0
    delta: float = 0.0

    def __post_init__(self) -> None:
        if not (self.scalar >= 0 and self.delta >= 0):  # also refuses NaN
            raise checks.error("FilterCost", (self.scalar, self.delta), "must be two numbers of at least 0")

    @staticmethod
    def from_sum(summands: Iterable[FilterCost]) -> FilterCost:
        """Return the exactly rounded sum, which does not depend on the order of the summands."""
        costs = list(summands)
        return FilterCost(math.fsum(cost.scalar for cost in costs), math.fsum(cost.delta for cost in costs))


NO_COST = FilterCost()
"""Cost of an account without releases."""
_UNITS_PER_ONE = 2**1074
"""Every float is an integer number of units of the smallest positive float, 2^-1074."""


@dataclass(frozen=True)
class ExactCost:
    """A running sum of costs as integers, which rounds once, to the float of ``FilterCost.from_sum``."""

    scalar_units: int = 0
    delta_units: int = 0

    def add(self, cost: FilterCost, sign: int = 1) -> ExactCost:
        """Return the sum with this cost, or without this cost if ``sign`` is -1."""
        units = [sign * n * (_UNITS_PER_ONE // d) for n, d in map(float.as_integer_ratio, (cost.scalar, cost.delta))]
        return ExactCost(self.scalar_units + units[0], self.delta_units + units[1])

    def round(self) -> FilterCost:
        return FilterCost(self.scalar_units / _UNITS_PER_ONE, self.delta_units / _UNITS_PER_ONE)


@dataclass(frozen=True, kw_only=True)
class PrivacyFilter:
    """A cap of (epsilon, delta) and the quantity that enforces the cap.

    Attributes:
        kind: Kind of the filter, "gdp" or "rdp".
        epsilon: Epsilon of the cap.
        delta: Delta of the cap.
        delta_reserve: Part of delta that is reserved for failures (Delta events).
        order: Renyi order of an "rdp" filter. None for a "gdp" filter.

    Raises:
        ValueError: The cap is so small that even zero divergence at ``order`` converts to a larger epsilon.
    """

    kind: str
    epsilon: float
    delta: float
    delta_reserve: float = 0.0
    order: float | None = None

    def __post_init__(self) -> None:
        checks.one_of("filter", self.kind, FILTER_KINDS)
        checks.positive("budget_epsilon", self.epsilon)
        checks.delta("delta", self.delta)
        checks.non_negative("delta_reserve", self.delta_reserve)
        if self.delta_reserve >= self.delta:
            raise checks.error("delta_reserve", self.delta_reserve, f"must be below delta={self.delta:g}")
        if (self.kind == "rdp") != (self.order is not None):
            raise checks.error("order", self.order, "must be a Renyi order if filter=rdp, and None if filter=gdp")
        if not self.capacity > 0:
            rule = f"is too small for an RDP filter of order {self.order:g} at delta={self.delta:g}"
            fix = "Raise budget_epsilon, or plan Gaussian mechanisms only."
            raise checks.error("budget_epsilon", self.epsilon, rule, fix)

    @classmethod
    def from_planned_events(
        cls,
        planned_events: Iterable[PrivacyEvent],
        *,
        epsilon: float,
        delta: float,
        delta_reserve: float | None = None,
        kind: str | None = None,
    ) -> PrivacyFilter:
        """Choose the filter for planned worst-case events: its kind, its order and its reserve.

        Args:
            planned_events: Events of the first release.
            epsilon: Epsilon of the cap.
            delta: Delta of the cap.
            kind: Kind of the filter. None for "gdp" if all planned events are Gaussian, or DP-SGD that a Gaussian
                mechanism dominates, else for "rdp".
            delta_reserve: Part of delta that is reserved for failures. If None, this part is a tenth of delta, or half
                of delta if the plan fails with more probability than a tenth of delta. If the plan fits the cap only
                without this reserve, the part is the failure probability of the plan.
        """
        epsilon = checks.positive("budget_epsilon", epsilon)
        checks.delta("delta", delta)
        planned_events = tuple(planned_events)
        noise_events, failure_delta = split_off_deltas(planned_events)
        if kind is None:
            kind = "gdp" if all(isinstance(e, GaussianEvent) for e in noise_events) else "rdp"
            if kind == "rdp" and all(isinstance(e, GaussianEvent | SampledGaussianEvent) for e in noise_events):
                with contextlib.suppress(ValueError):  # no Gaussian mechanism is known to dominate DP-SGD
                    gdp_filter = cls.from_planned_events(
                        planned_events, epsilon=epsilon, delta=delta, delta_reserve=delta_reserve, kind="gdp"
                    )
                    if gdp_filter.admits_release(planned_events):
                        return gdp_filter

        def make_filter(reserve: float) -> PrivacyFilter:
            order = _select_order(noise_events, epsilon, delta - reserve) if kind == "rdp" else None
            return cls(kind=kind, epsilon=epsilon, delta=delta, delta_reserve=reserve, order=order)

        if delta_reserve is not None:
            checks.between("delta_reserve", delta_reserve, 0, delta)
            return make_filter(delta_reserve)
        default_reserve = delta / DELTA_OVER_RESERVE
        if failure_delta > default_reserve:
            default_reserve = delta / 2
        default_filter = make_filter(default_reserve)
        if kind == "gdp" and any(isinstance(e, SampledGaussianEvent) for e in noise_events):
            return default_filter  # a failure of DP-SGD is paid from the reserve, which must not be 0
        if failure_delta < default_reserve and not default_filter.admits_release(planned_events):
            smallest_reserve_filter = make_filter(failure_delta)
            if smallest_reserve_filter.admits_release(planned_events):
                return smallest_reserve_filter
        return default_filter

    def admits_release(self, events: Iterable[PrivacyEvent], past_cost: FilterCost = NO_COST) -> bool:
        """Whether a release with these events is admitted after releases of ``past_cost``, by default as the first."""
        return self.admits(past_cost, self.compute_cost(self.choose_failures(events, past_cost)))

    @cached_property
    def capacity(self) -> float:
        """Largest admissible sum of mu^2 ("gdp"), or of Renyi divergences at ``order`` ("rdp")."""
        delta_left = self.delta - self.delta_reserve
        if self.order is None:
            return gdp.compute_mu(self.epsilon, delta_left) ** 2
        return float((self.epsilon - rdp.compute_conversion_term(self.order, delta_left))[0])

    def choose_failures(self, events: Iterable[PrivacyEvent], past_cost: FilterCost) -> tuple[PrivacyEvent, ...]:
        """Return the events with a failure probability for each DP-SGD run that needs one and has none.

        A "gdp" filter needs one. All runs together get a quarter of the reserve that ``past_cost`` leaves, rounded down
        to 3 digits. The choice depends on nothing else, so it is made before a record is seen.
        """
        events = tuple(events)
        new_runs = [e for e in events if isinstance(e, SampledGaussianEvent) and not e.failure_delta]
        available = (self.delta_reserve - past_cost.delta) / 4 / max(1, sum(e.count for e in new_runs))
        if self.kind == "rdp" or not new_runs or available <= 0:
            return events
        failure_delta = float(Context(prec=3, rounding=ROUND_DOWN).create_decimal(available))
        return tuple(replace(e, failure_delta=failure_delta) if e in new_runs else e for e in events)

    def compute_cost(self, events: Iterable[PrivacyEvent]) -> FilterCost:
        """Compute the cost of these events, or raise ValueError if the filter cannot bound an event."""
        if self.order is None:
            events = domination.replace_sampled_gaussians(events)
        noise_events, failure_delta = split_off_deltas(events)
        return FilterCost(math.fsum(e.count * self._compute_event_scalar(e) for e in noise_events), failure_delta)

    def admits(self, past_cost: FilterCost, new_cost: FilterCost) -> bool:
        """Whether a release of ``new_cost`` is admitted after releases of ``past_cost``."""
        total = FilterCost.from_sum((past_cost, new_cost))
        return total.scalar <= self.capacity and total.delta <= self.delta_reserve

    def to_epsilon(self, cost: FilterCost) -> float:
        """Convert a cost to epsilon at the delta of the cap: the cap at full capacity, 0 at zero cost."""
        if cost.scalar == 0:
            return 0.0
        delta_left = self.delta - self.delta_reserve
        if self.order is None:
            return gdp.compute_epsilon(math.sqrt(cost.scalar), delta_left)
        return rdp.to_epsilon(self.order, cost.scalar, delta_left)

    def _compute_event_scalar(self, event: PrivacyEvent) -> float:
        if self.order is not None:
            divergence = float(rdp.compute_curve([replace(event, count=1)], self.order)[0])
            if math.isfinite(divergence):
                return divergence
            rule = f"has no finite Renyi divergence at {self.order!r}, the order of this account's filter"
            raise checks.error("event", event, rule)
        mu = gdp.compute_dominating_mu(event)
        if mu is None:
            fix = (
                "Charge another account, opened with privacy.filter=rdp, which admits every mechanism. A gdp filter"
                " covers Gaussian noise, pure differential privacy and, while delta is left in reserve, DP-SGD."
            )
            raise checks.error("event", event, "cannot be charged to an account with a gdp filter", fix)
        return mu**2


def _select_order(planned_events: tuple[PrivacyEvent, ...], epsilon: float, delta: float) -> float:
    """Choose, among the default grid and the tabulated orders, the order at which Gaussian answers cost least.

    Only orders that admit nearly as many copies of the plan as the best order are considered, and if the plan fits at
    the best order, it fits at the chosen order. The best order itself can be so high, as for a sparse vector, that
    Gaussian answers would cost several times their cost at a lower order.
    """
    tabulated_orders = [order for e in planned_events if isinstance(e, RdpCurveEvent) for order in e.orders]
    orders = np.array(sorted({*rdp.ORDERS.tolist(), *tabulated_orders}))
    capacity = epsilon - rdp.compute_conversion_term(orders, delta)
    num_copies = np.where(capacity > 0, capacity, 0) / rdp.compute_curve(planned_events, orders)
    max_copies = num_copies.max()
    if not max_copies > 0:
        fix = f"Set budget_epsilon above {np.min(epsilon - capacity):.4g}; a smaller budget admits no release."
        raise checks.error("budget_epsilon", epsilon, f"is too small for an RDP filter at delta={delta:g}", fix)
    is_suitable = (num_copies >= _MIN_SHARE_OF_COPIES * max_copies) & (num_copies >= min(1.0, max_copies))
    return float(orders[np.argmax(np.where(is_suitable, capacity / orders, 0))])
