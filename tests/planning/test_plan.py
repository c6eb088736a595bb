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
from pate_torch.core.run_folders import find_config_folder
from pate_torch.data.digits import Digits
from pate_torch.data.mnist import Mnist
from pate_torch.data.svhn import Svhn
from pate_torch.data.tabular import Csv
from pate_torch.mechanisms.confident import ConfidentGNMax
from pate_torch.mechanisms.gaussian import GNMax
from pate_torch.mechanisms.gradient_descent import GradientDescent
from pate_torch.mechanisms.soft_sparse_vector import SoftSparseVector
from pate_torch.mechanisms.sparse_vector import SparseVector
from pate_torch.methods.gradients import GradientMethod
from pate_torch.planning import command as command
from pate_torch.planning import feasibility
from pate_torch.planning import report as reports
from pate_torch.planning.choice import DeclaredFacts, select_best
from pate_torch.planning.pilot import (
    PilotConfig,
    VoteModel,
    fit_vote_model,
    forecast_gradients,
    simulate_release,
    simulate_votes,
    train_vote_model,
)
from pate_torch.privacy.accounts import BudgetExceeded
from pate_torch.privacy.ledger import Ledger
from pate_torch.privacy.noise import DryRunNoise
from pate_torch.privacy.partition import AddRemove, ReplaceOne
from pate_torch.privacy.records import Dataset, DataSpec, Evaluation, MechanismContext, PrivateRecords, PublicPool
from tests import ROOT
from tests.features import encoder_worlds as worlds

DATASETS = sorted(file.stem for file in Path(find_config_folder(), "dataset").glob("*.yaml"))
NOT_PLANNED = {"histogram", "gradient_descent", "svt"}  # records answer; another name of sparse_vector
MECHANISMS = sorted({file.stem for file in Path(find_config_folder(), "mechanism").glob("*.yaml")} - NOT_PLANNED)


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
    with command.initialize_config_dir(config_dir=find_config_folder(), version_base="1.3"):
        return command.PlanComposer(settings)(())


# ---- figures -------------------------------------------------------------------------------------------------------


def test_a_route_that_fails_at_a_small_delta_is_left_out_and_the_others_are_shown(capsys):
    """The privacy loss distribution of many Laplace events is rounded by more than so small a delta bears."""
    settings = ["mechanism=laplace", "mechanism.sigma=20", "num_queries=200", "privacy.delta=1e-9"]
    assert command.main(settings) == 0
    assert "pld" not in capsys.readouterr().out
    choice = only("mechanism=laplace", "mechanism.sigma=20", "num_queries=200", "privacy.delta=1e-9", "teachers=75")
    assert choice.route == "rdp" and choice.epsilon == pytest.approx(6.351, abs=1e-3)
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
        assert choice.route == "gdp" and choice.epsilon == choice.routes["gdp"]
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
        events = run.mechanism.privacy_events(queries)
        if "selection=exponential" in settings:
            events += (BoundedRangeEvent(eta=0.5),)
        if "private_epsilon=smooth" in settings:  # published as for the 20 questions of the plan
            asked = {"num_queries": 20, "num_teachers": 50, "num_classes": 10, "rounds": 1, "delta": choice.delta}
            events += (run.private_epsilon.make_plan(run.mechanism, **asked).publication_event,)
        with Ledger(home / f"ledger{queries}.sqlite") as ledger:
            terms = {"budget_epsilon": 2.0, "delta": choice.delta, "adjacency": "add_remove", "unit": "record"}
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
    assert report.budget == 4.0 and report.budget_source == "the account's cap"
    with Ledger(path) as ledger:
        assert (ledger.get_head(), len(ledger.read_entries())) == (head, entries)
        with pytest.raises(BudgetExceeded):
            ledger.reserve(
                "digits", mechanism.privacy_events(choice.remaining_queries + 1), fingerprint="", mechanism="", run=""
            )
        ledger.reserve(
            "digits", mechanism.privacy_events(choice.remaining_queries), fingerprint="", mechanism="", run=""
        )
    assert choice.remaining_queries == choice.max_queries - 20  # mu^2 adds up
    shown = reports.format_report(report)
    assert f"{choice.remaining_queries} questions" in shown and "of 4 at delta 1e-4" in " ".join(shown.split())


