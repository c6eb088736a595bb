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
from safetensors import SafetensorError, safe_open
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
    bytes on a CPU; ``scatter_add_`` takes two and a half times as long in all. Four Python threads, or
    torch's own, gain a third on an idle machine and lose tenfold on a busy one.)
    """
    teachers, queries = prediction_KQ.shape
    device = prediction_KQ.device
    counts_QC = torch.empty(queries, num_classes, dtype=torch.int32, device=device)
    equal_KW = torch.empty(min(teachers, 255), -(-BLOCK_QUERIES // 8) * 8, dtype=torch.uint8, device=device)
    padded_width = equal_KW.shape[1]
    sums_CW = torch.empty(num_classes, padded_width // 8, dtype=torch.int64, device=device)
    pairs = list(zip(torch.arange(num_classes, dtype=torch.uint8, device=device), sums_CW, strict=True))
    with single_thread_mode(device.type == "cpu"):
        for start in range(0, queries, padded_width):
            part_KW = prediction_KQ[:, start : start + padded_width]
            width = part_KW.shape[1]
            part_KW = F.pad(part_KW, (0, padded_width - width)) if width < padded_width else part_KW
            counts_CW = torch.zeros(num_classes, padded_width, dtype=torch.int32, device=device)
            for first in range(0, teachers, 255):
                group_KW = part_KW[first : first + 255]
                equal = equal_KW[: len(group_KW)]
                for label, sum_W in pairs:
                    torch.eq(group_KW, label, out=equal)
                    torch.sum(equal.view(torch.int64), 0, out=sum_W)
                counts_CW += sums_CW.view(torch.uint8)
            counts_QC[start : start + width] = counts_CW[:, :width].T
    return counts_QC


def _count_by_scatter(prediction_KQ: Tensor, num_classes: int) -> Tensor:
    """Any integers [K, Q] -> int32 [Q, C]: one addition per vote."""
    queries = prediction_KQ.shape[1]
    counts = torch.zeros(queries, num_classes, dtype=torch.int32, device=prediction_KQ.device)
    increment = torch.ones((), dtype=torch.int32, device=prediction_KQ.device)
    for start in range(0, queries, BLOCK_QUERIES):
        part = prediction_KQ[:, start : start + BLOCK_QUERIES].T.to(torch.int64)
        counts[start : start + BLOCK_QUERIES].scatter_add_(1, part, increment.expand(part.shape))
    return counts


def tally(prediction_KQ: Tensor, num_classes: int) -> Tensor:
    """PRIVATE. Count classes over teachers: integers [K, Q] in 0..C-1 -> int32 [Q, C], in chunks of queries.

    Fastest for uint8, where a class outside the range is not counted (and refused by ``Votes``, whose rows must sum to
    K).

    Raises:
        ValueError: A class of another type is outside the range.
    """
    if prediction_KQ.dim() != 2 or prediction_KQ.is_floating_point():
        raise ValueError("predictions must be integers [teachers, queries]")
    checks.integer("num_classes", num_classes, low=2)
    is_byte = prediction_KQ.dtype == torch.uint8
    if prediction_KQ.numel() and not (is_byte and num_classes <= MAX_COMPARED_CLASSES):
        low, high = map(int, prediction_KQ.aminmax())  # a byte compared with 256 is compared with 0
        if low < 0 or high >= num_classes:
            raise ValueError(f"predictions must lie in 0..{num_classes - 1}")
    if num_classes > MAX_COMPARED_CLASSES:
        return _count_by_scatter(prediction_KQ, num_classes)
    prediction_KQ = prediction_KQ if is_byte else prediction_KQ.to(torch.uint8)
    return _count_bytes(prediction_KQ, num_classes)


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
    """The form of the table, from public sizes alone wherever they decide it."""
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
    """Whole numbers, int64 [rows, columns], and the form of the table if the file names it."""
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
