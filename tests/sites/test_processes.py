"""Sites as separate processes with separate folders, keys and ledgers, by the commands alone."""

import csv
import json
import multiprocessing
import os
import sys
from pathlib import Path

import numpy as np
import pytest

from pate_torch.accounting.accountant import compute_guarantee
from pate_torch.api.released import ReleasedClassifier
from pate_torch.cli.main import main
from pate_torch.sites.joiner import Joiner
from pate_torch.sites.keys import SiteState
from pate_torch.sites.site import Site
from pate_torch.synthesis.model import TableModel
from tests.sites.site_tables import CLASSES, PUBLIC, SCHEMA, get_charges, make_rows, write_csv


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


def release(
    folder: Path, kind: str, num_sites: int = 3, colluding: int = 1, num_rows: int = 300, num_rounds: int = 1
) -> Path:
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
        charges = get_charges(Site(SiteState(folder / name), folder / f"home-{name}"))
        events = [event for charge in charges for event in charge.reserved_events]
        assert len(charges) == num_rounds and 0.499 < compute_guarantee(events, 1e-5).epsilon <= 0.5
        assert (folder / f"{name}.answer-0.pate").stat().st_size < 100_000
    return folder / "release"


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("histogram", {}),
        ("gradients", {"num_rounds": 2}),
        ("votes", {"num_rows": 600}),
        pytest.param(
            "class_sums", {"num_sites": 10, "colluding": 3, "num_rows": 100}, marks=pytest.mark.slow(reason="ten sites")
        ),
    ],
)
def test_sites_release_a_student(tmp_path, kind, options):
    folder, joiner = release(tmp_path, kind, **options), Joiner(tmp_path / "join")
    test_rows = {name: column.to_pylist() for name, column in make_rows(2000, 98).items()}
    truth = np.array(test_rows.pop("y"))
    assert np.mean(np.asarray(ReleasedClassifier.load(folder).predict(test_rows)) == truth) > 0.8
    assert main(("verify", str(folder))) == 0
    statement, terms = (folder / "README.md").read_text(), joiner.charter.terms
    assert f"Trust: distributed, t = {terms.colluding} of {len(terms.records)}." in statement
    assert "| This release alone | 0.500 |" in statement and f"| Against {len(terms.records) - 1} sites |" in statement
    assert "aborted rounds included" in statement and "declared, not checked" in statement
    slots = range(options.get("num_rounds", 1))
    names = {f"{name}-{slot}.json" for name in ("round", "sum") for slot in slots}
    assert {path.name for path in folder.iterdir()} >= {"charter.json", "round-0.public", *names}
    if kind == "gradients":
        assert joiner.load_sum(1).kind.weight_DC is not None and joiner.load_sum(0).kind.weight_DC is None
    if kind == "votes":
        assert terms.teachers == (150, 150, 150)


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


def check_refusal(capsys, expected, *command):
    capsys.readouterr()
    assert main(command) == 2, command
    error = capsys.readouterr().err
    assert error.startswith("error: ") and expected in error and error.count("\n") == 1, error


def test_wrong_files_and_settings_give_one_line_and_exit_code_2(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATE_HOME", str(tmp_path / "home"))
    (tmp_path / "wrong.json").write_text("nothing")
    (tmp_path / "schema.yaml").write_text("columns: [")
    (tmp_path / "public.csv").write_text("f,y\n1,a\n2,b\n")
    for name in ("s", "t"):
        assert main(("site", "init", "--account", "scans", "--folder", name)) == 0
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
        check_refusal(capsys, "", *command)
    assert main(("join", "charter", "s.key", "t.key", "--colluding", "0", "--max-records", "10")) == 0
    check_refusal(capsys, "cannot be read", "join", "ask", "marginals", "--schema", "schema.yaml", "--epsilon", "1")
    votes = ("--public", "public.csv", "--label", "y", "--classes", "a", "b", "--teacher", "steps=[", "--epsilon", "1")
    check_refusal(capsys, "--teacher='steps=['", "join", "ask", "votes", *votes)
    for name in ("confident", "interactive", "single_stable"):
        problem = "needs a maximum of the raw sum or the raw votes"
        check_refusal(capsys, problem, "join", "ask", name, "--epsilon", "1")


def test_without_cryptography_the_extra_is_named(monkeypatch, capsys, tmp_path):
    for name in [
        name for name in sys.modules if name.startswith(("pate_torch.sites.", "pate_torch.cli.site", "cryptography"))
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "cryptography", None)
    assert main(("site", "init", "--account", "scans", "--folder", str(tmp_path / "s"))) == 2
    assert "pate-torch[sites]" in capsys.readouterr().err
