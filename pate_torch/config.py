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
from pate_torch.features.encoded_dataset import EncodedDataset
from pate_torch.methods.base import PrivateMethod
from pate_torch.noise.source import check_delta, check_noise
from pate_torch.planning import feasibility
from pate_torch.private_epsilon import PrivateEpsilon
from pate_torch.protocols import (
    Checkable,
    DatasetSource,
    FeatureRecipe,
    Mechanism,
    Partition,
    PointEncoder,
    QueryStrategy,
    StudentAlgorithm,
)
from pate_torch.students.selection import Selection
from pate_torch.teachers.recipe import TeacherRecipe
from pate_torch.types import SELECTION_BASES, Dataset


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
        allow_chance: Whether labels may be bought that would be no better than chance.
        only_first: Whether the charge is refused where the account has any reservation.
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
    allow_chance: bool = False
    only_first: bool = False
    chosen_by: str | None = None

    def __post_init__(self) -> None:
        for key in ("budget_epsilon", "target_epsilon"):
            if getattr(self, key) is not None:
                checks.positive(f"privacy.{key}", getattr(self, key))
        checks.positive("privacy.opening_budget", self.opening_budget)
        check_noise(self.noise, self.insecure_noise_seed)
        check_delta(self.noise, self.delta)
        checks.boolean("privacy.allow_duplicate_account", self.allow_duplicate_account)
        checks.boolean("privacy.allow_chance", self.allow_chance)
        if self.chosen_by is not None:
            checks.one_of("privacy.chosen_by", self.chosen_by, SELECTION_BASES)


