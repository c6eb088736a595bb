"""Processor time of starting: imports, the help of each command, and loading a release to predict one row.

    PYTHONPATH=. python benchmarks/loading.py

Each measurement is a fresh process, the programs alternate, and a ratio is that of the medians to the one of
``import torch, sklearn.base``. Bytecode is compiled before. The students are a
linear model of random cosines of a table, which needs no torch, and two networks, which do.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from pate_torch import networks
from pate_torch.cli.main import COMMANDS
from pate_torch.privacy.records import DataSpec
from pate_torch.privacy.schema import Column, TableSchema
from pate_torch.students.base import Student
from pate_torch.students.store import save

TABLE = DataSpec(
    name="table", num_classes=2, input_shape=(3,), class_names=("ill", "well"), mean=(50.0, 0.0, 0.0),
    std=(20.0, 1.0, 1.0), schema=TableSchema((Column("age", None, 50.0), Column("ward", ("A", "B")))),
)  # fmt: skip
IMAGES = DataSpec(
    name="images", num_classes=10, input_shape=(1, 28, 28), class_names=tuple("0123456789"), mean=(0.5,), std=(0.25,)
)
ROW, IMAGE = '{"age": 61, "ward": "A"}', "__import__('numpy').zeros((1, 1, 28, 28), 'uint8')"
STUDENTS = {"linear, table": (TABLE, "fourier", ROW), "mlp, table": (TABLE, "mlp", ROW), "cnn": (IMAGES, "cnn", IMAGE)}
IMPORTS = "import torch, sklearn.base"
PACKAGE, CLASSIFIER = "import pate_torch", "from pate_torch import PATEClassifier"
HELP = "from pate_torch.cli.main import main; main([{command!r}, '--help'])"
PREDICTS = "import pate_torch; pate_torch.ReleasedClassifier.load({folder!r}).predict_proba({points})"


def measure_seconds(code: str) -> float:
    """Measure the processor time of a fresh process."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=9)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        codes = {"imports": IMPORTS, "package": PACKAGE, "PATEClassifier": CLASSIFIER}
        codes |= {f"{command} --help": HELP.format(command=command) for command in COMMANDS}
        for name, (spec, network, points) in STUDENTS.items():
            description = networks.describe(network, spec.input_shape, spec.num_classes)
            module = networks.initialize(networks.rebuild(description), torch.Generator().manual_seed(0))
            (Path(place) / name).mkdir()
            save(Student(description, module, spec), Path(place) / name / "student.safetensors")
            codes[name] = PREDICTS.format(folder=str(Path(place) / name), points=points)
        for code in codes.values():
            measure_seconds(code)
        rounds = [{name: measure_seconds(code) for name, code in codes.items()} for _ in range(options.runs)]
    medians = {name: statistics.median(seconds[name] for seconds in rounds) for name in codes}
    for name, seconds in medians.items():
        print(f"{name:<16}{seconds:6.2f} s  ratio {seconds / medians['imports']:.2f}")


if __name__ == "__main__":
    main()
