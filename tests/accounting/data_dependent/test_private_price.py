"""The published cost: its cost against quadrature over pairs of normals, its confidence and its noise."""

import itertools
import math

import numpy as np
import pytest
from scipy import special

from pate_torch.accounting import accountant as accounting
from pate_torch.accounting import rdp
from pate_torch.accounting.data_dependent import private_price, smooth_sensitivity, theorems
from pate_torch.accounting.data_dependent.private_price import PublicationPlan
from pate_torch.accounting.events import RdpCurveEvent
from pate_torch.accounting.prices import GaussianNoisyMaxPrice, LaplaceNoisyMaxPrice
from pate_torch.mechanisms.gaussian import GNMax
from pate_torch.mechanisms.private_epsilon import PrivateEpsilon

PLAN = PublicationPlan(order=2.5, decay=0.1, sigma=5.0, confidence=0.95)


def normal_divergence(order, mean, scale) -> float:
    """D_a(N(0, 1) || N(mean, scale^2)) by quadrature of the densities."""
    precision = order + (1 - order) / scale**2
    center, width = (1 - order) * mean / scale**2 / precision, 1 / math.sqrt(precision)
    x = center + width * np.linspace(-12, 12, 4001)
    log_p = -(x**2) / 2 - math.log(math.sqrt(2 * math.pi))
    log_q = -(((x - mean) / scale) ** 2) / 2 - math.log(scale * math.sqrt(2 * math.pi))
    log_terms = order * log_p + (1 - order) * log_q + math.log(x[1] - x[0])
    return float(special.logsumexp(log_terms)) / (order - 1)


def closed_divergence(order, gap, scale, other_scale) -> float:
    v = order * other_scale**2 + (1 - order) * scale**2
    if v <= 0:
        return math.inf
    return order * gap**2 / (2 * v) + math.log(other_scale / scale) + math.log(other_scale**2 / v) / (2 * (order - 1))


@pytest.mark.parametrize(
    ("order", "decay", "sigma", "shift"),
    [(20, 0.02, 10, 0), (20, 0.02, 10, 16.4), (2, 0.1, 3, 0), (2, 0.1, 3, 5), (8, 0.03, 40, 60), (5, 0.09, 2, 0.4)],
)
def test_cost_is_the_worst_pair_of_normals(order, decay, sigma, shift):
    """By search over every ratio of smooth sensitivities and every difference of costs that neighbors may have."""
    cost = private_price.compute_publication_rdp(order, decay, sigma, shift)
    worst = 0.0
    for x in np.linspace(-decay, decay, 41):
        ratio = math.exp(x)
        for part in np.linspace(-1, 1, 21):
            gap = part * min(1, ratio) + shift * (1 - ratio)
            value = normal_divergence(order, gap / sigma, ratio)
            assert value == pytest.approx(closed_divergence(order, gap, sigma, sigma * ratio), rel=1e-9, abs=1e-12)
            worst = max(worst, value)
    assert cost == pytest.approx(worst, rel=1e-9)


def printed(order, decay, sigma) -> float:
    second = (-0.5 * math.log(1 - 2 * order * decay) + order * decay) / (order - 1)
    return order * math.exp(2 * decay) / sigma**2 + second


def test_the_printed_formula_is_too_small():
    """Two normals whose widths differ by e^b and whose means by one local sensitivity diverge by more than printed."""
    assert printed(20, 0.02, 10) == pytest.approx(0.2715684156920066, rel=1e-12)
    assert private_price.compute_publication_rdp(20, 0.02, 10) == pytest.approx(0.4645, abs=5e-5)


@pytest.mark.parametrize(("order", "decay"), [(1.5, 0.1), (4, 0.05), (12, 0.02), (20, 0.01)])
def test_cost_is_at_most_the_simple_corrections(order, decay):
    cost = private_price.compute_publication_rdp(order, decay, 10)
    first = order / (2 * 10**2 * (1 - 2 * order * decay))
    assert cost <= first + printed(order, decay, 10) - order * math.exp(2 * decay) / 10**2
    if order <= 1 / (4 * decay):
        assert cost <= printed(order, decay, 10)


@pytest.mark.parametrize("model", [GaussianNoisyMaxPrice(sigma=2.0), LaplaceNoisyMaxPrice(scale=2.0)], ids=str)
def test_every_pair_of_neighboring_votes_costs_at_most_the_plan(model):
    """End to end: center and width of the published normal for every histogram, before the public clipping."""
    rows = [r for r in itertools.product(range(9), repeat=3) if sum(r) == 8]
    center, width = {}, {}
    for row in rows:
        local = smooth_sensitivity.compute_local_sensitivity(model, [row, row], [PLAN.order])
        smooth = smooth_sensitivity.compute_smooth_sensitivity(local, PLAN.decay)[0]
        center[row] = smooth_sensitivity.compute_total_price(model, [row, row], [PLAN.order])[0] + smooth * PLAN.shift
        width[row] = smooth * PLAN.sigma
    worst = max(
        closed_divergence(PLAN.order, center[one] - center[two], width[one], width[two])
        for one, two in itertools.permutations(rows, 2)
        if sum(abs(a - b) for a, b in zip(one, two, strict=True)) == 2
    )
    assert 0.02 * PLAN.publication_rdp < worst <= PLAN.publication_rdp * (1 + 1e-9)


VOTES = [[200, 30, 20], [249, 1, 0], [120, 110, 20]] * 20


