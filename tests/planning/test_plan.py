"""The planning command: its figures against the accounting core and the run itself, and what it must not touch."""

import dataclasses
import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import norm

from benchmarks.fonts.glyphs import Glyphs
from pate_torch.accounting import accountant as accounting
from pate_torch.accounting import calibration
from pate_torch.accounting.events import BoundedRangeEvent
from pate_torch.cli import hydra_config
from pate_torch.cli import plan as command
from pate_torch.core.run_folders import find_config_folder
from pate_torch.data.base import SourceFacts
from pate_torch.data.digits import Digits
from pate_torch.data.mnist import Mnist
from pate_torch.data.svhn import Svhn
from pate_torch.data.tabular import Csv
from pate_torch.mechanisms.confident import ConfidentGNMax
from pate_torch.mechanisms.gaussian import GNMax
from pate_torch.mechanisms.gradient_descent import GradientDescent
from pate_torch.mechanisms.soft_sparse_vector import SoftSparseVector
from pate_torch.mechanisms.sparse_vector import SparseVector
from pate_torch.methods import feasibility
from pate_torch.methods.gradients import GradientMethod
from pate_torch.methods.teacher_votes import TeacherVotes
from pate_torch.planning import pilot as pilots
from pate_torch.planning import report as reports
from pate_torch.planning.choice import select_best
from pate_torch.planning.pilot import Forecast, Pilot, PilotConfig, forecast_gradients, simulate_release
from pate_torch.privacy.accounts import BudgetExceeded
from pate_torch.privacy.facts import DatasetFacts
from pate_torch.privacy.ledger import Ledger
from pate_torch.privacy.noise import DryRunNoise
from pate_torch.privacy.partition import AddRemove, ReplaceOne
from pate_torch.privacy.records import Dataset, DataSpec, Evaluation, MechanismContext, PrivateRecords, PublicPool
from pate_torch.privacy.sensitive import Votes
from tests import ROOT
from tests.configurations import list_options
from tests.features import encoder_worlds as worlds

DATASETS = sorted(file.stem for file in Path(find_config_folder(), "dataset").glob("*.yaml"))
MECHANISMS = sorted({*list_options("mechanism")} - {"histogram", "gradient_descent"})  # by which records answer


class PrivateRecordsRead(AssertionError):
    pass


class Untouchable(Glyphs):
    """A data set that knows its public facts and lets nobody load it."""

    def load(self):
        raise PrivateRecordsRead


