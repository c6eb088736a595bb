"""Keys of a site and of the joiner, and the private state of a site.

A site has one Ed25519 key for signatures, one X25519 key for each slot, and one ML-KEM-768 key. A slot is the right to
answer one round. The private halves lie in one file that only its owner can read, and the public halves in the key
file, which the site sends to the joiner. The private half of a slot is erased before the slot is answered, so that a
key that is stolen later opens no earlier answer. An erased key is absent from the file; back-ups and the cells of a
flash drive may still hold the key, so keep the folder out of back-ups and on an encrypted disk.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.mlkem import MLKEM768PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from filelock import FileLock

from pate_torch.core import checks
from pate_torch.core.files import atomic_replacement, create_private_folder
from pate_torch.sites.signed import ZERO_DIGEST, is_hex, is_list_of, is_text, make_file, read_file

DEFAULT_NUM_SLOTS, MAX_NUM_SLOTS = 16, 512
KEM_PUBLIC_BYTES = 1184
_KEY_FIELDS = {
    "site": is_text,
    "signing_key": is_hex(32),
    "slot_keys": is_list_of(is_hex(32), 1, MAX_NUM_SLOTS),
    "kem_key": is_hex(KEM_PUBLIC_BYTES),
}
_README = """PRIVATE: do not publish, do not share, do not back up.

