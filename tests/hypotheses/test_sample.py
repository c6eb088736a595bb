"""Samples, the charge that comes before the draw, and the sizes that theorems ask for."""

import math

import numpy as np
import pytest

from pate_torch.accounting.events import BoundedRangeEvent
from pate_torch.hypotheses import sample as samples
from pate_torch.hypotheses.sample import Sample, charge_events, draw_without_replacement
from pate_torch.privacy.budget import Budget
from pate_torch.privacy.ledger import Ledger
from pate_torch.privacy.noise import DryRunNoise
from tests.hypotheses.exact_laws import fit, sauer_shelah


def test_bad_samples_are_refused_and_none_shows_its_records():
    for x, y, message in (
        ([1.0, math.nan], [0, 1], "NaN"), (np.zeros((2, 2, 2)), [0, 1], r"x\.shape"),
        (np.zeros(2), [-1, 1], r"sample\.y"), (np.zeros((0, 1)), [], "at least one record"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            Sample(x, np.array(y))
    assert "0.25" not in repr(Sample(np.array([0.25]), np.array([1])))


def test_subsets_are_uniform():
    noise, counts = DryRunNoise(insecure_seed=5), {}
    for _ in range(2000):
        key = tuple(sorted(draw_without_replacement(5, 2, noise).tolist()))
        counts[key] = counts.get(key, 0) + 1
    assert len(counts) == 10 and fit(list(counts.values()), [0.1] * 10) > 1e-4
    assert sorted(draw_without_replacement(4, 4, noise)) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "adjacency,noise,message", [("add_remove", "torch", "add_remove"), ("replace_one", "discrete", "noise='discrete'")]
)
def test_an_account_of_other_neighbors_or_of_discrete_noise_is_charged_nothing(adjacency, noise, message, tmp_path):
    events = (BoundedRangeEvent(eta=0.1),)
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        ledger.open_account("people", budget_epsilon=1.0, delta=1e-5, adjacency=adjacency, unit="record",
                            planned_events=events, noise=noise)  # fmt: skip
        with (
            pytest.raises(ValueError, match=message),
            charge_events(Budget.from_account(ledger, "people"), events, "x"),
        ):
            pass
        assert ledger.get_charges("people") == {}


def test_net_sizes_are_large_enough_in_simulation_and_smallest():
    """Random subsets of the promised size are eta-nets for intervals; far smaller ones are not."""
    generator, eta, beta = np.random.default_rng(1), 0.2, 0.1
    m = samples.compute_net_size(eta, beta, 2)

    def gap(size):  # two intervals that agree on the net differ by at most two of its gaps
        ends = np.sort(np.concatenate([[0.0, 1.0], generator.random(size)]))
        return float(np.sort(np.diff(ends))[-2:].sum())

    assert np.mean([gap(m) > eta for _ in range(200)]) <= beta < np.mean([gap(10) > eta for _ in range(200)])
    # The same for how often two hypotheses disagree, which squares the growth function.
    size = samples.compute_uniform_size(0.3, beta, 1, growth_power=2)
    assert samples.compute_uniform_size(0.3, beta, 1) < size

    def astray(points):  # two thresholds disagree on an interval: the largest and smallest discrepancy of a CDF
        ends = np.sort(generator.random(points))
        return np.ptp(np.concatenate([np.arange(1, points + 1) / points - ends, np.arange(points) / points - ends]))

    assert np.mean([astray(size) > 0.3 for _ in range(200)]) <= beta < np.mean([astray(12) > 0.3 for _ in range(200)])

    def log_failure(k):
        return math.log(2) + 2 * math.log(sauer_shelah(2 * k, 2)) - eta * k / 2 * math.log(2)

    assert log_failure(m) <= math.log(beta) < log_failure(m - 1)


@pytest.mark.parametrize("n,d", [(0, 2), (1, 1), (10, 3), (200, 5), (3, 7), (10**18, 4)])
def test_log_sauer_shelah(n, d):
    assert samples.compute_log_sauer_shelah(n, d) == pytest.approx(math.log(sauer_shelah(n, d)), rel=1e-12)
