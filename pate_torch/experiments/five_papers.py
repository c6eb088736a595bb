"""One table over the five papers: every method on the same splits, at one delta, under one adjacency.

Cells are measured one by one and written down as they come: the same command goes on where it was stopped. Every cell
is a private data set of its own with a throw-away account, as in ``liu2021``; rows in brackets are add_remove.

Source: BTT18, NB20, DF20, WLF16 and LZCW21, whose Table 4 has the splits, the sizes and delta = 1/n.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from threadpoolctl import threadpool_limits
from torch import Tensor

from pate_torch import aggregation
from pate_torch.accounting import epsilon as accounting
from pate_torch.accounting.events import Event
from pate_torch.budget import Budget
from pate_torch.classifier import PATEClassifier
from pate_torch.config import RunConfig
from pate_torch.core import checks
from pate_torch.core.progress import Stages
from pate_torch.data.partition import deal
from pate_torch.experiments.liu2021 import WITHOUT_PRIVACY, accuracies, calibrated_sigma
from pate_torch.experiments.liu2021_tables import PAPER, Mean
from pate_torch.learn import student as students
from pate_torch.learn.algorithms import ALGORITHMS, quote
from pate_torch.learn.problem import Choices, problems
from pate_torch.ledger import Ledger
from pate_torch.mechanisms.gaussian import Gaussian
from pate_torch.mechanisms.soft_stability import SoftStability
from pate_torch.mechanisms.stability import Stability
from pate_torch.pac.sample import BelowGuarantee
from pate_torch.protocols import DatasetSource, Mechanism, QueryStrategy, Student, StudentTask
from pate_torch.sensitive import SoftVotes, Votes
from pate_torch.students.adaboost import AdaBoost
from pate_torch.teachers.training import train
from pate_torch.types import Dataset

_NO_CAP = 1e9  # of a throw-away ledger: it counts, and refuses nothing


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One method at one epsilon on one split.

    Attributes:
        spent: Epsilon of what was charged, at delta = 1/n.
        answered: Of the queries, where there were any; None: there were none.
        accuracy: Of the released model on the test records; None: nothing was released, for the reason in ``why``.
        why: Why nothing was.
    """

    dataset: str
    split: int
    row: str
    epsilon: float
    spent: float
    answered: int | None = None
    accuracy: float | None = None
    balanced: float | None = None
    why: str = ""


@dataclass
class _Split:
    """PRIVATE. One split of a data set, its teachers trained when they are first asked for."""

    study: FivePapers
    plan: RunConfig
    name: str
    number: int

    @property
    def seed(self) -> int:
        return self.plan.seed + self.number

    @functools.cached_property
    def data(self) -> Dataset:
        source: Any = self.study.tables[self.name]["dataset"]
        data: Dataset = dataclasses.replace(source, seed=self.seed).load()
        if not data.spec.benchmark:
            what = "is not a public benchmark, and the table shows private figures"
            raise checks.fail(f"study.tables.{self.name}", data.spec.name, what)
        return data

    @property
    def delta(self) -> float:
        return 1 / len(self.data.private)

    @functools.cached_property
    def ensemble(self) -> Any:
        teachers = round(len(self.data.private) / self.study.shard)
        shards = deal(self.plan.partition, self.data.private, teachers, self.seed)
        return train(
            self.data.private, self.data.spec, shards, self.plan.teacher, seed=self.seed, device=self.plan.device
        )

    @functools.cached_property
    def votes(self) -> Votes:
        votes: Votes = self.ensemble.votes(self.data.pool.x)
        return votes


