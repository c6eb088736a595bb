"""Private model selection: the exponential mechanism chooses one of several students.

A part of the private units is held out from all shards. Each candidate learns from the same released labels. The
exponential mechanism chooses a candidate by the numbers of errors on the held-out records, and the ledger is charged
before the noise is drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from pate_torch.accounting.events import BoundedRangeEvent, PrivacyEvent
from pate_torch.core import checks
from pate_torch.core.progress import do_nothing
from pate_torch.mechanisms.exponential import draw_model_index
from pate_torch.privacy.accounts import PURPOSE_STUDENT_CHOICE
from pate_torch.privacy.budget import Budget
from pate_torch.privacy.partition import hold_out, select_one_per_unit
from pate_torch.privacy.records import Dataset, PrivateRecords
from pate_torch.students.base import Student, StudentAlgorithm
from pate_torch.students.private_test import predict_each


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The exponential mechanism over students.

    Attributes:
        candidates: Student algorithms by name, at least two.
        epsilon: Privacy parameter of the choice.
        validation: Share of the private units that is held out. A keyed hash of the unit id (under replace_one: of the
            position) selects the units, so that no record influences the role of another record.

    Guarantee: BoundedRange(epsilon), hence epsilon-DP, for units of one record. Units with several records are refused,
    because one unit could change several errors. The ledger adds the cost of the choice to the cost of the labels.
    Source: McSherry and Talwar 2007; see ``mechanisms.exponential.draw_model_index``.
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
        return (BoundedRangeEvent(eta=self.epsilon),)

    def hold_out(self, data: Dataset, adjacency: str, seed: int) -> tuple[Dataset, PrivateRecords]:
        """Split the private records: return the data with the training records, and the validation records.

        Raise ValueError if units may own several records. A part without records refuses no run.
        """
        private = data.private
        if private.unit != "record":
            problem = f"protects single records, but the privacy unit is {private.unit}"
            raise checks.error("selection", self.name, problem, "Use selection=none.")
        training, validation = hold_out(private, self.validation, adjacency, seed, "selection")
        return replace(data, private=training), validation

    def choose(
        self, fit: Callable[[str, StudentAlgorithm], Student], *, validation: PrivateRecords, budget: Budget
    ) -> tuple[str, Student, str]:
        """Train all candidates and choose one. Return its name, its student, and the id of the ledger entry.

        ``fit`` trains one candidate on the released labels, and ``validation`` are the PRIVATE held-out records. Raise
        ValueError, before a candidate is trained, if the budget does not suffice.
        """
        budget.check_events(self.privacy_events())
        students = {name: fit(name, algorithm) for name, algorithm in self.candidates.items()}
        # If the id of a unit is a hash of its record, equal records are one unit, which may count only once.
        validation = select_one_per_unit(validation, budget.adjacency)
        predictions = [predict_each(student, validation.x, do_nothing) for student in students.values()]
        errors_M = np.array([int((prediction_N != validation.y).sum()) for prediction_N in predictions])
        mechanism = f"selection:{self.name}"
        with budget.spend(self.privacy_events(), mechanism=mechanism, purpose=PURPOSE_STUDENT_CHOICE) as spending:
            index = draw_model_index(errors_M, self.epsilon, spending.noise, adjacency=budget.adjacency)
        winner = list(students)[index]
        return winner, students[winner], spending.id
