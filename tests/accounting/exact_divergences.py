"""Oracles of the theorems: exact divergences by quadrature and enumeration, and the printed formula in mpmath."""

import functools
import itertools
import math

import mpmath
import numpy as np
from scipy import integrate, special, stats

from pate_torch.accounting import data_dependent
from pate_torch.accounting.costs import (
    ConfidentCost,
    ExponentialCost,
    GaussianNoisyMaxCost,
    LaplaceNoisyMaxCost,
)

ROW = [240, 5, 3, 2, 0, 0, 0, 0, 0, 0]
"""Votes of which costs are published."""


def move_one_vote(row):
    """Every row in which one of the votes is another class's."""
    for a, b in itertools.permutations(range(len(row)), 2):
        if row[a] > 0:
            moved = [int(votes) for votes in row]
            moved[a] -= 1
            moved[b] += 1
            yield tuple(moved)


def compute_log_q(model, row) -> float:
    """Log of the probability that another class than the plurality's wins, by the package."""
    rows = data_dependent.group_votes([row])[0]
    gnmax = isinstance(model, GaussianNoisyMaxCost)
    log_tail = (
        data_dependent.make_gnmax_log_tail(model.sigma) if gnmax else data_dependent.make_lnmax_log_tail(model.scale)
    )
    return float(data_dependent.compute_log_q(rows[:, :1] - rows[:, 1:], log_tail)[0])


def mp_theorem(q: mpmath.mpf, sigma: float, order: float) -> mpmath.mpf:
    """PATE 2018, Theorem 6 with the orders of Prop. 10, as printed."""
    s, a = mpmath.mpf(sigma), mpmath.mpf(order)
    mu2 = s * mpmath.sqrt(mpmath.log(1 / q))
    mu1 = mu2 + 1
    e1, e2 = mu1 / s**2, mu2 / s**2
    big_a = (1 - q) / (1 - (q * mpmath.exp(e2)) ** ((mu2 - 1) / mu2))
    big_b = mpmath.exp(e1) / q ** (1 / (mu1 - 1))
    return mpmath.log((1 - q) * big_a ** (a - 1) + q * big_b ** (a - 1)) / (a - 1)


@functools.cache
def compute_law(model, row: tuple[int, ...]) -> np.ndarray:
    """Probability of each answer, class by class, by adaptive quadrature or by direct evaluation."""
    if isinstance(model, ExponentialCost):
        weight = np.exp(model.rate * (np.array(row) - max(row)))
        return weight / weight.sum()
    if isinstance(model, LaplaceNoisyMaxCost):
        scale = model.scale
        reach = 60 * scale

        def pdf(z):
            return math.exp(-abs(z) / scale) / (2 * scale)

        def cdf(z):
            return math.exp(z / scale) / 2 if z < 0 else 1 - math.exp(-z / scale) / 2
    else:
        scale = model.sigma
        reach = 15 * scale

        def pdf(z):
            return math.exp(-((z / scale) ** 2) / 2) / (scale * math.sqrt(2 * math.pi))

        def cdf(z):
            return special.ndtr(z / scale)

    edges = [min(row) - reach, *sorted(set(row)), max(row) + reach / 15, max(row) + reach]

    def integrand(x, c):
        return pdf(x - row[c]) * math.prod(cdf(x - n) for i, n in enumerate(row) if i != c)

    law = np.zeros(len(row))
    for (low, high), c in itertools.product(itertools.pairwise(edges), range(len(row))):
        law[c] += integrate.quad(integrand, low, high, args=(c,), epsabs=0, epsrel=1e-12)[0]
    if isinstance(model, ConfidentCost):
        top = stats.norm(loc=max(row), scale=model.screen_sigma)
        return np.append(top.sf(model.threshold) * law, top.cdf(model.threshold))
    return law


def compute_renyi(p, q, order) -> float:
    return float(special.logsumexp(order * np.log(p) + (1 - order) * np.log(q)) / (order - 1))


def compute_divergences(model, row, orders) -> tuple[np.ndarray, np.ndarray]:
    """Largest forward and largest two-sided divergence over all neighbors with one vote moved, for each order."""
    forward, two_sided = np.zeros(len(orders)), np.zeros(len(orders))
    p = compute_law(model, tuple(row))
    for neighbor in move_one_vote(row):
        q = compute_law(model, neighbor)
        there = np.array([compute_renyi(p, q, order) for order in orders])
        back = np.array([compute_renyi(q, p, order) for order in orders])
        forward, two_sided = np.maximum(forward, there), np.maximum(two_sided, np.maximum(there, back))
    return forward, two_sided
