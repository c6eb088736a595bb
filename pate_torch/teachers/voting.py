"""Counting of the votes of teachers, and files with votes of teachers that were trained elsewhere.

A file of votes (CSV, NPY, or safetensors with one tensor) holds K x P predictions, a class in 0..C-1 of each teacher
for each public point, or P x C counts, whose rows sum to K. Pickles are refused, because loading a pickle runs code.
"""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import load_file
from torch import Tensor

from pate_torch.core import checks
from pate_torch.privacy.sensitive import Votes

BLOCK_QUERIES = 2048
"""Number of queries counted together. Their predictions by 255 teachers fit into the cache of a core."""

MAX_COMPARED_CLASSES = 64
"""Largest number of classes for which comparisons with every class are faster than ``scatter_add_``."""


def get_label_dtype(num_classes: int) -> torch.dtype:
    """Return the smallest integer type for classes 0..C-1, because the time of ``tally`` grows with the size."""
    return torch.uint8 if num_classes <= 256 else torch.int16 if num_classes <= 2**15 else torch.int32


def tally(prediction_KQ: Tensor, num_classes: int) -> Tensor:
    """PRIVATE. Count the votes for each class, int32 [Q, C], of predictions in 0..C-1, integers [K, Q].

    A class outside the range is not counted if the type is uint8; ``Votes`` then refuses the counts, because a row does
    not sum to K.

    Raises:
        ValueError: A class of another type than uint8 is outside the range.
    """
    if prediction_KQ.dim() != 2 or prediction_KQ.is_floating_point():
        raise ValueError("predictions must be integers [teachers, queries]")
    is_byte, is_compared = prediction_KQ.dtype == torch.uint8, num_classes <= MAX_COMPARED_CLASSES
    if prediction_KQ.numel() and not (is_byte and is_compared):
        low, high = map(int, prediction_KQ.aminmax())  # before a conversion to bytes, which would map 256 to 0
        if low < 0 or high >= num_classes:
            raise ValueError(f"predictions must lie in 0..{num_classes - 1}")
    counts_QC = torch.zeros(prediction_KQ.shape[1], num_classes, dtype=torch.int32)
    blocks = zip(prediction_KQ.cpu().split(BLOCK_QUERIES, 1), counts_QC.split(BLOCK_QUERIES), strict=True)
    for part_KW, counts_WC in blocks:
        if not is_compared:
            label_WK = part_KW.T.long()
            counts_WC.scatter_add_(1, label_WK, torch.ones_like(label_WK, dtype=torch.int32))
            continue
        for group_KW in part_KW.to(torch.uint8).split(255):  # sums of 255 bytes 0 or 1 are bytes, which NumPy adds fast
            for label in range(num_classes):
                is_label_KW = group_KW.numpy() == label
                counts_WC.numpy()[:, label] += is_label_KW.view(np.uint8).sum(0, dtype=np.uint8)
    return counts_QC


def count_votes(prediction_KQ: Tensor, num_classes: int) -> Votes:
    """PRIVATE. Return the votes of K teachers, given their predictions, integers [K, Q]."""
    return Votes(tally(prediction_KQ, num_classes), prediction_KQ.shape[0])


# ---- votes from a file ---------------------------------------------------------------------------------------------

PREDICTIONS, COUNTS = "predictions", "counts"
_NOT_INTEGER = re.compile(rb"[^0-9+\-,\r\n \t]")


def read_votes(
    path: Path | str, *, num_classes: int, num_points: int | None = None, num_teachers: int | None = None
) -> Votes:
    """PRIVATE. Read the votes on the public points, which must have the order of the pool.

    The name of a safetensors file's tensor, ``predictions`` or ``counts``, decides whether the file holds predictions
    or counts, else its shape. If the shape fits both, a value of C or more shows that the file holds counts. The
    numbers of points and of teachers are None if they are not known.

    Raises:
        ValueError: The file has another format or shape, or some teacher has not exactly one vote on each point.
    """
    path = Path(path)
    checks.integer("num_classes", num_classes, low=2, fix="A vote needs at least two classes.")
    table, form = _load_table(path)
    form = form or _infer_form(path, table, num_classes, num_points, num_teachers)
    rows, columns = table.shape
    is_negative, total = bool((table < 0).any()), int(table[0].sum())
    if form == PREDICTIONS:
        sizes = [("num_teachers", num_teachers, rows, "rows"), ("num_points", num_points, columns, "columns")]
    else:
        sizes = [("num_points", num_points, rows, "rows"), ("num_classes", num_classes, columns, "columns")]
        sizes.append(("num_teachers", num_teachers, total, "votes on each point"))
    for key, expected, actual, quantity in sizes:
        if expected not in (None, actual):
            fix = f"Set {key}={actual}, or name another file."
            raise checks.error(key, expected, f"{path} holds {form} with {actual} {quantity}", fix)
    if form == PREDICTIONS:
        if is_negative or bool((table >= num_classes).any()):
            raise _votes_file_error(path, f"predictions must be classes in 0..{num_classes - 1}", "Check num_classes.")
        return count_votes(table, num_classes)
    if is_negative or total < 1 or bool((table.sum(1) != total).any()):
        problem = "every row of counts must be non-negative and sum to the same number of teachers"
        raise _votes_file_error(path, problem, "Every teacher has exactly one vote on every point.")
    return Votes(table, total)


