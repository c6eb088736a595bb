"""What the entries of a ledger add up to: accounts, their terms and their charges."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from pate_torch.accounting.epsilon import Guarantee, epsilon
from pate_torch.accounting.events import ZCDP, Delta, Event, Gaussian, from_json, merged, to_json
from pate_torch.accounting.filters import Filter, Spend
from pate_torch.ledger_chain import Entry, LedgerError

_ROUNDING = 1e-9  # relative: the same events summed in another order


class BudgetExceeded(ValueError):
    """The release would pass the account's cap; nothing was drawn and nothing charged.

    ``spent``, ``asked``, ``cap``: epsilons at the account's delta. ``fits``: the share of the release that would fit.
    """

    def __init__(self, message: str, *, spent: float, asked: float, cap: float, fits: float) -> None:
        super().__init__(message)
        self.spent, self.asked, self.cap, self.fits = spent, asked, cap, fits


@dataclass(frozen=True, kw_only=True)
class Account:
    """The terms fixed when the account opened, and where it stands. ``releases``: committed; ``open``: only reserved.

    ``private`` is False once a release was made with seeded noise: the cap then bounds nothing.
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
    charges: tuple[Event, ...] = ()

    @property
    def budget_epsilon(self) -> float:
        return self.filter.epsilon

    @property
    def delta(self) -> float:
        return self.filter.delta

    @property
    def guarantee(self) -> Guarantee:
        """Everything charged so far, composed by the smallest valid route, at the account's delta.

        Where the owner chose a release after seeing an earlier one, the guarantee proper is the cap, which the filter
        keeps; this is then what has been spent of it so far. (The filter's own conversion would be looser for no
        gain: an RDP filter's order suits the cap, and would show epsilon 5 after a release that costs 0.5.)
        """
        return epsilon(self.charges, self.delta, adjacency=self.adjacency, unit=self.unit)

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
    """One release: what it reserved, and what it is charged now."""

    reserved: Spend
    now: Spend
    events: tuple[Event, ...]
    insecure: bool
    committed: bool = False


@dataclass
class State:
    """An account as its entries leave it."""

    filter: Filter
    adjacency: str
    unit: str
    closed: bool = False
    charges: dict[str, Charge] = field(default_factory=dict)

    def spent(self) -> Spend:
        return Spend.sum(charge.now for charge in self.charges.values())

    def view(self, name: str) -> Account:
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
            charges=merged(event for charge in charges for event in charge.events),
        )


def priced(events: Iterable[Event], spend: Spend) -> dict[str, Any]:
    """Events and their price, as facts of an entry."""
    return {"events": json.loads(to_json(events)), "scalar": spend.scalar, "failure": spend.delta}


def apply(accounts: dict[str, State], entry: Entry, *, recompute: bool = False) -> None:
    """Let one entry change the accounts. ``recompute``: hold its price against its events, too.

    Raises LedgerError for an entry that no ledger of this version writes at this place.
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
    _require(name not in accounts, "the account is open already")
    terms = Filter(
        kind=facts["filter"],
        epsilon=facts["budget_epsilon"],
        delta=facts["delta"],
        delta_reserve=facts["delta_reserve"],
        order=facts["order"],
    )
    accounts[name] = State(filter=terms, adjacency=facts["adjacency"], unit=facts["unit"])


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
    state.charges[facts["reservation"]] = Charge(
        reserved=spend, now=spend, events=_events(facts), insecure=facts["insecure"]
    )


def _record(accounts: dict[str, State], name: str, facts: dict[str, Any], recompute: bool) -> None:
    _require(not accounts[name].charges[facts["reservation"]].committed, "the release is committed already")


def _commit(accounts: dict[str, State], name: str, facts: dict[str, Any], recompute: bool) -> None:
    _record(accounts, name, facts, recompute)
    charge, spend = accounts[name].charges[facts["reservation"]], Spend(facts["scalar"], facts["failure"])
    _require(
        spend.scalar <= charge.reserved.scalar and spend.delta <= charge.reserved.delta, "it passes its reservation"
    )
    if recompute:
        _require(_equal(spend, _price(accounts[name], facts)), "its price is not that of its events")
    charge.now, charge.events, charge.committed = spend, _events(facts), True


_STEPS = {
    "genesis": _genesis,
    "open": _open,
    "raise_cap": _raise_cap,
    "close": _close,
    "reserve": _reserve,
    "record": _record,
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


def exceeded(account: Account, events: tuple[Event, ...], asked: Spend) -> BudgetExceeded:
    """Say what was asked, what is left, and what would fit."""
    terms, total = account.filter, Spend.sum((account.spent, asked))
    spent_epsilon, asked_epsilon = terms.to_epsilon(account.spent), terms.to_epsilon(asked)
    fits = account.copies(events)
    remedy = f"raise the cap on purpose: python -m pate_torch.ledger raise-cap {account.name} EPSILON --reason WHY"
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
