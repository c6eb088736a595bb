"""Sample sizes and error bounds of the theorems, in numbers; each function is named after its theorem.

Where a theorem hides a constant in O(.), the function takes it as ``constant`` (1 by default): such a value is a rate
to compare with, not a promise. d: VC dimension; m: public points or queries; K: teachers; T: failures at which the
sparse vector stops. The papers' loops allow one more, so that their T unstable queries are T - 1 of ours.
"""

from __future__ import annotations

import math

from pate_torch.mechanisms.sparse_vector import SparseVector


def _cutoff(rate: float, m: int, beta: float) -> float:
    return 3 * (rate * m + math.sqrt(m * math.log(m / beta) / 2))


def _teachers(m: int, T: float, epsilon: float, delta: float, beta: float) -> float:
    return 136 * math.log(4 * m * T / min(delta, beta / 2)) * math.sqrt(T * math.log(2 / delta)) / epsilon


# --- BTT18 ---------------------------------------------------------------------------------------------------------


def btt18_corollary_3_9(m: int, T: float, *, epsilon: float, delta: float, beta: float) -> float:
    """The distance at which a query is answered: 32 ln(4mT/min(delta, beta)) sqrt(2T ln(2/delta))/epsilon."""
    return 32 * math.log(4 * m * T / min(delta, beta)) * math.sqrt(2 * T * math.log(2 / delta)) / epsilon


def btt18_theorem_3_11(m: int, T: float, *, epsilon: float, delta: float, beta: float) -> float:
    """Teachers K with which all but T queries are answered, if each teacher gives their winner with probability 3/4.

    K = 136 ln(4mT/min(delta, beta/2)) sqrt(T ln(2/delta))/epsilon.
    """
    return _teachers(m, T, epsilon, delta, beta)


def btt18_corollary_4_1(m: int, *, alpha: float, gamma: float, beta: float) -> float:
    """Unstable queries T = 3 ((gamma + alpha) m + sqrt(m ln(m/beta)/2)); the misclassification rate is at most T/m."""
    return _cutoff(gamma + alpha, m, beta)


def btt18_lemma_4_2(mistakes: float, share: float) -> float:
    """Number of queries, at most B/xi, got wrong by more than a share xi of teachers that make B mistakes each."""
    return mistakes / share


def btt18_theorem_5_6(m: int, T: float, *, epsilon: float, delta: float, beta: float) -> float:
    """The distance at which a soft query's histogram is answered.

    32 ln(8mT/min(delta, beta)) sqrt(4T ln(2/delta)) / epsilon.
    """
    return 32 * math.log(8 * m * T / min(delta, beta)) * math.sqrt(4 * T * math.log(2 / delta)) / epsilon


def btt18_lemma_5_8(n: int, *, alpha: float) -> float:
    """Distance 4 alpha sqrt(2n) of an alpha-stable learner's score from its expectation, kept three times in four."""
    return 4 * alpha * math.sqrt(2 * n)


def btt18_corollary_5_10(*, beta: float) -> int:
    """Teachers, ceil(72 ln(1/beta)), of whose scores two thirds lie as near the mean as three in four should."""
    return math.ceil(72 * math.log(1 / beta))


def btt18_lemma_5_13(scale: float, threshold: float, *, beta: float) -> int:
    """Teachers K with which a private learner is (nu', beta)-strong where its base learner is nu-weak.

    K = 6 (sqrt(5) lambda ln(2/beta) + w + 1), and 72 ln(2/beta) at least, as the proof has it: two thirds of K in one
    bin lead by K/3, which is a distance of K/6 - 1. (Printed without the halving, with K = 3 (...), at which the query
    is never answered.) nu' and the bin width are those of Theorem 5.14.
    """
    log_beta = math.log(2 / beta)
    return math.ceil(max(6 * (math.sqrt(5) * scale * log_beta + threshold + 1), 72 * log_beta))


def btt18_theorem_5_14(
    m: int, T: float, *, epsilon: float, delta: float, beta: float, n_shard: int, alpha: float, nu: float
) -> tuple[float, float, float]:
    """Teachers K, bin width and error of each score, for soft labels.

    136 ln(8mT/min(beta, delta)) sqrt(2T ln(2/delta))/epsilon, 16 alpha sqrt(2n') + nu, and half the width.
    """
    K = 136 * math.log(8 * m * T / min(beta, delta)) * math.sqrt(2 * T * math.log(2 / delta)) / epsilon
    width = 16 * alpha * math.sqrt(2 * n_shard) + nu
    return K, width, width / 2


# --- LZCW21 --------------------------------------------------------------------------------------------------------


def lzcw21_algorithm_1(m: int, *, epsilon: float, delta: float) -> float:
    """The noise that line 1 prints: sigma on the count of ones, in votes; valid, and a third more than is needed.

    sigma = (sqrt(2 m ln(1/delta)) + sqrt(2 m ln(1/delta) + 2 epsilon m))/(2 epsilon), the root of the zCDP closed form
    m/(2 sigma^2) + sqrt(2 m ln(1/delta))/sigma = epsilon.
    """
    spread = 2 * m * -math.log(delta)
    return (math.sqrt(spread) + math.sqrt(spread + 2 * epsilon * m)) / (2 * epsilon)


def lzcw21_algorithm_2(m: int, T: int, *, epsilon: float, delta: float) -> tuple[float, float]:
    """(lambda, w) of the sparse vector, as executed (w a little below the printed 3 lambda ln(2(m + T)/delta))."""
    plan = SparseVector(epsilon=epsilon, delta=delta, failure_delta=delta / 2, max_failures=T).make_price(m)
    return plan.noise_scale, plan.threshold


