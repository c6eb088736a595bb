"""An estimate of the noise in released labels: how many are wrong, and a label posterior for each point.

Noise makes labels wrong, and a network with room for it learns them as they are. A logistic regression, or the mean of
many neighbors, has little room: how little, cross-validation on the labels says. What such a model predicts for a point
whose label it has not seen is an estimate of that label: where it is most confident it is taken to be right, and the
labels that contradict it there are counted as wrong. Where labels are few, or no model predicts more of them than their
commonest one does, by more than a standard error, there is no estimate: the best of many models is a little better by
luck.

Everything here is arithmetic on released labels and public points.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from sklearn.base import clone
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GroupKFold
from sklearn.neighbors import KNeighborsClassifier

from pate_torch.students.base import StudentProblem

_RIDGES = tuple(10.0**k for k in range(4, -3, -1))
"""Weights of half the squared norm against the summed loss, of features whose mean square is 1; strongest first."""
LINEAR_MODELS = tuple(LogisticRegression(C=1 / ridge, max_iter=300, tol=1e-3) for ridge in _RIDGES)
_MODELS = (*LINEAR_MODELS, *(KNeighborsClassifier(count) for count in (30, 10, 3)))
_NUM_FOLDS = 5
_CONFIDENT_FRACTION = 0.2
"""Share of the labeled points on which the model is taken to be right."""
_MIN_LABELS_FOR_NOISE_ESTIMATE = 50
"""Labels: of fewer, the surest are too few to tell how many are wrong."""
_MIN_PROBABILITY = 1e-3
"""Of a probability: a class that the model has not seen may still be meant."""


def select_by_cross_validation(
    x_QD: np.ndarray, label_Q: np.ndarray, point_Q: np.ndarray, num_classes: int, models: Sequence[Any] = _MODELS
) -> tuple[Any, np.ndarray]:
    """The model with the best cross-validated predictions, and those predictions: class probabilities [Q, C].

    Ties go to the greater likelihood, then to the first. All labels of one point (``point_Q``) are in one fold.
    """
    num_folds = min(_NUM_FOLDS, len(np.unique(point_Q)))
    if num_folds < 2:
        return models[0], np.full((len(x_QD), num_classes), 1 / num_classes)
    splits = list(GroupKFold(num_folds).split(x_QD, label_Q, point_Q))

    def predict_out_of_fold(model: Any) -> np.ndarray:
        proba_QC = np.empty((len(x_QD), num_classes))
        for train_index, test_index in splits:
            proba_QC[test_index] = _predict_proba(
                model, x_QD[train_index], label_Q[train_index], x_QD[test_index], num_classes
            )
        return proba_QC

    def compute_score(candidate: tuple[Any, np.ndarray]) -> tuple[int, float]:
        likelihood_Q = candidate[1][np.arange(len(label_Q)), label_Q]
        return int((candidate[1].argmax(1) == label_Q).sum()), float(np.log(likelihood_Q).mean())

    return max(((model, predict_out_of_fold(model)) for model in models), key=compute_score)


def _predict_proba(model: Any, x_QD: np.ndarray, label_Q: np.ndarray, x_PD: np.ndarray, num_classes: int) -> np.ndarray:
    """Class probabilities of other points, [P, C], by a model fitted to these labels."""
    proba_PC = np.full((len(x_PD), num_classes), _MIN_PROBABILITY)
    present_classes = np.unique(label_Q)
    if len(present_classes) == 1:
        proba_PC[:, present_classes] += 1.0
    else:
        model = clone(model)
        if isinstance(model, KNeighborsClassifier):
            model.set_params(n_neighbors=min(model.n_neighbors, len(x_QD)))
        with suppress_class_warnings():
            proba_PC[:, present_classes] += model.fit(x_QD, label_Q).predict_proba(x_PD)
    return np.asarray(proba_PC / proba_PC.sum(1, keepdims=True))


@contextmanager
def suppress_class_warnings() -> Iterator[None]:
    """Fit classes, however few labels they have: scikit-learn would ask each time whether these are classes at all."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The number of unique classes")
        yield


def compute_rms(x_QD: np.ndarray) -> float:
    """The root mean square: divided by it, one ridge means the same for features of any size."""
    return max(float(np.sqrt(np.square(x_QD).mean())), 1e-12)


def clip_noise_rate(noise_rate: float, num_classes: int) -> float:
    """The share of wrong labels, held below (C-1)/C: there a label says nothing, and its loss has no gradient."""
    return min(noise_rate, 0.95 * (1 - 1 / num_classes))


def with_label_posteriors(problem: StudentProblem, *, include_unqueried: bool) -> StudentProblem:
    """The problem with label posteriors in the place of labels, or as it is where there is no estimate.

    With ``include_unqueried`` all public points have one, asked or not.
    """
    if len(problem.query_Q) < _MIN_LABELS_FOR_NOISE_ESTIMATE:
        return problem
    x_PD = problem.spec.normalize(problem.x_P.cpu(), torch.float64).flatten(1).numpy()
    query_Q, label_Q = problem.query_Q.cpu().numpy(), problem.label_Q.cpu().numpy()
    num_classes, x_PD = problem.spec.num_classes, x_PD / compute_rms(x_PD)
    model, proba_QC = select_by_cross_validation(x_PD[query_Q], label_Q, query_Q, num_classes)
    is_predicted_Q, confidence_Q = proba_QC.argmax(1) == label_Q, proba_QC.max(1)
    max_label_count = np.bincount(label_Q).max()
    standard_error = np.sqrt(max_label_count * (1 - max_label_count / len(label_Q)))
    if is_predicted_Q.sum() <= max_label_count + standard_error:
        return problem
    confident_Q = confidence_Q >= np.quantile(confidence_Q, 1 - _CONFIDENT_FRACTION)
    noise_rate = clip_noise_rate(float((~is_predicted_Q)[confident_Q].mean()), num_classes)
    rate_per_wrong_class = noise_rate / (num_classes - 1)
    likelihood_QC = np.full(proba_QC.shape, rate_per_wrong_class)
    likelihood_QC[np.arange(len(label_Q)), label_Q] = 1 - noise_rate
    posterior_QC = _normalize_rows(proba_QC * likelihood_QC)
    if not include_unqueried:
        return replace(problem, posterior_QC=torch.from_numpy(posterior_QC).float().to(problem.x_P.device))
    # The model predicts noisy labels: the label-noise matrix is inverted to obtain class probabilities.
    proba_PC = _predict_proba(model, x_PD[query_Q], label_Q, x_PD, num_classes)
    belief_PC = _normalize_rows((proba_PC - rate_per_wrong_class) / (1 - noise_rate - rate_per_wrong_class))
    belief_PC[query_Q] = posterior_QC
    label_P, posterior_PC = torch.from_numpy(belief_PC.argmax(1)), torch.from_numpy(belief_PC).float()
    query_P, device = torch.arange(len(x_PD), device=problem.x_P.device), problem.x_P.device
    return replace(problem, query_Q=query_P, label_Q=label_P.to(device), posterior_QC=posterior_PC.to(device))


def _normalize_rows(weight_PC: np.ndarray) -> np.ndarray:
    weight_PC = weight_PC.clip(min=_MIN_PROBABILITY)
    return np.asarray(weight_PC / weight_PC.sum(1, keepdims=True))
