"""The privacy ledger: one account per private data set, which outlives every run, ensemble and student.

    reserve   what the release may cost at worst, before any noise is drawn; refused if it would pass the cap
    record    where a release that is to be resumed stands, by a hash, and what it incurred so far
    resume    it goes on from there, once; noise may be drawn from here on, so it is resumed again only once recorded
    commit    what it did cost, once the answers are written down

Only ``budget`` calls these four: it is the one door to noise.

A reservation without a commit counts as spent, so a crash can lose answers but never a charge. The account is keyed by
the *declared name* of the private data: two ensembles trained on the same records share one budget, and a changed
fingerprint of the content is recorded but charges the same account. Its cap is kept by a filter fixed at opening
(``accounting.filters``), so the guarantee of all its releases together is the cap, however each was chosen after the
others. PRIVATE: the file is for the owner of the data.

    pate ledger verify|show|export|backup|raise-cap|close
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

from pate_torch.accounting.accountant import Guarantee
from pate_torch.accounting.events import Event, to_json
from pate_torch.accounting.filters import Filter, Spend
from pate_torch.core import checks, run_folders
from pate_torch.ledger.accounts import (
    CHOICE,
    HYPOTHESIS,
    LABELS,
    PRICE,
    Account,
    BudgetExceeded,
    Charge,
    Claim,
    State,
    apply,
    exceeded,
    priced,
    refused_refit,
    within,
)
from pate_torch.ledger.chain import Chain, Entry, LedgerError

__all__ = [
    "CHOICE",
    "HYPOTHESIS",
    "LABELS",
    "PRICE",
    "Account",
    "BudgetExceeded",
    "Charge",
    "Claim",
    "Entry",
    "Ledger",
    "LedgerError",
    "Reservation",
    "default_path",
]


def default_path() -> Path:
    """Default place of the ledger: ``ledger.sqlite`` under PATE_HOME, or in the store of this user."""
    return run_folders.checked_root(run_folders.home_folder()) / "ledger.sqlite"


@dataclass(frozen=True, kw_only=True)
class Reservation:
    """A release that has been charged at its worst and not yet committed.

    Attributes:
        id: Names it in the ledger.
        account: Account that it is charged to.
        events: Events of its worst case.
        spend: Their price.
        insecure: Whether its noise is seeded or off.
        incurred: What it had incurred before it was resumed; None: it was not.
    """

    id: str
    account: str
    events: tuple[Event, ...]
    spend: Spend
    insecure: bool
    incurred: tuple[Event, ...] | None = None


class Ledger:
    """The ledger in one file; many processes may share it.

    Each process opens a ledger of its own on the file, and the threads of a process share one.

    Args:
        path: The file; created if there is none and ``create`` holds.
        create: Whether a missing file is created.
        readonly: Whether nothing will be written.

    Raises:
        LedgerError: A file that is damaged, foreign, empty, of a newer version or cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str], *, create: bool = True, readonly: bool = False) -> None:
        self.path = Path(path)
        self._chain = Chain(self.path, create=create, readonly=readonly)
        self._accounts: dict[str, State] = {}
        try:
            self._catch_up()
        except LedgerError:
            self._chain.close()
            raise

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._chain.close()

    def alone(self) -> AbstractContextManager[None]:
        """Make other threads of the process wait while this one is in it.

        Raises:
            LedgerError: This is another process.
        """
        return self._chain.alone()

    # ---- accounts -----------------------------------------------------------------------------------------------

    def open_account(
        self,
        name: str,
        *,
        budget_epsilon: float,
        delta: float,
        adjacency: str,
        unit: str,
        planned_events: Iterable[Event],
        noise: str = "torch",
        filter: str | None = None,
        delta_reserve: float | None = None,
    ) -> Account:
        """Open the account of a private data set, or return the one there is, on its stored terms.

        The terms are fixed by the first charge: an account that was never charged opens anew.

        Args:
            name: Declared name of the private data.
            budget_epsilon: Epsilon of the cap.
            delta: Delta of the cap.
            adjacency: Neighboring relation.
            unit: What the privacy unit is.
            planned_events: Choose the filter (``Filter.plan``) when the account opens; ignored afterwards.
            noise: The kind that its releases will draw: "torch", "discrete", or "by <library>".
            filter: Overrules the choice of the filter's kind.
            delta_reserve: Overrules the choice of its reserve.

        Raises:
            ValueError: The terms asked for differ from the stored ones.
        """
        if not name or name != name.strip():
            raise checks.fail("account", name, "must be a name without spaces around it")
        checks.one_of("adjacency", adjacency, ("add_remove", "replace_one"))
        if not unit:
            raise checks.fail("unit", unit, 'must say what is protected, such as "record"')
        with self._chain.writing():
            self._catch_up()
            known = self._accounts.get(name)
            if known is not None and (known.charges or known.closed):
                self.same_terms(
                    name,
                    budget_epsilon=budget_epsilon,
                    delta=delta,
                    adjacency=adjacency,
                    unit=unit,
                    noise=noise,
                )
            else:
                terms = Filter.plan(
                    planned_events,
                    epsilon=checks.positive("budget_epsilon", budget_epsilon),
                    delta=delta,
                    kind=filter,
                    delta_reserve=delta_reserve,
                )
                facts = {
                    "budget_epsilon": terms.epsilon,
                    "delta": terms.delta,
                    "filter": terms.kind,
                    "order": terms.order,
                    "delta_reserve": terms.delta_reserve,
                    "adjacency": adjacency,
                    "unit": unit,
                    "noise": noise,
                }
                if known != State(filter=terms, adjacency=adjacency, unit=unit, noise=noise):
                    self._chain.append("open", name, facts)
        return self.account(name)

    def account(self, name: str) -> Account:
        """The account as it stands now.

        Raises:
            LedgerError: There is none of that name.
        """
        with self.alone():
            self._catch_up()
            return self._state(name).view(name)

    def accounts(self) -> tuple[Account, ...]:
        """All accounts, in the order they were opened."""
        with self.alone():
            self._catch_up()
            return tuple(state.view(name) for name, state in self._accounts.items())

    def raise_cap(self, name: str, budget_epsilon: float, *, reason: str) -> Account:
        """Raise an account's cap: a deliberate act of the owner, recorded with its reason.

        From then on the guarantee is the new cap. The filter's theorem takes the cap as fixed in advance: a cap that
        is raised because of what was released is the owner's promise, not the theorem's.
        """
        checks.positive("budget_epsilon", budget_epsilon)
        _reason(reason)
        with self._chain.writing():
            self._catch_up()
            state = self._state(name)
            if budget_epsilon <= state.filter.epsilon:
                raise checks.fail(
                    "budget_epsilon",
                    budget_epsilon,
                    f"must be above the present cap {state.filter.epsilon!r}",
                    "A cap cannot be lowered; close the account to end its spending.",
                )
            facts = {"budget_epsilon": float(budget_epsilon), "before": state.filter.epsilon, "reason": reason}
            self._chain.append("raise_cap", name, facts)
        return self.account(name)

    def close_account(self, name: str, reason: str) -> Account:
        """End an account's spending for good; releases already reserved may still commit."""
        _reason(reason)
        with self._chain.writing():
            self._catch_up()
            if self._state(name).closed:
                raise LedgerError(f"account={name!r}: is closed already.")
            self._chain.append("close", name, {"reason": reason})
        return self.account(name)

    # ---- charges ------------------------------------------------------------------------------------------------

    def reserve(
        self,
        account: str,
        events: Iterable[Event],
        *,
        fingerprint: str,
        mechanism: str,
        run: str,
        what: str = LABELS,
        noise: str = "",
        note: str = "",
        insecure: bool = False,
        only_first: bool = False,
        terms: Mapping[str, Any] | None = None,
    ) -> Reservation:
        """Charge a whole release at its worst, before anything is drawn.

        Args:
            account: By name.
            events: Events of the worst case.
            fingerprint: Content fingerprint of the records, or of votes in their place.
            mechanism: Name of the mechanism that will draw the noise.
            run: The run that makes the release.
            what: What is released, in words.
            noise: Its kind, in words.
            note: Kept with the charge.
            insecure: The noise is seeded or off, so the release is NOT PRIVATE; it is charged and marked all the same.
            only_first: Whether to refuse where the account has any reservation, a killed or an open one included.
            terms: Terms that the account must have (``same_terms``), checked with the charge; None: not asked for.

        Raises:
            BudgetExceeded: The cap would be passed.
            ValueError: ``only_first`` or ``terms`` do not hold.
            LedgerError: The charge cannot be written.
        """
        events = tuple(events)
        checks.boolean("insecure", insecure)
        with self._chain.writing():
            if terms is not None:
                self.same_terms(account, **terms)
            asked = self.check(account, events)
            if only_first and self._state(account).charges:
                raise refused_refit(self._state(account).view(account), self._state(account).filter.to_epsilon(asked))
            reservation = Reservation(
                id=secrets.token_hex(8), account=account, events=events, spend=asked, insecure=insecure
            )
            facts = {
                "reservation": reservation.id,
                **priced(events, asked),
                "fingerprint": fingerprint,
                "mechanism": mechanism,
                "run": run,
                "what": what,
                "noise": noise,
                "note": note,
                "insecure": insecure,
            }
            self._chain.append("reserve", account, facts)
        return reservation

    def check(self, account: str, events: Iterable[Event]) -> Spend:
        """Price of these events; raises what ``reserve`` would raise now, and charges nothing."""
        events = tuple(events)
        with self.alone():
            self._catch_up()
            state = self._state(account)
            if state.closed:
                raise LedgerError(f"account={account!r}: is closed. Nothing was drawn.")
            asked = state.filter.price(events)
            if not state.filter.admits(state.spent(), asked):
                raise exceeded(state.view(account), events, asked)
            return asked

    def record(self, reservation: Reservation | str, events: Iterable[Event], *, state: str = "") -> None:
        """Note what the release has incurred so far; the charge stays at its worst.

        Args:
            reservation: Or its id.
            events: Incurred so far.
            state: A hash of all that is needed to go on, with which it may be resumed; "": it may not.
        """
        with self._chain.writing():
            account, identity, _ = self._open_charge(reservation)
            facts = {"reservation": identity, "events": json.loads(to_json(events)), "state": state}
            self._chain.append("record", account, facts)

    def resume(self, reservation: Reservation | str, *, state: str) -> Reservation:
        """Let an open release go on from where it was recorded last; called before any noise is drawn.

        Raises:
            LedgerError: A state that the ledger does not know, which leaves the reservation spent: noise may have been
                drawn since the last record, or the state is an older one.
        """
        with self._chain.writing():
            account, identity, charge = self._open_charge(reservation)
            if not charge.suspended or charge.state != state:
                raise LedgerError(
                    f"reservation={identity!r}: does not stand where it is to be resumed: noise may have been drawn"
                    " since, or what was kept is older than the ledger. It stays charged at its worst; make another."
                )
            number = charge.resumed + 1
            self._chain.append("resume", account, {"reservation": identity, "state": state, "number": number})
        return Reservation(
            id=identity,
            account=account,
            events=charge.planned,
            spend=charge.reserved,
            insecure=charge.insecure,
            incurred=charge.so_far,
        )

    def commit(
        self,
        reservation: Reservation | str,
        incurred_events: Iterable[Event],
        *,
        release_id: str = "",
        digests: Mapping[str, str] | None = None,
    ) -> Account:
        """Replace a reserved charge by what the release incurred.

        Args:
            reservation: Or its id.
            incurred_events: As they came out.
            release_id: Id of the release.
            digests: SHA-256 of what was written down, by name.

        Raises:
            LedgerError: The incurred events are more than was reserved in any quantity the filter tracks, or the
                reservation is unknown or committed already; the reservation stands.
        """
        events = tuple(incurred_events)
        with self._chain.writing():
            account, identity, charge = self._open_charge(reservation)
            now = self._accounts[account].filter.price(events)
            if not within(now, charge.reserved):
                raise LedgerError(
                    f"reservation={identity!r}: the release incurred more than it reserved"
                    f" ({now} against {charge.reserved}). The reservation stands; the mechanism's worst case is wrong."
                )
            charged = Spend(min(now.scalar, charge.reserved.scalar), min(now.delta, charge.reserved.delta))
            facts = {**(digests or {}), "reservation": identity, "release": release_id, **priced(events, charged)}
            self._chain.append("commit", account, facts)
        return self.account(account)

    def spent(self, account: str) -> Guarantee | None:
        """Everything reserved from the account, composed, at the account's delta (see ``Account.guarantee``)."""
        return self.account(account).guarantee

    def charges(self, account: str) -> Mapping[str, Charge]:
        """Every reservation of the account, by its id, in their order."""
        with self.alone():
            self._catch_up()
            return MappingProxyType(dict(self._state(account).charges))

    def claim(self, account: str, reservations: Iterable[str]) -> Claim:
        """What may be said of these reservations together.

        Raises:
            LedgerError: One that the account does not have.
        """
        with self.alone():
            charges, view = self.charges(account), self.account(account)
        parts = {}
        for identity in dict.fromkeys(reservations):
            if identity not in charges:
                raise LedgerError(f"reservation={identity!r}: account {account!r} has none. Was it made elsewhere?")
            parts[identity] = charges[identity]
        # Whether these are private is theirs to say; whether the cap was kept is the account's.
        capped, view = view.private, replace(view, private=not any(charge.insecure for charge in parts.values()))
        planned = tuple(event for charge in parts.values() for event in charge.planned)
        return Claim(
            guarantee=view.claim(planned, capped=capped),
            ex_post=view.claim((e for charge in parts.values() for e in charge.incurred), capped=capped),
            planned=planned,
            parts=MappingProxyType(parts),
        )

    # ---- the chain ----------------------------------------------------------------------------------------------

    def entries(self, account: str | None = None) -> tuple[Entry, ...]:
        """Every entry (of one account), verified from the first."""
        return tuple(e for e in self._chain.all() if account is None or e.account == account)

    def head(self) -> str:
        """Hash of the newest entry: note it outside the ledger, and a cut tail will show."""
        return self._chain.head()

    def head_contains(self, digest: str) -> bool:
        """Whether a hash noted elsewhere is in the chain; if not, entries were lost (or it is another ledger)."""
        return self._chain.contains(digest)

    def verify(self) -> tuple[Account, ...]:
        """Recompute every hash, price and total from the entries.

        Raises:
            LedgerError: An entry is wrong; it names the first.
        """
        self._chain.check_file()
        accounts: dict[str, State] = {}
        for entry in self._chain.all():
            apply(accounts, entry, recompute=True)
        return tuple(state.view(name) for name, state in accounts.items())

    def backup(self, path: str | os.PathLike[str]) -> None:
        """Copy the ledger, whole and consistent, to a new file of mode 0600."""
        self._chain.backup(Path(path))

    # ---- state --------------------------------------------------------------------------------------------------

    def _catch_up(self) -> None:
        try:
            for entry in self._chain.news():
                apply(self._accounts, entry)
        except LedgerError:
            # Half a state would admit too much: start over, and so fail again, on the next call.
            self._chain.rewind()
            self._accounts.clear()
            raise

    def _state(self, name: str) -> State:
        if name not in self._accounts:
            known = ", ".join(self._accounts) or "none yet"
            raise LedgerError(f"account={name!r}: there is none of this name (accounts: {known}). Open it first.")
        return self._accounts[name]

    def _open_charge(self, reservation: Reservation | str) -> tuple[str, str, Charge]:
        """The account, the id and the charge of a reservation that is not committed."""
        self._catch_up()
        identity = reservation if isinstance(reservation, str) else reservation.id
        for name, state in self._accounts.items():
            if identity in state.charges:
                if state.charges[identity].committed:
                    raise LedgerError(f"reservation={identity!r}: is committed already.")
                return name, identity, state.charges[identity]
        raise LedgerError(f"reservation={identity!r}: there is none. Was it made in another ledger?")

    def same_terms(
        self,
        name: str,
        *,
        delta: float,
        adjacency: str,
        unit: str,
        noise: str,
        budget_epsilon: float | None = None,
    ) -> None:
        """Refuse terms that differ from those the account was opened with (None: not asked for).

        Raises:
            ValueError: Names the term that differs.
        """
        with self.alone():
            self._catch_up()
            state = self._state(name)
        fixed = (
            ("delta", delta, state.filter.delta),
            ("adjacency", adjacency, state.adjacency),
            ("unit", unit, state.unit),
            ("noise", noise, state.noise),
        )
        for key, asked, stored in fixed:
            if asked != stored:
                raise checks.fail(
                    key,
                    asked,
                    f"account {name!r} was opened with {stored!r}, and earlier charges hold for that only",
                    f"Set it back to {stored!r}.",
                )
        if budget_epsilon not in (None, state.filter.epsilon):
            raise checks.fail(
                "budget_epsilon",
                budget_epsilon,
                f"the cap of account {name!r} is {state.filter.epsilon!r}",
                "Set it back; or raise the cap, which is a deliberate act: "
                f"pate ledger raise-cap {name} EPSILON --reason WHY.",
            )


def _reason(reason: str) -> None:
    if not reason.strip():
        raise checks.fail("reason", reason, "must say why", "It is recorded for whoever reads the ledger later.")
