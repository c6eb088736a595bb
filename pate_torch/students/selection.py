"""Choosing among several students by private records, at a price: the exponential mechanism over students.

A part of the private units is held out of every teacher's shard. Each candidate learns from the same released labels;
the exponential mechanism picks one by its errors on the held-out records, and the ledger is charged before it draws.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from pate_torch.accounting.events import BoundedRangeEvent, PrivacyEvent
from pate_torch.core import checks
from pate_torch.mechanisms.exponential import draw_model_index
from pate_torch.privacy.accounts import PURPOSE_STUDENT_CHOICE
from pate_torch.privacy.budget import Budget
from pate_torch.privacy.partition import hold_out, select_one_per_unit
from pate_torch.privacy.records import Dataset, PrivateRecords
from pate_torch.students.base import Student, StudentAlgorithm


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The exponential mechanism over students.

    Attributes:
        candidates: Name -> student algorithm, at least two.
        epsilon: Largest price of the choice.
        validation: Share of the private units held out, decided unit by unit through a keyed hash (under replace_one:
            by position), so that no record influences another's role.

    Guarantee: BoundedRange(epsilon), hence epsilon-DP, for units of one record; groups, which may own several errors,
    are refused. The price is added to that of the labels, though teachers and validation share no unit and the larger
    of the two would do under add_remove: the ledger composes by account, not by shard.
    Source: McSherry & Talwar 2007; see ``mechanisms.exponential.draw_model_index``.
    """

    name: str = "exponential"
    candidates: Mapping[str, StudentAlgorithm]
    epsilon: float = 0.5
    validation: float = 0.1

    def __post_init__(self) -> None:
        checks.one_of("selection.name", self.name, ("exponential",))
        checks.positive("selection.epsilon", self.epsilon)
        checks.between("selection.validation", self.validation, 0, 1, exclusive=True)
        if len(checks.mapping("selection.candidates", self.candidates)) < 2:
            raise checks.error("selection.candidates", list(self.candidates), "must name at least two students")

    def privacy_events(self) -> tuple[PrivacyEvent, ...]:
        """Return the price of one choice."""
        return (BoundedRangeEvent(eta=self.epsilon),)

    def hold_out(self, data: Dataset, adjacency: str, seed: int) -> tuple[Dataset, PrivateRecords]:
        """Split off the validation records: the data without them, and the held-out records.

        Raises:
            ValueError: Units are groups, or nothing is left.
        """
        private = data.private
        if private.unit != "record":
            problem = f"cannot protect {private.unit}: one group may own many errors"
            raise checks.error("selection", self.name, problem, "Use selection=none.")
        training, validation = hold_out(private, self.validation, adjacency, seed, "selection")
        if not (len(training) and len(validation)):
            raise checks.error("selection.validation", self.validation, "leaves no record on one side")
        return replace(data, private=training), validation

    def choose(
        self, fit: Callable[[str, StudentAlgorithm], Student], *, validation: PrivateRecords, budget: Budget
    ) -> tuple[str, Student, str]:
        """Train every candidate and choose one: its name, its student, and the id of the reservation.

        Args:
            fit: Trains one candidate on the released labels.
            validation: PRIVATE. The held-out records.
            budget: Budget that is charged.

        Raises:
            ValueError: The choice could not be charged; nothing has been trained.
        """
        budget.check_events(self.privacy_events())
        students = {name: fit(name, algorithm) for name, algorithm in self.candidates.items()}
        # Without unit ids, a unit is named by the content of its record: equal records are one unit.
        validation = select_one_per_unit(validation, budget.adjacency)
        errors = [
            int((student.compute_probabilities(validation.x).argmax(1) != validation.y).sum())
            for student in students.values()
        ]
        mechanism = f"selection:{self.name}"
        with budget.spend(self.privacy_events(), mechanism=mechanism, purpose=PURPOSE_STUDENT_CHOICE) as spending:
            winner = list(students)[
                draw_model_index(np.array(errors), self.epsilon, spending.noise, adjacency=budget.adjacency)
            ]
        return winner, students[winner], spending.id
