"""A hash chain: an append-only list of entries in one SQLite table, in which each entry holds the hash of the previous.

The hash of an entry is SHA-256 of its canonical JSON, which contains the number of the entry and the previous hash. An
edit therefore invalidates all later entries. A ledger that was cut short lacks the newest hash, of which copies are
stored outside the ledger (``contains``). The chain protects against accidents and clumsy edits. It does not protect
against somebody who rewrites the whole file and every copy of its newest hash.

An existing file that is not a complete ledger of this version is refused, even if it is empty. The file must be on a
local disk, because SQLite's locks do not work on network file systems. ``postgres`` keeps a chain on a server.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

LEDGER_SCHEMA_VERSION = 1
APPLICATION_ID = 0x50415445  # "PATE"
GENESIS_HASH = "0" * 64
LOCK_TIMEOUT_SECONDS = 60.0
SCHEMA = {
    "entries": "CREATE TABLE entries (seq INTEGER PRIMARY KEY AUTOINCREMENT, hash TEXT NOT NULL UNIQUE,"
    " body TEXT NOT NULL)",
    "no_update": "CREATE TRIGGER no_update BEFORE UPDATE ON entries"
    " BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END",
    "no_delete": "CREATE TRIGGER no_delete BEFORE DELETE ON entries"
    " BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END",
}
_SELECT = "SELECT seq, hash, body FROM entries"
ABANDONED_SECONDS = 3600
"""Age of a temporary file from which its process counts as killed."""
RESTORE_HINT = "Keep the file, and restore a backup that contains the hash in your newest summary.json (ledger_head)."


class LedgerError(ValueError):
    """The ledger cannot be read or written, or it was changed. Nothing was recorded."""


class MissingLedgerError(LedgerError):
    """There is no ledger in this place."""


@dataclass(frozen=True, kw_only=True)
class LedgerEntry:
    """One entry of the chain.

    Attributes:
        seq: Number of the entry, from 1.
        time: Time of writing, UTC, in ISO format.
        kind: Kind of the entry, such as "reserve".
        account: Name of the account. Empty if the entry is about the whole ledger.
        facts: Content of the entry, from JSON.
        prev: Hash of the previous entry.
        hash: Hash of this entry, which covers all previous entries.
    """

    seq: int
    time: str
    kind: str
    account: str
    facts: dict[str, Any]
    prev: str
    hash: str


class HashChain:
    """An open chain that verifies each entry when it reads it. ``place`` is its path, as messages show it.

    Raises:
        LedgerError: The file is missing (``create=False``), empty, cut short, no ledger, or of a newer version.
    """

    _BEGIN, _BEGIN_READING = "BEGIN IMMEDIATE", "BEGIN"
    _INSERT = "INSERT INTO entries (seq, hash, body) VALUES (:seq, :hash, :body)"
    _COUNT = "SELECT seq FROM sqlite_sequence WHERE name = 'entries'"  # counts entries that were removed, too
    _db: Any  # sqlite3.Connection, or what is used of it on a server

    def __init__(self, path: Path, *, create: bool = True, readonly: bool = False) -> None:
        self.path, self.place = path, str(path.absolute())
        has_log = _get_wal_path(self.path).exists()  # before path.exists(): another process may create both files
        if create and not readonly:
            remove_abandoned_files(self.path)
        if create and not readonly and not self.path.exists():
            if has_log:
                raise self._damaged_error("the file is gone, but its write-ahead log is still there")
            with suppress(FileExistsError):  # another process may have created the ledger
                create_file(self.path, [encode_genesis()])
        check_is_filled(self.path)
        self._begin_use()
        with self._translated_errors():
            self._db = connect(self.path, readonly)
        try:
            with self._translated_errors():
                self._check_schema()
        except LedgerError:
            self._db.close()
            raise

    def _begin_use(self) -> None:
        self._pid, self._lock = os.getpid(), threading.RLock()
        self._seq, self._hash, self.moved_to = 0, GENESIS_HASH, ""

    def close(self) -> None:
        if os.getpid() == self._pid:
            with self._lock:
                self._db.close()

    @contextmanager
    def exclusive_access(self) -> Iterator[None]:
        """Block other threads during a ``with`` block. Raises LedgerError in a forked process."""
        check_own_process(self._pid)  # connections do not survive a fork
        with self._lock:
            yield

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Hold the write lock during a ``with`` block, and write all entries to the disk at its end, or none."""
        with self._translated_errors():
            assert not self._db.in_transaction, "transactions are not nested"
            try:
                self._db.execute(self._BEGIN)
                yield
                assert self._db.in_transaction, "the transaction was rolled back"
                self._db.commit()
            except BaseException:
                with suppress(sqlite3.Error):
                    self._db.rollback()  # a full disk may have rolled back already
                raise

    def append(self, kind: str, account: str, facts: dict[str, Any]) -> str:
        """Append an entry and return its hash. Call it in ``transaction``, after ``read_new_entries``."""
        assert self._db.in_transaction, "an entry outside a transaction could be lost"
        self.check_not_moved()
        seq, prev = self._read_last()
        assert (seq, prev) == (self._seq, self._hash), "new entries were not read before writing"
        row = encode_entry(seq + 1, kind, account, facts, prev)
        self._db.execute(self._INSERT, row)
        return str(row["hash"])

    def check_not_moved(self) -> None:
        """Raise LedgerError if the newest entry that was read says that the chain was moved to a database."""
        if self.moved_to:
            raise LedgerError(f"ledger={self.place!r}: was moved to {self.moved_to}. Set PATE_LEDGER to its URL.")

    def read_new_entries(self) -> list[LedgerEntry]:
        """Return the entries since the last call, each checked against the previous one."""
        with self.exclusive_access():
            entries = self._read_entries_after(self._seq, self._hash)
            if entries:
                self._seq, self._hash = entries[-1].seq, entries[-1].hash
                self.moved_to = str(entries[-1].facts["to"]) if entries[-1].kind == "moved" else ""
            return entries

    def rewind(self) -> None:
        """Make ``read_new_entries`` start at the first entry again."""
        self._seq, self._hash = 0, GENESIS_HASH

    def read_all_entries(self) -> list[LedgerEntry]:
        """Return every entry, checked from the first, without an effect on ``read_new_entries``."""
        return self._read_entries_after(0, GENESIS_HASH)

    def _read_entries_after(self, seq: int, prev: str) -> list[LedgerEntry]:
        with self._snapshot():
            if seq:
                row = self._db.execute("SELECT hash FROM entries WHERE seq = :seq", {"seq": seq}).fetchone()
                if row != (prev,):
                    raise self._damaged_error(f"entry {seq} was changed or removed while the ledger was open")
            rows = self._db.execute(f"{_SELECT} WHERE seq > :seq ORDER BY seq", {"seq": seq}).fetchall()
            sequence_row = self._db.execute(self._COUNT).fetchone()
        entries = []
        for row in rows:
            entries.append(self._parse_row(row, seq + 1, prev))
            seq, prev = entries[-1].seq, entries[-1].hash
        if seq == 0 or sequence_row != (seq,):
            count = sequence_row[0] if sequence_row else "an unknown number"
            raise self._damaged_error(f"it ends at entry {seq} of {count}")
        return entries

    @contextmanager
    def _snapshot(self) -> Iterator[None]:
        """Make all reads in a ``with`` block see one state, as inside ``transaction``."""
        with self._translated_errors():
            is_nested = self._db.in_transaction
            try:
                if not is_nested:
                    self._db.execute(self._BEGIN_READING)
                yield
            finally:
                if not is_nested:
                    self._db.rollback()

    def get_head(self) -> str:
        """Return the hash of the newest entry."""
        with self._snapshot():
            return self._read_last()[1]

    def contains(self, entry_hash: str) -> bool:
        """Whether an entry has this hash."""
        with self._snapshot():
            return self._db.execute(f"{_SELECT} WHERE hash = :hash", {"hash": entry_hash}).fetchone() is not None

    def read_rows(self) -> list[dict[str, Any]]:
        """Return every row of the table, after checking all of them."""
        with self._snapshot():
            self.read_all_entries()
            rows = self._db.execute(f"{_SELECT} ORDER BY seq").fetchall()
        return [dict(zip(("seq", "hash", "body"), row, strict=True)) for row in rows]

    def check_file(self) -> None:
        """Run SQLite's integrity check, and check the schema again."""
        with self._translated_errors():
            problems = [row[0] for row in self._db.execute("PRAGMA integrity_check")]
            if problems != ["ok"]:
                raise self._damaged_error("; ".join(problems[:3]))
            self._check_schema()

    def backup(self, path: Path) -> None:
        """Copy the chain to a new file of mode 0600. Raises LedgerError if the file exists."""
        if path.exists():
            raise LedgerError(f"backup={str(path)!r}: already exists. Name a new file.")
        create_file(path, self.read_rows())

    def _read_last(self) -> tuple[int, str]:
        row = self._db.execute(f"{_SELECT} ORDER BY seq DESC LIMIT 1").fetchone()
        return (row[0], row[1]) if row is not None else (0, GENESIS_HASH)

    def _parse_row(self, row: tuple[Any, Any, Any], seq: int, prev: str) -> LedgerEntry:
        number, entry_hash, text = row
        if number != seq:
            raise self._damaged_error(f"entry {seq} is missing")
        if not isinstance(text, str) or hashlib.sha256(text.encode()).hexdigest() != entry_hash:
            raise self._damaged_error(f"entry {seq} was edited: its hash does not match")
        body = json.loads(text)
        if body["seq"] != seq or body["prev"] != prev:
            raise self._damaged_error(f"entry {seq} does not follow the one before it")
        return LedgerEntry(**body, hash=entry_hash)

    def _check_schema(self) -> None:
        if self._db.execute("PRAGMA application_id").fetchone() != (APPLICATION_ID,):
            raise LedgerError(f"ledger={self.place!r}: is a database, but not a ledger. Name another path.")
        version = self._db.execute("PRAGMA user_version").fetchone()[0]
        if version > LEDGER_SCHEMA_VERSION:
            raise LedgerError(
                f"ledger={self.place!r}: was written by a newer version (schema {version}, known up to"
                f" {LEDGER_SCHEMA_VERSION}). Upgrade pate-torch, which could otherwise misread its charges."
            )
        schema = dict(self._db.execute("SELECT name, sql FROM sqlite_master WHERE name NOT LIKE 'sqlite_%'"))
        if version != LEDGER_SCHEMA_VERSION or schema != SCHEMA:
            raise self._damaged_error("its tables or its guards against edits were changed")

    def _damaged_error(self, message: str) -> LedgerError:
        return LedgerError(f"ledger={self.place!r}: is damaged: {message}. {RESTORE_HINT}")

    @contextmanager
    def _translated_errors(self) -> Iterator[None]:
        """Block other threads, and convert errors of SQLite to a ``LedgerError`` with advice."""
        with self.exclusive_access():
            try:
                yield
            except sqlite3.Error as error:
                if _is_damage(error):
                    raise self._damaged_error(str(error)) from error
                text = str(error).lower()
                fix = next((fix for pattern, fix in _FIX_BY_MESSAGE.items() if pattern in text), _VERIFY_HINT)
                raise LedgerError(f"ledger={self.place!r}: {error}. Nothing was recorded. {fix}") from error
            except OSError as error:
                raise LedgerError(f"ledger={self.place!r}: {error}. Nothing was recorded.") from error


