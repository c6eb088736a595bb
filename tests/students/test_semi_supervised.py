"""Propagated labels, distribution alignment and adversarial smoothness, the parts of students with unlabeled points."""

import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import make_moons
from sklearn.neighbors import NearestNeighbors

from pate_torch import networks
from pate_torch.privacy.records import DataSpec
from pate_torch.students.base import StudentTask
from pate_torch.students.semi_supervised import (
    Alignment,
    LabelSpreading,
    _frozen_statistics,
    compute_expected_shares,
    compute_smoothness,
    propagate,
    select_most_confident,
)
from pate_torch.students.training import Supervised, build_problem
from tests.students.tasks import CPU, make_task
from tests.worlds import images


def test_the_widest_leads_of_each_class_are_kept():
    lead = torch.linspace(0.0, 0.9, 10)
    share = torch.cat([torch.stack([0.5 + lead / 2, 0.5 - lead / 2], 1), torch.tensor([[0.1, 0.9]])])
    assert select_most_confident(share, 0.5).tolist() == [-1] * 5 + [0] * 5 + [1]


def test_propagated_labels_help_where_few_are_given():
    """Two moons with one label each: the labels alone separate them by a line, propagated ones follow the moons."""
    x, y = (torch.from_numpy(part) for part in make_moons(300, noise=0.06, random_state=0))
    scale = {"mean": (0.5, 0.25), "std": (0.9, 0.5)}
    spec = DataSpec(name="moons", num_classes=2, input_shape=(2,), class_names=("a", "b"), **scale)
    query_Q = torch.tensor([int((y == c).nonzero()[0]) for c in range(2)])
    scores = []
    for algorithm in (Supervised(network="mlp", steps=100, batch_size=8, learning_rate=1e-2), LabelSpreading()):
        student = algorithm.fit(StudentTask(spec, x.float(), query_Q, y[query_Q]), seed=0, device=CPU)
        scores.append(float((student.predict(x.float()) == y).float().mean()))
    assert scores[0] < 0.8 < 0.9 < scores[1]


def test_new_points_get_the_mean_share_of_their_nearest_public_points(monkeypatch):
    """By scikit-learn's nearest neighbors, in raw points."""
    task, _ = make_task(labels=30)
    problem = build_problem(task, 0, CPU)
    share_PC = propagate(problem, None, compute_expected_shares(problem, "uniform"))
    new_x = images(40, seed=5)[0]
    place_PD, new_ND = (task.spec.normalize(x).flatten(1).numpy() for x in (task.pool_x, new_x))
    nearest = NearestNeighbors(n_neighbors=10).fit(place_PD).kneighbors(new_ND, return_distance=False)
    student = LabelSpreading().fit(task, seed=0, device=CPU)
    torch.testing.assert_close(student.compute_probabilities(new_x), share_PC[nearest].mean(1), atol=1e-4, rtol=0)
    monkeypatch.setattr(networks, "_BLOCK_POINTS", 7)  # fewer than a point has neighbors
    torch.testing.assert_close(student.compute_probabilities(new_x), share_PC[nearest].mean(1), atol=1e-4, rtol=0)


def test_alignment_restores_the_expected_shares():
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
