"""Linear students: scikit-learn's fit as a network, scores, noisy counts, and a released model that is not there."""

import contextlib
import dataclasses

import numpy as np
import pytest
import torch
from scipy.stats import multivariate_normal
from sklearn.linear_model import LogisticRegression, Ridge

from pate_torch.features.fourier import FourierFeatures
from pate_torch.mechanisms.gaussian import GNMax
from pate_torch.methods.base import FirstAnswers
from pate_torch.methods.teacher_votes import TeacherVotes
from pate_torch.privacy.records import NoisyCounts
from pate_torch.students import linear, numpy_student
from pate_torch.students.base import StudentTask
from pate_torch.students.linear import CountRegression, Logistic, ReleasedModel
from pate_torch.students.store import save as save_student
from tests.students.tasks import CPU, ROWS, make_task, rows


@pytest.mark.parametrize("classes", [[0, 1], [0, 1, 2], [0, 2]])
def test_the_linear_student_is_scikit_learns(classes):
    label = np.array(classes * 10)
    x = (np.random.default_rng(0).normal(size=(len(label), 6)) + label[:, None]).astype(np.float32)
    spec = dataclasses.replace(ROWS, num_classes=3, class_names=("a", "b", "c"), std=(1.0,) * 6)
    task = StudentTask(spec, torch.from_numpy(x), torch.arange(len(label)), torch.from_numpy(label))
    ours = Logistic(ridge=0.5).fit(task, seed=0, device=CPU).compute_probabilities(torch.from_numpy(x)).numpy()
    reference = LogisticRegression(C=2.0, max_iter=2000, tol=1e-7).fit(x.astype(np.float64), label)
    np.testing.assert_allclose(ours[:, classes], reference.predict_proba(x), atol=1e-6)
    assert ours[:, [c for c in range(3) if c not in classes]].sum() < 1e-9


def test_a_student_of_scores_is_as_unsure_as_they_are():
    """Heads three times in four on one side: its student says so, where that of hard labels is sure."""
    x, all_points = torch.linspace(-1, 1, 40)[:, None].repeat(1, 6), torch.arange(40)
    share = torch.where(x[:, :1] > 0, 0.75, 0.25)
    task = StudentTask(ROWS, x, all_points, (x[:, 0] > 0).long(), torch.cat([1 - share, share], 1), soft=True)
    soft, hard = (
        Logistic(ridge=0.01).fit(one, seed=0, device=CPU).compute_probabilities(x)[:, 1]
        for one in (task, dataclasses.replace(task, posterior_QC=None, soft=False))
    )
    assert (soft[30:] - 0.75).abs().max() < 0.12 < (hard[35:] - 0.75).abs().min()


def test_the_released_model_needs_one():
    with pytest.raises(ValueError, match="method=gradients mechanism=gradient_descent"):
        ReleasedModel().fit(make_task()[0], seed=0, device=CPU)


def test_balanced_offsets_are_those_of_training_with_balanced_weights():
    """For two Gaussians of one covariance, logistic regression can represent the class probabilities."""
    draw = np.random.default_rng(0)
    y = (draw.random(60_000) < 0.15).astype(int)
    x = (draw.normal(size=(len(y), 6)) + 0.5 * y[:, None]).astype(np.float32)
    spec = dataclasses.replace(ROWS, std=(1.0,) * 6)
    task = StudentTask(spec, torch.from_numpy(x), torch.arange(len(y)), torch.from_numpy(y))
    student = Logistic(ridge=1.0).fit(task, seed=0, device=CPU)
    counts_C = torch.from_numpy(np.bincount(y) + draw.normal(0, 19, 2)).round()
    weight_C = 1 / (2 * FirstAnswers(counts_C, 19.0).estimate_frequencies())
    logit_N2 = student.adjust_logits(1.0, weight_C.log()).compute_logits(torch.from_numpy(x[:2000])).numpy()
    reference = LogisticRegression(class_weight="balanced").fit(x, y).decision_function(x[:2000])
    assert np.abs(logit_N2[:, 1] - logit_N2[:, 0] - reference).max() < 0.15
    plain_N2 = student.compute_logits(torch.from_numpy(x[:2000])).numpy()
    assert np.abs(plain_N2[:, 1] - plain_N2[:, 0] - reference).min() > 1.5  # log(.85/.15) is 1.73


# ---- noisy counts ---------------------------------------------------------------------------------------------------


