"""Processor time and peak memory of images that are passed as floats, as a folder, and as a Dataset.

    PYTHONPATH=. python benchmarks/image_streams.py > benchmarks/results/image_streams.csv

2,000 color images of 64 x 64 are fitted by PATEClassifier with cheap teachers, or with an encoder, each case in a fresh
process. Last, a folder of JPEGs as large as photographs is read by one and by two threads.
"""

from __future__ import annotations

import itertools
import json
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

from benchmarks import measuring
from pate_torch import PATEClassifier
from pate_torch.data.streams import PointStream
from pate_torch.features.encoder import Encoder

CLASSES = ["a", "b"]
SIZES = {"private": 2000, "public": 200}
SETTINGS = {"method": "teachers", "num_teachers": 4, "num_queries": 50, "spend_anyway": True}


def write_folder(folder: Path, count: int, size: int, suffix: str) -> None:
    """Write images of two classes, told by the brightness of the left half."""
    generator = np.random.default_rng(count + size)
    for row in range(count):
        small = generator.integers(0, 200, (8, 8, 3), dtype=np.uint8)
        small[:, :4] += np.uint8(55 * (row % 2))
        (file := folder / CLASSES[row % 2] / f"{row:04d}.{suffix}").parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(small).resize((size, size), Image.Resampling.BICUBIC).save(file)


def measure(form: str, has_encoder: bool, folder: Path) -> dict[str, float]:
    """Fit once, and measure this process: its processor time, and its peak memory above that of the imports."""
    imports, begin = measuring.get_peak_bytes(), time.process_time()
    settings = dict.fromkeys(("teacher", "student"), LogisticRegression(max_iter=5)) | SETTINGS
    if has_encoder:
        settings = {"encoder": Encoder(network="torchvision:squeezenet1_1", weights=str(folder / "net.pth"), size=64)}
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
    more = measuring.get_peak_bytes() - imports
    return {"processor_seconds": round(time.process_time() - begin, 1), "peak_mib": round(more / 2**20)}


def measure_threads(folder: Path, threads: int) -> float:
    """Measure the wall time of reading a folder by so many threads."""
    torch.set_num_threads(threads)  # the number of threads that PointStream starts
    return round(measuring.measure_seconds(PointStream("x", folder, size=64).load, time.perf_counter), 2)


def main() -> None:
    if len(sys.argv) > 1:  # the process of one case
        form, features, place = sys.argv[1:]
        print(json.dumps(measure(form, features == "encoder", Path(place))))
        return
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as place:
        for part, count in SIZES.items():
            write_folder(Path(place) / part, count, 64, "png")
        torch.save(torchvision.models.squeezenet1_1().state_dict(), Path(place) / "net.pth")
        for features, form in itertools.product(("none", "encoder"), ("floats", "folder", "dataset")):
            result = measuring.run_script(__file__, form, features, place)
            rows.append({"case": form, "features": features, **result})
        write_folder(Path(place) / "photographs", 2000, 512, "jpg")
        for threads in (1, 2, 1, 2, 1, 2):
            case = {"case": "2,000 JPEGs of 512 x 512", "threads": threads}
            rows.append(case | {"wall_seconds": measure_threads(Path(place) / "photographs", threads)})
    print(pd.DataFrame(rows).to_csv(index=False), end="")


if __name__ == "__main__":
    main()
