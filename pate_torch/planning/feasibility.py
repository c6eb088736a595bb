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
from pate_torch.mechanisms.distance_to_instability import DistanceToInstability
from pate_torch.mechanisms.gradient_descent import GradientDescent
from pate_torch.mechanisms.sparse_vector_base import SparseVectorMechanism, compute_min_teachers
from pate_torch.planning.gradient_budget import Descent, calibrated
from pate_torch.protocols import Mechanism
from pate_torch.types import Dataset

if TYPE_CHECKING:
    from pate_torch.config import RunConfig

PARTS = 4000
LEAST_SKILL = 0.05
"""Of the way from guessing to certainty: less is not told from chance by the few hundred labels of a release."""
MOST_LEAD = 0.5
"""Of the votes: teachers who must lead by more are asked to agree as few ensembles do."""
SMALLER = "Ask fewer questions, take more teachers, or spend a larger epsilon."


def refuse(
    mechanism: Mechanism, *, num_teachers: int, num_classes: int, forced: bool, force: str = "privacy.allow_chance=true"
) -> None:
    """Refuse a plan whose labels would be no better than chance even if all teachers agreed on the truth.

    Args:
        mechanism: Answers the questions.
        num_teachers: Who agree.
        num_classes: Classes to guess among.
        forced: The user wants such labels all the same.
        force: How to say so, for the message.

    Raises:
        ValueError: Labels would be no better than chance.
    """
    if forced:
        return
    right = right_at(num_teachers, mechanism, num_classes)
    if right is not None and right < _at_skill(LEAST_SKILL, num_classes):
        noise = getattr(mechanism, "sigma", None)
        what = (
            f"with {num_teachers} teachers labels would be no better than chance: right {100 * right:.1f} % of the time"
            f" even if all teachers agreed on the truth, where guessing is right {100 / num_classes:.1f} %"
        )
        fix = f"Take more teachers, less noise or a larger target_epsilon; or say {force}."
        raise checks.error("mechanism" if noise is None else "mechanism.sigma", noise or mechanism.name, what, fix)


def right_at(lead: float, mechanism: Mechanism, num_classes: int) -> float | None:
    """Probability that an answer names the class that leads every other by ``lead`` votes; None: no law is known.

    It is the chance that this class's noisy count exceeds all others, P = E[F(Z + lead)^(C - 1)] over its noise Z ~ F,
    by the midpoints of equally likely parts. Whole numbers of noise follow the same law but for their grain. Mechanisms
    that answer exactly or not at all (the sparse vector's) have none.
    """
    match _model(mechanism):
        case GNMaxOutcomes(sigma=scale) | ConfidentOutcomes(sigma=scale):
            quantile, log_cdf = ndtri, log_ndtr
        case LNMaxOutcomes(scale=scale):
            quantile, log_cdf = _laplace_quantile, _laplace_log_cdf
        case ExponentialOutcomes(rate=rate):
            return 1 / (1 + (num_classes - 1) * math.exp(-rate * lead))
        case _:
            return None
    noise_N = quantile((np.arange(PARTS) + 0.5) / PARTS)
    return float(np.exp((num_classes - 1) * log_cdf(noise_N + lead / scale)).mean())