def _is_damage(error: sqlite3.Error) -> bool:
    """Whether the error means that the content of the file is damaged, unlike a full disk or a lock."""
    code = vars(error).get("sqlite_errorcode", sqlite3.SQLITE_OK) & 0xFF  # the primary code of an extended code
    return code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB) or "could not decode" in str(error).lower()


_VERIFY_HINT = "Check the file: pate ledger verify."
_FIX_BY_MESSAGE = {
    "readonly": "Make the file and its folder writable: a release that cannot be charged is not made.",
    "full": "Free some space, then run again.",
    "locked": f"Another process held it for {LOCK_TIMEOUT_SECONDS:.0f} s. Wait for this process to end.",
    "busy": f"Another process held it for {LOCK_TIMEOUT_SECONDS:.0f} s. Wait for this process to end.",
    "unable to open": "Check the path and the permissions of its folder.",
    "disk i/o": "Check the disk.",
    "closed database": "This Ledger object was closed. Open a new one: Ledger(path).",
}


def check_own_process(pid: int) -> None:
    """Raise LedgerError if this process is not the one with this id, but a fork of it."""
    if os.getpid() != pid:
        raise LedgerError("ledger: was opened by another process. Open it anew in this one.")


def encode_entry(seq: int, kind: str, account: str, facts: dict[str, Any], prev: str) -> dict[str, Any]:
    """Return the row of an entry, dated now, with canonical JSON (sorted keys, no spaces, exact floats, no NaN)."""
    timestamp = datetime.now(UTC).isoformat(timespec="seconds")
    body = {"seq": seq, "time": timestamp, "kind": kind, "account": account, "facts": facts, "prev": prev}
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return {"seq": seq, "hash": hashlib.sha256(text.encode()).hexdigest(), "body": text}