def test_published_is_an_upper_bound_exactly_as_often_as_promised():
    model = GaussianNoisyMaxPrice(sigma=40)
    plan = PublicationPlan(order=6.0, decay=0.02, sigma=2.0, confidence=0.95)
    price = smooth_sensitivity.compute_total_price(model, VOTES, [6.0])[0]
    below = private_price.compute_private_price(plan, model, VOTES, -1.6448537 - 1e-4)
    above = private_price.compute_private_price(plan, model, VOTES, -1.6448536 + 1e-4)
    assert below.rdp < price < above.rdp
    assert price >= theorems.compute_rdp(model, VOTES, [6.0])[0] * (1 - 1e-12)


def test_epsilon_includes_the_publication():
    priced = private_price.compute_private_price(PLAN, GaussianNoisyMaxPrice(sigma=40), VOTES, 0.3)
    event = PLAN.publication_event
    assert dict(zip(event.orders, event.rdp, strict=True))[PLAN.order] == PLAN.publication_rdp
    assert priced.compute_epsilon(1e-5) == pytest.approx(
        rdp.to_epsilon([PLAN.order], [priced.rdp + PLAN.publication_rdp], 1e-5)
    )
    assert priced.compute_epsilon(1e-5) > rdp.to_epsilon([PLAN.order], [priced.rdp], 1e-5)


def test_its_cost_is_charged_at_every_order_where_it_is_finite():
    """One order alone would drag all that is composed with it there: 8.245 where 3.133 is proved."""
    plan = PublicationPlan(order=6.0, decay=0.02, sigma=20.0)
    curve = plan.publication_event
    end = 1 / (1 - math.exp(-2 * plan.decay))
    assert set(curve.orders) == {6.0, *(a for a in rdp.ORDERS.tolist() if a < end)}
    for order, cost in list(zip(curve.orders, curve.rdp, strict=True))[::9]:
        worst = max(
            normal_divergence(order, gap / plan.sigma, ratio)
            for ratio in np.exp(np.linspace(-plan.decay, plan.decay, 21))
            for part in (-1, 1)
            if (gap := part * min(1, ratio) + plan.shift * (1 - ratio)) is not None
        )
        assert cost == pytest.approx(worst, rel=1e-6)
    guesses = private_price.make_example_votes(5000, 10, PrivateEpsilon().agreement)
    plan = private_price.choose_plan(GaussianNoisyMaxPrice(sigma=100), guesses, num_queries=2000, delta=1e-6)
    labels = GNMax(sigma=100.0).privacy_events(2000)
    total = accounting.compute_guarantee([*labels, *PrivateEpsilon.privacy_events(plan)], 1e-6).epsilon
    alone = accounting.compute_guarantee(
        [*labels, RdpCurveEvent(orders=(plan.order,), rdp=(plan.publication_rdp,), source="")], 1e-6
    ).epsilon
    assert total == pytest.approx(3.133, abs=5e-4) and alone == pytest.approx(8.245, abs=5e-4)


@pytest.mark.parametrize(("z", "end"), [(-1e6, 0.0), (1e6, 60 * 2.5 / 40**2)])
def test_published_stays_between_public_ends(z, end):
    priced = private_price.compute_private_price(PLAN, GaussianNoisyMaxPrice(sigma=40), VOTES, z)
    assert priced.rdp == pytest.approx(end)


def test_choice_is_from_public_votes_and_near_the_best():
    example = private_price.make_example_votes(250, 10, [0.99, 0.97, 0.9, 0.7])
    assert (example.sum(1) == 250).all() and example[0, 0] == 248
    model = GaussianNoisyMaxPrice(sigma=40)
    plan = private_price.choose_plan(model, example, num_queries=1000, delta=1e-5)
    votes = np.repeat(example, 250, axis=0)

    def median_epsilon(candidate):
        return private_price.compute_private_price(candidate, model, votes, 0.0).compute_epsilon(1e-5)

    best = median_epsilon(plan)
    for order, decay, sigma in itertools.product((0.8, 1, 1.25), repeat=3):
        other = PublicationPlan(order=plan.order * order, decay=plan.decay * decay, sigma=plan.sigma * sigma)
        assert median_epsilon(other) > 0.97 * best
    public = rdp.to_epsilon(rdp.ORDERS, 1000 * rdp.compute_curve(model.privacy_events(1), rdp.ORDERS), 1e-5)
    assert best < 0.7 * public


def test_refusals(monkeypatch):
    model, unanimous, far = (
        GaussianNoisyMaxPrice(sigma=40),
        [[250] + 9 * [0]],
        PublicationPlan(order=60, decay=0.001, sigma=10),
    )
    for plan, votes, z, words in ((PLAN, VOTES, math.nan, "z="), (far, unanimous, 0.0, "orders")):
        with pytest.raises(ValueError, match=words):
            private_price.compute_private_price(plan, model, votes, z)
    for order, confidence, words in ((20, 0.95, "decay"), (1, 0.95, "order"), (2, 1.0, "confidence")):
        with pytest.raises(ValueError, match=words):
            PublicationPlan(order=order, decay=0.03, sigma=10, confidence=confidence)
    monkeypatch.setattr(private_price, "CANDIDATE_ORDERS", (60.0,))
    with pytest.raises(ValueError, match="usable"):
        private_price.choose_plan(model, unanimous, num_queries=1, delta=1e-5)
