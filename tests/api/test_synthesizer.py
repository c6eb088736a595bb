"""``TabularSynthesizer``: what is charged, what is counted, what is published, and fits that are interrupted."""

import csv
import hashlib
import json
import signal

import numpy as np
import pandas as pd
import pytest
import torch

from pate_torch import TabularSynthesizer
from pate_torch.accounting.accountant import compute_guarantee
from pate_torch.core import files
from pate_torch.methods import synthetic
from pate_torch.privacy.accounts import BudgetExceeded
from pate_torch.privacy.domain import TableDomain
from pate_torch.privacy.ledger import Ledger
from pate_torch.release.store import TABLE_FILE_NAME
from pate_torch.session import ReleaseStopped
from pate_torch.synthesis.mixture import fit_mixture
from pate_torch.synthesis.model import TableModel
from pate_verify.command import verify_release
from tests import killed_runs

SCHEMA = {
    "target": "ill",
    "columns": {
        "age": {"type": "integer", "low": 0, "high": 100, "bins": 4},
        "ward": {"type": "category", "values": ["a", "b"]},
        "ill": {"type": "boolean"},
    },
}
DOMAIN = TableDomain.from_dict(SCHEMA)


def draw_table(count=800, seed=0):
    draw = np.random.default_rng(seed)
    ages, wards = draw.integers(0, 101, count), draw.choice(["a", "b"], count)
    ill = (ages > 50) ^ (wards == "a")
    secret = [f"secret-{value}" for value in draw.integers(10**9, 10**10, count)]
    return pd.DataFrame({"age": ages, "ward": wards, "ill": ill, "note": secret})


TABLE = draw_table()


@pytest.fixture(autouse=True)
def short_fits(monkeypatch):
    """Fit small mixtures in a few steps."""

    def fit(*given, **options):
        return fit_mixture(*given, **(options | {"num_components": 8, "steps": 4}))

    monkeypatch.setattr(synthetic, "fit_mixture", fit)


@pytest.fixture
def fit(tmp_path):
    def fit(table=TABLE, groups=None, epsilon=1.0, **changes):
        given = {"account": "clinic", "schema": SCHEMA, "home": tmp_path, "verbose": False}
        return TabularSynthesizer(epsilon, **(given | changes)).fit(table, groups=groups)

    return fit


def read_charges(home):
    if not (home / "ledger.sqlite").exists():
        return []
    with Ledger(home / "ledger.sqlite", create=False) as ledger:
        return list(ledger.get_charges("clinic").values()) if ledger.list_accounts() else []


def read_entries(home, kind):
    with Ledger(home / "ledger.sqlite", create=False) as ledger:
        return [entry.facts for entry in ledger.read_entries() if entry.kind == kind]


def watch_values(monkeypatch):
    """Collect the sensitive values that are opened."""
    values, inner = [], synthetic.open_counts

    def watched(value, mechanism, spending):
        values.append(value)
        return inner(value, mechanism, spending)

    monkeypatch.setattr(synthetic, "open_counts", watched)
    return values


# ---- charges -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("adjacency,noise,rounds", [("add_remove", "torch", 0), ("replace_one", "discrete", 2)])
def test_a_fit_is_charged_the_events_of_its_method_and_epsilon(fit, tmp_path, adjacency, noise, rounds):
    fitted = fit(adjacency=adjacency, noise=noise, rounds=rounds)
    (charge,), (reserve,), (commit,) = (
        read_charges(tmp_path), read_entries(tmp_path, "reserve"), read_entries(tmp_path, "commit")
    )  # fmt: skip
    cost = compute_guarantee(charge.reserved_events, 1e-5).epsilon
    assert cost == pytest.approx(1.0, rel=1e-6) and cost <= 1 + 1e-12
    assert compute_guarantee(charge.incurred_events, 1e-5).epsilon <= cost and charge.is_committed
    assert commit["scalar"] <= reserve["scalar"] and commit["scalar"] == pytest.approx(reserve["scalar"], rel=1e-9)
    assert {event["kind"] for event in reserve["events"]} == {"gaussian" if noise == "torch" else "zcdp"}
    assert sum(e["count"] for e in reserve["events"]) == 2 + rounds == sum(e["count"] for e in commit["events"])
    guarantee = fitted.privacy_["guarantee"]
    assert guarantee["epsilon"] == pytest.approx(cost) and guarantee["adjacency"] == adjacency
    for key, name in {"synthesizer_sha256": TABLE_FILE_NAME, "first_answers_sha256": "first_answers.json"}.items():
        assert commit[key] == hashlib.sha256((fitted.release_ / name).read_bytes()).hexdigest()


