"""Choice of the method for an epsilon from public facts alone, with the reason for the choice.

The method is noisy gradients of a linear model. Its features are random Fourier features of rows, contrastive features
of images, or the features of an encoder. Teachers answer only if the user asks for them, or brings a teacher. Teachers
for rows are ridge regressions that vote on all public points; if the number of records is declared, each teacher has
about twelve records. DP-SGD is never chosen automatically. With gradients and with teachers, a share of the cost pays
for noisy class counts, which decide the scale of the gradient steps, the class frequencies of the student of votes, and
whether the fit goes on.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from pate_torch.core import checks
from pate_torch.features.base import FeatureRecipe
from pate_torch.features.contrastive import ContrastiveFeatures
from pate_torch.features.fourier import FourierFeatures
from pate_torch.mechanisms.base import Mechanism
from pate_torch.mechanisms.class_counts import ClassCounts
from pate_torch.mechanisms.gaussian import GNMax
from pate_torch.mechanisms.gradient_descent import GradientDescent
from pate_torch.methods import feasibility
from pate_torch.planning import gradient_budget
from pate_torch.teachers.recipe import PublicStart, TeacherRecipe

METHODS: Final = ("auto", "teachers", "gradients", "dpsgd")
_MAX_TEACHERS, _MIN_TEACHERS = 400, 10
_RECORDS_PER_TEACHER = 100
"""Number of records per teacher for networks and for estimators of the user."""
_RIDGE_RECIPE: Final = TeacherRecipe(network="logistic", optimizer="ridge", weight_decay=0.1, steps=1)
_TEACHER_FEATURES: Final = FourierFeatures(cosine_variance=1.0)
_MAX_RIDGE_TEACHERS = 4000
_RECORDS_PER_RIDGE_TEACHER = 12
"""Number of records per ridge regression. The noise does not depend on the number of teachers, so many weak votes are
better than few good votes (docs/experiments/teacher-settings.md)."""
TARGET_LEAD_SHARE = 0.25
"""Largest lead, as a share of the votes, that a useful label should need."""
_QUERY_COUNTS = (1000, 700, 500, 350, 250, 175, 125, 90, 60, 40, 30, 20, 10)


@dataclass(frozen=True, kw_only=True)
class PublicFacts:
    """Public facts about a task, which do not depend on the values of private records.

    Attributes:
        epsilon: Privacy cost of the model, in epsilon.
        has_groups: Whether a privacy unit is a group of records.
        num_records: Approximate number of private records, if it is public. None if it is not declared.
        is_encoded: Whether points are features of an encoder.
        has_own_teacher: Whether the user sets ``teacher``.
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
    """A method ("teachers", "gradients" or "dpsgd") and its settings.

    Attributes:
        num_teachers: Number K of teachers. 0 for a method without teachers.
        mechanism: Mechanism with calibrated noise. None for DP-SGD, whose noise is calibrated later.
        class_counts: Mechanism of the noisy class counts. None for DP-SGD, which draws its noise by Opacus.
        teacher: Recipe of the teachers. None for a small network or the user's teacher.
        features: Feature recipe of the linear model, or of the student of ridge regressions. None to use the points.
        self_training: Whether the default student is ``SelfTraining``. For gradients in the features of an encoder, the
            class counts decide (``needs_self_training``).
        expectation: Forecast of the label quality.
        is_noise_dominated: Whether noise outweighs the votes of teachers.
    """

    name: str
    num_teachers: int = 0
    num_queries: int = 1
    mechanism: Mechanism | None = None
    teacher: TeacherRecipe | None = None
    features: FeatureRecipe | None = None
    class_counts: ClassCounts | None = None
    self_training: bool = False
    reason: str
    expectation: str
    is_noise_dominated: bool = False


def choose_method(
    facts: PublicFacts, method: str = "auto", num_teachers: int | None = None, num_queries: int | None = None
) -> MethodConfig:
    """Choose the settings of a method, and the method itself if ``method`` is "auto".

    Without ``num_teachers`` or ``num_queries``, the rule chooses these numbers. A ValueError states why a method does
    not support these facts.
    """
    checks.one_of("method", method, METHODS)
    if method == "dpsgd":
        return _configure_dpsgd(facts)
    is_explicit = method == "teachers" or num_teachers is not None or num_queries is not None
    if method == "gradients":
        return _configure_gradients(facts, "set by the user")
    if not (is_explicit or facts.has_own_teacher):
        return _configure_gradients(facts, "usually more accurate than teachers at the same epsilon")
    config = _configure_teachers(facts, num_teachers, num_queries)
    return replace(config, reason=f"teachers are set by the user; {config.reason}")


