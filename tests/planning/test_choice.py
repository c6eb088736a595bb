"""The figures of a plan against the accounting core, the ledger of a run, and the mechanisms' own checks."""

import contextlib
import dataclasses

import pytest

from pate_torch.accounting import accountant as accounting
from pate_torch.accounting.events import BoundedRangeEvent
from pate_torch.data.base import SourceFacts
from pate_torch.mechanisms.confident import ConfidentGNMax
from pate_torch.mechanisms.gaussian import GNMax
from pate_torch.mechanisms.gradient_descent import GradientDescent
from pate_torch.mechanisms.laplace import LNMax
from pate_torch.mechanisms.sparse_vector import SparseVector
from pate_torch.methods import feasibility
from pate_torch.methods.gradients import GradientMethod
from pate_torch.planning.choice import select_best
from pate_torch.planning.pilot import Forecast
from pate_torch.privacy.accounts import BudgetExceeded
from pate_torch.privacy.ledger import Ledger
from pate_torch.students.linear import Logistic
from pate_torch.students.selection import Selection
from tests.mechanisms.mechanism_forms import NAMES, build
from tests.planning.plans import FACTS, evaluate, make_plan

TERMS = {"delta": 1e-5, "adjacency": "add_remove", "unit": "record"}
STABLE = {"epsilon": 1.0, "delta": 1e-5, "max_failures": 20}


def test_costs_and_counts_are_those_of_the_accounting_core():
    mechanism = GNMax(sigma=40.0)
    choice = evaluate(mechanism=mechanism, budget_epsilon=2.0)
    assert choice.epsilon == accounting.compute_route_epsilons(mechanism.privacy_events(50), 1e-5)["gdp"]
    assert choice.epsilon == pytest.approx(0.92630, abs=2e-4)  # mu = sqrt(2 * 50) / 40 = 1/4 by hand
    counts = choice.max_queries, choice.max_queries + 1
    fits, one_more = (accounting.compute_guarantee(mechanism.privacy_events(count), 1e-5).epsilon for count in counts)
    assert fits <= 2 < one_more and choice.shard_size == 240
    assert evaluate(facts=SourceFacts(name="unknown", num_classes=2)).shard_size is None
    assert choice.lead == feasibility.compute_break_even_lead(mechanism, 10)


def reserve(ledger, events, is_admitted):
    with contextlib.nullcontext() if is_admitted else pytest.raises(BudgetExceeded):
        return ledger.reserve("mine", events, fingerprint="", mechanism="", run="")


@pytest.mark.parametrize(
    "changes",
    [
        {"mechanism": GNMax(sigma=8.3)},
        {"mechanism": LNMax(sigma=8.0)},
        {"mechanism": ConfidentGNMax(sigma=15.0, screen_sigma=20.0, threshold=30.0)},
        {"mechanism": GNMax(sigma=9.0, noise="discrete")},
        {"mechanism": GNMax(sigma=10.0), "selection": Selection(candidates={"one": Logistic(), "two": Logistic()})},
    ],
    ids=["gaussian", "laplace", "confident", "discrete", "selection"],
)
def test_so_many_questions_fit_as_the_ledger_of_a_run_accepts(changes, tmp_path):
    changes |= {"num_teachers": 50, "num_queries": 20, "budget_epsilon": 2.0}
    choice, plan = evaluate(**changes), make_plan(**changes)
    assert 1 < choice.max_queries < 4000
    for queries, accepted in ((choice.max_queries, True), (choice.max_queries + 1, False)):
        events = plan.method.mechanism.privacy_events(queries)
        if plan.selection is not None:
            events += (BoundedRangeEvent(eta=0.5),)
        with Ledger(tmp_path / f"ledger{queries}.sqlite") as ledger:
            ledger.open_account("mine", planned_events=events, budget_epsilon=2.0, **TERMS)
            reserve(ledger, events, accepted)


def test_what_is_left_is_what_the_ledger_admits(tmp_path):
    mechanism = GNMax(sigma=8.3)
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        ledger.open_account("mine", planned_events=mechanism.privacy_events(20), budget_epsilon=4.0, **TERMS)
        events = mechanism.privacy_events(20)
        ledger.commit(reserve(ledger, events, True), events)
        choice = evaluate(account=ledger.get_account("mine"), mechanism=mechanism)
        for more in (1, 0):
            reserve(ledger, mechanism.privacy_events(choice.max_queries + more), more == 0)
    of_a_new_account = evaluate(mechanism=mechanism, budget_epsilon=4.0)
    assert choice.max_queries == of_a_new_account.max_queries - 20  # mu^2 adds up


def test_a_target_sets_the_noise_as_in_a_run():
    choice, method = evaluate(target_epsilon=1.5), make_plan().method
    assert choice.parameters["sigma"] == method.calibrate(1.5, 1e-5).mechanism.sigma
    assert choice.epsilon == pytest.approx(1.5, rel=1e-8)
    screen = ConfidentGNMax(sigma=8.0, screen_sigma=2.0, threshold=30.0)  # whose checks alone cost more
    choice = evaluate(mechanism=screen, num_teachers=50, target_epsilon=1.0)
    assert choice.verdict == "cannot" and "out of reach" in choice.problem and choice.epsilon is None