@pytest.mark.parametrize("adjacency", ["add_remove", "replace_one"])
def test_every_record_is_counted_once_in_every_table_and_round(fit, monkeypatch, adjacency):
    values, codes_NJ = watch_values(monkeypatch), DOMAIN.encode(TABLE)
    fit(adjacency=adjacency, rounds=2)
    counts, tables, *votes = values
    assert counts.counts_M.tolist() == np.bincount(codes_NJ[:, 2], minlength=3).tolist()
    assert int(tables.counts_M.sum()) % len(TABLE) == 0 and len(votes) == 2
    assert [int(value.counts_QC.sum()) for value in votes] == [len(TABLE)] * 2


def test_one_row_of_each_unit_is_counted(fit, monkeypatch):
    """Units of one to nine rows with ids of any order; a further row of a unit changes nothing."""
    values = watch_values(monkeypatch)
    units = np.random.default_rng(0).integers(0, 150, len(TABLE))
    first_rows = np.unique(units, return_index=True)[1]
    fit(groups=pd.Series([f"p{u}" for u in units], name="person"), epsilon=4.0, rounds=1)
    codes_NJ = DOMAIN.encode(TABLE)[first_rows]
    counts, tables, votes = values
    assert counts.counts_M.tolist() == np.bincount(codes_NJ[:, 2], minlength=3).tolist()
    assert int(tables.counts_M.sum()) % len(first_rows) == 0 and int(votes.counts_QC.sum()) == len(first_rows)
    values.clear()
    longer, last = pd.concat([TABLE, TABLE[:5]]), np.append(units, units[-5:])
    fit(longer, groups=pd.Series([f"p{u}" for u in last], name="person"), account="second",
        epsilon=4.0, rounds=1, allow_duplicate_account=True)  # fmt: skip
    assert values[0].counts_M.tolist() == counts.counts_M.tolist()
    values.clear()
    named = TABLE.assign(person=[f"p{u}" for u in units])
    fitted = fit(named, groups="person", account="third", epsilon=4.0, rounds=1, allow_duplicate_account=True)
    assert values[0].counts_M.tolist() == counts.counts_M.tolist()
    assert fitted.privacy_["guarantee"]["unit"] == "group:person"
    with pytest.raises(ValueError, match="groups='ward': must be one of note, person"):
        fit(named, groups="ward", account="fourth")


def test_a_table_without_signal_stops_after_the_first_counts_which_alone_are_charged(fit, tmp_path):
    terms = {"adjacency": "replace_one"}  # the number of records is public, so no noise decides whether the fit stops
    with pytest.raises(ReleaseStopped, match=r"only the counts are charged.*column with the most codes") as stopped:
        fit(TABLE[:20], epsilon=0.5, **terms)
    (charge,) = read_charges(tmp_path)
    assert read_entries(tmp_path, "commit")[0]["reservation"] == stopped.value.reservation_id
    assert charge.is_committed and charge.incurred_events == charge.reserved_events[:1]
    assert not list(tmp_path.rglob("synthe*"))
    with pytest.raises(ValueError, match=r"has been charged already.*allow_refit=True"):
        fit(TABLE, epsilon=2.0, **terms)
    fit(TABLE, epsilon=2.0, allow_refit=True, **terms)
    charges = read_charges(tmp_path)
    assert len(charges) == 2 and len(charges[1].incurred_events) == 2
    with pytest.raises(ValueError, match="has been charged already"):
        fit(TABLE, epsilon=2.0, **terms)


