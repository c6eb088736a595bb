"""Soft labels from the teachers' probabilities to the student: what is opened, released, kept and learnt from."""

import csv
import dataclasses
import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from pate_torch import pipeline
from pate_torch.mechanisms.soft_sparse_vector import SoftSparseVector
from pate_torch.privacy.ledger import Ledger
from pate_torch.privacy.records import DataSpec, PublicPool, Release
from pate_torch.privacy.sensitive import SoftVotes
from pate_torch.release import store as release_store
from pate_torch.session import ReleaseSession
from pate_torch.students.base import StudentTask
from pate_torch.students.logistic import Logistic
from pate_torch.students.task import make_student_task
from pate_torch.students.training import build_problem, compute_released_loss
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
        found, _, _ = release_store.read(plan.root, summary(plan)["release_id"], data.pool, data.spec, ledger)
    read = [["" if np.isnan(score) else repr(score) for score in row] for row in found.score_QC.tolist()]
    assert read == table


def test_a_student_is_told_the_scores_as_shares_and_learns_them_as_they_are():
    spec = DataSpec(name="line", num_classes=3, input_shape=(1,), class_names=("a", "b", "c"), mean=(0.0,), std=(1.0,))
    pool = PublicPool(torch.zeros(4, 1))
    score_QC = torch.tensor([[0.9, 0.1, 0.1], [0.3, 0.5, 0.3], [torch.nan, 0.1, 0.9]], dtype=torch.float64)
    release = Release("0" * 16, torch.tensor([2, 0, 1]), torch.tensor([0, 1, -1]), (), (), score_QC=score_QC)
    task = make_student_task(spec, pool, release)
    assert task.soft and task.query_Q.tolist() == [2, 0]
    share_QC = score_QC[:2] / torch.tensor([[1.1], [1.1]])
    torch.testing.assert_close(task.posterior_QC, share_QC)
    logits = torch.tensor([[0.3, -1.0, 0.2], [0.0, 2.0, -0.5]])
    loss = compute_released_loss(build_problem(task, 0, torch.device("cpu")), logits, torch.arange(2))
    torch.testing.assert_close(loss, F.cross_entropy(logits, share_QC.float(), reduction="none"))
    # Noisy counts say which label is likely, and not how clear it is: there a sure model loses less.
    counts = dataclasses.replace(task, soft=False)
    hedged, sure = torch.log(share_QC.float()), torch.tensor([[9.0, 0, 0], [0, 9.0, 0]])
    for each, better, worse in ((task, hedged, sure), (counts, sure, hedged)):
        problem = build_problem(each, 0, torch.device("cpu"))
        assert (
            compute_released_loss(problem, better, torch.arange(2))
            < compute_released_loss(problem, worse, torch.arange(2))
        ).all()


def test_a_logistic_student_of_scores_is_as_unsure_as_they_are():
    """Heads three times in four on one side: its student says so, where that of hard labels is sure."""
    spec = DataSpec(name="coin", num_classes=2, input_shape=(1,), class_names=("a", "b"), mean=(0.0,), std=(1.0,))
    x = torch.linspace(-1, 1, 40)[:, None]
    every = torch.arange(40)
    share = torch.where(x > 0, 0.75, 0.25)
    task = StudentTask(spec, x, every, (x[:, 0] > 0).long(), torch.cat([1 - share, share], 1), soft=True)
    soft, hard = (
        Logistic(ridge=0.01).fit(one, seed=0, device=torch.device("cpu")).compute_probabilities(x)[:, 1]
        for one in (task, dataclasses.replace(task, posterior_QC=None, soft=False))
    )
    assert (soft[30:] - 0.75).abs().max() < 0.12 < (hard[35:] - 0.75).abs().min()


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
