"""The Python API, end to end at a tiny size: same ledger, same refusals, teachers of every kind."""

import json
import math
from typing import ClassVar

import numpy as np
import pytest
import torch
from scipy.stats import norm
from sklearn.linear_model import LogisticRegression
from sklearn.tree import DecisionTreeClassifier
from torch import nn

from pate_torch import PATE, load_student
from pate_torch.accounting import gdp
from pate_torch.mechanisms.gaussian import GNMax
from pate_torch.privacy.accounts import BudgetExceeded
from pate_torch.privacy.ledger import Ledger
from pate_torch.privacy.noise import NoiseSource
from pate_torch.privacy.partition import ReplaceOne
from pate_torch.queries.random import Margin
from pate_torch.students.training import Supervised
from pate_torch.teachers import engine
from pate_torch.teachers.recipe import TeacherRecipe
from tests.worlds import clouds

DELTA = 1e-4
RECIPE = TeacherRecipe(network="logistic", steps=25, batch_size=8, learning_rate=0.05, backend="vectorized")


X, Y = clouds(200, 0)
POOL, POOL_Y = clouds(80, 1)
TEST, TEST_Y = clouds(100, 2)


@pytest.fixture
def make(tmp_path):
    def pate(**changes):
        settings = {
            "classes": ["a", "b", "c"],
            "home": tmp_path,
            "num_teachers": 16,
            "mechanism": GNMax(sigma=2.5),
            "delta": DELTA,
            "budget_epsilon": 40.0,
            "teacher": RECIPE,
        } | changes
        return PATE(settings.pop("name", "clouds"), **settings)

    return pate


def price(questions, sigma=2.5):
    return pytest.approx(gdp.compute_epsilon(math.sqrt(2 * questions) / sigma, DELTA), abs=1e-9)


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))

    def forward(self, x):
        return self.layers(x)


@pytest.mark.parametrize(
    "teacher",
    [RECIPE, LogisticRegression(), DecisionTreeClassifier(), Network],
    ids=["recipe", "sklearn", "tree", "module"],
)
def test_from_tensors_to_a_reported_student(make, teacher):
    quiet = {"mechanism": GNMax(sigma=1.5), "budget_epsilon": 60.0}  # trees disagree: more noise outvotes them
    pate = make(teacher=teacher, **quiet, recipe=TeacherRecipe(steps=25, batch_size=8, learning_rate=0.05))
    assert pate.epsilon == 0
    release = pate.fit_teachers(X, Y).label(POOL, num_queries=40)
    assert pate.epsilon == price(40, 1.5)
    assert float((release.label_Q == POOL_Y[release.query_Q]).float().mean()) > 0.8
    student = pate.fit_student("supervised", steps=60)
    assert float((student.predict(TEST) == TEST_Y).float().mean()) > 0.8
    report = pate.report(TEST, TEST_Y, pool_y=POOL_Y)
    assert report.claim.epsilon == report.claim.epsilon_charged == price(40, 1.5)
    assert report.evaluation.student_accuracy == pytest.approx(float((student.predict(TEST) == TEST_Y).float().mean()))
    assert report.evaluation.label_accuracy > 0.8 and report.record.student == "supervised"
    assert {f.name for f in pate.folder.iterdir()} == {
        *("labels.csv", "release.json", "summary.json", "privacy.json", "README.md", "report.html", "SHA256SUMS"),
        "student.safetensors",
    }
    assert torch.equal(load_student(pate.folder).predict(TEST), student.predict(TEST))
    with Ledger(pate.home / "ledger.sqlite") as ledger:
        assert [account.name for account in ledger.verify()] == ["clouds"]


class Counting(LogisticRegression):
    """Learns other records from the second time on, whoever was fitted the first time."""

    fits: ClassVar[list[int]] = []

    def fit(self, x, y):
        self.fits.append(len(x))
        return super().fit(x, y if len(self.fits) == 1 else (y + 1) % 3)


@pytest.mark.fresh_process
@pytest.mark.parametrize("teacher", [RECIPE, Counting()], ids=["recipe", "estimator"])
def test_a_teacher_that_comes_out_different_alone_is_refused_before_anything_is_charged(make, teacher, monkeypatch):
    plain = engine._compute_losses
    monkeypatch.setattr(engine, "_compute_losses", lambda *given: plain(*given) * (1 + 0.1 * plain(*given).mean()))
    pate = make(teacher=teacher)
    for _ in range(2):  # a second call does not get by either
        with pytest.raises(ValueError, match=r"1 of 16 teachers.*came out different"):
            pate.fit_teachers(X, Y).label(POOL, num_queries=10)
    assert pate.epsilon == 0 and not list(pate.home.glob("teachers/*/manifest.json"))