def test_terms_that_a_run_would_refuse_are_named(home):
    with Ledger(home / "ledger.sqlite") as ledger:
        terms = {"budget_epsilon": 4.0, "delta": 1e-4, "adjacency": "add_remove", "unit": "record"}
        ledger.open_account("digits", planned_events=GNMax(sigma=8).privacy_events(1), **terms)
    notes = plan("privacy.delta=1e-5", "privacy.budget_epsilon=3", "partition=replace_one", "teachers=50").notes
    assert [note.split(": ")[0] for note in notes] == ["A run would be refused"] * 3
    assert "epsilon 4" in notes[0] and "delta 0.0001" in notes[1] and "add_remove" in notes[2]


def test_no_ledger_is_made_where_there_is_none(home):
    assert plan("teachers=50").account is None
    assert list(home.iterdir()) == []


def test_a_target_sets_the_noise_as_in_a_run():
    report = plan("privacy.target_epsilon=1.5")
    expected = run_plan("privacy.target_epsilon=1.5").calibrate_noise().mechanism.sigma
    assert [choice.num_teachers for choice in report.choices] == [37, 75, 150]
    for choice in report.choices:
        assert choice.sigma == expected == choice.sigma_for_target
        assert choice.epsilon == pytest.approx(1.5, rel=1e-8)


def test_a_target_below_what_the_checks_alone_cost_is_out_of_reach():
    choice = only("mechanism=confident", "teachers=50", "mechanism.screen_sigma=2", "privacy.target_epsilon=1")
    assert choice.verdict == "cannot" and "out of reach" in choice.problem and choice.sigma_for_target is None


# ---- the grid ------------------------------------------------------------------------------------------------------


def test_what_is_left_open_is_halved_and_doubled():
    def grid(*settings):
        return [(choice.num_teachers, choice.sigma) for choice in plan(*settings).choices]

    assert grid() == [(k, s) for k in (37, 75, 150) for s in (5.5, 11, 22)]
    assert grid("teachers=80") == [(80, 5.5), (80, 11), (80, 22)]
    assert grid("num_teachers=80,90", "mechanism.sigma=5") == [(80, 5), (90, 5)]
    assert grid("num_teachers=range(10,40,10)", "mechanism.sigma=5") == [(10, 5), (20, 5), (30, 5)]


def test_a_recommended_threshold_moves_with_the_number_of_teachers():
    report = plan("dataset=mnist", "mechanism=confident", "num_teachers=125,250,1000")
    assert [choice.threshold for choice in report.choices] == [100, 200, 800]
    assert "mechanism.threshold=100" in report.choices[0].settings
    given = plan("dataset=mnist", "mechanism=confident", "num_teachers=125,250", "mechanism.threshold=90")
    assert [choice.threshold for choice in given.choices] == [90, 90]


@pytest.mark.slow
def test_the_settings_of_a_row_are_those_of_the_run_it_describes():
    for choice in plan("dataset=mnist", "mechanism=confident").choices:
        each = run_plan(*choice.settings)
        assert (each.num_teachers, each.mechanism.sigma) == (choice.num_teachers, choice.sigma)
        assert each.mechanism.threshold == choice.threshold


# ---- what cannot work ----------------------------------------------------------------------------------------------


