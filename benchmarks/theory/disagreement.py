"""How fast the region of disagreement shrinks with the distance from the best hypothesis."""

from __future__ import annotations

from typing import Any

import numpy as np

from pate_torch.core import checks
from pate_torch.hypotheses.classes import HypothesisClass
from pate_torch.hypotheses.sample import Floats, check_points


def disagreement_coefficient(hypotheses: HypothesisClass, center: Any, x: Floats, *, radius: float) -> float:
    """theta(r0) = max over r >= r0 of P(DIS(B(h, r)))/r, and 1 at least; exact for the uniform distribution on x.

    B(h, r) are the hypotheses that label a share r of the points or less otherwise than ``center``, DIS(B) the points
    on which two of B differ. On a sample of a distribution it estimates that distribution's.

    Source: Hanneke 2014, as LZCW21 Theorem 22 takes it.
    """
    checks.between("radius", radius, 0, 1, exclusive=True)
    x = check_points("x", x)
    apart_Mn = hypotheses.compute_labelings(hypotheses.enumerate_representatives(x), x) != hypotheses.predict(center, x)
    share_M = apart_Mn.mean(axis=1)
    order = np.argsort(share_M, kind="stable")
    # The center is in every ball, so a point is in DIS(B) where one of B labels it otherwise than the center.
    region_M = np.maximum.accumulate(apart_Mn[order], axis=0).mean(axis=1)
    ratio_M = region_M / np.maximum(share_M[order], radius)
    return max(1.0, float(ratio_M.max()))
