"""Labels no better than guesses: foretold by the law of the mechanism, and refused before anything is charged."""

import json
import math

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression

from pate_torch import PATE
from pate_torch.accounting.accountant import compute_guarantee
from pate_torch.cli import hydra_config, plan
from pate_torch.cli import label as label
from pate_torch.mechanisms.confident import ConfidentGNMax
from pate_torch.mechanisms.exponential import ExponentialMechanism
from pate_torch.mechanisms.gaussian import GNMax
from pate_torch.mechanisms.gradient_descent import GradientDescent
from pate_torch.mechanisms.interactive import InteractiveGNMax
from pate_torch.mechanisms.laplace import LNMax
from pate_torch.mechanisms.sparse_vector import SparseVector
from pate_torch.methods import feasibility
from pate_torch.methods.gradient_budget import CalibratedDescent, calibrate_gradients
from pate_torch.planning import alternatives, autoconfig
from pate_torch.privacy.ledger import Ledger
from pate_torch.privacy.noise import DryRunNoise
from pate_torch.privacy.records import MechanismContext
from pate_torch.privacy.sensitive import Votes
from tests import ROOT
from tests.command_runs import train
from tests.mechanisms.mechanism_forms import build

ASKED = 20_000


def mechanisms(sigma):
    screen = {"screen_sigma": sigma, "threshold": 0.0}
    return [
        GNMax(sigma=sigma),
        GNMax(sigma=sigma, noise="discrete"),
        GNMax(sigma=sigma, counts=True),
        LNMax(sigma=sigma),
        LNMax(sigma=sigma, noise="discrete"),
        ExponentialMechanism(sigma=sigma),
        ConfidentGNMax(sigma=sigma, **screen),
        ConfidentGNMax(sigma=sigma, **screen, max_answers=ASKED),
        InteractiveGNMax(sigma=sigma, **screen, student_confidence=0.9),
    ]


@pytest.mark.parametrize("which", range(len(mechanisms(1.0))))
@pytest.mark.parametrize("classes", [2, 10])
@pytest.mark.parametrize("sigma", [40.0, 400.0])
def test_the_forecast_is_what_the_mechanism_does_with_unanimous_votes(which, classes, sigma):
    mechanism = mechanisms(sigma)[which]
    truth_Q = torch.arange(ASKED) % classes
    votes = Votes(75 * torch.nn.functional.one_hot(truth_Q, classes), 75)
    noise = DryRunNoise(mechanism.noise, None if mechanism.discrete else 1)
    label_Q = mechanism.release(votes, noise, MechanismContext(num_queries=ASKED)).label_Q
    given_Q = label_Q >= 0
    right = float((label_Q == truth_Q[: len(label_Q)])[given_Q].double().mean())
    expected = feasibility.compute_label_accuracy(75, mechanism, classes)
    assert right == pytest.approx(expected, abs=5 * (0.25 / int(given_Q.sum())) ** 0.5)


@pytest.mark.parametrize("which", range(len(mechanisms(1.0))))
def test_noise_that_drowns_unanimous_teachers_is_refused_unless_forced(which):
    asked = {"num_teachers": 75, "num_classes": 10}
    feasibility.check_informative(mechanisms(11.0)[which], **asked, allow_uninformative=False)
    hopeless = mechanisms(5930.0)[which]
    with pytest.raises(ValueError, match=r"mechanism\.sigma=5930.*75 teachers.*guessing is right 10\.0 %"):
        feasibility.check_informative(hopeless, **asked, allow_uninformative=False)
    feasibility.check_informative(hopeless, **asked, allow_uninformative=True)


@pytest.mark.parametrize("which", range(len(mechanisms(1.0))))
@pytest.mark.parametrize("classes", [2, 5])
def test_at_the_break_even_lead_a_label_is_half_way_from_a_guess_to_the_truth(which, classes):
    mechanism = mechanisms(40.0)[which]
    lead = feasibility.compute_break_even_lead(mechanism, classes)
    truth_Q = torch.arange(ASKED) % classes
    noise = DryRunNoise(mechanism.noise, None if mechanism.discrete else 1)
    right = []
    for votes in (math.floor(lead), math.ceil(lead)):
        counts_QC = 100 + votes * torch.nn.functional.one_hot(truth_Q, classes)
        label_Q = mechanism.release(
            Votes(counts_QC, 100 * classes + votes), noise, MechanismContext(num_queries=ASKED)
        ).label_Q
        given_Q = label_Q >= 0
        right.append(float((label_Q == truth_Q[: len(label_Q)])[given_Q].double().mean()))
    error = 3 * (0.25 / int(given_Q.sum())) ** 0.5
    assert right[0] - error < (1 + 1 / classes) / 2 < right[1] + error


