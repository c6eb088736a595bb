"""A whole run at a tiny size: what it writes, what it charges, what it reuses, and what it refuses."""

import csv
import dataclasses
import json
import math
import shutil
import stat
from contextlib import nullcontext
from dataclasses import replace

import pytest

from pate_torch import pipeline
from pate_torch.accounting import gdp
from pate_torch.accounting.accountant import compute_guarantee
from pate_torch.features import neighbors
from pate_torch.features.neighbors import NeighborSearch
from pate_torch.mechanisms.confident import ConfidentGNMax, InteractiveGNMax
from pate_torch.mechanisms.gaussian import GNMax
from pate_torch.mechanisms.laplace import LNMax
from pate_torch.methods import labeling
from pate_torch.privacy.accounts import BudgetExceeded
from pate_torch.privacy.ledger import Ledger
from pate_torch.privacy.partition import DatasetFacts, ReplaceOne
from pate_torch.privacy.records import PrivateRecords
from pate_torch.queries.base import Margin, Random
from pate_torch.queries.clusters import Prototypes
from pate_torch.queries.disagreement import Disagreement
from pate_torch.release import store as release_store
from pate_torch.session import ReleaseSession
from pate_torch.students.base import StudentAlgorithm
from pate_torch.students.private_test import read_test
from pate_torch.students.selection import Selection
from pate_torch.students.semi_supervised import LabelSpreading
from pate_torch.students.training import Supervised
from tests.run_configs import changed
from tests.tiny_runs import DELTA, again, summary, tiny
from tests.worlds import benchmark_clouds, blobs


@pytest.fixture
def plan(tmp_path):
    return tiny(tmp_path)


@pytest.fixture(scope="module")
def finished_home(tmp_path_factory):
    """The home of one finished run."""
    home = tmp_path_factory.mktemp("home")
    pipeline.run(tiny(home))
    return home


def test_a_run_searches_its_points_once_and_tells_its_owner_the_recall(plan, monkeypatch):
    pytest.importorskip("faiss")
    searched, search = [], NeighborSearch._search
    monkeypatch.setattr(neighbors, "_MAX_EXACT_POINTS", 50)
    monkeypatch.setattr(NeighborSearch, "_search", lambda *given: searched.append(given) or search(*given))
    pipeline.run(changed(plan, query=Prototypes(), student=LabelSpreading()))
    assert len(searched) == 1
    assert 0.9 < json.loads((plan.folder / "private" / "summary.json").read_text())["neighbor_recall"] <= 1
    assert "neighbor_recall" not in summary(plan)


def test_prototypes_of_very_many_points_are_medoids_which_the_release_says(plan, monkeypatch, capsys):
    monkeypatch.setattr(labeling, "MAX_PROTOTYPE_POINTS", 50)
    pipeline.run(changed(plan, query=Prototypes(), quiet=False))
    assert "query is medoids instead of prototypes, because of" in capsys.readouterr().err
    assert json.loads((plan.folder / "release" / "release.json").read_text())["query"] == "medoids"


@pytest.fixture
def done(finished_home, tmp_path):
    """The configuration of a finished run, in a copy of its home."""
    return tiny(shutil.copytree(finished_home, tmp_path / "home"))


def spent(plan):
    return Ledger(plan.root / "ledger.sqlite").get_account("blobs").guarantee.epsilon


