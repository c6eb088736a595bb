"""One table over the five papers: every method on the same splits, at one delta, under one adjacency.

Cells are measured one by one and written down as they come: the same command goes on where it was stopped. Every cell
is a private data set of its own with a throw-away account; rows in brackets are add_remove.

Source: BTT18, NB20, DF20, WLF16 and LZCW21, whose Table 4 has the splits, the sizes and delta = 1/n.
"""

from __future__ import annotations

import dataclasses
import json
import math
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from threadpoolctl import threadpool_limits
from torch import Tensor

from benchmarks.replications import query_algorithms
from benchmarks.replications.liu2021_tables import PAPER
from benchmarks.replications.splits import Cell, Mean, Split, SplitStudy, format_share, replace_infinities
from pate_torch.accounting import accountant as accounting
from pate_torch.api.classifier import PATEClassifier
from pate_torch.config import RunConfig
from pate_torch.core import checks
from pate_torch.core.progress import Stages
from pate_torch.hypotheses.algorithms import ALGORITHMS, Algorithm, LearnOptions, make_problems, plan_events
from pate_torch.hypotheses.release import make_logistic_student, make_rule_student
from pate_torch.hypotheses.sample import BelowGuaranteeWarning
from pate_torch.mechanisms.sparse_vector import SoftSparseVector, SparseVector
from pate_torch.privacy.partition import DatasetFacts
from pate_torch.privacy.records import Release
from pate_torch.students.base import StudentTask


@dataclass(frozen=True, kw_only=True)
class PaperCell(Cell):
    """One method at one epsilon on one split.

    Attributes:
        spent: Epsilon of what was charged, at delta = 1/n.
        answered: Of the queries, where there were any; None: there were none.
        why: Why nothing was released, where nothing was.
    """

    spent: float
    answered: int | None = None
    why: str = ""


@dataclass(frozen=True, kw_only=True)
class FivePapers(SplitStudy):
    """The table, the small data sets first; ``rows``: those to measure, of ``ROWS``; None: all."""

    epsilons: Sequence[float] = (0.1, 0.5, 1.0, 2.0)
    rows: Sequence[str] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for row in self.rows or ():
            checks.one_of("study.rows", row, ROWS)

    def run(self, plan: RunConfig) -> None:
        """Measure what is not written down yet; print the table and write it into the run's folder."""
        self.check_plan(plan)
        file = plan.root / "studies" / "five_papers.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        known = read_cells(file)
        done = {(c.dataset, c.split, c.method, c.epsilon) for c in known}
        with Stages(quiet=plan.quiet) as stages, threadpool_limits(1):
            stages.print_message(
                f"{len(known)} cells are written down already in {file}; the same command goes on from there."
            )
            for number in range(self.repeats):
                for name in self.tables:
                    todo = [(r, e) for r, e in self.cells() if (name, number, r, e) not in done]
                    if not todo:
                        continue
                    split, progress = Split(self, plan, name, number), stages(f"{name}, split {number}")
                    _ = split.data  # what cannot be loaded is no cell's fault
                    for place, (row, epsilon) in enumerate(todo, start=1):
                        cell = self.measure(split, row, epsilon)
                        with file.open("a", encoding="utf-8") as out:
                            out.write(json.dumps(replace_infinities(dataclasses.asdict(cell))) + "\n")
                        progress(place, len(todo))
        shown = format_table(read_cells(file), list(self.tables))
        plan.folder.mkdir(parents=True, exist_ok=True)
        (plan.folder / "five_papers.txt").write_text(shown + "\n", encoding="utf-8")
        print(shown)

    def cells(self) -> Iterator[tuple[str, float]]:
        """(Row, epsilon) of a split; rows without privacy have one."""
        for name in self.rows or ROWS:
            for epsilon in (math.inf,) if ROWS[name].free else self.epsilons:
                yield name, float(epsilon)

    def measure(self, split: Split, row: str, epsilon: float) -> PaperCell:
        """Measure one cell; nothing is released where the method refuses, or answers nothing."""
        place: dict[str, Any] = {"dataset": split.name, "split": split.number, "method": row, "epsilon": epsilon}
        try:
            predicted, spent, answered = ROWS[row].measure(split, epsilon)
        except ValueError as refused:
            return PaperCell(**place, spent=0.0, why=str(refused).split(". ")[0])
        plain, balanced = split.compute_accuracies(predicted)
        return PaperCell(**place, spent=spent, answered=answered, accuracy=plain, balanced=balanced)


