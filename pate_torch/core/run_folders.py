"""Names and places of runs, and locks on their folders.

A lock is a file that one process at a time holds by flock (``filelock``). Its holder deletes the file when it releases
the lock, and the system releases the lock of a process that ends: a lock file that nobody holds was left behind by a
killed process.

Importing this module does not import torch, so that ``--help`` and shell completion stay quick.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import socket
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path

import filelock

from pate_torch.core import checks

LOCK_FILE_NAME = ".lock"
_PARTIAL_FILE_PATTERN = re.compile(r"\.(tmp\w{6}|.+\.partial|.+\.[0-9a-f]{12})")
"""Names of unfinished files: of safetensors, of ``replace`` and of ``atomic_replacement``."""
_RELEASE_SECONDS = 0.05
"""How long a lock may still look held while its holder releases it."""


def get_run_id() -> str:
    """Return one name for all ranks of a run: PATE_RUN_ID, else the launcher's id, else a name made of the time."""
    torchrun_id, slurm_id = os.environ.get("TORCHELASTIC_RUN_ID", "none"), os.environ.get("SLURM_JOB_ID")
    run_id = os.environ.get("PATE_RUN_ID") or (torchrun_id if torchrun_id != "none" else None)
    if run_id or slurm_id:
        return _check_safe_name(run_id or f"slurm-{slurm_id}")
    return f"torchrun-{os.getppid()}" if "RANK" in os.environ else make_unique_run_id()


def make_unique_run_id() -> str:
    """Return the time to the microsecond with four random digits: a different name in every call."""
    return f"{datetime.now():%Y-%m-%d_%H-%M-%S-%f}-{secrets.token_hex(2)}"


def create_protected_folder(folder: Path) -> None:
    """Create a folder and those above it; neither the folder nor its parent can be written by others afterwards."""
    for parent_folder in reversed((folder, *folder.parents)):
        if not parent_folder.exists():
            parent_folder.mkdir(mode=0o755, exist_ok=True)
    for parent_folder in (folder, folder.parent):
        with contextlib.suppress(OSError):  # the folder belongs to another user
            parent_folder.chmod(parent_folder.stat().st_mode & ~0o022)


def get_user_store() -> Path:
    """Return the folder of this user's ledger and teachers, which does not depend on the working directory."""
    import platformdirs

    return platformdirs.user_data_path("pate_torch")


def find_config_folder() -> str:
    """Return the folder of the configuration: inside the installed package, or beside it in a checkout."""
    package = Path(__file__).resolve().parent.parent
    packaged_folder = package / "conf"
    return str(packaged_folder if packaged_folder.is_dir() else package.parent / "conf")


def get_home_folder(root: object = None) -> str:
    """Return the folder of ledger and teachers: ``root``, else PATE_HOME, else the store of this user."""
    return str(root or os.environ.get("PATE_HOME") or get_user_store())


def get_runs_folder(root: Path) -> Path:
    """Return the folder of all runs: in ``root``; for the user's store, ``outputs/runs`` of the working directory."""
    return (Path("outputs") if root == get_user_store() else root) / "runs"


def get_run_folder(root: object, dataset: object, mechanism: object) -> str:
    """Return ``<runs>/<dataset>/<mechanism>``; names are checked here because Hydra creates the folder first of all."""
    names = _check_safe_name(dataset, "dataset.name"), _check_safe_name(mechanism, "mechanism.name")
    return str(get_runs_folder(check_root(root)).joinpath(*names))


def check_root(root: object) -> Path:
    """Return the folder of ledger and teachers, with ``~`` expanded; an empty path would be the working directory."""
    if not isinstance(root, str) or not root.strip():
        fix = "Set PATE_HOME or paths.root, or unset both."
        raise checks.error("paths.root", root, "must be the path of a folder", fix)
    return Path(root).expanduser()


@contextlib.contextmanager
def hold(folder: Path) -> Iterator[None]:
    """Lock a run's folder for this process, and remove the unfinished files of a killed run in it.

    Raises:
        ValueError: Another run is writing into the folder.
    """

    def refuse(holder: str) -> None:
        fix = "Give this run a folder of its own: another PATE_RUN_ID or paths.run, or none."
        raise checks.error("paths.run", str(folder), f"is being written by {holder}", fix)

    create_protected_folder(folder)
    try:
        with hold_lock(folder / LOCK_FILE_NAME, "paths.run", on_wait=refuse):
            remove_partial_files(folder)
            yield
    finally:
        with contextlib.suppress(OSError):
            folder.rmdir()  # removes an empty folder only: a refused run wrote nothing


