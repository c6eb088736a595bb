"""The Python API, end to end at a tiny size: same ledger, same refusals, teachers of every kind."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.stats import norm
from sklearn.linear_model import LogisticRegression
from sklearn.tree import DecisionTreeClassifier
from torch import nn
from torchvision.transforms import v2

from pate_torch import PATE, Network, load_student
from pate_torch.accounting import gdp
from pate_torch.core.executors import Workers
from pate_torch.features.fourier import FourierFeatures
from pate_torch.mechanisms.confident import ConfidentGNMax
from pate_torch.mechanisms.gaussian import GNMax
from pate_torch.privacy.accounts import BudgetExceeded
from pate_torch.privacy.ledger import Ledger
from pate_torch.privacy.noise import NoiseSource
from pate_torch.privacy.partition import AddRemove, ReplaceOne
from pate_torch.queries.base import Margin
from pate_torch.students.training import Supervised
from pate_torch.teachers import engine
from pate_torch.teachers.recipe import PublicStart, TeacherRecipe
from tests.worlds import clouds

DELTA = 1e-4
RECIPE = TeacherRecipe(network="logistic", steps=25, batch_size=8, learning_rate=0.05)
PUBLIC_START = replace(RECIPE, start=PublicStart(features=FourierFeatures()))
TRAINING = {"steps": 25, "batch_size": 8, "optimizer": lambda params: torch.optim.Adam(params, lr=0.05)}
X, Y = clouds(200, 0)
POOL, POOL_Y = clouds(80, 1)
TEST, TEST_Y = clouds(100, 2)


@pytest.fixture
def make(tmp_path):
    settings = {"classes": ["a", "b", "c"], "num_teachers": 16, "mechanism": GNMax(sigma=2.5), "delta": DELTA}
    settings |= {"home": tmp_path, "budget_epsilon": 40.0, "teacher": RECIPE}
    return lambda name="clouds", **changes: PATE(name, **(settings | changes))


@pytest.fixture
def finished(make):
    """One release of 20 answers by scikit-learn's teachers."""
    pate = make(teacher=LogisticRegression()).fit_teachers(X, Y)
    pate.label(POOL, num_queries=20)
    return pate


def cost(questions, sigma=2.5):
    return pytest.approx(gdp.compute_epsilon(math.sqrt(2 * questions) / sigma, DELTA), abs=1e-9)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))

    def forward(self, x):
        return self.layers(x)


@pytest.mark.parametrize(
    "teacher",
    [RECIPE, PUBLIC_START, DecisionTreeClassifier(), Network(Net, **TRAINING)],
    ids=["recipe", "public start", "tree", "module"],
)
def test_from_tensors_to_a_reported_student(make, teacher):
    # Trees disagree: more noise would outvote them.
    pate = make(teacher=teacher, mechanism=GNMax(sigma=1.5), budget_epsilon=60.0)
    assert pate.epsilon == 0
    release = pate.fit_teachers(X, Y, public_x=POOL).label(POOL, num_queries=40)
    assert pate.epsilon == cost(40, 1.5)
    assert float((release.label_Q == POOL_Y[release.query_Q]).float().mean()) > 0.8
    assert pate.report().record.student is None and not (pate.folder / "student.safetensors").exists()
    student = pate.fit_student("supervised", steps=60)
    accuracy = float((student.predict(TEST) == TEST_Y).float().mean())
    assert accuracy > 0.8 and pate.report().evaluation.student_accuracy is None
    report = pate.report(TEST, TEST_Y, pool_y=POOL_Y)
    assert report.claim.epsilon == report.claim.epsilon_charged == cost(40, 1.5)
    assert report.evaluation.student_accuracy == pytest.approx(accuracy)
    assert report.evaluation.label_accuracy > 0.8 and report.record.student == "supervised"
    assert torch.equal(load_student(pate.folder).predict(TEST), student.predict(TEST))
    with Ledger(pate.home / "ledger.sqlite") as ledger:
        assert [account.name for account in ledger.verify()] == ["clouds"]


