"""How published implementations of PATE broke their own guarantee: each way of doing so, as a test that would catch it.

Covered elsewhere: noise from a published seed or a global generator (test_budget, test_noise); shards that overlap or
are redrawn, votes on augmented images, students that see private records, and the user's delta (test_leaks); budget
loops that overshoot (test_ledger); choices made by private records (test_pipeline); a threshold test that is not the
accounted one, and costs by expectation (test_mechanisms); bounds beyond their validity (test_data_dependent).
"""

import dataclasses
from typing import get_args

import numpy as np
import pytest
import torch

from pate_torch.accounting import rdp
from pate_torch.accounting.events import (
    BoundedRangeEvent,
    DeltaEvent,
    GaussianEvent,
    LaplaceEvent,
    PrivacyEvent,
    PureDPEvent,
)
from pate_torch.privacy.noise import DryRunNoise
from pate_torch.privacy.records import NO_ANSWER, MechanismContext
from tests.mechanisms.mechanism_forms import FORMS, build, num_classes, num_teachers, random_votes

every_form = pytest.mark.parametrize("name,noise", FORMS, ids=["-".join(form) for form in FORMS])


def released(name: str, noise: str, queries: int = 60):
    """A release of mixed votes: (mechanism, votes, answers)."""
    mechanism = build(name, noise)
    teachers = num_teachers(mechanism, queries, 1)
    votes = random_votes(queries, teachers, num_classes(name), seed=5)
    student_QC = torch.full((queries, num_classes(name)), 0.02 / (num_classes(name) - 1))
    student_QC[:, 0] = 0.98
    context = MechanismContext(num_queries=queries, student_QC=student_QC)
    return mechanism, votes, mechanism.release(votes, DryRunNoise(noise), context)


@every_form
def test_every_label_released_is_charged(name, noise):
    _, _, answers = released(name, noise)
    counts = {type(e): 0 for e in answers.events}
    for event in answers.events:
        counts[type(event)] += event.count
    asked, answered = len(answers.label_Q), int(answers.answered_Q.sum())
    match name:
        case "gaussian" | "exponential":
            assert answered == asked == sum(counts.values())
        case "laplace":
            assert 2 * answered == 2 * asked == sum(counts.values())
        case "confident" | "interactive":
            free = 0 if answers.from_student_Q is None else int(answers.from_student_Q.sum())
            assert [e.count for e in answers.events] == [asked, answered - free]
            assert 0 < answered - free < asked  # both branches were taken
        case "single_stable":
            assert [e.count for e in answers.events] == [asked, asked]
        case "sparse_vector" | "soft_sparse_vector":
            assert counts[PureDPEvent] >= 1 and counts[DeltaEvent] == 1
        case _:
            pytest.fail(f"say here what one answer of {name} is charged")


@every_form
def test_nothing_but_the_charged_label_is_released(name, noise):
    mechanism, votes, answers = released(name, noise)
    known = {"label_Q", "events", "score_QC", "from_student_Q", "noisy_counts", "score_PC", "model", "reservation_id"}
    assert {f.name for f in dataclasses.fields(answers)} == known
    assert answers.score_PC is None and answers.model is None
    assert answers.noisy_counts is None  # but where the cost is that of the noisy counts, and they were asked for
    assert answers.label_Q.dtype == torch.int64
    assert set(answers.label_Q.tolist()) <= {NO_ANSWER, *range(votes.num_classes)}
    if name == "soft_sparse_vector":  # the score is one of 2 bins - 1 centers, not a noisy share
        grid = torch.arange(2 * mechanism.bins + 1, dtype=torch.float64) / (2 * mechanism.bins)
        score = answers.score_QC[~answers.score_QC.isnan()]
        assert len(score) and (score[:, None] - grid).abs().min(1).values.max() < 1e-12
    else:
        assert answers.score_QC is None
    # A cost is a number of times a public constant: no vote enters it.
    public = [dataclasses.replace(e, count=0) for e in mechanism.privacy_events(len(votes))]
    assert all(
        isinstance(e, get_args(PrivacyEvent)) and dataclasses.replace(e, count=0) in public for e in answers.events
    )


@pytest.mark.parametrize(
    "event", [GaussianEvent(mu=30.0), LaplaceEvent(ratio=40.0), PureDPEvent(epsilon=50.0), BoundedRangeEvent(eta=60.0)]
)
def test_no_order_overflows_to_a_negative_cost(event):
    for orders in (np.array([2, 64, 10**6, 2**40]), np.array([1.0001, 1e9, 1e12])):
        values = rdp.compute_curve([dataclasses.replace(event, count=10**6)], orders)
        assert np.isfinite(values).all() and (values > 0).all() and (np.diff(values) >= 0).all()
