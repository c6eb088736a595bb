"""A file of votes answered: the files, the cost, and every refusal with exit code 2 and nothing charged."""

import csv
import json
import math

import numpy as np
import pytest

from pate_torch.accounting import gdp
from pate_torch.cli.main import main as pate
from pate_torch.privacy.ledger import Ledger
from pate_torch.privacy.noise import NoiseSource
from pate_torch.teachers.store import TeacherStore

P, K, C = 30, 50, 3


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("PATE_HOME", str(tmp_path / "home"))
    truth = np.arange(P) % C
    wrong = np.random.default_rng(0).random((K, P)) < 0.1
    np.save(tmp_path / "votes.npy", np.where(wrong, (truth + 1) % C, truth))
    return tmp_path / "home"


def run(home, *settings, drop=()):
    given = {"votes": home.parent / "votes.npy", "num_classes": C, "dataset.name": "hospitals"}
    given |= {"mechanism.sigma": 8, "privacy.delta": 1e-5, "quiet": "true"}
    return pate(["label", *(f"{k}={v}" for k, v in given.items() if k not in drop), *settings])


def folders(home):
    return sorted((home / "runs" / "hospitals").glob("*/*/release"))


def summary(folder):
    return json.loads((folder / "summary.json").read_text())


def spent(home):
    with Ledger(home / "ledger.sqlite") as ledger:
        return {account.name: account.guarantee.epsilon for account in ledger.list_accounts()}


def cost(questions, sigma=8):
    return pytest.approx(gdp.compute_epsilon(math.sqrt(2 * questions) / sigma, 1e-5), abs=1e-9)


def test_every_row_is_answered_and_priced(home, capsys):
    assert run(home) == 0
    said = capsys.readouterr()
    assert "Guarantee" in said.out and not said.err  # quiet is about progress: what a release costs is always shown
    [folder] = folders(home)
    found = summary(folder)
    assert found["epsilon"] == found["epsilon_charged"] == cost(P)
    assert (found["student"], found["num_teachers"], found["queries_asked"]) == (None, K, P)
    assert (found["adjacency"], found["unit"], found["private"]) == ("add_remove", "record", True)
    rows = list(csv.DictReader((folder / "labels.csv").read_text().splitlines()))
    assert [int(row["query"]) for row in rows] == list(range(P))
    right = sum(int(row["label"]) == i % C for i, row in enumerate(rows))
    assert right > 0.8 * P  # about 40 votes in front, noise of 8
    assert "student.safetensors" not in (folder / "README.md").read_text()
    assert spent(home) == {"hospitals": cost(P)}


def test_only_the_first_questions(home):
    assert run(home, "num_queries=10", "class_names=[cat,dog,cow]") == 0
    rows = list(csv.DictReader((folders(home)[0] / "labels.csv").read_text().splitlines()))
    assert [int(row["query"]) for row in rows] == list(range(10))
    assert {row["class"] for row in rows} <= {"cat", "dog", "cow"}
    assert spent(home) == {"hospitals": cost(10)}


def test_the_same_votes_are_charged_again_and_no_id_repeats(home):
    """Whether a repeated query is free must not depend on whether the votes, which are private, are the same."""
    assert run(home) == run(home) == 0
    one, two = map(summary, folders(home))
    assert one["release_id"] != two["release_id"] and one["teachers_id"] != two["teachers_id"]
    assert spent(home) == {"hospitals": cost(2 * P)}


def test_the_noise_can_be_calibrated(home):
    assert run(home, "privacy.target_epsilon=1", drop=["mechanism.sigma"]) == 0
    assert 0.99 < summary(folders(home)[0])["epsilon"] <= 1


@pytest.mark.parametrize(
    "settings,drop,message",
    [
        ((), ["mechanism.sigma"], "mechanism.sigma"),
        ((), ["privacy.delta"], "privacy.delta"),
        ((), ["dataset.name"], "error: dataset.name=None: must name the account"),
        ((), ["num_classes"], "num_classes"),
        (("num_classes=2",), (), "0..1"),
        (("num_teachers=49",), (), "50 x 30"),
        (("num_points=31",), (), "50 x 30"),
        (("num_queries=31",), (), "num_queries=31"),
        (("votes=missing.npy",), (), "is not a file"),
    ],
    ids=str,
)
def test_a_refusal_exits_with_2_and_charges_nothing(home, capsys, settings, drop, message):
    assert run(home, *settings, drop=drop) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and message in error
    assert not (home / "ledger.sqlite").exists() or spent(home) == {}
    assert folders(home) == []


def test_an_account_that_holds_out_units_takes_no_votes_from_elsewhere(home, capsys):
    store = TeacherStore(home)
    store.set_test_rule("hospitals", 0.25, None)
    store.record_charge("hospitals", None, "head")
    assert run(home) == 2
    assert "account='hospitals': holds out units for tests, so votes from elsewhere" in capsys.readouterr().err


def test_the_charge_stands_before_the_noise_and_stays_when_interrupted(home, monkeypatch):
    seen = []

    def interrupted(*_):
        seen.append(spent(home))
        raise KeyboardInterrupt

    monkeypatch.setattr(NoiseSource, "draw_gaussian", interrupted)
    assert run(home) == 130
    assert seen == [{"hospitals": cost(P)}]
    assert spent(home) == {"hospitals": cost(P)}
    assert folders(home) == []


def test_no_data_set_is_asked_that_was_not_named(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("PATE_HOME", str(tmp_path / "home"))
    assert pate(["label"]) == 2 and "Missing mandatory value" in capsys.readouterr().err
    assert not (tmp_path / "home").exists()