def test_stability_with_few_teachers_is_refused_with_the_number_it_takes(capsys):
    assert command.main(["dataset=mnist", "mechanism=sparse_vector", "teachers=250,5000"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    needed = SparseVector(epsilon=1, delta=1e-5, max_failures=20).compute_scales(50).min_teachers
    assert f"(K 250) num_teachers must be at least {needed} for mechanism=sparse_vector" in shown
    assert 2000 < needed < 5000
    few, many = plan("dataset=mnist", "mechanism=sparse_vector", "teachers=250,5000").choices
    with pytest.raises(ValueError) as refused:
        SparseVector(epsilon=1, delta=1e-5, max_failures=20).check(num_queries=50, num_teachers=250, num_classes=10)
    assert few.problem == str(refused.value) and few.verdict == "cannot" and few.forecast is None
    assert many.problem is None and many.forecast is not None


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


def test_noise_that_drowns_the_votes_is_called_random():
    report = plan("mechanism.sigma=100000", "teachers=50")
    (choice,) = report.choices
    assert choice.verdict == "random" and abs(choice.forecast.accuracy - 0.1) < 0.05
    assert "little better than guesses" in reports.format_report(report)
    assert only("mechanism.sigma=4", "teachers=50").verdict == "ok"


def test_questions_and_teachers_beyond_what_is_declared_are_refused():
    assert "450 points" in only("num_queries=451", "teachers=50", "mechanism.sigma=8").problem
    assert "1100 private records" in only("teachers=1101", "mechanism.sigma=8").problem


def test_few_answers_are_told_from_none_wrong():
    screen = ("mechanism.threshold=60", "mechanism.screen_sigma=12")
    choice = only("mechanism=confident", "teachers=50", "mechanism.sigma=8", *screen)
    assert choice.forecast.answer_rate < 0.1 and choice.verdict == "few"


def test_the_best_is_the_cheapest_among_those_with_most_right_labels():
    choices = list(plan().choices)
    chosen = select_best(choices)
    works = [choice for choice in choices if choice.verdict == "ok"]
    assert chosen in works
    for other in works:
        assert (
            other.num_correct_labels < 0.98 * max(w.num_correct_labels for w in works)
            or other.epsilon >= chosen.epsilon
        )
    assert select_best([choice for choice in choices if choice.verdict != "ok"]) is None


# ---- what it must not touch ----------------------------------------------------------------------------------------


def test_private_records_are_never_loaded(capsys):
    with pytest.raises(PrivateRecordsRead):
        run_plan(*UNTOUCHABLE).dataset.load()
    assert command.main([*UNTOUCHABLE, "--json"]) == 0
    row = json.loads(capsys.readouterr().out)["choices"][4]
    assert row["num_classes"] == 10 and row["shard_size"] == 250


@pytest.mark.parametrize("name", DATASETS)
def test_every_data_set_is_planned_for_without_its_files(name, monkeypatch):
    source = type(run_plan(f"dataset={name}").dataset)
    monkeypatch.setattr(source, "load", lambda self: (_ for _ in ()).throw(PrivateRecordsRead()))
    choice = only(f"dataset={name}", "data_root=/nowhere", "teachers=60", "mechanism.sigma=8")
    assert choice.problem is None and choice.forecast is not None


def test_a_trained_pilot_leaves_the_planned_data_alone():
    pilot = ("pilot.dataset=digits", "pilot.teachers=4", "pilot.steps=40", "pilot.num_queries=100")
    report = plan(*UNTOUCHABLE, *pilot, "teachers=250", "mechanism.sigma=20")
    assert 0.2 < report.choices[0].forecast.teacher_accuracy < 1 and "trained on digits" in report.pilot


@pytest.mark.parametrize("source", [Digits(), Glyphs(private=60, public=30, test=10, num_classes=4)])
def test_declared_facts_are_those_of_the_loaded_data(source):
    declared, data = DeclaredFacts.from_source(source), source.load()
    assert declared.num_classes == data.spec.num_classes
    assert declared.num_records == data.spec.nominal_size and declared.num_public == len(data.pool)
    assert declared.name == data.spec.name


def test_declared_facts_of_sources_whose_files_are_elsewhere():
    assert DeclaredFacts.from_source(Mnist()) == DeclaredFacts(
        name="mnist", num_classes=10, num_records=60_000, num_public=9000
    )
    assert DeclaredFacts.from_source(Mnist(private=500)).num_records == 500
    assert (
        DeclaredFacts.from_source(Svhn()).num_records == 73_257
        and DeclaredFacts.from_source(Svhn(extra=True)).num_records == 604_388
    )
    assert DeclaredFacts.from_source(Csv()) == DeclaredFacts(name="csv")
    assert DeclaredFacts.from_source(Csv(classes=["a", "b", "c"], nominal_size=9)) == DeclaredFacts(
        name="csv", num_classes=3, num_records=9
    )


# ---- the pilot -----------------------------------------------------------------------------------------------------


def plurality(model, num_teachers):
    votes, truth_Q = model.draw_votes(num_teachers, 4000, 0)
    return float((votes.compute_plurality().numpy() == truth_Q).mean())


def test_simulated_votes_keep_the_guess():
    for accuracy, num_classes in ((0.6, 10), (0.8, 2), (0.95, 5)):
        model = simulate_votes(accuracy, num_classes, 20_000, seed=1)
        assert model.teacher_accuracy == pytest.approx(accuracy, abs=0.01)
        assert np.allclose(model.share_QC.sum(1), 1) and (model.share_QC >= 0).all()
        # Exchangeable classes: the truth is any of them, and so is the rival.
        assert np.bincount(model.truth_Q).min() > 0.9 * 20_000 / num_classes


@pytest.mark.parametrize(
    "accuracy,teachers,measured",
    # Measured, as mean and plurality accuracy: 25 teachers on digits (22 and 44 records each), 16 on MNIST (120 and
    # 480) and 16 on glyphs (125 and 500).
    [
        (0.639, 25, 0.916),
        (0.788, 25, 0.933),
        (0.727, 16, 0.845),
        (0.866, 16, 0.906),
        (0.772, 16, 0.909),
        (0.936, 16, 0.967),
    ],
)
def test_a_simulated_plurality_is_near_that_of_real_ensembles(accuracy, teachers, measured):
    assert plurality(simulate_votes(accuracy, 10, 4000, seed=0), teachers) == pytest.approx(measured, abs=0.075)
    # The picture without rivals and hard questions is refuted by the same numbers.
    even = np.full((4000, 10), (1 - accuracy) / 9)
    even[:, 0] = accuracy
    assert plurality(VoteModel(share_QC=even, truth_Q=np.zeros(4000, dtype=np.int64)), teachers) > measured + 0.03


def test_shared_mistakes_are_the_correlation_of_two_teachers_being_right():
    for shared in (0.1, 0.3, 0.7):
        model = simulate_votes(0.8, 3, 50_000, seed=2, error_correlation=shared)
        right_Q = model.share_QC[np.arange(50_000), model.truth_Q]
        assert right_Q.var() / (0.8 * 0.2) == pytest.approx(shared, abs=0.02)
        assert model.low_correlation is None and model.high_correlation is None
    unknown = simulate_votes(0.8, 3, 5000, seed=2)
    assert plurality(unknown.low_correlation, 100) > plurality(unknown, 100) > plurality(unknown.high_correlation, 100)


def test_a_few_teachers_foretell_hundreds_within_three_points():
    """Of worlds with easy and hard questions, of which no part has the model's form; the few's own shares do not."""
    draw, found, naive, width = np.random.default_rng(0), 0, 0, []
    for world in range(20):
        num_classes, teachers, questions = (2, 4, 10)[world % 3], int(draw.integers(60, 400)), 2000
        hard_Q = draw.random(questions) < draw.uniform(0.02, 0.25)
        logit_QC = draw.normal(0, draw.uniform(0.3, 1.5), (questions, num_classes))
        truth_Q = draw.integers(num_classes, size=questions)
        logit_QC[np.arange(questions), truth_Q] += np.where(hard_Q, draw.uniform(-1, 0), draw.uniform(0.8, 3.0))
        share_QC = np.exp(logit_QC) / np.exp(logit_QC).sum(1, keepdims=True)
        said_KQ = (share_QC.cumsum(1) < draw.random((16, questions, 1))).sum(2).clip(max=num_classes - 1)
        model = fit_vote_model(said_KQ, truth_Q, num_classes, seed=world)
        silent = GNMax(sigma=1e-3)
        plan = {"num_teachers": teachers, "num_queries": 2000, "rounds": 1, "min_queries": 8000, "seed": 0}
        low, high = simulate_release(silent, model, **plan).interval
        few = VoteModel(share_QC=(said_KQ[:, :, None] == np.arange(num_classes)).mean(0), truth_Q=truth_Q)
        real = float((share_QC.argmax(1) == truth_Q).mean())
        found += low <= real <= high
        naive += low <= simulate_release(silent, few, **plan).accuracy <= high
        width.append(high - low)
    assert found >= 17 and np.median(width) <= 0.065 and naive <= found - 4, (found, np.median(width), naive)


def test_the_guess_falls_with_smaller_shards_but_never_below_guessing():
    pilot = PilotConfig(teacher_accuracy=0.8, at_teachers=100)
    assert pilot.compute_accuracy(100, 10) == 0.8
    assert pilot.compute_accuracy(400, 10) == pytest.approx(0.6) and pilot.compute_accuracy(25, 10) == pytest.approx(
        0.9
    )
    assert pilot.compute_accuracy(10**6, 10) == pytest.approx(0.1) and pilot.compute_accuracy(10**6, 2) == 0.5


def unanimous(num_classes):
    share_QC = np.zeros((2000, num_classes))
    share_QC[:, 0] = 1
    return VoteModel(share_QC=share_QC, truth_Q=np.zeros(2000, dtype=np.int64))


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
                forecast_gradients(
                    descent, GradientMethod(), clouds(have), num_records=1600, build_encoder=lambda _: None, seed=seed
                ).accuracy
                for seed in range(6)
            ]
            for have in (1600, 400)
        ]
        right[sigma], fewer = np.mean(draws, axis=1)
        assert fewer == pytest.approx(right[sigma], abs=0.05)
    data, partition = clouds(1600), AddRemove() if adjacency == "add_remove" else ReplaceOne()
    asked = GradientMethod(size=1600).build_sensitive(data, partition.make_shards(data.private, 1, 0), encoder=None)
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
        ([*asked[:-1], "pilot.num_classes=3", *letters], "4 classes"),
        ([*asked, *letters, "dataset.name=letters"], "the very records"),
        ([*asked, "pilot.dataset=glyphs"], "use pilot.dataset=digits"),
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
    monkeypatch.setattr(command, "train_vote_model", lambda *given: seen.append(given[2]) or train_vote_model(*given))
    asked = (*encoded, f"dataset.path={tmp_path}/mails.csv", "dataset.name=mails", "pilot.dataset=old")
    report = plan(*asked, *BRIEF, "mechanism.sigma=2", "num_queries=20")
    texts = [row.split(",")[0] for row in (tmp_path / "old.csv").read_text().split()[1:]]
    feature_ND = worlds.static(tmp_path).encode(texts)
    (data,) = seen
    assert sorted(data.private.x.tolist()) == sorted(feature_ND.tolist()) and not (tmp_path / "mails.csv").exists()
    teachers, gradients = report.choices
    assert teachers.forecast.accuracy > 0.8 and gradients.forecast.accuracy > 0.8


