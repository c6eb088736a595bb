"""A hash chain in a PostgreSQL database, which several machines use: PATE_LEDGER=postgresql+psycopg://user@host/database.

A transaction locks the one row of the table ``head``, and its COMMIT is on the server's disk before it returns. If the
connection is lost during COMMIT, another one waits for the lock and looks for the entry; if this fails, too, an error is
raised, so that no noise is drawn. No message shows the user or the password in the URL.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import sqlalchemy
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from pate_torch.privacy import chain
from pate_torch.privacy.chain import HashChain, LedgerError, MissingLedgerError

_SCHEMA = (
    "CREATE SCHEMA IF NOT EXISTS pate_ledger",
    "CREATE TABLE entries (seq bigint PRIMARY KEY, hash text NOT NULL UNIQUE, body text NOT NULL)",
    "CREATE TABLE head (id integer PRIMARY KEY CHECK (id = 1), seq bigint NOT NULL, version integer NOT NULL)",
    f"INSERT INTO head VALUES (1, 0, {chain.LEDGER_SCHEMA_VERSION})",
    "CREATE FUNCTION refuse_edit() RETURNS trigger LANGUAGE plpgsql AS"
    " $$ BEGIN RAISE EXCEPTION 'the ledger is append-only'; END $$",
    "CREATE TRIGGER append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON entries"
    " FOR EACH STATEMENT EXECUTE FUNCTION refuse_edit()",
)
_HAS_CHAIN = "SELECT to_regclass('pate_ledger.head') IS NOT NULL"
_STATE = (
    "SELECT version, (SELECT count(*) FROM pg_trigger WHERE tgrelid = 'entries'::regclass AND tgname = 'append_only'"
    " AND tgenabled = 'O'), current_setting('fsync') FROM head"
)
_LOCK = "SELECT seq FROM head FOR UPDATE"
_OPTIONS = (
    "-c search_path=pate_ledger -c synchronous_commit=on -c default_transaction_isolation=read\\ committed"
    f" -c lock_timeout={chain.LOCK_TIMEOUT_SECONDS:.0f}s"
    f" -c idle_in_transaction_session_timeout={chain.LOCK_TIMEOUT_SECONDS / 2:.0f}s"  # frees a lost machine's lock
)


class PostgresConnection:
    """The part of ``sqlite3.Connection`` that a ``HashChain`` uses. The first statement begins a transaction.

    ``place`` is the URL without user and password.
    """

    def __init__(self, url: str, readonly: bool) -> None:
        self._url = parse_url(url)
        self.place = str(self._url._replace(username=None, password=None, query=sqlalchemy.util.EMPTY_DICT))
        options = f"{_OPTIONS} -c default_transaction_read_only={readonly}"
        settings = {"options": options, "client_encoding": "utf8", "connect_timeout": 10, "tcp_user_timeout": 60_000}
        self._engine = sqlalchemy.create_engine(
            self._url, pool_pre_ping=True, hide_parameters=True, connect_args=settings
        )
        self._connection: sqlalchemy.Connection | None = None

    @property
    def in_transaction(self) -> bool:
        return self._connection is not None

    def execute(self, statement: str, values: Mapping[str, Any] | None = None) -> Any:
        if self._connection is None:
            self._connection = self._engine.connect()  # replaces a lost connection
        return self._connection.execute(sqlalchemy.text(statement), values)

    def commit(self) -> None:
        """Write the transaction to the server's disk. Raises LedgerError if it may be written or not."""
        assert self._connection is not None
        newest_hash = self.execute("SELECT hash FROM entries ORDER BY seq DESC LIMIT 1").scalar()
        try:
            self._connection.commit()
        except SQLAlchemyError:
            if not self._is_written(newest_hash):
                raise
        finally:
            self.rollback()

    def _is_written(self, entry_hash: str) -> bool:
        self.rollback()
        try:
            self.execute(_LOCK)  # the server holds this lock until it has ended the lost transaction
            return self.execute("SELECT 1 FROM entries WHERE hash = :hash", {"hash": entry_hash}).first() is not None
        except SQLAlchemyError as error:
            raise LedgerError(
                f"ledger={self.place!r}: the connection was lost while an entry was written"
                f" ({self.format_error(error)}). No noise was drawn after it. If the entry was written, its charge"
                " stays: pate ledger show."
            ) from None

    def rollback(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(SQLAlchemyError):
                connection.close()

    def close(self) -> None:
        self._engine.dispose()

    def format_error(self, error: SQLAlchemyError) -> str:
        """Return the first line of an error's text, without user and password."""
        text = str(error.orig if isinstance(error, DBAPIError) else error).strip().partition("\n")[0].rstrip(".")
        text = text.replace(f'"{self._url.username}"', '"***"')
        return text.replace(str(self._url.password), "***") if self._url.password else text


class PostgresChain(HashChain):
    """An open chain in the schema ``pate_ledger`` of a database.

    With ``source`` a new chain gets its entries and a last one, "arrived". The source then ends with an entry "moved",
    which is on the disk before the new chain is: at no time both accept charges. Repeat an interrupted call.

    Raises:
        LedgerError: The database cannot be used, or its chain is missing (``create=False``), cut short or changed.
    """

    _BEGIN, _BEGIN_READING = _LOCK, "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ"
    _INSERT = f"WITH counted AS (UPDATE head SET seq = :seq) {HashChain._INSERT}"
    _COUNT = "SELECT seq FROM head"
    _db: PostgresConnection

    def __init__(
        self, url: str, *, create: bool = True, readonly: bool = False, source: HashChain | None = None
    ) -> None:
        self._db = PostgresConnection(url, readonly)
        self.place = self._db.place
        self._begin_use()
        try:
            if create and not readonly:
                with self._translated_errors():
                    self._create(source)
            self.check_file()
        except LedgerError:
            self._db.close()
            raise

    def _create(self, source: HashChain | None) -> None:
        try:
            self._db.execute("SELECT pg_advisory_xact_lock(0)")  # of two processes, one creates the chain
            if self._db.execute(_HAS_CHAIN).scalar():
                return
            for statement in _SCHEMA:
                self._db.execute(statement)
            for row in [chain.encode_genesis()] if source is None else self._end(source):
                self._db.execute(self._INSERT, row)
            self._db.commit()
        finally:
            self._db.rollback()

    def _end(self, source: HashChain) -> list[dict[str, Any]]:
        """End a chain, and return the rows of this one."""
        with source.transaction():
            source.read_new_entries()
            if source.read_last_entry().facts.get("to") != self.place:
                source.append("moved", "", {"to": self.place})
            rows = source.read_rows()
        return [*rows, chain.encode_entry(len(rows) + 1, "arrived", "", {"from": source.place}, rows[-1]["hash"])]

    def check_file(self) -> None:
        """Check the version, the guard against edits, and that the server writes commits to its disk."""
        with self._snapshot():
            if not self._db.execute(_HAS_CHAIN).scalar():
                fix = "Move yours to it (pate ledger move), or correct PATE_LEDGER."
                raise MissingLedgerError(f"ledger={self.place!r}: holds no ledger. {fix}")
            state = self._db.execute(_STATE).all()
        if state != [(chain.LEDGER_SCHEMA_VERSION, 1, "on")]:
            raise self._damaged_error(f"version, guards against edits and fsync are {state}")

    @contextmanager
    def _translated_errors(self) -> Iterator[None]:
        """Block other threads, and convert errors of the database to a ``LedgerError`` without credentials."""
        with self.exclusive_access():
            try:
                yield
            except SQLAlchemyError as error:
                fix = "Check that the server runs and what you may do there (docs/ledger.md), then repeat the call."
                message = f"{self._db.format_error(error)}. Nothing was recorded. {fix}"
                raise LedgerError(f"ledger={self.place!r}: {message}") from None


def parse_url(url: str) -> sqlalchemy.URL:
    """Parse the URL of a database. The error for another value does not quote it, because it may hold a password."""
    with suppress(SQLAlchemyError, ValueError):
        parsed = sqlalchemy.make_url(url)
        if parsed.drivername == "postgresql+psycopg" and parsed.database and "@" not in (parsed.host or ""):
            return parsed
    problem = "must be postgresql+psycopg://USER@HOST/DATABASE, with %40 for an @ in the password"
    raise LedgerError(f"PATE_LEDGER: {problem}. The value is not shown, because it may hold a password.")
