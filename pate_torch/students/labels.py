"""Label posteriors from noisy counts, and estimates of the label noise. Both are computed from released values only.

The cost of the Gaussian mechanism covers the whole noisy count vector, which holds more information than its argmax.
The counts are modeled as a lead of g votes for the true class, plus noise. The likelihood of class c is therefore
proportional to exp(g z_c / sigma^2) for noisy counts z.

If only labels were released, a large network would fit wrong labels, too. Smaller models (logistic regression and
nearest neighbors) are therefore compared by cross-validation on the released labels. The most confident predictions of
the best model are assumed to be right, and labels that contradict these predictions are counted as wrong. There is no
estimate for few labels, or if the best model is not better than the most frequent class by a standard error, because
the best of many models is slightly better by chance.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pate_torch.privacy.records import DataSpec, NoisyCounts, PublicPool, Release
from pate_torch.students.base import StudentProblem, StudentTask

_NUM_GRID_POINTS = 400
_NUM_FOLDS = 5
_CONFIDENT_FRACTION = 0.2
"""Share of the labeled points on which the predictions of the model are assumed to be right."""
_MIN_LABELS_FOR_NOISE_ESTIMATE = 50
_MIN_PROBABILITY = 1e-3
"""Smallest probability of a class, because a class that the model has not seen may exist."""


def make_student_task(spec: DataSpec, pool: PublicPool, release: Release) -> StudentTask:
    """Make the task of a student from public points and released answers.

    Answers for the cells of a partition, or from a released model, label every public point.
    """
    if release.num_pool_rounds:
        label_Q, share_QC = _compute_pool_labels(release)
        rounds = torch.arange(release.num_pool_rounds)
        query_Q, round_Q = torch.arange(len(pool)).repeat(len(rounds)), rounds.repeat_interleave(len(pool))
        return StudentTask(spec, pool.x, query_Q, label_Q, posterior_QC=share_QC, round_Q=round_Q, model=release.model)
    answered_Q, posterior_QC, noisy_counts = release.answered_Q, None, None
    if release.noisy_counts is not None:  # round by round, because the lead differs between rounds
        noisy_counts = NoisyCounts(release.noisy_counts.counts_QC[answered_Q], release.noisy_counts.sigma)
        parts = release.noisy_counts.split(release.queries_per_round)
        posterior_QC = torch.cat([compute_label_posterior(part) for part in parts])[answered_Q]
    elif release.score_QC is not None:
        posterior_QC = release.score_QC[answered_Q]
        posterior_QC = posterior_QC / posterior_QC.sum(1, keepdim=True)  # scores are centers of bins, so none is 0
    query_Q, label_Q, round_Q = (part[answered_Q] for part in (release.query_Q, release.label_Q, release.round_Q))
    answers = query_Q, label_Q, posterior_QC, release.score_QC is not None, round_Q
    return StudentTask(spec, pool.x, *answers, noisy_counts=noisy_counts)


def _compute_pool_labels(release: Release) -> tuple[Tensor, Tensor]:
    """Compute labels [Q] and class proportions [Q, C] of all public points in all rounds, Q = R P."""
    if release.score_RPC is not None:
        share_QC = release.score_RPC.flatten(0, 1).softmax(1)
        return share_QC.argmax(1), share_QC
    assert release.cell_RP is not None and release.noisy_counts is not None
    cell_Q = release.cell_RP.flatten()
    return release.label_Q[cell_Q], compute_class_proportions(release.noisy_counts)[cell_Q]


def estimate_lead(noisy: NoisyCounts) -> float:
    """Estimate the lead g > 0, in votes, by maximum likelihood over the unknown class of each query.

    The log-likelihood is sum_q log mean_c exp((g z_qc - g^2 (1 - 1/C) / 2) / sigma^2), with z centered in each row.
    """
    z_QC = _center_rows(noisy)
    max_lead = float((z_QC.max(1).values - z_QC.min(1).values).max().clamp(min=1.0))
    g_G = torch.linspace(1 / _NUM_GRID_POINTS, 1, _NUM_GRID_POINTS, dtype=torch.float64) * max_lead
    penalty_G = g_G.square() * (1 - 1 / z_QC.shape[1]) / 2
    log_GQ = torch.stack([((g * z_QC - p) / noisy.sigma**2).logsumexp(1) for g, p in zip(g_G, penalty_G, strict=True)])
    return float(g_G[log_GQ.sum(1).argmax()])


def compute_label_posterior(noisy: NoisyCounts) -> Tensor:
    """Compute class probabilities, float32 [Q, C], from a uniform prior and a lead estimated from all queries."""
    if len(noisy.counts_QC) == 0:
        return torch.zeros(noisy.counts_QC.shape)
    return (estimate_lead(noisy) * _center_rows(noisy) / noisy.sigma**2).softmax(1).float()


def compute_class_proportions(noisy: NoisyCounts) -> Tensor:
    """Estimate the proportion of each class among the records of each cell, float32 [Q, C].

    sigma is subtracted from each count, and negative results become zero, because the noise in many absent classes
    would outweigh the class that is present. A cell without a count above sigma gets equal proportions.
    """
    excess_QC = (noisy.counts_QC.double().cpu() - noisy.sigma).clamp(min=0)
    total_Q1 = excess_QC.sum(1, keepdim=True)
    return torch.where(total_Q1 > 0, excess_QC / total_Q1.clamp(min=1e-12), 1 / excess_QC.shape[1]).float()


def _center_rows(noisy: NoisyCounts) -> Tensor:
    counts_QC = noisy.counts_QC.double().cpu()
    return counts_QC - counts_QC.mean(1, keepdim=True)


def select_by_cross_validation(
    x_QD: np.ndarray, label_Q: np.ndarray, point_Q: np.ndarray, num_classes: int, *, linear_only: bool = False
) -> tuple[Any, np.ndarray]:
    """Select the best model by cross-validation, and return its out-of-fold probabilities [Q, C], too.

    The candidates are logistic regressions of ridge 1e4 to 1, for features whose mean square is 1, and nearest
    neighbors unless ``linear_only``. Accuracy decides, then likelihood. Of linear models alone, the largest ridge whose
    likelihood is within a standard error of the best is selected, because wrong labels mislead accuracy. All labels of
    one point (``point_Q``) are in one fold.
    """
    from sklearn.linear_model import LogisticRegression  # imported here, because the import takes a second
    from sklearn.model_selection import GroupKFold
    from sklearn.neighbors import KNeighborsClassifier

    models: list[Any] = [LogisticRegression(C=10.0**-k, max_iter=300, tol=1e-3) for k in range(4, -1, -1)]
    models += [] if linear_only else [KNeighborsClassifier(count) for count in (30, 10, 3)]
    num_folds = min(_NUM_FOLDS, len(np.unique(point_Q)))
    if num_folds < 2:
        return models[0], np.full((len(x_QD), num_classes), 1 / num_classes)
    proba_MQC = np.empty((len(models), len(x_QD), num_classes))
    for train, test in GroupKFold(num_folds).split(x_QD, label_Q, point_Q):
        linear_model = LogisticRegression(max_iter=300, tol=1e-3, warm_start=True)  # starts at the last ridge's weights
        for model, proba_QC in zip(models, proba_MQC, strict=True):
            fitted = linear_model.set_params(C=model.C) if isinstance(model, LogisticRegression) else model
            proba_QC[test] = _predict_proba(fitted, x_QD[train], label_Q[train], x_QD[test], num_classes)

    log_MQ = np.log(proba_MQC[:, np.arange(len(label_Q)), label_Q])
    if linear_only:
        deficit_MQ = log_MQ[log_MQ.mean(1).argmax()] - log_MQ
        best = int((deficit_MQ.mean(1) <= deficit_MQ.std(1) / len(label_Q) ** 0.5).argmax())
    else:
        best = max(range(len(models)), key=lambda m: ((proba_MQC[m].argmax(1) == label_Q).sum(), log_MQ[m].mean()))
    return models[best], proba_MQC[best]


def _predict_proba(model: Any, x_QD: np.ndarray, label_Q: np.ndarray, x_PD: np.ndarray, num_classes: int) -> np.ndarray:
    """Fit ``model`` to the labels, and predict class probabilities [P, C] of the points ``x_PD``."""
    from sklearn.neighbors import KNeighborsClassifier

    proba_PC = np.full((len(x_PD), num_classes), _MIN_PROBABILITY)
    present_classes = np.unique(label_Q)
    if len(present_classes) == 1:
        proba_PC[:, present_classes] += 1.0
    else:
        if isinstance(model, KNeighborsClassifier):
            model.set_params(n_neighbors=min(model.n_neighbors, len(x_QD)))
        with suppress_class_warnings():
            proba_PC[:, present_classes] += model.fit(x_QD, label_Q).predict_proba(x_PD)
    return np.asarray(proba_PC / proba_PC.sum(1, keepdims=True))


@contextmanager
def suppress_class_warnings() -> Iterator[None]:
    """Suppress the warning of scikit-learn about few labels per class, which would appear at every fit."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The number of unique classes")
        yield


