"""A second opinion on released labels: how many are wrong, and a label posterior for each point.

Noise makes labels wrong, and a network with room for it learns them as they are. A logistic regression, or the mean of
many neighbors, has little room: how little, cross-validation on the labels says. What such a model predicts for a point
whose label it has not seen is an opinion on that label: where it is most confident it is taken to be right, and the
labels that contradict it there are counted as wrong. Where labels are few, or no model predicts more of them than their
commonest one does, by more than a standard error, there is no opinion: the best of many models is a little better by
luck.

Everything here is arithmetic on released labels and public points.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sklearn.base import clone
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GroupKFold
from sklearn.neighbors import KNeighborsClassifier

if TYPE_CHECKING:  # training asks for this opinion
    from pate_torch.students.training import StudentProblem

_RIDGES = tuple(10.0**k for k in range(4, -3, -1))
"""Weights of half the squared norm against the summed loss, of features whose mean square is 1; strongest first."""
LINEAR = tuple(LogisticRegression(C=1 / ridge, max_iter=300, tol=1e-3) for ridge in _RIDGES)
_MODELS = (*LINEAR, *(KNeighborsClassifier(count) for count in (30, 10, 3)))
_FOLDS = 5
_SUREST = 0.2
"""Share of the labeled points on which the model is taken to be right."""
_ENOUGH = 50
"""Labels: of fewer, the surest are too few to tell how many are wrong."""
_LEAST = 1e-3
"""Of a probability: a class that the model has not seen may still be meant."""


def cross_validated(
    x_QD: np.ndarray, label_Q: np.ndarray, point_Q: np.ndarray, classes: int, models: Sequence[Any] = _MODELS
) -> tuple[Any, np.ndarray]:
    """The model with the best cross-validated predictions, and those predictions.

    Ties go to the greater likelihood, then to the first.

    Args:
        x_QD: Features of the labeled points.
        label_Q: Their labels.
        point_Q: Which point each is; labels of one point are in one fold.
        classes: C.
        models: The candidates.

    Returns:
        The model, and the probabilities [Q, C] of each point by a fit that has not seen it.
    """
    folds = min(_FOLDS, len(np.unique(point_Q)))
    if folds < 2:
        return models[0], np.full((len(x_QD), classes), 1 / classes)
    parts = list(GroupKFold(folds).split(x_QD, label_Q, point_Q))

    def opinion(model: Any) -> np.ndarray:
        said_QC = np.empty((len(x_QD), classes))
        for known, asked in parts:
            said_QC[asked] = _said(model, x_QD[known], label_Q[known], x_QD[asked], classes)
        return said_QC

    def score(told: tuple[Any, np.ndarray]) -> tuple[int, float]:
        likelihood_Q = told[1][np.arange(len(label_Q)), label_Q]
        return int((told[1].argmax(1) == label_Q).sum()), float(np.log(likelihood_Q).mean())

    return max(((model, opinion(model)) for model in models), key=score)


def _said(model: Any, x_QD: np.ndarray, label_Q: np.ndarray, x_PD: np.ndarray, classes: int) -> np.ndarray:
    """Class probabilities of other points, [P, C], by a model fitted to these labels."""
    said_PC = np.full((len(x_PD), classes), _LEAST)
    seen = np.unique(label_Q)
    if len(seen) == 1:
        said_PC[:, seen] += 1.0
    else:
        few = {"n_neighbors": len(x_QD)} if getattr(model, "n_neighbors", 0) > len(x_QD) else {}
        with quietly():
            said_PC[:, seen] += clone(model).set_params(**few).fit(x_QD, label_Q).predict_proba(x_PD)
    share_PC: np.ndarray = said_PC / said_PC.sum(1, keepdims=True)
    return share_PC


@contextmanager
def quietly() -> Iterator[None]:
    """Fit classes, however few labels they have: scikit-learn would ask each time whether these are classes at all."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The number of unique classes")
        yield


def scale(x_QD: np.ndarray) -> float:
    """The root mean square: divided by it, one ridge means the same for features of any size."""
    return max(float(np.sqrt(np.square(x_QD).mean())), 1e-12)


def believable(wrong: float, classes: int) -> float:
    """The share of wrong labels, held below (C-1)/C: there a label says nothing, and its loss has no gradient."""
    return min(wrong, 0.95 * (1 - 1 / classes))


def doubted(problem: StudentProblem, *, everywhere: bool) -> StudentProblem:
    """The problem with label posteriors in the place of labels, or as it is where there is no opinion.

    Args:
        problem: The released labels.
        everywhere: Whether for all public points, asked or not.
    """
    if len(problem.query_Q) < _ENOUGH:
        return problem
    x_PD = problem.spec.normalize(problem.x_P.cpu(), torch.float64).flatten(1).numpy()
    query_Q, label_Q = problem.query_Q.cpu().numpy(), problem.label_Q.cpu().numpy()
    classes, x_PD = problem.spec.num_classes, x_PD / scale(x_PD)
    model, said_QC = cross_validated(x_PD[query_Q], label_Q, query_Q, classes)
    commonest = np.bincount(label_Q).max()
    if (said_QC.argmax(1) == label_Q).sum() <= commonest + np.sqrt(commonest * (1 - commonest / len(label_Q))):
        return problem
    surest_Q = said_QC.max(1) >= np.quantile(said_QC.max(1), 1 - _SUREST)
    wrong = float((said_QC.argmax(1) != label_Q)[surest_Q].mean())
    wrong = believable(wrong, classes)
    spread = wrong / (classes - 1)
    likelihood_QC = np.full(said_QC.shape, spread)
    likelihood_QC[np.arange(len(label_Q)), label_Q] = 1 - wrong
    posterior_QC = _shares(said_QC * likelihood_QC)
    if not everywhere:
        return replace(problem, posterior_QC=torch.from_numpy(posterior_QC).float().to(problem.x_P.device))
    # What it says is said of labels, flips and all: without these, of classes.
    said_PC = _said(model, x_PD[query_Q], label_Q, x_PD, classes)
    belief_PC = _shares((said_PC - spread) / (1 - wrong - spread))
    belief_PC[query_Q] = posterior_QC
    return replace(
        problem,
        query_Q=torch.arange(len(x_PD), device=problem.x_P.device),
        label_Q=torch.from_numpy(belief_PC.argmax(1)).to(problem.x_P.device),
        posterior_QC=torch.from_numpy(belief_PC).float().to(problem.x_P.device),
    )


def _shares(weight_PC: np.ndarray) -> np.ndarray:
    weight_PC = weight_PC.clip(min=_LEAST)
    share_PC: np.ndarray = weight_PC / weight_PC.sum(1, keepdims=True)
    return share_PC
