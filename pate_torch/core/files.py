"""Atomic writing of files, PRIVATE folders, tensors on disk, digests, and escaped names."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import secrets
import unicodedata
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

PRIVATE_README = """PRIVATE: do not publish this folder, and do not copy it to where others can read it.

The files were computed from private records without noise: teachers, votes, accuracies, costs that depend on the
votes, the result of an attack. A reader of the files can learn about single records, and no privacy guarantee covers
this. If you choose a parameter of a later release after reading the files, no ledger charges for this choice.
Keep teachers together with the privacy ledger beside them, which records the releases from these data. The folder
`release` of a run holds all files that may be published.
"""
PRIVATE_FILE_MODE, SHARED_FILE_MODE = 0o600, 0o644


def create_private_folder(path: Path, readme_text: str = PRIVATE_README) -> Path:
    """Create a folder that only its owner can enter, with a README that gives the reason, and return its path."""
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    path.chmod(0o700)
    readme_path = path / "README"
    if not readme_path.exists():
        readme_path.write_text(readme_text)
    return path


@contextlib.contextmanager
def atomic_replacement(path: Path, mode: int = PRIVATE_FILE_MODE) -> Iterator[Path]:
    """Yield a temporary path beside ``path``; when the ``with`` block ends, the temporary file replaces ``path``."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
    try:
        yield temporary
        temporary.chmod(mode)
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
        folder = os.open(path.parent, os.O_RDONLY)  # so that the new name survives a power cut
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    finally:
        temporary.unlink(missing_ok=True)


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file whole or not at all; a symbolic link at ``path`` is replaced and not followed."""
    # Mode x fails if a file or a link has the temporary name already.
    with atomic_replacement(path, SHARED_FILE_MODE) as temporary, open(temporary, "xb") as file:
        file.write(content.encode() if isinstance(content, str) else content)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a safetensors file, or raise ValueError if the file is missing or damaged."""
    try:
        return load_file(path)
    except (OSError, SafetensorError, ValueError) as error:
        raise ValueError(f"{path}: the file is missing, damaged or not a safetensors file") from error


def compute_file_digest(path: Path) -> str:
    """Compute the SHA-256 of a file, in hexadecimal digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def compute_tensor_digest(x: Tensor) -> str:
    """Compute the SHA-256 of a tensor's type, shape and content, in hexadecimal digits."""
    header = json.dumps([str(x.dtype), list(x.shape)]).encode()
    return hashlib.sha256(header + bytes(get_tensor_bytes(x))).hexdigest()


def get_tensor_bytes(x: Tensor) -> memoryview:
    """Return the bytes of a tensor."""
    return x.detach().cpu().contiguous().numpy().data.cast("B") if x.numel() else memoryview(b"")


def escape_control_chars(text: str) -> str:
    """Replace control characters by escape sequences, so that a terminal does not execute them."""
    if text.isprintable():
        return text
    return "".join(c.encode("unicode_escape").decode() if unicodedata.category(c) == "Cc" else c for c in text)


def escape_spreadsheet_cell(name: str) -> str:
    """Prefix an apostrophe to a text that a spreadsheet would compute as a formula, unless the text is a number."""
    name = escape_control_chars(name)
    with contextlib.suppress(ValueError):
        if math.isfinite(float(name)):
            return name
    return f"'{name}" if name.startswith(("=", "+", "-", "@", "\t", "\r", "'")) else name
