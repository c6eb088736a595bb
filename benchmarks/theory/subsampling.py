"""What a random sub-sample does for privacy, and privacy for generalization (DF20, WLF16).

All are stated for replace_one: a sub-sample of share gamma, drawn without replacement, its choice kept secret.
"""

from __future__ import annotations

import math

from pate_torch.core import checks


def amplified(epsilon: float, delta: float, share: float) -> tuple[float, float]:
    """(ln(1 + share (e^eps - 1)), share delta) of an (eps, delta)-DP algorithm on a random sub-sample.

    Met exactly by some algorithm, so nothing smaller holds for all.

    Source: Balle, Barthe & Gaboardi 2018, Theorem 9.
    """
    _check(epsilon, delta, share)
    return math.log1p(share * math.expm1(epsilon)), share * delta


def df20_lemma_5(epsilon: float, share: float) -> float:
    """Epsilon 2 epsilon share of a private prediction on a random sub-sample; for epsilon < 1."""
    _check(epsilon, 0.0, share)
    checks.between("epsilon", epsilon, 0, 1, exclusive=True)
    return 2 * epsilon * share


def wlf16_lemma_22(n: int) -> float:
    """Delta 1/sqrt(n) of *any* algorithm on floor(sqrt(n)) random records of n: it is (0, delta)-DP."""
    return 1 / math.sqrt(checks.integer("n", n, low=1))


def wlf16_lemma_24(epsilon: float, delta: float, share: float) -> tuple[float, float]:
    """(ln(1 + share e^eps (e^eps - 1)), share e^eps delta) on a random sub-sample."""
    _check(epsilon, delta, share)
    return math.log1p(share * math.exp(epsilon) * math.expm1(epsilon)), share * math.exp(epsilon) * delta


def wlf16_lemma_27(epsilon: float, share: float) -> float:
    """Epsilon 2 share (e^eps - e^-eps) on a random sub-sample."""
    _check(epsilon, 0.0, share)
    return 4 * share * math.sinh(epsilon)


def wlf16_lemma_8(epsilon: float) -> float:
    """How far one replaced record moves the expected loss, in [0, 1], of an epsilon-DP learner: e^eps - 1."""
    return wlf16_lemma_23(epsilon, 0.0)


def wlf16_lemma_23(epsilon: float, delta: float) -> float:
    """The same of an (epsilon, delta)-DP learner: e^eps - 1 + delta."""
    _check(epsilon, delta, 1.0)
    return math.expm1(epsilon) + delta


def wlf16_corollary_9(excess: float, epsilon: float, delta: float = 0.0) -> float:
    """Expected excess *risk* of a private learner of this expected excess *empirical* risk: excess + e^eps - 1 + delta.

    Its stability is how far its empirical risk may lie below its risk (Theorem 28).
    """
    return checks.non_negative("excess", excess) + wlf16_lemma_23(epsilon, delta)


def _check(epsilon: float, delta: float, share: float) -> None:
    checks.non_negative("epsilon", epsilon)
    checks.between("delta", delta, 0, 1)
    checks.between("share", share, 0, 1)
