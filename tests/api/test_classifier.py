"""PATEClassifier by scikit-learn's protocol: what it refuses before a charge, and what its release is good for."""

import functools
import json
import math
import os
import pickle
import subprocess
import sys
import uuid

import numpy as np
import pandas as pd
import pytest
import scipy.sparse
import torch
from safetensors.torch import load_file
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import Pipeline
from sklearn.preprocessing import FunctionTransformer
from sklearn.utils.estimator_checks import check_estimator
from torchvision.transforms import v2

from pate_torch import Network, PATEClassifier, load_student
from pate_torch.api import pate
from pate_torch.api.inputs import encode_labels
from pate_torch.api.released import ReleasedClassifier
from pate_torch.cli import main as cli
from pate_torch.features.encoder import Encoder
from pate_torch.methods import teacher_votes
from pate_torch.methods.base import ModelForecast
from pate_torch.methods.gradients import GradientMethod, plan_descent
from pate_torch.methods.labeling import LabelingMethod
from pate_torch.privacy.ledger import Ledger
from pate_torch.privacy.noise import NoiseSource
from pate_torch.privacy.records import DataSpec, EncoderCard, PrivateRecords
from pate_torch.release.charges import format_charges
from pate_torch.release.store import UnfinishedCall
from pate_torch.session import ReleaseStopped
from pate_torch.students import private_test, store
from pate_torch.students.base import Student
from pate_torch.students.semi_supervised import LabelSpreading
from pate_torch.teachers.recipe import TeacherRecipe
from tests import ROOT
from tests.api.classifiers import draw_table, make_classifier
from tests.spies import spy
from tests.worlds import clouds

X, Y = (part.numpy() for part in clouds(900, 0))
PUBLIC = clouds(150, 1)[0].numpy()
TEST, TRUTH = (part.numpy() for part in clouds(300, 2))
EPSILONS = {"gradients": 4.0, "teachers": 4.0, "dpsgd": 6.0}


@pytest.fixture
def make(tmp_path):
    return functools.partial(make_classifier, tmp_path)


def test_sparse_rows_go_through_a_pipeline_and_cross_validation_cannot_spend_by_accident(make):
    convert = scipy.sparse.csr_matrix
    steps = Pipeline([("halved", FunctionTransformer(lambda x: x / 2)), ("clf", make(num_records_about=9e2))])
    steps.fit(convert(X), Y, clf__public=convert(PUBLIC / 2))
    assert steps.score(convert(TEST), TRUTH) > 0.9
    with pytest.raises(ValueError, match="allow_refit"):
        cross_val_score(make(), X, Y, cv=3, params={"public": PUBLIC}, error_score="raise")


@pytest.mark.parametrize("y", [np.eye(3, dtype=int)[[0] * 900], [[0, 1]] * 900], ids=["indicators", "lists"])
def test_several_labels_of_a_record_are_refused(make, y):
    with pytest.raises(ValueError, match=r"must hold one class for each record of X. Several labels"):
        make().fit(X, y, public=PUBLIC)


@pytest.mark.parametrize("convert", [list, pd.Series, np.array], ids=["list", "series", "array"])
def test_several_owners_of_a_record_are_refused(make, convert):
    owners = convert([["anna", "bob"], ["anna", "carl"]] * 450)
    with pytest.raises(ValueError, match=r"^groups=.*(must hold ids of one type|must be one list, array or Series)"):
        make().fit(X, Y, public=PUBLIC, groups=owners)


def test_columns_of_dates_are_refused_and_the_error_names_the_column(make):
    days = pd.DataFrame({"x": PUBLIC[:, 0], "day": pd.Timestamp("2020-01-01") + pd.to_timedelta(range(150), "D")})
    with pytest.raises(ValueError, match=r"column 'day' holds dates.*days since"):
        make().fit(days, Y[:150], public=days)


@pytest.fixture(scope="module")
def fitted(tmp_path_factory):
    """The classifier of a method, fitted once to the clouds: read-only."""

    @functools.cache
    def fit(method="gradients"):
        home = tmp_path_factory.mktemp(method)
        return make_classifier(home, EPSILONS[method], method=method).fit(X, Y, public=PUBLIC)

    return fit


def read_account(home):
    with Ledger(home / "ledger.sqlite", create=False) as ledger:
        (account,) = ledger.list_accounts()
    return account


# ---- scikit-learn's protocol -------------------------------------------------------------------------------------


class WithThrownAwayAccounts(PATEClassifier):
    """Its public points are drawn uniformly from declared ranges; no account is charged twice."""

    def fit(self, X, y):
        table = hasattr(X, "columns")
        try:
            width = X.shape[1] if scipy.sparse.issparse(X) else np.asarray(X).shape[1]
        except (IndexError, TypeError):
            width = 2
        drawn = np.random.default_rng(0).uniform(-5, 5, (200, width))
        before = self.account, self.home
        self.account, self.home = uuid.uuid4().hex, str(before[1]) + "/" + uuid.uuid4().hex
        try:
            return super().fit(X, y, public=type(X)(drawn, columns=X.columns) if table else drawn)
        finally:
            self.account, self.home = before


NOISE_DIFFERS = "compares two fits, whose noise differs: no seed may determine it"
EXPECTED_FAILURES = dict.fromkeys(
    ["check_classifier_data_not_an_array", "check_fit_idempotent", "check_supervised_y_2d"], NOISE_DIFFERS
)
REPEATED = pytest.mark.slow(reason="scikit-learn's 50 checks once more, by a hundred fits of teachers")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("method", ["gradients", pytest.param("teachers", marks=REPEATED)])
def test_scikit_learns_own_checks(method, tmp_path, monkeypatch):
    for name in ("render_page", "render_model_card"):  # a hundred pages that nobody reads
        monkeypatch.setattr(f"pate_torch.release.renderer.{name}", lambda _: "")
    settings = {"num_records_about": 100, "classes_are_public": True, "spend_anyway": True, "verbose": False}
    estimator = WithThrownAwayAccounts(8.0, method=method, home=tmp_path, **settings)
    results = check_estimator(estimator, expected_failed_checks=EXPECTED_FAILURES, on_fail="raise")
    names = {s: [r["check_name"] for r in results if r["status"] == s] for s in ("passed", "xfail")}
    assert len(names["passed"]) >= 45 and set(names["xfail"]) <= set(EXPECTED_FAILURES)


