"""A hash chain in a PostgreSQL database, which several machines use: PATE_LEDGER=postgresql+psycopg://user@host/database.

A transaction locks the one row of the table ``head``, and its COMMIT is on the server's disk before it returns. If the
connection is lost during COMMIT, a new connection waits for the lock and looks for the entry. If it finds none, or if
no connection can be made, an error is raised, so that no noise is drawn. No message shows the user or the password.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import closing, suppress
from typing import Any

import sqlalchemy
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from pate_torch.privacy import chain
from pate_torch.privacy.chain import HashChain, LedgerError

_SCHEMA = (
    "CREATE SCHEMA IF NOT EXISTS pate_ledger",
    "CREATE TABLE entries (seq bigint PRIMARY KEY, hash text NOT NULL UNIQUE, body text NOT NULL)",
    "CREATE TABLE head (id integer PRIMARY KEY CHECK (id = 1), seq bigint NOT NULL, version integer NOT NULL,"
    " name uuid NOT NULL DEFAULT gen_random_uuid())",
    f"INSERT INTO head VALUES (1, 0, {chain.LEDGER_SCHEMA_VERSION})",
    "CREATE FUNCTION refuse_edit() RETURNS trigger LANGUAGE plpgsql AS"
    " $$ BEGIN RAISE EXCEPTION 'the ledger is append-only'; END $$",
    "CREATE TRIGGER append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON entries"
    " FOR EACH STATEMENT EXECUTE FUNCTION refuse_edit()",
)
_EXISTS = "SELECT to_regclass('pate_ledger.head') IS NOT NULL"
_STATE = (
    "SELECT version, tgenabled::text, current_setting('fsync'), current_setting('synchronous_commit')"
    " FROM head, pg_trigger WHERE tgrelid = 'entries'::regclass AND tgname = 'append_only'"
)
_LOCK = "SELECT seq FROM head FOR UPDATE"
_NAME_IF_EMPTY = "SELECT name::text FROM head WHERE seq = 0 FOR UPDATE"
_OPTIONS = (
    "-c search_path=pate_ledger -c synchronous_commit=on -c default_transaction_isolation=read\\ committed"
    f" -c lock_timeout={chain.LOCK_TIMEOUT_SECONDS}s"
    f" -c idle_in_transaction_session_timeout={chain.LOCK_TIMEOUT_SECONDS / 2}s"  # frees the lock of a lost machine
)
_NOTHING = "Nothing was recorded"
_UNKNOWN = "Whether the last entry was written is unknown. If it is a charge, it may stay; no noise was drawn for it"


class PostgresConnection:
    """A connection with the methods of ``sqlite3.Connection`` that a ``HashChain`` uses.

    The first statement of a transaction connects to the server, and the end of the transaction disconnects.
    """

    def __init__(self, url: str, readonly: bool) -> None:
        problem = "must be postgresql+psycopg://USER@HOST/DATABASE, with %40 for @ in a password. It is not shown"
        with suppress(SQLAlchemyError, ValueError):
            self._url = sqlalchemy.make_url(url)
            parts = f"{self._url.drivername}://{self._url.host}/{self._url.database}"
            is_ambiguous = "@" in parts or url.count("@") > 1  # one @ may belong to the password
            if parts.startswith("postgresql+psycopg:") and self._url.database and not is_ambiguous:
                problem = ""
        if problem:
            raise LedgerError(f"PATE_LEDGER: {problem} here, as it may hold one.")
        self.place = str(self._url._replace(username=None, password=None, query=sqlalchemy.util.EMPTY_DICT))
        options = f"{_OPTIONS} -c default_transaction_read_only={readonly}"
        settings = {"options": options, "client_encoding": "utf8", "connect_timeout": 10, "tcp_user_timeout": 60_000}
        settings["keepalives_idle"] = 30  # seconds after which a server that no longer answers is noticed
        self._engine = sqlalchemy.create_engine(self._url, poolclass=sqlalchemy.NullPool, connect_args=settings)
        self._connection: sqlalchemy.Connection | None = None
        self._outcome = _NOTHING

    def execute(self, statement: str, values: Mapping[str, Any] | None = None) -> Any:
        try:
            self._connection = self._connection or self._engine.connect()
            return self._connection.execute(sqlalchemy.text(statement), values)
        except SQLAlchemyError as error:
            raise self._make_error(error) from None

    def commit(self) -> None:
        """Write the transaction to the server's disk. Raises LedgerError unless it is certain that this was done."""
        assert self._connection is not None
        newest_hash = self.execute("SELECT hash FROM entries ORDER BY seq DESC LIMIT 1").scalar()
        try:
            self._connection.commit()
        except SQLAlchemyError as error:
            self.rollback()
            self._outcome = _UNKNOWN
            self.execute(_LOCK)  # waits until the server has ended the lost transaction
            row = self.execute("SELECT 1 FROM entries WHERE hash = :hash", {"hash": newest_hash}).first()
            self._outcome = _NOTHING
            if row is None:
                raise self._make_error(error) from None
        finally:
            self.rollback()

    def rollback(self) -> None:
        connection, self._connection, self._outcome = self._connection, None, _NOTHING
        if connection is not None:
            with suppress(SQLAlchemyError):
                connection.close()

    close, in_transaction = rollback, property(lambda self: self._connection is not None)

    def _make_error(self, error: SQLAlchemyError) -> LedgerError:
        text = str(error.orig if isinstance(error, DBAPIError) else error).strip().partition("\n")[0].rstrip(".")
        text = re.sub('(user|role) "[^"]*"', r"\1 ***", text.replace(self._url.password or "\n", "***"))
        fix = "Check that the server runs, and your rights there (docs/explanation/ledger.md). Then repeat the call."
        return LedgerError(f"ledger={self.place!r}: {text}. {self._outcome}. {fix}")


