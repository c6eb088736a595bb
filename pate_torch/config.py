"""Configuration of a run, whose parts are checked against each other before anything is read, trained or charged."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from pate_torch.accounting.accountant import compute_guarantee
from pate_torch.accounting.events import PrivacyEvent
from pate_torch.accounting.filters import FILTER_KINDS
from pate_torch.core import checks, run_folders
from pate_torch.core.executors import Workers
from pate_torch.core.progress import Callback, Stages
from pate_torch.data.base import DatasetSource
from pate_torch.data.encoded_dataset import EncodedDataset
from pate_torch.features.encoder import Encoder
from pate_torch.mechanisms.histogram import Histogram
from pate_torch.methods.base import PrivateMethod
from pate_torch.methods.teacher_votes import TeacherVotes
from pate_torch.methods.voting import VotesFile
from pate_torch.privacy.ledger import find_account
from pate_torch.privacy.noise import check_delta, check_noise
from pate_torch.privacy.partition import DatasetFacts, Partition, drop_unusable
from pate_torch.privacy.records import LABEL_UNIT, SELECTION_BASES, Dataset, PrivateRecords
from pate_torch.release.membership import MembershipTest
from pate_torch.students.base import StudentAlgorithm
from pate_torch.students.private_test import compute_release_epsilon, make_test_mechanism
from pate_torch.students.selection import Selection
from pate_torch.teachers.recipe import TeacherRecipe
from pate_torch.teachers.store import TeacherStore


@dataclass(frozen=True, kw_only=True)
class PrivacyConfig:
    """Terms of the account, and limits on what this run may charge to the account.

    Attributes:
        delta: Delta of the account. All releases of the account together are (epsilon, delta)-differentially private.
        insecure_noise_seed: Seed that makes the noise repeatable and the run not private. None for secret noise.
        budget_epsilon: Cap of the account, which its first charge fixes. If None, the account keeps its cap, and a new
            account gets ``opening_budget``.
        opening_budget: Cap of a new account for which ``budget_epsilon`` is None.
        delta_reserve: Part of delta that a new account reserves for failures of privacy, such as those of sparse
            vectors and DP-SGD. The first charge fixes it. None to choose it by the first release, mostly a tenth of
            delta (``PrivacyFilter.from_planned_events``).
        filter: Privacy filter of a new account. "gdp" is exact for Gaussian noise, and "rdp" suits mixtures of
            mechanisms. None for "gdp" if Gaussian mechanisms describe the first release, else "rdp".
        target_epsilon: Epsilon of the release, to which its noise is calibrated. None to use the noise of the method.
        allow_duplicate_account: Whether this account may be charged for records that another account was charged for.
        first_charge_only: Whether the charge is refused if the account has any reservation.
        spend_anyway: Whether to go on if the first answers show that no skill is expected of the model.
        chosen_by: Basis on which the settings of this release are chosen (``records.SELECTION_BASES``). None if it is
            not stated.

    Raises:
        ValueError: A value is out of range.
    """

    delta: float
    insecure_noise_seed: int | None = None
    budget_epsilon: float | None = None
    opening_budget: float = 10.0
    delta_reserve: float | None = None
    filter: str | None = None
    target_epsilon: float | None = None
    allow_duplicate_account: bool = False
    first_charge_only: bool = False
    spend_anyway: bool = False
    chosen_by: str | None = None

    def __post_init__(self) -> None:
        for key in ("budget_epsilon", "target_epsilon"):
            checks.optional(checks.positive, f"privacy.{key}", getattr(self, key))
        checks.positive("privacy.opening_budget", self.opening_budget)
        checks.optional(checks.between, "privacy.delta_reserve", self.delta_reserve, 0, self.delta)
        checks.optional(checks.one_of, "privacy.filter", self.filter, FILTER_KINDS)
        for key in ("allow_duplicate_account", "first_charge_only", "spend_anyway"):
            checks.boolean(f"privacy.{key}", getattr(self, key))
        checks.optional(checks.one_of, "privacy.chosen_by", self.chosen_by, SELECTION_BASES)


@dataclass(frozen=True, kw_only=True, eq=False)
class RunConfig:
    """Configuration of a run.

    Attributes:
        dataset: Source of private records, public points and evaluation data.
        partition: Assignment of units to shards, and adjacency.
        method: Method that turns the private records into a release.
        privacy: Terms of the account.
        root: Folder of stored teachers and of the ledger.
        folder: Folder of this run.
        student: Algorithm that learns from the released labels. None to train no student.
        encoder: Frozen encoder of all points, which ``__post_init__`` moves into ``dataset``. None to use the points as
            they are.
        selection: Choice of one of several students by private records. None to train ``student`` alone.
        private_test: Share of the units that all releases of the account leave out, for a test. 0 for no test.
        test_mechanism: Mechanism of the test, which ``calibrate`` sets. None for no test.
        membership: Membership attack on the student, for the owner. None to make no attack.
        labels: Id of an earlier release from whose labels the student learns. None to make a new release.
        seed: Seed of splits, initialization and batches. It never seeds noise.
        device: Device of training and inference.
        executor: Workers that train the teachers.
        baseline: Recipe of a model that is trained on all records without privacy, for the owner. None to train no such
            model.
        quiet: Whether to hide progress.
        callback: Function that is told the progress (``core.progress.Stages``). None to tell nothing.

    Raises:
        ValueError: Choices cannot be combined, whatever the data.
    """

    dataset: DatasetSource
    partition: Partition
    method: PrivateMethod
    privacy: PrivacyConfig
    root: Path
    folder: Path
    student: StudentAlgorithm | None = None
    encoder: Encoder | None = None
    selection: Selection | None = None
    private_test: float = 0.0
    test_mechanism: Histogram | None = None
    membership: MembershipTest | None = None
    labels: str | None = None
    seed: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    executor: Workers = field(default_factory=Workers)
    baseline: TeacherRecipe | None = None
    quiet: bool = False
    callback: Callback | None = None

    def __post_init__(self) -> None:
        checks.integer("seed", self.seed, low=0)
        check_noise(self.method.noise, self.privacy.insecure_noise_seed)
        check_delta(self.method.noise, self.privacy.delta)
        if self.encoder is not None:
            encoded = EncodedDataset(source=self.dataset, encoder=self.encoder, root=self.root, device=self.device)
            object.__setattr__(self, "dataset", encoded)
            object.__setattr__(self, "encoder", None)
        if self.selection is not None and self.method.noise != "torch":
            problem = f"draws continuous noise, which cannot be combined with noise={self.method.noise}"
            raise checks.error("selection", self.selection.name, problem, "Use noise=torch, or selection=none.")
        if self.selection is not None and self.method.releases_model:
            fix = "Use selection=none, because the released model is itself the student."
            problem = f"cannot be combined with method={self.method.name}"
            raise checks.error("selection", self.selection.name, problem, fix)
        if isinstance(self.method, VotesFile) and (self.labels is not None or self.selection is not None):
            key = "selection" if self.labels is None else "labels"
            fix = f"Leave out {key}, which needs the private records behind the votes."
            raise checks.error("votes", str(self.method.path), f"cannot be combined with {key}", fix)
        if self.labels is not None:
            run_folders.check_hex_id("labels", self.labels)
            if isinstance(self.method, TeacherVotes) and self.method.teachers_id is not None:
                problem = "cannot be combined with teachers, because the labels are already released"
                raise checks.error("labels", self.labels, problem, "Leave out teachers.")
        elif self.student is not None:
            self.method.check_student(self.student)

    @property
    def trains_student(self) -> bool:
        """Whether a student is trained on the release."""
        return self.student is not None or self.selection is not None

    def complete(self, facts: DatasetFacts, stages: Stages) -> RunConfig:
        """Return this configuration with the settings that follow from the data, such as the number of queries.

        Raises:
            ValueError: The votes do not fit these data, or the noise cannot be calibrated.
        """
        method = self.method.complete(facts, stages)
        completed = replace(self, method=method)
        return completed.calibrate(facts) if self.labels is None else completed

    def calibrate(self, *facts: DatasetFacts) -> RunConfig:
        """Return this configuration with noise whose cost, a private test included, is ``privacy.target_epsilon``.

        ``facts`` are the facts of the data set, or nothing for a method whose cost does not depend on them.
        """
        target, delta = self.privacy.target_epsilon, self.privacy.delta
        epsilon = compute_release_epsilon(target, delta) if self.private_test and target else target
        while True:
            method = self.method.calibrate(epsilon, delta, *facts)
            if not self.private_test:
                return replace(self, method=method)
            events = method.privacy_events(*facts)
            mechanism = make_test_mechanism(events, self.partition.adjacency, delta, method.noise)
            total = compute_guarantee(events + mechanism.privacy_events(1), delta).epsilon
            if not (epsilon and target) or total <= target * (1 + 1e-9):
                return replace(self, method=method, test_mechanism=mechanism)
            epsilon *= 0.98  # costs that are not Gaussian do not add in mu^2

    def privacy_events(self, facts: DatasetFacts) -> tuple[PrivacyEvent, ...]:
        """Return all events that this run may charge: the release, and the events of ``extra_privacy_events``."""
        release_events = () if self.labels is not None else self.method.privacy_events(facts)
        return release_events + self.extra_privacy_events()

    def extra_privacy_events(self) -> tuple[PrivacyEvent, ...]:
        """Return the events of the choice of a student and of its test."""
        events = () if self.selection is None else self.selection.privacy_events()
        return events + (() if self.test_mechanism is None else self.test_mechanism.privacy_events(1))

    def validate(self, facts: DatasetFacts) -> None:
        """Raise ValueError for choices that cannot work on these data, before anything is trained, written or charged.

        Choices that would fail only after the labels are paid for are refused here, too, such as a network of the
        student that cannot take the data.
        """
        if facts.spec.kind == "text" and facts.spec.encoder is None:
            fix = "Use features=encoder features.weights=<file> features.tokenizer=<file>."
            raise checks.error("features", None, "must be an encoder, because points are texts", fix)
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
        is_testable = self.labels is None and not self.method.releases_model and facts.unit != LABEL_UNIT
        if self.private_test and not (is_testable and all(a.has_linear_output for a in students.values())):
            problem = "does not go with labels of an earlier release, DP-SGD, labels_only, or student=label_spreading"
            raise checks.error("private_test.share", self.private_test, problem, "Leave out the test.")
        for key, algorithm in students.items():
            with checks.prefixed_errors(key):
                algorithm.check(facts.spec)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class DataSplits:
    """PRIVATE. Data of a run, and the records that the run holds out.

    Attributes:
        data: Data without the private records that are held out.
        all_private: All private records, whose account is charged.
        test: One record of each unit that the account holds out of every release, for tests. None if the run charges
            nothing.
        held_out: Id of the rule that holds out these units. Empty if there is no rule.
        validation: Records held out for choosing a student. None without ``config.selection``.
        membership_holdout: Records held out for the owner's membership attack. None if no records are held out.
    """

    data: Dataset
    all_private: PrivateRecords
    test: PrivateRecords | None = None
    held_out: str = ""
    validation: PrivateRecords | None = None
    membership_holdout: PrivateRecords | None = None

    @classmethod
    def from_config(cls, config: RunConfig, stages: Stages) -> DataSplits:
        """Load the data set, drop unusable records, and hold out the records for a student's choice and an attack."""
        source, validation, membership_holdout = config.dataset, None, None
        data = source.load(stages) if isinstance(source, EncodedDataset) else source.load()
        data = drop_unusable(data, config.partition.adjacency)
        name, all_private, store = data.spec.name, data.private, TeacherStore(config.root)
        store.set_test_rule(name, config.private_test, find_account(config.root, name))
        if isinstance(config.method, VotesFile) and store.find_test_rule(name) is not None:
            raise checks.error("account", name, "holds out units for tests, so votes from elsewhere cannot be used")
        training, test, rule_id = store.hold_out_units(name, all_private, config.partition.adjacency)
        data = replace(data, private=training)
        if config.selection is not None:
            data, validation = config.selection.hold_out(data, config.partition.adjacency, config.seed)
        if config.membership is not None and not config.method.releases_model:
            data, membership_holdout = config.membership.hold_out(data, config.partition.adjacency, config.seed)
        held_out = {"test": test, "validation": validation, "membership_holdout": membership_holdout}
        return cls(data=data, all_private=all_private, held_out=rule_id, **held_out)


class Study(ABC):
    """An experiment of several runs, which the key ``study`` of an experiment's file names."""

    @abstractmethod
    def run(self, plan: RunConfig) -> object:
        """Run the study. Raises ValueError for a choice that cannot work, before anything is charged."""
