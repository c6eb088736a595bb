"""Choose the method that answers best at an epsilon, from public facts alone, and state the reason.

If the number of records is declared, the method is noisy gradients of a linear model: over random Fourier features of
rows, over contrastive features of images, over an encoder's features as they are. Otherwise it is teachers: for rows,
linear teachers of ten records or a few more, which are asked about the centers of clusters. DP-SGD is chosen by name
only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

from pate_torch.accounting import calibration
from pate_torch.core import checks
from pate_torch.features.base import FeatureRecipe
from pate_torch.features.contrastive import ContrastiveFeatures
from pate_torch.features.fourier import FourierFeatures
from pate_torch.mechanisms.base import Mechanism
from pate_torch.mechanisms.gaussian import GNMax
from pate_torch.methods import feasibility
from pate_torch.planning import gradient_budget
from pate_torch.queries.base import QueryStrategy
from pate_torch.queries.clusters import Medoids
from pate_torch.teachers.recipe import TeacherRecipe

METHODS: Final = ("auto", "teachers", "gradients", "dpsgd")
MAX_DELTA: Final = 1e-5
"""Largest delta that is chosen, and the delta if the number of records is not declared."""
_MAX_TEACHERS, _MIN_TEACHERS = 400, 10
_RECORDS_PER_TEACHER = 100
"""Records for each teacher that is a network, or an estimator of the user."""
_LINEAR_RECIPE: Final = TeacherRecipe(network="logistic", steps=60, batch_size=16, learning_rate=0.03)
_MAX_LINEAR_TEACHERS = 4000
_RECORDS_PER_LINEAR_TEACHER, _RECORDS_PER_CLASS = 10, 1.25
"""Records for each linear teacher, and at least so many for each class. The noise does not depend on the number of
teachers, so that many weak votes are better than few good ones (docs/experiments/teacher-settings.md)."""
TARGET_LEAD_SHARE = 0.25
"""Largest lead of the winner, as a share of the votes, that a useful label may need."""
_QUERY_COUNTS = (1000, 700, 500, 350, 250, 175, 125, 90, 60, 40, 30, 20, 10)


@dataclass(frozen=True, kw_only=True)
class PublicFacts:
    """What may be known of a task without a look at a private record.

    Attributes:
        epsilon: Price of the model.
        delta: Delta of the account.
        adjacency: Neighboring relation.
        has_groups: Whether a privacy unit is a group of records.
        num_records: Declared approximate number of private records. None if it is not declared.
        num_public: Number of public points.
        num_classes: Number C of classes.
        is_image: Whether points are images.
        is_encoded: Whether points are an encoder's features.
        has_own_teacher: Whether the user gives the kind of teacher.
    """

    epsilon: float
    delta: float
    adjacency: str
    has_groups: bool
    num_records: int | None
    num_public: int
    num_classes: int
    is_image: bool
    is_encoded: bool = False
    has_own_teacher: bool = False


@dataclass(frozen=True, kw_only=True)
class MethodConfig:
    """A method, with everything that it takes.

    Attributes:
        name: One of ``METHODS`` but auto.
        num_teachers: Number K of teachers. 0 for a method without teachers.
        num_queries: Number of public points that are asked about.
        mechanism: Mechanism with calibrated noise. None for DP-SGD, which calibrates its noise itself.
        teacher: Recipe of the teachers. None for a small network, or the user's teacher.
        query: Strategy that chooses the public points. None to draw them at random.
        features: Recipe of the features of a linear model. None to use the points as they are.
        effective_dim: Field ``effective_dim`` of ``GradientMethod``.
        self_training: Whether the student propagates the answers over the public points first.
        reason: Reason for this choice.
        expectation: Forecast of the labels.
        is_noise_dominated: Whether noise outweighs the votes of teachers in most labels.
    """

    name: str
    num_teachers: int = 0
    num_queries: int = 1
    mechanism: Mechanism | None = None
    teacher: TeacherRecipe | None = None
    query: QueryStrategy | None = None
    features: FeatureRecipe | None = None
    effective_dim: float | None = None
    self_training: bool = False
    reason: str
    expectation: str
    is_noise_dominated: bool = False


def choose_delta(num_records: int | None) -> float:
    """The largest power of ten below one in ``num_records``, and at most 1e-5."""
    return MAX_DELTA if num_records is None else min(MAX_DELTA, 10.0 ** -math.ceil(math.log10(num_records) + 1e-12))


def choose_method(
    facts: PublicFacts, method: str = "auto", num_teachers: int | None = None, num_queries: int | None = None
) -> MethodConfig:
    """Choose the method for these facts; a number of teachers or questions that is given is kept.

    Raises:
        ValueError: The method cannot work with these facts.
    """
    checks.one_of("method", method, METHODS)
    if method == "dpsgd":
        return _configure_dpsgd(facts)
    if method == "gradients":
        return _configure_gradients(facts, "asked for by name")
    is_explicit = method == "teachers" or num_teachers is not None or num_queries is not None
    if facts.num_records is not None and not is_explicit:
        return _configure_gradients(facts, "single records say more through the same noise than votes of teachers do")
    config = _configure_teachers(facts, num_teachers, num_queries)
    if is_explicit:
        return replace(config, reason=f"asked for by name; {config.reason}")
    return replace(config, reason=f"{config.reason}; num_records_about would allow gradients")


def _configure_teachers(facts: PublicFacts, num_teachers: int | None, num_queries: int | None) -> MethodConfig:
    """Ask as many questions as keep the lead that a useful label needs below its target."""
    size_estimate = facts.num_public if facts.num_records is None else facts.num_records
    linear = num_teachers is None and not (facts.is_image or facts.has_groups or facts.has_own_teacher)
    max_teachers, records_per_teacher = _MAX_TEACHERS, _RECORDS_PER_TEACHER
    if linear and facts.num_records is not None:  # else there may be far fewer records than public points
        max_teachers = _MAX_LINEAR_TEACHERS
        records_per_teacher = max(_RECORDS_PER_LINEAR_TEACHER, math.ceil(_RECORDS_PER_CLASS * facts.num_classes))
    teachers = num_teachers or min(max_teachers, max(_MIN_TEACHERS, size_estimate // records_per_teacher))
    for queries in (num_queries,) if num_queries else _QUERY_COUNTS:
        queries = min(queries, facts.num_public)
        sigma = calibration.calibrate_sigma(
            lambda sigma, count=queries: GNMax(sigma=sigma).privacy_events(count),  # type: ignore[misc]
            epsilon=facts.epsilon,
            delta=facts.delta,
        )
        gaussian = GNMax(sigma=sigma)
        lead = feasibility.compute_break_even_lead(gaussian, facts.num_classes)
        assert lead is not None
        if lead <= TARGET_LEAD_SHARE * teachers:
            break
    basis = "the number of public points" if facts.num_records is None else "the declared number of records"
    warning = feasibility.format_low_signal_warning(gaussian, teachers, facts.num_classes, queries)
    expectation = f"a label is nearer to the truth than to a guess from a lead of {lead:.3g} of {teachers} votes on"
    if warning is not None:
        expectation = f"{warning} Nothing here is expected to beat the majority class."
    return MethodConfig(
        name="teachers",
        num_teachers=teachers,
        num_queries=queries,
        mechanism=gaussian,
        teacher=_LINEAR_RECIPE if linear else None,
        query=Medoids() if linear else None,
        self_training=linear,
        reason=f"{teachers} teachers, by {basis}, answer {queries} questions with noise of {gaussian.sigma:.3g} votes",
        expectation=expectation,
        is_noise_dominated=warning is not None,
    )


def _configure_gradients(facts: PublicFacts, reason: str) -> MethodConfig:
    size = facts.num_records
    if size is None:
        fix = "Declare num_records_about, if that number is public; or use method='teachers'."
        raise checks.error("method", "gradients", "scales its steps by the number of records", fix)
    gradients = gradient_budget.calibrate_gradients(
        epsilon=facts.epsilon,
        delta=facts.delta,
        adjacency=facts.adjacency,
        num_records=size,
        num_public=facts.num_public,
    )
    features: FeatureRecipe | None = None
    if not facts.is_encoded:
        features = ContrastiveFeatures(network="cnn") if facts.is_image else FourierFeatures()
    expectation = f"noise of {gradients.mechanism.sigma:.3g} records on each sum over about {size:,} records"
    if gradients.is_noise_dominated:
        expectation += ": too much for so few records. Nothing here is expected to beat the majority class."
    return MethodConfig(
        name="gradients",
        num_queries=facts.num_public,
        mechanism=gradients.mechanism,
        features=features,
        effective_dim=gradients.effective_dim,
        self_training=facts.is_image or gradients.needs_self_training(facts.is_encoded),
        reason=f"noisy gradients of a linear model: {reason}",
        expectation=expectation,
    )


def _configure_dpsgd(facts: PublicFacts) -> MethodConfig:
    fix = "Or use method='auto'."
    if facts.num_records is None:
        raise checks.error("num_records_about", None, "must be declared for DP-SGD: it sets the sampling rate", fix)
    if facts.has_groups:
        raise checks.error("groups", True, "cannot be given with DP-SGD, which protects single records", fix)
    if facts.adjacency != "add_remove":
        raise checks.error("adjacency", facts.adjacency, "must be add_remove for DP-SGD, which samples records", fix)
    expectation = "an epoch of noise on every step; no public point is asked"
    return MethodConfig(name="dpsgd", reason="asked for by name: DP-SGD trains one network on all records",
                        expectation=expectation)  # fmt: skip
