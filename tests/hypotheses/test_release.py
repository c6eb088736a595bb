"""``HypothesisMethod`` and its students: the reservation of several parts, and rules that predict as hypotheses do."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from pate_torch.accounting.events import BoundedRangeEvent
from pate_torch.core.progress import Stages
from pate_torch.hypotheses.algorithms import LearnOptions, make_problems
from pate_torch.hypotheses.classes import HalfPlanes, Intervals, Stumps, Thresholds
from pate_torch.hypotheses.release import HypothesisMethod, _SharedReservation, make_logistic_student, make_rule_student
from pate_torch.privacy.budget import Budget
from pate_torch.privacy.ledger import Ledger
from tests.hypotheses.point_worlds import data_of, facts_of


def method_of(**options):
    return HypothesisMethod(algorithm_name="sspp", options=LearnOptions(**options), below_guarantee=True)


def test_the_price_follows_from_the_number_of_records_alone():
    """Other records, as many: the same price; a class fewer: other shares."""
    generator, quoted = np.random.default_rng(0), []
    for classes in (3, 3, 2):
        data = data_of(generator.random((30, 2)), generator.integers(0, classes, 30), classes)
        method = method_of(epsilon=0.6).complete(facts_of(data), Stages(quiet=True))
        method.validate(facts_of(data))
        quoted.append(method.privacy_events(facts_of(data)))
    assert quoted[0] == quoted[1] == (BoundedRangeEvent(eta=0.6 / 3),) * 3 and quoted[2] == (
        BoundedRangeEvent(eta=0.6),
    )


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


def test_a_released_linear_model_is_the_one_that_was_drawn():
    generator = np.random.default_rng(0)
    x, theta = generator.random((50, 3)), generator.normal(size=4)
    data = data_of(x, np.arange(50) % 2)
    (part,) = make_problems(data.private, facts_of(data), LearnOptions(), 0)
    order = [int(np.flatnonzero((part.sample.x == row).all(1))[0]) for row in data.private.x.double().numpy()]
    logit = make_logistic_student(facts_of(data), [theta]).compute_logits(data.private.x)
    expected = torch.tensor(part.scaled_sample.x[order] @ theta).float()
    assert torch.allclose(logit[:, 1] - logit[:, 0], expected, atol=1e-5)
    many = make_logistic_student(facts_of(data_of(x, np.arange(50) % 3, 3)), [theta, -theta, 0 * theta])
    assert many.compute_logits(data.private.x).shape == (50, 3)