def _configure_teachers(facts: PublicFacts, num_teachers: int | None, num_queries: int | None) -> MethodConfig:
    """Choose the largest number of queries at which useful labels need at most the target share of the votes."""
    size_estimate = facts.num_public if facts.num_records is None else facts.num_records
    linear = num_teachers is None and not (facts.is_image or facts.has_groups or facts.has_own_teacher)
    max_teachers, records_per_teacher = _MAX_TEACHERS, _RECORDS_PER_TEACHER
    if linear and facts.num_records is not None:  # an undeclared number may be far below the number of public points
        max_teachers, records_per_teacher = _MAX_RIDGE_TEACHERS, _RECORDS_PER_RIDGE_TEACHER
    teachers = num_teachers or min(max_teachers, max(_MIN_TEACHERS, size_estimate // records_per_teacher))
    for queries in (num_queries,) if num_queries else (facts.num_public,) if linear else _QUERY_COUNTS:
        queries = min(queries, facts.num_public)
        sigma, class_counts = gradient_budget.calibrate_with_counts(
            lambda sigma, count=queries: GNMax(sigma=sigma, counts=linear).privacy_events(count),  # type: ignore[misc]
            facts.adjacency,
            epsilon=facts.epsilon,
            delta=facts.delta,
        )
        gaussian = GNMax(sigma=sigma, counts=linear)
        lead = feasibility.compute_break_even_lead(feasibility.average_counts(gaussian, queries), facts.num_classes)
        assert lead is not None
        if lead <= TARGET_LEAD_SHARE * teachers:
            break
    features = None if facts.is_encoded else _TEACHER_FEATURES
    recipe = _RIDGE_RECIPE if features is None else replace(_RIDGE_RECIPE, start=PublicStart(features=features))
    basis = "the number of public points" if facts.num_records is None else "the declared number of records"
    warning = feasibility.format_low_signal_warning(gaussian, teachers, facts.num_classes, queries)
    expectation = f"labels are useful if a class leads every other class by at least {lead:.3g} of {teachers} votes"
    if warning is not None:
        expectation = f"{warning} The model will probably be no better than the most frequent class."
    return MethodConfig(
        name="teachers",
        num_teachers=teachers,
        num_queries=queries,
        mechanism=gaussian,
        class_counts=class_counts,
        teacher=recipe if linear else None,
        features=features if linear else None,
        reason=f"{teachers} teachers (by {basis}) answer {queries} queries with noise of {gaussian.sigma:.3g} votes",
        expectation=expectation,
        is_noise_dominated=warning is not None,
    )


def _configure_gradients(facts: PublicFacts, reason: str) -> MethodConfig:
    gradients = gradient_budget.calibrate_gradients(
        epsilon=facts.epsilon, delta=facts.delta, adjacency=facts.adjacency, num_records=None, buys_counts=True
    )
    features: FeatureRecipe = ContrastiveFeatures(network="cnn") if facts.is_image else FourierFeatures()
    assert gradients.class_counts is not None
    noise = f"Standard deviation of the noise: {gradients.mechanism.sigma:.3g} in each sum of gradients, to which a "
    noise += f"unit adds at most 1, and {gradients.class_counts.sigma:.3g} in the number of units of each class"
    return MethodConfig(
        name="gradients",
        num_queries=facts.num_public,
        mechanism=gradients.mechanism,
        class_counts=gradients.class_counts,
        features=None if facts.is_encoded else features,
        self_training=facts.is_image,
        reason=f"noisy gradients of a linear model, {reason}",
        expectation=f"{noise}. If the noisy numbers show too few units, the fit stops, and only they are charged.",
    )


def needs_self_training(facts: PublicFacts, num_units: int, mechanism: GradientDescent) -> bool:
    """Return whether self-training on the answers of a model is expected to improve it, for a number of units."""
    descent = gradient_budget.CalibratedDescent(mechanism=mechanism, num_records=num_units)
    return facts.is_image or descent.needs_self_training(facts.is_encoded)


def _configure_dpsgd(facts: PublicFacts) -> MethodConfig:
    fix = "Otherwise use method='auto'."
    if facts.num_records is None:
        problem = "must be set for DP-SGD, because it determines the sampling rate"
        raise checks.error("num_records_about", None, problem, fix)
    if facts.has_groups:
        raise checks.error("groups", True, "cannot be combined with DP-SGD, which protects single records", fix)
    if facts.adjacency != "add_remove":
        raise checks.error("adjacency", facts.adjacency, "must be add_remove for DP-SGD, which samples records", fix)
    expectation = "every step has noise; no public point is labeled"
    return MethodConfig(name="dpsgd", reason="DP-SGD, set by the user, trains one network on all records",
                        expectation=expectation)  # fmt: skip
