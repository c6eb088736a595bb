"""``pate synthesize``: a table of a file is released, and a wrong argument is refused before a charge."""

import csv
import re

import numpy as np
import pandas as pd
import pytest

from pate_torch.cli.main import main as pate


def write_patients(file, units):
    draw = np.random.default_rng(0)
    age = draw.integers(0, 100, len(units))
    ill = np.where(age + draw.normal(0, 20, len(units)) > 60, "yes", "no")
    with open(file, "w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(["patient", "sex", "age", "ill"])
        writer.writerows(zip(units, draw.choice(["f", "m"], len(units)), age, ill, strict=True))


@pytest.fixture
def synthesize(tmp_path, monkeypatch):
    """Call the command on 2,000 rows of at most 1,500 patients, with columns of 100 public rows."""
    monkeypatch.setenv("PATE_HOME", str(tmp_path / "home"))
    write_patients(tmp_path / "patients.csv", np.random.default_rng(1).integers(0, 1500, 2000))
    write_patients(tmp_path / "public.csv", np.arange(100))

    def call(*arguments):
        given = ["synthesize", str(tmp_path / "patients.csv"), "--epsilon", "1", "--account", "clinic"]
        return pate([*given, "--public", str(tmp_path / "public.csv"), "--target", "ill", *arguments])

    return call


def test_a_table_with_a_column_of_patients_is_released(synthesize, tmp_path, capsys):
    assert synthesize("--group", "patient", "--out", str(tmp_path / "out")) == 0
    told = capsys.readouterr()
    assert "unit group" in told.out and "synthetic rows" in told.out
    with open(tmp_path / "out" / "synthetic.csv", newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert list(rows[0]) == ["sex", "age", "ill"]
    assert sum(row["ill"] in ("yes", "no") for row in rows) > 0.95 * len(rows)  # the others are missing, or unseen
    assert 1000 < len(rows) < 1300  # about 1,105 of the 1,500 patients have a row, counted with noise


def test_floating_point_ids_of_patients_are_refused_before_a_charge(synthesize, tmp_path, capsys):
    """One missing or odd id of a Parquet file makes floats of all, which merge the units of long ids."""
    table, file = pd.read_csv(tmp_path / "patients.csv"), tmp_path / "patients.parquet"
    given = ["--schema", str(tmp_path / "schema.yaml"), "--group", "patient", "--out", str(tmp_path / "out")]
    columns = "sex: {type: category, values: [f, m]}\n  ill: {type: category, values: ['yes', 'no']}\n"
    (tmp_path / "schema.yaml").write_text(f"target: ill\ncolumns:\n  {columns}")
    call = ["synthesize", str(file), "--epsilon", "1", "--account", "clinic", *given]
    table.drop(columns="age").assign(patient=2.0**60 + table.patient).to_parquet(file, index=False)
    assert pate(call) == 2 and "must hold ids of one type" in capsys.readouterr().err
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob("home/*clinic*"))
    table.drop(columns="age").assign(patient=2**60 + table.patient).to_parquet(file, index=False)
    assert pate(call) == 0


def test_a_wrong_argument_is_refused_before_a_charge(synthesize, tmp_path, capsys):
    assert synthesize("--group", "ward", "--out", str(tmp_path / "out")) == 2
    assert "--group='ward': must be one of age, ill, patient, sex" in capsys.readouterr().err
    (tmp_path / "link.csv").symlink_to(tmp_path / "patients.csv")
    assert synthesize("--public", str(tmp_path / "link.csv"), "--out", str(tmp_path / "out")) == 2
    assert "link.csv': is the private table" in capsys.readouterr().err
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    assert synthesize("--out", str(tmp_path / "full")) == 2
    assert "--out" in capsys.readouterr().err
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob("home/*clinic*"))


def test_a_refusal_names_the_options_of_the_command(synthesize, tmp_path, capsys):
    out = ("--out", str(tmp_path / "out"))
    (tmp_path / "two.csv").write_text("a;b\n1,5;2\n")
    (tmp_path / "other.csv").write_text("age,ill,town\n" + "1,yes,a\n2,no,b\n" * 20)
    (tmp_path / "schema.yaml").write_text("columns: {age: {type: boolean}, ill: {type: boolean}}")
    for arguments, message in {
        ("--public", str(tmp_path / "two.csv")): "line 2 has 2 fields.* set --separator",
        ("--public", str(tmp_path / "other.csv")): r"^error: table=\['patient'.*lacks the columns town",
        ("--schema", str(tmp_path / "schema.yaml")): "^error: --schema='PosixPath': cannot be combined with public",
        ("--target", "town"): "^error: --target='town'",
    }.items():
        assert synthesize(*arguments, *out) == 2
        assert re.search(message, capsys.readouterr().err)
    assert synthesize("--group", "patient", *out) == 0
    for name, option in {"clinic": "--allow-refit", "other": "--allow-duplicate-account"}.items():
        assert synthesize("--group", "patient", "--account", name, "--out", str(tmp_path / name)) == 2
        message = capsys.readouterr().err
        assert option in message and "=True" not in message
    assert synthesize("--account", "other", "--allow-duplicate-account", "--out", str(tmp_path / "other")) == 0
