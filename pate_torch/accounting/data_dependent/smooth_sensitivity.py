"""Local and smooth sensitivity of the data-dependent cost, which say how much the cost changes if votes move.

Every value that is computed from votes is PRIVATE. Source: PATE 2018 (arXiv 1802.08908), appendix B.

At a fixed order the cost of one query is a function beta(q) (``theorems.py``): the value of the theorem for q below
a public point q0, and the data-independent cost for larger q. One moved vote changes each gap to the winner by at most
2, so q stays in [B_L(q), B_U(q)]. If beta does not decrease (C5), and beta(B_U(q)) - beta(q) does not decrease up to
q1 = B_L(q0) (C6), the local sensitivity is

    beta(B_U(q)) - beta(q)      for q < q1, where the sensitivity rises with q
    beta(q0) - beta(q1)         for q1 <= q <= q0, the maximum
    beta(q0) - beta(B_L(q))     for q > q0, where the sensitivity falls

Among the rows within d moved votes, the sensitivity is therefore largest at the q nearest to [q1, q0]. Both conditions
depend on public quantities only and are checked numerically on a grid, as in the paper. An order at which a condition
fails is refused. Between neighboring data sets one vote may move in every query, so the sensitivities of all
queries at equal distance add up.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import ndtri_exp

from pate_torch.accounting import rdp
from pate_torch.accounting.data_dependent import theorems
from pate_torch.accounting.data_dependent.theorems import Array, ArrayFunction, Counts, VoteRows
from pate_torch.accounting.prices import ConfidentPrice, GaussianNoisyMaxPrice, LaplaceNoisyMaxPrice, OutcomeModel
from pate_torch.core import checks

CurveFunction = Callable[[Array, Array], Array]
_GRID_POINTS = 2048
_CHUNK_FLOATS = 2**18  # largest size of a temporary [rows, distances, orders]


@dataclass(frozen=True, eq=False)
class QueryPrice:
    """Public. The cost beta(q) of one query of GNMax or LNMax at each order, and bounds on the change of the cost.

    Attributes:
        orders_A: Renyi orders.
        num_classes: Number C of classes.
        num_teachers: Number K of teachers.
        log_tail: Function from the gap of a class to the winner, in votes, to ln P(the noise closes this gap).
        inverse_log_tail: Inverse of ``log_tail``.
        log_dependent_moment: Function from (ln q [V], orders [A]) to (a-1) beta, [V, A], for q where the theorem holds.
        data_independent_A: Cost beta for q >= q0.
        log_q0_A: ln q0.
    """

    orders_A: Array
    num_classes: int
    num_teachers: int
    log_tail: ArrayFunction
    inverse_log_tail: ArrayFunction
    log_dependent_moment: CurveFunction
    data_independent_A: Array
    log_q0_A: Array

    def __call__(self, log_q_V: Array) -> Array:
        """Compute the cost beta of one query at ln q [V], [V, A]."""
        # Above all q0 the value of the theorem is not used and may not exist.
        log_moment_VA = self.log_dependent_moment(np.minimum(log_q_V, self.log_q0_A.max()), self.orders_A)
        dependent_VA = log_moment_VA / (self.orders_A - 1)
        return np.where(log_q_V[:, None] < self.log_q0_A, dependent_VA, self.data_independent_A)

    def shift_log_q(self, log_q: Array, gap_increase: float) -> Array:
        """Compute ln q after every gap has increased by ``gap_increase``: ln B_L(q) for 2, ln B_U(q) for -2.

        Among tails u_i that sum to q, the sum of the shifted tails is extreme for equal u_i, because a shifted tail of
        a log-concave distribution is a concave (or convex) function of the tail.
        """
        log_num_rivals = math.log(self.num_classes - 1)
        gap = self.inverse_log_tail(log_q - log_num_rivals) + gap_increase
        return np.minimum(log_num_rivals + self.log_tail(gap), 0.0)

    @property
    def log_q1_A(self) -> Array:
        """Logarithm of q1 = B_L(q0) at each order."""
        return self.shift_log_q(self.log_q0_A, 2)

    @property
    def max_local_sensitivity_A(self) -> Array:
        """Largest local sensitivity, beta(q0) - beta(q1), at each order."""
        return self.data_independent_A - np.diagonal(self(self.log_q1_A))

    def find_valid_orders(self) -> NDArray[np.bool_]:
        """Find the orders at which C5 and C6 hold, bool [A].

        The grid has rows whose gaps to the winner are all equal, from the gap that belongs to q0 up to K + 2 votes.
        """
        log_num_rivals = math.log(self.num_classes - 1)
        gap0_A = self.inverse_log_tail(self.log_q0_A - log_num_rivals)
        holds_A = np.ones(len(self.orders_A), dtype=bool)
        for i in np.flatnonzero(gap0_A < self.num_teachers):
            one = slice(i, i + 1)
            independent_1, log_q0_1 = self.data_independent_A[one], self.log_q0_A[one]
            order_price = replace(
                self, orders_A=self.orders_A[one], data_independent_A=independent_1, log_q0_A=log_q0_1
            )
            # The grid is denser towards q0, where the cost may jump.
            gaps_V = gap0_A[i] + (self.num_teachers + 2 - gap0_A[i]) * np.linspace(1e-6, 1, _GRID_POINTS) ** 3
            price_V = order_price(log_num_rivals + self.log_tail(gaps_V))[:, 0]
            rise_V = price_V - order_price(log_num_rivals + self.log_tail(gaps_V + 2))[:, 0]
            holds_A[i] = (
                price_V[0] <= self.data_independent_A[i] * (1 + 1e-9)
                and _is_nonincreasing(price_V)
                and _is_nonincreasing(rise_V)
            )
        return holds_A

    def compute_local_sensitivity(self, rows_UC: Counts) -> Array:
        """Bound the local sensitivity of all rows within d = 0..K moved votes of each of these rows, [U, D, A]."""
        lowest_UD, highest_UD = _compute_reachable_log_q(rows_UC, self.log_tail)
        log_q1_A = self.log_q1_A
        bound_UDA = np.broadcast_to(self.max_local_sensitivity_A, (*lowest_UD.shape, len(self.orders_A))).copy()
        rising_UD = highest_UD < log_q1_A.max()
        log_q_V = highest_UD[rising_UD]
        rise_VA = self(self.shift_log_q(log_q_V, -2)) - self(log_q_V)
        bound_UDA[rising_UD] = np.where(log_q_V[:, None] < log_q1_A, rise_VA, bound_UDA[rising_UD])
        falling_UD = lowest_UD > self.log_q0_A.min()
        log_q_V = lowest_UD[falling_UD]
        fall_VA = self.data_independent_A - self(self.shift_log_q(log_q_V, 2))
        bound_UDA[falling_UD] = np.where(log_q_V[:, None] > self.log_q0_A, fall_VA, bound_UDA[falling_UD])
        return bound_UDA

    def compute_price(self, rows_UC: Counts) -> Array:
        return self(theorems.compute_log_q(rows_UC[:, :1] - rows_UC[:, 1:], self.log_tail))


@dataclass(frozen=True, eq=False)
class ThresholdPrice:
    """Public. The cost of the check of Confident GNMax, which is a function of the winner's count alone.

    Attributes:
        price_NA: Cost for each count 0..K of the winner, at each order.
        num_classes: Number C of classes.
    """

    price_NA: Array
    num_classes: int

    def compute_local_sensitivity(self, rows_UC: Counts) -> Array:
        """Compute the largest step between adjacent counts within d = 0..K of the winner's count, [U, D, A]."""
        num_teachers = len(self.price_NA) - 1
        lowest_top_count = -(-num_teachers // self.num_classes)  # the winner has at least this many votes
        # step_NA[i] is the larger of the changes to the next lower and the next higher count that can occur.
        change_NA = np.abs(np.diff(self.price_NA[lowest_top_count:], axis=0))
        padded_NA = np.pad(change_NA, ((1, 1), (0, 0)))
        step_NA = np.maximum(padded_NA[:-1], padded_NA[1:])
        top_counts, row_U = np.unique(rows_UC[:, 0] - lowest_top_count, return_inverse=True)
        distances = np.arange(num_teachers + 1)
        bound_TDA = np.stack(
            [
                np.maximum(
                    np.maximum.accumulate(step_NA[top_count:])[np.minimum(distances, len(step_NA) - 1 - top_count)],
                    np.maximum.accumulate(step_NA[top_count::-1])[np.minimum(distances, top_count)],
                )
                for top_count in top_counts
            ]
        )
        return bound_TDA[row_U]

    def compute_price(self, rows_UC: Counts) -> Array:
        return self.price_NA[rows_UC[:, 0]]


def make_price_parts(
    model: OutcomeModel, orders_A: Array, num_teachers: int, num_classes: int
) -> tuple[QueryPrice, list[ThresholdPrice]]:
    """Make the costs of the maximum and of the check, whose sum bounds the cost of one query.

    Raises:
        ValueError: The model has no bound on local sensitivity.
    """
    screen_prices: list[ThresholdPrice] = []
    match model:
        case GaussianNoisyMaxPrice(sigma=sigma) | ConfidentPrice(sigma=sigma):
            log_tail = theorems.make_gnmax_log_tail(sigma)
            independent_A = orders_A / sigma**2
            # At this limit of ln q two conditions of the theorem hold: sqrt(L) >= 1 + 1/sigma, where L = -ln q, and
            # mu1 > a. The assertion checks the third condition.
            limit_A = -np.maximum((1 + 1 / sigma) ** 2, ((orders_A - 0.99) / sigma) ** 2)
            assert theorems.is_gnmax_bound_valid(limit_A, sigma).all()
            compute_log_moment = functools.partial(theorems.compute_gnmax_log_moment, sigma=sigma)

            def inverse_log_tail(log_u: Array) -> Array:
                return -math.sqrt(2) * sigma * ndtri_exp(np.minimum(log_u, 0.0))

            if isinstance(model, ConfidentPrice):
                assert model.threshold is not None
                top_counts = np.arange(num_teachers + 1)
                log_q_N = theorems.compute_threshold_log_q(top_counts, model.threshold, model.screen_sigma)
                price_NA = theorems.compute_gnmax_curve(log_q_N, math.sqrt(2) * model.screen_sigma, orders_A)
                screen_prices = [ThresholdPrice(price_NA=price_NA, num_classes=num_classes)]
        case LaplaceNoisyMaxPrice(scale=scale):
            log_tail = theorems.make_lnmax_log_tail(scale)
            independent_A = rdp.compute_curve(model.privacy_events(1), orders_A)
            limit_A = np.full_like(orders_A, -np.logaddexp(0, 2 / scale) * (1 + 1e-12))
            compute_log_moment = functools.partial(theorems.compute_pate2017_log_moment, epsilon=2 / scale)

            def inverse_log_tail(log_u: Array) -> Array:
                return scale * _invert_lnmax_log_tail(log_u)

        case _:
            raise checks.error("model", model, "has no bound on local sensitivity", "Use the data-independent cost.")
    query_price = QueryPrice(
        orders_A=orders_A,
        num_classes=num_classes,
        num_teachers=num_teachers,
        log_tail=log_tail,
        inverse_log_tail=inverse_log_tail,
        log_dependent_moment=compute_log_moment,
        data_independent_A=independent_A,
        log_q0_A=_find_log_q0(compute_log_moment, orders_A, independent_A, limit_A),
    )
    return query_price, screen_prices


def _invert_lnmax_log_tail(log_u: Array) -> Array:
    """Return the gap, in noise scales, at which ``theorems.make_lnmax_log_tail`` is ``log_u``."""
    # A tail u above 1/2 has a negative gap: minus the gap of the tail 1 - u.
    log_smaller_tail = np.minimum(log_u, np.log(-np.expm1(np.minimum(log_u, -1e-300))))
    x = np.maximum(-log_smaller_tail, 1.0)
    for _ in range(60):  # Newton's method for x - ln((2 + x)/4) + ln u = 0, which is convex and monotone in x
        x = np.maximum(x - (x - np.log((2 + x) / 4) + log_smaller_tail) * (2 + x) / (1 + x), 0.0)
    return np.where(log_u <= -math.log(2), x, -x)


def _find_log_q0(compute_log_moment: CurveFunction, orders_A: Array, independent_A: Array, limit_A: Array) -> Array:
    """Find ln q0, [A]: the largest q, up to a limit, at which the theorem's cost is below the data-independent one."""

    def is_too_high(log_q_A: Array) -> NDArray[np.bool_]:
        return np.diagonal(compute_log_moment(log_q_A, orders_A)) >= (orders_A - 1) * independent_A

    low_A, high_A = limit_A.copy(), limit_A.copy()
    for _ in range(200):
        is_high_A = is_too_high(low_A)
        if not is_high_A.any():
            break
        low_A = np.where(is_high_A, 1.5 * low_A, low_A)
    assert not is_too_high(low_A).any(), "the theorem never beats the data-independent cost"
    high_A = np.where(is_too_high(high_A), high_A, low_A)
    for _ in range(100):
        middle_A = (low_A + high_A) / 2
        is_high_A = is_too_high(middle_A)
        low_A, high_A = np.where(is_high_A, low_A, middle_A), np.where(is_high_A, middle_A, high_A)
    return low_A


def _compute_reachable_log_q(rows_UC: Counts, log_tail: ArrayFunction) -> tuple[Array, Array]:
    """Compute the smallest and largest ln q within d = 0..K moved votes of each (descending) row, [U, D] each.

    Only sorted rows matter, and sorting does not increase the distance of two rows. Tails are convex and decreasing in
    the gap. The sum of tails is therefore smallest if votes move to the winner, each from the rival that is closest at
    that time, and largest if votes move from the winner to the closest rival. Once this gap is closed, q is at least
    1/2, which exceeds every q0, so q is set to 1.
    """
    distances = int(rows_UC[0].sum()) + 1
    lowest_UD, highest_UD = np.empty((len(rows_UC), distances)), np.zeros((len(rows_UC), distances))
    top_U, rivals_UC = rows_UC[:, 0].copy(), rows_UC[:, 1:].copy()
    row_indices = np.arange(len(rows_UC))
    for d in range(distances):
        lowest_UD[:, d] = theorems.compute_log_q(top_U[:, None] - rivals_UC, log_tail)
        closest_rival_U = rivals_UC.argmax(1)
        can_move_U = rivals_UC[row_indices, closest_rival_U] > 0
        rivals_UC[row_indices, closest_rival_U] -= can_move_U
        top_U += can_move_U
    gaps_UC = rows_UC[:, :1] - rows_UC[:, 1:]
    for d in range(distances):
        is_open_U = gaps_UC[:, 0] >= 0
        if not is_open_U.any():
            break
        highest_UD[is_open_U, d] = theorems.compute_log_q(gaps_UC[is_open_U], log_tail)
        gaps_UC -= 1
        gaps_UC[:, 0] -= 1
    return lowest_UD, highest_UD


def _is_nonincreasing(x: Array) -> bool:
    return bool((np.diff(x) <= 1e-12 * np.abs(x[:-1])).all())


def find_usable_orders(
    model: OutcomeModel, orders: ArrayLike, *, num_teachers: int, num_classes: int
) -> NDArray[np.bool_]:
    """Find the orders at which the bound on the local sensitivity holds, bool [A]. All arguments are public."""
    query_price, _ = make_price_parts(model, rdp.check_orders(orders), num_teachers, num_classes)
    return query_price.find_valid_orders()


def compute_total_price(model: OutcomeModel, votes: ArrayLike, orders: ArrayLike) -> Array:
    """Compute the cost of all queries together, [A], whose sensitivity ``compute_local_sensitivity`` bounds.

    This cost is at least ``theorems.compute_rdp``, because it uses the theorem up to q0 only.
    """
    distinct_rows, parts = _check_inputs(model, votes, orders)
    total_A = np.zeros(np.size(orders))
    for part in parts:
        total_A += distinct_rows.count_U @ part.compute_price(distinct_rows.rows_UC)
    return total_A


def compute_local_sensitivity(model: OutcomeModel, votes: ArrayLike, orders: ArrayLike) -> Array:
    """Bound the local sensitivity of ``compute_total_price`` within d = 0..K moved votes in every query, [D, A].

    Raises:
        ValueError: No bound is known for the model, the votes are malformed, or C5 or C6 fails at an order.
    """
    distinct_rows, parts = _check_inputs(model, votes, orders)
    total_DA = np.zeros((distinct_rows.num_teachers + 1, np.size(orders)))
    chunk = max(1, _CHUNK_FLOATS // total_DA.size)
    for part in parts:
        for start in range(0, len(distinct_rows), chunk):
            rows = slice(start, start + chunk)
            bound_UDA = part.compute_local_sensitivity(distinct_rows.rows_UC[rows])
            total_DA += np.tensordot(distinct_rows.count_U[rows].astype(np.float64), bound_UDA, 1)
    assert np.isfinite(total_DA).all()
    return np.maximum.accumulate(total_DA, axis=0)


def compute_smooth_sensitivity(local_DA: ArrayLike, decay: float) -> Array:
    """Compute the smooth sensitivity max_d e^{-decay d} LS(d), [A].

    The smooth sensitivity changes by a factor of at most e^{decay} between neighboring data sets.
    """
    checks.positive("decay", decay)
    bound_DA = np.asarray(local_DA, dtype=np.float64)
    return (np.exp(-decay * np.arange(len(bound_DA)))[:, None] * bound_DA).max(0)


def _check_inputs(
    model: OutcomeModel, votes: ArrayLike, orders: ArrayLike
) -> tuple[VoteRows, list[QueryPrice | ThresholdPrice]]:
    distinct_rows, orders_A = theorems.group_votes(votes), rdp.check_orders(orders)
    num_teachers, num_classes = distinct_rows.num_teachers, distinct_rows.num_classes
    query_price, threshold_prices = make_price_parts(model, orders_A, num_teachers, num_classes)
    is_proved_A = query_price.find_valid_orders()
    if not is_proved_A.all():
        raise checks.error(
            "orders",
            orders_A[~is_proved_A].tolist(),
            "the bound on local sensitivity is not proved at these orders",
            "Leave these orders out, or use the data-independent cost.",
        )
    return distinct_rows, [query_price, *threshold_prices]
