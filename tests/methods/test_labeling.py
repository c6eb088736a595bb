"""Rounds of queries: what a query strategy or a later round may not do, however it was written."""

from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch

from pate_torch.mechanisms.gaussian import GNMax
from pate_torch.methods.labeling import PreparedLabeling
from pate_torch.privacy.budget import Budget
from pate_torch.privacy.ledger import Ledger
from pate_torch.privacy.records import DataSpec, PublicPool
from pate_torch.privacy.sensitive import Votes
from pate_torch.queries.base import QueryStrategy
from pate_torch.students.training import Supervised

SPEC = DataSpec(name="p", num_classes=2, input_shape=(1,), class_names=("a", "b"), mean=(0.0,), std=(1.0,))
POOL = PublicPool(torch.arange(9.0)[:, None])
VOTES = Votes(torch.tensor([[30, 10]] * 9), 40)


@dataclass(frozen=True, kw_only=True)
class Chosen(QueryStrategy):
    """Asks the listed points, a tuple in each round."""

    uses_guide: ClassVar[bool] = False
    name: str = "chosen"
    points: tuple[tuple[int, ...], ...]

    def select(self, state):
        return torch.tensor(self.points[self.rounds - state.num_rounds_left], dtype=torch.int64)


def release(home, points, num_queries=4, **changes):
    """The release of a plan; an error leaves its whole reservation spent."""
    given = {"query": Chosen(points=points, rounds=len(points)), "num_queries": num_queries, **changes}
    prepared = PreparedLabeling(mechanism=GNMax(sigma=4.0), sensitive=VOTES, spec=SPEC, seed=0, **given)
    events = prepared.mechanism.privacy_events(num_queries)
    with Ledger(home / "ledger.sqlite") as ledger:
        terms = {"budget_epsilon": 9.0, "delta": 1e-5, "adjacency": "add_remove", "unit": "record"}
        ledger.open_account("p", **terms, planned_events=events)
        budget = Budget.from_account(ledger, "p", run="r")
        prepared.check(budget, POOL)
        try:
            with budget.spend(events, mechanism="gaussian") as spending:
                return prepared.release(POOL, spending)
        except ValueError:
            (charge,) = ledger.get_charges("p").values()
            assert charge.charged_cost == charge.reserved_cost and not charge.is_committed
            raise


def test_questions_are_asked_in_the_order_of_the_strategy(tmp_path):
    answers = release(tmp_path, ((3, 1), (8, 0)))
    assert answers.query_Q.tolist() == [3, 1, 8, 0] and answers.queries_per_round == (2, 2)


@pytest.mark.parametrize(
    ("points", "words"),
    [
        (((0, 1, 2, 3, 4),), "5 queries, but 4 remain"),
        (((0, 1, 2), (3, 4)), "2 queries, but 1 remain"),
        (((0, 9),), "outside"),
        (((-1,),), "outside"),
        (((5, 5),), "twice"),
        (((5, 6), (7, 5)), "twice"),
    ],
    ids=["too many", "too many later", "behind the pool", "before the pool", "twice", "again in a later round"],
)
def test_a_strategy_that_breaks_its_contract_stops_the_release(tmp_path, points, words):
    with pytest.raises(ValueError, match=f"query strategy.*{words}"):
        release(tmp_path, points)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda votes: votes.select(torch.arange(8)), "one row for each public point"),
        (lambda votes: replace(votes, sensitivity=replace(votes.sensitivity, l2=2.0)), "sensitivity"),
    ],
    ids=["other points", "a larger sensitivity"],
)
def test_values_of_a_later_round_are_checked_before_they_are_opened(tmp_path, change, words):
    guide = Supervised(network="logistic", steps=1)
    with pytest.raises(ValueError, match=words):
        release(tmp_path, ((0, 1), (2, 3)), guide_student=guide, refit=lambda student: change(VOTES))
