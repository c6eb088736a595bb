"""A thousand classes, from training to the report, by every kind of voter and by mechanisms that look at all counts."""

import re
from functools import partial

import pytest
import torch

from pate_torch import pipeline
from pate_torch.mechanisms.confident import ConfidentGNMax
from pate_torch.mechanisms.exponential import ExponentialMechanism
from pate_torch.mechanisms.gaussian import GNMax
from pate_torch.mechanisms.gradient_descent import GradientDescent
from pate_torch.mechanisms.histogram import Histogram
from pate_torch.mechanisms.laplace import LNMax
from pate_torch.methods.gradients import GradientMethod
from pate_torch.methods.reverse_knn import ReverseKnn
from pate_torch.methods.teacher_votes import TeacherVotes
from pate_torch.methods.transductive import TransductiveTeacherVotes
from pate_torch.privacy.partition import AddRemove
from pate_torch.queries.base import Random
from pate_torch.students.linear import Logistic
from pate_torch.teachers.training import TeacherRecipe
from tests.run_configs import run_config
from tests.tensor_data import Tensors

CLASSES = 1000


def data():
    """Classes around points of their own in space, four private records of each, every one among the test points."""
    draw = torch.Generator().manual_seed(0)
    center = 10 * torch.randn(CLASSES, 8, generator=draw)
    parts = {}
    for part, times in (("", 4), ("pool_", 1), ("test_", 1)):
        y = torch.arange(CLASSES).repeat(times)
        parts |= {f"{part}x": center[y] + 0.1 * torch.randn(len(y), 8, generator=draw), f"{part}y": y}
    names = tuple(f"kind {c}" for c in range(CLASSES))
    return Tensors(name="kinds", class_names=names, nominal_size=4 * CLASSES, **parts)


ADJACENT = {"adjacency": "add_remove"}
WAYS = {
    "gaussian": (partial(TeacherVotes, num_teachers=4), GNMax(sigma=0.1)),
    "confident": (partial(TeacherVotes, num_teachers=4), ConfidentGNMax(sigma=0.1, screen_sigma=0.5, threshold=1)),
    "laplace": (partial(TeacherVotes, num_teachers=4), LNMax(sigma=0.1)),
    "exponential": (partial(TeacherVotes, num_teachers=4), ExponentialMechanism(sigma=0.1)),
    "transductive": (partial(TransductiveTeacherVotes, num_teachers=4), GNMax(sigma=0.1)),
    "gradients": (partial(GradientMethod), GradientDescent(sigma=0.01, steps=2, **ADJACENT)),
    "reverse_knn": (partial(ReverseKnn), Histogram(sigma=0.1, **ADJACENT)),
}


SLOW = pytest.mark.slow(reason="a thousand classes by each mechanism")
QUICK = ("gaussian",)


@pytest.mark.parametrize("way", [way if way in QUICK else pytest.param(way, marks=SLOW) for way in WAYS])
def test_a_thousand_classes_run_from_training_to_the_report(way, tmp_path, capsys):
    voters, mechanism = WAYS[way]
    recipe = TeacherRecipe(network="logistic", steps=60, batch_size=64, learning_rate=0.1)
    config = run_config(
        dataset=data(), partition=AddRemove(), method=voters, mechanism=mechanism, teacher=recipe, query=Random(),
        student=Logistic(ridge=1.0), baseline=False, root=tmp_path, folder=tmp_path / "runs" / "kinds", num_queries=60,
        delta=1e-5, opening_budget=1e9, quiet=True,
    )  # fmt: skip
    report = pipeline.run(config)
    shown, errors = capsys.readouterr()
    assert len(shown.splitlines()) < 60 and not errors
    assert min(report.evaluation.label_accuracy, report.evaluation.student_accuracy) > 10 / CLASSES  # ten times chance
    assert len(report.evaluation.confusion) == CLASSES
    page = (config.folder / "release" / "report.html").read_text()
    assert "The 24 least accurate of 1000 classes" in page and len(page) < 150_000
    card = (config.folder / "release" / "README.md").read_text()
    assert "1000: kind 0, kind 1," in card and "kind 24" not in card and len(re.findall("kind ", card)) == 24
