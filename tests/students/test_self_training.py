"""Self-training: labels are propagated among features, generation after generation."""

import dataclasses

import pytest
import torch

from pate_torch import networks
from pate_torch.features.contrastive import ContrastiveFeatures, encode
from pate_torch.features.neighbors import build_neighbor_graph
from pate_torch.networks import make_feature_extractor
from pate_torch.privacy.records import LinearModel
from pate_torch.privacy.whitening import Whitening
from pate_torch.students import semi_supervised
from pate_torch.students.base import StudentTask
from pate_torch.students.self_training import SelfTraining
from pate_torch.students.semi_supervised import LabelSpreading
from pate_torch.students.training import Supervised
from tests.worlds import IMAGES, images

CPU = torch.device("cpu")


def test_a_student_of_propagated_labels_outvotes_wrong_cells_where_a_plain_one_learns_them():
    x, y = images(300, seed=1)
    generator = torch.Generator().manual_seed(3)
    wrong = torch.rand(300, generator=generator) < 0.3
    told = torch.where(wrong, (y + 1) % 3, y)
    plain = Supervised(
        network="small_cnn", network_options={"channels": (8, 16), "hidden": 32}, steps=150, batch_size=32
    )
    task = StudentTask(IMAGES, x, torch.arange(300), told)
    test_x, test_y = images(600, seed=2)

    def right(student) -> float:
        return float((student.predict(test_x) == test_y).double().mean())

    carried = SelfTraining(first_student=plain, later_students=plain)
    alone, helped = (right(algorithm.fit(task, seed=0, device=CPU)) for algorithm in (plain, carried))
    assert helped > 0.97 and helped > alone + 0.02


def test_a_later_round_learns_among_the_features_of_the_student_before():
    x, y = images(90, seed=1)
    y = torch.where(torch.rand(90, generator=torch.Generator().manual_seed(3)) < 0.3, (y + 1) % 3, y)
    seen = []

    class Spy(Supervised):
        def fit(self, task, **options):
            seen.append((self.name, len(task.query_Q)))
            return super().fit(task, **options)

    small = {"network": "small_cnn", "network_options": {"channels": (4, 8), "hidden": 16}, "steps": 30}
    parts = {"first_student": Spy(name="first", **small), "later_students": Spy(name="then", **small)}
    student = SelfTraining(**parts, keep_fraction=0.5, keep_fraction_later=1.0, num_generations=1)
    every = torch.arange(90)
    round_Q = torch.cat([torch.zeros(90), torch.ones(90)]).long()
    both = StudentTask(IMAGES, x, every.repeat(2), y.repeat(2), round_Q=round_Q)
    guide = student.fit(dataclasses.replace(both, query_Q=every, label_Q=y, round_Q=None), seed=0, device=CPU)
    last = student.fit(dataclasses.replace(both, guide=guide), seed=0, device=CPU)
    assert [name for name, _ in seen] == ["first", "then"], "the guide is not trained a second time"
    assert seen[0][1] < 60 and seen[1][1] == 90
    assert guide is not last
    seen.clear()
    dataclasses.replace(student, num_generations=3).fit(both, seed=0, device=CPU)
    assert [name for name, _ in seen] == ["first", "then", "then", "then"]
    assert make_feature_extractor(guide.module)(IMAGES.normalize(x)).shape == (90, 16)


def test_members_of_a_generation_are_pooled_and_the_next_one_sees_the_features_of_all(monkeypatch):
    x, y = images(90, seed=1)
    graphs = []
    monkeypatch.setattr(
        semi_supervised.neighbors, "build_neighbor_graph", lambda f, *k: graphs.append(f) or build_neighbor_graph(f, *k)
    )
    small = Supervised(network_options={"channels": (4, 8), "hidden": 16}, steps=5)
    student = SelfTraining(first_student=small, later_students=small, num_generations=2, members=3)
    last = student.fit(StudentTask(IMAGES, x, torch.arange(90), y), seed=0, device=CPU)
    assert isinstance(last.module, networks.Voting) and len(last.module.members) == 3
    assert graphs[1].shape == (90, 3 * 16)
    seen = IMAGES.normalize(x)
    apart = [
        torch.nn.functional.normalize(make_feature_extractor(member)(seen), dim=1) for member in last.module.members
    ]
    assert torch.allclose(make_feature_extractor(last.module)(seen), torch.cat(apart, 1), atol=1e-6)
    assert not torch.allclose(apart[0], apart[1])


@pytest.mark.parametrize("network", ["small_cnn", None])
def test_features_of_label_spreading_are_those_in_which_points_are_near(network):
    """Its network has linear layers inside, and none at the end."""
    x, y = images(60, seed=1)
    design = {"network": network, "network_options": {"channels": (4, 8), "hidden": 16}, "steps": 2}
    features = None if network is None else ContrastiveFeatures(**design)
    spreading = LabelSpreading(features=features).fit(StudentTask(IMAGES, x, torch.arange(60), y), seed=0, device=CPU)
    seen, place_PD = IMAGES.normalize(x), spreading.module[-1].place_PD
    assert torch.allclose(make_feature_extractor(spreading.module)(seen), place_PD, atol=1e-6)


def test_a_model_that_was_not_released_is_not_published():
    x, y = images(60, seed=1)
    small = Supervised(network_options={"channels": (4, 8), "hidden": 16}, steps=2)
    student = SelfTraining(first_student=small, later_students=small, publish="released_model")
    features = ContrastiveFeatures(network_options=small.network_options, steps=1)
    width = encode(features.learn(x[:2], IMAGES, seed=0), x[:2], IMAGES).shape[1]
    drawn = torch.rand(60, 3, generator=torch.Generator().manual_seed(0)) + 0.1
    task = StudentTask(IMAGES, x, torch.arange(60), y)
    other = dataclasses.replace(task, posterior_QC=drawn / drawn.sum(1, keepdim=True))
    for one, task_of_one, size, message in (
        (student, task, None, "no model was released"),
        (student, task, 3, "other features"),
        (dataclasses.replace(student, features=features), other, width, "other features.*released"),
    ):
        whitening = Whitening(torch.zeros(size or 1), torch.eye(size or 1), 1.0)
        model = None if size is None else LinearModel(torch.zeros(size + 1, 3), torch.zeros(3), whitening)
        with pytest.raises(ValueError, match=rf"student\.publish='released_model'.*{message}"):
            one.fit(dataclasses.replace(task_of_one, model=model), seed=0, device=CPU)
    with pytest.raises(ValueError, match=r"student\.publish='teacher'"):
        dataclasses.replace(student, publish="teacher")
