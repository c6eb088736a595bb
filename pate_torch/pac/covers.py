"""Fewer candidates that are as good: covers of a class (DF20 Remark 1, WLF16 Examples 6 and 7)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from pate_torch.core import checks
from pate_torch.pac.nets import log_sauer_shelah, net_size
from pate_torch.pac.sample import Floats
from pate_torch.protocols import HypothesisClass


def alpha_cover(hypotheses: HypothesisClass, candidates: Sequence[Any], x: Floats, alpha: float) -> list[Any]:
    """Candidates of which one is within alpha n of each candidate's labels on x [n, D]: taken greedily, in their order.

    It looks at points, not at labels. Any two that are taken lie more than alpha n apart, so there are at most
    ``haussler_size`` of them, however many points there are.

    Source: DF20 Remark 1.
    """
    checks.between("alpha", alpha, 0, 1)
    labels_Mn = np.array([hypotheses.predict(h, x) for h in candidates], dtype=bool)
    kept: list[int] = []
    open_M = np.ones(len(candidates), dtype=bool)
    for place in range(len(candidates)):
        if open_M[place]:
            kept.append(place)
            open_M &= np.count_nonzero(labels_Mn != labels_Mn[place], axis=1) > alpha * len(x)
    return [candidates[place] for place in kept]


def haussler_size(vc_dimension: int, alpha: float) -> float:
    """Most labelings, any two of which differ on more than a share alpha of the points: e (d + 1) (2 e/alpha)^d.

    Source: Haussler 1995, which makes the (1/alpha)^O(d) of DF20 Remark 1.
    """
    checks.between("alpha", alpha, 0, 1, open_=True)
    return math.e * (vc_dimension + 1) * (2 * math.e / alpha) ** vc_dimension


def reference_size(vc_dimension: int, *, alpha: float, beta: float, domination: float = 1.0) -> int:
    """Draws from a public reference distribution whose dichotomies cover the class within alpha, but with beta.

    For every distribution whose density is at most ``domination`` times the reference's: whoever differs on less than
    alpha/domination of the reference differs on less than alpha of it. The dichotomies of these draws are a
    probabilistic representation of the class (WLF16 Example 6), with ``log_representation`` hypotheses.

    Source: WLF16 Example 7 (after Chaudhuri & Hsu 2011), with the constants of ``net_size``.
    """
    checks.between("alpha", alpha, 0, 1, open_=True)
    if not domination >= 1:
        raise checks.fail("domination", domination, "must be at least 1: no density lies below another everywhere")
    return net_size(alpha / domination, beta, vc_dimension)


def log_representation(vc_dimension: int, *, alpha: float, beta: float, domination: float = 1.0) -> float:
    """Log of the most hypotheses that ``reference_size`` draws represent a class by: log K of WLF16 Theorem 17."""
    size = reference_size(vc_dimension, alpha=alpha, beta=beta, domination=domination)
    return log_sauer_shelah(size, vc_dimension)
