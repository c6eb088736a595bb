"""PRIVATE. Store of trained teachers, which are used again, and of the records for which accounts were charged.

    <root>/teachers/<id>/       group_<number>.safetensors  trunk.safetensors  manifest.json
    <root>/teachers/<id>/votes/ <hash of the public pool>.safetensors
    <root>/teachers/accounts/   <account>.json (newest ledger entry)  <account>.safetensors (hashes of its records)
    <root>/teachers/aliases/    <id that a release shows>.json
    <root>/teachers/held_out/   <account>.json (rule of the units that are held out for tests)

Ids are random. Hashes of private content are keyed with a secret, and neither the hashes nor the secret leave the
store, because whoever can compute such a hash can distinguish neighboring data sets.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from safetensors.numpy import load_file as load_arrays
from safetensors.numpy import save_file as save_arrays
from safetensors.torch import save_file
from torch import Tensor

from pate_torch.core import checks, files, ranks
from pate_torch.core.files import atomic_replacement, create_private_folder, get_tensor_bytes, read_tensors
from pate_torch.core.progress import do_nothing
from pate_torch.core.run_folders import hold_lock, make_hex_id, remove_partial_files, try_hold_lock
from pate_torch.privacy.accounts import Account, make_held_out_error
from pate_torch.privacy.ledger import Ledger
from pate_torch.privacy.partition import hold_out, select, select_one_per_unit
from pate_torch.privacy.records import DataSpec, PrivateRecords
from pate_torch.privacy.sensitive import Votes
from pate_torch.privacy.unit_ids import compute_keyed_hash, make_content_ids
from pate_torch.teachers.ensemble import TeacherEnsemble
from pate_torch.teachers.recipe import Trunk

T = TypeVar("T")

SCHEMA_VERSION = 1
ID_PATTERN = re.compile(r"[0-9a-f]{16}")
TRAINED_KEY, PARTIAL_PREFIX, TRUNK_FILE = "__trained__", ".partial-", "trunk.safetensors"

LOCATION_KEY = "PATE_HOME"
"""Setting of the store's folder, for messages."""

CHECKPOINT_MAX_AGE_SECONDS = 7 * 24 * 3600.0
"""Age at which the checkpoints of an interrupted training are removed."""

MAX_KNOWN_SHARE = 0.1
"""Share of common units at which two accounts hold the same data (``RecordHashes.compute_known_share``)."""

_FIXES = {
    "dataset": "Set dataset.name to this name.",
    "num_teachers": "Set num_teachers to this number.",
    "partition": "Use this partition.",
    "fingerprint": "Leave out the id of the teachers, to train new teachers on these records.",
}
"""Advice if stored teachers have another value of a field of ``Identity``."""


@dataclass(frozen=True, kw_only=True)
class Identity:
    """PRIVATE. Data and settings of the training of an ensemble. Equal identities give equal teachers up to rounding.

    ``dataset`` is the name of the data set, and ``fingerprint`` the PRIVATE keyed hash of the records. ``partition``
    and ``configuration`` are the settings of the partition and of the recipe, as plain data.
    """

    dataset: str
    fingerprint: str
    partition: Mapping[str, Any]
    configuration: Mapping[str, Any]
    seed: int
    num_teachers: int

    def __post_init__(self) -> None:
        for name, value in (("partition", self.partition), ("configuration", self.configuration)):
            object.__setattr__(self, name, json.loads(json.dumps(dict(value), sort_keys=True)))  # makes tuples lists

    def __repr__(self) -> str:
        return f"Identity(dataset={self.dataset!r}, num_teachers={self.num_teachers}, content withheld)"


@dataclass(frozen=True, kw_only=True)
class StoredEnsemble:
    """PRIVATE. Ensemble of the store, loaded by its id or by an alias.

    ``ledger_head`` is the hash of the newest ledger entry at the last use of the teachers. None if no ledger was used.
    """

    id: str
    ensemble: TeacherEnsemble
    identity: Identity
    ledger_head: str | None