class Counting(LogisticRegression):
    """Learns other records from the second time on, whoever was fitted the first time."""

    fits: ClassVar[list[int]] = []

    def fit(self, x, y):
        self.fits.append(len(x))
        return super().fit(x, y if len(self.fits) == 1 else (y + 1) % 3)


FRESH = pytest.mark.slow(reason="a process that imports this module; tests/teachers has a faster one")


@pytest.mark.parametrize(
    "teacher,calls",
    [
        pytest.param(RECIPE, 2, id="recipe"),  # a teacher's losses depend on those of the others
        pytest.param(Counting(), 1, id="estimator", marks=(pytest.mark.fresh_process, FRESH)),
    ],
)
def test_a_teacher_that_comes_out_different_alone_is_refused_before_anything_is_charged(
    make, teacher, calls, monkeypatch
):
    plain = engine._compute_losses
    monkeypatch.setattr(engine, "_compute_losses", lambda *args: plain(*args) * (1 + 0.1 * plain(*args).mean()))
    pate = make(teacher=teacher)
    for _ in range(calls):  # a second call does not get by either
        with pytest.raises(ValueError, match=r"1 of 16 teachers.*came out different"):
            pate.fit_teachers(X, Y).label(POOL, num_queries=10)
    assert pate.epsilon == 0 and not list(pate.home.glob("teachers/*/manifest.json"))


@pytest.mark.parametrize("teacher,num_stored", [(RECIPE, 1), (LogisticRegression(), 0)], ids=["recipe", "estimator"])
def test_every_call_is_charged_in_one_account_and_shows_an_id_of_its_own(make, teacher, num_stored):
    first = make(teacher=teacher).fit_teachers(X, Y)
    releases = [first.label(POOL, num_queries=20), first.label(POOL, num_queries=20)]
    again = make(teacher=teacher).fit_teachers(X, Y)  # another process
    releases.append(again.label(POOL, num_queries=20))
    again.label(TEST, num_queries=10)
    other = make(num_teachers=10, teacher=LogisticRegression()).fit_teachers(X, Y)
    other.label(POOL, num_queries=5)
    assert len({release.id for release in releases}) == 3 and again.epsilon == other.epsilon == cost(75)
    records = [json.loads(file.read_text()) for file in first.home.glob("runs/*/*/*/release/release.json")]
    assert len({record["teachers_id"] for record in records}) == 5
    assert len(list((first.home / "teachers").glob("*/manifest.json"))) == num_stored


def test_teachers_of_another_execution_are_found_again(make, monkeypatch):
    """They are the same up to rounding, so no release and no account tells how they were executed."""
    first = make(executor=Workers(workers=1, chunk=3)).fit_teachers(X, Y)
    monkeypatch.setattr(engine, "train_params", lambda *_: pytest.fail("trained again"))
    other = make(executor=Workers(workers=2)).fit_teachers(X, Y)
    assert first._stored_teachers.id == other._stored_teachers.id
    other.label(POOL, num_queries=5)
    texts = [file.read_text() for file in make().home.rglob("*.json*")]
    assert texts and not any(word in text for text in texts for word in ("workers", "executor", "chunk"))


@pytest.mark.parametrize("teacher", [RECIPE, LogisticRegression()], ids=["recipe", "sklearn"])
def test_verbose_shows_the_stages_on_standard_error_alone(make, teacher, capsys):
    make(teacher=teacher).fit_teachers(X, Y).label(POOL, num_queries=5)
    shown = capsys.readouterr()
    parts = "Training 16 teachers ...", "Training 16 teachers: 16/16 done in", "Charging account 'clouds'", "Answering"
    assert shown.out == "" and [part for part in parts if part not in shown.err] == []