def _votes_file_error(path: Path, problem: str, fix: str = "") -> ValueError:
    return checks.error("votes", str(path), problem, fix)


def _infer_form(path: Path, table: Tensor, num_classes: int, num_points: int | None, num_teachers: int | None) -> str:
    """Infer the form of the table from public sizes, and from its values only if the sizes fit both forms."""
    rows, columns = table.shape
    fits_predictions = num_teachers in (None, rows) and num_points in (None, columns)
    fits_counts = columns == num_classes and num_points in (None, rows)
    if not (fits_predictions or fits_counts):
        teachers, points = num_teachers or "K", num_points or "P"
        expected = f"{teachers} x {points} predictions or {points} x {num_classes} counts"
        problem = f"has shape {rows} x {columns}, but {expected} are expected"
        fix = "There must be a vote on every public point, in the order of the pool, without an index column."
        raise _votes_file_error(path, problem, fix)
    if fits_predictions and fits_counts and not bool((table >= num_classes).any()):
        problem = f"may hold predictions of {rows} teachers or counts of {num_classes} classes; its shape fits both"
        fix = "Set num_teachers and num_points, or save a safetensors file with a tensor named predictions or counts."
        raise _votes_file_error(path, problem, fix)
    return COUNTS if fits_counts else PREDICTIONS


def _load_table(path: Path) -> tuple[Tensor, str | None]:
    """Load the table, int64 [rows, columns], and its form. The form is None if the file does not name it."""
    if not path.is_file():
        raise _votes_file_error(path, "is not a file")
    form = None
    match path.suffix.lower():
        case ".csv":
            array: Any = _read_csv(path)
        case ".npy":
            try:
                array = np.load(path, allow_pickle=False)
            except Exception as error:  # NumPy parses the header as Python, and it may request too much memory
                problem = f"is not a plain NPY array ({' '.join(str(error).split()) or type(error).__name__})"
                raise _votes_file_error(path, problem, "Save it with numpy.save.") from error
        case ".safetensors":
            try:
                tensors = load_file(path)
            except (OSError, SafetensorError, TypeError, AttributeError) as error:
                raise _votes_file_error(path, f"is damaged or not a safetensors file ({error})") from error
            if len(tensors) != 1:
                problem = f"must hold one tensor, not {len(tensors)}"
                raise _votes_file_error(path, problem, "Name it predictions or counts.")
            ((name, array),) = tensors.items()
            form = name if name in (PREDICTIONS, COUNTS) else None
        case suffix:
            problem = f"must be .csv, .npy or .safetensors, not {suffix or 'a file without a suffix'}"
            fix = "Pickles (.pkl, .pt, .npz of objects) are refused, because loading a pickle runs its code."
            raise _votes_file_error(path, problem, fix)
    if not isinstance(array, np.ndarray) or array.ndim != 2 or array.size == 0:
        raise _votes_file_error(path, f"must hold one table with two axes, not the shape {np.shape(array)}")
    if array.dtype.kind not in "iu":
        problem = f"must hold whole numbers, not {array.dtype}"
        raise _votes_file_error(path, problem, "Save predictions or counts as integers.")
    if array.dtype.kind == "u" and int(array.max()) > np.iinfo(np.int64).max:
        raise _votes_file_error(path, "holds numbers too large to be votes")
    return torch.from_numpy(np.ascontiguousarray(array.astype(np.int64))), form


def _read_csv(path: Path) -> np.ndarray:
    """Read integers separated by commas. A first line without a number is a header, which is skipped."""
    text = path.read_bytes().removeprefix(b"\xef\xbb\xbf")
    first_line, _, other_lines = text.partition(b"\n")
    body = text if any(_is_number(cell) for cell in first_line.split(b",")) else other_lines
    if bad_cell := _NOT_INTEGER.search(body):
        line = text.count(b"\n") - body.count(b"\n") + body[: bad_cell.start()].count(b"\n") + 1
        problem = f"must hold whole numbers only, but line {line} holds other text"
        raise _votes_file_error(path, problem, "Save predictions or counts as integers.")
    if not body.strip():
        raise _votes_file_error(path, "is empty")
    try:
        return np.loadtxt(io.BytesIO(body), dtype=np.int64, delimiter=",", ndmin=2, comments=None)
    except (ValueError, OverflowError) as error:
        raise _votes_file_error(path, f"is not a table of whole numbers ({error})") from error


def _is_number(cell: bytes) -> bool:
    """Return whether a cell is a number. The cells nan and 1.5 are invalid votes, and no names of columns."""
    try:
        float(cell)
    except ValueError:
        return False
    return True
