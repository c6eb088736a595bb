"""A pilot puts votes like those of its few teachers through the mechanism itself."""

import math

import numpy as np
import pytest
import torch
from scipy.stats import norm

from pate_torch.mechanisms.confident import ConfidentGNMax
from pate_torch.mechanisms.gaussian import GNMax
from pate_torch.mechanisms.sparse_vector import SoftSparseVector
from pate_torch.methods.teacher_votes import TeacherVotes
from pate_torch.planning import pilot as pilots
from pate_torch.planning.pilot import Pilot, PilotConfig, simulate_release
from pate_torch.privacy.records import Dataset
from pate_torch.privacy.sensitive import Votes
from tests.tensor_data import Tensors


def unanimous(num_classes, **choices):
    """A method of teachers, all of whom are right, and the votes of a pilot of four."""
    counts_QC = torch.zeros(2000, num_classes, dtype=torch.int64)
    counts_QC[:, 0] = 4
    method = TeacherVotes(num_teachers=30, **choices)
    return method, Votes(counts_QC, 4), torch.zeros(2000, dtype=torch.int64)


def test_votes_go_through_the_mechanism_itself():
    """Unanimous teachers: the chances of an answer and of the right one are known exactly."""
    setting = {"min_queries": 40_000, "seed": 3}
    forecast = simulate_release(*unanimous(2, mechanism=GNMax(sigma=25), num_queries=4000), **setting)
    chance = norm.cdf(30 / (math.sqrt(2) * 25))
    assert forecast.answer_rate == 1
    assert forecast.accuracy == pytest.approx(chance, abs=4 * math.sqrt(chance * (1 - chance) / 40_000))
    assert abs(forecast.accuracy - norm.cdf(30 / 25)) > 0.05  # the noise of one count only
    mechanism = ConfidentGNMax(sigma=25, screen_sigma=20, threshold=40)
    answer_rate = simulate_release(*unanimous(2, mechanism=mechanism, num_queries=4000), **setting).answer_rate
    chance = norm.cdf((30 - 40) / 20)
    assert answer_rate == pytest.approx(chance, abs=4 * math.sqrt(chance * (1 - chance) / 40_000))

    # A mechanism that stops early leaves the rest unanswered.
    mechanism = ConfidentGNMax(sigma=1, screen_sigma=1, threshold=1, max_answers=5)
    forecast = simulate_release(*unanimous(3, mechanism=mechanism, num_queries=20), min_queries=2000, seed=0)
    assert forecast.answer_rate == 0.25 and forecast.accuracy == 1


def test_votes_of_many_teachers_are_drawn_from_the_shares_of_the_few():
    """Under noise of an eighth of the votes, 64 teachers forecast hundreds within two points, and never too high."""
    draw, errors = np.random.default_rng(0), []
    for world in range(6):
        num_classes, teachers, questions = (2, 4, 10)[world % 3], int(draw.integers(60, 400)), 2000
        logit_QC = draw.normal(0, draw.uniform(0.3, 1.5), (questions, num_classes))
        truth_Q = draw.integers(num_classes, size=questions)
        hard_Q = draw.random(questions) < draw.uniform(0.02, 0.25)
        logit_QC[np.arange(questions), truth_Q] += np.where(hard_Q, draw.uniform(-1, 0), draw.uniform(0.8, 3.0))
        share_QC = np.exp(logit_QC) / np.exp(logit_QC).sum(1, keepdims=True)
        method = TeacherVotes(num_teachers=teachers, mechanism=GNMax(sigma=teachers / 8), num_queries=questions)
        right = []
        for size in (64, 100_000):
            few = Votes(torch.from_numpy(draw.multinomial(size, share_QC)), size)
            right.append(simulate_release(method, few, torch.from_numpy(truth_Q), min_queries=8000, seed=0).accuracy)
        errors.append(right[0] - right[1])
    assert max(map(abs, errors)) < 0.02 and max(errors) < 0.005, errors


def clouds(records: int) -> Dataset:
    """Four overlapping clouds in eight directions, so many of them private."""
    generator = torch.Generator().manual_seed(3)
    y = torch.randint(4, (records + 500,), generator=generator)
    x = torch.randn(records + 500, 8, generator=generator)
    x[:, :4] += 2 * torch.nn.functional.one_hot(y, 4)
    public = {"pool_x": x[:500], "pool_y": y[:500], "test_x": x[:1], "test_y": y[:1]}
    return Tensors(name="clouds", class_names=4, x=x[500:], y=y[500:], **public).load()


def test_a_pilot_is_trained_once_for_each_shard_size(monkeypatch):
    sizes = []

    class Ensemble:
        def predict_proba(self, x):
            return torch.nn.functional.one_hot(torch.zeros(4, len(x), dtype=torch.int64), 4).double()

    monkeypatch.setattr(pilots, "train", lambda records, *_, **__: sizes.append(len(records)) or Ensemble())
    pilot = Pilot(PilotConfig(dataset="clouds", num_queries=100), clouds(1600), 1600, seed=0)
    for teachers, sigma in ((4, 1.0), (4, 2.0), (8, 1.0)):
        method = TeacherVotes(num_teachers=teachers, mechanism=GNMax(sigma=sigma), num_queries=20)
        assert 0.1 < pilot.forecast(method).accuracy < 0.4
    assert sizes == [1600, 1600]
    soft = SoftSparseVector(epsilon=30, delta=1e-5, max_failures=2, bins=10)
    assert pilot.forecast(TeacherVotes(num_teachers=200, mechanism=soft)) is None
    few = TeacherVotes(num_teachers=10, mechanism=GNMax(sigma=1.0))
    with pytest.raises(ValueError, match="too few for 4 teachers of 800 each"):
        Pilot(PilotConfig(dataset="clouds"), clouds(1600), 8000, seed=0).forecast(few)


@pytest.mark.parametrize("bad", [{"teachers": 3}, {"num_queries": 99}, {"dataset": ""}])
def test_a_bad_option_of_the_pilot_is_refused(bad):
    with pytest.raises(ValueError, match=f"pilot.{next(iter(bad))}"):
        PilotConfig(**bad)