def test_a_stand_in_of_the_same_kind_is_of_other_files_and_knows_its_classes(encoded, tmp_path, capsys):
    planned = (*encoded, "dataset.name=mails", "pilot.dataset=old", *BRIEF)
    mails(tmp_path, "bare", seed=2, labeled=False)
    for settings, said in (
        (planned, "the very records"),  # nobody knows of which file
        ((*planned, f"dataset.path={tmp_path}/dataset/../old.csv"), "the very records"),
        ((*planned, "dataset.path=old.csv", f"data_root={tmp_path}"), "the very records"),
        ((*encoded, "dataset.path=mails.csv", "pilot.dataset=bare", *BRIEF), "of unknown classes"),
        ((*encoded, "pilot.dataset=digits", "pilot.num_classes=10", *BRIEF), "is for texts"),
    ):
        assert command.main(settings) == 2
        assert said in capsys.readouterr().err


DROWNED = ("dataset=csv", "dataset.nominal_size=3000", "pilot.num_classes=4", "pilot.num_queries=200", "pilot.steps=20")


@pytest.mark.slow  # three pilots; what they forecast, and where they are tried, is tested by default
def test_gradients_are_chosen_where_the_pilot_finds_them_better_at_the_same_price(letters):
    asked = (*DROWNED, *letters, "teachers=12,24")
    report = plan(*asked, "mechanism.sigma=20")
    teachers, gradients = report.choices[:-1], report.choices[-1]
    assert gradients.mechanism == "gradient_descent" and gradients.num_teachers == 0
    assert (
        gradients.epsilon == pytest.approx(teachers[0].epsilon, rel=1e-3) and gradients.epsilon <= teachers[0].epsilon
    )
    assert (
        all(choice.forecast.accuracy < gradients.forecast.accuracy for choice in teachers)
        and report.best_choice is gradients
    )
    assert report.best_choice.settings[:2] == ("dataset=csv", "dataset.nominal_size=3000")
    again = plan(*report.best_choice.settings, letters[1], "pilot.num_classes=4")
    assert again.choices[0].epsilon == gradients.epsilon
    target = plan(*asked, "privacy.target_epsilon=2")
    assert target.best_choice.mechanism == "gradient_descent" and target.best_choice.epsilon == pytest.approx(
        2, rel=1e-6
    )
    assert not any("mechanism.sigma" in setting for setting in target.best_choice.settings)


