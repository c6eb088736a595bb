"""PRIVATE folders of trained teachers: found again by what they were trained on, refused when anything is off.

    <root>/teachers/<id>/   ensemble.safetensors  manifest.json  votes/<hash of the public pool>.safetensors

Ids are random. The fingerprint that recognizes the same private data is a hash keyed with a secret that never leaves
the store, and it is recorded here only: a hash of private content would tell neighboring data sets apart.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from pate_torch.core import checks
from pate_torch.core.files import (
    atomic_replacement,
    compute_file_digest,
    compute_tensor_digest,
    create_private_folder,
    get_tensor_bytes,
    read_tensors,
)
from pate_torch.core.progress import do_nothing
from pate_torch.core.run_folders import hold_lock, remove_partial_files, try_hold_lock
from pate_torch.privacy.records import DataSpec, PrivateRecords
from pate_torch.privacy.sensitive import Votes
from pate_torch.teachers.ensemble import TeacherEnsemble
from pate_torch.teachers.trunk import Trunk

SCHEMA_VERSION = 1
ID_PATTERN, UNFINISHED_PATTERN = re.compile(r"[0-9a-f]{16}"), re.compile(r"\.[0-9a-f]{16}")
HASH_PATTERN = re.compile(r"[0-9a-f]{64}")
TRAINED_KEY, TRUNK_PREFIX = "__trained__", "__trunk__."
ACCOUNTS, ALIASES, PARTIAL_PREFIX = "accounts", "aliases", ".partial-"
LOCATION_KEY = "PATE_HOME"
"""The setting that names the place of the store, for messages."""
CHECKPOINT_MAX_AGE_SECONDS = 7 * 24 * 3600.0
"""Seconds after which nobody is expected to come back for the checkpoints of an interrupted training."""


@dataclass(frozen=True, kw_only=True)
class Identity:
    """PRIVATE. What an ensemble was trained on and how: equal identities give equal teachers.

    Attributes:
        fingerprint: ``TeacherStore.compute_fingerprint`` of the private data.
        partition: Plain data.
        configuration: Plain data (``TeacherRecipe.to_configuration()``).
    """

    dataset: str
    fingerprint: str
    partition: Mapping[str, Any]
    configuration: Mapping[str, Any]
    seed: int
    num_teachers: int

    def __post_init__(self) -> None:
        if not HASH_PATTERN.fullmatch(self.fingerprint):
            raise ValueError("fingerprint: must come from TeacherStore.compute_fingerprint")
        for name, value in (("partition", self.partition), ("configuration", self.configuration)):
            object.__setattr__(self, name, json.loads(json.dumps(dict(value), sort_keys=True)))  # a tuple is a list

    def __repr__(self) -> str:
        return f"Identity(dataset={self.dataset!r}, num_teachers={self.num_teachers}, content withheld)"


@dataclass(frozen=True, kw_only=True)
class StoredEnsemble:
    """PRIVATE. An ensemble with what its manifest says.

    Attributes:
        ledger_head: The newest ledger entry when last used.
    """

    id: str
    ensemble: TeacherEnsemble
    identity: Identity
    ledger_head: str | None


def _to_tensors(ensemble: TeacherEnsemble) -> dict[str, Tensor]:
    """Everything of an ensemble that is a tensor."""
    state = {} if ensemble.trunk is None else ensemble.trunk.get_state()
    tensors = {name: value.contiguous() for name, value in ensemble.params.items()}
    return tensors | {TRAINED_KEY: ensemble.trained_K} | {TRUNK_PREFIX + name: value for name, value in state.items()}


def _rebuild_ensemble(manifest: Mapping[str, Any], tensors: dict[str, Tensor]) -> TeacherEnsemble:
    """The ensemble of ``_to_tensors``. Raises an error of one of several kinds where it does not fit the manifest."""
    spec, facts, trained_K = DataSpec.from_dict(manifest["spec"]), manifest["trunk"], tensors.pop(TRAINED_KEY)
    trunk_names = [name for name in tensors if name.startswith(TRUNK_PREFIX)]
    state = {name.removeprefix(TRUNK_PREFIX): tensors.pop(name) for name in trunk_names}
    trunk = None if facts is None else Trunk.rebuild(facts, state, spec)
    if len(trained_K) != manifest["num_teachers"]:
        raise ValueError("the number of teachers does not fit")
    return TeacherEnsemble(manifest["network"], tensors, trained_K, spec, trunk)


def _get_lock_path(checkpoints: Path) -> Path:
    """Beside the folder, which goes when its teachers are there."""
    return checkpoints.with_name(f"{checkpoints.name}.lock")


def _write_json(path: Path, facts: Mapping[str, Any]) -> None:
    with atomic_replacement(path) as temporary:
        temporary.write_text(json.dumps(facts, indent=2, sort_keys=True) + "\n")


@dataclass(frozen=True)
class TeacherStore:
    """PRIVATE. The teachers under one root folder (``PATE_HOME``)."""

    root: Path

    @property
    def folder(self) -> Path:
        """PRIVATE. The folder of all ensembles."""
        return Path(self.root) / "teachers"

    def compute_keyed_digest(self, *parts: bytes | memoryview) -> str:
        """PRIVATE. Keyed BLAKE2b of anything private that is to be known again; 64 hex digits."""
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
        """PRIVATE. Keyed BLAKE2b of votes that were brought, under whichever name they come; 64 hex digits."""
        return self.compute_keyed_digest(get_tensor_bytes(votes.counts_QC.to("cpu", torch.int64)))

    def save(self, ensemble: TeacherEnsemble, identity: Identity, ledger_head: str | None = None) -> str:
        """PRIVATE. Store an ensemble under a new random id, which is returned. Appears whole or not at all."""
        if len(ensemble) != identity.num_teachers:
            raise ValueError(f"store: {len(ensemble)} teachers are not the whole ensemble of {identity.num_teachers}")
        name = secrets.token_hex(8)
        temporary = self.folder / f".{name}"
        manifest = asdict(identity) | {
            "schema_version": SCHEMA_VERSION,
            "id": name,
            "private": True,
            "network": ensemble.network,
            "spec": ensemble.spec.to_dict(),
            "trunk": None if ensemble.trunk is None else ensemble.trunk.to_facts(),
            "ledger_head": ledger_head,
        }
        with self.lock():
            try:
                create_private_folder(create_private_folder(temporary) / "votes")
                tensors = temporary / "ensemble.safetensors"
                save_file(_to_tensors(ensemble), tensors)
                tensors.chmod(0o600)
                _write_json(temporary / "manifest.json", manifest | {"sha256": compute_file_digest(tensors)})
                temporary.rename(self.folder / name)
            except BaseException:
                shutil.rmtree(temporary, ignore_errors=True)
                raise
        return name

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Lock the store while a file is written: what is half written meanwhile belongs to this process."""
        with hold_lock(create_private_folder(self.folder) / ".lock", LOCATION_KEY, on_wait=do_nothing):
            yield

    # ---- training -----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def lock_training(self, identity: Identity, on_wait: Callable[[str], object]) -> Iterator[Path]:
        """PRIVATE. Lock and yield the folder of these teachers' checkpoints.

        Args:
            identity: Identity of the teachers.
            on_wait: Called with who trains them, before this waits for its end; by then they may be there.
        """
        checkpoints = self._get_checkpoint_folder(asdict(identity))
        with hold_lock(_get_lock_path(checkpoints), LOCATION_KEY, on_wait=on_wait):
            yield checkpoints

    @contextlib.contextmanager
    def try_lock_training(self, identity: Identity) -> Iterator[tuple[Path, bool]]:
        """PRIVATE. The folder of ``lock_training`` for ranks that assist, and whether this rank must remove it."""
        checkpoints = self._get_checkpoint_folder(asdict(identity))
        with try_hold_lock(_get_lock_path(checkpoints), LOCATION_KEY) as is_locked:
            yield checkpoints, is_locked

    def _get_checkpoint_folder(self, facts: Mapping[str, Any]) -> Path:
        """PRIVATE. Where the finished chunks of a training wait for the next attempt. facts: an identity's."""
        text = json.dumps({field.name: facts[field.name] for field in fields(Identity)}, sort_keys=True)
        return create_private_folder(self.folder) / f"{PARTIAL_PREFIX}{hashlib.sha256(text.encode()).hexdigest()[:16]}"

    def sweep(self) -> None:
        """Remove what killed processes left half written, and checkpoints that nobody needs or came back for."""
        if not self.folder.is_dir():
            return
        with self.lock():
            for folder in [path for path in self.folder.iterdir() if path.is_dir()]:
                if UNFINISHED_PATTERN.fullmatch(folder.name):
                    shutil.rmtree(folder)
                elif not folder.name.startswith(PARTIAL_PREFIX):
                    remove_partial_files(folder)
            for key in self.folder.glob("*.fingerprint_key.*"):
                key.unlink()
        finished_folders = {self._get_checkpoint_folder(manifest) for _, manifest in self._iterate_manifests()}
        for name in {path.name.removesuffix(".lock") for path in self.folder.glob(f"{PARTIAL_PREFIX}*")}:
            folder = self.folder / name
            with try_hold_lock(_get_lock_path(folder), LOCATION_KEY) as is_locked:
                if not is_locked or not folder.exists():
                    continue
                age_seconds = time.time() - max(path.stat().st_mtime for path in (folder, *folder.iterdir()))
                if folder in finished_folders or age_seconds > CHECKPOINT_MAX_AGE_SECONDS:
                    shutil.rmtree(folder)
                else:
                    remove_partial_files(folder)

    # ---- what is there ------------------------------------------------------------------------------------------

    def load(self, name: str) -> StoredEnsemble:
        """PRIVATE. An ensemble by its id.

        Raises:
            ValueError: The id is malformed or unknown, or files are damaged, foreign or altered.
        """
        folder = self._get_folder(name)
        manifest = self._read_manifest(folder)
        tensors = folder / "ensemble.safetensors"
        if not tensors.is_file() or compute_file_digest(tensors) != manifest["sha256"]:
            raise ValueError(f"teachers {name}: {tensors} is missing or was changed after it was saved")
        params = read_tensors(tensors)
        try:
            identity = Identity(**{field.name: manifest[field.name] for field in fields(Identity)})
            ensemble = _rebuild_ensemble(manifest, params)
        except (TypeError, KeyError, AttributeError, ValueError, RuntimeError) as error:
            raise ValueError(f"teachers {name}: the manifest and the parameters do not fit: {error}") from error
        return StoredEnsemble(id=name, ensemble=ensemble, identity=identity, ledger_head=manifest["ledger_head"])

    def load_manifest(self, name: str) -> dict[str, Any]:
        """PRIVATE. The manifest of an ensemble.

        Raises:
            ValueError: The id is malformed or unknown, or the manifest damaged.
        """
        return self._read_manifest(self._get_folder(name))

    def has_ensemble(self, name: str) -> bool:
        """Whether there is an ensemble of this id that can be read."""
        with contextlib.suppress(ValueError):
            return bool(self.load_manifest(name))
        return False

    def find(self, identity: Identity) -> str | None:
        """The id of an ensemble with this very identity, or None. Folders that cannot be read are passed over."""
        facts = asdict(identity)
        for name, manifest in self._iterate_manifests():
            if manifest == manifest | facts:
                return name
        return None

    def _iterate_manifests(self) -> Iterator[tuple[str, dict[str, Any]]]:
        if self.folder.is_dir():
            for folder in sorted(path for path in self.folder.iterdir() if ID_PATTERN.fullmatch(path.name)):
                with contextlib.suppress(ValueError):
                    yield folder.name, self._read_manifest(folder)

    def set_ledger_head(self, name: str, ledger_head: str) -> None:
        """Remember the newest ledger entry, so that teachers are not used apart from their ledger."""
        folder = self._get_folder(name)
        with self.lock():
            _write_json(folder / "manifest.json", self._read_manifest(folder) | {"ledger_head": ledger_head})

    def record_ledger_head(self, account: str, ledger_head: str) -> None:
        """Note the newest ledger entry beside the name of the account: a lost ledger shows, whoever answered."""
        with self.lock():
            path = create_private_folder(self.folder / ACCOUNTS) / f"{account}.json"
            _write_json(path, {"dataset": account, "ledger_head": ledger_head})

    def create_alias(self, fingerprint: str, ensemble: str | None = None) -> str:
        """A fresh id for who answers one release, which is published in place of anything private.

        Args:
            fingerprint: PRIVATE. Of the records, or of the votes in their place.
            ensemble: Id of the stored ensemble behind it; None if no ensemble is kept.
        """
        alias = secrets.token_hex(8)
        with self.lock():
            path = create_private_folder(self.folder / ALIASES) / f"{alias}.json"
            _write_json(path, {"ensemble": ensemble, "fingerprint": fingerprint})
        return alias

    def was_trained_on(self, name: str, fingerprint: str) -> bool:
        """Whether the records of this fingerprint are behind the release that shows this id."""
        with contextlib.suppress(OSError, ValueError, KeyError):
            return bool((self._read_alias(name) or self.load_manifest(name))["fingerprint"] == fingerprint)
        return False

    def find_ledger_heads(self, account: str) -> dict[Path, str]:
        """Every ledger entry that something in the store noted for this account, by the file that names it."""
        head_by_file = {}
        for file in [*sorted(self.folder.glob("*/manifest.json")), *sorted(self.folder.glob(f"{ACCOUNTS}/*.json"))]:
            with contextlib.suppress(OSError, ValueError):
                facts = json.loads(file.read_text())
                if facts.get("dataset") == account and facts.get("ledger_head"):
                    head_by_file[file] = str(facts["ledger_head"])
        return head_by_file

    def get_or_count_votes(
        self, name: str, pool_x: Tensor, compute: Callable[[], Votes], voting_mode: str = ""
    ) -> Votes:
        """PRIVATE. The ensemble's votes on these public points: from the cache, or computed and kept.

        Args:
            name: The ensemble's id.
            pool_x: The public points.
            compute: Computes the votes.
            voting_mode: Names how they vote, where not on each point by itself; letters and digits.

        Raises:
            ValueError: The cached or the computed votes are not this ensemble's on these points.
        """
        folder = self._get_folder(name)
        manifest = self._read_manifest(folder)
        stem = "-".join(filter(None, (compute_tensor_digest(pool_x), voting_mode)))
        path = create_private_folder(folder / "votes") / f"{stem}.safetensors"
        if path.exists():
            counts = read_tensors(path).get("counts_QC")
            if counts is None or counts.shape != (len(pool_x), manifest["network"]["num_classes"]):
                raise ValueError(f"{path}: does not hold the votes on these points; delete it to count again")
            return Votes(counts.to(torch.int64), manifest["num_teachers"])
        votes = compute()
        if votes.num_teachers != manifest["num_teachers"] or len(votes) != len(pool_x):
            raise ValueError(f"teachers {name}: the computed votes are not this ensemble's votes on these points")
        with self.lock(), atomic_replacement(path) as temporary:
            save_file({"counts_QC": votes.counts_QC.cpu().to(torch.int32)}, temporary)
        return votes

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

    def _get_folder(self, name: str) -> Path:
        if not isinstance(name, str) or not ID_PATTERN.fullmatch(name):
            raise checks.error("teachers", name, "must be an id of 16 hexadecimal digits")
        folder = self.folder / name
        with contextlib.suppress(OSError, ValueError):
            folder = self.folder / (self._read_alias(name).get("ensemble") or name)
        if not folder.is_dir():
            raise checks.error("teachers", name, f"no such ensemble under {self.folder}")
        return folder

    def _read_alias(self, name: str) -> dict[str, Any]:
        """The facts of ``create_alias``; empty if there is no such alias."""
        path = self.folder / ALIASES / f"{name}.json"
        return dict(json.loads(path.read_text())) if path.exists() else {}

    def _read_manifest(self, folder: Path) -> dict[str, Any]:
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
