"""Data, networks and recipes of the GPU check: random images whose class is the quarter with a bright square."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu.findings import Setup
from pate_torch.features.augmentation import Affine
from pate_torch.features.contrastive import ContrastiveFeatures
from pate_torch.privacy.records import DataSpec, PrivateRecords, Shards
from pate_torch.students.base import StudentAlgorithm, StudentTask
from pate_torch.students.self_training import PooledStudent, SelfTraining
from pate_torch.students.semi_supervised import FixMatch, LabelSpreading, Vat
from pate_torch.students.training import Supervised
from pate_torch.teachers.engine import Chunk
from pate_torch.teachers.recipe import TeacherRecipe

AUGMENT = Affine(rotate=10, scale=0.1, shift=1, shear=5)
CPU = torch.device("cpu")
Options = dict[str, Any]

NETWORKS: dict[str, Options] = {
    "logistic": {},
    "mlp": {},
    "lean_cnn": {},
    "convnet": {},
    "resnet": {},
}
SMALL_NETWORKS: dict[str, Options] = {
    "logistic": {},
    "mlp": {"hidden": [8]},
    "lean_cnn": {"channels": [2, 4], "hidden": 8},
    "convnet": {"channels": [2, 4], "hidden": [8]},
    "resnet": {"width": 8},
}


def choose_networks(setup: Setup) -> dict[str, Options]:
    """Return the networks of teachers and their options."""
    return setup.choose(NETWORKS, SMALL_NETWORKS)


def make_spec(setup: Setup) -> DataSpec:
    """Describe images of CIFAR's shape, or gray images of 8 x 8."""
    channels, side = setup.choose((3, 32), (1, 8))
    half = (0.5,) * channels
    return DataSpec(
        name="squares",
        num_classes=4,
        input_shape=(channels, side, side),
        class_names=("0", "1", "2", "3"),
        mean=half,
        std=half,
    )


def draw_images(spec: DataSpec, count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Draw images, uint8 [count, channels, height, width], and their classes [count]."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(4, (count,), generator=generator)
    x = torch.randint(100, (count, *spec.input_shape), generator=generator, dtype=torch.uint8)
    half = spec.input_shape[1] // 2
    for label in range(4):
        top, left = (label // 2) * half, (label % 2) * half
        has_label = (y == label)[:, None, None, None]
        x[:, :, top : top + half, left : left + half] += (120 * has_label).to(torch.uint8)
    return x, y


def draw_chunk(spec: DataSpec, teachers: int, size: int = 24) -> Chunk:
    """Draw teachers with ``size`` records each."""
    x, y = draw_images(spec, teachers * size)
    return Chunk(0, x.unflatten(0, (teachers, size)), y.view(teachers, size), torch.full((teachers,), size))


def draw_shards(spec: DataSpec, teachers: int, size: int) -> tuple[PrivateRecords, Shards]:
    """Draw private records, and deal them to teachers with ``size`` records each."""
    x, y = draw_images(spec, teachers * size)
    index_KS = torch.arange(teachers * size).view(teachers, size)
    shards = Shards(index_KS, torch.ones_like(index_KS, dtype=torch.bool), "add_remove")
    return PrivateRecords.from_rows(x, y, np.arange(len(x)).astype(str)), shards


def make_recipe(network: str, options: Options, **changes: Any) -> TeacherRecipe:
    """Make a recipe of teachers with augmentation."""
    defaults: Options = {"batch_size": 8, "steps": 4, "augment": AUGMENT}
    return TeacherRecipe(network=network, options=options, **(defaults | changes))


def _student_options(setup: Setup, steps: int, batch_size: int) -> Options:
    small = {"channels": [2, 4], "hidden": 8}
    return {
        "network": "small_cnn",
        "network_options": setup.choose({}, small),
        "augment": AUGMENT,
        "steps": steps,
        "batch_size": setup.choose(batch_size, 8),
    }


def make_encoder(setup: Setup, steps: int) -> ContrastiveFeatures:
    """Make the recipe of a contrastive encoder."""
    return ContrastiveFeatures(**_student_options(setup, steps, 256))


def make_students(setup: Setup, steps: int) -> dict[str, StudentAlgorithm]:
    """Make students of one network that take this many steps."""
    options = _student_options(setup, steps, 64)
    unlabeled = options | {"unlabeled_batch": setup.choose(128, 8)}
    return {
        "supervised": Supervised(**options),
        "fixmatch": FixMatch(**unlabeled),
        "vat": Vat(**unlabeled),
    }


def make_other_students(setup: Setup, steps: int) -> dict[str, StudentAlgorithm]:
    """Make students that consist of several students, and one that trains no network."""
    students = make_students(setup, steps)
    return {
        "ensemble": PooledStudent(member=students["supervised"], members=2),
        "self_training": SelfTraining(first_student=students["fixmatch"], later_students=students["supervised"]),
        "label_spreading": LabelSpreading(),
    }


def make_student_task(setup: Setup) -> StudentTask:
    """Draw public images, of which some have labels."""
    x, y = draw_images(make_spec(setup), setup.choose(1000, 40))
    labeled = setup.choose(100, 12)
    return StudentTask(spec=make_spec(setup), pool_x=x, query_Q=torch.arange(labeled), label_Q=y[:labeled])