def encode_genesis() -> dict[str, Any]:
    """Return the first row of a new chain. Because of its random name, no hash occurs in two new chains."""
    facts = {"ledger": secrets.token_hex(16), "version": LEDGER_SCHEMA_VERSION}
    return encode_entry(1, "genesis", "", facts, GENESIS_HASH)


def connect(path: Path, readonly: bool) -> sqlite3.Connection:
    """Open an existing database, in which every commit is on disk before the call returns."""

    def open_uri(query: str) -> sqlite3.Connection:
        uri = f"{path.absolute().as_uri()}?{query}"
        db = sqlite3.connect(uri, uri=True, timeout=LOCK_TIMEOUT_SECONDS, isolation_level=None, check_same_thread=False)
        try:
            db.execute("PRAGMA user_version").fetchone()
        except sqlite3.Error:
            db.close()
            raise
        return db

    if readonly:
        try:
            return open_uri("mode=ro")
        except sqlite3.OperationalError:
            # On read-only media SQLite cannot create the index of a write-ahead log. Without a log it needs no index.
            if _get_wal_path(path).exists():
                raise
            return open_uri("immutable=1")
    db = open_uri("mode=rw")
    db.execute("PRAGMA synchronous=FULL")
    db.execute("PRAGMA fullfsync=ON")
    return db


