"""What a caller of PATEClassifier reads: errors in the words of this class, the charge, progress, and Ctrl-C."""

import contextlib
import functools
import logging
import os
import re
import signal

import numpy as np
import pandas as pd
import pytest

from pate_torch import PATE, PATEClassifier
from pate_torch.core.formatting import format_epsilon
from pate_torch.mechanisms.gaussian import GNMax
from pate_torch.methods.feasibility import LowSignalWarning
from pate_torch.privacy.ledger import find_account
from pate_torch.students.linear import ReleasedModel
from pate_torch.students.training import Supervised
from pate_torch.teachers.recipe import TeacherRecipe
from tests.worlds import clouds

X, Y = (part.numpy() for part in clouds(300, 0))
PUBLIC = clouds(60, 1)[0].numpy()
TERMS = r"\(epsilon at delta 1e-5, add_remove, unit record, accountant gdp\)"
OWN_ATTRIBUTES = re.compile(r"\b(student|teacher|encoder)\.(?=\w)")
"""Attributes of objects that the caller passed, such as ``student.network``."""
FOREIGN = re.compile(r"[a-z_]+\.[a-z_]+=|privacy\.|dataset\.|method\.|budget|target_eps|max_cat|unknown=|=true|=null")
WORDS = pd.DataFrame({"word": [f"w{k}" for k in range(300)], "number": np.arange(300.0)})
IMAGES = np.zeros((300, 1, 8, 8))
RECIPE = TeacherRecipe(network="logistic", steps=5)
TEACHERS = {"method": "teachers", "teacher": RECIPE, "num_teachers": 5, "spend_anyway": True}


@pytest.fixture
def make(tmp_path):
    defaults = {"account": "clouds", "num_records_about": 300, "classes": [0, 1, 2], "home": tmp_path, "verbose": False}
    return lambda epsilon=4.0, **settings: PATEClassifier(epsilon, **(defaults | settings))


def lose_the_ledger(home):
    (home / "ledger.sqlite").rename(home / "lost.sqlite")


AFTER_A_FIT = {
    "charged": ({}, {}, r"account='clouds': has been charged already.*allow_refit=True"),
    "another cap": ({"cap": 7, "allow_refit": True}, {}, "cap=7.0: the cap of account 'clouds' is 10.0. Set this cap"),
    "over the cap": (
        {"epsilon": 9.0, "allow_refit": True},
        {},
        r"account=.clouds.: by its filter .gdp., epsilon 4.02.* is spent.*pass the cap 10.*, of which 1e-06 is",
    ),
    "another delta": ({"delta": 1e-6, "allow_refit": True}, {}, "delta=1e-06: account 'clouds' was opened with 1e-05"),
    "replace": ({"adjacency": "replace_one", "allow_refit": True}, {}, "adjacency='replace_one': account 'clouds' was"),
    "two accounts": (
        {"account": "other"},
        {},
        "account='other': shares a tenth.*set allow_duplicate_account=True",
    ),
    "two orders of classes": ({"account": "other", "classes": [2, 0, 1]}, {}, "account='other': shares a tenth"),
}
BEFORE_A_FIT = {
    "small cap": ({"cap": 1}, {}, r"cap=1.0: this run alone may cost epsilon 4 .*take a smaller epsilon, or open"),
    "DP-SGD": ({"cap": 1, "method": "dpsgd"}, {}, r"cap=1.0: this run alone.*Take a smaller epsilon, or open"),
    "no cap": ({"cap": 0}, {}, "cap=0: must be greater than 0"),
    "name": ({"account": "a b/"}, {}, "account='a b/': must start with"),
    "delta": ({"delta": 1e-300}, {}, "delta=1e-300: must be at least .*Use a larger delta.$"),
    "groups": ({"adjacency": "replace_one"}, {"groups": np.arange(300)}, "adjacency='replace_one'.*Use adjacency='add"),
    "images": ({}, {"X": IMAGES, "public": 300 - IMAGES}, "public=.*must be whole numbers in 0"),
    "teachers": ({"method": "teachers", "num_teachers": 0}, {}, "num_teachers=0"),
    "queries": ({"method": "teachers", "num_queries": -1}, {}, "num_queries=-1"),
    "size": ({"num_records_about": 10**12}, {}, "num_records_about=1000000000000: must be an integer in"),
    "model": ({"method": "teachers", "student": ReleasedModel(), "epsilon": 50.0}, {}, "Use method='gradients', or"),
    "network": ({"student": Supervised(network="cnn", steps=1)}, {}, "student.network='cnn'"),
    "flag": ({"allow_duplicate_account": "yes"}, {}, "allow_duplicate_account='yes': must be"),
    "refit": ({"allow_refit": "no"}, {}, "allow_refit='no': must be true or false"),
    "public classes": ({"classes_are_public": "no"}, {}, "classes_are_public='no': must be true or false"),
    "callback": ({"callback": 5}, {}, "callback=5: must be a function"),
    "categories": ({}, {"X": WORDS, "public": WORDS}, "public: column 'word' has 300 different.*at most 64 are"),
    "chosen by": ({"chosen_by": "x"}, {}, "chosen_by='x'"),
    "device": ({"device": "foo"}, {}, "device='foo': must be auto, cpu"),
}  # fmt: skip


