"""owner.yaml: what it says is published as it stands, what it leaves out is missing, what it gets wrong is refused."""

import json
from dataclasses import asdict

import pytest

from pate_torch import pipeline
from pate_torch.cli.main import main as pate
from pate_torch.features.fourier import FourierFeatures
from pate_torch.privacy.ledger import Ledger
from pate_torch.privacy.records import PublicAsset
from pate_torch.release import owner_file, statement
from pate_torch.release.owner_file import OwnerFacts
from pate_torch.release.renderer import build_statement, render_model_card
from pate_verify.command import verify_release
from tests.release.reporting_demo import demo
from tests.tiny_runs import again, tiny

SAID = """
blobs:
  contact: "desk <b>3</b>"
  period: 2026
  consent: 2026-11-23
  tuning: none
  pool: {name: clouds, licence: CC0-1.0, source: drawn}
  audit: audit.json
other:
  contact: somebody else
"""


def test_what_is_said_of_an_account_is_its_own(tmp_path):
    (tmp_path / "owner.yaml").write_text(SAID.replace("  audit: audit.json\n", ""))
    found = owner_file.read(tmp_path, "blobs")
    assert (found.contact, found.period, found.consent) == ("desk <b>3</b>", "2026", "2026-11-23")
    assert owner_file.read(tmp_path, "other") == OwnerFacts(contact="somebody else")
    assert owner_file.read(tmp_path, "nobody") == owner_file.read(tmp_path / "nowhere", "blobs") == OwnerFacts()
    (tmp_path / "owner.yaml").write_text("# nothing yet\n")
    assert owner_file.read(tmp_path, "blobs") == OwnerFacts()


@pytest.mark.parametrize(
    "text,named",
    [
        ("blobs: {contct: x}", "contct"),
        ("blobs: {tuning: guessed}", "tuning"),
        ("blobs: {pool: {license: x}}", "license"),
        ("blobs: {pool: clouds}", "pool"),
        ("blobs: {contact: [a, b]}", "contact"),
        ("blobs: {contact: ''}", "contact"),
        ("blobs: {audit: nowhere.json}", "audit"),
        ("- blobs", "owner.yaml"),
        ("blobs: {", "owner"),
        ("blobs: 3", "blobs"),
    ],
)
def test_an_entry_that_cannot_be_read_is_refused(text, named, tmp_path):
    (tmp_path / "owner.yaml").write_text(text)
    with pytest.raises(ValueError, match=named):
        owner_file.read(tmp_path, "blobs")


def test_an_entry_that_cannot_be_read_stops_a_run_before_it_is_charged(tmp_path):
    (tmp_path / "owner.yaml").write_text("blobs: {contct: x}")
    with pytest.raises(ValueError, match="contct"):
        pipeline.run(tiny(tmp_path))
    assert not (tmp_path / "ledger.sqlite").exists() or not Ledger(tmp_path / "ledger.sqlite").list_accounts()


class Named(FourierFeatures):
    """Features that say what they were made from."""

    asset = PublicAsset(role="encoder", name="waves", sha256="a" * 64, licence="MIT", trained_on="nothing")


def test_a_release_tells_it_and_what_is_missing(tmp_path, capsys):
    assert pate(["audit", "mechanism=gaussian", "--runs", "200", "--output", str(tmp_path / "audit.json")]) == 0
    (tmp_path / "owner.yaml").write_text(SAID)
    plan = again(tiny(tmp_path), "named", features=Named(width=8))
    report, release = pipeline.run(plan), plan.folder / "release"
    said = json.loads((release / "privacy.json").read_text())
    assert said["owner"]["contact"] == "desk <b>3</b>" and said["tuning"]["parameters"] == "none"
    assert said["missing"] == ["Collection", "Access", "Retention", "Renewal of the cap", "Encoder"]
    pool, encoder = said["public_assets"]
    assert (pool["name"], pool["licence"], pool["role"]) == ("clouds", "CC0-1.0", "public points") and pool["sha256"]
    assert encoder == asdict(Named.asset) and "waves; license: MIT" in (release / "report.html").read_text()
    found = said["verification"]["audit"]
    assert found["mechanism"] == "gaussian" and found["sound"] and found["runs"] == 200 and found["version"]
    text = (release / "README.md").read_text()
    assert "&lt;b&gt;3" in text and "<b>3" not in text
    assert "source of the encoder. The owner can add them: pate owner blobs" in text
    assert "no fault found" in text and text == render_model_card(report)
    assert all(check.is_ok for check in verify_release(plan.folder, tmp_path / "ledger.sqlite"))


def test_an_audit_of_another_mechanism_is_not_this_one_s():
    assert build_statement(demo())["verification"]["audit"]["proven"] == 2.39
    assert build_statement(demo(mechanism="laplace"))["verification"]["audit"] is None
    assert "Audit" in build_statement(demo(mechanism="laplace"))["missing"]


def test_nothing_said_is_shown_as_missing_everywhere():
    bare = demo(owner=OwnerFacts(), assets=())
    assert set(statement.list_owner_statements(bare).values()) == {statement.NOT_STATED}
    missing = build_statement(bare)["missing"]
    assert missing == list(statement.list_owner_statements(bare))
    text = render_model_card(bare)
    assert "| Not stated | " + ", ".join(name.lower() for name in statement.list_owner_statements(bare)) in text
    assert text.count(statement.NOT_STATED) == 1  # how the release was chosen


def test_the_dialogue_writes_what_the_next_release_publishes(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATE_HOME", str(tmp_path))
    (tmp_path / "owner.yaml").write_text("other: {contact: somebody}\nblobs: {contact: desk, period: 2026}\n")
    replies = iter(["", "at one clinic", "", "", "", "2027", "", "guessed", "public"])
    monkeypatch.setattr("builtins.input", lambda _: next(replies))
    assert pate(["owner", "blobs"]) == 2 and "must be a terminal" in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    assert pate(["owner", "blobs"]) == 0
    assert "error: tuning='guessed'" in capsys.readouterr().out
    found = owner_file.read(tmp_path, "blobs")
    stated = OwnerFacts(contact="desk", collection="at one clinic", period="2027", tuning="public")
    assert found == stated and owner_file.read(tmp_path, "other") == OwnerFacts(contact="somebody")
