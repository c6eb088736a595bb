"""PRIVATE. The folder of trained teachers, and what accounts were charged for.

    <root>/teachers/<id>/       ensemble.safetensors  manifest.json  votes/<hash of the public pool>.safetensors
    <root>/teachers/accounts/   <account>.json (newest ledger entry)  <account>.safetensors (hashes of its records)
    <root>/teachers/aliases/    <id that a release shows>.json

Ids are random. Hashes of private content are keyed with a secret that never leaves the store, and are recorded here
only: a hash that anybody could compute would tell neighboring data sets apart.
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
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file as load_arrays
from safetensors.numpy import save_file as save_arrays
from safetensors.torch import save_file
from torch import Tensor

from pate_torch.core import checks, files
from pate_torch.core.files import atomic_replacement, create_private_folder, get_tensor_bytes, read_tensors
from pate_torch.core.progress import do_nothing
from pate_torch.core.run_folders import hold_lock, remove_partial_files, try_hold_lock
from pate_torch.privacy.records import DataSpec, PrivateRecords
from pate_torch.privacy.sensitive import Votes
from pate_torch.teachers.ensemble import TeacherEnsemble
from pate_torch.teachers.recipe import Trunk

SCHEMA_VERSION = 1
ID_PATTERN = re.compile(r"[0-9a-f]{16}")
TRAINED_KEY, TRUNK_PREFIX, PARTIAL_PREFIX = "__trained__", "__trunk__.", ".partial-"

LOCATION_KEY = "PATE_HOME"
"""The setting that names the place of the store, for messages."""

CHECKPOINT_MAX_AGE_SECONDS = 7 * 24 * 3600.0
"""Age from which the checkpoints of an interrupted training are removed."""

MAX_KNOWN_SHARE = 0.1
"""Share of units that two accounts may have in common, beyond the share that few distinct records explain by chance."""


@dataclass(frozen=True, kw_only=True)
class Identity:
    """PRIVATE. What an ensemble was trained on and how: equal identities give equal teachers.

    Attributes:
        dataset: Name of the data set.
        fingerprint: ``TeacherStore.compute_fingerprint`` of the private records.
        partition: Plain data of the partition.
        configuration: Plain data of the recipe (``TeacherRecipe.to_configuration()``).
        seed: Seed of the teachers' streams.
        num_teachers: K.
    """

    dataset: str
    fingerprint: str
    partition: Mapping[str, Any]
    configuration: Mapping[str, Any]
    seed: int
    num_teachers: int

    def __post_init__(self) -> None:
        for name, value in (("partition", self.partition), ("configuration", self.configuration)):
            object.__setattr__(self, name, json.loads(json.dumps(dict(value), sort_keys=True)))  # a tuple is a list

    def __repr__(self) -> str:
        return f"Identity(dataset={self.dataset!r}, num_teachers={self.num_teachers}, content withheld)"


@dataclass(frozen=True, kw_only=True)
class StoredEnsemble:
    """PRIVATE. An ensemble, and the newest ledger entry when it was last used; None if no ledger was used."""

    id: str
    ensemble: TeacherEnsemble
    identity: Identity
    ledger_head: str | None


@dataclass(frozen=True, eq=False, repr=False)
class RecordHashes:
    """PRIVATE. Keyed hashes of the records of one data set or account.

    The hashes depend on the records alone and not on their order, so that shuffled, extended or partly edited data are
    recognized. They may lead to a refusal that the owner of the store sees, never to anything published.

    Attributes:
        hash_N: Keyed hash of the content of each record, uint64 [N].
        unit_N: Number of the privacy unit of each record, int64 [N].
    """

    hash_N: np.ndarray
    unit_N: np.ndarray

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
        new_unit_N = 1 + self.unit_N.max(initial=-1) + new_records.unit_N[new_N]
        return RecordHashes(
            np.concatenate([self.hash_N, new_records.hash_N[new_N]]), np.concatenate([self.unit_N, new_unit_N])
        )


@dataclass(frozen=True)
class TeacherStore:
    """PRIVATE. The teachers under one root folder (``PATE_HOME``)."""

    root: Path

    @property
    def folder(self) -> Path:
        """PRIVATE. The folder of all ensembles."""
        return Path(self.root) / "teachers"

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Lock the store while a file is written, so that ``sweep`` takes no unfinished file away."""
        with hold_lock(create_private_folder(self.folder) / ".lock", LOCATION_KEY, on_wait=do_nothing):
            yield

    # ---- keyed hashes of private content ----------------------------------------------------------------------------

    def get_secret_key(self) -> bytes:
        """PRIVATE. The key of all hashes of private content, which never leaves the store."""
        path = create_private_folder(self.folder) / ".fingerprint_key"
        if not path.exists():
            with self.lock():
                if not path.exists():  # no other process made one before this process had the lock
                    with atomic_replacement(path) as temporary:
                        temporary.write_bytes(secrets.token_bytes(32))
        key = path.read_bytes()
        if len(key) != 32:
            raise ValueError(f"{path}: damaged; delete it (stored teachers will then not be recognized again)")
        return key

    def compute_keyed_digest(self, *parts: bytes | memoryview) -> str:
        """PRIVATE. Keyed BLAKE2b of private content that is to be recognized; 64 hex digits."""
        state = hashlib.blake2b(key=self.get_secret_key(), digest_size=32)
        for part in parts:
            state.update(len(part).to_bytes(8, "big"))  # lengths keep ("ab", "c") and ("a", "bc") apart
            state.update(part)
        return state.hexdigest()

    def compute_fingerprint(self, private: PrivateRecords) -> str:
        """PRIVATE. Keyed BLAKE2b of the records, their labels and their units, in order; 64 hex digits."""
        facts = [f"{tensor.dtype}{tuple(tensor.shape)}" for tensor in (private.x, private.y)]
        text = "\x1f".join([*facts, private.unit, *private.unit_id.tolist()])
        return self.compute_keyed_digest(text.encode(), get_tensor_bytes(private.x), get_tensor_bytes(private.y))

    def compute_content_fingerprint(self, private: PrivateRecords) -> str:
        """PRIVATE. Keyed BLAKE2b of the records and labels alone, whatever their units are called; 64 hex digits."""
        x = private.x if private.origin is None else private.origin
        return self.compute_keyed_digest(*(get_tensor_bytes(tensor) for tensor in (x, private.y)))

    def compute_votes_fingerprint(self, votes: Votes) -> str:
        """PRIVATE. Keyed BLAKE2b of votes that the user brought, under any name of the file; 64 hex digits."""
        return self.compute_keyed_digest(get_tensor_bytes(votes.counts_QC.long()))

    def hash_records(self, private: PrivateRecords) -> RecordHashes:
        """PRIVATE. Hash the content of every record, as it was before an encoder, under the key of the store."""
        x = private.x if private.origin is None else private.origin
        keyed_state = hashlib.blake2b(key=self.get_secret_key(), digest_size=8)
        keyed_state.update(f"{x.dtype}{tuple(x.shape[1:])}".encode())
        digests = bytearray()
        size, points, labels = x.shape[1:].numel() * x.element_size(), get_tensor_bytes(x), get_tensor_bytes(private.y)
        for row in range(len(x)):
            state = keyed_state.copy()
            state.update(points[row * size : (row + 1) * size])
            state.update(labels[row * 8 : (row + 1) * 8])
            digests += state.digest()
        _, unit_N = np.unique(private.unit_id, return_inverse=True)
        return RecordHashes(np.frombuffer(bytes(digests), dtype=np.uint64), unit_N.astype(np.int64))

    # ---- training -----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def lock_training(self, identity: Identity, on_wait: Callable[[str], object]) -> Iterator[Path]:
        """PRIVATE. Lock and yield the folder of these teachers' checkpoints.

        Where another process trains these teachers, ``on_wait`` gets its name, and this call waits for its end; the
        teachers may then be in the store.
        """
        checkpoints = self._get_checkpoint_folder(asdict(identity))
        with hold_lock(checkpoints.with_suffix(".lock"), LOCATION_KEY, on_wait=on_wait):
            yield checkpoints

    @contextlib.contextmanager
    def try_lock_training(self, identity: Identity) -> Iterator[tuple[Path, bool]]:
        """PRIVATE. The folder of ``lock_training`` for ranks that assist, and whether this rank must remove it."""
        checkpoints = self._get_checkpoint_folder(asdict(identity))
        with try_hold_lock(checkpoints.with_suffix(".lock"), LOCATION_KEY) as is_locked:
            yield checkpoints, is_locked

    def _get_checkpoint_folder(self, facts: Mapping[str, Any]) -> Path:
        text = json.dumps({field.name: facts[field.name] for field in fields(Identity)}, sort_keys=True)
        return create_private_folder(self.folder) / f"{PARTIAL_PREFIX}{hashlib.sha256(text.encode()).hexdigest()[:16]}"

    def sweep(self) -> None:
        """Remove files that killed processes left unfinished, and checkpoints that are finished or too old."""
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
        """PRIVATE. Store an ensemble, whole or not at all, under a new random id, which is returned."""
        id_ = secrets.token_hex(8)
        temporary, trunk = self.folder / f".{id_}", ensemble.trunk
        tensors = {name: value.contiguous() for name, value in ensemble.params.items()}
        tensors[TRAINED_KEY] = ensemble.trained_K
        if trunk is not None:
            tensors |= {TRUNK_PREFIX + name: value for name, value in trunk.get_state().items()}
        with self.lock():
            try:
                create_private_folder(create_private_folder(temporary) / "votes")
                file = temporary / "ensemble.safetensors"
                save_file(tensors, file)
                file.chmod(0o600)
                manifest = asdict(identity) | {
                    "schema_version": SCHEMA_VERSION,
                    "id": id_,
                    "private": True,
                    "network": ensemble.network,
                    "spec": ensemble.spec.to_dict(),
                    "trunk": None if trunk is None else trunk.to_facts(),
                    "ledger_head": ledger_head,
                    "sha256": files.compute_file_digest(file),
                }
                _write_json(temporary / "manifest.json", manifest)
                temporary.rename(self.folder / id_)
            except BaseException:
                shutil.rmtree(temporary, ignore_errors=True)
                raise
        return id_

    def load(self, name: str) -> StoredEnsemble:
        """PRIVATE. An ensemble by its id.

        Raises:
            ValueError: The id is malformed or unknown, or files are damaged, foreign or altered.
        """
        manifest = self.load_manifest(name)
        file = self.folder / manifest["id"] / "ensemble.safetensors"
        if not file.is_file() or files.compute_file_digest(file) != manifest["sha256"]:
            raise ValueError(f"teachers {name}: {file} is missing or was changed after it was saved")
        tensors = read_tensors(file)
        try:
            identity = Identity(**{field.name: manifest[field.name] for field in fields(Identity)})
            ensemble = _rebuild_ensemble(manifest, tensors)
        except (TypeError, KeyError, AttributeError, ValueError, RuntimeError) as error:
            raise ValueError(f"teachers {name}: the manifest and the parameters do not fit: {error}") from error
        return StoredEnsemble(id=name, ensemble=ensemble, identity=identity, ledger_head=manifest["ledger_head"])

    def load_manifest(self, name: str) -> dict[str, Any]:
        """PRIVATE. The manifest of an ensemble, by its id or by an alias of it.

        Raises:
            ValueError: The id is malformed or unknown, or the manifest damaged.
        """
        if not isinstance(name, str) or not ID_PATTERN.fullmatch(name):
            raise checks.error("teachers", name, "must be an id of 16 hexadecimal digits")
        folder = self.folder / name
        with contextlib.suppress(OSError, ValueError):
            folder = self.folder / (self._read_alias(name).get("ensemble") or name)
        if not folder.is_dir():
            raise checks.error("teachers", name, f"no such ensemble under {self.folder}")
        path = folder / "manifest.json"
        try:
            manifest = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise ValueError(f"teachers {folder.name}: {path} is missing or damaged") from error
        if not isinstance(manifest, dict) or manifest.get("schema_version") != SCHEMA_VERSION:
            raise ValueError(f"teachers {folder.name}: {path} has another schema version than {SCHEMA_VERSION}")
        keys = {field.name for field in fields(Identity)} | {"id", "network", "spec", "trunk", "sha256", "ledger_head"}
        if not keys <= manifest.keys() or manifest["id"] != folder.name:
            raise ValueError(f"teachers {folder.name}: {path} is not this ensemble's manifest")
        return manifest

    def has_ensemble(self, name: str) -> bool:
        """Whether there is an ensemble of this id that can be read."""
        try:
            return bool(self.load_manifest(name))
        except ValueError:
            return False

    def find(self, identity: Identity) -> str | None:
        """The id of an ensemble with this very identity, or None. Folders that cannot be read are passed over."""
        facts = asdict(identity)
        return next((name for name, manifest in self._iterate_manifests() if manifest == manifest | facts), None)

    def _iterate_manifests(self) -> Iterator[tuple[str, dict[str, Any]]]:
        for name in sorted(path.name for path in self.folder.glob("*") if ID_PATTERN.fullmatch(path.name)):
            with contextlib.suppress(ValueError):
                yield name, self.load_manifest(name)

    def get_or_count_votes(
        self, name: str, pool_x: Tensor, compute: Callable[[], Votes], voting_mode: str = ""
    ) -> Votes:
        """PRIVATE. The ensemble's votes on these public points: from the cache, or computed and stored.

        ``voting_mode`` has letters and digits that name a way to vote other than on each point by itself.

        Raises:
            ValueError: The cached or the computed votes are not this ensemble's on these points.
        """
        manifest = self.load_manifest(name)
        stem = "-".join(filter(None, (files.compute_tensor_digest(pool_x), voting_mode)))
        path = create_private_folder(self.folder / manifest["id"] / "votes") / f"{stem}.safetensors"
        num_teachers, shape = manifest["num_teachers"], (len(pool_x), manifest["network"]["num_classes"])
        if path.exists():
            counts_QC = read_tensors(path).get("counts_QC")
            if counts_QC is None or counts_QC.shape != shape:
                raise ValueError(f"{path}: does not hold the votes on these points; delete it to count again")
            return Votes(counts_QC.long(), num_teachers)
        votes = compute()
        if votes.num_teachers != num_teachers or votes.counts_QC.shape != shape:
            raise ValueError(f"teachers {name}: the computed votes are not this ensemble's votes on these points")
        with self.lock(), atomic_replacement(path) as temporary:
            save_file({"counts_QC": votes.counts_QC.cpu().int()}, temporary)
        return votes

    # ---- aliases ----------------------------------------------------------------------------------------------------

    def create_alias(self, fingerprint: str, ensemble: str | None = None) -> str:
        """A fresh id that one release shows in place of anything private.

        ``fingerprint`` (PRIVATE) is that of the records, or of the votes in their place; ``ensemble`` is the id of the
        stored ensemble, None if no ensemble is stored.
        """
        alias = secrets.token_hex(8)
        with self.lock():
            path = create_private_folder(self.folder / "aliases") / f"{alias}.json"
            _write_json(path, {"ensemble": ensemble, "fingerprint": fingerprint})
        return alias

    def was_trained_on(self, name: str, fingerprint: str) -> bool:
        """Whether the records of this fingerprint are behind the release that shows this id."""
        with contextlib.suppress(OSError, ValueError, KeyError):
            return bool((self._read_alias(name) or self.load_manifest(name))["fingerprint"] == fingerprint)
        return False

    def _read_alias(self, name: str) -> dict[str, Any]:
        """The facts of ``create_alias``; empty if there is no such alias."""
        path = self.folder / "aliases" / f"{name}.json"
        return dict(json.loads(path.read_text())) if path.exists() else {}

    # ---- accounts ---------------------------------------------------------------------------------------------------

    def set_ledger_head(self, name: str, ledger_head: str) -> None:
        """Remember the newest ledger entry, so that teachers are not used apart from their ledger."""
        with self.lock():
            manifest = self.load_manifest(name)
            _write_json(self.folder / manifest["id"] / "manifest.json", manifest | {"ledger_head": ledger_head})

    def record_charge(self, account: str, records: RecordHashes | None, ledger_head: str) -> None:
        """PRIVATE. Note that an account was charged for these records (None if the votes came without records).

        A lost ledger is noticed by the absence of its newest entry, ``ledger_head``.
        """
        path = create_private_folder(self.folder / "accounts") / f"{account}.json"
        with self.lock():
            _write_json(path, {"dataset": account, "ledger_head": ledger_head})
            charged_records = self._load_charged_records(account)
            if records is not None and charged_records is not None:
                records = charged_records.merge(records)
            if records is not None and (charged_records is None or len(records.hash_N) > len(charged_records.hash_N)):
                with atomic_replacement(path.with_suffix(".safetensors")) as temporary:
                    save_arrays({"hash_N": records.hash_N, "unit_N": records.unit_N}, temporary)

    def find_ledger_heads(self, account: str) -> dict[Path, str]:
        """Every ledger entry that something in the store noted for this account, by the file that names it."""
        head_by_file = {}
        for file in [*sorted(self.folder.glob("*/manifest.json")), *sorted(self.folder.glob("accounts/*.json"))]:
            with contextlib.suppress(OSError, ValueError):
                facts = json.loads(file.read_text())
                if facts.get("dataset") == account and facts.get("ledger_head"):
                    head_by_file[file] = str(facts["ledger_head"])
        return head_by_file

    def find_account_of_same_units(self, records: RecordHashes | None, accounts: Iterable[str]) -> str | None:
        """PRIVATE. The first account that shares a tenth of its units, or of these units, with these records."""
        for account in accounts if records is not None else ():
            charged_records = self._load_charged_records(account)
            if charged_records is not None and records is not None:
                shares = records.compute_known_share(charged_records), charged_records.compute_known_share(records)
                if max(shares) >= MAX_KNOWN_SHARE:
                    return account
        return None

    def _load_charged_records(self, account: str) -> RecordHashes | None:
        file = self.folder / "accounts" / f"{account}.safetensors"
        return RecordHashes(**load_arrays(file)) if file.exists() else None


def _rebuild_ensemble(manifest: Mapping[str, Any], tensors: dict[str, Tensor]) -> TeacherEnsemble:
    """The ensemble of stored tensors. Raises an error of one of several kinds where they do not fit the manifest."""
    spec, facts, trained_K = DataSpec.from_dict(manifest["spec"]), manifest["trunk"], tensors.pop(TRAINED_KEY)
    trunk_names = [name for name in tensors if name.startswith(TRUNK_PREFIX)]
    state = {name.removeprefix(TRUNK_PREFIX): tensors.pop(name) for name in trunk_names}
    trunk = None if facts is None else Trunk.rebuild(facts, state, spec)
    if len(trained_K) != manifest["num_teachers"]:
        raise ValueError("the number of teachers does not fit")
    return TeacherEnsemble(manifest["network"], tensors, trained_K, spec, trunk)


def _write_json(path: Path, facts: Mapping[str, Any]) -> None:
    with atomic_replacement(path) as temporary:
        temporary.write_text(json.dumps(facts, indent=2, sort_keys=True) + "\n")
