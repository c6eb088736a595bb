"""Seconds per stage of whole runs, and what importing the package adds to importing torch.

    python benchmarks/end_to_end.py                                 # the default run
    python benchmarks/end_to_end.py --mnist data          # experiment=mnist_pate too
    python benchmarks/end_to_end.py --json

Each run has a PATE_HOME of its own, so that nothing is found and reused.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import measuring

ROOT = Path(__file__).resolve().parent.parent
IMPORTS = 5


def run(arguments: list[str]) -> dict[str, float]:
    """Seconds of each stage, and of the whole process."""
    with tempfile.TemporaryDirectory() as home:
        began = time.perf_counter()
        subprocess.run(
            [sys.executable, str(ROOT / "train.py"), "quiet=true", *arguments],
            env={**os.environ, "PATE_HOME": home},
            check=True,
            capture_output=True,
        )
        whole = time.perf_counter() - began
        (summary,) = Path(home).glob("runs/*/*/*/release/summary.json")
        return {**json.loads(summary.read_text())["seconds"], "whole process": round(whole, 1)}


def import_seconds(statement: str) -> float:
    """Median wall time of a fresh interpreter that runs one import."""
    times = []
    for _ in range(IMPORTS):
        began = time.perf_counter()
        subprocess.run([sys.executable, "-c", statement], check=True)
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def main() -> None:
    parser = measuring.make_parser(__doc__, "json")
    parser.add_argument("--mnist", metavar="FOLDER", help="folder that holds MNIST/raw")
    arguments = parser.parse_args()
    torch_alone = import_seconds("import torch")
    package = import_seconds("import torch, pate_torch.pipeline")
    figures: dict[str, object] = {
        "import torch": round(torch_alone, 2),
        "import pate_torch.pipeline, beyond torch": round(package - torch_alone, 2),
        "train.py": run([]),
    }
    if arguments.mnist:
        figures["experiment=mnist_pate"] = run(["experiment=mnist_pate", f"data_root={arguments.mnist}"])
    if arguments.json:
        print(json.dumps(figures))
        return
    for name, value in figures.items():
        if isinstance(value, dict):
            print(name)
            for stage, seconds in value.items():
                print(f"  {stage:<16}{seconds:>9.1f} s")
        else:
            print(f"{name:<44}{value:>6.2f} s")


if __name__ == "__main__":
    main()
