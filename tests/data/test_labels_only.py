"""Data with public features and private labels: the pool, the adjacency, and the statement of a run."""

import dataclasses
import json

import pytest
import torch

from pate_torch import pipeline
from pate_torch.data.benchmark import Digits
from pate_torch.data.labels_only import LabelPrivacyDataset
from pate_torch.data.tabular import Csv
from pate_torch.privacy.ledger import Ledger
from pate_torch.privacy.partition import AddRemove, ReplaceOne
from pate_torch.privacy.records import LABEL_UNIT
from tests.data.owner_files import table, write
from tests.run_configs import changed
from tests.tensor_data import Tensors
from tests.tiny_runs import tiny
from tests.worlds import check_adjacency

SOURCE = LabelPrivacyDataset(source=Digits(private=200, public=60, test=60))


def own_data(**changes):
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(30, 2, generator=draw), torch.randint(2, (30,), generator=draw)
    parts = {"x": x[:20], "y": y[:20], "pool_x": x[20:25], "pool_y": y[20:25], "test_x": x[25:], "test_y": y[25:]}
    return Tensors(**({"name": "mine", "class_names": 2} | parts | changes))


def test_all_features_are_public_and_private_labels_are_no_truth_for_metrics_unless_the_data_are_public():
    """The published accuracy of the released labels would depend on private labels."""
    plain, data = SOURCE.source.load(), SOURCE.load()
    assert torch.equal(data.pool.x, torch.cat([plain.pool.x, plain.private.x]))
    assert data.private.unit == LABEL_UNIT and torch.equal(data.private.y, plain.private.y)
    assert data.spec.name == "digits_labels"
    assert torch.equal(data.evaluation.pool_y, torch.cat([plain.evaluation.pool_y, plain.private.y]))
    data = LabelPrivacyDataset(source=own_data()).load()
    assert data.evaluation.pool_y is None
    assert data.spec.name == "mine"  # one account, which refuses to change what it protects


def test_labels_that_decide_which_records_are_private_are_refused(tmp_path):
    frame = table()[["age", "height", "label"]]
    path, public = (write(frame, tmp_path / f"{name}.csv") for name in ("own", "public"))
    data = LabelPrivacyDataset(source=Csv(path=path, publish_split=True)).load()
    with pytest.raises(ValueError, match=r"partition='replace_one'.*dataset\.roles=position.*dataset\.public_path"):
        check_adjacency(data, "replace_one")
    by_position = Csv(path=path, roles="position", publish_split=True)
    for source in (by_position, Csv(path=path, public_path=public), own_data()):
        data = LabelPrivacyDataset(source=source).load()
        check_adjacency(data, "replace_one")
        with pytest.raises(ValueError, match=r"partition='add_remove'.*partition=replace_one"):
            check_adjacency(data, "add_remove")


def test_labels_are_replaced_not_removed_and_groups_are_refused():
    with pytest.raises(ValueError, match="replace_one"):
        AddRemove().make_shards(SOURCE.load().private, 10, seed=0)
    with pytest.raises(ValueError, match="group:patient"):
        LabelPrivacyDataset(source=own_data(unit="group:patient")).load()


def test_a_run_states_what_it_protects_and_its_account_refuses_another_unit(tmp_path):
    plan = dataclasses.replace(tiny(tmp_path), partition=ReplaceOne())
    labels_only = LabelPrivacyDataset(source=plan.dataset)
    pipeline.run(changed(plan, dataset=labels_only))
    privacy = json.loads((plan.folder / "release" / "privacy.json").read_text())
    assert any("features of all records are public" in row for row in privacy["assumptions"])
    assert "the label of one record replaced" in privacy["guarantee"]["symbols"]
    assert Ledger(plan.root / "ledger.sqlite").get_account("blobs").unit == LABEL_UNIT
    with pytest.raises(ValueError, match="unit"):
        pipeline.run(changed(plan, folder=plan.folder.with_name("second")))