def compute_rms(x_QD: np.ndarray) -> float:
    """Compute the root mean square. A ridge has the same effect on all features that are divided by it."""
    return max(float(np.sqrt(np.square(x_QD).mean())), 1e-12)


def clip_noise_rate(noise_rate: float, num_classes: int) -> float:
    """Clip the share of wrong labels below (C-1)/C, where labels hold no information and the loss has no gradient."""
    return min(noise_rate, 0.95 * (1 - 1 / num_classes))


def with_label_posteriors(problem: StudentProblem, *, include_unqueried: bool) -> StudentProblem:
    """Return the problem with label posteriors, or the same problem if there is no estimate of the label noise.

    If ``include_unqueried``, all public points get a posterior. Otherwise, only the answered points get one.
    """
    if len(problem.query_Q) < _MIN_LABELS_FOR_NOISE_ESTIMATE:
        return problem
    device, num_classes = problem.pool_x.device, problem.spec.num_classes
    x_PD = problem.spec.normalize(problem.pool_x.cpu(), torch.float64).flatten(1).numpy()
    x_PD = x_PD / compute_rms(x_PD)
    query_Q, label_Q = problem.query_Q.cpu().numpy(), problem.label_Q.cpu().numpy()
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
        return replace(problem, posterior_QC=torch.from_numpy(posterior_QC).float().to(device))
    # The model predicts noisy labels: the label-noise matrix is inverted to obtain class probabilities.
    proba_PC = _predict_proba(model, x_PD[query_Q], label_Q, x_PD, num_classes)
    posterior_PC = _normalize_rows((proba_PC - rate_per_wrong_class) / (1 - noise_rate - rate_per_wrong_class))
    posterior_PC[query_Q] = posterior_QC
    return replace(
        problem,
        query_Q=torch.arange(len(x_PD), device=device),
        label_Q=torch.from_numpy(posterior_PC.argmax(1)).to(device),
        posterior_QC=torch.from_numpy(posterior_PC).float().to(device),
    )


def _normalize_rows(weight_PC: np.ndarray) -> np.ndarray:
    weight_PC = weight_PC.clip(min=_MIN_PROBABILITY)
    return np.asarray(weight_PC / weight_PC.sum(1, keepdims=True))
