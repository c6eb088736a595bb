"""Calls that are interrupted after their charge: the same call finishes them, and any other call is a new charge."""

import json
import os
import threading

import numpy as np
import pytest
import torch
from joblib import parallel_backend
from sklearn.model_selection import cross_val_score
from sklearn.neighbors import KNeighborsClassifier
from torch import nn

from pate_torch import PATE, Network, PATEClassifier, pipeline
from pate_torch.mechanisms.gaussian import GNMax
from pate_torch.privacy.accounts import BudgetExceeded
from pate_torch.privacy.ledger import Ledger
from pate_torch.release.store import UnfinishedCall
from pate_torch.teachers.store import TeacherStore
from tests.tiny_runs import again, summary, tiny
from tests.worlds import clouds

X, Y = (part.numpy() for part in clouds(900, 0))
PUBLIC = clouds(150, 1)[0].numpy()
SAVE = "pate_torch.session.save_student"
STAGE = {"gradients": SAVE, "teachers": SAVE, "dpsgd": "pate_torch.session.write_release"}
"""What a fit does after its answers are committed."""


class Killed(BaseException):
    """The end of a process, as far as one process can show it."""


@pytest.fixture
def interrupt(monkeypatch):
    """Makes a call, and kills it where it comes to a function."""

    def kill(*_, **__):
        raise Killed

    def interrupt(place, call, killer=kill, **given):
        with monkeypatch.context() as interrupted, pytest.raises(Killed):
            interrupted.setattr(place, killer)
            call(**given)

    return interrupt


@pytest.fixture
def fit(tmp_path):
    def fit(x=X, y=Y, **changes):
        given = {"account": "clouds", "classes": [0, 1, 2], "num_records_about": 900, "verbose": False}
        return PATEClassifier(4.0, **(given | {"home": tmp_path} | changes)).fit(x, y, public=PUBLIC)

    return fit


def charges(home, account="clouds") -> list:
    with Ledger(home / "ledger.sqlite", create=False) as ledger:
        return list(ledger.get_charges(account).values())


@pytest.mark.parametrize("method", STAGE)
def test_a_fit_that_was_interrupted_after_its_charge_is_finished_by_the_same_fit(method, fit, tmp_path, interrupt):
    interrupt(STAGE[method], fit, method=method)
    (charge,) = charges(tmp_path)
    assert charge.is_committed
    with pytest.raises(ValueError, match="has been charged already"):
        fit(method=method, x=X[:-1], y=Y[:-1])  # other records: another call
    finished = fit(method=method)
    assert len(charges(tmp_path)) == 1 and finished.score(X, Y) > 0.5
    assert finished.privacy_["guarantee"]["epsilon"] == pytest.approx(4.0, rel=1e-3)
    with pytest.raises(ValueError, match="has been charged already"):
        fit(method=method)  # it has ended now
    runs = [finished.release_, fit(method=method, allow_refit=True).release_]
    assert len(charges(tmp_path)) == 2 and runs[0] != runs[1]
    first, second = (json.loads((run / "summary.json").read_text()) for run in runs)
    assert first["ledger_head"] != second["ledger_head"] and first["epsilon_charged"] < second["epsilon_charged"]


def test_a_fit_with_functions_of_the_user_is_finished_by_functions_at_other_addresses(fit, tmp_path, interrupt):
    def train(steps=3):
        teacher = Network(
            lambda: nn.Linear(2, 3), steps=steps, optimizer=lambda params: torch.optim.SGD(params, lr=0.1)
        )
        return fit(method="teachers", teacher=teacher, num_teachers=12, num_queries=12, spend_anyway=True)

    interrupt(SAVE, train)
    with pytest.raises(ValueError, match="has been charged already"):
        train(steps=4)
    train()
    assert len(charges(tmp_path)) == 1


