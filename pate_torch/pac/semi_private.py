"""A private learner with public points: the exponential mechanism over their dichotomies (SSPP)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from pate_torch.budget import NoiseProvider
from pate_torch.core import checks
from pate_torch.pac.classes import representatives
from pate_torch.pac.exponential import Chosen, exponential_mechanism
from pate_torch.pac.nets import log_sauer_shelah, net_size, uniform_size
from pate_torch.pac.sample import Floats, Sample, points, require_replace_one, warn_below
from pate_torch.protocols import HypothesisClass


def sspp_public_size(vc_dimension: int, *, alpha: float, beta: float) -> int:
    """Number of public points that give a cover within alpha/4, except with probability beta/3."""
    return net_size(alpha / 4, beta / 3, vc_dimension)


def sspp_private_size(vc_dimension: int, *, epsilon: float, alpha: float, beta: float, public: int = 0) -> int:
    """Smallest n for excess error alpha with probability 1 - beta.

    alpha/4 for the cover the public points give, alpha/4 for the exponential mechanism on it
    (2 (ln M + ln(3/beta)) / (epsilon n) with M <= sum_{i<=d} C(m, i)), and 2 alpha/4 for uniform convergence.

    Args:
        vc_dimension: VC dimension d.
        epsilon: Price of the choice (bounded range).
        alpha: Excess error.
        beta: Failure probability.
        public: m, if more than ``sspp_public_size``: more points make a larger cover to choose from.

    Source: NB20 appendix B.2 (after Alon, Bassily & Moran 2019), with explicit constants.
    """
    points_used = max(public, sspp_public_size(vc_dimension, alpha=alpha, beta=beta))
    log_cover = log_sauer_shelah(points_used, vc_dimension)
    mechanism = 8 * (log_cover + math.log(3 / beta)) / (epsilon * alpha)
    return max(math.ceil(mechanism), uniform_size(alpha / 4, beta / 3, vc_dimension))


def sspp(
    hypotheses: HypothesisClass,
    sample: Sample,
    public_x: Floats,
    *,
    epsilon: float,
    budget: NoiseProvider,
    alpha: float = 0.5,
    beta: float = 0.5,
) -> Chosen:
    """A hypothesis of the class, chosen among one per dichotomy of the *public* points by its errors on the sample.

    If the class labels the public points in one way only, that one hypothesis is returned free of charge. Warns below
    ``sspp_private_size`` and ``sspp_public_size``.

    Args:
        hypotheses: The class.
        sample: PRIVATE.
        public_x: [m, D], unlabeled, independent of the sample.
        epsilon: Price of the choice (bounded range).
        budget: Pays, and gives the noise.
        alpha: Excess error of the warning.
        beta: Failure probability of the warning.

    Guarantee: BoundedRange(epsilon), hence epsilon-DP. Replace-one; error counts have sensitivity 1.
    Source: NB20 Algorithm 7.
    """
    candidates = sspp_candidates(hypotheses, sample, public_x, epsilon=epsilon, alpha=alpha, beta=beta)
    # The condition on n has just been checked, for a cover of the size the theorem asks for.
    vacuous = 1 - 1e-12
    return exponential_mechanism(hypotheses, candidates, sample, epsilon=epsilon, budget=budget, alpha=vacuous)


def sspp_candidates(
    hypotheses: HypothesisClass, sample: Sample, public_x: Floats, *, epsilon: float, alpha: float, beta: float
) -> Sequence[Any]:
    """One hypothesis per dichotomy of the public points. Refuses and warns as ``sspp`` does."""
    require_replace_one(sample, "SSPP")
    checks.positive("epsilon", epsilon)
    public_x = points("public_x", public_x)
    if len(public_x) == 0:
        raise checks.error("public_x", [], "must hold at least one point")
    d, m = hypotheses.vc_dimension, len(public_x)
    needed = sspp_private_size(d, epsilon=epsilon, alpha=alpha, beta=beta, public=m)
    warn_below(
        "SSPP",
        sample.n,
        [(f"excess error {alpha:g} with probability {1 - beta:g}", needed)],
        [("public points", m, sspp_public_size(d, alpha=alpha, beta=beta))],
    )
    return representatives(hypotheses, public_x)
