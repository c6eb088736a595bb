"""What a run is made of, in nested parts, checked against each other before anything is read, trained or charged."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from pate_torch.accounting.data_dependent import private_price
from pate_torch.accounting.events import PrivacyEvent
from pate_torch.core import checks, run_folders
from pate_torch.core.progress import Stages
from pate_torch.data.base import DatasetSource
from pate_torch.data.encoded_dataset import EncodedDataset
from pate_torch.features.base import PointEncoder
from pate_torch.mechanisms.private_epsilon import PrivateEpsilon
from pate_torch.methods.base import PrivateMethod
from pate_torch.methods.teacher_votes import TeacherVotes
from pate_torch.methods.voting import VotesFile, VotingMethod
from pate_torch.privacy.facts import DatasetFacts
from pate_torch.privacy.noise import check_delta, check_noise
from pate_torch.privacy.partition import Partition
from pate_torch.privacy.records import SELECTION_BASES
from pate_torch.release.membership import MembershipTest
from pate_torch.students.base import StudentAlgorithm
from pate_torch.students.selection import Selection
from pate_torch.teachers.recipe import TeacherRecipe


@dataclass(frozen=True, kw_only=True)
class PrivacyConfig:
    """The account's terms, and what this run may charge to it.

    Attributes:
        delta: The account's delta: (epsilon, delta) composes over every release from its data.
        insecure_noise_seed: Makes noise repeatable, and the run not private.
        budget_epsilon: The account's cap, fixed when it opens; None: the cap it has, or ``opening_budget``.
        opening_budget: The cap of an account that nobody gave one.
        target_epsilon: What the release is to cost: its noise is calibrated to it.
        allow_duplicate_account: Whether the same records may be charged to an account of another name, too.
        first_charge_only: Whether the charge is refused where the account has any reservation.
        chosen_by: How this release is chosen among several settings (``records.SELECTION_BASES``); None: not stated.

    Raises:
        ValueError: A value is out of its range.
    """

    delta: float
    insecure_noise_seed: int | None = None
    budget_epsilon: float | None = None
    opening_budget: float = 10.0
    target_epsilon: float | None = None
    allow_duplicate_account: bool = False
    first_charge_only: bool = False
    chosen_by: str | None = None

    def __post_init__(self) -> None:
        for key in ("budget_epsilon", "target_epsilon"):
            if getattr(self, key) is not None:
                checks.positive(f"privacy.{key}", getattr(self, key))
        checks.positive("privacy.opening_budget", self.opening_budget)
        checks.boolean("privacy.allow_duplicate_account", self.allow_duplicate_account)
        if self.chosen_by is not None:
            checks.one_of("privacy.chosen_by", self.chosen_by, SELECTION_BASES)


@dataclass(frozen=True, kw_only=True, eq=False)
class RunConfig:
    """Everything a run is made of.

    Attributes:
        dataset: Loads private records, public points and the evaluation side.
        partition: Assigns units to shards, and fixes the adjacency.
        method: Turns the private records into a release.
        privacy: The account's terms.
        root: Where teachers and ledger lie.
        folder: The folder of this run.
        student: Learns from the released labels; None: labels are all that is wanted.
        encoder: Frozen, makes features of all points, which are all that a run then sees: it is moved into ``dataset``.
        selection: Chooses a student by private records; None: there is one student.
        private_epsilon: Publishes the data-dependent price; None: it is not published.
        membership: The owner's attack on the student; None: none.
        labels: Id of a release to learn from, in place of new labels.
        baseline: How a model without privacy is trained on all records at once, for the owner; None: none is.

    Raises:
        ValueError: Choices that do not go together, whatever the data.
    """

    dataset: DatasetSource
    partition: Partition
    method: PrivateMethod
    privacy: PrivacyConfig
    root: Path
    folder: Path
    student: StudentAlgorithm | None = None
    encoder: PointEncoder | None = None
    selection: Selection | None = None
    private_epsilon: PrivateEpsilon | None = None
    membership: MembershipTest | None = None
    labels: str | None = None
    seed: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    baseline: TeacherRecipe | None = None
    quiet: bool = False

    def __post_init__(self) -> None:
        checks.integer("seed", self.seed, low=0)
        check_noise(self.method.noise, self.privacy.insecure_noise_seed)
        check_delta(self.method.noise, self.privacy.delta)
        if self.encoder is not None:
            encoded = EncodedDataset(source=self.dataset, encoder=self.encoder, root=self.root, device=self.device)
            object.__setattr__(self, "dataset", encoded)
            object.__setattr__(self, "encoder", None)
        if self.selection is not None and self.method.noise != "torch":
            problem = "is drawn in floating point, not in whole numbers"
            raise checks.error("selection", self.selection.name, problem, "Use noise=torch, or selection=none.")
        if self.selection is not None and self.method.releases_model:
            fix = "Use selection=none: the model that is released is the student."
            raise checks.error("selection", self.selection.name, f"cannot go with method={self.method.name}", fix)
        if self.private_epsilon is not None and not isinstance(self.method, VotingMethod):
            fix = "Leave out private_epsilon: there are no votes of teachers."
            raise checks.error("method", self.method.name, "cannot be combined with private_epsilon", fix)
        if isinstance(self.method, VotesFile) and (self.labels is not None or self.selection is not None):
            key = "selection" if self.labels is None else "labels"
            fix = f"Leave out {key}: the teachers behind the votes are not here, nor what they learnt from."
            raise checks.error("votes", str(self.method.path), f"cannot be combined with {key}", fix)
        if self.labels is not None:
            run_folders.check_hex_id("labels", self.labels)
            if isinstance(self.method, TeacherVotes) and self.method.teachers_id is not None:
                raise checks.error("labels", self.labels, "a release is reused without teachers", "Leave out teachers.")
        elif self.student is not None:
            self.method.check_student(self.student)

    @property
    def ledger_path(self) -> Path:
        """Where the ledger lies: beside the teachers."""
        return self.root / "ledger.sqlite"

    @property
    def trains_student(self) -> bool:
        """Whether a student is trained; else the release of the method is all that is wanted."""
        return self.student is not None or self.selection is not None

    def complete(self, facts: DatasetFacts, stages: Stages) -> RunConfig:
        """This configuration with what only the data say: votes, no more questions than points, calibrated noise.

        Raises:
            ValueError: The votes do not fit these data, or the noise cannot be calibrated.
        """
        method = self.method.complete(facts, stages)
        if self.labels is None:
            method = method.calibrate(self.privacy.target_epsilon, self.privacy.delta, facts)
        return replace(self, method=method)

    def privacy_events(self, facts: DatasetFacts) -> tuple[PrivacyEvent, ...]:
        """Everything that this run may charge: the release, the choice of a student, the publication of their price."""
        release_events = () if self.labels is not None else self.method.privacy_events(facts)
        return release_events + self.extra_privacy_events(facts.spec.num_classes)

    def extra_privacy_events(self, num_classes: int) -> tuple[PrivacyEvent, ...]:
        """What this run may charge for the choice of a student and the publication of the labels' price."""
        selection_events = () if self.selection is None else self.selection.privacy_events()
        if self.private_epsilon is None or self.labels is not None:
            return selection_events
        return selection_events + self.private_epsilon.privacy_events(self.plan_private_epsilon(num_classes))

    def plan_private_epsilon(self, num_classes: int) -> private_price.PublicationPlan:
        """How the data-dependent price is published.

        Raises:
            ValueError: It cannot be.
        """
        method = self.method
        assert self.private_epsilon is not None and isinstance(method, VotingMethod) and method.ensemble_size
        return self.private_epsilon.make_plan(
            method.mechanism,
            num_queries=method.num_queries,
            num_teachers=method.ensemble_size,
            num_classes=num_classes,
            rounds=method.num_rounds,
            delta=self.privacy.delta,
        )

    def validate(self, facts: DatasetFacts) -> None:
        """Refuse what cannot work on these data, before anything is trained, written or charged.

        What would fail only after the labels are paid for, such as a student's network that cannot take the data, is
        refused here too.

        Raises:
            ValueError: A choice cannot work; the message gives the key, its value, what is allowed and what to do.
        """
        if facts.spec.kind == "text" and facts.spec.encoder is None:
            fix = "Use features=encoder features.weights=<file> features.tokenizer=<file>."
            raise checks.error("features", None, "must be an encoder: points are texts", fix)
        if self.labels is None or self.selection is not None:
            facts.check_adjacency()
        if self.labels is None:
            self.method.validate(facts)
            if self.baseline is not None:
                with checks.prefixed_errors("teacher"):
                    self.baseline.check(facts.spec)
        self.check_students(facts)

    def check_students(self, facts: DatasetFacts) -> None:
        """Raise ValueError for a student that cannot learn from these data."""
        students = {} if self.student is None else {"student": self.student}
        if self.selection is not None:
            students = {f"selection.candidates.{name}": c for name, c in self.selection.candidates.items()}
        for key, algorithm in students.items():
            with checks.prefixed_errors(key):
                algorithm.check(facts.spec)


class Study(ABC):
    """What takes the place of one run where an experiment names a ``study``."""

    @abstractmethod
    def run(self, plan: RunConfig) -> object:
        """Run what the plan describes; raises ValueError for a choice that cannot work, before anything is charged."""
