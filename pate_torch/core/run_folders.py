"""Names and folders of runs, and locks on folders.

A lock is a file that at most one process holds by flock (``filelock``). The holder deletes the file when it releases
the lock. The operating system releases the lock of a killed process, whose lock file stays behind without a holder.

This module does not import torch, so that ``--help`` and shell completion are quick.
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
_PARTIAL_FILE_PATTERN = re.compile(r"\.(tmp\w{6}|.+\.[0-9a-f]{12})")
"""Names of the unfinished files of safetensors and of ``files.atomic_replacement``."""
_RELEASE_SECONDS = 0.05  # time to wait for a lock that its holder may be releasing


def get_run_id() -> str:
    """Return the same name in all ranks of a run: PATE_RUN_ID, else the launcher's id, else a name made of the time."""
    torchrun_id, slurm_id = os.environ.get("TORCHELASTIC_RUN_ID", "none"), os.environ.get("SLURM_JOB_ID")
    run_id = os.environ.get("PATE_RUN_ID") or (torchrun_id if torchrun_id != "none" else None)
    if run_id or slurm_id:
        return _check_safe_name(run_id or f"slurm-{slurm_id}")
    return f"torchrun-{os.getppid()}" if "RANK" in os.environ else make_unique_run_id()


def make_unique_run_id() -> str:
    """Return the time in microseconds and four random hexadecimal digits: a different name in every call."""
    return f"{datetime.now():%Y-%m-%d_%H-%M-%S-%f}-{secrets.token_hex(2)}"


def create_protected_folder(folder: Path) -> None:
    """Create a folder and its parents, and withdraw write permission for other users from the folder and its parent."""
    for parent_folder in reversed((folder, *folder.parents)):  # mkdir(parents=True) would ignore the mode of parents
        parent_folder.mkdir(mode=0o755, exist_ok=True)
    for parent_folder in (folder, folder.parent):
        with contextlib.suppress(OSError):  # the folder belongs to another user
            parent_folder.chmod(parent_folder.stat().st_mode & ~0o022)


def get_user_store() -> Path:
    """Return the default folder of this user's ledger and teachers, which is independent of the working directory."""
    import platformdirs

    return platformdirs.user_data_path("pate_torch")


def find_config_folder() -> str:
    """Return the folder of the YAML files: inside the installed package, or beside the package in a checkout."""
    package = Path(__file__).resolve().parent.parent
    packaged_folder = package / "conf"
    return str(packaged_folder if packaged_folder.is_dir() else package.parent / "conf")


def get_home_folder(root: object = None) -> str:
    """Return the folder of ledger and teachers: ``root``, else PATE_HOME, else ``get_user_store()``."""
    return str(root or os.environ.get("PATE_HOME") or get_user_store())


def find_home(root: object = None, key: str = "home") -> Path:
    """Return the path of ``get_home_folder(root)`` after ``check_root``, whose ``key`` names the given ``root``."""
    return check_root(get_home_folder(root), key)


def get_runs_folder(root: Path) -> Path:
    """Return the folder of all runs: ``root``/runs, or ``outputs/runs`` if ``root`` is the default folder."""
    return (Path("outputs") if root == get_user_store() else root) / "runs"


def get_run_folder(root: object, dataset: object, mechanism: object) -> str:
    """Return ``<runs>/<dataset>/<mechanism>`` after a check of both names, because Hydra creates the folder first."""
    names = _check_safe_name(dataset, "dataset.name"), _check_safe_name(mechanism, "mechanism.name")
    return str(get_runs_folder(check_root(root)).joinpath(*names))


