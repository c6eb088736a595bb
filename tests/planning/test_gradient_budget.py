"""Per-record gradients are suggested at the cost of the votes, and as the estimator would have chosen them."""

import json
from dataclasses import replace

import pytest

from pate_torch.accounting.accountant import compute_guarantee
from pate_torch.mechanisms.gaussian import GNMax
from pate_torch.mechanisms.gradient_descent import GradientDescent
from pate_torch.methods import feasibility
from pate_torch.methods.gradients import plan_descent
from pate_torch.planning import autoconfig, gradient_budget
from pate_torch.planning.gradient_budget import calibrate_gradients
from tests import ROOT
from tests.command_runs import train
from tests.planning.plans import make_plan

COST = {"epsilon": 0.5, "delta": 1e-5, "adjacency": "add_remove"}


@pytest.mark.parametrize(("records", "public"), [(300, 500), (12_000, 500), (12_000, 80)])
def test_a_suggestion_is_what_the_estimator_would_have_chosen(records, public):
    descent = calibrate_gradients(**COST, num_records=records, num_public=public)
    counts = {"num_records": records, "num_public": public, "num_classes": 4, "has_groups": False}
    facts = autoconfig.PublicFacts(**COST, **counts, is_image=False, is_encoded=True)
    config = autoconfig.choose_method(facts)
    mechanism, effective_dim = plan_descent(replace(config.mechanism, sigma=descent.mechanism.sigma), records, public)
    assert (mechanism, effective_dim) == (descent.mechanism, descent.effective_dim)  # but for the cost of the counts
    assert 1 < config.mechanism.sigma / descent.mechanism.sigma < 1.03
    advice = gradient_budget.suggest_gradients(descent, "HOW")
    is_refused = advice == feasibility.NOISE_ADVICE
    assert ("HOW" in advice) != is_refused
    assert descent.is_noise_dominated == is_refused
    assert compute_guarantee(descent.mechanism.privacy_events(1), 1e-5).epsilon == pytest.approx(0.5, rel=1e-6)
    unknown = calibrate_gradients(**COST, num_records=None)
    assert "number is public)" in gradient_budget.suggest_gradients(unknown, "HOW")
    settings = gradient_budget.format_gradient_settings(make_plan(), descent, False, True)
    trains_itself = descent.needs_self_training(True)
    student = "student=self_training student.alpha=.5" if trains_itself else "student=released_model"
    assert student in settings and f"num_queries={public}" in settings and "mechanism.sigma" in settings
    target = make_plan(target_epsilon=1.0)
    settings = gradient_budget.format_gradient_settings(target, descent, False, False)
    assert "student=released_model" in settings and "mechanism.sigma" not in settings


def test_few_public_points_allow_few_directions_and_shorter_steps():
    cost = {**COST, "num_records": 12_000}
    many, few = calibrate_gradients(**cost, num_public=5000), calibrate_gradients(**cost, num_public=80)
    assert few.effective_dim == 8 < many.effective_dim == calibrate_gradients(**cost).effective_dim
    assert few.mechanism.step_size == pytest.approx(2 * 9**0.5) and few.mechanism.sigma == many.mechanism.sigma


@pytest.mark.slow(reason="trains teachers, then by gradients as it was told to")
def test_a_run_whose_votes_are_outweighed_names_settings_of_the_same_cost_that_run(tmp_path, monkeypatch):
    few = [f"hydra.searchpath=[file://{ROOT}/benchmarks/conf]", "dataset=glyphs", "dataset.private=3000",
           "dataset.public=60", "dataset.test=60", "dataset.num_classes=4",
           "num_teachers=12", "num_queries=6", "teacher.steps=5", "student=logistic", "baseline=false"]  # fmt: skip
    outcome = train(tmp_path, *few, "mechanism.sigma=8", monkeypatch=monkeypatch, base=[])
    assert outcome.code == 0, outcome.err
    assert "Noise outweighs these votes" in outcome.err and "Forecast" in outcome.out
    (summary,) = tmp_path.rglob("private/summary.json")
    forecast = json.loads(summary.read_text())["forecast"]
    assert "of 12 votes" in forecast and "3,000 records" in forecast
    settings = forecast.rsplit(": ", 1)[1].split()
    values = {key: value for key, _, value in (word.partition("=") for word in settings)}
    steps, sigma = int(values["mechanism.steps"]), float(values["mechanism.sigma"])
    descent = GradientDescent(sigma=sigma, steps=steps, adjacency="add_remove")
    labels = compute_guarantee(GNMax(sigma=8.0).privacy_events(6), 1e-5).epsilon
    assert compute_guarantee(descent.privacy_events(60), 1e-5).epsilon == pytest.approx(labels, rel=1e-3)
    short = ["features.steps=2", "student.first_student.steps=2", "student.later_students.steps=2"]
    again = [*[key for key in few if not key.startswith(("num_", "student"))], *settings, *short]
    outcome = train(tmp_path, *again, monkeypatch=monkeypatch, base=[])
    assert outcome.code == 0, outcome.err
    assert "outweighs" not in outcome.err