Found = tuple[Tensor, float, int | None]


@dataclass(frozen=True)
class Method:
    """A row of the table.

    Attributes:
        measure: (Predictions on the test records, epsilon that was charged, answers) at an epsilon.
        free: Whether it has no privacy.
        printed: LZCW21's name for it, where its Table 4 has figures.
    """

    measure: Callable[[Split, float], Found]
    free: bool = False
    printed: str | None = None


def _teach(split: Split, release: Release) -> Found:
    """Train a student on the labels that were answered."""
    if not bool(release.answered_Q.any()):
        raise ValueError("mechanism: none of the queries was answered")
    predicted = split.fit_student(release).predict(split.data.evaluation.x)
    return (
        predicted,
        accounting.compute_guarantee(release.reserved_events, split.delta).epsilon,
        int(release.answered_Q.sum()),
    )


def _gnmax(split: Split, epsilon: float, *, active: bool) -> Found:
    release, _ = split.release_gaussian_labels(active=active, epsilon=epsilon)
    predicted, spent, answered = _teach(split, release)
    return predicted, math.inf if math.isinf(epsilon) else spent, answered


def _sparse(split: Split, epsilon: float, *, soft: bool) -> Found:
    pool = split.data.pool  # the papers give half of delta to the failure
    given = {"epsilon": epsilon, "delta": split.delta, "failure_delta": split.delta / 2, "max_failures": 1}
    votes = split.ensemble.tally_probabilities(pool.x, 10) if soft else split.votes
    mechanism: Any = SoftSparseVector(**given, bins=10) if soft else SparseVector(**given)
    return _teach(split, split.release_labels(votes, mechanism, split.study.passive, len(pool)))


def _learn(split: Split, epsilon: float, *, name: str) -> Found:
    """One of ``pate learn``, or of those beside it, below its guarantee."""
    facts = DatasetFacts.from_dataset(split.data, split.plan.partition)
    options = LearnOptions(epsilon=epsilon, constants="sharp")
    parts = make_problems(split.data.private, facts, options, split.seed, split.delta)
    if name in ALGORITHMS:
        algorithm = ALGORITHMS[name]
    else:
        learn = partial(
            query_algorithms.ALGORITHMS[name], delta=split.delta / 2 / len(parts)
        )  # the other half composes
        algorithm = Algorithm(learn, lambda options, dimension: (math.nan, ""), name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BelowGuaranteeWarning)
        events = [event for part in parts for event in plan_events(algorithm, part, "torch")]
        with split.open_budget(events) as budget:
            found = [algorithm.learn(part, budget) for part in parts]
    make = make_logistic_student if algorithm.is_linear else make_rule_student
    predicted = make(facts, found).predict(split.data.evaluation.x)
    return predicted, accounting.compute_guarantee(events, split.delta).epsilon, None


def _classifier(split: Split, epsilon: float, *, method: str, adjacency: str) -> Found:
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


def _majority(split: Split, epsilon: float) -> Found:
    counts = torch.bincount(split.data.evaluation.y)
    return counts.argmax().expand(len(split.data.evaluation.y)), math.inf, None


def _everything(split: Split, epsilon: float) -> Found:
    """The student on all private records, without privacy."""
    data = split.data
    task = StudentTask(data.spec, data.private.x, torch.arange(len(data.private)), data.private.y)
    assert split.plan.student is not None
    student = split.plan.student.fit(task, seed=split.seed, device=split.plan.device)
    return student.predict(data.evaluation.x), math.inf, None