@dataclass(frozen=True, eq=False, repr=False)
class RecordHashes:
    """PRIVATE. Keyed hashes of the records of one data set or account.

    The hash of a record depends on this record alone, so that shuffled, extended or partly edited data are recognized.
    The hash of an id recognizes a unit whose records have other columns or another encoding. Hashes may lead to an
    error that the owner of the store sees, and influence nothing that is published.

    Attributes:
        hash_N: Two keyed hashes of each record, of its point alone and of its point with its label, uint64 [N]. Another
            order of the classes changes the second, and the first is no use where points have few values.
        unit_N: Number of the privacy unit of each hash, int64 [N].
        is_labeled_N: Whether the hash is one of a point with its label, bool [N].
        id_U: Keyed hash of the id of each unit that is a group, uint64 [U]. Empty if each record is a unit.
    """

    hash_N: np.ndarray
    unit_N: np.ndarray
    is_labeled_N: np.ndarray
    id_U: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.uint64))

    @classmethod
    def from_rows(cls, hash_N: np.ndarray, unit_N: np.ndarray) -> RecordHashes:
        """Make hashes of rows that have no labels."""
        return cls(hash_N, unit_N, np.zeros(len(hash_N), dtype=bool))

    def __len__(self) -> int:
        return len(self.hash_N) + len(self.id_U)

    def compute_known_share(self, charged_records: RecordHashes) -> float:
        """Compute the share of these units that have a record among ``charged_records``, less the share due to chance.

        The larger share counts, of points alone and of points with labels.
        """
        pairs = ((self._select(is_labeled), charged_records._select(is_labeled)) for is_labeled in (False, True))
        return max(own._compute_share(charged) for own, charged in pairs)

    def _select(self, is_labeled: bool) -> RecordHashes:
        is_kind_N = self.is_labeled_N == is_labeled
        return RecordHashes(self.hash_N[is_kind_N], self.unit_N[is_kind_N], self.is_labeled_N[is_kind_N])

    def _compute_share(self, charged_records: RecordHashes) -> float:
        """Compute the share for hashes of one kind.

        Records with few values coincide between people. The share of units in ``charged_records`` that have a record in
        common with another unit estimates the probability that a new unit has one by chance (Good-Turing). Three
        standard deviations are added to this estimate.
        """
        share = self._compute_unit_share(np.isin(self.hash_N, charged_records.hash_N))
        pairs = np.unique(np.stack([charged_records.hash_N, charged_records.unit_N.astype(np.uint64)]), axis=1)
        hashes, counts = np.unique(pairs[0], return_counts=True)
        chance = charged_records._compute_unit_share(np.isin(charged_records.hash_N, hashes[counts > 1]))
        spread = 3 * np.sqrt(chance * (1 - chance) / max(1, len(np.unique(self.unit_N))))
        return share - min(1.0, chance + spread)

    def compute_known_id_share(self, charged_records: RecordHashes) -> float:
        """Compute the share of these units whose ids are among those of ``charged_records``."""
        return float(np.isin(self.id_U, charged_records.id_U).sum()) / max(1, len(self.id_U))

    def _compute_unit_share(self, mask_N: np.ndarray) -> float:
        return len(np.unique(self.unit_N[mask_N])) / max(1, len(np.unique(self.unit_N)))

    def merge(self, new_records: RecordHashes) -> RecordHashes:
        """Return these records and ids, and those of ``new_records`` with other hashes."""
        new_N = ~np.isin(new_records.hash_N, self.hash_N)
        new_unit_N = 1 + self.unit_N.max(initial=-1) + new_records.unit_N[new_N]
        return RecordHashes(
            np.concatenate([self.hash_N, new_records.hash_N[new_N]]),
            np.concatenate([self.unit_N, new_unit_N]),
            np.concatenate([self.is_labeled_N, new_records.is_labeled_N[new_N]]),
            np.union1d(self.id_U, new_records.id_U),
        )


