"""Random Fourier features: against the kernel that they approach, and where a linear model needs them."""

import math
from dataclasses import dataclass

import pytest
import torch

from pate_torch import PATE, load_student
from pate_torch.features.base import FeatureRecipe
from pate_torch.features.fourier import FourierFeatures
from pate_torch.mechanisms.gradient_descent import GradientDescent
from pate_torch.methods.gradients import GradientMethod
from pate_torch.privacy.records import DataSpec
from pate_torch.students.linear import ReleasedModel
from pate_torch.students.self_training import SelfTraining
from pate_torch.students.training import Supervised

RECIPE = FourierFeatures(cosines=64)
SPEC = DataSpec(
    name="rows", num_classes=2, input_shape=(3,), class_names=("a", "b"), mean=(1.0, 0.0, 0.0), std=(2.0, 1.0, 1.0)
)


def test_inner_products_of_the_cosines_approach_the_gaussian_kernel():
    x = torch.randn(300, 3, generator=torch.Generator().manual_seed(0))
    z = SPEC.normalize(x)
    encoder = FourierFeatures(cosines=20_000, width=0.7).learn(x, SPEC, seed=1)
    cosine_PF = encoder(z)[:, 3:]
    distance = torch.cdist(z.double(), z.double())
    scale = 0.7 * distance[distance > 0].median()
    kernel = torch.exp(-(distance**2) / (2 * scale**2))
    off = (cosine_PF @ cosine_PF.T / 20_000).double() - kernel
    assert float(off.abs().max()) < 6 / math.sqrt(20_000)  # their variance is at most 1
    wider = torch.exp(-(distance**2) / (2 * (1.3 * scale) ** 2))
    assert float((cosine_PF @ cosine_PF.T / 20_000 - wider).abs().max()) > 0.05


def test_balanced_points_and_cosines_have_the_same_weight():
    x = 30 * torch.randn(200, 3, generator=torch.Generator().manual_seed(0))
    encoder = FourierFeatures(cosines=5000, balanced=True).learn(x, SPEC, seed=1)
    plain = FourierFeatures(cosines=5000).learn(x, SPEC, seed=1)(SPEC.normalize(x))
    feature_PD = encoder(SPEC.normalize(x))
    torch.testing.assert_close(feature_PD[:, :3], torch.nn.functional.normalize(SPEC.normalize(x), dim=1))
    torch.testing.assert_close(feature_PD[:, 3:], plain[:, 3:] / math.sqrt(5000))
    assert (feature_PD[:, 3:].norm(dim=1) - 1).abs().max() < 0.05


def test_the_points_stand_first_and_the_seed_says_all():
    x = torch.randn(60, 3)
    recipe = FourierFeatures(cosines=5)
    one, again, other = (recipe.learn(x, SPEC, seed=seed)(x) for seed in (0, 0, 1))
    assert one.shape == (60, 8) and torch.equal(one[:, :3], x)
    assert torch.equal(one, again) and not torch.equal(one[:, 3:], other[:, 3:])


def test_equal_points_have_a_kernel_too():
    assert FourierFeatures(cosines=2).learn(torch.ones(4, 3), SPEC, seed=0)(torch.ones(1, 3)).isfinite().all()


@pytest.mark.parametrize("key,value", [("cosines", 0), ("width", 0.0)])
def test_bad_options(key, value):
    with pytest.raises(ValueError, match=f"features.{key}"):
        FourierFeatures(**{key: value})


def rings(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A disc inside a ring: no line parts them."""
    draw = torch.Generator().manual_seed(seed)
    y = torch.randint(2, (count,), generator=draw)
    angle = torch.rand(count, generator=draw) * 2 * math.pi
    radius = 1 + 2 * y + 0.2 * torch.randn(count, generator=draw)
    return torch.stack([radius * angle.cos(), radius * angle.sin()], 1), y


def accuracy(home, features) -> float:
    (x, y), (pool, _), (test, truth) = rings(2000, 0), rings(300, 1), rings(1000, 2)
    descent = GradientDescent(sigma=20.0, adjacency="add_remove")
    pate = PATE("rings", classes=2, delta=1e-5, home=home, teacher=GradientMethod(size=2000, mechanism=descent))
    pate.fit_teachers(x, y).label(pool, 300, features=features)
    student = pate.fit_student(ReleasedModel(features=features))
    assert torch.equal(load_student(pate.folder).predict(test), student.predict(test))
    mlp = Supervised(network="mlp")
    parts = {"first_student": mlp, "later_students": mlp, "num_generations": 1}
    same = SelfTraining(**parts, features=features, publish="released_model")
    assert torch.equal(pate.fit_student(same).predict(test), student.predict(test))
    return float((student.predict(test) == truth).float().mean())


def test_gradients_part_rings_in_these_features_alone(tmp_path):
    assert accuracy(tmp_path / "plain", None) < 0.75
    assert accuracy(tmp_path / "fourier", RECIPE) > 0.97


@dataclass(frozen=True)
class Anonymous(FeatureRecipe):
    """A recipe that does not say of which network its encoder is a part."""

    name: str = "anonymous"

    def learn(self, x_P, spec, **_):
        return torch.nn.Flatten()


@pytest.mark.parametrize(
    ("features", "others", "message"),
    [
        (
            RECIPE,
            (None, FourierFeatures(cosines=32), FourierFeatures(cosines=64, width=2.0)),
            "must be the features in which",
        ),
        (Anonymous(), (Anonymous(),), "design"),
    ],
    ids=["other features", "a recipe without a design"],
)
def test_a_model_is_refused_whose_features_no_student_can_compute(features, others, message, tmp_path):
    (x, y), (pool, _) = rings(500, 0), rings(100, 1)
    descent = GradientDescent(sigma=20.0, adjacency="add_remove")
    pate = PATE("rings", classes=2, delta=1e-5, home=tmp_path, teacher=GradientMethod(size=500, mechanism=descent))
    pate.fit_teachers(x, y).label(pool, 100, features=features)
    for other in others:
        with pytest.raises(ValueError, match=message):
            pate.fit_student(ReleasedModel(features=other))
