"""Methods that label public points by asking queries in rounds.

Each round has four steps:

    1  fit a guide student to the earlier answers, if the round needs one
    2  choose the queries, as a function of public points and of earlier answers
    3  select the sensitive values of the chosen points, with a sensitivity that the cost covers
    4  answer with the mechanism, with noise that the reservation has paid for
"""

from __future__ import annotations

import dataclasses
import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from pate_torch.accounting import calibration
from pate_torch.accounting.accountant import compute_guarantee
from pate_torch.accounting.events import PrivacyEvent
from pate_torch.core import checks
from pate_torch.core.progress import Progress, Stages, do_nothing
from pate_torch.features.base import FeatureRecipe
from pate_torch.features.contrastive import encode
from pate_torch.features.neighbors import NeighborSearch, to_graph_device
from pate_torch.mechanisms.base import Mechanism, VoteMechanism
from pate_torch.mechanisms.class_counts import ClassCounts
from pate_torch.methods.base import FirstAnswers, MethodDescription, MethodInputs, PreparedMethod, PrivateMethod
from pate_torch.privacy.budget import Budget, Spending
from pate_torch.privacy.partition import DatasetFacts, select_one_per_unit
from pate_torch.privacy.records import DataSpec, MechanismContext, NoisyCounts, PrivateRecords, PublicPool, Release
from pate_torch.privacy.sensitive import (
    CellHistogram,
    SensitiveRecords,
    SensitiveValue,
    Sensitivity,
    SoftVotes,
    UnitCounts,
    Votes,
    check_sensitivity,
)
from pate_torch.queries.base import QueryState, QueryStrategy, Random
from pate_torch.queries.clusters import MAX_PROTOTYPE_POINTS, Medoids, Prototypes
from pate_torch.students.base import Student, StudentAlgorithm
from pate_torch.students.labels import make_student_task

_COMBINATIONS = (
    "Use method=reverse_knn with mechanism=histogram, method=gradients with mechanism=gradient_descent, or another "
    "method with another mechanism, such as mechanism=gaussian."
)