def check_root(root: object, key: str = "paths.root") -> Path:
    """Return the folder of ledger and teachers with ``~`` expanded, or raise ValueError unless its path is absolute.

    A relative path names another folder in each working directory. The records would have several ledgers, and each
    would admit a whole budget. ``key`` is the setting or argument that gives ``root``, for messages.
    """
    if not isinstance(root, str) or not root.strip():
        fix = "Set PATE_HOME or paths.root to a folder, or unset both."
        raise checks.error(key, root, "must be the path of a folder", fix)
    path = Path(root).expanduser()
    if not path.is_absolute():
        key = "PATE_HOME" if root == get_home_folder() else key
        problem = "must be an absolute path: it is another folder in each working directory, with a budget of its own"
        raise checks.error(key, root, problem, f"For the folder in the working directory write {Path.cwd() / path}.")
    return path


@contextlib.contextmanager
def hold_run_folder(folder: Path) -> Iterator[None]:
    """Lock a run's folder for this process, and remove the files in it that a killed run left unfinished."""

    def refuse(holder: str) -> None:
        fix = "Choose another folder: set another PATE_RUN_ID or paths.run, or unset both."
        raise checks.error("paths.run", str(folder), f"is being written by {holder}", fix)

    create_protected_folder(folder)
    try:
        with hold_lock(folder / LOCK_FILE_NAME, "paths.run", on_wait=refuse):
            remove_partial_files(folder)
            yield
    finally:
        with contextlib.suppress(OSError):
            folder.rmdir()  # fails if the folder is not empty; a refused run wrote nothing


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


def make_hex_id() -> str:
    """Make a random id of 16 hexadecimal digits that starts with a letter, so that Hydra cannot read it as a number."""
    return secrets.choice("abcdf") + secrets.token_hex(8)[1:]


def check_hex_id(key: str, value: object) -> str:
    """Check for the id of teachers or of a release, 16 hexadecimal digits, so that an id cannot be a path."""
    if not re.fullmatch(r"[0-9a-f]{16}", str(value)):
        raise checks.error(key, value, "must be 16 hexadecimal digits", "The table at the end of a run shows the ids.")
    return str(value)


def remove_partial_files(folder: Path) -> None:
    """Remove the unfinished files below a folder. Only the process that holds the folder's lock may call this."""
    for file in folder.rglob(".*"):
        if _PARTIAL_FILE_PATTERN.fullmatch(file.name) and file.is_file():
            file.unlink(missing_ok=True)


@contextlib.contextmanager
def try_hold_lock(path: Path, key: str, *, wait: bool = False) -> Iterator[bool]:
    """Acquire a lock, and yield whether this process holds the lock, which is always true with ``wait``.

    ``key`` is the setting that determines the folder of the file, for messages.
    """
    # A soft lock would stay locked after its process is killed. Any thread of the process may release the lock.
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
                path.unlink()  # before the release, because a waiting process then opens a new file
            lock.release()


@contextlib.contextmanager
def hold_lock(path: Path, key: str, *, on_wait: Callable[[str], object]) -> Iterator[None]:
    """Hold a lock like ``try_hold_lock``. If another process holds the lock, call ``on_wait`` and wait for the lock.

    ``on_wait`` is called with a text like "process 7 on node1 since 2026-01-01T00:00:00+00:00", and may raise an error.
    """
    with contextlib.ExitStack() as exit_stack:
        if not exit_stack.enter_context(try_hold_lock(path, key)):
            holder = "another process"
            with contextlib.suppress(OSError, ValueError):  # the holder is acquiring or releasing the lock right now
                holder = "process {} on {} since {}".format(*json.loads(path.read_text()))
            on_wait(holder)
            exit_stack.enter_context(try_hold_lock(path, key, wait=True))
        yield


def try_lock_descriptor(descriptor: int, path: Path, key: str) -> bool:
    """Lock an open file until it is closed, or return False if another process holds the lock."""
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
        rule = f"is in a folder where files cannot be locked ({reason}), so two runs could overwrite each other's files"
        fix = "Use a folder on a local disk of Linux, macOS or WSL, for example by PATE_HOME."
        raise checks.error(key, str(path), rule, fix) from error
