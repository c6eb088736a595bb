"""What reverse k-NN labeling and gradients share: encoding, whole runs, edited files, settings, and Python."""

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from scipy import stats

from pate_torch import PATE, networks, pipeline
from pate_torch.accounting import accountant as accounting
from pate_torch.config import RunConfig
from pate_torch.core.device import single_thread_mode
from pate_torch.core.progress import do_nothing
from pate_torch.features.contrastive import ContrastiveFeatures, encode
from pate_torch.mechanisms.gaussian import GNMax
from pate_torch.mechanisms.gradient_descent import GradientDescent
from pate_torch.mechanisms.histogram import Histogram
from pate_torch.methods.gradients import GradientMethod
from pate_torch.methods.record_method import map_records_batch_invariant
from pate_torch.methods.reverse_knn import ReverseKnn
from pate_torch.methods.teacher_votes import TeacherVotes
from pate_torch.networks import remove_head
from pate_torch.privacy.ledger import Ledger
from pate_torch.privacy.records import PrivateRecords, Release
from pate_torch.queries.base import Random
from pate_torch.release import store as release_store
from pate_torch.release.report import ReleaseReport
from pate_torch.students.self_training import SelfTraining
from pate_torch.students.training import Supervised
from tests.mechanisms.vote_laws import has_this_scale_alone
from tests.methods.voter_worlds import configured
from tests.worlds import IMAGES, clouds, images

BOTH = ["gradients", "reverse_knn"]
SETTINGS = {
    "gradients": ["method=gradients", "mechanism.sigma=1.5", "query=random", "student.alpha=0.3"],
    "reverse_knn": ["method=reverse_knn", "mechanism.sigma=3", "query=medoids"],
}
TWO_ROUNDS = ["student=self_training", "student@guide_student=same", "query.rounds=2", "num_queries=80",
              "baseline=false", "recommended.student_steps=40"]  # fmt: skip
MU = {"gradients": math.sqrt(4) / 1.5, "reverse_knn": math.sqrt(2) / 3}  # two steps a round; one table a round
SMALL = Supervised(network="mlp", steps=60, batch_size=32)
STUDENT = SelfTraining(first_student=SMALL, later_students=SMALL)


@dataclass
class Run:
    """A finished run of one of both methods."""

    name: str
    home: Path
    plan: RunConfig
    report: ReleaseReport

    @classmethod
    def make(cls, name: str, home: Path, *settings: str) -> "Run":
        plan = configured(home, *settings)
        return cls(name, home, plan, pipeline.run(plan))

    @property
    def folder(self) -> Path:
        return self.plan.folder / "release"

    def read(self) -> Release:
        data = self.plan.dataset.load()
        with Ledger(self.home / "ledger.sqlite", create=False) as ledger:
            folder = release_store.find_release(self.home, self.report.record.release_id)
            return release_store.read(folder, data.pool, data.spec, ledger).labels


@pytest.fixture(scope="module", params=BOTH)
def run(request, tmp_path_factory):
    return Run.make(request.param, tmp_path_factory.mktemp("run"), *SETTINGS[request.param], *TWO_ROUNDS)


class Positional(torch.nn.Module):
    """Features that give away where in a batch an image stood, and how many were in it."""

    def forward(self, x):
        place = torch.arange(len(x), dtype=x.dtype)[:, None]
        return torch.cat([x.flatten(1), place, torch.full_like(place, len(x))], 1)


def together(x: torch.Tensor, encoder: torch.nn.Module) -> torch.Tensor:
    private = PrivateRecords.from_rows(x, torch.zeros(len(x), dtype=torch.int64), np.arange(len(x)).astype(str))
    spec = IMAGES if x.dim() == 4 else dataclasses.replace(IMAGES, input_shape=(x.shape[1],))
    return map_records_batch_invariant(lambda place_BD: place_BD, encoder, private, spec, do_nothing)


def test_a_records_place_in_a_batch_follows_from_itself_alone():
    """So nobody else touches its rounding: whoever comes, goes or changes places, a record's features stay the same."""
    x, _ = images(41, seed=1)
    x[30] = x[3]  # equal records are no exception
    turned = torch.randperm(41, generator=torch.Generator().manual_seed(0))
    small = remove_head(networks.build("small_cnn", (1, 8, 8), 3, channels=(4, 8), hidden=16)).eval()
    before = torch.get_num_threads()
    wide = torch.nn.Sequential(torch.nn.Linear(64, 300), torch.nn.Tanh(), torch.nn.Linear(300, 70)).requires_grad_(
        False
    )
    row_bodies = [(body, x.flatten(1).float()) for body in (wide, Positional(), torch.nn.Flatten())]
    for body, points in [(Positional(), x), (small, x), (torch.nn.Flatten(), x), *row_bodies]:
        with single_thread_mode():
            slow = together(points, body)
        torch.set_num_threads(4)
        try:
            assert torch.equal(together(points, body), slow)
            assert torch.equal(together(points[turned], body), slow[turned])
            for kept in (torch.arange(41) != 7, torch.arange(41) >= 20, torch.arange(41) == 3):
                assert torch.equal(together(points[kept], body), slow[kept])
        finally:
            torch.set_num_threads(before)
    one_by_one = torch.cat([encode(small, x[n : n + 1], IMAGES) for n in range(41)])
    torch.testing.assert_close(together(x, small), one_by_one)


