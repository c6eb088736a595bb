"""Soft labels from the teachers' probabilities to the student: what is opened, released, kept and learnt from."""

import csv
import json

import numpy as np
import pytest
import torch

from pate_torch import pipeline
from pate_torch.mechanisms.soft_sparse_vector import SoftSparseVector
from pate_torch.privacy.ledger import Ledger
from pate_torch.privacy.sensitive import SoftVotes
from pate_torch.release import store as release_store
from pate_torch.session import ReleaseSession
from pate_torch.teachers.ensemble import TeacherEnsemble
from tests.run_configs import changed
from tests.tiny_runs import summary, tiny

SOFT = SoftSparseVector(epsilon=1e4, delta=1e-4, max_failures=60, bins=2)


@pytest.fixture
def plan(tmp_path):
    return changed(tiny(tmp_path), mechanism=SOFT, budget_epsilon=2e4)


def scores(plan):
    rows = list(csv.DictReader((plan.folder / "release" / "labels.csv").read_text().splitlines()))
    return [[row[f"score_{c}"] for c in range(3)] for row in rows], [int(row["label"]) for row in rows]


def test_what_teachers_think_is_opened_and_its_scores_are_released_and_read_again(plan, monkeypatch):
    opened, release = [], SoftSparseVector.release

    def watched(self, votes, noise, context):
        opened.append(votes)
        return release(self, votes, noise, context)

    monkeypatch.setattr(SoftSparseVector, "release", watched)
    pipeline.run(plan)
    assert [type(one) for one in opened] == [SoftVotes]
    assert opened[0].score_KQS.shape == (12, 20, 3)
    torch.testing.assert_close(opened[0].score_KQS.sum(2), torch.ones(12, 20))
    table, label = scores(plan)
    for row, given in zip(table, label, strict=True):
        assert (given == -1) == ("" in row)
        if given != -1:
            assert {float(score) for score in row} <= {0.25, 0.5, 0.75} and max(row) == row[given]
    assert summary(plan)["queries_answered"] > 10 and summary(plan)["student_accuracy"] > 0.8
    statement = json.loads((plan.folder / "release" / "privacy.json").read_text())
    assert "class probabilities" in json.dumps(statement) and "a score of each class" in json.dumps(statement)
    with Ledger(plan.root / "ledger.sqlite") as ledger:
        data = plan.dataset.load()
        found, _, _ = release_store.read(
            release_store.find_release(plan.root, summary(plan)["release_id"]), data.pool, data.spec, ledger
        )
    read = [["" if np.isnan(score) else repr(score) for score in row] for row in found.score_QC.tolist()]
    assert read == table


def test_probabilities_are_the_softmax_of_the_votes_logits(plan):
    config = changed(plan, num_teachers=5)
    with ReleaseSession.open(config) as session:
        stored, _ = config.method.load_or_train(session.make_inputs())
    ensemble: TeacherEnsemble = stored.ensemble
    x = session.facts.pool.x[:7]
    chance = ensemble.predict_proba(x)
    torch.testing.assert_close(chance.sum(2), torch.ones(5, 7))
    assert chance.argmax(2).tolist() == ensemble.predict(x).long().tolist()
    untrained = TeacherEnsemble(ensemble.network, ensemble.params, torch.zeros(5, dtype=torch.bool), ensemble.spec)
    assert untrained.predict_proba(x)[..., 0].eq(1).all()