@pytest.mark.slow
def test_gradients_are_offered_only_where_the_choice_was_left_open_and_can_be_tried(letters):
    for left in ([*letters, "mechanism=gaussian"], [*letters, "method=teachers"], []):
        report = plan(*DROWNED, "teachers=12", *left, "mechanism.sigma=40")
        assert all(choice.num_teachers for choice in report.choices)
    assert any("pilot.dataset" in note for note in report.notes)


def test_gradients_are_better_by_their_share_of_right_labels_and_not_by_their_number():
    teachers = plan("dataset=digits").best_choice
    gradients = dataclasses.replace(teachers, num_teachers=0, num_queries=10 * teachers.num_queries)
    assert select_best([teachers, gradients]) is teachers
    more = dataclasses.replace(gradients, outcome=dataclasses.replace(gradients.forecast, right=0.99))
    assert select_best([teachers, more]) is more
    dearer = dataclasses.replace(more, routes={"gdp": 2 * teachers.epsilon})
    assert select_best([teachers, dearer]) is teachers and select_best([dearer]) is dearer


def test_the_lead_that_labels_need_is_said():
    report = plan("dataset=digits", "teachers=75", "mechanism.sigma=11")
    assert report.choices[0].break_even_lead == feasibility.compute_break_even_lead(GNMax(sigma=11.0), 10)
    assert "from a lead of so many votes: 17.8 (sigma 11)" in " ".join(reports.format_report(report).split())