This folder holds the private keys of this site. Whoever has the keys of a slot that is not answered yet can take the
masks off this site's next answers. A folder that is restored from a back-up may answer a slot twice with the same
masks, and the difference of the two answers has none. If the folder is lost, make new keys with `pate site init`
and ask for a new charter.
"""


@dataclass(frozen=True)
class KeyFile:
    """The public keys of a site (Ed25519, X25519 for each slot, ML-KEM-768), signed by the site."""

    site: str
    signing_key: bytes
    slot_keys: tuple[bytes, ...]
    kem_key: bytes
    raw: bytes


def read_key_file(raw: bytes, source: str = "") -> KeyFile:
    """Read a key file and verify its signature."""
    file = read_file(raw, "key file", _KEY_FIELDS, source)
    content = file.content
    if unicodedata.normalize("NFC", content["site"]) != content["site"]:
        raise file.make_error("its name of the site has characters that can be written in two ways")
    file.verify(bytes.fromhex(content["signing_key"]), content["site"])
    slot_keys = tuple(map(bytes.fromhex, content["slot_keys"]))
    signing_key, kem_key = bytes.fromhex(content["signing_key"]), bytes.fromhex(content["kem_key"])
    return KeyFile(content["site"], signing_key, slot_keys, kem_key, raw)


@dataclass
class Secrets:
    """PRIVATE. The private keys of a site and what the site did with them. Keys and hashes are hexadecimal digits.

    Attributes:
        site: Name of the site.
        signing_key: Ed25519 key.
        slot_keys: X25519 key of each slot that is neither answered nor passed over, by the number of the slot.
        kem_seed: Seed of the ML-KEM-768 key. Empty after its use.
        key_file: SHA-256 of the key file.
        charter: SHA-256 of the confirmed charter. Empty if no charter is confirmed.
        place: Place of the site in the charter.
        confirmation: SHA-256 of the confirmation file.
        pair_secrets: Newest secret in the chain of each pair, by the place of the other site.
        ciphertexts: SHA-256 of the ciphertext of each pair, by the place of the other site.
        next_slot: Smallest slot that can still be answered.
        rounds: SHA-256 of the round file of each slot that was begun.
        answers: SHA-256 of the answer of each slot whose answer is on disk.
        sums: SHA-256 of the sum file of each round, by the SHA-256 of the round file.
        last_sum: SHA-256 of the newest sum file. Zeros if there is none.
    """

    site: str
    signing_key: str
    slot_keys: dict[str, str]
    kem_seed: str
    key_file: str
    charter: str = ""
    place: int = 0
    confirmation: str = ""
    pair_secrets: dict[str, str] = field(default_factory=dict)
    ciphertexts: dict[str, str] = field(default_factory=dict)
    next_slot: int = 0
    rounds: dict[str, str] = field(default_factory=dict)
    answers: dict[str, str] = field(default_factory=dict)
    sums: dict[str, str] = field(default_factory=dict)
    last_sum: str = ZERO_DIGEST

    @property
    def signer(self) -> Ed25519PrivateKey:
        """Ed25519 key."""
        return Ed25519PrivateKey.from_private_bytes(bytes.fromhex(self.signing_key))


@dataclass(frozen=True)
class SiteState:
    """The folder of a site, with its private keys and the files that it sent."""

    folder: Path

    @classmethod
    def create(cls, folder: Path, site: str, num_slots: int = DEFAULT_NUM_SLOTS) -> SiteState:
        """Make new keys in a folder without keys. The site sends ``key_file`` to the joiner."""
        checks.integer("slots", num_slots, 1, MAX_NUM_SLOTS)
        if not is_text(site) or unicodedata.normalize("NFC", site) != site:
            raise checks.error("site", site, "must be a name of 1 to 200 printable characters in the form NFC")
        state = cls(create_private_folder(folder, _README))
        with state._lock():
            if state._secrets_path.exists():
                fix = "Use another folder; keys are made once, and a new charter needs new keys."
                raise checks.error("folder", str(folder), "has keys already", fix)
            signer, kem_key = Ed25519PrivateKey.generate(), MLKEM768PrivateKey.generate()
            slot_keys = [X25519PrivateKey.generate() for _ in range(num_slots)]
            content = {
                "site": site,
                "signing_key": signer.public_key().public_bytes_raw().hex(),
                "slot_keys": [key.public_key().public_bytes_raw().hex() for key in slot_keys],
                "kem_key": kem_key.public_key().public_bytes_raw().hex(),
            }
            key_file = make_file("key file", content, signer)
            secrets = Secrets(
                site=site,
                signing_key=signer.private_bytes_raw().hex(),
                slot_keys={str(slot): key.private_bytes_raw().hex() for slot, key in enumerate(slot_keys)},
                kem_seed=kem_key.private_bytes_raw().hex(),
                key_file=hashlib.sha256(key_file).hexdigest(),
            )
            state.write_pending("key file", key_file)
            state.save(secrets)
            state.finish_pending("key file", secrets.key_file)
        return state

    @property
    def key_file(self) -> bytes:
        """Bytes of the key file."""
        with self.open() as secrets:
            return self.finish_pending("key file", secrets.key_file)

    @property
    def _secrets_path(self) -> Path:
        return self.folder / "secrets.json"

    def _lock(self) -> FileLock:
        return FileLock(self.folder / ".lock", mode=0o600)

    @contextmanager
    def open(self) -> Iterator[Secrets]:
        """PRIVATE. Read the secrets and keep other processes out until the ``with`` block ends."""
        if not self._secrets_path.exists():
            raise checks.error("folder", str(self.folder), "has no keys of a site", "Run `pate site init` first.")
        with self._lock():
            # A process that died while it saved left a copy, whose keys the next save would not erase.
            for leftover in self.folder.glob(f".{self._secrets_path.name}.*"):
                leftover.unlink()
            if stat.S_IMODE(self._secrets_path.stat().st_mode) & 0o077:
                fix = f"Run chmod 600 on {self._secrets_path}, and make new keys if others may have read them."
                raise checks.error("folder", str(self.folder), "its keys can be read by other users", fix)
            try:
                secrets = Secrets(**json.loads(self._secrets_path.read_text()))
            except (TypeError, ValueError):
                fix = "Make new keys with `pate site init`."
                raise checks.error("folder", str(self.folder), "its file of keys is damaged", fix) from None
            yield secrets

    def save(self, secrets: Secrets) -> None:
        """PRIVATE. Replace the secrets on disk, durably. Keys that ``secrets`` lacks are erased from the disk."""
        write_privately(self._secrets_path, json.dumps(asdict(secrets), sort_keys=True).encode())

    def write_pending(self, name: str, raw: bytes) -> None:
        """Write a file durably under a pending name, because its hash is not among the secrets yet."""
        write_privately(self._get_pending_path(name), raw)

    def finish_pending(self, name: str, digest: str) -> bytes:
        """Return the file whose hash is stored, and complete its renaming if a crash prevented this."""
        return read_stored_file(self.folder / f"{name}.pate", self._get_pending_path(name), digest)

    def _get_pending_path(self, name: str) -> Path:
        return self.folder / f"{name}.pending"


def read_stored_file(path: Path, pending: Path, digest: str) -> bytes:
    """Read a file whose SHA-256 is stored, after its renaming from ``pending`` if a crash prevented the renaming."""
    if pending.exists() and hashlib.sha256(pending.read_bytes()).hexdigest() == digest:
        pending.replace(path)
    raw = path.read_bytes() if path.exists() else b""
    if hashlib.sha256(raw).hexdigest() != digest:
        raise checks.error("folder", str(path.parent), f"its file '{path.name}' is missing or was altered")
    return raw


def load_joiner_key(path: Path) -> Ed25519PrivateKey:
    """PRIVATE. Read the Ed25519 key of a joiner."""
    text: Any = path.read_text() if path.exists() else ""
    if not is_hex(32)(text):
        raise checks.error("key", str(path), "is missing or is not the key of a joiner")
    return Ed25519PrivateKey.from_private_bytes(bytes.fromhex(text))


def write_privately(path: Path, raw: bytes) -> None:
    """PRIVATE. Replace a file, durably, by one that no other user can read at any time."""
    with (
        atomic_replacement(path) as temporary,
        open(temporary, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file,
    ):
        file.write(raw)
