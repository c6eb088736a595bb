"""Formats what was charged as one line, after a fit and after Ctrl-C."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from pate_torch.core.formatting import format_delta, format_epsilon
from pate_torch.privacy.accounts import Account, Charge
from pate_torch.privacy.ledger import find_account
from pate_torch.release.store import UnfinishedCall
from pate_torch.teachers.store import TeacherStore


def format_charges(home: Path, account: Account, charges: Sequence[Charge]) -> str:
    """Format the epsilon of some charges of an account, the account's total and cap, and the place of the ledger.

    If the first answers of a release stopped it, only the cost of these answers counts.
    """
    ledger = "PATE_LEDGER" if os.environ.get("PATE_LEDGER") else (home / "ledger.sqlite").absolute()
    total = account.guarantee
    events = (c.incurred_events if c.is_stopped else c.reserved_events for c in charges)
    charged = account.compute_guarantee(itertools.chain.from_iterable(events))
    if total is None or charged is None:
        return f"charged with seeded noise, so that no epsilon holds; ledger at {ledger}"
    accountants = " and ".join(dict.fromkeys((charged.route, total.route)))
    sum_words = f"the only charge of the account (cap {account.budget_epsilon:g})"
    if len(charges) < len(account.charges):
        sum_words = f"account total {format_epsilon(total.epsilon)} if all its releases were planned before the first, "
        sum_words += f"otherwise up to its cap {account.budget_epsilon:g}"
    return (
        f"charged {format_epsilon(charged.epsilon)}; {sum_words}; ledger at {ledger} (epsilon at delta "
        f"{format_delta(total.delta)}, {total.adjacency}, unit {account.unit}, accountant {accountants})"
    )


@contextmanager
def explain_interrupts(home: Path, name: str, *, can_repeat: bool = True) -> Iterator[None]:
    """Add to a KeyboardInterrupt, for the owner, what the block charged to account ``name`` and how to go on.

    ``can_repeat`` states whether a repeated call has the same seed, so that the repeated call can finish the release.
    """
    opened = find_account(home, name)
    old_ids = {} if opened is None else opened.charges
    try:
        yield
    except KeyboardInterrupt as interrupt:
        account = find_account(home, name)
        charges = [] if account is None else [c for id_, c in account.charges.items() if id_ not in old_ids]
        if account is None or not charges:
            advice = f"nothing was charged to account {name!r}. Repeat the same call to go on."
        else:
            unfinished_runs = UnfinishedCall.list_runs(TeacherStore(home), name) if can_repeat else []
            last = charges[-1]
            is_resumable = last.is_committed and not last.is_stopped and last.run in unfinished_runs
            advice = "The charge stays, and its release cannot be finished: another call is a new charge."
            if is_resumable:
                advice = "Repeat the same call to finish the release at no cost beyond its plan."
            advice = f"account {name!r}: {format_charges(home, account, charges)}. {advice}"
        interrupt.args = (f"interrupted: {advice}",)
        raise
