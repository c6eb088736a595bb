"""How published implementations of PATE broke their own guarantee: each way of doing so, as a test that would catch it.

Covered elsewhere: noise from a published seed or a global generator (test_budget, test_noise); shards that overlap or
are redrawn, votes on augmented images, files of votes that grow on a rerun, students that see private records, and the
user's delta (test_leaks); budget loops that overshoot (test_ledger); choices made by private records (test_pipeline).
"""

import ast
import dataclasses
import inspect
import math
from typing import get_args

import numpy as np
import pytest
import torch
from scipy import stats

from pate_torch.accounting import rdp
from pate_torch.accounting.accountant import compute_guarantee
from pate_torch.accounting.data_dependent.theorems import (
    GNMaxOutcomes,
    compute_pate2017_curve,
    compute_rdp,
    is_gnmax_bound_valid,
)
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
from pate_torch.privacy.sensitive import Votes
from tests import ROOT
from tests.accounting.data_dependent.exact_divergences import compute_divergences
from tests.mechanisms.mechanism_forms import FORMS, NAMES, build, num_classes, num_teachers, random_votes
from tests.mechanisms.vote_laws import TINY

PACKAGE = ROOT / "pate_torch"
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


# -- released labels not charged on some branches --------------------------------------------------------------------


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


# -- the executed threshold test is not the accounted one -------------------------------------------------------------