def test_places_in_batches_are_taken_evenly():
    """Else most of every batch would be blank."""
    x, _ = images(4000, seed=2)
    said = together(x, Positional())
    place_N = (8 * said[:, -2] / said[:, -1]).round().long()
    assert torch.bincount(place_N, minlength=8).max() < 1.15 * len(x) / 8  # five standard errors


FILE = {"gradients": "scores.safetensors", "reverse_knn": "cells.csv"}


@pytest.mark.slow(reason="whole runs")
def test_the_answers_lie_beside_the_labels_and_teach_another_student_for_nothing(run):
    release, pool = run.read(), run.plan.dataset.load().pool
    asked = release.query_Q.split(40)
    if run.name == "gradients":
        assert release.score_RPC.shape == (2, len(pool), 10) and release.num_pool_rounds == 2
        for turn in (0, 1):
            labels = release.label_Q[40 * turn : 40 * turn + 40]
            assert torch.equal(release.score_RPC[turn][asked[turn]].argmax(1), labels)
        right = (release.score_RPC[1].argmax(1) == run.plan.dataset.load().evaluation.pool_y).double().mean()
        assert float(right) > 0.5  # a tenth by chance
    else:
        assert release.cell_RP.shape == (2, len(pool)) and release.queries_per_round == (40, 40)
        assert release.cell_RP[0].max() < 40 <= release.cell_RP[1].min()
        for turn in (0, 1):  # an asked point lies in its own cell
            assert torch.equal(release.query_Q[release.cell_RP[turn]][asked[turn]], asked[turn])
    labels = f"labels={run.report.record.release_id}"
    again = pipeline.run(configured(run.home, *SETTINGS[run.name], *TWO_ROUNDS, labels))
    assert again.record.reuses_labels and again.claim.epsilon_charged == run.report.claim.epsilon_charged
    assert again.evaluation.student_accuracy == run.report.evaluation.student_accuracy  # the same student again


@pytest.mark.slow(reason="a whole run of two rounds")
@pytest.mark.parametrize("run", ["reverse_knn"], indirect=True)
def test_what_left_is_the_private_table_with_the_noise_that_was_charged(run):
    """The whole pipeline, not the mechanism alone: were the noise 2/3 or 3/2 of it, this would show."""
    exact_QC = load_file(run.plan.folder / "private" / "votes.safetensors")["counts_QC"]
    assert exact_QC.sum() == 2 * len(run.plan.dataset.load().private)  # every record once in each round
    squares = float((run.read().noisy_counts.counts_QC - exact_QC).double().square().sum())

    def p(factor):
        law = stats.chi2(exact_QC.numel(), scale=(3 * factor) ** 2 + 1 / 12)  # 1/12: rounded to whole votes
        return min(law.cdf(squares), law.sf(squares))

    assert has_this_scale_alone(p)
    text = "\n".join(",".join(map(str, row)) for row in exact_QC.tolist())
    files = [file for file in run.folder.rglob("*") if file.is_file()]
    assert not any(text.encode() in file.read_bytes() for file in files)
    assert (run.plan.folder / "private").stat().st_mode & 0o077 == 0


@pytest.fixture(scope="module")
def label_runs(tmp_path_factory):
    settings = ["student=none", "num_queries=5", "query=random"]
    return {name: Run.make(name, tmp_path_factory.mktemp(name), f"method={name}", *settings) for name in BOTH}


@pytest.mark.parametrize("edit", ["swap", "cut", "foreign", "gone"])
@pytest.mark.parametrize("name", BOTH)
def test_edited_answers_are_refused(label_runs, name, edit):
    file = label_runs[name].folder / FILE[name]
    content = file.read_bytes()
    lines = content.splitlines(keepends=True)
    lines[1:3] = {"swap": [lines[2], lines[1]], "cut": [lines[1]]}.get(edit, [b"0,99999,99999\n"])
    try:
        if edit == "gone":
            file.unlink()
        elif name == "gradients" and edit in ("swap", "cut"):
            score = load_file(file)["score_RPC"]
            save_file({"score_RPC": (score.flip(1) if edit == "swap" else score[:, :-1]).contiguous()}, file)
        else:
            file.write_bytes(b"".join(lines))
        with pytest.raises(ValueError, match="labels"):
            label_runs[name].read()
    finally:
        file.write_bytes(content)


