"""Accounts of a ledger: their terms, their charges, the guarantee to claim, and the changes that each entry makes.

A claim is composed from the *reserved* events of releases, which do not depend on votes. The incurred events may depend
on votes, because a mechanism may leave a query unanswered or stop early. The incurred events are charged against the
cap, and their epsilon is shown beside the claim as "ex post".
"""

from __future__ import annotations

import json
import math
from collections import UserDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pate_torch.accounting.accountant import CAP_ROUTE, Guarantee, compute_guarantee
from pate_torch.accounting.events import (
    DeltaEvent,
    GaussianEvent,
    PrivacyEvent,
    ZCDPEvent,
    from_json,
    merge_events,
    to_json,
)
from pate_torch.accounting.filters import ExactCost, FilterCost, PrivacyFilter
from pate_torch.core import checks
from pate_torch.core.formatting import format_delta
from pate_torch.privacy.chain import LedgerEntry, LedgerError

PURPOSE_LABELS, PURPOSE_STUDENT_CHOICE = "labels", "choice of a student"
PURPOSE_HYPOTHESIS = "hypothesis or its answers"
PURPOSE_TEST = "test of the model on held-out units"
"""Usual purposes of a reservation, as the ledger stores them."""


def check_unit(key: str, adjacency: str, unit: str) -> None:
    """Raise ValueError, which names ``key``, if the neighboring relation does not protect units of several records."""
    if adjacency == "replace_one" and unit.startswith("group:"):
        fix = f"Use {key}=add_remove, which protects all records of a unit together, or let each record be a unit."
        problem = f"protects single records, but the privacy unit is {unit}"
        raise checks.error(key, adjacency, problem, fix)


class BudgetExceeded(ValueError):
    """The release would exceed the cap of the account. Nothing was drawn or charged.

    Attributes:
        fitting_share: Share of the release that would fit under the cap.
    """

    def __init__(self, message: str, fitting_share: float) -> None:
        super().__init__(message)
        self.fitting_share = fitting_share


@dataclass(frozen=True, kw_only=True)
class Charge:
    """The charge of one release.

    Attributes:
        reserved_cost: Cost of the worst case.
        reserved_events: Events of the worst case.
        charged_cost: Cost that is charged: that of the worst case before the commit, of the incurred events after it.
        incurred_events: Events whose cost is ``charged_cost``.
        insecure: Whether the noise was seeded.
        fingerprint: Content fingerprint of the records, or of votes in their place.
        is_committed: Whether the answers were written.
        is_stopped: Whether the first answers stopped the release, which charged these answers alone.
        is_suspended: Whether the release can be resumed.
        state_digest: Hash of the state from which the release can be resumed. Empty if no state was recorded.
        recorded_events: Events incurred up to the last record.
    """

    reserved_cost: FilterCost
    reserved_events: tuple[PrivacyEvent, ...]
    charged_cost: FilterCost
    incurred_events: tuple[PrivacyEvent, ...]
    insecure: bool
    purpose: str
    run: str
    fingerprint: str
    is_committed: bool = False
    is_stopped: bool = False
    is_suspended: bool = False
    state_digest: str = ""
    recorded_events: tuple[PrivacyEvent, ...] = ()
    num_resumptions: int = 0


class Charges(UserDict[str, Charge]):
    """Charges by reservation id, in order, with their exact sum."""

    total = ExactCost()

    def __setitem__(self, identity: str, charge: Charge) -> None:
        before = self.data.get(identity)
        total = self.total if before is None else self.total.add(before.charged_cost, -1)
        self.total = total.add(charge.charged_cost)
        self.data[identity] = charge

    def __delitem__(self, identity: str) -> None:
        raise TypeError("charges: a charge is never deleted")


