"""Names and places of runs: one identity for every rank of a run, and releases found again by their id.

Standard library only, so that ``--help`` and shell completion stay quick.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from pate_torch.core import checks, locks

_ID_PATTERN = re.compile(r"[0-9a-f]{16}")
LOCK_FILE_NAME = ".lock"


def get_run_id() -> str:
    """One name for all ranks of a run: PATE_RUN_ID, else the launcher's id, else the time to the microsecond.

    Under torchrun every rank would otherwise take its own time and write into a folder of its own.
    """
    environment = os.environ
    if environment.get("PATE_RUN_ID"):
        return _check_safe_name(environment["PATE_RUN_ID"])
    torchrun_id = environment.get("TORCHELASTIC_RUN_ID", "none")
    if torchrun_id != "none":
        return _check_safe_name(torchrun_id)
    if environment.get("SLURM_JOB_ID"):
        return _check_safe_name(f"slurm-{environment['SLURM_JOB_ID']}")
    if "RANK" in environment:
        return f"torchrun-{os.getppid()}"
    return make_unique_run_id()


def make_unique_run_id() -> str:
    """A name of its own for every call, also for two in one microsecond."""
    return f"{datetime.now():%Y-%m-%d_%H-%M-%S-%f}-{secrets.token_hex(2)}"


def create_protected_folder(folder: Path) -> None:
    """Make a folder with those above it; none that is made or written by a run can be written by others."""
    for parent_folder in reversed((folder, *folder.parents)):
        if not parent_folder.exists():
            parent_folder.mkdir(mode=0o755, exist_ok=True)
    for parent_folder in (folder, folder.parent):
        with contextlib.suppress(OSError):  # of another user
            parent_folder.chmod(parent_folder.stat().st_mode & ~0o022)


def get_user_store() -> Path:
    """The store of this user: the ledger and the teachers, wherever the working directory is."""
    import platformdirs

    return platformdirs.user_data_path("pate_torch")


def find_config_folder() -> str:
    """The folder of the configuration: inside the installed package, or beside it in a checkout."""
    package = Path(__file__).resolve().parent.parent
    packaged_folder = package / "conf"
    return str(packaged_folder if packaged_folder.is_dir() else package.parent / "conf")


def get_home_folder(root: object = None) -> str:
    """The folder of ledger and teachers: ``root``, else PATE_HOME, else the store of this user."""
    return str(root or os.environ.get("PATE_HOME") or get_user_store())


def get_runs_folder(root: Path) -> Path:
    """The folder of all runs: in ``root``, or ``outputs/runs`` of the working directory for the store of this user."""
    return (Path("outputs") if root == get_user_store() else root) / "runs"


def get_run_folder(root: object, dataset: object, mechanism: object) -> str:
    """``<runs>/<dataset>/<mechanism>``: checked here, because Hydra makes it before anybody else looks."""
    runs = get_runs_folder(check_root(root))
    return str(runs / _check_safe_name(dataset, "dataset.name") / _check_safe_name(mechanism, "mechanism.name"))


def check_root(root: object) -> Path:
    """The folder of ledger and teachers, with ``~`` expanded.

    Raises:
        ValueError: An empty one: it would be the working directory, closed to others.
    """
    if not isinstance(root, str) or not root.strip():
        fix = "Set PATE_HOME or paths.root, or unset both."
        raise checks.error("paths.root", root, "must be the path of a folder", fix)
    return Path(root).expanduser()


@contextlib.contextmanager
def hold(folder: Path) -> Iterator[None]:
    """Hold a run's folder for this process alone; what a killed run left half written there is gone.

    Raises:
        ValueError: Another run is writing it.
    """

    def refuse(holder: str) -> None:
        fix = "Give this run a folder of its own: another PATE_RUN_ID or paths.run, or none."
        raise checks.error("paths.run", str(folder), f"is being written by {holder}", fix)

    create_protected_folder(folder)
    try:
        with locks.hold(folder / LOCK_FILE_NAME, "paths.run", on_wait=refuse):
            locks.remove_partial_files(folder)
            yield
    finally:
        with contextlib.suppress(OSError):
            folder.rmdir()  # a refusal wrote nothing into it


def remove_killed_run_files(root: Path) -> None:
    """Remove what killed runs left half written under ``root``."""
    for lock in get_runs_folder(root).glob(f"*/*/*/{LOCK_FILE_NAME}"):
        with contextlib.suppress(FileNotFoundError), locks.try_hold(lock, "paths.root") as is_abandoned:
            if is_abandoned:
                locks.remove_partial_files(lock.parent)


def _check_safe_name(name: object, key: str = "PATE_RUN_ID") -> str:
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", name):
        raise checks.error(key, name, "must be letters, digits, '.', '_' or '-', at most 128 of them")
    return name


def check_hex_id(key: str, value: object) -> str:
    """An id of this project (16 hexadecimal digits), so that no id can be a path.

    Raises:
        ValueError: Anything else.
    """
    text = str(value)
    if not _ID_PATTERN.fullmatch(text):
        raise checks.error(key, value, "must be 16 hexadecimal digits", "Ids are shown in the closing table of a run.")
    return text


def iterate_releases(root: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Every finished release under ``root``, newest first: (its release folder, its release.json)."""
    release_records = []
    for file in get_runs_folder(root).glob("*/*/*/release/release.json"):
        try:
            record = json.loads(file.read_text())
        except (OSError, ValueError, RecursionError):
            continue
        if isinstance(record, dict) and "release_id" in record:
            release_records.append((file.stat().st_mtime_ns, file.parent, record))
    for _, folder, record in sorted(release_records, key=lambda item: item[0], reverse=True):
        yield folder, record


def find_release(root: Path, release_id: object) -> tuple[Path, dict[str, Any]]:
    """The release called ``release_id``, as ``iterate_releases`` yields it.

    Raises:
        ValueError: There is none.
    """
    valid_id = check_hex_id("labels", release_id)
    for folder, record in iterate_releases(root):
        if record["release_id"] == valid_id:
            return folder, record
    raise checks.error(
        "labels",
        release_id,
        f"no such release under {get_runs_folder(root).absolute()}",
        "Run it in the folder of the run that released it, or set PATE_HOME.",
    )
