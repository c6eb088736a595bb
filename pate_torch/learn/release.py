"""Learning by an algorithm on a hypothesis class, as a private method: quoted, charged, learnt and released."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from pate_torch.accounting.events import PrivacyEvent
from pate_torch.accounting.formatting import format_delta
from pate_torch.core import checks
from pate_torch.core.progress import Stages
from pate_torch.learn import student as students
from pate_torch.learn.algorithms import ALGORITHMS, Algorithm, plan_events, sum_deltas
from pate_torch.learn.problem import LearnOptions, Problem, make_problems
from pate_torch.methods.base import MethodInputs, ModelRelease, PreparedMethod, PrivateMethod
from pate_torch.pac.sample import BelowGuaranteeWarning, NoisyVotesWarning
from pate_torch.privacy.accounts import PURPOSE_HYPOTHESIS
from pate_torch.privacy.budget import Spending
from pate_torch.privacy.facts import DatasetFacts
from pate_torch.privacy.records import PrivateRecords, PublicPool
from pate_torch.privacy.sensitive import Sensitivity
from pate_torch.privacy.unit_ids import make_position_ids


@dataclass(frozen=True, kw_only=True)
class HypothesisMethod(PrivateMethod):
    """An algorithm on a hypothesis class, whose hypothesis is released. Neighbors differ in one replaced record.

    Attributes:
        algorithm_name: Which of ``algorithms.ALGORITHMS``.
        options: What it is told.
        account_delta: Delta of the account; half of it is the release's where the options give none.
        seed: Of the order of the records, and of public draws.
        below_guarantee: Whether to go on where the theorem promises no accuracy for so few records.
        planned_events: The price, once there are data.
    """

    purpose: ClassVar[str] = PURPOSE_HYPOTHESIS
    price_advice: ClassVar[str] = "Take a smaller --epsilon"
    releases_model: ClassVar[bool] = True
    name: str = "hypothesis"
    algorithm_name: str
    options: LearnOptions
    account_delta: float
    seed: int = 0
    below_guarantee: bool = False
    planned_events: tuple[PrivacyEvent, ...] | None = None

    @property
    def algorithm(self) -> Algorithm:
        """The algorithm of that name."""
        return ALGORITHMS[self.algorithm_name]

    @property
    def mechanism_name(self) -> str:
        return self.algorithm_name

    @property
    def student_name(self) -> str:
        return "linear" if self.algorithm.is_linear else self.options.hypotheses

    @property
    def noise(self) -> str:
        return "torch"

    def make_problems(self, records: PrivateRecords, facts: DatasetFacts) -> list[Problem]:
        """PRIVATE. The problems of two classes that these records pose."""
        delta = self.account_delta / 2 if self.options.delta is None else self.options.delta
        return make_problems(records, facts, self.options, delta, self.seed)

    def complete(self, facts: DatasetFacts, stages: Stages) -> HypothesisMethod:
        """This method with its price, which follows from the public number of records, not from what they are.

        Raises:
            ValueError: A choice cannot work, or promises nothing for so few records.
        """
        facts.check_adjacency()
        return replace(self, planned_events=self._quote(self.make_problems(_make_placeholders(facts), facts), stages))

    def _quote(self, parts: list[Problem], stages: Stages) -> tuple[PrivacyEvent, ...]:
        """What all parts will be charged. Says, or refuses, what the theorem does not promise for so few records."""
        events: list[PrivacyEvent] = []
        with warnings.catch_warnings(record=True) as caught_warnings:
            warnings.simplefilter("always")
            for part in parts:
                events += plan_events(self.algorithm, part, self.noise)

        def list_messages(category: type[Warning]) -> list[str]:
            return list(dict.fromkeys(str(e.message) for e in caught_warnings if issubclass(e.category, category)))

        shortfalls = list_messages(BelowGuaranteeWarning)
        if shortfalls and not self.below_guarantee:
            fix = "Bring more records, ask for less (--alpha, --beta), or go on without that promise "
            raise ValueError(f"{' '.join(shortfalls)} {fix}(--below-guarantee).")
        for message in (*list_messages(NoisyVotesWarning), *shortfalls):
            stages.print_message(message)
        return tuple(events)

    def validate(self, facts: DatasetFacts) -> None:
        """Raise ValueError for a price that no account of this delta can hold."""
        if (delta_sum := sum_deltas(self.privacy_events(facts))) < self.account_delta:
            return
        fix = "Take --delta below the account's, or fewer --points."
        if self.algorithm_name in ("stable", "averaging"):
            fix = (
                "It is stability without an epsilon: take private-prediction, or fewer --points and a smaller --gamma."
            )
        problem = f"of this release alone is {delta_sum:.3g}, and the account's is {format_delta(self.account_delta)}"
        raise checks.error("delta", delta_sum, problem, fix)

    def privacy_events(self, facts: DatasetFacts) -> tuple[PrivacyEvent, ...]:
        assert self.planned_events is not None, "complete comes first"
        return self.planned_events

    def to_record(self, facts: DatasetFacts) -> dict[str, Any]:
        kind, classes = self.student_name, facts.spec.num_classes
        return {
            "num_teachers": 0,
            "mechanism": self.algorithm_name,
            "parameters": {"hypotheses": kind, "classes": classes, "alpha": self.options.alpha},
        }

    def prepare(self, inputs: MethodInputs) -> PreparedHypothesis:
        """PRIVATE. The problems that the records pose."""
        return PreparedHypothesis(self, inputs, self.make_problems(inputs.records, inputs.facts))


@dataclass(eq=False, repr=False)
class PreparedHypothesis(PreparedMethod):
    """PRIVATE. An algorithm with the problems that it is to solve.

    Attributes:
        method: The algorithm and what it is told.
        inputs: What the session gave.
        parts: PRIVATE. One problem, or one of each class against the rest.
    """

    method: HypothesisMethod
    inputs: MethodInputs
    parts: list[Problem]

    def release(self, pool: PublicPool, spending: Spending) -> ModelRelease:
        """Learn every part with noise that was paid for, and make one student of what was found."""
        algorithm, hypotheses = self.method.algorithm, []
        noise = _SharedReservation(self.method.noise, spending)
        progress = self.inputs.stages(f"Learning by {self.method.algorithm_name}")
        with self.inputs.clock("learning"), warnings.catch_warnings():
            for category in (BelowGuaranteeWarning, NoisyVotesWarning):
                warnings.simplefilter("ignore", category)
            for num_done, part in enumerate(self.parts, start=1):
                hypotheses.append(algorithm.learn(part, noise))
                progress(num_done, len(self.parts))
        make_student = students.make_logistic_student if algorithm.is_linear else students.make_rule_student
        return ModelRelease(spending.id, make_student(self.inputs.facts, hypotheses))


def _make_placeholders(facts: DatasetFacts) -> PrivateRecords:
    """As many records as there are, which is public under replace_one, all alike: a price follows from nothing else."""
    assert facts.num_units is not None
    x = torch.zeros(facts.num_units, *facts.spec.input_shape)
    return PrivateRecords(x, torch.zeros(len(x), dtype=torch.int64), make_position_ids(len(x)), facts.unit)


class _SharedReservation:
    """The noise provider of all parts of what is learnt, paid for by one reservation."""

    def __init__(self, kind: str, spending: Spending) -> None:
        self.kind, self.spending = kind, spending
        self._remaining_events = list(spending.reserved_events)

    def check_adjacency(self, sensitivity: Sensitivity) -> None:
        """Refuse a value under another adjacency than the account's."""
        self.spending.check_adjacency(sensitivity)

    @contextmanager
    def spend(
        self, events: Iterable[PrivacyEvent], *, mechanism: str, purpose: str = PURPOSE_HYPOTHESIS
    ) -> Iterator[Spending]:
        """The reservation's spending; a part that does not say what it incurred has incurred these events."""
        for event in events:
            self._remaining_events.remove(event)  # ValueError, before anything is drawn, for what was not reserved
        previous_events = self.spending.incurred_events
        yield self.spending
        if self.spending.incurred_events is previous_events:
            self.spending.record_cost(events)
