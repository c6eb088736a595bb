"""Hash chain: an append-only file of facts in which each entry carries the hash of the one before.

One SQLite database, one table. An entry's hash is SHA-256 over its canonical JSON, which names its number and the hash
before it, so an edit anywhere shows from there on; a cut tail shows against any hash noted elsewhere (``contains``).
The chain guards against accidents and clumsy edits; who can rewrite the whole file and every copy of its head is not
stopped by it.

A file that is there but is not a whole ledger of this version is refused, never taken for an empty one. Local disks
only: SQLite's locks do not hold on network file systems.
"""

from __future__ import annotations

import json
import os
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pate_torch.ledger.database import (
    APPLICATION,
    GENESIS,
    RESTORE,
    SCHEMA,
    VERSION,
    WAIT_S,
    LedgerError,
    connect,
    create_file,
    digest,
    log_of,
    new_file,
    refuse_foreign,
    signed,
    sweep_killed,
)

__all__ = ["Chain", "Entry", "LedgerError"]


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One fact of the chain.

    Attributes:
        seq: Its number.
        time: When it was written.
        kind: Kind of fact.
        account: Account that it concerns.
        facts: JSON.
        prev: Hash of the entry before.
        hash: Covers everything here and every entry before.
    """

    seq: int
    time: str
    kind: str
    account: str
    facts: dict[str, Any]
    prev: str
    hash: str


class Chain:
    """An open chain, verified as it is read: ``news`` never returns an entry that does not follow the last one."""

    def __init__(self, path: Path, *, create: bool = True, readonly: bool = False) -> None:
        """Open the chain at ``path``, or create it.

        Raises:
            LedgerError: A missing file (``create=False``), or one that is empty, cut, foreign or of a newer version.
        """
        self.path = Path(path)
        orphan = log_of(self.path).exists()  # looked for first: a ledger made meanwhile has both files
        if create and not readonly:
            sweep_killed(self.path)
        if create and not readonly and not self.path.exists():
            if orphan:
                raise self._damaged("the file is gone, but its write-ahead log is still there")
            create_file(self.path)
        refuse_foreign(self.path)
        self._pid, self._lock = os.getpid(), threading.RLock()
        with self._explained():
            self._db = connect(self.path, readonly)
        try:
            with self._explained():
                self._check_schema()
        except LedgerError:
            self._db.close()
            raise
        self._seq, self._hash = 0, GENESIS

    def close(self) -> None:
        """Close the file."""
        if os.getpid() == self._pid:
            with self._lock:
                self._db.close()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Let this thread alone use the chain.

        Raises:
            LedgerError: This is a copy of the process that opened it.
        """
        if os.getpid() != self._pid:  # SQLite connections do not survive a fork
            raise LedgerError("ledger: was opened by another process. Open it anew in this one.")
        with self._lock:
            yield

    @contextmanager
    def writing(self) -> Iterator[None]:
        """The one transaction: the write lock from the first read on, all entries or none, on disk when it returns."""
        with self._explained():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:  # a full disk may have rolled back already
                    with suppress(sqlite3.Error):
                        self._db.execute("ROLLBACK")
                raise

    def append(self, kind: str, account: str, facts: dict[str, Any]) -> str:
        """Write one entry after the last, return its hash; only inside ``writing`` and after reading all ``news``."""
        assert self._db.in_transaction, "an entry outside a transaction could be lost"
        seq, prev = self._last()
        assert (seq, prev) == (self._seq, self._hash), "news were not read before writing"
        text, signature = signed(seq + 1, kind, account, facts, prev)
        self._db.execute("INSERT INTO entries (seq, hash, body) VALUES (?, ?, ?)", (seq + 1, signature, text))
        return signature

    def news(self) -> list[Entry]:
        """Entries since the last call, each checked against the one before it."""
        with self.alone():
            entries = self._read(self._seq, self._hash)
            if entries:
                self._seq, self._hash = entries[-1].seq, entries[-1].hash
            return entries

    def rewind(self) -> None:
        """Let ``news`` start at the first entry again."""
        self._seq, self._hash = 0, GENESIS

    def all(self) -> list[Entry]:
        """Every entry, checked from the first; ``news`` is not affected."""
        return self._read(0, GENESIS)

    def _read(self, seq: int, prev: str) -> list[Entry]:
        with self._explained(), self._snapshot():
            if seq:
                row = self._db.execute("SELECT hash FROM entries WHERE seq = ?", (seq,)).fetchone()
                if row != (prev,):
                    raise self._damaged(f"entry {seq} was changed or removed while the ledger was open")
            rows = self._db.execute("SELECT seq, hash, body FROM entries WHERE seq > ? ORDER BY seq", (seq,)).fetchall()
            numbered = self._db.execute("SELECT seq FROM sqlite_sequence WHERE name = 'entries'").fetchone()
        entries = []
        for row in rows:
            entries.append(self._checked(row, seq + 1, prev))
            seq, prev = entries[-1].seq, entries[-1].hash
        if seq == 0 or numbered != (seq,):
            raise self._damaged(f"it ends at entry {seq} of {numbered[0] if numbered else 'an unknown number'}")
        return entries

    @contextmanager
    def _snapshot(self) -> Iterator[None]:
        """Several reads of one state; inside ``writing`` they are that already."""
        if self._db.in_transaction:
            yield
            return
        self._db.execute("BEGIN")
        try:
            yield
        finally:
            self._db.execute("ROLLBACK")

    def head(self) -> str:
        """Hash of the newest entry."""
        with self._explained():
            return self._last()[1]

    def contains(self, signature: str) -> bool:
        """Whether an entry has this hash."""
        with self._explained():
            return self._db.execute("SELECT 1 FROM entries WHERE hash = ?", (signature,)).fetchone() is not None

    def check_file(self) -> None:
        """SQLite's own integrity check, and the schema once more."""
        with self._explained():
            problems = [row[0] for row in self._db.execute("PRAGMA integrity_check")]
            if problems != ["ok"]:
                raise self._damaged("; ".join(problems[:3]))
            self._check_schema()

    def backup(self, path: Path) -> None:
        """Copy the chain as it is now to a new file (0600); an existing one is refused."""
        if path.exists():
            raise LedgerError(f"backup={str(path)!r}: exists already. Name a new file.")
        with self._explained(), new_file(path) as temporary:
            target = sqlite3.connect(temporary, isolation_level=None)
            try:
                self._db.backup(target)
            finally:
                target.close()

    def _last(self) -> tuple[int, str]:
        row = self._db.execute("SELECT seq, hash FROM entries ORDER BY seq DESC LIMIT 1").fetchone()
        return row if row is not None else (0, GENESIS)

    def _checked(self, row: tuple[Any, Any, Any], seq: int, prev: str) -> Entry:
        number, signature, text = row
        if number != seq:
            raise self._damaged(f"entry {seq} is missing")
        if not isinstance(text, str) or digest(text) != signature:
            raise self._damaged(f"entry {seq} was edited: its hash does not match")
        body = json.loads(text)
        if body["seq"] != seq or body["prev"] != prev:
            raise self._damaged(f"entry {seq} does not follow the one before it")
        return Entry(**body, hash=signature)

    def _check_schema(self) -> None:
        application = self._db.execute("PRAGMA application_id").fetchone()[0]
        if application != APPLICATION:
            raise LedgerError(f"ledger={str(self.path)!r}: is a database, but not a ledger. Name another path.")
        version = self._db.execute("PRAGMA user_version").fetchone()[0]
        if version > VERSION:
            raise LedgerError(
                f"ledger={str(self.path)!r}: was written by a newer version (schema {version}, known up to {VERSION})."
                " Upgrade pate-torch; this version could misread its charges."
            )
        found = dict(self._db.execute("SELECT name, sql FROM sqlite_master WHERE name NOT LIKE 'sqlite_%'"))
        if version != VERSION or found != SCHEMA:
            raise self._damaged("its tables or its guards against edits were changed")

    def _damaged(self, what: str) -> LedgerError:
        return LedgerError(f"ledger={str(self.path)!r}: is damaged: {what}. {RESTORE}")

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """One thread at a time; SQLite's errors are turned into ours, with what to do."""
        with self.alone():
            try:
                yield
            except sqlite3.Error as error:
                if _damage(error):
                    raise self._damaged(str(error)) from error
                text = str(error).lower()
                fix = next((fix for sign, fix in _FIXES.items() if sign in text), _VERIFY)
                raise LedgerError(f"ledger={str(self.path)!r}: {error}. Nothing was recorded. {fix}") from error
            except OSError as error:
                raise LedgerError(f"ledger={str(self.path)!r}: {error}. Nothing was recorded.") from error


def _damage(error: sqlite3.Error) -> bool:
    """Whether the content of the file is wrong: a full disk, a lock or a closed connection leaves it whole."""
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_OK) & 0xFF  # without the extension of the code
    return code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB) or "could not decode" in str(error).lower()


_VERIFY = "Whether the file is whole: pate ledger verify."
_FIXES = {
    "readonly": "Make the file and its folder writable: a release that cannot be charged is not made.",
    "full": "Free some space, then run again.",
    "locked": f"Another process held it for {WAIT_S:.0f} s; wait for it to end.",
    "busy": f"Another process held it for {WAIT_S:.0f} s; wait for it to end.",
    "unable to open": "Check the path and the rights on its folder.",
    "disk i/o": "Check the disk.",
    "closed database": "This Ledger was closed; open another, Ledger(path).",
}
