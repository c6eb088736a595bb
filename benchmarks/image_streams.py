"""Processor time and peak memory of images that are passed as floats, as a folder, and as a Dataset.

    PYTHONPATH=. python benchmarks/image_streams.py [--rows benchmarks/results/image_streams.csv]

2,000 color images of 64 x 64 are fitted by PATEClassifier with cheap teachers, or with an encoder, each case in a fresh
process. Last, a folder of JPEGs as large as photographs is read by one and by two threads.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pandas as pd
import torch
import torchvision
from PIL import Image
from sklearn.linear_model import LogisticRegression

from pate_torch import PATEClassifier
from pate_torch.data.streams import PointStream
from pate_torch.features.encoder import Encoder

CLASSES = ["a", "b"]
SIZES = {"private": 2000, "public": 200}


def write_folder(folder: Path, count: int, size: int, suffix: str) -> None:
    """Write images of two classes, told by the brightness of the left half."""
    generator = np.random.default_rng(count + size)
    for row in range(count):
        small = generator.integers(0, 200, (8, 8, 3), dtype=np.uint8)
        small[:, :4] += np.uint8(55 * (row % 2))
        file = folder / CLASSES[row % 2] / f"{row:04d}.{suffix}"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(small).resize((size, size), Image.Resampling.BICUBIC).save(file)


def measure(form: str, has_encoder: bool, folder: Path) -> dict[str, float]:
    """Fit once, and measure this process: its processor time, and its peak memory above that of the imports."""
    unit = 2**20 if sys.platform == "darwin" else 1024
    imports, begin = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    settings: dict[str, object] = {"method": "teachers", "teacher": LogisticRegression(max_iter=5), "num_teachers": 4}
    settings |= {"student": LogisticRegression(max_iter=5), "num_queries": 50, "spend_anyway": True}
    if has_encoder:
        encoder = Encoder(network="torchvision:squeezenet1_1", weights=str(folder / "net.pth"), size=64, batch_size=16)
        settings = {"encoder": encoder}
    parts = {part: torchvision.datasets.ImageFolder(folder / part, torchvision.transforms.ToTensor()) for part in SIZES}
    x, public, y, classes = parts["private"], parts["public"], None, [0, 1]
    if form == "folder":
        x, public, classes = folder / "private", folder / "public", CLASSES
    elif form == "floats":
        x, public = (np.stack([image.numpy() for image, _ in part]) for part in parts.values())
        y = np.array(parts["private"].targets)
    with tempfile.TemporaryDirectory() as home:
        clf = PATEClassifier(8.0, account="images", classes=classes, home=home, verbose=False, **settings)
        clf.fit(x, y, public=public)
    more = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - imports
    return {"processor_seconds": round(time.process_time() - begin, 1), "peak_mib": round(more / unit)}


def measure_threads(folder: Path, threads: int) -> float:
    """Measure the wall time of reading a folder by so many threads."""
    os.cpu_count = lambda: threads  # the number of threads that PointStream starts
    begin = time.perf_counter()
    for _ in PointStream("x", folder, size=64).iterate_blocks():
        pass
    return round(time.perf_counter() - begin, 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=Path)
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.one[0], options.one[1] == "encoder", Path(options.one[2]))))
        return
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as place:
        for part, count in SIZES.items():
            write_folder(Path(place) / part, count, 64, "png")
        torch.save(torchvision.models.squeezenet1_1().state_dict(), Path(place) / "net.pth")
        for kind in ("none", "encoder"):
            for form in ("floats", "folder", "dataset"):
                command = [sys.executable, __file__, "--one", form, kind, place]
                result = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
                rows.append({"case": form, "features": kind, **result})
                print(rows[-1], flush=True)
        write_folder(Path(place) / "photographs", 2000, 512, "jpg")
        for threads in (1, 2, 1, 2):
            rows.append({"case": f"2,000 JPEGs of 512 x 512, {threads} thread(s)"})
            rows[-1]["wall_seconds"] = measure_threads(Path(place) / "photographs", threads)
            print(rows[-1], flush=True)
    if options.rows:
        pd.DataFrame(rows).to_csv(options.rows, index=False)


if __name__ == "__main__":
    main()
