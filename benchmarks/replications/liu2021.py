"""LZCW21 Table 4 again: passive against active student queries, linear models, thirty random splits a data set.

Within a split the teachers are trained once, and every cell of the table is one release through the mechanism, the
ledger and the labeling of a real run.

Source: LZCW21 (Liu, Zhu, Chaudhuri and Wang 2021), section 5, Algorithms 1, 3 and 5.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from threadpoolctl import threadpool_limits

from benchmarks.replications import liu2021_tables as tables
from benchmarks.replications.liu2021_tables import SplitFacts, Table4Cell
from benchmarks.replications.splits import Split, SplitStudy
from pate_torch.accounting import accountant as accounting
from pate_torch.config import RunConfig
from pate_torch.core import checks
from pate_torch.core.progress import Stages


@dataclass(frozen=True, kw_only=True)
class Liu2021Table4(SplitStudy):
    """The table."""

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.integer("study.repeats", self.repeats, low=2, fix="An interval takes two.")

    def run(self, plan: RunConfig) -> None:
        """Measure every split of every table; print and write the tables into the run's folder."""
        self.check_plan(plan)
        facts: list[SplitFacts] = []
        cells: list[Table4Cell] = []
        # Thousands of tiny problems: threads would only wait for each other.
        with Stages(quiet=plan.quiet) as stages, threadpool_limits(1):
            stages.print_message(
                f"Every one of the {self.repeats} splits of a data set is a private data set of its own, with"
                " throw-away ledgers: their privacy costs are not composed, and nothing of them is kept but this table."
            )
            for name in self.tables:
                progress = stages(f"{name}: {self.repeats} splits")
                for number in range(self.repeats):
                    split = Split(self, plan, name, number)
                    facts.append(describe_split(split))
                    cells += self.measure(split)
                    progress(number + 1, self.repeats)
        tables.write_tables(plan.folder, facts, cells)
        print(tables.format_tables(facts, cells))

    def measure(self, split: Split) -> list[Table4Cell]:
        """Measure both methods, without privacy and at each epsilon."""
        columns = (math.inf, *map(float, self.epsilons))
        return [measure_cell(split, active, epsilon) for active in (False, True) for epsilon in columns]


def describe_split(split: Split) -> SplitFacts:
    """Describe the sizes of a split, and what its teachers know without noise."""
    data, ensemble = split.data, split.ensemble
    truth = data.evaluation.y
    counts = torch.bincount(truth, minlength=data.spec.num_classes)
    plurality = ensemble.count_votes(data.evaluation.x).compute_plurality()
    return SplitFacts(
        dataset=split.name,
        private=len(data.private),
        public=len(data.pool),
        test=len(truth),
        teachers=split.votes.num_teachers,
        majority=float(counts.max() / counts.sum()),
        teacher=float((ensemble.predict(data.evaluation.x) == truth).double().mean()),
        plurality=float((plurality == truth).double().mean()),
        gap=float(split.votes.compute_gaps().double().median()),
    )


def measure_cell(split: Split, active: bool, epsilon: float) -> Table4Cell:
    """Release labels once, and measure them and the student that learns from them."""
    release, sigma = split.release_gaussian_labels(active=active, epsilon=epsilon)
    accuracy, balanced = split.compute_accuracies(split.fit_student(release).predict(split.data.evaluation.x))
    spent = accounting.compute_guarantee(release.events, split.delta).epsilon
    pool_y = split.data.evaluation.pool_y
    assert pool_y is not None
    return Table4Cell(
        dataset=split.name,
        split=split.number,
        method="ASQ" if active else "PSQ",
        epsilon=epsilon,
        sigma=sigma,
        queries=len(release.query_Q),
        epsilon_ex_post=spent if math.isfinite(epsilon) else math.inf,
        label_accuracy=float((pool_y[release.query_Q] == release.label_Q).double().mean()),
        accuracy=accuracy,
        balanced=balanced,
    )
