"""The plan of a run: its components and the choices of the top level, checked before anything is read or charged."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch

from pate_torch import run_folders
from pate_torch.accounting import calibration
from pate_torch.audit.membership import MembershipTest
from pate_torch.core import checks
from pate_torch.core.progress import Stages
from pate_torch.features.contrastive import Representation
from pate_torch.noise.source import check_delta, check_noise
from pate_torch.protocols import DatasetSource, Mechanism, QueryStrategy, StudentAlgorithm
from pate_torch.sanitising import Sanitiser
from pate_torch.students.carried import Carried
from pate_torch.students.selection import Selection
from pate_torch.teachers.training import TeacherRecipe
from pate_torch.types import Dataset, PrivateData, Shards
from pate_torch.voters.gradients import Slopes
from pate_torch.voters.reverse_knn import Census
from pate_torch.voters.transductive import Transduction


@runtime_checkable
class Partition(Protocol):
    """Units to shards; see data/partition.py."""

    @property
    def adjacency(self) -> str: ...

    def shards(self, private: PrivateData, num_teachers: int, seed: int) -> Shards: ...


RecordVoting = Census | Slopes
"""Records answer for themselves: there are no teachers."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """Everything a run is made of: the components, then the choices of the top level. Raises ValueError.

    fewer_queries: whether num_queries was recommended, not chosen, so that fewer public points lower it (``fitted``).
    """

    source: DatasetSource
    partition: Partition
    recipe: TeacherRecipe
    mechanism: Mechanism
    strategy: QueryStrategy
    student: StudentAlgorithm
    refit: StudentAlgorithm
    root: Path
    folder: Path
    seed: int
    num_teachers: int
    num_queries: int
    delta: float
    fewer_queries: bool = False
    teachers: str | None = None
    labels: str | None = None
    votes: Path | None = None
    noise: str = "torch"
    insecure_noise_seed: int | None = None
    budget_epsilon: float | None = None
    opening_budget: float = 10.0
    target_epsilon: float | None = None
    second_account: bool = False
    allow_chance: bool = False
    representation: Representation | None = None
    selection: Selection | None = None
    sanitiser: Sanitiser | None = None
    membership: MembershipTest | None = None
    transduction: Transduction | None = None
    census: RecordVoting | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    baseline: bool = True
    quiet: bool = False

    def __post_init__(self) -> None:
        checks.integer("seed", self.seed, low=0)
        checks.integer("num_teachers", self.num_teachers, low=1)
        checks.integer("num_queries", self.num_queries, low=1)
        for key in ("budget_epsilon", "target_epsilon"):
            if getattr(self, key) is not None:
                checks.positive(f"privacy.{key}", getattr(self, key))
        checks.positive("privacy.opening_budget", self.opening_budget)
        check_noise(self.noise, self.insecure_noise_seed)
        check_delta(self.noise, self.delta)
        checks.boolean("privacy.second_account", self.second_account)
        checks.boolean("privacy.allow_chance", self.allow_chance)
        if self.selection is not None and self.noise != "torch":
            fix = "Use noise=torch, or selection=none."
            raise checks.fail("selection", self.selection.name, "is drawn in floating point, not in whole numbers", fix)
        if self.teachers is not None:
            run_folders.checked_id("teachers", self.teachers)
        if self.labels is not None:
            run_folders.checked_id("labels", self.labels)
            if self.teachers is not None:
                raise checks.fail("labels", self.labels, "a release is reused without teachers", "Leave out teachers.")
        if self.votes is not None:
            for key in ("teachers", "labels", "selection"):
                if getattr(self, key) is not None:
                    fix = f"Leave out {key}: the teachers behind the votes are not here, nor what they learnt from."
                    raise checks.fail("votes", str(self.votes), f"cannot be combined with {key}", fix)
        given = getattr(self.mechanism, "noise", self.noise)
        if given != self.noise:
            raise checks.fail("mechanism.noise", given, f"must be the run's, {self.noise}", "Set noise alone.")
        if self.census is not None:
            self._check_census()
        if isinstance(self.student, Carried) and self.student.last == "model":
            self._check_model(self.student)

    def _check_census(self) -> None:
        assert self.census is not None
        for key in ("teachers", "votes", "sanitiser"):
            if getattr(self, key) is not None:
                fix = f"Leave out {key}: every record answers for itself."
                raise checks.fail("voting", self.census.name, f"cannot be combined with {key}", fix)
        if self.mechanism.name != self.census.mechanism:
            fix = f"Use mechanism={self.census.mechanism}."
            raise checks.fail(
                "voting", self.census.name, f"cannot be combined with mechanism={self.mechanism.name}", fix
            )
        capacity = getattr(self.partition, "capacity", None)
        if capacity is not None:
            fix = "Leave out partition.capacity."
            what = f"cannot be combined with voting={self.census.name}: a record more would displace another's answer"
            raise checks.fail("partition.capacity", capacity, what, fix)
        given = getattr(self.mechanism, "adjacency", self.partition.adjacency)
        if given != self.partition.adjacency:
            raise checks.fail("mechanism.adjacency", given, f"must be the partition's, {self.partition.adjacency}")

    def _check_model(self, student: Carried) -> None:
        """Raise ValueError where the student is to be a model that no record moves, or in features of others."""
        if not isinstance(self.census, Slopes):
            fix = "Use voting=slopes mechanism=descent, or student.last=student."
            raise checks.fail("student.last", "model", "is the model that records have moved, and here is none", fix)
        if student.neighbours != self.census.neighbours:
            fix = f"Use student.neighbours={self.census.neighbours}."
            raise checks.fail("student.neighbours", student.neighbours, "must be voting.neighbours", fix)
        if self.rounds > 1 and self.refit != student.before:
            fix = "Use student@refit=carried with the values of student."
            raise checks.fail("student.last", "model", "needs a refit that is the same student but for last", fix)

    @property
    def voters(self) -> int:
        """Teachers; 0 where records answer for themselves."""
        return 0 if self.census is not None else self.num_teachers

    @property
    def rounds(self) -> int:
        return min(self.strategy.rounds, self.num_queries)

    @property
    def guided(self) -> bool:
        """Whether a student is fitted between rounds: where somebody looks at it."""
        looked_at = getattr(self.strategy, "guided", True) or getattr(self.mechanism, "guided", False)
        return self.rounds > 1 and (looked_at or self.census is not None)


def fitted(plan: Plan, data: Dataset, stages: Stages) -> Plan:
    """The plan with no more questions than there are public points, where nobody has chosen their number."""
    most = len(data.pool)
    if not plan.fewer_queries or plan.num_queries <= most:
        return plan
    stages.say(f"num_queries={most}, not the recommended {plan.num_queries}: there are no more public points.")
    return dataclasses.replace(plan, num_queries=most)


def calibrated(plan: Plan) -> Mechanism:
    """The mechanism, its noise set to cost ``privacy.target_epsilon`` where one is given."""
    if plan.target_epsilon is None:
        return plan.mechanism
    mechanism: Any = plan.mechanism
    if "sigma" not in {f.name for f in dataclasses.fields(mechanism)}:
        raise checks.fail(
            "privacy.target_epsilon", plan.target_epsilon, f"mechanism={mechanism.name} has no sigma to calibrate"
        )
    sigma = calibration.smallest_sigma(
        lambda s: dataclasses.replace(mechanism, sigma=s).worst_case(plan.num_queries, plan.rounds),
        epsilon=plan.target_epsilon,
        delta=plan.delta,
    )
    return dataclasses.replace(mechanism, sigma=sigma)
