"""The contract of a private method.

    validate(facts)           refuse settings that cannot work, judged by public facts alone
    privacy_events(facts)     return the worst case, which is reserved before any noise is drawn
    draw_first_answers(...)   optional: draw noisy class counts that the same reservation pays for
    adapt(first_answers)      optional: set from these counts what no cost depends on
    forecast_model(...)       optional: a forecast of no skill stops the release, and the counts alone are charged
    prepare(inputs)           PRIVATE: train teachers or encode records
    release(pool, spending)   open the sensitive values with noise that was paid for

A method is one file in this package and one line in components.py. ``session.ReleaseSession`` calls these functions in
this order. The method also describes the release in sentences (``MethodDescription``), which ``release.json`` keeps
beside the answers.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, ClassVar

import torch
from torch import Tensor

from pate_torch.accounting.events import PrivacyEvent
from pate_torch.core import checks
from pate_torch.core.executors import Workers
from pate_torch.core.progress import Log, Stages, StageTimer, do_nothing
from pate_torch.features.neighbors import NeighborSearch
from pate_torch.privacy.accounts import PURPOSE_LABELS
from pate_torch.privacy.budget import Budget, Spending
from pate_torch.privacy.ledger import Ledger
from pate_torch.privacy.partition import DatasetFacts
from pate_torch.privacy.records import LABEL_UNIT, PrivateRecords, PublicPool, Release
from pate_torch.privacy.sensitive import CellHistogram, Votes
from pate_torch.students.base import Student, StudentAlgorithm
from pate_torch.synthesis.model import TableModel
from pate_torch.teachers.ensemble import TeacherEnsemble
from pate_torch.teachers.store import TeacherStore

_KEYS = {"subject": "who", "procedure": "how", "query_sentence": "queries"}
"""Keys in ``release.json`` of those fields of ``MethodDescription`` that have another name there."""


@dataclass(frozen=True, eq=False)
class FirstAnswers:
    """Releasable. Noisy answers of the first stage of a method.

    Attributes:
        counts_C: Noisy number of privacy units in each class, whole numbers in float64 [C].
        sigma: Standard deviation of the noise of each count.
        outside: Noisy sum of the units' shares of numeric values outside the public range, with noise of twice sigma.
            None if it was not counted.
    """

    counts_C: Tensor
    sigma: float
    outside: float | None = None

    @property
    def total_sigma(self) -> float:
        """Standard deviation of the noise of the total."""
        return self.sigma * math.sqrt(len(self.counts_C))

    def estimate_size(self, known_size: int | None, declared_size: int | None = None) -> int:
        """Estimate the number of units, at least 1.

        Args:
            known_size: Number of units under replace_one, where it is public. None under add_remove.
            declared_size: Declared number. It is used if it is within two standard deviations of the noisy total.
        """
        total = float(self.counts_C.sum())
        if known_size is None and declared_size is not None and abs(total - declared_size) <= 2 * self.total_sigma:
            known_size = declared_size
        return max(1, round(total) if known_size is None else known_size)

    def estimate_frequencies(self) -> Tensor:
        """Estimate the class frequencies, float64 [C], from counts of at least half a standard deviation of noise."""
        counts_C = self.counts_C.clamp(min=max(1.0, self.sigma / 2))
        return counts_C / counts_C.sum()

    def estimate_balance(self) -> float:
        """Estimate the Gini impurity of the classes over its maximum: 1 for equal classes, near 0 for rare ones."""
        frequency_C = self.estimate_frequencies()
        return float((1 - frequency_C.square().sum()) / (1 - 1 / len(frequency_C)))

    def estimate_start_logits(self) -> Tensor:
        """Estimate the logits at which a model starts, float64 [C]. They are 0 if the classes are equally frequent."""
        log_frequency_C = self.estimate_frequencies().log()
        return (1 - self.estimate_balance()) * (log_frequency_C - log_frequency_C.mean())

    def estimate_outside_share(self, size: int) -> float:
        """Estimate a lower limit, of three standard deviations, of the share of values outside the public range.

        ``size`` is the number of units. The result is 0 if the share was not measured.
        """
        if self.outside is None:
            return 0.0
        return max(0.0, self.outside - 3 * 2 * self.sigma) / (size + 3 * self.total_sigma)


@dataclass(frozen=True)
class ModelForecast:
    """Releasable. Expectation of a model's skill, the share of the class frequencies' log loss that the model removes.

    Attributes:
        num_units: Estimated number of units.
        skill: Expected skill. A model of skill 0 or less is no better than the class frequencies.
        low: Lower end of the interval that held the skill in eight of ten stand-in cases.
        high: Upper end of this interval.
    """

    num_units: int
    skill: float
    low: float
    high: float

    def __str__(self) -> str:
        return (
            f"about {self.num_units:,} unit(s); share of the class frequencies' log loss that the model is expected to "
            f"remove: {100 * self.skill:.0f} % ({100 * self.low:.0f} to {100 * self.high:.0f} % in 8 of 10 trials)"
        )


@dataclass(frozen=True, eq=False)
class ModelRelease:
    """Releasable. A model that was trained on private records with noise.

    Attributes:
        id: Id of the reservation that paid for the model.
        model: Model.
    """

    id: str
    model: Student | TableModel


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class MethodInputs:
    """PRIVATE. Everything that a method needs to become ready to release.

    The records are those without the held-out ones. ``seed`` seeds splits, initialization and batches, and never noise.
    ``store`` holds teachers and keyed hashes. The ledger that holds the account is None on ranks above 0 of torchrun. A
    method calls ``check_budget``, which raises ValueError if the account does not admit the charges of the run, before
    long computations. ``log`` receives PRIVATE messages about single teachers, and ``log_losses`` the PRIVATE losses of
    all teachers. ``first_answers`` is None if the method has no first stage.
    """

    records: PrivateRecords
    facts: DatasetFacts
    seed: int
    device: torch.device
    executor: Workers = field(default_factory=Workers)
    store: TeacherStore
    ledger: Ledger | None = None
    stages: Stages
    clock: StageTimer
    check_budget: Callable[[], None] = do_nothing
    log: Log = do_nothing
    log_losses: Callable[..., None] = do_nothing
    first_answers: FirstAnswers | None = None
    search: NeighborSearch = field(default_factory=NeighborSearch)


class PreparedMethod(ABC):
    """PRIVATE. A method that is ready to release.

    Attributes:
        id: Random id that the release shows. It is new for each release unless the user named stored teachers.
        votes: PRIVATE. Votes of the teachers on every public point. None if no teachers vote.
        opened_votes: PRIVATE. Votes or counts behind the released answers. None before the release, and if the
            mechanism opens other values.
        ensemble: PRIVATE. Teachers behind the votes, for the owner's figures. None if the teachers are not available.
        guide: Releasable. Guide student of all rounds but the last, from which the published student continues. None if
            the published student starts anew.
        on_ledger_head: Function that stores the newest ledger hash with stored teachers. The teachers cannot be used
            with a ledger that lacks this hash. It does nothing if the method stores no teachers.
    """

    id: str = ""
    votes: Votes | None = None
    opened_votes: Votes | CellHistogram | None = None
    ensemble: TeacherEnsemble | None = None
    guide: Student | None = None
    on_ledger_head: Callable[[str], object] = staticmethod(do_nothing)

    def check(self, budget: Budget, pool: PublicPool) -> None:  # noqa: B027
        """Raise ValueError, before any charge, for errors that ``release`` would raise after the charge."""

    @abstractmethod
    def release(self, pool: PublicPool, spending: Spending) -> Release | ModelRelease:
        """Open the sensitive values with noise that ``spending`` has paid for."""


@dataclass(frozen=True, kw_only=True)
class PrivateMethod(ABC):
    """Settings of a method that turns private records into labels or a model that may be released.

    Attributes:
        name: Name of the method in ``release.json``.
        purpose: Purpose of the method's reservation, for the ledger.
        cost_advice: Advice on how to lower the cost of a release, for messages.
        uses_public_points: Whether the release depends on the public points, apart from normalization constants.
        releases_model: Whether the method releases a model instead of labels.
    """

    name: str = ""
    purpose: ClassVar[str] = PURPOSE_LABELS
    cost_advice: ClassVar[str] = "Ask fewer queries (num_queries) or add noise (mechanism.sigma)"
    releases_model: ClassVar[bool] = False
    uses_public_points: ClassVar[bool] = True

    def __post_init__(self) -> None:
        checks.one_of("method.name", self.name, (type(self).name,))

    # ---- public ---------------------------------------------------------------------------------------------------

    @property
    def ensemble_size(self) -> int | None:
        """Number K of teachers that vote on every query. None if no teachers vote."""
        return None

    @property
    def student_name(self) -> str:
        """Name of the released model's kind, for reports. Empty unless ``releases_model`` is set."""
        return ""

    @property
    @abstractmethod
    def mechanism_name(self) -> str:
        """Name of the mechanism that draws the noise, for the ledger and for reports."""

    @property
    @abstractmethod
    def noise(self) -> str:
        """Kind of noise for which the cost holds: "torch" or "discrete"."""

    @property
    def has_first_stage(self) -> bool:
        """Whether the session calls ``draw_first_answers``."""
        return False

    def describe_model(self, student: Student) -> dict[str, Any]:
        """Return plain values that describe the released model, with "hypothesis" and "certificate" in words."""
        return {}

    def check_student(self, student: StudentAlgorithm) -> None:
        """Raise ValueError if the student cannot learn from a release of this method, whatever the data are."""
        if student.returns_released_model:
            fix = "Use method=gradients mechanism=gradient_descent, or student.publish=student."
            problem = f"needs a released model, and method={self.name} has none"
            raise checks.error("student.publish", "released_model", problem, fix)

    def complete(self, facts: DatasetFacts, stages: Stages) -> PrivateMethod:
        """Return this method with the settings that follow from the public facts of the data."""
        return self

    def calibrate(self, epsilon: float | None, delta: float, facts: DatasetFacts) -> PrivateMethod:
        """Return this method with noise whose cost is ``epsilon`` at ``delta``, or unchanged if ``epsilon`` is None.

        Raises:
            ValueError: The method has no noise to calibrate, or every noise scale costs more than ``epsilon``.
        """
        if epsilon is None:
            return self
        problem = f"method={self.name} has no noise to calibrate"
        raise checks.error("privacy.target_epsilon", epsilon, problem)

    @abstractmethod
    def validate(self, facts: DatasetFacts) -> None:
        """Raise ValueError, judged by public facts alone, for settings that cannot work on these data.

        Settings that would otherwise fail after the release has been paid for are refused here, too.
        """

    @abstractmethod
    def privacy_events(self, facts: DatasetFacts) -> tuple[PrivacyEvent, ...]:
        """Return the events of the worst case of the whole release, including the first stage, for the reservation."""

    @abstractmethod
    def to_record(self, facts: DatasetFacts) -> dict[str, Any]:
        """Return the public settings of the method for ``release.json``."""

    def format_noise_warning(self, facts: DatasetFacts) -> str | None:
        """Return a warning if public facts show that the answers will be mostly noise, else None."""
        return None

    def adapt(self, first_answers: FirstAnswers, facts: DatasetFacts) -> PrivateMethod:
        """Return this method with settings that follow from the first answers, at the same privacy events."""
        return self

    def forecast_model(self, first_answers: FirstAnswers, facts: DatasetFacts) -> ModelForecast | None:
        """Forecast from the first answers how much better than the class frequencies the model will be.

        Return None if the method makes no forecast.
        """
        return None

    # ---- private --------------------------------------------------------------------------------------------------

    def compute_fingerprint(self, store: TeacherStore, all_records: PrivateRecords) -> str:
        """PRIVATE. Compute the fingerprint of the content, which shows that two accounts hold the same content."""
        return store.compute_content_fingerprint(all_records)

    def compute_call_fingerprint(self, store: TeacherStore, all_records: PrivateRecords) -> str:
        """PRIVATE. Compute the fingerprint of all that determines the answers, by which a repeated call is known."""
        return store.compute_fingerprint(all_records)

    def check_stored(self, inputs: MethodInputs) -> None:  # noqa: B027
        """PRIVATE. Raise ValueError if stored teachers that the user named were not trained on these records."""

    def draw_first_answers(self, records: PrivateRecords, facts: DatasetFacts, spending: Spending) -> FirstAnswers:
        """PRIVATE. Draw the noisy answers that ``prepare`` may use, if ``has_first_stage`` is set."""
        raise NotImplementedError(f"{type(self).__name__}: has no first stage")

    @abstractmethod
    def prepare(self, inputs: MethodInputs) -> PreparedMethod:
        """PRIVATE. Make the method ready to release: train teachers or encode records."""

    def assist(self, inputs: MethodInputs) -> None:  # noqa: B027
        """PRIVATE. Do the work of a rank above 0 of ``torchrun`` while rank 0 calls ``prepare``."""