@pytest.mark.parametrize("teacher", [{}, {"teacher": LogisticRegression()}], ids=["recipe", "estimator"])
def test_teachers_are_trained_once_and_the_same_questions_are_charged_again(make, teacher):
    first = make(**teacher).fit_teachers(X, Y)
    releases = [first.label(POOL, num_queries=20), first.label(POOL, num_queries=20)]
    again = make(**teacher).fit_teachers(X, Y)  # another process
    releases.append(again.label(POOL, num_queries=20))
    assert len({release.id for release in releases}) == 3 and again.epsilon == price(60)
    records = [json.loads(file.read_text()) for file in first.home.glob("runs/*/*/*/release/release.json")]
    assert len({record["teachers_id"] for record in records}) == 3
    stored = [f for f in (first.home / "teachers").iterdir() if (f / "manifest.json").exists()]
    assert len(stored) == (0 if teacher else 1)


def test_other_questions_compose_in_one_account(make):
    pate = make().fit_teachers(X, Y)
    pate.label(POOL, num_queries=20)
    pate.label(TEST, num_queries=10)
    other = make(num_teachers=10, teacher=LogisticRegression()).fit_teachers(X, Y)
    other.label(POOL, num_queries=5)
    assert pate.epsilon == other.epsilon == price(35)


