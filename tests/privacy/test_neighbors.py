"""Every combination of options that is accepted has the sensitivity it is charged for, and releases nothing else.

``neighbor_worlds``: toy data and their neighbors; ``neighbor_choices``: every value there is; ``neighbor_cases``: a
plan of each, and the ways to run it; ``neighbor_harness``: what is measured. Here: combinations that reach every value,
all of those that touch records (slow), every triple of values of the others (slow), and planted faults.
"""

import dataclasses
import os

import numpy as np
import pytest
import torch

from pate_torch import session
from pate_torch.accounting import GaussianNoisyMaxCost
from pate_torch.accounting.events import GaussianEvent
from pate_torch.data import tabular
from pate_torch.mechanisms import gradient_descent
from pate_torch.methods.record_method import RecordMethod
from pate_torch.privacy.partition import DatasetFacts
from pate_torch.privacy.sensitive import Sensitivity
from pate_torch.privacy.unit_ids import UnitIds
from tests.privacy import neighbor_cases as cases
from tests.privacy import neighbor_choices as choices
from tests.privacy import neighbor_worlds as worlds

pytestmark = pytest.mark.filterwarnings("ignore")  # of teachers on extreme values; errors stay errors

SEED = int(os.environ.get("NEIGHBORS_SEED", "0"))


def test_combinations_that_reach_every_value_hold(record_property):
    draw, tally, space = np.random.default_rng(SEED), cases.Tally(), cases.space()
    for fixed in [(name, value) for name, known in space.items() for value in known]:
        for _ in range(1000):  # few combinations are accepted with some values
            if fixed in tally.reached:
                break
            cases.attempt(cases.at_random(draw, dict([fixed]), plain=0.7), tally, most=1, seed=SEED)
    cases.judged(tally, record_property, f"; seed {SEED}")
    assert not cases.unreached(tally, space), "values that no accepted combination reached"


@pytest.mark.slow(reason="the neighbor harness at full length")
@pytest.mark.parametrize("form", worlds.FORMS)
def test_all_that_touches_records_holds(form, record_property):
    tally = cases.Tally()
    for case in cases.of_records(form):
        cases.attempt(case, tally, seed=SEED)
    cases.judged(tally, record_property)


@pytest.mark.slow(reason="the neighbor harness at full length")
@pytest.mark.parametrize("half", [0, 1])
def test_every_triple_of_the_other_choices_holds(half, record_property):
    """With every other mechanism. What touches records is drawn at random for each row."""
    draw, tally, space = np.random.default_rng(SEED), cases.Tally(), cases.space()
    names = space.keys() - {*cases.RECORDS, "guide_student", "executor"}
    others = {name: known for name, known in space.items() if name in names}
    others["mechanism"] = others["mechanism"][half::2]
    array = choices.Covering(others, SEED)
    for row in array.rows():
        array.said(row, attempted(row, draw, tally))
    covered = f"; {array.total} triples, {array.covered} covered, {array.refused} refused wherever tried"
    cases.judged(tally, record_property, covered)
    assert not cases.unreached(tally, others), "values that no accepted combination reached"


def attempted(row, draw, tally) -> bool:
    """Whether one of a few cases of which a plan can be made, with these values, is accepted."""
    tried = 0
    for _ in range(60):
        case = cases.at_random(draw, row | {"executor": cases.PLAIN["executor"]}, plain=0.5)  # others start slowly
        if not cases.plausible(case):
            continue
        if cases.attempt(case, tally, most=1, seed=SEED):
            return True
        tried += 1
        if tried == 3:
            break
    return False


RECORDS = cases.PLAIN | {"form": "tensors", "unit": "record", "noise": "torch",
                         "features": "none"}  # fmt: skip
REVERSE_KNN = RECORDS | {"method": "reverse_knn", "mechanism": "histogram"}
GRADIENTS = RECORDS | {"method": "gradients", "mechanism": "gradient_descent"}
TEACHERS = RECORDS | {"method": "teachers", "mechanism": "gaussian"}


def faults(case, times: int = 1) -> str:
    """Everything found in a case, with so many draws of neighbors at most; it must be accepted."""
    tally = cases.Tally()
    for seed in range(times):
        assert cases.attempt(case, tally, seed=seed), tally.reasons
        if tally.faults:
            break
    return "\n".join(fault for found in tally.faults.values() for fault in found)


@pytest.mark.slow(reason="up to twelve runs on neighbors")
def test_a_capacity_where_records_answer_is_found(monkeypatch):
    case = REVERSE_KNN | {"partition": "add_remove capacity=3"}
    assert not cases.attempt(case, tally := cases.Tally()) and "capacity" in str(tally.reasons)
    monkeypatch.setattr(RecordMethod, "validate", lambda self, facts: None)
    monkeypatch.setattr("pate_torch.methods.reverse_knn.make_record_sum_sensitivity", lambda shards, said: said)
    assert "L2 1.414 where it says 1" in faults(case, times=12)


@pytest.mark.slow(reason="up to five runs on neighbors")
def test_a_distance_of_one_said_for_two_is_found(monkeypatch):
    def short(adjacency: str, size: int) -> Sensitivity:
        return Sensitivity(l1=size**0.5, l2=1.0, linf=1.0, adjacency=adjacency)

    case = GRADIENTS | {"partition": "replace_one"}
    assert not faults(case)
    monkeypatch.setattr("pate_torch.privacy.sensitive.make_vector_sum_sensitivity", short)
    assert "L2" in faults(case, times=4)