def test_quiet_teachers_print_nothing_and_other_words_are_refused(make, capsys):
    make(teacher=LogisticRegression(), verbose=False).fit_teachers(X, Y).label(POOL, 5)
    assert capsys.readouterr() == ("", "")
    with pytest.raises(ValueError, match=r"verbose=3: must be true or false"):
        make(verbose=3)
    with pytest.raises(ValueError, match=r"executor='processes': must be workers of"):
        make(executor="processes")


def test_past_the_cap_nothing_is_drawn(make, monkeypatch):
    pate = make(budget_epsilon=8.0).fit_teachers(X, Y)
    pate.label(POOL, num_queries=10)
    monkeypatch.setattr(NoiseSource, "draw_gaussian", lambda *_: pytest.fail("noise was drawn"))
    with pytest.raises(BudgetExceeded):
        pate.label(POOL, num_queries=40)
    assert pate.epsilon == cost(10)
    with pytest.raises(ValueError, match="budget_epsilon"):
        make("others", budget_epsilon=0.5).fit_teachers(X, Y).label(POOL, num_queries=40)
    assert make("others").account is None


@pytest.mark.parametrize(
    "changes,message",
    [
        ({"classes": 1}, "classes"),
        ({"num_teachers": 0}, "num_teachers"),
        ({"mechanism": "gaussian"}, "mechanism='gaussian': must be a mechanism"),
        ({"delta": 2.0}, "delta"),
        ({"budget_epsilon": -1.0}, "budget_epsilon"),
        ({"chosen_by": "luck"}, "chosen_by"),
        ({"allow_duplicate_account": "yes"}, "allow_duplicate_account"),
        ({"allow_uninformative_labels": "yes"}, "allow_uninformative_labels"),
        ({"std": [1.0, 1.0]}, r"std.*together with mean"),
    ],
    ids=str,
)
def test_a_bad_parameter_is_named(make, changes, message):
    with pytest.raises(ValueError, match=message):
        make(**changes)


def test_the_stages_have_an_order_and_bad_arguments_are_named(make):
    pate = make()
    for early in (lambda: pate.label(POOL), pate.labeler):
        with pytest.raises(ValueError, match="fit_teachers"):
            early()
    for early in (pate.fit_student, pate.report, lambda: pate.membership(TEST, TEST_Y), lambda: pate.folder):
        with pytest.raises(ValueError, match="label"):
            early()
    with pytest.raises(ValueError, match="teacher='int'"):
        make(teacher=3).fit_teachers(X, Y)
    with pytest.raises(ValueError, match=r"teacher='Net'.*Pass the class, or lambda: Net"):
        make(teacher=Net()).fit_teachers(X, Y)
    with pytest.raises(ValueError, match="public_x=None: must be the points from which"):
        make(teacher=PUBLIC_START).fit_teachers(X, Y)
    with pytest.raises(ValueError, match="x='DataFrame': must be an array"):
        pate.fit_teachers(pd.DataFrame(X.numpy()), Y)
    pate.fit_teachers(X.numpy(), Y.numpy())
    for arguments, name in (
        ({"num_queries": 81}, "num_queries"),
        ({"pool_x": torch.zeros(5, 3)}, "pool_x"),
        ({"guide_student": "mlp"}, "guide_student"),
        ({"method": "votes"}, "method"),
    ):
        with pytest.raises(ValueError, match=name):
            pate.label(**({"pool_x": POOL, "num_queries": 5} | arguments))
    with pytest.raises(ValueError, match="num_queries"):
        pate.labeler(0)
    assert pate.epsilon == 0 and "200" not in repr(pate)


