"""Files of released students, which are read with or without torch. A file holds no code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from pate_torch.core import checks

FORMAT = "pate_torch.student/1"
METADATA_KEY = "pate_torch"
STUDENT_FILE = "student.safetensors"


def find_student_file(location: Path | str) -> Path:
    """Find the file of a student: ``location``, or a file in the folder of a run or of a release."""
    location = Path(location)
    for candidate in (location, location / "release" / STUDENT_FILE, location / STUDENT_FILE):
        if candidate.is_file():
            return candidate
    raise checks.error("student", str(location), f"must be a student file or a folder with {STUDENT_FILE}")


def read(path: Path | str, framework: str, device: str = "cpu") -> tuple[dict[str, Any], dict[str, Any]]:
    """Read the facts in the header of a student file, and its tensors by name.

    Args:
        path: Path of the file.
        framework: "pt" for torch tensors, "np" for arrays. The latter imports no torch.
        device: Device of torch tensors.

    Raises:
        ValueError: The file is missing, damaged, or not a student.
    """
    try:
        with safe_open(path, framework=framework, device=device) as file:
            header: dict[str, str] = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except (OSError, SafetensorError) as error:
        raise checks.error("student", str(path), f"is missing or not a safetensors file ({error})") from error
    try:
        facts: Any = json.loads(header.get(METADATA_KEY, "{}"))
    except (ValueError, RecursionError):
        facts = None
    file_format = facts.get("format") if isinstance(facts, dict) else None
    if file_format != FORMAT:
        raise checks.error("student", str(path), f"has format {file_format!r}, not {FORMAT!r}")
    return facts, tensors


def header_error(path: Path | str, error: Exception) -> ValueError:
    """Make the error for a file whose tensors do not fit its header."""
    return checks.error("student", str(path), f"does not fit the network in its header ({error})")