@pytest.mark.parametrize(("method", "mechanism"), [(GradientMethod, GradientDescent), (ReverseKnn, Histogram)])
def test_a_method_named_alone_comes_with_its_mechanism(method, mechanism, label_runs, tmp_path):
    """``method=gradients`` is all there is to say: the mechanism follows, at the data set's own noise."""
    plan = configured(tmp_path, f"method={method.name}", "partition=replace_one")
    assert type(plan.method) is method and type(plan.method.mechanism) is mechanism
    assert plan.method.mechanism.adjacency == plan.partition.adjacency == "replace_one"
    record = label_runs[method.name].report.record
    assert (record.mechanism, record.num_teachers) == (mechanism.name, 0)


def test_a_method_whose_model_cannot_be_published_refuses_a_student_that_publishes_it():
    student = dataclasses.replace(STUDENT, publish="released_model")
    descent = GradientDescent(sigma=1.0, adjacency="add_remove")
    for method, complaint in (
        (TeacherVotes(num_teachers=5, mechanism=GNMax(sigma=1.0)), "method=gradients"),
        (ReverseKnn(mechanism=Histogram(sigma=1.0, adjacency="add_remove")), "method=gradients"),
        (GradientMethod(mechanism=descent, query=Random(rounds=2)), "guide_student"),
        (GradientMethod(mechanism=descent, features=ContrastiveFeatures()), "features=contrastive"),
    ):
        with pytest.raises(ValueError, match=complaint):
            method.check_student(student)
    GradientMethod(mechanism=descent).check_student(student)


@pytest.mark.parametrize(
    ("setting", "complaint"),
    [
        ("mechanism.adjacency=replace_one", "adjacency"),
        ("teachers=0123456789abcdef", "teachers"),
        ("votes=x.csv", "votes"),
        ("labels_only=true", "replace_one"),
    ],
)
@pytest.mark.parametrize("name", BOTH)
def test_what_does_not_go_together_is_refused_before_anything_is_charged(name, setting, complaint, tmp_path):
    with pytest.raises(ValueError, match=complaint):
        pipeline.run(configured(tmp_path, f"method={name}", setting))
    assert not (tmp_path / "ledger.sqlite").exists()


CHEAPER = {
    "gradients": ("mechanism.sigma=104", "mechanism.steps=8", "method.ridge=.3", "method.neighbors=16"),
    "reverse_knn": ("query.rounds=2", "mechanism.sigma=44.72", "num_queries=400"),
}


@pytest.mark.parametrize(
    ("name", "experiment"), [("gradients", "mnist_low_epsilon"), ("reverse_knn", "mnist_reverse_knn")]
)
@pytest.mark.parametrize("max_epsilon", [0.5, 0.1])
def test_the_experiment_asks_in_rounds_below_its_cost(name, experiment, max_epsilon, tmp_path):
    is_cheaper = max_epsilon < 0.5
    plan = configured(tmp_path, f"experiment={experiment}", *(CHEAPER[name] if is_cheaper else ()))
    method = plan.method
    assert plan.dataset.name == "mnist" and method.name == name and method.is_guided
    assert method.num_rounds == (2 if name == "gradients" or is_cheaper else 3)
    cost = accounting.compute_guarantee(method.privacy_events(), plan.privacy.delta)
    assert 0.9 * max_epsilon < cost.epsilon <= max_epsilon and cost.route == "gdp"
    if name == "gradients":  # what the rounds train is not trained again
        assert method.guide_student == dataclasses.replace(plan.student, publish="student")
        assert method.neighbors == (16 if is_cheaper else 0)
    else:
        assert method.guide_student == plan.student
        assert plan.student.features == method.features == plan.student.first_student.features


@pytest.mark.parametrize(
    "method",
    [
        GradientMethod(mechanism=GradientDescent(sigma=6.0, adjacency="add_remove")),
        ReverseKnn(mechanism=Histogram(sigma=4.0, adjacency="add_remove")),
    ],
    ids=BOTH,
)
def test_python_refuses_what_does_not_go_with_records(method, tmp_path):
    (x, y), (pool, _) = clouds(60, 0), clouds(9, 1)
    settings = {"classes": 3, "delta": 1e-5, "home": tmp_path, "budget_epsilon": 3.0}
    pate = PATE("clouds", teacher=method, **settings)
    with pytest.raises(ValueError, match="fit_teachers"):
        pate.label(pool)
    pate.fit_teachers(x, y)
    if isinstance(method, GradientMethod):
        with pytest.raises(ValueError, match="size"):
            pate.label(pool, 9)
    with pytest.raises(ValueError, match="at once"):
        pate.labeler(5)
    assert pate.epsilon == 0
    for wrong, key in (({"num_teachers": 5}, "num_teachers"), ({"mechanism": GNMax(sigma=4.0)}, "mechanism")):
        with pytest.raises(ValueError, match=key):
            PATE("clouds", teacher=method, **wrong, **settings)
    with pytest.raises(ValueError, match="num_teachers"):
        PATE("clouds", mechanism=GNMax(sigma=4.0), **settings)
