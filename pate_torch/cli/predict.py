"""What a released student says of new records: a table, or image files, to a table of labels and probabilities.

pate predict outputs/runs/clinic/gaussian/<run> new.csv > predictions.csv
"""

from __future__ import annotations

import argparse
import csv
import io
import sys
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from pate_torch.core import checks
from pate_torch.core.files import escape_spreadsheet_cell, write_atomically
from pate_torch.data import image_folder, table_files
from pate_torch.students.base import Student
from pate_torch.students.store import load_student


def read_table(student: Student, file: Path, options: argparse.Namespace) -> tuple[list[str], Tensor]:
    """Names and encoded rows of a table's records.

    Raises:
        ValueError: The student or the table does not fit; names the columns and values.
    """
    quotes = not options.no_quotes
    table = table_files.read_table("records", file, options.separator, columns=options.columns, quotes=quotes)
    if options.id is not None:
        checks.one_of("id", options.id, list(table))
    x = student.encode(table, unknown=options.unknown)
    schema = student.spec.schema
    unused_columns = (
        [] if schema is None else [name for name in schema.find_unused_columns(table) if name != options.id]
    )
    if unused_columns:
        print(f"Not used: {', '.join(unused_columns)}.", file=sys.stderr)
    return table[options.id] if options.id is not None else [str(row) for row in range(len(x))], x


def read_images(student: Student, path: Path) -> tuple[list[str], Tensor]:
    """Names and pixels of image files.

    Raises:
        ValueError: There are none, or one cannot be read.
    """
    files = image_folder.list_image_files(path) if path.is_dir() else [path]
    if not files:
        raise checks.error("records", str(path), "is a folder without images")
    encoder = student.spec.encoder
    spec = student.spec if encoder is None or encoder.points is None else encoder.points
    x = image_folder.read_images("records", files, spec.input_shape, spec.resize)
    return [file.name if file == path else file.relative_to(path).as_posix() for file in files], x


def format_predictions(student: Student, names: Sequence[str], x: Tensor) -> str:
    """A CSV table: who, the likeliest class, and the probability of each."""
    table = io.StringIO()
    writer = csv.writer(table, lineterminator="\n")
    writer.writerow(["id", "label", *(f"probability_{name}" for name in student.class_names)])
    probability_QC = student.predict_proba(x)
    for name, label, probabilities in zip(
        names, probability_QC.argmax(1).tolist(), probability_QC.tolist(), strict=True
    ):
        writer.writerow(
            [
                escape_spreadsheet_cell(name),
                escape_spreadsheet_cell(student.class_names[label]),
                *(f"{probability:.6g}" for probability in probabilities),
            ]
        )
    return table.getvalue()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``pate predict``; its exit code. 0: done; 2: the student or the records cannot be read."""
    parser = argparse.ArgumentParser(prog="pate predict", description="What a released student says of new records.")
    parser.add_argument("run", type=Path, help="the folder of a run or of its release, or a student's file")
    parser.add_argument("records", type=Path, help="a CSV or Parquet file, an image, or a folder of images")
    parser.add_argument("--id", metavar="COLUMN", help="names the rows of the result (default: 0, 1, ... in order)")
    parser.add_argument("--unknown", default="error", choices=("error", "zeros"), help="what becomes of new categories")
    parser.add_argument("--separator", default=",", help="between the values of a CSV file")
    parser.add_argument("--columns", type=lambda names: names.split(","), help="names, where the file has no header")
    parser.add_argument("--no-quotes", action="store_true", help="quotation marks are characters like others")
    parser.add_argument("--weights", help="of the encoder, where it was not published with the student")
    parser.add_argument("--tokenizer", help="of the encoder, likewise")
    parser.add_argument("--output", type=Path, help="where to write (default: the terminal)")
    options = parser.parse_args(arguments)
    try:
        if not options.records.exists():
            raise checks.error("records", str(options.records), "was not found")
        files = {key: getattr(options, key) for key in ("weights", "tokenizer") if getattr(options, key) is not None}
        student = load_student(options.run, encoder=files or None)
        names_and_points = (
            read_images(student, options.records)
            if student.spec.kind == "images"
            else read_table(student, options.records, options)
        )
        text = format_predictions(student, *names_and_points)
        if options.output is None:
            print(text, end="")
        else:
            write_atomically(options.output, text)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0
