"""Teachers of any kind: one record reaches one teacher, whatever the teacher draws, and every teacher has one vote."""

import copy
import dataclasses
import math
import random
import re
import threading
import warnings
from typing import ClassVar

import numpy as np
import pytest
import torch
from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import LinearRegression, LogisticRegression
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import nn

from pate_torch.privacy.partition import AddRemove, ReplaceOne
from pate_torch.privacy.records import DataSpec, PrivateRecords, Shards
from pate_torch.teachers import panel
from pate_torch.teachers.network import Network
from tests.worlds import clouds

N, K, C = 240, 8, 3
SPEC = DataSpec(
    name="clouds", num_classes=C, input_shape=(2,), class_names=("a", "b", "c"), mean=(0.0,) * 2, std=(2.0,) * 2
)
TRAINING = {"steps": 25, "batch_size": 8, "optimizer": lambda params: torch.optim.Adam(params, lr=0.05)}


def private(x, y, ids=None):
    return PrivateRecords.from_rows(x, y, np.arange(len(y)).astype(str) if ids is None else ids)


DATA = private(*clouds(N))
SHARDS = ReplaceOne().make_shards(DATA, K, 0)


class Net(nn.Module):
    """With dropout and batch statistics, which the stacked teachers cannot have."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, C))
        self.unused = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return self.layers(x)


def fit(teacher, data=DATA, shards=SHARDS, seed=0):
    """The ensemble of an estimator, or of the modules that a function makes."""
    teacher = teacher if hasattr(teacher, "get_params") else Network(teacher, **TRAINING)
    return panel.fit_panel(teacher, data, SPEC, shards, seed=seed)


TEACHERS = [
    LogisticRegression(),
    RandomForestClassifier(n_estimators=3, max_features=1),  # draws
    make_pipeline(StandardScaler(), RandomForestClassifier(n_estimators=2, max_features=1)),  # draws, one level down
    KNeighborsClassifier(n_neighbors=3),
    Net,
]
IDS = ["logistic", "forest", "pipeline", "neighbors", "network"]


@pytest.mark.parametrize(
    "teacher,adjacency",
    [*((teacher, "replace_one") for teacher in TEACHERS), (TEACHERS[1], "add_remove"), (Net, "add_remove")],
)
def test_one_record_changes_one_teacher(teacher, adjacency):
    x, y = clouds(N)
    points, _ = clouds(400, seed=1)
    if adjacency == "replace_one":
        partition, other = ReplaceOne(), private(x.clone(), y.clone())
        other.x[17], other.y[17] = torch.tensor([9.0, -9.0]), (y[17] + 1) % C
    else:
        partition, kept = AddRemove(), torch.arange(N) != 17
        other = private(x[kept], y[kept], np.arange(N).astype(str)[kept.numpy()])
    votes = [fit(teacher, data, partition.make_shards(data, K, 0)).predict(points) for data in (private(x, y), other)]
    changed = (votes[0] != votes[1]).any(1)
    assert int(changed.sum()) <= 1
    if adjacency == "replace_one" and teacher is not Net:
        assert int(changed.sum()) == 1  # the test can see a change


@pytest.mark.parametrize("teacher", TEACHERS, ids=IDS)
def test_they_learn_and_vote(teacher):
    points, truth = clouds(200, seed=1)
    one = fit(teacher)
    votes = one.count_votes(points)
    assert votes.num_teachers == K and votes.num_classes == C and "withheld" in repr(one)
    assert float((votes.compute_plurality() == truth).float().mean()) > 0.9
    assert torch.equal(one.predict(points), fit(teacher).predict(points))


def test_teachers_draw_apart_from_each_other_and_from_the_caller():
    """Equal shards, different forests; and nobody else's stream is touched."""
    x, y = clouds(30)
    data = private(x.repeat(K, 1), y.repeat(K))
    order = torch.arange(30 * K).view(K, 30)
    shards = Shards(order, torch.ones_like(order, dtype=torch.bool), "replace_one")
    before = random.getstate(), np.random.get_state()[1].copy(), torch.random.get_rng_state()
    forests = fit(TEACHERS[1], data, shards).predict(clouds(300, seed=1)[0])
    networks = fit(Net, data, shards).predict(clouds(300, seed=1)[0])
    assert len(torch.unique(forests, dim=0)) > 1 and len(torch.unique(networks, dim=0)) > 1
    fit(Drawing()).predict(clouds(9)[0])
    assert before[0] == random.getstate() and (before[1] == np.random.get_state()[1]).all()
    assert torch.equal(before[2], torch.random.get_rng_state())