def test_stability_with_few_teachers_is_refused_with_the_number_it_takes():
    mechanism = SparseVector(**STABLE)
    needed = mechanism.make_cost(50).min_teachers
    few, enough = (evaluate(mechanism=mechanism, num_teachers=teachers) for teachers in (250, 6000))
    with pytest.raises(ValueError) as refused:
        mechanism.check(num_queries=50, num_teachers=250, num_classes=10)
    assert few.problem == str(refused.value) and few.verdict == "cannot" and few.epsilon is None
    assert f"num_teachers=250: must be at least {needed}" in few.problem
    assert enough.problem is None and enough.verdict == "ok" and enough.lead == needed
    fits = evaluate(mechanism=mechanism, num_teachers=2500, budget_epsilon=2.0).max_queries
    mechanism.check(num_queries=fits, num_teachers=2500, num_classes=10)
    with pytest.raises(ValueError, match="must be at least"):
        mechanism.check(num_queries=fits + 1, num_teachers=2500, num_classes=10)


def test_what_a_run_would_refuse_is_refused():
    assert "4000 points" in evaluate(num_queries=4001).problem
    assert "60000 private records" in evaluate(num_teachers=60_001).problem
    assert "no better than chance" in evaluate(mechanism=GNMax(sigma=1e5)).problem
    assert evaluate(mechanism=GNMax(sigma=1e5), allow_uninformative_labels=True).verdict == "noise"
    over = evaluate(mechanism=GNMax(sigma=1.0), budget_epsilon=0.05)
    assert (over.max_queries, over.verdict) == (0, "over")
    noisy = evaluate(mechanism=GNMax(sigma=16.0), num_teachers=50)
    assert noisy.lead > 25 and noisy.verdict == "noise"


def test_gradients_need_the_number_of_records_and_bear_noise_in_proportion_to_it():
    def choose(**given):
        descent = GradientDescent(sigma=7.0, adjacency="add_remove")
        return evaluate(method=GradientMethod(mechanism=descent), mechanism=descent, num_teachers=0, **given)

    assert choose().verdict == "ok" and choose().num_teachers == 0 and choose().lead is None
    facts = dataclasses.replace(FACTS, num_private=None)
    assert choose(facts=facts).problem.startswith("dataset.nominal_size")
    assert choose(facts=dataclasses.replace(FACTS, num_private=100)).verdict == "noise"


@pytest.mark.parametrize("name", NAMES)
def test_every_mechanism_can_be_planned(name):
    soft = name == "soft_sparse_vector"
    facts = dataclasses.replace(FACTS, num_classes=2) if soft else FACTS
    choice = evaluate(mechanism=build(name), num_teachers=20_000, num_queries=5, facts=facts, budget_epsilon=1e6)
    assert choice.problem is None and choice.lead is not None


def test_the_best_is_the_cheapest_whose_labels_need_a_lead_of_a_quarter_of_the_votes():
    choices = [
        evaluate(num_teachers=teachers, mechanism=GNMax(sigma=sigma), budget_epsilon=100.0)
        for teachers in (50, 100)
        for sigma in (4.0, 8.0, 16.0)
    ]
    best = select_best(choices)
    clear = [choice for choice in choices if choice.lead <= choice.num_teachers / 4]
    assert best in clear and best.epsilon == min(choice.epsilon for choice in clear)
    assert (best.num_teachers, best.parameters["sigma"]) == (100, 8)
    far = evaluate(num_teachers=50, mechanism=GNMax(sigma=11.0))
    assert select_best([far]) is far and 0.25 < far.lead / 50 < 0.5  # the best there is
    assert select_best([choice for choice in choices if choice.parameters["sigma"] == 4]).num_teachers == 50
    assert select_best([choice for choice in choices if choice.verdict != "ok"]) is None


class Oracle:
    """A pilot whose forecast is known."""

    def __init__(self, answer_rate: float, accuracy: float) -> None:
        self.answer = Forecast(answer_rate=answer_rate, accuracy=accuracy)

    def forecast(self, method):
        return self.answer


def test_with_a_pilot_the_best_is_the_cheapest_among_those_with_most_right_labels():
    cheap, middle, dear = (
        evaluate(mechanism=GNMax(sigma=sigma), pilot=Oracle(1.0, accuracy))
        for sigma, accuracy in ((40.0, 0.7), (20.0, 0.89), (10.0, 0.9))
    )
    assert cheap.epsilon < middle.epsilon < dear.epsilon and select_best([cheap, middle, dear]) is middle
    better = evaluate(mechanism=GNMax(sigma=10.0), pilot=Oracle(1.0, 0.95))
    assert select_best([cheap, middle, better]) is better


@pytest.mark.parametrize(
    ("answer_rate", "accuracy", "verdict"), [(0.05, 1.0, "few"), (0.5, 0.54, "poor"), (0.5, 0.56, "ok")]
)
def test_few_answers_are_told_from_none_wrong(answer_rate, accuracy, verdict):
    assert evaluate(pilot=Oracle(answer_rate, accuracy)).verdict == verdict