def test_votes_drown_where_more_than_half_of_them_would_have_to_lead():
    mechanism = GNMax(sigma=71.0)
    lead = feasibility.compute_break_even_lead(mechanism, 10)
    assert feasibility.format_low_signal_warning(mechanism, math.ceil(2 * lead), 10, 5) is None
    assert "by 115 of 100 votes, as no teachers can" in feasibility.format_low_signal_warning(mechanism, 100, 10, 5)
    assert "by 115 of 200 votes, as few teachers do" in feasibility.format_low_signal_warning(mechanism, 200, 10, 5)


@pytest.mark.parametrize("name", ["sparse_vector", "soft_sparse_vector", "single_stable"])
def test_a_question_is_answered_every_other_time_from_the_lead_that_is_said(name):
    """Below it nearly all answers are withheld: the warning names the lead, and comes before anything is charged."""
    mechanism = build(name, **({"max_failures": 2} if name != "single_stable" else {}))
    lead = feasibility.compute_answering_lead(mechanism, 1, 2)
    counts = Votes(torch.tensor([[lead, 0]]), lead)
    draws = [
        mechanism.release(counts, DryRunNoise(), MechanismContext(num_queries=1)).label_Q.item() >= 0
        for _ in range(400)
    ]
    assert 0.5 - 0.12 < np.mean(draws) < (0.75 if name == "soft_sparse_vector" else 0.5) + 0.12
    assert feasibility.format_low_signal_warning(mechanism, 2 * lead, 2, 1) is None
    said = feasibility.format_low_signal_warning(mechanism, 2 * lead - 1, 2, 1)
    assert "a question is left unanswered" in said and f"by {lead} of {2 * lead - 1} votes" in said


@pytest.mark.parametrize(("size", "better"), [(12_000, True), (100, False), (None, True)])
def test_records_are_asked_instead_where_their_noise_does_not_drown_them_too(size, better):
    descent = CalibratedDescent(mechanism=GradientDescent(sigma=7.1, adjacency="add_remove"), num_records=size)
    said = alternatives.suggest_gradients(descent, "HOW")
    assert ("HOW" in said) == better and (feasibility.NOISE_ADVICE in said) != better


@pytest.mark.parametrize(("records", "public"), [(300, 500), (12_000, 500), (12_000, 80)])
def test_who_is_told_to_ask_records_gets_what_the_estimator_would_have_chosen(records, public):
    price = {"epsilon": 0.5, "delta": 1e-5, "adjacency": "add_remove"}
    descent = calibrate_gradients(**price, num_records=records, num_public=public)
    facts = autoconfig.PublicFacts(
        **price,
        has_groups=False,
        num_records=records,
        num_public=public,
        num_classes=4,
        is_image=False,
        is_encoded=True,
    )
    chosen = autoconfig.choose_method(facts)
    assert (chosen.mechanism, chosen.effective_dim) == (descent.mechanism, descent.effective_dim)
    assert chosen.self_training == descent.needs_self_training(True)
    assert (
        ("majority" in chosen.expectation)
        == descent.is_noise_dominated
        == (alternatives.suggest_gradients(descent, "HOW") == feasibility.NOISE_ADVICE)
    )
    assert compute_guarantee(descent.mechanism.privacy_events(1), 1e-5).epsilon == pytest.approx(0.5, rel=1e-6)


@pytest.mark.parametrize(("records", "student"), [(300, "student=self_training"), (12_000, "student=released_model")])
def test_who_is_told_to_type_gets_the_student_that_the_estimator_would_have_chosen(records, student):
    """Of features: where noise is large, a student of the model's answers."""
    with hydra_config.open_configuration():
        run = plan.compose_plan(("dataset=csv",))
    descent = calibrate_gradients(epsilon=0.5, delta=1e-5, adjacency="add_remove", num_records=records, num_public=500)
    said = alternatives.gradient_overrides(run, descent, is_image=False, is_encoded=True, num_queries=500)
    assert student in said and ("student.alpha=.5" in said) == descent.needs_self_training(True)
    assert "student=released_model" in alternatives.gradient_overrides(
        run, descent, is_image=False, is_encoded=False, num_queries=9
    )


def test_few_public_points_allow_few_directions_and_shorter_steps():
    price = {"epsilon": 0.5, "delta": 1e-5, "adjacency": "add_remove", "num_records": 12_000}
    many, few = calibrate_gradients(**price, num_public=5000), calibrate_gradients(**price, num_public=80)
    assert few.effective_dim == 20 < many.effective_dim == calibrate_gradients(**price).effective_dim
    assert few.mechanism.step_size == pytest.approx(2 * 21**0.5) and few.mechanism.sigma == many.mechanism.sigma