class ChargedReleases:
    """Charged releases of an account, and their guarantee together.

    Attributes:
        account: Account that was charged.
        charges: Charges by reservation id.
    """

    account: Account
    charges: Mapping[str, Charge]

    @property
    def is_private(self) -> bool:
        """Whether all releases used secret noise. If a release used seeded noise, nothing can be claimed."""
        return not any(charge.insecure for charge in self.charges.values())

    @property
    def reserved_events(self) -> tuple[PrivacyEvent, ...]:
        return merge_events(event for charge in self.charges.values() for event in charge.reserved_events)

    @property
    def incurred_events(self) -> tuple[PrivacyEvent, ...]:
        """Incurred events of committed releases, and reserved events of the others."""
        return merge_events(event for charge in self.charges.values() for event in charge.incurred_events)

    @property
    def guarantee(self) -> Guarantee | None:
        """Guarantee of these releases together: the composition of the reserved events, or the cap if it is smaller.

        If the owner chose a release after seeing an earlier one, the guarantee of all releases is the cap, which the
        filter enforces. None if one of the releases used seeded noise.
        """
        return self._compose(self.reserved_events)

    @property
    def ex_post_guarantee(self) -> Guarantee | None:
        """Composition of the incurred events, no guarantee if these depend on votes. None as for ``guarantee``."""
        return self._compose(self.incurred_events)

    def _compose(self, events: Iterable[PrivacyEvent]) -> Guarantee | None:
        # The composition needs secret noise in these charges, and the cap needs secret noise in all charges.
        cap_holds = self.account.is_private
        return self.account.compute_guarantee(events, cap_holds=cap_holds) if self.is_private else None


@dataclass(frozen=True, kw_only=True)
class Claim(ChargedReleases):
    """Some releases of an account, whose guarantee is claimed; see ``ChargedReleases`` for the attributes."""

    account: Account
    charges: Mapping[str, Charge]


@dataclass(frozen=True, kw_only=True)
class Account(ChargedReleases):
    """The fixed terms of an account and all its charges.

    Attributes:
        name: Declared name of the private data.
        filter: Privacy filter, which holds the cap and enforces it.
        held_out: Id of the rule that holds out units from every release for tests. Empty if all units are trained on.
        charges: Charges by reservation id, in order.
    """

    name: str
    filter: PrivacyFilter
    adjacency: str
    unit: str
    noise: str
    held_out: str = ""
    is_closed: bool = False
    charges: Charges = field(default_factory=Charges)

    @property
    def account(self) -> Account:  # type: ignore[override]
        return self

    @property
    def budget_epsilon(self) -> float:
        return self.filter.epsilon

    @property
    def delta(self) -> float:
        return self.filter.delta

    @property
    def is_charged(self) -> bool:
        """Whether the account has a reservation. The first reservation fixes the terms."""
        return bool(self.charges)

    @property
    def num_releases(self) -> int:
        return sum(charge.is_committed for charge in self.charges.values())

    @property
    def num_open(self) -> int:
        """Number of reservations without a commit."""
        return len(self.charges) - self.num_releases

    @property
    def total_cost(self) -> FilterCost:
        """Sum of the charges, in the quantity that the filter tracks."""
        return self.charges.total.round()

    def compute_guarantee(self, events: Iterable[PrivacyEvent], *, cap_holds: bool = True) -> Guarantee | None:
        """Compose events of the account by the accountant with the smallest epsilon, or return the cap if smaller.

        The conversion of the filter (``PrivacyFilter.to_epsilon``) is looser. An RDP filter has one order, which suits
        the cap: for a release whose smallest epsilon is 0.5, the conversion can give 5.

        Args:
            events: Events of releases from the account, whose noise was secret.
            cap_holds: Whether the cap is a guarantee, which it is not if releases with seeded noise may have influenced
                later releases. The result is then None if the events alone give no finite epsilon.
        """
        terms = {"adjacency": self.adjacency, "unit": self.unit}
        merged_events = merge_events(events)
        if sum(event.count * event.delta for event in merged_events if isinstance(event, DeltaEvent)) < self.delta:
            guarantee = compute_guarantee(merged_events, self.delta, **terms)
            if guarantee.epsilon <= self.budget_epsilon or (not cap_holds and math.isfinite(guarantee.epsilon)):
                return guarantee
        if not cap_holds:
            return None
        return Guarantee(epsilon=self.budget_epsilon, delta=self.delta, route=CAP_ROUTE, **terms)

    def admits(self, events: Iterable[PrivacyEvent]) -> bool:
        """Whether a release with these events fits under the cap now."""
        return not self.is_closed and self.filter.admits_release(events, self.total_cost)


def make_cost_facts(events: Iterable[PrivacyEvent], cost: FilterCost) -> dict[str, Any]:
    """Make the part of an entry that holds events and their cost."""
    return {"events": json.loads(to_json(events)), "scalar": cost.scalar, "failure": cost.delta}


