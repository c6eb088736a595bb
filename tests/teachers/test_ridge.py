"""Ridge regressions as teachers: scikit-learn's fit, shards of few classes, and no influence of other shards."""

import dataclasses

import numpy as np
import pytest
import torch
from sklearn.linear_model import Ridge

from pate_torch.features.fourier import FourierFeatures
from pate_torch.privacy.partition import AddRemove, ReplaceOne
from pate_torch.privacy.records import DataSpec, PrivateRecords
from pate_torch.teachers.recipe import PublicStart, TeacherRecipe
from pate_torch.teachers.training import train
from tests.teachers.teacher_world import differing, shards_of

CPU = torch.device("cpu")
SPEC = DataSpec(
    name="rows", num_classes=3, input_shape=(4,), class_names=("a", "b", "c"), mean=(1.0, 0.0, 0.0, 0.0), std=(2.0,) * 4
)
RIDGE = TeacherRecipe(network="logistic", optimizer="ridge", weight_decay=0.1, steps=1)
FOURIER = dataclasses.replace(RIDGE, start=PublicStart(features=FourierFeatures(cosines=16, cosine_variance=1.0)))
PUBLIC = torch.randn(40, 4, generator=torch.Generator().manual_seed(9))


def records(count=60, seed=0, unit="record", ids=None):
    draw = torch.Generator().manual_seed(seed)
    y = torch.randint(3, (count,), generator=draw)
    x = torch.randn(count, 4, generator=draw) + 2 * torch.nn.functional.one_hot(y, 4)
    return PrivateRecords.from_rows(x, y, np.arange(count).astype(str) if ids is None else np.array(ids), unit)


def fit(private, shards, recipe=RIDGE, **options):
    trunk = None if recipe.start is None else recipe.start.learn(PUBLIC, SPEC, seed=0)
    return train(private, SPEC, shards, recipe, seed=0, trunk=trunk, **options)


def test_a_teacher_is_scikit_learns_ridge_regression_over_the_shares_of_the_classes():
    private, rows = records(), [list(range(20)), list(range(20, 33))]
    logits_KPC = fit(private, shards_of(rows)).compute_logits(PUBLIC).numpy()
    for logits_PC, shard in zip(logits_KPC, rows, strict=True):
        label_SC = np.eye(3)[private.y[shard]]
        share_C = label_SC.mean(0)
        z_SD, z_PD = (SPEC.normalize(x, torch.float64).numpy() for x in (private.x[shard], PUBLIC))
        reference = Ridge(alpha=0.1 * 4, fit_intercept=False).fit(z_SD, label_SC - share_C).predict(z_PD)
        np.testing.assert_allclose(logits_PC, reference / share_C, rtol=1e-5, atol=1e-5)
        assert np.abs(logits_PC - reference).max() > 0.1  # the shares matter


def test_shards_of_one_class_of_two_and_of_none_vote_for_classes_that_they_have():
    private = records()
    rest, first, second = ((private.y == c).nonzero()[:, 0].tolist() for c in range(3))
    votes = fit(private, shards_of([first, second[:5] + rest[:5], [], second[5:6]])).predict(PUBLIC).long()
    assert (votes[0] == 1).all() and (votes[2] == 0).all() and (votes[3] == 2).all()
    assert set(votes[1].tolist()) == {0, 2}


def test_a_rare_class_wins_where_it_is_more_frequent_than_usual():
    x, y = torch.zeros(12, 4), torch.zeros(12, dtype=torch.int64)
    x[0, 1], y[0] = 4.0, 1  # one in twelve, away from the others
    ensemble = fit(PrivateRecords.from_rows(x, y, np.arange(12).astype(str)), shards_of([list(range(12))]))
    points = torch.tensor([[0.0, 1.0, 0.0, 0.0], [0.0, -1.0, 0.0, 0.0]])
    assert ensemble.predict(points).tolist() == [[1, 0]]


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -3e38])
@pytest.mark.parametrize("recipe", [RIDGE, FOURIER], ids=["points", "features"])
def test_an_extreme_record_raises_nothing_and_changes_its_own_teacher_alone(value, recipe):
    private, shards = records(), shards_of([list(range(12 * k, 12 * k + 12)) for k in range(5)])
    x = private.x.clone()
    x[14] = value
    x[15] = value
    before, after = (fit(data, shards, recipe) for data in (private, dataclasses.replace(private, x=x)))
    assert differing(before.params, after.params) == {1}
    assert (after.predict(PUBLIC) < 3).all()


@pytest.mark.parametrize("recipe", [RIDGE, FOURIER], ids=["points", "features"])
@pytest.mark.parametrize("unit", ["record", "repeated", "group"])
@pytest.mark.parametrize("adjacency", ["add_remove", "replace_one"])
def test_one_unit_changes_one_teacher_and_no_bit_of_the_others(recipe, unit, adjacency):
    if (unit, adjacency) == ("group", "replace_one"):
        return  # groups have no positions
    ids = {"record": None, "repeated": [f"u{i // 2}" for i in range(60)], "group": [f"g{i // 4}" for i in range(60)]}
    private = records(unit="group:g" if unit == "group" else "record", ids=ids[unit])
    rows = torch.arange(60)
    if adjacency == "add_remove":
        partition, is_kept = AddRemove(), private.unit_id != private.unit_id[9]
        neighbor = PrivateRecords.from_rows(
            private.x[is_kept], private.y[is_kept], private.unit_id[is_kept], private.unit
        )
    else:
        partition, change = ReplaceOne(), (rows == 9)[:, None]
        neighbor = dataclasses.replace(private, x=torch.where(change, -50.0, private.x), y=private.y.clone())
        neighbor.y[9] = (neighbor.y[9] + 1) % 3
    before, after = (fit(data, partition.make_shards(data, 6, seed=0), recipe) for data in (private, neighbor))
    assert len(differing(before.params, after.params)) == 1
    assert (before.predict(PUBLIC) != after.predict(PUBLIC)).any(1).sum() <= 1


@pytest.mark.fresh_process
@pytest.mark.parametrize("recipe", [RIDGE, FOURIER], ids=["points", "features"])
def test_a_ridge_regression_comes_out_the_same_alone(recipe):
    trials = []
    fit(records(), AddRemove().make_shards(records(), 20, seed=0), recipe, on_retraining_check=trials.append)
    trials[0].run(PUBLIC, CPU)


def test_a_ridge_regression_needs_a_linear_network_and_a_ridge():
    with pytest.raises(ValueError, match="network"):
        TeacherRecipe(network="mlp", optimizer="ridge", weight_decay=0.1)
    with pytest.raises(ValueError, match="weight_decay"):
        TeacherRecipe(network="logistic", optimizer="ridge")