def test_bad_students_and_measurements_are_named(finished):
    for algorithm in ("fixmach", LogisticRegression()):
        with pytest.raises(ValueError, match=r"algorithm=.*must be one of"):
            finished.fit_student(algorithm)
    with pytest.raises(ValueError, match=r"algorithm='Linear'.*Pass the class, or lambda"):
        finished.fit_student(nn.Linear(2, 3))
    with pytest.raises(ValueError, match=r"options=\['steps'\].*Pass Supervised\(steps=\.\.\.\) as the algorithm"):
        finished.fit_student(Supervised(network="mlp"), steps=3)
    with pytest.raises(ValueError, match=r"optimizer='str': must make a torch.optim.Optimizer"):
        finished.fit_student(Net, optimizer="adam")
    with pytest.raises(ValueError, match="test_x"):
        finished.report(TEST)
    with pytest.raises(ValueError, match=r"method=.*recipe's teachers"):
        finished.label(POOL, method="teachers_transductive")


def test_a_network_learns_the_labels_and_stays_out_of_the_release(finished):
    first = finished.fit_student("supervised", steps=2)
    files = {file: file.read_bytes() for file in finished.folder.iterdir()}
    charged = finished.epsilon
    rotate = v2.Lambda(lambda point: point + 0.1 * torch.randn(2))
    student = finished.fit_student(Net, steps=60, optimizer=lambda p: torch.optim.AdamW(p, lr=0.02), transform=rotate)
    assert float((student.predict(TEST) == TEST_Y).float().mean()) > 0.8 and isinstance(student.module, Net)
    assert {file: file.read_bytes() for file in finished.folder.iterdir()} == files and finished.epsilon == charged
    assert torch.equal(load_student(finished.folder).predict(TEST), first.predict(TEST))
    again = finished.fit_student(Network(Net, steps=3), transform=rotate)
    assert torch.equal(
        again.compute_logits(TEST), finished.fit_student(Net, steps=3, transform=rotate).compute_logits(TEST)
    )


def test_a_network_without_labels_is_refused(make):
    mechanism = ConfidentGNMax(sigma=2.5, screen_sigma=2.5, threshold=23.0)  # no query passes with this noise
    pate = make(teacher=LogisticRegression(), mechanism=mechanism, insecure_noise_seed=0)
    assert not pate.fit_teachers(X, Y).label(POOL, num_queries=3).answered_Q.any()
    with pytest.raises(ValueError, match="no public point has a released label"):
        pate.fit_student(Net)


