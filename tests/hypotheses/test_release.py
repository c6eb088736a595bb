"""``HypothesisMethod`` and its students: the reservation of several parts, and rules that predict as hypotheses do."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from pate_torch.accounting.events import BoundedRangeEvent
from pate_torch.core.progress import Stages
from pate_torch.hypotheses.algorithms import LearnOptions, make_problems
from pate_torch.hypotheses.classes import HalfPlane, HalfPlanes, Intervals, Stump, Stumps, Thresholds
from pate_torch.hypotheses.release import (
    HypothesisMethod,
    _SharedReservation,
    describe_rules,
    make_logistic_student,
    make_rule_student,
)
from pate_torch.privacy.budget import Budget
from pate_torch.privacy.ledger import Ledger
from pate_torch.privacy.records import LABEL_UNIT
from pate_torch.privacy.schema import Column, TableSchema
from tests.hypotheses.point_worlds import data_of, facts_of


def method_of(**options):
    return HypothesisMethod(algorithm_name="sspp", options=LearnOptions(**options), delta=1e-5, below_guarantee=True)


def test_the_cost_follows_from_the_number_of_records_alone():
    """Other records, as many: the same cost; a class fewer: other shares."""
    generator, quoted = np.random.default_rng(0), []
    for classes in (3, 3, 2):
        data = data_of(generator.random((30, 2)), generator.integers(0, classes, 30), classes)
        method = method_of(epsilon=0.6).complete(facts_of(data), Stages(quiet=True))
        method.validate(facts_of(data))
        quoted.append(method.privacy_events(facts_of(data)))
    assert quoted[0] == quoted[1] == (BoundedRangeEvent(eta=0.6 / 3),) * 3
    assert quoted[2] == (BoundedRangeEvent(eta=0.6),)


def test_what_is_not_promised_is_refused_or_said(capsys):
    data = data_of(np.random.default_rng(0).random((30, 2)), np.arange(30) % 3, 3)
    with pytest.raises(ValueError, match=r"SSPP: n = 30.*--below-guarantee"):
        replace(method_of(), below_guarantee=False).complete(facts_of(data), Stages(quiet=True))
    with Stages(quiet=False) as stages:
        method_of().complete(facts_of(data), stages)
    assert capsys.readouterr().err.count("SSPP: n = 30") == 1  # once for three equal parts


def test_a_part_cannot_spend_what_was_not_reserved(tmp_path):
    one, other = BoundedRangeEvent(eta=0.1), BoundedRangeEvent(eta=0.2)
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        ledger.open_account("people", budget_epsilon=1.0, delta=1e-5, adjacency="replace_one", unit="record",
                            planned_events=(one, one), noise="torch")  # fmt: skip
        with Budget.from_account(ledger, "people").spend((one, one), mechanism="sspp") as spending:
            shared = _SharedReservation("torch", spending)
            for _ in range(2):
                with shared.spend((one,), mechanism="part"):
                    pass
            assert spending.incurred_events == (one, one)
            for event in (one, other):
                with pytest.raises(ValueError), shared.spend((event,), mechanism="part"):
                    pass


@pytest.mark.parametrize(
    "hypotheses,width", [(Thresholds(), 1), (Intervals(), 1), (Stumps(3), 3), (HalfPlanes(), 2)], ids=str
)
def test_a_released_rule_predicts_as_the_hypothesis_does(hypotheses, width):
    """Every dichotomy of points on a coarse grid, where ties and edges are common, and of random ones."""
    generator = np.random.default_rng(0)
    x = np.concatenate([generator.integers(0, 3, (6, width)) / 4, generator.random((4, width))]).astype(np.float32)
    x = x.astype(np.float64)
    facts = facts_of(data_of(x, np.arange(len(x)) % 2))
    for hypothesis in hypotheses.enumerate_representatives(x):
        probabilities = make_rule_student(facts, [hypothesis]).compute_probabilities(torch.as_tensor(x).float())
        assert (probabilities.argmax(1).numpy() == hypotheses.predict(hypothesis, x)).all(), hypothesis
        assert (probabilities.max(1).values == 1).all()


SCHEMA = TableSchema((Column("odor", ("a", "n", "")), Column("age", None)))
INF = np.inf


@pytest.mark.parametrize(
    "hypothesis,words",
    [
        (Stump(1, 0.5, True), "odor = n -> edible, otherwise poisonous"),
        (Stump(1, 0.5, False), "odor is not n -> edible, otherwise poisonous"),
        (Stump(2, 1.0, True), "odor = (missing) -> edible, otherwise poisonous"),
        (Stump(0, 0.0, True), "always edible"),
        (Stump(0, 1.5, True), "always poisonous"),
        (Stump(0, INF, False), "always edible"),
        (Stump(3, 37.5, True), "age >= 37.5 -> edible, otherwise poisonous"),
        (Stump(3, 37.5, False), "age < 37.5 -> edible, otherwise poisonous"),
        (Stump(3, -INF, False), "always poisonous"),
    ],
    ids=str,
)
def test_a_rule_is_told_in_the_names_of_the_data(hypothesis, words):
    data = data_of(np.zeros((4, 4)), np.arange(4) % 2)
    data = replace(data, spec=replace(data.spec, schema=SCHEMA, class_names=("poisonous", "edible")))
    student = make_rule_student(facts_of(data), [hypothesis])
    assert describe_rules(student) == words
    # The words agree with what the student predicts for every kind of record.
    condition = words.partition(" -> ")[0].replace(" = n", " == 'n'").replace(" is not n", " != 'n'")
    condition = condition.replace(" = (missing)", " == ''")
    for odor, age in (("a", 37.4), ("n", 37.5), ("", 50.0), ("z", 0.0)):
        predicted = student.predict(SCHEMA.encode({"odor": [odor], "age": [age]}, unknown="zeros"))
        is_edible = words == "always edible" if "always" in words else eval(condition, {}, {"odor": odor, "age": age})
        assert int(predicted[0]) == is_edible, (odor, age)


def test_rules_without_names_of_columns_and_of_several_classes():
    line = data_of(np.zeros((6, 1)), np.arange(6) % 2)
    told = [describe_rules(make_rule_student(facts_of(line), [h])) for h in (0.25, -INF, (0.25, 0.5), (-INF, 2.0))]
    assert told == ["x[0] >= 0.25 -> 1, otherwise 0", "always 1", "0.25 <= x[0] < 0.5 -> 1, otherwise 0",
                    "x[0] < 2 -> 1, otherwise 0"]  # fmt: skip
    plane = facts_of(data_of(np.zeros((6, 2)), np.arange(6) % 2))
    words = describe_rules(make_rule_student(plane, [HalfPlane((0.0, 1.0), (4.0, 4.0))]))
    assert words == "-0.6 * x[0] +0.8 * x[1] >= 0.8 -> 1, otherwise 0"  # left of the line from (0, 1) to (4, 4)
    assert describe_rules(make_rule_student(plane, [False])) == "always 0"
    many = facts_of(data_of(np.zeros((6, 1)), np.arange(6) % 3, 3))
    words = describe_rules(make_rule_student(many, [-INF, 0.5, INF]))
    assert words.startswith("always -> 0; x[0] >= 0.5 -> 1; never -> 2; if several apply, the one")


def test_no_certificate_where_the_public_points_are_the_records():
    data = data_of(np.random.default_rng(0).random((300, 2)), np.arange(300) % 2)
    for unit, expected in (("record", {"certificate", "excess_risk"}), (LABEL_UNIT, set())):
        facts = replace(facts_of(data), unit=unit)
        found = method_of().complete(facts, Stages(quiet=True)).certificate
        assert expected <= set(found) and bool(found) == bool(expected)


def test_a_released_linear_model_is_the_one_that_was_drawn():
    generator = np.random.default_rng(0)
    x, theta = generator.random((50, 3)), generator.normal(size=4)
    data = data_of(x, np.arange(50) % 2)
    (part,) = make_problems(data.private, facts_of(data), LearnOptions(), 0, 1e-5)
    order = [int(np.flatnonzero((part.sample.x == row).all(1))[0]) for row in data.private.x.double().numpy()]
    logit = make_logistic_student(facts_of(data), [theta]).compute_logits(data.private.x)
    expected = torch.tensor(part.scaled_sample.x[order] @ theta).float()
    assert torch.allclose(logit[:, 1] - logit[:, 0], expected, atol=1e-5)
    many = make_logistic_student(facts_of(data_of(x, np.arange(50) % 3, 3)), [theta, -theta, 0 * theta])
    assert many.compute_logits(data.private.x).shape == (50, 3)
