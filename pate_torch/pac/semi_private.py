"""A private learner with public points: the exponential mechanism over their dichotomies (SSPP)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from pate_torch.core import checks
from pate_torch.pac.classes import HypothesisClass, enumerate_representatives
from pate_torch.pac.exponential import ChosenHypothesis, run_exponential_mechanism
from pate_torch.pac.nets import compute_log_sauer_shelah, compute_net_size, compute_uniform_size
from pate_torch.pac.sample import Floats, Sample, check_points, check_replace_one, warn_below_guarantee
from pate_torch.privacy.budget import NoiseProvider


def compute_sspp_public_size(vc_dimension: int, *, alpha: float, beta: float) -> int:
    """Number of public points that give a cover within alpha/4, except with probability beta/3."""
    return compute_net_size(alpha / 4, beta / 3, vc_dimension)


def compute_sspp_private_size(
    vc_dimension: int, *, epsilon: float, alpha: float, beta: float, num_public: int = 0
) -> int:
    """Smallest n for excess error alpha with probability 1 - beta.

    alpha/4 for the cover the public points give, alpha/4 for the exponential mechanism on it
    (2 (ln M + ln(3/beta)) / (epsilon n) with M <= sum_{i<=d} C(m, i)), and 2 alpha/4 for uniform convergence.

    Args:
        vc_dimension: VC dimension d.
        epsilon: Price of the choice (bounded range).
        alpha: Excess error.
        beta: Failure probability.
        num_public: m, if more than ``compute_sspp_public_size``: more points make a larger cover to choose from.

    Source: NB20 appendix B.2 (after Alon, Bassily & Moran 2019), with explicit constants.
    """
    num_points = max(num_public, compute_sspp_public_size(vc_dimension, alpha=alpha, beta=beta))
    log_cover = compute_log_sauer_shelah(num_points, vc_dimension)
    mechanism_size = 8 * (log_cover + math.log(3 / beta)) / (epsilon * alpha)
    return max(math.ceil(mechanism_size), compute_uniform_size(alpha / 4, beta / 3, vc_dimension))


def run_sspp(
    hypotheses: HypothesisClass,
    sample: Sample,
    public_x: Floats,
    *,
    epsilon: float,
    budget: NoiseProvider,
    alpha: float = 0.5,
    beta: float = 0.5,
) -> ChosenHypothesis:
    """A hypothesis of the class, chosen among one per dichotomy of the *public* points by its errors on the sample.

    If the class labels the public points in one way only, that one hypothesis is returned free of charge. Warns below
    ``compute_sspp_private_size`` and ``compute_sspp_public_size``.

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
    candidates = enumerate_sspp_candidates(hypotheses, sample, public_x, epsilon=epsilon, alpha=alpha, beta=beta)
    # The condition on n has just been checked, for a cover of the size the theorem asks for.
    vacuous_alpha = 1 - 1e-12
    return run_exponential_mechanism(
        hypotheses, candidates, sample, epsilon=epsilon, budget=budget, alpha=vacuous_alpha
    )


def enumerate_sspp_candidates(
    hypotheses: HypothesisClass, sample: Sample, public_x: Floats, *, epsilon: float, alpha: float, beta: float
) -> Sequence[Any]:
    """One hypothesis per dichotomy of the public points. Refuses and warns as ``run_sspp`` does."""
    check_replace_one(sample, "SSPP")
    checks.positive("epsilon", epsilon)
    public_x = check_points("public_x", public_x)
    if len(public_x) == 0:
        raise checks.error("public_x", [], "must hold at least one point")
    d, m = hypotheses.vc_dimension, len(public_x)
    min_n = compute_sspp_private_size(d, epsilon=epsilon, alpha=alpha, beta=beta, num_public=m)
    warn_below_guarantee(
        "SSPP",
        sample.n,
        [(f"excess error {alpha:g} with probability {1 - beta:g}", min_n)],
        [("public points", m, compute_sspp_public_size(d, alpha=alpha, beta=beta))],
    )
    return enumerate_representatives(hypotheses, public_x)
