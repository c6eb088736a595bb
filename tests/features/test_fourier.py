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
PLAIN = DataSpec(name="plain", num_classes=2, input_shape=(3,), class_names=("a", "b"), mean=(0.0,), std=(1.0,))
SPEC = DataSpec(
    name="rows", num_classes=2, input_shape=(3,), class_names=("a", "b"), mean=(1.0, 0.0, 0.0), std=(2.0, 1.0, 1.0)
)


def test_inner_products_of_the_cosines_approach_the_gaussian_kernel():
    x = torch.randn(300, 3, generator=torch.Generator().manual_seed(0))
    z = SPEC.normalize(x)
    encoder = FourierFeatures(cosines=20_000, width=0.7).learn(x, SPEC, seed=1)
    cosine_PF = encoder(z)[:, 6:]
    cosine_PF *= math.sqrt(2) / float(encoder[1].cosine_weight)
    distance = torch.cdist(z.double(), z.double())
    scale = 0.7 * distance[distance > 0].median()
    kernel = torch.exp(-(distance**2) / (2 * scale**2))
    off = (cosine_PF @ cosine_PF.T / 20_000).double() - kernel
    assert float(off.abs().max()) < 6 / math.sqrt(20_000)  # their variance is at most 1
    wider = torch.exp(-(distance**2) / (2 * (1.3 * scale) ** 2))
    assert float((cosine_PF @ cosine_PF.T / 20_000 - wider).abs().max()) > 0.05


def test_the_points_stand_first_and_the_seed_says_all():
    x = torch.randn(60, 3)
    recipe = FourierFeatures(cosines=5)
    one, again, other = (recipe.learn(x, SPEC, seed=seed)(x) for seed in (0, 0, 1))
    assert one.shape == (60, 11) and torch.allclose(one[:, :3], math.sqrt(0.5) * x)
    assert torch.equal(one, again) and torch.equal(one[:, :6], other[:, :6]) and not torch.equal(one, other)
    assert recipe.learn(torch.ones(4, 3), SPEC, seed=0)(torch.ones(1, 3)).isfinite().all(), "equal points"


def test_ranks_are_shares_of_the_public_points_below_and_half_of_the_equal_ones():
    draw = torch.Generator().manual_seed(2)
    levels = torch.randint(5, (2000, 1), generator=draw).float()
    x = torch.cat([torch.randn(2000, 1, generator=draw).exp() ** 3, levels, (levels > 2).float()], 1)
    query = torch.tensor([[-1.0, -1.0, 0.0], [0.5, 2.0, 1.0], [1e6, 4.0, 1.0]])
    encoder = FourierFeatures(cosines=4, quantiles=200).learn(x, PLAIN, seed=0)
    share = ((x < query[:, None]).float() + (x <= query[:, None]).float()).mean(1) / 2
    assert torch.allclose(encoder(query)[:, 3:5], math.sqrt(6) * (share[:, :2] - 0.5), atol=0.02 * math.sqrt(6))
    assert torch.equal(encoder(query)[:, 5], torch.zeros(3))  # two values have the same order as their ranks
    assert torch.equal(encoder(query)[:, 2], query[:, 2])


def test_cosines_have_a_quarter_of_the_variance_of_the_columns_and_ranks():
    x = torch.randn(4000, 3, generator=torch.Generator().manual_seed(1)) * torch.tensor([1.0, 5.0, 0.2])
    variance = FourierFeatures(cosines=50).learn(x, PLAIN, seed=0)(x).var(0)
    assert float(variance[6:].sum() / variance[:6].sum()) == pytest.approx(0.25, rel=1e-3)


@pytest.mark.parametrize("key,value", [("cosines", 0), ("width", 0.0), ("cosine_variance", 0.0), ("quantiles", 0)])
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
        (RECIPE, (None, FourierFeatures(cosines=64, width=2.0)), "must be the features in which"),
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
