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
from pate_torch.api.pate import PATE
from pate_torch.mechanisms.base import VoteMechanism
from pate_torch.mechanisms.histogram import Histogram
from pate_torch.methods.reverse_knn import ReverseKnn
from pate_torch.planning.autoconfig import PublicFacts, choose_method
from pate_torch.privacy.records import EncoderCard
from pate_torch.queries.clusters import Medoids
from pate_torch.students.self_training import SelfTraining
from pate_torch.students.training import Supervised

DELTA = tables.DELTA
LEARNER = Supervised(network="logistic")
Answer = tuple[np.ndarray, dict[str, Any]]
"""Predicted classes of the test points, and what else is shown of a row."""


def by_rule(split: Split, epsilon: float) -> Answer:
    """``PATEClassifier`` as it is: nothing is chosen here."""
    card = EncoderCard(name=split.name, kind="given") if split.encoded else None
    return tables.ours(split, epsilon, encoder=card), {}


def teachers(split: Split, epsilon: float, *, transductive: bool = False) -> Answer:
    """GNMax by linear teachers, as ``PATEClassifier(method="teachers")`` has them: nothing is chosen here.

    Beside it a regularised logistic regression of the same labels, how many of these are right, and the plurality.
    """
    facts = PublicFacts(
        epsilon=epsilon,
        delta=DELTA,
        adjacency="add_remove",
        has_groups=False,
        num_records=split.about,
        num_public=len(split.public),
        num_classes=split.classes,
        is_image=False,
        is_encoded=split.encoded,
    )
    chosen = choose_method(facts, "teachers")
    assert isinstance(chosen.mechanism, VoteMechanism)
    mean, std = split.scale
    if not split.encoded:  # what is 0 or 1 stays so
        binary = ((split.public == 0) | (split.public == 1)).all(0)
        mean, std = np.where(binary, 0.0, mean), np.where(binary, 1.0, std)
    with asked(split, chosen.num_teachers, chosen.mechanism, chosen.teacher, (mean, std)) as pate:
        voters = "teachers_transductive" if transductive else None
        release = pate.label(floats(split.public), chosen.num_queries, strategy=chosen.query, method=voters)
        assert pate._stored_teachers is not None
        plain = pate._stored_teachers.ensemble.count_votes(floats(split.public)).compute_plurality().numpy()
        learner = LEARNER if split.encoded else Supervised(network="mlp")
        student = SelfTraining(first_student=learner, later_students=learner, alpha=0.5, num_generations=1)
        predicted = pate.fit_student(student).predict(floats(split.test)).numpy()
    asked_A = release.query_Q[release.answered_Q].numpy()
    label_A = release.label_Q[release.answered_Q].numpy()
    return predicted, {
        "logistic": float((_logistic(split, asked_A, label_A) == split.truth).mean()),
        "labels_right": float((label_A == split.told[asked_A]).mean()),
        "plurality": float((plain == split.told).mean()),
        "queries": chosen.num_queries,
        "teachers": chosen.num_teachers,
    }


def reverse_knn(split: Split, epsilon: float, *, cells_a_class: int, alpha: float, keep: float) -> Answer:
    """Zhu et al. 2022: records are counted into the cells of public points; self-training on the noisy classes."""
    cells = min(cells_a_class * split.classes, len(split.public))
    sigma = calibrated(lambda sigma: Histogram(sigma=sigma, adjacency="add_remove"), cells, epsilon)
    student = SelfTraining(
        first_student=LEARNER, later_students=LEARNER, alpha=alpha, keep_fraction=keep, num_generations=1
    )
    method = ReverseKnn(mechanism=Histogram(sigma=sigma, adjacency="add_remove"), allow_uninformative_labels=True)
    with asked(split, None, None, method, split.scale) as pate:
        release = pate.label(floats(split.public), cells, strategy=Medoids())
        predicted = pate.fit_student(student).predict(floats(split.test)).numpy()
    asked_A = release.query_Q[release.answered_Q].numpy()
    right = float((release.label_Q[release.answered_Q].numpy() == split.told[asked_A]).mean())
    return predicted, {"labels_right": right, "sigma": sigma}


# ---- parts -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def asked(
    split: Split,
    num_teachers: int | None,
    mechanism: VoteMechanism | None,
    teacher: Any,
    scale: tuple[np.ndarray, np.ndarray],
) -> Any:
    """Voters that are ready to be asked; the account counts, and refuses nothing."""
    mean, std = scale
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        pate = PATE(
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
            allow_uninformative_labels=True,
            seed=split.seed,
            verbose=False,
        )
        yield pate.fit_teachers(floats(split.x), torch.from_numpy(split.y), public_x=floats(split.public))


@functools.cache
def _home(name: str, seed: int) -> tempfile.TemporaryDirectory[str]:
    """One ensemble for all epsilons of a split: it is found again."""
    return tempfile.TemporaryDirectory()


def calibrated(mechanism: Any, queries: int, epsilon: float) -> float:
    return calibration.calibrate_sigma(
        lambda sigma: mechanism(sigma).privacy_events(queries), epsilon=epsilon, delta=DELTA
    )


def floats(x: np.ndarray) -> torch.Tensor:
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
