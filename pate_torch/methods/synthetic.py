"""A synthetic table: noisy marginal tables in one sum, a model that is fitted to them, and rounds of votes.

1. The number of units with each code of the target is released first. It decides which tables are counted.
2. Marginal tables of the target with up to one, two or three other columns are released in one sum.
3. In each further round every unit is counted at the nearest of some candidate rows (``synthesis.evolution``).

The events of all stages are fixed by epsilon and the number of rounds. The noise of a table grows with the number of
tables, so that the choice of the tables does not change the cost.

Guarantee: a unit is one row of codes, each of which is a function of one cell and of the domain. The unit changes one
count of each table by 1 (``MarginalTables``), and one count of each round (``CellHistogram``), or two counts if it is
replaced. Everything else is computed from noisy counts.
Source: McKenna, Miklau & Sheldon 2021 (noisy marginals); Liu, Vietri & Wu 2021 (mixture of products); Lin et al. 2024
(votes for the nearest candidate).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch

from pate_torch.accounting.accountant import compute_guarantee
from pate_torch.accounting.events import PrivacyEvent
from pate_torch.core import checks
from pate_torch.core.device import single_thread_mode
from pate_torch.core.rng import make_numpy_generator
from pate_torch.mechanisms.histogram import Histogram
from pate_torch.mechanisms.marginals import Marginals
from pate_torch.methods.base import (
    FirstAnswers,
    MethodDescription,
    MethodInputs,
    ModelForecast,
    ModelRelease,
    PreparedMethod,
    PrivateMethod,
    get_unit_column,
)
from pate_torch.methods.labeling import open_counts
from pate_torch.privacy.budget import Spending
from pate_torch.privacy.domain import TableDomain
from pate_torch.privacy.partition import DatasetFacts, select_one_per_unit
from pate_torch.privacy.records import PrivateRecords, PublicPool
from pate_torch.privacy.sensitive import COUNT_SENSITIVITY, CellHistogram, MarginalTables
from pate_torch.synthesis.evolution import Pool
from pate_torch.synthesis.mixture import Clique, NoisyTables, estimate_independent, fit_mixture
from pate_torch.synthesis.model import MAX_POOL_ROWS, TableModel, split_counts

COUNT_SHARE = 0.03
"""Share of mu^2 for the number of units with each code of the target."""
VOTE_SHARE = 0.3
"""Share of mu^2 for all rounds of votes together, if there are any."""
MAX_CELLS = 20_000_000
"""Largest number of counts in all tables together."""
MIN_SIGNALS = {3: 0.5, 2: 0.04}
"""Smallest mean count of a cell, in standard deviations of its noise, at which tables of an order are counted."""
MIN_SIGNAL_OF_ANY_TABLE = 0.8
"""Smallest mean count of a cell in tables of the target with one other column. Below this number the release stops."""
UNITS_PER_CANDIDATE = 8.0
"""Mean number of units at a candidate, in standard deviations of the noise of a count."""
_POOL_FACTOR = 8
"""Number of rows of the pool for each unit, at most ``MAX_POOL_ROWS`` in all."""


@dataclass(frozen=True, kw_only=True)
class SyntheticTable(PrivateMethod):
    """A model of a table, from which synthetic rows are drawn.

    Attributes:
        domain: Columns of the table. The points of the records are rows of codes.
        mu: Total cost of the release in Gaussian differential privacy. None before ``calibrate``.
        rounds: Number of rounds of votes for candidates.
        order: Number of columns beside the target in a table: 1, 2 or 3. None before noisy counts choose it.
        num_components: Number of components of the mixture.
        steps: Number of steps of its fit.
        seed: Seed of the mixture and of the rows. It never seeds noise.
        kind: Kind of noise, "torch" or "discrete".
    """

    purpose: ClassVar[str] = "synthetic table"
    cost_advice: ClassVar[str] = "Take a smaller epsilon"
    releases_model: ClassVar[bool] = True
    uses_public_points: ClassVar[bool] = False
    name: str = "synthetic"
    domain: TableDomain
    mu: float | None = None
    rounds: int = 0
    order: int | None = None
    num_components: int = 200
    steps: int = 300
    seed: int = 0
    kind: str = "torch"

    def __post_init__(self) -> None:
        checks.one_of("method.name", self.name, ("synthetic",))
        checks.integer("rounds", self.rounds, low=0, high=100)
        checks.integer("num_components", self.num_components, low=1)
        checks.integer("steps", self.steps, low=1)
        checks.one_of("noise", self.kind, ("torch", "discrete"))

    @property
    def mechanism_name(self) -> str:
        return "marginals"

    @property
    def student_name(self) -> str:
        return "mixture of products"

    @property
    def noise(self) -> str:
        return self.kind

    @property
    def has_first_stage(self) -> bool:
        return True

    @property
    def target_index(self) -> int:
        """Position of the column whose counts are released first: the target, or else the first column."""
        return self.domain.target_index or 0

    # ---- costs ----------------------------------------------------------------------------------------------------

    def calibrate(self, epsilon: float | None, delta: float, facts: DatasetFacts) -> SyntheticTable:
        if epsilon is None:
            raise checks.error("epsilon", None, "must be given, because it sets the noise")
        low, high = 0.0, 100.0
        for _ in range(60):
            middle = (low + high) / 2
            events = replace(self, mu=middle).privacy_events(facts)
            low, high = (middle, high) if compute_guarantee(events, delta).epsilon <= epsilon else (low, middle)
        if low == 0:
            raise checks.error("epsilon", epsilon, f"is too small for delta={delta:g}")
        return replace(self, mu=low)

    def make_count_mechanism(self, adjacency: str) -> Marginals:
        return Marginals.from_mu(self._get_mu(COUNT_SHARE), 1, adjacency, self.kind)

    def make_table_mechanism(self, num_tables: int, adjacency: str) -> Marginals:
        """Make the mechanism of the tables, whose cost does not depend on their number."""
        share = 1 - COUNT_SHARE - (VOTE_SHARE if self.rounds else 0.0)
        return Marginals.from_mu(self._get_mu(share), num_tables, adjacency, self.kind)

    def make_vote_mechanism(self, adjacency: str) -> Histogram | None:
        """Make the mechanism of a round of votes. None if there are no rounds."""
        if not self.rounds:
            return None
        mu = self._get_mu(VOTE_SHARE / self.rounds)
        return Histogram(sigma=COUNT_SENSITIVITY[adjacency].l2 / mu, adjacency=adjacency, noise=self.kind)

    def _get_mu(self, share: float) -> float:
        assert self.mu is not None, "calibrate comes first"
        return self.mu * math.sqrt(share)

    def privacy_events(self, facts: DatasetFacts) -> tuple[PrivacyEvent, ...]:
        mechanisms = self.make_count_mechanism(facts.adjacency), self.make_table_mechanism(1, facts.adjacency)
        votes = self.make_vote_mechanism(facts.adjacency)
        vote_events = () if votes is None else votes.privacy_events(1, self.rounds)
        return tuple(event for mechanism in mechanisms for event in mechanism.privacy_events()) + vote_events

    # ---- the choice of the tables ---------------------------------------------------------------------------------

    def list_cliques(self, order: int) -> tuple[Clique, ...]:
        """List the columns of each table: the target with 1 to ``order`` other columns.

        Without a target these are all sets of 2 to ``order`` + 1 columns.
        """
        target = self.domain.target_index
        columns = [column for column in range(len(self.domain.columns)) if column != target]
        if target is None:
            sets = (itertools.combinations(columns, size) for size in range(2, order + 2))
            return tuple(itertools.chain.from_iterable(sets))
        sets = (itertools.combinations(columns, size) for size in range(1, order + 1))
        return tuple(tuple(sorted((*others, target))) for others in itertools.chain.from_iterable(sets))

    def count_cells(self, cliques: Sequence[Clique]) -> int:
        sizes = self.domain.sizes
        return sum(math.prod(sizes[column] for column in clique) for clique in cliques)

    def compute_signal(self, order: int, num_units: float, adjacency: str) -> float:
        """Compute the mean count of a cell in the largest tables of this order, in standard deviations of its noise."""
        cliques = self.list_cliques(order)
        largest = [clique for clique in cliques if len(clique) == order + 1]
        sigma = self.make_table_mechanism(len(cliques), adjacency).sigma
        return num_units * len(largest) / self.count_cells(largest) / sigma

    def choose_order(self, num_units: float, adjacency: str) -> int:
        """Choose the largest order whose tables have enough signal (``MIN_SIGNALS``) and fit into memory, or else 1."""
        for order, min_signal in MIN_SIGNALS.items():
            fits = order < len(self.domain.columns) and self.count_cells(self.list_cliques(order)) <= MAX_CELLS
            if fits and self.compute_signal(order, num_units, adjacency) >= min_signal:
                return order
        return 1

    def adapt(self, first_answers: FirstAnswers, facts: DatasetFacts) -> SyntheticTable:
        if self.order is not None:
            return self
        num_units = first_answers.estimate_size(facts.num_units, facts.spec.nominal_size)
        return replace(self, order=self.choose_order(num_units, facts.adjacency))

    def forecast_model(self, first_answers: FirstAnswers, facts: DatasetFacts) -> TableForecast:
        num_units = first_answers.estimate_size(facts.num_units, facts.spec.nominal_size)
        signal = self.compute_signal(1, num_units, facts.adjacency)
        widest = max(self.domain.columns, key=lambda column: column.size)
        return TableForecast(
            num_units=num_units,
            skill=1 - MIN_SIGNAL_OF_ANY_TABLE / signal,
            low=signal,
            high=signal,
            advice=f"The column with the most codes is {widest.name!r} ({widest.size})",
        )

    def validate(self, facts: DatasetFacts) -> None:
        facts.check_adjacency()
        if (cells := self.count_cells(self.list_cliques(self.order or 1))) > MAX_CELLS:
            widest = max(self.domain.columns, key=lambda column: column.size)
            problem = f"has tables with {cells:,} cells, more than {MAX_CELLS:,}"
            fix = f"Declare fewer bins or categories, first in column {widest.name!r} with {widest.size} codes."
            raise checks.error("schema", "columns", problem, fix)

    def to_record(self, facts: DatasetFacts) -> dict[str, Any]:
        order = self.order or 1
        counts, votes = self.make_count_mechanism(facts.adjacency), self.make_vote_mechanism(facts.adjacency)
        tables = self.make_table_mechanism(len(self.list_cliques(order)), facts.adjacency)
        parameters = {"count_sigma": counts.sigma, "sigma": tables.sigma, "num_tables": tables.num_tables}
        parameters |= {"order": order, "components": self.num_components, "rounds": self.rounds}
        sensitivity, description = tables.max_sensitivity, describe(facts.unit, self.rounds)
        return {
            "num_teachers": 0,
            "mechanism": self.mechanism_name,
            "parameters": parameters | ({} if votes is None else {"vote_sigma": votes.sigma}),
            "sensitivity": {"l1": sensitivity.l1, "l2": sensitivity.l2, "linf": sensitivity.linf, "per": "release"},
            "declared_size": facts.spec.nominal_size,
            "answered_by": description.to_dict(),
        }

    # ---- private --------------------------------------------------------------------------------------------------

    def draw_first_answers(self, records: PrivateRecords, facts: DatasetFacts, spending: Spending) -> FirstAnswers:
        mechanism = self.make_count_mechanism(facts.adjacency)
        counts_M = _draw_tables(self, mechanism, [(self.target_index,)], records, facts, spending)
        return FirstAnswers(counts_M.double(), mechanism.sigma)

    def prepare(self, inputs: MethodInputs) -> PreparedTable:
        return PreparedTable(self, inputs)


def describe(unit: str, rounds: int = 0) -> MethodDescription:
    """Describe the method for reports, given the privacy unit and the number of rounds of votes."""
    one = get_unit_column(unit) or "record"
    votes = f" Then every {one} was counted {rounds} times at the nearest of some candidate rows." if rounds else ""
    return MethodDescription(
        subject="marginal tables",
        procedure=f"Every {one} was counted once in each of some tables, of which each counts combinations of values "
        f"of a few columns.{votes} Noise was added to every count. A model was fitted to the noisy counts, and the "
        "synthetic rows were drawn at random from this model.",
        assumptions=(f"Every {one} was counted once in each table, by one of its rows alone.",),
        uses_size=False,
        product="table",
    )


@dataclass(frozen=True)
class TableForecast(ModelForecast):
    """Releasable. Forecast of the signal of the tables, which ``low`` and ``high`` both hold.

    The signal is the mean count of a cell in standard deviations of its noise. ``skill`` is 0 at the smallest signal.

    Attributes:
        advice: Advice on how to lower the number of cells.
    """

    advice: str = ""

    def __str__(self) -> str:
        return (
            f"about {self.num_units:,} unit(s); the mean count of a cell is {self.low:.2g} standard deviations of its "
            f"noise. {self.advice}"
        )


@dataclass(eq=False, repr=False)
class PreparedTable(PreparedMethod):
    """PRIVATE. The method and one row of codes for each unit."""

    method: SyntheticTable
    inputs: MethodInputs

    def release(self, pool: PublicPool, spending: Spending) -> ModelRelease:
        method, facts, first_answers = self.method, self.inputs.facts, self.inputs.first_answers
        assert method.order is not None and first_answers is not None
        cliques, sizes = method.list_cliques(method.order), method.domain.sizes
        mechanism = method.make_table_mechanism(len(cliques), facts.adjacency)
        counts_M = _draw_tables(method, mechanism, cliques, self.inputs.records, facts, spending)
        tables = NoisyTables(split_counts(counts_M, sizes, cliques), mechanism.sigma)
        with self.inputs.clock("fit"):
            if method.order == 1:
                mixture = estimate_independent(tables, sizes, method.target_index)
            else:
                progress, options = self.inputs.stages("Fitting the model of the table"), {"seed": method.seed}
                options |= {"num_components": method.num_components, "steps": method.steps}
                with single_thread_mode():  # small products
                    mixture = fit_mixture(tables, sizes, method.target_index, progress=progress, **options)
        size = first_answers.estimate_size(facts.num_units, facts.spec.nominal_size)
        model = TableModel(method.domain, size, tables, mixture)
        if (votes := method.make_vote_mechanism(facts.adjacency)) is not None:
            model = replace(model, pool_NJ=self._run_rounds(model, votes, spending))
        return ModelRelease(spending.id, model)

    def _run_rounds(self, model: TableModel, mechanism: Histogram, spending: Spending) -> np.ndarray:
        """Run the rounds of votes, and draw rows from the final pool, int64 [N, J]."""
        method, facts = self.method, self.inputs.facts
        random = make_numpy_generator(method.seed, "synthesis", "rounds")
        count = min(MAX_POOL_ROWS, max(2000, _POOL_FACTOR * model.size))
        target, ordered = method.target_index, [column.is_number for column in method.domain.columns]
        pool = Pool.from_rows(model.sample_codes(count, random), target, model.domain.sizes, ordered)
        num_candidates = max(2, int(model.size / (UNITS_PER_CANDIDATE * mechanism.sigma)))
        units = select_one_per_unit(self.inputs.records, facts.adjacency)
        code_UJ, sensitivity = units.x.long().numpy(), COUNT_SENSITIVITY[facts.adjacency]
        for round_index in range(method.rounds):
            candidates = pool.choose_candidates(num_candidates, random)
            nearest_U, num_classes = candidates.find_nearest(np.delete(code_UJ, target, axis=1)), pool.sizes[target]
            cell_U = torch.from_numpy(nearest_U * num_classes + code_UJ[:, target])
            shape = len(candidates.codes_MF), num_classes
            counts_MC = torch.bincount(cell_U, minlength=math.prod(shape)).view(shape)
            cells = CellHistogram(counts_MC, sensitivity, torch.zeros(0, dtype=torch.int64))
            cell_N = pool.find_cells(candidates)
            pool = pool.reweight(cell_N, open_counts(cells, mechanism, spending).counts_QC.numpy(), mechanism.sigma)
            if round_index < method.rounds - 1:
                pool = pool.vary(cell_N, random)
        return pool.codes_NJ[random.choice(len(pool.codes_NJ), size=count, p=pool.weight_N)]


def _draw_tables(
    method: SyntheticTable,
    mechanism: Marginals,
    cliques: Sequence[Clique],
    records: PrivateRecords,
    facts: DatasetFacts,
    spending: Spending,
) -> torch.Tensor:
    """PRIVATE. Count one row of each unit, and return the noisy counts of all tables, int64 [M]."""
    units = select_one_per_unit(records, facts.adjacency)
    tables = MarginalTables.from_units(units.x.long(), method.domain.sizes, cliques, facts.adjacency)
    return open_counts(tables, mechanism, spending).counts_QC[0]
