"""Networks of the user: the optimizer's steps, what a transform draws, what is refused, and what one record changes."""

import copy
import functools
import math
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torchvision.transforms import v2

from pate_torch.privacy.partition import ReplaceOne
from pate_torch.privacy.records import DataSpec, PrivateRecords
from pate_torch.teachers import panel
from pate_torch.teachers.engine import draw_batches
from pate_torch.teachers.network import Network, to_network
from tests.worlds import clouds

C = 3
SPEC = DataSpec(name="c", num_classes=C, input_shape=(2,), class_names=("a", "b", "c"), mean=(0.5, 1.0), std=(2.0, 4.0))
IMAGES = DataSpec(name="i", num_classes=2, input_shape=(1, 6, 6), class_names=("a", "b"), mean=(0.5,), std=(0.25,))
CPU = torch.device("cpu")
X, Y = clouds(40)


def draw_images(count, seed=0):
    """Bright on the left or on the right half."""
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randint(0, 100, (count, 1, 6, 6), generator=generator), torch.arange(count) % 2
    x[y == 0, :, :, :3] += 100
    x[y == 1, :, :, 3:] += 100
    return x.to(torch.uint8), y


def linear():
    return nn.Linear(2, C)


def zeros():
    layer = nn.Linear(2, C)
    nn.init.zeros_(layer.weight), nn.init.zeros_(layer.bias)
    return layer


def sgd(params):
    return torch.optim.SGD(params, lr=0.3, momentum=0.8, weight_decay=0.01)


def fit(network, x=X, y=Y, spec=SPEC, seed=0, teacher=0):
    return network.fit(x, y, spec, seed=seed, device=CPU, teacher=teacher).state_dict()


def are_equal(first, second):
    return all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("schedule", ["cosine", "constant"])
