"""What a run is made of, in nested parts, checked against each other before anything is read, trained or charged."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable

import torch

from pate_torch.accounting import calibration
from pate_torch.accounting.data_dependent import private_price
from pate_torch.accounting.events import PrivacyEvent
from pate_torch.audit.membership import MembershipTest
from pate_torch.core import checks, run_folders
from pate_torch.core.progress import Stages
from pate_torch.data.base import DatasetSource
from pate_torch.data.encoded_dataset import EncodedDataset
from pate_torch.features.base import FeatureRecipe, PointEncoder
from pate_torch.mechanisms.base import Mechanism
from pate_torch.mechanisms.private_epsilon import PrivateEpsilon
from pate_torch.methods.base import PrivateMethod
from pate_torch.planning import feasibility
from pate_torch.privacy.noise import check_delta, check_noise
from pate_torch.privacy.partition import Partition
from pate_torch.privacy.records import SELECTION_BASES, Dataset
from pate_torch.queries.base import QueryStrategy
from pate_torch.students.base import StudentAlgorithm
from pate_torch.students.selection import Selection
from pate_torch.teachers.recipe import TeacherRecipe


@dataclass(frozen=True, kw_only=True)
class PrivacyConfig:
    """The account's terms, and what this run may charge to it.

    Attributes:
        delta: The account's delta: (epsilon, delta) composes over every release from its data.
        noise: ``torch`` (continuous) or ``discrete`` (exact whole numbers).
        insecure_noise_seed: Makes noise repeatable, and the run not private.
        budget_epsilon: The account's cap, fixed when it opens; None: the cap it has, or ``opening_budget``.
        opening_budget: The cap of an account that nobody gave one.
        target_epsilon: What the labels are to cost: the mechanism's sigma is calibrated to it.
        allow_duplicate_account: Whether the same records may be charged to an account of another name, too.
        allow_uninformative_labels: Whether labels may be bought that would be no better than chance.
        first_charge_only: Whether the charge is refused where the account has any reservation.
        chosen_by: How this release is chosen among several settings (``types.SELECTION_BASES``); None: not stated.

    Raises:
        ValueError: A value is out of its range.
    """

    delta: float
    noise: str = "torch"
    insecure_noise_seed: int | None = None
    budget_epsilon: float | None = None
    opening_budget: float = 10.0
    target_epsilon: float | None = None
    allow_duplicate_account: bool = False
    allow_uninformative_labels: bool = False
    first_charge_only: bool = False
    chosen_by: str | None = None

    def __post_init__(self) -> None:
        for key in ("budget_epsilon", "target_epsilon"):
            if getattr(self, key) is not None:
                checks.positive(f"privacy.{key}", getattr(self, key))
        checks.positive("privacy.opening_budget", self.opening_budget)
        check_noise(self.noise, self.insecure_noise_seed)
        check_delta(self.noise, self.delta)
        checks.boolean("privacy.allow_duplicate_account", self.allow_duplicate_account)
        checks.boolean("privacy.allow_uninformative_labels", self.allow_uninformative_labels)
        if self.chosen_by is not None:
            checks.one_of("privacy.chosen_by", self.chosen_by, SELECTION_BASES)


@dataclass(frozen=True, kw_only=True, eq=False)
class RunConfig:
    """Everything a run is made of.

    Attributes:
        dataset: Loads private records, public points and the evaluation side.
        partition: Assigns units to shards, and fixes the adjacency.
        method: Who answers: teachers, or the records themselves.
        mechanism: Answers through noise.
        query: Chooses which public points to ask.
        num_queries: Largest number of questions.
        privacy: The account's terms.
        root: Where teachers and ledger lie.
        folder: The folder of this run.
        guide_student: Fitted between rounds of questions; None: the student itself, which then goes on from there.
        student: Learns from the released labels; None: labels are all that is wanted.
        teacher: How one network is trained on a shard, and (``baseline``) on all records at once.
        features: How features of the public points are learnt; None: the points as they are.
        encoder: Frozen, makes features of all points, which are all that a run then sees: it is moved into ``dataset``.
        selection: Chooses a student by private records; None: there is one student.
        private_epsilon: Publishes the data-dependent price; None: it is not published.
        membership: The owner's attack on the student; None: none.
        labels: Id of a release to learn from, in place of new labels.
        num_queries_is_default: Whether ``num_queries`` was recommended, not chosen, so that fewer public points lower
            it.
        baseline: Whether a model without privacy is trained too, for the owner.

    Raises:
        ValueError: Choices that do not go together, whatever the data.
    """

    dataset: DatasetSource
    partition: Partition
    method: PrivateMethod
    mechanism: Mechanism
    query: QueryStrategy
    num_queries: int
    privacy: PrivacyConfig
    root: Path
    folder: Path
    guide_student: StudentAlgorithm | None = None
    student: StudentAlgorithm | None = None
    teacher: TeacherRecipe = field(default_factory=TeacherRecipe)
    features: FeatureRecipe | None = None
    encoder: PointEncoder | None = None
    selection: Selection | None = None
    private_epsilon: PrivateEpsilon | None = None
    membership: MembershipTest | None = None
    labels: str | None = None
    seed: int = 0
    num_queries_is_default: bool = False
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    baseline: bool = False
    quiet: bool = False

    def __post_init__(self) -> None:
        checks.integer("seed", self.seed, low=0)
        checks.integer("num_queries", self.num_queries, low=1)
        if self.selection is not None and self.privacy.noise != "torch":
            fix = "Use noise=torch, or selection=none."
            raise checks.error(
                "selection", self.selection.name, "is drawn in floating point, not in whole numbers", fix
            )
        if self.labels is not None:
            run_folders.check_hex_id("labels", self.labels)
        if self.encoder is not None:
            encoded_dataset = EncodedDataset(
                source=self.dataset, encoder=self.encoder, root=self.root, device=self.device
            )
            object.__setattr__(self, "dataset", encoded_dataset)
            object.__setattr__(self, "encoder", None)
        mechanism_noise = getattr(self.mechanism, "noise", self.privacy.noise)
        if mechanism_noise != self.privacy.noise:
            raise checks.error(
                "mechanism.noise", mechanism_noise, f"must be the run's, {self.privacy.noise}", "Set noise alone."
            )
        self.method.check(self)
        if self.guide_student is not None and self.guide_student.returns_released_model:
            problem = "is the released model, which learns nothing that could guide a round"
            raise checks.error("guide_student", self.guide_student.name, problem, "Name another student.")
        if self.student is not None and self.student.returns_released_model and self.labels is None:
            self._check_released_model()

    def _check_released_model(self) -> None:
        """Raise ValueError where the student is to be a model that no record moves, or in features of others."""
        if not self.method.releases_model:
            fix = "Use method=gradients mechanism=gradient_descent, or student.publish=student."
            raise checks.error(
                "student.publish", "released_model", "is the model trained on gradients, and here is none", fix
            )
        if self.num_rounds > 1 and self.guide_student is not None:
            fix = "Use student@guide_student=same."
            raise checks.error("student.publish", "released_model", "lies in the features of its own guide", fix)
        student_features = None if self.student is None else self.student.feature_recipe
        if not self.is_guided and student_features != self.features:
            features_name = "none" if self.features is None else self.features.name
            problem = f"must be those in which the model is fitted to the records: features={features_name}"
            raise checks.error(
                "student.features",
                None if student_features is None else student_features.name,
                problem,
                "Set features alone.",
            )

    @property
    def ledger_path(self) -> Path:
        """Where the ledger lies: beside the teachers."""
        return self.root / "ledger.sqlite"

    @property
    def num_teachers(self) -> int:
        """The number of teachers, K; 0 where records answer for themselves."""
        return self.method.num_teachers

    @property
    def num_rounds(self) -> int:
        """The number of rounds of questions."""
        return min(self.query.rounds, self.num_queries)

    @property
    def trains_student(self) -> bool:
        """Whether a student is trained; else labels are all that is wanted."""
        return self.student is not None or self.selection is not None

    @property
    def guide(self) -> StudentAlgorithm | None:
        """The student that guides rounds of questions: one of its own, or the one that is published."""
        if self.guide_student is None:
            return None if self.student is None else self.student.guide
        return self.guide_student

    @property
    def is_guided(self) -> bool:
        """Whether a student is fitted between rounds: where the strategy, the mechanism or the method looks at it."""
        uses_guide = (
            self.query.uses_guide,
            self.mechanism.uses_guide,
            self.method.uses_guide,
        )
        return self.num_rounds > 1 and any(uses_guide)

    def adapt_to_data(self, data: Dataset, stages: Stages) -> RunConfig:
        """This configuration with what only the data say: the method, no more questions than points, calibrated noise.

        Raises:
            ValueError: The votes do not fit these data, or the noise cannot be calibrated.
        """
        config = dataclasses.replace(self, method=self.method.adapt_to_data(data)).cap_num_queries(data, stages)
        return config if config.labels is not None else config.calibrate_noise()

    def cap_num_queries(self, data: Dataset, stages: Stages) -> RunConfig:
        """This configuration with at most as many questions as public points, unless the user chose their number."""
        pool_size = len(data.pool)
        if not self.num_queries_is_default or self.num_queries <= pool_size:
            return self
        stages.print_message(
            f"num_queries={pool_size}, not the recommended {self.num_queries}: there are no more public points."
        )
        return dataclasses.replace(self, num_queries=pool_size)

    def calibrate_noise(self) -> RunConfig:
        """This configuration with noise that costs ``privacy.target_epsilon`` where one is given."""
        target, mechanism = self.privacy.target_epsilon, cast(Any, self.mechanism)
        if target is None:
            return self
        delta, names = self.privacy.delta, {f.name for f in dataclasses.fields(mechanism)}
        if not names & {"sigma", "epsilon"}:
            problem = f"mechanism={mechanism.name} has neither sigma nor epsilon to calibrate"
            raise checks.error("privacy.target_epsilon", target, problem)

        def set_noise(scale: float) -> Mechanism:
            change = {"sigma": scale} if "sigma" in names else {"epsilon": 1 / scale}
            return cast(Mechanism, dataclasses.replace(mechanism, **change))

        def compute_events(scale: float) -> tuple[PrivacyEvent, ...]:
            return set_noise(scale).privacy_events(self.num_queries, self.num_rounds)

        # Where a mechanism's epsilon is that of the whole release, as the sparse vector's, there is nothing to search.
        is_total = (
            "sigma" not in names
            and 1 - 1e-6 <= calibration.compute_epsilon(compute_events(1 / target), delta) / target <= 1
        )
        scale = 1 / target if is_total else calibration.calibrate_sigma(compute_events, epsilon=target, delta=delta)
        return dataclasses.replace(self, mechanism=set_noise(scale))

    def privacy_events(self, num_classes: int) -> tuple[PrivacyEvent, ...]:
        """Everything that this run may charge: the labels, the choice of a student, the publication of their price."""
        labels = () if self.labels is not None else self.mechanism.privacy_events(self.num_queries, self.num_rounds)
        return labels + self.extra_privacy_events(num_classes)

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
        assert self.private_epsilon is not None
        return self.private_epsilon.make_plan(
            self.mechanism,
            num_queries=self.num_queries,
            num_teachers=self.num_teachers,
            num_classes=num_classes,
            rounds=self.num_rounds,
            delta=self.privacy.delta,
        )

    def check_data(self, data: Dataset) -> None:
        """Refuse what cannot work on these data, before anything is trained, written or charged.

        What would fail only after the labels are paid for, such as a student's network that cannot take the data, is
        refused here too.

        Raises:
            ValueError: A choice cannot work; the message gives the key, its value, what is allowed and what to do.
        """
        if data.spec.kind == "text" and data.spec.encoder is None:
            fix = "Use features=encoder features.weights=<file> features.tokenizer=<file>."
            raise checks.error("features", None, "must be an encoder: points are texts", fix)
        if self.labels is None:
            check_adjacency(data, self.partition.adjacency)
            fix = f"There are {len(data.pool)} public points to ask about."
            checks.integer("num_queries", self.num_queries, low=1, high=len(data.pool), fix=fix)
            self.mechanism.check(
                num_queries=self.num_queries,
                num_teachers=self.num_teachers,
                num_classes=data.spec.num_classes,
                rounds=self.num_rounds,
            )
            votes, classes = self.method.estimate_votes_per_query(data, self), data.spec.num_classes
            if votes is not None:
                allow_uninformative = self.privacy.allow_uninformative_labels
                feasibility.check_informative(
                    self.mechanism, num_teachers=votes, num_classes=classes, allow_uninformative=allow_uninformative
                )
            self.method.check_data(data, self)
            self.method.describe(data.private.unit, self)  # a wrong one is found out now
            if self.baseline:  # a model of the teachers' recipe, on all records
                check_component("teacher", self.teacher, data)
            if self.is_guided:
                if self.guide is None:
                    problem = "must be a student: the later rounds look at one"
                    raise checks.error("guide_student", None, problem, "Use student@guide_student=supervised.")
                check_component("guide_student", self.guide, data)
        elif self.selection is not None:
            check_adjacency(data, self.partition.adjacency)
        self.check_students(data)

    def check_students(self, data: Dataset) -> None:
        """Raise ValueError for a student that cannot learn from these data."""
        if self.selection is None:
            check_component("student", self.student, data)
            return
        for name, algorithm in self.selection.candidates.items():
            check_component(f"selection.candidates.{name}", algorithm, data)


@runtime_checkable
class Study(Protocol):
    """What takes the place of ``pipeline.run`` where an experiment names a ``study``."""

    def run(self, plan: RunConfig) -> object:
        """Run what the plan describes; raises ValueError for a choice that cannot work, before anything is charged."""
        ...


def check_adjacency(data: Dataset, adjacency: str) -> None:
    """Raise ValueError where one unit's change could move other records of these data."""
    if adjacency not in data.adjacencies:
        problem = f"cannot be promised for {data.spec.name}: one unit's change could move other records"
        raise checks.error("partition", adjacency, problem, data.advice)


def check_component(key: str, component: StudentAlgorithm | TeacherRecipe | None, data: Dataset) -> None:
    """Raise ValueError for a component that cannot take these data."""
    if component is None:
        return
    try:
        component.check(data.spec)
    except ValueError as error:
        raise ValueError(checks.prefix_error_key(key, error)) from error
