"""Teachers as heads over features learnt from public points: private records still reach one teacher each."""

import dataclasses

import numpy as np
import pytest
import torch

from pate_torch.core.progress import Stages, StageTimer
from pate_torch.features.contrastive import encode
from pate_torch.mechanisms.gaussian import GNMax
from pate_torch.opening import make_inputs
from pate_torch.privacy.partition import AddRemove, DatasetFacts, ReplaceOne
from pate_torch.privacy.records import PrivateRecords
from pate_torch.queries.base import Random
from pate_torch.students.training import Supervised
from pate_torch.teachers.recipe import PublicStart, TeacherRecipe
from pate_torch.teachers.store import Identity, TeacherStore
from pate_torch.teachers.training import train
from tests.run_configs import changed, run_config
from tests.teachers.public_start_world import RECIPE, SOURCE, START, glyphs, public_trunk
from tests.teachers.teacher_world import differing


@pytest.fixture(scope="module", autouse=True)
def learn_once():
    """Load the glyphs and learn the trunk in the process that runs these tests, not in each one that collects them."""
    global DATA, TRUNK
    DATA, TRUNK = glyphs(), public_trunk()


def teach(private, partition):
    return train(private, DATA.spec, partition.make_shards(private, 8, seed=0), RECIPE, seed=0, trunk=TRUNK)


@pytest.mark.parametrize("adjacency", ["replace_one", "add_remove"])
def test_one_record_reaches_one_teacher(adjacency):
    """Also one that is removed, which shifts the positions of all that follow."""
    private = DATA.private
    if adjacency == "replace_one":
        partition, x = ReplaceOne(), private.x.clone()
        x[7] = 255 - x[7]
        neighbor = dataclasses.replace(private, x=x)
    else:
        partition, rows = AddRemove(), np.arange(len(private)) != 7
        neighbor = PrivateRecords.from_rows(private.x[rows], private.y[rows], private.unit_id[rows], private.unit)
    shards = partition.make_shards(private, 8, seed=0)
    (owner,) = (k for k in range(8) if 7 in shards.get_indices(k).tolist())
    before, after = teach(private, partition), teach(neighbor, partition)
    assert differing(before.params, after.params) == {owner}


def test_records_are_encoded_by_the_trunk_shard_by_shard():
    shards = AddRemove().make_shards(DATA.private, 8, seed=0)
    encoded = TRUNK.encode_shards(DATA.private, shards)
    assert encoded.x.shape == (240, 24) and encoded.x.dtype == torch.float32
    assert torch.equal(encoded.y, DATA.private.y) and (encoded.unit_id == DATA.private.unit_id).all()
    for k in range(8):
        index = shards.get_indices(k)
        assert torch.equal(encoded.x[index], TRUNK.compute_features(DATA.private.x[index]))


def test_the_trunk_is_the_representation_of_the_pool():
    twin = encode(START.features.learn(DATA.pool.x, DATA.spec, seed=0), DATA.pool.x, DATA.spec)
    torch.testing.assert_close(TRUNK.compute_features(DATA.pool.x), twin, rtol=0, atol=0)
    learnt = RECIPE.learn_trunk(DATA.pool, DATA.spec, 0, torch.device("cpu"), Stages(quiet=True))
    assert torch.equal(learnt.compute_features(DATA.pool.x), twin) and learnt.spec == TRUNK.spec
    assert TRUNK.spec.input_shape == (24,)
    standard = TRUNK.spec.normalize(twin, torch.float64)
    assert standard.mean(0).abs().max() < 1e-5
    assert float(standard.square().mean()) == pytest.approx(1, rel=1e-5)


def test_features_help_where_shards_are_small_and_the_store_has_the_trunk(tmp_path):
    """Seven or eight records a teacher and three classes: the heads are well above chance, 1/3."""
    shards, store = ReplaceOne().make_shards(DATA.private, 30, seed=0), TeacherStore(tmp_path)
    ensemble = train(DATA.private, DATA.spec, shards, RECIPE, seed=0, trunk=TRUNK)
    votes = ensemble.count_votes(DATA.evaluation.x)
    assert (votes.compute_plurality() == DATA.evaluation.y).double().mean() > 0.8
    identity = Identity(
        dataset="glyphs", fingerprint=store.compute_fingerprint(DATA.private), partition={},
        configuration=dataclasses.asdict(RECIPE), seed=0, num_teachers=30,
    )  # fmt: skip
    stored = store.load(store.save(ensemble, identity)).ensemble
    assert torch.equal(stored.predict(DATA.evaluation.x), ensemble.predict(DATA.evaluation.x))
    assert stored.spec == DATA.spec and stored.trunk is not None and stored.trunk.spec == TRUNK.spec
    assert store.find(identity) is not None


def test_other_public_points_or_another_start_are_other_teachers(tmp_path):
    config = run_config(
        dataset=SOURCE, partition=AddRemove(), teacher=RECIPE, mechanism=GNMax(sigma=1.0), query=Random(),
        student=None, guide_student=Supervised(network="logistic", augment=None), num_teachers=12, num_queries=80,
        root=tmp_path, folder=tmp_path / "run", delta=1e-4, seed=0, quiet=True,
    )  # fmt: skip

    def identify(data, teacher=RECIPE):
        this_config, stages = changed(config, teacher=teacher), Stages(quiet=True)
        facts = DatasetFacts.from_dataset(data, this_config.partition)
        return this_config.method.make_identity(make_inputs(this_config, data, facts, stages, StageTimer(), None))

    here = identify(DATA)
    assert here == identify(DATA)
    pool = dataclasses.replace(DATA.pool, x=DATA.pool.x.flip(0))
    assert identify(dataclasses.replace(DATA, pool=pool)) != here
    longer = PublicStart(features=dataclasses.replace(START.features, steps=41))
    assert identify(DATA, dataclasses.replace(RECIPE, start=longer)) != here
    assert "pool" not in identify(DATA, dataclasses.replace(RECIPE, start=None)).configuration


def test_a_start_without_public_points_and_a_head_that_needs_images_are_refused():
    shards = ReplaceOne().make_shards(DATA.private, 8, seed=0)
    with pytest.raises(ValueError, match=r"teacher\.start"):
        train(DATA.private, DATA.spec, shards, RECIPE, seed=0)
    with pytest.raises(ValueError, match="needs images"):
        train(DATA.private, DATA.spec, shards, dataclasses.replace(RECIPE, network="lean_cnn"), seed=0, trunk=TRUNK)


def test_a_head_over_the_trunk_comes_out_the_same_alone():
    trials, shards = [], ReplaceOne().make_shards(DATA.private, 8, seed=0)
    train(DATA.private, DATA.spec, shards, RECIPE, seed=0, trunk=TRUNK, on_retraining_check=trials.append)
    trials[0].run(DATA.pool.x, torch.device("cpu"))
    assert trials[0].ensemble.trunk is not None


@pytest.mark.parametrize(
    "key,value",
    [
        ("steps", 0), ("batch_size", 2.5), ("learning_rate", -1), ("schedule", "linear"),
        ("dtype", "half"), ("augment", {"rotate": 400}), ("augment", 3), ("label_smoothing", 0.9),
    ],
)  # fmt: skip
def test_wrong_choices_are_refused_by_name(key, value):
    with pytest.raises(ValueError, match=key):
        TeacherRecipe(**{key: value})