@dataclass(frozen=True, kw_only=True)
class MethodDescription:
    """Public sentences for the privacy statement, the report and the model card.

    The sentences may contain ``{asked}`` and ``{answered}``, the numbers of queries; ``{mechanism}``, the mechanism
    with its parameters; and ``{each_round}``, the text `` in each of 3 rounds``, which is empty if there was one round.

    Attributes:
        subject: Plural noun for those who answer the queries, such as "teachers".
        procedure: Sentences on the computation, the value that receives noise, the release and the student's data.
        assumptions: Sentences that must be true for the guarantee to hold.
        query_sentence: Part of a sentence on the number of queries.
        examples: Caption of public points with the labels that were released for them.
        public_time: Whether the computing time of the answers may be published, because public sizes alone decide it.
        uses_size: Whether the method uses the declared number of records.
        discrete: Whether the method supports ``noise=discrete``.
        product: What is released: "labels", or "table" for the model of a table.
    """

    subject: str
    procedure: str
    assumptions: tuple[str, ...]
    query_sentence: str = "{answered} of {asked} answered"
    examples: str = "Public points, each with the label released for it. Some labels are wrong because of the noise."
    public_time: bool = False
    uses_size: bool = True
    discrete: bool = True
    product: str = "labels"

    def __post_init__(self) -> None:
        object.__setattr__(self, "assumptions", tuple(checks.collection("description.assumptions", self.assumptions)))
        for sentence in (self.subject, self.procedure, self.query_sentence, self.examples, *self.assumptions):
            checks.nonempty_string("description", sentence)
        checks.one_of("description.product", self.product, ("labels", "table"))
        for name in ("public_time", "uses_size", "discrete"):
            checks.boolean(f"description.{name}", getattr(self, name))

    @classmethod
    def from_dict(cls, facts: Mapping[str, Any]) -> MethodDescription:
        """Make a description from the output of ``to_dict``. Raises KeyError, TypeError or ValueError for others."""
        facts = {"product": "labels", **facts}
        return cls(**{field.name: facts[_KEYS.get(field.name, field.name)] for field in fields(cls)})

    def to_dict(self) -> dict[str, Any]:
        """Return the content for ``release.json``."""
        values = asdict(self) | {"assumptions": list(self.assumptions)}
        if self.product == "labels":
            del values["product"]
        return {_KEYS.get(name, name): value for name, value in values.items()}


def get_unit_column(unit: str) -> str:
    """Return the column of a group unit, such as "patient" for "group:patient". Empty for other units."""
    return unit.removeprefix("group:") if unit.startswith("group:") else ""


def format_one_unit(unit: str) -> str:
    """Format a privacy unit in words, as in "one record" or "all records of one patient"."""
    if unit == LABEL_UNIT:
        return "the label of one record"
    return "one record" if unit == "record" else f"all records of one {get_unit_column(unit)}"
