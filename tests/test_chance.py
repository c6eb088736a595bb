"""Labels no better than guesses: foretold by the law of the mechanism, and refused before anything is charged."""

import numpy as np
import pytest
import torch
from command_runs import train
from sklearn.linear_model import LogisticRegression

from pate_torch import Pate, chance
from pate_torch.label import command as label
from pate_torch.ledger import Ledger
from pate_torch.mechanisms.confident import Confident
from pate_torch.mechanisms.exponential import Exponential
from pate_torch.mechanisms.gaussian import Gaussian
from pate_torch.mechanisms.interactive import Interactive
from pate_torch.mechanisms.laplace import Laplace
from pate_torch.mechanisms.stability import Stability
from pate_torch.noise.source import Rehearsal
from pate_torch.types import Context, Votes

ASKED = 20_000


def mechanisms(sigma):
    screen = {"screen_sigma": sigma, "threshold": 0.0}
    return [
        Gaussian(sigma=sigma),
        Gaussian(sigma=sigma, noise="discrete"),
        Gaussian(sigma=sigma, counts=True),
        Laplace(sigma=sigma),
        Laplace(sigma=sigma, noise="discrete"),
        Exponential(sigma=sigma),
        Confident(sigma=sigma, **screen),
        Confident(sigma=sigma, **screen, max_answers=ASKED),
        Interactive(sigma=sigma, **screen, student_confidence=0.9),
    ]


@pytest.mark.parametrize("which", range(len(mechanisms(1.0))))
@pytest.mark.parametrize("classes", [2, 10])
@pytest.mark.parametrize("sigma", [40.0, 400.0])
def test_the_forecast_is_what_the_mechanism_does_with_unanimous_votes(which, classes, sigma):
    mechanism = mechanisms(sigma)[which]
    truth_Q = torch.arange(ASKED) % classes
    votes = Votes(75 * torch.nn.functional.one_hot(truth_Q, classes), 75)
    noise = Rehearsal(mechanism.noise, None if mechanism.discrete else 1)
    label_Q = mechanism.release(votes, noise, Context(num_queries=ASKED)).label_Q
    given_Q = label_Q >= 0
    right = float((label_Q == truth_Q[: len(label_Q)])[given_Q].double().mean())
    expected = chance.best_case(mechanism, 75, classes)
    assert right == pytest.approx(expected, abs=5 * (0.25 / int(given_Q.sum())) ** 0.5)


@pytest.mark.parametrize("which", range(len(mechanisms(1.0))))
def test_noise_that_drowns_unanimous_teachers_is_refused_unless_forced(which):
    asked = {"num_teachers": 75, "num_classes": 10}
    chance.refuse(mechanisms(11.0)[which], **asked, forced=False)
    hopeless = mechanisms(5930.0)[which]
    with pytest.raises(ValueError, match=r"mechanism\.sigma=5930.*75 teachers.*guessing is right 10\.0 %"):
        chance.refuse(hopeless, **asked, forced=False)
    chance.refuse(hopeless, **asked, forced=True)


def test_exact_answers_have_no_chance_to_lose():
    assert chance.best_case(Stability(epsilon=1.0, delta=1e-5, max_failures=5), 5000, 2) is None


def test_a_hopeless_plan_is_refused_by_every_route_before_anything_is_charged(tmp_path, monkeypatch, capsys):
    ended = train(tmp_path, "privacy.target_epsilon=.001", "quiet=true", monkeypatch=monkeypatch, base=[])
    assert "no better than chance" in ended.error
    np.save(tmp_path / "votes.npy", np.tile([75, 0, 0], (9, 1)))
    votes = [f"votes={tmp_path / 'votes.npy'}", "num_classes=3", "dataset.name=far", "privacy.delta=1e-5"]
    assert label.main([*votes, "mechanism.sigma=5000", "quiet=true"]) == 2
    assert "privacy.allow_chance=true" in capsys.readouterr().err
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(90, 2, generator=generator)
    pate = Pate("mine", classes=3, num_teachers=5, mechanism=Gaussian(sigma=900.0), delta=1e-5, home=tmp_path,
                teacher=LogisticRegression())  # fmt: skip
    pate.fit_teachers(x, (x[:, 0] > 0).long())
    with pytest.raises(ValueError, match="no better than chance"):
        pate.label(x[:20], num_queries=5)
    with pate.labeler(5) as labeler, pytest.raises(ValueError, match="allow_chance=True"):
        labeler.answer(x[0])
    if (tmp_path / "ledger.sqlite").exists():
        with Ledger(tmp_path / "ledger.sqlite") as ledger:
            assert not any(entry.kind == "reserve" for entry in ledger.entries())
    assert label.main([*votes, "mechanism.sigma=5000", "quiet=true", "privacy.allow_chance=true"]) == 0
