"""Labels no better than guesses: predicted by the law of the mechanism, and refused before anything is charged."""

import math

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression

from pate_torch import PATE
from pate_torch.cli import main as cli
from pate_torch.mechanisms.confident import ConfidentGNMax, InteractiveGNMax
from pate_torch.mechanisms.exponential import ExponentialMechanism
from pate_torch.mechanisms.gaussian import GNMax
from pate_torch.mechanisms.laplace import LNMax
from pate_torch.mechanisms.sparse_vector import SparseVector
from pate_torch.methods import feasibility
from pate_torch.privacy.ledger import Ledger
from pate_torch.privacy.noise import DryRunNoise
from pate_torch.privacy.records import MechanismContext
from pate_torch.privacy.sensitive import Votes
from tests.command_runs import train
from tests.mechanisms.mechanism_forms import build

ASKED = 10_000


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


every_mechanism = pytest.mark.parametrize("which", range(len(mechanisms(1.0))))


def measure_accuracy(mechanism, lead: int, classes: int, others: int = 0) -> tuple[float, int]:
    """Share of right answers where the true class leads by ``lead`` votes, and how many answers there were."""
    truth_Q = torch.arange(ASKED) % classes
    counts_QC = others + lead * torch.nn.functional.one_hot(truth_Q, classes)
    noise = DryRunNoise(mechanism.noise, None if mechanism.discrete else 1)
    votes = Votes(counts_QC, others * classes + lead)
    label_Q = mechanism.release(votes, noise, MechanismContext(num_queries=ASKED)).label_Q
    is_answered_Q = label_Q >= 0
    is_right_Q = label_Q == truth_Q[: len(label_Q)]
    return float(is_right_Q[is_answered_Q].double().mean()), int(is_answered_Q.sum())


@every_mechanism
@pytest.mark.parametrize(("classes", "sigma"), [(2, 40.0), (10, 400.0)])
def test_the_forecast_is_what_the_mechanism_does_with_unanimous_votes(which, classes, sigma):
    mechanism = mechanisms(sigma)[which]
    accuracy, answers = measure_accuracy(mechanism, 75, classes)
    expected = feasibility.compute_label_accuracy(75, mechanism, classes)
    assert accuracy == pytest.approx(expected, abs=5 * (0.25 / answers) ** 0.5)


@every_mechanism
def test_at_the_break_even_lead_a_label_is_half_way_from_a_guess_to_the_truth(which):
    mechanism, classes = mechanisms(40.0)[which], 5
    lead = feasibility.compute_break_even_lead(mechanism, classes)
    (below, answers), (above, _) = (
        measure_accuracy(mechanism, votes, classes, others=100) for votes in (math.floor(lead), math.ceil(lead))
    )
    error = 3 * (0.25 / answers) ** 0.5
    assert below - error < (1 + 1 / classes) / 2 < above + error


@every_mechanism
def test_noise_that_outweighs_unanimous_teachers_is_refused_unless_forced(which):
    asked = {"num_teachers": 75, "num_classes": 10}
    feasibility.check_informative(mechanisms(11.0)[which], **asked, allow_uninformative=False)
    hopeless = mechanisms(5930.0)[which]
    with pytest.raises(ValueError, match=r"mechanism\.sigma=5930.*75 teachers.*10\.0 % of guesses are right"):
        feasibility.check_informative(hopeless, **asked, allow_uninformative=False)
    feasibility.check_informative(hopeless, **asked, allow_uninformative=True)


def test_a_warning_names_a_lead_of_more_than_half_of_the_votes():
    mechanism = GNMax(sigma=71.0)
    lead = feasibility.compute_break_even_lead(mechanism, 10)
    assert feasibility.format_low_signal_warning(mechanism, math.ceil(2 * lead), 10, 5) is None
    assert "by 115 of 100 votes" in feasibility.format_low_signal_warning(mechanism, 100, 10, 5)
    assert "by 115 of 200 votes" in feasibility.format_low_signal_warning(mechanism, 200, 10, 5)
    exact = SparseVector(epsilon=1.0, delta=1e-5, max_failures=5)
    assert feasibility.compute_label_accuracy(5000, exact, 2) is None  # its answers have no chance to lose