@dataclass(frozen=True)
class TeacherStore:
    """PRIVATE. Store of teachers under one root folder (``PATE_HOME``)."""

    root: Path

    @property
    def folder(self) -> Path:
        """PRIVATE. Folder of all ensembles."""
        return Path(self.root) / "teachers"

    def lock(self) -> contextlib.AbstractContextManager[None]:
        """Lock the store while a file is written, so that ``sweep`` does not remove the unfinished file."""
        return hold_lock(create_private_folder(self.folder) / ".lock", LOCATION_KEY, on_wait=do_nothing)

    # ---- keyed hashes of private content ----------------------------------------------------------------------------

    def get_secret_key(self) -> bytes:
        """PRIVATE. Return the key of all hashes of private content."""
        path = create_private_folder(self.folder) / ".fingerprint_key"
        if not path.exists():
            with self.lock():
                if not path.exists():  # another process may have made the key
                    with atomic_replacement(path) as temporary:
                        temporary.write_bytes(secrets.token_bytes(32))
        key = path.read_bytes()
        if len(key) != 32:
            raise ValueError(f"{path}: the file is damaged. Delete it; stored teachers will then not be found again.")
        return key

    def compute_keyed_digest(self, *parts: bytes | memoryview) -> str:
        """PRIVATE. Compute the keyed BLAKE2b hash of private content, 64 hexadecimal digits."""
        state = hashlib.blake2b(key=self.get_secret_key(), digest_size=32)
        for part in parts:
            state.update(len(part).to_bytes(8, "big"))  # lengths keep ("ab", "c") and ("a", "bc") apart
            state.update(part)
        return state.hexdigest()

    def compute_fingerprint(self, private: PrivateRecords) -> str:
        """PRIVATE. Compute a keyed hash of the records, their labels and their units, in order."""
        facts = [f"{tensor.dtype}{tuple(tensor.shape)}" for tensor in (private.x, private.y)]
        text = "\x1f".join([*facts, private.unit, *private.unit_id.tolist()])
        return self.compute_keyed_digest(text.encode(), get_tensor_bytes(private.x), get_tensor_bytes(private.y))

    def compute_content_fingerprint(self, private: PrivateRecords) -> str:
        """PRIVATE. Compute a keyed hash of the points, in order, without the labels and the units."""
        return self.compute_keyed_digest(get_tensor_bytes(private.x if private.origin is None else private.origin))

    def compute_votes_fingerprint(self, votes: Votes) -> str:
        return self.compute_keyed_digest(get_tensor_bytes(votes.counts_QC.long()))

    def compute_votes_content_fingerprint(self, votes: Votes) -> str:
        """PRIVATE. Compute a keyed hash of the votes that does not depend on the order of the queries.

        It does not depend on the order of the classes either, unless two classes have equal counts in another order.
        """
        counts_QC = votes.counts_QC.long().cpu().numpy()
        counts_QC = counts_QC[:, np.lexsort(np.sort(counts_QC, axis=0))]  # classes in the order of their counts
        counts_QC = counts_QC[np.lexsort(counts_QC.T)]
        return self.compute_keyed_digest(np.ascontiguousarray(counts_QC).data.cast("B"))

    def hash_records(self, private: PrivateRecords) -> RecordHashes:
        """PRIVATE. Compute keyed hashes of every record, as it was before an encoder, and of the id of every group."""
        x = private.x if private.origin is None else private.origin
        key, digests = self.get_secret_key(), bytearray()
        size, points, labels = x.shape[1:].numel() * x.element_size(), get_tensor_bytes(x), private.y.tolist()
        for is_labeled in (False, True):
            keyed_state = hashlib.blake2b(key=key, digest_size=8, person=b"labeled" if is_labeled else b"")
            keyed_state.update(f"{x.dtype}{tuple(x.shape[1:])}".encode())
            for row in range(len(x)):
                state = keyed_state.copy()
                state.update(points[row * size : (row + 1) * size])
                state.update(str(labels[row]).encode() if is_labeled else b"")
                digests += state.digest()
        names, unit_N = np.unique(private.unit_id, return_inverse=True)
        ids = names.tolist() if private.unit.startswith("group:") else []  # a position names no unit
        id_digests = (
            hashlib.blake2b(name.encode(errors="surrogatepass"), key=key, digest_size=8, person=b"unit id").digest()
            for name in ids
        )
        return RecordHashes(
            np.frombuffer(bytes(digests), dtype=np.uint64),
            np.tile(unit_N.astype(np.int64), 2),
            np.repeat([False, True], len(x)),
            np.frombuffer(b"".join(id_digests), dtype=np.uint64),
        )

    # ---- training -----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def lock_training(self, identity: Identity, on_wait: Callable[[str], object]) -> Iterator[Path]:
        """PRIVATE. Lock and yield the folder of the checkpoints of these teachers.

        If another process trains the same teachers, this call waits for its end, and calls ``on_wait`` with its name.
        """
        checkpoints = self._get_checkpoint_folder(asdict(identity))
        with hold_lock(checkpoints.with_suffix(".lock"), LOCATION_KEY, on_wait=on_wait):
            yield checkpoints

    @contextlib.contextmanager
    def try_lock_training(self, identity: Identity) -> Iterator[tuple[Path, bool]]:
        """PRIVATE. Yield the folder of ``lock_training`` for ranks above 0, and whether this rank must remove it."""
        checkpoints = self._get_checkpoint_folder(asdict(identity))
        with try_hold_lock(checkpoints.with_suffix(".lock"), LOCATION_KEY) as is_locked:
            yield checkpoints, is_locked

    def _get_checkpoint_folder(self, facts: Mapping[str, Any]) -> Path:
        text = json.dumps({field.name: facts[field.name] for field in fields(Identity)}, sort_keys=True)
        return create_private_folder(self.folder) / f"{PARTIAL_PREFIX}{hashlib.sha256(text.encode()).hexdigest()[:16]}"

    def sweep(self) -> None:
        """Remove unfinished files of killed processes, and checkpoints of stored teachers or of old trainings."""
        if not self.folder.is_dir():
            return
        with self.lock():
            for folder in [path for path in self.folder.iterdir() if path.is_dir()]:
                if folder.name[0] == "." and ID_PATTERN.fullmatch(folder.name[1:]):  # an ensemble that was being saved
                    shutil.rmtree(folder)
                elif not folder.name.startswith(PARTIAL_PREFIX):
                    remove_partial_files(folder)
            for key in self.folder.glob("*.fingerprint_key.*"):
                key.unlink()
        finished_folders = {self._get_checkpoint_folder(manifest) for _, manifest in self._iterate_manifests()}
        for folder in {path.with_suffix("") for path in self.folder.glob(f"{PARTIAL_PREFIX}*")}:
            with try_hold_lock(folder.with_suffix(".lock"), LOCATION_KEY) as is_locked:
                if not is_locked or not folder.exists():
                    continue
                age_seconds = time.time() - max(path.stat().st_mtime for path in (folder, *folder.iterdir()))
                if folder in finished_folders or age_seconds > CHECKPOINT_MAX_AGE_SECONDS:
                    shutil.rmtree(folder)
                else:
                    remove_partial_files(folder)

    # ---- ensembles --------------------------------------------------------------------------------------------------

    def save(self, ensemble: TeacherEnsemble, identity: Identity, ledger_head: str | None = None) -> str:
        """PRIVATE. Store an ensemble, whole or not at all, and return its new random id."""
        id_ = make_hex_id()
        temporary, trunk = self.folder / f".{id_}", ensemble.trunk
        trained = ensemble.trained_K.split([len(next(iter(group.values()))) for group in ensemble.groups])
        groups = enumerate(zip(ensemble.groups, trained, strict=True))
        parts = {f"group_{number:06d}.safetensors": {**group, TRAINED_KEY: rows} for number, (group, rows) in groups}
        parts |= {} if trunk is None else {TRUNK_FILE: trunk.get_state()}
        with self.lock():
            try:
                create_private_folder(create_private_folder(temporary) / "votes")
                for name, tensors in parts.items():
                    save_file({key: value.contiguous() for key, value in tensors.items()}, temporary / name)
                    (temporary / name).chmod(0o600)
                manifest = asdict(identity) | {
                    "schema_version": SCHEMA_VERSION,
                    "id": id_,
                    "private": True,
                    "network": ensemble.network,
                    "spec": ensemble.spec.to_dict(),
                    "trunk": None if trunk is None else trunk.to_facts(),
                    "ledger_head": ledger_head,
                    "sha256": {name: files.compute_file_digest(temporary / name) for name in parts},
                }
                _write_json(temporary / "manifest.json", manifest)
                temporary.rename(self.folder / id_)
            except BaseException:
                shutil.rmtree(temporary, ignore_errors=True)
                raise
        return id_

    def load(self, name: str) -> StoredEnsemble:
        """PRIVATE. Load an ensemble by its id or by an alias. Raise ValueError for an unknown id or altered files."""
        manifest = self.load_manifest(name)
        parts = dict[str, dict[str, Tensor]]()
        for file_name, digest in manifest["sha256"].items():
            file = self.folder / manifest["id"] / file_name
            if not file.is_file() or files.compute_file_digest(file) != digest:
                raise ValueError(f"teachers {name}: {file} is missing or was changed after it was saved")
            parts[file_name] = read_tensors(file)
        try:
            identity = Identity(**{field.name: manifest[field.name] for field in fields(Identity)})
            spec, state = DataSpec.from_dict(manifest["spec"]), parts.pop(TRUNK_FILE, {})
            trunk = None if manifest["trunk"] is None else Trunk.rebuild(manifest["trunk"], state, spec)
            groups = [parts[name] for name in sorted(parts)]
            trained_K = torch.cat([group.pop(TRAINED_KEY) for group in groups])
            if len(trained_K) != manifest["num_teachers"]:
                raise ValueError("the number of teachers does not fit")
            ensemble = TeacherEnsemble(manifest["network"], groups, trained_K, spec, trunk)
        except (TypeError, KeyError, AttributeError, ValueError, RuntimeError) as error:
            raise ValueError(f"teachers {name}: manifest and parameters do not fit: {error}") from error
        return StoredEnsemble(id=name, ensemble=ensemble, identity=identity, ledger_head=manifest["ledger_head"])

    def load_manifest(self, name: str) -> dict[str, Any]:
        """PRIVATE. Load the manifest of an ensemble, by its id or by an alias. Raise ValueError as ``load`` does."""
        if not isinstance(name, str) or not ID_PATTERN.fullmatch(name):
            raise checks.error("teachers", name, "must be an id of 16 hexadecimal digits")
        folder = self.folder / name
        with contextlib.suppress(OSError, ValueError):
            folder = self.folder / (self._read_alias(name).get("ensemble") or name)
        if not folder.is_dir():
            raise checks.error("teachers", name, f"there is no such ensemble in {self.folder}")
        path = folder / "manifest.json"
        try:
            manifest = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise ValueError(f"teachers {folder.name}: {path} is missing or damaged") from error
        if not isinstance(manifest, dict) or manifest.get("schema_version") != SCHEMA_VERSION:
            raise ValueError(f"teachers {folder.name}: {path} has another schema version than {SCHEMA_VERSION}")
        keys = {field.name for field in fields(Identity)}
        keys |= {"id", "network", "spec", "trunk", "sha256", "ledger_head"}
        if not keys <= manifest.keys() or manifest["id"] != folder.name or not isinstance(manifest["sha256"], dict):
            raise ValueError(f"teachers {folder.name}: {path} is not this ensemble's manifest")
        return manifest

    def has_ensemble(self, name: str) -> bool:
        try:
            return bool(self.load_manifest(name))
        except ValueError:
            return False

    def find(self, identity: Identity) -> str | None:
        """Return the id of an ensemble with this identity, or None. Damaged ensembles are skipped."""
        facts = asdict(identity)
        return next((name for name, manifest in self._iterate_manifests() if manifest == manifest | facts), None)

    def _iterate_manifests(self) -> Iterator[tuple[str, dict[str, Any]]]:
        for name in sorted(path.name for path in self.folder.glob("*") if ID_PATTERN.fullmatch(path.name)):
            with contextlib.suppress(ValueError):
                yield name, self.load_manifest(name)

    def get_or_count_votes(self, name: str, pool_x: Tensor, compute: Callable[[], Votes], variant: str = "") -> Votes:
        """PRIVATE. Load the votes of an ensemble on these public points, or compute and store them.

        ``variant`` is a key of the settings that decide the votes, empty if teachers vote on each point independently.
        """
        manifest = self.load_manifest(name)
        stem = "-".join(filter(None, (files.compute_tensor_digest(pool_x), variant)))
        path = create_private_folder(self.folder / manifest["id"] / "votes") / f"{stem}.safetensors"
        num_teachers, shape = manifest["num_teachers"], (len(pool_x), manifest["network"]["num_classes"])
        if path.exists():
            counts_QC = read_tensors(path).get("counts_QC")
            if counts_QC is None or counts_QC.shape != shape:
                raise ValueError(f"{path}: the file does not hold the votes on these points; delete it to count again")
            return Votes(counts_QC.long(), num_teachers)
        votes = compute()
        if votes.num_teachers != num_teachers or votes.counts_QC.shape != shape:
            raise ValueError(f"teachers {name}: the computed votes are not this ensemble's votes on these points")
        with self.lock(), atomic_replacement(path) as temporary:
            save_file({"counts_QC": votes.counts_QC.cpu().int()}, temporary)
        return votes

    # ---- aliases ----------------------------------------------------------------------------------------------------

    def create_alias(self, fingerprint: str, ensemble: str | None = None) -> str:
        """Make a new random id for one release, and store the PRIVATE fingerprint and the ensemble behind the id.

        The fingerprint is that of the records, or of the votes if there are no records. The ensemble is None if it is
        not stored.
        """
        alias = make_hex_id()
        with self.lock():
            path = create_private_folder(self.folder / "aliases") / f"{alias}.json"
            _write_json(path, {"ensemble": ensemble, "fingerprint": fingerprint})
        return alias

    def was_trained_on(self, name: str, fingerprint: str) -> bool:
        """Return whether the records with this fingerprint are behind the release that shows this id."""
        with contextlib.suppress(OSError, ValueError, KeyError):
            return bool((self._read_alias(name) or self.load_manifest(name))["fingerprint"] == fingerprint)
        return False

    def _read_alias(self, name: str) -> dict[str, Any]:
        path = self.folder / "aliases" / f"{name}.json"
        return dict(json.loads(path.read_text())) if path.exists() else {}

    # ---- accounts ---------------------------------------------------------------------------------------------------

    def set_test_rule(self, name: str, share: float, account: Account | None) -> None:
        """Set the rule that holds out this share of the units from every release of an account.

        Every run calls this function before it splits its records. The first charge makes the id of the rule a term of
        the account. Before the first charge, a run without a test, whose share is 0, removes the rule.

        Raises:
            ValueError: Another share is fixed, the rule is lost, or the account was charged for training on all units.
        """
        checks.between("private_test.share", share, 0, 0.9)
        path, is_charged = self.folder / "held_out" / f"{name}.json", account is not None and account.is_charged
        if not (share or self.find_test_rule(name) or (account and account.held_out)):
            return  # a refused run leaves no folder
        with self.lock():
            rule = self.find_test_rule(name)
            if account is not None and is_charged and (account.held_out or share):
                if not account.held_out or rule is None:
                    raise make_held_out_error(account)
            elif not share and (is_charged or not self.find_ledger_heads(name)):
                path.unlink(missing_ok=True)
            elif share and (rule is None or (rule["share"] != share and not self.find_ledger_heads(name))):
                rule = {"id": secrets.token_hex(8), "key": secrets.randbits(63), "share": share}
                _write_json(create_private_folder(path.parent) / path.name, rule)
            if share and rule is not None and rule["share"] != share:
                problem = f"must be {rule['share']}, which is fixed for this account"
                raise checks.error("private_test.share", share, problem)

    def find_test_rule(self, name: str) -> dict[str, Any] | None:
        """PRIVATE. Read the rule of ``set_test_rule``: its id, share and key. None if no units are held out."""
        path = self.folder / "held_out" / f"{name}.json"
        return dict(json.loads(path.read_text())) if path.exists() else None

    def hold_out_units(
        self, account: str, private: PrivateRecords, adjacency: str
    ) -> tuple[PrivateRecords, PrivateRecords, str]:
        """PRIVATE. Return the records to train on, one record of each unit held out for tests, and the id of the rule.

        A keyed hash of the content chooses the record among those of its unit. The id is empty if there is no rule.
        """
        if (rule := self.find_test_rule(account)) is None:
            return private, select(private, np.arange(0)), ""
        training, test = hold_out(private, rule["share"], adjacency, rule["key"], "private test")
        contents = zip(test.x.numpy(), test.y.tolist(), strict=True)
        names = make_content_ids((x.tobytes(), str(y).encode()) for x, y in contents)
        hash_N = compute_keyed_hash(names.tolist(), rule["key"], "private test", "record")[:, 0]
        return training, select_one_per_unit(test, adjacency, hash_N), rule["id"]

    def set_ledger_head(self, name: str, ledger_head: str) -> None:
        """Store the hash of the newest ledger entry. The teachers cannot be used with a ledger that lacks it."""
        with self.lock():
            manifest = self.load_manifest(name)
            _write_json(self.folder / manifest["id"] / "manifest.json", manifest | {"ledger_head": ledger_head})

    def record_charge(self, account: str, records: RecordHashes | None, ledger_head: str) -> None:
        """PRIVATE. Store that an account was charged for these records, and the hash of the newest ledger entry.

        ``records`` is None if the votes came without records. A ledger that lacks the entry ``ledger_head`` is not the
        ledger that was charged.
        """
        path = create_private_folder(self.folder / "accounts") / f"{account}.json"
        with self.lock():
            _write_json(path, {"dataset": account, "ledger_head": ledger_head})
            charged_records = self._load_charged_records(account)
            if records is not None and charged_records is not None:
                records = charged_records.merge(records)
            if records is not None and (charged_records is None or len(records) > len(charged_records)):
                with atomic_replacement(path.with_suffix(".safetensors")) as temporary:
                    save_arrays(vars(records), temporary)

    def find_ledger_heads(self, account: str) -> dict[Path, str]:
        """Return the hashes of ledger entries that the store holds for this account, by file."""
        head_by_file = {}
        for file in [*sorted(self.folder.glob("*/manifest.json")), *sorted(self.folder.glob("accounts/*.json"))]:
            with contextlib.suppress(OSError, ValueError):
                facts = json.loads(file.read_text())
                if facts.get("dataset") == account and facts.get("ledger_head"):
                    head_by_file[file] = str(facts["ledger_head"])
        return head_by_file

    def find_account_of_same_units(self, records: RecordHashes | None, accounts: Iterable[str]) -> str | None:
        """PRIVATE. Return the first account that shares a tenth of its units, or of these units, with the records.

        Units are known by equal records, and groups by equal ids as well, whatever the columns of their records are.
        """
        for account in accounts if records is not None else ():
            charged_records = self._load_charged_records(account)
            if charged_records is not None and records is not None:
                pairs = (records, charged_records), (charged_records, records)
                if any(max(a.compute_known_share(b), a.compute_known_id_share(b)) >= MAX_KNOWN_SHARE for a, b in pairs):
                    return account
        return None

    def _load_charged_records(self, account: str) -> RecordHashes | None:
        file = self.folder / "accounts" / f"{account}.safetensors"
        return RecordHashes(**load_arrays(file)) if file.exists() else None


