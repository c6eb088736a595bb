"""What the replications share: random splits of public data sets, releases from one split, and means over splits.

Every split is a private data set of its own, and every release has a throw-away ledger: charged to one account, the
noise of all splits would compose, which is not what the papers' tables are about.
"""

from __future__ import annotations

import dataclasses
import math
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pate_torch.accounting import calibration
from pate_torch.accounting.events import PrivacyEvent
from pate_torch.config import RunConfig, Study
from pate_torch.core import checks
from pate_torch.data.base import DatasetSource
from pate_torch.mechanisms.base import VoteMechanism
from pate_torch.mechanisms.gaussian import GNMax
from pate_torch.methods.labeling import PreparedLabeling
from pate_torch.methods.teacher_votes import TeacherVotes
from pate_torch.privacy.budget import Budget
from pate_torch.privacy.ledger import Ledger
from pate_torch.privacy.partition import assign_shards
from pate_torch.privacy.records import Dataset, Release
from pate_torch.privacy.sensitive import SoftVotes, Votes
from pate_torch.queries.base import QueryStrategy
from pate_torch.students.base import Student, StudentTask
from pate_torch.teachers.training import train

SIGMA_WITHOUT_PRIVACY = 0.1
"""Votes of noise in the columns without privacy: the plurality, ties broken at random (a gap of 1 is lost at 1e-12)."""

MAX_EPSILON = 1e9
"""Cap of a throw-away ledger, which counts and refuses nothing."""


@dataclass(frozen=True, kw_only=True)
class SplitStudy(Study):
    """A table over random splits, by the plan's teachers, partition, student and device; delta is 1/n.

    Attributes:
        tables: Name -> {"dataset": a source whose ``seed`` draws the split, "command": what writes its file, where no
            package brings the file}.
        passive: Asks every public point.
        active: Asks at most ``active_share`` of them.
        epsilons: Of the columns.
        shard: Private records per teacher, about.
        repeats: Splits.
    """

    tables: Mapping[str, Mapping[str, Any]]
    passive: QueryStrategy
    active: QueryStrategy
    epsilons: Sequence[float] = (0.5, 1.0, 2.0)
    active_share: float = 0.3
    shard: int = 100
    repeats: int = 30

    def __post_init__(self) -> None:
        checks.integer("study.repeats", self.repeats, low=1)
        checks.integer("study.shard", self.shard, low=1)
        checks.between("study.active_share", self.active_share, 0, 1)
        for value in self.epsilons:
            checks.positive("study.epsilons", value)
        for name, table in self.tables.items():
            source = table.get("dataset")
            if not isinstance(source, DatasetSource) or not hasattr(source, "seed"):
                raise checks.error(f"study.tables.{name}.dataset", source, "must be a source with a seed for its split")

    def check_plan(self, plan: RunConfig) -> None:
        """Raise ValueError unless teachers vote, the number of records, which delta tells, is public and files load."""
        if plan.partition.adjacency != "replace_one":
            raise checks.error("partition", plan.partition.adjacency, "delta is 1/n here", "Use partition=replace_one.")
        if not isinstance(plan.method, TeacherVotes):
            raise checks.error("method", plan.method.name, "trains no teachers", "Use method=teachers.")
        self.check_files(plan)

    def check_files(self, plan: RunConfig) -> None:
        """Load every table once, so that hours of measurements do not end at a missing file.

        Raises:
            ValueError: Names every table that cannot be loaded, and the command that writes its file.
        """
        problems = []
        for name, table in self.tables.items():
            try:
                _ = Split(self, plan, name, 0).data
            except ValueError as problem:
                command = f" To write the file: {table['command']}." if "command" in table else ""
                problems.append(f"study.tables.{name}: {problem}{command}")
        if problems:
            raise ValueError("\n".join(problems))


