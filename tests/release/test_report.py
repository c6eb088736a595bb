"""The records of a report: nothing private enters by type, impossible facts are refused, seeded runs claim nothing."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from pate_torch.privacy.accounts import PURPOSE_TEST
from pate_torch.privacy.records import PrivateRecords
from pate_torch.privacy.sensitive import Votes
from pate_torch.release.report import FILES, ChargedRelease, Share
from tests.release.reporting_demo import demo

VOTES = Votes(torch.tensor([[3, 1], [0, 4]]), 4)
RECORDS = PrivateRecords.from_rows(torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64), np.array(["a", "b"]))


@pytest.mark.parametrize(
    "value", [VOTES, RECORDS, torch.ones(2), np.ones(2), np.float32(1), Fraction(1, 2), {1, 2}, b"x"]
)
def test_nothing_but_plain_values_enters(value):
    with pytest.raises(TypeError, match=rf"parameters.sigma: {type(value).__name__} may not enter"):
        demo(parameters={"sigma": value})
    with pytest.raises(TypeError):
        demo().record.parameters["sigma"] = value  # nor later
    for wrapped in (value, (value,), ((value,),)):
        for name in ("baselines", "confusion", "epsilon_curve", "examples", "teachers_id"):
            with pytest.raises((TypeError, ValueError)):
                demo(**{name: wrapped})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"student_accuracy": math.nan}, "student_accuracy"),
        ({"label_accuracy": 1.2}, "label_accuracy"),
        ({"parameters": {"sigma": math.inf}}, "sigma"),
        ({"epsilon_charged": math.nan}, "epsilon_charged"),
        ({"epsilon_curve": (1.0, math.nan)}, "epsilon_curve"),
        ({"epsilon_curve": (1.0, 2.0)}, "one value per query"),
        ({"queries_asked": 2, "queries_answered": 2, "epsilon_curve": (2.0, 1.0)}, "must not decrease"),
        ({"epsilon": math.inf}, "epsilon"),
        ({"epsilon": -1.0}, "epsilon"),
        ({"epsilon": None}, "epsilon"),
        ({"delta": 0.0}, "delta"),
        ({"adjacency": "swap"}, "adjacency"),
        ({"unit": "group:"}, "unit"),
        ({"noise": "none"}, "noise"),
        ({"private": 1}, "private"),
        ({"queries_answered": 287}, "queries_answered"),
    ],
)
def test_impossible_facts_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        demo(**changes)


@pytest.mark.parametrize(
    ("hits", "size", "interval"),
    [(81, 263, (0.2553, 0.3662)), (15, 148, (0.0624, 0.1605)), (0, 20, (0.0, 0.1611)), (1, 29, (0.0061, 0.1718))],
)
def test_the_interval_of_a_share_is_wilsons(hits, size, interval):
    """Newcombe 1998, *Two-sided confidence intervals for the single proportion*, table I, method 3."""
    assert Share(value=hits / size, size=size).interval == pytest.approx(interval, abs=5e-5)


def test_class_accuracies_are_the_diagonal_over_the_rows():
    first, second = demo(confusion=((8, 2), (0, 0)), class_names=("a", "b")).class_accuracies
    assert first.name == "a" and first.share.value == 0.8 and first.share.size == 10 and second is None


@pytest.mark.parametrize(("hits", "is_below"), [(89, True), (90, False)])
def test_a_student_below_the_majority_class_is_reported(hits, is_below):
    report = demo(confusion=((0, 10), (90 - hits, hits)), class_names=("no", "<yes>"), student_accuracy=hits / 100)
    words = "Below the majority class: the constant prediction <yes> has an accuracy of 90.0 % on the test points."
    assert report.majority_warning == (words if is_below else None)
    assert demo(confusion=()).majority_warning is None  # no public test labels


def test_a_report_that_is_not_private_holds_no_epsilon():
    claim = demo(private=False, epsilon_ex_post=2.1, parts=demo().claim.other_releases).claim
    assert {claim.epsilon, claim.epsilon_ex_post, claim.epsilon_charged, claim.epsilon_charged_ex_post} == {None}
    assert claim.epsilon_curve == ()
    assert all(part.epsilon is None and part.events == "[]" for part in (*claim.parts, *claim.other_releases))


def test_the_files_that_a_report_lists_are_those_that_the_folder_holds():
    always = {"report.html", "summary.json", "privacy.json", "README.md", "SHA256SUMS"}
    answers = ("labels.csv", "first_answers.json")
    assert set(demo(answer_files=answers).files) == {*always, "release.json", *answers, "student.safetensors"}
    assert set(demo(reuses_labels=True, student=None).files) == always
    tested = demo(includes_encoder=True, parts=(ChargedRelease(release_id="a", purpose=PURPOSE_TEST),)).files
    more = {"release.json", "labels.csv", "student.safetensors", "encoder/", "private_test.json"}
    assert set(tested) == {*always, *more}
    assert set(tested) < set(FILES)
