"""Predict the records of a table, an array or image files by a released student. The output is a table.

    pate predict outputs/runs/clinic/gaussian/<run> new.csv > predictions.csv

Blocks of records are predicted one by one, so that memory does not grow with the file. If a call with --output is
interrupted, the same call goes on where it stopped.
"""

from __future__ import annotations

import csv
import hashlib
import math
import pickle
import shutil
import sys
import tempfile
from argparse import Namespace
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from pate_torch.core import checks
from pate_torch.core.executors import ProcessPool
from pate_torch.core.files import SHARED_FILE_MODE, atomic_replacement, compute_file_digest, escape_spreadsheet_cell
from pate_torch.data import image_folder, table_files
from pate_torch.students.base import Student
from pate_torch.students.store import find_student_file, load_student


def predict_file(options: Namespace, output: Path, executor: Executor, max_waiting: int = 2) -> None:
    """Predict the records that the options of ``pate predict`` name, and write ``output``, a .csv or .parquet file.

    The predictions of a block are a file, whose name is a hash of the block and of all that decides its predictions. If
    a call is repeated after an interruption, it uses the files of the first. At most ``max_waiting`` blocks wait.
    """
    checks.one_of("output", output.suffix, (".csv", ".parquet"))
    files = {key: getattr(options, key) for key in ("weights", "tokenizer") if getattr(options, key) is not None}
    student = load_student(options.run, "cpu", files or None)
    digest = compute_file_digest(find_student_file(options.run))
    folder, parts, waiting = output.with_name(f".{output.name}.parts"), list[Path](), deque[Future[None]]()
    first_row = 0
    for block in _read_blocks(options, student):
        payload = pickle.dumps((options, digest, first_row, block))
        parts.append(folder / f"{hashlib.sha256(payload).hexdigest()}{output.suffix}")
        if not parts[-1].exists():
            waiting.append(executor.submit(predict_block, student, payload, parts[-1]))
        while len(waiting) > max_waiting:
            waiting.popleft().result()
        first_row += table_files.count_rows(block) if isinstance(block, dict) else len(block)
        if len(parts) % 8 == 0:
            print(f"Progress: {first_row} records", file=sys.stderr)
    for future in waiting:
        future.result()
    with atomic_replacement(output, SHARED_FILE_MODE) as temporary:
        if output.suffix == ".csv":
            with open(temporary, "xb") as file:
                file.writelines(part.read_bytes() for part in parts)
        else:
            with pq.ParquetWriter(temporary, pq.read_schema(parts[0])) as writer:
                for part in parts:
                    writer.write_table(pq.read_table(part))
    shutil.rmtree(folder)
    unused = [] if student.spec.schema is None else student.spec.schema.find_unused_columns(block)
    if unused := [name for name in unused if name != options.id]:
        print(f"Ignored columns: {', '.join(unused)}.", file=sys.stderr)


def _read_blocks(options: Namespace, student: Student) -> Iterable[Any]:
    """Return the blocks of points: columns of a table, arrays, or names, paths and times of image files."""
    path, points, num_rows = options.records, list[Any](), 1024
    if path.suffix == ".npy":
        try:
            points = np.load(path, mmap_mode="r", allow_pickle=False)
        except (ValueError, EOFError) as error:
            raise checks.error("records", str(path), f"is not a readable .npy file ({error})") from error
        num_rows = table_files.count_block_rows(math.prod(points.shape[1:]))
    elif student.spec.kind == "images":
        root, files = (path, image_folder.list_image_files(path)) if path.is_dir() else (path.parent, [path])
        points = [(file.relative_to(root).as_posix(), file, file.stat().st_mtime_ns) for file in files]
    else:
        columns = None if options.columns is None else options.columns.split(",")
        return table_files.iterate_tables("records", path, options.separator, columns=columns, quotes=options.quotes)
    if len(points) == 0:
        raise checks.error("records", str(path), "must be points, an image or a folder that contains images")
    return (points[start : start + num_rows] for start in range(0, len(points), num_rows))


def predict_block(student: Student, payload: bytes, part: Path) -> None:
    """Predict the points of a block, and write their names, classes and probabilities."""
    options, _, first_row, block = pickle.loads(payload)
    names = None
    if isinstance(block, dict):
        names = None if options.id is None else block[checks.one_of("id", options.id, list(block))].to_pylist()
        x = student.encode(block, unknown=options.unknown, first_row=first_row)
    elif isinstance(block, list):
        spec = student.spec if student.spec.encoder is None else student.spec.encoder.points or student.spec
        names, files, _ = zip(*block, strict=True)
        x = torch.stack([image_folder.read_image("records", file, spec.input_shape, spec.resize) for file in files])
    else:
        x = torch.from_numpy(np.array(block, dtype=np.float32 if block.ndim == 2 else None))
        if len(bad_rows := (~x.isfinite()).flatten(1).any(1).nonzero()):
            row = first_row + int(bad_rows[0])
            raise checks.error("records", str(options.records), f"must hold finite numbers (row {row})")
    probability_NC, class_names = student.compute_probabilities(x), student.class_names
    names = list(names or range(first_row, first_row + len(x)))
    labels = [class_names[label] for label in probability_NC.argmax(1).tolist()]
    headings = ["id", "label", *(f"probability_{name}" for name in class_names)]
    part.parent.mkdir(exist_ok=True)
    with atomic_replacement(part, SHARED_FILE_MODE) as temporary:
        if part.suffix == ".parquet":
            pq.write_table(pa.table([names, labels, *probability_NC.T.numpy()], headings), temporary)
            return
        texts = [[f"{value:.6g}" for value in probability_N] for probability_N in probability_NC.T.tolist()]
        rows = zip(*(map(escape_spreadsheet_cell, map(str, column)) for column in (names, labels)), *texts, strict=True)
        with open(temporary, "x", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(rows if first_row > 0 else [headings, *rows])


def main(options: Namespace) -> int:
    """Run the command and return its exit code, or 2 if the student or the records cannot be read."""
    output, workers = vars(options).pop("output"), vars(options).pop("workers")
    checks.integer("workers", workers, low=1)
    if not options.records.exists():
        raise checks.error("records", str(options.records), "was not found")
    if workers == 1:
        executor: Executor = ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(1,))
    else:
        executor = ProcessPool(workers, "spawn", torch.set_num_threads, 1)
    with tempfile.TemporaryDirectory() as folder, executor:
        file = Path(folder, "predictions.csv") if output is None else output
        predict_file(options, file, executor, 2 * workers)
        if output is None:
            with open(file, encoding="utf-8", newline="") as table:
                sys.stdout.writelines(table)
    return 0