def _get_wal_path(path: Path) -> Path:
    return path.with_name(path.name + "-wal")


def check_is_filled(path: Path) -> None:
    """Raise LedgerError if the file is missing or empty. SQLite would fill an empty file."""
    try:
        size = path.stat().st_size
    except FileNotFoundError as error:
        message = "does not exist. Restore a backup, or name the folder of the ledger (PATE_HOME)."
        raise MissingLedgerError(f"ledger={str(path)!r}: {message}") from error
    except OSError as error:
        raise LedgerError(f"ledger={str(path)!r}: {error}. Check the path and its permissions.") from error
    if not size:
        raise LedgerError(f"ledger={str(path)!r}: is empty, so its charges are lost. {RESTORE_HINT}")


def create_file(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Create a chain of these rows in a temporary file, and link the complete file to ``path``."""
    missing_folders = [folder for folder in (path.parent, *path.parent.parents) if not folder.exists()]
    try:
        for folder in reversed(missing_folders):
            folder.mkdir(mode=0o700, exist_ok=True)
        with new_file(path) as temporary:
            db = sqlite3.connect(temporary, isolation_level=None)
            try:
                db.execute("PRAGMA journal_mode=WAL")
                db.execute("PRAGMA synchronous=FULL")
                db.execute("BEGIN IMMEDIATE")
                for statement in SCHEMA.values():
                    db.execute(statement)
                db.execute(f"PRAGMA application_id={APPLICATION_ID}")
                db.execute(f"PRAGMA user_version={LEDGER_SCHEMA_VERSION}")
                db.executemany(HashChain._INSERT, rows)
                db.execute("COMMIT")
            finally:
                db.close()
    except FileExistsError:
        raise
    except (OSError, sqlite3.Error) as error:
        message = f"cannot be created: {error}. Check the folder and its disk."
        raise LedgerError(f"ledger={str(path)!r}: {message}") from error


def remove_abandoned_files(path: Path) -> None:
    """Remove temporary files of killed processes. A file in use is never this old, because writing takes seconds."""
    for leftover in path.parent.glob(f".{path.name}.{'[0-9a-f]' * 16}*"):
        with suppress(OSError):
            if time.time() - leftover.stat().st_mtime > ABANDONED_SECONDS:
                leftover.unlink()


@contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """Yield a private temporary file that is named ``path`` at the end. Raises FileExistsError if ``path`` exists."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    remove_abandoned_files(path)
    os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    try:
        yield temporary
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        os.link(temporary, path)  # unlike a rename, a link never replaces a file that was created meanwhile
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    finally:
        for suffix in ("", "-wal", "-shm", "-journal"):
            temporary.with_name(temporary.name + suffix).unlink(missing_ok=True)