@dataclass(frozen=True, kw_only=True)
class FivePapers:
    """The table, by the plan's recipe, partition, student and device.

    Attributes:
        tables: Name -> {"dataset": a source whose ``seed`` draws the split}, the small ones first.
        passive: Asks every public point.
        active: Asks at most ``active_share`` of them.
        epsilons: Of the columns.
        shard: Private records per teacher, about.
        repeats: Splits.
        rows: Those to measure, of ``ROWS``; None: all.
    """

    tables: Mapping[str, Mapping[str, Any]]
    passive: QueryStrategy
    active: QueryStrategy
    epsilons: Sequence[float] = (0.1, 0.5, 1.0, 2.0)
    active_share: float = 0.3
    shard: int = 100
    repeats: int = 30
    rows: Sequence[str] | None = None

    def __post_init__(self) -> None:
        checks.integer("study.repeats", self.repeats, low=1)
        checks.integer("study.shard", self.shard, low=1)
        checks.between("study.active_share", self.active_share, 0, 1)
        for value in self.epsilons:
            checks.positive("study.epsilons", value)
        for row in self.rows or ():
            checks.one_of("study.rows", row, ROWS)
        for name, table in self.tables.items():
            source = table.get("dataset")
            if not isinstance(source, DatasetSource) or not hasattr(source, "seed"):
                raise checks.fail(f"study.tables.{name}.dataset", source, "must be a source with a seed for its split")

    def run(self, plan: RunConfig) -> None:
        """Measure what is not written down yet; print the table and write it into the run's folder."""
        if plan.partition.adjacency != "replace_one":
            raise checks.fail("partition", plan.partition.adjacency, "delta is 1/n here", "Use partition=replace_one.")
        file = plan.root / "studies" / "five_papers.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        known = read(file)
        done = {(c.dataset, c.split, c.row, c.epsilon) for c in known}
        with Stages(quiet=plan.quiet) as stages, threadpool_limits(1):
            stages.say(f"{len(known)} cells are written down already in {file}; the same command goes on from there.")
            for number in range(self.repeats):
                for name in self.tables:
                    todo = [(r, e) for r, e in self.cells() if (name, number, r, e) not in done]
                    if not todo:
                        continue
                    split, progress = _Split(self, plan, name, number), stages(f"{name}, split {number}")
                    _ = split.data  # what cannot be loaded is no cell's fault
                    for place, (row, epsilon) in enumerate(todo, start=1):
                        cell = self.measure(split, row, epsilon)
                        with file.open("a", encoding="utf-8") as out:
                            out.write(json.dumps(_plain(dataclasses.asdict(cell))) + "\n")
                        progress(place, len(todo))
        shown = text(read(file), list(self.tables))
        plan.folder.mkdir(parents=True, exist_ok=True)
        (plan.folder / "five_papers.txt").write_text(shown + "\n", encoding="utf-8")
        print(shown)

    def cells(self) -> Iterator[tuple[str, float]]:
        """(Row, epsilon) of a split; rows without privacy have one."""
        for name in self.rows or ROWS:
            for epsilon in (math.inf,) if ROWS[name].free else self.epsilons:
                yield name, float(epsilon)

    def measure(self, split: _Split, row: str, epsilon: float) -> Cell:
        """One cell; nothing is released where the method refuses, or answers nothing."""
        place: dict[str, Any] = {"dataset": split.name, "split": split.number, "row": row, "epsilon": epsilon}
        try:
            predicted, spent, answered = ROWS[row].measure(split, epsilon)
        except ValueError as refused:
            return Cell(**place, spent=0.0, why=str(refused).split(". ")[0])
        plain, balanced = accuracies(split.data.evaluation.y, predicted, split.data.spec.num_classes)
        return Cell(**place, spent=spent, answered=answered, accuracy=plain, balanced=balanced)


Found = tuple[Tensor, float, int | None]


@dataclass(frozen=True)
class Row:
    """A method.

    Attributes:
        measure: (Predictions on the test records, epsilon that was charged, answers) at an epsilon.
        paper: Whose it is.
        free: Whether it has no privacy.
        printed: LZCW21's name for it, where its Table 4 has figures.
        adjacency: Of its epsilon.
    """

    measure: Callable[[_Split, float], Found]
    paper: str
    free: bool = False
    printed: str | None = None
    adjacency: str = "replace_one"


def _budget(ledger: Ledger, split: _Split, events: Sequence[Event], *, account: str = "cell") -> Budget:
    ledger.open_account(
        account,
        budget_epsilon=_NO_CAP,
        delta=split.delta,
        adjacency="replace_one",
        unit=split.data.private.unit,
        planned_events=tuple(events),
        noise="torch",
    )
    seed = split.plan.privacy.insecure_noise_seed
    return Budget.of(ledger, account, run=f"{split.name}-{split.number}", insecure_seed=seed)


def _labeled(
    split: _Split, sensitive: Votes | SoftVotes, mechanism: Any, strategy: QueryStrategy, queries: int, learner: Any
) -> Found:
    """Labels of public points by a mechanism, and a student of them."""
    data = split.data
    with tempfile.TemporaryDirectory(prefix="pate-five-") as home, Ledger(Path(home) / "ledger.sqlite") as ledger:
        checked: Mechanism = mechanism
        checked.check(
            num_queries=queries,
            num_teachers=sensitive.num_teachers,
            num_classes=data.spec.num_classes,
            rounds=strategy.rounds,
        )
        budget = _budget(ledger, split, checked.worst_case(queries, strategy.rounds))
        release = aggregation.label(
            sensitive=sensitive,
            pool=data.pool,
            spec=data.spec,
            mechanism=mechanism,
            strategy=strategy,
            budget=budget,
            num_queries=queries,
            seed=split.seed,
        )
    answered = release.answered_Q
    if not bool(answered.any()):
        raise ValueError("mechanism: none of the questions was answered")
    task = StudentTask(data.spec, data.pool.x, release.query_Q[answered], release.label_Q[answered])
    student: Student = learner.fit(task, seed=split.seed, device=split.plan.device)
    spent = accounting.epsilon(release.planned, split.delta).epsilon
    return student.predict(data.evaluation.x), spent, int(answered.sum())


