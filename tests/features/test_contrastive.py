"""Features without labels, the neighbor graph over them, and the distortions they are learnt from."""

import dataclasses

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from pate_torch import networks
from pate_torch.core.device import single_thread_mode
from pate_torch.core.rng import derive_member_seed, make_torch_generator
from pate_torch.features import contrastive
from pate_torch.features.augmentation import Affine, View, make_strong_view, make_weak_view, parse_affine, widen_affine
from pate_torch.features.contrastive import ContrastiveFeatures, compute_contrastive_loss, encode, transfer_weights
from pate_torch.networks import get_last_linear, make_feature_extractor, remove_head
from pate_torch.privacy.records import DataSpec
from pate_torch.students.base import StudentTask
from pate_torch.students.self_training import PooledStudent
from pate_torch.students.training import Supervised, build_problem
from pate_torch.teachers.recipe import PublicStart

CPU = torch.device("cpu")
SPEC = DataSpec(
    name="digits", num_classes=10, input_shape=(1, 8, 8), class_names=tuple("0123456789"), mean=(0.3,), std=(0.38,)
)
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
    before, after = (agreement(recipe.compute_features(x, SPEC, seed=0), y) for recipe in (start, RECIPE))
    assert after > before and after > 0.9


def test_an_encoder_is_the_seed_s_and_the_points_alone():
    x, _ = digits(80)
    recipe = dataclasses.replace(RECIPE, steps=3)
    first = recipe.learn(x, SPEC, seed=0).state_dict()
    contrastive._ENCODER_CACHE.clear()
    torch.manual_seed(99)
    again, other = (recipe.learn(x, SPEC, seed=seed).state_dict() for seed in (0, 1))
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert any(not torch.equal(first[key], other[key]) for key in first)


def test_the_same_recipe_is_learnt_once_and_handed_out_as_copies():
    x, _ = digits(80)
    calls: list[tuple[int, int]] = []
    recipe = dataclasses.replace(RECIPE, steps=4)
    contrastive._ENCODER_CACHE.clear()
    first = recipe.learn(x, SPEC, seed=0, progress=lambda *p: calls.append(p))
    with torch.no_grad():
        next(first.parameters()).zero_()
    second = recipe.learn(x, SPEC, seed=0, progress=lambda *p: calls.append(p))
    assert calls == [(1, 4), (2, 4), (3, 4), (4, 4)] and next(second.parameters()).abs().sum() > 0
    recipe.learn(x.flip(0), SPEC, seed=0, progress=lambda *p: calls.append(p))
    assert len(calls) == 8, "other points: learnt anew"


def test_several_encoders_are_those_of_their_seeds_side_by_side():
    x, _ = digits(120)
    recipe = dataclasses.replace(RECIPE, steps=5, encoders=3)
    contrastive._ENCODER_CACHE.clear()
    calls: list[tuple[int, int]] = []
    features = recipe.compute_features(x, SPEC, seed=4, progress=lambda *p: calls.append(p))
    assert calls[-1] == (15, 15)
    parts = []
    for k in range(3):  # the slow twin: one after the other, learnt anew
        contrastive._ENCODER_CACHE.clear()
        with single_thread_mode():
            parts.append(
                dataclasses.replace(recipe, encoders=1).compute_features(x, SPEC, seed=derive_member_seed(4, k))
            )
    assert torch.equal(features, torch.nn.functional.normalize(torch.cat(parts, 1), dim=1))
    assert derive_member_seed(4, 0) == 4 and len({derive_member_seed(4, k) for k in range(3)}) == 3
    assert not torch.allclose(parts[0], parts[1]), "each from a start of its own"


def test_student_k_starts_from_encoder_k(monkeypatch):
    x, y = digits(60)
    recipe = dataclasses.replace(RECIPE, steps=2, encoders=2)
    started = {}
    fit = Supervised.fit

    def spy(self, task, *, seed, **rest):
        network = self.make_initial_network(
            build_problem(task, seed, CPU), networks.describe(self.network, (1, 8, 8), 10, **SMALL)
        )
        started[seed] = make_feature_extractor(network)
        return fit(self, task, seed=seed, **rest)

    monkeypatch.setattr(Supervised, "fit", spy)
    student = Supervised(network_options=SMALL, steps=2, features=recipe)
    PooledStudent(member=student, members=2).fit(
        StudentTask(SPEC, x, torch.arange(60), torch.from_numpy(np.asarray(y))), seed=4, device=CPU
    )
    together = recipe.learn(x, SPEC, seed=4)
    for k in range(2):
        ours, theirs = started[derive_member_seed(4, k)].state_dict(), together.encoders[k].state_dict()
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_teacher_starts_from_one_encoder():
    with pytest.raises(ValueError, match=r"start.features.encoders=2"):
        PublicStart(features=dataclasses.replace(RECIPE, encoders=2))
    with pytest.raises(ValueError, match=r"features\.encoders=0"):
        dataclasses.replace(RECIPE, encoders=0)


