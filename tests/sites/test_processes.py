"""Sites as separate processes with separate folders, keys and ledgers, by the commands alone."""

import csv
import json
import multiprocessing
import os
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from pate_torch.accounting.accountant import compute_guarantee
from pate_torch.accounting.events import GaussianEvent
from pate_torch.api.released import ReleasedClassifier
from pate_torch.cli.main import main
from pate_torch.privacy.ledger import open_ledger
from pate_torch.sites import training
from pate_torch.sites.joiner import Joiner
from pate_torch.synthesis.model import TableModel
from tests.sites.site_tables import CLASSES, PUBLIC, SCHEMA, make_rows

TEST_ROWS = make_rows(2000, 98)


def run(folder: Path, home: str, *commands: tuple[str, ...]) -> None:
    """Run commands in a process of its own, in this folder, with a store of its own."""

    def work() -> None:
        os.chdir(folder)
        os.environ["PATE_HOME"] = str(folder / home)
        codes = [main(command) for command in commands]
        os._exit(int(any(codes)))

    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    process.join(300)
    assert process.exitcode == 0, commands


def write_csv(path: Path, rows) -> None:
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(rows)
        writer.writerows(zip(*(column.to_pylist() for column in rows.values()), strict=True))


def release(folder: Path, kind: str, num_sites: int, colluding: int, num_rows: int = 300, num_rounds: int = 1) -> Path:
    """Make a release of several sites by the commands, and return its folder."""
    names = [f"s{number}" for number in range(num_sites)]
    for seed, name in enumerate(names):
        write_csv(folder / f"{name}.csv", make_rows(num_rows, seed))
    write_csv(folder / "public.csv", PUBLIC)
    (folder / "schema.yaml").write_text(json.dumps(SCHEMA))  # JSON is YAML
    for name in names:
        run(folder, f"home-{name}", ("site", "init", "--account", "scans", "--folder", name))
    terms = ("--colluding", str(colluding), "--classes", "3", "--max-records", "100000")
    terms += ("--teachers", "150") if kind == "votes" else ()
    run(folder, "none", ("join", "charter", *(f"{name}.key" for name in names), *terms))
    words = Joiner(folder / "join").charter.format_fingerprint()
    for name in names:
        command = ("site", "confirm", "charter.json", "--folder", name, "--cap", "1", "--heard", words)
        run(folder, f"home-{name}", command)
    public = ("--public", "public.csv")
    details = ("--schema", "schema.yaml") if kind == "marginals" else (*public, "--label", "y", "--classes", *CLASSES)
    if kind in ("histogram", "votes"):
        details += ("--questions", "20")
    if kind == "gradients":
        details += ("--steps", str(num_rounds))
    if kind == "votes":
        details += ("--teacher", "optimizer=ridge", "weight_decay=1")
    run(folder, "none", ("join", "keys", *(f"{name}.confirmed" for name in names)))
    for slot in range(num_rounds):
        run(folder, "none", ("join", "ask", kind, "--epsilon", "0.5", *details))
        files = ("--sum", f"join/sum-{slot - 1}.json") if slot else ("--keys", "keys.json")
        for name in names:
            command = ("site", "answer", f"join/round-{slot}.json", "--folder", name, *files)
            run(folder, f"home-{name}", (*command, "--data", f"{name}.csv"))
        run(folder, "none", ("join", "sum", *(f"{name}.answer-{slot}.pate" for name in names)))
    run(folder, "none", ("join", "train", *public, "--out", "release"))
    assert not (folder / "none" / "ledger.sqlite").exists()  # the joiner has no account
    for name in names:
        with open_ledger(folder / f"home-{name}", readonly=True) as ledger:
            charges = ledger.get_charges("scans").values()
            events = [event for charge in charges for event in charge.reserved_events]
            assert len(charges) == num_rounds and 0.499 < compute_guarantee(events, 1e-5).epsilon <= 0.5
        assert (folder / f"{name}.answer-0.pate").stat().st_size < 100_000
    return folder / "release"


def compute_accuracy(predict) -> float:
    columns = {name: column.to_pylist() for name, column in TEST_ROWS.items() if name != "y"}
    return float(np.mean(np.asarray(predict(columns)) == np.array(TEST_ROWS["y"].to_pylist())))