def _laplace_quantile(p_N: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.where(p_N < 0.5, np.log(2 * p_N), -np.log(2 - 2 * p_N))


def _laplace_log_cdf(x_N: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.where(x_N < 0, x_N - math.log(2), np.log1p(-np.exp(-np.abs(x_N)) / 2))


def break_even(mechanism: Mechanism, num_classes: int) -> float | None:
    """The lead over every other class, in votes, at which a label is as near to the truth as to a guess; None as above.

    Where the others are not level, less will do: what is behind the second is hardly ever drawn.
    """
    target, high = _at_skill(0.5, num_classes), 1.0
    if right_at(high, mechanism, num_classes) is None:
        return None

    def excess(lead: float) -> float:
        right = right_at(lead, mechanism, num_classes)
        assert right is not None
        return right - target

    while excess(high) < 0:
        high *= 2
    return float(brentq(excess, 0, high))


def lead_to_answer(mechanism: Mechanism, num_queries: int, num_classes: int) -> int | None:
    """The lead, in votes, at which a question is answered every other time; None: whether it is depends on no lead."""
    match mechanism:
        case SparseVectorMechanism():
            return mechanism.compute_scales(num_queries, num_classes).min_teachers
        case DistanceToInstability():
            return compute_min_teachers(mechanism.threshold)
    return None


def drowned(mechanism: Mechanism, num_teachers: int, num_classes: int, num_queries: int) -> str | None:
    """Warning about labels for which teachers must lead by more than ``MOST_LEAD``; None where less will do."""
    lead, what = break_even(mechanism, num_classes), "a label is nearer to a guess than to the truth"
    if lead is None:
        lead, what = lead_to_answer(mechanism, num_queries, num_classes), "a question is left unanswered, as a rule,"
    if lead is None or lead <= MOST_LEAD * num_teachers:
        return None
    agree = "no teachers can" if lead > num_teachers else "few teachers do"
    return (
        f"Noise drowns these votes: {what} unless a class leads every other by {lead:.3g} of {num_teachers} votes, as "
        f"{agree}."
    )


Remedy = Callable[["RunConfig", Dataset, Descent], str]
"""Says of a noisy gradient descent how it is asked for."""


class Drowned(UserWarning):
    """The warning of ``drowned``, where there is no run to show it."""


def foretold(plan: RunConfig, data: Dataset, mechanism: Mechanism, how: Remedy | None = None) -> str | None:
    """Warning about a run of teachers, and what would do better; None where there is nothing to say.

    Args:
        plan: Plan of the run.
        data: Its public facts are looked at, and whether there are records.
        mechanism: Answers the questions.
        how: Says of a noisy gradient descent how it is asked for; None: by settings of train.py.
    """
    drowns = (
        drowned(mechanism, plan.num_teachers, data.spec.num_classes, plan.num_queries) if plan.num_teachers else None
    )
    if drowns is None:
        return None
    descent = same_price(plan, mechanism, data.spec.nominal_size, len(data.pool))
    if descent is None or len(data.private) == 0:  # of votes alone there are no records here
        return f"{drowns} {SMALLER}"
    return f"{drowns} {instead(descent, (how or typed)(plan, data, descent))}"


def same_price(plan: RunConfig, mechanism: Mechanism, size: int | None, public: int | None) -> Descent | None:
    """Noisy descent at the price of the plan's labels; None where the plan's kind of noise has none.

    Args:
        plan: Plan of the run with teachers.
        mechanism: Its, with its noise.
        size: About how many records there are; None: it is not public.
        public: Public points; None: not known.
    """
    if plan.privacy.noise not in GradientDescent.noise_kinds:
        return None
    delta = plan.privacy.delta
    epsilon = calibration.compute_epsilon(mechanism.privacy_events(plan.num_queries, plan.num_rounds), delta)
    return calibrated(epsilon=epsilon, delta=delta, adjacency=plan.partition.adjacency, records=size, public=public)


def instead(descent: Descent, how: str) -> str:
    """What to do where votes drown in noise.

    Args:
        descent: Noisy descent at the same price.
        how: How the records are asked, in words.
    """
    if descent.drowned:
        return SMALLER
    records = descent.records
    of = "all records, where there are thousands and about how many is public"
    of = of if records is None else f"{records:,} records"
    noise = f"{descent.mechanism.sigma:.3g}"
    return f"The same epsilon buys noise of {noise} on the sum of the clipped gradients of {of}: {how}"


def typed(plan: RunConfig, data: Dataset, descent: Descent) -> str:
    """The settings of train.py that have the records of a run answer at the same price, as typed."""
    images, encoded = data.spec.is_image, data.spec.encoder is not None
    return " ".join(settings(plan, descent, images=images, encoded=encoded, questions=len(data.pool)))


def settings(
    plan: RunConfig, descent: Descent, *, images: bool | None, encoded: bool, questions: int | None
) -> tuple[str, ...]:
    """The settings of train.py that have records answer by gradients in the place of this plan's teachers.

    Args:
        plan: Plan of the run with teachers; where it has a target, that decides the noise.
        descent: Noisy descent at the same price.
        images: Whether its points are images; None: not known.
        encoded: Whether they are an encoder's features.
        questions: How many to ask; None: as the plan has it.
    """
    steps = descent.mechanism
    said = ["voters=gradients", "mechanism=gradient_descent", "query=random"]
    said += [] if plan.privacy.target_epsilon is not None else [f"mechanism.sigma={steps.sigma:.4g}"]
    if descent.directions is None:
        said += ["voters.size=<about how many>"]
    else:
        said += [f"voters.directions={descent.directions:.3g}", f"mechanism.steps={steps.steps}"]
        said += [f"mechanism.clip_norm={steps.clip_norm:g}", f"mechanism.first_step_size={steps.first_step_size:.3g}"]
        said += [f"mechanism.step_size={steps.step_size:.3g}"]
    said += [] if questions is None else [f"num_queries={questions}"]
    said += ["features=contrastive"] if images and plan.features is None else []
    said += _student(images, descent.self_training(encoded))
    said += [] if plan.private_epsilon is None else ["sanitiser=none"]
    said += [] if getattr(plan.partition, "capacity", None) is None else ["partition.capacity=null"]
    return tuple(said)


def _student(images: bool | None, of_answers: bool) -> list[str]:
    """Of few answers or of images one learns from them; else the model itself is released."""
    if images is False and not of_answers:
        return ["student=released_model"]
    return ["student=self_training", "student.alpha=.5" if of_answers else "student.alpha=.3"]


def _at_skill(skill: float, num_classes: int) -> float:
    """The share of right labels that lies so far on the way from guessing to certainty."""
    return skill + (1 - skill) / num_classes


def _model(mechanism: Mechanism) -> OutcomeModel | None:
    """The law of a label that is given, be the noise continuous or discrete."""
    match mechanism:
        case gaussian.GNMax() | confident.ConfidentGNMax() | interactive.InteractiveGNMax() | histogram.Histogram():
            return GNMaxOutcomes(sigma=mechanism.sigma)
        case laplacian.LNMax():
            return LNMaxOutcomes(scale=mechanism.sigma)
    return mechanism.make_outcome_model()