def test_small_shards_still_have_one_vote():
    """Three records to six teachers: empty shards vote class 0, one-class shards that class."""
    data = private(torch.zeros(6, 2), torch.full((6,), 2))
    index = torch.full((6, 2), -1)
    index[1, 0], index[3, :2] = 0, torch.tensor([1, 2])
    shards = Shards(index, index >= 0, "replace_one")
    votes = fit(LogisticRegression(), data, shards).predict(torch.zeros(4, 2))
    assert votes.tolist() == [[0] * 4, [2] * 4, [0] * 4, [2] * 4, [0] * 4, [0] * 4]
    votes = fit(Net, data, shards).predict(torch.zeros(4, 2))
    assert votes[[0, 2, 4, 5]].eq(0).all() and votes[[1, 3]].eq(2).all()


class FiniteNet(Net):
    def forward(self, x):
        logits = super().forward(x)
        assert self.training or logits.isfinite().all(), f"parameters {self.unused}"
        return logits


def test_a_network_that_fails_at_prediction_votes_a_constant_and_says_nothing():
    x, y = clouds(N)
    own_rows = SHARDS.get_indices(3)
    x[own_rows[0]] = 1e20  # this square is not finite
    votes_KQ = fit(FiniteNet, private(x, y)).predict(x[:20])
    clean_KQ = fit(FiniteNet).predict(x[:20])
    assert (votes_KQ[3] == panel.FALLBACK_CLASS).all() and (clean_KQ[3] != panel.FALLBACK_CLASS).any()
    others = [k for k in range(K) if k != 3]
    assert torch.equal(votes_KQ[others], clean_KQ[others])


class Fragile(LogisticRegression):
    """Cannot be fitted to shards with many records of class 1, and cannot answer where the shard has class 2 first."""

    def fit(self, x, y):
        if (y == 1).sum() > 10:
            raise RuntimeError("too many ones")
        warnings.warn("this shard is odd", UserWarning, stacklevel=2)
        self.odd_ = y[0] == 2
        return super().fit(x, y)

    def predict(self, x):
        if self.odd_:
            raise RuntimeError("odd")
        return super().predict(x)


def test_a_teacher_that_fails_votes_a_constant_and_says_nothing():
    x, y = DATA.x, DATA.y
    one = fit(Fragile())  # warnings are errors here
    bad = sum(int((y[SHARDS.get_indices(k)] == 1).sum()) > 10 for k in range(K))
    assert 0 < bad < K
    votes = one.predict(x)
    for k in range(K):
        own = y[SHARDS.get_indices(k)]
        assert bool((votes[k] == 0).all()) == (int((own == 1).sum()) > 10 or int(own[0]) == 2)


@pytest.mark.parametrize(
    "teacher,message",
    [
        (LinearRegression(), "classifier"),
        (KNeighborsClassifier(metric="nonsense"), "could be fitted"),
    ],
)
def test_what_cannot_be_a_teacher_is_refused(teacher, message):
    with pytest.raises(ValueError, match=message):
        fit(teacher)


class Drawing(LogisticRegression):
    """Learns from records that generators of the whole process choose, as many draws as it has records."""

    def fit(self, x, y):
        noise = [np.random.rand(len(y)), torch.rand(len(y)).numpy(), np.array([random.random() for _ in y])]
        return super().fit(x + 9 * sum(noise)[:, None], y)

    def predict(self, x):
        return super().predict(x + np.random.rand(*x.shape))


def neighbors_of(teacher, seed=0):
    """Whose votes change where a record of the first teacher is taken away, without any other change of the shards."""
    points, fewer = clouds(200, seed=1)[0], SHARDS.mask_KS.clone()
    fewer[0, -1] = False
    votes = []
    for mask in (SHARDS.mask_KS, fewer):
        random.random(), np.random.rand(), torch.rand(1)  # the program around it draws, too
        votes.append(fit(teacher, DATA, dataclasses.replace(SHARDS, mask_KS=mask), seed).predict(points))
    return (votes[0] != votes[1]).any(1).nonzero().flatten().tolist()


