"""The rescaled model: as sure as it is right, no worse than the class frequencies, and a function of public values."""

import dataclasses
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from pate_torch.mechanisms.gradient_descent import GradientDescent
from pate_torch.methods.gradients import plan_descent
from pate_torch.methods.model_scale import rescale_release
from pate_torch.privacy.noise import DryRunNoise
from pate_torch.privacy.records import MechanismContext, Release
from pate_torch.privacy.sensitive import GradientSums, make_vector_sum_sensitivity, quantize
from pate_torch.privacy.whitening import Whitening

NUM_PUBLIC, NUM_TEST, DIM, CLASSES = 400, 4000, 12, 3


def draw_points(count, signal, generator, shares):
    """Points of a logistic model whose logits have the strength ``signal``."""
    x = torch.randn(count, DIM, generator=generator)
    logits = signal * x[:, :CLASSES] + torch.tensor(shares).log()
    return x, torch.multinomial(logits.softmax(1), 1, generator=generator)[:, 0]


def release_model(num_records, sigma, signal, seed, shares=(0.6, 0.3, 0.1)):
    generator = torch.Generator().manual_seed(seed)
    (x, y), (public, _), (test, truth) = (
        draw_points(count, signal, generator, shares) for count in (num_records, NUM_PUBLIC, NUM_TEST)
    )
    mechanism = GradientDescent(sigma=sigma, adjacency="add_remove", steps=8, clip_norm=0.5)
    mechanism, dim = plan_descent(mechanism, num_records, NUM_PUBLIC)
    whitening = Whitening.from_features(public, 0.1, dim)
    z_PD = whitening.whiten_and_clip(public).float()
    sums = GradientSums(
        z_ND=quantize(whitening.whiten_and_clip(x)).short(),
        y_N=y,
        z_PD=z_PD,
        feature_PD=public,
        num_classes=CLASSES,
        sensitivity=make_vector_sum_sensitivity("add_remove", z_PD.shape[1] * CLASSES),
        scale=whitening.radius / num_records,
        whitening=whitening,
    )
    drawn = mechanism.release(sums, DryRunNoise(insecure_seed=seed), MechanismContext(num_queries=1))
    every_P = torch.arange(NUM_PUBLIC)
    release = Release("0" * 16, every_P, drawn.label_Q, (), (), score_RPC=drawn.score_PC[None], model=drawn.model)
    options = {"mechanism": mechanism, "public": sums.without_records(), "num_units": num_records, "seed": seed}
    frequency_C = (torch.bincount(y, minlength=CLASSES).double() + 1) / (num_records + CLASSES)
    return release, rescale_release(release, frequency_C=frequency_C, **options), frequency_C, test, truth


def compute_logits(model, x):
    return model.whitening.whiten_and_clip(x) @ model.weight_DC.double() + model.bias_C


def compute_loss(model, x, truth):
    return float(F.cross_entropy(compute_logits(model, x), truth))


@pytest.mark.parametrize("num_records,sigma,signal", [(1500, 10.0, 0.0), (1500, 10.0, 0.4), (400, 12.0, 0.7)])
def test_a_model_of_noise_loses_to_the_class_frequencies_and_a_rescaled_one_does_not(num_records, sigma, signal):
    before, after = [], []
    for seed in range(4):
        old, new, frequency_C, test, truth = release_model(num_records, sigma, signal, seed)
        base = float(F.cross_entropy(frequency_C.log().expand(len(test), -1), truth))
        before.append(compute_loss(old.model, test, truth) - base)
        after.append(compute_loss(new.model, test, truth) - base)
    assert np.mean(after) < np.mean(before) - 0.01
    assert np.mean(after) < (0.01 if signal == 0 else 0.0)


def test_a_clear_model_becomes_surer_and_keeps_its_labels():
    before, after, sure = [], [], []
    for seed in range(2):
        old, new, _, test, truth = release_model(5000, 5.0, 4.0, seed, shares=(0.34, 0.33, 0.33))
        before.append(compute_loss(old.model, test, truth))
        after.append(compute_loss(new.model, test, truth))
        logits = compute_logits(new.model, test)
        sure.append(float(logits.softmax(1).max(1).values.mean() - (logits.argmax(1) == truth).double().mean()))
        assert (old.label_Q == new.label_Q).double().mean() > 0.97
    assert np.mean(after) < np.mean(before) and abs(np.mean(sure)) < 0.06


def test_scores_labels_and_model_fit_together():
    old, new, _, _, _ = release_model(800, 8.0, 1.0, 0)
    assert torch.equal(new.label_Q, new.score_RPC[0].argmax(1)) and new.events == old.events
    assert not torch.allclose(new.score_RPC, old.score_RPC)
    multiple = new.model.weight_DC / old.model.weight_DC
    assert torch.allclose(multiple, multiple[0, 0].expand_as(multiple), rtol=1e-4)
    shift_C = new.score_RPC[0, 0] - multiple[0, 0] * old.score_RPC[0, 0]
    assert torch.allclose(new.model.bias_C, multiple[0, 0] * old.model.bias_C + shift_C, atol=1e-4)
    twice = dataclasses.replace(old, score_RPC=old.score_RPC.repeat(2, 1, 1))  # several rounds are left as they are
    assert rescale_release(twice, mechanism=None, public=None, frequency_C=torch.ones(3), num_units=9, seed=0) is twice


def test_the_scale_is_a_function_of_released_values():
    """The values that it receives hold no record, and the same values give the same scale."""
    (old, new, *_), (_, again, *_) = (release_model(800, 8.0, 1.0, 3) for _ in range(2))
    assert torch.equal(new.model.weight_DC, again.model.weight_DC) and torch.equal(new.score_RPC, again.score_RPC)
    assert not torch.equal(new.model.weight_DC, old.model.weight_DC)


def test_logits_of_pure_noise_are_rescaled_too():
    """The release is paid for when its model is rescaled, so no size of the logits may raise an error."""
    for sigma in (1e3, 1e5, 1e7):
        _, new, _, test, truth = release_model(60, sigma, 1.0, 0)
        assert math.isfinite(compute_loss(new.model, test, truth))
