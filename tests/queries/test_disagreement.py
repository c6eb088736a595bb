"""Disagreement against every threshold there is, and its fits against scipy's minima."""

import math

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from pate_torch.core import rng
from pate_torch.queries.disagreement import Disagreement, append_ones, compute_penalized_loss, fit_logistic
from tests.queries.states import NONE, blobs, state


def find_disputed(point: np.ndarray, label: np.ndarray, slack: float) -> np.ndarray:
    """Brute force over every cut and direction: do two with at most minimum + slack errors differ on a point?"""
    answered = label >= 0
    cuts = np.concatenate([[point.min() - 1], (np.sort(point)[1:] + np.sort(point)[:-1]) / 2, [point.max() + 1]])
    opinions = np.array([side * (point - cut) > 0 for cut in cuts for side in (1, -1)])
    errors = (opinions[:, answered] != label[answered]).sum(1)
    kept = opinions[errors <= errors.min() + slack]
    return kept.any(0) & ~kept.all(0)


@pytest.mark.parametrize("slack", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("seed", range(3))
def test_asks_what_the_version_space_of_thresholds_disputes(seed, slack, monkeypatch):
    """One stretch of the stream of thresholds on a line, against every threshold there is."""
    generator = np.random.default_rng(seed)
    point = np.sort(generator.uniform(-3, 3, 64))
    truth = (point > generator.uniform(-1, 1)).astype(int)
    stream = torch.randperm(64, generator=rng.make_torch_generator(seed, "query", "disagreement")).numpy()
    label = np.full(64, -1)
    label[stream[:16]] = truth[stream[:16]]
    disputed = find_disputed(point, label, slack)
    # A plain count of errors takes the place of the schedule's slack.
    monkeypatch.setattr(Disagreement, "compute_allowed_excess", lambda self, time, errors: slack)
    x, query_Q = torch.from_numpy(point[:, None]).float(), torch.from_numpy(stream[:16])
    now = state(x, 48, 10, 2, seed=seed, query_Q=query_Q, label_Q=torch.from_numpy(truth[stream[:16]]))
    expected = [p for p in stream[16:32] if disputed[p]]
    if not expected:  # nothing in this stretch: the next one, with the same version space
        expected = [p for p in stream[32:] if disputed[p]]
    assert Disagreement(criterion="error", slack=1.0, ridge=1e-3).select(now).tolist() == expected


def test_halves_the_interval_of_thresholds():
    """Without noise a few dozen queries settle 500 points, and the boundary is pinned."""
    point = torch.linspace(-1, 1, 500)[:, None]
    truth = (point[:, 0] > 0.2).long()
    strategy, asked = Disagreement(criterion="error", slack=0.0, ridge=1e-3), NONE
    for turn in range(strategy.rounds):
        now = state(point, 500 - len(asked), strategy.rounds - turn, 2, query_Q=asked, label_Q=truth[asked])
        query_Q = strategy.select(now)
        if len(query_Q) == 0:
            break
        asked = torch.cat([asked, query_Q])
    low, high = point[asked][truth[asked] == 0].max(), point[asked][truth[asked] == 1].min()
    assert len(asked) < 60 and low < 0.2 < high and high - low < 0.05


def test_stops_at_the_allowance_and_at_the_end_and_counts_no_unanswered_question():
    x, y = blobs(90)
    assert len(Disagreement().select(state(x, 1, 20))) == 1
    stream = torch.randperm(90, generator=rng.make_torch_generator(0, "query", "disagreement"))
    assert len(Disagreement().select(state(x, 5, 20, query_Q=stream, label_Q=y[stream]))) == 0
    asked = stream[:16]
    unanswered = state(x, 30, 10, query_Q=asked, label_Q=torch.full((16,), -1))
    assert len(Disagreement().select(unanswered)) == 16, "without answers every hypothesis stands"
    assert len(Disagreement().select(state(x, 30, 10, query_Q=asked, label_Q=y[asked]))) < 16


def test_fits_are_the_minimum_and_the_constrained_minimum():
    generator = torch.Generator().manual_seed(0)
    x = append_ones(torch.randn(30, 3, generator=generator))
    sign = torch.where(x[:, 0] + 0.5 * torch.randn(30, generator=generator) > 0, 1.0, -1.0).double()
    best = fit_logistic(x, sign, 0.7)[0]
    points = append_ones(torch.randn(4, 3, generator=generator))
    through = fit_logistic(x, sign, 0.7, through_BD=points, start_D=best)
    torch.testing.assert_close((through * points).sum(1), torch.zeros(4, dtype=torch.float64), atol=1e-9, rtol=0)

    def loss(w: np.ndarray) -> float:
        return float(compute_penalized_loss(x, sign, torch.from_numpy(w)[None], 0.7))

    free = minimize(loss, np.zeros(4), method="BFGS", options={"gtol": 1e-8})
    np.testing.assert_allclose(best.numpy(), free.x, atol=1e-4)
    for w, point in zip(through, points.numpy(), strict=True):
        on_plane = {"type": "eq", "fun": lambda v, p=point: v @ p}
        reference = minimize(loss, np.zeros(4), method="SLSQP", constraints=on_plane, options={"ftol": 1e-14})
        np.testing.assert_allclose(loss(w.numpy()), reference.fun, rtol=1e-7)
        assert loss(w.numpy()) >= free.fun - 1e-9


def test_the_slack_grows_with_errors_and_time():
    strategy = Disagreement(slack=0.5, confidence=0.1)
    complexity = math.log(math.log2(2 * 8) ** 2 / 0.1)
    assert strategy.compute_allowed_excess(8, 0) == pytest.approx(0.5 * complexity)
    assert strategy.compute_allowed_excess(8, 9) == pytest.approx(0.5 * (complexity + 3 * math.sqrt(complexity)))
    assert strategy.compute_allowed_excess(64, 9) > strategy.compute_allowed_excess(8, 9)
