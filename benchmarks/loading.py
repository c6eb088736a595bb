"""Processor time of loading a release and predicting one row, relative to that of ``import torch, sklearn.base``.

    PYTHONPATH=. python benchmarks/loading.py <folder of a release or a run> '{"age": 61, "ward": "A"}'

Each measurement is a fresh process, the two programs alternate, and the ratio is that of the medians.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys

IMPORTS = "import torch, sklearn.base"
PREDICTS = """
import json, sys, pate_torch
pate_torch.ReleasedClassifier.load(sys.argv[1]).predict_proba(json.loads(sys.argv[2]))
"""


def measure_seconds(code: str, *arguments: str) -> float:
    """Measure the processor time of a fresh process."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", code, *arguments], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measure_ratio(release: str, row: str, runs: int = 9) -> dict[str, float]:
    """Measure both programs in turns; return their median seconds and the ratio."""
    pairs = [(measure_seconds(IMPORTS), measure_seconds(PREDICTS, release, row)) for _ in range(runs)]
    imports, predicts = map(statistics.median, zip(*pairs, strict=True))
    return {"imports": imports, "predicts": predicts, "ratio": predicts / imports}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("release", help="folder of a release or a run, or file of a student")
    parser.add_argument("row", help="one record, or a list of points, in JSON")
    parser.add_argument("--runs", type=int, default=9)
    options = parser.parse_args()
    print(json.dumps(measure_ratio(options.release, options.row, options.runs)))
