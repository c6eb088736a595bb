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

_PARTIAL_FILE_PATTERN = re.compile(
    r"\.(tmp\w{6}|.+\.partial|.+\.[0-9a-f]{12})"
)  # by safetensors; ``replace``; ``atomic_replacement``
_open_descriptors: set[int] = set()


def try_lock_file(file: int, path: Path, key: str, *, wait: bool = False) -> bool:
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
        raise _cannot_lock_error(key, path, "this system has no flock")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError as error:
        raise _cannot_lock_error(key, path, str(error.strerror)) from error
    return True


def _cannot_lock_error(key: str, path: Path, reason: str) -> ValueError:
    message = f"is where files cannot be locked ({reason}), and two runs at once could overwrite each other's"
    return checks.error(key, str(path), message, "Use a local disk (PATE_HOME), of Linux, macOS or WSL.")


@contextlib.contextmanager
def hold(path: Path, key: str, *, on_wait: Callable[[str], object]) -> Iterator[None]:
    """Hold the place that a lock file stands for.

    Args:
        path: The lock file.
        key: The setting that names it, for messages.
        on_wait: Told who has it, before this waits for its end.
    """
    descriptor = _acquire(path, key, wait=False)
    if descriptor is None:
        on_wait(_format_holder(path))
        descriptor = _acquire(path, key, wait=True)
        assert descriptor is not None
    with _release_on_exit(path, descriptor):
        yield


@contextlib.contextmanager
def try_hold(path: Path, key: str) -> Iterator[bool]:
    """Like ``hold``, without waiting: whether it is held."""
    descriptor = _acquire(path, key, wait=False)
    with contextlib.nullcontext() if descriptor is None else _release_on_exit(path, descriptor):
        yield descriptor is not None


def remove_partial_files(folder: Path) -> None:
    """Remove the files below that were never finished; only for the process that holds the place.

    No other can know that nobody will finish them.
    """
    for file in folder.rglob(".*"):
        if _PARTIAL_FILE_PATTERN.fullmatch(file.name) and file.is_file():
            file.unlink(missing_ok=True)


def _acquire(path: Path, key: str, *, wait: bool) -> int | None:
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            if not try_lock_file(file, path, key, wait=wait):
                os.close(file)
                return None
            if _is_same_file(file, path):
                holder_facts = [
                    os.getpid(),
                    socket.gethostname(),
                    datetime.now().astimezone().isoformat(timespec="seconds"),
                ]
                os.ftruncate(file, 0)
                os.pwrite(file, json.dumps(holder_facts).encode(), 0)
                _open_descriptors.add(file)
                return file
        except BaseException:
            os.close(file)
            raise
        os.close(file)  # its last holder took it away while this waited


def _is_same_file(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), os.stat(path))
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def _release_on_exit(path: Path, file: int) -> Iterator[None]:
    owner_pid = os.getpid()
    try:
        yield
    finally:
        if os.getpid() == owner_pid:
            with contextlib.suppress(OSError):
                path.unlink()
            _open_descriptors.discard(file)
            os.close(file)


def _format_holder(path: Path) -> str:
    try:
        pid, host, since = json.loads(path.read_text())
    except (OSError, ValueError):  # it is just being taken or let go of
        return "another process"
    return f"process {pid} on {host} since {since}"


def _close_inherited_locks() -> None:
    """A copy of this process holds nothing: it may outlive this one."""
    while _open_descriptors:
        os.close(_open_descriptors.pop())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_inherited_locks)
