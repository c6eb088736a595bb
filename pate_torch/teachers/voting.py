"""From predictions to votes: counting the votes of teachers, and reading votes of teachers trained elsewhere.

A file of votes holds K x P predictions (one row per teacher, a class in 0..C-1 for each public point) or P x C counts
(one row per point, summing to K): CSV, NPY, or safetensors with a single tensor. Nothing is unpickled, since a pickle
runs code.
"""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.numpy import load_file
from torch import Tensor

from pate_torch.core import checks
from pate_torch.core.device import single_thread_mode
from pate_torch.privacy.sensitive import Votes

BLOCK_QUERIES = 2048
"""Queries counted together: with 255 teachers of one byte each they stay in a core's cache."""

MAX_COMPARED_CLASSES = 64
"""Number of classes up to which comparing with every class in turn is faster than scattering."""


def get_label_dtype(num_classes: int) -> torch.dtype:
    """The smallest type for classes 0..C-1: predictions are read once per class, so their size is the time."""
    return torch.uint8 if num_classes <= 256 else torch.int16 if num_classes <= 2**15 else torch.int32


def _count_bytes(prediction_KQ: Tensor, num_classes: int) -> Tensor:
    """uint8 [K, Q] -> int32 [Q, C]: compare to bytes 0 or 1, and add eight queries in one 64-bit addition.

    No byte overflows its neighbor below 256 teachers. (A comparison to ``bool`` takes fourteen times as long as to
    bytes on a CPU, and ``scatter_add_`` two and a half times as long in all. Four threads gain a third on an idle
    machine and lose tenfold on a busy one.)
    """
    (teachers, queries), device = prediction_KQ.shape, prediction_KQ.device
    padded_width = -(-BLOCK_QUERIES // 8) * 8
    counts_QC = torch.empty(queries, num_classes, dtype=torch.int32, device=device)
    equal_KW = torch.empty(min(teachers, 255), padded_width, dtype=torch.uint8, device=device)
    sums_CW = torch.empty(num_classes, padded_width // 8, dtype=torch.int64, device=device)
    pairs = list(zip(torch.arange(num_classes, dtype=torch.uint8, device=device), sums_CW, strict=True))
    with single_thread_mode(device.type == "cpu"):
        for start in range(0, queries, padded_width):
            part_KW = prediction_KQ[:, start : start + padded_width]
            width = part_KW.shape[1]
            part_KW = F.pad(part_KW, (0, padded_width - width)) if width < padded_width else part_KW
            counts_CW = torch.zeros(num_classes, padded_width, dtype=torch.int32, device=device)
            for group_KW in part_KW.split(255):
                equal = equal_KW[: len(group_KW)]
                for label, sum_W in pairs:
                    torch.eq(group_KW, label, out=equal)
                    torch.sum(equal.view(torch.int64), 0, out=sum_W)
                counts_CW += sums_CW.view(torch.uint8)
            counts_QC[start : start + width] = counts_CW[:, :width].T
    return counts_QC


def tally(prediction_KQ: Tensor, num_classes: int) -> Tensor:
    """PRIVATE. Count classes over teachers: integers [K, Q] in 0..C-1 -> int32 [Q, C], in chunks of queries.

    Fastest for uint8, where a class outside the range is not counted (and refused by ``Votes``, whose rows must sum to
    K).

    Raises:
        ValueError: A class of another type is outside the range.
    """
    if prediction_KQ.dim() != 2 or prediction_KQ.is_floating_point():
        raise ValueError("predictions must be integers [teachers, queries]")
    is_byte, is_compared = prediction_KQ.dtype == torch.uint8, num_classes <= MAX_COMPARED_CLASSES
    if prediction_KQ.numel() and not (is_byte and is_compared):
        low, high = map(int, prediction_KQ.aminmax())  # a byte compared with 256 is compared with 0
        if low < 0 or high >= num_classes:
            raise ValueError(f"predictions must lie in 0..{num_classes - 1}")
    if is_compared:
        return _count_bytes(prediction_KQ.to(torch.uint8), num_classes)
    counts_QC = torch.zeros(prediction_KQ.shape[1], num_classes, dtype=torch.int32, device=prediction_KQ.device)
    for part_KW, counts_WC in zip(prediction_KQ.split(BLOCK_QUERIES, 1), counts_QC.split(BLOCK_QUERIES), strict=True):
        label_WK = part_KW.T.long()
        counts_WC.scatter_add_(1, label_WK, torch.ones_like(label_WK, dtype=torch.int32))
    return counts_QC


def count_votes(prediction_KQ: Tensor, num_classes: int) -> Votes:
    """PRIVATE. The votes of K teachers, one each, from their predictions, integers [K, Q]."""
    return Votes(tally(prediction_KQ, num_classes), prediction_KQ.shape[0])


# ---- votes from a file ---------------------------------------------------------------------------------------------

PREDICTIONS, COUNTS = "predictions", "counts"
_NOT_INTEGER = re.compile(rb"[^0-9+\-,\r\n \t]")


def read_votes(
    path: Path | str, *, num_classes: int, num_points: int | None = None, num_teachers: int | None = None
) -> Votes:
    """PRIVATE. Read the votes in ``path``, on its points in their order.

    The form follows from the shape. Where the shape fits both forms, the name of a safetensors file's tensor decides
    (``predictions`` or ``counts``), and so does a value of C or above, since no such class exists.

    Args:
        path: The file.
        num_classes: C.
        num_points: P; None if it is not known.
        num_teachers: K; None if it is not known.

    Raises:
        ValueError: The file has another format or shape, or holds anything but one whole vote per teacher and point.
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
            fix = f"It should be {actual}, or it is another file."
            raise checks.error(key, expected, f"{path} holds {form} with {actual} {quantity}", fix)
    if form == PREDICTIONS:
        if is_negative or bool((table >= num_classes).any()):
            raise _votes_file_error(path, f"predictions must be classes in 0..{num_classes - 1}", "Check num_classes.")
        return count_votes(table, num_classes)
    if is_negative or total < 1 or bool((table.sum(1) != total).any()):
        problem = "every row of counts must be non-negative and sum to the same number of teachers"
        raise _votes_file_error(path, problem, "One teacher has one vote on every point, no more and no fewer.")
    return Votes(table, total)


def _votes_file_error(path: Path, problem: str, fix: str = "") -> ValueError:
    return checks.error("votes", str(path), problem, fix)


def _infer_form(path: Path, table: Tensor, num_classes: int, num_points: int | None, num_teachers: int | None) -> str:
    """The form of the table, from public sizes alone wherever they decide it."""
    rows, columns = table.shape
    fits_predictions = num_teachers in (None, rows) and num_points in (None, columns)
    fits_counts = columns == num_classes and num_points in (None, rows)
    if not (fits_predictions or fits_counts):
        teachers, points = num_teachers or "K", num_points or "P"
        expected = f"{teachers} x {points} predictions or {points} x {num_classes} counts"
        problem = f"has shape {rows} x {columns}, where {expected} are expected"
        fix = "There must be a vote on every public point, in the pool's order, without an index column."
        raise _votes_file_error(path, problem, fix)
    if fits_predictions and fits_counts and not bool((table >= num_classes).any()):
        problem = f"may be {rows} teachers' predictions or counts of {num_classes} classes: its shape does not tell"
        fix = "Set num_teachers and num_points, or save it as safetensors with one tensor named predictions or counts."
        raise _votes_file_error(path, problem, fix)
    return COUNTS if fits_counts else PREDICTIONS


def _load_table(path: Path) -> tuple[Tensor, str | None]:
    """Whole numbers, int64 [rows, columns], and the form of the table; None if the file does not name its form."""
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
            fix = "Pickles (.pkl, .pt, .npz of objects) are not read: loading one runs the code inside it."
            raise _votes_file_error(path, problem, fix)
    if not isinstance(array, np.ndarray) or array.ndim != 2 or array.size == 0:
        raise _votes_file_error(path, f"must hold one table with two axes, not the shape {np.shape(array)}")
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
        problem = f"must hold whole numbers only; line {line} has something else"
        raise _votes_file_error(path, problem, "One teacher has one whole vote.")
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
