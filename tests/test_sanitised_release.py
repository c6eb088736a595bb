"""The sanitised price: its cost against quadrature over pairs of normals, and its promise."""

import itertools
import math

import numpy as np
import pytest
from scipy import special

from pate_torch.accounting import data_dependent, rdp, sanitised_release, smooth_sensitivity
from pate_torch.accounting.outcomes import Confident, Gnmax, Lnmax
from pate_torch.accounting.sanitised_release import Plan

PLAN = Plan(order=2.5, decay=0.1, sigma=5.0, confidence=0.95)


def normal_divergence(order, mean, scale) -> float:
    """D_a(N(0, 1) || N(mean, scale^2)) by quadrature of the densities."""
    precision = order + (1 - order) / scale**2
    centre, width = (1 - order) * mean / scale**2 / precision, 1 / math.sqrt(precision)
    x = centre + width * np.linspace(-12, 12, 4001)
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
    """By search over every ratio of smooth sensitivities and every difference of prices that neighbours may have."""
    cost = sanitised_release.sanitised_release_cost(order, decay, sigma, shift)
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
    assert printed(20, 0.02, 10) == pytest.approx(0.2715684156920066, rel=1e-12)
    assert sanitised_release.sanitised_release_cost(20, 0.02, 10) == pytest.approx(0.4645, abs=5e-5)


@pytest.mark.parametrize(("order", "decay"), [(1.5, 0.1), (4, 0.05), (12, 0.02), (20, 0.01)])
def test_cost_is_at_most_the_simple_corrections(order, decay):
    cost = sanitised_release.sanitised_release_cost(order, decay, 10)
    first = order / (2 * 10**2 * (1 - 2 * order * decay))
    assert cost <= first + printed(order, decay, 10) - order * math.exp(2 * decay) / 10**2
    if order <= 1 / (4 * decay):
        assert cost <= printed(order, decay, 10)


@pytest.mark.parametrize("model", [Gnmax(sigma=2.0), Lnmax(scale=2.0)], ids=str)
def test_every_pair_of_neighbouring_votes_costs_at_most_the_plan(model):
    """End to end: centre and width of the published normal for every histogram, before the public clipping."""
    rows = [r for r in itertools.product(range(9), repeat=3) if sum(r) == 8]
    centre, width = {}, {}
    for row in rows:
        local = smooth_sensitivity.local_sensitivity(model, [row, row], [PLAN.order])
        smooth = smooth_sensitivity.smooth_sensitivity(local, PLAN.decay)[0]
        centre[row] = smooth_sensitivity.published_price(model, [row, row], [PLAN.order])[0] + smooth * PLAN.shift
        width[row] = smooth * PLAN.sigma
    worst = max(
        closed_divergence(PLAN.order, centre[one] - centre[two], width[one], width[two])
        for one, two in itertools.permutations(rows, 2)
        if sum(abs(a - b) for a, b in zip(one, two, strict=True)) == 2
    )
    assert 0.02 * PLAN.cost < worst <= PLAN.cost * (1 + 1e-9)


# ---- the release -----------------------------------------------------------------------------------------------------

VOTES = [[200, 30, 20], [249, 1, 0], [120, 110, 20]] * 20


def test_published_is_an_upper_bound_exactly_as_often_as_promised():
    model = Gnmax(sigma=40)
    plan = Plan(order=6.0, decay=0.02, sigma=2.0, confidence=0.95)
    price = smooth_sensitivity.published_price(model, VOTES, [6.0])[0]
    below = sanitised_release.release(plan, model, VOTES, -1.6448537 - 1e-4, adaptive=False)
    above = sanitised_release.release(plan, model, VOTES, -1.6448536 + 1e-4, adaptive=False)
    assert below.rdp < price < above.rdp
    assert price >= data_dependent.theorem_rdp(model, VOTES, [6.0])[0] * (1 - 1e-12)


def test_noise_has_the_accounted_scale():
    model = Confident(screen_sigma=150, threshold=150, sigma=40)
    plan = Plan(order=6.0, decay=0.02, sigma=2.0)
    local = smooth_sensitivity.local_sensitivity(model, VOTES, [6.0])
    smooth = smooth_sensitivity.smooth_sensitivity(local, 0.02)[0]
    values = [sanitised_release.release(plan, model, VOTES, z, adaptive=False).rdp for z in (-0.5, 0.0, 0.5)]
    assert np.diff(values) == pytest.approx(smooth, rel=1e-9)


def test_epsilon_includes_the_publication():
    priced = sanitised_release.release(PLAN, Gnmax(sigma=40), VOTES, 0.3, adaptive=False)
    assert priced.cost.orders == (PLAN.order,) and priced.cost.rdp == (PLAN.cost,)
    assert priced.epsilon(1e-5) == pytest.approx(rdp.to_epsilon([PLAN.order], [priced.rdp + PLAN.cost], 1e-5))
    assert priced.epsilon(1e-5) > rdp.to_epsilon([PLAN.order], [priced.rdp], 1e-5)


@pytest.mark.parametrize(("z", "end"), [(-1e6, 0.0), (1e6, 60 * 2.5 / 40**2)])
def test_published_stays_between_public_ends(z, end):
    priced = sanitised_release.release(PLAN, Gnmax(sigma=40), VOTES, z, adaptive=False)
    assert priced.rdp == pytest.approx(end)


def test_choice_is_from_public_votes_and_near_the_best():
    example = sanitised_release.imagined_votes(250, 10, [0.99, 0.97, 0.9, 0.7])
    assert (example.sum(1) == 250).all() and example[0, 0] == 248
    model = Gnmax(sigma=40)
    plan = sanitised_release.choose(model, example, num_queries=1000, delta=1e-5)
    votes = np.repeat(example, 250, axis=0)

    def median_epsilon(candidate):
        return sanitised_release.release(candidate, model, votes, 0.0, adaptive=False).epsilon(1e-5)

    best = median_epsilon(plan)
    for order, decay, sigma in itertools.product((0.8, 1, 1.25), repeat=3):
        other = Plan(order=plan.order * order, decay=plan.decay * decay, sigma=plan.sigma * sigma)
        assert median_epsilon(other) > 0.97 * best
    public = rdp.to_epsilon(rdp.ORDERS, 1000 * data_dependent.data_independent_rdp(model, rdp.ORDERS), 1e-5)
    assert best < 0.7 * public


def test_refusals():
    with pytest.raises(ValueError, match="adaptive"):
        sanitised_release.release(PLAN, Gnmax(sigma=40), VOTES, 0.0, adaptive=True)
    with pytest.raises(ValueError, match="z="):
        sanitised_release.release(PLAN, Gnmax(sigma=40), VOTES, math.nan, adaptive=False)
    with pytest.raises(ValueError, match="decay"):
        Plan(order=20, decay=0.03, sigma=10)
    with pytest.raises(ValueError, match="order"):
        Plan(order=1, decay=0.03, sigma=10)
    with pytest.raises(ValueError, match="confidence"):
        Plan(order=2, decay=0.03, sigma=10, confidence=1.0)
    with pytest.raises(ValueError, match="orders"):
        plan = Plan(order=60, decay=0.001, sigma=10)
        sanitised_release.release(plan, Gnmax(sigma=40), [[250] + 9 * [0]], 0.0, adaptive=False)
    with pytest.raises(ValueError, match="usable"):
        sanitised_release.choose(Gnmax(sigma=40), [[250] + 9 * [0]], num_queries=1, delta=1e-5, orders=[60.0])
