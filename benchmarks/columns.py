"""Time and memory of reading private data, and of a classifier on them, with exponents of growth.

    PYTHONPATH=. python benchmarks/columns.py [--rows 20000 100000]

Each measurement is a process of one thread that reads 500 rows first; bytes a row are the growth of its peak resident
memory. Tables of 30 columns are read beside pandas (parsed and one-hot encoded), vectors of 256 numbers beside their
own size.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas
import torch

from benchmarks import measuring
from pate_torch import PATEClassifier
from pate_torch.data.tabular import Csv, Embeddings

WIDTH, FEATURES, WARM_UP = 256, 123, 500


def make_table(file: Path, rows: int) -> None:
    """Write 24 numbers, 5 categories and a label."""
    random = np.random.default_rng(0)
    columns = {f"n{i}": random.normal(100, 20, rows).round(3) for i in range(12)}
    columns |= {f"n{i}": random.integers(0, 10**5, rows) for i in range(12, 24)}
    columns |= {f"c{i}": random.choice(["red", "green", "blue", "dark violet"], rows) for i in range(5)}
    table = pandas.DataFrame(columns | {"label": random.choice(["no", "yes"], rows)})
    table.to_csv(file, index=False) if file.suffix == ".csv" else table.to_parquet(file)


def read_table(file: Path) -> None:
    Csv(path=str(file), publish_split=True).load()


def read_with_pandas(file: Path) -> None:
    pandas.get_dummies(pandas.read_csv(file) if file.suffix == ".csv" else pandas.read_parquet(file))


def make_vectors(file: Path, rows: int) -> None:
    """Write vectors, and a table of their ids and labels in another order."""
    vectors = np.random.default_rng(0).normal(size=(rows, WIDTH)).astype(np.float32)
    ids = [f"record{i}" for i in range(rows)]
    if file.suffix == ".npy":
        np.save(file, vectors)
        file.with_suffix(".ids.txt").write_text("\n".join(ids) + "\n")
    else:
        pandas.DataFrame({"id": ids, "embedding": list(vectors)}).to_parquet(file)
    table = pandas.DataFrame({"id": ids, "label": np.arange(rows) % 2}).sample(frac=1, random_state=0)
    table.to_csv(file.with_suffix(".csv"), index=False)


def read_vectors(file: Path) -> None:
    ids = {"ids": str(file.with_suffix(".ids.txt"))} if file.suffix == ".npy" else {}
    Embeddings(path=str(file.with_suffix(".csv")), vectors=str(file), publish_split=True, **ids).load()


def make_records(file: Path, rows: int) -> None:
    """Write binary features with linear labels, as many as a9a has, and 2,000 public rows more."""
    random = np.random.default_rng(0)
    x = (random.random((rows + 2000, FEATURES)) < 0.12).astype(float)
    y = (x - x.mean(0)) @ random.normal(size=FEATURES) + random.normal(size=len(x)) > 0
    np.savez(file, x=x, y=y.astype(int))


def fit_classifier(file: Path) -> None:
    arrays = np.load(file)
    x, y = arrays["x"], arrays["y"]
    with tempfile.TemporaryDirectory() as home:
        settings = {"account": "records", "classes": [0, 1], "home": home, "verbose": False, "spend_anyway": True}
        PATEClassifier(epsilon=1.0, **settings).fit(x[:-2000], y[:-2000], public=x[-2000:])


CASES: dict[str, tuple[str, Callable[[Path, int], None], Callable[[Path], None]]] = {
    "table, CSV": (".csv", make_table, read_table),
    "table, CSV, pandas": (".csv", make_table, read_with_pandas),
    "table, Parquet": (".parquet", make_table, read_table),
    "table, Parquet, pandas": (".parquet", make_table, read_with_pandas),
    "vectors, npy": (".npy", make_vectors, read_vectors),
    "vectors, Parquet": (".parquet", make_vectors, read_vectors),
    "classifier": (".npz", make_records, fit_classifier),
}


def measure(case: str, small: Path, large: Path) -> dict[str, float]:
    """Measure in this process, which has read the small file before."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    CASES[case][2](small)
    peak, seconds = measuring.get_peak_bytes(), measuring.measure_seconds(lambda: CASES[case][2](large))
    return {"seconds": seconds, "bytes": measuring.get_peak_bytes() - peak}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES, metavar="CASE")
    parser.add_argument("--rows", type=int, nargs="+", default=[20_000, 100_000])
    parser.add_argument("--make", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.make:
        CASES[options.make[0]][1](Path(options.make[1]), int(options.make[2]))
        return
    if options.one:
        print(json.dumps(measure(options.one[0], Path(options.one[1]), Path(options.one[2]))))
        return
    for case in options.cases:
        suffix = CASES[case][0]
        earlier: tuple[int, float] | None = None
        for rows in options.rows:
            with tempfile.TemporaryDirectory() as folder:
                files = [Path(folder) / f"{size}{suffix}" for size in (WARM_UP, rows)]
                for file, size in zip(files, (WARM_UP, rows), strict=True):  # a child starts with its parent's peak
                    subprocess.run([sys.executable, __file__, "--make", case, str(file), str(size)], check=True)
                done = measuring.run_script(__file__, "--one", case, *files)
            text = f"{case:24}{rows:9,} rows {done['seconds']:7.2f} s {1e6 * done['seconds'] / rows:8.1f} us a row"
            text += f" {done['bytes'] / rows:8.0f} B a row"
            if case.startswith("vectors"):
                text += f", {done['bytes'] / rows / WIDTH / 4:.2f} times the data"
            if earlier:
                text += f", exponent {measuring.compute_exponent(earlier, (rows, done['seconds'])):.2f}"
            print(text, flush=True)
            earlier = rows, done["seconds"]


if __name__ == "__main__":
    main()
