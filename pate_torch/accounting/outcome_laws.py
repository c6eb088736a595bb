"""The law of one answer, exactly: of a vote row, and of every neighbour of it (one vote moved between two classes).

Noisy maxima: P(c) = integral of f(x - n_c) prod_{j != c} F(x - n_j) dx over the winning score x, with f and F the
noise's density and distribution function. Nodes in x serve all classes and all neighbours at once: a neighbour's
integrand is the row's times F(x - n_a + 1)/F(x - n_a) times F(x - n_b - 1)/F(x - n_b), so all C(C-1) neighbours are one
matrix product. Votes are integers, so every factor comes from a table of K + 1 rows.

Rejected: bounding each bin by its Gaussian mass times the end values of the (increasing) product. It is rigorous, but
the bracket's width falls only as the bin's: 64 bins leave a ln P open by up to 0.9, far above the divergences at stake.
The rules below have *proved relative* errors near 1e-14 instead.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy.special import log_ndtr

from pate_torch import checks
from pate_torch.accounting.outcomes import Confident, Exponential, Gnmax, Lnmax, OutcomeModel
from pate_torch.accounting.vote_rows import Array, Counts

_TAIL = 1e-16  # relative mass left out at either end of a Gaussian rule
_STEP = 1e-14  # relative error of each rule between its ends
_CHUNK_FLOATS = 2**17  # of the largest temporary: half a second-level cache
_EPS = float(np.finfo(np.float64).eps)


@dataclass(frozen=True, eq=False, repr=False)
class Laws:
    """PRIVATE. log_p_UO: law of each row; log_q_MO: law of neighbour m of row row_M[m] (moves sorted by row).

    O outcomes: the C labels in the row's (sorted) order, then "no answer" for Confident. ``error``: relative error of
    every probability here (quadrature, proved; and an allowance for rounding).
    """

    log_p_UO: Array
    log_q_MO: Array
    row_M: Counts
    error: float


@dataclass(frozen=True, eq=False)
class Rule:
    """A quadrature rule over scores x, tabulated by count n = 0..K and node X.

    log_mass = ln( weight f(x - n)/F(x - n) ), log_cdf = ln F(x - n); ``fewer`` and ``more`` are the factors by which
    F(x - n) and f(x - n) change when n loses or gains a vote.
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
        return int(self.log_cdf_NX.shape[1])


def supported(model: OutcomeModel, num_teachers: int, num_classes: int) -> bool:
    """False where noise is so small (a query's price beyond hundreds) that ratios of probabilities leave float64."""
    match model:
        case Gnmax(sigma=sigma) | Confident(sigma=sigma):
            return num_teachers / sigma**2 < 500 and 1 / sigma < 5
        case Lnmax(scale=scale):
            return num_classes / scale < 40 and num_teachers / scale < 1e5
        case Exponential(rate=rate):
            return rate * num_teachers < 1e6
    raise checks.fail("model", model, "has no outcome law")


def laws(model: OutcomeModel, rows_UC: Counts, num_teachers: int) -> Laws:
    """Laws of sorted vote rows [U, C] and of all their distinct neighbours.

    Equal counts share results, so one move stands for all with the same counts: at most C(C-1) a row, and none from a
    class without votes.
    """
    u_M, a_M, b_M = _moves(rows_UC)
    if isinstance(model, Exponential):
        log_p_UC, log_q_MC, error = _exponential(model.rate, rows_UC, u_M, a_M, b_M)
    else:
        log_p_UC, log_q_MC, error = _noisy_max(_rule(model, num_teachers, rows_UC.shape[1]), rows_UC, u_M, a_M, b_M)
    if isinstance(model, Confident):
        moved_MC = rows_UC[u_M]
        moves = np.arange(len(u_M))
        moved_MC[moves, a_M] -= 1
        moved_MC[moves, b_M] += 1
        log_p_UC = _screened(log_p_UC, rows_UC[:, 0], model)
        log_q_MC = _screened(log_q_MC, moved_MC.max(1), model)
        error += 8 * _EPS * (4 - float(log_p_UC.min()))
    return Laws(log_p_UO=log_p_UC, log_q_MO=log_q_MC, row_M=u_M, error=error)


