"""Would a plan's labels be any better than guesses? Foretold from public values alone, before anything is charged."""

from __future__ import annotations

import math

import numpy as np
from scipy.stats import laplace, norm

from pate_torch.accounting.outcomes import Confident, Exponential, Gnmax, Lnmax, OutcomeModel
from pate_torch.core import checks
from pate_torch.mechanisms import confident, gaussian, histogram, interactive
from pate_torch.mechanisms import laplace as laplacian
from pate_torch.protocols import Mechanism

PARTS = 4000
LEAST_SKILL = 0.05
"""Of the way from guessing to certainty: less is not told from chance by the few hundred labels of a release."""


def refuse(
    mechanism: Mechanism, *, num_teachers: int, num_classes: int, forced: bool, force: str = "privacy.allow_chance=true"
) -> None:
    """Raise ValueError where labels would be no better than chance even if all teachers agreed on the truth."""
    if forced:
        return
    right, guess = best_case(mechanism, num_teachers, num_classes), 1 / num_classes
    if right is not None and right < guess + LEAST_SKILL * (1 - guess):
        noise = getattr(mechanism, "sigma", None)
        what = (
            f"with {num_teachers} teachers labels would be no better than chance: right {100 * right:.1f} % of the time"
            f" even if all teachers agreed on the truth, where guessing is right {100 * guess:.1f} %"
        )
        fix = f"Take more teachers, less noise or a larger target_epsilon; or say {force}."
        raise checks.fail("mechanism" if noise is None else "mechanism.sigma", noise or mechanism.name, what, fix)


def best_case(mechanism: Mechanism, num_teachers: int, num_classes: int) -> float | None:
    """The probability that an answer is right where all teachers agree on the truth; None where no law is known.

    It is the chance that the truth's noisy count exceeds all others, P = E[F(Z + K)^(C - 1)] over its noise Z ~ F, by
    the midpoints of equally likely parts. Whole numbers of noise follow the same law but for their grain. Mechanisms
    that answer exactly or not at all (the sparse vector's) have none.
    """
    match _model(mechanism):
        case Gnmax(sigma=scale) | Confident(sigma=scale):
            law = norm
        case Lnmax(scale=scale):
            law = laplace
        case Exponential(rate=rate):
            return 1 / (1 + (num_classes - 1) * math.exp(-rate * num_teachers))
        case _:
            return None
    noise_N = law.ppf((np.arange(PARTS) + 0.5) / PARTS)
    return float(np.exp((num_classes - 1) * law.logcdf(noise_N + num_teachers / scale)).mean())


def _model(mechanism: Mechanism) -> OutcomeModel | None:
    """The law of a label that is given, be the noise continuous or discrete."""
    match mechanism:
        case gaussian.Gaussian() | confident.Confident() | interactive.Interactive() | histogram.Histogram():
            return Gnmax(sigma=mechanism.sigma)
        case laplacian.Laplace():
            return Lnmax(scale=mechanism.sigma)
    return mechanism.outcome_model()
