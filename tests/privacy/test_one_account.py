"""One account for all mechanisms: in several orders, what is admitted, what is charged, and what is claimed.

The totals are compared with independent compositions: the privacy loss distributions of dp_accounting and, for the
cap, the sums of mu^2 and of Renyi divergences by mpmath and by numerical integration.
"""

import functools
import math

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution as library
from mpmath import mp, mpf
from scipy import integrate, optimize, special, stats

from pate_torch.accounting.events import (
    BoundedRangeEvent,
    DeltaEvent,
    GaussianEvent,
    LaplaceEvent,
    PureDPEvent,
    SampledGaussianEvent,
    get_pure_epsilon,
)
from pate_torch.mechanisms.gaussian import GNMax
from pate_torch.mechanisms.gradient_descent import GradientDescent
from pate_torch.mechanisms.sparse_vector import SparseVector
from pate_torch.privacy.ledger import Ledger

DELTA, CAP = 1e-5, 10.0
RELEASES = {
    "gaussian": GNMax(sigma=40.0).privacy_events(50),
    "sparse_vector": SparseVector(epsilon=0.5, delta=DELTA, max_failures=3).privacy_events(100),
    "sparse_vector_2": SparseVector(epsilon=0.8, delta=DELTA, max_failures=1).privacy_events(50),
    "learn": (BoundedRangeEvent(eta=0.3),),
    "private_prediction": (PureDPEvent(epsilon=0.02, count=20),),
    "gradients": GradientDescent(sigma=60.0, steps=8, clip_norm=0.5, adjacency="add_remove").privacy_events(1),
    "dpsgd": (SampledGaussianEvent(rate=0.02, noise_multiplier=2.0, steps=150),),
    "dpsgd_2": (SampledGaussianEvent(rate=0.05, noise_multiplier=4.0, steps=40),),
    "laplace": (LaplaceEvent(ratio=0.05, count=4),),
}
ORDERS = {
    "Gaussian answers first": list(RELEASES),
    "sparse vector first": ["sparse_vector", *(name for name in RELEASES if name != "sparse_vector")],
    "learn first": ["learn", *(name for name in RELEASES if name != "learn")],
    "gradients first, DP-SGD last": [
        *("gradients", "gaussian", "learn", "laplace", "private_prediction"),
        *("sparse_vector_2", "sparse_vector", "dpsgd_2", "dpsgd"),
    ],
    "DP-SGD first": ["dpsgd", "dpsgd_2", *(name for name in RELEASES if not name.startswith("dpsgd"))],
}


@functools.cache
def compose_by_library(events, *, rounds_up):
    """Compute epsilon at DELTA of all events, fixed beforehand, by the loss distributions of dp_accounting.

    With ``rounds_up`` the result is an upper limit, else a lower limit, for which exponential mechanisms count nothing.
    """
    grid = {"value_discretization_interval": 2e-4, "pessimistic_estimate": rounds_up}
    total, failure = library.identity(**grid), 0.0
    for event in events:
        count = event.count
        match event:
            case DeltaEvent():
                failure += count * event.delta
                continue
            case BoundedRangeEvent() if not rounds_up:
                continue
            case GaussianEvent():
                part, count = library.from_gaussian_mechanism(1 / (event.mu * math.sqrt(count)), **grid), 1
            case SampledGaussianEvent():
                part = library.from_gaussian_mechanism(event.noise_multiplier, sampling_prob=event.rate, **grid)
                count *= event.steps
            case LaplaceEvent():
                part = library.from_laplace_mechanism(1 / event.ratio, **grid)
            case _:
                part = library.from_randomized_response(2 / (1 + math.exp(get_pure_epsilon(event))), 2, **grid)
        total = total.compose(part.self_compose(count))
    return total.get_epsilon_for_delta(DELTA - failure)


def compute_dominating_mu(pure_epsilon):
    with mp.workdps(30):
        return float(2 * mp.sqrt(2) * mp.erfinv(mp.tanh(mpf(pure_epsilon) / 2)))


