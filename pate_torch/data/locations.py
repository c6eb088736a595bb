"""Where data sets lie on disk, and the one message for a data set that is not there."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from pate_torch.core import checks

DATA_ROOT_VARIABLE = "PATE_DATA"
DEFAULT_ROOT = "data"
_NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def get_data_root(root: str | os.PathLike[str] | None) -> Path:
    """Folder of all data sets: ``root``, else the environment variable PATE_DATA, else ``data``."""
    return _to_path("data_root", root or os.environ.get(DATA_ROOT_VARIABLE) or DEFAULT_ROOT)


def get_benchmark_folder(path: str | os.PathLike[str] | None, root: str | os.PathLike[str] | None) -> Path:
    """The folder of a benchmark: ``dataset.path`` where given, else the data root."""
    return _to_path("dataset.path", path) if path else get_data_root(root)


def _to_path(key: str, path: str | os.PathLike[str]) -> Path:
    if not isinstance(path, str | os.PathLike):
        raise checks.error(key, path, "must be the path of a folder or file")
    return Path(path).expanduser()


def resolve_path(key: str, path: str | os.PathLike[str] | None, root: str | os.PathLike[str] | None) -> Path:
    """A user's file or folder, taken from the working directory or else from the data root.

    Args:
        key: The setting that names it, for messages.
        path: As the user wrote it.
        root: The data root.

    Raises:
        ValueError: It is missing.
    """
    if not path:
        raise checks.error(key, path, "must be the path of the data", f"Set {key}=/path/to/the/data.")
    user_path = _to_path(key, path)
    for candidate in (user_path, get_data_root(root) / user_path):
        if candidate.exists():
            return candidate
    tried_paths = (
        f"{user_path.absolute()}"
        if user_path.is_absolute()
        else f"{user_path.absolute()} and {get_data_root(root) / user_path}"
    )
    raise checks.error(key, str(path), "must exist", f"Looked for {tried_paths}; set {key} or data_root.")


def missing_data_error(name: str, folder: Path, reason: str = "") -> ValueError:
    """The error of a benchmark that is not on disk."""
    return checks.error(
        "dataset.name",
        name,
        f"was not found in {folder.absolute()}" + (f" ({reason})" if reason else ""),
        f"Fetch it with dataset.download=true, or set data_root (or the environment variable {DATA_ROOT_VARIABLE}) "
        "to the folder that holds it.",
    )


def check_name(name: Any) -> str:
    """The declared name of a data set: the ledger's account and part of a folder name."""
    if not isinstance(name, str) or not _NAME_PATTERN.fullmatch(name):
        raise checks.error(
            "dataset.name", name, "must be letters, digits, '.', '_' and '-', starting with one of the first two"
        )
    return name