def apply_entry(accounts: dict[str, Account], entry: LedgerEntry, *, recompute: bool = False) -> None:
    """Apply one entry of the ledger to the accounts.

    Args:
        accounts: Accounts by name, changed in place.
        entry: Next entry of the chain.
        recompute: Whether to recompute the stored cost from the events.

    Raises:
        LedgerError: The entry has an unknown kind, lacks a fact, or contradicts the entries before it.
    """
    name, facts = entry.account, entry.facts
    try:
        match entry.kind:
            case "genesis" | "moved" | "arrived":
                _require(entry.kind != "genesis" or not accounts, "a ledger begins once")
            case "open":
                account = accounts.get(name)
                _require(account is None or not (account.charges or account.is_closed), "the account is in use already")
                filter_facts = {key: facts[key] for key in ("delta", "delta_reserve", "order")}
                filter = PrivacyFilter(kind=facts["filter"], epsilon=facts["budget_epsilon"], **filter_facts)
                terms = {key: facts[key] for key in ("adjacency", "unit", "noise", "held_out")}
                accounts[name] = Account(name=name, filter=filter, **terms)
            case "raise_cap":
                filter, epsilon = accounts[name].filter, facts["budget_epsilon"]
                _require(epsilon > filter.epsilon, "a cap only rises")
                accounts[name] = replace(accounts[name], filter=replace(filter, epsilon=epsilon))
            case "close":
                accounts[name] = replace(accounts[name], is_closed=True)
            case "reserve" | "record" | "resume" | "commit":
                accounts[name].charges[facts["reservation"]] = _make_charge(accounts[name], entry, recompute)
            case _:
                raise LedgerError(
                    f"ledger: entry {entry.seq} has the unknown kind {entry.kind!r}. Upgrade pate-torch, which"
                    " could otherwise misread its charges."
                )
    except LedgerError:
        raise
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise LedgerError(
            f"ledger: is damaged: entry {entry.seq} ({entry.kind}) does not add up: {error}. Keep the file, and restore"
            " a backup."
        ) from error


def _make_charge(account: Account, entry: LedgerEntry, recompute: bool) -> Charge:
    """Return the charge of a release after an entry."""
    kind, facts, identity = entry.kind, entry.facts, entry.facts["reservation"]
    if kind == "reserve":
        _require(identity not in account.charges, "the reservation exists already")
        _require(not account.is_closed, "the account was closed before")
        events, cost = _parse_cost(account, facts, recompute)
        _require(not recompute or account.filter.admits(account.total_cost, cost), "the reservation exceeds the cap")
        return Charge(
            reserved_cost=cost,
            reserved_events=events,
            charged_cost=cost,
            incurred_events=events,
            insecure=facts["insecure"],
            purpose=facts["what"],
            run=facts["run"],
            fingerprint=facts["fingerprint"],
        )
    charge = account.charges[identity]
    _require(not charge.is_committed, "the release is committed already")
    if kind == "record":
        state = facts["state"]
        return replace(charge, state_digest=state, is_suspended=bool(state), recorded_events=_parse_events(facts))
    if kind == "resume":
        is_expected = charge.is_suspended and charge.state_digest == facts["state"]
        _require(is_expected, "the release was not suspended in the state from which it was resumed")
        _require(facts["number"] == charge.num_resumptions + 1, "a resumption is missing")
        return replace(charge, is_suspended=False, num_resumptions=facts["number"])
    events, cost = _parse_cost(account, facts, recompute)
    is_reserved = cost.scalar <= charge.reserved_cost.scalar and cost.delta <= charge.reserved_cost.delta
    _require(is_reserved, "the release costs more than its reservation")
    return replace(charge, charged_cost=cost, incurred_events=events, is_committed=True, is_stopped="stopped" in facts)


def _require(condition: bool, message: str) -> None:
    if not condition:  # not an assert: a damaged file must be refused under python -O as well
        raise ValueError(message)


def _parse_events(facts: dict[str, Any]) -> tuple[PrivacyEvent, ...]:
    return from_json(json.dumps(facts["events"]))


def _parse_cost(
    account: Account, facts: dict[str, Any], recompute: bool
) -> tuple[tuple[PrivacyEvent, ...], FilterCost]:
    events, cost = _parse_events(facts), FilterCost(float(facts["scalar"]), float(facts["failure"]))
    if recompute:
        computed_cost = account.filter.compute_cost(events)
        is_equal = is_within(cost, computed_cost) and is_within(computed_cost, cost)
        _require(is_equal, "the stored cost differs from the cost of the events")
    return events, cost


