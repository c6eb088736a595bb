"""Small tasks for students, and students as their YAML describes them, made quick."""

import dataclasses
import functools

import pandas as pd
import torch
from hydra import compose
from hydra.utils import instantiate

from pate_torch import networks
from pate_torch.cli import hydra_config
from pate_torch.privacy.records import DataSpec
from pate_torch.privacy.schema import Column, TableSchema
from pate_torch.students.base import Student, StudentAlgorithm, StudentTask
from tests.configurations import list_options
from tests.worlds import IMAGES, images

CPU = torch.device("cpu")
NAMES = [name for name in list_options("student") if name not in ("none", "same", "released_model", "count_regression")]
ROWS = DataSpec(name="clouds", num_classes=2, input_shape=(6,), class_names=("a", "b"), mean=(0.0,) * 6, std=(2.0,) * 6)

TABLE = DataSpec(
    name="clinic", num_classes=2, input_shape=(3,), class_names=("ill", "well"), mean=(40.0, 0.0, 0.0),
    std=(9.0, 1.0, 1.0), schema=TableSchema((Column("age", None), Column("ward", ("A", "B")))),
)  # fmt: skip
FRAME = pd.DataFrame({"ward": ["B", "A", "A"], "age": [31, 62.5, 7], "diagnosis": "?"})


def rows(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two shifted Gaussian clouds in 6 dimensions."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(2, (count,), generator=generator)
    return torch.randn(count, 6, generator=generator) + 2.0 * (2 * y[:, None] - 1), y


def make_student(spec: DataSpec, network: str) -> Student:
    """A network of random weights, with statistics that are not those of a fresh one."""
    description = networks.describe(network, spec.input_shape, spec.num_classes)
    module, draw = networks.rebuild(description), torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        parameter.data = 0.3 * torch.randn(parameter.shape, generator=draw)
    for name, buffer in module.named_buffers():
        if "running" in name:
            buffer.copy_(torch.rand(buffer.shape, generator=draw) + 0.5)
    return Student(description, module.eval(), spec)


def vectors(right: float, count: int = 400) -> tuple[StudentTask, torch.Tensor, torch.Tensor]:
    """Four classes of rows of forty numbers, five of which tell them apart; so many of the labels are right."""
    generator = torch.Generator().manual_seed(0)
    center = 1.6 * torch.randn(4, 5, generator=generator)
    y = torch.randint(4, (3000,), generator=generator)
    x = torch.randn(3000, 40, generator=generator)
    x[:, :5] += center[y]
    label = y[:count].clone()
    bad = torch.rand(count, generator=generator) >= right
    label[bad] = (label[bad] + torch.randint(1, 4, (int(bad.sum()),), generator=generator)) % 4
    wide = {"input_shape": (40,), "mean": (0.0,) * 40, "std": (1.0,) * 40}
    spec = dataclasses.replace(ROWS, num_classes=4, class_names=tuple("abcd"), **wide)
    return StudentTask(spec, x[:1500], torch.arange(count), label), x[1500:], y[1500:]


def make_task(labels: int = 12, spec: DataSpec = IMAGES, **changes) -> tuple[StudentTask, torch.Tensor]:
    """A task with so many labels, and the truth of all of its points."""
    x, y = (images if spec is IMAGES else rows)(150, seed=1)
    query_Q = torch.arange(labels)
    return dataclasses.replace(StudentTask(spec, x, query_Q, y[query_Q]), **changes), y


def compute_accuracy(student: Student) -> float:
    x, y = (images if student.spec == IMAGES else rows)(300, seed=2)
    return float((student.predict(x) == y).float().mean())


@functools.cache
def _compose(name: str) -> StudentAlgorithm:
    with hydra_config.open_configuration():
        augment = "recommended.augment={rotate:0,scale:0,shift:0.5,shear:0}"
        node = compose("config", overrides=[f"student={name}", "features=none", augment]).student
    return instantiate(node, _convert_="all")


def configure(name: str, network: str = "small_cnn", steps: int = 25) -> StudentAlgorithm:
    """A student as its YAML describes it, on a small network and with few steps."""
    return _shorten(_compose(name), network, steps)


def _shorten(student, network: str, steps: int):
    fields = {field.name for field in dataclasses.fields(student)}
    parts = {key for key in ("member", "first_student", "later_students") if key in fields}
    options = {"channels": (8, 16), "hidden": 32} if network == "small_cnn" else {}
    small = {"steps": steps, "network": network, "network_options": options, "batch_size": 16, "unlabeled_batch": 32}
    small |= {} if "first_student" in fields else {"members": 2}
    changes = {key: value for key, value in small.items() if key in fields}
    changes |= {key: _shorten(getattr(student, key), network, steps) for key in parts}
    return dataclasses.replace(student, **changes)
