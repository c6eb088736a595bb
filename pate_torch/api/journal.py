"""Journal file of the points, labels and costs that a PrivateLabeler has released, with one JSON object per line.

The whole journal is releasable: queries are public, and answers are released. Each line is written to disk before its
answers are returned. An incomplete last line is cut off: its answers were never returned, and they stay charged.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pate_torch.core import checks
from pate_torch.core.run_folders import try_lock_descriptor
from pate_torch.privacy.records import DataSpec

JOURNAL_FORMAT = "pate_torch.journal/1"


def compute_key(point: Tensor) -> str:
    """Compute the SHA-256 of one public point."""
    content = point.detach().cpu().contiguous()
    return hashlib.sha256(f"{content.dtype}{tuple(content.shape)}".encode() + content.numpy().tobytes()).hexdigest()


def encode(x: Tensor) -> dict[str, Any]:
    """Convert points to JSON values."""
    array = x.detach().cpu().contiguous().numpy()
    return {"dtype": str(array.dtype), "shape": list(array.shape), "data": base64.b64encode(array.tobytes()).decode()}


def decode(fields: dict[str, Any]) -> Tensor:
    """Convert JSON values to points."""
    array = np.frombuffer(base64.b64decode(fields["data"]), dtype=np.dtype(fields["dtype"]))
    return torch.from_numpy(array.reshape(fields["shape"]).copy())


@dataclass(frozen=True)
class JournalEntry:
    """One line of the journal: a kind (block, answers, close, student or hypothesis) and JSON values."""

    kind: str
    facts: dict[str, Any]


class Journal:
    """The open journal file, which one process locks at a time. ``lines`` holds the entries.

    Args:
        path: Path of the file, which is created if it does not exist.
        account: Name of the account that pays for the answers.
        spec: Public facts about the points.

    Raises:
        ValueError: The file is damaged or locked by another process, or belongs to another account or data set.
    """

    def __init__(self, path: Path | str, *, account: str, spec: DataSpec) -> None:
        self.path = Path(path)
        shape, classes = list(spec.input_shape), spec.num_classes
        header = {"format": JOURNAL_FORMAT, "account": account, "shape": shape, "classes": classes}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._content = hashlib.sha256()
        self._file = open(self.path, "a+b", buffering=0)  # noqa: SIM115 (the open file holds the lock)
        try:
            if not try_lock_descriptor(self._file.fileno(), self.path, "journal"):
                raise self.make_error("is held by another labeler", "Close the other labeler first.")
            self.lines = list(self._read_lines(header))
        except ValueError:
            self._file.close()
            raise

    def append(self, kind: str, **facts: Any) -> None:
        self._write({"kind": kind, **facts})
        self.lines.append(JournalEntry(kind, facts))

    @property
    def digest(self) -> str:
        return self._content.hexdigest()

    def close(self) -> None:
        self._file.close()

    def make_error(self, problem: str, fix: str) -> ValueError:
        return checks.error("journal", str(self.path), problem, fix)

    def _read_lines(self, header: dict[str, Any]) -> Iterator[JournalEntry]:
        self._file.seek(0)
        content = self._file.read()
        magic = f'{{"format":"{JOURNAL_FORMAT}"'.encode()
        if content[: len(magic)] != magic[: len(content)]:  # checked before the file is truncated below
            raise self.make_error("is not a journal of this version", "Choose another file.")
        complete_length = content.rfind(b"\n") + 1
        if complete_length < len(content):
            self._file.truncate(complete_length)
        self._content.update(content[:complete_length])
        texts = content[:complete_length].splitlines()
        if not texts:
            self._write(header)
            return
        try:
            stored_header, *entries = [json.loads(text) for text in texts]
            lines = [JournalEntry(entry.pop("kind"), entry) for entry in entries]
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise self.make_error(f"is damaged ({error})", "Restore a backup, or begin another journal.") from error
        for name, value in header.items():
            if stored_header.get(name) != value:
                raise self.make_error(f"has {name} {stored_header.get(name)!r}, not {value!r}", "Choose another file.")
        yield from lines

    def _write(self, entry: dict[str, Any]) -> None:
        line = json.dumps(entry, separators=(",", ":"), allow_nan=False).encode() + b"\n"
        size = self._file.seek(0, os.SEEK_END)
        try:
            if self._file.write(line) != len(line):
                raise OSError(f"{self.path}: only part of an entry was written to the disk")
            os.fsync(self._file.fileno())
            self._content.update(line)
        except BaseException:
            self._file.truncate(size)  # otherwise the next entry would follow half a line
            raise