@dataclass(frozen=True, kw_only=True, eq=False)
class RunConfig:
    """Everything a run is made of.

    Attributes:
        dataset: Loads private records, public points and the evaluation side.
        partition: Assigns units to shards, and fixes the adjacency.
        voters: Who answers: teachers, or the records themselves.
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
        sanitiser: Publishes the data-dependent price; None: it is not published.
        membership: The owner's attack on the student; None: none.
        labels: Id of a release to learn from, in place of new labels.
        fewer_queries: Whether ``num_queries`` was recommended, not chosen, so that fewer public points lower it.
        baseline: Whether a model without privacy is trained too, for the owner.

    Raises:
        ValueError: Choices that do not go together, whatever the data.
    """

    dataset: DatasetSource
    partition: Partition
    voters: PrivateMethod
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
    sanitiser: PrivateEpsilon | None = None
    membership: MembershipTest | None = None
    labels: str | None = None
    seed: int = 0
    fewer_queries: bool = False
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
            run_folders.check_id("labels", self.labels)
        if self.encoder is not None:
            encoded = EncodedDataset(source=self.dataset, encoder=self.encoder, root=self.root, device=self.device)
            object.__setattr__(self, "dataset", encoded)
            object.__setattr__(self, "encoder", None)
        given = getattr(self.mechanism, "noise", self.privacy.noise)
        if given != self.privacy.noise:
            raise checks.error("mechanism.noise", given, f"must be the run's, {self.privacy.noise}", "Set noise alone.")
        self.voters.check(self)
        if getattr(self.guide_student, "last", None) == "model":
            what = "is the released model, which learns nothing that could guide a round"
            raise checks.error("guide_student", cast(Any, self.guide_student).name, what, "Name another student.")
        if getattr(self.student, "last", None) == "model" and self.labels is None:
            self._check_model()

    def _check_model(self) -> None:
        """Raise ValueError where the student is to be a model that no record moves, or in features of others."""
        if not self.voters.releases_model:
            fix = "Use voters=gradients mechanism=gradient_descent, or student.last=student."
            raise checks.error("student.last", "model", "is the model trained on gradients, and here is none", fix)
        if self.num_rounds > 1 and self.guide_student is not None:
            fix = "Use student@guide_student=same."
            raise checks.error("student.last", "model", "lies in the features of its own guide", fix)
        own: Any = getattr(self.student, "features", None)
        if not self.is_guided and own != self.features:
            asked = "none" if self.features is None else self.features.name
            what = f"must be those in which the model is fitted to the records: features={asked}"
            raise checks.error("student.features", None if own is None else own.name, what, "Set features alone.")

    @property
    def ledger_path(self) -> Path:
        """Where the ledger lies: beside the teachers."""
        return self.root / "ledger.sqlite"

    @property
    def num_teachers(self) -> int:
        """The number of teachers, K; 0 where records answer for themselves."""
        return self.voters.num_teachers

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
        return getattr(self.student, "guide", self.student) if self.guide_student is None else self.guide_student

    @property
    def is_guided(self) -> bool:
        """Whether a student is fitted between rounds: where the strategy, mechanism or voters look at it."""
        lookers = (
            getattr(self.query, "guided", True),
            getattr(self.mechanism, "guided", False),
            self.voters.uses_guide,
        )
        return self.num_rounds > 1 and any(lookers)

    def for_data(self, data: Dataset, stages: Stages) -> RunConfig:
        """This configuration with what only the data say: the voters, no more questions than points, calibrated noise.

        Raises:
            ValueError: The votes do not fit these data, or the noise cannot be calibrated.
        """
        config = dataclasses.replace(self, voters=self.voters.adapt_to_data(data)).fewer_queries_for(data, stages)
        return config if config.labels is not None else config.calibrated()

    def fewer_queries_for(self, data: Dataset, stages: Stages) -> RunConfig:
        """This configuration with at most as many questions as public points, unless the user chose their number."""
        most = len(data.pool)
        if not self.fewer_queries or self.num_queries <= most:
            return self
        stages.print_message(
            f"num_queries={most}, not the recommended {self.num_queries}: there are no more public points."
        )
        return dataclasses.replace(self, num_queries=most)

    def calibrated(self) -> RunConfig:
        """This configuration with noise that costs ``privacy.target_epsilon`` where one is given."""
        target, knobs = self.privacy.target_epsilon, cast(Any, self.mechanism)
        if target is None:
            return self
        delta, names = self.privacy.delta, {f.name for f in dataclasses.fields(knobs)}
        if not names & {"sigma", "epsilon"}:
            what = f"mechanism={knobs.name} has neither sigma nor epsilon to calibrate"
            raise checks.error("privacy.target_epsilon", target, what)

        def with_noise(scale: float) -> Mechanism:
            knob = {"sigma": scale} if "sigma" in names else {"epsilon": 1 / scale}
            return cast(Mechanism, dataclasses.replace(knobs, **knob))

        def events(scale: float) -> tuple[PrivacyEvent, ...]:
            return with_noise(scale).privacy_events(self.num_queries, self.num_rounds)

        # Where a mechanism's epsilon is that of the whole release, as the sparse vector's, there is nothing to search.
        whole = (
            "sigma" not in names and 1 - 1e-6 <= calibration.compute_epsilon(events(1 / target), delta) / target <= 1
        )
        scale = 1 / target if whole else calibration.calibrate_sigma(events, epsilon=target, delta=delta)
        return dataclasses.replace(self, mechanism=with_noise(scale))

    def worst_case_events(self, num_classes: int) -> tuple[PrivacyEvent, ...]:
        """Everything that this run may charge: the labels, the choice of a student, the publication of their price."""
        labels = () if self.labels is not None else self.mechanism.privacy_events(self.num_queries, self.num_rounds)
        return labels + self.events_beside_labels(num_classes)

    def events_beside_labels(self, num_classes: int) -> tuple[PrivacyEvent, ...]:
        """What this run may charge for the choice of a student and the publication of the labels' price."""
        choice = () if self.selection is None else self.selection.privacy_events()
        if self.sanitiser is None or self.labels is not None:
            return choice
        return choice + self.sanitiser.privacy_events(self.publication(num_classes))

    def publication(self, num_classes: int) -> private_price.PublicationPlan:
        """How the data-dependent price is published.

        Raises:
            ValueError: It cannot be.
        """
        assert self.sanitiser is not None
        return self.sanitiser.make_plan(
            self.mechanism,
            num_queries=self.num_queries,
            num_teachers=self.num_teachers,
            num_classes=num_classes,
            rounds=self.num_rounds,
            delta=self.privacy.delta,
        )

    def validate_for(self, data: Dataset) -> None:
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
            refuse_adjacency(data, self.partition.adjacency)
            fix = f"There are {len(data.pool)} public points to ask about."
            checks.integer("num_queries", self.num_queries, low=1, high=len(data.pool), fix=fix)
            self.mechanism.check(
                num_queries=self.num_queries,
                num_teachers=self.num_teachers,
                num_classes=data.spec.num_classes,
                rounds=self.num_rounds,
            )
            votes, classes = self.voters.estimate_votes_per_query(data, self), data.spec.num_classes
            if votes is not None:
                forced = self.privacy.allow_chance
                feasibility.refuse(self.mechanism, num_teachers=votes, num_classes=classes, forced=forced)
            self.voters.check_data(data, self)
            self.voters.describe(data.private.unit, self)  # a wrong one is found out now
            if self.baseline:  # a model of the teachers' recipe, on all records
                refuse_component("teacher", self.teacher, data)
            if self.is_guided:
                if self.guide is None:
                    what = "must be a student: the later rounds look at one"
                    raise checks.error("guide_student", None, what, "Use student@guide_student=supervised.")
                refuse_component("guide_student", self.guide, data)
        elif self.selection is not None:
            refuse_adjacency(data, self.partition.adjacency)
        self.validate_students(data)

    def validate_students(self, data: Dataset) -> None:
        """Raise ValueError for a student that cannot learn from these data."""
        if self.selection is None:
            refuse_component("student", self.student, data)
            return
        for name, algorithm in self.selection.candidates.items():
            refuse_component(f"selection.candidates.{name}", algorithm, data)


@runtime_checkable
class Study(Protocol):
    """What takes the place of ``pipeline.run`` where an experiment names a ``study``."""

    def run(self, plan: RunConfig) -> object:
        """Run what the plan describes; raises ValueError for a choice that cannot work, before anything is charged."""
        ...


def refuse_adjacency(data: Dataset, adjacency: str) -> None:
    """Raise ValueError where one unit's change could move other records of these data."""
    if adjacency not in data.adjacencies:
        what = f"cannot be promised for {data.spec.name}: one unit's change could move other records"
        raise checks.error("partition", adjacency, what, data.advice)


def refuse_component(key: str, component: object, data: Dataset) -> None:
    """Raise ValueError for a component that cannot take these data."""
    if not isinstance(component, Checkable):
        return
    try:
        component.check(data.spec)
    except ValueError as error:
        raise ValueError(checks.prefix_error_key(key, error)) from error