@dataclass
class Split:
    """PRIVATE. One split of a data set, its teachers trained when they are first asked for."""

    study: SplitStudy
    plan: RunConfig
    name: str
    number: int

    @property
    def seed(self) -> int:
        return self.plan.seed + self.number

    @cached_property
    def data(self) -> Dataset:
        source: Any = self.study.tables[self.name]["dataset"]
        data: Dataset = dataclasses.replace(source, seed=self.seed).load()
        if not data.spec.benchmark:
            what = "is not a public benchmark, and the table shows private figures"
            raise checks.error(f"study.tables.{self.name}", data.spec.name, what)
        return data

    @property
    def delta(self) -> float:
        return 1 / len(self.data.private)

    @cached_property
    def ensemble(self) -> Any:
        private, plan, recipe = self.data.private, self.plan, self.plan.method.teacher
        assert recipe is not None  # ``SplitStudy.check_plan``
        shards = assign_shards(plan.partition, private, round(len(private) / self.study.shard), self.seed)
        return train(private, self.data.spec, shards, recipe, seed=self.seed, device=plan.device)

    @cached_property
    def votes(self) -> Votes:
        return self.ensemble.count_votes(self.data.pool.x)

    @contextmanager
    def open_budget(self, events: Iterable[PrivacyEvent]) -> Iterator[Budget]:
        """Open an account for one release of these events, in a ledger that is thrown away."""
        with tempfile.TemporaryDirectory(prefix="pate-split-") as home, Ledger(Path(home) / "ledger.sqlite") as ledger:
            ledger.open_account(
                "split",
                budget_epsilon=MAX_EPSILON,
                delta=self.delta,
                adjacency=self.plan.partition.adjacency,
                unit=self.data.private.unit,
                planned_events=tuple(events),
                noise="torch",
            )
            seed = self.plan.privacy.insecure_noise_seed
            yield Budget.from_account(ledger, "split", run=f"{self.name}-{self.number}", insecure_seed=seed)

    def release_labels(
        self, sensitive: Votes | SoftVotes, mechanism: VoteMechanism, strategy: QueryStrategy, num_queries: int
    ) -> Release:
        """Release labels of public points by a mechanism.

        Raises:
            ValueError: The mechanism refuses the plan.
        """
        data, rounds = self.data, min(strategy.rounds, num_queries)
        mechanism.check(
            num_queries=num_queries,
            num_teachers=sensitive.num_teachers,
            num_classes=data.spec.num_classes,
            rounds=rounds,
        )
        events = mechanism.privacy_events(num_queries, rounds)
        prepared = PreparedLabeling(
            sensitive=sensitive,
            spec=data.spec,
            mechanism=mechanism,
            query=strategy,
            num_queries=num_queries,
            seed=self.seed,
        )
        with self.open_budget(events) as budget:
            prepared.check(budget, data.pool)
            with budget.spend(events, mechanism=mechanism.name) as spending:
                return prepared.release(data.pool, spending)

    def release_gaussian_labels(self, *, active: bool, epsilon: float) -> tuple[Release, float]:
        """Release labels by GNMax, LZCW21's PSQ or (``active``) ASQ; also its sigma, in votes."""
        study, num_queries = self.study, len(self.data.pool)
        if active:
            num_queries = math.ceil(study.active_share * num_queries)
        sigma = compute_sigma(num_queries, epsilon, self.delta)
        strategy = study.active if active else study.passive
        return self.release_labels(self.votes, GNMax(sigma=sigma), strategy, num_queries), sigma

    def fit_student(self, release: Release) -> Student:
        """Train the plan's student on what was answered."""
        answered = release.answered_Q
        task = StudentTask(self.data.spec, self.data.pool.x, release.query_Q[answered], release.label_Q[answered])
        return self.plan.student.fit(task, seed=self.seed, device=self.plan.device)

    def compute_accuracies(self, predicted: Tensor) -> tuple[float, float]:
        """Compute the plain and the balanced accuracy of predictions on the test records."""
        return compute_accuracies(self.data.evaluation.y, predicted, self.data.spec.num_classes)


@cache
def compute_sigma(num_queries: int, epsilon: float, delta: float) -> float:
    """Compute the GNMax noise, in votes, at which so many answers cost epsilon by the exact cost of Gaussian noise.

    LZCW21 section 5.1 calibrates its experiments exactly, too.

    Args:
        num_queries: Number of answers.
        epsilon: Of all answers; infinite: without privacy.
        delta: Of all answers.
    """
    if math.isinf(epsilon):
        return SIGMA_WITHOUT_PRIVACY
    return calibration.calibrate_sigma(
        lambda sigma: GNMax(sigma=sigma).privacy_events(num_queries), epsilon=epsilon, delta=delta
    )


def compute_accuracies(truth: Tensor, predicted: Tensor, num_classes: int) -> tuple[float, float]:
    """Compute the share of points that are right, and the mean over the classes present of each class's share."""
    hits = (predicted == truth).double()
    size = torch.bincount(truth, minlength=num_classes).double()
    right = torch.bincount(truth, weights=hits, minlength=num_classes)
    present = size > 0
    return float(hits.mean()), float((right[present] / size[present]).mean())


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One method at one epsilon on one split.

    Attributes:
        accuracy: Of the released model on the test records; None if nothing was released.
        balanced: Its balanced accuracy, or None.
    """

    dataset: str
    split: int
    method: str
    epsilon: float
    accuracy: float | None = None
    balanced: float | None = None


@dataclass(frozen=True, kw_only=True)
class Mean:
    """A mean over splits and 1.96 standard errors of it."""

    mean: float
    half: float

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Mean:
        """The mean of values, one a split."""
        array = np.array(list(values), dtype=np.float64)
        if np.isinf(array).all():
            return cls(mean=math.inf, half=0.0)
        return cls(mean=float(array.mean()), half=float(1.96 * array.std(ddof=1) / math.sqrt(len(array))))

    def show(self, signed: bool = False) -> str:
        """The mean with its interval, .9773 ±.0006; ``signed``: with its sign."""
        sign = "+" if signed and self.mean >= 0 else ""
        return f"{sign}{format_share(self.mean)} ±{format_share(self.half)}"


def format_share(value: float, digits: int = 4) -> str:
    """Format a share without its zero, as in .9773."""
    return f"{value:.{digits}f}".replace("0.", ".", 1)


def replace_infinities(value: Any) -> Any:
    """Replace infinity, which JSON lacks, by the string "inf"."""
    if isinstance(value, dict):
        return {key: replace_infinities(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [replace_infinities(item) for item in value]
    return "inf" if isinstance(value, float) and math.isinf(value) else value
