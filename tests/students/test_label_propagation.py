"""Propagated labels: which are kept, and that they help where few labels are given."""

import torch
from sklearn.datasets import make_moons

from pate_torch.privacy.records import DataSpec
from pate_torch.students.base import StudentTask
from pate_torch.students.semi_supervised import LabelSpreading, select_most_confident
from pate_torch.students.training import Supervised
from tests.students.tasks import CPU


def test_the_widest_leads_of_each_class_are_kept():
    lead = torch.linspace(0.0, 0.9, 10)
    share = torch.cat([torch.stack([0.5 + lead / 2, 0.5 - lead / 2], 1), torch.tensor([[0.1, 0.9]])])
    assert select_most_confident(share, 0.5).tolist() == [-1] * 5 + [0] * 5 + [1]


def test_propagated_labels_help_where_few_are_given():
    """Two moons with one label each: the labels alone cut them straight, propagated ones follow them round."""
    x, y = make_moons(300, noise=0.06, random_state=0)
    x, y = torch.from_numpy(x).float(), torch.from_numpy(y)
    scale = {"mean": (0.5, 0.25), "std": (0.9, 0.5)}
    spec = DataSpec(name="moons", num_classes=2, input_shape=(2,), class_names=("a", "b"), **scale)
    query_Q = torch.tensor([int((y == c).nonzero()[0]) for c in range(2)])
    scores = []
    for kind in (Supervised, LabelSpreading):
        algorithm = kind(network="mlp", steps=100, batch_size=8, learning_rate=1e-2)
        student = algorithm.fit(StudentTask(spec, x, query_Q, y[query_Q]), seed=0, device=CPU)
        scores.append(float((student.predict(x) == y).float().mean()))
    assert scores[0] < 0.8 < 0.9 < scores[1]
