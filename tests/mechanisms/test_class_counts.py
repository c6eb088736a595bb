"""Noisy class counts: their sensitivity by brute force, their noise, their cost, and what is estimated from them."""

import itertools
import math

import numpy as np
import pytest
import torch
from scipy import stats

from pate_torch.accounting.accountant import compute_guarantee
from pate_torch.accounting.events import GaussianEvent, LaplaceEvent
from pate_torch.mechanisms.class_counts import ClassCounts
from pate_torch.methods.base import FirstAnswers
from pate_torch.privacy.noise import DryRunNoise
from pate_torch.privacy.records import OUTSIDE_STEPS, MechanismContext
from pate_torch.privacy.sensitive import UNIT_COUNT_GRID, UNIT_COUNT_SENSITIVITY, UnitCounts

UNITS = [(label, outside) for label in range(3) for outside in (0, 1, OUTSIDE_STEPS // 2, OUTSIDE_STEPS)]
"""Class and share of values outside the public range of one unit."""
CONTEXT = MechanismContext(num_queries=1)


def to_vector(units, adjacency):
    """The vector that receives the noise, in units."""
    y_U, outside_U = (torch.tensor([unit[part] for unit in units], dtype=torch.int64) for part in (0, 1))
    counts = UnitCounts.from_units(y_U, outside_U, 3, adjacency)
    return np.array([*counts.counts_C.tolist(), int(counts.outside_sum) / UNIT_COUNT_GRID]), counts


@pytest.mark.parametrize("adjacency", ["add_remove", "replace_one"])
def test_the_sensitivity_is_the_largest_distance_between_neighbors(adjacency):
    rest = [(0, 3), (2, OUTSIDE_STEPS)]
    others = [[]] if adjacency == "add_remove" else [[unit] for unit in UNITS]
    largest = {"l1": 0.0, "l2": 0.0, "linf": 0.0}
    for unit, other in itertools.product(UNITS, others):
        change = np.abs(to_vector([*rest, unit], adjacency)[0] - to_vector([*rest, *other], adjacency)[0])
        for norm, length in {"l1": change.sum(), "l2": np.linalg.norm(change), "linf": change.max()}.items():
            largest[norm] = max(largest[norm], float(length))
    stated = UNIT_COUNT_SENSITIVITY[adjacency]
    assert largest == {norm: pytest.approx(getattr(stated, norm)) for norm in largest}
    assert (
        stated
        == ClassCounts(sigma=1.0, adjacency=adjacency).max_sensitivity
        == to_vector(rest, adjacency)[1].sensitivity
    )


def test_a_share_above_one_counts_as_one():
    assert to_vector([(0, 9 * OUTSIDE_STEPS)], "add_remove")[0].tolist() == [1, 0, 0, 0.5]
    assert to_vector([(0, -5)], "add_remove")[0].tolist() == [1, 0, 0, 0]


def draw(counts, mechanism, runs, seed=0):
    noise = DryRunNoise(insecure_seed=seed)
    answers = [mechanism.release(counts, noise, CONTEXT) for _ in range(runs)]
    assert {answer.events for answer in answers} == {mechanism.privacy_events()}
    return np.array([answer.noisy_counts.counts_QC[0].tolist() for answer in answers])


def test_the_noise_has_the_scale_that_is_paid_for_and_no_other():
    exact, counts = to_vector([(0, 0)] * 40 + [(1, OUTSIDE_STEPS)] * 25 + [(2, 9)], "add_remove")
    noisy = draw(counts, ClassCounts(sigma=7.0, adjacency="add_remove"), 3000) - [*exact[:3], 2 * exact[3]]
    for column, scale in enumerate([7.0, 7.0, 7.0, 14.0]):
        assert stats.kstest(noisy[:, column] + np.random.default_rng(column).uniform(-0.5, 0.5, 3000),
                            stats.norm(scale=scale).cdf).pvalue > 1e-4  # fmt: skip
        for wrong in (0.85, 1.15):
            assert stats.kstest(noisy[:, column], stats.norm(scale=wrong * scale).cdf).pvalue < 1e-4


@pytest.mark.parametrize("adjacency,length", [("add_remove", math.sqrt(1.25)), ("replace_one", 1.5)])
def test_the_counts_cost_their_share_of_squared_mu(adjacency, length):
    rest = (GaussianEvent(mu=0.3, count=5), GaussianEvent(mu=0.1, count=2))
    squared = 5 * 0.09 + 2 * 0.01
    for share in (0.05, 0.2):
        counts = ClassCounts.from_share(rest, adjacency, share)
        (event,) = counts.privacy_events()
        assert event.mu == pytest.approx(length / counts.sigma)
        assert event.mu**2 == pytest.approx(share * (event.mu**2 + squared))
        total = compute_guarantee((*rest, event), 1e-5).epsilon
        one = compute_guarantee((GaussianEvent(mu=math.sqrt(squared / (1 - share)), count=1),), 1e-5).epsilon
        assert total == pytest.approx(one, rel=1e-9)
    assert ClassCounts.from_share((LaplaceEvent(ratio=0.1, count=3),), adjacency, 0.05) is None


def test_counts_of_another_adjacency_are_refused():
    _, counts = to_vector(UNITS, "replace_one")
    with pytest.raises(ValueError, match="adjacency"):
        ClassCounts(sigma=3.0, adjacency="add_remove").release(counts, DryRunNoise(), CONTEXT)


# ---- what follows from the counts -------------------------------------------------------------------------------


def answers(counts, sigma=10.0, outside=0.0):
    return FirstAnswers(torch.tensor(counts, dtype=torch.float64), sigma, outside)


def test_a_declared_number_is_used_where_the_noise_allows_it():
    given = answers([500.0, 480.0])  # the total has noise of 14
    assert given.estimate_size(None) == 980 and given.estimate_size(1234) == 1234
    assert given.estimate_size(0) == 1  # all units may be held out
    assert given.estimate_size(None, 1000) == 1000 and given.estimate_size(None, 3000) == 980
    assert given.estimate_size(None, 330) == 980 and answers([-30.0, 4.0]).estimate_size(None) == 1


def test_frequencies_are_positive_and_sum_to_one():
    frequency = answers([900.0, -20.0, 100.0]).estimate_frequencies()
    assert frequency.tolist() == pytest.approx([900 / 1005, 5 / 1005, 100 / 1005])


def test_a_share_outside_is_stated_where_noise_does_not_explain_it():
    assert answers([500.0, 500.0], outside=55.0).estimate_outside_share(1000) == 0
    assert answers([500.0, 500.0], outside=900.0).estimate_outside_share(1000) == pytest.approx(0.806, abs=0.01)
    silent = [answers([500.0, 500.0], outside=20 + z).estimate_outside_share(1000)
              for z in np.random.default_rng(0).normal(0, 20, 2000)]  # fmt: skip
    assert np.mean(np.array(silent) > 0.05) < 0.002