FONTS = f"hydra.searchpath=[file://{ROOT}/benchmarks/conf]"
UNTOUCHABLE = (FONTS, "dataset=glyphs", "dataset._target_=tests.planning.test_plan.Untouchable")


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("PATE_HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir(mode=0o700)
    return tmp_path / "home"


def plan(*settings):
    return command.plan(settings)


def only(*settings):
    (choice,) = plan(*settings).choices
    return choice


def run_plan(*settings):
    """The plan that train.py would make of the same settings."""
    with hydra_config.open_configuration():
        return command.compose_plan(settings)


# ---- figures -------------------------------------------------------------------------------------------------------


def test_a_route_that_fails_at_a_small_delta_is_left_out_and_the_others_are_shown(capsys):
    """The privacy loss distribution of many Laplace events is rounded by more than so small a delta bears."""
    settings = ["mechanism=laplace", "mechanism.sigma=20", "num_queries=200", "privacy.delta=1e-9"]
    assert command.main(settings) == 0
    assert "pld" not in capsys.readouterr().out
    choice = only("mechanism=laplace", "mechanism.sigma=20", "num_queries=200", "privacy.delta=1e-9", "teachers=75")
    assert choice.epsilon == choice.routes["rdp"] and choice.epsilon == pytest.approx(6.351, abs=1e-3)
    assert set(choice.routes) == {"rdp", "zcdp", "pure"} and all(map(math.isfinite, choice.routes.values()))


@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize(
    ("noise", "delta"),
    [(1e-200, 1e-5), (1e12, 1e-9), *(pytest.param(noise, 1e-5, marks=pytest.mark.slow) for noise in (1e-15, 1e-100))],
)
def test_no_noise_and_no_delta_end_a_plan_without_a_traceback(mechanism, noise, delta, capsys):
    key = (
        "mechanism.epsilon"
        if mechanism in ("sparse_vector", "single_stable", "soft_sparse_vector")
        else "mechanism.sigma"
    )
    value = noise if key == "mechanism.sigma" else 1 / noise
    settings = [f"mechanism={mechanism}", f"{key}={value}", f"privacy.delta={delta}", FONTS, "dataset=glyphs"]
    assert command.main([*settings, "teachers=20", "pilot.num_queries=100"]) in (0, 2)
    capsys.readouterr()


def test_prices_and_counts_are_those_of_the_accounting_core():
    report = plan("dataset=mnist", "teachers=250", "mechanism.sigma=20,40,80", "privacy.budget_epsilon=2")
    for choice, sigma in zip(report.choices, (20, 40, 80), strict=True):
        mechanism = GNMax(sigma=sigma)
        assert choice.routes == accounting.compute_route_epsilons(mechanism.privacy_events(50), 1e-5)
        assert choice.epsilon == choice.routes["gdp"]
        most, one_more = (
            calibration.compute_epsilon(mechanism.privacy_events(choice.max_queries + more), 1e-5) for more in (0, 1)
        )
        assert most <= 2 < one_more
        assert choice.shard_size == 240
        at_target = accounting.compute_guarantee(GNMax(sigma=choice.sigma_for_target).privacy_events(50), 1e-5)
        assert at_target.epsilon == pytest.approx(2, rel=1e-8) and at_target.epsilon <= 2
    # mu = sqrt(2 * 50) / 40 = 1/4 by hand: epsilon 0.926 at delta 1e-5.
    assert report.choices[1].epsilon == pytest.approx(0.92630, abs=2e-4)


@pytest.mark.parametrize(
    "settings",
    [
        ("mechanism.sigma=8.3",),
        ("mechanism=laplace", "mechanism.sigma=8"),
        ("mechanism=confident", "mechanism.sigma=15", "mechanism.screen_sigma=20"),
        ("noise=discrete", "mechanism.sigma=9"),
        ("selection=exponential", "mechanism.sigma=10"),
        ("private_epsilon=smooth", "private_epsilon.allow_net_loss=true", "mechanism.sigma=40", "num_queries=20"),
    ],
)
def test_so_many_questions_fit_as_the_ledger_of_a_run_accepts(settings, home):
    settings = (FONTS, "dataset=glyphs", *settings, "num_teachers=50", "privacy.budget_epsilon=2")
    choice = only(*settings)
    assert 1 < choice.max_queries < 4000
    for queries, accepted in ((choice.max_queries, True), (choice.max_queries + 1, False)):
        run = run_plan(*settings)
        events = run.method.mechanism.privacy_events(queries)
        if "selection=exponential" in settings:
            events += (BoundedRangeEvent(eta=0.5),)
        if "private_epsilon=smooth" in settings:  # published as for the 20 questions of the plan
            asked = {"num_queries": 20, "num_teachers": 50, "num_classes": 10, "rounds": 1, "delta": run.privacy.delta}
            events += (run.private_epsilon.make_plan(run.method.mechanism, **asked).publication_event,)
        with Ledger(home / f"ledger{queries}.sqlite") as ledger:
            terms = {"budget_epsilon": 2.0, "delta": run.privacy.delta, "adjacency": "add_remove", "unit": "record"}
            ledger.open_account("new", planned_events=events, **terms)
            if accepted:
                ledger.reserve("new", events, fingerprint="", mechanism="", run="")
            else:
                with pytest.raises(BudgetExceeded):
                    ledger.reserve("new", events, fingerprint="", mechanism="", run="")


def test_what_is_left_is_what_the_ledger_admits_and_nothing_is_charged(home):
    mechanism = GNMax(sigma=8.3)
    path = home / "ledger.sqlite"
    with Ledger(path) as ledger:
        terms = {"budget_epsilon": 4.0, "delta": 1e-4, "adjacency": "add_remove", "unit": "record"}
        ledger.open_account("digits", planned_events=mechanism.privacy_events(20), **terms)
        ledger.commit(
            ledger.reserve("digits", mechanism.privacy_events(20), fingerprint="", mechanism="", run=""),
            mechanism.privacy_events(20),
        )
        head, entries = ledger.get_head(), len(ledger.read_entries())
    report = plan("num_teachers=50", "mechanism.sigma=8.3")
    (choice,) = report.choices
    assert report.budget_epsilon == 4.0 and report.budget_source == "the account's cap"
    with Ledger(path) as ledger:
        assert (ledger.get_head(), len(ledger.read_entries())) == (head, entries)
        with pytest.raises(BudgetExceeded):
            ledger.reserve(
                "digits", mechanism.privacy_events(choice.max_queries + 1), fingerprint="", mechanism="", run=""
            )
        ledger.reserve("digits", mechanism.privacy_events(choice.max_queries), fingerprint="", mechanism="", run="")
    path.unlink()
    of_a_new_account = only("num_teachers=50", "mechanism.sigma=8.3", "privacy.budget_epsilon=4")
    assert choice.max_queries == of_a_new_account.max_queries - 20  # mu^2 adds up
    assert "of 4 at delta 1e-4; what is left holds" in " ".join(reports.format_report(report).split())


def test_terms_that_a_run_would_refuse_are_named(home):
    with Ledger(home / "ledger.sqlite") as ledger:
        terms = {"budget_epsilon": 4.0, "delta": 1e-4, "adjacency": "add_remove", "unit": "record"}
        ledger.open_account("digits", planned_events=GNMax(sigma=8).privacy_events(1), **terms)
    notes = plan("privacy.delta=1e-5", "privacy.budget_epsilon=3", "partition=replace_one", "teachers=50").notes
    refused = [note for note in notes if note.startswith("A run would be refused: ")]
    assert "epsilon 4" in refused[0] and "delta 0.0001" in refused[1] and "add_remove" in refused[2]


def test_no_ledger_is_made_where_there_is_none(home):
    assert not any("Account" in note for note in plan("teachers=50").notes)
    assert list(home.iterdir()) == []


def test_a_target_sets_the_noise_as_in_a_run():
    report = plan("privacy.target_epsilon=1.5")
    run = run_plan("privacy.target_epsilon=1.5")
    expected = run.method.calibrate(1.5, run.privacy.delta).mechanism.sigma
    assert [choice.num_teachers for choice in report.choices] == [75]
    for choice in report.choices:
        assert choice.parameters["sigma"] == expected == choice.sigma_for_target
        assert choice.epsilon == pytest.approx(1.5, rel=1e-8)


def test_a_target_below_what_the_checks_alone_cost_is_out_of_reach():
    choice = only("mechanism=confident", "teachers=50", "mechanism.screen_sigma=2", "privacy.target_epsilon=1")
    assert choice.verdict == "cannot" and "out of reach" in choice.problem and choice.sigma_for_target is None


# ---- the grid ------------------------------------------------------------------------------------------------------


def test_what_is_left_open_is_halved_and_doubled():
    """The number of teachers only where a pilot tells what it does to their labels."""

    def grid(*settings):
        return [(choice.num_teachers, choice.parameters["sigma"]) for choice in plan(*settings).choices]

    assert grid() == [(75, s) for s in (5.5, 11, 22)]
    assert grid("teachers=80") == [(80, 5.5), (80, 11), (80, 22)]
    assert grid("num_teachers=80,90", "mechanism.sigma=5") == [(80, 5), (90, 5)]
    assert grid("num_teachers=range(10,40,10)", "mechanism.sigma=5") == [(10, 5), (20, 5), (30, 5)]
    axes = command._make_default_axes(run_plan("dataset=digits"), set(), has_pilot=True)
    assert axes["num_teachers"] == ("37", "75", "150")


def test_a_recommended_threshold_moves_with_the_number_of_teachers():
    report = plan("dataset=mnist", "mechanism=confident", "num_teachers=125,250,1000")
    assert [choice.parameters["threshold"] for choice in report.choices] == [100, 200, 800]
    assert "mechanism.threshold=100" in report.choices[0].settings
    given = plan("dataset=mnist", "mechanism=confident", "num_teachers=125,250", "mechanism.threshold=90")
    assert [choice.parameters["threshold"] for choice in given.choices] == [90, 90]


@pytest.mark.slow
def test_the_settings_of_a_row_are_those_of_the_run_it_describes():
    for choice in plan("dataset=mnist", "mechanism=confident").choices:
        each = run_plan(*choice.settings)
        assert each.method.num_teachers == choice.num_teachers
        assert {**dataclasses.asdict(each.method.mechanism)} == choice.parameters


# ---- what cannot work ----------------------------------------------------------------------------------------------


def test_stability_with_few_teachers_is_refused_with_the_number_it_takes(capsys):
    assert command.main(["dataset=mnist", "mechanism=sparse_vector", "teachers=250,5000"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    needed = SparseVector(epsilon=1, delta=1e-5, max_failures=20).compute_scales(50).min_teachers
    assert f"num_teachers=250: must be at least {needed} for mechanism=sparse_vector" in shown
    assert 2000 < needed < 5000
    few, many = plan("dataset=mnist", "mechanism=sparse_vector", "teachers=250,5000").choices
    with pytest.raises(ValueError) as refused:
        SparseVector(epsilon=1, delta=1e-5, max_failures=20).check(num_queries=50, num_teachers=250, num_classes=10)
    assert few.problem == str(refused.value) and few.verdict == "cannot" and few.epsilon is None
    assert many.problem is None and many.verdict == "ok" and many.lead == needed


def test_stability_counts_questions_until_its_own_check_refuses():
    settings = ("dataset=mnist", "mechanism=sparse_vector", "teachers=2500", "privacy.budget_epsilon=2")
    fits = only(*settings).max_queries
    mechanism = SparseVector(epsilon=1, delta=1e-5, max_failures=20)
    mechanism.check(num_queries=fits, num_teachers=2500, num_classes=10)
    with pytest.raises(ValueError, match="must be at least"):
        mechanism.check(num_queries=fits + 1, num_teachers=2500, num_classes=10)


def test_a_budget_that_no_question_fits_is_said_plainly():
    report = plan("mechanism.sigma=1", "privacy.budget_epsilon=0.05", "teachers=50")
    assert report.choices[0].max_queries == 0 and report.choices[0].verdict == "over" and report.best_choice is None
    shown = reports.format_report(report)
    assert "does not hold a single question" in shown and "None of these choices works." in shown


def test_labels_that_noise_outweighs_are_refused_or_said_to_need_a_lead_that_few_teachers_have():
    (choice,) = plan("mechanism.sigma=100000", "teachers=50").choices
    assert choice.verdict == "cannot" and "no better than chance" in choice.problem  # as a run would say
    assert only("mechanism.sigma=100000", "teachers=50", "privacy.allow_uninformative_labels=true").verdict == "noise"
    report = plan("mechanism.sigma=16", "teachers=50")
    assert report.choices[0].lead > 25 and report.choices[0].verdict == "noise" and report.best_choice is None
    assert "a lead of more than half of them" in " ".join(reports.format_report(report).split())
    assert only("mechanism.sigma=4", "teachers=50").verdict == "ok"


def test_questions_and_teachers_beyond_what_is_declared_are_refused():
    assert "450 points" in only("num_queries=451", "teachers=50", "mechanism.sigma=8").problem
    assert "1100 private records" in only("teachers=1101", "mechanism.sigma=8").problem


def test_the_best_is_the_cheapest_whose_labels_need_a_lead_of_a_quarter_of_the_votes():
    choices = plan("teachers=50,100", "mechanism.sigma=4,8,16").choices
    chosen = select_best(choices)
    clear = [choice for choice in choices if choice.lead <= choice.num_teachers / 4]
    assert chosen in clear and chosen.epsilon == min(choice.epsilon for choice in clear)
    assert (chosen.num_teachers, chosen.parameters["sigma"]) == (100, 8)
    (far,) = plan("teachers=50", "mechanism.sigma=11").choices
    assert select_best([far]) is far and 0.25 < far.lead / 50 < 0.5  # the best there is
    same_price = [choice for choice in choices if choice.parameters["sigma"] == 4]
    assert select_best(same_price).num_teachers == 50
    assert select_best([choice for choice in choices if choice.verdict != "ok"]) is None


def with_forecast(choice, accuracy, answer_rate=1.0, **changes):
    return dataclasses.replace(choice, forecast=Forecast(answer_rate=answer_rate, accuracy=accuracy), **changes)


def test_with_a_pilot_the_best_is_the_cheapest_among_those_with_most_right_labels():
    cheap, middle, dear = reversed(plan("teachers=75").choices)
    assert cheap.epsilon < middle.epsilon < dear.epsilon
    tried = [with_forecast(cheap, 0.7), with_forecast(middle, 0.89), with_forecast(dear, 0.9)]
    assert select_best(tried) is tried[1]
    assert select_best([*tried[:2], with_forecast(dear, 0.95)]).epsilon == dear.epsilon


def test_few_answers_are_told_from_none_wrong():
    screen = ("mechanism.threshold=60", "mechanism.screen_sigma=12")
    choice = only("mechanism=confident", "teachers=50", "mechanism.sigma=8", *screen)
    assert choice.verdict == "ok"  # by its lead; how often it answers depends on the teachers
    evaluate = command.PlanEvaluator(facts=Digits().declared_facts(), num_classes=10, account=None, pilot=None)
    method = run_plan("mechanism=confident", "teachers=null", "num_teachers=50").method
    assert evaluate._judge_labels(method, Forecast(answer_rate=0.05, accuracy=1.0)) == "few"
    assert evaluate._judge_labels(method, Forecast(answer_rate=0.5, accuracy=0.54)) == "poor"
    assert evaluate._judge_labels(method, Forecast(answer_rate=0.5, accuracy=0.56)) == "ok"


# ---- what it must not touch ----------------------------------------------------------------------------------------


def test_private_records_are_never_loaded(capsys):
    with pytest.raises(PrivateRecordsRead):
        run_plan(*UNTOUCHABLE).dataset.load()
    assert command.main([*UNTOUCHABLE, "--json"]) == 0
    row = json.loads(capsys.readouterr().out)["choices"][1]
    assert row["shard_size"] == 250 and row["verdict"] == "ok"


@pytest.mark.parametrize("name", DATASETS)
def test_every_data_set_is_planned_for_without_its_files(name, monkeypatch):
    source = type(run_plan(f"dataset={name}").dataset)
    monkeypatch.setattr(source, "load", lambda self: (_ for _ in ()).throw(PrivateRecordsRead()))
    choice = only(f"dataset={name}", "data_root=/nowhere", "teachers=60", "mechanism.sigma=8")
    assert choice.problem is None and choice.lead is not None


def test_a_pilot_leaves_the_planned_data_alone():
    pilot = ("pilot.dataset=digits", "pilot.teachers=4", "pilot.steps=40", "pilot.num_queries=100")
    report = plan(*UNTOUCHABLE, *pilot, "teachers=250", "mechanism.sigma=20")
    assert 0.2 < report.choices[0].forecast.accuracy < 1 and any("Tried on digits" in note for note in report.notes)


@pytest.mark.parametrize("source", [Digits(), Glyphs(private=60, public=30, test=10, num_classes=4)])
def test_declared_facts_are_those_of_the_loaded_data(source):
    declared, data = source.declared_facts(), source.load()
    assert declared.num_classes == data.spec.num_classes and declared.is_benchmark
    assert declared.num_private == data.spec.nominal_size and declared.num_public == len(data.pool)
    assert declared.name == data.spec.name


def test_declared_facts_of_sources_whose_files_are_elsewhere():
    assert Mnist().declared_facts() == SourceFacts(
        name="mnist", num_classes=10, num_private=60_000, num_public=9000, is_benchmark=True
    )
    assert Mnist(private=500).declared_facts().num_private == 500
    assert Svhn().declared_facts().num_private == 73_257 and Svhn(extra=True).declared_facts().num_private == 604_388
    assert Csv().declared_facts() == SourceFacts(name="csv")
    assert Csv(classes=["a", "b", "c"], nominal_size=9).declared_facts() == SourceFacts(
        name="csv", num_classes=3, num_private=9
    )


# ---- the pilot -----------------------------------------------------------------------------------------------------


def clouds(records: int) -> Dataset:
    """Four overlapping clouds in eight directions, so many of them private."""
    generator = torch.Generator().manual_seed(3)
    y = torch.randint(4, (records + 500,), generator=generator)
    x = torch.randn(records + 500, 8, generator=generator)
    x[:, :4] += 2 * torch.nn.functional.one_hot(y, 4)
    spec = DataSpec(
        name="clouds", num_classes=4, input_shape=(8,), class_names=tuple("abcd"), mean=(0.0,) * 8, std=(1.0,) * 8
    )
    private = PrivateRecords.from_rows(x[500:], y[500:], np.asarray([str(n) for n in range(records)]))
    return Dataset(spec, private, PublicPool(x[:500]), Evaluation(x[:0], y[:0], y[:500]))


@pytest.mark.parametrize("adjacency", ["add_remove", "replace_one"])
def test_fewer_public_records_stand_in_for_all_by_less_noise(adjacency):
    """What a run of all records is right about, and what a quarter of them forecast, at any noise."""
    right = {}
    for sigma in (1.0, 40.0, 200.0):
        descent = GradientDescent(sigma=sigma, adjacency=adjacency)
        draws = [
            [
                forecast_gradients(GradientMethod(mechanism=descent), clouds(have), 1600, seed).accuracy
                for seed in range(6)
            ]
            for have in (1600, 400)
        ]
        right[sigma], fewer = np.mean(draws, axis=1)
        assert fewer == pytest.approx(right[sigma], abs=0.05)
    data, partition = clouds(1600), AddRemove() if adjacency == "add_remove" else ReplaceOne()
    facts, shards = DatasetFacts.from_dataset(data, partition), partition.make_shards(data.private, 1, 0)
    method = GradientMethod(mechanism=GradientDescent(sigma=1.0, adjacency=adjacency), size=1600)
    asked = method.build_sensitive(data.private, shards, facts, encoder=None)
    answers = GradientDescent(sigma=1.0, adjacency=adjacency).release(
        asked, DryRunNoise("torch", 1), MechanismContext(num_queries=500)
    )
    assert right[1.0] == pytest.approx(float((answers.label_Q == data.evaluation.pool_y).double().mean()), abs=0.02)
    assert right[1.0] > right[40.0] > right[200.0] > 0.25


LETTERS = """# @package _global_
dataset:
  _target_: benchmarks.fonts.glyphs.Glyphs
  name: letters
  private: 3000
  public: 200
  num_classes: 4
  seed: 7
"""


@pytest.fixture
def letters(tmp_path):
    """Public data of one's own, by a file of one's own: where it lies, and who it is."""
    (tmp_path / "mine" / "dataset").mkdir(parents=True)
    (tmp_path / "mine" / "dataset" / "letters.yaml").write_text(LETTERS)
    return f"hydra.searchpath=[file://{tmp_path}/mine]", "pilot.dataset=letters"


def test_a_stand_in_must_be_public_and_not_the_data_that_are_planned_for(letters, capsys):
    asked = ["dataset=csv", "dataset.nominal_size=2000", "teachers=20", "pilot.num_classes=4"]
    for settings, said in (
        ([*asked, "pilot.dataset=libsvm"], "not declared as public"),
        ([*asked[:-1], "pilot.num_classes=3", *letters], "not of 4"),
        ([*asked, *letters, "dataset.name=letters"], "the very records"),
        ([*asked, "pilot.dataset=glyphs"], "is no data set here"),
    ):
        assert command.main(settings) == 2
        assert said in capsys.readouterr().err


MAILS = """# @package _global_
defaults: [text]
dataset:
  name: {name}
  path: {folder}/{name}.csv
  public_path: {folder}/{name}_public.csv
  test_path: {folder}/{name}_test.csv
  benchmark: true
"""
ENCODED = ("dataset=text", "dataset.nominal_size=400", "features=encoder", f"features.tokenizer={worlds.WORDS}")
BRIEF = ("pilot.teachers=4", "pilot.steps=20", "pilot.num_queries=100", "teacher=logistic", "teachers=8")


def mails(folder, name, seed, labeled=True):
    """A data set of one's own, by a file of one's own."""
    draw = np.random.default_rng(seed)
    for part, count in (("", 300), ("_public", 120), ("_test", 120)):
        worlds.mails(folder / f"{name}{part}.csv", count, draw, labeled=labeled or part != "_public")
    (folder / "dataset").mkdir(exist_ok=True)
    (folder / "dataset" / f"{name}.yaml").write_text(MAILS.format(name=name, folder=folder))


@pytest.fixture
def encoded(tmp_path):
    """A plan for texts through an encoder, and public texts that it may be tried on."""
    mails(tmp_path, "old", seed=1)
    worlds.table(tmp_path / "table.safetensors")
    return (*ENCODED, f"features.weights={tmp_path}/table.safetensors", f"hydra.searchpath=[file://{tmp_path}]")


def test_a_pilot_sees_its_stand_in_as_the_run_sees_its_records(encoded, tmp_path, monkeypatch):
    """Through the same encoder, as features."""
    seen = []
    monkeypatch.setattr(command, "Pilot", lambda *given: seen.append(given[1]) or Pilot(*given))
    asked = (*encoded, f"dataset.path={tmp_path}/mails.csv", "dataset.name=mails", "pilot.dataset=old")
    report = plan(*asked, *BRIEF, "mechanism.sigma=2", "num_queries=20")
    texts = [row.split(",")[0] for row in (tmp_path / "old.csv").read_text().split()[1:]]
    feature_ND = worlds.static(tmp_path).encode(texts)
    (data,) = seen
    assert sorted(data.private.x.tolist()) == sorted(feature_ND.tolist()) and not (tmp_path / "mails.csv").exists()
    (choice,) = report.choices
    assert choice.forecast.accuracy > 0.8


def test_a_stand_in_of_the_same_kind_is_of_other_files_and_knows_its_classes(encoded, tmp_path, capsys):
    planned = (*encoded, "dataset.name=mails", "pilot.dataset=old", *BRIEF)
    mails(tmp_path, "bare", seed=2, labeled=False)
    for settings, said in (
        (planned, "the very records"),  # nobody knows of which file
        ((*planned, "labels_only=true"), "the very records"),
        ((*planned, f"dataset.path={tmp_path}/dataset/../old.csv"), "the very records"),
        ((*planned, "dataset.path=old.csv", f"data_root={tmp_path}"), "the very records"),
        ((*encoded, "dataset.path=mails.csv", "pilot.dataset=bare", *BRIEF), "of unknown classes"),
        ((*encoded, "pilot.dataset=digits", "pilot.num_classes=10", *BRIEF), "is for texts"),
    ):
        assert command.main(settings) == 2
        assert said in capsys.readouterr().err


def test_gradients_at_the_same_price_are_suggested_and_can_be_tried(letters):
    asked = ("dataset=csv", "dataset.nominal_size=3000", "pilot.num_classes=4", "teachers=24", "mechanism.sigma=20")
    report = plan(*asked)
    (teachers,) = report.choices
    (note,) = [note for note in report.notes if "method=gradients" in note]
    typed = [word for word in note.rsplit(": ", 1)[1].split() if word != "num_queries=100"]
    (gradients,) = plan(*asked[:2], *typed, "num_queries=100", *letters, "pilot.num_classes=4").choices
    assert gradients.mechanism == "gradient_descent" and gradients.num_teachers == 0
    assert gradients.epsilon == pytest.approx(teachers.epsilon, rel=1e-3)
    assert gradients.forecast.accuracy > 0.5 and gradients.verdict == "ok"
    target = [note for note in plan(*asked[:4], "privacy.target_epsilon=2").notes if "method=gradients" in note]
    assert "mechanism.sigma" not in target[0]
    for size in ("null", "30"):  # nobody says how many, or too few to bear the noise
        few = plan("dataset=csv", f"dataset.nominal_size={size}", "teachers=15", "mechanism.sigma=2", "num_queries=5")
        assert few.best_choice is not None and not any("method=gradients" in note for note in few.notes)
    (noisy,) = plan(*asked[:1], "dataset.nominal_size=40", *typed, "num_queries=100").choices
    assert noisy.verdict == "noise"


def test_the_lead_that_labels_need_is_said():
    report = plan("dataset=digits", "teachers=75", "mechanism.sigma=11")
    assert report.choices[0].lead == feasibility.compute_break_even_lead(GNMax(sigma=11.0), 10)
    header, row = reports.format_table(report)
    assert dict(zip(header.split(), row.lstrip("*").split(), strict=True))["lead"] == "17.8"


def unanimous(num_classes, **choices):
    """A method of teachers, all of whom are right, and the votes of a pilot of four."""
    counts_QC = torch.zeros(2000, num_classes, dtype=torch.int64)
    counts_QC[:, 0] = 4
    method = TeacherVotes(num_teachers=30, **choices)
    return method, Votes(counts_QC, 4), torch.zeros(2000, dtype=torch.int64)


def test_votes_go_through_the_mechanism_itself():
    """Unanimous teachers: the chances of an answer and of the right one are known exactly."""
    setting = {"min_queries": 40_000, "seed": 3}
    forecast = simulate_release(*unanimous(2, mechanism=GNMax(sigma=25), num_queries=50), **setting)
    chance = norm.cdf(30 / (math.sqrt(2) * 25))
    assert forecast.answer_rate == 1
    assert forecast.accuracy == pytest.approx(chance, abs=4 * math.sqrt(chance * (1 - chance) / 40_000))
    assert abs(forecast.accuracy - norm.cdf(30 / 25)) > 0.05  # the noise of one count only
    mechanism = ConfidentGNMax(sigma=25, screen_sigma=20, threshold=40)
    answered = simulate_release(*unanimous(2, mechanism=mechanism, num_queries=50), **setting).answer_rate
    chance = norm.cdf((30 - 40) / 20)
    assert answered == pytest.approx(chance, abs=4 * math.sqrt(chance * (1 - chance) / 40_000))


def test_votes_of_many_teachers_are_drawn_from_the_shares_of_the_few():
    """Under noise of an eighth of the votes, 64 teachers foretell hundreds within two points, and never too high."""
    draw, errors = np.random.default_rng(0), []
    for world in range(12):
        num_classes, teachers, questions = (2, 4, 10)[world % 3], int(draw.integers(60, 400)), 2000
        logit_QC = draw.normal(0, draw.uniform(0.3, 1.5), (questions, num_classes))
        truth_Q = draw.integers(num_classes, size=questions)
        hard_Q = draw.random(questions) < draw.uniform(0.02, 0.25)
        logit_QC[np.arange(questions), truth_Q] += np.where(hard_Q, draw.uniform(-1, 0), draw.uniform(0.8, 3.0))
        share_QC = np.exp(logit_QC) / np.exp(logit_QC).sum(1, keepdims=True)
        method = TeacherVotes(num_teachers=teachers, mechanism=GNMax(sigma=teachers / 8), num_queries=questions)
        right = []
        for size in (64, 100_000):
            few = Votes(torch.from_numpy(draw.multinomial(size, share_QC)), size)
            right.append(simulate_release(method, few, torch.from_numpy(truth_Q), min_queries=8000, seed=0).accuracy)
        errors.append(right[0] - right[1])
    assert max(map(abs, errors)) < 0.02 and max(errors) < 0.005, errors


def test_a_pilot_as_large_as_the_ensemble_is_trained_once_for_each_shard_size(monkeypatch):
    sizes = []
    monkeypatch.setattr(pilots, "train", lambda records, *given, **rest: sizes.append(len(records)) or trained(*given))

    def trained(*given):
        class Ensemble:
            def predict_proba(self, x):
                return torch.nn.functional.one_hot(torch.zeros(4, len(x), dtype=torch.int64), 4).double()

        return Ensemble()

    pilot = Pilot(PilotConfig(dataset="clouds", num_queries=100), clouds(1600), 1600, seed=0)
    for teachers, sigma in ((4, 1.0), (4, 2.0), (8, 1.0)):
        method = TeacherVotes(num_teachers=teachers, mechanism=GNMax(sigma=sigma), num_queries=20)
        assert 0.1 < pilot.forecast(method).accuracy < 0.4
    assert sizes == [1600, 1600]
    with pytest.raises(ValueError, match="too few for 4 teachers of 800 each"):
        Pilot(PilotConfig(dataset="clouds"), clouds(1600), 8000, seed=0).forecast(
            TeacherVotes(num_teachers=10, mechanism=GNMax(sigma=1.0))
        )


def test_soft_labels_are_not_forecast_from_a_few_teachers():
    pilot = Pilot(PilotConfig(dataset="clouds"), clouds(400), 400, seed=0)
    mechanism = SoftSparseVector(epsilon=30, delta=1e-5, max_failures=2, bins=10)
    assert pilot.forecast(TeacherVotes(num_teachers=200, mechanism=mechanism)) is None


def test_a_mechanism_that_stops_early_leaves_the_rest_unanswered():
    mechanism = ConfidentGNMax(sigma=1, screen_sigma=1, threshold=1, max_answers=5)
    forecast = simulate_release(*unanimous(3, mechanism=mechanism, num_queries=20), min_queries=2000, seed=0)
    assert forecast.answer_rate == 0.25 and forecast.accuracy == 1


def test_reverse_knn_has_no_teachers_to_plan(capsys):
    for settings, said in (
        (["mechanism=histogram"], "method=reverse_knn"),
        (["method=reverse_knn"], "target_epsilon"),
        (["method=dpsgd"], "target_epsilon"),
    ):
        assert command.main([*settings, "dataset=a9a"]) == 2
        assert said in capsys.readouterr().err
    (choice, *_) = plan("method=gradients", "dataset=a9a").choices
    assert choice.verdict == "ok" and choice.num_teachers == 0 and choice.lead is None
    assert plan("method=gradients", "dataset=csv").choices[0].problem.startswith("dataset.nominal_size")


@pytest.mark.parametrize("name", MECHANISMS)
def test_every_mechanism_can_be_planned(name):
    settings = ["dataset=a9a", "num_queries=5", "teachers=4000"]
    report = plan(f"mechanism={name}", *settings)
    assert all(choice.problem is None and choice.lead is not None for choice in report.choices), report.choices
    assert max(map(len, reports.format_report(report).splitlines())) <= reports.WIDTH


# ---- the report -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        (),
        pytest.param(("dataset=svhn", "mechanism=confident", "privacy.budget_epsilon=2"), marks=pytest.mark.slow),
        (
            "dataset=mnist",
            "mechanism=gaussian,soft_sparse_vector,sparse_vector",
            "num_queries=50,7000",
            "num_teachers=10,50000",
        ),
        (
            "dataset=svhn",
            "mechanism=confident,interactive",
            "mechanism.sigma=123.456789,98765.4",
            "mechanism.screen_sigma=123.456",
            "num_queries=9999,10000",
            "num_teachers=73250",
            "dataset.name=" + "a" * 60,
        ),
        pytest.param(("mechanism.sigma=0.01,1000000",), marks=pytest.mark.slow),
    ],
)
def test_the_report_keeps_within_80_columns(settings):
    report = command.plan(settings)
    for line in reports.format_report(report).splitlines():
        assert len(line) <= 80 or line.strip().startswith("dataset.name="), line
    assert len({len(line.rstrip()) for line in reports.format_table(report)}) == 1
    assert len(reports.format_table(report)) == 1 + len(report.choices)


def test_the_star_says_its_rule_and_the_command_is_that_of_the_row():
    report = plan("dataset=mnist", "privacy.budget_epsilon=2", "mechanism.sigma=40", "teachers=125,250")
    shown = " ".join(reports.format_report(report).replace("\\", "").split())
    assert "* The least epsilon whose labels need a lead of at most a quarter of the votes" in shown
    assert shown.endswith(f"python train.py {' '.join(report.best_choice.settings)}")
    tried = dataclasses.replace(report, choices=tuple(with_forecast(choice, 0.9) for choice in report.choices))
    assert "of those within 2 % of the most right labels" in " ".join(reports.format_report(tried).split())
    assert "90.0%" in reports.format_table(tried)[1]


def test_json_is_one_object_with_the_same_figures(capsys):
    settings = ["mechanism.sigma=0.001,8.3", "teachers=50"]
    assert command.main([*settings, "--json"]) == 0
    said = json.loads(capsys.readouterr().out, parse_constant=lambda word: pytest.fail(word))
    report = plan(*settings)
    assert said["budget_epsilon"] == 10 and said["best"] == 1
    for row, choice in zip(said["choices"], report.choices, strict=True):
        assert (
            row["epsilon"] == choice.epsilon
            and row["max_queries"] == choice.max_queries
            and row["verdict"] == choice.verdict
            and row["lead"] == choice.lead
        )
    assert command.main(["mechanism=sparse_vector", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["best"] is None and "must be at least" in said["choices"][0]["problem"]


@pytest.mark.parametrize(
    "settings,key",
    [
        (["mechanism=gausian"], "gaus"),
        (["mechanism.sgima=3"], "sgima"),
        (["mechanism.sigma=-1"], "mechanism.sigma"),
        (["mechanism.sigma=1e-200"], "mechanism.sigma"),
        (["mechanism=single_stable", "mechanism.epsilon=1e200"], "mechanism.epsilon"),
        (["mechanism.sigma=a,b"], "mechanism.sigma"),
        (["privacy.delta=0"], "privacy.delta"),
        (["privacy.delta=1e-5,1e-6"], "privacy.delta"),
        (["privacy.budget_epsilon=-2"], "budget_epsilon"),
        (["privacy.target_epsilon=1", "mechanism.sigma=1,2"], "target_epsilon"),
        (["teachers=few"], "teachers"),
        (["teachers=0"], "num_teachers"),
        (["teachers=0123456789abcdef"], "teachers"),
        (["teachers=5", "num_teachers=6"], "num_teachers"),
        (["labels=0123456789abcdef"], "labels"),
        (["votes=mine.csv"], "votes"),
        (["pilot.teachers=1"], "pilot.teachers"),
        (["pilot.accuracy=0.5"], "pilot"),
        (["pilot=digits"], "pilot"),
        (["pilot.dataset=mine"], "pilot.dataset"),
        (["pilot.dataset=digits"], "pilot.dataset"),
        (["pilot.num_classes=3"], "pilot.num_classes"),
        (["dataset=csv", "pilot.dataset=digits"], "nominal_size"),
        (["dataset=a9a", "pilot.dataset=digits"], "pilot.dataset"),
        (["num_teachers=range(1,100)"], "combinations"),
        (["nonsense"], "nonsense"),
        (["--nonsense"], "--nonsense"),
    ],
)
def test_bad_input_is_one_line_and_code_2(settings, key, capsys, home):
    assert command.main(settings) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1 and key in err
    assert list(home.iterdir()) == []


@pytest.mark.slow
def test_the_module_is_a_command(home):
    done = subprocess.run(
        [sys.executable, "-m", "pate_torch", "plan", "teachers=50", "mechanism.sigma=8.3", "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout)["choices"][0]["num_teachers"] == 50