@pytest.mark.parametrize("method", STAGE)
def test_noise_that_was_drawn_and_not_recorded_stays_spent(method, fit, tmp_path, interrupt):
    interrupt("pate_torch.privacy.ledger.Ledger.commit", fit, method=method)
    assert [charge.is_committed for charge in charges(tmp_path)] == [False]
    with pytest.raises(ValueError, match=r"charged already \(epsilon 4.*1 of its releases were interrupted"):
        fit(method=method)
    fit(method=method, allow_refit=True)
    assert [charge.is_committed for charge in charges(tmp_path)] == [False, True]


TESTED = {"private_test": 0.2, "class_weight": "balanced", "cap": 4.0}
PLACES = {
    "before the test": "pate_torch.session.release_test",
    "after the test": "pate_torch.api.pate.read_test",
    "before the report": "pate_torch.session.write_release",
}


@pytest.mark.parametrize(
    ("method", "place"), [*(("gradients", place) for place in PLACES), ("teachers", "after the test")]
)
def test_a_fit_that_was_interrupted_around_its_test_is_finished_by_the_same_fit(
    method, place, fit, tmp_path, interrupt
):
    interrupt(PLACES[place], fit, method=method, **TESTED)
    assert len(charges(tmp_path)) == (1 if place == "before the test" else 2)
    files = {file: file.read_bytes() for file in tmp_path.rglob("release/private_test.json")}
    finished = fit(method=method, **TESTED)
    assert [charge.is_committed for charge in charges(tmp_path)] == [True, True]
    assert finished.total_.epsilon == finished.privacy_["guarantee"]["epsilon"] == pytest.approx(4.0, rel=1e-9)
    assert all(file.read_bytes() == content for file, content in files.items())  # the noise is not drawn again
    table = json.loads((finished.release_ / "private_test.json").read_text())
    assert [*map(list, finished.private_test_.counts)] == table["counts"]
    with pytest.raises(ValueError, match="has been charged already"):
        fit(method=method, **TESTED)  # it has ended now


def test_the_noise_of_a_test_that_was_not_recorded_stays_spent(fit, tmp_path, interrupt):
    commit = Ledger.commit

    def kill_second(self, reservation, *rest, **options):
        if len(charges(tmp_path)) == 2:
            raise Killed
        return commit(self, reservation, *rest, **options)

    interrupt("pate_torch.privacy.ledger.Ledger.commit", fit, kill_second, **TESTED)
    again = TESTED | {"cap": None}
    for _ in range(2):
        with pytest.raises(ValueError, match=r"charged already.*1 of its releases were interrupted"):
            fit(**again)
    with pytest.raises(BudgetExceeded, match="cap 4"):
        fit(**again, allow_refit=True)
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        ledger.raise_cap("clouds", 6.0, reason="one more test")
    finished = fit(**again, allow_refit=True)
    assert [charge.is_committed for charge in charges(tmp_path)] == [True, False, True]
    assert "number 2" in charges(tmp_path)[2].purpose and finished.total_.epsilon > 4.0


def test_another_predictor_does_not_take_the_test_of_an_interrupted_fit(fit, interrupt):
    interrupt("pate_torch.session.write_release", fit, **TESTED)
    with pytest.raises(ValueError, match="has been charged already"):
        fit(**(TESTED | {"class_weight": {0: 9.0}}))
    assert fit(**TESTED).private_test_.number == 1


def test_folds_in_threads_charge_once(tmp_path):
    clf = PATEClassifier(1.0, account="cv", classes=[0, 1, 2], num_records_about=600, home=tmp_path, verbose=False)
    with parallel_backend("threading"), pytest.raises(ValueError, match="has been charged already"):
        cross_val_score(clf, X, Y, cv=3, n_jobs=3, params={"public": PUBLIC}, error_score="raise")
    assert len(charges(tmp_path, "cv")) == 1


@pytest.fixture
def note(tmp_path):
    store = TeacherStore(tmp_path)
    store.get_secret_key()  # a file of its own, which is not to be the one that is being written
    return UnfinishedCall(store, "clinic", {}, lambda: "records")