@dataclass(frozen=True, kw_only=True)
class LabelingMethod(PrivateMethod):
    """Base of the methods that answer queries about public points.

    Attributes:
        mechanism_type: Type of the mechanisms that the method can be combined with.
        refits_records: Whether later rounds use features of the guide student.
        mechanism: Mechanism that answers.
        query: Query strategy, which chooses the queries: public points to be labeled.
        num_queries: Largest number of queries.
        num_queries_is_default: Whether ``num_queries`` is a recommended value, which is lowered to the number of public
            points.
        features: Recipe for features in which queries are chosen and records are compared. None to use the points
            themselves.
        guide_student: Student that is fitted to the answers between rounds. None if no round needs a student.
        releases_guide: Whether the published student continues from the guide student.
        allow_uninformative_labels: Whether to accept labels that would be no better than chance even if all teachers
            agreed.
        class_counts: Mechanism of the first stage, which counts the units of each class. None for no first stage.
    """

    mechanism_type: ClassVar[Any] = Mechanism
    refits_records: ClassVar[bool] = False
    mechanism: Mechanism
    query: QueryStrategy = field(default_factory=Random)
    num_queries: int = 100
    num_queries_is_default: bool = False
    features: FeatureRecipe | None = None
    guide_student: StudentAlgorithm | None = None
    releases_guide: bool = False
    allow_uninformative_labels: bool = False
    class_counts: ClassCounts | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.mechanism, self.mechanism_type):
            problem = f"cannot be combined with method={self.name}, because it takes other values as input"
            raise checks.error("mechanism", self.mechanism.name, problem, _COMBINATIONS)
        checks.integer("num_queries", self.num_queries, low=1)
        if self.guide_student is not None and self.guide_student.returns_released_model:
            problem = "returns the released model, so it cannot learn from the answers of a round"
            raise checks.error("guide_student", self.guide_student.name, problem, "Name another student.")
        if self.guide_student is not None:
            self._check_counts("guide_student", self.guide_student)

    def check_student(self, student: StudentAlgorithm) -> None:
        super().check_student(student)
        self._check_counts("student", student)

    def _check_counts(self, key: str, student: StudentAlgorithm) -> None:
        if student.needs_counts and not self.mechanism.releases_counts:
            problem = "needs noisy counts, which the mechanism does not release"
            raise checks.error(key, student.name, problem, "Use mechanism=gaussian mechanism.counts=true.")

    @property
    def mechanism_name(self) -> str:
        return self.mechanism.name

    @property
    def noise(self) -> str:
        return self.mechanism.noise

    @property
    def num_rounds(self) -> int:
        return min(self.query.rounds, self.num_queries)

    @property
    def is_guided(self) -> bool:
        """Whether a student is fitted between rounds, because the strategy, the mechanism or the method needs it."""
        return self.num_rounds > 1 and (self.query.uses_guide or self.mechanism.uses_guide or self.refits_records)

    def complete(self, facts: DatasetFacts, stages: Stages) -> LabelingMethod:
        """Adapt the query strategy, and a recommended number of queries, to the number of public points."""
        pool_size = len(facts.pool)
        if isinstance(self.query, Prototypes) and pool_size > MAX_PROTOTYPE_POINTS:
            stages.print_message(f"query is medoids instead of prototypes, because of {pool_size:,} public points.")
            return replace(self, query=Medoids(rounds=self.query.rounds)).complete(facts, stages)
        if not self.num_queries_is_default or self.num_queries <= pool_size:
            return self
        message = f"num_queries is {pool_size} instead of the recommended {self.num_queries}"
        stages.print_message(f"{message}, the number of public points.")
        return replace(self, num_queries=pool_size)

    def calibrate(self, epsilon: float | None, delta: float, facts: DatasetFacts | None = None) -> LabelingMethod:
        if epsilon is None:
            return self
        names = {f.name for f in dataclasses.fields(self.mechanism)}
        if not names & {"sigma", "epsilon"}:
            problem = f"mechanism={self.mechanism.name} has neither sigma nor epsilon to calibrate"
            raise checks.error("privacy.target_epsilon", epsilon, problem)

        def set_noise(scale: float) -> LabelingMethod:
            change: dict[str, Any] = {"sigma": scale} if "sigma" in names else {"epsilon": 1 / scale}
            return replace(self, mechanism=dataclasses.replace(self.mechanism, **change))

        # If the mechanism's epsilon is that of the whole release, as for the sparse vector, no search is needed.
        if "sigma" not in names:
            total_epsilon = compute_guarantee(set_noise(1 / epsilon).privacy_events(), delta).epsilon
            if 1 - 1e-6 <= total_epsilon / epsilon <= 1:
                return set_noise(1 / epsilon)
        sigma = calibration.calibrate_sigma(lambda s: set_noise(s).privacy_events(), epsilon=epsilon, delta=delta)
        return set_noise(sigma)

    def validate(self, facts: DatasetFacts) -> None:
        fix = f"There are {len(facts.pool)} public points to ask about."
        checks.integer("num_queries", self.num_queries, low=1, high=len(facts.pool), fix=fix)
        if self.class_counts is not None:
            if self.class_counts.adjacency != facts.adjacency:
                problem = f"must be the adjacency of the partition, {facts.adjacency}"
                raise checks.error("first_answers.adjacency", self.class_counts.adjacency, problem)
            if self.noise != self.class_counts.noise:
                problem = "must be torch with first_answers=class_counts"
                raise checks.error("noise", self.noise, problem, "Set noise=torch.")
        if self.features is not None:
            with checks.prefixed_errors("features"):
                self.features.check(facts.spec)
        if self.is_guided:
            if self.guide_student is None:
                problem = "must be a student, because later rounds use its predictions"
                raise checks.error("guide_student", None, problem, "Use student@guide_student=supervised.")
            with checks.prefixed_errors("guide_student"):
                self.guide_student.check(facts.spec)

    @property
    def has_first_stage(self) -> bool:
        return self.class_counts is not None

    def privacy_events(self, facts: DatasetFacts | None = None) -> tuple[PrivacyEvent, ...]:
        count_events = () if self.class_counts is None else self.class_counts.privacy_events()
        return count_events + self.mechanism.privacy_events(self.num_queries, self.num_rounds)

    def draw_first_answers(self, records: PrivateRecords, facts: DatasetFacts, spending: Spending) -> FirstAnswers:
        """PRIVATE. Draw the noisy class counts of one usable record of each unit."""
        assert self.class_counts is not None
        units = select_one_per_unit(records, facts.adjacency)
        outside_U = facts.spec.compute_outside_share(units.x)
        counts = UnitCounts.from_units(units.y, outside_U, facts.spec.num_classes, facts.adjacency)
        noisy_counts = open_counts(counts, self.class_counts, spending)
        noisy_F = noisy_counts.counts_QC[0].double()
        return FirstAnswers(noisy_F[:-1], noisy_counts.sigma, float(noisy_F[-1]))

    @abstractmethod
    def describe(self, facts: DatasetFacts) -> MethodDescription:
        """Return the sentences about the method that reports show."""

    def to_record(self, facts: DatasetFacts) -> dict[str, Any]:
        mechanism = self.mechanism
        parameters = {f.name: getattr(mechanism, f.name) for f in dataclasses.fields(mechanism)}
        norms = {norm: getattr(mechanism.max_sensitivity, norm) for norm in ("l1", "l2", "linf")}
        finite_norms = {norm: value if math.isfinite(value) else None for norm, value in norms.items()}
        asset = None if self.features is None else self.features.asset
        description = self.describe(facts)
        if self.class_counts is not None:
            counts = (
                "First, the number of units in each class and the sum of their shares of values outside the public "
                "range were released with noise. The same privacy cost covers these counts."
            )
            procedure = f"{counts} {description.procedure}"
            once = "Every unit was counted once, by the class of one of its records."
            assumptions = *description.assumptions, once
            description = dataclasses.replace(description, procedure=procedure, assumptions=assumptions)
        return {
            "num_teachers": self.ensemble_size or 0,
            "mechanism": mechanism.name,
            # The record omits parameters that are False.
            "parameters": {k: v for k, v in parameters.items() if k not in ("name", "noise") and v is not False},
            "query": self.query.name,
            "voters": self.name,
            "rounds": self.num_rounds,
            "sensitivity": {**finite_norms, "per": mechanism.sensitivity_unit},
            **({} if asset is None else {"assets": [dataclasses.asdict(asset)]}),
            "answered_by": description.to_dict(),
        }

    def learn_encoder(self, inputs: MethodInputs) -> nn.Module | None:
        """Learn an encoder from the public points alone. Return None if ``features`` is None."""
        if self.features is None:
            return None
        facts, progress = inputs.facts, inputs.stages("Learning features of the public points")
        return self.features.learn(facts.pool.x, facts.spec, seed=inputs.seed, device=inputs.device, progress=progress)

    def learn_features(self, inputs: MethodInputs) -> Tensor | None:
        """Learn unit-length features of the public points, float32 [P, D]. Return None if ``features`` is None."""
        encoder, facts = self.learn_encoder(inputs), inputs.facts
        return None if encoder is None else to_graph_device(encode(encoder, facts.pool.x, facts.spec), inputs.device)


