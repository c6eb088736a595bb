"""LZCW21 Table 4 again: passive against active student queries, linear models, thirty random splits a data set.

Every split is a private data set of its own, kept under a throw-away root with its own ledger: charged to one account,
the noise of all splits would compose, which is not what the table is about. Within a split the teachers are trained
once, and every cell of the table is one release through the mechanism, the ledger and the labeling of a real run.

Source: LZCW21 (Liu, Zhu, Chaudhuri and Wang 2021), section 5, Algorithms 1, 3 and 5.
"""

from __future__ import annotations

import dataclasses
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from threadpoolctl import threadpool_limits
from torch import Tensor

from pate_torch import aggregation
from pate_torch.accounting import calibration
from pate_torch.accounting import epsilon as accounting
from pate_torch.budget import Budget
from pate_torch.config import RunConfig
from pate_torch.core import checks
from pate_torch.core.progress import Stages
from pate_torch.data.partition import deal
from pate_torch.experiments import liu2021_tables as tables
from pate_torch.experiments.liu2021_tables import Cell, Facts
from pate_torch.ledger import Ledger
from pate_torch.mechanisms.gaussian import Gaussian
from pate_torch.protocols import DatasetSource, QueryStrategy, StudentTask
from pate_torch.sensitive import Votes
from pate_torch.teachers.training import train
from pate_torch.types import Dataset, Release

WITHOUT_PRIVACY = 0.1
"""Votes of noise in the columns without privacy: the plurality, ties broken at random (a gap of 1 is lost at 1e-12)."""

_NO_CAP = 1e9  # of a throw-away ledger: it counts, and refuses nothing


@dataclass(frozen=True, kw_only=True)
class Ask:
    """One release of a split.

    Attributes:
        method: Its name in the table.
        rule: How its noise was calibrated.
        epsilon: Which the noise was calibrated to.
        sigma: GNMax noise, in votes.
    """

    method: str
    rule: str
    strategy: QueryStrategy
    queries: int
    epsilon: float
    sigma: float