@pytest.mark.slow(reason="all neighbors of a run, twice")
@pytest.mark.parametrize("partition", ["add_remove", "replace_one"])
def test_gradients_with_discrete_noise_are_reached_and_priced(monkeypatch, partition):
    case = GRADIENTS | {"partition": partition, "noise": "discrete"}
    assert not faults(case)
    cheap = lambda self, count, factor=1.0: (GaussianEvent(mu=0.9 / (factor * self.sigma), count=count),)  # noqa: E731
    monkeypatch.setattr(gradient_descent.GradientDescent, "_make_events", cheap)
    assert "is charged where" in faults(case)


def test_a_record_whose_id_occurs_moves_the_gradients_by_one_norm():
    assert not faults(GRADIENTS | {"partition": "add_remove", "form": "csv with a public file"}, times=2)


@pytest.mark.slow(reason="up to thirteen runs on neighbors")
@pytest.mark.parametrize(
    ("case", "partition"),
    [(REVERSE_KNN, "add_remove"), (REVERSE_KNN, "replace_one"), (GRADIENTS, "add_remove")],
    ids=["cells of added records", "cells of replaced records", "gradients of added records"],
)
def test_an_id_that_merges_records_is_found(monkeypatch, case, partition):
    case = case | {"partition": partition, "form": "csv with a public file"}
    assert not faults(case)
    by_column = lambda table, _: np.array(table["id"].to_pylist()).view(UnitIds)  # noqa: E731
    monkeypatch.setattr(tabular, "_make_row_ids", by_column)
    for module in ("pate_torch.privacy.partition", "pate_torch.methods.reverse_knn"):
        merge = lambda private, adjacency: np.unique(private.unit_id, return_inverse=True)[1]  # noqa: E731
        monkeypatch.setattr(f"{module}.number_units", merge)
    assert "where it says" in faults(case, times=12)


@pytest.mark.slow(reason="up to four runs on neighbors")
def test_roles_that_follow_content_are_found(monkeypatch):
    case = TEACHERS | {"partition": "replace_one", "form": "csv by hash"}
    assert not cases.attempt(case, cases.Tally())
    monkeypatch.setattr(DatasetFacts, "check_adjacency", lambda self: None)
    assert "differs" in faults(case, times=4)


@pytest.mark.slow(reason="up to six runs on neighbors")
@pytest.mark.parametrize("case", [TEACHERS, GRADIENTS], ids=["teachers", "gradients"])
def test_points_that_see_each_other_in_an_encoder_are_found(monkeypatch, case):
    case = case | {"partition": "add_remove", "encoder": "encoder batch_size=4"}
    monkeypatch.setattr(choices.Shape, "forward", lambda self, x: x.flatten(1) * (-1) ** x.flatten(1).argsort(0))
    monkeypatch.setattr("pate_torch.features.encoder.Encoder.check_batch_independence", lambda *_: None)
    assert "where it says" in faults(case, times=6)


@pytest.mark.parametrize("case", [TEACHERS, GRADIENTS], ids=["teachers", "gradients"])
def test_a_private_statistic_in_the_release_is_found(monkeypatch, case):
    made = session.build_report

    def telling(**given):
        report = made(**given)
        told = dataclasses.replace(report.evaluation, label_accuracy=len(given["data"].private) / 1000)
        return dataclasses.replace(report, evaluation=told)

    monkeypatch.setattr(session, "build_report", telling)
    assert "summary.json differs" in faults(case | {"partition": "add_remove"})


def test_a_cost_for_less_than_is_said_is_found(monkeypatch):
    monkeypatch.setattr(
        GaussianNoisyMaxCost, "privacy_events", lambda self, count: (GaussianEvent(mu=1 / self.sigma, count=count),)
    )
    assert "is due" in faults(TEACHERS | {"partition": "add_remove"})


def test_an_array_covers_every_triple_that_is_accepted():
    space = {name: [f"{name}{i}" for i in range(3)] for name in "abcde"}
    array = choices.Covering(space, seed=1)
    rows = []
    for row in array.rows():
        accepted = (row["a"], row["b"]) != ("a0", "b0")
        array.said(row, accepted)
        rows += [row] if accepted else []
    assert array.covered == array.total - 9 and array.refused == 9  # nine triples hold the refused pair
    assert array.total == 10 * 27 and len(rows) < 80


@pytest.mark.parametrize("form", worlds.FORMS)
def test_neighbors_differ_by_one_unit_of_the_private_side(form, tmp_path):
    for unit in (unit for unit in worlds.UNITS if worlds.fits(form, unit) and unit != "label"):
        try:
            here = worlds.source(form, unit, cases.ROWS, tmp_path / f"{unit}-here").load()
        except ValueError:
            continue  # positions have no units of several records
        for adjacency in here.adjacencies:
            if adjacency == "replace_one" and unit == "group":
                continue
            found = worlds.neighbors(form, unit, adjacency, cases.ROWS, tmp_path / f"{unit}-{adjacency}")
            assert len(found) >= 4
            for number, one in enumerate(found):
                there = worlds.source(form, unit, one.rows, tmp_path / f"{unit}-{adjacency}-{number}").load()
                assert torch.equal(here.pool.x, there.pool.x), (form, unit, one.how)
                ids = [set(data.private.unit_id.tolist()) for data in (here, there)]
                if adjacency == "replace_one":
                    assert len(here.private) == len(there.private)
                    assert (here.private.x != there.private.x).flatten(1).any(1).sum() <= 1
                else:
                    assert len(ids[0] ^ ids[1]) == 1, (form, unit, one.how)