def test_units_adjacency_and_constants_reach_the_account(make):
    pate = make(unit="group:ward").fit_teachers(X, Y, unit_id=np.arange(200) // 4, public_x=POOL)
    pate.label(POOL, num_queries=5)
    assert (pate.account.unit, pate.account.adjacency) == ("group:ward", "add_remove")
    assert pate.fit_student("supervised", steps=2).spec.std == pytest.approx(POOL.std(0, correction=0).tolist())
    constants = {"mean": [0.0, 0.0], "std": [2.0, 2.0]}
    other = make("fixed", partition=ReplaceOne(), allow_duplicate_account=True, **constants).fit_teachers(X, Y)
    other.label(POOL, num_queries=5)
    assert other.account.adjacency == "replace_one"
    assert other.fit_student("supervised", steps=2).spec.std == (2.0, 2.0)


@pytest.mark.parametrize("partition", [AddRemove(), ReplaceOne()], ids=["add_remove", "replace_one"])
def test_ids_of_single_records_are_refused_before_a_record_is_read(partition, make):
    """A record that is added with the id of another record would displace that record."""
    with pytest.raises(ValueError, match=r"unit_id='ndarray'.*Set unit='group:<what.*or leave out unit_id"):
        make(partition=partition).fit_teachers(None, None, unit_id=np.arange(200))


def test_seeded_noise_claims_nothing(make):
    pate = make(insecure_noise_seed=0).fit_teachers(X, Y)
    pate.label(POOL, num_queries=10)
    assert not pate.report().claim.private and not pate.account.is_private and pate.epsilon == math.inf


def test_the_student_that_guides_rounds_is_small_and_can_be_chosen(make, monkeypatch):
    guides, fit = [], Supervised.fit
    monkeypatch.setattr(Supervised, "fit", lambda self, *a, **k: (guides.append(self), fit(self, *a, **k))[1])
    pate = make().fit_teachers(X, Y)
    pate.label(POOL, num_queries=6, strategy=Margin(rounds=2))
    assert [(guide.network, guide.steps) for guide in guides] == [("mlp", 200)]
    pate.label(POOL, num_queries=9, strategy=Margin(rounds=3), guide_student=Supervised(network="logistic", steps=4))
    assert [(guide.network, guide.steps) for guide in guides[1:]] == [("logistic", 4)] * 2
    assert pate.epsilon == cost(15)  # another guide asks other queries


def test_whatever_writes_into_the_folder_of_a_release_holds_its_lock(finished, monkeypatch):
    """So the next run finds and removes the unfinished files of a call that was killed while it wrote."""
    replace, held = Path.replace, {}

    def watched(temporary, path):
        held[Path(path).name] = (finished.folder.parent / ".lock").exists()
        return replace(temporary, path)

    monkeypatch.setattr(Path, "replace", watched)
    finished.fit_student("supervised", steps=2)
    finished.report()
    assert {"student.safetensors", "summary.json", "report.html"} <= set(held) and all(held.values())
    held.clear()
    finished.adjust_student(1.0, torch.zeros(3))
    assert held == {"student.safetensors": True}


def test_the_owner_may_attack_the_student(finished):
    with pytest.raises(ValueError, match="fit_student"):
        finished.membership(TEST, TEST_Y)
    finished.fit_student("supervised", steps=20)
    result = finished.membership(TEST, TEST_Y)
    assert (result.student.members, result.student.others) == (200, 100)
    assert result.bound_by_plan == pytest.approx(2 * norm.cdf(math.sqrt(40) / 2.5 / 2) - 1)
    assert result.student.auc_interval[0] < 0.6  # five deviations above chance
    with pytest.raises(ValueError, match="no members"):
        finished.membership(X, Y)
    end = repr(result.student.auc_interval[0]).encode()
    assert not [f for f in finished.folder.rglob("*") if f.is_file() and end in f.read_bytes()]


class Drawing(DecisionTreeClassifier):
    """Votes by what it draws from a generator that all teachers share. Two teachers agree on 128 points never."""

    generator = np.random.default_rng(0)

    def fit(self, x, y):
        self.draws_ = self.generator.integers(3, size=1000)
        return super().fit(x, y)

    def predict(self, x):
        return np.resize(self.draws_, len(x))


@pytest.mark.parametrize("opens", ["label", "labeler"])
def test_votes_of_teachers_that_share_a_generator_are_refused_before_a_charge(make, opens):
    pate = make(teacher=Drawing(), num_teachers=4).fit_teachers(X, Y)  # each has records of all three classes
    with pytest.raises(ValueError, match=r"^teacher='1 of 4 teachers': was trained again"):
        if opens == "label":
            pate.label(POOL, num_queries=10)
        else:
            with pate.labeler(num_queries=10) as labeler:
                labeler.answer(POOL[:1])  # on one point such teachers may agree
    assert not pate.account.is_charged


@pytest.mark.parametrize("teacher", [RECIPE, LogisticRegression()], ids=["recipe", "estimator"])
def test_a_labeler_of_these_teachers(make, teacher):
    pate, answers = make(teacher=teacher).fit_teachers(X, Y), []
    for _ in range(2):  # the second time for free, from the journal
        with pate.labeler(num_queries=10) as labeler:
            answers.append(labeler.answer(TEST[:6]).tolist())
        assert pate.epsilon == cost(10) and pate.account.ex_post_guarantee.epsilon == cost(6)
    assert answers[0] == answers[1] and np.mean(answers[0] == TEST_Y[:6].numpy()) >= 0.5
