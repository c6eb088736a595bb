"""PATEClassifier by scikit-learn's protocol: what it refuses before a charge, and what its release is good for."""

import json
import os
import pickle
import subprocess
import sys
import uuid

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file
from sklearn.base import clone
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import Pipeline
from sklearn.preprocessing import FunctionTransformer
from sklearn.tree import DecisionTreeClassifier
from sklearn.utils.estimator_checks import check_estimator

from pate_torch import PATE, PATEClassifier, load_student
from pate_torch.accounting import gdp
from pate_torch.api.inputs import encode_labels
from pate_torch.features.encoder import Encoder
from pate_torch.mechanisms.gaussian import GNMax
from pate_torch.methods import feasibility
from pate_torch.planning.autoconfig import MAX_DELTA, PublicFacts, choose_delta, choose_method
from pate_torch.privacy.ledger import Ledger
from pate_torch.privacy.noise import NoiseSource
from pate_torch.privacy.records import DataSpec, EncoderCard
from tests import ROOT
from tests.worlds import clouds

X, Y = (part.numpy() for part in clouds(900, 0))
PUBLIC = clouds(150, 1)[0].numpy()
TEST, TRUTH = (part.numpy() for part in clouds(300, 2))


def frame(count: int, seed: int) -> tuple[pd.DataFrame, np.ndarray]:
    """Ill are the old in ward a and the young elsewhere; one age in twenty is missing."""
    draw = np.random.default_rng(seed)
    table = pd.DataFrame(
        {"age": draw.integers(20, 80, count).astype(float), "ward": draw.choice(["a", "b", "c"], count)}
    )
    ill = np.where((table.age > 50) ^ (table.ward == "a"), "ill", "well")
    table.loc[draw.random(count) < 0.05, "age"] = np.nan
    return table, ill


@pytest.fixture
def make(tmp_path):
    def classifier(epsilon=4.0, **settings):
        given = {
            "account": "clouds",
            "num_records_about": 900,
            "classes": [0, 1, 2],
            "home": tmp_path,
            "verbose": False,
        }
        return PATEClassifier(epsilon, **(given | settings))

    return classifier


# ---- scikit-learn's protocol -------------------------------------------------------------------------------------


class Thrown(PATEClassifier):
    """With public points from a uniform draw of declared ranges, and an account that is thrown away."""

    def fit(self, X, y):
        table = hasattr(X, "columns")
        try:
            width = np.asarray(X).shape[1]
        except (IndexError, TypeError):
            width = 2
        drawn = np.random.default_rng(0).uniform(-5, 5, (200, width))
        before = self.account, self.home
        self.account, self.home = uuid.uuid4().hex, str(before[1]) + "/" + uuid.uuid4().hex
        try:
            return super().fit(X, y, public=type(X)(drawn, columns=X.columns) if table else drawn)
        finally:
            self.account, self.home = before


