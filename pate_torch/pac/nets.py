"""Explicit constants for the nets and the uniform convergence that the papers leave inside O(.)."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import numpy as np


def compute_log_sauer_shelah(n: float, vc_dimension: int) -> float:
    """Log of sum_{i <= d} C(n, i), for n too large to count."""
    # Factor by factor: the difference of two ln n! would lose all its digits from n = 1e15 on.
    j = np.arange(min(int(n), vc_dimension))
    terms = np.cumsum(np.log((float(n) - j) / (j + 1)))
    return float(np.logaddexp.reduce(np.concatenate(([0.0], terms))))


def find_smallest(holds: Callable[[int], bool], low: int = 1) -> int:
    """The smallest integer >= low where ``holds`` (false, then true) is true: doubling, then bisection."""
    high = low
    while not holds(high):
        low, high = high + 1, 2 * high
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle + 1, high)
    return high


@lru_cache(maxsize=256)
def compute_net_size(eta: float, beta: float, vc_dimension: int) -> int:
    """Number of points N_net(eta, beta) that are an eta-net for a class with probability at least 1 - beta.

    An eta-net meets every symmetric difference of measure above eta. Blumer, Ehrenfeucht, Haussler & Warmuth 1989,
    Theorem A2.1: m >= 8/eta points miss one with probability at most 2 Pi(2m) 2^(-eta m/2), Pi the growth function of
    the differences, at most the class's own squared. Sampling without replacement only helps (DF20, after Lemma 1).

    Source: DF20 Lemma 1, with the constants of Blumer et al.
    """

    def is_net(m: int) -> bool:
        log_failure = math.log(2) + 2 * compute_log_sauer_shelah(2 * m, vc_dimension) - eta * m / 2 * math.log(2)
        return log_failure <= math.log(beta)

    return find_smallest(is_net, low=math.ceil(8 / eta))


@lru_cache(maxsize=256)
def compute_realizable_size(alpha: float, beta: float, vc_dimension: int) -> int:
    """Number of examples that make every consistent hypothesis alpha-accurate with probability 1 - beta.

    For the realizable case. As ``compute_net_size``, with the growth function of the class once: the target is fixed.

    Source: Blumer et al. 1989, Theorem A2.1.
    """

    def is_enough(m: int) -> bool:
        log_failure = math.log(2) + compute_log_sauer_shelah(2 * m, vc_dimension) - alpha * m / 2 * math.log(2)
        return log_failure <= math.log(beta)

    return find_smallest(is_enough, low=math.ceil(8 / alpha))


@lru_cache(maxsize=256)
def compute_uniform_size(alpha: float, beta: float, vc_dimension: int, *, differences: bool = False) -> int:
    """Number of examples that make |empirical - true error| <= alpha for the whole class with probability 1 - beta.

    Vapnik & Chervonenkis 1971: failure at most 4 Pi(2m) exp(-alpha^2 m / 8).

    Args:
        alpha: Deviation.
        beta: Failure probability.
        vc_dimension: VC dimension of the class.
        differences: The same for how often any two hypotheses disagree, Pi being at most squared (NB20 Claim 3.6).

    Source: DF20 Lemma 3, with the constants of Vapnik and Chervonenkis.
    """
    power = 2 if differences else 1

    def is_enough(m: int) -> bool:
        log_failure = math.log(4) + power * compute_log_sauer_shelah(2 * m, vc_dimension) - alpha**2 * m / 8
        return log_failure <= math.log(beta)

    return find_smallest(is_enough)
