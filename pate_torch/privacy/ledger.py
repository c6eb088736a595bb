"""PRIVATE. The privacy ledger: one account for each private data set, which all runs, ensembles and students share.

    reserve   charge the worst case of a release before any noise is drawn; refused if it would exceed the cap
    record    store a hash of the state of a release that is to be resumed, and the events incurred so far
    resume    continue from this state; since noise may be drawn then, the next resumption needs a new record
    commit    replace the charge by the events that the release incurred, after its answers are written

Only ``budget`` calls these four methods, because only ``budget`` hands out noise.

A reservation without a commit counts as spent, so a crash can lose answers but never a charge. The name of an account
is the *declared name* of the private data, so two ensembles that were trained on the same records share one budget. If
the content of the data changes, the new fingerprint is recorded and the same account is charged. A privacy filter,
which is fixed when the account opens, enforces the cap (``accounting.filters``). The cap is therefore a guarantee for
all releases together, even if each release was chosen after the earlier ones. The ledger is for the owner of the data.

    pate ledger verify|show|export|backup|move|raise-cap|close
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pate_torch.accounting.accountant import compute_guarantee
from pate_torch.accounting.events import PrivacyEvent, to_json
from pate_torch.accounting.filters import FilterCost, PrivacyFilter
from pate_torch.core import checks, run_folders
from pate_torch.privacy.accounts import (
    PURPOSE_LABELS,
    Account,
    Charge,
    Claim,
    apply_entry,
    check_unit,
    is_within,
    make_account_charged_error,
    make_budget_exceeded_error,
    make_cost_facts,
    make_held_out_error,
)
from pate_torch.privacy.chain import HashChain, LedgerEntry, LedgerError, MissingLedgerError


def get_default_path() -> Path:
    """Return the default path of the ledger: ``ledger.sqlite`` under PATE_HOME, or in the store of this user."""
    return run_folders.find_home() / "ledger.sqlite"


@dataclass(frozen=True, kw_only=True)
class Reservation:
    """A release whose worst case has been charged and that has not been committed.

    Attributes:
        incurred_events: Events incurred before the release was resumed. None if it was not resumed.
    """

    id: str
    reserved_events: tuple[PrivacyEvent, ...]
    incurred_events: tuple[PrivacyEvent, ...] | None = None


class Ledger:
    """The ledger in a file, or in a PostgreSQL database. Each process opens one ``Ledger``, which its threads share.

    A missing ledger is created if ``create`` is set, as by default, and ``readonly`` is not. ``place`` is its path, or
    its URL without user and password. ``home`` is the folder of teachers and suspended noise, by default that of the
    file, or PATE_HOME.

    Raises:
        LedgerError: The ledger is damaged, empty, no ledger, of a newer version, or cannot be written.
    """

    def __init__(self, location: str | os.PathLike[str], *, home: Path | None = None, **options: bool) -> None:
        self._chain = _open_chain(os.fspath(location), **options)
        self.place = self._chain.place
        self.home = home or (get_default_path() if "://" in self.place else Path(self.place)).parent
        self._accounts: dict[str, Account] = {}
        try:
            self._catch_up()
            if home is not None:
                self._check_complete(home / "ledger.sqlite")
        except LedgerError:
            self._chain.close()
            raise

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self._chain.close()

    def exclusive_access(self) -> AbstractContextManager[None]:
        """Block the other threads of this process during a ``with`` block."""
        return self._chain.exclusive_access()

    # ---- accounts -----------------------------------------------------------------------------------------------

    def open_account(
        self,
        name: str,
        *,
        budget_epsilon: float,
        delta: float,
        adjacency: str,
        unit: str,
        planned_events: Iterable[PrivacyEvent],
        noise: str = "torch",
        delta_reserve: float | None = None,
        filter: str | None = None,
        held_out: str = "",
    ) -> Account:
        """Open the account of a private data set, or return the existing account; see ``Account`` for the terms.

        The first charge fixes the terms, so an account without charges is opened again with the new terms. The planned
        events, ``delta_reserve`` and the kind ``filter`` determine the privacy filter of a new account
        (``PrivacyFilter.from_planned_events``).

        Raises:
            ValueError: The account is charged or closed, and the requested terms differ from the stored terms, or the
                adjacency does not protect the unit.
        """
        if not name or name != name.strip():
            raise checks.error("account", name, "must be a name without spaces around it")
        checks.one_of("adjacency", adjacency, ("add_remove", "replace_one"))
        if not unit:
            raise checks.error("unit", unit, 'must name the privacy unit, such as "record"')
        check_unit("adjacency", adjacency, unit)
        terms: dict[str, Any] = {"adjacency": adjacency, "unit": unit, "noise": noise, "held_out": held_out}
        filter_terms: dict[str, Any] = {"delta_reserve": delta_reserve, "filter": filter}
        with self._chain.transaction():
            self._catch_up()
            existing = self._accounts.get(name)
            if existing is not None and (existing.charges or existing.is_closed):
                self.check_terms(name, budget_epsilon=budget_epsilon, delta=delta, **terms, **filter_terms)
            else:
                new = PrivacyFilter.from_planned_events(
                    planned_events, epsilon=budget_epsilon, delta=delta, delta_reserve=delta_reserve, kind=filter
                )
                if existing != Account(name=name, filter=new, **terms):
                    facts = {"filter": new.kind, "order": new.order, "delta_reserve": new.delta_reserve}
                    self._chain.append("open", name, {"budget_epsilon": new.epsilon, "delta": delta, **terms, **facts})
        return self.get_account(name)

    def get_account(self, name: str) -> Account:
        """Return the present state of an account. Raises LedgerError if no account has this name."""
        with self.exclusive_access():
            return _copy_account(self._find_account(name))

    def list_accounts(self) -> tuple[Account, ...]:
        """Return all accounts, in the order in which they were opened."""
        with self.exclusive_access():
            self._catch_up()
            return tuple(map(_copy_account, self._accounts.values()))

    def raise_cap(self, name: str, budget_epsilon: float, *, reason: str) -> Account:
        """Raise the cap of an account, which is its guarantee from then on, and record the reason.

        The theorem about the filter assumes a cap that was fixed in advance. If an owner raises the cap because of
        earlier releases, the theorem does not prove the guarantee.
        """
        checks.positive("budget_epsilon", budget_epsilon)
        _check_reason(reason)
        with self._chain.transaction():
            cap = self._find_account(name).budget_epsilon
            if budget_epsilon <= cap:
                fix = "A cap cannot be lowered. Close the account to prevent further releases."
                raise checks.error("budget_epsilon", budget_epsilon, f"must be above the present cap {cap!r}", fix)
            facts = {"budget_epsilon": float(budget_epsilon), "before": cap, "reason": reason}
            self._chain.append("raise_cap", name, facts)
        return self.get_account(name)

    def close_account(self, name: str, reason: str) -> Account:
        """Close an account for new releases. Reserved releases can still be committed."""
        _check_reason(reason)
        with self._chain.transaction():
            if self._find_account(name).is_closed:
                raise LedgerError(f"account={name!r}: is already closed.")
            self._chain.append("close", name, {"reason": reason})
        return self.get_account(name)

    # ---- charges ------------------------------------------------------------------------------------------------

    def reserve(
        self,
        account: str,
        events: Iterable[PrivacyEvent],
        *,
        fingerprint: str,
        mechanism: str,
        run: str,
        purpose: str = PURPOSE_LABELS,
        noise: str = "",
        insecure: bool = False,
        first_charge_only: bool = False,
        once: str = "",
        terms: Mapping[str, Any] | None = None,
    ) -> Reservation:
        """Charge the worst case of a release before any noise is drawn; see ``Charge`` for the facts that are recorded.

        A release with ``insecure`` (seeded) noise is NOT PRIVATE, and is charged and marked. With ``first_charge_only``
        the charge is refused if the account has any reservation, even an unfinished one or that of a stopped release.
        With ``once`` the charge is refused if the ``run`` of another charge begins with ``once``. ``terms`` must equal
        the terms of the account, and are not checked if None.

        Raises:
            BudgetExceeded: The release would exceed the cap.
            ValueError: ``first_charge_only``, ``once`` or ``terms`` are violated.
            LedgerError: The charge cannot be written.
        """
        checks.boolean("insecure", insecure)
        with self._chain.transaction():
            state = self._find_account(account)
            events = state.filter.choose_failures(events, state.total_cost)
            requested_cost = self.check_events(
                account, events, terms=terms, first_charge_only=first_charge_only, once=once
            )
            reservation = Reservation(id=run_folders.make_hex_id(), reserved_events=events)
            facts = {
                "reservation": reservation.id,
                **make_cost_facts(events, requested_cost),
                "fingerprint": fingerprint,
                "mechanism": mechanism,
                "run": run,
                "what": purpose,
                "noise": noise,
                "insecure": insecure,
            }
            self._chain.append("reserve", account, facts)
        return reservation

    def check_events(
        self,
        account: str,
        events: Iterable[PrivacyEvent],
        *,
        terms: Mapping[str, Any] | None = None,
        first_charge_only: bool = False,
        once: str = "",
    ) -> FilterCost:
        """Return the cost of these events, or raise the error that ``reserve`` would raise now; nothing is charged."""
        with self.exclusive_access():
            if terms is not None:
                self.check_terms(account, **terms)
            state = self._find_account(account)
            if state.is_closed:
                raise LedgerError(f"account={account!r}: is closed. Nothing was drawn.")
            if once and any(charge.run.startswith(once) for charge in state.charges.values()):
                raise LedgerError(f"account={account!r}: was already charged for {once.strip()!r}. Nothing was drawn.")
            events = state.filter.choose_failures(events, state.total_cost)
            requested_cost = state.filter.compute_cost(events)
            if first_charge_only and state.is_charged:
                raise make_account_charged_error(state, compute_guarantee(events, state.delta).epsilon)
            if not state.filter.admits(state.total_cost, requested_cost):
                raise make_budget_exceeded_error(state, events, requested_cost)
            return requested_cost

    def record(
        self,
        reservation: Reservation | str,
        events: Iterable[PrivacyEvent],
        *,
        state_digest: str = "",
        digests: Mapping[str, str] | None = None,
    ) -> None:
        """Record the events that a release has incurred so far. The charge stays at its worst case.

        ``state_digest`` is the hash of the state from which the release may be resumed, or "" if it may not be.
        ``digests`` are the SHA-256 of the files written so far, by name.
        """
        with self._chain.transaction():
            account, identity, _ = self._find_open_charge(reservation)
            facts = {"reservation": identity, "events": json.loads(to_json(events)), "state": state_digest}
            self._chain.append("record", account.name, {**(digests or {}), **facts})

    def resume(self, reservation: Reservation | str, *, state_digest: str) -> Reservation:
        """Continue an open release from its last record, before any noise is drawn.

        Raises:
            LedgerError: Noise may have been drawn since the last record, or the state is not the recorded one. The
                reservation stays spent.
        """
        with self._chain.transaction():
            account, identity, charge = self._find_open_charge(reservation)
            if not charge.is_suspended or charge.state_digest != state_digest:
                raise LedgerError(
                    f"reservation={identity!r}: cannot be resumed from this state, because noise may have been drawn"
                    " since, or a newer state was recorded. The reservation stays charged at its worst case. Make a new"
                    " release."
                )
            number = charge.num_resumptions + 1
            facts = {"reservation": identity, "state": state_digest, "number": number}
            self._chain.append("resume", account.name, facts)
        return Reservation(id=identity, reserved_events=charge.reserved_events, incurred_events=charge.recorded_events)

    def commit(
        self,
        reservation: Reservation | str,
        incurred_events: Iterable[PrivacyEvent],
        *,
        release_id: str = "",
        digests: Mapping[str, str] | None = None,
        is_stopped: bool = False,
    ) -> None:
        """Replace the reserved charge of a release by the events that it incurred, and record its files' SHA-256.

        ``is_stopped`` marks a release that its first answers stopped.

        Raises:
            LedgerError: The incurred events cost more than the reserved events in a quantity that the filter tracks, or
                the reservation is unknown or already committed. The reservation stays as it is.
        """
        events = tuple(incurred_events)
        with self._chain.transaction():
            account, identity, charge = self._find_open_charge(reservation)
            incurred_cost = account.filter.compute_cost(events)
            if not is_within(incurred_cost, charge.reserved_cost):
                raise LedgerError(
                    f"reservation={identity!r}: the release incurred more than it reserved"
                    f" ({incurred_cost} against {charge.reserved_cost}). The reservation stays charged. Correct the"
                    " mechanism's privacy_events(), which must return the worst case."
                )
            charged_cost = FilterCost(
                min(incurred_cost.scalar, charge.reserved_cost.scalar),
                min(incurred_cost.delta, charge.reserved_cost.delta),
            )
            facts = {"reservation": identity, "release": release_id, **make_cost_facts(events, charged_cost)}
            facts |= {"stopped": True} if is_stopped else {}
            self._chain.append("commit", account.name, {**(digests or {}), **facts})

    def get_charges(self, account: str) -> Mapping[str, Charge]:
        """Return every reservation of the account by its id, in order."""
        return MappingProxyType(self.get_account(account).charges)

    def make_claim(self, account: str, reservations: Iterable[str]) -> Claim:
        """Compose the guarantee of these reservations. Raises LedgerError if the account lacks one of them."""
        state = self.get_account(account)
        claimed: dict[str, Charge] = {}
        for identity in reservations:
            if identity not in state.charges:
                fix = "Open the ledger in which it was made."
                raise LedgerError(f"reservation={identity!r}: is not in account {account!r}. {fix}")
            claimed[identity] = state.charges[identity]
        return Claim(account=state, charges=MappingProxyType(claimed))

    # ---- the chain ----------------------------------------------------------------------------------------------

    def read_entries(self, account: str | None = None) -> tuple[LedgerEntry, ...]:
        """Return every entry, or the entries of one account, after verifying the chain from the first entry."""
        return tuple(e for e in self._chain.read_all_entries() if account is None or e.account == account)

    def get_head(self) -> str:
        """Return the hash of the newest entry. A copy outside the ledger reveals a ledger that was cut short."""
        return self._chain.get_head()

    def contains_head(self, digest: str) -> bool:
        """Whether an entry has this hash. If not, entries were lost, or the hash is of another ledger."""
        return self._chain.contains(digest)

    def verify(self) -> tuple[Account, ...]:
        """Recompute every hash, cost and total. Raises LedgerError, which names the first wrong entry."""
        self._chain.check_file()
        accounts: dict[str, Account] = {}
        for entry in self._chain.read_all_entries():
            apply_entry(accounts, entry, recompute=True)
        return tuple(accounts.values())

    def backup(self, path: str | os.PathLike[str]) -> None:
        """Copy a consistent state of the ledger to a new SQLite file of mode 0600."""
        self._chain.backup(Path(path))

    def move(self, url: str) -> str:
        """Move the ledger to a PostgreSQL database without one, verify both, and return the new place.

        This ledger takes no charge from then on. The same call continues an interrupted move.
        """
        self.verify()
        with contextlib.closing(HashChain(Path(self.place), create=False)) as old:
            _open_chain(url, is_url=True, old=old).close()
        with Ledger(url, create=False, readonly=True) as moved:
            moved.verify()
            if not moved.contains_head(self.get_head()):
                raise LedgerError(f"ledger={moved.place!r}: is another ledger. Name a database without one.")
        self._catch_up()
        if not self._chain.moved_to:
            raise LedgerError(f"ledger={self.place!r}: is an older copy of {moved.place}. Remove the file.")
        return moved.place

    def _check_complete(self, file: Path) -> None:
        """Raise LedgerError if the ledger was moved, or lacks entries of the file that its store holds."""
        self._chain.check_not_moved()
        if "://" in self.place and file.exists():
            with contextlib.closing(HashChain(file, create=False, readonly=True)) as old:
                if not self._chain.contains(old.get_head()):
                    fix = "Unset PATE_LEDGER, or set PATE_HOME to another folder."
                    raise LedgerError(f"ledger={self.place!r}: lacks the charges in {file}. {fix}")

    def _catch_up(self) -> None:
        try:
            for entry in self._chain.read_new_entries():
                apply_entry(self._accounts, entry)
        except LedgerError:
            # An incomplete state would admit too much. The next call starts from the first entry and fails again.
            self._chain.rewind()
            self._accounts.clear()
            raise

    def _find_account(self, name: str) -> Account:
        """Return the account itself, not a copy. Later entries change it, so the caller holds ``exclusive_access``."""
        self._catch_up()
        if name not in self._accounts:
            names = ", ".join(self._accounts) or "none yet"
            raise LedgerError(f"account={name!r}: there is no account of this name (accounts: {names}). Open it first.")
        return self._accounts[name]

    def _find_open_charge(self, reservation: Reservation | str) -> tuple[Account, str, Charge]:
        """Return account, id and charge of a reservation that is not committed."""
        identity = reservation if isinstance(reservation, str) else reservation.id
        self._catch_up()
        for account in self._accounts.values():
            if identity in account.charges:
                if account.charges[identity].is_committed:
                    raise LedgerError(f"reservation={identity!r}: is already committed.")
                return account, identity, account.charges[identity]
        raise LedgerError(f"reservation={identity!r}: is not in this ledger. Open the ledger in which it was made.")

    def check_terms(self, name: str, *, budget_epsilon: float | None = None, **terms: Any) -> None:
        """Raise ValueError if terms differ from those of the account; a term of None is not checked."""
        with self.exclusive_access():
            account = self._find_account(name)
        filter_terms = {"filter": account.filter.kind, "delta_reserve": account.filter.delta_reserve}
        for key, value in terms.items():
            stored = filter_terms[key] if key in filter_terms else getattr(account, key)
            if value is not None and value != stored:
                if key == "held_out":
                    raise make_held_out_error(account)
                problem = f"account {name!r} was opened with {stored!r}, for which its charges were computed"
                raise checks.error(key, value, problem, f"Set it back to {stored!r}.")
        if budget_epsilon not in (None, account.budget_epsilon):
            fix = f"Set this cap, or raise it on purpose: pate ledger raise-cap {name} EPSILON --reason WHY."
            problem = f"the cap of account {name!r} is {account.budget_epsilon!r}"
            raise checks.error("budget_epsilon", budget_epsilon, problem, fix)


def _copy_account(account: Account) -> Account:
    """Copy an account, so that later entries do not change the copy."""
    return replace(account, charges=copy.copy(account.charges))


def _check_reason(reason: str) -> None:
    if not reason.strip():
        raise checks.error("reason", reason, "must state why the account is changed", "The ledger records the reason.")


def _open_chain(location: str, *, is_url: bool = False, **options: Any) -> HashChain:
    if not is_url and "://" not in location and not location.startswith("postgresql"):
        return HashChain(Path(location), **options)
    try:
        from pate_torch.privacy.postgres import PostgresChain
    except ImportError as error:
        raise LedgerError(f"PATE_LEDGER: {error}. Install it: pip install 'pate-torch[postgres]'.") from error
    return PostgresChain(location, **options)


def open_ledger(home: Path | None = None, *, create: bool = True, readonly: bool = False) -> Ledger:
    """Open the ledger of a store: the database that PATE_LEDGER names, or else ``ledger.sqlite`` in its folder.

    Raises:
        LedgerError: The database lacks entries of the file, or PATE_LEDGER is not set and the file was moved.
        ValueError: The folder of the store has no absolute path.
    """
    home = run_folders.find_home(home)
    url, file = os.environ.get("PATE_LEDGER"), home / "ledger.sqlite"
    create = create and not (url and file.exists())
    return Ledger(url or file, home=file.parent, is_url=bool(url), create=create, readonly=readonly)


def open_existing_ledger(home: Path, *, readonly: bool = False) -> Ledger | None:
    """Open the ledger of a store, or return None if there is none: a run that is refused creates no ledger."""
    try:
        return open_ledger(home, create=False, readonly=readonly)
    except MissingLedgerError:
        return None


def find_account(home: Path, name: str) -> Account | None:
    """Read an account from the ledger of a store. Return None if the account does not exist."""
    with open_existing_ledger(home, readonly=True) or contextlib.nullcontext() as ledger:
        accounts = ledger.list_accounts() if ledger is not None else ()
    return next((account for account in accounts if account.name == name), None)
