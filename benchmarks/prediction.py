"""Processor time, peak memory and start-up of ``pate predict`` for files of 1e4, 1e5 and 1e6 rows of 30 columns.

    PYTHONPATH=. python benchmarks/prediction.py [--rows 10000 100000 1000000]

A row has 24 numbers and 6 categories, and the student is linear. Every call is a process of its own. The start-up is a
call for one row; the time of a row is that above the start-up, and the exponent is that between two numbers of rows.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks import measuring
from pate_torch import networks
from pate_torch.privacy.records import DataSpec
from pate_torch.privacy.schema import TableSchema
from pate_torch.students import store
from pate_torch.students.base import Student

ROWS_AT_ONCE = 10_000


def make_frame(num_rows: int) -> pd.DataFrame:
    generator = np.random.default_rng(0)
    numbers = {f"number_{i}": generator.normal(size=num_rows).round(4) for i in range(24)}
    colors = ["red", "green", "blue", "gray"]
    return pd.DataFrame(numbers | {f"color_{i}": generator.choice(colors, num_rows) for i in range(6)})


def write_student(path: Path) -> None:
    schema = TableSchema.from_public(make_frame(500))
    classes, size = ("a", "b", "c"), schema.num_features
    facts = {"num_classes": 3, "class_names": classes, "mean": (0.0,) * size, "std": (1.0,) * size}
    spec = DataSpec(name="table", input_shape=(size,), schema=schema, **facts)  # type: ignore[arg-type]
    network = networks.describe("logistic", spec.input_shape, 3)
    store.save(Student(network, networks.rebuild(network).eval(), spec), path)


def write_table(path: Path, num_rows: int) -> None:
    """Write a table that repeats its first rows."""
    frame = make_frame(min(num_rows, ROWS_AT_ONCE))
    copies = num_rows // len(frame)
    if path.suffix == ".csv":
        header, _, rows = frame.to_csv(index=False).partition("\n")
        with open(path, "w") as file:
            file.write(f"{header}\n")
            file.writelines(rows for _ in range(copies))
    else:  # row groups of 1e6 rows, as pandas writes them
        pq.write_table(pa.concat_tables([pa.Table.from_pandas(frame)] * copies), path, row_group_size=1_000_000)


def measure_command(*words: Path | str) -> tuple[float, float]:
    """Run Python and return its processor time in seconds and its peak memory in MB."""
    command = [sys.executable, *map(str, words)]
    streams = [(os.POSIX_SPAWN_OPEN, number, os.devnull, os.O_WRONLY, 0) for number in (1, 2)]
    child = os.posix_spawn(sys.executable, command, os.environ, file_actions=streams)
    _, status, usage = os.wait4(child, 0)
    assert status == 0, command
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss * measuring.BYTES_PER_RSS_UNIT / 2**20


def measure_median(*words: Path | str) -> tuple[float, float]:
    return sorted(measure_command(*words) for _ in range(3))[1]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        student, table = Path(folder, "student.safetensors"), Path(folder, "table")
        write_student(student)
        print(f"pate predict --help: {measure_median('-m', 'pate_torch', 'predict', '--help')[0]:.2f} s")
        print(f"import torch: {measure_median('-c', 'import torch')[0]:.2f} s")
        for suffix in (".csv", ".parquet"):
            file, output = table.with_suffix(suffix), Path(folder, f"predictions{suffix}")
            write_table(file, 1)
            call = ("-m", "pate_torch", "predict", student, file, "--output", output)
            start, megabytes = measure_median(*call)
            print(f"{suffix}, 1 row: {start:.2f} s, {megabytes:.0f} MB")
            previous: tuple[int, float] | None = None
            for num_rows in options.rows:
                write_table(file, num_rows)
                seconds, megabytes = measure_command(*call)
                per_row = (seconds - start) / num_rows
                line = f"{suffix}, {num_rows} rows: {seconds:.1f} s, {1e6 * per_row:.1f} microseconds a row"
                line += f", {1 / per_row:.0f} rows a second, {megabytes:.0f} MB"
                if previous is not None:
                    line += f", exponent {measuring.compute_exponent(previous, (num_rows, seconds - start)):.2f}"
                print(line, flush=True)
                previous = num_rows, seconds - start


if __name__ == "__main__":
    main()