@pytest.mark.parametrize("top", [190, 200, 210])
def test_the_check_adds_one_number_per_query_not_one_per_class(top):
    """Noise on every class before the maximum passes far more often than the accountant was told."""
    size = 20_000
    mechanism = build("confident", sigma=40.0, screen_sigma=150.0, threshold=260.0)
    votes = Votes(torch.tensor([[top, *[(250 - top) // 9 for _ in range(8)], 250 - top - 8 * ((250 - top) // 9)]]), 250)
    votes = votes.select(torch.zeros(size, dtype=torch.int64))
    passed = int(mechanism.release(votes, DryRunNoise(), MechanismContext(num_queries=size)).answered_Q.sum())
    accounted = stats.norm.sf((260 - top) / 150)
    per_class = 1 - math.prod(stats.norm.cdf((260 - n) / 150) for n in votes.counts_QC[0].tolist())
    assert stats.binomtest(passed, size, accounted).pvalue > TINY
    assert stats.binomtest(passed, size, per_class).pvalue < TINY


@pytest.mark.parametrize("name", ["confident", "interactive"])
def test_the_checks_price_is_paid_by_every_query_at_every_order(name):
    orders = np.array([1.5, 2, 8, 32, 200.0])
    for queries in (1, 10, 640):
        total = rdp.compute_curve(build(name).privacy_events(queries), orders)
        assert total == pytest.approx(queries * orders * (1 / (2 * 4.0**2) + 1 / 3.0**2), rel=1e-12)


def test_the_price_is_what_may_happen_not_what_is_expected_to():
    """Expected cost is Pr[answered] times the price: below what a run that is answered everywhere incurs."""
    mechanism = build("confident", screen_sigma=0.1)
    votes = Votes(torch.tensor([[20, 0, 0]]).repeat(40, 1), 20)
    incurred = mechanism.release(votes, DryRunNoise(), MechanismContext(num_queries=40)).events
    assert (rdp.compute_curve(incurred) == rdp.compute_curve(mechanism.privacy_events(40))).all()
    assert list(inspect.signature(type(mechanism).privacy_events).parameters) == ["self", "num_queries", "rounds"]


# -- ties -------------------------------------------------------------------------------------------------------------


def test_a_tie_gives_no_teacher_a_second_vote():
    logits_KC = torch.tensor([[1.0, 1.0, 0.0], [0.0, 2.0, 0.0]])
    twice = torch.isclose(logits_KC, logits_KC.max(1, keepdim=True).values).sum(0)[None]
    with pytest.raises(ValueError, match="one teacher, one vote"):
        Votes(twice, 2)
    once = torch.nn.functional.one_hot(logits_KC.argmax(1), 3).sum(0)[None]
    assert Votes(once, 2).compute_plurality().tolist() == [0]  # the lowest index wins


# -- soft outputs of the noisy histogram released while only the argmax is charged ------------------------------------


@every_form
def test_nothing_but_the_charged_label_is_released(name, noise):
    mechanism, votes, answers = released(name, noise)
    known = {"label_Q", "events", "score_QC", "from_student_Q", "noisy_counts", "score_PC", "model", "reservation_id"}
    assert {f.name for f in dataclasses.fields(answers)} == known
    assert answers.score_PC is None and answers.model is None
    assert answers.noisy_counts is None  # but where the price is that of the noisy counts, and they were asked for
    assert answers.label_Q.dtype == torch.int64
    assert set(answers.label_Q.tolist()) <= {NO_ANSWER, *range(votes.num_classes)}
    if name == "soft_sparse_vector":  # the score is one of 2 bins - 1 centers, not a noisy share
        grid = torch.arange(2 * mechanism.bins + 1, dtype=torch.float64) / (2 * mechanism.bins)
        score = answers.score_QC[~answers.score_QC.isnan()]
        assert len(score) and (score[:, None] - grid).abs().min(1).values.max() < 1e-12
    else:
        assert answers.score_QC is None
    # A price is a number of times a public constant: no vote enters it.
    public = [dataclasses.replace(e, count=0) for e in mechanism.privacy_events(len(votes))]
    assert all(
        isinstance(e, get_args(PrivacyEvent)) and dataclasses.replace(e, count=0) in public for e in answers.events
    )


# -- the accountant's crashes, overflows and edges --------------------------------------------------------------------


def test_the_accountant_raises_rather_than_returning_a_code():
    for events in (["gaussian"], [None]):
        with pytest.raises(ValueError, match="event="):
            compute_guarantee(events, 1e-5)
    for file in sorted((PACKAGE / "accounting").glob("*.py")):
        handlers = [n for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.ExceptHandler)]
        broad = [h for h in handlers if h.type is None or getattr(h.type, "id", "") in ("Exception", "BaseException")]
        assert not broad, f"{file.name} swallows errors"


@pytest.mark.parametrize(
    "event", [GaussianEvent(mu=30.0), LaplaceEvent(ratio=40.0), PureDPEvent(epsilon=50.0), BoundedRangeEvent(eta=60.0)]
)
def test_no_order_overflows_to_a_negative_price(event):
    for orders in (np.array([2, 64, 10**6, 2**40]), np.array([1.0001, 1e9, 1e12])):
        values = rdp.compute_curve([dataclasses.replace(event, count=10**6)], orders)
        assert np.isfinite(values).all() and (values > 0).all() and (np.diff(values) >= 0).all()


@pytest.mark.parametrize("sigma", [0.5, 5.0, 40.0])
def test_votes_far_beyond_the_threshold_are_priced_and_answered(sigma):
    """1 - q rounds to 1 some 8 sigmas out, where a naive log1p(-1) is minus infinity."""
    mechanism = build("confident", sigma=sigma, screen_sigma=sigma, threshold=10.0)
    votes = Votes(torch.tensor([[5000, 0, 0], [2501, 2499, 0], [0, 0, 5000]]), 5000)
    answers = mechanism.release(votes, DryRunNoise(), MechanismContext(num_queries=3))
    assert answers.label_Q[[0, 2]].tolist() == [0, 2]
    prices = compute_rdp(mechanism.make_outcome_model(), votes.counts_QC.numpy(), rdp.ORDERS)
    assert np.isfinite(prices).all() and (prices >= 0).all()
    assert (prices <= 3 * rdp.ORDERS * (1 / (2 * sigma**2) + 1 / sigma**2) * (1 + 1e-12)).all()


def test_data_dependent_bounds_are_kept_to_their_validity():
    orders = np.array([1.5, 4.0, 20.0])
    # GNMax: a tie has q = 1 - 1/C, far outside; the price must be the data-independent one.
    tie = np.array([[50, 50]])
    assert compute_rdp(GNMaxOutcomes(sigma=4.0), tie, orders) == pytest.approx(orders / 16)
    assert not is_gnmax_bound_valid(np.array([math.log(0.5)]), 4.0).any()
    # LNMax: q < 1/(e^e0 + 1), not q < 0.5, which others test. Between the two the formula is no bound.
    e0, cap = 1.0, np.array([0.3, 0.6, 0.9])
    q = np.log(np.array([0.3, 0.45]))
    assert (q > -math.log(math.exp(e0) + 1)).all()
    assert (compute_pate2017_curve(q, e0, cap, orders) == cap).all()
    # And the exact price of every row is at most the theorem's where the theorem applies (forward).
    rows = np.array([[60, 40], [70, 30], [95, 5]])
    forward = sum(compute_divergences(GNMaxOutcomes(sigma=8.0), row, orders)[0] for row in rows)
    assert (forward <= compute_rdp(GNMaxOutcomes(sigma=8.0), rows, orders) * (1 + 1e-9)).all()


# -- loops, constants and counts --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [n for n in NAMES if n != "soft_sparse_vector"])
@pytest.mark.parametrize("classes", [2, 10, 100])
def test_any_number_of_classes_and_many_queries_at_once(name, classes):
    queries = 5000
    mechanism = build(name)
    teachers = num_teachers(mechanism, queries, 1)
    counts_QC = torch.zeros(queries, classes, dtype=torch.int64)
    winner_Q = torch.arange(queries) % classes
    counts_QC[torch.arange(queries), winner_Q] = teachers
    answers = mechanism.release(Votes(counts_QC, teachers), DryRunNoise(), MechanismContext(num_queries=queries))
    right = (answers.label_Q == winner_Q[: len(answers.label_Q)])[answers.answered_Q]
    assert len(right) > 1000 and right.double().mean() > 0.8


def test_the_exponential_mechanisms_price_counts_every_query():
    """The event of a known library costs as much 100 times as once."""
    once, often = (rdp.compute_curve([BoundedRangeEvent(eta=0.1, count=count)]) for count in (1, 100))
    assert often == pytest.approx(100 * once, rel=1e-12)
    assert rdp.compute_curve(build("exponential").privacy_events(100)) == pytest.approx(
        100 * rdp.compute_curve(build("exponential").privacy_events(1)), rel=1e-12
    )
