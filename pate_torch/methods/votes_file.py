"""Votes of teachers trained anywhere: read from a file, checked, and recognized by a keyed hash.

A file holds K x P predictions (one row per teacher, a class in 0..C-1 for each public point) or P x C counts (one row
per point, summing to K): CSV, NPY, or safetensors with a single tensor. Nothing is unpickled, since a pickle runs code.
The owner vouches for what no file can show: that every privacy unit reached one teacher, and for the adjacency.
"""

from __future__ import annotations

import io
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pate_torch.core import checks
from pate_torch.core.progress import Stages
from pate_torch.methods import teacher_votes
from pate_torch.methods.base import MethodInputs
from pate_torch.methods.description import MethodDescription
from pate_torch.methods.labeling import LabelingMethod, PreparedLabeling
from pate_torch.methods.teacher_votes import VotingMethod
from pate_torch.privacy.facts import DatasetFacts
from pate_torch.privacy.records import PrivateRecords
from pate_torch.privacy.sensitive import Votes
from pate_torch.teachers.store import TeacherStore
from pate_torch.teachers.voting import count_votes

PREDICTIONS, COUNTS = "predictions", "counts"
_NOT_INTEGER = re.compile(rb"[^0-9+\-,\r\n \t]")


@dataclass(frozen=True, kw_only=True, eq=False)
class VotesFile(VotingMethod):
    """Votes that were made elsewhere.

    Attributes:
        path: The file, read once there are data.
        votes: PRIVATE. Votes that are here already.
    """

    name: str = "votes_file"
    path: Path | None = None
    votes: Votes | None = field(default=None, repr=False)

    @property
    def ensemble_size(self) -> int | None:
        return None if self.votes is None else self.votes.num_teachers

    def complete(self, facts: DatasetFacts, stages: Stages) -> LabelingMethod:
        """This method with its votes, which must be on this public pool."""
        method, votes = super().complete(facts, stages), self.votes
        assert isinstance(method, VotesFile)
        if votes is None and self.path is not None:
            votes = read(self.path, num_classes=facts.spec.num_classes, num_points=len(facts.pool))
        return replace(method, votes=votes)

    def describe(self, facts: DatasetFacts) -> MethodDescription:
        num_teachers = self._loaded_votes.num_teachers
        return teacher_votes.describe(num_teachers, facts.unit, counts=self.mechanism.releases_counts)

    def compute_fingerprint(self, store: TeacherStore, all_records: PrivateRecords) -> str:
        """PRIVATE. A keyed hash of the votes, in place of the records."""
        return store.compute_votes_fingerprint(self._loaded_votes)

    def prepare(self, inputs: MethodInputs) -> PreparedLabeling:
        """PRIVATE. The votes, as they were read."""
        return self.from_votes(inputs, self._loaded_votes, are_from_records=False)

    @property
    def _loaded_votes(self) -> Votes:
        assert self.votes is not None, "complete comes first"
        return self.votes


def read(
    path: Path | str, *, num_classes: int, num_points: int | None = None, num_teachers: int | None = None
) -> Votes:
    """PRIVATE. Read the votes in ``path``, on its points in their order.

    Which of both forms it is follows from the shape. Where both would fit, the name of a safetensors file's tensor
    decides (``predictions`` or ``counts``), and so does a value of C or above, since no such class exists.

    Args:
        path: The file.
        num_classes: C.
        num_points: P, where known.
        num_teachers: K, where known.

    Raises:
        ValueError: The file has another format or shape, or holds anything but one whole vote per teacher and point.
    """
    path = Path(path)
    checks.integer("num_classes", num_classes, low=2, fix="A vote needs at least two classes.")
    table, form = _load_table(path)
    form = form or _infer_form(path, table, num_classes, num_points, num_teachers)
    rows, columns = table.shape
    if form == PREDICTIONS:
        _check_size("num_teachers", num_teachers, rows, "rows", form, path)
        _check_size("num_points", num_points, columns, "columns", form, path)
        if bool((table < 0).any()) or bool((table >= num_classes).any()):
            raise _votes_file_error(path, f"predictions must be classes in 0..{num_classes - 1}", "Check num_classes.")
        return count_votes(table, num_classes)
    _check_size("num_points", num_points, rows, "rows", form, path)
    _check_size("num_classes", num_classes, columns, "columns", form, path)
    total = int(table[0].sum())
    if bool((table < 0).any()) or total < 1 or bool((table.sum(1) != total).any()):
        raise _votes_file_error(
            path,
            "every row of counts must be non-negative and sum to the same number of teachers",
            "One teacher has one vote on every point, no more and no fewer.",
        )
    _check_size("num_teachers", num_teachers, total, "votes on each point", form, path)
    return Votes(table, total)


