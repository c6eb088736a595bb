"""The register of voters without a stored ensemble: which have answered before, and with which ledger."""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pate_torch.core import checks
from pate_torch.core.files import content, private_folder, replacing
from pate_torch.ledger import Ledger
from pate_torch.sensitive import Votes
from pate_torch.teachers.store import TeacherStore

SCHEMA_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Registered:
    """PRIVATE. Votes that were brought: their random id, and the keyed hash that recognizes them."""

    id: str
    fingerprint: str


@dataclass(frozen=True)
class VoterRegister:
    """PRIVATE. <root>/teachers/brought/: which votes have come before, and with which ledger. Never the votes.

    The same votes keep their id, so that a question is not paid for twice; they are refused beside another ledger than
    the one that charged them.
    """

    store: TeacherStore

    def register_votes(self, votes: Votes, dataset: str, ledger: Ledger) -> Registered:
        """PRIVATE. The id of these votes: the one they had, or a new one.

        Raises:
            ValueError: They were used with another ledger.
        """
        shape = json.dumps([dataset, votes.num_teachers, list(votes.counts_QC.shape)]).encode()
        fingerprint = self.store.keyed_digest(shape, content(votes.counts_QC.to("cpu", torch.int64)))
        return self.known(fingerprint, dataset, votes.num_teachers, ledger)

    def content_fingerprint(self, votes: Votes) -> str:
        """PRIVATE. A keyed hash of the votes alone, under whichever name they come."""
        return self.store.keyed_digest(content(votes.counts_QC.to("cpu", torch.int64)))

    def known(self, fingerprint: str, dataset: str, num_teachers: int, ledger: Ledger) -> Registered:
        """PRIVATE. The id of this fingerprint: of votes, or of records that answer for themselves (no teachers).

        Raises:
            ValueError: It was used with another ledger.
        """
        file = self._file(fingerprint)
        if not file.exists():
            registered = Registered(id=secrets.token_hex(8), fingerprint=fingerprint)
            self._write(registered, {"dataset": dataset, "num_teachers": num_teachers}, ledger.head())
            return registered
        record = self._record(fingerprint)
        if not ledger.head_contains(record["ledger_head"]):
            raise checks.fail(
                "votes",
                record["id"],
                "were used with another privacy ledger than the one here",
                f"Bring back the ledger that lay beside them ({ledger.path}): it remembers what was released.",
            )
        return Registered(id=record["id"], fingerprint=fingerprint)

    def behind(self, name: str, fingerprint: str) -> bool:
        """Whether the records of this fingerprint trained the ensemble of this id, or answered under it themselves."""
        with contextlib.suppress(ValueError):
            return bool(self.store.manifest(name)["fingerprint"] == fingerprint)
        with contextlib.suppress(ValueError):
            return bool(self._record(fingerprint)["id"] == name)
        return False

    def set_ledger_head(self, registered: Registered, ledger_head: str) -> None:
        """Remember the newest ledger entry, so that the votes are not used apart from their ledger."""
        self._write(registered, self._record(registered.fingerprint), ledger_head)

    def _file(self, fingerprint: str) -> Path:
        return private_folder(self.store.folder / "brought") / f"{fingerprint}.json"

    def _record(self, fingerprint: str) -> dict[str, Any]:
        file = self._file(fingerprint)
        try:
            record = json.loads(file.read_text())
            if record["schema_version"] != SCHEMA_VERSION or not (record["id"] and record["ledger_head"]):
                raise ValueError("of another version")
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{file}: damaged ({error}); restore it together with the ledger") from error
        return record

    def _write(self, registered: Registered, facts: Mapping[str, Any], ledger_head: str) -> None:
        record = {**facts, "schema_version": SCHEMA_VERSION, "id": registered.id, "ledger_head": ledger_head}
        with self.store.writing(), replacing(self._file(registered.fingerprint)) as temporary:
            temporary.write_text(json.dumps(record, indent=1) + "\n")
