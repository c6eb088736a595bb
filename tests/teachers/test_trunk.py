"""Teachers as heads over features learnt from public points: private records still reach one teacher each."""

import dataclasses
import json

import numpy as np
import pytest
import torch

from pate_torch import pipeline
from pate_torch.core.progress import Stages, StageTimer
from pate_torch.mechanisms.gaussian import GNMax
from pate_torch.opening import make_inputs
from pate_torch.privacy.facts import DatasetFacts
from pate_torch.privacy.partition import AddRemove, ReplaceOne
from pate_torch.privacy.records import PrivateRecords
from pate_torch.queries.random import Random
from pate_torch.students.training import Supervised
from pate_torch.teachers.store import Identity, TeacherStore
from pate_torch.teachers.training import train
from tests.run_configs import changed, run_config
from tests.teachers.public_start_world import AUGMENT, RECIPE, SOURCE, START, glyphs, public_trunk


@pytest.fixture
def data():
    return glyphs()


@pytest.fixture
def trunk():
    return public_trunk()


def teach(data, trunk, private, partition, recipe=RECIPE):
    shards = partition.make_shards(private, 8, seed=0)
    return train(private, data.spec, shards, recipe, seed=0, trunk=trunk), shards


def take(private, index):
    return PrivateRecords.from_rows(
        private.x[index], private.y[index], private.unit_id[np.asarray(index)], private.unit
    )


def differing(first, second):
    same_K = torch.stack([(first.params[n] == second.params[n]).flatten(1).all(1) for n in first.params]).all(0)
    return (~same_K).nonzero().squeeze(1).tolist()


def test_a_record_replaced_reaches_one_teacher(data, trunk):
    before, shards = teach(data, trunk, data.private, ReplaceOne())
    x = data.private.x.clone()
    x[7] = 255 - x[7]
    after, _ = teach(data, trunk, dataclasses.replace(data.private, x=x), ReplaceOne())
    owner = [k for k in range(8) if 7 in shards.get_indices(k).tolist()]
    assert differing(before, after) == owner and len(owner) == 1


def test_a_record_removed_reaches_one_teacher_although_it_shifts_all_positions(data, trunk):
    before, shards = teach(data, trunk, data.private, AddRemove())
    fewer = take(data.private, [i for i in range(len(data.private)) if i != 3])
    after, _ = teach(data, trunk, fewer, AddRemove())
    assert differing(before, after) == [k for k in range(8) if 3 in shards.get_indices(k).tolist()]


def test_copies_stay_in_the_shard_of_their_record(data, trunk):
    shards = AddRemove().make_shards(data.private, 8, seed=0)
    encoded, held = trunk.encode_shards(data.private, shards, start=START, augment=AUGMENT, seed=0)
    assert encoded.x.shape == (3 * 240, 24) and encoded.x.dtype == torch.float32
    for k in range(8):
        assert sorted(set(encoded.unit_id[held.get_indices(k).numpy()])) == sorted(
            data.private.unit_id[shards.get_indices(k).numpy()]
        )
        assert len(held.get_indices(k)) == 3 * len(shards.get_indices(k))
        first = encoded.x[held.get_indices(k)[: len(shards.get_indices(k))]]
        torch.testing.assert_close(first, trunk.compute_features(data.private.x[shards.get_indices(k)]))
    assert torch.equal(encoded.y.bincount(), 3 * data.private.y.bincount())


def test_copies_differ_from_their_record_and_keep_its_features_near(data, trunk):
    shards = ReplaceOne().make_shards(data.private, 8, seed=0)
    encoded, held = trunk.encode_shards(data.private, shards, start=START, augment=AUGMENT, seed=0)
    size = len(shards.get_indices(0))
    own, copy = encoded.x[held.get_indices(0)[:size]], encoded.x[held.get_indices(0)[size : 2 * size]]
    near = (own * copy).sum(1).mean()
    far = (own * copy.roll(1, 0)).sum(1).mean()
    assert far < near < 1 - 1e-4


def test_the_trunk_is_the_representation_of_the_pool(data, trunk):
    twin = START.features.compute_features(data.pool.x, data.spec, seed=0)
    torch.testing.assert_close(trunk.compute_features(data.pool.x), twin, rtol=0, atol=0)
    assert trunk.spec.input_shape == (24,)
    standard = trunk.spec.normalize(twin, torch.float64)
    assert standard.mean(0).abs().max() < 1e-5
    assert float(standard.square().mean()) == pytest.approx(1, rel=1e-5)


