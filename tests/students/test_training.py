"""The parts of gradient training: checked tasks, losses of noisy labels, batches, the average, and their use."""

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F

from pate_torch import networks
from pate_torch.students.base import StudentTask
from pate_torch.students.self_training import PooledStudent
from pate_torch.students.semi_supervised import (
    Alignment,
    _frozen_statistics,
    compute_expected_shares,
    compute_smoothness,
)
from pate_torch.students.training import (
    AveragedModel,
    Supervised,
    build_problem,
    compute_label_loss,
    compute_released_loss,
    iterate_batches,
)
from tests.students.tasks import CPU, ROWS, compute_accuracy, make_task
from tests.worlds import IMAGES, images


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
        ({"label_Q": torch.tensor([0, 1])}, "2 labels for 3 questions"),
        ({"posterior_QC": torch.ones(2, 3) / 3}, "label posteriors"),
        ({"posterior_QC": torch.ones(3, 3)}, "label posteriors"),
        ({"posterior_QC": torch.tensor([[1.5, -0.5, 0.0]] * 3)}, "label posteriors"),
        ({"posterior_QC": torch.full((3, 3), torch.nan)}, "label posteriors"),
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


def test_a_firmly_contradicted_label_loses_its_pull():
    logits = torch.tensor([[12.0, 0.0, 0.0]], requires_grad=True)
    pulls = []
    for flip in (0.0, 0.05):
        (gradient,) = torch.autograd.grad(compute_label_loss(logits, torch.tensor([1]), flip).sum(), logits)
        pulls.append(float(gradient.abs().max()))
    assert pulls[0] > 0.99 and pulls[1] < 1e-3


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
    for seed in range(2):
        wrong = torch.rand(90, generator=torch.Generator().manual_seed(seed)) < 0.33
        noisy = dataclasses.replace(task, label_Q=torch.where(wrong, 1 - y[:90], y[:90]))
        plain, corrected = (
            Supervised(network="mlp", steps=150, batch_size=32, label_noise=noise).fit(noisy, seed=seed, device=CPU)
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

    with pytest.raises(FloatingPointError, match=r"student loss is inf at step 7: lower student\.learning_rate"):
        Bursts(network="logistic", steps=steps).fit(make_task()[0], seed=0, device=CPU)


def test_alignment_restores_the_expected_proportions():
    problem = build_problem(make_task(label_Q=torch.tensor([0, 1, 2] * 4))[0], 0, CPU)
    align = Alignment(compute_expected_shares(problem, "uniform"), decay=0.0)
    skewed = torch.softmax(torch.randn(4000, 3) + torch.tensor([1.5, 0.0, -0.5]), 1)
    before, after = skewed.mean(0), align(skewed).mean(0)
    assert (after - 1 / 3).abs().max() < (before - 1 / 3).abs().max() / 3
    torch.testing.assert_close(align(skewed).sum(1), torch.ones(4000))
    missing = build_problem(make_task(label_Q=torch.tensor([0, 1] * 6))[0], 0, CPU)
    assert compute_expected_shares(missing, "uniform").tolist() == [0.5, 0.5, 0.0]
    assert compute_expected_shares(missing, "labels").tolist() == pytest.approx([7 / 15, 7 / 15, 1 / 15])


def test_smoothness_leaves_running_statistics_alone():
    model = networks.build("small_cnn", (1, 8, 8), 3).train()
    before = {key: value.clone() for key, value in model.state_dict().items() if "running" in key}
    with _frozen_statistics(model):
        model(torch.randn(16, 1, 8, 8))
    assert all(torch.equal(model.state_dict()[key], value) for key, value in before.items())
    model(torch.randn(16, 1, 8, 8))
    assert any(not torch.equal(model.state_dict()[key], value) for key, value in before.items())


def test_the_adversary_finds_a_worse_direction_than_chance():
    generator = torch.Generator().manual_seed(0)
    model = networks.initialize(networks.build("mlp", (6,), 2), generator)
    with torch.no_grad():
        list(model.parameters())[-2].normal_(generator=generator)
    x = torch.randn(64, 6, generator=generator)
    adversarial = compute_smoothness(model, x, 0.5, generator).item()
    noise = torch.randn(x.shape, generator=generator)
    noise = 0.5 * noise / noise.square().mean(1, keepdim=True).sqrt()
    here, there = model(x).log_softmax(1), model(x + noise).log_softmax(1)
    assert adversarial > 1.5 * F.kl_div(there, here, log_target=True, reduction="batchmean").item()


def test_a_pool_is_of_members_of_whom_the_first_is_the_student_alone():
    task, _ = make_task()
    member = Supervised(steps=3)
    student = PooledStudent(member=member, members=3).fit(task, seed=0, device=CPU)
    alone = member.fit(task, seed=0, device=CPU).module.state_dict()
    assert all(torch.equal(value, alone[name]) for name, value in student.module.members[0].state_dict().items())
    x, _ = images(20, seed=5)
    mean = torch.stack([one(task.spec.normalize(x)).log_softmax(1) for one in student.module.members]).mean(0)
    torch.testing.assert_close(student.compute_probabilities(x), mean.softmax(1))
    weights = [next(one.parameters()) for one in student.module.members]
    assert not torch.equal(weights[0], weights[1]) and not torch.equal(weights[1], weights[2])