def test_votes_go_through_the_mechanism_itself():
    """Unanimous teachers: the chances of an answer and of the right one are known exactly."""
    setting = {"num_teachers": 30, "rounds": 1, "min_queries": 40_000, "seed": 3}
    outcome = simulate_release(GNMax(sigma=25), unanimous(2), num_queries=50, **setting)
    chance = norm.cdf(30 / (math.sqrt(2) * 25))
    assert outcome.answer_rate == 1 and outcome.num_queries == 40_000
    assert outcome.accuracy == pytest.approx(chance, abs=4 * math.sqrt(chance * (1 - chance) / 40_000))
    assert abs(outcome.accuracy - norm.cdf(30 / 25)) > 0.05  # the noise of one count only
    mechanism = ConfidentGNMax(sigma=25, screen_sigma=20, threshold=40)
    answered = simulate_release(mechanism, unanimous(2), num_queries=50, **setting).answer_rate
    chance = norm.cdf((30 - 40) / 20)
    assert answered == pytest.approx(chance, abs=4 * math.sqrt(chance * (1 - chance) / 40_000))


def test_soft_labels_are_tried_on_probabilities_where_the_pilot_has_them():
    """All vote for the same class; whether a bin leads is for their probabilities to say."""
    mechanism = SoftSparseVector(epsilon=8, delta=1e-5, max_failures=2, bins=10)
    setting = {"num_teachers": 200, "num_queries": 20, "rounds": 1, "min_queries": 100, "seed": 3}

    def answered(score_K, soft=True):
        score_KQS = score_K[:, None, None].expand(-1, 2000, 1)
        crowd = dataclasses.replace(unanimous(2), score_KQS=score_KQS)
        return simulate_release(mechanism, crowd, soft=soft, **setting).answer_rate

    alike, spread = torch.full((20,), 0.12), torch.linspace(0.02, 0.48, 20)
    assert answered(alike) == answered(spread, soft=False) == 1
    assert answered(spread) == 0


SOFT_LABELS = ("mechanism=soft_sparse_vector", "mechanism.epsilon=30", "mechanism.max_failures=2", "num_queries=20")


