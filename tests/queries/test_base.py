"""Every configured strategy asks distinct open points within the allowance, by what is public; and plain orders."""

import dataclasses

import pytest
import torch
from hydra.utils import instantiate

from pate_torch.queries.base import Margin, QueryState, QueryStrategy, Random
from pate_torch.queries.clusters import Prototypes
from pate_torch.queries.disagreement import Disagreement
from tests.configurations import list_options, load_option
from tests.queries.states import NONE, blobs, state

STRATEGIES = {name: instantiate(load_option("query", name), _convert_="all") for name in list_options("query")}


@pytest.mark.parametrize("features", [True, False])
@pytest.mark.parametrize("name", STRATEGIES)
def test_asks_distinct_open_points_within_the_allowance_and_repeats_itself(name, features):
    strategy = STRATEGIES[name]
    assert isinstance(strategy, QueryStrategy) and strategy.name == name
    x, y = blobs()
    feature_PD = torch.nn.functional.normalize(x @ torch.randn(5, 4), dim=1) if features else None
    asked, student_PC = NONE, None
    for turn in range(strategy.rounds):
        answers = {"query_Q": asked, "label_Q": torch.where(torch.arange(len(asked)) % 3 == 2, -1, y[asked])}
        left = (20 - len(asked), strategy.rounds - turn)
        now = state(x, *left, **answers, student_PC=student_PC, feature_PD=feature_PD)  # every third is not answered
        query_Q = strategy.select(now)
        assert torch.equal(query_Q, strategy.select(now)), "the same state must give the same queries"
        assert query_Q.dtype == torch.int64 and len(query_Q) <= now.num_remaining
        asked = torch.cat([asked, query_Q])
        assert len(asked.unique()) == len(asked) and set(asked.tolist()) <= set(range(len(x)))
        if len(query_Q) == 0 or len(asked) == 20:
            break
        student_PC = torch.softmax(torch.randn(len(x), 3, generator=torch.Generator().manual_seed(turn)), 1)
    assert len(asked) == 20 if name != "disagreement" else len(asked) > 0


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_whole_pool_a_pool_of_one_and_coinciding_points_may_be_asked(name):
    strategy, asked = STRATEGIES[name], NONE
    x, y = blobs(12)
    for turn in range(strategy.rounds):
        now = state(x, 12 - len(asked), strategy.rounds - turn, query_Q=asked, label_Q=y[asked])
        asked = torch.cat([asked, strategy.select(now)])
    assert len(asked.unique()) == len(asked) and (len(asked) == 12 or name == "disagreement")
    assert strategy.select(state(x[:1], 1)).tolist() == [0]
    query_Q = strategy.select(state(torch.ones(30, 5), 7))
    assert len(query_Q.unique()) == len(query_Q) and len(query_Q) in (1, 7)


def test_a_strategy_sees_no_private_label():
    answered, predicted = {"query_Q", "label_Q", "num_remaining", "num_rounds_left"}, {"student_PC", "feature_PD"}
    public = {"spec", "pool_x", "seed", "search"}
    assert {field.name for field in dataclasses.fields(QueryState)} == public | answered | predicted


@pytest.mark.parametrize(
    "make,key",
    [
        (lambda: Random(rounds=0), "query.rounds"),
        (lambda: Random(shuffle=1), "query.shuffle"),
        (lambda: Prototypes(rounds=0), "query.rounds"),
        (lambda: Disagreement(slack=-1), "query.slack"),
        (lambda: Disagreement(criterion="errors"), "Did you mean 'error'"),
    ],
)
def test_bad_settings_are_named(make, key):
    with pytest.raises(ValueError, match=key):
        make()


def test_without_a_shuffle_points_are_asked_in_order():
    after = state(blobs()[0], 3, query_Q=torch.tensor([1]), label_Q=torch.tensor([0]))
    assert Random(shuffle=False).select(after).tolist() == [0, 2, 3]


def test_the_random_order_is_uniform_and_the_seeds_own():
    x, _ = blobs()
    counts = torch.zeros(90)
    for seed in range(300):
        counts[Random().select(state(x, 30, seed=seed))] += 1
    # Each point is drawn 100 times of 300 on average, with deviation 8.2: 5 of them.
    assert (counts - 100).abs().max() < 41


def test_margin_asks_in_the_order_of_leads():
    p = torch.tensor([[0.5, 0.5, 0.0], [0.4, 0.3, 0.3], [0.9, 0.05, 0.05], [1.0, 0.0, 0.0]])
    assert Margin().select(state(blobs(4)[0], 4, student_PC=p)).tolist() == [0, 1, 2, 3]