def test_probabilities_add_up_and_a_table_may_have_more_columns(make):
    table, ill = draw_table(900, seed=0)
    public, new = draw_table(200, seed=1)[0], draw_table(2000, seed=2)[0]
    classifier = make(classes=["ill", "well"]).fit(table, ill, public=public)
    classifier.save_release(classifier.release_.parent / "copy")
    received = ReleasedClassifier.load(classifier.release_)
    for model in (classifier, received):
        probability_NC = model.predict_proba(new)
        assert probability_NC.dtype == np.float64 and np.abs(probability_NC.sum(1) - 1).max() < 1e-15
        assert np.array_equal(model.predict_proba(new.assign(note="-")), probability_NC)
        assert np.array_equal(model.predict_proba(new.assign(note="-")[["note", "age", "ward"]]), probability_NC)
    with pytest.raises(ValueError, match=r"same order as they were in fit\.\nPass X\[list\(clf\.feature_names_in_\)\]"):
        classifier.predict(new[["ward", "age"]])
    assert np.array_equal(classifier.predict(new[list(classifier.feature_names_in_)]), received.predict(new))


def test_what_is_pickled_holds_no_record(make):
    marked = X.copy()
    marked[0] = 123456.789
    classifier = make().fit(marked, Y, public=PUBLIC)
    stored = pickle.dumps(classifier)
    for width in (np.float32, np.float64):
        assert width(123456.789).tobytes() not in stored
    assert np.array_equal(pickle.loads(stored).predict(TEST), classifier.predict(TEST))


# ---- what is charged ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", EPSILONS)
def test_a_fit_costs_epsilon_and_a_second_wants_to_be_asked_for(method, fitted):
    first, epsilon = fitted(method), EPSILONS[method]
    account = read_account(first.home)
    assert epsilon - 0.01 < account.guarantee.epsilon <= epsilon
    assert (account.delta, account.budget_epsilon) == (1e-5, 10)
    assert first.privacy_["guarantee"]["epsilon"] == pytest.approx(account.guarantee.epsilon)
    words = format_charges(first.home, account, [*account.charges.values()])
    assert f"accountant {'pld' if method == 'dpsgd' else 'gdp'}" in words
    refusal = rf"charged already \(epsilon {epsilon:g}.*allow_refit=True adds a release of epsilon 2"
    with pytest.raises(ValueError, match=refusal):
        make_classifier(first.home, 2.0, method=method).fit(X, Y, public=PUBLIC)


def test_labels_that_would_be_mostly_noise_are_not_paid_for(make, tmp_path):
    # Ten teachers, and noise of dozens of votes.
    hopeless = {"method": "teachers", "num_records_about": None, "epsilon": 0.3}
    with pytest.raises(ValueError, match=r"epsilon=0\.3.*mostly noise.*num_records_about=.*spend_anyway=True"):
        make(**hopeless).fit(X, Y, public=PUBLIC)
    assert not (tmp_path / "ledger.sqlite").exists()


def test_the_number_of_units_is_public_where_one_is_replaced(make):
    classifier = make(6.0, num_records_about=None, adjacency="replace_one").fit(X, Y, public=PUBLIC)
    assert classifier.method_.name == "gradients" and classifier.score(TEST, TRUTH) > 0.85
    scores = json.loads((classifier.release_ / "release.json").read_text())
    assert scores["parameters"]["step_size"] == pytest.approx(
        plan_descent(classifier.method_.mechanism, 900, len(PUBLIC), num_classes=3)[0].step_size, rel=0.01
    )


STOPPED = {"num_records_about": None, "epsilon": 0.5}


def test_labels_that_are_no_class_stop_the_fit_by_their_noisy_counts_alone(make, tmp_path):
    """The exact labels refuse nothing: one record of a class more would change a refusal into a release."""
    with pytest.raises(ReleaseStopped, match="too few records for the noise"):
        make(**STOPPED, classes=["a", "b"]).fit(X, Y, public=PUBLIC)
    (charge,) = read_account(tmp_path).charges.values()
    assert charge.is_stopped and charge.incurred_events == charge.reserved_events[:1]


def test_counts_that_show_too_few_records_stop_the_fit_and_are_all_that_is_charged(make, tmp_path, monkeypatch):
    monkeypatch.setattr(GradientMethod, "forecast_model", lambda *_: ModelForecast(60, -0.1, -0.4, 0.2))
    message = r"too few records for the noise.*larger epsilon \(it is 0\.5\).*spend_anyway.*needs allow_refit=True"
    with pytest.raises(ReleaseStopped, match=message):
        make(**STOPPED).fit(X, Y, public=PUBLIC)
    (charge,) = read_account(tmp_path).charges.values()
    assert charge.is_stopped and charge.is_committed
    assert charge.incurred_events == charge.reserved_events[:1] and len(charge.reserved_events) == 2
    assert read_account(tmp_path).ex_post_guarantee.epsilon < 0.15
    for second in (make(**STOPPED), make(**STOPPED, spend_anyway=True)):
        with pytest.raises(ValueError, match=r"charged already.*allow_refit=True adds a release"):
            second.fit(X, Y, public=PUBLIC)
    assert len(read_account(tmp_path).charges) == 1
    with pytest.raises(ReleaseStopped):
        make(**STOPPED, allow_refit=True).fit(X, Y, public=PUBLIC)
    make(**STOPPED, allow_refit=True, spend_anyway=True).fit(X, Y, public=PUBLIC)
    assert [charge.is_stopped for charge in read_account(tmp_path).charges.values()] == [True, True, False]
    with pytest.raises(ValueError, match="allow_refit"):
        make(**STOPPED).fit(X, Y, public=PUBLIC)


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.FitFailedWarning")
def test_cross_validation_spends_once_if_its_fits_stop(make, tmp_path, monkeypatch):
    monkeypatch.setattr(GradientMethod, "forecast_model", lambda *_: ModelForecast(60, -0.1, -0.4, 0.2))
    with pytest.raises(ValueError, match=r"(?s)All the 3 fits failed.*has been charged already.*allow_refit=True"):
        cross_val_score(make(**STOPPED), X, Y, cv=3, params={"public": PUBLIC})
    assert len(read_account(tmp_path).charges) == 1