def test_features_help_where_shards_are_small(data, trunk):
    """Seven or eight records a teacher and three classes: the heads are well above chance, 1/3."""
    shards = ReplaceOne().make_shards(data.private, 30, seed=0)
    ensemble = train(data.private, data.spec, shards, RECIPE, seed=0, trunk=trunk)
    right = (ensemble.count_votes(data.evaluation.x).compute_plurality() == data.evaluation.y).double().mean()
    assert right > 0.8


def test_the_store_keeps_the_trunk(data, trunk, tmp_path):
    ensemble, _ = teach(data, trunk, data.private, ReplaceOne())
    store = TeacherStore(tmp_path)
    identity = Identity(
        dataset="glyphs",
        fingerprint=store.compute_fingerprint(data.private),
        partition={},
        configuration=RECIPE.to_configuration(),
        seed=0,
        num_teachers=8,
    )
    found = store.load(store.save(ensemble, identity)).ensemble
    assert torch.equal(found.predict(data.evaluation.x), ensemble.predict(data.evaluation.x))
    assert found.spec == data.spec and found.trunk is not None and found.trunk.spec == trunk.spec
    assert store.find(identity) is not None


@pytest.fixture
def plan(tmp_path):
    student = Supervised(network="small_cnn", steps=30, augment=AUGMENT)
    return run_config(
        dataset=SOURCE,
        partition=AddRemove(),
        teacher=RECIPE,
        mechanism=GNMax(sigma=1.0),
        query=Random(),
        student=student,
        guide_student=student,
        root=tmp_path,
        folder=tmp_path / "runs" / "glyphs" / "gaussian" / "first",
        seed=0,
        num_teachers=12,
        num_queries=80,
        delta=1e-4,
        opening_budget=1000.0,
        quiet=True,
    )


def test_a_run_starts_its_teachers_from_the_pool_and_finds_them_again(plan, data):
    pipeline.run(plan)
    pipeline.run(second := changed(plan, folder=plan.folder.parent / "second", num_queries=10))
    first, again = (json.loads((p.folder / "release" / "summary.json").read_text()) for p in (plan, second))
    assert first["teachers_id"] != again["teachers_id"], "each release has a fresh alias"
    assert len(list(plan.root.glob("teachers/*/ensemble.safetensors"))) == 1, "they were trained once"
    assert first["label_accuracy"] > 0.8
    owner = json.loads((plan.folder / "private" / "summary.json").read_text())
    assert owner["ensemble_accuracy"] > 0.8 and owner["nonprivate_accuracy"] > 0.8


def test_other_public_points_or_another_start_are_other_teachers(plan, data, tmp_path):
    def identify(data, **changes):
        config = changed(plan, **changes)
        facts = DatasetFacts.from_dataset(data, config.partition)
        with Stages(quiet=True) as stages:
            return config.method.make_identity(make_inputs(config, data, facts, stages, StageTimer()))

    here = identify(data)
    assert here == identify(data)
    pool = dataclasses.replace(data.pool, x=data.pool.x.flip(0))
    assert identify(dataclasses.replace(data, pool=pool)) != here
    longer = dataclasses.replace(START, copies=3)
    assert identify(data, teacher=dataclasses.replace(RECIPE, start=longer)) != here
    assert "pool" not in identify(data, teacher=dataclasses.replace(RECIPE, start=None)).configuration


def test_a_start_without_public_points_and_a_head_that_needs_images_are_refused(data, trunk):
    shards = ReplaceOne().make_shards(data.private, 8, seed=0)
    with pytest.raises(ValueError, match=r"teacher\.start"):
        train(data.private, data.spec, shards, RECIPE, seed=0)
    with pytest.raises(ValueError, match="needs images"):
        train(data.private, data.spec, shards, dataclasses.replace(RECIPE, network="lean_cnn"), seed=0, trunk=trunk)


@pytest.mark.fresh_process
def test_a_head_over_the_trunk_comes_out_the_same_alone_in_a_fresh_process(data, trunk):
    trials = []
    shards = ReplaceOne().make_shards(data.private, 8, seed=0)
    train(data.private, data.spec, shards, RECIPE, seed=0, trunk=trunk, on_trial=trials.append)
    trials[0].run(data.pool.x, torch.device("cpu"))
    assert trials[0].ensemble.trunk is not None