def check_refusal(classifier, arguments, pattern):
    with pytest.raises(ValueError, match=pattern) as refusal:
        classifier.fit(**({"X": X, "y": Y, "public": PUBLIC} | arguments))
    assert not FOREIGN.search(OWN_ATTRIBUTES.sub("", str(refusal.value))), refusal.value


@pytest.mark.parametrize("case", BEFORE_A_FIT)
def test_a_refusal_names_the_arguments_of_this_class(case, make, tmp_path):
    settings, arguments, pattern = BEFORE_A_FIT[case]
    check_refusal(make(**settings), arguments, pattern)
    account = find_account(tmp_path, "clouds")
    assert account is None or not account.is_charged


def test_a_refusal_of_the_account_names_the_arguments_of_this_class(make, tmp_path):
    make().fit(X, Y, public=PUBLIC)
    for settings, arguments, pattern in AFTER_A_FIT.values():
        check_refusal(make(**settings), arguments, pattern)
    lose_the_ledger(tmp_path)
    check_refusal(make(), {}, "account='clouds': was charged in another privacy ledger")


def test_a_refusal_of_pate_names_its_arguments(tmp_path):
    shared = {"num_teachers": 3, "teacher": RECIPE, "mechanism": GNMax(sigma=900.0), "home": tmp_path}
    make = functools.partial(PATE, classes=3, delta=1e-5, **shared)
    with pytest.raises(ValueError, match=r"^name='a b': must start"):
        make("a b")
    with pytest.raises(ValueError, match=r"^budget_epsilon=-1: must be"):
        make("ab", budget_epsilon=-1)
    with pytest.raises(ValueError, match=r"^sigma=900.0: .*or set allow_uninformative_labels=True"):
        make("ab").fit_teachers(X, Y).label(PUBLIC, 5)


def test_a_forecast_of_noise_advises_with_the_arguments_of_this_class(make, tmp_path):
    classifier = make(0.1, num_queries=50, **TEACHERS)
    with pytest.warns(LowSignalWarning, match=r"Noise outweighs.*take more teachers, or spend a larger") as caught:
        classifier.fit(X, Y, public=PUBLIC)
    assert not any("PATE(" in str(warning.message) for warning in caught)
    assert find_account(tmp_path, "clouds").guarantee.epsilon == pytest.approx(0.1)


def test_a_fit_tells_its_charge_and_the_total_of_the_account(make, tmp_path, capsys, caplog):
    caplog.set_level(logging.INFO, "pate_torch")
    first = make(2.0, cap=30).fit(X, Y, public=PUBLIC)
    assert capsys.readouterr().out == "" and first.total_.epsilon == pytest.approx(2.0, rel=1e-3)
    assert "charged 2.000; the only charge of the account (cap 30); ledger" in caplog.messages[-1]
    second = make(1.0, allow_refit=True, verbose=True).fit(X, Y, public=PUBLIC)
    total = find_account(tmp_path, "clouds").guarantee
    total_words = (
        f"account total {format_epsilon(total.epsilon)} if all its releases were planned before the first, "
        "otherwise up to its cap 30"
    )
    line = rf"charged 1\.000; {total_words}; ledger at {tmp_path}/ledger.sqlite {TERMS}"
    plan, expectation, charge = capsys.readouterr().out.splitlines()
    assert plan.startswith("PATEClassifier, epsilon 1 at delta 1e-5 (add_remove, unit record): ")
    assert "units of each class" in expectation
    assert re.fullmatch(f"  {line}", charge)
    assert second.total_ == total and 2 < total.epsilon < 3
    assert re.fullmatch(line, caplog.messages[-1]) and len(caplog.messages) == 6


def test_the_callback_is_told_every_stage(make, capsys):
    calls = []
    make(callback=lambda *call: calls.append(call)).fit(X, Y, public=PUBLIC)
    stages = {stage: (done, total) for stage, done, total in calls}
    assert {"Encoding every record", "Answering queries", "Training the student (released_model)"} <= set(stages)
    assert all(done == total for done, total in stages.values()) and capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("stage", "settings", "message", "finishes"),
    [
        ("Training", TEACHERS, "interrupted: nothing was charged to account 'clouds'. Repeat the same call", True),
        ("Training the", {}, f"charged 4.000; the only charge.*{TERMS}. Repeat the same call to", True),
        ("Training the", {"random_state": None}, "charged 4.000.*cannot be finished: another call", False),
        ("Answering", {}, "charged 4.000.*cannot be finished: another call is a new charge", False),
    ],
    ids=["before the charge", "after the charge", "without a seed", "between noise and commit"],
)  # fmt: skip
def test_an_interrupt_tells_what_was_charged_and_how_to_go_on(stage, settings, message, finishes, make, tmp_path):
    def interrupt(name, *_):
        if name.startswith(stage):
            os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background process ignores Ctrl-C
    with contextlib.ExitStack() as stack, pytest.raises(KeyboardInterrupt, match=message):
        stack.callback(signal.signal, signal.SIGINT, before)
        make(callback=interrupt, **settings).fit(X, Y, public=PUBLIC)
    if not finishes:
        with pytest.raises(ValueError, match="has been charged already"):
            make(**settings).fit(X, Y, public=PUBLIC)
    else:
        make(**settings).fit(X, Y, public=PUBLIC)
        assert len(find_account(tmp_path, "clouds").charges) == 1