def test_generators_of_the_whole_process_move_the_votes_of_one_teacher():
    assert neighbors_of(Drawing()) == [0]


def test_networks_that_share_a_backbone_are_refused():
    shared, frozen = nn.Linear(2, 4), nn.BatchNorm1d(2)
    whole = nn.Linear(2, C)
    for factory in (
        lambda: nn.Sequential(shared, nn.Linear(4, C)),
        lambda: nn.Sequential(frozen, nn.Linear(2, C)),  # its statistics are buffers
        lambda: whole,
    ):
        with pytest.raises(ValueError, match=r"^teacher=.*share parameters or buffers.*copy\.deepcopy"):
            fit(factory)
    assert len(fit(lambda: nn.Sequential(copy.deepcopy(shared), nn.Linear(4, C)))) == K


def test_networks_that_a_factory_hands_out_again_later_are_copied():
    """Two calls differ, the third returns the first network: no check of two calls sees that."""
    made = [nn.Linear(2, C) for _ in range(2)]
    state = copy.deepcopy(made[0].state_dict())
    calls = []

    def factory():
        calls.append(1)
        return made[len(calls) % 2]

    fit(factory)
    assert all(torch.equal(value, state[name]) for name, value in made[0].state_dict().items())


class Remembering(LogisticRegression):
    """Adds to its records those of all teachers before it, which the class keeps."""

    seen: ClassVar[list] = []

    def fit(self, x, y):
        self.seen.append((x, y))
        return super().fit(np.concatenate([x for x, _ in self.seen]), np.concatenate([y for _, y in self.seen]))


class OwnClone(LogisticRegression):
    """Is its own clone, and starts from where it stands."""

    def __sklearn_clone__(self):
        return self


def try_again(one, points):
    one.count_votes(points)


@pytest.mark.fresh_process
def test_a_teacher_that_comes_out_different_alone_is_refused(monkeypatch):
    monkeypatch.setattr(Remembering, "seen", [])
    points, one = clouds(400, seed=1)[0], fit(Remembering(C=0.01))
    with pytest.raises(ValueError, match=re.escape(f"teacher='1 of {K} teachers': was trained again")):
        try_again(one, points)
    assert one.retraining_check is not None  # nor is it let through the second time


@pytest.mark.parametrize(
    "teacher", [Drawing(), OwnClone(warm_start=True, max_iter=2), Net], ids=["drawing", "own clone", "network"]
)
def test_teachers_that_are_apart_pass(teacher):
    one = fit(teacher)
    try_again(one, clouds(200, seed=1)[0])
    assert one.retraining_check is None


@pytest.mark.fresh_process
def test_a_function_without_a_name_is_sent_to_the_fresh_process_and_a_lock_is_refused():
    width, lock = 6, threading.Lock()

    def make_layers():  # draws from all generators of the process
        shares = 0.2 + 0.3 * np.random.rand(), 0.3 * random.random()
        return nn.Sequential(nn.Linear(2, width), *map(nn.Dropout, shares), nn.Linear(width, C))

    one = fit(make_layers)
    try_again(one, clouds(50, seed=1)[0])
    with pytest.raises(ValueError, match=r"cannot be sent to the fresh process.*top level of a module"):
        fit(lambda: nn.Linear(2, C, bias=lock.locked()))


def test_one_teacher_alone_is_not_tried():
    data = private(*clouds(30))
    assert fit(LogisticRegression(), data, ReplaceOne().make_shards(data, 1, 0)).retraining_check is None


# ---- skorch -----------------------------------------------------------------------------------------------------


class Layer(nn.Module):
    """Takes images in their own shape, as float32, alone."""

    def __init__(self, shape=(1, 4, 4), width=2):
        super().__init__()
        self.shape, self.layer = tuple(shape), nn.Linear(math.prod(shape), width)

    def forward(self, x):
        assert tuple(x.shape[1:]) == self.shape and x.dtype == torch.float32
        return self.layer(x.flatten(1))


