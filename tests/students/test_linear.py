"""Linear students: scikit-learn's fit as a network, scores, and a released model that is not there."""

import dataclasses

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression

from pate_torch.methods.base import FirstAnswers
from pate_torch.students.base import StudentTask
from pate_torch.students.linear import Logistic, ReleasedModel
from tests.students.tasks import CPU, ROWS, make_task


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
