"""Which method answers best at an epsilon, chosen from public facts alone, with the reason in two lines.

The rule. Where somebody declares how many records there are, noisy gradients of a linear model: over random Fourier
features of rows, over contrastive features of images, over an encoder's features as they are. Else teachers: of rows,
linear ones of ten records or a few more, asked about the middles of clusters. DP-SGD where it is asked for by name.
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
"""Where nobody declares how many records there are, and the most there is."""
_MAX_TEACHERS, _MIN_TEACHERS = 400, 10
_RECORDS_PER_TEACHER = 100
"""Where teachers are networks, or the user's own."""
_LINEAR_RECIPE: Final = TeacherRecipe(network="logistic", steps=60, batch_size=16, learning_rate=0.03)
_MAX_LINEAR_TEACHERS = 4000
_RECORDS_PER_LINEAR_TEACHER, _RECORDS_PER_CLASS = 10, 1.25
"""Of linear teachers, and at least so many of each class: the noise stays, so many weak votes are better than few good
ones (5 to 50 tried on package descriptions, phrases of SST-2, spambase, satimage and magic at .5 and 2;
docs/experiments/teacher-settings.md)."""
TARGET_LEAD_SHARE = 0.25
"""Of the votes: so far the winner must lead at most for a label nearer to the truth than to a guess."""
_QUERY_COUNTS = (1000, 700, 500, 350, 250, 175, 125, 90, 60, 40, 30, 20, 10)


@dataclass(frozen=True, kw_only=True)
class PublicFacts:
    """What may be known of a task without a look at a private record.

    Attributes:
        epsilon: What the model is to cost.
        delta: The account's.
        adjacency: What a neighbor is.
        has_groups: Whether a privacy unit is a group of records.
        num_records: About how many private records there are, as declared; None: nobody says.
        num_public: Public points.
        num_classes: Number C of classes.
        is_image: Whether points are images.
        is_encoded: Whether points are an encoder's features.
        has_own_teacher: Whether the user brings teachers of another kind.
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
        num_teachers: K; 0 where there are none.
        num_queries: Number of public points that are asked about.
        mechanism: With calibrated noise; None: DP-SGD, which calibrates its own.
        teacher: How teachers are trained; None: a small network, or the user's own.
        query: Which points are asked about; None: at random.
        features: Of the public points, in which a linear model is fitted; None: none are needed.
        effective_dim: Of ``method.gradients``.
        self_training: Whether a student propagates the answers over the public points first.
        reason: Why this one, in a line.
        expectation: What to expect, in a line.
        is_noise_dominated: Whether the forecast for teachers says that noise outweighs their votes in most labels.
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
    """The method for these facts, by the rule above, with the number of teachers and of questions where it is given.

    Raises:
        ValueError: The method cannot work here, and the message says why.
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
    """As many questions as leave the lead that a right label needs within reach."""
    size_estimate = facts.num_public if facts.num_records is None else facts.num_records
    linear = num_teachers is None and not (facts.is_image or facts.has_groups or facts.has_own_teacher)
    max_teachers, records_per_teacher = _MAX_TEACHERS, _RECORDS_PER_TEACHER
    if linear and facts.num_records is not None:  # of public points alone: there may be far fewer records
        max_teachers = _MAX_LINEAR_TEACHERS
        records_per_teacher = max(_RECORDS_PER_LINEAR_TEACHER, math.ceil(_RECORDS_PER_CLASS * facts.num_classes))
    teachers = num_teachers or min(max_teachers, max(_MIN_TEACHERS, size_estimate // records_per_teacher))
    for queries in (num_queries,) if num_queries else _QUERY_COUNTS:
        queries = min(queries, facts.num_public)
        gaussian = _calibrate_gaussian(facts, queries)
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


def _calibrate_gaussian(facts: PublicFacts, queries: int) -> GNMax:
    def privacy_events(sigma: float) -> tuple[object, ...]:
        return GNMax(sigma=sigma).privacy_events(queries)

    return GNMax(sigma=calibration.calibrate_sigma(privacy_events, epsilon=facts.epsilon, delta=facts.delta))  # type: ignore[arg-type]


def _configure_gradients(facts: PublicFacts, reason: str) -> MethodConfig:
    size = facts.num_records
    if size is None:
        fix = "Declare num_records_about, where that is public; or use method='teachers'."
        raise checks.error("method", "gradients", "scales its steps by the number of records", fix)
    price = {"epsilon": facts.epsilon, "delta": facts.delta}
    gradients = gradient_budget.calibrate_gradients(
        **price, adjacency=facts.adjacency, num_records=size, num_public=facts.num_public
    )
    features: FeatureRecipe | None = None
    if not facts.is_encoded:
        features = ContrastiveFeatures(network="cnn") if facts.is_image else FourierFeatures()
    expectation = f"noise of {gradients.mechanism.sigma:.3g} records on each sum over about {size:,} of them"
    if gradients.is_noise_dominated:
        expectation += ": too much for so few. Nothing here is expected to beat the majority class."
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
