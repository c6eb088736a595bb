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


def wlf16_lemma_24(epsilon: float, delta: float, share: float) -> tuple[float, float]:
    """(ln(1 + share e^eps (e^eps - 1)), share e^eps delta) on a random sub-sample."""
    _check(epsilon, delta, share)
    return math.log1p(share * math.exp(epsilon) * math.expm1(epsilon)), share * math.exp(epsilon) * delta


def wlf16_lemma_27(epsilon: float, share: float) -> float:
    """Epsilon 2 share (e^eps - e^-eps) on a random sub-sample."""
    _check(epsilon, 0.0, share)
    return 4 * share * math.sinh(epsilon)


def _check(epsilon: float, delta: float, share: float) -> None:
    checks.non_negative("epsilon", epsilon)
    checks.between("delta", delta, 0, 1)
    checks.between("share", share, 0, 1)
