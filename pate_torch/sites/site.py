"""The part of a site in the protocol: it confirms a charter, charges its own ledger, and answers rounds.

    read and check the round and its public file -> count the records -> ask whether the account admits the cost
    -> erase the keys of the slot -> reserve the cost in the ledger -> draw the share of noise -> write the answer

The charge names the round and its slot. A slot is spent before its cost is reserved, and its cost is reserved before
its noise is drawn. Therefore a process that dies at any step neither draws noise that was not charged nor charges a
slot twice. If the answer is on disk, the same round file gives the same bytes, and nothing is charged.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import ExitStack
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pate_torch.accounting.events import GaussianEvent, PrivacyEvent
from pate_torch.core import checks
from pate_torch.core.files import atomic_replacement
from pate_torch.methods.base import get_unit_column
from pate_torch.privacy.accounts import Account
from pate_torch.privacy.budget import Budget
from pate_torch.privacy.ledger import Ledger, open_ledger
from pate_torch.privacy.partition import select
from pate_torch.sites import rounds
from pate_torch.sites.charter import Charter
from pate_torch.sites.keys import DEFAULT_NUM_SLOTS, SiteState
from pate_torch.sites.pairs import confirm_charter, load_charter
from pate_torch.sites.points import Encode, EncoderFiles, open_encoder
from pate_torch.sites.rounds import Round
from pate_torch.sites.tables import SiteTable, TableKind, read_public_file
from pate_torch.sites.votes import VoteCounts
from pate_torch.teachers.store import TeacherStore

PURPOSE_SHARE = "share of noise"
_PLANNED_EVENTS = (GaussianEvent(mu=0.1),)  # Gaussian noise of any size, for which the account chooses its filter


@dataclass(frozen=True)
class Site:
    """A site with a folder of keys, and a home for its ledger and teachers; its records are arguments of methods."""

    state: SiteState
    home: Path

    @classmethod
    def create(cls, folder: Path, home: Path, *, name: str, account: str, num_slots: int = DEFAULT_NUM_SLOTS) -> Site:
        """Make the keys of a new site. The account named ``account`` pays for its answers."""
        checks.nonempty_string("account", account)
        site = cls(SiteState.create(folder, name, num_slots), home)
        with atomic_replacement(site._settings_path) as temporary:
            temporary.write_text(json.dumps({"account": account}))
        return site

    @property
    def account(self) -> str:
        """Name of the account that pays for the answers."""
        try:
            return checks.nonempty_string("account", json.loads(self._settings_path.read_text())["account"])
        except (OSError, ValueError, KeyError, TypeError):
            fix = "Make new keys with `pate site init` in another folder."
            raise checks.error("folder", str(self.state.folder), "does not name the account of a site", fix) from None

    @property
    def _settings_path(self) -> Path:
        return self.state.folder / "account.json"

    def confirm(self, charter_raw: bytes, heard: str, cap_epsilon: float) -> bytes:
        """Confirm a charter, open the account on its terms, and return the confirmation file.

        ``heard`` are the 24 words that another site read aloud, and ``cap_epsilon`` caps the account's total.
        """
        account = self.account
        confirmation = confirm_charter(self.state, charter_raw, heard)
        with open_ledger(self.home) as ledger:
            self._open_account(ledger, account, self._load_charter()[0], cap_epsilon, _PLANNED_EVENTS)
        return confirmation

    def answer(
        self, round_raw: bytes, public_raw: bytes, data: Any, *, encoder: EncoderFiles = None, source: str = ""
    ) -> bytes:
        """Answer a round: charge its cost, and add a share of noise and the masks to the table of the records.

        Args:
            round_raw: Bytes of the round file.
            public_raw: Bytes of the public file that the round file names.
            data: PRIVATE. {column: cells}, or a function that reads it, whose arguments ``label``, ``unit`` and
                ``text`` name the columns of class, unit and texts. Nothing is read for a round that was answered.
            encoder: Encoder that the public file describes, or the paths of its files. None if it describes none.
            source: Name of the round file, for messages.

        Returns:
            The answer file. A round that was answered gives the same bytes, and nothing is charged.

        Raises:
            ValueError: The site must not answer this round. Nothing was charged.
            BudgetExceeded: The cap of the account does not admit the cost. Nothing was drawn or charged.
        """
        current_round, finished_answer = rounds.open_round(self.state, round_raw, source)
        if finished_answer is not None:
            return finished_answer
        charter, place = self._load_charter()
        kind = check_public_file(charter, current_round, public_raw)
        events = kind.compute_events(charter, current_round.share)
        with open_ledger(self.home) as ledger:  # before teachers are trained, which may take hours
            self._open_account(ledger, self.account, charter, None, events)
            Budget.from_account(ledger, self.account).check_events(events)
        encode = open_encoder(kind.encoder, encoder, self.account, self.home)
        if callable(data):
            data = data(label=kind.label, unit=get_unit_column(charter.terms.unit), text=kind.text_column)
        table = self._count(charter, place, kind, data, encode)
        table.check_sensitivity(kind.compute_squared_length(charter.terms.adjacency))
        fingerprint = TeacherStore(self.home).compute_content_fingerprint(table.records)
        with open_ledger(self.home) as ledger, ExitStack() as stack:
            account = self._open_account(ledger, self.account, charter, None, events)
            slot = f"charter {charter.digest.hex()} slot {current_round.slot} "
            name = f"{slot}round {current_round.digest.hex()}"
            options = {"run": name, "once": slot, "fingerprint": fingerprint, "on_new_head": table.on_new_head}
            budget = Budget.from_account(ledger, account.name, **options)
            budget.check_adjacency(table.sensitivity)
            self._check_copies(account, charter, current_round.slot, source)
            budget.check_events(events)

            def draw(share: Fraction, count: int) -> np.ndarray:
                mechanism = f"share of {current_round.kind}"
                spending = stack.enter_context(budget.spend(events, mechanism=mechanism, purpose=PURPOSE_SHARE))
                noise = spending.noise.draw_gaussian((count,), share, torch.device("cpu")).numpy()
                spending.record_cost(events)
                stack.callback(lambda: spending.record_files({"answer_sha256": answers[0]} if answers else {}))
                return noise

            answers: list[str] = []
            raw = rounds.answer(self.state, round_raw, table.numbers, draw=draw, source=source)
            answers.append(hashlib.sha256(raw).hexdigest())
            return raw

    def _load_charter(self) -> tuple[Charter, int]:
        """Load the charter, and the place of this site in it."""
        with self.state.open() as secrets:
            return load_charter(self.state, secrets), secrets.place

    def _check_copies(self, account: Account, charter: Charter, slot: int, source: str) -> None:
        """Raise ValueError if the ledger or the folder of keys was restored from an old copy, which lacks an answer."""
        start = f"charter {charter.digest.hex()} slot"
        paid_slots = {c.run.split()[3] for c in account.charges.values() if c.run.startswith(start)}
        with self.state.open() as secrets:
            answered_slots = set(secrets.answers)
        if not answered_slots <= paid_slots:
            problem = "lacks a charge of a round that this site answered, so the ledger is an old copy"
            fix = "Restore the newest ledger, or make new keys with `pate site init` for a new charter."
            raise checks.error("account", account.name, problem, fix)
        if str(slot) in paid_slots:
            problem = f"uses slot {slot}, which this account paid for: the folder of keys is an old copy"
            fix = "Make new keys with `pate site init`, and ask for a new charter."
            raise checks.error("round", source, problem, fix)

    def _count(self, charter: Charter, place: int, kind: TableKind, data: Any, encode: Encode | None) -> SiteTable:
        """PRIVATE. Count the records of this site."""
        terms = charter.terms
        records = kind.read_records(data, terms.unit, encode)
        if terms.adjacency == "replace_one":
            declared = terms.records[place]
            if len(records) != declared:
                problem = f"has {len(records)} records, and the charter states {declared}, which is public"
                raise checks.error("data", "", problem, "Give the table whose number of records the charter states.")
        elif records.usable_N is not None:
            records = select(records, np.flatnonzero(records.usable_N.numpy()))
        if isinstance(kind, VoteCounts):
            kind = kind.at_site(terms.teachers[place], self.home)
        return kind.count(records, terms.adjacency)

    def _open_account(
        self,
        ledger: Ledger,
        name: str,
        charter: Charter,
        cap_epsilon: float | None,
        planned_events: tuple[PrivacyEvent, ...],
    ) -> Account:
        """Open the account on the terms of the charter.

        An account that was never charged gets the filter that is best for ``planned_events``. If ``cap_epsilon`` is
        None, the account must exist, and keeps its cap.
        """
        existing = next((account for account in ledger.list_accounts() if account.name == name), None)
        if cap_epsilon is None:
            if existing is None:
                fix = "Set PATE_HOME to the folder that was used for `pate site confirm`."
                raise checks.error("account", name, "is not in the ledger of this site", fix)
            cap_epsilon = existing.budget_epsilon
        terms = charter.terms
        return ledger.open_account(
            name,
            budget_epsilon=cap_epsilon,
            delta=float(Fraction(terms.delta)),
            adjacency=terms.adjacency,
            unit=terms.unit,
            planned_events=planned_events,
            noise="discrete",
        )


def check_public_file(charter: Charter, current_round: Round, raw: bytes) -> TableKind:
    """Read the public file of a round, and check that the round names it and asks for its table."""
    if hashlib.sha256(raw).hexdigest() not in current_round.files.values():
        problem = "is not the public file that the round file names"
        raise checks.error("public", "", problem, "Ask the joiner for the public file of this round.")
    kind = read_public_file(charter, raw).with_round(current_round)
    if (current_round.kind, current_round.shape) != (kind.name, kind.shape):
        raise checks.error("public", kind.name, "describes another table than the round file asks for")
    if current_round.bound < kind.compute_bound(charter.terms):
        raise checks.error("round", current_round.bound, "has too small a bound on the sums", "Ask the joiner anew.")
    return kind