def test_another_process_that_removes_unfinished_files_leaves_a_note_that_is_being_written(note, tmp_path, monkeypatch):
    sweep, sync, writer = threading.Thread(target=note.store.sweep), os.fsync, threading.get_ident()

    def sync_while_another_call_sweeps(descriptor):
        # While the file still has its temporary name. Threads of earlier tests may write, too.
        if threading.get_ident() == writer and not sweep.ident:
            sweep.start()
            sweep.join(timeout=0.5)
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", sync_while_another_call_sweeps)
    note.begin(tmp_path / "run")
    sweep.join(timeout=60)
    assert not sweep.is_alive() and UnfinishedCall.list_runs(note.store, "clinic") == ["run"]


def test_a_note_that_another_process_removes_is_not_missed(note, tmp_path, monkeypatch):
    note.begin(tmp_path / "run")
    monkeypatch.setattr(type(tmp_path), "glob", lambda folder, pattern: [folder / "clinic.0.json"])  # listed, then gone
    assert UnfinishedCall.list_runs(note.store, "clinic") == []
    monkeypatch.setattr(UnfinishedCall, "list_runs", lambda *_: ["run"])
    note.end()
    assert note.find() is None


def test_a_run_of_the_command_is_finished_by_the_same_run(tmp_path, interrupt):
    plan = tiny(tmp_path)
    interrupt("pate_torch.session.write_release", pipeline.run, config=plan)
    pipeline.run(again(plan, "second"))
    assert len(charges(tmp_path, "blobs")) == 1 and summary(plan)["student_accuracy"] > 0.5
    assert not again(plan, "second").folder.exists()  # it goes on where it was
    pipeline.run(again(plan, "third"))
    assert len(charges(tmp_path, "blobs")) == 2


def test_whether_two_releases_agree_on_every_vote_shows_nowhere(tmp_path):
    """A release by other teachers was found again, for free, if and only if all noiseless votes were the same."""
    rng = np.random.default_rng(0)
    y = rng.integers(0, 2, 400)
    x = np.where(y[:, None] == 1, 3.0, -3.0) + rng.normal(size=(400, 2)) * 0.5
    pool = np.concatenate([rng.normal(size=(40, 2)) * 0.3 + center for center in (3, -3)])
    victim_x, victim_y = pool[:1] + 1e-3, np.array([0])
    found = []
    for name, (private_x, private_y) in {
        "absent": (x, y),
        "present": (np.concatenate([x, victim_x]), np.concatenate([y, victim_y])),
    }.items():
        ids, totals = [], []
        for neighbors in (1, 3, 1):
            clf = PATEClassifier(
                0.5, account="clinic", classes=[0, 1], method="teachers", num_teachers=10, num_queries=40,
                teacher=KNeighborsClassifier(neighbors), allow_refit=True, spend_anyway=True, home=tmp_path / name,
                verbose=False,
            )  # fmt: skip
            with pytest.warns(UserWarning):
                clf.fit(private_x, private_y, public=pool)
            shown = json.loads((clf.release_ / "summary.json").read_text())
            ids.append((shown["release_id"], shown["teachers_id"]))
            totals.append(shown["epsilon_charged"])
        found.append(([len({one[part] for one in ids}) for part in range(2)], totals))
    assert found[0] == found[1] and found[0][0] == [3, 3]


def test_a_call_of_pate_ends_with_its_labels_unless_it_says_otherwise(tmp_path):
    pate = PATE("clouds", classes=3, num_teachers=10, mechanism=GNMax(sigma=9.0), delta=1e-5, home=tmp_path)
    pate.fit_teachers(X, Y)
    first = pate.label(PUBLIC, 10, finish=False)
    assert pate.label(PUBLIC, 10, finish=False).id == first.id  # it goes on with what it paid for
    pate.finish()
    assert pate.label(PUBLIC, 10).id != first.id and len(charges(tmp_path)) == 2
    assert pate.label(PUBLIC, 10).id != first.id and len(charges(tmp_path)) == 3