IMAGES = DataSpec(name="i", num_classes=2, input_shape=(1, 4, 4), class_names=("a", "b"), mean=(0.5,), std=(0.25,))


def shades(count, seed=0):
    y = torch.arange(count) % 2
    x = torch.randint(0, 60, (count, 1, 4, 4), generator=torch.Generator().manual_seed(seed))
    return (x + 120 * y.view(-1, 1, 1, 1)).to(torch.uint8), y


@pytest.fixture
def make_net():
    """Makes networks of skorch, which comes with the extra ``dev``."""
    from skorch import NeuralNetClassifier

    settings = {"criterion": nn.CrossEntropyLoss, "max_epochs": 20, "lr": 0.1, "batch_size": 8}
    return lambda module=Layer, **changes: NeuralNetClassifier(module, **(settings | changes))


def fit_images(net, num_teachers=4, mask=None):
    data = private(*shades(20 * num_teachers))
    shards = ReplaceOne().make_shards(data, num_teachers, 0)
    shards = shards if mask is None else dataclasses.replace(shards, mask_KS=mask(shards.mask_KS.clone()))
    return panel.fit_panel(net, data, IMAGES, shards, seed=0)


@pytest.mark.fresh_process
def test_networks_of_skorch_learn_images_and_are_trained_again_in_a_fresh_process(make_net, capsys):
    teachers, (x, y) = fit_images(make_net()), shades(60, seed=1)
    votes = teachers.predict(x)
    assert float((votes == y).float().mean()) > 0.95
    teachers.check_retraining(x, votes)
    assert teachers.retraining_check is None
    assert "".join(capsys.readouterr()) == ""


def test_one_record_changes_one_network_of_skorch_bit_for_bit(make_net, monkeypatch):
    from skorch import NeuralNetClassifier

    trained, plain = [], NeuralNetClassifier.fit

    def spy(self, *args, **options):
        trained.append(plain(self, *args, **options).module_.state_dict())
        return self

    def shorten(mask_KS):
        mask_KS[0, -1] = False
        return mask_KS

    monkeypatch.setattr(NeuralNetClassifier, "fit", spy)
    net = make_net(max_epochs=3)
    states = []
    for mask in (None, shorten):
        torch.rand(1)
        fit_images(net, mask=mask)
        states.append(trained[-4:])
    equal = [all(torch.equal(a[key], b[key]) for key in a) for a, b in zip(*states, strict=True)]
    assert equal == [False, True, True, True]


def test_a_copy_of_a_network_of_skorch_keeps_all_records_and_says_nothing(make_net, capsys):
    """Also as the last step of a pipeline. Three records of one class and one of another cannot be split."""
    x = clouds(12)[0]
    for estimator in (net := make_net(module__shape=(2,), module__width=C), make_pipeline(StandardScaler(), net)):
        copied = panel.copy_estimator(estimator).fit(
            panel.convert_points(estimator, SPEC, x[:4]), np.array([2, 2, 2, 0])
        )
        last = copied[-1] if hasattr(copied, "steps") else copied
        assert last is not net and net.train_split is not None and net.verbose == 1
        assert "valid_loss" not in last.history[-1]
        assert panel.convert_points(estimator, SPEC, x).shape == (12, 2)
    assert "".join(capsys.readouterr()) == ""


def test_networks_of_skorch_that_cannot_learn_are_refused_on_blank_points(make_net):
    from skorch.callbacks import EarlyStopping

    for net, message in (
        (make_net(criterion=nn.NLLLoss), "no probabilities.*criterion=torch.nn.CrossEntropyLoss"),
        (make_net(module__width=3), r"must learn probabilities of 2 classes"),
        (make_net(module__shape=(16,)), "AssertionError"),
        (make_net(callbacks=[EarlyStopping(monitor="valid_loss")]), r"without a validation split \(.*valid_loss"),
    ):
        with pytest.raises(ValueError, match=f"^student='NeuralNetClassifier': .*{message}"):
            panel.check_learner("student", net, IMAGES)
    net = make_net()
    assert panel.check_learner("student", net, IMAGES) is net