@pytest.mark.slow
def test_a_run_whose_votes_drown_says_so_and_what_would_do_better(tmp_path, monkeypatch):
    few = [f"hydra.searchpath=[file://{ROOT}/benchmarks/conf]", "dataset=glyphs", "dataset.private=3000",
           "dataset.public=60", "dataset.test=60", "dataset.num_classes=4",
           "num_teachers=12", "num_queries=6", "teacher.steps=5", "student=logistic", "baseline=false"]  # fmt: skip
    ended = train(tmp_path, *few, "mechanism.sigma=8", monkeypatch=monkeypatch, base=[])
    assert ended.code == 0, ended.err
    assert "Noise outweighs these votes" in ended.err and "Forecast" in ended.out
    (summary,) = tmp_path.rglob("private/summary.json")
    said = json.loads(summary.read_text())["forecast"]
    assert "of 12 votes" in said and "3,000 records" in said and "method=gradients mechanism=gradient_descent" in said
    # What it says to type has the price of the labels, and is a run.
    typed = said.rsplit(": ", 1)[1].split()
    said = {key: float(value) for key, _, value in (s.partition("=") for s in typed) if key.startswith("mechanism.")}
    steps, sigma = int(said["mechanism.steps"]), said["mechanism.sigma"]
    descent = GradientDescent(sigma=sigma, steps=steps, adjacency="add_remove")
    labels = compute_guarantee(GNMax(sigma=8.0).privacy_events(6), 1e-5).epsilon
    assert compute_guarantee(descent.privacy_events(60), 1e-5).epsilon == pytest.approx(labels, rel=1e-3)
    short = ["features.steps=2", "student.first_student.steps=2", "student.later_students.steps=2"]
    again = [*[key for key in few if not key.startswith(("num_", "student"))], *typed, *short]
    ended = train(tmp_path, *again, monkeypatch=monkeypatch, base=[])
    assert ended.code == 0, ended.err
    assert "outweighs" not in ended.err


def test_pate_and_its_labeler_warn_of_votes_that_drown(tmp_path):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(90, 2, generator=generator)
    pate = PATE("mine", classes=3, num_teachers=5, mechanism=GNMax(sigma=4.0), delta=1e-5, home=tmp_path,
                teacher=LogisticRegression())  # fmt: skip
    pate.fit_teachers(x, (x[:, 0] > 0).long())
    with pytest.warns(
        feasibility.LowSignalWarning, match=r"of 5 votes.*PATE\(teacher=GradientMethod\(size=.*GradientDescent\(sigma="
    ):
        pate.label(x[:20], num_queries=2)
    with pate.labeler(2) as labeler, pytest.warns(feasibility.LowSignalWarning, match="Ask fewer questions"):
        labeler.answer(x[0])


def test_exact_answers_have_no_chance_to_lose():
    assert feasibility.compute_label_accuracy(5000, SparseVector(epsilon=1.0, delta=1e-5, max_failures=5), 2) is None


def test_a_hopeless_plan_is_refused_by_every_route_before_anything_is_charged(tmp_path, monkeypatch, capsys):
    ended = train(tmp_path, "privacy.target_epsilon=.001", "quiet=true", monkeypatch=monkeypatch, base=[])
    assert "no better than chance" in ended.error
    np.save(tmp_path / "votes.npy", np.tile([75, 0, 0], (9, 1)))
    votes = [f"votes={tmp_path / 'votes.npy'}", "num_classes=3", "dataset.name=far", "privacy.delta=1e-5"]
    assert label.main([*votes, "mechanism.sigma=5000", "quiet=true"]) == 2
    assert "privacy.allow_uninformative_labels=true" in capsys.readouterr().err
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(90, 2, generator=generator)
    pate = PATE("mine", classes=3, num_teachers=5, mechanism=GNMax(sigma=900.0), delta=1e-5, home=tmp_path,
                teacher=LogisticRegression())  # fmt: skip
    pate.fit_teachers(x, (x[:, 0] > 0).long())
    with pytest.raises(ValueError, match="no better than chance"):
        pate.label(x[:20], num_queries=5)
    with pate.labeler(5) as labeler, pytest.raises(ValueError, match="allow_uninformative_labels=True"):
        labeler.answer(x[0])
    if (tmp_path / "ledger.sqlite").exists():
        with Ledger(tmp_path / "ledger.sqlite") as ledger:
            assert not any(entry.kind == "reserve" for entry in ledger.read_entries())
    assert label.main([*votes, "mechanism.sigma=5000", "quiet=true", "privacy.allow_uninformative_labels=true"]) == 0