def test_the_charge_stands_before_the_noise(make, monkeypatch):
    pate = make().fit_teachers(X, Y)
    monkeypatch.setattr(NoiseSource, "draw_gaussian", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        pate.label(POOL, num_queries=20)
    assert pate.epsilon == price(20)


def test_past_the_cap_nothing_is_drawn(make, monkeypatch):
    pate = make(budget_epsilon=8.0).fit_teachers(X, Y)
    pate.label(POOL, num_queries=10)
    monkeypatch.setattr(NoiseSource, "draw_gaussian", lambda *_: pytest.fail("noise was drawn"))
    with pytest.raises(BudgetExceeded):
        pate.label(POOL, num_queries=40)
    assert pate.epsilon == price(10)
    with pytest.raises(ValueError, match="budget_epsilon"):
        make(name="others", budget_epsilon=0.5).fit_teachers(X, Y).label(POOL, num_queries=40)
    assert make(name="others").account is None


def test_the_order_of_stages_and_bad_arguments(make):
    pate = make()
    for early in (lambda: pate.label(POOL), pate.labeler):
        with pytest.raises(ValueError, match="fit_teachers"):
            early()
    for early in (pate.fit_student, pate.report, lambda: pate.folder):
        with pytest.raises(ValueError, match="label"):
            early()
    with pytest.raises(ValueError, match="classes"):
        make(classes=1)
    with pytest.raises(ValueError, match="fresh network"):
        make(teacher=Network())
    with pytest.raises(ValueError, match="teacher="):
        make(teacher=3).fit_teachers(X, Y)
    with pytest.raises(ValueError, match=r"0\.\.1"):
        make(classes=2).fit_teachers(X, Y + 2)
    pate.fit_teachers(X.numpy(), Y.numpy())
    with pytest.raises(ValueError, match="num_queries"):
        pate.label(POOL, num_queries=81)
    with pytest.raises(ValueError, match="pool_x"):
        pate.label(torch.zeros(5, 3))
    assert pate.epsilon == 0
    pate.label(POOL, num_queries=5)
    with pytest.raises(ValueError, match="algorithm"):
        pate.fit_student("fixmach")
    with pytest.raises(ValueError, match="options"):
        pate.fit_student(Supervised(network="mlp"), steps=3)
    with pytest.raises(ValueError, match="test_x"):
        pate.report(TEST)
    assert "200" not in repr(pate)


def test_a_report_of_labels_alone_and_one_without_measurements(make):
    pate = make().fit_teachers(X, Y)
    pate.label(POOL, num_queries=10)
    assert pate.report().record.student is None
    assert not (pate.folder / "student.safetensors").exists()
    pate.fit_student("supervised", steps=5)
    report = pate.report()
    assert report.evaluation.student_accuracy is None and report.record.student == "supervised"


def test_units_adjacency_and_constants_reach_the_account(make):
    groups = np.arange(200) // 4
    pate = make(unit="group:ward").fit_teachers(X, Y, unit_id=groups, public_x=POOL)
    pate.label(POOL, num_queries=5)
    assert (pate.account.unit, pate.account.adjacency) == ("group:ward", "add_remove")
    other = make(
        name="fixed", partition=ReplaceOne(), mean=[0.0, 0.0], std=[2.0, 2.0], allow_duplicate_account=True
    ).fit_teachers(X, Y)
    other.label(POOL, num_queries=5)
    assert other.account.adjacency == "replace_one"
    assert other.fit_student("supervised", steps=2).spec.std == (2.0, 2.0)
    assert pate.fit_student("supervised", steps=2).spec.std == pytest.approx(POOL.std(0, correction=0).tolist())


def test_seeded_noise_claims_nothing(make):
    pate = make(insecure_noise_seed=0).fit_teachers(X, Y)
    pate.label(POOL, num_queries=10)
    assert not pate.report().claim.private and not pate.account.is_private


def test_images_with_fixmatch(make):
    draw = torch.Generator().manual_seed(0)
    y = torch.randint(2, (120,), generator=draw)
    x = torch.randint(60, (120, 1, 8, 8), generator=draw)
    x[:, :, :4] += (y * 150)[:, None, None, None]
    x = x.to(torch.uint8)
    pate = make(classes=2, teacher=TeacherRecipe(network="logistic", steps=20, batch_size=8)).fit_teachers(
        x[:80], y[:80]
    )
    pate.label(x[80:], num_queries=20)
    student = pate.fit_student("fixmatch", steps=25, batch_size=8, unlabeled_batch=16)
    assert float((student.predict(x[80:]) == y[80:]).float().mean()) > 0.8


def test_the_student_that_guides_rounds_is_small_and_can_be_chosen(make, monkeypatch):
    built = []
    fit = Supervised.fit
    monkeypatch.setattr(Supervised, "fit", lambda self, *a, **k: (built.append(self), fit(self, *a, **k))[1])
    pate = make().fit_teachers(X, Y)
    pate.label(POOL, num_queries=9, strategy=Margin(rounds=3))
    assert [(guide.network, guide.steps) for guide in built] == [("mlp", 200)] * 2
    pate.label(POOL, num_queries=9, strategy=Margin(rounds=3), guide_student=Supervised(network="logistic", steps=4))
    assert [(guide.network, guide.steps) for guide in built[2:]] == [("logistic", 4)] * 2
    assert pate.epsilon == price(18)  # another guide asks other questions
    pate.label(POOL, num_queries=9, strategy=Margin(rounds=3), guide_student="vat")
    with pytest.raises(ValueError, match="guide_student"):
        pate.label(POOL, num_queries=9, strategy=Margin(rounds=3), guide_student="mlp")
    assert pate.epsilon == price(27)


def test_the_owner_may_attack_the_student(make):
    pate = make(teacher=LogisticRegression()).fit_teachers(X, Y)
    pate.label(POOL, num_queries=20)
    with pytest.raises(ValueError, match="fit_student"):
        pate.membership(TEST, TEST_Y)
    pate.fit_student("supervised", steps=20)
    found = pate.membership(TEST, TEST_Y)
    assert (found.student.members, found.student.others) == (200, 100)
    assert found.bound_by_plan == pytest.approx(2 * norm.cdf(math.sqrt(40) / 2.5 / 2) - 1)
    assert found.student.auc_interval[0] < 0.6  # five deviations above chance
    with pytest.raises(ValueError, match="no members"):
        pate.membership(X, Y)
    end = repr(found.student.auc_interval[0]).encode()
    assert not [f for f in pate.folder.rglob("*") if f.is_file() and end in f.read_bytes()]


def test_a_labeler_of_these_teachers(make):
    for teacher in (RECIPE, LogisticRegression()):
        pate = make(teacher=teacher, name=type(teacher).__name__, allow_duplicate_account=True).fit_teachers(X, Y)
        with pate.labeler(num_queries=10) as labeler:
            answers = labeler.answer(TEST[:6])
            assert float((answers == TEST_Y[:6]).float().mean()) >= 0.5
        assert pate.epsilon == price(10) and pate.account.ex_post_guarantee.epsilon == price(6)
        with pate.labeler(num_queries=10) as labeler:
            assert labeler.answer(TEST[:6]).tolist() == answers.tolist()
        assert pate.epsilon == price(10) and pate.account.ex_post_guarantee.epsilon == price(6)
