"""What pate_torch does with a split: the method that the planner's rule names, and the others it has."""

from __future__ import annotations

import contextlib
import functools
import io
import tempfile
import warnings
from typing import Any

import numpy as np
import torch
from sklearn.linear_model import LogisticRegressionCV

from benchmarks import tables
from benchmarks.same_encoder.data import Split
from pate_torch.accounting import calibration
from pate_torch.estimator import Pate
from pate_torch.mechanisms.gaussian import Gaussian
from pate_torch.mechanisms.histogram import Histogram
from pate_torch.protocols import Mechanism, StudentAlgorithm
from pate_torch.queries.clusters import Medoids, Prototypes
from pate_torch.students.fixmatch import FixMatch
from pate_torch.students.label_spreading import LabelSpreading
from pate_torch.students.logistic import Logistic
from pate_torch.students.self_training import SelfTraining
from pate_torch.students.supervised import Supervised
from pate_torch.teachers.recipe import TeacherRecipe
from pate_torch.types import EncoderCard
from pate_torch.voters.reverse_knn import ReverseKnn

DELTA = tables.DELTA
TEACHER = TeacherRecipe(network="logistic", steps=60, batch_size=16, learning_rate=0.03, backend="vectorised")
Answer = tuple[np.ndarray, dict[str, Any]]
"""Predicted classes of the test points, and what else is shown of a row."""


def by_rule(split: Split, epsilon: float) -> Answer:
    """``PATEClassifier`` as it is: nothing is chosen here."""
    card = EncoderCard(name=split.name, kind="given") if split.encoded else None
    return tables.ours(split, epsilon, encoder=card), {}


def _student(name: str) -> StudentAlgorithm:
    if name == "label spreading":
        return LabelSpreading(network="logistic", alignment="labels")
    return FixMatch(network="logistic", alignment="labels") if name == "fixmatch" else Logistic()


def teachers(
    split: Split,
    epsilon: float,
    *,
    records_a_teacher: int,
    questions_a_class: int,
    student: str,
    transductive: bool = False,
) -> Answer:
    """GNMax: logistic teachers, prototypes asked.

    Beside it a regularised logistic regression of the same labels, how many of these are right, and the plurality.
    """
    queries = min(questions_a_class * split.classes, len(split.public))
    sigma = _calibrated(lambda sigma: Gaussian(sigma=sigma), queries, epsilon)
    num_teachers = max(2, split.about // records_a_teacher)
    with _asked(split, num_teachers, Gaussian(sigma=sigma), TEACHER) as pate:
        voters = "teachers_transductive" if transductive else None
        release = pate.label(_floats(split.public), queries, strategy=Prototypes(), voters=voters)
        assert pate._stored is not None
        plain = pate._stored.ensemble.votes(_floats(split.public)).plurality().numpy()
        predicted = pate.fit_student(_student(student)).predict(_floats(split.test)).numpy()
    asked_A = release.query_Q[release.answered_Q].numpy()
    label_A = release.label_Q[release.answered_Q].numpy()
    return predicted, {
        "logistic": float((_logistic(split, asked_A, label_A) == split.truth).mean()),
        "labels_right": float((label_A == split.told[asked_A]).mean()),
        "plurality": float((plain == split.told).mean()),
        "sigma": sigma,
        "teachers": num_teachers,
    }


def reverse_knn(split: Split, epsilon: float, *, cells_a_class: int, alpha: float, keep: float) -> Answer:
    """Zhu et al. 2022: records are counted into the cells of public points; self-training on the noisy classes."""
    cells = min(cells_a_class * split.classes, len(split.public))
    sigma = _calibrated(lambda sigma: Histogram(sigma=sigma, adjacency="add_remove"), cells, epsilon)
    learn = Supervised(network="logistic")
    student = SelfTraining(first=learn, then=learn, alpha=alpha, keep_fraction=keep, num_generations=1)
    with _asked(split, None, Histogram(sigma=sigma, adjacency="add_remove"), ReverseKnn()) as pate:
        release = pate.label(_floats(split.public), cells, strategy=Medoids())
        predicted = pate.fit_student(student).predict(_floats(split.test)).numpy()
    asked_A = release.query_Q[release.answered_Q].numpy()
    right = float((release.label_Q[release.answered_Q].numpy() == split.told[asked_A]).mean())
    return predicted, {"labels_right": right, "sigma": sigma}


# ---- parts -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _asked(split: Split, num_teachers: int | None, mechanism: Mechanism, teacher: Any) -> Any:
    """Voters that are ready to be asked; the account counts, and refuses nothing."""
    mean, std = split.scale
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        pate = Pate(
            "same",
            classes=split.classes,
            num_teachers=num_teachers,
            mechanism=mechanism,
            delta=DELTA,
            budget_epsilon=1e6,
            home=_home(split.name, split.seed).name,
            teacher=teacher,
            mean=mean.tolist(),
            std=std.tolist(),
            allow_chance=True,
            seed=split.seed,
        )
        yield pate.fit_teachers(_floats(split.x), torch.from_numpy(split.y), public_x=_floats(split.public))


@functools.cache
def _home(name: str, seed: int) -> tempfile.TemporaryDirectory[str]:
    """One ensemble for all epsilons of a split: it is found again."""
    return tempfile.TemporaryDirectory()


def _calibrated(mechanism: Any, queries: int, epsilon: float) -> float:
    return calibration.smallest_sigma(lambda sigma: mechanism(sigma).worst_case(queries), epsilon=epsilon, delta=DELTA)


def _floats(x: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(x, np.float32))


def _logistic(split: Split, asked_A: np.ndarray, label_A: np.ndarray) -> np.ndarray:
    """scikit-learn's, its penalty by cross-validation on the labels."""
    mean, std = split.scale
    kept = np.bincount(label_A, minlength=split.classes)[label_A] >= 3  # folds need three of a class
    if len(set(label_A[kept])) < 2:
        return np.full(len(split.test), np.bincount(label_A).argmax())
    fitted = LogisticRegressionCV(Cs=np.logspace(-5, 2, 8), cv=3, max_iter=500).fit(
        (split.public[asked_A[kept]] - mean) / std, label_A[kept]
    )
    return np.asarray(fitted.predict((split.test - mean) / std))