def _moves(rows_UC: Counts) -> tuple[Counts, Counts, Counts]:
    """Distinct moves (row, from, to) of sorted rows, by the first class of each count."""
    first_UC = np.ones(rows_UC.shape, dtype=bool)
    first_UC[:, 1:] = rows_UC[:, 1:] != rows_UC[:, :-1]
    second_UC = np.zeros_like(first_UC)
    second_UC[:, 1:] = first_UC[:, :-1] & ~first_UC[:, 1:]
    from_UCC = (first_UC & (rows_UC > 0))[:, :, None]
    # Within one count a vote goes from its first class to its second; otherwise from first to first.
    to_UCC = np.broadcast_to(first_UC[:, None, :], (*rows_UC.shape, rows_UC.shape[1])).copy()
    diagonal = np.arange(rows_UC.shape[1])
    to_UCC[:, diagonal, diagonal] = False
    to_UCC[:, diagonal[:-1], diagonal[1:]] |= second_UC[:, 1:]
    u_M, a_M, b_M = np.nonzero(from_UCC & to_UCC)
    return u_M, a_M, b_M


def _noisy_max(rule: Rule, rows_UC: Counts, u_M: Counts, a_M: Counts, b_M: Counts) -> tuple[Array, Array, float]:
    num_rows, num_classes = rows_UC.shape
    log_p_UC = np.empty((num_rows, num_classes))
    log_q_MC = np.empty((len(u_M), num_classes))
    chunk = max(1, _CHUNK_FLOATS // (num_classes**2 * rule.num_nodes))
    for start in range(0, num_rows, chunk):
        low, high = np.searchsorted(u_M, [start, start + chunk])
        part, moves = slice(start, start + chunk), slice(low, high)
        log_p_UC[part], log_q_MC[moves] = _noisy_max_chunk(
            rule, rows_UC[part], u_M[moves] - start, a_M[moves], b_M[moves]
        )
    # Sums of C + 3 logarithms no larger than the exponent they make, and of as many terms as nodes.
    rounding = _EPS * (4 * (num_classes + 3) * (40 - log_p_UC.min()) + rule.num_nodes)
    return log_p_UC, log_q_MC, rule.error + rounding


def _noisy_max_chunk(rule: Rule, rows_UC: Counts, u_M: Counts, a_M: Counts, b_M: Counts) -> tuple[Array, Array]:
    num_rows, num_classes = rows_UC.shape
    log_integrand_UCX = rule.log_mass_NX[rows_UC] + rule.log_cdf_NX[rows_UC].sum(1)[:, None, :]
    scale_UC = log_integrand_UCX.max(2)
    with np.errstate(under="ignore"):
        mass_UCX = np.exp(log_integrand_UCX - scale_UC[:, :, None])
        fewer_UCX, more_UCX = rule.cdf_fewer_NX[rows_UC], rule.cdf_more_NX[rows_UC]
        # from_UACX[u, a, c]: the integrand of class c once class a has lost a vote; for c = a its own density moves.
        from_UACX = fewer_UCX[:, :, None, :] * mass_UCX[:, None, :, :]
        diagonal = np.arange(num_classes)
        from_UACX[:, diagonal, diagonal, :] = mass_UCX * rule.pdf_fewer_NX[rows_UC]
        from_UKX = from_UACX.reshape(num_rows, num_classes**2, rule.num_nodes)
        moved_UACB = (from_UKX @ more_UCX.transpose(0, 2, 1)).reshape(num_rows, *3 * [num_classes])
        # For c = b the density moves the other way.
        to_UAB = fewer_UCX @ (mass_UCX * rule.pdf_more_NX[rows_UC]).transpose(0, 2, 1)
        moved_MC = moved_UACB[u_M, a_M, :, b_M]
        moved_MC[np.arange(len(u_M)), b_M] = to_UAB[u_M, a_M, b_M]
        log_p_UC = np.log(mass_UCX.sum(2)) + scale_UC
        log_q_MC = np.log(moved_MC) + scale_UC[u_M]
        for log_law in (log_p_UC, log_q_MC):
            assert np.isfinite(log_law).all() and (np.abs(np.exp(log_law).sum(1) - 1) < 1e-9).all(), "not a law"
    return log_p_UC, log_q_MC


def _exponential(rate: float, rows_UC: Counts, u_M: Counts, a_M: Counts, b_M: Counts) -> tuple[Array, Array, float]:
    """P(c) = e^{h n_c}/Z, so a move multiplies Z by 1 + P_a (e^{-h} - 1) + P_b (e^h - 1)."""
    scores_UC = rate * (rows_UC - rows_UC[:, :1])
    with np.errstate(under="ignore"):
        log_p_UC = scores_UC - np.log(np.exp(scores_UC).sum(1, keepdims=True))
        p_UC = np.exp(log_p_UC)
    growth_M = np.log1p(p_UC[u_M, a_M] * math.expm1(-rate) + p_UC[u_M, b_M] * math.expm1(rate))
    log_q_MC = log_p_UC[u_M] - growth_M[:, None]
    moves = np.arange(len(u_M))
    log_q_MC[moves, a_M] -= rate
    log_q_MC[moves, b_M] += rate
    return log_p_UC, log_q_MC, 8 * _EPS * (rows_UC.shape[1] + 1 - float(log_p_UC.min()))


def _screened(log_law: Array, top: Counts, model: Confident) -> Array:
    """P(c) -> P(pass) P(c), and P(no answer) = 1 - P(pass) as the last outcome."""
    z = (top - model.threshold) / model.screen_sigma
    return np.concatenate([log_law + log_ndtr(z)[:, None], log_ndtr(-z)[:, None]], axis=1)


# ---- quadrature rules ------------------------------------------------------------------------------------------------


def _rule(model: Gnmax | Confident | Lnmax, num_teachers: int, num_classes: int) -> Rule:
    if isinstance(model, Lnmax):
        return laplace_rule(model.scale, num_teachers, num_classes)
    return gaussian_rule(model.sigma, num_teachers, num_classes)


@functools.lru_cache(maxsize=8)
def gaussian_rule(sigma: float, num_teachers: int, num_classes: int) -> Rule:
    """The trapezoidal rule of step h sigma, relative error at most 2 exp(-2 pi^2/(C h^2)) for every law at once.

    Proof. On the line Im z = w, |phi(x + iw)| = e^{w^2/2} phi(x), and |Phi(x + iw)| <= e^{w^2/2} Phi(x) (integrate phi
    along the line). An integrand of one phi and C - 1 Phi therefore grows by e^{C w^2/2} at most, *relative to the
    integral itself*, and the rule's error is at most 2 e^{C w^2/2}/(e^{2 pi w/h} - 1) of it (Trefethen & Weideman 2014,
    Thm 5.1). Take w = 2 pi/(h C).
    Ends. Left: the product of Phi is increasing, so by association at most Phi(-b) of the mass lies below
    n_c - b sigma. Right: each Phi is >= 1/2 beyond top, so at most 2^{C-1} e^{-x^2/2} of the mass lies beyond
    top + x sigma.
    """
    step = math.pi * math.sqrt(2 / (num_classes * math.log(4 / _STEP)))
    left = math.sqrt(-2 * math.log(_TAIL)) * sigma
    right = num_teachers + math.sqrt(2 * ((num_classes - 1) * math.log(2) - math.log(_TAIL))) * sigma
    x_X = np.arange(-left - step * sigma, right + step * sigma, step * sigma)

    def log_cdf(n: Array) -> Array:
        return log_ndtr((x_X - n) / sigma)

    def log_pdf(n: Array) -> Array:
        return -(((x_X - n) / sigma) ** 2) / 2 - math.log(sigma * math.sqrt(2 * math.pi))

    return _tabulate(log_cdf, log_pdf, np.full(len(x_X), math.log(step * sigma)), num_teachers, _STEP + 2 * _TAIL)


@functools.lru_cache(maxsize=8)
def laplace_rule(scale: float, num_teachers: int, num_classes: int) -> Rule:
    """Gauss-Legendre between neighbouring integers, where all the kinks are; both tails in closed form.

    x < 0: every factor is an exponential, so the integral is scale/C times the integrand at 0. x > K: in
    u = e^{-(x - K)/scale} the integrand is a polynomial of degree C - 1, for which ceil(C/2) nodes are exact.
    Between: the integrand is a sum of exponentials e^{lambda t}, |lambda| <= k = C/(2 scale) on t in [-1, 1], whose
    absolute sum is at most 3^C times the integrand (each factor 1 - y/2, y <= 1, against 1 + y/2). Its derivative of
    order 2n bounds the rule's relative error by
    2^{2n+1} (n!)^4 / ((2n+1) ((2n)!)^3) k^{2n} 3^C e^{2k} / 2.
    """
    k = num_classes / (2 * scale)

    def log_error(n: int) -> float:
        remainder = (
            (2 * n + 1) * math.log(2) + 4 * math.lgamma(n + 1) - math.log(2 * n + 1) - 3 * math.lgamma(2 * n + 1)
        )
        return remainder + 2 * n * math.log(k) + num_classes * math.log(3) + 2 * k - math.log(2)

    nodes = next(n for n in range(2, 1000) if log_error(n) < math.log(_STEP))
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
