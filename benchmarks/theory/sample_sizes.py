"""Sample sizes and error bounds of the theorems, in numbers; each function is named after its theorem."""

from __future__ import annotations

import math


def btt18_lemma_5_8(n: int, *, alpha: float) -> float:
    """Distance 4 alpha sqrt(2n) of an alpha-stable learner's score from its expectation, kept three times in four."""
    return 4 * alpha * math.sqrt(2 * n)


def btt18_lemma_5_13(scale: float, threshold: float, *, beta: float) -> int:
    """Teachers K with which a private learner is (nu', beta)-strong where its base learner is nu-weak.

    K = 6 (sqrt(5) lambda ln(2/beta) + w + 1), and 72 ln(2/beta) at least, as the proof has it: two thirds of K in one
    bin lead by K/3, which is a distance of K/6 - 1. (Printed without the halving, with K = 3 (...), at which the query
    is never answered.) nu' and the bin width are those of Theorem 5.14.
    """
    log_beta = math.log(2 / beta)
    return math.ceil(max(6 * (math.sqrt(5) * scale * log_beta + threshold + 1), 72 * log_beta))


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
