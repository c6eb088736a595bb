"""The method of synthetic tables: its events, the choice of its tables, and what one unit can move."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from pate_torch.accounting.accountant import compute_guarantee
from pate_torch.accounting.events import GaussianEvent, ZCDPEvent
from pate_torch.methods import synthetic
from pate_torch.methods.base import FirstAnswers
from pate_torch.methods.synthetic import SyntheticTable
from pate_torch.privacy.domain import DomainColumn, TableDomain
from pate_torch.privacy.partition import AddRemove, DatasetFacts, ReplaceOne
from tests.tensor_data import Tensors

DELTA = 1e-5
PARTITIONS = {"add_remove": AddRemove(), "replace_one": ReplaceOne()}
FORMS = pytest.mark.parametrize(
    "adjacency,kind,rounds", list(itertools.product(PARTITIONS, ("torch", "discrete"), (0, 3)))
)


def make_domain(sizes, target="c0"):
    columns = [
        DomainColumn(name=f"c{j}", kind="category", values=tuple(map(str, range(size - 2))))
        for j, size in enumerate(sizes)
    ]
    return TableDomain(columns=tuple(columns), target=target)


def make_facts(adjacency="add_remove", num_records=40, **options):
    x = torch.zeros(num_records, 4)
    y = torch.zeros(num_records, dtype=torch.int64)
    data = Tensors(name="people", class_names=4, x=x, y=y, pool_x=x[:1], test_x=x[:1], test_y=y[:1], **options)
    return DatasetFacts.from_dataset(data.load(), PARTITIONS[adjacency])


def calibrated(domain=None, epsilon=1.0, adjacency="add_remove", **options):
    method = SyntheticTable(domain=domain or make_domain((4, 5, 6, 3)), **options)
    return method.calibrate(epsilon, DELTA, make_facts(adjacency))


# ---- costs -------------------------------------------------------------------------------------------------------


@FORMS
@pytest.mark.parametrize("epsilon", [0.1, 8.0])
def test_the_events_cost_the_whole_epsilon_and_no_more(adjacency, kind, rounds, epsilon):
    facts = make_facts(adjacency)
    method = calibrated(epsilon=epsilon, adjacency=adjacency, kind=kind, rounds=rounds)
    events = method.privacy_events(facts)
    cost = compute_guarantee(events, DELTA).epsilon
    assert epsilon * (1 - 1e-6) < cost <= epsilon
    assert len(events) == (3 if rounds else 2) and {type(e) for e in events} == {
        GaussianEvent if kind == "torch" else ZCDPEvent
    }
    squared = [e.count * (e.mu**2 if kind == "torch" else 2 * e.rho) for e in events]
    shares = [0.03, 0.67, 0.3] if rounds else [0.03, 0.97]
    assert [value / sum(squared) for value in squared] == pytest.approx(shares)


@FORMS
def test_the_noise_of_each_stage_covers_what_a_unit_can_move(adjacency, kind, rounds):
    method, changes = calibrated(adjacency=adjacency, kind=kind, rounds=rounds), {"add_remove": 1, "replace_one": 2}
    facts, length = make_facts(adjacency), math.sqrt(changes[adjacency])
    events = method.privacy_events(facts)
    mus = [e.mu if kind == "torch" else math.sqrt(2 * e.rho) for e in events]
    assert method.make_count_mechanism(adjacency).sigma >= length / mus[0] * (1 - 1e-12)
    for num_tables in (1, 5, 200):
        assert method.make_table_mechanism(num_tables, adjacency).sigma >= length * math.sqrt(num_tables) / mus[1] * (
            1 - 1e-12
        )
    if rounds:
        assert method.make_vote_mechanism(adjacency).sigma >= length / mus[2] * (1 - 1e-12)
        assert events[2].count == rounds
    else:
        assert method.make_vote_mechanism(adjacency) is None


@FORMS
def test_no_noisy_count_changes_the_events(adjacency, kind, rounds):
    facts = make_facts(adjacency)
    method, orders = calibrated(adjacency=adjacency, kind=kind, rounds=rounds), set()
    for total in (-1e6, 0, 30, 300, 3000, 30_000, 1e8):
        first_answers = FirstAnswers(torch.tensor([total, 0, 0, 0], dtype=torch.float64), 20.0)
        adapted = method.adapt(first_answers, replace(facts, num_units=None))
        assert adapted.privacy_events(facts) == method.privacy_events(facts)
        assert adapted == replace(method, order=adapted.order) and adapted.adapt(first_answers, facts) is adapted
        orders.add(adapted.order)
        incurred = adapted.make_table_mechanism(len(adapted.list_cliques(adapted.order)), adjacency).privacy_events()
        (reserved,) = method.privacy_events(facts)[1:2]
        assert all(
            a.mu <= reserved.mu if kind == "torch" else a.rho <= reserved.rho for a in incurred
        )  # any number of tables costs at most what was reserved for one
        tables = adapted.to_record(facts)["parameters"]["num_tables"]
        assert tables == len(adapted.list_cliques(adapted.order))
    assert orders == {1, 2, 3}


def test_an_epsilon_that_is_missing_is_refused():
    with pytest.raises(ValueError, match="epsilon=None"):
        calibrated(epsilon=None)


# ---- tables ------------------------------------------------------------------------------------------------------


def test_tables_have_the_target_and_up_to_three_other_columns():
    method = SyntheticTable(domain=make_domain((3, 3, 3, 3), target="c1"))
    assert method.list_cliques(1) == ((0, 1), (1, 2), (1, 3))
    assert method.list_cliques(2) == (*method.list_cliques(1), (0, 1, 2), (0, 1, 3), (1, 2, 3))
    assert method.list_cliques(3)[-1] == (0, 1, 2, 3) and len(method.list_cliques(3)) == 7
    without = SyntheticTable(domain=make_domain((3, 3, 3, 3), target=None))
    assert without.list_cliques(1) == tuple(itertools.combinations(range(4), 2)) and without.target_index == 0
    assert without.list_cliques(2) == without.list_cliques(1) + tuple(itertools.combinations(range(4), 3))


def test_the_number_of_cells_and_the_signal_are_those_of_the_largest_tables():
    method = calibrated(make_domain((3, 4, 5)))
    assert method.count_cells(method.list_cliques(2)) == 3 * 4 + 3 * 5 + 3 * 4 * 5
    sigma = method.make_table_mechanism(3, "add_remove").sigma
    assert method.compute_signal(2, 1200, "add_remove") == pytest.approx(1200 / (3 * 4 * 5) / sigma)
    assert method.compute_signal(1, 1200, "add_remove") == pytest.approx(
        1200 / (0.5 * (3 * 4 + 3 * 5)) / method.make_table_mechanism(2, "add_remove").sigma
    )


def test_the_order_grows_with_the_number_of_units_up_to_the_number_of_columns(monkeypatch):
    two = calibrated(make_domain((3, 3)))
    assert two.choose_order(1e9, "add_remove") == 1  # there is no third column
    method = calibrated(make_domain((4, 6, 6, 6, 6)))
    orders = [method.choose_order(n, "add_remove") for n in np.geomspace(1, 1e7, 40)]
    assert orders == sorted(orders) and set(orders) == {1, 2, 3}
    monkeypatch.setattr(synthetic, "MAX_CELLS", method.count_cells(method.list_cliques(2)))
    assert method.choose_order(1e7, "add_remove") == 2


def test_a_table_with_too_many_cells_is_refused_before_a_charge(monkeypatch):
    method = calibrated(make_domain((4, 60, 5)))
    method.validate(make_facts())
    monkeypatch.setattr(synthetic, "MAX_CELLS", 4 * 60)
    with pytest.raises(ValueError, match=r"schema='columns'.*260 cells, more than 240.*'c1' with 60 codes"):
        method.validate(make_facts())


def test_the_forecast_stops_tables_that_are_noise():
    method, facts = calibrated(make_domain((4, 6, 6))), make_facts()
    sigma = method.make_table_mechanism(2, "add_remove").sigma
    edge = 0.8 * sigma * 4 * 6
    for factor, has_skill in ((0.97, False), (1.03, True)):
        counts_C = torch.tensor([edge * factor, 0, 0, 0], dtype=torch.float64).round()
        forecast = method.forecast_model(FirstAnswers(counts_C, 1.0), facts)
        assert (forecast.skill > 0) == has_skill and "'c1' (6)" in str(forecast)
        assert forecast.num_units == round(edge * factor)


def test_the_declared_and_the_public_number_of_units_are_used_as_in_other_methods():
    method = calibrated(make_domain((4, 6, 6)))
    noisy = FirstAnswers(torch.tensor([1000.0, 0, 0, 0], dtype=torch.float64), 50.0)
    assert method.forecast_model(noisy, make_facts(nominal_size=1100)).num_units == 1100
    assert method.forecast_model(noisy, make_facts(nominal_size=5000)).num_units == 1000
    assert method.forecast_model(noisy, make_facts("replace_one", num_records=77)).num_units == 77


@pytest.mark.parametrize("wrong", [{"rounds": -1}, {"rounds": 1.5}, {"steps": 0}, {"num_components": 0}])
def test_settings_that_make_no_sense_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        SyntheticTable(domain=make_domain((3, 3)), **wrong)
