"""Whether a plan's labels would be any better than guesses, predicted from public values before anything is charged.

How far teachers agree is private, but not how far they would have to: the noise is public, and with it the lead from
which its labels are nearer to the truth than to a guess.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import log_ndtr, ndtri

from pate_torch.accounting import calibration
from pate_torch.accounting.outcomes import (
    ConfidentOutcomes,
    ExponentialOutcomes,
    GNMaxOutcomes,
    LNMaxOutcomes,
    OutcomeModel,
)
from pate_torch.core import checks
from pate_torch.mechanisms import confident, gaussian, histogram, interactive
from pate_torch.mechanisms import laplace as laplacian
from pate_torch.mechanisms.base import Mechanism
from pate_torch.mechanisms.distance_to_instability import DistanceToInstability
from pate_torch.mechanisms.gradient_descent import GradientDescent
from pate_torch.mechanisms.sparse_vector_base import SparseVectorMechanism, compute_min_teachers
from pate_torch.planning.gradient_budget import CalibratedDescent, calibrate_gradients
from pate_torch.privacy.records import Dataset

if TYPE_CHECKING:
    from pate_torch.config import RunConfig

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
        noise = getattr(mechanism, "sigma", None)
        problem = (
            f"with {num_teachers} teachers labels would be no better than chance: right {100 * accuracy:.1f} % of the "
            f"time even if all teachers agreed on the truth, where guessing is right {100 / num_classes:.1f} %"
        )
        fix = f"Take more teachers, less noise or a larger target_epsilon; or say {override_hint}."
        raise checks.error("mechanism" if noise is None else "mechanism.sigma", noise or mechanism.name, problem, fix)


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


AlternativeFormatter = Callable[["RunConfig", Dataset, CalibratedDescent], str]
"""Says of a noisy gradient descent how it is asked for."""


class LowSignalWarning(UserWarning):
    """The warning of ``format_low_signal_warning``, where there is no run to show it."""


def forecast_warning(
    plan: RunConfig, data: Dataset, mechanism: Mechanism, format_alternative: AlternativeFormatter | None = None
) -> str | None:
    """Warning about a run of teachers, and what would do better; None where there is nothing to say.

    Args:
        plan: Plan of the run.
        data: Its public facts are looked at, and whether there are records.
        mechanism: Answers the questions.
        format_alternative: Says of a noisy gradient descent how it is asked for; None: by settings of train.py.
    """
    warning = (
        format_low_signal_warning(mechanism, plan.num_teachers, data.spec.num_classes, plan.num_queries)
        if plan.num_teachers
        else None
    )
    if warning is None:
        return None
    gradients = match_label_price(plan, mechanism, data.spec.nominal_size, len(data.pool))
    if gradients is None or len(data.private) == 0:  # of votes alone there are no records here
        return f"{warning} {NOISE_ADVICE}"
    return f"{warning} {suggest_gradients(gradients, (format_alternative or as_overrides)(plan, data, gradients))}"


def match_label_price(
    plan: RunConfig, mechanism: Mechanism, num_records: int | None, num_public: int | None
) -> CalibratedDescent | None:
    """Noisy descent at the price of the plan's labels; None where the plan's kind of noise has none.

    Args:
        plan: Plan of the run with teachers.
        mechanism: Its, with its noise.
        num_records: About how many records there are; None: it is not public.
        num_public: Public points; None: not known.
    """
    if plan.privacy.noise not in GradientDescent.noise_kinds:
        return None
    delta = plan.privacy.delta
    epsilon = calibration.compute_epsilon(mechanism.privacy_events(plan.num_queries, plan.num_rounds), delta)
    return calibrate_gradients(
        epsilon=epsilon, delta=delta, adjacency=plan.partition.adjacency, num_records=num_records, num_public=num_public
    )


def suggest_gradients(gradients: CalibratedDescent, alternative: str) -> str:
    """What to do where noise outweighs the votes.

    Args:
        gradients: Noisy descent at the same price.
        alternative: How the records are asked, in words.
    """
    if gradients.is_noise_dominated:
        return NOISE_ADVICE
    num_records = gradients.num_records
    records_text = "all records, where there are thousands and about how many is public"
    records_text = records_text if num_records is None else f"{num_records:,} records"
    noise = f"{gradients.mechanism.sigma:.3g}"
    return (
        f"The same epsilon buys noise of {noise} on the sum of the clipped gradients of {records_text}: {alternative}"
    )


def as_overrides(plan: RunConfig, data: Dataset, gradients: CalibratedDescent) -> str:
    """The settings of train.py that have the records of a run answer at the same price, as typed."""
    is_image, is_encoded = data.spec.is_image, data.spec.encoder is not None
    return " ".join(
        gradient_overrides(plan, gradients, is_image=is_image, is_encoded=is_encoded, num_queries=len(data.pool))
    )


def gradient_overrides(
    plan: RunConfig, gradients: CalibratedDescent, *, is_image: bool | None, is_encoded: bool, num_queries: int | None
) -> tuple[str, ...]:
    """The settings of train.py that have records answer by gradients in the place of this plan's teachers.

    Args:
        plan: Plan of the run with teachers; where it has a target, that decides the noise.
        gradients: Noisy descent at the same price.
        is_image: Whether its points are images; None: not known.
        is_encoded: Whether they are an encoder's features.
        num_queries: How many to ask; None: as the plan has it.
    """
    mechanism = gradients.mechanism
    overrides = ["method=gradients", "mechanism=gradient_descent", "query=random"]
    overrides += [] if plan.privacy.target_epsilon is not None else [f"mechanism.sigma={mechanism.sigma:.4g}"]
    if gradients.effective_dim is None:
        overrides += ["method.size=<about how many>"]
    else:
        overrides += [f"method.effective_dim={gradients.effective_dim:.3g}", f"mechanism.steps={mechanism.steps}"]
        overrides += [
            f"mechanism.clip_norm={mechanism.clip_norm:g}",
            f"mechanism.first_step_size={mechanism.first_step_size:.3g}",
        ]
        overrides += [f"mechanism.step_size={mechanism.step_size:.3g}"]
    overrides += [] if num_queries is None else [f"num_queries={num_queries}"]
    overrides += ["features=contrastive"] if is_image and plan.features is None else []
    overrides += _select_student(is_image, gradients.needs_self_training(is_encoded))
    overrides += [] if plan.private_epsilon is None else ["private_epsilon=none"]
    overrides += [] if getattr(plan.partition, "capacity", None) is None else ["partition.capacity=null"]
    return tuple(overrides)


def _select_student(is_image: bool | None, self_training: bool) -> list[str]:
    """Of few answers or of images one learns from them; else the model itself is released."""
    if is_image is False and not self_training:
        return ["student=released_model"]
    return ["student=self_training", "student.alpha=.5" if self_training else "student.alpha=.3"]


def _compute_accuracy(skill: float, num_classes: int) -> float:
    """The share of right labels that lies so far on the way from guessing to certainty."""
    return skill + (1 - skill) / num_classes


def _make_outcome_model(mechanism: Mechanism) -> OutcomeModel | None:
    """The law of a label that is given, be the noise continuous or discrete."""
    match mechanism:
        case gaussian.GNMax() | confident.ConfidentGNMax() | interactive.InteractiveGNMax() | histogram.Histogram():
            return GNMaxOutcomes(sigma=mechanism.sigma)
        case laplacian.LNMax():
            return LNMaxOutcomes(scale=mechanism.sigma)
    return mechanism.make_outcome_model()
