"""On-average stability, against closed forms, brute force and simulation."""

import math

import numpy as np
import pytest
import torch

from benchmarks.theory.stability import by_teachers, on_average_stability, one_by_one
from pate_torch import networks
from pate_torch.core.rng import make_torch_generator
from pate_torch.privacy.records import DataSpec
from pate_torch.teachers.engine import draw_batches
from pate_torch.teachers.recipe import TeacherRecipe


def test_the_same_coins_go_to_both_of_a_pair():
    """A learner that answers by its coins alone is perfectly stable; with fresh coins it would not be."""
    seen = []

    def by_coins(x, y, points, coin):
        seen.append(coin)
        return np.full(len(points), np.random.default_rng(coin).random())

    x = np.arange(30.0)[:, None]
    found = on_average_stability(one_by_one(by_coins), x, x[:, 0], x[:3], n=5, pairs=7, seed=1, batch=3)
    assert found.alpha == 0 and found.error == 0
    assert len(set(seen)) == 7 and len(seen) == 14


def test_a_memoriser_is_as_unstable_as_its_closed_form():
    """The nearest record's label, labels being coins: it changes if the nearest of n + 1 is the old record or the new
    one, and half of the time then: alpha^2 = 1/(n + 1), a square root where the mean has 1/n."""
    generator, n = np.random.default_rng(5), 15
    x, y = generator.random(5000), (generator.random(5000) < 0.5).astype(float)

    def nearest(x_B, y_B, points, coins):
        return np.stack([np.take_along_axis(y_B, np.abs(x_B - p).argmin(1)[:, None], 1)[:, 0] for p in points], 1)

    found = on_average_stability(nearest, x, y, np.array([0.4]), n=n, pairs=4000, seed=3)
    assert found.alpha == pytest.approx(1 / math.sqrt(n + 1), abs=4 * found.error)
    assert found.error < 0.05 * found.alpha


ROWS = DataSpec(name="rows", num_classes=2, input_shape=(2,), class_names=("0", "1"), mean=(0.0,) * 2, std=(1.0,) * 2)


def alone(recipe, soft=False):
    """``by_teachers`` written out for one data set: the plain program."""

    def fit_predict(x, y, points, coin):
        module = networks.build(recipe.network, ROWS.input_shape, 2, **recipe.options)
        networks.initialize(module, make_torch_generator(0, "teacher", coin, "init"))
        x, y = torch.as_tensor(x, dtype=torch.float32), torch.as_tensor(y)
        weights = list(module.parameters())
        momenta = [torch.zeros_like(w) for w in weights]
        for index in draw_batches(0, coin, len(x), recipe.steps, recipe.batch_size).long():
            loss = torch.nn.functional.cross_entropy(module(x[index]), y[index])
            for w, m, g in zip(weights, momenta, torch.autograd.grad(loss, weights), strict=True):
                w.data -= recipe.learning_rate * m.mul_(recipe.momentum).add_(g)
        with torch.no_grad():
            logits = module(torch.as_tensor(points, dtype=torch.float32))
            return (logits.softmax(1)[:, 1] if soft else logits.argmax(1)).double().numpy()

    return one_by_one(fit_predict)


SGD = {"optimizer": "sgd", "label_smoothing": 0.0, "schedule": "constant"}


def test_stacked_retraining_is_retraining_one_by_one():
    """Noisy labels, so that votes differ: at least 99.9 % of them are those of the plain program."""
    sizes = {"options": {"hidden": (6,)}, "steps": 40, "batch_size": 4}
    recipe = TeacherRecipe(network="mlp", **sizes, learning_rate=0.1, **SGD)
    generator = np.random.default_rng(6)
    x, points = generator.normal(size=(60, 2)), generator.normal(size=(400, 2))
    y = ((x[:, 0] > 0) ^ (generator.random(60) < 0.3)).astype(int)
    records = np.stack([generator.permutation(60)[:12] for _ in range(12)])
    coins = [3, 9, 4] * 4
    fits = by_teachers(recipe, ROWS), alone(recipe)
    stacked, plain = (fit(x[records], y[records], points, coins) for fit in fits)
    assert (stacked == plain).mean() >= 0.999
    assert (plain != plain[0]).mean() > 0.02  # they do differ
    other = by_teachers(recipe, ROWS)(x[records], y[records], points, [c + 1 for c in coins])
    assert (stacked == other).mean() < 0.999  # and by their coins
    fits = by_teachers(recipe, ROWS, soft=True), alone(recipe, soft=True)
    stacked, plain = (fit(x[records], y[records], points, coins) for fit in fits)
    np.testing.assert_allclose(stacked, plain, atol=1e-4)
    assert plain.std() > 0.05
