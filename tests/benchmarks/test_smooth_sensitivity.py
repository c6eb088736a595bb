"""The cost of publishing a data-dependent cost (PATE 2018, appendix B): quadrature, enumeration, published values."""

import itertools
import math

import numpy as np
import pytest
from scipy import special

from benchmarks.theory.smooth_sensitivity import QueryCost, compute_publication_rdp, compute_smooth_sensitivity
from pate_torch.accounting import data_dependent
from pate_torch.accounting.costs import GaussianNoisyMaxCost
from tests.accounting.exact_divergences import ROW


def normal_divergence(order, mean, scale) -> float:
    """D_a(N(0, 1) || N(mean, scale^2)) by quadrature of the densities."""
    precision = order + (1 - order) / scale**2
    center, width = (1 - order) * mean / scale**2 / precision, 1 / math.sqrt(precision)
    x = center + width * np.linspace(-12, 12, 4001)
    log_p = -(x**2) / 2 - math.log(math.sqrt(2 * math.pi))
    log_q = -(((x - mean) / scale) ** 2) / 2 - math.log(scale * math.sqrt(2 * math.pi))
    log_terms = order * log_p + (1 - order) * log_q + math.log(x[1] - x[0])
    return float(special.logsumexp(log_terms)) / (order - 1)


@pytest.mark.parametrize(
    ("order", "decay", "sigma", "shift"),
    [(20, 0.02, 10, 0), (20, 0.02, 10, 16.4), (2, 0.1, 3, 0), (2, 0.1, 3, 5), (8, 0.03, 40, 60), (5, 0.09, 2, 0.4)],
)
def test_cost_is_the_worst_pair_of_normals(order, decay, sigma, shift):
    """By search over every ratio of smooth sensitivities and every difference of costs that neighbors may have."""
    worst = 0.0
    for x, part in itertools.product(np.linspace(-decay, decay, 21), np.linspace(-1, 1, 11)):
        gap = part * min(1, math.exp(x)) + shift * (1 - math.exp(x))
        worst = max(worst, normal_divergence(order, gap / sigma, math.exp(x)))
    assert compute_publication_rdp(order, decay, sigma, shift) == pytest.approx(worst, rel=1e-9)
    assert compute_publication_rdp(order, 1 / order, sigma, shift) == math.inf


def printed(order, decay, sigma) -> float:
    second = (-0.5 * math.log(1 - 2 * order * decay) + order * decay) / (order - 1)
    return order * math.exp(2 * decay) / sigma**2 + second


def test_the_printed_formula_is_too_small():
    """Two normals whose widths differ by e^b and whose means by one local sensitivity diverge by more than printed."""
    assert printed(20, 0.02, 10) == pytest.approx(0.2715684156920066, rel=1e-12)
    assert compute_publication_rdp(20, 0.02, 10) == pytest.approx(0.4645, abs=5e-5)
    assert normal_divergence(20, math.exp(-0.02) / 10, math.exp(-0.02)) == pytest.approx(0.4645, abs=5e-5)


def test_published_values():
    cost = QueryCost(20.0, 40.0, 250, 10)
    local_D = cost.compute_local_sensitivity(ROW)
    assert cost.log_q0 == pytest.approx(-3.1568730493512733, rel=1e-12)
    assert (local_D[0], local_D.max()) == pytest.approx((1.6246537120e-5, 8.1819863428e-4), rel=1e-6)
    assert compute_smooth_sensitivity(local_D, 0.02) == pytest.approx(2.2416720052e-4, rel=1e-6)
    local_D = QueryCost(10.0, 250.0, 2000, 5).compute_local_sensitivity([1000, 500, 300, 200, 0])
    assert (local_D[:298] == 0).all()
    assert local_D[298:301] == pytest.approx([2.77693450548e-7, 2.10853979548e-6, 2.73113623988e-6], rel=1e-6)
    assert local_D[301:] == pytest.approx(2.73113623988e-6, rel=1e-6)


@pytest.mark.parametrize(("sigma", "order"), [(0.5, 1.5), (1.5, 2.0), (3.0, 3.0)])
def test_sensitivities_bound_what_every_histogram_changes_by(sigma, order):
    """Nine votes in three classes: local sensitivities at all distances by enumeration, and smoothness of the other."""
    cost = QueryCost(order, sigma, 9, 3)
    rows_RC = np.array([row for row in itertools.product(range(10), repeat=3) if sum(row) == 9])
    distance_RR = np.abs(rows_RC[:, None] - rows_RC[None]).sum(2) // 2
    sorted_RC = np.sort(rows_RC, axis=1)[:, ::-1]
    gaps_RC = sorted_RC[:, :1] - sorted_RC[:, 1:]
    cost_R = cost(data_dependent.compute_log_q(gaps_RC, data_dependent.make_gnmax_log_tail(sigma)))
    theorem_R = [data_dependent.compute_rdp(GaussianNoisyMaxCost(sigma), [row], [order])[0] for row in rows_RC]
    assert (cost_R >= np.array(theorem_R) * (1 - 1e-12)).all()
    bound_RD = np.array([cost.compute_local_sensitivity(row) for row in rows_RC])
    change_RR = np.abs(cost_R[:, None] - cost_R[None])
    true_R = np.where(distance_RR == 1, change_RR, 0).max(1)
    within_RD = np.stack([np.where(distance_RR <= d, true_R, 0).max(1) for d in range(10)], axis=1)
    assert cost.has_proved_sensitivity() and (bound_RD >= within_RD * (1 - 1e-9)).all()
    assert (within_RD > 0.3 * bound_RD).any()  # the bound is not vacuous
    for decay in (0.05, 0.5):
        smooth_R = np.array([compute_smooth_sensitivity(bound_D, decay) for bound_D in bound_RD])
        ratio_RR, slack = smooth_R[:, None] / smooth_R[None], 1 + 1e-9
        assert (ratio_RR[distance_RR == 1] <= math.exp(decay) * slack).all()
        assert (np.where(distance_RR == 1, change_RR, 0) <= smooth_R[:, None] * slack).all()


def test_condition_c6_fails_at_some_orders():
    """For K = 250, C = 10, sigma = 40 at orders of about 38 to 122: the rise of the cost is larger at a smaller q."""
    assert [QueryCost(order, 40.0, 250, 10).has_proved_sensitivity() for order in (20.0, 60.0)] == [True, False]
    cost = QueryCost(60.0, 40.0, 250, 10)
    log_q = np.linspace(cost.log_q1 - 1.5, cost.log_q1, 50)
    rise = cost(cost.shift_log_q(log_q, -2)) - cost(log_q)
    assert rise.max() > 1.01 * (60.0 / 40.0**2 - cost(np.array([cost.log_q1]))[0])
