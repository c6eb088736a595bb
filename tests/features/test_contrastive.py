"""Contrastive features: the published loss, encoders that depend on points and seed alone, and starts of networks."""

import dataclasses

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from pate_torch import networks
from pate_torch.core.device import single_thread_mode
from pate_torch.core.rng import derive_member_seed, make_torch_generator
from pate_torch.features import contrastive
from pate_torch.features.contrastive import ContrastiveFeatures, compute_contrastive_loss, encode, transfer_weights
from pate_torch.networks import get_last_linear, make_feature_extractor, remove_head
from pate_torch.privacy.records import DataSpec
from pate_torch.students.base import StudentTask
from pate_torch.students.self_training import PooledStudent
from pate_torch.students.training import Supervised, build_problem
from pate_torch.teachers.recipe import PublicStart

CPU = torch.device("cpu")
FACTS = {"num_classes": 10, "class_names": tuple("0123456789"), "mean": (0.3,), "std": (0.38,)}
SPEC = DataSpec(name="digits", input_shape=(1, 8, 8), **FACTS)
SMALL = {"channels": (8, 16), "hidden": 32}
RECIPE = ContrastiveFeatures(network_options=SMALL, steps=60, batch_size=64, augment={"rotate": 10, "shift": 0.7})


def digits(count: int = 300) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = load_digits(return_X_y=True)
    return torch.from_numpy((x[:count] * 255 / 16).astype(np.uint8)).view(-1, 1, 8, 8), torch.from_numpy(y[:count])


def agreement(features: torch.Tensor, y: torch.Tensor) -> float:
    """How often a point's nearest other point is of its class."""
    similarity = (features @ features.T).fill_diagonal_(-2)
    return float((y[similarity.argmax(1)] == y).float().mean())


def test_contrast_is_the_published_loss():
    z = torch.randn(12, 5, dtype=torch.float64)
    unit = z.float() / z.float().norm(dim=1, keepdim=True)
    total = 0.0
    for i in range(12):  # SimCLR equation 1, term by term
        j = i + 6 if i < 6 else i - 6
        above = torch.exp(unit[i] @ unit[j] / 0.3)
        below = sum(torch.exp(unit[i] @ unit[k] / 0.3) for k in range(12) if k != i)
        total += float(-torch.log(above / below)) / 12
    assert compute_contrastive_loss(z, 0.3).item() == pytest.approx(total, rel=1e-5)


def test_learning_brings_the_classes_together_without_labels():
    x, y = digits()
    start = dataclasses.replace(RECIPE, steps=0)
    before, after = (agreement(encode(recipe.learn(x, SPEC, seed=0), x, SPEC), y) for recipe in (start, RECIPE))
    assert after > before and after > 0.9
    z = encode(dataclasses.replace(RECIPE, steps=2).learn(x[:3], SPEC, seed=0), x[:3], SPEC)  # few points
    torch.testing.assert_close(z.norm(dim=1), torch.ones(3))


def test_the_same_recipe_is_learned_once_and_copied_and_depends_on_points_and_seed():
    x, _ = digits(80)
    calls: list[tuple[int, int]] = []
    recipe = dataclasses.replace(RECIPE, steps=4)

    def learn(x=x, seed=0):
        return recipe.learn(x, SPEC, seed=seed, progress=lambda *p: calls.append(p))

    contrastive._ENCODER_CACHE.clear()
    changed, second = learn(), learn()
    with torch.no_grad():
        next(changed.parameters()).zero_()
    first = learn().state_dict()
    assert calls == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert all(torch.equal(value, first[key]) for key, value in second.state_dict().items())
    contrastive._ENCODER_CACHE.clear()
    torch.manual_seed(99)
    assert all(torch.equal(value, first[key]) for key, value in learn().state_dict().items())
    for other in (learn(seed=1), learn(x.flip(0))):
        assert any(not torch.equal(value, first[key]) for key, value in other.state_dict().items())
    assert len(calls) == 16


def test_several_encoders_are_those_of_their_seeds_side_by_side():
    x, _ = digits(120)
    recipe = dataclasses.replace(RECIPE, steps=5, encoders=3)
    contrastive._ENCODER_CACHE.clear()
    calls: list[tuple[int, int]] = []
    features = encode(recipe.learn(x, SPEC, seed=4, progress=lambda *p: calls.append(p)), x, SPEC)
    assert calls[-1] == (15, 15)
    contrastive._ENCODER_CACHE.clear()
    with single_thread_mode():  # the slow twin: one after the other, learned anew
        single = recipe.single_encoder
        parts = [encode(single.learn(x, SPEC, seed=derive_member_seed(4, k)), x, SPEC) for k in range(3)]
    assert torch.equal(features, torch.nn.functional.normalize(torch.cat(parts, 1), dim=1))
    assert derive_member_seed(4, 0) == 4 and len({derive_member_seed(4, k) for k in range(3)}) == 3
    assert not torch.allclose(parts[0], parts[1]), "each from its own start"


def test_student_k_starts_from_encoder_k(monkeypatch):
    x, y = digits(60)
    recipe, started = dataclasses.replace(RECIPE, steps=2, encoders=2), {}
    fit = Supervised.fit

    def spy(self, task, seed, **rest):
        description = networks.describe(self.network, (1, 8, 8), 10, **SMALL)
        network = self.make_initial_network(build_problem(task, seed, CPU), description)
        started[seed] = make_feature_extractor(network)
        return fit(self, task, seed=seed, **rest)

    monkeypatch.setattr(Supervised, "fit", spy)
    student = Supervised(network_options=SMALL, steps=2, features=recipe)
    PooledStudent(member=student, members=2).fit(StudentTask(SPEC, x, torch.arange(60), y), seed=4, device=CPU)
    together = recipe.learn(x, SPEC, seed=4)
    for k in range(2):
        ours, theirs = started[derive_member_seed(4, k)].state_dict(), together.encoders[k].state_dict()
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_transfer_moves_the_trunk_and_leaves_the_classifier():
    encoder = remove_head(networks.build("small_cnn", (1, 8, 8), 10, **SMALL))
    network = networks.initialize(networks.build("small_cnn", (1, 8, 8), 10, **SMALL), make_torch_generator(0, "x"))
    head = get_last_linear(network)
    before = {key: value.clone() for key, value in network.state_dict().items()}
    transfer_weights(encoder, network)
    for key, value in network.state_dict().items():
        expected = before[key] if key.startswith(head) else encoder.state_dict()[key]
        assert torch.equal(value, expected)
    with pytest.raises(ValueError, match="same network_options"):
        transfer_weights(encoder, networks.build("small_cnn", (1, 8, 8), 10, channels=(8, 16), hidden=33))


@pytest.mark.parametrize(
    "make,key",
    [
        (lambda: dataclasses.replace(RECIPE, steps=-1), "steps"),
        (lambda: dataclasses.replace(RECIPE, temperature=0.0), "temperature"),
        (lambda: dataclasses.replace(RECIPE, precision="half"), "precision"),
        (lambda: dataclasses.replace(RECIPE, encoders=0), "encoders=0"),
        (lambda: PublicStart(features=dataclasses.replace(RECIPE, encoders=2)), "encoders=2"),  # a teacher has one
    ],
)
def test_bad_recipes_are_named(make, key):
    with pytest.raises(ValueError, match=rf"features\.{key}"):
        make()