@dataclass(frozen=True)
class EnsembleFinder:
    """PRIVATE. Finder of the ensemble with one identity, in the store or by training.

    The ledger holds the account. It is None on ranks above 0 of torchrun.
    """

    store: TeacherStore
    ledger: Ledger | None
    identity: Identity
    print_message: Callable[[str], object] = do_nothing

    def load(self, teachers_id: str) -> StoredEnsemble:
        """PRIVATE. Load the ensemble with this id. Raise ValueError if it belongs to other data or another ledger."""
        stored_teachers = self.store.load(teachers_id)
        # Votes of other data, or under another partition, would be charged to the wrong account.
        for key, fix in _FIXES.items():
            stored_value = getattr(stored_teachers.identity, key)
            if stored_value != getattr(self.identity, key):
                value_text = "of other records" if key == "fingerprint" else repr(stored_value)
                raise checks.error("teachers", teachers_id, f"were trained with {key} {value_text}", fix)
        head = stored_teachers.ledger_head
        if head is not None and (self.ledger is None or not self.ledger.contains_head(head)):
            problem = "were used with another privacy ledger than this one"
            fix = "Restore the ledger.sqlite in which the releases of these teachers were charged, or set PATE_LEDGER."
            raise checks.error("teachers", teachers_id, problem, fix)
        return stored_teachers

    def find(self) -> StoredEnsemble | None:
        teachers_id = self.store.find(self.identity)
        if teachers_id is None:
            return None
        stored_teachers = self.load(teachers_id)
        self.print_message(f"Reusing teachers {teachers_id}, which were trained on the same data in the same way.")
        return stored_teachers

    def find_or_train(
        self, train: Callable[[Path], tuple[TeacherEnsemble, T]], check_budget: Callable[[], None]
    ) -> tuple[StoredEnsemble, T | None]:
        """PRIVATE. Load the ensemble, or train and store it. Return it, and the votes that came with the training.

        If another process trains the same teachers, this process waits, and trains them itself if the other one fails.
        ``train`` receives the folder of checkpoints. ``check_budget`` raises ValueError if the account does not admit
        the charges of the run.
        """
        if (stored_teachers := self.find()) is not None:
            return stored_teachers, None
        assert self.ledger is not None
        check_budget()  # training may take hours
        with self.store.lock_training(
            self.identity, lambda holder: self.print_message(f"Waiting for {holder}, which trains the same teachers.")
        ) as checkpoints:
            if (stored_teachers := self.find()) is not None:  # the other process has trained them
                return stored_teachers, None
            check_budget()  # another process may have charged the account during the wait
            ranks.broadcast_object(True)  # the other ranks train
            ensemble, votes = train(checkpoints)
            teachers_id = self.store.save(ensemble, self.identity, self.ledger.get_head())
            shutil.rmtree(checkpoints, ignore_errors=True)
        return self.load(teachers_id), votes


def _write_json(path: Path, facts: Mapping[str, Any]) -> None:
    with atomic_replacement(path) as temporary:
        temporary.write_text(json.dumps(facts, indent=2, sort_keys=True) + "\n")
