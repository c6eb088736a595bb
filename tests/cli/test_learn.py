"""``pate learn``: what is charged, what is released, what is refused, and the table of sizes."""

import csv
import functools
import html
import io
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from pate_torch.accounting import accountant as accounting
from pate_torch.cli.main import main as pate
from pate_torch.hypotheses.algorithms import ALGORITHMS
from pate_torch.privacy.ledger import Ledger
from pate_torch.students.store import load_student
from pate_verify.command import verify_release
from tests.command_runs import learn_settings
from tests.release.json_schema import faults, privacy_schema

settings = functools.partial(learn_settings, Path())


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("PATE_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "home"


def charges(home):
    with Ledger(home / "ledger.sqlite") as ledger:
        return list(ledger.get_charges("people").values()) if ledger.list_accounts() else []


def release(home):
    (folder,) = (home / "runs" / "people").glob("*/*/release")
    return folder


def read(home, name="privacy.json"):
    return json.loads((release(home) / name).read_text())


@pytest.mark.parametrize(
    "name,epsilon,accuracy",
    [
        ("exponential", 1.0, 0.85),
        ("convex", 2.0, 0.85),
        pytest.param("sspp", 1.0, 0.85, marks=pytest.mark.slow(reason="a whole run as of exponential")),
        pytest.param("private-prediction", 8.0, 0.6, marks=pytest.mark.slow(reason="a whole run as of exponential")),
    ],
)
def test_it_charges_what_it_quoted_and_releases_what_predict_applies(
    name, epsilon, accuracy, home, capsys, monkeypatch
):
    home.mkdir()
    (home / "owner.yaml").write_text("people:\n  contact: the desk\n  pool: {name: a survey}\n")
    given = [name, *settings(), "--epsilon", str(epsilon), "--below-guarantee", "--constants", "sharp"]
    assert pate(["learn", *given, "privacy.chosen_by=public data"]) == 0
    (charge,) = charges(home)
    assert charge.is_committed and charge.purpose == "hypothesis or its answers"
    statement = read(home)
    guarantee = statement["guarantee"]
    assert statement["private"] and guarantee["adjacency"] == "replace_one" and guarantee["unit"] == "record"
    charged = accounting.compute_guarantee(charge.reserved_events, 1e-4).epsilon
    assert guarantee["epsilon"] == charged <= epsilon * (1 + 1e-9)
    assert statement["mechanism"]["name"] == name
    checks = list(verify_release(release(home), home / "ledger.sqlite"))
    assert all(check.is_ok for check in checks) and "charges" in {check.name for check in checks}, checks
    # What the owner says stands in the statement.
    assert statement["owner"]["contact"] == "the desk" and statement["public_assets"][0]["name"] == "a survey"
    assert statement["declared_values"]["classes"] == "declared by the owner"
    assert statement["chosen_by"] == "public data"
    # What the hypothesis and its certificate say stands everywhere, and is the same.
    model = statement["utility"].get("model", {})
    assert read(home, "summary.json").get("model", {}) == model and faults(statement, privacy_schema()) == []
    assert ("certificate" in model) == (name in ("sspp", "exponential"))
    assert ("hypothesis" in model) == (name != "convex")
    printed = " ".join(capsys.readouterr().out.replace("|", " ").split())
    page = html.unescape((release(home) / "report.html").read_text()).replace("\xa0", " ")
    for words in (model[key] for key in ("hypothesis", "certificate") if key in model):
        assert words in printed and words in page
    if name in ("sspp", "exponential"):
        threshold = re.fullmatch(r"age (>=|<) (0\.\d+) -> (yes, otherwise no|no, otherwise yes)", model["hypothesis"])
        assert threshold and abs(float(threshold[2]) - 0.5) < 0.1
        assert model["num_records"] == 3000 and 0 < model["excess_risk"] < 0.1 and model["theorem_num_records"] > 1
    # The release lists the files that are there.
    card = (release(home) / "README.md").read_text()
    assert {file.name for file in release(home).iterdir()} == {
        "README.md", "SHA256SUMS", "privacy.json", "report.html", "student.safetensors", "summary.json"
    }  # fmt: skip
    assert "labels.csv" not in card and "release.json" not in card
    assert f"trained on the private records by {name}" in card
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", ["pate predict"])
    assert pate(["predict", str(release(home).parent), "test.csv"]) == 0
    predicted = [row["label"] for row in csv.DictReader(io.StringIO(capsys.readouterr().out))]
    truth = [row["ill"] for row in csv.DictReader(io.StringIO(Path("test.csv").read_text()))]
    assert np.mean([a == b for a, b in zip(predicted, truth, strict=True)]) > accuracy


def test_several_classes_are_charged_in_one_reservation_at_equal_shares(home):
    assert pate(["learn", "sspp", *settings(("a", "b", "c"), private=1500), "--epsilon", "3", "--below-guarantee"]) == 0
    (found,) = charges(home)
    assert found.is_committed and [event.eta for event in found.reserved_events] == pytest.approx([1.0] * 3)
    statement = read(home)
    assert len(statement["composition"]["parts"]) == 1 and statement["guarantee"]["epsilon"] <= 3
    assert read(home, "summary.json")["student_accuracy"] > 0.6
    student = load_student(release(home).parent)
    assert student.predict_names({"age": [0.05, 0.95], "dose": [0.5, 0.5]}) == ["a", "c"]


def test_a_hypothesis_that_was_paid_for_is_found_by_the_same_call(home, monkeypatch):
    given = ["sspp", *settings(private=300), "--epsilon", "1", "--below-guarantee"]
    with monkeypatch.context() as interrupted:
        interrupted.setattr("pate_torch.session.write_release", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        assert pate(["learn", *given]) == 130
    assert pate(["learn", *given]) == 0 and len(charges(home)) == 1
    assert len(list(home.glob("runs/*/*/*/release/summary.json"))) == 1
    assert pate(["learn", *given, "insecure_noise_seed=1"]) == 0 and len(charges(home)) == 2
    private = [json.loads(file.read_text())["private"] for file in home.glob("runs/*/*/*/release/privacy.json")]
    assert sorted(private) == [False, True]  # seeded noise protects nobody


def test_what_is_not_promised_is_refused_with_the_n_it_takes_and_nothing_is_charged(home, capsys):
    given = settings()
    for name in ("sspp", "private-prediction"):
        assert pate(["learn", name, *given]) == 2
        printed = capsys.readouterr().err
        assert "n >= " in printed and printed.count("\n") == 1, printed
        assert ("percentage points above" in printed) == (name == "sspp")  # what holds for so few records
    assert not (home / "ledger.sqlite").exists()
    assert pate(["learn", "exponential", *given, "--alpha", ".2"]) == 0  # promised for so many: nothing to wave through


@pytest.mark.parametrize(
    "change,message",
    [
        (["partition=add_remove"], "partition='add_remove'"),
        (["dataset.group=person"], "partition"),
        (["other.csv"], "is a second table"),
        (["--hypotheses", "thresholds"], "takes 1 feature"),
        (["privacy.budget_epsilon=.1"], "Take a smaller --epsilon"),
        (["noise=discrete"], "noise"),
    ],
)
def test_choices_that_cannot_be_are_refused_before_a_charge(change, message, home, capsys):
    given = settings(private=300)
    if change == ["dataset.group=person"]:
        header, *rows = Path("people.csv").read_text().splitlines()
        people = [f"{header},person", *(f"{row},p{number // 2}" for number, row in enumerate(rows))]
        Path("people.csv").write_text("\n".join(people))
    assert pate(["learn", "sspp", *given, *change, "--below-guarantee"]) == 2
    assert message in capsys.readouterr().err
    assert charges(home) == []


@pytest.mark.parametrize("given,message", [([], "table=None"), (["dataset=digits"], "dataset.name='digits'")])
def test_a_table_is_needed(given, message, home, capsys):
    assert pate(["learn", "sspp", *given]) == 2 and message in capsys.readouterr().err
    assert not (home / "ledger.sqlite").exists()


def test_the_sizes_are_printed_and_read_no_record(home, capsys):
    assert pate(["learn", "bounds", "--dimension", "3", "--epsilon", ".001"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[2:]] == list(ALGORITHMS)
    assert "epsilon 0.001" in lines[0] and "73,778" in lines[3] and not home.exists()
    assert pate(["learn", "bounds", "--dimension", "0"]) == 2 and "dimension=0" in capsys.readouterr().err


def test_a_sweep_is_for_public_data_and_charges_nothing(home, capsys):
    given = ["exponential", *settings(private=400), "--sweep", "epsilon=.01,4", "--repeats", "3", "--output", "out"]
    assert pate(["learn", *given]) == 2
    assert "dataset.benchmark=False: must be true for --sweep" in capsys.readouterr().err and not Path("out").exists()
    assert pate(["learn", *given, "dataset.benchmark=true"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("NOT PRIVATE") and len(re.findall(r"0\.\d{4} \(0\.\d{4} to 0\.\d{4}\)", printed)) == 4
    assert not home.exists() and {file.name for file in Path("out").iterdir()} == {"sweep.json", "sweep.svg"}


@pytest.mark.parametrize(
    "sweep,message",
    [
        *(
            (["--sweep", text], f"sweep='{text}'")
            for text in ("alpha=.1", "epsilon=a", "epsilon=1..2", "n=1.5", "n=1,")
        ),
        (["--sweep", "epsilon=0"], "epsilon=0"),
        (["--sweep", "n=401"], "n=401"),
        (["--sweep", "epsilon=1", "--repeats", "0"], "repeats=0"),
    ],
    ids=str,
)
def test_a_sweep_that_cannot_be_is_refused(sweep, message, home, capsys):
    assert pate(["learn", "exponential", *settings(private=400), *sweep, "dataset.benchmark=true"]) == 2
    assert message in capsys.readouterr().err and not home.exists() and not Path("sweep").exists()