def test_a_fit_that_died_right_after_it_stopped_can_be_repeated(make, tmp_path, monkeypatch):
    monkeypatch.setattr(GradientMethod, "forecast_model", lambda *_: ModelForecast(60, -0.1, -0.4, 0.2))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(UnfinishedCall, "end", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
        make(**STOPPED).fit(X, Y, public=PUBLIC)
    with pytest.raises(ValueError, match="allow_refit=True adds a release"):  # there is nothing to finish
        make(**STOPPED).fit(X, Y, public=PUBLIC)
    with pytest.raises(ReleaseStopped):
        make(**STOPPED, allow_refit=True).fit(X, Y, public=PUBLIC)
    assert [charge.is_stopped for charge in read_account(tmp_path).charges.values()] == [True, True]


@pytest.mark.filterwarnings("ignore:public. about .* lie outside")  # by the noise alone, in one fit of a thousand
def test_few_records_are_expected_to_give_no_model(make, tmp_path):
    """The noise of the counts, 30 units each, hides that there are twelve. One in twenty fits goes on."""
    outcomes = []
    for number in range(6):
        try:
            make(1.0, num_records_about=None, home=tmp_path / str(number)).fit(X[:12], Y[:12], public=PUBLIC)
        except ReleaseStopped as stopped:
            outcomes.append(stopped.forecast.skill)
    assert len(outcomes) >= 2 and max(outcomes) <= 0


def test_the_counts_are_released_and_a_declared_number_that_they_contradict_is_not_used(make, tmp_path):
    step_sizes = {}
    for about in (None, 2700, 300):
        clf = make(num_records_about=about, home=tmp_path / str(about)).fit(X, Y, public=PUBLIC)
        assert np.abs(clf.class_counts_ - np.bincount(Y)).max() < 60  # ten standard deviations
        assert json.loads((clf.release_ / "first_answers.json").read_text())["counts"] == clf.class_counts_.tolist()
        step_sizes[about] = json.loads((clf.release_ / "release.json").read_text())["parameters"]["step_size"]
        assert clf.score(TEST, TRUTH) > 0.85
    assert max(step_sizes.values()) < 1.1 * min(step_sizes.values())  # three times 900 would be 1.7 times as long


def test_another_working_directory_has_no_budget_of_its_own(make, tmp_path, monkeypatch):
    monkeypatch.delenv("PATE_HOME")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    for place in ("a", "b"):
        (tmp_path / place).mkdir()
        monkeypatch.chdir(tmp_path / place)
        if place == "b":
            with pytest.raises(ValueError, match="has been charged already"):
                make(home=None).fit(X, Y, public=PUBLIC)
        release = make(home=None, allow_refit=place == "b").fit(X, Y, public=PUBLIC).release_.absolute()
        assert (tmp_path / place / "outputs" / "runs") in release.parents
    assert len(list((tmp_path / "data").rglob("ledger.sqlite"))) == 1
    assert not list(tmp_path.glob("[ab]/**/ledger.sqlite"))


def test_a_fit_may_cost_more_than_ten_and_a_home_may_begin_with_a_tilde(make, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    make(20.0, home="~/store").fit(X, Y, public=PUBLIC)
    assert read_account(tmp_path / "store").budget_epsilon == 20 and not (tmp_path / "~").exists()


def test_no_umask_lets_others_write_into_what_a_fit_leaves(make, tmp_path):
    before = os.umask(0)
    try:
        settings = {"teacher": LogisticRegression(), "num_teachers": 20, "num_queries": 10}
        classifier = make(8.0, method="teachers", **settings).fit(X, Y, public=PUBLIC)
    finally:
        os.umask(before)
    assert (classifier.release_ / "student.safetensors").exists()
    for place in (tmp_path / "runs").rglob("*"):
        assert place.is_symlink() or not place.stat().st_mode & 0o022, place


def test_a_full_disk_is_named_with_what_was_charged(make, tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device", str(tmp_path / "student.safetensors"))

    monkeypatch.setattr("pate_torch.session.save_student", full)
    message = r"No space left.*Account 'clouds' is charged, and stays.*home=.*student\.safetensors"
    with pytest.raises(OSError, match=message):
        make().fit(X, Y, public=PUBLIC)


REFUSED = {
    "no classes": ({"classes": None}, {}, r"classes=None: must list all classes.*classes_are_public=True"),
    "equal classes": ({"classes": [0, 1, 1]}, {}, "classes=.*must be different"),
    "one class": ({"classes": [0]}, {}, "at least 2 classes"),
    "public": ({}, {"public": None}, "public=None: must be public points.*\\n.*\\n.*split_public"),
    "account": ({"account": None}, {}, "account=None: must name"),
    "epsilon": ({"epsilon": 0.0}, {}, "epsilon"),
    "delta": ({"delta": 2.0}, {}, "delta"),
    "method": ({"method": "magic"}, {}, "method"),
    "adjacency": ({"adjacency": "remove"}, {}, "adjacency"),
    "no size": ({"method": "dpsgd", "num_records_about": None}, {}, "num_records_about"),
    "size": ({"num_records_about": 0}, {}, "num_records_about"),
    "random_state": ({"random_state": -1}, {}, "random_state"),
    "groups of DP-SGD": ({"method": "dpsgd"}, {"groups": np.arange(900)}, "groups"),
    "few groups": ({}, {"groups": np.arange(3)}, "groups"),
    "adjacency of DP-SGD": ({"method": "dpsgd", "adjacency": "replace_one"}, {}, "adjacency"),
    "form": ({}, {"public": pd.DataFrame(PUBLIC)}, "public"),
    "width": ({}, {"public": PUBLIC[:, :1]}, "public"),
    "columns": ({}, {"X": pd.DataFrame(X), "public": pd.DataFrame(PUBLIC)[[0]]}, "lacks the columns 1"),
    "teacher": ({"method": "gradients", "teacher": LogisticRegression()}, {}, "teacher"),
    "student": ({"student": torch.nn.Linear(2, 3)}, {}, "student.*Pass the class, or lambda"),
    "width of a student": ({"student": lambda: torch.nn.Linear(2, 4)}, {}, r"student=\(2, 4\)"),
    "what is no student": ({"student": 3}, {}, "student='int'.*a Network"),
    "student of DP-SGD": ({"method": "dpsgd", "student": LogisticRegression()}, {}, "student.*dpsgd"),
    "weights": ({"class_weight": {7: 2.0}}, {}, "class_weight=.*no class"),
    "weights of DP-SGD": ({"method": "dpsgd", "class_weight": "balanced"}, {}, "class_weight='balanced'.*dpsgd"),
    "weights of a student": ({"class_weight": {0: 2.0}, "student": LogisticRegression()}, {}, "class_weight.*release"),
    "share": ({"private_test": 1.0}, {}, "private_test"),
    "test by DP-SGD": ({"method": "dpsgd", "private_test": 0.1}, {}, "private_test=0.1.*dpsgd"),
    "test of a student": ({"private_test": 0.1, "student": LogisticRegression()}, {}, "private_test=0.1.*release"),
    "weights without odds": (
        {"class_weight": "balanced", "student": LabelSpreading()},
        {},
        "class_weight=.*linear out",
    ),
    "test without odds": ({"private_test": 0.1, "student": LabelSpreading()}, {}, "private_test=.*linear output"),
    "encoder": ({"encoder": "wordllama"}, {}, "encoder='str': must be an Encoder, or the EncoderCard"),
    "text of classes": (
        {"classes": "012"},
        {},
        r"classes='012': must be a list of all classes.*For example classes=\[",
    ),
    "set of classes": ({"classes": {0, 1, 2}}, {}, "classes={0, 1, 2}: must be a list of all classes, in order"),
    "number of classes": ({"classes": 3}, {}, "classes=3: must be a list of all classes"),
    "text as share": ({"private_test": "0.1"}, {}, "private_test='0.1': must be a finite number. Pass 0 for no test"),
    "no share": ({"private_test": None}, {}, "private_test=None: must be a finite number. Pass 0 for no test"),
    "list of columns": ({"categories": ["a"]}, {}, r"categories=\['a'\]: must be keys and values"),
    "text of categories": ({"categories": {"x": "AB"}}, {}, r"categories\['x'\]='AB': must be a list"),
    "no categories": ({"categories": {"x": []}}, {}, r"categories={'x': \[\]}: must list the values"),
    "categories of a number": (
        {"categories": {"0": [1, 2]}},
        {"X": pd.DataFrame(X), "public": pd.DataFrame(PUBLIC)},
        r"categories={'0': \[1, 2\]}: lists no value of column '0', which holds numbers",
    ),
    "infinite public value": (
        {},
        {"X": pd.DataFrame(X), "public": pd.DataFrame(PUBLIC).replace(PUBLIC[3, 0], np.inf)},
        r"public=.*0='inf' \(row 3\).*must be finite",
    ),
    "no public points": (
        {},
        {"X": pd.DataFrame(X), "public": pd.DataFrame(PUBLIC)[:0]},
        "public='0 points': must hold",
    ),
    "few public points": ({}, {"public": PUBLIC[:9]}, "public='9 points': are fewer than 10.*spend_anyway=True"),
    "no labels": ({}, {"y": None}, "y=None: must hold one class for each record of X"),
    "few labels": ({}, {"y": Y[:-1]}, "y='899 labels': must hold one class for each of the 900 records of X"),
    "few ids": ({}, {"groups": [1, 2]}, "groups='list of 2 ids': must be .* one id for each of the 900 records"),
    "two columns of a name": (
        {},
        {"X": pd.DataFrame(X, columns=["a", "a"]), "public": pd.DataFrame(PUBLIC, columns=["a", "a"])},
        r"X=\['a'\]: must be names of one column each",
    ),
    "dictionaries": (
        {},
        {"X": pd.DataFrame(X).to_dict("records"), "public": pd.DataFrame(PUBLIC).to_dict("records")},
        r"X='list of 1 dim.*: must be a DataFrame, or rows \[N, D\].*Convert the records by pandas.DataFrame\(X\)",
    ),
    "many teachers": ({"num_teachers": 301, "epsilon": 99.0}, {}, "num_teachers=301: .* 900 records.*at most 300, or"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_bad_choice_is_named_and_costs_nothing(case, make, tmp_path, monkeypatch):
    settings, arguments, message = REFUSED[case]
    monkeypatch.setattr(NoiseSource, "draw_gaussian", lambda *_: pytest.fail("noise was drawn"))
    with pytest.raises(ValueError, match=message):
        make(**settings).fit(**({"X": X, "y": Y, "public": PUBLIC} | arguments))
    if (tmp_path / "ledger.sqlite").exists():
        with Ledger(tmp_path / "ledger.sqlite", create=False) as ledger:
            assert not any(account.is_charged for account in ledger.list_accounts())


@pytest.mark.parametrize("convert", [np.array, list, pd.Series], ids=["array", "list", "series"])
@pytest.mark.parametrize(
    ("values", "fix"), [([8765.25] * 900, "Reshape your data"), (["8765.25 words"] * 900, "encoder=")]
)
def test_a_refusal_of_points_that_are_no_rows_quotes_no_value(make, convert, values, fix):
    with pytest.raises(ValueError, match=rf"X=.*must be a DataFrame, or rows \[N, D\].*{fix}") as refusal:
        make().fit(convert(values), Y, public=convert(values))
    assert "8765" not in str(refusal.value)


@pytest.mark.parametrize(
    ("evaluation", "message"),
    [
        (TEST, r"evaluation='ndarray': must be .*\(X_test, y_test\)"),
        (True, r"evaluation='bool': must be .*\(X_test, y_test\)"),
        (
            (TEST, np.char.add("class ", TRUTH.astype(str))),
            "evaluation='300 labels, 300 of no class': y_test must hold one of the classes 0, 1, 2 for",
        ),
        ((TRUTH, TEST), "evaluation: y should be a 1d array"),
        ((TEST[:0], TRUTH[:0]), "evaluation: .*0 sample"),
        ((TEST[:, 0], TRUTH), "evaluation.X='ndarray of 1 dimension"),
    ],
    ids=["points", "true", "texts", "swapped", "empty", "column"],
)
def test_a_wrong_evaluation_is_refused_by_name(fitted, tmp_path, evaluation, message):
    with pytest.raises(ValueError, match=rf"^{message}"):
        fitted().save_release(tmp_path / "release", evaluation=evaluation)


# ---- class weights and the private test ----------------------------------------------------------------------------

MANY, MANY_Y = (part.numpy() for part in clouds(3000, 3))


def to_rows(records) -> set:
    return set(map(tuple, records.x.tolist()))


def spy_on_records(monkeypatch) -> tuple[list, list]:
    """The rows of all records that a method counts or trains on, call by call, and those of all that are tested."""
    used = []
    for holder, name, place in [
        (GradientMethod, "build_sensitive", 1),
        (LabelingMethod, "draw_first_answers", 1),
        (teacher_votes, "train", 0),
        (pate, "fit_panel", 1),
    ]:
        spy(monkeypatch, holder, name, lambda *args, place=place, **options: used.append(to_rows(args[place])))
    return used, spy(monkeypatch, private_test, "count_predictions", lambda _, records, *rest: to_rows(records))


OWN = {"teacher": LogisticRegression(), "num_teachers": 20}
RECIPE = OWN | {"teacher": TeacherRecipe(network="logistic", steps=10)}


@pytest.mark.parametrize(
    ("settings", "adjacency"),
    [({}, "add_remove"), ({}, "replace_one"), (RECIPE, "add_remove"), (OWN, "replace_one")],
    ids=["gradients", "gradients replace_one", "teachers", "own"],
)
def test_no_held_out_unit_reaches_training_in_any_fit_of_the_account(settings, adjacency, make, monkeypatch):
    used, tested = spy_on_records(monkeypatch)
    everything = to_rows(PrivateRecords.from_rows(X, Y))
    make(6.0, private_test=0.2, adjacency=adjacency, **settings).fit(X, Y, public=PUBLIC)
    assert len(tested) == 1 and 120 < len(tested[0]) < 240 and len(used) >= 2
    for share in (0.2, 0.0):  # also a fit that makes no test leaves these units out
        again = {"private_test": share, "random_state": 5 + int(10 * share), "allow_refit": True, "spend_anyway": True}
        before = len(used)
        make(1.5, adjacency=adjacency, **(settings | again)).fit(X, Y, public=PUBLIC)
        assert len(used) >= before + 2
    assert all(rows == everything - tested[0] for rows in used)
    assert len(tested) == 2 and tested[1] == tested[0]


@pytest.mark.parametrize("about", [9e2, None])
def test_a_test_of_few_units_is_announced_where_their_number_is_declared(about, make, capsys):
    make(4.0, private_test=0.1, verbose=True, num_records_about=about).fit(X, Y, public=PUBLIC)
    assert ("The private test has about 90 units." in capsys.readouterr().out) == (about is not None)


def test_a_test_is_within_epsilon_and_published_only_with_noise(make, tmp_path, capsys):
    clf = make(4.0, cap=4.0, private_test=0.2, num_records_about=3000, verbose=True).fit(MANY, MANY_Y, public=PUBLIC)
    account = read_account(tmp_path)
    assert clf.total_.epsilon == pytest.approx(4.0, rel=1e-9) and clf.total_.epsilon <= 4.0
    assert clf.privacy_["guarantee"]["epsilon"] == clf.total_.epsilon
    release, test = account.charges.values()
    total = sum(event.count * event.mu**2 for event in account.reserved_events)
    assert sum(event.count * event.mu**2 for event in test.reserved_events) == pytest.approx(0.1 * total)
    assert sum(event.count * event.mu**2 for event in release.reserved_events[:1]) == pytest.approx(0.05 * 0.9 * total)
    table = json.loads((clf.release_ / "private_test.json").read_text())
    test = clf.private_test_
    assert [*map(list, test.counts)] == table["counts"]
    (accuracy, std), truth = test.accuracy, clf.score(TEST, TRUTH)
    assert accuracy == pytest.approx(min(1, sum(row[0] for row in test.counts) / np.sum(test.counts)))
    assert abs(accuracy - truth) < 5 * std < 0.15 and truth - 0.15 < test.bound < accuracy
    said = capsys.readouterr().out
    assert f"accuracy of at least {math.floor(1000 * test.bound) / 10:.1f} %" in said and "leave it out" not in said
    stated = clf.privacy_["utility"]["private_test"]
    assert (stated["bound"], stated["number"], stated["num_units"]) == (test.bound, 1, None)
    words = (clf.release_ / "README.md").read_text().replace("\\", "")
    assert "private_test.json" in words and "test of the model on held-out units" in words
    assert cli.main(["verify", str(clf.release_), "--ledger", str(tmp_path / "ledger.sqlite")]) == 0
    student = load_student(clf.release_)
    assert np.allclose(student.predict_proba(TEST.astype(np.float32)), clf.predict_proba(TEST), atol=1e-6)
    confidence = clf.predict_proba(PUBLIC).max(1).mean()
    assert confidence == pytest.approx(min(accuracy, 1 - std), abs=1e-4)


def test_a_second_test_says_so_and_other_shares_are_refused(make, tmp_path, capsys):
    make(2.0, private_test=0.2).fit(X, Y, public=PUBLIC)
    again = {"allow_refit": True, "random_state": 1, "spend_anyway": True}
    second = make(2.0, private_test=0.2, verbose=True, **again).fit(X, Y, public=PUBLIC)
    assert "Private test 2 on held-out units" in capsys.readouterr().out
    words = (second.release_ / "README.md").read_text()
    assert "test of the model on held-out units (number 2 of this account)" in words.replace("\\", "")
    assert cli.main(["verify", str(second.release_), "--ledger", str(tmp_path / "ledger.sqlite")]) == 0
    charged = len(read_account(tmp_path).charges)
    with pytest.raises(ValueError, match=r"private_test=0\.1: must be 0\.2, which is fixed"):
        make(2.0, private_test=0.1, **again).fit(X, Y, public=PUBLIC)
    assert len(read_account(tmp_path).charges) == charged
    untested = make(2.0, **again).fit(X, Y, public=PUBLIC)
    assert untested.private_test_ is untested.privacy_["utility"]["private_test"] is None
    (tmp_path / "teachers" / "held_out" / "clouds.json").unlink()  # without it, held-out units would be trained on
    charged = len(read_account(tmp_path).charges)
    with pytest.raises(ValueError, match=r"held_out/clouds\.json, which is missing"):
        make(2.0, **again).fit(X, Y, public=PUBLIC)
    assert len(read_account(tmp_path).charges) == charged


def test_an_account_that_trained_on_all_units_has_no_test(make, tmp_path):
    make(2.0, spend_anyway=True).fit(X, Y, public=PUBLIC)
    with pytest.raises(ValueError, match=r"private_test: must be asked for before the account's first charge"):
        make(2.0, private_test=0.1, allow_refit=True, random_state=1).fit(X, Y, public=PUBLIC)
    assert len(read_account(tmp_path).charges) == 1
    assert not (tmp_path / "teachers" / "held_out" / "clouds.json").exists()


def test_a_cap_that_does_not_admit_the_test_admits_no_release(make, tmp_path, monkeypatch):
    monkeypatch.setattr(NoiseSource, "draw_gaussian", lambda *_: pytest.fail("noise was drawn"))
    with pytest.raises(ValueError, match="cap"):  # the release alone would cost 3.76
        make(4.0, cap=3.9, private_test=0.1).fit(X, Y, public=PUBLIC)
    assert not (tmp_path / "ledger.sqlite").exists() or not read_account(tmp_path).charges
    monkeypatch.undo()
    make(4.0, private_test=0.2).fit(X, Y, public=PUBLIC)  # the refused fit has fixed no share


def test_one_record_of_each_group_is_tested(make, monkeypatch):
    used, tested = spy_on_records(monkeypatch)
    patient = np.arange(900) // 3
    make(6.0, private_test=0.3, num_records_about=None).fit(X, Y, public=PUBLIC, groups=patient)
    patient_by_row = dict(zip(map(tuple, X.tolist()), patient.tolist(), strict=True))
    patients = [patient_by_row[row] for row in tested[0]]
    assert len(set(patients)) == len(patients) and 50 < len(patients) < 130
    for rows in used:
        assert rows and not {patient_by_row[row] for row in rows} & set(patients)


@pytest.mark.parametrize("weight", ["balanced", {1: 4.0, 2: 0.5}])
def test_class_weights_are_in_the_prediction_and_in_the_saved_student(weight, make, tmp_path, monkeypatch):
    before = spy(monkeypatch, Student, "adjust_logits", lambda student, *_: student)
    clf = make(class_weight=weight).fit(X[Y != 2][:500], Y[Y != 2][:500], public=PUBLIC)
    weight_C = np.array([1.0, 4.0, 0.5])
    if weight == "balanced":  # of noisy counts, of which the rarest is about 0
        sigma = json.loads((clf.release_ / "first_answers.json").read_text())["sigma"]
        counts = clf.class_counts_.clip(max(1.0, sigma / 2))
        weight_C = counts.sum() / (3 * counts)
    store.save(before[0], tmp_path / "student.safetensors")
    points = TEST.astype(np.float32)
    for load in (load_student, ReleasedClassifier.load):  # each with its own rounding
        odds_NC = np.asarray(load(tmp_path).predict_proba(points)) * weight_C
        expected = odds_NC / odds_NC.sum(1, keepdims=True)
        assert np.allclose(load(clf.release_).predict_proba(points), expected, atol=1e-6)
    probability_NC = load_student(clf.release_).predict_proba(points).double().numpy()
    assert np.array_equal(clf.predict_proba(points), probability_NC / probability_NC.sum(1, keepdims=True))


# ---- what it learns ----------------------------------------------------------------------------------------------


def check_probabilities(classifier):
    assert classifier.score(TEST, TRUTH) > 0.85
    probability_NC = classifier.predict_proba(TEST)
    assert probability_NC.shape == (300, 3) and np.allclose(probability_NC.sum(1), 1, atol=1e-5)
    assert classifier.n_features_in_ == 2


@pytest.mark.parametrize("method", ["gradients", "dpsgd"])
def test_a_method_learns_the_clouds(method, fitted):
    check_probabilities(fitted(method))


def make_sgd(params):
    return torch.optim.SGD(params, lr=0.5, momentum=0.5)


@pytest.mark.parametrize(
    "epsilon,settings",
    [
        (40.0, {"method": "teachers", "num_records_about": None}),  # a few dozen teachers need much
        (6.0, {"student": LogisticRegression()}),
        (6.0, {"student": lambda: torch.nn.Linear(2, 3)}),
        (6.0, {"student": Network(lambda: torch.nn.Linear(2, 3), steps=100, optimizer=make_sgd)}),
    ],
    ids=["teachers", "sklearn student", "module student", "network student"],
)
def test_teachers_and_students_of_ones_own_learn_the_clouds(epsilon, settings, make):
    as_tensors = [torch.from_numpy(array) for array in (X, Y, PUBLIC)]
    check_probabilities(make(epsilon, **settings).fit(*as_tensors[:2], public=as_tensors[2]))


def test_a_table_with_words_and_gaps_and_a_release_that_another_process_applies(tmp_path):
    (table, ill), (public, _), (new, truth) = draw_table(3000, 0), draw_table(600, 1), draw_table(500, 2)
    patient = pd.Series(np.arange(3000) // 2, name="patient")
    settings = {"num_records_about": 3000, "classes_are_public": True, "chosen_by": "private scores", "verbose": False}
    clf = PATEClassifier(2.0, account="clinic", home=tmp_path / "home", **settings)
    clf.fit(table, ill, public=public, groups=patient)
    assert clf.privacy_["declared_values"] == {
        "classes": "read off the private labels, whose values the owner declared public",
        "normalization_constants": "read off public points",
        "categories": "read off public points",
        "number_of_records": "declared by the owner",
    }
    assert clf.privacy_["chosen_by"] == "private scores"
    assert any("private scores decided it" in words for words in clf.privacy_["not_covered"])
    assert clf.score(new, truth) > 0.85 and list(clf.classes_) == ["ill", "well"]
    assert list(clf.feature_names_in_) == ["age", "ward"] and clf.n_features_in_ == 2
    assert clf.privacy_["guarantee"]["unit"] == "group:patient"
    release = clf.save_release(tmp_path / "out")
    with pytest.raises(ValueError, match="is not empty"):
        clf.save_release(tmp_path / "out")
    assert load_student(release).predict_names(new) == clf.predict(new).tolist()
    new.to_csv(tmp_path / "new.csv", index=False)
    command = [sys.executable, "-m", "pate_torch", "predict", "out", "new.csv", "--output", "predicted.csv"]
    environment = {"PATH": "", "PYTHONPATH": str(ROOT), "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, cwd=tmp_path, env=environment, capture_output=True)
    assert pd.read_csv(tmp_path / "predicted.csv").label.tolist() == clf.predict(new).tolist()


@pytest.fixture
def make_clinic(tmp_path):
    settings = {"account": "c", "num_records_about": 400, "classes": ["ill", "well"], "verbose": False}
    return lambda home="home", **changes: PATEClassifier(1.0, home=tmp_path / home, **settings, **changes)


def test_values_that_only_private_records_show_stay_private(make_clinic):
    (table, ill), (public, _) = draw_table(400, 0), draw_table(200, 1)
    table.loc[7, "ward"] = "the-only-one"
    clf = make_clinic().fit(table, ill, public=public)
    for file in clf.release_.rglob("*"):
        assert not file.is_file() or b"the-only-one" not in file.read_bytes(), file
    with pytest.warns(UserWarning, match="Some values of 'ward' are missing or are not among") as warned:
        probability_NC = clf.predict_proba(table.iloc[:10])
    assert len(warned) == 1 and "the-only-one" not in str(warned[0].message)
    with_gap = table.iloc[:10].assign(ward=[None if ward == "the-only-one" else ward for ward in table.ward[:10]])
    with pytest.warns(UserWarning, match="'ward'"):  # a missing category is encoded alike, at fit as at predict
        assert np.array_equal(probability_NC, clf.predict_proba(with_gap))


@pytest.mark.parametrize("adjacency", ["add_remove", "replace_one"])
def test_a_neighbor_changes_nothing_but_the_noisy_answers(adjacency, make_clinic):
    """Columns, categories, scaling, classes, method and noise: of public points and declarations alone."""
    (table, ill), (public, _) = draw_table(400, 0), draw_table(200, 1)
    strange = pd.DataFrame({"age": [1e30], "ward": ["the-only-one"]})
    num_same = 400 if adjacency == "add_remove" else 399
    other = pd.concat([table.iloc[:num_same], strange], ignore_index=True)
    facts = []
    for name, (x, y) in {"one": (table, ill), "other": (other, np.array([*ill[:num_same], "well"]))}.items():
        clf = make_clinic(name, adjacency=adjacency).fit(x, y, public=public)
        record = json.loads((clf.release_ / "release.json").read_text())
        events = [event["kind"] for event in record["planned"]], [event["mu"] for event in record["planned"]]
        sigma = record["parameters"]["sigma"]  # the step sizes follow from the noisy counts
        public_facts = (record["mechanism"], sigma, events, record["pool_sha256"])
        clf.student_.network["options"].pop("directions")  # their number follows from the noisy counts, too
        facts.append((clf.student_.spec, clf.student_.network, repr(clf.method_), public_facts))
    assert facts[0] == facts[1]


class Halves(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(64, 2)

    def forward(self, x):
        assert tuple(x.shape[1:]) == (1, 8, 8) and x.dtype == torch.float32
        return self.layer(x.flatten(1))


def make_skorch_net():
    from skorch import NeuralNetClassifier  # with the extra ``dev``

    return NeuralNetClassifier(Halves, criterion=torch.nn.CrossEntropyLoss, max_epochs=20, lr=0.1, batch_size=8)


SKORCH = pytest.mark.slow(reason="twenty networks by skorch, which tests/teachers trains too")


@pytest.mark.parametrize(
    "make_teacher,make_student",
    [
        (LogisticRegression, LogisticRegression),
        (lambda: Network(Halves, steps=40), lambda: Network(Halves, steps=40, transform=v2.RandomVerticalFlip())),
        pytest.param(make_skorch_net, make_skorch_net, marks=SKORCH),
    ],
    ids=["sklearn", "networks", "skorch"],
)
def test_images(make, make_teacher, make_student):
    draw = torch.Generator().manual_seed(0)

    def shades(count):
        y = torch.randint(2, (count,), generator=draw)
        noise = torch.randint(0, 60, (count, 1, 8, 8), generator=draw)
        return (noise + 120 * y.view(-1, 1, 1, 1)).to(torch.uint8).numpy(), y.numpy()

    (x, y), (public, _), (test, truth) = shades(400), shades(60), shades(50)
    clf = make(8.0, classes=[0, 1], num_records_about=400, num_teachers=20, num_queries=20)
    clf.set_params(teacher=make_teacher(), student=make_student())
    assert clf.fit(x, y, public=public).score(test, truth) > 0.9
    assert np.allclose(clf.predict_proba(test).sum(1), 1, atol=1e-5)
    with pytest.raises(ValueError, match="X="):
        clf.predict(test[:, :, :4])


def test_features_that_were_made_before_are_taken_as_they_are(make):
    clf = make(2.0, encoder=EncoderCard(name="lens", kind="given", license="MIT")).fit(X, Y, public=PUBLIC)
    assert clf.method_.features is None and clf.privacy_["encoder"]["name"] == "lens"
    assert clf.score(X, Y) > 0.8
    loaded = load_student(clf.release_)
    assert (loaded.predict(torch.from_numpy(PUBLIC).float()).numpy() == clf.predict(PUBLIC)).all()


def test_probabilities_are_those_that_the_records_were_fitted_at(make):
    """Features are clipped to length 1 before they are fitted, and before they predict; undivided they are too sure."""
    rng = np.random.default_rng(5)
    y = rng.integers(0, 2, 4000)
    x = rng.normal(size=(4000, 6)) + np.outer(y, [1.0, 0.6, 0, 0, 0, 0])
    clf = make(2.0, classes=[0, 1], num_records_about=3000).fit(x[:3000], y[:3000], public=x[3000:3400])
    scores = load_file(clf.release_ / "scores.safetensors")
    radius = float(scores["radius"])
    logits = clf.student_.compute_logits(torch.from_numpy(x[3000:3400]).float())
    assert radius > 3 and torch.allclose(logits, scores["score_RPC"][-1], rtol=1e-3, atol=1e-3)
    divided = clf.predict_proba(x[3400:]).astype(float)
    divided /= divided.sum(1, keepdims=True)
    undivided = divided**radius / (divided**radius).sum(1, keepdims=True)
    assert log_loss(y[3400:], divided) < min(0.7, log_loss(y[3400:], undivided) - 0.2)


def test_features_with_their_encoders_card_give_a_student_of_the_points_themselves(make):
    names, shape = ("0", "1", "2"), X.shape[1:]
    constants = {"mean": (0.0,) * X.shape[1], "std": (1.0,) * X.shape[1]}
    spec = DataSpec(name="clouds", num_classes=3, input_shape=shape, class_names=names, **constants)
    module = torch.nn.Linear(X.shape[1], 5)
    torch.nn.init.orthogonal_(module.weight, generator=torch.Generator().manual_seed(0))
    lens = Encoder(name="lens", module=module)
    z, z_public, z_test = (lens.encode(torch.from_numpy(x), spec).numpy() for x in (X, PUBLIC, TEST))
    clf = make(2.0, encoder=lens.make_card(spec)).fit(z, Y, public=z_public)
    assert clf.score(z_test, TRUTH) > 0.8 and clf.privacy_["encoder"]["sha256"] == lens.digests["weights"]
    assert (load_student(clf.release_, encoder=lens).predict(TEST).numpy() == clf.predict(z_test)).all()
    with pytest.raises(ValueError, match="needs the encoder lens"):
        load_student(clf.release_).predict(TEST)


# ---- what it prints and states -----------------------------------------------------------------------------------


def test_the_statement_is_that_of_the_release_and_says_what_nobody_stated(fitted):
    statement = fitted().privacy_
    assert "It is not stated how the choice was made" in " ".join(statement["not_covered"])
    assert statement["chosen_by"] is None and statement["declared_values"]["classes"] == "declared by the owner"
    assert statement == json.loads((fitted().release_ / "privacy.json").read_text())


# ---- one odd value -----------------------------------------------------------------------------------------------

DAYS = [pd.Timestamp("2020-01-01"), pd.Timestamp("2020-01-02")]


@pytest.mark.parametrize("classes,odd", [([2**52, 2**52 + 1], None), (DAYS, "never")], ids=["integers", "dates"])
def test_one_odd_label_renames_no_other(classes, odd):
    """It changes the type of all labels; the others stay what they are."""
    for y in (pd.Series(classes).to_numpy(), np.array([*classes, odd], dtype=object)):
        assert encode_labels(y, classes)[1].tolist() == [0, 1, -1][: len(y)]


def test_one_huge_number_is_a_missing_value_like_any_other(make):
    rows = make()._validate_points([[10**400, 1.5], [False, 2.5]], reset=True)
    assert np.isnan(rows[0, 0]) and rows[1].tolist() == [0.0, 2.5]
    assert encode_labels(np.array([0, 10**400, 1], dtype=object), [0, 1])[1].tolist() == [0, -1, 1]


def test_classes_that_are_one_as_floating_point_numbers_are_refused():
    with pytest.raises(ValueError, match="must be different"):
        encode_labels(np.array([2**60]), [2**60, 2**60 + 1])


@pytest.mark.parametrize("odd_rows", [[], [["purple", 0.0]], [[pd.Timestamp(0), 0.0]]], ids=["none", "text", "date"])
def test_one_odd_cell_renames_no_other(odd_rows, make):
    rows = make()._validate_points([[True, 1.5], [False, 2.5], *odd_rows], reset=True)
    assert rows[:2].tolist() == [[1.0, 1.5], [0.0, 2.5]] and np.isnan(rows[2:, 0]).all()
