"""A plan fits into 80 columns, names its rule and its command, and is one JSON object for programs."""

import dataclasses
import json

import pytest

from pate_torch.mechanisms.confident import ConfidentGNMax
from pate_torch.mechanisms.gaussian import GNMax
from pate_torch.mechanisms.sparse_vector import SparseVector
from pate_torch.planning import choice as reports
from pate_torch.planning.pilot import Forecast
from tests.planning.plans import evaluate, report_on

WIDE = ConfidentGNMax(sigma=123.456789, screen_sigma=123.456, threshold=70.0)
STABLE = SparseVector(epsilon=1.0, delta=1e-5, max_failures=20)


@pytest.mark.parametrize(
    "rows",
    [
        [{}],
        [{"mechanism": GNMax(sigma=sigma)} for sigma in (0.01, 1e6)],
        [{"mechanism": GNMax(sigma=40.0), "num_queries": 4000}, {"mechanism": STABLE}],
        [{"mechanism": WIDE, "num_teachers": 59_999, "num_queries": n} for n in (999, 4000)],
    ],
    ids=["one", "extremes", "mechanisms", "wide"],
)
def test_the_report_keeps_within_80_columns(rows):
    report = report_on(*(evaluate(settings=("dataset=svhn", "a=" + "b" * 60), **row) for row in rows))
    assert all(len(line) <= 80 for line in reports.format_report(report).splitlines())
    assert len({len(line.rstrip()) for line in reports.format_table(report)}) == 1
    assert len(reports.format_table(report)) == 1 + len(rows)


def test_the_star_states_its_rule_and_the_command_is_that_of_the_row():
    report = report_on(*(evaluate(num_teachers=k, settings=(f"num_teachers={k}",)) for k in (125, 250)))
    text = reports.format_report(report)
    assert "at most a quarter" in text and text.endswith("python train.py num_teachers=250")
    header, *rows = reports.format_table(report)
    assert dict(zip(header.split(), rows[1].lstrip("*").split(), strict=True))["lead"] == "64.8"
    forecast = Forecast(answer_rate=1.0, accuracy=0.9)
    choices = tuple(dataclasses.replace(choice, forecast=forecast, verdict="ok") for choice in report.choices)
    tried = dataclasses.replace(report, choices=choices)
    assert "95 % of the largest number of effective" in reports.format_report(tried)
    assert "90.0%" in reports.format_table(tried)[1]


def test_a_plan_of_which_nothing_works_names_no_command():
    report = report_on(evaluate(mechanism=STABLE), evaluate(mechanism=GNMax(sigma=1.0), budget_epsilon=0.05))
    text = " ".join(reports.format_report(report).split())
    assert report.best_choice is None and "None of these choices works." in text and "python train.py" not in text
    assert "must be at least" in text and "the budget does not allow so many queries" in text


def test_json_is_one_object_with_the_same_figures():
    report = report_on(evaluate(mechanism=GNMax(sigma=0.001)), evaluate())
    found = json.loads(report.to_json(), parse_constant=lambda word: pytest.fail(word))
    assert found["budget_epsilon"] == 10 and found["best"] == 1
    for row, choice in zip(found["choices"], report.choices, strict=True):
        keys = ("epsilon", "max_queries", "verdict", "lead", "problem")
        assert [row[key] for key in keys] == [getattr(choice, key) for key in keys]
    assert json.loads(report_on(evaluate(mechanism=STABLE)).to_json())["best"] is None