def check_against_one_curator(folder: Path, num_sites: int, num_rows: int = 300) -> None:
    """Compare with one curator who holds all records and adds noise of the same size to the same table."""
    accuracy = compute_accuracy(ReleasedClassifier.load(folder / "release").predict)
    noisy = Joiner(folder / "join").load_sum()
    tables = [noisy.kind.read_records(make_rows(num_rows, seed), "record") for seed in range(num_sites)]
    exact = sum(noisy.kind.count(records, "add_remove").numbers for records in tables) / noisy.kind.unit_length
    random, accuracies = np.random.default_rng(0), []
    for _ in range(20):
        numbers = exact + random.normal(scale=noisy.sigma, size=exact.shape)
        student = training.train_student(replace(noisy, numbers=numbers), PUBLIC)
        columns = {name: column for name, column in TEST_ROWS.items() if name != "y"}
        x = torch.from_numpy(student.spec.schema.encode(columns))
        names = np.array(student.class_names)[student.predict(x).numpy()]
        accuracies.append(float(np.mean(names == np.array(TEST_ROWS["y"].to_pylist()))))
    mean, sd = np.mean(accuracies), np.std(accuracies)
    assert mean > 0.8, "a table that is mostly noise shows nothing"
    assert abs(accuracy - mean) < 5 * sd + 0.005, (accuracy, mean, sd)
    wrong = training.train_student(replace(noisy, numbers=-exact), PUBLIC)
    x = torch.from_numpy(wrong.spec.schema.encode(columns))
    assert np.mean(np.array(wrong.class_names)[wrong.predict(x).numpy()] == np.array(TEST_ROWS["y"].to_pylist())) < 0.6


@pytest.mark.parametrize("kind", ["class_sums", "histogram"])
def test_three_sites_are_as_accurate_as_one_curator(tmp_path, kind):
    folder = release(tmp_path, kind, num_sites=3, colluding=1)
    check_against_one_curator(tmp_path, 3)
    assert main(("verify", str(folder))) == 0
    statement = (folder / "README.md").read_text()
    assert "Trust: distributed, t = 1 of 3." in statement
    assert "| This release alone | 0.500 |" in statement and "| Against 2 sites |" in statement
    assert "aborted rounds included" in statement and "declared, not checked" in statement
    trust = json.loads((folder / "privacy.json").read_text())["trust"]
    assert trust["colluding"] == 1 and [price["colluding"] for price in trust["prices"]] == [0, 1, 2]
    epsilons = [price["epsilon"] for price in trust["prices"]]
    assert epsilons[0] < epsilons[1] <= 0.5 < epsilons[2]


def test_three_sites_take_three_steps_of_gradient_descent(tmp_path):
    folder = release(tmp_path, "gradients", num_sites=3, colluding=1, num_rounds=3)
    accuracy = compute_accuracy(ReleasedClassifier.load(folder).predict)
    assert accuracy > 0.8
    assert main(("verify", str(folder))) == 0
    statement = (folder / "README.md").read_text()
    assert "| This release alone | 0.500 |" in statement and "Trust: distributed, t = 1 of 3." in statement
    rounds = {f"{name}-{slot}.json" for name in ("round", "sum") for slot in range(3)}
    assert {path.name for path in folder.iterdir()} >= {"charter.json", "round-0.public", *rounds}
    joiner = Joiner(tmp_path / "join")  # a third step from the first sum alone would be another model
    assert len({joiner.load_sum(slot).numbers.tobytes() for slot in range(3)}) == 3
    assert joiner.load_sum(1).kind.weight_DC is not None and joiner.load_sum(0).kind.weight_DC is None


def test_ten_sites_and_three_who_collude(tmp_path):
    folder = release(tmp_path, "class_sums", num_sites=10, colluding=3, num_rows=100)
    check_against_one_curator(tmp_path, 10, 100)
    assert "Trust: distributed, t = 3 of 10." in (folder / "README.md").read_text()
    prices = json.loads((folder / "privacy.json").read_text())["trust"]["prices"]
    # Of epsilon .5 against three sites: .41 for who sees results only, .60, .79 and 1.45 against 5, 7 and 9 (rounded).
    expected = {0: 0.41, 3: 0.5, 5: 0.6, 7: 0.79, 9: 1.45}
    for colluding, epsilon in expected.items():
        assert prices[colluding]["epsilon"] == pytest.approx(epsilon, abs=0.011)
        honest = 10 - colluding  # the price of Gaussian noise of so many shares
        base = GaussianEvent(mu=_find_mu(0.5) * (7 / honest) ** 0.5)
        assert prices[colluding]["epsilon"] == pytest.approx(compute_guarantee([base], 1e-5).epsilon, rel=1e-4)


