"""Predict the records of a table or image files by a released student. The output is a CSV table.

pate predict outputs/runs/clinic/gaussian/<run> new.csv > predictions.csv
"""

from __future__ import annotations

import argparse
import csv
import io
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from pate_torch.core import checks
from pate_torch.core.files import escape_spreadsheet_cell, write_atomically
from pate_torch.data import image_folder, table_files
from pate_torch.students.base import Student
from pate_torch.students.store import load_student


def read_table(student: Student, file: Path, options: argparse.Namespace) -> tuple[list[str], Tensor]:
    """Read the names and the encoded rows of a table's records."""
    columns = options.columns and options.columns.split(",")
    quotes = not options.no_quotes
    table = table_files.read_table("records", file, options.separator, columns=columns, quotes=quotes)
    if options.id is not None:
        checks.one_of("id", options.id, list(table))
    x = student.encode(table, unknown=options.unknown)
    unused = [] if student.spec.schema is None else student.spec.schema.find_unused_columns(table)
    if unused := [name for name in unused if name != options.id]:
        print(f"Ignored columns: {', '.join(unused)}.", file=sys.stderr)
    return table[options.id] if options.id is not None else [str(row) for row in range(len(x))], x


def read_images(student: Student, path: Path, _: argparse.Namespace) -> tuple[list[str], Tensor]:
    """Read the names and the pixels of image files."""
    files = image_folder.list_image_files(path) if path.is_dir() else [path]
    if not files:
        raise checks.error("records", str(path), "must be an image or a folder that contains images")
    encoder = student.spec.encoder
    spec = student.spec if encoder is None or encoder.points is None else encoder.points
    x = torch.stack([image_folder.read_image("records", file, spec.input_shape, spec.resize) for file in files])
    return [file.name if file == path else file.relative_to(path).as_posix() for file in files], x


def format_predictions(student: Student, names: Sequence[str], x: Tensor) -> str:
    """Format a CSV table with the name, the most probable class and the class probabilities of each record."""
    table = io.StringIO()
    writer = csv.writer(table, lineterminator="\n")
    writer.writerow(["id", "label", *(f"probability_{name}" for name in student.class_names)])
    for name, probability_C in zip(names, student.predict_proba(x), strict=True):
        cells = (name, student.class_names[int(probability_C.argmax())])
        writer.writerow([*map(escape_spreadsheet_cell, cells), *(f"{value:.6g}" for value in probability_C.tolist())])
    return table.getvalue()


def main(options: argparse.Namespace) -> int:
    """Run the command and return its exit code, or 2 if the student or the records cannot be read."""
    try:
        if not options.records.exists():
            raise checks.error("records", str(options.records), "was not found")
        files = {key: getattr(options, key) for key in ("weights", "tokenizer") if getattr(options, key) is not None}
        student = load_student(options.run, encoder=files or None)
        reader = read_images if student.spec.kind == "images" else read_table
        text = format_predictions(student, *reader(student, options.records, options))
        if options.output is None:
            print(text, end="")
        else:
            write_atomically(options.output, text)
    except BrokenPipeError:
        raise  # ``run_command`` ends silently
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0
