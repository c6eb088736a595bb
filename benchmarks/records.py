"""Peak memory and processor time of whole runs in which every record answers, up to a million records of 784 bytes.

    python benchmarks/records.py [--json] [--methods gradients reverse_knn] [--records 10000 100000 1000000]

Each run is a process of its own: noise images with ten classes, named by hashes of their content, and 1,000 public
points; partition, encoding, noise, student and reports. The 784 pixels are the features; ``--features`` learns others.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import measuring
from pate_torch.config import PrivacyConfig, RunConfig
from pate_torch.core.rng import make_torch_generator
from pate_torch.data.base import DatasetSource
from pate_torch.features.contrastive import ContrastiveFeatures
from pate_torch.mechanisms.gradient_descent import GradientDescent
from pate_torch.mechanisms.histogram import Histogram
from pate_torch.methods.gradients import GradientMethod
from pate_torch.methods.record_method import RecordMethod
from pate_torch.methods.reverse_knn import ReverseKnn
from pate_torch.pipeline import run
from pate_torch.privacy.partition import AddRemove
from pate_torch.privacy.records import Dataset
from pate_torch.students.training import Supervised
from tests.tensor_data import Tensors


@dataclass(frozen=True, kw_only=True)
class NoiseImages(DatasetSource):
    """A data set of uint8 noise, 28 x 28, of so many private records."""

    records: int
    name: str = "noise"

    def load(self) -> Dataset:
        draw = make_torch_generator(0, "benchmark", "records")
        sizes = {"": self.records, "pool_": 1000, "test_": 100}
        parts = {}
        for part, size in sizes.items():
            parts[f"{part}x"] = torch.randint(256, (size, 1, 28, 28), dtype=torch.uint8, generator=draw)
            parts[f"{part}y"] = torch.randint(10, (size,), generator=draw)
        return Tensors(name=self.name, class_names=10, nominal_size=self.records, **parts).load()


def make_method(name: str, features: bool) -> RecordMethod:
    """The method of that name, which learns features or takes the pixels as they are."""
    options: dict[str, Any] = {
        "features": ContrastiveFeatures(steps=5, network="cnn") if features else None,
        "allow_uninformative_labels": True,
    }
    if name == "gradients":
        descent = GradientDescent(sigma=100.0, steps=8, adjacency="add_remove")
        return GradientMethod(mechanism=descent, num_queries=1000, **options)
    return ReverseKnn(mechanism=Histogram(sigma=10.0, adjacency="add_remove"), num_queries=400, **options)


def one(method: str, records: int, features: bool, home: Path) -> dict[str, object]:
    """One run in this process."""
    config = RunConfig(
        dataset=NoiseImages(records=records),
        partition=AddRemove(),
        method=make_method(method, features),
        privacy=PrivacyConfig(delta=1e-7, opening_budget=10.0),
        root=home,
        folder=home / "runs" / "noise",
        student=Supervised(network="logistic", steps=20, augment=None),
        quiet=True,
    )
    began = time.process_time()
    with contextlib.redirect_stdout(io.StringIO()):
        run(config)
    return {
        "method": method,
        "records": records,
        "features": features,
        "seconds": round(time.process_time() - began, 1),
        "peak_gib": round(measuring.get_peak_bytes() / 2**30, 2),
    }


def main() -> None:
    parser = measuring.make_parser(__doc__, "json")
    parser.add_argument("--methods", nargs="+", default=["gradients", "reverse_knn"])
    parser.add_argument("--records", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--features", action="store_true")
    parser.add_argument("--one", nargs=2, metavar=("METHOD", "RECORDS"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        with tempfile.TemporaryDirectory() as home:
            print(json.dumps(one(args.one[0], int(args.one[1]), args.features, Path(home))))
        return
    rows = []
    for method in args.methods:
        for records in args.records:
            row = measuring.run_script(__file__, *["--features"] * args.features, "--one", method, records)
            rows.append(row)
            if not args.json:
                figures = f"{row['seconds']:7.1f} s {row['peak_gib']:6.2f} GiB"
                print(f"{method:12s} {records:9d} records {figures}", flush=True)
    if args.json:
        json.dump(rows, sys.stdout, indent=2)


if __name__ == "__main__":
    main()