def _find_mu(epsilon: float) -> float:
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        is_cheap = compute_guarantee([GaussianEvent(mu=middle)], 1e-5).epsilon <= epsilon
        low, high = (middle, high) if is_cheap else (low, middle)
    return low


def test_votes_of_teachers_of_three_sites_teach_a_student(tmp_path):
    folder = release(tmp_path, "votes", num_sites=3, colluding=1, num_rows=600)
    assert Joiner(tmp_path / "join").charter.terms.teachers == (150, 150, 150)
    assert compute_accuracy(ReleasedClassifier.load(folder).predict) > 0.85
    assert main(("verify", str(folder))) == 0
    assert "Trust: distributed, t = 1 of 3." in (folder / "README.md").read_text()


@pytest.mark.parametrize("name", ["confident", "interactive", "single_stable"])
def test_a_mechanism_that_needs_a_maximum_is_refused_with_the_reason(tmp_path, monkeypatch, capsys, name):
    monkeypatch.chdir(tmp_path)
    assert main(("join", "ask", name, "--epsilon", "1")) == 2
    error = capsys.readouterr().err
    assert "needs a maximum of the raw sum or the raw votes" in error and error.count("\n") == 1


def test_marginals_become_a_synthetic_table(tmp_path):
    folder = release(tmp_path, "marginals", num_sites=3, colluding=1)
    model = TableModel.load(folder / "synthesizer.safetensors")
    assert 700 < model.size < 1100  # 900 records
    with open(folder / "synthetic.csv") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == model.size and set(rows[0]) == {"f0", "f1", "y"}
    share = np.mean([row["y"] == "a" for row in rows])
    assert 0.2 < share < 0.5
    assert "Trust: distributed" in (folder / "README.md").read_text() and main(("verify", str(folder))) == 0


def test_a_wrong_file_gives_one_line_and_exit_code_2(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATE_HOME", str(tmp_path / "home"))
    (tmp_path / "wrong.json").write_text("nothing")
    assert main(("site", "init", "--account", "scans", "--folder", "s")) == 0
    for command in (
        ("site", "init", "--account", "scans", "--folder", "s"),
        ("site", "confirm", "wrong.json", "--folder", "s", "--cap", "1", "--heard", "no"),
        ("site", "answer", "wrong.json", "--folder", "s", "--data", "none.csv"),
        ("site", "answer", "wrong.json", "--folder", "empty", "--data", "none.csv"),
        ("join", "charter", "wrong.json", "--colluding", "0", "--max-records", "10"),
        ("join", "keys", "wrong.json"),
        ("join", "sum", "missing.pate"),
        ("join", "train", "--out", "release"),
    ):
        capsys.readouterr()
        assert main(command) == 2, command
        error = capsys.readouterr().err
        assert error.startswith("error: ") and error.count("\n") == 1, error


def test_settings_that_are_not_yaml_give_one_line_and_exit_code_2(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATE_HOME", str(tmp_path / "home"))
    (tmp_path / "schema.yaml").write_text("columns: [")
    (tmp_path / "public.csv").write_text("f,y\n1,a\n2,b\n")
    for name in ("s", "t"):
        assert main(("site", "init", "--account", "scans", "--folder", name)) == 0
    assert main(("join", "charter", "s.key", "t.key", "--colluding", "0", "--max-records", "10")) == 0
    votes = ("votes", "--public", "public.csv", "--label", "y", "--classes", "a", "b", "--teacher", "steps=[")
    for words, expected in (
        (("marginals", "--schema", "schema.yaml"), "cannot be read"),
        (votes, "--teacher='steps=['"),
    ):
        capsys.readouterr()
        assert main(("join", "ask", *words, "--epsilon", "1")) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ") and expected in error and error.count("\n") == 1, error


def test_without_cryptography_the_extra_is_named(monkeypatch, capsys, tmp_path):
    for name in [
        name for name in sys.modules if name.startswith(("pate_torch.sites.", "pate_torch.cli.site", "cryptography"))
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "cryptography", None)
    assert main(("site", "init", "--account", "scans", "--folder", str(tmp_path / "s"))) == 2
    assert "pate-torch[sites]" in capsys.readouterr().err
