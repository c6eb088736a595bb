"""Accounts of a ledger: their terms, their charges, and the guarantee that may be claimed of these.

A claim is composed from what releases *reserved*, which no vote can change. What they incurred may depend on votes
(mechanisms that keep quiet, or stop): it is what the cap is held against, and is shown beside the claim as ex post.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pate_torch.accounting.accountant import CAP, Guarantee, epsilon
from pate_torch.accounting.events import ZCDP, Delta, Event, Gaussian, from_json, merged, to_json
from pate_torch.accounting.filters import Filter, Spend
from pate_torch.accounting.formatting import show_delta
from pate_torch.core import checks
from pate_torch.ledger.chain import Entry, LedgerError

LABELS, CHOICE, PRICE, HYPOTHESIS = "labels", "choice of a student", "sanitised price", "hypothesis or its answers"
"""What a reservation pays for; others have words of their own."""

_ROUNDING = 1e-9  # relative: the same events summed in another order


class BudgetExceeded(ValueError):
    """The release would pass the account's cap; nothing was drawn and nothing charged.

    Attributes:
        spent: Epsilon spent, at the account's delta.
        asked: Epsilon of the release.
        cap: Epsilon of the cap.
        fits: The share of the release that would fit.
    """

    def __init__(self, message: str, *, spent: float, asked: float, cap: float, fits: float) -> None:
        super().__init__(message)
        self.spent, self.asked, self.cap, self.fits = spent, asked, cap, fits


@dataclass(frozen=True, kw_only=True)
class Account:
    """The terms fixed when the account opened, and where it stands.

    Attributes:
        name: Declared name of the private data.
        filter: Keeps the cap.
        adjacency: Neighboring relation.
        unit: What the privacy unit is.
        spent: Sum of the charges, in the filter's quantity.
        releases: How many are committed.
        open: How many are only reserved.
        closed: Whether the owner ended its spending.
        private: False once a release was made with seeded noise: the cap then bounds nothing.
        noise: The kind that every release of the account draws.
        reserved: All events by their worst case.
        incurred: All events as they came out (of an open release: its worst case).
    """

    name: str
    filter: Filter
    adjacency: str
    unit: str
    spent: Spend
    releases: int
    open: int
    closed: bool
    private: bool
    noise: str
    reserved: tuple[Event, ...] = ()
    incurred: tuple[Event, ...] = ()

    @property
    def is_charged(self) -> bool:
        """Whether anything was reserved from it: else it has no fixed terms."""
        return self.releases + self.open > 0

    @property
    def budget_epsilon(self) -> float:
        """Epsilon of the cap."""
        return self.filter.epsilon

    @property
    def delta(self) -> float:
        """Delta of the cap."""
        return self.filter.delta

    @property
    def guarantee(self) -> Guarantee | None:
        """Guarantee of all releases together: what they reserved, composed, or the cap where that is less.

        None: a release of the account used seeded noise, and nothing is claimed. Where the owner chose a release after
        seeing an earlier one, the guarantee is the cap, which the filter keeps.
        """
        return self.claim(self.reserved)

    @property
    def ex_post(self) -> Guarantee | None:
        """What has been used so far, as it came out; None as for ``guarantee``.

        It is no guarantee where it depends on votes.
        """
        return self.claim(self.incurred)

    def claim(self, events: Iterable[Event], *, capped: bool = True) -> Guarantee | None:
        """Guarantee of these events of the account: composed by the smallest valid route at its delta, or its cap.

        The filter's own conversion would be looser for no gain: an RDP filter's order suits the cap, and would show
        epsilon 5 after a release that costs 0.5.

        Args:
            events: Events of releases from the account.
            capped: Whether the cap is kept; it is not where seeded noise may have told what to ask next.

        Returns:
            None where ``guarantee`` is.
        """
        if not self.private:
            return None
        terms = {"adjacency": self.adjacency, "unit": self.unit}
        merged_events = merged(events)
        if sum(event.count * event.delta for event in merged_events if isinstance(event, Delta)) < self.delta:
            composed = epsilon(merged_events, self.delta, **terms)
            if composed.epsilon <= self.budget_epsilon or (not capped and math.isfinite(composed.epsilon)):
                return composed
        if not capped:
            return None
        return Guarantee(epsilon=self.budget_epsilon, delta=self.delta, route=CAP, **terms)

    @property
    def remaining(self) -> Spend:
        """What the filter still admits, in its own quantity (mu^2, or divergence at its order) and in delta."""
        return Spend(
            max(0.0, self.filter.capacity - self.spent.scalar),
            max(0.0, self.filter.delta_reserve - self.spent.delta),
        )

    def copies(self, events: Iterable[Event]) -> float:
        """How many releases with these events would still fit (infinite for free ones)."""
        price, left = self.filter.price(events), self.remaining
        pairs = ((left.scalar, price.scalar), (left.delta, price.delta))
        return min((available / asked for available, asked in pairs if asked > 0), default=float("inf"))

    def admits(self, events: Iterable[Event]) -> bool:
        """Whether a release with these events would be accepted now."""
        return not self.closed and self.filter.admits(self.spent, self.filter.price(events))


@dataclass
class Charge:
    """One release: what it reserved, and what it is charged now.

    Attributes:
        reserved: Price of its worst case.
        planned: Events of its worst case.
        now: Price charged now.
        incurred: Events charged now.
        insecure: Whether its noise was seeded or off.
        what: What it is, in words.
        run: The run that made it.
        fingerprint: Content fingerprint of the records, or of votes in their place.
        committed: Whether the answers are written down.
        suspended: Whether it waits to be resumed.
        state: Hash of where it stood then.
        so_far: Events incurred up to the last record.
        resumed: How often it was resumed.
    """

    reserved: Spend
    planned: tuple[Event, ...]
    now: Spend
    incurred: tuple[Event, ...]
    insecure: bool
    what: str
    run: str
    fingerprint: str
    committed: bool = False
    suspended: bool = False
    state: str = ""
    so_far: tuple[Event, ...] = ()
    resumed: int = 0


@dataclass(frozen=True, kw_only=True)
class Claim:
    """What may be said of some reservations together.

    Attributes:
        guarantee: Guarantee of what they reserved; None: seeded noise is among them, and nothing may be said.
        ex_post: What they incurred, composed; None as above.
        planned: The events they reserved.
        parts: Their charges, by id.
    """

    guarantee: Guarantee | None
    ex_post: Guarantee | None
    planned: tuple[Event, ...]
    parts: Mapping[str, Charge]

    @property
    def private(self) -> bool:
        """Whether all noise behind them was secret."""
        return self.guarantee is not None


@dataclass
class State:
    """An account as its entries leave it."""

    filter: Filter
    adjacency: str
    unit: str
    noise: str
    closed: bool = False
    charges: dict[str, Charge] = field(default_factory=dict)

    def spent(self) -> Spend:
        """Sum of what the charges cost now."""
        return Spend.sum(charge.now for charge in self.charges.values())

    def view(self, name: str) -> Account:
        """The account as its owner sees it."""
        charges = self.charges.values()
        return Account(
            name=name,
            filter=self.filter,
            adjacency=self.adjacency,
            unit=self.unit,
            spent=self.spent(),
            releases=sum(charge.committed for charge in charges),
            open=sum(not charge.committed for charge in charges),
            closed=self.closed,
            private=not any(charge.insecure for charge in charges),
            noise=self.noise,
            reserved=merged(event for charge in charges for event in charge.planned),
            incurred=merged(event for charge in charges for event in charge.incurred),
        )


def priced(events: Iterable[Event], spend: Spend) -> dict[str, Any]:
    """Events and their price, as facts of an entry."""
    return {"events": json.loads(to_json(events)), "scalar": spend.scalar, "failure": spend.delta}


def apply(accounts: dict[str, State], entry: Entry, *, recompute: bool = False) -> None:
    """Let one entry change the accounts.

    Args:
        accounts: By name; changed in place.
        entry: The next of the chain.
        recompute: Whether to hold its price against its events, too.

    Raises:
        LedgerError: An entry that no ledger of this version writes at this place.
    """
    try:
        step = _STEPS.get(entry.kind)
        if step is None:
            raise LedgerError(
                f"ledger: entry {entry.seq} is of an unknown kind {entry.kind!r}. Upgrade pate-torch; this version"
                " could misread its charges."
            )
        step(accounts, entry.account, entry.facts, recompute)
    except LedgerError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise LedgerError(
            f"ledger: is damaged: entry {entry.seq} ({entry.kind}) does not add up: {error}. Keep the file, and restore"
            " a backup."
        ) from error


def _genesis(accounts: dict[str, State], name: str, facts: dict[str, Any], recompute: bool) -> None:
    _require(not accounts, "a ledger begins once")


def _open(accounts: dict[str, State], name: str, facts: dict[str, Any], recompute: bool) -> None:
    known = accounts.get(name)
    _require(known is None or not (known.charges or known.closed), "the account is open already")
    terms = Filter(
        kind=facts["filter"],
        epsilon=facts["budget_epsilon"],
        delta=facts["delta"],
        delta_reserve=facts["delta_reserve"],
        order=facts["order"],
    )
    accounts[name] = State(filter=terms, adjacency=facts["adjacency"], unit=facts["unit"], noise=facts["noise"])


def _raise_cap(accounts: dict[str, State], name: str, facts: dict[str, Any], recompute: bool) -> None:
    state = accounts[name]
    _require(facts["budget_epsilon"] > state.filter.epsilon, "a cap only rises")
    state.filter = replace(state.filter, epsilon=facts["budget_epsilon"])


def _close(accounts: dict[str, State], name: str, facts: dict[str, Any], recompute: bool) -> None:
    accounts[name].closed = True


def _reserve(accounts: dict[str, State], name: str, facts: dict[str, Any], recompute: bool) -> None:
    state, spend = accounts[name], Spend(facts["scalar"], facts["failure"])
    _require(facts["reservation"] not in state.charges, "the reservation exists already")
    _require(not state.closed, "the account was closed before")
    if recompute:
        _require(_equal(spend, _price(state, facts)), "its price is not that of its events")
        _require(state.filter.admits(state.spent(), spend), "it passes the cap")
    planned = _events(facts)
    state.charges[facts["reservation"]] = Charge(
        reserved=spend,
        planned=planned,
        now=spend,
        incurred=planned,
        insecure=facts["insecure"],
        what=facts["what"],
        run=facts["run"],
        fingerprint=facts["fingerprint"],
    )


def _record(accounts: dict[str, State], name: str, facts: dict[str, Any], recompute: bool) -> None:
    charge = _open_charge(accounts, name, facts)
    charge.state, charge.so_far = facts["state"], _events(facts)
    charge.suspended = bool(charge.state)


def _resume(accounts: dict[str, State], name: str, facts: dict[str, Any], recompute: bool) -> None:
    charge = _open_charge(accounts, name, facts)
    _require(charge.suspended and charge.state == facts["state"], "the release does not stand where it was resumed")
    charge.suspended, charge.resumed = False, charge.resumed + 1
    _require(charge.resumed == facts["number"], "a resumption is missing")


def _open_charge(accounts: dict[str, State], name: str, facts: dict[str, Any]) -> Charge:
    charge = accounts[name].charges[facts["reservation"]]
    _require(not charge.committed, "the release is committed already")
    return charge


def _commit(accounts: dict[str, State], name: str, facts: dict[str, Any], recompute: bool) -> None:
    _open_charge(accounts, name, facts)
    charge, spend = accounts[name].charges[facts["reservation"]], Spend(facts["scalar"], facts["failure"])
    _require(
        spend.scalar <= charge.reserved.scalar and spend.delta <= charge.reserved.delta, "it passes its reservation"
    )
    if recompute:
        _require(_equal(spend, _price(accounts[name], facts)), "its price is not that of its events")
    charge.now, charge.incurred, charge.committed = spend, _events(facts), True


_STEPS = {
    "genesis": _genesis,
    "open": _open,
    "raise_cap": _raise_cap,
    "close": _close,
    "reserve": _reserve,
    "record": _record,
    "resume": _resume,
    "commit": _commit,
}


def _require(holds: bool, what: str) -> None:
    if not holds:  # not an assert: a damaged file must be refused under python -O as well
        raise ValueError(what)


def _events(facts: dict[str, Any]) -> tuple[Event, ...]:
    return from_json(json.dumps(facts["events"]))


def _price(state: State, facts: dict[str, Any]) -> Spend:
    return state.filter.price(_events(facts))


def within(now: Spend, reserved: Spend) -> bool:
    """Whether a price is at most another, up to the rounding of sums."""
    slack = 1 + _ROUNDING
    return now.scalar <= reserved.scalar * slack and now.delta <= reserved.delta * slack


def _equal(stored: Spend, computed: Spend) -> bool:
    return within(stored, computed) and within(computed, stored)


def refused_refit(account: Account, asked: float) -> ValueError:
    """The error of a first release that finds its account charged: what was spent, and the epsilon it would add."""
    spent = account.guarantee
    terms = f"delta {show_delta(account.delta)}, {account.adjacency}, unit {account.unit}"
    told = "nothing is claimed of it" if spent is None else f"epsilon {spent.epsilon:.4g}, {terms}, {spent.route}"
    open_ = f"; {account.open} of its releases were interrupted and stay spent" * (account.open > 0)
    fix = f"allow_refit=True adds a release of epsilon {asked:.4g}, and both compose."
    return checks.fail("account", account.name, f"has been charged already ({told}{open_})", fix)


def exceeded(account: Account, events: tuple[Event, ...], asked: Spend) -> BudgetExceeded:
    """The error that says what was asked, what is left, and what would fit."""
    terms, total = account.filter, Spend.sum((account.spent, asked))
    spent_epsilon, asked_epsilon = terms.to_epsilon(account.spent), terms.to_epsilon(asked)
    fits = account.copies(events)
    remedy = f"raise the cap on purpose: pate ledger raise-cap {account.name} EPSILON --reason WHY"
    if total.delta > terms.delta_reserve:
        remedy = "use a mechanism that cannot fail (delta_reserve is fixed when the account opens)"
        cause = (
            f"it may fail with probability {asked.delta:.6g}, and {account.remaining.delta:.6g} of the"
            f" {terms.delta_reserve:.6g} set aside for failures when the account opened is left"
        )
    else:
        cause = (
            f"epsilon {spent_epsilon:.6g} is spent, this release asks for {asked_epsilon:.6g} alone, and both together"
            f" ({terms.to_epsilon(total):.6g}) pass the cap {terms.epsilon:.6g} at delta={terms.delta:g}"
        )
    advice = f"What would fit: {100 * fits:.3g} % of it" if fits > 0 else "Nothing more of its kind fits"
    smooth = [e for e in events if not isinstance(e, Delta)]
    if 0 < account.remaining.scalar < asked.scalar and all(isinstance(e, Gaussian | ZCDP) for e in smooth):
        advice += f", or all of it with {(asked.scalar / account.remaining.scalar) ** 0.5:.4g} times the noise"
    message = f"account={account.name!r}: {cause}. Nothing was drawn or charged. {advice}; or {remedy}."
    return BudgetExceeded(message, spent=spent_epsilon, asked=asked_epsilon, cap=terms.epsilon, fits=fits)
