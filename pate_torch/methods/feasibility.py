"""Predictions from public values, before any charge, whether labels will be better than guesses.

Teacher agreement is private. The lead in votes that useful labels need is public, because it depends only on the noise.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
from scipy import stats
from scipy.optimize import brentq
from scipy.special import log_ndtr, ndtri

from pate_torch.accounting import costs
from pate_torch.core import checks
from pate_torch.mechanisms import confident, gaussian, histogram, laplace
from pate_torch.mechanisms.base import Mechanism
from pate_torch.mechanisms.sparse_vector import DistanceToInstability, SparseVectorMechanism
from pate_torch.methods.base import ModelForecast

NUM_QUANTILES = 4000
MIN_SKILL = 0.05
"""Smallest skill that a few hundred labels can distinguish from chance. Skill 0 is guessing, and 1 is certainty."""
MAX_LEAD_SHARE = 0.5
"""Largest lead in votes that many ensembles reach, as a share of the number of teachers."""
NUM_AVERAGES = 20
"""Number of directions in which a regression of noisy counts fits noise, in forecasts."""
_SKILL_COEFFICIENTS = (-0.368, 0.155, 0.064)
_SKILL_DEVIATIONS = (-0.40, 0.39)
"""Expected skill of a model of noisy gradients: a constant, and coefficients of the logarithms of the number of units,
and of those outside the largest class, per unit of noise. The interval held the skill in eight of ten of 227 stand-in
cases (126 tables at epsilon 0.1 to 4; docs/experiments/first-answers.md)."""
NOISE_ADVICE = "Ask fewer queries, take more teachers, or spend a larger epsilon."


class LowSignalWarning(UserWarning):
    """Warning that labels will be mostly noise (``format_low_signal_warning``), for calls in Python."""


def check_informative(
    mechanism: Mechanism,
    num_teachers: int,
    num_classes: int,
    *,
    allow_uninformative: bool,
    override_hint: str = "privacy.allow_uninformative_labels=true",
) -> None:
    """Raise ValueError if labels would be no better than chance even if all teachers agreed on the truth.

    With ``allow_uninformative``, such labels are accepted. ``override_hint`` is the setting that accepts them, for the
    message.
    """
    if allow_uninformative:
        return
    accuracy = compute_label_accuracy(num_teachers, mechanism, num_classes)
    if accuracy is not None and accuracy < MIN_SKILL + (1 - MIN_SKILL) / num_classes:
        problem = (
            f"with {num_teachers} teachers labels would be no better than chance: {100 * accuracy:.1f} % would be "
            f"right even if all teachers agreed on the truth, and {100 / num_classes:.1f} % of guesses are right"
        )
        fix = f"Take more teachers, less noise or a larger target_epsilon; or set {override_hint}."
        sigma = dataclasses.asdict(mechanism).get("sigma")
        key, value = ("mechanism", mechanism.name) if sigma is None else ("mechanism.sigma", sigma)
        raise checks.error(key, value, problem, fix)


def compute_label_accuracy(lead: float, mechanism: Mechanism, num_classes: int) -> float | None:
    """Compute the probability that an answer is the class that leads every other class by ``lead`` votes.

    The noisy count of this class exceeds all others with probability E[F(Z + lead)^(C - 1)] for noise Z ~ F. The
    expectation is the mean over ``NUM_QUANTILES`` equally likely values of Z. Continuous noise also stands for integer
    noise. Return None for mechanisms such as the sparse vector, which answer exactly or not at all.
    """
    model: costs.OutcomeModel | None
    match mechanism:
        case gaussian.GNMax() | confident.ConfidentGNMax() | confident.InteractiveGNMax() | histogram.Histogram():
            model = costs.GaussianNoisyMaxCost(sigma=mechanism.sigma)
        case laplace.LNMax():
            model = costs.LaplaceNoisyMaxCost(scale=mechanism.sigma)
        case _:
            model = mechanism.make_outcome_model()
    match model:
        case costs.GaussianNoisyMaxCost(sigma=scale) | costs.ConfidentCost(sigma=scale):
            quantile, log_cdf = ndtri, log_ndtr
        case costs.LaplaceNoisyMaxCost(scale=scale):
            quantile, log_cdf = stats.laplace.ppf, stats.laplace.logcdf
        case costs.ExponentialCost(rate=rate):
            return 1 / (1 + (num_classes - 1) * math.exp(-rate * lead))
        case _:
            return None
    noise_N = quantile((np.arange(NUM_QUANTILES) + 0.5) / NUM_QUANTILES)
    return float(np.exp((num_classes - 1) * log_cdf(noise_N + lead / scale)).mean())


def compute_break_even_lead(mechanism: Mechanism, num_classes: int) -> float | None:
    """Compute the lead in votes at which the accuracy of a label is halfway between guessing and certainty.

    The class leads every other class by this number of votes. A smaller lead suffices if the other classes have unequal
    votes, because classes behind the second hardly ever win. Return None where ``compute_label_accuracy`` does.
    """
    high, target = 1.0, 0.5 + 0.5 / num_classes
    while (accuracy := compute_label_accuracy(high, mechanism, num_classes)) is not None and accuracy < target:
        high *= 2
    if accuracy is None:
        return None
    return float(brentq(lambda lead: (compute_label_accuracy(lead, mechanism, num_classes) or 0) - target, 0, high))


def forecast_gradients(num_units: int, num_minority_units: float, sigma: float) -> ModelForecast:
    """Forecast the skill of a model of noisy gradients, whose sums have noise ``sigma`` in clipping norms.

    Both numbers of units are estimates. ``num_minority_units`` counts those outside the largest class.
    """
    logarithms = (1.0, math.log(num_units / sigma), math.log(max(num_minority_units, 1e-3) / sigma))
    skill = sum(c * v for c, v in zip(_SKILL_COEFFICIENTS, logarithms, strict=True))
    skill, low, high = (min(max(skill + deviation, -1.0), 1.0) for deviation in (0.0, *_SKILL_DEVIATIONS))
    return ModelForecast(num_units, skill, low, high)


def compute_answering_lead(mechanism: Mechanism, num_queries: int, num_classes: int) -> int | None:
    """Compute the lead in votes at which half of the queries are answered, or None if all queries are answered."""
    match mechanism:
        case SparseVectorMechanism():
            return mechanism.make_cost(num_queries, num_classes).min_teachers
        case DistanceToInstability():
            return mechanism.min_teachers
    return None


def average_counts(mechanism: Mechanism, num_queries: int) -> Mechanism:
    """Return the mechanism with the noise of averaged counts if it releases counts, and otherwise the mechanism itself.

    A student that learns from noisy counts averages the noise of many queries.
    """
    if not isinstance(mechanism, gaussian.GNMax) or not mechanism.counts:
        return mechanism
    return dataclasses.replace(mechanism, sigma=mechanism.sigma * min(1, NUM_AVERAGES / num_queries) ** 0.5)


def format_low_signal_warning(
    mechanism: Mechanism, num_teachers: int, num_classes: int, num_queries: int
) -> str | None:
    """Format a warning if useful labels need a lead of more than ``MAX_LEAD_SHARE`` of the votes, else None."""
    mechanism = average_counts(mechanism, num_queries)
    lead, symptom = compute_break_even_lead(mechanism, num_classes), "a label is nearer to a guess than to the truth"
    if lead is None:
        lead, symptom = compute_answering_lead(mechanism, num_queries, num_classes), "most queries are not answered"
    if lead is None or lead <= MAX_LEAD_SHARE * num_teachers:
        return None
    agreement = "no ensemble can reach this lead" if lead > num_teachers else "few ensembles reach this lead"
    return (
        f"Noise outweighs these votes: {symptom} unless one class leads every other class by {lead:.3g} of "
        f"{num_teachers} votes, and {agreement}."
    )