def remove_killed_run_files(root: Path) -> None:
    """Remove the unfinished files of all killed runs under ``root``."""
    for lock in get_runs_folder(root).glob(f"*/*/*/{LOCK_FILE_NAME}"):
        with contextlib.suppress(FileNotFoundError), try_hold_lock(lock, "paths.root") as is_held:
            if is_held:
                remove_partial_files(lock.parent)


def _check_safe_name(name: object, key: str = "PATE_RUN_ID") -> str:
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", name):
        raise checks.error(key, name, "must be letters, digits, '.', '_' or '-', at most 128 of them")
    return name


def check_hex_id(key: str, value: object) -> str:
    """Check for the id of teachers or of a release, 16 hexadecimal digits, so that no id can be a path."""
    if not re.fullmatch(r"[0-9a-f]{16}", str(value)):
        raise checks.error(key, value, "must be 16 hexadecimal digits", "Ids are shown in the closing table of a run.")
    return str(value)


def remove_partial_files(folder: Path) -> None:
    """Remove the unfinished files below a folder. Only the process that holds the folder's lock may call this."""
    for file in folder.rglob(".*"):
        if _PARTIAL_FILE_PATTERN.fullmatch(file.name) and file.is_file():
            file.unlink(missing_ok=True)


@contextlib.contextmanager
def try_hold_lock(path: Path, key: str, *, wait: bool = False) -> Iterator[bool]:
    """Hold a lock, and yield whether it is held: with ``wait``, it always is.

    Args:
        path: The lock file.
        key: The setting that names the file's folder, for messages.
        wait: Whether to wait for the process that holds the lock now.

    Raises:
        ValueError: The file system has no locks.
    """
    # No soft lock, whose file outlives a killed process; one lock for all threads, as another one may release it.
    lock = filelock.UnixFileLock(path, mode=0o600, thread_local=False, fallback_to_soft=False)
    try:
        with contextlib.suppress(filelock.Timeout), _refuse_unlockable(path, key):
            lock.acquire(timeout=-1 if wait else _RELEASE_SECONDS, poll_interval=0.1 if wait else 0.01)
        if lock.is_locked:
            since = datetime.now().astimezone().isoformat(timespec="seconds")
            path.write_text(json.dumps([os.getpid(), socket.gethostname(), since]))
        yield lock.is_locked
    finally:
        if lock.is_locked:  # not in a forked child, where filelock closes the inherited descriptor
            with contextlib.suppress(OSError):
                path.unlink()  # before the release: a process that waits opens a new file
            lock.release()


@contextlib.contextmanager
def hold_lock(path: Path, key: str, *, on_wait: Callable[[str], object]) -> Iterator[None]:
    """Hold a lock like ``try_hold_lock``; where another process holds it, call ``on_wait`` and wait.

    ``on_wait`` gets "process 7 on node1 since 2026-01-01T00:00:00+00:00", and may raise an error.
    """
    with contextlib.ExitStack() as exit_stack:
        if not exit_stack.enter_context(try_hold_lock(path, key)):
            holder = "another process"
            with contextlib.suppress(OSError, ValueError):  # the holder is just taking or releasing the lock
                holder = "process {} on {} since {}".format(*json.loads(path.read_text()))
            on_wait(holder)
            exit_stack.enter_context(try_hold_lock(path, key, wait=True))
        yield


def try_lock_descriptor(descriptor: int, path: Path, key: str) -> bool:
    """Lock an open file until it is closed; False if another process holds it. Raises like ``try_hold_lock``."""
    with _refuse_unlockable(path, key):
        return filelock.lock_descriptor(descriptor, blocking=False)


@contextlib.contextmanager
def _refuse_unlockable(path: Path, key: str) -> Iterator[None]:
    try:
        yield
    except (FileNotFoundError, PermissionError, filelock.Timeout):
        raise
    except (OSError, NotImplementedError) as error:
        reason = error.strerror if isinstance(error, OSError) else "this system has no flock"
        message = f"is where files cannot be locked ({reason}), and two runs at once could overwrite each other's"
        raise checks.error(key, str(path), message, "Use a local disk (PATE_HOME), of Linux, macOS or WSL.") from error
