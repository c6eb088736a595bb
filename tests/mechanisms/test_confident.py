"""Confident and Interactive GNMax: which queries are asked, answered and paid for."""

import dataclasses
import math

import pytest
import torch

from pate_torch.privacy.noise import DryRunNoise
from pate_torch.privacy.records import NO_ANSWER, MechanismContext
from pate_torch.privacy.sensitive import Votes
from tests.mechanisms.mechanism_forms import build


@pytest.mark.parametrize("sizes", [[100], [30, 70], [10, 20, 70]], ids=str)
def test_max_answers_ends_the_asking(sizes):
    mechanism = build("confident", max_answers=7, screen_sigma=0.1, sigma=0.1)
    agree = torch.tensor([20, 0, 0])
    split = torch.tensor([7, 7, 6])
    votes = Votes(torch.stack([agree if q % 3 == 0 else split for q in range(100)]), 20)
    source, label_Q, incurred, start = DryRunNoise(), torch.zeros(0, dtype=torch.int64), (), 0
    for size in sizes:
        context = MechanismContext(num_queries=100, rounds=len(sizes), num_answered=int((label_Q >= 0).sum()))
        answers = mechanism.release(votes.select(torch.arange(start, start + size)), source, context)
        label_Q, incurred, start = torch.cat([label_Q, answers.label_Q]), incurred + answers.events, start + size
        if len(answers.label_Q) < size:
            break
    assert label_Q.tolist() == [0, -1, -1] * 6 + [0]  # ends with the seventh answer
    assert sum(e.count for e in incurred if e.mu == 1 / 0.1) == 19
    assert sum(e.count for e in incurred if e.mu != 1 / 0.1) == 7


def test_confident_refuses_a_threshold_out_of_reach():
    with pytest.raises(ValueError, match="threshold"):
        build("confident", threshold=100).check(num_queries=5, num_teachers=20, num_classes=3)
    build("confident").check(num_queries=5, num_teachers=20, num_classes=3)


def test_interactive_pays_only_where_the_student_is_wrong():
    mechanism = build("interactive", threshold=10.0, sigma=0.2, screen_sigma=0.2, student_confidence=0.8)
    votes = Votes(torch.tensor([[20, 0], [20, 0], [10, 10]]), 20)
    student_QC = torch.tensor([[0.95, 0.05], [0.1, 0.9], [0.6, 0.4]])
    answers = mechanism.release(votes, DryRunNoise(), MechanismContext(num_queries=3, student_QC=student_QC))
    assert answers.label_Q.tolist() == [0, 0, NO_ANSWER]  # the student's own; the teachers'; nobody's
    assert answers.from_student_Q.tolist() == [True, False, False]
    assert [e.count for e in answers.events] == [3, 1]
    # Without a student no label is the student's, and a uniform expectation (10 votes each) stands in for it.
    lower = dataclasses.replace(mechanism, threshold=5.0)
    answers = lower.release(votes, DryRunNoise(), MechanismContext(num_queries=3))
    assert answers.label_Q.tolist() == [0, 0, NO_ANSWER]
    assert not answers.from_student_Q.any()


@pytest.mark.parametrize(
    "student", [[[math.nan, 1.0]], [[0.7, 0.7]], [[1.5, -0.5]], [[0.5, 0.25, 0.25]], [[0.5, 0.5], [0.5, 0.5]]], ids=str
)
def test_interactive_refuses_what_is_not_a_probability(student):
    votes = Votes(torch.tensor([[12, 8]]), 20)
    with pytest.raises(ValueError, match="student"):
        build("interactive").release(
            votes, DryRunNoise(), MechanismContext(num_queries=1, student_QC=torch.tensor(student))
        )


def test_interactive_baseline_is_whole_votes_under_integer_noise():
    """Integer noise moves a count by whole votes: a fractional baseline would show through it."""
    mechanism = build("interactive", "discrete", threshold=0.0, screen_sigma=0.05, student_confidence=1.0)
    votes = Votes(torch.tensor([[10, 10]]), 20)
    # K p = (10.4, 9.6), rounded (10, 10): the excess is exactly 0 and passes; unrounded it would be 0.4 and pass a
    # threshold of 0.3 that no whole excess of 0 passes.
    context = MechanismContext(num_queries=1, student_QC=torch.tensor([[0.52, 0.48]]))
    assert mechanism.release(votes, DryRunNoise("discrete"), context).events[1].count == 1
    mechanism = dataclasses.replace(mechanism, threshold=0.3)
    assert mechanism.release(votes, DryRunNoise("discrete"), context).events[1].count == 0
