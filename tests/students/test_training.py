"""The parts of gradient training: checked tasks, losses of noisy labels, batches, the average, and their use."""

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F

from pate_torch.students.base import StudentTask
from pate_torch.students.training import (
    AveragedModel,
    Supervised,
    build_problem,
    compute_label_loss,
    compute_released_loss,
    iterate_batches,
)
from tests.students.tasks import CPU, ROWS, compute_accuracy, make_task
from tests.worlds import IMAGES


def build(posterior_QC=None, soft=False, **changes):
    """A problem of two labels among four points."""
    task = StudentTask(IMAGES, torch.zeros(4, 1, 8, 8), torch.tensor([0, 2]), torch.tensor([1, 2]), posterior_QC, soft)
    return build_problem(task, 0, CPU, **changes)


@pytest.mark.parametrize(
    "change,message",
    [
        ({"label_Q": torch.tensor([0, 1, 3])}, "label=3"),
        ({"label_Q": torch.tensor([0, 1, -1])}, "label=-1"),
        ({"query_Q": torch.tensor([0, 1, 150])}, "query=150"),
        ({"label_Q": torch.tensor([0, 1])}, "2 labels for 3 points"),
        ({"posterior_QC": torch.ones(2, 3) / 3}, "posteriors"),
        ({"posterior_QC": torch.ones(3, 3)}, "posteriors"),
        ({"posterior_QC": torch.tensor([[1.5, -0.5, 0.0]] * 3)}, "posteriors"),
        ({"posterior_QC": torch.full((3, 3), torch.nan)}, "posteriors"),
    ],
)
def test_a_task_that_does_not_fit_together_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        build_problem(make_task(3, **change)[0], 0, CPU)


def test_the_corrected_loss_is_the_likelihood_of_flipped_labels():
    logits = torch.randn(50, 4, dtype=torch.float64)
    label = torch.arange(50) % 4
    transition = torch.full((4, 4), 0.3 / 3, dtype=torch.float64).fill_diagonal_(0.7)
    expected = -(logits.softmax(1) @ transition).log()[torch.arange(50), label]
    torch.testing.assert_close(compute_label_loss(logits, label, 0.3), expected)
    torch.testing.assert_close(compute_label_loss(logits, label, 0.0), F.cross_entropy(logits, label, reduction="none"))


@pytest.mark.parametrize("noise", [0.0, 0.2])
def test_certain_posteriors_are_labels(noise):
    logits, chosen = torch.randn(3, 3, generator=torch.Generator().manual_seed(0)), torch.tensor([1, 0, 1])
    loss = compute_released_loss(build(torch.eye(3)[[1, 2]], label_noise=noise), logits, chosen)
    expected = compute_label_loss(logits, torch.tensor([2, 1, 2]), noise)
    torch.testing.assert_close(loss, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(compute_released_loss(build(label_noise=noise), logits, chosen), expected)


def test_of_counts_a_sure_model_may_take_either_close_class_and_scores_are_learned_as_they_are():
    posterior_QC, chosen = torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.0, 1.0]]), torch.zeros(3, dtype=torch.int64)
    first, second, third = compute_released_loss(build(posterior_QC), 20 * torch.eye(3), chosen).tolist()
    assert first == pytest.approx(second) == pytest.approx(-math.log(0.5), abs=1e-4) and third > 10
    logits = torch.randn(3, 3, generator=torch.Generator().manual_seed(0))
    loss = compute_released_loss(build(posterior_QC, soft=True), logits, chosen)
    torch.testing.assert_close(loss, F.cross_entropy(logits, posterior_QC[chosen], reduction="none"), atol=1e-4, rtol=0)


def test_knowing_the_flips_helps_against_wrong_labels():
    task, y = make_task(90, ROWS)
    wrong = torch.rand(90, generator=torch.Generator().manual_seed(0)) < 0.33
    noisy = dataclasses.replace(task, label_Q=torch.where(wrong, 1 - y[:90], y[:90]))
    plain, corrected = (
        Supervised(network="mlp", steps=150, batch_size=32, label_noise=noise).fit(noisy, seed=0, device=CPU)
        for noise in (0.0, 0.33)
    )
    assert compute_accuracy(corrected) > compute_accuracy(plain)


def test_batches_are_whole_and_pass_over_everything():
    order = iterate_batches(7, 3, torch.Generator().manual_seed(0))
    drawn = torch.cat([next(order) for _ in range(7)])
    assert torch.equal(drawn.view(3, 7).sort(1).values, torch.arange(7).expand(3, 7))
    assert len(next(iterate_batches(2, 5, torch.Generator().manual_seed(0)))) == 5


def test_the_average_is_exponential_with_a_fast_start():
    model = torch.nn.BatchNorm1d(1)
    average, by_hand = AveragedModel(model, 0.5), 1.0
    for step in range(1, 8):
        with torch.no_grad():
            model.weight.fill_(step)
        average.update()
        by_hand += (step - by_hand) * (1 - min(0.5, step / (step + 9)))
    assert float(average.module.weight) == pytest.approx(by_hand, rel=1e-6)


@pytest.mark.parametrize("steps", [10, 90])
def test_the_first_loss_that_is_not_finite_is_named(steps):
    class Bursts(Supervised):
        def make_objective(self, problem, average, note):
            loss = super().make_objective(problem, average, note)
            return lambda model, step: loss(model, step) * (math.inf if step == 7 else 1.0)

    with pytest.raises(FloatingPointError, match=r"student loss is inf at step 7\. Lower student\.learning_rate"):
        Bursts(network="logistic", steps=steps).fit(make_task()[0], seed=0, device=CPU)
