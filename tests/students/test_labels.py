"""What released answers say of the labels: posteriors of counts, estimates of the noise, and who learns from them."""

import csv
import dataclasses
import json

import numpy as np
import pytest
import torch
from scipy import stats

from pate_torch import pipeline
from pate_torch.accounting import accountant as accounting
from pate_torch.mechanisms.gaussian import GNMax
from pate_torch.mechanisms.sparse_vector import SoftSparseVector
from pate_torch.privacy.ledger import Ledger
from pate_torch.privacy.records import NoisyCounts, PublicPool, Release
from pate_torch.privacy.sensitive import SoftVotes
from pate_torch.queries.base import Random
from pate_torch.release import store as release_store
from pate_torch.students.labels import compute_label_posterior, estimate_lead, make_student_task, with_label_posteriors
from pate_torch.students.training import Supervised, build_problem
from tests import killed_runs
from tests.run_configs import changed
from tests.students.tasks import CPU, vectors
from tests.tiny_runs import summary, tiny
from tests.worlds import IMAGES


def draw_counts(lead=300.0, sigma=150.0, rows=400, classes=5):
    """Classes, and counts in which they lead by so many votes over all others."""
    draw = torch.Generator().manual_seed(0)
    truth = torch.randint(classes, (rows,), generator=draw)
    z = sigma * torch.randn(rows, classes, generator=draw, dtype=torch.float64) + 77.0
    z[torch.arange(rows), truth] += lead
    return truth, NoisyCounts(z.round().long(), sigma)


def test_the_lead_is_found_and_posteriors_are_calibrated():
    truth, noisy = draw_counts()
    assert estimate_lead(noisy) == pytest.approx(300, rel=0.1)
    posterior_QC = compute_label_posterior(noisy)
    assert posterior_QC.dtype == torch.float32 and torch.allclose(posterior_QC.sum(1), torch.ones(len(truth)))
    top, label = posterior_QC.max(1)
    right = (label == truth).float()
    assert torch.equal(label, noisy.counts_QC.argmax(1))
    for low, high in ((0.3, 0.7), (0.7, 0.9), (0.9, 1.01)):
        some = (top >= low) & (top < high)
        error = 3 * float((top[some] * (1 - top[some])).sum().sqrt()) / int(some.sum())
        assert int(some.sum()) > 15 and abs(float(right[some].mean() - top[some].mean())) < error + 0.02


def test_posteriors_are_bayes_rule_at_the_likeliest_lead():
    """Against densities written out."""
    _, noisy = draw_counts(rows=30)
    g, z = estimate_lead(noisy), noisy.counts_QC.double().numpy()
    # Classes stand g above the rest, whatever the level of the rest, which is marginalized by centering.
    z = z - z.mean(1, keepdims=True)
    density = {
        x: np.exp(stats.norm.logpdf(z[:, None, :], (x * (np.eye(5) - 0.2))[None], noisy.sigma).sum(2))
        for x in (0.8 * g, g, 1.25 * g)
    }
    expected = density[g] / density[g].sum(1, keepdims=True)
    np.testing.assert_allclose(compute_label_posterior(noisy).numpy(), expected, atol=1e-6)
    low, best, high = (float(np.log(part.mean(1)).sum()) for part in density.values())
    assert best > max(low, high)


def test_noise_alone_says_nothing():
    assert compute_label_posterior(draw_counts(lead=0.0, rows=2000)[1]).max() < 0.5
    assert compute_label_posterior(NoisyCounts(torch.zeros(0, 3, dtype=torch.int64), 1.0)).shape == (0, 3)
    assert torch.allclose(compute_label_posterior(NoisyCounts(torch.full((4, 3), 9), 2.0)), torch.full((4, 3), 1 / 3))


