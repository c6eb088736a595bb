"""SVHN's recipe on files of SVHN's format whose images are made from MNIST.

    python -m benchmarks.svhn_format --data-root data --device cuda --teachers 250 --output found.json
    python -m benchmarks.svhn_format --data-root data --teachers 4 --parts teachers --cases lean_cnn --output found.json

``train_32x32.mat``, ``extra_32x32.mat`` and ``test_32x32.mat`` hold X, uint8 [32, 32, 3, N], and y with 10 for the
digit 0. Each image is a digit of MNIST of a random size, color, background, brightness and noise, with parts of other
digits to the left and right, as in SVHN. Private images repeat MNIST's 60,000 training digits, and the others its
10,000 test digits, with fresh colors. They are no photographs, so no figure of this program is a figure of SVHN.

The part ``teachers`` trains teachers of every network on shards of both sizes, and measures the accuracy of a teacher
and of the plurality, and seconds per teacher: of the processor on a CPU, else of the clock. The part ``recipe`` runs
``train.py dataset=svhn`` as a user would: mechanism=gaussian, the same teachers with mechanism=sparse_vector on the
same account, and another student of the same labels. With --images, fewer private images are made.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import scipy.io
import torch
import torch.nn.functional as F
import torchvision
from hydra import compose
from torch import Tensor

from benchmarks import measuring
from pate_torch.cli import hydra_config
from pate_torch.cli import train as train_command
from pate_torch.data.benchmark import Svhn
from pate_torch.privacy.partition import AddRemove, assign_shards, select
from pate_torch.privacy.records import Dataset
from pate_torch.teachers.recipe import TeacherRecipe
from pate_torch.teachers.training import train

TRAIN, EXTRA, TEST = 73_257, 531_131, 26_032
"""Numbers of images in SVHN's files."""
TEACHERS = 250
SHARDS = {"train": TRAIN // TEACHERS, "train and extra": (TRAIN + EXTRA) // TEACHERS}
BATCH = 4096
CASE_KEYS = ("teacher.learning_rate", "recommended.passes")
CASES = ["lean_cnn", "lean_cnn:0.002:40", "convnet:0.001:20", "convnet:0.001:40", "convnet:0.0005:40"]
SPARSE_VECTOR = ["mechanism.epsilon=4", "mechanism.max_failures=1"]
"""Its defaults need 3,483 teachers for 500 queries."""


def draw_images(digit_x: Tensor, digit_y: Tensor, count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw images, uint8 [count, 3, 32, 32], of all digits [N, 28, 28] in turn, and their classes [count]."""
    generator = torch.Generator().manual_seed(seed)
    x, chosen = (
        torch.empty(count, 3, 32, 32, dtype=torch.uint8),
        torch.randperm(count, generator=generator) % len(digit_y),
    )
    for start in range(0, count, BATCH):
        index = chosen[start : start + BATCH]
        x[start : start + BATCH] = _color(_place(digit_x, index, generator), generator)
    return x.numpy(), digit_y[chosen].numpy()


def _place(digit_x: Tensor, index: Tensor, generator: torch.Generator) -> Tensor:
    """Draw digits in the middle, with parts of others to the left and right, [B, 1, 32, 32] in 0..1."""
    size = len(index)
    neighbor = torch.randint(len(digit_x), (2, size), generator=generator)
    distance = 15 + 5 * torch.rand(3, size, generator=generator)
    scale = 0.85 + 0.35 * torch.rand(size, generator=generator)
    total = torch.zeros(size, 1, 32, 32)
    for place, digits in ((0, index), (1, neighbor[0]), (-1, neighbor[1])):
        theta = torch.zeros(size, 2, 3)
        theta[:, 0, 0], theta[:, 1, 1] = 32 / 28 / scale * 1.15, 32 / 28 / scale  # house numbers are narrow
        theta[:, 0, 2] = -place * distance[abs(place) + (place < 0)] / 14 / scale if place else 0
        theta[:, :, 2] += 0.12 * torch.randn(size, 2, generator=generator)
        theta[:, 0, 1] = 0.2 * torch.randn(size, generator=generator)
        grid = F.affine_grid(theta, [size, 1, 32, 32], align_corners=False)
        drawn = F.grid_sample(digit_x[digits, None].float() / 255, grid, align_corners=False)
        total = torch.maximum(
            total, drawn if place == 0 else drawn * (torch.rand(size, 1, 1, 1, generator=generator) < 0.7)
        )
    return total


def _color(mask: Tensor, generator: torch.Generator) -> Tensor:
    """Draw colors of digit and background that differ, a gradient of brightness, blur and noise [B, 3, 32, 32]."""
    size = len(mask)
    ground = torch.rand(size, 3, 1, 1, generator=generator)
    contrast = 0.2 + 0.4 * torch.rand(size, 1, 1, 1, generator=generator)
    lighter = torch.where(ground.mean(1, keepdim=True) < 0.5, contrast, -contrast)
    ink = ground + lighter + 0.15 * torch.randn(size, 3, 1, 1, generator=generator)
    slope = 0.2 * torch.randn(2, size, 1, 1, 1, generator=generator)
    line = torch.linspace(-1, 1, 32)
    light = slope[0] * line.view(1, 1, 1, 32) + slope[1] * line.view(1, 1, 32, 1)
    blurred = F.avg_pool2d(mask, 3, 1, 1)
    is_blurred = torch.rand(size, 1, 1, 1, generator=generator) < 0.5
    x = ground + (ink - ground) * torch.where(is_blurred, blurred, mask) + light
    return (255 * (x + 0.05 * torch.randn(x.shape, generator=generator))).round().clamp(0, 255).to(torch.uint8)


def write_file(folder: Path, split: str, x: np.ndarray, y: np.ndarray) -> None:
    """Write images [N, 3, 32, 32] and classes [N] as ``<split>_32x32.mat``."""
    content = {
        "X": np.ascontiguousarray(x.transpose(0, 1, 3, 2)).T,
        "y": np.where(y == 0, 10, y).astype(np.uint8)[:, None],
    }
    scipy.io.savemat(folder / f"{split}_32x32.mat", content)


def write_files(folder: Path, mnist_root: Path, images: int) -> None:
    """Write the three files with so many private images, of which SVHN's share of each file."""
    splits = {name: torchvision.datasets.MNIST(str(mnist_root), train=name == "train") for name in ("train", "test")}
    x, y = draw_images(splits["train"].data, splits["train"].targets, images, seed=1)
    first = min(TRAIN, max(1, images * TRAIN // (TRAIN + EXTRA)))
    write_file(folder, "train", x[:first], y[:first])
    write_file(folder, "extra", x[first:], y[first:])
    write_file(folder, "test", *draw_images(splits["test"].data, splits["test"].targets, TEST, seed=2))


@contextlib.contextmanager
def accept_any_checksum() -> Iterator[None]:
    """Let torchvision read files that have SVHN's format but not its checksums."""
    exists = torchvision.datasets.utils.check_integrity
    with mock.patch("torchvision.datasets.svhn.check_integrity", lambda path, md5: exists(path)):
        yield


def measure_teachers(
    data: Dataset, images: int, num_teachers: int, recipe: TeacherRecipe, device: str
) -> dict[str, Any]:
    """Train teachers on the first images, and measure the accuracy of each and of the plurality, and seconds."""
    clock = time.process_time if device == "cpu" else time.perf_counter
    private = select(data.private, np.arange(images))
    shards = assign_shards(AddRemove(), private, num_teachers, seed=0)
    start = clock()
    ensemble = train(private, data.spec, shards, recipe, seed=0, device=device)
    middle = clock()
    x, y = data.evaluation.x, data.evaluation.y
    assert x is not None and y is not None
    predicted_KQ = ensemble.predict(x, device=device).cpu()
    end = clock()
    accuracy_K = (predicted_KQ == y).float().mean(1)
    counts_QC = F.one_hot(predicted_KQ.long(), data.spec.num_classes).sum(0)
    top = counts_QC.topk(2, dim=1).values
    return {
        "network": recipe.network,
        "learning_rate": recipe.learning_rate,
        "steps": recipe.steps,
        "teachers": num_teachers,
        "images_per_teacher": images // num_teachers,
        "teacher_accuracy": float(accuracy_K.mean()),
        "teacher_accuracy_min": float(accuracy_K.min()),
        "teacher_accuracy_max": float(accuracy_K.max()),
        "plurality_accuracy": float((counts_QC.argmax(1) == y).float().mean()),
        "median_lead_votes": float((top[:, 0] - top[:, 1]).float().median()),
        "test_images": len(y),
        "training_seconds_per_teacher": (middle - start) / num_teachers,
        "voting_seconds_per_teacher_and_10000_images": (end - middle) / num_teachers * 10_000 / len(y),
        "clock": "processor" if device == "cpu" else "wall",
    }


def run_teachers(args: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """Measure each case on shards of each size."""
    data = Svhn(path=str(folder), private=args.images, test=args.test).load()
    for shard in args.shards:
        for case in args.cases:
            network, *changes = case.split(":")
            num_teachers = min(args.teachers, args.few_teachers) if changes else args.teachers
            images = min(num_teachers * SHARDS[shard], args.images)
            settings = [f"dataset.private={images}", f"num_teachers={num_teachers}", f"teacher={network}"]
            settings += [f"{key}={value}" for key, value in zip(CASE_KEYS, changes, strict=False)]
            settings += [f"teacher.steps={args.steps}"] if args.steps else []
            with hydra_config.open_configuration():
                cfg = compose("config", overrides=["dataset=svhn", *settings])
            recipe = hydra_config.instantiate_component(cfg, "teacher", TeacherRecipe)
            yield {"shard": shard} | measure_teachers(data, images, num_teachers, recipe, args.device)


def run_recipe(args: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """Run the command with both mechanisms on one account, and another student of the first labels."""
    home, changes = folder / "home", tuple(args.settings)
    home.mkdir(mode=0o700)
    first = _run_command(args, folder, "mechanism=gaussian", *changes, *args.gaussian)
    yield first
    if "release_id" not in first:
        return
    stored = f"teachers={first['teachers_id']}"
    yield _run_command(args, folder, stored, "mechanism=sparse_vector", "student=supervised", *changes, *args.sparse)
    yield _run_command(args, folder, f"labels={first['release_id']}", "student=supervised", *changes)


def _run_command(args: argparse.Namespace, folder: Path, *settings: str) -> dict[str, Any]:
    """Run ``train.py dataset=svhn``, and return the summary of its release, or its exit code."""
    summaries = set((folder / "home").rglob("release/summary.json"))
    words = ["dataset=svhn", f"data_root={folder}", f"dataset.private={args.images}", f"num_teachers={args.teachers}"]
    words += [f"device={args.device}", f"dataset.test={args.test}", "baseline=false", "quiet=true"]
    argv = ["train.py", *words, *settings, "hydra/job_logging=none", "hydra/hydra_logging=none"]
    start = time.perf_counter()
    with mock.patch.dict(os.environ, {"PATE_HOME": str(folder / "home")}), mock.patch.object(sys, "argv", argv):
        code = train_command.train()
    found = {"settings": list(settings), "exit_code": code, "wall_seconds": time.perf_counter() - start}
    if code:
        return found
    (summary_file,) = set((folder / "home").rglob("release/summary.json")) - summaries
    found |= json.loads(summary_file.read_text())
    private_file = summary_file.parents[1] / "private" / "summary.json"  # for the owner; MNIST is public
    return found | ({"owner": json.loads(private_file.read_text())} if private_file.is_file() else {})


def main(arguments: Sequence[str] | None = None) -> None:
    """Make the files, run the parts, and write what was found after each of them."""
    parser = measuring.make_parser(__doc__)
    parser.add_argument("--data-root", type=Path, required=True, help="folder that holds MNIST/raw")
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--teachers", type=int, default=TEACHERS)
    parser.add_argument("--few-teachers", type=int, default=8, help="teachers of cases with changes")
    parser.add_argument("--images", type=int, help="private images; default 2,417 for each teacher")
    parser.add_argument("--test", type=int, default=16_032, help="test images")
    parser.add_argument("--parts", nargs="+", default=["recipe", "teachers"], choices=["teachers", "recipe"])
    parser.add_argument("--cases", nargs="+", default=CASES, help="network[:learning rate[:passes]]")
    parser.add_argument("--shards", nargs="+", default=list(SHARDS), choices=list(SHARDS))
    parser.add_argument("--steps", type=int, help="steps of each teacher of the part teachers; default: the recipe's")
    parser.add_argument("--settings", nargs="*", default=[], help="settings of all runs of the part recipe")
    parser.add_argument("--gaussian", nargs="*", default=[], help="further settings of its first run")
    parser.add_argument("--sparse", nargs="*", default=SPARSE_VECTOR, help="further settings of its second run")
    args = parser.parse_args(arguments)
    args.images = args.images or min(TRAIN + EXTRA, -(-args.teachers * (TRAIN + EXTRA) // TEACHERS))
    torch.set_num_threads(1 if args.device == "cpu" else torch.get_num_threads())
    hydra_config.register_components()
    device_name = torch.cuda.get_device_name() if args.device.startswith("cuda") else platform.processor()
    found: dict[str, Any] = {"data": "digits of MNIST in SVHN's format, not SVHN", "images": args.images}
    found |= {"device": args.device, "device_name": device_name, "torch": torch.__version__, "seconds": {}, "rows": []}
    with tempfile.TemporaryDirectory() as name, accept_any_checksum():
        folder, start = Path(name), time.perf_counter()
        write_files(folder, args.data_root, args.images)
        found["seconds"]["files"] = time.perf_counter() - start
        for part in args.parts:
            start = time.perf_counter()
            for row in {"teachers": run_teachers, "recipe": run_recipe}[part](args, folder):
                found["rows"].append({"part": part} | row)
                found["seconds"][part] = time.perf_counter() - start
                args.output.write_text(json.dumps(found, indent=2) + "\n")
                print(json.dumps(found["rows"][-1]), flush=True)


if __name__ == "__main__":
    main()