def test_a_plan_of_soft_labels_says_what_its_forecast_rests_on():
    asked = (*UNTOUCHABLE, *SOFT_LABELS, "teachers=250", "privacy.budget_epsilon=40", "pilot.num_queries=100")
    by_votes = plan(*asked)
    assert "every probability were 0 or 1" in by_votes.notes[-1]
    trained = plan(*asked, "pilot.dataset=digits", "pilot.teachers=4", "pilot.steps=40")
    assert "probabilities of at most 4 teachers" in trained.notes[-1]
    assert trained.choices[0].forecast.answer_rate < 0.5 * by_votes.choices[0].forecast.answer_rate
    together = plan(*asked, "method=teachers_transductive")  # who have votes alone
    assert not any("Soft labels" in note for note in (*together.notes, *plan("teachers=50").notes))


def test_a_mechanism_that_stops_early_leaves_the_rest_unanswered():
    mechanism = ConfidentGNMax(sigma=1, screen_sigma=1, threshold=1, max_answers=5)
    outcome = simulate_release(
        mechanism, unanimous(3), num_teachers=30, num_queries=20, rounds=1, min_queries=2000, seed=0
    )
    assert outcome.answer_rate == 0.25 and outcome.accuracy == 1


def test_a_plan_repeats_itself():
    first, again = plan("teachers=50"), plan("teachers=50")
    assert [c.forecast for c in first.choices] == [c.forecast for c in again.choices]


def test_reverse_knn_has_no_teachers_to_plan(capsys):
    report = plan("mechanism=histogram", "dataset=a9a")
    assert all("method=reverse_knn" in choice.problem for choice in report.choices)
    report = plan(
        "mechanism=gradient_descent", "method=gradients", "dataset=a9a"
    )  # nor have gradients a forecast without features
    (first, *_) = report.choices
    assert first.verdict == "unknown" and first.num_teachers == 0 and report.best_choice is None
    assert command.main(["mechanism=histogram", "method=reverse_knn", "dataset=a9a"]) == 2
    assert "target_epsilon" in capsys.readouterr().err


@pytest.mark.parametrize("name", MECHANISMS)
def test_every_mechanism_can_be_planned(name):
    settings = ["dataset=a9a", "num_queries=5", "teachers=4000"]
    report = plan(f"mechanism={name}", *settings)
    assert all(choice.problem is None and choice.forecast is not None for choice in report.choices), report.choices
    assert max(map(len, reports.format_report(report).splitlines())) <= reports.WIDTH


# ---- the report -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        (),
        pytest.param(("dataset=svhn", "mechanism=confident", "privacy.budget_epsilon=2"), marks=pytest.mark.slow),
        (
            "dataset=mnist",
            "mechanism=gaussian,soft_stability,stability",
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


def test_the_star_says_its_rule_and_where_what_was_tried_ends():
    given = ("dataset=mnist", "privacy.budget_epsilon=2", "mechanism.sigma=40")
    report = plan(*given, "teachers=65,125,250")
    said = " ".join(reports.format_report(report).split())
    near = [
        c for c in report.choices if c.num_correct_labels >= 0.98 * max(c.num_correct_labels for c in report.choices)
    ]
    assert report.best_choice is min(near, key=lambda choice: choice.epsilon)
    assert "* of the choices within 2 % of the most right labels that the budget holds, the one of the least" in said
    assert "num_teachers=250 is the largest that was tried; more may be better." in said
    wide = " ".join(reports.format_report(plan(*given, "teachers=125,250,20000")).split())
    assert "was tried" not in wide
    for choice in report.choices:
        low, high = choice.forecast.interval
        assert (
            0 <= low < choice.forecast.accuracy < high <= 1
            and f"{math.floor(100 * low)}-{math.ceil(100 * high)}" in said
        )


def test_json_is_one_object_with_the_same_figures(capsys):
    settings = ["mechanism.sigma=0.001,8.3", "teachers=50"]
    assert command.main([*settings, "--json"]) == 0
    said = json.loads(capsys.readouterr().out, parse_constant=lambda word: pytest.fail(word))
    report = plan(*settings)
    assert said["budget_epsilon"] == 10 and said["best"] == 1
    for row, choice in zip(said["choices"], report.choices, strict=True):
        assert (
            row["epsilon"] == choice.epsilon and row["fits"] == choice.max_queries and row["verdict"] == choice.verdict
        )
        assert row["outcome"]["right"] == choice.forecast.accuracy and row["works"] == (choice.verdict == "ok")
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
        (["pilot.teacher_accuracy=1.5"], "pilot.teacher_accuracy"),
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