def _gnmax(split: _Split, epsilon: float, *, active: bool, rule: str = "exact", learner: Any = None) -> Found:
    study, everything = split.study, len(split.data.pool)
    queries = math.ceil(study.active_share * everything) if active else everything
    free = math.isinf(epsilon)
    sigma = WITHOUT_PRIVACY if free else calibrated_sigma(rule, queries, epsilon, split.delta)
    strategy = study.active if active else study.passive
    learner = split.plan.student if learner is None else learner
    predicted, spent, answered = _labeled(split, split.votes, Gaussian(sigma=sigma), strategy, queries, learner)
    return predicted, math.inf if free else spent, answered


def _sparse(split: _Split, epsilon: float, *, soft: bool, failures: int = 1) -> Found:
    given: dict[str, Any] = {"epsilon": epsilon, "delta": split.delta, "max_failures": failures}
    if not soft:
        votes: Votes | SoftVotes = split.votes
        mechanism: Any = Stability(**given)
    else:
        chance = split.ensemble.probabilities(split.data.pool.x)
        votes, mechanism = SoftVotes.of(chance), SoftStability(**given, bins=10)
    return _labeled(split, votes, mechanism, split.study.passive, len(split.data.pool), split.plan.student)


def _learnt(split: _Split, epsilon: float, *, name: str, **asked: Any) -> Found:
    """One of ``pate learn``, below its guarantee."""
    algorithm = ALGORITHMS[name]
    choices = Choices(epsilon=epsilon, constants="sharp", **asked)
    parts = problems(split.data, choices, split.delta / 2, split.seed)  # the other half composes
    with warnings.catch_warnings(), tempfile.TemporaryDirectory(prefix="pate-five-") as home:
        warnings.simplefilter("ignore", BelowGuarantee)
        events = [event for part in parts for event in quote(algorithm, part, "torch")]
        with Ledger(Path(home) / "ledger.sqlite") as ledger:
            budget = _budget(ledger, split, events)
            found = [algorithm.learn(part, budget) for part in parts]
    make = students.of_parameters if algorithm.linear else students.of_hypotheses
    predicted = make(split.data, found).predict(split.data.evaluation.x)
    return predicted, accounting.epsilon(events, split.delta).epsilon, None


def _classifier(split: _Split, epsilon: float, *, method: str, adjacency: str) -> Found:
    """The front door's own choices, at this epsilon."""
    data = split.data
    with tempfile.TemporaryDirectory(prefix="pate-five-") as home:
        model = PATEClassifier(
            epsilon,
            account="cell",
            num_records_about=len(data.private),
            delta=split.delta,
            classes=list(range(data.spec.num_classes)),
            method=method,
            adjacency=adjacency,
            home=home,
            random_state=split.seed,
            verbose=False,
        )
        normal = [data.spec.normalize(part).numpy() for part in (data.private.x, data.pool.x, data.evaluation.x)]
        model.fit(normal[0], data.private.y.numpy(), public=normal[1])
        predicted = torch.as_tensor(np.asarray(model.predict(normal[2])).astype(np.int64))
    return predicted, float(model.privacy_["guarantee"]["epsilon"]), None


def _majority(split: _Split, epsilon: float) -> Found:
    counts = torch.bincount(split.data.evaluation.y)
    return counts.argmax().expand(len(split.data.evaluation.y)), math.inf, None


def _everything(split: _Split, epsilon: float) -> Found:
    """The student on all private records, without privacy."""
    data = split.data
    task = StudentTask(data.spec, data.private.x, torch.arange(len(data.private)), data.private.y)
    assert split.plan.student is not None
    student = split.plan.student.fit(task, seed=split.seed, device=split.plan.device)
    return student.predict(data.evaluation.x), math.inf, None