class PostgresChain(HashChain):
    """An open chain in the schema ``pate_ledger`` of a database. ``place`` is the URL without user and password.

    A new chain continues the chain ``old``, which then ends with an entry "moved". This entry is on the disk before the
    new chain is, so that never both take charges. The same call continues an interrupted move.
    """

    _BEGIN, _BEGIN_READING = _LOCK, "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ"
    _INSERT = f"WITH counted AS (UPDATE head SET seq = :seq) {HashChain._INSERT}"
    _COUNT = "SELECT seq FROM head"

    def __init__(self, url: str, *, create: bool = True, readonly: bool = False, old: HashChain | None = None) -> None:
        self._begin_use()
        self._db = PostgresConnection(url, readonly)
        self.place = self._db.place
        if create and not readonly:
            with closing(self._db):
                self._create(old)
        self.check_file()

    def _create(self, old: HashChain | None) -> None:
        self._db.execute("SELECT pg_advisory_xact_lock(0)")  # of two processes, one creates the chain
        if not self._db.execute(_EXISTS).scalar():
            for statement in _SCHEMA:
                self._db.execute(statement)
            if old is None:
                self._db.execute(self._INSERT, chain.encode_genesis())
            self._db.commit()
        if old is not None and (name := self._db.execute(_NAME_IF_EMPTY).scalar()):
            for row in self._end(old, f"{self.place} (ledger {name})"):
                self._db.execute(self._INSERT, row)
            self._db.commit()

    def _end(self, old: HashChain, new: str) -> list[dict[str, Any]]:
        """End the old chain by an entry with the name of the new, empty chain. Return the rows of the new chain."""
        with old.transaction():
            old.read_new_entries()
            if old.moved_to != new:
                old.append("moved", "", {"to": new})
            rows = old.read_rows()
        return [*rows, chain.encode_entry(len(rows) + 1, "arrived", "", {"from": old.place}, rows[-1]["hash"])]

    def check_file(self) -> None:
        """Check the version, the guard against edits, and that the server writes commits to its disk."""
        with self._snapshot():
            if not (self._db.execute(_EXISTS).scalar() and self._db.execute(self._COUNT).scalar()):
                fix = "Move yours to it (pate ledger move), or correct PATE_LEDGER."
                raise chain.MissingLedgerError(f"ledger={self.place!r}: holds no ledger. {fix}")
            state = self._db.execute(_STATE).all()
        if state != [(chain.LEDGER_SCHEMA_VERSION, "O", "on", "on")]:
            raise self._damaged_error(f"version, guard against edits, fsync and synchronous_commit are {state}")
