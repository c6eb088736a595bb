"""The SQLite file under the ledger's chain: its schema, how it is made, opened and recognized. See ``chain``."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

VERSION = 1
APPLICATION = 0x50415445  # "PATE"
_MAGIC = b"SQLite format 3\0"
GENESIS = "0" * 64
WAIT_S = 60.0
SCHEMA = {
    "entries": "CREATE TABLE entries (seq INTEGER PRIMARY KEY AUTOINCREMENT, hash TEXT NOT NULL UNIQUE,"
    " body TEXT NOT NULL)",
    "no_update": "CREATE TRIGGER no_update BEFORE UPDATE ON entries"
    " BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END",
    "no_delete": "CREATE TRIGGER no_delete BEFORE DELETE ON entries"
    " BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END",
}
ABANDONED_SECONDS = 3600
RESTORE = "Keep the file, and restore a backup that contains the hash in your newest summary.json (ledger_head)."


class LedgerError(ValueError):
    """The ledger cannot be read or written, or is not what was written; nothing was recorded."""


def digest(text: str) -> str:
    """The hash of one entry's text."""
    return hashlib.sha256(text.encode()).hexdigest()


def signed(seq: int, kind: str, account: str, facts: dict[str, Any], prev: str) -> tuple[str, str]:
    """An entry's canonical JSON (sorted keys, no spaces, exact floats, no NaN) and its hash, dated now."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    body = {"seq": seq, "time": now, "kind": kind, "account": account, "facts": facts, "prev": prev}
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return text, digest(text)


def connect(path: Path, readonly: bool) -> sqlite3.Connection:
    """Open an existing database, every commit of which is on disk before it returns."""

    def opened(query: str) -> sqlite3.Connection:
        uri = f"{path.absolute().as_uri()}?{query}"
        db = sqlite3.connect(uri, uri=True, timeout=WAIT_S, isolation_level=None, check_same_thread=False)
        try:
            db.execute("PRAGMA user_version").fetchone()
        except sqlite3.Error:
            db.close()
            raise
        return db

    if readonly:
        try:
            return opened("mode=ro")
        except sqlite3.OperationalError:
            # Read-only media: SQLite cannot make its index of the write-ahead log, and without a log needs none.
            if log_of(path).exists():
                raise
            return opened("immutable=1")
    db = opened("mode=rw")
    db.execute("PRAGMA synchronous=FULL")
    db.execute("PRAGMA fullfsync=ON")
    return db


def log_of(path: Path) -> Path:
    """SQLite's write-ahead log beside it."""
    return path.with_name(path.name + "-wal")


def refuse_foreign(path: Path) -> None:
    """Refuse a file that does not begin like a database: SQLite itself would begin a new one.

    Raises:
        LedgerError: The file is missing, or something else.
    """
    try:
        with path.open("rb") as file:
            start = file.read(len(_MAGIC))
    except FileNotFoundError as error:
        raise LedgerError(
            f"ledger={str(path)!r}: there is none. Restore a backup, or name the folder that holds it (PATE_HOME)."
        ) from error
    except OSError as error:
        raise LedgerError(f"ledger={str(path)!r}: {error}. Check the path and its rights.") from error
    if not start:
        raise LedgerError(f"ledger={str(path)!r}: is empty, so its charges are lost. {RESTORE}")
    if start != _MAGIC:
        raise LedgerError(f"ledger={str(path)!r}: is not a database. {RESTORE}")


def create_file(path: Path) -> None:
    """Create a chain with its first entry, aside and then linked into place, so that nobody ever sees half of one."""
    missing = [folder for folder in (path.parent, *path.parent.parents) if not folder.exists()]
    try:
        for folder in reversed(missing):
            folder.mkdir(mode=0o700, exist_ok=True)
        with suppress(FileExistsError), new_file(path) as temporary:  # whoever was first has made the ledger
            db = sqlite3.connect(temporary, isolation_level=None)
            try:
                db.execute("PRAGMA journal_mode=WAL")
                db.execute("PRAGMA synchronous=FULL")
                db.execute("BEGIN IMMEDIATE")
                for statement in SCHEMA.values():
                    db.execute(statement)
                db.execute(f"PRAGMA application_id={APPLICATION}")
                db.execute(f"PRAGMA user_version={VERSION}")
                unique = {"ledger": secrets.token_hex(16), "version": VERSION}  # no two ledgers share a hash
                text, signature = signed(1, "genesis", "", unique, GENESIS)
                db.execute("INSERT INTO entries (seq, hash, body) VALUES (1, ?, ?)", (signature, text))
                db.execute("COMMIT")
            finally:
                db.close()
    except (OSError, sqlite3.Error) as error:
        raise LedgerError(
            f"ledger={str(path)!r}: cannot be created: {error}. Check the folder and its disk."
        ) from error


def sweep_killed(path: Path) -> None:
    """Remove what killed processes left of making this file: a new one is written within seconds."""
    for leftover in path.parent.glob(f".{path.name}.{'[0-9a-f]' * 16}*"):
        with suppress(OSError):
            if time.time() - leftover.stat().st_mtime > ABANDONED_SECONDS:
                leftover.unlink()


@contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """A private temporary file which takes the name ``path`` at the end.

    Raises:
        FileExistsError: The name is taken.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    sweep_killed(path)
    os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    try:
        yield temporary
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        os.link(temporary, path)  # unlike a rename, never replaces a file made meanwhile
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    finally:
        for leftover in (
            temporary,
            *(temporary.with_name(temporary.name + end) for end in ("-wal", "-shm", "-journal")),
        ):
            leftover.unlink(missing_ok=True)