def integrate_divergence(event, order):
    """The Renyi divergence of one event at an order, by integration over the noise, the larger of both directions."""
    match event:
        case GaussianEvent():
            return order * event.mu**2 / 2
        case SampledGaussianEvent():
            q, z = event.rate, event.noise_multiplier

            def mean(power):
                def integrand(x):
                    log_ratio = special.logsumexp([math.log1p(-q), math.log(q) + (2 * x - 1) / (2 * z * z)])
                    return math.exp(power * log_ratio - x * x / (2 * z * z)) / (z * math.sqrt(2 * math.pi))

                return integrate.quad(integrand, -12 * z, 12 * z + order, points=[0, 1], limit=500)[0]

            both = math.log(mean(order)) / (order - 1), math.log(mean(1 - order)) / (order - 1)
            return event.steps * max(both)
        case LaplaceEvent():
            t, a = event.ratio, order
            return math.log(a / (2 * a - 1) * math.exp((a - 1) * t) + (a - 1) / (2 * a - 1) * math.exp(-a * t)) / (
                a - 1
            )
        case BoundedRangeEvent():  # the worst pair of two outcomes, whose losses are t and t - eta
            t = np.linspace(0, event.eta, 20_001)[1:-1]
            q = (1 - np.exp(t - event.eta)) / (np.exp(t) - np.exp(t - event.eta))
            return np.log(q * np.exp(order * t) + (1 - q) * np.exp(order * (t - event.eta))).max() / (order - 1)
        case _:  # randomized response
            e, a = get_pure_epsilon(event), order
            p = 1 / (1 + math.exp(-e))
            return math.log(p**a * (1 - p) ** (1 - a) + (1 - p) ** a * p ** (1 - a)) / (a - 1)


def recompute_cost(account):
    """The sum that the filter keeps below its capacity, from the reserved events, and their failures."""
    scalar, failure = 0.0, 0.0
    for event in account.reserved_events:
        if isinstance(event, DeltaEvent):
            failure += event.count * event.delta
        elif account.filter.kind == "rdp":
            scalar += event.count * integrate_divergence(event, account.filter.order)
        elif isinstance(event, SampledGaussianEvent):
            failure += event.count * event.failure_delta
            scalar += event.count * compute_least_mu(event) ** 2
        else:
            mu = event.mu if isinstance(event, GaussianEvent) else compute_dominating_mu(get_pure_epsilon(event))
            scalar += event.count * mu**2
    return scalar, failure


def compute_least_mu(run):
    """The mu of the Gaussian whose delta is, at the run's epsilon at DELTA, what the failure leaves of DELTA."""
    epsilon = compose_by_library((run,), rounds_up=False)

    def excess(mu):
        delta = stats.norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * stats.norm.cdf(-mu / 2 - epsilon / mu)
        return delta - (DELTA - run.failure_delta)

    return optimize.brentq(excess, 1e-2, 10)


SAME_FILTERS = pytest.mark.slow(reason="repeats the filters of the other orders")


@pytest.mark.parametrize(
    "order",
    [
        *("Gaussian answers first", "sparse vector first", "DP-SGD first"),
        pytest.param("learn first", marks=SAME_FILTERS),
        pytest.param("gradients first, DP-SGD last", marks=SAME_FILTERS),
    ],
)
def test_every_mechanism_is_charged_to_one_account_in_any_order(order, tmp_path):
    assert sorted(ORDERS[order]) == sorted(RELEASES)
    terms = {"budget_epsilon": CAP, "delta": DELTA, "adjacency": "add_remove", "unit": "record"}
    names = ORDERS[order]
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        ledger.open_account("clinic", **terms, planned_events=RELEASES[names[0]])
        for name in names:
            reservation = ledger.reserve("clinic", RELEASES[name], fingerprint="", mechanism=name, run=name)
            ledger.commit(reservation, reservation.reserved_events)
        (account,) = ledger.verify()
    spent = account.filter.to_epsilon(account.total_cost)
    events = tuple(event for release in RELEASES.values() for event in release)
    least, most = (compose_by_library(events, rounds_up=rounds_up) for rounds_up in (False, True))
    # The cap: the filter adds up what an independent computation adds up, and converts it to no less than is true.
    scalar, failure = recompute_cost(account)
    if account.filter.kind == "rdp":
        assert account.total_cost.scalar == pytest.approx(scalar, rel=1e-6)
    else:  # a dominating mu of DP-SGD is at least the least mu
        assert scalar <= account.total_cost.scalar <= 1.02 * scalar
    assert account.total_cost.delta == pytest.approx(failure, rel=1e-9) and failure <= account.filter.delta_reserve
    assert most <= spent <= CAP
    # The claim, for releases that were planned in advance: no less than their composition, and little more.
    assert least <= account.guarantee.epsilon <= min(spent, 1.03 * most)
