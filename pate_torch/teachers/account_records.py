"""PRIVATE. Which records each account was charged for, by keyed hashes: no data set gets a second budget unnoticed.

The hashes depend on the records alone and not on their order, so that shuffled, grown or partly edited data are known
again. They stay in the private store, and may lead to a refusal that its owner sees, never to anything published.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from pate_torch.core.files import atomic_replacement, create_private_folder, get_tensor_bytes
from pate_torch.privacy.records import PrivateRecords
from pate_torch.teachers.store import ACCOUNTS, TeacherStore

MAX_KNOWN_SHARE = 0.1
"""The largest share of known units that passes, beyond the share that few distinct records explain by chance."""


@dataclass(frozen=True, eq=False, repr=False)
class RecordHashes:
    """PRIVATE. The records of one data set or account.

    Attributes:
        hash_N: Keyed hash of the content of each record, uint64 [N].
        unit_N: Number of the privacy unit of each record, int64 [N].
    """

    hash_N: np.ndarray
    unit_N: np.ndarray

    @classmethod
    def from_data(cls, private: PrivateRecords, store: TeacherStore) -> RecordHashes:
        """PRIVATE. Hash the content of every record, as it was before an encoder, under the key of the store."""
        x = private.x if private.origin is None else private.origin
        keyed_state = hashlib.blake2b(key=store.get_secret_key(), digest_size=8)
        keyed_state.update(f"{x.dtype}{tuple(x.shape[1:])}".encode())
        digests = bytearray()
        size, points, labels = x.shape[1:].numel() * x.element_size(), get_tensor_bytes(x), private.y.numpy().tobytes()
        for row in range(len(x)):
            state = keyed_state.copy()
            state.update(points[row * size : (row + 1) * size])
            state.update(labels[row * 8 : (row + 1) * 8])
            digests += state.digest()
        _, unit_N = np.unique(private.unit_id, return_inverse=True)
        return cls(np.frombuffer(bytes(digests), dtype=np.uint64), unit_N.astype(np.int64))

    def compute_known_share(self, charged_records: RecordHashes) -> float:
        """The share of these units with a record among ``charged_records``, beyond what few distinct records explain.

        Records of a few values coincide between people. Among ``charged_records`` a unit that shares a record with
        another unit coincides by chance; the share of such units estimates the probability that a new unit does
        (Good-Turing), to which three standard deviations are added.
        """
        share = self._compute_unit_share(np.isin(self.hash_N, charged_records.hash_N))
        pairs = np.unique(np.stack([charged_records.hash_N, charged_records.unit_N.astype(np.uint64)]), axis=1)
        hashes, counts = np.unique(pairs[0], return_counts=True)
        chance = charged_records._compute_unit_share(np.isin(charged_records.hash_N, hashes[counts > 1]))
        spread = 3 * np.sqrt(chance * (1 - chance) / max(1, len(np.unique(self.unit_N))))
        return share - min(1.0, chance + spread)

    def _compute_unit_share(self, mask_N: np.ndarray) -> float:
        return len(np.unique(self.unit_N[mask_N])) / max(1, len(np.unique(self.unit_N)))

    def merge(self, new_records: RecordHashes) -> RecordHashes:
        """These records, and those of ``new_records`` that are not among them."""
        new_N = ~np.isin(new_records.hash_N, self.hash_N)
        first_unit = 1 + self.unit_N.max(initial=-1)
        return RecordHashes(
            np.concatenate([self.hash_N, new_records.hash_N[new_N]]),
            np.concatenate([self.unit_N, first_unit + new_records.unit_N[new_N]]),
        )


@dataclass(frozen=True, eq=False, repr=False)
class AccountRecords:
    """PRIVATE. The records of an account that is about to be charged, beside those of all accounts that were.

    Attributes:
        store: The private store: <store>/teachers/accounts/<account>.safetensors.
        account: Name of the account.
        records: Its records; None if votes alone are here.
    """

    store: TeacherStore
    account: str
    records: RecordHashes | None

    def record_ledger_head(self, ledger_head: str) -> None:
        """PRIVATE. Note that the account was charged for these records, and the newest entry of the ledger."""
        self.store.record_ledger_head(self.account, ledger_head)
        if self.records is None:
            return
        charged_records = self._load_charged_records(self.account)
        all_records = self.records if charged_records is None else charged_records.merge(self.records)
        if charged_records is None or len(all_records.hash_N) > len(charged_records.hash_N):
            with self.store.lock(), atomic_replacement(self._get_path(self.account)) as temporary:
                save_file({"hash_N": all_records.hash_N, "unit_N": all_records.unit_N}, temporary)

    def find_duplicate(self, accounts: Iterable[str]) -> str | None:
        """PRIVATE. The first of other accounts that shares a tenth of its units, or of these, with this one."""
        for account in accounts:
            charged_records = self._load_charged_records(account)
            if charged_records is not None and self.records is not None:
                shares = (
                    self.records.compute_known_share(charged_records),
                    charged_records.compute_known_share(self.records),
                )
                if max(shares) >= MAX_KNOWN_SHARE:
                    return account
        return None

    def _get_path(self, account: str) -> Path:
        return create_private_folder(self.store.folder / ACCOUNTS) / f"{account}.safetensors"

    def _load_charged_records(self, account: str) -> RecordHashes | None:
        file = self._get_path(account)
        return RecordHashes(**load_file(file)) if file.exists() else None