def test_it_takes_the_steps_of_the_optimizer_at_the_scheduled_rate(schedule):
    """A loop over the batches, with momentum, decay and gradient written out."""
    steps, size, smoothing = 12, 6, 0.2
    weights = fit(Network(zeros, steps=steps, batch_size=size, optimizer=sgd, schedule=schedule,
                          label_smoothing=smoothing), teacher=4)  # fmt: skip
    w, speed = torch.zeros(C, 3, dtype=torch.float64), torch.zeros(C, 3, dtype=torch.float64)
    for step, batch in enumerate(draw_batches(0, 4, len(Y), steps, size).long()):
        z = (X[batch].double() - torch.tensor([0.5, 1.0])) / torch.tensor([2.0, 4.0])
        z = torch.cat([z, torch.ones(size, 1)], 1)
        target = (1 - smoothing) * F.one_hot(Y[batch], C) + smoothing / C
        gradient = ((z @ w.T).softmax(1) - target).T @ z / size + 0.01 * w
        speed = gradient if step == 0 else 0.8 * speed + gradient
        w = w - 0.3 * (0.5 * (1 + math.cos(math.pi * step / steps)) if schedule == "cosine" else 1) * speed
    torch.testing.assert_close(weights["weight"].double(), w[:, :2], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(weights["bias"].double(), w[:, 2], rtol=1e-4, atol=1e-6)


class Spy:
    """Transform of rows that notes what it drew, and then draws once more for a record above ``limit``."""

    def __init__(self, notes, limit=math.inf):
        self.notes, self.limit = notes, limit

    def __deepcopy__(self, memo):
        return self

    def __call__(self, point):
        self.notes.append((torch.rand(1).item(), np.random.rand(), random.random()))
        if point[0] > self.limit:
            torch.rand(7), np.random.rand(7), [random.random() for _ in range(7)]
        return point


def test_a_transform_draws_for_each_record_alone():
    notes = {limit: [] for limit in (math.inf, 0.0)}
    layers = nn.Sequential(nn.Dropout(0.5), linear())
    results = []
    for limit, drawn in notes.items():
        network = Network(lambda: copy.deepcopy(layers), steps=30, batch_size=5, transform=Spy(drawn, limit))
        results.append(fit(network))
    assert (X[:, 0] > 0).any() and notes[math.inf] == notes[0.0] and len(notes[0.0]) == 150
    assert are_equal(*results)  # nor do the draws of a transform change those of dropout
    for column in np.array(notes[0.0]).T:
        assert len(np.unique(column)) == 150 and abs(column.mean() - 0.5) < 4 / math.sqrt(12 * 150)
    other = []
    fit(Network(linear, steps=30, batch_size=5, transform=Spy(other)), teacher=1)
    assert not set(np.ravel(other)) & set(np.ravel(notes[0.0]))


def test_a_transform_is_applied_in_training_alone_and_changes_what_is_learnt():
    notes, data = [], PrivateRecords.from_rows(X, Y, np.arange(len(Y)).astype(str))
    state = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    network = Network(linear, steps=20, batch_size=4, transform=Spy(notes))
    teachers = panel.fit_panel(network, data, SPEC, ReplaceOne().make_shards(data, 2, 0), seed=0)
    assert len(notes) == 2 * 20 * 4 + 1  # and once on a blank point
    teachers.predict(X)
    assert len(notes) == 2 * 20 * 4 + 1
    assert random.getstate() == state[0] and np.random.get_state()[1].tolist() == state[1]
    assert torch.equal(torch.get_rng_state(), state[2])
    plain, flipped = fit(Network(zeros, steps=20)), fit(Network(zeros, steps=20, transform=torch.neg))
    assert not are_equal(plain, flipped)


def test_a_flip_of_images_reaches_the_network():
    """Its class is the half that is bright, of which nothing is left where every second image is flipped."""
    x, y = draw_images(40)
    for flip, is_right in ((None, True), (v2.RandomHorizontalFlip(0.5), False)):
        network = Network(lambda: nn.Sequential(nn.Flatten(), nn.Linear(36, 2)), steps=100, transform=flip)
        trained = network.fit(x, y, IMAGES, seed=0, device=CPU, teacher=0)
        accuracy = (trained(IMAGES.normalize(x)).argmax(1) == y).float().mean()
        assert bool(accuracy > 0.95) == is_right


class Lazy(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.LazyLinear(8), nn.BatchNorm1d(8), nn.ReLU(), nn.LazyLinear(C))

    def forward(self, x):
        return self.layers(x)


@pytest.mark.parametrize(
    "network",
    [
        Network(Lazy, steps=60, batch_size=16, optimizer=functools.partial(torch.optim.AdamW, lr=0.05)),
        Network(linear, steps=20, batch_size=40, optimizer=torch.optim.LBFGS),
        Network(linear, optimizer=lambda params: torch.optim.SGD(params, lr=0.5)),
    ],
    ids=["lazy", "lbfgs", "sgd"],
)
def test_layers_and_optimizers_of_every_kind_learn(network):
    network.check("teacher", SPEC)
    module = network.fit(X, Y, SPEC, seed=0, device=CPU, teacher=0)
    points, truth = clouds(200, seed=1)
    assert not module.training and all(parameter.grad is None for parameter in module.parameters())
    assert float((module(SPEC.normalize(points)).argmax(1) == truth).float().mean()) > 0.9


BAD = {
    "factory": (Network(linear()), r"teacher='Linear'.*Pass the class, or lambda: Linear"),
    "width": (Network(lambda: nn.Linear(2, C + 1)), r"teacher=\(2, 4\)"),
    "input": (Network(lambda: nn.Linear(5, C)), r"teacher='Linear': .*fails on two blank points \(.*shapes"),
    "optimizer": (
        Network(linear, optimizer=sgd(linear().parameters())),
        r"^optimizer='SGD'.*as does lambda params",
    ),
    "rule": (Network(linear, optimizer=lambda params: 0.1), "^optimizer=.*torch.optim.Optimizer"),
    "type": (Network(linear, transform=lambda point: point.double()), "^transform=.*float32"),
    "shape": (Network(linear, transform=lambda point: point[:1]), r"^transform=.*shape \(2,\)"),
    "array": (Network(linear, transform=lambda point: point.numpy()), "^transform="),
}


@pytest.mark.parametrize("network,message", BAD.values(), ids=BAD)
def test_what_cannot_be_used_is_named_before_training(network, message):
    with pytest.raises(ValueError, match=message):
        network.check("teacher", SPEC)


@pytest.mark.parametrize("options", [{"steps": 0}, {"batch_size": 2.5}, {"label_smoothing": 0.9}, {"schedule": "step"}])
def test_settings_out_of_range_are_named(options):
    with pytest.raises(ValueError, match=f"^{next(iter(options))}="):
        Network(linear, **options)


def test_a_choice_becomes_a_network_and_a_misspelled_option_is_answered():
    assert to_network(Network(linear, steps=7), batch_size=2) == Network(linear, steps=7, batch_size=2)
    assert to_network(linear, steps=9) == Network(linear, steps=9)
    assert to_network("vat") is None and to_network(None) is None
    with pytest.raises(ValueError, match="Did you mean 'steps'"):
        to_network(linear, stps=3)


# ---- several teachers -------------------------------------------------------------------------------------------


def counting_optimizer():
    """A rule that trains every second network it is asked for."""
    calls = []

    def make(params):
        calls.append(1)
        return torch.optim.SGD(params, lr=0.5 * (len(calls) % 2))

    return {"optimizer": make}


def counting_transform(num_draws=20 * 8):
    """Rows, turned around for every second teacher."""
    calls = []

    def turn(point):
        calls.append(1)
        return -point if (len(calls) // num_draws) % 2 else point

    return {"transform": turn}


def jittered(point):
    return point + 0.3 * torch.randn(2) + float(np.random.normal(0, 0.3)) + random.gauss(0, 0.3)


def make_panel(network, num_teachers=2, drops=False):
    """Teachers, of whom the first has a record less if ``drops``."""
    x, y = clouds(30 * num_teachers)
    data = PrivateRecords.from_rows(x, y, np.arange(len(y)).astype(str))
    shards = ReplaceOne().make_shards(data, num_teachers, 0)
    if drops:
        shards.mask_KS[0, -1] = False
    return panel.fit_panel(network, data, SPEC, shards, seed=0)


@pytest.mark.parametrize("make", [counting_optimizer, counting_transform])
def test_what_two_teachers_share_is_found(make):
    points = clouds(200, seed=1)[0]
    teachers = make_panel(Network(linear, steps=20, batch_size=8, **make()))
    with pytest.raises(ValueError, match=r"1 of 2 teachers.*was trained again"):
        teachers.count_votes(points)


class OwnGenerator:
    """A transform that draws from a generator of its own, of which every teacher gets a copy."""

    def __init__(self):
        self.generator = np.random.default_rng(0)

    def __call__(self, point):
        return point + float(self.generator.normal())


def test_a_generator_of_ones_own_is_copied_for_each_teacher():
    points = clouds(200, seed=1)[0]
    teachers = make_panel(Network(linear, steps=20, batch_size=8, optimizer=sgd, transform=OwnGenerator()))
    teachers.count_votes(points)


@pytest.mark.fresh_process
def test_a_fresh_process_repeats_transform_and_optimizer():
    rates = [0.05]
    network = Network(
        lambda: nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, C)),
        steps=40,
        optimizer=lambda params: torch.optim.AdamW(params, lr=rates[0]),
        transform=jittered,
    )
    points = clouds(300, seed=1)[0]
    teachers = make_panel(network)
    teachers.count_votes(points)
    assert teachers.retraining_check is None


def test_one_record_changes_one_network_bit_for_bit(monkeypatch):
    trained, plain = [], Network.fit

    def spy(self, *args, **options):
        trained.append(plain(self, *args, **options))
        return trained[-1]

    monkeypatch.setattr(Network, "fit", spy)
    network = Network(linear, steps=15, batch_size=8, optimizer=sgd, transform=jittered)
    make_panel(network, 4), random.random(), np.random.rand(), torch.rand(3), make_panel(network, 4, drops=True)
    states = [module.state_dict() for module in trained]
    assert [are_equal(states[k], states[4 + k]) for k in range(4)] == [False, True, True, True]