def test_a_stop_can_be_passed_over(fit, tmp_path):
    fitted = fit(TABLE[:20], epsilon=0.5, spend_anyway=True)
    assert fitted.model_.size >= 1 and len(read_charges(tmp_path)[0].incurred_events) == 2


def test_the_account_is_guarded_by_its_cap_and_against_a_second_fit(fit, tmp_path):
    fit(cap=2.0)
    with pytest.raises(ValueError, match="has been charged already"):
        fit(draw_table(seed=3))
    with pytest.raises(BudgetExceeded, match="cap 2"):
        fit(epsilon=2.0, allow_refit=True)
    assert len(read_charges(tmp_path)) == 1
    second = fit(allow_refit=True)
    assert second.total_.epsilon > 1.3 and len(read_charges(tmp_path)) == 2
    with pytest.raises(ValueError, match="other"):  # the same records under another name
        fit(account="other")


PUBLIC_ROWS = {
    "the table": lambda x: x,
    "a slice": lambda x: x[:300],
    "columns of its memory": lambda x: {name: x[name].to_numpy()[:300] for name in x},
    "copied rows": lambda x: x[:300].copy(),
    "some copied rows": lambda x: pd.concat([x[:60].copy(), WEIGHED[700:]]),
}
WEIGHED = TABLE[["age", "ward", "ill"]].assign(weight=np.random.default_rng(5).normal(70, 9, len(TABLE)))


@pytest.mark.parametrize("form", [pd.DataFrame, lambda x: {name: x[name] for name in x}], ids=["frame", "columns"])
@pytest.mark.parametrize("part", PUBLIC_ROWS)
def test_private_rows_are_refused_as_public_rows(fit, tmp_path, part, form):
    private = form(WEIGHED[:700])
    public = PUBLIC_ROWS[part](private if part == "the table" else WEIGHED[:700])
    if part == "some copied rows":
        fit(private, schema=None, public=public, spend_anyway=True)  # 60 of 160 rows
        public = WEIGHED[550:]  # 150 of 250 rows
    with pytest.raises(ValueError, match=r"public=.*holds records of X: public points are published"):
        fit(private, schema=None, public=public, account="second", allow_duplicate_account=True)
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        assert "second" not in [account.name for account in ledger.list_accounts()]


