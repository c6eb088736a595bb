"""Whole runs in a second or two, for more than one test module."""

import json
from pathlib import Path

from pate_torch import PATE
from pate_torch.config import RunConfig
from pate_torch.mechanisms.gaussian import GNMax
from pate_torch.privacy.partition import AddRemove
from pate_torch.queries.base import Random
from pate_torch.students.selection import Selection
from pate_torch.students.training import Supervised
from pate_torch.teachers.training import TeacherRecipe
from tests.run_configs import changed, run_config
from tests.worlds import blobs

DELTA = 1e-4


def tiny(home: Path) -> RunConfig:
    """Twelve teachers, twenty queries, a student of forty steps."""
    learner = Supervised(network="mlp", steps=40, augment=None)
    recipe = TeacherRecipe(network="logistic", steps=30, batch_size=8, learning_rate=0.05)
    return run_config(
        dataset=blobs(), partition=AddRemove(), teacher=recipe, mechanism=GNMax(sigma=2.0), query=Random(),
        student=learner, guide_student=learner, root=home, folder=home / "runs" / "blobs" / "gaussian" / "first",
        seed=0, num_teachers=12, num_queries=20, delta=DELTA, opening_budget=50.0, baseline=False, quiet=True,
    )  # fmt: skip


def again(plan, name, **changes):
    return changed(plan, folder=plan.folder.parent / name, **changes)


def summary(plan):
    return json.loads((plan.folder / "release" / "summary.json").read_text())


def student(steps: int = 2) -> Supervised:
    return Supervised(network="logistic", steps=steps, augment=None)


def selection(**changes) -> Selection:
    return Selection(**{"candidates": {"a": student(2), "b": student(3)}, "validation": 0.3, **changes})


RECIPE = TeacherRecipe(network="logistic", steps=2, batch_size=8)


def pate(home, x, y, classes=2, **changes) -> PATE:
    given = {"num_teachers": 8, "mechanism": GNMax(sigma=6.0), "delta": DELTA, "budget_epsilon": 40.0}
    return PATE("line", classes=classes, home=home, teacher=RECIPE, **{**given, **changes}).fit_teachers(x, y)
