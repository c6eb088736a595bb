"""The benchmark of sites deals every record once and plans as sites do, and DP-FedAvg keeps epsilon and learns."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from benchmarks import fedavg, sites
from pate_torch.accounting.accountant import compute_guarantee
from pate_torch.accounting.events import GaussianEvent
from pate_torch.sites import training


@pytest.mark.parametrize("dealing", sites.DEALINGS)
def test_every_record_is_dealt_to_one_site(dealing):
    y = np.random.default_rng(0).integers(0, 4, 2000)
    parts = sites.deal(y, dealing, seed=1)
    assert len(parts) == sites.NUM_SITES and min(map(len, parts)) >= 10
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(len(y)))
    largest_shares = [np.bincount(y[part]).max() / len(part) for part in parts]
    assert (np.mean(largest_shares) > 0.5) == (dealing == "skewed")
    assert not np.array_equal(parts[0], sites.deal(y, dealing, seed=2)[0])


@pytest.mark.parametrize("steps", [1, 8])
def test_the_same_noise_has_the_directions_of_the_sites(steps):
    terms = {"max_sites_per_unit": 1, "adjacency": "add_remove", "colluding": 3, "delta": "1/100000", "classes": 4}
    charter = SimpleNamespace(terms=SimpleNamespace(**terms), sites=sites.NAMES)
    case = SimpleNamespace(split=SimpleNamespace(y=np.zeros(10_049), classes=4), public_PD=np.zeros((3800, 5)))
    for epsilon, sigma in sites.SIGMAS.items():
        expected = training.plan_directions(charter, epsilon, 3800, 10_000, steps)
        dim = sites.Case.plan_dim(case, np.sqrt(steps) * sites.SITES_FACTOR * sigma, steps=steps)
        assert dim == pytest.approx(expected, rel=1e-9)
        assert 1 < dim < 380  # neither end of the range


def test_full_batches_of_fedavg_cost_epsilon():
    noise = fedavg.find_multiplier(0.5, 16, 1.0)
    guarantee = compute_guarantee([GaussianEvent(mu=1 / noise, count=16)], fedavg.DELTA)
    assert guarantee.epsilon == pytest.approx(0.5, rel=1e-6)


@pytest.mark.filterwarnings("ignore:Full backward hook")
def test_fedavg_learns_from_all_sites():
    generator = torch.Generator().manual_seed(0)
    y_N = torch.arange(4000) % 2
    z_ND = torch.randn(4000, 3, generator=generator) / 4
    z_ND[:, 0] += (y_N - 0.5) * torch.where(torch.arange(4000) < 2000, 1.0, 0.0)  # two sites have a signal
    z_ND[:, 1] += (y_N - 0.5) * torch.where(torch.arange(4000) < 2000, 0.0, 1.0)  # and two have another
    parts = [(z_ND[i : i + 1000], y_N[i : i + 1000]) for i in range(0, 4000, 1000)]
    setting = {"rounds": 2, "steps": 4, "rate": 1.0, "learning_rate": 4.0, "clip": 1.0}
    weight = fedavg.run_fedavg(parts, torch.zeros(2, 3), 5.0, setting, flower=False)
    assert ((z_ND @ weight.T).argmax(1) == y_N).float().mean() > 0.85
    assert weight[1, 0] > weight[0, 0] and weight[1, 1] > weight[0, 1]
