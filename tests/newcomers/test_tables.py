"""The obvious call on fifteen messy real tables: the model beats the class frequencies, or ``fit`` refuses."""

import pytest

from benchmarks import newcomers_heldback
from tests.newcomers.tables import TABLES, Outcome, Table, measure

MAX_REFUSED = 3


@pytest.mark.parametrize(
    ("tables", "noises", "loss_slack", "accuracy_slack"),
    [
        # On the noisiest table, the mean of three noises has a standard deviation of 2.4 % of the loss.
        pytest.param(TABLES[::3], 3, 0.05, 0.015, id="3 noises"),
        pytest.param(TABLES, 20, 0, 0.005, id="20 noises", marks=pytest.mark.slow(reason="fits 300 models")),
    ],
)
def test_obvious_call_beats_class_frequencies(tables, noises, loss_slack, accuracy_slack, tmp_path):
    outcomes = [measure(table, noises, home=tmp_path) for table in tables]

    problems = [problem for outcome in outcomes for problem in _find_problems(outcome, loss_slack, accuracy_slack)]
    assert not problems, "\n".join(problems)
    refused = [outcome.table for outcome in outcomes if outcome.num_refused > noises / 2]
    assert len(refused) <= MAX_REFUSED, f"more than {MAX_REFUSED} of {len(tables)} tables are refused: {refused}"


@pytest.mark.slow(reason="fits 220 models, for two minutes")
def test_tables_kept_back_are_no_worse(tmp_path):
    problems = [
        problem
        for table in newcomers_heldback.TABLES
        for problem in _find_problems(measure(table, 20, home=tmp_path), 0, 0.005)
    ]
    assert not problems, "\n".join(problems)


def test_fixed_split_leaks_no_label():
    parts = Table("statsmodels/anes96", "vote", ("popul",)).split()
    again = Table("statsmodels/anes96", "vote", ("popul",)).split()

    assert parts.x.equals(again.x) and parts.public.equals(again.public)
    assert [len(parts.public), len(parts.test), len(parts.x)] == [141, 189, 614]
    assert not {"vote", "popul"} & {*parts.x.columns, *parts.public.columns, *parts.test.columns}
    assert parts.classes == [0.0, 1.0]


def test_test_points_without_a_label_are_left_out_and_private_ones_stay():
    parts = Table("openintro/acs12", "employment").split()

    assert not any(label != label for label in parts.truth)
    assert 0 < parts.y.isna().sum() < len(parts.y)


def _find_problems(outcome: Outcome, loss_slack: float, accuracy_slack: float) -> list[str]:
    """What is wrong with the outcome of a table; the slacks are for few noises."""
    row, found = outcome.row(), []
    if outcome.is_large and outcome.num_refused:
        found.append(f"a table with {outcome.num_records} records and {outcome.num_minority} of each class is refused")
    if len(outcome.log_loss):
        if outcome.log_loss.mean() >= (1 + loss_slack) * outcome.frequencies_log_loss:
            found.append("the log loss is not below that of the class frequencies")
        if outcome.accuracy.mean() < outcome.majority_accuracy - accuracy_slack:
            found.append("the accuracy is below that of the majority class")
    return [f"{outcome.table}: {problem}: {row}" for problem in found]
