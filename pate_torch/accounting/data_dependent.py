"""Data-dependent Renyi costs by the published theorems: PATE 2017 (arXiv 1610.05755) and PATE 2018 (arXiv 1802.08908).

The theorems bound only the *forward* divergence D_a(M(D) || M(D')), where D is the present data set. The reverse
divergence can be larger. Every cost in this module is a function of private votes, so only the owner of the data may
see the cost. Costs add up only for queries that do not depend on
earlier answers.

Every curve is computed as ln(1 + H)/(a-1) with H >= 0, so that costs down to 1e-300 keep full relative precision.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import log_ndtr

from pate_torch.accounting import costs, rdp
from pate_torch.accounting.costs import Cost, OutcomeModel
from pate_torch.core import checks

Array = NDArray[np.float64]
Counts = NDArray[np.int64]
ArrayFunction = Callable[[Array], Array]
_CHUNK_ROWS = 256  # number of rows priced at once, so that temporaries [256, A] stay in the cache


def group_votes(votes: ArrayLike) -> tuple[Counts, Counts]:
    """Sort each row of the integer votes [Q, C], and count the queries of each distinct row.

    Mechanisms treat all classes alike, so a cost depends on sorted counts only.

    Returns:
        Distinct rows in descending order, [U, C], and the number of queries that have each row, [U].

    Raises:
        ValueError: The rows do not all sum to the same K >= 1. The message shows no count, because counts are private.
    """
    votes_QC = np.asarray(votes)
    if votes_QC.ndim != 2 or votes_QC.shape[0] < 1 or votes_QC.shape[1] < 2:
        rule = "must be a [queries, classes] array with at least one query and two classes"
        raise ValueError(f"votes: {rule}, not of shape {votes_QC.shape}.")
    if not np.issubdtype(votes_QC.dtype, np.integer):
        raise ValueError(f"votes: counts must be integers, not {votes_QC.dtype}.")
    rows_QC = np.sort(votes_QC.astype(np.int64), axis=1)[:, ::-1]
    num_teachers = rows_QC[0].sum()
    if rows_QC.min() < 0 or num_teachers < 1 or (rows_QC.sum(1) != num_teachers).any():
        raise ValueError("votes: counts must be at least 0 and every row must sum to the same number of teachers.")
    return np.unique(rows_QC, axis=0, return_counts=True)


# ---- costs ---------------------------------------------------------------------------------------------------------


def compute_rdp(model: OutcomeModel, votes: ArrayLike, orders: ArrayLike) -> Array:
    """Compute the forward Renyi cost of all queries together, float64 [A].

    The cost of Confident GNMax is the cost of the check plus the cost of GNMax, for *every* query. Counting GNMax
    only for answered queries, realized or expected, would not be valid.

    Args:
        model: Distribution of the answer to one query.
        votes: Integers [Q, C], whose rows sum to K.
        orders: Renyi orders [A], each above 1.

    Raises:
        ValueError: Votes or orders are malformed.
    """
    (rows_UC, count_U), orders_A = group_votes(votes), rdp.check_orders(orders)
    total_A = np.zeros_like(orders_A)
    for log_q_U, curve in _make_cost_terms(model, rows_UC, orders_A):
        for start in range(0, len(rows_UC), _CHUNK_ROWS):
            row_slice = slice(start, start + _CHUNK_ROWS)
            total_A += count_U[row_slice] @ curve(log_q_U[row_slice])
    assert np.isfinite(total_A).all()
    return total_A


def compute_data_dependent_epsilon(votes: ArrayLike, cost: Cost, *, delta: float) -> float:
    """PRIVATE. Compute the forward epsilon of Q answers to these votes, by Renyi divergences at the best order.

    The value depends on private votes and must not be published as it is.
    The queries must not depend on earlier answers. With much noise, ``compute_epsilon`` may be smaller.

    Args:
        votes: Vote counts, integers [Q, C], whose rows sum to K.
        cost: Cost of the mechanism that answers.
        delta: Delta at which epsilon is computed.
    """
    if not isinstance(cost, OutcomeModel) or not cost.has_data_dependent_cost:
        fix = "Use compute_epsilon, or continuous noise without max_answers, and the threshold of Confident GNMax."
        raise checks.error("cost", cost, "has no data-dependent cost", fix)
    return rdp.to_epsilon(rdp.ORDERS, compute_rdp(cost, votes, rdp.ORDERS), delta)


def _make_cost_terms(
    model: OutcomeModel, rows_UC: Counts, orders_A: Array
) -> list[tuple[Array, Callable[[Array], Array]]]:
    """Return the summands of a cost: for each, ln q of all rows, [U], and the function from ln q to costs, [U, A]."""
    gaps_UC = rows_UC[:, :1] - rows_UC[:, 1:]
    match model:
        case costs.GaussianNoisyMaxCost(sigma=sigma):
            log_q_U = compute_log_q(gaps_UC, make_gnmax_log_tail(sigma))
            return [(log_q_U, lambda log_q_U: compute_gnmax_curve(log_q_U, sigma, orders_A))]
        case costs.ConfidentCost():
            assert model.threshold is not None
            log_q_U = compute_threshold_log_q(rows_UC[:, 0], model.threshold, model.screen_sigma)
            screen_sigma = math.sqrt(2) * model.screen_sigma  # a moved vote changes one count; in GNMax it changes two
            screen = (log_q_U, lambda log_q_U: compute_gnmax_curve(log_q_U, screen_sigma, orders_A))
            return [screen, *_make_cost_terms(costs.GaussianNoisyMaxCost(sigma=model.sigma), rows_UC, orders_A)]
        case costs.LaplaceNoisyMaxCost(scale=scale):
            log_q_U, epsilon = compute_log_q(gaps_UC, make_lnmax_log_tail(scale)), 2 / scale
        case costs.ExponentialCost(rate=rate):
            log_q_U, epsilon = compute_exponential_log_q(gaps_UC, rate), 2 * rate
    cap_A = rdp.compute_curve(model.privacy_events(1), orders_A)
    return [(log_q_U, lambda log_q_U: compute_pate2017_curve(log_q_U, epsilon, cap_A, orders_A))]


# ---- ln q, the log-probability that the answer is not the plurality -------------------------------------------------


def make_gnmax_log_tail(sigma: float) -> ArrayFunction:
    """Make the function from a gap in votes to ln P(N(0, 2 sigma^2) > gap) (PATE 2018, Prop. 7)."""
    return lambda gap: log_ndtr(-gap / (math.sqrt(2) * sigma))


def make_lnmax_log_tail(scale: float) -> ArrayFunction:
    """Make the function from a gap in votes to ln P(difference of two Lap(scale) > gap) (PATE 2017, Lemma 4).

    For a gap d >= 0 this is ln (2 + d/scale) / (4 e^{d/scale}).
    """

    def compute_log_tail(gap: Array) -> Array:
        x = np.abs(gap) / scale
        log_tail_of_abs_gap = np.log((2 + x) / 4) - x
        return np.where(gap >= 0, log_tail_of_abs_gap, np.log1p(-np.exp(log_tail_of_abs_gap)))

    return compute_log_tail


def compute_log_q(gaps_UC: Counts, log_tail: ArrayFunction) -> Array:
    """Bound ln P(another answer), [U], by ln of the sum of the tails at the gaps to the winner, and by ln(1 - 1/C).

    Gaps are integers, so a table of tails needs about K evaluations instead of U (C-1).
    """
    low, high = gaps_UC.min(), gaps_UC.max()
    log_q_U = _compute_row_logsumexp(log_tail(np.arange(low, high + 1, dtype=np.float64))[gaps_UC - low])
    return np.minimum(log_q_U, math.log1p(-1 / (gaps_UC.shape[1] + 1)))


def compute_exponential_log_q(gaps_UC: Counts, rate: float) -> Array:
    """Compute the exact ln P(another answer) of the exponential mechanism, [U], at most ln(1 - 1/C)."""
    log_odds_U = _compute_row_logsumexp(-rate * gaps_UC.astype(np.float64))
    return np.minimum(log_odds_U - np.logaddexp(0, log_odds_U), math.log1p(-1 / (gaps_UC.shape[1] + 1)))


def compute_threshold_log_q(top_U: Counts, threshold: float, sigma: float) -> Array:
    """Compute the exact log-probability of the less likely result of the check top + N(0, sigma^2) >= threshold."""
    return log_ndtr(-np.abs(top_U - threshold) / sigma)


def _compute_row_logsumexp(x_UC: Array) -> Array:
    top_U1 = x_UC.max(1, keepdims=True)
    return np.log(np.exp(x_UC - top_U1).sum(1)) + top_U1[:, 0]


# ---- the two theorems ------------------------------------------------------------------------------------------------


def compute_gnmax_curve(log_q_U: Array, sigma: float, orders_A: Array) -> Array:
    """Compute the Renyi curve of GNMax from q by PATE 2018, Theorem 6 with the orders of Prop. 10, [U, A].

    The curve is the data-independent a/sigma^2 where this is smaller or the theorem does not hold. Let
    mu2 = sigma sqrt(ln 1/q), mu1 = mu2 + 1 and e_i = mu_i/sigma^2. For a <= mu1, mu2 > 1, q e^{e2} < 1 and
    ln q <= (mu2 - 1) e2 - mu2 ln( mu1/(mu1-1) mu2/(mu2-1) ) the theorem states
    R(a) = ln[ (1-q) A^{a-1} + q B^{a-1} ]/(a-1), A = (1-q)/(1 - (q e^{e2})^{1 - 1/mu2}), B = e^{e1} q^{-1/(mu1-1)}.
    """
    independent_A = orders_A / sigma**2
    valid_U = is_gnmax_bound_valid(log_q_U, sigma)
    log_q_V = log_q_U[valid_U]
    dependent_VA = compute_gnmax_log_moment(log_q_V, orders_A, sigma)
    dependent_VA /= orders_A - 1
    np.minimum(dependent_VA, independent_A, out=dependent_VA)
    mu1_V = 1 + sigma * np.sqrt(-log_q_V)
    if len(mu1_V) and mu1_V.min() < orders_A.max():
        np.copyto(dependent_VA, independent_A, where=orders_A > mu1_V[:, None])
    return _fill_invalid_rows(valid_U, dependent_VA, independent_A)


def is_gnmax_bound_valid(log_q: Array, sigma: float) -> NDArray[np.bool_]:
    """Whether the conditions of Theorem 6 hold, apart from a <= mu1. Valid at some q implies valid at each smaller q.

    With L = ln 1/q the first two conditions are sqrt(L) > 1/sigma, and the third is
    2 sqrt(L) >= 1/sigma + sigma ln( (mu2 + 1)/(mu2 - 1) ), whose left side increases with L while the right decreases.
    """
    root_l = np.sqrt(-log_q)
    mu2 = sigma * root_l
    is_inside = mu2 > 1
    mu2 = np.where(is_inside, mu2, 2.0)
    return is_inside & (2 * root_l >= 1 / sigma + sigma * np.log1p(2 / (mu2 - 1)))


def compute_gnmax_log_moment(log_q_U: Array, orders_A: Array, sigma: float) -> Array:
    """Compute (a-1) R(a) of Theorem 6, [U, A], which is a bound only where the theorem holds."""
    root_l_U = np.sqrt(-log_q_U)
    mu2_U = sigma * root_l_U
    log_1q_U = _compute_log1mexp(log_q_U)
    log_a_U = log_1q_U - _compute_log1mexp((log_q_U + root_l_U / sigma) * (1 - 1 / mu2_U))
    log_b_U = (mu2_U + 1) / sigma**2 + root_l_U / sigma
    return _compute_log_of_two_terms(log_1q_U, log_a_U, log_q_U, log_b_U, orders_A)


def compute_pate2017_curve(log_q_U: Array, epsilon: float, cap_A: Array, orders_A: Array) -> Array:
    """Compute the Renyi curve, [U, A], of an epsilon-DP mechanism with P(another answer) <= q.

    PATE 2017, Theorem 3: R(a) = ln[ (1-q) ((1-q)/(1 - e^eps q))^{a-1} + q e^{eps (a-1)} ]/(a-1) for q < 1/(e^eps + 1).
    (The condition q < 1/2 would not suffice.) The curve is the data-independent ``cap_A`` where this is smaller or the
    theorem does not hold.
    """
    valid_U = log_q_U < -np.logaddexp(0, epsilon)
    dependent_VA = compute_pate2017_log_moment(log_q_U[valid_U], orders_A, epsilon) / (orders_A - 1)
    return _fill_invalid_rows(valid_U, np.minimum(dependent_VA, cap_A), cap_A)


def compute_pate2017_log_moment(log_q_U: Array, orders_A: Array, epsilon: float) -> Array:
    """Compute (a-1) R(a) of Theorem 3, [U, A], which is a bound only where q < 1/(e^eps + 1)."""
    log_1q_U = _compute_log1mexp(log_q_U)
    log_a_U = log_1q_U - _compute_log1mexp(log_q_U + epsilon)
    return _compute_log_of_two_terms(log_1q_U, log_a_U, log_q_U, np.full_like(log_q_U, epsilon), orders_A)


def _fill_invalid_rows(valid_U: NDArray[np.bool_], dependent_VA: Array, independent_A: Array) -> Array:
    if valid_U.all():
        return dependent_VA
    curve_UA = np.tile(independent_A, (len(valid_U), 1))
    curve_UA[valid_U] = dependent_VA
    return curve_UA


def _compute_log_of_two_terms(
    log_1q_U: Array, log_a_U: Array, log_q_U: Array, log_b_U: Array, orders_A: Array
) -> Array:
    """Compute ln[ (1-q) A^{a-1} + q B^{a-1} ] >= 0, [U, A], precisely although the first term is near 1."""
    powers_2A = np.stack([np.ones_like(orders_A), orders_A - 1])
    first_UA = np.stack([log_1q_U, log_a_U], axis=1) @ powers_2A
    second_UA = np.stack([log_q_U, log_b_U], axis=1) @ powers_2A
    if max(first_UA.max(initial=0), second_UA.max(initial=0)) > 700:  # the exponentials exceed float64
        is_large_UA = np.maximum(first_UA, second_UA) > 700
        log_UA = np.logaddexp(first_UA, second_UA)
        first_UA[is_large_UA] = second_UA[is_large_UA] = 0.0
        return np.where(is_large_UA, log_UA, _compute_log_sum_near_one(first_UA, second_UA))
    return _compute_log_sum_near_one(first_UA, second_UA)


def _compute_log_sum_near_one(first_UA: Array, second_UA: Array) -> Array:
    """Compute ln(e^first + e^second) for a sum of at least 1, in place, because most of the time is spent here."""
    with np.errstate(under="ignore"):
        np.expm1(first_UA, out=first_UA)
        first_UA += np.exp(second_UA, out=second_UA)
    return np.log1p(np.maximum(first_UA, 0.0, out=first_UA), out=first_UA)


def _compute_log1mexp(x: Array) -> Array:
    """Compute ln(1 - e^x) for x < 0, without cancellation at either end (Maechler 2012)."""
    with np.errstate(under="ignore"):
        return np.where(x > -math.log(2), np.log(-np.expm1(x)), np.log1p(-np.exp(x)))