def test_counts_are_believed_round_by_round():
    noise = (5 * torch.randn(12, 3, generator=torch.Generator().manual_seed(0))).round().long()
    leads = torch.tensor([80] * 6 + [4] * 6)
    counts = torch.nn.functional.one_hot(torch.arange(12) % 3, 3) * leads[:, None] + noise
    noisy, pool = NoisyCounts(counts, 5.0), PublicPool(torch.zeros(12, 1, 8, 8))
    release = Release("r", torch.arange(12), counts.argmax(1), (), (), noisy, queries_per_round=(6, 6))
    found = make_student_task(IMAGES, pool, release).posterior_QC
    assert torch.equal(found, torch.cat([compute_label_posterior(NoisyCounts(part, 5.0)) for part in counts.split(6)]))
    assert not torch.allclose(found, compute_label_posterior(noisy))


def test_scores_of_answered_questions_become_shares():
    score_QC = torch.tensor([[0.9, 0.1, 0.1], [0.3, 0.5, 0.3], [torch.nan, 0.1, 0.9]], dtype=torch.float64)
    release = Release("0" * 16, torch.tensor([2, 0, 1]), torch.tensor([0, 1, -1]), (), (), score_QC=score_QC)
    task = make_student_task(IMAGES, PublicPool(torch.zeros(4, 1, 8, 8)), release)
    assert task.soft and task.query_Q.tolist() == [2, 0] and task.round_Q.tolist() == [0, 0]
    torch.testing.assert_close(task.posterior_QC, score_QC[:2] / 1.1)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of nine queries in three rounds, with the task that its student was given."""
    with pytest.MonkeyPatch.context() as patch:
        tasks, fit = [], Supervised.fit
        patch.setattr(Supervised, "fit", lambda self, task, **rest: tasks.append(task) or fit(self, task, **rest))
        changes = {"mechanism": GNMax(sigma=4.0, counts=True), "query": Random(rounds=3), "num_queries": 9}
        plan = killed_runs.plan(tmp_path_factory.mktemp("counts"), "first", delta=1e-5, **changes)
        report = pipeline.run(plan)
        again = changed(plan, labels=report.record.release_id, folder=plan.folder.parent / "again")
        pipeline.run(again)
    return plan, report, again, tasks


def test_counts_are_released_and_read_back_for_another_student(finished):
    plan, report, again, tasks = finished
    expected = accounting.compute_guarantee(GNMax(sigma=4.0).privacy_events(9), 1e-5).epsilon
    assert report.claim.epsilon == pytest.approx(expected)
    header, *rows = (plan.folder / "release" / "labels.csv").read_text().splitlines()
    assert header == "query,label,class,votes_0,votes_1,votes_2" and len(rows) == 9
    data = plan.dataset.load()
    with Ledger(plan.root / "ledger.sqlite", create=False) as ledger:
        folder = release_store.find_release(plan.root, report.record.release_id)
        release = release_store.read(folder, data.pool, data.spec, ledger).labels
    assert release.noisy_counts.sigma == 4.0
    assert torch.equal(release.noisy_counts.counts_QC.argmax(1), release.label_Q)
    posterior_QC = torch.cat([compute_label_posterior(part) for part in release.noisy_counts.split((3, 3, 3))])
    assert len(tasks) == 2 and all(torch.equal(task.posterior_QC, posterior_QC) for task in tasks)
    students = [(run.folder / "release" / "student.safetensors").read_bytes() for run in (plan, again)]
    assert students[0] == students[1]
    record = json.loads((plan.folder / "release" / "release.json").read_text())
    assert record["parameters"]["counts"] is True
    assert record["queries_by_round"] == [3, 3, 3] and record["rounds"] == 3


@pytest.mark.parametrize(
    "file,rounds", [("labels.csv", None), ("release.json", [3, 3, 2]), ("release.json", [10, -1, 0])]
)
def test_edited_counts_and_rounds_are_refused(finished, file, rounds):
    plan, report, *_ = finished
    path = plan.folder / "release" / file
    before = path.read_text()
    edited = before.replace("\n", ",999\n", 2).replace(",999", "", 1)
    path.write_text(edited if rounds is None else json.dumps(json.loads(before) | {"queries_by_round": rounds}))
    try:
        with pytest.raises(ValueError, match="edited"):
            pipeline.run(changed(plan, labels=report.record.release_id, folder=plan.folder.parent / "edited"))
    finally:
        path.write_text(before)


def test_scores_of_soft_labels_are_released_and_read_again(tmp_path, monkeypatch):
    opened, release = [], SoftSparseVector.release

    def spy(self, votes, noise, context):
        opened.append(votes)
        return release(self, votes, noise, context)

    monkeypatch.setattr(SoftSparseVector, "release", spy)
    mechanism = SoftSparseVector(epsilon=1e4, delta=1e-4, max_failures=60, bins=2)
    plan = changed(tiny(tmp_path), mechanism=mechanism, budget_epsilon=2e4)
    pipeline.run(plan)
    assert [type(one) for one in opened] == [SoftVotes] and opened[0].counts_QSV.shape == (20, 3, 2)
    assert opened[0].num_teachers == 12 and opened[0].counts_QSV.sum(2).eq(12).all()
    rows = list(csv.DictReader((plan.folder / "release" / "labels.csv").read_text().splitlines()))
    table = [[row[f"score_{c}"] for c in range(3)] for row in rows]
    for row, scores in zip(rows, table, strict=True):
        assert (row["label"] == "-1") == ("" in scores)
        if "" not in scores:
            assert {float(score) for score in scores} <= {0.25, 0.5, 0.75}
            assert max(scores) == scores[int(row["label"])]
    assert summary(plan)["queries_answered"] > 10 and summary(plan)["student_accuracy"] > 0.8
    statement = (plan.folder / "release" / "privacy.json").read_text()
    assert "class probabilities" in statement and "a score of each class" in statement
    with Ledger(plan.root / "ledger.sqlite") as ledger:
        data = plan.dataset.load()
        folder = release_store.find_release(plan.root, summary(plan)["release_id"])
        found = release_store.read(folder, data.pool, data.spec, ledger).labels
    assert [["" if np.isnan(score) else repr(score) for score in row] for row in found.score_QC.tolist()] == table


def test_the_share_of_wrong_labels_is_found_and_some_are_mended():
    task, _, _ = vectors(0.6)
    truth = vectors(1.0)[0].label_Q
    problem = build_problem(task, 0, CPU)
    mended = with_label_posteriors(problem, include_unqueried=False)
    before, after = ((label == truth).double().mean() for label in (task.label_Q, mended.posterior_QC.argmax(1)))
    assert after > before + 0.05
    assert torch.equal(mended.query_Q, task.query_Q) and torch.equal(mended.label_Q, task.label_Q)
    assert torch.allclose(mended.posterior_QC.sum(1), torch.ones(len(truth)), atol=1e-5)
    assert len(with_label_posteriors(problem, include_unqueried=True).query_Q) == len(task.pool_x)


def test_few_labels_and_labels_that_nothing_predicts_are_taken_as_they_are():
    few, one = vectors(1.0, 49)[0], vectors(1.0)[0]
    for task in (few, dataclasses.replace(one, label_Q=torch.zeros(400, dtype=torch.int64))):
        problem = build_problem(task, 0, CPU)
        assert with_label_posteriors(problem, include_unqueried=True) is problem


@pytest.mark.slow(reason="statistics of 20 draws, each with cross-validation of ten models")
def test_the_luck_of_the_best_of_many_models_is_no_estimate():
    """Of labels that have nothing to do with the points some model predicts a few more than the commonest one does."""
    task, _, _ = vectors(1.0, 100)
    estimates = 0
    for seed in range(20):
        label_Q = torch.randint(2, (100,), generator=torch.Generator().manual_seed(seed))
        problem = build_problem(dataclasses.replace(task, label_Q=label_Q), 0, CPU)
        estimates += with_label_posteriors(problem, include_unqueried=False) is not problem
    assert estimates <= 5
