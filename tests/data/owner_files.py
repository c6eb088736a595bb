"""Small files of an owner in every format, and comparisons of what the sources read from them."""

import functools
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from PIL import Image
from sklearn.datasets import dump_svmlight_file

from pate_torch.data import image_folder, libsvm, tabular

# In most tests, the owner agrees that a part of the file becomes public.
Csv, Text, Libsvm = (
    functools.partial(kind, publish_split=True, publish_test=True)
    for kind in (tabular.Csv, tabular.Text, libsvm.Libsvm)
)
ImageFolder = functools.partial(image_folder.ImageFolder, publish_split=True, publish_test=True, size=8)
KINDS = {"csv": Csv, "svm": Libsvm, "images": ImageFolder}
CLASSES = ("no", "yes")


def table(rows=120, seed=0):
    random = np.random.default_rng(seed)
    return pd.DataFrame(
        {
            "age": random.integers(18, 90, rows),
            "height": random.normal(170, 10, rows).round(2),
            "color": random.choice(["red", "green", "blue"], rows),
            "user": [f"u{i % 40}" for i in range(rows)],
            "key": [f"k{i}" for i in range(rows)],
            "label": random.choice(CLASSES, rows),
        }
    )


def write(frame, path):
    frame.to_parquet(path) if path.suffix == ".parquet" else frame.to_csv(path, index=False)
    return str(path)


def changed_cell(frame, column, row, value):
    frame = frame.astype(object)
    frame.loc[row, column] = value
    return frame


def sparse(rows=200, features=30, seed=0):
    random = np.random.default_rng(seed)
    x = random.normal(size=(rows, features)).round(3) * (random.random((rows, features)) < 0.4)
    return x, random.choice([-1, 1], rows)


def write_svm(folder, x, y, name="t.svm", **options):
    dump_svmlight_file(x, y, str(folder / name), zero_based=False, **options)
    return str(folder / name)


def write_image(path, seed, size=(12, 9), mode="RGB"):
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    Image.fromarray(pixels).convert(mode).save(path)


def write_gallery(folder, count=30, classes=("cat", "dog")):
    for name in classes:
        for i in range(count):
            write_image(folder / name / f"p{i % 10}_{i}.png", i)
    return str(folder)


def write_files(folder: Path) -> dict[str, str]:
    """Write one file of each format, and the same file under another name."""
    paths = {}
    for name in ("own", "apart"):
        place = folder / name
        place.mkdir()
        paths |= {
            f"{name} csv": write(table()[["age", "height", "label", "user"]], place / "t.csv"),
            f"{name} svm": write_svm(place, *sparse(), query_id=np.arange(200)),
            f"{name} images": write_gallery(place / "images"),
        }
    return paths


def index_by_unit(private):
    """The exact private records by the names of their units."""
    records = {}
    for name, x, y in zip(private.unit_id, private.x, private.y, strict=True):
        records.setdefault(str(name), []).append((x.numpy().tobytes(), int(y)))
    return records


def assert_same_public_side(a, b):
    assert a.spec == b.spec
    assert torch.equal(a.pool.x, b.pool.x)
    assert torch.equal(a.evaluation.x, b.evaluation.x) and torch.equal(a.evaluation.y, b.evaluation.y)
