"""The draw of the exponential mechanism, and the choice of a model by it: exact laws and costs."""

import itertools

import numpy as np
import pytest

from pate_torch.mechanisms import exponential
from pate_torch.mechanisms.exponential import compute_log_probabilities, draw_gumbel_max, draw_model_index
from pate_torch.privacy.noise import DryRunNoise
from tests.hypotheses.exact_laws import Spy, fit


def test_gumbel_max_stays_in_log_space():
    """Utilities whose exponentials over- and underflow; a chi-square test that rejects half and 1.5 times the rate."""
    utility, rate, noise = np.array([-1e6, -1e6 - 3, -1e6 - 6, -4e6]), 0.25, DryRunNoise(insecure_seed=2)
    counts = np.bincount([draw_gumbel_max(utility, rate, noise) for _ in range(2500)], minlength=4)
    assert counts[3] == 0 and fit(counts[:3], np.exp(compute_log_probabilities(utility, rate))[:3]) > 1e-4
    for wrong in (rate / 2, rate * 1.5):
        assert fit(counts[:3], np.exp(compute_log_probabilities(utility, wrong))[:3]) < 1e-6
    with pytest.raises(ValueError, match="finite"):
        compute_log_probabilities(np.array([0.0, np.nan]), 1.0)


@pytest.mark.parametrize("adjacency,steps", [("replace_one", (-1, 0, 1)), ("add_remove", (0, 1))])
def test_selection_costs_both_adjacencies_exactly(monkeypatch, adjacency, steps):
    epsilon, base = 0.9, np.array([5, 9, 7])
    monkeypatch.setattr(
        exponential, "draw_gumbel_max", lambda u, rate, noise: np.exp(compute_log_probabilities(u, rate))
    )

    def law(errors):
        return draw_model_index(errors, epsilon, DryRunNoise(), adjacency=adjacency)

    spans = {
        move: np.ptp(np.log(law(base)) - np.log(law(base + np.array(move))))
        for move in itertools.product((-1, 0, 1), repeat=3)
    }
    inside = max(span for move, span in spans.items() if set(move) <= set(steps))
    assert inside == pytest.approx(epsilon, abs=1e-9)
    # The add/remove rate would be twice too high for replace-one.
    assert max(spans.values()) == pytest.approx(epsilon * (2 if adjacency == "add_remove" else 1), abs=1e-9)


def test_selection_finds_the_best():
    spy, counts = Spy(3), np.zeros(3)
    assert draw_model_index(np.array([400, 50, 300]), 1.0, spy, adjacency="replace_one") == 1
    for _ in range(2000):
        counts[draw_model_index(np.array([4, 2, 3]), 1.0, spy, adjacency="add_remove")] += 1
    law = np.exp([-4.0, -2.0, -3.0])
    assert fit(counts, law / law.sum()) > 1e-4
    assert fit(counts, np.sqrt(law) / np.sqrt(law).sum()) < 1e-6
    for errors in (np.array([0.1, 0.2]), np.array([-1, 2]), np.array([], dtype=int), np.array([[1, 2]])):
        with pytest.raises(ValueError, match="errors_M"):
            draw_model_index(errors, 1.0, spy, adjacency="replace_one")


def test_any_loss_is_private_at_its_sensitivity():
    """Losses in [-1, 1], two records, every neighbor: the range is met exactly at range/n, not at 2 range/n."""
    epsilon, n, loss_range, table = 0.7, 2, 2.0, {z: np.array([z, -z, 0.0, z * z]) for z in (-1.0, -0.5, 0.0, 1.0)}
    laws = {
        records: compute_log_probabilities(
            -np.mean([table[z] for z in records], axis=0), epsilon / (2 * loss_range / n)
        )
        for records in itertools.product(table, repeat=n)
    }
    spans = [
        np.ptp(laws[one] - laws[other])
        for one, other in itertools.product(laws, repeat=2)
        if sum(a != b for a, b in zip(one, other, strict=True)) == 1
    ]
    assert 0.99 * epsilon < max(spans) <= epsilon + 1e-9