@dataclass(frozen=True, kw_only=True)
class Liu2021Table4:
    """The table, by the plan's recipe, partition, student and device.

    delta is 1/n, so that n must be public: the plan's partition is replace_one.

    Attributes:
        tables: Name -> {"dataset": a source whose ``seed`` draws the split}.
        passive: Asks every public point.
        active: Asks at most ``active_share`` of them.
        shard: Private records per teacher, about.
        repeats: Splits.
        printed: Whether to measure at the noise that Algorithm 1 prints too (``calibration.liu2021_sigma``).
    """

    tables: Mapping[str, Mapping[str, Any]]
    passive: QueryStrategy
    active: QueryStrategy
    epsilons: Sequence[float] = (0.5, 1.0, 2.0)
    active_share: float = 0.3
    shard: int = 100
    repeats: int = 30
    printed: bool = True

    def __post_init__(self) -> None:
        checks.integer("study.repeats", self.repeats, low=2, fix="An interval takes two.")
        checks.integer("study.shard", self.shard, low=1)
        checks.between("study.active_share", self.active_share, 0, 1)
        checks.boolean("study.printed", self.printed)
        for value in self.epsilons:
            checks.positive("study.epsilons", value)
        for name, table in self.tables.items():
            source = table.get("dataset")
            if not isinstance(source, DatasetSource) or not hasattr(source, "seed"):
                raise checks.fail(f"study.tables.{name}.dataset", source, "must be a source with a seed for its split")

    def run(self, plan: RunConfig) -> None:
        """Measure every split of every table; print and write the tables into the run's folder."""
        if plan.partition.adjacency != "replace_one":
            raise checks.fail("partition", plan.partition.adjacency, "delta is 1/n here", "Use partition=replace_one.")
        facts: list[Facts] = []
        cells: list[Cell] = []
        # Thousands of tiny problems: threads would only wait for each other.
        with Stages(quiet=plan.quiet) as stages, threadpool_limits(1):
            stages.say(
                f"Every one of the {self.repeats} splits of a data set is a private data set of its own, with a"
                " throw-away ledger: their privacy costs are not composed, and nothing of them is kept but this table."
            )
            for name in self.tables:
                progress = stages(f"{name}: {self.repeats} splits")
                for split in range(self.repeats):
                    fact, measured = self.measure(plan, name, split)
                    facts.append(fact)
                    cells += measured
                    progress(split + 1, self.repeats)
        tables.write(plan.folder, facts, cells)
        print(tables.text(facts, cells))

    def measure(self, plan: RunConfig, name: str, split: int) -> tuple[Facts, list[Cell]]:
        """One split: its teachers, and every cell of the table."""
        seed = plan.seed + split
        source: Any = self.tables[name]["dataset"]
        data: Dataset = dataclasses.replace(source, seed=seed).load()
        if not data.spec.benchmark:
            raise checks.fail(
                f"study.tables.{name}",
                data.spec.name,
                "is not a public benchmark, and the table shows private figures",
            )
        teachers = round(len(data.private) / self.shard)
        shards = deal(plan.partition, data.private, teachers, seed)
        ensemble = train(data.private, data.spec, shards, plan.teacher, seed=seed, device=plan.device)
        votes = ensemble.votes(data.pool.x)
        right_KQ = ensemble.predictions(data.evaluation.x) == data.evaluation.y
        plurality = ensemble.votes(data.evaluation.x).plurality()
        counts = torch.bincount(data.evaluation.y, minlength=data.spec.num_classes)
        fact = Facts(
            dataset=name,
            private=len(data.private),
            public=len(data.pool),
            test=len(data.evaluation.y),
            teachers=teachers,
            majority=float(counts.max() / counts.sum()),
            teacher=float(right_KQ.double().mean()),
            plurality=float((plurality == data.evaluation.y).double().mean()),
            gap=float(votes.gap().double().median()),
        )
        with (
            tempfile.TemporaryDirectory(prefix="pate-liu2021-") as home,
            Ledger(Path(home) / "ledger.sqlite") as ledger,
        ):
            ledger.open_account(
                data.spec.name,
                budget_epsilon=_NO_CAP,
                delta=1 / len(data.private),
                adjacency=plan.partition.adjacency,
                unit=data.private.unit,
                planned_events=Gaussian(sigma=1.0).worst_case(1),
            )
            return fact, [
                self.cell(plan, name, split, data, votes, ledger, ask) for ask in self.asks(data, len(data.private))
            ]

    def asks(self, data: Dataset, n: int) -> Iterator[Ask]:
        """Both methods: without privacy, at each epsilon by exact calibration, and by the printed formula."""
        everything = len(data.pool)
        for method, strategy, queries in (
            ("PSQ", self.passive, everything),
            ("ASQ", self.active, math.ceil(self.active_share * everything)),
        ):
            yield Ask(
                method=method,
                rule="none",
                strategy=strategy,
                queries=queries,
                epsilon=math.inf,
                sigma=WITHOUT_PRIVACY,
            )
            for value in self.epsilons:
                for rule in ("exact", "printed") if self.printed else ("exact",):
                    sigma = calibrated_sigma(rule, queries, float(value), 1 / n)
                    yield Ask(
                        method=method, rule=rule, strategy=strategy, queries=queries, epsilon=float(value), sigma=sigma
                    )

    def cell(
        self, plan: RunConfig, name: str, split: int, data: Dataset, votes: Votes, ledger: Ledger, ask: Ask
    ) -> Cell:
        """One release and the student that learns from it."""
        seed = plan.seed + split
        mechanism: Any = Gaussian(sigma=ask.sigma)
        release = aggregation.label(
            sensitive=votes,
            pool=data.pool,
            spec=data.spec,
            mechanism=mechanism,
            strategy=ask.strategy,
            budget=Budget.of(
                ledger, data.spec.name, run=f"{name}-{split}", insecure_seed=plan.privacy.insecure_noise_seed
            ),
            num_queries=ask.queries,
            seed=seed,
        )
        task = StudentTask(data.spec, data.pool.x, release.query_Q, release.label_Q)
        assert plan.student is not None
        student = plan.student.fit(task, seed=seed, device=plan.device)
        predicted = student.probabilities(data.evaluation.x).argmax(1)
        accuracy, balanced = accuracies(data.evaluation.y, predicted, data.spec.num_classes)
        spent = accounting.epsilon(release.events, 1 / len(data.private)).epsilon
        return Cell(
            dataset=name,
            split=split,
            method=ask.method,
            rule=ask.rule,
            epsilon=ask.epsilon,
            sigma=ask.sigma,
            queries=len(release.query_Q),
            epsilon_ex_post=spent if math.isfinite(ask.epsilon) else math.inf,
            label_accuracy=label_accuracy(data, release),
            accuracy=accuracy,
            balanced=balanced,
        )


@cache
def calibrated_sigma(rule: str, queries: int, epsilon: float, delta: float) -> float:
    """Votes of GNMax noise at which so many answers cost epsilon: exactly, or by the formula Algorithm 1 prints.

    The printed sigma is on the count of ones, which moves by 1 where GNMax's counts move by sqrt 2.
    """
    if rule == "printed":
        return math.sqrt(2) * calibration.liu2021_sigma(queries=queries, epsilon=epsilon, delta=delta)
    return calibration.smallest_sigma(
        lambda sigma: Gaussian(sigma=sigma).worst_case(queries), epsilon=epsilon, delta=delta
    )


def accuracies(truth: Tensor, predicted: Tensor, num_classes: int) -> tuple[float, float]:
    """Plain and balanced accuracy: the share of points, and the mean over the classes present of each class's share."""
    hits = (predicted == truth).double()
    size = torch.bincount(truth, minlength=num_classes).double()
    right = torch.bincount(truth, weights=hits, minlength=num_classes)
    present = size > 0
    return float(hits.mean()), float((right[present] / size[present]).mean())


def label_accuracy(data: Dataset, release: Release) -> float:
    """Share of released labels that are right."""
    assert data.evaluation.pool_y is not None
    return float((data.evaluation.pool_y[release.query_Q] == release.label_Q).double().mean())