@dataclass(kw_only=True, eq=False, repr=False)
class PreparedLabeling(PreparedMethod):
    """PRIVATE. A labeling method that is ready to answer.

    Attributes of a ``LabelingMethod`` are not listed again, and neither are those of ``MethodInputs``.

    Attributes:
        sensitive: PRIVATE. Values to be opened, on the whole pool: votes, cell counts or gradient sums.
        feature_PD: Features of the public points, by which the first round chooses queries, float32 [P, D]. None to
            use the points themselves.
        refit: PRIVATE. Function that makes the values of the next round in the features of the guide student. The
            contribution of a record depends on this record and on released values alone. None if all rounds open the
            same values.
        finish_release: Function of the finished release that rescales its model. None to keep the release.
        progress, guide_progress: Functions that receive (done, total) queries, and steps of the guide student.
    """

    mechanism: Mechanism
    query: QueryStrategy
    num_queries: int
    sensitive: SensitiveValue
    spec: DataSpec
    seed: int
    id: str = ""
    feature_PD: Tensor | None = None
    guide_student: StudentAlgorithm | None = None
    releases_guide: bool = False
    refit: Callable[[Student], SensitiveRecords] | None = None
    finish_release: Callable[[Release], Release] | None = None
    search: NeighborSearch = field(default_factory=NeighborSearch)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    progress: Progress = do_nothing
    guide_progress: Progress = do_nothing

    @classmethod
    def from_method(
        cls, method: LabelingMethod, inputs: MethodInputs, sensitive: SensitiveValue, **changes: Any
    ) -> PreparedLabeling:
        guide_student = method.guide_student if method.is_guided else None
        return cls(
            mechanism=method.mechanism,
            query=method.query,
            num_queries=method.num_queries,
            sensitive=sensitive,
            spec=inputs.facts.spec,
            seed=inputs.seed,
            feature_PD=method.learn_features(inputs),
            guide_student=guide_student,
            releases_guide=method.releases_guide,
            search=inputs.search,
            device=inputs.device,
            progress=inputs.stages("Answering queries"),
            guide_progress=do_nothing if guide_student is None else inputs.stages("Training the guide student"),
            **changes,
        )

    def check(self, budget: Budget, pool: PublicPool) -> None:
        fix = f"There are {len(pool)} public points."
        checks.integer("num_queries", self.num_queries, low=1, high=len(pool), fix=fix)
        if len(self.sensitive) != len(pool):
            fix = "There must be one row for each public point, in the order of the points."
            raise checks.error("votes", len(self.sensitive), f"must cover all {len(pool)} public points", fix)
        if isinstance(self.mechanism, VoteMechanism) and isinstance(self.sensitive, Votes | SoftVotes):
            sizes = {"num_teachers": self.sensitive.num_teachers, "num_classes": self.sensitive.num_classes}
            rounds = min(self.query.rounds, self.num_queries)
            self.mechanism.check(num_queries=self.num_queries, **sizes, rounds=rounds)
        if budget.kind != self.mechanism.noise:
            problem = f"must be {self.mechanism.noise!r}, the noise for which the cost of {self.mechanism.name} holds"
            raise checks.error("noise", budget.kind, problem)
        check_values(self.sensitive.sensitivity, self.mechanism, budget)

    def release(self, pool: PublicPool, spending: Spending) -> Release:
        """Ask about at most ``num_queries`` public points in rounds, and release the answers.

        Raises:
            ValueError: The query strategy chose invalid queries, or the values of the next round are invalid. The
                reservation stays spent.
        """
        rounds = min(self.query.rounds, self.num_queries)
        spending.record_cost(())  # a strategy may choose no query at all
        # The id of the reservation connects the release with its charge in the ledger.
        empty_Q = torch.zeros(0, dtype=torch.int64)
        release = Release(spending.id, empty_Q, empty_Q, (), spending.reserved_events)
        values, feature_PD, student_PC = self.sensitive, self.feature_PD, None
        opened_votes: list[Votes | CellHistogram] = []
        for round_index in range(rounds):
            if len(release.query_Q) == self.num_queries:
                break
            if round_index and self.guide_student is not None and bool(release.answered_Q.any()):
                student = self._fit_guide(release, pool)
                student_PC = student.compute_probabilities(pool.x)
                if self.refit is not None:
                    values = self._refit_values(student, spending)
                    feature_PD = to_graph_device(values.feature_PD, self.device)
            query_Q = self._select_queries(release, pool, rounds, student_PC, feature_PD)
            if len(query_Q) == 0:
                break
            round_values = values.select(query_Q)
            context = MechanismContext(
                num_queries=self.num_queries,
                rounds=rounds,
                round_index=round_index,
                num_failures=int((~release.answered_Q).sum()),
                num_answered=int(release.answered_Q.sum()),
                student_QC=None if student_PC is None else student_PC[query_Q],
            )
            answers = spending.accept(self.mechanism.release(round_values, spending.noise, context))
            spending.record_cost(answers.events)
            cell_P = len(release.query_Q) + round_values.cell_P if isinstance(round_values, CellHistogram) else None
            release = release.append_round(query_Q, answers, spending.incurred_events or (), cell_P)
            if isinstance(round_values, Votes | CellHistogram):
                # A mechanism that stops early, such as the sparse vector, answers a prefix of the queries.
                opened_votes.append(round_values.select(torch.arange(release.queries_per_round[-1])))
            self.progress(len(release.query_Q), self.num_queries)
        if opened_votes:
            counts_QC = torch.cat([votes.counts_QC for votes in opened_votes])
            self.opened_votes = replace(opened_votes[-1], counts_QC=counts_QC)
        return release if self.finish_release is None else self.finish_release(release)

    def _fit_guide(self, release: Release, pool: PublicPool) -> Student:
        """Fit the guide student to the answers so far. If it is to be released, it continues from the previous one."""
        assert self.guide_student is not None
        task = replace(make_student_task(self.spec, pool, release), guide=self.guide, search=self.search)
        student = self.guide_student.fit(task, seed=self.seed, device=self.device, progress=self.guide_progress)
        self.guide = student if self.releases_guide else None
        return student

    def _refit_values(self, student: Student, spending: Spending) -> SensitiveRecords:
        assert self.refit is not None
        values = self.refit(student)
        if len(values) != len(self.sensitive):
            raise ValueError("votes: the values of the next round must have one row for each public point")
        check_values(values.sensitivity, self.mechanism, spending)
        return values

    def _select_queries(
        self, release: Release, pool: PublicPool, rounds: int, student_PC: Tensor | None, feature_PD: Tensor | None
    ) -> Tensor:
        """Choose and check the queries of the next round, pool indices, int64 [Q]. The queries are public."""
        state = QueryState(
            spec=self.spec,
            pool_x=pool.x,
            query_Q=release.query_Q,
            label_Q=release.label_Q,
            num_remaining=self.num_queries - len(release.query_Q),
            num_rounds_left=rounds - len(release.queries_per_round),
            seed=self.seed,
            student_PC=student_PC,
            feature_PD=feature_PD,
            search=self.search,
        )
        query_Q = self.query.select(state).to("cpu", torch.int64)
        # The cost covers num_queries different queries.
        if len(query_Q) > state.num_remaining:
            raise ValueError(f"query strategy: chose {len(query_Q)} queries, but {state.num_remaining} remain")
        if len(query_Q) and (int(query_Q.min()) < 0 or int(query_Q.max()) >= len(pool)):
            raise ValueError("query strategy: chose a point outside the public pool")
        if len(torch.unique(query_Q)) < len(query_Q) or bool(torch.isin(query_Q, release.query_Q).any()):
            raise ValueError("query strategy: chose the same point twice")
        return query_Q


def open_counts(value: Any, mechanism: Mechanism, spending: Spending) -> NoisyCounts:
    """Open a sensitive table of counts with noise that was paid for, and record the cost."""
    check_values(value.sensitivity, mechanism, spending)
    context = MechanismContext(num_queries=len(value))
    answers = spending.accept(mechanism.release(value, spending.noise, context))
    spending.record_cost(answers.events)
    assert answers.noisy_counts is not None
    return answers.noisy_counts


def check_values(sensitivity: Sensitivity, mechanism: Mechanism, account: Budget | Spending) -> None:
    """Raise ValueError if the sensitivity exceeds the mechanism's, or has another adjacency than the account."""
    account.check_adjacency(sensitivity)
    check_sensitivity(sensitivity, mechanism.max_sensitivity, mechanism.name)
