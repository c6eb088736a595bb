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
from pate_torch.features.contrastive import ContrastiveFeatures
from pate_torch.features.fourier import FourierFeatures
from pate_torch.mechanisms.gaussian import GNMax
from pate_torch.planning import feasibility, gradient_budget
from pate_torch.protocols import FeatureRecipe, Mechanism, QueryStrategy
from pate_torch.queries.clusters import Medoids
from pate_torch.teachers.recipe import TeacherRecipe

METHODS: Final = ("auto", "teachers", "gradients", "dpsgd")
DELTA: Final = 1e-5
"""Where nobody declares how many records there are, and the most there is."""
_MOST_TEACHERS, _FEWEST_TEACHERS = 400, 10
_RECORDS_A_TEACHER = 100
"""Where teachers are networks, or the user's own."""
_LINEAR: Final = TeacherRecipe(network="logistic", steps=60, batch_size=16, learning_rate=0.03)
_MOST_LINEAR = 4000
_RECORDS_A_LINEAR_TEACHER, _OF_A_CLASS = 10, 1.25
"""Of linear teachers, and at least so many of each class: the noise stays, so many weak votes are better than few good
ones (5 to 50 tried on package descriptions, phrases of SST-2, spambase, satimage and magic at .5 and 2;
docs/experiments/teacher-settings.md)."""
_LEAD = 0.25
"""Of the votes: so far the winner must lead at most for a label nearer to the truth than to a guess."""
_QUESTIONS = (1000, 700, 500, 350, 250, 175, 125, 90, 60, 40, 30, 20, 10)


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What may be known of a task without a look at a private record.

    Attributes:
        epsilon: What the model is to cost.
        delta: The account's.
        adjacency: What a neighbor is.
        grouped: Whether a privacy unit is a group of records.
        records: About how many private records there are, as declared; None: nobody says.
        public: Public points.
        classes: Number C of classes.
        images: Whether points are images.
        encoded: Whether points are an encoder's features.
        own_teacher: Whether the user brings teachers of another kind.
    """

    epsilon: float
    delta: float
    adjacency: str
    grouped: bool
    records: int | None
    public: int
    classes: int
    images: bool
    encoded: bool = False
    own_teacher: bool = False


@dataclass(frozen=True, kw_only=True)
class Method:
    """A method, with everything that it takes.

    Attributes:
        name: One of ``METHODS`` but auto.
        num_teachers: K; 0 where there are none.
        num_queries: Number of public points that are asked about.
        mechanism: With calibrated noise; None: DP-SGD, which calibrates its own.
        teacher: How teachers are trained; None: a small network, or the user's own.
        query: Which points are asked about; None: at random.
        features: Of the public points, in which a linear model is fitted; None: none are needed.
        directions: Of ``voters.gradients``.
        self_training: Whether a student propagates the answers over the public points first.
        reason: Why this one, in a line.
        outlook: What to expect, in a line.
        mostly_noise: Whether the forecast for teachers says that noise outweighs their votes in most labels.
    """

    name: str
    num_teachers: int = 0
    num_queries: int = 1
    mechanism: Mechanism | None = None
    teacher: TeacherRecipe | None = None
    query: QueryStrategy | None = None
    features: FeatureRecipe | None = None
    directions: float | None = None
    self_training: bool = False
    reason: str
    outlook: str
    mostly_noise: bool = False


def delta_for(records: int | None) -> float:
    """The largest power of ten below one in ``records``, and at most 1e-5."""
    return DELTA if records is None else min(DELTA, 10.0 ** -math.ceil(math.log10(records) + 1e-12))


def choose(
    facts: Facts, method: str = "auto", num_teachers: int | None = None, num_queries: int | None = None
) -> Method:
    """The method for these facts, by the rule above.

    Args:
        facts: Public ones.
        method: One of ``METHODS``.
        num_teachers: K, where it is given.
        num_queries: Number of questions to teachers, where it is given.

    Raises:
        ValueError: The method cannot work here, and the message says why.
    """
    checks.one_of("method", method, METHODS)
    if method == "dpsgd":
        return _dpsgd(facts)
    if method == "gradients":
        return _gradients(facts, "asked for by name")
    named = method == "teachers" or num_teachers is not None or num_queries is not None
    if facts.records is not None and not named:
        return _gradients(facts, "single records say more through the same noise than votes of teachers do")
    votes = _teachers(facts, num_teachers, num_queries)
    reason = (
        f"asked for by name; {votes.reason}" if named else f"{votes.reason}; num_records_about would allow gradients"
    )
    return replace(votes, reason=reason)


def _teachers(facts: Facts, num_teachers: int | None, num_queries: int | None) -> Method:
    """As many questions as leave the lead that a right label needs within reach."""
    about = facts.public if facts.records is None else facts.records
    linear = num_teachers is None and not (facts.images or facts.grouped or facts.own_teacher)
    if linear and facts.records is not None:  # of public points alone: there may be far fewer records
        most, each = _MOST_LINEAR, max(_RECORDS_A_LINEAR_TEACHER, math.ceil(_OF_A_CLASS * facts.classes))
    else:
        most, each = _MOST_TEACHERS, _RECORDS_A_TEACHER
    teachers = num_teachers or min(most, max(_FEWEST_TEACHERS, about // each))
    for queries in (num_queries,) if num_queries else _QUESTIONS:
        queries = min(queries, facts.public)
        gaussian = _gaussian(facts, queries)
        lead = feasibility.break_even(gaussian, facts.classes)
        assert lead is not None
        if lead <= _LEAD * teachers:
            break
    whose = "the number of public points" if facts.records is None else "the declared number of records"
    drowned = feasibility.drowned(gaussian, teachers, facts.classes, queries)
    return Method(
        name="teachers",
        num_teachers=teachers,
        num_queries=queries,
        mechanism=gaussian,
        teacher=_LINEAR if linear else None,
        query=Medoids() if linear else None,
        self_training=linear,
        reason=f"{teachers} teachers, by {whose}, answer {queries} questions with noise of {gaussian.sigma:.3g} votes",
        outlook=f"a label is nearer to the truth than to a guess from a lead of {lead:.3g} of {teachers} votes on"
        if drowned is None
        else f"{drowned} Nothing here is expected to beat the majority class.",
        mostly_noise=drowned is not None,
    )


def _gaussian(facts: Facts, queries: int) -> GNMax:
    def events(sigma: float) -> tuple[object, ...]:
        return GNMax(sigma=sigma).privacy_events(queries)

    return GNMax(sigma=calibration.calibrate_sigma(events, epsilon=facts.epsilon, delta=facts.delta))  # type: ignore[arg-type]


def _gradients(facts: Facts, why: str) -> Method:
    if facts.records is None:
        fix = "Declare num_records_about, where that is public; or use method='teachers'."
        raise checks.error("method", "gradients", "scales its steps by the number of records", fix)
    steps = gradient_budget.calibrated(
        epsilon=facts.epsilon,
        delta=facts.delta,
        adjacency=facts.adjacency,
        records=facts.records,
        public=facts.public,
    )
    features: FeatureRecipe | None = None
    if not facts.encoded:
        features = ContrastiveFeatures(network="cnn") if facts.images else FourierFeatures()
    return Method(
        name="gradients",
        num_queries=facts.public,
        mechanism=steps.mechanism,
        features=features,
        directions=steps.directions,
        self_training=facts.images or steps.self_training(facts.encoded),
        reason=f"noisy gradients of a linear model: {why}",
        outlook=f"noise of {steps.mechanism.sigma:.3g} records on each sum over about {facts.records:,} of them"
        + (": too much for so few. Nothing here is expected to beat the majority class." if steps.drowned else ""),
    )


def _dpsgd(facts: Facts) -> Method:
    for key, wrong, what in (
        ("num_records_about", facts.records is None, "must be declared for DP-SGD: it sets the sampling rate"),
        ("groups", facts.grouped, "cannot be given with DP-SGD, which protects single records"),
        ("adjacency", facts.adjacency != "add_remove", "must be add_remove for DP-SGD, which samples records"),
    ):
        if wrong:
            raise checks.error(key, getattr(facts, {"num_records_about": "records", "groups": "grouped"}.get(key, key)),
                              what, "Or use method='auto'.")  # fmt: skip
    return Method(name="dpsgd", reason="asked for by name: DP-SGD trains one network on all records",
                  outlook="an epoch of noise on every step; no public point is asked")  # fmt: skip