def test_public_rows_that_equal_private_rows_by_chance_are_allowed(fit):
    rows = TABLE.assign(age=TABLE.age // 20)[["age", "ward", "ill"]]
    assert fit(rows[:700], schema=None, public=rows[700:].copy(), spend_anyway=True).model_.size > 0


@pytest.mark.parametrize(
    "changes,words",
    [
        ({"account": None}, "account=None"),
        ({"schema": None}, "schema=None.*or else public"),
        ({"public": TABLE}, "schema='.*': cannot be combined with public.* Pass only one"),
        ({"epsilon": 0}, "epsilon=0"),
        ({"rounds": -1}, "rounds=-1"),
        ({"noise": "none"}, "noise='none'"),
        ({"allow_refit": "no"}, "allow_refit='no': must be true or false"),
        ({"callback": 5}, "callback=5: must be a function"),
        ({"adjacency": "both"}, "adjacency='both'"),
        ({"delta": 1.0}, "delta=1.0"),
        ({"target": "note"}, "target='note'"),
        ({"num_records_about": 2.5}, "num_records_about=2.5"),
        ({"schema": "nowhere.yaml"}, "schema='nowhere.yaml'"),
        ({"table": TABLE.drop(columns="ward")}, "lacks the columns ward"),
        ({"table": TABLE[["age", "ward", "ill"]].to_numpy()}, "X='ndarray'"),
        ({"groups": ["a"]}, "groups"),
    ],
)
def test_a_wrong_argument_is_refused_by_name_and_nothing_is_charged(fit, tmp_path, changes, words):
    with pytest.raises(ValueError, match=words):
        fit(**changes)
    assert not read_charges(tmp_path)


def test_a_schema_file_is_read_and_a_damaged_one_is_refused(fit, tmp_path):
    (tmp_path / "schema.yaml").write_text(json.dumps(SCHEMA))
    (tmp_path / "damaged.yaml").write_text("columns: {age: [")
    with pytest.raises(ValueError, match=r"schema=.*damaged\.yaml.*cannot be read"):
        fit(schema=tmp_path / "damaged.yaml")
    assert fit(schema=tmp_path / "schema.yaml").domain_ == DOMAIN


# ---- the release -------------------------------------------------------------------------------------------------


def test_the_folder_holds_the_table_and_no_private_value(fit, tmp_path):
    fitted = fit(rounds=1, epsilon=4.0)
    names = {file.relative_to(fitted.release_).as_posix() for file in fitted.release_.rglob("*")}
    assert names == {
        "synthetic.csv", "synthesizer.safetensors", "first_answers.json", "privacy.json", "summary.json",
        "report.html", "README.md", "SHA256SUMS",
    }  # fmt: skip
    content = b"".join(file.read_bytes() for file in fitted.release_.iterdir())
    assert not any(value.encode() in content for value in TABLE.note) and b"total_variation" not in content
    owner = json.loads((fitted.release_.parent / "private" / "summary.json").read_text())
    assert 0 <= owner["total_variation_1"] <= owner["total_variation_2"] <= 1
    public = [f for f in tmp_path.rglob("*") if f.is_file() and "private" not in f.parts and "teachers" not in f.parts]
    assert not any(b"total_variation" in file.read_bytes() for file in public)
    with (fitted.release_ / "synthetic.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert len(rows) == fitted.model_.size and list(rows[0]) == list(SCHEMA["columns"])
    read = TableModel.load(fitted.release_ / "synthesizer.safetensors")
    assert read.sample(50, seed=3) == fitted.model_.sample(50, seed=3)
    again = fitted.sample(random_state=0)
    assert len(again) == fitted.model_.size and len(fitted.sample(7)) == 7
    assert (DOMAIN.encode(fitted.sample(200)) < DOMAIN.sizes).all()


def test_a_copy_is_saved_with_the_usefulness_on_public_rows_into_an_empty_folder(fit, tmp_path):
    fitted = fit(epsilon=4.0)
    copy = fitted.save_release(tmp_path / "copy", evaluation=draw_table(200, seed=5))
    assert (copy / "synthetic.csv").read_bytes() == (fitted.release_ / "synthetic.csv").read_bytes()
    assert "trained on the synthetic rows" in (copy / "report.html").read_text()
    assert "trained on the synthetic rows" not in (fitted.release_ / "report.html").read_text()
    with pytest.raises(ValueError, match="is not empty"):
        fitted.save_release(copy)
    wrong = {
        "must be a DataFrame": (TABLE, TABLE.ill),
        "lacks the columns age": TABLE[["ward", "ill"]],
        "0 row": TABLE[:0],
    }
    for message, evaluation in wrong.items():
        with pytest.raises(ValueError, match=f"^evaluation=.*{message}"):
            fitted.save_release(tmp_path / "other", evaluation=evaluation)


def test_the_rows_resemble_the_private_rows(fit, monkeypatch):
    monkeypatch.setattr(synthetic, "fit_mixture", fit_mixture)
    table = draw_table(4000)
    rows = fit(table, epsilon=8.0).sample(4000)
    ill = rows[rows.ill.isin(["true", "false"])]
    assert len(ill) > 3900
    agreement = ((ill.age.astype(float) > 50) ^ (ill.ward == "a")) == (ill.ill == "true")
    assert agreement.mean() > 0.85  # half for independent columns


def test_a_domain_is_read_off_public_rows_alone(fit):
    public = draw_table(300, seed=9).drop(columns="note")
    fitted = fit(schema=None, public=public, target="ill", epsilon=4.0)
    assert fitted.domain_ == TableDomain.from_public(public, target="ill")
    assert fitted.domain_.source == "read off public rows"


# ---- interruptions -----------------------------------------------------------------------------------------------


class Killed(BaseException):
    """The end of a process, as far as one process can show it."""


@pytest.fixture(scope="module")
def processes():
    """Children that start with torch imported."""
    return killed_runs.fork_server("tests.killed_runs")


def run_killed(processes, home, kill_at=None):
    """Make a synthetic table in a process that is killed at a step; return its exit code."""
    home.mkdir(exist_ok=True)
    child = processes.Process(target=killed_runs.synthesize_once, args=(home, kill_at))
    child.start()
    child.join(300)
    return child.exitcode


def check_finished(home):
    """Check that the only release is whole, and that model, record, statement and ledger tell of the same tables."""
    (release,), (commit,) = home.glob("runs/clinic/*/*/release"), read_entries(home, "commit")
    statement, model = json.loads((release / "privacy.json").read_text()), TableModel.load(release / TABLE_FILE_NAME)
    parameters = statement["mechanism"]["parameters"]
    assert parameters["num_tables"] == len(model.tables.counts) == 3 and parameters["sigma"] == model.tables.sigma
    assert parameters["order"] == max(map(len, model.tables.counts)) - 1 == 2 and parameters["rounds"] == 1
    assert files.compute_file_digest(release / TABLE_FILE_NAME) == commit["synthesizer_sha256"]
    with (release / "synthetic.csv").open() as stream:
        assert len(list(csv.reader(stream))) == model.size + 1
    assert "total_variation_1" in (release.parent / "private" / "summary.json").read_text()
    assert not [check for check in verify_release(release, home / "ledger.sqlite") if not check.is_ok]
    return {key: statement[key] for key in ("mechanism", "guarantee", "headline", "assumptions", "public_assets")}


@pytest.mark.parametrize(
    "stride",
    [pytest.param(1, marks=pytest.mark.slow(reason="fault injection: two fits for each durable write")), 68],
)
def test_a_fit_that_is_killed_at_a_durable_write_is_never_undercharged(processes, tmp_path, stride):
    whole, outcomes = tmp_path / "whole", set()
    assert run_killed(processes, whole) == 0
    num_steps, expected = int((whole / "steps.txt").read_text()), check_finished(whole)
    for kill_at in range(stride // 2, num_steps, stride):
        home = tmp_path / str(kill_at)
        assert run_killed(processes, home, kill_at) == -signal.SIGKILL
        assert not killed_runs.unsound(home)
        charges, models = read_charges(home), [file.read_bytes() for file in home.rglob(TABLE_FILE_NAME)]
        assert len(charges) <= 1 and (charges or not models)
        exit_code = run_killed(processes, home)
        assert len(read_charges(home)) == 1
        with Ledger(home / "ledger.sqlite", create=False) as ledger:
            assert ledger.get_account("clinic").guarantee.epsilon == pytest.approx(8.0, rel=1e-6)
        if charges and not charges[0].is_committed:  # noise may have been drawn: the whole cost stays charged
            assert exit_code == 1 and not read_charges(home)[0].is_committed
            outcomes.add("spent")
        elif exit_code == 1:  # the fit had ended before it was killed
            assert models and check_finished(home) == expected
            outcomes.add("ended")
        else:
            outcomes.add("finished" if charges else "anew")
            assert exit_code == 0 and check_finished(home) == expected
            assert not charges or models == [file.read_bytes() for file in home.rglob(TABLE_FILE_NAME)]
    assert outcomes >= {"anew", "spent", "finished"}


def test_another_table_does_not_finish_an_interrupted_fit(fit, tmp_path, monkeypatch):
    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr("pate_torch.session.ReleaseSession.publish", lambda *_, **__: (_ for _ in ()).throw(Killed))
        fit()
    for changes in ({"table": TABLE[:-1]}, {"rounds": 1}, {"random_state": 1}):
        with pytest.raises(ValueError, match="has been charged already"):
            fit(**changes)
    fit()
    assert len(read_charges(tmp_path)) == 1


def test_the_fit_leaves_the_number_of_threads_as_it_was(fit):
    before = torch.get_num_threads()
    fit(epsilon=8.0)
    assert torch.get_num_threads() == before
