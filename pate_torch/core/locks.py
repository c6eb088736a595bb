"""Folders and files that one process holds at a time, and what killed processes left half written there.

A place is held by a lock on a file beside it. The system releases the lock when its process ends, however that ends;
the file is removed by whoever releases it in good order, so a file that nobody holds is of a process that was killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path

from pate_torch.core import checks

try:
    import fcntl
except ImportError:  # elsewhere than on POSIX
    fcntl = None  # type: ignore[assignment]

_HALF_WRITTEN = re.compile(r"\.(tmp\w{6}|.+\.partial|.+\.[0-9a-f]{12})")  # by safetensors; ``replace``; ``replacing``
_open: set[int] = set()


def seize(file: int, path: Path, key: str, *, wait: bool = False) -> bool:
    """Lock an open file for this process, until it is closed; False where another has it and this does not wait.

    Args:
        file: Descriptor.
        path: That file's path, for messages.
        key: The setting that names it, for messages.
        wait: Whether to wait for the other process.

    Raises:
        ValueError: Files cannot be locked there: two runs could overwrite each other's.
    """
    if fcntl is None:
        raise _unlockable(key, path, "this system has no flock")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError as error:
        raise _unlockable(key, path, str(error.strerror)) from error
    return True


def _unlockable(key: str, path: Path, why: str) -> ValueError:
    what = f"is where files cannot be locked ({why}), and two runs at once could overwrite each other's"
    return checks.fail(key, str(path), what, "Use a local disk (PATE_HOME), of Linux, macOS or WSL.")


@contextlib.contextmanager
def hold(path: Path, key: str, *, busy: Callable[[str], object]) -> Iterator[None]:
    """Hold the place that a lock file stands for.

    Args:
        path: The lock file.
        key: The setting that names it, for messages.
        busy: Told who has it, before this waits for its end.
    """
    taken = _take(path, key, wait=False)
    if taken is None:
        busy(_holder(path))
        taken = _take(path, key, wait=True)
        assert taken is not None
    with _letting_go(path, taken):
        yield


@contextlib.contextmanager
def try_hold(path: Path, key: str) -> Iterator[bool]:
    """Like ``hold``, without waiting: whether it is held."""
    taken = _take(path, key, wait=False)
    with contextlib.nullcontext() if taken is None else _letting_go(path, taken):
        yield taken is not None


def sweep(folder: Path) -> None:
    """Remove the files below that were never finished; only for the process that holds the place.

    No other can know that nobody will finish them.
    """
    for file in folder.rglob(".*"):
        if _HALF_WRITTEN.fullmatch(file.name) and file.is_file():
            file.unlink(missing_ok=True)


def _take(path: Path, key: str, *, wait: bool) -> int | None:
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            if not seize(file, path, key, wait=wait):
                os.close(file)
                return None
            if _same(file, path):
                facts = [os.getpid(), socket.gethostname(), datetime.now().astimezone().isoformat(timespec="seconds")]
                os.ftruncate(file, 0)
                os.pwrite(file, json.dumps(facts).encode(), 0)
                _open.add(file)
                return file
        except BaseException:
            os.close(file)
            raise
        os.close(file)  # its last holder took it away while this waited


def _same(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), os.stat(path))
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def _letting_go(path: Path, file: int) -> Iterator[None]:
    owner = os.getpid()
    try:
        yield
    finally:
        if os.getpid() == owner:
            with contextlib.suppress(OSError):
                path.unlink()
            _open.discard(file)
            os.close(file)


def _holder(path: Path) -> str:
    try:
        pid, host, since = json.loads(path.read_text())
    except (OSError, ValueError):  # it is just being taken or let go of
        return "another process"
    return f"process {pid} on {host} since {since}"


def _forget() -> None:
    """A copy of this process holds nothing: it may outlive this one."""
    while _open:
        os.close(_open.pop())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