ROWS: dict[str, Method] = {
    "majority class": Method(_majority, free=True),
    "no privacy: all records": Method(_everything, free=True),
    # LZCW21
    "no privacy: PSQ": Method(partial(_gnmax, active=False), free=True, printed="PSQ"),
    "no privacy: ASQ": Method(partial(_gnmax, active=True), free=True, printed="ASQ"),
    "PSQ": Method(partial(_gnmax, active=False), printed="PSQ"),
    "ASQ": Method(partial(_gnmax, active=True), printed="ASQ"),
    # BTT18
    "sparse vector, T = 1": Method(partial(_sparse, soft=False)),
    "soft labels, T = 1": Method(partial(_sparse, soft=True)),
    # NB20
    "SSPP": Method(partial(_learn, name="sspp")),
    "AgPrivCl": Method(partial(_learn, name="ag-priv-cl")),
    "AgPrivCl by GNMax": Method(partial(_learn, name="relabeled")),
    "UnvPrivCl": Method(partial(_learn, name="unv-priv-cl")),
    # DF20, DF18
    "private prediction": Method(partial(_learn, name="private-prediction")),
    "vote of ERMs": Method(partial(_learn, name="df18")),
    # WLF16
    "exponential mechanism": Method(partial(_learn, name="exponential")),
    "boosted": Method(partial(_learn, name="boosted")),
    "DP logistic regression": Method(partial(_learn, name="convex")),
    # The classifier's own choices
    "gradients": Method(partial(_classifier, method="gradients", adjacency="replace_one")),
    "(DP-SGD)": Method(partial(_classifier, method="dpsgd", adjacency="add_remove")),
}
"""Name -> method, in the table's order; in brackets: its epsilon is under add_remove."""


# ---- the table -------------------------------------------------------------------------------------------------------


def read_cells(file: Path) -> list[PaperCell]:
    """Read the cells that are written down; a line that was cut off is left out, and measured again."""
    cells = []
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
        try:
            facts: dict[str, Any] = json.loads(line)
            facts = {key: math.inf if value == "inf" else value for key, value in facts.items()}
            cells.append(PaperCell(**facts))
        except (ValueError, TypeError):
            continue
    return cells


def format_table(cells: Sequence[PaperCell], names: Sequence[str]) -> str:
    """Format means over splits, a table a data set; each cell tells how many splits gave a model."""
    lines = ["Accuracy, mean ± 1.96 standard errors over splits; delta = 1/n, replace_one (in brackets: add_remove),"]
    lines.append("unit record. 'none': no split gave a model; k of n: so many did. paper: LZCW21 Table 4.")
    for name in names:
        mine = [cell for cell in cells if cell.dataset == name]
        epsilons = sorted({cell.epsilon for cell in mine if math.isfinite(cell.epsilon)})
        splits = len({cell.split for cell in mine})
        lines += ["", f"{name} ({splits} splits)"]
        lines.append(f"{'':<26}" + "".join(f"{f'eps {e:g}':<20}" for e in epsilons) + "paper")
        for row, method in ROWS.items():
            columns = [math.inf] if method.free else epsilons
            group = {e: [c for c in mine if c.method == row and c.epsilon == e] for e in columns}
            if not any(group.values()):
                continue
            shown = "".join(f"{_format_group(group[e]):<20}" for e in columns)
            printed = [PAPER.get(name, {}).get((method.printed or "", e)) for e in columns]
            paper = " / ".join("-" if p is None else f"{p[0]:.4f}".lstrip("0") for p in printed)
            lines.append(f"{row:<26}{shown:<{20 * max(1, len(epsilons))}}{paper if any(printed) else ''}".rstrip())
    return "\n".join(lines)


def _format_group(group: Sequence[PaperCell]) -> str:
    """Format one cell of the table."""
    found = [cell.accuracy for cell in group if cell.accuracy is not None]
    if not group:
        return ""
    if not found:
        return "none"
    few = f" {len(found)}/{len(group)}" if len(found) < len(group) else ""
    if len(found) == 1:
        return format_share(found[0], 3) + few
    return Mean.of(found).show().replace(" ", "") + few
