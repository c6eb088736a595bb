"""Files that are written whole or not at all, PRIVATE folders, tensors on disk, digests, and escaped names."""

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

PRIVATE_README = """PRIVATE: do not publish, and do not copy to where others can read it.

What lies here was computed from private records without noise: teachers, votes, accuracies, prices that depend on the
votes, the result of an attack. Whoever has it can learn about single records; no privacy guarantee covers it. Choosing
a parameter of a later release after a look at it is a release too, one that no ledger charges.
Keep teachers together with the privacy ledger beside them, which remembers what was released from these data. What may
be published lies in the folder `release` of a run.
"""
PRIVATE_FILE_MODE, SHARED_FILE_MODE = 0o600, 0o644


def create_private_folder(path: Path, readme_text: str = PRIVATE_README) -> Path:
    """Create a folder that only its owner can enter, with a README that says why, and return it."""
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    path.chmod(0o700)
    readme_path = path / "README"
    if not readme_path.exists():
        readme_path.write_text(readme_text)
    return path


@contextlib.contextmanager
def atomic_replacement(path: Path, mode: int = PRIVATE_FILE_MODE) -> Iterator[Path]:
    """Yield a temporary path beside ``path``, with a random name; at the end that file replaces ``path``."""
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
    """Write a file whole or not at all; a link at ``path`` is replaced and not followed."""
    # Mode x fails where anything has the name, a link too.
    with atomic_replacement(path, SHARED_FILE_MODE) as temporary, open(temporary, "xb") as file:
        file.write(content.encode() if isinstance(content, str) else content)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a safetensors file; a ValueError names a file that is missing, damaged or another kind."""
    try:
        return load_file(path)
    except (OSError, SafetensorError, ValueError) as error:
        raise ValueError(f"{path}: missing, damaged or not a safetensors file") from error


def compute_file_digest(path: Path) -> str:
    """Compute the SHA-256 of a file, in hexadecimal digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def compute_tensor_digest(x: Tensor) -> str:
    """Compute the SHA-256 of a tensor's type, shape and content, in hexadecimal digits."""
    header = json.dumps([str(x.dtype), list(x.shape)]).encode()
    return hashlib.sha256(header + bytes(get_tensor_bytes(x))).hexdigest()


def get_tensor_bytes(x: Tensor) -> memoryview:
    """Return the bytes of a tensor, for hashing."""
    return x.detach().cpu().contiguous().numpy().data.cast("B") if x.numel() else memoryview(b"")


def escape_control_chars(text: str) -> str:
    """Write out the control characters of a text, so that no terminal obeys them."""
    if text.isprintable():
        return text
    return "".join(c.encode("unicode_escape").decode() if unicodedata.category(c) == "Cc" else c for c in text)


def escape_spreadsheet_cell(name: str) -> str:
    """Put an apostrophe before a text that a spreadsheet would compute as a formula; numbers stay as they are."""
    name = escape_control_chars(name)
    with contextlib.suppress(ValueError):
        if math.isfinite(float(name)):
            return name
    return f"'{name}" if name.startswith(("=", "+", "-", "@", "\t", "\r", "'")) else name
