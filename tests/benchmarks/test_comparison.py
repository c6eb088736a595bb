"""Figures, the baseline's noise and the tables of the comparison, against scikit-learn and exact costs."""

import math
import types

import numpy as np
import pandas as pd
import pytest
from scipy.stats import norm
from sklearn.calibration import calibration_curve
from sklearn.metrics import accuracy_score, balanced_accuracy_score, log_loss, recall_score, roc_auc_score

from benchmarks import comparison
from pate_torch.session import ReleaseStopped


@pytest.fixture
def parts() -> comparison.Split:
    """Private points 0 with two equal classes: their gradients cancel, and only noise is left."""
    zero_ND = np.zeros((1000, 3), np.float32)
    y, frame = np.arange(1000) % 2, pd.DataFrame(zero_ND)
    return comparison.Split(frame, y, frame, frame[:3], y[:3], 2, 0, (zero_ND, zero_ND, np.eye(3, dtype=np.float32)))


@pytest.mark.parametrize("num_classes", [2, 5])
def test_figures_are_those_of_scikit_learn(num_classes):
    generator = np.random.default_rng(0)
    truth = generator.integers(num_classes, size=2000)
    proba = generator.dirichlet(np.full(num_classes, 0.5), size=2000) + 0.4 * np.eye(num_classes)[truth]
    proba /= proba.sum(1, keepdims=True)
    label, figures = proba.argmax(1), comparison.compute_figures(proba, truth)
    score = proba[:, 1] if num_classes == 2 else proba
    assert figures == pytest.approx(
        {
            "accuracy": accuracy_score(truth, label),
            "balanced accuracy": balanced_accuracy_score(truth, label),
            "AUC": roc_auc_score(truth, score, multi_class="ovr"),
            "Brier": np.mean([sum((p - np.eye(num_classes)[t]) ** 2) for p, t in zip(proba, truth, strict=True)]),
            "calibration error": compute_calibration_error(label == truth, proba.max(1)),
            "worst recall": recall_score(truth, label, average=None).min(),
            "log loss": log_loss(truth, proba),
        }
    )


def compute_calibration_error(is_right: np.ndarray, confidence: np.ndarray) -> float:
    share_right, mean_confidence = calibration_curve(is_right, confidence, n_bins=15)
    share_inside = np.histogram(confidence, bins=15, range=(0, 1))[0] / len(confidence)
    return float(share_inside[share_inside > 0] @ np.abs(share_right - mean_confidence))


def test_figures_of_a_test_set_without_one_of_the_classes_are_means_over_the_others():
    truth, proba = np.array([0, 0, 1, 1]), np.full((4, 3), 0.1)
    proba[range(4), [0, 1, 1, 1]] = 0.8
    figures = comparison.compute_figures(proba, truth)
    assert (figures["balanced accuracy"], figures["worst recall"]) == (0.75, 0.5)
    assert figures["AUC"] == 0.75


def compute_delta(epsilon: float, mu: float) -> float:
    """Compute the exact delta of a Gaussian mechanism whose sensitivity is ``mu`` standard deviations (BW18)."""
    return float(norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu))


@pytest.mark.parametrize("epsilon", [0.1, 3.0])
def test_noise_of_the_baseline_costs_exactly_epsilon(parts, epsilon, monkeypatch):
    scales = []
    noise = types.SimpleNamespace(normal=lambda _, scale, shape: scales.append(scale) or np.zeros(shape))
    monkeypatch.setattr(np.random, "default_rng", lambda: noise)
    comparison.run_baseline(parts, epsilon)
    # The sums of all steps, divided by their noise, are one Gaussian mechanism of sensitivity mu.
    assert compute_delta(epsilon, math.sqrt(sum(1 / scale**2 for scale in scales))) == pytest.approx(1e-5, rel=1e-6)
    assert len(scales) == 40


def test_gradients_of_the_baseline_are_clipped_to_norm_one(parts, monkeypatch):
    noise = types.SimpleNamespace(normal=lambda _, scale, shape: np.zeros(shape))
    monkeypatch.setattr(np.random, "default_rng", lambda: noise)
    far = np.zeros((1000, 3), np.float32)
    far[0, 0] = 1e4  # after one step the model is sure of this record, so that it moves no weight again
    proba = comparison.run_baseline(comparison.Split(**(vars(parts) | {"columns": (far, far, parts.columns[2])})), 1)
    logit_T = np.log(proba[:, 0] / proba[:, 1])
    assert logit_T[0] - logit_T[1] == pytest.approx(math.sqrt(2) * 8 / 1000, rel=1e-3)  # a gradient of norm 1


def test_refusal_counts_as_the_class_frequencies(parts, monkeypatch):
    def refuse(*args: object, **options: object) -> None:
        raise ReleaseStopped("not better than the class frequencies", "0")

    monkeypatch.setattr(comparison.PATEClassifier, "fit", refuse)
    np.testing.assert_allclose(comparison.run_default(parts, 0.1), np.full((3, 2), 0.5))
    rare = comparison.Split(**(vars(parts) | {"y": (np.arange(1000) < 100).astype(int)}))
    np.testing.assert_allclose(comparison.run_default(rare, 0.1), np.tile([0.9, 0.1], (3, 1)))
