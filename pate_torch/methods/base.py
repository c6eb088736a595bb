"""The contract of a private method.

    validate(facts)           refuse settings that cannot work, by public facts alone
    privacy_events(facts)     return the worst case, which is reserved before any noise is drawn
    first_answers(...)        optional: draw noisy answers that the same reservation pays for
    prepare(inputs)           PRIVATE: train teachers or encode records
    release(pool, spending)   open the sensitive values, with noise that was paid for

A method is one file in this package and one line in components.py. ``session.ReleaseSession`` is its only caller.
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
from pate_torch.privacy.accounts import PURPOSE_LABELS
from pate_torch.privacy.budget import Budget, Spending
from pate_torch.privacy.ledger import Ledger
from pate_torch.privacy.partition import DatasetFacts
from pate_torch.privacy.records import PrivateRecords, PublicPool, Release
from pate_torch.privacy.sensitive import CellHistogram, Votes
from pate_torch.students.base import Student, StudentAlgorithm
from pate_torch.teachers.ensemble import TeacherEnsemble
from pate_torch.teachers.store import TeacherStore


@dataclass(frozen=True, eq=False)
class FirstAnswers:
    """Releasable. Noisy answers of the first stage of a method.

    Attributes:
        counts_C: Noisy count of each class, float64 [C].
        sigma: Standard deviation of the noise of each count, in privacy units.
    """

    counts_C: Tensor
    sigma: float


@dataclass(frozen=True, eq=False)
class ModelRelease:
    """Releasable. A model that was trained on private records with noise.

    Attributes:
        id: Id of the reservation that paid for the model.
        student: Model.
    """

    id: str
    student: Student


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class MethodInputs:
    """PRIVATE. Everything that a method needs to become ready to release.

    Attributes:
        records: PRIVATE. Records, without the held-out ones.
        facts: Public facts about the records, with the public points.
        seed: Seed of splits, initialization and batches. It never seeds noise.
        device: Device on which networks are trained.
        store: PRIVATE. Store of teachers and of keyed hashes.
        ledger: Ledger that holds the account. None on ranks above 0.
        stages: Display of progress.
        clock: Timer of the stages.
        check_budget: Function that raises if the account does not admit the charges of the run. It is called before
            long computations.
        log: PRIVATE. Function that receives messages about single teachers.
        log_losses: PRIVATE. Function that receives the losses of all teachers.
        first_answers: Noisy answers of the first stage. None if the method has no first stage.
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
        id: Random id, which is new for each release unless the user named stored teachers by it.
        votes: PRIVATE. Votes of the teachers on every public point. None if no teachers vote.
        opened_votes: PRIVATE. Votes or counts behind the released answers. None if there are none.
        ensemble: PRIVATE. Teachers behind the votes, for the owner's figures. None if they are not available.
        guide: Releasable. Guide student of all rounds but the last, from which the published student continues. None if
            the published student starts anew.
        on_ledger_head: Function that stores the newest ledger hash with stored teachers. None if none are stored.
    """

    id: str = ""
    votes: Votes | None = None
    opened_votes: Votes | CellHistogram | None = None
    ensemble: TeacherEnsemble | None = None
    guide: Student | None = None
    on_ledger_head: Callable[[str], object] | None = None

    def check(self, budget: Budget, pool: PublicPool) -> None:  # noqa: B027
        """Raise ValueError, before any charge, for errors that ``release`` would raise after the charge."""

    @abstractmethod
    def release(self, pool: PublicPool, spending: Spending) -> Release | ModelRelease:
        """Open the sensitive values with noise that ``spending`` has paid for."""

    def record_ledger_head(self, head: str) -> None:
        """Store the newest ledger hash with stored teachers, which cannot be used with a ledger that lacks it."""
        if self.on_ledger_head is not None:
            self.on_ledger_head(head)


@dataclass(frozen=True, kw_only=True)
class PrivateMethod(ABC):
    """A way to turn private records into labels or a model that may be released: a frozen dataclass of settings.

    Attributes:
        name: Name of the method in ``release.json``.
        purpose: Purpose of its reservation, for the ledger.
        price_advice: Advice on how to lower the price of a release, for messages.
        has_first_stage: Whether the session calls ``first_answers``.
        uses_public_points: Whether the release depends on public points beyond normalization constants.
        releases_model: Whether the method releases a model, which is published, instead of labels.
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
        """Number K of teachers, which vote on every question. None if no teachers vote."""
        return None

    @property
    def student_name(self) -> str:
        """Kind of the released model, for reports, if ``releases_model`` is set."""
        return ""

    @property
    @abstractmethod
    def mechanism_name(self) -> str:
        """Name of the mechanism that draws the noise, for the ledger and for reports."""

    @property
    @abstractmethod
    def noise(self) -> str:
        """Kind of noise that the price assumes: "torch" or "discrete"."""

    def check_student(self, student: StudentAlgorithm) -> None:
        """Raise ValueError for a student that cannot learn from a release of this method, for any data."""
        if student.returns_released_model:
            fix = "Use method=gradients mechanism=gradient_descent, or student.publish=student."
            raise checks.error(
                "student.publish", "released_model", "is the model trained on gradients, and here is none", fix
            )

    def complete(self, facts: DatasetFacts, stages: Stages) -> PrivateMethod:
        """Return this method with the settings that follow from the public facts of the data."""
        return self

    def calibrate(self, epsilon: float | None, delta: float, facts: DatasetFacts) -> PrivateMethod:
        """Return this method with noise whose price is ``epsilon`` at ``delta``. None leaves the noise as it is.

        Raises:
            ValueError: There is no noise to calibrate, or no noise has such a small price.
        """
        if epsilon is None:
            return self
        problem = f"method={self.name} has no noise to calibrate"
        raise checks.error("privacy.target_epsilon", epsilon, problem)

    @abstractmethod
    def validate(self, facts: DatasetFacts) -> None:
        """Raise ValueError, by public facts alone, for settings that cannot work on these data.

        Settings that would fail only after the release is paid for are refused here, too.
        """

    @abstractmethod
    def privacy_events(self, facts: DatasetFacts) -> tuple[PrivacyEvent, ...]:
        """Return the events of the worst case of the whole release, including the first stage. They are reserved."""

    @abstractmethod
    def to_record(self, facts: DatasetFacts) -> dict[str, Any]:
        """Return the public settings of the method for ``release.json``."""

    def forecast_warning(self, facts: DatasetFacts) -> str | None:
        """Return a warning, by public facts, if the answers will be mostly noise, else None."""
        return None

    def find_ledger_folder(self, root: Path, facts: DatasetFacts, stages: Stages) -> Path:
        """Return the folder whose ledger is charged."""
        return root

    # ---- private --------------------------------------------------------------------------------------------------

    def compute_fingerprint(self, store: TeacherStore, all_records: PrivateRecords) -> str:
        """PRIVATE. Compute the content fingerprint, by which the same content in two accounts is noticed."""
        return store.compute_content_fingerprint(all_records)

    def check_stored(self, inputs: MethodInputs) -> None:  # noqa: B027
        """PRIVATE. Raise ValueError if stored teachers that the user named were not trained on these records."""

    def first_answers(self, records: PrivateRecords, spending: Spending) -> FirstAnswers:
        """PRIVATE. Draw the noisy answers that ``prepare`` may use, if ``has_first_stage`` is set."""
        raise NotImplementedError(f"{type(self).__name__}: has no first stage")

    @abstractmethod
    def prepare(self, inputs: MethodInputs) -> PreparedMethod:
        """PRIVATE. Make the method ready to release: train teachers, encode records."""

    def assist(self, inputs: MethodInputs) -> None:  # noqa: B027
        """PRIVATE. Do the part of a rank above 0 of ``torchrun`` while rank 0 calls ``prepare``."""
