"""Predict the records of a table, an array or image files by a released student. The output is a table.

pate predict outputs/runs/clinic/gaussian/<run> new.csv > predictions.csv
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
from collections.abc import Sequence
from concurrent import futures
from pathlib import Path


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code, or 2 if the student or the records cannot be read."""
    parser = argparse.ArgumentParser(prog="pate predict", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", type=Path, help="folder of a run or a release, or file of a student")
    parser.add_argument("records", type=Path, help="CSV, Parquet or .npy file, image, or folder of images")
    parser.add_argument("--id", metavar="COLUMN", help="column that names the rows (default: row numbers)")
    unknown_help = "encoding of categories that the student does not know (default: an error)"
    parser.add_argument("--unknown", default="error", choices=("error", "zeros"), help=unknown_help)
    parser.add_argument("--separator", default=",", help="separator of the values in a CSV file (default: a comma)")
    columns_help = "names of the columns, separated by commas, if the file has no header"
    parser.add_argument("--columns", type=lambda names: names.split(","), help=columns_help)
    parser.add_argument("--no-quotes", dest="quotes", action="store_false", help="read quotes as part of values")
    parser.add_argument("--weights", help="file of the encoder's weights, if the release does not contain them")
    parser.add_argument("--tokenizer", help="file of the encoder's tokenizer, if the release does not contain it")
    parser.add_argument("--output", type=Path, help="file for the table, .csv or .parquet (default: the terminal)")
    parser.add_argument("--workers", type=int, default=1, help="number of processes (default: 1)")
    options = parser.parse_args(arguments)
    output, workers = vars(options).pop("output"), vars(options).pop("workers")
    from pate_torch.cli.file_prediction import predict_file  # here, because it takes seconds, which the help saves

    try:
        context = multiprocessing.get_context("spawn")
        pool = futures.ThreadPoolExecutor(1) if workers == 1 else futures.ProcessPoolExecutor(workers, context)
        with tempfile.TemporaryDirectory() as folder, pool:
            file = Path(folder, "predictions.csv") if output is None else output
            predict_file(options, file, pool, 2 * workers)
            if output is None:
                with open(file, encoding="utf-8", newline="") as table:
                    sys.stdout.writelines(table)
    except BrokenPipeError:
        raise  # ``run_command`` ends silently
    except (ValueError, OSError, futures.BrokenExecutor) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0