def test_transfer_moves_the_trunk_and_leaves_the_classifier():
    encoder = remove_head(networks.build("small_cnn", (1, 8, 8), 10, **SMALL))
    network = networks.initialize(networks.build("small_cnn", (1, 8, 8), 10, **SMALL), make_torch_generator(0, "x"))
    head = get_last_linear(network)
    before = {key: value.clone() for key, value in network.state_dict().items()}
    transfer_weights(encoder, network)
    for key, value in network.state_dict().items():
        expected = before[key] if key.startswith(head) else encoder.state_dict()[key]
        assert torch.equal(value, expected)
    wrong = networks.build("small_cnn", (1, 8, 8), 10, channels=(8, 16), hidden=33)
    with pytest.raises(ValueError, match="same network_options"):
        transfer_weights(encoder, wrong)
    with pytest.raises(ValueError, match="same network_options"):
        transfer_weights(encoder, networks.build("lean_cnn", (1, 8, 8), 10))


def test_features_have_unit_length_and_rows_may_be_few():
    x, _ = digits(3)
    z = dataclasses.replace(RECIPE, steps=2).compute_features(x, SPEC, seed=0)
    torch.testing.assert_close(z.norm(dim=1), torch.ones(3))
    assert encode(remove_head(networks.build("small_cnn", (1, 8, 8), 10)), x, SPEC).shape == (3, 128)


@pytest.mark.parametrize(
    "change,key",
    [({"steps": -1}, "steps"), ({"temperature": 0.0}, "temperature"), ({"precision": "half"}, "precision")],
)
def test_bad_recipes_are_named(change, key):
    with pytest.raises(ValueError, match=f"features.{key}"):
        dataclasses.replace(RECIPE, **change)


# Views ------------------------------------------------------------------------------------------------------------


def test_no_distortion_is_normalization_and_seeds_decide_the_rest():
    x, _ = digits(20)
    torch.testing.assert_close(View()(x, SPEC, make_torch_generator(0, "v")), SPEC.normalize(x))
    view = make_strong_view(SPEC, Affine(rotate=10))
    first, again, other = (view(x, SPEC, make_torch_generator(seed, "v")) for seed in (0, 0, 1))
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_cutout_erases_a_square_to_the_mean():
    x = torch.full((200, 1, 8, 8), 255, dtype=torch.uint8)
    erased = View(cutout=0.5)(x, SPEC, make_torch_generator(0, "v"))
    hidden = erased == 0
    assert 0 < hidden.float().mean() < 0.25  # at most half the side, so a quarter of the area
    for image in hidden[:, 0]:
        rows, columns = image.any(1).nonzero().squeeze(1), image.any(0).nonzero().squeeze(1)
        if len(rows):
            assert image[rows.min() : rows.max() + 1, columns.min() : columns.max() + 1].all()
    assert torch.equal(erased[~hidden], SPEC.normalize(x)[~hidden])


def test_elastic_moves_content_by_about_its_amplitude():
    x = torch.zeros(300, 1, 8, 8)
    x[:, 0, 4, 4] = 1
    spec = dataclasses.replace(SPEC, mean=(0.0,), std=(1.0,))
    moved = View(elastic=1.0)(x, spec, make_torch_generator(0, "v"))[:, 0]
    mass = moved.sum((1, 2)).clamp(min=1e-6)
    center = (moved.sum(2) * torch.arange(8)).sum(1) / mass
    spread = (center[moved.sum((1, 2)) > 0.3] - 4).std()
    assert 0.3 < spread < 1.2
    assert torch.allclose(View(elastic=0.0)(x, spec, make_torch_generator(0, "v")), x)


def test_rows_are_masked_and_shaken():
    spec = dataclasses.replace(SPEC, input_shape=(6,), mean=(1.0,) * 6, std=(2.0,) * 6)
    x = torch.full((2000, 6), 5.0)
    masked = View(mask=0.25)(x, spec, make_torch_generator(0, "v"))
    assert set(masked.unique().tolist()) == {0.0, 2.0}
    assert (masked == 0).float().mean().item() == pytest.approx(0.25, abs=0.02)  # 5 deviations of 12,000 draws
    shaken = View(jitter=0.5)(x, spec, make_torch_generator(0, "v")) - 2.0
    assert shaken.std().item() == pytest.approx(0.5, rel=0.03)
    assert make_weak_view(spec, None).mask == 0 < make_strong_view(spec, None).mask


def test_ranges_widen_and_stay_legal():
    wide = widen_affine(Affine(rotate=150, scale=0.4, shift=2, shear=40, flip=True, padding="border"))
    assert wide == Affine(rotate=180, scale=0.5, shift=3, shear=45, flip=True, padding="border")
    assert widen_affine(None) is None and parse_affine(None) is None
    assert parse_affine({"rotate": 3}) == Affine(rotate=3)
    with pytest.raises(ValueError, match="cutout"):
        View(cutout=1.5)


def test_a_student_with_a_recipe_starts_from_its_encoder():
    x, y = digits(60)
    recipe = dataclasses.replace(RECIPE, steps=2)
    task = StudentTask(SPEC, x, torch.arange(20), y[:20])
    problem = build_problem(task, 3, torch.device("cpu"))
    student = Supervised(network_options=SMALL, features=recipe)
    model = student.make_initial_network(problem, networks.describe("small_cnn", (1, 8, 8), 10, **SMALL))
    encoder = recipe.learn(x, SPEC, seed=3)
    assert all(torch.equal(model.state_dict()[key], value) for key, value in encoder.state_dict().items())