def test_a_run_writes_what_the_design_fixes(done):
    found = summary(done)
    exact = gdp.compute_epsilon(math.sqrt(2 * 20) / 2.0, 1e-4)
    assert found["epsilon"] == pytest.approx(exact, abs=1e-9)
    assert found["epsilon_charged"] == pytest.approx(exact, abs=1e-9)
    assert (found["accountant"], found["adjacency"], found["unit"]) == ("gdp", "add_remove", "record")
    assert found["queries_asked"] == found["queries_answered"] == 20
    assert found["student_accuracy"] > 0.8  # three separable clouds; a guess gives 0.33
    assert found["private"] is True
    for folder in (done.root, done.folder / "private", done.root / "teachers"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    rows = list(csv.DictReader((done.folder / "release" / "labels.csv").read_text().splitlines()))
    assert len({row["query"] for row in rows}) == len(rows) == 20
    data, ledger = done.dataset.load(), Ledger(done.root / "ledger.sqlite")
    folder = release_store.find_release(done.root, found["release_id"])
    release = release_store.read(folder, data.pool, data.spec, ledger).labels
    assert release.label_Q.tolist() == [int(row["label"]) for row in rows]


def test_a_finished_call_that_is_made_again_is_a_new_release_and_charged(done):
    pipeline.run(second := again(done, "second"))
    assert spent(done) == pytest.approx(gdp.compute_epsilon(math.sqrt(2 * 40) / 2, 1e-4), abs=1e-9)
    for name in ("release_id", "teachers_id"):
        assert summary(second)[name] != summary(done)[name]
    (manifest,) = (done.root / "teachers").glob("*/manifest.json")  # trained once
    # The id of the ensemble is found again by private content, so it stays in the private store.
    for file in done.folder.parent.glob("*/release/**/*"):
        assert not file.is_file() or manifest.parent.name.encode() not in file.read_bytes(), file


def test_other_questions_to_the_same_teachers_are_charged_to_the_same_account(done):
    other = again(done, "other", mechanism=GNMax(sigma=3.0), teachers=summary(done)["teachers_id"])
    pipeline.run(other)
    assert summary(other)["teachers_id"] == summary(done)["teachers_id"]
    assert summary(other)["release_id"] != summary(done)["release_id"]
    composed = gdp.compute_epsilon(math.sqrt(40 / 4 + 40 / 9), 1e-4)
    assert summary(other)["epsilon_charged"] == pytest.approx(composed, abs=1e-9)
    assert summary(other)["epsilon"] == pytest.approx(gdp.compute_epsilon(math.sqrt(40) / 3, 1e-4), abs=1e-9)


def test_a_student_from_paid_labels_costs_nothing(done):
    before = spent(done)
    student = Supervised(network="logistic", steps=40, augment=None)
    pipeline.run(free := again(done, "free", labels=summary(done)["release_id"], student=student))
    assert spent(done) == before
    assert summary(free)["epsilon"] == summary(done)["epsilon"]
    assert not (free.folder / "private" / "votes.safetensors").exists()


def test_teachers_of_other_records_are_refused(done):
    before = spent(done)
    with pytest.raises(ValueError, match="fingerprint"):
        pipeline.run(again(done, "second", dataset=blobs(seed=1), teachers=summary(done)["teachers_id"]))
    assert spent(done) == before


def test_secure_noise_differs_between_runs(plan, tmp_path):
    """With sigma far above the votes, twenty equal labels in a row would be a seeded generator."""
    noisy = changed(plan, mechanism=GNMax(sigma=1e4), allow_uninformative_labels=True)
    labels = []
    for name in ("a", "b"):
        pipeline.run(one := dataclasses.replace(noisy, root=tmp_path / name, folder=tmp_path / name / "runs/b/g/1"))
        labels.append((one.folder / "release" / "labels.csv").read_text())
    assert labels[0] != labels[1]


def test_confident_reports_its_cap_and_ex_post_apart(plan):
    mechanism = ConfidentGNMax(screen_sigma=0.8, threshold=11.0, sigma=2.0)  # one query has 7 of 12 votes
    pipeline.run(one := changed(plan, mechanism=mechanism))
    found = summary(one)
    cap = gdp.compute_epsilon(math.sqrt(20 / 0.64 + 40 / 4), 1e-4)
    answered = found["queries_answered"]
    assert 0 < answered < 20
    assert found["epsilon"] == pytest.approx(cap, abs=1e-9)
    paid = gdp.compute_epsilon(math.sqrt(20 / 0.64 + answered * 2 / 4), 1e-4)
    assert found["epsilon_ex_post"] == pytest.approx(paid, abs=1e-9)


def test_swapping_evaluation_labels_changes_nothing_that_is_released(plan, tmp_path):
    """No test label, and no truth about the public pool, reaches the student."""
    digests = []
    y = {"pool_y": plan.dataset.pool_y.roll(1), "test_y": plan.dataset.test_y.roll(1)}
    for name, source in (("a", plan.dataset), ("b", dataclasses.replace(plan.dataset, **y))):
        one = changed(
            plan, dataset=source, root=tmp_path / name, folder=tmp_path / name / "runs/b/g/1", insecure_noise_seed=5
        )
        pipeline.run(one)
        digests.append((one.folder / "release" / "student.safetensors").read_bytes())
    assert digests[0] == digests[1]


def two_candidates(**changes):
    good = Supervised(network="mlp", steps=40, augment=None)
    bad = Supervised(network="mlp", network_options={"hidden": [1]}, steps=40, augment=None)  # a line sees two clouds
    return Selection(candidates={"bad": bad, "good": good}, **{"epsilon": 2.0, "validation": 0.3, **changes})


def test_choosing_a_student_by_private_records_is_charged(plan):
    pipeline.run(one := changed(plan, selection=two_candidates()))
    found = summary(one)
    assert found["student"] == "good"  # some 45 held-out records at rate 2: the worse wins with odds below e^-20
    labels_alone = gdp.compute_epsilon(math.sqrt(2 * 20) / 2.0, 1e-4)
    assert labels_alone < found["epsilon"] <= labels_alone + 2.0
    assert found["epsilon_charged"] >= found["epsilon"] * (1 - 1e-9)


def test_held_out_records_reach_no_teacher_and_no_other_record_decides_it():
    data = blobs().load()
    rest, held = two_candidates().hold_out(data, "add_remove", seed=0)
    assert set(rest.private.unit_id).isdisjoint(held.unit_id)
    assert len(rest.private) + len(held) == len(data.private)
    fewer = PrivateRecords.from_rows(data.private.x[1:], data.private.y[1:], data.private.unit_id[1:])
    _, held_of_fewer = two_candidates().hold_out(dataclasses.replace(data, private=fewer), "add_remove", seed=0)
    assert set(held_of_fewer.unit_id) == set(held.unit_id) - {data.private.unit_id[0]}


def test_no_number_of_held_out_records_refuses_a_choice(plan):
    selection = two_candidates(validation=1e-9)
    assert len(selection.hold_out(blobs().load(), "add_remove", seed=0)[1]) == 0
    pipeline.run(one := changed(plan, selection=selection))
    assert summary(one)["student"] in ("good", "bad")


def test_private_records_choose_no_student_under_neighbors_that_their_source_cannot_bear(plan):
    """Not even of labels that are there already: they are parted anew."""
    data = dataclasses.replace(blobs().load(), adjacencies=("add_remove",), advice="Use partition=add_remove.")
    one = changed(plan, selection=two_candidates(), partition=ReplaceOne(), labels="0" * 16)
    with pytest.raises(ValueError, match=r"partition='replace_one'.*Use partition=add_remove\."):
        one.validate(DatasetFacts.from_dataset(data, one.partition))
    with pytest.raises(ValueError, match="adjacencies"):
        dataclasses.replace(data, adjacencies="add_remove")


def test_labels_are_not_paid_for_where_the_choice_after_them_cannot_be(done):
    """Teachers and account are there from an earlier run: nothing is trained, and nothing may be charged either."""
    before = spent(done)
    dear = again(done, "dear", mechanism=GNMax(sigma=3.0), selection=two_candidates(epsilon=500.0))
    with pytest.raises(BudgetExceeded, match="pass the cap"):
        pipeline.run(dear)
    assert spent(done) == before


def test_selection_refuses_groups_and_a_single_candidate(plan):
    data = blobs().load()
    grouped = dataclasses.replace(data.private, unit="group:patient")
    with pytest.raises(ValueError, match="group"):
        two_candidates().hold_out(dataclasses.replace(data, private=grouped), "add_remove", 0)
    with pytest.raises(ValueError, match="two students"):
        Selection(candidates={"one": plan.student})


class _Refusing(StudentAlgorithm):
    """A guide that must not be asked."""

    name: str = "refusing"

    def fit(self, task, **_):
        raise AssertionError("a student was fitted though nobody looks at it")


@pytest.mark.parametrize("strategy", [Random(rounds=3), Disagreement(rounds=3)], ids=lambda s: s.name)
def test_no_student_is_fitted_between_rounds_where_nobody_looks_at_it(plan, strategy):
    pipeline.run(again(plan, "plain", query=strategy, guide_student=_Refusing()))
    with pytest.raises(AssertionError, match="nobody looks"):
        pipeline.run(again(plan, "margin", query=Margin(rounds=3), guide_student=_Refusing()))
    looking = InteractiveGNMax(sigma=4.0, screen_sigma=6.0, threshold=4.0, student_confidence=0.9)
    assert changed(plan, query=strategy, mechanism=looking).method.is_guided


def test_names_that_a_spreadsheet_would_compute_are_shown_as_they_are_and_read_back(plan):
    names = ("=HYPERLINK(1)", "'quoted", "-1.5")
    plan = changed(plan, dataset=dataclasses.replace(plan.dataset, class_names=names))
    report = pipeline.run(plan)
    with (plan.folder / "release" / "labels.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    shown = {"0": "'=HYPERLINK(1)", "1": "''quoted", "2": "-1.5"}
    assert {row["label"] for row in rows} > {"0"} and all(row["class"] == shown[row["label"]] for row in rows)
    again = pipeline.run(changed(plan, labels=report.record.release_id, folder=plan.folder.parent / "again"))
    assert again.record.class_names == names and again.is_free


# ---- the private test ----------------------------------------------------------------------------------------------


def test_a_run_of_the_command_tests_its_student_within_its_cost(tmp_path):
    plan = changed(tiny(tmp_path), private_test=0.3)
    plan = replace(plan, privacy=replace(plan.privacy, target_epsilon=9.0))
    assert pipeline.run(plan).claim.epsilon == pytest.approx(9.0, rel=1e-6)
    test = read_test(plan.folder / "release" / "student.safetensors", "student_sha256")
    assert test.number == 1 and str(test) in (plan.folder / "release" / "report.html").read_text().replace(
        "\u00a0", " "
    )
    later = changed(again(plan, "later"), private_test=0.0)  # no test, but the same units are held out
    with ReleaseSession.open(later) as session:
        held_out = {tuple(x) for x in session.splits.test.x.tolist()}
        trained = {tuple(x) for x in session.splits.data.private.x.tolist()}
        assert len(held_out) > 20 and not held_out & trained
        assert session.budget.held_out == session.ledger.get_account("blobs").held_out != ""


@pytest.mark.parametrize(
    "size,share,said", [(300, 0.3, "about 90 units"), (300, 0.4, ""), (None, 0.3, ""), (300, 0.0, "")]
)
def test_a_test_of_few_units_is_announced_where_their_number_is_public(size, share, said, tmp_path, capsys):
    dataset = benchmark_clouds(nominal_size=size)
    with ReleaseSession.open(changed(tiny(tmp_path), dataset=dataset, private_test=share, quiet=False)):
        assert ("The private test has" in (text := capsys.readouterr().err)) == bool(said) and said in text


@pytest.mark.parametrize("mechanism", [LNMax(sigma=4.0), GNMax(sigma=4.0, noise="discrete")])
def test_the_cost_of_a_test_of_any_noise_is_within_the_target(mechanism, tmp_path):
    plan = changed(tiny(tmp_path), private_test=0.3, mechanism=mechanism)
    plan = replace(plan, privacy=replace(plan.privacy, target_epsilon=20.0))
    with ReleaseSession.open(plan) as session:
        events = session.config.privacy_events(session.facts)
    assert 16 < compute_guarantee(events, DELTA).epsilon <= 20 * (1 + 1e-9)


@pytest.mark.parametrize("is_first", [True, False])
def test_a_share_that_is_fixed_while_another_run_has_loaded_all_records_admits_one_of_both(is_first, tmp_path):
    """Whichever reserves first fixes what is held out, and the other one draws nothing."""
    untested, tested = tiny(tmp_path), changed(again(tiny(tmp_path), "tested"), private_test=0.3)
    with ReleaseSession.open(untested) as all_records, ReleaseSession.open(tested) as without_test_units:
        first, second = (all_records, without_test_units) if is_first else (without_test_units, all_records)
        first.ledger.open_account(
            "blobs", budget_epsilon=50.0, delta=DELTA, adjacency="add_remove", unit="record",
            planned_events=first.config.privacy_events(first.facts), held_out=first.splits.held_out,
        )  # fmt: skip
        first.run()
        with pytest.raises(ValueError, match=r"private_test\.share|teachers/held_out/blobs\.json"):
            second.run()
        assert len(first.ledger.get_charges("blobs")) == 1
    with pytest.raises(ValueError, match="first charge") if is_first else nullcontext():
        pipeline.run(changed(again(tested, "once more"), seed=1))


def test_a_test_after_a_killed_reservation_is_refused(tmp_path, monkeypatch):
    def kill(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("pate_torch.privacy.noise.NoiseSource.draw_gaussian", kill)
    with pytest.raises(KeyboardInterrupt):
        pipeline.run(tiny(tmp_path))
    with pytest.raises(ValueError, match=r"first charge .a killed run counts.*Use another data set"):
        pipeline.run(changed(again(tiny(tmp_path), "tested"), private_test=0.3))


def test_a_test_that_cannot_be_made_is_refused_before_the_charge(done, tmp_path):
    words = r"private_test\.share=0\.3: does not go with labels"
    with pytest.raises(ValueError, match=f"{words}|first charge"):
        pipeline.run(again(done, "second", private_test=0.3, labels=summary(done)["release_id"]))
    with pytest.raises(ValueError, match=words):
        pipeline.run(replace(changed(tiny(tmp_path / "other"), private_test=0.3), student=LabelSpreading()))
