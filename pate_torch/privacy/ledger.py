"""The privacy ledger: one account per private data set, which outlives every run, ensemble and student.

    reserve   what the release may cost at worst, before any noise is drawn; refused if it would pass the cap
    record    where a release that is to be resumed stands, by a hash, and what it incurred so far
    resume    it goes on from there, once; noise may be drawn from here on, so it is resumed again only once recorded
    commit    what it did cost, once the answers are written down

Only ``budget`` calls these four: nothing else hands out noise.

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
from pate_torch.accounting.events import PrivacyEvent, to_json
from pate_torch.accounting.filters import FilterCost, PrivacyFilter
from pate_torch.core import checks, run_folders
from pate_torch.privacy.accounts import (
    PURPOSE_HYPOTHESIS,
    PURPOSE_LABELS,
    PURPOSE_PRICE,
    PURPOSE_STUDENT_CHOICE,
    Account,
    AccountState,
    BudgetExceeded,
    Charge,
    Claim,
    account_charged_error,
    apply_entry,
    budget_exceeded_error,
    is_within,
    make_price_facts,
)
from pate_torch.privacy.chain import HashChain, LedgerEntry, LedgerError

__all__ = [
    "PURPOSE_HYPOTHESIS",
    "PURPOSE_LABELS",
    "PURPOSE_PRICE",
    "PURPOSE_STUDENT_CHOICE",
    "Account",
    "BudgetExceeded",
    "Charge",
    "Claim",
    "Ledger",
    "LedgerEntry",
    "LedgerError",
    "Reservation",
    "get_default_path",
]


def get_default_path() -> Path:
    """Default place of the ledger: ``ledger.sqlite`` under PATE_HOME, or in the store of this user."""
    return run_folders.check_root(run_folders.get_home_folder()) / "ledger.sqlite"


@dataclass(frozen=True, kw_only=True)
class Reservation:
    """A release that has been charged at its worst and not yet committed.

    Attributes:
        id: Names it in the ledger.
        account: Account that it is charged to.
        reserved_events: Events of its worst case.
        reserved_cost: Their price.
        insecure: Whether its noise is seeded or off.
        incurred_events: What it had incurred before it was resumed; None: it was not.
    """

    id: str
    account: str
    reserved_events: tuple[PrivacyEvent, ...]
    reserved_cost: FilterCost
    insecure: bool
    incurred_events: tuple[PrivacyEvent, ...] | None = None


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
        self._chain = HashChain(self.path, create=create, readonly=readonly)
        self._accounts: dict[str, AccountState] = {}
        try:
            self._catch_up()
        except LedgerError:
            self._chain.close()
            raise

    def __enter__(self) -> Ledger:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._chain.close()

    def exclusive_access(self) -> AbstractContextManager[None]:
        """Make other threads of the process wait while this one is in it.

        Raises:
            LedgerError: This is another process.
        """
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
            planned_events: Choose the filter when the account opens (``PrivacyFilter.from_planned_events``); ignored
                afterwards.
            noise: The kind that its releases will draw: "torch", "discrete", or "by <library>".
            filter: Overrules the choice of the filter's kind.
            delta_reserve: Overrules the choice of its reserve.

        Raises:
            ValueError: The terms asked for differ from the stored ones.
        """
        if not name or name != name.strip():
            raise checks.error("account", name, "must be a name without spaces around it")
        checks.one_of("adjacency", adjacency, ("add_remove", "replace_one"))
        if not unit:
            raise checks.error("unit", unit, 'must say what is protected, such as "record"')
        with self._chain.transaction():
            self._catch_up()
            existing_state = self._accounts.get(name)
            if existing_state is not None and (existing_state.charges or existing_state.is_closed):
                self.check_terms(
                    name,
                    budget_epsilon=budget_epsilon,
                    delta=delta,
                    adjacency=adjacency,
                    unit=unit,
                    noise=noise,
                )
            else:
                terms = PrivacyFilter.from_planned_events(
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
                if existing_state != AccountState(filter=terms, adjacency=adjacency, unit=unit, noise=noise):
                    self._chain.append("open", name, facts)
        return self.get_account(name)

    def get_account(self, name: str) -> Account:
        """The account as it stands now.

        Raises:
            LedgerError: There is none of that name.
        """
        with self.exclusive_access():
            self._catch_up()
            return self._get_state(name).to_account(name)

    def list_accounts(self) -> tuple[Account, ...]:
        """All accounts, in the order they were opened."""
        with self.exclusive_access():
            self._catch_up()
            return tuple(state.to_account(name) for name, state in self._accounts.items())

    def raise_cap(self, name: str, budget_epsilon: float, *, reason: str) -> Account:
        """Raise an account's cap: a deliberate act of the owner, recorded with its reason.

        From then on the guarantee is the new cap. The filter's theorem takes the cap as fixed in advance: a cap that
        is raised because of what was released is the owner's promise, not the theorem's.
        """
        checks.positive("budget_epsilon", budget_epsilon)
        _check_reason(reason)
        with self._chain.transaction():
            self._catch_up()
            state = self._get_state(name)
            if budget_epsilon <= state.filter.epsilon:
                raise checks.error(
                    "budget_epsilon",
                    budget_epsilon,
                    f"must be above the present cap {state.filter.epsilon!r}",
                    "A cap cannot be lowered; close the account to end its spending.",
                )
            facts = {"budget_epsilon": float(budget_epsilon), "before": state.filter.epsilon, "reason": reason}
            self._chain.append("raise_cap", name, facts)
        return self.get_account(name)

    def close_account(self, name: str, reason: str) -> Account:
        """End an account's spending for good; releases already reserved may still commit."""
        _check_reason(reason)
        with self._chain.transaction():
            self._catch_up()
            if self._get_state(name).is_closed:
                raise LedgerError(f"account={name!r}: is closed already.")
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
        note: str = "",
        insecure: bool = False,
        first_charge_only: bool = False,
        terms: Mapping[str, Any] | None = None,
    ) -> Reservation:
        """Charge a whole release at its worst, before anything is drawn.

        Args:
            account: Name of the account.
            events: Events of the worst case.
            fingerprint: Content fingerprint of the records, or of votes in their place.
            mechanism: Name of the mechanism that will draw the noise.
            run: The run that makes the release.
            purpose: What is released, in words.
            noise: Its kind, in words.
            note: Kept with the charge.
            insecure: The noise is seeded or off, so the release is NOT PRIVATE; it is charged and marked all the same.
            first_charge_only: Whether to refuse where the account has any reservation, a killed or an open one
                included.
            terms: Terms that the account must have (``check_terms``), checked with the charge; None: not asked for.

        Raises:
            BudgetExceeded: The cap would be passed.
            ValueError: ``first_charge_only`` or ``terms`` do not hold.
            LedgerError: The charge cannot be written.
        """
        events = tuple(events)
        checks.boolean("insecure", insecure)
        with self._chain.transaction():
            if terms is not None:
                self.check_terms(account, **terms)
            requested_cost = self.check_events(account, events)
            if first_charge_only and self._get_state(account).charges:
                raise account_charged_error(
                    self._get_state(account).to_account(account),
                    self._get_state(account).filter.to_epsilon(requested_cost),
                )
            reservation = Reservation(
                id=secrets.token_hex(8),
                account=account,
                reserved_events=events,
                reserved_cost=requested_cost,
                insecure=insecure,
            )
            facts = {
                "reservation": reservation.id,
                **make_price_facts(events, requested_cost),
                "fingerprint": fingerprint,
                "mechanism": mechanism,
                "run": run,
                "what": purpose,
                "noise": noise,
                "note": note,
                "insecure": insecure,
            }
            self._chain.append("reserve", account, facts)
        return reservation

    def check_events(self, account: str, events: Iterable[PrivacyEvent]) -> FilterCost:
        """Price of these events; raises what ``reserve`` would raise now, and charges nothing."""
        events = tuple(events)
        with self.exclusive_access():
            self._catch_up()
            state = self._get_state(account)
            if state.is_closed:
                raise LedgerError(f"account={account!r}: is closed. Nothing was drawn.")
            requested_cost = state.filter.compute_cost(events)
            if not state.filter.admits(state.compute_total_cost(), requested_cost):
                raise budget_exceeded_error(state.to_account(account), events, requested_cost)
            return requested_cost

    def record(
        self,
        reservation: Reservation | str,
        events: Iterable[PrivacyEvent],
        *,
        state_digest: str = "",
        digests: Mapping[str, str] | None = None,
    ) -> None:
        """Note what the release has incurred so far; the charge stays at its worst.

        Args:
            reservation: Or its id.
            events: Incurred so far.
            state_digest: A hash of all that is needed to go on, with which it may be resumed; "": it may not.
            digests: SHA-256 of what was written down so far, by name.
        """
        with self._chain.transaction():
            account, identity, _ = self._find_open_charge(reservation)
            facts = {
                **(digests or {}),
                "reservation": identity,
                "events": json.loads(to_json(events)),
                "state": state_digest,
            }
            self._chain.append("record", account, facts)

    def resume(self, reservation: Reservation | str, *, state_digest: str) -> Reservation:
        """Let an open release go on from where it was recorded last; called before any noise is drawn.

        Raises:
            LedgerError: A state that the ledger does not know, which leaves the reservation spent: noise may have been
                drawn since the last record, or the state is an older one.
        """
        with self._chain.transaction():
            account, identity, charge = self._find_open_charge(reservation)
            if not charge.is_suspended or charge.state_digest != state_digest:
                raise LedgerError(
                    f"reservation={identity!r}: does not stand where it is to be resumed: noise may have been drawn"
                    " since, or what was kept is older than the ledger. It stays charged at its worst; make another."
                )
            number = charge.num_resumptions + 1
            self._chain.append("resume", account, {"reservation": identity, "state": state_digest, "number": number})
        return Reservation(
            id=identity,
            account=account,
            reserved_events=charge.reserved_events,
            reserved_cost=charge.reserved_cost,
            insecure=charge.insecure,
            incurred_events=charge.recorded_events,
        )

    def commit(
        self,
        reservation: Reservation | str,
        incurred_events: Iterable[PrivacyEvent],
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
        with self._chain.transaction():
            account, identity, charge = self._find_open_charge(reservation)
            incurred_cost = self._accounts[account].filter.compute_cost(events)
            if not is_within(incurred_cost, charge.reserved_cost):
                raise LedgerError(
                    f"reservation={identity!r}: the release incurred more than it reserved"
                    f" ({incurred_cost} against {charge.reserved_cost}). The reservation stands; the mechanism's worst"
                    " case is wrong."
                )
            charged_cost = FilterCost(
                min(incurred_cost.scalar, charge.reserved_cost.scalar),
                min(incurred_cost.delta, charge.reserved_cost.delta),
            )
            facts = {
                **(digests or {}),
                "reservation": identity,
                "release": release_id,
                **make_price_facts(events, charged_cost),
            }
            self._chain.append("commit", account, facts)
        return self.get_account(account)

    def get_guarantee(self, account: str) -> Guarantee | None:
        """Everything reserved from the account, composed, at the account's delta (see ``Account.guarantee``)."""
        return self.get_account(account).guarantee

    def get_charges(self, account: str) -> Mapping[str, Charge]:
        """Every reservation of the account, by its id, in their order."""
        with self.exclusive_access():
            self._catch_up()
            return MappingProxyType(dict(self._get_state(account).charges))

    def make_claim(self, account: str, reservations: Iterable[str]) -> Claim:
        """What may be said of these reservations together.

        Raises:
            LedgerError: One that the account does not have.
        """
        with self.exclusive_access():
            charges, account_view = self.get_charges(account), self.get_account(account)
        claimed_charges = {}
        for identity in dict.fromkeys(reservations):
            if identity not in charges:
                raise LedgerError(f"reservation={identity!r}: account {account!r} has none. Was it made elsewhere?")
            claimed_charges[identity] = charges[identity]
        # Whether these are private is theirs to say; whether the cap was kept is the account's.
        cap_holds, account_view = (
            account_view.is_private,
            replace(account_view, is_private=not any(charge.insecure for charge in claimed_charges.values())),
        )
        reserved_events = tuple(event for charge in claimed_charges.values() for event in charge.reserved_events)
        return Claim(
            guarantee=account_view.compute_guarantee(reserved_events, cap_holds=cap_holds),
            ex_post_guarantee=account_view.compute_guarantee(
                (e for charge in claimed_charges.values() for e in charge.incurred_events), cap_holds=cap_holds
            ),
            reserved_events=reserved_events,
            charges=MappingProxyType(claimed_charges),
        )

    # ---- the chain ----------------------------------------------------------------------------------------------

    def read_entries(self, account: str | None = None) -> tuple[LedgerEntry, ...]:
        """Every entry (of one account), verified from the first."""
        return tuple(e for e in self._chain.read_all_entries() if account is None or e.account == account)

    def get_head(self) -> str:
        """Hash of the newest entry: note it outside the ledger, and a cut tail will show."""
        return self._chain.get_head()

    def contains_head(self, digest: str) -> bool:
        """Whether a hash noted elsewhere is in the chain; if not, entries were lost (or it is another ledger)."""
        return self._chain.contains(digest)

    def verify(self) -> tuple[Account, ...]:
        """Recompute every hash, price and total from the entries.

        Raises:
            LedgerError: An entry is wrong; it names the first.
        """
        self._chain.check_file()
        accounts: dict[str, AccountState] = {}
        for entry in self._chain.read_all_entries():
            apply_entry(accounts, entry, recompute=True)
        return tuple(state.to_account(name) for name, state in accounts.items())

    def backup(self, path: str | os.PathLike[str]) -> None:
        """Copy the ledger, whole and consistent, to a new file of mode 0600."""
        self._chain.backup(Path(path))

    # ---- state --------------------------------------------------------------------------------------------------

    def _catch_up(self) -> None:
        try:
            for entry in self._chain.read_new_entries():
                apply_entry(self._accounts, entry)
        except LedgerError:
            # Half a state would admit too much: start over, and so fail again, on the next call.
            self._chain.rewind()
            self._accounts.clear()
            raise

    def _get_state(self, name: str) -> AccountState:
        if name not in self._accounts:
            account_names = ", ".join(self._accounts) or "none yet"
            raise LedgerError(
                f"account={name!r}: there is none of this name (accounts: {account_names}). Open it first."
            )
        return self._accounts[name]

    def _find_open_charge(self, reservation: Reservation | str) -> tuple[str, str, Charge]:
        """The account, the id and the charge of a reservation that is not committed."""
        self._catch_up()
        identity = reservation if isinstance(reservation, str) else reservation.id
        for name, state in self._accounts.items():
            if identity in state.charges:
                if state.charges[identity].is_committed:
                    raise LedgerError(f"reservation={identity!r}: is committed already.")
                return name, identity, state.charges[identity]
        raise LedgerError(f"reservation={identity!r}: there is none. Was it made in another ledger?")

    def check_terms(
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
        with self.exclusive_access():
            self._catch_up()
            state = self._get_state(name)
        term_values = (
            ("delta", delta, state.filter.delta),
            ("adjacency", adjacency, state.adjacency),
            ("unit", unit, state.unit),
            ("noise", noise, state.noise),
        )
        for key, requested_value, stored_value in term_values:
            if requested_value != stored_value:
                raise checks.error(
                    key,
                    requested_value,
                    f"account {name!r} was opened with {stored_value!r}, and earlier charges hold for that only",
                    f"Set it back to {stored_value!r}.",
                )
        if budget_epsilon not in (None, state.filter.epsilon):
            raise checks.error(
                "budget_epsilon",
                budget_epsilon,
                f"the cap of account {name!r} is {state.filter.epsilon!r}",
                "Set it back; or raise the cap, which is a deliberate act: "
                f"pate ledger raise-cap {name} EPSILON --reason WHY.",
            )


def _check_reason(reason: str) -> None:
    if not reason.strip():
        raise checks.error("reason", reason, "must say why", "It is recorded for whoever reads the ledger later.")
