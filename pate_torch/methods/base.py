"""The contract of a private method: what may be known beforehand, what it costs, and what it releases.

    validate(facts)           refuse what cannot work, by public facts alone
    privacy_events(facts)     the worst case, which is reserved before any noise is drawn
    first_answers(...)        optional: noisy answers that are paid for by the same reservation
    prepare(inputs)           PRIVATE: train teachers, encode records
    release(pool, spending)   the only place that opens sensitive values

A method is one file here and one line in components.py. The session (``session.ReleaseSession``) is its only caller.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from pate_torch.accounting.events import PrivacyEvent
from pate_torch.core import checks
from pate_torch.core.progress import Log, Stages, StageTimer, do_nothing
from pate_torch.privacy.budget import Budget, Spending
from pate_torch.privacy.facts import DatasetFacts
from pate_torch.privacy.ledger import PURPOSE_LABELS, Ledger
from pate_torch.privacy.records import PrivateRecords, PublicPool, Release
from pate_torch.privacy.sensitive import CellHistogram, Votes
from pate_torch.students.base import Student, StudentAlgorithm
from pate_torch.teachers.ensemble import TeacherEnsemble
from pate_torch.teachers.store import TeacherStore


@dataclass(frozen=True, eq=False)
class FirstAnswers:
    """Releasable. Noisy answers of a method's first stage.

    Attributes:
        counts_C: Noisy counts, one for each class, float64 [C].
        sigma: Standard deviation of the noise of each count, in units.
    """

    counts_C: Tensor
    sigma: float


@dataclass(frozen=True, eq=False)
class ModelRelease:
    """Releasable. A model that was trained on private records under noise.

    Attributes:
        id: Id of the reservation that paid for it.
        student: The model.
    """

    id: str
    student: Student


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class MethodInputs:
    """PRIVATE. All that a method is prepared from.

    Attributes:
        records: PRIVATE. The records, without those that are held out.
        facts: What is public about them, with the public points.
        seed: Seeds splits, initialization and batches, never noise.
        device: Where networks are trained.
        store: PRIVATE. The store of teachers and of keyed hashes.
        ledger: The ledger that holds the account; None on ranks that only assist.
        stages: Reports progress.
        clock: Times the stages.
        check_budget: Raises where the account does not admit what the run will charge; called before long work.
        log: PRIVATE. Told of the training of single teachers.
        log_losses: PRIVATE. Told of the losses of all teachers.
        first_answers: The noisy answers of the method's first stage; None: it has none.
    """

    records: PrivateRecords
    facts: DatasetFacts
    seed: int
    device: torch.device
    store: TeacherStore
    ledger: Ledger | None = None
    stages: Stages
    clock: StageTimer
    check_budget: Callable[[], None] = do_nothing
    log: Log = do_nothing
    log_losses: Callable[..., None] = do_nothing
    first_answers: FirstAnswers | None = None


class PreparedMethod(ABC):
    """PRIVATE. A method that is ready to release.

    Attributes:
        id: A random id, fresh for each release unless the user named stored teachers by it.
        votes: PRIVATE. The teachers' votes on every public point; None: no teachers vote.
        opened_votes: PRIVATE. The votes or counts behind the answers that were released; None: there are none.
        ensemble: PRIVATE. The teachers behind the votes, where they are here: for the owner's figures.
        guide: Releasable. The student of all rounds but the last, where the student that is published goes on from it.
    """

    id: str = ""
    votes: Votes | None = None
    opened_votes: Votes | CellHistogram | None = None
    ensemble: TeacherEnsemble | None = None
    guide: Student | None = None

    def check(self, budget: Budget, pool: PublicPool) -> None:  # noqa: B027
        """Raise ValueError, before anything is charged, for what would be refused once it is."""

    @abstractmethod
    def release(self, pool: PublicPool, spending: Spending) -> Release | ModelRelease:
        """Open the sensitive values through noise that ``spending`` has paid for."""

    def record_ledger_head(self, head: str) -> None:  # noqa: B027
        """Note the newest ledger entry with stored teachers, so that they are not used apart from their ledger."""


@dataclass(frozen=True, kw_only=True)
class PrivateMethod(ABC):
    """A way to turn private records into labels or a model that may be released: a frozen dataclass of choices.

    Attributes:
        name: The name that ``release.json`` gives.
        purpose: What its reservation pays for, in the ledger's words.
        price_advice: What makes a release cheaper, for messages.
        has_first_stage: Whether ``first_answers`` is to be called.
        uses_public_points: Whether the release depends on public points beyond constants.
        releases_model: Whether it releases a model that is published as it is, and no labels.
    """

    name: str = ""
    purpose: ClassVar[str] = PURPOSE_LABELS
    price_advice: ClassVar[str] = "Ask fewer questions (num_queries) or add noise (mechanism.sigma)"
    has_first_stage: ClassVar[bool] = False
    releases_model: ClassVar[bool] = False
    uses_public_points: ClassVar[bool] = True

    def __post_init__(self) -> None:
        checks.one_of("method.name", self.name, (type(self).name,))

    # ---- public ---------------------------------------------------------------------------------------------------

    @property
    def ensemble_size(self) -> int | None:
        """Number K of teachers that have one vote on every question; None: no teachers vote."""
        return None

    @property
    def student_name(self) -> str:
        """What kind of model it releases, for reports, where ``releases_model`` is set."""
        return ""

    @property
    @abstractmethod
    def mechanism_name(self) -> str:
        """What draws the noise, as settings, ledger and reports call it."""

    @property
    @abstractmethod
    def noise(self) -> str:
        """Kind of noise that its price is of: ``torch`` or ``discrete``."""

    def check_student(self, student: StudentAlgorithm) -> None:
        """Raise ValueError for a student that this method's release cannot teach, whatever the data."""
        if student.returns_released_model:
            fix = "Use method=gradients mechanism=gradient_descent, or student.publish=student."
            raise checks.error(
                "student.publish", "released_model", "is the model trained on gradients, and here is none", fix
            )

    def complete(self, facts: DatasetFacts, stages: Stages) -> PrivateMethod:
        """This method with what only the data say."""
        return self

    def calibrate(self, epsilon: float | None, delta: float, facts: DatasetFacts) -> PrivateMethod:
        """This method with noise that costs ``epsilon`` at ``delta``; None: the noise it has.

        Raises:
            ValueError: There is no noise to calibrate, or none costs so little.
        """
        if epsilon is None:
            return self
        problem = f"method={self.name} has no noise to calibrate"
        raise checks.error("privacy.target_epsilon", epsilon, problem)

    @abstractmethod
    def validate(self, facts: DatasetFacts) -> None:
        """Raise ValueError, by public facts alone, for what cannot work on these data.

        What would fail only after the release is paid for, such as a student that cannot take the data, is refused here
        too.
        """

    @abstractmethod
    def privacy_events(self, facts: DatasetFacts) -> tuple[PrivacyEvent, ...]:
        """Events of the whole release at its worst, the first stage included: what is reserved."""

    @abstractmethod
    def to_record(self, facts: DatasetFacts) -> dict[str, Any]:
        """What ``release.json`` says of the method: public choices alone."""

    def forecast_warning(self, facts: DatasetFacts) -> str | None:
        """Warning, by public facts, about answers that will be mostly noise; None: there is nothing to say."""
        return None

    def find_ledger_folder(self, root: Path, facts: DatasetFacts, stages: Stages) -> Path:
        """The folder whose ledger is charged."""
        return root

    # ---- private --------------------------------------------------------------------------------------------------

    def compute_fingerprint(self, store: TeacherStore, all_records: PrivateRecords) -> str:
        """PRIVATE. The content fingerprint of what the method answers from: no content has two accounts unnoticed."""
        return store.compute_content_fingerprint(all_records)

    def check_stored(self, inputs: MethodInputs) -> None:  # noqa: B027
        """PRIVATE. Raise ValueError where stored teachers that the user named are not those of these records."""

    def first_answers(self, records: PrivateRecords, spending: Spending) -> FirstAnswers:
        """PRIVATE. Ask a first question, whose noisy answer ``prepare`` may use: where ``has_first_stage`` is set."""
        raise NotImplementedError(f"{type(self).__name__}: has no first stage")

    @abstractmethod
    def prepare(self, inputs: MethodInputs) -> PreparedMethod:
        """PRIVATE. Make the method ready to release: train teachers, encode records."""

    def assist(self, inputs: MethodInputs) -> None:  # noqa: B027
        """PRIVATE. What a rank above 0 of a torchrun does while rank 0 prepares the method, where it asks for help."""
