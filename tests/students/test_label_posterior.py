"""Noisy counts that are released with their labels: what they cost, what they say, and who learns from them."""

import dataclasses
import json
import math

import numpy as np
import pytest
import torch
from scipy import stats

from pate_torch import pipeline
from pate_torch.accounting import accountant as accounting
from pate_torch.audit.command import audit
from pate_torch.mechanisms.gaussian import GNMax
from pate_torch.privacy.ledger import Ledger
from pate_torch.privacy.noise import DryRunNoise
from pate_torch.privacy.records import DataSpec, MechanismContext, NoisyCounts
from pate_torch.privacy.sensitive import Votes
from pate_torch.queries.random import Random
from pate_torch.release import store as release_store
from pate_torch.students.base import StudentTask
from pate_torch.students.supervised import Supervised
from pate_torch.students.task import compute_label_posterior, estimate_lead
from pate_torch.students.training import build_problem, compute_label_loss, compute_released_loss
from tests import killed_runs
from tests.mechanisms.vote_laws import CERTAIN, TINY, law
from tests.run_configs import changed

SIGMA = 6.0
KINDS = ("torch", "discrete")


def release(kind, rows=40_000, sigma=SIGMA):
    counts_QC = torch.tensor([[30, 15, 5]]).repeat(rows, 1)
    mechanism = GNMax(sigma=sigma, counts=True, noise=kind)
    return (
        counts_QC,
        mechanism,
        mechanism.release(Votes(counts_QC, 50), DryRunNoise(kind), MechanismContext(num_queries=rows)),
    )


@pytest.mark.parametrize("kind", KINDS)
def test_counts_are_whole_votes_with_the_noise_that_is_priced(kind):
    counts_QC, mechanism, answers = release(kind)
    noisy_QC = answers.noisy_counts.counts_QC
    assert noisy_QC.dtype == torch.int64 and answers.noisy_counts.sigma == SIGMA
    assert torch.equal(noisy_QC.argmax(1), answers.label_Q)
    noise = (noisy_QC - counts_QC).numpy().astype(float) + np.random.default_rng(0).uniform(-0.5, 0.5, noisy_QC.shape)

    def p(factor):  # half-way between whole votes the law is exact, and the dither makes straight lines of the rest
        edges = np.arange(-100, 101) + 0.5
        below = law("gaussian", factor * SIGMA, kind == "discrete").cdf(edges)
        return stats.kstest(noise[:, 0], lambda x: np.interp(x, edges, below)).pvalue

    assert p(1) > TINY > max(p(2 / 3), p(3 / 2))
    correlation = np.corrcoef(noise.T)[np.triu_indices(3, 1)]
    assert abs(correlation).max() < 7 / math.sqrt(len(noise))  # every class has noise of its own
    assert answers.events == mechanism.privacy_events(len(counts_QC))
    assert answers.events == dataclasses.replace(mechanism, counts=False).privacy_events(len(counts_QC))


def test_no_data_dependent_price_is_claimed_for_them():
    assert GNMax(sigma=SIGMA).make_outcome_model() is not None
    assert GNMax(sigma=SIGMA, counts=True).make_outcome_model() is None


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["torch", pytest.param("discrete", marks=pytest.mark.slow)])
def test_the_audit_sees_the_counts_and_not_the_label_alone(kind):
    """Counts with a third of the noise behind a label with all of it."""

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Leaky(GNMax):
        def release(self, votes, noise, context):
            hidden = super().release(votes, noise, context)
            shown = GNMax(sigma=self.sigma / 3, counts=True, noise=self.noise).release(votes, noise, context)
            return dataclasses.replace(hidden, noisy_counts=NoisyCounts(shown.noisy_counts.counts_QC, self.sigma))

    mechanism = GNMax(sigma=3.0, noise=kind)
    pairs = mechanism.worst_case_neighbors(2)
    sure = {"delta": 1e-5, "confidence": CERTAIN}
    for honest in (mechanism, dataclasses.replace(mechanism, counts=True)):
        found = audit(honest, pairs, runs=100_000, **sure)
        assert found.is_sound and found.proven > found.claimed / 4
    assert not audit(Leaky(sigma=3.0, noise=kind), pairs, runs=40_000, **sure).is_sound


def made(lead_=300.0, sigma=150.0, rows=400, classes=5):
    draw = torch.Generator().manual_seed(0)
    truth = torch.randint(classes, (rows,), generator=draw)
    z = sigma * torch.randn(rows, classes, generator=draw, dtype=torch.float64) + 77.0
    z[torch.arange(rows), truth] += lead_
    return truth, NoisyCounts(z.round().long(), sigma)


def test_the_lead_is_found_and_posteriors_are_calibrated():
    truth, noisy = made()
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


def test_posteriors_are_bayes_rule():
    """Against densities written out, at the lead that was found."""
    _, noisy = made(rows=30)
    g, z = estimate_lead(noisy), noisy.counts_QC.double().numpy()
    # Classes stand g above the rest, whatever the level of the rest, which is marginalised by centring.
    z = z - z.mean(1, keepdims=True)
    means = g * (np.eye(5) - 0.2)
    density = np.exp(stats.norm.logpdf(z[:, None, :], means[None], noisy.sigma).sum(2))
    assert np.allclose(compute_label_posterior(noisy).numpy(), density / density.sum(1, keepdims=True), atol=1e-6)
    likelihood = [
        np.log(
            np.exp(stats.norm.logpdf(z[:, None, :], (x * (np.eye(5) - 0.2))[None], noisy.sigma).sum(2)).mean(1)
        ).sum()
        for x in (0.8 * g, g, 1.25 * g)
    ]
    assert likelihood[1] > max(likelihood[0], likelihood[2])


