"""Exact law of one answer: of a vote row, and of every neighbor of it (one vote moved between two classes).

Noisy maxima: P(c) = integral of f(x - n_c) prod_{j != c} F(x - n_j) dx over the winning score x, with f and F the
noise's density and distribution function. Nodes in x serve all classes and all neighbors at once: a neighbor's
integrand is the row's times F(x - n_a + 1)/F(x - n_a) times F(x - n_b - 1)/F(x - n_b), so all C(C-1) neighbors are one
matrix product. Votes are integers, so every factor comes from a table of K + 1 rows; and classes of one count share
everything, so what is multiplied are the G distinct counts of a row (at most sqrt(2K) + 1 of them), not its C classes.

Rejected: bounding each bin by its Gaussian mass times the end values of the (increasing) product. It is rigorous, but
the bracket's width falls only as the bin's: 64 bins leave a ln P open by up to 0.9, far above the divergences at stake.
The rules below have *proved relative* errors near 1e-14 instead.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy.special import log_ndtr

from pate_torch.accounting.data_dependent.vote_rows import Array, Counts
from pate_torch.accounting.outcomes import Confident, Exponential, Gnmax, Lnmax, OutcomeModel
from pate_torch.core import checks

_TAIL = 1e-16  # relative mass left out at either end of a Gaussian rule
_STEP = 1e-14  # relative error of each rule between its ends
_CHUNK_FLOATS = 2**17  # of the largest temporary: half a second-level cache
_EPS = float(np.finfo(np.float64).eps)


@dataclass(frozen=True, eq=False, repr=False)
class Laws:
    """PRIVATE. Laws of vote rows and of their neighbors, over O outcomes.

    The outcomes are the C labels in the row's (sorted) order, then "no answer" for Confident. Merged: of the classes
    with one count the third stands for the others too, as far as they are alike in every move; no divergence changes.

    Attributes:
        log_p_UO: Law of each row.
        log_q_MO: Law of each neighbor, moves sorted by row.
        row_M: Neighbor m is one of row row_M[m].
        error: Relative error of every probability here (quadrature, proved; and an allowance for rounding).
    """

    log_p_UO: Array
    log_q_MO: Array
    row_M: Counts
    error: float


@dataclass(frozen=True, eq=False)
class Rule:
    """A quadrature rule over scores x, tabulated by count n = 0..K and node X.

    Attributes:
        log_mass_NX: ln( weight f(x - n)/F(x - n) ).
        log_cdf_NX: ln F(x - n).
        cdf_fewer_NX: Factor by which F(x - n) changes when n loses a vote.
        cdf_more_NX: The same when n gains a vote.
        pdf_fewer_NX: Factor by which f(x - n) changes when n loses a vote.
        pdf_more_NX: The same when n gains a vote.
        error: Relative error of the rule.
    """

    log_mass_NX: Array
    log_cdf_NX: Array
    cdf_fewer_NX: Array
    cdf_more_NX: Array
    pdf_fewer_NX: Array
    pdf_more_NX: Array
    error: float

    @property
    def num_nodes(self) -> int:
        """Number X of nodes."""
        return int(self.log_cdf_NX.shape[1])


def supported(model: OutcomeModel, num_teachers: int, num_classes: int) -> bool:
    """Whether the law can be computed: not where noise is so small that ratios of probabilities leave float64.

    A query's price is beyond hundreds there.
    """
    match model:
        case Gnmax(sigma=sigma) | Confident(sigma=sigma):
            return num_teachers / sigma**2 < 500 and 1 / sigma < 5
        case Lnmax(scale=scale):
            return num_classes / scale < 40 and num_teachers / scale < 1e5
        case Exponential(rate=rate):
            return rate * num_teachers < 1e6
    raise checks.fail("model", model, "has no outcome law")


@dataclass(frozen=True, eq=False, repr=False)
class Kinds:
    """PRIVATE. The G distinct counts of sorted rows, the outcomes to keep, and the distinct moves.

    A move of row u takes a vote from a class of count g to one of count h, which are the outcomes a and b.

    Attributes:
        count_UG: Distinct counts of each row.
        size_UG: Classes of each count; 0 where a row has fewer than G.
        group_UO: Which count each outcome has.
        log_weight_UO: ln of how many classes an outcome stands for.
        u_M: Row of each move.
        g_M: Count that loses a vote.
        h_M: Count that gains it.
        a_M: Outcome that loses a vote.
        b_M: Outcome that gains it.
    """

    count_UG: Counts
    size_UG: Counts
    group_UO: Counts
    log_weight_UO: Array
    u_M: Counts
    g_M: Counts
    h_M: Counts
    a_M: Counts
    b_M: Counts


def laws(model: OutcomeModel, rows_UC: Counts, num_teachers: int, *, merged: bool = False) -> Laws:
    """Laws of sorted vote rows [U, C] and of all their distinct neighbors.

    Equal counts share results, so one move stands for all with the same counts: at most G^2 a row, and none from a
    class without votes.
    """
    kinds = _kinds(rows_UC, merged)
    if isinstance(model, Exponential):
        log_p_UO, log_q_MO, error = _exponential(model.rate, kinds)
    else:
        log_p_UO, log_q_MO, error = _noisy_max(_rule(model, num_teachers, rows_UC.shape[1]), kinds)
    if isinstance(model, Confident):
        top_U, u_M = rows_UC[:, 0], kinds.u_M
        left_M = np.where(kinds.a_M > 0, top_U[u_M], np.maximum(top_U[u_M] - 1, rows_UC[u_M, 1]))
        log_p_UO = _screened(log_p_UO, top_U, model)
        log_q_MO = _screened(log_q_MO, np.maximum(left_M, kinds.count_UG[u_M, kinds.h_M] + 1), model)
        error += 8 * _EPS * (4 - float(log_p_UO.min()))
    return Laws(log_p_UO=log_p_UO, log_q_MO=log_q_MO, row_M=kinds.u_M, error=error)


def _kinds(rows_UC: Counts, merged: bool) -> Kinds:
    num_rows, num_classes = rows_UC.shape
    first_UC = np.ones(rows_UC.shape, dtype=bool)
    first_UC[:, 1:] = rows_UC[:, 1:] != rows_UC[:, :-1]
    group_UC = np.cumsum(first_UC, axis=1) - 1
    groups = int(group_UC.max()) + 1
    cell_UC = group_UC + groups * np.arange(num_rows)[:, None]
    count_UG = np.zeros((num_rows, groups), dtype=np.int64)
    count_UG.ravel()[cell_UC[first_UC]] = rows_UC[first_UC]
    size_UG = np.bincount(cell_UC.ravel(), minlength=num_rows * groups).reshape(num_rows, groups)
    first_UG = np.cumsum(size_UG, axis=1) - size_UG
    rank_UC = np.arange(num_classes) - np.take_along_axis(first_UG, group_UC, 1)
    # Every row shows as many classes as the one with most to show: a hidden one is counted at the third of its count.
    keep_UC = rank_UC < 3 if merged else np.ones_like(first_UC)
    order_UC = np.argsort(~keep_UC, axis=1, kind="stable")
    class_UO = np.sort(order_UC[:, : keep_UC.sum(1).max()], axis=1)
    group_UO, rank_UO = (np.take_along_axis(of_UC, class_UO, 1) for of_UC in (group_UC, rank_UC))
    shown_UG = np.bincount((group_UO + groups * np.arange(num_rows)[:, None]).ravel(), minlength=num_rows * groups)
    hidden_UG = size_UG - shown_UG.reshape(num_rows, groups)
    weight_UO = 1 + np.where(rank_UO == 2, np.take_along_axis(hidden_UG, group_UO, 1), 0)
    # Within one count a vote goes from its first class to its second; otherwise from first to first.
    from_UGG = ((size_UG > 0) & (count_UG > 0))[:, :, None] & (size_UG > 0)[:, None, :]
    diagonal = np.arange(groups)
    from_UGG[:, diagonal, diagonal] &= size_UG > 1
    u_M, g_M, h_M = np.nonzero(from_UGG)
    # The outcome of a count's first class: as many come before as are shown of greater counts.
    column_UG = np.cumsum(size_UG - hidden_UG, axis=1) - (size_UG - hidden_UG)
    return Kinds(
        count_UG=count_UG,
        size_UG=size_UG,
        group_UO=group_UO,
        log_weight_UO=np.log(weight_UO),
        u_M=u_M,
        g_M=g_M,
        h_M=h_M,
        a_M=column_UG[u_M, g_M],
        b_M=column_UG[u_M, h_M] + (g_M == h_M),
    )


def _noisy_max(rule: Rule, kinds: Kinds) -> tuple[Array, Array, float]:
    num_rows, groups = kinds.count_UG.shape
    log_p_UG = np.empty((num_rows, groups))
    log_q_MO = np.empty((len(kinds.u_M), kinds.group_UO.shape[1]))
    chunk = max(1, _CHUNK_FLOATS // (groups**2 * rule.num_nodes))
    for start in range(0, num_rows, chunk):
        low, high = np.searchsorted(kinds.u_M, [start, start + chunk])
        part, moves = slice(start, start + chunk), slice(low, high)
        log_p_UG[part], log_q_MO[moves] = _noisy_max_chunk(rule, kinds, part, moves)
    # Sums of C + 3 logarithms no larger than the exponent they make, and of as many terms as nodes.
    log_p_UO = np.take_along_axis(log_p_UG, kinds.group_UO, 1)
    num_classes = int(kinds.size_UG[0].sum())
    rounding = _EPS * (4 * (num_classes + 3) * (40 - log_p_UO.min()) + rule.num_nodes)
    log_p_UO += kinds.log_weight_UO
    log_q_MO += kinds.log_weight_UO[kinds.u_M]
    for log_law in (log_p_UO, log_q_MO):
        assert np.isfinite(log_law).all() and (np.abs(np.exp(log_law).sum(1) - 1) < 1e-9).all(), "not a law"
    return log_p_UO, log_q_MO, rule.error + rounding


def _noisy_max_chunk(rule: Rule, kinds: Kinds, part: slice, moves: slice) -> tuple[Array, Array]:
    """Some rows' laws by count, [U, G], and their moves' by outcome before weights, [M, O]."""
    count_UG, u_M, g_M, h_M = kinds.count_UG[part], kinds.u_M[moves] - part.start, kinds.g_M[moves], kinds.h_M[moves]
    num_rows, groups = count_UG.shape
    log_cdf_UGX = rule.log_cdf_NX[count_UG]
    log_all_U1X = kinds.size_UG[part][:, None, :].astype(np.float64) @ log_cdf_UGX
    log_integrand_UGX = rule.log_mass_NX[count_UG] + log_all_U1X
    scale_UG = log_integrand_UGX.max(2)
    moved_MO = np.empty((len(u_M), kinds.group_UO.shape[1]))
    width = max(1, _CHUNK_FLOATS // (num_rows * groups * rule.num_nodes))
    with np.errstate(under="ignore"):
        mass_UGX = np.exp(log_integrand_UGX - scale_UG[:, :, None])
        fewer_UGX, more_UXG = rule.cdf_fewer_NX[count_UG], rule.cdf_more_NX[count_UG].transpose(0, 2, 1)
        for start in range(0, groups, width):  # the counts that lose a vote
            here = slice(start, start + width)
            # from_UKX[u, (a, c)]: the integrand of a class of count c once a class of count a has lost a vote.
            from_UKX = (fewer_UGX[:, here, None, :] * mass_UGX[:, None, :, :]).reshape(num_rows, -1, rule.num_nodes)
            moved_UABC = (from_UKX @ more_UXG).reshape(num_rows, -1, groups, groups).swapaxes(2, 3)
            some = np.flatnonzero((g_M >= start) & (g_M < start + width))
            by_count_MG = moved_UABC[u_M[some], g_M[some] - start, h_M[some]]
            moved_MO[some] = np.take_along_axis(by_count_MG, kinds.group_UO[part][u_M[some]], 1)
        # For the two classes of the move the density moves too.
        lost_UGG = (mass_UGX * rule.pdf_fewer_NX[count_UG]) @ more_UXG
        won_UGG = fewer_UGX @ (mass_UGX * rule.pdf_more_NX[count_UG]).transpose(0, 2, 1)
        every = np.arange(len(u_M))
        moved_MO[every, kinds.a_M[moves]] = lost_UGG[u_M, g_M, h_M]
        moved_MO[every, kinds.b_M[moves]] = won_UGG[u_M, g_M, h_M]
        scale_MO = np.take_along_axis(scale_UG, kinds.group_UO[part], 1)[u_M]
        return np.log(mass_UGX.sum(2)) + scale_UG, np.log(moved_MO) + scale_MO


def _exponential(rate: float, kinds: Kinds) -> tuple[Array, Array, float]:
    """P(c) = e^{h n_c}/Z, so a move multiplies Z by 1 + P_a (e^{-h} - 1) + P_b (e^h - 1)."""
    scores_UG = rate * (kinds.count_UG - kinds.count_UG[:, :1])
    with np.errstate(under="ignore"):
        log_p_UG = scores_UG - np.log((kinds.size_UG * np.exp(scores_UG)).sum(1, keepdims=True))
        p_UG = np.exp(log_p_UG)
    u_M = kinds.u_M
    growth_M = np.log1p(p_UG[u_M, kinds.g_M] * math.expm1(-rate) + p_UG[u_M, kinds.h_M] * math.expm1(rate))
    log_p_UO = np.take_along_axis(log_p_UG, kinds.group_UO, 1)
    error = 8 * _EPS * (int(kinds.size_UG[0].sum()) + 1 - float(log_p_UO.min()))
    log_p_UO += kinds.log_weight_UO
    log_q_MO = log_p_UO[u_M] - growth_M[:, None]
    every = np.arange(len(u_M))
    log_q_MO[every, kinds.a_M] -= rate
    log_q_MO[every, kinds.b_M] += rate
    return log_p_UO, log_q_MO, error


def _screened(log_law: Array, top: Counts, model: Confident) -> Array:
    """P(c) -> P(pass) P(c), and P(no answer) = 1 - P(pass) as the last outcome."""
    z = (top - model.threshold) / model.screen_sigma
    return np.concatenate([log_law + log_ndtr(z)[:, None], log_ndtr(-z)[:, None]], axis=1)


# ---- quadrature rules ------------------------------------------------------------------------------------------------


def num_nodes(model: OutcomeModel, num_teachers: int, num_classes: int) -> int:
    """Number X of nodes of the model's rule, before it is tabulated; 0 where it has none.

    The tables to come are six of (K + 1) X numbers.
    """
    if isinstance(model, Exponential):
        return 0
    if isinstance(model, Lnmax):
        return 1 + _legendre_nodes(model.scale, num_classes) * num_teachers - (-num_classes // 2)
    low, high, step = _gaussian_grid(model.sigma, num_teachers, num_classes)
    return math.ceil((high - low) / step)


def _rule(model: Gnmax | Confident | Lnmax, num_teachers: int, num_classes: int) -> Rule:
    if isinstance(model, Lnmax):
        return laplace_rule(model.scale, num_teachers, num_classes)
    return gaussian_rule(model.sigma, num_teachers, num_classes)


@functools.lru_cache(maxsize=8)
def gaussian_rule(sigma: float, num_teachers: int, num_classes: int) -> Rule:
    """Trapezoidal rule of step h sigma, relative error at most 2 exp(-2 pi^2/(C h^2)) for every law at once.

    Proof. On the line Im z = w, |phi(x + iw)| = e^{w^2/2} phi(x), and |Phi(x + iw)| <= e^{w^2/2} Phi(x) (integrate phi
    along the line). An integrand of one phi and C - 1 Phi therefore grows by e^{C w^2/2} at most, *relative to the
    integral itself*, and the rule's error is at most 2 e^{C w^2/2}/(e^{2 pi w/h} - 1) of it (Trefethen & Weideman 2014,
    Thm 5.1). Take w = 2 pi/(h C).
    Ends. Left: the product of Phi is increasing, so by association at most Phi(-b) of the mass lies below
    n_c - b sigma. Right: each Phi is >= 1/2 beyond top, so at most 2^{C-1} e^{-x^2/2} of the mass lies beyond
    top + x sigma.
    """
    low, high, step = _gaussian_grid(sigma, num_teachers, num_classes)
    x_X = np.arange(low, high, step)

    def log_cdf(n: Array) -> Array:
        return log_ndtr((x_X - n) / sigma)

    def log_pdf(n: Array) -> Array:
        return -(((x_X - n) / sigma) ** 2) / 2 - math.log(sigma * math.sqrt(2 * math.pi))

    return _tabulate(log_cdf, log_pdf, np.full(len(x_X), math.log(step)), num_teachers, _STEP + 2 * _TAIL)


def _gaussian_grid(sigma: float, num_teachers: int, num_classes: int) -> tuple[float, float, float]:
    step = math.pi * math.sqrt(2 / (num_classes * math.log(4 / _STEP)))
    left = math.sqrt(-2 * math.log(_TAIL)) * sigma
    right = num_teachers + math.sqrt(2 * ((num_classes - 1) * math.log(2) - math.log(_TAIL))) * sigma
    return -left - step * sigma, right + step * sigma, step * sigma


@functools.lru_cache(maxsize=8)
def laplace_rule(scale: float, num_teachers: int, num_classes: int) -> Rule:
    """Gauss-Legendre between neighboring integers, where all the kinks are; both tails in closed form.

    x < 0: every factor is an exponential, so the integral is scale/C times the integrand at 0. x > K: in
    u = e^{-(x - K)/scale} the integrand is a polynomial of degree C - 1, for which ceil(C/2) nodes are exact.
    Between: the integrand is a sum of exponentials e^{lambda t}, |lambda| <= k = C/(2 scale) on t in [-1, 1], whose
    absolute sum is at most 3^C times the integrand (each factor 1 - y/2, y <= 1, against 1 + y/2). Its derivative of
    order 2n bounds the rule's relative error by
    2^{2n+1} (n!)^4 / ((2n+1) ((2n)!)^3) k^{2n} 3^C e^{2k} / 2.
    """
    nodes = _legendre_nodes(scale, num_classes)
    t, weight = np.polynomial.legendre.leggauss(nodes)
    inside = (np.arange(num_teachers)[:, None] + (t + 1) / 2).ravel()
    t_tail, weight_tail = np.polynomial.legendre.leggauss(-(-num_classes // 2))
    u_tail = (t_tail + 1) / 2
    x_X = np.concatenate([[0.0], inside, num_teachers - scale * np.log(u_tail)])
    weight_X = np.concatenate(
        [[scale / num_classes], np.tile(weight / 2, num_teachers), scale * weight_tail / 2 / u_tail]
    )

    def log_cdf(n: Array) -> Array:
        z = (x_X - n) / scale
        return np.where(z < 0, z - math.log(2), np.log1p(-np.exp(-np.abs(z)) / 2))

    def log_pdf(n: Array) -> Array:
        return -np.abs(x_X - n) / scale - math.log(2 * scale)

    return _tabulate(log_cdf, log_pdf, np.log(weight_X), num_teachers, _STEP)


def _legendre_nodes(scale: float, num_classes: int) -> int:
    k = num_classes / (2 * scale)

    def log_error(n: int) -> float:
        remainder = (
            (2 * n + 1) * math.log(2) + 4 * math.lgamma(n + 1) - math.log(2 * n + 1) - 3 * math.lgamma(2 * n + 1)
        )
        return remainder + 2 * n * math.log(k) + num_classes * math.log(3) + 2 * k - math.log(2)

    return next(n for n in itertools.count(2) if log_error(n) < math.log(_STEP))


def _tabulate(
    log_cdf: Callable[[Array], Array],
    log_pdf: Callable[[Array], Array],
    log_weight_X: Array,
    num_teachers: int,
    error: float,
) -> Rule:
    counts_N1 = np.arange(num_teachers + 1, dtype=np.float64)[:, None]
    cdf, cdf_fewer, cdf_more = (log_cdf(counts_N1 + shift) for shift in (0, -1, 1))
    pdf, pdf_fewer, pdf_more = (log_pdf(counts_N1 + shift) for shift in (0, -1, 1))
    with np.errstate(over="raise"):
        return Rule(
            log_mass_NX=pdf - cdf + log_weight_X,
            log_cdf_NX=cdf,
            cdf_fewer_NX=np.exp(cdf_fewer - cdf),
            cdf_more_NX=np.exp(cdf_more - cdf),
            pdf_fewer_NX=np.exp(pdf_fewer - pdf),
            pdf_more_NX=np.exp(pdf_more - pdf),
            error=error,
        )
