"""PRIVATE. Notes on unfinished calls. A repeated call can finish an interrupted run without a second charge.

A call writes a note into the private store before it charges the account, and removes the note when the call ends. The
name of the note is a keyed hash of the public configuration and the private records. The note only finds an unfinished
run of the same account; nothing that is published depends on it. Files are reused only if the ledger has their hashes:
answers that were drawn but not committed are never used, and their reservation stays spent.
"""

from __future__ import annotations

import json
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
    """Write a model into its release folder, and return its hash for the ledger."""
    create_protected_folder(release)
    save(student, release / MODEL_FILE_NAME)
    return {MODEL_DIGEST_KEY: compute_file_digest(release / MODEL_FILE_NAME)}


@dataclass(frozen=True, eq=False, repr=False)
class UnfinishedCall:
    """PRIVATE. A call that can find an earlier, interrupted call with the same settings and records.

    Attributes:
        store: Private store.
        account: Account that the call charges.
        facts: Public values that determine the release.
        fingerprint: Function that computes the keyed hash of the records, or of the votes.
    """

    store: TeacherStore
    account: str
    facts: Mapping[str, Any]
    fingerprint: Callable[[], str]

    @staticmethod
    def has_any(store: TeacherStore, account: str) -> bool:
        """PRIVATE. Return whether a call that charges this account is unfinished."""
        return any((store.folder / _FOLDER_NAME).glob(f"{account}.*.json"))

    def begin(self, folder: Path) -> None:
        """PRIVATE. Write the note that the call uses this run folder."""
        write_atomically(self._note_path, json.dumps({"folder": str(folder.absolute())}) + "\n")

    def end(self) -> None:
        """PRIVATE. Remove the note, so that a repeated call makes a new release."""
        self._note_path.unlink(missing_ok=True)

    def find(self, ledger_path: Path) -> tuple[Path, dict[str, dict[str, Any]]] | None:
        """PRIVATE. Find the folder of the interrupted run, and its committed facts by reservation.

        Returns:
            None if no such call was interrupted, if another process is still running it, or if nothing was committed.
        """
        if not (self.has_any(self.store, self.account) and self._note_path.exists() and ledger_path.exists()):
            return None
        folder = Path(json.loads(self._note_path.read_text())["folder"])
        with Ledger(ledger_path, create=False) as ledger:
            entries = [entry for entry in ledger.read_entries(self.account) if "reservation" in entry.facts]
        reserved_ids = {
            e.facts["reservation"] for e in entries if e.kind == "reserve" and e.facts["run"] == folder.name
        }
        commits = [entry.facts for entry in entries if entry.kind == "commit"]
        committed = {facts["reservation"]: facts for facts in commits if facts["reservation"] in reserved_ids}
        if not committed or not (folder / "release").is_dir():
            return None
        with try_hold_lock(folder / LOCK_FILE_NAME, "paths.run") as is_unlocked:
            if not is_unlocked:
                return None
            (folder / "release" / "summary.json").unlink(missing_ok=True)  # the finished run writes it
        return folder, committed

    def find_model(self, ledger_path: Path) -> tuple[Path, str] | None:
        """PRIVATE. Find the folder of the interrupted run and the reservation that committed its model; or None."""
        interrupted_run = self.find(ledger_path)
        if interrupted_run is None or not (file := interrupted_run[0] / "release" / MODEL_FILE_NAME).is_file():
            return None
        digest = compute_file_digest(file)
        ids = [id_ for id_, facts in interrupted_run[1].items() if facts.get(MODEL_DIGEST_KEY) == digest]
        return (interrupted_run[0], ids[0]) if ids else None

    @property
    def _note_path(self) -> Path:
        folder = create_private_folder(self.store.folder / _FOLDER_NAME)
        text = json.dumps(dict(self.facts), sort_keys=True, default=repr)
        digest = self.store.compute_keyed_digest(text.encode(), self.fingerprint().encode())
        return folder / f"{self.account}.{digest}.json"
