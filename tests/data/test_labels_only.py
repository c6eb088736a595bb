"""Features public, labels private: everything may use all features, and a label still reaches one teacher."""

import dataclasses
import json

import pytest
import torch

from pate_torch import pipeline
from pate_torch.data.digits import Digits
from pate_torch.data.labels_only import LabelPrivacyDataset
from pate_torch.data.tabular import Csv
from pate_torch.data.tensors import Tensors
from pate_torch.features.augmentation import Affine
from pate_torch.features.contrastive import ContrastiveFeatures
from pate_torch.mechanisms.gaussian import GNMax
from pate_torch.privacy.ledger import Ledger
from pate_torch.privacy.partition import AddRemove, ReplaceOne
from pate_torch.privacy.records import LABEL_UNIT, PrivateRecords
from pate_torch.queries.random import Random
from pate_torch.students.supervised import Supervised
from pate_torch.teachers.recipe import PublicStart
from pate_torch.teachers.training import TeacherRecipe, train
from tests.run_configs import changed, run_config
from tests.worlds import check_adjacency

AUGMENT = Affine(rotate=10, shift=0.7)
SOURCE = LabelPrivacyDataset(source=Digits(private=200, public=60, test=60))
START = PublicStart(
    features=ContrastiveFeatures(
        network_options={"channels": [8, 16], "hidden": 24}, steps=30, batch_size=64, augment=AUGMENT
    ),
)
RECIPE = TeacherRecipe(
    network="logistic", steps=40, batch_size=16, learning_rate=0.02, augment=AUGMENT, start=START, backend="vectorized"
)


def own_data(**changes):
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(30, 2, generator=draw), torch.randint(2, (30,), generator=draw)
    given = {"name": "mine", "class_names": 2, "x": x[:20], "y": y[:20], "pool_x": x[20:25], "pool_y": y[20:25]}
    return Tensors(**given, test_x=x[25:], test_y=y[25:], **changes)


def test_all_features_are_public_and_unlabeled():
    plain, data = SOURCE.source.load(), SOURCE.load()
    assert torch.equal(data.pool.x, torch.cat([plain.pool.x, plain.private.x]))
    assert data.private.unit == LABEL_UNIT and torch.equal(data.private.y, plain.private.y)
    assert data.spec.name == "digits_labels"
    assert torch.equal(data.evaluation.pool_y, torch.cat([plain.evaluation.pool_y, plain.private.y]))


def test_labels_of_data_that_are_no_benchmark_are_not_truth_to_measure_by():
    """How many released labels are right would be published, and would tell of the private ones."""
    data = LabelPrivacyDataset(source=own_data()).load()
    assert data.evaluation.pool_y is None
    assert data.spec.name == "mine"  # one account, which refuses to change what it protects


def test_a_label_changed_reaches_one_teacher():
    data = SOURCE.load()
    trunk = START.learn(data.pool.x, data.spec, seed=0)
    y = data.private.y.clone()
    y[11] = (y[11] + 1) % 10
    changed = PrivateRecords.from_rows(data.private.x, y, data.private.unit_id, LABEL_UNIT)
    shards = ReplaceOne().make_shards(data.private, 10, seed=0)
    before, after = (train(p, data.spec, shards, RECIPE, seed=0, trunk=trunk) for p in (data.private, changed))
    same_K = torch.stack([(before.params[n] == after.params[n]).flatten(1).all(1) for n in before.params]).all(0)
    assert (~same_K).nonzero().flatten().tolist() == [k for k in range(10) if 11 in shards.get_indices(k).tolist()]


def test_a_label_that_is_part_of_what_decides_who_is_private_is_refused(tmp_path):
    draw = torch.Generator().manual_seed(0)
    rows = torch.cat([torch.randn(90, 2, generator=draw), torch.randint(2, (90, 1), generator=draw)], 1).tolist()
    for name in ("own", "public"):
        (tmp_path / f"{name}.csv").write_text("a,b,label\n" + "".join(f"{a},{b},{int(y)}\n" for a, b, y in rows))
    path, public = str(tmp_path / "own.csv"), str(tmp_path / "public.csv")
    data = LabelPrivacyDataset(source=Csv(path=path, publish_split=True)).load()
    with pytest.raises(ValueError, match=r"partition='replace_one'.*dataset\.roles=position.*dataset\.public_path"):
        check_adjacency(data, "replace_one")
    for source in (
        Csv(path=path, roles="position", publish_split=True),
        Csv(path=path, public_path=public),
        own_data(),
    ):
        data = LabelPrivacyDataset(source=source).load()
        check_adjacency(data, "replace_one")
        with pytest.raises(ValueError, match=r"partition='add_remove'.*partition=replace_one"):
            check_adjacency(data, "add_remove")


def test_labels_are_replaced_not_removed_and_groups_are_refused():
    with pytest.raises(ValueError, match="replace_one"):
        AddRemove().make_shards(SOURCE.load().private, 10, seed=0)
    with pytest.raises(ValueError, match="group:patient"):
        LabelPrivacyDataset(source=own_data(unit="group:patient")).load()


@pytest.fixture
def plan(tmp_path):
    student = Supervised(network="small_cnn", steps=30, augment=AUGMENT)
    return run_config(
        dataset=SOURCE,
        partition=ReplaceOne(),
        teacher=RECIPE,
        mechanism=GNMax(sigma=1.0),
        query=Random(),
        student=student,
        guide_student=student,
        root=tmp_path,
        folder=tmp_path / "runs" / "digits" / "gaussian" / "first",
        seed=0,
        num_teachers=10,
        num_queries=20,
        delta=1e-4,
        opening_budget=100.0,
        quiet=True,
    )


def test_a_run_says_what_it_protects_and_what_it_does_not(plan):
    pipeline.run(plan)
    release = plan.folder / "release"
    summary = json.loads((release / "summary.json").read_text())
    assert (summary["unit"], summary["adjacency"]) == ("label of one record", "replace_one")
    privacy = json.loads((release / "privacy.json").read_text())
    words = " ".join(privacy["guarantee"]["plain_words"])
    assert "protects the label of every record" in words and "features of all records are taken to be public" in words
    assert any("features of all records are public" in row for row in privacy["assumptions"])
    assert any("features of the private records" in row for row in privacy["not_covered"])
    assert "the label of one record replaced" in privacy["guarantee"]["symbols"]
    assert Ledger(plan.root / "ledger.sqlite").get_account("digits_labels").unit == LABEL_UNIT


def test_an_account_opened_for_records_refuses_labels(plan, tmp_path):
    own, rows = own_data(), Supervised(network="mlp", steps=5, augment=None)
    recipe = dataclasses.replace(RECIPE, start=None, augment=None)
    given = {"teacher": recipe, "student": rows, "guide_student": rows, "num_teachers": 4, "num_queries": 3}
    pipeline.run(changed(plan, dataset=own, **given))
    again = changed(plan, dataset=LabelPrivacyDataset(source=own), folder=tmp_path / "runs/mine/gaussian/2", **given)
    with pytest.raises(ValueError, match="unit"):
        pipeline.run(again)