EXPECTED = {
    "check_classifier_data_not_an_array": "compares two fits, whose noise differs: no seed may know it",
    "check_fit_idempotent": "compares two fits, whose noise differs: no seed may know it",
    "check_supervised_y_2d": "compares two fits, whose noise differs: no seed may know it",
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("method", ["gradients", pytest.param("teachers", marks=pytest.mark.slow)])
def test_scikit_learns_own_checks(method, tmp_path):
    estimator = Thrown(
        8.0,
        num_records_about=100,
        classes_are_public=True,
        method=method,
        home=tmp_path,
        verbose=False,
        spend_anyway=True,
    )
    found = check_estimator(estimator, expected_failed_checks=EXPECTED, on_fail="raise")
    by_status = {
        status: [one["check_name"] for one in found if one["status"] == status] for status in ("passed", "xfail")
    }
    assert len(by_status["passed"]) >= 45 and set(by_status["xfail"]) <= set(EXPECTED)


def test_a_clone_has_the_parameters_and_nothing_else(make):
    fitted = make().fit(X, Y, public=PUBLIC)
    other = clone(fitted)
    assert other.get_params() == fitted.get_params() and not hasattr(other, "student_")


def test_the_last_step_of_a_pipeline(make):
    steps = Pipeline([("halved", FunctionTransformer(lambda x: x / 2)), ("clf", make())])
    steps.fit(X, Y, clf__public=PUBLIC / 2)
    assert steps.score(TEST, TRUTH) > 0.9


def test_cross_validation_cannot_spend_by_accident(make):
    with pytest.raises(ValueError, match="allow_refit"):
        cross_val_score(make(), X, Y, cv=3, params={"public": PUBLIC}, error_score="raise")


def test_what_is_pickled_holds_no_record(make):
    marked = X.copy()
    marked[0] = 123456.789
    fitted = make().fit(marked, Y, public=PUBLIC)
    stored = pickle.dumps(fitted)
    for width in (np.float32, np.float64):
        assert width(123456.789).tobytes() not in stored
    assert np.array_equal(pickle.loads(stored).predict(TEST), fitted.predict(TEST))


# ---- what is charged ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["gradients", "teachers", "dpsgd"])
def test_a_fit_costs_epsilon_and_a_second_wants_to_be_asked_for(method, make, tmp_path):
    first = make(method=method).fit(X, Y, public=PUBLIC)
    with Ledger(tmp_path / "ledger.sqlite", create=False) as ledger:
        (account,) = ledger.list_accounts()
    assert 3.99 < account.guarantee.epsilon <= 4.0 and account.delta == MAX_DELTA and account.budget_epsilon == 10
    assert first.privacy_["guarantee"]["epsilon"] == pytest.approx(account.guarantee.epsilon)
    with pytest.raises(ValueError, match=r"charged already \(epsilon 4.*allow_refit=True adds a release of epsilon 2"):
        make(2.0, method=method).fit(X, Y, public=PUBLIC)
    make(2.0, method=method, allow_refit=True, random_state=1).fit(X, Y, public=PUBLIC)
    with Ledger(tmp_path / "ledger.sqlite", create=False) as ledger:
        (account,) = ledger.list_accounts()
    assert 4.0 < account.guarantee.epsilon < 6.0 and account.num_releases == 2


HOPELESS = {"num_records_about": None, "epsilon": 0.3}  # fifteen teachers at most: noise of dozens of votes


def test_labels_that_would_be_mostly_noise_are_not_paid_for(make, tmp_path):
    with pytest.raises(ValueError, match=r"epsilon=0\.3.*mostly noise.*num_records_about=.*spend_anyway=True"):
        make(**HOPELESS).fit(X, Y, public=PUBLIC)
    assert not (tmp_path / "ledger.sqlite").exists()
    with pytest.warns(feasibility.LowSignalWarning):
        make(**HOPELESS, spend_anyway=True).fit(X, Y, public=PUBLIC)
    with Ledger(tmp_path / "ledger.sqlite", create=False) as ledger:
        assert ledger.get_account("clouds").guarantee.epsilon == pytest.approx(0.3)


def test_the_number_of_units_is_public_where_one_is_replaced(make):
    fitted = make(1.0, num_records_about=None, adjacency="replace_one").fit(X, Y, public=PUBLIC)
    assert fitted.method_.name == "gradients" and "about 900" in fitted.method_.expectation


def test_another_working_directory_has_no_budget_of_its_own(make, tmp_path, monkeypatch):
    monkeypatch.delenv("PATE_HOME")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    runs = []
    for place in ("a", "b"):
        (tmp_path / place).mkdir()
        monkeypatch.chdir(tmp_path / place)
        if place == "b":
            with pytest.raises(ValueError, match="has been charged already"):
                make(home=None).fit(X, Y, public=PUBLIC)
        runs.append(make(home=None, allow_refit=place == "b").fit(X, Y, public=PUBLIC).release_.absolute())
    assert [(tmp_path / place / "outputs" / "runs") in run.parents for place, run in zip("ab", runs, strict=True)] == [
        True
    ] * 2
    assert len(list((tmp_path / "data").rglob("ledger.sqlite"))) == 1 and not list(
        tmp_path.glob("[ab]/**/ledger.sqlite")
    )


def test_a_home_may_begin_with_a_tilde(make, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    make(home="~/kept").fit(X, Y, public=PUBLIC)
    assert (tmp_path / "kept" / "ledger.sqlite").exists() and not (tmp_path / "~").exists()


def test_no_umask_lets_others_write_into_what_a_fit_leaves(make, tmp_path):
    before = os.umask(0)
    try:
        made = make(method="teachers", epsilon=8.0).fit(X, Y, public=PUBLIC)
    finally:
        os.umask(before)
    assert (made.release_ / "student.safetensors").exists()
    for place in (tmp_path / "runs").rglob("*"):
        assert place.is_symlink() or not place.stat().st_mode & 0o022, place


def test_a_full_disk_is_named_with_what_was_charged(make, tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device", str(tmp_path / "student.safetensors"))

    monkeypatch.setattr("pate_torch.session.save_student", full)
    with pytest.raises(
        OSError, match=r"No space left.*Account 'clouds' is charged, and stays.*home=.*student\.safetensors"
    ):
        make().fit(X, Y, public=PUBLIC)


def test_a_fit_may_cost_more_than_ten(make, tmp_path):
    make(20.0).fit(X, Y, public=PUBLIC)
    with Ledger(tmp_path / "ledger.sqlite", create=False) as ledger:
        assert ledger.list_accounts()[0].budget_epsilon == 20


BAD = {
    "no classes": ({"classes": None}, {}, "classes=None: must list all classes"),
    "chosen by": ({"chosen_by": "luck"}, {}, "chosen_by"),
    "public": ({}, {"public": None}, "public=None: must be given"),
    "account": ({"account": None}, {}, "account=None: must name"),
    "epsilon": ({"epsilon": 0.0}, {}, "epsilon"),
    "method": ({"method": "magic"}, {}, "method"),
    "no size": ({"method": "gradients", "num_records_about": None}, {}, "num_records_about"),
    "groups": ({"method": "dpsgd"}, {"groups": np.arange(900)}, "groups"),
    "few groups": ({}, {"groups": np.arange(3)}, "groups"),
    "adjacency": ({"method": "dpsgd", "adjacency": "replace_one"}, {}, "adjacency"),
    "no listed class": ({"classes": ["a", "b"]}, {}, "classes"),
    "form": ({}, {"public": pd.DataFrame(PUBLIC)}, "public"),
    "width": ({}, {"public": PUBLIC[:, :1]}, "public"),
    "teacher": ({"teacher": LogisticRegression()}, {}, "teacher"),
    "student": ({"student": torch.nn.Linear(2, 3)}, {}, "student"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_choice_is_named_and_costs_nothing(case, make, tmp_path, monkeypatch):
    settings, given, named = BAD[case]
    monkeypatch.setattr(NoiseSource, "draw_gaussian", lambda *_: pytest.fail("noise was drawn"))
    with pytest.raises(ValueError, match=named):
        make(**settings).fit(X, Y, **({"public": PUBLIC} | given))
    assert (
        not (tmp_path / "ledger.sqlite").exists()
        or not PATE(
            "clouds", classes=3, num_teachers=2, mechanism=GNMax(sigma=1.0), delta=MAX_DELTA, home=tmp_path
        ).epsilon
    )


def test_a_dataframe_lacks_no_column(make):
    table, ill = frame(50, 0)
    with pytest.raises(ValueError, match="lacks the columns ward"):
        make(classes=["ill", "well"]).fit(table, ill, public=frame(20, 1)[0][["age"]])


# ---- what it learns ----------------------------------------------------------------------------------------------


class Net(torch.nn.Linear):
    """A module of the user's own."""

    def __init__(self):
        super().__init__(2, 3)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"method": "dpsgd"},
        {"method": "teachers"},
        {"num_records_about": None},
        {"adjacency": "replace_one"},
        {"method": "teachers", "teacher": DecisionTreeClassifier(), "num_teachers": 30, "num_queries": 40},
        {"student": LogisticRegression()},
        {"student": LogisticRegression(), "method": "teachers"},
        {"student": Net},
        {"teacher": Net, "method": "teachers", "num_teachers": 20, "num_queries": 40},
    ],
    ids=str,
)
def test_learns_clouds(settings, make):
    votes = settings.get("method") == "teachers" or settings.get("num_records_about", 0) is None
    fitted = make(40.0 if votes else 6.0, **settings).fit(X, Y, public=PUBLIC)  # a few dozen teachers need much
    assert fitted.score(TEST, TRUTH) > 0.85
    share = fitted.predict_proba(TEST)
    assert share.shape == (300, 3) and np.allclose(share.sum(1), 1, atol=1e-5) and fitted.n_features_in_ == 2


def test_tensors_are_taken_as_arrays_are(make):
    fitted = make().fit(torch.from_numpy(X), torch.from_numpy(Y), public=torch.from_numpy(PUBLIC))
    assert fitted.score(torch.from_numpy(TEST), torch.from_numpy(TRUTH)) > 0.85


def test_a_table_with_words_and_gaps_and_a_release_that_another_process_applies(tmp_path):
    (table, ill), (public, _), (new, truth) = frame(3000, 0), frame(600, 1), frame(500, 2)
    patient = pd.Series(np.arange(3000) // 2, name="patient")
    given = {"account": "clinic", "num_records_about": 3000, "home": tmp_path / "home", "verbose": False}
    with pytest.raises(ValueError, match=r"classes=None: must list all classes.*classes_are_public=True"):
        PATEClassifier(2.0, **given).fit(table, ill, public=public, groups=patient)
    clf = PATEClassifier(2.0, **given, classes_are_public=True, chosen_by="private scores")
    clf.fit(table, ill, public=public, groups=patient)
    assert clf.privacy_["declared_values"] == {
        "classes": "read off the private labels, whose values the owner declared public",
        "normalization_constants": "read off public points",
        "categories": "read off public points",
        "number_of_records": "declared by the owner",
    }
    assert clf.privacy_["chosen_by"] == "private scores"
    assert any("was made by private scores" in words for words in clf.privacy_["not_covered"])
    assert clf.score(new, truth) > 0.85 and list(clf.classes_) == ["ill", "well"]
    assert list(clf.feature_names_in_) == ["age", "ward"] and clf.n_features_in_ == 2
    assert clf.privacy_["guarantee"]["unit"] == "group:patient"
    release = clf.save_release(tmp_path / "out")
    with pytest.raises(ValueError, match="is there already"):
        clf.save_release(tmp_path / "out")
    assert load_student(release).predict_names(new) == clf.predict(new).tolist()
    new.to_csv(tmp_path / "new.csv", index=False)
    command = [sys.executable, "-m", "pate_torch", "predict", "out", "new.csv", "--output", "said.csv"]
    environment = {"PATH": "", "PYTHONPATH": str(ROOT), "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, cwd=tmp_path, env=environment, capture_output=True)
    assert pd.read_csv(tmp_path / "said.csv").label.tolist() == clf.predict(new).tolist()


def test_values_that_only_private_records_show_stay_private(tmp_path):
    (table, ill), (public, _) = frame(400, 0), frame(200, 1)
    table.loc[7, "ward"] = "the-only-one"
    clf = PATEClassifier(1.0, account="c", num_records_about=400, classes=["ill", "well"], home=tmp_path, verbose=False)
    clf.fit(table, ill, public=public)
    for file in clf.release_.rglob("*"):
        assert not file.is_file() or b"the-only-one" not in file.read_bytes(), file
    with pytest.warns(UserWarning, match="Some values of 'ward' are missing or are not among") as told:
        said = clf.predict_proba(table.iloc[:10])
    assert len(told) == 1 and "the-only-one" not in str(told[0].message)
    with pytest.warns(UserWarning, match="'ward'"):  # a missing category is encoded alike, at fit as at predict
        gap = clf.predict_proba(
            table.iloc[:10].assign(ward=[None if ward == "the-only-one" else ward for ward in table.ward[:10]])
        )
    assert np.array_equal(said, gap)


@pytest.mark.parametrize("adjacency", ["add_remove", "replace_one"])
def test_a_neighbor_changes_nothing_but_the_noisy_answers(adjacency, tmp_path):
    """Columns, categories, scaling, classes, method and noise: of public points and declarations alone."""
    (table, ill), (public, _) = frame(400, 0), frame(200, 1)
    strange = pd.DataFrame({"age": [1e30], "ward": ["the-only-one"]})
    other = pd.concat([table if adjacency == "add_remove" else table.iloc[:-1], strange], ignore_index=True)
    kept = ill if adjacency == "add_remove" else ill[:-1]
    found = []
    for name, (x, y) in {"one": (table, ill), "other": (other, [*kept, "well"])}.items():
        home = tmp_path / name
        clf = PATEClassifier(
            1.0,
            account="c",
            num_records_about=400,
            classes=["ill", "well"],
            home=home,
            adjacency=adjacency,
            verbose=False,
        ).fit(x, np.array(y), public=public)
        said = json.loads((clf.release_ / "release.json").read_text())
        public_facts = (said["mechanism"], said["parameters"], said["pool_sha256"], said["declared_size"])
        found.append((clf.student_.spec, clf.student_.network, repr(clf.method_), public_facts))
    assert found[0] == found[1]


def test_images(make):
    draw = torch.Generator().manual_seed(0)

    def shades(count):
        y = torch.randint(2, (count,), generator=draw)
        noise = torch.randint(0, 60, (count, 1, 8, 8), generator=draw)
        return (noise + 120 * y.view(-1, 1, 1, 1)).to(torch.uint8).numpy(), y.numpy()

    (x, y), (public, _), (test, truth) = shades(400), shades(60), shades(50)
    clf = make(8.0, classes=[0, 1], num_records_about=400, num_teachers=20, num_queries=20)
    clf.set_params(teacher=LogisticRegression(), student=LogisticRegression())
    assert clf.fit(x, y, public=public).score(test, truth) > 0.9


def test_an_encoder_is_one_or_names_one(make):
    with pytest.raises(ValueError, match="encoder='str': must be an Encoder, or an EncoderCard"):
        make(encoder="wordllama").fit(X, Y, public=PUBLIC)


def test_features_that_were_made_before_are_taken_as_they_are(make):
    card = EncoderCard(name="lens", kind="given", license="MIT")
    clf = make(2.0, encoder=card, num_records_about=len(X)).fit(X, Y, public=PUBLIC)
    assert clf.method_.features is None and clf.privacy_["encoder"]["name"] == "lens"
    assert clf.score(X, Y) > 0.8
    loaded = load_student(clf.release_)
    assert (loaded.predict(torch.from_numpy(PUBLIC).float()).numpy() == clf.predict(PUBLIC)).all()


def test_probabilities_are_those_that_the_records_were_fitted_at(make):
    """Features are divided by their clipping norm before they are fitted; undivided they would be far too sure."""
    rng = np.random.default_rng(5)
    y = rng.integers(0, 2, 4000)
    x = rng.normal(size=(4000, 6)) + np.outer(y, [1.0, 0.6, 0, 0, 0, 0])
    clf = make(2.0, classes=[0, 1], num_records_about=3000).fit(x[:3000], y[:3000], public=x[3000:3400])
    held = load_file(clf.release_ / "scores.safetensors")
    radius = float(held["radius"])
    logits = clf.student_.compute_logits(torch.from_numpy(x[3000:3400]).float())
    assert radius > 3 and torch.allclose(logits * radius, held["score_RPC"][-1], rtol=1e-3, atol=1e-3)
    chance = clf.predict_proba(x[3400:]).astype(float)
    chance /= chance.sum(1, keepdims=True)
    undivided = chance**radius / (chance**radius).sum(1, keepdims=True)
    assert log_loss(y[3400:], chance) < 0.8 < 1.5 < log_loss(y[3400:], undivided)


def test_features_with_their_encoders_card_give_a_student_of_the_points_themselves(make):
    spec = DataSpec(
        name="clouds",
        num_classes=3,
        input_shape=X.shape[1:],
        class_names=("0", "1", "2"),
        mean=(0.0,) * X.shape[1],
        std=(1.0,) * X.shape[1],
    )
    module = torch.nn.Linear(X.shape[1], 5)
    torch.nn.init.orthogonal_(module.weight, generator=torch.Generator().manual_seed(0))
    lens = Encoder(name="lens", module=module)
    z, z_public, z_test = (lens.encode(torch.from_numpy(x), spec).numpy() for x in (X, PUBLIC, TEST))
    clf = make(2.0, encoder=lens.make_card(spec)).fit(z, Y, public=z_public)
    assert clf.score(z_test, TRUTH) > 0.8 and clf.privacy_["encoder"]["sha256"] == lens.digests["weights"]
    assert (load_student(clf.release_, encoder=lens).predict(TEST).numpy() == clf.predict(z_test)).all()
    with pytest.raises(ValueError, match="needs the encoder lens"):
        load_student(clf.release_).predict(TEST)


# ---- the rule ----------------------------------------------------------------------------------------------------

ROWS = PublicFacts(
    epsilon=1.0,
    delta=1e-5,
    adjacency="add_remove",
    has_groups=False,
    num_records=30_000,
    num_public=3000,
    num_classes=2,
    is_image=False,
)


def test_the_rule_goes_by_public_facts():
    from dataclasses import replace

    assert choose_method(ROWS).name == "gradients"
    assert choose_method(replace(ROWS, num_records=None)).name == "teachers"
    assert "the number of public points" in choose_method(replace(ROWS, num_records=None)).reason
    assert [choose_method(replace(ROWS, is_image=images)).features.name for images in (False, True)] == [
        "fourier",
        "contrastive",
    ]
    assert choose_method(replace(ROWS, is_image=True, num_records=None)).name == "teachers"
    assert choose_method(replace(ROWS, is_encoded=True)).features is None
    assert [choose_method(replace(ROWS, is_encoded=True, epsilon=e)).self_training for e in (0.05, 2.0)] == [
        True,
        False,
    ]
    assert not choose_method(replace(ROWS, epsilon=0.05)).self_training
    fewer, more = choose_method(replace(ROWS, epsilon=0.1)), choose_method(ROWS)
    assert 1 < fewer.effective_dim < more.effective_dim == pytest.approx(30_000 / more.mechanism.sigma / 8)
    assert choose_method(ROWS, "dpsgd").name == "dpsgd" and choose_method(ROWS, num_teachers=50).num_teachers == 50
    assert "Nothing here is expected" in choose_method(replace(ROWS, num_records=40, epsilon=0.1)).expectation
    assert (
        "Nothing here is expected"
        in choose_method(replace(ROWS, num_records=None, num_public=50, epsilon=0.1)).expectation
    )


def test_teachers_of_rows_are_linear_and_small_unless_something_else_is_asked():
    from dataclasses import replace

    small = choose_method(ROWS, "teachers")
    assert small.num_teachers == 3000 and small.teacher.network == "logistic" and small.query.name == "medoids"
    assert small.self_training and choose_method(replace(ROWS, num_records=1_000_000), "teachers").num_teachers == 4000
    assert (
        choose_method(replace(ROWS, num_classes=26), "teachers").num_teachers == 30_000 // 33
    )  # 1.25 records of a class
    for facts in ({"is_image": True}, {"has_groups": True}, {"has_own_teacher": True}):
        large = choose_method(replace(ROWS, **facts), "teachers")
        assert (large.num_teachers, large.teacher, large.query, large.self_training) == (300, None, None, False)
    unsaid = choose_method(
        replace(ROWS, num_records=None)
    )  # 3,000 public points tell little of how many records there are
    assert unsaid.num_teachers == 30 and unsaid.teacher == small.teacher and unsaid.self_training
    given = choose_method(ROWS, num_teachers=50)
    assert given.num_teachers == 50 and given.teacher is None
    # As many questions as leave the lead that a right label needs within a quarter of the votes.
    few, many = (
        choose_method(replace(ROWS, epsilon=0.1), "teachers"),
        choose_method(replace(ROWS, epsilon=0.5), "teachers"),
    )
    assert 20 < few.num_queries < many.num_queries == 1000
    louder = replace(few.mechanism, sigma=1.5 * few.mechanism.sigma)
    assert (
        feasibility.compute_break_even_lead(few.mechanism, 2)
        <= 3000 / 4
        < feasibility.compute_break_even_lead(louder, 2)
    )


@pytest.mark.parametrize("method", ["teachers", "gradients"])
@pytest.mark.parametrize("epsilon", [0.3, 1.0, 5.0])
def test_the_noise_costs_what_is_asked(method, epsilon):
    from dataclasses import replace

    chosen = choose_method(replace(ROWS, epsilon=epsilon), method)
    (event,) = chosen.mechanism.privacy_events(chosen.num_queries)
    assert gdp.compute_epsilon(event.mu * event.count**0.5, 1e-5) == pytest.approx(epsilon, rel=1e-6)


@pytest.mark.parametrize("records,delta", [(None, 1e-5), (400, 1e-5), (30_000, 1e-5), (99_999, 1e-5), (100_000, 1e-6),
                                           (200_000, 1e-6), (10_000_000, 1e-8)])  # fmt: skip
def test_delta_lies_below_one_record_in_all(records, delta):
    assert choose_delta(records) == pytest.approx(delta, rel=1e-9)


def test_it_says_why_in_two_lines_and_where_it_charges(make, capsys, tmp_path):
    make(verbose=True).fit(X, Y, public=PUBLIC)
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 3 and str(tmp_path.absolute() / "ledger.sqlite") in said[2]
    assert "epsilon 4 at delta 1e-5 (add_remove, unit record)" in said[0] and "Forecast" in said[1]


def test_the_statement_is_that_of_the_release_and_says_what_nobody_stated(make):
    fitted = make().fit(X, Y, public=PUBLIC)
    not_covered = " ".join(fitted.privacy_["not_covered"])
    assert "is not stated, so the choice is not covered" in not_covered and fitted.privacy_["chosen_by"] is None
    assert fitted.privacy_["declared_values"]["classes"] == "declared by the owner"
    assert fitted.privacy_ == json.loads((fitted.release_ / "privacy.json").read_text())


# ---- what PATE says of the same mistakes -------------------------------------------------------------------------


def test_wrong_types_are_named(tmp_path):
    settings = {"classes": 3, "num_teachers": 4, "delta": 1e-5, "home": tmp_path}
    with pytest.raises(ValueError, match="mechanism='gaussian': must be a mechanism"):
        PATE("clouds", mechanism="gaussian", **settings)
    settings |= {"budget_epsilon": 30.0}
    pate = PATE("clouds", mechanism=GNMax(sigma=1.0), teacher=LogisticRegression(), **settings)
    with pytest.raises(ValueError, match="x='DataFrame': must be an array"):
        pate.fit_teachers(pd.DataFrame(X), Y)
    pate.fit_teachers(X, Y).label(PUBLIC, 5)
    for student in (LogisticRegression(), torch.nn.Linear(2, 3)):
        with pytest.raises(ValueError, match=f"algorithm='{type(student).__name__}': must be one of"):
            pate.fit_student(student)


def test_one_odd_cell_renames_no_other(make):
    """One odd value changes the type of its column, or of all labels; the others stay what they are."""
    classes = [2**52, 2**52 + 1]
    whole, odd = (encode_labels(pd.Series(y).to_numpy(), classes)[1] for y in (classes * 2, [*classes, None]))
    assert whole.tolist() == [0, 1, 0, 1] and odd.tolist() == [0, 1, -1]
    with pytest.raises(ValueError, match="must be different"):  # as floating-point numbers they are one
        encode_labels(np.array([2**60]), [2**60, 2**60 + 1])
    days = [pd.Timestamp("2020-01-01"), pd.Timestamp("2020-01-02")]
    for y in (pd.Series(days).to_numpy(), np.array([*days, "never"], dtype=object)):
        assert encode_labels(y, days)[1].tolist()[:2] == [0, 1]
    rows = [[True, 1.5], [False, 2.5]]
    for X in (rows, [*rows, ["purple", 0.0]], [*rows, [pd.Timestamp(0), 0.0]]):
        read = make()._validate_points(X, reset=True)
        assert read[:2].tolist() == [[1.0, 1.5], [0.0, 2.5]] and np.isnan(read[2:, 0]).all()