ROWS: dict[str, Row] = {
    "majority class": Row(_majority, "", free=True),
    "no privacy: all records": Row(_everything, "", free=True),
    "no privacy: PSQ": Row(functools.partial(_gnmax, active=False), "LZCW21", free=True, printed="PSQ"),
    "no privacy: ASQ": Row(functools.partial(_gnmax, active=True), "LZCW21", free=True, printed="ASQ"),
    "PSQ": Row(functools.partial(_gnmax, active=False), "LZCW21", printed="PSQ"),
    "ASQ": Row(functools.partial(_gnmax, active=True), "LZCW21", printed="ASQ"),
    "PSQ, printed noise": Row(functools.partial(_gnmax, active=False, rule="printed"), "LZCW21"),
    "ASQ, printed noise": Row(functools.partial(_gnmax, active=True, rule="printed"), "LZCW21"),
    "ASQ, boosted student": Row(functools.partial(_gnmax, active=True, learner=AdaBoost()), "LZCW21"),
    "sparse vector, T = 1": Row(functools.partial(_sparse, soft=False), "BTT18"),
    "soft labels, T = 1": Row(functools.partial(_sparse, soft=True), "BTT18"),
    "SSPP": Row(functools.partial(_learnt, name="sspp"), "NB20"),
    "AgPrivCl": Row(functools.partial(_learnt, name="ag-priv-cl"), "NB20"),
    "AgPrivCl by GNMax": Row(functools.partial(_learnt, name="relabeled"), "NB20"),
    "UnvPrivCl": Row(functools.partial(_learnt, name="unv-priv-cl", first=20), "NB20"),
    "private prediction": Row(functools.partial(_learnt, name="private-prediction"), "DF20"),
    "vote of ERMs": Row(functools.partial(_learnt, name="df18"), "DF18"),
    "exponential mechanism": Row(functools.partial(_learnt, name="exponential"), "WLF16"),
    "boosted": Row(functools.partial(_learnt, name="boosted"), "WLF16"),
    "DP logistic regression": Row(functools.partial(_learnt, name="convex"), "WLF16"),
    "gradients": Row(functools.partial(_classifier, method="gradients", adjacency="replace_one"), ""),
    "(DP-SGD)": Row(functools.partial(_classifier, method="dpsgd", adjacency="add_remove"), "", adjacency="add_remove"),
}
"""Name -> method, in the table's order; in brackets: its epsilon is under add_remove."""


# ---- the table -------------------------------------------------------------------------------------------------------


def _plain(value: dict[str, Any]) -> dict[str, Any]:
    """JSON has no infinity: it is written as text."""
    return {k: "inf" if isinstance(v, float) and math.isinf(v) else v for k, v in value.items()}


def read(file: Path) -> list[Cell]:
    """The cells that are written down; a line that was cut off is left out, and measured again."""
    cells = []
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
        try:
            facts: dict[str, Any] = json.loads(line)
            facts = {key: math.inf if value == "inf" else value for key, value in facts.items()}
            cells.append(Cell(**facts))
        except (ValueError, TypeError):
            continue
    return cells


def text(cells: Sequence[Cell], names: Sequence[str]) -> str:
    """Means over splits with 1.96 standard errors, a table a data set; in each cell how many splits gave a model."""
    lines = ["Accuracy, mean ± 1.96 standard errors over splits; delta = 1/n, replace_one (in brackets: add_remove),"]
    lines.append("unit record. 'none': no split gave a model; k of n: so many did. paper: LZCW21 Table 4.")
    for name in names:
        mine = [cell for cell in cells if cell.dataset == name]
        epsilons = sorted({cell.epsilon for cell in mine if math.isfinite(cell.epsilon)})
        splits = len({cell.split for cell in mine})
        lines += ["", f"{name} ({splits} splits)"]
        lines.append(f"{'':<26}" + "".join(f"{f'eps {e:g}':<20}" for e in epsilons) + "paper")
        for row, facts in ROWS.items():
            columns = [math.inf] if facts.free else epsilons
            group = {e: [c for c in mine if c.row == row and c.epsilon == e] for e in columns}
            if not any(group.values()):
                continue
            shown = "".join(f"{_shown(group[e]):<20}" for e in columns)
            printed = [PAPER.get(name, {}).get((facts.printed or "", e)) for e in columns]
            paper = " / ".join("-" if p is None else f"{p[0]:.4f}".lstrip("0") for p in printed)
            lines.append(f"{row:<26}{shown:<{20 * max(1, len(epsilons))}}{paper if any(printed) else ''}".rstrip())
    return "\n".join(lines)


def _shown(group: Sequence[Cell]) -> str:
    """One cell of the table."""
    found = [cell.accuracy for cell in group if cell.accuracy is not None]
    if not group:
        return ""
    if not found:
        return "none"
    few = f" {len(found)}/{len(group)}" if len(found) < len(group) else ""
    if len(found) == 1:
        return f"{found[0]:.3f}".lstrip("0") + few
    return Mean.of(found).show().replace(" ", "") + few
