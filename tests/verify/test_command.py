"""``pate-verify``: it needs no package of the training side, and compares releases with a receiver's policy."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pate_torch import pipeline
from pate_torch.cli.main import main as pate
from pate_torch.mechanisms.laplace import LNMax
from pate_verify import command
from tests import ROOT
from tests.run_configs import changed
from tests.tiny_runs import tiny
from tests.verify.rewriting import rewrite

ISOLATED = """
import sys
BLOCKED = {"pate_torch", "torch", "numpy", "scipy", "yaml", "safetensors", "dp_accounting", "pandas", "sqlalchemy"}
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"No module named {name!r}")
sys.meta_path.insert(0, Refuse())
from pate_verify.command import main
sys.exit(main())
"""


def make_release(home: Path, **settings) -> Path:
    plan = changed(tiny(home), **settings)
    pipeline.run(plan)
    return plan.folder / "release"


@pytest.fixture(scope="module")
def release(tmp_path_factory) -> Path:
    return make_release(tmp_path_factory.mktemp("home"))


def verify_alone(*words: object) -> tuple[int, str]:
    """Run the verifier in a process in which nothing of the training side can be imported."""
    call = [sys.executable, "-c", ISOLATED, *map(str, words)]
    done = subprocess.run(call, cwd=ROOT / "verify", capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def test_a_gaussian_release_is_verified_to_the_end_with_mpmath_and_jsonschema_alone(release, tmp_path):
    code, text = verify_alone(release, "--ledger", release.parents[4] / "ledger.sqlite")
    assert code == 0 and "not checked" not in text and "verdict  all 14 checks passed" in text
    false = shutil.copytree(release, tmp_path / "false")
    privacy = json.loads((false / "privacy.json").read_text())
    privacy["guarantee"]["epsilon"] /= 2
    (false / "privacy.json").write_text(json.dumps(privacy))
    code, text = verify_alone(false)
    assert code == 1 and "FAILS  guarantee" in text


def test_without_the_extra_a_laplace_claim_is_not_checked_and_a_policy_may_refuse_that(tmp_path):
    release = make_release(tmp_path / "home", mechanism=LNMax(sigma=8.0))
    code, text = verify_alone(release)
    assert code == 0 and "pate-verify[losses]" in text and "ok     guarantee" not in text
    (tmp_path / "policy.yaml").write_text("require_all_checks: true\n")
    code, text = verify_alone(release, "--policy", tmp_path / "policy.yaml")
    assert code == 1 and "NOT acceptable" in text and "guarantee" in text.splitlines()[-1]
    (tmp_path / "policy.yaml").write_text("max_epsilon: 1000\nmax_delta: 1e-2\n")
    code, text = verify_alone(release, "--policy", tmp_path / "policy.yaml")
    assert code == 1 and "the check guarantee was not made" in text and text.count("FAILS  policy") == 1
    assert pate(["verify", str(release), "--policy", str(tmp_path / "policy.yaml")]) == 0  # here the extra is installed


def test_without_the_extra_a_ledger_in_a_database_is_not_checked(release, monkeypatch):
    monkeypatch.setenv("PATE_LEDGER", "postgresql+psycopg://user:secret@127.0.0.1/ledger")
    code, text = verify_alone(release, "--ledger")
    assert code == 0 and "not checked  ledger" in text and "pate-verify[losses,postgres]" in text
    assert "secret" not in text and "not checked: ledger" in text.splitlines()[-1]


def test_a_total_that_is_the_cap_is_confirmed_by_the_ledger_alone(release, tmp_path, capsys):
    false = shutil.copytree(release, tmp_path / "false")
    privacy, summary = (json.loads((false / name).read_text()) for name in ("privacy.json", "summary.json"))
    account = privacy["composition"]
    account["account_total"] = summary["epsilon_charged"] = account["account_cap"]
    account["account_route"] = "cap"
    rewrite(false, privacy)
    (false / "summary.json").write_text(json.dumps(summary))
    (tmp_path / "policy.yaml").write_text(f"max_account_epsilon: {account['account_cap']}\n")
    ledger, words = str(release.parents[4] / "ledger.sqlite"), ["--policy", str(tmp_path / "policy.yaml")]
    for options, mark, failed in (
        (words, "not checked", "files, policy"),
        ([*words, "--ledger", ledger], "ok   ", "files"),
    ):
        assert pate(["verify", str(false), *options]) == 1
        text = capsys.readouterr().out
        assert f"{mark}  account" in text and f"FAILED ({failed})" in text.splitlines()[-1]


@pytest.mark.parametrize(
    "policy,failing",
    [
        ("max_epsilon: 1000\nmax_delta: 1e-2\nadjacency: add_remove\nunit: [record, 'group:patient']\n", 0),
        ("max_epsilon: 0.001", 1),
        ("max_account_epsilon: 1000\nadjacency: replace_one", 1),
        ("unit: ['a, b', record] # a list\nadjacency: [ add_remove , 'replace_one' ]", 0),
        ("unit: group:patient  # a comment\n\n# another\nmax_delta: 1e-30", 2),
    ],
)
def test_a_policy_accepts_what_keeps_its_limits(policy, failing, release, tmp_path, capsys):
    (tmp_path / "policy.yaml").write_text(policy)
    assert pate(["verify", str(release), "--policy", str(tmp_path / "policy.yaml")]) == (failing > 0)
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("FAILS  policy") for line in lines) == failing
    assert lines[-1].startswith("verdict  NOT acceptable" if failing else "verdict  acceptable by")


@pytest.mark.parametrize(
    "text,message",
    [
        ("max_epsilon 1", "line 1 is not"),
        ("max_epsilon: 1\nmax_epsilon: 2", "line 2 is not"),
        ("max_epsilon:\n  nested: 1", "line 2 is not"),
        ("max_epsilon: {a: 1}", "line 1 is not"),
        ("unit: [record, 'group:patient]", "line 1 is not"),
        ("unit: []", "line 1 is not"),
        ("largest: 1", "policy key='largest': is unknown"),
        ("max_epsilon: true", "max_epsilon=True: must be a number"),
        ("max_epsilon: .nan", "max_epsilon='.nan': must be a number"),
    ],
)
def test_a_policy_that_could_be_misread_is_refused(text, message, release, tmp_path, capsys):
    (tmp_path / "policy.yaml").write_text(text)
    assert pate(["verify", str(release), "--policy", str(tmp_path / "policy.yaml")]) == command.EXIT_ERROR
    assert message in capsys.readouterr().err


def test_a_release_without_privacy_is_never_acceptable(tmp_path, capsys):
    release = make_release(tmp_path / "home", insecure_noise_seed=0)
    (tmp_path / "policy.yaml").write_text("max_epsilon: 1000")
    assert pate(["verify", str(release), "--policy", str(tmp_path / "policy.yaml")]) == 1
    assert "epsilon none for at most 1000" in capsys.readouterr().out
