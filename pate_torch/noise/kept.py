"""PRIVATE. Noise that a suspended release goes on with, sealed: the ledger remembers the hash of its file."""

from __future__ import annotations

import hashlib
import json
import secrets
from pathlib import Path

from pate_torch.core.files import private_folder, replacing

README = """PRIVATE: do not publish, do not share.

Noise that releases under way go on with, such as the thresholds of sparse vectors: whoever knows it can take it off the
answers. Keep it together with the privacy ledger beside this folder, which remembers its hash; without it a release
cannot go on, and stays charged at its worst.
"""


def seal(path: Path, kept: dict[str, float]) -> str:
    """Write what is kept, whole or not at all; returns the hash of the file, "" where nothing is kept."""
    if not kept:
        path.unlink(missing_ok=True)
        return ""
    # Salted: a hash of the noise alone could be tried against all the noise there is.
    content = json.dumps({"salt": secrets.token_hex(16), "kept": kept}).encode()
    private_folder(path.parent, README)
    with replacing(path) as temporary:
        temporary.write_bytes(content)
    return hashlib.sha256(content).hexdigest()


def unseal(path: Path) -> tuple[dict[str, float], str]:
    """What was kept, and the hash of the file; nothing where there is no file, or a damaged one."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return {}, ""
    digest = hashlib.sha256(content).hexdigest()
    try:
        return json.loads(content)["kept"], digest
    except (ValueError, KeyError, TypeError):
        return {}, digest  # which the ledger does not know
