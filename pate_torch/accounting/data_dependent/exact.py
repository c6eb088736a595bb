"""Exact data-dependent Renyi prices: the released answer is a categorical variable, so its divergence is computed.

Per query and order, the largest divergence over all moves of one vote; summed over queries (an upper bound, since one
neighbor fixes every query's move). *Forward* is D_a(M(D) || M(D')), what the published theorems bound; *two-sided* is
the larger of it and the reverse, what differential privacy asks of this data set. PRIVATE, like every data-dependent
price, and additive only for queries that do not depend on earlier answers.

Each price comes as a bracket: quadrature has a proved relative error (``outcome_laws.py``), rounding an allowance, and
both are carried to the divergence. The upper end is the one to report.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from pate_torch.accounting.data_dependent import outcome_laws, theorems, vote_rows
from pate_torch.accounting.data_dependent.vote_rows import Array, Counts
from pate_torch.accounting.outcomes import Lnmax, OutcomeModel
from pate_torch.core import checks

SECONDS, BYTES = 25.0, 0.75 * 2**30
"""What ``affordable`` allows, of one core: half a minute and a gigabyte, with what else there is to do."""

Direction = Literal["forward", "two_sided"]
DIRECTIONS = ("forward", "two_sided")

_CHUNK = 64  # rows at a time, some 2000 neighbors: temporaries stay in cache
_CHUNK_LAWS = 2**22  # probabilities of their neighbors' laws, at most (unless one row has more)
_ANCHORS = 10  # every 10th order is computed for every move, the others only for moves that may still be worst


@dataclass(frozen=True, eq=False)
class Bracket:
    """Bounds on a price: lower <= true value <= upper, [A] or [U, A]."""

    lower: Array
    upper: Array


def exact_rdp(model: OutcomeModel, votes: ArrayLike, orders: ArrayLike, direction: Direction = "two_sided") -> Bracket:
    """Renyi price of all the queries together, [A]; at most the data-independent one.

    Args:
        model: Law of one query's answer.
        votes: Integers [Q, C], rows summing to K.
        orders: [A], each above 1.
        direction: "forward" or "two_sided".

    Raises:
        ValueError: Malformed votes or orders.
    """
    grouped, orders_A = vote_rows.group(votes), vote_rows.validated_orders(orders)
    each = exact_rows(model, grouped.rows_UC, orders_A, direction)
    return Bracket(lower=grouped.count_U @ each.lower, upper=grouped.count_U @ each.upper)


def affordable(model: OutcomeModel, votes: ArrayLike) -> bool:
    """Whether ``exact_rdp`` at the usual orders takes no more than SECONDS and BYTES, by ``estimate``."""
    seconds, size = estimate(model, vote_rows.group(votes).rows_UC)
    return seconds <= SECONDS and size <= BYTES


def estimate(model: OutcomeModel, rows_UC: Counts) -> tuple[float, float]:
    """(Seconds of one core, bytes) of ``exact_rows`` at ``rdp.ORDERS``, both rather too much (measured in 2026).

    Of rows with G distinct counts, K votes and X quadrature nodes: 6 (K + 1) X table entries of 0.1 us and 16 bytes,
    G^3 X multiplications of 1 ns, and G^2 neighbors of at most min(C, 3G) outcomes each, of 1.2 us and, as many as are
    held together, 60 bytes. Laplace noise adds the eigenvalues of a matrix of C/2 rows, and the votes 40 bytes a count.
    """
    num_rows, num_classes = rows_UC.shape
    num_teachers = int(rows_UC[0].sum())
    if not outcome_laws.supported(model, num_teachers, num_classes):
        return 0.0, 0.0
    nodes = outcome_laws.num_nodes(model, num_teachers, num_classes)
    tables = 6.0 * (num_teachers + 1) * nodes
    groups_U = 1.0 + (rows_UC[:, 1:] != rows_UC[:, :-1]).sum(1)
    groups = float(groups_U.max())
    outcomes = min(num_classes, 3 * groups)
    matrix = num_classes / 2 if isinstance(model, Lnmax) else 0.0
    seconds = 1e-7 * tables + 1e-9 * nodes * (groups_U**3).sum() + 1.2e-6 * outcomes * (groups_U**2).sum()
    held = min(_rows_together(rows_UC), num_rows) * groups**2 * outcomes
    return float(seconds + 4e-9 * matrix**3), float(16 * tables + 60 * held + 24 * matrix**2 + 40 * rows_UC.size)


def _rows_together(rows_UC: Counts) -> int:
    """Rows whose neighbors' laws are held at a time."""
    groups = 1 + int((rows_UC[:, 1:] != rows_UC[:, :-1]).sum(1).max())
    return max(1, min(_CHUNK, _CHUNK_LAWS // (groups**2 * min(rows_UC.shape[1], 3 * groups))))


def exact_rows(model: OutcomeModel, rows_UC: Counts, orders_A: Array, direction: Direction = "two_sided") -> Bracket:
    """Renyi price of one query with each of these (sorted, descending) vote rows, [U, A].

    Where the noise is so small that probabilities leave float64, [0, data-independent price].
    """
    checks.one_of("direction", direction, DIRECTIONS)
    cap_A = theorems.data_independent_rdp(model, orders_A)
    num_rows, num_classes = rows_UC.shape
    lower_UA = np.zeros((num_rows, len(orders_A)))
    upper_UA = np.tile(cap_A, (num_rows, 1))
    num_teachers = int(rows_UC[0].sum())
    if not outcome_laws.supported(model, num_teachers, num_classes):
        return Bracket(lower=lower_UA, upper=upper_UA)
    sorted_A, inverse_A = np.unique(orders_A, return_inverse=True)
    together = _rows_together(rows_UC)
    for start in range(0, num_rows, together):
        part = slice(start, start + together)
        lower, upper = _rows(outcome_laws.laws(model, rows_UC[part], num_teachers, merged=True), sorted_A, direction)
        lower_UA[part] = np.minimum(lower[:, inverse_A], cap_A)
        upper_UA[part] = np.minimum(upper[:, inverse_A], cap_A)
    assert not np.isnan(upper_UA).any() and (lower_UA <= upper_UA).all()
    return Bracket(lower=lower_UA, upper=upper_UA)


def _rows(laws: outcome_laws.Laws, orders_A: Array, direction: Direction) -> tuple[Array, Array]:
    """Lower and upper ends for one chunk of rows, [U, A]; orders ascending."""
    log_p_MO, log_q_MO, other_U = _complete(laws)
    starts_U = np.flatnonzero(np.r_[True, laws.row_M[1:] != laws.row_M[:-1]])
    assert len(starts_U) == len(laws.log_p_UO), "a row without neighbors"
    log_s_UA = _worst(log_p_MO, log_q_MO, laws.row_M, starts_U, orders_A)
    if direction == "two_sided":
        log_s_UA = np.maximum(log_s_UA, _worst(log_q_MO, log_p_MO, laws.row_M, starts_U, orders_A))
    return _with_error(log_s_UA, other_U[:, None], laws.error, orders_A)


def _complete(laws: outcome_laws.Laws) -> tuple[Array, Array, Array]:
    """Laws of both sides, [M, O], the row's likeliest outcome first, as 1 - the rest; and each row's largest rest, [U].

    That way its logarithm is right to the relative precision of the rest, however near to 1 it is.
    """
    first_U1 = laws.log_p_UO.argmax(1)[:, None]
    num_outcomes = laws.log_p_UO.shape[1]
    order_UO = np.argsort(np.arange(num_outcomes) != first_U1, axis=1, kind="stable")
    log_p_UO, rest_U = _first_is_the_rest(np.take_along_axis(laws.log_p_UO, order_UO, 1))
    log_q_MO, rest_M = _first_is_the_rest(np.take_along_axis(laws.log_q_MO, order_UO[laws.row_M], 1))
    largest_U = rest_U.copy()
    np.maximum.at(largest_U, laws.row_M, rest_M)
    return log_p_UO[laws.row_M], log_q_MO, largest_U


def _first_is_the_rest(log_law: Array) -> tuple[Array, Array]:
    rest = np.exp(log_law[:, 1:]).sum(1)
    assert (rest < 1).all(), "not a law"
    log_law[:, 0] = np.log1p(-rest)
    return log_law, rest


def _worst(log_p_MO: Array, log_q_MO: Array, row_M: Counts, starts_U: Counts, orders_A: Array) -> Array:
    """Largest ln S(a) over each row's moves, S(a) = sum_o p_o (p_o/q_o)^{a-1}, [U, A]; orders ascending.

    ln S is convex in a (Hoelder), so between two anchor orders a move lies below its chord: it is computed there only
    if its chord rises above the moves that are worst at the anchors.
    """
    count = len(orders_A)
    anchors = np.unique(np.r_[np.arange(0, count, _ANCHORS), count - 1])
    at_anchor_MK = _log_s(log_p_MO, log_q_MO, orders_A[anchors])
    worst_UA = np.empty((len(starts_U), count))
    worst_UA[:, anchors] = np.maximum.reduceat(at_anchor_MK, starts_U, axis=0)
    # The first move that attains the maximum, per row and anchor.
    attains_MK = at_anchor_MK >= worst_UA[row_M][:, anchors]
    index_MK = np.where(attains_MK, np.arange(len(row_M))[:, None], len(row_M))
    champion_UK = np.minimum.reduceat(index_MK, starts_U, axis=0)
    for k in range(len(anchors) - 1):
        inner = slice(anchors[k] + 1, anchors[k + 1])
        between_A = orders_A[inner]
        if not len(between_A):
            continue
        best_UA = _log_s(log_p_MO[champion_UK[:, k]], log_q_MO[champion_UK[:, k]], between_A)
        changed_U = np.flatnonzero(champion_UK[:, k] != champion_UK[:, k + 1])
        other = champion_UK[changed_U, k + 1]
        best_UA[changed_U] = np.maximum(best_UA[changed_U], _log_s(log_p_MO[other], log_q_MO[other], between_A))
        left, right = orders_A[anchors[k]], orders_A[anchors[k + 1]]
        share_A = (between_A - left) / (right - left)
        chord_MA = at_anchor_MK[:, k, None] * (1 - share_A) + at_anchor_MK[:, k + 1, None] * share_A
        rival_M = (chord_MA > best_UA[row_M]).any(1)
        rival_M[champion_UK[:, k]] = False
        rival_M[other] = False
        rivals = np.flatnonzero(rival_M)
        np.maximum.at(best_UA, row_M[rivals], _log_s(log_p_MO[rivals], log_q_MO[rivals], between_A))
        worst_UA[:, inner] = best_UA
    return worst_UA


def _log_s(log_p_MO: Array, log_q_MO: Array, orders_A: Array) -> Array:
    """Log of sum_o p_o (p_o/q_o)^{a-1}, [M, A].

    Computed as ln(1 + sum_o p_o ((p_o/q_o)^{a-1} - 1)): the sum is often tiny.
    """
    powers_A = orders_A - 1
    log_ratio_MO = log_p_MO - log_q_MO
    p_MO = np.exp(log_p_MO)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        excess_MA = p_MO[:, :1] * np.expm1(log_ratio_MO[:, :1] * powers_A)
        for o in range(1, log_p_MO.shape[1]):
            # One exponential, not p times one: p may be tiny where the power overflows.
            excess_MA += np.exp(log_p_MO[:, o, None] + log_ratio_MO[:, o, None] * powers_A) - p_MO[:, o, None]
        log_s_MA = np.log1p(np.maximum(excess_MA, 0.0))
    overflow = np.flatnonzero(~np.isfinite(log_s_MA).all(1))
    if len(overflow):
        exponents_OMA = np.moveaxis(log_p_MO[overflow, :, None] + log_ratio_MO[overflow, :, None] * powers_A, 1, 0)
        log_s_MA[overflow] = np.maximum(np.logaddexp.reduce(exponents_OMA, axis=0), 0.0)
    return log_s_MA


def _with_error(log_s_UA: Array, rest_U1: Array, error: float, orders_A: Array) -> tuple[Array, Array]:
    """Carry the relative error of the probabilities to both ends of the divergence.

    With p, q each off by a factor 1 +- e, p^a q^{1-a} is off by a factor 1 +- (2a-1)e to first order (doubled here for
    the rest), which the rest r = 1 - p_first meets as it stands, and p_first as e r/p_first. With H = S - 1 and
    sum_{rest} p (p/q)^{a-1} <= H + a r, p_first^a q_first^{1-a} <= 1 + H: an error in H of at most the line below.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        excess_UA = np.expm1(log_s_UA)
        slope_UA = excess_UA + (orders_A + 1) * rest_U1 + (1 + excess_UA) * rest_U1 / (1 - rest_U1)
        slack_UA = 2 * error * (2 * orders_A - 1) * slope_UA
        lower_UA = np.log1p(np.maximum(excess_UA - slack_UA, 0.0))
        upper_UA = np.log1p(excess_UA + slack_UA)
    # Near the end of float64 the same factor is applied to S in its logarithm.
    huge_UA = log_s_UA > 600
    factor_UA = 2 * error * (2 * orders_A - 1) / (1 - rest_U1)
    lower_UA = np.where(huge_UA, log_s_UA - factor_UA, lower_UA)
    upper_UA = np.where(huge_UA, log_s_UA + factor_UA, upper_UA)
    return np.maximum(lower_UA, 0.0) / (orders_A - 1), upper_UA / (orders_A - 1)