def lzcw21_lemma_3(m: int, T: float, *, epsilon: float, delta: float, beta: float) -> float:
    """Teachers K at which all queries but at most T, those with a margin below K/3, get the majority's answer."""
    return _teachers(m, T, epsilon, delta, beta)


def lzcw21_lemma_4(mistakes: float) -> float:
    """Number of queries, at most 3B, got wrong by K/3 or more of teachers that make B mistakes each."""
    return 3 * mistakes


def lzcw21_vote_dimension(d: int, K: int) -> int:
    """Upper bound on the VC dimension of majority votes of K hypotheses: the largest m with C(s + K - 1, K) >= 2^m.

    A vote on m points is decided by which of their s <= sum_{i<=d} C(m, i) dichotomies vote, how often each. (Printed
    without a proof: K d, which two lines in the plane refute; what is known is O(K d ln(K d)).)
    """

    def log_votes(m: int) -> float:
        terms = [math.lgamma(m + 1) - math.lgamma(i + 1) - math.lgamma(m - i + 1) for i in range(min(m, d) + 1)]
        log_s = max(terms) + math.log(sum(math.exp(term - max(terms)) for term in terms))
        # C(s + K - 1, K) <= (e (s + K - 1)/K)^K, and it is at most s^K.
        apart = 1 + log_s + math.log1p((K - 1) * math.exp(-log_s)) - math.log(K)
        return K * min(log_s, apart)

    low, high = d, 2 * d
    while log_votes(high) >= high * math.log(2):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if log_votes(middle) >= middle * math.log(2) else (low, middle)
    return low


def lzcw21_theorem_28(m: float, n: int, *, epsilon: float, delta: float) -> float:
    """Teachers K of Gaussian PATE: 6 sqrt(ln 2n) (sqrt(m ln(1/delta)) + sqrt(m ln(1/delta) + epsilon m))/epsilon."""
    L = m * math.log(1 / delta)
    return 6 * math.sqrt(math.log(2 * n)) * (math.sqrt(L) + math.sqrt(L + epsilon * m)) / epsilon


# --- NB20, DF20, WLF16 ---------------------------------------------------------------------------------------------


def nb20_theorem_3_3(
    m: int, d: int, *, epsilon: float, delta: float, alpha: float, beta: float, constant: float = 1.0
) -> float:
    """Private records n of AgPrivCl; with constants, and the least m: ``theory.agnostic.AgPrivClPlan``.

    C (d ln(1/alpha) + ln(m/beta)) ln^{3/2}(2/delta) ln(m alpha/min(delta, beta/2))
    max(1, sqrt(m) alpha^{3/2}) / (epsilon alpha^2).
    """
    logs = math.log(2 / delta) ** 1.5 * math.log(m * alpha / min(delta, beta / 2))
    size = (d * math.log(1 / alpha) + math.log(m / beta)) * max(1.0, math.sqrt(m) * alpha**1.5)
    return constant * size * logs / (epsilon * alpha**2)


def nb20_theorem_4_1(
    d: int, *, epsilon: float, delta: float, alpha: float, beta: float, constant: float = 1.0
) -> tuple[int, float]:
    """(m0, n) of UnvPrivCl: m0 = 32 (d ln(1/alpha) + ln(1/beta))/alpha queries by AgPrivCl, and Theorem 3.3's n."""
    m0 = math.ceil(32 * (d * math.log(1 / alpha) + math.log(1 / beta)) / alpha)
    return m0, nb20_theorem_3_3(m0, d, epsilon=epsilon, delta=delta, alpha=alpha, beta=beta, constant=constant)


def wlf16_theorem_17(n: int, *, epsilon: float, rho: float, log_K: float, penalty: float = 0.0) -> float:
    """Expected excess risk of the exponential mechanism: 9 (ln K + (rho + 2) ln n)/(n epsilon) + 2 epsilon + penalty.

    For M hypotheses rho = 0 and K = M.

    Args:
        n: Private records.
        epsilon: At most 1, where e^epsilon - 1 <= 2 epsilon.
        rho: Exponent of the theorem's sublevel-set condition.
        log_K: Log of that condition's constant K.
        penalty: sup g - inf g, as in the proof of Lemma 30; the printed sup |g| is that for a regularizer that starts
            at 0.
    """
    return 9 * (log_K + (rho + 2) * math.log(n)) / (n * epsilon) + 2 * epsilon + penalty


def wlf16_example_3(num_hypotheses: int) -> tuple[float, float]:
    """(rho, log K) of the sublevel-set condition for finitely many hypotheses: (0, ln M)."""
    return 0.0, math.log(num_hypotheses)


def wlf16_example_4(
    dimension: int, *, lipschitz: float, log_volume: float, regular: float = 1.0, p: float = 2.0
) -> tuple[float, float]:
    """(rho, log K) for a loss, convex or not, that is Lipschitz in D parameters: rho = D.

    log K = ln mu(H) - ln beta - ln V + D ln L. (Printed without V, the volume of the unit ball.)

    Args:
        dimension: Number D of parameters.
        lipschitz: L, in the p-norm.
        log_volume: ln mu(H).
        regular: beta: the least share of a small ball around a hypothesis that lies in H.
        p: Of the norm; math.inf for the largest coordinate.
    """
    return float(dimension), log_volume - math.log(regular) - log_unit_ball(dimension, p) + dimension * math.log(
        lipschitz
    )


def log_unit_ball(dimension: int, p: float = 2.0) -> float:
    """Log of the volume (2 Gamma(1 + 1/p))^D/Gamma(1 + D/p) of the unit ball of the p-norm."""
    if math.isinf(p):
        return dimension * math.log(2)
    return dimension * (math.log(2) + math.lgamma(1 + 1 / p)) - math.lgamma(1 + dimension / p)
