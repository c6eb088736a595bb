"""Exact divergences of small vote counts by adaptive quadrature and enumeration: the oracle of the theorems' bounds."""

import itertools

import numpy as np
from scipy import integrate, special, stats

from pate_torch.accounting.data_dependent.theorems import (
    ConfidentOutcomes,
    ExponentialOutcomes,
    GNMaxOutcomes,
    LNMaxOutcomes,
)


def compute_law(model, row) -> np.ndarray:
    """Probability of each answer, class by class, by adaptive quadrature or by direct evaluation."""
    row = np.asarray(row, dtype=float)
    match model:
        case ExponentialOutcomes(rate=rate):
            weight = np.exp(rate * (row - row.max()))
            return weight / weight.sum()
        case LNMaxOutcomes(scale=scale):
            noise, points, reach = stats.laplace(scale=scale), sorted(set(row)), 60 * scale
        case GNMaxOutcomes(sigma=sigma) | ConfidentOutcomes(sigma=sigma):
            noise, points, reach = stats.norm(scale=sigma), sorted(set(row)), 15 * sigma
    edges = [row.min() - reach, *points, row.max() + reach / 15, row.max() + reach]

    def integrand(x, c):
        return noise.pdf(x - row[c]) * np.prod(noise.cdf(x - np.delete(row, c)))

    law = np.array(
        [
            sum(
                integrate.quad(integrand, low, high, args=(c,), epsabs=0, epsrel=1e-12)[0]
                for low, high in itertools.pairwise(edges)
            )
            for c in range(len(row))
        ]
    )
    if isinstance(model, ConfidentOutcomes):
        passed = stats.norm.sf(model.threshold, loc=row.max(), scale=model.screen_sigma)
        failed = stats.norm.cdf(model.threshold, loc=row.max(), scale=model.screen_sigma)
        return np.append(passed * law, failed)
    return law


def compute_renyi(p, q, order) -> float:
    return float(special.logsumexp(order * np.log(p) + (1 - order) * np.log(q)) / (order - 1))


def compute_divergences(model, row, orders) -> tuple[np.ndarray, np.ndarray]:
    """Largest forward and largest two-sided divergence over all neighbors with one vote moved, for each order."""
    forward, two_sided = np.zeros(len(orders)), np.zeros(len(orders))
    p = compute_law(model, row)
    for a, b in itertools.permutations(range(len(row)), 2):
        if row[a] == 0:
            continue
        neighbor = list(row)
        neighbor[a] -= 1
        neighbor[b] += 1
        q = compute_law(model, neighbor)
        there = np.array([compute_renyi(p, q, order) for order in orders])
        back = np.array([compute_renyi(q, p, order) for order in orders])
        forward, two_sided = np.maximum(forward, there), np.maximum(two_sided, np.maximum(there, back))
    return forward, two_sided