def is_within(cost: FilterCost, reserved_cost: FilterCost) -> bool:
    """Whether a cost is at most the reserved cost, up to rounding."""
    slack = 1 + 1e-9  # sums of the same events in two orders differ by less
    return cost.scalar <= reserved_cost.scalar * slack and cost.delta <= reserved_cost.delta * slack


def make_account_charged_error(account: Account, requested_epsilon: float) -> ValueError:
    """Make the error for a release that must be the first of its account, if the account is already charged."""
    guarantee, spent_text = account.guarantee, "nothing can be claimed for it"
    if guarantee is not None:
        terms = f"delta {format_delta(account.delta)}, {account.adjacency}, unit {account.unit}"
        spent_text = f"epsilon {guarantee.epsilon:.4g}, {terms}, {guarantee.route}"
    open_text = f"; {account.num_open} of its releases were interrupted and stay spent" * (account.num_open > 0)
    fix = f"allow_refit=True adds a release of epsilon {requested_epsilon:.4g}, and the account covers all releases."
    return checks.error("account", account.name, f"has been charged already ({spent_text}{open_text})", fix)


def make_held_out_error(account: Account) -> ValueError:
    """Make the error for a release that holds out other units than the account, whose first charge fixed them."""
    if account.held_out:
        problem = f"holds out the units of teachers/held_out/{account.name}.json, which is missing or has changed"
        return checks.error("account", account.name, problem, "Run again or, if it is missing, restore a backup.")
    problem = "must be asked for before the account's first charge (a killed run counts), which trained on all units"
    return ValueError(f"private_test.share: {problem}. Use another data set with its own account, or no test.")


def make_budget_exceeded_error(
    account: Account, events: tuple[PrivacyEvent, ...], requested_cost: FilterCost
) -> BudgetExceeded:
    """Make the error for a release over the cap, with the remaining budget and the share of the release that fits."""
    account_filter, spent_cost = account.filter, account.total_cost
    total_cost = FilterCost.from_sum((spent_cost, requested_cost))
    epsilons = (account_filter.to_epsilon(cost) for cost in (spent_cost, requested_cost, total_cost))
    spent_epsilon, requested_epsilon, total_epsilon = epsilons
    remaining_scalar = max(0.0, account_filter.capacity - spent_cost.scalar)
    remaining_delta = max(0.0, account_filter.delta_reserve - spent_cost.delta)
    pairs = ((remaining_scalar, requested_cost.scalar), (remaining_delta, requested_cost.delta))
    fitting_share = min(available / requested for available, requested in pairs if requested > 0)
    remedy = f"raise the cap on purpose: pate ledger raise-cap {account.name} EPSILON --reason WHY"
    if total_cost.delta > account_filter.delta_reserve:
        remedy = "use a mechanism that cannot fail, or with a smaller failure_delta"
        cause = (
            f"it may fail with probability {requested_cost.delta:.6g}, and {remaining_delta:.6g} of the"
            f" {account_filter.delta_reserve:.6g} reserved for failures when the account opened (delta_reserve) is left"
        )
    else:
        cause = (
            f"by its filter ({account_filter.kind}), epsilon {spent_epsilon:.6g} is spent, this release alone costs"
            f" {requested_epsilon:.6g}, and both together ({total_epsilon:.6g}) pass the cap"
            f" {account_filter.epsilon:.6g} at delta={account_filter.delta:g}"
        )
        if account_filter.delta_reserve:
            cause += f", of which {account_filter.delta_reserve:.2g} is reserved for failures"
    advice = "No further release of this kind fits"
    if fitting_share:
        advice = f"The rest of the cap admits {100 * fitting_share:.3g} % of this release"
    is_gaussian = all(isinstance(event, GaussianEvent | ZCDPEvent | DeltaEvent) for event in events)
    if is_gaussian and 0 < remaining_scalar < requested_cost.scalar:
        noise_factor = (requested_cost.scalar / remaining_scalar) ** 0.5
        advice += f", or all of it with {noise_factor:.4g} times the noise"
    elif not is_gaussian and account_filter.kind == "gdp":
        remedy += ", or charge another account, opened with privacy.filter=rdp, which suits mixtures of mechanisms"
    message = f"account={account.name!r}: {cause}. Nothing was drawn or charged. {advice}. You can also {remedy}."
    return BudgetExceeded(message, fitting_share)
