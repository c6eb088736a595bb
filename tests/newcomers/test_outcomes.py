"""What a fit at epsilon 1 must reach on difficult data, without any argument that describes these data.

The baseline is linear softmax regression on the same publicly scaled columns: full batches, 40 steps, clipping norm 1,
learning rate 8, the mean of the last 20 weights, and the exact cost of its Gaussian noise.
"""

import math

import numpy as np
import pytest
from scipy.optimize import brentq
from sklearn.metrics import roc_auc_score

from pate_torch import PATEClassifier
from pate_torch.accounting import gdp
from pate_torch.session import ReleaseStopped

NOISES = 4
MU = brentq(lambda mu: gdp.compute_epsilon(mu, 1e-5) - 1, 1e-3, 20)
"""What epsilon 1 at delta 1e-5 allows."""


def draw_clouds(count, num_classes, num_columns, spread, seed, shares=None):
    """Points around one center for each class; the centers are the same for every seed of the points."""
    centers = np.random.default_rng(5).normal(size=(num_classes, num_columns)) * spread
    random = np.random.default_rng(seed)
    y = random.choice(num_classes, count, p=shares)
    return centers[y] + random.normal(size=(count, num_columns)), y


@pytest.fixture(scope="module")
def predict(tmp_path_factory):
    """Probabilities of the test points by a fit with an account of its own."""

    def fit_and_predict(x, y, public, test, **settings):
        home, classes = tmp_path_factory.mktemp("home"), range(int(y.max()) + 1)
        clf = PATEClassifier(epsilon=1, account="a", classes=classes, home=home, verbose=False, **settings)
        return clf.fit(x, y, public=public).predict_proba(test)

    return fit_and_predict


def softmax(logits):
    odds = np.exp(logits - logits.max(1, keepdims=True))
    return odds / odds.sum(1, keepdims=True)


def predict_by_baseline(x, y, public, test, seed):
    random, num_classes = np.random.default_rng(seed), int(y.max()) + 1
    mean, std = public.mean(0), np.where(public.std(0) > 0, public.std(0), 1)
    z, z_test = (np.concatenate([(points - mean) / std, np.ones((len(points), 1))], 1) for points in (x, test))
    weights, kept = np.zeros((z.shape[1], num_classes)), []
    length = np.linalg.norm(z, axis=1, keepdims=True)
    for _ in range(40):
        residual = np.eye(num_classes)[y] - softmax(z @ weights)
        residual /= np.maximum(length * np.linalg.norm(residual, axis=1, keepdims=True), 1)
        noise = math.sqrt(40) / MU * random.normal(size=weights.shape)
        weights = weights + 8 / len(x) * (z.T @ residual + noise)
        kept.append(weights)
    return softmax(z_test @ np.mean(kept[-20:], 0))


def accuracy(probabilities, truth):
    return np.mean([(probability.argmax(1) == truth).mean() for probability in probabilities])


@pytest.mark.parametrize(
    "shares", [(0.8, 0.2), pytest.param((0.5, 0.5), marks=pytest.mark.slow(reason="twelve more fits of 200 records"))]
)
def test_200_records_are_refused_or_beat_the_class_frequencies(predict, shares):
    differences = []
    for seed in range(3 * NOISES):
        (x, y), (public, _), (test, truth) = (
            draw_clouds(count, 2, 8, 0.6, 3 * seed + part, shares) for part, count in enumerate((200, 100, 2000))
        )
        frequency = np.bincount(y) / len(y)
        try:
            probability = predict(x, y, public, test)
        except ReleaseStopped:
            continue
        differences.append(np.log(frequency[truth]).mean() - np.log(probability[range(2000), truth]).mean())
    assert not differences or np.mean(differences) < 0


def test_one_percent_positives_are_ranked_nearly_as_by_the_baseline(predict):
    shares = (0.99, 0.01)
    (x, y), (public, _), (test, truth) = (
        draw_clouds(count, 2, 10, 0.6, seed, shares) for seed, count in enumerate((8000, 500, 8000))
    )
    ours = [roc_auc_score(truth, predict(x, y, public, test)[:, 1]) for _ in range(2 * NOISES)]
    baseline = [roc_auc_score(truth, predict_by_baseline(x, y, public, test, seed)[:, 1]) for seed in range(2 * NOISES)]
    assert np.mean(ours) - 0.5 >= 0.9 * (np.mean(baseline) - 0.5)


def test_probabilities_of_50_classes_are_calibrated(predict):
    (x, y), (public, _), (test, truth) = (
        draw_clouds(count, 50, 20, 1.0, seed) for seed, count in enumerate((8000, 600, 4000))
    )
    errors = []
    for _ in range(NOISES):
        probability = predict(x, y, public, test)
        sure, right = probability.max(1), probability.argmax(1) == truth
        bin_N = np.minimum((15 * sure).astype(int), 14)
        gaps = [abs((sure - right)[bin_N == b].sum()) for b in range(15)]
        errors.append(sum(gaps) / len(test))
    assert np.mean(errors) < 0.1


def spoil(name, x, y, public, test):
    """Data that are spoiled in one way, and arguments of the classifier."""
    random = np.random.default_rng(9)
    if name == "wrong labels":
        return x, np.where(random.random(len(y)) < 0.2, random.integers(0, 3, len(y)), y), public, test, {}
    if name == "outliers":
        x = x.copy()
        x[random.random(len(x)) < 0.05, random.integers(0, 10)] = 1e9
    if name == "constant columns":
        x, public, test = (np.concatenate([part, np.full((len(part), 2), 3.0)], 1) for part in (x, public, test))
        x[:, -1] += 100 * random.normal(size=len(x))
    about = {"three times too many": 12_000, "three times too few": 1333}.get(name)
    return x, y, public, test, {} if about is None else {"num_records_about": about}


@pytest.fixture(scope="module")
def clean(predict):
    """Private records with classes, public points, test points, their classes, and the accuracy on these data."""
    (x, y), (public, _), (test, truth) = (
        draw_clouds(count, 3, 10, 0.7, seed) for seed, count in enumerate((4000, 500, 4000))
    )
    return x, y, public, test, truth, accuracy([predict(x, y, public, test) for _ in range(2 * NOISES)], truth)


SPOILED = ("wrong labels", "outliers", "constant columns", "three times too many", "three times too few")


@pytest.mark.slow(reason="how little is lost on spoiled data; tests/api shows that a fit on such data works")
@pytest.mark.filterwarnings("ignore:public. about .* lie outside the range")
@pytest.mark.parametrize("name", SPOILED)
def test_spoiled_data_cost_at_most_a_point(predict, clean, name):
    *data, truth, clean_accuracy = clean
    *spoiled, settings = spoil(name, *data)
    noises = 2 * NOISES if name == "wrong labels" else NOISES  # which cost .7 points, the others .2 at most
    assert accuracy([predict(*spoiled, **settings) for _ in range(noises)], truth) >= clean_accuracy - 0.01


def test_a_thousand_columns_cost_at_most_a_point_of_the_baseline(predict):
    (x, y), (public, _), (test, truth) = (
        draw_clouds(count, 3, 10, 0.7, seed) for seed, count in enumerate((4000, 500, 2000))
    )
    random = np.random.default_rng(9)
    x, public, test = (np.concatenate([part, random.normal(size=(len(part), 990))], 1) for part in (x, public, test))
    ours = accuracy([predict(x, y, public, test) for _ in range(2)], truth)
    assert ours >= accuracy([predict_by_baseline(x, y, public, test, seed) for seed in range(2)], truth) - 0.01