def make_counts(sigma, votes=300, count=200, **changes):
    """Two clouds, on each of which nine of ten teachers vote for its class, and the truth."""
    x, y = rows(count, seed=3)
    share_QC = torch.where(torch.nn.functional.one_hot(y, 2).bool(), 0.9, 0.1)
    noise_QC = sigma * torch.randn(count, 2, generator=torch.Generator().manual_seed(0))
    noisy = NoisyCounts((votes * share_QC + noise_QC).round().long(), sigma)
    task = StudentTask(ROWS, x, torch.arange(count), noisy.counts_QC.argmax(1), noisy_counts=noisy)
    return dataclasses.replace(task, **changes), y


@pytest.mark.parametrize("sigma", [20.0, 400.0])
def test_the_ridge_is_the_one_of_the_likeliest_counts(sigma):
    """Against scikit-learn's ridge regression, and normal densities with their whole covariance."""
    task, _ = make_counts(sigma)
    z_QD = torch.nn.functional.normalize(task.pool_x / 2, dim=1).double()
    z_QD = z_QD - z_QD.mean(0)
    count_QC = task.noisy_counts.counts_QC.double()
    weight_DC, deviation = linear._regress(z_QD, count_QC, sigma)
    z, y = z_QD.numpy(), (count_QC - count_QC.mean(0)).numpy()
    unit = np.square(np.linalg.svd(z, compute_uv=False)).mean()
    variances = sigma**2 * np.logspace(-8, 8, linear._NUM_RIDGES) / unit
    evidence = [multivariate_normal(cov=v * z @ z.T + sigma**2 * np.eye(len(z))).logpdf(y.T).sum() for v in variances]
    best = variances[int(np.argmax(evidence))]
    reference = Ridge(alpha=sigma**2 / best, fit_intercept=False).fit(z, y)
    np.testing.assert_allclose(weight_DC.T, reference.coef_, rtol=1e-6, atol=1e-6 * np.abs(reference.coef_).max())
    hat = z @ np.linalg.solve(z.T @ z + sigma**2 / best * np.eye(6), z.T)
    assert deviation == pytest.approx(np.sqrt(2 * sigma**2 * max(np.trace(hat), 1) / len(z)), rel=1e-6)


def test_noise_that_outweighs_each_count_is_averaged():
    """A count alone is right two times in three."""
    task, y = make_counts(400.0)
    assert (task.label_Q == y).float().mean() < 0.75
    student = CountRegression().fit(task, seed=0, device=CPU)
    assert (student.predict(task.pool_x) == y).float().mean() > 0.95


def test_classes_have_their_frequencies_among_the_public_points():
    task, _ = make_counts(100.0)
    for share in (0.5, 0.2):
        frequency_C = torch.tensor([1 - share, share], dtype=torch.float64)
        probability_PC = (
            CountRegression()
            .fit(dataclasses.replace(task, frequency_C=frequency_C), seed=0, device=CPU)
            .compute_probabilities(task.pool_x)
        )
        assert float((probability_PC.argmax(1) == 1).float().mean()) == pytest.approx(share, abs=0.06)


def test_offsets_match_the_mean_probabilities():
    logit_PC = 5 * torch.randn(300, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    frequency_C = torch.tensor([0.7, 0.25, 0.05], dtype=torch.float64)
    mean_C = (logit_PC + linear.match_frequencies(logit_PC, frequency_C, linear._NUM_MATCHINGS)).softmax(1).mean(0)
    torch.testing.assert_close(mean_C, frequency_C, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "features", [None, FourierFeatures(cosines=8), FourierFeatures(cosines=8, cosine_variance=1.0)]
)
def test_a_regression_of_counts_predicts_with_numpy_alone(features, tmp_path):
    task, _ = make_counts(50.0)
    student = CountRegression(features=features).fit(task, seed=0, device=CPU)
    path = tmp_path / "student.safetensors"
    save_student(student, path)
    loaded = numpy_student.NumpyStudent.load(path)
    assert loaded is not None
    expected = student.compute_probabilities(task.pool_x).numpy()
    np.testing.assert_allclose(loaded.compute_probabilities(task.pool_x.numpy()), expected, atol=1e-5)


def test_a_regression_of_counts_needs_counts():
    with pytest.raises(ValueError, match=r"mechanism\.counts=true"):
        CountRegression().fit(make_task()[0], seed=0, device=CPU)
    for counts in (False, True):
        method = TeacherVotes(num_teachers=4, mechanism=GNMax(sigma=2.0, counts=counts))
        with contextlib.nullcontext() if counts else pytest.raises(ValueError, match="needs noisy counts"):
            method.check_student(CountRegression())
    with pytest.raises(ValueError, match="guide_student"):
        TeacherVotes(num_teachers=4, mechanism=GNMax(sigma=2.0), guide_student=CountRegression())
