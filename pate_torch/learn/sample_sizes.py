"""The theorems that ``pate learn bounds`` prints, in numbers; each function is named after its theorem.

Where a theorem hides a constant in O(.), the function takes it as ``constant`` (1 by default): such a value is a rate
to compare with, not a promise. d: VC dimension; m: public points or queries; T: failures at which the sparse vector
stops.
"""

from __future__ import annotations

import math


def lzcw21_theorem_5(
    m: int, d: int, n: int, *, epsilon: float, delta: float, best: float = 0.0, constant: float = 1.0
) -> float:
    """Error of PATE-PSQ; realizable for best = 0.

    Realizable: C (d^2 m ln(1/delta)/(n epsilon)^2 + sqrt(d/m)). Agnostic:
    13 best + C (m^{1/3} (d/(n epsilon))^{2/3} + sqrt(d/m)).
    """
    if best == 0:
        return constant * (d**2 * m * math.log(1 / delta) / (n * epsilon) ** 2 + math.sqrt(d / m))
    return 13 * best + constant * (m ** (1 / 3) * (d / (n * epsilon)) ** (2 / 3) + math.sqrt(d / m))


def lzcw21_theorem_10(
    m: int, d: int, n: int, *, epsilon: float, tau: float, constant: float = 1.0
) -> tuple[float, float]:
    """(T, excess error) under Tsybakov noise tau.

    C (m^{2-tau} (d/(n epsilon))^tau)^{2/(4-3 tau)}, and C (d/m + (m d^2/(n epsilon)^2)^{tau/(4-3 tau)}).
    """
    T = constant * (m ** (2 - tau) * (d / (n * epsilon)) ** tau) ** (2 / (4 - 3 * tau))
    return T, constant * (d / m + (m * (d / (n * epsilon)) ** 2) ** (tau / (4 - 3 * tau)))


def lzcw21_theorem_22_error(
    m: float, d: int, n: int, *, epsilon: float, delta: float, theta: float, tau: float, constant: float = 1.0
) -> float:
    """Excess error with active queries: C max((d^{3/2} sqrt(theta ln(1/delta))/(n epsilon))^{tau/(2-tau)}, d/m)."""
    private = d**1.5 * math.sqrt(theta * math.log(1 / delta)) / (n * epsilon)
    return constant * max(private ** (tau / (2 - tau)), d / m)


def lzcw21_theorem_28_error(m: float, d: int, n: int, *, epsilon: float, tau: float, constant: float = 1.0) -> float:
    """Excess error of Gaussian PATE under Tsybakov noise tau: C (d/m + (d sqrt(m)/(n epsilon))^{tau/(2-tau)})."""
    return constant * (d / m + (d * math.sqrt(m) / (n * epsilon)) ** (tau / (2 - tau)))


def df20_theorem_4(d: int, *, gamma: float, alpha: float) -> float:
    """Smallest n, (d - 1)/(8 gamma alpha), of a gamma-stable learner with expected error alpha <= 1/4."""
    return (d - 1) / (8 * gamma * alpha)
