"""Using stored teachers again: an ensemble is trained once, however many runs and processes ask for it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pate_torch.core import checks
from pate_torch.core.progress import do_nothing
from pate_torch.privacy.ledger import Ledger
from pate_torch.teachers import distributed
from pate_torch.teachers.ensemble import TeacherEnsemble
from pate_torch.teachers.store import Identity, StoredEnsemble, TeacherStore

_FIXES = {
    "dataset": "Set dataset.name to the name they were trained under.",
    "num_teachers": "Set num_teachers to theirs.",
    "partition": "Use the partition they were trained with.",
    "fingerprint": "They were trained on other records of the same name; train new ones by leaving out teachers.",
}


@dataclass(frozen=True)
class EnsembleFinder:
    """PRIVATE. Finds the ensemble of an identity in the store, or has it trained.

    Attributes:
        store: Store of teachers.
        ledger: Ledger that holds the account. None on ranks above 0.
        identity: What the teachers are trained on, and how.
        print_message: Function that shows a message.
    """

    store: TeacherStore
    ledger: Ledger | None
    identity: Identity
    print_message: Callable[[str], object] = do_nothing

    def load(self, teachers_id: str) -> StoredEnsemble:
        """PRIVATE. Load an ensemble.

        Raises:
            ValueError: The id is unknown, files are damaged, or the ensemble belongs to other data or another ledger.
        """
        stored_teachers = self.store.load(teachers_id)
        # Votes of other data, or under another partition, would be charged to the wrong account.
        for key, fix in _FIXES.items():
            stored_value = getattr(stored_teachers.identity, key)
            if stored_value != getattr(self.identity, key):
                value_text = "another one" if key == "fingerprint" else repr(stored_value)
                raise checks.error("teachers", teachers_id, f"were trained with {key} {value_text}", fix)
        head = stored_teachers.ledger_head
        if head is not None and (self.ledger is None or not self.ledger.contains_head(head)):
            problem = "were used with another privacy ledger than the one here"
            fix = "Bring back the ledger.sqlite that lay beside them: it remembers what was released."
            raise checks.error("teachers", teachers_id, problem, fix)
        return stored_teachers

    def find(self) -> StoredEnsemble | None:
        """PRIVATE. Load an ensemble that was trained in the same way on the same records; None if there is none."""
        teachers_id = self.store.find(self.identity)
        if teachers_id is None:
            return None
        stored_teachers = self.load(teachers_id)
        self.print_message(f"Reusing teachers {teachers_id}: same data, same configuration.")
        return stored_teachers

    def find_or_train(
        self, train: Callable[[Path], TeacherEnsemble], check_budget: Callable[[], None]
    ) -> tuple[StoredEnsemble, bool]:
        """PRIVATE. Find the ensemble, or train and store it; return it, and whether it is new.

        If another process trains the same teachers, this one waits for it, and takes over if it was killed.

        Args:
            train: Function that trains the teachers with checkpoints in a folder.
            check_budget: Function that raises if the account does not admit the charges of the run.
        """
        if (stored_teachers := self.find()) is not None:
            return stored_teachers, False
        assert self.ledger is not None
        check_budget()  # training may take hours
        with self.store.lock_training(
            self.identity,
            lambda holder: self.print_message(f"These teachers are being trained by {holder}; waiting for them."),
        ) as checkpoints:
            if (stored_teachers := self.find()) is not None:  # the other process has trained them
                return stored_teachers, False
            check_budget()  # the other process has failed, and the account may have been charged meanwhile
            distributed.broadcast_object(distributed.TRAIN)
            ensemble = train(checkpoints)
            head = self.ledger.get_head()
            teachers_id = self.store.save(ensemble, self.identity, head)
            shutil.rmtree(checkpoints, ignore_errors=True)
        return StoredEnsemble(id=teachers_id, ensemble=ensemble, identity=self.identity, ledger_head=head), True
