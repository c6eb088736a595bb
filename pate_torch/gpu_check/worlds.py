"""Data, networks and recipes that the parts share: images drawn at random, whose class a bright square tells."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from pate_torch.features.augmentation import Affine
from pate_torch.features.contrastive import ContrastiveFeatures
from pate_torch.gpu_check.parts import Bench
from pate_torch.protocols import StudentAlgorithm, StudentTask
from pate_torch.students.ensemble import Ensemble
from pate_torch.students.fixmatch import FixMatch
from pate_torch.students.label_spreading import LabelSpreading
from pate_torch.students.self_training import SelfTraining
from pate_torch.students.supervised import Supervised
from pate_torch.students.vat import Vat
from pate_torch.teachers.engine import Chunk
from pate_torch.teachers.recipe import TeacherRecipe
from pate_torch.types import DataSpec, PrivateData

CLASSES = 4
AUGMENT = Affine(rotate=10, scale=0.1, shift=1, shear=5)
CPU = torch.device("cpu")

NETWORKS: dict[str, dict[str, Any]] = {
    "logistic": {},
    "mlp": {},
    "lean_cnn": {},
    "convnet": {},
    "resnet": {},
    "wide_resnet": {"norm": "group", "depth": 16, "widen": 2},
}
_TOY: dict[str, dict[str, Any]] = {
    "logistic": {},
    "mlp": {"hidden": [8]},
    "lean_cnn": {"channels": [2, 4], "hidden": 8},
    "convnet": {"channels": [2, 4], "hidden": [8]},
    "resnet": {"width": 8},
    "wide_resnet": {"norm": "group", "depth": 10, "widen": 1},
}


def teacher_networks(bench: Bench) -> dict[str, dict[str, Any]]:
    """The networks of teachers, with their options."""
    return bench.of(NETWORKS, _TOY)


def spec(bench: Bench) -> DataSpec:
    """Images of CIFAR's shape, or of 8 x 8."""
    channels, side = bench.of((3, 32), (1, 8))
    names = tuple(str(c) for c in range(CLASSES))
    half = (0.5,) * channels
    return DataSpec(
        name="squares",
        num_classes=CLASSES,
        input_shape=(channels, side, side),
        class_names=names,
        mean=half,
        std=half,
    )


def images(spec: DataSpec, count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Images, uint8 [N, Ch, H, W], and their classes: the quarter with a bright square."""
    draw = torch.Generator().manual_seed(seed)
    y = torch.randint(CLASSES, (count,), generator=draw)
    x = torch.randint(100, (count, *spec.input_shape), generator=draw, dtype=torch.uint8)
    half = spec.input_shape[1] // 2
    for row in range(2):
        for column in range(2):
            own = (y == 2 * row + column)[:, None, None, None]
            x[:, :, row * half : (row + 1) * half, column * half : (column + 1) * half] += (120 * own).to(torch.uint8)
    return x, y


def chunk(spec: DataSpec, teachers: int, size: int = 24, seed: int = 0) -> Chunk:
    """So many teachers with so many records each."""
    x, y = images(spec, teachers * size, seed)
    return Chunk(0, x.unflatten(0, (teachers, size)), y.view(teachers, size), torch.full((teachers,), size))


def records(spec: DataSpec, count: int, seed: int = 0) -> PrivateData:
    """Private records."""
    x, y = images(spec, count, seed)
    return PrivateData(x, y, np.arange(count).astype(str))


def recipe(network: str, options: dict[str, Any], **changes: Any) -> TeacherRecipe:
    """A recipe of teachers, with augmentation."""
    given = {"batch_size": 8, "steps": 4, "augment": AUGMENT, "backend": "vectorised", **changes}
    return TeacherRecipe(network=network, options=options, **given)


# ---- students --------------------------------------------------------------------------------------------------------


def _network(bench: Bench) -> dict[str, Any]:
    small = {"channels": [2, 4], "hidden": 8}
    return {"network": "small_cnn", "network_options": bench.of({}, small), "augment": AUGMENT}


def encoder(bench: Bench, steps: int) -> ContrastiveFeatures:
    """The recipe of a contrastive encoder."""
    return ContrastiveFeatures(**_network(bench), steps=steps, batch_size=bench.of(256, 8))


def students(bench: Bench, steps: int) -> dict[str, StudentAlgorithm]:
    """Students that take so many steps."""
    given: dict[str, Any] = {**_network(bench), "steps": steps, "batch_size": bench.of(64, 8)}
    unlabeled: dict[str, Any] = {"unlabeled_batch": bench.of(128, 8)}
    return {
        "supervised": Supervised(**given),
        "fixmatch": FixMatch(**given, **unlabeled),
        "vat": Vat(**given, **unlabeled),
        "label_spreading": LabelSpreading(**given, **unlabeled),
    }


def pooled_students(bench: Bench, steps: int) -> dict[str, StudentAlgorithm]:
    """Students made of several."""
    alone = students(bench, steps)
    return {
        "ensemble": Ensemble(member=alone["supervised"], members=2),
        "self_training": SelfTraining(first=alone["fixmatch"], then=alone["supervised"]),
    }


def task(bench: Bench) -> StudentTask:
    """Public images, some of them with labels."""
    x, y = images(spec(bench), bench.of(1000, 40))
    asked = bench.of(100, 12)
    return StudentTask(spec=spec(bench), pool_x=x, query_Q=torch.arange(asked), label_Q=y[:asked])
