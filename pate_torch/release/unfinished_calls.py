"""PRIVATE. Calls that were interrupted after their charge, so that the same call finishes them without a new one.

A call notes itself in the private store before anything is charged, and removes the note when it ends. The name of the
note is a keyed hash of the call's public configuration and of its private records: it may find this account's own
unfinished run, and decides nothing that is published. What is found must be as the ledger has it: answers that were
drawn and not committed with their hash are never used, and their reservation stays spent.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pate_torch.core.files import compute_file_digest, create_private_folder, write_atomically
from pate_torch.core.run_folders import LOCK_FILE_NAME, create_protected_folder, try_hold_lock
from pate_torch.privacy.ledger import Ledger
from pate_torch.students.base import Student
from pate_torch.students.store import save
from pate_torch.teachers.store import TeacherStore

_FOLDER_NAME = "unfinished"
MODEL_FILE_NAME, MODEL_DIGEST_KEY = "student.safetensors", "student_sha256"


def save_model(student: Student, release: Path) -> dict[str, str]:
    """Write a model whose noise was paid for into its release folder; its hash, by the name the ledger is to hold."""
    create_protected_folder(release)
    save(student, release / MODEL_FILE_NAME)
    return {MODEL_DIGEST_KEY: compute_file_digest(release / MODEL_FILE_NAME)}


@dataclass(frozen=True, eq=False, repr=False)
class UnfinishedCall:
    """PRIVATE. One call, by which its interrupted predecessor is found.

    Attributes:
        store: The private store.
        account: The account that the call charges.
        facts: Everything public that decides what the call releases.
        fingerprint: Gives the keyed hash of the records, or of the votes in their place.
    """

    store: TeacherStore
    account: str
    facts: Mapping[str, Any]
    fingerprint: Callable[[], str]

    @staticmethod
    def has_any(store: TeacherStore, account: str) -> bool:
        """PRIVATE. Whether any call that charges this account has not ended."""
        return any((store.folder / _FOLDER_NAME).glob(f"{account}.*.json"))

    def begin(self, folder: Path) -> None:
        """PRIVATE. Note that the call writes into this run's folder from now on."""
        write_atomically(self._note_path, json.dumps({"folder": str(folder.absolute())}) + "\n")

    def end(self) -> None:
        """PRIVATE. Forget the call: whoever makes it again makes a new release."""
        self._note_path.unlink(missing_ok=True)

    def find(self, ledger_path: Path) -> tuple[Path, dict[str, dict[str, Any]]] | None:
        """PRIVATE. The folder of the interrupted run, and what its release committed, by reservation.

        None: no such call was interrupted, a process still makes it, or nothing that it drew was committed.
        """
        if not (self.has_any(self.store, self.account) and self._note_path.exists() and ledger_path.exists()):
            return None
        folder = Path(json.loads(self._note_path.read_text())["folder"])
        with Ledger(ledger_path, create=False) as ledger:
            entries = ledger.read_entries(self.account)
        reservations = {
            e.facts["reservation"] for e in entries if e.kind == "reserve" and e.facts["run"] == folder.name
        }
        committed_facts = {
            entry.facts["reservation"]: entry.facts
            for entry in entries
            if entry.kind == "commit" and entry.facts["reservation"] in reservations
        }
        if not committed_facts or not (folder / "release").is_dir():
            return None
        with try_hold_lock(folder / LOCK_FILE_NAME, "paths.run") as is_unlocked:
            if not is_unlocked:
                return None
            (folder / "release" / "summary.json").unlink(missing_ok=True)  # both are written again
            shutil.rmtree(folder / "release" / "tensorboard", ignore_errors=True)
        return folder, committed_facts

    def find_model(self, ledger_path: Path) -> tuple[Path, str] | None:
        """PRIVATE. The folder of the interrupted run, and the reservation of the model that lies there as committed."""
        interrupted_run = self.find(ledger_path)
        file = None if interrupted_run is None else interrupted_run[0] / "release" / MODEL_FILE_NAME
        if interrupted_run is None or file is None or not file.is_file():
            return None
        reservation_ids = [
            identity
            for identity, facts in interrupted_run[1].items()
            if facts.get(MODEL_DIGEST_KEY) == compute_file_digest(file)
        ]
        return (interrupted_run[0], reservation_ids[0]) if reservation_ids else None

    @property
    def _note_path(self) -> Path:
        folder = create_private_folder(self.store.folder / _FOLDER_NAME)
        text = json.dumps(dict(self.facts), sort_keys=True, default=repr)
        return (
            folder
            / f"{self.account}.{self.store.compute_keyed_digest(text.encode(), self.fingerprint().encode())}.json"
        )
