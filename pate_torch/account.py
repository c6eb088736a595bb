"""Opens the account that a run charges, and refuses what the account could not be charged with."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping

from pate_torch.accounting import accountant as accounting
from pate_torch.accounting.events import PrivacyEvent
from pate_torch.accounting.filters import PrivacyFilter
from pate_torch.config import RunConfig
from pate_torch.core import checks
from pate_torch.privacy.budget import Budget
from pate_torch.privacy.ledger import Ledger
from pate_torch.privacy.records import Dataset
from pate_torch.teachers.store import RecordHashes, TeacherStore


def open_budget(
    config: RunConfig, ledger: Ledger, data: Dataset, planned_events: tuple[PrivacyEvent, ...], fingerprint: str
) -> Budget:
    """Open the data set's account, or meet its terms; refuse now what could not be charged later.

    Args:
        config: The run's choices.
        ledger: The ledger that holds the account.
        data: The data whose records the account protects.
        planned_events: Everything that is to be charged.
        fingerprint: Content fingerprint of the records, or of votes in their place.

    Raises:
        ValueError: The account has other terms, was charged in another ledger, or its records are charged to another
            account.
    """
    name, privacy, kind = data.spec.name, config.privacy, config.method.noise
    store = TeacherStore(config.root)
    _check_same_ledger(store, name, ledger)
    records = store.hash_records(data.private) if len(data.private) else None
    if not privacy.allow_duplicate_account:
        _check_duplicate_account(store, name, records, fingerprint, ledger)
    cap_by_account = read_caps(ledger)
    check_new_account_cap(config, name, planned_events, cap_by_account)
    cap = privacy.budget_epsilon
    ledger.open_account(
        name,
        budget_epsilon=cap_by_account.get(name, privacy.opening_budget) if cap is None else cap,
        delta=privacy.delta,
        adjacency=config.partition.adjacency,
        unit=data.private.unit,
        planned_events=planned_events,
        noise=kind,
    )
    return Budget(
        ledger=ledger,
        account=name,
        delta=privacy.delta,
        adjacency=config.partition.adjacency,
        unit=data.private.unit,
        fingerprint=fingerprint,
        run=config.folder.name,
        kind=kind,
        insecure_seed=privacy.insecure_noise_seed,
        first_charge_only=privacy.first_charge_only,
        on_charge=functools.partial(store.record_charge, name, records),
    )


def read_caps(ledger: Ledger | None) -> dict[str, float]:
    """The caps of the accounts that were charged, by name: the other accounts have no fixed terms."""
    if ledger is None:
        return {}
    return {account.name: account.budget_epsilon for account in ledger.list_accounts() if account.is_charged}


def check_new_account_cap(
    config: RunConfig, name: str, planned_events: Iterable[PrivacyEvent], cap_by_account: Mapping[str, float]
) -> None:
    """Raise ValueError for a new account whose cap would refuse this run: a slip would fix the cap for good."""
    if name in cap_by_account:
        return
    planned_events, privacy = tuple(planned_events), config.privacy
    key, cap = "budget_epsilon", privacy.budget_epsilon
    if cap is None:
        key, cap = "opening_budget", privacy.opening_budget
    if not PrivacyFilter.can_admit(planned_events, epsilon=cap, delta=privacy.delta):
        guarantee = accounting.compute_guarantee(planned_events, privacy.delta)
        problem = (
            f"this run alone may cost epsilon {guarantee.epsilon:.6g} at delta {privacy.delta:g} ({guarantee.route})"
        )
        raise checks.error(f"privacy.{key}", cap, problem, f"{config.method.price_advice}, or open with a larger cap.")


def _check_same_ledger(store: TeacherStore, name: str, ledger: Ledger) -> None:
    """Raise ValueError if something in the store remembers entries of the account that the ledger lacks."""
    for file, head in store.find_ledger_heads(name).items():
        if not ledger.contains_head(head):
            problem = f"was charged in another privacy ledger than {ledger.path}: {file} remembers an entry of that one"
            fix = "Bring back the ledger.sqlite (or its newest backup) that lay beside the teachers: it remembers what "
            raise checks.error("dataset.name", name, problem, f"{fix}was released.")


def _check_duplicate_account(
    store: TeacherStore, name: str, records: RecordHashes | None, fingerprint: str, ledger: Ledger
) -> None:
    """Raise ValueError if these records are charged to another account."""
    other_accounts = [account.name for account in ledger.list_accounts() if account.name != name]
    accounts_of_same_records = (
        n for n in other_accounts if any(c.fingerprint == fingerprint for c in ledger.get_charges(n).values())
    )
    if duplicate := next(accounts_of_same_records, None) or store.find_account_of_same_units(records, other_accounts):
        problem = (
            f"shares a tenth or more of the units with account {duplicate!r}, which was charged: no total covers both"
        )
        fix = f"Use account {duplicate!r}; or say allow_duplicate_account=True (privacy.allow_duplicate_account=true), "
        fix += "and add both epsilons yourself."
        raise checks.error("account", name, problem, fix)
