"""Whether labels would be any better than guesses, predicted from public values before anything is charged.

Teacher agreement is private; the lead that useful labels need is public, because it depends only on the noise scale.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import log_ndtr, ndtri

from pate_torch.accounting.data_dependent.theorems import (
    ConfidentOutcomes,
    ExponentialOutcomes,
    GNMaxOutcomes,
    LNMaxOutcomes,
    OutcomeModel,
)
from pate_torch.core import checks
from pate_torch.mechanisms import confident, gaussian, histogram
from pate_torch.mechanisms import laplace as laplacian
from pate_torch.mechanisms.base import Mechanism
from pate_torch.mechanisms.sparse_vector import DistanceToInstability, SparseVectorMechanism, compute_min_teachers

NUM_QUANTILES = 4000
MIN_SKILL = 0.05
"""Of the way from guessing to certainty: less is not told from chance by the few hundred labels of a release."""
MAX_LEAD_SHARE = 0.5
"""Of the votes: teachers who must lead by more are asked to agree as few ensembles do."""
NOISE_ADVICE = "Ask fewer questions, take more teachers, or spend a larger epsilon."


def check_informative(
    mechanism: Mechanism,
    *,
    num_teachers: int,
    num_classes: int,
    allow_uninformative: bool,
    override_hint: str = "privacy.allow_uninformative_labels=true",
) -> None:
    """Refuse a plan whose labels would be no better than chance even if all teachers agreed on the truth.

    Args:
        mechanism: Answers the questions.
        num_teachers: Who agree.
        num_classes: Classes to guess among.
        allow_uninformative: The user wants such labels all the same.
        override_hint: How to say so, for the message.

    Raises:
        ValueError: Labels would be no better than chance.
    """
    if allow_uninformative:
        return
    accuracy = compute_label_accuracy(num_teachers, mechanism, num_classes)
    if accuracy is not None and accuracy < _compute_accuracy(MIN_SKILL, num_classes):
        problem = (
            f"with {num_teachers} teachers labels would be no better than chance: right {100 * accuracy:.1f} % of the "
            f"time even if all teachers agreed on the truth, where guessing is right {100 / num_classes:.1f} %"
        )
        fix = f"Take more teachers, less noise or a larger target_epsilon; or say {override_hint}."
        sigma = dataclasses.asdict(mechanism).get("sigma")
        key, value = ("mechanism", mechanism.name) if sigma is None else ("mechanism.sigma", sigma)
        raise checks.error(key, value, problem, fix)


def compute_label_accuracy(lead: float, mechanism: Mechanism, num_classes: int) -> float | None:
    """Probability that an answer names the class that leads every other by ``lead`` votes; None: no law is known.

    It is the chance that this class's noisy count exceeds all others, P = E[F(Z + lead)^(C - 1)] over its noise Z ~ F,
    by the midpoints of equally likely parts. Whole numbers of noise follow the same law but for their grain. Mechanisms
    that answer exactly or not at all (the sparse vector's) have none.
    """
    match _make_outcome_model(mechanism):
        case GNMaxOutcomes(sigma=scale) | ConfidentOutcomes(sigma=scale):
            quantile, log_cdf = ndtri, log_ndtr
        case LNMaxOutcomes(scale=scale):
            quantile, log_cdf = _compute_laplace_quantile, _compute_laplace_log_cdf
        case ExponentialOutcomes(rate=rate):
            return 1 / (1 + (num_classes - 1) * math.exp(-rate * lead))
        case _:
            return None
    noise_N = quantile((np.arange(NUM_QUANTILES) + 0.5) / NUM_QUANTILES)
    return float(np.exp((num_classes - 1) * log_cdf(noise_N + lead / scale)).mean())


def _compute_laplace_quantile(p_N: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.where(p_N < 0.5, np.log(2 * p_N), -np.log(2 - 2 * p_N))


def _compute_laplace_log_cdf(x_N: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.where(x_N < 0, x_N - math.log(2), np.log1p(-np.exp(-np.abs(x_N)) / 2))


def compute_break_even_lead(mechanism: Mechanism, num_classes: int) -> float | None:
    """The lead over every other class, in votes, at which a label is as near to the truth as to a guess; None as above.

    Where the others are not level, less will do: what is behind the second is hardly ever drawn.
    """
    target, high = _compute_accuracy(0.5, num_classes), 1.0
    if compute_label_accuracy(high, mechanism, num_classes) is None:
        return None

    def compute_excess(lead: float) -> float:
        accuracy = compute_label_accuracy(lead, mechanism, num_classes)
        assert accuracy is not None
        return accuracy - target

    while compute_excess(high) < 0:
        high *= 2
    return float(brentq(compute_excess, 0, high))


def compute_answering_lead(mechanism: Mechanism, num_queries: int, num_classes: int) -> int | None:
    """The lead, in votes, at which a question is answered every other time; None: whether it is depends on no lead."""
    match mechanism:
        case SparseVectorMechanism():
            return mechanism.compute_scales(num_queries, num_classes).min_teachers
        case DistanceToInstability():
            return compute_min_teachers(mechanism.threshold)
    return None


def format_low_signal_warning(
    mechanism: Mechanism, num_teachers: int, num_classes: int, num_queries: int
) -> str | None:
    """Warning about labels for which teachers must lead by more than ``MAX_LEAD_SHARE``; None where less will do."""
    lead, symptom = compute_break_even_lead(mechanism, num_classes), "a label is nearer to a guess than to the truth"
    if lead is None:
        lead, symptom = (
            compute_answering_lead(mechanism, num_queries, num_classes),
            "a question is left unanswered, as a rule,",
        )
    if lead is None or lead <= MAX_LEAD_SHARE * num_teachers:
        return None
    agreement = "no teachers can" if lead > num_teachers else "few teachers do"
    return (
        f"Noise outweighs these votes: {symptom} unless a class leads every other by {lead:.3g} of {num_teachers} "
        f"votes, as {agreement}."
    )


class LowSignalWarning(UserWarning):
    """The warning of ``format_low_signal_warning``, where there is no run to show it."""


def _compute_accuracy(skill: float, num_classes: int) -> float:
    """The share of right labels that lies so far on the way from guessing to certainty."""
    return skill + (1 - skill) / num_classes


def _make_outcome_model(mechanism: Mechanism) -> OutcomeModel | None:
    """The law of a label that is given, be the noise continuous or discrete."""
    match mechanism:
        case gaussian.GNMax() | confident.ConfidentGNMax() | confident.InteractiveGNMax() | histogram.Histogram():
            return GNMaxOutcomes(sigma=mechanism.sigma)
        case laplacian.LNMax():
            return LNMaxOutcomes(scale=mechanism.sigma)
    return mechanism.make_outcome_model()
