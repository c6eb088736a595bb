"""PATE 2018 (arXiv 1802.08908), appendix B, corrected: what it costs to publish the data-dependent cost of GNMax.

At a fixed order the cost of one query is a function beta(q) of the probability q that the answer is not the plurality:
the value of Theorem 6 for q below a public point q0, and the data-independent cost for larger q. One moved vote changes
each gap to the winner by at most 2, so q stays in [B_L(q), B_U(q)]. If beta does not decrease (C5), and beta(B_U(q)) -
beta(q) does not decrease up to q1 = B_L(q0) (C6), the local sensitivity is

    beta(B_U(q)) - beta(q)      for q < q1, where the sensitivity rises with q
    beta(q0) - beta(q1)         for q1 <= q <= q0, the maximum
    beta(q0) - beta(B_L(q))     for q > q0, where the sensitivity falls

Among the rows within d moved votes, the sensitivity is therefore largest at the q nearest to [q1, q0].
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import brentq
from scipy.special import ndtri_exp

from pate_torch.accounting.data_dependent import Array, compute_gnmax_log_moment, compute_log_q, make_gnmax_log_tail

_GRID_POINTS = 2048


def compute_publication_rdp(order: float, decay: float, sigma: float, shift: float = 0.0) -> float:
    """Compute the Renyi cost of publishing f + SS (shift + sigma N(0, 1)), SS the decay-smooth sensitivity of f.

    With a the order, b the decay, m the shift and k = 1 - a (1 - e^{-2b}) > 0 (else the cost is infinite):

        R = a (e^{-b} + m (1 - e^{-b}))^2 / (2 sigma^2 k) - (a b + ln(k)/2) / (a - 1).

    Proof. Neighbors have S' = S e^x with |x| <= b, and |f - f'| <= min(S, S'). Between normals,
    R = a D^2/(2 v) + ln(s'/s) + ln(s'^2/v)/(2 (a-1)), v = a s'^2 + (1-a) s^2. Here v = sigma^2 S^2 k(x),
    k(x) = 1 + a (e^{2x} - 1), and D <= S (min(1, e^x) + m |1 - e^x|). With u = e^{-|x|} and n = u + m (1 - u) the first
    term is at most a n^2/(2 sigma^2 (1 - a (1 - u^2))) for x < 0 and a n^2/(2 sigma^2 (u^2 + a (1 - u^2))) for x > 0.
    The second denominator is the larger, and the first bound grows with |x|, as n/u and u^2/(1 - a (1 - u^2)) do. The
    rest is g(x) = (a x - ln(k(x))/2)/(a-1), where g' has the sign of x and g(-|x|) >= g(|x|). So x = -b is the worst
    case. A pair of neighbors can attain the worst case, so R is tight.

    The printed formula, a e^{2b}/sigma^2 + (a b - ln(1 - 2ab)/2)/(a-1) for a < 1/(2b), has a first term that is too
    small near the end of its range and a second term that is too large everywhere.
    """
    k = 1 + order * math.expm1(-2 * decay)
    if k <= 0:
        return math.inf
    scaled_shift = math.exp(-decay) - shift * math.expm1(-decay)
    return order * scaled_shift**2 / (2 * sigma**2 * k) - (order * decay + math.log(k) / 2) / (order - 1)


def compute_smooth_sensitivity(local_D: ArrayLike, decay: float) -> float:
    """Compute max_d e^{-decay d} LS(d), which changes by a factor of at most e^decay between neighboring data sets."""
    bound_D = np.asarray(local_D)
    return float((np.exp(-decay * np.arange(len(bound_D))) * bound_D).max())


@dataclass(frozen=True)
class QueryCost:
    """The cost beta(q) of one query of GNMax at one Renyi order.

    Attributes:
        order: Renyi order.
        sigma: Standard deviation of the noise, in votes.
        num_teachers: Number K of teachers.
        num_classes: Number C of classes.
    """

    order: float
    sigma: float
    num_teachers: int
    num_classes: int

    def __call__(self, log_q_V: Array) -> Array:
        """Compute beta at ln q, [V]."""
        dependent_V = self._compute_theorem(np.minimum(log_q_V, self.log_q0))
        return np.where(log_q_V < self.log_q0, dependent_V, self.order / self.sigma**2)

    def _compute_theorem(self, log_q_V: Array) -> Array:
        return compute_gnmax_log_moment(log_q_V, np.array([self.order]), self.sigma)[:, 0] / (self.order - 1)

    @cached_property
    def log_q0(self) -> float:
        """The logarithm of the largest q at which the theorem holds and is below the data-independent cost."""

        def compute_excess(log_q: float) -> float:
            return float(self._compute_theorem(np.array([log_q]))[0]) - self.order / self.sigma**2

        high = -max((1 + 1 / self.sigma) ** 2, ((self.order - 0.99) / self.sigma) ** 2)  # the theorem holds below
        if compute_excess(high) < 0:
            return high
        low = 1.5 * high
        while compute_excess(low) >= 0:
            low *= 1.5
        return float(brentq(compute_excess, low, high, xtol=1e-14, rtol=1e-14))

    @property
    def log_q1(self) -> float:
        """The logarithm of q1 = B_L(q0)."""
        return float(self.shift_log_q(np.array([self.log_q0]), 2)[0])

    def shift_log_q(self, log_q_V: Array, gap_increase: float) -> Array:
        """Compute ln q after every gap has increased by ``gap_increase``: ln B_L(q) for 2, ln B_U(q) for -2.

        Among tails u_i that sum to q, the sum of the shifted tails is extreme for equal u_i, because a shifted tail of
        a log-concave distribution is a concave (or convex) function of the tail.
        """
        log_num_rivals = math.log(self.num_classes - 1)
        gap_V = -math.sqrt(2) * self.sigma * ndtri_exp(np.minimum(log_q_V - log_num_rivals, 0.0))
        return np.minimum(log_num_rivals + make_gnmax_log_tail(self.sigma)(gap_V + gap_increase), 0.0)

    def has_proved_sensitivity(self) -> bool:
        """Whether C5 and C6 hold on a grid of rows with equal gaps, from the gap of q0 up to K + 2 votes."""
        log_num_rivals, log_tail = math.log(self.num_classes - 1), make_gnmax_log_tail(self.sigma)
        gap0 = -math.sqrt(2) * self.sigma * float(ndtri_exp(self.log_q0 - log_num_rivals))
        if gap0 >= self.num_teachers:
            return True
        # The grid is denser towards q0, where the cost may jump.
        gaps_V = gap0 + (self.num_teachers + 2 - gap0) * np.linspace(1e-6, 1, _GRID_POINTS) ** 3
        cost_V = self(log_num_rivals + log_tail(gaps_V))
        rise_V = cost_V - self(log_num_rivals + log_tail(gaps_V + 2))
        return all(bool((np.diff(x) <= 1e-12 * np.abs(x[:-1])).all()) for x in (cost_V, rise_V))

    def compute_local_sensitivity(self, row: ArrayLike) -> Array:
        """Bound the local sensitivity of all rows within d = 0..K moved votes of the integers ``row`` [C], [D]."""
        lowest_D, highest_D = self._compute_reachable_log_q(np.sort(np.asarray(row))[::-1])
        maximum = self.order / self.sigma**2 - float(self(np.array([self.log_q1]))[0])
        rise_D = self(self.shift_log_q(highest_D, -2)) - self(highest_D)
        fall_D = self.order / self.sigma**2 - self(self.shift_log_q(lowest_D, 2))
        bound_D = np.where(lowest_D > self.log_q0, fall_D, maximum)
        return np.maximum.accumulate(np.where(highest_D < self.log_q1, rise_D, bound_D))

    def _compute_reachable_log_q(self, row_C: Array) -> tuple[Array, Array]:
        """Compute the smallest and largest ln q within d = 0..K moved votes of a descending row, [D] each.

        Tails are convex and decreasing in the gap. Their sum is therefore smallest if votes move to the winner, each
        from the rival that is closest at that time, and largest if votes move from the winner to the closest rival.
        Once this gap is closed, q is at least 1/2, which exceeds every q0, so q is set to 1.
        """
        log_tail, distances = make_gnmax_log_tail(self.sigma), self.num_teachers + 1
        lowest_D, highest_D = np.empty(distances), np.zeros(distances)
        top, rivals = int(row_C[0]), row_C[1:].copy()
        for d in range(distances):
            lowest_D[d] = compute_log_q((top - rivals)[None], log_tail)[0]
            closest = rivals.argmax()
            if rivals[closest] > 0:
                rivals[closest] -= 1
                top += 1
        gaps = row_C[0] - row_C[1:]
        for d in range(int(gaps[0]) // 2 + 1):
            highest_D[d] = compute_log_q(gaps[None], log_tail)[0]
            gaps = gaps - 1
            gaps[0] -= 1
        return lowest_D, highest_D