def test_noise_alone_says_nothing():
    _, noisy = made(lead_=0.0, rows=2000)
    assert compute_label_posterior(noisy).max() < 0.5
    assert compute_label_posterior(NoisyCounts(torch.zeros(0, 3, dtype=torch.int64), 1.0)).shape == (0, 3)
    assert torch.allclose(compute_label_posterior(NoisyCounts(torch.full((4, 3), 9), 2.0)), torch.full((4, 3), 1 / 3))


SPEC = DataSpec(name="x", num_classes=3, input_shape=(2,), class_names=("a", "b", "c"), mean=(0.0,), std=(1.0,))


def posed(posterior_QC=None, **changes):
    task = StudentTask(SPEC, torch.zeros(4, 2), torch.tensor([0, 2]), torch.tensor([1, 2]), posterior_QC=posterior_QC)
    return build_problem(task, 0, torch.device("cpu"), **changes)


@pytest.mark.parametrize("noise", [0.0, 0.2])
def test_certain_posteriors_are_labels(noise):
    logits = torch.randn(3, 3, generator=torch.Generator().manual_seed(0))
    chosen = torch.tensor([1, 0, 1])
    certain = torch.eye(3)[[1, 2]]
    loss = compute_released_loss(posed(certain, label_noise=noise), logits, chosen)
    expected = compute_label_loss(logits, torch.tensor([2, 1, 2]), noise)
    torch.testing.assert_close(loss, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(compute_released_loss(posed(label_noise=noise), logits, chosen), expected)


def test_of_two_classes_left_close_the_model_may_take_either():
    """The likelihood is as high for one as for the other, and the wrong third costs."""
    posterior = torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.0, 1.0]])
    logits = 20 * torch.eye(3)
    first, second, third = compute_released_loss(posed(posterior), logits, torch.zeros(3, dtype=torch.int64)).tolist()
    assert first == pytest.approx(second) and first == pytest.approx(-math.log(0.5), abs=1e-4)
    assert third > 10


@pytest.mark.parametrize(
    "posterior",
    [torch.ones(3, 3) / 3, torch.ones(2, 3), torch.tensor([[1.5, -0.5, 0.0]] * 2), torch.full((2, 3), torch.nan)],
)
def test_posteriors_that_are_none_are_refused(posterior):
    with pytest.raises(ValueError, match="label posteriors"):
        posed(posterior)


@pytest.fixture
def plan(tmp_path):
    counting, asking = GNMax(sigma=4.0, counts=True), Random(rounds=3)
    return killed_runs.plan(tmp_path, "first", mechanism=counting, query=asking, num_queries=9, delta=1e-5)


def test_a_run_releases_keeps_and_reads_them_back(plan, monkeypatch):
    tasks = []
    plain = Supervised.fit

    def remembered(self, task, **how):
        tasks.append(task)
        return plain(self, task, **how)

    monkeypatch.setattr(Supervised, "fit", remembered)
    report = pipeline.run(plan)
    expected = accounting.compute_guarantee(GNMax(sigma=4.0).privacy_events(9), 1e-5).epsilon
    assert report.claim.epsilon == pytest.approx(expected)
    folder = plan.folder / "release"
    header, *rows = (folder / "labels.csv").read_text().splitlines()
    assert header == "query,label,class,votes_0,votes_1,votes_2" and len(rows) == 9
    data = plan.dataset.load()
    with Ledger(plan.root / "ledger.sqlite", create=False) as ledger:
        release, *_ = release_store.read(plan.root, report.record.release_id, data.pool, data.spec, ledger)
    assert release.noisy_counts.sigma == 4.0
    assert torch.equal(release.noisy_counts.counts_QC.argmax(1), release.label_Q)
    again = changed(plan, labels=report.record.release_id, folder=plan.folder.parent / "again")
    pipeline.run(again)
    believed_QC = torch.cat([compute_label_posterior(part) for part in release.noisy_counts.split((3, 3, 3))])
    assert len(tasks) == 2 and all(torch.equal(task.posterior_QC, believed_QC) for task in tasks)
    assert "only its 9 answers, with the noisy votes behind them, left" in (folder / "report.html").read_text()
    record = json.loads((folder / "release.json").read_text())
    assert record["parameters"]["counts"] is True


def test_without_them_nothing_of_the_counts_is_written(plan):
    pipeline.run(changed(plan, mechanism=GNMax(sigma=4.0)))
    assert (plan.folder / "release" / "labels.csv").read_text().startswith("query,label,class\n")


def test_an_edited_count_is_refused(plan):
    report = pipeline.run(plan)
    file = plan.folder / "release" / "labels.csv"
    lines = file.read_text().splitlines()
    lines[1] = ",".join([*lines[1].split(",")[:-1], "999"])
    file.write_text("\n".join(lines) + "\n")
    again = changed(plan, labels=report.record.release_id, folder=plan.folder.parent / "again")
    with pytest.raises(ValueError, match="edited"):
        pipeline.run(again)