@pytest.mark.parametrize("name", ["sparse_vector", "soft_sparse_vector", "single_stable"])
def test_a_question_is_answered_every_other_time_from_the_answering_lead(name):
    """Below it nearly all answers are withheld: the warning names the lead, and comes before anything is charged."""
    mechanism = build(name, **({"max_failures": 2} if name != "single_stable" else {}))
    lead = feasibility.compute_answering_lead(mechanism, 1, 2)
    counts = Votes(torch.tensor([[lead, 0]]), lead)
    noise = DryRunNoise("torch", 0)
    draws = [mechanism.release(counts, noise, MechanismContext(num_queries=1)).label_Q.item() >= 0 for _ in range(200)]
    assert 0.5 - 0.12 < np.mean(draws) < (0.75 if name == "soft_sparse_vector" else 0.5) + 0.12
    assert feasibility.format_low_signal_warning(mechanism, 2 * lead, 2, 1) is None
    warning = feasibility.format_low_signal_warning(mechanism, 2 * lead - 1, 2, 1)
    assert "not answered" in warning and f"by {lead} of {2 * lead - 1} votes" in warning


def fit_five_teachers(home, sigma: float) -> tuple[PATE, torch.Tensor]:
    x = torch.randn(90, 2, generator=torch.Generator().manual_seed(0))
    pate = PATE("mine", classes=3, num_teachers=5, mechanism=GNMax(sigma=sigma), delta=1e-5, home=home,
                teacher=LogisticRegression())  # fmt: skip
    return pate.fit_teachers(x, (x[:, 0] > 0).long()), x


def test_pate_and_its_labeler_warn_of_votes_that_noise_outweighs(tmp_path):
    pate, x = fit_five_teachers(tmp_path, 4.0)
    call = r"of 5 votes.*PATE\(teacher=GradientMethod\(size=.*GradientDescent\(sigma="
    with pytest.warns(feasibility.LowSignalWarning, match=call):
        pate.label(x[:20], num_queries=2)
    with pate.labeler(2) as labeler, pytest.warns(feasibility.LowSignalWarning, match="Ask fewer queries"):
        labeler.answer(x[0])


def test_a_hopeless_plan_is_refused_by_every_route_before_anything_is_charged(tmp_path, monkeypatch, capsys):
    outcome = train(tmp_path, "privacy.target_epsilon=.001", "quiet=true", monkeypatch=monkeypatch, base=[])
    assert "no better than chance" in outcome.error
    np.save(tmp_path / "votes.npy", np.tile([75, 0, 0], (9, 1)))
    votes = [f"votes={tmp_path / 'votes.npy'}", "num_classes=3", "dataset.name=far", "privacy.delta=1e-5"]
    assert cli.main(["label", *votes, "mechanism.sigma=5000", "quiet=true"]) == 2
    assert "privacy.allow_uninformative_labels=true" in capsys.readouterr().err
    pate, x = fit_five_teachers(tmp_path, 900.0)
    with pytest.raises(ValueError, match="no better than chance"):
        pate.label(x[:20], num_queries=5)
    with pate.labeler(5) as labeler, pytest.raises(ValueError, match="allow_uninformative_labels=True"):
        labeler.answer(x[0])
    if (tmp_path / "ledger.sqlite").exists():
        with Ledger(tmp_path / "ledger.sqlite") as ledger:
            assert not any(entry.kind == "reserve" for entry in ledger.read_entries())
    allowed = ["mechanism.sigma=5000", "quiet=true", "privacy.allow_uninformative_labels=true"]
    assert cli.main(["label", *votes, *allowed]) == 0


@pytest.mark.parametrize("num_units", [1, 30, 1000, 10**7])
def test_the_forecast_of_a_model_lies_in_its_interval(num_units):
    forecast = feasibility.forecast_gradients(num_units, num_units / 3, sigma=900.0)
    assert -1 <= forecast.low <= forecast.skill <= forecast.high <= 1