def _check_size(key: str, expected: int | None, actual: int, quantity: str, form: str, path: Path) -> None:
    if expected is not None and expected != actual:
        fix = f"It should be {actual}, or it is another file."
        raise checks.error(key, expected, f"{path} holds {form} with {actual} {quantity}", fix)


def _votes_file_error(path: Path, problem: str, fix: str = "") -> ValueError:
    return checks.error("votes", str(path), problem, fix)


def _infer_form(path: Path, table: Tensor, num_classes: int, num_points: int | None, num_teachers: int | None) -> str:
    """What the table is, from public sizes alone wherever they tell."""
    rows, columns = table.shape
    fits_predictions = num_teachers in (None, rows) and num_points in (None, columns)
    fits_counts = columns == num_classes and num_points in (None, rows)
    if not (fits_predictions or fits_counts):
        teachers = "K" if num_teachers is None else num_teachers
        points = "P" if num_points is None else num_points
        raise _votes_file_error(
            path,
            f"has shape {rows} x {columns}, where {teachers} x {points} predictions or {points} x {num_classes} counts "
            "are expected",
            "There must be a vote on every public point, in the pool's order, without an index column.",
        )
    if fits_predictions and fits_counts and not bool((table >= num_classes).any()):
        raise _votes_file_error(
            path,
            f"may be {rows} teachers' predictions or counts of {num_classes} classes: its shape does not tell",
            "Set num_teachers and num_points, or save it as safetensors with one tensor named predictions or counts.",
        )
    return COUNTS if fits_counts else PREDICTIONS


def _load_table(path: Path) -> tuple[Tensor, str | None]:
    """(whole numbers, int64 [rows, columns]; the form if the file names it)."""
    if not path.is_file():
        raise _votes_file_error(path, "there is no such file")
    form = None
    match path.suffix.lower():
        case ".csv":
            array: Any = _read_csv(path)
        case ".npy":
            try:
                array = np.load(path, allow_pickle=False)
            except Exception as error:  # a damaged header is parsed as Python, and may ask for all memory there is
                reason = " ".join(str(error).split()) or type(error).__name__
                raise _votes_file_error(
                    path, f"is not a plain NPY array ({reason})", "Save it with numpy.save."
                ) from error
        case ".safetensors":
            array, form = _read_safetensors(path)
        case suffix:
            raise _votes_file_error(
                path,
                f"must be .csv, .npy or .safetensors, not {suffix or 'a file without a suffix'}",
                "Pickles (.pkl, .pt, .npz of objects) are not read: loading one runs the code inside it.",
            )
    if not isinstance(array, np.ndarray) or array.ndim != 2 or array.size == 0:
        raise _votes_file_error(
            path, f"must hold one table with two axes, not the shape {getattr(array, 'shape', None)}"
        )
    if array.dtype.kind not in "iu":
        raise _votes_file_error(path, f"must hold whole numbers, not {array.dtype}", "One teacher has one whole vote.")
    if array.dtype.kind == "u" and int(array.max()) > np.iinfo(np.int64).max:
        raise _votes_file_error(path, "holds numbers too large to be votes")
    return torch.from_numpy(np.ascontiguousarray(array.astype(np.int64))), form


def _read_csv(path: Path) -> np.ndarray:
    """Whole numbers separated by commas; a first line without any number is a header and is passed over."""
    text = path.read_bytes().removeprefix(b"\xef\xbb\xbf")
    first_line, _, other_lines = text.partition(b"\n")
    body = text if any(_is_number(cell) for cell in first_line.split(b",")) else other_lines
    if bad_cell := _NOT_INTEGER.search(body):
        line = text.count(b"\n") - body.count(b"\n") + body[: bad_cell.start()].count(b"\n") + 1
        raise _votes_file_error(
            path, f"must hold whole numbers only; line {line} has something else", "A vote is whole."
        )
    if not body.strip():
        raise _votes_file_error(path, "is empty")
    try:
        return np.loadtxt(io.BytesIO(body), dtype=np.int64, delimiter=",", ndmin=2, comments=None)
    except (ValueError, OverflowError) as error:
        raise _votes_file_error(path, f"is not a table of whole numbers ({error})") from error


def _is_number(cell: bytes) -> bool:
    """Whether a cell is any number at all: nan and 1.5 are bad votes, not names of columns."""
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _read_safetensors(path: Path) -> tuple[np.ndarray, str | None]:
    try:
        with safe_open(path, framework="np") as file:
            names = list(file.keys())
            if len(names) != 1:
                raise _votes_file_error(
                    path, f"must hold one tensor, not {len(names)}", "Name it predictions or counts."
                )
            array = file.get_tensor(names[0])
    except (OSError, SafetensorError, TypeError, AttributeError) as error:
        raise _votes_file_error(path, f"is damaged or not a safetensors file ({error})") from error
    return array, names[0] if names[0] in (PREDICTIONS, COUNTS) else None
